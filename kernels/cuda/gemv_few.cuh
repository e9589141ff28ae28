/* Products of few rows by row-major weights (gemv_few.cu): their arguments, and how a block norms
 * the rows itself. */
#ifndef KERNELS_CUDA_GEMV_FEW_CUH
#define KERNELS_CUDA_GEMV_FEW_CUH

#include "kernels/cuda/linear.cuh"

namespace
{

constexpr int TILE = 8;  /* outputs of an item */
constexpr int AHEAD = 4; /* items whose weights a warp has in registers */
constexpr int LONG_WARPS = 8;
constexpr int LONG_TILES = 2;          /* from so many tiles a warp on it has its own */
constexpr size_t BYTES_MAX = 96 << 10; /* of shared memory, beside those of the next kernel */
static_assert(LONG_TILES * LONG_WARPS * 2 * GEMV_WARPS_MAX * 8 * TILE * sizeof(float) +
                      (27 << 10) <=
                  BYTES_MAX,
              "sums of normed rows, and two of them");
constexpr int CHUNK_BLOCKS = LINEAR_CHUNK_BLOCKS;
constexpr int CHUNK = LINEAR_CHUNK_BF16;
constexpr int X_STRIDE =
    CHUNK + 32; /* of a row's chunk in shared memory: rows fall into different banks */
constexpr int SWEEP = NORM_COLS;
static_assert(CHUNK == SWEEP, "a chunk is a sweep");

struct few_args {
    const unsigned char *w;
    const uint16_t *x;
    const float *bias;
    float *y;
    uint16_t *rounded;
    const unsigned char *next; /* linear_ask_next's */
    int64_t y_stride;
    uint32_t next_bytes, next_slice;
    int x_stride, row_bytes; /* of weights */
    int n_tok, n_out, n_block;
    int n_chunk, n_turn; /* chunks; rounds of a block's warps that they take */
    int n_tile, n_each;  /* tiles; of a block */
    enum act act;
    bool starts_early;
};

/* ---- rows that are yet to be normed ------------------------------------------------------------
 *
 * Each warp has a chunk, which is a sweep of a norm's warp (norm.cuh): a lane has four columns of
 * it. It leaves its columns of what the norm is of in shared memory, sums one of the rows as
 * norm.cu does (of a single row every warp: a barrier less), norms its own columns of all rows, and
 * leaves them rounded. To the bits of norm.cu. The first block writes the normed rows, too, to what
 * no other block reads. */

/* Shared memory of it: rows [n_tok][n_chunk·SWEEP], of the rows {mean, inverse}, rounded
 * [n_chunk][n_tok][X_STRIDE]. */
struct few_sweeps {
    float *row;
    float2 *stats;
    uint16_t *rounded;
    int n_float; /* of a row */
};

__host__ __device__ __forceinline__ size_t sweeps_bytes(int n_tok, int n_chunk)
{
    return static_cast<size_t>(n_tok) *
           (static_cast<size_t>(n_chunk) * (SWEEP * sizeof(float) + X_STRIDE * sizeof(uint16_t)) +
            sizeof(float4));
}

__device__ __forceinline__ struct few_sweeps sweeps_at(float *at, const few_args &a)
{
    const int n_float = a.n_chunk * SWEEP;
    float *const stats = at + a.n_tok * n_float;
    return {at, reinterpret_cast<float2 *>(stats),
            reinterpret_cast<uint16_t *>(stats + a.n_tok * 4), n_float};
}

/* The lane's columns of rows tok .. tok+n-1, all asked for before the first is used. */
template <int n>
__device__ __forceinline__ void sweep_load(const struct few_sweeps &s, const struct norm_args &norm,
                                           int n_tok, int tok, int c)
{
    const int columns[1] = {c};
    float4 v[n][1];
    float4 r[n][1] = {};
#pragma unroll
    for (int j = 0; j < n; j++) {
        const int at = tok + j < n_tok ? tok + j : n_tok - 1;
        norm_operands(v[j], r[j], norm, at, columns);
    }
#pragma unroll
    for (int j = 0; j < n; j++) {
        if (tok + j < n_tok) {
            *reinterpret_cast<float4 *>(s.row + (tok + j) * s.n_float + c) =
                norm.r != NULL ? group_add(v[j][0], r[j][0]) : v[j][0];
        }
    }
}

/* Leaves the warp's chunk of the normed rows, rounded. gamma, beta: the lane's columns of them. By
 * the whole block. */
template <enum dtype type>
__device__ __forceinline__ void sweeps_norm(const few_args &a, const struct norm_args &norm,
                                            const struct few_sweeps &s, float4 gamma, float4 beta)
{
    const int n_warp = static_cast<int>(blockDim.x) / WARP;
    const int warp = static_cast<int>(threadIdx.x) / WARP;
    const int lane = static_cast<int>(threadIdx.x) % WARP;
    const int c = warp * SWEEP + lane * GROUP;
    const bool is_there = c < norm.d;
    float2 stats = {0, 0};
    if (a.n_tok == 1) {
        if (is_there) {
            sweep_load<1>(s, norm, 1, 0, c);
        }
        __syncthreads();
        stats = norm_sum(s.row, norm.d, norm.eps, lane);
    } else {
        for (int tok = 0; tok < a.n_tok && is_there; tok += 2) {
            sweep_load<2>(s, norm, a.n_tok, tok, c);
        }
        __syncthreads();
        for (int tok = warp; tok < a.n_tok; tok += n_warp) {
            const float2 own = norm_sum(s.row + tok * s.n_float, norm.d, norm.eps, lane);
            if (lane == 0) {
                s.stats[tok] = own;
            }
        }
        __syncthreads();
    }
#pragma unroll 1
    for (int tok = 0; tok < a.n_tok; tok++) {
        stats = a.n_tok == 1 ? stats : s.stats[tok];
        float4 out = {0, 0, 0, 0};
        if (is_there) {
            out = norm_output(*reinterpret_cast<const float4 *>(s.row + tok * s.n_float + c),
                              stats.x, stats.y, gamma, beta);
        }
        *reinterpret_cast<uint2 *>(s.rounded + (warp * a.n_tok + tok) * X_STRIDE + lane * GROUP) =
            make_uint2(operand_pair<type>(out.x, out.y), operand_pair<type>(out.z, out.w));
        if (blockIdx.x == 0 && is_there) {
            *reinterpret_cast<float4 *>(norm.y + tok * norm.y_stride + c) = out;
        }
    }
    __syncwarp();
}

/* The lane's columns of gamma and beta. */
__device__ __forceinline__ void sweep_factors(float4 &gamma, float4 &beta,
                                              const struct norm_args &norm)
{
    const int c =
        static_cast<int>(threadIdx.x) * GROUP; /* a warp's sweep follows that of the one before */
    gamma = beta = {0, 0, 0, 0};
    if (c < norm.d) {
        gamma = *reinterpret_cast<const float4 *>(norm.gamma + c);
        beta = *reinterpret_cast<const float4 *>(norm.beta + c);
    }
}

} // namespace

#endif
