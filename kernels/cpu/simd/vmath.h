/* exp and the activations, on vectors.
 *
 * The polynomials are minimax fits of our own (weighted least squares, reweighted until the error
 * is level); the bounds in the comments are those of the fit, in units of 2^-24 relative. */
#ifndef KERNELS_CPU_SIMD_VMATH_H
#define KERNELS_CPU_SIMD_VMATH_H

#include "kernels/cpu/simd/simd.h"

enum { EXP_VECS = 4 };
static const float exp_low = -87.33654f; /* log of the smallest normal float */

/* e^x for n <= EXP_VECS vectors of x <= 0, 0 below the smallest normal result; NaN stays NaN. Step
 * by step: one vector after the other, the chains of dependent steps would fill the scheduler's
 * window and wait for each other. */
static ALWAYS_INLINE void v_exp_n(vf *x, const int n)
{
    enum { N_FACTOR = 5 };
    /* (e^r - 1 - r) / r² on |r| <= log(2)/2: 0.05 */
    static const float c[N_FACTOR] = {0.0013814559766462866f, 0.008368735569671118f,
                                      0.04166838986101773f, 0.16666520477666974f,
                                      0.4999999343741225f};
    const vf low = v_set1(exp_low);
    const vf shift = v_set1(12582912.0f); /* 1.5 · 2^23: adding it rounds to an integer */
    vf shifted[EXP_VECS];
    vf r[EXP_VECS];
    vf q[EXP_VECS];
    UNROLL
    for (int i = 0; i < n; i++) {
#if defined(ISA_AVX512)
        r[i] = x[i]; /* the results for x that are too small are masked out below */
#else
        r[i] = v_max(low, x[i]);
#endif
        shifted[i] = v_fma(r[i], v_set1(1.44269504f), shift);
    }
    UNROLL
    for (int i = 0; i < n; i++) {
        /* log 2 in two parts; n times the first is exact, because it has 9 bits and n has 7 */
        r[i] = v_fma(shifted[i] - shift, v_set1(-0.693359375f), r[i]);
        r[i] = v_fma(shifted[i] - shift, v_set1(2.12194440e-4f), r[i]);
        q[i] = v_set1(c[0]);
    }
    UNROLL
    for (int k = 1; k < N_FACTOR; k++) {
        UNROLL
        for (int i = 0; i < n; i++) {
            q[i] = v_fma(q[i], r[i], v_set1(c[k]));
        }
    }
    UNROLL
    for (int i = 0; i < n; i++) {
        const vf p = v_fma(q[i], r[i] * r[i], r[i]) + 1.0f;
#if defined(ISA_AVX512)
        const __mmask16 is_normal = _mm512_cmp_ps_mask(x[i], low, _CMP_NLT_UQ);
        x[i] = _mm512_maskz_scalef_ps(is_normal, p, shifted[i] - shift);
#else
        const vi exponent = ((vi)shifted[i] - (vi)shift + 127) << 23;
        const vf y = p * (vf)exponent;
        x[i] = (vf)((vi)y & ~(x[i] < low));
#endif
    }
}

static ALWAYS_INLINE vf v_exp(vf x)
{
    v_exp_n(&x, 1);
    return x;
}

/* The same with subnormal results, for callers that must know whether a result is 0. */
static ALWAYS_INLINE vf v_exp_far(vf x)
{
    const vf root = v_exp(x * 0.5f);
    return v_select(x < exp_low, root * root, v_exp(x));
}

enum { GELU_VECS = 4 };

/* x/2 (1 + erf(x/√2)), the exact GELU, as x/2 · erfc(-x/√2): that does not cancel where x is very
 * negative, and needs one polynomial where erf needs two. NaN stays NaN. Several vectors at a time,
 * step by step: one after the other, their chains of 30 dependent steps would fill the scheduler's
 * window and wait for each other. */
static ALWAYS_INLINE void v_gelu(vf x[GELU_VECS])
{
    /* -log erfc(a) / a on [0, 4], error weighted by erfc: 0.04; from 4 on erfc < 2^-25 counts as 0
     */
    static const float c[] = {0.00010602662106701244f, -0.0005879505752193759f,
                              0.0015767599129240528f,  -5.8781277681441146e-05f,
                              -0.01921714314819306f,   0.10279921056266383f,
                              0.636616106992315f,      1.1283793324910243f};
    vf a[GELU_VECS];
    vf q[GELU_VECS];
    UNROLL
    for (int i = 0; i < GELU_VECS; i++) {
        a[i] = v_abs(x[i] * 0.70710678f);
        q[i] = v_set1(-8.043819426484244e-06f);
    }
    UNROLL
    for (int k = 0; k < 8; k++) {
        UNROLL
        for (int i = 0; i < GELU_VECS; i++) {
            q[i] = v_fma(q[i], a[i], v_set1(c[k]));
        }
    }
    UNROLL
    for (int i = 0; i < GELU_VECS; i++) {
        q[i] = -(q[i] * a[i]);
    }
    v_exp_n(q, GELU_VECS);
    UNROLL
    for (int i = 0; i < GELU_VECS; i++) {
        const vf tail = v_select(a[i] < 4.0f, q[i], v_set1(0.0f));
        x[i] = x[i] * 0.5f * v_select(x[i] > 0.0f, 2.0f - tail, tail);
    }
}

/* x > 0 ? x : 0 */
static ALWAYS_INLINE vf v_relu(vf x)
{
    return v_max(x, v_set1(0.0f));
}

#endif
