/* Runs a model's forward on any backend, for the tests of models/. Header only, since each test is
 * one program. Everything that goes wrong here fails the test that called.
 *   runner_step    one step of a list of pieces, each a run of tokens of one sequence; each
 *                  sequence slot owns fixed pages of the cache
 *   runner_chunks  one sequence in pieces of some tokens
 *   runner_trials  the main of a test of golden cases: converts them, and makes a test of every
 *                  check of every case on every backend */
#ifndef TESTS_MODELS_RUNNER_H
#define TESTS_MODELS_RUNNER_H

#include "models/model.h"
#include "tests/cuda_library.h"

#include <limits.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#if !defined(RUNNER_POSITIONS)
#define RUNNER_POSITIONS 512 /* of a sequence's pages; a test may define others before */
#endif
enum { RUNNER_TOK_MAX = 512, RUNNER_SEQ_MAX = 4, RUNNER_PAGE_MAX = RUNNER_POSITIONS / KV_PAGE };

/* The backends and instruction sets that are tried; those this machine lacks are skipped. The last
 * is usually the test double, which takes a thousand times as long: tests that are too much for it
 * take the first RUNNER_N_CPU. */
#if defined(__aarch64__)
#define RUNNER_BEST "neon-bf16"
static const char *const runner_backends[] = {"ref", "plain", "neon", RUNNER_BEST, "cuda"};
#else
#define RUNNER_BEST "avx512"
static const char *const runner_backends[] = {"ref", "plain", "avx2", RUNNER_BEST, "cuda"};
#endif
enum { RUNNER_N_CPU = 4, RUNNER_N_BACKEND };

/* Whether TEST_FEW=1 leaves a backend to other tests: sanitizers look at accesses, and those of the
 * instruction sets' and the GPU's kernels are looked at in tests/kernels. */
static inline bool runner_is_left_out(const char *backend)
{
    return getenv("TEST_FEW") != NULL && strcmp(backend, "ref") != 0 &&
           strcmp(backend, RUNNER_BEST) != 0;
}

/* Tokens first .. first+n-1 of the sequence ids, fed into slot. Results go to arrays indexed by
 * position: NULL where they are not wanted. */
struct piece {
    int slot, lang;
    const int32_t *ids;
    int n_ids; /* the whole sequence: the target of position t is ids[t+1] where there is one */
    int first, n;
    float *logprob; /* [n_ids - 1] of ids[t+1] */
    int32_t *drawn; /* [n_ids] the best token after position t */
    float *drawn_logprob;
    float *logits; /* [n_ids, n_vocab] */
};

struct runner {
    struct backend *be;
    struct model *model;
    struct step *step;
    const struct model_info *info;
    struct model_tap extra; /* called besides the runner's own capture of the logits; may be none */
    float *captured;        /* [RUNNER_TOK_MAX, n_vocab] logits of the last step */
    /* Steps of one row of each sequence, too, are of tokens of requests: step.is_drawn. */
    bool is_given;
};

static inline enum err_code runner_backend(struct backend **be, const char *name, struct err *err)
{
    if (strcmp(name, "ref") == 0) {
        return ref_open(be, err);
    }
    if (strcmp(name, "cuda") != 0) {
        return cpu_open(be, name, 2, err);
    }
    const struct backend_options options = {"cuda", 0, false, NULL};
    return cuda_library_find() ? backend_open(be, &options, err) : ERR_UNSUPPORTED;
}

/* False if this machine has no such backend. */
static inline bool runner_open(struct runner *r, const char *backend, const char *dir,
                               const struct model_options *options)
{
    struct err err = {0};
    *r = (struct runner){0};
    const enum err_code opened = runner_backend(&r->be, backend, &err);
    if (opened == ERR_UNSUPPORTED) {
        return false;
    }
    if (opened != ERR_OK || model_open(&r->model, r->be, dir, options, &err) != ERR_OK) {
        fail_msg("%s: %s", backend, err.message);
    }
    r->info = model_info(r->model);
    const struct step_limits limits = {
        .n_tok_max = RUNNER_TOK_MAX,
        .n_seq_max = RUNNER_SEQ_MAX,
        .n_page_max = RUNNER_PAGE_MAX,
        .n_out_max = RUNNER_TOK_MAX,
        .n_top_max = 1,
        .n_adjust_max = 1,
        .n_allow_max = 1,
        .n_vocab = r->info->n_vocab,
        .d_model = r->info->d_attention,
        .n_head = r->info->n_head,
        .n_span_max = r->info->window == 0 ? 0 : r->info->window + r->info->n_persistent};
    if (model_reserve(r->model, &limits, RUNNER_SEQ_MAX * RUNNER_PAGE_MAX, &err) != ERR_OK ||
        r->be->op->step_new(r->be, &r->step, &limits, &err) != ERR_OK) {
        fail_msg("%s: %s", backend, err.message);
    }
    r->captured = calloc((size_t)RUNNER_TOK_MAX * (size_t)r->info->n_vocab, sizeof(float));
    assert_non_null(r->captured);
    return true;
}

static inline void runner_close(struct runner *r)
{
    free(r->captured);
    if (r->step != NULL) {
        r->be->op->step_free(r->be, r->step);
    }
    model_close(r->model);
    backend_close(r->be);
    *r = (struct runner){0};
}

static inline void runner_see(void *ctx, const char *name, int layer, const struct tensor *t)
{
    struct runner *const r = ctx;
    if (strcmp(name, "logits") == 0) {
        r->be->op->download(r->be, r->captured + (size_t)layer * (size_t)r->info->n_vocab, *t);
    }
    if (r->extra.see != NULL) {
        r->extra.see(r->extra.ctx, name, layer, t);
    }
}

/* Writes one piece's rows and outputs into the step. */
static inline void runner_add(struct runner *r, const struct piece *piece)
{
    struct step *const s = r->step;
    assert_true(s->n_seq < RUNNER_SEQ_MAX && s->n_tok + piece->n <= RUNNER_TOK_MAX);
    for (int i = 0; i < RUNNER_PAGE_MAX; i++) { /* slots' pages interleave: order must not matter */
        s->page[s->n_seq * RUNNER_PAGE_MAX + i] = i * RUNNER_SEQ_MAX + piece->slot;
    }
    for (int t = piece->first; t < piece->first + piece->n; t++) {
        s->token[s->n_tok] = piece->ids[t];
        s->pos[s->n_tok] = t;
        s->lang[s->n_tok] = piece->lang;
        s->out_row[s->n_out] = s->n_tok;
        s->out_want[s->n_out] = OUT_SAMPLE | OUT_LOGPROB;
        const bool has_target = t + 1 < piece->n_ids && piece->drawn_logprob == NULL;
        s->target[s->n_out] = has_target ? piece->ids[t + 1] : TARGET_SAMPLED;
        s->sample[s->n_out] = (struct sample_params){.top_p = 1, .repetition = 1};
        s->n_tok++;
        s->n_out++;
    }
    s->n_seq++;
    s->seq_first[s->n_seq] = s->n_tok;
}

static inline void runner_read(const struct runner *r, const struct piece *piece, int row)
{
    const size_t n_vocab = (size_t)r->info->n_vocab;
    for (int t = piece->first; t < piece->first + piece->n; t++, row++) {
        if (piece->logprob != NULL && t + 1 < piece->n_ids) {
            piece->logprob[t] = r->step->out_logprob[row];
        }
        if (piece->drawn != NULL) {
            piece->drawn[t] = r->step->out_token[row];
        }
        if (piece->drawn_logprob != NULL) {
            piece->drawn_logprob[t] = r->step->out_logprob[row];
        }
        if (piece->logits != NULL) {
            memcpy(piece->logits + (size_t)t * n_vocab, r->captured + (size_t)row * n_vocab,
                   n_vocab * sizeof(float));
        }
    }
}

/* One step of n_piece pieces. A tap is given only where a test looks at intermediate results, since
 * it changes which ops run (output_run, memory_run): all others run as in a server. */
static inline void runner_step(struct runner *r, const struct piece *piece, int n_piece)
{
    struct err err = {0};
    const struct model_tap tap = {runner_see, r};
    bool is_tapped = r->extra.see != NULL;
    r->step->n_tok = r->step->n_seq = r->step->n_out = 0;
    r->step->n_top = r->step->n_adjust = r->step->n_allow = 0;
    r->step->seq_first[0] = 0;
    for (int i = 0; i < n_piece; i++) {
        runner_add(r, &piece[i]);
        is_tapped = is_tapped || piece[i].logits != NULL;
    }
    r->step->ops_list = !is_tapped;
    r->step->is_drawn = r->be->phases_apart && !r->is_given && r->step->n_tok == r->step->n_seq;
    r->be->op->step_begin(r->be, r->step);
    model_forward(r->model, r->step, is_tapped ? &tap : NULL);
    if (r->be->op->finish(r->be, r->step, &err) != ERR_OK) {
        fail_msg("step: %s", err.message);
    }
    for (int i = 0, row = 0; i < n_piece; row += piece[i].n, i++) {
        runner_read(r, &piece[i], row);
    }
}

/* One sequence, in pieces of chunk tokens. */
static inline void runner_chunks(struct runner *r, struct piece whole, int chunk)
{
    const int end = whole.first + whole.n;
    for (struct piece p = whole; p.first < end; p.first += p.n) {
        p.n = end - p.first < chunk ? end - p.first : chunk;
        runner_step(r, &p, 1);
    }
}

/* ---- trials: every check of every golden case on every backend ------------------------------ */

struct golden; /* a case on a backend; each test has its own */

struct runner_check {
    const char *name;
    void (*run)(struct golden *golden);
};

/* One test. */
struct runner_trial {
    const char *case_name, *backend;
    const struct runner_check *check;
    char name[64]; /* case/backend/check */
};

struct runner_trials {
    const char *group;
    const char *const *cases; /* [n_case] */
    const struct runner_check *checks;
    int n_case, n_check;
    bool (*is_left_out)(const struct runner_trial *trial);
    void (*run)(void **state); /* opens the case of the trial at *state, checks and closes it */
};

/* Where the converted cases are: PKMSERVE_GOLDEN, default $B/golden. */
static inline const char *runner_golden_dir(void)
{
    static char dir[PATH_MAX];
    const char *const given = getenv("PKMSERVE_GOLDEN");
    const char *const build = getenv("B");
    (void)snprintf(dir, sizeof dir, "%s%s",
                   given != NULL   ? given
                   : build != NULL ? build
                                   : "build",
                   given != NULL ? "" : "/golden");
    return dir;
}

static inline int runner_convert(void **state)
{
    char command[PATH_MAX + 64];
    (void)state;
    (void)snprintf(command, sizeof command, "tests/golden/convert_all.sh '%s'",
                   runner_golden_dir());
    return system(command);
}

/* Runs them all, or those whose names the first argument matches; what main is to return. */
static inline int runner_trials(const struct runner_trials *all, int argc, char **argv)
{
    const int n_max = all->n_case * RUNNER_N_BACKEND * all->n_check;
    struct runner_trial *const trials = calloc((size_t)n_max, sizeof *trials);
    struct CMUnitTest *const tests = calloc((size_t)n_max, sizeof *tests);
    CHECK(trials != NULL && tests != NULL);
    size_t n_test = 0;
    for (int i = 0; i < n_max; i++) {
        struct runner_trial *const trial = &trials[n_test];
        trial->case_name = all->cases[i / all->n_check / RUNNER_N_BACKEND];
        trial->backend = runner_backends[i / all->n_check % RUNNER_N_BACKEND];
        trial->check = &all->checks[i % all->n_check];
        if (all->is_left_out(trial)) {
            continue;
        }
        (void)snprintf(trial->name, sizeof trial->name, "%s/%s/%s", trial->case_name,
                       trial->backend, trial->check->name);
        tests[n_test++] = (struct CMUnitTest){trial->name, all->run, NULL, NULL, trial};
    }
    if (argc > 1) {
        cmocka_set_test_filter(argv[1]);
    }
    const int n_failed = _cmocka_run_group_tests(all->group, tests, n_test, runner_convert, NULL);
    free(trials);
    free(tests);
    return n_failed;
}

#endif
