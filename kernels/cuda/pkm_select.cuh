/* Exact selection of the k best of n scored candidates, for the memory search.
 *
 * A candidate is a score and a number (a key's, or a slot's); better is the larger score, then the
 * smaller number. A score is held as an order-preserving 32-bit rank: comparing ranks as unsigned
 * integers compares scores, -0 equals +0, and a NaN is below every number, so a broken query still
 * chooses candidates that exist. 0 is no candidate at all. */
#ifndef KERNELS_CUDA_PKM_SELECT_CUH
#define KERNELS_CUDA_PKM_SELECT_CUH

#include "kernels/cuda/cuda.cuh"

constexpr int SELECT_WARP = 32;

static const uint32_t SELECT_NONE = 0;
static const uint32_t SELECT_NAN = 1;
static const unsigned SELECT_ALL_LANES = 0xffffffffu;

struct candidate {
    uint32_t rank;   /* of the score */
    uint32_t number; /* smaller is better among equals */
};

__device__ __forceinline__ uint32_t rank_of_score(float score)
{
    const uint32_t bits = __float_as_uint(score + 0.0f); /* -0 + 0 = +0 */
    if ((bits & 0x7fffffffu) > 0x7f800000u) {
        return SELECT_NAN;
    }
    return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float score_of_rank(uint32_t rank)
{
    if (rank <= SELECT_NAN) {
        return __uint_as_float(0x7fc00000u);
    }
    return __uint_as_float((rank & 0x80000000u) != 0 ? rank & 0x7fffffffu : ~rank);
}

__device__ __forceinline__ bool is_better(struct candidate a, struct candidate b)
{
    return a.rank > b.rank || (a.rank == b.rank && a.number < b.number);
}

/* The lanes of a warp hold V candidates each. What the warp chooses: ranks above border, and those
 * at border with a number of at most last. */
struct select_border {
    uint32_t rank, last;
};

template <int V>
__device__ __forceinline__ int count_from(const uint32_t (&rank)[V], uint32_t least)
{
    int n = 0;
#pragma unroll
    for (int v = 0; v < V; v++) {
        n += rank[v] >= least ? 1 : 0;
    }
    return __reduce_add_sync(SELECT_ALL_LANES, n);
}

/* The border of the k best; at least k of the ranks are not SELECT_NONE, numbers are distinct and
 * below 2^31. The largest rank that k candidates reach is found bit by bit; the search ends as soon
 * as exactly k reach it. Only equal ranks at the border need the same search over numbers. */
template <int V>
__device__ __forceinline__ struct select_border warp_border(const uint32_t (&rank)[V],
                                                            const uint32_t (&number)[V], int k)
{
    struct select_border border = {0, 0x7fffffffu};
    int reached = 0;
    for (int bit = 31; bit >= 0 && reached != k; bit--) {
        const uint32_t probe = border.rank | 1u << bit;
        const int n = count_from<V>(rank, probe);
        if (n >= k) {
            border.rank = probe;
            reached = n;
        }
    }
    if (reached == k) {
        return border;
    }
    const int wanted = k - (border.rank == 0xffffffffu ? 0 : count_from<V>(rank, border.rank + 1));
    for (int bit = 30; bit >= 0; bit--) {
        const uint32_t probe = border.last & ~(1u << bit);
        int n = 0;
#pragma unroll
        for (int v = 0; v < V; v++) {
            n += rank[v] == border.rank && number[v] <= probe ? 1 : 0;
        }
        if (__reduce_add_sync(SELECT_ALL_LANES, n) >= wanted) {
            border.last = probe;
        }
    }
    return border;
}

/* The k <= 32 best of a warp's candidates, best first: lane j < k gets the j-th, the other lanes an
 * undefined one. chosen is 32 entries of shared memory of the warp's own. All lanes call. */
template <int V>
__device__ __forceinline__ struct candidate
warp_best(const uint32_t (&rank)[V], const uint32_t (&number)[V], int k, struct candidate *chosen)
{
    const unsigned lane = threadIdx.x % SELECT_WARP;
    const struct select_border border = warp_border<V>(rank, number, k);
    int base = 0;
#pragma unroll
    for (int v = 0; v < V; v++) {
        const bool is_chosen =
            rank[v] > border.rank || (rank[v] == border.rank && number[v] <= border.last);
        const unsigned lanes = __ballot_sync(SELECT_ALL_LANES, is_chosen);
        if (is_chosen) {
            chosen[base + __popc(lanes & ((1u << lane) - 1))] = {rank[v], number[v]};
        }
        base += __popc(lanes);
    }
    __syncwarp();
    const struct candidate mine =
        static_cast<int>(lane) < k ? chosen[lane] : (struct candidate){SELECT_NONE, 0xffffffffu};
    int at = 0;
    for (int j = 0; j < k; j++) {
        const struct candidate other = {__shfl_sync(SELECT_ALL_LANES, mine.rank, j),
                                        __shfl_sync(SELECT_ALL_LANES, mine.number, j)};
        at += is_better(other, mine) ? 1 : 0;
    }
    __syncwarp();
    if (static_cast<int>(lane) < k) {
        chosen[at] = mine;
    }
    __syncwarp();
    const struct candidate best = chosen[lane < static_cast<unsigned>(k) ? lane : 0];
    __syncwarp();
    return best;
}

/* Softmax over the scores of lanes 0 .. k-1, best first, k <= 32; all lanes call. A fixed tree. */
__device__ __forceinline__ float warp_weight(float score, int k)
{
    const int lane = threadIdx.x % SELECT_WARP;
    const float best = __shfl_sync(SELECT_ALL_LANES, score, 0);
    const float weight = lane < k ? expf(score - best) : 0;
    float total = weight;
#pragma unroll
    for (int step = SELECT_WARP / 2; step > 0; step /= 2) {
        total += __shfl_xor_sync(SELECT_ALL_LANES, total, step);
    }
    return weight / total;
}

/* ---- keys in memory -------------------------------------------------------------------------- */

/* Keys are packed by group of n_key keys with d columns: [group][d / 4][n_key padded to 32][4], the
 * rest zero, so the lanes of a warp read four columns of 32 keys as 512 bytes in a row. */
struct key_layout {
    int64_t n_key_padded;
    int64_t d_quad;        /* groups of four columns */
    int64_t group_quads;   /* float4 from one group to the next */
    int64_t scratch_bytes; /* offset of the scratch behind the keys */
};

__host__ __device__ static inline struct key_layout key_layout(int64_t n_key, int64_t d,
                                                               int64_t n_group)
{
    struct key_layout l;
    l.n_key_padded = (n_key + 31) / 32 * 32;
    l.d_quad = (d + 3) / 4;
    l.group_quads = l.n_key_padded * l.d_quad;
    l.scratch_bytes = n_group * l.group_quads * 16;
    return l;
}

/* What all search kernels get. */
struct search {
    const float4 *keys;
    struct key_layout layout;
    struct tensor slots, weights, query;
    int n_head, n_half; /* n_half 2: product keys; 1: flat */
    int n_key, k_top;
    int d;             /* columns of one key */
    bool scores;       /* the weights are the scores */
    bool starts_early; /* the kernel before may still run, keys need not wait for it */
};

/* pkm_search_generic.cu: every shape, one block per row and head. */
void search_any(struct cuda *cu, const struct search *s);

#endif
