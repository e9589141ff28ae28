/* Checks of sample: against a second, naive implementation of backend.h's definition.
 *
 * The definition leaves nothing open but rounding: a token may differ from the expected one only
 * where u, or a filter's bound, lies within a margin of the border between two candidates. Such
 * rows are left out; there are next to none. */
#include "tests/kernels/check.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { N_OUT_MAX = 16, LARGE_FROM = 2048 };

/* ref sums doubles; backend.h lets the others' sums be off by 1e-6 of the total. */
static double margin_of(const struct backend *be)
{
    return strcmp(be->name, "ref") == 0 ? 1e-11 : 1e-6;
}

struct sample_case {
    int n, n_vocab;
    const float *logits; /* [n, n_vocab] */
    struct sample_params *params;
    struct sample_adjust *adjust; /* slices of all rows */
    int32_t *allow;
    int n_adjust, n_allow;
};

/* ---- the naive implementation --------------------------------------------------------------- */

struct candidate {
    float z;
    int32_t id;
    double share;
};

static int candidate_order(const void *a, const void *b)
{
    const struct candidate *const x = a;
    const struct candidate *const y = b;
    if (x->z != y->z) {
        return x->z > y->z ? -1 : 1;
    }
    return x->id < y->id ? -1 : 1;
}

static void note_margin(double *margin, double a, double b)
{
    *margin = fmin(*margin, fabs(a - b));
}

/* The row's candidates in id order, adjusted; the number of those allowed. */
static int naive_candidates(const struct sample_case *k, int r, struct candidate *list)
{
    const struct sample_params *const p = &k->params[r];
    int n = 0;
    for (int id = 0; id < k->n_vocab; id++) {
        bool is_allowed = p->n_allow == 0;
        for (int i = 0; i < p->n_allow; i++) {
            is_allowed = is_allowed || k->allow[p->allow_first + i] == id;
        }
        if (!is_allowed) {
            continue;
        }
        float z = k->logits[r * k->n_vocab + id];
        for (int i = 0; i < p->n_adjust; i++) {
            const struct sample_adjust *const a = &k->adjust[p->adjust_first + i];
            if (a->token != id) {
                continue;
            }
            if (a->n_prompt + a->n_generated > 0) {
                z = z > 0 ? z / p->repetition : z * p->repetition;
            }
            z -= p->presence * (float)(a->n_generated > 0) + p->frequency * (float)a->n_generated;
            z += a->bias;
        }
        list[n++] = (struct candidate){z, id, 0};
    }
    return n;
}

/* Cuts the sorted list as top_k, top_p and min_p say; returns what is left. */
static int naive_filter(const struct sample_params *p, struct candidate *list, int n,
                        double *margin)
{
    n = p->top_k > 0 && p->top_k < n ? p->top_k : n;
    double total = 0;
    for (int i = 0; i < n; i++) {
        total += list[i].share;
    }
    double sum = 0;
    for (int i = 0; i < n && p->top_p < 1; i++) {
        sum += list[i].share;
        note_margin(margin, sum / total, (double)p->top_p);
        if (sum >= (double)p->top_p * total) {
            n = i + 1;
        }
    }
    for (int i = 1; i < n && p->min_p > 0; i++) {
        note_margin(margin, list[i].share, (double)p->min_p);
        if (list[i].share < (double)p->min_p) {
            n = i;
        }
    }
    return n;
}

/* Leaves in list, in its order, what typical_p keeps of it; returns how many. */
static int naive_typical(struct check *c, const struct sample_params *p, struct candidate *list,
                         int n, double *margin)
{
    double total = 0;
    double mean = 0;
    for (int i = 0; i < n; i++) {
        total += list[i].share;
    }
    for (int i = 0; i < n; i++) {
        mean += list[i].share > 0 ? list[i].share / total * log(list[i].share) : 0;
    }
    struct candidate *const near = check_host(c, (size_t)n, sizeof *near); /* z: -distance */
    int n_near = 0;
    for (int i = 0; i < n && list[i].share > 0; i++) {
        const double distance = fabs(log(list[i].share) - mean);
        near[n_near++] = (struct candidate){(float)-distance, i, list[i].share};
    }
    qsort(near, (size_t)n_near, sizeof *near, candidate_order);
    double mass = 0;
    int n_kept = 0;
    while (n_kept < n_near && (mass < (double)p->typical_p * total ||
                               near[n_kept].z >= near[n_kept - 1].z)) { /* as near as the last */
        mass += near[n_kept].share;
        n_kept++;
        if (n_kept == n_near || near[n_kept].z < near[n_kept - 1].z) {
            note_margin(margin, mass / total, (double)p->typical_p);
        }
    }
    if (n_kept < n_near) { /* so near that rounding decides */
        note_margin(margin, (double)near[n_kept].z, (double)near[n_kept - 1].z);
    }
    for (int i = 0; i < n_kept; i++) {
        near[i] = list[near[i].id];
    }
    qsort(near, (size_t)n_kept, sizeof *near, candidate_order);
    memcpy(list, near, (size_t)n_kept * sizeof *near);
    return n_kept;
}

/* The first whose cumulative share exceeds bound. Shares of 0 move no border, and the last border
 * decides nothing: rounding must not leave the draw empty. */
static int32_t naive_draw(const struct candidate *order, int n, double bound, double total,
                          double *margin)
{
    while (order[n - 1].share == 0) {
        n--;
    }
    double sum = 0;
    for (int i = 0; i < n - 1; i++) {
        sum += order[i].share;
        if (order[i].share > 0) {
            note_margin(margin, sum / total, bound / total);
        }
        if (sum > bound) {
            return order[i].id;
        }
    }
    return order[n - 1].id;
}

/* The token of row r; *margin says how close the decision was. */
static int32_t naive_sample(struct check *c, const struct sample_case *k, int r, double *margin)
{
    const struct sample_params *const p = &k->params[r];
    *margin = 1;
    for (int id = 0; id < k->n_vocab; id++) {
        const float z = k->logits[r * k->n_vocab + id];
        if (isnan(z) || z == INFINITY) {
            return id;
        }
    }
    struct candidate *const by_id = check_host(c, (size_t)k->n_vocab, sizeof *by_id);
    struct candidate *const list = check_host(c, (size_t)k->n_vocab, sizeof *list);
    int n = naive_candidates(k, r, by_id);
    memcpy(list, by_id, (size_t)n * sizeof *list);
    qsort(list, (size_t)n, sizeof *list, candidate_order);
    const float max = list[0].z;
    if (p->temperature == 0 || max == -INFINITY) {
        return list[0].id;
    }
    for (int i = 0; i < n; i++) {
        list[i].share = exp(((double)list[i].z - (double)max) / (double)p->temperature);
        by_id[i].share = exp(((double)by_id[i].z - (double)max) / (double)p->temperature);
    }
    const bool is_plain = p->top_k == 0 && p->top_p >= 1 && p->min_p == 0 && p->typical_p == 0;
    const struct candidate *const order = is_plain ? by_id : list;
    n = is_plain ? n : naive_filter(p, list, n, margin);
    n = p->typical_p > 0 ? naive_typical(c, p, list, n, margin) : n;
    double total = 0;
    for (int i = 0; i < n; i++) {
        total += order[i].share;
    }
    return naive_draw(order, n, p->u * total, total, margin);
}

/* ---- cases ---------------------------------------------------------------------------------- */

static void sample_run(struct check *c, enum side side, const void *data, int first, int n,
                       uint32_t *out)
{
    const struct sample_case *const k = data;
    struct backend *const be = c->side[side];
    const int lead = check_int(c, 0, 2);
    const int n_out = lead + n;
    const struct step_limits limits = {.n_tok_max = n_out,
                                       .n_seq_max = 1,
                                       .n_page_max = 8,
                                       .n_out_max = n_out,
                                       .n_adjust_max = k->n_adjust,
                                       .n_allow_max = k->n_allow,
                                       .n_vocab = k->n_vocab};
    struct step *step = NULL;
    CHECK(be->op->step_new(be, &step, &limits, NULL) == ERR_OK);
    step->n_tok = step->n_out = n_out;
    step->n_seq = 1;
    step->seq_first[1] = n_out;
    step->n_adjust = k->n_adjust;
    step->n_allow = k->n_allow;
    memcpy(step->adjust, k->adjust, (size_t)k->n_adjust * sizeof *k->adjust);
    memcpy(step->allow, k->allow, (size_t)k->n_allow * sizeof *k->allow);
    for (int i = 0; i < n_out; i++) {
        step->pos[i] = step->out_row[i] = i;
        const int r = i < lead ? 0 : first + i - lead;
        const int beside = r % 3 == 1 ? OUT_LOGPROB | OUT_ENTROPY : 0; /* drawn and scored */
        step->out_want[i] = (uint8_t)(r % 7 == 6 ? OUT_LOGPROB : OUT_SAMPLE | beside);
        step->target[i] = r % 7 == 6 ? 0 : TARGET_SAMPLED;
        step->out_token[i] = -77;
        step->sample[i] = k->params[i < lead ? first : first + i - lead];
    }
    const struct tensor logits =
        check_in(c, side, "logits", k->logits + (size_t)first * (size_t)k->n_vocab, n, k->n_vocab,
                 DTYPE_F32);
    be->op->step_begin(be, step);
    op_outputs(be, logits, step, lead);
    check_finish(c, side, step);
    for (int i = 0; i < lead; i++) {
        if (step->out_token[i] != -77) {
            check_fail(c, "out_token[%d], before the chunk: expected no change, got %d", i,
                       step->out_token[i]);
        }
    }
    memcpy(out, step->out_token + lead, (size_t)n * sizeof *out);
    be->op->step_free(be, step);
}

static void row_params(struct check *c, struct sample_params *p)
{
    *p = (struct sample_params){
        .u = check_uniform(c), .temperature = 1, .top_p = 1, .repetition = 1};
    if (check_chance(c, 0.1)) {
        p->u = check_chance(c, 0.5) ? 0 : 1 - 0x1p-53;
    }
    if (check_chance(c, 0.5)) {
        p->temperature = check_chance(c, 0.3)   ? 0
                         : check_chance(c, 0.1) ? 1e-30f
                                                : 2 * (float)check_uniform(c) + 0.01f;
    }
    p->top_k = check_chance(c, 0.4) ? check_int(c, 1, check_chance(c, 0.2) ? 2000 : 70) : 0;
    p->top_p = check_chance(c, 0.4) ? 1 - (float)(0.99 * check_uniform(c)) : 1;
    p->min_p = check_chance(c, 0.3) ? (float)(0.5 * check_uniform(c)) : 0;
    p->typical_p = check_chance(c, 0.15) ? (float)(0.05 + 0.9 * check_uniform(c)) : 0;
    if (check_chance(c, 0.5)) {
        p->repetition = 0.5f + (float)check_uniform(c);
        p->presence = 2 * (float)check_uniform(c) - 1;
        p->frequency = 2 * (float)check_uniform(c) - 1;
    }
}

/* Distinct tokens of the row's adjustment list: every step-th one. */
static void row_lists(struct check *c, struct sample_case *k, struct sample_params *p)
{
    p->adjust_first = k->n_adjust;
    p->allow_first = k->n_allow;
    if (check_chance(c, 0.5)) {
        const int step = check_int(c, 1, 9);
        for (int id = check_int(c, 0, k->n_vocab - 1); id < k->n_vocab; id += step) {
            k->adjust[k->n_adjust++] =
                (struct sample_adjust){id, check_int(c, 0, 2), check_int(c, 0, 2),
                                       check_chance(c, 0.1)   ? -INFINITY
                                       : check_chance(c, 0.5) ? (float)check_int(c, -3, 3)
                                                              : 0};
            p->n_adjust++;
        }
    }
    if (check_chance(c, 0.3)) {
        p->n_allow = check_int(c, 1, 9);
        for (int i = 0; i < p->n_allow; i++) { /* in any order, some of them twice */
            k->allow[k->n_allow++] = check_int(c, 0, k->n_vocab - 1);
        }
    }
}

static void row_logits(struct check *c, float *z, int n)
{
    switch (check_int(c, 0, 9)) {
    case 0: z[check_int(c, 0, n - 1)] = NAN; break;
    case 1: z[check_int(c, 0, n - 1)] = INFINITY; break;
    case 2:
        for (int i = 0; i < n; i++) {
            z[i] = -INFINITY;
        }
        break;
    case 3:
    case 4:
        for (int i = 0; i < n; i++) {
            z[i] = (float)check_int(c, -1, 2);
        }
        break;
    case 5:
        for (int i = 0; i < n; i++) {
            z[i] = check_chance(c, 0.6) ? -INFINITY : z[i];
        }
        break;
    case 6: /* nearly flat: filters keep much of the vocabulary */
        for (int i = 0; i < n; i++) {
            z[i] *= 0.05f;
        }
        break;
    default: break;
    }
}

/* A row of numbers as a model has them, and filters that keep thousands of them. */
static void row_large(struct check *c, const struct sample_case *k, int r, float *z)
{
    const bool has_ties = check_chance(c, 0.3);
    for (int i = 0; i < k->n_vocab; i++) {
        z[i] = has_ties ? (float)check_int(c, 0, 2) : (float)(0.1 * check_uniform(c));
    }
    struct sample_params *const p = &k->params[r];
    p->temperature = (float)(0.5 + check_uniform(c));
    p->typical_p = has_ties ? p->typical_p : 0; /* where distances are apart */
    p->n_allow = 0;
    switch (check_int(c, 0, 3)) {
    case 0: p->top_k = check_int(c, LARGE_FROM, k->n_vocab); break;
    case 1: p->top_k = check_int(c, 60, LARGE_FROM); break;
    case 2: p->top_p = (float)(0.2 + 0.7 * check_uniform(c)); break;
    default: p->min_p = 0.3f; break;
    }
}

static struct sample_case case_new(struct check *c, int n, int n_vocab)
{
    struct sample_case k = {.n = n, .n_vocab = n_vocab};
    float *const logits = check_normal(c, (size_t)k.n * (size_t)k.n_vocab, 2);
    k.logits = logits;
    k.params = check_host(c, (size_t)k.n, sizeof *k.params);
    k.adjust = check_host(c, (size_t)k.n * (size_t)k.n_vocab, sizeof *k.adjust);
    k.allow = check_host(c, (size_t)k.n * 9, sizeof *k.allow);
    for (int r = 0; r < k.n; r++) {
        row_logits(c, logits + (size_t)r * (size_t)k.n_vocab, k.n_vocab);
        row_params(c, &k.params[r]);
        row_lists(c, &k, &k.params[r]);
        if (n_vocab > LARGE_FROM && check_chance(c, 0.7)) {
            row_large(c, &k, r, logits + (size_t)r * (size_t)k.n_vocab);
        }
    }
    return k;
}

static void check_case(struct check *c, const struct sample_case *k)
{
    check_shape(c, "outputs %d, n_vocab %d, adjustments %d, allowed %d", k->n, k->n_vocab,
                k->n_adjust, k->n_allow);
    uint32_t *const got = check_host(c, (size_t)k->n, sizeof *got);
    sample_run(c, SIDE_ONE, k, 0, k->n, got);
    for (int r = 0; r < k->n; r++) {
        const struct sample_params *const p = &k->params[r];
        double margin = 1;
        const int32_t expected = r % 7 == 6 ? -77 : naive_sample(c, k, r, &margin);
        if (margin > margin_of(c->side[SIDE_ONE]) && (int32_t)got[r] != expected) {
            check_fail(c,
                       "out_token[%d]: expected %d, got %d (u %.17g, temperature %g, top_k %d, "
                       "top_p %.9g, min_p %.9g, typical_p %.9g, adjusted %d, allowed %d; margin "
                       "%.2g)",
                       r, expected, (int32_t)got[r], p->u, (double)p->temperature, p->top_k,
                       (double)p->top_p, (double)p->min_p, (double)p->typical_p, p->n_adjust,
                       p->n_allow, margin);
        }
    }
    check_invariance(c, sample_run, k, k->n, 1, got);
}

void check_sample(struct check *c)
{
    const int n = check_int(c, 1, N_OUT_MAX);
    const struct sample_case k = case_new(c, n, check_dim(c, check_chance(c, 0.1) ? 5000 : 300));
    check_case(c, &k);
}

/* More candidates than fit into any backend's shortcuts. */
void check_sample_large(struct check *c)
{
    const int n = check_int(c, 1, 3);
    const struct sample_case k = case_new(c, n, check_int(c, LARGE_FROM + 1, 12000));
    check_case(c, &k);
}
