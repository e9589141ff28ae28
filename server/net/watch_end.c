/* Ends exchanges for a reason of the server's, past the library: see watch.h. */
#include "server/net/watch_inside.h"

#include "engine/clock.h"
#include "engine/engine.h"
#include "server/net/budget.h"

#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

enum {
    WATCH_LINGER_S = 5, /* for a refused client to stop sending and read why */
    /* For a client to read results that others want: nobody gives them up. */
    WATCH_READ_US = 1000000,
};

static const char *watch_reason(int status)
{
    switch (status) {
    case 400: return "Bad Request";
    case 401: return "Unauthorized";
    case 408: return "Request Timeout";
    case 413: return "Content Too Large";
    case 422: return "Unprocessable Content";
    case 429: return "Too Many Requests";
    case 503: return "Service Unavailable";
    default: return "Internal Server Error";
    }
}

void watch_refuse_locked(struct watch_conn *conn, const struct api_error *error)
{
    struct exchange *const x = conn->x;
    exchange_error(x, error);
    struct text head = {0};
    text_printf(&head, "HTTP/1.1 %d %s\r\nContent-Type: application/json\r\nConnection: close\r\n",
                x->status, watch_reason(x->status));
    for (int i = 0; i < x->n_header; i++) {
        text_printf(&head, "%s: %s\r\n", x->header[i].name, x->header[i].value);
    }
    text_printf(&head, "x-request-id: %s\r\nContent-Length: %zu\r\n\r\n", x->id, x->out.n);
    if (strcmp(x->method, "HEAD") != 0) {
        text_add(&head, x->out.data, x->out.n);
    }
    if (!head.failed && !x->out.failed) {
        x->sent_bytes = x->out.n;
        (void)!send(conn->fd, head.data, head.n, MSG_NOSIGNAL | MSG_DONTWAIT);
    }
    text_free(&head);
    (void)shutdown(conn->fd, SHUT_WR);
    conn->state = CONN_REFUSED;
    conn->deadline_us = clock_now_us() + WATCH_LINGER_S * 1000000LL;
}

void watch_cut_locked(struct watch_conn *conn, const struct api_error *error)
{
    watch_refuse_locked(conn, error);
    conn->deadline_us = clock_now_us() + WATCH_TICK_MS * INT64_C(1000);
}

void watch_refuse(struct watch_conn *conn, const struct api_error *error)
{
    pthread_mutex_lock(&conn->mutex);
    if (conn->state == CONN_BODY) { /* not refused already, by the deadline */
        watch_refuse_locked(conn, error);
    }
    pthread_mutex_unlock(&conn->mutex);
}

void watch_end_locked(struct watch_conn *conn, const char *code)
{
    atomic_store(&conn->x->end_code, code);
    (void)shutdown(conn->fd, SHUT_RDWR);
}

void watch_end(struct watch_conn *conn, const struct api_error *error)
{
    pthread_mutex_lock(&conn->mutex);
    if (conn->state == CONN_BODY) {
        watch_cut_locked(conn, error);
    } else if (conn->state == CONN_ANSWER) {
        watch_end_locked(conn, error->code);
    }
    pthread_mutex_unlock(&conn->mutex);
}

/* Bytes of results, or of traces, of a request that was over a while ago and whose answer is not
 * read yet. Under the mutex. */
static int64_t watch_unread(const struct watch_conn *conn, bool traces, int64_t now_us)
{
    const struct request *const request =
        conn->state == CONN_ANSWER ? atomic_load(&conn->x->request) : NULL;
    const int64_t done_us = request != NULL ? atomic_load(&request->done_us) : 0;
    if (done_us == 0 || now_us - done_us < WATCH_READ_US) {
        return 0;
    }
    return traces ? (int64_t)request->trace_bytes : atomic_load(&request->bytes);
}

/* What becomes free. */
static int64_t watch_end_unread(struct watch_conn *conn, bool traces, int64_t now_us)
{
    pthread_mutex_lock(&conn->mutex);
    const int64_t bytes = watch_unread(conn, traces, now_us); /* it may have been read meanwhile */
    if (bytes > 0) {
        (void)request_uncount(atomic_load(&conn->x->request));
        watch_end_locked(conn, "buffers_full");
    }
    pthread_mutex_unlock(&conn->mutex);
    return bytes;
}

void watch_relieve(struct watch *watch, bool traces, int64_t bytes)
{
    const int n_conn = watch->config.n_conn;
    const int64_t now_us = clock_now_us();
    struct budget_share *const share = calloc((size_t)n_conn, sizeof *share);
    struct budget_share *first = NULL;
    for (int i = 0; share != NULL && i < n_conn; i++) {
        struct watch_conn *const conn = &watch->conn[i];
        pthread_mutex_lock(&conn->mutex);
        const int64_t unread = watch_unread(conn, traces, now_us);
        if (unread > 0 && atomic_load(&conn->x->end_code) != NULL) {
            bytes -= unread; /* about to be free */
        } else if (unread > 0) {
            share[i].bytes = unread;
            share[i].client = conn->x->knows_client ? conn->x->client : 0;
            share[i].next = first;
            first = &share[i];
        }
        pthread_mutex_unlock(&conn->mutex);
    }
    struct budget_share *largest = NULL;
    while (bytes > 0 && (largest = budget_largest(first)) != NULL) {
        largest->ended = true;
        bytes -= watch_end_unread(&watch->conn[largest - share], traces, now_us);
    }
    free(share);
}

bool watch_refused(struct watch_conn *conn)
{
    pthread_mutex_lock(&conn->mutex);
    const bool refused = conn->state == CONN_REFUSED;
    pthread_mutex_unlock(&conn->mutex);
    return refused;
}
