/* Checks of what works row by row: transfers, embedding, norms. */
#include "tests/kernels/check.h"

#include <math.h>
#include <string.h>

enum { N_TOK_MAX = 40 };

/* A strided view of a buffer takes and gives rows without touching what lies between them. */
void check_transfer(struct check *c)
{
    const int rows = check_int(c, 1, 7);
    const int cols = check_dim(c, 70);
    check_shape(c, "[%d, %d]", rows, cols);
    const float *const host = check_normal(c, (size_t)rows * (size_t)cols, 1);
    float *const back = check_host(c, (size_t)rows * (size_t)cols, sizeof *back);
    const struct tensor dst = check_out(c, SIDE_ONE, "dst", rows, cols, DTYPE_F32);
    c->side[SIDE_ONE]->op->upload(c->side[SIDE_ONE], dst, host);
    check_get(c, SIDE_ONE, dst, back);
    check_words(c, "upload, then download", host, back, rows, cols);
}

/* ---- embed ---------------------------------------------------------------------------------- */

struct embed_case {
    int n_tok, d, n_table;
    struct weight *table[3][SIDE_N]; /* tokens, positions, languages (n_table 3) */
    int32_t *id[3];                  /* [n_tok] */
};

static void embed_run(struct check *c, enum side side, const void *data, int first, int n,
                      uint32_t *out)
{
    const struct embed_case *const k = data;
    struct backend *const be = c->side[side];
    struct step *const step = check_step_rows(c, side, n);
    for (int r = 0; r < n; r++) {
        step->token[r] = k->id[0][first + r];
        step->pos[r] = k->id[1][first + r];
        step->lang[r] = k->id[2][first + r];
    }
    const struct tensor y = check_out(c, side, "y", n, k->d, DTYPE_F32);
    be->op->step_begin(be, step);
    op_embed(be, y, step, k->table[0][side], k->table[1][side], k->table[2][side]);
    check_finish(c, side, step);
    check_get(c, side, y, out);
    be->op->step_free(be, step);
}

void check_embed(struct check *c)
{
    struct embed_case k = {
        .n_tok = check_int(c, 1, N_TOK_MAX), .d = check_dim(c, 200), .n_table = check_int(c, 2, 3)};
    const int rows[3] = {check_int(c, 1, 60), check_int(c, 1, 8 * KV_PAGE), check_int(c, 1, 5)};
    enum dtype source[3] = {DTYPE_F32, DTYPE_F32, DTYPE_F32};
    struct weight_desc desc[3] = {{0}};
    for (int t = 0; t < 3; t++) {
        k.id[t] = check_host(c, (size_t)k.n_tok, sizeof *k.id[t]);
        for (int r = 0; r < k.n_tok; r++) {
            k.id[t][r] = check_int(c, 0, rows[t] - 1);
        }
        if (t >= k.n_table) {
            continue;
        }
        source[t] = (enum dtype)check_int(c, DTYPE_F32, DTYPE_I8);
        const struct tensor host = check_host_tensor(c, rows[t], k.d, source[t], 1);
        desc[t] = check_desc(c, WEIGHT_TABLE, source[t]);
        for (int side = 0; side < SIDE_N; side++) {
            k.table[t][side] = check_weight(c, (enum side)side, &host, &desc[t]);
        }
    }
    check_shape(c, "n_tok %d, d %d, tables %d: %s %s %s, %s %s %s, %s %s %s", k.n_tok, k.d,
                k.n_table, dtype_name(source[0]), dtype_name(desc[0].dtype),
                placement_name(desc[0].placement), dtype_name(source[1]), dtype_name(desc[1].dtype),
                placement_name(desc[1].placement), dtype_name(source[2]), dtype_name(desc[2].dtype),
                placement_name(desc[2].placement));
    const size_t n = (size_t)k.n_tok * (size_t)k.d;
    uint32_t *const expected = check_host(c, n, sizeof *expected);
    uint32_t *const got = check_host(c, n, sizeof *got);
    embed_run(c, SIDE_REF, &k, 0, k.n_tok, expected);
    embed_run(c, SIDE_ONE, &k, 0, k.n_tok, got);
    check_words(c, "embed against ref", expected, got, k.n_tok, k.d);
    check_invariance(c, embed_run, &k, k.n_tok, k.d, got);
}

/* ---- norms ---------------------------------------------------------------------------------- */

enum norm_into { INTO_FRESH, INTO_X, INTO_R };

struct norm_case {
    int n, d;
    float eps;
    enum norm_into into;
    const float *x, *r; /* [n, d]; r NULL: norm, else add_norm */
    const float *gamma, *beta;
};

static void norm_run(struct check *c, enum side side, const void *data, int first, int n,
                     uint32_t *out)
{
    const struct norm_case *const k = data;
    struct backend *const be = c->side[side];
    const float *const host_x = k->x + (size_t)first * (size_t)k->d;
    const float *const host_r = k->r == NULL ? NULL : k->r + (size_t)first * (size_t)k->d;
    const struct tensor x = k->into == INTO_X
                                ? check_inout(c, side, "y = x", host_x, n, k->d, DTYPE_F32)
                                : check_in(c, side, "x", host_x, n, k->d, DTYPE_F32);
    struct tensor r = {0};
    if (k->r != NULL) {
        r = k->into == INTO_R ? check_inout(c, side, "y = r", host_r, n, k->d, DTYPE_F32)
                              : check_in(c, side, "r", host_r, n, k->d, DTYPE_F32);
    }
    const struct tensor y = k->into == INTO_X   ? x
                            : k->into == INTO_R ? r
                                                : check_out(c, side, "y", n, k->d, DTYPE_F32);
    const struct tensor gamma = check_in(c, side, "gamma", k->gamma, 1, k->d, DTYPE_F32);
    const struct tensor beta = check_in(c, side, "beta", k->beta, 1, k->d, DTYPE_F32);
    if (k->r == NULL) {
        op_norm(be, y, x, gamma, beta, k->eps);
    } else {
        op_add_norm(be, y, x, r, gamma, beta, k->eps);
    }
    check_get(c, side, y, out);
}

/* What a rounding error in row r can grow to: errors of the sum and the mean are relative to the
 * largest |x|, and are divided by the deviation. */
static double norm_magnitude(const struct norm_case *k, int r)
{
    double sum = 0;
    double squares = 0;
    double max_x = 0;
    double max_gamma = 0;
    double max_beta = 0;
    for (int i = 0; i < k->d; i++) {
        const size_t at = (size_t)r * (size_t)k->d + (size_t)i;
        const double x = (double)k->x[at] + (k->r == NULL ? 0 : (double)k->r[at]);
        sum += x;
        squares += x * x;
        max_x = fmax(max_x, fabs(x));
        max_gamma = fmax(max_gamma, fabs((double)k->gamma[i]));
        max_beta = fmax(max_beta, fabs((double)k->beta[i]));
    }
    const double mean = sum / k->d;
    const double deviation = sqrt(fmax(squares / k->d - mean * mean, 0) + (double)k->eps);
    return max_gamma * max_x / deviation * (1 + max_x / deviation) + max_beta;
}

static void check_any_norm(struct check *c, bool has_r)
{
    struct norm_case k = {.n = check_int(c, 1, N_TOK_MAX), .d = check_dim(c, 400)};
    const float offset = check_chance(c, 0.3) ? (float)check_int(c, -9, 9) : 0;
    const float sigma = check_chance(c, 0.2) ? 1e-3f : 2;
    /* With one or two columns the deviation may be as small as the rounding of the inputs; a
     * larger epsilon keeps that case well-posed. */
    k.eps = k.d < 4 ? 1e-2f : check_chance(c, 0.5) ? 1e-12f : 1e-5f;
    k.into = (enum norm_into)check_int(c, INTO_FRESH, has_r ? INTO_R : INTO_X);
    float *const x = check_normal(c, (size_t)k.n * (size_t)k.d, sigma);
    for (int i = 0; i < k.n * k.d; i++) {
        x[i] += offset;
    }
    k.x = x;
    k.r = has_r ? check_normal(c, (size_t)k.n * (size_t)k.d, sigma) : NULL;
    k.gamma = check_normal(c, (size_t)k.d, 1);
    k.beta = check_normal(c, (size_t)k.d, 1);
    if (check_chance(c, 0.2)) { /* a row of zeros has no deviation */
        memset(x, 0, (size_t)k.d * sizeof *x);
    }
    check_shape(c, "n_tok %d, d %d, eps %g, offset %g, y %s", k.n, k.d, (double)k.eps,
                (double)offset,
                k.into == INTO_X   ? "= x"
                : k.into == INTO_R ? "= r"
                                   : "apart");
    const size_t n = (size_t)k.n * (size_t)k.d;
    float *const expected = check_host(c, n, sizeof *expected);
    float *const got = check_host(c, n, sizeof *got);
    double *const magnitude = check_host(c, (size_t)k.n, sizeof *magnitude);
    for (int r = 0; r < k.n; r++) {
        magnitude[r] = norm_magnitude(&k, r);
    }
    norm_run(c, SIDE_REF, &k, 0, k.n, (uint32_t *)expected);
    norm_run(c, SIDE_ONE, &k, 0, k.n, (uint32_t *)got);
    check_values(c, "y", expected, got, k.n, k.d, TOL_NORM, magnitude, k.n);
    check_invariance(c, norm_run, &k, k.n, k.d, (const uint32_t *)got);
    check_isolation(c, norm_run, &k, x, k.d, k.n, k.d, (const uint32_t *)got);
}

void check_norm(struct check *c)
{
    check_any_norm(c, false);
}

void check_add_norm(struct check *c)
{
    check_any_norm(c, true);
}
