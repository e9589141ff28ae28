/* The statistics of all traffic are those of the positions that were sampled, and the sample is one
 * position in TOTALS_EVERY; and what else is counted of look-ups. */
#include "engine/overlays_inside.h"
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

/* A look-up whose weight is not a number is left out of all sums, which it would spoil for ever. */
static void what_is_no_number_is_left_out(void **state)
{
    (void)state;
    enum { N_SLOT = 16, N = 4 };
    static const struct model_info info = {
        .n_memory = 1, .memory = {{.n_slot = N_SLOT, .shape = {.n_head = 1, .k_top = N}}}};
    static const int32_t slots[N] = {3, 5, 3, 7};
    const float weights[N] = {0.5F, NAN, 0.25F, -NAN};
    struct err err = {0};
    struct pkm_totals totals;
    struct pkm_stats got;
    assert_int_equal(pkm_totals_open(&totals, &info, &err), ERR_OK);
    pkm_totals_take(&totals, &info, 0, 1, slots, weights);
    pkm_totals_add(&totals, &info);
    assert_int_equal(pkm_totals_stats(&totals, &info, 0, &got, &err), ERR_OK);
    const struct pkm_trace numbers = {
        .weight = (double[N_SLOT]){[3] = 0.75}, .count = (uint32_t[N_SLOT]){[3] = 2}, .lookups = N};
    struct pkm_stats expected;
    assert_int_equal(pkm_stats_of(&numbers, N_SLOT, &expected, NULL), ERR_OK);
    assert_stats(&got, &expected);
    pkm_totals_close(&totals);

    struct pkm_counts counts;
    struct counts head;
    assert_int_equal(pkm_counts_open(&counts, &info, harness_dir, 1, &err), ERR_OK);
    pkm_counts_begin(&counts, &info, 0);
    pkm_counts_add(&counts, &info, 0, 0, slots, weights, N);
    pkm_counts_head(&counts, &info, &head);
    const double expected_weight[N_SLOT] = {[3] = 0.75};
    const int64_t expected_number[2][N_SLOT] = {{[3] = 2}, {[3] = 1}};
    double weight[N_SLOT];
    int64_t number[2][N_SLOT];
    pkm_counts_copy(&counts, &head, 0, COUNTS_WEIGHT, 0, N_SLOT, weight);
    pkm_counts_copy(&counts, &head, 0, COUNTS_READS, 0, N_SLOT, number[0]);
    pkm_counts_copy(&counts, &head, 0, COUNTS_DOCUMENTS, 0, N_SLOT, number[1]);
    assert_memory_equal(weight, expected_weight, sizeof weight);
    assert_memory_equal(number, expected_number, sizeof number);
    pkm_counts_close(&counts);
}

/* Rows for all slots of one of two memories answer the look-ups of that one. */
static void an_overlay_answers_for_its_own_memory(void **state)
{
    (void)state;
    enum { N_SLOT = 8, N = 5 };
    static int32_t all[N_SLOT] = {0, 1, 2, 3, 4, 5, 6, 7};
    static const int32_t slots[N] = {0, 7, 3, 3, 5};
    static struct overlays overlays;
    struct overlay_version version = {.info = {.n_memory = 1}, .slots = {{1, N_SLOT, all}}};
    const struct request_overlays taken = {.version = {&version}, .n = 1};
    long long n_read = 0;
    long long n_hit = 0;
    for (int owner = 0; owner < 2; owner++) {
        overlays_count(&overlays, &taken, owner, slots, N);
        overlays_reads(&overlays, &n_read, &n_hit);
        assert_int_equal(n_read, (owner + 1) * N);
        assert_int_equal(n_hit, owner * N);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        HARNESS_EACH(totals_are_those_of_the_sample),
        HARNESS_EACH(one_position_in_so_many),
        cmocka_unit_test(what_is_no_number_is_left_out),
        cmocka_unit_test(an_overlay_answers_for_its_own_memory),
    };
    return cmocka_run_group_tests(tests, harness_setup, harness_teardown);
}
