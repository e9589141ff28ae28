/* Outputs of rows of logits on the CUDA backend, where test_kernels does not look: how many
 * launches they take, and that a row's bits depend neither on how many blocks share it nor on how
 * many rows there are. On the test double, but for what any device shows. */
#include "kernels/backend.h"
#include "tests/cuda_library.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

enum { N_TOP = 3, N_ROW_MAX = 260 };

static int fine_device(void **state)
{
    (void)state;
    (void)unsetenv("CUDA_HOST_SMS");
    (void)unsetenv("CUDA_HOST_TRACE");
    (void)unsetenv("NVTX_INJECTION64_PATH");
    return 0;
}

static void need_double(void)
{
    if (!cuda_library_find() || strstr(getenv("PKMSERVE_CUDA_LIBRARY"), "cudahost") == NULL) {
        skip();
    }
}

/* What a row asks for, and how it draws. */
struct wish {
    uint8_t want;
    bool is_given; /* the target: else the drawn token */
    struct sample_params sample;
};

/* Of each kind one; those that draw by lists have an adjustment each. */
static const struct wish wishes[] = {
    {OUT_SAMPLE, false, {.top_p = 1, .repetition = 1}},
    {OUT_LOGPROB, true, {.top_p = 1, .repetition = 1}},
    {OUT_SAMPLE | OUT_LOGPROB, false, {.u = 0.7, .temperature = 1, .top_p = 1, .repetition = 1}},
    {OUT_SAMPLE | OUT_LOGPROB | OUT_ENTROPY | OUT_TOP,
     false,
     {.u = 0.95, .temperature = 2, .top_p = 0.9f, .repetition = 1.5f, .n_adjust = 2}},
    {OUT_SAMPLE | OUT_LOGPROB,
     true,
     {.u = 0.2, .temperature = 0.5f, .top_k = 40, .top_p = 1, .repetition = 1, .n_adjust = 1}},
    {OUT_TOP | OUT_ENTROPY, true, {.top_p = 1, .repetition = 1}},
};
enum { N_WISH = sizeof wishes / sizeof *wishes };

struct answer {
    int32_t token, rank, top_id[N_TOP];
    float logprob, entropy, top_logprob[N_TOP];
};

struct rig {
    struct backend *be;
    struct step *step;
    struct tensor logits;
};

static float some_logit(int row, int id)
{
    const uint32_t mixed = ((uint32_t)(row % N_WISH) * 7919u + (uint32_t)id + 1u) * 2654435761u;
    return (float)(mixed >> 8) * 0x1p-22f - 2 + (float)(mixed % 1009 == 0) * 6;
}

static struct rig rig_open(int n_row, int n_vocab)
{
    const struct backend_options options = {"cuda", 0, false, NULL};
    const struct step_limits limits = {.n_tok_max = n_row,
                                       .n_seq_max = 1,
                                       .n_page_max = n_row / KV_PAGE + 1,
                                       .n_out_max = n_row,
                                       .n_top_max = N_TOP,
                                       .n_adjust_max = 2,
                                       .n_vocab = n_vocab};
    struct rig r = {0};
    void *data = NULL;
    const size_t n = (size_t)n_row * (size_t)n_vocab;
    float *const host = malloc(n * sizeof *host);
    assert_non_null(host);
    for (int row = 0; row < n_row; row++) {
        for (int id = 0; id < n_vocab; id++) {
            host[(size_t)row * (size_t)n_vocab + (size_t)id] = some_logit(row, id);
        }
    }
    assert_int_equal(backend_open(&r.be, &options, NULL), ERR_OK);
    assert_int_equal(r.be->op->step_new(r.be, &r.step, &limits, NULL), ERR_OK);
    assert_int_equal(r.be->op->buffer_new(r.be, &data, n * sizeof *host, "logits", NULL), ERR_OK);
    r.logits = tensor_make(data, n_row, n_vocab, DTYPE_F32);
    r.be->op->upload(r.be, r.logits, host);
    free(host);
    return r;
}

static void rig_close(struct rig *r)
{
    r->be->op->buffer_free(r->be, r->logits.data);
    r->be->op->step_free(r->be, r->step);
    backend_close(r->be);
}

/* A step of all rows, row r with wish (first + r) % N_WISH. */
static void answer_all(struct rig *r, int first, struct answer *answers)
{
    struct step *const s = r->step;
    struct err err = {0};
    const int n = (int)r->logits.rows;
    s->n_tok = s->n_out = s->seq_first[1] = n;
    s->n_seq = 1;
    s->n_top = N_TOP;
    s->n_adjust = 2;
    s->adjust[0] = (struct sample_adjust){3, 1, 0, 2.5f};
    s->adjust[1] = (struct sample_adjust){7, 0, 2, -1};
    for (int i = 0; i < n; i++) {
        const struct wish *const wish = &wishes[(first + i) % N_WISH];
        s->pos[i] = s->out_row[i] = i;
        s->out_want[i] = wish->want;
        s->target[i] = wish->is_given ? 11 : TARGET_SAMPLED;
        s->sample[i] = wish->sample;
        s->out_token[i] = s->out_rank[i] = -5;
        s->out_logprob[i] = s->out_entropy[i] = -5;
        for (int j = 0; j < N_TOP; j++) {
            s->top_id[i * N_TOP + j] = -5;
            s->top_logprob[i * N_TOP + j] = -5;
        }
    }
    r->be->op->step_begin(r->be, s);
    op_outputs(r->be, r->logits, s, 0);
    if (r->be->op->finish(r->be, s, &err) != ERR_OK) {
        fail_msg("%s", err.message);
    }
    for (int i = 0; i < n; i++) {
        answers[i].token = s->out_token[i];
        answers[i].rank = s->out_rank[i];
        answers[i].logprob = s->out_logprob[i];
        answers[i].entropy = s->out_entropy[i];
        memcpy(answers[i].top_id, s->top_id + i * N_TOP, sizeof answers[i].top_id);
        memcpy(answers[i].top_logprob, s->top_logprob + i * N_TOP, sizeof answers[i].top_logprob);
    }
}

/* On a large device many blocks share a row, on a small one a block has a row for itself. */
static void test_bits_do_not_depend_on_how_many_blocks_share_a_row(void **state)
{
    static const char *const sizes[] = {"1", "2", "132"};
    static const int n_vocabs[] = {4097, 8300};
    struct answer answers[3][N_WISH];
    (void)state;
    need_double();
    for (size_t v = 0; v < sizeof n_vocabs / sizeof *n_vocabs; v++) {
        for (int i = 0; i < 3; i++) {
            assert_int_equal(setenv("CUDA_HOST_SMS", sizes[i], 1), 0);
            struct rig r = rig_open(N_WISH, n_vocabs[v]);
            answer_all(&r, 0, answers[i]);
            rig_close(&r);
        }
        for (int i = 1; i < 3; i++) {
            for (int w = 0; w < N_WISH; w++) {
                if (memcmp(&answers[0][w], &answers[i][w], sizeof answers[0][w]) != 0) {
                    fail_msg(
                        "vocabulary %d, wish %d: token %d, rank %d, log-probability %.9g on one "
                        "multiprocessor, %d, %d, %.9g on %s",
                        n_vocabs[v], w, answers[0][w].token, answers[0][w].rank,
                        (double)answers[0][w].logprob, answers[i][w].token, answers[i][w].rank,
                        (double)answers[i][w].logprob, sizes[i]);
                }
            }
        }
    }
}

/* Rows are counted by arrivals of their blocks: beyond those of a launch, too, and step after
 * step. */
static void test_more_rows_than_a_launch_has_give_the_bits_of_few(void **state)
{
    static struct answer few[N_WISH];
    static struct answer many[N_ROW_MAX];
    (void)state;
    if (!cuda_library_find()) {
        skip();
    }
    struct rig r = rig_open(N_WISH, 300);
    answer_all(&r, 0, few);
    rig_close(&r);
    r = rig_open(N_ROW_MAX, 300);
    for (int i_step = 0; i_step < 2; i_step++) {
        answer_all(&r, 0, many);
        for (int i = 0; i < N_ROW_MAX; i++) {
            assert_memory_equal(&many[i], &few[i % N_WISH], sizeof many[i]);
        }
    }
    rig_close(&r);
}

static int count_lines(const char *path, const char *words)
{
    FILE *const lines = fopen(path, "r");
    char line[500];
    int n = 0;
    assert_non_null(lines);
    while (fgets(line, sizeof line, lines) != NULL) {
        n += strncmp(line, "launch\t", 7) == 0 && strstr(line, words) != NULL;
    }
    (void)fclose(lines);
    return n;
}

/* Drawing, log-probabilities and whatever else is one launch, and none of a step that wants
 * less. */
static void test_outputs_are_one_launch_whatever_rows_want(void **state)
{
    char path[] = "/tmp/test_cuda_outputs.XXXXXX";
    (void)state;
    need_double();
    assert_true(close(mkstemp(path)) == 0);
    assert_int_equal(setenv("CUDA_HOST_TRACE", path, 1), 0);
    assert_int_equal(setenv("NVTX_INJECTION64_PATH", "a tool", 1), 0);
    struct answer answers[N_WISH];
    struct rig r = rig_open(1, 600);
    for (int w = 0; w < N_WISH; w++) {
        answer_all(&r, w, answers);
        assert_int_equal(count_lines(path, "\toutputs rows=1 cols=600\t"), w + 1);
        assert_int_equal(count_lines(path, "\t"), w + 1);
    }
    rig_close(&r);
    r = rig_open(N_WISH, 600);
    answer_all(&r, 0, answers);
    assert_int_equal(count_lines(path, "\t"), N_WISH + 1);
    rig_close(&r);
    (void)unlink(path);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(test_bits_do_not_depend_on_how_many_blocks_share_a_row, fine_device),
        cmocka_unit_test_setup(test_more_rows_than_a_launch_has_give_the_bits_of_few, fine_device),
        cmocka_unit_test_setup(test_outputs_are_one_launch_whatever_rows_want, fine_device),
    };
    return cmocka_run_group_tests(tests, fine_device, fine_device);
}
