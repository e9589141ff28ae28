/* The thin layer between the kernels of this folder and an instruction set.
 *
 * Every .c file here is compiled once for each set of the machine's family (see the Makefile) with
 * ISA_AVX512, ISA_AVX2, ISA_NEON or ISA_PLAIN defined. A kernel is written once over vf, a vector
 * of LANES floats, and vi, as many int32; C's own operators work on both. Functions seen outside a
 * file get the set's suffix from SIMD(). Plain uses the compiler's vectors of 16 bytes and nothing
 * else, so any machine runs it. NEON is what every 64-bit ARM has; ISA_NEON_DOT adds its dot
 * product of bytes, ISA_NEON_BF16 that of BF16 pairs.
 *
 * v_fma is a fused multiply-add where the set has one, and a multiply and an add elsewhere: the
 * same everywhere within a set, so that full tiles and tails give the same bits. */
#ifndef KERNELS_CPU_SIMD_SIMD_H
#define KERNELS_CPU_SIMD_SIMD_H

#include "kernels/tensor.h"

#include <stdint.h>
#include <string.h>

#if defined(ISA_AVX512)
#include <immintrin.h>
#define SIMD(name) name##_avx512
#define LANES 16
typedef __m512 vf;
#elif defined(ISA_AVX2)
#include <immintrin.h>
#define SIMD(name) name##_avx2
#define LANES 8
typedef __m256 vf;
#elif defined(ISA_NEON)
#include <arm_neon.h>
#if defined(ISA_NEON_BF16)
#define SIMD(name) name##_neon_bf16
#elif defined(ISA_NEON_DOT)
#define SIMD(name) name##_neon_dot
#else
#define SIMD(name) name##_neon
#endif
#define LANES 4
typedef float vf __attribute__((vector_size(16)));
#elif defined(ISA_PLAIN)
#define SIMD(name) name##_plain
#define LANES 4
typedef float vf __attribute__((vector_size(16)));
#else
#error "define ISA_AVX512, ISA_AVX2, ISA_NEON or ISA_PLAIN"
#endif

typedef int32_t vi __attribute__((vector_size(4 * LANES)));
typedef uint32_t vu __attribute__((vector_size(4 * LANES)));
typedef uint16_t vh __attribute__((vector_size(2 * LANES))); /* LANES halves */
typedef int8_t vb __attribute__((vector_size(LANES)));       /* LANES bytes */
typedef int16_t vs __attribute__((vector_size(4 * LANES)));  /* 2·LANES 16-bit numbers */
typedef uint16_t vsu __attribute__((vector_size(4 * LANES)));

/* A loop over an array of vectors must be unrolled completely, or the array lives in memory. */
#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 32")
#endif
#define ALWAYS_INLINE inline __attribute__((always_inline))

/* Not 0 + x: because of x = -0 the compiler could not drop the addition. */
static ALWAYS_INLINE vf v_set1(float x)
{
#if defined(ISA_AVX512)
    return _mm512_set1_ps(x);
#elif defined(ISA_AVX2)
    return _mm256_set1_ps(x);
#else
    return (vf){x, x, x, x};
#endif
}

static ALWAYS_INLINE vi vi_set1(int32_t x)
{
    return (vi){0} + x;
}

/* 0, 1, 2 .. */
static ALWAYS_INLINE vi v_lane(void)
{
    static const int32_t lane[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    vi v;
    memcpy(&v, lane, sizeof v);
    return v;
}

/* The same 32 bits in every lane. */
static ALWAYS_INLINE vf v_set1_bits(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return v_set1(x);
}

static ALWAYS_INLINE vf v_load(const void *from)
{
    vf v;
    memcpy(&v, from, sizeof v);
    return v;
}

static ALWAYS_INLINE void v_store(void *to, vf v)
{
    memcpy(to, &v, sizeof v);
}

/* Non-temporal store, which does not read the line first: the address is a multiple of the vector's
 * size. Call stream_end() before another thread reads it. */
static ALWAYS_INLINE void v_stream(float *to, vf v)
{
#if defined(ISA_AVX512)
    _mm512_stream_ps(to, v);
#elif defined(ISA_AVX2)
    _mm256_stream_ps(to, v);
#else
    v_store(to, v);
#endif
}

static ALWAYS_INLINE void stream_end(void)
{
#if defined(ISA_AVX512) || defined(ISA_AVX2)
    _mm_sfence();
#endif
}

static ALWAYS_INLINE vi vi_load(const void *from)
{
    vi v;
    memcpy(&v, from, sizeof v);
    return v;
}

static ALWAYS_INLINE void vi_store(void *to, vi v)
{
    memcpy(to, &v, sizeof v);
}

static ALWAYS_INLINE vi vi_max(vi a, vi b)
{
#if defined(ISA_AVX512)
    return (vi)_mm512_max_epi32((__m512i)a, (__m512i)b);
#elif defined(ISA_AVX2)
    return (vi)_mm256_max_epi32((__m256i)a, (__m256i)b);
#else
    const vi is_a = a > b;
    return (a & is_a) | (b & ~is_a);
#endif
}

/* Swaps neighbours: 1, 0, 3, 2 .. */
static ALWAYS_INLINE vf v_swap_pairs(vf v)
{
#if defined(ISA_AVX512)
    return _mm512_permute_ps(v, 0xb1);
#elif defined(ISA_AVX2)
    return _mm256_permute_ps(v, 0xb1);
#else
    return __builtin_shufflevector(v, v, 1, 0, 3, 2);
#endif
}

/* a where the mask is -1, b where it is 0. */
static ALWAYS_INLINE vf v_select(vi mask, vf a, vf b)
{
    return (vf)(((vi)a & mask) | ((vi)b & ~mask));
}

static ALWAYS_INLINE vf v_abs(vf a)
{
    return (vf)((vi)a & vi_set1(0x7fffffff));
}

#if defined(ISA_AVX512)

static ALWAYS_INLINE vf v_fma(vf a, vf b, vf c)
{
    return _mm512_fmadd_ps(a, b, c);
}

/* The larger one; b where either is NaN. */
static ALWAYS_INLINE vf v_max(vf a, vf b)
{
    return _mm512_max_ps(a, b);
}

/* The first n floats at from, 0 beyond them; nothing beyond them is read. */
static ALWAYS_INLINE vf v_load_n(const void *from, int n)
{
    return _mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), from);
}

static ALWAYS_INLINE void v_store_n(void *to, vf v, int n)
{
    _mm512_mask_storeu_ps(to, (__mmask16)((1u << n) - 1), v);
}

static ALWAYS_INLINE vf v_from_f16(vh h)
{
    return _mm512_cvtph_ps((__m256i)h);
}

/* One bit per lane of a comparison's result. */
static ALWAYS_INLINE uint32_t v_bits(vi mask)
{
    return _mm512_movepi32_mask((__m512i)mask);
}

#elif defined(ISA_AVX2)

static ALWAYS_INLINE vf v_fma(vf a, vf b, vf c)
{
    return _mm256_fmadd_ps(a, b, c);
}

static ALWAYS_INLINE vf v_max(vf a, vf b)
{
    return _mm256_max_ps(a, b);
}

static ALWAYS_INLINE __m256i mask_n(int n)
{
    const vi lane = {0, 1, 2, 3, 4, 5, 6, 7};
    return (__m256i)(lane < vi_set1(n));
}

static ALWAYS_INLINE vf v_load_n(const void *from, int n)
{
    return n == LANES ? v_load(from) : _mm256_maskload_ps(from, mask_n(n));
}

static ALWAYS_INLINE void v_store_n(void *to, vf v, int n)
{
    if (n == LANES) {
        v_store(to, v);
    } else {
        _mm256_maskstore_ps(to, mask_n(n), v);
    }
}

static ALWAYS_INLINE vf v_from_f16(vh h)
{
    return _mm256_cvtph_ps((__m128i)h);
}

static ALWAYS_INLINE uint32_t v_bits(vi mask)
{
    return (uint32_t)_mm256_movemask_ps((__m256)mask);
}

#else

static ALWAYS_INLINE vf v_fma(vf a, vf b, vf c)
{
#if defined(ISA_NEON)
    return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

static ALWAYS_INLINE vf v_max(vf a, vf b)
{
    return v_select(a > b, a, b);
}

static ALWAYS_INLINE vf v_load_n(const void *from, int n)
{
    if (n == LANES) {
        return v_load(from);
    }
    float lane[LANES] = {0};
    for (int i = 0; i < n && i < LANES; i++) { /* n < LANES, which the compiler cannot know */
        memcpy(&lane[i], (const float *)from + i, sizeof(float));
    }
    return v_load(lane);
}

static ALWAYS_INLINE void v_store_n(void *to, vf v, int n)
{
    if (n == LANES) {
        v_store(to, v);
        return;
    }
    for (int i = 0; i < n; i++) {
        const float x = v[i];
        memcpy((float *)to + i, &x, sizeof x);
    }
}

static ALWAYS_INLINE vf v_from_f16(vh h)
{
#if defined(ISA_NEON)
    return (vf)vcvt_f32_f16((float16x4_t)h);
#else
    return (vf){f16_to_f32(h[0]), f16_to_f32(h[1]), f16_to_f32(h[2]), f16_to_f32(h[3])};
#endif
}

static ALWAYS_INLINE uint32_t v_bits(vi mask)
{
    typedef uint64_t pairs __attribute__((vector_size(4 * LANES)));
    const pairs bit = (pairs)(mask & (vi){1, 2, 4, 8});
    const uint64_t bits = bit[0] | bit[1];
    return (uint32_t)(bits | bits >> 32);
}

#endif

/* LANES floats of a row that has n left, 0 past its end. */
static ALWAYS_INLINE vf v_load_left(const float *from, int n)
{
    return n >= LANES ? v_load(from) : n > 0 ? v_load_n(from, n) : v_set1(0);
}

static ALWAYS_INLINE vf v_from_bf16(vh h)
{
#if defined(ISA_AVX512) /* the compiler would widen it in halves */
    const vu wide = (vu)_mm512_cvtepu16_epi32((__m256i)h);
#elif defined(ISA_AVX2)
    const vu wide = (vu)_mm256_cvtepu16_epi32((__m128i)h);
#else
    const vu wide = __builtin_convertvector(h, vu);
#endif
    return (vf)(wide << 16);
}

/* Rounds to the nearest BF16, ties to even, as bf16_from_f32 does; NaN stays NaN. */
static ALWAYS_INLINE vf v_round_bf16(vf v)
{
    const vu bits = (vu)v;
    const vu odd = (bits >> 16) & 1u;
    const vf rounded = (vf)((bits + 0x7fffu + odd) & 0xffff0000u);
    return v_select(v == v, rounded, (vf)((bits & 0xffff0000u) | 0x400000u));
}

static ALWAYS_INLINE vf v_from_i32(vi v)
{
    return __builtin_convertvector(v, vf);
}

/* The low byte of each lane. */
static ALWAYS_INLINE vb vi_low_bytes(vi v)
{
#if defined(ISA_AVX512)
    return (vb)_mm512_cvtepi32_epi8((__m512i)v);
#elif defined(ISA_NEON)
    const int16x4_t half = vmovn_s32((int32x4_t)v);
    const int8x8_t bytes = vmovn_s16(vcombine_s16(half, half));
    vb low;
    memcpy(&low, &bytes, sizeof low);
    return low;
#else
    return __builtin_convertvector(v, vb);
#endif
}

static ALWAYS_INLINE vf v_from_i8(vb b)
{
#if defined(ISA_AVX512)
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)b));
#elif defined(ISA_AVX2)
    int64_t low;
    memcpy(&low, &b, sizeof low);
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_cvtsi64_si128(low)));
#elif defined(ISA_NEON)
    int32_t low;
    memcpy(&low, &b, sizeof low);
    const int16x8_t wide = vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(low)));
    return v_from_i32((vi)vmovl_s16(vget_low_s16(wide)));
#else
    return v_from_i32(__builtin_convertvector(b, vi));
#endif
}

/* LANES elements of a row of any type but I32 and I64, at any alignment. */
static ALWAYS_INLINE vf v_load_whole(const void *from, enum dtype dtype)
{
    if (dtype == DTYPE_F32) {
        return v_load(from);
    }
    if (dtype == DTYPE_I8) {
        vb b;
        memcpy(&b, from, sizeof b);
        return v_from_i8(b);
    }
    vh h;
    memcpy(&h, from, sizeof h);
    return dtype == DTYPE_BF16 ? v_from_bf16(h) : v_from_f16(h);
}

/* n <= LANES of them from element col on, 0 beyond them. */
static ALWAYS_INLINE vf v_load_as(const void *row, enum dtype dtype, int64_t col, int n)
{
    const size_t elem_bytes = dtype_bytes(dtype);
    const char *const from = (const char *)row + (size_t)col * elem_bytes;
    if (n == LANES) {
        return v_load_whole(from, dtype);
    }
    char part[sizeof(vf)] = {0};
    memcpy(part, from, (size_t)n * elem_bytes);
    return v_load_whole(part, dtype);
}

/* What a comparison yields, one bool a lane; C's operators & | ~ combine them. */
#if defined(ISA_AVX512)
typedef __mmask16 vm;

static ALWAYS_INLINE vm vm_gt(vf a, vf b)
{
    return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ);
}

static ALWAYS_INLINE vm vm_ge(vf a, vf b)
{
    return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ);
}

/* Either is NaN. */
static ALWAYS_INLINE vm vm_unordered(vf a, vf b)
{
    return _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q);
}

static ALWAYS_INLINE uint32_t vm_bits(vm m)
{
    return m;
}

/* sum + x where m holds, sum elsewhere */
static ALWAYS_INLINE vf v_add_where(vf sum, vm m, vf x)
{
    return _mm512_mask_add_ps(sum, m, sum, x);
}

static ALWAYS_INLINE vi vi_count_where(vi count, vm m)
{
    return (vi)_mm512_mask_add_epi32((__m512i)count, m, (__m512i)count, _mm512_set1_epi32(1));
}
#else
typedef vi vm;

static ALWAYS_INLINE vm vm_gt(vf a, vf b)
{
    return (vi)(a > b);
}

static ALWAYS_INLINE vm vm_ge(vf a, vf b)
{
    return (vi)(a >= b);
}

static ALWAYS_INLINE vm vm_unordered(vf a, vf b)
{
#if defined(ISA_AVX2)
    return (vm)_mm256_cmp_ps(a, b, _CMP_UNORD_Q);
#else
    return (vi)(a != a) | (vi)(b != b);
#endif
}

static ALWAYS_INLINE uint32_t vm_bits(vm m)
{
    return v_bits(m);
}

static ALWAYS_INLINE vf v_add_where(vf sum, vm m, vf x)
{
    return sum + (vf)((vi)x & m);
}

static ALWAYS_INLINE vi vi_count_where(vi count, vm m)
{
    return count - m;
}
#endif

/* The number of bits of a mask that are set. Sets with four lanes have no instruction for it but
 * the numbers for 0 .. 15 in four bits each. */
static ALWAYS_INLINE int v_count_bits(uint32_t bits)
{
#if LANES == 4
    return (int)(0x4332322132212110u >> 4 * bits & 7);
#else
    return __builtin_popcount(bits);
#endif
}

/* Stores the lanes whose bits are set one after the other; what follows them, up to a whole vector,
 * is undefined. */
static ALWAYS_INLINE void v_store_some(float *to, vf v, uint32_t bits)
{
#if defined(ISA_AVX512)
    v_store(to, _mm512_maskz_compress_ps((__mmask16)bits, v));
#elif defined(ISA_AVX2)
    /* the numbers of these lanes, one byte each */
    const uint64_t bytes = _pdep_u64(bits, 0x0101010101010101u) * 0xff;
    const uint64_t lane = _pext_u64(0x0706050403020100u, bytes);
    v_store(to,
            _mm256_permutevar8x32_ps(v, _mm256_cvtepu8_epi32(_mm_cvtsi64_si128((int64_t)lane))));
#else
    for (int l = 0; l < LANES; l++) {
        const float x = v[l];
        memcpy(to, &x, sizeof x);
        to += bits >> l & 1;
    }
#endif
}

/* Reductions in a fixed order: halves are added together down to four lanes, then to one. */
typedef float v4 __attribute__((vector_size(16)));

static ALWAYS_INLINE v4 v4_max(v4 a, v4 b)
{
    typedef int32_t mask4 __attribute__((vector_size(16)));
    const mask4 is_a = a > b;
    return (v4)(((mask4)a & is_a) | ((mask4)b & ~is_a));
}

static ALWAYS_INLINE float v_sum(vf v)
{
#if defined(ISA_AVX512)
    const __m256 half = _mm512_castps512_ps256(v) + _mm512_extractf32x8_ps(v, 1);
    const v4 quad = _mm256_castps256_ps128(half) + _mm256_extractf128_ps(half, 1);
#elif defined(ISA_AVX2)
    const v4 quad = _mm256_castps256_ps128(v) + _mm256_extractf128_ps(v, 1);
#else
    const v4 quad = v;
#endif
    return (quad[0] + quad[2]) + (quad[1] + quad[3]);
}

/* The same in double. */
static ALWAYS_INLINE double v_sum_wide(vf v)
{
#if LANES == 4
    return ((double)v[0] + (double)v[2]) + ((double)v[1] + (double)v[3]);
#else
#if defined(ISA_AVX512)
    const __m512d wide =
        _mm512_cvtps_pd(_mm512_castps512_ps256(v)) + _mm512_cvtps_pd(_mm512_extractf32x8_ps(v, 1));
    const __m256d half = _mm512_castpd512_pd256(wide) + _mm512_extractf64x4_pd(wide, 1);
#else
    const __m256d half =
        _mm256_cvtps_pd(_mm256_castps256_ps128(v)) + _mm256_cvtps_pd(_mm256_extractf128_ps(v, 1));
#endif
    const __m128d pair = _mm256_castpd256_pd128(half) + _mm256_extractf128_pd(half, 1);
    return pair[0] + pair[1];
#endif
}

/* No lane is NaN. */
static ALWAYS_INLINE float v_max_of(vf v)
{
#if defined(ISA_AVX512)
    const __m256 half = _mm256_max_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
    const v4 quad = v4_max(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
#elif defined(ISA_AVX2)
    const v4 quad = v4_max(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
#else
    const v4 quad = v;
#endif
    const float a = quad[0] > quad[2] ? quad[0] : quad[2];
    const float b = quad[1] > quad[3] ? quad[1] : quad[3];
    return a > b ? a : b;
}

/* Lanes that remain in a row of n columns at column col. */
static ALWAYS_INLINE int lanes_left(int64_t n, int64_t col)
{
    return n - col < LANES ? (int)(n - col) : LANES;
}

#endif
