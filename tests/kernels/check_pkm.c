/* Checks of the memory layer: pkm_search and pkm_read.
 *
 * A search chooses, so its slots are judged by their exact scores: the slot of each rank must score
 * what ref's slot of that rank scores, within the rounding of an F32 sum. So wherever the scores
 * have clear gaps the slots are ref's own. With ties nothing is left to rounding: there the data
 * are small multiples of 1/2, every sum is exact, and the slots must be ref's exactly. */
#include "tests/kernels/check.h"

#include <math.h>
#include <string.h>

enum { N_TOK_MAX = 24, N_TOK_MANY = 40, N_TOK_VERY_MANY = 264 };

struct search_case {
    struct pkm_shape shape;
    bool is_shared;     /* one key set for all halves and heads */
    bool is_split;      /* struct weight_desc */
    int n, n_col;       /* rows; n_head·k_top */
    const float *query; /* [n, n_head·d_key] */
    struct tensor keys; /* on the host */
    struct weight *w[SIDE_N];
};

/* Writes slots and shares of each row, one after the other: [n, 2·n_col] words. */
static void search_run(struct check *c, enum side side, const void *data, int first, int n,
                       uint32_t *out)
{
    const struct search_case *const k = data;
    struct backend *const be = c->side[side];
    const int64_t width = (int64_t)k->shape.n_head * k->shape.d_key;
    const struct tensor query =
        check_in(c, side, "query", k->query + first * width, n, width, DTYPE_F32);
    const struct tensor slots = check_out(c, side, "slots", n, k->n_col, DTYPE_I32);
    const struct tensor shares = check_out(c, side, "shares", n, k->n_col, DTYPE_F32);
    op_pkm_search(be, slots, shares, query, k->w[side], &k->shape);
    check_get_hits(c, side, slots, shares, out);
}

static struct search_case search_new(struct check *c)
{
    /* Few rows and many may be searched in different ways. */
    struct search_case k = {.n = check_chance(c, 0.2) ? check_int(c, N_TOK_MANY - 7, N_TOK_MANY)
                                                      : check_int(c, 1, N_TOK_MAX)};
    k.shape.kind = check_chance(c, 0.7) ? PKM_PRODUCT : PKM_FLAT;
    const bool is_product = k.shape.kind == PKM_PRODUCT;
    k.shape.n_head = check_int(c, 1, 5);
    const bool is_large = check_chance(c, 0.05);
    k.shape.n_key = is_large ? check_int(c, 510, 515) * check_int(c, 1, 3)
                             : check_dim(c, is_product ? 140 : 300);
    k.shape.d_key = is_product ? 2 * check_dim(c, 70) : check_dim(c, 140);
    const int k_limit = is_large ? 300 : 70;
    const int k_max = k.shape.n_key < k_limit ? k.shape.n_key : k_limit;
    k.shape.k_top = check_chance(c, 0.3) && k_max >= 32 ? 32
                    : check_chance(c, 0.1)              ? k_max
                                                        : check_int(c, 1, k_max);
    k.n_col = k.shape.n_head * k.shape.k_top;
    k.shape.scores = check_chance(c, 0.25);
    k.is_shared = check_chance(c, 0.2);
    k.is_split = check_chance(c, 0.5);
    check_shape(c, "%s%s%s, n_tok %d, heads %d, n_key %d, k_top %d, d_key %d%s",
                k.is_shared ? "shared " : "", k.is_split ? "split " : "",
                is_product ? "product" : "flat", k.n, k.shape.n_head, k.shape.n_key, k.shape.k_top,
                k.shape.d_key, k.shape.scores ? ", scores" : "");
    return k;
}

/* More rows than a backend takes at a time, of keys that may be split. */
static struct search_case search_new_many(struct check *c)
{
    const int most = c->is_double ? N_TOK_VERY_MANY / 2 : N_TOK_VERY_MANY;
    struct search_case k = {.n = check_int(c, most - 7, most), .is_split = true};
    const bool is_large = !c->is_double && check_chance(c, 0.2);
    k.shape.kind = PKM_PRODUCT;
    k.shape.n_head = check_int(c, 1, 2);
    k.shape.n_key = is_large ? check_int(c, 510, 515) * check_int(c, 1, 3) : check_dim(c, 140);
    k.shape.d_key = 2 * check_dim(c, is_large ? 16 : check_chance(c, 0.3) ? 170 : 40);
    k.shape.k_top = check_int(c, 1, k.shape.n_key < 32 ? k.shape.n_key : 32);
    k.n_col = k.shape.n_head * k.shape.k_top;
    check_shape(c, "split product, n_tok %d, heads %d, n_key %d, k_top %d, d_key %d", k.n,
                k.shape.n_head, k.shape.n_key, k.shape.k_top, k.shape.d_key);
    return k;
}

/* Rows and keys for a device of any size to share out among all of its blocks; less of them where
 * that would take long. */
static struct search_case search_new_large(struct check *c)
{
    const bool is_slow = check_is_slow(c);
    struct search_case k = {.n = check_chance(c, 0.3) ? check_int(c, 1, 70)
                                                      : check_int(c, 300, 1400),
                            .is_split = check_chance(c, 0.7)};
    k.n = is_slow ? (k.n + 11) / 12 : k.n;
    k.shape.kind = check_chance(c, 0.7) ? PKM_PRODUCT : PKM_FLAT;
    k.shape.n_head = check_int(c, 1, is_slow ? 3 : 8);
    k.shape.n_key = k.shape.kind == PKM_FLAT ? check_int(c, 513, is_slow ? 1100 : 6000)
                    : check_chance(c, 0.6)   ? check_int(c, 400, 512)
                    : check_chance(c, 0.6)   ? check_int(c, 513, 1024)
                                             : check_int(c, 1025, 2048);
    k.shape.d_key = 2 * check_int(c, 1, is_slow ? 20 : 130);
    k.shape.k_top = check_chance(c, 0.6) ? 32 : check_int(c, 1, 31);
    k.n_col = k.shape.n_head * k.shape.k_top;
    check_shape(c, "%s%s, n_tok %d, heads %d, n_key %d, k_top %d, d_key %d",
                k.is_split ? "split " : "", k.shape.kind == PKM_FLAT ? "flat" : "product", k.n,
                k.shape.n_head, k.shape.n_key, k.shape.k_top, k.shape.d_key);
    return k;
}

static int group_count(const struct search_case *k)
{
    return k->is_shared ? 1 : k->shape.n_head * (k->shape.kind == PKM_PRODUCT ? 2 : 1);
}

/* Takes the keys' values and makes the weight on each side. */
static void search_keys(struct check *c, struct search_case *k, struct tensor keys)
{
    const struct weight_desc desc = {.kind = WEIGHT_KEYS,
                                     .dtype = DTYPE_F32,
                                     .placement = PLACEMENT_DEVICE,
                                     .n_group = group_count(k),
                                     .is_split = k->is_split};
    k->keys = keys;
    for (int side = 0; side < SIDE_N; side++) {
        k->w[side] = check_weight(c, (enum side)side, &keys, &desc);
    }
}

static int64_t key_rows(const struct search_case *k)
{
    return (int64_t)group_count(k) * k->shape.n_key;
}

static int64_t key_cols(const struct search_case *k)
{
    return k->shape.kind == PKM_PRODUCT ? k->shape.d_key / 2 : k->shape.d_key;
}

static int64_t n_slot_of(const struct pkm_shape *shape)
{
    return shape->kind == PKM_PRODUCT ? (int64_t)shape->n_key * shape->n_key : shape->n_key;
}

/* The score of a slot in double; *magnitude is Σ|q·k|, which its F32 rounding is relative to. */
static double slot_score(const struct search_case *k, int r, int h, int32_t slot, double *magnitude)
{
    const bool is_product = k->shape.kind == PKM_PRODUCT;
    const int64_t cols = key_cols(k);
    const float *const q = k->query + ((int64_t)r * k->shape.n_head + h) * k->shape.d_key;
    double score = 0;
    *magnitude = 0;
    for (int half = 0; half < (is_product ? 2 : 1); half++) {
        const int32_t key = !is_product ? slot
                            : half == 0 ? slot / k->shape.n_key
                                        : slot % k->shape.n_key;
        const int64_t group = k->is_shared ? 0 : is_product ? 2 * (int64_t)h + half : h;
        for (int64_t i = 0; i < cols; i++) {
            const double product = (double)q[half * cols + i] *
                                   (double)check_value(&k->keys, group * k->shape.n_key + key, i);
            score += product;
            *magnitude += fabs(product);
        }
    }
    return score;
}

static bool slots_are_sound(struct check *c, const struct search_case *k, const int32_t *slots,
                            int r, int h)
{
    for (int j = 0; j < k->shape.k_top; j++) {
        if (slots[j] < 0 || slots[j] >= n_slot_of(&k->shape)) {
            check_fail(c, "slots[%d], head %d, rank %d: expected 0 .. %lld, got %d", r, h, j,
                       (long long)n_slot_of(&k->shape) - 1, slots[j]);
            return false;
        }
        for (int i = 0; i < j; i++) {
            if (slots[i] == slots[j]) {
                check_fail(c, "slots[%d], head %d: slot %d stands at ranks %d and %d", r, h,
                           slots[j], i, j);
                return false;
            }
        }
    }
    return true;
}

/* One row and head: slots and shares against ref's. */
static void compare_head(struct check *c, const struct search_case *k, int r, int h,
                         const uint32_t *expected, const uint32_t *got)
{
    const int32_t *const ref_slots = (const int32_t *)expected + h * k->shape.k_top;
    const int32_t *const slots = (const int32_t *)got + h * k->shape.k_top;
    const float *const ref_shares = (const float *)expected + k->n_col + h * k->shape.k_top;
    const float *const shares = (const float *)got + k->n_col + h * k->shape.k_top;
    if (!slots_are_sound(c, k, slots, r, h)) {
        return;
    }
    for (int j = 0; j < k->shape.k_top; j++) {
        c->n_near += slots[j] != ref_slots[j];
        double magnitude[2];
        const double ref_score = slot_score(k, r, h, ref_slots[j], &magnitude[0]);
        const double score = slot_score(k, r, h, slots[j], &magnitude[1]);
        const double scale = fmax(magnitude[0], magnitude[1]);
        const enum tolerance score_tolerance = k->is_split ? TOL_SCORE_SPLIT : TOL_SCORE;
        if (fabs(score - ref_score) > 2 * check_tolerance(score_tolerance) * scale) {
            check_fail(c,
                       "slots[%d], head %d, rank %d: expected slot %d (score %.9g), got slot %d "
                       "(score %.9g)",
                       r, h, j, ref_slots[j], ref_score, slots[j], score);
            return;
        }
        if (!check_close(ref_shares[j], shares[j], k->is_split ? TOL_SHARE_SPLIT : TOL_SHARE,
                         1 + scale)) {
            check_fail(c, "shares[%d], head %d, rank %d: expected %.9g from ref, got %.9g", r, h, j,
                       (double)ref_shares[j], (double)shares[j]);
            return;
        }
    }
}

static void search_compare(struct check *c, const struct search_case *k, bool is_exact)
{
    const size_t n_word = 2 * (size_t)k->n_col;
    uint32_t *const expected = check_host(c, (size_t)k->n * n_word, sizeof *expected);
    uint32_t *const got = check_host(c, (size_t)k->n * n_word, sizeof *got);
    search_run(c, SIDE_REF, k, 0, k->n, expected);
    search_run(c, SIDE_ONE, k, 0, k->n, got);
    for (int r = 0; r < k->n; r++) {
        const uint32_t *const ref_row = expected + (size_t)r * n_word;
        const uint32_t *const row = got + (size_t)r * n_word;
        for (int j = 0; j < k->n_col && is_exact; j++) {
            if (row[j] != ref_row[j]) {
                check_fail(c, "slots[%d], head %d, rank %d: expected %u by the tie rule, got %u", r,
                           j / k->shape.k_top, j % k->shape.k_top, ref_row[j], row[j]);
            }
        }
        for (int h = 0; h < k->shape.n_head; h++) {
            compare_head(c, k, r, h, ref_row, row);
        }
        for (int j = k->n_col; j < 2 * k->n_col && is_exact; j++) {
            const float due = ((const float *)ref_row)[j];
            const float share = ((const float *)row)[j];
            /* What is not 0 counts as used; the last few subnormal numbers are left to rounding. */
            if (due > 1e-44f && !(share > 0)) {
                check_fail(c,
                           "shares[%d], column %d: expected %.9g, got %.9g, which counts as unused",
                           r, j - k->n_col, (double)due, (double)share);
            }
        }
    }
    check_invariance(c, search_run, k, k->n, (int)n_word, got);
}

static void check_search(struct check *c, struct search_case k)
{
    const enum dtype source = (enum dtype)check_int(c, DTYPE_F32, DTYPE_BF16);
    search_keys(c, &k, check_host_tensor(c, key_rows(&k), key_cols(&k), source, 0.5f));
    k.query = check_normal(c, (size_t)k.n * (size_t)k.shape.n_head * (size_t)k.shape.d_key, 1);
    search_compare(c, &k, false);
}

void check_pkm_search(struct check *c)
{
    check_search(c, search_new(c));
}

void check_pkm_search_many(struct check *c)
{
    check_search(c, search_new_many(c));
}

void check_pkm_search_large(struct check *c)
{
    check_search(c, search_new_large(c));
}

void check_pkm_ties(struct check *c)
{
    struct search_case k = search_new(c);
    const int64_t rows = key_rows(&k);
    const int64_t cols = key_cols(&k);
    float *const keys = check_small(c, (size_t)(rows * cols));
    const size_t n_query = (size_t)k.n * (size_t)k.shape.n_head * (size_t)k.shape.d_key;
    float *const query = check_small(c, n_query);
    switch (check_int(c, 0, 4)) {
    case 0: /* all scores are 0 */ memset(query, 0, n_query * sizeof *query); break;
    case 1: /* all keys are one key */
        for (int64_t i = cols; i < rows * cols; i++) {
            keys[i] = keys[i % cols];
        }
        break;
    case 2: /* many keys stand twice */
        for (int64_t r = 1; r < rows; r++) {
            const int64_t from = check_int(c, 0, (int)r - 1);
            memcpy(keys + r * cols, keys + from * cols, (size_t)cols * sizeof *keys);
        }
        break;
    case 3: /* all but one are so far below that their shares are subnormal, or 0 */
        memset(keys, 0, (size_t)(rows * cols) * sizeof *keys);
        for (int64_t r = 0; r < rows; r++) {
            keys[r * cols] = r % k.shape.n_key == 0 ? 0 : -0.5f * (float)check_int(c, 160, 220);
        }
        for (size_t i = 0; i < n_query; i++) {
            query[i] = 1;
        }
        break;
    default: /* small numbers meet often enough by themselves */ break;
    }
    k.query = query;
    search_keys(c, &k, tensor_make(keys, rows, cols, DTYPE_F32));
    search_compare(c, &k, true);
}

/* A query that is not a number still names slots that exist, so that reading them is safe; the
 * shares say that something broke, and the other rows do not notice. */
void check_pkm_nan(struct check *c)
{
    struct search_case k = search_new(c);
    search_keys(c, &k, check_host_tensor(c, key_rows(&k), key_cols(&k), DTYPE_F32, 0.5f));
    const int64_t width = (int64_t)k.shape.n_head * k.shape.d_key;
    float *const query = check_normal(c, (size_t)(k.n * width), 1);
    k.query = query;
    const size_t n_word = 2 * (size_t)k.n_col;
    uint32_t *const before = check_host(c, (size_t)k.n * n_word, sizeof *before);
    uint32_t *const after = check_host(c, (size_t)k.n * n_word, sizeof *after);
    search_run(c, SIDE_ONE, &k, 0, k.n, before);
    const int broken = check_int(c, 0, k.n - 1);
    for (int64_t i = 0; i < width; i++) {
        query[broken * width + i] = NAN;
    }
    search_run(c, SIDE_ONE, &k, 0, k.n, after);
    for (int r = 0; r < k.n; r++) {
        const uint32_t *const row = after + (size_t)r * n_word;
        if (r != broken) {
            check_words(c, "a row beside a NaN row", before + (size_t)r * n_word, row, 1,
                        (int64_t)n_word);
            continue;
        }
        for (int h = 0; h < k.shape.n_head; h++) {
            (void)slots_are_sound(c, &k, (const int32_t *)row + h * k.shape.k_top, r, h);
        }
        for (int j = 0; j < k.n_col; j++) {
            if (!isnan(((const float *)row + k.n_col)[j])) {
                check_fail(c, "shares[%d] of a NaN query: expected NaN, got %.9g", r,
                           (double)((const float *)row + k.n_col)[j]);
            }
        }
    }
}

/* ---- read ----------------------------------------------------------------------------------- */

enum residual { RESIDUAL_NONE, RESIDUAL_APART, RESIDUAL_Y };

struct read_case {
    int n, d, n_col;
    enum residual residual;
    const float *base;    /* [n, d] residual */
    const int32_t *slots; /* [n, n_col] */
    const float *shares;
    struct weight *values[SIDE_N];
    const struct check_redirect *redirect; /* NULL: the call has none */
};

static void read_run(struct check *c, enum side side, const void *data, int first, int n,
                     uint32_t *out)
{
    const struct read_case *const k = data;
    struct backend *const be = c->side[side];
    const float *const base = k->base + (size_t)first * (size_t)k->d;
    const size_t at = (size_t)first * (size_t)k->n_col;
    const struct tensor slots = check_in(c, side, "slots", k->slots + at, n, k->n_col, DTYPE_I32);
    const struct tensor shares =
        check_in(c, side, "shares", k->shares + at, n, k->n_col, DTYPE_F32);
    const struct tensor y = k->residual == RESIDUAL_Y
                                ? check_inout(c, side, "y = residual", base, n, k->d, DTYPE_F32)
                                : check_out(c, side, "y", n, k->d, DTYPE_F32);
    struct tensor residual = {0};
    if (k->residual == RESIDUAL_APART) {
        residual = check_in(c, side, "residual", base, n, k->d, DTYPE_F32);
    } else if (k->residual == RESIDUAL_Y) {
        residual = y;
    }
    struct pkm_redirect redirect;
    struct step *const step =
        k->redirect == NULL ? NULL : check_redirect_step(c, side, k->redirect, first, n, &redirect);
    op_pkm_read(be, y, residual, slots, shares, k->values[side], step == NULL ? NULL : &redirect);
    if (step != NULL) {
        check_finish(c, side, step);
        be->op->step_free(be, step);
    }
    check_get(c, side, y, out);
}

/* |residual| + Σ|share·value| for each element. */
static double *read_magnitude(struct check *c, const struct read_case *k,
                              const struct tensor *values)
{
    double *const magnitude = check_host(c, (size_t)k->n * (size_t)k->d, sizeof *magnitude);
    for (int r = 0; r < k->n; r++) {
        for (int i = 0; i < k->d; i++) {
            double *const m = &magnitude[r * k->d + i];
            *m = k->residual == RESIDUAL_NONE ? 0 : fabs((double)k->base[r * k->d + i]);
            for (int j = 0; j < k->n_col; j++) {
                const int32_t slot = k->slots[r * k->n_col + j];
                const float value = check_value(values, slot, i);
                *m += fabs((double)k->shares[r * k->n_col + j] *
                           (double)check_redirect_value(k->redirect, r, slot, i, value));
            }
        }
    }
    return magnitude;
}

void check_pkm_read(struct check *c)
{
    struct read_case k = {.n = check_int(c, 1, N_TOK_MAX),
                          .d = check_dim(c, 200),
                          .n_col = check_dim(c, 130),
                          .residual = (enum residual)check_int(c, RESIDUAL_NONE, RESIDUAL_Y)};
    const int n_slot = check_dim(c, 400);
    const enum dtype source = (enum dtype)check_int(c, DTYPE_F32, DTYPE_Q4);
    const struct weight_desc desc = check_slots_desc(c, source);
    const bool is_q4 = source == DTYPE_Q4; /* a byte is two columns */
    k.d += is_q4 ? k.d % 2 : 0;
    const struct tensor values = check_host_tensor(c, n_slot, is_q4 ? k.d / 2 : k.d, source, 1);
    for (int side = 0; side < SIDE_N; side++) {
        k.values[side] = check_weight(c, (enum side)side, &values, &desc);
    }
    const size_t n_hit = (size_t)k.n * (size_t)k.n_col;
    int32_t *const slots = check_host(c, n_hit, sizeof *slots);
    float *const shares = check_normal(c, n_hit, 0.3f);
    for (size_t i = 0; i < n_hit; i++) {
        slots[i] = check_chance(c, 0.1) ? n_slot - 1 : check_int(c, 0, n_slot - 1);
        shares[i] = check_chance(c, 0.1) ? 0 : shares[i];
    }
    k.slots = slots;
    k.shares = shares;
    k.base = check_normal(c, (size_t)k.n * (size_t)k.d, 1);
    k.redirect = check_chance(c, 0.7) ? check_redirect_new(c, k.n, n_slot, k.d, false) : NULL;
    static const char *const residual_name[] = {"none", "apart", "= y"};
    check_shape(c, "n_tok %d, d %d, columns %d, slots %d, %s from %s %s, residual %s%s", k.n, k.d,
                k.n_col, n_slot, dtype_name(desc.dtype), dtype_name(source),
                placement_name(desc.placement), residual_name[k.residual],
                k.redirect != NULL ? ", redirected" : "");
    const size_t n = (size_t)k.n * (size_t)k.d;
    float *const expected = check_host(c, n, sizeof *expected);
    float *const got = check_host(c, n, sizeof *got);
    read_run(c, SIDE_REF, &k, 0, k.n, (uint32_t *)expected);
    read_run(c, SIDE_ONE, &k, 0, k.n, (uint32_t *)got);
    check_values(c, "y", expected, got, k.n, k.d, TOL_READ, read_magnitude(c, &k, &values),
                 (int64_t)n);
    check_invariance(c, read_run, &k, k.n, k.d, (const uint32_t *)got);
    check_isolation(c, read_run, &k, shares, k.n_col, k.n, k.d, (const uint32_t *)got);
}
