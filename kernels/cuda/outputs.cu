/* Log-probability and rank of a target, the best tokens and the entropy of rows of logits.
 *
 * logprobs_groups (grid: groups of ids / 8, rows; a warp per group) leaves for each group its
 * largest logit m, Σ exp(z - m), Σ exp(z - m)(z - m) and the number of tokens before the target.
 * logprobs_rows (grid: rows) merges the groups of a row, always by the same tree, and lists the
 * best tokens (vocab.cuh) where they are wanted. With M the largest logit and
 *   L = log Σ exp(z - M),   log p(i) = z(i) - M - L,
 *   entropy = L - Σ exp(z - M)(z - M) / Σ exp(z - M).
 *
 * Bytes: 4 · n_vocab per row, and for the best tokens the few groups that hold them once more, from
 * the L2. Operations: an exponential and about 20 others per logit. Bound: memory for many rows;
 * for one row the latency of two launches. Share of the bound reached: not measured yet. */
#include "kernels/cuda/vocab.cuh"

namespace
{

enum { OUT_OF_LOGITS = OUT_LOGPROB | OUT_TOP | OUT_ENTROPY };

/* Scratch of logprobs: by row, four numbers per group. max is NaN if a logit of the group is NaN or
 * +infinity. */

struct group_parts {
    float *max, *sum, *moment;
    int32_t *n_before;
};

__device__ __forceinline__ struct group_parts parts_of(const struct vocab_room &room, int row)
{
    float *const data = room.data + static_cast<size_t>(row) * room.row_floats;
    return {data, data + room.n_group, data + 2 * room.n_group,
            reinterpret_cast<int32_t *>(data + 3 * room.n_group)};
}

__device__ __forceinline__ int target_of(const struct step_view *view, int out)
{
    const int target = view->target[out];
    return target == TARGET_SAMPLED ? view->out_token[out] : target;
}

/* How many of the warp's logits come before the target's. */
__device__ __forceinline__ int count_before(const float (&v)[VOCAB_LANE], int n, int group, float z,
                                            int target)
{
    int n_before = 0;
#pragma unroll
    for (int i = 0; i < VOCAB_LANE; i++) {
        const int id = vocab_id(group, i);
        n_before += id < n && (v[i] > z || (v[i] == z && id < target)) ? 1 : 0;
    }
    return __reduce_add_sync(VOCAB_ALL_LANES, n_before);
}

__global__ void __launch_bounds__(VOCAB_SPREAD)
    logprobs_groups(struct vocab_room room, const float *logits, int64_t stride,
                    const struct step_view *view, int first)
{
    const int row = static_cast<int>(blockIdx.y);
    grid_wait();
    const int want = view->out_want[first + row];
    const int group = static_cast<int>(blockIdx.x * VOCAB_SPREAD_GROUPS + threadIdx.x / VOCAB_WARP);
    if ((want & OUT_OF_LOGITS) == 0 || group >= room.n_group) {
        return;
    }
    const float *const z = logits + row * stride;
    const struct group_parts parts = parts_of(room, row);
    float v[VOCAB_LANE];
    vocab_load(v, z, room.n_vocab, group, vocab_is_aligned(z));
    const bool is_broken = vocab_is_broken(v);
    const float max = vocab_group_max(v);
    int n_before = 0;
    if ((want & OUT_LOGPROB) != 0) {
        const int target = target_of(view, first + row);
        n_before = count_before(v, room.n_vocab, group, z[target], target);
    }
    float sum = 0;
    float moment = 0;
    if (fabsf(max) < INFINITY) {
        const struct vocab_share share = {max, 1.0f, 0.0f};
        float term[VOCAB_LANE];
#pragma unroll
        for (int i = 0; i < VOCAB_LANE; i++) {
            const float d = v[i] - max;
            v[i] = vocab_share(share, v[i]);
            term[i] = v[i] > 0 ? v[i] * d : 0; /* 0 · -infinity is no number */
        }
        sum = vocab_group_sum(v);
        moment = (want & OUT_ENTROPY) != 0 ? vocab_group_sum(term) : 0;
    }
    if (vocab_lane() == 0) {
        parts.max[group] = is_broken ? NAN : max;
        parts.sum[group] = sum;
        parts.moment[group] = moment;
        parts.n_before[group] = n_before;
    }
}

/* ---- by row --------------------------------------------------------------------------------- */

/* A row's distribution: log p(i) = z[i] - max - log_total. */
struct distribution {
    double max;
    double log_total; /* NaN if the logits have no distribution */
    double entropy;
    int n_before;
};

__device__ struct distribution merge_groups(const struct group_parts &parts, int n_group)
{
    uint32_t max_key = 0;
    bool is_good = true;
    for (int g = static_cast<int>(threadIdx.x); g < n_group; g += VOCAB_BLOCK) {
        const uint32_t key = vocab_key(parts.max[g]);
        is_good = is_good && !isnan(parts.max[g]);
        max_key = key > max_key ? key : max_key;
    }
    max_key = vocab_block_max(is_good ? max_key : UINT32_MAX);
    if (max_key == UINT32_MAX || max_key == vocab_key(-INFINITY)) {
        return {NAN, NAN, NAN, -1};
    }
    const struct vocab_share share = {vocab_logit(max_key), 1.0f, 0.0f};
    double total = 0;
    double moment = 0;
    unsigned long long n_before = 0;
    for (int g = static_cast<int>(threadIdx.x); g < n_group; g += VOCAB_BLOCK) {
        const double scale = static_cast<double>(vocab_share(share, parts.max[g]));
        if (scale > 0) { /* from the group's maximum to the row's */
            const double down = static_cast<double>(parts.max[g]) - static_cast<double>(share.max);
            const double sum = static_cast<double>(parts.sum[g]);
            total += scale * sum;
            moment += scale * (static_cast<double>(parts.moment[g]) + down * sum);
        }
        n_before += static_cast<unsigned long long>(parts.n_before[g]);
    }
    total = vocab_block_sum(total);
    moment = vocab_block_sum(moment);
    struct distribution d = {};
    d.max = static_cast<double>(share.max);
    d.log_total = log(total);
    d.entropy = d.log_total - moment / total;
    d.n_before = static_cast<int>(vocab_block_sum(n_before));
    return d;
}

__device__ __forceinline__ float logprob(const struct distribution &d, float z)
{
    return static_cast<float>(static_cast<double>(z) - d.max - d.log_total);
}

/* The n_top best tokens, VOCAB_LIST at a time; entries past the vocabulary, and all of a broken
 * row, name no token. */
__device__ void write_top(const struct vocab_row &row, const struct distribution &d, int n_top,
                          int32_t *top_id, float *top_logprob)
{
    const bool is_valid = !isnan(d.log_total);
    const int n = !is_valid ? 0 : n_top < row.n ? n_top : row.n;
    vocab_element first = VOCAB_FIRST; /* of those not written yet */
    for (int at = 0; at < n; at += VOCAB_LIST) {
        const int n_now = n - at < VOCAB_LIST ? n - at : VOCAB_LIST;
        if (at == 0) {
            (void)vocab_best(row, n_now);
        } else {
            const unsigned long long rank = static_cast<unsigned long long>(at + n_now - 1);
            const struct vocab_border border = vocab_find(row, VOCAB_LAST, rank, vocab_count{});
            (void)vocab_collect(row, border.element, first);
            vocab_sort(n_now);
        }
        first = vocab_shared_here()->list[n_now - 1] - 1;
        for (int j = static_cast<int>(threadIdx.x); j < n_now; j += VOCAB_BLOCK) {
            const vocab_element e = vocab_shared_here()->list[j];
            top_id[at + j] = vocab_element_id(e, row.n);
            top_logprob[at + j] = logprob(d, vocab_logit(vocab_element_key(e)));
        }
        __syncthreads();
    }
    for (int j = n + static_cast<int>(threadIdx.x); j < n_top; j += VOCAB_BLOCK) {
        top_id[j] = -1;
        top_logprob[j] = is_valid ? -INFINITY : NAN;
    }
}

__global__ void __launch_bounds__(VOCAB_BLOCK, 2)
    logprobs_rows(struct vocab_room room, const float *logits, int64_t stride,
                  const struct step_view *view, int first)
{
    const int at = static_cast<int>(blockIdx.x);
    const int out = first + at;
    grid_wait();
    const int want = view->out_want[out];
    if ((want & OUT_OF_LOGITS) == 0) {
        return;
    }
    const float *const z = logits + at * stride;
    const struct group_parts parts = parts_of(room, at);
    const struct distribution d = merge_groups(parts, room.n_group);
    if (threadIdx.x == 0 && (want & OUT_LOGPROB) != 0) {
        view->out_logprob[out] = logprob(d, z[target_of(view, out)]);
        view->out_rank[out] = d.n_before + 1; /* 0 of a broken row */
    }
    if (threadIdx.x == 0 && (want & OUT_ENTROPY) != 0) {
        view->out_entropy[out] = static_cast<float>(d.entropy);
    }
    if ((want & OUT_TOP) != 0) {
        const struct vocab_row row = {z, parts.max, room.n_vocab, room.n_group};
        const int64_t top = static_cast<int64_t>(out) * view->n_top_max;
        write_top(row, d, view->n_top, view->top_id + top, view->top_logprob + top);
    }
}

} // namespace

void cuda_logprobs(struct cuda *cu, struct tensor logits, const struct step_view *view,
                   const struct step_scratch *scratch, int first)
{
    const struct vocab_op op = {"logprobs", false, logprobs_groups, logprobs_rows};
    vocab_run(cu, &op, logits, view, scratch, first);
}
