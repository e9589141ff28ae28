/* The family of Memory Layers at Scale against the numbers that the authors' code computed.
 *
 * Each case of tests/golden/memory-layers is converted once (by tests/golden/convert_all.sh, into
 * PKMSERVE_GOLDEN, default $B/golden) and run in F32 on every backend of this machine:
 *   short      logits, hidden states and the memories' outputs of the first positions
 *   sequences  log-probabilities, best tokens, slots and shares
 *   greedy     24 tokens, one a step from the cache
 *   bits       a sequence token by token, in chunks, and beside another one: the same bits
 * The tolerances are those of tests/golden/memory-layers/README.md. An argument filters the tests
 * by name: build/tests/models/test_memory_llama 'plain-pk?ref?*' */
#include "tests/models/runner.h"

#include <jansson.h>

static const char *const cases[] = {"plain-pk", "swilu-shared"};
enum { N_CASE = 2, LENGTH_MAX = 256, N_GREEDY = 24 };

static const double TOLERANCE = 1e-4; /* of logits, log-probabilities, hidden states and shares */

struct golden {
    const char *name;
    json_t *json; /* expected.json */
    struct runner run;
    const json_t *sequence; /* while it is checked */
    int n_ids, n_seen;      /* of it, and slots and shares that were looked at */
};

/* False (and nothing to close) if the backend is not there. */
static bool golden_open(struct golden *g, const struct runner_trial *trial)
{
    char path[PATH_MAX + 64];
    const struct model_options options = {.dtype = "f32", .check = true};
    *g = (struct golden){.name = trial->case_name};
    (void)snprintf(path, sizeof path, "%s/%s", runner_golden_dir(), g->name);
    if (!runner_open(&g->run, trial->backend, path, &options)) {
        return false;
    }
    (void)snprintf(path, sizeof path, "tests/golden/memory-layers/%s/expected.json", g->name);
    g->json = json_load_file(path, 0, NULL);
    assert_non_null(g->json);
    return true;
}

static void golden_close(struct golden *g)
{
    json_decref(g->json);
    runner_close(&g->run);
}

static int read_ids(int32_t *ids, const json_t *array)
{
    const size_t n = json_array_size(array);
    assert_in_range(n, 1, LENGTH_MAX);
    for (size_t i = 0; i < n; i++) {
        ids[i] = (int32_t)json_integer_value(json_array_get(array, i));
    }
    return (int)n;
}

static void assert_close(const struct golden *g, const char *what, int64_t index, double got,
                         double wanted)
{
    if (!(fabs(got - wanted) <= TOLERANCE)) {
        fail_msg("%s on %s: %s[%lld]: expected %.9g, got %.9g (off by %.3g)", g->name,
                 g->run.be->name, what, (long long)index, wanted, got, got - wanted);
    }
}

/* rows: an array of arrays. */
static void assert_rows(const struct golden *g, const char *what, const float *got,
                        const json_t *rows, size_t cols)
{
    assert_true(json_array_size(rows) > 0);
    for (size_t r = 0; r < json_array_size(rows); r++) {
        const json_t *const row = json_array_get(rows, r);
        assert_int_equal(json_array_size(row), cols);
        for (size_t c = 0; c < cols; c++) {
            assert_close(g, what, (int64_t)(r * cols + c), (double)got[r * cols + c],
                         json_number_value(json_array_get(row, c)));
        }
    }
}

static float *download(struct golden *g, const struct tensor *t)
{
    float *const got = calloc((size_t)(t->rows * t->cols), sizeof *got);
    assert_non_null(got);
    g->run.be->op->download(g->run.be, got, *t);
    return got;
}

/* What a case has under the number of a memory's layer. */
static const json_t *of_memory(const struct golden *g, const json_t *by_layer, int memory)
{
    char layer[16];
    (void)snprintf(layer, sizeof layer, "%d", g->run.info->memory[memory].layer);
    return json_object_get(by_layer, layer);
}

/* ---- short ---------------------------------------------------------------------------------- */

static void see_short(void *ctx, const char *name, int layer, const struct tensor *t)
{
    struct golden *const g = ctx;
    const json_t *const expected = json_object_get(g->sequence, "short");
    const bool is_hidden = strcmp(name, "hidden") == 0 && layer >= 0;
    const json_t *const rows =
        is_hidden ? json_array_get(json_object_get(expected, "hidden_after_layer"), (size_t)layer)
        : strcmp(name, "memory_out") == 0
            ? of_memory(g, json_object_get(expected, "memory_layer_output"), layer)
            : NULL;
    if (is_hidden || strcmp(name, "memory_out") == 0) {
        float *const got = download(g, t);
        assert_rows(g, name, got, rows, (size_t)t->cols);
        free(got);
        g->n_seen++;
    }
}

static void check_short(struct golden *g)
{
    int32_t ids[LENGTH_MAX];
    g->sequence = json_array_get(json_object_get(g->json, "sequences"), 0);
    const json_t *const expected = json_object_get(g->sequence, "short");
    const int n = (int)json_integer_value(json_object_get(expected, "length"));
    const size_t n_vocab = (size_t)g->run.info->n_vocab;
    float *const logits = calloc((size_t)LENGTH_MAX * n_vocab, sizeof *logits);
    assert_non_null(logits);
    g->run.extra = (struct model_tap){see_short, g};
    const struct piece piece = {.ids = ids,
                                .n_ids = read_ids(ids, json_object_get(g->sequence, "ids")),
                                .n = n,
                                .logits = logits};
    runner_step(&g->run, &piece, 1);
    assert_rows(g, "logits", logits, json_object_get(expected, "logits"), n_vocab);
    assert_int_equal(g->n_seen, g->run.info->n_layer + g->run.info->n_memory);
    free(logits);
}

/* ---- sequences ------------------------------------------------------------------------------ */

/* The slots of a sequence's positions, or of its last ones. */
static void assert_slots(const struct golden *g, int memory, const int32_t *got, int64_t cols)
{
    const json_t *const of = of_memory(g, json_object_get(g->sequence, "memory"), memory);
    const json_t *const rows = json_object_get(of, "indices");
    const size_t n = json_array_size(rows);
    const size_t k = (size_t)g->run.info->memory[memory].shape.k_top;
    assert_in_range(n, 1, g->n_ids);
    for (size_t i = 0; i < n * (size_t)cols; i++) {
        const size_t c = i % (size_t)cols;
        const json_t *const head = json_array_get(json_array_get(rows, i / (size_t)cols), c / k);
        const int64_t at = (int64_t)((size_t)g->n_ids - n) * cols + (int64_t)i;
        assert_int_equal(got[at], json_integer_value(json_array_get(head, c % k)));
    }
}

/* Shares are the softmax of the scores of a head. */
static void assert_shares(const struct golden *g, int memory, const float *got, int64_t cols)
{
    const json_t *const of = of_memory(g, json_object_get(g->sequence, "memory"), memory);
    const json_t *const rows = json_object_get(of, "scores");
    const size_t n = json_array_size(rows);
    const size_t k = (size_t)g->run.info->memory[memory].shape.k_top;
    const size_t n_head = (size_t)cols / k;
    for (size_t i = 0; i < n * n_head; i++) {
        const json_t *const head = json_array_get(json_array_get(rows, i / n_head), i % n_head);
        const double best = json_number_value(json_array_get(head, 0));
        const int64_t at = (int64_t)(((size_t)g->n_ids - n) * n_head + i) * (int64_t)k;
        double total = 0;
        for (size_t j = 0; j < k; j++) {
            total += exp(json_number_value(json_array_get(head, j)) - best);
        }
        for (size_t j = 0; j < k; j++) {
            assert_close(g, "share", at + (int64_t)j, (double)got[at + (int64_t)j],
                         exp(json_number_value(json_array_get(head, j)) - best) / total);
        }
    }
}

/* What the step's memories looked up. */
static void check_hits(struct golden *g)
{
    for (int memory = 0; memory < g->run.info->n_memory; memory++) {
        struct tensor hits[2] = {{0}, {0}};
        model_pkm_hits(g->run.model, memory, g->n_ids, &hits[0], &hits[1]);
        float *const slots = download(g, &hits[0]);
        float *const shares = download(g, &hits[1]);
        assert_slots(g, memory, (const int32_t *)(const void *)slots, hits[0].cols);
        assert_shares(g, memory, shares, hits[1].cols);
        free(slots);
        free(shares);
    }
}

static void assert_scores(const struct golden *g, const float *logprob, const int32_t *drawn)
{
    const json_t *const due = json_object_get(g->sequence, "logprobs");
    const json_t *const best = json_object_get(g->sequence, "argmax");
    const double margin = json_number_value(json_object_get(g->sequence, "argmax_margin_min"));
    assert_int_equal(json_array_size(due), g->n_ids - 1);
    for (int t = 0; t < g->n_ids - 1; t++) {
        assert_close(g, "logprob", t, (double)logprob[t],
                     json_number_value(json_array_get(due, (size_t)t)));
    }
    for (int t = 0; t < g->n_ids && margin > TOLERANCE; t++) {
        assert_int_equal(drawn[t], json_integer_value(json_array_get(best, (size_t)t)));
    }
}

static void check_sequences(struct golden *g)
{
    size_t i;
    json_t *sequence;
    json_array_foreach(json_object_get(g->json, "sequences"), i, sequence)
    {
        int32_t ids[LENGTH_MAX];
        int32_t drawn[LENGTH_MAX];
        float logprob[LENGTH_MAX];
        g->sequence = sequence;
        g->n_ids = read_ids(ids, json_object_get(sequence, "ids"));
        const struct piece piece = {
            .ids = ids, .n_ids = g->n_ids, .n = g->n_ids, .logprob = logprob, .drawn = drawn};
        runner_step(&g->run, &piece, 1);
        assert_scores(g, logprob, drawn);
        check_hits(g);
    }
    assert_true(i >= 3);
}

/* ---- greedy --------------------------------------------------------------------------------- */

static void check_greedy(struct golden *g)
{
    const json_t *const greedy = json_object_get(g->json, "greedy");
    const json_t *const due = json_object_get(greedy, "ids");
    int32_t ids[LENGTH_MAX];
    int32_t drawn[LENGTH_MAX];
    const int n_prompt = read_ids(ids, json_object_get(greedy, "prompt_ids"));
    assert_int_equal(json_array_size(due), N_GREEDY);
    struct piece piece = {.ids = ids, .n_ids = n_prompt, .n = n_prompt, .drawn = drawn};
    for (int i = 0; i < N_GREEDY; i++) {
        runner_step(&g->run, &piece, 1);
        const int last = piece.n_ids - 1;
        assert_int_equal(drawn[last], json_integer_value(json_array_get(due, (size_t)i)));
        ids[piece.n_ids++] = drawn[last];
        piece.first = last + 1;
        piece.n = 1;
    }
}

/* ---- bits ----------------------------------------------------------------------------------- */

static void assert_same_bits(const struct golden *g, const float *got, const float *wanted, int n,
                             const char *way)
{
    if (memcmp(got, wanted, (size_t)n * (size_t)g->run.info->n_vocab * sizeof *got) != 0) {
        fail_msg("%s on %s: %s, the logits have other bits", g->name, g->run.be->name, way);
    }
}

static void check_bits(struct golden *g)
{
    static const int chunks[] = {1, 5, 16};
    const size_t n_logit = (size_t)LENGTH_MAX * (size_t)g->run.info->n_vocab;
    int32_t ids[2][LENGTH_MAX];
    float *logits[3] = {calloc(n_logit, sizeof(float)), calloc(n_logit, sizeof(float)),
                        calloc(n_logit, sizeof(float))};
    struct piece piece[2];
    g->run.is_given = true;
    for (int s = 0; s < 2; s++) {
        const json_t *const sequence =
            json_array_get(json_object_get(g->json, "sequences"), (size_t)s);
        const int n = read_ids(ids[s], json_object_get(sequence, "ids"));
        assert_non_null(logits[s]);
        piece[s] = (struct piece){.slot = s, .ids = ids[s], .n_ids = n, .n = n};
        piece[s].logits = logits[s];
        runner_step(&g->run, &piece[s], 1);
    }
    struct piece again = piece[0];
    assert_non_null(again.logits = logits[2]);
    for (size_t c = 0; c < sizeof chunks / sizeof *chunks; c++) {
        memset(logits[2], 0, n_logit * sizeof(float));
        runner_chunks(&g->run, again, chunks[c]);
        assert_same_bits(g, logits[2], logits[0], again.n, "in chunks");
    }
    float logprob[2][LENGTH_MAX] = {{0}, {0}};
    for (int i = 0; i < 2; i++) { /* with a tap, and as a server runs it: see runner_step */
        again.logits = i == 0 ? logits[2] : NULL;
        again.logprob = logprob[i];
        runner_step(&g->run, &again, 1);
    }
    if (memcmp(logprob[0], logprob[1], sizeof logprob[0]) != 0) {
        fail_msg("%s on %s: without a tap the log-probabilities have other bits", g->name,
                 g->run.be->name);
    }
    again.logits = logits[2];
    memset(logits[2], 0, n_logit * sizeof(float));
    const struct piece crowd[2] = {piece[1], again};
    runner_step(&g->run, crowd, 2);
    assert_same_bits(g, logits[2], logits[0], again.n, "beside another");
    for (int i = 0; i < 3; i++) {
        free(logits[i]);
    }
}

/* ---- the programme -------------------------------------------------------------------------- */

/* On the CUDA backend, usually a test double, bits are looked at for one case; TEST_ALL=1: both. */
static bool is_left_out(const struct runner_trial *trial)
{
    const bool is_slow = strcmp(trial->backend, "cuda") == 0 &&
                         strcmp(trial->check->name, "bits") == 0 &&
                         strcmp(trial->case_name, "plain-pk") != 0;
    return runner_is_left_out(trial->backend) || (is_slow && getenv("TEST_ALL") == NULL);
}

static void run_trial(void **state)
{
    const struct runner_trial *const trial = *state;
    struct golden g;
    if (!golden_open(&g, trial)) {
        skip();
    }
    trial->check->run(&g);
    golden_close(&g);
}

int main(int argc, char **argv)
{
    static const struct runner_check checks[] = {{"short", check_short},
                                                 {"sequences", check_sequences},
                                                 {"greedy", check_greedy},
                                                 {"bits", check_bits}};
    const struct runner_trials all = {.group = "memory_llama",
                                      .cases = cases,
                                      .checks = checks,
                                      .n_case = N_CASE,
                                      .n_check = sizeof checks / sizeof *checks,
                                      .is_left_out = is_left_out,
                                      .run = run_trial};
    return runner_trials(&all, argc, argv);
}
