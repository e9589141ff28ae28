/* A tensor is a view: it owns nothing. Two dimensions, row-major, contiguous within a row. */
#ifndef KERNELS_TENSOR_H
#define KERNELS_TENSOR_H

#include <stddef.h>
#include <stdint.h>

/* Q4: an element is a byte that holds the codes of two columns of a table of value rows, see
 * q4_code. Such a tensor has half as many columns as the table. */
enum dtype { DTYPE_F32, DTYPE_F16, DTYPE_BF16, DTYPE_I8, DTYPE_Q4, DTYPE_I32, DTYPE_N };

static inline size_t dtype_bytes(enum dtype dtype)
{
    static const unsigned char bytes[DTYPE_N] = {4, 2, 2, 1, 1, 4};
    return bytes[dtype];
}

static inline const char *dtype_name(enum dtype dtype)
{
    static const char *const names[DTYPE_N] = {"f32", "f16", "bf16", "int8", "q4", "i32"};
    return names[dtype];
}

struct tensor {
    void *data; /* Borrowed: address of element [0,0], in the address space of its backend */
    int64_t rows;
    int64_t cols;
    int64_t stride; /* elements from one row to the next, >= cols */
    enum dtype dtype;
};

static inline struct tensor tensor_make(void *data, int64_t rows, int64_t cols, enum dtype dtype)
{
    return (struct tensor){data, rows, cols, cols, dtype};
}

/* Columns first .. first+cols-1 of t: the same rows, the same stride. */
static inline struct tensor tensor_cols(struct tensor t, int64_t first, int64_t cols)
{
    if (t.data != NULL) { /* else sizes are counted, and nothing is there */
        t.data = (char *)t.data + (size_t)first * dtype_bytes(t.dtype);
    }
    t.cols = cols;
    return t;
}

/* The first rows rows of t. */
static inline struct tensor tensor_head(struct tensor t, int64_t rows)
{
    t.rows = rows;
    return t;
}

/* Rows first .. first+rows-1 of t. */
static inline struct tensor tensor_rows(struct tensor t, int64_t first, int64_t rows)
{
    t.data = (char *)t.data + (size_t)(first * t.stride) * dtype_bytes(t.dtype);
    return tensor_head(t, rows);
}

static inline float *row_f32(struct tensor t, int64_t row)
{
    return (float *)t.data + row * t.stride;
}

static inline int32_t *row_i32(struct tensor t, int64_t row)
{
    return (int32_t *)t.data + row * t.stride;
}

/* The code, -8 to 7, of column col of a Q4 row of half bytes: the low half of byte i is column i,
 * its high half column half + i. The value is the code multiplied by the scale of its row. */
static inline int q4_code(const uint8_t *row, int64_t half, int64_t col)
{
    return (col < half ? row[col] & 15 : row[col - half] >> 4) - 8;
}

static inline float bf16_to_f32(uint16_t bits)
{
    union {
        uint32_t u;
        float f;
    } v = {.u = (uint32_t)bits << 16};
    return v.f;
}

/* Round to nearest, ties to even, as the AVX-512 instruction does; NaN stays NaN. */
static inline uint16_t bf16_from_f32(float value)
{
    union {
        float f;
        uint32_t u;
    } v = {.f = value};
    if ((v.u & 0x7fffffffu) > 0x7f800000u) {
        return (uint16_t)((v.u >> 16) | 0x40u);
    }
    return (uint16_t)((v.u + 0x7fffu + ((v.u >> 16) & 1u)) >> 16);
}

static inline float f16_to_f32(uint16_t bits)
{
    const uint32_t sign = (uint32_t)(bits & 0x8000u) << 16;
    const uint32_t rest = (uint32_t)(bits & 0x7fffu);
    union {
        uint32_t u;
        float f;
    } v;
    if (rest >= 0x7c00u) { /* infinity and NaN */
        v.u = sign | 0x7f800000u | ((rest & 0x3ffu) << 13);
        return v.f;
    }
    if (rest >= 0x0400u) { /* normal: re-bias the exponent from 15 to 127 */
        v.u = sign | ((rest << 13) + ((127u - 15u) << 23));
        return v.f;
    }
    v.f = (float)rest * 0x1p-24f; /* subnormal and zero: exact in float */
    v.u |= sign;
    return v.f;
}

/* Round to nearest, ties to even; from 65520 on infinity; NaN stays NaN. */
static inline uint16_t f16_from_f32(float value)
{
    union {
        float f;
        uint32_t u;
    } v = {.f = value};
    const uint32_t sign = v.u >> 16 & 0x8000u;
    v.u &= 0x7fffffffu;
    if (v.u > 0x7f800000u) {
        return (uint16_t)(sign | 0x7e00u);
    }
    if (v.u >= 0x47800000u) { /* 65536 */
        return (uint16_t)(sign | 0x7c00u);
    }
    if (v.u <
        0x38800000u) { /* below 2^-14: a multiple of 2^-24, whose number 2^23 leaves in the low
                        * bits */
        v.f = v.f * 0x1p24f + 0x1p23f;
        return (uint16_t)(sign | (v.u & 0x7ffu));
    }
    return (uint16_t)(sign | (v.u - 0x38000000u + 0xfffu + (v.u >> 13 & 1u)) >> 13);
}

/* The same, but instead of infinity the largest number of its sign, 65504: of infinities, too. */
static inline uint16_t f16_saturated(float value)
{
    const uint16_t bits = f16_from_f32(value);
    return (uint16_t)(bits - ((bits & 0x7fffu) == 0x7c00u ? 1 : 0));
}

#endif
