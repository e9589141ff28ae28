/* Linear with few rows (decode): the time to read the weights, once, is the bound.
 *
 * A block computes some tiles of 16 outputs for a few rows. Its warps share the chunks of k: warp w
 * of n takes the chunks w, w+n, .. whole, their sums are added in shared memory in
 * ascending order (linear.cuh). With k cut over the warps no two of them want the same weight, so
 * each warp streams its own through a ring of slots in shared memory, by copy_async: bytes under
 * way cost no registers, and no compiler can move the loads to where they are used. The ring runs
 * on across chunks and rounds. Where kernels overlap, its first filling is cut in two: weights are
 * under way while the kernel before still runs, x follows once it is complete; the first wait is
 * then for the weights of all slots.
 *
 * Bytes: weights once from memory (once more from the second-level cache per further group of
 * tokens), x once per block from that cache, in F32. Operations: 2·n_tok·n_in·n_out. Bound: device
 * memory up to some 8 rows; with more, by count of bytes, x through the second-level cache: with 32
 * rows and two tiles of outputs a block reads twice as much of x as of weights. Share reached: not
 * measured yet. */
#ifndef KERNELS_CUDA_GEMV_CUH
#define KERNELS_CUDA_GEMV_CUH

#include "kernels/cuda/linear.cuh"

/* gemv_f32.cu: the call with F32 weights. gemv.cu has BF16 and the choice. */
void gemv_run_f32(struct cuda *cu, const struct linear_args *args);

enum { GEMV_WARPS_MAX = 8 };

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
    for (int tok = end.first; tok < n_token; tok += end.step) {
        float *const mine = part + tok * stride + end.col;
        float *const kept = mine + n_part_max * n_token * stride;
        float total = is_first ? 0 : *kept;
#pragma unroll 4
        for (int p = 0; p < n_part; p++) {
            total += mine[p * n_token * stride];
        }
        if (!is_last) {
            *kept = total;
        } else if (end.first_tok + tok < a.n_tok && end.out < a.n_out) {
            a.y[(end.first_tok + tok) * a.y_stride + end.out] =
                linear_finish(total, end.bias, a.act);
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
                             size_t part_bytes)
{
    const int wanted = n_need < GEMV_WARPS_MAX ? n_need : +GEMV_WARPS_MAX;
    int n_warp = (wanted + unit - 1) / unit * unit;
    while (n_warp > unit && n_warp * (ring_bytes + part_bytes) + part_bytes > cu->shared_max) {
        n_warp -= unit;
    }
    return n_warp;
}

#endif
