/* From a /score body to a checked request: see score.h. */
#include "server/score.h"

#include <stdlib.h>
#include <string.h>

enum {
    SCORE_BULK_TOKENS = 4096, /* above this a request is bulk unless it says otherwise */
    SCORE_ENTRIES_FACTOR = 4, /* reported log-probabilities per token of the limit */
};

/* Forms and fields of the contract that this build does not serve yet. */
static const char *const refused[] = {"context",       "continuations", "pairs",  "boundary",
                                      "unconditional", "target_ids",    "stream", NULL};

static bool dialect_check(struct fields *fields)
{
    static const char *const similarity[] = {"text_1", "text_2", "queries", "documents"};
    for (size_t i = 0; i < sizeof similarity / sizeof similarity[0]; i++) {
        if (json_object_get(fields->object, similarity[i]) != NULL) {
            return api_error_set(fields->error, 400, "wrong_dialect", similarity[i],
                                 "similarity scoring is not offered by a causal LM; see the "
                                 "documentation of /score: "
                                 "it takes text or tokens and gives their log-probabilities");
        }
    }
    if (json_object_get(fields->object, "query") != NULL &&
        json_object_get(fields->object, "items") != NULL) {
        return api_error_set(fields->error, 400, "wrong_dialect", "query",
                             "query and items are label scoring: that is /v1/score, not /score");
    }
    return true;
}

static bool read_units_of(struct fields *fields, json_t *value, struct score_units *units)
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
        *(is_words ? &units->words : &units->bytes) = n;
    }
    return true;
}

static bool read_units(struct fields *fields, struct score_job *job)
{
    json_t *const value = fields_get(fields, "units", NULL);
    const size_t n = (size_t)job->inputs.n;
    job->units = malloc(n * sizeof *job->units);
    if (job->units == NULL) {
        return api_error_set(fields->error, 500, "out_of_memory", NULL, "no memory for units");
    }
    for (size_t i = 0; i < n; i++) {
        job->units[i] = (struct score_units){-1, -1};
    }
    if (value == NULL) {
        return true;
    }
    if (!json_is_array(value)) {
        return n == 1 ? read_units_of(fields, value, &job->units[0])
                      : api_error_set(fields->error, 400, "invalid_value", "units",
                                      "units must be a list of %zu, one for each item", n);
    }
    if (json_array_size(value) != n) {
        return api_error_set(fields->error, 400, "invalid_value", "units",
                             "units has %zu entries for %zu items", json_array_size(value), n);
    }
    for (size_t i = 0; i < n; i++) {
        if (!read_units_of(fields, json_array_get(value, i), &job->units[i])) {
            return false;
        }
    }
    return true;
}

/* text or tokens, and what goes around them. */
static bool read_inputs(struct fields *fields, struct score_job *job,
                        const struct api_limits *limits)
{
    json_t *const text = fields_get(fields, "text", NULL);
    json_t *const tokens = fields_get(fields, "tokens", NULL);
    if (text != NULL && tokens != NULL) {
        return api_error_set(fields->error, 400, "conflicting_fields", "tokens",
                             "text and tokens are two forms of input: give one of them");
    }
    if (text == NULL && tokens == NULL) {
        return api_error_set(fields->error, 400, "missing_field", "text",
                             "text or tokens is missing");
    }
    job->by_text = text != NULL;
    struct input_marks marks = {.bos_text = limits->info->add_bos};
    bool add_bos = job->by_text && limits->info->add_bos;
    fields_bool(fields, "add_bos", &add_bos);
    fields_bool(fields, "append_eos", &marks.eos);
    marks.bos_text = add_bos;
    marks.bos_ids = add_bos;
    return fields->error->status == 0 &&
           input_read(&job->inputs, job->by_text ? text : tokens, job->by_text ? "text" : "tokens",
                      job->by_text, !job->by_text, marks, limits->max_score_items,
                      limits->max_score_tokens, limits, fields->error);
}

/* max_context and stride, with defaults. */
struct windows {
    int64_t window, stride;
    bool refuse_long;
};

static struct windows read_windows(struct fields *fields, const struct api_limits *limits)
{
    static const char *const on_long[] = {"window", "error", NULL};
    struct windows w = {.window = limits->context};
    fields_int64(fields, "max_context", 1, limits->context, &w.window);
    w.stride = w.window;
    fields_int64(fields, "stride", 1, w.window, &w.stride);
    w.refuse_long = fields_choice(fields, "on_long", on_long) == 1;
    return w;
}

/* What the answer would hold: bounded, so that no request can exhaust memory. */
static bool check_sizes(const struct score_job *job, const struct windows *windows,
                        const struct api_limits *limits, struct api_error *error)
{
    size_t trace_bytes = 0;
    for (int i = 0; i < job->inputs.n; i++) {
        const int64_t n_ids = job->inputs.input[i].n_ids;
        if (windows->refuse_long && n_ids - 1 > windows->window) {
            return api_error_set(error, 400, "context_length_exceeded", "on_long",
                                 "item %d has %lld tokens, more than one window of %lld positions "
                                 "(max_length=%lld), and on_long is \"error\"",
                                 i, (long long)n_ids, (long long)windows->window,
                                 (long long)limits->context);
        }
        if (job->memory == MEMORY_TOKENS && n_ids > INPUT_TRACE_POSITIONS_MAX) {
            return api_error_set(error, 400, "invalid_value", "memory",
                                 "memory \"tokens\" takes at most %d positions, but item %d has "
                                 "%lld",
                                 INPUT_TRACE_POSITIONS_MAX, i, (long long)n_ids);
        }
        if (job->memory != MEMORY_OFF) {
            trace_bytes += request_trace_bytes(limits->info, n_ids, job->memory == MEMORY_TOKENS);
        }
        if (trace_bytes > INPUT_TRACE_BYTES_MAX) {
            return api_error_set(error, 400, "too_many_items", "memory",
                                 "the memory telemetry of %d items needs more than %d MiB: send "
                                 "fewer at once",
                                 job->inputs.n, INPUT_TRACE_BYTES_MAX >> 20);
        }
    }
    const int64_t n_entry = score_n_prompt(job) * (1 + job->logprobs);
    const int64_t n_entry_max = SCORE_ENTRIES_FACTOR * limits->max_score_tokens;
    if (n_entry > n_entry_max) {
        return api_error_set(error, 400, "too_many_tokens", "logprobs",
                             "%lld tokens with %d alternatives each are %lld log-probabilities, "
                             "but %lld are the limit: send less text at once or ask for fewer",
                             (long long)score_n_prompt(job), job->logprobs, (long long)n_entry,
                             (long long)n_entry_max);
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
        struct err err = {0};
        job->request->item[i].prompt_index = i;
        if (request_set_item(job->request, i, ids, input->n_ids, limits->info, &err) != ERR_OK) {
            return api_error_set(error, err.code == ERR_MEMORY ? 500 : 400,
                                 err.code == ERR_MEMORY ? "out_of_memory" : "invalid_value", NULL,
                                 "%s", err.message);
        }
    }
    return true;
}

static bool parse_fields(struct score_job *job, struct fields *fields,
                         const struct api_limits *limits)
{
    struct api_error *const error = fields->error;
    if (!dialect_check(fields)) {
        return false;
    }
    input_refuse(fields, refused);
    bool entropy = false;
    bool stream = false;
    int lang = 0;
    job->logprobs = -1;
    fields_int(fields, "logprobs", NULL, 0, limits->max_logprobs, &job->logprobs);
    fields_bool(fields, "ranks", &job->ranks);
    fields_bool(fields, "entropy", &entropy);
    fields_bool(fields, "stream", &stream); /* true was refused above */
    job->memory = input_memory(fields, limits);
    input_model(fields, limits);
    input_id(fields, job->id, sizeof job->id);
    input_language(fields, limits, &lang);
    const int priority = input_priority(fields);
    const int64_t deadline_us = input_deadline(fields, limits);
    const struct windows windows = read_windows(fields, limits);
    /* Tokenising is the dear part: not for a request that is wrong already. */
    if (error->status != 0 || !read_inputs(fields, job, limits) || !read_units(fields, job) ||
        !check_sizes(job, &windows, limits, error)) {
        return false;
    }
    fields_finish(fields, limits->strict, job->ignored);
    if (error->status != 0) {
        return false;
    }
    struct request *const request = request_new(REQUEST_SCORE, job->inputs.n);
    job->request = request;
    if (request == NULL) {
        return api_error_set(error, 500, "out_of_memory", NULL, "no memory for the request");
    }
    const bool bulk = score_n_prompt(job) > SCORE_BULK_TOKENS;
    request->priority = priority >= 0 ? (enum priority)priority
                        : bulk        ? PRIORITY_BULK
                                      : PRIORITY_INTERACTIVE;
    request->lang = lang;
    request->deadline_us = deadline_us;
    request->n_top = job->logprobs > 0 ? job->logprobs : 0;
    request->entropy = entropy;
    request->window = windows.window;
    request->stride = windows.stride;
    request->trace_memory = job->memory != MEMORY_OFF;
    request->trace_tokens = job->memory == MEMORY_TOKENS;
    return set_items(job, limits, error);
}

bool score_parse(struct score_job *job, const char *body, size_t bytes,
                 const struct api_limits *limits, struct api_error *error)
{
    *job = (struct score_job){0};
    struct fields fields;
    const bool ok = fields_open(&fields, body, bytes, error) && parse_fields(job, &fields, limits);
    job->body = fields.object; /* the texts live there */
    return ok;
}

void score_free(struct score_job *job)
{
    request_release(job->request);
    input_list_free(&job->inputs);
    free(job->units);
    json_decref(job->body);
    *job = (struct score_job){0};
}
