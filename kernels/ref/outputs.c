/* Rows of the vocabulary: gathering hidden rows for it, and the log-probabilities, ranks, best
 * tokens and entropy of its logits. */
#include "kernels/ref/ref.h"

#include <math.h>

void ref_gather(struct backend *be, struct tensor y, struct tensor x, const struct step *step,
                int first)
{
    (void)be;
    for (int64_t i = 0; i < y.rows; i++) {
        const int32_t from = step->out_row[first + i];
        for (int64_t c = 0; c < y.cols; c++) {
            row_f32(y, i)[c] = row_f32(x, from)[c];
        }
    }
}

/* What the log-probabilities of one row need: log p(i) = z[i] - max - log_total. */
struct distribution {
    const float *z; /* Borrowed: [n] */
    int n;
    double max;
    double log_total; /* log Σ exp(z - max); NaN if the logits have no distribution */
};

static struct distribution distribution_of(const float *z, int n)
{
    float max = -INFINITY;
    bool has_nan = false;
    for (int i = 0; i < n; i++) {
        has_nan = has_nan || isnan(z[i]);
        max = z[i] > max ? z[i] : max;
    }
    double total = 0;
    for (int i = 0; i < n; i++) {
        total += exp((double)z[i] - (double)max);
    }
    const bool is_valid = !has_nan && isfinite(max);
    return (struct distribution){z, n, (double)max, is_valid ? log(total) : (double)NAN};
}

static float logprob(const struct distribution *p, int32_t id)
{
    return (float)((double)p->z[id] - p->max - p->log_total);
}

/* H = -Σ p log p; tokens at -infinity have p = 0 and add nothing. */
static float entropy(const struct distribution *p)
{
    if (isnan(p->log_total)) {
        return NAN;
    }
    double sum = 0;
    for (int i = 0; i < p->n; i++) {
        if (p->z[i] > -INFINITY) {
            const double log_p = (double)p->z[i] - p->max - p->log_total;
            sum -= exp(log_p) * log_p;
        }
    }
    return (float)sum;
}

static int32_t rank_of(const struct distribution *p, int32_t id)
{
    if (isnan(p->log_total)) {
        return 0;
    }
    int32_t rank = 1;
    for (int i = 0; i < p->n; i++) {
        rank += p->z[i] > p->z[id] || (p->z[i] == p->z[id] && i < id);
    }
    return rank;
}

/* The n_top best tokens: larger logit, then smaller id. Ids come in ascending order, so an equal
 * logit never passes an earlier one. */
static void top(const struct distribution *p, int n_top, int32_t *top_id, float *top_logprob)
{
    const bool is_valid = !isnan(p->log_total);
    int n = 0;
    for (int i = 0; i < p->n && is_valid; i++) {
        int at = n;
        while (at > 0 && p->z[i] > p->z[top_id[at - 1]]) {
            at--;
        }
        if (at == n_top) {
            continue;
        }
        n = n < n_top ? n + 1 : n_top;
        for (int j = n - 1; j > at; j--) {
            top_id[j] = top_id[j - 1];
        }
        top_id[at] = i;
    }
    for (int j = 0; j < n_top; j++) {
        top_logprob[j] = j < n ? logprob(p, top_id[j]) : (is_valid ? -INFINITY : NAN);
        top_id[j] = j < n ? top_id[j] : -1;
    }
}

void ref_log_softmax(struct backend *be, struct tensor y, struct tensor base)
{
    (void)be;
    for (int64_t r = 0; r < y.rows; r++) {
        float *const z = row_f32(y, r);
        const struct distribution p = distribution_of(z, (int)y.cols);
        const double more = base.data != NULL ? (double)row_f32(base, r)[0] : 0;
        const float max = (float)p.max;
        const float shift = (float)(more - p.log_total);
        for (int64_t c = 0; c < y.cols; c++) {
            z[c] = z[c] - max + shift;
        }
    }
}

void ref_outputs(struct backend *be, struct tensor logits, struct step *step, int first)
{
    (void)be;
    const struct step_scratch *const scratch = ref_step_scratch(step);
    for (int64_t r = 0; r < logits.rows; r++) {
        const int i = first + (int)r;
        if ((step->out_want[i] & OUT_SAMPLE) != 0) {
            step->out_token[i] = ref_sample_row(step, i, row_f32(logits, r), (int)logits.cols,
                                                scratch->logit, scratch->candidate);
        }
        if ((step->out_want[i] & (OUT_LOGPROB | OUT_TOP | OUT_ENTROPY)) == 0) {
            continue;
        }
        const struct distribution p = distribution_of(row_f32(logits, r), (int)logits.cols);
        if ((step->out_want[i] & OUT_LOGPROB) != 0) {
            const int32_t id =
                step->target[i] == TARGET_SAMPLED ? step->out_token[i] : step->target[i];
            step->out_logprob[i] = logprob(&p, id);
            step->out_rank[i] = rank_of(&p, id);
        }
        if ((step->out_want[i] & OUT_TOP) != 0) {
            const int64_t at = (int64_t)i * step->limits.n_top_max;
            top(&p, step->n_top, step->top_id + at, step->top_logprob + at);
        }
        if ((step->out_want[i] & OUT_ENTROPY) != 0) {
            step->out_entropy[i] = entropy(&p);
        }
    }
}

void ref_linear_outputs(struct backend *be, struct tensor logits, struct tensor x,
                        const struct weight *w, struct tensor bias, struct step *step, int first)
{
    ref_linear(be, logits, x, w, bias, ACT_NONE);
    ref_outputs(be, logits, step, first);
}
