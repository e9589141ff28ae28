/* Gates of the reference backend. */
#include "kernels/ref/ref.h"

#include <math.h>

void ref_gate(struct backend *be, struct tensor y, struct tensor x, struct tensor g,
              enum gate_kind kind)
{
    (void)be;
    for (int64_t r = 0; r < y.rows; r++) {
        for (int64_t c = 0; c < y.cols; c++) {
            const double in = (double)row_f32(g, r)[kind == GATE_SILU ? c : 0];
            const double share =
                kind == GATE_FACTOR ? in : (kind == GATE_SILU ? in : 1) / (1 + exp(-in));
            row_f32(y, r)[c] = (float)((double)row_f32(x, r)[c] * share);
        }
    }
}
