/* A device that runs ahead: a step begins while the one before is computed, and feeds on what that
 * draws. That the results are those of any other device, the tests of the engine show that run on
 * each. */
#include "engine/overlays_inside.h"
#include "tests/engine/harness.h"

enum { N_NEW = 20 };

static struct engine *open_ahead(void)
{
    const struct engine_options options = harness_options(harness_dir);
    struct engine *const engine = harness_open(&options);
    device_begin_ahead(engine);
    return engine;
}

/* With the gate closed, and a waiter for requests. */
static struct engine *open_gated(struct gate *gate, struct waiter *waiter)
{
    struct engine *const engine = open_ahead();
    gate_begin(gate, engine);
    waiter_begin(waiter);
    return engine;
}

/* Nothing that has ended holds anything. */
static void assert_all_free(struct engine *engine)
{
    while (!atomic_load(&engine->queue.idle)) {
        (void)usleep(200);
    }
    assert_null(engine->ahead);
    assert_int_equal(engine->n_active, 0);
    assert_int_equal(kvpages_n_held(&engine->pages), 0);
}

static struct request *generation(struct engine *engine, int salt, int n_new)
{
    struct request *const request = harness_generation(1, n_new);
    harness_item(engine, request, 0, salt, 5);
    return request;
}

/* Each step of drawn tokens but the last begins ahead; the length is known, so none is computed for
 * nothing. */
static void each_step_begins_ahead(void **state)
{
    (void)state;
    struct engine *const engine = open_ahead();
    struct request *const request = generation(engine, 1, N_NEW);
    harness_run(engine, request);
    assert_int_equal(request->item[0].n_out, N_NEW);
    assert_int_equal(harness_device.n_ahead, N_NEW - 1);
    assert_int_equal((int)atomic_load(&engine_stats(engine)->steps), N_NEW);
    request_release(request);
    engine_close(engine);
}

/* What a penalty makes of the logits depends on the token that is being drawn, and what a trace
 * holds on whether it is the last one. An overlay's rows are given back when their request ends. */
static void what_depends_on_the_token_waits_for_it(void **state)
{
    (void)state;
    enum { PENALTY, TRACE, OVERLAY, N_REASON };
    for (int reason = 0; reason < N_REASON; reason++) {
        struct overlay_version version = {.refs = 2, .readers = 2}; /* without rows. Never freed */
        struct engine_options options = harness_options(harness_dir);
        options.overlay_bytes = reason == OVERLAY ? 4096 : 0;
        struct engine *const engine = harness_open(&options);
        device_begin_ahead(engine);
        struct request *const request = harness_generation(1, N_NEW);
        request->trace_memory = reason == TRACE;
        request->sampling.presence = reason == PENALTY ? 0.5F : 0;
        request->overlays.version[0] = &version;
        request->overlays.n = reason == OVERLAY;
        harness_item(engine, request, 0, 1, 5);
        harness_run(engine, request);
        assert_int_equal(request->item[0].n_out, N_NEW);
        assert_int_equal(harness_device.n_ahead, 0);
        request_release(request);
        engine_close(engine);
    }
}

/* The row of a text that has ended is dropped, that of the text beside it is taken. */
static void a_text_that_ends_leaves_others_alone(void **state)
{
    (void)state;
    struct engine *const engine = open_ahead();
    struct request *const whole[2] = {generation(engine, 1, N_NEW), generation(engine, 2, N_NEW)};
    harness_run(engine, whole[0]);
    harness_run(engine, whole[1]);
    const int32_t *const expected = whole[0]->item[0].out_id;
    const int32_t last = expected[N_NEW / 2];
    int n = 0; /* up to the first such token */
    while (expected[n++] != last) {
    }
    struct request *const stops = generation(engine, 1, N_NEW);
    struct request *const runs = generation(engine, 2, N_NEW);
    stops->sampling.n_stop_id = 1;
    stops->sampling.stop_id[0] = last;
    struct gate gate;
    struct waiter waiter;
    gate_begin(&gate, engine);
    waiter_begin(&waiter);
    harness_submit(engine, stops, &waiter);
    harness_submit(engine, runs, &waiter);
    gate_allow(&gate, -1);
    waiter_wait(&waiter, stops);
    waiter_wait(&waiter, runs);
    assert_int_equal(stops->item[0].n_out, n);
    assert_memory_equal(stops->item[0].out_id, expected, (size_t)n * sizeof *expected);
    assert_memory_equal(runs->item[0].out_id, whole[1]->item[0].out_id, N_NEW * sizeof *expected);
    assert_all_free(engine);
    for (int i = 0; i < 2; i++) {
        request_release(whole[i]);
    }
    request_release(stops);
    request_release(runs);
    engine_close(engine);
}

/* Who cancels hears of it before the step ends that has begun ahead, and that is waited for. */
static void cancelled_while_a_step_runs_ahead(void **state)
{
    (void)state;
    struct gate gate;
    struct waiter waiter;
    struct engine *const engine = open_gated(&gate, &waiter);
    struct request *const request = generation(engine, 1, N_NEW);
    harness_submit(engine, request, &waiter);
    gate_allow(&gate, 3);
    gate_await(&gate, 4);
    request_cancel(request);
    gate_allow(&gate, 1);
    waiter_wait(&waiter, request); /* step 5 is at the gate */
    assert_int_equal(request->item[0].n_out, 4);
    assert_int_equal(atomic_load(&request->item[0].state), FINISH_CANCELLED);
    gate_await(&gate, 5);
    struct request *const next = generation(engine, 2, 3); /* in the pages that are free again */
    harness_submit(engine, next, &waiter);
    gate_allow(&gate, -1);
    waiter_wait(&waiter, next);
    assert_int_equal(next->item[0].n_out, 3);
    assert_all_free(engine);
    request_release(request);
    request_release(next);
    engine_close(engine);
}

/* A prompt's step begins while that of drawn tokens is computed. */
static void prompts_begin_beside_drawn_tokens(void **state)
{
    (void)state;
    struct gate gate;
    struct waiter waiter;
    struct engine *const engine = open_gated(&gate, &waiter);
    struct request *const first = generation(engine, 1, N_NEW);
    struct request *const second = generation(engine, 2, N_NEW);
    harness_submit(engine, first, &waiter);
    gate_allow(&gate, 1);
    gate_await(&gate, 2);
    assert_int_equal(harness_device.n_beside, 0);
    harness_submit(engine, second, &waiter);
    gate_allow(&gate, -1);
    waiter_wait(&waiter, first);
    waiter_wait(&waiter, second);
    assert_int_equal(harness_device.n_beside, 1);
    request_release(first);
    request_release(second);
    engine_close(engine);
}

/* A failure, or the end of the engine, while a step runs ahead. */
static void an_engine_ends_while_a_step_runs_ahead(void **state)
{
    (void)state;
    for (int fails = 0; fails < 2; fails++) {
        struct gate gate;
        struct waiter waiter;
        struct engine *const engine = open_gated(&gate, &waiter);
        struct request *const request = generation(engine, 1, N_NEW);
        harness_submit(engine, request, &waiter);
        gate_allow(&gate, 2);
        gate_await(&gate, 3);
        gate.fail = fails == 1; /* the step waits at the gate, whose mutex orders this */
        pthread_t opener;
        assert_int_equal(pthread_create(&opener, NULL, gate_open_when_draining, engine), 0);
        assert_int_equal(engine_drain(engine, 1), fails ? 0 : 1);
        assert_int_equal(pthread_join(opener, NULL), 0);
        waiter_wait(&waiter, request);
        assert_int_equal(atomic_load(&request->item[0].state),
                         fails ? FINISH_ERROR : FINISH_SHUTDOWN);
        assert_null(engine->ahead);
        request_release(request);
        engine_close(engine);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_step_begins_ahead),
        cmocka_unit_test(what_depends_on_the_token_waits_for_it),
        cmocka_unit_test(a_text_that_ends_leaves_others_alone),
        cmocka_unit_test(cancelled_while_a_step_runs_ahead),
        cmocka_unit_test(prompts_begin_beside_drawn_tokens),
        cmocka_unit_test(an_engine_ends_while_a_step_runs_ahead),
    };
    return cmocka_run_group_tests(tests, harness_setup, harness_teardown);
}
