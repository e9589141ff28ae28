/* Rotary position embedding. Bound by memory, and for a few rows by the latency of a launch. Share
 * of the bound reached: not measured yet. */
#include "kernels/cuda/rows.cuh"

namespace
{

/* A thread per pair. Bytes per row: 8·d, and a row of the table. */
__global__ void __launch_bounds__(BLOCK)
    rope_kernel(struct tensor x, struct tensor table, const struct step_view *view, int d_head)
{
    const int64_t n_pair = x.cols / 2;
    const int64_t element = my_element();
    grid_wait();
    if (element >= x.rows * n_pair) {
        return;
    }
    const int64_t row = element / n_pair;
    const int64_t c = element % n_pair * 2;
    const int64_t i = c % d_head;
    const float *const cosine = row_of(table, view->pos[row]);
    const float *const sine = cosine + d_head;
    float *const pair = row_of(x, row) + c;
    const float a = pair[0];
    const float b = pair[1];
    pair[0] = fmaf(a, cosine[i], b * sine[i]);
    pair[1] = fmaf(b, cosine[i + 1], a * sine[i + 1]);
}

} // namespace

void cuda_rope(struct cuda *cu, struct tensor x, struct tensor table, const struct step_view *view,
               int n_head)
{
    LAUNCH(rope_kernel, grid_of(x.rows * (x.cols / 2), BLOCK), dim3(BLOCK), 0, cuda_queue(cu), x,
           table, view, static_cast<int>(x.cols / n_head));
    cuda_check(cu, "rope");
}
