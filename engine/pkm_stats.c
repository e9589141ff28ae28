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

/* z: [n] not yet normalised, of slots in ascending order; overwritten. The others of n_slot slots
 * have 0, which adds nothing to a sum and, sorted, comes first. */
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

/* For fewer look-ups than slots. */
static enum err_code sums_of_few(const int32_t *slots, const float *weights, int64_t n,
                                 pkm_sum_fn *fn, void *ctx, struct err *err)
{
    uint64_t *const key = malloc((size_t)(n + 1) * sizeof *key);
    if (key == NULL) {
        return err_set(err, ERR_MEMORY, "no memory for the sums of %lld look-ups", (long long)n);
    }
    for (int64_t i = 0; i < n; i++) {
        key[i] = (uint64_t)slots[i] << 32 | (uint64_t)i; /* there are fewer slots than 2^31 */
    }
    qsort(key, (size_t)n, sizeof *key, compare_key);
    double weight = 0;
    for (int64_t i = 0, first = 0; i < n; i++) {
        weight += (double)weights[key[i] & UINT32_MAX];
        if (i == n - 1 || key[i + 1] >> 32 != key[i] >> 32) {
            fn(ctx, (int32_t)(key[i] >> 32), i + 1 - first, weight);
            first = i + 1;
            weight = 0;
        }
    }
    free(key);
    return ERR_OK;
}

enum err_code pkm_sums(const int32_t *slots, const float *weights, int64_t n, int64_t n_slot,
                       pkm_sum_fn *fn, void *ctx, struct err *err)
{
    if (n < n_slot) {
        return sums_of_few(slots, weights, n, fn, ctx, err);
    }
    struct {
        double weight;
        int64_t n;
    } *const sum = calloc((size_t)n_slot, sizeof *sum);
    if (sum == NULL) {
        return err_set(err, ERR_MEMORY, "no memory for the sums of %lld slots", (long long)n_slot);
    }
    for (int64_t i = 0; i < n; i++) {
        sum[slots[i]].weight += (double)weights[i];
        sum[slots[i]].n++;
    }
    for (int64_t slot = 0; slot < n_slot; slot++) {
        if (sum[slot].n > 0) {
            fn(ctx, (int32_t)slot, sum[slot].n, sum[slot].weight);
        }
    }
    free(sum);
    return ERR_OK;
}

/* Sums of the slots that were looked up. */
struct stats_sums {
    double *weight, *count;
    int64_t n;
};

static void add_sum(void *ctx, int32_t slot, int64_t n, double weight)
{
    (void)slot;
    struct stats_sums *const sums = ctx;
    sums->weight[sums->n] = weight;
    sums->count[sums->n++] = (double)n;
}

enum err_code pkm_stats_of(const struct pkm_trace *trace, int64_t n_slot, struct pkm_stats *stats,
                           struct err *err)
{
    CHECK(n_slot > 0);
    const bool is_summed = trace->count != NULL;
    const int64_t n_max = is_summed || trace->lookups > n_slot ? n_slot : trace->lookups;
    double *const sums = malloc(2 * (size_t)(n_max + 1) * sizeof *sums);
    if (sums == NULL) {
        return err_set(err, ERR_MEMORY, "no memory for the statistics of %lld slots",
                       (long long)n_max);
    }
    struct stats_sums used = {.weight = sums, .count = sums + n_max};
    for (int64_t i = 0; is_summed && i < n_slot; i++) {
        add_sum(&used, (int32_t)i, trace->count[i], trace->weight[i]);
    }
    const enum err_code code = is_summed ? ERR_OK
                                         : pkm_sums(trace->slots, trace->weights, trace->lookups,
                                                    n_slot, add_sum, &used, err);
    if (code == ERR_OK) {
        stats_of(used.weight, used.count, used.n, n_slot, stats);
        stats->lookups = trace->lookups;
    }
    free(sums);
    return code;
}
