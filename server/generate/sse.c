/* A generation as server-sent events.
 *
 * One event per token as soon as it exists, even when its text is still held back, so that clients
 * can measure the gaps. The last token of a choice waits for the state that says so, which comes
 * from the same step: dialects in which that event also ends the choice need no further one. What
 * an event looks like is the dialect's (generate.h). An event with a long prompt goes out in
 * pieces, between which nothing else is told. Nothing is sent before the first token exists or the
 * first comment is due: until then an error has its own status. Called by api_generate.c on an http
 * thread whenever the engine has published something or the client has taken what there was. */
#include "server/generate/sse.h"

#include "engine/clock.h"
#include "engine/scoring.h"

#include <stdlib.h>

enum {
    SSE_PIECE_BYTES = 64 * 1024 /* enough for one call: the rest follows when the client has
                                 * taken this */
};

bool sse_begin(struct sse *sse, const struct generate_job *job, const struct api_limits *limits,
               const struct answer_meta *meta)
{
    const struct request *const request = job->request;
    *sse = (struct sse){.job = job};
    generate_writer_begin(&sse->writer, job, limits, meta);
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
    text_free(&sse->rest);
    generate_writer_end(&sse->writer);
}

/* Begins to report the token that was taken, if there is one, and the end of the choice, if this is
 * it. */
static void sse_tell(struct sse *sse, int i, bool last, struct text *out)
{
    struct sse_choice *const choice = &sse->choice[i];
    text_clear(&sse->rest);
    if (last) {
        text_stream_flush(&choice->gen, &sse->rest);
    }
    out->failed = out->failed || choice->text.failed || sse->rest.failed;
    sse->event =
        (struct generate_event){.item = i,
                                .first = !choice->begun,
                                .token = choice->pending ? choice->gen.n_token - 1 : -1,
                                .offset = choice->offset,
                                .text = &choice->text,
                                .fresh = choice->gen.buffer,
                                .n_fresh = choice->gen.n_fresh,
                                .last = last,
                                .rest = &sse->rest,
                                .all = last && sse->n_ended + 1 == sse->job->request->n_item};
    sse->event_at = out->n;
    sse->writer.n_before = choice->n_before;
    generate_writer_tell(&sse->writer, &sse->event);
}

/* Goes on with the event that is open. */
static bool sse_write(struct sse *sse, struct text *out, struct api_error *error)
{
    struct sse_choice *const choice = &sse->choice[sse->event.item];
    if (!generate_writer_go(&sse->writer, out, SSE_PIECE_BYTES, error)) {
        return false;
    }
    if (sse->writer.part == NULL) {
        text_clear(&choice->text);
        choice->n_before = sse->writer.n_before;
        choice->begun = true;
        choice->pending = false;
        choice->ended = sse->event.last;
        sse->n_ended += sse->event.last;
    }
    return true;
}

/* Reports everything about choice i that is new. false: error. If it has ended badly since sse_next
 * looked, nothing is reported: the next call tells the error. */
static bool sse_choice_next(struct sse *sse, int i, struct text *out, struct api_error *error)
{
    struct sse_choice *const choice = &sse->choice[i];
    const struct request *const request = sse->job->request;
    const struct item *const item = &request->item[i];
    /* In this order: when the state says the item is over, n_out is final. */
    const enum finish state = (enum finish)atomic_load(&item->state);
    const int n_out = atomic_load(&item->n_out);
    if (answer_state_failed(state)) {
        return true;
    }
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
        sse_tell(sse, i, last, out);
        if (!sse_write(sse, out, error)) {
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
        const enum finish state = (enum finish)atomic_load(&request->item[i].state);
        begun = (state != FINISH_NONE && !answer_state_failed(state)) ||
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

/* Goes on with an event of which the client has a part. false: only the end of the connection can
 * tell of the error. */
static bool sse_go_on(struct sse *sse, struct exchange *x)
{
    struct api_error error = {0};
    if (sse->writer.part == NULL || sse_write(sse, &x->out, &error)) {
        return true;
    }
    x->code = error.code;
    x->out.failed = true;
    return false;
}

enum exchange_next sse_next(struct sse *sse, struct exchange *x, struct api_error *error)
{
    struct request *const request = sse->job->request;
    const bool over = atomic_load(&request->n_item_done) == request->n_item;
    const bool failed = answer_end_failed(request);
    x->wake_at_us = sse->ping_us;
    if (!sse_go_on(sse, x)) {
        return EXCHANGE_END;
    }
    const bool midway = sse->writer.part != NULL;
    if (failed && !over && !midway) { /* the other choices end with the next step */
        return x->out.n > 0 ? EXCHANGE_STREAM : EXCHANGE_WAIT;
    }
    if (failed && !midway) {
        (void)answer_check(request, error);
        return sse->open ? sse_break(sse, x, error) : EXCHANGE_ANSWER;
    }
    if (!sse->open && !sse_open(sse, x)) {
        return EXCHANGE_WAIT;
    }
    for (int i = 0; i < request->n_item && x->out.n < SSE_PIECE_BYTES; i++) {
        if (!sse_choice_next(sse, i, &x->out, error)) {
            x->out.n = sse->event_at; /* the half-written event */
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
        sse->ping_us = now_us + sse->writer.limits->ping_us;
        x->wake_at_us = sse->ping_us;
        return EXCHANGE_STREAM;
    }
    return EXCHANGE_WAIT;
}
