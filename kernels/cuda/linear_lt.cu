/* Linear with many rows and BF16 weights by cuBLASLt, where sums may depend on the number of rows
 * (options.fast_math): wgmma and its tiles are out of reach of mma.sync. Bias and ReLU are done by
 * its epilogue (whose ReLU may keep a NaN that ours makes 0); GELU by a pass over y after it, as
 * cuBLASLt's GELU is the approximation by tanh.
 *
 * cuBLASLt is column-major: our row-major y[n_tok, n_out] is its d[n_out, n_tok], W the transposed
 * a, x the b. Asking for an algorithm takes the host longer than a launch, so what was found is
 * kept in a small table by shape, a newer shape replacing an older one in the same place. */
#include "kernels/cuda/linear.cuh"

#include <stdlib.h>
#include <string.h>

enum { LT_PLANS = 128 };

struct lt_key {
    int n_tok, n_out, k;
    int y_alignment, bias_alignment; /* bytes */
    int64_t y_stride;
    cublasLtEpilogue_t epilogue;
};

struct lt_plan {
    bool is_set, is_possible;
    struct lt_key key;
    cublasLtMatmulDesc_t product;
    cublasLtMatrixLayout_t w, x, y;
    cublasLtMatmulAlgo_t algo;
};

struct linear_lt {
    struct lt_plan plan[LT_PLANS];
};

enum err_code linear_lt_new(struct linear_lt **lt, struct err *err)
{
    *lt = static_cast<struct linear_lt *>(calloc(1, sizeof **lt));
    return *lt != NULL ? ERR_OK
                       : err_set(err, ERR_MEMORY, "linear: no host memory left for its plans");
}

static void plan_clear(struct lt_plan *plan)
{
    if (plan->product != NULL) {
        (void)cublasLtMatmulDescDestroy(plan->product);
    }
    cublasLtMatrixLayout_t const layouts[3] = {plan->w, plan->x, plan->y};
    for (cublasLtMatrixLayout_t const layout : layouts) {
        if (layout != NULL) {
            (void)cublasLtMatrixLayoutDestroy(layout);
        }
    }
    memset(plan, 0, sizeof *plan);
}

void linear_lt_free(struct linear_lt *lt)
{
    if (lt != NULL) {
        for (struct lt_plan &plan : lt->plan) {
            plan_clear(&plan);
        }
        free(lt);
    }
}

/* Largest power of two up to 256 that divides the address. */
static int alignment_of(const void *data)
{
    int bytes = 4;
    while (bytes < 256 &&
           reinterpret_cast<uintptr_t>(data) % static_cast<unsigned>(2 * bytes) == 0) {
        bytes *= 2;
    }
    return bytes;
}

static struct lt_key key_of(const struct linear_args *a)
{
    struct lt_key key;
    memset(&key, 0, sizeof key); /* keys are compared as bytes */
    key.n_tok = a->n_tok;
    key.n_out = a->n_out;
    key.k = a->n_block * LINEAR_BLOCK_BF16;
    key.y_alignment = alignment_of(a->y);
    key.bias_alignment = alignment_of(a->bias);
    key.y_stride = a->y_stride;
    const bool relu = a->act == ACT_RELU;
    key.epilogue = a->bias != NULL ? relu ? CUBLASLT_EPILOGUE_RELU_BIAS : CUBLASLT_EPILOGUE_BIAS
                   : relu          ? CUBLASLT_EPILOGUE_RELU
                                   : CUBLASLT_EPILOGUE_DEFAULT;
    return key;
}

static size_t place_of(const struct lt_key *key)
{
    const uint64_t mixed = (static_cast<uint64_t>(key->n_tok) * 0x9e3779b97f4a7c15u) ^
                           (static_cast<uint64_t>(key->n_out) * 0xbf58476d1ce4e5b9u) ^
                           (static_cast<uint64_t>(key->k) * 0x94d049bb133111ebu) ^
                           static_cast<uint64_t>(key->epilogue);
    return static_cast<size_t>((mixed >> 32) % LT_PLANS);
}

/* Describes the product; false if cuBLASLt refuses. */
static bool plan_describe(struct lt_plan *plan, const struct linear_args *a)
{
    const struct lt_key *const key = &plan->key;
    const cublasOperation_t turned = CUBLAS_OP_T;
    const cudaDataType_t f32 = CUDA_R_32F;
    const uint64_t k = static_cast<uint64_t>(key->k);
    const uint64_t n_out = static_cast<uint64_t>(key->n_out);
    const uint64_t n_tok = static_cast<uint64_t>(key->n_tok);
    bool ok = cublasLtMatmulDescCreate(&plan->product, CUBLAS_COMPUTE_32F, CUDA_R_32F) ==
              CUBLAS_STATUS_SUCCESS;
    ok = ok && cublasLtMatmulDescSetAttribute(plan->product, CUBLASLT_MATMUL_DESC_TRANSA, &turned,
                                              sizeof turned) == CUBLAS_STATUS_SUCCESS;
    ok = ok && cublasLtMatmulDescSetAttribute(plan->product, CUBLASLT_MATMUL_DESC_EPILOGUE,
                                              &key->epilogue,
                                              sizeof key->epilogue) == CUBLAS_STATUS_SUCCESS;
    if (ok && a->bias != NULL) {
        ok = cublasLtMatmulDescSetAttribute(plan->product, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE,
                                            &f32, sizeof f32) == CUBLAS_STATUS_SUCCESS &&
             cublasLtMatmulDescSetAttribute(plan->product, CUBLASLT_MATMUL_DESC_BIAS_POINTER,
                                            &a->bias, sizeof a->bias) == CUBLAS_STATUS_SUCCESS;
    }
    ok = ok && cublasLtMatrixLayoutCreate(&plan->w, CUDA_R_16BF, k, n_out,
                                          static_cast<int64_t>(k)) == CUBLAS_STATUS_SUCCESS;
    ok = ok && cublasLtMatrixLayoutCreate(&plan->x, CUDA_R_16BF, k, n_tok,
                                          static_cast<int64_t>(k)) == CUBLAS_STATUS_SUCCESS;
    return ok && cublasLtMatrixLayoutCreate(&plan->y, CUDA_R_32F, n_out, n_tok, key->y_stride) ==
                     CUBLAS_STATUS_SUCCESS;
}

static bool plan_choose(struct cuda *cu, struct lt_plan *plan)
{
    cublasLtMatmulPreference_t wish = NULL;
    if (cublasLtMatmulPreferenceCreate(&wish) != CUBLAS_STATUS_SUCCESS) {
        return false;
    }
    const uint32_t y_alignment = static_cast<uint32_t>(plan->key.y_alignment);
    cublasLtMatmulHeuristicResult_t found;
    memset(&found, 0, sizeof found);
    int n_found = 0;
    const bool ok =
        cublasLtMatmulPreferenceSetAttribute(
            wish, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &cu->lt_workspace_bytes,
            sizeof cu->lt_workspace_bytes) == CUBLAS_STATUS_SUCCESS &&
        cublasLtMatmulPreferenceSetAttribute(wish, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
                                             &y_alignment,
                                             sizeof y_alignment) == CUBLAS_STATUS_SUCCESS &&
        cublasLtMatmulPreferenceSetAttribute(wish, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
                                             &y_alignment,
                                             sizeof y_alignment) == CUBLAS_STATUS_SUCCESS &&
        cublasLtMatmulAlgoGetHeuristic(cu->lt, plan->product, plan->w, plan->x, plan->y, plan->y,
                                       wish, 1, &found, &n_found) == CUBLAS_STATUS_SUCCESS &&
        n_found == 1 && found.state == CUBLAS_STATUS_SUCCESS;
    (void)cublasLtMatmulPreferenceDestroy(wish);
    plan->algo = found.algo;
    return ok;
}

static struct lt_plan *plan_find(struct cuda *cu, const struct linear_args *a)
{
    const struct lt_key key = key_of(a);
    struct lt_plan *const plan = &cu->linear->lt->plan[place_of(&key)];
    if (!plan->is_set || memcmp(&plan->key, &key, sizeof key) != 0) {
        plan_clear(plan);
        plan->is_set = true;
        plan->key = key;
        plan->is_possible = plan_describe(plan, a) && plan_choose(cu, plan);
    }
    return plan;
}

namespace
{

/* y = gelu(y), one thread per value of a row, rows in grid.y. Moves 8 bytes per value. */
__global__ void linear_gelu(float *y, int64_t y_stride, int n_out)
{
    const int out = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    if (out < n_out) {
        float *const at = y + blockIdx.y * y_stride + out;
        *at = linear_finish(*at, 0, ACT_GELU);
    }
}

} // namespace

bool linear_lt_run(struct cuda *cu, const struct linear_args *args)
{
    struct lt_plan *const plan = plan_find(cu, args);
    if (!plan->is_possible) {
        return false;
    }
    const float one = 1;
    const float zero = 0;
    cublasStatus_t status = CUBLAS_STATUS_SUCCESS;
    if (args->bias != NULL) {
        status = cublasLtMatmulDescSetAttribute(plan->product, CUBLASLT_MATMUL_DESC_BIAS_POINTER,
                                                &args->bias, sizeof args->bias);
    }
    if (status == CUBLAS_STATUS_SUCCESS) {
        status = cublasLtMatmul(cu->lt, plan->product, &one, args->w, plan->w, args->x, plan->x,
                                &zero, args->y, plan->y, args->y, plan->y, &plan->algo,
                                cu->lt_workspace, cu->lt_workspace_bytes, cu->stream);
    }
    if (status != CUBLAS_STATUS_SUCCESS) {
        cuda_fail(cu, ERR_DEVICE, "linear", cublasLtGetStatusString(status));
        return true;
    }
    if (args->act == ACT_GELU) {
        const dim3 grid(static_cast<unsigned>((args->n_out + 255) / 256),
                        static_cast<unsigned>(args->n_tok));
        LAUNCH(linear_gelu, grid, dim3(256), 0, cu->stream, args->y, args->y_stride, args->n_out);
        cuda_check(cu, "linear");
    }
    return true;
}
