/* Layer norms, RMS norms and L2 norms of the reference backend. */
#include "kernels/ref/ref.h"

#include <math.h>

/* Normalises one row. out may be in. Two passes: the variance as a mean of squares minus a square
 * of the mean would cancel where the mean is large. */
static void norm_row(float *out, const float *in, const float *gamma, const float *beta, int64_t d,
                     float eps)
{
    double sum = 0;
    for (int64_t c = 0; c < d; c++) {
        sum += (double)in[c];
    }
    const double mean = sum / (double)d;
    double squares = 0;
    for (int64_t c = 0; c < d; c++) {
        const double centred = (double)in[c] - mean;
        squares += centred * centred;
    }
    const double inverse = 1 / sqrt(squares / (double)d + (double)eps);
    for (int64_t c = 0; c < d; c++) {
        out[c] = (float)(((double)in[c] - mean) * inverse * (double)gamma[c] + (double)beta[c]);
    }
}

void ref_norm(struct backend *be, struct tensor y, struct tensor x, struct tensor gamma,
              struct tensor beta, float eps)
{
    (void)be;
    for (int64_t r = 0; r < y.rows; r++) {
        norm_row(row_f32(y, r), row_f32(x, r), row_f32(gamma, 0), row_f32(beta, 0), y.cols, eps);
    }
}

void ref_add_norm(struct backend *be, struct tensor y, struct tensor x, struct tensor r,
                  struct tensor gamma, struct tensor beta, float eps)
{
    (void)be;
    for (int64_t i = 0; i < y.rows; i++) {
        float *const out = row_f32(y, i);
        const float *const a = row_f32(x, i);
        const float *const b = row_f32(r, i);
        for (int64_t c = 0; c < y.cols; c++) {
            out[c] = a[c] + b[c];
        }
        norm_row(out, out, row_f32(gamma, 0), row_f32(beta, 0), y.cols, eps);
    }
}

void ref_l2_norm(struct backend *be, struct tensor y, struct tensor x, int n_run)
{
    (void)be;
    const int64_t d = y.cols / n_run;
    for (int64_t i = 0; i < y.rows * n_run; i++) {
        const float *const in = row_f32(x, i / n_run) + i % n_run * d;
        float *const out = row_f32(y, i / n_run) + i % n_run * d;
        double squares = 0;
        for (int64_t c = 0; c < d; c++) {
            squares += (double)in[c] * (double)in[c];
        }
        const double norm = sqrt(squares);
        for (int64_t c = 0; c < d; c++) {
            out[c] = (float)((double)in[c] / norm);
        }
    }
}

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

void ref_head_norm(struct backend *be, struct tensor x, struct tensor gamma, int n_head, float eps)
{
    for (int h = 0; h < n_head; h++) {
        const struct tensor head = tensor_cols(x, h * gamma.cols, gamma.cols);
        ref_rms_norm(be, head, (struct tensor){0}, head, (struct tensor){0}, gamma, eps);
    }
}
