/* A generation as server-sent events. */
#ifndef SERVER_SSE_H
#define SERVER_SSE_H

#include "server/generate/generate_writer.h"
#include "server/net/exchange.h"

struct sse_choice {
    struct text_stream gen;
    struct text text; /* the text that the last token completed */
    int64_t offset;   /* its */
    int64_t n_before; /* characters that echo put in front */
    bool pending;     /* a token was taken and not yet reported */
    bool begun, ended;
};

struct sse {
    const struct generate_job *job; /* Borrowed */
    struct sse_choice *choice;      /* Owner: this. [n_item] */
    int n_ended;
    struct generate_event event;
    struct text rest;              /* the event's */
    struct generate_writer writer; /* of the event, as long as that is not written to its end */
    size_t event_at;               /* in the piece that it began in */
    bool open;                     /* the head is out or on its way */
    int64_t ping_us;               /* a comment is due then */
};

bool sse_begin(struct sse *sse, const struct generate_job *job, const struct api_limits *limits,
               const struct answer_meta *meta);
void sse_end(struct sse *sse); /* zeroed is fine */

/* What the stream can send now: fills x->out, sets x->wake_at_us, and status and headers the first
 * time. EXCHANGE_ANSWER: nothing was sent, and *error is what happened instead. */
enum exchange_next sse_next(struct sse *sse, struct exchange *x, struct api_error *error);

#endif
