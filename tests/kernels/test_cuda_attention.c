/* The CUDA backend's attention where test_kernels does not reach: contexts of more splits than a
 * block has threads, more sequences than that in a step, and heads of every kind of width, with a
 * cache in F32 and in BF16. Few rows and many rows are different kernels; they must give the same
 * bits, and ref's values: as exactly in BF16, since only what is stored is rounded. Drawn tokens
 * are spread over blocks whatever the limits are. */
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

static const enum dtype caches[] = {DTYPE_F32, DTYPE_BF16};

/* 130 splits of 64 positions: the merge takes two rounds of 128. */
static void test_more_splits_than_threads(void **state)
{
    (void)state;
    struct crowd c = {.cache = DTYPE_BF16, .n_head = 1, .d_head = 8};
    crowd_add(&c, 8230, 70);
    check_crowd(&c, 3);
}

/* The search for a block's work takes two rounds of 128 sequences. */
static void test_more_sequences_than_threads(void **state)
{
    (void)state;
    struct crowd c = {.n_head = 2, .d_head = 4};
    for (int s = 0; s < 150; s++) {
        crowd_add(&c, s % 23, s == 130 ? 70 : s % 40 == 3 ? 5 + s % 7 : 1);
    }
    check_crowd(&c, 2);
}

/* Decode of more rows than are spread of requests. */
static void test_many_single_rows(void **state)
{
    (void)state;
    for (int i = 0; i < 2; i++) {
        struct crowd c = {.cache = caches[i], .n_head = 1, .d_head = 16};
        for (int s = 0; s < 70; s++) {
            crowd_add(&c, s * 3, 1);
        }
        check_crowd(&c, 1);
    }
}

/* Of the double's launches, those whose line holds name. */
static int count_launches(const char *path, const char *name)
{
    FILE *const file = fopen(path, "r");
    assert_non_null(file);
    char line[500];
    int n = 0;
    while (fgets(line, sizeof line, file) != NULL) {
        n += strncmp(line, "launch\t", 7) == 0 && strstr(line, name) != NULL;
    }
    (void)fclose(file);
    return n;
}

/* A limit of 128 k positions and as many rows as may be: drawn tokens are spread over blocks all
 * the same, and have ref's values and the bits that they have alone and with a small limit. One
 * text is so long that its parts are runs of splits; of the largest crowd most rows have one
 * block. */
static void test_neither_limit_nor_rows_change_how_tokens_are_drawn(void **state)
{
    (void)state;
    static const int n_seq[] = {8, 64, 256};
    if (!cuda_library_find()) {
        skip();
    }
    for (int i = 0; i < (getenv("TEST_FEW") != NULL ? 2 : 3); i++) {
        struct crowd c = {.cache = caches[i % 2], .n_head = 2, .d_head = 8};
        for (int s = 0; s < n_seq[i]; s++) {
            crowd_add(&c, s == 5 ? 64 * 130 + 3 : s * 37 % 300, 1);
        }
        struct crowd large = c;
        large.n_page_max = 131072 / KV_PAGE;
        large.n_alone = 8;
        check_crowd(&large, 1);
        crowd_fill(&c);
        float *const small = attended(&c);
        char path[] = "/tmp/test_cuda_attention.XXXXXX";
        const int file = mkstemp(path);
        assert_true(file >= 0);
        assert_int_equal(close(file), 0);
        assert_int_equal(setenv("CUDA_HOST_TRACE", path, 1), 0);
        c.n_page_max = large.n_page_max;
        float *const wide = attended(&c);
        assert_int_equal(unsetenv("CUDA_HOST_TRACE"), 0);
        const size_t n = (size_t)c.n_position * (size_t)(c.n_head * c.d_head);
        assert_memory_equal(small, wide, n * sizeof *small);
        if (strstr(getenv("PKMSERVE_CUDA_LIBRARY"), "cudahost") != NULL) {
            assert_int_equal(count_launches(path, "drawn_kernel"), 1);
            assert_int_equal(count_launches(path, ""), 1 + count_launches(path, "store_kernel"));
        }
        (void)unlink(path);
        free(small);
        free(wide);
        crowd_drop(&c);
    }
}

/* Scratch is for as many drawn rows as there may be sequences, of PART_MAX parts at most: that a
 * context may be longer costs nothing. */
static void test_scratch_does_not_grow_with_the_limit(void **state)
{
    (void)state;
    if (!cuda_library_find()) {
        skip();
    }
    int64_t taken[2];
    for (int i = 0; i < 2; i++) {
        const struct backend_options options = {"cuda", 1, false, NULL};
        struct backend *be = NULL;
        struct step *step = NULL;
        assert_int_equal(backend_open(&be, &options, NULL), ERR_OK);
        const struct step_limits limits = {.n_tok_max = 256,
                                           .n_seq_max = 256,
                                           .n_page_max = (i == 0 ? 8192 : 131072) / KV_PAGE,
                                           .d_model = 1024,
                                           .n_head = 16};
        const int64_t before = be->op->memory_available(be);
        assert_int_equal(be->op->step_new(be, &step, &limits, NULL), ERR_OK);
        const int64_t pages =
            (int64_t)limits.n_seq_max * limits.n_page_max * (int64_t)sizeof(int32_t);
        taken[i] = before - be->op->memory_available(be) - pages;
        be->op->step_free(be, step);
        backend_close(be);
    }
    assert_true(taken[0] > 256 * 64 * 1024 * 4);
    assert_true(taken[1] <= taken[0] + (1 << 20));
}

/* A stream goes on when its ring of pages is full: no page is looked for behind the ring's. */
static void test_a_stream_may_be_far_beyond_its_ring(void **state)
{
    (void)state;
    if (!cuda_library_find()) {
        skip();
    }
    const struct backend_options options = {"cuda", 1, false, NULL};
    const struct step_limits limits = {.n_tok_max = 1,
                                       .n_seq_max = 1,
                                       .n_page_max = 64,
                                       .n_span_max = 16,
                                       .d_model = 16,
                                       .n_head = 1};
    struct backend *be = NULL;
    struct step *step = NULL;
    struct err err = {0};
    assert_int_equal(backend_open(&be, &options, NULL), ERR_OK);
    assert_int_equal(be->op->step_new(be, &step, &limits, NULL), ERR_OK);
    step->n_tok = step->n_seq = 1;
    step->is_drawn = true;
    step->seq_first[1] = 1;
    step->pos[0] = 1 << 29;
    be->op->step_begin(be, step);
    assert_int_equal(be->op->finish(be, step, &err), ERR_OK);
    be->op->step_free(be, step);
    backend_close(be);
}

/* Both sides of every width at which another kernel or way of loading begins. Many heads make large
 * tiles, where there are any. */
static void test_widths_of_heads(void **state)
{
    (void)state;
    static const struct {
        enum dtype cache;
        int d_head;
    } cases[] = {
        {DTYPE_F32, 1},    {DTYPE_F32, 62},   {DTYPE_F32, 64},   {DTYPE_F32, 68},
        {DTYPE_F32, 100},  {DTYPE_F32, 101},  {DTYPE_F32, 112},  {DTYPE_F32, 128},
        {DTYPE_F32, 132},  {DTYPE_F32, 255},  {DTYPE_F32, 256},  {DTYPE_BF16, 2},
        {DTYPE_BF16, 20},  {DTYPE_BF16, 62},  {DTYPE_BF16, 64},  {DTYPE_BF16, 72},
        {DTYPE_BF16, 100}, {DTYPE_BF16, 102}, {DTYPE_BF16, 128}, {DTYPE_BF16, 132},
        {DTYPE_BF16, 254}, {DTYPE_BF16, 256},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        for (int n_head = 1; n_head <= (cases[i].d_head <= 100 ? 16 : 1); n_head += 15) {
            struct crowd c = {.cache = cases[i].cache, .n_head = n_head, .d_head = cases[i].d_head};
            crowd_add(&c, 59, 66);
            crowd_add(&c, 70, 1);
            check_crowd(&c, 2);
        }
    }
}

/* Pages that 16 bytes, or 8, cannot be copied from at a time, though the heads are wide enough. */
static void test_pages_that_start_anywhere(void **state)
{
    (void)state;
    static const struct {
        int shift, gap;
    } places[] = {{2, 8}, {4, 8}, {0, 2}, {0, 4}};
    for (size_t i = 0; i < 2 * sizeof places / sizeof *places; i++) {
        struct crowd c = {.cache = caches[i % 2], .n_head = 2, .d_head = 16};
        c.shift = places[i / 2].shift;
        c.gap = places[i / 2].gap;
        crowd_add(&c, 30, 40);
        crowd_add(&c, 70, 1);
        check_crowd(&c, 2);
    }
}

static void test_heads_that_are_too_wide(void **state)
{
    (void)state;
    if (!cuda_library_find()) {
        skip();
    }
    struct crowd c = {.n_head = 1, .d_head = 257};
    crowd_add(&c, 0, 1);
    crowd_fill(&c);
    struct side cuda = side_new("cuda", &c);
    const int begin[1] = {0};
    const int end[1] = {1};
    float out[257];
    struct err err = {0};
    assert_int_equal(attend(&cuda, &c, begin, end, out, &err), ERR_UNSUPPORTED);
    assert_non_null(strstr(err.message, "256 columns"));
    side_close(&cuda, &c);
    crowd_drop(&c);
}

/* Stores and attends the new rows in one step, by two ops or by one, and gives y, then all keys and
 * values. */
static float *store_and_attend(const struct crowd *c, bool by_two, struct err *err)
{
    struct side side = side_new("cuda", c);
    struct backend *const be = side.be;
    const int begin[SEQ_MAX] = {0};
    int end[SEQ_MAX];
    for (int s = 0; s < c->n_seq; s++) {
        end[s] = c->n_old[s] + c->n_new[s];
    }
    store(&side, c, begin, c->n_old);
    fill_step(&side, c, c->n_old, end);
    const int n_tok = side.step->n_tok;
    const struct tensor y = tensor_head(side.y, n_tok);
    const size_t page_bytes = (size_t)side.k_pages.cols * dtype_bytes(c->cache);
    const size_t pages_bytes = (size_t)side.k_pages.rows * page_bytes;
    const size_t y_bytes = (size_t)y.rows * (size_t)y.cols * sizeof(float);
    char *const all = calloc(1, y_bytes + 2 * pages_bytes);
    assert_non_null(all);
    be->op->step_begin(be, side.step);
    struct tensor k = tensor_head(side.k, n_tok);
    struct tensor v = tensor_head(side.v, n_tok);
    if (by_two) {
        op_kv_store(be, side.k_pages, side.v_pages, k, v, side.step, c->n_head);
        k.data = v.data = NULL;
    }
    op_attention(be, y, tensor_head(side.q, n_tok), side.k_pages, side.v_pages, k, v, side.step,
                 c->n_head, 1 / sqrtf((float)c->d_head));
    (void)be->op->finish(be, side.step, err);
    be->op->download(be, all, y);
    be->op->download(be, all + y_bytes, side.k_pages);
    be->op->download(be, all + y_bytes + pages_bytes, side.v_pages);
    side_close(&side, c);
    return (float *)(void *)all;
}

static void check_stored_on_the_way(struct crowd *c)
{
    struct err err = {0};
    crowd_fill(c);
    const int64_t d = (int64_t)c->n_head * c->d_head;
    const size_t bytes =
        (size_t)c->n_seq * (size_t)d * sizeof(float) +
        2 * (size_t)(first_page(c, c->n_seq) * KV_PAGE * d) * dtype_bytes(c->cache);
    float *const apart = store_and_attend(c, true, &err);
    for (int turn = 0; turn < 2; turn++) { /* of the double: who comes first must not matter */
        assert_int_equal(setenv("CUDA_HOST_ORDER", turn == 0 ? "forward" : "reverse", 1), 0);
        float *const together = store_and_attend(c, false, &err);
        assert_int_equal(err.code, ERR_OK);
        if (memcmp(together, apart, bytes) != 0) {
            fail_msg(
                "%d sequences, %d heads of %d, cache %s: attention that stores gives other bits "
                "than kv_store and attention",
                c->n_seq, c->n_head, c->d_head, dtype_name(c->cache));
        }
        free(together);
    }
    assert_int_equal(unsetenv("CUDA_HOST_ORDER"), 0);
    free(apart);
    crowd_drop(c);
}

/* Where each sequence has one row, attention stores on its way: the same y and the same
 * pages, whichever block has the last split, and however many rows there are. */
static void test_a_decode_step_stores_on_the_way(void **state)
{
    (void)state;
    if (!cuda_library_find()) {
        skip();
    }
    static const struct {
        int n_seq, n_head, d_head, shift;
    } cases[] = {{1, 1, 64, 0}, {5, 4, 16, 2}, {32, 2, 7, 0}, {3, 1, 132, 0},
                 {70, 1, 8, 0}, {6, 1, 96, 0}, {6, 2, 64, 1}};
    for (size_t i = 0; i < 2 * sizeof cases / sizeof *cases; i++) {
        struct crowd c = {.cache = caches[i % 2],
                          .n_head = cases[i / 2].n_head,
                          .d_head = cases[i / 2].d_head,
                          .shift = cases[i / 2].shift};
        c.d_head += c.cache == DTYPE_BF16 ? c.d_head % 2 : 0;
        c.gap = c.shift;
        for (int s = 0; s < cases[i / 2].n_seq; s++) {
            crowd_add(&c, s * 61 % 331, 1);
        }
        check_stored_on_the_way(&c);
    }
    struct crowd c = {.n_head = 2, .d_head = 8}; /* not one row: stored before */
    crowd_add(&c, 20, 2);
    crowd_add(&c, 30, 0);
    check_stored_on_the_way(&c);
    struct crowd wide = {.cache = DTYPE_BF16, .n_head = 1, .d_head = 64}; /* parts are runs */
    crowd_add(&wide, 32 * 65 + 17, 1);
    crowd_add(&wide, 32 * 130 - 1, 1);
    crowd_add(&wide, 700, 1);
    check_stored_on_the_way(&wide);
}

/* It takes a launch less: of three, the third fails. */
static void test_a_decode_step_launches_once(void **state)
{
    (void)state;
    if (!cuda_library_find() || strstr(getenv("PKMSERVE_CUDA_LIBRARY"), "cudahost") == NULL) {
        skip();
    }
    struct crowd c = {.n_head = 2, .d_head = 8};
    crowd_add(&c, 20, 1);
    crowd_fill(&c);
    assert_int_equal(setenv("CUDA_HOST_FAIL_LAUNCH", "3", 1), 0);
    for (int by_two = 0; by_two < 2; by_two++) {
        struct err err = {0};
        free(store_and_attend(&c, by_two == 1, &err));
        assert_int_equal(err.code, by_two == 1 ? ERR_DEVICE : ERR_OK);
    }
    assert_int_equal(unsetenv("CUDA_HOST_FAIL_LAUNCH"), 0);
    crowd_drop(&c);
}

/* Without their own kernel (PKMSERVE_CUDA_DRAWN=0) drawn tokens attend in tiles, as many rows of
 * requests do, and are stored before: ref's values, and the same bits alone and in a crowd. */
static void test_drawn_tokens_without_their_kernel(void **state)
{
    (void)state;
    char path[] = "/tmp/test_cuda_attention.XXXXXX";
    assert_int_equal(close(mkstemp(path)), 0);
    assert_int_equal(setenv("PKMSERVE_CUDA_DRAWN", "0", 1), 0);
    for (int i = 0; i < 2; i++) {
        struct crowd c = {.cache = caches[i], .n_head = 2, .d_head = 16, .n_alone = 3};
        for (int s = 0; s < 20; s++) {
            crowd_add(&c, s * 53 % 311, 1);
        }
        struct crowd stored = c;
        assert_int_equal(setenv("CUDA_HOST_TRACE", path, 1), 0);
        check_crowd(&c, 1);
        assert_int_equal(unsetenv("CUDA_HOST_TRACE"), 0);
        if (strstr(getenv("PKMSERVE_CUDA_LIBRARY"), "cudahost") != NULL) {
            assert_int_equal(count_launches(path, "drawn_kernel"), 0);
            assert_int_equal(count_launches(path, "tile_kernel"), (i + 1) * (1 + 2 * 3));
        }
        check_stored_on_the_way(&stored);
    }
    assert_int_equal(unsetenv("PKMSERVE_CUDA_DRAWN"), 0);
    (void)unlink(path);
}

int main(void)
{
    (void)setenv("PKMSERVE_CUDA_ATTENTION", "0", 1); /* test_cuda_attention_mma.c has the other */
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_more_splits_than_threads),
        cmocka_unit_test(test_more_sequences_than_threads),
        cmocka_unit_test(test_many_single_rows),
        cmocka_unit_test(test_a_stream_may_be_far_beyond_its_ring),
        cmocka_unit_test(test_neither_limit_nor_rows_change_how_tokens_are_drawn),
        cmocka_unit_test(test_scratch_does_not_grow_with_the_limit),
        cmocka_unit_test(test_widths_of_heads),
        cmocka_unit_test(test_pages_that_start_anywhere),
        cmocka_unit_test(test_heads_that_are_too_wide),
        cmocka_unit_test(test_a_decode_step_stores_on_the_way),
        cmocka_unit_test(test_a_decode_step_launches_once),
        cmocka_unit_test(test_drawn_tokens_without_their_kernel),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
