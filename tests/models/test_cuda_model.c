/* A small model on the CUDA backend, for what single ops do not show: running out of memory at any
 * allocation while it opens, launches that fail in any place of a step, and decode steps that are
 * replayed as graphs. On the test double (tests/cuda_host/README.md lists its environment); the
 * tests that inject failures are skipped on a GPU. */
#include "tests/models/cuda_rig.h"

/* ---- memory --------------------------------------------------------------------------------- */

/* Memory of the device that nobody holds. */
static size_t memory_left(void)
{
    const struct backend_options options = {"cuda", 0, false, NULL};
    struct backend *be = NULL;
    (void)fine_device(NULL);
    assert_int_equal(backend_open(&be, &options, NULL), ERR_OK);
    const size_t bytes = be->memory_bytes;
    backend_close(be);
    return bytes;
}

/* ---- graphs --------------------------------------------------------------------------------- */

/* The first step of each size runs eagerly, the others are replayed: with the bits of eager steps,
 * whatever changes between the steps. */
static void check_replayed_steps(const char *cache_dtype)
{
    struct rig r;
    struct err err = {0};
    struct answer eager[N_STEP];
    struct answer replayed[N_STEP];
    assert_int_equal(setenv("PKMSERVE_CUDA_GRAPHS", "0", 1), 0);
    if (rig_open_types(&r, model_dir, "f32", cache_dtype, &err) != ERR_OK) {
        fail_msg("%s", err.message);
    }
    assert_int_equal(r.be->capture_max, 0);
    decode_all(&r, eager);
    assert_int_equal(r.be->n_prepared, 0);
    rig_close(&r);
    assert_int_equal(unsetenv("PKMSERVE_CUDA_GRAPHS"), 0);
    assert_int_equal(rig_open_types(&r, model_dir, "f32", cache_dtype, &err), ERR_OK);
    assert_true(r.be->capture_max >= N_SEQ);
    decode_all(&r, replayed);
    assert_int_equal(r.be->n_prepared, N_STEP - N_SEQ);
    rig_close(&r);
    for (int i = 0; i < N_STEP; i++) {
        if (memcmp(&eager[i], &replayed[i], sizeof eager[i]) != 0) {
            fail_msg(
                "cache %s, step %d: replayed, it has other bits than run eagerly: token %d and "
                "%d, log-probability %.9g and %.9g",
                cache_dtype, i, eager[i].token[0], replayed[i].token[0],
                (double)eager[i].logprob[0], (double)replayed[i].logprob[0]);
        }
    }
}

static void test_replayed_steps_have_the_bits_of_eager_ones(void **state)
{
    (void)state;
    if (!cuda_library_find()) {
        skip();
    }
    check_replayed_steps("f32");
    check_replayed_steps("bf16");
}

static void decode_new(const char *cache_dtype, const char *overlap, const char *graphs,
                       struct answer *answers)
{
    struct rig r;
    struct err err = {0};
    assert_int_equal(setenv("PKMSERVE_CUDA_OVERLAP", overlap, 1), 0);
    assert_int_equal(setenv("PKMSERVE_CUDA_GRAPHS", graphs, 1), 0);
    if (rig_open_types(&r, model_dir, "f32", cache_dtype, &err) != ERR_OK) {
        fail_msg("%s", err.message);
    }
    decode_all(&r, answers);
    assert_int_equal(r.be->n_prepared, graphs[0] == '0' ? 0 : N_STEP - N_SEQ);
    rig_close(&r);
}

/* A kernel that begins before the one before it has ended reads nothing that this one writes. */
static void test_overlapping_kernels_give_the_same_bits(void **state)
{
    static const char *const caches[] = {"f32", "bf16"};
    static const char *const graphs[] = {"0", "1"};
    struct answer apart[N_STEP];
    struct answer overlapping[N_STEP];
    (void)state;
    if (!cuda_library_find()) {
        skip();
    }
    for (int i = 0; i < 4; i++) {
        decode_new(caches[i / 2], "0", "0", apart);
        decode_new(caches[i / 2], "1", graphs[i % 2], overlapping);
        for (int s = 0; s < N_STEP; s++) {
            if (memcmp(&apart[s], &overlapping[s], sizeof apart[s]) != 0) {
                fail_msg("cache %s, graphs %s, step %d: overlapping kernels give other bits: token "
                         "%d and %d, log-probability %.9g and %.9g",
                         caches[i / 2], graphs[i % 2], s, apart[s].token[0],
                         overlapping[s].token[0], (double)apart[s].logprob[0],
                         (double)overlapping[s].logprob[0]);
            }
        }
    }
}

/* Opens the model, takes its decode steps and gives how many kernels the shortest graph has, that
 * of the fewest rows; 0: there were none, or nothing counts them. */
static int decode_fused(const char *fuse, const char *dtype, const char *graphs,
                        const char *overlap, struct answer *answers)
{
    struct rig r;
    struct err err = {0};
    char path[] = "/tmp/test_cuda_model.XXXXXX";
    char line[600];
    int n_kernel = 0;
    const int file = mkstemp(path);
    assert_true(file >= 0);
    FILE *const lines = fdopen(file, "r");
    (void)setenv("CUDA_HOST_TRACE", path, 1);
    (void)setenv("PKMSERVE_CUDA_LT", "1", 1); /* products norm rows by row-major weights alone */
    (void)setenv("CUDA_HOST_LT", "g", 1);
    (void)setenv("PKMSERVE_CUDA_FUSE", fuse, 1);
    (void)setenv("PKMSERVE_CUDA_GRAPHS", graphs, 1);
    (void)setenv("PKMSERVE_CUDA_OVERLAP", overlap, 1);
    if (rig_open_types(&r, model_dir, dtype, "bf16", &err) != ERR_OK) {
        fail_msg("%s", err.message);
    }
    decode_all(&r, answers);
    rig_close(&r);
    while (fgets(line, sizeof line, lines) != NULL) {
        const int n = strncmp(line, "graph\t", 6) == 0 ? atoi(line + 6) : 0;
        n_kernel = n > 0 && (n_kernel == 0 || n < n_kernel) ? n : n_kernel;
    }
    (void)fclose(lines);
    (void)unlink(path);
    (void)setenv("PKMSERVE_CUDA_LT", "0", 1);
    (void)unsetenv("CUDA_HOST_LT");
    (void)fine_device(NULL);
    return n_kernel;
}

/* Products by F32 weights and by row-major ones of 16 bits norm one or two drawn tokens themselves,
 * the memory's query too, and the first embeds them: of a step's kernels two for each layer are
 * gone, and two, but with 16 bits for the norm before a vocabulary of 50, whose rows cuBLASLt does
 * not take. Not a bit has changed. */
static void test_norms_cost_no_kernels_and_no_bits(void **state)
{
    static const char *const dtypes[] = {"f32", "bf16", "f16"};
    struct answer apart[N_STEP];
    struct answer fused[N_STEP];
    (void)state;
    if (!cuda_library_find()) {
        skip();
    }
    const bool counts = strstr(getenv("PKMSERVE_CUDA_LIBRARY"), "cudahost") != NULL;
    for (int i = 0; i < 3; i++) {
        if (getenv("TEST_FEW") != NULL && i != 1) {
            continue;
        }
        const int n_apart = decode_fused("0", dtypes[i], "1", "0", apart);
        const int n_fused = decode_fused("1", dtypes[i], "1", "0", fused);
        assert_memory_equal(fused, apart, sizeof fused);
        const int n_gone = strcmp(dtypes[i], "f32") == 0 ? 2 * TINY_LAYER + 2 : 2 * TINY_LAYER + 1;
        assert_int_equal(n_apart - n_fused, counts ? n_gone : 0);
        (void)decode_fused("1", dtypes[i], "0", "0", fused);
        assert_memory_equal(fused, apart, sizeof fused);
        (void)decode_fused("1", dtypes[i], "1", "1", fused);
        assert_memory_equal(fused, apart, sizeof fused);
    }
}

/* Opens the model, takes its decode steps and gives its weights' bytes. */
static size_t decode_split(const char *split, const char *dtype, bool is_eager,
                           struct answer *answers)
{
    struct rig r;
    struct err err = {0};
    assert_int_equal(setenv("PKMSERVE_CUDA_SPLIT", split, 1), 0);
    assert_int_equal(setenv("PKMSERVE_CUDA_OVERLAP", is_eager ? "0" : "1", 1), 0);
    assert_int_equal(setenv("PKMSERVE_CUDA_GRAPHS", is_eager ? "0" : "1", 1), 0);
    if (rig_open_types(&r, model_dir, dtype, "f32", &err) != ERR_OK) {
        fail_msg("%s", err.message);
    }
    decode_all(&r, answers);
    const size_t bytes = model_info(r.model)->weight_bytes;
    rig_close(&r);
    return bytes;
}

/* Keys are split where the weights are not F32, and if that is asked for; replayed and overlapping
 * steps then have the bits of eager ones, and with F32 weights nothing changes. */
static void test_split_keys_are_searched_alike_in_graphs(void **state)
{
    struct answer whole[N_STEP];
    struct answer split[N_STEP];
    struct answer replayed[N_STEP];
    (void)state;
    if (!cuda_library_find()) {
        skip();
    }
    const size_t bytes = decode_split("0", "f32", true, whole);
    assert_true(decode_split("1", "f32", true, split) == bytes);
    assert_memory_equal(split, whole, sizeof whole);
    const size_t bf16_bytes = decode_split("0", "bf16", true, whole);
    assert_true(decode_split("1", "bf16", true, split) > bf16_bytes);
    assert_true(decode_split("1", "bf16", false, replayed) > bf16_bytes);
    assert_memory_equal(replayed, split, sizeof split);
}

static void test_overlap_that_the_device_has_not_is_said(void **state)
{
    static const struct {
        const char *device, *code;
        bool overlaps;
    } machines[] = {{"80", "80", false},  {"89", "86", false}, {"90", "80", false},
                    {"120", "89", false}, {"90", "90", true},  {"100", "90", true},
                    {"120", "120", true}};
    const struct backend_options options = {"cuda", 0, false, NULL};
    struct backend *be = NULL;
    (void)state;
    need_double();
    for (size_t i = 0; i < sizeof machines / sizeof *machines; i++) {
        assert_int_equal(setenv("CUDA_HOST_SM", machines[i].device, 1), 0);
        assert_int_equal(setenv("CUDA_HOST_CODE", machines[i].code, 1), 0);
        assert_int_equal(setenv("PKMSERVE_CUDA_OVERLAP", "1", 1), 0);
        assert_int_equal(backend_open(&be, &options, NULL), ERR_OK);
        assert_int_equal(strstr(be->note, "kernels do not overlap") == NULL, machines[i].overlaps);
        assert_int_equal(be->note[0] == '\0', machines[i].overlaps);
        backend_close(be);
        assert_int_equal(setenv("PKMSERVE_CUDA_OVERLAP", "0", 1), 0);
        assert_int_equal(backend_open(&be, &options, NULL), ERR_OK);
        assert_string_equal(be->note, "");
        backend_close(be);
    }
}

/* Without a number for its list of ops, nobody has said that a step equals an earlier one. */
static void test_steps_of_unknown_ops_stay_eager(void **state)
{
    (void)state;
    struct rig r;
    struct err err = {0};
    struct answer answers[N_STEP];
    if (!cuda_library_find()) {
        skip();
    }
    assert_int_equal(rig_open(&r, model_dir, &err), ERR_OK);
    r.ops_list = 0;
    decode_all(&r, answers);
    assert_int_equal(r.be->n_prepared, 0);
    for (int list = 1; list <= 2; list++) { /* of two numbers, each has graphs of its own */
        r.ops_list = list;
        decode_all(&r, answers);
        assert_int_equal(r.be->n_prepared, list * (N_STEP - N_SEQ));
    }
    rig_close(&r);
}

/* A model calls other ops for steps with knock-outs: these are not replayed as those without. */
static void test_steps_with_knock_outs_have_graphs_of_their_own(void **state)
{
    enum { N = 8 };
    struct answer answers[2][N];
    (void)state;
    if (!cuda_library_find()) {
        skip();
    }
    for (int graphs = 0; graphs < 2; graphs++) {
        struct rig r;
        struct err err = {0};
        int pos[N_SEQ] = {0};
        assert_int_equal(setenv("PKMSERVE_CUDA_GRAPHS", graphs == 0 ? "0" : "1", 1), 0);
        assert_int_equal(rig_open(&r, model_dir, &err), ERR_OK);
        for (int i = 0; i < N; i++) {
            r.ablates = i % 2 != 0;
            assert_int_equal(decode(&r, i, 2, pos, &answers[graphs][i], &err), ERR_OK);
        }
        assert_int_equal(r.be->n_prepared, graphs == 0 ? 0 : N - 2);
        rig_close(&r);
    }
    assert_memory_equal(answers[0], answers[1], sizeof answers[0]);
}

struct seen {
    struct backend *be;
    float x[TINY_D];
};

static void see_hidden(void *ctx, const char *name, int layer, const struct tensor *t)
{
    struct seen *const seen = ctx;
    if (strcmp(name, "hidden") == 0 && layer == 0) {
        seen->be->op->download(seen->be, seen->x, tensor_rows(*t, 0, 1));
    }
}

/* Who reads results between the ops of a step that is recorded gets them, and steps like it stay
 * eager, without a warning: it is no fault of the device. */
static void test_a_recording_that_is_looked_into_ends(void **state)
{
    (void)state;
    struct rig r;
    struct err err = {0};
    struct answer fine[4];
    struct answer seen_too[4];
    float x[4][TINY_D];
    if (!cuda_library_find()) {
        skip();
    }
    for (int list = 0; list < 2; list++) {
        int pos[N_SEQ] = {0};
        assert_int_equal(rig_open(&r, model_dir, &err), ERR_OK);
        struct seen seen = {.be = r.be};
        const struct model_tap tap = {see_hidden, &seen};
        r.tap = &tap;
        r.ops_list = list;
        for (int i = 0; i < 4; i++) {
            struct answer *const answer = list == 0 ? &fine[i] : &seen_too[i];
            assert_int_equal(decode(&r, i, 1, pos, answer, &err), ERR_OK);
            if (list == 0) {
                memcpy(x[i], seen.x, sizeof seen.x);
            }
            assert_memory_equal(x[i], seen.x, sizeof seen.x);
        }
        assert_int_equal(r.be->n_prepared, 0);
        assert_string_equal(r.be->warning, "");
        rig_close(&r);
    }
    assert_memory_equal(fine, seen_too, sizeof fine);
}

/* A graph names memory by its address: nothing is replayed once anything was freed. */
static void test_freeing_drops_the_graphs(void **state)
{
    (void)state;
    struct rig r;
    struct err err = {0};
    struct answer answer;
    int pos[N_SEQ] = {0};
    if (!cuda_library_find()) {
        skip();
    }
    assert_int_equal(rig_open(&r, model_dir, &err), ERR_OK);
    for (int i = 0; i < 3; i++) {
        assert_int_equal(decode(&r, i, 1, pos, &answer, &err), ERR_OK);
    }
    assert_int_equal(r.be->n_prepared, 2);
    void *data = NULL;
    assert_int_equal(r.be->op->buffer_new(r.be, &data, 64, "passing", &err), ERR_OK);
    r.be->op->buffer_free(r.be, data);
    assert_int_equal(decode(&r, 3, 1, pos, &answer, &err), ERR_OK);
    assert_int_equal(r.be->n_prepared, 2);
    assert_int_equal(decode(&r, 4, 1, pos, &answer, &err), ERR_OK);
    assert_int_equal(r.be->n_prepared, 3);
    rig_close(&r);
}

/* Of the calls that make a graph each may fail: steps of that size stay eager and right, others are
 * replayed, and an operator can see why they are slow. */
static void test_a_step_that_cannot_be_captured_is_said(void **state)
{
    (void)state;
    struct rig r;
    struct err err = {0};
    struct answer fine[N_STEP];
    need_double();
    assert_int_equal(rig_open(&r, model_dir, &err), ERR_OK);
    decode_all(&r, fine);
    rig_close(&r);
    for (int n = 1; n <= 3; n++) { /* begin, end, instantiate */
        struct answer answers[N_STEP];
        set_count("CUDA_HOST_FAIL_CAPTURE", n);
        assert_int_equal(rig_open(&r, model_dir, &err), ERR_OK);
        decode_all(&r, answers);
        char warning[sizeof r.be->warning];
        memcpy(warning, r.be->warning, sizeof warning);
        assert_int_equal(r.be->n_prepared, N_STEP - N_SEQ - (N_STEP / N_SEQ - 1));
        rig_close(&r);
        assert_memory_equal(answers, fine, sizeof fine);
        const char *const words = "cannot become a graph: operation failed due to a previous error";
        if (strstr(warning, words) == NULL) {
            fail_msg("call %d: expected the warning \"%s\", got \"%s\"", n, words, warning);
        }
    }
}

/* ---- twins ---------------------------------------------------------------------------------- */

/* N_STEP steps of 2 or 3 rows each, whose tokens are those that the step before has drawn, in
 * another order: given, or, where they run ahead, named, while that step is not finished. A step of
 * the request's rows is among them. */
static void decode_fed(struct rig *r, bool runs_ahead, struct answer *answers)
{
    struct step *const twins[2] = {r->step, runs_ahead ? r->twin : r->step};
    int pos[N_SEQ] = {0};
    struct err err = {0};
    int n_before = 0;
    for (int i = 0; i <= N_STEP; i++) {
        struct step *const s = twins[i % 2];
        const int n_seq = i < 5 ? 3 : 2;
        if (!runs_ahead && i > 0) {
            assert_int_equal(finish(r, s, &answers[i - 1], &err), ERR_OK);
        }
        if (i < N_STEP) {
            fill(r, s, i, n_seq, pos);
            s->is_drawn = i != 7;
            s->n_before = runs_ahead ? n_before : 0;
            s->n_top = N_TOP;
            for (int q = 0; q < n_seq; q++) {
                const int from = n_before - 1 - q;
                s->out_want[q] = OUT_SAMPLE | OUT_LOGPROB | OUT_TOP | OUT_ENTROPY;
                if (i > 0) {
                    s->token[q] = runs_ahead ? step_token_drawn(from) : answers[i - 1].token[from];
                }
            }
            begin(r, s);
            n_before = n_seq;
        }
        if (runs_ahead && i > 0) {
            assert_int_equal(finish(r, twins[(i - 1) % 2], &answers[i - 1], &err), ERR_OK);
        }
    }
}

/* A step may begin before its twin is finished and feed on what that draws: the bits are those of
 * steps that wait, eager or replayed, and each keeps its own results. */
static void test_twins_feed_on_one_another(void **state)
{
    (void)state;
    if (!cuda_library_find()) {
        skip();
    }
    for (int is_eager = 0; is_eager < 2; is_eager++) {
        struct answer waiting[N_STEP];
        struct answer ahead[N_STEP];
        assert_int_equal(setenv("PKMSERVE_CUDA_GRAPHS", is_eager ? "0" : "1", 1), 0);
        for (int runs_ahead = 0; runs_ahead < 2; runs_ahead++) {
            struct rig r;
            struct err err = {0};
            assert_int_equal(rig_open_types(&r, model_dir, "f32", "bf16", &err), ERR_OK);
            assert_true(r.be->runs_ahead);
            decode_fed(&r, runs_ahead == 1, runs_ahead ? ahead : waiting);
            assert_int_equal(r.be->n_prepared, is_eager ? 0 : N_STEP - 3);
            rig_close(&r);
        }
        for (int i = 0; i < N_STEP; i++) {
            if (memcmp(&waiting[i], &ahead[i], sizeof ahead[i]) != 0) {
                fail_msg("step %d, graphs %d: token %d and %d, log-probability %.9g and %.9g", i,
                         !is_eager, waiting[i].token[0], ahead[i].token[0],
                         (double)waiting[i].logprob[0], (double)ahead[i].logprob[0]);
            }
        }
    }
    assert_int_equal(unsetenv("PKMSERVE_CUDA_GRAPHS"), 0);
}

/* Nothing runs ahead while ops are timed, nor where the variable says so. */
static void test_running_ahead_can_be_left_out(void **state)
{
    static const char *const name[] = {"PKMSERVE_CUDA_AHEAD", "PKMSERVE_CUDA_TRACE"};
    static const char *const value[] = {"0", "/dev/null"};
    (void)state;
    if (!cuda_library_find()) {
        skip();
    }
    for (int i = 0; i < 2; i++) {
        struct rig r;
        struct err err = {0};
        assert_int_equal(setenv(name[i], value[i], 1), 0);
        assert_int_equal(rig_open(&r, model_dir, &err), ERR_OK);
        assert_int_equal(unsetenv(name[i]), 0);
        assert_false(r.be->runs_ahead);
        rig_close(&r);
    }
}

/* ---- failures ------------------------------------------------------------------------------- */

/* Opens with the n-th allocation failing, for every n there is: each says what did not fit, and
 * gives back all that was taken. */
static void expect_clean_failures(const char *variable, enum err_code wanted)
{
    const size_t before = memory_left();
    for (int n = 1; n < 1000; n++) {
        struct rig r;
        struct err err = {0};
        set_count(variable, n);
        const enum err_code code = rig_open(&r, model_dir, &err);
        if (code == ERR_OK) {
            rig_close(&r);
            assert_int_equal(memory_left(), before);
            assert_in_range(n, 2, 999);
            return;
        }
        if (code != wanted || err.message[0] == '\0' || strchr(err.message, '\n') != NULL) {
            fail_msg("allocation %d: expected one line and code %s, got %s: \"%s\"", n,
                     err_code_name(wanted), err_code_name(code), err.message);
        }
    }
    fail_msg("%s: a thousand allocations do not open a small model", variable);
}

static void test_any_allocation_of_the_device_may_fail(void **state)
{
    (void)state;
    need_double();
    expect_clean_failures("CUDA_HOST_FAIL_MALLOC", ERR_MEMORY);
}

static void test_any_allocation_of_pinned_memory_may_fail(void **state)
{
    (void)state;
    need_double();
    expect_clean_failures("CUDA_HOST_FAIL_HOST_ALLOC", ERR_MEMORY);
}

/* A launch that fails, eager, while a graph is captured, or the graph's own: the step is right or
 * says which op failed, and once one has failed all later ones do. */
static void test_any_launch_may_fail(void **state)
{
    (void)state;
    need_double();
    const size_t before = memory_left();
    int n_failed = 0;
    const int stride = getenv("TEST_FEW") != NULL ? 3 : 1;
    for (int n = 1; n < 100;
         n += stride) { /* every other launch of a recorded step is a recording's */
        struct rig r;
        struct err err = {0};
        struct answer answer;
        int pos[N_SEQ] = {0};
        enum err_code code = ERR_OK;
        set_count("CUDA_HOST_FAIL_LAUNCH", n);
        assert_int_equal(rig_open(&r, model_dir, &err), ERR_OK);
        for (int i = 0; i < 4 && code == ERR_OK; i++) {
            code = decode(&r, 0, 2, pos, &answer, &err);
        }
        if (code != ERR_OK) {
            struct err later = {0};
            n_failed++;
            assert_int_equal(code, ERR_DEVICE);
            assert_memory_equal(err.message, "cuda: ", 6);
            assert_non_null(strstr(err.message, " failed: too many resources"));
            assert_int_equal(decode(&r, 0, 2, pos, &answer, &later), ERR_DEVICE);
            assert_string_equal(later.message, err.message);
        }
        rig_close(&r);
    }
    assert_true(n_failed > 20 / stride);
    assert_int_equal(memory_left(), before);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(test_replayed_steps_have_the_bits_of_eager_ones, fine_device),
        cmocka_unit_test_setup(test_overlapping_kernels_give_the_same_bits, fine_device),
        cmocka_unit_test_setup(test_norms_cost_no_kernels_and_no_bits, fine_device),
        cmocka_unit_test_setup(test_split_keys_are_searched_alike_in_graphs, fine_device),
        cmocka_unit_test_setup(test_overlap_that_the_device_has_not_is_said, fine_device),
        cmocka_unit_test_setup(test_steps_of_unknown_ops_stay_eager, fine_device),
        cmocka_unit_test_setup(test_steps_with_knock_outs_have_graphs_of_their_own, fine_device),
        cmocka_unit_test_setup(test_a_recording_that_is_looked_into_ends, fine_device),
        cmocka_unit_test_setup(test_freeing_drops_the_graphs, fine_device),
        cmocka_unit_test_setup(test_a_step_that_cannot_be_captured_is_said, fine_device),
        cmocka_unit_test_setup(test_twins_feed_on_one_another, fine_device),
        cmocka_unit_test_setup(test_running_ahead_can_be_left_out, fine_device),
        cmocka_unit_test_setup(test_any_allocation_of_the_device_may_fail, fine_device),
        cmocka_unit_test_setup(test_any_allocation_of_pinned_memory_may_fail, fine_device),
        cmocka_unit_test_setup(test_any_launch_may_fail, fine_device),
    };
    return cmocka_run_group_tests(tests, group_open, group_close);
}
