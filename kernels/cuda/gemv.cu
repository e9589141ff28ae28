/* Linear with few rows and BF16 weights, and the choice between it and F32: gemv.cuh says how
 * both work. */
#include "kernels/cuda/gemv.cuh"

namespace
{

/* Weights are the mma's A (16 outputs), rows of x its B (8 tokens). n_half halves of tiles of outputs
 * and n_nt tiles of tokens per block; a slot of the ring holds one block of 32 k of them all, in
 * 512-byte pieces of 16 per lane: [n_half of weights, n_nt of x, or 2·n_nt halves of it in F32]. One half
 * alone, of row-major weights, leaves the other half of A 0. With is_normed the block norms its rows itself,
 * and they lie behind the sums: the ring has none of x. With is_rounded x comes in BF16. */
template <int halves, int n_nt_, bool is_normed_, bool is_rounded_> struct gemv_bf16 {
    static constexpr int n_half = halves;
    static constexpr int n_mt = (n_half + 1) / 2;
    static constexpr int n_nt = n_nt_;
    static constexpr bool is_normed = is_normed_;
    static constexpr bool is_rounded = is_rounded_;
    static constexpr int n_token = n_nt * 8;
    static constexpr int n_output = n_half * 8;
    static constexpr int stride = n_output + 4; /* a fragment's sums fall into 32 banks */
    static constexpr int n_x = is_normed ? 0 : is_rounded ? n_nt : 2 * n_nt; /* pieces */
    static constexpr int n_piece = n_half + n_x;
    static constexpr int value_bytes = is_rounded ? 2 : 4; /* of x */
    static constexpr int n_slot = 32 / n_piece < 3                     ? 3
                                  : 32 / n_piece > LINEAR_CHUNK_BLOCKS ? +LINEAR_CHUNK_BLOCKS
                                                                       : 32 / n_piece;
    static constexpr size_t ring_bytes = n_slot * n_piece * 512;
    static constexpr size_t part_bytes = n_token * stride * sizeof(float);
    static_assert(n_slot <= LINEAR_CHUNK_BLOCKS, "the ring is first filled from one chunk");
};

/* What a lane copies and multiplies. */
template <class shape> struct gemv_lane {
    const unsigned char *w[shape::n_mt]; /* its first 16 bytes of block 0 of each tile */
    const unsigned char *x[shape::n_nt]; /* its first value of block 0 of each tile of tokens */
    int x_bytes[shape::n_nt];            /* of a piece of x: 16, or 0 where there is no row */
};

template <class shape>
__device__ __forceinline__ struct gemv_lane<shape> gemv_lane_of(const struct linear_args &a) {
    const int g = static_cast<int>(threadIdx.x) % 32 / 4;
    const int t = static_cast<int>(threadIdx.x) % 4;
    struct gemv_lane<shape> lane;
#pragma unroll
    for (int i = 0; i < shape::n_mt; i++) {
        const int half = static_cast<int>(blockIdx.x) * shape::n_half + 2 * i;
        const int tile = half / 2;
        lane.w[i] = a.w + (tile < a.n_tile ? tile : a.n_tile - 1) * a.map.tile +
                    (shape::n_half == 1 ? half % 2 * a.map.half : 0) + g * a.map.row + t * 16;
    }
#pragma unroll
    for (int j = 0; j < shape::n_nt; j++) {
        const int tok = static_cast<int>(blockIdx.y) * shape::n_token + j * 8 + g;
        const bool is_row = tok < a.n_tok;
        lane.x[j] = static_cast<const unsigned char *>(a.x) +
                    ((is_row ? tok : 0) * a.x_stride + t * 8) * shape::value_bytes;
        lane.x_bytes[j] = is_row ? 16 : 0;
    }
    return lane;
}

/* Starts copying block's share into slot: a lane copies what it will read. left: values of a row
 * from the block's first to the end. */
template <class shape, int share = GEMV_BOTH>
__device__ __forceinline__ void gemv_copy(uint4 *slot, const struct gemv_lane<shape> &lane,
                                          int block, int block_bytes, int half_bytes, int left)
{
#pragma unroll
    for (int i = 0; i < shape::n_mt && (share & GEMV_W) != 0; i++) {
        const unsigned char *const w = lane.w[i] + static_cast<int64_t>(block) * block_bytes;
        copy_async_16(slot + (2 * i) * 32, w);
        if constexpr (shape::n_half > 1) {
            copy_async_16(slot + (2 * i + 1) * 32, w + half_bytes);
        }
    }
    uint4 *const x_slot = slot + shape::n_half * 32;
#pragma unroll
    for (int j = 0; j < shape::n_nt && !shape::is_normed && (share & GEMV_X) != 0; j++) {
        const unsigned char *const x =
            lane.x[j] + static_cast<int64_t>(block) * (LINEAR_BLOCK_BF16 * shape::value_bytes);
        if constexpr (shape::is_rounded) {
            copy_async_16(x_slot + j * 32, x, lane.x_bytes[j]);
        } else if (left >= LINEAR_BLOCK_BF16) {
            copy_async_16(x_slot + (2 * j) * 32, x, lane.x_bytes[j]);
            copy_async_16(x_slot + (2 * j + 1) * 32, x + 16, lane.x_bytes[j]);
        } else {
            const int mine = left - static_cast<int>(threadIdx.x) % 4 * 8;
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int n = lane.x_bytes[j] == 0 ? 0 : gemv_piece_bytes(mine - 4 * h);
                copy_async_16(x_slot + (2 * j + h) * 32, n > 0 ? x + 16 * h : lane.x[j], n);
            }
        }
    }
}

/* Fills all slots but one from block on, which begins a chunk; groups end with x. The usual case
 * spends few instructions between the copies: until the last of them is under way, memory waits. */
template <class shape, int share>
__device__ __forceinline__ void gemv_fill(uint4 *ring, const struct gemv_lane<shape> &lane,
                                          const struct linear_args &a, int block)
{
    if (!a.is_row_major && (block + shape::n_slot - 1) * LINEAR_BLOCK_BF16 <= a.n_in) {
        struct gemv_lane<shape> from = lane;
#pragma unroll
        for (int i = 0; i < shape::n_mt; i++) {
            from.w[i] += static_cast<int64_t>(block) * LINEAR_TILE_BLOCK_BYTES;
        }
#pragma unroll
        for (int j = 0; j < shape::n_nt; j++) {
            from.x[j] += static_cast<int64_t>(block) * (LINEAR_BLOCK_BF16 * shape::value_bytes);
        }
#pragma unroll
        for (int i = 0; i < shape::n_slot - 1; i++) {
            gemv_copy<shape, share>(ring + i * shape::n_piece * 32, from, i,
                                    LINEAR_TILE_BLOCK_BYTES, LINEAR_TILE_BLOCK_BYTES / 2,
                                    LINEAR_BLOCK_BF16);
            if constexpr ((share & GEMV_X) != 0) {
                copy_async_commit();
            }
        }
        return;
    }
    for (int i = 0; i < shape::n_slot - 1; i++) {
        if (block + i < a.n_block) {
            gemv_copy<shape, share>(ring + i * shape::n_piece * 32, lane, block + i, a.map.block,
                                    a.map.half, a.n_in - (block + i) * LINEAR_BLOCK_BF16);
        }
        if constexpr ((share & GEMV_X) != 0) {
            copy_async_commit(); /* past the last block, too: waits count groups */
        }
    }
}

/* A lane's operands of both instructions of a block. */
template <class shape> struct gemv_operands {
    uint32_t w[2][shape::n_mt][4], x[2][shape::n_nt][2];
};

template <class shape>
__device__ __forceinline__ void gemv_read_w(struct gemv_operands<shape> &in, const uint4 *slot,
                                            bool is_row_major)
{
    if constexpr (shape::n_half == 1) {
        const uint4 p = slot[0];
        in.w[0][0][0] = p.x, in.w[0][0][1] = 0, in.w[0][0][2] = p.y, in.w[0][0][3] = 0;
        in.w[1][0][0] = p.z, in.w[1][0][1] = 0, in.w[1][0][2] = p.w, in.w[1][0][3] = 0;
    } else {
#pragma unroll
        for (int i = 0; i < shape::n_mt; i++) {
            const uint4 p = slot[(2 * i) * 32];
            const uint4 q = slot[(2 * i + 1) * 32];
            in.w[0][i][0] = p.x, in.w[0][i][1] = is_row_major ? q.x : p.y;
            in.w[0][i][2] = is_row_major ? p.y : p.z, in.w[0][i][3] = is_row_major ? q.y : p.w;
            in.w[1][i][0] = is_row_major ? p.z : q.x, in.w[1][i][1] = is_row_major ? q.z : q.y;
            in.w[1][i][2] = is_row_major ? p.w : q.z, in.w[1][i][3] = q.w;
        }
    }
}

/* x_slot: of the ring; normed: the lane's first value of the block in its row, or NULL where there is
 * no row. */
template <class shape, enum dtype type>
__device__ __forceinline__ void gemv_read_x(struct gemv_operands<shape> &in, const uint4 *x_slot,
                                            const float *normed)
{
#pragma unroll
    for (int j = 0; j < shape::n_nt; j++) {
        if constexpr (shape::is_rounded) {
            const uint4 v = x_slot[j * 32];
            in.x[0][j][0] = v.x, in.x[0][j][1] = v.y;
            in.x[1][j][0] = v.z, in.x[1][j][1] = v.w;
        } else {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                uint4 v = make_uint4(0, 0, 0, 0);
                if (!shape::is_normed) {
                    v = x_slot[(2 * j + h) * 32];
                } else if (normed != NULL) {
                    v = reinterpret_cast<const uint4 *>(normed)[h];
                }
                in.x[h][j][0] = operand_pair<type>(__uint_as_float(v.x), __uint_as_float(v.y));
                in.x[h][j][1] = operand_pair<type>(__uint_as_float(v.z), __uint_as_float(v.w));
            }
        }
    }
}

template <class shape, enum dtype type>
__device__ __forceinline__ void gemv_multiply(float (&sum)[shape::n_mt][shape::n_nt][4],
                                              const struct gemv_operands<shape> &in)
{
#pragma unroll
    for (int h = 0; h < 2; h++) {
#pragma unroll
        for (int i = 0; i < shape::n_mt; i++) {
#pragma unroll
            for (int j = 0; j < shape::n_nt; j++) {
                operand_mma<type>(sum[i][j], in.w[h][i], in.x[h][j]);
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

/* Grid (halves of tiles of outputs / n_half, tiles of tokens / n_nt), one warp per chunk up to
 * GEMV_WARPS_MAX. */
template <class shape, enum dtype type>
__global__ void __launch_bounds__(32 * GEMV_WARPS_MAX, shape::is_normed ? 2 : 0)
    gemv_kernel_bf16(const struct linear_args a)
{
    DYN_SHARED(unsigned char, shared);
    const int n_warp = static_cast<int>(blockDim.x) / 32;
    const int warp = static_cast<int>(threadIdx.x) / 32;
    uint4 *const ring = reinterpret_cast<uint4 *>(shared + warp * shape::ring_bytes) +
                        static_cast<int>(threadIdx.x) % 32;
    /* [n_warp + 1][n_token][stride] */
    float *const part = reinterpret_cast<float *>(shared + n_warp * shape::ring_bytes);
    const struct gemv_lane<shape> lane = gemv_lane_of<shape>(a);
    const int first_block = warp * LINEAR_CHUNK_BLOCKS;
    if (a.starts_early) {
        gemv_fill<shape, GEMV_W>(ring, lane, a, first_block);
    }
    const auto fill = [&] {
        if (a.starts_early) {
            gemv_fill<shape, GEMV_X>(ring, lane, a, first_block);
        } else {
            gemv_fill<shape, GEMV_BOTH>(ring, lane, a, first_block);
        }
    };
    const float *normed = NULL; /* the lane's first value of its row */
    if constexpr (shape::is_normed) {
        gemv_norm_prefetch(a);
    }
    grid_wait();
    if constexpr (shape::is_normed) {
        float *const rows = part + (n_warp + 1) * shape::n_token * shape::stride;
        const int tok = static_cast<int>(threadIdx.x) % 32 / 4;
        gemv_norm(rows, a, a.n_block * LINEAR_BLOCK_BF16, fill);
        normed = tok < a.n_tok
                     ? rows + tok * gemv_row_floats(a.n_in) + static_cast<int>(threadIdx.x) % 4 * 8
                     : NULL;
    } else {
        fill();
    }
    const struct gemv_end end = gemv_end_of(a, shape::n_token, shape::n_output);
    int next = warp * LINEAR_CHUNK_BLOCKS + shape::n_slot - 1; /* block to copy next */
    int to = shape::n_slot - 1;                                /* slot for it */
    int from = 0;                                              /* slot to read next */
    const auto read_next = [&](struct gemv_operands<shape> &in, int block) {
        copy_async_wait<shape::n_slot - 2>();
        __syncwarp(); /* the slot that is filled now was read in the turn before */
        if (next < a.n_block) {
            gemv_copy<shape>(ring + to * shape::n_piece * 32, lane, next, a.map.block, a.map.half,
                             a.n_in - next * LINEAR_BLOCK_BF16);
            next += next % LINEAR_CHUNK_BLOCKS == LINEAR_CHUNK_BLOCKS - 1
                        ? (n_warp - 1) * LINEAR_CHUNK_BLOCKS + 1
                        : 1;
        }
        copy_async_commit();
        const uint4 *const slot = ring + from * shape::n_piece * 32;
        gemv_read_w<shape>(in, slot, a.is_row_major);
        gemv_read_x<shape, type>(in, slot + shape::n_half * 32,
                                 normed != NULL ? normed + gemv_row_place(block * LINEAR_BLOCK_BF16)
                                                : NULL);
        to = from;
        from = from == shape::n_slot - 1 ? 0 : from + 1;
    };
    const int n_chunk = (a.n_block + LINEAR_CHUNK_BLOCKS - 1) / LINEAR_CHUNK_BLOCKS;
    for (int first = 0; first < n_chunk; first += n_warp) {
        const int block = (first + warp) * LINEAR_CHUNK_BLOCKS;
        const int left_blocks = a.n_block - block;
        if (left_blocks > 0) {
            float sum[shape::n_mt][shape::n_nt][4] = {};
            struct gemv_operands<shape> now;
            read_next(now, block);
            const int n_turn =
                left_blocks < LINEAR_CHUNK_BLOCKS ? left_blocks : +LINEAR_CHUNK_BLOCKS;
            for (int b = 1; b < n_turn; b++) { /* reads one block ahead */
                struct gemv_operands<shape> ahead;
                read_next(ahead, block + b);
                gemv_multiply<shape, type>(sum, now);
                now = ahead;
            }
            gemv_multiply<shape, type>(sum, now);
            gemv_leave<shape>(part + warp * shape::n_token * shape::stride, sum);
        }
        __syncthreads();
        const int left = n_chunk - first;
        gemv_reduce<shape::n_token, shape::stride>(a, end, part, left < n_warp ? left : n_warp,
                                                   n_warp, first == 0, left <= n_warp);
        __syncthreads(); /* the next round writes part */
    }
}

template <class shape, enum dtype type>
void gemv_run_of(struct cuda *cu, const struct linear_args *a)
{
    const int n_chunk = (a->n_block + LINEAR_CHUNK_BLOCKS - 1) / LINEAR_CHUNK_BLOCKS;
    const int unit = shape::n_mt == 4 ? 2 : 1; /* 32 threads each, a multiple of the outputs */
    const size_t row_bytes = shape::is_normed ? gemv_row_bytes(a, a->n_tok) : 0;
    const int n_warp =
        gemv_warps(cu, n_chunk, unit, shape::ring_bytes, shape::part_bytes, row_bytes);
    const size_t shared =
        n_warp * (shape::ring_bytes + shape::part_bytes) + shape::part_bytes + row_bytes;
    if (!cuda_shared(cu, gemv_kernel_bf16<shape, type>, shared, "linear")) {
        return;
    }
    const dim3 grid(static_cast<unsigned>((a->n_tile * 2 + shape::n_half - 1) / shape::n_half),
                    static_cast<unsigned>((a->n_tok + shape::n_token - 1) / shape::n_token));
    LAUNCH((gemv_kernel_bf16<shape, type>), grid, dim3(static_cast<unsigned>(n_warp * 32)), shared,
           cuda_queue(cu), *a);
}

template <class shape> void gemv_bf16_run(struct cuda *cu, const struct linear_args *a)
{
    if (a->is_f16) {
        gemv_run_of<shape, DTYPE_F16>(cu, a);
    } else {
        gemv_run_of<shape, DTYPE_BF16>(cu, a);
    }
}

/* More tiles of outputs per block read x less often, fewer leave no multiprocessor idle: five of
 * eight at work with twice the tiles wait less for the second-level cache than all with one. A token or
 * two are little to read again, until blocks are so many that each costs more than its bytes. Where
 * blocks of one tile would leave half of the multiprocessors idle, blocks of half a tile do not. By
 * count of bytes and blocks, not measured yet. */
template <int n_nt, bool is_normed, bool is_rounded>
void gemv_bf16_tiles(struct cuda *cu, const struct linear_args *a)
{
    const int groups = (a->n_tok + n_nt * 8 - 1) / (n_nt * 8);
    const int enough = cu->n_sm * 5 / 8;
    if (n_nt < 4 && a->n_tile / 4 * groups >= enough * 3) {
        gemv_bf16_run<gemv_bf16<(n_nt < 4 ? 8 : 4), n_nt, is_normed, is_rounded>>(cu, a);
    } else if (a->n_tok > 2 && a->n_tile / 2 * groups >= enough) {
        gemv_bf16_run<gemv_bf16<4, n_nt, is_normed, is_rounded>>(cu, a);
    } else if (n_nt == 1 && a->is_row_major && a->n_tile * 2 * groups <= cu->n_sm) {
        gemv_bf16_run<gemv_bf16<(n_nt == 1 ? 1 : 2), n_nt, is_normed, is_rounded>>(cu, a);
    } else {
        gemv_bf16_run<gemv_bf16<2, n_nt, is_normed, is_rounded>>(cu, a);
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
            gemv_bf16_tiles<1, true, false>(cu, args);
        } else if (!args->x_is_rounded) {
            CHECK(args->n_tok <= GEMV_F32_ROWS);
            gemv_bf16_tiles<1, false, false>(cu, args);
        } else if (n_nt == 1) {
            gemv_bf16_tiles<1, false, true>(cu, args);
        } else if (n_nt == 2) {
            gemv_bf16_tiles<2, false, true>(cu, args);
        } else {
            gemv_bf16_tiles<4, false, true>(cu, args);
        }
    } else {
        gemv_run_f32(cu, args);
    }
    cuda_check(cu, "linear");
}
