/* The life of requests: queue, classes, cancellation, deadlines, draining, failure. Steps end when
 * the test's gate lets them, so every stage can be met on purpose. */
#include "engine/clock.h"
#include "tests/engine/harness.h"

static int state_of(const struct request *request)
{
    return atomic_load(&request->item[0].state);
}

/* Waits until nothing is held, by the gauges, and the engine is idle: it has no step to be late
 * with. */
static void assert_all_free(struct engine *engine)
{
    while (atomic_load(&engine->stats.kv_pages_used) != 0 ||
           atomic_load(&engine->stats.running) != 0 || atomic_load(&engine->stats.waiting) != 0 ||
           !atomic_load(&engine->queue.idle)) {
        (void)usleep(200);
    }
    assert_int_equal(engine_stalled_ms(engine), 0);
}

/* ---- cancellation -------------------------------------------------------------------------- */

static void cancelled_while_decoding(void **state)
{
    const struct engine_options options = harness_options(harness_dir);
    struct gate gate;
    struct waiter waiter;
    struct engine *const engine = harness_open_gated(state, &options, &gate, &waiter);
    struct request *const request = harness_generation(1, 50);
    harness_item(engine, request, 0, 1, 5);
    harness_submit(engine, request, &waiter);
    gate_allow(&gate, 3);
    gate_await(&gate, 4); /* the fourth step is under way */
    assert_int_equal(atomic_load(&request->item[0].n_out), 3);
    request_cancel(request);
    gate_allow(&gate, 1);
    waiter_wait(&waiter, request);
    assert_int_equal(state_of(request), FINISH_CANCELLED);
    assert_int_equal(atomic_load(&request->item[0].n_out), 4); /* within a step */
    assert_int_equal(gate.n_arrived, 4);
    assert_int_equal(atomic_load(&engine->stats.cancelled[STAGE_DECODE]), 1);
    assert_all_free(engine);
    request_release(request);
    engine_close(engine);
}

static void cancelled_while_prefilling(void **state)
{
    struct engine_options options = harness_options(harness_dir);
    options.max_batch_tokens = options.max_seqs = 8;
    struct gate gate;
    struct waiter waiter;
    struct engine *const engine = harness_open_gated(state, &options, &gate, &waiter);
    struct request *const request = harness_generation(1, 5);
    harness_item(engine, request, 0, 1, 80);
    harness_submit(engine, request, &waiter);
    gate_await(&gate, 1);
    request_cancel(request);
    gate_allow(&gate, 1);
    waiter_wait(&waiter, request);
    assert_int_equal(state_of(request), FINISH_CANCELLED);
    assert_int_equal(request->item[0].n_position, 8);
    assert_int_equal(atomic_load(&engine->stats.cancelled[STAGE_PREFILL]), 1);
    assert_all_free(engine);
    request_release(request);
    engine_close(engine);
}

static void cancelled_while_scoring_with_windows_queued(void **state)
{
    struct engine_options options = harness_options(harness_dir);
    options.max_seqs = 2;
    options.max_batch_tokens = 32;
    struct gate gate;
    struct waiter waiter;
    struct engine *const engine = harness_open_gated(state, &options, &gate, &waiter);
    struct request *const request = harness_score(3, 20, 5);
    for (int i = 0; i < 3; i++) {
        harness_item(engine, request, i, i, 90);
    }
    harness_submit(engine, request, &waiter);
    gate_await(&gate, 1);
    assert_int_equal(atomic_load(&engine->stats.waiting),
                     1); /* its last sequence is not admitted */
    request_cancel(request);
    gate_allow(&gate, 1);
    waiter_wait(&waiter, request);
    for (int i = 0; i < 3; i++) {
        assert_int_equal(atomic_load(&request->item[i].state), FINISH_CANCELLED);
    }
    assert_int_equal(atomic_load(&engine->stats.cancelled[STAGE_SCORE]), 1);
    assert_all_free(engine);
    request_release(request);
    engine_close(engine);
}

static void cancelled_while_queued(void **state)
{
    struct engine_options options = harness_options(harness_dir);
    options.max_seqs = 1;
    struct gate gate;
    struct waiter waiter;
    struct engine *const engine = harness_open_gated(state, &options, &gate, &waiter);
    struct request *const running = harness_generation(1, 10);
    struct request *const queued = harness_generation(1, 10);
    harness_item(engine, running, 0, 1, 5);
    harness_item(engine, queued, 0, 2, 5);
    harness_submit(engine, running, &waiter);
    gate_await(&gate, 1);
    harness_submit(engine, queued, &waiter);
    request_cancel(queued);
    gate_allow(&gate, 1);
    waiter_wait(&waiter, queued);
    assert_int_equal(state_of(queued), FINISH_CANCELLED);
    assert_int_equal(atomic_load(&queued->start_us), 0);
    assert_int_equal(atomic_load(&engine->stats.cancelled[STAGE_QUEUED]), 1);
    assert_int_equal(state_of(running), FINISH_NONE);
    gate_allow(&gate, -1);
    waiter_wait(&waiter, running);
    assert_int_equal(state_of(running), FINISH_LENGTH);
    assert_all_free(engine);
    request_release(running);
    request_release(queued);
    engine_close(engine);
}

/* The front end leaves without waiting: the engine ends the work and frees the request. */
static void released_while_running(void **state)
{
    const struct engine_options options = harness_options(harness_dir);
    struct engine *const engine = harness_open_as(state, &options);
    for (int i = 0; i < 50; i++) {
        struct waiter waiter;
        waiter_begin(&waiter);
        struct request *const request = harness_generation(2, 40);
        harness_item(engine, request, 0, i, 10);
        harness_item(engine, request, 1, i + 1, 10);
        harness_submit(engine, request, &waiter);
        (void)usleep((useconds_t)(i * 37 % 800));
        request_release(request);
        memset(&waiter, 0xee, sizeof waiter); /* a wake from now on would not survive this */
    }
    assert_all_free(engine);
    engine_close(engine);
}

/* ---- deadlines ----------------------------------------------------------------------------- */

static void deadlines_end_running_and_queued_work(void **state)
{
    struct engine_options options = harness_options(harness_dir);
    options.max_seqs = 1;
    struct gate gate;
    struct waiter waiter;
    struct engine *const engine = harness_open_gated(state, &options, &gate, &waiter);
    struct request *const running = harness_generation(1, 10);
    struct request *const queued = harness_generation(1, 10);
    harness_item(engine, running, 0, 1, 5);
    harness_item(engine, queued, 0, 2, 5);
    harness_submit(engine, running, &waiter);
    gate_await(&gate, 1);
    running->deadline_us = 1; /* the engine waits at the gate, whose mutex orders this */
    queued->deadline_us = 1;
    harness_submit(engine, queued, &waiter);
    gate_allow(&gate, 1);
    waiter_wait(&waiter, running);
    waiter_wait(&waiter, queued);
    assert_int_equal(state_of(running), FINISH_TIMEOUT);
    assert_true(atomic_load(&running->start_us) != 0);
    assert_int_equal(state_of(queued), FINISH_TIMEOUT);
    assert_int_equal(atomic_load(&queued->start_us), 0); /* never started: worth a retry */
    assert_all_free(engine);
    request_release(running);
    request_release(queued);
    engine_close(engine);
}

/* ---- the queue ----------------------------------------------------------------------------- */

static void full_queue_refuses_and_recovers(void **state)
{
    struct engine_options options = harness_options(harness_dir);
    options.max_seqs = 1;
    options.max_queue = 2;
    options.max_queue_tokens = 40;
    struct gate gate;
    struct waiter waiter;
    struct engine *const engine = harness_open_gated(state, &options, &gate, &waiter);
    struct request *request[5];
    for (int i = 0; i < 5; i++) {
        request[i] = harness_generation(1, 5);
        harness_item(engine, request[i], 0, i, i == 2 ? 40 : 10);
    }
    struct err err = {0};
    harness_submit(engine, request[0], &waiter);
    gate_await(&gate, 1);
    harness_submit(engine, request[1], &waiter);
    assert_int_equal(engine_submit(engine, request[2], &err), ERR_QUEUE_TOKENS);
    harness_submit(engine, request[3], &waiter);
    assert_int_equal(engine_submit(engine, request[4], &err), ERR_QUEUE_FULL);
    assert_true(engine_retry_after_s(engine, false) >= 1);
    assert_int_equal(atomic_load(&engine->stats.waiting), 2);
    assert_int_equal(atomic_load(&engine->stats.waiting_tokens), 30);
    atomic_store(&engine->drain_rate, 7000); /* in 1000 s, while the engine waits at the gate */
    assert_int_equal(engine_retry_after_s(engine, false), 4);
    gate_allow(&gate, -1);
    waiter_wait(&waiter, request[3]);
    harness_submit(engine, request[4], &waiter);
    waiter_wait(&waiter, request[4]);
    assert_int_equal(state_of(request[4]), FINISH_LENGTH);
    for (int i = 0; i < 5; i++) {
        request_release(request[i]);
    }
    engine_close(engine);
}

/* What leaves the queue without waiting is no measure of how fast a full one empties. */
static void the_drain_rate_is_that_of_a_backlog(void **state)
{
    enum { N_ALONE = 50, N_QUEUED = 4, N_TOKEN = 40, STEP_US = 50000 };
    struct engine_options options = harness_options(harness_dir);
    options.max_seqs = 1;
    struct gate gate;
    struct waiter waiter;
    struct engine *const engine = harness_open_gated(state, &options, &gate, &waiter);
    struct request *request[N_QUEUED];
    gate_allow(&gate, N_ALONE); /* a step each */
    for (int i = 0; i < N_ALONE; i++) {
        request[0] = harness_score(1, 90, 90);
        harness_item(engine, request[0], 0, i, N_TOKEN);
        harness_submit(engine, request[0], &waiter);
        waiter_wait(&waiter, request[0]);
        request_release(request[0]);
    }
    for (int i = 0; i < N_QUEUED; i++) {
        request[i] = harness_score(1, 90, 90);
        harness_item(engine, request[i], 0, N_ALONE + i, N_TOKEN);
        harness_submit(engine, request[i], &waiter);
    }
    for (int i = 0; i < N_QUEUED; i++) {
        gate_await(&gate, N_ALONE + i + 1);
        (void)usleep(STEP_US);
        gate_allow(&gate, 1);
        waiter_wait(&waiter, request[i]);
        request_release(request[i]);
    }
    const long long per_1000_s = atomic_load(&engine->drain_rate);
    assert_true(per_1000_s > 0);
    assert_true(per_1000_s <= 1000LL * N_TOKEN * 1000000 / STEP_US);
    engine_close(engine);
}

/* Bulk work fills the machine; an interactive request starts in the next step all the same. */
static void interactive_overtakes_bulk(void **state)
{
    struct engine_options options = harness_options(harness_dir);
    options.max_seqs = 4;
    options.max_batch_tokens = 32;
    struct gate gate;
    struct waiter waiter;
    struct engine *const engine = harness_open_gated(state, &options, &gate, &waiter);
    struct request *const bulk = harness_score(20, 90, 90);
    bulk->priority = PRIORITY_BULK;
    for (int i = 0; i < 20; i++) {
        harness_item(engine, bulk, i, i, 90);
    }
    harness_submit(engine, bulk, &waiter);
    gate_await(&gate, 1);
    struct request *const interactive = harness_generation(1, 3);
    harness_item(engine, interactive, 0, 1, 20);
    harness_submit(engine, interactive, &waiter);
    gate_allow(&gate, 2);
    gate_await(&gate, 3);
    assert_int_equal(atomic_load(&interactive->item[0].n_out), 1);
    assert_int_equal(gate.last_n_tok, 32); /* and the step is full all the same */
    gate_allow(&gate, 2);
    waiter_wait(&waiter, interactive);
    assert_int_equal(state_of(interactive), FINISH_LENGTH);
    gate_allow(&gate, -1);
    waiter_wait(&waiter, bulk);
    for (int i = 0; i < 20; i++) {
        assert_int_equal(atomic_load(&bulk->item[i].state), FINISH_LENGTH);
    }
    assert_all_free(engine);
    request_release(interactive);
    request_release(bulk);
    engine_close(engine);
}

/* A stream of interactive work cannot keep bulk work from ending. */
static void bulk_is_not_starved(void **state)
{
    enum { N = 40 };
    struct engine_options options = harness_options(harness_dir);
    options.max_seqs = 2;
    options.max_batch_tokens = 16;
    struct gate gate;
    struct waiter waiter;
    struct engine *const engine = harness_open_gated(state, &options, &gate, &waiter);
    struct request *interactive[N];
    for (int i = 0; i < N; i++) {
        interactive[i] = harness_generation(1, 2);
        harness_item(engine, interactive[i], 0, i, 60);
        harness_submit(engine, interactive[i], &waiter);
    }
    gate_await(&gate, 1);
    struct request *const bulk = harness_score(1, 40, 40);
    bulk->priority = PRIORITY_BULK;
    harness_item(engine, bulk, 0, 1, 40);
    harness_submit(engine, bulk, &waiter);
    gate_allow(&gate, -1);
    waiter_wait(&waiter, bulk);
    int64_t n_after = 0; /* interactive requests that were still to come when bulk ended */
    const int64_t bulk_us = atomic_load(&bulk->done_us);
    for (int i = 0; i < N; i++) {
        waiter_wait(&waiter, interactive[i]);
        n_after += atomic_load(&interactive[i]->start_us) >= bulk_us;
        request_release(interactive[i]);
    }
    assert_true(n_after > N / 2);
    request_release(bulk);
    engine_close(engine);
}

/* ---- fair shares --------------------------------------------------------------------------- */

/* Another client's short generation starts within four steps beside one large request. */
static void starts_beside(void **state, struct request *large, struct engine_options *options,
                          uint64_t client)
{
    struct gate gate;
    struct waiter waiter;
    struct engine *const engine = harness_open_gated(state, options, &gate, &waiter);
    large->client = 1;
    for (int i = 0; i < large->n_item; i++) {
        large->item[i].sample_index = i % 8;
        harness_item(engine, large, i, i / 8, large->kind == REQUEST_SCORE ? 300 : 5);
    }
    harness_submit(engine, large, &waiter);
    gate_await(&gate, 1);
    gate_allow(&gate, 20);
    gate_await(&gate, 21);
    struct request *const other = harness_generation(1, 1);
    other->client = client;
    other->priority = large->priority;
    harness_item(engine, other, 0, 999, 10);
    harness_submit(engine, other, &waiter);
    gate_allow(&gate, 4);
    gate_await(&gate, 25);
    if (state_of(other) != FINISH_LENGTH) {
        fail_msg("a request of client %d has not ended after four steps", (int)client);
    }
    request_cancel(large);
    gate_allow(&gate, -1);
    waiter_wait(&waiter, large);
    request_release(other);
    request_release(large);
    assert_all_free(engine);
    engine_close(engine);
}

static void many_windows_hold_up_nobody(void **state)
{
    for (uint64_t client = 1; client <= 2; client++) {
        for (int bulk = 0; bulk < 2; bulk++) {
            struct engine_options options = harness_options(harness_dir);
            options.shared = true;
            options.max_batch_tokens = 64;
            struct request *const large = harness_score(1, 64, 1);
            large->priority = bulk ? PRIORITY_BULK : PRIORITY_INTERACTIVE;
            starts_beside(state, large, &options, client);
        }
    }
}

static void many_samples_hold_up_nobody(void **state)
{
    for (uint64_t client = 1; client <= 2; client++) {
        for (int bulk = 0; bulk < 2; bulk++) {
            struct engine_options options = harness_options(harness_dir);
            options.shared = true;
            struct request *const large = harness_generation(64, 90);
            large->priority = bulk ? PRIORITY_BULK : PRIORITY_INTERACTIVE;
            starts_beside(state, large, &options, client);
        }
    }
}

/* Requests of one key in any number leave places to other keys. */
static void many_requests_of_a_key_hold_up_nobody(void **state)
{
    enum { N = 40 };
    struct engine_options options = harness_options(harness_dir);
    options.shared = true;
    struct gate gate;
    struct waiter waiter;
    struct engine *const engine = harness_open_gated(state, &options, &gate, &waiter);
    struct request *request[N + 1];
    for (int i = 0; i <= N; i++) {
        request[i] = harness_generation(1, i < N ? 90 : 1);
        request[i]->client = i < N ? 1 : 2;
        request[i]->is_tenant = true;
        harness_item(engine, request[i], 0, i, 5);
    }
    for (int i = 0; i < N; i++) {
        harness_submit(engine, request[i], &waiter);
    }
    gate_await(&gate, 1);
    gate_allow(&gate, 3);
    gate_await(&gate, 4);
    assert_int_equal(gate.last_n_seq, 28); /* of 32 places */
    harness_submit(engine, request[N], &waiter);
    gate_allow(&gate, 4);
    gate_await(&gate, 8);
    assert_int_equal(state_of(request[N]), FINISH_LENGTH);
    gate_allow(&gate, -1);
    for (int i = 0; i <= N; i++) {
        request_cancel(request[i]);
        waiter_wait(&waiter, request[i]);
        request_release(request[i]);
    }
    engine_close(engine);
}

/* A text that lacks pages does not hold up those that fit, until it was passed often enough; then
 * the pages that become free are its own. */
static void passed_for_want_of_pages(void **state, enum priority priority)
{
    enum { N = PLAN_PASS_MAX + 8 };
    struct engine_options options = harness_options(harness_dir);
    options.kv_tokens = 128;
    struct gate gate;
    struct waiter waiter;
    struct engine *const engine = harness_open_gated(state, &options, &gate, &waiter);
    struct request *const first = harness_generation(1, 75);
    struct request *const large = harness_generation(1, 75);
    struct request *small[N];
    large->priority = priority;
    harness_item(engine, first, 0, 1, 5);
    harness_item(engine, large, 0, 2, 5);
    harness_submit(engine, first, &waiter); /* takes 5 of 8 pages */
    gate_await(&gate, 1);
    harness_submit(engine, large, &waiter); /* needs 5 */
    for (int i = 0; i < N; i++) {
        small[i] = harness_generation(1, 1);
        harness_item(engine, small[i], 0, 10 + i, 5);
        harness_submit(engine, small[i], &waiter); /* each needs one */
    }
    gate_allow(&gate, 40);
    gate_await(&gate, 41);
    int n_done = 0;
    for (int i = 0; i < N; i++) {
        n_done += state_of(small[i]) == FINISH_LENGTH;
    }
    /* Three at a time; those that pass a bulk one in its first turn do so before it has lacked
     * pages. */
    assert_in_range(n_done, PLAN_PASS_MAX, PLAN_PASS_MAX + (priority == PRIORITY_BULK ? 5 : 2));
    assert_true(state_of(first) == FINISH_NONE && atomic_load(&large->start_us) == 0);
    gate_allow(&gate, 160);
    waiter_wait(&waiter, large);
    for (int i = 0; i < N; i++) {
        waiter_wait(&waiter, small[i]);
        assert_int_equal(state_of(small[i]), FINISH_LENGTH);
        assert_true(i < n_done ||
                    atomic_load(&small[i]->start_us) >= atomic_load(&large->start_us));
        request_release(small[i]);
    }
    assert_int_equal(state_of(large), FINISH_LENGTH);
    request_release(first);
    request_release(large);
    gate_allow(&gate, -1);
    engine_close(engine);
}

static void who_lacks_pages_holds_up_nobody(void **state)
{
    passed_for_want_of_pages(state, PRIORITY_INTERACTIVE);
}

/* Interactive sequences come first, and count although they do. */
static void bulk_that_lacks_pages_is_passed_no_more_often(void **state)
{
    passed_for_want_of_pages(state, PRIORITY_BULK);
}

/* With room for one small text at a time: exactly PLAN_PASS_MAX pass the large one. */
static void no_more_than_so_many_pass_who_lacks_pages(void **state)
{
    enum { N = PLAN_PASS_MAX + 2 };
    struct engine_options options = harness_options(harness_dir);
    options.kv_tokens = 7 * KV_PAGE;
    struct gate gate;
    struct waiter waiter;
    struct engine *const engine = harness_open_gated(state, &options, &gate, &waiter);
    struct request *const first = harness_generation(1, 90);
    struct request *const large = harness_generation(1, 90);
    struct request *small[N];
    harness_item(engine, first, 0, 1, 5);
    harness_item(engine, large, 0, 2, 5);
    harness_submit(engine, first, &waiter); /* takes 6 of 7 pages */
    gate_await(&gate, 1);
    harness_submit(engine, large, &waiter);
    for (int i = 0; i < N; i++) {
        small[i] = harness_generation(1, 1);
        harness_item(engine, small[i], 0, 10 + i, 5);
        harness_submit(engine, small[i], &waiter);
    }
    gate_allow(&gate, 2 * N + 5); /* two for each where prompts have steps of their own */
    gate_await(&gate, 2 * N + 6);
    assert_true(state_of(first) == FINISH_NONE && atomic_load(&large->start_us) == 0);
    int n_done = 0;
    for (int i = 0; i < N; i++) {
        n_done += state_of(small[i]) == FINISH_LENGTH;
    }
    assert_int_equal(n_done, PLAN_PASS_MAX);
    request_cancel(first);
    request_cancel(large);
    gate_allow(&gate, -1);
    for (int i = 0; i < N; i++) {
        waiter_wait(&waiter, small[i]);
        request_release(small[i]);
    }
    waiter_wait(&waiter, large);
    request_release(first);
    request_release(large);
    engine_close(engine);
}

/* A request that runs leaves the last pages to others, although its next text would fit there. */
static void who_runs_leaves_pages_to_others(void **state)
{
    struct engine_options options = harness_options(harness_dir);
    options.shared = true;
    options.kv_tokens = PLAN_BULK_SHARE * KV_PAGE; /* so one page is left */
    struct gate gate;
    struct waiter waiter;
    struct engine *const engine = harness_open_gated(state, &options, &gate, &waiter);
    struct request *const large = harness_generation(2, 59);
    struct request *const small = harness_generation(1, 1);
    harness_item(engine, large, 0, 1, 5); /* takes 4 of 8 pages */
    harness_item(engine, large, 1, 2, 5); /* needs as many */
    harness_item(engine, small, 0, 3, 5); /* needs one */
    harness_submit(engine, large, &waiter);
    gate_await(&gate, 1);
    harness_submit(engine, small, &waiter);
    gate_allow(&gate, 4);
    gate_await(&gate, 5);
    assert_int_equal(state_of(small), FINISH_LENGTH);
    assert_true(atomic_load(&large->item[0].n_out) > 0);
    assert_int_equal(atomic_load(&large->item[1].n_out), 0);
    gate_allow(&gate, -1);
    waiter_wait(&waiter, large);
    assert_int_equal(atomic_load(&large->item[1].state), FINISH_LENGTH);
    assert_all_free(engine);
    request_release(large);
    request_release(small);
    engine_close(engine);
}

/* Of the places that become free while both classes wait, bulk gets one in PLAN_BULK_SHARE. */
static void bulk_gets_each_eighth_place(void **state)
{
    enum { N_INTERACTIVE = 12, N = N_INTERACTIVE + 1, LONG = 9 };
    struct engine_options options = harness_options(harness_dir);
    options.max_seqs = 1;
    struct gate gate;
    struct waiter waiter;
    struct engine *const engine = harness_open_gated(state, &options, &gate, &waiter);
    struct request *request[N + 1];
    for (int i = 0; i <= N; i++) {
        request[i] = harness_generation(1, 1); /* a step each */
        request[i]->priority = i == N ? PRIORITY_BULK : PRIORITY_INTERACTIVE;
        harness_item(engine, request[i], 0, i, i == N ? LONG : 5);
        harness_submit(engine, request[i], &waiter);
        if (i == 0) {
            gate_await(&gate, 1);
        }
    }
    for (int i = 1; i <= N; i++) {
        gate_allow(&gate, 1);
        gate_await(&gate, i + 1);
        assert_int_equal(gate.last_n_tok, i == PLAN_BULK_SHARE ? LONG : 5);
    }
    gate_allow(&gate, -1);
    for (int i = 0; i <= N; i++) {
        waiter_wait(&waiter, request[i]);
        request_release(request[i]);
    }
    assert_all_free(engine);
    engine_close(engine);
}

/* A step longer than its target is under way. */
static void outlast_the_target(const struct engine_options *options)
{
    const int64_t end_us = clock_now_us() + 2000 * options->bulk_step_ms;
    while (clock_now_us() < end_us) {
    }
}

enum { LONG_PROMPT = PLAN_PROMPT_MIN + 26 };

/* Step i of n_step, all longer than the target, has n_tok[i] rows; before it, for i < n_request,
 * comes a request with a prompt of n_prompt[i] tokens. */
static void expect_steps(void **state, int n_request, const int *n_prompt, int n_step,
                         const int *n_tok)
{
    struct engine_options options = harness_options(harness_dir);
    options.max_batch_tokens = 3 * LONG_PROMPT;
    options.bulk_step_ms = 1;
    struct gate gate;
    struct waiter waiter;
    struct engine *const engine = harness_open_gated(state, &options, &gate, &waiter);
    struct request *request[3];
    for (int i = 0; i < n_step; i++) {
        if (i < n_request) {
            request[i] = harness_generation(1, 6);
            harness_item(engine, request[i], 0, i + 1, n_prompt[i]);
            harness_submit(engine, request[i], &waiter);
        }
        if (i > 0) {
            gate_allow(&gate, 1);
        }
        gate_await(&gate, i + 1);
        assert_int_equal(gate.last_n_tok, n_tok[i]);
        outlast_the_target(&options);
    }
    gate_allow(&gate, -1);
    for (int i = 0; i < n_request; i++) {
        waiter_wait(&waiter, request[i]);
        request_release(request[i]);
    }
    assert_all_free(engine);
    engine_close(engine);
}

/* Where others' tokens waited too long for a prompt, the next one comes in pieces. */
static void prompts_do_not_stretch_the_tokens_of_others(void **state)
{
    static const int n_prompt[] = {5, LONG_PROMPT, LONG_PROMPT};
    /* A step each: the first prompt; its token beside all of the second one; tokens beside as much
     * of the third as is always allowed; and beside its rest. */
    static const int n_tok[] = {5, 1 + LONG_PROMPT, 2 + PLAN_PROMPT_MIN,
                                2 + LONG_PROMPT - PLAN_PROMPT_MIN};
    expect_steps(state, 3, n_prompt, 4, n_tok);
}

/* How long a prompt alone took tells how much of the next one fits beside its tokens. */
static void the_first_prompt_teaches_what_fits_beside_its_tokens(void **state)
{
    static const int n_prompt[] = {LONG_PROMPT, LONG_PROMPT};
    static const int n_tok[] = {LONG_PROMPT, 1 + PLAN_PROMPT_MIN};
    expect_steps(state, 2, n_prompt, 2, n_tok);
}

/* Traces wait for memory; requests without them, and cancelled ones, do not. */
static void traces_wait_for_memory(void **state)
{
    struct engine_options options = harness_options(harness_dir);
    options.memory_trace_bytes = 4096;
    struct waiter waiter;
    struct engine *const engine = harness_open_as(state, &options);
    waiter_begin(&waiter);
    struct request *request[4];
    for (int i = 0; i < 4; i++) {
        request[i] = harness_score(1, 90, 90);
        request[i]->trace_memory = i < 3;
        harness_item(engine, request[i], 0, i, 20);
    }
    harness_submit(engine, request[0], &waiter);
    waiter_wait(&waiter, request[0]);
    for (int i = 1; i < 4; i++) {
        harness_submit(engine, request[i], &waiter);
    }
    waiter_wait(&waiter, request[3]);
    assert_int_equal(state_of(request[3]), FINISH_LENGTH);
    assert_int_equal(state_of(request[1]), FINISH_NONE);
    request_cancel(request[1]);
    waiter_wait(&waiter, request[1]);
    assert_int_equal(state_of(request[1]), FINISH_CANCELLED);
    assert_int_equal(state_of(request[2]), FINISH_NONE);
    request_release(request[0]); /* its answer was read */
    waiter_wait(&waiter, request[2]);
    assert_int_equal(state_of(request[2]), FINISH_LENGTH);
    assert_int_equal(request[2]->item[0].trace[0].n_position, 20);
    struct request *const large = harness_score(8, 90, 90);
    large->trace_memory = true;
    for (int i = 0; i < 8; i++) {
        harness_item(engine, large, i, i, 90);
    }
    struct err err = {0};
    assert_int_equal(engine_submit(engine, large, &err), ERR_ARGUMENT);
    assert_non_null(strstr(err.message, "the limit (--memory-trace-bytes) is 4096"));
    request_release(large);
    for (int i = 1; i < 4; i++) {
        request_release(request[i]);
    }
    engine_close(engine);
}

/* Whoever lacks memory for traces gets what others give back, also a bulk request with many, to
 * which interactive ones with few come. */
static void the_first_that_lacks_traces_gets_them_first(void **state)
{
    struct engine_options options = harness_options(harness_dir);
    options.memory_trace_bytes = 8192; /* two small ones, or the large one */
    struct waiter waiter;
    struct engine *const engine = harness_open_as(state, &options);
    waiter_begin(&waiter);
    struct request *small[4];
    struct request *without[2];
    struct request *const large = harness_score(6, 90, 90);
    large->trace_memory = true;
    large->priority = PRIORITY_BULK;
    for (int i = 0; i < 6; i++) {
        harness_item(engine, large, i, 50 + i, 20);
    }
    assert_in_range(large->trace_bytes, 4097, 8192); /* memory is given in blocks of 4096 */
    for (int i = 0; i < 2; i++) {
        without[i] = harness_score(1, 90, 90);
        harness_item(engine, without[i], 0, 60 + i, 20);
    }
    for (int i = 0; i < 4; i++) {
        small[i] = harness_score(1, 90, 90);
        small[i]->trace_memory = true;
        harness_item(engine, small[i], 0, i, 20);
    }
    for (int i = 0; i < 2; i++) {
        harness_submit(engine, small[i], &waiter);
        waiter_wait(&waiter, small[i]);
    }
    harness_submit(engine, large, &waiter);
    harness_submit(engine, without[0], &waiter);
    waiter_wait(&waiter, without[0]); /* so a turn has tried the large one */
    harness_submit(engine, small[2], &waiter);
    harness_submit(engine, small[3], &waiter);
    request_release(small[0]); /* its answer was read */
    harness_submit(engine, without[1], &waiter);
    waiter_wait(&waiter, without[1]);
    assert_true(atomic_load(&small[2]->start_us) == 0 && atomic_load(&large->start_us) == 0);
    request_release(small[1]);
    waiter_wait(&waiter, large);
    assert_int_equal(state_of(large), FINISH_LENGTH);
    assert_true(atomic_load(&small[2]->start_us) == 0);
    request_release(large);
    for (int i = 2; i < 4; i++) {
        waiter_wait(&waiter, small[i]);
        assert_int_equal(state_of(small[i]), FINISH_LENGTH);
        request_release(small[i]);
        request_release(without[i - 2]);
    }
    engine_close(engine);
}

/* An interactive request whose traces lack memory hides bulk ones that have traces, too. What is
 * admitted meanwhile counts, so that a bulk one has its turn to be tried, and gets what becomes
 * free. */
static void bulk_with_traces_has_its_turn(void **state)
{
    enum { N = PLAN_BULK_SHARE - 1 };
    struct engine_options options = harness_options(harness_dir);
    options.memory_trace_bytes = 4096; /* one request's */
    struct waiter waiter;
    struct engine *const engine = harness_open_as(state, &options);
    waiter_begin(&waiter);
    struct request *traced[3];
    struct request *const bulk = harness_score(1, 90, 90);
    bulk->trace_memory = true;
    bulk->priority = PRIORITY_BULK;
    harness_item(engine, bulk, 0, 50, 20);
    for (int i = 0; i < 3; i++) {
        traced[i] = harness_score(1, 90, 90);
        traced[i]->trace_memory = true;
        harness_item(engine, traced[i], 0, i, 20);
    }
    harness_submit(engine, traced[0], &waiter);
    waiter_wait(&waiter, traced[0]);
    harness_submit(engine, traced[1], &waiter);
    harness_submit(engine, bulk, &waiter);
    for (int i = 0; i < N + 2; i++) {
        if (i == N) { /* the bulk one's turn */
            harness_submit(engine, traced[2], &waiter);
            request_release(traced[0]); /* its answer was read */
            waiter_wait(&waiter, traced[1]);
            request_release(traced[1]);
        }
        struct request *const without = harness_score(1, 90, 90);
        harness_item(engine, without, 0, 60 + i, 20);
        harness_submit(engine, without, &waiter);
        waiter_wait(&waiter, without);
        request_release(without);
    }
    /* The last one was admitted in a turn that began after the release. */
    assert_true(atomic_load(&bulk->start_us) != 0 && atomic_load(&traced[2]->start_us) == 0);
    waiter_wait(&waiter, bulk);
    assert_int_equal(state_of(bulk), FINISH_LENGTH);
    request_release(bulk);
    waiter_wait(&waiter, traced[2]);
    assert_int_equal(state_of(traced[2]), FINISH_LENGTH);
    request_release(traced[2]);
    engine_close(engine);
}

/* Of a text the queue counts what its windows compute, and less with each window that has begun. */
static void the_queue_counts_positions(void **state)
{
    struct engine_options options = harness_options(harness_dir);
    options.max_seqs = 1;
    struct gate gate;
    struct waiter waiter;
    struct engine *const engine = harness_open_gated(state, &options, &gate, &waiter);
    struct request *const request = harness_score(1, 40, 1);
    harness_item(engine, request, 0, 1, 90); /* 89 predictions in 50 windows of 40 */
    assert_int_equal(request_positions(request), 50 * 40);
    harness_submit(engine, request, &waiter);
    gate_await(&gate, 1);
    assert_int_equal(atomic_load(&engine->stats.waiting_tokens), 49 * 40);
    gate_allow(&gate, 10);
    gate_await(&gate, 11);
    assert_int_equal(atomic_load(&engine->stats.waiting_tokens), 39 * 40);
    gate_allow(&gate, -1);
    waiter_wait(&waiter, request);
    assert_int_equal(atomic_load(&engine->stats.waiting_tokens), 0);
    request_release(request);
    engine_close(engine);
}

/* Of four items three end with step 10 and one with step 5. Returns the number of wakes. */
static int count_wakes(struct engine *engine, bool at_ends)
{
    struct waiter waiter;
    waiter_begin(&waiter);
    struct request *const request = harness_generation(4, 10);
    request->wakes_at_ends = at_ends;
    request->item[2].max_tokens = 5;
    for (int i = 0; i < 4; i++) {
        harness_item(engine, request, i, i, 8);
    }
    const long long before = atomic_load(&engine->stats.steps);
    harness_submit(engine, request, &waiter);
    waiter_wait(&waiter, request);
    assert_all_free(engine);
    assert_int_equal(atomic_load(&engine->stats.steps) - before, 10);
    request_release(request);
    return waiter.n_wake;
}

static void wakes_once_per_request_and_step(void **state)
{
    const struct engine_options options = harness_options(harness_dir);
    struct engine *const engine = harness_open_as(state, &options);
    assert_int_equal(count_wakes(engine, false), 10);
    assert_int_equal(count_wakes(engine, true), 2);
    engine_close(engine);
}

/* A request of several texts has one first token, and the model's time is part of the busy time. */
static void times_are_counted_once(void **state)
{
    enum { N_TEXT = 4, N_NEW = 3 };
    const struct engine_options options = harness_options(harness_dir);
    struct engine *const engine = harness_open_as(state, &options);
    const struct engine_stats *const stats = engine_stats(engine);
    struct request *const request = harness_generation(N_TEXT, N_NEW);
    for (int i = 0; i < N_TEXT; i++) {
        harness_item(engine, request, i, i, 8);
    }
    harness_run(engine, request);
    assert_all_free(engine);
    const struct {
        const struct histogram *times;
        int n;
    } row[] = {
        {&stats->queue_time, 1},  {&stats->ttft, 1},         {&stats->prefill_time, 1},
        {&stats->decode_time, 1}, {&stats->e2e, 1},          {&stats->inference_time, 1},
        {&stats->tpot, N_TEXT},   {&stats->itl, N_TEXT * 2},
    };
    for (size_t i = 0; i < sizeof row / sizeof row[0]; i++) {
        if (atomic_load(&row[i].times->count) != row[i].n) {
            fail_msg("histogram %zu has %lld times, not %d", i,
                     (long long)atomic_load(&row[i].times->count), row[i].n);
        }
    }
    assert_true(atomic_load(&stats->model_us) > 0);
    assert_true(atomic_load(&stats->model_us) <= atomic_load(&stats->busy_us));
    request_release(request);
    engine_close(engine);
}

/* The first step is slow. */
static void slow_down(void *ctx)
{
    struct engine *const engine = ctx;
    if (atomic_load(&engine->stats.steps) == 0) {
        (void)snprintf(engine->be->warning, sizeof engine->be->warning, "a test");
    }
}

/* What has slowed the device down is told once, not with each step from then on. */
static void what_slows_the_device_is_told_once(void **state)
{
    (void)state;
    const struct engine_options options = harness_options(harness_dir);
    struct engine *const engine = harness_open(&options);
    device_begin(engine);
    harness_device.submitted = slow_down;
    harness_device.ctx = engine;
    struct request *const request = harness_generation(1, 5);
    harness_item(engine, request, 0, 1, 5);
    FILE *const log = tmpfile();
    const int stderr_fd = dup(STDERR_FILENO);
    CHECK(log != NULL && stderr_fd >= 0 && dup2(fileno(log), STDERR_FILENO) >= 0);
    harness_run(engine, request);
    engine_close(engine);
    CHECK(dup2(stderr_fd, STDERR_FILENO) >= 0 && close(stderr_fd) == 0);
    request_release(request);
    rewind(log);
    int n_told = 0;
    for (char line[600]; fgets(line, sizeof line, log) != NULL;) {
        n_told += strstr(line, "event=backend_slow why=\"a test\"") != NULL;
    }
    assert_int_equal(fclose(log), 0);
    assert_int_equal(n_told, 1);
}

/* ---- delivery beside the next step ----------------------------------------------------------- */

/* What the front end had heard of when a step was submitted. */
struct submission {
    struct waiter *waiter;
    int n_submit, n_wake; /* the latter: at the last submit */
};

static void note_submission(void *ctx)
{
    struct submission *const it = ctx;
    CHECK(pthread_mutex_lock(&it->waiter->mutex) == 0);
    it->n_wake = it->waiter->n_wake;
    it->n_submit++;
    CHECK(pthread_mutex_unlock(&it->waiter->mutex) == 0);
}

/* A device that computes by itself starts step 2 before the token of step 1 is delivered, and that
 * token is delivered before step 2 ends. Otherwise it is delivered before step 2 is computed. */
static void tokens_are_delivered_beside_the_next_step(void **state)
{
    (void)state;
    const struct engine_options options = harness_options(harness_dir);
    for (int is_async = 0; is_async < 2; is_async++) {
        struct engine *const engine = harness_open(&options);
        struct waiter waiter;
        waiter_begin(&waiter);
        struct submission submission = {.waiter = &waiter};
        device_begin(engine);
        engine->be->is_async = is_async == 1;
        harness_device.submitted = note_submission;
        harness_device.ctx = &submission;
        struct gate gate;
        gate_begin(&gate, engine);
        struct request *const request = harness_generation(1, 3);
        harness_item(engine, request, 0, 1, 5);
        harness_submit(engine, request, &waiter);
        gate_allow(&gate, 1);
        gate_await(&gate, 2); /* the second step waits to end */
        assert_int_equal(submission.n_submit, 2);
        assert_int_equal(submission.n_wake, is_async ? 0 : 1);
        assert_int_equal(waiter.n_wake, 1);
        assert_int_equal(atomic_load(&request->item[0].n_out), 1);
        gate_allow(&gate, -1);
        waiter_wait(&waiter, request); /* the last token has no step to hide behind */
        assert_int_equal(state_of(request), FINISH_LENGTH);
        assert_all_free(engine);
        request_release(request);
        engine_close(engine);
    }
}

/* What ends with a step is delivered even if nothing runs after it, or the step after it fails. */
static void nothing_stays_undelivered(void **state)
{
    (void)state;
    const struct engine_options options = harness_options(harness_dir);
    struct engine *const engine = harness_open(&options);
    device_begin(engine);
    struct gate gate;
    gate_begin(&gate, engine);
    struct waiter waiter;
    waiter_begin(&waiter);
    struct request *const ends = harness_generation(1, 2);
    struct request *const runs = harness_generation(1, 9);
    harness_item(engine, ends, 0, 1, 5);
    harness_item(engine, runs, 0, 2, 5);
    harness_submit(engine, ends, &waiter);
    gate_await(&gate, 1);
    harness_submit(engine, runs, &waiter);
    gate_allow(&gate, 1);
    gate_await(&gate, 2);
    gate.fail = true; /* the step waits at the gate, whose mutex orders this */
    gate_allow(&gate, 1);
    waiter_wait(&waiter, ends);
    waiter_wait(&waiter, runs);
    assert_int_equal(state_of(ends), FINISH_ERROR);
    assert_int_equal(atomic_load(&ends->item[0].n_out), 1); /* of the step before */
    assert_int_equal(state_of(runs), FINISH_ERROR);
    request_release(ends);
    request_release(runs);
    engine_close(engine);
}

/* ---- the end ------------------------------------------------------------------------------- */

static void drain_finishes_what_was_taken(void **state)
{
    struct engine_options options = harness_options(harness_dir);
    options.max_seqs = 2;
    struct engine *const engine = harness_open_as(state, &options);
    struct request *request[6];
    for (int i = 0; i < 6; i++) {
        request[i] = harness_generation(1, 20);
        harness_item(engine, request[i], 0, i, 10);
        harness_submit(engine, request[i], NULL);
    }
    assert_int_equal(engine_drain(engine, clock_now_us() + 60000000), 0);
    assert_int_equal(engine_state(engine), ENGINE_STOPPED);
    struct err err = {0};
    for (int i = 0; i < 6; i++) {
        assert_int_equal(state_of(request[i]), FINISH_LENGTH);
        request_release(request[i]);
    }
    struct request *const late = harness_generation(1, 1);
    harness_item(engine, late, 0, 1, 5);
    assert_int_equal(engine_submit(engine, late, &err), ERR_CLOSED);
    request_release(late);
    engine_close(engine);
}

static void drain_cuts_short_at_its_deadline(void **state)
{
    struct engine_options options = harness_options(harness_dir);
    options.max_seqs = 1;
    struct engine *const engine = harness_open_as(state, &options);
    struct gate gate;
    gate_begin(&gate, engine);
    struct request *request[3];
    for (int i = 0; i < 3; i++) {
        request[i] = harness_generation(1, 20);
        harness_item(engine, request[i], 0, i, 10);
        harness_submit(engine, request[i], NULL);
    }
    gate_await(&gate, 1);
    gate_allow(&gate, 2);
    gate_await(&gate, 3);
    pthread_t opener;
    assert_int_equal(pthread_create(&opener, NULL, gate_open_when_draining, engine), 0);
    assert_int_equal(engine_drain(engine, 1), 3);
    assert_int_equal(pthread_join(opener, NULL), 0);
    assert_int_equal(gate.n_arrived, 3); /* the step under way ended, no other began */
    for (int i = 0; i < 3; i++) {
        assert_int_equal(state_of(request[i]), FINISH_SHUTDOWN);
        request_release(request[i]);
    }
    engine_close(engine);
}

static void closes_while_idle_and_while_running(void **state)
{
    const struct engine_options options = harness_options(harness_dir);
    struct engine *engine = harness_open_as(state, &options);
    assert_int_equal(engine_state(engine), ENGINE_READY);
    assert_int_equal(engine_stalled_ms(engine), 0);
    engine_close(engine);
    engine = harness_open_as(state, &options);
    struct request *const request = harness_generation(1, 80);
    harness_item(engine, request, 0, 1, 10);
    harness_submit(engine, request, NULL);
    engine_close(engine);
    const int finish = state_of(request);
    assert_true(finish == FINISH_SHUTDOWN || finish == FINISH_LENGTH);
    request_release(request);
    engine_close(NULL);
}

static void a_stall_shows_only_while_there_is_work(void **state)
{
    const struct engine_options options = harness_options(harness_dir);
    struct gate gate;
    struct waiter waiter;
    struct engine *const engine = harness_open_gated(state, &options, &gate, &waiter);
    (void)usleep(20000);
    assert_int_equal(engine_stalled_ms(engine), 0);
    struct request *const request = harness_generation(1, 1);
    harness_item(engine, request, 0, 1, 5);
    harness_submit(engine, request, &waiter);
    gate_await(&gate, 1);
    (void)usleep(20000);
    assert_true(engine_stalled_ms(engine) >= 19);
    gate_allow(&gate, -1);
    waiter_wait(&waiter, request);
    assert_all_free(engine);
    request_release(request);
    engine_close(engine);
}

static void count_failure(void *ctx)
{
    (void)atomic_fetch_add((atomic_int *)ctx, 1);
}

static void backend_failure_ends_everything(void **state)
{
    struct engine_options options = harness_options(harness_dir);
    atomic_int n_failure = 0;
    options.max_seqs = 1;
    options.failed = count_failure;
    options.failed_ctx = &n_failure;
    struct gate gate;
    struct waiter waiter;
    struct engine *const engine = harness_open_gated(state, &options, &gate, &waiter);
    struct request *request[3];
    for (int i = 0; i < 3; i++) {
        request[i] = i < 2 ? harness_generation(1, 20) : harness_score(1, 10, 10);
        harness_item(engine, request[i], 0, i, 10);
        harness_submit(engine, request[i], &waiter);
    }
    gate_await(&gate, 1);
    gate_allow(&gate, 1);
    gate_await(&gate, 2);
    gate.fail = true; /* the step waits at the gate, whose mutex orders this */
    gate_allow(&gate, 1);
    for (int i = 0; i < 3; i++) {
        waiter_wait(&waiter, request[i]);
        assert_int_equal(state_of(request[i]), FINISH_ERROR);
        assert_int_equal(request[i]->error.code, ERR_DEVICE);
        assert_non_null(strstr(request[i]->error.message, "the test made the device fail"));
    }
    assert_int_equal(engine_state(engine), ENGINE_FAILED);
    struct err err = {0};
    assert_int_equal(engine_submit(engine, request[0], &err), ERR_CLOSED);
    assert_non_null(strstr(err.message, "failed"));
    assert_int_equal(engine_drain(engine, clock_now_us() + 60000000), 0); /* nothing to wait for */
    assert_int_equal(engine_state(engine), ENGINE_FAILED);
    assert_int_equal(atomic_load(&n_failure), 1);
    for (int i = 0; i < 3; i++) {
        request_release(request[i]);
    }
    engine_close(engine);
}

enum { NAN_POSITION = 50 }; /* past what the self-test looks at */

/* A position whose embedding is NaN fails the items that reach it, nobody else. */
static void nan_fails_its_item_alone(void **state)
{
    char *const sick = tiny_model(HARNESS_VOCAB, NAN_POSITION);
    struct engine_options options = harness_options(sick);
    options.max_seqs = 4;
    struct engine *const engine = harness_open_as(state, &options);
    struct request *const score = harness_score(3, 60, 5);
    struct request *const generation = harness_generation(2, 10);
    harness_item(engine, score, 0, 1, NAN_POSITION);
    harness_item(engine, score, 1, 2, 300); /* many windows, all past that position */
    harness_item(engine, score, 2, 3, 5);
    harness_item(engine, generation, 0, 1, NAN_POSITION - 4);
    harness_item(engine, generation, 1, 2, 10);
    struct waiter waiter;
    waiter_begin(&waiter);
    harness_submit(engine, score, &waiter);
    harness_submit(engine, generation, &waiter);
    waiter_wait(&waiter, score);
    waiter_wait(&waiter, generation);
    assert_int_equal(atomic_load(&score->item[0].state), FINISH_LENGTH);
    assert_int_equal(atomic_load(&score->item[1].state), FINISH_ERROR);
    assert_int_equal(atomic_load(&score->item[2].state), FINISH_LENGTH);
    assert_int_equal(score->error.code, ERR_NUMERICAL);
    assert_int_equal(atomic_load(&generation->item[0].state), FINISH_ERROR);
    assert_int_equal(atomic_load(&generation->item[0].n_out), 5); /* those before it stand */
    assert_int_equal(atomic_load(&generation->item[1].state), FINISH_LENGTH);
    assert_int_equal(generation->error.code, ERR_NUMERICAL);
    assert_int_equal(engine_state(engine), ENGINE_READY);
    assert_all_free(engine);
    request_release(score);
    request_release(generation);
    engine_close(engine);
    tiny_model_remove(sick);
}

/* Front ends come and go on many threads: for ThreadSanitizer, and for lost wakes. */
struct front_end {
    struct engine *engine;
    int salt;
};

static void *client_main(void *arg)
{
    const struct front_end *const client = arg;
    for (int i = 0; i < 12; i++) {
        struct waiter waiter;
        waiter_begin(&waiter);
        const int salt = client->salt * 100 + i;
        struct request *request = NULL;
        if (salt % 3 == 0) {
            request = harness_score(2, 30, 10);
            harness_item(client->engine, request, 0, salt, 70);
            harness_item(client->engine, request, 1, salt + 1, 3);
        } else {
            request = harness_generation(2, 6);
            harness_item(client->engine, request, 0, salt, 12);
            harness_item(client->engine, request, 1, salt + 1, 20);
        }
        request->priority = salt % 2 == 0 ? PRIORITY_BULK : PRIORITY_INTERACTIVE;
        harness_submit(client->engine, request, &waiter);
        if (salt % 5 != 0) {
            waiter_wait(&waiter, request);
            CHECK(state_of(request) == FINISH_LENGTH);
        }
        request_release(request);
        (void)pthread_mutex_destroy(&waiter.mutex);
        (void)pthread_cond_destroy(&waiter.changed);
    }
    return NULL;
}

static void many_front_ends_at_once(void **state)
{
    enum { N = 6 };
    struct engine_options options = harness_options(harness_dir);
    options.max_seqs = 8;
    struct engine *const engine = harness_open_as(state, &options);
    pthread_t thread[N];
    struct front_end client[N];
    for (int i = 0; i < N; i++) {
        client[i] = (struct front_end){engine, i};
        assert_int_equal(pthread_create(&thread[i], NULL, client_main, &client[i]), 0);
    }
    for (int i = 0; i < N; i++) {
        assert_int_equal(pthread_join(thread[i], NULL), 0);
    }
    assert_all_free(engine);
    engine_close(engine);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        HARNESS_BOTH(cancelled_while_decoding),
        HARNESS_EACH(cancelled_while_prefilling),
        HARNESS_EACH(cancelled_while_scoring_with_windows_queued),
        HARNESS_EACH(cancelled_while_queued),
        HARNESS_EACH(released_while_running),
        HARNESS_BOTH(deadlines_end_running_and_queued_work),
        HARNESS_EACH(full_queue_refuses_and_recovers),
        HARNESS_EACH(the_drain_rate_is_that_of_a_backlog),
        HARNESS_BOTH(interactive_overtakes_bulk),
        HARNESS_EACH(bulk_is_not_starved),
        HARNESS_EACH(many_windows_hold_up_nobody),
        HARNESS_EACH(many_samples_hold_up_nobody),
        HARNESS_BOTH(many_requests_of_a_key_hold_up_nobody),
        HARNESS_EACH(who_lacks_pages_holds_up_nobody),
        HARNESS_EACH(bulk_that_lacks_pages_is_passed_no_more_often),
        HARNESS_EACH(no_more_than_so_many_pass_who_lacks_pages),
        HARNESS_EACH(who_runs_leaves_pages_to_others),
        HARNESS_EACH(bulk_gets_each_eighth_place),
        HARNESS_BOTH(prompts_do_not_stretch_the_tokens_of_others),
        HARNESS_BOTH(the_first_prompt_teaches_what_fits_beside_its_tokens),
        HARNESS_EACH(the_first_that_lacks_traces_gets_them_first),
        HARNESS_EACH(bulk_with_traces_has_its_turn),
        HARNESS_EACH(traces_wait_for_memory),
        HARNESS_EACH(the_queue_counts_positions),
        HARNESS_EACH(wakes_once_per_request_and_step),
        HARNESS_BOTH(times_are_counted_once),
        cmocka_unit_test(what_slows_the_device_is_told_once),
        cmocka_unit_test(tokens_are_delivered_beside_the_next_step),
        cmocka_unit_test(nothing_stays_undelivered),
        HARNESS_EACH(drain_finishes_what_was_taken),
        HARNESS_BOTH(drain_cuts_short_at_its_deadline),
        HARNESS_EACH(closes_while_idle_and_while_running),
        HARNESS_EACH(a_stall_shows_only_while_there_is_work),
        HARNESS_BOTH(backend_failure_ends_everything),
        HARNESS_EACH(nan_fails_its_item_alone),
        HARNESS_EACH(many_front_ends_at_once),
    };
    return cmocka_run_group_tests(tests, harness_setup, harness_teardown);
}
