/* Gates, bound by the exponential. */
#include "kernels/cpu/simd/internal.h"
#include "kernels/cpu/simd/vmath.h"

/* g / (1 + e^-g), by e^-|g|, which does not overflow. */
static ALWAYS_INLINE vf v_silu(vf g)
{
    const vf e = v_exp(-v_abs(g));
    return g * v_select(g > 0.0f, v_set1(1), e) / (e + 1.0f);
}

void SIMD(row_silu)(float *y, const float *x, const float *g, int64_t d)
{
    for (int64_t c = 0; c < d; c += LANES) {
        const int n = lanes_left(d, c);
        v_store_n(y + c, v_load_n(x + c, n) * v_silu(v_load_n(g + c, n)), n);
    }
}
