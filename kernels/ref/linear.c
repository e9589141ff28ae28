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

static float dot_float(const float *in, const struct ref_weight *w, int64_t o)
{
    const float *const row = row_f32(w->view, o);
    float sum = 0;
    for (int64_t k = 0; k < w->view.cols; k++) {
        sum += ref_round(in[k], w->head.dtype) * row[k];
    }
    return sum;
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

static float dot_int8(const float *in, struct int8_scale scale, const struct ref_weight *w,
                      int64_t o)
{
    const float *const row = row_f32(w->view, o);
    int32_t sum = 0;
    for (int64_t k = 0; k < w->view.cols; k++) {
        sum += int8_round(in[k], scale.inverse) * (int32_t)row[k];
    }
    return (float)sum * (scale.scale * w->scale[o]);
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
        for (int64_t o = 0; o < n_out; o++) {
            float sum = is_int8 ? dot_int8(in, scale, w, o) : dot_float(in, w, o);
            if (bias.data != NULL) {
                sum += row_f32(bias, 0)[o];
            }
            row_f32(y, r)[o] = act_apply(act, sum);
        }
    }
}

void ref_ffn(struct backend *be, struct tensor y, struct tensor hidden, struct tensor x,
             const struct ffn *ffn)
{
    ref_linear(be, hidden, x, ffn->up, ffn->up_bias, ffn->act);
    ref_linear(be, y, hidden, ffn->down, ffn->down_bias, ACT_NONE);
}
