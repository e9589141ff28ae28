/* The linear layer of the reference backend. */
#include "kernels/int8.h"
#include "kernels/ref/weight.h"

#include <math.h>

static float act_apply(enum act act, float x)
{
    switch (act) {
    case ACT_NONE: return x;
    case ACT_RELU: return x > 0 ? x : 0;
    /* 1 + erf(z) = erfc(-z), which does not cancel where z is very negative */
    case ACT_GELU: return (float)(0.5 * (double)x * erfc(-(double)x * 0.70710678118654752440));
    }
    UNREACHABLE();
}

/* Each sum in the order of the inputs; several at a time, as a sum of its own waits for each
 * addition. */
enum { N_SUM = 8 };

static void dots_float(float *sum, const float *in, const struct ref_weight *w, int64_t o,
                       int64_t n)
{
    const float *row[N_SUM];
    float s[N_SUM] = {0};
    for (int64_t i = 0; i < N_SUM; i++) {
        row[i] = row_f32(w->view, i < n ? o + i : o);
    }
    for (int64_t k = 0; k < w->view.cols; k++) {
        const float x = ref_round(in[k], w->head.dtype);
        for (int64_t i = 0; i < N_SUM; i++) {
            s[i] += x * row[i][k];
        }
    }
    memcpy(sum, s, (size_t)n * sizeof *sum);
}

static struct int8_scale scale_of(const float *in, int64_t n)
{
    uint32_t max = 0;
    for (int64_t k = 0; k < n; k++) {
        const uint32_t bits = int8_magnitude(in[k]);
        max = bits > max ? bits : max;
    }
    return int8_scale_of(int8_from_magnitude(max));
}

static void dots_int8(float *sum, const float *in, struct int8_scale scale,
                      const struct ref_weight *w, int64_t o, int64_t n)
{
    const float *row[N_SUM];
    int32_t s[N_SUM] = {0};
    for (int64_t i = 0; i < N_SUM; i++) {
        row[i] = row_f32(w->view, i < n ? o + i : o);
    }
    for (int64_t k = 0; k < w->view.cols; k++) {
        const int8_t x = int8_round(in[k], scale.inverse);
        for (int64_t i = 0; i < N_SUM; i++) {
            s[i] += x * (int32_t)row[i][k];
        }
    }
    for (int64_t i = 0; i < n; i++) {
        sum[i] = (float)s[i] * (scale.scale * w->scale[o + i]);
    }
}

void ref_linear(struct backend *be, struct tensor y, struct tensor x, const struct weight *weight,
                struct tensor bias, enum act act)
{
    (void)be;
    const struct ref_weight *const w = ref_weight_of(weight);
    const int64_t n_in = w->view.cols;
    const int64_t n_out = w->view.rows;
    const bool is_int8 = w->head.dtype == DTYPE_I8;
    for (int64_t r = 0; r < y.rows; r++) {
        const float *const in = row_f32(x, r);
        const struct int8_scale scale = is_int8 ? scale_of(in, n_in) : (struct int8_scale){0};
        for (int64_t first = 0, n; first < n_out; first += n) {
            float sum[N_SUM];
            n = n_out - first < N_SUM ? n_out - first : N_SUM;
            if (is_int8) {
                dots_int8(sum, in, scale, w, first, n);
            } else {
                dots_float(sum, in, w, first, n);
            }
            for (int64_t i = 0; i < n; i++) {
                if (bias.data != NULL) {
                    sum[i] += row_f32(bias, 0)[first + i];
                }
                row_f32(y, r)[first + i] = act_apply(act, sum[i]);
            }
        }
    }
}

void ref_ffn(struct backend *be, struct tensor y, struct tensor hidden, struct tensor x,
             const struct ffn *ffn)
{
    ref_linear(be, hidden, x, ffn->up, ffn->up_bias, ffn->act);
    ref_linear(be, y, hidden, ffn->down, ffn->down_bias, ACT_NONE);
}
