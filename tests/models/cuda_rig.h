/* A small model on the CUDA backend whose decode steps are taken one by one: for the tests of what
 * single ops do not show. Header only, since each test is one program. */
#ifndef TESTS_MODELS_CUDA_RIG_H
#define TESTS_MODELS_CUDA_RIG_H

#include "models/model.h"
#include "tests/cuda_library.h"
#include "tests/engine/tiny_model.h"

#include <setjmp.h>
#include <stdarg.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#ifndef RIG_SEQ
#define RIG_SEQ 3 /* sequences at most */
#endif

enum { N_VOCAB = 50, N_SEQ = RIG_SEQ, N_PAGE = TINY_CONTEXT / KV_PAGE, N_TOP = 2 };

struct rig {
    struct backend *be;
    struct model *model;
    struct step *step, *twin;
    const struct model_tap *tap; /* Borrowed: given to each step; NULL in most tests */
    int ops_list;                /* of each step */
    int n_shared;                /* first pages that all sequences have */
    bool ablates;                /* each step: one head of the memory, of its last sequence */
};

static inline void rig_close(struct rig *r)
{
    if (r->twin != NULL) {
        r->be->op->step_free(r->be, r->twin);
    }
    if (r->step != NULL) {
        r->be->op->step_free(r->be, r->step);
    }
    model_close(r->model);
    backend_close(r->be);
    *r = (struct rig){0};
}

static inline enum err_code rig_open_types(struct rig *r, const char *dir, const char *dtype,
                                           const char *cache_dtype, struct err *err)
{
    const struct backend_options backend = {"cuda", 0, false, NULL};
    const struct model_options options = {
        .dtype = dtype, .cache_dtype = cache_dtype, .value_auto = true};
    const struct step_limits limits = {.n_tok_max = 16,
                                       .n_seq_max = N_SEQ,
                                       .n_page_max = N_PAGE,
                                       .n_out_max = N_SEQ,
                                       .n_top_max = N_TOP,
                                       .n_adjust_max = N_SEQ,
                                       .n_allow_max = 1,
                                       .n_ablate_max = 1,
                                       .n_vocab = N_VOCAB,
                                       .d_model = TINY_D,
                                       .n_head = TINY_HEAD};
    *r = (struct rig){.ops_list = 1};
    enum err_code code = backend_open(&r->be, &backend, err);
    code = code == ERR_OK ? model_open(&r->model, r->be, dir, &options, err) : code;
    code = code == ERR_OK ? model_reserve(r->model, &limits, N_SEQ * N_PAGE, err) : code;
    code = code == ERR_OK ? r->be->op->step_new(r->be, &r->step, &limits, err) : code;
    code = code == ERR_OK ? r->be->op->step_twin(r->be, &r->twin, r->step, err) : code;
    if (code != ERR_OK) {
        rig_close(r);
    }
    return code;
}

static inline enum err_code rig_open(struct rig *r, const char *dir, struct err *err)
{
    return rig_open_types(r, dir, "f32", "f32", err);
}

/* ---- the device ----------------------------------------------------------------------------- */

static char *model_dir; /* of the group */

static inline int group_open(void **state)
{
    (void)state;
    model_dir = tiny_model(N_VOCAB, -1);
    return 0;
}

static inline int group_close(void **state)
{
    (void)state;
    tiny_model_remove(model_dir);
    return 0;
}

static inline int fine_device(void **state)
{
    static const char *const variables[] = {"CUDA_HOST_FAIL_MALLOC",  "CUDA_HOST_FAIL_HOST_ALLOC",
                                            "CUDA_HOST_FAIL_LAUNCH",  "CUDA_HOST_FAIL_SYNC",
                                            "CUDA_HOST_FAIL_CAPTURE", "PKMSERVE_CUDA_GRAPHS",
                                            "PKMSERVE_CUDA_OVERLAP",  "CUDA_HOST_SM",
                                            "CUDA_HOST_CODE",         "PKMSERVE_CUDA_SPLIT",
                                            "CUDA_HOST_TRACE",        "PKMSERVE_CUDA_FUSE",
                                            "PKMSERVE_CUDA_ATTENTION"};
    (void)state;
    for (size_t i = 0; i < sizeof variables / sizeof *variables; i++) {
        (void)unsetenv(variables[i]);
    }
    return 0;
}

static inline void need_double(void)
{
    if (!cuda_library_find() || strstr(getenv("PKMSERVE_CUDA_LIBRARY"), "cudahost") == NULL) {
        skip();
    }
}

static inline void set_count(const char *name, int n)
{
    char text[16];
    (void)snprintf(text, sizeof text, "%d", n);
    assert_int_equal(setenv(name, text, 1), 0);
}

/* ---- steps ---------------------------------------------------------------------------------- */

/* What a step answers, in full. */
struct answer {
    int32_t token[N_SEQ], rank[N_SEQ], top_id[N_SEQ * N_TOP];
    float logprob[N_SEQ], entropy[N_SEQ], top_logprob[N_SEQ * N_TOP];
};

/* One decode step: the next position of sequences 0 .. n_seq-1. What is wanted, and how tokens are
 * drawn, changes from step to step. */
static inline void fill(const struct rig *r, struct step *s, int i_step, int n_seq, int *pos)
{
    enum { BOTH = OUT_SAMPLE | OUT_LOGPROB };
    static const int wants[] = {BOTH, BOTH, OUT_SAMPLE, BOTH, OUT_LOGPROB};
    s->n_tok = s->n_seq = s->n_out = n_seq;
    s->n_top = i_step % 3;
    s->n_adjust = i_step % 2;
    s->n_allow = 0;
    s->adjust[0] = (struct sample_adjust){i_step, 1, 1, -2};
    s->seq_first[0] = 0;
    for (int i = 0; i < n_seq; i++) {
        s->token[i] = (i_step * 7 + i * 3 + 1) % N_VOCAB;
        s->pos[i] = pos[i]++;
        s->lang[i] = 0;
        s->seq_first[i + 1] = i + 1;
        s->out_row[i] = i;
        s->out_want[i] = (uint8_t)(wants[i_step % 5] | (i_step % 4 == 1 ? OUT_ENTROPY : 0) |
                                   (s->n_top > 0 ? OUT_TOP : 0));
        s->target[i] = i_step % 2 == 0 && (s->out_want[i] & OUT_SAMPLE) != 0 ? TARGET_SAMPLED : i;
        s->sample[i] = (struct sample_params){.u = 0.1 * (i_step % 10),
                                              .temperature = i % 2 == 0 ? 0 : 0.9f,
                                              .top_p = 1,
                                              .repetition = 1,
                                              .top_k = i_step % 3 * 5,
                                              .n_adjust = i == 0 ? s->n_adjust : 0};
        for (int p = 0; p < N_PAGE; p++) {
            s->page[i * N_PAGE + p] = p < r->n_shared ? p : p * N_SEQ + i;
        }
    }
    s->is_drawn = true;
    s->ops_list = r->ops_list;
    s->n_ablate = r->ablates;
    memset(s->ablate_first, 0, (size_t)n_seq * sizeof *s->ablate_first);
    s->ablate_first[n_seq] = s->n_ablate;
    s->ablate[0] = (struct step_ablate){.memory = 0, .head = 0, .slot = -1, .scale = 0.25f};
}

static inline void begin(const struct rig *r, struct step *s)
{
    r->be->op->step_begin(r->be, s);
    model_forward(r->model, s, r->tap);
    r->be->op->submit(r->be, s);
}

static inline enum err_code finish(const struct rig *r, struct step *s, struct answer *answer,
                                   struct err *err)
{
    const enum err_code code = r->be->op->finish(r->be, s, err);
    const int n_seq = s->n_seq;
    const size_t n = (size_t)n_seq * 4;
    *answer = (struct answer){0};
    memcpy(answer->token, s->out_token, n);
    memcpy(answer->rank, s->out_rank, n);
    memcpy(answer->logprob, s->out_logprob, n);
    memcpy(answer->entropy, s->out_entropy, n);
    memcpy(answer->top_id, s->top_id, n * N_TOP);
    memcpy(answer->top_logprob, s->top_logprob, n * N_TOP);
    return code;
}

static inline enum err_code decode(struct rig *r, int i_step, int n_seq, int *pos,
                                   struct answer *answer, struct err *err)
{
    fill(r, r->step, i_step, n_seq, pos);
    begin(r, r->step);
    return finish(r, r->step, answer, err);
}

enum { N_STEP = 12 };

/* Steps of 1, 2, 3, 1, 2, 3, ... sequences. */
static inline void decode_all(struct rig *r, struct answer *answers)
{
    int pos[N_SEQ] = {0};
    struct err err = {0};
    for (int i = 0; i < N_STEP; i++) {
        if (decode(r, i, 1 + i % N_SEQ, pos, &answers[i], &err) != ERR_OK) {
            fail_msg("step %d: %s", i, err.message);
        }
    }
}

#endif
