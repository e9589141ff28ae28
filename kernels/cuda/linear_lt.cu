/* Linear with many rows by cuBLASLt, where sums may depend on the number of rows (fast_math): wgmma
 * and its tiles are out of reach of mma.sync. BF16 weights multiply rows rounded to BF16; F32 ones
 * rows in F32, every product and sum of them in F32 (CUBLAS_COMPUTE_32F: no TF32, which has 10 bits
 * of fraction and is not what F32 was asked for). Bias and ReLU are done by its epilogue (whose
 * ReLU may keep a NaN that ours makes 0); GELU by a pass over y after it, as cuBLASLt's GELU is the
 * approximation by tanh.
 *
 * cuBLASLt is column-major: our row-major y[n_tok, n_out] is its d[n_out, n_tok], W the transposed
 * a, x the b. Asking for an algorithm takes the host longer than a launch, so what was found is
 * kept in a small table by shape, a newer shape replacing an older one in the same place. */
#include "kernels/cuda/backend.cuh"
#include "kernels/cuda/linear.cuh"
#include "kernels/cuda/lt_library.cuh"

#include <stdlib.h>
#include <string.h>

#if LT_IS_BUILT

enum { LT_PLANS = 128, LT_WORKSPACE_BYTES = 32 << 20 };

struct lt_key {
    enum dtype dtype; /* of weights and rows */
    int n_tok, n_out, k;
    int x_alignment, y_alignment, bias_alignment; /* bytes */
    int64_t x_stride, y_stride;
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
    struct lt_library library;
    cublasLtHandle_t handle;
    void *workspace; /* Owner: device memory */
    size_t workspace_bytes;
    struct lt_plan plan[LT_PLANS];
};

static void plan_clear(const struct lt_library *lt, struct lt_plan *plan)
{
    if (plan->product != NULL) {
        (void)lt->cublasLtMatmulDescDestroy(plan->product);
    }
    cublasLtMatrixLayout_t const layouts[3] = {plan->w, plan->x, plan->y};
    for (cublasLtMatrixLayout_t const layout : layouts) {
        if (layout != NULL) {
            (void)lt->cublasLtMatrixLayoutDestroy(layout);
        }
    }
    memset(plan, 0, sizeof *plan);
}

/* ---- opening -------------------------------------------------------------------------------- */

static enum err_code start(struct cuda *cu, struct linear_lt *lt, struct err *err)
{
    const enum err_code code = lt_library_open(&lt->library, err);
    if (code != ERR_OK) {
        return code;
    }
    const cublasStatus_t status = lt->library.cublasLtCreate(&lt->handle);
    if (status != CUBLAS_STATUS_SUCCESS) {
        lt->handle = NULL;
        return err_set(err, ERR_UNSUPPORTED,
                       "cuBLASLt does not start: %.100s; install that of the driver's version, or "
                       "do without (deterministic on)",
                       lt->library.cublasLtGetStatusString(status));
    }
    lt->workspace_bytes = LT_WORKSPACE_BYTES;
    return resource_device_new(cu, &lt->workspace, lt->workspace_bytes,
                               "matrix products' workspace", err);
}

enum err_code linear_lt_open(struct cuda *cu, struct err *err)
{
    cu->lt = static_cast<struct linear_lt *>(calloc(1, sizeof *cu->lt));
    if (cu->lt == NULL) {
        return err_set(err, ERR_MEMORY, "linear: no host memory left for its plans");
    }
    const enum err_code code = start(cu, cu->lt, err);
    if (code != ERR_OK) {
        linear_lt_close(cu);
    }
    return code;
}

void linear_lt_close(struct cuda *cu)
{
    struct linear_lt *const lt = cu->lt;
    if (lt == NULL) {
        return;
    }
    for (struct lt_plan &plan : lt->plan) {
        plan_clear(&lt->library, &plan);
    }
    if (lt->handle != NULL) {
        (void)lt->library.cublasLtDestroy(lt->handle);
    }
    (void)cudaFree(lt->workspace);
    free(lt);
    cu->lt = NULL;
}

/* ---- plans ---------------------------------------------------------------------------------- */

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

static struct lt_key key_of(const struct linear_args *a, enum dtype dtype)
{
    struct lt_key key;
    memset(&key, 0, sizeof key); /* keys are compared as bytes */
    key.dtype = dtype;
    key.n_tok = a->n_tok;
    key.n_out = a->n_out;
    key.k = a->n_block * (dtype == DTYPE_BF16 ? LINEAR_BLOCK_BF16 : LINEAR_BLOCK_F32);
    key.x_alignment = alignment_of(a->x);
    key.y_alignment = alignment_of(a->y);
    key.bias_alignment = alignment_of(a->bias);
    key.x_stride = a->x_stride;
    key.y_stride = a->y_stride;
    const bool relu = a->act == ACT_RELU;
    key.epilogue = a->bias != NULL ? relu ? CUBLASLT_EPILOGUE_RELU_BIAS : CUBLASLT_EPILOGUE_BIAS
                   : relu          ? CUBLASLT_EPILOGUE_RELU
                                   : CUBLASLT_EPILOGUE_DEFAULT;
    return key;
}

/* FNV-1a of all that tells plans apart. */
static size_t place_of(const struct lt_key *key)
{
    const unsigned char *const bytes = reinterpret_cast<const unsigned char *>(key);
    uint64_t hash = 0xcbf29ce484222325u;
    for (size_t i = 0; i < sizeof *key; i++) {
        hash = (hash ^ bytes[i]) * 0x100000001b3u;
    }
    return static_cast<size_t>((hash >> 32) % LT_PLANS);
}

static bool attribute_set(const struct lt_library *lt, struct lt_plan *plan,
                          cublasLtMatmulDescAttributes_t which, const void *value, size_t bytes)
{
    return lt->cublasLtMatmulDescSetAttribute(plan->product, which, value, bytes) ==
           CUBLAS_STATUS_SUCCESS;
}

/* Describes the product; false if cuBLASLt refuses. */
static bool plan_describe(const struct lt_library *lt, struct lt_plan *plan, const float *bias)
{
    const struct lt_key *const key = &plan->key;
    const cublasOperation_t turned = CUBLAS_OP_T;
    const cudaDataType_t f32 = CUDA_R_32F;
    const cudaDataType_t type = key->dtype == DTYPE_BF16 ? CUDA_R_16BF : CUDA_R_32F;
    const uint64_t k = static_cast<uint64_t>(key->k);
    const uint64_t n_out = static_cast<uint64_t>(key->n_out);
    const uint64_t n_tok = static_cast<uint64_t>(key->n_tok);
    bool ok = lt->cublasLtMatmulDescCreate(&plan->product, CUBLAS_COMPUTE_32F, CUDA_R_32F) ==
              CUBLAS_STATUS_SUCCESS;
    ok = ok && attribute_set(lt, plan, CUBLASLT_MATMUL_DESC_TRANSA, &turned, sizeof turned) &&
         attribute_set(lt, plan, CUBLASLT_MATMUL_DESC_EPILOGUE, &key->epilogue,
                       sizeof key->epilogue);
    if (ok && bias != NULL) {
        ok = attribute_set(lt, plan, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &f32, sizeof f32) &&
             attribute_set(lt, plan, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias, sizeof bias);
    }
    ok = ok && lt->cublasLtMatrixLayoutCreate(&plan->w, type, k, n_out, static_cast<int64_t>(k)) ==
                   CUBLAS_STATUS_SUCCESS;
    ok = ok && lt->cublasLtMatrixLayoutCreate(&plan->x, type, k, n_tok, key->x_stride) ==
                   CUBLAS_STATUS_SUCCESS;
    return ok && lt->cublasLtMatrixLayoutCreate(&plan->y, f32, n_out, n_tok, key->y_stride) ==
                     CUBLAS_STATUS_SUCCESS;
}

/* Says what an algorithm may count on; false if cuBLASLt refuses. Weights keep the default, the
 * alignment of memory as it is allocated. */
static bool wish_fill(const struct linear_lt *lt, cublasLtMatmulPreference_t wish,
                      const struct lt_key *key)
{
    const struct {
        cublasLtMatmulPreferenceAttributes_t which;
        int bytes;
    } alignments[3] = {{CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, key->x_alignment},
                       {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, key->y_alignment},
                       {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, key->y_alignment}};
    bool ok = lt->library.cublasLtMatmulPreferenceSetAttribute(
                  wish, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &lt->workspace_bytes,
                  sizeof lt->workspace_bytes) == CUBLAS_STATUS_SUCCESS;
    for (const auto &alignment : alignments) {
        const uint32_t bytes = static_cast<uint32_t>(alignment.bytes);
        ok = ok && lt->library.cublasLtMatmulPreferenceSetAttribute(
                       wish, alignment.which, &bytes, sizeof bytes) == CUBLAS_STATUS_SUCCESS;
    }
    return ok;
}

static bool plan_choose(const struct linear_lt *lt, struct lt_plan *plan)
{
    cublasLtMatmulPreference_t wish = NULL;
    if (lt->library.cublasLtMatmulPreferenceCreate(&wish) != CUBLAS_STATUS_SUCCESS) {
        return false;
    }
    cublasLtMatmulHeuristicResult_t found;
    memset(&found, 0, sizeof found);
    int n_found = 0;
    const bool ok = wish_fill(lt, wish, &plan->key) &&
                    lt->library.cublasLtMatmulAlgoGetHeuristic(
                        lt->handle, plan->product, plan->w, plan->x, plan->y, plan->y, wish, 1,
                        &found, &n_found) == CUBLAS_STATUS_SUCCESS &&
                    n_found == 1 && found.state == CUBLAS_STATUS_SUCCESS;
    (void)lt->library.cublasLtMatmulPreferenceDestroy(wish);
    plan->algo = found.algo;
    return ok;
}

static struct lt_plan *plan_find(struct linear_lt *lt, const struct linear_args *a,
                                 enum dtype dtype)
{
    const struct lt_key key = key_of(a, dtype);
    struct lt_plan *const plan = &lt->plan[place_of(&key)];
    if (!plan->is_set || memcmp(&plan->key, &key, sizeof key) != 0) {
        plan_clear(&lt->library, plan);
        plan->is_set = true;
        plan->key = key;
        plan->is_possible = plan_describe(&lt->library, plan, a->bias) && plan_choose(lt, plan);
    }
    return plan;
}

/* ---- running -------------------------------------------------------------------------------- */

namespace
{

/* y = gelu(y), one thread per value of a row, rows in grid.y. Moves 8 bytes per value. */
__global__ void linear_gelu(float *y, int64_t y_stride, int n_out)
{
    const int out = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    grid_wait();
    if (out < n_out) {
        float *const at = y + blockIdx.y * y_stride + out;
        *at = linear_finish(*at, 0, ACT_GELU);
    }
}

} // namespace

bool linear_lt_run(struct cuda *cu, const struct linear_args *args, enum dtype dtype)
{
    struct linear_lt *const lt = cu->lt;
    struct lt_plan *const plan = plan_find(lt, args, dtype);
    if (!plan->is_possible) {
        return false;
    }
    const float one = 1;
    const float zero = 0;
    cublasStatus_t status = CUBLAS_STATUS_SUCCESS;
    if (args->bias != NULL) {
        status = lt->library.cublasLtMatmulDescSetAttribute(
            plan->product, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &args->bias, sizeof args->bias);
    }
    if (status == CUBLAS_STATUS_SUCCESS) {
        status = lt->library.cublasLtMatmul(
            lt->handle, plan->product, &one, args->w, plan->w, args->x, plan->x, &zero, args->y,
            plan->y, args->y, plan->y, &plan->algo, lt->workspace, lt->workspace_bytes, cu->stream);
    }
    if (status != CUBLAS_STATUS_SUCCESS) {
        cuda_fail(cu, ERR_DEVICE, "linear", lt->library.cublasLtGetStatusString(status));
        return true;
    }
    if (args->act == ACT_GELU) {
        const dim3 grid(static_cast<unsigned>((args->n_out + 255) / 256),
                        static_cast<unsigned>(args->n_tok));
        LAUNCH(linear_gelu, grid, dim3(256), 0, cuda_queue(cu), args->y, args->y_stride,
               args->n_out);
        cuda_check(cu, "linear");
    }
    return true;
}

#endif
