/* What pre-norm transformers with rotary positions and gated networks add to the reference backend:
 * RMS norms, rotations, gates, and the experts of a memory. */
#include "kernels/ref/weight.h"

#include <math.h>

void ref_rms_norm(struct backend *be, struct tensor y, struct tensor sum, struct tensor x,
                  struct tensor r, struct tensor gamma, float eps)
{
    (void)be;
    for (int64_t i = 0; i < y.rows; i++) {
        const float *in = row_f32(x, i);
        for (int64_t c = 0; c < y.cols && r.data != NULL; c++) {
            row_f32(sum, i)[c] = in[c] + row_f32(r, i)[c];
        }
        in = r.data != NULL ? row_f32(sum, i) : in;
        double squares = 0;
        for (int64_t c = 0; c < y.cols; c++) {
            squares += (double)in[c] * (double)in[c];
        }
        const double inverse = 1 / sqrt(squares / (double)y.cols + (double)eps);
        for (int64_t c = 0; c < y.cols; c++) {
            row_f32(y, i)[c] = (float)((double)in[c] * inverse * (double)row_f32(gamma, 0)[c]);
        }
    }
}

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

void ref_gate(struct backend *be, struct tensor y, struct tensor x, struct tensor g,
              enum gate_kind kind)
{
    (void)be;
    for (int64_t r = 0; r < y.rows; r++) {
        for (int64_t c = 0; c < y.cols; c++) {
            const double in = (double)row_f32(g, r)[kind == GATE_SIGMOID ? 0 : c];
            const double share = (kind == GATE_SIGMOID ? 1 : in) / (1 + exp(-in));
            row_f32(y, r)[c] = (float)((double)row_f32(x, r)[c] * share);
        }
    }
}

void ref_pkm_experts(struct backend *be, struct tensor y, struct tensor shares, struct tensor slots,
                     struct tensor x, const struct weight *experts)
{
    (void)be;
    for (int64_t r = 0; r < x.rows; r++) {
        for (int64_t j = 0; j < slots.cols; j++) {
            const int32_t slot = row_i32(slots, r)[j];
            CHECK(slot >= 0 && slot < experts->rows);
            double dot = 0;
            for (int64_t c = 0; c < x.cols; c++) {
                dot += (double)row_f32(x, r)[c] * (double)weight_at(experts, slot, c);
            }
            const double gelu = 0.5 * dot * erfc(-dot * 0.70710678118654752440);
            row_f32(y, r)[j] = (float)((double)row_f32(shares, r)[j] * gelu);
        }
    }
}
