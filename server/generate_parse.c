/* From a /generate body to a checked request: see generate.h. */
#include "server/generate.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

/* Fields of other dialects and servers that would change the answer. */
static const char *const refused[] = {"suffix",
                                      "best_of",
                                      "use_beam_search",
                                      "length_penalty",
                                      "typical_p",
                                      "watermark",
                                      "truncate",
                                      "grammar",
                                      "json_schema",
                                      "response_format",
                                      "tools",
                                      "tool_choice",
                                      "guided_json",
                                      "guided_regex",
                                      "guided_choice",
                                      "guided_grammar",
                                      "images",
                                      "image_data",
                                      "adapter_id",
                                      "lora",
                                      "mirostat",
                                      "tfs_z",
                                      "dry_multiplier",
                                      "bad_words",
                                      "logits_processors",
                                      NULL};

static bool dialect_check(struct fields *fields)
{
    static const char *const other[][2] = {
        {"inputs", "the inputs/parameters dialect is not served by this build: send prompt and the "
                   "sampling fields at the top level"},
        {"sampling_params", "sampling_params is another server's dialect: send prompt and the "
                            "sampling fields at the top level"},
        {"text_input", "text_input is another server's dialect: send prompt"},
        {"input_ids", "input_ids is another server's dialect: send prompt with a list of ids"},
    };
    for (size_t i = 0; i < sizeof other / sizeof other[0]; i++) {
        if (json_object_get(fields->object, other[i][0]) != NULL) {
            return api_error_set(fields->error, 400, "wrong_dialect", other[i][0], "%s",
                                 other[i][1]);
        }
    }
    return true;
}

/* ---- sampling fields ----------------------------------------------------------------------- */

static void read_numbers(struct fields *fields, struct sampling *s, const struct model_info *info)
{
    s->temperature = 1;
    s->top_p = 1;
    s->repetition = 1;
    fields_float(fields, "temperature", NULL, (struct fields_range){0, 2, false, false},
                 &s->temperature);
    fields_float(fields, "top_p", NULL, (struct fields_range){0, 1, true, false}, &s->top_p);
    fields_float(fields, "min_p", NULL, (struct fields_range){0, 1, false, true}, &s->min_p);
    fields_float(fields, "repetition_penalty", "repeat_penalty",
                 (struct fields_range){0, 10, true, false}, &s->repetition);
    fields_float(fields, "presence_penalty", NULL, (struct fields_range){-2, 2, false, false},
                 &s->presence);
    fields_float(fields, "frequency_penalty", NULL, (struct fields_range){-2, 2, false, false},
                 &s->frequency);
    fields_int(fields, "top_k", NULL, -1, info->n_vocab, &s->top_k);
    s->top_k = s->top_k == -1 ? 0 : s->top_k;
    fields_bool(fields, "ignore_eos", &s->ignore_eos);
    fields_bool(fields, "include_stop", &s->include_stop);
    if (!fields_u64(fields, "seed", &s->seed)) {
        CHECK(getrandom(&s->seed, sizeof s->seed, 0) == sizeof s->seed);
        /* Many JSON readers keep 53 bits: a seed of ours survives them all. */
        s->seed &= (UINT64_C(1) << 53) - 1;
    }
}

static void read_stop(struct fields *fields, struct sampling *s, const struct api_limits *limits)
{
    json_t *const value = fields_get(fields, "stop", NULL);
    if (value == NULL) {
        return;
    }
    const bool whole = json_is_string(value);
    const size_t n = whole ? 1 : json_array_size(value);
    if ((!whole && !json_is_array(value)) || n > STOP_MAX) {
        (void)api_error_set(fields->error, 400, "invalid_value", "stop",
                            "stop must be a string or a list of at most %d strings", STOP_MAX);
        return;
    }
    if (n > 0 && limits->tokenizer == NULL) {
        (void)api_error_set(fields->error, 400, "unsupported_parameter", "stop",
                            "the model has no tokenizer: use stop_token_ids");
        return;
    }
    for (size_t i = 0; i < n; i++) {
        const json_t *const each = whole ? value : json_array_get(value, i);
        const size_t bytes = json_string_length(each);
        if (!json_is_string(each) || bytes < 1 || bytes > STOP_BYTES_MAX) {
            (void)api_error_set(fields->error, 400, "invalid_value", "stop",
                                "stop[%zu] must be a string of 1 ... %d bytes", i, STOP_BYTES_MAX);
            return;
        }
        memcpy(s->stop[i].text, json_string_value(each), bytes);
        s->stop[i].bytes = (int)bytes;
    }
    s->n_stop = (int)n;
}

/* A bounded list of distinct ids: repeats mean the same and are dropped. */
static void read_id_list(struct fields *fields, const char *name, int max, int n_vocab,
                         int32_t *list, int *n_list)
{
    json_t *const value = fields_get(fields, name, NULL);
    if (value == NULL) {
        return;
    }
    if (!json_is_array(value) || json_array_size(value) > (size_t)max) {
        (void)api_error_set(fields->error, 400, "invalid_value", name,
                            "%s must be a list of at most %d token ids", name, max);
        return;
    }
    int32_t *ids = NULL;
    int64_t n = 0;
    if (!input_ids(value, name, max, n_vocab, &ids, &n, fields->error)) {
        return;
    }
    int n_kept = 0;
    for (int64_t i = 0; i < n; i++) {
        bool seen = false;
        for (int j = 0; j < n_kept && !seen; j++) {
            seen = list[j] == ids[i];
        }
        if (!seen) {
            list[n_kept++] = ids[i];
        }
    }
    *n_list = n_kept;
    free(ids);
}

static void read_bias(struct fields *fields, struct sampling *s, int n_vocab)
{
    json_t *const value = fields_get(fields, "logit_bias", NULL);
    if (value == NULL) {
        return;
    }
    if (!json_is_object(value) || json_object_size(value) > LOGIT_BIAS_MAX) {
        (void)api_error_set(fields->error, 400, "invalid_value", "logit_bias",
                            "logit_bias must be an object of at most %d entries \"id\": number",
                            LOGIT_BIAS_MAX);
        return;
    }
    const char *key = NULL;
    json_t *each = NULL;
    json_object_foreach(value, key, each)
    {
        const size_t digits = strspn(key, "0123456789");
        if (digits == 0 || digits > 9 || key[digits] != '\0') {
            (void)api_error_set(fields->error, 400, "invalid_value", "logit_bias",
                                "logit_bias: \"%.20s\" is not a token id", key);
            return;
        }
        const int id = atoi(key);
        const double bias = json_number_value(each);
        if (id >= n_vocab) {
            (void)api_error_set(fields->error, 400, "token_out_of_range", "logit_bias",
                                "logit_bias: %d is not a token id, they are 0 ... %d", id,
                                n_vocab - 1);
            return;
        }
        if (!json_is_number(each) || !(bias >= -100 && bias <= 100)) {
            (void)api_error_set(fields->error, 400, "invalid_value", "logit_bias",
                                "logit_bias of token %d must be a number in [-100, 100]", id);
            return;
        }
        for (int i = 0; i < s->n_bias; i++) { /* "7" and "07" */
            if (s->bias[i].token == id) {
                (void)api_error_set(fields->error, 400, "conflicting_fields", "logit_bias",
                                    "logit_bias holds token %d twice", id);
                return;
            }
        }
        s->bias[s->n_bias].token = id;
        s->bias[s->n_bias++].bias = (float)bias;
    }
}

/* ---- lengths ------------------------------------------------------------------------------- */

/* max_tokens: as asked for, else the default or what the context leaves if that is less. */
static bool read_lengths(struct fields *fields, struct generate_job *job, struct sampling *sampling,
                         const struct api_limits *limits)
{
    int max_tokens = -1;
    fields_int(fields, "max_tokens", "max_new_tokens", 0, INT32_MAX, &max_tokens);
    int n_predict = -1;
    fields_int(fields, "n_predict", NULL, 0, INT32_MAX, &n_predict);
    if (n_predict >= 0 && max_tokens >= 0) {
        return api_error_set(fields->error, 400, "conflicting_fields", "n_predict",
                             "n_predict and max_tokens mean the same: give one of them");
    }
    max_tokens = max_tokens >= 0 ? max_tokens : n_predict;
    fields_int(fields, "min_tokens", NULL, 0, INT32_MAX, &sampling->min_tokens);
    if (fields->error->status != 0) {
        return false;
    }
    int64_t longest = 0;
    for (int i = 0; i < job->inputs.n; i++) {
        longest = job->inputs.input[i].n_ids > longest ? job->inputs.input[i].n_ids : longest;
    }
    const int64_t context = limits->context > 0 ? limits->context : INT32_MAX / 2;
    const int64_t asked = max_tokens >= 0 ? max_tokens : 1; /* the default shrinks, but not to 0 */
    const int64_t room = longest < context ? context - longest : 0;
    if (longest + asked > context && (max_tokens < 0 || room == 0)) {
        return api_error_set(fields->error, 400, "context_length_exceeded", "prompt",
                             "the prompt has %lld tokens, but the model's context is %lld "
                             "(max_length=%lld), of which at least one is generated: shorten it",
                             (long long)longest, (long long)context, (long long)context);
    }
    if (longest + asked > context) {
        return api_error_set(fields->error, 400, "context_length_exceeded", "max_tokens",
                             "the prompt has %lld tokens and max_tokens is %d, together %lld, but "
                             "the model's context is %lld (max_length=%lld): ask for at most %lld",
                             (long long)longest, max_tokens, (long long)(longest + asked),
                             (long long)context, (long long)context, (long long)room);
    }
    if (max_tokens < 0) {
        max_tokens = room < limits->default_max_tokens ? (int)room : limits->default_max_tokens;
    }
    sampling->max_tokens = max_tokens;
    if (sampling->min_tokens > max_tokens) {
        return api_error_set(fields->error, 400, "conflicting_fields", "min_tokens",
                             "min_tokens is %d, but max_tokens is %d", sampling->min_tokens,
                             max_tokens);
    }
    return true;
}

/* ---- the whole ----------------------------------------------------------------------------- */

static bool read_prompt(struct fields *fields, struct generate_job *job,
                        const struct api_limits *limits)
{
    json_t *const prompt = fields_get(fields, "prompt", NULL);
    if (prompt == NULL) {
        return api_error_set(fields->error, 400, "missing_field", "prompt", "prompt is missing");
    }
    const struct input_marks marks = {.bos_text = limits->info->add_bos};
    /* The sum of all prompts is bounded by the queue; each one by the context, in read_lengths. */
    return input_read(&job->inputs, prompt, "prompt", true, true, marks, limits->max_items,
                      INT32_MAX, limits, fields->error);
}

/* Gives the inputs' ids to the items of a new request. */
static bool make_request(struct generate_job *job, struct request *request,
                         const struct api_limits *limits, struct api_error *error)
{
    const struct model_info *const info = limits->info;
    const bool traces = job->memory != MEMORY_OFF;
    size_t trace_bytes = 0;
    for (int i = 0; i < request->n_item; i++) {
        struct input *const input = &job->inputs.input[i / job->n_sample];
        const int64_t n_position = input->n_ids + request->sampling.max_tokens;
        if (job->memory == MEMORY_TOKENS && n_position > INPUT_TRACE_POSITIONS_MAX) {
            return api_error_set(error, 400, "invalid_value", "memory",
                                 "memory \"tokens\" takes at most %d positions, but prompt and "
                                 "max_tokens are %lld",
                                 INPUT_TRACE_POSITIONS_MAX, (long long)n_position);
        }
        trace_bytes += traces ? request_trace_bytes(info, n_position, request->trace_tokens) : 0;
        if (trace_bytes > INPUT_TRACE_BYTES_MAX) {
            return api_error_set(
                error, 400, "too_many_items", "memory",
                "the memory telemetry of %d choices needs more than %d MiB: ask for "
                "fewer at once",
                request->n_item, INPUT_TRACE_BYTES_MAX >> 20);
        }
        int32_t *ids = malloc((size_t)input->n_ids * sizeof *ids);
        if (ids == NULL) {
            return api_error_set(error, 500, "out_of_memory", NULL, "no memory for the request");
        }
        memcpy(ids, input->ids, (size_t)input->n_ids * sizeof *ids);
        request->item[i].prompt_index = i / job->n_sample;
        request->item[i].sample_index = i % job->n_sample;
        struct err err = {0};
        if (request_set_item(request, i, ids, input->n_ids, info, &err) != ERR_OK) {
            return api_error_set(error, err.code == ERR_MEMORY ? 500 : 400,
                                 err.code == ERR_MEMORY ? "out_of_memory" : "invalid_value", NULL,
                                 "%s", err.message);
        }
    }
    return true;
}

static void read_shape(struct fields *fields, struct generate_job *job, struct sampling *sampling,
                       const struct api_limits *limits)
{
    job->n_sample = 1;
    job->logprobs = -1;
    fields_int(fields, "n", NULL, 1, GENERATE_SAMPLE_MAX, &job->n_sample);
    fields_int(fields, "logprobs", NULL, 0, limits->max_logprobs, &job->logprobs);
    fields_bool(fields, "echo", &job->echo);
    fields_bool(fields, "stream", &job->stream);
    fields_bool(fields, "details", &job->details);
    job->memory = input_memory(fields, limits);
    input_model(fields, limits);
    input_id(fields, job->id, sizeof job->id);
    if (job->n_sample > 1 && sampling->temperature <= 0) {
        (void)api_error_set(fields->error, 400, "conflicting_fields", "n",
                            "n is %d, but with temperature 0 all samples would be the same",
                            job->n_sample);
    }
}

static bool parse_fields(struct generate_job *job, struct fields *fields, struct sampling *sampling,
                         const struct api_limits *limits)
{
    struct api_error *const error = fields->error;
    if (!dialect_check(fields)) {
        return false;
    }
    input_refuse(fields, refused);
    read_numbers(fields, sampling, limits->info);
    read_stop(fields, sampling, limits);
    read_id_list(fields, "stop_token_ids", STOP_ID_MAX, limits->info->n_vocab, sampling->stop_id,
                 &sampling->n_stop_id);
    read_id_list(fields, "allowed_token_ids", ALLOW_MAX, limits->info->n_vocab, sampling->allow,
                 &sampling->n_allow);
    read_bias(fields, sampling, limits->info->n_vocab);
    read_shape(fields, job, sampling, limits);
    int lang = 0;
    input_language(fields, limits, &lang);
    const int priority = input_priority(fields);
    const int64_t deadline_us = input_deadline(fields, limits);
    const json_t *const allowed = json_object_get(fields->object, "allowed_token_ids");
    if (json_is_array(allowed) && json_array_size(allowed) == 0) {
        (void)api_error_set(error, 400, "invalid_value", "allowed_token_ids",
                            "allowed_token_ids is empty: nothing could be generated");
    }
    /* Tokenising is the dear part: not for a request that is wrong already. */
    if (error->status != 0 || !read_prompt(fields, job, limits) ||
        !read_lengths(fields, job, sampling, limits)) {
        return false;
    }
    fields_finish(fields, limits->strict, job->ignored);
    if (error->status != 0) {
        return false;
    }
    job->request = request_new(REQUEST_GENERATE, job->inputs.n * job->n_sample);
    if (job->request == NULL) {
        return api_error_set(error, 500, "out_of_memory", NULL, "no memory for the request");
    }
    struct request *const request = job->request;
    request->sampling = *sampling;
    request->lang = lang;
    request->priority = priority < 0 ? PRIORITY_INTERACTIVE : (enum priority)priority;
    request->deadline_us = deadline_us;
    request->n_top = job->logprobs < 0 && job->stream ? 0 : job->logprobs;
    request->echo = job->echo && job->logprobs >= 0;
    request->trace_memory = job->memory != MEMORY_OFF;
    request->trace_tokens = job->memory == MEMORY_TOKENS;
    return make_request(job, request, limits, error);
}

bool generate_parse(struct generate_job *job, const char *body, size_t bytes,
                    const struct api_limits *limits, struct api_error *error)
{
    *job = (struct generate_job){0};
    struct fields fields;
    struct sampling *const sampling = calloc(1, sizeof *sampling);
    bool ok = sampling != NULL ||
              api_error_set(error, 500, "out_of_memory", NULL, "no memory for the request");
    if (ok) {
        ok = fields_open(&fields, body, bytes, error) &&
             parse_fields(job, &fields, sampling, limits);
        job->body = fields.object; /* the texts live there */
    }
    free(sampling);
    return ok;
}

void generate_free(struct generate_job *job)
{
    request_release(job->request);
    input_list_free(&job->inputs);
    json_decref(job->body);
    *job = (struct generate_job){0};
}
