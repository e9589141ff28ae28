/* What an answer says of a log-probability that is minus infinity, or not a number: no model at
 * hand gives any, so the results are filled in here. */
#include "server/api/metrics.h"
#include "server/score/score_labels.h"
#include "server/score/score_stream.h"

#include <jansson.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static struct model_info info = {.n_vocab = 100, .context = 64, .bos_id = 1, .eos_id = 2};
static const struct api_limits limits = {.info = &info,
                                         .model_name = "m",
                                         .context = 64,
                                         .max_score_items = {8, "--max-score-items"},
                                         .max_score_tokens = {512, "--max-score-tokens"},
                                         .max_score_positions = {1 << 20, "--max-score-positions"},
                                         .max_logprobs = 5,
                                         .timeout_ms = 1000,
                                         .max_timeout_ms = 10000};
static const struct answer_meta meta = {.id = "i", .model = "m"};

/* Ends item i with these log-probabilities, as far as it has tokens to score. */
static void end_item(struct request *request, int i, float first, float rest)
{
    struct item *const item = &request->item[i];
    const int n = (int)(item->n_ids - item->score_from);
    for (int j = 0; j < n; j++) {
        item->out_logprob[j] = j == 0 ? first : rest;
        item->out_rank[j] = 1;
    }
    for (int j = 0; item->out_target != NULL && j < request->n_target; j++) {
        item->out_target[j] = j == 0 ? first : rest;
    }
    atomic_store(&item->n_out, n);
    atomic_store(&item->state, FINISH_LENGTH);
    atomic_fetch_add(&request->n_item_done, 1);
}

static json_t *parse_out(struct text *out)
{
    json_t *const answer = json_loadb(out->data, out->n, JSON_DISABLE_EOF_CHECK, NULL);
    assert_non_null(answer);
    text_free(out);
    return answer;
}

static const char ranking[] = "{\"context\":[1,3],\"continuations\":[[4,5],[6],[7]],"
                              "\"unconditional\":true,\"logprobs\":0}";

static void begin_ranking(struct score_job *job)
{
    struct api_error error = {0};
    assert_true(score_parse(job, ranking, sizeof ranking - 1, &limits, &error));
    assert_int_equal(job->request->n_item, 6);
}

static bool is_null(const json_t *object, const char *name)
{
    const json_t *const value = json_object_get(object, name);
    assert_non_null(value);
    return json_is_null(value);
}

static void test_impossible_tokens(void **state)
{
    (void)state;
    struct score_job job;
    begin_ranking(&job);
    end_item(job.request, 0, -INFINITY, -1);
    end_item(job.request, 1, -8, -9);
    end_item(job.request, 2, -3, 0);
    end_item(job.request, 3, -INFINITY, 0); /* impossible after BOS: no ratio to rank by */
    end_item(job.request, 4, -4, 0);
    end_item(job.request, 5, -5, 0);
    struct api_error error = {0};
    struct text out = {0};
    assert_true(score_write(&out, &job, &limits, &meta, &error));
    json_t *const answer = parse_out(&out);
    const json_t *const results = json_object_get(answer, "results");
    const json_t *const first = json_array_get(results, 0);
    assert_true(json_is_true(json_object_get(first, "impossible")));
    assert_true(is_null(first, "sum_logprob") && is_null(first, "perplexity"));
    assert_true(is_null(first, "min_logprob"));
    const json_t *const token = json_array_get(json_object_get(first, "tokens"), 0);
    assert_true(is_null(token, "logprob"));
    assert_true(json_is_true(json_object_get(token, "impossible")));
    assert_true(is_null(json_array_get(results, 1), "unconditional_sum_logprob"));
    assert_null(json_object_get(json_array_get(results, 1), "impossible"));
    assert_true(is_null(json_object_get(answer, "aggregate"), "sum_logprob"));
    const json_t *const best = json_object_get(answer, "ranking");
    assert_int_equal(json_integer_value(json_object_get(best, "sum")), 1);
    assert_int_equal(json_integer_value(json_object_get(best, "mutual_information")), 2);
    assert_true(is_null(best, "per_char")); /* no tokenizer, no text */
    json_decref(answer);
    score_free(&job);
}

static void test_all_impossible_has_no_best(void **state)
{
    (void)state;
    struct score_job job;
    begin_ranking(&job);
    for (int i = 0; i < 6; i++) {
        end_item(job.request, i, -INFINITY, -INFINITY);
    }
    struct api_error error = {0};
    struct text out = {0};
    assert_true(score_write(&out, &job, &limits, &meta, &error));
    json_t *const answer = parse_out(&out);
    assert_true(is_null(json_object_get(answer, "ranking"), "sum"));
    assert_true(is_null(json_object_get(answer, "ranking"), "mutual_information"));
    json_decref(answer);
    score_free(&job);
}

/* The stream gives what it has, and then the error; the whole answer is the error alone. */
static void test_not_a_number_is_an_error(void **state)
{
    (void)state;
    struct score_job job;
    begin_ranking(&job);
    for (int i = 0; i < 6; i++) {
        end_item(job.request, i, i == 3 ? NAN : -1, -1);
    }
    struct api_error error = {0};
    struct text out = {0};
    assert_false(score_write(&out, &job, &limits, &meta, &error));
    assert_int_equal(error.status, 500);
    assert_string_equal(error.code, "numerical_error");
    text_free(&out);

    struct score_stream stream;
    struct exchange x = {0};
    error = (struct api_error){0};
    score_stream_begin(&stream, &job, &limits, true);
    assert_int_equal(score_stream_next(&stream, &x, &meta, &error), EXCHANGE_ANSWER);
    assert_int_equal(error.status, 500);
    stream.open = true; /* had a line been sent before */
    stream.writer.result = 1;
    text_clear(&x.out);
    error = (struct api_error){0};
    assert_int_equal(score_stream_next(&stream, &x, &meta, &error), EXCHANGE_END);
    text_add(&x.out, "", 1);
    assert_non_null(strstr(x.out.data, "data: {\"error\":{"));
    assert_non_null(strstr(x.out.data, "numerical_error"));
    assert_non_null(strstr(x.out.data, "\n\ndata: [DONE]\n\n"));
    score_stream_end(&stream);
    text_free(&x.out);
    score_free(&job);
}

static void test_impossible_labels(void **state)
{
    (void)state;
    static const struct {
        float first, rest;
        bool softmax;
        double expected[2]; /* NaN: null */
    } cases[] = {
        {-INFINITY, -1, false, {0, 0.36787944117144233}},
        {-INFINITY, -1, true, {0, 1}},
        {-2, -2, true, {0.5, 0.5}},
        {-INFINITY, -INFINITY, false, {0, 0}},
        {-INFINITY, -INFINITY, true, {NAN, NAN}},
    };
    for (size_t c = 0; c < sizeof cases / sizeof cases[0]; c++) {
        char body[120];
        (void)snprintf(body, sizeof body,
                       "{\"query\":[3],\"items\":[[4]],\"label_token_ids\":[5,6],"
                       "\"apply_softmax\":%s}",
                       cases[c].softmax ? "true" : "false");
        struct score_job job;
        struct api_error error = {0};
        assert_true(score_labels_parse(&job, body, strlen(body), &limits, &error));
        end_item(job.request, 0, cases[c].first, cases[c].rest);
        struct text out = {0};
        struct score_writer writer;
        bool done = false;
        score_writer_begin(&writer, &job, &limits);
        assert_true(score_labels_write_piece(&writer, &out, SIZE_MAX, &meta, &done, &error) &&
                    done);
        score_writer_end(&writer);
        json_t *const answer = parse_out(&out);
        const json_t *const scores = json_array_get(json_object_get(answer, "scores"), 0);
        for (size_t j = 0; j < 2; j++) {
            const json_t *const score = json_array_get(scores, j);
            assert_int_equal(json_is_null(score), isnan(cases[c].expected[j]));
            assert_true(json_is_null(score) ||
                        fabs(json_number_value(score) - cases[c].expected[j]) < 1e-15);
        }
        json_decref(answer);
        score_free(&job);
    }
}

/* An impossible token leaves the sum of negative log-probabilities as it is. */
static void test_the_counted_sum_stays_finite(void **state)
{
    (void)state;
    struct metrics_score score = {0};
    const double nll[] = {INFINITY, NAN, -INFINITY, 1.5};
    for (size_t i = 0; i < sizeof nll / sizeof nll[0]; i++) {
        metrics_add_score(&score, 1, 0, 1, nll[i]);
    }
    assert_int_equal(metrics_get(&score.nll_micro), 1500000);
    assert_int_equal(metrics_get(&score.tokens), 4);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_impossible_tokens),
        cmocka_unit_test(test_all_impossible_has_no_best),
        cmocka_unit_test(test_not_a_number_is_an_error),
        cmocka_unit_test(test_impossible_labels),
        cmocka_unit_test(test_the_counted_sum_stays_finite),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
