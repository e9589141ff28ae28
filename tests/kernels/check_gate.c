/* Checks of what pre-norm transformers with rotary positions and gated networks add: rms_norm,
 * head_norm, rope, gate and pkm_experts. */
#include "tests/kernels/check.h"

#include <math.h>
#include <string.h>

enum { N_TOK_MAX = 24, N_POS = 8 * KV_PAGE };

/* ---- RMS norm ------------------------------------------------------------------------------- */

enum rms_into { SUM_APART, SUM_X, SUM_R };

struct rms_case {
    int n, d;
    float eps;
    enum rms_into into;
    const float *x, *r; /* [n, d]; r NULL: nothing is added */
    const float *gamma;
};

/* Writes y and, where there is one, the sum of each row: [n, 2·d] words. */
static void rms_run(struct check *c, enum side side, const void *data, int first, int n,
                    uint32_t *out)
{
    const struct rms_case *const k = data;
    struct backend *const be = c->side[side];
    const size_t at = (size_t)first * (size_t)k->d;
    const bool into_x = k->r != NULL && k->into == SUM_X;
    const struct tensor x = into_x ? check_inout(c, side, "sum = x", k->x + at, n, k->d, DTYPE_F32)
                                   : check_in(c, side, "x", k->x + at, n, k->d, DTYPE_F32);
    const struct tensor y = check_out(c, side, "y", n, k->d, DTYPE_F32);
    const struct tensor gamma = check_in(c, side, "gamma", k->gamma, 1, k->d, DTYPE_F32);
    struct tensor r = {0};
    struct tensor sum = {0};
    if (k->r != NULL) {
        r = k->into == SUM_R ? check_inout(c, side, "sum = r", k->r + at, n, k->d, DTYPE_F32)
                             : check_in(c, side, "r", k->r + at, n, k->d, DTYPE_F32);
        sum = into_x ? x : k->into == SUM_R ? r : check_out(c, side, "sum", n, k->d, DTYPE_F32);
    }
    op_rms_norm(be, y, sum, x, r, gamma, k->eps);
    uint32_t *const got = check_host(c, 2 * (size_t)n * (size_t)k->d, sizeof *got);
    uint32_t *const got_sum = got + (size_t)n * (size_t)k->d;
    check_get(c, side, y, got);
    if (k->r != NULL) {
        check_get(c, side, sum, got_sum);
    }
    const size_t row_bytes = (size_t)k->d * sizeof *got;
    for (int i = 0; i < n; i++) {
        const size_t row = (size_t)i * (size_t)k->d;
        memcpy(out + 2 * row, got + row, row_bytes);
        memcpy(out + 2 * row + k->d, got_sum + row, row_bytes);
    }
    check_host_drop(c);
}

void check_rms_norm(struct check *c)
{
    struct rms_case k = {.n = check_int(c, 1, N_TOK_MAX),
                         .d = check_dim(c, 400),
                         .eps = check_chance(c, 0.5) ? 1e-5f : 1e-12f,
                         .into = (enum rms_into)check_int(c, SUM_APART, SUM_R)};
    const size_t n_value = (size_t)k.n * (size_t)k.d;
    float *const x = check_normal(c, n_value, check_chance(c, 0.2) ? 1e-3f : 2);
    if (check_chance(c, 0.2)) { /* a row of zeros has no length */
        memset(x, 0, (size_t)k.d * sizeof *x);
    }
    k.x = x;
    k.r = check_chance(c, 0.6) ? check_normal(c, n_value, 1) : NULL;
    k.gamma = check_normal(c, (size_t)k.d, 1);
    static const char *const into[] = {"apart", "= x", "= r"};
    check_shape(c, "n_tok %d, d %d, eps %g, sum %s", k.n, k.d, (double)k.eps,
                k.r == NULL ? "none" : into[k.into]);
    float *const expected = check_host(c, 2 * n_value, sizeof *expected);
    float *const got = check_host(c, 2 * n_value, sizeof *got);
    double *const magnitude = check_host(c, 2 * n_value, sizeof *magnitude);
    rms_run(c, SIDE_REF, &k, 0, k.n, (uint32_t *)expected);
    rms_run(c, SIDE_ONE, &k, 0, k.n, (uint32_t *)got);
    for (size_t i = 0; i < 2 * n_value; i++) {
        magnitude[i] = fabs((double)expected[i]);
    }
    check_values(c, "y and sum", expected, got, k.n, 2 * k.d, TOL_NORM, magnitude,
                 2 * (int64_t)n_value);
    check_invariance(c, rms_run, &k, k.n, 2 * k.d, (const uint32_t *)got);
    check_isolation(c, rms_run, &k, x, k.d, k.n, 2 * k.d, (const uint32_t *)got);
}

/* ---- RMS norm of heads
 * ------------------------------------------------------------------------ */

struct head_norm_case {
    int n, n_head, d_head;
    float eps;
    const float *x; /* [n, n_head·d_head] */
    const float *gamma;
};

static void head_norm_run(struct check *c, enum side side, const void *data, int first, int n,
                          uint32_t *out)
{
    const struct head_norm_case *const k = data;
    const int width = k->n_head * k->d_head;
    const struct tensor x =
        check_inout(c, side, "x", k->x + (size_t)first * (size_t)width, n, width, DTYPE_F32);
    const struct tensor gamma = check_in(c, side, "gamma", k->gamma, 1, k->d_head, DTYPE_F32);
    op_head_norm(c->side[side], x, gamma, k->n_head, k->eps);
    check_get(c, side, x, out);
}

void check_head_norm(struct check *c)
{
    struct head_norm_case k = {.n = check_int(c, 1, N_TOK_MAX),
                               .n_head = check_int(c, 1, 9),
                               .d_head = check_dim(c, 140),
                               .eps = check_chance(c, 0.5) ? 1e-5f : 1e-12f};
    const int width = k.n_head * k.d_head;
    const size_t n_value = (size_t)k.n * (size_t)width;
    float *const x = check_normal(c, n_value, check_chance(c, 0.2) ? 1e-3f : 2);
    if (check_chance(c, 0.2)) { /* a head of zeros has no length */
        memset(x, 0, (size_t)k.d_head * sizeof *x);
    }
    k.x = x;
    k.gamma = check_normal(c, (size_t)k.d_head, 1);
    check_shape(c, "n_tok %d, heads %d, d_head %d, eps %g", k.n, k.n_head, k.d_head, (double)k.eps);
    float *const expected = check_host(c, n_value, sizeof *expected);
    float *const got = check_host(c, n_value, sizeof *got);
    double *const magnitude = check_host(c, n_value, sizeof *magnitude);
    head_norm_run(c, SIDE_REF, &k, 0, k.n, (uint32_t *)expected);
    head_norm_run(c, SIDE_ONE, &k, 0, k.n, (uint32_t *)got);
    for (size_t i = 0; i < n_value; i++) {
        magnitude[i] = fabs((double)expected[i]);
    }
    check_values(c, "x", expected, got, k.n, width, TOL_NORM, magnitude, (int64_t)n_value);
    check_invariance(c, head_norm_run, &k, k.n, width, (const uint32_t *)got);
    check_isolation(c, head_norm_run, &k, x, width, k.n, width, (const uint32_t *)got);
}

/* ---- rotary positions ----------------------------------------------------------------------- */

struct rotate_case {
    int n, n_head, d_head;
    const int32_t *pos; /* [n] */
    const float *x;     /* [n, n_head·d_head] */
    const float *table; /* [N_POS, 2·d_head] */
};

static void rotate_run(struct check *c, enum side side, const void *data, int first, int n,
                       uint32_t *out)
{
    const struct rotate_case *const k = data;
    struct backend *const be = c->side[side];
    const int width = k->n_head * k->d_head;
    /* Each row is a sequence of its own, so positions are free and rows may be cut anywhere. */
    const struct step_limits limits = {
        .n_tok_max = n, .n_seq_max = n, .n_page_max = N_POS / KV_PAGE, .n_out_max = 1};
    struct step *step = NULL;
    CHECK(be->op->step_new(be, &step, &limits, NULL) == ERR_OK);
    step->n_tok = step->n_seq = n;
    for (int r = 0; r < n; r++) {
        step->pos[r] = k->pos[first + r];
        step->seq_first[r + 1] = r + 1;
    }
    const struct tensor x =
        check_inout(c, side, "x", k->x + (size_t)first * (size_t)width, n, width, DTYPE_F32);
    const struct tensor table =
        check_in(c, side, "table", k->table, N_POS, 2 * k->d_head, DTYPE_F32);
    be->op->step_begin(be, step);
    op_rope(be, x, table, step, k->n_head);
    check_finish(c, side, step);
    check_get(c, side, x, out);
    be->op->step_free(be, step);
}

void check_rope(struct check *c)
{
    struct rotate_case k = {.n = check_int(c, 1, N_TOK_MAX),
                            .n_head = check_int(c, 1, 9),
                            .d_head = 2 * check_dim(c, 70)};
    const int width = k.n_head * k.d_head;
    const size_t n_value = (size_t)k.n * (size_t)width;
    float *const x = check_normal(c, n_value, 2);
    int32_t *const pos = check_host(c, (size_t)k.n, sizeof *pos);
    for (int r = 0; r < k.n; r++) {
        pos[r] = check_int(c, 0, N_POS - 1);
    }
    k.x = x;
    k.pos = pos;
    k.table = check_normal(c, (size_t)N_POS * 2 * (size_t)k.d_head, 1);
    check_shape(c, "n_tok %d, heads %d, d_head %d", k.n, k.n_head, k.d_head);
    float *const expected = check_host(c, n_value, sizeof *expected);
    float *const got = check_host(c, n_value, sizeof *got);
    double *const magnitude = check_host(c, n_value, sizeof *magnitude);
    for (size_t i = 0; i < n_value; i++) {
        const size_t column = i % (size_t)width % (size_t)k.d_head;
        const float *const row =
            k.table + (size_t)pos[i / (size_t)width] * 2 * (size_t)k.d_head + column;
        magnitude[i] =
            fabs((double)x[i] * (double)row[0]) + fabs((double)x[i ^ 1] * (double)row[k.d_head]);
    }
    rotate_run(c, SIDE_REF, &k, 0, k.n, (uint32_t *)expected);
    rotate_run(c, SIDE_ONE, &k, 0, k.n, (uint32_t *)got);
    check_values(c, "x", expected, got, k.n, width, TOL_NORM, magnitude, (int64_t)n_value);
    check_invariance(c, rotate_run, &k, k.n, width, (const uint32_t *)got);
    check_isolation(c, rotate_run, &k, x, width, k.n, width, (const uint32_t *)got);
}

/* ---- gates ---------------------------------------------------------------------------------- */

struct gate_case {
    int n, d, d_gate;
    enum gate_kind kind;
    bool in_place;
    const float *x, *g; /* [n, d], [n, d_gate] */
};

static void gate_run(struct check *c, enum side side, const void *data, int first, int n,
                     uint32_t *out)
{
    const struct gate_case *const k = data;
    const float *const from = k->x + (size_t)first * (size_t)k->d;
    const struct tensor y = k->in_place ? check_inout(c, side, "y = x", from, n, k->d, DTYPE_F32)
                                        : check_out(c, side, "y", n, k->d, DTYPE_F32);
    const struct tensor x = k->in_place ? y : check_in(c, side, "x", from, n, k->d, DTYPE_F32);
    const struct tensor g =
        check_in(c, side, "g", k->g + (size_t)first * (size_t)k->d_gate, n, k->d_gate, DTYPE_F32);
    op_gate(c->side[side], y, x, g, k->kind);
    check_get(c, side, y, out);
}

void check_gate(struct check *c)
{
    struct gate_case k = {.n = check_int(c, 1, N_TOK_MAX),
                          .d = check_dim(c, 300),
                          .kind = (enum gate_kind)check_int(c, GATE_SILU, GATE_FACTOR),
                          .in_place = check_chance(c, 0.5)};
    k.d_gate = k.kind == GATE_SILU ? k.d : 1;
    const size_t n_value = (size_t)k.n * (size_t)k.d;
    float *const x = check_normal(c, n_value, 2);
    /* also where e^-g overflows or vanishes */
    float *const g = check_normal(c, (size_t)k.n * (size_t)k.d_gate, check_chance(c, 0.3) ? 60 : 2);
    k.x = x;
    k.g = g;
    check_shape(c, "n_tok %d, d %d, %s%s", k.n, k.d,
                k.kind == GATE_SILU      ? "silu"
                : k.kind == GATE_SIGMOID ? "sigmoid"
                                         : "factor",
                k.in_place ? ", in place" : "");
    float *const expected = check_host(c, n_value, sizeof *expected);
    float *const got = check_host(c, n_value, sizeof *got);
    double *const magnitude = check_host(c, n_value, sizeof *magnitude);
    gate_run(c, SIDE_REF, &k, 0, k.n, (uint32_t *)expected);
    gate_run(c, SIDE_ONE, &k, 0, k.n, (uint32_t *)got);
    for (size_t i = 0; i < n_value; i++) { /* below 1e-30 a share may count as 0 */
        magnitude[i] = fabs((double)expected[i]) + 1e-24;
    }
    check_values(c, "y", expected, got, k.n, k.d, TOL_NORM, magnitude, (int64_t)n_value);
    check_invariance(c, gate_run, &k, k.n, k.d, (const uint32_t *)got);
    check_isolation(c, gate_run, &k, g, k.d_gate, k.n, k.d, (const uint32_t *)got);
}

/* ---- experts -------------------------------------------------------------------------------- */

struct experts_case {
    int n, d, n_col;
    bool in_place;
    const float *x;       /* [n, d] */
    const int32_t *slots; /* [n, n_col] */
    const float *shares;
    struct weight *experts[SIDE_N];
    const struct check_redirect *redirect; /* NULL: the call has none */
};

static void experts_run(struct check *c, enum side side, const void *data, int first, int n,
                        uint32_t *out)
{
    const struct experts_case *const k = data;
    struct backend *const be = c->side[side];
    const size_t at = (size_t)first * (size_t)k->n_col;
    const struct tensor shares =
        k->in_place ? check_inout(c, side, "y = shares", k->shares + at, n, k->n_col, DTYPE_F32)
                    : check_in(c, side, "shares", k->shares + at, n, k->n_col, DTYPE_F32);
    const struct tensor y = k->in_place ? shares : check_out(c, side, "y", n, k->n_col, DTYPE_F32);
    const struct tensor slots = check_in(c, side, "slots", k->slots + at, n, k->n_col, DTYPE_I32);
    const struct tensor x =
        check_in(c, side, "x", k->x + (size_t)first * (size_t)k->d, n, k->d, DTYPE_F32);
    struct pkm_redirect redirect;
    struct step *const step =
        k->redirect == NULL ? NULL : check_redirect_step(c, side, k->redirect, first, n, &redirect);
    op_pkm_experts(be, y, shares, slots, x, k->experts[side], step == NULL ? NULL : &redirect);
    if (step != NULL) {
        check_finish(c, side, step);
        be->op->step_free(be, step);
    }
    check_get(c, side, y, out);
}

void check_pkm_experts(struct check *c)
{
    struct experts_case k = {.n = check_int(c, 1, N_TOK_MAX),
                             .d = check_dim(c, 300),
                             .n_col = check_dim(c, 150),
                             .in_place = check_chance(c, 0.5)};
    const int n_slot = check_int(c, 1, 90);
    const enum dtype source = (enum dtype)check_int(c, DTYPE_F32, DTYPE_I8);
    const struct tensor host = check_host_tensor(c, n_slot, k.d, source, 1 / sqrtf((float)k.d));
    const struct weight_desc desc = check_slots_desc(c, source);
    for (int side = 0; side < SIDE_N; side++) {
        k.experts[side] = check_weight(c, (enum side)side, &host, &desc);
    }
    const size_t n_share = (size_t)k.n * (size_t)k.n_col;
    int32_t *const slots = check_host(c, n_share, sizeof *slots);
    for (size_t i = 0; i < n_share; i++) {
        slots[i] = check_int(c, 0, n_slot - 1);
    }
    float *const x = check_normal(c, (size_t)k.n * (size_t)k.d, 2);
    k.x = x;
    k.slots = slots;
    k.shares = check_normal(c, n_share, 1);
    k.redirect = check_chance(c, 0.5) ? check_redirect_new(c, k.n, n_slot, k.d, true) : NULL;
    check_shape(c, "n_tok %d, d %d, columns %d, slots %d, %s from %s, %s%s%s", k.n, k.d, k.n_col,
                n_slot, dtype_name(desc.dtype), dtype_name(source), placement_name(desc.placement),
                k.in_place ? ", in place" : "", k.redirect != NULL ? ", redirected" : "");
    float *const expected = check_host(c, n_share, sizeof *expected);
    float *const got = check_host(c, n_share, sizeof *got);
    double *const magnitude = check_host(c, n_share, sizeof *magnitude);
    for (size_t i = 0; i < n_share; i++) {
        const float *const row = x + i / (size_t)k.n_col * (size_t)k.d;
        for (int j = 0; j < k.d; j++) {
            const float value = check_redirect_value(k.redirect, (int)(i / (size_t)k.n_col),
                                                     slots[i], j, check_value(&host, slots[i], j));
            magnitude[i] += fabs((double)row[j] * (double)value);
        }
        magnitude[i] *= fabs((double)k.shares[i]);
    }
    experts_run(c, SIDE_REF, &k, 0, k.n, (uint32_t *)expected);
    experts_run(c, SIDE_ONE, &k, 0, k.n, (uint32_t *)got);
    check_values(c, "y", expected, got, k.n, k.n_col, TOL_LINEAR_GELU, magnitude, (int64_t)n_share);
    check_invariance(c, experts_run, &k, k.n, k.n_col, (const uint32_t *)got);
    check_isolation(c, experts_run, &k, x, k.d, k.n, k.n_col, (const uint32_t *)got);
}
