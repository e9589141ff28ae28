/* Memory and weights of the reference backend. The device is the host: buffers are plain memory,
 * upload and download are copies. */
#include "kernels/int8.h"
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

/* Rounds the rows of w, and returns what that loses, relative to the whole. */
static double round_rows(struct ref_weight *w, float *scale)
{
    double lost = 0;
    double whole = 0;
    for (int64_t r = 0; r < w->view.rows; r++) {
        float *const row = row_f32(w->view, r);
        uint32_t max = 0;
        for (int64_t c = 0; c < w->view.cols; c++) {
            const uint32_t bits = int8_magnitude(row[c]);
            max = bits > max ? bits : max;
        }
        const struct int8_scale s = int8_scale_of(int8_from_magnitude(max));
        scale[r] = s.scale;
        for (int64_t c = 0; c < w->view.cols; c++) {
            const float q = (float)int8_round(row[c], s.inverse);
            const double missing = (double)row[c] - (double)(q * s.scale);
            lost += missing * missing;
            whole += (double)row[c] * (double)row[c];
            row[c] = q;
        }
    }
    return whole > 0 ? sqrt(lost / whole) : 0;
}

/* Copies host as F32 values, rounded to BF16 or INT8 where the weight is computed with in it. The
 * scales of an I8 weight stand behind its values. */
static enum err_code copy_values(struct ref_weight *w, const struct tensor *host,
                                 const struct weight_desc *desc, const char *name, struct err *err)
{
    const bool round_bf16 = w->head.dtype == DTYPE_BF16;
    const bool is_int8 = w->head.dtype == DTYPE_I8;
    size_t n_value = 0;
    size_t bytes = 0;
    if (__builtin_mul_overflow((size_t)host->rows, (size_t)host->cols + 1, &n_value) ||
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
            float value = float_at(host->data, host->dtype, r * host->stride + c);
            value *= host->dtype == DTYPE_I8 && !is_int8 ? desc->row_scale[r] : 1.0f;
            w->owned[r * host->cols + c] = round_bf16 ? bf16_to_f32(bf16_from_f32(value)) : value;
        }
    }
    w->view = tensor_make(w->owned, host->rows, host->cols, DTYPE_F32);
    if (!is_int8) {
        return ERR_OK;
    }
    float *const scale = w->owned + host->rows * host->cols;
    w->scale = scale;
    if (host->dtype == DTYPE_I8) {
        memcpy(scale, desc->row_scale, (size_t)host->rows * sizeof *scale);
        return ERR_OK;
    }
    return weight_loss_check(round_rows(w, scale), desc, name, err);
}

enum err_code ref_weight_new(struct backend *be, struct weight **weight, const struct tensor *host,
                             const struct weight_desc *desc, const char *name, struct err *err)
{
    *weight = NULL;
    const struct weight head = weight_head(host, desc);
    enum err_code code = weight_int8_check(host, desc, name, err);
    if (code != ERR_OK) {
        return code;
    }
    struct ref_weight *const w = calloc(1, sizeof *w);
    if (w == NULL) {
        return err_set(err, ERR_MEMORY, "%s: no memory left for this weight", name);
    }
    w->head = head;
    if (desc->placement == PLACEMENT_MMAP) {
        w->view = *host;
        w->scale = host->dtype == DTYPE_I8 ? desc->row_scale : NULL;
    } else {
        code = copy_values(w, host, desc, name, err);
        if (code != ERR_OK) {
            ref_weight_free(be, &w->head);
            return code;
        }
    }
    *weight = &w->head;
    return ERR_OK;
}

void ref_weight_free(struct backend *be, struct weight *weight)
{
    (void)be;
    if (weight != NULL) {
        free(((struct ref_weight *)weight)->owned);
        free(weight);
    }
}

size_t ref_weight_bytes(const struct weight *weight)
{
    const struct ref_weight *const w = ref_weight_of(weight);
    const struct tensor *const view = &w->view;
    const size_t scales = w->scale != NULL ? (size_t)view->rows * sizeof *w->scale : 0;
    return (size_t)view->rows * (size_t)view->cols * dtype_bytes(view->dtype) + scales;
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
