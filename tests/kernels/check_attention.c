/* Checks kv_store and attention, or span_attention, together, as a model uses them: in steps that
 * append some rows of some sequences to the cache and attend over it.
 *
 * With spans the pages of a sequence are a ring, as small as the steps of the run allow: a run
 * token by token goes round it several times and must give the bits of one that never does.
 *
 * The order inside a page is the backend's own, so what is compared is what attention makes of it.
 * Every run lays the sequences on other pages, and the cache is full of NaN before: what a page's
 * former user left behind must not be seen. */
#include "tests/kernels/check.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SEQ_MAX = 256, SEQ_FEW = 4, POS_SHORT = 300, POS_MAX = 5000, SPARE_PAGES = 3 };
enum { PAGE_SHORT = POS_SHORT / KV_PAGE + 1 };

struct attention_case {
    int n_seq, n_head, d;
    int n_share, d_kv; /* heads of queries that read one of keys and values, columns of these */
    enum dtype cache;  /* F32 or BF16 */
    float scale;
    int n_pos[SEQ_MAX]; /* rows of each sequence */
    int n_old[SEQ_MAX]; /* of them, those that are only stored; their y stays 0 */
    bool is_prompts;    /* many sequences of many rows: not token by token */
    int first[SEQ_MAX]; /* its first row in q, k, v and y */
    int n_row;
    float *q, *k, *v;       /* [n_row, d], [n_row, d_kv] */
    struct span_shape span; /* views of host arrays; n_head 0: plain attention */
};

/* How a run cuts the work into steps. */
struct plan {
    int chunk_max;    /* rows of a sequence in a step: drawn from 1 .. chunk_max */
    int n_seq_max;    /* sequences in a step, one such group after the other; 0: all */
    bool is_requests; /* no step is one of drawn tokens */
};

/* The memory of one run. */
struct cache {
    struct tensor k_pages, v_pages;
    int32_t *page; /* [n_seq, n_page_max]; dropped by run_plan */
    int n_page, n_page_max;
};

/* Most pages of a sequence. */
static int page_limit(const struct attention_case *a)
{
    int most = PAGE_SHORT;
    for (int s = 0; s < a->n_seq; s++) {
        const int n = (a->n_pos[s] + KV_PAGE - 1) / KV_PAGE;
        most = n > most ? n : most;
    }
    return most;
}

/* Pages that a sequence gets. */
static int pages_of(const struct attention_case *a, const struct cache *cache, int s)
{
    const int n = (a->n_pos[s] + KV_PAGE - 1) / KV_PAGE;
    return n < cache->n_page_max ? n : cache->n_page_max;
}

static struct cache cache_new(struct check *c, enum side side, const struct attention_case *a,
                              const struct plan *plan)
{
    const int ring = (a->span.window + plan->chunk_max + KV_PAGE - 1) / KV_PAGE;
    const int limit = page_limit(a);
    struct cache cache = {.n_page_max = a->span.window > 0 && ring < limit ? ring : limit};
    int n_used = 0;
    cache.page = check_host(c, (size_t)a->n_seq * (size_t)cache.n_page_max, sizeof *cache.page);
    for (int s = 0; s < a->n_seq; s++) {
        n_used += pages_of(a, &cache, s);
    }
    cache.n_page = n_used + SPARE_PAGES;
    int32_t *const free_page = check_host(c, (size_t)cache.n_page, sizeof *free_page);
    for (int i = 0; i < cache.n_page; i++) {
        const int j = check_int(c, 0, i); /* shuffles as it fills */
        free_page[i] = free_page[j];
        free_page[j] = i;
    }
    int taken = 0;
    for (int s = 0; s < a->n_seq; s++) {
        for (int i = 0; i < pages_of(a, &cache, s); i++) {
            cache.page[s * cache.n_page_max + i] = free_page[taken++];
        }
    }
    check_host_drop(c);
    cache.k_pages =
        check_pages(c, side, "k_pages", cache.n_page, (int64_t)KV_PAGE * a->d_kv, a->cache);
    cache.v_pages =
        check_pages(c, side, "v_pages", cache.n_page, (int64_t)KV_PAGE * a->d_kv, a->cache);
    return cache;
}

static struct tensor table_on(struct check *c, enum side side, const char *name, struct tensor t)
{
    return t.data == NULL ? t : check_in(c, side, name, t.data, t.rows, t.cols, DTYPE_F32);
}

/* The same, with its tables in the side's memory. */
static struct span_shape span_on(struct check *c, enum side side, const struct span_shape *host)
{
    struct span_shape span = *host;
    span.position = table_on(c, side, "position", host->position);
    span.mask = table_on(c, side, "mask", host->mask);
    span.key = table_on(c, side, "key", host->key);
    span.value = table_on(c, side, "value", host->value);
    return span;
}

/* Appends n[s] rows to each sequence that has n[s] > 0, from done[s] on; writes their y to out, or
 * with out NULL only stores them. */
static void run_step(struct check *c, enum side side, const struct attention_case *a,
                     const struct cache *cache, struct step *step, const int *done, const int *n,
                     bool is_requests, float *out)
{
    struct backend *const be = c->side[side];
    const size_t row_bytes = (size_t)a->d * sizeof(float);
    const size_t n_word = (size_t)a->n_row * (size_t)a->d;
    float *const rows[3] = {check_host(c, n_word, sizeof(float)),
                            check_host(c, n_word, sizeof(float)),
                            check_host(c, n_word, sizeof(float))};
    const float *const source[3] = {a->q, a->k, a->v};
    const size_t width[3] = {(size_t)a->d, (size_t)a->d_kv, (size_t)a->d_kv};
    int32_t *const to = check_host(c, (size_t)a->n_row, sizeof *to);
    step->n_tok = step->n_seq = 0;
    for (int s = 0; s < a->n_seq; s++) {
        if (n[s] == 0) {
            continue;
        }
        memcpy(step->page + step->n_seq * cache->n_page_max, cache->page + s * cache->n_page_max,
               sizeof *cache->page * (size_t)pages_of(a, cache, s));
        for (int i = 0; i < n[s]; i++) {
            const int row = a->first[s] + done[s] + i;
            for (int t = 0; t < 3; t++) {
                memcpy(rows[t] + (size_t)step->n_tok * width[t], source[t] + (size_t)row * width[t],
                       width[t] * sizeof(float));
            }
            to[step->n_tok] = row;
            step->pos[step->n_tok++] = done[s] + i;
        }
        step->seq_first[++step->n_seq] = step->n_tok;
    }
    const int mark = c->n_block;
    const struct tensor q = check_in(c, side, "q", rows[0], step->n_tok, a->d, DTYPE_F32);
    const struct tensor k = check_in(c, side, "k", rows[1], step->n_tok, a->d_kv, DTYPE_F32);
    const struct tensor v = check_in(c, side, "v", rows[2], step->n_tok, a->d_kv, DTYPE_F32);
    const struct tensor y = check_out(c, side, "y", step->n_tok, a->d, DTYPE_F32);
    step->is_drawn = !is_requests && be->phases_apart && step->n_tok == step->n_seq;
    be->op->step_begin(be, step);
    /* One op, or two. */
    const bool is_joint = out != NULL && a->span.n_head == 0 && step->n_tok % 4 != 0;
    if (!is_joint) {
        op_kv_store(be, cache->k_pages, cache->v_pages, k, v, step, a->n_head / a->n_share);
    }
    if (out == NULL) {
        CHECK(!step->is_drawn);
    } else if (a->span.n_head > 0) {
        const struct span_shape span = span_on(c, side, &a->span);
        op_span_attention(be, y, q, cache->k_pages, cache->v_pages, step, &span);
    } else {
        const struct tensor none = {0};
        op_attention(be, y, q, cache->k_pages, cache->v_pages, is_joint ? k : none,
                     is_joint ? v : none, step, a->n_head, a->scale);
    }
    check_finish(c, side, step);
    if (out != NULL) {
        check_get(c, side, y, rows[0]);
    }
    for (int r = 0; out != NULL && r < step->n_tok; r++) {
        memcpy(out + (size_t)to[r] * (size_t)a->d, rows[0] + (size_t)r * (size_t)a->d, row_bytes);
    }
    check_release(c, mark);
    for (int i = 0; i < 4; i++) { /* to and rows */
        check_host_drop(c);
    }
}

/* Pages that no sequence owns still hold what they were made with. */
static void verify_spare_pages(struct check *c, enum side side, const struct attention_case *a,
                               const struct cache *cache)
{
    const size_t page_words = (size_t)KV_PAGE * (size_t)a->d_kv / (a->cache == DTYPE_BF16 ? 2 : 1);
    uint32_t *const words = check_host(c, page_words * (size_t)cache->n_page, sizeof *words);
    bool *const is_used = check_host(c, (size_t)cache->n_page, sizeof *is_used);
    for (int s = 0; s < a->n_seq; s++) {
        for (int i = 0; i < pages_of(a, cache, s); i++) {
            is_used[cache->page[s * cache->n_page_max + i]] = true;
        }
    }
    const struct tensor *const tensors[2] = {&cache->k_pages, &cache->v_pages};
    for (int t = 0; t < 2; t++) {
        check_get(c, side, *tensors[t], words);
        for (size_t i = 0; i < page_words * (size_t)cache->n_page; i++) {
            if (!is_used[i / page_words] && words[i] != CHECK_POISON) {
                check_fail(c, "kv_store wrote to page %d of %s, which no sequence owns",
                           (int)(i / page_words), t == 0 ? "k" : "v");
                break;
            }
        }
    }
    check_host_drop(c);
    check_host_drop(c);
}

/* Of each sequence by itself. */
static void store_old(struct check *c, enum side side, const struct attention_case *a,
                      const struct cache *cache, struct step *step)
{
    static const int none[SEQ_MAX] = {0};
    for (int s = 0; s < a->n_seq; s++) {
        int n[SEQ_MAX] = {0};
        n[s] = a->n_old[s];
        if (n[s] > 0) {
            run_step(c, side, a, cache, step, none, n, true, NULL);
        }
    }
}

static void run_plan(struct check *c, enum side side, const struct attention_case *a,
                     const struct plan *plan, float *out)
{
    const int mark = c->n_block;
    struct backend *const be = c->side[side];
    const struct cache cache = cache_new(c, side, a, plan);
    const struct step_limits limits = {.n_tok_max = a->n_row,
                                       .n_seq_max = a->n_seq,
                                       .n_page_max = cache.n_page_max,
                                       .n_out_max = 1,
                                       .d_model = a->d,
                                       .n_head = a->n_head,
                                       .n_span_max = a->span.window + a->span.n_persistent};
    struct step *step = NULL;
    CHECK(be->op->step_new(be, &step, &limits, NULL) == ERR_OK);
    store_old(c, side, a, &cache, step);
    int done[SEQ_MAX];
    int n_done = 0;
    for (int s = 0; s < SEQ_MAX; s++) {
        done[s] = a->n_old[s];
        n_done += done[s];
    }
    while (n_done < a->n_row) {
        int n[SEQ_MAX] = {0};
        int n_step = 0;
        int n_seq = 0;
        for (int s = 0; s < a->n_seq; s++) {
            const int left = a->n_pos[s] - done[s];
            if (left == 0 || (plan->n_seq_max > 0 && n_seq == plan->n_seq_max) ||
                (n_step > 0 && plan->chunk_max < POS_MAX && check_chance(c, 0.3))) {
                continue;
            }
            n[s] = plan->chunk_max < left ? check_int(c, 1, plan->chunk_max) : left;
            n_step += n[s];
            n_seq++;
        }
        run_step(c, side, a, &cache, step, done, n, plan->is_requests, out);
        for (int s = 0; s < a->n_seq; s++) {
            done[s] += n[s];
        }
        n_done += n_step;
    }
    verify_spare_pages(c, side, a, &cache);
    be->op->step_free(be, step);
    check_release(c, mark);
    check_host_drop(c); /* its pages */
}

static void length_short(struct check *c, struct attention_case *a, int s)
{
    a->n_pos[s] = check_chance(c, 0.2)    ? check_int(c, 1, 3)
                  : check_chance(c, 0.3)  ? KV_PAGE * check_int(c, 1, 3) + check_int(c, -1, 1)
                  : check_chance(c, 0.05) ? check_int(c, 71, POS_SHORT)
                                          : check_int(c, 1, 70);
}

/* A few rows behind a text that a device shares out among blocks. */
static void length_long(struct check *c, struct attention_case *a, int s)
{
    const int most = check_is_slow(c) ? 700 : POS_MAX;
    const int n_new = check_int(c, 1, 4);
    a->n_old[s] = check_chance(c, 0.3) ? check_int(c, 0, 40) : check_int(c, 256, most - n_new);
    a->n_pos[s] = a->n_old[s] + n_new;
}

/* So many rows and heads that a device of any size has work for all of it: drawn tokens behind
 * texts, or prompts. */
static void length_many(struct check *c, struct attention_case *a, int s)
{
    const int n_new = a->is_prompts ? check_int(c, 60, 90) : check_int(c, 1, 2);
    a->n_old[s] = a->is_prompts ? 0 : check_int(c, 0, 70);
    a->n_pos[s] = a->n_old[s] + n_new;
}

/* Columns of a head. */
static int width_of(struct check *c, bool is_matrix)
{
    if (is_matrix) {
        return check_chance(c, 0.5) ? 16 * check_int(c, 1, 8) : 4 * check_int(c, 1, 32);
    }
    return check_chance(c, 0.1) ? check_int(c, 129, 256) : check_dim(c, 80);
}

/* Of all widths that have kernels of their own, as many. */
static int width_of_many(struct check *c, bool is_matrix)
{
    const int most[] = {64, 128, 256};
    const int i = check_int(c, 0, 2);
    const int d = check_int(c, i == 0 ? 1 : most[i - 1] + 1, most[i]);
    return is_matrix ? (d + 3) / 4 * 4 : d;
}

/* is_shared: heads may share keys and values. is_matrix: the cache is BF16, and heads are of 16
 * columns or a multiple, or of 4 and a multiple, as matrix units want them. */
static struct attention_case case_new(struct check *c, bool is_shared, bool is_matrix,
                                      void (*length)(struct check *, struct attention_case *, int))
{
    const bool is_many = length == length_many;
    struct attention_case a = {
        .n_seq = check_int(c, 1, SEQ_FEW),
        .n_share = is_shared && check_chance(c, 0.4) ? check_int(c, 2, 3) : 1,
        .is_prompts = is_many && check_chance(c, 0.4),
    };
    const int d_head = is_many ? width_of_many(c, is_matrix) : width_of(c, is_matrix);
    a.n_head = a.n_share * check_int(c, 1, a.n_share > 1 ? 3 : 5);
    if (is_many) {
        a.n_seq = a.is_prompts ? check_int(c, 55, 65) : check_int(c, 40, SEQ_MAX);
        a.n_seq /= c->is_double ? 20 : check_is_slow(c) ? 8 : 1;
        a.n_head = a.n_share * (c->is_double ? 1 : a.is_prompts ? 5 : check_int(c, 1, 4));
    }
    a.d = a.n_head * d_head;
    a.d_kv = a.d / a.n_share;
    a.scale = 1 / sqrtf((float)d_head);
    char lengths[64] = "";
    for (int s = 0; s < a.n_seq; s++) {
        length(c, &a, s);
        a.first[s] = a.n_row;
        a.n_row += a.n_pos[s];
        const size_t used = strlen(lengths);
        (void)snprintf(lengths + used, sizeof lengths - used, " %d", a.n_pos[s]); /* the first */
    }
    a.cache = is_matrix || (d_head % 2 == 0 && check_chance(c, 0.5)) ? DTYPE_BF16 : DTYPE_F32;
    check_shape(c, "heads %d, %d of them share, d_head %d, cache %s, sequence lengths%s", a.n_head,
                a.n_share, d_head, dtype_name(a.cache), lengths);
    const size_t n = (size_t)a.n_row * (size_t)a.d;
    const size_t n_kv = (size_t)a.n_row * (size_t)a.d_kv;
    /* sharp softmaxes as well as flat ones */
    a.q = check_normal(c, n, check_chance(c, 0.3) ? 8 : 1);
    a.k = check_normal(c, n_kv, 1);
    a.v = check_normal(c, n_kv, 1);
    return a;
}

/* Errors of a score, relative to Σ|q·k|·scale, are errors of the share's exponent. */
static void magnitudes(const struct attention_case *a, double *magnitude)
{
    const int d_head = a->d / a->n_head;
    for (int s = 0; s < a->n_seq; s++) {
        double max_k = 0;
        for (int i = 0; i < a->n_pos[s] * a->d_kv; i++) {
            max_k = fmax(max_k, fabs((double)a->k[a->first[s] * a->d_kv + i]));
        }
        for (int r = a->first[s]; r < a->first[s] + a->n_pos[s]; r++) {
            double max_q = 0;
            for (int i = 0; i < a->d; i++) {
                max_q = fmax(max_q, fabs((double)a->q[r * a->d + i]));
            }
            /* values are within 4; random signs make an error of sqrt(d_head) products */
            magnitude[r] = 4 * (1 + max_q * max_k * sqrt(d_head) * (double)a->scale) *
                           (a->span.n_head > 0 ? 3 : 1); /* keys are sums of two */
        }
    }
}

/* Whether drawn tokens have an arithmetic other than that of rows of requests: kernels/cuda's
 * attention_drawn.cu. */
static bool is_apart(const struct check *c, const struct attention_case *a)
{
    return strcmp(c->side[SIDE_ONE]->name, "cuda") == 0 && a->span.n_head == 0;
}

/* Drawn tokens by themselves: ref's values, which are expected, and the same bits alone, or of many
 * sequences a few at a time. */
static void verify_drawn(struct check *c, const struct attention_case *a, const float *expected,
                         const double *magnitude, float *got, float *other)
{
    const struct plan together = {.chunk_max = 1};
    const struct plan alone = {.chunk_max = 1, .n_seq_max = a->n_seq > SEQ_FEW ? 9 : 1};
    run_plan(c, SIDE_ONE, a, &together, got);
    check_values(c, "y of drawn tokens", expected, got, a->n_row, a->d,
                 a->cache == DTYPE_BF16 ? TOL_ATTENTION_BF16 : TOL_ATTENTION, magnitude, a->n_row);
    run_plan(c, SIDE_MANY, a, &alone, other);
    check_words(c, "drawn tokens alone against together", got, other, a->n_row, a->d);
}

/* NaN from some position of a sequence on: earlier rows, and the other sequences, do not notice. */
static void verify_isolation(struct check *c, struct attention_case *a, const float *whole,
                             float *out)
{
    const int s = check_int(c, 0, a->n_seq - 1);
    const int broken = a->first[s] + check_int(c, 0, a->n_pos[s] - 1);
    const int end = a->first[s] + a->n_pos[s];
    for (int i = broken * a->d; i < end * a->d; i++) {
        a->q[i] = NAN;
    }
    for (int i = broken * a->d_kv; i < end * a->d_kv; i++) {
        a->k[i] = a->v[i] = NAN;
    }
    const struct plan plan = {POS_MAX, 0, is_apart(c, a)};
    run_plan(c, SIDE_ONE, a, &plan, out);
    for (int r = 0; r < a->n_row; r++) {
        if (r < broken || r >= a->first[s] + a->n_pos[s]) {
            const int at = r * a->d;
            check_words(c, "a row before or beside NaN rows", whole + at, out + at, 1, a->d);
        }
    }
}

static struct tensor table_new(struct check *c, int64_t rows, int64_t cols)
{
    return tensor_make(rows * cols == 0 ? NULL : check_normal(c, (size_t)(rows * cols), 1), rows,
                       cols, DTYPE_F32);
}

/* Spans as a model has them: 1, then a ramp down to 0, of any length for each head. */
static void fill_mask(struct check *c, struct tensor mask)
{
    for (int64_t h = 0; h < mask.rows; h++) {
        const double ramp = 1 + check_uniform(c) * 40;
        const double span = check_uniform(c) * (double)mask.cols;
        for (int64_t i = 0; i < mask.cols; i++) {
            const double share = (span + 1 - (double)(mask.cols - i)) / ramp + 1;
            ((float *)mask.data)[h * mask.cols + i] = (float)fmax(0, fmin(1, share));
        }
    }
}

static void verify(struct check *c, struct attention_case a)
{
    const size_t n = (size_t)a.n_row * (size_t)a.d;
    float *const expected = check_host(c, n, sizeof *expected);
    float *const got = check_host(c, n, sizeof *got);
    float *const other = check_host(c, n, sizeof *other);
    double *const magnitude = check_host(c, (size_t)a.n_row, sizeof *magnitude);
    magnitudes(&a, magnitude);
    const bool apart = is_apart(c, &a);
    const struct plan whole = {POS_MAX, 0, apart};
    run_plan(c, SIDE_REF, &a, &whole, expected);
    run_plan(c, SIDE_ONE, &a, &whole, got);
    const bool is_rounded = a.cache == DTYPE_BF16 && a.span.n_head == 0;
    check_values(c, "y", expected, got, a.n_row, a.d,
                 is_rounded ? TOL_ATTENTION_BF16 : TOL_ATTENTION, magnitude, a.n_row);
    static const struct {
        const char *what;
        enum side side;
        struct plan plan;
    } runs[] = {
        {"several threads against one", SIDE_MANY, {POS_MAX, 0, false}},
        {"sequences alone against together", SIDE_ONE, {POS_MAX, 1, false}},
        {"prompts in chunks against whole", SIDE_MANY, {19, 0, false}},
        {"token by token against whole", SIDE_ONE, {1, 0, false}},
    };
    for (size_t i = 0; i < (a.is_prompts ? 3 : sizeof runs / sizeof *runs); i++) {
        struct plan plan = runs[i].plan;
        plan.is_requests = apart;
        plan.n_seq_max *= a.n_seq > SEQ_FEW ? 9 : 1;
        run_plan(c, runs[i].side, &a, &plan, other);
        check_words(c, runs[i].what, got, other, a.n_row, a.d);
    }
    if (apart && !a.is_prompts) {
        float *const drawn = check_host(c, n, sizeof *drawn);
        verify_drawn(c, &a, expected, magnitude, drawn, other);
        check_host_drop(c);
    }
    verify_isolation(c, &a, got, other);
}

void check_attention(struct check *c)
{
    verify(c, case_new(c, true, false, length_short));
}

void check_attention_bf16(struct check *c)
{
    verify(c, case_new(c, true, true, length_short));
}

void check_attention_long(struct check *c)
{
    verify(c, case_new(c, true, check_chance(c, 0.5), length_long));
}

void check_attention_many(struct check *c)
{
    verify(c, case_new(c, true, check_chance(c, 0.6), length_many));
}

void check_span_attention(struct check *c)
{
    struct attention_case a = case_new(c, false, false, length_short);
    const int64_t d_head = a.d / a.n_head;
    struct span_shape *const span = &a.span;
    span->n_head = a.n_head;
    span->scale = a.scale;
    span->window = check_chance(c, 0.3) ? KV_PAGE * check_int(c, 1, 3) : check_int(c, 1, 150);
    span->n_persistent = check_chance(c, 0.4) ? 0 : check_dim(c, 150);
    if (check_chance(c, 0.15)) { /* persistent keys alone */
        span->window = 0;
        span->n_persistent = check_dim(c, 150);
    }
    check_shape(c, "heads %d, d_head %d, cache %s, window %d, %d persistent, %d rows", a.n_head,
                (int)d_head, dtype_name(a.cache), span->window, span->n_persistent, a.n_row);
    span->position = table_new(c, d_head, span->window);
    span->key = table_new(c, a.d, span->n_persistent);
    span->value = table_new(c, (int64_t)a.n_head * span->n_persistent, d_head);
    if (span->window > 0 && check_chance(c, 0.6)) {
        span->mask = table_new(c, a.n_head, span->window);
        fill_mask(c, span->mask);
    }
    verify(c, a);
}
