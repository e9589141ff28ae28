/* Dot products within the lanes of a vector: of bytes, of 16-bit numbers, of BF16. */
#ifndef KERNELS_CPU_SIMD_DOT_H
#define KERNELS_CPU_SIMD_DOT_H

#include "kernels/cpu/simd/simd.h"
#include "kernels/err.h"

/* Instructions that only some sets have: dot products of four bytes, and of two BF16. */
#if defined(ISA_AVX512) || defined(ISA_NEON_DOT)
#define HAS_DOT_BYTES
#endif
#if defined(ISA_AVX512) || defined(ISA_NEON_BF16)
#define HAS_DOT_PAIRS
#endif

/* Sums of the products of pairs; each product fits 16 bits. */
static ALWAYS_INLINE vi vi_dot2(vs a, vs b)
{
#if defined(ISA_AVX2)
    return (vi)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(ISA_NEON)
    return (vi)vpaddlq_s16((int16x8_t)(a * b));
#else
    const vi product = (vi)(a * b);
    return ((vi)((vu)product << 16) >> 16) + (product >> 16);
#endif
}

#if defined(HAS_DOT_BYTES)
/* sum + the products of four bytes of each lane; AVX-512's of a have no sign. */
static ALWAYS_INLINE vi vi_dot_bytes(vi sum, vi a, vi b)
{
#if defined(ISA_AVX512)
    return (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#else
    return (vi)vdotq_s32((int32x4_t)sum, (int8x16_t)a, (int8x16_t)b);
#endif
}
#endif

/* sum + the products of the two BF16 of each lane. */
static ALWAYS_INLINE vf v_dot_pairs(vf sum, vf a, vf b)
{
#if defined(ISA_AVX512)
    return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
#elif defined(ISA_NEON_BF16)
    return (vf)vbfdotq_f32((float32x4_t)sum, (bfloat16x8_t)a, (bfloat16x8_t)b);
#else
    (void)sum;
    (void)a;
    (void)b;
    UNREACHABLE(); /* callers ask for HAS_DOT_PAIRS, or the machine has no GEMM_PAIRS */
#endif
}

/* 2·LANES numbers rounded to BF16, those of low first. */
static ALWAYS_INLINE vf v_pairs(vf low, vf high)
{
#if defined(ISA_AVX512)
    return (vf)_mm512_cvtne2ps_pbh(high, low);
#elif defined(ISA_NEON_BF16)
    return (vf)vcvtq_high_bf16_f32(vcvtq_low_bf16_f32((float32x4_t)low), (float32x4_t)high);
#else
    (void)low;
    (void)high;
    UNREACHABLE();
#endif
}

#endif
