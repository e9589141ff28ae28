/* Results that the CUDA backend's ops leave rounded for the product that comes next: to the bits of
 * the ops one by one, for rows of requests and for drawn tokens. */
#include "tests/kernels/cuda_product.h"

#include <stdio.h>
#include <unistd.h>

/* Whether op_ffn's y has the bits of two products one after another, and whether the activation
 * went to the second rounded: then its F32 memory still holds the first one's sums, some below
 * GELU's least. */
static void check_ffn(struct backend *be, const struct shape *shape, enum act act, bool is_rounded,
                      enum dtype up_dtype, enum dtype down_dtype)
{
    const struct shape back = {shape->n_tok, shape->n_out, shape->n_in, shape->shift};
    struct product up;
    struct product down;
    product_open(&up, be, *shape, up_dtype);
    product_open(&down, be, back, down_dtype);
    op_linear(be, up.y, up.x, up.w, up.bias, act);
    op_linear(be, down.y, up.y, down.w, down.bias, ACT_NONE);
    uint32_t *const apart = product_bits(&down, be);
    const struct ffn ffn = {
        .up = up.w, .down = down.w, .up_bias = up.bias, .down_bias = down.bias, .act = act};
    op_ffn(be, down.y, up.y, up.x, &ffn);
    uint32_t *const together = product_bits(&down, be);
    assert_int_equal(n_unequal(apart, together, back), 0);
    float *const hidden = (float *)product_bits(&up, be);
    float least = 0;
    for (int i = 0; i < shape->n_tok * shape->n_out; i++) {
        least = isfinite(hidden[i]) && hidden[i] < least ? hidden[i] : least;
    }
    assert_int_equal(least < -0.2f, is_rounded);
    free(apart);
    free(together);
    free(hidden);
    product_close(&up, be);
    product_close(&down, be);
}

/* Few rows, several calls of cuBLASLt, more rows than there is room for, hidden rows at odd
 * addresses or of a width that has no whole blocks. */
static void test_an_activation_is_rounded_once(void **state)
{
    (void)state;
    for (int i = 0; i < 2; i++) {
        const enum dtype dtype = i == 0 ? DTYPE_BF16 : DTYPE_F16;
        struct backend *const be = cuda_open_double(LT, "g");
        /* The room is for 512 rows of the widest so far. */
        check_ffn(be, &(struct shape){600, 32, 64, 0}, ACT_GELU, false, dtype, dtype);
        check_ffn(be, &(struct shape){3, 32, 64, 0}, ACT_GELU, true, dtype, dtype);
        check_ffn(be, &(struct shape){300, 32, 96, 0}, ACT_GELU, true, dtype, dtype);
        check_ffn(be, &(struct shape){300, 32, 96, 0}, ACT_RELU, false, dtype, dtype);
        check_ffn(be, &(struct shape){20, 32, 64, 1}, ACT_GELU, false, dtype, dtype);
        check_ffn(be, &(struct shape){20, 32, 68, 0}, ACT_GELU, false, dtype, dtype);
        backend_close(be);
    }
}

/* What the second product does not read as it was left, it has in F32: weights of another type, and
 * those that are split. */
static void test_an_activation_for_others_stays(void **state)
{
    (void)state;
    static const enum dtype dtypes[][2] = {{DTYPE_BF16, DTYPE_F16},
                                           {DTYPE_F16, DTYPE_BF16},
                                           {DTYPE_F16, DTYPE_F32},
                                           {DTYPE_F32, DTYPE_F32}};
    struct backend *const be = cuda_open_double(LT, "g");
    for (int i = 0; i < 4; i++) {
        check_ffn(be, &(struct shape){20, 32, 64, 0}, ACT_GELU, false, dtypes[i][0], dtypes[i][1]);
    }
    backend_close(be);
}

/* The same of our own kernels, which leave the F32 memory alone. */
static void check_own_ffn(struct backend *be, struct shape shape, enum act act, bool is_rounded)
{
    const struct shape back = {shape.n_tok, shape.n_out, shape.n_in, 0};
    struct product up;
    struct product down;
    product_open(&up, be, shape, DTYPE_BF16);
    product_open(&down, be, back, DTYPE_BF16);
    op_linear(be, up.y, up.x, up.w, up.bias, act);
    op_linear(be, down.y, up.y, down.w, down.bias, ACT_NONE);
    uint32_t *const apart = product_bits(&down, be);
    const struct tensor before = random_tensor(shape.n_tok, shape.n_out, 1);
    be->op->upload(be, up.y, before.data);
    const struct ffn ffn = {
        .up = up.w, .down = down.w, .up_bias = up.bias, .down_bias = down.bias, .act = act};
    op_ffn(be, down.y, up.y, up.x, &ffn);
    uint32_t *const together = product_bits(&down, be);
    uint32_t *const hidden = product_bits(&up, be);
    assert_int_equal(n_unequal(apart, together, back), 0);
    assert_int_equal(n_unequal(hidden, before.data, shape) == 0, is_rounded);
    free(apart);
    free(together);
    free(hidden);
    free(before.data);
    product_close(&up, be);
    product_close(&down, be);
}

/* Rows that gemv norms, that it and gemm multiply, and more than there is room for. */
static void test_own_kernels_round_an_activation_once(void **state)
{
    static const struct shape shapes[] = {{600, 64, 96, 0}, {1, 64, 96, 0},  {8, 64, 96, 0},
                                          {9, 96, 64, 0},   {40, 64, 96, 0}, {200, 64, 128, 0},
                                          {20, 64, 68, 0}};
    enum { N_SHAPE = sizeof shapes / sizeof *shapes };
    (void)state;
    struct backend *const be = cuda_open(OWN);
    for (int i = 0; i < N_SHAPE; i++) {
        const struct shape *const shape = &shapes[i];
        check_own_ffn(be, *shape, i % 2 == 0 ? ACT_GELU : ACT_RELU,
                      shape->n_tok <= 512 && shape->n_out % 32 == 0);
    }
    backend_close(be);
}

/* Rounded rows of many chunks, which are staged in shared memory where there is enough of it,
 * beside their sums. */
static void test_wide_rows_fit_a_small_multiprocessor(void **state)
{
    (void)state;
    static const char *const versions[] = {"86", "90"}; /* what a kernel may have stays */
    for (int i = 0; i < 2; i++) {
        assert_int_equal(setenv("CUDA_HOST_SM", versions[i], 1), 0);
        struct backend *const be = cuda_open(OWN);
        check_own_ffn(be, (struct shape){8, 32, 4096, 0}, ACT_RELU, true);
        check_own_ffn(be, (struct shape){32, 32, 6400, 0}, ACT_RELU, true);
        backend_close(be);
    }
    assert_int_equal(unsetenv("CUDA_HOST_SM"), 0);
}

/* The ops that a product may follow. */
enum before { NORM, ADD_NORM, RMS_NORM, GATE, ATTENTION };

/* x, y, gamma and beta of them, [n, d] and [1, d]. */
struct rows {
    struct tensor x, y, gamma, beta;
    void *buffer[4];
};

static struct rows rows_new(struct backend *be, int n, int d)
{
    struct rows r;
    r.x = view_new(be, &r.buffer[0], n, d, 0);
    r.y = view_new(be, &r.buffer[1], n, d, 0);
    r.gamma = view_new(be, &r.buffer[2], 1, d, 0);
    r.beta = view_new(be, &r.buffer[3], 1, d, 0);
    const struct tensor *const all[] = {&r.x, &r.gamma, &r.beta};
    for (int i = 0; i < 3; i++) {
        const struct tensor host = random_tensor((int)all[i]->rows, d, (float)(i + 1));
        be->op->upload(be, *all[i], host.data);
        free(host.data);
    }
    return r;
}

static void rows_free(const struct rows *r, struct backend *be)
{
    for (int i = 0; i < 4; i++) {
        be->op->buffer_free(be, r->buffer[i]);
    }
}

static void call(struct backend *be, const struct rows *r, enum before before)
{
    const struct tensor none = {0};
    switch (before) {
    case NORM: op_norm(be, r->y, r->x, r->gamma, r->beta, 1e-5F); break;
    case ADD_NORM: op_add_norm(be, r->y, r->x, r->x, r->gamma, r->beta, 1e-5F); break;
    case RMS_NORM: op_rms_norm(be, r->y, none, r->x, none, r->gamma, 1e-5F); break;
    case GATE: op_gate(be, r->y, r->x, r->x, GATE_SILU); break;
    case ATTENTION: break; /* drawn_step's own */
    }
}

/* Launches of what has name in its own since the last call. */
static int n_launch(FILE *lines, const char *name)
{
    char line[600];
    int n = 0;
    while (fgets(line, sizeof line, lines) != NULL) {
        n += strncmp(line, "launch", 6) == 0 && strstr(line, name) != NULL;
    }
    clearerr(lines);
    return n;
}

static int n_round(FILE *lines)
{
    return n_launch(lines, "linear_round");
}

/* Where the double writes its launches while it is watched. */
struct watched {
    char path[32];
    FILE *lines;
};

static struct watched watched_new(void)
{
    struct watched w = {.path = "/tmp/test_cuda.XXXXXX"};
    const int file = mkstemp(w.path);
    assert_true(file >= 0);
    w.lines = fdopen(file, "r");
    return w;
}

static void watched_free(struct watched *w)
{
    (void)fclose(w->lines);
    (void)unlink(w->path);
}

static struct backend *watched_open(const struct watched *w, enum who who)
{
    (void)setenv("CUDA_HOST_TRACE", w->path, 1);
    struct backend *const be = cuda_open_double(who, "g");
    (void)unsetenv("CUDA_HOST_TRACE");
    return be;
}

/* Rows that each see their own position alone, of two heads. */
struct drawn {
    struct step *step;
    struct tensor pages[2];
    bool is_request; /* not drawn: a request of one row each */
};

enum { DRAWN = 100, DRAWN_WIDTH = 96, DRAWN_HEADS = 2 };

static struct drawn drawn_new(struct backend *be)
{
    static const struct step_limits limits = {.n_tok_max = DRAWN,
                                              .n_seq_max = DRAWN,
                                              .n_page_max = 1,
                                              .n_out_max = DRAWN,
                                              .d_model = DRAWN_WIDTH,
                                              .n_head = DRAWN_HEADS};
    struct drawn d = {0};
    assert_int_equal(be->op->step_new(be, &d.step, &limits, NULL), ERR_OK);
    for (int i = 0; i < 2; i++) {
        void *data = NULL;
        const size_t bytes = sizeof(float) * DRAWN * KV_PAGE * DRAWN_WIDTH;
        assert_int_equal(be->op->buffer_new(be, &data, bytes, "test", NULL), ERR_OK);
        d.pages[i] = tensor_make(data, DRAWN, KV_PAGE * DRAWN_WIDTH, DTYPE_F32);
    }
    return d;
}

static void drawn_free(struct drawn *d, struct backend *be)
{
    be->op->step_free(be, d->step);
    for (int i = 0; i < 2; i++) {
        be->op->buffer_free(be, d->pages[i].data);
    }
}

/* A step of n drawn tokens: p.y = the product of r.y, which before has made, with a norm of other
 * rows in between if there are some. A list that is not 0 may be recorded. */
static uint32_t *drawn_step(struct backend *be, const struct drawn *d, const struct product *p,
                            const struct rows *r, const struct rows *other, enum before before,
                            int n, int list)
{
    struct step *const step = d->step;
    step->n_tok = step->n_seq = step->n_out = n;
    step->ops_list = list;
    step->is_drawn = !d->is_request;
    for (int i = 0; i < n; i++) {
        step->pos[i] = 0;
        step->page[i] = i;
        step->seq_first[i + 1] = i + 1;
        step->out_row[i] = i;
        step->out_want[i] = OUT_ENTROPY;
    }
    const struct rows head = {
        tensor_head(r->x, n), tensor_head(r->y, n), r->gamma, r->beta, {NULL}};
    be->op->step_begin(be, step);
    if (before == ATTENTION) {
        op_attention(be, head.y, head.x, d->pages[0], d->pages[1], head.x, head.x, step,
                     DRAWN_HEADS, 1);
    } else {
        call(be, &head, before);
    }
    if (other != NULL) {
        call(be, other, NORM);
    }
    op_linear(be, tensor_head(p->y, n), head.y, p->w, p->bias, ACT_RELU);
    assert_int_equal(be->op->finish(be, step, NULL), ERR_OK);
    return product_bits(p, be);
}

/* However many they are, they have the bits of rounding apart: once, recorded and replayed. */
static void check_drawn(enum who who, struct watched *w)
{
    static const int counts[] = {DRAWN, 1, 8, 9, 17, 33};
    static const struct shape shape = {DRAWN, DRAWN_WIDTH, 64, 0};
    struct backend *const be = watched_open(w, who);
    struct product p;
    product_open(&p, be, shape, DTYPE_BF16);
    struct drawn d = drawn_new(be);
    const struct rows r = rows_new(be, DRAWN, DRAWN_WIDTH);
    const struct rows other = rows_new(be, 1, DRAWN_WIDTH);
    for (int i = NORM; i <= ATTENTION; i++) {
        const enum before before = (enum before)i;
        uint32_t *const whole = drawn_step(be, &d, &p, &r, &other, before, DRAWN, 0);
        for (size_t c = 0; c < sizeof counts / sizeof *counts; c++) {
            const int n = counts[c];
            const struct shape head = {n, shape.n_in, shape.n_out, 0};
            (void)n_round(w->lines);
            free(drawn_step(be, &d, &p, &r, &other, before, n, 0));
            assert_int_equal(n_round(w->lines), n > 8);
            for (int time = 0; time < 3; time++) {
                be->op->upload(be, p.y, p.host_x.data);
                uint32_t *const bits = drawn_step(be, &d, &p, &r, NULL, before, n, i + 1);
                if (n_unequal(bits, whole, head) != 0) {
                    fail_msg("op %d before a product of %d drawn tokens: other bits, step %d", i, n,
                             time);
                }
                assert_int_equal(n_round(w->lines), 0);
                free(bits);
            }
        }
        free(whole);
    }
    rows_free(&r, be);
    rows_free(&other, be);
    drawn_free(&d, be);
    product_close(&p, be);
    backend_close(be);
}

static void test_drawn_rows_are_rounded_by_the_op_before(void **state)
{
    (void)state;
    need_double();
    struct watched w = watched_new();
    check_drawn(OWN, &w);
    check_drawn(LT, &w);
    watched_free(&w);
}

/* Of few requests by parts, where the cache is F32: the product reads what their last ones left. */
static void test_attention_of_few_requests_is_rounded_once(void **state)
{
    enum { N = 9 };
    static const struct shape shape = {DRAWN, DRAWN_WIDTH, 64, 0};
    static const struct shape head = {N, DRAWN_WIDTH, 64, 0};
    (void)state;
    need_double();
    struct watched w = watched_new();
    for (int i = 0; i < 2; i++) {
        struct backend *const be = watched_open(&w, LT);
        struct product p;
        product_open(&p, be, shape, i == 0 ? DTYPE_BF16 : DTYPE_F16);
        struct drawn d = drawn_new(be);
        d.is_request = true;
        const struct rows r = rows_new(be, DRAWN, DRAWN_WIDTH);
        const struct rows other = rows_new(be, 1, DRAWN_WIDTH);
        (void)n_round(w.lines);
        uint32_t *const apart = drawn_step(be, &d, &p, &r, &other, ATTENTION, N, 0);
        assert_int_equal(n_round(w.lines), 1);
        be->op->upload(be, p.y, p.host_x.data);
        uint32_t *const taken = drawn_step(be, &d, &p, &r, NULL, ATTENTION, N, 0);
        assert_int_equal(n_round(w.lines), 0);
        assert_int_equal(n_unequal(apart, taken, head), 0);
        free(apart);
        free(taken);
        rows_free(&r, be);
        rows_free(&other, be);
        drawn_free(&d, be);
        product_close(&p, be);
        backend_close(be);
    }
    watched_free(&w);
}

/* Up to 8 rounded rows by row-major weights have kernels of their own, and the bits of many: of two
 * multiprocessors, whose blocks' warps take turns at chunks of a few outputs, have one each, or
 * have outputs of their own. */
static void test_few_drawn_rows_have_the_bits_of_many(void **state)
{
    static const struct shape shapes[] = {
        {DRAWN, 1184, 72, 0}, {DRAWN, 640, 37 * 4, 0}, {DRAWN, 96, 300, 0}, {DRAWN, 1184, 260, 0}};
    static const int counts[] = {1, 2, 5, 8, 9};
    (void)state;
    need_double();
    struct watched w = watched_new();
    (void)setenv("CUDA_HOST_SMS", "2", 1);
    for (int overlaps = 0; overlaps < 2; overlaps++) {
        (void)setenv("PKMSERVE_CUDA_OVERLAP", overlaps == 0 ? "0" : "1", 1);
        struct backend *const be = watched_open(&w, LT);
        struct drawn d = drawn_new(be);
        for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
            const struct shape *const shape = &shapes[i];
            struct product p;
            product_open(&p, be, *shape, overlaps == 0 ? DTYPE_BF16 : DTYPE_F16);
            const struct rows r = rows_new(be, DRAWN, shape->n_in);
            const struct tensor other = random_tensor(DRAWN, shape->n_out, 1);
            uint32_t *const whole = drawn_step(be, &d, &p, &r, NULL, RMS_NORM, DRAWN, 0);
            for (size_t c = 0; c < sizeof counts / sizeof *counts; c++) {
                const int n = counts[c];
                const struct shape head = {n, shape->n_in, shape->n_out, 0};
                (void)n_round(w.lines);
                be->op->upload(be, p.y, other.data);
                uint32_t *const bits = drawn_step(be, &d, &p, &r, NULL, RMS_NORM, n, 0);
                assert_int_equal(n_launch(w.lines, "\tkernel\t"), n <= 8);
                if (n_unequal(bits, whole, head) != 0) {
                    fail_msg("[%d, %d] x [%d]: other bits than in a crowd of %d", n, shape->n_in,
                             shape->n_out, DRAWN);
                }
                free(bits);
            }
            free(whole);
            free(other.data);
            rows_free(&r, be);
            product_close(&p, be);
        }
        drawn_free(&d, be);
        backend_close(be);
    }
    (void)unsetenv("PKMSERVE_CUDA_OVERLAP");
    (void)unsetenv("CUDA_HOST_SMS");
    watched_free(&w);
}

/* Queries, keys and values may be products of the same rows: none rounds them. */
static void test_several_products_read_the_same_rounded_rows(void **state)
{
    enum { N = 20, WIDTH = 64, N_OUT = 32 };
    static const struct shape shape = {N, WIDTH, N_OUT, 0};
    (void)state;
    need_double();
    struct watched w = watched_new();
    struct backend *const be = watched_open(&w, LT);
    struct product p;
    product_open(&p, be, shape, DTYPE_BF16);
    const struct rows r = rows_new(be, N, WIDTH);
    uint32_t *bits[4];
    (void)n_round(w.lines);
    for (int i = 0; i < 4; i++) {
        if (i == 0 || i == 3) {
            call(be, &r, NORM);
        }
        if (i == 3) { /* others are in the room by then */
            call(be, &r, GATE);
            call(be, &r, NORM);
        }
        op_linear(be, p.y, r.y, p.w, p.bias, ACT_RELU);
        bits[i] = product_bits(&p, be);
    }
    assert_int_equal(n_round(w.lines), 0);
    for (int i = 1; i < 4; i++) {
        assert_int_equal(n_unequal(bits[0], bits[i], shape), 0);
        free(bits[i]);
    }
    free(bits[0]);
    /* y takes the place of x: what the next one reads is not what was rounded */
    const struct tensor x = tensor_cols(r.y, 0, WIDTH);
    call(be, &r, NORM);
    op_linear(be, tensor_cols(r.y, 0, N_OUT), x, p.w, p.bias, ACT_RELU);
    op_linear(be, p.y, x, p.w, p.bias, ACT_RELU);
    assert_int_equal(n_round(w.lines), 1);
    rows_free(&r, be);
    product_close(&p, be);
    backend_close(be);
    watched_free(&w);
}

/* Next to each other, the product takes the rounded rows: no launch rounds them. With an op or an
 * upload in between it rounds them itself; where cuBLASLt fails, our kernel multiplies the rounded
 * ones. */
static void check_op_before(enum dtype dtype)
{
    enum { N = 37, WIDTH = 96, N_OUT = 64 };
    static const struct shape shape = {N, WIDTH, N_OUT, 0};
    struct watched w = watched_new();
    struct backend *const be = watched_open(&w, LT);
    struct product p;
    product_open(&p, be, shape, dtype);
    const struct rows r = rows_new(be, N, WIDTH);
    const struct rows other = rows_new(be, N, WIDTH);
    for (int i = NORM; i <= GATE; i++) {
        const enum before before = (enum before)i;
        (void)n_round(w.lines);
        call(be, &r, before);
        op_linear(be, p.y, r.y, p.w, p.bias, ACT_RELU);
        uint32_t *const taken = product_bits(&p, be);
        assert_int_equal(n_round(w.lines), 0);
        call(be, &r, before);
        call(be, &other, before);
        op_linear(be, p.y, r.y, p.w, p.bias, ACT_RELU);
        uint32_t *const apart = product_bits(&p, be);
        assert_int_equal(n_unequal(taken, apart, shape), 0);
        assert_int_equal(n_round(w.lines), 1);
        call(be, &r, before);
        be->op->upload(be, r.y, p.host_x.data);
        op_linear(be, p.y, r.y, p.w, p.bias, ACT_RELU);
        assert_int_equal(n_round(w.lines), 1);
        free(taken);
        free(apart);
    }
    struct backend *const own = cuda_open(OWN);
    struct product q;
    product_open(&q, own, shape, dtype);
    const struct rows s = rows_new(own, N, WIDTH);
    call(own, &s, NORM);
    op_linear(own, q.y, s.y, q.w, q.bias, ACT_RELU);
    uint32_t *const wanted = product_bits(&q, own);
    call(be, &r, NORM);
    (void)setenv("CUDA_HOST_LT_FAIL", "1", 1);
    op_linear(be, p.y, r.y, p.w, p.bias, ACT_RELU);
    (void)unsetenv("CUDA_HOST_LT_FAIL");
    uint32_t *const instead = product_bits(&p, be);
    assert_int_equal(n_unequal(instead, wanted, shape), 0);
    free(instead);
    free(wanted);
    rows_free(&r, be);
    rows_free(&other, be);
    rows_free(&s, own);
    product_close(&p, be);
    product_close(&q, own);
    backend_close(be);
    backend_close(own);
    watched_free(&w);
}

static void test_rows_are_rounded_by_the_op_before(void **state)
{
    (void)state;
    check_op_before(DTYPE_BF16);
    check_op_before(DTYPE_F16);
}

/* Beside F16 weights rows are left for those; a product by BF16 ones rounds them itself, to its own
 * bits. */
static void test_a_product_of_another_type_rounds_its_rows(void **state)
{
    static const struct shape shape = {37, 96, 64, 0};
    (void)state;
    uint32_t *bits[2];
    for (int i = 0; i < 2; i++) {
        struct backend *const be = cuda_open_double(LT, "g");
        struct product p;
        struct product other;
        product_open(&p, be, shape, DTYPE_BF16);
        product_open(&other, be, shape, i == 0 ? DTYPE_BF16 : DTYPE_F16);
        const struct rows r = rows_new(be, shape.n_tok, shape.n_in);
        call(be, &r, NORM);
        op_linear(be, p.y, r.y, p.w, p.bias, ACT_RELU);
        bits[i] = product_bits(&p, be);
        rows_free(&r, be);
        product_close(&p, be);
        product_close(&other, be);
        backend_close(be);
    }
    assert_int_equal(n_unequal(bits[0], bits[1], shape), 0);
    free(bits[0]);
    free(bits[1]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(test_an_activation_is_rounded_once, usual_device),
        cmocka_unit_test_setup(test_an_activation_for_others_stays, usual_device),
        cmocka_unit_test_setup(test_own_kernels_round_an_activation_once, usual_device),
        cmocka_unit_test_setup(test_wide_rows_fit_a_small_multiprocessor, usual_device),
        cmocka_unit_test_setup(test_a_product_of_another_type_rounds_its_rows, usual_device),
        cmocka_unit_test_setup(test_rows_are_rounded_by_the_op_before, usual_device),
        cmocka_unit_test_setup(test_drawn_rows_are_rounded_by_the_op_before, usual_device),
        cmocka_unit_test_setup(test_attention_of_few_requests_is_rounded_once, usual_device),
        cmocka_unit_test_setup(test_few_drawn_rows_have_the_bits_of_many, usual_device),
        cmocka_unit_test_setup(test_several_products_read_the_same_rounded_rows, usual_device),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
