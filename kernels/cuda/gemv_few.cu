/* Linear with up to 8 rows and row-major weights of 16 bits: what a step of few drawn tokens
 * consists of. linear.cuh defines the sum.
 *
 * A layer's product is over before memory has reached its rate: what takes time is the way from the
 * end of the kernel before to the first bytes of x, the sums, and the end of this kernel. So
 *   - a block is one on its multiprocessor and leaves half of it to a block of the next kernel,
 *     which asks for its weights while this one still runs; each lane has the weights of its first
 *     items in registers by then;
 *   - weights are the mma's B, 8 outputs of it, as 16 bytes of a row of theirs are; rows of x its
 *     A: no register changes places, and as few instructions as there can be are run.
 *
 * An item is 8 outputs times a chunk of k. Of few outputs (few_kernel) the warps of a block share
 * the chunks of its tiles of 8 outputs, and leave their sums in shared memory, from where a thread
 * for each output adds them up. Of many (few_long_kernel) a warp has tiles of its own and adds up
 * in registers: no barrier holds up its reading. Both add the chunks' sums in ascending order.
 *
 * Rows that are yet to be normed (few_kernel_normed, few_long_kernel_normed) each block norms
 * itself: a warp has a sweep of norm.cuh, which is a chunk.
 *
 * Bytes: weights once from memory, x once per block from the second-level cache. Operations:
 * 2·n_tok·n_in·n_out. Bound: device memory for many outputs; else the latencies above. */
#include "kernels/cuda/gemv_few.cuh"

namespace
{

/* ---- items ----------------------------------------------------------------------------------- */

/* A lane's: 16 bytes of each block of k. Lane (g, t) has piece t of output g, or of row g of x. */
struct few_piece {
    uint4 of[CHUNK_BLOCKS];
};

__device__ __forceinline__ void few_load(struct few_piece &to, const few_args &a, int tile,
                                         int chunk, bool is_there)
{
    const int lane = static_cast<int>(threadIdx.x) % WARP;
    const unsigned char *const w = a.w +
                                   static_cast<int64_t>(tile * TILE + lane / 4) * a.row_bytes +
                                   chunk * (CHUNK * 2) + lane % 4 * 16;
#pragma unroll
    for (int b = 0; b < CHUNK_BLOCKS; b++) {
        to.of[b] = load_16_if(is_there && chunk * CHUNK_BLOCKS + b < a.n_block,
                              w + b * (LINEAR_BLOCK_BF16 * 2));
    }
}

/* From row [n_tok, stride], the chunk's columns of it; zeros where there are no rows or no blocks.
 * is_shared: where it lies. */
template <bool is_shared>
__device__ __forceinline__ void few_take(struct few_piece &to, const uint16_t *row, int stride,
                                         int n_tok, int n_block)
{
    const int lane = static_cast<int>(threadIdx.x) % WARP;
    const uint16_t *const at = row + lane / 4 * stride + lane % 4 * 8;
#pragma unroll
    for (int b = 0; b < CHUNK_BLOCKS; b++) {
        const bool is_there = lane / 4 < n_tok && b < n_block;
        if constexpr (!is_shared) {
            to.of[b] = load_16_if(is_there, at + b * LINEAR_BLOCK_BF16);
        } else {
            to.of[b] = make_uint4(0, 0, 0, 0);
            if (is_there) {
                to.of[b] = *reinterpret_cast<const uint4 *>(at + b * LINEAR_BLOCK_BF16);
            }
        }
    }
}

/* sum = the products of n items, by turns, so that none waits for its own: lane (g, t) has those of
 * row g, outputs 2t and 2t+1; then, of no use, of row g+8, which is 0. x(u): the rows of item u. */
template <int n, enum dtype type, class Rows>
__device__ __forceinline__ void few_multiply(float (&sum)[n][4], const struct few_piece *w,
                                             const Rows &x)
{
#pragma unroll
    for (int u = 0; u < n; u++) {
        sum[u][0] = sum[u][1] = sum[u][2] = sum[u][3] = 0;
    }
#pragma unroll
    for (int b = 0; b < CHUNK_BLOCKS; b++) {
#pragma unroll
        for (int u = 0; u < n; u++) {
            const uint32_t of_x[4] = {x(u).of[b].x, 0, x(u).of[b].y, 0};
            const uint32_t of_w[2] = {w[u].of[b].x, w[u].of[b].y};
            operand_mma<type>(sum[u], of_x, of_w);
        }
#pragma unroll
        for (int u = 0; u < n; u++) {
            const uint32_t of_x[4] = {x(u).of[b].z, 0, x(u).of[b].w, 0};
            const uint32_t of_w[2] = {w[u].of[b].z, w[u].of[b].w};
            operand_mma<type>(sum[u], of_x, of_w);
        }
    }
}

template <enum dtype type>
__device__ __forceinline__ void few_store(const few_args &a, int tok, int out, float total,
                                          float bias)
{
    const float value = linear_finish_16(total, bias, a.act);
    if (a.rounded != NULL) {
        room_store({a.rounded, type}, static_cast<int64_t>(tok) * a.n_out + out, value);
    } else {
        a.y[tok * a.y_stride + out] = value;
    }
}

/* As linear_ask_next. */
__device__ __forceinline__ void few_ask_next(const few_args &a)
{
    const uint32_t first = blockIdx.x * a.next_slice;
    if (threadIdx.x == 0 && first < a.next_bytes) {
        prefetch_l2_many(a.next + first, min(a.next_slice, a.next_bytes - first));
    }
}

/* ---- few outputs ----------------------------------------------------------------------------- */

constexpr int ROWS = GEMV_FEW_ROWS;
constexpr int SUMS = ROWS * TILE; /* of an item in shared memory */
static_assert(ROWS == 8, "half of an mma's A");

/* Which item of a block: a tile, and a turn of its chunks. */
struct few_item {
    int tile, turn;
};

__device__ __forceinline__ void few_advance(struct few_item &item, int n_turn)
{
    item.turn = item.turn + 1 == n_turn ? 0 : item.turn + 1;
    item.tile += item.turn == 0 ? 1 : 0;
}

/* Weights that are on their way, and what is asked for after them. */
struct few_ahead {
    struct few_piece w[AHEAD];
    struct few_item next; /* of the block; of a warp with tiles of its own that tile and chunk */
    float bias;           /* of the thread's first output */
};

/* The block's next items, AHEAD of them. one_turn: a warp has one chunk. */
template <bool one_turn>
__device__ __forceinline__ void few_ask(struct few_ahead &ahead, const few_args &a)
{
    const int n_warp = static_cast<int>(blockDim.x) / WARP;
    const int warp = static_cast<int>(threadIdx.x) / WARP;
    const int first = static_cast<int>(blockIdx.x) * a.n_each;
    const int n_mine = min(a.n_each, a.n_tile - first); /* tiles */
#pragma unroll
    for (int u = 0; u < AHEAD; u++) {
        const int chunk = ahead.next.turn * n_warp + warp;
        few_load(ahead.w[u], a, first + ahead.next.tile, chunk,
                 ahead.next.tile < n_mine && chunk < a.n_chunk);
        few_advance(ahead.next, one_turn ? 1 : a.n_turn);
    }
}

/* What comes before grid_wait. */
template <bool one_turn>
__device__ __forceinline__ void few_begin(struct few_ahead &ahead, const few_args &a)
{
    ahead.next = {0, 0};
    if (a.starts_early) {
        few_ask<one_turn>(ahead, a);
    }
    few_ask_next(a);
    const int i = static_cast<int>(threadIdx.x);
    const int out = (static_cast<int>(blockIdx.x) * a.n_each + i / SUMS) * TILE + i % TILE;
    ahead.bias = 0;
    if (a.bias != NULL && out < a.n_out) {
        ahead.bias = a.bias[out];
    }
}

/* What comes after it: the block's items, AHEAD at a time. take(x, turn) leaves the warp's rows of
 * a turn in x, which a warp of one turn keeps. */
template <enum dtype type, bool one_turn, class Take>
__device__ __forceinline__ void few_block(const few_args &a, float *part, struct few_ahead &ahead,
                                          const Take &take)
{
    constexpr int n_at_once = one_turn ? AHEAD : AHEAD / 2; /* rows of each take registers */
    const int n_warp = static_cast<int>(blockDim.x) / WARP;
    const int warp = static_cast<int>(threadIdx.x) / WARP;
    const int lane = static_cast<int>(threadIdx.x) % WARP;
    const int i = static_cast<int>(threadIdx.x);
    const int n_turn = one_turn ? 1 : a.n_turn;
    const int first = static_cast<int>(blockIdx.x) * a.n_each;
    const int n_mine = min(a.n_each, a.n_tile - first); /* tiles */
    if (!a.starts_early) {
        few_ask<one_turn>(ahead, a);
    }
    struct few_piece x[one_turn ? 1 : n_at_once];
    if constexpr (one_turn) {
        take(x[0], 0);
    }
    struct few_item item = {0, 0};
#pragma unroll 1
    while (item.tile < n_mine) {
#pragma unroll
        for (int from = 0; from < AHEAD; from += n_at_once) {
            struct few_item of[n_at_once];
#pragma unroll
            for (int u = 0; u < n_at_once; u++) {
                of[u] = item;
                few_advance(item, n_turn);
                if constexpr (!one_turn) {
                    take(x[u], of[u].turn);
                }
            }
            float sum[n_at_once][4];
            few_multiply<n_at_once, type>(
                sum, ahead.w + from, [&](int u) -> const struct few_piece & {
                    return x[one_turn ? 0 : u];
                });
#pragma unroll
            for (int u = 0; u < n_at_once; u++) {
                const int chunk = of[u].turn * n_warp + warp;
                if (of[u].tile < n_mine && chunk < a.n_chunk && lane / 4 < a.n_tok) {
                    *reinterpret_cast<float2 *>(part + (of[u].tile * a.n_chunk + chunk) * SUMS +
                                                lane / 4 * TILE + lane % 4 * 2) =
                        make_float2(sum[u][0], sum[u][1]);
                }
            }
        }
        if (item.tile < n_mine) {
            few_ask<one_turn>(ahead, a);
        }
    }
    __syncthreads();
#pragma unroll 1
    for (int at = i; at < n_mine * SUMS; at += static_cast<int>(blockDim.x)) {
        const int tok = at % SUMS / TILE;
        const int out = (first + at / SUMS) * TILE + at % TILE;
        if (tok < a.n_tok && out < a.n_out) {
            const float *const from = part + at / SUMS * a.n_chunk * SUMS + at % SUMS;
            float total = 0;
#pragma unroll 8
            for (int c = 0; c < a.n_chunk; c++) {
                total += from[c * SUMS];
            }
            const float bias = at == i || a.bias == NULL ? ahead.bias : a.bias[out];
            few_store<type>(a, tok, out, total, bias);
        }
    }
}

/* Rows of several turns come by way of shared memory, all asked for at once:
 * [n_turn][n_tok][X_STRIDE], the warp's own. */
__device__ __forceinline__ void few_stage(uint16_t *to, const few_args &a)
{
    const int n_warp = static_cast<int>(blockDim.x) / WARP;
    const int lane = static_cast<int>(threadIdx.x) % WARP;
    const int c = lane % 16 * 8;
    for (int turn = 0; turn < a.n_turn; turn++) {
        const int first = (turn * n_warp + static_cast<int>(threadIdx.x) / WARP) * CHUNK;
        const bool is_there = first + c < a.n_block * LINEAR_BLOCK_BF16;
        for (int tok = lane / 16; tok < a.n_tok; tok += 2) {
            copy_async_16(to + (turn * a.n_tok + tok) * X_STRIDE + c,
                          is_there ? a.x + tok * a.x_stride + first + c : a.x, is_there ? 16 : 0);
        }
    }
    copy_async_commit();
    copy_async_wait<0>();
    __syncwarp();
}

/* Grid: blocks that share the tiles, n_each for each. */
template <enum dtype type, bool one_turn>
__global__ void __launch_bounds__(32 * GEMV_WARPS_MAX, 2) few_kernel(const few_args a)
{
    DYN_SHARED(float, part); /* [n_each][n_chunk][SUMS], then rows */
    const int warp = static_cast<int>(threadIdx.x) / WARP;
    uint16_t *const stage = reinterpret_cast<uint16_t *>(part + a.n_each * a.n_chunk * SUMS) +
                            warp * a.n_turn * a.n_tok * X_STRIDE;
    struct few_ahead ahead;
    few_begin<one_turn>(ahead, a);
    grid_wait();
    if constexpr (!one_turn) {
        few_stage(stage, a);
    }
    few_block<type, one_turn>(a, part, ahead, [&](struct few_piece &x, int turn) {
        if constexpr (one_turn) {
            few_take<false>(x, a.x + warp * CHUNK, a.x_stride, a.n_tok,
                            a.n_block - warp * CHUNK_BLOCKS);
        } else {
            few_take<true>(x, stage + turn * a.n_tok * X_STRIDE, X_STRIDE, a.n_tok, CHUNK_BLOCKS);
        }
    });
}

/* A warp for each chunk. */
template <enum dtype type>
__global__ void __launch_bounds__(64 * GEMV_WARPS_MAX, 1)
    few_kernel_normed(const few_args a, const struct norm_args norm)
{
    DYN_SHARED(float, part); /* [n_each][n_chunk][SUMS], then the sweeps */
    const int warp = static_cast<int>(threadIdx.x) / WARP;
    const struct few_sweeps s = sweeps_at(part + a.n_each * a.n_chunk * SUMS, a);
    float4 gamma;
    float4 beta;
    struct few_ahead ahead;
    few_begin<true>(ahead, a);
    sweep_factors(gamma, beta, norm);
    grid_wait();
    sweeps_norm<type>(a, norm, s, gamma, beta);
    few_block<type, true>(a, part, ahead, [&](struct few_piece &x, int) {
        few_take<true>(x, s.rounded + warp * a.n_tok * X_STRIDE, X_STRIDE, a.n_tok, CHUNK_BLOCKS);
    });
}

/* ---- many outputs ---------------------------------------------------------------------------- */

/* Neighbours in a block have neighbouring tiles. */
__device__ __forceinline__ int long_tile()
{
    return static_cast<int>(blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP);
}

/* The warp's next item. */
__device__ __forceinline__ void long_ask(struct few_piece &to, struct few_item &next,
                                         const few_args &a)
{
    few_load(to, a, next.tile, next.turn, next.tile < a.n_tile);
    next.turn = next.turn + 1 == a.n_chunk ? 0 : next.turn + 1;
    next.tile += next.turn == 0 ? static_cast<int>(gridDim.x * (blockDim.x / WARP)) : 0;
}

__device__ __forceinline__ void long_ask_first(struct few_ahead &ahead, const few_args &a)
{
    ahead.next = {long_tile(), 0};
#pragma unroll
    for (int u = 0; u < AHEAD; u++) {
        long_ask(ahead.w[u], ahead.next, a);
    }
}

/* What comes before grid_wait. */
__device__ __forceinline__ void long_begin(struct few_ahead &ahead, const few_args &a)
{
    if (a.starts_early) {
        long_ask_first(ahead, a);
    }
    few_ask_next(a);
}

/* What comes after it: the warp's tiles, one after the other. Rows lie in shared memory, x
 * [n_chunk][n_tok][X_STRIDE]. */
template <enum dtype type>
__device__ __forceinline__ void few_warp(const few_args &a, const uint16_t *rows,
                                         struct few_ahead &ahead)
{
    const int n_warp = static_cast<int>(gridDim.x * (blockDim.x / WARP)); /* of the grid */
    const int lane = static_cast<int>(threadIdx.x) % WARP;
    int tile = long_tile();
    if (!a.starts_early) {
        long_ask_first(ahead, a);
    }
    float total[2] = {0, 0};
    int chunk = 0;
#pragma unroll 1
    while (tile < a.n_tile) {
#pragma unroll
        for (int u = 0; u < AHEAD; u++) {
            if (tile < a.n_tile) {
                struct few_piece x;
                few_take<true>(x, rows + chunk * a.n_tok * X_STRIDE, X_STRIDE, a.n_tok,
                               CHUNK_BLOCKS);
                float sum[1][4];
                few_multiply<1, type>(
                    sum, &ahead.w[u], [&](int) -> const struct few_piece & { return x; });
                long_ask(ahead.w[u], ahead.next, a);
                total[0] += sum[0][0];
                total[1] += sum[0][1];
                chunk++;
                if (chunk == a.n_chunk) {
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        const int out = tile * TILE + lane % 4 * 2 + e;
                        if (lane / 4 < a.n_tok && out < a.n_out) {
                            few_store<type>(a, lane / 4, out, total[e],
                                            a.bias == NULL ? 0 : a.bias[out]);
                        }
                        total[e] = 0;
                    }
                    chunk = 0;
                    tile += n_warp;
                }
            }
        }
    }
}

template <enum dtype type>
__global__ void __launch_bounds__(32 * LONG_WARPS, 2) few_long_kernel(const few_args a)
{
    DYN_SHARED(uint16_t, rows);
    struct few_ahead ahead;
    long_begin(ahead, a);
    grid_wait();
    const int n_piece = CHUNK / 8; /* of a row's chunk */
    for (int i = static_cast<int>(threadIdx.x); i < a.n_chunk * a.n_tok * n_piece;
         i += static_cast<int>(blockDim.x)) {
        const int at = i / n_piece; /* chunk, row */
        const int c = i % n_piece * 8;
        const int first = at / a.n_tok * CHUNK + c;
        const bool is_there = first < a.n_block * LINEAR_BLOCK_BF16;
        copy_async_16(rows + at * X_STRIDE + c,
                      is_there ? a.x + at % a.n_tok * a.x_stride + first : a.x, is_there ? 16 : 0);
    }
    copy_async_commit();
    copy_async_wait<0>();
    __syncthreads();
    few_warp<type>(a, rows, ahead);
}

/* A warp for each chunk, which norms it. */
template <enum dtype type>
__global__ void __launch_bounds__(64 * GEMV_WARPS_MAX, 1)
    few_long_kernel_normed(const few_args a, const struct norm_args norm)
{
    DYN_SHARED(float, shared);
    const struct few_sweeps s = sweeps_at(shared, a);
    struct few_ahead ahead;
    float4 gamma;
    float4 beta;
    long_begin(ahead, a);
    sweep_factors(gamma, beta, norm);
    grid_wait();
    sweeps_norm<type>(a, norm, s, gamma, beta);
    __syncthreads();
    few_warp<type>(a, s.rounded, ahead);
}

/* ---- launching ------------------------------------------------------------------------------- */

/* Shared memory of a block of few_kernel, or of one whose warps have tiles of their own. */
size_t few_bytes(const few_args &a, int n_warp, bool is_long, bool is_normed)
{
    const size_t sums = is_long ? 0
                                : static_cast<size_t>(a.n_each) * static_cast<size_t>(a.n_chunk) *
                                      (SUMS * sizeof(float));
    const int n_staged = is_long ? a.n_chunk : a.n_turn > 1 ? n_warp * a.n_turn : 0;
    return sums + (is_normed
                       ? sweeps_bytes(a.n_tok, a.n_chunk)
                       : static_cast<size_t>(n_staged * a.n_tok) * X_STRIDE * sizeof(uint16_t));
}

/* How a product is cut. */
struct few_plan {
    few_args a;
    int n_block, n_warp;
    bool is_long;
    size_t bytes; /* of shared memory */
};

struct few_plan few_plan_of(const struct cuda *cu, const struct linear_args *args)
{
    const bool is_normed = args->norm.d > 0;
    const int n_chunk = (args->n_block + CHUNK_BLOCKS - 1) / CHUNK_BLOCKS;
    const int n_tile = (args->n_out + TILE - 1) / TILE;
    const int n_warp_max = is_normed ? 2 * GEMV_WARPS_MAX : +GEMV_WARPS_MAX;
    const bool is_long = n_tile >= LONG_TILES * LONG_WARPS * cu->n_sm;
    const int n_warp = is_long && !is_normed  ? +LONG_WARPS
                       : n_chunk < n_warp_max ? n_chunk
                                              : n_warp_max;
    const int n_each = (n_tile + cu->n_sm - 1) / cu->n_sm;
    struct few_plan plan = {};
    plan.a = {
        .w = args->w,
        .x = static_cast<const uint16_t *>(args->x),
        .bias = args->bias,
        .y = args->y,
        .rounded = args->rounded,
        .next = args->next,
        .y_stride = args->y_stride,
        .next_bytes = args->next_bytes,
        .next_slice = 0,
        .x_stride = static_cast<int>(args->x_stride),
        .row_bytes = args->map.row,
        .n_tok = args->n_tok,
        .n_out = args->n_out,
        .n_block = args->n_block,
        .n_chunk = n_chunk,
        .n_turn = (n_chunk + n_warp - 1) / n_warp,
        .n_tile = n_tile,
        .n_each = n_each,
        .act = args->act,
        .starts_early = args->starts_early,
    };
    plan.n_block = is_long ? 2 * cu->n_sm : (n_tile + n_each - 1) / n_each;
    plan.n_warp = n_warp;
    plan.is_long = is_long;
    plan.bytes = few_bytes(plan.a, n_warp, is_long, is_normed);
    return plan;
}

template <typename K, typename... P>
void few_launch(struct cuda *cu, K *kernel, const struct few_plan &plan, const P &...norm)
{
    if (!cuda_shared(cu, kernel, plan.bytes, "linear")) {
        return;
    }
    few_args a = plan.a;
    const uint32_t n_block = static_cast<uint32_t>(plan.n_block);
    a.next_slice = ((a.next_bytes + n_block - 1) / n_block + 15) / 16 * 16;
    LAUNCH(kernel, dim3(n_block), dim3(static_cast<unsigned>(plan.n_warp * WARP)), plan.bytes,
           cuda_queue(cu), a, norm...);
}

template <enum dtype type>
void few_run(struct cuda *cu, const struct few_plan &plan, const struct norm_args &norm)
{
    if (norm.d > 0 && plan.is_long) {
        few_launch(cu, few_long_kernel_normed<type>, plan, norm);
    } else if (norm.d > 0) {
        few_launch(cu, few_kernel_normed<type>, plan, norm);
    } else if (plan.is_long) {
        few_launch(cu, few_long_kernel<type>, plan);
    } else if (plan.a.n_turn == 1) {
        few_launch(cu, few_kernel<type, true>, plan);
    } else {
        few_launch(cu, few_kernel<type, false>, plan);
    }
}

} // namespace

bool gemv_is_few(const struct cuda *cu, const struct linear_args *args, enum dtype dtype)
{
    return dtype != DTYPE_F32 && args->is_row_major && args->n_tok <= GEMV_FEW_ROWS &&
           (args->x_is_rounded || args->norm.d > 0) && few_plan_of(cu, args).bytes <= BYTES_MAX;
}

void gemv_few(struct cuda *cu, const struct linear_args *args)
{
    const struct few_plan plan = few_plan_of(cu, args);
    CHECK(args->norm.d == 0 || plan.a.n_turn == 1);
    if (args->is_f16) {
        few_run<DTYPE_F16>(cu, plan, args->norm);
    } else {
        few_run<DTYPE_BF16>(cu, plan, args->norm);
    }
}
