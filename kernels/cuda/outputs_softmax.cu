/* Log softmax of rows, in place: the parts of an adaptive softmax.
 *
 * A block per row sweeps it three times: largest logit, sum of exponentials, shift. Each thread
 * takes every BLOCK-th column; the threads' results are folded by a fixed tree, so a row's bits
 * depend on its width alone. The sums are double, as in ref.
 * Bytes per row: 16·n, of which rows of up to a few thousand columns stay in the cache; a wide row
 * that comes alone is bound by the latency of its block. The product that made the row reads at
 * least 16 times as many. */
#include "kernels/cuda/cuda.cuh"

#include <math.h>

namespace
{

enum { BLOCK = 512 };

struct softmax_args {
    float *y;
    const float *base; /* NULL: nothing is added */
    int64_t y_stride, base_stride;
    int n;
};

/* part[0] = fold of all part[]. Every thread of the block comes here and may read it after. */
template <typename T, typename F> __device__ __forceinline__ T fold(T *part, T mine, F both)
{
    part[threadIdx.x] = mine;
    __syncthreads();
    for (unsigned half = BLOCK / 2; half > 0; half /= 2) {
        if (threadIdx.x < half) {
            part[threadIdx.x] = both(part[threadIdx.x], part[threadIdx.x + half]);
        }
        __syncthreads();
    }
    return part[0];
}

__global__ void __launch_bounds__(BLOCK) log_softmax_rows(struct softmax_args a)
{
    __shared__ float part_max[BLOCK];
    __shared__ double part_sum[BLOCK];
    const int64_t row = blockIdx.x;
    const int first = static_cast<int>(threadIdx.x);
    float *const z = a.y + row * a.y_stride;
    grid_wait();
    float mine = -INFINITY;
    for (int c = first; c < a.n; c += BLOCK) { /* NaN counts as infinity: both break the row */
        mine = fmaxf(mine, z[c] < INFINITY ? z[c] : INFINITY);
    }
    const float max = fold(part_max, mine, [](float x, float y) { return fmaxf(x, y); });
    double sum = 0;
    for (int c = first; c < a.n && fabsf(max) < INFINITY; c += BLOCK) {
        sum += static_cast<double>(expf(z[c] - max));
    }
    const double total = fold(part_sum, sum, [](double x, double y) { return x + y; });
    const double base = a.base == NULL ? 0 : static_cast<double>(a.base[row * a.base_stride]);
    const float shift = fabsf(max) < INFINITY ? static_cast<float>(base - log(total)) : NAN;
    for (int c = first; c < a.n; c += BLOCK) {
        z[c] = z[c] - max + shift;
    }
}

} // namespace

void cuda_log_softmax(struct cuda *cu, struct tensor y, struct tensor base)
{
    const struct softmax_args a = {
        .y = static_cast<float *>(y.data),
        .base = static_cast<const float *>(base.data),
        .y_stride = y.stride,
        .base_stride = base.stride,
        .n = static_cast<int>(y.cols),
    };
    LAUNCH(log_softmax_rows, dim3(static_cast<unsigned>(y.rows)), dim3(BLOCK), 0, cuda_queue(cu),
           a);
    cuda_check(cu, "log_softmax");
}
