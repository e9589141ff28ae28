/* Memory of the device and of the host, weights, upload and download.
 *
 * Weights come from mapped files as host views. Matrices and keys are packed on the host into the
 * layout of their kernels and copied in one piece. Tables keep their rows; they may be far larger
 * than what the host should hold twice, so they pass through a pinned staging block, chunk by
 * chunk. A table in host memory is pinned and mapped: kernels read its rows across the bus, in
 * place.
 *
 * Transfers and frees are outside of steps' hot path: each waits for what was launched. */
#include "kernels/cuda/backend.cuh"

#include <stdlib.h>
#include <string.h>

/* ---- memory --------------------------------------------------------------------------------- */

/* Device memory that stays free of weights and cache, for what CUDA itself takes later: kernels'
 * code, their stacks, captured graphs. */
static size_t reserve_bytes(size_t total)
{
    const size_t usual = static_cast<size_t>(512) << 20;
    return total / 32 < usual ? total / 32 : usual;
}

int64_t resource_memory_available(struct backend *be)
{
    size_t free_bytes = 0;
    size_t total = 0;
    if (!cuda_ok(cuda_of(be), cudaMemGetInfo(&free_bytes, &total), "memory query")) {
        return 0;
    }
    const size_t reserve = reserve_bytes(total);
    return free_bytes > reserve ? static_cast<int64_t>(free_bytes - reserve) : 0;
}

/* An allocation failed with status. Too little memory is the caller's to report and does not spoil
 * the backend; anything else does. */
static enum err_code no_memory(struct cuda *cu, cudaError_t status, size_t bytes,
                               const char *purpose, struct err *err)
{
    (void)cudaGetLastError(); /* else the next launch would report it */
    if (status != cudaErrorMemoryAllocation) {
        (void)cuda_ok(cu, status, purpose);
        return err_set(err, ERR_DEVICE, "%s: the device refuses %zu bytes: %s", purpose, bytes,
                       cudaGetErrorString(status));
    }
    size_t free_bytes = 0;
    size_t total = 0;
    (void)cudaMemGetInfo(&free_bytes, &total);
    return err_set(err, ERR_MEMORY,
                   "%s: needs %zu bytes of device memory, %zu of %zu are free; lower the batch, "
                   "the context or the cache, use bf16 weights, or put values into host memory",
                   purpose, bytes, free_bytes, total);
}

enum err_code resource_device_new(struct cuda *cu, void **data, size_t bytes, const char *purpose,
                                  struct err *err)
{
    *data = NULL;
    const cudaError_t status = cudaMalloc(data, bytes > 0 ? bytes : 1);
    if (status != cudaSuccess) {
        *data = NULL;
        return no_memory(cu, status, bytes, purpose, err);
    }
    return ERR_OK;
}

enum err_code resource_pinned_new(struct cuda *cu, void **data, size_t bytes, const char *purpose,
                                  struct err *err)
{
    *data = NULL;
    const cudaError_t status = cudaHostAlloc(data, bytes > 0 ? bytes : 1, cudaHostAllocMapped);
    if (status == cudaSuccess) {
        return ERR_OK;
    }
    *data = NULL;
    (void)cudaGetLastError();
    if (status != cudaErrorMemoryAllocation) {
        (void)cuda_ok(cu, status, purpose);
    }
    return err_set(err, status == cudaErrorMemoryAllocation ? ERR_MEMORY : ERR_DEVICE,
                   "%s: no %zu bytes of pinned host memory to be had: %s; free host memory, or "
                   "raise the limit on locked memory",
                   purpose, bytes, cudaGetErrorString(status));
}

enum err_code resource_buffer_new(struct backend *be, void **data, size_t bytes,
                                  const char *purpose, struct err *err)
{
    struct cuda *const cu = cuda_of(be);
    const enum err_code code = resource_device_new(cu, data, bytes, purpose, err);
    if (code != ERR_OK) {
        return code;
    }
    if (!cuda_ok(cu, cudaMemsetAsync(*data, 0, bytes > 0 ? bytes : 1, cu->stream), purpose) ||
        !graphs_wait(cu)) {
        (void)cudaFree(*data);
        *data = NULL;
        if (err != NULL) {
            *err = cu->failure;
        }
        return cu->failure.code;
    }
    return ERR_OK;
}

void resource_buffer_free(struct backend *be, void *data)
{
    if (data != NULL) {
        graphs_forget(cuda_of(be));
        (void)cudaFree(data);
    }
}

/* ---- transfers ------------------------------------------------------------------------------ */

static bool copy_rows(struct cuda *cu, struct tensor device, void *to_host, const void *from_host,
                      const char *what)
{
    const size_t row_bytes = static_cast<size_t>(device.cols) * dtype_bytes(device.dtype);
    const size_t stride_bytes = static_cast<size_t>(device.stride) * dtype_bytes(device.dtype);
    const size_t rows = static_cast<size_t>(device.rows);
    if (!graphs_wait(cu)) {
        return false;
    }
    if (rows == 0 || row_bytes == 0) {
        return true;
    }
    const cudaError_t status =
        to_host != NULL ? cudaMemcpy2DAsync(to_host, row_bytes, device.data, stride_bytes,
                                            row_bytes, rows, cudaMemcpyDeviceToHost, cu->stream)
                        : cudaMemcpy2DAsync(device.data, stride_bytes, from_host, row_bytes,
                                            row_bytes, rows, cudaMemcpyHostToDevice, cu->stream);
    return cuda_ok(cu, status, what) && graphs_wait(cu);
}

void resource_upload(struct backend *be, struct tensor dst, const void *host)
{
    (void)copy_rows(cuda_of(be), dst, NULL, host, "upload");
    linear_next(cuda_of(be)); /* what an op has left rounded may be this */
}

/* After a failure host becomes 0: nobody shall read what was never written. */
void resource_download(struct backend *be, void *host, struct tensor src)
{
    if (!copy_rows(cuda_of(be), src, host, NULL, "download")) {
        memset(host, 0,
               static_cast<size_t>(src.rows) * static_cast<size_t>(src.cols) *
                   dtype_bytes(src.dtype));
    }
}

/* ---- weights -------------------------------------------------------------------------------- */

float cuda_host_value(const struct cuda_source *source, int64_t row, int64_t col)
{
    /* a mapped file's tensor may start at any byte */
    const struct tensor *const host = &source->view;
    const char *const at = static_cast<const char *>(host->data) +
                           static_cast<size_t>(row * host->stride + col) * dtype_bytes(host->dtype);
    if (host->dtype == DTYPE_I8) {
        return static_cast<float>(*reinterpret_cast<const int8_t *>(at)) * source->row_scale[row];
    }
    if (host->dtype == DTYPE_F32) {
        float value;
        memcpy(&value, at, sizeof value);
        return value;
    }
    uint16_t bits;
    memcpy(&bits, at, sizeof bits);
    return host->dtype == DTYPE_BF16 ? bf16_to_f32(bits) : f16_to_f32(bits);
}

void cuda_host_values(void *dst, const struct cuda_source *source, int64_t row, int64_t col,
                      int64_t n, enum dtype dtype)
{
    const struct tensor *const host = &source->view;
    const char *const from =
        static_cast<const char *>(host->data) +
        static_cast<size_t>(row * host->stride + col) * dtype_bytes(host->dtype);
    if (host->dtype == dtype) {
        memcpy(dst, from, static_cast<size_t>(n) * dtype_bytes(dtype));
        return;
    }
    float *const wide = static_cast<float *>(dst);
    uint16_t *const half = static_cast<uint16_t *>(dst);
    const auto to_half = [dtype](float value) {
        return dtype == DTYPE_F16 ? f16_saturated(value) : bf16_from_f32(value);
    };
    if (host->dtype == DTYPE_F32) { /* to 16 bits */
        for (int64_t i = 0; i < n; i++) {
            float value;
            memcpy(&value, from + i * static_cast<int64_t>(sizeof value), sizeof value);
            half[i] = to_half(value);
        }
        return;
    }
    for (int64_t i = 0; i < n; i++) {
        const float value = cuda_host_value(source, row, col + i);
        if (dtype == DTYPE_F32) {
            wide[i] = value;
        } else {
            half[i] = to_half(value);
        }
    }
}

/* Rows first .. first+n-1 of host as dst[n, cols] of the table's type; of Q4, bytes of codes. */
static void table_rows(void *dst, const struct cuda_source *source, enum dtype dtype, int64_t first,
                       int64_t n)
{
    const int64_t cols = source->view.cols;
    const size_t row_bytes = static_cast<size_t>(cols) * dtype_bytes(dtype);
    for (int64_t r = 0; r < n; r++) {
        cuda_host_values(static_cast<char *>(dst) + static_cast<size_t>(r) * row_bytes, source,
                         first + r, 0, cols, dtype);
    }
}

/* Of I8 and Q4 tables: their rows' scales, and the bytes of these; else NULL and 0. */
struct table_scales {
    const void *data;
    size_t bytes;
};

static struct table_scales scales_of(const struct weight *w, const struct cuda_source *source)
{
    const size_t rows = static_cast<size_t>(w->rows);
    switch (w->dtype) {
    case DTYPE_I8: return {source->row_scale, rows * sizeof(float)};
    case DTYPE_Q4: return {source->row_scale_f16, rows * sizeof(uint16_t)};
    default: return {NULL, 0};
    }
}

/* Copies a table through the two halves of the staging block: one is filled while the other is
 * read. A row that does not fit a half goes in one block of its own. */
static bool table_upload(struct cuda *cu, struct cuda_weight *w, const struct cuda_source *host)
{
    const size_t row_bytes = table_row_bytes(&w->head);
    const size_t half = cu->staging_bytes / 2;
    const int64_t chunk = static_cast<int64_t>(half / row_bytes);
    bool ok = true;
    for (int64_t first = 0, i = 0; ok && first < w->head.rows; first += chunk, i++) {
        const int64_t n = w->head.rows - first < chunk ? w->head.rows - first : chunk;
        char *const part = static_cast<char *>(cu->staging) + (i % 2 != 0 ? half : 0);
        if (i >= 2) { /* the copy before the last has read this half */
            ok = cuda_ok(cu, cudaEventSynchronize(cu->staging_read[i % 2]), "weight upload");
        }
        if (ok) {
            table_rows(part, host, w->head.dtype, first, n);
            char *const to = static_cast<char *>(w->data) + static_cast<size_t>(first) * row_bytes;
            ok = cuda_ok(cu,
                         cudaMemcpyAsync(to, part, static_cast<size_t>(n) * row_bytes,
                                         cudaMemcpyHostToDevice, cu->stream),
                         "weight upload") &&
                 cuda_ok(cu, cudaEventRecord(cu->staging_read[i % 2], cu->stream), "weight upload");
        }
    }
    const struct table_scales scales = scales_of(&w->head, host);
    if (ok && scales.bytes > 0) {
        ok = cuda_ok(cu,
                     cudaMemcpyAsync(static_cast<char *>(w->data) + cuda_table_scales(&w->head),
                                     scales.data, scales.bytes, cudaMemcpyHostToDevice, cu->stream),
                     "weight upload");
    }
    return graphs_wait(cu) && ok;
}

static void pack(void *dst, const struct cuda_weight *w, const struct cuda_source *host)
{
    switch (w->head.kind) {
    case WEIGHT_MATRIX: linear_pack(dst, host, w->head.dtype, w->is_row_major); break;
    case WEIGHT_KEYS:
        keys_pack(dst, host, w->head.n_group);
        if (w->split_at > 0) {
            keys_split_pack(static_cast<char *>(dst) + w->split_at, host, w->head.n_group);
        }
        break;
    case WEIGHT_TABLE: {
        const struct table_scales scales = scales_of(&w->head, host);
        table_rows(dst, host, w->head.dtype, 0, w->head.rows);
        if (scales.bytes > 0) {
            memcpy(static_cast<char *>(dst) + cuda_table_scales(&w->head), scales.data,
                   scales.bytes);
        }
        break;
    }
    }
}

static size_t weight_size(const struct cuda_weight *w)
{
    switch (w->head.kind) {
    case WEIGHT_MATRIX: return linear_bytes(w->head.rows, w->head.cols, w->head.dtype);
    case WEIGHT_KEYS:
        return w->split_at > 0
                   ? w->split_at + keys_split_bytes(w->head.rows, w->head.cols, w->head.n_group)
                   : keys_bytes(w->head.rows, w->head.cols, w->head.n_group);
    case WEIGHT_TABLE: break;
    }
    const struct cuda_source none = {};
    const size_t scale_bytes = scales_of(&w->head, &none).bytes;
    return scale_bytes > 0 ? cuda_table_scales(&w->head) + scale_bytes
                           : static_cast<size_t>(w->head.rows) * table_row_bytes(&w->head);
}

static enum err_code place_on_host(struct cuda *cu, struct cuda_weight *w,
                                   const struct cuda_source *host, const char *name,
                                   struct err *err)
{
    const enum err_code code = resource_pinned_new(cu, &w->pinned, w->bytes, name, err);
    if (code != ERR_OK) {
        return code;
    }
    if (!cuda_ok(cu, cudaHostGetDevicePointer(&w->data, w->pinned, 0), name)) {
        if (err != NULL) {
            *err = cu->failure;
        }
        return cu->failure.code;
    }
    pack(w->pinned, w, host);
    return ERR_OK;
}

static enum err_code place_on_device(struct cuda *cu, struct cuda_weight *w,
                                     const struct cuda_source *host, const char *name,
                                     struct err *err)
{
    const enum err_code code = resource_device_new(cu, &w->data, w->bytes, name, err);
    if (code != ERR_OK) {
        return code;
    }
    const size_t row_bytes = table_row_bytes(&w->head);
    bool ok = false;
    if (w->head.kind == WEIGHT_TABLE && row_bytes <= cu->staging_bytes / 2) {
        ok = table_upload(cu, w, host);
    } else {
        void *const packed = malloc(w->bytes);
        if (packed == NULL) {
            return err_set(err, ERR_MEMORY, "%s: no %zu bytes of host memory left to pack it in",
                           name, w->bytes);
        }
        pack(packed, w, host);
        ok = cuda_ok(cu,
                     cudaMemcpyAsync(w->data, packed, w->bytes, cudaMemcpyHostToDevice, cu->stream),
                     "weight upload") &&
             graphs_wait(cu);
        free(packed);
    }
    if (!ok && err != NULL) {
        *err = cu->failure;
    }
    return ok ? ERR_OK : cu->failure.code;
}

/* What rows of requests are multiplied by in place of w, a matrix of F32: another one, of BF16. */
static enum err_code split_new(struct cuda *cu, struct cuda_weight *w,
                               const struct cuda_source *source, const char *name, struct err *err)
{
    const int64_t cols = 3 * w->head.cols;
    const size_t bytes =
        static_cast<size_t>(w->head.rows) * static_cast<size_t>(cols) * sizeof(uint16_t);
    uint16_t *const packed = static_cast<uint16_t *>(malloc(bytes));
    if (packed == NULL) {
        return err_set(err, ERR_MEMORY, "%s: no %zu bytes of host memory left to split it in", name,
                       bytes);
    }
    linear_split_pack(packed, source);
    const struct tensor host = tensor_make(packed, w->head.rows, cols, DTYPE_BF16);
    struct weight_desc desc = {};
    desc.kind = WEIGHT_MATRIX;
    desc.dtype = DTYPE_BF16;
    desc.placement = w->head.placement;
    desc.n_group = 1;
    const enum err_code code = resource_weight_new(&cu->be, &w->split, &host, &desc, name, err);
    free(packed);
    if (code == ERR_OK) {
        cuda_fast_path(cu, "split", false, &cu->splits);
    }
    return code;
}

enum err_code resource_weight_new(struct backend *be, struct weight **weight,
                                  const struct tensor *host, const struct weight_desc *desc,
                                  const char *name, struct err *err)
{
    struct cuda *const cu = cuda_of(be);
    *weight = NULL;
    const struct weight head = weight_head(host, desc);
    if (desc->placement == PLACEMENT_MMAP) {
        return err_set(err, ERR_UNSUPPORTED,
                       "%s: the GPU does not read a mapped file in place; place values on device "
                       "or host",
                       name);
    }
    CHECK(desc->dtype != DTYPE_I8 || /* not has_int8 */
          (desc->kind == WEIGHT_TABLE && host->dtype == DTYPE_I8));
    size_t n_value = 0;
    size_t bytes = 0;
    if (__builtin_mul_overflow(static_cast<size_t>(host->rows), static_cast<size_t>(host->cols),
                               &n_value) ||
        __builtin_mul_overflow(n_value, 2 * sizeof(float), &bytes)) {
        return err_set(err, ERR_MEMORY, "%s: [%lld, %lld] exceeds the address space", name,
                       static_cast<long long>(host->rows), static_cast<long long>(host->cols));
    }
    struct cuda_weight *const w = static_cast<struct cuda_weight *>(calloc(1, sizeof *w));
    if (w == NULL) {
        return err_set(err, ERR_MEMORY, "%s: no host memory left for this weight", name);
    }
    w->head = head;
    if (head.kind == WEIGHT_KEYS && desc->is_split && !desc->is_flat && cu->splits &&
        keys_can_split(head.rows, head.cols, head.n_group)) {
        w->split_at = (keys_bytes(head.rows, head.cols, head.n_group) + 15) / 16 * 16;
        cuda_fast_path(cu, "split", false, &cu->splits);
    }
    if (desc->is_flat && cu->searches_flat) {
        cuda_fast_path(cu, "flat", false, &cu->searches_flat);
    }
    w->bytes = weight_size(w);
    const struct cuda_source source = {*host, desc->row_scale, desc->row_scale_f16};
    enum err_code code = ERR_OK;
    if (w->head.kind == WEIGHT_MATRIX) {
        graphs_forget(cu); /* what is reserved may move */
        const enum cuda_dense dense = head.dtype == DTYPE_F16    ? CUDA_DENSE_F16
                                      : head.dtype == DTYPE_BF16 ? CUDA_DENSE_BF16
                                                                 : CUDA_DENSE_F32;
        cu->dense = dense > cu->dense ? dense : cu->dense;
        if (cu->dense >= CUDA_DENSE_BF16 && cu->attends_mma) {
            cuda_fast_path(cu, "attention", false, &cu->attends_mma);
        }
        code = linear_reserve(cu, w, err);
    }
    if (code == ERR_OK) {
        code = desc->placement == PLACEMENT_HOST ? place_on_host(cu, w, &source, name, err)
                                                 : place_on_device(cu, w, &source, name, err);
    }
    if (code == ERR_OK && desc->is_split && cu->splits && linear_can_split(&w->head)) {
        code = split_new(cu, w, &source, name, err);
    }
    if (code != ERR_OK) {
        resource_weight_free(be, &w->head);
        return code;
    }
    *weight = &w->head;
    return ERR_OK;
}

void resource_weight_free(struct backend *be, struct weight *weight)
{
    if (weight == NULL) {
        return;
    }
    graphs_forget(cuda_of(be));
    linear_forget_order(cuda_of(be));
    struct cuda_weight *const w = reinterpret_cast<struct cuda_weight *>(weight);
    if (w->pinned != NULL) {
        (void)cudaFreeHost(w->pinned);
    } else {
        (void)cudaFree(w->data);
    }
    resource_weight_free(be, w->split);
    free(w);
}

size_t resource_weight_bytes(const struct weight *weight)
{
    return weight == NULL ? 0
                          : cuda_weight_of(weight)->bytes +
                                resource_weight_bytes(cuda_weight_of(weight)->split);
}
