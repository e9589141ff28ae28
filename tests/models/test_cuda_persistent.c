/* Decode steps as one kernel that stays (PKMSERVE_CUDA_PERSISTENT=1): the bits are those of the graph, of
 * any number of rows that it takes, in any order of blocks and threads, whatever changes between steps;
 * and what it cannot do stays a graph. */
#define RIG_SEQ 8
#define TINY_WIDTH 256 /* sums of several chunks, by several warps */
#include "tests/models/cuda_rig.h"

enum { N_SHARED = 4, N_ALL = 3 * N_SEQ };

/* ---- what was launched ---------------------------------------------------------------------- */

static char trace_path[] = "/tmp/test_cuda_persistent.XXXXXX";

static void trace_begin(void)
{
    (void)strcpy(strrchr(trace_path, '.'), ".XXXXXX");
    const int file = mkstemp(trace_path);
    assert_true(file >= 0);
    (void)close(file);
    assert_int_equal(setenv("CUDA_HOST_TRACE", trace_path, 1), 0);
}

struct launched {
    int n_kernel; /* persistent ones */
    int n_graph;
    int n_other; /* kernels, graphs' too */
};

static struct launched trace_end(void)
{
    struct launched n = {0, 0, 0};
    char line[600];
    FILE *const file = fopen(trace_path, "r");
    assert_non_null(file);
    while (fgets(line, sizeof line, file) != NULL) {
        const bool is_it = strstr(line, "\tpersistent_kernel\t") != NULL;
        n.n_kernel += is_it;
        n.n_other += strncmp(line, "launch\t", 7) == 0 && !is_it;
        n.n_graph += strncmp(line, "graph\t", 6) == 0;
    }
    (void)fclose(file);
    (void)unlink(trace_path);
    (void)unsetenv("CUDA_HOST_TRACE");
    return n;
}

/* ---- steps ---------------------------------------------------------------------------------- */

static void rig_must_open(struct rig *r, const char *dtype, const char *cache_dtype)
{
    struct err err = {0};
    if (rig_open_types(r, model_dir, dtype, cache_dtype, &err) != ERR_OK) {
        fail_msg("%s", err.message);
    }
}

/* A prompt of as many positions as the shared pages have, a page a step: rows then see more than one
 * split. */
static void prompt(struct rig *r)
{
    struct step *const s = r->step;
    for (int page = 0; page < N_SHARED; page++) {
        s->n_tok = KV_PAGE;
        s->n_seq = 1;
        s->n_out = s->n_top = s->n_adjust = s->n_allow = s->n_ablate = 0;
        s->seq_first[0] = s->ablate_first[0] = s->ablate_first[1] = 0;
        s->seq_first[1] = KV_PAGE;
        for (int i = 0; i < KV_PAGE; i++) {
            s->pos[i] = page * KV_PAGE + i;
            s->token[i] = s->pos[i] * 11 % N_VOCAB;
            s->lang[i] = 0;
        }
        s->page[page] = page;
        s->is_drawn = false;
        s->ops_list = 0;
        r->be->op->step_begin(r->be, s);
        model_forward(r->model, s, NULL);
        assert_int_equal(r->be->op->finish(r->be, s, NULL), ERR_OK);
    }
    r->n_shared = N_SHARED;
}

/* Three rounds of steps of 1, 2, .. 8 sequences, or of some of these numbers. The first step of each is
 * run op by op. */
struct rounds {
    int n_step, n_size;
    int size[N_SEQ];
};

static void decode_rounds(struct rig *r, const struct rounds *rounds, struct answer *answers)
{
    struct err err = {0};
    int pos[N_SEQ];
    prompt(r);
    for (int i = 0; i < N_SEQ; i++) {
        pos[i] = N_SHARED * KV_PAGE;
    }
    for (int i = 0; i < rounds->n_step; i++) {
        if (decode(r, i, rounds->size[i % rounds->n_size], pos, &answers[i], &err) != ERR_OK) {
            fail_msg("step %d: %s", i, err.message);
        }
    }
}

static void expect_same(const char *what, const struct rounds *rounds, const struct answer *graph,
                        const struct answer *answers)
{
    for (int i = 0; i < rounds->n_step; i++) {
        if (memcmp(&graph[i], &answers[i], sizeof *graph) != 0) {
            fail_msg("%s, step %d of %d rows: other bits than the graph's: token %d and %d, "
                     "log-probability %.9g and %.9g",
                     what, i, rounds->size[i % rounds->n_size], graph[i].token[0],
                     answers[i].token[0], (double)graph[i].logprob[0],
                     (double)answers[i].logprob[0]);
        }
    }
}

/* Without the library, which would try its algorithms each time. */
static int own_products(void **state)
{
    (void)fine_device(state);
    return setenv("PKMSERVE_CUDA_LT", "0", 1);
}

/* ---- tests ---------------------------------------------------------------------------------- */

static void test_bits_are_those_of_the_graph(void **state)
{
    static const char *const orders[] = {"forward", "reverse", "random:5"};
    static const char *const caches[] = {"bf16", "f32", "bf16"};
    static const char *const dtypes[] = {"bf16", "bf16", "f32"};
    static const char *const splits[] = {"1", "0", "1"};
    static const char *const overlaps[] = {"1", "1", "0"};
    static const struct rounds rounds[] = {
        {N_ALL, N_SEQ, {1, 2, 3, 4, 5, 6, 7, 8}}, {6, 3, {1, 3, 8}}, {4, 2, {2, 5}}};
    static const char *const libraries[] = {"1", "0", "0"}; /* weights are row-major, packed */
    static struct answer graph[N_ALL];
    static struct answer kernel[N_ALL];
    struct rig r;
    (void)state;
    need_double();
    for (int i = 0; i < 3; i++) {
        assert_int_equal(setenv("CUDA_HOST_ORDER", orders[i], 1), 0);
        assert_int_equal(setenv("PKMSERVE_CUDA_OVERLAP", overlaps[i], 1), 0);
        assert_int_equal(setenv("PKMSERVE_CUDA_SPLIT", splits[i], 1), 0);
        assert_int_equal(setenv("PKMSERVE_CUDA_LT", libraries[i], 1), 0);
        assert_int_equal(setenv("CUDA_HOST_LT", "g", 1), 0); /* a good algorithm, tried at once */
        assert_int_equal(setenv("PKMSERVE_CUDA_PERSISTENT", "0", 1), 0);
        rig_must_open(&r, dtypes[i], caches[i]);
        assert_int_equal(r.be->n_fast_path > 0, 1);
        decode_rounds(&r, &rounds[i], graph);
        rig_close(&r);
        assert_int_equal(setenv("PKMSERVE_CUDA_PERSISTENT", "1", 1), 0);
        trace_begin();
        rig_must_open(&r, dtypes[i], caches[i]);
        decode_rounds(&r, &rounds[i], kernel);
        assert_int_equal(r.be->n_prepared, rounds[i].n_step - rounds[i].n_size);
        assert_string_equal(r.be->warning, "");
        rig_close(&r);
        const struct launched n = trace_end();
        assert_int_equal(n.n_kernel, rounds[i].n_step - rounds[i].n_size);
        assert_int_equal(n.n_graph, 0);
        expect_same(orders[i], &rounds[i], graph, kernel);
    }
    (void)unsetenv("CUDA_HOST_ORDER");
    (void)unsetenv("CUDA_HOST_LT");
}

static int find_path(const struct backend *be)
{
    for (int i = 0; i < be->n_fast_path; i++) {
        if (strcmp(be->fast_path[i].name, "persistent") == 0) {
            return i;
        }
    }
    return -1;
}

/* What is not asked for stays as it was. */
static void forget_answers(struct step *s)
{
    const size_t bytes = N_SEQ * sizeof(int32_t);
    memset(s->out_token, 0, bytes);
    memset(s->out_rank, 0, bytes);
    memset(s->out_logprob, 0, bytes);
    memset(s->out_entropy, 0, bytes);
    memset(s->top_id, 0, N_TOP * bytes);
    memset(s->top_logprob, 0, N_TOP * bytes);
}

/* It is there if it is asked for, to the same bits, and can be left out while the model is open. */
static void test_it_is_a_fast_path_that_is_asked_for(void **state)
{
    struct rig r;
    struct answer answers[4];
    struct err err = {0};
    (void)state;
    need_double();
    rig_must_open(&r, "bf16", "bf16");
    assert_int_equal(find_path(r.be), -1);
    rig_close(&r);
    assert_int_equal(setenv("PKMSERVE_CUDA_PERSISTENT", "1", 1), 0);
    trace_begin();
    rig_must_open(&r, "bf16", "bf16");
    const int path = find_path(r.be);
    assert_true(path >= 0);
    assert_true(r.be->fast_path[path].is_exact);
    for (int used = 0; used < 2; used++) {
        int pos[N_SEQ] = {0};
        r.be->op->fast_path_use(r.be, path, used == 1);
        forget_answers(r.step);
        for (int i = 0; i < 2; i++) {
            assert_int_equal(decode(&r, i, 2, pos, &answers[2 * used + i], &err), ERR_OK);
        }
    }
    rig_close(&r);
    const struct launched n = trace_end();
    assert_int_equal(n.n_graph, 1);
    assert_int_equal(n.n_kernel, 1);
    assert_memory_equal(&answers[0], &answers[2], 2 * sizeof *answers);
}

/* Knock-outs have an op that it does not know: these steps are graphs, with weights of either type. */
static void test_steps_with_other_ops_are_graphs(void **state)
{
    enum { N = 6 };
    static const char *const dtypes[] = {"bf16", "f32"};
    (void)state;
    need_double();
    for (int d = 0; d < 2; d++) {
        struct answer answers[2][N];
        for (int persists = 0; persists < 2; persists++) {
            struct rig r;
            struct err err = {0};
            int pos[N_SEQ] = {0};
            assert_int_equal(setenv("PKMSERVE_CUDA_PERSISTENT", persists == 1 ? "1" : "0", 1), 0);
            trace_begin();
            rig_must_open(&r, dtypes[d], "f32");
            for (int i = 0; i < N; i++) {
                r.ablates = i % 2 != 0;
                assert_int_equal(decode(&r, i, 2, pos, &answers[persists][i], &err), ERR_OK);
            }
            assert_int_equal(r.be->n_prepared, N - 2);
            rig_close(&r);
            const struct launched n = trace_end();
            const bool is_kernel = persists == 1;
            assert_int_equal(n.n_kernel, is_kernel ? N / 2 - 1 : 0);
            assert_int_equal(n.n_graph, is_kernel ? N / 2 - 1 : N - 2);
        }
        assert_memory_equal(answers[0], answers[1], sizeof answers[0]);
    }
}

/* A device that cannot keep all blocks at once has graphs, and says so. */
static void test_a_device_that_cannot_is_said(void **state)
{
    static const char *const names[] = {"CUDA_HOST_TOGETHER", "CUDA_HOST_SM"};
    static const char *const values[] = {"0", "89"}; /* of which blocks have too little memory */
    (void)state;
    need_double();
    for (int i = 0; i < 2; i++) {
        struct rig r;
        struct answer answer;
        struct err err = {0};
        int pos[N_SEQ] = {0};
        (void)own_products(NULL);
        assert_int_equal(setenv(names[i], values[i], 1), 0);
        assert_int_equal(setenv("PKMSERVE_CUDA_PERSISTENT", "1", 1), 0);
        trace_begin();
        rig_must_open(&r, "bf16", "bf16");
        assert_int_equal(strstr(r.be->note, "no persistent kernel") != NULL, i == 0);
        assert_int_equal(find_path(r.be) < 0, i == 0);
        for (int s = 0; s < 3; s++) {
            assert_int_equal(decode(&r, s, 1, pos, &answer, &err), ERR_OK);
        }
        assert_int_equal(r.be->n_prepared, 2);
        rig_close(&r);
        const struct launched n = trace_end();
        assert_int_equal(n.n_kernel + n.n_graph, 2);
        assert_int_equal(n.n_graph, i == 0 ? 2 : 0);
    }
}

/* Steps until one fails, of two rows, with the n-th launch failing; 0: none does. */
static enum err_code decode_failing(int n, struct err *err)
{
    struct rig r;
    struct answer answer;
    struct err later = {0};
    int pos[N_SEQ] = {0};
    enum err_code code = ERR_OK;
    set_count("CUDA_HOST_FAIL_LAUNCH", n);
    rig_must_open(&r, "bf16", "bf16");
    for (int i = 0; i < 3 && code == ERR_OK; i++) {
        code = decode(&r, i, 2, pos, &answer, err);
    }
    if (code != ERR_OK) {
        assert_int_equal(decode(&r, 0, 2, pos, &answer, &later), ERR_DEVICE);
        assert_string_equal(later.message, err->message);
    }
    rig_close(&r);
    return code;
}

/* Its launch may fail like a graph's: the step says so, and all later ones. One that fails into the
 * recording leaves the step right and its like eager. */
static void test_a_launch_that_fails_is_said(void **state)
{
    struct err err = {0};
    (void)state;
    need_double();
    assert_int_equal(setenv("PKMSERVE_CUDA_PERSISTENT", "1", 1), 0);
    trace_begin();
    assert_int_equal(decode_failing(0, &err), ERR_OK);
    const struct launched n = trace_end();
    assert_int_equal(n.n_kernel, 2);
    const int n_op = n.n_other - 2; /* what is not launched op by op has one more, of its inputs */
    assert_true(n_op > 10);
    trace_begin();
    assert_int_equal(decode_failing(2 * n_op, &err), ERR_OK); /* launched, then recorded */
    const struct launched eager = trace_end();
    assert_int_equal(eager.n_kernel + eager.n_graph, 0);
    assert_int_equal(eager.n_other, 3 * n_op);
    for (int step = 1; step <= 2; step++) {
        err.message[0] = '\0';
        assert_int_equal(decode_failing(2 * n_op + 2 * step, &err), ERR_DEVICE);
        assert_non_null(
            strstr(err.message, "the persistent kernel of a decode step failed: too many"));
    }
}

/* What it keeps on the device is given back, and each of its allocations may fail. */
static void test_its_memory_may_fail_and_is_given_back(void **state)
{
    const struct backend_options options = {"cuda", 0, false, NULL};
    struct backend *be = NULL;
    struct err err = {0};
    (void)state;
    need_double();
    assert_int_equal(backend_open(&be, &options, NULL), ERR_OK);
    const size_t before = be->memory_bytes;
    backend_close(be);
    assert_int_equal(setenv("PKMSERVE_CUDA_PERSISTENT", "1", 1), 0);
    for (int n = 1; n <= 2; n++) {
        set_count("CUDA_HOST_FAIL_MALLOC", n);
        assert_int_equal(backend_open(&be, &options, &err), ERR_MEMORY);
        assert_non_null(strstr(err.message, "the persistent kernel's"));
    }
    (void)unsetenv("CUDA_HOST_FAIL_MALLOC");
    assert_int_equal(backend_open(&be, &options, NULL), ERR_OK);
    backend_close(be);
    (void)fine_device(NULL);
    assert_int_equal(backend_open(&be, &options, NULL), ERR_OK);
    assert_int_equal(be->memory_bytes, before);
    backend_close(be);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(test_bits_are_those_of_the_graph, own_products),
        cmocka_unit_test_setup(test_it_is_a_fast_path_that_is_asked_for, own_products),
        cmocka_unit_test_setup(test_steps_with_other_ops_are_graphs, own_products),
        cmocka_unit_test_setup(test_a_device_that_cannot_is_said, own_products),
        cmocka_unit_test_setup(test_a_launch_that_fails_is_said, own_products),
        cmocka_unit_test_setup(test_its_memory_may_fail_and_is_given_back, own_products),
    };
    return cmocka_run_group_tests(tests, group_open, group_close);
}
