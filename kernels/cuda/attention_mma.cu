/* Causal attention of rows of requests on tensor cores: of a cache in BF16 and
 * heads of a multiple of 16 columns, up to 128; never with --dtype f32 or PKMSERVE_CUDA_ATTENTION=0.
 *
 * Queries, keys, shares and values are BF16, sums and the softmax F32. Per row and head
 *   q_c  = q·scale·log2(e), rounded to BF16
 *   s_u  = Σ_c q_c·k_uc                     chain of mma in ascending c
 * and for the splits of 64 absolute positions in ascending order, of which it sees the first n
 *   max' = max(max, max_u s_u)              f = 2^(max - max')
 *   e_u  = 2^(s_u - max')                   sum = sum·f + Σ e_u
 *   o_c  = o_c·f + Σ_u e_u·v_uc             e rounded to BF16; chain of four mma, from 0
 * at last y = o·(1 / sum). An element of an mma depends on its own row and column, so a row's bits do not
 * depend on its neighbours in a tile. They are not those of the F32 kernels: scores are off by
 * 2^-9·Σ|q·k|·scale at most, hence shares by twice that, and by 2^-9 once more, so y is within
 * 2^-8·(1/2 + Σ|q·k|·scale)·max|v| of theirs, with random signs far nearer.
 *
 * A share of 0 does not silence a value that is no finite number, so where a row does not see all of a
 * split, and only there, such values are looked for; if there are some, each row of the warp is
 * computed without what it does not see, to the same bits.
 *
 * A block takes 64 rows of a sequence and a head, a warp 16 of them with its queries and sums in
 * registers; keys arrive while values are multiplied, and values while keys are. Fragments are read
 * from shared memory in words, whose 32 addresses lie in 32 banks because rows are an odd number of
 * 16-byte groups apart. Values would be needed column by column: a word of two columns of each of two
 * positions gives a fragment of the even and one of the odd columns, whence four columns of a row
 * lie in one lane at the end.
 *
 * Bytes and operations: as attention_tile.cu. Bound: per 16 positions and 16 columns two mma, four
 * words and four permutations, so shared memory (128 B a cycle: some 470 TFLOP/s on an H200), and close
 * to it mma.sync and the exponentials. Share reached: not measured yet. */
#include "kernels/cuda/attention_tile.cuh"

namespace
{

constexpr int TILE_ROWS = 64;
constexpr int WARP_ROWS = TILE_ROWS / BLOCK_WARPS;
constexpr int COLS = 16;            /* of a step of k, and of a pair of fragments of values */
constexpr int STEPS = SPLIT / COLS; /* of k, over the positions of a split */
constexpr int TILES = SPLIT / 8;    /* of 8 positions */
constexpr float LOG2_E = 1.44269504f;
static_assert(WARP_ROWS == 16, "the rows of an mma");

/* From position to position in shared memory, as shared_stride has it: a constant, so that a
 * fragment's words are at constant distances. */
template <int N> constexpr int STRIDE = (2 * N | 1) * 8;

/* Of the lane's two rows, which are 8 apart. */
template <int N> struct mma_rows {
    uint32_t q[N][4];
    float max[2], sum[2];
    float o[N][2][4]; /* even and odd columns */
    float old[2];     /* what the sums so far are multiplied by when a split is added */
    uint32_t e[STEPS][4];
};

__device__ __forceinline__ uint32_t word_at(const uint16_t *at)
{
    return *reinterpret_cast<const uint32_t *>(at);
}

/* q: the row's first column. */
__device__ __forceinline__ uint32_t query_pair(const float *q, int c, float scale, bool is_zero)
{
    return is_zero ? 0 : bf16_pair(q[c] * scale, q[c + 1] * scale);
}

/* Queries of rows row and row+8 of the tile, as a[0..3] of each step. */
template <int N>
__device__ __forceinline__ void queries_read(struct mma_rows<N> &m, const struct attention_args &a,
                                             const struct tile &tile, int head, int row, int t)
{
    const float scale = a.scale * LOG2_E;
    const float *const q =
        a.q + (tile.row + row) * a.q_stride + static_cast<int64_t>(head) * a.d_head;
#pragma unroll
    for (int step = 0; step < N; step++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int below = i % 2 * 8;
            m.q[step][i] = query_pair(q + below * a.q_stride, step * COLS + i / 2 * 8 + 2 * t,
                                      scale, row + below >= tile.n_row);
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

/* The shares of a split, of which the lane's first row sees the first n_seen positions. */
template <int N>
__device__ __forceinline__ void mma_scores(struct mma_rows<N> &m, const uint16_t *k, int n_seen,
                                           int g, int t)
{
    float s[TILES][4] = {};
#pragma unroll
    for (int step = 0; step < N; step++) {
#pragma unroll
        for (int j = 0; j < TILES; j++) {
            const uint16_t *const at = k + (8 * j + g) * STRIDE<N> + step * COLS + 2 * t;
            const uint32_t b[2] = {word_at(at), word_at(at + 8)};
            mma_bf16(s[j], m.q[step], b);
        }
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float max = -INFINITY;
#pragma unroll
        for (int i = 0; i < 2 * TILES; i++) {
            float &one = s[i / 2][2 * h + i % 2];
            one = i / 2 * 8 + 2 * t + i % 2 < n_seen + 8 * h ? one : -INFINITY;
            max = fmaxf(max, one);
        }
        max = fmaxf(m.max[h], quad_max(max));
        const float base = exponent_base(max);
        float sum = 0;
#pragma unroll
        for (int i = 0; i < 2 * TILES; i++) {
            float &one = s[i / 2][2 * h + i % 2];
            one = exp2f(one - base);
            sum += one;
        }
        m.old[h] = exp2f(m.max[h] - base);
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

/* Adds the split to the sums. by_row: to those of row only, without the positions from n_seen on. */
template <bool by_row, int N>
__device__ __forceinline__ void mma_weigh(struct mma_rows<N> &m, const uint16_t *v, int row,
                                          int n_seen, int g, int t)
{
#pragma unroll
    for (int j = 0; j < N; j++) {
        float sum[2][4] = {};
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            uint32_t word[4]; /* columns 2g, 2g+1 of positions 2t, 2t+1, 2t+8, 2t+9 */
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int u = step * COLS + 2 * t + i / 2 * 8 + i % 2;
                word[i] = by_row && u >= n_seen ? 0 : word_at(v + u * STRIDE<N> + j * COLS + 2 * g);
            }
            const uint32_t even[2] = {__byte_perm(word[0], word[1], 0x5410),
                                      __byte_perm(word[2], word[3], 0x5410)};
            const uint32_t odd[2] = {__byte_perm(word[0], word[1], 0x7632),
                                     __byte_perm(word[2], word[3], 0x7632)};
            mma_bf16(sum[0], m.e[step], even);
            mma_bf16(sum[1], m.e[step], odd);
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

/* Lane t of a row has columns 4t .. 4t+3 of each 16. */
template <int N>
__device__ __forceinline__ void mma_store(const struct attention_args &a, const struct tile &tile,
                                          int head, const struct mma_rows<N> &m, int row, int t)
{
#pragma unroll
    for (int h = 0; h < 2; h++) {
        if (row + 8 * h >= tile.n_row) {
            continue;
        }
        const int64_t at = tile.row + row + 8 * h;
        const int64_t column = static_cast<int64_t>(head) * a.d_head + 4 * t;
        float *const y = a.y + at * a.y_stride + column;
        const int64_t rounded = at * a.n_head * static_cast<int64_t>(a.d_head) + column;
        const float share = 1 / m.sum[h];
#pragma unroll
        for (int j = 0; j < N; j++) {
            const float(&o)[2][4] = m.o[j];
            float4 four = {o[0][2 * h], o[1][2 * h], o[0][2 * h + 1], o[1][2 * h + 1]};
            /* 0 has one sign, however many splits a row's tile has that it does not see */
            four = {four.x * share + 0.0f, four.y * share + 0.0f, four.z * share + 0.0f,
                    four.w * share + 0.0f};
            if (a.has_groups) {
                *reinterpret_cast<float4 *>(y + j * COLS) = four;
            } else {
                y[j * COLS] = four.x;
                y[j * COLS + 1] = four.y;
                y[j * COLS + 2] = four.z;
                y[j * COLS + 3] = four.w;
            }
            if (a.rounded.data != NULL) {
                room_store_four(a.rounded, rounded + j * COLS, four);
            }
        }
    }
}

/* Warps whose rows see nothing of a split only wait. */
template <int N>
__device__ __forceinline__ void mma_attend(const struct attention_args &a, uint16_t *k, uint16_t *v,
                                           const struct tile &tile, int head)
{
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int g = lane / 4;
    const int t = lane % 4;
    const int warp_row = static_cast<int>(threadIdx.x) / 32 * WARP_ROWS;
    const int warp_end = min(tile.n_row, warp_row + WARP_ROWS);
    const int pos = a.view->pos[tile.row];
    struct mma_rows<N> m = {
    };
    m.max[0] = m.max[1] = -INFINITY;
    queries_read(m, a, tile, head, warp_row + g, t);
    /* Positions of a split that the warp's first row sees, and row i sees i more; not cut. */
    const auto seen_by_first = [&](int split) { return pos + 1 - split * SPLIT + warp_row; };
    const auto is_idle = [&](int split) {
        return warp_row >= tile.n_row || seen_by_first(split) + warp_end - warp_row - 1 <= 0;
    };
    splits_visit<BLOCK_WARPS, false>(
        a, k, v, cache_head_of<uint16_t>(a, tile.seq, head, pos + tile.n_row), 0,
        splits_of(pos + tile.n_row),
        [&](int split) {
            if (!is_idle(split)) {
                mma_scores(m, k, seen_by_first(split) + g, g, t);
            }
        },
        [&](int split) {
            if (is_idle(split)) {
                return;
            }
            const int n_seen = seen_by_first(split);
            if (n_seen >= SPLIT || !has_no_number<N>(v, lane)) {
                mma_weigh<false>(m, v, 0, 0, g, t);
                return;
            }
#pragma unroll 1
            for (int row = 0; row < WARP_ROWS; row++) {
                mma_weigh<true>(m, v, row, n_seen + row, g, t);
            }
        });
    mma_store(a, tile, head, m, warp_row + g, t);
}

/* Heads of 16·N columns. Grid: any number of blocks. */
template <int N>
__global__ void __launch_bounds__(BLOCK, N <= 2   ? 4
                                         : N <= 4 ? 3
                                                  : 2) mma_kernel(struct attention_args a)
{
    DYN_SHARED(uint16_t, k);
    uint16_t *const v = k + SPLIT * STRIDE<N>;
    grid_wait();
    for (int64_t item = blockIdx.x;; item += gridDim.x) {
        struct tile tile;
        if (!tile_find(a.view, TILE_ROWS, static_cast<int>(item / a.n_head), &tile)) {
            return;
        }
        mma_attend<N>(a, k, v, tile, static_cast<int>(item % a.n_head));
    }
}

template <int N> void mma_launch(struct cuda *cu, const struct attention_args *a, int n_row)
{
    if (a->d_head < N * COLS) {
        if constexpr (N > 1) {
            mma_launch<N - 1>(cu, a, n_row);
        }
        return;
    }
    const size_t bytes = shared_bytes<uint16_t>(a, 0, 2);
    CHECK(bytes <= SHARED_BYTES_MAX && a->kv_stride == STRIDE<N>);
    if (cuda_shared(cu, mma_kernel<N>, bytes, "attention")) {
        LAUNCH(mma_kernel<N>, tile_grid(cu, a, n_row), dim3(BLOCK), bytes, cuda_queue(cu), *a);
        cuda_check(cu, "attention");
    }
}

} // namespace

bool attention_mma_can(int64_t d_head, enum dtype cache)
{
    return cache == DTYPE_BF16 && d_head % COLS == 0 && d_head <= D_HEAD_TWO_BUFFERS;
}

void attention_mma_launch(struct cuda *cu, const struct attention_args *a, int n_row)
{
    mma_launch<D_HEAD_TWO_BUFFERS / COLS>(cu, a, n_row);
}
