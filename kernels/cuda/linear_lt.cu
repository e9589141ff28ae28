/* Matrix products of rows of requests by cuBLASLt: wgmma and its tiles are out of reach of
 * mma.sync.
 *
 * By weights of BF16 or F16 rows, rounded to their type, are multiplied by algorithms that give the
 * same bits, for each shape of a weight one for each size of a call, chosen when the first weight
 * of that shape is made (linear_choose.cu says how): so a row's bits depend on the row alone.
 * Weights for which no algorithm is good enough are packed for our own kernels, which then compute
 * all of their products. A call has a multiple of LT_ROWS rows, so that cuBLASLt never sees a row
 * alone: the rows that are left over are multiplied together with those before them, once more and
 * to the same bits; fewer than LT_ROWS, filled up with zeros, in memory of ours. Where a call
 * fails, our own kernels compute this product and all later ones: of weights that lie as cuBLASLt
 * wants them, too.
 *
 * With fast math (--deterministic off) the algorithm is chosen anew for each number of rows, may
 * split sums, and multiplies many drawn tokens, too. F32 weights then go to cuBLASLt as well, every
 * product and sum in F32 (CUBLAS_COMPUTE_32F: no TF32, which has 10 bits of fraction and is not
 * what F32 was asked for).
 *
 * Bias and ReLU are done by its epilogue (whose ReLU may keep a NaN that ours makes 0); GELU by a
 * pass over y after it, as cuBLASLt's GELU is the approximation by tanh. That pass leaves rounded
 * rows where the next product alone reads them.
 *
 * cuBLASLt is column-major: our row-major y[n_tok, n_out] is its d[n_out, n_tok], W the transposed
 * a, x the b. Describing a product takes the host longer than a launch, so what was described is
 * kept in a small table by shape, a newer shape replacing an older one in the same place. */
#include "kernels/cuda/backend.cuh"
#include "kernels/cuda/linear_lt.cuh"
#include "kernels/fnv.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if LT_IS_BUILT

void lt_plan_clear(const struct linear_lt *lt, struct lt_plan *plan)
{
    if (plan->product != NULL) {
        (void)lt->library.cublasLtMatmulDescDestroy(plan->product);
    }
    cublasLtMatrixLayout_t const layouts[3] = {plan->w, plan->x, plan->y};
    for (cublasLtMatrixLayout_t const layout : layouts) {
        if (layout != NULL) {
            (void)lt->library.cublasLtMatrixLayoutDestroy(layout);
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
                       "do without",
                       lt->library.cublasLtGetStatusString(status));
    }
    if (!lt->is_fast) { /* no workspace, hence no sums that are put together there */
        return ERR_OK;
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
    cu->lt->is_fast = cu->is_fast;
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
        lt_plan_clear(lt, &plan);
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
    key.k = a->n_block * (dtype == DTYPE_F32 ? LINEAR_BLOCK_F32 : LINEAR_BLOCK_BF16);
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

/* By a hash of all that tells plans apart. */
static size_t place_of(const struct lt_key *key)
{
    return static_cast<size_t>((fnv_hash(FNV_BEGIN, key, sizeof *key) >> 32) % LT_PLANS);
}

static bool attribute_set(const struct lt_library *lt, struct lt_plan *plan,
                          cublasLtMatmulDescAttributes_t which, const void *value, size_t bytes)
{
    return lt->cublasLtMatmulDescSetAttribute(plan->product, which, value, bytes) ==
           CUBLAS_STATUS_SUCCESS;
}

bool lt_plan_describe(const struct linear_lt *lt, struct lt_plan *plan,
                      const struct linear_args *args, enum dtype dtype)
{
    const struct lt_library *const library = &lt->library;
    memset(plan, 0, sizeof *plan);
    plan->key = key_of(args, dtype);
    const struct lt_key *const key = &plan->key;
    const cublasOperation_t turned = CUBLAS_OP_T;
    const cudaDataType_t f32 = CUDA_R_32F;
    const cudaDataType_t type = key->dtype == DTYPE_BF16  ? CUDA_R_16BF
                                : key->dtype == DTYPE_F16 ? CUDA_R_16F
                                                          : CUDA_R_32F;
    const uint64_t k = static_cast<uint64_t>(key->k);
    const uint64_t n_out = static_cast<uint64_t>(key->n_out);
    const uint64_t n_tok = static_cast<uint64_t>(key->n_tok);
    bool ok = library->cublasLtMatmulDescCreate(&plan->product, CUBLAS_COMPUTE_32F, CUDA_R_32F) ==
              CUBLAS_STATUS_SUCCESS;
    ok = ok && attribute_set(library, plan, CUBLASLT_MATMUL_DESC_TRANSA, &turned, sizeof turned) &&
         attribute_set(library, plan, CUBLASLT_MATMUL_DESC_EPILOGUE, &key->epilogue,
                       sizeof key->epilogue);
    if (ok && args->bias != NULL) {
        ok = attribute_set(library, plan, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &f32, sizeof f32) &&
             attribute_set(library, plan, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &args->bias,
                           sizeof args->bias);
    }
    ok = ok && library->cublasLtMatrixLayoutCreate(
                   &plan->w, type, k, n_out, static_cast<int64_t>(k)) == CUBLAS_STATUS_SUCCESS;
    ok = ok && library->cublasLtMatrixLayoutCreate(&plan->x, type, k, n_tok, key->x_stride) ==
                   CUBLAS_STATUS_SUCCESS;
    return ok && library->cublasLtMatrixLayoutCreate(&plan->y, f32, n_out, n_tok, key->y_stride) ==
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
    if (ok && !lt->is_fast) {
        const uint32_t reductions = CUBLASLT_REDUCTION_SCHEME_NONE;
        ok = lt->library.cublasLtMatmulPreferenceSetAttribute(
                 wish, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &reductions,
                 sizeof reductions) == CUBLAS_STATUS_SUCCESS;
    }
    for (const auto &alignment : alignments) {
        const uint32_t bytes = static_cast<uint32_t>(alignment.bytes);
        ok = ok && lt->library.cublasLtMatmulPreferenceSetAttribute(
                       wish, alignment.which, &bytes, sizeof bytes) == CUBLAS_STATUS_SUCCESS;
    }
    return ok;
}

const struct lt_shape *lt_shape_find(const struct linear_lt *lt, int n_out, int k, enum dtype dtype)
{
    for (int i = 0; i < lt->n_shape; i++) {
        if (lt->shape[i].n_out == n_out && lt->shape[i].k == k && lt->shape[i].dtype == dtype) {
            return &lt->shape[i];
        }
    }
    return NULL;
}

const cublasLtMatmulAlgo_t *lt_shape_algo(const struct lt_shape *shape, int n_tok)
{
    int i = 0;
    while (i < LT_SIZES - 1 && n_tok > shape->size[i].n_max) {
        i++;
    }
    return &shape->size[i].algo;
}

int lt_recommend(const struct linear_lt *lt, const struct lt_plan *plan, int n,
                 cublasLtMatmulHeuristicResult_t *found)
{
    cublasLtMatmulPreference_t wish = NULL;
    if (lt->library.cublasLtMatmulPreferenceCreate(&wish) != CUBLAS_STATUS_SUCCESS) {
        return 0;
    }
    int n_found = 0;
    const bool ok = wish_fill(lt, wish, &plan->key) &&
                    lt->library.cublasLtMatmulAlgoGetHeuristic(
                        lt->handle, plan->product, plan->w, plan->x, plan->y, plan->y, wish, n,
                        found, &n_found) == CUBLAS_STATUS_SUCCESS;
    (void)lt->library.cublasLtMatmulPreferenceDestroy(wish);
    return ok ? n_found : 0;
}

static bool plan_choose(const struct linear_lt *lt, struct lt_plan *plan)
{
    if (!lt->is_fast) {
        const struct lt_shape *const shape =
            lt_shape_find(lt, plan->key.n_out, plan->key.k, plan->key.dtype);
        CHECK(shape != NULL && shape->is_taken);
        plan->algo = *lt_shape_algo(shape, plan->key.n_tok);
        return true;
    }
    cublasLtMatmulHeuristicResult_t found;
    memset(&found, 0, sizeof found);
    const bool ok = lt_recommend(lt, plan, 1, &found) == 1 && found.state == CUBLAS_STATUS_SUCCESS;
    plan->algo = found.algo;
    return ok;
}

static struct lt_plan *plan_find(struct linear_lt *lt, const struct linear_args *a,
                                 enum dtype dtype)
{
    const struct lt_key key = key_of(a, dtype);
    struct lt_plan *const plan = &lt->plan[place_of(&key)];
    if (!plan->is_set || memcmp(&plan->key, &key, sizeof key) != 0) {
        lt_plan_clear(lt, plan);
        plan->is_possible = lt_plan_describe(lt, plan, a, dtype) && plan_choose(lt, plan);
        plan->is_set = true;
    }
    return plan;
}

/* ---- running -------------------------------------------------------------------------------- */

namespace
{

/* rounded = gelu(y), one thread per four values of a row, rows in grid.y. Moves 6 bytes per
 * value. */
__global__ void linear_gelu_round(const struct room rounded, const float *y, int64_t y_stride,
                                  int n_out)
{
    const int out = 4 * static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    grid_wait();
    if (out < n_out) {
        const float4 z = *reinterpret_cast<const float4 *>(y + blockIdx.y * y_stride + out);
        room_store_four(rounded, static_cast<int64_t>(blockIdx.y) * n_out + out,
                        {gelu_quick(z.x), gelu_quick(z.y), gelu_quick(z.z), gelu_quick(z.w)});
    }
}

/* y = gelu(y), one thread per value of a row, rows in grid.y. Moves 8 bytes per value. */
__global__ void linear_gelu(float *y, int64_t y_stride, int n_out)
{
    const int out = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    grid_wait();
    if (out < n_out) {
        float *const at = y + blockIdx.y * y_stride + out;
        *at = gelu_quick(*at);
    }
}

/* y = from, as linear_gelu. */
__global__ void linear_copy(float *y, int64_t y_stride, const float *from, int n_out)
{
    const int out = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    grid_wait();
    if (out < n_out) {
        y[blockIdx.y * y_stride + out] = from[static_cast<int64_t>(blockIdx.y) * n_out + out];
    }
}

} // namespace

static dim3 grid_by_rows(int n_out, int n_tok)
{
    return dim3(static_cast<unsigned>((n_out + 255) / 256), static_cast<unsigned>(n_tok));
}

cublasStatus_t lt_multiply(const struct cuda *cu, const struct lt_plan *plan,
                           const struct linear_args *args)
{
    const struct linear_lt *const lt = cu->lt;
    const float one = 1;
    const float zero = 0;
    return lt->library.cublasLtMatmul(lt->handle, plan->product, &one, args->w, plan->w, args->x,
                                      plan->x, &zero, args->y, plan->y, args->y, plan->y,
                                      &plan->algo, lt->workspace, lt->workspace_bytes, cu->stream);
}

/* All rows of args in one call, but for GELU. NOT_SUPPORTED: nothing was launched. */
static cublasStatus_t run_rows(const struct cuda *cu, const struct linear_args *args,
                               enum dtype dtype)
{
    struct linear_lt *const lt = cu->lt;
    const struct lt_plan *const plan = plan_find(lt, args, dtype);
    if (!plan->is_possible) {
        return CUBLAS_STATUS_NOT_SUPPORTED;
    }
    cublasStatus_t status = CUBLAS_STATUS_SUCCESS;
    if (args->bias != NULL) {
        status = lt->library.cublasLtMatmulDescSetAttribute(
            plan->product, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &args->bias, sizeof args->bias);
    }
    return status == CUBLAS_STATUS_SUCCESS ? lt_multiply(cu, plan, args) : status;
}

/* Rows first .. first+LT_ROWS-1, those behind the last one being zeros, by way of our own
 * memory. */
static cublasStatus_t run_apart(struct cuda *cu, const struct linear_args *args, enum dtype dtype,
                                int first)
{
    const int left = args->n_tok - first;
    struct linear_args part = *args;
    part.x = static_cast<const uint16_t *>(args->x) + first * args->x_stride;
    part.y = static_cast<float *>(cu->linear->y);
    part.y_stride = args->n_out;
    part.n_tok = LT_ROWS;
    const cublasStatus_t status = run_rows(cu, &part, dtype);
    if (status == CUBLAS_STATUS_SUCCESS) {
        LAUNCH(linear_copy, grid_by_rows(args->n_out, left < LT_ROWS ? left : +LT_ROWS), dim3(256),
               0, cuda_queue(cu), args->y + first * args->y_stride, args->y_stride, part.y,
               args->n_out);
        cuda_check(cu, "linear");
    }
    return status;
}

/* All rows in calls of multiples of LT_ROWS. */
static cublasStatus_t run_padded(struct cuda *cu, const struct linear_args *args, enum dtype dtype)
{
    const int n_whole = args->n_tok / LT_ROWS * LT_ROWS;
    const bool is_aligned =
        reinterpret_cast<uintptr_t>(args->y) % 16 == 0 && args->y_stride % 4 == 0;
    cublasStatus_t status = CUBLAS_STATUS_SUCCESS;
    if (!is_aligned || n_whole == 0) {
        for (int i = 0; i < args->n_tok && status == CUBLAS_STATUS_SUCCESS; i += LT_ROWS) {
            status = run_apart(cu, args, dtype, i);
        }
        return status;
    }
    struct linear_args part = *args;
    part.n_tok = n_whole;
    status = run_rows(cu, &part, dtype);
    if (status == CUBLAS_STATUS_SUCCESS && n_whole < args->n_tok) {
        const int first = args->n_tok - LT_ROWS;
        part.x = static_cast<const uint16_t *>(args->x) + first * args->x_stride;
        part.y = args->y + first * args->y_stride;
        part.n_tok = LT_ROWS;
        status = run_rows(cu, &part, dtype);
    }
    return status;
}

/* Without fast math: own kernels from now on. What is wrong with the device they will find, too. */
static void give_up(struct cuda *cu, const struct linear_args *args, cublasStatus_t status)
{
    cuda_fast_path_end(cu, &cu->uses_lt);
    (void)cudaGetLastError();
    (void)snprintf(cu->be.warning, sizeof cu->be.warning,
                   "cuda: cuBLASLt fails in a product of %d rows by %dx%d weights: %.60s; own "
                   "kernels multiply from now on: what was computed before may have other last "
                   "bits; restart the server to have all alike",
                   args->n_tok, args->n_out, args->n_in,
                   cu->lt->library.cublasLtGetStatusString(status));
}

/* Where a bias begins at another than a 16-byte address it is copied: cuBLASLt reads several values
 * at once, which faults there, and cannot be told. */
static void align_bias(struct cuda *cu, struct linear_args *args)
{
    if (reinterpret_cast<uintptr_t>(args->bias) % 16 == 0) {
        return;
    }
    const size_t bytes = static_cast<size_t>(args->n_out) * sizeof(float);
    CHECK(bytes <= cu->linear->bias_bytes);
    (void)cuda_ok(
        cu,
        cudaMemcpyAsync(cu->linear->bias, args->bias, bytes, cudaMemcpyDeviceToDevice, cu->stream),
        "linear");
    args->bias = static_cast<const float *>(cu->linear->bias);
}

bool linear_lt_run(struct cuda *cu, const struct linear_args *given, enum dtype dtype)
{
    const bool is_fast = cu->lt->is_fast;
    struct linear_args aligned = *given;
    const struct linear_args *const args = &aligned;
    align_bias(cu, &aligned);
    const cublasStatus_t status = is_fast ? run_rows(cu, args, dtype) : run_padded(cu, args, dtype);
    if (status == CUBLAS_STATUS_NOT_SUPPORTED && is_fast) {
        return false;
    }
    if (status != CUBLAS_STATUS_SUCCESS && is_fast) {
        cuda_fail(cu, ERR_DEVICE, "linear", cu->lt->library.cublasLtGetStatusString(status));
        return true;
    }
    if (status != CUBLAS_STATUS_SUCCESS) {
        give_up(cu, args, status);
        return false;
    }
    if (args->rounded != NULL) {
        LAUNCH(linear_gelu_round, grid_by_rows(args->n_out / 4, args->n_tok), dim3(256), 0,
               cuda_queue(cu), room{args->rounded, dtype}, args->y, args->y_stride, args->n_out);
        cuda_check(cu, "linear");
    } else if (args->act == ACT_GELU) {
        LAUNCH(linear_gelu, grid_by_rows(args->n_out, args->n_tok), dim3(256), 0, cuda_queue(cu),
               args->y, args->y_stride, args->n_out);
        cuda_check(cu, "linear");
    }
    return true;
}

#endif
