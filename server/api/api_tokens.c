/* POST /tokenize and /detokenize, GET /tokenizer_info.
 *
 * The paths are shared by three families of clients, told apart by the key that holds the text:
 * prompt and content get their own answer each, inputs (TGI) a list and that dialect's errors.
 * Answers are written in pieces, so that none lies in memory whole. */
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
    struct input plain; /* the same without the BOS, to walk over the text */
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

/* What an answer is written from. It belongs to one of the two routes, and the other one's fields
 * are zero. */
struct token_work {
    const struct server *server;                              /* Borrowed */
    bool (*write)(struct token_work *work, struct text *out); /* writes the next piece; true: it was
                                                               * the last */
    bool begun, comma; /* entry of the list or object that is open between two pieces */

    json_t *body;       /* Owner: the text points into it */
    struct tokenised t; /* Owner of ids and offsets */
    int64_t at;         /* the next entry */
    struct answer_walk walk;
    int64_t start; /* where that entry is in the text, in characters */

    char *text; /* Owner: [text_bytes] UTF-8 */
    size_t text_bytes, text_at;
    bool is_content; /* it is written twice, first as prompt and then as content */
};

static bool has_room(const struct text *out)
{
    return out->n < ANSWER_PIECE_BYTES;
}

/* [{"id","text","start","stop"}], positions in characters. */
static void write_list_entry(struct text *out, int32_t id, const char *piece, size_t bytes,
                             int64_t start, int64_t stop)
{
    json_open(out, '{');
    json_field_int(out, "id", id);
    json_key(out, "text");
    json_string_n(out, piece, bytes);
    json_field_int(out, "start", start);
    json_field_int(out, "stop", stop);
    json_close(out, '}');
}

static bool write_list(struct token_work *work, struct text *out)
{
    const struct input *const input = &work->t.input;
    if (!work->begun) {
        const int32_t bos = work->server->limits.info->bos_id;
        const char *const piece =
            input->n_bos > 0 ? tokenizer_piece(work->server->limits.tokenizer, bos) : NULL;
        json_open(out, '[');
        if (piece != NULL) {
            write_list_entry(out, bos, piece, strlen(piece), 0, 0);
        }
        work->start = answer_walk_next(&work->walk, 0, 0);
    }
    for (; work->at < input->n_ids && has_room(out); work->at++) {
        const int64_t i = work->at;
        const size_t first = input->offsets[i];
        const size_t end = i + 1 < input->n_ids ? input->offsets[i + 1] : input->text_bytes;
        const int64_t stop = answer_walk_next(&work->walk, i + 1, 0);
        write_list_entry(out, input->ids[i], input->text + first, end > first ? end - first : 0,
                         work->start, stop);
        work->start = stop;
    }
    if (work->at < input->n_ids) {
        return false;
    }
    json_close(out, ']');
    return true;
}

/* Entry at % n of the list of ids; then, if pieces were requested, of the list of pieces that
 * follows. */
static void write_token(struct token_work *work, struct text *out, int64_t n)
{
    const struct tokenised *const t = &work->t;
    const struct api_limits *const limits = &work->server->limits;
    const int64_t i = work->at % n;
    const int32_t id = i < t->input.n_bos ? limits->info->bos_id : t->input.ids[i - t->input.n_bos];
    if (work->at >= n) {
        json_put_string(out, tokenizer_piece(limits->tokenizer, id));
    } else if (t->content && t->pieces) {
        json_open(out, '{');
        json_field_int(out, "id", id);
        json_field_string(out, "piece", tokenizer_piece(limits->tokenizer, id));
        json_close(out, '}');
    } else {
        json_put_int(out, id);
    }
}

/* Writes the ids, with the BOS in front, in either of the two forms for a single text. */
static bool write_tokens(struct token_work *work, struct text *out)
{
    const struct tokenised *const t = &work->t;
    const bool strings = !t->content && t->pieces;
    const int64_t n = t->input.n_ids + t->input.n_bos;
    const int64_t n_entry = strings ? 2 * n : n;
    if (!work->begun) {
        json_open(out, '{');
        if (!t->content) {
            json_field_int(out, "count", n);
            json_field_int(out, "max_model_len", engine_context(work->server->limits.context));
        }
        json_key(out, "tokens");
        json_open(out, '[');
    }
    for (; work->at < n_entry && has_room(out); work->at++) {
        if (work->at == n) {
            json_close(out, ']');
            json_key(out, "token_strs");
            json_open(out, '[');
        }
        write_token(work, out, n);
    }
    if (work->at < n_entry) {
        return false;
    }
    if (n == 0 && strings) {
        json_close(out, ']');
        json_key(out, "token_strs");
        json_open(out, '[');
    }
    json_close(out, ']');
    if (!t->content && !strings) {
        json_field_null(out, "token_strs");
    }
    json_close(out, '}');
    return true;
}

/* {"prompt","content"}: the same text for the clients of either. */
static bool write_text(struct token_work *work, struct text *out)
{
    if (!work->begun) {
        json_open(out, '{');
        json_key(out, "prompt");
        json_string_begin(out);
    }
    for (;;) {
        const size_t left = work->text_bytes - work->text_at;
        size_t n = left < ANSWER_PIECE_BYTES ? left : ANSWER_PIECE_BYTES;
        while (n < left && n > 1 && (work->text[work->text_at + n] & 0xC0) == 0x80) {
            n--; /* not within a character */
        }
        json_string_part(out, work->text + work->text_at, n);
        work->text_at += n;
        if (work->text_at < work->text_bytes) {
            return false;
        }
        json_string_end(out);
        if (work->is_content) {
            json_close(out, '}');
            return true;
        }
        work->is_content = true;
        work->text_at = 0;
        json_key(out, "content");
        json_string_begin(out);
    }
}

static enum exchange_next work_next(struct exchange *x, void *data)
{
    struct token_work *const work = data;
    x->out.comma = work->comma;
    const bool done = work->write(work, &x->out);
    work->begun = true;
    work->comma = x->out.comma;
    return routes_piece(x, NULL, done);
}

static void work_gone(void *data)
{
    (void)data; /* there is no running work to cancel */
}

static void work_free(void *data)
{
    struct token_work *const work = data;
    answer_walk_end(&work->walk);
    json_decref(work->body);
    free(work->t.input.ids);
    free(work->t.input.offsets);
    free(work->text);
    free(work);
}

static const struct exchange_work work_ops = {
    .next = work_next, .gone = work_gone, .free = work_free};

/* Owner of the result: the caller. NULL: there is no memory, and x has the error. */
static struct token_work *work_new(struct server *server, struct exchange *x)
{
    struct token_work *const work = calloc(1, sizeof *work);
    if (work == NULL) {
        exchange_refuse(x, 500, "out_of_memory", NULL, "no memory for the answer");
        return NULL;
    }
    work->server = server;
    return work;
}

/* work writes the answer, or there is an error. */
static void answer(struct server *server, struct exchange *x, struct token_work *work,
                   const struct api_error *error, const char *ignored)
{
    if (error->status != 0) {
        routes_error(server, x, error);
        work_free(work);
    } else {
        x->work = &work_ops;
        x->work_data = work;
    }
    if (ignored[0] != '\0') {
        exchange_header(x, "X-Ignored-Fields", "%s", ignored);
    }
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
    struct token_work *const work = needs_tokenizer(server, x) ? work_new(server, x) : NULL;
    if (work == NULL) {
        return;
    }
    struct api_error error = {0};
    struct fields fields;
    struct tokenised *const t = &work->t;
    char ignored[FIELDS_IGNORED_MAX] = "";
    bool ok = fields_open(&fields, x->body.data, x->body.n, &error);
    if (ok && json_object_get(fields.object, "inputs") != NULL && !fields_has(&fields, "prompt")) {
        x->errors = &tgi_errors;
    }
    ok = ok && read_text(server, &fields, t, ignored);
    work->body = fields.object; /* the text lives there */
    work->write = t->list ? write_list : write_tokens;
    if (ok && t->list) {
        t->plain = (struct input){.text = t->input.text,
                                  .text_bytes = t->input.text_bytes,
                                  .n_ids = t->input.n_ids,
                                  .offsets = t->input.offsets};
        ok = answer_walk_begin(&work->walk, &t->plain, server->limits.tokenizer) ||
             api_error_set(&error, 500, "out_of_memory", NULL, "no memory for the answer");
    }
    if (ok) {
        x->n_prompt = t->input.n_ids;
        x->held_bytes = (int64_t)t->input.text_bytes +
                        t->input.n_ids * (int64_t)(sizeof(int32_t) + sizeof(size_t));
    }
    answer(server, x, work, &error, ignored);
}

/* Writes the text of the ids in the body. */
static bool read_ids(struct server *server, struct fields *fields, struct token_work *work,
                     char ignored[FIELDS_IGNORED_MAX])
{
    struct api_error *const error = fields->error;
    json_t *const tokens = fields_get(fields, "tokens", NULL);
    int32_t *ids = NULL;
    int64_t n = 0;
    struct err err = {0};
    if (!json_is_array(tokens)) {
        return api_error_set(error, 400, tokens == NULL ? "missing_field" : "invalid_value",
                             "tokens", "tokens must be a list of token ids");
    }
    input_model(fields, &server->limits);
    fields_finish(fields, server->limits.strict, ignored);
    if (error->status != 0 ||
        !input_ids(tokens, "tokens", NULL, server->limits.info->n_vocab, &ids, &n, error)) {
        free(ids);
        return false;
    }
    const enum err_code code = tokenizer_decode(server->limits.tokenizer, ids, (size_t)n,
                                                &work->text, &work->text_bytes, &err);
    free(ids);
    return code == ERR_OK ||
           api_error_set(error, 500, code == ERR_MEMORY ? "out_of_memory" : "internal_error", NULL,
                         "%s", err.message);
}

void api_detokenize(struct server *server, struct exchange *x)
{
    struct token_work *const work = needs_tokenizer(server, x) ? work_new(server, x) : NULL;
    if (work == NULL) {
        return;
    }
    struct api_error error = {0};
    struct fields fields;
    char ignored[FIELDS_IGNORED_MAX] = "";
    work->write = write_text;
    if (fields_open(&fields, x->body.data, x->body.n, &error) &&
        read_ids(server, &fields, work, ignored)) {
        x->held_bytes = (int64_t)work->text_bytes;
    }
    fields_close(&fields);
    answer(server, x, work, &error, ignored);
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
