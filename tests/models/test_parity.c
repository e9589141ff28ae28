/* The trainer and this engine agree on the shipped model: the log-probabilities that the trainer
 * computed in F32 from the shipped weights (models/demo/parity.json) against the forward pass in
 * F32, on every backend of this machine, with value tables copied and read in place. */
#include "tests/models/runner.h"

#include <jansson.h>

static const double TOLERANCE = 1e-4; /* per token */

struct trial {
    const char *backend;
    enum placement placement;
};

static void check_case(struct runner *run, const json_t *json, size_t index)
{
    int32_t ids[RUNNER_TOK_MAX];
    float logprob[RUNNER_TOK_MAX];
    const json_t *const wanted = json_object_get(json, "logprobs");
    const size_t n = json_array_size(json_object_get(json, "ids"));
    assert_in_range(n, 2, RUNNER_TOK_MAX);
    assert_int_equal(json_array_size(wanted), n - 1);
    for (size_t t = 0; t < n; t++) {
        ids[t] = (int32_t)json_integer_value(json_array_get(json_object_get(json, "ids"), t));
    }
    const struct piece piece = {.ids = ids, .n_ids = (int)n, .n = (int)n, .logprob = logprob};
    runner_step(run, &piece, 1);
    for (size_t t = 0; t + 1 < n; t++) {
        const double want = json_number_value(json_array_get(wanted, t));
        if (!(fabs((double)logprob[t] - want) <= TOLERANCE)) {
            fail_msg("%s, case %zu of parity.json, log-probability of token %zu: expected %.7g, "
                     "got %.7g; rerun: build/tests/models/test_parity",
                     run->be->name, index, t + 1, want, (double)logprob[t]);
        }
    }
}

static void test_parity(void **state)
{
    const struct trial *const trial = *state;
    const struct model_options options = {
        .dtype = "f32", .value_placement = trial->placement, .check = true};
    struct runner run;
    if (!runner_open(&run, trial->backend, "models/demo", &options)) {
        skip();
    }
    json_t *const json = json_load_file("models/demo/parity.json", 0, NULL);
    const json_t *const cases = json_object_get(json, "cases");
    assert_true(json_array_size(cases) > 0);
    for (size_t i = 0; i < json_array_size(cases); i++) {
        check_case(&run, json_array_get(cases, i), i);
    }
    json_decref(json);
    runner_close(&run);
}

int main(void)
{
    enum { N_TEST = 2 * RUNNER_N_BACKEND };
    static struct trial trials[N_TEST];
    static char names[N_TEST][48];
    static struct CMUnitTest tests[N_TEST];
    for (int i = 0; i < N_TEST; i++) {
        trials[i] =
            (struct trial){runner_backends[i / 2], i % 2 == 0 ? PLACEMENT_DEVICE : PLACEMENT_MMAP};
        (void)snprintf(names[i], sizeof names[i], "parity/%s/%s", trials[i].backend,
                       i % 2 == 0 ? "copied" : "mapped");
        tests[i] = (struct CMUnitTest){names[i], test_parity, NULL, NULL, &trials[i]};
    }
    return _cmocka_run_group_tests("parity", tests, N_TEST, NULL, NULL);
}
