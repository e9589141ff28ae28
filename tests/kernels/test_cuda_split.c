/* F32 weights that are split for rows of requests (kernels/cuda/linear_split.cu): how far their
 * products are from float64's, that a row has the same bits in every call, and where they are not
 * used. */
#include "tests/kernels/cuda_product.h"

#include <stdio.h>

static int split_weights(void **state)
{
    (void)usual_device(state);
    return setenv("PKMSERVE_CUDA_SPLIT", "1", 1);
}

/* By gemv, gemm and cuBLASLt, in one pass and in several, of outputs that cuBLASLt takes and
 * not. */
static const struct shape split_shapes[] = {
    {1, 32, 64, 0}, {5, 512, 36, 0}, {40, 96, 70, 1}, {150, 64, 64, 3}, {70, 32, 300, 0},
};
enum { N_SPLIT_SHAPE = sizeof split_shapes / sizeof *split_shapes };

/* The largest error of y, in the sum of absolute products and the bias, beside float64. */
static double split_error(struct backend *be, struct shape shape)
{
    struct product p;
    product_open(&p, be, shape, DTYPE_F32);
    op_linear(be, p.y, p.x, p.w, p.bias, ACT_NONE);
    uint32_t *const bits = product_bits(&p, be);
    double largest = 0;
    for (int r = 0; r < shape.n_tok; r++) {
        const float *const x = (const float *)p.host_x.data + r * shape.n_in;
        for (int o = 0; o < shape.n_out && isfinite(x[0]); o++) {
            const float *const w = (const float *)p.host_w.data + o * shape.n_in;
            const double bias = (double)((const float *)p.host_bias.data)[o];
            double sum = bias;
            double magnitude = fabs(bias);
            for (int k = 0; k < shape.n_in; k++) {
                sum += (double)x[k] * (double)w[k];
                magnitude += fabs((double)x[k] * (double)w[k]);
            }
            float got;
            memcpy(&got, &bits[r * shape.n_out + o], sizeof got);
            const double error = fabs((double)got - sum) / magnitude;
            largest = error > largest ? error : largest;
        }
    }
    free(bits);
    product_close(&p, be);
    return largest;
}

/* Within 2^-16, and no further off than BF16 weights would be. */
static void test_split_weights_are_close_to_float64(void **state)
{
    static const char *const names[] = {"own kernels", "cuBLASLt", "fast math"};
    (void)state;
    for (int who = OWN; who <= FAST; who++) {
        struct backend *const be = cuda_open((enum who)who);
        for (int i = 0; i < N_SPLIT_SHAPE; i++) {
            const double error = split_error(be, split_shapes[i]);
            if (!(error <= 0x1p-16)) {
                fail_msg("%s, [%d, %d] x [%d]: expected an error of at most 2^-16, got 2^%.2f",
                         names[who], split_shapes[i].n_tok, split_shapes[i].n_in,
                         split_shapes[i].n_out, log2(error));
            }
        }
        backend_close(be);
    }
}

/* The product of numbers of which the halves leave most; others are 0. */
static void test_a_single_split_product_may_be_2_15_off(void **state)
{
    enum { N = 32 };
    float x[N] = {0x1.01008p0f};
    float got = 0;
    void *buffer = NULL;
    struct weight *w = NULL;
    (void)state;
    struct backend *const be = cuda_open(OWN);
    const struct tensor host = tensor_make(x, 1, N, DTYPE_F32);
    const struct weight_desc desc = {.kind = WEIGHT_MATRIX,
                                     .dtype = DTYPE_F32,
                                     .placement = PLACEMENT_DEVICE,
                                     .n_group = 1,
                                     .is_split = true};
    assert_int_equal(be->op->weight_new(be, &w, &host, &desc, "w", NULL), ERR_OK);
    assert_int_equal(be->op->buffer_new(be, &buffer, (N + 4) * sizeof(float), "test", NULL),
                     ERR_OK);
    const struct tensor device = tensor_make(buffer, 1, N, DTYPE_F32);
    const struct tensor y = tensor_make((float *)buffer + N, 1, 1, DTYPE_F32);
    const struct tensor none = {0};
    be->op->upload(be, device, x);
    op_linear(be, y, device, w, none, ACT_NONE);
    be->op->download(be, &got, y);
    const double due = (double)x[0] * (double)x[0];
    const double error = fabs((double)got - due) / due;
    assert_true(error < 0x1p-15 && error > 0x1p-15 * 0.99);
    be->op->buffer_free(be, buffer);
    be->op->weight_free(be, w);
    backend_close(be);
}

static void test_split_rows_have_the_same_bits_in_pieces(void **state)
{
    (void)state;
    for (int who = OWN; who <= LT; who++) {
        struct backend *const be = cuda_open((enum who)who);
        for (int i = 0; i < N_SPLIT_SHAPE; i++) {
            check_pieces(be, &split_shapes[i], DTYPE_F32, (enum act)(i % 3));
        }
        backend_close(be);
    }
}

/* Drawn tokens stay as they are; rows of requests do not, unless the path is left out. Weights
 * of other than whole blocks of columns are not split. */
static void test_split_weights_multiply_rows_of_requests_alone(void **state)
{
    static const struct shape shape = {40, 96, 64, 0};
    static const struct shape odd = {40, 95, 64, 0};
    (void)state;
    uint32_t *const split = bits_of(OWN, shape, DTYPE_F32);
    uint32_t *const odd_split = bits_of(OWN, odd, DTYPE_F32);
    uint32_t *const drawn_split = drawn_bits(OWN, DTYPE_F32);
    struct backend *const be = cuda_open(LT);
    struct product p;
    product_open(&p, be, shape, DTYPE_F32);
    const size_t n = (size_t)shape.n_in * (size_t)shape.n_out;
    assert_int_equal(be->op->weight_bytes(p.w), n * sizeof(float) + 3 * n * sizeof(uint16_t));
    for (int i = 0; i < be->n_fast_path; i++) {
        be->op->fast_path_use(be, i, false);
    }
    op_linear(be, p.y, p.x, p.w, p.bias, ACT_RELU);
    uint32_t *const fallen = product_bits(&p, be);
    product_close(&p, be);
    backend_close(be);
    (void)setenv("PKMSERVE_CUDA_SPLIT", "0", 1);
    uint32_t *const whole = bits_of(OWN, shape, DTYPE_F32);
    uint32_t *const odd_whole = bits_of(OWN, odd, DTYPE_F32);
    uint32_t *const drawn_whole = drawn_bits(OWN, DTYPE_F32);
    assert_true(n_unequal(split, whole, shape) > shape.n_tok);
    assert_int_equal(n_unequal(fallen, whole, shape), 0);
    assert_int_equal(n_unequal(odd_split, odd_whole, odd), 0);
    assert_int_equal(n_unequal(drawn_split, drawn_whole, drawn_shape), 0);
    uint32_t *const all[] = {split, odd_split, drawn_split, fallen, whole, odd_whole, drawn_whole};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        free(all[i]);
    }
}

/* Whatever allocation fails, nothing is left behind, and the next attempt has what it needs. */
static void test_too_little_memory_to_split(void **state)
{
    static const float some[32 * 32];
    static const struct weight_desc desc = {.kind = WEIGHT_MATRIX,
                                            .dtype = DTYPE_F32,
                                            .placement = PLACEMENT_DEVICE,
                                            .n_group = 1,
                                            .is_split = true};
    const struct tensor host = tensor_make((void *)(uintptr_t)some, 32, 32, DTYPE_F32);
    enum err_code code = ERR_MEMORY;
    int n_failed = -1;
    (void)state;
    while (code != ERR_OK) {
        char number[16];
        struct weight *w = NULL;
        (void)snprintf(number, sizeof number, "%d", ++n_failed + 1);
        (void)setenv("CUDA_HOST_FAIL_MALLOC", number, 1);
        struct backend *const be = cuda_open_double(OWN, "");
        code = be->op->weight_new(be, &w, &host, &desc, "query", NULL);
        assert_true(code == ERR_OK || (code == ERR_MEMORY && w == NULL));
        if (code != ERR_OK) {
            assert_int_equal(be->op->weight_new(be, &w, &host, &desc, "query", NULL), ERR_OK);
        }
        be->op->weight_free(be, w);
        backend_close(be);
    }
    assert_int_equal(n_failed, 6); /* for both, rows and weights; two rooms of rounded rows */
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(test_split_weights_are_close_to_float64, split_weights),
        cmocka_unit_test_setup(test_a_single_split_product_may_be_2_15_off, split_weights),
        cmocka_unit_test_setup(test_split_rows_have_the_same_bits_in_pieces, split_weights),
        cmocka_unit_test_setup(test_split_weights_multiply_rows_of_requests_alone, split_weights),
        cmocka_unit_test_setup(test_too_little_memory_to_split, split_weights),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
