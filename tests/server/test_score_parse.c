/* What becomes of the bodies of /score and /v1/score, without a server: the class of a request, and
 * the token that lm-eval puts in front. */
#include "server/score/score_labels.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static struct model_info info = {.n_vocab = 100, .context = 8192, .bos_id = 1, .eos_id = 2};
static const struct api_limits limits = {.info = &info,
                                         .model_name = "m",
                                         .context = 8192,
                                         .max_score_items = {8, "--max-score-items"},
                                         .max_score_tokens = {16384, "--max-score-tokens"},
                                         .max_score_positions = {1 << 20, "--max-score-positions"},
                                         .max_logprobs = 5,
                                         .timeout_ms = 1000,
                                         .max_timeout_ms = 10000};

/* The job of a body of /score, or of /v1/score, in which %s is a list of n ids. */
static void parse(struct score_job *job, bool is_labels, const char *form, int n)
{
    static char list[2 * 8192], body[sizeof list + 100];
    for (int i = 0; i < n; i++) {
        list[2 * i] = '5';
        list[2 * i + 1] = i + 1 < n ? ',' : '\0';
    }
    (void)snprintf(body, sizeof body, form, list);
    struct api_error error = {0};
    const bool ok =
        (is_labels ? score_labels_parse : score_parse)(job, body, strlen(body), &limits, &error);
    if (!ok) {
        fail_msg("%.100s: %s", body, error.text.message);
    }
}

/* More than 4096 positions are bulk, unless the body says what they are. The last token of a text
 * makes no position, that of a prompt before labels makes one. */
static void test_long_requests_are_bulk_unless_they_say_otherwise(void **state)
{
    (void)state;
    static const struct {
        bool is_labels;
        const char *form;
        int n_ids;
        enum priority priority;
    } rows[] = {
        {false, "{\"tokens\":[%s]}", 4097, PRIORITY_INTERACTIVE},
        {false, "{\"tokens\":[%s]}", 4098, PRIORITY_BULK},
        {false, "{\"tokens\":[%s],\"priority\":\"bulk\"}", 2, PRIORITY_BULK},
        {false, "{\"tokens\":[%s],\"priority\":\"interactive\"}", 5000, PRIORITY_INTERACTIVE},
#define LABELS "{\"query\":[%s],\"items\":[[]],\"label_token_ids\":[5]"
        {true, LABELS "}", 4096, PRIORITY_INTERACTIVE},
        {true, LABELS "}", 4097, PRIORITY_BULK},
        {true, LABELS ",\"priority\":\"bulk\"}", 2, PRIORITY_BULK},
        {true, LABELS ",\"priority\":\"interactive\"}", 5000, PRIORITY_INTERACTIVE},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        struct score_job job;
        parse(&job, rows[i].is_labels, rows[i].form, rows[i].n_ids);
        if (job.request->priority != rows[i].priority) {
            fail_msg("%s with %d ids, %lld positions: expected %d, got %d", rows[i].form,
                     rows[i].n_ids, (long long)request_positions(job.request),
                     (int)rows[i].priority, (int)job.request->priority);
        }
        score_free(&job);
    }
}

/* To lm-eval's `bos_token_id or eos_token_id` a 0 is none. */
static void test_lm_eval_takes_a_bos_of_0_for_none(void **state)
{
    (void)state;
    static const struct {
        int32_t bos, eos, prefix;
    } rows[] = {{1, 2, 1}, {0, 2, 2}, {-1, 2, 2}, {0, 0, 0}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        struct score_job job;
        info.bos_id = rows[i].bos;
        info.eos_id = rows[i].eos;
        parse(&job, false, "{\"tokens\":[%s],\"windows\":\"lm-eval\"}", 3);
        assert_int_equal(job.request->item[0].n_ids, 4);
        assert_int_equal(job.request->item[0].ids[0], rows[i].prefix);
        score_free(&job);
    }
}

/* A token that the model lacks is named where a body asks for it, and not missed elsewhere. */
static void test_marks_need_their_tokens(void **state)
{
    (void)state;
    static const struct {
        int32_t bos, eos;
        const char *body, *param, *message;
    } rows[] = {
        {-1, 2, "{\"tokens\":[5,6],\"add_bos\":true}", "add_bos", "no beginning-of-text token"},
        {1, -1, "{\"tokens\":[5,6],\"append_eos\":true}", "append_eos", "no end-of-text token"},
        {-1, 2, "{\"tokens\":[5,6],\"append_eos\":true}", NULL, ""},
        {1, -1, "{\"tokens\":[5,6],\"add_bos\":true}", NULL, ""},
        {0, 0, "{\"tokens\":[5,6],\"add_bos\":true,\"append_eos\":true}", NULL, ""},
        {-1, -1, "{\"tokens\":[5,6]}", NULL, ""},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        struct score_job job;
        struct api_error error = {0};
        info.bos_id = rows[i].bos;
        info.eos_id = rows[i].eos;
        const bool ok = score_parse(&job, rows[i].body, strlen(rows[i].body), &limits, &error);
        if (ok != (rows[i].param == NULL) ||
            (!ok && (error.status != 400 || strcmp(error.param, rows[i].param) != 0 ||
                     strstr(error.text.message, rows[i].message) == NULL))) {
            fail_msg("%s, BOS %d, EOS %d: got %d %s", rows[i].body, rows[i].bos, rows[i].eos,
                     error.status, error.text.message);
        }
        score_free(&job);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_long_requests_are_bulk_unless_they_say_otherwise),
        cmocka_unit_test(test_lm_eval_takes_a_bos_of_0_for_none),
        cmocka_unit_test(test_marks_need_their_tokens),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
