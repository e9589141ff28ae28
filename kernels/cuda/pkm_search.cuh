/* What the kernels of the memory search for product keys share: how many candidates there may be,
 * and the selections that follow the scores. */
#ifndef KERNELS_CUDA_PKM_SEARCH_CUH
#define KERNELS_CUDA_PKM_SEARCH_CUH

#include "kernels/cuda/pkm_select.cuh"

enum {
    K_MAX = 32,
    PAIR_MAX = 119,   /* of 32; fewer for a smaller k */
    PAIR_V = 4,       /* pairs per lane */
    N_KEY_MAX = 2048, /* product keys */
    D_MAX = 512,      /* columns of a (sub-)key */
    KEYS_ROWS = 32    /* rows whose scores have room behind the keys */
};

/* Ranks (from 0) i·32 + j of all pairs with (i+1)(j+1) <= k. */
struct pairs {
    int n;
    uint16_t pair[PAIR_MAX];
};

/* On the host: a division for each i would be on the way of the block that selects. */
static inline struct pairs pairs_of(int k)
{
    struct pairs list = {};
    for (int i = 0; i < k; i++) {
        for (int j = 0; j < k / (i + 1); j++) {
            list.pair[list.n++] = static_cast<uint16_t>(i * K_MAX + j);
        }
    }
    return list;
}

/* to[PAIR_MAX] ← the list, by the whole block, since lanes that read different arguments of a
 * kernel wait for one another. A barrier follows. */
__device__ __forceinline__ void load_pairs(uint16_t *to, const struct pairs &list)
{
    for (int p = threadIdx.x; p < list.n; p += blockDim.x) {
        to[p] = list.pair[p];
    }
}

/* Whether this block is the last of n to come here with this counter; it may then read what the
 * others wrote before they came. Leaves the counter at 0 for the next launch. By the whole
 * block. */
static __device__ __forceinline__ bool is_last_block(unsigned *n_arrived, unsigned n)
{
    __shared__ bool is_last;
    __syncthreads();
    if (threadIdx.x == 0) { /* for all of the block: before and behind the barriers */
        __threadfence();
        is_last = atomicInc(n_arrived, n - 1) == n - 1;
        __threadfence();
    }
    __syncthreads();
    return is_last;
}

/* best[0 .. k-1] ← the best of the n_key ranks, by one warp, whose lane j < k gets the j-th. V·32
 * >= n_key; best as warp_best's chosen. */
template <int V>
__device__ __forceinline__ struct candidate
select_keys(struct candidate *best, const volatile uint32_t *ranks, int n_key, int k)
{
    const int lane = threadIdx.x % SELECT_WARP;
    uint32_t rank[V];
    uint32_t number[V];
#pragma unroll
    for (int v = 0; v < V; v++) {
        const int key = v * SELECT_WARP + lane;
        rank[v] = key < n_key ? ranks[key] : SELECT_NONE;
        number[v] = static_cast<uint32_t>(key);
    }
    return warp_best<V>(rank, number, k, best);
}

/* best[0 .. k-1] ← the best of these and of n keys more, whose numbers begin at first; otherwise as
 * select_keys. */
template <int V>
__device__ __forceinline__ struct candidate
select_more(struct candidate *best, const uint32_t *ranks, int first, int n_key, int k)
{
    const int lane = threadIdx.x % SELECT_WARP;
    uint32_t rank[V + 1];
    uint32_t number[V + 1];
#pragma unroll
    for (int v = 0; v < V; v++) {
        const int key = v * SELECT_WARP + lane;
        rank[v] = key < n_key ? ranks[key] : SELECT_NONE;
        number[v] = static_cast<uint32_t>(first + key);
    }
    rank[V] = lane < k ? best[lane].rank : SELECT_NONE;
    number[V] = best[lane].number;
    __syncwarp();
    return warp_best<V + 1>(rank, number, k, best);
}

/* Writes slots and weights of one row and head, by one warp, whose lane j < k_top has the j-th best
 * slot. */
static __device__ __forceinline__ void write_best(const struct search *s, struct candidate best,
                                                  int64_t row, int head)
{
    const int lane = threadIdx.x % SELECT_WARP;
    const float score = score_of_rank(best.rank);
    const float weight = s->scores ? score : warp_weight(score, s->k_top);
    if (lane < s->k_top) {
        const int64_t column = static_cast<int64_t>(head) * s->k_top + lane;
        static_cast<int32_t *>(s->slots.data)[row * s->slots.stride + column] =
            static_cast<int32_t>(best.number);
        static_cast<float *>(s->weights.data)[row * s->weights.stride + column] = weight;
    }
}

/* Slots and weights of one row and head from the best keys of both halves, by one warp. */
static __device__ __forceinline__ void
select_slots(const struct search *s, const struct candidate *first, const struct candidate *second,
             struct candidate *chosen, const uint16_t *pair, int n_pair, int64_t row, int head)
{
    const int lane = threadIdx.x % SELECT_WARP;
    uint32_t rank[PAIR_V];
    uint32_t slot[PAIR_V];
#pragma unroll
    for (int v = 0; v < PAIR_V; v++) {
        const int p = v * SELECT_WARP + lane;
        rank[v] = SELECT_NONE;
        slot[v] = 0x7fffffffu;
        if (p < n_pair) {
            const struct candidate a = first[pair[p] / K_MAX];
            const struct candidate b = second[pair[p] % K_MAX];
            rank[v] = rank_of_score(score_of_rank(a.rank) + score_of_rank(b.rank));
            slot[v] = a.number * static_cast<uint32_t>(s->n_key) + b.number;
        }
    }
    write_best(s, warp_best<PAIR_V>(rank, slot, s->k_top, chosen), row, head);
}

/* pkm_search_flat.cu: flat keys, k_top <= K_MAX, d <= D_MAX. */
void search_flat(struct cuda *cu, const struct search *s);

/* pkm_search_mma.cu: the same search, by tensor cores, of keys that are split. */
void search_mma(struct cuda *cu, const struct search *s, const struct cuda_weight *keys);

#endif
