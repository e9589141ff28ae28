/* How a memory was used: see pkm_stats.h. */
#include "engine/pkm_stats.h"

#include <math.h>
#include <stdlib.h>

static int compare_double(const void *a, const void *b)
{
    const double x = *(const double *)a;
    const double y = *(const double *)b;
    return (x > y) - (x < y);
}

static int64_t slots_above(const double *sum, int64_t n, double from)
{
    int64_t low = 0;
    int64_t high = n;
    while (low < high) { /* first index with sum >= from; sums ascend */
        const int64_t mid = low + (high - low) / 2;
        if (sum[mid] >= from) {
            high = mid;
        } else {
            low = mid + 1;
        }
    }
    return n - low;
}

/* z: [n] not yet normalised, of slots in ascending order; overwritten. The others of n_slot slots have 0, which adds
 * nothing to a sum and, sorted, comes first. */
static void distribution_stats(double *z, int64_t n, int64_t n_slot, double *kl, double *gini,
                               int64_t top[3])
{
    double total = 0;
    bool is_signed = false;
    int64_t n_used = 0;
    for (int64_t i = 0; i < n; i++) {
        total += z[i];
        is_signed = is_signed || z[i] < 0;
        z[n_used] = z[i];
        n_used += z[i] > 0 ? 1 : 0;
    }
    *kl = *gini = NAN;
    top[0] = top[1] = top[2] = is_signed ? -1 : 0;
    if (is_signed || !(total > 0)) {
        return;
    }
    double entropy = 0;
    for (int64_t i = 0; i < n_used; i++) {
        z[i] /= total;
        entropy += z[i] > 0 ? z[i] * log(z[i]) : 0;
    }
    *kl = log((double)n_slot) + entropy;
    qsort(z, (size_t)n_used, sizeof *z, compare_double);
    double sum = 0;
    double sum_of_sums = 0;
    for (int64_t i = 0; i < n_used; i++) {
        sum += z[i];
        z[i] = sum;
        sum_of_sums += sum;
    }
    *gini = 1 - 2 * sum_of_sums / (double)n_slot;
    top[0] = slots_above(z, n_used, 0.5);
    top[1] = slots_above(z, n_used, 0.1);
    top[2] = slots_above(z, n_used, 0.01);
}

/* Of n slots in ascending order; the others have no look-up. */
static void stats_of(double *weight, double *count, int64_t n, int64_t n_slot,
                     struct pkm_stats *stats)
{
    CHECK(n_slot > 0);
    int64_t n_used = 0;
    for (int64_t i = 0; i < n; i++) {
        n_used += weight[i] > 0 || weight[i] < 0;
    }
    int64_t top[3];
    *stats = (struct pkm_stats){.used = (double)n_used / (double)n_slot};
    distribution_stats(weight, n, n_slot, &stats->kl_w, &stats->gini_w, top);
    stats->top50_w = top[0];
    stats->top90_w = top[1];
    stats->top99_w = top[2];
    distribution_stats(count, n, n_slot, &stats->kl_u, &stats->gini_u, top);
    stats->top50_u = top[0];
    stats->top90_u = top[1];
    stats->top99_u = top[2];
}

void pkm_stats_of_sums(double *weight, double *count, int64_t n_slot, struct pkm_stats *stats)
{
    stats_of(weight, count, n_slot, n_slot, stats);
}

static int compare_key(const void *a, const void *b)
{
    const uint64_t x = *(const uint64_t *)a;
    const uint64_t y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

/* For a trace of fewer look-ups than there are slots: time and memory by the look-ups, not by the table. */
static enum err_code stats_of_few(const struct pkm_trace *trace, int64_t n_slot,
                                  struct pkm_stats *stats, struct err *err)
{
    const size_t n_lookup = (size_t)trace->lookups;
    uint64_t *const key = malloc((n_lookup + 1) * (sizeof *key + 2 * sizeof(double)));
    if (key == NULL) {
        return err_set(err, ERR_MEMORY, "no memory for the statistics of %zu look-ups", n_lookup);
    }
    double *const weight = (double *)(key + n_lookup);
    double *const count = weight + n_lookup;
    for (size_t i = 0; i < n_lookup; i++) {
        key[i] = (uint64_t)trace->slots[i] << 32 | i; /* there are fewer slots than 2^31 */
    }
    qsort(key, n_lookup, sizeof *key, compare_key);
    int64_t n = 0;
    for (size_t i = 0; i < n_lookup; i++) {
        if (i == 0 || key[i] >> 32 != key[i - 1] >> 32) {
            weight[n] = count[n] = 0;
            n++;
        }
        weight[n - 1] += (double)trace->weights[key[i] & UINT32_MAX]; /* as the look-ups came */
        count[n - 1] += 1;
    }
    stats_of(weight, count, n, n_slot, stats);
    free(key);
    return ERR_OK;
}

enum err_code pkm_stats_of(const struct pkm_trace *trace, int64_t n_slot, struct pkm_stats *stats,
                           struct err *err)
{
    CHECK(n_slot > 0);
    if (trace->count == NULL && trace->lookups < n_slot) {
        const enum err_code code = stats_of_few(trace, n_slot, stats, err);
        stats->lookups = trace->lookups;
        return code;
    }
    double *const sums = calloc(2 * (size_t)n_slot, sizeof *sums);
    if (sums == NULL) {
        return err_set(err, ERR_MEMORY, "no memory for the statistics of %lld slots",
                       (long long)n_slot);
    }
    for (int64_t i = 0; trace->count != NULL && i < n_slot; i++) {
        sums[i] = trace->weight[i];
        sums[n_slot + i] = trace->count[i];
    }
    for (int64_t i = 0; trace->count == NULL && i < trace->lookups; i++) {
        sums[trace->slots[i]] += (double)trace->weights[i]; /* in the order of the look-ups */
        sums[n_slot + trace->slots[i]] += 1;
    }
    pkm_stats_of_sums(sums, sums + n_slot, n_slot, stats);
    stats->lookups = trace->lookups;
    free(sums);
    return ERR_OK;
}
