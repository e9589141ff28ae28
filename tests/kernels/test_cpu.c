/* What the CPU backend promises beyond the checker's comparison with ref: accuracy of its own exp
 * and GELU, draws from flat distributions, more rows than are packed at once, any number of
 * threads, tables at odd addresses, exact INT8, buffers that take no memory before they are
 * written.
 *
 * Each test runs every instruction set of the machine. Rerun: build/tests/kernels/test_cpu */
#include "kernels/cpu/cpu.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmocka.h>

static const char *const isas[] = {
#if defined(__aarch64__)
    "neon", "neon-dot", "neon-bf16",
#elif defined(__x86_64__)
    "avx2", "avx512", "avx512-pairs", "avx512-wide", "amx",
#endif
    "plain"};
enum { N_ISA = sizeof isas / sizeof *isas };

/* NULL where the machine lacks the set. */
static struct backend *open_isa(const char *isa, int n_thread)
{
    struct backend *be = NULL;
    struct err err = {0};
    const enum err_code code = cpu_open(&be, isa, n_thread, &err);
    if (code != ERR_OK && code != ERR_UNSUPPORTED) {
        fail_msg("cpu_open(%s, %d): %s", isa, n_thread, err.message);
    }
    return be;
}

/* A float in [-1, 1) that depends on seed and i alone. */
static float noise(uint32_t seed, uint32_t i)
{
    uint32_t x = (i + 1) * 2654435761u ^ seed * 40503u;
    x ^= x >> 15;
    x *= 2246822519u;
    x ^= x >> 13;
    return (float)(int32_t)x * 0x1p-31f;
}

static float *noise_new(size_t n, uint32_t seed)
{
    float *const data = malloc(n * sizeof *data);
    assert_non_null(data);
    for (size_t i = 0; i < n; i++) {
        data[i] = noise(seed, (uint32_t)i);
    }
    return data;
}

static struct weight *weight_of(struct backend *be, struct tensor host, enum weight_kind kind,
                                enum dtype dtype, enum placement placement)
{
    struct weight *w = NULL;
    struct err err = {0};
    const struct weight_desc desc = {
        .kind = kind, .dtype = dtype, .placement = placement, .n_group = 1};
    if (be->op->weight_new(be, &w, &host, &desc, "w", &err) != ERR_OK) {
        fail_msg("%s: weight_new: %s", be->name, err.message);
    }
    return w;
}

/* GELU of a linear layer of one input and weight 1, against double over its whole range. */
static void test_gelu_is_exact_to_a_few_ulp(void **state)
{
    (void)state;
    enum { N = 20001 };
    for (int i = 0; i < N_ISA; i++) {
        struct backend *const be = open_isa(isas[i], 1);
        if (be == NULL) {
            continue;
        }
        float one = 1;
        struct weight *const w = weight_of(be, tensor_make(&one, 1, 1, DTYPE_F32), WEIGHT_MATRIX,
                                           DTYPE_F32, PLACEMENT_DEVICE);
        float *const x = malloc(2 * N * sizeof *x);
        assert_non_null(x);
        float *const y = x + N;
        for (int j = 0; j < N; j++) {
            x[j] = (float)(j - N / 2) * 1e-3f;
        }
        op_linear(be, tensor_make(y, N, 1, DTYPE_F32), tensor_make(x, N, 1, DTYPE_F32), w,
                  (struct tensor){0}, ACT_GELU);
        for (int j = 0; j < N; j++) {
            const double expected = 0.5 * (double)x[j] * erfc(-(double)x[j] * sqrt(0.5));
            const double bound = 4e-7 * fabs(expected) + 1e-7;
            if (!(fabs((double)y[j] - expected) <= bound)) {
                fail_msg("%s: gelu(%.9g): expected %.9g, got %.9g", be->name, (double)x[j],
                         expected, (double)y[j]);
            }
        }
        free(x);
        be->op->weight_free(be, w);
        backend_close(be);
    }
}

static struct step *step_of(struct backend *be, int n_out, int n_vocab)
{
    const struct step_limits limits = {.n_tok_max = n_out,
                                       .n_seq_max = 1,
                                       .n_page_max = 1 + n_out / KV_PAGE,
                                       .n_out_max = n_out,
                                       .n_top_max = 1,
                                       .n_vocab = n_vocab};
    struct step *step = NULL;
    struct err err = {0};
    if (be->op->step_new(be, &step, &limits, &err) != ERR_OK) {
        fail_msg("%s: step_new: %s", be->name, err.message);
    }
    step->n_tok = n_out;
    step->n_out = n_out;
    step->n_seq = 1;
    step->seq_first[1] = n_out;
    for (int i = 0; i < n_out; i++) {
        step->pos[i] = i;
        step->out_row[i] = i;
        step->out_want[i] = OUT_SAMPLE;
    }
    return step;
}

/* Filters that keep thousands of tokens, with ties among them. In every fourth row the tokens that
 * a search takes for a sample are unlike all others. */
static void test_flat_distributions_draw_as_ref_does(void **state)
{
    (void)state;
    enum { N_VOCAB = 5003, N_ROW = 24 };
    float *const logits = noise_new((size_t)N_ROW * N_VOCAB, 3);
    for (int i = 0; i < N_ROW * N_VOCAB; i++) { /* many equal logits, both zeros among them */
        logits[i] = rintf(logits[i] * (i / N_VOCAB % 4 < 2 ? 8 : 1)) * 0.125f;
    }
    for (int i = 3; i < N_ROW; i += 4) {
        for (int j = 0; j < DRAW_SAMPLE; j++) {
            logits[i * N_VOCAB + N_VOCAB * j / DRAW_SAMPLE] = i % 8 == 3 ? -9 : 0.5f;
        }
    }
    struct backend *ref = NULL;
    assert_int_equal(ref_open(&ref, NULL), ERR_OK);
    struct step *const expected = step_of(ref, N_ROW, N_VOCAB);
    for (int i = 0; i < N_ROW; i++) {
        expected->sample[i] = (struct sample_params){.u = (i + 0.5) / (double)N_ROW,
                                                     .temperature = 0.5f + (float)(i % 4),
                                                     .top_p = i % 3 == 0 ? 1 : 0.97f,
                                                     .min_p = i % 3 == 0 ? 0.01f : 0,
                                                     .top_k = i % 2 == 0 ? 0 : 3000,
                                                     .repetition = 1};
    }
    const struct tensor z = tensor_make(logits, N_ROW, N_VOCAB, DTYPE_F32);
    op_outputs(ref, z, expected, 0);
    for (int i = 0; i < N_ISA; i++) {
        struct backend *const be = open_isa(isas[i], 3);
        if (be == NULL) {
            continue;
        }
        struct step *const step = step_of(be, N_ROW, N_VOCAB);
        memcpy(step->sample, expected->sample, N_ROW * sizeof *step->sample);
        op_outputs(be, z, step, 0);
        for (int r = 0; r < N_ROW; r++) {
            if (step->out_token[r] != expected->out_token[r]) {
                fail_msg("%s: row %d: expected token %d, got %d", be->name, r,
                         expected->out_token[r], step->out_token[r]);
            }
        }
        be->op->step_free(be, step);
        backend_close(be);
    }
    ref->op->step_free(ref, expected);
    backend_close(ref);
    free(logits);
}

/* 300 rows are packed in two blocks; every row must have the bits it has alone, for any number of
 * threads. */
static void test_rows_beyond_a_block_and_many_threads(void **state)
{
    (void)state;
    enum { N_ROW = 300, N_IN = 71, N_OUT = 45 };
    static const int threads[] = {1, 2, 7, 64};
    float *const x = noise_new((size_t)N_ROW * N_IN, 1);
    float *const host = noise_new((size_t)N_OUT * N_IN, 2);
    float *const first = malloc(2 * sizeof *first * N_ROW * N_OUT);
    assert_non_null(first);
    float *const y = first + N_ROW * N_OUT;
    static const enum dtype dtypes[] = {DTYPE_F32, DTYPE_BF16, DTYPE_I8};
    for (int i = 0; i < 3 * N_ISA; i++) {
        const enum dtype dtype = dtypes[i % 3];
        for (size_t t = 0; t < sizeof threads / sizeof *threads; t++) {
            struct backend *const be = open_isa(isas[i / 3], threads[t]);
            if (be == NULL) {
                break;
            }
            struct weight *const w = weight_of(be, tensor_make(host, N_OUT, N_IN, DTYPE_F32),
                                               WEIGHT_MATRIX, dtype, PLACEMENT_DEVICE);
            op_linear(be, tensor_make(y, N_ROW, N_OUT, DTYPE_F32),
                      tensor_make(x, N_ROW, N_IN, DTYPE_F32), w, (struct tensor){0}, ACT_GELU);
            for (int r = 0; r < N_ROW && t == 0; r++) { /* row by row, for comparison */
                op_linear(be, tensor_make(first + r * N_OUT, 1, N_OUT, DTYPE_F32),
                          tensor_make(x + r * N_IN, 1, N_IN, DTYPE_F32), w, (struct tensor){0},
                          ACT_GELU);
            }
            if (memcmp(first, y, sizeof *y * N_ROW * N_OUT) != 0) {
                fail_msg("%s, %s, %d threads: rows differ from rows alone", be->name,
                         dtype_name(dtype), threads[t]);
            }
            be->op->weight_free(be, w);
            backend_close(be);
        }
    }
    free(first);
    free(host);
    free(x);
}

/* A table read in place from an odd offset of a file gives what a copy of it gives. */
static void test_mapped_table_at_an_odd_address(void **state)
{
    (void)state;
    enum { N_SLOT = 37, D = 83, N_READ = 9 };
    char *const file = malloc(1 + sizeof(uint16_t) * N_SLOT * D);
    assert_non_null(file);
    for (int i = 0; i < N_SLOT * D; i++) {
        const uint16_t bits = bf16_from_f32(noise(5, (uint32_t)i));
        memcpy(file + 1 + 2 * i, &bits, sizeof bits);
    }
    int32_t slots[N_READ];
    float shares[N_READ];
    for (int i = 0; i < N_READ; i++) {
        slots[i] = i * 4;
        shares[i] = noise(6, (uint32_t)i);
    }
    for (int i = 0; i < N_ISA; i++) {
        struct backend *const be = open_isa(isas[i], 2);
        if (be == NULL) {
            continue;
        }
        const struct tensor host = tensor_make(file + 1, N_SLOT, D, DTYPE_BF16);
        float y[2][D];
        for (int copy = 0; copy < 2; copy++) {
            struct weight *const w = weight_of(be, host, WEIGHT_TABLE, DTYPE_BF16,
                                               copy ? PLACEMENT_DEVICE : PLACEMENT_MMAP);
            op_pkm_read(be, tensor_make(y[copy], 1, D, DTYPE_F32), (struct tensor){0},
                        tensor_make(slots, 1, N_READ, DTYPE_I32),
                        tensor_make(shares, 1, N_READ, DTYPE_F32), w, NULL);
            be->op->weight_free(be, w);
        }
        if (memcmp(y[0], y[1], sizeof y[0]) != 0) {
            fail_msg("%s: the mapped table and its copy give different sums", be->name);
        }
        backend_close(be);
    }
    free(file);
}

/* INT8 sums are whole numbers: each instruction set gives the bits of the reference, also at the
 * longest sum and the largest numbers there may be. */
static void test_int8_is_exact(void **state)
{
    (void)state;
    enum { N_IN = 65536, N_OUT = 33, N_ROW = 2 };
    int8_t *const q = malloc((size_t)N_IN * N_OUT);
    float *const x = malloc(sizeof *x * N_ROW * N_IN);
    float scale[N_OUT], expected[N_ROW * N_OUT], y[N_ROW * N_OUT];
    assert_true(q != NULL && x != NULL);
    for (int i = 0; i < N_IN * N_OUT; i++) {
        q[i] = i / N_IN == 0 ? 127 : i / N_IN == 1 ? -127 : (int8_t)(127 * noise(7, (uint32_t)i));
    }
    for (int i = 0; i < N_ROW * N_IN; i++) {
        x[i] = i < N_IN ? 2 : noise(8, (uint32_t)i);
    }
    for (int o = 0; o < N_OUT; o++) {
        scale[o] = noise(9, (uint32_t)o);
    }
    const struct weight_desc desc = {.kind = WEIGHT_MATRIX,
                                     .dtype = DTYPE_I8,
                                     .placement = PLACEMENT_DEVICE,
                                     .n_group = 1,
                                     .row_scale = scale};
    for (int i = -1; i < N_ISA; i++) {
        struct backend *be = NULL;
        if (i < 0) {
            assert_int_equal(ref_open(&be, NULL), ERR_OK);
        } else if ((be = open_isa(isas[i], 2)) == NULL) {
            continue;
        }
        struct weight *w = NULL;
        const struct tensor host = tensor_make(q, N_OUT, N_IN, DTYPE_I8);
        assert_int_equal(be->op->weight_new(be, &w, &host, &desc, "w", NULL), ERR_OK);
        op_linear(be, tensor_make(y, N_ROW, N_OUT, DTYPE_F32),
                  tensor_make(x, N_ROW, N_IN, DTYPE_F32), w, (struct tensor){0}, ACT_NONE);
        memcpy(expected, y, i < 0 ? sizeof y : 0);
        if (memcmp(expected, y, sizeof y) != 0) {
            fail_msg("%s: %.9g, %.9g instead of %.9g, %.9g", be->name, (double)y[0], (double)y[1],
                     (double)expected[0], (double)expected[1]);
        }
        be->op->weight_free(be, w);
        backend_close(be);
    }
    free(q);
    free(x);
}

static void test_int8_refuses_what_it_would_lose(void **state)
{
    (void)state;
    enum { N = 4096 };
    float *const row = noise_new(N, 10);
    row[7] = 400; /* all others are rounded to 0 */
    const struct weight_desc desc = {.kind = WEIGHT_TABLE,
                                     .dtype = DTYPE_I8,
                                     .placement = PLACEMENT_DEVICE,
                                     .n_group = 1,
                                     .loss_max = 0.03};
    const struct tensor host = tensor_make(row, 1, N, DTYPE_F32);
    for (int i = -1; i < N_ISA; i++) {
        struct backend *be = NULL;
        struct weight *w = NULL;
        struct err err = {0};
        if (i < 0) {
            assert_int_equal(ref_open(&be, NULL), ERR_OK);
        } else if ((be = open_isa(isas[i], 2)) == NULL) {
            continue;
        }
        assert_int_equal(be->op->weight_new(be, &w, &host, &desc, "embeddings.weight", &err),
                         ERR_NUMERICAL);
        assert_null(w);
        assert_non_null(strstr(err.message, "embeddings.weight: int8 would change this weight by"));
        backend_close(be);
    }
    free(row);
}

static void expect_zeros(const char *data, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++) {
        assert_int_equal(data[i], 0);
    }
}

static void test_buffers_are_zero_and_aligned(void **state)
{
    (void)state;
    static const size_t sizes[] = {0, 1, 64, 4095, (2 << 20) - 1, 2 << 20, 5 << 20};
    struct backend *const be = open_isa("plain", 1);
    for (int round = 0; round < 2; round++) { /* the second finds what the first left behind */
        for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
            void *data = NULL;
            assert_int_equal(be->op->buffer_new(be, &data, sizes[i], "test", NULL), ERR_OK);
            assert_int_equal((uintptr_t)data % 64, 0);
            expect_zeros(data, sizes[i]);
            memset(data, 1, sizes[i]);
            be->op->buffer_free(be, data);
        }
    }
    struct err err = {0};
    void *data = &err;
    assert_int_equal(be->op->buffer_new(be, &data, SIZE_MAX - 3, "cache", &err), ERR_MEMORY);
    assert_null(data);
    assert_non_null(strstr(err.message, "cache"));
    be->op->buffer_free(be, NULL);
    backend_close(be);
}

/* Or the server would not start before the system has zeroed a cache that may never fill. */
static void test_large_buffer_takes_no_memory_before_it_is_written(void **state)
{
    (void)state;
    enum { BYTES = 256 << 20 };
    struct backend *const be = open_isa("plain", 1);
    void *data = NULL;
    assert_int_equal(be->op->buffer_new(be, &data, BYTES, "test", NULL), ERR_OK);
    const size_t n_page = BYTES / (size_t)sysconf(_SC_PAGESIZE);
    unsigned char *const page = malloc(n_page);
    assert_non_null(page);
    assert_int_equal(mincore(data, BYTES, page), 0);
    size_t n_taken = 0;
    for (size_t i = 0; i < n_page; i++) {
        n_taken += page[i] & 1;
    }
    assert_in_range(n_taken, 0, n_page / 16);
    free(page);
    be->op->buffer_free(be, data);
    backend_close(be);
}

static void test_unknown_set_is_refused(void **state)
{
    (void)state;
    struct backend *be = NULL;
    struct err err = {0};
    assert_int_equal(cpu_open(&be, "sse9", 1, &err), ERR_ARGUMENT);
    assert_null(be);
    assert_non_null(strstr(err.message, "sse9"));
    assert_int_equal(cpu_open(&be, NULL, 100000, &err), ERR_ARGUMENT);
    assert_null(be);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_gelu_is_exact_to_a_few_ulp),
        cmocka_unit_test(test_flat_distributions_draw_as_ref_does),
        cmocka_unit_test(test_rows_beyond_a_block_and_many_threads),
        cmocka_unit_test(test_mapped_table_at_an_odd_address),
        cmocka_unit_test(test_int8_is_exact),
        cmocka_unit_test(test_int8_refuses_what_it_would_lose),
        cmocka_unit_test(test_buffers_are_zero_and_aligned),
        cmocka_unit_test(test_large_buffer_takes_no_memory_before_it_is_written),
        cmocka_unit_test(test_unknown_set_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
