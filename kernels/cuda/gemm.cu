/* Linear with many rows (prefill, scoring, large batches): the matrix units are the bound.
 *
 * A block computes a tile of outputs times tokens; its operands come through a ring of slots in
 * shared memory, filled by copy_async three slots ahead, so that each value is read from the
 * second-level cache once per tile. x has been prepared (linear.cu): rounded if the weights are
 * BF16, rows padded with zeros to whole blocks of k. The chains and chunks of k are those of
 * linear.cuh: a thread keeps a chunk's sum and the total in two sets of registers and adds the one
 * to the other at a chunk's end. What lies past the last output or token repeats the last tile or
 * row and is not stored.
 *
 * Bytes: per tile and k, outputs and tokens times 2 (BF16) or 4 (F32) from the second-level cache;
 * a tile of 128 × 128 does 64 multiply-adds per byte with BF16. Operations: 2·n_tok·n_in·n_out.
 * Bound: BF16 mma.sync, which on sm_90 is some 60 % of what wgmma would reach, and close to it the
 * second-level cache; F32 the multiply-add units. Reached on an H200, of 256 rows: 77 to 140
 * TFLOP/s. */
#include "kernels/cuda/linear.cuh"

namespace
{

constexpr int GEMM_SLOTS = 4; /* of F32 */

/* ---- BF16 ----------------------------------------------------------------------------------- */

/* A block of n_wm × n_wn warps, each with n_mt tiles of 16 outputs and n_nt of 8 tokens. One of
 * n_slot slots holds n_kb blocks of 32 k, each of them weights as packed, [tile][2 instructions][32
 * lanes] pieces of 16 bytes (row-major: [tile][8 outputs, the next 8][32 lanes]),
 * then x [token][4 pieces]: a fragment of either is 512 consecutive bytes. */
template <int n_mt_, int n_nt_, int n_wm_, int n_wn_, int n_kb_, int n_slot_> struct gemm_bf16 {
    static constexpr int n_mt = n_mt_, n_nt = n_nt_, n_wm = n_wm_, n_wn = n_wn_;
    static constexpr int n_kb = n_kb_, n_slot = n_slot_;
    static constexpr int n_thread = n_wm * n_wn * 32;
    static constexpr int n_tile = n_wm * n_mt; /* of outputs */
    static constexpr int n_output = n_tile * LINEAR_TILE;
    static constexpr int n_token = n_wn * n_nt * 8;
    static constexpr int n_w = n_tile * 64; /* pieces of a block of k */
    static constexpr int n_x = n_token * 4;
    static constexpr int n_piece = n_w + n_x + 4; /* eight lanes write two blocks: to all banks */
    static constexpr int n_w_mine = n_w * n_kb / n_thread; /* of a slot, that a thread copies */
    static constexpr int n_x_mine = n_x * n_kb / n_thread;
    static constexpr size_t shared_bytes = static_cast<size_t>(n_slot) * n_kb * n_piece * 16;
    static_assert(n_w * n_kb % n_thread == 0 && n_x * n_kb % n_thread == 0,
                  "threads copy equal shares");
    static_assert(LINEAR_CHUNK_BLOCKS % n_kb == 0, "a chunk ends where a slot does");
};

/* A piece of a slot: of row (output or token) r piece t in block b of k. Threads that follow one
 * another copy what follows in a row of memory. */
template <typename shape> struct gemm_piece {
    int r, b, t;
};

template <typename shape> __device__ __forceinline__ struct gemm_piece<shape> gemm_piece_of(int i) {
    const int at = i * shape::n_thread + static_cast<int>(threadIdx.x);
    return {at / (4 * shape::n_kb), at / 4 % shape::n_kb, at % 4};
}

/* Where a thread's pieces of the first slot come from. */
template <typename shape>
struct gemm_source {
    const unsigned char *w[shape::n_w_mine];
    const unsigned char *x[shape::n_x_mine];
};

template <typename shape>
__device__ __forceinline__ struct gemm_source<shape> gemm_source_of(const struct linear_args &a) {
    struct gemm_source<shape> source;
#pragma unroll
    for (int i = 0; i < shape::n_w_mine; i++) {
        const struct gemm_piece<shape> p = gemm_piece_of<shape>(i);
        const int tile = static_cast<int>(blockIdx.y) * shape::n_tile + p.r / LINEAR_TILE;
        source.w[i] = a.w + (tile < a.n_tile ? tile : a.n_tile - 1) * a.map.tile +
                      p.r / 8 % 2 * a.map.half + p.r % 8 * a.map.row + p.b * a.map.block + p.t * 16;
    }
#pragma unroll
    for (int i = 0; i < shape::n_x_mine; i++) {
        const struct gemm_piece<shape> p = gemm_piece_of<shape>(i);
        const int tok = static_cast<int>(blockIdx.x) * shape::n_token + p.r;
        source.x[i] = static_cast<const unsigned char *>(a.x) +
                      (tok < a.n_tok ? tok : a.n_tok - 1) * a.x_stride * 2 +
                      p.b * (LINEAR_BLOCK_BF16 * 2) + p.t * 16;
    }
    return source;
}

/* Weights of the slot that begins with a block; zeros behind the last one. */
template <typename shape>
__device__ __forceinline__ void gemm_copy_w(uint4 *slot, const struct gemm_source<shape> &source,
                                            const struct linear_args &a, int block)
{
#pragma unroll
    for (int i = 0; i < shape::n_w_mine; i++) {
        const struct gemm_piece<shape> p = gemm_piece_of<shape>(i);
        const bool is_there = block + p.b < a.n_block;
        copy_async_16(slot + p.b * shape::n_piece + p.r * 4 + p.t,
                      source.w[i] + (is_there ? static_cast<int64_t>(block) * a.map.block : 0),
                      is_there ? 16 : 0);
    }
}

template <typename shape>
__device__ __forceinline__ void gemm_copy_x(uint4 *slot, const struct gemm_source<shape> &source,
                                            const struct linear_args &a, int block)
{
#pragma unroll
    for (int i = 0; i < shape::n_x_mine; i++) {
        const struct gemm_piece<shape> p = gemm_piece_of<shape>(i);
        const bool is_there = block + p.b < a.n_block;
        copy_async_16(slot + p.b * shape::n_piece + shape::n_w + p.r * 4 + p.t,
                      source.x[i] +
                          (is_there ? static_cast<int64_t>(block) * (LINEAR_BLOCK_BF16 * 2) : 0),
                      is_there ? 16 : 0);
    }
}

/* The A operands of two instructions. Packed weights are that; of row-major ones a lane's two
 * pieces are 8 k of output g and of g+8, and registers change places. An instruction wants its four
 * side by side, and ptxas, which knows a copy for what it is, copies them again for every
 * instruction (3.5 moves for each): so they are computed, by a zero that it does not know to be
 * one, once for all tokens. */
struct gemm_operands {
    uint32_t lower[4], upper[4];
};

template <bool row_major>
__device__ __forceinline__ struct gemm_operands gemm_operands_of(uint4 p, uint4 q, uint32_t zero)
{
    if constexpr (row_major) {
        return {{p.x | zero, q.x | zero, p.y | zero, q.y | zero},
                {p.z | zero, q.z | zero, p.w | zero, q.w | zero}};
    }
    return {{p.x, p.y, p.z, p.w}, {q.x, q.y, q.z, q.w}};
}

/* sum += the products of a block of k. w, x: the lane's first fragments in it. */
template <typename shape, bool row_major, enum dtype type>
__device__ __forceinline__ void gemm_multiply(float (&sum)[shape::n_mt][shape::n_nt][4],
                                              const uint4 *w, const uint4 *x, uint32_t zero)
{
    uint4 in_x[shape::n_nt];
#pragma unroll
    for (int j = 0; j < shape::n_nt; j++) {
        in_x[j] = x[j * 32];
    }
#pragma unroll
    for (int i = 0; i < shape::n_mt; i++) {
        const struct gemm_operands in_w =
            gemm_operands_of<row_major>(w[i * 64], w[i * 64 + 32], zero);
#pragma unroll
        for (int j = 0; j < shape::n_nt; j++) {
            const uint32_t x_lower[2] = {in_x[j].x, in_x[j].y};
            operand_mma<type>(sum[i][j], in_w.lower, x_lower);
        }
#pragma unroll
        for (int j = 0; j < shape::n_nt; j++) {
            const uint32_t x_upper[2] = {in_x[j].z, in_x[j].w};
            operand_mma<type>(sum[i][j], in_w.upper, x_upper);
        }
    }
}

/* total += sum, which becomes 0. */
template <int n_mt, int n_nt, int n>
__device__ __forceinline__ void gemm_border(float (&total)[n_mt][n_nt][n],
                                            float (&sum)[n_mt][n_nt][n])
{
#pragma unroll
    for (int i = 0; i < n_mt; i++) {
#pragma unroll
        for (int j = 0; j < n_nt; j++) {
#pragma unroll
            for (int e = 0; e < n; e++) {
                total[i][j][e] += sum[i][j][e];
                sum[i][j][e] = 0;
            }
        }
    }
}

/* Lane (g, t) holds outputs g, g+8 of a tile for tokens 2t, 2t+1: eight lanes write 32 consecutive
 * bytes of y. */
template <typename shape>
__device__ __forceinline__ void gemm_store(const struct linear_args &a,
                                           const float (&total)[shape::n_mt][shape::n_nt][4],
                                           int first_out, int first_tok)
{
#pragma unroll
    for (int i = 0; i < shape::n_mt; i++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int out = first_out + i * LINEAR_TILE + h * 8;
            if (out >= a.n_out) {
                continue;
            }
            const float bias = a.bias == NULL ? 0 : a.bias[out];
#pragma unroll
            for (int j = 0; j < shape::n_nt; j++) {
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    const int tok = first_tok + j * 8 + e;
                    if (tok < a.n_tok) {
                        linear_store(a, tok, out,
                                     linear_finish_16(total[i][j][2 * h + e], bias, a.act));
                    }
                }
            }
        }
    }
}

/* Grid (tiles of tokens, tiles of outputs): neighbours share weights, which are read once. */
template <typename shape, bool row_major, enum dtype type>
__global__ void __launch_bounds__(shape::n_thread) gemm_kernel_bf16(const struct linear_args a)
{
    DYN_SHARED(uint4, ring); /* [n_slot][n_kb][n_piece] */
    constexpr int n_kb = shape::n_kb;
    constexpr int n_slot = shape::n_slot;
    constexpr int slot_pieces = n_kb * shape::n_piece;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int wm = static_cast<int>(threadIdx.x) / 32 % shape::n_wm;
    const int wn = static_cast<int>(threadIdx.x) / 32 / shape::n_wm;
    const struct gemm_source<shape> source = gemm_source_of<shape>(a);
    const auto copy_first_w = [&] {
#pragma unroll
        for (int i = 0; i < n_slot - 1; i++) {
            gemm_copy_w<shape>(ring + i * slot_pieces, source, a, i * n_kb);
        }
    };
    if (a.starts_early) {
        copy_first_w();
    }
    linear_ask_next(a);
    grid_wait();
    if (!a.starts_early) {
        copy_first_w();
    }
#pragma unroll
    for (int i = 0; i < n_slot - 1; i++) {
        gemm_copy_x<shape>(ring + i * slot_pieces, source, a, i * n_kb);
        copy_async_commit();
    }
    const uint4 *const w = ring + wm * shape::n_mt * 64 + lane;
    const uint4 *const x = ring + shape::n_w + wn * shape::n_nt * 32 + lane;
    float sum[shape::n_mt][shape::n_nt][4] = {};
    float total[shape::n_mt][shape::n_nt][4] = {};
    int slot = 0;
    for (int block = 0; block < a.n_block; block += n_kb) {
        copy_async_wait<n_slot - 2>();
        __syncthreads(); /* all copies of this slot are there; all have read the one filled next */
        uint4 *const next = ring + (slot == 0 ? n_slot - 1 : slot - 1) * slot_pieces;
        gemm_copy_w<shape>(next, source, a, block + (n_slot - 1) * n_kb);
        gemm_copy_x<shape>(next, source, a, block + (n_slot - 1) * n_kb);
        copy_async_commit();
        const int at = slot * slot_pieces;
#pragma unroll
        for (int b = 0; b < n_kb; b++) {
            gemm_multiply<shape, row_major, type>(sum, w + at + b * shape::n_piece,
                                                  x + at + b * shape::n_piece, a.zero);
        }
        if ((block + n_kb) % LINEAR_CHUNK_BLOCKS == 0 || block + n_kb >= a.n_block) {
            gemm_border(total, sum);
        }
        slot = slot + 1 == n_slot ? 0 : slot + 1;
    }
    gemm_store<shape>(
        a, total,
        static_cast<int>(blockIdx.y) * shape::n_output + wm * shape::n_mt * LINEAR_TILE + lane / 4,
        static_cast<int>(blockIdx.x) * shape::n_token + wn * shape::n_nt * 8 + lane % 4 * 2);
}

/* ---- F32 ------------------------------------------------------------------------------------ */

/* A thread computes n_mine outputs times as many tokens, o + 8i and t + 4j, with (o, t) = (lane %
 * 8, lane / 8). With 8 what it reads of shared memory keeps up with its multiply-adds; with 4 it
 * reads twice as much for each, but small products fill twice the multiprocessors, with twice the
 * warps in each. A slot holds one block of 16 k: weights as packed, [tile][4 k4][16 outputs], then
 * x [4 k4][token, two pieces of padding], 16 bytes each. */
template <int n_wm_, int n_wn_, int n_mine_> struct gemm_f32 {
    static constexpr int n_wm = n_wm_, n_wn = n_wn_, n_mine = n_mine_;
    static constexpr int n_thread = n_wm * n_wn * 32;
    static constexpr int n_warp_output = n_mine * 8, n_warp_token = n_mine * 4;
    static constexpr int n_output = n_wm * n_warp_output;
    static constexpr int n_token = n_wn * n_warp_token;
    static constexpr int n_k4 = LINEAR_BLOCK_F32 / 4;
    static constexpr int n_w = n_output * n_k4;  /* pieces */
    static constexpr int x_stride = n_token + 2; /* copies of 4 k4 fall into 32 banks */
    static constexpr int n_piece = n_w + n_k4 * x_stride;
    static constexpr int n_x = n_k4 * n_token; /* without padding */
    static constexpr size_t shared_bytes = GEMM_SLOTS * n_piece * 16;
    static_assert(n_w % n_thread == 0 && n_x % n_thread == 0, "threads copy equal shares");
};

template <typename shape>
__device__ __forceinline__ void gemm_copy_f32(uint4 *slot, const struct linear_args &a, int block)
{
    constexpr int tile_pieces = LINEAR_TILE * shape::n_k4;
#pragma unroll
    for (int i = 0; i < shape::n_w / shape::n_thread; i++) {
        const int piece = i * shape::n_thread + static_cast<int>(threadIdx.x);
        const int wanted =
            static_cast<int>(blockIdx.y) * (shape::n_output / LINEAR_TILE) + piece / tile_pieces;
        const int64_t tile = wanted < a.n_tile ? wanted : a.n_tile - 1;
        copy_async_16(slot + piece, a.w + (tile * a.n_block + block) * LINEAR_TILE_BLOCK_BYTES +
                                        piece % tile_pieces * 16);
    }
#pragma unroll
    for (int i = 0; i < shape::n_x / shape::n_thread; i++) {
        const int piece = i * shape::n_thread + static_cast<int>(threadIdx.x);
        const int tok = static_cast<int>(blockIdx.x) * shape::n_token + piece / shape::n_k4;
        const float *const x = static_cast<const float *>(a.x) +
                               (tok < a.n_tok ? tok : a.n_tok - 1) * a.x_stride +
                               block * LINEAR_BLOCK_F32;
        const int k4 = piece % shape::n_k4;
        copy_async_16(slot + shape::n_w + k4 * shape::x_stride + piece / shape::n_k4, x + k4 * 4);
    }
}

/* sum += the products of a slot. w, x: the lane's first output and token in it. */
template <typename shape>
__device__ __forceinline__ void gemm_multiply_f32(float (&sum)[shape::n_mine][shape::n_mine][1],
                                                  const float4 *w, const float4 *x)
{
    constexpr int n_mine = shape::n_mine;
#pragma unroll
    for (int k4 = 0; k4 < shape::n_k4; k4++) {
        float4 in_w[n_mine];
#pragma unroll
        for (int i = 0; i < n_mine; i++) { /* output 8i: half a tile */
            in_w[i] = w[i / 2 * (LINEAR_TILE * shape::n_k4) + k4 * LINEAR_TILE + i % 2 * 8];
        }
#pragma unroll
        for (int j = 0; j < n_mine; j++) {
            const float4 in_x = x[k4 * shape::x_stride + j * 4];
#pragma unroll
            for (int i = 0; i < n_mine; i++) {
                sum[i][j][0] = fmaf(in_w[i].x, in_x.x, sum[i][j][0]);
                sum[i][j][0] = fmaf(in_w[i].y, in_x.y, sum[i][j][0]);
                sum[i][j][0] = fmaf(in_w[i].z, in_x.z, sum[i][j][0]);
                sum[i][j][0] = fmaf(in_w[i].w, in_x.w, sum[i][j][0]);
            }
        }
    }
}

/* Grid as above. */
template <typename shape>
__global__ void __launch_bounds__(shape::n_thread) gemm_kernel_f32(const struct linear_args a)
{
    DYN_SHARED(uint4, ring); /* [GEMM_SLOTS][n_piece] */
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int wm = static_cast<int>(threadIdx.x) / 32 % shape::n_wm;
    const int wn = static_cast<int>(threadIdx.x) / 32 / shape::n_wm;
    grid_wait();
#pragma unroll
    for (int i = 0; i < GEMM_SLOTS - 1; i++) {
        if (i < a.n_block) {
            gemm_copy_f32<shape>(ring + i * shape::n_piece, a, i);
        }
        copy_async_commit();
    }
    constexpr int n_mine = shape::n_mine;
    const float4 *const w = reinterpret_cast<const float4 *>(ring) +
                            wm * (shape::n_warp_output * shape::n_k4) + lane % 8;
    const float4 *const x =
        reinterpret_cast<const float4 *>(ring) + shape::n_w + wn * shape::n_warp_token + lane / 8;
    float sum[n_mine][n_mine][1] = {};
    float total[n_mine][n_mine][1] = {};
    for (int block = 0; block < a.n_block; block++) {
        copy_async_wait<GEMM_SLOTS - 2>();
        __syncthreads(); /* all copies of this slot are there; all have read the one filled next */
        const int ahead = block + GEMM_SLOTS - 1;
        if (ahead < a.n_block) {
            gemm_copy_f32<shape>(ring + ahead % GEMM_SLOTS * shape::n_piece, a, ahead);
        }
        copy_async_commit();
        const int at = block % GEMM_SLOTS * shape::n_piece;
        gemm_multiply_f32<shape>(sum, w + at, x + at);
        constexpr int n_turn = LINEAR_CHUNK_F32 / LINEAR_BLOCK_F32;
        if (block % n_turn == n_turn - 1 || block == a.n_block - 1) {
            gemm_border(total, sum);
        }
    }
    const int first_out =
        static_cast<int>(blockIdx.y) * shape::n_output + wm * shape::n_warp_output + lane % 8;
    const int first_tok =
        static_cast<int>(blockIdx.x) * shape::n_token + wn * shape::n_warp_token + lane / 8;
#pragma unroll
    for (int i = 0; i < n_mine; i++) {
        const int out = first_out + i * 8;
        const float bias = a.bias == NULL || out >= a.n_out ? 0 : a.bias[out];
#pragma unroll
        for (int j = 0; j < n_mine; j++) {
            const int tok = first_tok + j * 4;
            if (out < a.n_out && tok < a.n_tok) {
                linear_store(a, tok, out, linear_finish(total[i][j][0], bias, a.act));
            }
        }
    }
}

/* ---- choice of the tile --------------------------------------------------------------------- */

template <typename shape>
void gemm_run(struct cuda *cu, const struct linear_args *a, void (*kernel)(struct linear_args))
{
    if (!cuda_shared(cu, kernel, shape::shared_bytes, "linear")) {
        return;
    }
    const dim3 grid(static_cast<unsigned>((a->n_tok + shape::n_token - 1) / shape::n_token),
                    static_cast<unsigned>((a->n_out + shape::n_output - 1) / shape::n_output));
    LAUNCH(kernel, grid, dim3(shape::n_thread), shape::shared_bytes, cuda_queue(cu),
           linear_sliced(a, grid));
}

template <typename shape, enum dtype type>
void gemm_run_of(struct cuda *cu, const struct linear_args *a)
{
    gemm_run<shape>(cu, a,
                    a->is_row_major ? gemm_kernel_bf16<shape, true, type>
                                    : gemm_kernel_bf16<shape, false, type>);
}

template <typename shape> void gemm_run_bf16(struct cuda *cu, const struct linear_args *a)
{
    if (a->is_f16) {
        gemm_run_of<shape, DTYPE_F16>(cu, a);
    } else {
        gemm_run_of<shape, DTYPE_BF16>(cu, a);
    }
}

/* Estimated time of a tile's shape: rounds of blocks over the device, times what a block reads, in
 * rows. */
template <typename shape> int64_t gemm_cost(const struct cuda *cu, const struct linear_args *a)
{
    const int64_t blocks = static_cast<int64_t>((a->n_tok + shape::n_token - 1) / shape::n_token) *
                           ((a->n_out + shape::n_output - 1) / shape::n_output);
    const int64_t rounds = (blocks + cu->n_sm - 1) / cu->n_sm;
    return rounds * (shape::n_token + shape::n_output);
}

/* Likewise: times a tile's work, over its speed. Speeds are relative, from the bytes that a tile
 * reads per multiply-add, also from shared memory. */
template <typename shape>
int64_t gemm_cost_f32(const struct cuda *cu, const struct linear_args *a, int speed)
{
    const int64_t blocks = static_cast<int64_t>((a->n_tok + shape::n_token - 1) / shape::n_token) *
                           ((a->n_out + shape::n_output - 1) / shape::n_output);
    const int64_t rounds = (blocks + cu->n_sm - 1) / cu->n_sm;
    return rounds * (shape::n_token * shape::n_output) * 64 / speed;
}

template <int n> int cheapest(const int64_t (&cost)[n])
{
    int best = 0;
    for (int i = 1; i < n; i++) {
        best = cost[i] < cost[best] ? i : best;
    }
    return best;
}

} // namespace

void gemm(struct cuda *cu, const struct linear_args *args, enum dtype dtype)
{
    using large = gemm_bf16<2, 8, 4, 2, 2, 3>;  /* 128 outputs × 128 tokens */
    using medium = gemm_bf16<2, 4, 4, 2, 2, 4>; /* 128 × 64 */
    using small = gemm_bf16<1, 4, 4, 2, 4, 3>;  /* 64 × 64 */
    using least = gemm_bf16<1, 2, 4, 2, 4, 4>;  /* 64 × 32 */
    using tiny = gemm_bf16<1, 1, 2, 4, 4, 6>;   /* 32 × 32 */
    using large_f32 = gemm_f32<2, 4, 8>;        /* 128 × 128 */
    using small_f32 = gemm_f32<1, 2, 8>;        /* 64 × 64 */
    using least_f32 = gemm_f32<2, 2, 4>;        /* 64 × 32 */
    if (dtype == DTYPE_F32) {
        const int64_t cost[3] = {gemm_cost_f32<large_f32>(cu, args, 64),
                                 gemm_cost_f32<small_f32>(cu, args, 48),
                                 gemm_cost_f32<least_f32>(cu, args, 32)};
        switch (cheapest(cost)) {
        case 0: gemm_run<large_f32>(cu, args, gemm_kernel_f32<large_f32>); break;
        case 1: gemm_run<small_f32>(cu, args, gemm_kernel_f32<small_f32>); break;
        default: gemm_run<least_f32>(cu, args, gemm_kernel_f32<least_f32>); break;
        }
    } else {
        const int64_t cost[5] = {gemm_cost<large>(cu, args), gemm_cost<medium>(cu, args),
                                 gemm_cost<small>(cu, args), gemm_cost<least>(cu, args),
                                 gemm_cost<tiny>(cu, args)};
        switch (cheapest(cost)) {
        case 0: gemm_run_bf16<large>(cu, args); break;
        case 1: gemm_run_bf16<medium>(cu, args); break;
        case 2: gemm_run_bf16<small>(cu, args); break;
        case 3: gemm_run_bf16<least>(cu, args); break;
        default: gemm_run_bf16<tiny>(cu, args); break;
        }
    }
    cuda_check(cu, "linear");
}
