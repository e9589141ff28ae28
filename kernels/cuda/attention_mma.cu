/* Causal attention of rows of requests on tensor cores: of a cache in BF16 and heads of up to 128
 * columns, a multiple of 4, which zeros make a multiple of 16; never with --dtype f32 or
 * PKMSERVE_CUDA_ATTENTION=0.
 *
 * Queries, keys, shares and values are BF16, sums and the softmax F32. Per row and head
 *   q_c  = q·scale·log2(e), rounded to BF16
 *   s_u  = Σ_c q_c·k_uc                     chain of mma in ascending c
 * and for the splits of 64 absolute positions in ascending order, of which it sees the first n
 *   max' = max(max, max_u s_u)              f = 2^(max - max')
 *   e_u  = 2^(s_u - max')                   sum = sum·f + Σ e_u
 *   o_c  = o_c·f + Σ_u e_u·v_uc             e rounded to BF16; chain of four mma, from 0
 * Of MMA_RUN splits, by absolute position, that is a part. A row that sees several has them merged
 * in ascending order, each from its own first split on,
 *   max' = max(max, max_p)                  f = 2^(max - max')     f_p = 2^(max_p - max')
 *   sum = sum·f + sum_p·f_p                 o_c = o_c·f + o_pc·f_p
 * at last y = o·(1 / sum). An element of an mma depends on its own row and column, so a row's bits
 * do not depend on its neighbours in a tile. They are not those of the F32 kernels: scores are off
 * by 2^-9·Σ|q·k|·scale at most, hence shares by twice that, and by 2^-9 once more, so y is within
 * 2^-8·(1/2 + Σ|q·k|·scale)·max|v| of theirs, with random signs far nearer.
 *
 * A share of 0 does not silence a value that is no finite number, so where a row does not see all
 * of a split, and only there, such values are looked for; if there are some, each row of the warp
 * is computed without what it does not see, to the same bits.
 *
 * A block takes a tile of 64 rows of a sequence and a head, a warp 16 of them with its queries and
 * sums in registers, the parts merged so far in shared memory. step_begin makes the tiles
 * (attention_unit.cu). Few rows that see much are shared out among blocks: these leave their parts
 * in scratch, and the last one to arrive merges them, which changes no bits. Of 128 k positions and
 * 16 heads a block would read 2048 splits one after the other, some 2 ms; 264 that share them are
 * bound by the cache's bytes, some 130 µs, and the last of a head merges 128 parts in some 50 (0.4
 * each): an estimate.
 *
 * The chain of a block, by estimate, in µs: the tile 0.3 (second-level cache) → positions, page
 * numbers, queries 0.3 → keys 0.3 → of each split the scores, two barriers, the values, 1.4. On an
 * H200 1024 rows in texts of 512 take 16.5.
 *
 * In a block keys arrive while values are multiplied, and values while keys are. Fragments are read
 * from shared memory by ldmatrix, whose rows of 16 bytes lie in different banks because rows are an
 * odd number of them apart; those of values are turned on the way.
 *
 * Bytes and operations: as attention_tile.cu. Bound: what a warp issues for a split of 64 columns,
 * some 400 instructions, 64 of them mma, and 32 exponentials a lane. */
#include "kernels/cuda/attention_tile.cuh"

namespace
{

constexpr int WARP_ROWS = MMA_ROWS / BLOCK_WARPS;
constexpr int COLS = 16;            /* of a step of k, and of a pair of fragments of values */
constexpr int STEPS = SPLIT / COLS; /* of k, over the positions of a split */
constexpr int TILES = SPLIT / 8;    /* of 8 positions */
constexpr float LOG2_E = 1.44269504f;
static_assert(WARP_ROWS == 16, "the rows of an mma");

/* From position to position in shared memory, an odd number of 16 bytes: a constant, so that a
 * fragment's words are at constant distances. */
template <int N> constexpr int STRIDE = (2 * N | 1) * 8;

/* Of heads that have fewer columns than 16·N, which is_cut says, rows begin at multiples of 8
 * bytes. */
template <bool is_cut> constexpr int PIECE = is_cut ? 4 : 8; /* columns that are copied at a time */

/* Lanes that copy a position, a power of two, so that a thread copies the same columns of each:
 * within a page its addresses are then a constant distance apart. Those behind the last column are
 * idle. */
template <int n>
constexpr int POWER_FROM = n <= 2    ? 2
                           : n <= 4  ? 4
                           : n <= 8  ? 8
                           : n <= 16 ? 16
                                     : 32;
template <int N, bool is_cut> constexpr int ROW_LANES = POWER_FROM<N * COLS / PIECE<is_cut>>;
template <int N, bool is_cut>
constexpr int ROWS_AT_ONCE = BLOCK / ROW_LANES<N, is_cut>; /* positions, by all threads */
template <int N, bool is_cut> constexpr int OWN_PIECES = SPLIT / ROWS_AT_ONCE<N, is_cut>;
/* Pages that a thread's pieces of a split are of. */
template <int N, bool is_cut>
constexpr int OWN_PAGES = OWN_PIECES<N, is_cut> < SPLIT_PAGES ? OWN_PIECES<N, is_cut> : SPLIT_PAGES;

/* Of the lane's two rows, which are 8 apart. */
template <int N> struct mma_rows {
    uint32_t q[N][4];
    float max[2], sum[2];
    float o[N][2][4]; /* columns 2t, 2t+1 of each 8, of both rows */
    float old[2];     /* what the sums so far are multiplied by when a split is added */
    uint32_t e[STEPS][4];
};

/* q: the row's first column. */
__device__ __forceinline__ uint32_t query_pair(const float *q, int c, float scale, bool is_zero)
{
    return is_zero ? 0 : bf16_pair(q[c] * scale, q[c + 1] * scale);
}

/* Queries of rows row and row+8 of the tile, as a[0..3] of each step. */
template <bool is_cut, int N>
__device__ __forceinline__ void queries_read(struct mma_rows<N> &m, const struct attention_args &a,
                                             const struct attention_tile &tile, int head, int row,
                                             int t)
{
    const float scale = a.scale * LOG2_E;
    const float *const q =
        a.q + (tile.row + row) * a.q_stride + static_cast<int64_t>(head) * a.d_head;
#pragma unroll
    for (int step = 0; step < N; step++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int below = i % 2 * 8;
            const int c = step * COLS + i / 2 * 8 + 2 * t;
            m.q[step][i] = query_pair(q + below * a.q_stride, c, scale,
                                      row + below >= tile.n_row || (is_cut && c >= a.d_head));
        }
    }
}

/* Over the four lanes of a row; each gets the same bits. */
__device__ __forceinline__ float quad_max(float value)
{
    value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, 1));
    return fmaxf(value, __shfl_xor_sync(0xffffffffu, value, 2));
}

__device__ __forceinline__ float quad_sum(float value)
{
    value += __shfl_xor_sync(0xffffffffu, value, 1);
    return value + __shfl_xor_sync(0xffffffffu, value, 2);
}

/* The shares of a split, of which the lane's first row sees the first n_seen positions; is_whole:
 * all. */
template <bool is_whole, int N>
__device__ __forceinline__ void mma_scores(struct mma_rows<N> &m, const uint16_t *k, int n_seen,
                                           int lane)
{
    float s[TILES][4] = {};
    const int t = lane % 4;
    /* Matrix i is of columns 8·i .. 8·i+7 of 32, or of 16 where no more are left. */
    const uint16_t *const row = k + lane % 8 * STRIDE<N>;
#pragma unroll
    for (int step = 0; step < N; step += 2) {
        const int matrix = step + 1 < N ? lane / 8 : lane / 8 % 2;
#pragma unroll
        for (int j = 0; j < TILES; j++) {
            uint32_t b[4];
            load_matrices(b, row + 8 * j * STRIDE<N> + step * COLS + 8 * matrix);
            const uint32_t first[2] = {b[0], b[1]};
            mma_bf16(s[j], m.q[step], first);
            if (step + 1 < N) {
                const uint32_t second[2] = {b[2], b[3]};
                mma_bf16(s[j], m.q[(step + 1) % N], second);
            }
        }
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float max = -INFINITY;
#pragma unroll
        for (int i = 0; i < 2 * TILES; i++) {
            float &one = s[i / 2][2 * h + i % 2];
            if (!is_whole) {
                one = i / 2 * 8 + 2 * t + i % 2 < n_seen + 8 * h ? one : -INFINITY;
            }
            max = fmaxf(max, one);
        }
        max = fmaxf(m.max[h], quad_max(max));
        const float base = exponent_base(max);
        float sum = 0;
#pragma unroll
        for (int i = 0; i < 2 * TILES; i++) {
            float &one = s[i / 2][2 * h + i % 2];
            one = exp2_quick(one - base);
            sum += one;
        }
        m.old[h] = exp2_quick(m.max[h] - base);
        m.sum[h] = fmaf(m.sum[h], m.old[h], quad_sum(sum));
        m.max[h] = max;
    }
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
#pragma unroll
        for (int i = 0; i < 4; i++) { /* a[i]: row g + 8·(i % 2), positions from 8·(i / 2) on */
            const float *const pair = &s[2 * step + i / 2][2 * (i % 2)];
            m.e[step][i] = bf16_pair(pair[0], pair[1]);
        }
    }
}

/* Adds the split to the sums. by_row: to those of row only, without the positions from n_seen
 * on. */
template <bool by_row, int N>
__device__ __forceinline__ void mma_weigh(struct mma_rows<N> &m, const uint16_t *v, int row,
                                          int n_seen, int lane)
{
    const int g = lane / 4;
    const int t = lane % 4;
    /* Of 16 positions and 16 columns matrix i has positions from 8·(i % 2) and columns from 8·(i /
     * 2) on. */
    const uint16_t *const first = v + (lane / 8 % 2 * 8 + lane % 8) * STRIDE<N> + lane / 16 * 8;
#pragma unroll
    for (int j = 0; j < N; j++) {
        float sum[2][4] = {};
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            uint32_t b[4];
            load_matrices_turned(b, first + step * COLS * STRIDE<N> + j * COLS);
#pragma unroll
            for (int i = 0; i < 4 && by_row; i++) {
                const int u = step * COLS + i % 2 * 8 + 2 * t; /* and u + 1, above it */
                b[i] = u >= n_seen ? 0 : u + 1 >= n_seen ? b[i] & 0xffffu : b[i];
            }
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const uint32_t eight[2] = {b[2 * i], b[2 * i + 1]};
                mma_bf16(sum[i], m.e[step], eight);
            }
        }
#pragma unroll
        for (int i = 0; i < 8; i++) {
            if (!by_row || i % 4 / 2 * 8 + g == row) {
                float &o = m.o[j][i / 4][i % 4];
                o = fmaf(o, m.old[i % 4 / 2], sum[i / 4][i % 4]);
            }
        }
    }
}

/* Whether a value of the split is no finite number. By a warp. */
template <int N> __device__ __forceinline__ bool has_no_number(const uint16_t *v, int lane)
{
    uint32_t found = 0;
    for (int u = lane; u < SPLIT; u += 32) {
        for (int c = 0; c < N * COLS; c += 8) {
            const uint4 w = *reinterpret_cast<const uint4 *>(v + u * STRIDE<N> + c);
            for (const uint32_t pair : {w.x, w.y, w.z, w.w}) { /* an exponent of ones */
                found |= (pair & 0x7f807f80u) + 0x00800080u;
            }
        }
    }
    return __any_sync(0xffffffffu, (found & 0x80008000u) != 0);
}

/* What a thread keeps of a part, or of all so far, in memory: value i at i * BLOCK. */
template <int N> constexpr int PART_VALUES = 8 * N + 4;

template <int N> __device__ __forceinline__ float &part_value(struct mma_rows<N> &m, int i)
{
    return i < 2 ? m.max[i] : i < 4 ? m.sum[i - 2] : m.o[(i - 4) / 8][(i - 4) / 4 % 2][i % 4];
}

template <int N> __device__ __forceinline__ void part_begin(struct mma_rows<N> &m)
{
#pragma unroll
    for (int i = 0; i < PART_VALUES<N>; i++) {
        part_value(m, i) = i < 2 ? -INFINITY : 0;
    }
}

template <int N> __device__ __forceinline__ void part_read(struct mma_rows<N> &m, const float *part)
{
#pragma unroll
    for (int i = 0; i < PART_VALUES<N>; i++) {
        part_value(m, i) = part[i * BLOCK];
    }
}

template <int N> __device__ __forceinline__ void part_write(struct mma_rows<N> &m, float *part)
{
#pragma unroll
    for (int i = 0; i < PART_VALUES<N>; i++) {
        part[i * BLOCK] = part_value(m, i);
    }
}

/* Merges a part behind all before it. */
template <int N> __device__ __forceinline__ void part_merge(struct mma_rows<N> &m, float *all)
{
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const float before = all[h * BLOCK];
        const float max = fmaxf(before, m.max[h]);
        const float base = exponent_base(max);
        const struct merge_factors f = {exp2f(before - base), exp2f(m.max[h] - base)};
        all[h * BLOCK] = max;
        all[(2 + h) * BLOCK] = weigh_in(all[(2 + h) * BLOCK], m.sum[h], f);
#pragma unroll
        for (int i = 4; i < PART_VALUES<N>; i++) {
            if (i % 4 / 2 == h) {
                all[i * BLOCK] = weigh_in(all[i * BLOCK], part_value(m, i), f);
            }
        }
    }
}

/* Lane t of a row has columns 2t, 2t+1 of each 8. */
template <bool is_cut, int N>
__device__ __forceinline__ void mma_store(const struct attention_args &a,
                                          const struct attention_tile &tile, int head,
                                          const struct mma_rows<N> &m, int row, int t)
{
#pragma unroll
    for (int h = 0; h < 2; h++) {
        if (row + 8 * h >= tile.n_row) {
            continue;
        }
        const int64_t at = tile.row + row + 8 * h;
        const int64_t column = static_cast<int64_t>(head) * a.d_head + 2 * t;
        float *const y = a.y + at * a.y_stride + column;
        uint16_t *const rounded =
            a.rounded.data + at * a.n_head * static_cast<int64_t>(a.d_head) + column;
        const float share = 1 / m.sum[h];
#pragma unroll
        for (int j = 0; j < 2 * N; j++) {
            if (is_cut && j * 8 + 2 * t >= a.d_head) {
                continue;
            }
            const float(&o)[4] = m.o[j / 2][j % 2];
            /* 0 has one sign, however many splits a row's tile has that it does not see */
            const float2 two = {o[2 * h] * share + 0.0f, o[2 * h + 1] * share + 0.0f};
            if (a.has_groups) {
                *reinterpret_cast<float2 *>(y + j * 8) = two;
            } else {
                y[j * 8] = two.x;
                y[j * 8 + 1] = two.y;
            }
            if (a.rounded.data != NULL) {
                *reinterpret_cast<uint32_t *>(rounded + j * 8) =
                    a.rounded.dtype == DTYPE_F16 ? f16_pair(two.x, two.y) : bf16_pair(two.x, two.y);
            }
        }
    }
}

/* ---- a tile ---------------------------------------------------------------------------------- */

/* The page numbers of a thread's pieces of a split. */
template <int N, bool is_cut> struct split_pages {
    int32_t number[OWN_PAGES<N, is_cut>];
};

template <int N, bool is_cut>
__device__ __forceinline__ void pages_read(struct split_pages<N, is_cut> &pages,
                                           const cache_head<uint16_t> &cache, int split)
{
    constexpr int each = SPLIT / OWN_PAGES<N, is_cut>; /* positions from one to the next */
    const int row = static_cast<int>(threadIdx.x) / ROW_LANES<N, is_cut>;
#pragma unroll
    for (int i = 0; i < OWN_PAGES<N, is_cut>; i++) {
        const int page = (split * SPLIT + i * each) / KV_PAGE + row / KV_PAGE;
        pages.number[i] = page * KV_PAGE < cache.n_pos ? cache.page[page] : 0;
    }
}

/* Starts copying a split to to[SPLIT][STRIDE]; positions from n_pos on are zeros. from: cache.k or
 * cache.v. */
template <int N, bool is_cut>
__device__ __forceinline__ void
split_copy(const struct attention_args &a, uint16_t *to, const uint16_t *from, int64_t page_stride,
           const struct split_pages<N, is_cut> &pages, int n_pos, int split)
{
    constexpr int n_lane = ROW_LANES<N, is_cut>;
    constexpr int n_row = ROWS_AT_ONCE<N, is_cut>;
    constexpr int per_page = OWN_PIECES<N, is_cut> / OWN_PAGES<N, is_cut>;
    static_assert(per_page == 1 || per_page * n_row == KV_PAGE, "the pieces of a page");
    const int row = static_cast<int>(threadIdx.x) / n_lane;
    const int col = static_cast<int>(threadIdx.x) % n_lane * PIECE<is_cut>;
    const int n = n_pos - split * SPLIT - row; /* positions that are there, from the first on */
    uint16_t *const at = to + row * STRIDE<N> + col;
    const uint16_t *const first = from + row % KV_PAGE * a.d_head + col;
    if ((!is_cut && n_lane * PIECE<is_cut> == N * COLS) || col < a.d_head) {
#pragma unroll
        for (int i = 0; i < OWN_PIECES<N, is_cut>; i++) {
            const uint16_t *const source =
                first + pages.number[i / per_page] * page_stride + i % per_page * n_row * a.d_head;
            const bool is_there = i * n_row < n;
            if constexpr (is_cut) {
                copy_async_8(at + i * n_row * STRIDE<N>, source, is_there ? 8 : 0);
            } else {
                copy_async_16(at + i * n_row * STRIDE<N>, source, is_there ? 16 : 0);
            }
        }
    }
    copy_async_commit();
}

/* The columns behind a head's own, of all positions of keys and values: no copy writes there. */
template <int N> __device__ __forceinline__ void columns_clear(uint16_t *k, int d_head)
{
    static_assert(BLOCK == 2 * SPLIT, "a thread for each position of keys and of values");
    uint16_t *const row = k + static_cast<int>(threadIdx.x) * STRIDE<N>;
    for (int c = d_head; c < N * COLS; c += PIECE<true>) {
        *reinterpret_cast<uint2 *>(row + c) = make_uint2(0, 0);
    }
}

/* The tiles of a launch, and where their parts go. */
struct mma_tiles {
    const struct attention_tile *tile;
    int n_tile;
    float *part;         /* [parts, n_head, PART_VALUES, BLOCK] */
    unsigned *n_arrived; /* one for each part and head, of which a tile uses its first part's */
};

/* Warps whose rows see nothing of a split only wait. all: of the thread's rows, the parts before.
 * Values arrive while scores are computed, and the next keys while values are summed. All warps
 * must have left the tile before. */
template <int N, bool is_cut>
__device__ __forceinline__ void mma_attend(const struct attention_args &a, uint16_t *k, uint16_t *v,
                                           float *all, const struct mma_tiles &tiles,
                                           const struct attention_tile &tile, int head)
{
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int g = lane / 4;
    const int t = lane % 4;
    const int warp_row = static_cast<int>(threadIdx.x) / 32 * WARP_ROWS;
    const int warp_end = min(tile.n_row, warp_row + WARP_ROWS);
    const int pos = a.view->pos[tile.row];
    const cache_head<uint16_t> cache = cache_head_of<uint16_t>(a, tile.seq, head, pos + tile.n_row);
    const int first = tile.first * MMA_RUN;
    const int end = min(tile.end * MMA_RUN, tile.n_split);
    struct split_pages<N, is_cut> pages;
    pages_read(pages, cache, first);
    struct mma_rows<N> m = {
    };
    part_begin(m);
    queries_read<is_cut>(m, a, tile, head, warp_row + g, t);
    constexpr int64_t part_floats = PART_VALUES<N> * BLOCK;
    float *const part = tiles.part +
                        (static_cast<int64_t>(tile.part) * a.n_head + head) * part_floats +
                        static_cast<int>(threadIdx.x);
    const auto part_end = [&](int i) { /* of part i */
                                       if (tile.n_block > 1) {
                                           part_write(m, part + i * a.n_head * part_floats);
                                       } else if (i == 0) {
                                           part_write(m, all);
                                       } else {
                                           part_merge(m, all);
                                       }
    };
    split_copy(a, k, cache.k, a.k_page_stride, pages, cache.n_pos, first);
    split_copy(a, v, cache.v, a.v_page_stride, pages, cache.n_pos, first);
    copy_async_wait<1>();
#pragma unroll 1
    for (int split = first; split < end; split++) {
        /* Positions of it that the warp's first row sees, and row i sees i more; not cut. */
        const int n_seen = pos + 1 - split * SPLIT + warp_row;
        const bool is_idle = warp_row >= tile.n_row || n_seen + warp_end - warp_row - 1 <= 0;
        if (split % MMA_RUN == 0 && split > first) {
            part_end(split / MMA_RUN - 1);
            part_begin(m);
        }
        __syncthreads(); /* the keys are there, and the values before are done */
        if (split > first) {
            split_copy(a, v, cache.v, a.v_page_stride, pages, cache.n_pos, split);
        }
        pages_read(pages, cache, split + 1);
        if (!is_idle && n_seen >= SPLIT) {
            mma_scores<true>(m, k, SPLIT, lane);
        } else if (!is_idle) {
            mma_scores<false>(m, k, n_seen + g, lane);
        }
        copy_async_wait<0>();
        __syncthreads(); /* the values are there, and the keys are done */
        if (split + 1 < end) {
            split_copy(a, k, cache.k, a.k_page_stride, pages, cache.n_pos, split + 1);
        }
        if (!is_idle && (n_seen >= SPLIT || !has_no_number<N>(v, lane))) {
            mma_weigh<false>(m, v, 0, 0, lane);
        } else if (!is_idle) {
#pragma unroll 1
            for (int row = 0; row < WARP_ROWS; row++) {
                mma_weigh<true>(m, v, row, n_seen + row, lane);
            }
        }
        copy_async_wait<0>();
    }
    const int n_part = (tile.n_split + MMA_RUN - 1) / MMA_RUN;
    if (n_part > 1) {
        part_end(tile.end - 1);
        if (tile.n_block > 1) {
            if (!parts_arrive(&tiles.n_arrived[static_cast<int64_t>(tile.part) * a.n_head + head],
                              tile.n_block)) {
                return;
            }
            part_read(m, part);
            part_write(m, all);
#pragma unroll 1
            for (int i = 1; i < n_part; i++) {
                part_read(m, part + i * a.n_head * part_floats);
                part_merge(m, all);
            }
        }
        part_read(m, all);
    }
    mma_store<is_cut>(a, tile, head, m, warp_row + g, t);
}

/* Heads of 16·N columns, or of some fewer. Grid: any number of blocks. */
template <int N, bool is_cut>
__global__ void __launch_bounds__(BLOCK, N <= 2   ? 4
                                         : N <= 4 ? 3
                                                  : 2)
    mma_kernel(struct attention_args a, struct mma_tiles tiles)
{
    DYN_SHARED(uint16_t, k);
    uint16_t *const v = k + SPLIT * STRIDE<N>;
    float *const all = reinterpret_cast<float *>(v + SPLIT * STRIDE<N>) + threadIdx.x;
    if (is_cut) {
        columns_clear<N>(k, a.d_head);
    }
    grid_wait();
    for (int item = static_cast<int>(blockIdx.x); item < tiles.n_tile * a.n_head;
         item += static_cast<int>(gridDim.x)) {
        const struct attention_tile tile = tiles.tile[item / a.n_head];
        mma_attend<N, is_cut>(a, k, v, all, tiles, tile, item % a.n_head);
        __syncthreads();
    }
}

template <int N, bool is_cut>
void mma_launch_of(struct cuda *cu, const struct attention_args *a,
                   const struct step_scratch *scratch, int n_page_max)
{
    const size_t bytes =
        sizeof(uint16_t) * 2 * SPLIT * STRIDE<N> +
        (n_page_max > MMA_RUN * SPLIT_PAGES ? attention_mma_part_bytes(a->d_head) : 0);
    CHECK(bytes <= SHARED_BYTES_MAX);
    const struct mma_tiles tiles = {
        .tile =
            reinterpret_cast<const struct attention_tile *>(step_units(a->view) + scratch->n_unit),
        .n_tile = scratch->n_tile,
        .part = static_cast<float *>(scratch->attention),
        .n_arrived = scratch->arrived,
    };
    if (cuda_shared(cu, mma_kernel<N, is_cut>, bytes, "attention")) {
        LAUNCH((mma_kernel<N, is_cut>), tile_grid(cu, a, scratch->n_tile), dim3(BLOCK), bytes,
               cuda_queue(cu), *a, tiles);
        cuda_check(cu, "attention");
    }
}

template <int N>
void mma_launch(struct cuda *cu, const struct attention_args *a, const struct step_scratch *scratch,
                int n_page_max)
{
    if (a->d_head <= (N - 1) * COLS) {
        if constexpr (N > 1) {
            mma_launch<N - 1>(cu, a, scratch, n_page_max);
        }
    } else if (a->d_head % COLS != 0) {
        mma_launch_of<N, true>(cu, a, scratch, n_page_max);
    } else {
        mma_launch_of<N, false>(cu, a, scratch, n_page_max);
    }
}

} // namespace

bool attention_mma_can(const struct attention_args *a, enum dtype cache)
{
    return cache == DTYPE_BF16 && a->d_head % PIECE<true> == 0 && a->d_head <= D_HEAD_TWO_BUFFERS &&
           a->kv_piece >= (a->d_head % COLS != 0 ? 8 : 16);
}

size_t attention_mma_part_bytes(int64_t d_head)
{
    return sizeof(float) * BLOCK * static_cast<size_t>((d_head + COLS - 1) / COLS * (COLS / 2) + 4);
}

void attention_mma_launch(struct cuda *cu, const struct attention_args *a,
                          const struct step_scratch *scratch, int n_page_max)
{
    mma_launch<D_HEAD_TWO_BUFFERS / COLS>(cu, a, scratch, n_page_max);
}
