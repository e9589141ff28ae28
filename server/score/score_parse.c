/* From a /score body to a checked request: see score.h. */
#include "server/score/score.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    SCORE_BULK_POSITIONS = 4096, /* above this a request is bulk unless it says otherwise */
    SCORE_ENTRIES_FACTOR = 4,    /* reported log-probabilities per token of the limit */
};

bool score_refuse_similarity(struct fields *fields)
{
    static const char *const similarity[] = {"text_1", "text_2", "queries", "documents"};
    for (size_t i = 0; i < sizeof similarity / sizeof similarity[0]; i++) {
        if (fields_has(fields, similarity[i])) {
            return api_error_set(fields->error, 400, "wrong_dialect", similarity[i],
                                 "similarity scoring is not offered by a causal LM; see the "
                                 "documentation of /score: it takes text or tokens and gives "
                                 "their log-probabilities");
        }
    }
    return true;
}

static bool dialect_check(struct fields *fields)
{
    if (!score_refuse_similarity(fields)) {
        return false;
    }
    const bool has_query = fields_has(fields, "query");
    if (fields_has(fields, "items") && has_query) {
        return api_error_set(fields->error, 400, "wrong_dialect", "query",
                             "query and items are label scoring: that is /v1/score, not /score");
    }
    return true;
}

/* ---- units --------------------------------------------------------------------------------- */

static bool read_units_of(struct fields *fields, json_t *value, struct score_entry *entry)
{
    if (json_is_null(value)) {
        return true;
    }
    if (!json_is_object(value)) {
        return api_error_set(fields->error, 400, "invalid_value", "units",
                             "units must be {\"words\": n, \"bytes\": n}, or for several items a "
                             "list with one such object or null for each");
    }
    const char *key = NULL;
    json_t *each = NULL;
    json_object_foreach(value, key, each)
    {
        int64_t n = 0;
        const bool is_words = strcmp(key, "words") == 0;
        if (!is_words && strcmp(key, "bytes") != 0) {
            return api_error_set(fields->error, 400, "invalid_value", "units",
                                 "units takes words and bytes, not %.40s", key);
        }
        if (json_is_null(each)) {
            continue;
        }
        if (!fields_is_integer(each, &n) || n < 1) {
            return api_error_set(fields->error, 400, "invalid_value", "units",
                                 "units.%s must be an integer from 1", key);
        }
        *(is_words ? &entry->words : &entry->bytes) = n;
    }
    return true;
}

static bool read_units(struct fields *fields, struct score_job *job)
{
    json_t *const value = fields_get(fields, "units", NULL);
    const size_t n = (size_t)job->inputs.n;
    if (value == NULL) {
        return true;
    }
    if (!json_is_array(value)) {
        return n == 1 ? read_units_of(fields, value, &job->entry[0])
                      : api_error_set(fields->error, 400, "invalid_value", "units",
                                      "units must be a list of %zu, one for each item", n);
    }
    if (json_array_size(value) != n) {
        return api_error_set(fields->error, 400, "invalid_value", "units",
                             "units must have one entry for each item, %zu in all, not %zu", n,
                             json_array_size(value));
    }
    for (size_t i = 0; i < n; i++) {
        if (!read_units_of(fields, json_array_get(value, i), &job->entry[i])) {
            return false;
        }
    }
    return true;
}

/* ---- the rest ----------------------------------------------------------------------------- */

/* The size of the answer: bounded, so that no request can exhaust memory. */
static bool check_sizes(const struct score_job *job, const struct score_windows *windows,
                        bool has_targets, const struct api_limits *limits, struct api_error *error)
{
    const bool documents = job->form == SCORE_TEXT || job->form == SCORE_IDS;
    const bool refuse_long = windows->on_long == 1 || (windows->on_long < 0 && !documents);
    size_t trace_bytes = 0;
    int64_t slot_bytes = 0;
    int64_t n_listed = 0;
    for (int i = 0; i < job->inputs.n; i++) {
        const int64_t n_ids = job->inputs.input[i].n_ids;
        n_listed += n_ids - job->entry[i].first;
        if (job->memory >= MEMORY_TOKENS && score_scheme_blocks(windows->scheme)) {
            return api_error_set(
                error, 400, "conflicting_fields", "memory",
                "memory \"tokens\" and \"slots\" follow the text, but windows \"%s\" reads pieces "
                "of it apart: ask for \"summary\"",
                score_scheme_name(windows->scheme));
        }
        if (job->memory != MEMORY_OFF && job->entry[i].block != job->entry[i].block_used) {
            return api_error_set(error, 400, "conflicting_fields", "memory",
                                 "memory goes with all windows but \"adaptive-span\", which leaves "
                                 "out parts of the text");
        }
        if (refuse_long && n_ids - 1 + has_targets > windows->window) {
            return api_error_set(
                error, 400, "context_length_exceeded", "on_long",
                "item %d has %lld tokens, more than one window of %lld positions "
                "(max_length=%lld); on_long \"window\" scores it all the same%s",
                i, (long long)n_ids, (long long)windows->window, (long long)limits->context,
                documents ? "" : ", without what does not fit of the context's beginning");
        }
        if (job->memory == MEMORY_TOKENS && n_ids > INPUT_TRACE_POSITIONS_MAX) {
            return api_error_set(error, 400, "invalid_value", "memory",
                                 "memory \"tokens\" takes at most %d positions, but item %d has "
                                 "%lld",
                                 INPUT_TRACE_POSITIONS_MAX, i, (long long)n_ids);
        }
        if (job->memory == MEMORY_SLOTS) {
            slot_bytes += slots_bytes(&job->slots, limits->info, n_ids);
        }
        if (slot_bytes > limits->max_trace.most) {
            return slots_too_large(error, slot_bytes, limits);
        }
        if (job->memory != MEMORY_OFF) {
            trace_bytes += request_trace_bytes(limits->info, n_ids, job->memory >= MEMORY_TOKENS);
        }
        if (trace_bytes > (size_t)limits->trace_bytes.most) {
            return input_traces_too_large(error, job->inputs.n, limits);
        }
    }
    const int64_t n_entry = n_listed * (1 + job->logprobs);
    const int64_t n_entry_max = SCORE_ENTRIES_FACTOR * limits->max_score_tokens.most;
    if (n_entry > n_entry_max) {
        return api_error_set(error, 400, "too_many_tokens", "logprobs",
                             "%lld tokens with logprobs %d are %lld log-probabilities, "
                             "but %lld are the limit: send less text at once or ask for fewer",
                             (long long)n_listed, job->logprobs, (long long)n_entry,
                             (long long)n_entry_max);
    }
    return true;
}

bool score_set_item(struct score_job *job, int i, int32_t *ids, int64_t n_ids,
                    const struct api_limits *limits, struct api_error *error)
{
    struct err err = {0};
    job->request->item[i].prompt_index = i / job->n_per;
    return request_set_item(job->request, i, ids, n_ids, limits->info, &err) == ERR_OK ||
           input_item_error(error, &err);
}

/* The continuation of an item after BOS alone. */
static bool set_unconditional(struct score_job *job, int i, const struct item *item,
                              const struct api_limits *limits, struct api_error *error)
{
    const int64_t n = item->n_ids - item->score_from;
    int32_t *const ids = malloc((size_t)(1 + n) * sizeof *ids);
    if (ids == NULL) {
        return api_error_set(error, 500, "out_of_memory", NULL, "no memory for the tokens");
    }
    ids[0] = limits->info->bos_id;
    memcpy(ids + 1, item->ids + item->score_from, (size_t)n * sizeof *ids);
    job->request->item[i].bare = true;
    return score_set_item(job, i, ids, 1 + n, limits, error);
}

static bool set_items(struct score_job *job, const struct api_limits *limits,
                      struct api_error *error)
{
    for (int i = 0; i < job->inputs.n; i++) {
        struct input *const input = &job->inputs.input[i];
        struct item *const item = score_item(job, i);
        int32_t *const ids = input->ids;
        input->ids = NULL; /* the request's from now on */
        const struct score_entry *const entry = &job->entry[i];
        item->score_from = entry->block > 0 ? 1 : entry->first;
        if (job->memory == MEMORY_SLOTS) {
            item->slot_bytes =
                slots_text_bytes(slots_bytes(&job->slots, limits->info, input->n_ids));
        }
        item->block = entry->block;
        item->block_used = entry->block_used;
        if (!score_set_item(job, i * job->n_per, ids, input->n_ids, limits, error) ||
            (job->n_per == 2 && !set_unconditional(job, i * 2 + 1, item, limits, error))) {
            return false;
        }
    }
    return true;
}

void score_read_targets(struct fields *fields, const char *name, const struct api_limits *limits,
                        int32_t **target, int64_t *n_target)
{
    const json_t *const value = fields_get(fields, name, NULL);
    const size_t n = json_array_size(value);
    if (value == NULL || fields->error->status != 0) {
        return;
    }
    if (!json_is_array(value) || n == 0 || n > TARGET_MAX) {
        char count[32] = "";
        if (n > TARGET_MAX) {
            (void)snprintf(count, sizeof count, ", and has %zu", n);
        }
        (void)api_error_set(fields->error, 400, "invalid_value", name,
                            "%s must be a list of 1 to %d token ids%s", name, TARGET_MAX, count);
        return;
    }
    (void)input_ids(value, name, NULL, limits->info->n_vocab, target, n_target, fields->error);
}

/* What is requested besides the sums. */
struct score_options {
    bool entropy;
    int32_t *target; /* Owner: parse_fields. [n_target] or NULL */
    int64_t n_target;
};

static void read_score_options(struct fields *fields, struct score_job *job,
                               struct score_options *asked, const struct api_limits *limits)
{
    job->logprobs = -1;
    fields_int(fields, "logprobs", NULL, 0, limits->max_logprobs, &job->logprobs);
    fields_bool(fields, "ranks", NULL, &job->ranks);
    fields_bool(fields, "entropy", NULL, &asked->entropy);
    fields_bool(fields, "stream", NULL, &job->stream);
    job->memory = input_memory(fields, limits);
    slots_read(fields, limits, job->memory, &job->slots);
    ablate_read(fields, limits, &job->ablate);
    overlay_read(fields, limits, &job->overlays);
    score_read_targets(fields, "target_ids", limits, &asked->target, &asked->n_target);
}

bool score_set_priority(struct score_job *job, int priority, const struct api_limits *limits,
                        struct api_error *error)
{
    struct request *const request = job->request;
    const int64_t n = request_positions(request);
    if (n > limits->max_score_positions.most) {
        return api_error_set(error, 400, "too_many_tokens", "stride",
                             "the windows of this request, with a stride of %lld, make the model "
                             "compute %lld positions, but %lld are the limit of one request "
                             "(%s): use a larger stride or send less at once",
                             (long long)request->stride, (long long)n,
                             (long long)limits->max_score_positions.most,
                             limits->max_score_positions.flag);
    }
    const bool bulk = n > SCORE_BULK_POSITIONS;
    request->priority = priority >= 0 ? (enum priority)priority
                        : bulk        ? PRIORITY_BULK
                                      : PRIORITY_INTERACTIVE;
    return true;
}

bool score_new_request(struct score_job *job, const int32_t *target, int64_t n_target,
                       const struct api_limits *limits, struct api_error *error)
{
    struct request *const request = request_new(REQUEST_SCORE, job->inputs.n * job->n_per);
    job->request = request;
    if (request == NULL) {
        return api_error_set(error, 500, "out_of_memory", NULL, "no memory for the request");
    }
    request_use_memory(request, limits->requests);
    request->n_top = 0;
    request->n_target = (int)n_target;
    if (n_target > 0) {
        memcpy(request->target, target, (size_t)n_target * sizeof *target);
    }
    return true;
}

static bool make_request(struct score_job *job, struct fields *fields,
                         const struct score_options *asked, const struct api_limits *limits)
{
    struct api_error *const error = fields->error;
    int lang = 0;
    input_model(fields, limits);
    job->id_is_integer = input_id(fields, job->id, sizeof job->id);
    input_language(fields, limits, &lang);
    const int priority = input_priority(fields);
    const int64_t deadline_us = input_deadline(fields, limits);
    const uint64_t scope = input_cache_scope(fields);
    struct score_windows windows;
    score_windows_read(fields, &windows, limits);
    job->scheme = windows.scheme;
    job->bptt = windows.bptt;
    /* Tokenising is the expensive part: it is not done for a request that is already wrong. */
    if (error->status != 0 || !score_read_forms(fields, job, &windows, limits) ||
        !score_windows_cut(job, &windows, limits, error) || !read_units(fields, job) ||
        !check_sizes(job, &windows, asked->n_target > 0, limits, error)) {
        return false;
    }
    fields_finish(fields, limits->strict, job->ignored);
    if (error->status != 0 ||
        !score_new_request(job, asked->target, asked->n_target, limits, error)) {
        return false;
    }
    struct request *const request = job->request;
    ablate_give(request, &job->ablate);
    overlay_give(request, &job->overlays);
    request->lang = lang;
    request->deadline_us = deadline_us;
    request->scope = scope;
    request->n_top = job->logprobs > 0 ? job->logprobs : 0;
    request->entropy = asked->entropy;
    request->window = windows.window;
    request->is_apart = windows.scheme == SCORE_SCHEME_SPARSE_MEMORY;
    request->stride = windows.stride;
    request->trace_memory = job->memory != MEMORY_OFF;
    request->trace_tokens = job->memory >= MEMORY_TOKENS;
    return set_items(job, limits, error) && score_set_priority(job, priority, limits, error);
}

static bool parse_fields(struct score_job *job, struct fields *fields,
                         const struct api_limits *limits)
{
    if (!dialect_check(fields)) {
        return false;
    }
    struct score_options asked = {0};
    input_refuse(fields);
    read_score_options(fields, job, &asked, limits);
    const bool ok = make_request(job, fields, &asked, limits);
    free(asked.target);
    return ok;
}

bool score_parse(struct score_job *job, const char *body, size_t bytes,
                 const struct api_limits *limits, struct api_error *error)
{
    *job = (struct score_job){0};
    struct fields fields;
    bool ok = fields_open(&fields, body, bytes, error);
    fields.defaults = limits->defaults;
    ok = ok && parse_fields(job, &fields, limits);
    job->body = fields.object; /* the texts live there */
    return ok;
}

void score_free(struct score_job *job)
{
    request_release(job->request);
    request_ablate_free(&job->ablate);
    overlays_drop(&job->overlays);
    input_list_free(&job->inputs);
    free(job->entry);
    json_decref(job->body);
    *job = (struct score_job){0};
}
