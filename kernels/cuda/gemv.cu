/* Linear with few rows and BF16 weights, and the choice between it and F32: linear.cuh defines the sum.
 *
 * A block computes some tiles of 16 outputs, or half of one, for a few rows. Its warps share the chunks of
 * k: warp w of n takes the chunks w, w+n, .., whose sums are added in shared memory in ascending order. No two
 * warps want the same weight, and each lane reads from memory what it multiplies by, straight into
 * registers: the weights of a warp's first chunks are asked for before the kernel before is complete, and
 * what a warp does afterwards is short, since its chain of instructions is what few rows wait for. Where
 * the rows are yet to be normed, each warp norms the columns of its own chunk.
 *
 * Bytes: weights once from memory (once more from the second-level cache per further group of tokens), x
 * once per block from that cache: in BF16, as the op before has left it or linear_round, but in F32 of up to
 * GEMV_F32_ROWS rows that none has left so: a launch would cost more. Operations: 2·n_tok·n_in·n_out.
 * Bound: device memory for a large matrix; for those of a layer the latency of a launch, of x and of the sums. */
#include "kernels/cuda/gemv.cuh"

namespace
{

/* How a kernel gets x: as F32, rounded, or from the norm of other rows. */
enum gemv_x { GEMV_X_F32, GEMV_X_ROUNDED, GEMV_X_NORMED };

/* Weights are the mma's A (16 outputs), rows of x its B (8 tokens). n_half halves of tiles of outputs
 * and n_nt tiles of tokens per block. One half alone, of row-major weights, leaves the other half of A 0. n_ahead: chunks whose
 * weights a warp has in registers at a time. */
template <int halves, int n_nt_, enum gemv_x x_>
struct gemv_bf16 {
    static constexpr int n_half = halves; static constexpr int n_mt = (n_half + 1) / 2;
    static constexpr int n_nt = n_nt_;
    static constexpr enum gemv_x x = x_;
    static constexpr int n_token = n_nt * 8;
    static constexpr int n_output = n_half * 8;
    static constexpr int stride = n_output + 4; /* a fragment's sums fall into 32 banks */
    static constexpr int n_ahead = n_half == 1 && n_nt == 1 && x != GEMV_X_NORMED ? 2 : 1;
    static constexpr int warps_max = n_half + n_nt > 4 ? 8 : 16;
    static constexpr size_t part_bytes = n_token * stride * sizeof(float); /* of a chunk */
};

constexpr int N_BLOCK = LINEAR_CHUNK_BLOCKS;

/* ---- operands -------------------------------------------------------------------------------- */

/* A lane's weights of a chunk. */
template <class shape> struct gemv_weights {
    uint4 piece[N_BLOCK][shape::n_half];
};

/* Where a lane's weights of block 0 stand. */
template <class shape> struct gemv_source {
    const unsigned char *w[shape::n_half];
};

template <class shape>
__device__ __forceinline__ struct gemv_source<shape> gemv_source_of(const struct linear_args &a) {
    const int g = static_cast<int>(threadIdx.x) % 32 / 4;
    const int t = static_cast<int>(threadIdx.x) % 4;
    struct gemv_source<shape> source;
#pragma unroll
    for (int i = 0; i < shape::n_half; i++) {
        const int half = static_cast<int>(blockIdx.x) * shape::n_half + i;
        const int tile = half / 2 < a.n_tile ? half / 2 : a.n_tile - 1;
        source.w[i] = a.w + tile * a.map.tile + half % 2 * a.map.half + g * a.map.row + t * 16;
    }
    return source;
}

template <class shape>
__device__ __forceinline__ void gemv_load_w(struct gemv_weights<shape> &to,
                                            const struct gemv_source<shape> &source,
                                            const struct linear_args &a, int chunk)
{
#pragma unroll
    for (int b = 0; b < N_BLOCK; b++) {
        const int block = chunk * N_BLOCK + b;
#pragma unroll
        for (int i = 0; i < shape::n_half; i++) {
            to.piece[b][i] = make_uint4(0, 0, 0, 0);
            if (block < a.n_block) {
                to.piece[b][i] = *reinterpret_cast<const uint4 *>(
                    source.w[i] + static_cast<int64_t>(block) * a.map.block);
            }
        }
    }
}

/* A lane's eight values of x in each block of a chunk, rounded: those of token g of each tile of tokens. */
template <class shape> struct gemv_rows {
    uint4 piece[N_BLOCK][shape::n_nt];
};

template <enum dtype type> __device__ __forceinline__ uint4 gemv_round(const float *from, int n)
{
    float v[8];
    if (n >= 8) {
        const float4 lo = *reinterpret_cast<const float4 *>(from);
        const float4 hi = *reinterpret_cast<const float4 *>(from + 4);
        v[0] = lo.x, v[1] = lo.y, v[2] = lo.z, v[3] = lo.w;
        v[4] = hi.x, v[5] = hi.y, v[6] = hi.z, v[7] = hi.w;
    } else {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            v[i] = i < n ? from[i] : 0;
        }
    }
    return make_uint4(operand_pair<type>(v[0], v[1]), operand_pair<type>(v[2], v[3]),
                      operand_pair<type>(v[4], v[5]), operand_pair<type>(v[6], v[7]));
}

template <class shape, enum dtype type>
__device__ __forceinline__ void gemv_load_x(struct gemv_rows<shape> &to,
                                            const struct linear_args &a, int chunk)
{
    const int g = static_cast<int>(threadIdx.x) % 32 / 4;
    const int t = static_cast<int>(threadIdx.x) % 4;
#pragma unroll
    for (int j = 0; j < shape::n_nt; j++) {
        const int tok = static_cast<int>(blockIdx.y) * shape::n_token + j * 8 + g;
        const int64_t row = tok * a.x_stride;
#pragma unroll
        for (int b = 0; b < N_BLOCK; b++) {
            const int block = chunk * N_BLOCK + b;
            const int first = block * LINEAR_BLOCK_BF16 + t * 8;
            to.piece[b][j] = make_uint4(0, 0, 0, 0);
            if (tok < a.n_tok && block < a.n_block) {
                if constexpr (shape::x == GEMV_X_ROUNDED) {
                    to.piece[b][j] = *reinterpret_cast<const uint4 *>(
                        static_cast<const uint16_t *>(a.x) + row + first);
                } else {
                    to.piece[b][j] = gemv_round<type>(static_cast<const float *>(a.x) + row + first,
                                                      a.n_in - first);
                }
            }
        }
    }
}

/* sum += the products of a chunk. */
template <class shape, enum dtype type>
__device__ __forceinline__ void gemv_multiply(float (&sum)[shape::n_mt][shape::n_nt][4],
                                              const struct gemv_weights<shape> &w,
                                              const struct gemv_rows<shape> &x, bool is_row_major)
{
#pragma unroll
    for (int b = 0; b < N_BLOCK; b++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
#pragma unroll
            for (int i = 0; i < shape::n_mt; i++) {
                const uint4 p = w.piece[b][2 * i];
                const uint4 none = make_uint4(0, 0, 0, 0);
                const uint4 q = shape::n_half == 1 ? none : w.piece[b][(2 * i + 1) % shape::n_half];
                uint32_t in_w[4] = {h == 0 ? p.x : q.x, h == 0 ? p.y : q.y, h == 0 ? p.z : q.z,
                                    h == 0 ? p.w : q.w};
                if (is_row_major || shape::n_half == 1) {
                    in_w[0] = h == 0 ? p.x : p.z, in_w[1] = h == 0 ? q.x : q.z;
                    in_w[2] = h == 0 ? p.y : p.w, in_w[3] = h == 0 ? q.y : q.w;
                }
#pragma unroll
                for (int j = 0; j < shape::n_nt; j++) {
                    const uint4 v = x.piece[b][j];
                    const uint32_t in_x[2] = {h == 0 ? v.x : v.z, h == 0 ? v.y : v.w};
                    operand_mma<type>(sum[i][j], in_w, in_x);
                }
            }
        }
    }
}

/* Leaves a chunk's sums in part [n_token][stride]: lane (g, t) holds outputs g, g+8 of a tile,
 * tokens 2t, 2t+1. */
template <class shape>
__device__ __forceinline__ void gemv_leave(float *part,
                                           const float (&sum)[shape::n_mt][shape::n_nt][4])
{
    constexpr int stride = shape::stride;
    const int g = static_cast<int>(threadIdx.x) % 32 / 4;
    const int t = static_cast<int>(threadIdx.x) % 4;
#pragma unroll
    for (int i = 0; i < shape::n_mt; i++) {
#pragma unroll
        for (int j = 0; j < shape::n_nt; j++) {
            float *const at = part + (j * 8 + t * 2) * stride + i * LINEAR_TILE + g;
            at[0] = sum[i][j][0];
            at[stride] = sum[i][j][1];
            if constexpr (shape::n_half > 1) {
                at[8] = sum[i][j][2];
                at[stride + 8] = sum[i][j][3];
            }
        }
    }
}

/* ---- rows that are yet to be normed ------------------------------------------------------------
 *
 * Each warp has a chunk, which is a sweep of a norm's warp (norm.cuh): a lane has four columns of it. It leaves
 * its columns of what the norm is of in shared memory, sums one of the rows as norm.cu does (of a single row every
 * warp: a barrier less), norms its own columns of all rows, and leaves them rounded for its own products.
 * To the bits of norm.cu. The first block writes the normed rows, too, to what no other block reads. */

constexpr int SWEEP = NORM_COLS;
constexpr int SWEEP_STRIDE = SWEEP + 8; /* of rounded columns: rows fall into different banks */
static_assert(LINEAR_CHUNK_BF16 == SWEEP, "a chunk is a sweep");

/* Shared memory behind the sums: rows [n_tok][n_chunk][SWEEP], by warp its rounded columns [8][SWEEP_STRIDE], and of
 * the rows {mean, inverse}. */
struct gemv_sweeps {
    float *row;
    uint16_t *rounded; /* this warp's */
    float2 *stats;
    int n_float; /* of a row */
};

__host__ __device__ __forceinline__ int sweeps_floats(int n_in)
{
    return (n_in + SWEEP - 1) / SWEEP * SWEEP;
}

static inline size_t sweeps_bytes(const struct linear_args *a)
{
    const int n = sweeps_floats(a->n_in);
    return static_cast<size_t>(a->n_tok) *
               (static_cast<size_t>(n) * sizeof(float) + sizeof(float2)) +
           static_cast<size_t>(n / SWEEP) * 8 * SWEEP_STRIDE * sizeof(uint16_t);
}

/* The lane's columns of rows tok .. tok+n-1, all asked for before the first is used. */
template <int n>
__device__ __forceinline__ void sweep_load(const struct gemv_sweeps &s,
                                           const struct norm_args &norm, int n_tok, int tok, int c)
{
    const int columns[1] = {c};
    float4 v[n][1];
    float4 r[n][1] = {};
#pragma unroll
    for (int j = 0; j < n; j++) {
        const int at = tok + j < n_tok ? tok + j : n_tok - 1;
        if (norm.from.view != NULL) {
            embed_groups(v[j], norm.from, embed_row_of(norm.from, at), columns);
        } else {
            norm_groups(v[j], norm.x + at * norm.x_stride, columns);
        }
        if (norm.r != NULL) {
            norm_groups(r[j], norm.r + at * norm.r_stride, columns);
        }
    }
#pragma unroll
    for (int j = 0; j < n; j++) {
        if (tok + j < n_tok) {
            *reinterpret_cast<float4 *>(s.row + (tok + j) * s.n_float + c) =
                norm.r != NULL ? group_add(v[j][0], r[j][0]) : v[j][0];
        }
    }
}

/* x ← the warp's chunk of the normed rows, rounded. gamma, beta: the lane's columns of them. By the whole block. */
template <class shape, enum dtype type>
__device__ __forceinline__ void gemv_norm_x(struct gemv_rows<shape> &x, const struct linear_args &a,
                                            const struct gemv_sweeps &s, float4 gamma, float4 beta)
{
    const struct norm_args &norm = a.norm;
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
        *reinterpret_cast<uint2 *>(s.rounded + tok * SWEEP_STRIDE + lane * GROUP) =
            make_uint2(operand_pair<type>(out.x, out.y), operand_pair<type>(out.z, out.w));
        if (blockIdx.x == 0 && is_there) {
            *reinterpret_cast<float4 *>(norm.y + tok * norm.y_stride + c) = out;
        }
    }
    __syncwarp();
    const int g = lane / 4;
#pragma unroll
    for (int b = 0; b < N_BLOCK; b++) {
        x.piece[b][0] = make_uint4(0, 0, 0, 0);
        if (g < a.n_tok) {
            x.piece[b][0] = *reinterpret_cast<const uint4 *>(s.rounded + g * SWEEP_STRIDE +
                                                             b * LINEAR_BLOCK_BF16 + lane % 4 * 8);
        }
    }
}

/* ---- the kernel ------------------------------------------------------------------------------ */

/* Grid (halves of tiles of outputs / n_half, tiles of tokens / n_nt), warps that take n_turn chunks each in a
 * round, a multiple of n_ahead; of normed rows a chunk for each warp. */
template <class shape, enum dtype type>
__global__ void __launch_bounds__(32 * shape::warps_max, shape::warps_max == 8 ? 2 : 0)
    gemv_kernel_bf16(const struct linear_args a, int n_turn)
{
    DYN_SHARED(float, part); /* [n_part + 1][n_token][stride] */
    constexpr int n_ahead = shape::n_ahead;
    const int n_warp = static_cast<int>(blockDim.x) / 32;
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const int n_chunk = (a.n_block + N_BLOCK - 1) / N_BLOCK;
    const int n_part = n_warp * n_turn;
    const struct gemv_source<shape> source = gemv_source_of<shape>(a);
    struct gemv_weights<shape> w[n_ahead];
    const auto load_first = [&] {
#pragma unroll
        for (int u = 0; u < n_ahead; u++) {
            gemv_load_w<shape>(w[u], source, a, warp + u * n_warp);
        }
    };
    if (a.starts_early) {
        load_first();
    }
    float4 gamma = {0, 0, 0, 0};
    float4 beta = {0, 0, 0, 0};
    const int column = warp * SWEEP + static_cast<int>(threadIdx.x) % 32 * GROUP;
    if (shape::x == GEMV_X_NORMED && column < a.n_in) {
        gamma = *reinterpret_cast<const float4 *>(a.norm.gamma + column);
        beta = *reinterpret_cast<const float4 *>(a.norm.beta + column);
    }
    const struct gemv_end end = gemv_end_of(a, shape::n_token, shape::n_output);
    grid_wait();
    if (!a.starts_early) {
        load_first();
    }
    for (int first = 0; first < n_chunk; first += n_part) {
#pragma unroll 1
        for (int turn = 0; turn < n_turn; turn += n_ahead) {
            struct gemv_rows<shape> x[n_ahead];
            const int next = first + turn * n_warp + warp;
            if constexpr (shape::x == GEMV_X_NORMED) {
                const int n_float = sweeps_floats(a.n_in);
                float *const row = part + (n_part + 1) * shape::n_token * shape::stride;
                uint16_t *const rounded = reinterpret_cast<uint16_t *>(row + a.n_tok * n_float);
                constexpr int n_rounded = 8 * SWEEP_STRIDE; /* of a warp */
                gemv_norm_x<shape, type>(
                    x[0], a,
                    {row, rounded + warp * n_rounded,
                     reinterpret_cast<float2 *>(rounded + n_float / SWEEP * n_rounded), n_float},
                    gamma, beta);
            } else {
#pragma unroll
                for (int u = 0; u < n_ahead; u++) {
                    gemv_load_x<shape, type>(x[u], a, next + u * n_warp);
                }
            }
#pragma unroll
            for (int u = 0; u < n_ahead; u++) {
                const int chunk = next + u * n_warp;
                if (chunk < n_chunk) {
                    float sum[shape::n_mt][shape::n_nt][4] = {};
                    gemv_multiply<shape, type>(sum, w[u], x[u], a.is_row_major);
                    gemv_leave<shape>(part + (chunk - first) * shape::n_token * shape::stride, sum);
                    if (chunk + n_ahead * n_warp < n_chunk) {
                        gemv_load_w<shape>(w[u], source, a, chunk + n_ahead * n_warp);
                    }
                }
            }
        }
        __syncthreads();
        const int left = n_chunk - first;
        gemv_reduce<shape::n_token, shape::stride>(a, end, part, left < n_part ? left : n_part,
                                                   n_part, first == 0, left <= n_part);
        if (left > n_part) {
            __syncthreads(); /* the next round writes part */
        }
    }
}

/* Sums of so many chunks lie in shared memory at a time, beside another block's. */
constexpr size_t PART_BYTES_MAX = 96 << 10;

template <class shape, enum dtype type>
void gemv_run_of(struct cuda *cu, const struct linear_args *a)
{
    const int n_chunk = (a->n_block + N_BLOCK - 1) / N_BLOCK;
    const int unit = shape::n_output > 32 ? shape::n_output / 32 : 1; /* whole outputs */
    const int wanted = n_chunk < shape::warps_max ? n_chunk : +shape::warps_max;
    const int n_warp = (wanted + unit - 1) / unit * unit;
    const int fit = static_cast<int>(PART_BYTES_MAX / shape::part_bytes) / n_warp;
    const int n_needed = (n_chunk + n_warp - 1) / n_warp;
    const int n_turn =
        ((n_needed < fit ? n_needed : fit) + shape::n_ahead - 1) / shape::n_ahead * shape::n_ahead;
    CHECK(shape::x != GEMV_X_NORMED || n_chunk <= n_warp);
    const size_t shared = static_cast<size_t>(n_warp * n_turn + 1) * shape::part_bytes +
                          (shape::x == GEMV_X_NORMED ? sweeps_bytes(a) : 0);
    if (!cuda_shared(cu, gemv_kernel_bf16<shape, type>, shared, "linear")) {
        return;
    }
    const dim3 grid(static_cast<unsigned>((a->n_tile * 2 + shape::n_half - 1) / shape::n_half),
                    static_cast<unsigned>((a->n_tok + shape::n_token - 1) / shape::n_token));
    LAUNCH((gemv_kernel_bf16<shape, type>), grid, dim3(static_cast<unsigned>(n_warp * 32)), shared,
           cuda_queue(cu), *a, n_turn);
}

template <class shape> void gemv_bf16_run(struct cuda *cu, const struct linear_args *a)
{
    if (a->is_f16) {
        gemv_run_of<shape, DTYPE_F16>(cu, a);
    } else {
        gemv_run_of<shape, DTYPE_BF16>(cu, a);
    }
}

/* Columns of x that the warps of a block with four halves may norm. */
constexpr int FOUR_HALVES_MAX = 8 * LINEAR_CHUNK_BF16;

/* Half a tile of outputs a block where there is no more than one for each multiprocessor; two where there are so many
 * that each block costs more than it reads. */
template <int n_nt, enum gemv_x x>
void gemv_bf16_tiles(struct cuda *cu, const struct linear_args *a)
{
    const int groups = (a->n_tok + n_nt * 8 - 1) / (n_nt * 8);
    if (n_nt == 1 && a->is_row_major && a->n_tile * 2 * groups <= cu->n_sm) {
        gemv_bf16_run<gemv_bf16<(n_nt == 1 ? 1 : 2), n_nt, x>>(cu, a);
    } else if (n_nt <= 2 && a->n_tile * groups >= 8 * cu->n_sm && a->n_in <= FOUR_HALVES_MAX) {
        gemv_bf16_run<gemv_bf16<(n_nt <= 2 ? 4 : 2), n_nt, x>>(cu, a);
    } else {
        gemv_bf16_run<gemv_bf16<2, n_nt, x>>(cu, a);
    }
}

/* Tiles of tokens of a block: one that has all of them reads weights once, but where outputs are few, fewer
 * tokens leave fewer multiprocessors idle, and none reads as much of x. */
int gemv_token_tiles(const struct cuda *cu, const struct linear_args *a)
{
    int n_nt = a->n_tok <= 8 ? 1 : a->n_tok <= 16 ? 2 : 4;
    while (n_nt > 1 && a->n_tile * ((a->n_tok + n_nt * 8 - 1) / (n_nt * 8)) < cu->n_sm * 5 / 8) {
        n_nt /= 2;
    }
    return n_nt;
}

} // namespace

void gemv(struct cuda *cu, const struct linear_args *args, enum dtype dtype)
{
    if (dtype != DTYPE_F32) {
        const int n_nt = gemv_token_tiles(cu, args);
        if (args->norm.d > 0) {
            gemv_bf16_tiles<1, GEMV_X_NORMED>(cu, args);
        } else if (!args->x_is_rounded) {
            CHECK(args->n_tok <= GEMV_F32_ROWS);
            gemv_bf16_tiles<1, GEMV_X_F32>(cu, args);
        } else if (n_nt == 1) {
            gemv_bf16_tiles<1, GEMV_X_ROUNDED>(cu, args);
        } else if (n_nt == 2) {
            gemv_bf16_tiles<2, GEMV_X_ROUNDED>(cu, args);
        } else {
            gemv_bf16_tiles<4, GEMV_X_ROUNDED>(cu, args);
        }
    } else {
        gemv_run_f32(cu, args);
    }
    cuda_check(cu, "linear");
}
