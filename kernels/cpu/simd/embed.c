/* Sums of embedding rows: bound by the bytes of their rows. */
#include "kernels/cpu/simd/internal.h"

void SIMD(row_sum)(float *y, const struct row_source *source, int n_source, int64_t d)
{
    for (int64_t c = 0; c < d; c += LANES) {
        const int n = lanes_left(d, c);
        vf sum = v_load_as(source[0].row, source[0].dtype, c, n) * v_set1(source[0].scale);
        for (int i = 1; i < n_source; i++) {
            sum = sum + v_load_as(source[i].row, source[i].dtype, c, n) * v_set1(source[i].scale);
        }
        v_store_n(y + c, sum, n);
    }
}
