/* Scores as they are found: one JSON object a line, as NDJSON or as server-sent events.
 *
 *   {"index":0,"window":{"index":0,"count":3,"n_scored":..,"sum_logprob":..}}    of long texts
 *   {"index":0,"n_tokens":..}                                      what "results" of /score holds
 *   {"index":1,"n_tokens":..}
 *   {"id":..,"object":"score",..,"ranking":..,"aggregate":..,"usage":..,"timings":..}
 *
 * Results come in the order of their index, which is the order in which the engine begins them; so
 * the lines depend on nothing but the request. Nothing is sent before the first line exists: until
 * then an error has its own status. Later it is a line: {"error":..}. Events end with [DONE] and
 * have comments while nothing else is to be said; NDJSON has nothing of the kind, because many
 * readers choke on an empty line. A line may go out in pieces, so no answer is ever whole in
 * memory. */
#include "server/score/score_stream.h"

#include "engine/clock.h"
#include "engine/scoring.h"

#include <math.h>

enum {
    STREAM_PIECE_BYTES = 64 * 1024 /* enough for one call: the rest follows when this is taken */
};

void score_stream_begin(struct score_stream *stream, const struct score_job *job,
                        const struct api_limits *limits, bool events)
{
    *stream = (struct score_stream){.events = events};
    score_writer_begin(&stream->writer, job, limits);
}

void score_stream_end(struct score_stream *stream)
{
    score_writer_end(&stream->writer);
}

static void line_open(const struct score_stream *stream, struct text *out)
{
    text_puts(out, stream->events ? "data: " : "");
    out->comma = false;
}

static void line_close(const struct score_stream *stream, struct text *out)
{
    text_puts(out, stream->events ? "\n\n" : "\n");
}

/* ---- lines --------------------------------------------------------------------------------- */

/* The next window of a long text, if it is computed. */
static bool window_line(struct score_stream *stream, struct text *out)
{
    const struct score_job *const job = stream->writer.job;
    const struct request *const request = job->request;
    const struct item *const item = score_item(job, stream->writer.result);
    const int64_t n_out = atomic_load(&item->n_out);
    const int64_t count = score_item_window_count(request, item);
    if (count < 2 || stream->window >= count) {
        return false;
    }
    const struct score_window w = score_item_window_at(request, item, stream->window);
    const int64_t end = w.first + w.n_feed + 1 - item->score_from; /* of its predictions */
    if (end > n_out) {
        return false;
    }
    double sum = 0;
    for (int64_t i = end - w.n_count; i < end; i++) {
        sum += (double)item->out_logprob[i];
    }
    line_open(stream, out);
    json_open(out, '{');
    json_field_int(out, "index", stream->writer.result);
    json_key(out, "window");
    json_open(out, '{');
    json_field_int(out, "index", stream->window);
    json_field_int(out, "count", count);
    json_field_int(out, "n_scored", w.n_count);
    json_field_double(out, "sum_logprob", sum);
    if (isinf(sum)) {
        json_field_bool(out, "impossible", true);
    }
    json_close(out, '}');
    json_close(out, '}');
    line_close(stream, out);
    stream->window++;
    return true;
}

/* Whether the next result's items are over. false in *ok: one of them ended badly, and all before
 * it well, so that answer_check finds it. */
static bool result_over(const struct score_stream *stream, bool *ok)
{
    const struct score_job *const job = stream->writer.job;
    const struct item *const item = score_item(job, stream->writer.result);
    for (int k = 0; k < job->n_per; k++) {
        const int state = atomic_load(&item[k].state);
        if (state != FINISH_LENGTH) {
            *ok = state == FINISH_NONE;
            return false;
        }
    }
    return true;
}

/* The next result, or the next piece of it. */
static bool result_line(struct score_stream *stream, struct text *out, struct api_error *error)
{
    const int before = stream->writer.result;
    if (!stream->writer.open) {
        line_open(stream, out);
    }
    if (!score_writer_next(&stream->writer, out, STREAM_PIECE_BYTES, error)) {
        return false;
    }
    if (stream->writer.result != before) {
        line_close(stream, out);
        stream->window = 0;
    }
    return true;
}

static void last_line(struct score_stream *stream, struct text *out, const struct answer_meta *meta)
{
    line_open(stream, out);
    json_open(out, '{');
    answer_head(out, meta, "score");
    score_writer_tail(&stream->writer, out, meta);
    json_close(out, '}');
    line_close(stream, out);
    text_puts(out, stream->events ? "data: [DONE]\n\n" : "");
}

/* ---- the stream ---------------------------------------------------------------------------- */

static void stream_open(struct score_stream *stream, struct exchange *x)
{
    stream->open = true;
    exchange_stream_head(x,
                         stream->events ? "text/event-stream; charset=utf-8"
                                        : "application/x-ndjson; charset=utf-8",
                         stream->writer.job->request);
}

static enum exchange_next stream_break(struct score_stream *stream, struct exchange *x, bool midway,
                                       const struct api_error *error)
{
    if (!stream->open) {
        return EXCHANGE_ANSWER;
    }
    x->code = error->code;
    if (midway) {
        x->out.failed = true; /* half a line has been sent: all that is left is to cut the
                               * connection */
        return EXCHANGE_END;
    }
    line_open(stream, &x->out);
    exchange_put_error(x, error);
    line_close(stream, &x->out);
    text_puts(&x->out, stream->events ? "data: [DONE]\n\n" : "");
    return EXCHANGE_END;
}

/* Nothing can be written now. */
static enum exchange_next stream_wait(struct score_stream *stream, struct exchange *x)
{
    const int64_t now_us = clock_now_us();
    if (stream->open && stream->events && x->out.n == 0 && now_us >= stream->ping_us) {
        text_puts(&x->out, ": ping\n\n");
    }
    if (x->out.n > 0) {
        stream->ping_us = now_us + stream->writer.limits->ping_us;
    }
    x->wake_at_us = stream->open && stream->events ? stream->ping_us : 0;
    return x->out.n > 0 ? EXCHANGE_STREAM : EXCHANGE_WAIT;
}

enum exchange_next score_stream_next(struct score_stream *stream, struct exchange *x,
                                     const struct answer_meta *meta, struct api_error *error)
{
    struct score_writer *const writer = &stream->writer;
    const struct request *const request = writer->job->request;
    const bool midway = writer->open;
    enum exchange_next next = EXCHANGE_WAIT;
    while (x->out.n < STREAM_PIECE_BYTES && next == EXCHANGE_WAIT) {
        const size_t before = x->out.n;
        if (writer->result == writer->job->inputs.n) {
            /* The request's own times are published a moment after its last item's state. */
            if (atomic_load(&request->n_item_done) < request->n_item) {
                break;
            }
            last_line(stream, &x->out, meta);
            next = EXCHANGE_END;
            continue;
        }
        bool ok = true;
        const bool over = result_over(stream, &ok);
        if (!ok) {
            (void)answer_check(writer->job->request, error);
            return stream_break(stream, x, false, error);
        }
        if (!writer->open && window_line(stream, &x->out)) {
            continue;
        }
        if (!over) {
            break;
        }
        if (!result_line(stream, &x->out, error)) {
            x->out.n = before; /* what was written of the line */
            return stream_break(stream, x, midway, error);
        }
    }
    if (x->out.n > 0 && !stream->open) {
        stream_open(stream, x);
    }
    return next == EXCHANGE_END ? next : stream_wait(stream, x);
}
