/* POST /v1/score: see score_labels.h. */
#include "server/score/score_labels.h"

#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- reading ------------------------------------------------------------------------------- */

static bool dialect_check(struct fields *fields)
{
    static const char *const native[] = {"text", "tokens", "context", "continuations", "pairs"};
    for (size_t i = 0; i < sizeof native / sizeof native[0]; i++) {
        if (fields_has(fields, native[i])) {
            return api_error_set(fields->error, 400, "wrong_dialect", native[i],
                                 "/v1/score takes query, items and label_token_ids; %s goes to "
                                 "/score",
                                 native[i]);
        }
    }
    return score_refuse_similarity(fields);
}

/* The prompt of one item, of texts or of ids. */
struct prompt {
    const json_t *part[2]; /* in their order */
    const char *place[2];
    bool by_text;
};

static bool join_ids(struct input *input, const struct prompt *prompt,
                     const struct api_limits *limits, struct api_error *error)
{
    int32_t *ids[2] = {NULL, NULL};
    int64_t n[2] = {0, 0};
    const char *const name = "items";
    bool ok = true;
    for (int k = 0; k < 2 && ok; k++) {
        ok = input_ids(prompt->part[k], prompt->place[k], &limits->max_score_tokens,
                       limits->info->n_vocab, &ids[k], &n[k], error);
    }
    if (ok) {
        input->n_ids = n[0] + n[1];
        input->ids = malloc((size_t)(input->n_ids + 1) * sizeof *input->ids);
        ok = input->ids != NULL ||
             api_error_set(error, 500, "out_of_memory", name, "no memory for the tokens");
    }
    for (int k = 0; k < 2 && ok; k++) {
        memcpy(input->ids + (k == 0 ? 0 : n[0]), ids[k], (size_t)n[k] * sizeof *input->ids);
    }
    free(ids[0]);
    free(ids[1]);
    return ok;
}

static bool join_text(struct input *input, const struct prompt *prompt, size_t *total,
                      const struct api_limits *limits, struct api_error *error)
{
    const char *part[2];
    size_t bytes[2];
    for (int k = 0; k < 2; k++) {
        part[k] = json_string_value(prompt->part[k]);
        bytes[k] = json_string_length(prompt->part[k]);
    }
    return score_join(input, part, bytes, total, "items", limits, error) &&
           input_tokenise(input, "items", limits, error);
}

/* The number of items, which are all of query's kind; 0: error. */
static size_t check_items(const json_t *query, const json_t *items, const struct api_limits *limits,
                          struct api_error *error)
{
    const bool by_text = json_is_string(query);
    if (!by_text && !json_is_array(query)) {
        (void)api_error_set(error, 400, "invalid_value", "query",
                            "query must be a string or a list of token ids");
        return 0;
    }
    if (by_text && limits->tokenizer == NULL) {
        (void)api_error_set(error, 400, "unsupported_parameter", "query",
                            "the model has no tokenizer: query must hold token ids, not text");
        return 0;
    }
    if (by_text && json_is_string(items)) {
        return 1;
    }
    const size_t n = json_array_size(items);
    bool fits = n > 0;
    for (size_t i = 0; i < n && fits; i++) {
        const json_t *const each = json_array_get(items, i);
        fits = by_text ? json_is_string(each) : json_is_array(each);
    }
    if (!fits) {
        (void)api_error_set(error, 400, "invalid_value", "items",
                            by_text ? "items must be a string or a list of strings, as query is "
                                      "text"
                                    : "items must be a list of lists of token ids, as query is "
                                      "token ids");
        return 0;
    }
    if ((int64_t)n > limits->max_score_items.most) {
        (void)input_too_many_items(error, "items", n, limits->max_score_items);
        return 0;
    }
    return n;
}

static bool read_prompts(struct score_job *job, const json_t *query, const json_t *items,
                         bool item_first, const struct api_limits *limits, struct api_error *error)
{
    const size_t n = check_items(query, items, limits, error);
    if (n == 0) {
        return false;
    }
    job->form = json_is_string(query) ? SCORE_TEXT : SCORE_IDS;
    job->inputs.input = calloc(n, sizeof *job->inputs.input);
    job->entry = calloc(n, sizeof *job->entry);
    if (job->inputs.input == NULL || job->entry == NULL) {
        return api_error_set(error, 500, "out_of_memory", NULL, "no memory for %zu items", n);
    }
    job->inputs.n = (int)n;
    const struct input_marks marks = {.bos_text = limits->info->add_bos};
    int64_t n_token = 0;
    size_t n_byte = 0;
    for (size_t i = 0; i < n; i++) {
        struct input *const input = &job->inputs.input[i];
        const json_t *const each = json_is_array(items) ? json_array_get(items, i) : items;
        char place[32];
        (void)snprintf(place, sizeof place, "items[%zu]", i);
        const struct prompt prompt = {
            .part = {item_first ? each : query, item_first ? query : each},
            .place = {item_first ? place : "query", item_first ? "query" : place},
            .by_text = job->form == SCORE_TEXT};
        if (!(prompt.by_text ? join_text(input, &prompt, &n_byte, limits, error)
                             : join_ids(input, &prompt, limits, error)) ||
            !input_add_marks(input, "items", marks, limits->info, error)) {
            return false;
        }
        n_token += input->n_ids;
        if (n_token > limits->max_score_tokens.most) {
            return input_too_many_tokens(error, "items", limits->max_score_tokens);
        }
        if (input->n_ids > engine_context(limits->context)) {
            return api_error_set(error, 400, "context_length_exceeded", "items",
                                 "query and item %zu have %lld tokens, more than the model's "
                                 "context (max_length=%d): shorten them",
                                 i, (long long)input->n_ids, engine_context(limits->context));
        }
        job->entry[i].first = input->n_ids; /* nothing of the prompt is scored */
    }
    return true;
}

static bool set_items(struct score_job *job, const struct api_limits *limits,
                      struct api_error *error)
{
    for (int i = 0; i < job->inputs.n; i++) {
        struct input *const input = &job->inputs.input[i];
        int32_t *const ids = input->ids;
        input->ids = NULL; /* the request's from now on */
        job->request->item[i].score_from = job->entry[i].first;
        if (!score_set_item(job, i, ids, input->n_ids, limits, error)) {
            return false;
        }
    }
    return true;
}

static bool parse_with(struct score_job *job, struct fields *fields, const int32_t *label,
                       int64_t n_label, const struct api_limits *limits)
{
    struct api_error *const error = fields->error;
    const json_t *const query = fields_get(fields, "query", NULL);
    const json_t *const items = fields_get(fields, "items", NULL);
    bool item_first = false;
    int lang = 0;
    input_refuse(fields);
    fields_bool(fields, "apply_softmax", NULL, &job->softmax);
    fields_bool(fields, "item_first", NULL, &item_first);
    input_model(fields, limits);
    overlay_read(fields, limits, &job->overlays);
    (void)input_id(fields, job->id, sizeof job->id);
    input_language(fields, limits, &lang);
    const int priority = input_priority(fields);
    const int64_t deadline_us = input_deadline(fields, limits);
    const uint64_t scope = input_cache_scope(fields);
    const char *const missing = query == NULL   ? "query"
                                : items == NULL ? "items"
                                : n_label == 0  ? "label_token_ids"
                                                : NULL;
    if (missing != NULL) {
        (void)api_error_set(error, 400, "missing_field", missing, "%s is missing", missing);
    }
    if (error->status != 0 || !read_prompts(job, query, items, item_first, limits, error)) {
        return false;
    }
    fields_finish(fields, limits->strict, job->ignored);
    if (error->status != 0 || !score_new_request(job, label, n_label, limits, error)) {
        return false;
    }
    overlay_give(job->request, &job->overlays);
    job->request->lang = lang;
    job->request->deadline_us = deadline_us;
    job->request->scope = scope;
    job->request->window = job->request->stride = engine_context(limits->context);
    return set_items(job, limits, error) && score_set_priority(job, priority, limits, error);
}

bool score_labels_parse(struct score_job *job, const char *body, size_t bytes,
                        const struct api_limits *limits, struct api_error *error)
{
    *job = (struct score_job){.n_per = 1, .logprobs = -1};
    struct fields fields;
    int32_t *label = NULL;
    int64_t n_label = 0;
    bool ok = fields_open(&fields, body, bytes, error) && dialect_check(&fields);
    if (ok) {
        score_read_targets(&fields, "label_token_ids", limits, &label, &n_label);
        ok = parse_with(job, &fields, label, n_label, limits);
    }
    free(label);
    job->body = fields.object; /* the texts live there */
    return ok;
}

/* ---- writing ------------------------------------------------------------------------------- */

/* Probabilities: of the whole vocabulary, or with softmax of the labels among themselves. Where all
 * of those are impossible, their shares are undefined: null. */
static void write_scores(struct text *out, const struct score_job *job, const struct item *item)
{
    const int n = job->request->n_target;
    double max = -(double)INFINITY;
    for (int j = 0; j < n; j++) {
        const double logprob = (double)item->out_target[j];
        max = logprob > max ? logprob : max;
    }
    double sum = 0;
    for (int j = 0; j < n; j++) {
        sum += exp((double)item->out_target[j] - max);
    }
    json_open(out, '[');
    for (int j = 0; j < n; j++) {
        const double logprob = (double)item->out_target[j];
        json_put_double(out, job->softmax ? exp(logprob - max) / sum : exp(logprob));
    }
    json_close(out, ']');
}

bool score_labels_write_piece(struct score_writer *writer, struct text *out, size_t enough,
                              const struct answer_meta *meta, bool *done, struct api_error *error)
{
    const struct score_job *const job = writer->job;
    if (!writer->begun) {
        if (!answer_check(job->request, error)) {
            return false;
        }
        json_open(out, '{');
        answer_head(out, meta, "scoring");
        json_key(out, "scores");
        json_open(out, '[');
        writer->begun = true;
    } else {
        out->comma = writer->list_comma;
    }
    for (; writer->result < job->inputs.n && out->n < enough; writer->result++) {
        write_scores(out, job, score_item(job, writer->result));
    }
    writer->list_comma = out->comma;
    *done = writer->result == job->inputs.n;
    if (*done) {
        const int64_t n_prompt = score_n_prompt(job);
        json_close(out, ']');
        answer_usage(out, job->request, n_prompt, 0);
        answer_timings(out, job->request, meta->begin_us, n_prompt, 0);
        json_close(out, '}');
    }
    return true;
}
