/* Reading prompts, documents and shared fields: see input.h. */
#include "server/io/input.h"

#include "engine/clock.h"
#include "engine/tokenizer.h"
#include "kernels/fnv.h"
#include "models/sha256.h"
#include "server/version.h"

#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* FNV-1a over everything that determines the numbers, as far as it can be known without reading all
 * weights. */
static void input_fingerprint(struct api_limits *limits, const struct backend *backend)
{
    const struct model_info *const info = limits->info;
    char facts[1024];
    (void)snprintf(facts, sizeof facts, "%s|%s|%s|%s|%s|%s|%d|%d|%d|%d|%d|%d|%lld|%lld%s",
                   PKMSERVE_VERSION, backend->name, backend->description, limits->model_name,
                   info->family, dtype_name(info->dtype), info->n_vocab, info->d_model,
                   info->n_layer, info->n_head, info->d_ff, limits->context,
                   (long long)info->n_param, (long long)info->n_param_values, backend->products);
    const uint64_t hash = fnv_hash(FNV_BEGIN, facts, strlen(facts));
    (void)snprintf(limits->fingerprint, sizeof limits->fingerprint, "fp_%016llx",
                   (unsigned long long)hash);
}

struct api_limits input_limits(const struct options *options, const struct engine *engine)
{
    const struct engine_options *const limits = engine_limits(engine);
    struct api_limits result = {
        .info = engine_model(engine),
        .tokenizer = engine_tokenizer(engine),
        .model_name = options->served_model_name,
        .context = limits->max_model_len,
        .requests = engine_request_memory(engine),
        .overlays = engine_overlays(engine),
        .trace_bytes = {limits->memory_trace_bytes, "--memory-trace-bytes"},
        .max_trace = {options->max_trace_bytes, "--max-trace-bytes"},
        .max_items = {options->max_items, "--max-items"},
        .max_score_items = {options->max_score_items, "--max-score-items"},
        .max_score_tokens = {options->max_score_tokens, "--max-score-tokens"},
        .max_score_positions = {options_score_positions(options), "--max-score-positions"},
        .max_logprobs = limits->max_logprobs,
        .default_max_tokens = options->default_max_tokens,
        .timeout_ms = options->timeout_ms,
        .max_timeout_ms = options->max_timeout_ms,
        .ping_us = (int64_t)(options->ping_s * 1e6),
        .strict = options->strict,
        .memory_trace = strcmp(options->memory_trace, "off") == 0       ? MEMORY_TRACE_OFF
                        : strcmp(options->memory_trace, "summary") == 0 ? MEMORY_TRACE_SUMMARY
                                                                        : MEMORY_TRACE_ON,
        .echo_bos = options->echo_bos};
    input_fingerprint(&result, engine_backend(engine));
    return result;
}

bool input_item_error(struct api_error *error, const struct err *err)
{
    if (err->code == ERR_MEMORY) {
        return api_error_set(error, 500, "out_of_memory", NULL, "%s", err->message);
    }
    if (err->code == ERR_QUEUE_MEMORY) {
        return api_error_set(error, 429, "queue_memory_full", NULL, "%s", err->message);
    }
    return api_error_set(error, 400, "invalid_value", NULL, "%s", err->message);
}

bool input_traces_too_large(struct api_error *error, int n, const struct api_limits *limits)
{
    if (n == 1) {
        return api_error_set(error, 400, "trace_too_large", "memory",
                             "the memory trace takes more than %lld bytes, the limit (%s): send "
                             "less text at once",
                             (long long)limits->trace_bytes.most, limits->trace_bytes.flag);
    }
    return api_error_set(error, 400, "too_many_items", "memory",
                         "the memory traces of %d items take more than %lld bytes, the limit "
                         "(%s): send fewer at once",
                         n, (long long)limits->trace_bytes.most, limits->trace_bytes.flag);
}

void input_list_free(struct input_list *list)
{
    for (int i = 0; i < list->n; i++) {
        free(list->input[i].ids);
        free(list->input[i].offsets);
        free(list->input[i].own);
    }
    free(list->input);
    *list = (struct input_list){0};
}

bool input_too_many_items(struct api_error *error, const char *param, size_t n,
                          struct input_limit items)
{
    return api_error_set(error, 400, "too_many_items", param,
                         "%s has %zu items, but the limit is %lld (%s): send them in several "
                         "requests",
                         param, n, (long long)items.most, items.flag);
}

bool input_too_many_tokens(struct api_error *error, const char *param, struct input_limit tokens)
{
    return api_error_set(error, 400, "too_many_tokens", param,
                         "%s has more than %lld tokens, each context counted as often as it is "
                         "used; that is the limit of one request (%s): send less at once",
                         param, (long long)tokens.most, tokens.flag);
}

/* ---- token ids ----------------------------------------------------------------------------- */

/* The field that a place is in: "pairs" of "pairs[3].context". */
static const char *param_of(char param[API_PARAM_MAX], const char *place)
{
    (void)snprintf(param, API_PARAM_MAX, "%.*s", (int)strcspn(place, "["), place);
    return param;
}

bool input_ids(const json_t *value, const char *place, const struct input_limit *tokens,
               int n_vocab, int32_t **ids, int64_t *n_ids, struct api_error *error)
{
    char param[API_PARAM_MAX];
    const size_t n = json_array_size(value);
    if (tokens != NULL && (int64_t)n > tokens->most) {
        return input_too_many_tokens(error, param_of(param, place), *tokens);
    }
    int32_t *const list = malloc((n > 0 ? n : 1) * sizeof *list);
    if (list == NULL) {
        return api_error_set(error, 500, "out_of_memory", param_of(param, place),
                             "no memory for %zu tokens", n);
    }
    for (size_t i = 0; i < n; i++) {
        int64_t id = 0;
        const json_t *const each = json_array_get(value, i);
        const double real = json_real_value(each); /* 0 if it is none */
        if (!fields_is_integer(each, &id) && fabs(real) > 0x1p53) {
            (void)api_error_set(error, 400, "token_out_of_range", param_of(param, place),
                                "%s[%zu] is %.17g, but token ids are 0 ... %d", place, i, real,
                                n_vocab - 1);
            free(list);
            return false;
        }
        if (!fields_is_integer(each, &id)) {
            (void)api_error_set(error, 400, "invalid_value", param_of(param, place),
                                "%s[%zu] must be a token id, an integer", place, i);
            free(list);
            return false;
        }
        if (id < 0 || id >= n_vocab) {
            (void)api_error_set(error, 400, "token_out_of_range", param_of(param, place),
                                "%s[%zu] is %lld, but token ids are 0 ... %d", place, i,
                                (long long)id, n_vocab - 1);
            free(list);
            return false;
        }
        list[i] = (int32_t)id;
    }
    *ids = list;
    *n_ids = (int64_t)n;
    return true;
}

/* ---- one input ----------------------------------------------------------------------------- */

bool input_add_marks(struct input *input, const char *place, struct input_marks marks,
                     const struct model_info *info, struct api_error *error)
{
    char param[API_PARAM_MAX];
    const int32_t bos_id = marks.prefix > 0 ? marks.prefix : info->bos_id;
    /* There must be something to compute: for an empty text BOS, which no answer shows. */
    const bool empty = input->text != NULL && input->n_ids == 0 && !marks.eos;
    const bool bos = input->text != NULL ? marks.bos_text || (empty && bos_id >= 0) : marks.bos_ids;
    const bool eos = marks.eos;
    if ((bos && bos_id < 0) || (eos && info->eos_id < 0)) {
        return api_error_set(error, 400, "invalid_value", bos ? "add_bos" : "append_eos",
                             "the model has no %s token",
                             bos ? "beginning-of-text" : "end-of-text");
    }
    if (input->n_ids + bos + eos == 0) {
        return api_error_set(
            error, 400, "invalid_value", param_of(param, place),
            input->text != NULL
                ? "%s is empty, and there is no beginning-of-text token to start from"
                : "%s is an empty list of token ids",
            place);
    }
    int32_t *const ids = realloc(input->ids, (size_t)(input->n_ids + bos + eos) * sizeof *ids);
    if (ids == NULL) {
        return api_error_set(error, 500, "out_of_memory", param_of(param, place),
                             "no memory for the tokens");
    }
    input->ids = ids;
    if (bos) {
        memmove(ids + 1, ids, (size_t)input->n_ids * sizeof *ids);
        ids[0] = bos_id;
    }
    if (eos) {
        ids[input->n_ids + bos] = info->eos_id;
    }
    input->n_bos = bos;
    input->n_eos = eos;
    input->n_ids += bos + eos;
    return true;
}

bool input_tokenise(struct input *input, const char *place, const struct api_limits *limits,
                    struct api_error *error)
{
    char param[API_PARAM_MAX];
    size_t n = 0;
    struct err err = {0};
    if (tokenizer_encode(limits->tokenizer, input->text, input->text_bytes, input->special,
                         &input->ids, &n, &input->offsets, &err) != ERR_OK) {
        return api_error_set(error, err.code == ERR_MEMORY ? 500 : 400,
                             err.code == ERR_MEMORY ? "out_of_memory" : "invalid_value",
                             param_of(param, place), "%s: %s", place, err.message);
    }
    input->n_ids = (int64_t)n;
    return true;
}

static bool input_read_one(struct input *input, json_t *value, const char *place,
                           const struct input_rules *rules, const struct api_limits *limits,
                           struct api_error *error)
{
    const struct input_marks marks = rules->marks;
    if (json_is_string(value)) {
        input->text = json_string_value(value);
        input->text_bytes = json_string_length(value);
        input->special = marks.special;
        return input_tokenise(input, place, limits, error) &&
               input_add_marks(input, place, marks, limits->info, error);
    }
    return input_ids(value, place, rules->tokens, limits->info->n_vocab, &input->ids, &input->n_ids,
                     error) &&
           input_add_marks(input, place, marks, limits->info, error);
}

/* ---- lists of inputs ----------------------------------------------------------------------- */

/* The number of inputs in value; whole = value itself is the one input. */
static bool input_shape(json_t *value, const struct input_rules *rules, bool *whole,
                        struct api_error *error)
{
    const char *const name = rules->name;
    const char *const expected = !rules->ids ? "a string or a list of strings"
                                 : !rules->text
                                     ? "a list of token ids or a list of such lists"
                                     : "a string, a list of strings, a list of token ids "
                                       "or a list of such lists";
    *whole = json_is_string(value);
    if (!*whole && !json_is_array(value)) {
        return api_error_set(error, 400, "invalid_value", name, "%s must be %s", name, expected);
    }
    if (json_is_array(value) && json_array_size(value) == 0) {
        return api_error_set(error, 400, "invalid_value", name, "%s is an empty list", name);
    }
    const json_t *const first = json_is_array(value) ? json_array_get(value, 0) : value;
    if (json_is_number(first)) {
        *whole = true;
    }
    const bool is_text = json_is_string(first);
    const bool is_ids = *whole ? json_is_number(first) : json_is_array(first);
    if (!(is_text && rules->text) && !(is_ids && rules->ids)) {
        return api_error_set(error, 400, "invalid_value", name, "%s must be %s", name, expected);
    }
    const size_t n = *whole ? 0 : json_array_size(value);
    for (size_t i = 0; i < n; i++) {
        const json_t *const each = json_array_get(value, i);
        if (is_text ? !json_is_string(each) : !json_is_array(each)) {
            return api_error_set(error, 400, "invalid_value", name,
                                 "%s[%zu] must be %s like the first", name, i,
                                 is_text ? "a string" : "a list of token ids");
        }
    }
    return true;
}

bool input_read(struct input_list *list, json_t *value, const struct input_rules *rules,
                const struct api_limits *limits, struct api_error *error)
{
    const char *const name = rules->name;
    const struct input_limit *const tokens = rules->tokens;
    bool whole = false;
    if (!input_shape(value, rules, &whole, error)) {
        return false;
    }
    const json_t *const first = whole ? value : json_array_get(value, 0);
    if (json_is_string(first) && limits->tokenizer == NULL) {
        return api_error_set(error, 400, "unsupported_parameter", name,
                             "the model has no tokenizer: %s must hold token ids, not text", name);
    }
    const size_t n = whole ? 1 : json_array_size(value);
    if ((int64_t)n > rules->items.most) {
        return input_too_many_items(error, name, n, rules->items);
    }
    list->input = calloc(n, sizeof *list->input);
    if (list->input == NULL) {
        return api_error_set(error, 500, "out_of_memory", name, "no memory for %zu items", n);
    }
    list->n = (int)n;
    int64_t total = 0;
    int64_t bytes = 0;
    for (size_t i = 0; i < n; i++) {
        json_t *const each = whole ? value : json_array_get(value, i);
        char place[API_PARAM_MAX];
        (void)snprintf(place, sizeof place, whole ? "%s" : "%s[%zu]", name, i);
        bytes += (int64_t)json_string_length(each); /* 0 of a list */
        if (tokens != NULL && bytes / INPUT_BYTES_PER_TOKEN > tokens->most) {
            return input_too_many_tokens(error, name, *tokens);
        }
        if (!input_read_one(&list->input[i], each, place, rules, limits, error)) {
            return false;
        }
        total += list->input[i].n_ids;
        if (tokens != NULL && total > tokens->most) {
            return input_too_many_tokens(error, name, *tokens);
        }
    }
    return true;
}

/* ---- shared fields ------------------------------------------------------------------------- */

void input_model(struct fields *fields, const struct api_limits *limits)
{
    const char *const model = fields_string(fields, "model", NULL);
    const size_t n = strlen(limits->model_name);
    /* MODEL:OVERLAY names the model, too; io/overlay.c reads what follows the colon. */
    if (model != NULL && (strncmp(model, limits->model_name, n) != 0 ||
                          (model[n] != '\0' && (model[n] != ':' || limits->overlays == NULL)))) {
        (void)api_error_set(fields->error, 404, "model_not_found", "model",
                            "the model %.80s is not served here; %.80s is", model,
                            limits->model_name);
    }
}

void input_language(struct fields *fields, const struct api_limits *limits, int *lang)
{
    json_t *const value = fields_get(fields, "language", "lang");
    if (value == NULL) {
        return;
    }
    const struct model_info *const info = limits->info;
    const char *const used = fields_used(fields, "language", "lang");
    if (info->n_lang == 0) {
        (void)api_error_set(fields->error, 400, "unsupported_parameter", used,
                            "the model has no language embeddings");
        return;
    }
    int64_t id = -1;
    if (fields_is_integer(value, &id) && id >= 0 && id < info->n_lang) {
        *lang = (int)id;
        return;
    }
    const char *const word = fields_word(value);
    for (int i = 0; word != NULL && i < info->n_lang; i++) {
        if (strcmp(info->lang[i], word) == 0) {
            *lang = i;
            return;
        }
    }
    char names[200] = "";
    for (int i = 0; i < info->n_lang; i++) {
        const size_t n = strlen(names);
        (void)snprintf(names + n, sizeof names - n, "%s%s", i == 0 ? "" : ", ", info->lang[i]);
    }
    const char *const quote = word != NULL ? "\"" : "";
    (void)api_error_set(fields->error, 400, "invalid_value", used,
                        "%s is %s%.40s%s, but must be an id 0 ... %d or one of: %s", used, quote,
                        word != NULL ? word : fields_shown(value).text, quote, info->n_lang - 1,
                        names);
}

enum input_memory input_memory(struct fields *fields, const struct api_limits *limits)
{
    json_t *const value = fields_get(fields, "memory", NULL);
    if (value == NULL || json_is_false(value)) {
        return MEMORY_OFF;
    }
    static const char *const words[] = {"summary", "tokens", "slots"};
    const char *const word = fields_word(value);
    enum input_memory memory = MEMORY_OFF;
    for (int i = 0; i < 3 && word != NULL; i++) {
        memory = strcmp(word, words[i]) == 0 ? (enum input_memory)(MEMORY_SUMMARY + i) : memory;
    }
    if (memory == MEMORY_OFF) {
        (void)api_error_set(fields->error, 400, "invalid_value", "memory",
                            "memory must be false, \"summary\", \"tokens\" or \"slots\"");
    } else if (limits->memory_trace == MEMORY_TRACE_OFF) {
        (void)api_error_set(fields->error, 403, "memory_trace_disabled", "memory",
                            "the server runs with --memory-trace off: it tells nothing of its "
                            "memories");
    } else if (limits->memory_trace == MEMORY_TRACE_SUMMARY && memory != MEMORY_SUMMARY) {
        (void)api_error_set(
            fields->error, 403, "memory_trace_disabled", "memory",
            "the server runs with --memory-trace summary: \"summary\" is what it gives");
    } else if (memory == MEMORY_SLOTS && limits->info->n_memory == 0) {
        (void)api_error_set(fields->error, 400, "unsupported_parameter", "memory",
                            "memory \"slots\" tells which slots were read, and this model has no "
                            "memories");
    }
    return memory;
}

int input_priority(struct fields *fields)
{
    static const char *const names[] = {"interactive", "bulk", NULL};
    const int i = fields_choice(fields, "priority", names);
    return i < 0 ? -1 : i == 0 ? PRIORITY_INTERACTIVE : PRIORITY_BULK;
}

int64_t input_deadline(struct fields *fields, const struct api_limits *limits)
{
    int ms = limits->timeout_ms;
    fields_int(fields, "timeout_ms", NULL, 1, limits->max_timeout_ms, &ms);
    return clock_now_us() + ms * INT64_C(1000);
}

uint64_t input_cache_scope(struct fields *fields)
{
    enum { SALT_MAX = 1024 };
    const char *const salt = fields_string(fields, "cache_salt", NULL);
    if (salt == NULL) {
        return 0;
    }
    const size_t bytes = strlen(salt);
    if (bytes < 1 || bytes > SALT_MAX) {
        (void)api_error_set(fields->error, 400, "invalid_value", "cache_salt",
                            "cache_salt has %zu bytes, but must have 1 ... %d", bytes, SALT_MAX);
        return 0;
    }
    struct sha256 sum;
    unsigned char digest[SHA256_BYTES];
    uint64_t scope = 0;
    sha256_begin(&sum);
    sha256_add(&sum, salt, bytes);
    sha256_end(&sum, digest);
    memcpy(&scope, digest, sizeof scope);
    return scope;
}

bool input_id(struct fields *fields, char *id, size_t id_max)
{
    id[0] = '\0';
    const json_t *const value =
        fields->defaults != NULL ? json_object_get(fields->object, "id") : NULL;
    if (json_is_integer(value)) {
        (void)fields_get(fields, "id", "request_id");
        (void)snprintf(id, id_max, "%lld", (long long)json_integer_value(value));
        return true;
    }
    const char *const given = fields_string(fields, "id", "request_id");
    if (given == NULL) {
        return false;
    }
    if (strlen(given) >= id_max) {
        return api_error_set(fields->error, 400, "invalid_value", "id",
                             "id has %zu bytes, but %zu are the limit", strlen(given), id_max - 1);
    }
    memcpy(id, given, strlen(given) + 1);
    return false;
}

/* Fields that are not implemented on purpose, on all routes. off: the number that asks for
 * nothing. */
static const struct {
    const char *name;
    double off;
} unsupported[] = {
    /* adapters */
    {"lora", 0},
    {"lora_path", 0},
    {"lora_request", 0},
    {"adapter_id", 0},
    /* other inputs than text */
    {"images", 0},
    {"image_data", 0},
    {"audio_data", 0},
    {"video_data", 0},
    {"multi_modal_data", 0},
    {"prompt_embeds", 0},
    {"input_embeds", 0},
    /* structured output */
    {"grammar", 0},
    {"json_schema", 0},
    {"response_format", 0},
    {"structured_outputs", 0},
    {"guided_json", 0},
    {"guided_regex", 0},
    {"guided_choice", 0},
    {"guided_grammar", 0},
    /* tools and chat */
    {"tools", 0},
    {"tool_choice", 0},
    {"functions", 0},
    {"function_call", 0},
    {"chat_template", 0},
    {"chat_template_kwargs", 0},
    /* speculation and disaggregation */
    {"speculative_config", 0},
    {"prediction", 0},
    {"kv_transfer_params", 0},
    {"ec_transfer_params", 0},
    {"disaggregated_params", 0},
    /* other ways to draw */
    {"use_beam_search", 0},
    {"length_penalty", 1},
    {"early_stopping", 0},
    {"typical_p", 1},
    {"tfs_z", 1},
    {"mirostat", 0},
    {"dry_multiplier", 0},
    {"xtc_probability", 0},
    {"watermark", 0},
    {"watermarking", 0},
    {"repetition_detection", 0},
    {"bad_words", 0},
    {"logits_processors", 0},
    {"logprob_token_ids", 0},
    /* another prompt than the one given */
    {"suffix", 0},
    {"truncate", 0},
    {"truncate_prompt_tokens", 0},
};

/* Clients send fields that they do not need as false, empty, "none" or a neutral value. */
static bool input_asks_nothing(const json_t *value, double off)
{
    const char *const word = fields_word(value);
    switch (json_typeof(value)) {
    case JSON_STRING: return word != NULL && (word[0] == '\0' || strcmp(word, "none") == 0);
    case JSON_ARRAY: return json_array_size(value) == 0;
    case JSON_OBJECT: {
        const char *const type = fields_word(json_object_get(value, "type"));
        return json_object_size(value) == 0 ||
               (json_object_size(value) == 1 && type != NULL && strcmp(type, "text") == 0);
    }
    case JSON_INTEGER:
    case JSON_REAL: return json_number_value(value) >= off && json_number_value(value) <= off;
    default: return json_is_false(value);
    }
}

void input_refuse(struct fields *fields)
{
    for (size_t i = 0; i < sizeof unsupported / sizeof unsupported[0]; i++) {
        const char *const name = unsupported[i].name;
        if (json_object_get(fields->object, name) == NULL || fields_asked(fields, name)) {
            continue; /* it is not given, or this dialect has it */
        }
        const json_t *const value = fields_get(fields, name, NULL);
        if (value != NULL && !input_asks_nothing(value, unsupported[i].off)) {
            (void)api_error_set(fields->error, 400, "unsupported_parameter", name,
                                "%s is not supported by this server", name);
        }
    }
}
