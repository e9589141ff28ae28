/* The memory search for flat keys: the k_top best of all n_key keys of a head, exactly
 * (pkm_select.cuh's rules).
 *
 * The keys of a head are cut in parts of 512, which do not depend on the number of rows. A block
 * scores a part for T rows, as pkm_search.cu's tiles do, and a warp chooses the best of each row.
 * Of several parts they go to scratch, and the last block of a tile of rows and head to arrive
 * chooses among them: of one row all its warps, each of a share, and then one of what they chose;
 * of more rows a warp each. What is chosen is the same however it is shared out, for no two
 * candidates are equal. grid (parts, n_head, rows / T).
 *
 * Per tile and head: n_key·d·4 bytes of keys, n_key·d multiply-adds of each row; per part and row a
 * choice from 512, and n_key / 15 candidates for the last block. Bound: of one row memory; of 16384
 * keys of 256 columns in 4 heads 67 MB, by 128 blocks at once; of many rows F32 arithmetic. Share
 * of the bound reached: not measured yet. */
#include "kernels/cuda/pkm_search_tile.cuh"

namespace
{

enum {
    PART = 512, /* keys */
    WARPS = TILE_THREADS / SELECT_WARP,
    PART_V = PART / SELECT_WARP, /* candidates of a lane, of a part */
    MERGE_V = 16,                /* likewise, of the parts */
    /* Numbers of what is no key, each of its own: their rank is that of a NaN, so that every key is
     * better. */
    NO_KEY = 0x7f000000,           /* .. + PART: of the last part */
    NO_BEST = NO_KEY + PART,       /* .. + 32 for each warp: none chosen yet */
    NO_CANDIDATE = NO_KEY + 0x1000 /* .. + 32·MERGE_V: behind the last one */
};

struct flat_scratch {
    struct candidate *best; /* [rows][n_head][n_part][k_top] */
    unsigned *arrived;      /* [tiles of rows][n_head] blocks that are done, 0 before and after */
    int n_part;
};

/* Lane j < k_top gets the j-th best of a part, of whose keys first .. first+n-1 these are the
 * ranks. */
__device__ __forceinline__ struct candidate best_of_part(const uint32_t *ranks, int first, int n,
                                                         int k, struct candidate *chosen)
{
    uint32_t rank[PART_V];
    uint32_t number[PART_V];
#pragma unroll
    for (int v = 0; v < PART_V; v++) {
        const int key = v * SELECT_WARP + static_cast<int>(threadIdx.x) % SELECT_WARP;
        rank[v] = key < n ? ranks[key] : SELECT_NAN;
        number[v] = static_cast<uint32_t>(key < n ? first + key : NO_KEY + key);
    }
    return warp_best<PART_V>(rank, number, k, chosen);
}

/* The same of every n_share-th run of the n candidates, from run share on. */
__device__ __forceinline__ struct candidate best_of_share(const volatile struct candidate *all,
                                                          int n, int share, int n_share, int k,
                                                          struct candidate *chosen)
{
    constexpr int n_run = MERGE_V * SELECT_WARP;
    const int lane = static_cast<int>(threadIdx.x) % SELECT_WARP;
    const struct candidate none = {SELECT_NAN, static_cast<uint32_t>(NO_BEST + lane)};
    struct candidate best = none;
#pragma unroll 1
    for (int at = share * n_run; at < n; at += n_share * n_run) {
        uint32_t rank[MERGE_V + 1]; /* the last: the best so far */
        uint32_t number[MERGE_V + 1];
#pragma unroll
        for (int v = 0; v < MERGE_V; v++) {
            const int i = at + v * SELECT_WARP + lane;
            const bool is_there = i < n;
            rank[v] = is_there ? all[i].rank : SELECT_NAN;
            number[v] = is_there ? all[i].number
                                 : static_cast<uint32_t>(NO_CANDIDATE + v * SELECT_WARP + lane);
        }
        rank[MERGE_V] = lane < k ? best.rank : none.rank;
        number[MERGE_V] = lane < k ? best.number : none.number;
        best = warp_best<MERGE_V + 1>(rank, number, k, chosen);
    }
    return best;
}

/* The best of what all warps have chosen, by one. */
__device__ __forceinline__ struct candidate best_of_warps(const struct candidate (*chosen)[K_MAX],
                                                          int k, struct candidate *room)
{
    const int lane = static_cast<int>(threadIdx.x) % SELECT_WARP;
    uint32_t rank[WARPS];
    uint32_t number[WARPS];
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
        const struct candidate c = chosen[w][lane];
        const bool is_there = lane < k && c.number < NO_KEY + PART;
        rank[w] = is_there ? c.rank : SELECT_NAN;
        number[w] = is_there ? c.number : static_cast<uint32_t>(NO_BEST + w * SELECT_WARP + lane);
    }
    return warp_best<WARPS>(rank, number, k, room);
}

template <int T>
__global__ void __launch_bounds__(TILE_THREADS, 2)
    flat_kernel(struct search s, struct flat_scratch scratch)
{
    DYN_SHARED(float4, queries); /* [T][d_quad], then ranks [T][PART] */
    __shared__ __align__(16) struct candidate chosen[WARPS][K_MAX];
    __shared__ __align__(16) struct candidate merged[K_MAX];
    const int n_quad = static_cast<int>(s.layout.d_quad);
    uint32_t *const ranks = reinterpret_cast<uint32_t *>(queries + T * n_quad);
    const int part = static_cast<int>(blockIdx.x);
    const int head = static_cast<int>(blockIdx.y);
    const int64_t tile = blockIdx.z;
    const int64_t first = tile * T;
    const int n_row = static_cast<int>(s.query.rows - first < T ? s.query.rows - first : T);
    const int first_key = part * PART;
    const int n_key = s.n_key - first_key < PART ? s.n_key - first_key : +PART;
    const int n_padded = static_cast<int>(s.layout.n_key_padded) - first_key;
    const int warp = static_cast<int>(threadIdx.x) / SELECT_WARP;
    const int lane = static_cast<int>(threadIdx.x) % SELECT_WARP;
    grid_wait();
    load_queries<T, 1>(reinterpret_cast<float *>(queries), &s, first, head);
    __syncthreads();
    tile_scores<T>(ranks, PART, s.keys + head * s.layout.group_quads + first_key,
                   s.layout.n_key_padded, n_padded < PART ? n_padded : +PART, queries, n_quad,
                   n_quad);
    __syncthreads();
    for (int t = warp; t < n_row; t += WARPS) {
        const struct candidate best =
            best_of_part(ranks + t * PART, first_key, n_key, s.k_top, chosen[warp]);
        if (scratch.n_part == 1) {
            write_best(&s, best, first + t, head);
        } else if (lane < s.k_top) {
            const int64_t to = ((first + t) * s.n_head + head) * scratch.n_part + part;
            scratch.best[to * s.k_top + lane] = best;
        }
    }
    if (scratch.n_part == 1 || !is_last_block(scratch.arrived + tile * s.n_head + head,
                                              static_cast<unsigned>(scratch.n_part))) {
        return;
    }
    constexpr int n_share = T == 1 ? +WARPS : 1; /* warps of a row */
    const int n = scratch.n_part * s.k_top;
    for (int t = warp / n_share; t < n_row; t += WARPS / n_share) {
        const struct candidate *const all =
            scratch.best + ((first + t) * s.n_head + head) * static_cast<int64_t>(n);
        const struct candidate best =
            best_of_share(all, n, warp % n_share, n_share, s.k_top, chosen[warp]);
        if (n_share > 1) {
            chosen[warp][lane] = best;
            __syncthreads();
        }
        if (warp % n_share == 0) {
            write_best(&s, n_share > 1 ? best_of_warps(chosen, s.k_top, merged) : best, first + t,
                       head);
        }
    }
}

/* Searches for as many rows at a time as have room in the scratch behind the keys. */
template <int T> void launch_flat(struct cuda *cu, const struct search *all)
{
    const int64_t n_part = (all->n_key + PART - 1) / PART;
    char *const behind =
        const_cast<char *>(reinterpret_cast<const char *>(all->keys)) + all->layout.scratch_bytes;
    const int64_t room = KEYS_ROWS * all->n_head * all->layout.n_key_padded * 4;
    const int64_t row_bytes =
        all->n_head * n_part * all->k_top * static_cast<int64_t>(sizeof(struct candidate));
    const int64_t fitting = room / row_bytes < KEYS_ROWS * T ? room / row_bytes : KEYS_ROWS * T;
    const int64_t n_max = n_part == 1 ? INT64_MAX : fitting / T * T;
    const struct flat_scratch scratch = {reinterpret_cast<struct candidate *>(behind),
                                         reinterpret_cast<unsigned *>(behind + room),
                                         static_cast<int>(n_part)};
    const size_t bytes =
        T * (static_cast<size_t>(all->layout.d_quad) * sizeof(float4) + PART * sizeof(uint32_t));
    CHECK(n_max > 0 && all->n_key < NO_KEY);
    if (!cuda_shared(cu, flat_kernel<T>, bytes, "pkm_search")) {
        return;
    }
    for (int64_t r = 0; r < all->query.rows; r += n_max) {
        const int64_t n = all->query.rows - r < n_max ? all->query.rows - r : n_max;
        struct search s = *all;
        s.query = tensor_rows(all->query, r, n);
        s.slots = tensor_rows(all->slots, r, n);
        s.weights = tensor_rows(all->weights, r, n);
        const dim3 grid(static_cast<unsigned>(n_part), static_cast<unsigned>(s.n_head),
                        static_cast<unsigned>((n + T - 1) / T));
        LAUNCH(flat_kernel<T>, grid, dim3(TILE_THREADS), bytes, cuda_queue(cu), s, scratch);
    }
}

} // namespace

void search_flat(struct cuda *cu, const struct search *s)
{
    if (s->query.rows == 1) {
        launch_flat<1>(cu, s);
    } else if (s->query.rows <= 4) {
        launch_flat<4>(cu, s);
    } else {
        launch_flat<16>(cu, s);
    }
}
