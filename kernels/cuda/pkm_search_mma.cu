/* The memory search of pkm_search.cu with its scores on tensor cores, for keys that may be taken as
 * sums of two BF16 numbers (struct weight_desc). Steps and selection are the same.
 *
 * A score. Query and key are split, x = hi + lo, both rounded to nearest even, and of the four products
 * three are summed:
 *   score = Σ hi·hi + Σ (hi·lo + lo·hi)
 * How far that is from the score: linear_split.cu.
 * The two sums are chains of mma_bf16 instructions over blocks of 32 columns, ascending: of a block the
 * first instruction takes the columns c with c % 8 < 4, the second the others, as in linear.cuh; in the
 * second chain an instruction's hi·lo comes before its lo·hi. Rows are always the instruction's rows and
 * keys its columns, so a row has the same bits from both kernels, whatever rows are beside it. How
 * tensor cores round within an instruction is not documented; test_kernels tells whether it matters.
 *
 * Keys in memory: [group][8 keys][32 columns][hi, lo][32 lanes][16 bytes]; lane (g, t), which is
 * (lane / 4, lane % 4), has columns 8t .. 8t+7 of key g. That is the fragment of two instructions,
 * (b[0], b[1]) = (x, y) and then (z, w), and a warp reads 512 consecutive bytes. Queries lie in shared
 * memory the same way, rows g and g+8 one after the other: a[0 .. 3] is (x of g, x of g+8, y of g, y
 * of g+8), then with z and w.
 *
 *   few   up to FEW_ROWS rows. A block scores 64 keys of one half for 16 rows, 8 keys a warp, which
 *         are under way before the kernel before has ended; ranks go to scratch. Of up to half as many
 *         rows as it has warps the last block of a head selects, both halves of all rows at once, a warp
 *         each; of more, the last of each half selects that half, and the last of the two the slots. Grid
 *         (2·n_key / 64, n_head, rows / 16).
 *   many  more rows. A block scores all keys for T rows, half by half, 16 keys a warp at a time, keeps
 *         ranks in shared memory and selects. Grid (n_head, rows / T); T is 16 where that gives no more
 *         blocks than there are multiprocessors, else 32. Where even 16 rows do not fit the shared memory,
 *         few takes FEW_ROWS rows at a time.
 * A block has 8 warps; 16 where the grid leaves it a multiprocessor to itself, since a warp's selections wait
 * for their own results: of few rows the upper 8 do nothing else.
 *
 * Per row and head 3 · 2·n_key·d_half multiply-adds on tensor cores (393 k for 512 keys of 128), then
 * 2·n_key ranks to select among: 1920 instructions of a warp, of the code for sm_90, at 7 probes each (660 a
 * half and 600 for the pairs; every bit probed in turn, and the chosen counted one after the other, they
 * were 4030). Bytes: few reads the keys (4 per column) once per 16 rows, many once per T, from L2 after the
 * first. Bound: few latency, three dependent phases, of which a half takes some 1600 clocks and the pairs
 * 1400; many L2, then the selection (1024 rows, 4 heads, 512 keys of 128, T = 32: 64 MB, some 13 us; 31
 * selections of both halves and pairs per multiprocessor, some 8). So 256 rows are few: 1024 blocks draw
 * 42 MB by all multiprocessors, 32 blocks of 32 rows 17 MB by a quarter of them.
 * Registers on sm_90 and sm_100 (nvcc 13.0, nothing spilled): few 114 and 116, of more than 512 keys 202 and
 * 157; many 95 to 120 and to 126, of more than 1024 keys 155 and 152. Two blocks of 8 warps of a multiprocessor
 * at a time, one where a thread takes more than 128; T = 32 takes 99 KB of shared memory with keys of 128
 * columns, few 14 KB. Share of the bound reached: not measured yet. */
#include "kernels/cuda/persistent.cuh"
#include "kernels/cuda/pkm_search.cuh"

#include <string.h>

namespace
{

enum {
    ROWS = 16,    /* of an instruction */
    KEYS = 8,     /* likewise */
    COLUMNS = 32, /* of a block */
    PIECE = 8,    /* columns of 16 bytes */
    PIECES = COLUMNS / PIECE,
    LANES = 32,
    WARPS = 8, /* of a block, or twice as many */
    FEW_ROWS = 256,
    FEW_KEYS = WARPS * KEYS, /* of a block; keys are padded to a multiple of it */
    FEW_AHEAD = 4,           /* blocks of 32 columns that are asked for early */
    MANY_TILES = 2,          /* of 8 keys that a warp scores at a time */
    RANK_PAD = 8 /* ranks between rows in shared memory: 8 rows' stores fall into 32 banks */
};

/* Of keys packed for this kernel, and its scratch behind them. */
struct mma_layout {
    int n_block; /* of 32 columns */
    int n_key_padded;
    size_t group_pieces; /* of 16 bytes, from one group to the next */
    size_t rank_at;      /* offset of ranks [FEW_ROWS, n_group, n_key_padded] */
    size_t best_at;      /* of candidates [FEW_ROWS, n_group, K_MAX] */
    size_t counter_at;   /* of counters [FEW_ROWS / ROWS, n_group / 2, COUNTERS] */
    size_t bytes;        /* of all */
};

enum { COUNTERS = 3 }; /* of a tile and head: one for each half, one for both */

struct mma_layout mma_layout(int64_t n_key, int64_t d, int n_group)
{
    struct mma_layout l;
    l.n_block = static_cast<int>((d + COLUMNS - 1) / COLUMNS);
    l.n_key_padded = static_cast<int>((n_key + FEW_KEYS - 1) / FEW_KEYS * FEW_KEYS);
    l.group_pieces =
        static_cast<size_t>(l.n_key_padded / KEYS) * static_cast<size_t>(l.n_block) * 2 * LANES;
    const size_t n = static_cast<size_t>(n_group);
    l.rank_at = n * l.group_pieces * sizeof(uint4);
    l.best_at = l.rank_at + FEW_ROWS * n * static_cast<size_t>(l.n_key_padded) * sizeof(uint32_t);
    l.counter_at = l.best_at + FEW_ROWS * n * K_MAX * sizeof(struct candidate);
    l.bytes = l.counter_at + FEW_ROWS / ROWS * n / 2 * COUNTERS * sizeof(unsigned);
    return l;
}

struct mma_args {
    struct search s;
    struct pairs pairs;
    const uint4 *keys;
    size_t group_pieces;
    int n_block, n_key_padded;
    bool has_groups; /* queries may be read 16 bytes at a time, and columns come in fours */
    uint32_t *ranks; /* scratch of few rows */
    struct candidate *best;
    unsigned *arrived;
};

/* ---- scores ---------------------------------------------------------------------------------- */

/* Columns c .. c+7 of a query; what is not there is zero. */
__device__ __forceinline__ void load_piece(float (&x)[PIECE], const struct mma_args &a,
                                           const float *query, int c, bool is_row)
{
    if (a.has_groups) {
#pragma unroll
        for (int i = 0; i < PIECE; i += 4) {
            const float4 four = is_row && c + i < a.s.d
                                    ? *reinterpret_cast<const float4 *>(query + c + i)
                                    : make_float4(0, 0, 0, 0);
            x[i] = four.x, x[i + 1] = four.y, x[i + 2] = four.z, x[i + 3] = four.w;
        }
        return;
    }
#pragma unroll
    for (int i = 0; i < PIECE; i++) {
        x[i] = is_row && c + i < a.s.d ? query[c + i] : 0;
    }
}

/* to[tiles of 16 rows][n_block][hi, lo][rows g, g+8][32 lanes] ← one half of a head's queries, of rows
 * first .. first+n_row-1; other rows and columns are zero. A barrier follows. */
template <int n_tile>
__device__ __forceinline__ void load_queries(uint4 *to, const struct mma_args &a, int64_t first,
                                             int n_row, int head, int half)
{
    const int n_piece = a.n_block * PIECES;
    const float *const query = static_cast<const float *>(a.s.query.data) +
                               first * a.s.query.stride +
                               static_cast<int64_t>(2 * head + half) * a.s.d;
    for (int i = threadIdx.x; i < n_tile * ROWS * n_piece; i += blockDim.x) {
        const int row = i / n_piece;
        const int piece = i - row * n_piece;
        const bool is_row = row < n_row;
        float x[PIECE];
        load_piece(x, a, query + (is_row ? row : 0) * a.s.query.stride, piece * PIECE, is_row);
        uint32_t hi[PIECE / 2];
        uint32_t lo[PIECE / 2];
#pragma unroll
        for (int j = 0; j < PIECE / 2; j++) {
            const uint2 pair = bf16_split_pair(x[2 * j], x[2 * j + 1]);
            hi[j] = pair.x;
            lo[j] = pair.y;
        }
        uint4 *const at = to +
                          ((row / ROWS * a.n_block + piece / PIECES) * 4 + row % ROWS / 8) * LANES +
                          row % 8 * PIECES + piece % PIECES;
        at[0] = make_uint4(hi[0], hi[1], hi[2], hi[3]);
        at[2 * LANES] = make_uint4(lo[0], lo[1], lo[2], lo[3]);
    }
}

/* The two chains of a warp's scores: d[tile of rows][tile of keys] of the instruction. */
template <int n_row_tile, int n_key_tile> struct chains {
    float upper[n_row_tile][n_key_tile][4];
    float lower[n_row_tile][n_key_tile][4];
};

/* Adds a block of 32 columns. queries: this lane's of the block, in the first tile; keys: hi and lo of
 * each tile. */
template <int n_row_tile, int n_key_tile>
__device__ __forceinline__ void add_block(struct chains<n_row_tile, n_key_tile> &sum,
                                          const uint4 *queries, int tile_pieces,
                                          const uint4 (&keys)[n_key_tile][2])
{
#pragma unroll
    for (int m = 0; m < n_row_tile; m++) {
        const uint4 *const q = queries + m * tile_pieces;
        const uint4 hi_g = q[0];
        const uint4 hi_g8 = q[LANES];
        const uint4 lo_g = q[2 * LANES];
        const uint4 lo_g8 = q[3 * LANES];
        const uint32_t hi[2][4] = {{hi_g.x, hi_g8.x, hi_g.y, hi_g8.y},
                                   {hi_g.z, hi_g8.z, hi_g.w, hi_g8.w}};
        const uint32_t lo[2][4] = {{lo_g.x, lo_g8.x, lo_g.y, lo_g8.y},
                                   {lo_g.z, lo_g8.z, lo_g.w, lo_g8.w}};
#pragma unroll
        for (int i = 0; i < 2; i++) { /* instruction */
#pragma unroll
            for (int n = 0; n < n_key_tile; n++) {
                const uint4 k_hi = keys[n][0];
                const uint4 k_lo = keys[n][1];
                const uint32_t b_hi[2] = {i == 0 ? k_hi.x : k_hi.z, i == 0 ? k_hi.y : k_hi.w};
                const uint32_t b_lo[2] = {i == 0 ? k_lo.x : k_lo.z, i == 0 ? k_lo.y : k_lo.w};
                mma_bf16(sum.upper[m][n], hi[i], b_hi);
                mma_bf16(sum.lower[m][n], hi[i], b_lo);
                mma_bf16(sum.lower[m][n], lo[i], b_hi);
            }
        }
    }
}

/* Ranks of the lane's two scores of row tile m, rows g (h 0) or g+8 (h 1), keys 2t and 2t+1 of tile
 * n. */
template <int n_row_tile, int n_key_tile>
__device__ __forceinline__ uint2 ranks_of(const struct chains<n_row_tile, n_key_tile> &sum, int m,
                                          int n, int h)
{
    return make_uint2(rank_of_score(sum.upper[m][n][2 * h] + sum.lower[m][n][2 * h]),
                      rank_of_score(sum.upper[m][n][2 * h + 1] + sum.lower[m][n][2 * h + 1]));
}

/* ---- few rows -------------------------------------------------------------------------------- */

/* Blocks first .. first+FEW_AHEAD-1 of a warp's keys, of those that there are. */
__device__ __forceinline__ void load_keys(uint4 (&keys)[FEW_AHEAD][1][2], const uint4 *from,
                                          int first, int n_block)
{
#pragma unroll
    for (int b = 0; b < FEW_AHEAD; b++) {
        if (first + b < n_block) {
            keys[b][0][0] = __ldg(from + (first + b) * 2 * LANES);
            keys[b][0][1] = __ldg(from + (first + b) * 2 * LANES + LANES);
        }
    }
}

/* The best keys of both halves of a row. */
struct lists {
    struct candidate half[2][K_MAX];
};

template <int V, int W>
__global__ void __launch_bounds__(W *LANES, V > 16 || W > WARPS ? 1 : 2)
    few_kernel(KERNEL_ARG(struct mma_args) a)
{
    DYN_SHARED(uint4, queries); /* [n_block][hi, lo][g, g+8][32 lanes] */
    __shared__ __align__(16) struct lists best[W];
    __shared__ __align__(16) struct candidate chosen[W][K_MAX];
    __shared__ uint16_t pair[PAIR_MAX];
    const int warp = static_cast<int>(threadIdx.x) / LANES;
    const int lane = static_cast<int>(threadIdx.x) % LANES;
    const int n_part = a.n_key_padded / FEW_KEYS;
    const int half = static_cast<int>(blockIdx.x) / n_part;
    const int key = (static_cast<int>(blockIdx.x) % n_part * WARPS + warp) * KEYS;
    const int head = static_cast<int>(blockIdx.y);
    const int64_t first = static_cast<int64_t>(blockIdx.z) * ROWS;
    const int n_row = static_cast<int>(a.s.query.rows - first < ROWS ? a.s.query.rows - first
                                                                     : static_cast<int>(ROWS));
    const uint4 *const keys =
        a.keys + (2 * head + half) * a.group_pieces + key / KEYS * a.n_block * 2 * LANES + lane;
    const bool scores = warp < WARPS; /* the others select alone */
    uint4 now[FEW_AHEAD][1][2];
    load_keys(now, keys, 0, scores ? a.n_block : 0);
    grid_wait();
    load_queries<1>(queries, a, first, n_row, head, half);
    load_pairs(pair, a.pairs);
    __syncthreads();
    struct chains<1, 1> sum = {
    };
    for (int from = 0; scores && from < a.n_block; from += FEW_AHEAD) {
        uint4 next[FEW_AHEAD][1][2];
        load_keys(next, keys, from + FEW_AHEAD, a.n_block);
#pragma unroll
        for (int b = 0; b < FEW_AHEAD; b++) {
            if (from + b < a.n_block) {
                add_block(sum, queries + (from + b) * 4 * LANES + lane, 0, now[b]);
            }
        }
#pragma unroll
        for (int b = 0; b < FEW_AHEAD; b++) {
            now[b][0][0] = next[b][0][0];
            now[b][0][1] = next[b][0][1];
        }
    }
    const int64_t n_head = a.s.n_head;
    const auto group_of = [&](int row, int of_half) {
        return ((first + row) * n_head + head) * 2 + of_half;
    };
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int row = lane / 4 + 8 * h;
        if (scores && row < n_row) {
            *reinterpret_cast<uint2 *>(a.ranks + group_of(row, half) * a.n_key_padded + key +
                                       lane % 4 * 2) = ranks_of(sum, 0, 0, h);
        }
    }
    unsigned *const arrived = a.arrived + (blockIdx.z * n_head + head) * COUNTERS;
    const bool is_apart = n_row > W / 2;
    if (!is_last_block(arrived + (is_apart ? half : 0),
                       static_cast<unsigned>(is_apart ? n_part : 2 * n_part))) {
        return;
    }
    if (!is_apart && warp < 2 * n_row) {
        (void)select_keys<V>(best[warp / 2].half[warp % 2],
                             a.ranks + group_of(warp / 2, warp % 2) * a.n_key_padded, a.s.n_key,
                             a.s.k_top);
    }
    for (int row = warp; is_apart && row < n_row; row += W) {
        a.best[group_of(row, half) * K_MAX + lane] = select_keys<V>(
            chosen[warp], a.ranks + group_of(row, half) * a.n_key_padded, a.s.n_key, a.s.k_top);
    }
    if (is_apart && !is_last_block(arrived + 2, 2)) {
        return;
    }
    __syncthreads(); /* without a second counter: the lists are there */
    for (int row = warp; row < n_row; row += W) {
        struct lists *const mine = &best[is_apart ? warp : row];
        if (is_apart) {
            mine->half[0][lane] = a.best[group_of(row, 0) * K_MAX + lane];
            mine->half[1][lane] = a.best[group_of(row, 1) * K_MAX + lane];
            __syncwarp();
        }
        select_slots(&a.s, mine->half[0], mine->half[1], chosen[warp], pair, a.pairs.n, first + row,
                     head);
    }
}

/* ---- many rows ------------------------------------------------------------------------------- */

/* ranks[T][rank_stride] ← of one half of a head. queries: as load_queries wrote them. */
template <int T, int W>
__device__ __forceinline__ void many_scores(uint32_t *ranks, int rank_stride, const uint4 *queries,
                                            const struct mma_args &a, int head, int half)
{
    constexpr int n_tile = T / ROWS;
    const int warp = static_cast<int>(threadIdx.x) / LANES;
    const int lane = static_cast<int>(threadIdx.x) % LANES;
    const int tile_pieces = a.n_block * 2 * LANES; /* of 8 keys */
    const uint4 *const group = a.keys + (2 * head + half) * a.group_pieces + lane;
    for (int tile = warp * MANY_TILES; tile < a.n_key_padded / KEYS; tile += W * MANY_TILES) {
        const uint4 *const keys = group + static_cast<int64_t>(tile) * tile_pieces;
        struct chains<n_tile, MANY_TILES> sum = {
        };
        uint4 now[MANY_TILES][2];
        uint4 next[MANY_TILES][2];
#pragma unroll
        for (int n = 0; n < MANY_TILES; n++) {
            now[n][0] = __ldg(keys + n * tile_pieces);
            now[n][1] = __ldg(keys + n * tile_pieces + LANES);
        }
#pragma unroll 1
        for (int b = 0; b < a.n_block; b++) {
            const int ahead = b + 1 < a.n_block ? b + 1 : b;
#pragma unroll
            for (int n = 0; n < MANY_TILES; n++) {
                next[n][0] = __ldg(keys + n * tile_pieces + ahead * 2 * LANES);
                next[n][1] = __ldg(keys + n * tile_pieces + ahead * 2 * LANES + LANES);
            }
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
                    *reinterpret_cast<uint2 *>(ranks + row * rank_stride + (tile + n) * KEYS +
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

template <int T, int V, int W>
__global__ void __launch_bounds__(W *LANES, V > 16 || W > WARPS ? 1 : 2)
    many_kernel(const struct mma_args a)
{
    constexpr int n_tile = T / ROWS;
    DYN_SHARED(uint4, queries); /* [n_tile][n_block][hi, lo][g, g+8][32 lanes] */
    const int rank_stride = a.n_key_padded + RANK_PAD;
    uint32_t *const ranks =
        reinterpret_cast<uint32_t *>(queries + n_tile * a.n_block * 4 * LANES); /* [T][stride] */
    struct many_shared<T, W> *const m =
        reinterpret_cast<struct many_shared<T, W> *>(ranks + T * rank_stride);
    const int warp = static_cast<int>(threadIdx.x) / LANES;
    const int head = static_cast<int>(blockIdx.x);
    const int64_t first = static_cast<int64_t>(blockIdx.y) * T;
    const int n_row = static_cast<int>(a.s.query.rows - first < T ? a.s.query.rows - first : T);
    grid_wait();
    load_pairs(m->pair, a.pairs);
#pragma unroll /* one body for both halves would spill on sm_100 */
    for (int half = 0; half < 2; half++) {
        load_queries<n_tile>(queries, a, first, n_row, head, half);
        __syncthreads(); /* they are there, and the ranks of the half before have been read */
        many_scores<T, W>(ranks, rank_stride, queries, a, head, half);
        __syncthreads();
        for (int i = warp; i < n_row; i += W) {
            (void)select_keys<V>(m->best[i][half], ranks + i * rank_stride, a.s.n_key, a.s.k_top);
        }
    }
    __syncthreads();
    for (int i = warp; i < n_row; i += W) {
        select_slots(&a.s, m->best[i][0], m->best[i][1], m->chosen[warp], m->pair, a.pairs.n,
                     first + i, head);
    }
}

} // namespace

#ifndef KERNELS_AS_BODIES

namespace
{

/* ---- launches -------------------------------------------------------------------------------- */

size_t query_bytes(const struct mma_args *a, int n_tile)
{
    return static_cast<size_t>(n_tile * a->n_block) * 4 * LANES * sizeof(uint4);
}

template <int V, int W> void launch_few_of(struct cuda *cu, const struct mma_args *a, dim3 grid)
{
    LAUNCH_BODY(cu, body_search(V, W), (few_kernel<V, W>), grid, dim3(W * LANES), query_bytes(a, 1),
                *a);
}

/* Where each block has a multiprocessor to itself, it gets twice the warps to select with. */
void launch_few(struct cuda *cu, const struct mma_args *a)
{
    const dim3 grid(static_cast<unsigned>(2 * a->n_key_padded / FEW_KEYS),
                    static_cast<unsigned>(a->s.n_head),
                    static_cast<unsigned>((a->s.query.rows + ROWS - 1) / ROWS));
    if (a->s.n_key > 16 * SELECT_WARP) {
        launch_few_of<64, WARPS>(cu, a, grid);
    } else if (grid.x * grid.y * grid.z > static_cast<unsigned>(cu->n_sm)) {
        launch_few_of<16, WARPS>(cu, a, grid);
    } else {
        launch_few_of<16, 2 * WARPS>(cu, a, grid);
    }
}

/* Blocks of T rows. */
template <int T> dim3 many_grid(const struct mma_args *a)
{
    return dim3(static_cast<unsigned>(a->s.n_head),
                static_cast<unsigned>((a->s.query.rows + T - 1) / T));
}

/* Whether each has a multiprocessor to itself. */
template <int T> bool is_one_each(const struct cuda *cu, const struct mma_args *a)
{
    const dim3 grid = many_grid<T>(a);
    return grid.x * grid.y <= static_cast<unsigned>(cu->n_sm);
}

/* False if T rows do not fit the shared memory of this GPU. */
template <int T, int V, int W> bool launch_many(struct cuda *cu, const struct mma_args *a)
{
    const size_t ranks = T * static_cast<size_t>(a->n_key_padded + RANK_PAD) * sizeof(uint32_t);
    const size_t bytes = query_bytes(a, T / ROWS) + ranks + sizeof(struct many_shared<T, W>);
    if (bytes + 1024 > cu->shared_max) { /* the system takes some */
        return false;
    }
    if (cuda_shared(cu, many_kernel<T, V, W>, bytes, "pkm_search")) {
        LAUNCH((many_kernel<T, V, W>), many_grid<T>(a), dim3(W * LANES), bytes, cuda_queue(cu), *a);
    }
    return true;
}

/* As few rows as leave no multiprocessor without a block, and then as few blocks as there can be. */
bool launch_many_of(struct cuda *cu, const struct mma_args *a)
{
    if (a->s.n_key > 1024) {
        return launch_many<16, 64, WARPS>(cu, a);
    }
    if (a->s.n_key > 512) {
        return launch_many<16, 32, WARPS>(cu, a);
    }
    return (is_one_each<16>(cu, a) && launch_many<16, 16, 2 * WARPS>(cu, a)) ||
           (is_one_each<32>(cu, a) && launch_many<32, 16, 2 * WARPS>(cu, a)) ||
           launch_many<32, 16, WARPS>(cu, a) || launch_many<16, 16, WARPS>(cu, a);
}

/* One launch after the other uses the same scratch. */
void launch_few_at_a_time(struct cuda *cu, const struct mma_args *a)
{
    for (int64_t first = 0; first < a->s.query.rows; first += FEW_ROWS) {
        const int64_t left = a->s.query.rows - first;
        const int64_t n = left < FEW_ROWS ? left : static_cast<int64_t>(FEW_ROWS);
        struct mma_args part = *a;
        part.s.query = tensor_rows(a->s.query, first, n);
        part.s.slots = tensor_rows(a->s.slots, first, n);
        part.s.weights = tensor_rows(a->s.weights, first, n);
        launch_few(cu, &part);
    }
}

} // namespace

void search_mma(struct cuda *cu, const struct search *s, const struct cuda_weight *keys)
{
    const struct mma_layout l = mma_layout(s->n_key, s->d, 2 * s->n_head);
    char *const at = static_cast<char *>(keys->data) + keys->split_at;
    const bool has_groups = reinterpret_cast<uintptr_t>(s->query.data) % 16 == 0 &&
                            (s->query.stride % 4 == 0 || s->query.rows == 1) && s->d % 4 == 0;
    const struct mma_args a = {
        .s = *s,
        .pairs = pairs_of(s->k_top),
        .keys = reinterpret_cast<const uint4 *>(at),
        .group_pieces = l.group_pieces,
        .n_block = l.n_block,
        .n_key_padded = l.n_key_padded,
        .has_groups = has_groups,
        .ranks = reinterpret_cast<uint32_t *>(at + l.rank_at),
        .best = reinterpret_cast<struct candidate *>(at + l.best_at),
        .arrived = reinterpret_cast<unsigned *>(at + l.counter_at),
    };
    if (s->query.rows <= FEW_ROWS || !launch_many_of(cu, &a)) {
        launch_few_at_a_time(cu, &a);
    }
}

/* ---- packing --------------------------------------------------------------------------------- */

bool keys_can_split(int64_t rows, int64_t cols, int n_group)
{
    return n_group > 1 && n_group % 2 == 0 && rows / n_group <= N_KEY_MAX && cols <= D_MAX;
}

size_t keys_split_bytes(int64_t rows, int64_t cols, int n_group)
{
    return mma_layout(rows / n_group, cols, n_group).bytes;
}

void keys_split_pack(void *dst, const struct cuda_source *source, int n_group)
{
    const struct tensor *const host = &source->view;
    const int64_t n_key = host->rows / n_group;
    const struct mma_layout l = mma_layout(n_key, host->cols, n_group);
    memset(dst, 0, l.bytes);
    uint16_t *const packed = static_cast<uint16_t *>(dst);
    for (int64_t row = 0; row < host->rows; row++) {
        const int64_t key = row % n_key;
        const int64_t group = row / n_key * static_cast<int64_t>(l.group_pieces);
        for (int64_t c = 0; c < host->cols; c++) {
            const int64_t block = key / KEYS * l.n_block + c / COLUMNS;
            const int64_t piece =
                group + block * 2 * LANES + key % KEYS * PIECES + c % COLUMNS / PIECE;
            const float value = cuda_host_value(source, row, c);
            const uint16_t upper = bf16_round(value);
            packed[piece * PIECE + c % PIECE] = upper;
            packed[(piece + LANES) * PIECE + c % PIECE] = bf16_round(value - bf16_widen(upper));
        }
    }
}

#endif
