/* Sums over all traffic: see pkm_totals.h. */
#include "engine/pkm_totals.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Written by the engine thread alone. */
struct pkm_total {
    _Atomic double weight; /* sum over its look-ups */
    atomic_llong count;    /* accesses */
};

enum err_code pkm_totals_open(struct pkm_totals *totals, const struct model_info *info,
                              struct err *err)
{
    *totals = (struct pkm_totals){0};
    for (int m = 0; m < info->n_memory; m++) {
        const size_t n_hit = TOTALS_ROW_MAX * (size_t)model_pkm_columns(&info->memory[m]);
        const size_t n_slot = (size_t)info->memory[m].n_slot;
        totals->total[m] = calloc(n_slot, sizeof *totals->total[m]);
        totals->slots[m] = malloc(n_hit * sizeof *totals->slots[m]);
        totals->weights[m] = malloc(n_hit * sizeof *totals->weights[m]);
        if (totals->total[m] == NULL || totals->slots[m] == NULL || totals->weights[m] == NULL) {
            pkm_totals_close(totals);
            return err_set(err, ERR_MEMORY, "no memory for the totals of %zu memory slots", n_slot);
        }
    }
    return ERR_OK;
}

void pkm_totals_close(struct pkm_totals *totals)
{
    for (int m = 0; m < MODEL_PKM_MAX; m++) {
        free(totals->total[m]);
        free(totals->slots[m]);
        free(totals->weights[m]);
    }
    *totals = (struct pkm_totals){0};
}

int pkm_totals_due(struct pkm_totals *totals, int n_tok, int *first)
{
    totals->n_due += n_tok;
    int n = totals->n_due / TOTALS_EVERY;
    totals->n_due %= TOTALS_EVERY;
    n = n < TOTALS_ROW_MAX ? n : TOTALS_ROW_MAX;
    n = n < n_tok ? n : n_tok;
    if (n > 0) {
        /* Multiples of the golden ratio are spread evenly, whatever the sizes of the steps. */
        const uint64_t place = (uint64_t)(totals->turn++ * 2654435769u);
        *first = (int)(place * (uint64_t)(n_tok - n + 1) >> 32);
    }
    return n;
}

void pkm_totals_take(struct pkm_totals *totals, const struct model_info *info, int m, int n,
                     const int32_t *slots, const float *weights)
{
    const size_t n_hit = (size_t)n * (size_t)model_pkm_columns(&info->memory[m]);
    CHECK(totals->n_row == 0 || (m > 0 && totals->n_row == n));
    memcpy(totals->slots[m], slots, n_hit * sizeof *slots);
    memcpy(totals->weights[m], weights, n_hit * sizeof *weights);
    totals->n_row = n;
}

void pkm_totals_add(struct pkm_totals *totals, const struct model_info *info)
{
    for (int m = 0; m < info->n_memory; m++) {
        const size_t n_hit = (size_t)totals->n_row * (size_t)model_pkm_columns(&info->memory[m]);
        for (size_t i = 0; i < n_hit; i++) {
            const float sampled = totals->weights[m][i];
            const int32_t slot = totals->slots[m][i];
            if (isnan(sampled)) {
                continue; /* a NaN would stay in the sum for ever */
            }
            CHECK(slot >= 0 && slot < info->memory[m].n_slot);
            struct pkm_total *const total = &totals->total[m][slot];
            const double weight = atomic_load_explicit(&total->weight, memory_order_relaxed);
            const long long count = atomic_load_explicit(&total->count, memory_order_relaxed);
            atomic_store_explicit(&total->weight, weight + (double)sampled, memory_order_relaxed);
            atomic_store_explicit(&total->count, count + 1, memory_order_relaxed);
        }
    }
    (void)atomic_fetch_add_explicit(&totals->n_position, totals->n_row, memory_order_release);
    totals->n_row = 0;
}

enum err_code pkm_totals_stats(const struct pkm_totals *totals, const struct model_info *info,
                               int m, struct pkm_stats *stats, struct err *err)
{
    CHECK(m >= 0 && m < info->n_memory);
    const int64_t n_slot = info->memory[m].n_slot;
    double *const sums = malloc(2 * (size_t)n_slot * sizeof *sums);
    if (sums == NULL) {
        return err_set(err, ERR_MEMORY, "no memory for the statistics of %lld slots",
                       (long long)n_slot);
    }
    const int64_t n = atomic_load_explicit(&totals->n_position, memory_order_acquire);
    for (int64_t i = 0; i < n_slot; i++) {
        const struct pkm_total *const total = &totals->total[m][i];
        sums[i] = atomic_load_explicit(&total->weight, memory_order_relaxed);
        sums[n_slot + i] = (double)atomic_load_explicit(&total->count, memory_order_relaxed);
    }
    pkm_stats_of_sums(sums, sums + n_slot, n_slot, stats);
    stats->lookups = n * model_pkm_columns(&info->memory[m]);
    free(sums);
    return ERR_OK;
}
