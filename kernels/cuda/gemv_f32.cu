/* Linear with few rows and F32 weights: linear.cuh defines the sum.
 *
 * A block computes a tile of 16 outputs, or half of one, for a few rows. Its warps share the chunks
 * of k, four at a time to each; their sums are added in shared memory in ascending order. No two
 * warps want the same weight, so each streams its own through a ring of slots in shared memory, by
 * copy_async, which runs on across chunks and rounds. Where kernels overlap, its first filling is
 * cut in two: weights are under way while the kernel before still runs, x follows once it is
 * complete; the first wait is then for the weights of all slots.
 *
 * One or two rows that are yet to be normed, of not too many outputs, each block norms itself, as
 * gemv_few.cuh's do: x then lies in shared memory, and the ring holds weights alone.
 *
 * Bytes: weights once from memory (once more from the second-level cache per further group of
 * tokens), x once per block from that cache. Operations: 2·n_tok·n_in·n_out. Bound: device memory;
 * of a layer's matrix the latencies. */
#include "kernels/cuda/linear.cuh"

namespace
{

/* ---- the end of a round of chunks ------------------------------------------------------------ */

/* The outputs and tokens of a block that a thread ends. Blocks have a multiple of n_output threads.
 */
struct gemv_end {
    int out, col;         /* the thread's output, and that within the block */
    int first_tok, first; /* the block's first token, the thread's first of the block's */
    int step;
    float bias; /* read early: nothing hides its way at the end */
};

__device__ __forceinline__ struct gemv_end gemv_end_of(const struct linear_args &a, int n_token,
                                                       int n_output)
{
    struct gemv_end end;
    end.col = static_cast<int>(threadIdx.x) % n_output;
    end.out = static_cast<int>(blockIdx.x) * n_output + end.col;
    end.first_tok = static_cast<int>(blockIdx.y) * n_token;
    end.first = static_cast<int>(threadIdx.x) / n_output;
    end.step = static_cast<int>(blockDim.x) / n_output;
    end.bias = a.bias != NULL && end.out < a.n_out ? a.bias[end.out] : 0;
    return end;
}

/* Adds the n_part sums that the warps left in part, in order, to what earlier rounds left behind
 * them, and writes y after the last round.
 *   part [n_part_max + 1][n_token][stride], of a stride the first n_output count */
template <int n_token, int stride>
__device__ __forceinline__ void gemv_reduce(const struct linear_args &a, const struct gemv_end &end,
                                            float *part, int n_part, int n_part_max, bool is_first,
                                            bool is_last)
{
    for (int tok = end.first; tok < n_token && end.first_tok + tok < a.n_tok; tok += end.step) {
        float *const mine = part + tok * stride + end.col;
        float *const kept = mine + n_part_max * n_token * stride;
        float total = is_first ? 0 : *kept;
#pragma unroll 4
        for (int p = 0; p < n_part; p++) {
            total += mine[p * n_token * stride];
        }
        if (!is_last) {
            *kept = total;
        } else if (end.out < a.n_out) {
            linear_store(a, end.first_tok + tok, end.out, linear_finish(total, end.bias, a.act));
        }
    }
}

/* What of a slot is copied. */
enum gemv_share { GEMV_W = 1, GEMV_X = 2, GEMV_BOTH = GEMV_W | GEMV_X };

/* Bytes of a 16-byte piece of x that lie inside its row, n values left of it. */
__device__ __forceinline__ int gemv_piece_bytes(int n)
{
    return n >= 4 ? 16 : n > 0 ? n * 4 : 0;
}

/* As many warps as there is work for and as fit into shared memory, in multiples of unit. */
int gemv_warps(const struct cuda *cu, int n_need, int unit, size_t ring_bytes, size_t part_bytes)
{
    const int wanted = n_need < GEMV_WARPS_MAX ? n_need : +GEMV_WARPS_MAX;
    int n_warp = (wanted + unit - 1) / unit * unit;
    while (n_warp > unit && n_warp * (ring_bytes + part_bytes) + part_bytes > cu->shared_max) {
        n_warp -= unit;
    }
    return n_warp;
}

/* Lane (o, c) = (lane % 8, lane / 8) computes outputs o and, with both halves of a tile, o+8 over
 * chunk c of the warp's four. A slot of the ring holds one block of 16 k of each of the four
 * chunks: weights [4 k4][n_half][32 lanes], then x [n_token][4 chunks][4 k4], 16 bytes each, but
 * where the block norms its rows. */
template <int n_token_, int halves, bool is_row_major_, bool is_normed_ = false> struct gemv_f32 {
    static constexpr int n_token = n_token_;
    static constexpr int n_half = halves;
    static constexpr int n_output = n_half * 8;
    static constexpr bool is_row_major = is_row_major_;
    static constexpr bool is_normed = is_normed_;
    static constexpr int n_lane_chunk = 4;
    static constexpr int n_k4 = LINEAR_BLOCK_F32 / 4;                  /* of a block */
    static constexpr int n_turn = LINEAR_CHUNK_F32 / LINEAR_BLOCK_F32; /* blocks of a chunk */
    static constexpr int n_w = n_k4 * n_half * 32;
    static constexpr int n_piece = n_w + (is_normed ? 0 : n_token * n_lane_chunk * n_k4);
    static constexpr int n_slot = n_token > 4 ? 3 : 4;
    static constexpr size_t ring_bytes = n_slot * n_piece * 16;
    static constexpr size_t part_bytes = n_lane_chunk * n_token * n_output * sizeof(float);
};

/* Which piece of row-major weights a lane copies for its warp, of 8 outputs times the 4 pieces of a
 * block: four lanes an output, two by two, so that each quarter of a warp reads sectors of 32 bytes
 * whole, and at most two of its lanes use the same bank of shared memory. */
struct gemv_transposed {
    int out, k4;
};

__device__ __forceinline__ struct gemv_transposed gemv_transposed_of(int lane)
{
    return {lane / 2 % 8, lane / 16 * 2 + lane % 2};
}

/* What a lane copies. */
template <class shape> struct gemv_lane_f32 {
    static constexpr int n_x = shape::is_normed ? 0 : (shape::n_token * 16 + 31) / 32;
    const unsigned char *w; /* its piece of the first block: that of its own chunk, if packed */
    /* Its pieces of x, [n_token][4 chunks][4 k4], in the first block, and values from there to the
     * row's end; 0 where there is no row. */
    const float *x[n_x > 0 ? n_x : 1];
    int n_in[n_x > 0 ? n_x : 1];
};

template <class shape>
__device__ __forceinline__ struct gemv_lane_f32<shape>
gemv_lane_f32_of(const struct linear_args &a) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    struct gemv_lane_f32<shape> mine;
    const int half = static_cast<int>(blockIdx.x) * shape::n_half;
    const unsigned char *const w = a.w + half / 2 * a.map.tile + half % 2 * a.map.half;
    if constexpr (shape::is_row_major) {
        const struct gemv_transposed transposed = gemv_transposed_of(lane);
        mine.w = w + transposed.out * static_cast<int64_t>(a.map.row) + transposed.k4 * a.map.piece;
    } else {
        mine.w = w + lane / 8 * shape::n_turn * LINEAR_TILE_BLOCK_BYTES + lane % 8 * 16;
    }
#pragma unroll
    for (int i = 0; i < gemv_lane_f32<shape>::n_x; i++) {
        const int piece = i * 32 + lane;
        const int tok = static_cast<int>(blockIdx.y) * shape::n_token + piece / 16;
        const bool is_row = piece < shape::n_token * 16 && tok < a.n_tok;
        const int k = piece / 4 % 4 * LINEAR_CHUNK_F32 + piece % 4 * 4;
        mine.x[i] = static_cast<const float *>(a.x) + (is_row ? tok : 0) * a.x_stride + k;
        mine.n_in[i] = is_row ? a.n_in - k : 0;
    }
    return mine;
}

/* Starts copying row-major weights into the places of packed ones: see gemv_copy_f32. */
template <class shape>
__device__ __forceinline__ void gemv_copy_transposed(uint4 *slot, const unsigned char *w,
                                                     const struct linear_args &a, int block)
{
    const struct gemv_transposed transposed =
        gemv_transposed_of(static_cast<int>(threadIdx.x) % 32);
    uint4 *const to = slot + transposed.k4 * (shape::n_half * 32) + transposed.out;
#pragma unroll
    for (int c = 0; c < shape::n_lane_chunk; c++) {
        const int at = block + c * shape::n_turn;
        if (at < a.n_block) {
            const unsigned char *const from = w + static_cast<int64_t>(at) * a.map.block;
            copy_async_16(to + c * 8, from);
            if constexpr (shape::n_half > 1) {
                copy_async_16(to + c * 8 + 32, from + a.map.half);
            }
        }
    }
}

/* Starts copying the share of block (of the warp's first chunk, and those as far into the other
 * three). */
template <class shape, int share = GEMV_BOTH>
__device__ __forceinline__ void gemv_copy_f32(uint4 *slot, const struct gemv_lane_f32<shape> &mine,
                                              const struct linear_args &a, int block)
{
    const int lane = static_cast<int>(threadIdx.x) % 32;
    if constexpr ((share & GEMV_W) == 0) {
    } else if constexpr (shape::is_row_major) {
        gemv_copy_transposed<shape>(slot, mine.w, a, block);
    } else if (block + lane / 8 * shape::n_turn < a.n_block) {
        const unsigned char *const w =
            mine.w + static_cast<int64_t>(block) * LINEAR_TILE_BLOCK_BYTES;
#pragma unroll
        for (int i = 0; i < shape::n_k4 * shape::n_half;
             i++) { /* 8 outputs of a k4 are 128 bytes */
            copy_async_16(slot + i * 32 + lane, w + i * (256 / shape::n_half));
        }
    }
    const int k = block * LINEAR_BLOCK_F32;
#pragma unroll
    for (int i = 0; i < gemv_lane_f32<shape>::n_x && (share & GEMV_X) != 0; i++) {
        const int n = gemv_piece_bytes(mine.n_in[i] - k);
        if (shape::n_token % 2 == 0 ||
            lane < 16) { /* an odd number of tokens leaves half a warp free */
            copy_async_16(slot + shape::n_w + i * 32 + lane,
                          n > 0 ? mine.x[i] + k : static_cast<const float *>(a.x), n);
        }
    }
}

/* Fills all slots but one from block on, which begins a chunk; groups end with x. */
template <class shape, int share>
__device__ __forceinline__ void gemv_fill_f32(uint4 *ring, const struct gemv_lane_f32<shape> &mine,
                                              const struct linear_args &a, int block)
{
    static_assert(shape::n_slot <= shape::n_turn, "the ring is first filled from one chunk");
#pragma unroll
    for (int i = 0; i < shape::n_slot - 1; i++) {
        if (block + i < a.n_block) {
            gemv_copy_f32<shape, share>(ring + i * shape::n_piece, mine, a, block + i);
        }
        if constexpr ((share & GEMV_X) != 0) {
            copy_async_commit(); /* past the last block, too: waits count groups */
        }
    }
}

/* sum += the products of a slot: [n_half outputs][n_token], x the lane's chunk's 16 k of the first
 * token, x_stride pieces from those of the next. */
template <class shape>
__device__ __forceinline__ void gemv_multiply_f32(float (&sum)[shape::n_half][shape::n_token],
                                                  const uint4 *slot, const float4 *x, int x_stride)
{
    constexpr int n_token = shape::n_token;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const float4 *const w = reinterpret_cast<const float4 *>(slot) + lane;
#pragma unroll
    for (int k4 = 0; k4 < shape::n_k4; k4++) {
        float4 w_k[shape::n_half];
#pragma unroll
        for (int h = 0; h < shape::n_half; h++) {
            w_k[h] = w[(k4 * shape::n_half + h) * 32];
        }
#pragma unroll
        for (int j = 0; j < n_token; j++) {
            const float4 x_k = x[j * x_stride + k4];
#pragma unroll
            for (int h = 0; h < shape::n_half; h++) {
                sum[h][j] = fmaf(w_k[h].x, x_k.x, sum[h][j]);
                sum[h][j] = fmaf(w_k[h].y, x_k.y, sum[h][j]);
                sum[h][j] = fmaf(w_k[h].z, x_k.z, sum[h][j]);
                sum[h][j] = fmaf(w_k[h].w, x_k.w, sum[h][j]);
            }
        }
    }
}

/* ---- rows that are yet to be normed ---------------------------------------------------------- */

/* Columns of a warp's four chunks are two sweeps of a norm's warp (norm.cuh). A thread leaves its
 * groups of what the norm is of in shared memory; a warp sums a row as norm.cu does (of a single
 * one every warp: a barrier less); then the thread norms its own groups, to the bits of norm.cu.
 * Normed rows have a piece between chunks, so that four of them are read from different banks. */
constexpr int NORMED_SWEEPS = 2;
constexpr int NORMED_CHUNK = +LINEAR_CHUNK_F32 / +GROUP + 1; /* pieces of a normed row's chunk */

/* Shared memory of it: what is normed [n_token][n_float], {mean, inverse} [n_token], normed
 * [n_token][n_piece]. */
struct gemv_normed {
    float *row;
    float2 *stats;
    float4 *normed;
    int n_float, n_piece; /* of a row */
};

__host__ __device__ __forceinline__ size_t gemv_normed_bytes(int n_token, int n_warp)
{
    const size_t n_chunk = static_cast<size_t>(n_warp) * 4;
    return static_cast<size_t>(n_token) *
           (n_chunk * (LINEAR_CHUNK_F32 * sizeof(float) + NORMED_CHUNK * sizeof(float4)) +
            sizeof(float4));
}

__device__ __forceinline__ struct gemv_normed gemv_normed_at(unsigned char *at, int n_token)
{
    const int n_chunk = static_cast<int>(blockDim.x) / 32 * 4;
    const int n_float = n_chunk * LINEAR_CHUNK_F32;
    float *const row = reinterpret_cast<float *>(at);
    float4 *const stats = reinterpret_cast<float4 *>(row + n_token * n_float);
    return {row, reinterpret_cast<float2 *>(stats), stats + n_token, n_float,
            n_chunk * NORMED_CHUNK};
}

/* The thread's column of a sweep. */
__device__ __forceinline__ int gemv_column(int sweep)
{
    const int warp = static_cast<int>(threadIdx.x) / 32;
    return (warp * NORMED_SWEEPS + sweep) * NORM_COLS + static_cast<int>(threadIdx.x) % 32 * GROUP;
}

/* The thread's groups of gamma and beta. */
struct gemv_factors {
    float4 gamma[NORMED_SWEEPS], beta[NORMED_SWEEPS];
};

__device__ __forceinline__ struct gemv_factors gemv_factors_of(const struct norm_args &norm)
{
    struct gemv_factors f = {};
#pragma unroll
    for (int i = 0; i < NORMED_SWEEPS; i++) {
        const int c = gemv_column(i);
        if (c < norm.d) {
            f.gamma[i] = *reinterpret_cast<const float4 *>(norm.gamma + c);
            f.beta[i] = *reinterpret_cast<const float4 *>(norm.beta + c);
        }
    }
    return f;
}

/* In shared memory what is normed of all rows, the thread's groups of it: all are asked for before
 * the first is used. */
template <int n_token>
__device__ __forceinline__ void gemv_norm_load(const struct gemv_normed &s,
                                               const struct norm_args &norm)
{
    int column[NORMED_SWEEPS];
    float4 v[n_token][NORMED_SWEEPS];
    float4 r[n_token][NORMED_SWEEPS] = {};
#pragma unroll
    for (int i = 0; i < NORMED_SWEEPS; i++) {
        column[i] = min(gemv_column(i), norm.d - GROUP);
    }
#pragma unroll
    for (int tok = 0; tok < n_token; tok++) {
        norm_operands(v[tok], r[tok], norm, tok, column);
    }
#pragma unroll
    for (int tok = 0; tok < n_token; tok++) {
#pragma unroll
        for (int i = 0; i < NORMED_SWEEPS; i++) {
            if (gemv_column(i) < norm.d) {
                *reinterpret_cast<float4 *>(s.row + tok * s.n_float + column[i]) =
                    norm.r != NULL ? group_add(v[tok][i], r[tok][i]) : v[tok][i];
            }
        }
    }
}

/* Norms the n_token rows, by the whole block. The first block writes them, too, to what no other
 * block reads. A warp multiplies by what it has normed itself. */
template <int n_token>
__device__ __forceinline__ void gemv_norm(const struct gemv_normed &s, const struct norm_args &norm,
                                          const struct gemv_factors &factors)
{
    const int lane = static_cast<int>(threadIdx.x) % 32;
    gemv_norm_load<n_token>(s, norm);
    __syncthreads();
    float2 stats = {0, 0};
    if constexpr (n_token == 1) {
        stats = norm_sum(s.row, norm.d, norm.eps, lane);
    } else {
        const int n_warp = static_cast<int>(blockDim.x) / 32;
        for (int tok = static_cast<int>(threadIdx.x) / 32; tok < n_token; tok += n_warp) {
            const float2 own = norm_sum(s.row + tok * s.n_float, norm.d, norm.eps, lane);
            if (lane == 0) {
                s.stats[tok] = own;
            }
        }
        __syncthreads();
    }
#pragma unroll
    for (int tok = 0; tok < n_token; tok++) {
        stats = n_token == 1 ? stats : s.stats[tok];
#pragma unroll
        for (int i = 0; i < NORMED_SWEEPS; i++) {
            const int c = gemv_column(i);
            float4 out = {0, 0, 0, 0};
            if (c < norm.d) {
                out = norm_output(*reinterpret_cast<const float4 *>(s.row + tok * s.n_float + c),
                                  stats.x, stats.y, factors.gamma[i], factors.beta[i]);
                if (blockIdx.x == 0) {
                    *reinterpret_cast<float4 *>(norm.y + tok * norm.y_stride + c) = out;
                }
            }
            s.normed[tok * s.n_piece + c / LINEAR_CHUNK_F32 * NORMED_CHUNK +
                     c % LINEAR_CHUNK_F32 / GROUP] = out;
        }
    }
    __syncwarp();
}

/* ---- the kernel ------------------------------------------------------------------------------ */

/* Grid (halves of tiles of outputs / n_half, tokens / n_token), one warp per four chunks up to
 * GEMV_WARPS_MAX. */
template <class shape>
__global__ void __launch_bounds__(32 * GEMV_WARPS_MAX) gemv_kernel_f32(const struct linear_args a)
{
    constexpr int n_token = shape::n_token;
    DYN_SHARED(unsigned char, shared);
    const int n_warp = static_cast<int>(blockDim.x) / 32;
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    uint4 *const ring = reinterpret_cast<uint4 *>(shared + warp * shape::ring_bytes);
    /* [n_warp·4 + 4][n_token][n_output], of the last four one is used */
    float *const part = reinterpret_cast<float *>(shared + n_warp * shape::ring_bytes);
    const int n_part = n_warp * shape::n_lane_chunk;
    const int n_chunk = (a.n_block + shape::n_turn - 1) / shape::n_turn;
    const struct gemv_lane_f32<shape> copied = gemv_lane_f32_of<shape>(a);
    const int block = warp * shape::n_lane_chunk * shape::n_turn;
    if (a.starts_early) {
        gemv_fill_f32<shape, GEMV_W>(ring, copied, a, block);
    }
    linear_ask_next(a);
    struct gemv_factors factors;
    if constexpr (shape::is_normed) {
        factors = gemv_factors_of(a.norm);
    }
    grid_wait();
    if (a.starts_early) {
        gemv_fill_f32<shape, GEMV_X>(ring, copied, a, block);
    } else {
        gemv_fill_f32<shape, GEMV_BOTH>(ring, copied, a, block);
    }
    const struct gemv_end end = gemv_end_of(a, n_token, shape::n_output);
    const struct gemv_normed normed =
        gemv_normed_at(reinterpret_cast<unsigned char *>(part + (n_part + shape::n_lane_chunk) *
                                                                    n_token * shape::n_output),
                       n_token);
    if constexpr (shape::is_normed) {
        gemv_norm<n_token>(normed, a.norm, factors);
    }
    int next = block + shape::n_slot - 1; /* block to copy next, its slot */
    int to = shape::n_slot - 1;
    const auto copy_next = [&]() {
        if (next < a.n_block) {
            gemv_copy_f32<shape>(ring + to * shape::n_piece, copied, a, next);
        }
        next += next % shape::n_turn == shape::n_turn - 1 ? (n_part - 1) * shape::n_turn + 1 : 1;
        copy_async_commit();
        to = to == shape::n_slot - 1 ? 0 : to + 1;
    };
    int from = 0;
    for (int first = 0; first < n_chunk; first += n_part) {
        const int chunk = first + warp * shape::n_lane_chunk; /* the first of the warp's four */
        if (chunk < n_chunk) {
            const int mine = chunk + lane / 8;
            float sum[shape::n_half][n_token] = {};
            for (int i = 0; i < shape::n_turn; i++) {
                copy_async_wait<shape::n_slot - 2>();
                __syncwarp(); /* copies of other lanes; and who read the slot that is filled now */
                copy_next();
                if (mine * shape::n_turn + i < a.n_block) {
                    const uint4 *const slot = ring + from * shape::n_piece;
                    const float4 *const x = reinterpret_cast<const float4 *>(slot) + shape::n_w;
                    if constexpr (shape::is_normed) {
                        gemv_multiply_f32<shape>(
                            sum, slot, normed.normed + mine * NORMED_CHUNK + i * shape::n_k4,
                            normed.n_piece);
                    } else {
                        gemv_multiply_f32<shape>(sum, slot, x + lane / 8 * 4, 16);
                    }
                }
                from = from == shape::n_slot - 1 ? 0 : from + 1;
            }
#pragma unroll
            for (int j = 0; j < n_token; j++) {
                float *const at =
                    part + ((mine - first) * n_token + j) * shape::n_output + lane % 8;
#pragma unroll
                for (int h = 0; h < shape::n_half; h++) {
                    at[h * 8] = sum[h][j];
                }
            }
        }
        __syncthreads();
        const int left = n_chunk - first;
        gemv_reduce<n_token, shape::n_output>(a, end, part, left < n_part ? left : n_part, n_part,
                                              first == 0, left <= n_part);
        __syncthreads(); /* the next round writes part */
    }
}

template <class shape> void gemv_f32_launch(struct cuda *cu, const struct linear_args *a)
{
    const int n_block = shape::n_turn * shape::n_lane_chunk; /* of a warp in a round */
    const int n_warp = gemv_warps(cu, (a->n_block + n_block - 1) / n_block, 1, shape::ring_bytes,
                                  shape::part_bytes);
    const size_t shared = n_warp * (shape::ring_bytes + shape::part_bytes) + shape::part_bytes +
                          (shape::is_normed ? gemv_normed_bytes(shape::n_token, n_warp) : 0);
    CHECK(!shape::is_normed || n_warp * n_block >= a->n_block); /* in one round */
    if (!cuda_shared(cu, gemv_kernel_f32<shape>, shared, "linear")) {
        return;
    }
    const dim3 grid(static_cast<unsigned>(a->n_tile * 2 / shape::n_half),
                    static_cast<unsigned>((a->n_tok + shape::n_token - 1) / shape::n_token));
    LAUNCH(gemv_kernel_f32<shape>, grid, dim3(static_cast<unsigned>(n_warp * 32)), shared,
           cuda_queue(cu), linear_sliced(a, grid));
}

/* Each layout has a kernel of its own: neither pays for the other's addresses. */
template <int n_token, int n_half, bool is_normed>
void gemv_f32_halves(struct cuda *cu, const struct linear_args *a)
{
    if constexpr (is_normed) {
        gemv_f32_launch<gemv_f32<n_token, n_half, false, true>>(cu, a);
    } else if (a->is_row_major) {
        gemv_f32_launch<gemv_f32<n_token, n_half, true>>(cu, a);
    } else {
        gemv_f32_launch<gemv_f32<n_token, n_half, false>>(cu, a);
    }
}

/* Half a tile where blocks of one would leave half of the multiprocessors idle. */
template <int n_token, bool is_normed = false>
void gemv_f32_run(struct cuda *cu, const struct linear_args *a)
{
    if (a->n_tile * 2 * ((a->n_tok + n_token - 1) / n_token) <= cu->n_sm) {
        gemv_f32_halves<n_token, 1, is_normed>(cu, a);
    } else {
        gemv_f32_halves<n_token, 2, is_normed>(cu, a);
    }
}

} // namespace

void gemv_run_f32(struct cuda *cu, const struct linear_args *args)
{
    const bool is_normed = args->norm.d > 0;
    CHECK(!is_normed || (args->n_tok <= 2 && !args->is_row_major));
    if (is_normed && args->n_tok == 1) {
        gemv_f32_run<1, true>(cu, args);
    } else if (is_normed) {
        gemv_f32_run<2, true>(cu, args);
    } else if (args->n_tok == 1) {
        gemv_f32_run<1>(cu, args);
    } else if (args->n_tok <= 4) {
        gemv_f32_run<4>(cu, args);
    } else {
        gemv_f32_run<8>(cu, args);
    }
}
