/* What the tests of the CUDA backend's attention share: sequences with some positions in the cache,
 * whose new rows are attended together and alone, by the backend and by ref. */
#ifndef TESTS_KERNELS_CUDA_CROWD_H
#define TESTS_KERNELS_CUDA_CROWD_H

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

enum { SEQ_MAX = 256 };

/* Sequences of n_old positions in the cache and n_new rows to attend. Rows of q, k and v are all
 * positions of one sequence after the other's. */
struct crowd {
    enum dtype cache;
    int shift; /* elements that pages start behind a buffer's start: 0 .. gap */
    int gap;   /* elements between pages */
    int n_seq, n_head, d_head, n_position, n_page_max;
    int n_alone; /* sequences that are computed alone, too; 0: all */
    /* Compares the new rows with ref's, which are expected; NULL: they are to be within 2e-5. */
    void (*compare)(const struct crowd *c, const float *expected, const float *got);
    int n_old[SEQ_MAX], n_new[SEQ_MAX], first[SEQ_MAX];
    float *q, *k, *v; /* Owner; [n_position, n_head·d_head] */
};

/* A crowd's cache on one backend, and room for a step of all its positions. */
struct side {
    struct backend *be;
    struct step *step;
    struct tensor k_pages, v_pages, q, k, v, y;
};

static inline float random_float(uint32_t *state)
{
    *state = *state * 1664525u + 1013904223u;
    return (float)(*state >> 8) * 0x1p-23f - 1;
}

static inline void crowd_add(struct crowd *c, int n_old, int n_new)
{
    assert_true(c->n_seq < SEQ_MAX);
    c->n_old[c->n_seq] = n_old;
    c->n_new[c->n_seq] = n_new;
    c->first[c->n_seq++] = c->n_position;
    c->n_position += n_old + n_new;
    const int n_page = (n_old + n_new + KV_PAGE - 1) / KV_PAGE;
    c->n_page_max = n_page > c->n_page_max ? n_page : c->n_page_max;
}

static inline void crowd_fill(struct crowd *c)
{
    const size_t n = (size_t)c->n_position * (size_t)(c->n_head * c->d_head);
    float **const arrays[3] = {&c->q, &c->k, &c->v};
    uint32_t state = 7;
    for (int t = 0; t < 3; t++) {
        *arrays[t] = malloc(n * sizeof(float));
        assert_non_null(*arrays[t]);
        for (size_t i = 0; i < n; i++) {
            (*arrays[t])[i] = random_float(&state) * (t == 0 ? 3 : 1);
        }
    }
}

static inline void crowd_drop(struct crowd *c)
{
    free(c->q);
    free(c->k);
    free(c->v);
}

static inline struct tensor buffer_new(struct backend *be, int64_t rows, int64_t cols,
                                       enum dtype dtype)
{
    void *data = NULL;
    const size_t bytes = (size_t)rows * (size_t)cols * dtype_bytes(dtype);
    assert_int_equal(be->op->buffer_new(be, &data, bytes, "test", NULL), ERR_OK);
    return tensor_make(data, rows, cols, dtype);
}

/* Where sequence s has its pages: one after the other's. */
static inline int first_page(const struct crowd *c, int s)
{
    int n = 0;
    for (int i = 0; i < s; i++) {
        n += (c->n_old[i] + c->n_new[i] + KV_PAGE - 1) / KV_PAGE;
    }
    return n;
}

static inline struct tensor pages_new(struct backend *be, const struct crowd *c)
{
    const int64_t page = (int64_t)KV_PAGE * c->n_head * c->d_head;
    struct tensor pages = buffer_new(be, first_page(c, c->n_seq), page + c->gap, c->cache);
    pages.data = (char *)pages.data + (size_t)c->shift * dtype_bytes(c->cache);
    pages.cols = page;
    return pages;
}

static inline struct side side_new(const char *device, const struct crowd *c)
{
    const int d = c->n_head * c->d_head;
    const struct backend_options options = {device, 1, false, NULL};
    const struct step_limits limits = {.n_tok_max = c->n_position,
                                       .n_seq_max = c->n_seq,
                                       .n_page_max = c->n_page_max,
                                       .d_model = d,
                                       .n_head = c->n_head};
    struct side side = {0};
    assert_int_equal(backend_open(&side.be, &options, NULL), ERR_OK);
    assert_int_equal(side.be->op->step_new(side.be, &side.step, &limits, NULL), ERR_OK);
    side.k_pages = pages_new(side.be, c);
    side.v_pages = pages_new(side.be, c);
    side.q = buffer_new(side.be, c->n_position, d, DTYPE_F32);
    side.k = buffer_new(side.be, c->n_position, d, DTYPE_F32);
    side.v = buffer_new(side.be, c->n_position, d, DTYPE_F32);
    side.y = buffer_new(side.be, c->n_position, d, DTYPE_F32);
    return side;
}

static inline void side_close(struct side *side, const struct crowd *c)
{
    struct backend *const be = side->be;
    be->op->step_free(be, side->step);
    const struct tensor buffers[] = {side->q, side->k, side->v, side->y};
    for (size_t i = 0; i < sizeof buffers / sizeof *buffers; i++) {
        be->op->buffer_free(be, buffers[i].data);
    }
    const size_t shift_bytes = (size_t)c->shift * dtype_bytes(c->cache);
    be->op->buffer_free(be, (char *)side->k_pages.data - shift_bytes);
    be->op->buffer_free(be, (char *)side->v_pages.data - shift_bytes);
    backend_close(be);
}

/* Whether its new rows are drawn tokens, in whichever step: these have bits of their own. */
static inline bool crowd_is_drawn(const struct crowd *c)
{
    for (int s = 0; s < c->n_seq; s++) {
        if (c->n_new[s] != 1) {
            return false;
        }
    }
    return true;
}

/* Puts positions first[s] .. end[s]-1 of each sequence that has some into the step. */
static inline void fill_step(struct side *side, const struct crowd *c, const int *first,
                             const int *end)
{
    struct step *const step = side->step;
    const int64_t d = (int64_t)c->n_head * c->d_head;
    step->n_tok = step->n_seq = 0;
    for (int s = 0; s < c->n_seq; s++) {
        const int n = end[s] - first[s];
        if (n == 0) {
            continue;
        }
        const float *const host[3] = {c->q, c->k, c->v};
        const struct tensor device[3] = {side->q, side->k, side->v};
        for (int t = 0; t < 3; t++) {
            struct tensor rows = tensor_head(device[t], n);
            rows.data = (float *)rows.data + step->n_tok * d;
            side->be->op->upload(side->be, rows, host[t] + (c->first[s] + first[s]) * d);
        }
        for (int i = 0; i < c->n_page_max; i++) {
            step->page[step->n_seq * c->n_page_max + i] =
                i * KV_PAGE < end[s] ? first_page(c, s) + i : 0;
        }
        for (int i = 0; i < n; i++) {
            step->pos[step->n_tok++] = first[s] + i;
        }
        step->seq_first[++step->n_seq] = step->n_tok;
    }
    step->is_drawn = side->be->phases_apart && crowd_is_drawn(c) && step->n_tok == step->n_seq;
}

static inline void store(struct side *side, const struct crowd *c, const int *first, const int *end)
{
    struct backend *const be = side->be;
    fill_step(side, c, first, end);
    be->op->step_begin(be, side->step);
    op_kv_store(be, side->k_pages, side->v_pages, tensor_head(side->k, side->step->n_tok),
                tensor_head(side->v, side->step->n_tok), side->step, c->n_head);
    assert_int_equal(be->op->finish(be, side->step, NULL), ERR_OK);
}

/* Attends positions first[s] .. end[s]-1, which are in the cache, and writes them to the rows of
 * their positions in out. */
static inline enum err_code attend(struct side *side, const struct crowd *c, const int *first,
                                   const int *end, float *out, struct err *err)
{
    struct backend *const be = side->be;
    const int64_t d = (int64_t)c->n_head * c->d_head;
    fill_step(side, c, first, end);
    const struct tensor y = tensor_head(side->y, side->step->n_tok);
    be->op->step_begin(be, side->step);
    const struct tensor none = {0};
    op_attention(be, y, tensor_head(side->q, y.rows), side->k_pages, side->v_pages, none, none,
                 side->step, c->n_head, 1 / sqrtf((float)c->d_head));
    const enum err_code code = be->op->finish(be, side->step, err);
    float *const rows = calloc((size_t)y.rows * (size_t)d, sizeof *rows);
    assert_non_null(rows);
    be->op->download(be, rows, y);
    int64_t row = 0;
    for (int s = 0; s < c->n_seq; s++) {
        const int64_t n = end[s] - first[s];
        memcpy(out + (c->first[s] + first[s]) * d, rows + row * d, (size_t)(n * d) * sizeof *out);
        row += n;
    }
    free(rows);
    return code;
}

static inline float *out_new(const struct crowd *c)
{
    float *const out = calloc((size_t)c->n_position * (size_t)(c->n_head * c->d_head), sizeof *out);
    assert_non_null(out);
    return out;
}

/* What the cuda backend makes of the new rows of all sequences in one step. */
static inline float *attended(const struct crowd *c)
{
    const int begin[SEQ_MAX] = {0};
    int end[SEQ_MAX];
    for (int s = 0; s < c->n_seq; s++) {
        end[s] = c->n_old[s] + c->n_new[s];
    }
    struct side side = side_new("cuda", c);
    store(&side, c, begin, end);
    float *const out = out_new(c);
    assert_int_equal(attend(&side, c, c->n_old, end, out, NULL), ERR_OK);
    side_close(&side, c);
    return out;
}

/* The new rows of all sequences in one step against ref, then n_last rows of each sequence in a
 * step of its own, twice, against the same. */
static inline void check_crowd(struct crowd *c, int n_last)
{
    if (!cuda_library_find()) {
        skip();
    }
    crowd_fill(c);
    struct side ref = side_new("ref", c);
    struct side cuda = side_new("cuda", c);
    const int begin[SEQ_MAX] = {0};
    int end[SEQ_MAX];
    for (int s = 0; s < c->n_seq; s++) {
        end[s] = c->n_old[s] + c->n_new[s];
    }
    store(&ref, c, begin, end);
    store(&cuda, c, begin, end);
    float *const expected = out_new(c);
    float *const whole = out_new(c);
    float *const alone = out_new(c);
    assert_int_equal(attend(&ref, c, c->n_old, end, expected, NULL), ERR_OK);
    assert_int_equal(attend(&cuda, c, c->n_old, end, whole, NULL), ERR_OK);
    const int64_t d = (int64_t)c->n_head * c->d_head;
    for (int s = 0; s < c->n_seq; s++) {
        for (int64_t i = (c->first[s] + c->n_old[s]) * d; i < (c->first[s] + end[s]) * d; i++) {
            if (c->compare == NULL && !(fabsf(expected[i] - whole[i]) <= 2e-5f)) {
                fail_msg("%d heads of %d, cache %s, sequence %d, position %d, column %d: expected "
                         "%.9g from ref, got %.9g",
                         c->n_head, c->d_head, dtype_name(c->cache), s, (int)(i / d) - c->first[s],
                         (int)(i % d), (double)expected[i], (double)whole[i]);
            }
        }
        for (int turn = 0; turn < 2 && (c->n_alone == 0 || s < c->n_alone); turn++) {
            const int n = n_last < c->n_new[s] ? n_last : c->n_new[s];
            int from[SEQ_MAX] = {0};
            int to[SEQ_MAX] = {0};
            to[s] = end[s];
            from[s] = end[s] - n;
            assert_int_equal(attend(&cuda, c, from, to, alone, NULL), ERR_OK);
            const int64_t at = (c->first[s] + from[s]) * d;
            if (memcmp(whole + at, alone + at, (size_t)(n * d) * sizeof *whole) != 0) {
                fail_msg("%d heads of %d, cache %s, sequence %d: its last %d rows alone have other "
                         "bits than in the crowd",
                         c->n_head, c->d_head, dtype_name(c->cache), s, n);
            }
        }
    }
    if (c->compare != NULL) {
        c->compare(c, expected, whole);
    }
    free(expected);
    free(whole);
    free(alone);
    side_close(&ref, c);
    side_close(&cuda, c);
    crowd_drop(c);
}

#endif
