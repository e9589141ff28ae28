/* The CUDA backend's matrix products where test_kernels does not reach: every tile of the kernels
 * for few rows and for many, sums of several rounds of chunks, passes of more rows than are
 * prepared at once, and the products of cuBLASLt, for rows of requests and with fast math. Cutting
 * a call into pieces takes its rows from one kernel to another; the bits must stay. One row of NaN
 * and one of infinities stand in each crowd. */
#include "tests/kernels/cuda_product.h"

#include <stdio.h>
#include <unistd.h>

/* Of the double's 8 multiprocessors, these take every tile; of a large GPU the last two take the
 * large ones. */
static const struct shape shapes[] = {
    {130, 40, 70, 0},    {200, 70, 129, 1},  {129, 300, 65, 0},  {256, 513, 33, 3},
    {65, 1, 1500, 0},    {300, 64, 256, 0},  {70, 1100, 300, 2}, {128, 256, 128, 0},
    {66, 95, 2500, 1},   {2100, 33, 100, 0}, {20, 2300, 40, 0},  {3, 4700, 33, 1},
    {140, 257, 1100, 0}, {67, 128, 1200, 0},
};
enum { N_SHAPE = sizeof shapes / sizeof *shapes };
enum { GEMV_IN_MAX = 152 * 128 }; /* kernels/cuda/linear.cuh: columns that gemv takes */

/* Under a slow sanitizer every n-th of them must do. */
static int few_of(int n)
{
    return getenv("TEST_FEW") != NULL ? n : 1;
}

static void test_pieces_have_the_bits_of_the_whole(void **state)
{
    (void)state;
    struct backend *const be = cuda_open(OWN);
    for (int i = 0; i < N_SHAPE; i += few_of(3)) {
        const enum act act = (enum act)(i % 3);
        check_pieces(be, &shapes[i], DTYPE_BF16, act);
        check_pieces(be, &shapes[i], DTYPE_F32, act);
        if (i % 2 == 0) { /* the same kernels, of another type */
            check_pieces(be, &shapes[i], DTYPE_F16, act);
        }
    }
    backend_close(be);
}

/* Within rounding of ref's values, where the first rows are left out of the call; rows of NaN and
 * infinity aside. */
static void check_close(struct backend *be, const struct shape *shape, enum dtype dtype,
                        enum act act, bool has_bias, int first)
{
    struct product p;
    product_open(&p, be, *shape, dtype);
    struct backend *ref = NULL;
    assert_int_equal(ref_open(&ref, NULL), ERR_OK);
    const struct weight_desc desc = {
        .kind = WEIGHT_MATRIX, .dtype = dtype, .placement = PLACEMENT_DEVICE, .n_group = 1};
    struct weight *w = NULL;
    assert_int_equal(ref->op->weight_new(ref, &w, &p.host_w, &desc, "w", NULL), ERR_OK);
    const struct tensor none = {0};
    const struct tensor expected = random_tensor(shape->n_tok, shape->n_out, 1);
    op_linear(ref, expected, p.host_x, w, has_bias ? p.host_bias : none, act);
    const int n = shape->n_tok - first;
    op_linear(be, tensor_rows(p.y, first, n), tensor_rows(p.x, first, n), p.w,
              has_bias ? p.bias : none, act);
    uint32_t *const bits = product_bits(&p, be);
    /* of the sum of a row's absolute products, which is a quarter of √n_in, and the bias */
    const double allowed = 4e-6 * (0.25 * sqrt(shape->n_in) + 1);
    for (int i = first * shape->n_out; i < shape->n_tok * shape->n_out; i++) {
        const int row = i / shape->n_out;
        float got;
        memcpy(&got, &bits[i], sizeof got);
        const double wanted = (double)((const float *)expected.data)[i];
        if (row != shape->n_tok / 2 && row != shape->n_tok - 1 &&
            !(fabs((double)got - wanted) <= allowed)) {
            fail_msg("%s [%d, %d] x [%d], act %d: row %d, output %d: expected %g within %g, got %g",
                     dtype_name(dtype), shape->n_tok, shape->n_in, shape->n_out, (int)act, row,
                     i % shape->n_out, wanted, allowed, (double)got);
        }
    }
    free(bits);
    free(expected.data);
    ref->op->weight_free(ref, w);
    backend_close(ref);
    product_close(&p, be);
}

/* Twice, so that the second time finds what cuBLASLt was asked for in the first. */
static void test_fast_math_is_close_to_ref(void **state)
{
    (void)state;
    struct backend *const be = cuda_open(FAST);
    for (int i = 0; i < 2 * N_SHAPE; i += few_of(3)) {
        const enum act act = (enum act)(i % N_SHAPE % 3);
        const bool has_bias = i % N_SHAPE % 4 != 0;
        check_close(be, &shapes[i % N_SHAPE], DTYPE_BF16, act, has_bias, 0);
        check_close(be, &shapes[i % N_SHAPE], i < N_SHAPE ? DTYPE_F16 : DTYPE_F32, act, has_bias,
                    0);
    }
    backend_close(be);
}

/* Rows of F32 are read where they are: at 16 .. 256 bytes, which the algorithm must know. */
static void test_fast_math_takes_rows_at_any_address(void **state)
{
    (void)state;
    static const struct shape wide = {132, 80, 96, 0};
    struct backend *const be = cuda_open(FAST);
    for (int first = 0; first < 5; first++) {
        check_close(be, &wide, DTYPE_F32, ACT_NONE, true, first);
        check_close(be, &wide, DTYPE_BF16, ACT_NONE, true, first);
        check_close(be, &wide, DTYPE_F16, ACT_NONE, true, first);
    }
    backend_close(be);
}

static int n_different(struct shape shape, enum dtype dtype)
{
    uint32_t *const fast = bits_of(FAST, shape, dtype);
    uint32_t *const usual = bits_of(OWN, shape, dtype);
    const int n = n_unequal(fast, usual, shape);
    free(fast);
    free(usual);
    return n;
}

/* Fast math lays weights out for cuBLASLt, which few rows do not go to: they read them there, and
 * their bits are those without it. Many rows do go there. */
static void test_fast_math_keeps_the_bits_of_few_rows(void **state)
{
    (void)state;
    static const struct shape few[] = {{1, 513, 33, 0}, {3, 4700, 33, 1}, {16, 300, 65, 0},
                                       {8, 70, 129, 1}, {4, 16, 16, 0},   {2, 1100, 300, 2}};
    static const struct shape many = {400, 64, 1100, 0}; /* on a GPU too */
    for (size_t i = 0; i < sizeof few / sizeof *few; i++) {
        assert_int_equal(n_different(few[i], DTYPE_BF16), 0);
        assert_int_equal(n_different(few[i], DTYPE_F16), 0);
        assert_int_equal(n_different(few[i], DTYPE_F32), 0);
    }
    assert_true(n_different(many, DTYPE_BF16) > 0);
    assert_true(n_different(many, DTYPE_F16) > 0);
    assert_true(n_different(many, DTYPE_F32) > 0);
}

/* What cuBLASLt has no algorithm for, own kernels compute from weights that lie for it. */
static void test_fast_math_without_an_algorithm_has_own_bits(void **state)
{
    (void)state;
    static const struct shape many = {300, 300, 1100, 0};
    static const enum dtype dtypes[] = {DTYPE_F32, DTYPE_BF16, DTYPE_F16};
    for (int i = 0; i < 3; i++) {
        uint32_t *const own = bits_of(OWN, many, dtypes[i]);
        struct backend *const be = cuda_open_double(FAST, "");
        uint32_t *const bits = bits_on(be, many, dtypes[i]);
        assert_int_equal(n_unequal(bits, own, many), 0);
        backend_close(be);
        free(bits);
        free(own);
    }
}

/* ---- rows of requests by cuBLASLt ---- */

/* Also of more rows than a call has, of rows at odd addresses, of fewer than a call has at least,
 * and where own kernels multiply: of 70 outputs. */
static void test_rows_of_requests_have_the_same_bits_in_pieces(void **state)
{
    (void)state;
    static const struct shape more[] = {{100, 64, 64, 0}, {290, 40, 68, 0}, {45, 300, 96, 1},
                                        {1, 32, 4, 0},    {50, 64, 70, 0},  {140, 65, 132, 4}};
    struct backend *const be = cuda_open(LT);
    for (size_t i = 0; i < sizeof more / sizeof *more; i += (size_t)few_of(2)) {
        check_pieces(be, &more[i], DTYPE_BF16, (enum act)(i % 3));
        check_close(be, &more[i], DTYPE_BF16, (enum act)(i % 3), i % 2 == 0, 0);
        if (i % 2 == 0) {
            check_pieces(be, &more[i], DTYPE_F16, (enum act)(i % 3));
            check_close(be, &more[i], DTYPE_F16, (enum act)(i % 3), i % 4 == 0, 0);
        }
    }
    assert_non_null(strstr(be->products, "70x64 own kernels"));
    assert_non_null(strstr(be->products, "70x64 f16 own kernels"));
    assert_string_equal(be->warning, "");
    backend_close(be);
}

/* Of what cuBLASLt recommends, the first is taken that depends on neither the number of rows nor
 * their place, splits nothing, takes any number of rows and is right; where none is, own kernels
 * multiply. Which, is said. */
static void test_the_first_algorithm_that_passes_is_taken(void **state)
{
    static const struct {
        const char *letters, *said;
        bool is_own;
    } cases[] = {
        {"vlpasrnwbg", "cuBLASLt 1234; 64x64 103/20/8", false}, /* 'g' */
        {"g", "cuBLASLt 1234; 64x64 103/20/8", false},
        {"v", "cuBLASLt 1234; 64x64 own kernels", true},
        {"l", "cuBLASLt 1234; 64x64 own kernels", true},
        {"p", "cuBLASLt 1234; 64x64 own kernels", true},
        {"a", "cuBLASLt 1234; 64x64 own kernels", true},
        {"s", "cuBLASLt 1234; 64x64 own kernels", true},
        {"r", "cuBLASLt 1234; 64x64 own kernels", true},
        {"n", "cuBLASLt 1234; 64x64 own kernels", true},
        {"w", "cuBLASLt 1234; 64x64 own kernels", true},
        {"b", "cuBLASLt 1234; 64x64 own kernels", true},
        {"", "cuBLASLt 1234; 64x64 own kernels", true},
    };
    static const struct shape shape = {40, 64, 64, 0};
    (void)state;
    struct backend *be = cuda_open(OWN);
    uint32_t *const own = bits_on(be, shape, DTYPE_BF16);
    assert_string_equal(be->products, "own kernels: PKMSERVE_CUDA_LT=0");
    backend_close(be);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        be = cuda_open_double(LT, cases[i].letters);
        uint32_t *const bits = bits_on(be, shape, DTYPE_BF16);
        const bool is_own = n_unequal(bits, own, shape) == 0;
        if (strcmp(be->products, cases[i].said) != 0 || is_own != cases[i].is_own) {
            fail_msg("algorithms \"%s\": expected \"%s\" and %s bits, got \"%s\" and %s",
                     cases[i].letters, cases[i].said, cases[i].is_own ? "own" : "other",
                     be->products, is_own ? "own" : "other");
        }
        free(bits);
        backend_close(be);
    }
    free(own);
}

/* Calls of some sizes have other algorithms than that which defines the bits, where those are as
 * they are: 'k', which is as good and as fast, has others. */
static void test_calls_of_every_size_have_the_same_bits(void **state)
{
    static const struct shape shape = {140, 64, 64, 0};
    (void)state;
    struct backend *const alone = cuda_open_double(LT, "k");
    uint32_t *const other = bits_on(alone, shape, DTYPE_BF16);
    struct backend *const be = cuda_open_double(LT, "gkl");
    uint32_t *const bits = bits_on(be, shape, DTYPE_BF16);
    assert_true(n_unequal(bits, other, shape) > 0);
    check_pieces(be, &shape, DTYPE_BF16, ACT_NONE);
    assert_string_equal(be->products, "cuBLASLt 1234; 64x64 103/20/8");
    free(bits);
    free(other);
    backend_close(be);
    backend_close(alone);
}

/* An algorithm that is good for one type need not be for the other. */
static void test_each_type_has_an_algorithm_of_its_own(void **state)
{
    static const struct shape shape = {40, 64, 64, 0};
    (void)state;
    struct backend *const own = cuda_open(OWN);
    struct backend *be = cuda_open_double(LT, "g");
    (void)setenv("CUDA_HOST_LT_F16", "l", 1);
    for (int i = 0; i < 2; i++) {
        const enum dtype dtype = i == 0 ? DTYPE_F16 : DTYPE_BF16;
        uint32_t *const wanted = bits_on(own, shape, dtype);
        uint32_t *const bits = bits_on(be, shape, dtype);
        assert_int_equal(n_unequal(bits, wanted, shape) == 0, dtype == DTYPE_F16);
        free(bits);
        free(wanted);
    }
    assert_string_equal(be->products, "cuBLASLt 1234; 64x64 f16 own kernels; 64x64 103/20/8");
    backend_close(be);
    (void)setenv("CUDA_HOST_LT_F16", "vg", 1);
    be = cuda_open_double(LT, "");
    free(bits_on(be, shape, DTYPE_F16));
    assert_string_equal(be->products, "cuBLASLt 1234; 64x64 f16 103/20/8");
    backend_close(be);
    backend_close(own);
}

/* The bits of a row are those of F16 operands: three more than BF16 keeps. */
static void test_f16_keeps_what_bf16_loses(void **state)
{
    static const struct shape shape = {40, 64, 64, 0};
    (void)state;
    static const enum who all[] = {OWN, LT, FAST};
    for (int i = 0; i < 3; i++) {
        struct backend *const be = cuda_open(all[i]);
        double off[2] = {0};
        struct product exact;
        product_open(&exact, be, shape, DTYPE_F32);
        const float *const w = exact.host_w.data;
        const float *const x = exact.host_x.data;
        const float *const bias = exact.host_bias.data;
        for (int t = 0; t < 2; t++) {
            struct product p;
            product_open(&p, be, shape, t == 0 ? DTYPE_BF16 : DTYPE_F16);
            op_linear(be, p.y, p.x, p.w, p.bias, ACT_NONE);
            float *const y = (float *)product_bits(&p, be);
            for (int o = 0; o < shape.n_out; o++) { /* of the first row */
                double sum = (double)bias[o];
                for (int k = 0; k < shape.n_in; k++) {
                    sum += (double)w[o * shape.n_in + k] * (double)x[k];
                }
                off[t] += fabs(sum - (double)y[o]);
            }
            free(y);
            product_close(&p, be);
        }
        assert_true(off[1] < 0.2 * off[0]);
        product_close(&exact, be);
        backend_close(be);
    }
}

/* A library that fails in service costs a line and no request; it is not asked again. */
static void test_a_failing_product_is_computed_by_own_kernels(void **state)
{
    static const struct shape shape = {90, 64, 64, 0};
    (void)state;
    uint32_t *const own = bits_of(OWN, shape, DTYPE_BF16);
    struct backend *const be = cuda_open_double(LT, "g");
    struct product p;
    product_open(&p, be, shape, DTYPE_BF16);
    for (int i = 0; i < 3; i++) {
        if (i == 1) {
            (void)setenv("CUDA_HOST_LT_FAIL", "1", 1);
        } else {
            (void)unsetenv("CUDA_HOST_LT_FAIL");
        }
        op_linear(be, p.y, p.x, p.w, p.bias, ACT_RELU);
        uint32_t *const bits = product_bits(&p, be);
        assert_int_equal(n_unequal(bits, own, shape) > 0, i == 0);
        assert_int_equal(strstr(be->warning, "cuBLASLt fails in a product of 90 rows by 64x64 "
                                             "weights: failure; own kernels multiply") != NULL,
                         i == 1);
        be->warning[0] = '\0';
        free(bits);
    }
    product_close(&p, be);
    backend_close(be);
    free(own);
}

/* What is short for the choice is enough for serving without it. */
static void test_too_little_memory_to_choose_leaves_own_kernels(void **state)
{
    static const struct shape shape = {20, 256, 4096, 0};
    (void)state;
    uint32_t *const own = bits_of(OWN, shape, DTYPE_BF16);
    (void)setenv("CUDA_HOST_MEMORY", "10M", 1);
    struct backend *const be = cuda_open_double(LT, "g");
    uint32_t *const bits = bits_on(be, shape, DTYPE_BF16);
    assert_non_null(strstr(be->products, "4096x256 own kernels (no memory to try others)"));
    assert_int_equal(n_unequal(bits, own, shape), 0);
    backend_close(be);
    free(bits);
    free(own);
}

/* To the bits they have without it, however many share the step: few or many rows of weights that
 * lie for cuBLASLt. */
static void test_drawn_tokens_do_not_go_to_cublaslt(void **state)
{
    (void)state;
    for (int i = 0; i < 2; i++) {
        const enum dtype dtype = i == 0 ? DTYPE_BF16 : DTYPE_F16;
        uint32_t *const own = drawn_bits(OWN, dtype);
        uint32_t *const lt = drawn_bits(LT, dtype);
        assert_int_equal(n_unequal(own, lt, drawn_shape), 0);
        free(own);
        free(lt);
    }
}

/* ---- blocks of few rows ---- */

/* Blocks of the kernel that a product of drawn tokens launches; gemm's is called kernel where it is
 * launched. */
static int n_block_by(const char *kernel, enum who who, enum dtype dtype, struct shape shape)
{
    static const struct step_limits limits = {
        .n_tok_max = 256, .n_seq_max = 256, .n_page_max = 1, .n_out_max = 1};
    char path[] = "/tmp/test_cuda.XXXXXX";
    char line[600];
    int n_block = 0;
    struct product p;
    struct step *step = NULL;
    const int file = mkstemp(path);
    assert_true(file >= 0);
    FILE *const lines = fdopen(file, "r");
    (void)setenv("CUDA_HOST_TRACE", path, 1);
    struct backend *const be = cuda_open_double(who, "g");
    (void)unsetenv("CUDA_HOST_TRACE");
    product_open(&p, be, shape, dtype);
    assert_int_equal(be->op->step_new(be, &step, &limits, NULL), ERR_OK);
    step->n_tok = step->n_seq = shape.n_tok;
    step->is_drawn = true;
    for (int i = 0; i <= shape.n_tok; i++) {
        step->seq_first[i] = i;
    }
    be->op->step_begin(be, step);
    op_linear(be, p.y, p.x, p.w, p.bias, ACT_NONE);
    assert_int_equal(be->op->finish(be, step, NULL), ERR_OK);
    while (fgets(line, sizeof line, lines) != NULL) { /* the last: others are a choice's */
        const char *at = strstr(line, kernel);
        int grid[3];
        for (int field = 0; at != NULL && field < 2; field++) { /* name, range, grid */
            at = strchr(at, '\t');
            at = at == NULL ? NULL : at + 1;
        }
        if (at != NULL && sscanf(at, "%d,%d,%d", &grid[0], &grid[1], &grid[2]) == 3) {
            n_block = grid[0] * grid[1] * grid[2];
        }
    }
    product_close(&p, be);
    be->op->step_free(be, step);
    backend_close(be);
    (void)fclose(lines);
    (void)unlink(path);
    return n_block;
}

static int n_block_of(enum who who, struct shape shape, enum dtype dtype)
{
    return n_block_by("gemv_kernel", who, dtype, shape);
}

/* Where a tile of outputs for all tokens would leave four of 8 multiprocessors idle, blocks have
 * fewer tokens. */
static void test_few_outputs_of_more_tokens_are_shared_out_too(void **state)
{
    (void)state;
    need_double();
    assert_int_equal(n_block_of(OWN, (struct shape){16, 96, 64, 0}, DTYPE_BF16), 8);
    assert_int_equal(n_block_of(OWN, (struct shape){32, 96, 64, 0}, DTYPE_BF16), 8);
    assert_int_equal(n_block_of(OWN, (struct shape){32, 96, 80, 0}, DTYPE_BF16), 5);
    assert_int_equal(n_block_by("kernel\t", OWN, DTYPE_BF16, (struct shape){256, 64, 64, 0}), 8);
    assert_int_equal(n_block_by("kernel\t", OWN, DTYPE_F32, (struct shape){256, 64, 64, 0}), 8);
    assert_int_equal(n_block_by("gemv_kernel_f32", OWN, DTYPE_F32, (struct shape){8, 96, 64, 0}),
                     8);
    assert_int_equal(n_block_by("gemv_kernel_f32", OWN, DTYPE_F32, (struct shape){1, 96, 80, 0}),
                     5);
}

/* They go through the outputs one after the other, with the next weights under way. */
static void test_many_outputs_have_a_block_for_each_multiprocessor(void **state)
{
    (void)state;
    need_double();
    for (int n_tok = 1; n_tok <= 8; n_tok++) {
        assert_int_equal(n_block_of(OWN, (struct shape){n_tok, 64, 1000, 0}, DTYPE_BF16), 8);
    }
}

/* Without gemm (PKMSERVE_CUDA_GEMM=0) gemv multiplies many rows as it does few, but for weights
 * that are too wide for it; not a bit changes. */
static void test_gemv_gives_the_bits_of_gemm(void **state)
{
    static const enum dtype dtypes[] = {DTYPE_F32, DTYPE_BF16, DTYPE_F16};
    static const struct shape many = {256, 64, 64, 0};
    static const struct shape wide = {2, GEMV_IN_MAX + 1, 16, 0};
    (void)state;
    for (int i = 0; i < 3; i++) {
        uint32_t *const by_gemm = bits_of(OWN, shapes[0], dtypes[i]);
        uint32_t *const drawn = i == 0 ? NULL : drawn_bits(LT, dtypes[i]);
        (void)setenv("PKMSERVE_CUDA_GEMM", "0", 1);
        uint32_t *const by_gemv = bits_of(OWN, shapes[0], dtypes[i]);
        uint32_t *const drawn_by_gemv = i == 0 ? NULL : drawn_bits(LT, dtypes[i]);
        (void)unsetenv("PKMSERVE_CUDA_GEMM");
        assert_int_equal(n_unequal(by_gemm, by_gemv, shapes[0]), 0);
        assert_int_equal(i == 0 ? 0 : n_unequal(drawn, drawn_by_gemv, drawn_shape), 0);
        free(by_gemm);
        free(drawn);
        free(by_gemv);
        free(drawn_by_gemv);
    }
    need_double();
    assert_int_equal(n_block_of(OWN, many, DTYPE_BF16), 0);
    (void)setenv("PKMSERVE_CUDA_GEMM", "0", 1);
    assert_true(n_block_of(OWN, many, DTYPE_BF16) > 0);
    assert_true(n_block_of(OWN, many, DTYPE_F32) > 0);
    assert_int_equal(n_block_of(OWN, wide, DTYPE_BF16), 0);
    (void)unsetenv("PKMSERVE_CUDA_GEMM");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(test_pieces_have_the_bits_of_the_whole, usual_device),
        cmocka_unit_test_setup(test_fast_math_is_close_to_ref, usual_device),
        cmocka_unit_test_setup(test_fast_math_takes_rows_at_any_address, usual_device),
        cmocka_unit_test_setup(test_fast_math_keeps_the_bits_of_few_rows, usual_device),
        cmocka_unit_test_setup(test_fast_math_without_an_algorithm_has_own_bits, usual_device),
        cmocka_unit_test_setup(test_rows_of_requests_have_the_same_bits_in_pieces, usual_device),
        cmocka_unit_test_setup(test_the_first_algorithm_that_passes_is_taken, usual_device),
        cmocka_unit_test_setup(test_calls_of_every_size_have_the_same_bits, usual_device),
        cmocka_unit_test_setup(test_each_type_has_an_algorithm_of_its_own, usual_device),
        cmocka_unit_test_setup(test_f16_keeps_what_bf16_loses, usual_device),
        cmocka_unit_test_setup(test_a_failing_product_is_computed_by_own_kernels, usual_device),
        cmocka_unit_test_setup(test_too_little_memory_to_choose_leaves_own_kernels, usual_device),
        cmocka_unit_test_setup(test_drawn_tokens_do_not_go_to_cublaslt, usual_device),
        cmocka_unit_test_setup(test_few_outputs_of_more_tokens_are_shared_out_too, usual_device),
        cmocka_unit_test_setup(test_many_outputs_have_a_block_for_each_multiprocessor,
                               usual_device),
        cmocka_unit_test_setup(test_gemv_gives_the_bits_of_gemm, usual_device),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
