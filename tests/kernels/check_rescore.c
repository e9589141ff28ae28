/* Checks of what surrounds a search with XLM's options: l2_norm and pkm_rescore; and of
 * pkm_ablate. */
#include "tests/kernels/check.h"

#include <math.h>
#include <string.h>

enum { N_TOK_MAX = 24 };

/* ---- unit norm ------------------------------------------------------------------------------ */

struct unit_case {
    int n, d, n_run; /* rows, columns of a run */
    bool in_place;
    const float *x; /* [n, n_run·d] */
};

static void unit_run(struct check *c, enum side side, const void *data, int first, int n,
                     uint32_t *out)
{
    const struct unit_case *const k = data;
    const int width = k->n_run * k->d;
    const float *const from = k->x + (size_t)first * (size_t)width;
    const struct tensor y = k->in_place ? check_inout(c, side, "y = x", from, n, width, DTYPE_F32)
                                        : check_out(c, side, "y", n, width, DTYPE_F32);
    const struct tensor x = k->in_place ? y : check_in(c, side, "x", from, n, width, DTYPE_F32);
    op_l2_norm(c->side[side], y, x, k->n_run);
    check_get(c, side, y, out);
}

void check_l2_norm(struct check *c)
{
    struct unit_case k = {.n = check_int(c, 1, N_TOK_MAX),
                          .d = check_dim(c, 200),
                          .n_run = check_int(c, 1, 9),
                          .in_place = check_chance(c, 0.5)};
    const int width = k.n_run * k.d;
    const size_t n_value = (size_t)k.n * (size_t)width;
    float *const x = check_normal(c, n_value, check_chance(c, 0.2) ? 1e-6f : 1);
    if (check_chance(c, 0.2)) { /* a run of zeros has no direction */
        memset(x, 0, (size_t)k.d * sizeof *x);
    }
    k.x = x;
    check_shape(c, "n_tok %d, runs %d, columns %d%s", k.n, k.n_run, k.d,
                k.in_place ? ", in place" : "");
    float *const expected = check_host(c, n_value, sizeof *expected);
    float *const got = check_host(c, n_value, sizeof *got);
    double *const magnitude = check_host(c, (size_t)k.n, sizeof *magnitude);
    for (int r = 0; r < k.n; r++) {
        magnitude[r] = 1;
    }
    unit_run(c, SIDE_REF, &k, 0, k.n, (uint32_t *)expected);
    unit_run(c, SIDE_ONE, &k, 0, k.n, (uint32_t *)got);
    check_values(c, "y", expected, got, k.n, width, TOL_NORM, magnitude, k.n);
    check_invariance(c, unit_run, &k, k.n, width, (const uint32_t *)got);
    check_isolation(c, unit_run, &k, x, width, k.n, width, (const uint32_t *)got);
}

/* ---- rescoring ------------------------------------------------------------------------------ */

struct rescore_case {
    struct pkm_rescore rescore;
    int n, n_col, n_pair;
    const int32_t *slots; /* [n, n_col] */
    const float *scores;  /* [n, n_col], each head's best first */
    const int32_t *map;   /* [n_head, n_pair], or NULL */
};

/* Writes slots and shares of each row, one after the other: [n, 2·n_col] words. */
static void rescore_run(struct check *c, enum side side, const void *data, int first, int n,
                        uint32_t *out)
{
    const struct rescore_case *const k = data;
    const size_t at = (size_t)first * (size_t)k->n_col;
    const struct tensor slots =
        check_inout(c, side, "slots", k->slots + at, n, k->n_col, DTYPE_I32);
    const struct tensor shares =
        check_inout(c, side, "shares", k->scores + at, n, k->n_col, DTYPE_F32);
    struct tensor map = {0};
    if (k->map != NULL) {
        map = check_in(c, side, "slot_map", k->map, k->rescore.n_head, k->n_pair, DTYPE_I32);
    }
    op_pkm_rescore(c->side[side], slots, shares, map, &k->rescore);
    check_get_hits(c, side, slots, shares, out);
}

static int32_t *random_slots(struct check *c, size_t n, int n_slot)
{
    int32_t *const slots = check_host(c, n, sizeof *slots);
    for (size_t i = 0; i < n; i++) {
        slots[i] = check_int(c, 0, n_slot - 1);
    }
    return slots;
}

/* Scores of each head in descending order. */
static float *random_scores(struct check *c, const struct rescore_case *k)
{
    float *const score = check_normal(c, (size_t)k->n * (size_t)k->n_col, 2);
    for (int64_t i = 0; i < (int64_t)k->n * k->rescore.n_head; i++) {
        float *const head = score + i * k->rescore.k_top;
        for (int j = 1; j < k->rescore.k_top; j++) {
            for (int at = j; at > 0 && head[at] > head[at - 1]; at--) {
                const float larger = head[at];
                head[at] = head[at - 1];
                head[at - 1] = larger;
            }
        }
    }
    return score;
}

static struct rescore_case rescore_new(struct check *c)
{
    struct rescore_case k = {.n = check_int(c, 1, N_TOK_MAX), .n_pair = check_dim(c, 400)};
    const int k_top = check_chance(c, 0.05) ? check_int(c, 100, 300) : check_int(c, 1, 70);
    k.rescore = (struct pkm_rescore){
        .n_head = check_int(c, 1, 5),
        .k_top = k_top,
        .n_slot = check_chance(c, 0.5) ? k.n_pair : check_int(c, 1, k.n_pair),
        .temperature = check_chance(c, 0.3) ? 1 : (float)(0.2 + 3 * check_uniform(c)),
        .softmax = check_chance(c, 0.5),
        .subtract = (enum pkm_subtract)check_int(c, PKM_SUBTRACT_NONE, PKM_SUBTRACT_MEDIAN),
        .normalize = k_top > 1 && check_chance(c, 0.5)};
    k.rescore.relu = !k.rescore.softmax && check_chance(c, 0.5);
    if (k.rescore.relu) {
        k.rescore.subtract = PKM_SUBTRACT_NONE;
        k.rescore.normalize = false;
    }
    k.n_col = k.rescore.n_head * k_top;
    k.slots = random_slots(c, (size_t)k.n * (size_t)k.n_col, k.n_pair);
    k.map = check_chance(c, 0.5)
                ? random_slots(c, (size_t)k.rescore.n_head * (size_t)k.n_pair, k.n_pair)
                : NULL;
    check_shape(
        c,
        "n_tok %d, heads %d, k_top %d, slots %d of %d, temperature %g, softmax %d, relu %d, "
        "subtract %d, normalize %d, map %d",
        k.n, k.rescore.n_head, k_top, k.rescore.n_slot, k.n_pair, (double)k.rescore.temperature,
        k.rescore.softmax, k.rescore.relu, (int)k.rescore.subtract, k.rescore.normalize,
        k.map != NULL);
    return k;
}

/* What the shares of a head round relative to: their scores, and if they are divided by the sum of
 * their magnitudes, how much of them the subtraction left. */
static double head_magnitude(const struct rescore_case *k, const float *score)
{
    const struct pkm_rescore *const r = &k->rescore;
    const double best = (double)score[0] / (double)r->temperature;
    const double last = (double)score[r->k_top - 1] / (double)r->temperature;
    const double size = 1 + fmax(fabs(best), fabs(last));
    if (!r->normalize) {
        return size;
    }
    double before[PKM_K_TOP_MAX] = {0};
    double sum = 0;
    for (int j = 0; j < r->k_top; j++) {
        const double s = (double)score[j] / (double)r->temperature;
        before[j] = r->softmax ? exp(s - best) : s;
        sum += before[j];
    }
    double less = 0;
    switch (r->subtract) {
    case PKM_SUBTRACT_NONE: break;
    case PKM_SUBTRACT_MIN: less = before[r->k_top - 1]; break;
    case PKM_SUBTRACT_MEAN: less = sum / r->k_top; break;
    case PKM_SUBTRACT_MEDIAN: less = before[r->k_top - 1 - (r->k_top - 1) / 2]; break;
    }
    double left = 0;
    for (int j = 0; j < r->k_top; j++) {
        left += fabs(before[j] - less);
    }
    return size * (1 + r->k_top * fmax(fabs(before[0]), fabs(before[r->k_top - 1])) / left);
}

void check_pkm_rescore(struct check *c)
{
    struct rescore_case k = rescore_new(c);
    float *const scores = random_scores(c, &k);
    k.scores = scores;
    const int k_top = k.rescore.k_top;
    const size_t n_word = 2 * (size_t)k.n_col;
    uint32_t *const expected = check_host(c, (size_t)k.n * n_word, sizeof *expected);
    uint32_t *const got = check_host(c, (size_t)k.n * n_word, sizeof *got);
    rescore_run(c, SIDE_REF, &k, 0, k.n, expected);
    rescore_run(c, SIDE_ONE, &k, 0, k.n, got);
    for (int r = 0; r < k.n; r++) {
        const uint32_t *const due = expected + (size_t)r * n_word;
        const uint32_t *const row = got + (size_t)r * n_word;
        check_words(c, "slots", due, row, 1, k.n_col);
        for (int h = 0; h < k.rescore.n_head; h++) {
            const int col = h * k_top;
            const double magnitude = head_magnitude(&k, scores + (size_t)r * (size_t)k.n_col + col);
            check_values(c, "shares", (const float *)due + k.n_col + col,
                         (const float *)row + k.n_col + col, 1, k_top, TOL_SHARE, &magnitude, 1);
        }
    }
    check_invariance(c, rescore_run, &k, k.n, (int)n_word, got);
    check_isolation(c, rescore_run, &k, scores, k.n_col, k.n, (int)n_word, got);
}

/* ---- knock-out ------------------------------------------------------------------------------ */

enum { N_ABLATE_MAX = 40 }; /* entries of a row's list */

struct ablate_case {
    int n, n_col;
    struct pkm_place place;
    const int32_t *slots;      /* [n, n_col] */
    const float *shares;       /* [n, n_col] */
    const int32_t *n_entry;    /* [n] */
    struct step_ablate *entry; /* [n, N_ABLATE_MAX] each row a sequence with a list of its own */
};

static void ablate_run(struct check *c, enum side side, const void *data, int first, int n,
                       uint32_t *out)
{
    const struct ablate_case *const k = data;
    struct backend *const be = c->side[side];
    const struct step_limits limits = {.n_tok_max = n,
                                       .n_seq_max = n,
                                       .n_page_max = 1,
                                       .n_out_max = 1,
                                       .n_ablate_max = n * N_ABLATE_MAX};
    struct step *step = NULL;
    CHECK(be->op->step_new(be, &step, &limits, NULL) == ERR_OK);
    step->n_tok = step->n_seq = n;
    for (int r = 0; r < n; r++) {
        step->seq_first[r + 1] = r + 1;
        for (int i = 0; i < k->n_entry[first + r]; i++) {
            step->ablate[step->n_ablate++] = k->entry[(first + r) * N_ABLATE_MAX + i];
        }
        step->ablate_first[r + 1] = step->n_ablate;
    }
    const size_t at = (size_t)first * (size_t)k->n_col;
    const struct tensor slots = check_in(c, side, "slots", k->slots + at, n, k->n_col, DTYPE_I32);
    const struct tensor shares =
        check_inout(c, side, "shares", k->shares + at, n, k->n_col, DTYPE_F32);
    be->op->step_begin(be, step);
    op_pkm_ablate(be, shares, slots, step, &k->place);
    check_finish(c, side, step);
    check_get(c, side, shares, out);
    be->op->step_free(be, step);
}

/* Ascending, distinct entries of a few memories, heads and slots; none for one row in four. */
static void random_list(struct check *c, struct ablate_case *k, int row, int n_slot, int32_t *n)
{
    struct step_ablate *const list = k->entry + (size_t)row * N_ABLATE_MAX;
    const int n_try = check_chance(c, 0.25) ? 0 : check_int(c, 1, N_ABLATE_MAX);
    for (int i = 0; i < n_try; i++) {
        const struct step_ablate entry = {check_int(c, 0, 2), check_int(c, -1, k->place.n_head),
                                          check_int(c, -1, n_slot - 1),
                                          (float)check_int(c, 0, 8) / 3};
        int at = *n;
        while (at > 0 && !step_ablate_precedes(&list[at - 1], &entry)) {
            at--;
        }
        if (at < *n && !step_ablate_precedes(&entry, &list[at])) {
            continue; /* there is one of these already */
        }
        memmove(list + at + 1, list + at, (size_t)(*n - at) * sizeof *list);
        list[at] = entry;
        (*n)++;
    }
}

void check_pkm_ablate(struct check *c)
{
    struct ablate_case k = {.n = check_int(c, 1, N_TOK_MAX),
                            .place = {.memory = check_int(c, 0, 2),
                                      .n_head = check_int(c, 1, 5),
                                      .k_top = check_int(c, 1, 40)}};
    const int n_slot = check_int(c, 1, 30);
    k.n_col = k.place.n_head * k.place.k_top;
    const size_t n_share = (size_t)k.n * (size_t)k.n_col;
    float *const shares = check_normal(c, n_share, 1);
    int32_t *const n_entry = check_host(c, (size_t)k.n, sizeof *n_entry);
    k.slots = random_slots(c, n_share, n_slot);
    k.shares = shares;
    k.n_entry = n_entry;
    k.entry = check_host(c, (size_t)k.n * N_ABLATE_MAX, sizeof *k.entry);
    for (int r = 0; r < k.n; r++) {
        random_list(c, &k, r, n_slot, &n_entry[r]);
    }
    check_shape(c, "n_tok %d, memory %d, heads %d, k_top %d, slots %d", k.n, k.place.memory,
                k.place.n_head, k.place.k_top, n_slot);
    uint32_t *const expected = check_host(c, n_share, sizeof *expected);
    uint32_t *const got = check_host(c, n_share, sizeof *got);
    ablate_run(c, SIDE_REF, &k, 0, k.n, expected);
    ablate_run(c, SIDE_ONE, &k, 0, k.n, got);
    check_words(c, "shares", expected, got, k.n, k.n_col);
    for (int r = 0; r < k.n; r++) { /* rows without a list stay as they are */
        const size_t at = (size_t)r * (size_t)k.n_col;
        if (n_entry[r] == 0) {
            check_words(c, "untouched shares", (const uint32_t *)(const void *)(shares + at),
                        got + at, 1, k.n_col);
        }
    }
    check_invariance(c, ablate_run, &k, k.n, k.n_col, got);
    check_isolation(c, ablate_run, &k, shares, k.n_col, k.n, k.n_col, got);
}
