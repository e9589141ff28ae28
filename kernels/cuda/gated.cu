/* What pre-norm transformers with rotary positions and gated networks add: RMS norms, rotations,
 * gates, and the experts of a memory.
 *
 * All are bound by memory, and for a few rows by the latency of a launch and one or two dependent
 * reads. Norms and experts are a warp per item: each lane has a chain over every 32nd column, then
 * the lanes meet in a butterfly, an order that the width alone decides. Rotations and gates are a
 * thread per pair or number. Share of the bound reached: not measured yet. */
#include "kernels/cuda/cuda.cuh"

namespace
{

enum { WARP = 32, ITEMS = 4 /* warps of a block */, BLOCK = WARP * ITEMS };

/* This warp's item of n, or n or more: no such item. */
__device__ __forceinline__ int64_t my_item()
{
    return static_cast<int64_t>(blockIdx.x) * ITEMS + threadIdx.x / WARP;
}

/* This thread's element of n, or n or more: no such element. */
__device__ __forceinline__ int64_t my_element()
{
    return static_cast<int64_t>(blockIdx.x) * BLOCK + threadIdx.x;
}

dim3 grid_of(int64_t n, int64_t per_block)
{
    return dim3(static_cast<unsigned>((n + per_block - 1) / per_block));
}

__device__ __forceinline__ float *row_of(const struct tensor &t, int64_t row)
{
    return static_cast<float *>(t.data) + row * t.stride;
}

/* ---- RMS norm -------------------------------------------------------------------------------- */

/* Bytes per row: 8·d, 16·d with r. A lane reads of sum only what it wrote itself. */
__global__ void __launch_bounds__(BLOCK)
    rms_kernel(struct tensor y, struct tensor sum, struct tensor x, struct tensor r,
               const float *gamma, float eps)
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
        row_of(y, row)[c] = in[c] * inverse * gamma[c];
    }
}

/* ---- rotary positions ------------------------------------------------------------------------ */

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

/* ---- gates ----------------------------------------------------------------------------------- */

/* 1 / (1 + e^-g), by e^-|g|, which does not overflow. */
__device__ __forceinline__ float sigmoid(float g)
{
    const float e = expf(-fabsf(g));
    return (g > 0 ? 1 : e) / (e + 1);
}

/* A thread per number. Bytes per row: 12·d. */
__global__ void __launch_bounds__(BLOCK)
    gate_kernel(struct tensor y, struct tensor x, struct tensor g, enum gate_kind kind)
{
    const int64_t element = my_element();
    grid_wait();
    if (element >= y.rows * y.cols) {
        return;
    }
    const int64_t row = element / y.cols;
    const int64_t c = element % y.cols;
    const float in = row_of(g, row)[kind == GATE_SIGMOID ? 0 : c];
    const float share = (kind == GATE_SIGMOID ? 1 : in) * sigmoid(in);
    row_of(y, row)[c] = row_of(x, row)[c] * share;
}

/* ---- experts --------------------------------------------------------------------------------- */

/* A warp per slot. Bytes per slot: a row of the table, at a random place. */
template <typename T>
__global__ void __launch_bounds__(BLOCK)
    experts_kernel(struct tensor y, struct tensor shares, struct tensor slots, struct tensor x,
                   const T *experts)
{
    const int64_t item = my_item();
    const int lane = threadIdx.x % WARP;
    grid_wait();
    if (item >= shares.rows * shares.cols) {
        return;
    }
    const int64_t row = item / shares.cols;
    const int64_t j = item % shares.cols;
    const int64_t slot = (static_cast<const int32_t *>(slots.data) + row * slots.stride)[j];
    const T *const expert = experts + slot * x.cols;
    float dot = 0;
    for (int64_t c = lane; c < x.cols; c += WARP) {
        dot = fmaf(row_of(x, row)[c], widen(expert[c]), dot);
    }
    dot = warp_sum(dot);
    if (lane == 0) {
        row_of(y, row)[j] = row_of(shares, row)[j] * (0.5f * dot * erfcf(-dot * 0.70710678f));
    }
}

template <typename T>
void experts_launch(struct cuda *cu, struct tensor y, struct tensor shares, struct tensor slots,
                    struct tensor x, const struct weight *experts)
{
    LAUNCH(experts_kernel<T>, grid_of(shares.rows * shares.cols, ITEMS), dim3(BLOCK), 0,
           cuda_queue(cu), y, shares, slots, x,
           static_cast<const T *>(cuda_weight_of(experts)->data));
}

} // namespace

void cuda_rms_norm(struct cuda *cu, struct tensor y, struct tensor sum, struct tensor x,
                   struct tensor r, struct tensor gamma, float eps)
{
    LAUNCH(rms_kernel, grid_of(y.rows, ITEMS), dim3(BLOCK), 0, cuda_queue(cu), y, sum, x, r,
           static_cast<const float *>(gamma.data), eps);
    cuda_check(cu, "rms_norm");
}

void cuda_rope(struct cuda *cu, struct tensor x, struct tensor table, const struct step_view *view,
               int n_head)
{
    LAUNCH(rope_kernel, grid_of(x.rows * (x.cols / 2), BLOCK), dim3(BLOCK), 0, cuda_queue(cu), x,
           table, view, static_cast<int>(x.cols / n_head));
    cuda_check(cu, "rope");
}

void cuda_gate(struct cuda *cu, struct tensor y, struct tensor x, struct tensor g,
               enum gate_kind kind)
{
    LAUNCH(gate_kernel, grid_of(y.rows * y.cols, BLOCK), dim3(BLOCK), 0, cuda_queue(cu), y, x, g,
           kind);
    cuda_check(cu, "gate");
}

void cuda_pkm_experts(struct cuda *cu, struct tensor y, struct tensor shares, struct tensor slots,
                      struct tensor x, const struct weight *experts)
{
    if (experts->dtype == DTYPE_BF16) {
        experts_launch<uint16_t>(cu, y, shares, slots, x, experts);
    } else {
        experts_launch<float>(cu, y, shares, slots, x, experts);
    }
    cuda_check(cu, "pkm_experts");
}
