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

/* z: [n] not yet normalised; overwritten. */
static void distribution_stats(double *z, int64_t n, double *kl, double *gini, int64_t top[3])
{
    double total = 0;
    bool is_signed = false;
    for (int64_t i = 0; i < n; i++) {
        total += z[i];
        is_signed = is_signed || z[i] < 0;
    }
    *kl = *gini = NAN;
    top[0] = top[1] = top[2] = is_signed ? -1 : 0;
    if (is_signed || !(total > 0)) {
        return;
    }
    double entropy = 0;
    for (int64_t i = 0; i < n; i++) {
        z[i] /= total;
        entropy += z[i] > 0 ? z[i] * log(z[i]) : 0;
    }
    *kl = log((double)n) + entropy;
    qsort(z, (size_t)n, sizeof *z, compare_double);
    double sum = 0;
    double sum_of_sums = 0;
    for (int64_t i = 0; i < n; i++) {
        sum += z[i];
        z[i] = sum;
        sum_of_sums += sum;
    }
    *gini = 1 - 2 * sum_of_sums / (double)n;
    top[0] = slots_above(z, n, 0.5);
    top[1] = slots_above(z, n, 0.1);
    top[2] = slots_above(z, n, 0.01);
}

void pkm_stats_of_sums(double *weight, double *count, int64_t n_slot, struct pkm_stats *stats)
{
    CHECK(n_slot > 0);
    int64_t n_used = 0;
    for (int64_t i = 0; i < n_slot; i++) {
        n_used += weight[i] > 0 || weight[i] < 0;
    }
    int64_t top[3];
    *stats = (struct pkm_stats){.used = (double)n_used / (double)n_slot};
    distribution_stats(weight, n_slot, &stats->kl_w, &stats->gini_w, top);
    stats->top50_w = top[0];
    stats->top90_w = top[1];
    stats->top99_w = top[2];
    distribution_stats(count, n_slot, &stats->kl_u, &stats->gini_u, top);
    stats->top50_u = top[0];
    stats->top90_u = top[1];
    stats->top99_u = top[2];
}

enum err_code pkm_stats_of(const struct pkm_trace *trace, int64_t n_slot, struct pkm_stats *stats,
                           struct err *err)
{
    CHECK(n_slot > 0);
    *stats = (struct pkm_stats){.lookups = trace->lookups};
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
