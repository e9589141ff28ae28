/* Memory and weights of the reference backend. The device is the host: buffers are plain memory,
 * upload and download are copies. */
#include "kernels/ref/weight.h"

#include <stdio.h>
#include <stdlib.h>

enum { BUFFER_ALIGN = 64 };

enum err_code ref_buffer_new(struct backend *be, void **data, size_t bytes, const char *purpose,
                             struct err *err)
{
    *data = NULL;
    if (bytes > SIZE_MAX - BUFFER_ALIGN) {
        return err_set(err, ERR_MEMORY, "%s: %zu bytes exceed the address space", purpose, bytes);
    }
    /* aligned_alloc wants a multiple of the alignment, and an empty buffer an address of its own */
    const size_t padded = (bytes / BUFFER_ALIGN + 1) * BUFFER_ALIGN;
    *data = aligned_alloc(BUFFER_ALIGN, padded);
    if (*data == NULL) {
        return err_set(err, ERR_MEMORY, "%s: %s has no %zu bytes left; lower the limits", purpose,
                       be->name, bytes);
    }
    memset(*data, 0, padded);
    return ERR_OK;
}

void ref_buffer_free(struct backend *be, void *data)
{
    (void)be;
    free(data);
}

void ref_upload(struct backend *be, struct tensor dst, const void *host)
{
    (void)be;
    const size_t row_bytes = (size_t)dst.cols * dtype_bytes(dst.dtype);
    const size_t stride_bytes = (size_t)dst.stride * dtype_bytes(dst.dtype);
    for (size_t r = 0; r < (size_t)dst.rows; r++) {
        memcpy((char *)dst.data + r * stride_bytes, (const char *)host + r * row_bytes, row_bytes);
    }
}

void ref_download(struct backend *be, void *host, struct tensor src)
{
    (void)be;
    const size_t row_bytes = (size_t)src.cols * dtype_bytes(src.dtype);
    const size_t stride_bytes = (size_t)src.stride * dtype_bytes(src.dtype);
    for (size_t r = 0; r < (size_t)src.rows; r++) {
        memcpy((char *)host + r * row_bytes, (const char *)src.data + r * stride_bytes, row_bytes);
    }
}

static bool is_float(enum dtype dtype)
{
    return dtype == DTYPE_F32 || dtype == DTYPE_F16 || dtype == DTYPE_BF16;
}

/* Copies host as F32 values, rounded to BF16 where the weight is computed with in BF16. */
static enum err_code copy_values(struct weight *w, const struct tensor *host, bool round_bf16,
                                 const char *name, struct err *err)
{
    size_t n_value = 0;
    size_t bytes = 0;
    if (__builtin_mul_overflow((size_t)host->rows, (size_t)host->cols, &n_value) ||
        __builtin_mul_overflow(n_value, sizeof(float), &bytes)) {
        return err_set(err, ERR_MEMORY, "%s: [%lld, %lld] exceeds the address space", name,
                       (long long)host->rows, (long long)host->cols);
    }
    w->owned = malloc(bytes);
    if (w->owned == NULL) {
        return err_set(err, ERR_MEMORY, "%s: no %zu bytes of memory left for this weight", name,
                       bytes);
    }
    for (int64_t r = 0; r < host->rows; r++) {
        for (int64_t c = 0; c < host->cols; c++) {
            const float value = float_at(host->data, host->dtype, r * host->stride + c);
            w->owned[r * host->cols + c] = round_bf16 ? bf16_to_f32(bf16_from_f32(value)) : value;
        }
    }
    w->view = tensor_make(w->owned, host->rows, host->cols, DTYPE_F32);
    return ERR_OK;
}

enum err_code ref_weight_new(struct backend *be, struct weight **weight, const struct tensor *host,
                             const struct weight_desc *desc, const char *name, struct err *err)
{
    CHECK(host->data != NULL && host->rows > 0 && host->cols > 0 && host->stride >= host->cols);
    CHECK(is_float(host->dtype) && (desc->dtype == DTYPE_F32 || desc->dtype == DTYPE_BF16));
    CHECK(desc->placement != PLACEMENT_MMAP || desc->kind == WEIGHT_TABLE);
    CHECK(desc->n_group >= 1 && host->rows % desc->n_group == 0);

    *weight = NULL;
    struct weight *const w = calloc(1, sizeof *w);
    if (w == NULL) {
        return err_set(err, ERR_MEMORY, "%s: no memory left for this weight", name);
    }
    w->desc = *desc;
    if (desc->placement == PLACEMENT_MMAP) {
        w->view = *host;
    } else {
        const bool round_bf16 = desc->dtype == DTYPE_BF16 && desc->kind != WEIGHT_KEYS;
        const enum err_code code = copy_values(w, host, round_bf16, name, err);
        if (code != ERR_OK) {
            ref_weight_free(be, w);
            return code;
        }
    }
    *weight = w;
    return ERR_OK;
}

void ref_weight_free(struct backend *be, struct weight *weight)
{
    (void)be;
    if (weight != NULL) {
        free(weight->owned);
        free(weight);
    }
}

size_t ref_weight_bytes(const struct weight *weight)
{
    const struct tensor *const view = &weight->view;
    return (size_t)view->rows * (size_t)view->cols * dtype_bytes(view->dtype);
}

/* ---- memory left --------------------------------------------------------------------------- */

/* A number of bytes in a one-line file, or INT64_MAX ("max", or there is no such file). */
static int64_t read_bytes_file(const char *path)
{
    long long value = 0;
    FILE *const file = fopen(path, "r");
    const bool ok = file != NULL && fscanf(file, "%lld", &value) == 1 && value >= 0;
    if (file != NULL) {
        (void)fclose(file);
    }
    return ok ? value : INT64_MAX;
}

/* What the kernel deems available to this process, within the limit of its container. */
int64_t ref_memory_available(struct backend *be)
{
    (void)be;
    int64_t bytes = INT64_MAX;
    FILE *const file = fopen("/proc/meminfo", "r");
    char line[256];
    while (file != NULL && fgets(line, sizeof line, file) != NULL) {
        long long kib = 0;
        if (sscanf(line, "MemAvailable: %lld kB", &kib) == 1 && kib >= 0) {
            bytes = kib * 1024;
            break;
        }
    }
    if (file != NULL) {
        (void)fclose(file);
    }
    const int64_t limit = read_bytes_file("/sys/fs/cgroup/memory.max");
    const int64_t used = read_bytes_file("/sys/fs/cgroup/memory.current");
    if (limit != INT64_MAX && used <= limit && limit - used < bytes) {
        bytes = limit - used;
    }
    return bytes;
}
