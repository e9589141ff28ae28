/* Checks of products by weights: linear layers of rows of requests and of drawn tokens, what is
 * normed on the way, and feed-forward networks. */
#include "tests/kernels/check.h"

#include <math.h>
#include <string.h>

enum { N_TOK_MAX = 40 };
static const float NORM_EPS = 1e-5F;

/* ---- linear --------------------------------------------------------------------------------- */

struct linear_case {
    int n, n_in, n_out;
    enum act act;
    const float *x;    /* [n, n_in] */
    const float *bias; /* [n_out] or NULL */
    struct weight *w[SIDE_N];
    bool is_aligned; /* y, as a model's are */
    bool is_drawn;   /* rows of drawn tokens, which a backend may multiply in another way */
};

/* A step of n drawn tokens on a side, begun. The caller finishes and frees it. */
static struct step *drawn_step(struct check *c, enum side side, int n)
{
    struct backend *const be = c->side[side];
    struct step *const step = check_step_rows(c, side, n);
    step->is_drawn = be->phases_apart;
    be->op->step_begin(be, step);
    return step;
}

static void linear_run(struct check *c, enum side side, const void *data, int first, int n,
                       uint32_t *out)
{
    const struct linear_case *const k = data;
    struct backend *const be = c->side[side];
    const struct tensor x =
        check_in(c, side, "x", k->x + (size_t)first * (size_t)k->n_in, n, k->n_in, DTYPE_F32);
    const struct tensor y = k->is_aligned ? check_pages(c, side, "y", n, k->n_out, DTYPE_F32)
                                          : check_out(c, side, "y", n, k->n_out, DTYPE_F32);
    struct tensor bias = {0};
    if (k->bias != NULL) {
        bias = check_in(c, side, "bias", k->bias, 1, k->n_out, DTYPE_F32);
    }
    struct step *const step = k->is_drawn ? drawn_step(c, side, n) : NULL;
    op_linear(be, y, x, k->w[side], bias, k->act);
    if (step != NULL) {
        check_finish(c, side, step);
        be->op->step_free(be, step);
    }
    check_get(c, side, y, out);
}

/* Σ |x·w| + |b| for each output. */
static double *linear_magnitude(struct check *c, const struct linear_case *k,
                                const struct tensor *w)
{
    double *const magnitude = check_host(c, (size_t)k->n * (size_t)k->n_out, sizeof *magnitude);
    for (int o = 0; o < k->n_out; o++) {
        for (int i = 0; i < k->n_in; i++) {
            const double value = fabs((double)check_value(w, o, i));
            for (int r = 0; r < k->n; r++) {
                magnitude[r * k->n_out + o] += value * fabs((double)k->x[r * k->n_in + i]);
            }
        }
        for (int r = 0; r < k->n && k->bias != NULL; r++) {
            magnitude[r * k->n_out + o] += fabs((double)k->bias[o]);
        }
    }
    return magnitude;
}

static void check_linear_of(struct check *c, int n_tok, int n_in, int n_out, bool is_aligned,
                            bool is_drawn)
{
    struct linear_case k = {.n = n_tok,
                            .n_in = n_in,
                            .n_out = n_out,
                            .act = (enum act)check_int(c, ACT_NONE, ACT_GELU),
                            .is_aligned = is_aligned,
                            .is_drawn = is_drawn};
    const enum dtype source = (enum dtype)check_int(c, DTYPE_F32, DTYPE_I8);
    const struct weight_desc desc = check_desc(c, WEIGHT_MATRIX, source);
    const struct tensor w = check_host_tensor(c, k.n_out, k.n_in, source, 1 / sqrtf((float)k.n_in));
    const bool is_large = desc.dtype == DTYPE_F16 && check_chance(c, 0.1); /* beyond its range */
    float *const x = check_normal(c, (size_t)k.n * (size_t)k.n_in, is_large ? 6e4f : 1.5f);
    k.x = x;
    k.bias = check_chance(c, 0.7) ? check_normal(c, (size_t)k.n_out, 1) : NULL;
    for (int side = 0; side < SIDE_N; side++) {
        k.w[side] = check_weight(c, (enum side)side, &w, &desc);
    }
    static const char *const act_name[] = {"none", "relu", "gelu"};
    check_shape(c, "n_tok %d, n_in %d, n_out %d, %s%s from %s, %s, act %s", k.n, k.n_in, k.n_out,
                desc.is_split ? "split "
                : is_large    ? "large "
                              : "",
                dtype_name(desc.dtype), dtype_name(source), k.bias == NULL ? "no bias" : "bias",
                act_name[k.act]);
    const size_t n = (size_t)k.n * (size_t)k.n_out;
    float *const expected = check_host(c, n, sizeof *expected);
    float *const got = check_host(c, n, sizeof *got);
    linear_run(c, SIDE_REF, &k, 0, k.n, (uint32_t *)expected);
    linear_run(c, SIDE_ONE, &k, 0, k.n, (uint32_t *)got);
    const bool is_half = desc.dtype == DTYPE_BF16 || desc.dtype == DTYPE_F16;
    const enum tolerance tolerance = desc.is_split       ? TOL_LINEAR_SPLIT
                                     : k.act == ACT_GELU ? TOL_LINEAR_GELU
                                     : is_half           ? TOL_LINEAR_HALF
                                                         : TOL_LINEAR_F32;
    check_values(c, "y", expected, got, k.n, k.n_out, tolerance, linear_magnitude(c, &k, &w),
                 (int64_t)n);
    check_invariance(c, linear_run, &k, k.n, k.n_out, (const uint32_t *)got);
    check_isolation(c, linear_run, &k, x, k.n_in, k.n, k.n_out, (const uint32_t *)got);
}

void check_linear(struct check *c)
{
    /* a few long sums and wide outputs: blocks and rounds of k, and work for every thread */
    const bool is_long = check_chance(c, 0.07);
    const bool is_wide = check_chance(c, 0.07);
    const int n_tok = check_int(c, 1, N_TOK_MAX);
    const int n_in = check_chance(c, 0.3) ? 32 * check_int(c, 1, 8) /* split words */
                                          : check_dim(c, is_long   ? 2600
                                                         : is_wide ? 70
                                                                   : 200);
    check_linear_of(c, n_tok, n_in, check_dim(c, is_wide ? 2500 : 150), false, false);
}

/* Outputs of a product of drawn tokens, at most: where they are as rows of requests, few do. */
static int drawn_outputs_max(const struct check *c)
{
    return c->side[SIDE_ONE]->phases_apart ? 1440 : 320;
}

/* Few rows, or as many as may be drawn at once, and widths of models: multiples of 32 and more than
 * a block takes in one round. */
void check_linear_drawn(struct check *c)
{
    const int n_tok = check_chance(c, 0.6)   ? check_int(c, 1, 8)
                      : check_chance(c, 0.7) ? check_int(c, 9, 64)
                                             : check_int(c, 65, 140);
    const int n_in = check_chance(c, 0.2)   ? check_dim(c, 200)
                     : check_chance(c, 0.3) ? 64 * check_int(c, 33, 70)
                                            : 32 * check_int(c, 1, 40);
    const int n_out =
        check_chance(c, 0.3) ? check_dim(c, 150) : 16 * check_int(c, 1, drawn_outputs_max(c) / 16);
    check_linear_of(c, n_tok, n_in, n_out, check_chance(c, 0.5), true);
}

/* ---- a norm and a product ------------------------------------------------------------------- */

struct normed_case {
    int n, d;
    const float *x, *r; /* [n, d]; r NULL: norm, else add_norm */
    const float *gamma, *beta;
    struct linear_case linear; /* its outputs, weight, bias and activation */
    bool is_apart;             /* the norm's result is looked at before the product begins */
};

/* Writes the norm's rows, then the product's, each row of both together. */
static void normed_run(struct check *c, enum side side, const void *data, int first, int n,
                       uint32_t *out)
{
    const struct normed_case *const k = data;
    struct backend *const be = c->side[side];
    const int d = k->d;
    const int n_out = k->linear.n_out;
    const size_t at = (size_t)first * (size_t)d;
    const struct tensor x = check_in(c, side, "x", k->x + at, n, d, DTYPE_F32);
    const struct tensor r =
        k->r == NULL ? (struct tensor){0} : check_in(c, side, "r", k->r + at, n, d, DTYPE_F32);
    const struct tensor normed = check_out(c, side, "normed", n, d, DTYPE_F32);
    const struct tensor y = check_out(c, side, "y", n, n_out, DTYPE_F32);
    const struct tensor gamma = check_in(c, side, "gamma", k->gamma, 1, d, DTYPE_F32);
    const struct tensor beta = check_in(c, side, "beta", k->beta, 1, d, DTYPE_F32);
    const struct tensor bias = check_in(c, side, "bias", k->linear.bias, 1, n_out, DTYPE_F32);
    float *const rows[2] = {check_host(c, (size_t)(n * d), sizeof(float)),
                            check_host(c, (size_t)(n * n_out), sizeof(float))};
    struct step *step = drawn_step(c, side, n);
    if (k->r == NULL) {
        op_norm(be, normed, x, gamma, beta, NORM_EPS);
    } else {
        op_add_norm(be, normed, x, r, gamma, beta, NORM_EPS);
    }
    if (k->is_apart) {
        check_finish(c, side, step);
        be->op->step_free(be, step);
        check_get(c, side, normed, rows[0]);
        step = drawn_step(c, side, n);
    }
    op_linear(be, y, normed, k->linear.w[side], bias, k->linear.act);
    check_finish(c, side, step);
    be->op->step_free(be, step);
    check_get(c, side, normed, rows[0]);
    check_get(c, side, y, rows[1]);
    for (int i = 0; i < n; i++) {
        memcpy(out, rows[0] + (size_t)i * (size_t)d, (size_t)d * sizeof *out);
        memcpy(out + d, rows[1] + (size_t)i * (size_t)n_out, (size_t)n_out * sizeof *out);
        out += d + n_out;
    }
    check_host_drop(c);
    check_host_drop(c);
}

/* A product of drawn tokens may norm its rows itself: that changes no bits. */
void check_norm_linear(struct check *c)
{
    const int d = check_chance(c, 0.2) ? check_dim(c, 300) : 32 * check_int(c, 1, 40);
    struct normed_case k = {
        .n = check_chance(c, 0.8) ? check_int(c, 1, 8) : check_int(c, 9, 40),
        .d = d,
        .linear = {.n_out = 16 * check_int(c, 1, drawn_outputs_max(c) / 16),
                   .act = (enum act)check_int(c, ACT_NONE, ACT_GELU)},
    };
    const enum dtype source = (enum dtype)check_int(c, DTYPE_F32, DTYPE_I8);
    const struct weight_desc desc = check_desc(c, WEIGHT_MATRIX, source);
    const struct tensor w = check_host_tensor(c, k.linear.n_out, d, source, 1 / sqrtf((float)d));
    const size_t n = (size_t)k.n * (size_t)d;
    k.x = check_normal(c, n, 1);
    k.r = check_chance(c, 0.6) ? check_normal(c, n, 1) : NULL;
    k.gamma = check_normal(c, (size_t)d, 1);
    k.beta = check_normal(c, (size_t)d, 1);
    k.linear.bias = check_normal(c, (size_t)k.linear.n_out, 1);
    for (int side = 0; side < SIDE_N; side++) {
        k.linear.w[side] = check_weight(c, (enum side)side, &w, &desc);
    }
    check_shape(c, "n_tok %d, d %d, n_out %d, %s from %s, %s, act %d", k.n, d, k.linear.n_out,
                dtype_name(desc.dtype), dtype_name(source), k.r == NULL ? "norm" : "add_norm",
                (int)k.linear.act);
    const int n_word = d + k.linear.n_out;
    uint32_t *const apart = check_host(c, (size_t)(k.n * n_word), sizeof *apart);
    uint32_t *const got = check_host(c, (size_t)(k.n * n_word), sizeof *got);
    k.is_apart = true;
    normed_run(c, SIDE_ONE, &k, 0, k.n, apart);
    k.is_apart = false;
    normed_run(c, SIDE_ONE, &k, 0, k.n, got);
    check_words(c, "together against apart", apart, got, k.n, n_word);
    check_invariance(c, normed_run, &k, k.n, n_word, got);
}

/* So many rows and outputs that a backend with a kernel of its own for many rows takes it, whatever
 * the size of its device; rows alone and chunks of them are then another kernel's. */
void check_linear_many(struct check *c)
{
    const int n_tok = check_int(c, 65, 140);
    const int n_in = check_dim(c, 80);
    check_linear_of(c, n_tok, n_in, check_int(c, 1100, 1600), false, false);
}

/* Many rows and long sums: where a backend lets sums wait between parts of k. */
void check_linear_deep(struct check *c)
{
    const bool is_wide = check_chance(c, 0.35); /* more outputs than may wait at a time */
    const int n_tok = is_wide                ? check_int(c, 33, 64)
                      : check_chance(c, 0.5) ? check_int(c, 97, 250)
                                             : check_many(c);
    const int n_in = 32 * (is_wide ? check_int(c, 33, 44) : check_int(c, 8, 72)) +
                     (check_chance(c, 0.5) ? check_int(c, 0, 31) : 0);
    check_linear_of(c, n_tok, n_in, is_wide ? check_int(c, 600, 760) : check_dim(c, 70), false,
                    false);
}

/* More than a MiB of outputs on whole cache lines: some backends write them past the caches. */
void check_linear_stream(struct check *c)
{
    const int n_tok = check_chance(c, 0.5) ? check_int(c, 150, 250) : check_many(c);
    const int n_in = check_dim(c, 40);
    check_linear_of(c, n_tok, n_in, 16 * check_int(c, 115, 125), true, false);
}

/* ---- ffn ------------------------------------------------------------------------------------ */

/* Linear, which has its own check, twice. */
struct ffn_case {
    int n, n_in, n_hidden, n_out;
    enum act act;
    const float *x;                   /* [n, n_in] */
    const float *up_bias, *down_bias; /* [n_hidden], [n_out]; or both NULL */
    struct weight *up[SIDE_N], *down[SIDE_N];
    bool is_apart; /* by linear */
};

static void ffn_run(struct check *c, enum side side, const void *data, int first, int n,
                    uint32_t *out)
{
    const struct ffn_case *const k = data;
    struct backend *const be = c->side[side];
    const struct tensor x =
        check_in(c, side, "x", k->x + (size_t)first * (size_t)k->n_in, n, k->n_in, DTYPE_F32);
    const struct tensor hidden = check_out(c, side, "hidden", n, k->n_hidden, DTYPE_F32);
    const struct tensor y = check_out(c, side, "y", n, k->n_out, DTYPE_F32);
    struct ffn ffn = {.up = k->up[side], .down = k->down[side], .act = k->act};
    if (k->up_bias != NULL) {
        ffn.up_bias = check_in(c, side, "up_bias", k->up_bias, 1, k->n_hidden, DTYPE_F32);
        ffn.down_bias = check_in(c, side, "down_bias", k->down_bias, 1, k->n_out, DTYPE_F32);
    }
    if (k->is_apart) {
        op_linear(be, hidden, x, ffn.up, ffn.up_bias, ffn.act);
        op_linear(be, y, hidden, ffn.down, ffn.down_bias, ACT_NONE);
    } else {
        op_ffn(be, y, hidden, x, &ffn);
    }
    check_get(c, side, y, out);
}

/* Of ref only that it does the same: hidden outputs are rounded, and what lies near the middle goes
 * this way or that. */
void check_ffn(struct check *c)
{
    const bool is_many = check_chance(c, 0.1);
    struct ffn_case k = {.n = is_many ? check_many(c) : check_int(c, 1, N_TOK_MAX),
                         .n_in = check_dim(c, check_chance(c, 0.05) ? 2100 : 150),
                         .n_hidden =
                             check_chance(c, 0.8) ? 32 * check_int(c, 1, 6) : check_dim(c, 150),
                         .n_out = check_dim(c, 100),
                         .act = (enum act)check_int(c, ACT_NONE, ACT_GELU)};
    const enum dtype source = (enum dtype)check_int(c, DTYPE_F32, DTYPE_I8);
    const struct weight_desc desc = check_desc(c, WEIGHT_MATRIX, source);
    const struct tensor up =
        check_host_tensor(c, k.n_hidden, k.n_in, source, 1 / sqrtf((float)k.n_in));
    const struct tensor down =
        check_host_tensor(c, k.n_out, k.n_hidden, source, 1 / sqrtf((float)k.n_hidden));
    float *const x = check_normal(c, (size_t)k.n * (size_t)k.n_in, 1.5f);
    k.x = x;
    if (check_chance(c, 0.7)) {
        k.up_bias = check_normal(c, (size_t)k.n_hidden, 1);
        k.down_bias = check_normal(c, (size_t)k.n_out, 1);
    }
    for (int side = 0; side < SIDE_N; side++) {
        k.up[side] = check_weight(c, (enum side)side, &up, &desc);
        k.down[side] = check_weight(c, (enum side)side, &down, &desc);
    }
    check_shape(c, "n_tok %d, n_in %d, n_hidden %d, n_out %d, %s from %s, %s, act %d", k.n, k.n_in,
                k.n_hidden, k.n_out, dtype_name(desc.dtype), dtype_name(source),
                k.up_bias == NULL ? "no bias" : "bias", (int)k.act);
    const size_t n = (size_t)k.n * (size_t)k.n_out;
    float *const apart = check_host(c, n, sizeof *apart);
    float *const got = check_host(c, n, sizeof *got);
    static const enum side sides[] = {SIDE_REF, SIDE_ONE};
    for (int i = 0; i < 2; i++) {
        k.is_apart = true;
        ffn_run(c, sides[i], &k, 0, k.n, (uint32_t *)apart);
        k.is_apart = false;
        ffn_run(c, sides[i], &k, 0, k.n, (uint32_t *)got);
        check_words(c, i == 0 ? "ref's y" : "y", apart, got, k.n, k.n_out);
    }
    check_invariance(c, ffn_run, &k, k.n, k.n_out, (const uint32_t *)got);
    check_isolation(c, ffn_run, &k, x, k.n_in, k.n, k.n_out, (const uint32_t *)got);
}
