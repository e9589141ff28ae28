/* What sample.c and sample_rank.c share. */
#ifndef KERNELS_CPU_SAMPLE_H
#define KERNELS_CPU_SAMPLE_H

#include "kernels/cpu/cpu.h"

/* One row that is being drawn from. */
struct draw {
    const struct simd_kernels *simd;
    const struct sample_params *params;
    const float *z;    /* adjusted logits [n_vocab]; none is NaN or +infinity */
    const float *next; /* the row that this thread probably does next, or NULL */
    int n_vocab;
    float max;
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
