/* Drawing the next token of a row, as struct sample_params in step.h defines it.
 *
 * Candidates are taken one by one from a heap instead of sorting the vocabulary: top_k, top_p and
 * min_p mostly end after a few of 60 000, and the heap sorts in place, without allocating. */
#include "kernels/ref/ref.h"

#include <math.h>

/* The candidates of one row. ids[0 .. n_heap-1] is a heap with the best on top; ids[n_heap .. n-1]
 * are those already taken, the last taken first. */
struct candidates {
    int32_t *ids;   /* Borrowed: [n] */
    const float *z; /* Borrowed: [n] adjusted logits by id */
    int n, n_heap;
};

static bool is_before(const struct candidates *c, int32_t a, int32_t b)
{
    return c->z[a] > c->z[b] || (c->z[a] == c->z[b] && a < b);
}

static void sift_down(struct candidates *c, int at)
{
    const int32_t id = c->ids[at];
    for (int child = 2 * at + 1; child < c->n_heap; child = 2 * at + 1) {
        if (child + 1 < c->n_heap && is_before(c, c->ids[child + 1], c->ids[child])) {
            child++;
        }
        if (is_before(c, id, c->ids[child])) {
            break;
        }
        c->ids[at] = c->ids[child];
        at = child;
    }
    c->ids[at] = id;
}

static struct candidates candidates_of(const float *z, int n, int32_t *ids)
{
    struct candidates c = {ids, z, n, n};
    for (int i = 0; i < n; i++) {
        ids[i] = i;
    }
    for (int at = n / 2 - 1; at >= 0; at--) {
        sift_down(&c, at);
    }
    return c;
}

/* The candidate of rank i (from 0), i <= the number taken before. */
static int32_t candidate_at(struct candidates *c, int i)
{
    if (i == c->n - c->n_heap) {
        const int32_t id = c->ids[0];
        c->n_heap--;
        c->ids[0] = c->ids[c->n_heap];
        sift_down(c, 0);
        c->ids[c->n_heap] = id;
    }
    return c->ids[c->n - 1 - i];
}

float ref_adjusted(float z, const struct sample_adjust *a, const struct sample_params *p)
{
    if (a->n_prompt > 0 || a->n_generated > 0) {
        z = z > 0 ? z / p->repetition : z * p->repetition;
    }
    z -= p->presence * (a->n_generated > 0 ? 1.0f : 0.0f) + p->frequency * (float)a->n_generated;
    return z + a->bias;
}

/* Writes the row's adjusted logits to z; tokens that are not allowed become -infinity. */
static void adjust_row(float *z, const float *logits, int n_vocab, const struct step *step,
                       const struct sample_params *p)
{
    const struct sample_adjust *const adjust = step->adjust + p->adjust_first;
    const int32_t *const allow = step->allow + p->allow_first;
    for (int id = 0; id < n_vocab; id++) {
        z[id] = p->n_allow == 0 ? logits[id] : -INFINITY;
    }
    for (int i = 0; i < p->n_allow; i++) {
        z[allow[i]] = logits[allow[i]];
    }
    /* Adjusting after the allow list changes nothing for the others: -infinity stays. */
    for (int i = 0; i < p->n_adjust; i++) {
        z[adjust[i].token] = ref_adjusted(z[adjust[i].token], &adjust[i], p);
    }
}

/* exp((z - max) / temperature): the best token's weight is 1. The difference comes first, so that a
 * tiny temperature cannot overflow the quotient of a large logit. */
static double share(float z, float max, float temperature)
{
    return exp(((double)z - (double)max) / (double)temperature);
}

/* Draws among all tokens in id order. */
static int32_t draw_by_id(const float *z, int n_vocab, float max, const struct sample_params *p)
{
    double total = 0;
    for (int id = 0; id < n_vocab; id++) {
        total += share(z[id], max, p->temperature);
    }
    double sum = 0;
    int32_t last = 0;
    for (int id = 0; id < n_vocab; id++) {
        const double s = share(z[id], max, p->temperature);
        sum += s;
        if (s > 0) {
            last = id;
            if (sum > p->u * total) {
                break;
            }
        }
    }
    return last;
}

/* Ranks first .. end-1 of the candidates. */
struct ranks {
    int first, end;
    double mass;
};

/* What typical_p leaves of the n_kept best, whose mass is kept. Log-shares fall along the ranks, so
 * those near their mean are neighbours: from the first one below it on, the nearer neighbour is
 * taken, and all that is as near as the last one. */
static struct ranks typical_ranks(struct candidates *c, int n_kept, double kept, float max,
                                  const struct sample_params *p)
{
    double mean = 0;
    for (int i = 0; i < n_kept; i++) {
        const double x = ((double)c->z[candidate_at(c, i)] - (double)max) / (double)p->temperature;
        mean += exp(x) * x / kept;
    }
    int end = 0;
    while (end < n_kept &&
           (double)c->z[candidate_at(c, end)] - (double)max >= mean * (double)p->temperature) {
        end++;
    }
    struct ranks r = {.first = end, .end = end};
    double radius = 0;
    while (r.first > 0 || r.end < n_kept) {
        double distance[2] = {INFINITY, INFINITY}; /* of the neighbours before and behind */
        double x[2] = {0, 0};
        for (int k = 0; k < 2; k++) {
            const int at = k == 0 ? r.first - 1 : r.end;
            if (at >= 0 && at < n_kept) {
                x[k] = ((double)c->z[candidate_at(c, at)] - (double)max) / (double)p->temperature;
                distance[k] = fabs(x[k] - mean);
            }
        }
        const int k = distance[0] <= distance[1] ? 0 : 1;
        if (r.mass >= (double)p->typical_p * kept && distance[k] > radius) {
            break;
        }
        radius = distance[k];
        r.mass += exp(x[k]);
        r.first -= k == 0;
        r.end += k == 1;
    }
    return r;
}

/* Draws among the best tokens, best first. */
static int32_t draw_by_rank(const float *z, int n_vocab, float max, const struct sample_params *p,
                            int32_t *ids)
{
    struct candidates c = candidates_of(z, n_vocab, ids);
    const int n_max = p->top_k > 0 && p->top_k < n_vocab ? p->top_k : n_vocab;
    double total = 0; /* of what top_k keeps: top_p's denominator */
    for (int i = 0; i < n_max; i++) {
        const int32_t id = n_max < n_vocab ? candidate_at(&c, i) : i;
        total += share(z[id], max, p->temperature);
    }
    /* Shares fall along the ranks, so each filter keeps a prefix and the shortest one wins. The
     * best token's share is 1 > min_p: it is always kept. */
    double kept = 0;
    int n_kept = 0;
    while (n_kept < n_max && (p->top_p >= 1 || kept < (double)p->top_p * total)) {
        const double s = share(z[candidate_at(&c, n_kept)], max, p->temperature);
        if (s < (double)p->min_p || s == 0) {
            break;
        }
        kept += s;
        n_kept++;
    }
    struct ranks ranks = {0, n_kept, kept};
    if (p->typical_p > 0) {
        ranks = typical_ranks(&c, n_kept, kept, max, p);
    }
    double sum = 0;
    for (int i = ranks.first; i < ranks.end; i++) {
        sum += share(z[candidate_at(&c, i)], max, p->temperature);
        if (sum > p->u * ranks.mass) {
            return candidate_at(&c, i);
        }
    }
    return candidate_at(&c, ranks.end - 1);
}

/* The lowest id whose logit is no number to draw by, or -1. */
static int32_t broken_id(const float *logits, int n_vocab)
{
    for (int id = 0; id < n_vocab; id++) {
        if (isnan(logits[id]) || logits[id] == INFINITY) {
            return id;
        }
    }
    return -1;
}

/* The largest adjusted logit, the lowest id on ties; the lowest allowed id if all are -infinity. */
static int32_t best_id(const float *z, int n_vocab, const int32_t *allow, int n_allow)
{
    int32_t best = 0;
    for (int id = 1; id < n_vocab; id++) {
        best = z[id] > z[best] ? id : best;
    }
    if (z[best] == -INFINITY && n_allow > 0) {
        best = allow[0];
        for (int i = 1; i < n_allow; i++) {
            best = allow[i] < best ? allow[i] : best;
        }
    }
    return best;
}

int32_t ref_sample_row(const struct step *step, int i, const float *logits, int n_vocab,
                       float *logit, int32_t *candidate)
{
    const struct sample_params *const p = &step->sample[i];
    const int32_t broken = broken_id(logits, n_vocab);
    if (broken >= 0) {
        return broken;
    }
    adjust_row(logit, logits, n_vocab, step, p);
    const int32_t best = best_id(logit, n_vocab, step->allow + p->allow_first, p->n_allow);
    const float max = logit[best];
    if (p->temperature == 0 || !isfinite(max)) {
        return best;
    }
    if (p->top_k == 0 && p->top_p >= 1 && p->min_p == 0 && p->typical_p == 0) {
        return draw_by_id(logit, n_vocab, max, p);
    }
    return draw_by_rank(logit, n_vocab, max, p, candidate);
}
