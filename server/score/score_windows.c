/* How a text is cut for scoring: windows of the request's own, or as one of the evaluators does
 * that published figures come from ("windows" of /score, --windows of the command line). What each
 * of them does, with its source, and which of its figures come out, is said in server/SCORING.md.
 *
 *   lm-eval        lm-evaluation-harness's API models: windows of max_length - 2 positions, the
 *                  prefix token first, contexts without BOS
 *   xlm            the evaluator of XLM: one stream, padded in front with the end token, in blocks of
 *                  bptt tokens that each begin anew and whose first token is not predicted
 *   adaptive-span  the evaluator of adaptive-span: the stream in batch_size equal rows, each read
 *   from
 *                  an empty cache in steps of bptt tokens, without what is left over
 *   sparse-memory-lm  its author's evaluation: the stream in windows of the context's length that
 *   each
 *                  begin anew with the token that the one before predicted last */
#include "server/score/score.h"

#include <stdlib.h>
#include <string.h>

static const char *const scheme_names[] = {"lm-eval", "xlm", "adaptive-span", "sparse-memory-lm",
                                           NULL};

const char *score_scheme_name(enum score_scheme scheme)
{
    return scheme == SCORE_SCHEME_OWN ? NULL : scheme_names[scheme - 1];
}

bool score_scheme_blocks(enum score_scheme scheme)
{
    return scheme == SCORE_SCHEME_XLM || scheme == SCORE_SCHEME_ADAPTIVE_SPAN;
}

/* ---- the fields ---------------------------------------------------------------------------- */

/* A model without a context limit reads a text as one stream: there is nothing to cut. */
static void refuse_windows(struct fields *fields)
{
    static const char *const names[] = {"max_context", "stride"};
    for (int i = 0; i < 2; i++) {
        if (fields_get(fields, names[i], NULL) != NULL) {
            (void)api_error_set(fields->error, 400, "conflicting_fields", names[i],
                                "%s cuts a text into windows, but this model has no context limit "
                                "and scores each text as one stream: leave it out",
                                names[i]);
        }
    }
}

/* What an evaluator decides by itself. */
static void refuse_own(struct fields *fields, const char *scheme)
{
    static const char *const names[] = {"max_context", "stride",   "on_long",
                                        "add_bos",     "boundary", "append_eos"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        if (fields_get(fields, names[i], NULL) != NULL) {
            (void)api_error_set(fields->error, 400, "conflicting_fields", names[i],
                                "windows \"%s\" decides about %s itself: leave one of the two out",
                                scheme, names[i]);
        }
    }
}

static void read_lm_eval(struct fields *fields, struct score_windows *w,
                         const struct api_limits *limits)
{
    const struct model_info *const info = limits->info;
    if (w->bptt == 0 && limits->context == 0) {
        (void)api_error_set(fields->error, 400, "missing_field", "bptt",
                            "the model has no context limit: give lm-eval's max_length as bptt");
        return;
    }
    w->bptt = w->bptt == 0 ? limits->context : w->bptt;
    w->window = w->stride = w->bptt - 2; /* lm-eval takes one position off twice */
    w->on_long = 0;
    if (w->window < 1) {
        (void)api_error_set(fields->error, 400, "invalid_value", "bptt",
                            "bptt is %lld, but lm-eval's max_length must be at least 3: it leaves "
                            "two positions unused",
                            (long long)w->bptt);
    }
    /* `bos_token_id or eos_token_id`, in which 0 counts as none. */
    w->prefix = info->bos_id > 0 ? info->bos_id : info->eos_id;
    if (w->prefix < 0) {
        (void)api_error_set(fields->error, 400, "invalid_value", "windows",
                            "lm-eval puts a beginning-of-text or end-of-text token in front, but "
                            "the model has neither");
    }
}

static void read_sparse_memory(struct fields *fields, struct score_windows *w,
                               const struct api_limits *limits)
{
    if (w->bptt == 0 && limits->context == 0) {
        (void)api_error_set(fields->error, 400, "missing_field", "bptt",
                            "the model has no context limit: give the evaluation's max_seq_len as "
                            "bptt");
        return;
    }
    w->bptt = w->bptt == 0 ? limits->context : w->bptt;
    w->window = w->stride = w->bptt;
    w->on_long = 0;
}

static void read_evaluator(struct fields *fields, struct score_windows *w,
                           const struct api_limits *limits)
{
    const char *const name = score_scheme_name(w->scheme);
    refuse_own(fields, name);
    if (w->scheme == SCORE_SCHEME_LM_EVAL) {
        read_lm_eval(fields, w, limits);
        return;
    }
    if (w->scheme == SCORE_SCHEME_SPARSE_MEMORY) {
        read_sparse_memory(fields, w, limits);
        return;
    }
    if (w->bptt == 0) {
        (void)api_error_set(
            fields->error, 400, "missing_field", "bptt",
            w->scheme == SCORE_SCHEME_XLM
                ? "windows \"xlm\" needs bptt, the parameter of that name that the "
                  "model was evaluated with: the converter prints it, and XLM's own "
                  "default is 256"
                : "windows \"adaptive-span\" needs bptt, the evaluation's "
                  "--block-sz (512 in their scripts for enwik8)");
    }
    if (w->scheme == SCORE_SCHEME_XLM && limits->info->eos_id < 0) {
        (void)api_error_set(
            fields->error, 400, "invalid_value", "windows",
            "windows \"xlm\" fills the text up with the end-of-text token, which the "
            "model does not have");
    }
    if (fields_get(fields, "target_ids", NULL) != NULL) {
        (void)api_error_set(fields->error, 400, "conflicting_fields", "target_ids",
                            "target_ids asks what follows a text, but windows \"%s\" scores pieces "
                            "of it apart: leave one of the two out",
                            name);
    }
}

void score_windows_read(struct fields *fields, struct score_windows *w,
                        const struct api_limits *limits)
{
    static const char *const on_long[] = {"window", "error", NULL};
    const int64_t context = engine_context(limits->context);
    *w = (struct score_windows){.window = context, .stride = context, .on_long = -1, .batch = 1};
    const int scheme = fields_choice(fields, "windows", scheme_names);
    w->scheme = scheme < 0 ? SCORE_SCHEME_OWN : (enum score_scheme)(scheme + 1);
    fields_int64(fields, "bptt", 2, context, &w->bptt);
    fields_int64(fields, "batch_size", 1, SCORE_BATCH_MAX, &w->batch);
    if (fields_get(fields, "batch_size", NULL) != NULL && w->scheme != SCORE_SCHEME_ADAPTIVE_SPAN) {
        (void)api_error_set(fields->error, 400, "conflicting_fields", "batch_size",
                            "batch_size goes with windows \"adaptive-span\" alone");
    }
    if (w->scheme != SCORE_SCHEME_OWN) {
        read_evaluator(fields, w, limits);
        return;
    }
    if (w->bptt > 0) {
        (void)api_error_set(fields->error, 400, "conflicting_fields", "bptt",
                            "bptt goes with windows: say whose");
    }
    if (limits->context == 0) {
        refuse_windows(fields);
    } else {
        fields_int64(fields, "max_context", 1, context, &w->window);
        w->stride = w->window;
        fields_int64(fields, "stride", 1, w->window, &w->stride);
    }
    w->on_long = fields_choice(fields, "on_long", on_long);
}

/* ---- blocks -------------------------------------------------------------------------------- */

/* Puts n_front end tokens in front, and one behind a text whose last line has no end. */
static bool add_ends(struct input *input, int64_t n_front, bool behind, int32_t eos_id,
                     struct api_error *error)
{
    const int64_t n = input->n_ids;
    int32_t *const ids = realloc(input->ids, (size_t)(n_front + n + behind) * sizeof *input->ids);
    if (ids == NULL) {
        return api_error_set(error, 500, "out_of_memory", NULL, "no memory for the tokens");
    }
    memmove(ids + n_front, ids, (size_t)n * sizeof *ids);
    for (int64_t i = 0; i < n_front; i++) {
        ids[i] = eos_id;
    }
    if (behind) {
        ids[n_front + n] = eos_id;
    }
    input->ids = ids;
    input->n_ids = n_front + n + behind;
    input->n_bos = (int)n_front;
    input->n_eos = behind;
    return true;
}

/* XLM's stream: end tokens up to a multiple of bptt and one more, then blocks of bptt. The text's
 * last token stands behind the last block. */
static bool cut_xlm(struct input *input, struct score_entry *entry, const struct score_windows *w,
                    bool behind, const struct api_limits *limits, struct api_error *error)
{
    const int64_t n = input->n_ids + behind;
    const int64_t n_fill = (w->bptt - n % w->bptt) % w->bptt;
    if (n + n_fill > limits->max_score_tokens.most) {
        return api_error_set(error, 400, "too_many_tokens", "bptt",
                             "filled up to a multiple of bptt %lld the text has %lld tokens, but "
                             "%lld are the limit (%s)",
                             (long long)w->bptt, (long long)(n + n_fill),
                             (long long)limits->max_score_tokens.most,
                             limits->max_score_tokens.flag);
    }
    entry->block = entry->block_used = w->bptt;
    return add_ends(input, n_fill + 1, behind, limits->info->eos_id, error);
}

static bool cut_adaptive_span(struct input *input, struct score_entry *entry,
                              const struct score_windows *w, bool behind,
                              const struct api_limits *limits, struct api_error *error)
{
    const int64_t n = input->n_ids + behind;
    const int64_t n_row = n / w->batch;
    const int64_t n_step = n_row > 0 ? (n_row - 1) / w->bptt : 0;
    if (n_step == 0) {
        return api_error_set(error, 400, "invalid_value", "bptt",
                             "a text of %lld tokens in %lld rows has no whole step of %lld: give "
                             "a longer text, or a smaller bptt or batch_size",
                             (long long)n, (long long)w->batch, (long long)w->bptt);
    }
    entry->block = n_row;
    entry->block_used = 1 + n_step * w->bptt;
    return add_ends(input, 0, behind, limits->info->eos_id, error);
}

bool score_windows_cut(struct score_job *job, const struct score_windows *w,
                       const struct api_limits *limits, struct api_error *error)
{
    const int32_t eos_id = limits->info->eos_id;
    const int64_t context = engine_context(limits->context);
    if (!score_scheme_blocks(w->scheme)) {
        return true;
    }
    for (int i = 0; i < job->inputs.n; i++) {
        struct input *const input = &job->inputs.input[i];
        struct score_entry *const entry = &job->entry[i];
        if (input->n_ids == input->n_bos) {
            continue; /* an empty text: there is nothing to cut */
        }
        const bool behind =
            input->text != NULL && eos_id >= 0 && input->ids[input->n_ids - 1] != eos_id;
        if (!(w->scheme == SCORE_SCHEME_XLM ? cut_xlm : cut_adaptive_span)(input, entry, w, behind,
                                                                           limits, error)) {
            return false;
        }
        entry->first = input->n_bos;
        if (entry->block_used - 1 > context) {
            return api_error_set(error, 400, "context_length_exceeded", "windows",
                                 "windows \"adaptive-span\" reads a row of %lld tokens with one "
                                 "cache, but the model's context is %lld (max_length=%lld): it is "
                                 "for models without a context limit",
                                 (long long)entry->block_used, (long long)context,
                                 (long long)context);
        }
    }
    return true;
}
