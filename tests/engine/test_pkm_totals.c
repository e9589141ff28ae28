/* The statistics of all traffic are those of the positions that were sampled, and the sample is one
 * position in TOTALS_EVERY. */
#include "engine/pkm_stats.h"
#include "tests/engine/harness.h"

#include <math.h>

enum { N_COLUMN = TINY_MEMORY_HEAD * TINY_K_TOP };

/* What was taken of the last step is added when there is nothing else to do. */
static void await_idle(struct engine *engine)
{
    while (!atomic_load(&engine->queue.idle)) {
        (void)usleep(200);
    }
}

static void assert_stats(const struct pkm_stats *a, const struct pkm_stats *b)
{
    assert_int_equal(a->lookups, b->lookups);
    assert_memory_equal(&a->used, &b->used, sizeof a->used);
    assert_memory_equal(&a->kl_w, &b->kl_w, sizeof a->kl_w);
    assert_memory_equal(&a->kl_u, &b->kl_u, sizeof a->kl_u);
    assert_int_equal(a->top90_w, b->top90_w);
    assert_int_equal(a->top90_u, b->top90_u);
}

/* Texts of one step each, traced: of each the sampled position's look-ups are known. */
static void totals_are_those_of_the_sample(void **state)
{
    enum { N_TEXT = 30 };
    const struct engine_options options = harness_options(harness_dir);
    struct engine *const engine = harness_open_as(state, &options);
    double weight[TINY_SLOT] = {0};
    uint32_t count[TINY_SLOT] = {0};
    struct pkm_trace sampled = {.weight = weight, .count = count};
    struct pkm_stats got;
    assert_int_equal(engine_pkm_stats(engine, 0, &got, NULL), ERR_OK);
    assert_int_equal(got.lookups, 0); /* the self-test is no traffic */
    assert_true(isnan(got.kl_w));
    for (int t = 0; t < N_TEXT; t++) {
        struct request *const request = harness_score(1, TINY_CONTEXT, TINY_CONTEXT);
        request->trace_memory = request->trace_tokens = true;
        harness_item(engine, request, 0, t, TOTALS_EVERY);
        harness_run(engine, request);
        await_idle(engine);
        const uint32_t place = (uint32_t)t * 2654435769u;
        const size_t first = (size_t)((uint64_t)place * TOTALS_EVERY >> 32) * N_COLUMN;
        const struct pkm_trace *const trace = &request->item[0].trace[0];
        for (size_t i = first; i < first + N_COLUMN; i++) {
            weight[trace->slots[i]] += (double)trace->weights[i];
            count[trace->slots[i]]++;
        }
        sampled.lookups += N_COLUMN;
        struct pkm_stats expected;
        assert_int_equal(pkm_stats_of(&sampled, TINY_SLOT, &expected, NULL), ERR_OK);
        assert_int_equal(engine_pkm_stats(engine, 0, &got, NULL), ERR_OK);
        assert_stats(&got, &expected);
        request_release(request);
    }
    assert_int_equal(engine_pkm_sampled(engine), N_TEXT);
    engine_close(engine);
}

/* Steps of one row and of many count alike; what the cache holds is not looked up. */
static void one_position_in_so_many(void **state)
{
    struct engine_options options = harness_options(harness_dir);
    options.max_batch_tokens = 1024;
    struct engine *const engine = harness_open_as(state, &options);
    for (int turn = 0; turn < 2; turn++) {
        struct request *const request = harness_generation(9, 5);
        for (int i = 0; i < 9; i++) {
            harness_item(engine, request, i, i, 70);
        }
        harness_run(engine, request);
        request_release(request);
    }
    await_idle(engine);
    const int64_t n = 9 * (70 + 4) + 9 * (70 - 64 + 4);
    assert_int_equal((int)atomic_load(&engine_stats(engine)->step_tokens.sum), n);
    assert_int_equal(engine_pkm_sampled(engine), n / TOTALS_EVERY);
    engine_close(engine);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        HARNESS_EACH(totals_are_those_of_the_sample),
        HARNESS_EACH(one_position_in_so_many),
    };
    return cmocka_run_group_tests(tests, harness_setup, harness_teardown);
}
