/* From the bytes of a request to a checked struct request (see generate.h), and the fields of the
 * native dialect. */
#include "server/generate/generate_read.h"
#include "server/generate/tgi.h"

#include <jansson.h>
#include <stdlib.h>
#include <string.h>

/* ---- the native dialect -------------------------------------------------------------------- */

static bool dialect_check(struct fields *fields)
{
    static const char *const other[][2] = {
        {"inputs", "inputs is another server's dialect: send prompt alone"},
        {"sampling_params", "sampling_params is another server's dialect: send prompt and the "
                            "sampling fields at the top level"},
        {"text_input", "text_input is another server's dialect: send prompt"},
        {"input_ids", "input_ids is another server's dialect: send prompt with a list of ids"},
    };
    for (size_t i = 0; i < sizeof other / sizeof other[0]; i++) {
        if (fields_has(fields, other[i][0])) {
            return api_error_set(fields->error, 400, "wrong_dialect", other[i][0], "%s",
                                 other[i][1]);
        }
    }
    return true;
}

static void read_shape(struct fields *fields, struct generate_job *job,
                       const struct api_limits *limits)
{
    fields_int(fields, "logprobs", NULL, 0, limits->max_logprobs, &job->logprobs);
    fields_bool(fields, "echo", NULL, &job->echo);
    fields_bool(fields, "stream", NULL, &job->stream);
    fields_bool(fields, "details", NULL, &job->details);
    job->memory = input_memory(fields, limits);
    slots_read(fields, limits, job->memory, &job->slots);
    ablate_read(fields, limits, &job->ablate);
    input_model(fields, limits);
    job->id_is_integer = input_id(fields, job->id, sizeof job->id);
    input_language(fields, limits, &job->lang);
    const int priority = input_priority(fields);
    job->priority = priority < 0 ? PRIORITY_INTERACTIVE : (enum priority)priority;
    /* A stream reports each token's log-probability. */
    job->n_top = job->logprobs < 0 && job->stream ? 0 : job->logprobs;
}

/* max_tokens under one of its three names; *used becomes the name. -1 = none was given. */
static int read_max_tokens(struct fields *fields, const char **used)
{
    static const char *const names[] = {"max_tokens", "max_new_tokens", "n_predict"};
    int max_tokens = -1;
    *used = NULL;
    for (int i = 0; i < 3; i++) {
        if (!fields_has(fields, names[i])) {
            continue;
        }
        if (*used != NULL) {
            (void)api_error_set(fields->error, 400, "conflicting_fields", names[i],
                                "%s and %s mean the same: give one of them", *used, names[i]);
        }
        *used = names[i];
    }
    *used = *used != NULL ? *used : names[0]; /* an option may stand for it */
    fields_int(fields, *used, NULL, 0, INT32_MAX, &max_tokens);
    return max_tokens;
}

static bool native_read(struct generate_job *job, struct fields *fields, struct sampling *sampling,
                        const struct api_limits *limits)
{
    if (!dialect_check(fields)) {
        return false;
    }
    generate_read_numbers(fields, sampling, limits->info, &limits->info->sampling);
    generate_read_seed(fields, sampling, false);
    input_refuse(fields);
    generate_read_stop(fields, sampling, limits);
    generate_read_ids(fields, sampling, limits);
    generate_read_n(fields, job, sampling);
    generate_read_best_of(fields, job);
    fields_bool(fields, "include_stop", NULL, &sampling->include_stop);
    fields_int(fields, "min_tokens", NULL, 0, INT32_MAX, &sampling->min_tokens);
    read_shape(fields, job, limits);
    const char *max_name = NULL;
    const int max_tokens = read_max_tokens(fields, &max_name);
    return generate_read_prompt(fields, job, "prompt", true, limits) &&
           generate_fit(fields, job, sampling, limits, max_name, max_tokens,
                        limits->default_max_tokens);
}

const struct generate_dialect generate_native = {.id_prefix = "",
                                                 .end = "data: [DONE]\n\n",
                                                 .read = native_read,
                                                 .choice = native_choice_parts,
                                                 .event = native_event_parts};

/* "inputs" without "prompt" is Text Generation Inference's request at the same route. */
static bool route_read(struct generate_job *job, struct fields *fields, struct sampling *sampling,
                       const struct api_limits *limits)
{
    const bool is_tgi =
        !fields_has(fields, "prompt") && json_object_get(fields->object, "inputs") != NULL;
    job->dialect = is_tgi ? &tgi_dialect : &generate_native;
    return job->dialect->read(job, fields, sampling, limits);
}

const struct generate_dialect generate_route = {.read = route_read};

/* ---- the whole ----------------------------------------------------------------------------- */

/* Gives the inputs' ids to the items of a new request. */
static bool make_request(struct generate_job *job, struct request *request,
                         const struct api_limits *limits, struct api_error *error)
{
    const struct model_info *const info = limits->info;
    const bool traces = job->memory != MEMORY_OFF;
    size_t trace_bytes = 0;
    int64_t slot_bytes = 0;
    for (int i = 0; i < request->n_item; i++) {
        struct input *const input = &job->inputs.input[i / job->n_sample];
        /* The default does not fit after every prompt: each item gets what it would get alone. */
        const int64_t room = engine_context(limits->context) - input->n_ids;
        const bool short_of_room = room < request->sampling.max_tokens;
        request->item[i].max_tokens = short_of_room ? (int)room : 0;
        const int64_t n_position = input->n_ids + item_max_tokens(request, &request->item[i]);
        if (job->memory == MEMORY_TOKENS && n_position > INPUT_TRACE_POSITIONS_MAX) {
            return api_error_set(error, 400, "invalid_value", "memory",
                                 "memory \"tokens\" takes at most %d positions, but prompt and "
                                 "max_tokens are %lld",
                                 INPUT_TRACE_POSITIONS_MAX, (long long)n_position);
        }
        if (job->memory == MEMORY_SLOTS) {
            const int64_t bytes = slots_bytes(&job->slots, info, n_position);
            slot_bytes += bytes;
            request->item[i].slot_bytes = slots_text_bytes(bytes);
        }
        if (slot_bytes > limits->max_trace.most) {
            return slots_too_large(error, slot_bytes, limits);
        }
        trace_bytes += traces ? request_trace_bytes(info, n_position, request->trace_tokens) : 0;
        if (trace_bytes > (size_t)limits->trace_bytes.most) {
            return input_traces_too_large(error, request->n_item, limits);
        }
        int32_t *ids = input->ids;
        if ((i + 1) % job->n_sample == 0) {
            input->ids = NULL; /* the last sample's from now on; the others get copies */
        } else {
            ids = malloc((size_t)input->n_ids * sizeof *ids);
            if (ids == NULL) {
                return api_error_set(error, 500, "out_of_memory", NULL,
                                     "no memory for the request");
            }
            memcpy(ids, input->ids, (size_t)input->n_ids * sizeof *ids);
        }
        request->item[i].prompt_index = i / job->n_sample;
        request->item[i].sample_index = i % job->n_sample;
        struct err err = {0};
        if (request_set_item(request, i, ids, input->n_ids, info, &err) != ERR_OK) {
            return input_item_error(error, &err);
        }
    }
    return true;
}

static bool parse_fields(struct generate_job *job, struct fields *fields, struct sampling *sampling,
                         const struct api_limits *limits)
{
    struct api_error *const error = fields->error;
    overlay_read(fields, limits, &job->overlays);
    const int64_t deadline_us = input_deadline(fields, limits);
    const uint64_t scope = input_cache_scope(fields);
    if (!job->dialect->read(job, fields, sampling, limits)) {
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
    request_use_memory(request, limits->requests);
    request->sampling = *sampling;
    ablate_give(request, &job->ablate);
    overlay_give(request, &job->overlays);
    request->lang = job->lang;
    request->scope = scope;
    request->priority = job->priority;
    request->deadline_us = deadline_us;
    request->n_top = job->n_top;
    request->echo = (job->echo && job->logprobs >= 0) || job->prompt_logprobs >= 0;
    request->trace_memory = job->memory != MEMORY_OFF;
    request->trace_tokens = job->memory >= MEMORY_TOKENS;
    return make_request(job, request, limits, error);
}

bool generate_parse(struct generate_job *job, const struct generate_dialect *dialect,
                    const char *body, size_t bytes, const struct api_limits *limits,
                    struct api_error *error)
{
    *job = (struct generate_job){.dialect = dialect,
                                 .n_sample = 1,
                                 .logprobs = -1,
                                 .prompt_logprobs = -1,
                                 .n_top = -1,
                                 .priority = PRIORITY_INTERACTIVE};
    struct fields fields;
    struct sampling *const sampling = calloc(1, sizeof *sampling);
    bool ok = sampling != NULL ||
              api_error_set(error, 500, "out_of_memory", NULL, "no memory for the request");
    if (ok) {
        ok = fields_open(&fields, body, bytes, error);
        fields.defaults = limits->defaults;
        ok = ok && parse_fields(job, &fields, sampling, limits);
        job->body = fields.object; /* the texts live there */
    }
    free(sampling);
    return ok;
}

void generate_free(struct generate_job *job)
{
    request_release(job->request);
    request_ablate_free(&job->ablate);
    overlays_drop(&job->overlays);
    input_list_free(&job->inputs);
    json_decref(job->body);
    *job = (struct generate_job){0};
}
