/* Experts of one hidden unit (He 2024): a product of the row and an expert for each slot.
 *
 * A warp per slot: each lane has a chain over every 32nd column, then the lanes are folded by a
 * butterfly. Bound by memory, rows of the table at random places. Share of the bound reached: not
 * measured yet. */
#include "kernels/cuda/redirect.cuh"
#include "kernels/cuda/rows.cuh"

namespace
{

__device__ __forceinline__ float expert_value(int8_t q)
{
    return static_cast<float>(q);
}

template <typename T> __device__ __forceinline__ float expert_value(T value)
{
    return widen(value);
}

/* A warp per slot. Bytes per slot: a row of the table, at a random place. scale: of I8 rows, else
 * NULL. */
template <typename T, bool redirects>
__global__ void __launch_bounds__(BLOCK)
    experts_kernel(struct tensor y, struct tensor weights, struct tensor slots, struct tensor x,
                   const T *experts, const float *scale, const struct step_view *view, int memory)
{
    const int64_t item = my_item();
    const int lane = threadIdx.x % WARP;
    grid_wait();
    if (item >= weights.rows * weights.cols) {
        return;
    }
    const int64_t row = item / weights.cols;
    const int64_t j = item % weights.cols;
    const int64_t slot = (static_cast<const int32_t *>(slots.data) + row * slots.stride)[j];
    const T *const expert = experts + slot * x.cols;
    const struct redirected_row other =
        redirects ? redirect_find(view, row, memory, static_cast<int>(slot), x.cols, true)
                  : redirected_row{0, 0};
    float dot = 0;
    for (int64_t c = lane; c < x.cols; c += WARP) {
        const float value = redirects && other.data != 0
                                ? redirected_value(other, static_cast<int>(c))
                                : expert_value(expert[c]);
        dot = fmaf(row_of(x, row)[c], value, dot);
    }
    dot = warp_sum(dot);
    if (scale != NULL && other.data == 0) {
        dot *= scale[slot];
    }
    if (lane == 0) {
        row_of(y, row)[j] = row_of(weights, row)[j] * (0.5f * dot * erfcf(-dot * 0.70710678f));
    }
}

template <typename T>
void experts_launch(struct cuda *cu, struct tensor y, struct tensor weights, struct tensor slots,
                    struct tensor x, const struct weight *experts, const struct step_view *view,
                    int memory)
{
    const dim3 grid = grid_of(weights.rows * weights.cols, ITEMS);
    const T *const data = static_cast<const T *>(cuda_weight_of(experts)->data);
    const float *const scale =
        experts->dtype != DTYPE_I8
            ? NULL
            : reinterpret_cast<const float *>(reinterpret_cast<const char *>(data) +
                                              cuda_table_scales(experts));
    if (view == NULL) {
        LAUNCH((experts_kernel<T, false>), grid, dim3(BLOCK), 0, cuda_queue(cu), y, weights, slots,
               x, data, scale, view, memory);
    } else {
        LAUNCH((experts_kernel<T, true>), grid, dim3(BLOCK), 0, cuda_queue(cu), y, weights, slots,
               x, data, scale, view, memory);
    }
}

} // namespace

void cuda_pkm_experts(struct cuda *cu, struct tensor y, struct tensor weights, struct tensor slots,
                      struct tensor x, const struct weight *experts, const struct step_view *view,
                      int memory)
{
    if (experts->dtype == DTYPE_I8) {
        experts_launch<int8_t>(cu, y, weights, slots, x, experts, view, memory);
    } else if (experts->dtype == DTYPE_BF16) {
        experts_launch<uint16_t>(cu, y, weights, slots, x, experts, view, memory);
    } else if (experts->dtype == DTYPE_F16) {
        experts_launch<f16_bits>(cu, y, weights, slots, x, experts, view, memory);
    } else {
        experts_launch<float>(cu, y, weights, slots, x, experts, view, memory);
    }
    cuda_check(cu, "pkm_experts");
}
