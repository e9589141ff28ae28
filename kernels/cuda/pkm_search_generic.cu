/* The memory search for every shape that the fast kernels of pkm_search.cu and pkm_search_flat.cu
 * do not take: k_top above 32, very many or very wide keys, keys that all halves and heads share.
 * Exact, with the same rules (pkm_select.cuh).
 *
 * One block per row and head streams over the keys, 256 at a time, a thread per key (one chain of
 * multiply-adds in ascending column). What may still be among the k best joins a list in shared
 * memory; when the list is full it is cut back to its k best, whose last one is the border from
 * then on. Since numbers ascend, a later candidate of the border's score is never better. For
 * product keys the same is done three times: for each half, and for the pairs of ranks i·j <= k of
 * both.
 *
 * Per row and head: n_half·n_key·d multiply-adds and n_half·n_key·d·4 bytes of keys from L2 or
 * memory: bound by that bandwidth, of which one block has its multiprocessor's share. Share of the
 * bound reached: not measured yet. */
#include "kernels/cuda/pkm_select.cuh"

namespace
{

enum { THREADS = 256, LIST_MAX = 4096, DIGITS = 256 };

/* Shared memory of a block, besides the query. */
struct stream {
    struct candidate list[LIST_MAX];
    struct candidate kept[PKM_K_TOP_MAX];
    struct candidate half[2][PKM_K_TOP_MAX];
    unsigned digit[DIGITS];
    unsigned n; /* in list */
    unsigned kept_n;
    unsigned found_digit, found_above;
    struct candidate border; /* the k-th best at the last cut; {SELECT_NONE, ...}: none yet */
};

/* Larger is better: the rank, then the smaller number. */
__device__ __forceinline__ uint64_t order_of(struct candidate c)
{
    return static_cast<uint64_t>(c.rank) << 32 | (0xffffffffu - c.number);
}

/* The order of the k-th best of list[0 .. n-1], n >= k, digit by digit from the top. */
__device__ uint64_t find_border(struct stream *s, unsigned n, unsigned k)
{
    uint64_t prefix = 0;
    unsigned wanted = k;
    for (int shift = 56; shift >= 0; shift -= 8) {
        for (unsigned d = threadIdx.x; d < DIGITS; d += THREADS) {
            s->digit[d] = 0;
        }
        __syncthreads();
        for (unsigned i = threadIdx.x; i < n; i += THREADS) {
            const uint64_t order = order_of(s->list[i]);
            /* All digits above this one are known and equal; at the top there are none. */
            if (shift == 56 || order >> (shift + 8) == prefix >> (shift + 8)) {
                atomicAdd(&s->digit[order >> shift & 0xff], 1u);
            }
        }
        __syncthreads();
        for (unsigned d = threadIdx.x; d < DIGITS; d += THREADS) {
            unsigned above = 0;
            for (unsigned e = d + 1; e < DIGITS; e++) {
                above += s->digit[e];
            }
            if (above < wanted && wanted <= above + s->digit[d]) {
                s->found_digit = d;
                s->found_above = above;
            }
        }
        __syncthreads();
        prefix |= static_cast<uint64_t>(s->found_digit) << shift;
        wanted -= s->found_above;
        const bool is_exact = wanted == s->digit[s->found_digit];
        __syncthreads();
        if (is_exact) {
            return prefix; /* all with this prefix belong to the best */
        }
    }
    return prefix;
}

/* Cuts the list to its k best, best first, and sets the border. */
__device__ void cut(struct stream *s, unsigned k)
{
    const unsigned n = s->n;
    const uint64_t border = find_border(s, n, k);
    if (threadIdx.x == 0) {
        s->kept_n = 0;
    }
    __syncthreads();
    for (unsigned i = threadIdx.x; i < n; i += THREADS) {
        if (order_of(s->list[i]) >= border) {
            s->kept[atomicAdd(&s->kept_n, 1u)] = s->list[i];
        }
    }
    __syncthreads();
    for (unsigned i = threadIdx.x; i < k; i += THREADS) {
        const struct candidate mine = s->kept[i];
        unsigned at = 0;
        for (unsigned j = 0; j < k; j++) {
            at += is_better(s->kept[j], mine) ? 1 : 0;
        }
        s->list[at] = mine;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        s->n = k;
        s->border = s->list[k - 1];
    }
    __syncthreads();
}

__device__ void stream_begin(struct stream *s)
{
    __syncthreads();
    if (threadIdx.x == 0) {
        s->n = 0;
        s->border = {SELECT_NONE, 0};
    }
    __syncthreads();
}

/* Each thread offers a candidate, or {SELECT_NONE, ...}. */
__device__ void stream_offer(struct stream *s, struct candidate c, unsigned k)
{
    if (c.rank != SELECT_NONE && (s->border.rank == SELECT_NONE || is_better(c, s->border))) {
        s->list[atomicAdd(&s->n, 1u)] = c;
    }
    __syncthreads();
    const bool is_full = s->n > LIST_MAX - THREADS;
    __syncthreads();
    if (is_full) {
        cut(s, k);
    }
}

/* list[0 .. k-1] ← the best keys of a group for the d columns of q. */
__device__ void stream_keys(struct stream *s, const struct search *search, const float *q,
                            int group)
{
    const float4 *const keys = search->keys + group * search->layout.group_quads;
    const int64_t padded = search->layout.n_key_padded;
    stream_begin(s);
    for (int first = 0; first < search->n_key; first += THREADS) {
        const int key = first + static_cast<int>(threadIdx.x);
        struct candidate c = {SELECT_NONE, 0};
        if (key < search->n_key) {
            float sum = 0;
#pragma unroll 4
            for (int i = 0; i < search->layout.d_quad; i++) {
                const float4 column = __ldg(keys + i * padded + key);
                sum = fmaf(q[4 * i], column.x, sum);
                sum = fmaf(q[4 * i + 1], column.y, sum);
                sum = fmaf(q[4 * i + 2], column.z, sum);
                sum = fmaf(q[4 * i + 3], column.w, sum);
            }
            c = {rank_of_score(sum), static_cast<uint32_t>(key)};
        }
        stream_offer(s, c, static_cast<unsigned>(search->k_top));
    }
    cut(s, static_cast<unsigned>(search->k_top));
}

/* list[0 .. k-1] ← the best pairs of half[0] and half[1]. */
__device__ void stream_pairs(struct stream *s, const struct search *search)
{
    const int k = search->k_top;
    stream_begin(s);
    for (int i = 0; i < k; i++) {
        const int n_j = k / (i + 1);
        for (int first = 0; first < n_j; first += THREADS) {
            const int j = first + static_cast<int>(threadIdx.x);
            struct candidate c = {SELECT_NONE, 0};
            if (j < n_j) {
                const struct candidate a = s->half[0][i];
                const struct candidate b = s->half[1][j];
                c.rank = rank_of_score(score_of_rank(a.rank) + score_of_rank(b.rank));
                c.number = a.number * static_cast<uint32_t>(search->n_key) + b.number;
            }
            stream_offer(s, c, static_cast<unsigned>(k));
        }
    }
    cut(s, static_cast<unsigned>(k));
}

/* Writes the list's slots and the softmax of its scores (its sum is one chain, best first), or
 * with search->scores the scores. */
__device__ void write_slots(struct stream *s, const struct search *search, int64_t row, int head)
{
    const int k = search->k_top;
    const float best = score_of_rank(s->list[0].rank);
    float *const weight = reinterpret_cast<float *>(s->kept);
    for (int j = threadIdx.x; j < k; j += THREADS) {
        weight[j] = expf(score_of_rank(s->list[j].rank) - best);
    }
    __syncthreads();
    float total = 0;
    for (int j = 0; j < k; j++) {
        total += weight[j];
    }
    const int64_t column = static_cast<int64_t>(head) * k;
    int32_t *const slots =
        static_cast<int32_t *>(search->slots.data) + row * search->slots.stride + column;
    float *const weights =
        static_cast<float *>(search->weights.data) + row * search->weights.stride + column;
    for (int j = threadIdx.x; j < k; j += THREADS) {
        slots[j] = static_cast<int32_t>(s->list[j].number);
        weights[j] = search->scores ? score_of_rank(s->list[j].rank) : weight[j] / total;
    }
}

__global__ void __launch_bounds__(THREADS) any_kernel(struct search search)
{
    DYN_SHARED(struct stream, s);
    float *const q = reinterpret_cast<float *>(s + 1);
    const int64_t row = blockIdx.x;
    const int head = blockIdx.y;
    const int width = static_cast<int>(search.layout.d_quad) * 4;
    const float *const from = static_cast<const float *>(search.query.data) +
                              row * search.query.stride +
                              static_cast<int64_t>(head) * search.n_half * search.d;
    grid_wait();
    for (int half = 0; half < search.n_half; half++) {
        __syncthreads(); /* the last half's readers are done with q */
        for (int c = threadIdx.x; c < width; c += THREADS) {
            q[c] = c < search.d ? from[half * search.d + c] : 0;
        }
        stream_keys(s, &search, q, head * search.n_half + half);
        for (int j = threadIdx.x; search.n_half == 2 && j < search.k_top; j += THREADS) {
            s->half[half][j] = s->list[j];
        }
    }
    if (search.n_half == 2) {
        stream_pairs(s, &search);
    }
    write_slots(s, &search, row, head);
}

} // namespace

void search_any(struct cuda *cu, const struct search *s)
{
    const size_t bytes =
        sizeof(struct stream) + static_cast<size_t>(s->layout.d_quad) * 4 * sizeof(float);
    if (bytes > cu->shared_max) {
        cuda_fail(cu, ERR_UNSUPPORTED, "pkm_search",
                  "the keys are too wide for the shared memory of this GPU; use the CPU");
        return;
    }
    if (cuda_shared(cu, any_kernel, bytes, "pkm_search")) {
        const dim3 grid(static_cast<unsigned>(s->query.rows), static_cast<unsigned>(s->n_head));
        LAUNCH(any_kernel, grid, dim3(THREADS), bytes, cuda_queue(cu), *s);
    }
}
