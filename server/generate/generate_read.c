/* The fields that dialects share: see generate_read.h. */
#include "server/generate/generate_read.h"

#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

/* ---- sampling fields ----------------------------------------------------------------------- */

void generate_read_numbers(struct fields *fields, struct sampling *s, const struct model_info *info,
                           const struct model_sampling *defaults)
{
    s->temperature = defaults->temperature;
    s->top_p = defaults->top_p;
    s->min_p = defaults->min_p;
    s->repetition = defaults->repetition;
    s->top_k = defaults->top_k < info->n_vocab ? defaults->top_k : 0;
    s->typical_p = 1;
    fields_float(fields, "temperature", NULL, (struct fields_range){0, 2, false, false},
                 &s->temperature);
    fields_float(fields, "top_p", NULL, (struct fields_range){0, 1, true, false}, &s->top_p);
    fields_float(fields, "min_p", NULL, (struct fields_range){0, 1, false, true}, &s->min_p);
    fields_float(fields, "typical_p", NULL, (struct fields_range){0, 1, true, false},
                 &s->typical_p);
    fields_float(fields, "repetition_penalty", "repeat_penalty",
                 (struct fields_range){0, 10, true, false}, &s->repetition);
    /* A logit divided by less is no number that a softmax can take. */
    s->repetition = fmaxf(s->repetition, 1e-6F);
    fields_float(fields, "presence_penalty", NULL, (struct fields_range){-2, 2, false, false},
                 &s->presence);
    fields_float(fields, "frequency_penalty", NULL, (struct fields_range){-2, 2, false, false},
                 &s->frequency);
    fields_int(fields, "top_k", NULL, -1, info->n_vocab, &s->top_k);
    s->top_k = s->top_k == -1 ? 0 : s->top_k;
    fields_bool(fields, "ignore_eos", NULL, &s->ignore_eos);
}

void generate_read_seed(struct fields *fields, struct sampling *s, bool is_signed)
{
    const json_t *const given = fields_get(fields, "seed", NULL);
    int64_t integer = 0;
    const bool is_none = is_signed && fields_is_integer(given, &integer) && integer == -1;
    if (is_none || !fields_u64(fields, "seed", is_signed ? INT64_MIN : 0, &s->seed)) {
        CHECK(getrandom(&s->seed, sizeof s->seed, 0) == sizeof s->seed);
        /* Many JSON readers keep only 53 bits: a seed that we draw survives them. */
        s->seed &= (UINT64_C(1) << 53) - 1;
    }
}

void generate_read_stop(struct fields *fields, struct sampling *s, const struct api_limits *limits)
{
    json_t *const value = fields_get(fields, "stop", NULL);
    if (value == NULL) {
        return;
    }
    const bool whole = json_is_string(value);
    const size_t n = whole ? 1 : json_array_size(value);
    if (!whole && !json_is_array(value)) {
        (void)api_error_set(fields->error, 400, "invalid_value", "stop",
                            "stop must be a string or a list of at most %d strings, not %s",
                            STOP_MAX, fields_type_name(value));
        return;
    }
    if (n > STOP_MAX) {
        (void)api_error_set(fields->error, 400, "invalid_value", "stop",
                            "stop has %zu strings, but %d are the limit", n, STOP_MAX);
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
        if (!json_is_string(each)) {
            (void)api_error_set(fields->error, 400, "invalid_value", "stop",
                                "stop[%zu] must be a string, not %s", i, fields_type_name(each));
            return;
        }
        if (bytes < 1 || bytes > STOP_BYTES_MAX) {
            (void)api_error_set(fields->error, 400, "invalid_value", "stop",
                                "stop[%zu] has %zu bytes, but must have 1 ... %d", i, bytes,
                                STOP_BYTES_MAX);
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
    if (!json_is_array(value)) {
        (void)api_error_set(fields->error, 400, "invalid_value", name,
                            "%s must be a list of at most %d token ids, not %s", name, max,
                            fields_type_name(value));
        return;
    }
    if (json_array_size(value) > (size_t)max) {
        (void)api_error_set(fields->error, 400, "invalid_value", name,
                            "%s has %zu token ids, but %d are the limit", name,
                            json_array_size(value), max);
        return;
    }
    int32_t *ids = NULL;
    int64_t n = 0;
    if (!input_ids(value, name, NULL, n_vocab, &ids, &n, fields->error)) {
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

/* An entry of logit_bias. */
static bool read_one_bias(struct fields *fields, struct sampling *s, const char *key,
                          const json_t *value, int n_vocab)
{
    static const char name[] = "logit_bias";
    struct api_error *const error = fields->error;
    const size_t digits = strspn(key, "0123456789");
    if (digits == 0 || digits > 9 || key[digits] != '\0') {
        return api_error_set(error, 400, "invalid_value", name, "%s: \"%.20s\" is not a token id",
                             name, key);
    }
    const int id = atoi(key);
    const double bias = json_number_value(value);
    if (id >= n_vocab) {
        return api_error_set(error, 400, "token_out_of_range", name,
                             "%s: %d is not a token id, they are 0 ... %d", name, id, n_vocab - 1);
    }
    if (!json_is_number(value)) {
        return api_error_set(error, 400, "invalid_value", name,
                             "%s of token %d must be a number, not %s", name, id,
                             fields_type_name(value));
    }
    if (!(bias >= -100 && bias <= 100)) {
        return api_error_set(error, 400, "invalid_value", name,
                             "%s of token %d is %.15g, but must be in [-100, 100]", name, id, bias);
    }
    for (int i = 0; i < s->n_bias; i++) { /* "7" and "07" */
        if (s->bias[i].token == id) {
            return api_error_set(error, 400, "conflicting_fields", name, "%s holds token %d twice",
                                 name, id);
        }
    }
    s->bias[s->n_bias].token = id;
    s->bias[s->n_bias++].bias = (float)bias;
    return true;
}

static void read_bias(struct fields *fields, struct sampling *s, int n_vocab)
{
    json_t *const value = fields_get(fields, "logit_bias", NULL);
    if (value == NULL) {
        return;
    }
    if (!json_is_object(value)) {
        (void)api_error_set(fields->error, 400, "invalid_value", "logit_bias",
                            "logit_bias must be an object {\"id\": number}, not %s",
                            fields_type_name(value));
        return;
    }
    if (json_object_size(value) > LOGIT_BIAS_MAX) {
        (void)api_error_set(fields->error, 400, "invalid_value", "logit_bias",
                            "logit_bias has %zu entries, but %d are the limit",
                            json_object_size(value), LOGIT_BIAS_MAX);
        return;
    }
    const char *key = NULL;
    json_t *each = NULL;
    json_object_foreach(value, key, each)
    {
        if (!read_one_bias(fields, s, key, each, n_vocab)) {
            return;
        }
    }
}

void generate_read_ids(struct fields *fields, struct sampling *s, const struct api_limits *limits)
{
    const int n_vocab = limits->info->n_vocab;
    read_id_list(fields, "stop_token_ids", STOP_ID_MAX, n_vocab, s->stop_id, &s->n_stop_id);
    read_id_list(fields, "allowed_token_ids", ALLOW_MAX, n_vocab, s->allow, &s->n_allow);
    const json_t *const allowed = json_object_get(fields->object, "allowed_token_ids");
    if (json_is_array(allowed) && json_array_size(allowed) == 0) {
        (void)api_error_set(fields->error, 400, "invalid_value", "allowed_token_ids",
                            "allowed_token_ids is empty: nothing could be generated");
    }
    read_bias(fields, s, n_vocab);
}

void generate_read_n(struct fields *fields, struct generate_job *job,
                     const struct sampling *sampling)
{
    fields_int(fields, "n", NULL, 1, GENERATE_SAMPLE_MAX, &job->n_sample);
    if (job->n_sample > 1 && sampling->temperature <= 0) {
        (void)api_error_set(fields->error, 400, "conflicting_fields", "n",
                            "n is %d, but with temperature 0 all samples would be the same",
                            job->n_sample);
    }
}

void generate_read_best_of(struct fields *fields, const struct generate_job *job)
{
    int best_of = job->n_sample;
    fields_int(fields, "best_of", NULL, 1, INT32_MAX, &best_of);
    if (best_of != job->n_sample) {
        (void)api_error_set(fields->error, 400, "unsupported_parameter", "best_of",
                            "best_of is %d, but only n, %d, is supported: all choices are given",
                            best_of, job->n_sample);
    }
}

/* ---- prompts and lengths ------------------------------------------------------------------- */

/* Refuses a text that cannot fit before it is tokenised. */
static bool check_bytes(const json_t *prompt, const char *name, const struct api_limits *limits,
                        struct api_error *error)
{
    const int64_t context = engine_context(limits->context);
    const size_t n = json_is_array(prompt) ? json_array_size(prompt) : 1;
    for (size_t i = 0; i < n; i++) {
        const json_t *const each = json_is_array(prompt) ? json_array_get(prompt, i) : prompt;
        const size_t bytes = json_string_length(each); /* 0 of ids */
        if ((int64_t)(bytes / INPUT_BYTES_PER_TOKEN) > context) {
            return api_error_set(error, 400, "context_length_exceeded", "prompt",
                                 "%s has a text of %zu bytes, which cannot fit into the model's "
                                 "context of %lld tokens (max_length=%lld): shorten it",
                                 name, bytes, (long long)context, (long long)context);
        }
    }
    return true;
}

bool generate_read_prompt(struct fields *fields, struct generate_job *job, const char *name,
                          bool bos, const struct api_limits *limits)
{
    json_t *const prompt = fields_get(fields, name, NULL);
    if (prompt == NULL) {
        (void)api_error_set(fields->error, 400, "missing_field", name, "%s is missing", name);
    }
    if (fields->error->status != 0) {
        return false;
    }
    if (!check_bytes(prompt, name, limits, fields->error)) {
        return false;
    }
    const struct input_marks marks = {.bos_text = bos && limits->info->add_bos};
    /* The sum of all prompts is bounded by the queue; each one by the context, in generate_fit. */
    const struct input_rules rules = {
        .name = name, .text = true, .ids = true, .marks = marks, .items = limits->max_items};
    return input_read(&job->inputs, prompt, &rules, limits, fields->error);
}

bool generate_fit(struct fields *fields, struct generate_job *job, struct sampling *sampling,
                  const struct api_limits *limits, const char *name, int asked, int fallback)
{
    int64_t longest = 0;
    int64_t shortest = INT64_MAX;
    char which[32] = "the prompt"; /* if there are several, the longest: it is the one to shorten */
    for (int i = 0; i < job->inputs.n; i++) {
        const int64_t n_ids = job->inputs.input[i].n_ids;
        shortest = n_ids < shortest ? n_ids : shortest;
        if (n_ids > longest) {
            longest = n_ids;
            if (job->inputs.n > 1) {
                (void)snprintf(which, sizeof which, "prompt[%d]", i);
            }
        }
    }
    const int64_t context = engine_context(limits->context);
    const int64_t least = asked >= 0 ? asked : 1; /* the fallback shrinks, but not to 0 */
    const int64_t room = longest < context ? context - longest : 0;
    if (longest + least > context && (asked < 0 || room == 0)) {
        return api_error_set(fields->error, 400, "context_length_exceeded", "prompt",
                             "%s has %lld tokens, but the model's context is %lld "
                             "(max_length=%lld)%s: shorten it",
                             which, (long long)longest, (long long)context, (long long)context,
                             least > 0 ? ", of which at least one is generated" : "");
    }
    if (longest + least > context) {
        return api_error_set(fields->error, 400, "context_length_exceeded", name,
                             "the length of %s is %lld and %s is %d, together %lld tokens, but the "
                             "model's context is %lld (max_length=%lld): ask for at most %lld",
                             which, (long long)longest, name, asked, (long long)(longest + least),
                             (long long)context, (long long)context, (long long)room);
    }
    const int64_t most = context - shortest;
    const int fewest = asked >= 0 ? asked : room < fallback ? (int)room : fallback;
    sampling->max_tokens = asked >= 0 ? asked : most < fallback ? (int)most : fallback;
    if (sampling->min_tokens > fewest) {
        return api_error_set(fields->error, 400, "conflicting_fields", "min_tokens",
                             "min_tokens is %d, but %s is %d", sampling->min_tokens, name, fewest);
    }
    if (sampling_bans_all(sampling, &limits->info->ends)) {
        return api_error_set(
            fields->error, 400, "conflicting_fields", "allowed_token_ids",
            "allowed_token_ids has only tokens that end the text, and min_tokens %d "
            "forbids them",
            sampling->min_tokens);
    }
    return true;
}
