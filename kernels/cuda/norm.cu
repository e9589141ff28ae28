/* Layer norms, RMS norms and L2 norms.
 *
 * All are bound by memory, and for a few rows by latency alone: a launch and two or three dependent
 * reads. A warp computes a row (L2: a run of one): each lane has chains over its columns, then the
 * lanes are folded by a butterfly, an order that the width alone decides. Share of the bound
 * reached: not measured yet. */
#include "kernels/cuda/norm.cuh"

namespace
{

/* ---- layer norm ------------------------------------------------------------------------------ */

/* The group of n columns from c on that is summed, without an embedding. */
template <bool aligned>
__device__ __forceinline__ float4 norm_input(const struct norm_args &a, int64_t row, int c, int n)
{
    const float4 x = group_load<aligned>(a.x + row * a.x_stride + c, n);
    return a.r == NULL ? x : group_add(x, group_load<aligned>(a.r + row * a.r_stride + c, n));
}

/* y = (v - mean) / sqrt(variance + eps) · gamma + beta with v = x (+ r) or of an embedding, a warp per
 * row, as norm.cuh says. Rows of up to n_held · 128 columns stay in registers, with gamma and beta
 * loaded before they are needed; where rows have groups alone, all of a row is asked for before any of it
 * is used, so that it costs one latency of memory, or two; n_held 0 reads the row again for
 * each of the passes (each lane its own columns, hence y may be x or r), for rows of any width.
 * Bytes per row: 8·d, 12·d with r, 4·d and those of the tables with an embedding. A step's weights may
 * drive gamma and beta out of the second-level cache, so where kernels overlap they are asked for
 * first. */
template <bool aligned, int n_held> __global__ void norm_kernel(struct norm_args a)
{
    const int lane = static_cast<int>(threadIdx.x) % WARP;
    const int row = static_cast<int>(my_item());
    if (a.starts_early) {
        for (int c = lane * GROUP; c < a.d; c += NORM_COLS) {
            prefetch_l2(a.gamma + c);
            prefetch_l2(a.beta + c);
        }
    }
    grid_wait();
    if (row >= a.n_row) {
        return;
    }
    const bool embeds = a.from.view != NULL;
    struct embed_row of = {0, 0, 0};
    if (embeds) {
        of = embed_row_of(a.from, row);
    }
    const auto input = [&](int c) {
        return embeds ? embed_group<aligned>(a.from, of, c, a.d - c)
                      : norm_input<aligned>(a, row, c, a.d - c);
    };
    float4 in[n_held > 0 ? n_held : 1];
    float4 gamma[n_held > 0 ? n_held : 1];
    float4 beta[n_held > 0 ? n_held : 1];
    const int first = lane * GROUP;
    if constexpr (aligned && n_held > 0) {
        /* Past the last column a lane reads its first once more, or gamma if it has none, and does not use it:
         * never a column that another lane may have written by then. */
        const int mine = first < a.d ? first : 0;
        int c[n_held];
#pragma unroll
        for (int i = 0; i < n_held; i++) {
            c[i] = first + i * NORM_COLS < a.d ? first + i * NORM_COLS : mine;
        }
        if (embeds) {
            embed_groups(in, a.from, of, c);
        } else {
            norm_groups(in, first < a.d ? a.x + row * a.x_stride : a.gamma, c);
        }
        if (a.r != NULL) {
            float4 r[n_held];
            norm_groups(r, first < a.d ? a.r + row * a.r_stride : a.gamma, c);
#pragma unroll
            for (int i = 0; i < n_held; i++) {
                in[i] = group_add(in[i], r[i]);
            }
        }
        norm_groups(gamma, a.gamma, c);
        norm_groups(beta, a.beta, c);
    } else {
#pragma unroll
        for (int i = 0; i < n_held; i++) {
            const int c = first + i * NORM_COLS;
            if (c < a.d) {
                in[i] = input(c);
                gamma[i] = group_load<aligned>(a.gamma + c, a.d - c);
                beta[i] = group_load<aligned>(a.beta + c, a.d - c);
            }
        }
    }
    const auto sweep = [&](auto visit) {
        if constexpr (n_held > 0) {
#pragma unroll
            for (int i = 0; i < n_held; i++) {
                const int c = first + i * NORM_COLS;
                if (c < a.d) {
                    visit(c, in[i], gamma[i], beta[i]);
                }
            }
        } else {
            for (int c = first; c < a.d; c += NORM_COLS) {
                visit(c, input(c), float4{}, float4{});
            }
        }
    };
    float4 sum = {0, 0, 0, 0};
    sweep([&](int, float4 v, float4, float4) { sum = group_add(sum, v); });
    const float mean = warp_sum(norm_fold(sum)) / static_cast<float>(a.d);

    float4 squares = {0, 0, 0, 0};
    sweep([&](int c, float4 v, float4, float4) {
        squares = norm_squares(squares, v, mean, a.d - c);
    });
    const float variance = warp_sum(norm_fold(squares)) / static_cast<float>(a.d);
    const float inverse = norm_inverse(variance, a.eps);

    sweep([&](int c, float4 v, float4 g, float4 b) {
        if constexpr (n_held == 0) {
            g = group_load<aligned>(a.gamma + c, a.d - c);
            b = group_load<aligned>(a.beta + c, a.d - c);
        }
        const float4 out = norm_output(v, mean, inverse, g, b);
        group_store<aligned>(a.y + row * a.y_stride + c, out, a.d - c);
        if (a.rounded.data != NULL) {
            room_store_four(a.rounded, static_cast<int64_t>(row) * a.d + c, out);
        }
    });
}

template <bool aligned> void norm_launch(struct cuda *cu, const struct norm_args &a)
{
    const dim3 block = items_block(cu, a.n_row);
    const dim3 grid = grid_of(a.n_row, block.x / WARP);
    if (a.d <= 8 * NORM_COLS) {
        LAUNCH((norm_kernel<aligned, 8>), grid, block, 0, cuda_queue(cu), a);
    } else if (a.d <= 16 * NORM_COLS) {
        LAUNCH((norm_kernel<aligned, 16>), grid, block, 0, cuda_queue(cu), a);
    } else {
        LAUNCH((norm_kernel<aligned, 0>), grid, block, 0, cuda_queue(cu), a);
    }
}

/* ---- RMS norm -------------------------------------------------------------------------------- */

/* Bytes per row: 8·d, 16·d with r. A lane reads of sum only what it wrote itself. rounded: for y
 * once more. */
__global__ void __launch_bounds__(BLOCK)
    rms_kernel(struct tensor y, struct tensor sum, struct tensor x, struct tensor r,
               const float *gamma, float eps, struct room rounded)
{
    const int64_t row = my_item();
    const int lane = threadIdx.x % WARP;
    grid_wait();
    if (row >= y.rows) {
        return;
    }
    const float *in = row_of(x, row);
    float squares = 0;
    for (int64_t c = lane; c < y.cols; c += WARP) {
        float value = in[c];
        if (r.data != NULL) {
            value += row_of(r, row)[c];
            row_of(sum, row)[c] = value;
        }
        squares = fmaf(value, value, squares);
    }
    in = r.data != NULL ? row_of(sum, row) : in;
    const float mean = warp_sum(squares) / static_cast<float>(y.cols);
    const float inverse = 1 / sqrtf(mean + eps);
    for (int64_t c = lane; c < y.cols; c += WARP) {
        const float out = in[c] * inverse * gamma[c];
        row_of(y, row)[c] = out;
        if (rounded.data != NULL) {
            room_store(rounded, row * y.cols + c, out);
        }
    }
}

/* A warp per head of a row. Bytes per row: 8·d. A lane reads again only what no other lane writes. */
__global__ void __launch_bounds__(BLOCK)
    head_norm_kernel(struct tensor x, const float *gamma, int64_t d_head, float eps)
{
    const int64_t n_head = x.cols / d_head;
    const int64_t item = my_item();
    const int lane = threadIdx.x % WARP;
    grid_wait();
    if (item >= x.rows * n_head) {
        return;
    }
    float *const head = row_of(x, item / n_head) + item % n_head * d_head;
    float squares = 0;
    for (int64_t c = lane; c < d_head; c += WARP) {
        squares = fmaf(head[c], head[c], squares);
    }
    const float mean = warp_sum(squares) / static_cast<float>(d_head);
    const float inverse = 1 / sqrtf(mean + eps);
    for (int64_t c = lane; c < d_head; c += WARP) {
        head[c] = head[c] * inverse * gamma[c];
    }
}

/* ---- L2 norm --------------------------------------------------------------------------------- */

__global__ void __launch_bounds__(BLOCK) l2_kernel(struct tensor y, struct tensor x, int n_run)
{
    const int64_t item = my_item();
    grid_wait();
    if (item >= x.rows * n_run) {
        return;
    }
    const int lane = threadIdx.x % WARP;
    const int64_t row = item / n_run;
    const int64_t d = x.cols / n_run;
    const float *const in = static_cast<const float *>(x.data) + row * x.stride + item % n_run * d;
    float *const out = static_cast<float *>(y.data) + row * y.stride + item % n_run * d;
    float squares = 0;
    for (int64_t c = lane; c < d; c += WARP) {
        squares = fmaf(in[c], in[c], squares);
    }
    const float norm = sqrtf(warp_sum(squares));
    for (int64_t c = lane; c < d; c += WARP) {
        out[c] = in[c] / norm;
    }
}

} // namespace

const char *norm_op_name(const struct norm_op *op)
{
    return op->view != NULL ? "embed_norm" : op->r.data != NULL ? "add_norm" : "norm";
}

void cuda_norm(struct cuda *cu, const struct norm_op *op)
{
    if (op->y.rows == 0) {
        return;
    }
    struct norm_args a = norm_args_of(cu, op);
    a.rounded = linear_room(cu, op->y);
    if (norm_has_groups(op)) {
        norm_launch<true>(cu, a);
    } else {
        norm_launch<false>(cu, a);
    }
    cuda_check(cu, norm_op_name(op));
}

void cuda_rms_norm(struct cuda *cu, struct tensor y, struct tensor sum, struct tensor x,
                   struct tensor r, struct tensor gamma, float eps)
{
    const dim3 block = items_block(cu, y.rows);
    LAUNCH(rms_kernel, grid_of(y.rows, block.x / WARP), block, 0, cuda_queue(cu), y, sum, x, r,
           static_cast<const float *>(gamma.data), eps, linear_room(cu, y));
    cuda_check(cu, "rms_norm");
}

void cuda_head_norm(struct cuda *cu, struct tensor x, struct tensor gamma, int n_head, float eps)
{
    const dim3 block = items_block(cu, x.rows * n_head);
    LAUNCH(head_norm_kernel, grid_of(x.rows * n_head, block.x / WARP), block, 0, cuda_queue(cu), x,
           static_cast<const float *>(gamma.data), gamma.cols, eps);
    cuda_check(cu, "head_norm");
}

void cuda_l2_norm(struct cuda *cu, struct tensor y, struct tensor x, int n_run)
{
    const dim3 block = items_block(cu, x.rows * n_run);
    LAUNCH(l2_kernel, grid_of(x.rows * n_run, block.x / WARP), block, 0, cuda_queue(cu), y, x,
           n_run);
    cuda_check(cu, "l2_norm");
}
