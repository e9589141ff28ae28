/* Attention with spans and persistent keys of the reference backend: see struct span_shape.
 *
 * "Augmenting Self-attention with Persistent Memory" (2019), section 3, equations 5 to 7;
 * "Adaptive Attention Span in Transformers" (2019), equations 3 to 5; where the authors' code
 * differs from the papers, the code: a token does not see itself, and positions before the text
 * take their part of the softmax. */
#include "kernels/ref/ref.h"

#include <math.h>

struct row_head {
    const struct step *step;
    const struct span_shape *shape;
    struct tensor k_pages, v_pages;
    const float *q; /* [d_head] */
    int seq, pos, head;
    int64_t d_head;
};

/* Of position u of the sequence, the element of the head's column 0. */
static int64_t cached(const struct row_head *at, struct tensor pages, int u)
{
    return ref_cache_row(pages, at->step, at->seq, u, at->shape->n_head * at->d_head) +
           at->head * at->d_head;
}

/* Sums that stand beside each other in memory, as none of them need wait for another; each has an
 * order of its own. */
enum { N_SUM = 8 };

/* The scores of the window's columns first .. first+n-1; column i is position pos - window + i. */
static void window_scores(double *score, const struct row_head *at, int first, int n)
{
    int64_t k[N_SUM];
    double dot[N_SUM] = {0};
    for (int i = 0; i < n; i++) {
        const int u = at->pos - at->shape->window + first + i;
        k[i] = u >= 0 ? cached(at, at->k_pages, u) : -1;
    }
    for (int64_t c = 0; c < at->d_head; c++) {
        const float *const position = row_f32(at->shape->position, c) + first;
        for (int i = 0; i < n; i++) {
            const double key =
                (k[i] >= 0 ? ref_cached(at->k_pages, k[i] + c) : 0) + (double)position[i];
            dot[i] += (double)at->q[c] * key;
        }
    }
    for (int i = 0; i < n; i++) {
        score[i] = dot[i] * (double)at->shape->scale;
    }
}

static double persistent_score(const struct row_head *at, int i)
{
    double dot = 0;
    for (int64_t c = 0; c < at->d_head; c++) {
        dot += (double)at->q[c] * (double)row_f32(at->shape->key, at->head * at->d_head + c)[i];
    }
    return dot * (double)at->shape->scale;
}

/* Scores become weights, which sum up to the share of what is not masked. Returns what the weighted
 * sum is divided by. */
static double weigh(const struct row_head *at, double *score)
{
    const struct span_shape *const shape = at->shape;
    const int n = shape->window + shape->n_persistent;
    double max = -INFINITY;
    for (int i = 0; i < n; i++) {
        max = score[i] > max ? score[i] : max;
    }
    double all = 0;
    double kept = 0;
    for (int i = 0; i < n; i++) {
        score[i] = exp(score[i] - max);
        all += score[i];
        if (shape->mask.data != NULL && i < shape->window) {
            score[i] *= (double)row_f32(shape->mask, at->head)[i];
        }
        kept += score[i];
    }
    return shape->mask.data != NULL ? kept + (double)SPAN_EPSILON * all : kept;
}

/* Columns c .. c+n-1 of the values' sum by these weights, divided by their total. */
static void weighted_sums(float *y, const struct row_head *at, const double *weight, double total,
                          int64_t c, int n)
{
    const struct span_shape *const shape = at->shape;
    double sum[N_SUM] = {0};
    for (int i = at->pos < shape->window ? shape->window - at->pos : 0; i < shape->window; i++) {
        const int64_t v = cached(at, at->v_pages, at->pos - shape->window + i) + c;
        for (int j = 0; j < n; j++) {
            sum[j] += weight[i] * ref_cached(at->v_pages, v + j);
        }
    }
    for (int i = 0; i < shape->n_persistent; i++) {
        const float *const value =
            row_f32(shape->value, (int64_t)at->head * shape->n_persistent + i) + c;
        for (int j = 0; j < n; j++) {
            sum[j] += weight[shape->window + i] * (double)value[j];
        }
    }
    for (int j = 0; j < n; j++) {
        y[j] = (float)(sum[j] / total);
    }
}

static void attend(float *y, const struct row_head *at, double *score)
{
    const struct span_shape *const shape = at->shape;
    for (int i = 0; i < shape->window; i += N_SUM) {
        window_scores(score + i, at, i, shape->window - i < N_SUM ? shape->window - i : N_SUM);
    }
    for (int i = 0; i < shape->n_persistent; i++) {
        score[shape->window + i] = persistent_score(at, i);
    }
    const double total = weigh(at, score);
    for (int64_t c = 0; c < at->d_head; c += N_SUM) {
        weighted_sums(y + c, at, score, total, c,
                      (int)(at->d_head - c < N_SUM ? at->d_head - c : N_SUM));
    }
}

void ref_span_attention(struct backend *be, struct tensor y, struct tensor q, struct tensor k_pages,
                        struct tensor v_pages, const struct step *step,
                        const struct span_shape *shape)
{
    (void)be;
    const int64_t d_head = y.cols / shape->n_head;
    for (int s = 0; s < step->n_seq; s++) {
        for (int r = step->seq_first[s]; r < step->seq_first[s + 1]; r++) {
            for (int h = 0; h < shape->n_head; h++) {
                const struct row_head at = {.step = step,
                                            .shape = shape,
                                            .k_pages = k_pages,
                                            .v_pages = v_pages,
                                            .q = row_f32(q, r) + h * d_head,
                                            .seq = s,
                                            .pos = step->pos[r],
                                            .head = h,
                                            .d_head = d_head};
                attend(row_f32(y, r) + h * d_head, &at, ref_step_scratch(step)->span);
            }
        }
    }
}
