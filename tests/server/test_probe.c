/* The deep health check's verdicts: server/api/probe.c. */
#include "engine/engine.h"
#include "server/api/probe.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

static const struct model_info info = {.n_vocab = 16, .bos_id = 1};
static struct identity file = {
    .path = (char *)"m/model.sha256", .n_token = 3, .token = {4, 5, 6}, .logprob = {-1, -2}};
static const struct engine_identity stored = {.file = &file, .n = 3, .tolerance = 0.125F};
static const struct engine_identity none = {0};

/* Runs a check whose log-probabilities are a and b; with 0 it fails in the engine. Expires what is
 * kept, so that each is a check of its own. */
static void check(struct probe *probe, float a, float b)
{
    probe->checked_us -= probe->checked_us != 0 ? PROBE_KEEP_US : 0;
    assert_int_equal(probe_ask(probe), PROBE_YOURS);
    assert_int_equal(probe_ask(probe), PROBE_RUNNING);
    struct request *const request = probe_request(probe, &info);
    assert_non_null(request);
    struct item *const item = &request->item[0];
    if (a < 0) {
        const int n = probe->compared->n > 0 ? 2 : 1;
        item->out_logprob[0] = a;
        item->out_logprob[n - 1] = n == 2 ? b : a;
        atomic_store(&item->n_out, n);
    }
    atomic_store(&item->state, a < 0 ? FINISH_LENGTH : FINISH_ERROR);
    probe_end(probe, request);
    request_release(request);
}

static void scores_the_stored_tokens_and_compares(void **state)
{
    (void)state;
    struct probe probe;
    probe_begin(&probe, false);
    probe.compared = &stored;
    struct request *const request = probe_request(&probe, &info);
    assert_true(request->kind == REQUEST_SCORE && request->item[0].n_ids == 3);
    assert_int_equal(request->item[0].ids[2], 6);
    request_release(request);
    check(&probe, -1, -2.0625F);
    assert_int_equal(probe_ask(&probe), PROBE_OK);
    check(&probe, -1, -2.25F);
    assert_int_equal(probe_ask(&probe), PROBE_WRONG);
    assert_true(probe_is_wrong(&probe));
    check(&probe, -1, -2);
    assert_false(probe_is_wrong(&probe));
}

static void keeps_to_the_first_answers_bits(void **state)
{
    (void)state;
    const struct engine_identity *const both[2] = {&stored, &none};
    for (int i = 0; i < 2; i++) {
        struct probe probe;
        probe_begin(&probe, true);
        probe.compared = both[i];
        assert_false(probe_is_wrong(&probe));
        check(&probe, -1, -2);
        assert_int_equal(probe_ask(&probe), PROBE_OK);
        check(&probe, -1.0000001F, -2);
        assert_int_equal(probe_ask(&probe), PROBE_WRONG);
    }
}

static void an_error_is_wrong_and_no_result_is_nothing(void **state)
{
    (void)state;
    struct probe probe;
    probe_begin(&probe, true);
    probe.compared = &none;
    assert_int_equal(probe_ask(&probe), PROBE_YOURS);
    probe_end(&probe, NULL);
    assert_int_equal(probe_ask(&probe), PROBE_YOURS);
    probe_end(&probe, NULL);
    check(&probe, 0, 0);
    assert_true(probe_is_wrong(&probe));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(scores_the_stored_tokens_and_compares),
        cmocka_unit_test(keeps_to_the_first_answers_bits),
        cmocka_unit_test(an_error_is_wrong_and_no_result_is_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
