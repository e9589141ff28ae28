/* Drawing from a row of logits: what outputs.c, sample.c and sample_rank.c share. */
#ifndef KERNELS_CPU_SAMPLE_H
#define KERNELS_CPU_SAMPLE_H

#include "kernels/cpu/cpu.h"

/* A row of logits, and what is known of it. */
struct logit_row {
    const float *z; /* [n_vocab] */
    int n_vocab;
    const struct logit_part *part; /* [cpu_n_block], or NULL */
    const float *next;             /* the row that this thread probably draws from next, or NULL */
};

/* top_k, top_p or min_p leave tokens out. */
static inline bool draw_is_filtered(const struct sample_params *p)
{
    return p->top_k != 0 || p->top_p < 1 || p->min_p > 0;
}

/* The sums of a row's blocks, of e^z, serve this draw. */
static inline bool draw_takes_sums(const struct sample_params *p)
{
    return p->temperature == 1 && !draw_is_filtered(p);
}

/* Draws the token of output out, which asks for OUT_SAMPLE. */
int32_t cpu_draw(const struct cpu_backend *cpu, int thread, const struct step *step, int out,
                 const struct logit_row *row);

/* One row that is being drawn from. */
struct draw {
    const struct simd_kernels *simd;
    const struct sample_params *params;
    const float *z;    /* adjusted logits [n_vocab]; none is NaN or +infinity */
    const float *next; /* the row that this thread probably draws from next, or NULL */
    int n_vocab;
    float max;
    const struct logit_part *part; /* of z [cpu_n_block], or NULL */
    struct vocab_scratch scratch;
};

enum { NOT_DRAWN = -1 };

/* Σ e^((z - max) / temperature) of n tokens. */
static inline double draw_sum(const struct draw *d, int from, int n)
{
    return d->simd->logit_sum(d->z + from, d->next != NULL ? d->next + from : NULL, n, d->max,
                              1.0f / d->params->temperature);
}

/* Draws among what top_k, top_p and min_p keep, best first. */
int32_t cpu_draw_by_rank(const struct draw *d);

#endif
