/* The reference backend's weight, for the files of kernels/ref alone.
 *
 * Copied weights are held as F32 values in row order; a BF16 or F16 weight holds the rounded
 * values, which F32 represents exactly, an I8 weight whole numbers and the scales of its rows. A
 * table that is read in place keeps address, stride and type of its source, which may start at any
 * byte offset of a file: so elements are read through memcpy. */
#ifndef KERNELS_REF_WEIGHT_H
#define KERNELS_REF_WEIGHT_H

#include "kernels/ref/ref.h"

#include <string.h>

struct ref_weight {
    struct weight head;        /* first: the models' pointer to it is ours */
    struct tensor view;        /* [rows, cols] F32, or the source itself with PLACEMENT_MMAP */
    const float *scale;        /* [rows] what the elements of a row are multiplied by; NULL = 1 */
    const uint16_t *scale_f16; /* the same of a Q4 source that is read in place */
    float *owned;              /* Owner: the weight; NULL with PLACEMENT_MMAP */
};

static inline const struct ref_weight *ref_weight_of(const struct weight *w)
{
    return (const struct ref_weight *)w;
}

/* A number as operands of that type have it. */
static inline float ref_round(float value, enum dtype dtype)
{
    return dtype == DTYPE_BF16  ? bf16_to_f32(bf16_from_f32(value))
           : dtype == DTYPE_F16 ? f16_to_f32(f16_saturated(value))
                                : value;
}

/* Element i of an array of floating-point numbers of any type, at any alignment. */
static inline float float_at(const void *data, enum dtype dtype, int64_t i)
{
    const char *const at = (const char *)data + (size_t)i * dtype_bytes(dtype);
    if (dtype == DTYPE_F32) {
        float value;
        memcpy(&value, at, sizeof value);
        return value;
    }
    if (dtype == DTYPE_I8) {
        return (float)*(const int8_t *)at;
    }
    uint16_t bits;
    memcpy(&bits, at, sizeof bits);
    return dtype == DTYPE_BF16 ? bf16_to_f32(bits) : f16_to_f32(bits);
}

static inline float q4_at(const struct tensor *view, const uint16_t *scale, int64_t row,
                          int64_t col)
{
    const uint8_t *const codes = (const uint8_t *)view->data + row * view->stride;
    uint16_t bits; /* a file's may stand at any byte */
    memcpy(&bits, scale + row, sizeof bits);
    return (float)q4_code(codes, view->cols, col) * f16_to_f32(bits);
}

static inline float weight_at(const struct weight *weight, int64_t row, int64_t col)
{
    const struct ref_weight *const w = ref_weight_of(weight);
    if (w->view.dtype == DTYPE_Q4) {
        return q4_at(&w->view, w->scale_f16, row, col);
    }
    const float value = float_at(w->view.data, w->view.dtype, row * w->view.stride + col);
    return w->scale == NULL ? value : value * w->scale[row];
}

#endif
