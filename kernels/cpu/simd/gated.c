/* Rows of pre-norm transformers: RMS norms, rotary positions, gates, and products with rows of a
 * table at random places. Bound by the bytes of their rows, the gate by its exponential, the last
 * by memory. */
#include "kernels/cpu/simd/internal.h"
#include "kernels/cpu/simd/vmath.h"

#include <math.h>

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

void SIMD(row_rope)(float *x, const float *table, int n_head, int64_t d_head)
{
    for (int h = 0; h < n_head; h++, x += d_head) {
        for (int64_t c = 0; c < d_head; c += LANES) {
            const int n = lanes_left(d_head, c);
            const vf in = v_load_n(x + c, n);
            const vf turned = v_swap_pairs(in) * v_load_n(table + d_head + c, n);
            v_store_n(x + c, v_fma(in, v_load_n(table + c, n), turned), n);
        }
    }
}

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

/* Each row is asked for while the one before is read. */
static ALWAYS_INLINE void dots(float *dot, const int32_t *slots, int n_slot, const float *x,
                               const struct value_table *table, const enum dtype dtype, int64_t d)
{
    enum { ROWS_AHEAD = 2 };
    const char *const data = table->data;
    for (int j = 0; j < n_slot; j++) {
        const char *const row = data + slots[j] * table->row_bytes;
        const int next = j + ROWS_AHEAD < n_slot ? j + ROWS_AHEAD : n_slot - 1;
        const char *const ahead = data + slots[next] * table->row_bytes;
        vf sum = v_set1(0);
        for (int64_t c = 0; c < d; c += LANES) {
            const int n = lanes_left(d, c);
            __builtin_prefetch(ahead + c * (int64_t)dtype_bytes(dtype));
            sum = v_fma(v_load_n(x + c, n), v_load_as(row, dtype, c, n), sum);
        }
        dot[j] = v_sum(sum) * (table->scale != NULL ? table->scale[slots[j]] : 1);
    }
}

void SIMD(row_dots)(float *dot, const int32_t *slots, int n_slot, const float *x,
                    const struct value_table *table, int64_t d)
{
    switch (table->dtype) {
    case DTYPE_F32: dots(dot, slots, n_slot, x, table, DTYPE_F32, d); break;
    case DTYPE_F16: dots(dot, slots, n_slot, x, table, DTYPE_F16, d); break;
    case DTYPE_BF16: dots(dot, slots, n_slot, x, table, DTYPE_BF16, d); break;
    default: dots(dot, slots, n_slot, x, table, DTYPE_I8, d); break;
    }
}
