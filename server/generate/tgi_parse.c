/* The fields of a TGI request: see tgi.h. */
#include "server/generate/generate_read.h"
#include "server/generate/tgi.h"

#include <jansson.h>
#include <string.h>

enum { TGI_MAX_NEW_TOKENS = 100 };

/* Whether the numbers say how to draw. */
static bool draws(const struct sampling *s)
{
    return s->temperature < 1 || s->temperature > 1 || s->top_k > 0 || s->top_p < 1 ||
           s->typical_p < 1;
}

static void read_sampling(struct fields *fields, struct generate_job *job,
                          struct sampling *sampling, const struct api_limits *limits)
{
    bool do_sample = false;
    generate_read_numbers(fields, sampling, limits->info, &MODEL_SAMPLING_PLAIN);
    generate_read_seed(fields, sampling, false);
    generate_read_stop(fields, sampling, limits);
    generate_read_ids(fields, sampling, limits);
    fields_bool(fields, "do_sample", NULL, &do_sample);
    generate_read_best_of(fields, job);
    if (sampling->temperature <= 0) {
        (void)api_error_set(fields->error, 400, "invalid_value", "temperature",
                            "temperature is 0, but must be above 0; for the likeliest token leave "
                            "temperature and do_sample out");
    }
    job->tgi.sampled = do_sample || draws(sampling);
}

/* What is reported about tokens. */
static void read_shape(struct fields *fields, struct generate_job *job,
                       const struct api_limits *limits)
{
    bool prefill = false;
    int n_top = -1;
    fields_bool(fields, "return_full_text", NULL, &job->echo);
    fields_bool(fields, "details", NULL, &job->details);
    fields_bool(fields, "decoder_input_details", NULL, &prefill);
    fields_int(fields, "top_n_tokens", NULL, 0, limits->max_logprobs, &n_top);
    if (prefill && job->stream) {
        (void)api_error_set(fields->error, 400, "conflicting_fields", "decoder_input_details",
                            "decoder_input_details is not given in a stream");
    }
    if (prefill && !job->stream && !job->details) {
        (void)api_error_set(fields->error, 400, "conflicting_fields", "decoder_input_details",
                            "decoder_input_details is part of the details: send details true too");
    }
    job->prompt_logprobs = prefill ? 0 : -1;
    job->logprobs = job->details || job->stream ? (n_top > 0 ? n_top : 0) : -1;
    job->n_top = job->logprobs;
    job->tgi.tops = n_top > 0;
}

/* Reads "parameters", or sets the defaults if there is none. Returns max_new_tokens or -1. */
static int read_parameters(struct fields *fields, struct generate_job *job,
                           struct sampling *sampling, int *truncate,
                           const struct api_limits *limits)
{
    struct fields inner;
    int max_tokens = -1;
    const bool given = fields_open_in(&inner, fields, "parameters");
    fields_int(&inner, "truncate", NULL, 1, INT32_MAX, truncate);
    read_sampling(&inner, job, sampling, limits);
    input_refuse(&inner);
    read_shape(&inner, job, limits);
    fields_int(&inner, "max_new_tokens", NULL, 1, INT32_MAX, &max_tokens);
    if (given) {
        fields_finish(&inner, limits->strict, job->ignored);
    } else {
        job->tgi.sampled = true;
    }
    if (!job->tgi.sampled) {
        sampling->temperature = 0;
    }
    sampling->include_stop = true;
    return max_tokens;
}

/* "truncate": the last n tokens of the prompt as the model would read it, so that what is cut off
 * takes BOS along. */
static void keep_last(struct input *input, int64_t n)
{
    const int64_t n_cut = input->n_ids - n;
    if (n_cut <= 0) {
        return;
    }
    memmove(input->ids, input->ids + n_cut, (size_t)n * sizeof *input->ids);
    if (input->offsets != NULL) {
        memmove(input->offsets, input->offsets + (n_cut - input->n_bos),
                (size_t)n * sizeof *input->offsets);
    }
    input->n_ids = n;
    input->n_bos = 0;
}

static bool tgi_read(struct generate_job *job, struct fields *fields, struct sampling *sampling,
                     const struct api_limits *limits)
{
    const json_t *const inputs = fields_get(fields, "inputs", NULL);
    fields_bool(fields, "stream", NULL, &job->stream);
    input_refuse(fields);
    input_model(fields, limits);
    int truncate = INT32_MAX;
    const int max_tokens = read_parameters(fields, job, sampling, &truncate, limits);
    if (inputs != NULL && !json_is_string(inputs)) {
        (void)api_error_set(fields->error, 400, "invalid_value", "inputs",
                            "inputs must be a string: one prompt");
    }
    if (!generate_read_prompt(fields, job, "inputs", true, limits)) {
        return false;
    }
    keep_last(&job->inputs.input[0], truncate);
    return generate_fit(fields, job, sampling, limits, "max_new_tokens", max_tokens,
                        TGI_MAX_NEW_TOKENS);
}

static bool tgi_read_stream(struct generate_job *job, struct fields *fields,
                            struct sampling *sampling, const struct api_limits *limits)
{
    job->stream = true;
    return tgi_read(job, fields, sampling, limits) &&
           (job->stream ||
            api_error_set(fields->error, 400, "conflicting_fields", "stream",
                          "stream is false, but /generate_stream streams: use /generate"));
}

static bool tgi_read_root(struct generate_job *job, struct fields *fields,
                          struct sampling *sampling, const struct api_limits *limits)
{
    job->tgi.listed = true;
    return tgi_read(job, fields, sampling, limits);
}

const struct generate_dialect tgi_dialect = {.id_prefix = "",
                                             .errors = &tgi_errors,
                                             .end = "",
                                             .read = tgi_read,
                                             .choice = tgi_choice_parts,
                                             .event = tgi_event_parts};

const struct generate_dialect tgi_stream_dialect = {.id_prefix = "",
                                                    .errors = &tgi_errors,
                                                    .end = "",
                                                    .read = tgi_read_stream,
                                                    .choice = tgi_choice_parts,
                                                    .event = tgi_event_parts};

const struct generate_dialect tgi_root_dialect = {.id_prefix = "",
                                                  .errors = &tgi_errors,
                                                  .end = "",
                                                  .read = tgi_read_root,
                                                  .choice = tgi_choice_parts,
                                                  .event = tgi_event_parts};
