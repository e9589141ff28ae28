/* What runs before the first request: see selftest.h. */
#include "engine/selftest.h"
#include "engine/kvpages.h"
#include "engine/log.h"

#include <math.h>
#include <string.h>

/* Crosses two page borders; short enough to take no time. */
enum { SELFTEST_TOKENS = 2 * KV_PAGE + 5, PROBE_MAX = IDENTITY_TOKEN_MAX };
/* Of these, tokens that are computed as drawn ones: they cross the second border. */
enum { SELFTEST_DRAWN = 8 };

/* A sequence of the test: n tokens in pages page_first.. */
struct probe {
    int32_t token[PROBE_MAX];
    int n;
    int page_first;
    float logprob[PROBE_MAX]; /* log-probabilities of the next token; for the last token, of the
                               * first one */
};

static void probe_begin(struct probe *probe, int n, int page_first, int n_vocab, int salt)
{
    probe->n = n;
    probe->page_first = page_first;
    for (int i = 0; i < SELFTEST_TOKENS; i++) {
        /* Any fixed spread over the vocabulary will do. */
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
    step->n_top = step->n_adjust = step->n_allow = step->n_before = 0;
    step->is_drawn = false;
}

static enum err_code run(const struct selftest *test, struct err *err)
{
    test->be->op->step_begin(test->be, test->step);
    model_forward(test->model, test->step, NULL);
    return test->be->op->finish(test->be, test->step, err);
}

/* Runs rows first .. first+n-1 of the probe alone. */
static enum err_code run_rows(const struct selftest *test, struct probe *probe, int first, int n,
                              struct err *err)
{
    if (n < 1) {
        return ERR_OK;
    }
    clear_step(test->step);
    add_rows(test->step, probe, first, n);
    const enum err_code code = run(test, err);
    memcpy(probe->logprob + first, test->step->out_logprob, (size_t)n * sizeof(float));
    return code;
}

/* As text: the sign of a NaN means nothing. */
static double shown(float logprob)
{
    return isnan(logprob) ? (double)NAN : (double)logprob;
}

/* Minus infinity is one: the token is impossible. */
static enum err_code check_numbers(const struct probe *probe, const char *how, struct err *err)
{
    for (int i = 0; i < probe->n; i++) {
        if (isnan(probe->logprob[i]) || probe->logprob[i] == INFINITY) {
            return err_set(err, ERR_NUMERICAL,
                           "self-test: log-probability %g at position %d %s: the model's weights "
                           "are damaged or out of range; start with --check to find them",
                           shown(probe->logprob[i]), i, how);
        }
    }
    return ERR_OK;
}

/* Whether both have the same bits; with fast_math, whether both are numbers. */
static enum err_code compare(const struct selftest *test, const struct probe *whole,
                             const struct probe *other, const char *first, const char *how,
                             struct err *err)
{
    if (test->fast_math) {
        return check_numbers(other, how, err);
    }
    for (int i = 0; i < whole->n; i++) {
        if (memcmp(&whole->logprob[i], &other->logprob[i], sizeof(float)) != 0) {
            return err_set(err, ERR_NUMERICAL,
                           "self-test: position %d has log-probability %.9g when computed %s "
                           "and %.9g %s: this backend does not give reproducible results; try "
                           "another one",
                           i, shown(whole->logprob[i]), first, shown(other->logprob[i]), how);
        }
    }
    return ERR_OK;
}

/* Fills a step of n_seq sequences at their first position, each in a page of its own, as in
 * decoding: each draws a token and requests its log-probability. */
static enum err_code warm_step(const struct selftest *test, int n_seq, struct err *err)
{
    struct probe probe;
    clear_step(test->step);
    test->step->is_drawn = test->be->phases_apart;
    for (int s = 0; s < n_seq; s++) {
        probe_begin(&probe, 1, s, model_info(test->model)->n_vocab, s);
        add_rows(test->step, &probe, 0, 1);
        test->step->out_want[s] = OUT_SAMPLE | OUT_LOGPROB;
        test->step->target[s] = TARGET_SAMPLED;
        test->step->sample[s] = (struct sample_params){.top_p = 1, .repetition = 1};
    }
    return run(test, err);
}

enum err_code selftest_warm_up(const struct selftest *test, struct err *err)
{
    /* Every sequence holds at least one page, so the number of pages bounds the number of
     * sequences. */
    int n_max = test->be->capture_max;
    n_max = n_max < test->max_seqs ? n_max : test->max_seqs;
    n_max = n_max < test->n_page ? n_max : test->n_page;
    for (int n_seq = 1; n_seq <= n_max; n_seq++) {
        if (warm_step(test, n_seq, err) != ERR_OK) {
            return err->code;
        }
    }
    return ERR_OK;
}

/* The first of a text's tokens that are drawn ones. */
static int first_drawn(int n)
{
    return n > SELFTEST_DRAWN ? n - SELFTEST_DRAWN : 0;
}

/* Begins the step of row r, which draws the text's next token: nothing else is allowed. The row's
 * own token is given for the first of them; the others hold what the step before draws. */
static void begin_ahead(const struct selftest *test, struct step *step, const struct probe *probe,
                        int r, bool is_first)
{
    clear_step(step);
    step->is_drawn = test->be->phases_apart;
    add_rows(step, probe, r, 1);
    if (!is_first) {
        step->n_before = 1;
        step->token[0] = step_token_drawn(0);
    }
    step->out_want[0] = OUT_SAMPLE | OUT_LOGPROB;
    step->allow[0] = step->target[0];
    step->target[0] = TARGET_SAMPLED;
    step->n_allow = 1;
    step->sample[0] = (struct sample_params){.top_p = 1, .repetition = 1, .n_allow = 1};
    test->be->op->step_begin(test->be, step);
    model_forward(test->model, step, NULL);
    test->be->op->submit(test->be, step);
}

/* Rows from first on, each of which begins while the one before is computed. */
static enum err_code run_ahead(const struct selftest *test, struct probe *probe, int first,
                               struct err *err)
{
    struct step *const twins[2] = {test->step, test->twin};
    for (int r = first; r <= probe->n; r++) {
        if (r < probe->n) {
            begin_ahead(test, twins[r % 2], probe, r, r == first);
        }
        if (r > first) {
            struct step *const before = twins[(r - 1) % 2];
            if (test->be->op->finish(test->be, before, err) != ERR_OK) {
                return err->code;
            }
            probe->logprob[r - 1] = before->out_logprob[0];
        }
    }
    return ERR_OK;
}

/* Drawn tokens, where they are computed apart: the last ones of a text, row by row, alone, or with
 * more and more other sequences in the step, up to as many as may run, and with rows of a prompt
 * between the steps. */
static enum err_code run_drawn(const struct selftest *test, struct probe *probe, bool in_a_crowd,
                               struct err *err)
{
    const int n_page = kvpages_for(probe->n);
    const int n_vocab = model_info(test->model)->n_vocab;
    const int first = first_drawn(probe->n);
    const int n_free = test->n_page - n_page; /* the others have a page each */
    const int n_other_max = n_free < test->max_seqs - 1 ? n_free : test->max_seqs - 1;
    enum err_code code = run_rows(test, probe, 0, first, err);
    if (code == ERR_OK && test->be->runs_ahead && test->twin != NULL && !in_a_crowd) {
        return run_ahead(test, probe, first, err);
    }
    for (int r = first; r < probe->n && code == ERR_OK; r++) {
        struct probe other;
        const int64_t share = (int64_t)n_other_max * (r - first + 1);
        const int n_other = in_a_crowd ? (int)(share / (probe->n - first)) : 0;
        clear_step(test->step);
        test->step->is_drawn = true;
        for (int s = 0; s < n_other; s++) {
            probe_begin(&other, 1, n_page + s, n_vocab, r + s);
            add_rows(test->step, &other, 0, 1);
        }
        add_rows(test->step, probe, r, 1);
        code = run(test, err);
        probe->logprob[r] = test->step->out_logprob[n_other];
        if (n_other > 0 && code == ERR_OK) {
            const int n_row = test->step->limits.n_tok_max < 2 ? 1 : 2;
            probe_begin(&other, n_row, n_page, n_vocab, r);
            code = run_rows(test, &other, 0, n_row, err);
        }
    }
    return code;
}

static enum err_code compare_drawn(const struct selftest *test, int n, struct err *err)
{
    struct probe alone;
    struct probe beside;
    probe_begin(&alone, n, 0, model_info(test->model)->n_vocab, 1);
    beside = alone;
    if (run_drawn(test, &alone, false, err) != ERR_OK ||
        check_numbers(&alone, "when drawn", err) != ERR_OK ||
        run_drawn(test, &beside, true, err) != ERR_OK) {
        return err->code;
    }
    return compare(test, &alone, &beside, "alone", "drawn beside others", err);
}

/* Tokens of the text. */
static int text_length(const struct selftest *test)
{
    const int budget = test->step->limits.n_tok_max;
    const int n = SELFTEST_TOKENS < budget ? SELFTEST_TOKENS : budget;
    return n < test->context ? n : test->context;
}

/* Of log-probabilities, in the mean: last bits, and what roundings to BF16 and slots at the edge of
 * a selection make of them, are far below. */
static const float ROUNDING_MAX = 0.25F;

/* What the text gives with the fast paths in use: as a prompt, and with its last tokens drawn,
 * alone and, where it is asked for, in a crowd. */
struct trial {
    struct probe prompt, drawn, crowded;
};

static enum err_code run_trial(const struct selftest *test, struct trial *trial, bool in_a_crowd,
                               struct err *err)
{
    const int n_vocab = model_info(test->model)->n_vocab;
    const int n = text_length(test);
    probe_begin(&trial->prompt, n, 0, n_vocab, 1);
    trial->drawn = trial->crowded = trial->prompt;
    if (run_rows(test, &trial->prompt, 0, n, err) != ERR_OK) {
        return err->code;
    }
    if (test->be->phases_apart && run_drawn(test, &trial->drawn, false, err) != ERR_OK) {
        return err->code;
    }
    return test->be->phases_apart && in_a_crowd ? run_drawn(test, &trial->crowded, true, err)
                                                : ERR_OK;
}

static float mean_difference(const struct probe *a, const struct probe *b, int first)
{
    float sum = 0;
    for (int i = first; i < a->n; i++) {
        const float x = a->logprob[i];
        const float y = b->logprob[i];
        sum += x == y ? 0 : fabsf(x - y); /* both infinite, too */
    }
    return sum / (float)(a->n - first);
}

/* What fast paths change: mean differences of log-probabilities, of an exact one also of what is
 * drawn in a crowd. */
struct difference {
    float prompt, drawn, allowed;
    bool is_good;
};

static struct difference difference_of(const struct selftest *test, const struct trial *with,
                                       const struct trial *without, bool is_exact)
{
    const bool has_drawn = test->be->phases_apart;
    const size_t bytes = (size_t)with->prompt.n * sizeof(float);
    struct difference d = {.allowed = is_exact ? 0 : ROUNDING_MAX};
    d.prompt = mean_difference(&with->prompt, &without->prompt, 0);
    if (has_drawn) {
        const int first = first_drawn(with->drawn.n);
        d.drawn = mean_difference(&with->drawn, &without->drawn, first);
        d.drawn = is_exact ? fmaxf(d.drawn, mean_difference(&with->crowded, &without->drawn, first))
                           : d.drawn;
    }
    const bool has_same_bits =
        memcmp(with->prompt.logprob, without->prompt.logprob, bytes) == 0 &&
        (!has_drawn || (memcmp(with->drawn.logprob, without->drawn.logprob, bytes) == 0 &&
                        memcmp(with->crowded.logprob, without->drawn.logprob, bytes) == 0));
    d.is_good =
        is_exact ? has_same_bits : d.prompt <= d.allowed && d.drawn <= d.allowed; /* no NaN */
    return d;
}

bool selftest_leave_fast_paths(const struct selftest *test)
{
    struct backend *const be = test->be;
    bool had_any = false;
    for (int i = 0; i < be->n_fast_path; i++) {
        had_any |= be->fast_path[i].is_used;
        be->op->fast_path_use(be, i, false);
    }
    return had_any;
}

/* The paths of one kind, exact or not, and what a text gives without any. */
struct path_group {
    const struct selftest *test;
    const struct trial *without;
    bool is_exact;
    bool is_in[FAST_PATH_MAX]; /* that are tried, or that passed */
};

static int group_size(const struct path_group *group)
{
    int n = 0;
    for (int i = 0; i < group->test->be->n_fast_path; i++) {
        n += group->is_in[i];
    }
    return n;
}

static void group_use(const struct path_group *group, bool is_used)
{
    struct backend *const be = group->test->be;
    for (int i = 0; i < be->n_fast_path; i++) {
        if (group->is_in[i]) {
            be->op->fast_path_use(be, i, is_used);
        }
    }
}

static void group_tell(const struct path_group *group, const struct difference *d)
{
    const struct backend *const be = group->test->be;
    for (int i = 0; i < be->n_fast_path; i++) {
        if (group->is_in[i]) {
            log_event(d->is_good ? LEVEL_INFO : LEVEL_WARN,
                      d->is_good ? "fast_path" : "fast_path_off",
                      "name=%s prompts=%.3g drawn=%.3g allowed=%.3g", be->fast_path[i].name,
                      (double)d->prompt, (double)d->drawn, (double)d->allowed);
        }
    }
}

/* Uses them together, and leaves them again if they do not pass. */
static enum err_code group_try(const struct path_group *group, struct difference *d,
                               struct err *err)
{
    struct trial with;
    group_use(group, true);
    if (run_trial(group->test, &with, group->is_exact, err) != ERR_OK) {
        return err->code;
    }
    *d = difference_of(group->test, &with, group->without, group->is_exact);
    if (!d->is_good) {
        group_use(group, false);
    }
    return ERR_OK;
}

/* Tries each by itself, and leaves those in the group that passed, not in use. */
static enum err_code group_try_each(struct path_group *group, struct err *err)
{
    for (int i = 0; i < group->test->be->n_fast_path; i++) {
        struct path_group one = {group->test, group->without, group->is_exact, {false}};
        struct difference d = {0};
        one.is_in[i] = group->is_in[i];
        if (!one.is_in[i]) {
            continue;
        }
        if (group_try(&one, &d, err) != ERR_OK) {
            return err->code;
        }
        group_tell(&one, &d);
        group_use(&one, false);
        group->is_in[i] = d.is_good;
    }
    return ERR_OK;
}

/* Uses those of the group that pass. */
static enum err_code group_choose(struct path_group *group, struct err *err)
{
    struct difference d = {0};
    if (group_size(group) == 0) {
        return ERR_OK;
    }
    if (group_try(group, &d, err) != ERR_OK) {
        return err->code;
    }
    if (d.is_good || group_size(group) == 1) {
        group_tell(group, &d);
        return ERR_OK;
    }
    if (group_try_each(group, err) != ERR_OK || group_size(group) == 0 ||
        group_try(group, &d, err) != ERR_OK) {
        return err->code;
    }
    if (!d.is_good) { /* each by itself, but not together */
        group_tell(group, &d);
    }
    return ERR_OK;
}

enum err_code selftest_fast_paths(const struct selftest *test, struct err *err)
{
    const struct backend *const be = test->be;
    struct trial without;
    struct path_group exact = {test, &without, true, {false}};
    struct path_group others = {test, &without, false, {false}};
    for (int i = 0; i < be->n_fast_path; i++) {
        const struct fast_path *const path = &be->fast_path[i];
        (path->is_exact ? &exact : &others)->is_in[i] = path->is_used;
    }
    err->code = ERR_OK;
    if (test->fast_math || !selftest_leave_fast_paths(test)) {
        return ERR_OK;
    }
    if (run_trial(test, &without, false, err) != ERR_OK || group_choose(&exact, err) != ERR_OK ||
        group_choose(&others, err) != ERR_OK) {
        return err->code;
    }
    return ERR_OK;
}

enum err_code selftest_run(const struct selftest *test, struct err *err)
{
    const int n_vocab = model_info(test->model)->n_vocab;
    const int budget = test->step->limits.n_tok_max;
    const int n = text_length(test);
    const int n_page = kvpages_for(n);
    const int apart = test->n_page >= 2 * n_page ? n_page : 0;

    struct probe whole;
    probe_begin(&whole, n, 0, n_vocab, 1);
    if (run_rows(test, &whole, 0, n, err) != ERR_OK) {
        return err->code;
    }
    if (check_numbers(&whole, "when computed whole", err) != ERR_OK) {
        return err->code;
    }

    struct probe chunked;
    probe_begin(&chunked, n, apart, n_vocab, 1);
    const int cut[4] = {0, 1 < n ? 1 : n, 1 + n / 2 < n ? 1 + n / 2 : n, n};
    for (int c = 0; c < 3; c++) {
        if (run_rows(test, &chunked, cut[c], cut[c + 1] - cut[c], err) != ERR_OK) {
            return err->code;
        }
    }
    if (compare(test, &whole, &chunked, "whole", "in chunks", err) != ERR_OK ||
        (test->be->phases_apart && compare_drawn(test, n, err) != ERR_OK)) {
        return err->code;
    }

    const int n_other = budget - n < n ? budget - n : n;
    if (apart == 0 || n_other < 1 || test->step->limits.n_seq_max < 2) {
        return ERR_OK; /* in so small a configuration two texts of this length never run at once */
    }
    struct probe other;
    struct probe beside;
    probe_begin(&other, n_other, 0, n_vocab, 2);
    probe_begin(&beside, n, apart, n_vocab, 1);
    clear_step(test->step);
    add_rows(test->step, &other, 0, n_other);
    add_rows(test->step, &beside, 0, n);
    if (run(test, err) != ERR_OK) {
        return err->code;
    }
    memcpy(beside.logprob, test->step->out_logprob + n_other, (size_t)n * sizeof(float));
    return compare(test, &whole, &beside, "whole", "beside another text", err);
}

enum err_code selftest_identity(const struct selftest *test, const struct identity *identity,
                                float tolerance, int *n, float *difference, struct err *err)
{
    const int n_vocab = model_info(test->model)->n_vocab;
    const struct step_limits *const limits = &test->step->limits;
    const int n_held = limits->n_page_max * KV_PAGE; /* also where pages form a ring */
    struct probe probe = {.n = test->context};
    probe.n = identity->n_token < probe.n ? identity->n_token : probe.n;
    probe.n = n_held < probe.n ? n_held : probe.n;
    for (int i = 0; i < probe.n; i++) {
        if (identity->token[i] >= n_vocab) {
            return err_set(err, ERR_FORMAT,
                           "%s: token %d of the probe is %d, but the vocabulary has %d words: the "
                           "file belongs to another model",
                           identity->path, i, (int)identity->token[i], n_vocab);
        }
        probe.token[i] = identity->token[i];
    }
    for (int first = 0; first < probe.n; first += limits->n_tok_max) {
        const int left = probe.n - first;
        if (run_rows(test, &probe, first, left < limits->n_tok_max ? left : limits->n_tok_max,
                     err) != ERR_OK) {
            return err->code;
        }
    }
    *n = probe.n;
    return identity_compare(identity, probe.logprob, probe.n - 1, tolerance, difference, err);
}
