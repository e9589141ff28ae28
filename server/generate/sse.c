/* A generation as server-sent events.
 *
 * One event per token as soon as it exists, even when its text is still held back, so that clients
 * can measure the gaps. The last token of a choice waits for the state that says so, which comes
 * from the same step: dialects in which that event also ends the choice need no further one. What
 * an event looks like is the dialect's (generate.h). Nothing is sent before the first token exists
 * or the first comment is due: until then an error has its own status. Called by api_generate.c on
 * an http thread whenever the engine has published something or the client has taken what there
 * was. */
#include "server/generate/sse.h"

#include "engine/clock.h"
#include "engine/scoring.h"

#include <stdlib.h>

enum {
    SSE_PIECE_BYTES = 64 * 1024 /* enough for one call: the rest follows when the client has
                                 * taken this */
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
        if (!text_stream_begin(&sse->choice[i].gen, request, &request->item[i], limits->tokenizer,
                               &limits->info->ends)) {
            return false;
        }
    }
    sse->ping_us = clock_now_us() + limits->ping_us;
    return true;
}

void sse_end(struct sse *sse)
{
    for (int i = 0; sse->choice != NULL && i < sse->job->request->n_item; i++) {
        text_stream_end(&sse->choice[i].gen);
        text_free(&sse->choice[i].text);
    }
    free(sse->choice);
    sse->choice = NULL;
}

/* Counts the characters that echo puts in front of a choice's text. */
static bool sse_count_prompt(struct sse *sse, int i, struct api_error *error)
{
    const struct generate_job *const job = sse->job;
    struct text text = {0};
    bool ok = answer_input_text(&text, generate_input(job, i), job->request->item[i].ids,
                                sse->limits->tokenizer, error);
    if (ok && text.failed) {
        ok = api_error_set(error, 500, "out_of_memory", NULL, "no memory for the prompt");
    }
    sse->choice[i].n_before = text_count_chars(text.data != NULL ? text.data : "", text.n);
    text_free(&text);
    return ok;
}

/* Reports the token that was taken, if there is one, and the end of the choice, if this is it. */
static bool sse_tell(struct sse *sse, int i, bool last, struct text *out,
                     const struct answer_meta *meta, struct api_error *error)
{
    const struct generate_job *const job = sse->job;
    struct sse_choice *const choice = &sse->choice[i];
    struct text rest = {0};
    if (!choice->begun && job->echo && !sse_count_prompt(sse, i, error)) {
        return false;
    }
    if (last) {
        text_stream_flush(&choice->gen, &rest);
    }
    const struct generate_event event = {.item = i,
                                         .first = !choice->begun,
                                         .token = choice->pending ? choice->gen.n_token - 1 : -1,
                                         .offset = choice->offset,
                                         .n_before = choice->n_before,
                                         .text = &choice->text,
                                         .fresh = choice->gen.buffer,
                                         .n_fresh = choice->gen.n_fresh,
                                         .last = last,
                                         .rest = &rest,
                                         .all = last && sse->n_ended + 1 == job->request->n_item};
    const bool ok = job->dialect->event(out, job, &event, sse->limits, meta, error);
    out->failed = out->failed || choice->text.failed || rest.failed;
    text_free(&rest);
    text_clear(&choice->text);
    choice->begun = true;
    choice->pending = false;
    choice->ended = last;
    sse->n_ended += last;
    return ok;
}

/* Reports everything about choice i that is new. false: error. */
static bool sse_choice_next(struct sse *sse, int i, struct text *out,
                            const struct answer_meta *meta, struct api_error *error)
{
    struct sse_choice *const choice = &sse->choice[i];
    const struct request *const request = sse->job->request;
    const struct item *const item = &request->item[i];
    /* In this order: when the state says the item is over, n_out is final. */
    const enum finish state = (enum finish)atomic_load(&item->state);
    const int n_out = atomic_load(&item->n_out);
    while (!choice->ended && out->n < SSE_PIECE_BYTES) {
        if (!choice->pending && text_stream_ready(&choice->gen, n_out, state)) {
            choice->offset = text_stream_push(&choice->gen, state, n_out, &choice->text);
            choice->pending = true;
        }
        const bool last = state != FINISH_NONE && choice->gen.n_token == n_out;
        if (last && sse->n_ended + 1 == request->n_item &&
            atomic_load(&request->n_item_done) < request->n_item) {
            return true; /* the request's own times are published a moment after the item's state */
        }
        if (!last && (!choice->pending || text_stream_undecided(&choice->gen, n_out, state))) {
            return true;
        }
        if (!sse_tell(sse, i, last, out, meta, error)) {
            return false;
        }
    }
    return true;
}

/* Decides whether the head can be sent. true: the stream is open. */
static bool sse_open(struct sse *sse, struct exchange *x)
{
    const struct request *const request = sse->job->request;
    bool begun = clock_now_us() >= sse->ping_us;
    for (int i = 0; i < request->n_item && !begun; i++) {
        begun = atomic_load(&request->item[i].state) != FINISH_NONE ||
                atomic_load(&request->item[i].n_out) > 0;
    }
    if (!begun) {
        return false;
    }
    sse->open = true;
    exchange_stream_head(x, "text/event-stream; charset=utf-8", request);
    return true;
}

static enum exchange_next sse_break(struct sse *sse, struct exchange *x,
                                    const struct api_error *error)
{
    x->code = error->code;
    text_puts(&x->out, "data: ");
    x->out.comma = false;
    exchange_put_error(x, error);
    text_puts(&x->out, "\n\n");
    text_puts(&x->out, sse->job->dialect->end);
    return EXCHANGE_END;
}

enum exchange_next sse_next(struct sse *sse, struct exchange *x, const struct answer_meta *meta,
                            struct api_error *error)
{
    struct request *const request = sse->job->request;
    const bool over = atomic_load(&request->n_item_done) == request->n_item;
    const bool failed = answer_end_failed(request);
    x->wake_at_us = sse->ping_us;
    if (failed && !over) {
        return EXCHANGE_WAIT; /* the other choices end with the next step */
    }
    if (failed) {
        (void)answer_check(request, error);
        return sse->open ? sse_break(sse, x, error) : EXCHANGE_ANSWER;
    }
    if (!sse->open && !sse_open(sse, x)) {
        return EXCHANGE_WAIT;
    }
    for (int i = 0; i < request->n_item && x->out.n < SSE_PIECE_BYTES; i++) {
        const size_t before = x->out.n;
        if (!sse_choice_next(sse, i, &x->out, meta, error)) {
            x->out.n = before; /* the half-written event */
            return sse_break(sse, x, error);
        }
    }
    x->n_generated = generate_n_completion(sse->job);
    if (sse->n_ended == request->n_item) {
        text_puts(&x->out, sse->job->dialect->end);
        return EXCHANGE_END;
    }
    const int64_t now_us = clock_now_us();
    if (x->out.n == 0 && now_us >= sse->ping_us) {
        text_puts(&x->out, ": ping\n\n");
    }
    if (x->out.n > 0) {
        sse->ping_us = now_us + sse->limits->ping_us;
        x->wake_at_us = sse->ping_us;
        return EXCHANGE_STREAM;
    }
    return EXCHANGE_WAIT;
}
