/* The linear layer: y = act(x·Wᵀ + bias), weights row-major. */
#include "kernels/cuda/cuda.cuh"

namespace
{

struct linear_args {
    float *y;
    const float *x, *bias; /* bias NULL: none */
    const void *w;         /* [n_out, n_in] */
    int64_t y_stride, x_stride;
    int n_tok, n_out, n_in;
    enum act act;
    bool is_bf16;
};

__device__ float act_apply(float z, enum act act)
{
    if (act == ACT_RELU) {
        return z > 0 ? z : 0;
    }
    const float half = 0.5f * z;
    return act == ACT_GELU ? fmaf(half, erff(z * 0.70710678118654752f), half) : z;
}

__global__ void linear_kernel(struct linear_args a)
{
    const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= static_cast<int64_t>(a.n_tok) * a.n_out) {
        return;
    }
    const int64_t r = i / a.n_out;
    const int64_t o = i % a.n_out;
    const float *const x = a.x + r * a.x_stride;
    float sum = 0;
    for (int k = 0; k < a.n_in; k++) {
        const int64_t at = o * a.n_in + k;
        sum = a.is_bf16 ? fmaf(bf16_widen(bf16_round(x[k])),
                               bf16_widen(static_cast<const uint16_t *>(a.w)[at]), sum)
                        : fmaf(x[k], static_cast<const float *>(a.w)[at], sum);
    }
    sum = a.bias == NULL ? sum : sum + a.bias[o];
    a.y[r * a.y_stride + o] = act_apply(sum, a.act);
}

} // namespace

void cuda_linear(struct cuda *cu, struct tensor y, struct tensor x, const struct weight *w,
                 struct tensor bias, enum act act)
{
    const struct linear_args a = {
        .y = static_cast<float *>(y.data),
        .x = static_cast<const float *>(x.data),
        .bias = static_cast<const float *>(bias.data),
        .w = w->data,
        .y_stride = y.stride,
        .x_stride = x.stride,
        .n_tok = static_cast<int>(y.rows),
        .n_out = static_cast<int>(w->rows),
        .n_in = static_cast<int>(w->cols),
        .act = act,
        .is_bf16 = w->dtype == DTYPE_BF16,
    };
    const int64_t n = y.rows * y.cols;
    LAUNCH(linear_kernel, dim3(static_cast<unsigned>((n + 255) / 256)), dim3(256), 0, cu->stream,
           a);
    cuda_check(cu, "linear");
}

size_t linear_bytes(int64_t n_out, int64_t n_in, enum dtype dtype)
{
    return static_cast<size_t>(n_out) * static_cast<size_t>(n_in) * dtype_bytes(dtype);
}

void linear_pack(void *dst, const struct tensor *host, enum dtype dtype, bool row_major)
{
    (void)row_major;
    for (int64_t r = 0; r < host->rows; r++) {
        for (int64_t c = 0; c < host->cols; c++) {
            const float value = cuda_host_value(host, r, c);
            if (dtype == DTYPE_BF16) {
                static_cast<uint16_t *>(dst)[r * host->cols + c] = bf16_round(value);
            } else {
                static_cast<float *>(dst)[r * host->cols + c] = value;
            }
        }
    }
}

enum err_code linear_reserve(struct cuda *cu, int64_t n_in, enum dtype dtype, struct err *err)
{
    (void)cu;
    (void)n_in;
    (void)dtype;
    (void)err;
    return ERR_OK;
}

void linear_release(struct cuda *cu)
{
    (void)cu;
}
