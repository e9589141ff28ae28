/* Rotary position embedding, bound by the bytes of its rows. */
#include "kernels/cpu/simd/internal.h"

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
