/* Scoring beyond whole texts: a context that is not scored, targets behind the text, items that
 * keep nothing but their log-probabilities. TEST_DEVICE names the backend. */
#include "engine/scoring.h"
#include "tests/engine/harness.h"

/* The log-probability of token behind the last n_context of the item's ids. */
static float next_logprob(struct engine *engine, const struct item *item, int64_t n_context,
                          int32_t token)
{
    int32_t *const ids = malloc((size_t)(n_context + 1) * sizeof *ids);
    assert_non_null(ids);
    memcpy(ids, item->ids + item->n_ids - n_context, (size_t)n_context * sizeof *ids);
    ids[n_context] = token;
    struct request *const request = harness_score(1, TINY_CONTEXT, TINY_CONTEXT);
    assert_int_equal(request_set_item(request, 0, ids, n_context + 1, engine_model(engine), NULL),
                     ERR_OK);
    harness_run(engine, request);
    const float logprob = request->item[0].out_logprob[n_context - 1];
    request_release(request);
    return logprob;
}

/* ---- a context ---- */

static void a_context_is_read_and_not_scored(void **state)
{
    enum { N = 50, FROM = 33 };
    const struct engine_options options = harness_options(harness_dir);
    struct engine *const engine = harness_open_as(state, &options);
    struct request *const whole = harness_score(1, TINY_CONTEXT, TINY_CONTEXT);
    harness_item(engine, whole, 0, 4, N);
    harness_run(engine, whole);
    struct request *const tail = harness_score(1, TINY_CONTEXT, TINY_CONTEXT);
    tail->item[0].score_from = FROM;
    harness_item(engine, tail, 0, 4, N);
    harness_run(engine, tail);
    assert_int_equal(atomic_load(&tail->item[0].n_out), N - FROM);
    assert_memory_equal(tail->item[0].out_logprob, whole->item[0].out_logprob + FROM - 1,
                        (N - FROM) * 4);
    assert_memory_equal(tail->item[0].out_rank, whole->item[0].out_rank + FROM - 1, (N - FROM) * 4);
    assert_int_equal(score_sum_item(&tail->item[0]).n_scored, N - FROM);
    request_release(whole);
    request_release(tail);
    engine_close(engine);
}

/* The log-probabilities of n ids alone, and what their memories looked up. */
static struct request *alone_of(struct engine *engine, const int32_t *from, int64_t n, bool trace)
{
    int32_t *const ids = malloc((size_t)n * sizeof *ids);
    assert_non_null(ids);
    memcpy(ids, from, (size_t)n * sizeof *ids);
    struct request *const request = harness_score(1, TINY_CONTEXT, TINY_CONTEXT);
    request->trace_memory = trace;
    assert_int_equal(request_set_item(request, 0, ids, n, engine_model(engine), NULL), ERR_OK);
    harness_run(engine, request);
    return request;
}

/* Each block as if it were the whole text, to the bit; what stands between is marked by rank 0. */
static void blocks_are_read_alone(void **state)
{
    enum { N = 50, BLOCK = 12, USED = 9 };
    const struct engine_options options = harness_options(harness_dir);
    struct engine *const engine = harness_open_as(state, &options);
    struct request *const cut = harness_score(1, TINY_CONTEXT, TINY_CONTEXT);
    cut->item[0].block = BLOCK;
    cut->item[0].block_used = USED;
    harness_item(engine, cut, 0, 4, N);
    harness_run(engine, cut);
    const struct item *const item = &cut->item[0];
    for (int k = 0; k < N / BLOCK; k++) {
        struct request *const alone = alone_of(engine, item->ids + (size_t)k * BLOCK, USED, false);
        assert_memory_equal(item->out_logprob + (size_t)k * BLOCK, alone->item[0].out_logprob,
                            (USED - 1) * 4);
        assert_memory_equal(item->out_rank + (size_t)k * BLOCK, alone->item[0].out_rank,
                            (USED - 1) * 4);
        for (int i = k * BLOCK + USED - 1; i < (k + 1) * BLOCK && i < N - 1; i++) {
            assert_int_equal(item->out_rank[i], 0);
        }
        request_release(alone);
    }
    assert_int_equal(score_sum_item(item).n_scored, N / BLOCK * (USED - 1));
    request_release(cut);
    engine_close(engine);
}

/* The evaluator runs all of a window through the model, its last token too, and counts what the
 * memories looked up for each. */
static void the_trace_of_blocks_has_every_token_of_them(void **state)
{
    enum { N = 30, BLOCK = 10 };
    const struct engine_options options = harness_options(harness_dir);
    struct engine *const engine = harness_open_as(state, &options);
    struct request *const cut = harness_score(1, TINY_CONTEXT, TINY_CONTEXT);
    cut->trace_memory = true;
    cut->item[0].block = cut->item[0].block_used = BLOCK;
    harness_item(engine, cut, 0, 4, N + 3);
    harness_run(engine, cut);
    int64_t n_lookup = 0;
    for (int k = 0; k < N / BLOCK; k++) {
        struct request *const alone =
            alone_of(engine, cut->item[0].ids + (size_t)k * BLOCK, BLOCK, true);
        n_lookup += alone->item[0].trace[0].lookups;
        assert_memory_equal(cut->item[0].out_logprob + (size_t)k * BLOCK,
                            alone->item[0].out_logprob, (BLOCK - 1) * 4);
        request_release(alone);
    }
    assert_int_equal(cut->item[0].trace[0].n_position, N);
    assert_int_equal(cut->item[0].trace[0].lookups, n_lookup);
    request_release(cut);
    engine_close(engine);
}

static void impossible_blocks_are_refused(void **state)
{
    const struct engine_options options = harness_options(harness_dir);
    struct engine *const engine = harness_open_as(state, &options);
    const int64_t bad[][2] = {{4, 1}, {4, 5}, {-4, 2}, {1000, TINY_CONTEXT + 2}};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        struct request *const request = harness_score(1, TINY_CONTEXT, TINY_CONTEXT);
        request->item[0].block = bad[i][0];
        request->item[0].block_used = bad[i][1];
        harness_item(engine, request, 0, 4, 20);
        assert_int_equal(engine_submit(engine, request, NULL), ERR_ARGUMENT);
        request_release(request);
    }
    engine_close(engine);
}

/* What does not fit stands on the left, and is neither computed nor traced. */
static void a_context_that_does_not_fit_is_cut_on_the_left(void **state)
{
    enum { N = 90, FROM = 80, W = 24 };
    const struct engine_options options = harness_options(harness_dir);
    struct engine *const engine = harness_open_as(state, &options);
    struct request *const cut = harness_score(1, W, W);
    cut->item[0].score_from = FROM;
    cut->trace_memory = cut->trace_tokens = true;
    harness_item(engine, cut, 0, 4, N);
    harness_run(engine, cut);
    struct request *const alone = harness_score(1, W, W);
    int32_t *const ids = malloc((W + 1) * sizeof *ids);
    assert_non_null(ids);
    memcpy(ids, cut->item[0].ids + N - W - 1, (W + 1) * sizeof *ids);
    assert_int_equal(request_set_item(alone, 0, ids, W + 1, engine_model(engine), NULL), ERR_OK);
    harness_run(engine, alone);
    assert_memory_equal(cut->item[0].out_logprob, alone->item[0].out_logprob + W - (N - FROM),
                        (N - FROM) * 4);
    assert_int_equal(cut->item[0].n_position, W + W); /* the trace wants the last token as well */
    assert_int_equal(cut->item[0].trace[0].n_position, W + 1);
    request_release(cut);
    request_release(alone);
    engine_close(engine);
}

/* ---- targets ---- */

static void targets_are_what_follows_the_text(void **state)
{
    static const struct {
        int n_ids, window, score_from;
        int n_position; /* with the last token's row or window */
        int n_context;  /* tokens that the targets follow */
    } cases[] = {
        {1, 40, 1, 1, 1},             /* nothing to score */
        {30, 40, 1, 30, 30},          /* room in the only window */
        {41, 40, 1, 40 + 40, 40},     /* one full window: a window of their own */
        {90, 40, 1, 3 * 40 + 40, 40}, /* the third window is full as well: it has all the context */
        {30, 40, 30, 30, 30},         /* all is context */
        {60, 40, 60, 40, 40},
        {60, 40, 55, 40 + 40, 40},
    };
    static const int32_t target[] = {3, 100, 8, 8};
    enum { N_TARGET = sizeof target / sizeof target[0] };
    const struct engine_options options = harness_options(harness_dir);
    struct engine *const engine = harness_open_as(state, &options);
    for (size_t c = 0; c < sizeof cases / sizeof cases[0]; c++) {
        struct request *const request = harness_score(1, cases[c].window, cases[c].window);
        request->n_target = N_TARGET;
        memcpy(request->target, target, sizeof target);
        request->item[0].score_from = cases[c].score_from;
        harness_item(engine, request, 0, 8, cases[c].n_ids);
        harness_run(engine, request);
        const struct item *const item = &request->item[0];
        assert_int_equal(atomic_load(&item->state), FINISH_LENGTH);
        assert_int_equal(atomic_load(&item->n_out), cases[c].n_ids - cases[c].score_from);
        assert_int_equal(item->n_position, cases[c].n_position);
        for (int j = 0; j < N_TARGET; j++) {
            const float logprob = next_logprob(engine, item, cases[c].n_context, target[j]);
            assert_memory_equal(&item->out_target[j], &logprob, sizeof logprob);
        }
        request_release(request);
    }
    engine_close(engine);
}

/* A step has room for the targets of one text more than it has rows: other texts wait, and get the
 * same bits. */
static void targets_of_many_texts_share_the_steps(void **state)
{
    enum { N_ITEM = 9 };
    static const int length[N_ITEM] = {1, 1, 1, 2, 5, 17, 26, 41, 70};
    struct engine_options options = harness_options(harness_dir);
    options.max_seqs = 4;
    options.max_batch_tokens = 5;
    struct engine *const engine = harness_open_as(state, &options);
    struct request *const crowd = harness_score(N_ITEM, 40, 40);
    struct request *const company = harness_score(2, 40, 40);
    crowd->n_target = TARGET_MAX;
    for (int j = 0; j < TARGET_MAX; j++) {
        crowd->target[j] = j;
    }
    for (int i = 0; i < N_ITEM; i++) {
        harness_item(engine, crowd, i, i, length[i]);
    }
    harness_item(engine, company, 0, 7, 30);
    harness_item(engine, company, 1, 8, 60);
    struct waiter waiter;
    waiter_begin(&waiter);
    harness_submit(engine, crowd, &waiter);
    harness_submit(engine, company, &waiter);
    waiter_wait(&waiter, company);
    waiter_wait(&waiter, crowd);
    for (int i = 0; i < N_ITEM; i++) {
        struct request *const alone = harness_score(1, 40, 40);
        alone->n_target = TARGET_MAX;
        memcpy(alone->target, crowd->target, sizeof crowd->target);
        harness_item(engine, alone, 0, i, length[i]);
        harness_run(engine, alone);
        assert_memory_equal(alone->item[0].out_target, crowd->item[i].out_target, TARGET_MAX * 4);
        assert_memory_equal(alone->item[0].out_logprob, crowd->item[i].out_logprob,
                            (size_t)(length[i] - 1) * 4);
        request_release(alone);
    }
    request_release(crowd);
    request_release(company);
    engine_close(engine);
}

/* ---- the rest ---- */

static void a_bare_item_keeps_its_logprobs_alone(void **state)
{
    const struct engine_options options = harness_options(harness_dir);
    struct engine *const engine = harness_open_as(state, &options);
    struct request *const request = harness_score(2, 40, 40);
    request->n_top = 2;
    request->entropy = request->trace_memory = true;
    request->n_target = 1;
    request->item[1].bare = true;
    harness_item(engine, request, 0, 5, 20);
    harness_item(engine, request, 1, 5, 20);
    harness_run(engine, request);
    const struct item *const bare = &request->item[1];
    assert_memory_equal(bare->out_logprob, request->item[0].out_logprob, 19 * 4);
    assert_null(bare->out_top_id);
    assert_null(bare->out_entropy);
    assert_null(bare->out_target);
    assert_null(bare->trace);
    assert_int_equal(bare->n_position, 19); /* the last token predicts nothing */
    request_release(request);
    engine_close(engine);
}

static void wrong_contexts_and_targets_are_refused(void **state)
{
    (void)state;
    const struct engine_options options = harness_options(harness_dir);
    struct engine *const engine = harness_open(&options);
    for (int c = 0; c < 3; c++) {
        struct request *const request = harness_score(1, 40, 40);
        struct err err = {0};
        request->n_target = c == 0 ? TARGET_MAX + 1 : 1;
        request->target[0] = c == 1 ? HARNESS_VOCAB : 0;
        request->item[0].score_from = c == 2 ? 6 : 5;
        const enum err_code code =
            request_set_item(request, 0, harness_ids(1, 5), 5, engine_model(engine), &err);
        assert_int_equal(code, c == 2 ? ERR_ARGUMENT : ERR_OK);
        assert_true(c == 2 || engine_submit(engine, request, &err) == ERR_ARGUMENT);
        assert_true(err.message[0] != '\0');
        request_release(request);
    }
    engine_close(engine);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        HARNESS_EACH(a_context_is_read_and_not_scored),
        HARNESS_EACH(a_context_that_does_not_fit_is_cut_on_the_left),
        HARNESS_EACH(targets_are_what_follows_the_text),
        HARNESS_EACH(targets_of_many_texts_share_the_steps),
        HARNESS_EACH(a_bare_item_keeps_its_logprobs_alone),
        cmocka_unit_test(wrong_contexts_and_targets_are_refused),
        HARNESS_EACH(blocks_are_read_alone),
        HARNESS_EACH(the_trace_of_blocks_has_every_token_of_them),
        cmocka_unit_test(impossible_blocks_are_refused),
    };
    return cmocka_run_group_tests(tests, harness_setup, harness_teardown);
}
