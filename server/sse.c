/* A generation as server-sent events.
 *
 * One event per token as soon as it exists, even when its text is still held back, so that clients
 * can measure the gaps; one event when a choice ends, the last one of all with usage and timings;
 * then [DONE]. Nothing is sent before the first token exists or the first comment is due: until
 * then an error has its own status. Called by api_generate.c on an http thread whenever the engine
 * has published something or the client has taken what there was. */
#include "server/sse.h"

#include <stdlib.h>

enum {
    SSE_PING_US = 15 * 1000000,
    SSE_PIECE_BYTES = 64 * 1024, /* enough for one call: the rest follows when this is taken */
};

bool sse_begin(struct sse *sse, const struct generate_job *job, const struct api_limits *limits)
{
    const struct request *const request = job->request;
    *sse = (struct sse){.job = job, .limits = limits};
    sse->choice = calloc((size_t)request->n_item, sizeof *sse->choice);
    if (sse->choice == NULL) {
        return false;
    }
    for (int i = 0; i < request->n_item; i++) {
        if (!gentext_begin(&sse->choice[i].gen, request, &request->item[i], limits->tokenizer,
                           limits->info->eos_id)) {
            return false;
        }
    }
    sse->ping_us = engine_now_us() + SSE_PING_US;
    return true;
}

void sse_end(struct sse *sse)
{
    for (int i = 0; sse->choice != NULL && i < sse->job->request->n_item; i++) {
        gentext_end(&sse->choice[i].gen);
    }
    free(sse->choice);
    sse->choice = NULL;
}

static void event_open(struct text *out, int index)
{
    text_puts(out, "data: ");
    out->comma = false;
    json_open(out, '{');
    json_field_int(out, "index", index);
}

static void event_close(struct text *out)
{
    json_close(out, '}');
    text_puts(out, "\n\n");
}

/* The prompt, when echo asks for it: its text and, with logprobs, its tokens. */
static bool event_prompt(struct sse *sse, int i, struct text *out, struct api_error *error)
{
    const struct generate_job *const job = sse->job;
    struct text text = {0};
    bool ok = answer_input_text(&text, generate_input(job, i), job->request->item[i].ids,
                                sse->limits->tokenizer, error);
    sse->choice[i].n_before = text_count_chars(text.data != NULL ? text.data : "", text.n);
    event_open(out, i);
    json_key(out, "text");
    json_string_n(out, text.data, text.n);
    if (ok && job->logprobs >= 0) {
        json_key(out, "prompt");
        json_open(out, '[');
        ok = generate_write_prompt(out, job, i, sse->limits->tokenizer, error);
        json_close(out, ']');
    }
    event_close(out);
    text_free(&text);
    return ok;
}

static void event_token(struct sse *sse, int i, enum finish state, int n_out, struct text *out)
{
    struct sse_choice *const choice = &sse->choice[i];
    const struct item *const item = &sse->job->request->item[i];
    const int k = choice->gen.n_token;
    struct text text = {0};
    const int64_t offset = gentext_push(&choice->gen, state, n_out, &text);
    const struct answer_token token =
        generate_token(sse->job, item, k, offset >= 0 ? choice->n_before + offset : -1);
    event_open(out, i);
    json_key(out, "token");
    answer_put_token(out, sse->limits->tokenizer, &token);
    json_key(out, "text");
    json_string_n(out, text.data, text.n);
    event_close(out);
    out->failed = out->failed || text.failed;
    text_free(&text);
}

/* A choice is over; the last one takes the figures of the whole request along. */
static bool event_end(struct sse *sse, int i, struct text *out, const struct answer_meta *meta,
                      struct api_error *error)
{
    const struct generate_job *const job = sse->job;
    const struct item *const item = &job->request->item[i];
    struct text text = {0};
    gentext_flush(&sse->choice[i].gen, &text);
    event_open(out, i);
    json_key(out, "text");
    json_string_n(out, text.data, text.n);
    out->failed = out->failed || text.failed;
    text_free(&text);
    generate_write_finish(out, item, &job->request->sampling);
    if (job->memory != MEMORY_OFF &&
        !answer_memory(out, item, sse->limits->info, job->memory, error)) {
        return false;
    }
    if (sse->n_ended + 1 == job->request->n_item) {
        answer_head(out, meta, "generation");
        generate_write_tail(out, job, meta);
    }
    event_close(out);
    sse->choice[i].ended = true;
    sse->n_ended++;
    return true;
}

/* Everything that choice i has to say now. false: error. */
static bool sse_choice_next(struct sse *sse, int i, struct text *out,
                            const struct answer_meta *meta, struct api_error *error)
{
    struct sse_choice *const choice = &sse->choice[i];
    const struct request *const request = sse->job->request;
    const struct item *const item = &request->item[i];
    /* In this order: when the state says the item is over, n_out is final. */
    const enum finish state = (enum finish)atomic_load(&item->state);
    const int n_out = atomic_load(&item->n_out);
    if (choice->ended || (state == FINISH_NONE && n_out == 0)) {
        return true;
    }
    if (!choice->begun && sse->job->echo && !event_prompt(sse, i, out, error)) {
        return false;
    }
    choice->begun = true;
    while (out->n < SSE_PIECE_BYTES && gentext_ready(&choice->gen, n_out, state)) {
        event_token(sse, i, state, n_out, out);
    }
    if (state == FINISH_NONE || choice->gen.n_token < n_out) {
        return true;
    }
    if (sse->n_ended + 1 == request->n_item &&
        atomic_load(&request->n_item_done) < request->n_item) {
        return true; /* the request's own times are published a moment after the item's state */
    }
    return event_end(sse, i, out, meta, error);
}

static bool sse_failed(const struct request *request)
{
    for (int i = 0; i < request->n_item; i++) {
        const enum finish state = (enum finish)atomic_load(&request->item[i].state);
        if (state != FINISH_NONE && state != FINISH_STOP && state != FINISH_LENGTH) {
            return true;
        }
    }
    return false;
}

/* Decides about the head. true: the stream is open. */
static bool sse_open(struct sse *sse, struct exchange *x)
{
    const struct request *const request = sse->job->request;
    bool begun = engine_now_us() >= sse->ping_us;
    for (int i = 0; i < request->n_item && !begun; i++) {
        begun = atomic_load(&request->item[i].state) != FINISH_NONE ||
                atomic_load(&request->item[i].n_out) > 0;
    }
    if (!begun) {
        return false;
    }
    sse->open = true;
    x->status = 200;
    x->content_type = "text/event-stream; charset=utf-8"; /* some clients guess Latin-1 */
    exchange_header(x, "Cache-Control", "no-store");
    exchange_header(x, "X-Accel-Buffering", "no");
    exchange_header(x, "x-prompt-tokens", "%lld", (long long)x->n_prompt);
    const int64_t start_us = atomic_load(&request->start_us);
    if (start_us != 0) {
        exchange_header(x, "x-queue-time", "%.0f",
                        (double)(start_us - atomic_load(&request->submit_us)) * 1e-3);
    }
    return true;
}

static enum exchange_next sse_break(struct exchange *x, const struct api_error *error)
{
    x->code = error->code;
    text_puts(&x->out, "data: ");
    x->out.comma = false;
    exchange_error_json(&x->out, error, x->id);
    text_puts(&x->out, "\n\ndata: [DONE]\n\n");
    return EXCHANGE_END;
}

enum exchange_next sse_next(struct sse *sse, struct exchange *x, const struct answer_meta *meta,
                            struct api_error *error)
{
    const struct request *const request = sse->job->request;
    const bool over = atomic_load(&request->n_item_done) == request->n_item;
    const bool failed = sse_failed(request);
    x->wake_at_us = sse->ping_us;
    if (failed && !over) {
        return EXCHANGE_WAIT; /* the others end in the same step or soon after */
    }
    if (failed) {
        (void)answer_check(request, error);
        return sse->open ? sse_break(x, error) : EXCHANGE_ANSWER;
    }
    if (!sse->open && !sse_open(sse, x)) {
        return EXCHANGE_WAIT;
    }
    for (int i = 0; i < request->n_item && x->out.n < SSE_PIECE_BYTES; i++) {
        const size_t before = x->out.n;
        if (!sse_choice_next(sse, i, &x->out, meta, error)) {
            x->out.n = before; /* the half-written event */
            return sse_break(x, error);
        }
    }
    x->n_generated = generate_n_completion(sse->job);
    if (sse->n_ended == request->n_item) {
        text_puts(&x->out, "data: [DONE]\n\n");
        return EXCHANGE_END;
    }
    const int64_t now_us = engine_now_us();
    if (x->out.n == 0 && now_us >= sse->ping_us) {
        text_puts(&x->out, ": ping\n\n");
    }
    if (x->out.n > 0) {
        sse->ping_us = now_us + SSE_PING_US;
        x->wake_at_us = sse->ping_us;
        return EXCHANGE_STREAM;
    }
    return EXCHANGE_WAIT;
}
