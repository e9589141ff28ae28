/* The CUDA backend's norms for rows wider than test_kernels draws: rows up to 1024 columns, up to
 * 2048 and beyond are three kernels, and each may start at 16-byte boundaries or not. A row's bits
 * may depend on none of that but its width. */
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
        be->op->add_norm(be, y, x, r, gamma, beta, 1e-12f);
    } else {
        be->op->norm(be, y, x, gamma, beta, 1e-12f);
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
    const struct backend_options options = {"cuda", 1, false};
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

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_norms_of_wide_rows)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
