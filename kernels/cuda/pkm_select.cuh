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
constexpr int CHAINS = 4; /* of a count: additions that do not wait for one another */

static const uint32_t SELECT_NONE = 0;
static const uint32_t SELECT_NAN = 1;
static const unsigned SELECT_ALL_LANES = 0xffffffffu;

struct candidate {
    uint32_t rank;   /* of the score */
    uint32_t number; /* smaller is better among equals */
};

/* As shared memory is read. */
struct __align__(16) candidate_pair
{
    struct candidate a, b;
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

/* -1 if a < b, else 0: what a - b borrows. To count by tests takes three instructions each, two of
 * which wait for the count before; so it takes two and a half, and CHAINS counts at a time. */
__device__ __forceinline__ uint32_t borrow(uint32_t a, uint32_t b)
{
    return static_cast<uint32_t>((static_cast<uint64_t>(a) - b) >> 32);
}

/* The lanes of a warp hold V candidates each. */

/* n[c] ← how many of this lane's ranks v with v % CHAINS = c reach least. */
template <int V>
__device__ __forceinline__ void count_lane(uint32_t (&n)[CHAINS], const uint32_t (&rank)[V],
                                           uint32_t least)
{
#pragma unroll
    for (int c = 0; c < CHAINS; c++) {
        n[c] = (V + CHAINS - 1 - c) / CHAINS;
    }
#pragma unroll
    for (int v = 0; v < V; v++) {
        n[v % CHAINS] += borrow(rank[v], least);
    }
}

template <int V>
__device__ __forceinline__ int count_from(const uint32_t (&rank)[V], uint32_t least)
{
    uint32_t n[CHAINS];
    count_lane<V>(n, rank, least);
    return static_cast<int>(__reduce_add_sync(SELECT_ALL_LANES, (n[0] + n[1]) + (n[2] + n[3])));
}

/* Of candidates whose rank is border all but the wanted ones with the smallest numbers become
 * none. */
template <int V>
__device__ __forceinline__ void warp_cut_equals(uint32_t (&rank)[V], const uint32_t (&number)[V],
                                                uint32_t border, int wanted)
{
    uint32_t last = 0x7fffffffu;
    for (int bit = 30; bit >= 0; bit--) {
        const uint32_t probe = last & ~(1u << bit);
        int n = 0;
#pragma unroll
        for (int v = 0; v < V; v++) {
            n += rank[v] == border && number[v] <= probe ? 1 : 0;
        }
        if (__reduce_add_sync(SELECT_ALL_LANES, n) >= wanted) {
            last = probe;
        }
    }
#pragma unroll
    for (int v = 0; v < V; v++) {
        rank[v] = rank[v] == border && number[v] > last ? SELECT_NONE : rank[v];
    }
}

/* A rank that the k <= 32 best reach and no others; those that equal the last of them and stand
 * behind it become none. At least k of the ranks are not SELECT_NONE, numbers are distinct and
 * below 2^31. The smallest of the lanes' largest ranks is one that 32 candidates reach: between it
 * and the largest of all the border is found by halves, of 512 normal scores in 7 probes. */
template <int V>
__device__ __forceinline__ uint32_t warp_border(uint32_t (&rank)[V], const uint32_t (&number)[V],
                                                int k)
{
    uint32_t largest = rank[0];
#pragma unroll
    for (int v = 1; v < V; v++) {
        largest = rank[v] > largest ? rank[v] : largest;
    }
    uint32_t reached = __reduce_min_sync(SELECT_ALL_LANES, largest);    /* by k or more */
    uint32_t missed = __reduce_max_sync(SELECT_ALL_LANES, largest) + 1; /* by all but n_above < k */
    int n_above = 0;
    while (missed - reached > 1) {
        const uint32_t probe = reached + (missed - reached) / 2;
        const int n = count_from<V>(rank, probe);
        if (n == k) {
            return probe;
        }
        reached = n > k ? probe : reached;
        missed = n > k ? missed : probe;
        n_above = n > k ? n_above : n;
    }
    warp_cut_equals<V>(rank, number, reached, k - n_above);
    return reached;
}

/* The k <= 32 best of a warp's candidates, best first: lane j < k gets the j-th, the other lanes an
 * undefined one. chosen is 32 entries of shared memory of the warp's own, at a multiple of 16
 * bytes, of which the first k become the same. All lanes call. */
template <int V>
__device__ __forceinline__ struct candidate
warp_best(uint32_t (&rank)[V], const uint32_t (&number)[V], int k, struct candidate *chosen)
{
    const int lane = static_cast<int>(threadIdx.x % SELECT_WARP);
    const uint32_t border = warp_border<V>(rank, number, k);
    uint32_t n[CHAINS];
    count_lane<V>(n, rank, border);
    const uint32_t all_mine = (n[0] + n[1]) + (n[2] + n[3]);
    uint32_t end = all_mine; /* of this lane's place in chosen */
#pragma unroll
    for (int step = 1; step < SELECT_WARP; step *= 2) {
        const uint32_t before = __shfl_up_sync(SELECT_ALL_LANES, end, step);
        end += lane >= step ? before : 0;
    }
    struct candidate *to[CHAINS] = {chosen + (end - all_mine)};
#pragma unroll
    for (int c = 1; c < CHAINS; c++) {
        to[c] = to[c - 1] + n[c - 1];
    }
#pragma unroll
    for (int v = 0; v < V; v++) {
        if (rank[v] >= border) {
            *to[v % CHAINS]++ = {rank[v], number[v]};
        }
    }
    if (lane >= k) {
        chosen[lane] = {SELECT_NONE, 0xffffffffu};
    }
    __syncwarp();
    const struct candidate mine = chosen[lane];
    const struct candidate_pair *const all = reinterpret_cast<struct candidate_pair *>(chosen);
    uint32_t n_better[CHAINS] = {}; /* negated */
#pragma unroll
    for (int j = 0; j < SELECT_WARP / 2; j++) {
        const struct candidate_pair other = all[j];
        n_better[2 * j % CHAINS] += borrow(mine.rank, other.a.rank);
        n_better[(2 * j + 1) % CHAINS] += borrow(mine.rank, other.b.rank);
    }
    int at = -static_cast<int>((n_better[0] + n_better[1]) + (n_better[2] + n_better[3]));
    if (__reduce_add_sync(SELECT_ALL_LANES, lane < k ? at : 0) != k * (k - 1) / 2) {
#pragma unroll 1
        for (int j = 0; j < k; j++) { /* some are equal */
            const struct candidate other = chosen[j];
            at += other.rank == mine.rank && other.number < mine.number ? 1 : 0;
        }
    }
    __syncwarp();
    if (lane < k) {
        chosen[at] = mine;
    }
    __syncwarp();
    const struct candidate best = chosen[lane < k ? lane : 0];
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
