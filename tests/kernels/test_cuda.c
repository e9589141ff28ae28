/* The CUDA backend around its kernels: what it says when it cannot be opened or runs out of memory,
 * failures that stay, weights in all places, ops outside of steps. On the test double, whose
 * environment injects the failures (tests/cuda_host/README.md); on a GPU's library those tests are
 * skipped. The ops themselves are test_kernels's. */
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

static const char *const variables[] = {
    "CUDA_HOST_DRIVER",      "CUDA_HOST_SM",          "CUDA_HOST_MEMORY",
    "CUDA_HOST_FAIL_SYNC",   "CUDA_HOST_FAIL_MALLOC", "CUDA_HOST_FAIL_HOST_ALLOC",
    "CUDA_HOST_FAIL_LAUNCH", "CUDA_VISIBLE_DEVICES",  "CUDA_HOST_ORDER",
    "CUDA_HOST_CODE",        "CUDA_HOST_TRACE",       "PKMSERVE_CUDA_TRACE",
    "NVTX_INJECTION64_PATH", "PKMSERVE_CUDA_SPLIT",   "PKMSERVE_CUDA_ATTENTION",
    "PKMSERVE_CUDA_DRAWN",   "PKMSERVE_CUDA_FLAT",
};

/* Each test begins with a fine device, and is skipped without a library. */
static int fine_device(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof variables / sizeof *variables; i++) {
        (void)unsetenv(variables[i]);
    }
    return 0;
}

static bool is_double(void)
{
    return cuda_library_find() && strstr(getenv("PKMSERVE_CUDA_LIBRARY"), "cudahost") != NULL;
}

static void need_library(void)
{
    if (!cuda_library_find()) {
        skip();
    }
}

static void need_double(const char *name, const char *value)
{
    if (!is_double()) {
        skip();
    }
    assert_int_equal(setenv(name, value, 1), 0);
}

static enum err_code cuda_open(struct backend **be, bool fast_math, struct err *err)
{
    const struct backend_options options = {"cuda", 0, fast_math, NULL};
    return backend_open(be, &options, err);
}

static struct backend *fine_open(void)
{
    struct backend *be = NULL;
    struct err err = {0};
    if (cuda_open(&be, false, &err) != ERR_OK) {
        fail_msg("open: %s", err.message);
    }
    return be;
}

static void expect_words(const struct err *err, const char *words)
{
    if (strstr(err->message, words) == NULL || strchr(err->message, '\n') != NULL) {
        fail_msg("expected one line with \"%s\", got \"%s\"", words, err->message);
    }
}

/* ---- opening -------------------------------------------------------------------------------- */

static void expect_refusal(enum err_code code, const char *words)
{
    struct backend *be = NULL;
    struct err err = {0};
    assert_int_equal(cuda_open(&be, false, &err), code);
    assert_null(be);
    expect_words(&err, words);
    const struct backend_options options = {"auto", 1, false, NULL};
    assert_int_equal(backend_open(&be, &options, &err), ERR_OK);
    assert_memory_equal(be->name, "cpu-", 4);
    assert_non_null(strstr(be->note, words));
    backend_close(be);
}

static void test_opens_and_describes_the_device(void **state)
{
    (void)state;
    need_library();
    struct backend *const be = fine_open();
    assert_string_equal(be->name, "cuda");
    assert_string_equal(be->note, "");
    assert_non_null(strstr(be->description, ", sm_"));
    assert_non_null(strstr(be->description, "MiB free"));
    assert_true(be->is_async && !be->is_host && be->memory_bytes > 0 && be->capture_max > 0);
    assert_true(be->op->memory_available(be) > 0);
    backend_close(be);
}

static void test_the_device_is_chosen_by_number_or_bus(void **state)
{
    (void)state;
    need_double("CUDA_HOST_SM", "90");
    static const char *const good[] = {"", "0", "0000:3b:00.0", "00000000:3B:00.0"};
    static const char *const bad[] = {"1", "-1", "0x0", "0000:3c:00.0", "GPU"};
    static const char *const devices[] = {"cuda", "auto"};
    struct backend *be = NULL;
    for (size_t d = 0; d < 2; d++) {
        for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
            const struct backend_options options = {devices[d], 0, false, good[i]};
            assert_int_equal(backend_open(&be, &options, NULL), ERR_OK);
            assert_non_null(strstr(be->description, "test double at 0000:3b:00.0, "));
            backend_close(be);
        }
        for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
            struct err err = {0};
            const struct backend_options options = {devices[d], 0, false, bad[i]};
            assert_int_equal(backend_open(&be, &options, &err), ERR_ARGUMENT);
            expect_words(&err, bad[i]);
            expect_words(&err, "give a number from 0 to 0, or a bus id");
        }
    }
    struct err err = {0};
    const struct backend_options options = {"cpu", 0, false, "0"};
    assert_int_equal(backend_open(&be, &options, &err), ERR_ARGUMENT);
    expect_words(&err, "gpu: 0 is named, and device cpu uses none");
}

static void test_auto_takes_the_device_and_says_so(void **state)
{
    (void)state;
    need_library();
    const struct backend_options options = {"auto", 0, false, NULL};
    struct backend *be = NULL;
    assert_int_equal(backend_open(&be, &options, NULL), ERR_OK);
    assert_string_equal(be->name, "cuda");
    assert_string_equal(be->note, "a GPU was found");
    backend_close(be);
}

static void test_no_driver(void **state)
{
    (void)state;
    need_double("CUDA_HOST_DRIVER", "none");
    expect_refusal(ERR_UNSUPPORTED, "has no NVIDIA driver");
}

static void test_old_driver(void **state)
{
    (void)state;
    need_double("CUDA_HOST_DRIVER", "old");
    expect_refusal(ERR_UNSUPPORTED, "too old: it serves CUDA 12.2, this program needs 13.0");
}

static void test_no_device(void **state)
{
    (void)state;
    need_double("CUDA_HOST_DRIVER", "no_device");
    expect_refusal(ERR_UNSUPPORTED, "the driver sees no GPU");
    assert_int_equal(setenv("CUDA_VISIBLE_DEVICES", "7", 1), 0);
    expect_refusal(ERR_UNSUPPORTED, "CUDA_VISIBLE_DEVICES=7");
}

static void test_old_device(void **state)
{
    (void)state;
    need_double("CUDA_HOST_SM", "75");
    expect_refusal(ERR_UNSUPPORTED, "compute capability 7.5, at least 8.0 is needed");
}

static void test_a_library_without_code_for_the_device_is_refused(void **state)
{
    (void)state;
    need_double("CUDA_HOST_SM", "80");
    need_double("CUDA_HOST_CODE", "90");
    expect_refusal(ERR_UNSUPPORTED,
                   "no code for test double, of compute capability 8.0: no kernel image");
    expect_refusal(ERR_UNSUPPORTED, "make cuda CUDA_ARCH=80");
}

static void test_failing_allocations_while_opening(void **state)
{
    (void)state;
    need_double("CUDA_HOST_FAIL_HOST_ALLOC", "1");
    expect_refusal(ERR_MEMORY, "pinned host memory");
}

static void test_fast_math_opens(void **state)
{
    (void)state;
    need_library();
    struct backend *be = NULL;
    struct err err = {0};
    if (cuda_open(&be, true, &err) != ERR_OK) {
        fail_msg("open: %s", err.message);
    }
    backend_close(be);
}

/* ---- memory --------------------------------------------------------------------------------- */

static void test_full_device_is_named_and_stays_usable(void **state)
{
    (void)state;
    need_double("CUDA_HOST_MEMORY", "64M");
    struct backend *const be = fine_open();
    void *data = &data;
    struct err err = {0};
    assert_int_equal(be->op->buffer_new(be, &data, 80 << 20, "key/value cache", &err), ERR_MEMORY);
    assert_null(data);
    expect_words(&err, "key/value cache: needs 83886080 bytes of device memory");
    expect_words(&err, "of 67108864 are free; lower");
    assert_int_equal(be->op->buffer_new(be, &data, 1000, "small", &err), ERR_OK);
    unsigned char back[1000];
    memset(back, 1, sizeof back);
    be->op->download(be, back, tensor_make(data, 1, 250, DTYPE_F32));
    for (size_t i = 0; i < sizeof back; i++) {
        assert_int_equal(back[i], 0);
    }
    be->op->buffer_free(be, data);
    backend_close(be);
}

static void test_absurd_sizes_are_refused_by_name(void **state)
{
    (void)state;
    need_library();
    struct backend *const be = fine_open();
    void *data = NULL;
    struct weight *w = NULL;
    struct err err = {0};
    float one = 1;
    assert_int_equal(be->op->buffer_new(be, &data, SIZE_MAX - 3, "kv cache", &err), ERR_MEMORY);
    expect_words(&err, "kv cache");
    const struct tensor host = tensor_make(&one, INT64_MAX, INT64_MAX / 2, DTYPE_F32);
    const struct weight_desc desc = {
        .kind = WEIGHT_MATRIX, .dtype = DTYPE_F32, .placement = PLACEMENT_DEVICE, .n_group = 1};
    assert_int_equal(be->op->weight_new(be, &w, &host, &desc, "proj.weight", &err), ERR_MEMORY);
    expect_words(&err, "proj.weight");
    backend_close(be);
}

static void test_files_are_not_read_in_place(void **state)
{
    (void)state;
    need_library();
    struct backend *const be = fine_open();
    struct weight *w = NULL;
    struct err err = {0};
    float one = 1;
    const struct tensor host = tensor_make(&one, 1, 1, DTYPE_F32);
    const struct weight_desc desc = {
        .kind = WEIGHT_TABLE, .dtype = DTYPE_F32, .placement = PLACEMENT_MMAP, .n_group = 1};
    assert_int_equal(be->op->weight_new(be, &w, &host, &desc, "values", &err), ERR_UNSUPPORTED);
    assert_null(w);
    expect_words(&err, "values: the GPU does not read a mapped file in place");
    backend_close(be);
}

/* ---- tables --------------------------------------------------------------------------------- */

enum { D = 512, N_HIT = 3 };

/* y[1, D] = the sum of three rows of a table, as the backend reads it. */
static void read_rows(struct backend *be, const struct weight *w, const int32_t *row, float *y)
{
    static const float shares[N_HIT] = {1, 0.5f, -2};
    void *memory = NULL;
    assert_int_equal(be->op->buffer_new(be, &memory, 8192, "rows", NULL), ERR_OK);
    char *const at = memory;
    const struct tensor slots = tensor_make(at, 1, N_HIT, DTYPE_I32);
    const struct tensor share = tensor_make(at + 64, 1, N_HIT, DTYPE_F32);
    const struct tensor out = tensor_make(at + 128, 1, D, DTYPE_F32);
    const struct tensor none = {0};
    be->op->upload(be, slots, row);
    be->op->upload(be, share, shares);
    op_pkm_read(be, out, none, slots, share, w, NULL);
    be->op->download(be, y, out);
    be->op->buffer_free(be, memory);
}

static const float table_scale = 0.125F;

/* Row r of the table, exact in every type. */
static float table_value(int64_t r, int64_t c)
{
    return (float)((r * 31 + c * 7) % 61 - 30) * table_scale;
}

static void *table_host(int64_t rows, enum dtype dtype)
{
    char *const data = malloc((size_t)rows * D * dtype_bytes(dtype));
    assert_non_null(data);
    for (int64_t i = 0; i < rows * D; i++) {
        const float value = table_value(i / D, i % D);
        /* F16 of these values: 5 bits of exponent, 10 of mantissa, cut from the F32 */
        uint32_t bits = 0;
        memcpy(&bits, &value, 4);
        uint16_t half = bf16_from_f32(value);
        if (dtype == DTYPE_F16) {
            half = value == 0
                       ? 0
                       : (uint16_t)((bits >> 16 & 0x8000u) | ((bits >> 23 & 0xffu) - 112) << 10 |
                                    (bits >> 13 & 0x3ffu));
        }
        const int8_t code = (int8_t)(value / table_scale);
        memcpy(data + (size_t)i * dtype_bytes(dtype),
               dtype == DTYPE_F32  ? (const void *)&value
               : dtype == DTYPE_I8 ? (const void *)&code
                                   : &half,
               dtype_bytes(dtype));
    }
    return data;
}

/* A table longer than the block that it passes through, of every type, in both places: its first,
 * last and middle rows are read as what they are, and the places give the same bits. */
static void test_tables_of_any_length_in_both_places(void **state)
{
    (void)state;
    need_library();
    struct backend *const be = fine_open();
    static const struct {
        enum dtype source, dtype;
        int64_t rows;
    } tables[] = {
        {DTYPE_F32, DTYPE_F32, 11000},   {DTYPE_F16, DTYPE_F32, 9000},
        {DTYPE_BF16, DTYPE_BF16, 20000}, {DTYPE_F32, DTYPE_BF16, 1},
        {DTYPE_BF16, DTYPE_BF16, 4096},  {DTYPE_I8, DTYPE_BF16, 700},
        {DTYPE_I8, DTYPE_I8, 40000},
    };
    static float scales[40000];
    for (size_t r = 0; r < sizeof scales / sizeof *scales; r++) {
        scales[r] = table_scale;
    }
    for (size_t i = 0; i < sizeof tables / sizeof *tables; i++) {
        const int64_t rows = tables[i].rows;
        void *const data = table_host(rows, tables[i].source);
        const struct tensor host = tensor_make(data, rows, D, tables[i].source);
        const int32_t row[N_HIT] = {0, (int32_t)(rows - 1), (int32_t)(rows / 2)};
        float y[2][D];
        for (int place = 0; place < 2; place++) {
            const struct weight_desc desc = {.kind = WEIGHT_TABLE,
                                             .dtype = tables[i].dtype,
                                             .placement =
                                                 place == 0 ? PLACEMENT_DEVICE : PLACEMENT_HOST,
                                             .row_scale = scales,
                                             .n_group = 1};
            struct weight *w = NULL;
            assert_int_equal(be->op->weight_new(be, &w, &host, &desc, "values", NULL), ERR_OK);
            assert_int_equal(be->op->weight_bytes(w),
                             (size_t)rows * D * dtype_bytes(tables[i].dtype) +
                                 (tables[i].dtype == DTYPE_I8 ? (size_t)rows * sizeof(float) : 0));
            read_rows(be, w, row, y[place]);
            be->op->weight_free(be, w);
        }
        for (int c = 0; c < D; c++) {
            const float expected =
                table_value(row[0], c) + 0.5f * table_value(row[1], c) - 2 * table_value(row[2], c);
            if (y[0][c] != expected || memcmp(&y[0][c], &y[1][c], 4) != 0) {
                fail_msg("table %zu, column %d: expected %g, got %g on the device, %g on the host",
                         i, c, (double)expected, (double)y[0][c], (double)y[1][c]);
            }
        }
        free(data);
    }
    backend_close(be);
}

/* ---- failures ------------------------------------------------------------------------------- */

/* Two norms of one row, each of x into y, as a step that has neither tokens nor outputs. */
struct norms {
    struct backend *be;
    struct step *step;
    void *memory;
    struct tensor x, y, gamma, beta;
};

static struct norms norms_new(struct backend *be)
{
    const struct step_limits limits = {.n_tok_max = 1,
                                       .n_seq_max = 1,
                                       .n_page_max = 1,
                                       .n_out_max = 1,
                                       .n_fetch_bytes = 2 * D * (int64_t)sizeof(float)};
    struct norms n = {.be = be};
    float host[4][D];
    for (int c = 0; c < D; c++) {
        host[0][c] = (float)(c % 7);
        host[1][c] = 9;
        host[2][c] = 1;
        host[3][c] = 0;
    }
    assert_int_equal(be->op->step_new(be, &n.step, &limits, NULL), ERR_OK);
    assert_int_equal(be->op->buffer_new(be, &n.memory, sizeof host, "norms", NULL), ERR_OK);
    struct tensor *const parts[4] = {&n.x, &n.y, &n.gamma, &n.beta};
    for (int i = 0; i < 4; i++) {
        *parts[i] = tensor_make((char *)n.memory + (size_t)i * sizeof *host, 1, D, DTYPE_F32);
        be->op->upload(be, *parts[i], host[i]);
    }
    return n;
}

static void norms_free(struct norms *n)
{
    n->be->op->step_free(n->be, n->step);
    n->be->op->buffer_free(n->be, n->memory);
    backend_close(n->be);
}

static enum err_code norms_step(struct norms *n, int times, struct err *err)
{
    n->be->op->step_begin(n->be, n->step);
    for (int i = 0; i < times; i++) {
        op_norm(n->be, n->y, n->x, n->gamma, n->beta, 1e-5f);
    }
    return n->be->op->finish(n->be, n->step, err);
}

static void fail_launch(const char *launch, const char *words)
{
    need_double("CUDA_HOST_FAIL_LAUNCH", launch);
    struct norms n = norms_new(fine_open());
    struct err first = {0};
    struct err later = {0};
    assert_int_equal(norms_step(&n, 3, &first), ERR_DEVICE);
    expect_words(&first, words);
    expect_words(&first, "restart it");
    assert_int_equal(norms_step(&n, 1, &later), ERR_DEVICE);
    assert_string_equal(later.message, first.message);
    float y[D];
    memset(y, 1, sizeof y);
    n.be->op->download(n.be, y, n.y); /* what was never written is not handed out */
    for (int c = 0; c < D; c++) {
        assert_true(y[c] == 0);
    }
    norms_free(&n);
}

static void test_failed_launch_stays_and_names_the_op(void **state)
{
    (void)state;
    fail_launch("2", "cuda: norm failed: too many resources requested for launch");
}

static void lose_device(const char *sync, const char *words)
{
    need_double("CUDA_HOST_FAIL_SYNC", sync);
    struct norms n = norms_new(fine_open());
    struct err err = {0};
    int n_fine = 0;
    while (n_fine < 30 && norms_step(&n, 2, &err) == ERR_OK) {
        n_fine++;
    }
    assert_in_range(n_fine, 1, 29);
    expect_words(&err, "cuda: a kernel failed, noticed in ");
    expect_words(&err, words);
    void *data = NULL;
    struct err refused = {0};
    assert_int_equal(n.be->op->buffer_new(n.be, &data, 64, "late", &refused), ERR_DEVICE);
    assert_null(data);
    assert_int_equal(n.be->op->memory_available(n.be), 0);
    assert_int_equal(norms_step(&n, 1, &refused), ERR_DEVICE);
    assert_string_equal(refused.message, err.message);
    norms_free(&n);
}

static void test_lost_device_stays(void **state)
{
    (void)state;
    lose_device("30", "unspecified launch failure (cudaErrorLaunchFailure)");
    lose_device("30:226", "or a hardware error (cudaErrorContained)");
    lose_device("30:721", "tensor memory not completely freed (cudaErrorTensorMemoryLeak)");
}

/* ---- names and times of ops ----------------------------------------------------------------- */

static void test_times_of_ops_are_written_when_the_backend_is_closed(void **state)
{
    (void)state;
    need_library();
    char path[] = "/tmp/test_cuda.XXXXXX";
    const int file = mkstemp(path);
    assert_true(file >= 0);
    assert_int_equal(setenv("PKMSERVE_CUDA_TRACE", path, 1), 0);
    struct norms n = norms_new(fine_open());
    for (int i = 0; i < 3; i++) {
        assert_int_equal(norms_step(&n, 2, NULL), ERR_OK);
    }
    norms_free(&n);
    char text[1000] = "";
    const ssize_t length = read(file, text, sizeof text - 1);
    (void)close(file);
    (void)unlink(path);
    assert_true(length > 0);
    char due[100];
    (void)snprintf(due, sizeof due, "\"op\":\"norm\",\"rows\":1,\"cols\":%d,\"inner\":0", D);
    if (strstr(text, due) == NULL || strstr(text, "\"n\":6,") == NULL ||
        strstr(text, "\"op\":\"nothing\"") == NULL || strstr(text, "\"n\":3,") == NULL) {
        fail_msg("6 norms in 3 steps were traced as: %s", text);
    }
    assert_int_equal(setenv("PKMSERVE_CUDA_TRACE", "/no/such/folder/trace", 1), 0);
    struct backend *be = NULL;
    struct err err = {0};
    assert_int_equal(cuda_open(&be, false, &err), ERR_ARGUMENT);
    expect_words(&err, "PKMSERVE_CUDA_TRACE=/no/such/folder/trace cannot be written");
}

static void test_a_profiler_is_told_the_ops(void **state)
{
    (void)state;
    char path[] = "/tmp/test_cuda.XXXXXX";
    const int file = mkstemp(path);
    assert_true(file >= 0);
    need_double("CUDA_HOST_TRACE", path);
    assert_int_equal(setenv("NVTX_INJECTION64_PATH", "a tool", 1), 0);
    struct norms n = norms_new(fine_open());
    assert_int_equal(norms_step(&n, 2, NULL), ERR_OK);
    norms_free(&n);
    FILE *const lines = fdopen(file, "r");
    assert_non_null(lines);
    char line[500];
    char due[100];
    int n_norm = 0;
    (void)snprintf(due, sizeof due, "\tnorm rows=1 cols=%d\t", D);
    while (fgets(line, sizeof line, lines) != NULL) {
        n_norm += strncmp(line, "launch\t", 7) == 0 && strstr(line, due) != NULL;
    }
    (void)fclose(lines);
    (void)unlink(path);
    assert_int_equal(n_norm, 2);
}

/* ---- what is fetched
 * ---------------------------------------------------------------------------- */

static int count_lines(FILE *lines, const char *begin)
{
    char line[500];
    int n = 0;
    rewind(lines);
    while (fgets(line, sizeof line, lines) != NULL) {
        n += strncmp(line, begin, strlen(begin)) == 0;
    }
    return n;
}

static void test_what_is_fetched_costs_no_wait(void **state)
{
    (void)state;
    char path[] = "/tmp/test_cuda.XXXXXX";
    const int file = mkstemp(path);
    assert_true(file >= 0);
    need_double("CUDA_HOST_TRACE", path);
    struct norms n = norms_new(fine_open());
    FILE *const lines = fdopen(file, "r");
    assert_non_null(lines);
    assert_int_equal(norms_step(&n, 1, NULL), ERR_OK);
    const int before = count_lines(lines, "wait");
    assert_int_equal(norms_step(&n, 1, NULL), ERR_OK);
    const int plain = count_lines(lines, "wait") - before;
    n.be->op->step_begin(n.be, n.step);
    op_norm(n.be, n.y, n.x, n.gamma, n.beta, 1e-5f);
    n.be->op->submit(n.be, n.step);
    const float *const y = n.be->op->fetch(n.be, n.step, n.y);
    const float *const x = n.be->op->fetch(n.be, n.step, n.x);
    assert_int_equal(n.be->op->finish(n.be, n.step, NULL), ERR_OK);
    assert_int_equal(count_lines(lines, "wait") - before, 2 * plain);
    (void)fclose(lines);
    (void)unlink(path);
    float normed[D];
    n.be->op->download(n.be, normed, n.y);
    assert_memory_equal(y, normed, sizeof normed);
    assert_true(x[6] == 6 && x[D - 1] == (float)((D - 1) % 7));
    norms_free(&n);
}

static void test_nothing_is_fetched_after_a_failure(void **state)
{
    (void)state;
    need_double("CUDA_HOST_FAIL_LAUNCH", "1");
    struct norms n = norms_new(fine_open());
    n.be->op->step_begin(n.be, n.step);
    op_norm(n.be, n.y, n.x, n.gamma, n.beta, 1e-5f);
    n.be->op->submit(n.be, n.step);
    const float *const x = n.be->op->fetch(n.be, n.step, n.x);
    assert_int_equal(n.be->op->finish(n.be, n.step, NULL), ERR_DEVICE);
    for (int c = 0; c < D; c++) {
        assert_true(x[c] == 0);
    }
    norms_free(&n);
}

/* ---- ops outside of steps, graphs
 * --------------------------------------------------------------- */

static void expect_normed(const struct norms *n)
{
    float y[D];
    double sum = 0;
    double squares = 0;
    n->be->op->download(n->be, y, n->y);
    for (int c = 0; c < D; c++) {
        sum += (double)y[c];
        squares += (double)y[c] * (double)y[c];
    }
    assert_true(sum < 1e-3 && sum > -1e-3 && squares > 0.999 * (double)D &&
                squares < 1.001 * (double)D);
}

static void test_ops_run_outside_of_steps_and_in_any_number(void **state)
{
    (void)state;
    need_library();
    struct norms n = norms_new(fine_open());
    op_norm(n.be, n.y, n.x, n.gamma, n.beta, 1e-5f);
    expect_normed(&n);
    struct err err = {0};
    if (norms_step(&n, 5000, &err) != ERR_OK) {
        fail_msg("%s", err.message);
    }
    expect_normed(&n);
    /* what was launched runs before its input is written anew, and before it is freed */
    float zero[D] = {0};
    op_norm(n.be, n.y, n.x, n.gamma, n.beta, 1e-5f);
    n.be->op->upload(n.be, n.x, zero);
    expect_normed(&n);
    op_norm(n.be, n.y, n.x, n.gamma, n.beta, 1e-5f);
    norms_free(&n);
}

/* A search of many rows: n_key keys of d columns in both halves, one head. */
struct search {
    struct weight *keys;
    struct pkm_shape shape;
    struct tensor slots, shares, query;
};

enum { SEARCH_ROWS = 40, SEARCH_KEYS_MAX = 512, SEARCH_D_MAX = 64, SEARCH_K = 4 };

static struct search search_new(struct backend *be, void *memory, int n_key, int d)
{
    static const float zero[2 * SEARCH_KEYS_MAX * SEARCH_D_MAX];
    float *const at = memory;
    const struct tensor host = tensor_make((void *)(uintptr_t)zero, 2 * n_key, d, DTYPE_F32);
    const struct weight_desc desc = {
        .kind = WEIGHT_KEYS, .dtype = DTYPE_F32, .placement = PLACEMENT_DEVICE, .n_group = 2};
    struct search s = {
        .shape = {PKM_PRODUCT, 1, SEARCH_K, n_key, 2 * d, false},
        .slots = tensor_make(at, SEARCH_ROWS, SEARCH_K, DTYPE_I32),
        .shares = tensor_make(at + SEARCH_ROWS * SEARCH_K, SEARCH_ROWS, SEARCH_K, DTYPE_F32),
        .query = tensor_make(at + 2 * SEARCH_ROWS * SEARCH_K, SEARCH_ROWS, 2 * d, DTYPE_F32),
    };
    assert_int_equal(be->op->weight_new(be, &s.keys, &host, &desc, "keys", NULL), ERR_OK);
    return s;
}

static void search_run(struct backend *be, const struct search *s)
{
    op_pkm_search(be, s->slots, s->shares, s->query, s->keys, &s->shape);
}

/* A graph's kernel keeps the shared memory that it was captured with when the same kernel has run
 * with less in between, for this backend or for another one of the process. */
static void test_a_graph_keeps_its_shared_memory(void **state)
{
    (void)state;
    need_library();
    struct backend *const be = fine_open();
    struct backend *const other = fine_open();
    const struct step_limits limits = {
        .n_tok_max = 1, .n_seq_max = 1, .n_page_max = 1, .n_out_max = 1};
    struct step *step = NULL;
    void *memory = NULL;
    struct err err = {0};
    assert_int_equal(be->op->step_new(be, &step, &limits, NULL), ERR_OK);
    assert_int_equal(be->op->buffer_new(be, &memory, 64 << 10, "search", NULL), ERR_OK);
    const struct search large = search_new(be, memory, SEARCH_KEYS_MAX, SEARCH_D_MAX);
    const struct search small = search_new(be, memory, 32, 4);
    void *other_memory = NULL;
    assert_int_equal(other->op->buffer_new(other, &other_memory, 64 << 10, "search", NULL), ERR_OK);
    const struct search beside = search_new(other, other_memory, 32, 4);
    step->n_tok = step->n_seq = step->n_out = step->seq_first[1] = step->ops_list = 1;
    step->is_drawn = true;
    step->out_want[0] = OUT_SAMPLE;
    step->sample[0] = (struct sample_params){.top_p = 1, .repetition = 1};
    for (int i = 0; i < 4; i++) {
        search_run(be, &small);
        be->op->step_begin(be, step);
        search_run(be, &large);
        if (be->op->finish(be, step, &err) != ERR_OK) {
            fail_msg("step %d: %s", i, err.message);
        }
        search_run(other, &beside);
    }
    assert_int_equal(be->n_prepared, 3);
    other->op->weight_free(other, beside.keys);
    other->op->buffer_free(other, other_memory);
    backend_close(other);
    be->op->weight_free(be, large.keys);
    be->op->weight_free(be, small.keys);
    be->op->step_free(be, step);
    be->op->buffer_free(be, memory);
    backend_close(be);
}

/* The score of the only slot of a memory whose query and keys are all x. */
static float only_score(bool is_split, float x)
{
    struct backend *const be = fine_open();
    float *memory = NULL;
    struct weight *keys = NULL;
    const float both[2] = {x, x};
    const struct tensor host = tensor_make((void *)(uintptr_t)both, 2, 1, DTYPE_F32);
    const struct weight_desc desc = {.kind = WEIGHT_KEYS,
                                     .dtype = DTYPE_F32,
                                     .placement = PLACEMENT_DEVICE,
                                     .n_group = 2,
                                     .is_split = is_split};
    const struct pkm_shape shape = {PKM_PRODUCT, 1, 1, 1, 2, true};
    assert_int_equal(be->op->weight_new(be, &keys, &host, &desc, "keys", NULL), ERR_OK);
    assert_int_equal(be->op->buffer_new(be, (void **)&memory, 64, "search", NULL), ERR_OK);
    const struct tensor query = tensor_make(memory, 1, 2, DTYPE_F32);
    const struct tensor score = tensor_make(memory + 2, 1, 1, DTYPE_F32);
    be->op->upload(be, query, both);
    op_pkm_search(be, tensor_make(memory + 3, 1, 1, DTYPE_I32), score, query, keys, &shape);
    float got = 0;
    be->op->download(be, &got, score);
    be->op->buffer_free(be, memory);
    be->op->weight_free(be, keys);
    backend_close(be);
    return got;
}

/* Of 1 + 2^-12 + 2^-23 two BF16 numbers hold 1 + 2^-12. */
static void test_keys_are_split_where_they_may_be_unless_asked_not_to(void **state)
{
    (void)state;
    need_library();
    const float x = 1 + 0x1p-12f + 0x1p-23f;
    const float split = 2 + 0x1p-10f;
    const float whole = 2 * (x * x);
    assert_true(only_score(true, x) == split);
    assert_true(only_score(false, x) == whole);
    assert_int_equal(setenv("PKMSERVE_CUDA_SPLIT", "0", 1), 0);
    assert_true(only_score(true, x) == whole);
}

enum { WIDE_ROWS = 130, WIDE_FEW = 128, WIDE_D = 12, WIDE_K = 9 };

/* Slots and weights of rows first .. first+n-1 of a search among n_key keys, as words [n, 2, K]. */
static void wide_rows(struct backend *be, const struct weight *keys, int n_key, float *memory,
                      int first, int n, uint32_t *out)
{
    const struct pkm_shape shape = {PKM_PRODUCT, 1, WIDE_K, n_key, 2 * WIDE_D, false};
    float *const behind = memory + WIDE_ROWS * 2 * WIDE_D;
    const struct tensor query =
        tensor_make(memory + (size_t)first * 2 * WIDE_D, n, 2 * WIDE_D, DTYPE_F32);
    const struct tensor both = tensor_make(behind, n, 2 * WIDE_K, DTYPE_I32);
    struct tensor weights = tensor_cols(both, WIDE_K, WIDE_K);
    weights.dtype = DTYPE_F32;
    op_pkm_search(be, tensor_cols(both, 0, WIDE_K), weights, query, keys, &shape);
    be->op->download(be, out, both);
}

/* Rows are searched a hundred and more at a time in another way than few, and again in another
 * where the device's shared memory does not hold their scores. */
static void test_many_rows_are_searched_to_the_bits_of_few(void **state)
{
    static const char *const devices[] = {"90", "89"};
    static const int n_keys[] = {40, 600, 1400};
    static float numbers[2 * 1400 * WIDE_D];
    static uint32_t got[2][3][WIDE_ROWS * 2 * WIDE_K];
    static uint32_t few[WIDE_ROWS * 2 * WIDE_K];
    (void)state;
    need_library();
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        numbers[i] = (float)(i * 2654435761u % 10007) / 5003 - 1;
    }
    assert_int_equal(setenv("PKMSERVE_CUDA_SPLIT", "1", 1), 0);
    for (int d = 0; d < (is_double() ? 2 : 1); d++) {
        assert_int_equal(setenv("CUDA_HOST_SM", devices[d], 1), 0);
        struct backend *const be = fine_open();
        float *memory = NULL;
        assert_int_equal(be->op->buffer_new(be, (void **)&memory, 64 << 10, "search", NULL),
                         ERR_OK);
        be->op->upload(be, tensor_make(memory, WIDE_ROWS, 2 * WIDE_D, DTYPE_F32), numbers + 5);
        for (int i = 0; i < 3; i++) {
            const struct tensor host = tensor_make(numbers, 2 * n_keys[i], WIDE_D, DTYPE_F32);
            const struct weight_desc desc = {.kind = WEIGHT_KEYS,
                                             .dtype = DTYPE_F32,
                                             .placement = PLACEMENT_DEVICE,
                                             .n_group = 2,
                                             .is_split = true};
            struct weight *keys = NULL;
            assert_int_equal(be->op->weight_new(be, &keys, &host, &desc, "keys", NULL), ERR_OK);
            wide_rows(be, keys, n_keys[i], memory, 0, WIDE_ROWS, got[d][i]);
            wide_rows(be, keys, n_keys[i], memory, 0, WIDE_FEW, few);
            wide_rows(be, keys, n_keys[i], memory, WIDE_FEW, WIDE_ROWS - WIDE_FEW,
                      few + WIDE_FEW * 2 * WIDE_K);
            assert_memory_equal(got[d][i], few, sizeof few);
            be->op->weight_free(be, keys);
        }
        be->op->buffer_free(be, memory);
        backend_close(be);
    }
    if (is_double()) {
        assert_memory_equal(got[0], got[1], sizeof got[0]);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(test_opens_and_describes_the_device, fine_device),
        cmocka_unit_test_setup(test_the_device_is_chosen_by_number_or_bus, fine_device),
        cmocka_unit_test_setup(test_auto_takes_the_device_and_says_so, fine_device),
        cmocka_unit_test_setup(test_no_driver, fine_device),
        cmocka_unit_test_setup(test_old_driver, fine_device),
        cmocka_unit_test_setup(test_no_device, fine_device),
        cmocka_unit_test_setup(test_old_device, fine_device),
        cmocka_unit_test_setup(test_a_library_without_code_for_the_device_is_refused, fine_device),
        cmocka_unit_test_setup(test_failing_allocations_while_opening, fine_device),
        cmocka_unit_test_setup(test_fast_math_opens, fine_device),
        cmocka_unit_test_setup(test_full_device_is_named_and_stays_usable, fine_device),
        cmocka_unit_test_setup(test_absurd_sizes_are_refused_by_name, fine_device),
        cmocka_unit_test_setup(test_files_are_not_read_in_place, fine_device),
        cmocka_unit_test_setup(test_tables_of_any_length_in_both_places, fine_device),
        cmocka_unit_test_setup(test_failed_launch_stays_and_names_the_op, fine_device),
        cmocka_unit_test_setup(test_lost_device_stays, fine_device),
        cmocka_unit_test_setup(test_ops_run_outside_of_steps_and_in_any_number, fine_device),
        cmocka_unit_test_setup(test_what_is_fetched_costs_no_wait, fine_device),
        cmocka_unit_test_setup(test_nothing_is_fetched_after_a_failure, fine_device),
        cmocka_unit_test_setup(test_times_of_ops_are_written_when_the_backend_is_closed,
                               fine_device),
        cmocka_unit_test_setup(test_a_profiler_is_told_the_ops, fine_device),
        cmocka_unit_test_setup(test_a_graph_keeps_its_shared_memory, fine_device),
        cmocka_unit_test_setup(test_keys_are_split_where_they_may_be_unless_asked_not_to,
                               fine_device),
        cmocka_unit_test_setup(test_many_rows_are_searched_to_the_bits_of_few, fine_device),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
