/* The answer of scoring, one line at a time: see score_stream.c. */
#ifndef SERVER_SCORE_STREAM_H
#define SERVER_SCORE_STREAM_H

#include "server/net/exchange.h"
#include "server/score/score.h"

struct score_stream {
    struct score_writer writer;
    bool events;     /* server-sent events; else NDJSON */
    bool open;       /* the head is out or on its way */
    int64_t window;  /* next line of the next result's windows */
    int64_t ping_us; /* a comment is due then */
};

void score_stream_begin(struct score_stream *stream, const struct score_job *job,
                        const struct api_limits *limits, bool events);
void score_stream_end(struct score_stream *stream); /* zeroed is fine */

/* What the stream can send now: fills x->out, sets x->wake_at_us, and status and headers the first
 * time. EXCHANGE_ANSWER: nothing was sent, and *error is what happened instead. */
enum exchange_next score_stream_next(struct score_stream *stream, struct exchange *x,
                                     const struct answer_meta *meta, struct api_error *error);

#endif
