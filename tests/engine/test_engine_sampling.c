/* What the fields of a generation do, from request to text: seeds, samples, stops, penalties,
 * bounds. The vocabulary is the shipped tokenizer's, the weights are random. */
#include "engine/tokenizer.h"
#include "tests/engine/harness.h"

enum { VOCAB = 4096 };

static struct engine *engine;

static int setup(void **state)
{
    (void)state;
    harness_dir = tiny_model(VOCAB, -1);
    struct engine_options options = harness_options(harness_dir);
    options.tokenizer_path = "models/demo/tokenizer.model";
    engine = harness_open(&options);
    return 0;
}

static int teardown(void **state)
{
    engine_close(engine);
    return harness_teardown(state);
}

static const struct item *first(const struct request *request)
{
    return &request->item[0];
}

static int n_out_of(const struct request *request)
{
    return atomic_load(&request->item[0].n_out);
}

/* Submits a generation that was filled but for its one item, and waits. */
static struct request *generate(struct request *request, int n_prompt)
{
    harness_item(engine, request, 0, 11, n_prompt);
    harness_run(engine, request);
    return request;
}

static struct request *sampled(uint64_t seed, int n_item, int max_tokens)
{
    struct request *const request = harness_generation(n_item, max_tokens);
    request->sampling.temperature = 1;
    request->sampling.seed = seed;
    return request;
}

/* ---- seeds and samples ---- */

static void seeds_reproduce_and_samples_differ(void **state)
{
    (void)state;
    enum { N = 4, N_NEW = 12 };
    struct request *run[2];
    for (int r = 0; r < 2; r++) {
        run[r] = sampled(77, N, N_NEW);
        for (int i = 0; i < N; i++) {
            harness_item(engine, run[r], i, 3, 10);
            run[r]->item[i].sample_index = i;
        }
        harness_run(engine, run[r]);
    }
    for (int i = 0; i < N; i++) {
        assert_memory_equal(run[0]->item[i].out_id, run[1]->item[i].out_id, N_NEW * 4);
        for (int j = 0; j < i; j++) {
            assert_memory_not_equal(run[0]->item[i].out_id, run[0]->item[j].out_id, N_NEW * 4);
        }
    }
    struct request *const other = sampled(78, 1, N_NEW);
    harness_item(engine, other, 0, 3, 10);
    harness_run(engine, other);
    assert_memory_not_equal(first(run[0])->out_id, first(other)->out_id, N_NEW * 4);
    request_release(run[0]);
    request_release(run[1]);
    request_release(other);
}

/* One request of n samples gives what n requests of one sample each give. */
static void samples_of_one_request_are_independent(void **state)
{
    (void)state;
    struct request *const both = sampled(5, 2, 10);
    for (int i = 0; i < 2; i++) {
        harness_item(engine, both, i, 3, 10);
        both->item[i].sample_index = i;
    }
    harness_run(engine, both);
    struct request *const second = sampled(5, 1, 10);
    harness_item(engine, second, 0, 3, 10);
    second->item[0].sample_index = 1;
    harness_run(engine, second);
    assert_memory_equal(both->item[1].out_id, second->item[0].out_id, 10 * 4);
    request_release(both);
    request_release(second);
}

/* ---- ends ---- */

static void ends_at_eos_unless_ignored(void **state)
{
    (void)state;
    for (int ignore = 0; ignore < 2; ignore++) {
        struct request *const request = harness_generation(1, 6);
        request->sampling.ignore_eos = ignore != 0;
        request->sampling.n_bias = 1;
        request->sampling.bias[0].token = 1;
        request->sampling.bias[0].bias = 100; /* eos is certain */
        generate(request, 8);
        assert_int_equal(n_out_of(request), ignore ? 6 : 1);
        assert_int_equal(first(request)->out_id[0], 1); /* it is part of the ids */
        assert_int_equal(atomic_load(&first(request)->state), ignore ? FINISH_LENGTH : FINISH_STOP);
        assert_int_equal(first(request)->stop_id, ignore ? -1 : 1);
        request_release(request);
    }
}

static void ends_at_a_stop_id(void **state)
{
    (void)state;
    struct request *const free_run = generate(harness_generation(1, 20), 8);
    const int32_t token = first(free_run)->out_id[7];
    int expected = 0;
    while (first(free_run)->out_id[expected] != token) {
        expected++;
    }
    struct request *const request = harness_generation(1, 20);
    request->sampling.n_stop_id = 2;
    request->sampling.stop_id[0] = 2;
    request->sampling.stop_id[1] = token;
    generate(request, 8);
    assert_int_equal(atomic_load(&first(request)->state), FINISH_STOP);
    assert_int_equal(first(request)->stop_id, token);
    assert_int_equal(n_out_of(request), expected + 1);
    assert_memory_equal(first(request)->out_id, first(free_run)->out_id,
                        (size_t)(expected + 1) * 4);
    request_release(free_run);
    request_release(request);
}

static void min_tokens_postpones_the_end(void **state)
{
    (void)state;
    struct request *const request = harness_generation(1, 10);
    request->sampling.ignore_eos = false;
    request->sampling.min_tokens = 4;
    request->sampling.n_bias = 1;
    request->sampling.bias[0].token = 1;
    request->sampling.bias[0].bias = 100;
    generate(request, 8);
    assert_int_equal(n_out_of(request), 5);
    for (int i = 0; i < 4; i++) {
        assert_int_not_equal(first(request)->out_id[i], 1);
    }
    assert_int_equal(first(request)->out_id[4], 1);
    request_release(request);
}

static void max_tokens_zero_only_reads_the_prompt(void **state)
{
    (void)state;
    struct request *const request = generate(harness_generation(1, 0), 9);
    assert_int_equal(atomic_load(&first(request)->state), FINISH_LENGTH);
    assert_int_equal(n_out_of(request), 0);
    assert_int_equal(first(request)->n_position, 9);
    request_release(request);
}

static void fills_the_context_to_its_last_position(void **state)
{
    (void)state;
    struct request *const request = generate(harness_generation(1, TINY_CONTEXT - 1), 1);
    assert_int_equal(atomic_load(&first(request)->state), FINISH_LENGTH);
    assert_int_equal(n_out_of(request), TINY_CONTEXT - 1);
    request_release(request);
}

static void an_item_may_end_before_the_requests_others(void **state)
{
    (void)state;
    struct request *const short_of_room = harness_generation(1, 8);
    short_of_room->item[0].max_tokens = 3;
    struct request *const request = generate(short_of_room, TINY_CONTEXT - 3);
    assert_int_equal(atomic_load(&first(request)->state), FINISH_LENGTH);
    assert_int_equal(n_out_of(request), 3);
    request_release(request);
}

/* ---- stop strings ---- */

/* The text of a generation, and in which token each byte lies. */
struct spelled {
    char text[4096];
    int token[4096];
    size_t n;
};

static void spell(struct spelled *spelled, const struct item *item)
{
    struct detok detok;
    detok_begin(&detok, engine_tokenizer(engine), false);
    spelled->n = 0;
    for (int i = 0; i < atomic_load(&item->n_out); i++) {
        char out[512];
        const size_t n = detok_push(&detok, item->out_id[i], out, sizeof out);
        for (size_t b = 0; b < n && spelled->n < sizeof spelled->text - 1; b++) {
            spelled->token[spelled->n] = i;
            spelled->text[spelled->n++] = out[b];
        }
    }
    spelled->text[spelled->n] = '\0';
}

static void stop_strings_are_found_across_tokens(void **state)
{
    (void)state;
    struct request *const free_run = sampled(9, 1, 40);
    generate(free_run, 8);
    static struct spelled whole;
    spell(&whole, first(free_run));
    assert_true(whole.n > 40);
    int n_across = 0;
    for (size_t begin = 3; begin + 6 < whole.n; begin += 7) {
        /* Five bytes of the text as it came; their first occurrence is where it must end. */
        const size_t bytes = 5;
        const char *const found = memmem(whole.text, whole.n, whole.text + begin, bytes);
        const size_t at = (size_t)(found - whole.text);
        n_across += whole.token[at] != whole.token[at + bytes - 1];
        struct request *const request = sampled(9, 1, 40);
        request->sampling.n_stop = 2;
        request->sampling.stop[0].bytes = 3;
        memcpy(request->sampling.stop[0].text, "\x01\x02\x03", 3);
        request->sampling.stop[1].bytes = (int)bytes;
        memcpy(request->sampling.stop[1].text, whole.text + begin, bytes);
        generate(request, 8);
        assert_int_equal(atomic_load(&first(request)->state), FINISH_STOP);
        assert_int_equal(first(request)->stop_string, 1);
        assert_int_equal(first(request)->stop_begin, at);
        assert_int_equal(n_out_of(request), whole.token[at + bytes - 1] + 1);
        assert_int_equal(first(request)->stop_id, -1);
        request_release(request);
    }
    assert_true(n_across > 2); /* else the test proves nothing */
    request_release(free_run);
}

/* ---- penalties, bias, allow lists ---- */

static void penalties_reach_the_drawing(void **state)
{
    (void)state;
    struct request *const request = harness_generation(1, 40);
    request->sampling.presence = 100; /* no token twice */
    generate(request, 8);
    for (int i = 0; i < 40; i++) {
        for (int j = 0; j < i; j++) {
            assert_int_not_equal(first(request)->out_id[i], first(request)->out_id[j]);
        }
    }
    request_release(request);
}

static void bias_and_allow_list_reach_the_drawing(void **state)
{
    (void)state;
    struct request *const biased = harness_generation(1, 5);
    biased->sampling.n_bias = 1;
    biased->sampling.bias[0].token = 4000;
    biased->sampling.bias[0].bias = 100;
    generate(biased, 8);
    struct request *const allowed = sampled(3, 1, 30);
    allowed->sampling.n_allow = 2;
    allowed->sampling.allow[0] = 700;
    allowed->sampling.allow[1] = 600;
    generate(allowed, 8);
    for (int i = 0; i < 5; i++) {
        assert_int_equal(first(biased)->out_id[i], 4000);
    }
    for (int i = 0; i < 30; i++) {
        const int32_t id = first(allowed)->out_id[i];
        assert_true(id == 600 || id == 700);
    }
    /* Log-probabilities stay the model's own. */
    assert_true(first(biased)->out_logprob[0] < -1);
    request_release(biased);
    request_release(allowed);
}

/* ---- what submit refuses ---- */

static void assert_refused(struct request *request, const char *what)
{
    struct err err = {0};
    assert_int_equal(engine_submit(engine, request, &err), ERR_ARGUMENT);
    if (strstr(err.message, what) == NULL) {
        fail_msg("expected a message about %s, got: %s", what, err.message);
    }
    request_release(request);
}

static struct request *valid(void)
{
    struct request *const request = harness_generation(1, 5);
    harness_item(engine, request, 0, 1, 8);
    return request;
}

static void submit_checks_what_the_engine_relies_on(void **state)
{
    (void)state;
    struct request *r = valid();
    r->item[0].ids[3] = VOCAB;
    assert_refused(r, "token 4096");
    r = valid();
    r->item[0].ids[3] = -1;
    assert_refused(r, "token -1");
    r = valid();
    r->sampling.max_tokens = TINY_CONTEXT;
    assert_refused(r, "max_length=96");
    r = valid();
    r->n_top = 6;
    assert_refused(r, "limit is 5");
    r = valid();
    r->sampling.temperature = NAN;
    assert_refused(r, "temperature");
    r = valid();
    r->sampling.top_p = 0;
    assert_refused(r, "top_p");
    r = valid();
    r->sampling.min_tokens = 6;
    assert_refused(r, "min_tokens");
    r = valid();
    r->sampling.n_stop = 1;
    assert_refused(r, "stop[0]");
    r = valid();
    r->sampling.n_stop = STOP_MAX + 1;
    assert_refused(r, "stop 17 of 16");
    r = valid();
    r->sampling.n_allow = 2;
    r->sampling.allow[0] = r->sampling.allow[1] = 5;
    assert_refused(r, "twice");
    r = valid();
    r->sampling.min_tokens = 1;
    r->sampling.ignore_eos = false;
    r->sampling.n_allow = 1;
    r->sampling.allow[0] = 1;
    assert_refused(r, "min_tokens 1");
    r = valid();
    r->lang = 1;
    assert_refused(r, "language");
    assert_refused(harness_generation(1, 5), "not set");
    r = harness_score(1, TINY_CONTEXT + 1, 1);
    harness_item(engine, r, 0, 1, 8);
    assert_refused(r, "max_context is 97");
    r = harness_score(1, 8, 9);
    harness_item(engine, r, 0, 1, 8);
    assert_refused(r, "stride 9");
    r = harness_score(1, 8, 0);
    harness_item(engine, r, 0, 1, 8);
    assert_refused(r, "stride 0");
}

static void set_item_bounds_what_it_allocates(void **state)
{
    (void)state;
    struct err err = {0};
    struct request *r = harness_generation(1, TINY_CONTEXT);
    assert_int_equal(request_set_item(r, 0, harness_ids(1, 1), 1, engine_model(engine), &err),
                     ERR_ARGUMENT);
    assert_non_null(strstr(err.message, "max_length=96"));
    request_release(r);
    r = harness_generation(1, INT_MAX);
    assert_int_equal(request_set_item(r, 0, harness_ids(1, 1), 1, engine_model(engine), &err),
                     ERR_ARGUMENT);
    request_release(r);
    r = harness_generation(1, 1);
    assert_int_equal(request_set_item(r, 0, harness_ids(1, 1), 0, engine_model(engine), &err),
                     ERR_ARGUMENT);
    request_release(r);
    assert_null(request_new(REQUEST_SCORE, 0));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(seeds_reproduce_and_samples_differ),
        cmocka_unit_test(samples_of_one_request_are_independent),
        cmocka_unit_test(ends_at_eos_unless_ignored),
        cmocka_unit_test(ends_at_a_stop_id),
        cmocka_unit_test(min_tokens_postpones_the_end),
        cmocka_unit_test(max_tokens_zero_only_reads_the_prompt),
        cmocka_unit_test(fills_the_context_to_its_last_position),
        cmocka_unit_test(stop_strings_are_found_across_tokens),
        cmocka_unit_test(penalties_reach_the_drawing),
        cmocka_unit_test(bias_and_allow_list_reach_the_drawing),
        cmocka_unit_test(an_item_may_end_before_the_requests_others),
        cmocka_unit_test(submit_checks_what_the_engine_relies_on),
        cmocka_unit_test(set_item_bounds_what_it_allocates),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
