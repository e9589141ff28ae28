/* Equal beginnings of texts are computed once, whoever comes first, leaves or fails, and nobody's
 * results show it. TEST_DEVICE names the backend. */
#include "engine/prefix.h"

#include "tests/engine/harness.h"

enum { N_IDS = 70, N_PAGE_SHARED = (N_IDS - 1) / KV_PAGE * KV_PAGE };

static int setup(void **state)
{
    (void)state;
    harness_dir = tiny_model_speaking(HARNESS_VOCAB, -1, 2);
    return 0;
}

/* Positions of an item that the engine computed. */
static int64_t computed(const struct request *request, int i)
{
    return request->item[i].n_position - request->item[i].n_cached;
}

/* All positions that the engine computed since it was opened. */
static int64_t steps_tokens(struct engine *engine)
{
    return (int64_t)atomic_load(&engine_stats(engine)->step_tokens.sum);
}

/* n samples of the prompt made from salt. */
static struct request *samples(const struct engine *engine, int salt, int n)
{
    struct request *const request = harness_generation(n, 12);
    request->sampling.temperature = 1;
    request->sampling.seed = 99;
    request->n_top = 2;
    for (int i = 0; i < n; i++) {
        harness_item(engine, request, i, salt, N_IDS);
        request->item[i].sample_index = i;
    }
    return request;
}

static void assert_same(const struct request *a, const struct request *b)
{
    for (int i = 0; i < a->n_item; i++) {
        const struct item *const x = &a->item[i];
        const struct item *const y = &b->item[i];
        const size_t n = (size_t)atomic_load(&x->n_out);
        assert_int_equal(atomic_load(&x->state), FINISH_LENGTH);
        assert_int_equal(atomic_load(&y->state), FINISH_LENGTH);
        assert_int_equal(atomic_load(&y->n_out), n);
        assert_int_equal(x->n_position, y->n_position);
        assert_memory_equal(x->out_logprob, y->out_logprob, n * sizeof(float));
        if (x->out_id != NULL) {
            assert_memory_equal(x->out_id, y->out_id, n * sizeof(int32_t));
        }
    }
}

/* The same request on an engine that shares nothing. */
static struct request *reference_of(struct request *(*make)(const struct engine *, int, int),
                                    int salt, int n)
{
    struct engine_options options = harness_options(harness_dir);
    options.prefix_cache = false;
    struct engine *const engine = harness_open(&options);
    struct request *const request = make(engine, salt, n);
    harness_run(engine, request);
    for (int i = 0; i < n; i++) {
        assert_int_equal(request->item[i].n_cached, 0);
    }
    engine_close(engine);
    return request;
}

/* ---- what is computed ---------------------------------------------------------------------- */

static void samples_compute_their_prompt_once(void **state)
{
    static const int batch[] = {64, 13, 1024}; /* rows of a step: chunks end inside pages */
    struct request *const expected = reference_of(samples, 1, 8);
    for (size_t b = 0; b < sizeof batch / sizeof batch[0]; b++) {
        struct engine_options options = harness_options(harness_dir);
        options.max_seqs = 9;
        options.max_batch_tokens = batch[b];
        struct engine *const engine = harness_open_as(state, &options);
        assert_int_equal(engine->pages.n_finished, 0); /* the self-test has left none */
        struct request *const request = samples(engine, 1, 8);
        harness_run(engine, request);
        assert_same(expected, request);
        int64_t sum = 0;
        for (int i = 0; i < 8; i++) {
            sum += computed(request, i);
        }
        /* Each sample feeds what follows the last full page, and all its tokens but the last. */
        assert_int_equal(sum, N_PAGE_SHARED + 8 * (N_IDS - N_PAGE_SHARED + 11));
        assert_int_equal(steps_tokens(engine), sum);
        assert_int_equal(request->item[0].n_cached, 0);
        assert_int_equal(request->item[7].n_cached, N_PAGE_SHARED);
        assert_int_equal(atomic_load(&engine_stats(engine)->prefix_queries), 8 * N_IDS);
        assert_int_equal(atomic_load(&engine_stats(engine)->prefix_hits), 7 * N_PAGE_SHARED);
        request_release(request);
        engine_close(engine);
    }
    request_release(expected);
}

/* Pages are found within a scope alone; in a common scope each hears of its own pages only. */
static void a_scope_keeps_its_pages_to_itself(void **state)
{
    static const struct {
        uint64_t scope, owner;
        int64_t n_cached, n_own;
    } row[] = {
        {1, 1, 0, 0},
        {2, 2, 0, 0}, /* a stranger finds out nothing */
        {1, 1, N_PAGE_SHARED, N_PAGE_SHARED},
        {0, 1, 0, 0},
        {0, 2, N_PAGE_SHARED, 0},
        {0, 1, N_PAGE_SHARED, N_PAGE_SHARED},
    };
    const struct engine_options options = harness_options(harness_dir);
    struct engine *const engine = harness_open_as(state, &options);
    struct request *const expected = reference_of(samples, 1, 1);
    for (size_t i = 0; i < sizeof row / sizeof row[0]; i++) {
        struct request *const request = samples(engine, 1, 1);
        request->scope = row[i].scope;
        request->owner = row[i].owner;
        harness_run(engine, request);
        assert_same(expected, request);
        assert_int_equal(request->item[0].n_cached, row[i].n_cached);
        assert_int_equal(request->item[0].n_own, row[i].n_own);
        request_release(request);
    }
    request_release(expected);
    engine_close(engine);
}

enum { N_ANSWER = 12, N_FOLLOW_UP = N_IDS + N_ANSWER };

/* Runs a request that goes on where the first ended, prompt and answer. */
static struct request *follow_up(struct engine *engine, const struct request *first)
{
    int32_t *const ids = malloc(N_FOLLOW_UP * sizeof *ids);
    assert_non_null(ids);
    memcpy(ids, first->item[0].ids, N_IDS * sizeof *ids);
    memcpy(ids + N_IDS, first->item[0].out_id, N_ANSWER * sizeof *ids);
    struct request *const next = harness_generation(1, 3);
    assert_int_equal(request_set_item(next, 0, ids, N_FOLLOW_UP, engine_model(engine), NULL),
                     ERR_OK);
    harness_run(engine, next);
    return next;
}

/* A later request that goes on where one ended finds its prompt and its answer. */
static void follow_ups_reuse_prompt_and_answer(void **state)
{
    const struct engine_options options = harness_options(harness_dir);
    struct engine *const engine = harness_open_as(state, &options);
    struct request *const first = samples(engine, 2, 1);
    harness_run(engine, first);
    struct request *const next = follow_up(engine, first);
    assert_int_equal(next->item[0].n_cached, (N_FOLLOW_UP - 2) / KV_PAGE * KV_PAGE);
    request_release(first);
    request_release(next);
    engine_close(engine);
}

/* Where drawn tokens are computed apart, a follow-up finds its prompt, but no page that has one of
 * them: as part of a prompt its token has other bits. */
static void pages_with_drawn_tokens_are_nobody_else_s(void **state)
{
    (void)state;
    const struct engine_options options = harness_options(harness_dir);
    struct engine *const engine = harness_open(&options);
    apart_begin(engine);
    struct request *const first = samples(engine, 2, 1);
    harness_run(engine, first);
    for (int t = 0; t < 2; t++) { /* the second time it finds its own prompt */
        struct request *const next = follow_up(engine, first);
        assert_int_equal(next->item[0].n_cached,
                         (t == 0 ? N_IDS : N_FOLLOW_UP - 2) / KV_PAGE * KV_PAGE);
        request_release(next);
    }
    request_release(first);
    engine_close(engine);
}

/* Echoed log-probabilities and traces want every position; others may use what that leaves. */
static void wanted_positions_are_computed(void **state)
{
    const struct engine_options options = harness_options(harness_dir);
    struct engine *const engine = harness_open_as(state, &options);
    for (int turn = 0; turn < 2; turn++) {
        struct request *const echo = harness_generation(1, 2);
        echo->echo = true;
        harness_item(engine, echo, 0, 3, N_IDS);
        struct request *const traced = harness_generation(1, 2);
        traced->trace_memory = true;
        harness_item(engine, traced, 0, 3, N_IDS);
        struct request *const score = harness_score(1, TINY_CONTEXT, TINY_CONTEXT);
        harness_item(engine, score, 0, 3, N_IDS);
        struct request *const windows = harness_score(1, 40, 40);
        windows->trace_memory = true;
        harness_item(engine, windows, 0, 3, N_IDS); /* two windows in the same pages */
        struct request *const all[] = {echo, traced, score, windows};
        for (int i = 0; i < 4; i++) {
            harness_run(engine, all[i]);
            assert_int_equal(all[i]->item[0].n_cached, 0);
            assert_int_equal(atomic_load(&all[i]->item[0].state), FINISH_LENGTH);
        }
        assert_memory_equal(echo->item[0].prompt_logprob + 1, score->item[0].out_logprob,
                            (N_IDS - 1) * sizeof(float));
        for (int i = 0; i < 4; i++) {
            request_release(all[i]);
        }
    }
    struct request *const expected = reference_of(samples, 3, 1);
    struct request *const plain = samples(engine, 3, 1);
    harness_run(engine, plain);
    assert_int_equal(plain->item[0].n_cached, N_PAGE_SHARED);
    assert_same(expected, plain);
    request_release(expected);
    request_release(plain);
    engine_close(engine);
}

/* Later windows count their last predictions only: what they are fed before may be in the cache. */
static struct request *windows(const struct engine *engine, int salt, int n)
{
    struct request *const request = harness_score(n, 64, 10);
    for (int i = 0; i < n; i++) {
        harness_item(engine, request, i, salt, 150);
    }
    return request;
}

static void windows_reuse_those_of_an_equal_text(void **state)
{
    struct request *const expected = reference_of(windows, 4, 2);
    const struct engine_options options = harness_options(harness_dir);
    struct engine *const engine = harness_open_as(state, &options);
    for (int turn = 0; turn < 2; turn++) {
        struct request *const request = windows(engine, 4, 2);
        harness_run(engine, request);
        assert_same(expected, request);
        if (turn > 0) { /* 64 predictions, then 85 by tens: 9 windows with 54 positions to skip */
            assert_int_equal(request->item[0].n_cached, 9 * 48);
        }
        request_release(request);
    }
    request_release(expected);
    engine_close(engine);
}

/* Two texts, each twice, in turns: none takes a page of the other, and both are computed otherwise.
 * differ makes the second one of the first. */
static void share_nothing(void **state, const struct engine_options *options,
                          void (*differ)(struct request *))
{
    struct engine *const engine = harness_open_as(state, options);
    float logprob[2] = {0};
    for (int turn = 0; turn < 4; turn++) {
        struct request *const request = harness_generation(1, 1);
        harness_item(engine, request, 0, 5, N_IDS);
        if (turn % 2 == 1) {
            differ(request);
        }
        harness_run(engine, request);
        assert_int_equal(request->item[0].n_cached, turn < 2 ? 0 : N_PAGE_SHARED);
        if (turn < 2) {
            logprob[turn] = request->item[0].out_logprob[0];
        }
        assert_memory_equal(&logprob[turn % 2], request->item[0].out_logprob, sizeof(float));
        request_release(request);
    }
    assert_true(logprob[0] < logprob[1] || logprob[0] > logprob[1]);
    engine_close(engine);
}

static void take_the_other_language(struct request *request)
{
    request->lang = 1;
}

static void languages_do_not_share(void **state)
{
    const struct engine_options options = harness_options(harness_dir);
    share_nothing(state, &options, take_the_other_language);
}

static void change_the_first_token(struct request *request)
{
    int32_t *const ids = request->item[0].ids;
    ids[0] = (ids[0] + 1) % HARNESS_VOCAB;
}

/* The ids of all pages but the first are the same. */
static void pages_after_another_beginning_are_others(void **state)
{
    struct engine_options options = harness_options(harness_dir);
    options.max_seqs = options.max_batch_tokens = KV_PAGE; /* a page in a step */
    share_nothing(state, &options, change_the_first_token);
}

/* Texts by turns in a cache that holds two of them: what was evicted is computed again. */
static void eviction_under_pressure(void **state)
{
    enum { N_TEXT = 5 };
    struct request *expected[N_TEXT];
    for (int t = 0; t < N_TEXT; t++) {
        expected[t] = reference_of(samples, 10 + t, 2);
    }
    struct engine_options options = harness_options(harness_dir);
    options.kv_tokens = 13 * KV_PAGE;
    options.max_batch_tokens = options.max_seqs = 24;
    struct engine *const engine = harness_open_as(state, &options);
    struct waiter waiter;
    waiter_begin(&waiter);
    for (int turn = 0; turn < 6; turn++) {
        struct request *request[N_TEXT];
        for (int t = 0; t < N_TEXT; t++) {
            request[t] = samples(engine, 10 + t, 2);
            harness_submit(engine, request[t], &waiter);
        }
        for (int t = 0; t < N_TEXT; t++) {
            waiter_wait(&waiter, request[t]);
            assert_same(expected[t], request[t]);
            request_release(request[t]);
        }
    }
    for (int t = 0; t < N_TEXT; t++) {
        request_release(expected[t]);
    }
    engine_close(engine);
}

/* ---- who computes -------------------------------------------------------------------------- */

/* Steps of 20 rows, of which a prompt takes several. */
static struct engine *open_narrow(void **state, struct gate *gate, struct waiter *waiter)
{
    struct engine_options options = harness_options(harness_dir);
    options.max_batch_tokens = options.max_seqs = 20;
    return harness_open_gated(state, &options, gate, waiter);
}

/* The first of two leaves with its prompt half done: the second takes over from where it came. */
static void who_waits_takes_over(void **state)
{
    struct request *const expected = reference_of(samples, 6, 1);
    struct gate gate;
    struct waiter waiter;
    struct engine *const engine = open_narrow(state, &gate, &waiter);
    struct request *const first = samples(engine, 6, 1);
    struct request *const second = samples(engine, 6, 1);
    harness_submit(engine, first, &waiter);
    gate_await(&gate, 1);
    harness_submit(engine, second, &waiter);
    gate_allow(&gate, 1);
    gate_await(&gate, 2);
    assert_int_equal(gate.last_n_seq, 1); /* the second has no row */
    request_cancel(first);
    gate_allow(&gate, -1);
    waiter_wait(&waiter, first);
    waiter_wait(&waiter, second);
    assert_int_equal(atomic_load(&first->item[0].state), FINISH_CANCELLED);
    assert_int_equal(computed(first, 0), 40);
    assert_int_equal(second->item[0].n_cached, 32);
    assert_same(expected, second);
    request_release(expected);
    request_release(first);
    request_release(second);
    engine_close(engine);
}

/* Whose pages they are that a waiting sequence takes: it hears of its own alone. */
static void who_waits_is_told_of_its_own_pages_only(void **state)
{
    struct request *const expected = reference_of(samples, 6, 1);
    struct gate gate;
    struct waiter waiter;
    struct engine *const engine = open_narrow(state, &gate, &waiter);
    struct request *all[3];
    for (int i = 0; i < 3; i++) {
        all[i] = samples(engine, 6, 1);
        all[i]->owner = i == 1 ? 2 : 1;
        harness_submit(engine, all[i], &waiter);
        if (i == 0) {
            gate_await(&gate, 1); /* it computes before the others come */
        }
    }
    gate_allow(&gate, -1);
    for (int i = 0; i < 3; i++) {
        waiter_wait(&waiter, all[i]);
        assert_same(expected, all[i]);
        assert_int_equal(all[i]->item[0].n_cached, i == 0 ? 0 : N_PAGE_SHARED);
        assert_int_equal(all[i]->item[0].n_own, i == 2 ? N_PAGE_SHARED : 0);
        request_release(all[i]);
    }
    request_release(expected);
    engine_close(engine);
}

/* Unrelated work goes on while a sequence waits, and who is interactive does not wait for bulk. */
static void interactive_does_not_wait_for_bulk(void **state)
{
    struct request *const expected = reference_of(samples, 7, 1);
    struct gate gate;
    struct waiter waiter;
    struct engine *const engine = open_narrow(state, &gate, &waiter);
    struct request *const bulk = samples(engine, 7, 2);
    bulk->priority = PRIORITY_BULK;
    struct request *const quick = samples(engine, 7, 1);
    struct request *const other = samples(engine, 8, 1);
    harness_submit(engine, bulk, &waiter);
    gate_await(&gate, 1);
    assert_int_equal(gate.last_n_seq, 1);
    harness_submit(engine, quick, &waiter);
    harness_submit(engine, other, &waiter);
    gate_allow(&gate, 1);
    gate_await(&gate, 2); /* bulk has 20 positions, quick took one page over and is at its second */
    assert_int_equal(gate.last_n_tok, 20);
    gate_allow(&gate, -1);
    struct request *const all[] = {quick, other, bulk};
    for (int i = 0; i < 3; i++) {
        waiter_wait(&waiter, all[i]);
    }
    assert_same(expected, quick);
    assert_memory_equal(expected->item[0].out_logprob, bulk->item[0].out_logprob,
                        12 * sizeof(float));
    assert_int_equal(quick->item[0].n_cached, 16);
    assert_true(bulk->item[0].n_cached > 0); /* it followed once it was overtaken */
    assert_int_equal(bulk->item[1].n_cached, N_PAGE_SHARED);
    request_release(expected);
    for (int i = 0; i < 3; i++) {
        request_release(all[i]);
    }
    engine_close(engine);
}

/* A prompt that is the second window's beginning, in the same step: if that window waited for it,
 * the third one's predictions would come before its own. */
static void windows_come_in_order(void **state)
{
    struct request *const expected = reference_of(windows, 30, 1);
    struct engine_options options = harness_options(harness_dir);
    options.max_batch_tokens = 1024;
    struct gate gate;
    struct waiter waiter;
    struct engine *const engine = harness_open_gated(state, &options, &gate, &waiter);
    struct request *const before = samples(engine, 31, 1);
    harness_submit(engine, before, &waiter);
    gate_await(&gate, 1);
    int32_t *const ids = malloc(40 * sizeof *ids);
    assert_non_null(ids);
    memcpy(ids, expected->item[0].ids + 10, 40 * sizeof *ids);
    struct request *const prompt = harness_generation(1, 2);
    assert_int_equal(request_set_item(prompt, 0, ids, 40, engine_model(engine), NULL), ERR_OK);
    harness_submit(engine, prompt, &waiter);
    struct request *const text = windows(engine, 30, 1);
    harness_submit(engine, text, &waiter);
    gate_allow(&gate, -1);
    struct request *const all[] = {before, prompt, text};
    for (int i = 0; i < 3; i++) {
        waiter_wait(&waiter, all[i]);
    }
    assert_same(expected, text);
    for (int i = 0; i < 3; i++) {
        request_release(all[i]);
    }
    request_release(expected);
    engine_close(engine);
}

/* Pages found for the beginning go back when there are too few for the rest. */
static void too_few_pages_take_none(void **state)
{
    (void)state;
    enum { N_PAGE = 3, N_BEGIN = 2 };
    struct kvpages pages;
    struct engine_stats counted = {0};
    assert_int_equal(kvpages_open(&pages, N_PAGE, true, NULL), ERR_OK);
    int32_t ids[N_PAGE * KV_PAGE] = {0};
    int32_t page[N_PAGE + 1];
    struct request request = {.kind = REQUEST_SCORE};
    struct job job = {.request = &request};
    struct item item = {.ids = ids, .n_ids = N_PAGE * KV_PAGE};
    struct sequence first = {
        .job = &job, .item = &item, .page = page, .n_skip = N_BEGIN * KV_PAGE, .shares = true};
    struct sequence second = first;
    assert_true(prefix_take(&pages, &counted, &first, N_BEGIN));
    first.n_done = N_BEGIN * KV_PAGE;
    prefix_keep(&pages, &first, true);
    kvpages_give(&pages, N_BEGIN, page);
    assert_int_equal(kvpages_n_held(&pages), 0);
    assert_false(prefix_take(&pages, &counted, &second, N_PAGE + 1));
    assert_int_equal(kvpages_n_held(&pages), 0);
    assert_true(prefix_take(&pages, &counted, &second, N_PAGE));
    assert_int_equal(second.n_done, N_BEGIN * KV_PAGE);
    kvpages_give(&pages, N_PAGE, page);
    kvpages_close(&pages);
}

/* ---- failure ------------------------------------------------------------------------------- */

/* What a failed sequence has left in the cache is not handed on. */
static void failures_leave_nothing_behind(void **state)
{
    char *const bad = tiny_model(HARNESS_VOCAB, 60);
    struct engine_options options = harness_options(bad);
    struct engine *const engine = harness_open_as(state, &options);
    struct request *const good = harness_generation(1, 2);
    harness_item(engine, good, 0, 9, 40);
    harness_run(engine, good);
    assert_true(engine->pages.n_finished > 0);
    for (int turn = 0; turn < 2; turn++) {
        struct request *const request = samples(engine, 9, 3); /* runs into the NaN */
        harness_run(engine, request);
        for (int i = 0; i < 3; i++) {
            assert_int_equal(atomic_load(&request->item[i].state), FINISH_ERROR);
        }
        assert_int_equal(engine->pages.n_finished, 0);
        request_release(request);
    }
    struct request *const again = harness_generation(1, 2);
    harness_item(engine, again, 0, 9, 40);
    harness_run(engine, again);
    assert_int_equal(again->item[0].n_cached, 0);
    assert_same(good, again);
    request_release(good);
    request_release(again);
    engine_close(engine);
    tiny_model_remove(bad);
}

/* Many of them at once, leaving at any time: nothing is lost, and who stays is served. */
static void units_come_and_go(void **state)
{
    struct request *expected[3];
    for (int t = 0; t < 3; t++) {
        expected[t] = reference_of(samples, 20 + t, 2);
    }
    struct engine_options options = harness_options(harness_dir);
    options.max_seqs = 7;
    options.max_batch_tokens = 30;
    options.kv_tokens = 30 * KV_PAGE;
    struct engine *const engine = harness_open_as(state, &options);
    struct waiter waiter;
    waiter_begin(&waiter);
    unsigned random = 7;
    for (int turn = 0; turn < 12; turn++) {
        struct request *request[9];
        for (int i = 0; i < 9; i++) {
            request[i] = samples(engine, 20 + i % 3, 2);
            request[i]->priority = i % 2 == 0 ? PRIORITY_BULK : PRIORITY_INTERACTIVE;
            harness_submit(engine, request[i], &waiter);
        }
        for (int i = 0; i < 9; i++) {
            random = random * 1664525u + 1013904223u;
            if (random >> 30 == 0) {
                (void)usleep(random >> 22 & 255);
                request_cancel(request[i]);
            }
        }
        for (int i = 0; i < 9; i++) {
            waiter_wait(&waiter, request[i]);
            if (atomic_load(&request[i]->item[1].state) == FINISH_LENGTH &&
                atomic_load(&request[i]->item[0].state) == FINISH_LENGTH) {
                assert_same(expected[i % 3], request[i]);
            }
            request_release(request[i]);
        }
    }
    while (!atomic_load(&engine->queue.idle)) {
        (void)usleep(200);
    }
    assert_int_equal(kvpages_n_held(&engine->pages), 0);
    for (int t = 0; t < 3; t++) {
        request_release(expected[t]);
    }
    engine_close(engine);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        HARNESS_EACH(samples_compute_their_prompt_once),
        HARNESS_EACH(a_scope_keeps_its_pages_to_itself),
        HARNESS_BOTH(follow_ups_reuse_prompt_and_answer),
        cmocka_unit_test(pages_with_drawn_tokens_are_nobody_else_s),
        cmocka_unit_test(too_few_pages_take_none),
        HARNESS_EACH(wanted_positions_are_computed),
        HARNESS_EACH(windows_reuse_those_of_an_equal_text),
        HARNESS_EACH(languages_do_not_share),
        HARNESS_EACH(pages_after_another_beginning_are_others),
        HARNESS_EACH(eviction_under_pressure),
        HARNESS_EACH(who_waits_takes_over),
        HARNESS_EACH(who_waits_is_told_of_its_own_pages_only),
        HARNESS_EACH(interactive_does_not_wait_for_bulk),
        HARNESS_EACH(windows_come_in_order),
        HARNESS_EACH(failures_leave_nothing_behind),
        HARNESS_EACH(units_come_and_go),
        HARNESS_APART(units_come_and_go),
    };
    return cmocka_run_group_tests(tests, setup, harness_teardown);
}
