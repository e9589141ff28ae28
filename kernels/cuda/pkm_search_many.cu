/* Many rows of the memory search on tensor cores: pkm_search_mma.cu, which counts them, says how it
 * works. */
#include "kernels/cuda/pkm_search_mma.cuh"

namespace
{

/* The keys that a block scores at a time: n of a half of a head, from first on, a multiple of
 * CHUNK. */
struct chunk {
    int half, first, n;
    int n_padded; /* to whole tiles of all warps */
};

__device__ __forceinline__ struct chunk chunk_of(const struct mma_args &a, int i)
{
    const int n_each = (a.n_key_padded + CHUNK - 1) / CHUNK; /* of a half */
    const int first = i % n_each * CHUNK;
    return {i / n_each, first, min(a.s.n_key - first, +CHUNK), min(a.n_key_padded - first, +CHUNK)};
}

/* A lane's pieces of a block of so many tiles of keys. */
__device__ __forceinline__ void many_keys(uint4 (&to)[MANY_TILES][2], const uint4 *keys,
                                          int tile_pieces)
{
#pragma unroll
    for (int n = 0; n < MANY_TILES; n++) {
        to[n][0] = __ldg(keys + n * tile_pieces);
        to[n][1] = __ldg(keys + n * tile_pieces + LANES);
    }
}

/* ranks[T][RANK_STRIDE] ← of a chunk of a head, by the first n_warp warps. queries: as load_queries
 * wrote them, of the chunk's half. */
template <int T>
__device__ __forceinline__ void many_scores(uint32_t *ranks, const uint4 *queries,
                                            const struct mma_args &a, int head,
                                            const struct chunk &chunk, int n_warp)
{
    constexpr int n_tile = T / ROWS;
    const int warp = static_cast<int>(threadIdx.x) / LANES;
    const int lane = static_cast<int>(threadIdx.x) % LANES;
    const int tile_pieces = a.n_block * 2 * LANES; /* of 8 keys */
    const uint4 *const group = a.keys + (2 * head + chunk.half) * a.group_pieces +
                               static_cast<int64_t>(chunk.first / KEYS) * tile_pieces + lane;
    const int n_key_tile = chunk.n_padded / KEYS;
    const int first = warp * MANY_TILES;
    const int stride = n_warp * MANY_TILES;
    uint4 now[MANY_TILES][2]; /* a block's, of the warp's tiles one after the other */
    if (first < n_key_tile) {
        many_keys(now, group + first * tile_pieces, tile_pieces);
    }
    for (int tile = first; tile < n_key_tile; tile += stride) {
        const uint4 *keys = group + tile * tile_pieces;
        const int next_tile = tile + stride < n_key_tile ? tile + stride : tile;
        struct chains<n_tile, MANY_TILES> sum = {
        };
#pragma unroll 1
        for (int b = 0; b < a.n_block; b++) {
            keys = b + 1 < a.n_block ? keys + 2 * LANES : group + next_tile * tile_pieces;
            uint4 next[MANY_TILES][2];
            many_keys(next, keys, tile_pieces);
            add_block(sum, queries + b * 4 * LANES + lane, a.n_block * 4 * LANES, now);
#pragma unroll
            for (int n = 0; n < MANY_TILES; n++) {
                now[n][0] = next[n][0];
                now[n][1] = next[n][1];
            }
        }
#pragma unroll
        for (int m = 0; m < n_tile; m++) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int row = m * ROWS + h * 8 + lane / 4;
#pragma unroll
                for (int n = 0; n < MANY_TILES; n++) {
                    *reinterpret_cast<uint2 *>(ranks + row * RANK_STRIDE + (tile + n) * KEYS +
                                               lane % 4 * 2) = ranks_of(sum, m, n, h);
                }
            }
        }
    }
}

/* What a block of T rows keeps besides ranks and queries. */
template <int T, int W> struct __align__(16) many_shared
{
    struct candidate best[T][2][K_MAX];
    struct candidate chosen[W][K_MAX];
    uint16_t pair[PAIR_MAX];
};

/* The best of a chunk's keys for each row, and of those chosen of the chunks of its half before, by
 * warps first_warp .. first_warp+n_warp-1. */
template <int T, int W>
__device__ __forceinline__ void many_best(struct many_shared<T, W> *m, const uint32_t *ranks,
                                          const struct mma_args &a, const struct chunk &chunk,
                                          int n_row, int first_warp, int n_warp)
{
    const int warp = static_cast<int>(threadIdx.x) / LANES - first_warp;
    for (int i = warp; i < n_row; i += n_warp) {
        struct candidate *const best = m->best[i][chunk.half];
        const uint32_t *const mine = ranks + i * RANK_STRIDE;
        if (chunk.first == 0) {
            (void)select_keys<CHUNK / LANES>(best, mine, chunk.n, a.s.k_top);
        } else {
            (void)select_more<CHUNK / LANES>(best, mine, chunk.first, chunk.n, a.s.k_top);
        }
    }
}

template <int T, int W>
__device__ __forceinline__ void many_slots(struct many_shared<T, W> *m, const struct mma_args &a,
                                           int64_t first, int n_row, int head)
{
    const int warp = static_cast<int>(threadIdx.x) / LANES;
    for (int i = warp; i < n_row; i += W) {
        select_slots(&a.s, m->best[i][0], m->best[i][1], m->chosen[warp], m->pair, a.pairs.n,
                     first + i, head);
    }
}

template <int T>
__global__ void __launch_bounds__(WARPS *LANES, 2) many_kernel(const struct mma_args a)
{
    constexpr int n_tile = T / ROWS;
    DYN_SHARED(uint4, queries); /* [n_tile][n_block][hi, lo][g, g+8][32 lanes] */
    uint32_t *const ranks =
        reinterpret_cast<uint32_t *>(queries + n_tile * a.n_block * 4 * LANES); /* [T][stride] */
    using shared = struct many_shared<T, WARPS>;
    shared *const m = reinterpret_cast<shared *>(ranks + T * RANK_STRIDE);
    const int head = static_cast<int>(blockIdx.x);
    const int64_t first = static_cast<int64_t>(blockIdx.y) * T;
    const int n_row = static_cast<int>(a.s.query.rows - first < T ? a.s.query.rows - first : T);
    grid_wait();
    load_pairs(m->pair, a.pairs);
#pragma unroll /* one body for both halves would spill on sm_100 */
    for (int half = 0; half < 2; half++) {
        const struct chunk chunk = {half, 0, a.s.n_key, a.n_key_padded};
        load_queries<n_tile>(queries, a, first, n_row, head, half);
        __syncthreads(); /* they are there, and the ranks of the half before have been read */
        many_scores<T>(ranks, queries, a, head, chunk, WARPS);
        __syncthreads();
        many_best(m, ranks, a, chunk, n_row, 0, WARPS);
    }
    __syncthreads();
    many_slots(m, a, first, n_row, head);
}

template <int T>
__global__ void __launch_bounds__(2 * WARPS * LANES, 1) wide_kernel(const struct mma_args a)
{
    constexpr int n_tile = T / ROWS;
    DYN_SHARED(uint4, queries); /* of both halves, as many_kernel has them of one */
    const int n_query = n_tile * a.n_block * 4 * LANES;
    uint32_t *const ranks = reinterpret_cast<uint32_t *>(queries + 2 * n_query); /* of two chunks */
    using shared = struct many_shared<T, 2 * WARPS>;
    shared *const m = reinterpret_cast<shared *>(ranks + 2 * T * RANK_STRIDE);
    const int head = static_cast<int>(blockIdx.x);
    const int64_t first = static_cast<int64_t>(blockIdx.y) * T;
    const int n_row = static_cast<int>(a.s.query.rows - first < T ? a.s.query.rows - first : T);
    const int n_chunk = 2 * ((a.n_key_padded + CHUNK - 1) / CHUNK);
    grid_wait();
    load_pairs(m->pair, a.pairs);
    load_queries<n_tile>(queries, a, first, n_row, head, 0);
    load_queries<n_tile>(queries + n_query, a, first, n_row, head, 1);
    __syncthreads();
#pragma unroll 1
    for (int i = 0; i <= n_chunk;
         i++) { /* scores chunk i, selects of the one before: one of them with all warps */
        const int n_warp = i == 0 || i == n_chunk ? 2 * WARPS : +WARPS;
        const int n_scoring = i == n_chunk ? 0 : n_warp;
        if (static_cast<int>(threadIdx.x) < n_scoring * LANES) {
            const struct chunk chunk = chunk_of(a, i);
            many_scores<T>(ranks + i % 2 * T * RANK_STRIDE, queries + chunk.half * n_query, a, head,
                           chunk, n_warp);
        } else {
            many_best(m, ranks + (i + 1) % 2 * T * RANK_STRIDE, a, chunk_of(a, i - 1), n_row,
                      n_scoring, n_warp);
        }
        __syncthreads();
    }
    many_slots(m, a, first, n_row, head);
}

/* ---- launches -------------------------------------------------------------------------------- */

/* Blocks of T rows. */
template <int T> dim3 many_grid(const struct mma_args *a)
{
    return dim3(static_cast<unsigned>(a->s.n_head),
                static_cast<unsigned>((a->s.query.rows + T - 1) / T));
}

/* Bytes for the queries of n_half halves, and the ranks of as many chunks, of T rows. */
template <int T> size_t many_bytes(const struct mma_args *a, size_t n_half)
{
    return n_half * (query_bytes(a, T / ROWS) + T * RANK_STRIDE * sizeof(uint32_t));
}

/* False if a block's shared memory does not fit this GPU's. */
template <int T>
bool launch_of(struct cuda *cu, const struct mma_args *a, void (*kernel)(struct mma_args),
               int n_warp, size_t bytes)
{
    if (bytes + 1024 > cu->shared_max) { /* the system takes some */
        return false;
    }
    if (cuda_shared(cu, kernel, bytes, "pkm_search")) {
        LAUNCH(kernel, many_grid<T>(a), dim3(static_cast<unsigned>(n_warp * LANES)), bytes,
               cuda_queue(cu), *a);
    }
    return true;
}

template <int T> bool launch_many(struct cuda *cu, const struct mma_args *a)
{
    return launch_of<T>(cu, a, many_kernel<T>, WARPS,
                        many_bytes<T>(a, 1) + sizeof(struct many_shared<T, WARPS>));
}

template <int T> bool launch_wide(struct cuda *cu, const struct mma_args *a)
{
    return launch_of<T>(cu, a, wide_kernel<T>, 2 * WARPS,
                        many_bytes<T>(a, 2) + sizeof(struct many_shared<T, 2 * WARPS>));
}

/* Whether no block of T rows waits for another. */
template <int T> bool is_one_round(const struct cuda *cu, const struct mma_args *a)
{
    const dim3 grid = many_grid<T>(a);
    return grid.x * grid.y <= static_cast<unsigned>(cu->n_sm);
}

} // namespace

/* As few rows as leave no multiprocessor without a block, and then as few blocks as there can
 * be. */
bool search_many(struct cuda *cu, const struct mma_args *a)
{
    const bool is_wide = a->s.n_key > CHUNK;
    return (is_one_round<16>(cu, a) && launch_wide<16>(cu, a)) ||
           ((is_wide || is_one_round<32>(cu, a)) && launch_wide<32>(cu, a)) ||
           (is_wide ? launch_wide<16>(cu, a) : launch_many<32>(cu, a) || launch_many<16>(cu, a));
}
