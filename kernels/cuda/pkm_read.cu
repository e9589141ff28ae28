/* The second half of a memory layer: the weighted sum of the value rows that the search chose
 * (Large Memory Layers with Product Keys, eq. 5), plus the residual.
 *
 *   y[r, c] = residual[r, c] + S_0 + S_1 + ...      S_b = Σ weights[r, j]·values[slots[r, j], c]
 *
 * Block b of a row's columns j is 32 of them, 32b .. 32b+31: with the paper's k = 32 one head.
 * Within a block the sum is one chain of multiply-adds in ascending j, the blocks' sums are added
 * in ascending order; so a row's bits do not depend on the rows beside it.
 *
 * A warp owns 64 columns of a row (two per lane) and one block at a time; the SUMS warps of a
 * thread block take the blocks in turn and meet in shared memory. grid (columns / 64, rows), 128
 * threads. Bytes per row: n_head·k_top value rows (paper: 128 rows of 2 KiB in BF16), each read
 * once in whole 128-byte lines, from device memory or over the bus from pinned host memory; 2
 * operations per element. Bound: memory bandwidth; for one row latency, so all 32 loads of a block
 * are in flight together. Share of the bound reached: not measured yet. */
#include "kernels/cuda/cuda.cuh"

namespace
{

enum { WARP = 32, SUMS = 4, PAIR = 2, SPAN = WARP * PAIR };

/* Two neighbouring values as F32. */
template <typename T> struct pair_of;

template <> struct pair_of<float> {
    static __device__ __forceinline__ float2 load(const float *from)
    {
        return __ldg(reinterpret_cast<const float2 *>(from));
    }
    static __device__ __forceinline__ float one(const float *from)
    {
        return __ldg(from);
    }
};

template <> struct pair_of<uint16_t> {
    static __device__ __forceinline__ float2 load(const uint16_t *from)
    {
        const uint32_t bits = __ldg(reinterpret_cast<const uint32_t *>(from));
        return {__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u)};
    }
    static __device__ __forceinline__ float one(const uint16_t *from)
    {
        return bf16_widen(__ldg(from));
    }
};

/* Both columns of a lane; where rows do not start at pairs, or the last column is alone, singly. */
template <typename T, bool paired>
__device__ __forceinline__ float2 load_columns(const T *row, int column, int n_column)
{
    if (paired) {
        return pair_of<T>::load(row + column);
    }
    float2 v = {pair_of<T>::one(row + column), 0};
    if (column + 1 < n_column) {
        v.y = pair_of<T>::one(row + column + 1);
    }
    return v;
}

/* The sum of block first .. first+31 of the row's n_hit slots for this lane's columns. All lanes of
 * the warp call; a lane without columns reads column 0 and its sum is not used. */
template <typename T, bool paired>
__device__ __forceinline__ float2 block_sum(const int32_t *slots, const float *weights, int first,
                                            int n_hit, const T *values, int64_t n_column,
                                            int column)
{
    const int lane = threadIdx.x % WARP;
    const int n = n_hit - first < WARP ? n_hit - first : WARP;
    const int32_t my_slot = lane < n ? slots[first + lane] : 0;
    const float my_weight = lane < n ? weights[first + lane] : 0;
    float2 sum = {0, 0};
    if (n == WARP) {
        float2 v[WARP];
#pragma unroll
        for (int j = 0; j < WARP; j++) {
            const int64_t slot = __shfl_sync(0xffffffffu, my_slot, j);
            v[j] = load_columns<T, paired>(values + slot * n_column, column,
                                           static_cast<int>(n_column));
        }
        if constexpr (sizeof(T) == 4) { /* else nvcc 13.0 mixes sums among the loads, and spills */
            __syncwarp();
        }
#pragma unroll
        for (int j = 0; j < WARP; j++) {
            const float weight = __shfl_sync(0xffffffffu, my_weight, j);
            sum.x = fmaf(weight, v[j].x, sum.x);
            sum.y = fmaf(weight, v[j].y, sum.y);
        }
        return sum;
    }
    for (int j = 0; j < n; j++) {
        const int64_t slot = __shfl_sync(0xffffffffu, my_slot, j);
        const float weight = __shfl_sync(0xffffffffu, my_weight, j);
        const float2 v =
            load_columns<T, paired>(values + slot * n_column, column, static_cast<int>(n_column));
        sum.x = fmaf(weight, v.x, sum.x);
        sum.y = fmaf(weight, v.y, sum.y);
    }
    return sum;
}

template <typename T, bool paired>
__global__ void __launch_bounds__(SUMS *WARP)
    read_kernel(struct tensor y, struct tensor residual, struct tensor slots, struct tensor weights,
                const T *values)
{
    __shared__ float2 sums[SUMS][WARP];
    const int lane = threadIdx.x % WARP;
    const int warp = threadIdx.x / WARP;
    const unsigned n_span = static_cast<unsigned>((y.cols + SPAN - 1) / SPAN);
    const int64_t row = blockIdx.x / n_span;
    const int n_hit = static_cast<int>(slots.cols);
    const int column = static_cast<int>(blockIdx.x % n_span) * SPAN + lane * PAIR;
    const int safe = column < y.cols ? column : 0;
    const int32_t *const row_slots = static_cast<const int32_t *>(slots.data) + row * slots.stride;
    const float *const row_weights =
        static_cast<const float *>(weights.data) + row * weights.stride;
    grid_wait();
    float2 total = {0, 0};
    if (warp == 0 && residual.data != NULL) {
        const float *const from = static_cast<const float *>(residual.data) + row * residual.stride;
        total.x = column < y.cols ? from[column] : 0;
        total.y = column + 1 < y.cols ? from[column + 1] : 0;
    }
    for (int first = 0; first < n_hit; first += SUMS * WARP) {
        const int my_first = first + warp * WARP;
        if (my_first < n_hit) {
            sums[warp][lane] =
                block_sum<T, paired>(row_slots, row_weights, my_first, n_hit, values, y.cols, safe);
        }
        __syncthreads();
        for (int b = 0; warp == 0 && b < SUMS && first + b * WARP < n_hit; b++) {
            total.x = total.x + sums[b][lane].x;
            total.y = total.y + sums[b][lane].y;
        }
        __syncthreads();
    }
    float *const to = static_cast<float *>(y.data) + row * y.stride;
    if (warp == 0 && column < y.cols) {
        to[column] = total.x;
    }
    if (warp == 0 && column + 1 < y.cols) {
        to[column + 1] = total.y;
    }
}

template <typename T>
void launch(struct cuda *cu, struct tensor y, struct tensor residual, struct tensor slots,
            struct tensor weights, const struct weight *values)
{
    const T *const data = static_cast<const T *>(cuda_weight_of(values)->data);
    const bool paired =
        y.cols % PAIR == 0 && reinterpret_cast<uintptr_t>(data) % (PAIR * sizeof(T)) == 0;
    const dim3 grid(static_cast<unsigned>(y.rows * ((y.cols + SPAN - 1) / SPAN)));
    const dim3 block(SUMS * WARP);
    if (paired) {
        LAUNCH((read_kernel<T, true>), grid, block, 0, cuda_queue(cu), y, residual, slots, weights,
               data);
    } else {
        LAUNCH((read_kernel<T, false>), grid, block, 0, cuda_queue(cu), y, residual, slots, weights,
               data);
    }
}

} // namespace

void cuda_pkm_read(struct cuda *cu, struct tensor y, struct tensor residual, struct tensor slots,
                   struct tensor weights, const struct weight *values)
{
    if (values->dtype == DTYPE_BF16) {
        launch<uint16_t>(cu, y, residual, slots, weights, values);
    } else {
        launch<float>(cu, y, residual, slots, weights, values);
    }
    cuda_check(cu, "pkm_read");
}
