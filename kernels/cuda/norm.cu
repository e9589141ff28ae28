/* Layer norms, RMS norms and L2 norms.
 *
 * All are bound by memory, and for a few rows by latency alone: a launch and two or three dependent
 * reads. A warp sums a row (L2: a run of one): each lane has chains over its columns, then the
 * lanes are folded by a butterfly, an order that the width alone decides. */
#include "kernels/cuda/norm.cuh"

namespace
{

/* ---- layer norm ------------------------------------------------------------------------------ */

constexpr int ROW_MAX = 2048; /* columns of a row that a block norms */

/* The group of n columns from c on that is summed, without an embedding. */
template <bool aligned>
__device__ __forceinline__ float4 norm_input(const struct norm_args &a, int64_t row, int c, int n)
{
    const float4 x = group_load<aligned>(a.x + row * a.x_stride + c, n);
    return a.r == NULL ? x : group_add(x, group_load<aligned>(a.r + row * a.r_stride + c, n));
}

/* y = (v - mean) / sqrt(variance + eps) · gamma + beta with v = x (+ r) or of an embedding, as
 * norm.cuh says: a block per row of up to ROW_MAX columns that has groups alone, a group for each
 * thread. Of few rows each warp sums all of the row, which is a barrier less than if one did; of
 * many (is_many), whose instructions are what takes time, one does. Bytes per row: 8·d, 12·d with
 * r, 4·d and those of the tables with an embedding. gamma and beta, which a step's weights may
 * drive out of the second-level cache, are asked for first. */
__global__ void __launch_bounds__(ROW_MAX / GROUP) norm_row_kernel(struct norm_args a, bool is_many)
{
    __shared__ __align__(16) float row[ROW_MAX];
    __shared__ float2 sums;
    const int lane = static_cast<int>(threadIdx.x) % WARP;
    const int at = static_cast<int>(blockIdx.x);
    const int c = static_cast<int>(threadIdx.x) * GROUP;
    const int columns[1] = {c};
    const bool is_there = c < a.d;
    float4 gamma = {0, 0, 0, 0};
    float4 beta = {0, 0, 0, 0};
    float4 in[1] = {};
    if (is_there) {
        gamma = *reinterpret_cast<const float4 *>(a.gamma + c);
        beta = *reinterpret_cast<const float4 *>(a.beta + c);
    }
    grid_wait();
    if (is_there) {
        float4 r[1] = {};
        if (a.from.view != NULL) {
            embed_groups(in, a.from, embed_row_of(a.from, at), columns);
        } else {
            norm_groups(in, a.x + at * a.x_stride, columns);
        }
        if (a.r != NULL) {
            norm_groups(r, a.r + at * a.r_stride, columns);
            in[0] = group_add(in[0], r[0]);
        }
        *reinterpret_cast<float4 *>(row + c) = in[0];
    }
    __syncthreads();
    float2 s = {0, 0};
    if (!is_many || threadIdx.x < WARP) {
        s = norm_sum(row, a.d, a.eps, lane);
    }
    if (is_many) {
        if (threadIdx.x == 0) {
            sums = s;
        }
        __syncthreads();
        s = sums;
    }
    if (is_there) {
        const float4 out = norm_output(in[0], s.x, s.y, gamma, beta);
        *reinterpret_cast<float4 *>(a.y + at * a.y_stride + c) = out;
        if (a.rounded.data != NULL) {
            room_store_four(a.rounded, static_cast<int64_t>(at) * a.d + c, out);
        }
    }
}

/* The same of any row, to the same bits: by a warp, which reads the row again for each of the
 * passes (each lane its own columns, hence y may be x or r). */
template <bool aligned> __global__ void norm_kernel(struct norm_args a)
{
    const int lane = static_cast<int>(threadIdx.x) % WARP;
    const int row = static_cast<int>(my_item());
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
    const int first = lane * GROUP;
    float4 sum = {0, 0, 0, 0};
    for (int c = first; c < a.d; c += NORM_COLS) {
        sum = group_add(sum, input(c));
    }
    const float mean = warp_sum(norm_fold(sum)) / static_cast<float>(a.d);
    float4 squares = {0, 0, 0, 0};
    for (int c = first; c < a.d; c += NORM_COLS) {
        squares = norm_squares(squares, input(c), mean, a.d - c);
    }
    const float variance = warp_sum(norm_fold(squares)) / static_cast<float>(a.d);
    const float inverse = norm_inverse(variance, a.eps);
    for (int c = first; c < a.d; c += NORM_COLS) {
        const float4 out =
            norm_output(input(c), mean, inverse, group_load<aligned>(a.gamma + c, a.d - c),
                        group_load<aligned>(a.beta + c, a.d - c));
        group_store<aligned>(a.y + row * a.y_stride + c, out, a.d - c);
        if (a.rounded.data != NULL) {
            room_store_four(a.rounded, static_cast<int64_t>(row) * a.d + c, out);
        }
    }
}

void norm_launch(struct cuda *cu, const struct norm_args &a, bool has_groups)
{
    if (has_groups && a.d <= ROW_MAX) {
        const int n_thread = (a.d + NORM_COLS - 1) / NORM_COLS * WARP;
        LAUNCH(norm_row_kernel, dim3(static_cast<unsigned>(a.n_row)),
               dim3(static_cast<unsigned>(n_thread)), 0, cuda_queue(cu), a, a.n_row > 4 * cu->n_sm);
        return;
    }
    const dim3 block = items_block(cu, a.n_row);
    const dim3 grid = grid_of(a.n_row, block.x / WARP);
    if (has_groups) {
        LAUNCH(norm_kernel<true>, grid, block, 0, cuda_queue(cu), a);
    } else {
        LAUNCH(norm_kernel<false>, grid, block, 0, cuda_queue(cu), a);
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

/* A warp per head of a row. Bytes per row: 8·d. A lane reads again only what no other lane
 * writes. */
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
    norm_launch(cu, a, norm_has_groups(op));
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
