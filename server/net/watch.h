/* Watches the connections that the HTTP library does not: sleeping ones and slow ones.
 *
 * Found by trying: a suspended connection is not polled, so nobody sees that its client leaves; the
 * library's timeout counts inactivity of any kind, so one header line per second keeps a connection
 * open for ever, and a slow body is cut off without an answer: that timeout is off. One thread here
 * owns an epoll set with EPOLLRDHUP on the sockets of sleeping exchanges, and every quarter of a
 * second looks at all deadlines.
 *
 * Each connection has an entry of a table that lives as long as the server, and the entry's mutex
 * guards its fields. Sleeping and waking use a protocol of flags: the http thread suspends and sets
 * `asleep` under the mutex; a waker resumes only if it finds `asleep`, and otherwise sets `woken`
 * for the sleeper to find. A late wake is harmless: it finds no sleeper, or causes one spurious
 * wake-up of the entry's next exchange. */
#ifndef SERVER_WATCH_H
#define SERVER_WATCH_H

#include "server/net/exchange.h"

struct watch;
struct watch_conn;

struct watch_config {
    int n_conn;          /* entries */
    int max_connections; /* a further one takes the place of one that waits for a head, or whose
                          * client sends or reads slowly; if there is none, it is told so and
                          * closed */
    int header_timeout_s, body_timeout_s, keepalive_s;
    int min_read_rate; /* bytes per second that a reader must take, 0 = any, ... */
    int read_window_s; /* ... over so long, while there is more for it */
    /* The library's calls. connection is what watch_sleep was given. */
    void (*suspend)(void *connection);
    void (*resume)(void *connection);
    void (*tick)(
        void *ctx); /* every quarter of a second, on the watcher's thread; NULL = nothing */
    void *ctx;      /* Borrowed: tick's */
};

enum err_code watch_open(struct watch **watch, const struct watch_config *config, struct err *err);
void watch_close(struct watch *watch); /* NULL is fine. No connection may be left */

/* A connection begins: NULL when the table is full. */
struct watch_conn *watch_take(struct watch *watch, int fd);
void watch_give(struct watch_conn *conn);
/* This connection is one above the limit. */
bool watch_is_surplus(const struct watch_conn *conn);
int watch_n_conn(const struct watch *watch);

/* Its life: head → body → answer → idle → head ... x is borrowed from head to idle. */
void watch_body(struct watch_conn *conn, struct exchange *x); /* the head is here */
bool watch_answer(struct watch_conn *conn);                   /* the body too; false: refused */
void watch_idle(struct watch_conn *conn);                     /* the answer is out */

/* Answers with error on the socket itself, past the library, which takes no answer while a body is
 * on its way; then the rest of the body is thrown away until the client has read the answer and
 * hangs up (closing at once would reset the connection and might destroy the answer). Only between
 * watch_body and watch_answer. */
void watch_refuse(struct watch_conn *conn, const struct api_error *error);
bool watch_refused(struct watch_conn *conn);
/* Ends the exchange for a reason of the server's: while its body comes as watch_refuse, later by
 * hanging up, and then x->end_code is error's code. */
void watch_end(struct watch_conn *conn, const struct api_error *error);

/* Ends answers whose results were complete a while ago and are not read, until bytes of results, or
 * with traces of memory traces, become free: as budget.h says, those first who hold most. Results
 * then count no more (request_uncount). */
void watch_relieve(struct watch *watch, bool traces, int64_t bytes);

/* Sleeps unless woken since the last call; true if the connection is suspended now. */
bool watch_sleep(struct watch_conn *conn, void *connection);

/* Puts the connection to sleep whatever happens, until watch_attach: another thread has the
 * exchange. Wakes and leaving in between are kept for later. */
void watch_detach(struct watch_conn *conn, void *connection);
void watch_attach(struct watch_conn *conn);
/* Whether the client has hung up already. While detached. */
bool watch_has_left(struct watch_conn *conn);

/* Wakes all sleepers and shuts all sockets: the server ends. Returns the number of exchanges that
 * are not over yet. */
int watch_hang_up(struct watch *watch);
/* Exchanges between head and idle; or of them those whose whole request has come. */
int watch_n_exchange(struct watch *watch, bool answering);

#endif
