/* The same request gives the same bits: alone, among others, in chunks of any size, watched while
 * it runs, with few places and few pages, on a device that computes by itself and on one that does
 * not. TEST_DEVICE names the backend, PKMSERVE_ISA the CPU's instruction set. */
#include "engine/scoring.h"
#include "tests/engine/harness.h"

/* ---- the requests that are compared ---- */

enum {
    SUBJECT_GREEDY,
    SUBJECT_SAMPLED,
    SUBJECT_PENALISED,
    SUBJECT_SCORE,
    SUBJECT_TRACED,
    N_SUBJECT
};

static const char *const subject_names[N_SUBJECT] = {"greedy", "sampled", "penalised", "score",
                                                     "traced score"};

static struct request *subject(const struct engine *engine, int kind)
{
    struct request *request = NULL;
    if (kind == SUBJECT_SCORE || kind == SUBJECT_TRACED) {
        request = harness_score(3, 40, 13);
        request->n_top = 3;
        request->entropy = true;
        request->n_target = 3;
        request->target[0] = 7;
        request->target[1] = 2;
        request->item[1].score_from = 20;
        request->trace_memory = kind == SUBJECT_TRACED;
        request->trace_tokens = kind == SUBJECT_TRACED;
        harness_item(engine, request, 0, 5, 150);
        harness_item(engine, request, 1, 6, 41);
        harness_item(engine, request, 2, 7, 1);
        return request;
    }
    const bool sampled = kind != SUBJECT_GREEDY;
    request = harness_generation(sampled ? 3 : 1, 25);
    request->n_top = 3;
    request->echo = true;
    if (sampled) {
        request->sampling.temperature = 0.9f;
        request->sampling.seed = 12345;
        request->sampling.top_k = 40;
        request->sampling.top_p = 0.95f;
    }
    if (kind == SUBJECT_PENALISED) {
        request->sampling.repetition = 1.2f;
        request->sampling.frequency = 0.3f;
        request->sampling.n_bias = 1;
        request->sampling.bias[0].token = 30;
        request->sampling.bias[0].bias = 2;
    }
    for (int i = 0; i < request->n_item; i++) {
        harness_item(engine, request, i, 3, 45);
        request->item[i].sample_index = i;
    }
    return request;
}

/* Other requests of all kinds, which run at the same time. */
static struct request *company(const struct engine *engine, int salt)
{
    struct request *request = NULL;
    if (salt % 3 == 0) {
        request = harness_score(2, 30, 30);
        harness_item(engine, request, 0, salt, 20 + salt * 7);
        harness_item(engine, request, 1, salt + 50, 5);
    } else {
        request = harness_generation(1, 3 + salt);
        request->sampling.temperature = 1;
        request->sampling.seed = (uint64_t)salt;
        harness_item(engine, request, 0, salt, 2 + salt * 2);
    }
    request->priority = salt % 2 == 0 ? PRIORITY_BULK : PRIORITY_INTERACTIVE;
    return request;
}

/* ---- comparing ---- */

static void compare_array(const char *how, const char *what, const void *expected, const void *got,
                          size_t n, size_t size)
{
    assert_int_equal(expected == NULL, got == NULL);
    if (expected != NULL && n > 0 && memcmp(expected, got, n * size) != 0) {
        fail_msg("%s: %s differs", how, what);
    }
}

static void compare_traces(const char *how, const struct pkm_trace *a, const struct pkm_trace *b)
{
    assert_int_equal(a->lookups, b->lookups);
    assert_int_equal(a->n_position, b->n_position);
    compare_array(how, "trace.slots", a->slots, b->slots, (size_t)a->lookups, sizeof *a->slots);
    compare_array(how, "trace.weights", a->weights, b->weights, (size_t)a->lookups,
                  sizeof *a->weights);
}

static void compare_requests(const char *how, const struct request *a, const struct request *b)
{
    const size_t n_top = (size_t)a->n_top;
    for (int i = 0; i < a->n_item; i++) {
        const struct item *const x = &a->item[i];
        const struct item *const y = &b->item[i];
        assert_int_equal(atomic_load(&x->state), atomic_load(&y->state));
        assert_int_equal(atomic_load(&x->n_out), atomic_load(&y->n_out));
        const size_t n = (size_t)atomic_load(&x->n_out);
        const size_t n_prompt = (size_t)x->n_ids;
        compare_array(how, "out_id", x->out_id, y->out_id, n, 4);
        compare_array(how, "out_logprob", x->out_logprob, y->out_logprob, n, 4);
        compare_array(how, "out_rank", x->out_rank, y->out_rank, n, 4);
        compare_array(how, "out_entropy", x->out_entropy, y->out_entropy, n, 4);
        compare_array(how, "out_target", x->out_target, y->out_target, (size_t)a->n_target, 4);
        compare_array(how, "out_top_id", x->out_top_id, y->out_top_id, n * n_top, 4);
        compare_array(how, "out_top_logprob", x->out_top_logprob, y->out_top_logprob, n * n_top, 4);
        compare_array(how, "prompt_logprob", x->prompt_logprob, y->prompt_logprob, n_prompt, 4);
        compare_array(how, "prompt_rank", x->prompt_rank, y->prompt_rank, n_prompt, 4);
        compare_array(how, "prompt_top_id", x->prompt_top_id, y->prompt_top_id, n_prompt * n_top,
                      4);
        assert_int_equal(x->n_position, y->n_position);
        if (x->trace != NULL) {
            compare_traces(how, x->trace, y->trace);
        }
    }
}

/* All subjects, each alone on a roomy engine that computes everything: what all else must equal. */
static struct request *reference[N_SUBJECT];

static void make_references(void)
{
    struct engine_options options = harness_options(harness_dir);
    options.prefix_cache = false;
    struct engine *const engine = harness_open(&options);
    for (int s = 0; s < N_SUBJECT; s++) {
        reference[s] = subject(engine, s);
        harness_run(engine, reference[s]);
        for (int i = 0; i < reference[s]->n_item; i++) {
            assert_int_equal(atomic_load(&reference[s]->item[i].state), FINISH_LENGTH);
        }
    }
    engine_close(engine);
}

static void free_references(void)
{
    for (int s = 0; s < N_SUBJECT; s++) {
        request_release(reference[s]);
    }
}

/* ---- tests ---- */

static void same_bits_in_a_crowd(void **state)
{
    enum { N_COMPANY = 20 };
    make_references();
    const struct engine_options options = harness_options(harness_dir);
    struct engine *const engine = harness_open_as(state, &options);
    for (int s = 0; s < N_SUBJECT; s++) {
        struct request *crowd[N_COMPANY];
        struct request *request = NULL;
        struct waiter waiter;
        waiter_begin(&waiter);
        for (int c = 0; c < N_COMPANY; c++) {
            crowd[c] = company(engine, c);
            harness_submit(engine, crowd[c], &waiter);
            if (c == N_COMPANY / 2) {
                request = subject(engine, s);
                harness_submit(engine, request, &waiter);
            }
        }
        waiter_wait(&waiter, request);
        compare_requests(subject_names[s], reference[s], request);
        for (int c = 0; c < N_COMPANY; c++) {
            waiter_wait(&waiter, crowd[c]);
            request_release(crowd[c]);
        }
        request_release(request);
    }
    engine_close(engine);
    free_references();
}

static void same_bits_however_steps_are_cut(void **state)
{
    static const struct {
        const char *name;
        int max_seqs, max_batch_tokens;
        int64_t kv_tokens;
    } shapes[] = {
        {"one row per step", 1, 1, 0},
        {"three rows, three sequences", 3, 3, 0},
        {"seven rows, two sequences", 2, 7, 0},
        {"everything at once", 64, 1024, 0},
        {"pages for one text only", 8, 16, TINY_CONTEXT},
    };
    make_references();
    for (size_t v = 0; v < sizeof shapes / sizeof shapes[0]; v++) {
        struct engine_options options = harness_options(harness_dir);
        options.max_seqs = shapes[v].max_seqs;
        options.max_batch_tokens = shapes[v].max_batch_tokens;
        options.kv_tokens = shapes[v].kv_tokens;
        struct engine *const engine = harness_open_as(state, &options);
        for (int s = 0; s < N_SUBJECT; s++) {
            char how[100];
            (void)snprintf(how, sizeof how, "%s, %s", subject_names[s], shapes[v].name);
            struct request *const request = subject(engine, s);
            harness_run(engine, request);
            compare_requests(how, reference[s], request);
            request_release(request);
        }
        assert_int_equal(atomic_load(&engine_stats(engine)->running), 0);
        engine_close(engine);
    }
    free_references();
}

/* Where drawn tokens are computed apart, a prompt and all samples' first tokens are rows of the
 * request, each further token a row of a step of drawn ones, in which all sequences that decode
 * share. */
static void drawn_tokens_have_steps_of_their_own(void **state)
{
    enum { N_SAMPLE = 3, N_NEW = 5, N_IDS = 20 };
    (void)state;
    const struct engine_options options = harness_options(harness_dir);
    struct engine *const engine = harness_open(&options);
    apart_begin(engine);
    struct request *const request = harness_generation(N_SAMPLE, N_NEW);
    for (int i = 0; i < N_SAMPLE; i++) {
        harness_item(engine, request, i, 3, N_IDS);
        request->item[i].sample_index = i;
    }
    harness_run(engine, request);
    const int n_drawn = atomic_load(&harness_apart.n_step[true]);
    const int n_given = atomic_load(&harness_apart.n_step[false]);
    assert_in_range(n_drawn, N_NEW - 1, N_NEW + 1); /* the samples need not start in one step */
    assert_in_range(n_given, 1, 3);
    assert_int_equal((int)atomic_load(&engine_stats(engine)->steps), n_drawn + n_given);
    struct request *const score = harness_score(1, 40, 40);
    harness_item(engine, score, 0, 4, 30);
    harness_run(engine, score);
    assert_int_equal(atomic_load(&harness_apart.n_step[true]), n_drawn);
    request_release(request);
    request_release(score);
    engine_close(engine);
}

/* Reads along while the engine writes: what was published never changes, and comes in order. */
static void streamed_results_are_the_final_ones(void **state)
{
    make_references();
    struct engine_options options = harness_options(harness_dir);
    options.max_batch_tokens = 32;
    struct engine *const engine = harness_open_as(state, &options);
    for (int s = 0; s < N_SUBJECT; s++) {
        struct request *const request = subject(engine, s);
        harness_submit(engine, request, NULL);
        int n_seen[3] = {0};
        while (atomic_load(&request->n_item_done) < request->n_item) {
            for (int i = 0; i < request->n_item; i++) {
                const struct item *const item = &request->item[i];
                const int n = atomic_load_explicit(&item->n_out, memory_order_acquire);
                assert_true(n >= n_seen[i]);
                for (; n_seen[i] < n; n_seen[i]++) {
                    assert_memory_equal(&item->out_logprob[n_seen[i]],
                                        &reference[s]->item[i].out_logprob[n_seen[i]], 4);
                }
            }
        }
        compare_requests(subject_names[s], reference[s], request);
        request_release(request);
    }
    engine_close(engine);
    free_references();
}

/* A request's echo is the score of the same tokens in one window. */
static void echo_equals_score(void **state)
{
    enum { N = 60 };
    const struct engine_options options = harness_options(harness_dir);
    struct engine *const engine = harness_open_as(state, &options);
    struct request *const echo = harness_generation(1, 0);
    echo->echo = true;
    harness_item(engine, echo, 0, 9, N);
    struct request *const score = harness_score(1, TINY_CONTEXT, TINY_CONTEXT);
    harness_item(engine, score, 0, 9, N);
    harness_run(engine, echo);
    harness_run(engine, score);
    assert_int_equal(atomic_load(&echo->item[0].state), FINISH_LENGTH);
    assert_true(isnan(echo->item[0].prompt_logprob[0]));
    assert_memory_equal(echo->item[0].prompt_logprob + 1, score->item[0].out_logprob, (N - 1) * 4);
    assert_memory_equal(echo->item[0].prompt_rank + 1, score->item[0].out_rank, (N - 1) * 4);
    request_release(echo);
    request_release(score);
    engine_close(engine);
}

/* The log-probability of a drawn token is what scoring prompt and text together gives. */
static void generated_logprobs_equal_score(void **state)
{
    enum { N = 30, N_NEW = 20 };
    const struct engine_options options = harness_options(harness_dir);
    struct engine *const engine = harness_open_as(state, &options);
    struct request *const generation = harness_generation(1, N_NEW);
    generation->sampling.temperature = 1.1f;
    harness_item(engine, generation, 0, 2, N);
    harness_run(engine, generation);
    int32_t *const ids = malloc((N + N_NEW) * sizeof *ids);
    assert_non_null(ids);
    memcpy(ids, generation->item[0].ids, N * sizeof *ids);
    memcpy(ids + N, generation->item[0].out_id, N_NEW * sizeof *ids);
    struct request *const score = harness_score(1, TINY_CONTEXT, TINY_CONTEXT);
    assert_int_equal(request_set_item(score, 0, ids, N + N_NEW, engine_model(engine), NULL),
                     ERR_OK);
    harness_run(engine, score);
    assert_memory_equal(generation->item[0].out_logprob, score->item[0].out_logprob + N - 1,
                        N_NEW * 4);
    request_release(generation);
    request_release(score);
    engine_close(engine);
}

/* A window's scores are those of its tokens alone: nothing leaks from one window to the next. */
static void windows_score_like_texts_of_their_own(void **state)
{
    enum { N = 100, W = 24, STRIDE = 10 };
    const struct engine_options options = harness_options(harness_dir);
    struct engine *const engine = harness_open_as(state, &options);
    struct request *const whole = harness_score(1, W, STRIDE);
    harness_item(engine, whole, 0, 4, N);
    harness_run(engine, whole);
    assert_int_equal(atomic_load(&whole->item[0].n_out), N - 1);
    int64_t n_position = 0;
    for (int64_t k = 0; k < score_window_count(N, 1, W, STRIDE); k++) {
        const struct score_window w = score_window_at(N, 1, W, STRIDE, k);
        n_position += w.n_feed;
        int32_t *const ids = malloc((size_t)(w.n_feed + 1) * sizeof *ids);
        assert_non_null(ids);
        memcpy(ids, whole->item[0].ids + w.first, (size_t)(w.n_feed + 1) * sizeof *ids);
        struct request *const alone = harness_score(1, W, W);
        assert_int_equal(request_set_item(alone, 0, ids, w.n_feed + 1, engine_model(engine), NULL),
                         ERR_OK);
        harness_run(engine, alone);
        assert_memory_equal(alone->item[0].out_logprob + w.n_feed - w.n_count,
                            whole->item[0].out_logprob + w.first + w.n_feed - w.n_count,
                            (size_t)w.n_count * 4);
        request_release(alone);
    }
    assert_int_equal(whole->item[0].n_position, n_position);
    request_release(whole);
    engine_close(engine);
}

/* ---- memory traces ---- */

static void traces_count_each_position_once(void **state)
{
    static const struct {
        int n_ids;
        int64_t window, stride;
        int64_t n_position; /* computed: with the last token's row or window */
    } cases[] = {
        {1, 40, 40, 1},        /* nothing to predict, one token to look at */
        {30, 40, 40, 30},      /* one window with room for the last token */
        {41, 40, 40, 40 + 40}, /* one full window: the last token gets one of its own */
        {100, 40, 40, 40 * 3 + 40},
        {150, 40, 13, 40 * 10 + 40},
    };
    const struct engine_options options = harness_options(harness_dir);
    struct engine *const engine = harness_open_as(state, &options);
    const int n_column = TINY_MEMORY_HEAD * TINY_K_TOP;
    for (size_t c = 0; c < sizeof cases / sizeof cases[0]; c++) {
        struct request *const request = harness_score(1, cases[c].window, cases[c].stride);
        request->trace_memory = request->trace_tokens = true;
        harness_item(engine, request, 0, 8, cases[c].n_ids);
        harness_run(engine, request);
        const struct pkm_trace *const trace = &request->item[0].trace[0];
        assert_int_equal(trace->n_position, cases[c].n_ids);
        assert_int_equal(trace->lookups, (int64_t)cases[c].n_ids * n_column);
        assert_int_equal(request->item[0].n_position, cases[c].n_position);
        double total = 0;
        int64_t n_count = 0;
        for (int64_t i = 0; i < trace->lookups; i++) {
            total += (double)trace->weights[i];
            n_count++;
        }
        assert_null(trace->count); /* the sums are made of the look-ups */
        assert_true(fabs(total - cases[c].n_ids * TINY_MEMORY_HEAD) < 1e-3);
        assert_int_equal(n_count, trace->lookups);
        for (int64_t i = 0; i < trace->lookups; i++) {
            assert_in_range(trace->slots[i], 0, TINY_SLOT - 1);
            assert_true(i % TINY_K_TOP == 0 || trace->weights[i] <= trace->weights[i - 1]);
        }
        request_release(request);
    }
    engine_close(engine);
}

static void traces_do_not_change_scores(void **state)
{
    const struct engine_options options = harness_options(harness_dir);
    struct engine *const engine = harness_open_as(state, &options);
    struct request *const traced = subject(engine, SUBJECT_TRACED);
    struct request *const plain = subject(engine, SUBJECT_SCORE);
    harness_run(engine, traced);
    harness_run(engine, plain);
    for (int i = 0; i < plain->n_item; i++) {
        assert_memory_equal(traced->item[i].out_logprob, plain->item[i].out_logprob,
                            (size_t)(plain->item[i].n_ids - plain->item[i].score_from) * 4);
    }
    request_release(traced);
    request_release(plain);
    engine_close(engine);
}

/* Prompt and generated tokens, the last one too, look up what scoring the whole text looks up. */
static void generation_traces_the_whole_text(void **state)
{
    enum { N = 10, N_NEW = 7 };
    const struct engine_options options = harness_options(harness_dir);
    struct engine *const engine = harness_open_as(state, &options);
    struct request *const generation = harness_generation(1, N_NEW);
    generation->trace_memory = generation->trace_tokens = true;
    harness_item(engine, generation, 0, 2, N);
    harness_run(engine, generation);
    assert_int_equal(atomic_load(&generation->item[0].n_out), N_NEW);
    int32_t *const ids = malloc((N + N_NEW) * sizeof *ids);
    assert_non_null(ids);
    memcpy(ids, generation->item[0].ids, N * sizeof *ids);
    memcpy(ids + N, generation->item[0].out_id, N_NEW * sizeof *ids);
    struct request *const score = harness_score(1, TINY_CONTEXT, TINY_CONTEXT);
    score->trace_memory = score->trace_tokens = true;
    assert_int_equal(request_set_item(score, 0, ids, N + N_NEW, engine_model(engine), NULL),
                     ERR_OK);
    harness_run(engine, score);
    assert_int_equal(score->item[0].trace[0].n_position, N + N_NEW);
    compare_traces("generation", &score->item[0].trace[0], &generation->item[0].trace[0]);
    request_release(generation);
    request_release(score);
    engine_close(engine);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        HARNESS_EACH(same_bits_in_a_crowd),
        HARNESS_APART(same_bits_in_a_crowd),
        HARNESS_EACH(same_bits_however_steps_are_cut),
        HARNESS_APART(same_bits_however_steps_are_cut),
        HARNESS_EACH(streamed_results_are_the_final_ones),
        HARNESS_APART(streamed_results_are_the_final_ones),
        cmocka_unit_test(drawn_tokens_have_steps_of_their_own),
        HARNESS_EACH(echo_equals_score),
        HARNESS_EACH(generated_logprobs_equal_score),
        HARNESS_EACH(windows_score_like_texts_of_their_own),
        HARNESS_EACH(traces_count_each_position_once),
        HARNESS_EACH(traces_do_not_change_scores),
        HARNESS_EACH(generation_traces_the_whole_text),
    };
    return cmocka_run_group_tests(tests, harness_setup, harness_teardown);
}
