/* The answers of the TGI dialect: see tgi.h. */
#include "engine/tokenizer.h"
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

/* Lists that grow side by side in one walk over the tokens. */
struct tgi_lists {
    const struct tokenizer *tokenizer;
    struct text prefill, tokens, tops;
};

static void lists_end(struct tgi_lists *lists)
{
    text_free(&lists->prefill);
    text_free(&lists->tokens);
    text_free(&lists->tops);
}

static void lists_put_prefill(void *ctx, const struct answer_token *token)
{
    struct tgi_lists *const lists = ctx;
    put_token(&lists->prefill, lists->tokenizer, token, true);
}

static void lists_put(void *ctx, const struct answer_token *token)
{
    struct tgi_lists *const lists = ctx;
    put_token(&lists->tokens, lists->tokenizer, token, false);
    put_tops(&lists->tops, lists->tokenizer, token);
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

static void write_details(struct text *out, const struct generate_job *job,
                          const struct tgi_lists *lists, const struct api_limits *limits)
{
    json_key(out, "details");
    json_open(out, '{');
    write_ending(out, job, 0, limits);
    json_field_list(out, "prefill", &lists->prefill);
    json_field_list(out, "tokens", &lists->tokens);
    if (job->tgi.tops) {
        json_field_list(out, "top_tokens", &lists->tops);
    }
    json_close(out, '}');
}

/* The prompt if it is wanted, and the continuation. */
static bool walk_text(struct text *text, const struct generate_job *job,
                      const struct api_limits *limits, const struct generate_sink *sink,
                      struct api_error *error)
{
    const struct item *const item = &job->request->item[0];
    return (!job->echo ||
            answer_input_text(text, generate_input(job, 0), item->ids, limits->tokenizer, error)) &&
           generate_walk(text, job, 0, 0, limits, sink, error);
}

/* "generated_text". */
static bool write_text(struct text *out, const struct generate_job *job,
                       const struct api_limits *limits, const struct generate_sink *sink,
                       struct api_error *error)
{
    struct text text = {0};
    const bool ok = walk_text(&text, job, limits, sink, error);
    json_key(out, "generated_text");
    json_string_n(out, text.data, text.n);
    out->failed = out->failed || text.failed;
    text_free(&text);
    return ok;
}

bool tgi_write(struct text *out, const struct generate_job *job, int item,
               const struct api_limits *limits, const struct answer_meta *meta,
               struct api_error *error)
{
    CHECK(item == 0 && job->request->n_item == 1);
    struct tgi_lists lists = {.tokenizer = limits->tokenizer};
    const struct generate_sink sink = {lists_put, &lists};
    const struct generate_sink prefill = {lists_put_prefill, &lists};
    if (job->tgi.listed) {
        json_open(out, '[');
    }
    json_open(out, '{');
    bool ok = write_text(out, job, limits, job->details ? &sink : NULL, error);
    if (ok && job->prompt_logprobs >= 0) {
        ok = generate_walk_prompt(job, 0, 0, limits->tokenizer, &prefill, error);
    }
    if (ok && job->details) {
        write_details(out, job, &lists, limits);
    }
    overlay_put(out, meta->overlays); /* an extension */
    json_close(out, '}');
    if (job->tgi.listed) {
        json_close(out, ']');
    }
    lists_end(&lists);
    return ok;
}

/* ---- events -------------------------------------------------------------------------------- */

bool tgi_write_event(struct text *out, const struct generate_job *job,
                     const struct generate_event *event, const struct api_limits *limits,
                     const struct answer_meta *meta, struct api_error *error)
{
    const struct item *const item = &job->request->item[event->item];
    CHECK(event->token >= 0); /* max_new_tokens is at least 1, and the end comes with a token */
    struct answer_token token = generate_token(job, item, event->token, -1);
    token.fresh = event->fresh;
    token.n_fresh = event->n_fresh;
    bool ok = true;
    generate_event_open(out);
    json_field_int(out, "index", event->token + 1);
    json_key(out, "token");
    put_token(out, limits->tokenizer, &token, false);
    if (job->tgi.tops) {
        json_key(out, "top_tokens");
        put_tops(out, limits->tokenizer, &token);
    }
    if (event->last) {
        ok = write_text(out, job, limits, NULL, error);
        json_key(out, "details");
        json_open(out, '{');
        write_ending(out, job, event->item, limits);
        json_field_int(out, "input_length", item->n_ids);
        json_close(out, '}');
        overlay_put(out, meta->overlays);
    } else {
        json_field_null(out, "generated_text");
        json_field_null(out, "details");
    }
    generate_event_close(out);
    return ok;
}

/* ---- errors -------------------------------------------------------------------------------- */

/* TGI has one word per kind of failure, and clients tell them apart by it alone. */
static const char *error_type(const struct api_error *error)
{
    const char *const code = error->code;
    if (strncmp(code, "queue_", 6) == 0 || strcmp(code, "client_limit") == 0 ||
        strcmp(code, "buffers_full") == 0) {
        return "overloaded";
    }
    switch (error->status) {
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
    json_field_string(out, "error_type", error_type(error));
    json_close(out, '}');
}

const struct exchange_errors tgi_errors = {.status = error_status, .put = put_error};
