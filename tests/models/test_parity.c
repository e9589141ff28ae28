/* The trainer and this engine agree on the shipped models: the log-probabilities that the trainer
 * computed in F32 from the shipped weights (parity.json beside them) against the forward pass in
 * F32, on every backend of this machine; and how far BF16 may stray from them. */
#define RUNNER_POSITIONS 640 /* the longest text; of the stream's ring, max_span and a chunk */
#include "tests/models/runner.h"

#include <jansson.h>

static const double TOLERANCE = 1e-4; /* per token, in F32 */
/* Of the mean over a text, in BF16: ten times what was measured (5e-4 over 33 tokens), far below
 * what a wrongly packed matrix does. The weights are exact; the rounded activations stray. */
static const double BF16_TOLERANCE = 5e-3;

enum { CHUNK = 128, TEXT_MAX = RUNNER_POSITIONS };

struct trial {
    const char *model, *backend, *dtype;
};

/* Fails if a log-probability is off; in BF16, if their mean is. */
static void compare(const struct runner *run, const float *got, const json_t *wanted, size_t index)
{
    const size_t n = json_array_size(wanted);
    const bool exact = run->info->dtype == DTYPE_F32;
    double drift = 0;
    for (size_t t = 0; t < n; t++) {
        const double want = json_number_value(json_array_get(wanted, t));
        drift += ((double)got[t] - want) / (double)n;
        if (exact && !(fabs((double)got[t] - want) <= TOLERANCE)) {
            fail_msg("%s, case %zu of parity.json, log-probability of token %zu: expected %.7g, "
                     "got %.7g; rerun: build/tests/models/test_parity",
                     run->be->name, index, t + 1, want, (double)got[t]);
        }
    }
    if (!(fabs(drift) <= BF16_TOLERANCE)) {
        fail_msg("%s, case %zu of parity.json: the mean log-probability in %s is off by %.3g, "
                 "tolerance %.3g",
                 run->be->name, index, dtype_name(run->info->dtype), drift, BF16_TOLERANCE);
    }
}

static void check_case(struct runner *run, const json_t *json, size_t index)
{
    int32_t ids[TEXT_MAX];
    float logprob[TEXT_MAX];
    const json_t *const wanted = json_object_get(json, "logprobs");
    const size_t n = json_array_size(json_object_get(json, "ids"));
    assert_in_range(n, 2, TEXT_MAX);
    assert_int_equal(json_array_size(wanted), n - 1);
    for (size_t t = 0; t < n; t++) {
        ids[t] = (int32_t)json_integer_value(json_array_get(json_object_get(json, "ids"), t));
    }
    const struct piece piece = {.ids = ids, .n_ids = (int)n, .n = (int)n, .logprob = logprob};
    runner_chunks(run, piece, CHUNK);
    compare(run, logprob, wanted, index);
}

static void test_parity(void **state)
{
    const struct trial *const trial = *state;
    const struct model_options options = {.dtype = trial->dtype, .check = true};
    struct runner run;
    if (!runner_open(&run, trial->backend, trial->model, &options)) {
        skip();
    }
    char path[64];
    (void)snprintf(path, sizeof path, "%s/parity.json", trial->model);
    json_t *const json = json_load_file(path, 0, NULL);
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
    static const char *const models[] = {"models/demo", "models/demo-bytes"};
    static const char *const dtypes[] = {"f32", "bf16"};
    enum { N_MODEL = 2, N_DTYPE = 2, N_TEST = N_MODEL * N_DTYPE * RUNNER_N_CPU };
    static struct trial trials[N_TEST];
    static char names[N_TEST][64];
    static struct CMUnitTest tests[N_TEST];
    for (int i = 0; i < N_TEST; i++) {
        trials[i] =
            (struct trial){models[i / (N_DTYPE * RUNNER_N_CPU)],
                           runner_backends[i / N_DTYPE % RUNNER_N_CPU], dtypes[i % N_DTYPE]};
        (void)snprintf(names[i], sizeof names[i], "parity/%s/%s/%s",
                       strchr(trials[i].model, '/') + 1, trials[i].backend, trials[i].dtype);
        tests[i] = (struct CMUnitTest){names[i], test_parity, NULL, NULL, &trials[i]};
    }
    return _cmocka_run_group_tests("parity", tests, N_TEST, NULL, NULL);
}
