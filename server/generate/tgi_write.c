/* The answers of the TGI dialect: see tgi.h. */
#include "engine/tokenizer.h"
#include "server/generate/generate_writer.h"
#include "server/generate/tgi.h"
#include "server/io/overlay.h"
#include "server/net/exchange.h"

#include <string.h>

/* ---- tokens -------------------------------------------------------------------------------- */

static void put_logprob(struct text *out, float logprob, bool unknown)
{
    json_key(out, "logprob");
    if (unknown) {
        json_put_null(out);
    } else {
        json_put_float(out, logprob); /* minus infinity is null */
    }
}

static bool is_special(const struct tokenizer *tokenizer, int32_t id)
{
    return tokenizer != NULL && tokenizer_is_control(tokenizer, id);
}

/* {"id","text","logprob"}, and "special" but for the prompt's. A generated token's text is the
 * characters that it completed, so that all of them together are the text. */
static void put_token(struct text *out, const struct tokenizer *tokenizer,
                      const struct answer_token *token, bool prefill)
{
    const bool special = is_special(tokenizer, token->id);
    json_open(out, '{');
    json_field_int(out, "id", token->id);
    json_key(out, "text");
    if (token->fresh != NULL && !special) {
        json_string_n(out, token->fresh, token->n_fresh);
    } else {
        answer_put_spelling(out, tokenizer, token->id, token->before);
    }
    put_logprob(out, token->logprob, token->first);
    if (!prefill) {
        json_field_bool(out, "special", special);
    }
    json_close(out, '}');
}

/* The best tokens in the place of this one, as a list. */
static void put_tops(struct text *out, const struct tokenizer *tokenizer,
                     const struct answer_token *token)
{
    json_open(out, '[');
    for (int j = 0; j < token->n_top; j++) {
        const struct answer_token top = {
            .id = token->top_id[j], .before = token->before, .logprob = token->top_logprob[j]};
        put_token(out, tokenizer, &top, false);
    }
    json_close(out, ']');
}

/* ---- details ------------------------------------------------------------------------------- */

static void list_prefill(struct generate_writer *w, struct text *out,
                         const struct answer_token *token)
{
    put_token(out, w->limits->tokenizer, token, true);
}

static void list_token(struct generate_writer *w, struct text *out,
                       const struct answer_token *token)
{
    put_token(out, w->limits->tokenizer, token, false);
}

static void list_tops(struct generate_writer *w, struct text *out, const struct answer_token *token)
{
    put_tops(out, w->limits->tokenizer, token);
}

/* "finish_reason", "generated_tokens", "seed". */
static void write_ending(struct text *out, const struct generate_job *job, int index,
                         const struct api_limits *limits)
{
    const struct item *const item = &job->request->item[index];
    const bool stop = atomic_load(&item->state) == FINISH_STOP;
    const bool eos =
        stop && item->stop_string < 0 && end_ids_have(&limits->info->ends, item->stop_id);
    json_field_string(out, "finish_reason", eos ? "eos_token" : stop ? "stop_sequence" : "length");
    json_field_int(out, "generated_tokens", atomic_load(&item->n_out));
    json_key(out, "seed");
    if (job->tgi.sampled) {
        json_put_uint(out, job->request->sampling.seed);
    } else {
        json_put_null(out);
    }
}

/* "generated_text": the prompt if it is wanted, and the continuation. */
static bool open_text(struct generate_writer *w, struct text *out, struct api_error *error)
{
    return generate_writer_text(w, out, "generated_text",
                                (w->job->echo ? GENERATE_PROMPT : 0) | GENERATE_OUTPUT, error);
}

static bool open_choice(struct generate_writer *w, struct text *out, struct api_error *error)
{
    CHECK(w->job->request->n_item == 1);
    if (w->job->tgi.listed) {
        json_open(out, '[');
    }
    json_open(out, '{');
    return open_text(w, out, error);
}

static bool open_details(struct generate_writer *w, struct text *out, struct api_error *error)
{
    if (!w->job->details) {
        return true;
    }
    const int64_t n_ids = generate_writer_item(w)->n_ids;
    const struct generate_span none = {n_ids, n_ids};
    json_key(out, "details");
    json_open(out, '{');
    write_ending(out, w->job, w->item, w->limits);
    return generate_writer_list(w, out, "prefill",
                                w->job->prompt_logprobs >= 0 ? generate_writer_prompt(w) : none,
                                false, list_prefill, error);
}

static bool open_tokens(struct generate_writer *w, struct text *out, struct api_error *error)
{
    return !w->job->details || generate_writer_list(w, out, "tokens", generate_writer_output(w),
                                                    true, list_token, error);
}

static bool open_tops(struct generate_writer *w, struct text *out, struct api_error *error)
{
    return !w->job->details || !w->job->tgi.tops ||
           generate_writer_list(w, out, "top_tokens", generate_writer_output(w), false, list_tops,
                                error);
}

static bool close_choice(struct generate_writer *w, struct text *out, struct api_error *error)
{
    (void)error;
    if (w->job->details) {
        json_close(out, '}');
    }
    overlay_put(out, w->meta->overlays); /* an extension */
    json_close(out, '}');
    if (w->job->tgi.listed) {
        json_close(out, ']');
    }
    return true;
}

generate_part *const tgi_choice_parts[] = {open_choice, open_details, open_tokens,
                                           open_tops,   close_choice, NULL};

/* ---- events -------------------------------------------------------------------------------- */

static bool open_event(struct generate_writer *w, struct text *out, struct api_error *error)
{
    const struct generate_event *const event = w->event;
    CHECK(event->token >= 0); /* max_new_tokens is at least 1, and the end comes with a token */
    struct answer_token token = generate_token(w->job, generate_writer_item(w), event->token, -1);
    token.fresh = event->fresh;
    token.n_fresh = event->n_fresh;
    generate_event_open(out);
    json_field_int(out, "index", event->token + 1);
    json_key(out, "token");
    put_token(out, w->limits->tokenizer, &token, false);
    if (w->job->tgi.tops) {
        json_key(out, "top_tokens");
        put_tops(out, w->limits->tokenizer, &token);
    }
    if (event->last) {
        return open_text(w, out, error);
    }
    json_field_null(out, "generated_text");
    json_field_null(out, "details");
    return true;
}

static bool close_event(struct generate_writer *w, struct text *out, struct api_error *error)
{
    (void)error;
    if (w->event->last) {
        json_key(out, "details");
        json_open(out, '{');
        write_ending(out, w->job, w->item, w->limits);
        json_field_int(out, "input_length", generate_writer_item(w)->n_ids);
        json_close(out, '}');
        overlay_put(out, w->meta->overlays);
    }
    generate_event_close(out);
    return true;
}

generate_part *const tgi_event_parts[] = {open_event, close_event, NULL};

/* ---- errors -------------------------------------------------------------------------------- */

/* TGI has one word per kind of failure, and clients tell them apart by it alone. NULL for a key
 * that is not valid, for which it has none: without a word clients go by the status. */
static const char *error_type(const struct api_error *error)
{
    const char *const code = error->code;
    if (strncmp(code, "queue_", 6) == 0 || strcmp(code, "client_limit") == 0 ||
        strcmp(code, "buffers_full") == 0) {
        return "overloaded";
    }
    switch (error->status) {
    case 401: return NULL;
    case 500: return strcmp(code, "out_of_memory") == 0 ? "incomplete_generation" : "generation";
    case 503: return "healthcheck";
    case 504: return "incomplete_generation";
    default: return "validation";
    }
}

/* The statuses that TGI has of its own; the others mean the same everywhere. */
static int error_status(const struct api_error *error)
{
    switch (error->status) {
    case 400:
    case 403:
    case 404: return 422;
    case 500: return strcmp(error->code, "out_of_memory") == 0 ? 500 : 424;
    default: return error->status;
    }
}

static void put_error(struct text *out, const struct api_error *error, const char *request_id)
{
    (void)request_id; /* is in the header alone */
    json_open(out, '{');
    json_field_string(out, "error", error->text.message);
    if (error_type(error) != NULL) {
        json_field_string(out, "error_type", error_type(error));
    }
    json_close(out, '}');
}

const struct exchange_errors tgi_errors = {.status = error_status, .put = put_error};
