/* The fields of a completion request: see openai.h. */
#include "server/generate/generate_read.h"
#include "server/generate/openai.h"

enum { OPENAI_MAX_TOKENS = 16 };

/* By name, or as in vLLM a number that grows as the request may wait longer, 0 by default. */
static void read_priority(struct fields *fields, struct generate_job *job)
{
    int64_t number = 0;
    if (fields_is_integer(fields_get(fields, "priority", NULL), &number)) {
        job->priority = number > 0 ? PRIORITY_BULK : PRIORITY_INTERACTIVE;
        return;
    }
    const int priority = input_priority(fields);
    job->priority = priority < 0 ? PRIORITY_INTERACTIVE : (enum priority)priority;
}

static void read_stream(struct fields *fields, struct generate_job *job,
                        const struct api_limits *limits)
{
    struct fields options;
    fields_bool(fields, "stream", NULL, &job->stream);
    if (!fields_open_in(&options, fields, "stream_options")) {
        return;
    }
    fields_bool(&options, "include_usage", NULL, &job->openai.usage);
    fields_bool(&options, "continuous_usage_stats", NULL, &job->openai.usage_always);
    fields_finish(&options, limits->strict, job->ignored);
    if (!job->stream) {
        (void)api_error_set(fields->error, 400, "conflicting_fields", "stream_options",
                            "stream_options are for \"stream\": true only");
    }
}

/* What is reported about tokens. */
static void read_shape(struct fields *fields, struct generate_job *job,
                       const struct api_limits *limits)
{
    fields_int(fields, "logprobs", NULL, 0, limits->max_logprobs, &job->logprobs);
    fields_int(fields, "prompt_logprobs", NULL, 0, limits->max_logprobs, &job->prompt_logprobs);
    fields_bool(fields, "echo", NULL, &job->echo);
    job->openai.echo_bos = limits->echo_bos;
    fields_bool(fields, "echo_bos", NULL, &job->openai.echo_bos);
    job->memory = input_memory(fields, limits);
    slots_read(fields, limits, job->memory, &job->slots);
    ablate_read(fields, limits, &job->ablate);
    fields_bool(fields, "return_token_ids", NULL, &job->openai.ids);
    fields_bool(fields, "return_tokens_as_token_ids", NULL, &job->openai.tokens_as_ids);
    if (job->stream && job->prompt_logprobs >= 0) {
        (void)api_error_set(fields->error, 400, "conflicting_fields", "prompt_logprobs",
                            "prompt_logprobs are not given in a stream: use echo and logprobs");
    }
    job->n_top = job->logprobs > job->prompt_logprobs ? job->logprobs : job->prompt_logprobs;
}

static void read_sampling(struct fields *fields, struct sampling *sampling,
                          const struct api_limits *limits)
{
    bool skip_special = true;
    generate_read_numbers(fields, sampling, limits->info, &MODEL_SAMPLING_PLAIN);
    generate_read_seed(fields, sampling, true);
    generate_read_stop(fields, sampling, limits);
    generate_read_ids(fields, sampling, limits);
    fields_int(fields, "min_tokens", NULL, 0, INT32_MAX, &sampling->min_tokens);
    fields_bool(fields, "include_stop_str_in_output", NULL, &sampling->include_stop);
    fields_bool(fields, "skip_special_tokens", NULL, &skip_special);
    sampling->show_control = !skip_special;
}

static bool openai_read(struct generate_job *job, struct fields *fields, struct sampling *sampling,
                        const struct api_limits *limits)
{
    input_model(fields, limits);
    read_sampling(fields, sampling, limits);
    input_refuse(fields);
    generate_read_n(fields, job, sampling);
    generate_read_best_of(fields, job);
    read_stream(fields, job, limits);
    read_shape(fields, job, limits);
    read_priority(fields, job);
    (void)input_id(fields, job->id, sizeof job->id);
    input_language(fields, limits, &job->lang);
    (void)fields_string(fields, "user", NULL); /* for the provider's own records: this server keeps
                                                * none */
    bool special = true;
    int max_tokens = -1;
    fields_bool(fields, "add_special_tokens", NULL, &special);
    fields_int(fields, "max_tokens", "max_completion_tokens", 0, INT32_MAX, &max_tokens);
    if (max_tokens == 0 && !job->echo && job->prompt_logprobs < 0) {
        (void)api_error_set(
            fields->error, 400, "invalid_value", "max_tokens",
            "max_tokens is 0, but without echo or prompt_logprobs must be at least 1");
    }
    return generate_read_prompt(fields, job, "prompt", special, limits) &&
           generate_fit(fields, job, sampling, limits, "max_tokens", max_tokens, OPENAI_MAX_TOKENS);
}

const struct generate_dialect openai_dialect = {.id_prefix = "cmpl-",
                                                .end = "data: [DONE]\n\n",
                                                .read = openai_read,
                                                .choice = openai_choice_parts,
                                                .event = openai_event_parts};
