/* How a memory was used: the definitions of the reference evaluator and of the paper's section 4.2.
 * Called by the front ends on traces that the engine filled. With z the weights of a slot, summed
 * over all lookups and divided by the total (by weight), or the same with every access counting 1
 * (by count), in double:
 *   used  = share of the slots with z != 0
 *   kl    = log S + Σ z log z         (0 = all slots alike, log S = one slot alone)
 *   gini  = 1 - 2 · mean of the cumulative sums of ascending z
 *   topP  = S - p, p the first index at which that cumulative sum reaches 1 - P/100
 * Weights of both signs (memories without a softmax) are no distribution: what is by weight is then
 * undefined, as it is where nothing was looked up. */
#ifndef ENGINE_PKM_STATS_H
#define ENGINE_PKM_STATS_H

#include "engine/request.h"

struct pkm_stats {
    int64_t lookups;
    double used;       /* share of slots with non-zero weight */
    double kl_w, kl_u; /* log S + Σ z log z, nats: by weight, by count; NaN where undefined */
    double gini_w, gini_u;
    int64_t top50_w, top90_w, top99_w, top50_u, top90_u, top99_u; /* -1: undefined */
};
/* A slot with a look-up: how many it had, and the sum of their weights. */
typedef void pkm_sum_fn(void *ctx, int32_t slot, int64_t n, double weight);
/* Adds up n look-ups in a table of n_slot slots, in the order they came, and calls fn for each slot
 * that has one, in ascending order. Time and memory go by the look-ups, or by the slots if they are
 * fewer. ERR_MEMORY. */
enum err_code pkm_sums(const int32_t *slots, const float *weights, int64_t n, int64_t n_slot,
                       pkm_sum_fn *fn, void *ctx, struct err *err);
/* scratch: malloc'd inside; returns ERR_MEMORY if that fails. */
enum err_code pkm_stats_of(const struct pkm_trace *trace, int64_t n_slot, struct pkm_stats *stats,
                           struct err *err);
/* The same of plain sums per slot, which are overwritten; lookups is left 0. */
void pkm_stats_of_sums(double *weight, double *count, int64_t n_slot, struct pkm_stats *stats);

#endif
