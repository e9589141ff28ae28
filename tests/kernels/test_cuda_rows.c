/* What works row by row in the CUDA backend, where test_kernels does not look.
 *
 * Norms of any number of rows, which is what their blocks are cut by.
 *
 * Norms of rows wider than it draws: rows up to 1024 columns, up to 2048 and beyond are three
 * kernels, and each may start at 16-byte boundaries or not. A row's bits may depend on none of that
 * but its width.
 *
 * The cache's pages themselves: each element of k and v in its place, in BF16 rounded to nearest,
 * whether groups of four columns can be stored at once or not. */
#include "kernels/backend.h"
#include "tests/cuda_library.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { N_ROW = 5, D_MAX = 4100, N_WORD = N_ROW * (D_MAX + 3) + 8 };

/* What the op may write to and how its views lie. */
struct layout {
    int shift;   /* words before the first row */
    int gap;     /* words between rows */
    bool into_x; /* y is x */
};

static float random_float(uint32_t *state)
{
    *state = *state * 1664525u + 1013904223u;
    return (float)(*state >> 8) * 0x1p-23f - 1;
}

/* A view of rows rows in a buffer of its own. */
static struct tensor view_new(struct backend *be, const struct layout *l, int rows, int d,
                              const float *host)
{
    void *data = NULL;
    assert_int_equal(be->op->buffer_new(be, &data, N_WORD * sizeof(float), "test", NULL), ERR_OK);
    struct tensor view = tensor_make((float *)data + l->shift, rows, d, DTYPE_F32);
    view.stride = d + l->gap;
    be->op->upload(be, view, host);
    return view;
}

static void view_free(struct backend *be, const struct layout *l, struct tensor view)
{
    be->op->buffer_free(be, (float *)view.data - l->shift);
}

/* add_norm of two rows of numbers around 3, or norm of the first, to out[N_ROW, d]. */
static void norm(struct backend *be, const struct layout *l, int d, bool has_r, float *out)
{
    static float host[4][N_ROW * D_MAX];
    uint32_t state = 5;
    for (int t = 0; t < 4; t++) {
        for (int i = 0; i < N_ROW * d; i++) {
            host[t][i] = random_float(&state) + (t == 0 ? 3 : 0);
        }
    }
    const struct tensor x = view_new(be, l, N_ROW, d, host[0]);
    const struct tensor r = view_new(be, l, N_ROW, d, host[1]);
    const struct tensor gamma = view_new(be, l, 1, d, host[2]);
    const struct tensor beta = view_new(be, l, 1, d, host[3]);
    const struct tensor y = l->into_x ? x : view_new(be, l, N_ROW, d, host[0]);
    if (has_r) {
        op_add_norm(be, y, x, r, gamma, beta, 1e-12f);
    } else {
        op_norm(be, y, x, gamma, beta, 1e-12f);
    }
    be->op->download(be, out, y);
    const struct tensor views[] = {x, r, gamma, beta, y};
    for (size_t i = 0; i < (l->into_x ? 4 : 5); i++) {
        view_free(be, l, views[i]);
    }
}

static void test_norms_of_wide_rows(void **state)
{
    (void)state;
    if (!cuda_library_find()) {
        skip();
    }
    static const int widths[] = {1023, 1024, 1025, 1600, 2048, 2049, 2052, 4100};
    static const struct layout layouts[] = {
        {0, 0, false}, {0, 0, true}, {1, 0, false}, {4, 3, true}};
    static float expected[N_ROW * D_MAX];
    static float first[N_ROW * D_MAX];
    static float got[N_ROW * D_MAX];
    struct backend *ref = NULL;
    struct backend *cuda = NULL;
    const struct backend_options options = {"cuda", 1, false, NULL};
    assert_int_equal(ref_open(&ref, NULL), ERR_OK);
    assert_int_equal(backend_open(&cuda, &options, NULL), ERR_OK);
    for (size_t i = 0; i < 2 * sizeof widths / sizeof *widths; i++) {
        const int d = widths[i / 2];
        const bool has_r = i % 2 != 0;
        norm(ref, &layouts[0], d, has_r, expected);
        norm(cuda, &layouts[0], d, has_r, first);
        for (int at = 0; at < N_ROW * d; at++) {
            if (!(fabsf(expected[at] - first[at]) <= 1e-5f)) {
                fail_msg("d %d, %s: [%d, %d]: expected %.9g from ref, got %.9g", d,
                         has_r ? "add_norm" : "norm", at / d, at % d, (double)expected[at],
                         (double)first[at]);
            }
        }
        for (size_t l = 1; l < sizeof layouts / sizeof *layouts; l++) {
            norm(cuda, &layouts[l], d, has_r, got);
            if (memcmp(first, got, (size_t)(N_ROW * d) * sizeof *got) != 0) {
                fail_msg("d %d, %s: other bits at shift %d, gap %d%s", d,
                         has_r ? "add_norm" : "norm", layouts[l].shift, layouts[l].gap,
                         layouts[l].into_x ? ", into x" : "");
            }
        }
    }
    backend_close(ref);
    backend_close(cuda);
}

/* ---- any number of rows ---------------------------------------------------------------------- */

enum { CROWD = 300, CROWD_D_MAX = 2052, CROWD_HEADS = 3 };

enum which { NORM, ADD_NORM, RMS_NORM, HEAD_NORM, L2_NORM, N_WHICH };

/* y of x; a head norm's y is x. */
static void call(struct backend *be, enum which which, struct tensor y, struct tensor x,
                 struct tensor gamma, struct tensor beta)
{
    const struct tensor none = {0};
    switch (which) {
    case NORM: op_norm(be, y, x, gamma, beta, 1e-5F); break;
    case ADD_NORM: op_add_norm(be, y, x, x, gamma, beta, 1e-5F); break;
    case RMS_NORM: op_rms_norm(be, y, none, x, none, gamma, 1e-5F); break;
    case HEAD_NORM:
        op_head_norm(be, x, tensor_cols(gamma, 0, gamma.cols / CROWD_HEADS), CROWD_HEADS, 1e-5F);
        break;
    default: op_l2_norm(be, y, x, CROWD_HEADS); break;
    }
}

static struct tensor crowd_new(struct backend *be, int rows, int d)
{
    void *data = NULL;
    const size_t bytes = (size_t)rows * (size_t)d * sizeof(float);
    assert_int_equal(be->op->buffer_new(be, &data, bytes, "test", NULL), ERR_OK);
    return tensor_make(data, rows, d, DTYPE_F32);
}

/* 1, 2, .. 24 rows in a call are 300: a block has one of them or as many as there are warps. */
static void test_norms_of_any_number_of_rows_have_the_same_bits(void **state)
{
    (void)state;
    if (!cuda_library_find()) {
        skip();
    }
    static const int widths[] = {96, 1101, 2052};
    static float host[CROWD * CROWD_D_MAX];
    static float whole[CROWD * CROWD_D_MAX];
    static float pieces[CROWD * CROWD_D_MAX];
    const struct backend_options options = {"cuda", 1, false, NULL};
    struct backend *be = NULL;
    assert_int_equal(backend_open(&be, &options, NULL), ERR_OK);
    uint32_t seed = 11;
    for (int i = 0; i < CROWD * CROWD_D_MAX; i++) {
        host[i] = random_float(&seed);
    }
    for (int i = 0; i < 3 * N_WHICH; i++) {
        const enum which which = (enum which)(i % N_WHICH);
        const int d = widths[i / N_WHICH];
        const struct tensor x = crowd_new(be, CROWD, d);
        const struct tensor y = which == HEAD_NORM ? x : crowd_new(be, CROWD, d);
        const struct tensor gamma = crowd_new(be, 1, d);
        be->op->upload(be, x, host);
        be->op->upload(be, gamma, host + d);
        call(be, which, y, x, gamma, gamma);
        be->op->download(be, whole, y);
        be->op->upload(be, x, host);
        be->op->upload(be, y, host); /* a row that is left out is seen */
        for (int first = 0, n = 1; first < CROWD; first += n, n++) {
            call(be, which, tensor_rows(y, first, n), tensor_rows(x, first, n), gamma, gamma);
        }
        be->op->download(be, pieces, y);
        if (memcmp(whole, pieces, (size_t)(CROWD * d) * sizeof *whole) != 0) {
            fail_msg("norm %d of %d columns: other bits in pieces than in one call of %d rows",
                     (int)which, d, +CROWD);
        }
        be->op->buffer_free(be, x.data);
        be->op->buffer_free(be, gamma.data);
        if (which != HEAD_NORM) {
            be->op->buffer_free(be, y.data);
        }
    }
    backend_close(be);
}

/* ---- the cache ------------------------------------------------------------------------------ */

enum { STORE_HEAD = 3, STORE_ROW = KV_PAGE + 3, STORE_PAGE = 2, STORE_D_MAX = 3 * 12 };

/* Pages for rows of d columns that start shift elements behind a multiple of 16 bytes. */
static struct tensor pages_new(struct backend *be, enum dtype dtype, int d, int shift)
{
    struct tensor pages = {.rows = STORE_PAGE, .cols = KV_PAGE * d, .dtype = dtype};
    const size_t bytes = dtype_bytes(dtype);
    pages.stride = pages.cols + shift;
    void *data = NULL;
    assert_int_equal(be->op->buffer_new(be, &data,
                                        bytes * (size_t)(shift + STORE_PAGE * pages.stride), "test",
                                        NULL),
                     ERR_OK);
    pages.data = (char *)data + bytes * (size_t)shift;
    return pages;
}

/* Whether the element holds value: all bits of it, or what is nearest in BF16, where any NaN will
 * do. */
static bool is_stored(const void *elements, int64_t at, enum dtype dtype, float value)
{
    if (dtype == DTYPE_F32) {
        return memcmp((const float *)elements + at, &value, sizeof value) == 0;
    }
    const uint16_t bits = ((const uint16_t *)elements)[at];
    return isnan(value) ? (bits & 0x7fff) > 0x7f80 : bits == bf16_from_f32(value);
}

/* Page 1 has the first positions. */
static void check_stored(struct backend *be, struct tensor pages, const float *rows, int d,
                         int shift)
{
    static uint32_t elements[STORE_PAGE * KV_PAGE * STORE_D_MAX];
    const int d_head = d / STORE_HEAD;
    be->op->download(be, elements, pages);
    for (int pos = 0; pos < STORE_PAGE * KV_PAGE; pos++) {
        for (int c = 0; c < d; c++) {
            const int place = (c / d_head * KV_PAGE + pos % KV_PAGE) * d_head + c % d_head;
            const float value = pos < STORE_ROW ? rows[pos * d + c] : 0;
            if (!is_stored(elements, (1 - pos / KV_PAGE) * pages.cols + place, pages.dtype,
                           value)) {
                fail_msg("cache %s, heads of %d, shift %d: position %d, column %d is not %.9g",
                         dtype_name(pages.dtype), d_head, shift, pos, c, (double)value);
            }
        }
    }
    be->op->buffer_free(be, (char *)pages.data - dtype_bytes(pages.dtype) * (size_t)shift);
}

static void store(struct backend *be, enum dtype dtype, int d_head, int shift)
{
    /* halves between two neighbours, the largest number, what is tiny, and what is none */
    static const float special[] = {1 + 0x1p-8f, 1 + 0x3p-8f, -1 - 0x1.8p-8f, 0x1.fffffep127f,
                                    -0.0f,       0x1.8p-133f, INFINITY,       NAN};
    const int n_special = sizeof special / sizeof *special;
    const int d = STORE_HEAD * d_head;
    const struct layout plain = {0};
    const struct step_limits limits = {
        .n_tok_max = STORE_ROW, .n_seq_max = 1, .n_page_max = STORE_PAGE};
    float host[2][STORE_ROW * STORE_D_MAX];
    uint32_t state = 3;
    for (int i = 0; i < STORE_ROW * d; i++) {
        host[0][i] = i % 3 == 0 ? special[i / 3 % n_special] : random_float(&state);
        host[1][i] = i % 3 == 1 ? special[i / 3 % n_special] : random_float(&state);
    }
    const struct tensor k_pages = pages_new(be, dtype, d, shift);
    const struct tensor v_pages = pages_new(be, dtype, d, shift);
    const struct tensor k = view_new(be, &plain, STORE_ROW, d, host[0]);
    const struct tensor v = view_new(be, &plain, STORE_ROW, d, host[1]);
    struct step *step = NULL;
    assert_int_equal(be->op->step_new(be, &step, &limits, NULL), ERR_OK);
    step->n_seq = 1;
    step->n_tok = step->seq_first[1] = STORE_ROW;
    for (int r = 0; r < STORE_ROW; r++) {
        step->pos[r] = r;
    }
    step->page[0] = 1;
    step->page[1] = 0;
    be->op->step_begin(be, step);
    op_kv_store(be, k_pages, v_pages, k, v, step, STORE_HEAD);
    assert_int_equal(be->op->finish(be, step, NULL), ERR_OK);
    check_stored(be, k_pages, host[0], d, shift);
    check_stored(be, v_pages, host[1], d, shift);
    view_free(be, &plain, k);
    view_free(be, &plain, v);
    be->op->step_free(be, step);
}

static void test_pages_hold_what_was_stored(void **state)
{
    (void)state;
    if (!cuda_library_find()) {
        skip();
    }
    struct backend *cuda = NULL;
    const struct backend_options options = {"cuda", 1, false, NULL};
    assert_int_equal(backend_open(&cuda, &options, NULL), ERR_OK);
    for (int d_head = 2; d_head <= STORE_D_MAX / STORE_HEAD; d_head += 2) {
        for (int shift = 0; shift <= 4; shift += 2) { /* views start at any 4 bytes */
            store(cuda, DTYPE_F32, d_head, shift);
            store(cuda, DTYPE_BF16, d_head, shift);
        }
    }
    backend_close(cuda);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_norms_of_wide_rows),
        cmocka_unit_test(test_norms_of_any_number_of_rows_have_the_same_bits),
        cmocka_unit_test(test_pages_hold_what_was_stored),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
