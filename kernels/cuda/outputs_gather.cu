/* gather: the rows that outputs are wanted of. Bound by memory, and for a few rows by latency: a
 * launch and two or three dependent reads. Share of the bound reached: not measured yet. */
#include "kernels/cuda/rows.cuh"

namespace
{

struct gather_args {
    float *y;
    const float *x;
    int64_t y_stride, x_stride;
    int d, first;
    const struct step_view *view;
};

/* y row i = x row out_row[first + i]. Grid as embed's. Bytes per row: 8·d. */
template <bool aligned> __global__ void gather_kernel(struct gather_args a)
{
    const int64_t row = blockIdx.x;
    const int c = my_first_column();
    const int n = a.d - c;
    grid_wait();
    if (n > 0) {
        const int64_t from = a.view->out_row[a.first + row];
        group_store<aligned>(a.y + row * a.y_stride + c,
                             group_load<aligned>(a.x + from * a.x_stride + c, n), n);
    }
}

} // namespace

void cuda_gather(struct cuda *cu, struct tensor y, struct tensor x, const struct step_view *view,
                 int first)
{
    CHECK(y.rows <= INT32_MAX && y.cols <= INT32_MAX - BLOCK * GROUP);
    if (y.rows == 0) {
        return;
    }
    const struct gather_args a = {
        .y = static_cast<float *>(y.data),
        .x = static_cast<const float *>(x.data),
        .y_stride = y.stride,
        .x_stride = x.stride,
        .d = static_cast<int>(y.cols),
        .first = first,
        .view = view,
    };
    const dim3 grid = groups_grid(y.rows, y.cols);
    if (has_groups(y) && has_groups(x) && x.stride % GROUP == 0) {
        LAUNCH(gather_kernel<true>, grid, dim3(BLOCK), 0, cuda_queue(cu), a);
    } else {
        LAUNCH(gather_kernel<false>, grid, dim3(BLOCK), 0, cuda_queue(cu), a);
    }
    cuda_check(cu, "gather");
}
