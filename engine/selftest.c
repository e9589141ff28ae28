/* The self-test at start-up: a fixed short text is computed whole, in chunks, and beside another
 * text. All must agree to the bit and be finite, or the results of this machine, build or model
 * would depend on the company a request keeps, and the engine does not start. */
#include "engine/loop.h"

#include <math.h>
#include <string.h>

/* Crosses two page borders; short enough to take no time. */
enum { SELFTEST_TOKENS = 2 * KV_PAGE + 5 };

/* A sequence of the test: n tokens in pages page_first.. */
struct probe {
    int32_t token[SELFTEST_TOKENS];
    int n;
    int page_first;
    float logprob[SELFTEST_TOKENS]; /* of the next token; of the last one: of the first token */
};

static void probe_begin(struct probe *probe, int n, int page_first, int n_vocab, int salt)
{
    probe->n = n;
    probe->page_first = page_first;
    for (int i = 0; i < SELFTEST_TOKENS; i++) {
        /* Any fixed spread over the vocabulary serves. */
        probe->token[i] = (int32_t)((uint32_t)(i * i + salt) * 2654435761u % (uint32_t)n_vocab);
    }
}

/* Appends rows first .. first+n-1 of the probe, each with an output. */
static void add_rows(struct step *step, const struct probe *probe, int first, int n)
{
    int32_t *const page = step->page + (size_t)step->n_seq * (size_t)step->limits.n_page_max;
    for (int i = 0; i < kvpages_for(probe->n); i++) {
        page[i] = probe->page_first + i;
    }
    step->seq_first[step->n_seq++] = step->n_tok;
    for (int r = first; r < first + n; r++) {
        step->token[step->n_tok] = probe->token[r];
        step->pos[step->n_tok] = r;
        step->lang[step->n_tok] = 0;
        step->out_row[step->n_out] = step->n_tok++;
        step->out_want[step->n_out] = OUT_LOGPROB;
        step->target[step->n_out++] = probe->token[(r + 1) % probe->n];
    }
    step->seq_first[step->n_seq] = step->n_tok;
}

static void clear_step(struct step *step)
{
    step->n_tok = step->n_seq = step->n_out = 0;
    step->n_top = step->n_adjust = step->n_allow = 0;
}

static enum err_code run(struct engine *engine, struct err *err)
{
    engine->be->op->step_begin(engine->be, engine->step);
    model_forward(engine->model, engine->step, NULL);
    return engine->be->op->finish(engine->be, engine->step, err);
}

/* Runs rows first .. first+n-1 of the probe alone. */
static enum err_code run_rows(struct engine *engine, struct probe *probe, int first, int n,
                              struct err *err)
{
    if (n < 1) {
        return ERR_OK;
    }
    clear_step(engine->step);
    add_rows(engine->step, probe, first, n);
    const enum err_code code = run(engine, err);
    memcpy(probe->logprob + first, engine->step->out_logprob, (size_t)n * sizeof(float));
    return code;
}

static enum err_code compare(const struct probe *whole, const struct probe *other, const char *how,
                             struct err *err)
{
    for (int i = 0; i < whole->n; i++) {
        if (memcmp(&whole->logprob[i], &other->logprob[i], sizeof(float)) != 0) {
            return err_set(err, ERR_NUMERICAL,
                           "self-test: position %d has log-probability %.9g when computed whole "
                           "and %.9g %s: this backend does not give reproducible results; try "
                           "another one",
                           i, (double)whole->logprob[i], (double)other->logprob[i], how);
        }
    }
    return ERR_OK;
}

enum err_code selftest_run(struct engine *engine, struct err *err)
{
    const int n_vocab = model_info(engine->model)->n_vocab;
    const int budget = engine->step->limits.n_tok_max;
    const int context = engine->options.max_model_len;
    int n = SELFTEST_TOKENS < budget ? SELFTEST_TOKENS : budget;
    n = n < context ? n : context;
    const int n_page = kvpages_for(n);
    const int apart = engine->pages.n_page >= 2 * n_page ? n_page : 0;

    struct probe whole;
    probe_begin(&whole, n, 0, n_vocab, 1);
    if (run_rows(engine, &whole, 0, n, err) != ERR_OK) {
        return err->code;
    }
    for (int i = 0; i < n; i++) {
        if (!isfinite(whole.logprob[i])) {
            return err_set(err, ERR_NUMERICAL,
                           "self-test: log-probability %g at position %d: the model's weights "
                           "are damaged or out of range; start with --check to find them",
                           (double)whole.logprob[i], i);
        }
    }

    struct probe chunked;
    probe_begin(&chunked, n, apart, n_vocab, 1);
    const int cut[4] = {0, 1 < n ? 1 : n, 1 + n / 2 < n ? 1 + n / 2 : n, n};
    for (int c = 0; c < 3; c++) {
        if (run_rows(engine, &chunked, cut[c], cut[c + 1] - cut[c], err) != ERR_OK) {
            return err->code;
        }
    }
    if (compare(&whole, &chunked, "in chunks", err) != ERR_OK) {
        return err->code;
    }

    const int n_other = budget - n < n ? budget - n : n;
    if (apart == 0 || n_other < 1 || engine->step->limits.n_seq_max < 2) {
        return ERR_OK; /* so small a configuration never runs two texts of this length at once */
    }
    struct probe other;
    struct probe beside;
    probe_begin(&other, n_other, 0, n_vocab, 2);
    probe_begin(&beside, n, apart, n_vocab, 1);
    clear_step(engine->step);
    add_rows(engine->step, &other, 0, n_other);
    add_rows(engine->step, &beside, 0, n);
    if (run(engine, err) != ERR_OK) {
        return err->code;
    }
    memcpy(beside.logprob, engine->step->out_logprob + n_other, (size_t)n * sizeof(float));
    return compare(&whole, &beside, "beside another text", err);
}
