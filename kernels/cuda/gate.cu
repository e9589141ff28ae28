/* Gates. Bound by memory, and for a few rows by the latency of a launch. Share of the bound
 * reached: not measured yet. */
#include "kernels/cuda/rows.cuh"

namespace
{

/* 1 / (1 + e^-g), by e^-|g|, which does not overflow. */
__device__ __forceinline__ float sigmoid(float g)
{
    const float e = expf(-fabsf(g));
    return (g > 0 ? 1 : e) / (e + 1);
}

/* A thread per number. Bytes per row: 12·d. rounded: for y once more. */
__global__ void __launch_bounds__(BLOCK)
    gate_kernel(struct tensor y, struct tensor x, struct tensor g, enum gate_kind kind,
                struct room rounded)
{
    const int64_t element = my_element();
    grid_wait();
    if (element >= y.rows * y.cols) {
        return;
    }
    const int64_t row = element / y.cols;
    const int64_t c = element % y.cols;
    const float in = row_of(g, row)[kind == GATE_SILU ? c : 0];
    const float share = kind == GATE_FACTOR ? in : (kind == GATE_SILU ? in : 1) * sigmoid(in);
    const float out = row_of(x, row)[c] * share;
    row_of(y, row)[c] = out;
    if (rounded.data != NULL) {
        room_store(rounded, element, out);
    }
}

} // namespace

void cuda_gate(struct cuda *cu, struct tensor y, struct tensor x, struct tensor g,
               enum gate_kind kind)
{
    LAUNCH(gate_kernel, grid_of(y.rows * y.cols, BLOCK), dim3(BLOCK), 0, cuda_queue(cu), y, x, g,
           kind, linear_room(cu, y));
    cuda_check(cu, "gate");
}
