/* Rotary position embedding of the reference backend. */
#include "kernels/ref/ref.h"

void ref_rope(struct backend *be, struct tensor x, struct tensor table, const struct step *step,
              int n_head)
{
    (void)be;
    const int64_t d_head = x.cols / n_head;
    for (int64_t r = 0; r < x.rows; r++) {
        const float *const cosine = row_f32(table, step->pos[r]);
        const float *const sine = cosine + d_head;
        for (int64_t c = 0; c < x.cols; c += 2) {
            float *const pair = row_f32(x, r) + c;
            const int64_t i = c % d_head;
            const double a = (double)pair[0];
            const double b = (double)pair[1];
            pair[0] = (float)(a * (double)cosine[i] + b * (double)sine[i]);
            pair[1] = (float)(b * (double)cosine[i + 1] + a * (double)sine[i + 1]);
        }
    }
}
