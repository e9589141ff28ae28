/* The first half of a memory layer: which slots a query chooses, and with which weights (Large
 * Memory Layers with Product Keys, section 3.1 and eq. 3 to 5; exact).
 *
 *   1. scores of both halves of the query with their n_key sub-keys: one chain of multiply-adds per
 *      key in ascending column
 *   2. the k best of each half
 *   3. the sums a_i + b_j of the pairs of ranks (from 1) i·j <= k, which hold the k best of all
 *      pairs: 119 of 1024 for k = 32
 *   4. the k best sums, and the softmax over them
 *
 * All four are one kernel, in two forms that give the same bits:
 *   split  up to KEYS_ROWS rows. Latency counts: the keys of a head (512 KiB for 2·512 keys of
 *          128) are read by many blocks at once, a key per thread; their scores go to scratch, and
 *          the last block of a head to arrive selects. T = 1 row and 64 threads, or 4 and 128,
 *          grid (2·n_key / threads, n_head, rows / T).
 *   tile   more rows. A block reads the keys of a head once for T rows and keeps the T·2·n_key
 *          scores in shared memory; its eight warps select. grid (n_head, rows / T), 256 threads.
 * Both are for k_top <= 32, n_key <= 2048, d_key <= 1024 and keys of each half's own;
 * pkm_search_flat.cu searches flat keys, pkm_search_generic.cu the rest. Split keys of these shapes
 * are pkm_search_mma.cu's, with bits of its own.
 *
 * Per row and head: 2·n_key·d_half multiply-adds (131 k for 512 keys of 128), then the selections,
 * 1920 instructions of a warp (pkm_search_mma.cu). Bytes: split reads the keys once per T rows
 * (from L2 after the first tile), tile once per 16. Bound: split latency, some 3 dependent phases;
 * tile F32 arithmetic. Share of the bound reached: not measured yet. */
#include "kernels/cuda/pkm_search_tile.cuh"

#include <string.h>

namespace
{

constexpr int AHEAD = 32; /* groups of four of its columns that a thread asks for early */

/* Of the split kernel for T rows: a warp for each, for a single one two. */
template <int T> constexpr int split_threads = (T > 2 ? T : 2) * SELECT_WARP;

/* ---- split: few rows ------------------------------------------------------------------------- */

struct split_scratch {
    uint32_t *ranks;   /* [KEYS_ROWS, n_group·n_key_padded] */
    unsigned *arrived; /* [KEYS_ROWS, n_head]: blocks of a tile and head that are done */
};

/* Lets the first columns of a thread's key come to the second-level cache, which a step's weights
 * may have driven them out of: 512 KiB a head for 2·512 keys of 128. */
__device__ __forceinline__ void ask_for_key(const struct search &s, int head, int64_t at)
{
    const int64_t padded = s.layout.n_key_padded;
    const int half = at >= padded ? 1 : 0;
    const float4 *const key =
        s.keys + (2 * head + half) * s.layout.group_quads + (at - half * padded);
    const int n = static_cast<int>(s.layout.d_quad);
    for (int c = 0; c < n && c < AHEAD; c++) {
        prefetch_l2(key + c * padded);
    }
}

/* The last block of a tile and head selects for its rows, each half and then each row by a warp. */
template <int T>
__device__ void split_select(const struct search *s, const uint32_t *ranks, const uint16_t *pair,
                             int n_pair, int64_t first, int n_row, int head)
{
    constexpr int n_warp = split_threads<T> / SELECT_WARP;
    __shared__ __align__(16) struct candidate best[T][2][K_MAX];
    __shared__ __align__(16) struct candidate chosen[n_warp][K_MAX];
    const int64_t padded = s->layout.n_key_padded;
    const int warp = threadIdx.x / SELECT_WARP;
    for (int i = warp; i < 2 * n_row; i += n_warp) {
        const uint32_t *const mine =
            ranks + ((first + i / 2) * s->n_head + head) * 2 * padded + i % 2 * padded;
        if (s->n_key <= 16 * SELECT_WARP) {
            select_keys<16>(best[i / 2][i % 2], mine, s->n_key, s->k_top);
        } else {
            select_keys<64>(best[i / 2][i % 2], mine, s->n_key, s->k_top);
        }
    }
    __syncthreads();
    for (int t = warp; t < n_row; t += n_warp) {
        select_slots(s, best[t][0], best[t][1], chosen[warp], pair, n_pair, first + t, head);
    }
}

template <int T>
__global__ void __launch_bounds__(split_threads<T>)
    split_kernel(struct search s, struct pairs pairs, struct split_scratch scratch)
{
    DYN_SHARED(float, queries);
    __shared__ uint16_t pair[PAIR_MAX];
    const int head = blockIdx.y;
    const int64_t first = static_cast<int64_t>(blockIdx.z) * T;
    const int n_row = static_cast<int>(s.query.rows - first < T ? s.query.rows - first : T);
    const int64_t padded = s.layout.n_key_padded;
    const int64_t at = static_cast<int64_t>(blockIdx.x) * split_threads<T> + threadIdx.x;
    if (s.starts_early && at < 2 * padded) {
        ask_for_key(s, head, at);
    }
    grid_wait();
    load_queries<T, 2>(queries, &s, first, head);
    load_pairs(pair, pairs);
    __syncthreads();
    if (at < 2 * padded) {
        const int half = at >= padded ? 1 : 0;
        const int64_t key = at - half * padded;
        const int n_quad = static_cast<int>(s.layout.d_quad);
        const float4 *const keys = s.keys + (2 * head + half) * s.layout.group_quads + key;
        const float4 *const q = reinterpret_cast<const float4 *>(queries) + half * n_quad;
        float sum[T] = {};
#pragma unroll 16
        for (int c = 0; c < n_quad; c++) {
            const float4 column = __ldg(keys + c * padded);
#pragma unroll
            for (int t = 0; t < T; t++) {
                sum[t] = chain(column, q[t * 2 * n_quad + c], sum[t]);
            }
        }
        for (int t = 0; t < n_row; t++) {
            scratch.ranks[(first + t) * 2 * s.n_head * padded + 2 * head * padded + at] =
                rank_of_score(sum[t]);
        }
    }
    if (is_last_block(scratch.arrived + blockIdx.z * gridDim.y + head, gridDim.x)) {
        split_select<T>(&s, scratch.ranks, pair, pairs.n, first, n_row, head);
    }
}

/* ---- tile: many rows ------------------------------------------------------------------------- */

template <int T, int V>
__global__ void __launch_bounds__(TILE_THREADS, V > 32 ? 1 : 2)
    tile_kernel(struct search s, struct pairs pairs)
{
    DYN_SHARED(float4, queries);
    __shared__ __align__(16) struct candidate best[T][2][K_MAX];
    __shared__ __align__(16) struct candidate chosen[TILE_THREADS / SELECT_WARP][K_MAX];
    __shared__ uint16_t pair[PAIR_MAX];
    const int head = blockIdx.x;
    const int64_t first = static_cast<int64_t>(blockIdx.y) * T;
    const int n_row = static_cast<int>(s.query.rows - first < T ? s.query.rows - first : T);
    const int padded = static_cast<int>(s.layout.n_key_padded);
    uint32_t *const ranks = reinterpret_cast<uint32_t *>(queries + T * 2 * s.layout.d_quad);
    const int warp = threadIdx.x / SELECT_WARP;
    grid_wait();
    load_queries<T, 2>(reinterpret_cast<float *>(queries), &s, first, head);
    load_pairs(pair, pairs);
    __syncthreads();
    for (int half = 0; half < 2; half++) {
        tile_scores<T>(ranks + half * padded, 2 * padded,
                       s.keys + (2 * head + half) * s.layout.group_quads, padded, padded,
                       queries + half * s.layout.d_quad, 2 * static_cast<int>(s.layout.d_quad),
                       static_cast<int>(s.layout.d_quad));
    }
    __syncthreads();
    for (int i = warp; i < 2 * n_row; i += TILE_THREADS / SELECT_WARP) {
        select_keys<V>(best[i / 2][i % 2], ranks + i * padded, s.n_key, s.k_top);
    }
    __syncthreads();
    for (int t = warp; t < n_row; t += TILE_THREADS / SELECT_WARP) {
        select_slots(&s, best[t][0], best[t][1], chosen[warp], pair, pairs.n, first + t, head);
    }
}

/* ---- launches -------------------------------------------------------------------------------- */

template <int T> void launch_split(struct cuda *cu, const struct search *s)
{
    const int64_t padded = s->layout.n_key_padded;
    const int64_t n_group = 2 * static_cast<int64_t>(s->n_head);
    char *const behind =
        const_cast<char *>(reinterpret_cast<const char *>(s->keys)) + s->layout.scratch_bytes;
    uint32_t *const ranks = reinterpret_cast<uint32_t *>(behind);
    const struct split_scratch scratch = {
        ranks, reinterpret_cast<unsigned *>(ranks + KEYS_ROWS * n_group * padded)};
    constexpr int n_thread = split_threads<T>;
    const dim3 grid(static_cast<unsigned>((2 * padded + n_thread - 1) / n_thread),
                    static_cast<unsigned>(s->n_head),
                    static_cast<unsigned>((s->query.rows + T - 1) / T));
    const size_t bytes = T * 2 * static_cast<size_t>(s->layout.d_quad) * sizeof(float4);
    LAUNCH(split_kernel<T>, grid, dim3(n_thread), bytes, cuda_queue(cu), *s, pairs_of(s->k_top),
           scratch);
}

/* False if the scores of T rows do not fit the shared memory of this GPU. */
template <int T, int V> bool launch_tile(struct cuda *cu, const struct search *s)
{
    const size_t fixed = (2 * T + TILE_THREADS / SELECT_WARP) * K_MAX * sizeof(struct candidate) +
                         1024; /* the pairs, and what the system takes */
    const size_t bytes = T * 2 *
                         (static_cast<size_t>(s->layout.d_quad) * sizeof(float4) +
                          static_cast<size_t>(s->layout.n_key_padded) * sizeof(uint32_t));
    if (fixed + bytes > cu->shared_max) {
        return false;
    }
    const dim3 grid(static_cast<unsigned>(s->n_head),
                    static_cast<unsigned>((s->query.rows + T - 1) / T));
    if (cuda_shared(cu, tile_kernel<T, V>, bytes, "pkm_search")) {
        LAUNCH((tile_kernel<T, V>), grid, dim3(TILE_THREADS), bytes, cuda_queue(cu), *s,
               pairs_of(s->k_top));
    }
    return true;
}

/* As many rows per block as its shared memory holds; every GPU holds four. */
bool launch_tiles(struct cuda *cu, const struct search *s)
{
    if (s->n_key <= 512) {
        return launch_tile<16, 16>(cu, s) || launch_tile<8, 16>(cu, s);
    }
    if (s->n_key <= 1024) {
        return launch_tile<8, 32>(cu, s) || launch_tile<4, 32>(cu, s);
    }
    return launch_tile<4, 64>(cu, s);
}

} // namespace

void cuda_pkm_search(struct cuda *cu, struct tensor slots, struct tensor weights,
                     struct tensor query, const struct weight *keys, const struct pkm_shape *shape)
{
    struct search s = {};
    s.n_half = shape->kind == PKM_PRODUCT ? 2 : 1;
    s.d = shape->d_key / s.n_half;
    s.keys = static_cast<const float4 *>(cuda_weight_of(keys)->data);
    s.layout = key_layout(shape->n_key, s.d, keys->n_group);
    s.slots = slots;
    s.weights = weights;
    s.query = query;
    s.n_head = shape->n_head;
    s.n_key = shape->n_key;
    s.k_top = shape->k_top;
    s.scores = shape->scores;
    s.starts_early = cu->overlaps;
    /* one set of several groups: each of them is the first */
    const bool is_shared = keys->n_group == 1 && s.n_head * s.n_half > 1;
    s.layout.group_quads = is_shared ? 0 : s.layout.group_quads;
    const bool is_flat = s.n_half == 1;
    if (is_shared || s.k_top > K_MAX || s.d > D_MAX ||
        (is_flat ? !cu->searches_flat : s.n_key > N_KEY_MAX)) {
        search_any(cu, &s);
    } else if (is_flat) {
        search_flat(cu, &s);
    } else if (cuda_weight_of(keys)->split_at > 0 && cu->splits) {
        search_mma(cu, &s, cuda_weight_of(keys));
    } else if (query.rows <= 4) {
        launch_split<1>(cu, &s);
    } else if (query.rows <= KEYS_ROWS) {
        launch_split<4>(cu, &s);
    } else {
        const bool fits = launch_tiles(cu, &s);
        CHECK(fits); /* search_any's weights may differ in the last bit */
    }
    cuda_check(cu, "pkm_search");
}

/* ---- packing --------------------------------------------------------------------------------- */

/* Keys, then scratch: of the split kernel ranks, of the flat one candidates; counters. */
size_t keys_bytes(int64_t rows, int64_t cols, int n_group)
{
    const struct key_layout l = key_layout(rows / n_group, cols, n_group);
    const int64_t ranks = KEYS_ROWS * static_cast<int64_t>(n_group) * l.n_key_padded;
    const int64_t counters = KEYS_ROWS * static_cast<int64_t>(n_group);
    return static_cast<size_t>(l.scratch_bytes + (ranks + counters) * 4);
}

void keys_pack(void *dst, const struct cuda_source *source, int n_group)
{
    const struct tensor *const host = &source->view;
    const int64_t n_key = host->rows / n_group;
    const struct key_layout l = key_layout(n_key, host->cols, n_group);
    memset(dst, 0, keys_bytes(host->rows, host->cols, n_group));
    float *const packed = static_cast<float *>(dst);
    for (int64_t row = 0; row < host->rows; row++) {
        float *const group = packed + row / n_key * l.group_quads * 4;
        for (int64_t c = 0; c < host->cols; c++) {
            group[(c / 4 * l.n_key_padded + row % n_key) * 4 + c % 4] =
                cuda_host_value(source, row, c);
        }
    }
}
