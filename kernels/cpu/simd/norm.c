/* Layer norm and RMS norm, bound by the bytes of their rows: a row (4 KiB at width 1024) stays in
 * L1 during its passes. Shares reached: see SPEED.md. */
#include "kernels/cpu/simd/internal.h"

#include <math.h>

/* ---- layer norm -------------------------------------------------------------------------------*/

static float mean_of(const float *x, int64_t d)
{
    vf sum = v_set1(0);
    for (int64_t c = 0; c < d; c += LANES) {
        sum = sum + v_load_n(x + c, lanes_left(d, c));
    }
    return v_sum(sum) / (float)d;
}

/* Mean of the squared distances from mean; lanes past the end do not count. */
static float variance_of(const float *x, int64_t d, float mean)
{
    vf sum = v_set1(0);
    int64_t c = 0;
    for (; c + LANES <= d; c += LANES) {
        const vf centred = v_load(x + c) - mean;
        sum = v_fma(centred, centred, sum);
    }
    if (c < d) {
        float rest[LANES];
        for (int i = 0; i < LANES; i++) {
            rest[i] = c + i < d ? x[c + i] : mean;
        }
        const vf centred = v_load(rest) - mean;
        sum = v_fma(centred, centred, sum);
    }
    return v_sum(sum) / (float)d;
}

void SIMD(row_norm)(float *y, const float *x, const float *r, const float *gamma, const float *beta,
                    int64_t d, float eps)
{
    if (r != NULL) {
        for (int64_t c = 0; c < d; c += LANES) {
            const int n = lanes_left(d, c);
            v_store_n(y + c, v_load_n(x + c, n) + v_load_n(r + c, n), n);
        }
        x = y;
    }
    const float mean = mean_of(x, d);
    const float inverse = 1.0f / sqrtf(variance_of(x, d, mean) + eps);
    for (int64_t c = 0; c < d; c += LANES) {
        const int n = lanes_left(d, c);
        const vf centred = (v_load_n(x + c, n) - mean) * inverse;
        v_store_n(y + c, v_fma(centred, v_load_n(gamma + c, n), v_load_n(beta + c, n)), n);
    }
}

/* ---- RMS norm ---------------------------------------------------------------------------------*/

void SIMD(row_rms_norm)(float *y, float *sum, const float *x, const float *r, const float *gamma,
                        int64_t d, float eps)
{
    for (int64_t c = 0; c < d && r != NULL; c += LANES) {
        const int n = lanes_left(d, c);
        v_store_n(sum + c, v_load_n(x + c, n) + v_load_n(r + c, n), n);
    }
    x = r != NULL ? sum : x;
    vf squares = v_set1(0);
    for (int64_t c = 0; c < d; c += LANES) {
        const vf in = v_load_n(x + c, lanes_left(d, c));
        squares = v_fma(in, in, squares);
    }
    const vf inverse = v_set1(1.0f / sqrtf(v_sum(squares) / (float)d + eps));
    for (int64_t c = 0; c < d; c += LANES) {
        const int n = lanes_left(d, c);
        v_store_n(y + c, v_load_n(x + c, n) * inverse * v_load_n(gamma + c, n), n);
    }
}
