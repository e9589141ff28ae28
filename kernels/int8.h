/* Rows of numbers as INT8: v ≈ q·scale, with q in -127 .. 127 and one scale per row.
 *
 * scale = max|v| / 127 and q = v · (127 / max|v|), rounded to the nearest, ties to even. A row
 * below INT8_TINY is all zeros; one with NaN or infinity has the scale NaN, so that what is
 * computed from it says so. Every backend and models/convert round by these lines, so a weight is
 * the same bits wherever it was made, and sums of products, being whole numbers, are too. */
#ifndef KERNELS_INT8_H
#define KERNELS_INT8_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#define INT8_TINY 1e-30f

/* Added to a number below 2^22, it leaves the nearest whole number in the low bits. */
#define INT8_MAGIC 12582912.0f

/* Inputs of a linear layer, so that no sum leaves 32 bits: 255 · 127 · 65536 < 2^31. */
enum { INT8_IN_MAX = 65536 };

struct int8_scale {
    float scale, inverse;
};

static inline struct int8_scale int8_scale_of(float max)
{
    if (!(max < INFINITY)) {
        return (struct int8_scale){NAN, 0};
    }
    return max < INT8_TINY ? (struct int8_scale){0, 0}
                           : (struct int8_scale){max / 127.0f, 127.0f / max};
}

/* The bits of |v|, which are in the order of the numbers, NaN above all. */
static inline uint32_t int8_magnitude(float v)
{
    uint32_t bits;
    memcpy(&bits, &v, sizeof bits);
    return bits & 0x7fffffffu;
}

static inline float int8_from_magnitude(uint32_t bits)
{
    float v;
    memcpy(&v, &bits, sizeof v);
    return v;
}

static inline int8_t int8_round(float v, float inverse)
{
    const float scaled = v * inverse;
    const float shifted = scaled + INT8_MAGIC;
    uint32_t bits;
    memcpy(&bits, &shifted, sizeof bits);
    return (int8_t)(uint8_t)(bits & 0xffu);
}

#endif
