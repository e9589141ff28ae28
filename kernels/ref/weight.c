/* Weights of the reference backend: weight.h says what they are. */
#include "kernels/int8.h"
#include "kernels/ref/weight.h"

#include <stdlib.h>

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

/* Copies host as F32 values, rounded to BF16, F16 or INT8 where the weight is computed with in it.
 * The scales of an I8 weight follow its values. */
static enum err_code copy_values(struct ref_weight *w, const struct tensor *host,
                                 const struct weight_desc *desc, const char *name, struct err *err)
{
    const int64_t cols = w->head.cols;
    const bool is_int8 = w->head.dtype == DTYPE_I8;
    size_t n_value = 0;
    size_t bytes = 0;
    if (__builtin_mul_overflow((size_t)host->rows, (size_t)cols + 1, &n_value) ||
        __builtin_mul_overflow(n_value, sizeof(float), &bytes)) {
        return err_set(err, ERR_MEMORY, "%s: [%lld, %lld] exceeds the address space", name,
                       (long long)host->rows, (long long)cols);
    }
    w->owned = malloc(bytes);
    if (w->owned == NULL) {
        return err_set(err, ERR_MEMORY, "%s: no %zu bytes of memory left for this weight", name,
                       bytes);
    }
    for (int64_t r = 0; r < host->rows; r++) {
        for (int64_t c = 0; c < cols; c++) {
            float value = host->dtype == DTYPE_Q4
                              ? q4_at(host, desc->row_scale_f16, r, c)
                              : float_at(host->data, host->dtype, r * host->stride + c);
            value *= host->dtype == DTYPE_I8 && !is_int8 ? desc->row_scale[r] : 1.0f;
            w->owned[r * cols + c] =
                host->dtype == w->head.dtype ? value : ref_round(value, w->head.dtype);
        }
    }
    w->view = tensor_make(w->owned, host->rows, cols, DTYPE_F32);
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
        w->scale_f16 = desc->row_scale_f16;
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
