/* Drawing the next token of a row.
 *
 * Taking the largest logit, or drawing from the whole distribution, needs no order: the blocks of
 * the row are summed and stepped over. With top_k, top_p or min_p see sample_rank.c. Rare cases
 * (allow lists, typical_p, logits that are no distribution) are left to ref_sample_row. */
#include "kernels/cpu/sample.h"

#include <math.h>
#include <string.h>

enum { WALK = 64 }; /* tokens added up at a time while looking for the drawn one */

/* Scratch of the ops on the vocabulary, carved from a thread's slice. */
struct vocab_scratch cpu_vocab_scratch(const struct cpu_backend *cpu, int thread,
                                       const struct step_limits *limits)
{
    const size_t n_vocab = (size_t)limits->n_vocab;
    const size_t n_room = n_vocab + LOGIT_PAD;
    const size_t n_select = cpu_select_max(limits) + SELECT_SLACK + SELECT_PAD;
    float *const words = cpu_slice(cpu, thread);
    float *const room = words + 2 * n_vocab;
    float *const select = room + 4 * n_room;
    return (struct vocab_scratch){
        .z = words,
        .share = words + n_vocab,
        .room = {{room, room + n_room}, {room + 2 * n_room, room + 3 * n_room}},
        .select = {.score = select, .id = (int32_t *)(void *)(select + n_select)},
    };
}

size_t cpu_vocab_slice_bytes(const struct step_limits *limits)
{
    const size_t n_select = cpu_select_max(limits) + SELECT_SLACK + SELECT_PAD;
    return (6 * (size_t)limits->n_vocab + 4 * LOGIT_PAD + 2 * n_select) * sizeof(float);
}

/* Copies the row and applies its adjustments, if there are any. */
static const float *adjust(const struct step *step, const struct sample_params *p,
                           const float *logits, int n_vocab, float *z)
{
    const struct sample_adjust *const list = step->adjust + p->adjust_first;
    if (p->n_adjust == 0) {
        return logits;
    }
    memcpy(z, logits, (size_t)n_vocab * sizeof *z);
    for (int i = 0; i < p->n_adjust; i++) {
        z[list[i].token] = ref_adjusted(z[list[i].token], &list[i], p);
    }
    return z;
}

/* Finds the largest logit, and in first a token that does not come after it. False if no token can
 * be drawn. */
static bool find_max(struct draw *d, int *first)
{
    *first = 0;
    if (d->part == NULL) {
        return d->simd->logit_max(&d->max, d->z, d->n_vocab) && d->max > -INFINITY;
    }
    bool is_good = true;
    int best = 0; /* the first block that holds the largest one */
    for (int b = 0; b < cpu_n_block(d->n_vocab); b++) {
        is_good = is_good && d->part[b].is_good;
        best = d->part[b].max > d->part[best].max ? b : best;
    }
    d->max = d->part[best].max;
    *first = cpu_block_first(d->n_vocab, best);
    return is_good && d->max > -INFINITY;
}

/* Draws among all tokens in id order: the first whose cumulative share exceeds u. Blocks, whose
 * sums may be known, then runs of WALK tokens, are stepped over by their sums. */
static int32_t draw_by_id(const struct draw *d)
{
    const struct logit_part *const part = d->part;
    const bool is_summed = part != NULL && draw_takes_sums(d->params);
    const int n_block = cpu_n_block(d->n_vocab);
    double block_sum[LOGIT_BLOCKS];
    double total = 0;
    for (int b = 0; b < n_block; b++) {
        const int from = cpu_block_first(d->n_vocab, b);
        block_sum[b] = is_summed ? exp((double)part[b].base - (double)d->max) * part[b].sum
                                 : draw_sum(d, from, cpu_block_first(d->n_vocab, b + 1) - from);
        total += block_sum[b];
    }
    const double goal = d->params->u * total;
    double sum = 0;
    int32_t last = NOT_DRAWN;
    for (int b = 0; b < n_block; b++) {
        const int end = cpu_block_first(d->n_vocab, b + 1);
        if (sum + block_sum[b] <= goal && b < n_block - 1) {
            sum += block_sum[b];
            continue;
        }
        for (int from = cpu_block_first(d->n_vocab, b); from < end; from += WALK) {
            const int n = end - from < WALK ? end - from : WALK;
            const double run = draw_sum(d, from, n);
            if (sum + run <= goal && from + n < end) {
                sum += run;
                continue;
            }
            for (int id = from; id < from + n; id++) {
                const double share = draw_sum(d, id, 1);
                last = share > 0 ? id : last;
                sum += share;
                if (share > 0 && sum > goal) {
                    return id;
                }
            }
        }
    }
    return last;
}

static int32_t draw_row(struct draw *d)
{
    const struct sample_params *const p = d->params;
    int first = 0;
    if (!find_max(d, &first)) {
        return NOT_DRAWN;
    }
    if (p->temperature == 0) {
        return first + d->simd->logit_find(d->z + first, d->n_vocab - first, d->max, 0);
    }
    if (!isfinite(1.0f / p->temperature)) {
        return NOT_DRAWN;
    }
    return draw_is_filtered(p) ? cpu_draw_by_rank(d) : draw_by_id(d);
}

int32_t cpu_draw(const struct cpu_backend *cpu, int thread, const struct step *step, int out,
                 const struct logit_row *row)
{
    const struct sample_params *const p = &step->sample[out];
    struct draw d = {.simd = cpu->simd,
                     .params = p,
                     .next = row->next,
                     .n_vocab = row->n_vocab,
                     .scratch = cpu_vocab_scratch(cpu, thread, &step->limits)};
    int32_t id = NOT_DRAWN;
    if (p->n_allow == 0 && p->typical_p == 0) {
        d.z = adjust(step, p, row->z, row->n_vocab, d.scratch.z);
        d.part = d.z == row->z ? row->part : NULL;
        id = draw_row(&d);
    }
    if (id == NOT_DRAWN) { /* the adjusted logits again, in a buffer whose contents nobody needs any
                            * more */
        int32_t *const candidate = (int32_t *)(void *)d.scratch.share;
        id = ref_sample_row(step, out, row->z, row->n_vocab, d.scratch.z, candidate);
    }
    return id;
}
