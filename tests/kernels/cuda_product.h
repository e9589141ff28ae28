/* Matrix products of the CUDA backend, as its tests make them: test_cuda_linear.c,
 * test_cuda_split.c. One row of NaN and one of infinities stand in each crowd. F32 weights may be
 * split, which they are if the environment asks for it. */
#ifndef TESTS_KERNELS_CUDA_PRODUCT_H
#define TESTS_KERNELS_CUDA_PRODUCT_H

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

struct shape {
    int n_tok, n_in, n_out;
    int shift; /* words from a 16-byte address to the first row, and to the bias; rows are then 3 words
                * apart */
};

/* A case on the backend and what it is made of. */
struct product {
    struct tensor host_w, host_x, host_bias; /* Owner */
    struct tensor x, y, bias;                /* Owner: of the buffers that hold them */
    void *buffer[3];
    struct weight *w;
};

static inline float random_float(uint32_t *state)
{
    *state = *state * 1664525u + 1013904223u;
    return (float)(*state >> 8) * 0x1p-23f - 1;
}

static inline struct tensor random_tensor(int rows, int cols, float scale)
{
    float *const data = malloc((size_t)rows * (size_t)cols * sizeof(float));
    assert_non_null(data);
    uint32_t state = (uint32_t)(rows * 31 + cols);
    for (int i = 0; i < rows * cols; i++) {
        data[i] = scale * random_float(&state);
    }
    return tensor_make(data, rows, cols, DTYPE_F32);
}

static inline struct tensor view_new(struct backend *be, void **buffer, int rows, int cols,
                                     int shift)
{
    const int stride = cols + (shift > 0 ? 3 : 0);
    const size_t bytes = ((size_t)rows * (size_t)stride + 4) * sizeof(float);
    assert_int_equal(be->op->buffer_new(be, buffer, bytes, "test", NULL), ERR_OK);
    return (struct tensor){(float *)*buffer + shift, rows, cols, stride, DTYPE_F32};
}

static inline void product_open(struct product *p, struct backend *be, struct shape shape,
                                enum dtype dtype)
{
    *p = (struct product){0};
    p->host_w = random_tensor(shape.n_out, shape.n_in, 1 / sqrtf((float)shape.n_in));
    p->host_x = random_tensor(shape.n_tok, shape.n_in, 1);
    p->host_bias = random_tensor(1, shape.n_out, 1);
    float *const x = p->host_x.data;
    for (int k = 0; k < shape.n_in; k++) {
        x[(shape.n_tok / 2) * shape.n_in + k] = NAN;
        x[(shape.n_tok - 1) * shape.n_in + k] = INFINITY;
    }
    const struct weight_desc desc = {.kind = WEIGHT_MATRIX,
                                     .dtype = dtype,
                                     .placement = PLACEMENT_DEVICE,
                                     .n_group = 1,
                                     .is_split = dtype == DTYPE_F32};
    assert_int_equal(be->op->weight_new(be, &p->w, &p->host_w, &desc, "w", NULL), ERR_OK);
    p->x = view_new(be, &p->buffer[0], shape.n_tok, shape.n_in, shape.shift);
    p->y = view_new(be, &p->buffer[1], shape.n_tok, shape.n_out, shape.shift);
    p->bias = view_new(be, &p->buffer[2], 1, shape.n_out, shape.shift);
    be->op->upload(be, p->x, p->host_x.data);
    be->op->upload(be, p->bias, p->host_bias.data);
}

static inline void product_close(struct product *p, struct backend *be)
{
    for (int i = 0; i < 3; i++) {
        be->op->buffer_free(be, p->buffer[i]);
    }
    be->op->weight_free(be, p->w);
    free(p->host_w.data);
    free(p->host_x.data);
    free(p->host_bias.data);
}

/* Every NaN as the one that a GPU's sums give: on a CPU the sign and the payload depend on the
 * order in which the compiler took the operands. */
static inline uint32_t *product_bits(const struct product *p, struct backend *be)
{
    const size_t n = (size_t)p->y.rows * (size_t)p->y.cols;
    uint32_t *const bits = malloc(n * sizeof *bits);
    assert_non_null(bits);
    be->op->download(be, bits, p->y);
    for (size_t i = 0; i < n; i++) {
        if ((bits[i] & 0x7fffffffu) > 0x7f800000u) {
            bits[i] = 0x7fffffffu;
        }
    }
    return bits;
}

static inline void check_pieces(struct backend *be, const struct shape *shape, enum dtype dtype,
                                enum act act)
{
    static const int pieces[] = {1, 3, 8, 9, 16, 17, 33, 64};
    struct product p;
    product_open(&p, be, *shape, dtype);
    op_linear(be, p.y, p.x, p.w, p.bias, act);
    uint32_t *const whole = product_bits(&p, be);
    for (int first = 0, i = 0; first < shape->n_tok; i++) {
        const int left = shape->n_tok - first;
        const int n = pieces[i % 8] < left ? pieces[i % 8] : left;
        op_linear(be, tensor_rows(p.y, first, n), tensor_rows(p.x, first, n), p.w, p.bias, act);
        first += n;
    }
    uint32_t *const cut = product_bits(&p, be);
    for (int i = 0; i < shape->n_tok * shape->n_out; i++) {
        if (whole[i] != cut[i]) {
            fail_msg("%s [%d, %d] x [%d]: row %d, output %d: expected 0x%08x as in one call, got "
                     "0x%08x in pieces",
                     dtype_name(dtype), shape->n_tok, shape->n_in, shape->n_out, i / shape->n_out,
                     i % shape->n_out, whole[i], cut[i]);
        }
    }
    free(whole);
    free(cut);
    product_close(&p, be);
}

/* Who multiplies. */
enum who { OWN, LT, FAST };

/* For LT and FAST cuBLASLt has the algorithms that CUDA_HOST_LT names. */
static inline struct backend *cuda_open(enum who who)
{
    const bool fast_math = who == FAST;
    (void)setenv("PKMSERVE_CUDA_LT", who == OWN ? "0" : "1", 1);
    if (!cuda_library_find()) {
        skip();
    }
    struct backend *be = NULL;
    struct err err = {0};
    const struct backend_options options = {"cuda", 0, fast_math, NULL};
    if (backend_open(&be, &options, &err) != ERR_OK) {
        fail_msg("%s", err.message);
    }
    return be;
}

static inline void need_double(void)
{
    if (!cuda_library_find() || strstr(getenv("PKMSERVE_CUDA_LIBRARY"), "cudahost") == NULL) {
        skip();
    }
}

static inline struct backend *cuda_open_double(enum who who, const char *algorithms)
{
    need_double();
    (void)setenv("CUDA_HOST_LT", algorithms, 1);
    return cuda_open(who);
}

static inline int usual_device(void **state)
{
    (void)state;
    (void)unsetenv("CUDA_HOST_LT");
    (void)unsetenv("CUDA_HOST_LT_F16");
    (void)unsetenv("CUDA_HOST_LT_FAIL");
    (void)unsetenv("CUDA_HOST_MEMORY");
    (void)unsetenv("CUDA_HOST_FAIL_MALLOC");
    (void)unsetenv("PKMSERVE_CUDA_SPLIT");
    return 0;
}

static inline uint32_t *bits_on(struct backend *be, struct shape shape, enum dtype dtype)
{
    struct product p;
    product_open(&p, be, shape, dtype);
    op_linear(be, p.y, p.x, p.w, p.bias, ACT_RELU);
    uint32_t *const bits = product_bits(&p, be);
    product_close(&p, be);
    return bits;
}

static inline uint32_t *bits_of(enum who who, struct shape shape, enum dtype dtype)
{
    struct backend *const be = cuda_open(who);
    uint32_t *const bits = bits_on(be, shape, dtype);
    backend_close(be);
    return bits;
}

static inline int n_unequal(const uint32_t *a, const uint32_t *b, struct shape shape)
{
    int n = 0;
    for (int i = 0; i < shape.n_tok * shape.n_out; i++) {
        n += a[i] != b[i];
    }
    return n;
}

enum { N_DRAWN = 300 };
static const struct shape drawn_shape = {N_DRAWN, 96, 256, 0};

/* Rows of drawn_shape as drawn tokens: few in a step, then many. */
static inline uint32_t *drawn_bits(enum who who, enum dtype dtype)
{
    static const struct step_limits limits = {
        .n_tok_max = N_DRAWN, .n_seq_max = N_DRAWN, .n_page_max = 1, .n_out_max = 1};
    struct backend *const be = cuda_open(who);
    struct product p;
    struct step *step = NULL;
    assert_int_equal(be->op->step_new(be, &step, &limits, NULL), ERR_OK);
    product_open(&p, be, drawn_shape, dtype);
    for (int first = 0, n = 1; first < N_DRAWN;
         first += n, n = 2 * n < N_DRAWN - first ? 2 * n : N_DRAWN - first) {
        step->n_tok = step->n_seq = n;
        step->is_drawn = true;
        for (int i = 0; i <= n; i++) {
            step->seq_first[i] = i;
        }
        be->op->step_begin(be, step);
        op_linear(be, tensor_rows(p.y, first, n), tensor_rows(p.x, first, n), p.w, p.bias,
                  ACT_RELU);
        assert_int_equal(be->op->finish(be, step, NULL), ERR_OK);
    }
    uint32_t *const bits = product_bits(&p, be);
    product_close(&p, be);
    be->op->step_free(be, step);
    backend_close(be);
    return bits;
}

#endif
