/* The all-attention family against the numbers that the authors' code computed.
 *
 * Each case of tests/golden/allattention is converted once (by tests/golden/convert_all.sh, into
 * PKMSERVE_GOLDEN, default $B/golden) and run in F32 on every backend of this machine:
 *   hidden   the embedding's and every layer's output for the first block
 *   stream   log-probabilities of the whole stream; it is longer than the ring of pages
 *   greedy   continuations of 20 tokens, one token a step from the cache
 *   bits     the stream token by token, in chunks, and beside another one: the same bits
 * Streams are run whole on the reference and on the widest instruction set, and cut to what takes
 * seconds on the others (CUDA is usually the test double); TEST_ALL=1 runs them whole everywhere,
 * TEST_FEW=1 cuts them on every backend: for sanitizers. An argument filters the tests by name:
 * build/tests/models/test_all_attention 'd-allattn*?ref?*' */
#define RUNNER_POSITIONS 384 /* the ring: the longest window, 256, and a chunk */

#include "models/safetensors.h"
#include "tests/models/runner.h"

#include <jansson.h>

static const char *const cases[] = {"a-fixed-ffn", "c-allattn-fixed", "d-allattn-adaptive",
                                    "e-allattn-adaptive-io", "g-span-epsilon"};
enum { N_CASE = 5, LENGTH_MAX = 1280, CHUNK = 128, FEW_TOKENS = 150, BITS_TOKENS = 520 };

struct golden {
    const char *name;
    json_t *json; /* expected.json */
    int32_t ids[LENGTH_MAX];
    int n_ids;
    int n_run; /* of them run on this backend */
    struct runner run;
    const float *hidden; /* hidden_block0, while it is checked */
    int n_block;
};

static double tolerance(const struct golden *g, const char *name)
{
    return json_real_value(json_object_get(json_object_get(g->json, "tolerance"), name));
}

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
    (void)snprintf(path, sizeof path, "tests/golden/allattention/%s/expected.json", g->name);
    g->json = json_load_file(path, 0, NULL);
    assert_non_null(g->json);
    const json_t *const ids = json_object_get(g->json, "ids");
    g->n_ids = (int)json_array_size(ids);
    assert_in_range(g->n_ids, 2, LENGTH_MAX);
    for (int t = 0; t < g->n_ids; t++) {
        g->ids[t] = (int32_t)json_integer_value(json_array_get(ids, (size_t)t));
    }
    const bool is_whole =
        strcmp(trial->backend, "ref") == 0 || strcmp(trial->backend, RUNNER_BEST) == 0;
    const bool is_slow = !is_whole || getenv("TEST_FEW") != NULL;
    const bool is_cut = is_slow && getenv("TEST_ALL") == NULL && g->n_ids > FEW_TOKENS;
    g->n_run = is_cut ? FEW_TOKENS : g->n_ids;
    return true;
}

static void golden_close(struct golden *g)
{
    json_decref(g->json);
    runner_close(&g->run);
}

static void assert_close(const struct golden *g, const char *what, int64_t index, double got,
                         double wanted, double most)
{
    if (!(fabs(got - wanted) <= most)) {
        fail_msg("%s on %s: %s[%lld]: expected %.9g, got %.9g (off by %.3g, tolerance %.1g)",
                 g->name, g->run.be->name, what, (long long)index, wanted, got, got - wanted, most);
    }
}

static struct piece stream_piece(const struct golden *g, int n)
{
    return (struct piece){.ids = g->ids, .n_ids = g->n_ids, .n = n};
}

/* ---- hidden --------------------------------------------------------------------------------- */

static void see_hidden(void *ctx, const char *name, int layer, const struct tensor *t)
{
    const struct golden *const g = ctx;
    if (strcmp(name, "hidden") != 0) {
        return;
    }
    const int64_t n = t->rows * t->cols;
    const float *const wanted = g->hidden + (layer + 1) * n;
    float *const got = calloc((size_t)n, sizeof *got);
    assert_non_null(got);
    g->run.be->op->download(g->run.be, got, *t);
    for (int64_t i = 0; i < n; i++) {
        assert_close(g, "hidden", (layer + 1) * n + i, (double)got[i], (double)wanted[i],
                     tolerance(g, "hidden_abs"));
    }
    free(got);
}

static void check_hidden(struct golden *g)
{
    char path[PATH_MAX];
    struct err err = {0};
    struct safetensors st;
    (void)snprintf(path, sizeof path, "tests/golden/allattention/%s/expected.safetensors", g->name);
    FILE *const file = fopen(path, "rb");
    assert_non_null(file);
    assert_int_equal(fseek(file, 0, SEEK_END), 0);
    const size_t bytes = (size_t)ftell(file);
    rewind(file);
    char *const data = malloc(bytes);
    assert_non_null(data);
    assert_int_equal(fread(data, 1, bytes, file), bytes);
    (void)fclose(file);
    assert_int_equal(safetensors_parse(&st, data, bytes, path, &err), ERR_OK);
    for (int i = 0; i < st.n_entry; i++) {
        const struct safetensors_entry *const entry = &st.entry[i];
        if (strcmp(entry->name, "hidden_block0") == 0) {
            assert_int_equal(entry->dtype, SAFETENSORS_F32);
            assert_int_equal(entry->dim[0], g->run.info->n_layer + 1);
            assert_int_equal(entry->dim[2], g->run.info->d_model);
            g->hidden = (const float *)(const void *)entry->data;
            g->n_block = (int)entry->dim[1];
        }
    }
    assert_non_null(g->hidden);
    g->run.extra = (struct model_tap){see_hidden, g};
    const struct piece piece = stream_piece(g, g->n_block);
    runner_step(&g->run, &piece, 1);
    safetensors_free(&st);
    free(data);
}

/* ---- stream --------------------------------------------------------------------------------- */

static void check_stream(struct golden *g)
{
    float logprob[LENGTH_MAX];
    const json_t *const wanted = json_object_get(g->json, "logprobs");
    struct piece piece = stream_piece(g, g->n_run);
    piece.logprob = logprob;
    runner_chunks(&g->run, piece, CHUNK);
    assert_int_equal(json_array_size(wanted), g->n_ids - 1);
    double nll = 0;
    for (int t = 0; t + 1 < g->n_ids && t < g->n_run; t++) {
        assert_close(g, "log-probability", t, (double)logprob[t],
                     json_real_value(json_array_get(wanted, (size_t)t)),
                     tolerance(g, "logprob_abs"));
        nll -= (double)logprob[t] / (g->n_ids - 1);
    }
    if (g->n_run == g->n_ids) {
        assert_close(g, "nll", 0, nll, json_real_value(json_object_get(g->json, "nll")),
                     tolerance(g, "nll_abs"));
    }
}

/* ---- greedy --------------------------------------------------------------------------------- */

static void check_continuation(struct golden *g, const json_t *greedy)
{
    int32_t drawn[LENGTH_MAX];
    float logprob[LENGTH_MAX];
    const json_t *const tokens = json_object_get(greedy, "tokens");
    const json_t *const logprobs = json_object_get(greedy, "logprobs");
    const int n_prefix = (int)json_integer_value(json_object_get(greedy, "prefix_len"));
    const int n_token = (int)json_array_size(tokens);
    if (n_prefix > g->n_run) {
        return;
    }
    assert_true(n_prefix + n_token < LENGTH_MAX);
    int32_t ids[LENGTH_MAX];
    memcpy(ids, g->ids, sizeof ids);
    struct piece piece = {
        .ids = ids, .n_ids = n_prefix, .n = n_prefix, .drawn = drawn, .drawn_logprob = logprob};
    for (int i = 0; i < n_token; i++) {
        runner_chunks(&g->run, piece, CHUNK);
        const int last = piece.n_ids - 1;
        const int wanted = (int)json_integer_value(json_array_get(tokens, (size_t)i));
        if (drawn[last] != wanted) {
            fail_msg("%s on %s: greedy token %d after %d: expected %d, got %d", g->name,
                     g->run.be->name, i, n_prefix, wanted, drawn[last]);
        }
        assert_close(g, "log-probability of greedy token", i, (double)logprob[last],
                     json_real_value(json_array_get(logprobs, (size_t)i)),
                     tolerance(g, "logprob_abs"));
        ids[piece.n_ids] = drawn[last];
        piece.first = piece.n_ids++;
        piece.n = 1;
    }
}

static void check_greedy(struct golden *g)
{
    const json_t *const greedy = json_object_get(g->json, "greedy");
    for (size_t i = 0; i < json_array_size(greedy); i++) {
        check_continuation(g, json_array_get(greedy, i));
    }
}

/* ---- bits ----------------------------------------------------------------------------------- */

static void assert_same_bits(const struct golden *g, const float *got, const float *wanted, int n,
                             const char *way)
{
    for (int t = 0; t + 1 < n; t++) {
        if (memcmp(&got[t], &wanted[t], sizeof *got) != 0) {
            fail_msg("%s on %s: position %d of %d: %.9g %s, %.9g in chunks of %d and with a tap",
                     g->name, g->run.be->name, t, n, (double)got[t], way, (double)wanted[t], CHUNK);
        }
    }
}

/* The stream in chunks of 5 beside its own second half token by token, in another slot. */
static void run_beside(struct golden *g, float *logprob, float *half_logprob)
{
    const int half = g->n_run / 2;
    struct piece piece = stream_piece(g, 0);
    struct piece other = {.slot = 1, .ids = g->ids + half, .n_ids = g->n_ids - half, .n = 1};
    piece.slot = 2;
    piece.logprob = logprob;
    other.logprob = half_logprob;
    for (; piece.first < g->n_run; piece.first += piece.n, other.first++) {
        piece.n = g->n_run - piece.first < 5 ? g->n_run - piece.first : 5;
        const struct piece both[2] = {other, piece};
        const bool is_alone = other.first >= g->n_run - half;
        runner_step(&g->run, is_alone ? &both[1] : both, is_alone ? 1 : 2);
    }
}

static void see_nothing(void *ctx, const char *name, int layer, const struct tensor *t)
{
    (void)ctx, (void)name, (void)layer, (void)t;
}

static void check_bits(struct golden *g)
{
    static float whole[LENGTH_MAX];
    static float other[LENGTH_MAX];
    static float half[LENGTH_MAX];
    /* enough to go round the ring */
    const int n = g->n_run = g->n_run < BITS_TOKENS ? g->n_run : BITS_TOKENS;
    struct piece piece = stream_piece(g, n);
    piece.logprob = whole;
    g->run.extra = (struct model_tap){see_nothing, NULL}; /* the others run without a tap */
    runner_chunks(&g->run, piece, CHUNK);
    g->run.extra = (struct model_tap){NULL, NULL};
    piece.logprob = other;
    piece.slot = 3;
    static const int chunks[] = {1, 7, 33};
    for (size_t c = 0; c < sizeof chunks / sizeof *chunks; c++) {
        char way[32];
        (void)snprintf(way, sizeof way, "in chunks of %d", chunks[c]);
        runner_chunks(&g->run, piece, chunks[c]);
        assert_same_bits(g, other, whole, n, way);
    }
    run_beside(g, other, half);
    assert_same_bits(g, other, whole, n, "beside another stream");
}

/* ---- the programme -------------------------------------------------------------------------- */

/* On the CUDA backend bits are looked at in one case of fixed spans and one of adaptive ones, and
 * of the case of twelve layers the hidden states alone: on a test double all of them take half a
 * minute. TEST_ALL=1 runs them all. */
static bool is_left_out(const struct runner_trial *trial)
{
    const bool is_chosen = strcmp(trial->case_name, "c-allattn-fixed") == 0 ||
                           strcmp(trial->case_name, "g-span-epsilon") == 0;
    const bool is_deep = strcmp(trial->case_name, "d-allattn-adaptive") == 0;
    const bool is_slow = strcmp(trial->backend, "cuda") == 0 && getenv("TEST_ALL") == NULL;
    const bool is_long = is_deep ? strcmp(trial->check->name, "hidden") != 0
                                 : !is_chosen && strcmp(trial->check->name, "bits") == 0;
    return runner_is_left_out(trial->backend) || (is_slow && is_long);
}

static void run_trial(void **state)
{
    static struct golden g;
    const struct runner_trial *const trial = *state;
    if (!golden_open(&g, trial)) {
        skip();
    }
    trial->check->run(&g);
    golden_close(&g);
}

int main(int argc, char **argv)
{
    static const struct runner_check checks[] = {{"hidden", check_hidden},
                                                 {"stream", check_stream},
                                                 {"greedy", check_greedy},
                                                 {"bits", check_bits}};
    const struct runner_trials all = {.group = "all_attention",
                                      .cases = cases,
                                      .checks = checks,
                                      .n_case = N_CASE,
                                      .n_check = sizeof checks / sizeof *checks,
                                      .is_left_out = is_left_out,
                                      .run = run_trial};
    return runner_trials(&all, argc, argv);
}
