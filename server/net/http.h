/* The HTTP server: the fence around libmicrohttpd.
 *
 * It owns the port, the http threads, the connections and their deadlines, and turns the library's
 * callbacks into exchanges (exchange.h). It knows no routes. Used by serve.c alone.
 *
 * What it guarantees beyond the library: a request with two Content-Length headers is refused; a
 * body is refused by its declared size before it is read, and by its counted size when it is
 * chunked; slow heads and bodies end at a deadline; a client that leaves a waiting request is
 * noticed at once; bodies and answers together are bounded, and the client with most of them is cut
 * off first (budget.h); a client that reads an answer too slowly is cut off; http_stop never aborts
 * on a sleeping connection. */
#ifndef SERVER_HTTP_H
#define SERVER_HTTP_H

#include "server/net/exchange.h"
#include "server/net/proxies.h"

struct http;

struct http_config {
    const char *host;
    int port; /* 0 = take a free one */
    int max_connections;
    int n_more_files; /* descriptors that others will need for their connections */
    int64_t max_body_bytes;
    const char *max_body_flag;  /* static: the option that says so */
    int64_t max_buffered_bytes; /* bodies and answers together */
    int min_read_rate;          /* bytes per second that a reader must take, over read_window_s */
    int read_window_s;
    int body_threads;              /* read long bodies */
    const struct proxies *proxies; /* Borrowed */
    int overload_status;           /* for a refusal because bodies and answers take too much memory
                                    * together */
    int keepalive_s, header_timeout_s, body_timeout_s;
    bool admin; /* for its exchanges; one thread is enough */
    /* A head is here: whether to go on. Else error is answered, before the body is read. */
    bool (*head)(void *ctx, struct exchange *x, const char *authorization, struct api_error *error);
    /* A whole request is here: answer it or leave work behind. On an http thread. */
    void (*handle)(void *ctx, struct exchange *x);
    /* The exchange is over, answered or not: for log and metrics. On an http thread. */
    void (*done)(void *ctx, const struct exchange *x);
    void (*tick)(void *ctx); /* four times a second, on a thread of its own; NULL = nothing */
    void *ctx;               /* Borrowed */
};

/* Listens and answers at once. ERR_IO names the address if it is taken or impossible. */
enum err_code http_start(struct http **http, const struct http_config *config, struct err *err);
int http_port(const struct http *http);
int http_connections(const struct http *http);
/* Bytes of bodies and answers that wait to be read. */
int64_t http_buffered(struct http *http);
/* Ends unread answers whose results, or memory traces, others lack: watch_relieve. Any thread. */
void http_relieve(struct http *http, bool traces, int64_t bytes);
/* Long bodies that have arrived and are not yet read: they wait for a worker, or one reads them. */
int http_n_unread(const struct http *http);

/* From now on every answer carries Connection: close. */
void http_drain(struct http *http);
/* Gives exchanges under way until deadline_us, hangs up on the rest, ends the threads, frees all.
 * No one may submit work any more, and the engine must have ended. Returns the number of answers
 * without an error that were cut. NULL is fine. */
int http_stop(struct http *http, int64_t deadline_us);

#endif
