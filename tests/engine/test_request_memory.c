/* The memory that requests hold: what fits, what is given back, and that it lives as long as the
 * last who uses it. */
#include "engine/request.h"
#include "engine/request_memory.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmocka.h>

static size_t page;

static struct request_memory *open_memory(int64_t arrays_max, size_t n_page)
{
    struct request_memory *memory = NULL;
    assert_int_equal(request_memory_open(&memory, arrays_max, n_page * page, NULL), ERR_OK);
    return memory;
}

static void arrays_are_bounded_together(void **state)
{
    (void)state;
    struct request_memory *const memory = open_memory(100, 0);
    assert_true(request_memory_count(memory, 60));
    assert_false(request_memory_count(memory, 41));
    assert_true(request_memory_count(memory, 40));
    request_memory_uncount(memory, 60);
    assert_true(request_memory_count(memory, 41));
    request_memory_uncount(memory, 81);
    request_memory_drop(memory);
}

struct relief {
    struct request_memory *memory;
    int64_t has, asked; /* what may be uncounted; the bytes that were lacking the last time */
};

static void relieve(void *ctx, int64_t bytes)
{
    struct relief *const relief = ctx;
    relief->asked = bytes;
    request_memory_uncount(relief->memory, relief->has);
    relief->has = 0;
}

/* Who can make room is asked for what is lacking, once, and only then. */
static void room_is_made_for_what_does_not_fit(void **state)
{
    (void)state;
    struct relief relief = {.memory = open_memory(100, 0), .has = 30};
    request_memory_relieved_by(relief.memory, relieve, &relief);
    assert_true(request_memory_count(relief.memory, 80));
    assert_int_equal(relief.asked, 0);
    assert_true(request_memory_count(relief.memory, 45));
    assert_int_equal(relief.asked, 25);
    assert_int_equal(request_memory_counted(relief.memory), 95);
    assert_false(request_memory_count(relief.memory, 6));
    assert_int_equal(relief.asked, 1);
    request_memory_uncount(relief.memory, 95);
    request_memory_drop(relief.memory);
}

/* Blocks are zeroed and apart, and the first gap is used again. */
static void blocks_fill_the_gaps(void **state)
{
    (void)state;
    struct request_memory *const memory = open_memory(0, 10);
    struct memory_block block[4] = {{0}};
    char *at[4];
    for (int i = 0; i < 3; i++) {
        at[i] = request_memory_take(memory, &block[i], 3 * page - 5);
        assert_ptr_equal(at[i], at[0] + (size_t)i * 3 * page);
        memset(at[i], 1 + i, 3 * page - 5);
    }
    assert_null(request_memory_take(memory, &block[3], page + 1));
    request_memory_give(memory, &block[1]);
    assert_int_equal(request_memory_arena_used(memory), 6 * page);
    assert_null(
        request_memory_take(memory, &block[3], 3 * page + 1)); /* 4 pages, but not in a row */
    at[3] = request_memory_take(memory, &block[3], 3 * page);
    assert_ptr_equal(at[3], at[1]);
    for (size_t i = 0; i < 3 * page; i++) {
        assert_int_equal(at[3][i], 0);
    }
    assert_int_equal(at[0][3 * page - 6], 1);
    assert_int_equal(at[2][0], 3);
    request_memory_give(memory, &block[0]);
    request_memory_give(memory, &block[0]); /* nothing is taken: nothing happens */
    request_memory_give(memory, &block[2]);
    request_memory_give(memory, &block[3]);
    at[0] = request_memory_take(memory, &block[0], 10 * page);
    assert_non_null(at[0]);
    request_memory_give(memory, &block[0]);
    request_memory_drop(memory);
}

/* What is given back is no longer resident. */
static void given_pages_return_to_the_system(void **state)
{
    (void)state;
    enum { N = 64 };
    struct request_memory *const memory = open_memory(0, N);
    struct memory_block block = {0};
    char *const at = request_memory_take(memory, &block, N * page);
    unsigned char resident[N];
    memset(at, 1, N * page);
    assert_int_equal(mincore(at, N * page, resident), 0);
    assert_true(resident[0] & 1);
    request_memory_give(memory, &block);
    assert_int_equal(mincore(at, N * page, resident), 0);
    for (int i = 0; i < N; i++) {
        assert_false(resident[i] & 1);
    }
    request_memory_drop(memory);
}

/* A trace takes the least of sums per slot and all look-ups. */
static void traces_grow_with_the_look_ups(void **state)
{
    (void)state;
    static struct model_info info = {.n_memory = 2};
    for (int m = 0; m < 2; m++) {
        info.memory[m].n_slot = 1 << 20;
        info.memory[m].shape.n_head = 4;
        info.memory[m].shape.k_top = 32;
    }
    const size_t dense = 2 * (12u << 20);
    assert_true(request_trace_bytes(&info, 1, false) < 4096);
    assert_true(request_trace_bytes(&info, 100, false) < 2 * 100 * 128 * 8 + 4096);
    assert_true(request_trace_bytes(&info, 1 << 20, false) < dense + 4096);
    assert_true(request_trace_bytes(&info, 1 << 20, true) >= (size_t)2 * 128 * 8 << 20);
    size_t last = 0;
    for (int64_t n = 1; n < 100000; n = n * 3 / 2 + 1) {
        const size_t bytes = request_trace_bytes(&info, n, false);
        assert_true(bytes >= last && bytes < dense + 4096);
        last = bytes;
    }
}

/* Each kind of result of 10 tokens; a generation has 7 new ones, a score 9 predictions. */
static void each_array_is_counted(void **state)
{
    (void)state;
    static const struct {
        enum request_kind kind;
        int n_top; /* -1: without log-probabilities */
        bool echo, entropy;
        int n_target;
        bool bare;
        int64_t bytes;
    } row[] = {
        {REQUEST_GENERATE, -1, false, false, 0, false, 10 * 4 + 7 * 4},
        {REQUEST_GENERATE, 0, false, false, 0, false, 10 * 4 + 7 * (4 + 8)},
        {REQUEST_GENERATE, 3, false, false, 0, false, 10 * 4 + 7 * (4 + 8 + 3 * 8)},
        {REQUEST_GENERATE, -1, true, false, 0, false, 10 * 4 + 7 * 4},
        {REQUEST_GENERATE, 0, true, false, 0, false, 10 * 4 + 7 * (4 + 8) + 10 * 8},
        {REQUEST_GENERATE, 3, true, false, 0, false, 10 * 4 + 7 * (4 + 32) + 10 * 32},
        {REQUEST_SCORE, 0, false, false, 0, false, 10 * 4 + 9 * 8},
        {REQUEST_SCORE, 2, false, false, 0, false, 10 * 4 + 9 * (8 + 2 * 8)},
        {REQUEST_SCORE, 0, false, true, 0, false, 10 * 4 + 9 * (8 + 4)},
        {REQUEST_SCORE, 0, false, false, 5, false, 10 * 4 + 9 * 8 + 5 * 4},
        {REQUEST_SCORE, 2, false, true, 5, false, 10 * 4 + 9 * (8 + 2 * 8 + 4) + 5 * 4},
        {REQUEST_SCORE, 2, false, true, 5, true, 10 * 4 + 9 * 8},
    };
    static struct model_info info = {.n_vocab = 100, .context = 4096};
    struct request_memory *const memory = open_memory(10000, 0);
    for (size_t i = 0; i < sizeof row / sizeof row[0]; i++) {
        struct request *const request = request_new(row[i].kind, 1);
        request_use_memory(request, memory);
        request->sampling = (struct sampling){.max_tokens = 7};
        request->n_top = row[i].n_top;
        request->echo = row[i].echo;
        request->entropy = row[i].entropy;
        request->n_target = row[i].n_target;
        request->item[0].bare = row[i].bare;
        int32_t *const ids = calloc(10, sizeof *ids);
        assert_int_equal(request_set_item(request, 0, ids, 10, &info, NULL), ERR_OK);
        if (request_memory_counted(memory) != row[i].bytes) {
            fail_msg("row %zu: expected %lld bytes, got %lld", i, (long long)row[i].bytes,
                     (long long)request_memory_counted(memory));
        }
        request_release(request);
        assert_int_equal(request_memory_counted(memory), 0);
    }
    request_memory_drop(memory);
}

/* A request counts its arrays before it allocates them, and gives everything back. */
static void requests_count_what_they_hold(void **state)
{
    (void)state;
    static struct model_info info = {.n_vocab = 100, .context = 4096};
    struct request_memory *const memory = open_memory(10000, 0);
    struct err err = {0};
    struct request *const request = request_new(REQUEST_SCORE, 3);
    request_use_memory(request, memory);
    request->n_top = 0;
    for (int i = 0; i < 3; i++) {
        int32_t *const ids = calloc(400, sizeof *ids);
        const enum err_code code = request_set_item(request, i, ids, 400, &info, &err);
        /* 400 ids and 399 pairs of log-probability and rank: 4792 bytes */
        assert_int_equal(code, i < 2 ? ERR_OK : ERR_ARGUMENT);
    }
    assert_non_null(strstr(err.message, "14376 bytes or more, the limit (--max-request-bytes)"));
    assert_int_equal(request_memory_counted(memory), 2 * 4792);
    struct request *const other = request_new(REQUEST_SCORE, 1);
    request_use_memory(other, memory);
    other->n_top = 0;
    int32_t *const ids = calloc(400, sizeof *ids);
    assert_int_equal(request_set_item(other, 0, ids, 400, &info, &err), ERR_QUEUE_MEMORY);
    request_memory_drop(memory); /* the requests still use it */
    request_release(other);
    assert_int_equal(request_memory_counted(memory), 2 * 4792);
    request_release(request);
}

int main(void)
{
    page = (size_t)sysconf(_SC_PAGESIZE);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(arrays_are_bounded_together),
        cmocka_unit_test(room_is_made_for_what_does_not_fit),
        cmocka_unit_test(blocks_fill_the_gaps),
        cmocka_unit_test(given_pages_return_to_the_system),
        cmocka_unit_test(traces_grow_with_the_look_ups),
        cmocka_unit_test(each_array_is_counted),
        cmocka_unit_test(requests_count_what_they_hold),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
