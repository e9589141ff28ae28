/* The checker's tools: seeded data, guarded memory, comparison, reporting. See check.h. */
#include "tests/kernels/check.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- reports -------------------------------------------------------------------------------- */

void check_shape(struct check *c, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    (void)vsnprintf(c->shape, sizeof c->shape, format, args);
    va_end(args);
}

void check_fail(struct check *c, const char *format, ...)
{
    if (c->has_failed) {
        return;
    }
    c->has_failed = true;
    c->n_failed++;
    char detail[512];
    va_list args;
    va_start(args, format);
    (void)vsnprintf(detail, sizeof detail, format, args);
    va_end(args);
    char message[sizeof c->message];
    const char *const name = c->side[SIDE_ONE]->name;
    (void)snprintf(message, sizeof message,
                   "%s %s: %s\n  shape: %s\n  rerun: CHECK_BACKEND=%s CHECK_OP=%s "
                   "CHECK_CASE=0x%llx build/tests/kernels/test_kernels",
                   name, c->row->name, detail, c->shape, name, c->row->name,
                   (unsigned long long)c->seed);
    if (!c->is_quiet) {
        (void)fprintf(stderr, "%s\n", message);
    }
    if (c->message[0] == '\0') {
        memcpy(c->message, message, sizeof message);
    }
}

/* ---- random data ---------------------------------------------------------------------------- */

/* splitmix64: small, and every seed is as good as another. */
static uint64_t random_next(uint64_t *state)
{
    *state += 0x9e3779b97f4a7c15u;
    uint64_t z = *state;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

uint64_t check_random(struct check *c)
{
    return random_next(&c->rng);
}

double check_uniform(struct check *c)
{
    return (double)(check_random(c) >> 11) * 0x1p-53;
}

bool check_chance(struct check *c, double probability)
{
    return check_uniform(c) < probability;
}

int check_int(struct check *c, int first, int last)
{
    CHECK(first <= last);
    return first + (int)(check_random(c) % (uint64_t)(last - first + 1));
}

int check_many(struct check *c)
{
    return check_chance(c, 0.5) ? check_int(c, 250, 300) : check_int(c, 500, 540);
}

int check_dim(struct check *c, int max)
{
    int dim = 1;
    switch (check_int(c, 0, 3)) {
    case 0: dim = check_int(c, 1, max < 9 ? max : 9); break;
    case 1: dim = 16 * check_int(c, 1, max / 16 + 1) + check_int(c, -1, 1); break;
    case 2: dim = 64 * check_int(c, 1, max / 64 + 1) + check_int(c, -1, 1); break;
    default: dim = check_int(c, 1, max); break;
    }
    return dim < 1 ? 1 : dim > max ? max : dim;
}

void *check_host(struct check *c, size_t n, size_t elem_bytes)
{
    CHECK(c->n_host < CHECK_HOST_MAX);
    void *const data = calloc(n > 0 ? n : 1, elem_bytes);
    CHECK(data != NULL);
    c->host[c->n_host++] = data;
    return data;
}

void check_host_drop(struct check *c)
{
    CHECK(c->n_host > 0);
    free(c->host[--c->n_host]);
}

/* Sum of four uniform numbers: near enough to a normal distribution, with variance 1/3. */
static float normal_next(struct check *c, float sigma)
{
    double sum = -2;
    for (int i = 0; i < 4; i++) {
        sum += check_uniform(c);
    }
    return (float)(sum * 1.7320508 * (double)sigma);
}

float *check_normal(struct check *c, size_t n, float sigma)
{
    float *const data = check_host(c, n, sizeof *data);
    for (size_t i = 0; i < n; i++) {
        data[i] = normal_next(c, sigma);
    }
    return data;
}

float *check_small(struct check *c, size_t n)
{
    float *const data = check_host(c, n, sizeof *data);
    for (size_t i = 0; i < n; i++) {
        data[i] = 0.5f * (float)check_int(c, -2, 2);
    }
    return data;
}

/* A half-precision number of magnitude below 4, sometimes subnormal or zero. */
static uint16_t f16_next(struct check *c)
{
    const int exponent = check_chance(c, 0.05) ? 0 : check_int(c, 10, 16);
    return (uint16_t)((check_random(c) & 0x83ffu) | (uint64_t)(exponent << 10));
}

static void *element_at(const struct tensor *t, int64_t i)
{
    return (char *)t->data + (size_t)i * dtype_bytes(t->dtype);
}

static float row_scale(int64_t row)
{
    return (float)(row % 8) / 512;
}

/* Of Q4, in fp16: of either sign, subnormal, zero, one. */
static uint16_t row_scale_f16(int64_t row)
{
    static const uint16_t bits[] = {0x2c00, 0xac01, 0x0001, 0x83ff, 0x0000, 0x3c00, 0x9d55, 0x2e66};
    return bits[row % 8];
}

struct tensor check_host_tensor(struct check *c, int64_t rows, int64_t cols, enum dtype dtype,
                                float sigma)
{
    const int64_t stride = cols + (check_chance(c, 0.5) ? check_int(c, 1, 5) : 0);
    const size_t shift = (size_t)check_int(c, 0, 3);
    char *const data = check_host(c, (size_t)(rows * stride) + 1, dtype_bytes(dtype) + 2);
    const struct tensor t = {data + shift, rows, cols, stride, dtype};
    for (int64_t i = 0; i < rows * stride; i++) {
        if (dtype == DTYPE_Q4) {
            *(uint8_t *)element_at(&t, i) = (uint8_t)check_int(c, 0, 255);
            continue;
        }
        if (dtype == DTYPE_I8) {
            *(int8_t *)element_at(&t, i) = (int8_t)check_int(c, -127, 127);
            continue;
        }
        const float value = normal_next(c, sigma);
        const uint16_t half = dtype == DTYPE_BF16 ? bf16_from_f32(value) : f16_next(c);
        memcpy(element_at(&t, i), dtype == DTYPE_F32 ? (const void *)&value : (const void *)&half,
               dtype_bytes(dtype));
    }
    return t;
}

float check_value(const struct tensor *t, int64_t row, int64_t col)
{
    if (t->dtype == DTYPE_Q4) {
        const uint8_t *const codes = element_at(t, row * t->stride);
        return (float)q4_code(codes, t->cols, col) * f16_to_f32(row_scale_f16(row));
    }
    const void *const at = element_at(t, row * t->stride + col);
    if (t->dtype == DTYPE_F32) {
        float value;
        memcpy(&value, at, sizeof value);
        return value;
    }
    if (t->dtype == DTYPE_I8) {
        return (float)*(const int8_t *)at * row_scale(row);
    }
    uint16_t half;
    memcpy(&half, at, sizeof half);
    return t->dtype == DTYPE_BF16 ? bf16_to_f32(half) : f16_to_f32(half);
}

/* ---- weights -------------------------------------------------------------------------------- */

struct weight_desc check_desc(struct check *c, enum weight_kind kind, enum dtype source)
{
    struct weight_desc desc = {.kind = kind,
                               .dtype = source == DTYPE_F16 ? DTYPE_F32 : source,
                               .placement = (enum placement)check_int(c, 0, 1),
                               .n_group = 1};
    const bool has_int8 = c->side[SIDE_ONE]->has_int8;
    if (kind == WEIGHT_MATRIX) {
        enum dtype dtypes[4] = {DTYPE_F32, DTYPE_BF16};
        int last = 1;
        if (has_int8) {
            dtypes[++last] = DTYPE_I8;
        }
        if (c->side[SIDE_ONE]->has_f16) {
            dtypes[++last] = DTYPE_F16;
        }
        desc.dtype = dtypes[check_int(c, 0, last)];
        desc.is_split = desc.dtype == DTYPE_F32 && check_chance(c, 0.4);
    } else if (source == DTYPE_Q4) {
        desc.placement = (enum placement)check_int(c, PLACEMENT_DEVICE, PLACEMENT_MMAP);
    } else if (has_int8 && check_chance(c, 0.2)) {
        desc.dtype = DTYPE_I8;
    } else if (!has_int8 && source == DTYPE_I8) {
        desc.dtype = DTYPE_BF16;
    } else if (check_chance(c, 0.4)) {
        desc.placement = PLACEMENT_MMAP;
    }
    return desc;
}

struct weight_desc check_slots_desc(struct check *c, enum dtype source)
{
    struct weight_desc desc = check_desc(c, WEIGHT_TABLE, source);
    const struct backend *const be = c->side[SIDE_ONE];
    if (source == DTYPE_I8 && be->has_int8_slots && !be->has_int8) {
        desc.dtype = DTYPE_I8;
    }
    if (source == DTYPE_F16 && be->has_f16 && desc.placement != PLACEMENT_MMAP) {
        desc.dtype = DTYPE_F16;
    }
    return desc;
}

struct weight *check_weight(struct check *c, enum side side, const struct tensor *host,
                            const struct weight_desc *desc)
{
    CHECK(c->n_weight < CHECK_WEIGHT_MAX);
    struct weight *weight = NULL;
    struct err err = {0};
    struct backend *const be = c->side[side];
    struct weight_desc wanted = *desc;
    if (wanted.placement == PLACEMENT_MMAP && !be->is_host) {
        wanted.placement = PLACEMENT_HOST; /* the nearest to it: read in place, across the bus */
        wanted.dtype =
            host->dtype == DTYPE_BF16 || host->dtype == DTYPE_Q4 ? host->dtype : DTYPE_F32;
    }
    float *const scale =
        host->dtype == DTYPE_I8 ? check_host(c, (size_t)host->rows, sizeof *scale) : NULL;
    for (int64_t r = 0; scale != NULL && r < host->rows; r++) {
        scale[r] = row_scale(r);
    }
    wanted.row_scale = scale;
    uint16_t *const scale_f16 =
        host->dtype == DTYPE_Q4 ? check_host(c, (size_t)host->rows, sizeof *scale_f16) : NULL;
    for (int64_t r = 0; scale_f16 != NULL && r < host->rows; r++) {
        scale_f16[r] = row_scale_f16(r);
    }
    wanted.row_scale_f16 = scale_f16;
    const enum err_code code = be->op->weight_new(be, &weight, host, &wanted, "weight", &err);
    if (code != ERR_OK) {
        (void)fprintf(stderr, "%s: weight_new: %s\n", be->name, err.message);
        abort();
    }
    if (be->op->weight_bytes(weight) == 0) {
        check_fail(c, "weight_bytes: expected more than 0, got 0");
    }
    c->weight_side[c->n_weight] = side;
    c->weight[c->n_weight++] = weight;
    return weight;
}

struct step *check_step_rows(struct check *c, enum side side, int n)
{
    struct backend *const be = c->side[side];
    const struct step_limits limits = {
        .n_tok_max = n, .n_seq_max = n, .n_page_max = 8, .n_out_max = 1};
    struct step *step = NULL;
    CHECK(be->op->step_new(be, &step, &limits, NULL) == ERR_OK);
    step->n_tok = step->n_seq = n;
    for (int r = 0; r < n; r++) {
        step->seq_first[r + 1] = r + 1;
    }
    return step;
}

bool check_is_slow(const struct check *c)
{
    return c->is_double || c->side[SIDE_ONE]->is_host;
}

void check_finish(struct check *c, enum side side, struct step *step)
{
    struct err err = {0};
    struct backend *const be = c->side[side];
    if (be->op->finish(be, step, &err) != ERR_OK) {
        check_fail(c, "finish: expected ok, got: %s", err.message);
    }
}

/* ---- guarded memory ------------------------------------------------------------------------- */

enum { GUARD = 32 }; /* words before and after; a cache line and a register */

static uint32_t guard_word(size_t i)
{
    return 0xa5000000u ^ (uint32_t)(i * 2654435761u);
}

static bool is_inside(const struct block *b, size_t i)
{
    if (i < b->first) {
        return false;
    }
    const size_t row = (i - b->first) / (size_t)b->view.stride;
    const size_t col = (i - b->first) % (size_t)b->view.stride;
    return row < (size_t)b->view.rows && col < (size_t)b->view.cols;
}

static struct tensor block_new(struct check *c, enum side side, const char *name, const void *host,
                               int64_t rows, int64_t cols, int64_t stride, size_t shift,
                               enum dtype dtype, bool is_output)
{
    CHECK(c->n_block < CHECK_BLOCK_MAX && dtype_bytes(dtype) == 4 && rows > 0 && cols > 0);
    struct block *const b = &c->block[c->n_block++];
    b->be = c->side[side];
    b->name = name;
    b->is_output = is_output;
    b->first = GUARD + shift;
    b->n_word = b->first + (size_t)(rows * stride) + GUARD;
    b->image = malloc(b->n_word * sizeof *b->image);
    CHECK(b->image != NULL);
    struct err err = {0};
    if (b->be->op->buffer_new(b->be, &b->device, b->n_word * 4, name, &err) != ERR_OK) {
        /* What a device's failure leaves, zeros in guards, has been reported; this is why. */
        (void)fprintf(stderr, "%s: buffer_new: %s\n", b->be->name, err.message);
        abort();
    }
    b->view = (struct tensor){(uint32_t *)b->device + b->first, rows, cols, stride, dtype};
    for (size_t i = 0; i < b->n_word; i++) {
        b->image[i] = guard_word(i);
    }
    for (int64_t r = 0; r < rows; r++) {
        uint32_t *const row = b->image + b->first + r * stride;
        if (host != NULL) {
            memcpy(row, (const uint32_t *)host + r * cols, (size_t)cols * 4);
        }
        for (int64_t i = 0; i < cols && host == NULL; i++) {
            row[i] = CHECK_POISON;
        }
    }
    const struct tensor all = tensor_make(b->device, 1, (int64_t)b->n_word, dtype);
    b->be->op->upload(b->be, all, b->image);
    return b->view;
}

/* Views are as models make them, or have gaps and odd offsets: all of a case may be plain, since
 * some kernels want all of theirs so, or each is by chance. */
static struct tensor view_new(struct check *c, enum side side, const char *name, const void *host,
                              int64_t rows, int64_t cols, enum dtype dtype, bool is_output)
{
    const bool is_plain = c->is_plain || check_chance(c, 0.5);
    const int64_t stride = cols + (is_plain ? 0 : check_int(c, 0, 9));
    const size_t shift = is_plain ? 0 : (size_t)check_int(c, 0, 5);
    return block_new(c, side, name, host, rows, cols, stride, shift, dtype, is_output);
}

struct tensor check_in(struct check *c, enum side side, const char *name, const void *host,
                       int64_t rows, int64_t cols, enum dtype dtype)
{
    return view_new(c, side, name, host, rows, cols, dtype, false);
}

struct tensor check_out(struct check *c, enum side side, const char *name, int64_t rows,
                        int64_t cols, enum dtype dtype)
{
    return view_new(c, side, name, NULL, rows, cols, dtype, true);
}

struct tensor check_inout(struct check *c, enum side side, const char *name, const void *host,
                          int64_t rows, int64_t cols, enum dtype dtype)
{
    return view_new(c, side, name, host, rows, cols, dtype, true);
}

struct tensor check_pages(struct check *c, enum side side, const char *name, int64_t rows,
                          int64_t cols, enum dtype dtype)
{
    const int64_t per_word = dtype == DTYPE_BF16 ? 2 : 1;
    const int64_t n_word = cols / per_word;
    CHECK(cols % per_word == 0);
    struct tensor pages = block_new(c, side, name, NULL, rows, n_word, n_word, 0, DTYPE_F32, true);
    pages.cols = pages.stride = cols;
    pages.dtype = dtype;
    return pages;
}

void check_get(struct check *c, enum side side, struct tensor view, void *host)
{
    c->side[side]->op->download(c->side[side], host, view);
}

void check_get_hits(struct check *c, enum side side, struct tensor slots, struct tensor shares,
                    uint32_t *out)
{
    for (int64_t r = 0; r < slots.rows; r++) {
        const struct tensor slot_row = {(int32_t *)slots.data + r * slots.stride, 1, slots.cols,
                                        slots.stride, DTYPE_I32};
        const struct tensor share_row = {(float *)shares.data + r * shares.stride, 1, shares.cols,
                                         shares.stride, DTYPE_F32};
        check_get(c, side, slot_row, out + 2 * r * slots.cols);
        check_get(c, side, share_row, out + (2 * r + 1) * slots.cols);
    }
}

static void block_verify(struct check *c, const struct block *b)
{
    uint32_t *const now = malloc(b->n_word * sizeof *now);
    CHECK(now != NULL);
    const struct tensor all = tensor_make(b->device, 1, (int64_t)b->n_word, b->view.dtype);
    b->be->op->download(b->be, now, all);
    for (size_t i = 0; i < b->n_word; i++) {
        if (now[i] != b->image[i] && !(b->is_output && is_inside(b, i))) {
            check_fail(c,
                       "%s [%lld, %lld], stride %lld: %s changed at word %lld from its start: "
                       "expected 0x%08x, got 0x%08x",
                       b->name, (long long)b->view.rows, (long long)b->view.cols,
                       (long long)b->view.stride, is_inside(b, i) ? "the input" : "a guard",
                       (long long)i - (long long)b->first, b->image[i], now[i]);
            break;
        }
    }
    free(now);
}

void check_release(struct check *c, int mark)
{
    while (c->n_block > mark) {
        struct block *const b = &c->block[--c->n_block];
        block_verify(c, b);
        b->be->op->buffer_free(b->be, b->device);
        free(b->image);
    }
}

/* ---- comparison ----------------------------------------------------------------------------- */

/* Relative to a magnitude that bounds what is summed: for sums of products that is the sum of their
 * absolute values. F32 carries 6e-8; a chain of n sums loses about sqrt(n) of it. */
double check_tolerance(enum tolerance tolerance)
{
    static const double table[TOL_N] = {
        [TOL_NORM] = 2e-6,           [TOL_LINEAR_F32] = 1e-6,     [TOL_LINEAR_HALF] = 2e-6,
        [TOL_LINEAR_GELU] = 2e-6,    [TOL_LINEAR_SPLIT] = 1.6e-5, [TOL_ATTENTION] = 4e-6,
        [TOL_ATTENTION_BF16] = 4e-3, [TOL_SCORE] = 1e-6,          [TOL_SCORE_SPLIT] = 1.4e-5,
        [TOL_SHARE] = 4e-6,          [TOL_SHARE_SPLIT] = 3e-5,    [TOL_READ] = 1e-6,
        [TOL_LOGPROB] = 2e-6,        [TOL_ENTROPY] = 1e-5,
    };
    return table[tolerance];
}

bool check_close(float expected, float got, enum tolerance tolerance, double magnitude)
{
    if (isnan(expected) || isnan(got)) {
        return isnan(expected) && isnan(got);
    }
    if (isinf(expected) || isinf(got)) {
        return expected == got;
    }
    return fabs((double)expected - (double)got) <= check_tolerance(tolerance) * magnitude;
}

void check_values(struct check *c, const char *what, const float *expected, const float *got,
                  int64_t rows, int64_t cols, enum tolerance tolerance, const double *magnitude,
                  int64_t n_magnitude)
{
    for (int64_t i = 0; i < rows * cols; i++) {
        const double m = magnitude[n_magnitude == rows * cols ? i : i / cols];
        if (!check_close(expected[i], got[i], tolerance, m)) {
            check_fail(c, "%s[%lld, %lld]: expected %.9g from ref, got %.9g, allowed %.2g", what,
                       (long long)(i / cols), (long long)(i % cols), (double)expected[i],
                       (double)got[i], check_tolerance(tolerance) * m);
            return;
        }
    }
}

void check_words(struct check *c, const char *what, const void *expected, const void *got,
                 int64_t rows, int64_t cols)
{
    const uint32_t *const a = expected;
    const uint32_t *const b = got;
    for (int64_t i = 0; i < rows * cols; i++) {
        if (a[i] != b[i]) {
            float as_float[2];
            memcpy(&as_float[0], &a[i], 4);
            memcpy(&as_float[1], &b[i], 4);
            check_fail(c,
                       "%s: bits differ at [%lld, %lld]: expected 0x%08x (%.9g), got 0x%08x "
                       "(%.9g)",
                       what, (long long)(i / cols), (long long)(i % cols), a[i],
                       (double)as_float[0], b[i], (double)as_float[1]);
            return;
        }
    }
}

void check_invariance(struct check *c, check_rows_fn *run, const void *data, int n_row, int n_word,
                      const uint32_t *whole)
{
    uint32_t *const out = check_host(c, (size_t)n_row * (size_t)n_word, sizeof *out);
    const int mark = c->n_block;
    run(c, SIDE_MANY, data, 0, n_row, out);
    check_release(c, mark);
    check_words(c, "several threads against one", whole, out, n_row, n_word);
    for (int r = 0; r < n_row; r++) {
        run(c, SIDE_ONE, data, r, 1, out + (size_t)r * (size_t)n_word);
        check_release(c, mark);
    }
    check_words(c, "rows alone against all at once", whole, out, n_row, n_word);
    for (int r = 0; r < n_row;) {
        const int n = check_int(c, 1, n_row - r);
        run(c, SIDE_MANY, data, r, n, out + (size_t)r * (size_t)n_word);
        check_release(c, mark);
        r += n;
    }
    check_words(c, "rows in chunks against all at once", whole, out, n_row, n_word);
}

void check_isolation(struct check *c, check_rows_fn *run, const void *data, float *input,
                     int n_input, int n_row, int n_word, const uint32_t *whole)
{
    uint32_t *const out = check_host(c, (size_t)n_row * (size_t)n_word, sizeof *out);
    const int broken = check_int(c, 0, n_row - 1);
    for (int i = 0; i < n_input; i++) {
        input[broken * n_input + i] = NAN;
    }
    run(c, SIDE_ONE, data, 0, n_row, out);
    for (int r = 0; r < n_row; r++) {
        const size_t at = (size_t)r * (size_t)n_word;
        if (r != broken) {
            check_words(c, "a row beside a NaN row", whole + at, out + at, 1, n_word);
        }
    }
}

/* ---- running -------------------------------------------------------------------------------- */

enum { REOPEN = 4 }; /* opening takes as long as a small case */

void check_run_case(struct check *c, const struct check_row *row, uint64_t seed)
{
    c->row = row;
    c->seed = seed;
    c->rng = seed;
    c->shape[0] = '\0';
    c->has_failed = false;
    c->is_plain = check_chance(c, 0.4);
    c->n_case++;
    if (c->reopen != NULL && seed % REOPEN == 0) {
        c->reopen(c, c->subject);
    }
    row->run(c);
    check_release(c, 0);
    for (; c->n_weight > 0; c->n_weight--) {
        struct backend *const be = c->side[c->weight_side[c->n_weight - 1]];
        be->op->weight_free(be, c->weight[c->n_weight - 1]);
    }
    for (; c->n_host > 0; c->n_host--) {
        free(c->host[c->n_host - 1]);
    }
}

void check_run(struct check *c, const char *only, uint64_t seed, int percent)
{
    for (const struct check_row *row = check_rows; row->name != NULL; row++) {
        if (only == NULL ? row->is_host && c->is_double : strcmp(only, row->name) != 0) {
            continue;
        }
        uint64_t state = seed;
        for (const char *s = row->name; *s != '\0'; s++) {
            state = state * 31 + (uint64_t)*s;
        }
        const int n_case = row->n_case * percent / 100;
        for (int i = 0; i < (n_case < 1 ? 1 : n_case); i++) {
            check_run_case(c, row, random_next(&state));
        }
    }
}
