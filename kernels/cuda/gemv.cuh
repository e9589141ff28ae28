/* Linear with few rows (decode): the time to read the weights, once, is the bound.
 *
 * A block computes some tiles of 16 outputs, or half of one, for a few rows. Its warps share the
 * chunks of k: warp w of n takes the chunks w, w+n, .. whole, their sums are added in shared memory in
 * ascending order (linear.cuh). With k cut over the warps no two of them want the same weight, so
 * each warp streams its own through a ring of slots in shared memory, by copy_async: bytes under
 * way cost no registers, and no compiler can move the loads to where they are used. The ring runs
 * on across chunks and rounds. Where kernels overlap, its first filling is cut in two: weights are
 * under way while the kernel before still runs, x follows once it is complete; the first wait is
 * then for the weights of all slots. Rows that are yet to be normed are normed by each block, and the
 * ring then carries weights alone.
 *
 * Bytes: weights once from memory (once more from the second-level cache per further group of
 * tokens), x once per block from that cache: beside BF16 weights in BF16, as the op before has left it or
 * linear_round, but in F32 of up to GEMV_F32_ROWS rows that none has left so: a launch would cost more.
 * Operations: 2·n_tok·n_in·n_out. Bound: device memory up to some 8 rows; with more, by count of bytes,
 * x through the second-level cache: with 32 rows and two tiles of outputs a block reads as much of x as of
 * weights. Share reached: not measured yet. */
#ifndef KERNELS_CUDA_GEMV_CUH
#define KERNELS_CUDA_GEMV_CUH

#include "kernels/cuda/linear.cuh"

/* gemv_f32.cu: the call with F32 weights. gemv.cu has BF16 and the choice. */
void gemv_run_f32(struct cuda *cu, const struct linear_args *args);

enum { GEMV_WARPS_MAX = 8 };

/* ---- rows that are yet to be normed ------------------------------------------------------------
 *
 * A block norms its rows itself, before its product: a launch less, and what it waits for then are rows
 * in the second-level cache, while its weights are under way. They lie in shared memory in F32, also for
 * BF16 weights, since the norm then takes the place of what it is of; each in chunks of 64 columns, 4
 * apart, with zeros behind the last: what the lanes of a warp read at once lies in different banks, of
 * one chunk of 8 rows (BF16) or of four chunks of one row (F32).
 *
 * Bytes: per block 4·d of x, and of r if there is one, for each row, 8·d of gamma and beta; of the first
 * block 4·d of y besides. Chain: two latencies of the cache and three barriers. Not measured yet. */

enum { GEMV_NORM_CHUNK = LINEAR_CHUNK_F32, GEMV_NORM_GAP = 4 };

/* Floats of a row: an odd multiple of 4, as 8 rows in different banks need. */
__host__ __device__ __forceinline__ int gemv_row_floats(int n_in)
{
    const int n_chunk = (n_in + GEMV_NORM_CHUNK - 1) / GEMV_NORM_CHUNK;
    return n_chunk * (GEMV_NORM_CHUNK + GEMV_NORM_GAP) + (n_chunk % 2 == 0 ? +GEMV_NORM_GAP : 0);
}

/* Where its column c stands. */
__device__ __forceinline__ int gemv_row_place(int c)
{
    return c + c / GEMV_NORM_CHUNK * GEMV_NORM_GAP;
}

/* Bytes of shared memory: n_row rows, as many as are read, and behind those that there are the mean and
 * 1 / √(variance + eps) of each. */
static inline size_t gemv_row_bytes(const struct linear_args *a, int n_row)
{
    return static_cast<size_t>(n_row * (gemv_row_floats(a->n_in) + 2)) * sizeof(float);
}

/* Groups of columns that a thread has of each token, as many columns apart as all threads have. */
enum { GEMV_NORM_GROUPS = 2 };

/* rows ← what the norm is of, n tokens at a time: their groups are all asked for before the first is
 * used. Past the last token and column it is some other's, which is not kept. fill() starts the ring's
 * first filling, which comes after what all else waits for. */
template <int n, class Fill>
__device__ __forceinline__ void gemv_norm_load(float *rows, const struct linear_args &a,
                                               const Fill &fill)
{
    constexpr int n_group = GEMV_NORM_GROUPS;
    const struct norm_args &norm = a.norm;
    const int step = static_cast<int>(blockDim.x) * GROUP;
    const int n_float = gemv_row_floats(a.n_in);
    for (int first = 0; first < a.n_in; first += n_group * step) {
        const int mine = first + static_cast<int>(threadIdx.x) * GROUP;
        int c[n_group];
#pragma unroll
        for (int i = 0; i < n_group; i++) {
            c[i] = mine + i * step < a.n_in ? mine + i * step : 0;
        }
        for (int tok = 0; tok < a.n_tok; tok += n) {
            float4 v[n][n_group];
            float4 r[n][n_group];
            const auto load = [&](float4(&to)[n][n_group], const float *from, int64_t stride) {
#pragma unroll
                for (int j = 0; j < n; j++) {
                    const int row = tok + j < a.n_tok ? tok + j : a.n_tok - 1;
                    norm_groups(to[j], from + row * stride, c);
                }
            };
            if (norm.from.view != NULL) {
#pragma unroll
                for (int j = 0; j < n; j++) {
                    const int row = tok + j < a.n_tok ? tok + j : a.n_tok - 1;
                    embed_groups(v[j], norm.from, embed_row_of(norm.from, row), c);
                }
            } else {
                load(v, norm.x, norm.x_stride);
            }
            if (norm.r != NULL) {
                load(r, norm.r, norm.r_stride);
            }
            if (first == 0 && tok == 0) {
                fill();
            }
#pragma unroll
            for (int j = 0; j < n; j++) {
#pragma unroll
                for (int i = 0; i < n_group; i++) {
                    const float4 sum = norm.r != NULL ? group_add(v[j][i], r[j][i]) : v[j][i];
                    if (tok + j < a.n_tok && mine + i * step < a.n_in) {
                        *reinterpret_cast<float4 *>(rows + (tok + j) * n_float +
                                                    gemv_row_place(c[i])) = sum;
                    }
                }
            }
        }
    }
}

/* stats[tok] ← {mean, 1 / √(variance + eps)}, by a warp per row. */
__device__ __forceinline__ void gemv_norm_sum(float2 *stats, const float *rows,
                                              const struct linear_args &a)
{
    const int n_warp = static_cast<int>(blockDim.x) / WARP;
    const int lane = static_cast<int>(threadIdx.x) % WARP;
    const int n_float = gemv_row_floats(a.n_in);
    for (int tok = static_cast<int>(threadIdx.x) / WARP; tok < a.n_tok; tok += n_warp) {
        const auto at = [&](int c) {
            return *reinterpret_cast<const float4 *>(rows + tok * n_float + gemv_row_place(c));
        };
        float4 sum = {0, 0, 0, 0};
#pragma unroll 4
        for (int c = lane * GROUP; c < a.n_in; c += NORM_COLS) {
            sum = group_add(sum, at(c));
        }
        const float mean = warp_sum(norm_fold(sum)) / static_cast<float>(a.n_in);
        float4 squares = {0, 0, 0, 0};
#pragma unroll 4
        for (int c = lane * GROUP; c < a.n_in; c += NORM_COLS) {
            squares = norm_squares(squares, at(c), mean, GROUP);
        }
        const float variance = warp_sum(norm_fold(squares)) / static_cast<float>(a.n_in);
        if (lane == 0) {
            stats[tok] = make_float2(mean, norm_inverse(variance, a.norm.eps));
        }
    }
}

/* Before the wait: a step's weights may have driven gamma and beta out of the second-level cache. */
__device__ __forceinline__ void gemv_norm_prefetch(const struct linear_args &a)
{
    const int step = static_cast<int>(blockDim.x) * GROUP;
    for (int c = static_cast<int>(threadIdx.x) * GROUP; c < a.n_in; c += step) {
        prefetch_l2(a.norm.gamma + c);
        prefetch_l2(a.norm.beta + c);
    }
}

/* rows [n_tok][gemv_row_floats()] ← the rows a.norm.y, to the bits of norm.cu, zeros from their ends to
 * column n_col. The first block writes them to a.norm.y, too, which overlaps nothing that others
 * read. */
template <class Fill>
__device__ __forceinline__ void gemv_norm(float *rows, const struct linear_args &a, int n_col,
                                          const Fill &fill)
{
    const struct norm_args &norm = a.norm;
    const int mine = static_cast<int>(threadIdx.x) * GROUP;
    const int step = static_cast<int>(blockDim.x) * GROUP;
    const int n_float = gemv_row_floats(a.n_in);
    float2 *const stats = reinterpret_cast<float2 *>(rows + a.n_tok * n_float);
    if (a.n_tok == 1) {
        gemv_norm_load<1>(rows, a, fill);
    } else {
        gemv_norm_load<4>(rows, a, fill);
    }
    __syncthreads();
    float4 gamma[GEMV_NORM_GROUPS]; /* on their way while rows are summed */
    float4 beta[GEMV_NORM_GROUPS];
#pragma unroll
    for (int i = 0; i < GEMV_NORM_GROUPS; i++) {
        const int c = mine + i * step < a.n_in ? mine + i * step : 0;
        gamma[i] = *reinterpret_cast<const float4 *>(norm.gamma + c);
        beta[i] = *reinterpret_cast<const float4 *>(norm.beta + c);
    }
    gemv_norm_sum(stats, rows, a);
    __syncthreads();
    for (int c = mine, i = 0; c < n_col; c += step, i++) {
        const bool is_zero = c >= a.n_in;
        float4 g = i == 0 ? gamma[0] : gamma[1];
        float4 b = i == 0 ? beta[0] : beta[1];
        if (i >= GEMV_NORM_GROUPS && !is_zero) {
            g = group_load<true>(norm.gamma + c, GROUP);
            b = group_load<true>(norm.beta + c, GROUP);
        }
#pragma unroll 4
        for (int tok = 0; tok < a.n_tok; tok++) {
            float4 *const at = reinterpret_cast<float4 *>(rows + tok * n_float + gemv_row_place(c));
            const float2 s = stats[tok];
            *at = is_zero ? make_float4(0, 0, 0, 0) : norm_output(*at, s.x, s.y, g, b);
            if (blockIdx.x == 0 && !is_zero) {
                group_store<true>(norm.y + tok * norm.y_stride + c, *at, GROUP);
            }
        }
    }
    __syncthreads();
}

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
static inline int gemv_warps(const struct cuda *cu, int n_need, int unit, size_t ring_bytes,
                             size_t part_bytes, size_t row_bytes)
{
    const int wanted = n_need < GEMV_WARPS_MAX ? n_need : +GEMV_WARPS_MAX;
    int n_warp = (wanted + unit - 1) / unit * unit;
    while (n_warp > unit &&
           n_warp * (ring_bytes + part_bytes) + part_bytes + row_bytes > cu->shared_max) {
        n_warp -= unit;
    }
    return n_warp;
}

#endif
