/* The forward pass against the numbers that the original authors' code computed.
 *
 * Each case of tests/golden/xlm is converted once (by tests/golden/convert_all.sh, into
 * PKMSERVE_GOLDEN, default $B/golden) and run in F32 on every backend of this machine:
 *   short     logits, hidden states and what each memory did, for the 9 tokens of sequence 0
 *   sequences log-probabilities and nll of all four sequences (up to 512 tokens)
 *   greedy    two continuations of 20 tokens, one token a step from the cache
 *   bits      the same sequence whole, in chunks, token by token and in a crowd: the same bits
 * The tolerances are those of tests/golden/xlm/README.md. An argument filters the tests by name:
 *   build/tests/models/test_golden 'pkm12-2mem?ref?*' */
#include "models/safetensors.h"
#include "tests/models/runner.h"

#include <jansson.h>

static const char *const cases[] = {
    "dense12",   "pkm12",     "pkm12-2mem",   "pkm-added",    "flat",           "knn32",
    "ties",      "fp16ckpt",  "trained",      "pkm-mlpquery", "pkm-multiquery", "pkm-groupedquery",
    "rescore-a", "rescore-b", "share-values", "samekeys",     "identityquery",  "asm"};
enum { N_CASE = 18, N_SEQUENCE = 4, N_GREEDY = 20, LENGTH_MAX = 512 };

static const double LOGPROB_TOLERANCE = 1e-4; /* per token, also of nll / 10 */
static const double LOGITS_TOLERANCE = 2e-4;
static const double HIDDEN_TOLERANCE = 1e-4;
static const double SHARE_TOLERANCE = 5e-5;
static const double NLL_TOLERANCE = 1e-3;

struct golden {
    const char *name;
    json_t *json; /* expected.json */
    char *bytes;  /* expected.safetensors */
    struct safetensors st;
    struct runner run;
};

/* ---- reading what is expected --------------------------------------------------------------- */

static char *read_file(const char *path, size_t *bytes)
{
    FILE *const file = fopen(path, "rb");
    if (file == NULL) {
        fail_msg("%s: cannot open; run the tests from the repository's root", path);
        return NULL;
    }
    (void)fseek(file, 0, SEEK_END);
    *bytes = (size_t)ftell(file);
    rewind(file);
    char *const data = malloc(*bytes + 1);
    assert_non_null(data);
    assert_int_equal(fread(data, 1, *bytes, file), *bytes);
    (void)fclose(file);
    return data;
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
    (void)snprintf(path, sizeof path, "tests/golden/xlm/%s/expected.json", g->name);
    g->json = json_load_file(path, 0, NULL);
    assert_non_null(g->json);
    (void)snprintf(path, sizeof path, "tests/golden/xlm/%s/expected.safetensors", g->name);
    size_t bytes = 0;
    struct err err = {0};
    g->bytes = read_file(path, &bytes);
    if (safetensors_parse(&g->st, g->bytes, bytes, "expected.safetensors", &err) != ERR_OK) {
        fail_msg("%s", err.message);
    }
    return true;
}

static void golden_close(struct golden *g)
{
    safetensors_free(&g->st);
    free(g->bytes);
    json_decref(g->json);
    runner_close(&g->run);
}

/* The expected array of that name, n F32 values; NULL if the case leaves it out. */
static const float *expected(const struct golden *g, int64_t n, const char *name)
{
    for (int i = 0; i < g->st.n_entry; i++) {
        const struct safetensors_entry *const entry = &g->st.entry[i];
        if (strcmp(entry->name, name) == 0) {
            assert_int_equal(entry->n_elem, n);
            assert_int_equal(entry->dtype, SAFETENSORS_F32);
            return (const float *)(const void *)entry->data;
        }
    }
    return NULL;
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

static int read_lang(const json_t *object)
{
    return (int)json_integer_value(json_object_get(object, "lang")); /* null → 0 */
}

static void assert_close(const struct golden *g, const char *what, int64_t index, double got,
                         double wanted, double tolerance)
{
    if (!(fabs(got - wanted) <= tolerance)) {
        fail_msg("%s on %s: %s[%lld]: expected %.9g, got %.9g (off by %.3g, tolerance %.1g)",
                 g->name, g->run.be->name, what, (long long)index, wanted, got, got - wanted,
                 tolerance);
    }
}

/* ---- short: intermediate results ------------------------------------------------------------ */

static void check_floats(const struct golden *g, const char *name, const struct tensor *t,
                         double tolerance)
{
    const int64_t n = t->rows * t->cols;
    const float *const wanted = expected(g, n, name);
    float *const got = calloc((size_t)n, sizeof *got);
    assert_non_null(wanted);
    assert_non_null(got);
    g->run.be->op->download(g->run.be, got, *t);
    for (int64_t i = 0; i < n; i++) {
        assert_close(g, name, i, (double)got[i], (double)wanted[i], tolerance);
    }
    free(got);
}

static const char *memory_name(const struct golden *g, int m)
{
    static char name[32];
    const struct pkm_info *const memory = &g->run.info->memory[m];
    (void)snprintf(name, sizeof name, "%d_%s", memory->layer, memory_place_name(memory->place));
    return name;
}

/* The sum of the shares that wanted gives a slot; NAN if the slot is not there. */
static double share_of(const json_t *want_slots, const json_t *want_shares, int32_t slot)
{
    double sum = 0;
    bool is_there = false;
    for (size_t at = 0; at < json_array_size(want_slots); at++) {
        if (json_integer_value(json_array_get(want_slots, at)) == slot) {
            sum += json_number_value(json_array_get(want_shares, at));
            is_there = true;
        }
    }
    return is_there ? sum : NAN;
}

/* Slots as a set per token and head, and the shares of each slot, which modulo may repeat. */
static void check_hits(const struct golden *g, int m, const int32_t *slots, const float *shares,
                       int64_t n_row)
{
    const json_t *const memory =
        json_object_get(json_object_get(g->json, "memory_short"), memory_name(g, m));
    const struct pkm_shape *const shape = &g->run.info->memory[m].shape;
    for (int64_t i = 0; i < n_row * shape->n_head; i++) {
        const size_t t = (size_t)(i / shape->n_head);
        const size_t h = (size_t)(i % shape->n_head);
        const json_t *const want_slots =
            json_array_get(json_array_get(json_object_get(memory, "indices"), t), h);
        const json_t *const want_shares =
            json_array_get(json_array_get(json_object_get(memory, "weights"), t), h);
        assert_int_equal(json_array_size(want_slots), shape->k_top);
        for (int j = 0; j < shape->k_top; j++) {
            const int32_t slot = slots[i * shape->k_top + j];
            const double wanted = share_of(want_slots, want_shares, slot);
            if (isnan(wanted)) {
                fail_msg("%s on %s: memory %s, token %zu, head %zu: slot %d is not expected",
                         g->name, g->run.be->name, memory_name(g, m), t, h, slot);
            }
            double sum = 0;
            for (int other = 0; other < shape->k_top; other++) {
                sum += slots[i * shape->k_top + other] == slot
                           ? (double)shares[i * shape->k_top + other]
                           : 0;
            }
            assert_close(g, "share of slot", slot, sum, wanted, SHARE_TOLERANCE);
        }
    }
}

static void see_short(void *ctx, const char *name, int layer, const struct tensor *t)
{
    const struct golden *const g = ctx;
    char array[64];
    if (strcmp(name, "hidden") == 0) {
        (void)snprintf(array, sizeof array, "hidden.%d", layer + 1);
        check_floats(g, array, t, HIDDEN_TOLERANCE);
    } else if (strcmp(name, "logits") == 0) {
        assert_int_equal(layer, 0);
        /* An adaptive softmax has no logits: the model's are log-probabilities. */
        const bool is_adaptive = strcmp(g->name, "asm") == 0;
        check_floats(g, is_adaptive ? "logprobs_full" : "logits", t, LOGITS_TOLERANCE);
    } else if (strcmp(name, "query") == 0) {
        (void)snprintf(array, sizeof array, "mem.%s.query", memory_name(g, layer));
        check_floats(g, array, t, HIDDEN_TOLERANCE);
    } else if (strcmp(name, "memory_out") == 0) {
        (void)snprintf(array, sizeof array, "mem.%s.output", memory_name(g, layer));
        check_floats(g, array, t, HIDDEN_TOLERANCE);
    }
}

static void check_short(struct golden *g)
{
    int32_t ids[LENGTH_MAX];
    int32_t drawn[LENGTH_MAX];
    const json_t *const sequence = json_array_get(json_object_get(g->json, "sequences"), 0);
    const int n = read_ids(ids, json_object_get(sequence, "ids"));
    const struct piece piece = {
        .lang = read_lang(sequence), .ids = ids, .n_ids = n, .n = n, .drawn = drawn};
    g->run.extra = (struct model_tap){see_short, g};
    runner_step(&g->run, &piece, 1);
    const json_t *const argmax = json_object_get(sequence, "argmax");
    for (int t = 0; t < n; t++) {
        assert_int_equal(drawn[t], json_integer_value(json_array_get(argmax, (size_t)t)));
    }
    for (int m = 0; m < g->run.info->n_memory && !json_is_true(json_object_get(g->json, "ties"));
         m++) {
        struct tensor slots, shares;
        model_pkm_hits(g->run.model, m, n, &slots, &shares);
        const size_t n_hit = (size_t)(slots.rows * slots.cols);
        int32_t *const slot = calloc(n_hit, sizeof *slot);
        float *const share = calloc(n_hit, sizeof *share);
        assert_true(slot != NULL && share != NULL);
        g->run.be->op->download(g->run.be, slot, slots);
        g->run.be->op->download(g->run.be, share, shares);
        check_hits(g, m, slot, share, n);
        free(slot);
        free(share);
    }
}

/* ---- sequences ------------------------------------------------------------------------------ */

static void check_sequences(struct golden *g)
{
    int32_t ids[LENGTH_MAX];
    float logprob[LENGTH_MAX];
    const json_t *const sequences = json_object_get(g->json, "sequences");
    assert_int_equal(json_array_size(sequences), N_SEQUENCE);
    for (size_t s = 0; s < N_SEQUENCE; s++) {
        const json_t *const sequence = json_array_get(sequences, s);
        const json_t *const wanted = json_object_get(sequence, "logprobs_f64");
        const int n = read_ids(ids, json_object_get(sequence, "ids"));
        const struct piece piece = {
            .lang = read_lang(sequence), .ids = ids, .n_ids = n, .n = n, .logprob = logprob};
        runner_step(&g->run, &piece, 1);
        assert_int_equal(json_array_size(wanted), n - 1);
        double nll = 0;
        for (int t = 0; t + 1 < n; t++) {
            assert_close(g, "log-probability", t, (double)logprob[t],
                         json_real_value(json_array_get(wanted, (size_t)t)), LOGPROB_TOLERANCE);
            nll -= (double)logprob[t];
        }
        assert_close(g, "nll of sequence", (int64_t)s, nll,
                     json_real_value(json_object_get(sequence, "nll_f64")), NLL_TOLERANCE);
    }
}

/* ---- greedy --------------------------------------------------------------------------------- */

static void check_continuation(struct golden *g, const json_t *greedy)
{
    int32_t ids[LENGTH_MAX];
    int32_t drawn[LENGTH_MAX];
    float logprob[LENGTH_MAX];
    const json_t *const tokens = json_object_get(greedy, "tokens");
    const json_t *const logprobs = json_object_get(greedy, "logprobs");
    const int n_prompt = read_ids(ids, json_object_get(greedy, "prompt"));
    struct piece piece = {.lang = read_lang(greedy),
                          .ids = ids,
                          .n_ids = n_prompt,
                          .n = n_prompt,
                          .drawn = drawn,
                          .drawn_logprob = logprob};
    assert_int_equal(json_array_size(tokens), N_GREEDY);
    for (size_t i = 0; i < N_GREEDY; i++) {
        runner_step(&g->run, &piece, 1);
        const int last = piece.n_ids - 1;
        if (drawn[last] != json_integer_value(json_array_get(tokens, i))) {
            fail_msg("%s on %s: greedy token %zu: expected %lld, got %d", g->name, g->run.be->name,
                     i, (long long)json_integer_value(json_array_get(tokens, i)), drawn[last]);
        }
        assert_close(g, "log-probability of greedy token", (int64_t)i, (double)logprob[last],
                     json_real_value(json_array_get(logprobs, i)), LOGPROB_TOLERANCE);
        ids[piece.n_ids] = drawn[last];
        piece.first = piece.n_ids;
        piece.n = 1;
        piece.n_ids++;
    }
}

static void check_greedy(struct golden *g)
{
    const json_t *const greedy = json_object_get(g->json, "greedy");
    assert_int_equal(json_array_size(greedy), 2);
    check_continuation(g, json_array_get(greedy, 0));
    check_continuation(g, json_array_get(greedy, 1));
}

/* ---- bits ----------------------------------------------------------------------------------- */

/* What one way of running a sequence computed. */
struct outcome {
    float logprob[LENGTH_MAX];
    float *logits; /* Owner. [n, n_vocab] */
};

static struct piece outcome_piece(struct outcome *o, const struct piece *sequence, int slot)
{
    struct piece piece = *sequence;
    piece.slot = slot;
    piece.logprob = o->logprob;
    piece.logits = o->logits;
    return piece;
}

static void assert_same_bits(const struct golden *g, const struct outcome *got,
                             const struct outcome *wanted, int n, const char *way)
{
    const int64_t n_vocab = g->run.info->n_vocab;
    for (int t = 0; t < n; t++) {
        const size_t row_bytes = (size_t)n_vocab * sizeof(float);
        if (memcmp(got->logits + t * n_vocab, wanted->logits + t * n_vocab, row_bytes) != 0 ||
            (t + 1 < n && memcmp(&got->logprob[t], &wanted->logprob[t], sizeof(float)) != 0)) {
            fail_msg("%s on %s: position %d of %d has other bits %s than alone and whole", g->name,
                     g->run.be->name, t, n, way);
        }
    }
}

/* Sequences 0 .. 2 share steps, each fed in chunks of its own size. */
static void run_crowd(struct golden *g, struct outcome *outcomes, const struct piece *sequence,
                      const int chunk[3])
{
    int fed[3] = {0, 0, 0};
    for (bool more = true; more;) {
        struct piece step[3];
        int n_piece = 0;
        more = false;
        for (int s = 0; s < 3; s++) {
            const int left = sequence[s].n_ids - fed[s];
            if (left > 0) {
                struct piece *const piece = &step[n_piece++];
                *piece = outcome_piece(&outcomes[s], &sequence[s], s);
                piece->first = fed[s];
                piece->n = left < chunk[s] ? left : chunk[s];
                fed[s] += piece->n;
                more = true;
            }
        }
        if (more) {
            runner_step(&g->run, step, n_piece);
        }
    }
}

/* Of tokens that came in a request, and, where these are computed apart, of drawn ones. */
static void check_bits(struct golden *g)
{
    static int32_t ids[3][LENGTH_MAX];
    struct piece sequence[3];
    struct outcome whole[3];
    struct outcome other[3];
    const size_t n_vocab = (size_t)g->run.info->n_vocab;
    g->run.is_given = true;
    for (int s = 0; s < 3; s++) {
        const json_t *const json = json_array_get(json_object_get(g->json, "sequences"), (size_t)s);
        const int n = read_ids(ids[s], json_object_get(json, "ids"));
        sequence[s] = (struct piece){.lang = read_lang(json), .ids = ids[s], .n_ids = n, .n = n};
        whole[s].logits = calloc((size_t)n * n_vocab, sizeof(float));
        other[s].logits = calloc((size_t)n * n_vocab, sizeof(float));
        assert_true(whole[s].logits != NULL && other[s].logits != NULL);
        const struct piece piece = outcome_piece(&whole[s], &sequence[s], 3);
        runner_step(&g->run, &piece, 1);
    }
    static const int chunks[] = {1, 7, 16, 33};
    for (size_t c = 0; c < sizeof chunks / sizeof *chunks; c++) {
        char way[32];
        (void)snprintf(way, sizeof way, "in chunks of %d", chunks[c]);
        runner_chunks(&g->run, outcome_piece(&other[2], &sequence[2], 1), chunks[c]);
        assert_same_bits(g, &other[2], &whole[2], sequence[2].n_ids, way);
    }
    struct piece untapped = sequence[2]; /* as a server runs it: see runner_step */
    untapped.logprob = other[2].logprob;
    memset(other[2].logprob, 0, sizeof other[2].logprob);
    runner_step(&g->run, &untapped, 1);
    assert_same_bits(g, &other[2], &whole[2], sequence[2].n_ids, "without a tap");
    run_crowd(g, other, sequence, (const int[3]){1, 5, 17});
    for (int s = 0; s < 3; s++) {
        assert_same_bits(g, &other[s], &whole[s], sequence[s].n_ids, "in a crowd");
    }
    g->run.is_given = false;
    if (g->run.be->phases_apart) {
        runner_chunks(&g->run, outcome_piece(&whole[2], &sequence[2], 1), 1);
        run_crowd(g, other, sequence, (const int[3]){1, 1, 1});
        assert_same_bits(g, &other[2], &whole[2], sequence[2].n_ids, "drawn in a crowd");
    }
    for (int s = 0; s < 3; s++) {
        free(whole[s].logits);
        free(other[s].logits);
    }
}

/* ---- the programme -------------------------------------------------------------------------- */

/* On the CUDA backend, long sequences are run for one case of each kind, and bits for one: on a
 * test double all of them take two minutes. TEST_ALL=1 runs them all,
 * TEST_FEW=1 as few on every backend: for sanitizers, who look at accesses, not numbers. */
static bool is_left_out(const struct runner_trial *trial)
{
    const char *const check = trial->check->name;
    const bool is_two = strcmp(trial->case_name, "share-values") == 0; /* memories, of six layers */
    const bool is_flat = strcmp(trial->case_name, "flat") == 0;
    const bool is_short = strcmp(check, "short") == 0 || strcmp(check, "greedy") == 0;
    const bool is_chosen = strcmp(check, "sequences") == 0 ? is_two || is_flat : is_two;
    const bool is_slow = strcmp(trial->backend, "cuda") == 0 || getenv("TEST_FEW") != NULL;
    const bool is_few = getenv("TEST_FEW") != NULL && !is_two && !is_flat;
    if (runner_is_left_out(trial->backend)) {
        return true;
    }
    return (is_few || (is_slow && !is_short && !is_chosen)) && getenv("TEST_ALL") == NULL;
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
    const struct runner_trials all = {.group = "golden",
                                      .cases = cases,
                                      .checks = checks,
                                      .n_case = N_CASE,
                                      .n_check = sizeof checks / sizeof *checks,
                                      .is_left_out = is_left_out,
                                      .run = run_trial};
    return runner_trials(&all, argc, argv);
}
