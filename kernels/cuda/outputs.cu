/* What is requested of rows of logits: a drawn token, the log-probability and rank of a target, the
 * best tokens, the entropy. All of it in one kernel, whatever the rows want: as a node of a decode
 * step's graph, each kernel costs more than what it would do.
 *
 * Grid: blocks that share a row, rows. Each block takes a run of groups of ids, a warp each, and
 * leaves of a group what a draw needs (sample.cuh), its largest logit m, Σ exp(z - m), Σ exp(z -
 * m)(z - m) and the number of tokens before the target. The last block of a row to arrive draws the
 * token, merges the groups, always by the same tree, and lists the best tokens (vocab.cuh) where
 * they are wanted. How many tokens come before one that has just been drawn is counted then, in the
 * few groups that have any. With M the largest logit and
 *   L = log Σ exp(z - M),   log p(i) = z(i) - M - L,
 *   entropy = L - Σ exp(z - M)(z - M) / Σ exp(z - M).
 * How many blocks share a row depends on the number of rows; what they leave and how it is merged
 * does not.
 *
 * Bytes: 4 · n_vocab per row from memory; 8 · n_vocab more, mostly in L2, where a row has lists to
 * draw by; the few groups that hold the best tokens once more, from the L2. Instructions of a
 * thread, of sm_90: 44 per logit for a distribution, 23 of which are the exponential, and about as
 * many for a draw, unless top_k or temperature 0 spares it. Bound: for many rows the rate at which
 * instructions are issued, which an H200 needs half as long again for as for the bytes; for one row
 * the latency of two dependent reads, of the arrival and of a sort. Share of the bound reached: not
 * measured yet. */
#include "kernels/cuda/sample.cuh"

namespace
{

enum {
    OUT_OF_LOGITS = OUT_LOGPROB | OUT_TOP | OUT_ENTROPY,
    ROWS_MAX = 256,    /* of a launch: as many as the models give */
    BLOCKS_PER_SM = 2, /* of the kernel */
};

/* ---- scratch -------------------------------------------------------------------------------- */

/* By group: max is NaN if a logit of the group is NaN or +infinity. */
struct group_parts {
    float *max, *sum, *moment;
    int32_t *n_before;
};

/* For the rows of a launch. */
struct outputs_room {
    unsigned *n_arrived; /* [ROWS_MAX] blocks of each row, 0 before and after */
    float *data;         /* by row row_floats of them: see row_room */
    size_t row_floats;
    int n_vocab, n_group;
    int n_each; /* groups of a block */
};

/* A row's. */
struct row_room {
    float *copy; /* [n_vocab] the adjusted row */
    struct draw_parts draw;
    struct group_parts parts;
};

__device__ __forceinline__ struct row_room room_of(const struct outputs_room &room, int row)
{
    float *const copy = room.data + static_cast<size_t>(row) * room.row_floats;
    float *const group = copy + (room.n_vocab + 3) / 4 * 4;
    const int n = room.n_group;
    return {
        copy,
        {group, group + n},
        {group + 2 * n, group + 3 * n, group + 4 * n, reinterpret_cast<int32_t *>(group + 5 * n)}};
}

/* Floats of scratch per row: a copy of it, and six numbers per group. Rows start at 256-byte
 * boundaries, the numbers at 16-byte ones. */
size_t row_floats_of(int64_t n_vocab)
{
    const size_t n_copy = (static_cast<size_t>(n_vocab) + 3) / 4 * 4;
    return (n_copy + 6 * static_cast<size_t>(vocab_groups(n_vocab)) + 63) / 64 * 64;
}

/* ---- by group ------------------------------------------------------------------------------- */

/* How many of the group's logits v come before the target's, z: none past the vocabulary, where v
 * is -infinity and no id is below a target. */
__device__ __forceinline__ int count_before(const float (&v)[VOCAB_LANE], int group, float z,
                                            int target)
{
    int n_before = 0;
#pragma unroll
    for (int i = 0; i < VOCAB_LANE; i++) {
        const bool is_tied = (v[i] == z) & (vocab_id(group, i) < target);
        n_before += ((v[i] > z) | is_tied) ? 1 : 0;
    }
    return __reduce_add_sync(VOCAB_ALL_LANES, n_before);
}

/* What a row's groups are read for. */
struct goal {
    bool is_counted; /* a target is given: tokens before it */
    bool has_entropy;
    int target;
    float z; /* the target's logit */
};

__device__ __forceinline__ struct goal goal_of_row(const struct step_view *view, int out, int want,
                                                   const float *z)
{
    const int target = view->target[out];
    const bool is_counted = (want & OUT_LOGPROB) != 0 && target != TARGET_SAMPLED;
    return {is_counted, (want & OUT_ENTROPY) != 0, target, is_counted ? z[target] : 0};
}

/* A group of a row, of which the warp has the logits v, the largest of them max. */
__device__ __forceinline__ void distribution_group(const struct group_parts &parts, int group,
                                                   const float (&v)[VOCAB_LANE], float max,
                                                   bool is_broken, const struct goal &goal)
{
    const int n_before = goal.is_counted ? count_before(v, group, goal.z, goal.target) : 0;
    float sum = 0;
    float moment = 0;
    if (fabsf(max) < INFINITY) {
        float share[VOCAB_LANE];
#pragma unroll
        for (int i = 0; i < VOCAB_LANE; i++) {
            share[i] = vocab_plain_share(max, v[i]);
        }
        sum = vocab_group_sum(share);
        if (goal.has_entropy) {
#pragma unroll
            for (int i = 0; i < VOCAB_LANE; i++) { /* 0 · -infinity is no number */
                share[i] = share[i] > 0 ? share[i] * (v[i] - max) : 0;
            }
            moment = vocab_group_sum(share);
        }
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
    int n_before; /* tokens before a target that was given */
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
    const float max = vocab_logit(max_key);
    double total = 0;
    double moment = 0;
    unsigned long long n_before = 0;
    for (int g = static_cast<int>(threadIdx.x); g < n_group; g += VOCAB_BLOCK) {
        const double scale = static_cast<double>(vocab_plain_share(max, parts.max[g]));
        if (scale > 0) { /* from the group's maximum to the row's */
            const double down = static_cast<double>(parts.max[g]) - static_cast<double>(max);
            const double sum = static_cast<double>(parts.sum[g]);
            total += scale * sum;
            moment += scale * (static_cast<double>(parts.moment[g]) + down * sum);
        }
        n_before += static_cast<unsigned long long>(parts.n_before[g]);
    }
    total = vocab_block_sum(total);
    moment = vocab_block_sum(moment);
    struct distribution d = {};
    d.max = static_cast<double>(max);
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
__device__ VOCAB_CALLED void write_top(struct vocab_row row, struct distribution d, int n_top,
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
            const struct vocab_border border =
                vocab_find(row, VOCAB_LAST, rank, vocab_count{}, false);
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

/* How many tokens come before the row's target. */
__device__ VOCAB_CALLED int count_in_row(struct vocab_row row, float z, int target)
{
    const vocab_element own = vocab_element_of(z, target, row.n);
    unsigned long long n = 0;
    vocab_visit<VOCAB_LANE>(row, vocab_element_key(own),
                            [&](vocab_element e, float) { n += e > own ? 1 : 0; });
    return static_cast<int>(vocab_block_sum(n));
}

/* What row out wants of its distribution; token: the drawn one. */
__device__ __forceinline__ void write_outputs(const struct vocab_row &row,
                                              const struct group_parts &parts,
                                              const struct step_view *view, int out, int want,
                                              int token)
{
    const struct distribution d = merge_groups(parts, row.n_group);
    if ((want & OUT_LOGPROB) != 0) {
        const int given = view->target[out];
        const int target = given == TARGET_SAMPLED ? token : given;
        const float z = row.z[target];
        const bool is_counted = given != TARGET_SAMPLED || isnan(d.log_total);
        const int n_before = is_counted ? d.n_before : count_in_row(row, z, target);
        if (threadIdx.x == 0) {
            view->out_logprob[out] = logprob(d, z);
            view->out_rank[out] = n_before + 1; /* 0 of a broken row */
        }
    }
    if (threadIdx.x == 0 && (want & OUT_ENTROPY) != 0) {
        view->out_entropy[out] = static_cast<float>(d.entropy);
    }
    if ((want & OUT_TOP) != 0) {
        const int64_t top = static_cast<int64_t>(out) * view->n_top_max;
        write_top(row, d, view->n_top, view->top_id + top, view->top_logprob + top);
    }
}

/* ---- the kernel ----------------------------------------------------------------------------- */

/* Whether the block is the last of its row's to come here; it then sees what the others have
 * written. By the whole block. */
__device__ __forceinline__ bool is_last_block(unsigned *n_arrived)
{
    __shared__ bool is_last;
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence(); /* for all of the block: what it saw behind the barrier goes first too */
        is_last = atomicAdd(n_arrived, 1u) == gridDim.x - 1;
        if (is_last) {
            (void)atomicExch(n_arrived, 0u); /* for the next launch */
        }
    }
    __syncthreads();
    if (is_last) {
        __threadfence();
    }
    return is_last;
}

/* What the last block of a row does. */
__device__ VOCAB_CALLED void finish_row(struct outputs_room room, const float *z,
                                        const struct step_view *view, int at, int out)
{
    const struct row_room own = room_of(room, at);
    const int want = view->out_want[out];
    int token = NOT_DRAWN;
    if ((want & OUT_SAMPLE) != 0) {
        token =
            draw_token(own.draw, z, own.copy, room.n_vocab, room.n_group, view, view->sample[out]);
        if (threadIdx.x == 0) {
            view->out_token[out] = token;
            view->drawn[out] = token; /* for the next step, which may have been launched */
        }
    }
    if ((want & OUT_OF_LOGITS) != 0) {
        const struct vocab_row row = {z, own.parts.max, room.n_vocab, room.n_group};
        write_outputs(row, own.parts, view, out, want, token);
    }
}

__global__ void __launch_bounds__(VOCAB_BLOCK, BLOCKS_PER_SM)
    outputs_kernel(struct outputs_room room, const float *logits, int64_t stride,
                   const struct step_view *view, int first)
{
    const int at = static_cast<int>(blockIdx.y);
    const int out = first + at;
    const int n = room.n_vocab;
    const int begin = static_cast<int>(blockIdx.x) * room.n_each;
    const int end = min(begin + room.n_each, room.n_group);
    const float *const z = logits + at * stride;
    const struct row_room own = room_of(room, at);
    grid_wait();
    const int want = view->out_want[out];
    const struct sample_params &p = view->sample[out];
    const struct goal goal = goal_of_row(view, out, want, z);
    if ((want & OUT_SAMPLE) != 0 && has_lists(p)) {
        adjust_ids(own.copy, z, view, p, begin * VOCAB_GROUP, min(end * VOCAB_GROUP, n));
    }
#pragma unroll 1
    for (int group = begin + static_cast<int>(threadIdx.x) / VOCAB_WARP; group < end;
         group += VOCAB_WARPS) {
        float v[VOCAB_LANE];
        vocab_load(v, z, n, group, vocab_is_aligned(z));
        const float max = vocab_group_max(v);
        const bool is_broken = vocab_is_broken(v);
        if ((want & OUT_SAMPLE) != 0) {
            draw_group(own.draw, own.copy, n, group, v, max, is_broken, p);
        }
        if ((want & OUT_OF_LOGITS) != 0) {
            distribution_group(own.parts, group, v, max, is_broken, goal);
        }
    }
    if (!is_last_block(room.n_arrived + at)) {
        return;
    }
    finish_row(room, z, view, at, out);
}

/* As many blocks for each of the rows as keep all multiprocessors busy: a group's numbers are the
 * same in any. */
unsigned share_out(const struct cuda *cu, struct outputs_room *room, unsigned n_row)
{
    const int n_run = (room->n_group + VOCAB_WARPS - 1) / VOCAB_WARPS;
    const int wanted =
        (BLOCKS_PER_SM * cu->n_sm + static_cast<int>(n_row) - 1) / static_cast<int>(n_row);
    const int n_block = wanted < n_run ? wanted : n_run;
    room->n_each = (n_run + n_block - 1) / n_block * VOCAB_WARPS;
    return static_cast<unsigned>((room->n_group + room->n_each - 1) / room->n_each);
}

constexpr size_t ARRIVED_BYTES = ROWS_MAX * sizeof(unsigned);

/* Scratch holds so many rows at once, of those that a step may have, and no more than this in all:
 * more than the models' LOGITS_BYTES_MAX of logits, so that one launch is the rule. */
constexpr size_t SCRATCH_MAX = 68u << 20;

} // namespace

void cuda_outputs(struct cuda *cu, struct tensor logits, const struct step_view *view,
                  const struct step_scratch *scratch, int first)
{
    CHECK(logits.cols > 0 && logits.cols <= INT32_MAX - VOCAB_BLOCK * VOCAB_GROUP);
    char *const begin = static_cast<char *>(scratch->vocab);
    struct outputs_room room = {.n_arrived = reinterpret_cast<unsigned *>(begin),
                                .data = reinterpret_cast<float *>(begin + ARRIVED_BYTES),
                                .row_floats = row_floats_of(logits.cols),
                                .n_vocab = static_cast<int>(logits.cols),
                                .n_group = vocab_groups(logits.cols),
                                .n_each = 0};
    const size_t fitting =
        (scratch->vocab_bytes - ARRIVED_BYTES) / (room.row_floats * sizeof(float));
    const int64_t n_max = fitting < ROWS_MAX ? static_cast<int64_t>(fitting) : +ROWS_MAX;
    CHECK(n_max > 0);
    for (int64_t r = 0; r < logits.rows; r += n_max) {
        const unsigned n = static_cast<unsigned>(logits.rows - r < n_max ? logits.rows - r : n_max);
        const float *const z = static_cast<const float *>(logits.data) + r * logits.stride;
        const unsigned n_block = share_out(cu, &room, n);
        LAUNCH(outputs_kernel, dim3(n_block, n), dim3(VOCAB_BLOCK), 0, cuda_queue(cu), room, z,
               logits.stride, view, first + static_cast<int>(r));
        cuda_check(cu, "outputs");
    }
}

size_t vocab_scratch(const struct step_limits *limits)
{
    if (limits->n_vocab == 0 || limits->n_out_max == 0) {
        return 0;
    }
    const size_t row_bytes = row_floats_of(limits->n_vocab) * sizeof(float);
    const size_t fitting = SCRATCH_MAX / row_bytes;
    const size_t wanted = static_cast<size_t>(limits->n_out_max);
    const size_t n = fitting < wanted ? fitting : wanted;
    return ARRIVED_BYTES + (n > 0 ? n : 1) * row_bytes;
}
