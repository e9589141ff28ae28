/* Opening: what is refused by name, what is resolved, the self-test; and the counters of a run. */
#include "engine/overlays_inside.h"
#include "engine/selftest.h"
#include "engine/stats.h"
#include "tests/engine/harness.h"

/* What the open engine was tested with before it started. */
static struct selftest selftest_of(const struct engine *engine)
{
    return (struct selftest){
        .be = engine->be,
        .model = engine->model,
        .step = engine->batch[0].step,
        .n_page = engine->pages.n_page,
        .max_seqs = engine->options.max_seqs,
        .context = engine_context(engine->options.max_model_len),
        .fast_math = engine->options.backend.fast_math,
    };
}

static void assert_not_opened(const struct engine_options *options, enum err_code code,
                              const char *what)
{
    struct engine *engine = NULL;
    struct err err = {0};
    const enum err_code got = engine_open(&engine, options, &err);
    assert_null(engine);
    if (got != code || strstr(err.message, what) == NULL) {
        fail_msg("expected %s and a message about \"%s\", got %s: %s", err_code_name(code), what,
                 err_code_name(got), err.message);
    }
}

static void options_out_of_bounds_are_named(void **state)
{
    (void)state;
    struct engine_options o = harness_options(harness_dir);
    o.max_seqs = 0;
    assert_not_opened(&o, ERR_ARGUMENT, "--max-seqs is 0");
    o = harness_options(harness_dir);
    o.max_seqs = 65;
    assert_not_opened(&o, ERR_ARGUMENT, "--max-seqs 65 exceeds --max-batch-tokens 64");
    o = harness_options(harness_dir);
    o.max_model_len = TINY_CONTEXT + 1;
    assert_not_opened(&o, ERR_ARGUMENT, "--max-model-len is 97, accepted are 0 to 96");
    o = harness_options(harness_dir);
    o.kv_tokens = TINY_CONTEXT - 20;
    assert_not_opened(&o, ERR_ARGUMENT, "--kv-tokens 76");
    o = harness_options(harness_dir);
    o.max_queue = 0;
    assert_not_opened(&o, ERR_ARGUMENT, "--max-queue is 0");
}

static void a_cache_larger_than_memory_is_refused_with_numbers(void **state)
{
    (void)state;
    struct engine_options o = harness_options(harness_dir);
    o.kv_tokens = (int64_t)1 << 32; /* 3 TiB for this model */
    assert_not_opened(&o, ERR_MEMORY, "the cache needs 3298534883328 bytes");
}

static void files_that_are_missing_or_do_not_fit_are_named(void **state)
{
    (void)state;
    struct engine_options o = harness_options("/no/such/model");
    assert_not_opened(&o, ERR_IO, "/no/such/model");
    o = harness_options(harness_dir);
    o.tokenizer_path = "models/demo/tokenizer.model";
    assert_not_opened(&o, ERR_FORMAT, "vocab_size is 101");
}

static void zeros_are_resolved(void **state)
{
    (void)state;
    struct engine_options o = harness_options(harness_dir);
    struct engine *engine = harness_open(&o);
    assert_int_equal(engine_limits(engine)->max_model_len, TINY_CONTEXT);
    assert_int_equal(engine_limits(engine)->kv_tokens, (int64_t)TINY_CONTEXT * o.max_seqs);
    assert_int_equal(atomic_load(&engine_stats(engine)->kv_pages),
                     (int64_t)TINY_CONTEXT * o.max_seqs / KV_PAGE);
    assert_null(engine_tokenizer(engine));
    if (strcmp(o.backend.device, "ref") == 0) {
        assert_string_equal(engine_backend(engine)->name, "ref");
    }
    assert_true(engine_stats(engine)->kv_bytes > 0);
    engine_close(engine);
}

static void max_model_len_is_the_limit_of_requests(void **state)
{
    (void)state;
    struct engine_options o = harness_options(harness_dir);
    o.max_model_len = 50;
    struct engine *engine = harness_open(&o);
    struct request *const fits = harness_generation(1, 20);
    harness_item(engine, fits, 0, 1, 30);
    harness_run(engine, fits);
    assert_int_equal(atomic_load(&fits->item[0].state), FINISH_LENGTH);
    struct request *const longer = harness_generation(1, 20);
    harness_item(engine, longer, 0, 1, 31);
    struct err err = {0};
    assert_int_equal(engine_submit(engine, longer, &err), ERR_ARGUMENT);
    assert_non_null(strstr(err.message, "max_length=50"));
    request_release(fits);
    request_release(longer);
    engine_close(engine);
}

/* ---- the self-test ---- */

static void self_test_refuses_damaged_weights(void **state)
{
    (void)state;
    char *const sick = tiny_model(HARNESS_VOCAB, 20);
    const struct engine_options o = harness_options(sick);
    assert_not_opened(&o, ERR_NUMERICAL, "log-probability nan at position 20");
    tiny_model_remove(sick);
}

/* A backend that computes a little differently when two texts share a step, or when a text comes
 * in chunks: both must be found. */
static const struct backend_ops *honest;
static bool errs_beside, errs_in_chunks, errs_drawn;
/* What the backend's fast paths, while they are in use, add to results: of prompts, of drawn
 * tokens, and of those in a full step. */
static float path_error[FAST_PATH_MAX][3];

static enum err_code lying_finish(struct backend *be, struct step *step, struct err *err)
{
    const enum err_code code = honest->finish(be, step, err);
    const bool chunk = step->pos[0] > 0;
    if (step->is_drawn ? errs_drawn && step->n_seq == 32
                       : (errs_beside && step->n_seq > 1) || (errs_in_chunks && chunk)) {
        float *const last = &step->out_logprob[step->n_out - 1];
        *last = nextafterf(*last, 0.0f);
    }
    for (int i = 0; i < be->n_fast_path; i++) {
        for (int o = 0; o < step->n_out && be->fast_path[i].is_used; o++) {
            const int kind = step->is_drawn ? 1 + (step->n_seq == 32) : 0;
            step->out_logprob[o] += path_error[i][kind];
        }
    }
    return code;
}

static void lying_fast_path_use(struct backend *be, int i, bool is_used)
{
    be->fast_path[i].is_used = is_used;
}

static struct engine *lying_open(const struct engine_options *options)
{
    static struct backend_ops lying;
    struct engine *const engine = harness_open(options);
    honest = engine->be->op;
    lying = *honest;
    lying.finish = lying_finish;
    lying.fast_path_use = lying_fast_path_use;
    engine->be->op = &lying; /* the engine thread is idle */
    return engine;
}

static void lying_close(struct engine *engine)
{
    engine->be->op = honest;
    engine_close(engine);
}

static void self_test_finds_one_wrong_bit(void **state)
{
    (void)state;
    const struct engine_options o = harness_options(harness_dir);
    struct engine *const engine = lying_open(&o);
    const struct selftest test = selftest_of(engine);
    struct err err = {0};
    assert_int_equal(selftest_run(&test, &err), ERR_OK);
    errs_beside = true;
    assert_int_equal(selftest_run(&test, &err), ERR_NUMERICAL);
    assert_non_null(strstr(err.message, "beside another text"));
    errs_beside = false;
    errs_in_chunks = true;
    assert_int_equal(selftest_run(&test, &err), ERR_NUMERICAL);
    assert_non_null(strstr(err.message, "in chunks"));
    errs_in_chunks = false;
    lying_close(engine);
}

/* Drawn tokens need not have the bits of a prompt's; in a step of max_seqs they have those of a
 * step of one. */
static void self_test_finds_one_wrong_bit_of_drawn_tokens(void **state)
{
    (void)state;
    const struct engine_options o = harness_options(harness_dir);
    struct engine *const engine = lying_open(&o);
    engine->be->phases_apart = true;
    const struct selftest test = selftest_of(engine);
    struct err err = {0};
    assert_int_equal(test.max_seqs, 32);
    assert_int_equal(selftest_run(&test, &err), ERR_OK);
    errs_drawn = true;
    assert_int_equal(selftest_run(&test, &err), ERR_NUMERICAL);
    assert_non_null(strstr(err.message, "drawn beside others"));
    errs_drawn = false;
    lying_close(engine);
}

struct path_case {
    struct fast_path path;
    float error[3];
    bool stays;
};

static void assert_paths_chosen(const struct path_case *cases, int n)
{
    const struct engine_options o = harness_options(harness_dir);
    struct engine *const engine = lying_open(&o);
    struct backend *const be = engine->be;
    const struct selftest test = selftest_of(engine);
    struct err err = {0};
    bool has_any = false;
    be->phases_apart = true;
    be->n_fast_path = n;
    for (int i = 0; i < n; i++) {
        be->fast_path[i] = cases[i].path;
        memcpy(path_error[i], cases[i].error, sizeof path_error[i]);
    }
    assert_int_equal(selftest_fast_paths(&test, &err), ERR_OK);
    for (int i = 0; i < n; i++) {
        assert_int_equal(be->fast_path[i].is_used, cases[i].stays);
        has_any |= cases[i].stays;
    }
    assert_int_equal(selftest_leave_fast_paths(&test), has_any);
    assert_false(selftest_leave_fast_paths(&test));
    be->n_fast_path = 0;
    lying_close(engine);
}

/* One bit of an exact one is too much, of a prompt or of a token drawn alone or in a crowd; of
 * others, more than rounding. What was not in use does not come into use. */
static void self_test_leaves_out_the_fast_paths_that_err(void **state)
{
    (void)state;
    static const struct path_case exact[] = {
        {{"right", true, true}, {0, 0}, true},      {{"prompt", true, true}, {1e-6F, 0}, false},
        {{"drawn", true, true}, {0, 1e-6F}, false}, {{"crowd", true, true}, {0, 0, 1e-6F}, false},
        {{"unused", true, false}, {0, 0}, false},
    };
    static const struct path_case others[] = {
        {{"near", false, true}, {0.2F, -0.2F}, true},
        {{"far", false, true}, {0, 0.3F}, false},
        {{"farther", false, true}, {-0.3F, 0}, false},
        {{"nothing", false, true}, {NAN, 0}, false},
    };
    assert_paths_chosen(exact, sizeof exact / sizeof *exact);
    assert_paths_chosen(others, sizeof others / sizeof *others);
}

/* What passes alone may not pass beside another. */
static void self_test_tries_fast_paths_together(void **state)
{
    (void)state;
    static const struct path_case pass[] = {
        {{"first", true, true}, {0, 0}, true},
        {{"second", false, true}, {0.1F, 0.1F}, true},
        {{"third", false, true}, {0.1F, 0.1F}, true},
    };
    static const struct path_case fail[] = {
        {{"first", true, true}, {0, 0}, true},
        {{"second", false, true}, {0.2F, 0}, false},
        {{"third", false, true}, {0.2F, 0}, false},
    };
    assert_paths_chosen(pass, 3);
    assert_paths_chosen(fail, 3);
}

static void self_test_of_fast_math_wants_finite_numbers_alone(void **state)
{
    (void)state;
    struct engine_options o = harness_options(harness_dir);
    o.backend.fast_math = true;
    struct engine *const engine = lying_open(&o);
    const struct selftest test = selftest_of(engine);
    struct err err = {0};
    errs_beside = errs_in_chunks = true;
    assert_int_equal(selftest_run(&test, &err), ERR_OK);
    errs_beside = errs_in_chunks = false;
    lying_close(engine);
    char *const sick = tiny_model(HARNESS_VOCAB, 20);
    o.model_dir = sick;
    assert_not_opened(&o, ERR_NUMERICAL, "log-probability nan at position 20");
    tiny_model_remove(sick);
}

/* ---- the warm-up ---- */

static int n_warm, warm_seqs[64];

static enum err_code warm_finish(struct backend *be, struct step *step, struct err *err)
{
    assert_int_equal(step->n_tok, step->n_seq);
    assert_int_equal(step->n_out, step->n_seq);
    for (int s = 0; s < step->n_seq; s++) {
        const int32_t *const page = step->page + (size_t)s * (size_t)step->limits.n_page_max;
        assert_int_equal(page[0], s); /* no two write to the same place */
    }
    warm_seqs[n_warm++] = step->n_seq;
    return honest->finish(be, step, err);
}

static int warm_up(struct engine *engine, int capture_max)
{
    struct err err = {0};
    const struct selftest test = selftest_of(engine);
    n_warm = 0;
    engine->be->capture_max = capture_max;
    assert_int_equal(selftest_warm_up(&test, &err), ERR_OK);
    for (int i = 0; i < n_warm; i++) {
        assert_int_equal(warm_seqs[i], i + 1);
    }
    return n_warm;
}

static void every_decode_step_that_is_prepared_runs_once_before_serving(void **state)
{
    (void)state;
    struct engine_options o = harness_options(harness_dir);
    o.max_seqs = 20;
    for (int pages_short = 0; pages_short < 2; pages_short++) {
        o.kv_tokens = pages_short ? TINY_CONTEXT : 0;
        struct engine *engine = harness_open(&o);
        honest = engine->be->op;
        struct backend_ops watched = *honest;
        watched.finish = warm_finish;
        engine->be->op = &watched; /* the engine thread is idle */
        assert_int_equal(warm_up(engine, 0), 0);
        assert_int_equal(warm_up(engine, 5), 5);
        assert_int_equal(warm_up(engine, 64), pages_short ? TINY_CONTEXT / KV_PAGE : 20);
        engine->be->op = honest;
        engine_close(engine);
    }
}

/* ---- counters ---- */

static void counters_add_up(void **state)
{
    (void)state;
    struct engine_options o = harness_options(harness_dir);
    o.max_batch_tokens = 32; /* prompts come in chunks */
    struct engine *engine = harness_open(&o);
    struct engine_stats *const s = engine_stats(engine);
    struct request *const generation = harness_generation(2, 6);
    harness_item(engine, generation, 0, 1, 50);
    harness_item(engine, generation, 1, 2, 30);
    harness_run(engine, generation);
    struct request *const score = harness_score(2, 40, 40);
    harness_item(engine, score, 0, 3, 90);
    harness_item(engine, score, 1, 4, 1);
    harness_run(engine, score);
    assert_int_equal(atomic_load(&s->prompt_tokens), 80);
    assert_int_equal(atomic_load(&s->generation_tokens), 12);
    assert_int_equal(atomic_load(&s->success_length), 4);
    assert_int_equal(atomic_load(&s->success_stop), 0);
    assert_int_equal(atomic_load(&s->ttft.count), 1);
    assert_int_equal(atomic_load(&s->tpot.count), 2);
    assert_int_equal(atomic_load(&s->itl.count), 10);
    assert_int_equal(atomic_load(&s->e2e.count), 2);
    assert_int_equal(atomic_load(&s->queue_time.count), 2);
    assert_int_equal(atomic_load(&s->score_time.count), 1);
    assert_int_equal(atomic_load(&s->prompt_len.count), 2);
    assert_int_equal(atomic_load(&s->step_tokens.count), atomic_load(&s->steps));
    /* Rows of all steps: prompts, all drawn tokens but the last of each, and the windows. */
    const long long n_row = 80 + 10 + 120;
    assert_int_equal((int)atomic_load(&s->step_tokens.sum), n_row);
    assert_int_equal(atomic_load(&s->memory_lookups[0]), n_row * TINY_MEMORY_HEAD * TINY_K_TOP);
    request_release(generation);
    request_release(score);
    engine_close(engine);
}

static struct engine *busy;
static struct request *late;
static struct waiter late_waiter = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, 0};

static void upload_meanwhile(struct backend *be, struct tensor dst, const void *src)
{
    (void)be, (void)dst, (void)src;
    (void)usleep(2000);
    harness_submit(busy, late, &late_waiter);
}

/* It comes between the beginning of a turn and its admissions, while overlays are uploaded. A time
 * that ran backwards would be missing from the histogram. */
static void a_request_does_not_start_before_it_came(void **state)
{
    (void)state;
    struct engine_options o = harness_options(harness_dir);
    o.overlay_bytes = 4096;
    busy = harness_open(&o);
    late = harness_generation(1, 2);
    harness_item(busy, late, 0, 1, 3);
    honest = busy->be->op;
    struct backend_ops slow = *honest;
    slow.upload = upload_meanwhile;
    busy->be->op = &slow; /* the engine thread is idle */
    struct overlays *const overlays = busy->overlays;
    assert_int_equal(pthread_mutex_lock(&overlays->lock), 0);
    overlays->upload = (struct overlay_upload){harness_dir, 0, 4};
    assert_int_equal(pthread_mutex_unlock(&overlays->lock), 0);
    overlays->wake(overlays->wake_ctx);
    waiter_wait(&late_waiter, late);
    assert_true(atomic_load(&late->start_us) >= atomic_load(&late->submit_us));
    assert_int_equal(atomic_load(&engine_stats(busy)->queue_time.count), 1);
    busy->be->op = honest;
    request_release(late);
    engine_close(busy);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(options_out_of_bounds_are_named),
        cmocka_unit_test(a_cache_larger_than_memory_is_refused_with_numbers),
        cmocka_unit_test(files_that_are_missing_or_do_not_fit_are_named),
        cmocka_unit_test(zeros_are_resolved),
        cmocka_unit_test(max_model_len_is_the_limit_of_requests),
        cmocka_unit_test(self_test_refuses_damaged_weights),
        cmocka_unit_test(self_test_finds_one_wrong_bit),
        cmocka_unit_test(self_test_finds_one_wrong_bit_of_drawn_tokens),
        cmocka_unit_test(self_test_leaves_out_the_fast_paths_that_err),
        cmocka_unit_test(self_test_tries_fast_paths_together),
        cmocka_unit_test(self_test_of_fast_math_wants_finite_numbers_alone),
        cmocka_unit_test(every_decode_step_that_is_prepared_runs_once_before_serving),
        cmocka_unit_test(counters_add_up),
        cmocka_unit_test(a_request_does_not_start_before_it_came),
    };
    return cmocka_run_group_tests(tests, harness_setup, harness_teardown);
}
