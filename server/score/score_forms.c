/* The four forms of what is scored: text, tokens, context with continuations, and pairs. See
 * score.h.
 *
 * A continuation and its context become one list of ids: BOS, the context's, the continuation's.
 * With boundary "joint" it is made as lm-evaluation-harness does: blanks at the end of the context
 * go to the continuation, both are tokenised as one text, and of these tokens as many are dropped
 * in front as the context has by itself, whose own take their place. So all continuations of a
 * context begin with the same ids, also where a token would have crossed the boundary. */
#include "engine/scoring.h"
#include "server/score/score.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

bool score_join(struct input *input, const char *const part[2], const size_t bytes[2],
                size_t *total, const char *param, const struct api_limits *limits,
                struct api_error *error)
{
    const size_t max = INPUT_BYTES_PER_TOKEN * (size_t)limits->max_score_tokens.most;
    const size_t n = bytes[0] + bytes[1];
    *total += n;
    if (*total > max) {
        return api_error_set(error, 400, "too_many_tokens", param,
                             "%s makes more than %zu bytes of text, the limit of one request (%d "
                             "for each token of --max-score-tokens): send less at once",
                             param, max, INPUT_BYTES_PER_TOKEN);
    }
    input->own = malloc(n + 1);
    if (input->own == NULL) {
        return api_error_set(error, 500, "out_of_memory", param, "no memory for the text");
    }
    memcpy(input->own, part[0], bytes[0]);
    memcpy(input->own + bytes[0], part[1], bytes[1]);
    input->own[n] = '\0';
    input->text = input->own;
    input->text_bytes = n;
    return true;
}

/* ---- the sides of a pair
 * ---------------------------------------------------------------------- */

/* Where in the body: "pairs[3].context" of the field "pairs". */
struct place {
    const char *param;
    char name[64];
};

/* A context or a continuation. */
struct pair_side {
    const char *text; /* Borrowed; NULL: given as ids */
    size_t bytes;
    struct input read; /* ids and, of text, offsets, once they are read. Owner: this */
};

static void side_free(struct pair_side *side)
{
    free(side->read.ids);
    free(side->read.offsets);
    *side = (struct pair_side){0};
}

static bool side_begin(struct pair_side *side, json_t *value, const struct place *place,
                       const struct api_limits *limits, struct api_error *error)
{
    if (json_is_string(value)) {
        side->text = json_string_value(value);
        side->bytes = json_string_length(value);
        return limits->tokenizer != NULL ||
               api_error_set(error, 400, "unsupported_parameter", place->param,
                             "the model has no tokenizer: %s must hold token ids, not text",
                             place->name);
    }
    if (!json_is_array(value)) {
        return api_error_set(error, 400, "invalid_value", place->param,
                             "%s must be a string or a list of token ids", place->name);
    }
    return input_ids(value, place->name, &limits->max_score_tokens, limits->info->n_vocab,
                     &side->read.ids, &side->read.n_ids, error);
}

/* Tokenises the first bytes of the side's text. */
static bool side_tokenise(struct pair_side *side, size_t bytes, const struct place *place,
                          const struct api_limits *limits, struct api_error *error)
{
    side->read.text = side->text;
    side->read.text_bytes = bytes;
    return input_tokenise(&side->read, place->name, limits, error);
}

/* ---- pairs --------------------------------------------------------------------------------- */

/* What applies to all pairs of a request. */
struct pair_rules {
    struct input_marks marks;
    bool separate, joint; /* as asked for; neither: joint where both halves are text */
    bool unconditional;
    const struct api_limits *limits;
    int64_t n_token; /* so far */
    size_t n_byte;
};

/* A context is read once for all of its continuations. */
static bool pair_context(struct pair_side *context, json_t *value, const struct place *place,
                         const struct pair_rules *rules, struct api_error *error)
{
    const struct model_info *const info = rules->limits->info;
    if (!side_begin(context, value, place, rules->limits, error)) {
        return false;
    }
    if (context->text != NULL) {
        const size_t bytes =
            rules->separate ? context->bytes : text_rstrip(context->text, context->bytes);
        if (!side_tokenise(context, bytes, place, rules->limits, error)) {
            return false;
        }
    }
    if (context->read.n_ids > 0) {
        return true;
    }
    if (context->text != NULL && info->bos_id < 0) {
        return api_error_set(error, 400, "invalid_value", place->param,
                             "%s is empty, and the model has no beginning-of-text token to start "
                             "from: give at least one word of context",
                             place->name);
    }
    return context->text != NULL || rules->marks.bos_ids ||
           api_error_set(error, 400, "invalid_value", place->param,
                         "%s is empty: give at least one token, or set add_bos", place->name);
}

/* The ids and offsets of two parts, one after the other. */
static bool pair_append(struct input *input, const struct pair_side *context,
                        const struct pair_side *ending)
{
    const size_t n_context = (size_t)context->read.n_ids;
    const size_t n_ending = (size_t)ending->read.n_ids;
    const size_t n = n_context + n_ending;
    input->ids = malloc(n * sizeof *input->ids);
    input->offsets = malloc(n * sizeof *input->offsets);
    if (input->ids == NULL || input->offsets == NULL) {
        return false;
    }
    input->n_ids = (int64_t)n;
    if (n_context > 0) {
        memcpy(input->ids, context->read.ids, n_context * sizeof *input->ids);
    }
    memcpy(input->ids + n_context, ending->read.ids, n_ending * sizeof *input->ids);
    for (size_t i = 0; input->text != NULL && i < n; i++) {
        input->offsets[i] = i < n_context ? context->read.offsets[i]
                                          : context->bytes + ending->read.offsets[i - n_context];
    }
    return true;
}

/* Tokenises context and continuation, which are input's own text, as one. */
static bool pair_joint(struct input *input, const struct pair_side *context,
                       const struct place *place, const struct pair_rules *rules,
                       struct api_error *error)
{
    const size_t n_context = (size_t)context->read.n_ids;
    if (!input_tokenise(input, place->name, rules->limits, error)) {
        return false;
    }
    if ((size_t)input->n_ids <= n_context) {
        return api_error_set(error, 400, "invalid_value", place->param,
                             "%s has no token of its own: tokenised together with its context it "
                             "disappears in the context's last token; use boundary \"separate\"",
                             place->name);
    }
    if (n_context > 0) {
        memcpy(input->ids, context->read.ids, n_context * sizeof *input->ids);
        memcpy(input->offsets, context->read.offsets, n_context * sizeof *input->offsets);
    }
    return true;
}

static bool pair_tokens(struct input *input, const struct pair_side *context,
                        struct pair_side *ending, const struct place *place,
                        struct pair_rules *rules, struct api_error *error)
{
    const bool both = context->text != NULL && ending->text != NULL;
    if (rules->joint && !both) {
        return api_error_set(error, 400, "conflicting_fields", "boundary",
                             "boundary \"joint\" tokenises context and continuation as one text: "
                             "give both as text (%s), or leave boundary out",
                             place->name);
    }
    if (both && !score_join(input, (const char *const[]){context->text, ending->text},
                            (const size_t[]){context->bytes, ending->bytes}, &rules->n_byte,
                            place->param, rules->limits, error)) {
        return false;
    }
    if (both && !rules->separate) {
        return pair_joint(input, context, place, rules, error);
    }
    if (ending->text != NULL &&
        !side_tokenise(ending, ending->bytes, place, rules->limits, error)) {
        return false;
    }
    if (ending->read.n_ids == 0) {
        return api_error_set(error, 400, "invalid_value", place->param,
                             "%s has no tokens: there is nothing to score", place->name);
    }
    return pair_append(input, context, ending) ||
           api_error_set(error, 500, "out_of_memory", place->param, "no memory for the tokens");
}

/* Makes input and entry of a context that has been read and of one of its continuations. */
static bool pair_make(struct input *input, struct score_entry *entry,
                      const struct pair_side *context, json_t *value, const struct place *place,
                      struct pair_rules *rules, struct api_error *error)
{
    struct pair_side ending = {0};
    bool ok = side_begin(&ending, value, place, rules->limits, error);
    if (ok && ending.bytes == 0 && ending.read.n_ids == 0) {
        ok = api_error_set(error, 400, "invalid_value", place->param,
                           "%s is empty: there is nothing to score", place->name);
    }
    ok = ok && pair_tokens(input, context, &ending, place, rules, error);
    entry->ending = ending.text;
    entry->ending_bytes = ending.bytes;
    side_free(&ending);
    /* Without any context the continuation starts from BOS. */
    const int64_t n_context = context->read.n_ids;
    const bool bos =
        n_context == 0 || (context->text != NULL ? rules->marks.bos_text : rules->marks.bos_ids);
    struct input_marks marks = rules->marks;
    marks.bos_text = marks.bos_ids = bos;
    if (!ok || !input_add_marks(input, place->name, marks, rules->limits->info, error)) {
        return false;
    }
    entry->first = input->n_bos + n_context;
    rules->n_token += input->n_ids;
    rules->n_token += rules->unconditional ? 1 + input->n_ids - entry->first : 0;
    return rules->n_token <= rules->limits->max_score_tokens.most ||
           input_too_many_tokens(error, place->param, rules->limits->max_score_tokens);
}

/* ---- the forms ----------------------------------------------------------------------------- */

static bool new_entries(struct score_job *job, size_t n, struct api_error *error)
{
    if (job->inputs.input == NULL) {
        job->inputs.input = calloc(n, sizeof *job->inputs.input);
        job->inputs.n = job->inputs.input != NULL ? (int)n : 0;
    }
    job->entry = calloc(n, sizeof *job->entry);
    if (job->inputs.input == NULL || job->entry == NULL) {
        return api_error_set(error, 500, "out_of_memory", NULL, "no memory for %zu items", n);
    }
    for (size_t i = 0; i < n; i++) {
        job->entry[i].words = job->entry[i].bytes = -1;
    }
    return true;
}

static bool read_documents(struct fields *fields, struct score_job *job, json_t *value,
                           struct input_marks marks, const struct api_limits *limits)
{
    struct api_error *const error = fields->error;
    const bool is_text = job->form == SCORE_TEXT;
    const char *const name = is_text ? "text" : "tokens";
    const struct input_rules rules = {.name = name,
                                      .text = is_text,
                                      .ids = !is_text,
                                      .marks = marks,
                                      .items = limits->max_score_items,
                                      .tokens = &limits->max_score_tokens};
    if (!input_read(&job->inputs, value, &rules, limits, error)) {
        return false;
    }
    if (!new_entries(job, (size_t)job->inputs.n, error)) {
        return false;
    }
    for (int i = 0; i < job->inputs.n; i++) {
        job->entry[i].first = job->inputs.input[i].n_bos;
    }
    return true;
}

/* A list of the contract's length, or an error. */
static bool check_list(const json_t *value, const char *name, const char *expected,
                       const struct api_limits *limits, struct api_error *error)
{
    const size_t n = json_array_size(value);
    if (n == 0) {
        return api_error_set(error, 400, "invalid_value", name, "%s must be %s, not empty", name,
                             expected);
    }
    return (int64_t)n <= limits->max_score_items.most ||
           input_too_many_items(error, name, n, limits->max_score_items);
}

static bool read_ranking(struct fields *fields, struct score_job *job, json_t *context_value,
                         json_t *list, struct pair_rules *rules)
{
    struct api_error *const error = fields->error;
    if (context_value == NULL || list == NULL) {
        const char *const name = context_value == NULL ? "context" : "continuations";
        return api_error_set(error, 400, "missing_field", name,
                             "%s is missing: context and continuations go together", name);
    }
    if (!check_list(list, "continuations", "a list of strings or of lists of token ids",
                    rules->limits, error) ||
        !new_entries(job, json_array_size(list), error)) {
        return false;
    }
    struct pair_side context = {0};
    struct place place = {"context", "context"};
    bool ok = pair_context(&context, context_value, &place, rules, error);
    place.param = "continuations";
    for (int i = 0; i < job->inputs.n && ok; i++) {
        (void)snprintf(place.name, sizeof place.name, "continuations[%d]", i);
        ok = pair_make(&job->inputs.input[i], &job->entry[i], &context,
                       json_array_get(list, (size_t)i), &place, rules, error);
    }
    side_free(&context);
    return ok;
}

static bool read_pair(struct score_job *job, int i, json_t *pair, struct pair_rules *rules,
                      struct api_error *error)
{
    json_t *const context_value = json_object_get(pair, "context");
    json_t *const ending_value = json_object_get(pair, "continuation");
    if (context_value == NULL || ending_value == NULL) {
        return api_error_set(error, 400, "invalid_value", "pairs",
                             "pairs[%d] must be {\"context\": ..., \"continuation\": ...}", i);
    }
    const char *key = NULL;
    json_t *value = NULL;
    json_object_foreach(pair, key, value)
    {
        if (value != context_value && value != ending_value && !json_is_null(value)) {
            return api_error_set(error, 400, "invalid_value", "pairs",
                                 "pairs[%d].%.40s: a pair takes context and continuation alone", i,
                                 key);
        }
    }
    struct pair_side context = {0};
    struct place place = {.param = "pairs"};
    (void)snprintf(place.name, sizeof place.name, "pairs[%d].context", i);
    bool ok = pair_context(&context, context_value, &place, rules, error);
    (void)snprintf(place.name, sizeof place.name, "pairs[%d].continuation", i);
    ok = ok && pair_make(&job->inputs.input[i], &job->entry[i], &context, ending_value, &place,
                         rules, error);
    side_free(&context);
    return ok;
}

static bool read_pairs(struct fields *fields, struct score_job *job, json_t *list,
                       struct pair_rules *rules)
{
    struct api_error *const error = fields->error;
    if (!check_list(list, "pairs", "a list of {\"context\", \"continuation\"}", rules->limits,
                    error) ||
        !new_entries(job, json_array_size(list), error)) {
        return false;
    }
    for (int i = 0; i < job->inputs.n; i++) {
        if (!read_pair(job, i, json_array_get(list, (size_t)i), rules, error)) {
            return false;
        }
    }
    return true;
}

/* ---- which form ---------------------------------------------------------------------------- */

enum { FORM_TEXT, FORM_TOKENS, FORM_CONTEXT, FORM_CONTINUATIONS, FORM_PAIRS, FORM_N };

static const struct {
    const char *field;
    enum score_form form;
} form_fields[FORM_N] = {[FORM_TEXT] = {"text", SCORE_TEXT},
                         [FORM_TOKENS] = {"tokens", SCORE_IDS},
                         [FORM_CONTEXT] = {"context", SCORE_RANKING},
                         [FORM_CONTINUATIONS] = {"continuations", SCORE_RANKING},
                         [FORM_PAIRS] = {"pairs", SCORE_PAIRS}};

static bool choose_form(struct fields *fields, struct score_job *job, json_t *value[FORM_N])
{
    int chosen = -1;
    for (int i = 0; i < FORM_N; i++) {
        value[i] = fields_get(fields, form_fields[i].field, NULL);
        if (value[i] == NULL) {
            continue;
        }
        if (chosen >= 0 && form_fields[chosen].form != form_fields[i].form) {
            return api_error_set(fields->error, 400, "conflicting_fields", form_fields[i].field,
                                 "%s and %s are two forms of input: give one of them",
                                 form_fields[chosen].field, form_fields[i].field);
        }
        chosen = i;
    }
    if (chosen < 0) {
        return api_error_set(fields->error, 400, "missing_field", "text",
                             "nothing to score: give text, tokens, context with continuations, or "
                             "pairs");
    }
    job->form = form_fields[chosen].form;
    return true;
}

/* Fields about what is put before, after and between the tokens. */
static void read_rules(struct fields *fields, const struct score_job *job,
                       const struct score_windows *windows, struct pair_rules *rules)
{
    static const char *const boundaries[] = {"joint", "separate", NULL};
    const struct model_info *const info = rules->limits->info;
    bool add_bos = info->add_bos;
    fields_bool(fields, "add_bos", NULL, &add_bos);
    fields_bool(fields, "append_eos", NULL, &rules->marks.eos);
    rules->marks.bos_text = add_bos;
    rules->marks.bos_ids = add_bos && json_is_true(json_object_get(fields->object, "add_bos"));
    if (windows->scheme != SCORE_SCHEME_OWN) { /* with blocks, that is added later */
        const bool first = windows->scheme == SCORE_SCHEME_LM_EVAL &&
                           (job->form == SCORE_TEXT || job->form == SCORE_IDS);
        rules->marks = (struct input_marks){.bos_text = first, .bos_ids = first};
        rules->marks.prefix = windows->prefix;
        rules->marks.special = windows->scheme == SCORE_SCHEME_SPARSE_MEMORY;
    }
    const int boundary = fields_choice(fields, "boundary", boundaries);
    rules->joint = boundary == 0;
    rules->separate = boundary == 1;
    fields_bool(fields, "unconditional", NULL, &rules->unconditional);
    if ((score_scheme_blocks(windows->scheme) || rules->marks.special) && job->form != SCORE_TEXT &&
        job->form != SCORE_IDS) {
        (void)api_error_set(fields->error, 400, "conflicting_fields", "windows",
                            "windows \"%s\" goes with text or tokens, not with a context and its "
                            "continuations",
                            score_scheme_name(windows->scheme));
    }
    if (boundary >= 0 && job->form != SCORE_RANKING && job->form != SCORE_PAIRS) {
        (void)api_error_set(fields->error, 400, "conflicting_fields", "boundary",
                            "boundary goes with context and continuations, or with pairs, not with "
                            "%s",
                            job->form == SCORE_TEXT ? "text" : "tokens");
    }
    if (rules->unconditional && job->form != SCORE_RANKING) {
        (void)api_error_set(fields->error, 400, "conflicting_fields", "unconditional",
                            "unconditional goes with context and continuations alone");
    }
    if (rules->unconditional && info->bos_id < 0) {
        (void)api_error_set(fields->error, 400, "invalid_value", "unconditional",
                            "the model has no beginning-of-text token to score endings after");
    }
}

bool score_read_forms(struct fields *fields, struct score_job *job,
                      const struct score_windows *windows, const struct api_limits *limits)
{
    json_t *value[FORM_N] = {NULL};
    struct pair_rules rules = {.limits = limits};
    if (!choose_form(fields, job, value)) {
        return false;
    }
    read_rules(fields, job, windows, &rules);
    if (fields->error->status != 0) {
        return false;
    }
    job->n_per = rules.unconditional ? 2 : 1;
    bool ok = false;
    switch (job->form) {
    case SCORE_TEXT: ok = read_documents(fields, job, value[FORM_TEXT], rules.marks, limits); break;
    case SCORE_IDS:
        ok = read_documents(fields, job, value[FORM_TOKENS], rules.marks, limits);
        break;
    case SCORE_RANKING:
        ok = read_ranking(fields, job, value[FORM_CONTEXT], value[FORM_CONTINUATIONS], &rules);
        break;
    case SCORE_PAIRS: ok = read_pairs(fields, job, value[FORM_PAIRS], &rules); break;
    }
    return ok;
}
