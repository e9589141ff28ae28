/* POST /tokenize and /detokenize, GET /tokenizer_info.
 *
 * The paths are shared by three families of clients, told apart by the key that holds the text:
 * prompt and content get their own answer each, inputs (TGI) a list and that dialect's errors. */
#include "engine/tokenizer.h"
#include "server/api/routes.h"
#include "server/generate/tgi.h"
#include "server/io/answer.h"

#include <jansson.h>
#include <stdlib.h>
#include <string.h>

struct tokenised {
    struct input input;
    bool list, content, pieces;
};

/* Which dialect, its options, and the text as tokens. */
static bool read_text(struct server *server, struct fields *fields, struct tokenised *t,
                      char ignored[FIELDS_IGNORED_MAX])
{
    const struct api_limits *const limits = &server->limits;
    const char *const names[] = {"prompt", "content", "inputs"};
    const char *name = NULL;
    json_t *value = NULL;
    for (int i = 0; i < 3; i++) {
        json_t *const each = fields_get(fields, names[i], NULL);
        if (each != NULL && value != NULL) {
            return api_error_set(fields->error, 400, "conflicting_fields", names[i],
                                 "%s and %s are two forms of input: give one of them", name,
                                 names[i]);
        }
        name = each != NULL ? names[i] : name;
        value = each != NULL ? each : value;
    }
    if (value == NULL) {
        return api_error_set(fields->error, 400, "missing_field", "prompt", "prompt is missing");
    }
    if (!json_is_string(value)) {
        return api_error_set(fields->error, 400, "invalid_value", name, "%s must be a string",
                             name);
    }
    t->content = strcmp(name, "content") == 0;
    t->list = strcmp(name, "inputs") == 0;
    bool special = !t->content;
    bool control = true;
    input_model(fields, limits);
    fields_bool(fields, "add_special_tokens", "add_special", &special);
    fields_bool(fields, "return_token_strs", "with_pieces", &t->pieces);
    fields_bool(fields, "parse_special", NULL, &control);
    fields_finish(fields, limits->strict, ignored);
    if (fields->error->status != 0) {
        return false;
    }
    t->input.text = json_string_value(value);
    t->input.text_bytes = json_string_length(value);
    struct err err = {0};
    size_t n = 0;
    if (tokenizer_encode(limits->tokenizer, t->input.text, t->input.text_bytes, control,
                         &t->input.ids, &n, &t->input.offsets, &err) != ERR_OK) {
        return err.code == ERR_MEMORY
                   ? api_error_set(fields->error, 500, "out_of_memory", name, "%s", err.message)
                   : api_error_set(fields->error, 400, "invalid_value", name, "%s", err.message);
    }
    t->input.n_ids = (int64_t)n;
    t->input.n_bos = special && limits->info->add_bos && limits->info->bos_id >= 0 ? 1 : 0;
    return true;
}

/* [{"id","text","start","stop"}], positions in characters. */
static bool write_list(struct text *out, const struct tokenised *t,
                       const struct tokenizer *tokenizer, const struct model_info *info,
                       struct api_error *error)
{
    const struct input *const input = &t->input;
    const struct input plain = {.text = input->text,
                                .text_bytes = input->text_bytes,
                                .n_ids = input->n_ids,
                                .offsets = input->offsets};
    struct answer_walk walk;
    if (!answer_walk_begin(&walk, &plain, tokenizer)) {
        return api_error_set(error, 500, "out_of_memory", NULL, "no memory for the answer");
    }
    json_open(out, '[');
    if (input->n_bos > 0) {
        json_open(out, '{');
        json_field_int(out, "id", info->bos_id);
        json_field_string(out, "text", tokenizer_piece(tokenizer, info->bos_id));
        json_field_int(out, "start", 0);
        json_field_int(out, "stop", 0);
        json_close(out, '}');
    }
    int64_t start = answer_walk_next(&walk, 0, 0);
    for (int64_t i = 0; i < input->n_ids; i++) {
        const size_t first = input->offsets[i];
        const size_t end = i + 1 < input->n_ids ? input->offsets[i + 1] : input->text_bytes;
        const int64_t stop = answer_walk_next(&walk, i + 1, 0);
        json_open(out, '{');
        json_field_int(out, "id", input->ids[i]);
        json_key(out, "text");
        json_string_n(out, input->text + first, end > first ? end - first : 0);
        json_field_int(out, "start", start);
        json_field_int(out, "stop", stop);
        json_close(out, '}');
        start = stop;
    }
    json_close(out, ']');
    answer_walk_end(&walk);
    return true;
}

/* ids with the BOS in front, in either of the two single-text forms. */
static void write_tokens(struct text *out, const struct tokenised *t,
                         const struct api_limits *limits)
{
    const struct input *const input = &t->input;
    const int64_t n = input->n_ids + input->n_bos;
    json_open(out, '{');
    if (!t->content) {
        json_field_int(out, "count", n);
        json_field_int(out, "max_model_len", engine_context(limits->context));
    }
    json_key(out, "tokens");
    json_open(out, '[');
    for (int64_t i = 0; i < n; i++) {
        const int32_t id = i < input->n_bos ? limits->info->bos_id : input->ids[i - input->n_bos];
        if (t->content && t->pieces) {
            json_open(out, '{');
            json_field_int(out, "id", id);
            json_field_string(out, "piece", tokenizer_piece(limits->tokenizer, id));
            json_close(out, '}');
        } else {
            json_put_int(out, id);
        }
    }
    json_close(out, ']');
    if (!t->content && t->pieces) {
        json_key(out, "token_strs");
        json_open(out, '[');
        for (int64_t i = 0; i < n; i++) {
            const int32_t id =
                i < input->n_bos ? limits->info->bos_id : input->ids[i - input->n_bos];
            json_put_string(out, tokenizer_piece(limits->tokenizer, id));
        }
        json_close(out, ']');
    } else if (!t->content) {
        json_field_null(out, "token_strs");
    }
    json_close(out, '}');
}

static bool needs_tokenizer(const struct server *server, struct exchange *x)
{
    if (server->limits.tokenizer == NULL) {
        exchange_refuse(x, 400, "unsupported_parameter", NULL,
                        "the model has no tokenizer: it takes and gives token ids only");
        return false;
    }
    return true;
}

void api_tokenize(struct server *server, struct exchange *x)
{
    if (!needs_tokenizer(server, x)) {
        return;
    }
    struct api_error error = {0};
    struct fields fields;
    struct tokenised t = {0};
    char ignored[FIELDS_IGNORED_MAX] = "";
    bool ok = fields_open(&fields, x->body.data, x->body.n, &error);
    if (ok && json_object_get(fields.object, "inputs") != NULL && !fields_has(&fields, "prompt")) {
        x->errors = &tgi_errors;
    }
    ok = ok && read_text(server, &fields, &t, ignored);
    if (ok && t.list) {
        ok = write_list(&x->out, &t, server->limits.tokenizer, server->limits.info, &error);
    } else if (ok) {
        write_tokens(&x->out, &t, &server->limits);
    }
    if (ok) {
        x->n_prompt = t.input.n_ids;
        exchange_json(x, 200);
    } else {
        routes_error(server, x, &error);
    }
    if (ignored[0] != '\0') {
        exchange_header(x, "X-Ignored-Fields", "%s", ignored);
    }
    free(t.input.ids);
    free(t.input.offsets);
    fields_close(&fields);
}

void api_detokenize(struct server *server, struct exchange *x)
{
    if (!needs_tokenizer(server, x)) {
        return;
    }
    struct api_error error = {0};
    struct err err = {0};
    struct fields fields;
    char ignored[FIELDS_IGNORED_MAX] = "";
    int32_t *ids = NULL;
    int64_t n = 0;
    char *text = NULL;
    size_t bytes = 0;
    bool ok = fields_open(&fields, x->body.data, x->body.n, &error);
    json_t *const tokens = ok ? fields_get(&fields, "tokens", NULL) : NULL;
    if (ok && !json_is_array(tokens)) {
        ok = api_error_set(&error, 400, tokens == NULL ? "missing_field" : "invalid_value",
                           "tokens", "tokens must be a list of token ids");
    }
    if (ok) {
        input_model(&fields, &server->limits);
        fields_finish(&fields, server->limits.strict, ignored);
        ok = error.status == 0 &&
             input_ids(tokens, "tokens", NULL, server->limits.info->n_vocab, &ids, &n, &error);
    }
    if (ok &&
        tokenizer_decode(server->limits.tokenizer, ids, (size_t)n, &text, &bytes, &err) != ERR_OK) {
        ok = err.code == ERR_MEMORY
                 ? api_error_set(&error, 500, "out_of_memory", NULL, "%s", err.message)
                 : api_error_set(&error, 500, "internal_error", NULL, "%s", err.message);
    }
    if (ok) {
        json_open(&x->out, '{');
        json_key(&x->out, "prompt");
        json_string_n(&x->out, text, bytes);
        json_key(&x->out, "content");
        json_string_n(&x->out, text, bytes);
        json_close(&x->out, '}');
        exchange_json(x, 200);
    } else {
        routes_error(server, x, &error);
    }
    if (ignored[0] != '\0') {
        exchange_header(x, "X-Ignored-Fields", "%s", ignored);
    }
    free(ids);
    free(text);
    fields_close(&fields);
}

void api_tokenizer_info(struct server *server, struct exchange *x)
{
    if (!needs_tokenizer(server, x)) {
        return;
    }
    const struct model_info *const info = server->limits.info;
    const struct tokenizer *const tokenizer = server->limits.tokenizer;
    const struct {
        const char *name;
        int id;
    } special[] = {{"bos_token", info->bos_id},
                   {"eos_token", info->eos_id},
                   {"pad_token", info->pad_id},
                   {"unk_token", info->unk_id}};
    struct text *const out = &x->out;
    json_open(out, '{');
    json_field_string(out, "tokenizer_class", tokenizer_kind(tokenizer));
    for (size_t i = 0; i < sizeof special / sizeof special[0]; i++) {
        json_field_string(out, special[i].name,
                          special[i].id >= 0 ? tokenizer_piece(tokenizer, special[i].id) : NULL);
    }
    json_field_bool(out, "add_bos_token", info->add_bos);
    json_field_int(out, "model_max_length", engine_context(server->limits.context));
    json_field_null(out, "chat_template");
    json_close(out, '}');
    exchange_json(x, 200);
}
