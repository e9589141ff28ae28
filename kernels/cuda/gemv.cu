/* Linear with few rows and BF16 weights, and the choice between it and F32: linear.cuh defines the
 * sum.
 *
 * A block computes tiles of 16 outputs, or of 8, one after the other, for a few rows. Its warps
 * share the chunks of k: warp w of n takes the chunks w, w+n, .., whose sums are added in shared
 * memory in ascending order. No two warps want the same weight, and each lane reads from memory
 * what it multiplies by, straight into registers: the weights of a warp's first items, which are a
 * chunk of a tile, are asked for before the kernel before is complete, those of an item when an
 * earlier one is done. Blocks are one a multiprocessor, with half of its registers, so that those
 * of the next kernel find room to ask for theirs. What a warp does is short, since its chain of
 * instructions is what few rows wait for. Up to 16 rows by row-major weights are gemv_few.cu's.
 *
 * Bytes: weights once from memory (once more from the second-level cache per further group of
 * tokens), x once per block from that cache: in BF16, as the op before has left it or linear_round,
 * but in F32 of up to GEMV_F32_ROWS rows that none has left so: a launch would cost more.
 * Operations: 2·n_tok·n_in·n_out. Bound: device memory for a large matrix; for those of a layer the
 * latency of a launch, of x and of the sums. */
#include "kernels/cuda/linear.cuh"

namespace
{

/* How a kernel gets x. */
enum gemv_x { GEMV_X_F32, GEMV_X_ROUNDED };

/* Weights are the mma's A (16 outputs), rows of x its B (8 tokens). n_nt tiles of tokens at a time.
 * n_ahead: items whose weights a warp has in registers. */
template <int n_nt_, enum gemv_x x_>
struct gemv_bf16 {
    static constexpr int n_nt = n_nt_; static constexpr enum gemv_x x = x_;
    static constexpr int n_token = n_nt * 8;
    static constexpr int n_output = LINEAR_TILE;
    static constexpr int stride = n_output + 4; /* a fragment's sums fall into 32 banks */
    static constexpr int n_ahead = 2;
    static constexpr int part_floats = n_token * stride; /* of a chunk */
};

constexpr int N_BLOCK = LINEAR_CHUNK_BLOCKS;

/* ---- operands -------------------------------------------------------------------------------- */

/* A lane's weights of a chunk. */
struct gemv_weights {
    uint4 piece[N_BLOCK][2];
};

/* Those of a tile. */
__device__ __forceinline__ void gemv_load_w(struct gemv_weights &to, const struct linear_args &a,
                                            int tile, int chunk)
{
    const int g = static_cast<int>(threadIdx.x) % 32 / 4;
    const int t = static_cast<int>(threadIdx.x) % 4;
    const unsigned char *const w = a.w + tile * a.map.tile + g * a.map.row + t * 16 +
                                   static_cast<int64_t>(chunk * N_BLOCK) * a.map.block;
#pragma unroll
    for (int b = 0; b < N_BLOCK; b++) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            to.piece[b][i] =
                load_16_if(chunk * N_BLOCK + b < a.n_block, w + b * a.map.block + i * a.map.half);
        }
    }
}

/* A lane's eight values of x in each block of a chunk, rounded: those of token g of each tile of
 * tokens. */
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
            const bool is_there = tok < a.n_tok && block < a.n_block;
            if constexpr (shape::x == GEMV_X_ROUNDED) {
                to.piece[b][j] =
                    load_16_if(is_there, static_cast<const uint16_t *>(a.x) + row + first);
            } else {
                to.piece[b][j] = make_uint4(0, 0, 0, 0);
                if (is_there) {
                    to.piece[b][j] = gemv_round<type>(static_cast<const float *>(a.x) + row + first,
                                                      a.n_in - first);
                }
            }
        }
    }
}

constexpr int STAGE_STRIDE =
    LINEAR_CHUNK_BF16 + 8; /* of a row's chunk: rows fall into different banks */

/* Bytes of all rows' chunks. */
static inline size_t stage_bytes(int n_tok, int n_chunk)
{
    return static_cast<size_t>(n_tok) * static_cast<size_t>(n_chunk) * STAGE_STRIDE *
           sizeof(uint16_t);
}

/* Of several chunks of rounded rows, all are asked for at once: to[n_turn][n_tok][STAGE_STRIDE],
 * the warp's own. */
__device__ __forceinline__ void stage_x(uint16_t *to, const struct linear_args &a, int n_turn)
{
    const int n_warp = static_cast<int>(blockDim.x) / 32;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int c = lane % 16 * 8;
    const uint16_t *const x = static_cast<const uint16_t *>(a.x) + c;
    for (int turn = 0; turn < n_turn; turn++) {
        const int first = (turn * n_warp + static_cast<int>(threadIdx.x) / 32) * LINEAR_CHUNK_BF16;
        const bool is_there = first + c < a.n_block * LINEAR_BLOCK_BF16;
        for (int tok = lane / 16; tok < a.n_tok; tok += 2) {
            copy_async_16(to + (turn * a.n_tok + tok) * STAGE_STRIDE + c,
                          is_there ? x + tok * a.x_stride + first : x, is_there ? 16 : 0);
        }
    }
    copy_async_commit();
    copy_async_wait<0>();
    __syncwarp();
}

template <class shape>
__device__ __forceinline__ void staged_x(struct gemv_rows<shape> &x, const uint16_t *from,
                                         int n_tok)
{
    const int g = static_cast<int>(threadIdx.x) % 32 / 4;
    const int t = static_cast<int>(threadIdx.x) % 4;
#pragma unroll
    for (int b = 0; b < N_BLOCK; b++) {
        x.piece[b][0] = make_uint4(0, 0, 0, 0);
        if (g < n_tok) {
            x.piece[b][0] = *reinterpret_cast<const uint4 *>(from + g * STAGE_STRIDE +
                                                             b * LINEAR_BLOCK_BF16 + t * 8);
        }
    }
}

/* sum = the products of a chunk. */
template <class shape, enum dtype type>
__device__ __forceinline__ void gemv_multiply(float (&sum)[shape::n_nt][4],
                                              const struct gemv_weights &w,
                                              const struct gemv_rows<shape> &x, bool is_row_major)
{
#pragma unroll
    for (int j = 0; j < shape::n_nt; j++) {
        sum[j][0] = sum[j][1] = sum[j][2] = sum[j][3] = 0;
    }
#pragma unroll
    for (int b = 0; b < N_BLOCK; b++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const uint4 p = w.piece[b][0];
            const uint4 q = w.piece[b][1];
            uint32_t in_w[4] = {h == 0 ? p.x : q.x, h == 0 ? p.y : q.y, h == 0 ? p.z : q.z,
                                h == 0 ? p.w : q.w};
            if (is_row_major) {
                in_w[0] = h == 0 ? p.x : p.z, in_w[1] = h == 0 ? q.x : q.z;
                in_w[2] = h == 0 ? p.y : p.w, in_w[3] = h == 0 ? q.y : q.w;
            }
#pragma unroll
            for (int j = 0; j < shape::n_nt; j++) {
                const uint4 v = x.piece[b][j];
                const uint32_t in_x[2] = {h == 0 ? v.x : v.z, h == 0 ? v.y : v.w};
                operand_mma<type>(sum[j], in_w, in_x);
            }
        }
    }
}

/* Leaves a chunk's sums in part [n_token][stride]: lane (g, t) holds outputs g, g+8 of a tile,
 * tokens 2t, 2t+1. */
template <class shape>
__device__ __forceinline__ void gemv_leave(float *part, const float (&sum)[shape::n_nt][4])
{
    constexpr int stride = shape::stride;
    const int g = static_cast<int>(threadIdx.x) % 32 / 4;
    const int t = static_cast<int>(threadIdx.x) % 4;
#pragma unroll
    for (int j = 0; j < shape::n_nt; j++) {
        float *const at = part + (j * 8 + t * 2) * stride + g;
        at[0] = sum[j][0];
        at[stride] = sum[j][1];
        at[8] = sum[j][2];
        at[stride + 8] = sum[j][3];
    }
}

/* The thread's output of a tile. */
template <class shape> __device__ __forceinline__ int gemv_output(int tile)
{
    return tile * shape::n_output + static_cast<int>(threadIdx.x) % shape::n_output;
}

/* y of a tile, from its chunks' sums in part. */
template <class shape>
__device__ __forceinline__ void gemv_end_tile(const struct linear_args &a, const float *part,
                                              int n_chunk, int tile, float bias)
{
    const int out = gemv_output<shape>(tile);
    const int first = static_cast<int>(blockIdx.y) * shape::n_token;
    const int n_tok = min(a.n_tok - first, shape::n_token);
    const int step = static_cast<int>(blockDim.x) / shape::n_output;
    part += static_cast<int>(threadIdx.x) % shape::n_output;
    for (int tok = static_cast<int>(threadIdx.x) / shape::n_output; tok < n_tok && out < a.n_out;
         tok += step) {
        float total = 0;
#pragma unroll 8
        for (int p = 0; p < n_chunk; p++) {
            total += part[p * shape::part_floats + tok * shape::stride];
        }
        linear_store(a, first + tok, out, linear_finish_16(total, bias, a.act));
    }
}

/* ---- the kernel ------------------------------------------------------------------------------ */

/* How a block's work is cut: each warp has n_turn chunks of a tile. Of n_part sets of sums in
 * shared memory tiles take turns. */
struct gemv_plan {
    int n_chunk, n_turn, n_part;
    bool stages_x;
};

/* Grid (blocks that share the tiles of outputs, tiles of tokens / n_nt). */
template <class shape, enum dtype type>
__global__ void __launch_bounds__(32 * GEMV_WARPS_MAX)
    gemv_kernel_bf16(const struct linear_args a, const struct gemv_plan plan)
{
    DYN_SHARED(float, shared); /* [n_part][n_chunk][n_token][stride] */
    constexpr int n_ahead = shape::n_ahead;
    const int n_warp = static_cast<int>(blockDim.x) / 32;
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const int n_tile = a.n_tile;
    const int part_floats = plan.n_chunk * shape::part_floats;
    struct gemv_weights w[n_ahead];
    float bias[n_ahead] = {};
    /* Of the item that begins with a tile and a turn, into place u. */
    const auto load = [&](int u, int tile, int turn) {
        if (tile < n_tile) {
            gemv_load_w(w[u], a, tile, turn * n_warp + warp);
            const int out = gemv_output<shape>(tile);
            bias[u] = a.bias != NULL && out < a.n_out ? a.bias[out] : 0;
        }
    };
    int ahead_tile = static_cast<int>(blockIdx.x); /* of the item that is asked for next */
    int ahead_turn = 0;
    const auto load_next = [&](int u) {
        load(u, ahead_tile, ahead_turn);
        ahead_turn = ahead_turn + 1 == plan.n_turn ? 0 : ahead_turn + 1;
        ahead_tile += ahead_turn == 0 ? static_cast<int>(gridDim.x) : 0;
    };
    const auto load_first = [&] {
#pragma unroll
        for (int u = 0; u < n_ahead; u++) {
            load_next(u);
        }
    };
    if (a.starts_early) {
        load_first();
    }
    linear_ask_next(a);
    grid_wait();
    if (!a.starts_early) {
        load_first();
    }
    struct gemv_rows<shape> x;
    uint16_t *const stage = reinterpret_cast<uint16_t *>(shared + plan.n_part * part_floats) +
                            warp * plan.n_turn * a.n_tok * STAGE_STRIDE;
    if (plan.stages_x) {
        stage_x(stage, a, plan.n_turn);
    }
    const auto take_x = [&](int turn) {
        if constexpr (shape::n_nt == 1 && shape::x == GEMV_X_ROUNDED) {
            if (plan.stages_x) {
                staged_x<shape>(x, stage + turn * a.n_tok * STAGE_STRIDE, a.n_tok);
                return;
            }
        }
        gemv_load_x<shape, type>(x, a, turn * n_warp + warp);
    };
    take_x(0);
    int tile = static_cast<int>(blockIdx.x);
    int turn = 0;
    float *part = shared;
    while (tile < n_tile) {
#pragma unroll
        for (int u = 0; u < n_ahead; u++) {
            const int chunk = turn * n_warp + warp;
            if (tile < n_tile) {
                const float own_bias = bias[u];
                if (chunk < plan.n_chunk) {
                    float sum[shape::n_nt][4];
                    gemv_multiply<shape, type>(sum, w[u], x, a.is_row_major);
                    gemv_leave<shape>(part + chunk * shape::part_floats, sum);
                }
                load_next(u);
                turn = turn + 1 == plan.n_turn ? 0 : turn + 1;
                if (plan.n_turn > 1) {
                    take_x(turn);
                }
                if (turn == 0) {
                    __syncthreads();
                    gemv_end_tile<shape>(a, part, plan.n_chunk, tile, own_bias);
                    if (plan.n_part == 1) {
                        __syncthreads(); /* the next tile's sums take the place of these */
                    } else {
                        part = part == shared ? shared + part_floats : shared;
                    }
                    tile += static_cast<int>(gridDim.x);
                }
            }
        }
    }
}

/* Sums of so many bytes lie in shared memory, beside those of the next kernel. */
constexpr size_t PART_BYTES_MAX = 96 << 10;
static_assert(GEMV_IN_MAX / LINEAR_CHUNK_BF16 * 8 * 20 * sizeof(float) <= PART_BYTES_MAX,
              "a tile of 8 tokens");

template <class shape, enum dtype type>
void gemv_run_of(struct cuda *cu, const struct linear_args *a)
{
    const int n_chunk = (a->n_block + N_BLOCK - 1) / N_BLOCK;
    const int n_warp = n_chunk < GEMV_WARPS_MAX ? n_chunk : +GEMV_WARPS_MAX;
    const size_t part_bytes = static_cast<size_t>(n_chunk) * shape::part_floats * sizeof(float);
    const int n_turn = (n_chunk + n_warp - 1) / n_warp;
    const size_t x_bytes = stage_bytes(a->n_tok, n_warp * n_turn);
    const int n_part = 2 * part_bytes <= PART_BYTES_MAX ? 2 : 1;
    const bool stages_x = shape::x == GEMV_X_ROUNDED && shape::n_nt == 1 && n_turn > 1 &&
                          a->n_tok <= 8 &&
                          static_cast<size_t>(n_part) * part_bytes + x_bytes <= cu->shared_max;
    const struct gemv_plan plan = {n_chunk, n_turn, n_part, stages_x};
    const size_t shared =
        static_cast<size_t>(plan.n_part) * part_bytes + (plan.stages_x ? x_bytes : 0);
    if (!cuda_shared(cu, gemv_kernel_bf16<shape, type>, shared, "linear")) {
        return;
    }
    const int groups = (a->n_tok + shape::n_token - 1) / shape::n_token;
    const int n_tile = a->n_tile;
    const int n_block = shape::n_nt == 1 && n_tile <= 2 * cu->n_sm ? 2 * cu->n_sm : cu->n_sm;
    const int n_each = (n_tile * groups + n_block - 1) / n_block; /* tiles of a block */
    const dim3 grid(static_cast<unsigned>((n_tile + n_each - 1) / n_each),
                    static_cast<unsigned>(groups));
    LAUNCH((gemv_kernel_bf16<shape, type>), grid, dim3(static_cast<unsigned>(n_warp * 32)), shared,
           cuda_queue(cu), linear_sliced(a, grid), plan);
}

template <class shape> void gemv_bf16_run(struct cuda *cu, const struct linear_args *a)
{
    if (a->is_f16) {
        gemv_run_of<shape, DTYPE_F16>(cu, a);
    } else {
        gemv_run_of<shape, DTYPE_BF16>(cu, a);
    }
}

/* Tiles of tokens of a block: one that has all of them reads weights once, but where outputs are
 * few, fewer tokens leave fewer multiprocessors idle, and none reads as much of x. */
int gemv_token_tiles(const struct cuda *cu, const struct linear_args *a)
{
    int n_nt = a->n_tok <= 8 ? 1 : a->n_tok <= 16 ? 2 : 4;
    const size_t tile_bytes = static_cast<size_t>(a->n_block / N_BLOCK + 1) *
                              gemv_bf16<1, GEMV_X_ROUNDED>::part_floats * sizeof(float);
    while (n_nt > 1 && (a->n_tile * ((a->n_tok + n_nt * 8 - 1) / (n_nt * 8)) < cu->n_sm * 5 / 8 ||
                        static_cast<size_t>(n_nt) * tile_bytes > PART_BYTES_MAX)) {
        n_nt /= 2;
    }
    return n_nt;
}

} // namespace

void gemv(struct cuda *cu, const struct linear_args *args, enum dtype dtype)
{
    if (gemv_is_few(cu, args, dtype)) {
        gemv_few(cu, args);
    } else if (dtype != DTYPE_F32) {
        const int n_nt = gemv_token_tiles(cu, args);
        if (!args->x_is_rounded) {
            CHECK(args->n_tok <= GEMV_F32_ROWS);
            gemv_bf16_run<gemv_bf16<1, GEMV_X_F32>>(cu, args);
        } else if (n_nt == 1) {
            gemv_bf16_run<gemv_bf16<1, GEMV_X_ROUNDED>>(cu, args);
        } else if (n_nt == 2) {
            gemv_bf16_run<gemv_bf16<2, GEMV_X_ROUNDED>>(cu, args);
        } else {
            gemv_bf16_run<gemv_bf16<4, GEMV_X_ROUNDED>>(cu, args);
        }
    } else {
        gemv_run_f32(cu, args);
    }
    cuda_check(cu, "linear");
}
