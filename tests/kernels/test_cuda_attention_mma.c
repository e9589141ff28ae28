/* Attention of rows of requests on tensor cores, PKMSERVE_CUDA_ATTENTION=mma: the arithmetic that
 * kernels/cuda/attention_mma.cu defines, computed here once more in F64, and its bound to ref; the
 * same bits alone, in chunks and in a crowd; where it is used. TEST_FEW=1, for sanitizers, takes a
 * third of the widths of heads and half of the orders. */
#include "tests/kernels/cuda_crowd.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

static bool is_few(void)
{
    return getenv("TEST_FEW") != NULL;
}

/* Row i of an array of all positions. */
static const float *row_of(const struct crowd *c, const float *rows, int i, int head)
{
    return rows + ((int64_t)i * c->n_head + head) * c->d_head;
}

static double rounded(float value)
{
    return (double)bf16_to_f32(bf16_from_f32(value));
}

/* What attention_mma.cu's head comment defines, in F64 but for what it rounds, for position pos of
 * sequence s. */
static void attend_mma(const struct crowd *c, int s, int pos, int head, double *y)
{
    const float scale = 1 / sqrtf((float)c->d_head) * 1.44269504f;
    const float *const q = row_of(c, c->q, c->first[s] + pos, head);
    double max = -INFINITY;
    double sum = 0;
    memset(y, 0, (size_t)c->d_head * sizeof *y);
    for (int first = 0; first <= pos; first += 64) {
        const int n = pos + 1 - first < 64 ? pos + 1 - first : 64;
        double score[64] = {0};
        double split[128] = {0};
        double part = 0;
        double highest = max;
        for (int u = 0; u < n; u++) {
            const float *const k = row_of(c, c->k, c->first[s] + first + u, head);
            for (int i = 0; i < c->d_head; i++) {
                score[u] += rounded(q[i] * scale) * rounded(k[i]);
            }
            highest = fmax(highest, score[u]);
        }
        for (int u = 0; u < n; u++) {
            const float *const v = row_of(c, c->v, c->first[s] + first + u, head);
            const double e = exp2(score[u] - highest);
            part += e;
            for (int i = 0; i < c->d_head; i++) {
                split[i] += rounded((float)e) * rounded(v[i]);
            }
        }
        sum = sum * exp2(max - highest) + part;
        for (int i = 0; i < c->d_head; i++) {
            y[i] = y[i] * exp2(max - highest) + split[i];
        }
        max = highest;
    }
    for (int i = 0; i < c->d_head; i++) {
        y[i] /= sum;
    }
}

/* Σ|q·k|·scale, at most, of the positions that pos sees. */
static double score_size(const struct crowd *c, int s, int pos, int head)
{
    const float *const q = row_of(c, c->q, c->first[s] + pos, head);
    double most = 0;
    for (int u = 0; u <= pos; u++) {
        const float *const k = row_of(c, c->k, c->first[s] + u, head);
        double sum = 0;
        for (int i = 0; i < c->d_head; i++) {
            sum += fabs((double)q[i] * (double)k[i]);
        }
        most = fmax(most, sum / sqrt(c->d_head));
    }
    return most;
}

/* The new rows as attention_mma.cu defines them, but for shares that F32 rounds to the next number
 * of BF16; and within its bound of ref's, whose values are expected. Values are 1 at most. */
static void check_mma(const struct crowd *c, const float *expected, const float *got)
{
    for (int s = 0; s < c->n_seq; s++) {
        for (int pos = c->n_old[s]; pos < c->n_old[s] + c->n_new[s]; pos++) {
            for (int head = 0; head < c->n_head; head++) {
                double due[128];
                attend_mma(c, s, pos, head, due);
                const float *const ref = row_of(c, expected, c->first[s] + pos, head);
                const float *const y = row_of(c, got, c->first[s] + pos, head);
                const double bound = 0x1p-8 * (0.5 + score_size(c, s, pos, head)) + 2e-5;
                for (int i = 0; i < c->d_head; i++) {
                    if (!(fabs(due[i] - (double)y[i]) <= 5e-4) ||
                        !(fabs((double)ref[i] - (double)y[i]) <= bound)) {
                        fail_msg("heads of %d, sequence %d, position %d, column %d: expected %.9g "
                                 "as defined, and within %.2g of %.9g, got %.9g",
                                 c->d_head, s, pos, i, due[i], bound, (double)ref[i], (double)y[i]);
                    }
                }
            }
        }
    }
}

/* Rows of requests on tensor cores, in tiles that begin and end anywhere and see several splits,
 * with heads of every width that they take, and pages wherever 16 bytes begin; of heads that are no
 * multiple of 16 columns, wherever 8 do. */
static void test_requests_on_tensor_cores(void **state)
{
    (void)state;
    assert_int_equal(setenv("PKMSERVE_CUDA_ATTENTION", "1", 1), 0);
    for (int d_head = 4; d_head <= 128; d_head += is_few() ? 12 : 4) {
        struct crowd c = {.cache = DTYPE_BF16, .n_head = 2, .d_head = d_head, .compare = check_mma};
        c.shift = d_head == 48 || d_head == 80 ? 8 : d_head == 52 || d_head == 100 ? 4 : 0;
        c.gap = c.shift;
        crowd_add(&c, 59, 70);
        crowd_add(&c, 70, d_head == 64 ? 9 : 2);
        if (d_head == 64) {
            crowd_add(&c, 0, 140);
        }
        check_crowd(&c, d_head == 64 ? 67 : 2);
    }
    assert_int_equal(unsetenv("PKMSERVE_CUDA_ATTENTION"), 0);
}

/* Rows that see several parts, and tiles some of whose rows do: as defined, and the same bits
 * alone, in other tiles, and in a crowd. */
static void test_rows_that_see_several_parts(void **state)
{
    (void)state;
    assert_int_equal(setenv("PKMSERVE_CUDA_ATTENTION", "1", 1), 0);
    for (int n_last = 3; n_last <= 41; n_last += 38) {
        struct crowd c = {.cache = DTYPE_BF16, .n_head = 1, .d_head = 16, .compare = check_mma};
        crowd_add(&c, 990, 70);
        crowd_add(&c, 3 * 1024 - 1, 2);
        crowd_add(&c, 2100, 3);
        crowd_add(&c, 10, 5);
        check_crowd(&c, n_last);
    }
    struct crowd wide = {.cache = DTYPE_BF16, .n_head = 2, .d_head = 128, .compare = check_mma};
    crowd_add(&wide, 2040, 20);
    check_crowd(&wide, 2);
    assert_int_equal(unsetenv("PKMSERVE_CUDA_ATTENTION"), 0);
}

/* Blocks of mma_kernel's one launch in a trace of the double. */
static int blocks_launched(const char *path)
{
    FILE *const file = fopen(path, "r");
    assert_non_null(file);
    char line[500];
    int n = -1;
    while (fgets(line, sizeof line, file) != NULL) {
        const char *const grid = strstr(line, ",1,1\t");
        if (strncmp(line, "launch\t", 7) == 0 && strstr(line, "mma_kernel") != NULL &&
            grid != NULL) {
            const char *begin = grid;
            while (begin > line && begin[-1] != '\t') {
                begin--;
            }
            assert_int_equal(n, -1);
            n = atoi(begin);
        }
    }
    (void)fclose(file);
    return n;
}

/* Few rows over a long text are shared out among blocks as there are multiprocessors for: whether
 * they are changes no bits, nor which block comes last. Rows beside them that see little have one
 * block. */
static void test_long_rows_are_shared_out_to_the_same_bits(void **state)
{
    (void)state;
    static const struct {
        const char *sms, *order;
        int due; /* blocks, of two heads */
    } runs[] = {
        {"1", "forward", 8}, {"4", "reverse", 12}, {"132", "forward", 28}, {"132", "random:7", 28}};
    if (!cuda_library_find() || strstr(getenv("PKMSERVE_CUDA_LIBRARY"), "cudahost") == NULL) {
        skip();
    }
    assert_int_equal(setenv("PKMSERVE_CUDA_ATTENTION", "1", 1), 0);
    struct crowd c = {.cache = DTYPE_BF16, .n_head = 2, .d_head = 16};
    crowd_add(&c, 7000, 5);
    crowd_add(&c, 2300, 66);
    crowd_add(&c, 7, 20);
    crowd_fill(&c);
    float *first = NULL;
    for (size_t i = 0; i < sizeof runs / sizeof *runs; i += is_few() ? 2 : 1) {
        char path[] = "/tmp/test_cuda_attention_mma.XXXXXX";
        const int file = mkstemp(path);
        assert_true(file >= 0);
        assert_int_equal(close(file), 0);
        assert_int_equal(setenv("CUDA_HOST_SMS", runs[i].sms, 1), 0);
        assert_int_equal(setenv("CUDA_HOST_ORDER", runs[i].order, 1), 0);
        assert_int_equal(setenv("CUDA_HOST_TRACE", path, 1), 0);
        float *const y = attended(&c);
        assert_int_equal(blocks_launched(path), runs[i].due);
        (void)unlink(path);
        if (first == NULL) {
            first = y;
            continue;
        }
        const size_t n = (size_t)c.n_position * (size_t)(c.n_head * c.d_head);
        assert_memory_equal(first, y, n * sizeof *y);
        free(y);
    }
    free(first);
    crowd_drop(&c);
    assert_int_equal(unsetenv("CUDA_HOST_SMS") | unsetenv("CUDA_HOST_ORDER"), 0);
    assert_int_equal(unsetenv("CUDA_HOST_TRACE") | unsetenv("PKMSERVE_CUDA_ATTENTION"), 0);
}

/* A value that is no number, or infinite, of a position that others of its tile see and some do
 * not: rows before it have the bits that they have beside numbers, the others are no numbers, in
 * its column alone. */
static void test_values_that_are_no_numbers_disturb_no_row_before(void **state)
{
    (void)state;
    enum { COLUMN = 21 };
    static const float bad[] = {NAN, INFINITY};
    if (!cuda_library_find()) {
        skip();
    }
    for (int run = 0; run < 3; run++) { /* F32; heads of no multiple of 16; a part's border */
        assert_int_equal(setenv("PKMSERVE_CUDA_ATTENTION", run == 0 ? "0" : "1", 1), 0);
        struct crowd c = {.cache = DTYPE_BF16, .n_head = 1, .d_head = run == 1 ? 36 : 32};
        const int n_old = run == 2 ? 1003 : 3;
        const int broken = n_old + 77;
        crowd_add(&c, n_old, 110);
        crowd_fill(&c);
        float *const clean = attended(&c);
        for (int b = 0; b < 2; b++) {
            c.v[broken * c.d_head + COLUMN] = bad[b];
            float *const y = attended(&c);
            for (int i = n_old * c.d_head; i < c.n_position * c.d_head; i++) {
                const bool sees = i / c.d_head >= broken && i % c.d_head == COLUMN;
                if (sees ? isfinite(y[i]) : memcmp(&y[i], &clean[i], sizeof *y) != 0) {
                    fail_msg("position %d, column %d: %.9g, and beside numbers %.9g", i / c.d_head,
                             i % c.d_head, (double)y[i], (double)clean[i]);
                }
            }
            free(y);
        }
        free(clean);
        crowd_drop(&c);
    }
    assert_int_equal(unsetenv("PKMSERVE_CUDA_ATTENTION"), 0);
}

/* A matrix of one element, of which the backend learns what a model's weights are. */
static struct weight *matrix_new(struct backend *be, enum dtype dtype)
{
    static const float one = 1;
    const struct tensor host = tensor_make((void *)(uintptr_t)&one, 1, 1, DTYPE_F32);
    const struct weight_desc desc = {
        .kind = WEIGHT_MATRIX, .dtype = dtype, .placement = PLACEMENT_DEVICE, .n_group = 1};
    struct weight *w = NULL;
    assert_int_equal(be->op->weight_new(be, &w, &host, &desc, "matrix", NULL), ERR_OK);
    return w;
}

/* Tensor cores are used, unless asked not to, for rows of requests, a cache in BF16, heads that
 * fit, and weights that are not all F32. */
static void test_tensor_cores_are_used_where_they_may_be_unless_asked_not_to(void **state)
{
    (void)state;
    static const struct {
        enum dtype cache;
        int d_head, n_new, n_f32, n_bf16; /* matrices */
        bool due;
    } cases[] = {
        {DTYPE_BF16, 32, 5, 0, 0, true},  {DTYPE_BF16, 32, 5, 1, 1, true},
        {DTYPE_BF16, 32, 5, 1, 0, false}, {DTYPE_BF16, 32, 1, 0, 0, false},
        {DTYPE_F32, 32, 5, 0, 0, false},  {DTYPE_BF16, 100, 5, 0, 0, true},
        {DTYPE_BF16, 30, 5, 0, 0, false}, {DTYPE_BF16, 132, 5, 0, 0, false},
    };
    if (!cuda_library_find()) {
        skip();
    }
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct crowd c = {.cache = cases[i].cache, .n_head = 1, .d_head = cases[i].d_head};
        crowd_add(&c, 20, cases[i].n_new);
        crowd_fill(&c);
        const int begin[1] = {0};
        const int end[1] = {c.n_position};
        float *out[2];
        for (int asked = 0; asked < 2; asked++) {
            assert_int_equal(setenv("PKMSERVE_CUDA_ATTENTION", asked == 0 ? "0" : "1", 1), 0);
            struct side side = side_new("cuda", &c);
            struct weight *const f32 = cases[i].n_f32 > 0 ? matrix_new(side.be, DTYPE_F32) : NULL;
            struct weight *const bf16 =
                cases[i].n_bf16 > 0 ? matrix_new(side.be, DTYPE_BF16) : NULL;
            out[asked] = out_new(&c);
            store(&side, &c, begin, end);
            assert_int_equal(attend(&side, &c, c.n_old, end, out[asked], NULL), ERR_OK);
            side.be->op->weight_free(side.be, f32);
            side.be->op->weight_free(side.be, bf16);
            side_close(&side, &c);
        }
        const size_t bytes = (size_t)(c.n_position * c.d_head) * sizeof(float);
        if ((memcmp(out[0], out[1], bytes) != 0) != cases[i].due) {
            fail_msg("case %zu: tensor cores were %sused", i, cases[i].due ? "not " : "");
        }
        free(out[0]);
        free(out[1]);
        crowd_drop(&c);
    }
    assert_int_equal(unsetenv("PKMSERVE_CUDA_ATTENTION"), 0);
}

/* The product that follows takes the rows as attention has rounded them: to the bits that it gives
 * when another op stands in between and it rounds them itself. */
static void test_rows_are_rounded_for_the_product(void **state)
{
    (void)state;
    enum { D = 64, N_OUT = 32 };
    static const int begin[1] = {0};
    if (!cuda_library_find()) {
        skip();
    }
    struct crowd c = {.cache = DTYPE_BF16, .n_head = 2, .d_head = D / 2};
    crowd_add(&c, 20, 70);
    crowd_fill(&c);
    const int end[1] = {c.n_position};
    struct side side = side_new("cuda", &c);
    float numbers[N_OUT * D];
    uint32_t seed = 7;
    for (int i = 0; i < N_OUT * D; i++) {
        numbers[i] = random_float(&seed);
    }
    const struct tensor host = tensor_make(numbers, N_OUT, D, DTYPE_F32);
    const struct weight_desc desc = {
        .kind = WEIGHT_MATRIX, .dtype = DTYPE_BF16, .placement = PLACEMENT_DEVICE, .n_group = 1};
    struct weight *w = NULL;
    assert_int_equal(side.be->op->weight_new(side.be, &w, &host, &desc, "out", NULL), ERR_OK);
    const struct tensor z = buffer_new(side.be, c.n_position, N_OUT, DTYPE_F32);
    const struct tensor other = tensor_head(side.k, 1);
    const struct tensor none = {0};
    float *const attended_rows = out_new(&c);
    float results[2][70 * N_OUT];
    store(&side, &c, begin, end);
    for (int apart = 0; apart < 2; apart++) {
        assert_int_equal(attend(&side, &c, c.n_old, end, attended_rows, NULL), ERR_OK);
        if (apart == 1) {
            op_gate(side.be, other, other, other, GATE_SILU);
        }
        op_linear(side.be, tensor_head(z, 70), tensor_head(side.y, 70), w, none, ACT_NONE);
        side.be->op->download(side.be, results[apart], tensor_head(z, 70));
    }
    assert_memory_equal(results[0], results[1], sizeof results[0]);
    assert_true(results[0][0] != 0 && isfinite(results[0][70 * N_OUT - 1]));
    free(attended_rows);
    side.be->op->weight_free(side.be, w);
    side.be->op->buffer_free(side.be, z.data);
    side_close(&side, &c);
    crowd_drop(&c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rows_are_rounded_for_the_product),
        cmocka_unit_test(test_requests_on_tensor_cores),
        cmocka_unit_test(test_rows_that_see_several_parts),
        cmocka_unit_test(test_long_rows_are_shared_out_to_the_same_bits),
        cmocka_unit_test(test_values_that_are_no_numbers_disturb_no_row_before),
        cmocka_unit_test(test_tensor_cores_are_used_where_they_may_be_unless_asked_not_to),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
