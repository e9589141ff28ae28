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
 * thread block take the blocks in turn and add their sums in shared memory. grid (columns / 64 ·
 * rows), 128 threads. Bytes per row: n_head·k_top value rows (paper: 128 rows of 2 KiB in BF16),
 * each read once in whole 128-byte lines, from device memory or over the bus from pinned host
 * memory; 2 operations per element. Bound: memory bandwidth; for one row latency, so all 32 loads
 * of a block are in flight together. Share of the bound reached on an H200: 93 % of
 * 1024 rows, 75 % of 256.
 *
 * Of many rows some read the same value rows: 1024 of 4 heads and k = 32 read 268 MB, of which 211
 * MB are distinct in real text, 209 of slots drawn evenly from 512². So all rows are taken for 128
 * columns, then for the next 128. What a cache that forgets the oldest then lets through, of slots
 * drawn evenly, in MB:
 *      rows  all  distinct  128 columns of 50 MB  of 25 MB  64 columns of 25 MB  all columns of 50
 *      MB
 *      1024  268       209                   209       209                  209                   243
 *      2048  537       334                   334       368                  334                   484
 *      4096 1074       458                   467       688                  467                   966
 * (25 MB: if both halves of a GPU's cache keep what they read of the other's memory.) So up to 1024
 * rows nothing is left to gain by ordering look-ups, which would have to be sorted for it, and all
 * multiprocessors draw 268 MB from the cache in no less time, 51 us, than memory gives 209. Of more
 * rows 64 columns at a time would pay if 25 MB serve and memory gives 128 bytes in a row as fast as
 * 256, which it is said not to: TOGETHER = 1, to be tried on a GPU.
 *
 * In steps with redirections (struct pkm_redirect) the lanes of a warp look their slots up first;
 * where one is redirected, its row takes the place of the table's after that has been loaded,
 * before the sums: so the loads stay in flight together, and the sums are the same. */
#include "kernels/cuda/redirect.cuh"

#include <type_traits>

namespace
{

enum {
    WARP = 32,
    SUMS = 4,
    PAIR = 2,
    SPAN = WARP * PAIR,
    TOGETHER = 2 /* spans of a row whose blocks follow one another */
};

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

template <> struct pair_of<f16_bits> {
    static __device__ __forceinline__ float2 load(const f16_bits *from)
    {
        const uint32_t bits = __ldg(reinterpret_cast<const uint32_t *>(from));
        return {f16_widen(static_cast<uint16_t>(bits)),
                f16_widen(static_cast<uint16_t>(bits >> 16))};
    }
    static __device__ __forceinline__ float one(const f16_bits *from)
    {
        return f16_widen(__ldg(&from->bits));
    }
};

/* A table of F32, BF16 or F16. */
template <typename T> struct float_table {
    const T *data;

    /* Both columns of a lane; where rows do not start at pairs, or the last column is alone,
     * singly.
     */
    template <bool paired>
    __device__ __forceinline__ float2 load(int64_t slot, int column, int n_column) const
    {
        const T *const row = data + slot * n_column;
        if (paired) {
            return pair_of<T>::load(row + column);
        }
        float2 v = {pair_of<T>::one(row + column), 0};
        if (column + 1 < n_column) {
            v.y = pair_of<T>::one(row + column + 1);
        }
        return v;
    }
};

/* A table of I8: see int8.h. */
struct int8_table {
    const int8_t *data;
    const float *scale;

    template <bool paired>
    __device__ __forceinline__ float2 load(int64_t slot, int column, int n_column) const
    {
        const int8_t *const row = data + slot * n_column;
        const float factor = __ldg(scale + slot);
        if (paired) {
            const int both = __ldg(reinterpret_cast<const int16_t *>(row + column));
            return {static_cast<float>(static_cast<int8_t>(both & 255)) * factor,
                    static_cast<float>(both >> 8) * factor};
        }
        return {static_cast<float>(__ldg(row + column)) * factor,
                column + 1 < n_column ? static_cast<float>(__ldg(row + column + 1)) * factor : 0};
    }
};

/* A table of Q4: see q4_code. Its rows are n_column / 2 bytes. */
struct q4_table {
    const uint8_t *data;
    const uint16_t *scale; /* fp16 */

    /* fp16 to F32, exactly, subnormal numbers too: its exponent, put in the place of F32's, is 112
     * less than it should be. */
    static __device__ __forceinline__ float widen(uint16_t bits)
    {
        const float magnitude = __uint_as_float((bits & 0x7fffu) << 13) * 0x1p112f;
        return (bits & 0x8000u) != 0 ? -magnitude : magnitude;
    }

    __device__ __forceinline__ float one(const uint8_t *row, int column, int half) const
    {
        const int byte = __ldg(row + (column < half ? column : column - half));
        return static_cast<float>((column < half ? byte & 15 : byte >> 4) - 8);
    }

    /* paired: two columns are neighbours in one half, and their bytes start at a pair. */
    template <bool paired>
    __device__ __forceinline__ float2 load(int64_t slot, int column, int n_column) const
    {
        const int half = n_column / 2;
        const uint8_t *const row = data + slot * half;
        const float factor = widen(__ldg(scale + slot));
        if (paired) {
            const int at = column < half ? column : column - half;
            const int bytes = __ldg(reinterpret_cast<const uint16_t *>(row + at));
            const int codes = column < half ? bytes : bytes >> 4;
            return {static_cast<float>((codes & 15) - 8) * factor,
                    static_cast<float>((codes >> 8 & 15) - 8) * factor};
        }
        return {one(row, column, half) * factor,
                column + 1 < n_column ? one(row, column + 1, half) * factor : 0};
    }
};

/* Whose redirections apply; view NULL = none. */
struct read_redirect {
    const struct step_view *view;
    int memory;
};

/* Both columns of a lane of the row that stands in for look-up j's. */
__device__ __forceinline__ float2 redirected_pair(struct redirected_row mine, int j, int column,
                                                  int n_column)
{
    const struct redirected_row row = {__shfl_sync(0xffffffffu, mine.data, j),
                                       __shfl_sync(0xffffffffu, mine.is_bf16, j)};
    return {redirected_value(row, column),
            column + 1 < n_column ? redirected_value(row, column + 1) : 0};
}

/* The sum of block first .. first+31 of the row's n_hit slots for this lane's columns. All lanes of
 * the warp call; a lane without columns reads column 0 and its sum is not used. */
template <typename T, bool paired, bool redirects>
__device__ __forceinline__ float2 block_sum(const int32_t *slots, const float *weights, int first,
                                            int n_hit, const T values, int64_t n_column, int column,
                                            struct read_redirect redirect, int64_t row)
{
    const int lane = threadIdx.x % WARP;
    const int n = n_hit - first < WARP ? n_hit - first : WARP;
    const int32_t my_slot = lane < n ? slots[first + lane] : 0;
    const float my_weight = lane < n ? weights[first + lane] : 0;
    struct redirected_row mine = {0, 0};
    if (redirects && lane < n) {
        mine = redirect_find(redirect.view, row, redirect.memory, my_slot, n_column, false);
    }
    const unsigned redirected = redirects ? __ballot_sync(0xffffffffu, mine.data != 0) : 0;
    float2 sum = {0, 0};
    if (n == WARP) {
        float2 v[WARP];
#pragma unroll
        for (int j = 0; j < WARP; j++) {
            const int64_t slot = __shfl_sync(0xffffffffu, my_slot, j);
            v[j] = values.template load<paired>(slot, column, static_cast<int>(n_column));
        }
        if constexpr (redirects) {
#pragma unroll
            for (int j = 0; j < WARP; j++) {
                if ((redirected >> j & 1) != 0) {
                    v[j] = redirected_pair(mine, j, column, static_cast<int>(n_column));
                }
            }
        }
        if constexpr (std::is_same_v<T, float_table<float>> ||
                      (std::is_same_v<T, float_table<f16_bits>> && !paired &&
                       !redirects)) { /* else nvcc 13.0 mixes sums among the loads, and spills */
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
            redirects && (redirected >> j & 1) != 0
                ? redirected_pair(mine, j, column, static_cast<int>(n_column))
                : values.template load<paired>(slot, column, static_cast<int>(n_column));
        sum.x = fmaf(weight, v.x, sum.x);
        sum.y = fmaf(weight, v.y, sum.y);
    }
    return sum;
}

template <typename T, bool paired, bool redirects>
__global__ void __launch_bounds__(SUMS *WARP)
    read_kernel(struct tensor y, struct tensor residual, struct tensor slots, struct tensor weights,
                const T values, struct read_redirect redirect)
{
    __shared__ float2 sums[SUMS][WARP];
    const int lane = threadIdx.x % WARP;
    const int warp = threadIdx.x / WARP;
    const unsigned n_span = static_cast<unsigned>((y.cols + SPAN - 1) / SPAN);
    const unsigned group = TOGETHER * static_cast<unsigned>(y.rows); /* blocks */
    const unsigned first_span = blockIdx.x / group * TOGETHER;
    const unsigned width = n_span - first_span < TOGETHER ? n_span - first_span : +TOGETHER;
    const unsigned at = blockIdx.x % group;
    const int64_t row = at / width;
    const int n_hit = static_cast<int>(slots.cols);
    const int column = static_cast<int>(first_span + at % width) * SPAN + lane * PAIR;
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
            sums[warp][lane] = block_sum<T, paired, redirects>(
                row_slots, row_weights, my_first, n_hit, values, y.cols, safe, redirect, row);
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

/* What is read, and for whom. */
struct read_call {
    struct tensor y, residual, slots, weights;
    struct read_redirect redirect;
};

template <typename T, bool paired>
void launch_paired(struct cuda *cu, const struct read_call *call, const T table)
{
    const struct tensor y = call->y;
    const dim3 grid(static_cast<unsigned>(y.rows * ((y.cols + SPAN - 1) / SPAN)));
    const dim3 block(SUMS * WARP);
    if (call->redirect.view == NULL) {
        LAUNCH((read_kernel<T, paired, false>), grid, block, 0, cuda_queue(cu), y, call->residual,
               call->slots, call->weights, table, call->redirect);
    } else {
        LAUNCH((read_kernel<T, paired, true>), grid, block, 0, cuda_queue(cu), y, call->residual,
               call->slots, call->weights, table, call->redirect);
    }
}

template <typename T>
void launch(struct cuda *cu, const struct read_call *call, const T table, bool paired)
{
    if (paired) {
        launch_paired<T, true>(cu, call, table);
    } else {
        launch_paired<T, false>(cu, call, table);
    }
}

template <typename T>
void launch_floats(struct cuda *cu, const struct read_call *call, const struct weight *values)
{
    const T *const data = static_cast<const T *>(cuda_weight_of(values)->data);
    const bool paired =
        call->y.cols % PAIR == 0 && reinterpret_cast<uintptr_t>(data) % (PAIR * sizeof(T)) == 0;
    launch(cu, call, float_table<T>{data}, paired);
}

void launch_int8(struct cuda *cu, const struct read_call *call, const struct weight *values)
{
    const int8_t *const data = static_cast<const int8_t *>(cuda_weight_of(values)->data);
    const int8_table table = {data,
                              reinterpret_cast<const float *>(data + cuda_table_scales(values))};
    const bool paired = call->y.cols % PAIR == 0 && reinterpret_cast<uintptr_t>(data) % PAIR == 0;
    launch(cu, call, table, paired);
}

void launch_q4(struct cuda *cu, const struct read_call *call, const struct weight *values)
{
    const uint8_t *const data = static_cast<const uint8_t *>(cuda_weight_of(values)->data);
    const q4_table table = {data,
                            reinterpret_cast<const uint16_t *>(data + cuda_table_scales(values))};
    const bool paired =
        call->y.cols / 2 % PAIR == 0 && reinterpret_cast<uintptr_t>(data) % PAIR == 0;
    launch(cu, call, table, paired);
}

} // namespace

void cuda_pkm_read(struct cuda *cu, struct tensor y, struct tensor residual, struct tensor slots,
                   struct tensor weights, const struct weight *values, const struct step_view *view,
                   int memory)
{
    const struct read_call call = {y, residual, slots, weights, {view, memory}};
    if (values->dtype == DTYPE_Q4) {
        launch_q4(cu, &call, values);
    } else if (values->dtype == DTYPE_I8) {
        launch_int8(cu, &call, values);
    } else if (values->dtype == DTYPE_BF16) {
        launch_floats<uint16_t>(cu, &call, values);
    } else if (values->dtype == DTYPE_F16) {
        launch_floats<f16_bits>(cu, &call, values);
    } else {
        launch_floats<float>(cu, &call, values);
    }
    cuda_check(cu, "pkm_read");
}
