/* Checks of gather, log_softmax, outputs' log-probabilities and linear_outputs. */
#include "tests/kernels/check.h"

#include <math.h>
#include <string.h>

enum { N_OUT_MAX = 20, N_TOP_FEW = 70, N_TOP_MAX = 2200 };

/* ---- gather --------------------------------------------------------------------------------- */

void check_gather(struct check *c)
{
    const int n_tok = check_int(c, 1, 40);
    const int d = check_dim(c, 200);
    struct backend *const be = c->side[SIDE_ONE];
    const struct step_limits limits = {
        .n_tok_max = n_tok, .n_seq_max = 1, .n_page_max = 8, .n_out_max = n_tok};
    struct step *step = NULL;
    CHECK(be->op->step_new(be, &step, &limits, NULL) == ERR_OK);
    step->n_tok = n_tok;
    step->n_seq = 1;
    step->seq_first[1] = n_tok;
    for (int r = 0; r < n_tok; r++) {
        step->pos[r] = r;
        if (r == n_tok - 1 || check_chance(c, 0.4)) {
            step->out_want[step->n_out] = OUT_SAMPLE;
            step->out_row[step->n_out++] = r;
        }
    }
    const int first = check_int(c, 0, step->n_out - 1);
    const int n = check_int(c, 1, step->n_out - first);
    check_shape(c, "n_tok %d, d %d, outputs %d, rows %d .. %d of them", n_tok, d, step->n_out,
                first, first + n - 1);
    const float *const host = check_normal(c, (size_t)n_tok * (size_t)d, 1);
    float *const expected = check_host(c, (size_t)n * (size_t)d, sizeof *expected);
    float *const got = check_host(c, (size_t)n * (size_t)d, sizeof *got);
    for (int i = 0; i < n; i++) {
        memcpy(expected + (size_t)i * (size_t)d,
               host + (size_t)step->out_row[first + i] * (size_t)d, (size_t)d * sizeof *host);
    }
    const struct tensor x = check_in(c, SIDE_ONE, "x", host, n_tok, d, DTYPE_F32);
    const struct tensor y = check_out(c, SIDE_ONE, "y", n, d, DTYPE_F32);
    be->op->step_begin(be, step);
    op_gather(be, y, x, step, first);
    check_finish(c, SIDE_ONE, step);
    check_get(c, SIDE_ONE, y, got);
    check_words(c, "the rows named", expected, got, n, d);
    be->op->step_free(be, step);
}

/* ---- log_softmax ---------------------------------------------------------------------------- */

struct softmax_case {
    int n, n_col;
    const float *x;    /* [n, n_col] */
    const float *base; /* [n] or NULL */
};

static void softmax_run(struct check *c, enum side side, const void *data, int first, int n,
                        uint32_t *out)
{
    const struct softmax_case *const k = data;
    struct backend *const be = c->side[side];
    const struct tensor y =
        check_inout(c, side, "y", k->x + (size_t)first * (size_t)k->n_col, n, k->n_col, DTYPE_F32);
    struct tensor base = {0};
    if (k->base != NULL) {
        base = check_in(c, side, "base", k->base + first, n, 1, DTYPE_F32);
    }
    op_log_softmax(be, y, base);
    check_get(c, side, y, out);
}

void check_log_softmax(struct check *c)
{
    struct softmax_case k = {.n = check_int(c, 1, N_OUT_MAX),
                             .n_col = check_dim(c, check_chance(c, 0.1) ? 3000 : 200)};
    const float sigma = check_chance(c, 0.3) ? 30 : 3;
    float *const x = check_normal(c, (size_t)k.n * (size_t)k.n_col, sigma);
    k.x = x;
    k.base = check_chance(c, 0.6) ? check_normal(c, (size_t)k.n, 5) : NULL;
    for (int i = 0; i < k.n * k.n_col; i++) {
        x[i] = check_chance(c, 0.05) ? -INFINITY : x[i];
    }
    for (int i = 0; i < k.n_col && k.n > 1 && check_chance(c, 0.5); i++) {
        x[i] = -INFINITY; /* a row without a distribution, sometimes whole */
    }
    if (k.n > 2 && check_chance(c, 0.3)) {
        x[k.n_col + check_int(c, 0, k.n_col - 1)] = check_chance(c, 0.5) ? INFINITY : NAN;
    }
    check_shape(c, "n %d, cols %d, sigma %g, %s", k.n, k.n_col, (double)sigma,
                k.base == NULL ? "no base" : "base");
    const size_t n = (size_t)k.n * (size_t)k.n_col;
    float *const expected = check_host(c, n, sizeof *expected);
    float *const got = check_host(c, n, sizeof *got);
    double *const magnitude = check_host(c, (size_t)k.n, sizeof *magnitude);
    for (int r = 0; r < k.n; r++) {
        magnitude[r] = k.base == NULL ? 1 : 1 + fabs((double)k.base[r]);
        for (int i = 0; i < k.n_col; i++) {
            const double value = fabs((double)x[r * k.n_col + i]);
            magnitude[r] = isfinite(value) ? fmax(magnitude[r], 2 * value) : magnitude[r];
        }
    }
    softmax_run(c, SIDE_REF, &k, 0, k.n, (uint32_t *)expected);
    softmax_run(c, SIDE_ONE, &k, 0, k.n, (uint32_t *)got);
    check_values(c, "y", expected, got, k.n, k.n_col, TOL_LOGPROB, magnitude, k.n);
    check_invariance(c, softmax_run, &k, k.n, k.n_col, (const uint32_t *)got);
    check_isolation(c, softmax_run, &k, x, k.n_col, k.n, k.n_col, (const uint32_t *)got);
}

/* ---- logprobs ------------------------------------------------------------------------------- */

/* One row's results, as words: token, logprob, rank, entropy, top ids, top log-probabilities. */
enum {
    AT_TOKEN,
    AT_LOGPROB,
    AT_RANK,
    AT_ENTROPY,
    AT_TOP_ID,
    AT_TOP_LOGPROB = AT_TOP_ID + N_TOP_MAX
};
enum { N_WORD = AT_TOP_LOGPROB + N_TOP_MAX };

struct logprobs_case {
    int n, n_vocab, n_top;
    const float *logits; /* [n, n_vocab]; NULL = made of what follows */
    int n_in;
    const float *x;    /* [n, n_in] */
    const float *bias; /* [n_vocab] or NULL */
    struct weight *w[SIDE_N];
    bool is_apart;         /* by linear and outputs */
    const uint8_t *want;   /* [n] */
    const int32_t *target; /* [n] */
};

/* A step of n outputs, drawn greedily; its results are poisoned. lead outputs come before. */
static struct step *logprobs_step(struct check *c, enum side side, const struct logprobs_case *k,
                                  int first, int n, int lead)
{
    struct backend *const be = c->side[side];
    const int n_out = lead + n;
    const struct step_limits limits = {.n_tok_max = n_out,
                                       .n_seq_max = 1,
                                       .n_page_max = n_out / KV_PAGE + 1,
                                       .n_out_max = n_out,
                                       .n_top_max = N_TOP_MAX,
                                       .n_vocab = k->n_vocab};
    struct step *step = NULL;
    CHECK(be->op->step_new(be, &step, &limits, NULL) == ERR_OK);
    step->n_tok = step->n_out = n_out;
    step->n_seq = 1;
    step->n_top = k->n_top;
    step->seq_first[1] = n_out;
    const float poison = -12345;
    for (int i = 0; i < n_out; i++) {
        step->pos[i] = step->out_row[i] = i;
        step->out_want[i] =
            i < lead ? OUT_LOGPROB | OUT_TOP | OUT_ENTROPY : k->want[first + i - lead];
        step->target[i] = i < lead ? 0 : k->target[first + i - lead];
        step->sample[i] = (struct sample_params){.top_p = 1, .repetition = 1};
        step->out_token[i] = -12345;
        step->out_logprob[i] = step->out_entropy[i] = poison;
        step->out_rank[i] = -12345;
        for (int j = 0; j < N_TOP_MAX; j++) {
            step->top_id[i * N_TOP_MAX + j] = -12345;
            step->top_logprob[i * N_TOP_MAX + j] = poison;
        }
    }
    return step;
}

static void results_get(const struct step *step, int i, uint32_t *out)
{
    memcpy(out + AT_TOKEN, &step->out_token[i], 4);
    memcpy(out + AT_LOGPROB, &step->out_logprob[i], 4);
    memcpy(out + AT_RANK, &step->out_rank[i], 4);
    memcpy(out + AT_ENTROPY, &step->out_entropy[i], 4);
    memcpy(out + AT_TOP_ID, &step->top_id[i * N_TOP_MAX], (size_t)N_TOP_MAX * 4);
    memcpy(out + AT_TOP_LOGPROB, &step->top_logprob[i * N_TOP_MAX], (size_t)N_TOP_MAX * 4);
}

/* The op, of n rows from first on, which are outputs lead .. of the step. */
static void outputs_of(struct check *c, enum side side, const struct logprobs_case *k, int first,
                       int n, struct step *step, int lead)
{
    struct backend *const be = c->side[side];
    if (k->logits != NULL) {
        const float *const host = k->logits + (size_t)first * (size_t)k->n_vocab;
        op_outputs(be, check_in(c, side, "logits", host, n, k->n_vocab, DTYPE_F32), step, lead);
        return;
    }
    const struct tensor x =
        check_in(c, side, "x", k->x + (size_t)first * (size_t)k->n_in, n, k->n_in, DTYPE_F32);
    const struct tensor logits = check_out(c, side, "logits", n, k->n_vocab, DTYPE_F32);
    struct tensor bias = {0};
    if (k->bias != NULL) {
        bias = check_in(c, side, "bias", k->bias, 1, k->n_vocab, DTYPE_F32);
    }
    if (k->is_apart) {
        op_linear(be, logits, x, k->w[side], bias, ACT_NONE);
        op_outputs(be, logits, step, lead);
    } else {
        op_linear_outputs(be, logits, x, k->w[side], bias, step, lead);
    }
}

static void logprobs_run(struct check *c, enum side side, const void *data, int first, int n,
                         uint32_t *out)
{
    const struct logprobs_case *const k = data;
    struct backend *const be = c->side[side];
    const int lead = check_int(c, 0, 3);
    struct step *const step = logprobs_step(c, side, k, first, n, lead);
    uint32_t untouched[2][N_WORD];
    be->op->step_begin(be, step);
    if (lead > 0) {
        results_get(step, lead - 1, untouched[0]);
    }
    outputs_of(c, side, k, first, n, step, lead);
    check_finish(c, side, step);
    if (lead > 0) {
        results_get(step, lead - 1, untouched[1]);
        check_words(c, "outputs before the chunk", untouched[0], untouched[1], 1, N_WORD);
    }
    for (int r = 0; r < n; r++) {
        results_get(step, lead + r, out + (size_t)r * N_WORD);
    }
    be->op->step_free(be, step);
}

/* Logits with the properties that break a careless log-sum-exp. */
static void spoil_row(struct check *c, float *z, int n)
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
        for (int i = 0; i < n; i++) {
            z[i] = check_chance(c, 0.5) ? -INFINITY : z[i];
        }
        z[check_int(c, 0, n - 1)] = 1;
        break;
    case 4: /* ties: few distinct values */
        for (int i = 0; i < n; i++) {
            z[i] = (float)check_int(c, 0, 3);
        }
        break;
    case 5: /* exp would overflow */
        for (int i = 0; i < n; i++) {
            z[i] += 300;
        }
        break;
    case 6: /* and underflow */
        for (int i = 0; i < n; i++) {
            z[i] -= 3000;
        }
        break;
    default: break;
    }
}

static void compare_row(struct check *c, const struct logprobs_case *k, int r, const uint32_t *ref,
                        const uint32_t *row)
{
    float a[N_WORD];
    float b[N_WORD];
    memcpy(a, ref, sizeof a);
    memcpy(b, row, sizeof b);
    double max = 1;
    for (int i = 0; i < k->n_vocab; i++) {
        const double z = fabs((double)k->logits[r * k->n_vocab + i]);
        max = isfinite(z) && z > max ? z : max;
    }
    if (!check_close(a[AT_LOGPROB], b[AT_LOGPROB], TOL_LOGPROB, max)) {
        check_fail(c, "logprob[%d]: expected %.9g, got %.9g", r, (double)a[AT_LOGPROB],
                   (double)b[AT_LOGPROB]);
    }
    if (!check_close(a[AT_ENTROPY], b[AT_ENTROPY], TOL_ENTROPY, max)) {
        check_fail(c, "entropy[%d]: expected %.9g, got %.9g", r, (double)a[AT_ENTROPY],
                   (double)b[AT_ENTROPY]);
    }
    check_words(c, "out_token", ref + AT_TOKEN, row + AT_TOKEN, 1, 1);
    if (ref[AT_RANK] != row[AT_RANK]) {
        check_fail(c, "rank[%d]: expected %d, got %d", r, (int)ref[AT_RANK], (int)row[AT_RANK]);
    }
    check_words(c, "top_id", ref + AT_TOP_ID, row + AT_TOP_ID, 1, N_TOP_MAX);
    for (int j = 0; j < N_TOP_MAX; j++) {
        if (!check_close(a[AT_TOP_LOGPROB + j], b[AT_TOP_LOGPROB + j], TOL_LOGPROB, max)) {
            check_fail(c, "top_logprob[%d, %d]: expected %.9g, got %.9g", r, j,
                       (double)a[AT_TOP_LOGPROB + j], (double)b[AT_TOP_LOGPROB + j]);
        }
    }
}

/* What is taken of the logits has the same bits where no token is drawn beside it. */
static void check_undrawn(struct check *c, struct logprobs_case k, const uint32_t *drawn)
{
    uint8_t *const want = check_host(c, (size_t)k.n, 1);
    int32_t *const target = check_host(c, (size_t)k.n, sizeof *target);
    uint32_t *const got = check_host(c, (size_t)k.n * N_WORD, sizeof *got);
    for (int r = 0; r < k.n; r++) {
        const int32_t token = (int32_t)drawn[(size_t)r * N_WORD + AT_TOKEN];
        want[r] = (uint8_t)(k.want[r] == OUT_SAMPLE ? OUT_LOGPROB : k.want[r] & ~OUT_SAMPLE);
        target[r] = k.target[r] == TARGET_SAMPLED ? token : k.target[r];
    }
    struct logprobs_case undrawn = k;
    undrawn.want = want;
    undrawn.target = target;
    logprobs_run(c, SIDE_ONE, &undrawn, 0, k.n, got);
    for (int r = 0; r < k.n; r++) {
        if (k.want[r] != OUT_SAMPLE) {
            const size_t at = (size_t)r * N_WORD + AT_LOGPROB;
            check_words(c, "without drawing", drawn + at, got + at, 1, N_WORD - AT_LOGPROB);
        }
    }
}

/* Draws what the rows want: *want, *target [n]. */
static void draw_wants(struct check *c, struct logprobs_case *k)
{
    uint8_t *const want = check_host(c, (size_t)k->n, 1);
    int32_t *const target = check_host(c, (size_t)k->n, sizeof *target);
    const bool is_scored = check_chance(c, 0.3); /* nothing else */
    for (int r = 0; r < k->n; r++) {
        want[r] = (uint8_t)(is_scored ? OUT_LOGPROB : check_int(c, 1, 15));
        const bool is_sampled = (want[r] & OUT_SAMPLE) != 0 && check_chance(c, 0.5);
        target[r] = is_sampled ? TARGET_SAMPLED : check_int(c, 0, k->n_vocab - 1);
    }
    k->want = want;
    k->target = target;
}

static void check_logprobs_of(struct check *c, struct logprobs_case k)
{
    float *const logits = check_normal(c, (size_t)k.n * (size_t)k.n_vocab, 3);
    for (int r = 0; r < k.n; r++) {
        spoil_row(c, logits + (size_t)r * (size_t)k.n_vocab, k.n_vocab);
    }
    k.logits = logits;
    draw_wants(c, &k);
    check_shape(c, "outputs %d, n_vocab %d, n_top %d", k.n, k.n_vocab, k.n_top);
    uint32_t *const expected = check_host(c, (size_t)k.n * N_WORD, sizeof *expected);
    uint32_t *const got = check_host(c, (size_t)k.n * N_WORD, sizeof *got);
    logprobs_run(c, SIDE_REF, &k, 0, k.n, expected);
    logprobs_run(c, SIDE_ONE, &k, 0, k.n, got);
    for (int r = 0; r < k.n; r++) {
        compare_row(c, &k, r, expected + (size_t)r * N_WORD, got + (size_t)r * N_WORD);
    }
    check_undrawn(c, k, got);
    check_invariance(c, logprobs_run, &k, k.n, N_WORD, got);
}

void check_logprobs(struct check *c)
{
    const struct logprobs_case k = {.n = check_int(c, 1, N_OUT_MAX),
                                    .n_vocab = check_dim(c, check_chance(c, 0.1) ? 5000 : 500),
                                    .n_top = check_int(c, 0, check_chance(c, 0.5) ? 5 : N_TOP_FEW)};
    check_logprobs_of(c, k);
}

/* More best tokens than fit into any backend's shortcuts. */
void check_logprobs_large(struct check *c)
{
    const struct logprobs_case k = {.n = check_int(c, 1, 3),
                                    .n_vocab = check_int(c, 2000, 9000),
                                    .n_top =
                                        check_int(c, check_chance(c, 0.5) ? 2049 : 10, N_TOP_MAX)};
    check_logprobs_of(c, k);
}

/* ---- linear_outputs ------------------------------------------------------------------------- */

/* x whose logits have the properties that break a careless sum: of each row one, and of the weights
 * some that give the same logit. */
static void spoil_input(struct check *c, float *x, int n_in)
{
    const float scale = check_int(c, 0, 4) == 0 ? 300 : 1; /* exp would overflow */
    for (int i = 0; i < n_in; i++) {
        x[i] *= scale;
    }
    if (check_chance(c, 0.1)) {
        x[check_int(c, 0, n_in - 1)] = check_chance(c, 0.5) ? NAN : INFINITY;
    } else if (check_chance(c, 0.1)) { /* every logit is its bias */
        memset(x, 0, sizeof *x * (size_t)n_in);
    }
}

/* linear, then outputs, each of which has its own check. */
void check_linear_outputs(struct check *c)
{
    const bool is_many = check_chance(c, 0.2);
    struct logprobs_case k = {.n = is_many ? check_many(c) : check_int(c, 1, 80),
                              .n_in = check_dim(c, check_chance(c, 0.05) ? 2100 : 80),
                              .n_vocab = check_dim(c, is_many ? 300 : 3000),
                              .n_top = check_int(c, 0, 5)};
    const enum dtype source = (enum dtype)check_int(c, DTYPE_F32, DTYPE_I8);
    const struct weight_desc desc = check_desc(c, WEIGHT_MATRIX, source);
    const struct tensor w =
        check_host_tensor(c, k.n_vocab, k.n_in, source, 3 / sqrtf((float)k.n_in));
    float *const x = check_normal(c, (size_t)k.n * (size_t)k.n_in, 1);
    for (int r = 0; r < k.n; r++) {
        spoil_input(c, x + (size_t)r * (size_t)k.n_in, k.n_in);
    }
    k.x = x;
    if (check_chance(c, 0.5)) {
        float *const bias = check_small(c, (size_t)k.n_vocab);
        for (int i = 0; i < k.n_vocab; i++) {
            bias[i] = check_chance(c, 0.1) ? -INFINITY : bias[i];
        }
        k.bias = bias;
    }
    draw_wants(c, &k);
    for (int side = 0; side < SIDE_N; side++) {
        k.w[side] = check_weight(c, (enum side)side, &w, &desc);
    }
    check_shape(c, "outputs %d, n_in %d, n_vocab %d, n_top %d, %s from %s, %s", k.n, k.n_in,
                k.n_vocab, k.n_top, dtype_name(desc.dtype), dtype_name(source),
                k.bias == NULL ? "no bias" : "bias");
    uint32_t *const apart = check_host(c, (size_t)k.n * N_WORD, sizeof *apart);
    uint32_t *const got = check_host(c, (size_t)k.n * N_WORD, sizeof *got);
    static const enum side sides[] = {SIDE_REF, SIDE_ONE};
    for (int i = 0; i < 2; i++) {
        k.is_apart = true;
        logprobs_run(c, sides[i], &k, 0, k.n, apart);
        k.is_apart = false;
        logprobs_run(c, sides[i], &k, 0, k.n, got);
        check_words(c, i == 0 ? "ref's outputs" : "outputs", apart, got, k.n, N_WORD);
    }
    check_invariance(c, logprobs_run, &k, k.n, N_WORD, got);
    check_isolation(c, logprobs_run, &k, x, k.n_in, k.n, N_WORD, got);
}
