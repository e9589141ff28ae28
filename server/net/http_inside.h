/* What the two files of the fence around libmicrohttpd share; not for others. */
#ifndef SERVER_HTTP_INSIDE_H
#define SERVER_HTTP_INSIDE_H

#include "server/net/budget.h"
#include "server/net/http.h"
#include "server/net/watch.h"
#include "server/net/worker.h"

#include <microhttpd.h>
#include <pthread.h>

enum {
    HTTP_THREADS = 4,
    HTTP_SURPLUS = 64, /* connections above the limit that are told so before they are closed */
    HTTP_HEAD_BYTES = 32 * 1024, /* per connection: request head and answer head */
    HTTP_BLOCK_BYTES = 16 * 1024,
    HTTP_REFUSAL_US = 2 * 1000000,
    HTTP_SHED_TOLD_US = 10 * 1000000, /* from one line about closed connections to the next */
    /* Bodies from here on are read by a worker thread. Of the texts that take longest to tokenise 4
     * KiB take some 10 ms, for which the other connections of an http thread wait. */
    HTTP_LONG_BYTES = 4 * 1024,
};

struct http {
    struct http_config config;
    struct MHD_Daemon *daemon;
    struct watch *watch;
    struct worker *worker;
    pthread_mutex_t listen_mutex; /* guards refuses */
    bool refuses;                 /* no connection is accepted any more */
    int listen_fd;                /* the daemon's, once there is one */
    int silent_fd; /* takes its place when no connection is to be accepted any more: nothing comes
                    * there */
    int port;
    atomic_llong n_shed;       /* connections closed for want of descriptors */
    atomic_llong shed_told_us; /* when the log was last told so */
    atomic_bool draining;
    atomic_bool cutting; /* whatever ends now, ends because the server does */
    atomic_int n_cut;
    struct budget budget; /* bodies and answers of all exchanges */
};

/* An exchange and what the library has to do with it. */
struct http_exchange {
    struct exchange x;          /* first: freed as one by exchange_free */
    struct http *http;          /* Borrowed */
    struct watch_conn *conn;    /* Borrowed */
    struct MHD_Connection *mhd; /* Borrowed */
    size_t body_seen;           /* bytes of the body that have come */
    struct budget_share share;  /* body or answer */
    size_t out_pos;             /* stream: bytes of x.out already taken */
    bool handled, queued, ended;
    struct worker_task task; /* while the worker has the exchange */
};

/* A head has arrived: makes the exchange and decides whether it may go on (http_head.c). NULL: no
 * memory or no place for it. */
struct http_exchange *http_begin(struct http *http, struct MHD_Connection *mhd, const char *url,
                                 const char *method, const char *version);

#endif
