/* cuBLASLt, a library of its own as the real one is (libcublasLt.so.0). Matrix products by plain
 * loops, as a kernel of one thread: so they wait in the stream, are captured into graphs and fail
 * where launches fail. Tests spend much of their time in them: so operands are widened once, and
 * LANES products of each of ROWS rows summed side by side.
 *
 * Column-major as cuBLASLt: d[m, n] = op(a)[m, k] · op(b)[k, n] · alpha + c · beta, then the
 * epilogue. Inputs both F32, both BF16 or both F16, F32 output, F32 arithmetic (no TF32). A call is
 * refused where addresses are less aligned than its algorithm was asked for with (256 bytes where
 * nothing was said). A bias begins at a 16-byte address, or all ends: on an H200 kernels of 13.0
 * fault there.
 *
 * There are the algorithms below; they differ in how many parts an element's sum is made of. The
 * first, and best, takes as many as there are columns of d, up to four for few and five for many:
 * like the real library's, its bits depend on how many columns share the call. CUDA_HOST_LT names
 * those there are by their letters; all but the last two, which no trial finds out, where it is not
 * set; CUDA_HOST_LT_F16 does so for F16 inputs. With CUDA_HOST_LT_FAIL every product fails. */
#include "tests/cuda_host/double.h"

#include <algorithm>
#include <cublasLt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <vector>

struct cuda_host_lt {
    int unused;
};

struct cuda_host_matmul {
    cublasOperation_t op_a, op_b;
    cublasLtEpilogue_t epilogue;
    const float *bias;
};

struct cuda_host_layout {
    cudaDataType type;
    uint64_t rows, cols;
    int64_t ld;
};

enum { OPERAND_N = 4 }; /* a, b, c, d */

struct cuda_host_preference {
    size_t workspace_bytes;
    uint32_t alignment[OPERAND_N];
};

namespace
{

/* What cuBLASLt recommends, the best first. */
struct algorithm {
    char letter;
    int split, reduction; /* as it says itself */
};
const struct algorithm algorithms[] = {
    {'v', 1, CUBLASLT_REDUCTION_SCHEME_NONE},    /* varies with the number of columns */
    {'l', 1, CUBLASLT_REDUCTION_SCHEME_NONE},    /* likewise, from 100 columns on */
    {'p', 1, CUBLASLT_REDUCTION_SCHEME_NONE},    /* varies with a column's place */
    {'a', 1, CUBLASLT_REDUCTION_SCHEME_NONE},    /* varies with the address of d */
    {'s', 4, CUBLASLT_REDUCTION_SCHEME_NONE},    /* splits its sums */
    {'r', 1, CUBLASLT_REDUCTION_SCHEME_INPLACE}, /* likewise, and says it otherwise */
    {'n', 1, CUBLASLT_REDUCTION_SCHEME_NONE},    /* refuses 100 columns or more */
    {'w', 1, CUBLASLT_REDUCTION_SCHEME_NONE},    /* is wrong */
    {'b', 1, CUBLASLT_REDUCTION_SCHEME_NONE},    /* is wrong with bias */
    {'g', 1, CUBLASLT_REDUCTION_SCHEME_NONE},    /* is good */
    {'k', 1, CUBLASLT_REDUCTION_SCHEME_NONE},    /* is good, in bits of its own */
    {'x', 1, CUBLASLT_REDUCTION_SCHEME_NONE},    /* is wrong where a value of b exceeds 1 */
    {'y', 1, CUBLASLT_REDUCTION_SCHEME_NONE},    /* varies with the number of columns there */
};
enum {
    N_ALGORITHM = sizeof algorithms / sizeof *algorithms,
    N_USUAL = N_ALGORITHM - 2,
    MANY = 100,
    PART_MAX = 5,
    LANES = 4,
    ROWS = 4
};

struct matrix {
    const void *data;
    cudaDataType type;
    int64_t row_step, col_step;
};

struct product {
    struct matrix a, b;
    const float *c;
    float *d;
    const float *bias;
    int64_t m, n, k, c_ld, d_ld;
    float alpha, beta;
    bool relu;
    char letter; /* of the algorithm */
};

inline float value(const struct matrix &matrix, int64_t row, int64_t col)
{
    const int64_t at = row * matrix.row_step + col * matrix.col_step;
    if (matrix.type == CUDA_R_32F) {
        return static_cast<const float *>(matrix.data)[at];
    }
    const uint16_t bits = static_cast<const uint16_t *>(matrix.data)[at];
    return matrix.type == CUDA_R_16F ? f16_to_f32(bits) : bf16_to_f32(bits);
}

/* The values of a matrix as F32, each row of n_inner at a multiple of LANES, zeros behind it and
 * behind them all, up to a multiple of ROWS: [n_outer][n_inner] of a matrix's rows, or of its
 * columns. */
std::vector<float> widened(const struct matrix &matrix, int64_t n_outer, int64_t n_inner,
                           bool is_by_column)
{
    const int64_t stride = (n_inner + LANES - 1) / LANES * LANES;
    std::vector<float> values(static_cast<size_t>((n_outer + ROWS - 1) / ROWS * ROWS * stride));
    for (int64_t outer = 0; outer < n_outer; ++outer) {
        for (int64_t inner = 0; inner < n_inner; ++inner) {
            values[static_cast<size_t>(outer * stride + inner)] =
                is_by_column ? value(matrix, inner, outer) : value(matrix, outer, inner);
        }
    }
    return values;
}

/* Of a column's sums. is_large: it has a value above 1, which the numbers that algorithms are tried
 * with may not have. */
int part_count(const struct product &p, int64_t col, bool is_large)
{
    const int few = p.n < 4 ? static_cast<int>(p.n) : 4;
    switch (p.letter) {
    case 'v': return p.n < 64 ? few : +PART_MAX;
    case 'l': return p.n < MANY ? 2 : 3;
    case 'k': return 3;
    case 'p': return col % 32 < 16 ? 2 : 3;
    case 'y': return p.n >= 32 && is_large ? 3 : 2;
    case 'a': return reinterpret_cast<uintptr_t>(p.d) % 32 == 0 ? 2 : 3;
    default: return 2;
    }
}

/* Of each of ROWS rows of x with y, n_chunk · LANES products: chunk i is added to part i % N. */
template <int N> void sum_products(float *sum, const float *x, const float *y, int64_t n_chunk)
{
    typedef float lanes __attribute__((vector_size(LANES * sizeof(float))));
    const auto *const xs = reinterpret_cast<const lanes *>(x);
    const auto *const ys = reinterpret_cast<const lanes *>(y);
    lanes part[ROWS][N] = {};
    for (int64_t at = 0; at < n_chunk; at += N) {
#pragma GCC unroll 8
        for (int i = 0; i < N; ++i) {
            if (at + i < n_chunk) {
#pragma GCC unroll 8
                for (int r = 0; r < ROWS; ++r) {
                    part[r][i] += xs[r * n_chunk + at + i] * ys[at + i];
                }
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
        float of[PART_MAX] = {};
#pragma GCC unroll 8
        for (int i = 0; i < N; ++i) {
            of[i] = (part[r][i][0] + part[r][i][1]) + (part[r][i][2] + part[r][i][3]);
        }
        sum[r] = (of[0] + of[1]) + (of[2] + of[3]) + of[4];
    }
}

typedef void (*sum_fn)(float *sum, const float *x, const float *y, int64_t n_chunk);
const sum_fn sums[PART_MAX] = {sum_products<1>, sum_products<2>, sum_products<3>, sum_products<4>,
                               sum_products<PART_MAX>};

void product_run(const struct product p)
{
    const std::vector<float> a = widened(p.a, p.m, p.k, false);
    const std::vector<float> b = widened(p.b, p.n, p.k, true);
    const int64_t n_chunk = (p.k + LANES - 1) / LANES;
    for (int64_t col = 0; col < p.n; ++col) {
        const float *const y = &b[static_cast<size_t>(col * n_chunk * LANES)];
        const bool is_large = std::any_of(y, y + p.k, [](float x) { return x > 1; });
        const bool is_wrong = p.letter == 'w' || (p.letter == 'b' && p.bias != nullptr) ||
                              (p.letter == 'x' && is_large);
        const float error = is_wrong ? 1 : 0;
        const sum_fn sum_of = sums[part_count(p, col, is_large) - 1];
        float part[ROWS];
        for (int64_t row = 0; row < p.m; ++row) {
            if (row % ROWS == 0) {
                sum_of(part, &a[static_cast<size_t>(row * n_chunk * LANES)], y, n_chunk);
            }
            float sum = part[row % ROWS] * p.alpha + error;
            if (p.beta != 0) {
                sum += p.beta * p.c[row + col * p.c_ld];
            }
            if (p.bias != nullptr) {
                sum += p.bias[row];
            }
            p.d[row + col * p.d_ld] = p.relu && sum < 0 ? 0 : sum;
        }
    }
}

bool matrix_of(struct matrix *matrix, const void *data, const struct cuda_host_layout *layout,
               cublasOperation_t op, uint64_t rows, uint64_t cols)
{
    const bool is_turned = op == CUBLAS_OP_T;
    *matrix = {data, layout->type, is_turned ? layout->ld : 1, is_turned ? 1 : layout->ld};
    return (is_turned ? layout->cols : layout->rows) == rows &&
           (is_turned ? layout->rows : layout->cols) == cols &&
           layout->ld >= static_cast<int64_t>(layout->rows) &&
           (layout->type == CUDA_R_32F || layout->type == CUDA_R_16BF ||
            layout->type == CUDA_R_16F);
}

/* Whether address is what the algorithm counts on; without one, any is. */
bool is_aligned(const cublasLtMatmulAlgo_t *algo, int operand, const void *address)
{
    const uint64_t bytes = algo == nullptr ? 1 : algo->data[operand];
    return reinterpret_cast<uintptr_t>(address) % bytes == 0;
}

/* Without one, the best. */
const struct algorithm *algorithm_of(const cublasLtMatmulAlgo_t *algo)
{
    return &algorithms[algo == nullptr ? 0 : algo->data[OPERAND_N]];
}

} // namespace

size_t cublasLtGetVersion(void)
{
    return 1234;
}

const char *cublasLtGetStatusString(cublasStatus_t status)
{
    return status == CUBLAS_STATUS_SUCCESS ? "success" : "failure";
}

cublasStatus_t cublasLtCreate(cublasLtHandle_t *lt)
{
    if (api_refused() != cudaSuccess) {
        return CUBLAS_STATUS_NOT_INITIALIZED;
    }
    *lt = new cuda_host_lt();
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtDestroy(cublasLtHandle_t lt)
{
    delete lt;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *desc, cublasComputeType_t compute,
                                        cudaDataType_t scale)
{
    if (compute != CUBLAS_COMPUTE_32F || scale != CUDA_R_32F) {
        return CUBLAS_STATUS_NOT_SUPPORTED;
    }
    *desc = new cuda_host_matmul{CUBLAS_OP_N, CUBLAS_OP_N, CUBLASLT_EPILOGUE_DEFAULT, nullptr};
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t desc)
{
    delete desc;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t desc,
                                              cublasLtMatmulDescAttributes_t attr,
                                              const void *value, size_t bytes)
{
    void *to;
    switch (attr) {
    case CUBLASLT_MATMUL_DESC_TRANSA: to = &desc->op_a; break;
    case CUBLASLT_MATMUL_DESC_TRANSB: to = &desc->op_b; break;
    case CUBLASLT_MATMUL_DESC_EPILOGUE: to = &desc->epilogue; break;
    case CUBLASLT_MATMUL_DESC_BIAS_POINTER: to = &desc->bias; break;
    case CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE:
        return bytes == sizeof(cudaDataType) &&
                       *static_cast<const cudaDataType *>(value) == CUDA_R_32F
                   ? CUBLAS_STATUS_SUCCESS
                   : CUBLAS_STATUS_NOT_SUPPORTED;
    default: return CUBLAS_STATUS_NOT_SUPPORTED;
    }
    if (bytes != (attr == CUBLASLT_MATMUL_DESC_BIAS_POINTER ? sizeof(void *) : sizeof(int))) {
        return CUBLAS_STATUS_INVALID_VALUE;
    }
    memcpy(to, value, bytes);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *layout, cudaDataType type,
                                          uint64_t rows, uint64_t cols, int64_t ld)
{
    *layout = new cuda_host_layout{type, rows, cols, ld};
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout)
{
    delete layout;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *preference)
{
    *preference = new cuda_host_preference{0, {256, 256, 256, 256}};
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference)
{
    delete preference;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t attr,
                                                    const void *value, size_t bytes)
{
    const int operand = attr - CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES;
    if (attr == CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK && bytes == sizeof(uint32_t)) {
        return CUBLAS_STATUS_SUCCESS; /* and is not heeded: who asks is to look at what comes */
    }
    if (attr == CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES && bytes == sizeof(size_t)) {
        memcpy(&preference->workspace_bytes, value, bytes);
    } else if (operand >= 0 && operand < OPERAND_N && bytes == sizeof(uint32_t)) {
        memcpy(&preference->alignment[operand], value, bytes);
    } else {
        return CUBLAS_STATUS_INVALID_VALUE;
    }
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t lt, cublasLtMatmulDesc_t desc,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t preference, int n_wanted,
                                              cublasLtMatmulHeuristicResult_t *results,
                                              int *n_result)
{
    (void)lt, (void)desc, (void)c, (void)d;
    if (n_wanted < 1) {
        return CUBLAS_STATUS_INVALID_VALUE;
    }
    if (a->type != b->type) {
        *n_result = 0;
        return CUBLAS_STATUS_NOT_SUPPORTED;
    }
    const char *const f16_letters =
        a->type == CUDA_R_16F ? getenv("CUDA_HOST_LT_F16") : static_cast<const char *>(nullptr);
    const char *const letters = f16_letters != nullptr ? f16_letters : getenv("CUDA_HOST_LT");
    int n = 0;
    for (int i = 0; i < N_ALGORITHM && n < n_wanted; ++i) {
        if (letters == nullptr ? i >= N_USUAL : strchr(letters, algorithms[i].letter) == nullptr) {
            continue;
        }
        results[n] = cublasLtMatmulHeuristicResult_t();
        for (int operand = 0; operand < OPERAND_N; ++operand) {
            results[n].algo.data[operand] = preference->alignment[operand];
        }
        results[n].algo.data[OPERAND_N] = static_cast<uint64_t>(i);
        results[n++].wavesCount = 1;
    }
    *n_result = n;
    return n > 0 ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_SUPPORTED;
}

cublasStatus_t cublasLtMatmulAlgoConfigGetAttribute(const cublasLtMatmulAlgo_t *algo,
                                                    cublasLtMatmulAlgoConfigAttributes_t attr,
                                                    void *value, size_t bytes, size_t *n_written)
{
    const struct algorithm *const algorithm = algorithm_of(algo);
    int number = 0;
    switch (attr) {
    case CUBLASLT_ALGO_CONFIG_ID: number = algorithm->letter; break;
    case CUBLASLT_ALGO_CONFIG_TILE_ID: number = 20; break;
    case CUBLASLT_ALGO_CONFIG_SPLITK_NUM: number = algorithm->split; break;
    case CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME: number = algorithm->reduction; break;
    case CUBLASLT_ALGO_CONFIG_STAGES_ID: number = 8; break;
    default: return CUBLAS_STATUS_INVALID_VALUE;
    }
    if (bytes != sizeof number) {
        return CUBLAS_STATUS_INVALID_VALUE;
    }
    memcpy(value, &number, bytes);
    *n_written = bytes;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t lt, cublasLtMatmulDesc_t desc, const void *alpha,
                              const void *a, cublasLtMatrixLayout_t a_layout, const void *b,
                              cublasLtMatrixLayout_t b_layout, const void *beta, const void *c,
                              cublasLtMatrixLayout_t c_layout, void *d,
                              cublasLtMatrixLayout_t d_layout, const cublasLtMatmulAlgo_t *algo,
                              void *workspace, size_t workspace_bytes, cudaStream_t stream)
{
    (void)lt, (void)workspace, (void)workspace_bytes;
    struct product p = {};
    const uint64_t m = d_layout->rows, n = d_layout->cols;
    const uint64_t k = desc->op_a == CUBLAS_OP_T ? a_layout->rows : a_layout->cols;
    if (!matrix_of(&p.a, a, a_layout, desc->op_a, m, k) ||
        !matrix_of(&p.b, b, b_layout, desc->op_b, k, n) || d_layout->type != CUDA_R_32F ||
        c_layout->type != CUDA_R_32F || a_layout->type != b_layout->type ||
        !is_aligned(algo, 0, a) || !is_aligned(algo, 1, b) || !is_aligned(algo, 2, c) ||
        !is_aligned(algo, 3, d)) {
        return CUBLAS_STATUS_INVALID_VALUE;
    }
    p.letter = algorithm_of(algo)->letter;
    if (p.letter == 'n' && n >= MANY) {
        return CUBLAS_STATUS_NOT_SUPPORTED;
    }
    if (getenv("CUDA_HOST_LT_FAIL") != nullptr) {
        return CUBLAS_STATUS_EXECUTION_FAILED;
    }
    p.c = static_cast<const float *>(c);
    p.d = static_cast<float *>(d);
    p.m = static_cast<int64_t>(m);
    p.n = static_cast<int64_t>(n);
    p.k = static_cast<int64_t>(k);
    p.c_ld = c_layout->ld;
    p.d_ld = d_layout->ld;
    p.alpha = *static_cast<const float *>(alpha);
    p.beta = *static_cast<const float *>(beta);
    if ((desc->epilogue & CUBLASLT_EPILOGUE_BIAS) != 0) {
        p.bias = desc->bias;
    }
    if (reinterpret_cast<uintptr_t>(p.bias) % 16 != 0) {
        (void)fprintf(stderr, "cublasLtMatmul: a bias at an address that is no multiple of 16\n");
        abort();
    }
    p.relu = (desc->epilogue & CUBLASLT_EPILOGUE_RELU) != 0;
    const cudaError_t error =
        cuda_host_call_new("cublasLtMatmul", __FILE__, __LINE__, stream, 1, 1, 0, product_run, p);
    return error == cudaSuccess ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_EXECUTION_FAILED;
}
