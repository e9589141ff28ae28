/* Norms of drawn tokens that the CUDA backend computes in the product that follows, and an
 * embedding in the norm that follows: to the bits that the ops give one by one
 * (PKMSERVE_CUDA_FUSE=0), where they can be taken together and where they cannot, whatever is
 * called next. */
#include "kernels/backend.h"
#include "tests/cuda_library.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

enum { ROWS_MAX = 12, D_MAX = 2052, OUT_MAX = 300, VOCAB = 7 };

enum first { NORM, ADD_NORM, EMBED_NORM };

/* What comes after the norm. */
enum next {
    PRODUCT,
    PRODUCT_INTO_R, /* whose result takes r's place */
    PRODUCT_OF_R,   /* that does not read the norm's result */
    TWO_PRODUCTS,   /* of which the second reads it from memory */
    OTHER_OP,       /* a norm of the result */
    UPLOAD,         /* to where x is */
    NOTHING
};

struct fuse_case {
    int n_tok, d, n_out;
    enum first first;
    enum next next;
    enum dtype dtype; /* of weights and tables; F16: of weights, the tables' is F32 */
    bool into_x;      /* the norm's result takes x's place */
    bool is_request;  /* rows of a request: only an embedding is taken along */
    int gap;          /* words between rows */
    const char *op;   /* as it is named when it is fused; NULL: it is not */
};

static const struct fuse_case cases[] = {
    /* of outputs that blocks share, or warps: of two multiprocessors from 256 on; of more rows
     * apart */
    {1, 1024, 300, ADD_NORM, PRODUCT, DTYPE_BF16, false, false, 0, "add_norm_linear"},
    {1, 1024, 300, ADD_NORM, PRODUCT, DTYPE_F16, false, false, 0, "add_norm_linear"},
    {8, 1024, 300, ADD_NORM, PRODUCT, DTYPE_BF16, false, false, 4, "add_norm"},
    {5, 32, 300, ADD_NORM, PRODUCT, DTYPE_BF16, false, false, 0, "add_norm"},
    {3, 96, 180, ADD_NORM, PRODUCT, DTYPE_BF16, false, false, 0, "add_norm"},
    {2, 96, 180, ADD_NORM, PRODUCT, DTYPE_BF16, false, false, 0, "add_norm_linear"},
    {1, 96, 300, NORM, PRODUCT, DTYPE_BF16, false, false, 0, "norm_linear"},
    {1, 1024, 64, ADD_NORM, PRODUCT, DTYPE_BF16, false, false, 0, "add_norm_linear"},
    {8, 256, 60, NORM, PRODUCT, DTYPE_BF16, false, false, 0, "norm"},
    {2, 256, 60, NORM, PRODUCT, DTYPE_F16, false, false, 0, "norm_linear"},
    {2, 288, 20, ADD_NORM, PRODUCT, DTYPE_BF16, false, false, 8, "add_norm_linear"},
    /* widths that are no multiple of a block of k, and the widest */
    {2, 4, 36, NORM, PRODUCT, DTYPE_BF16, false, false, 0, "norm_linear"},
    {2, 36, 40, ADD_NORM, PRODUCT, DTYPE_BF16, false, false, 4, "add_norm_linear"},
    {2, 1060, 68, ADD_NORM, PRODUCT, DTYPE_BF16, false, false, 0, "add_norm_linear"},
    {2, 2048, 40, ADD_NORM, PRODUCT, DTYPE_BF16, false, false, 0, "add_norm_linear"},
    /* F32 weights, of not too many outputs: of two multiprocessors up to 64 */
    {1, 1024, 64, ADD_NORM, PRODUCT, DTYPE_F32, false, false, 0, "add_norm_linear"},
    {1, 1024, 16, NORM, PRODUCT, DTYPE_F32, false, false, 0, "norm_linear"},
    {1, 1024, 70, ADD_NORM, PRODUCT, DTYPE_F32, false, false, 0, "add_norm"},
    {2, 1060, 50, ADD_NORM, PRODUCT, DTYPE_F32, false, false, 0, "add_norm_linear"},
    {1, 4, 64, ADD_NORM, TWO_PRODUCTS, DTYPE_F32, false, false, 0, "add_norm_linear"},
    {2, 36, 9, NORM, PRODUCT, DTYPE_F32, false, false, 4, "norm_linear"},
    {2, 2048, 33, ADD_NORM, PRODUCT, DTYPE_F32, false, false, 0, "add_norm_linear"},
    {2, 260, 40, EMBED_NORM, PRODUCT, DTYPE_F32, true, false, 0, "embed_norm_linear"},
    {1, 256, 40, ADD_NORM, PRODUCT, DTYPE_F32, true, false, 0, NULL},
    {3, 100, 33, NORM, PRODUCT, DTYPE_F32, false, false, 4, "norm"},
    {8, 1060, 40, ADD_NORM, PRODUCT, DTYPE_F32, false, false, 0, "add_norm"},
    {6, 2048, 20, ADD_NORM, PRODUCT, DTYPE_F32, false, false, 0, "add_norm"},
    /* embeddings */
    {1, 1024, 72, EMBED_NORM, PRODUCT, DTYPE_BF16, true, false, 0, "embed_norm_linear"},
    {8, 36, 40, EMBED_NORM, PRODUCT, DTYPE_F32, true, false, 4, "embed_norm"},
    {2, 36, 40, EMBED_NORM, PRODUCT, DTYPE_F16, true, false, 4, "embed_norm_linear"},
    {5, 100, 40, EMBED_NORM, NOTHING, DTYPE_BF16, true, false, 0, "embed_norm"},
    {12, 2052, 40, EMBED_NORM, PRODUCT, DTYPE_BF16, true, false, 0, "embed_norm"},
    {12, 1100, 4, EMBED_NORM, PRODUCT, DTYPE_F32, true, true, 0, "embed_norm"},
    {2, 33, 40, EMBED_NORM, PRODUCT, DTYPE_BF16, true, true, 3, "embed_norm"},
    {3, 64, 40, EMBED_NORM, PRODUCT, DTYPE_BF16, false, false, 0, "norm"},
    {3, 64, 40, EMBED_NORM, UPLOAD, DTYPE_BF16, true, false, 0, "embed_norm"},
    /* more than one reader */
    {2, 64, 40, ADD_NORM, TWO_PRODUCTS, DTYPE_BF16, false, false, 0, "add_norm_linear"},
    /* what others would still read is in the way, or the kernels do not take it */
    {4, 64, 40, ADD_NORM, PRODUCT, DTYPE_BF16, true, false, 0, NULL},
    {4, 64, 40, ADD_NORM, PRODUCT_INTO_R, DTYPE_BF16, false, false, 0, NULL},
    {4, 64, 40, ADD_NORM, PRODUCT_OF_R, DTYPE_BF16, false, false, 0, NULL},
    {9, 64, 40, ADD_NORM, PRODUCT, DTYPE_BF16, false, false, 0, NULL},
    {2, 2052, 40, ADD_NORM, PRODUCT, DTYPE_BF16, false, false, 0, NULL},
    {1, 33, 40, NORM, PRODUCT, DTYPE_BF16, false, false, 0, NULL},
    {3, 64, 40, NORM, PRODUCT, DTYPE_BF16, false, false, 3, NULL},
    {3, 64, 40, NORM, PRODUCT, DTYPE_BF16, false, true, 0, NULL},
    /* nobody takes it along */
    {4, 64, 40, ADD_NORM, OTHER_OP, DTYPE_BF16, false, false, 0, NULL},
    {4, 64, 40, NORM, UPLOAD, DTYPE_BF16, false, false, 0, NULL},
    {4, 64, 40, ADD_NORM, NOTHING, DTYPE_BF16, false, false, 0, NULL},
};
enum { N_CASE = sizeof cases / sizeof *cases };

/* ---- a case on a backend -------------------------------------------------------------------- */

static float random_float(uint32_t *state)
{
    *state = *state * 1664525u + 1013904223u;
    return (float)(*state >> 8) * 0x1p-23f - 1;
}

enum { X, R, NORMED, Y, Y_TOO, GAMMA, BETA, BIAS, N_VIEW };

struct rig {
    struct backend *be;
    struct tensor view[N_VIEW];
    void *buffer[N_VIEW];
    struct weight *w, *w_of_r, *tok, *pos, *lang;
    struct step *step;
};

static struct weight *weight_new(struct backend *be, enum weight_kind kind, enum dtype dtype,
                                 int rows, int cols, uint32_t seed)
{
    static float host[OUT_MAX * D_MAX];
    struct weight *w = NULL;
    for (int i = 0; i < rows * cols; i++) {
        host[i] = 0.1f * random_float(&seed);
    }
    const struct tensor view = tensor_make(host, rows, cols, DTYPE_F32);
    const struct weight_desc desc = {
        .kind = kind, .dtype = dtype, .placement = PLACEMENT_DEVICE, .n_group = 1};
    assert_int_equal(be->op->weight_new(be, &w, &view, &desc, "w", NULL), ERR_OK);
    return w;
}

static void rig_open(struct rig *r, struct backend *be, const struct fuse_case *k)
{
    const int64_t cols[N_VIEW] = {k->d, k->d, k->d, k->n_out, k->n_out, k->d, k->d, k->n_out};
    static float host[ROWS_MAX * D_MAX];
    const struct step_limits limits = {
        .n_tok_max = ROWS_MAX, .n_seq_max = ROWS_MAX, .n_page_max = 1, .n_out_max = 1};
    *r = (struct rig){.be = be};
    for (int i = 0; i < N_VIEW; i++) {
        const int64_t rows = i < GAMMA ? k->n_tok : 1;
        const int64_t stride = cols[i] + k->gap;
        const size_t bytes = (size_t)(rows * stride) * sizeof *host;
        uint32_t state = (uint32_t)i + 5;
        assert_int_equal(be->op->buffer_new(be, &r->buffer[i], bytes, "test", NULL), ERR_OK);
        r->view[i] = (struct tensor){r->buffer[i], rows, cols[i], stride, DTYPE_F32};
        for (int64_t e = 0; e < rows * cols[i]; e++) {
            host[e] = random_float(&state) + (i == X ? 3 : 0);
        }
        be->op->upload(be, r->view[i], host);
    }
    if (k->into_x) {
        r->view[NORMED] = r->view[X];
    }
    r->w = weight_new(be, WEIGHT_MATRIX, k->dtype, k->n_out, k->d, 1);
    r->w_of_r =
        weight_new(be, WEIGHT_MATRIX, k->dtype, k->next == PRODUCT_INTO_R ? k->d : 1, k->d, 2);
    const enum dtype table = k->dtype == DTYPE_F16 ? DTYPE_F32 : k->dtype;
    r->tok = weight_new(be, WEIGHT_TABLE, table, VOCAB, k->d, 3);
    r->pos = weight_new(be, WEIGHT_TABLE, DTYPE_F32, ROWS_MAX, k->d, 4);
    r->lang = weight_new(be, WEIGHT_TABLE, table, VOCAB, k->d, 5);
    assert_int_equal(be->op->step_new(be, &r->step, &limits, NULL), ERR_OK);
    r->step->n_tok = k->n_tok;
    r->step->n_seq = k->is_request ? 1 : k->n_tok;
    r->step->is_drawn = !k->is_request;
    for (int i = 0; i < k->n_tok; i++) {
        r->step->token[i] = i * 3 % VOCAB;
        r->step->pos[i] = k->is_request ? i : ROWS_MAX - 1 - i;
        r->step->lang[i] = i * 2 % VOCAB;
        r->step->seq_first[i] = k->is_request ? 0 : i;
    }
    r->step->seq_first[r->step->n_seq] = k->n_tok;
}

static void rig_close(struct rig *r)
{
    struct weight *const weights[] = {r->w, r->w_of_r, r->tok, r->pos, r->lang};
    r->be->op->step_free(r->be, r->step);
    for (size_t i = 0; i < sizeof weights / sizeof *weights; i++) {
        r->be->op->weight_free(r->be, weights[i]);
    }
    for (int i = 0; i < N_VIEW; i++) {
        r->be->op->buffer_free(r->be, r->buffer[i]);
    }
}

static void call_first(struct rig *r, const struct fuse_case *k)
{
    const struct tensor *const v = r->view;
    const float eps = 1e-5f;
    if (k->first == ADD_NORM) {
        op_add_norm(r->be, v[NORMED], v[X], v[R], v[GAMMA], v[BETA], eps);
        return;
    }
    if (k->first == EMBED_NORM) {
        const bool has_lang = k->n_tok > 1;
        op_embed(r->be, v[X], r->step, r->tok, r->pos, has_lang ? r->lang : NULL);
    }
    op_norm(r->be, v[NORMED], v[X], v[GAMMA], v[BETA], eps);
}

static void call_next(struct rig *r, const struct fuse_case *k, int number)
{
    static const float zeros[ROWS_MAX * D_MAX];
    struct backend *const be = r->be;
    const struct tensor *const v = r->view;
    const struct tensor none = {0};
    const enum act act = (enum act)(number % 3);
    switch (k->next) {
    case PRODUCT:
        op_linear(be, v[Y], v[NORMED], r->w, number % 2 == 0 ? v[BIAS] : none, act);
        break;
    case PRODUCT_INTO_R: op_linear(be, v[R], v[NORMED], r->w_of_r, none, act); break;
    case PRODUCT_OF_R: op_linear(be, v[Y], v[R], r->w, v[BIAS], act); break;
    case TWO_PRODUCTS:
        op_linear(be, v[Y], v[NORMED], r->w, v[BIAS], act);
        op_linear(be, v[Y_TOO], v[NORMED], r->w, none, ACT_NONE);
        break;
    case OTHER_OP: op_rms_norm(be, v[R], none, v[NORMED], none, v[GAMMA], 1e-5f); break;
    case UPLOAD: be->op->upload(be, v[X], zeros); break;
    case NOTHING: break;
    }
}

/* All that the ops may have written. */
struct result {
    float value[Y_TOO + 1][ROWS_MAX * D_MAX];
};

/* Results must not depend on what lay in memory: y begins as other numbers than the result's. */
static void run_case(struct backend *be, const struct fuse_case *k, int number,
                     struct result *result)
{
    struct rig r;
    rig_open(&r, be, k);
    memset(result, 0, sizeof *result);
    be->op->step_begin(be, r.step);
    call_first(&r, k);
    call_next(&r, k, number);
    assert_int_equal(be->op->finish(be, r.step, NULL), ERR_OK);
    for (int i = 0; i <= Y_TOO; i++) {
        if (k->first != EMBED_NORM || i != X || k->into_x) { /* else x is whose who embeds */
            be->op->download(be, result->value[i], r.view[i]);
        }
    }
    rig_close(&r);
}

/* ---- fused and apart ------------------------------------------------------------------------- */

/* A way to run that must not change a bit. */
struct way {
    const char *fuse, *overlap, *order;
};

static struct backend *open_way(const struct way *way)
{
    struct backend *be = NULL;
    struct err err = {0};
    const struct backend_options options = {"cuda", 0, false, NULL};
    (void)setenv("PKMSERVE_CUDA_LT", "1", 1);
    (void)setenv("PKMSERVE_CUDA_FUSE", way->fuse, 1);
    (void)setenv("PKMSERVE_CUDA_OVERLAP", way->overlap, 1);
    (void)setenv("CUDA_HOST_ORDER", way->order, 1);
    (void)setenv("CUDA_HOST_LT", "g", 1);
    (void)setenv("CUDA_HOST_SMS", "2", 1); /* so that cuBLASLt is tried with few rows */
    if (!cuda_library_find()) {
        skip();
    }
    if (backend_open(&be, &options, &err) != ERR_OK) {
        fail_msg("%s", err.message);
    }
    return be;
}

static void expect_same(const struct result *apart, const struct result *fused, int number)
{
    const struct fuse_case *const k = &cases[number];
    static const char *const names[] = {"x", "r", "the normed rows", "y", "the second y"};
    for (int i = 0; i <= Y_TOO; i++) {
        for (int e = 0; e < ROWS_MAX * D_MAX; e++) {
            if (memcmp(&apart->value[i][e], &fused->value[i][e], sizeof(float)) != 0) {
                fail_msg("case %d, %d rows of %d: element %d of %s: expected %.9g as by ops apart, "
                         "got %.9g",
                         number, k->n_tok, k->d, e, names[i], (double)apart->value[i][e],
                         (double)fused->value[i][e]);
            }
        }
    }
}

/* Under a slow sanitizer every other case of narrow rows must do. */
static bool is_few(void)
{
    return getenv("TEST_FEW") != NULL;
}

static bool is_run(const struct fuse_case *k)
{
    return !is_few() || (k->d <= 100 && (k - cases) % 2 == 0);
}

static struct result *run_all(const struct way *way)
{
    struct result *const results = malloc(N_CASE * sizeof *results);
    assert_non_null(results);
    struct backend *const be = open_way(way);
    for (int i = 0; i < N_CASE; i++) {
        if (is_run(&cases[i])) {
            run_case(be, &cases[i], i, &results[i]);
        }
    }
    backend_close(be);
    return results;
}

/* Each of n ways against ops apart. */
static void check_ways(const struct way *fused, int n)
{
    struct result *const a = run_all(&(struct way){"0", "0", "forward"});
    for (int w = 0; w < n; w++) {
        struct result *const b = run_all(&fused[w]);
        for (int i = 0; i < N_CASE; i++) {
            if (is_run(&cases[i])) {
                expect_same(&a[i], &b[i], i);
            }
        }
        free(b);
    }
    free(a);
}

/* Products take norms along by weights that lie row-major, for cuBLASLt. */
static void test_ops_taken_together_have_the_bits_of_ops_apart(void **state)
{
    (void)state;
    if (is_few()) {
        skip(); /* those that overlap are the same kernels */
    }
    static const struct way fused[] = {{"1", "0", "reverse"}, {"1", "0", "random:3"}};
    check_ways(fused, 2);
}

static void test_so_they_have_where_kernels_overlap(void **state)
{
    (void)state;
    check_ways(&(struct way){"1", "1", "forward"}, 1);
}

/* Which ops a case launches, by the names that a profiler sees, each with a space before it and
 * once where it comes twice in a row. */
static void launched(const char *path, char *names, size_t size)
{
    FILE *const lines = fopen(path, "r");
    char line[600];
    char last[sizeof line] = "";
    assert_non_null(lines);
    names[0] = '\0';
    while (fgets(line, sizeof line, lines) != NULL) {
        char *at = line;
        for (int field = 0; at != NULL && field < 4; field++) {
            at = strchr(at, '\t');
            at = at == NULL ? NULL : at + 1;
        }
        char *const end = at == NULL ? NULL : strstr(at, " rows=");
        if (strncmp(line, "launch\t", 7) == 0 && end != NULL) {
            *end = '\0';
            assert_true(strlen(names) + strlen(at) + 2 < size);
            if (strcmp(at, last) != 0) {
                (void)snprintf(names + strlen(names), size - strlen(names), " %s", at);
            }
            (void)snprintf(last, sizeof last, "%s", at);
        }
    }
    (void)fclose(lines);
}

/* What is not taken along is launched as it is, before what comes next. */
static void expect_launches(const struct fuse_case *k, bool fuses, const char *names)
{
    static const char *const next[] = {" linear",   " linear", " linear", " linear",
                                       " rms_norm", "",        ""};
    static const char *const first[] = {" norm", " add_norm", " embed norm"};
    char due[100];
    const char *const op = fuses ? k->op : NULL;
    const bool takes_all = op != NULL && strstr(op, "linear") != NULL && k->next == PRODUCT;
    const bool embeds_apart = op != NULL && k->first == EMBED_NORM && strncmp(op, "embed", 5) != 0;
    (void)snprintf(due, sizeof due, "%s%s%s%s", embeds_apart ? " embed" : "", op != NULL ? " " : "",
                   op != NULL ? op : first[k->first], takes_all ? "" : next[k->next]);
    if (strcmp(names, due) != 0) {
        fail_msg("case %d: expected launches of%s, got%s", (int)(k - cases), due, names);
    }
}

static void test_what_is_taken_together(void **state)
{
    (void)state;
    if (is_few() || !cuda_library_find() ||
        strstr(getenv("PKMSERVE_CUDA_LIBRARY"), "cudahost") == NULL) {
        skip();
    }
    static struct result result;
    char path[] = "/tmp/test_cuda.XXXXXX";
    assert_int_equal(close(mkstemp(path)), 0);
    assert_int_equal(setenv("NVTX_INJECTION64_PATH", "a tool", 1), 0);
    assert_int_equal(setenv("CUDA_HOST_TRACE", path, 1), 0);
    for (int fuses = 0; fuses < 2; fuses++) {
        struct backend *const be = open_way(&(struct way){fuses != 0 ? "1" : "0", "0", "forward"});
        for (int i = 0; i < N_CASE; i++) {
            char names[300];
            assert_int_equal(truncate(path, 0), 0);
            run_case(be, &cases[i], i, &result);
            launched(path, names, sizeof names);
            expect_launches(&cases[i], fuses != 0, names);
        }
        backend_close(be);
    }
    (void)unsetenv("CUDA_HOST_TRACE");
    (void)unsetenv("NVTX_INJECTION64_PATH");
    (void)unlink(path);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_ops_taken_together_have_the_bits_of_ops_apart),
        cmocka_unit_test(test_so_they_have_where_kernels_overlap),
        cmocka_unit_test(test_what_is_taken_together),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
