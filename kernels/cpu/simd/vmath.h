/* exp and the activations, on vectors.
 *
 * The polynomials are minimax fits of our own (weighted least squares, reweighted until the error
 * is level); the bounds in the comments are those of the fit, in units of 2^-24 relative. */
#ifndef KERNELS_CPU_SIMD_VMATH_H
#define KERNELS_CPU_SIMD_VMATH_H

#include "kernels/cpu/simd/simd.h"

/* e^x for x <= 0, 0 below the smallest normal result; NaN stays NaN. */
static ALWAYS_INLINE vf v_exp(vf x)
{
    const vf low = v_set1(-87.33654f);    /* log of the smallest normal float */
    const vf shift = v_set1(12582912.0f); /* 1.5 · 2^23: adding it rounds to an integer */
    const vf t = v_max(low, x);
    const vf shifted = v_fma(t, v_set1(1.44269504f), shift);
    const vf n = shifted - shift;
    /* log 2 in two parts; n times the first is exact, because it has 9 bits and n has 7 */
    vf r = v_fma(n, v_set1(-0.693359375f), t);
    r = v_fma(n, v_set1(2.12194440e-4f), r);
    /* (e^r - 1 - r) / r² on |r| <= log(2)/2: 0.05 */
    vf q = v_set1(0.0013814559766462866f);
    q = v_fma(q, r, v_set1(0.008368735569671118f));
    q = v_fma(q, r, v_set1(0.04166838986101773f));
    q = v_fma(q, r, v_set1(0.16666520477666974f));
    q = v_fma(q, r, v_set1(0.4999999343741225f));
    const vf p = v_fma(q, r * r, r) + 1.0f;
    const vi exponent = ((vi)shifted - (vi)shift + 127) << 23;
    const vf y = p * (vf)exponent;
    return v_select(x < low, v_set1(0.0f), y);
}

/* x/2 (1 + erf(x/√2)), the exact GELU, as x/2 · erfc(-x/√2): that does not cancel where x is very
 * negative. NaN stays NaN. */
static ALWAYS_INLINE vf v_gelu(vf x)
{
    const vf half = x * 0.5f;
    const vf z = x * 0.70710678f;
    const vf a = v_abs(z);
    /* erf(z) / z as a polynomial of z² on [0, 1]: 0.02 */
    const vf s = z * z;
    vf p = v_set1(0x1.496a6cp-14f);
    p = v_fma(p, s, v_set1(-0x1.a3f718p-11f));
    p = v_fma(p, s, v_set1(0x1.5405b6p-8f));
    p = v_fma(p, s, v_set1(-0x1.b7f90ep-6f));
    p = v_fma(p, s, v_set1(0x1.ce2cf8p-4f));
    p = v_fma(p, s, v_set1(-0x1.81273ep-2f));
    p = v_fma(p, s, v_set1(0x1.20dd74p+0f));
    const vf near = v_fma(p, z, v_set1(1.0f));
    /* -log erfc(a) on [1, 4], error weighted by erfc: 0.02; from 4 on erfc < 2^-25 counts as 0 */
    vf q = v_set1(-0.00018637920914976736f);
    q = v_fma(q, a, v_set1(0.0029476584694675f));
    q = v_fma(q, a, v_set1(-0.02183806465279381f));
    q = v_fma(q, a, v_set1(0.10310675585495904f));
    q = v_fma(q, a, v_set1(0.6381448314191036f));
    q = v_fma(q, a, v_set1(1.1270891909197673f));
    q = v_fma(q, a, v_set1(0.00034152285265556223f));
    const vf tail = v_select(a < 4.0f, v_exp(-q), v_set1(0.0f));
    const vf far = v_select(z < 0.0f, tail, 2.0f - tail);
    return half * v_select(a >= 1.0f, far, near);
}

/* x > 0 ? x : 0 */
static ALWAYS_INLINE vf v_relu(vf x)
{
    return v_max(x, v_set1(0.0f));
}

#endif
