/* One HTTP request and its answer, as the routes see it: no sockets, no library types.
 *
 * http.c makes an exchange when a request's head has arrived and hands it to a route once, with the
 * whole body. The route either writes the answer at once (status, headers, out) or leaves work
 * behind: then http.c calls work->next, now and after every wake, until that says the answer is
 * there.
 *
 *   next() = EXCHANGE_WAIT    nothing to send yet: the connection sleeps until exchange_wake,
 *                             wake_at_us or the client's leaving
 *            EXCHANGE_ANSWER  status, headers and out are complete
 *            EXCHANGE_STREAM  status and headers are decided; out holds the next piece of the body.
 *                             next is called again when the client has taken it
 *            EXCHANGE_END     after STREAM: out holds the last piece */
#ifndef SERVER_EXCHANGE_H
#define SERVER_EXCHANGE_H

#include "server/json/error.h"
#include "server/json/text.h"
#include "server/net/keys.h"

#include <stdatomic.h>

enum { EXCHANGE_ID_MAX = 129, EXCHANGE_HEADER_MAX = 16, EXCHANGE_PATH_MAX = 256 };

enum exchange_next { EXCHANGE_WAIT, EXCHANGE_ANSWER, EXCHANGE_STREAM, EXCHANGE_END };

struct exchange;
struct request;

/* What a route leaves behind. next and free run on an http thread, never two at once. */
struct exchange_work {
    enum exchange_next (*next)(struct exchange *x, void *data);
    /* The client left. Called by the watcher under the connection's lock: sets a flag, no more. */
    void (*gone)(void *data);
    void (*free)(void *data);
};

/* How errors are written. Each dialect brings one; without one errors are OpenAI's:
 * {"error":{"message","type","param","code"},"request_id"}. */
struct exchange_errors {
    int (*status)(const struct api_error *error); /* the HTTP status to answer with */
    /* Appends the error object alone. */
    void (*put)(struct text *out, const struct api_error *error, const char *request_id);
};

struct exchange_header {
    const char *name; /* static */
    char *value;      /* Owner: the exchange */
};

struct exchange {
    /* The request: set by http.c. */
    bool is_get, is_post; /* HEAD counts as GET: the library leaves out the body */
    bool is_put, is_delete;
    char method[16];
    char path[EXCHANGE_PATH_MAX]; /* longer ones are cut: no route has such a name */
    bool deep;                    /* the query has deep=1 */
    bool admin;                   /* came in at the admin port */
    bool wants_events;            /* Accept names text/event-stream */
    bool wants_html;              /* Accept names text/html */
    char id[EXCHANGE_ID_MAX];     /* the client's x-request-id, or one of ours */
    uint64_t client;              /* who asks: its key, or without keys its address */
    bool knows_client;            /* it is a key, or an address that is not a proxy's */
    bool counted;                 /* among its client's requests: routes.c */
    char trace_id[TRACE_ID_MAX];  /* of the client's traceparent, "" = none */
    char span_id[TRACE_SPAN_MAX];
    bool is_probe;    /* asks how the server is: answered even where connections are used up */
    bool drops_body;  /* nobody will read the body: set when the head is here */
    struct text body; /* Owner: this. A route may take it */
    int64_t begin_us; /* when the head had arrived */
    int64_t body_us;  /* when the body had arrived */
    int64_t wait_us;  /* from then on until a thread began to read it; 0 = it did not wait */
    void *waker;      /* for exchange_wake: outlives the exchange */

    /* The answer: set by the route or its work. */
    int status; /* 0 = not yet */
    const char *content_type;
    const char *code; /* static: the error's code, for the log; NULL = none */
    struct exchange_header header[EXCHANGE_HEADER_MAX];
    int n_header;
    struct text out;
    int64_t held_bytes; /* what work holds besides, of the body's size: counted with out */
    bool close;         /* the connection ends after this answer */
    const struct exchange_errors *errors; /* Borrowed: static; NULL = OpenAI's */

    /* Work. */
    const struct exchange_work *work;
    void *work_data;
    _Atomic(struct request *)
        request;        /* Borrowed from work: what the engine computes for it. NULL = nothing */
    int64_t wake_at_us; /* next is called then at the latest; 0 = no such time */

    /* For the log. */
    int route; /* index into the route table, -1 = none */
    int64_t n_prompt, n_generated;
    size_t sent_bytes;
    atomic_bool gone; /* the client left before the answer was complete */
    bool cut;         /* the server ended before the answer was complete */
    /* why the server hung up on this client: static; NULL = it did not */
    _Atomic(const char *) end_code;
};

/* Adds an answer header; value is formatted. More than EXCHANGE_HEADER_MAX is a bug. */
void exchange_header(struct exchange *x, const char *name, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* Makes the error body the answer. Retry-After is the caller's business. */
void exchange_error(struct exchange *x, const struct api_error *error);
/* The same from parts. */
void exchange_refuse(struct exchange *x, int status, const char *code, const char *param,
                     const char *format, ...) __attribute__((format(printf, 5, 6)));

/* The error object alone, appended to out. */
void exchange_put_error(struct exchange *x, const struct api_error *error);

/* out holds a JSON answer: sets status and type. Failed memory becomes a 500. */
void exchange_json(struct exchange *x, int status);

/* The head of a body in pieces, which nothing on its way may hold back: status 200, and of request
 * the prompt tokens and, once it has begun, its time in the queue. The type names its charset, or
 * some clients guess Latin-1. */
void exchange_stream_head(struct exchange *x, const char *content_type,
                          const struct request *request);

void exchange_free(struct exchange *x); /* also frees its work. NULL is fine */

/* Calls next again soon. For a request's wake, on any thread, also when the exchange is over: waker
 * is the one that x->waker held, and a late call finds nothing to wake. In watch.c. */
void exchange_wake(void *waker);

#endif
