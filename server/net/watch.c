/* The connection table and its watcher thread: see watch.h. */
#include "server/net/watch_inside.h"

#include "engine/clock.h"

#include <linux/sockios.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

enum {
    WATCH_EVENTS = 64,
    WATCH_CLOSE_WAIT = 8, /* TCP_CLOSE_WAIT, which the header with tcpi_state does not name */
};

/* ---- life of a connection ------------------------------------------------------------------ */

struct watch_conn *watch_take(struct watch *watch, int fd)
{
    const int n = watch->config.n_conn;
    const bool is_full = atomic_fetch_add(&watch->n_used, 1) >= watch->config.max_connections;
    const bool is_surplus = is_full && watch_replace(watch);
    const unsigned start = (unsigned)atomic_fetch_add(&watch->search, 1);
    for (int i = 0; i < n; i++) {
        struct watch_conn *const conn = &watch->conn[(start + (unsigned)i) % (unsigned)n];
        pthread_mutex_lock(&conn->mutex);
        const bool is_free = conn->state == CONN_FREE;
        if (is_free) {
            conn->state = CONN_HEAD;
            conn->fd = fd;
            conn->generation++;
            conn->ended = false;
            conn->deadline_us = clock_now_us() + watch->config.header_timeout_s * 1000000LL;
            conn->surplus = is_surplus;
        }
        pthread_mutex_unlock(&conn->mutex);
        if (is_free) {
            return conn;
        }
    }
    (void)atomic_fetch_sub(&watch->n_used, 1);
    return NULL;
}

void watch_give(struct watch_conn *conn)
{
    pthread_mutex_lock(&conn->mutex);
    CHECK(conn->state != CONN_FREE && conn->x == NULL && !conn->asleep);
    if (conn->polled) {
        (void)epoll_ctl(conn->watch->epoll_fd, EPOLL_CTL_DEL, conn->fd, NULL);
    }
    conn->polled = false;
    conn->woken = false;
    conn->fd = -1;
    conn->state = CONN_FREE;
    (void)atomic_fetch_sub(&conn->watch->n_used, 1);
    pthread_mutex_unlock(&conn->mutex);
}

bool watch_is_surplus(const struct watch_conn *conn)
{
    return conn->surplus; /* written before the connection was made known to its http thread */
}

int watch_n_conn(const struct watch *watch)
{
    return atomic_load(&watch->n_used);
}

void watch_body(struct watch_conn *conn, struct exchange *x)
{
    pthread_mutex_lock(&conn->mutex);
    CHECK(conn->x == NULL);
    conn->state = CONN_BODY;
    conn->x = x;
    conn->woken = false;
    conn->left = false;
    conn->deadline_us = clock_now_us() + conn->watch->config.body_timeout_s * 1000000LL;
    pthread_mutex_unlock(&conn->mutex);
}

bool watch_answer(struct watch_conn *conn)
{
    pthread_mutex_lock(&conn->mutex);
    const bool open = conn->state != CONN_REFUSED;
    if (open) {
        conn->state = CONN_ANSWER;
        conn->deadline_us = 0;
        conn->read_us = 0;
        conn->ended = false;
    }
    pthread_mutex_unlock(&conn->mutex);
    return open;
}

void watch_idle(struct watch_conn *conn)
{
    pthread_mutex_lock(&conn->mutex);
    if (conn->polled) {
        (void)epoll_ctl(conn->watch->epoll_fd, EPOLL_CTL_DEL, conn->fd, NULL);
    }
    conn->polled = false;
    conn->state = CONN_IDLE;
    conn->x = NULL;
    conn->asleep = false;
    conn->connection = NULL;
    conn->deadline_us = clock_now_us() + conn->watch->config.keepalive_s * 1000000LL;
    conn->idle_bytes = 0;
    pthread_mutex_unlock(&conn->mutex);
}

/* ---- sleeping and waking ------------------------------------------------------------------- */

/* The exchange would wait, but the client has left. Under the mutex. */
static void watch_give_up(struct watch_conn *conn)
{
    atomic_store(&conn->x->gone, true);
    conn->x->work->gone(conn->x->work_data);
}

bool watch_sleep(struct watch_conn *conn, void *connection)
{
    pthread_mutex_lock(&conn->mutex);
    const bool sleeps = !conn->woken && !conn->left;
    conn->woken = false;
    if (conn->left) {
        watch_give_up(conn);
    }
    if (sleeps) {
        if (!conn->polled) {
            struct epoll_event event = {.events = EPOLLRDHUP | EPOLLET};
            event.data.u64 = (uint64_t)conn->index << 32 | conn->generation;
            conn->polled = epoll_ctl(conn->watch->epoll_fd, EPOLL_CTL_ADD, conn->fd, &event) == 0;
        }
        conn->asleep = true;
        conn->connection = connection;
        conn->watch->config.suspend(connection);
    }
    pthread_mutex_unlock(&conn->mutex);
    return sleeps;
}

/* The connection that is to be resumed; NULL: none sleeps. Under the mutex. */
static void *watch_rouse(struct watch_conn *conn)
{
    void *const sleeper = conn->asleep && !conn->detached ? conn->connection : NULL;
    if (sleeper != NULL) {
        conn->asleep = false;
        conn->connection = NULL;
    } else {
        conn->woken = true;
    }
    return sleeper;
}

/* Under the mutex. */
static void watch_wake_locked(struct watch_conn *conn)
{
    void *const sleeper = watch_rouse(conn);
    if (sleeper != NULL) {
        conn->watch->config.resume(sleeper);
    }
}

void watch_detach(struct watch_conn *conn, void *connection)
{
    pthread_mutex_lock(&conn->mutex);
    conn->asleep = true;
    conn->detached = true;
    conn->connection = connection;
    conn->watch->config.suspend(connection);
    pthread_mutex_unlock(&conn->mutex);
}

void watch_attach(struct watch_conn *conn)
{
    pthread_mutex_lock(&conn->mutex);
    CHECK(conn->asleep && conn->detached);
    conn->detached = false;
    watch_wake_locked(conn);
    pthread_mutex_unlock(&conn->mutex);
}

bool watch_has_left(struct watch_conn *conn)
{
    pthread_mutex_lock(&conn->mutex);
    struct pollfd socket = {.fd = conn->fd, .events = POLLRDHUP};
    pthread_mutex_unlock(&conn->mutex);
    return poll(&socket, 1, 0) > 0;
}

void exchange_wake(void *waker)
{
    struct watch_conn *const conn = waker;
    pthread_mutex_lock(&conn->mutex);
    void *const sleeper = watch_rouse(conn);
    pthread_mutex_unlock(&conn->mutex);
    /* Now, as the http thread wants the mutex at once. The connection and its thread are there
     * until this returns: whoever frees the exchange waits for that in request_release. */
    if (sleeper != NULL) {
        conn->watch->config.resume(sleeper);
    }
}

/* ---- the thread ---------------------------------------------------------------------------- */

/* The client hung up. That is no fault if it already has its answer; the exchange finds that out
 * when it would sleep. Under the mutex. */
static void watch_left(struct watch_conn *conn)
{
    conn->left = true;
    if (conn->asleep && !conn->detached) {
        watch_give_up(conn);
        watch_wake_locked(conn);
    }
}

/* What the kernel knows of a connection; all 0 if it fails. */
static bool watch_tcp(struct tcp_info *info, int fd)
{
    socklen_t bytes = sizeof *info;
    memset(info, 0, sizeof *info);
    return getsockopt(fd, IPPROTO_TCP, TCP_INFO, info, &bytes) == 0;
}

/* A kept-alive connection has the keep-alive time until the next head's first byte. The library
 * does not say when that comes, the kernel's counter does. Under the mutex, while IDLE. */
static void watch_kept(struct watch_conn *conn, const struct tcp_info *info, int64_t now_us)
{
    const uint64_t bytes = info->tcpi_bytes_received;
    if (conn->idle_bytes == 0) {
        conn->idle_bytes = bytes;
    } else if (bytes != conn->idle_bytes) {
        conn->state = CONN_HEAD;
        conn->deadline_us = now_us + conn->watch->config.header_timeout_s * 1000000LL;
    }
}

/* Whether the client sends no more, and the library, which has read all, did not see it: after a
 * read that returned less than asked for, it waits for an event, but the end came with the last
 * bytes' event. At a second look, so that it has the time to see it. Under the mutex. */
static bool watch_missed_end(struct watch_conn *conn, const struct tcp_info *info)
{
    int unread = 0;
    const bool before = conn->ended;
    conn->ended = info->tcpi_state == WATCH_CLOSE_WAIT && ioctl(conn->fd, SIOCINQ, &unread) == 0 &&
                  unread == 0;
    return before && conn->ended;
}

/* Gives up a client that reads its answer too slowly. Under the mutex, while ANSWER. */
static void watch_reader(struct watch_conn *conn, int64_t now_us)
{
    const struct watch_config *const config = &conn->watch->config;
    struct tcp_info info;
    int waiting = 0; /* bytes in the kernel that the client has not acknowledged */
    if (config->min_read_rate == 0 || ioctl(conn->fd, SIOCOUTQ, &waiting) != 0 || waiting == 0 ||
        !watch_tcp(&info, conn->fd)) {
        conn->read_us = 0;
        return;
    }
    const int64_t window_us = config->read_window_s * INT64_C(1000000);
    const uint64_t least = (uint64_t)config->min_read_rate * (uint64_t)config->read_window_s;
    if (conn->read_us == 0 || info.tcpi_bytes_acked - conn->read_bytes >= least) {
        conn->read_us = now_us;
        conn->read_bytes = info.tcpi_bytes_acked;
    } else if (now_us - conn->read_us >= window_us && atomic_load(&conn->x->end_code) == NULL) {
        watch_end_locked(conn, "slow_reader");
    }
}

/* Looks at one connection's deadlines. Under the mutex. */
static void watch_tick(struct watch_conn *conn, int64_t now_us)
{
    const struct watch_config *const config = &conn->watch->config;
    if (conn->state == CONN_FREE) {
        return;
    }
    if (conn->state == CONN_ANSWER) {
        if (conn->asleep && !conn->detached && conn->x->wake_at_us != 0 &&
            conn->x->wake_at_us <= now_us) {
            watch_wake_locked(conn);
        }
        watch_reader(conn, now_us);
        return;
    }
    struct tcp_info info;
    (void)watch_tcp(&info, conn->fd);
    if (conn->state == CONN_IDLE) {
        watch_kept(conn, &info, now_us);
    }
    if (watch_missed_end(conn, &info)) {
        (void)shutdown(conn->fd, SHUT_RDWR);
        return;
    }
    if (conn->deadline_us == 0 || now_us < conn->deadline_us) {
        return;
    }
    if (conn->state == CONN_BODY) {
        struct api_error error = {0};
        (void)api_error_set(&error, 408, "body_timeout", NULL,
                            "the request's body did not arrive within %d s",
                            config->body_timeout_s);
        watch_refuse_locked(conn, &error);
    } else { /* a slow head, a kept connection that nobody uses, or a refused client that goes on
              * sending: shutting the socket makes the library see the end, with an event of its
              * own */
        conn->deadline_us = 0;
        (void)shutdown(conn->fd, SHUT_RDWR);
    }
}

static void *watch_run(void *arg)
{
    struct watch *const watch = arg;
    struct epoll_event event[WATCH_EVENTS];
    int64_t next_tick_us = 0;
    for (;;) {
        const int n = epoll_wait(watch->epoll_fd, event, WATCH_EVENTS, WATCH_TICK_MS);
        for (int i = 0; i < n; i++) {
            if (event[i].data.u64 == UINT64_MAX) {
                return NULL;
            }
            struct watch_conn *const conn = &watch->conn[event[i].data.u64 >> 32];
            pthread_mutex_lock(&conn->mutex);
            if (conn->generation == (uint32_t)event[i].data.u64) {
                watch_left(conn);
            }
            pthread_mutex_unlock(&conn->mutex);
        }
        const int64_t now_us = clock_now_us();
        if (now_us < next_tick_us) {
            continue;
        }
        next_tick_us = now_us + WATCH_TICK_MS * 1000;
        if (watch->config.tick != NULL) {
            watch->config.tick(watch->config.ctx);
        }
        for (int i = 0; i < watch->config.n_conn && atomic_load(&watch->n_used) > 0; i++) {
            struct watch_conn *const conn = &watch->conn[i];
            pthread_mutex_lock(&conn->mutex);
            watch_tick(conn, now_us);
            pthread_mutex_unlock(&conn->mutex);
        }
    }
}

int watch_n_exchange(struct watch *watch, bool answering)
{
    int n = 0;
    for (int i = 0; i < watch->config.n_conn; i++) {
        struct watch_conn *const conn = &watch->conn[i];
        pthread_mutex_lock(&conn->mutex);
        n += conn->x != NULL && (!answering || conn->state == CONN_ANSWER) ? 1 : 0;
        pthread_mutex_unlock(&conn->mutex);
    }
    return n;
}

int watch_hang_up(struct watch *watch)
{
    for (int i = 0; i < watch->config.n_conn; i++) {
        struct watch_conn *const conn = &watch->conn[i];
        pthread_mutex_lock(&conn->mutex);
        if (conn->state != CONN_FREE) {
            (void)shutdown(conn->fd, SHUT_RDWR);
            watch_left(conn);
        }
        pthread_mutex_unlock(&conn->mutex);
    }
    return watch_n_exchange(watch, false);
}

/* ---- opening and closing ------------------------------------------------------------------- */

enum err_code watch_open(struct watch **watch, const struct watch_config *config, struct err *err)
{
    *watch = NULL;
    struct watch *const w = calloc(1, sizeof *w);
    if (w == NULL) {
        return err_set(err, ERR_MEMORY, "no memory for the connection table");
    }
    w->config = *config;
    w->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    w->stop_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    w->conn = calloc((size_t)config->n_conn, sizeof *w->conn);
    struct epoll_event event = {.events = EPOLLIN, .data.u64 = UINT64_MAX};
    if (w->conn == NULL || w->epoll_fd < 0 || w->stop_fd < 0 ||
        epoll_ctl(w->epoll_fd, EPOLL_CTL_ADD, w->stop_fd, &event) != 0) {
        (void)err_set(err, ERR_MEMORY, "no memory or descriptors for a table of %d connections",
                      config->n_conn);
        goto fail;
    }
    for (int i = 0; i < config->n_conn; i++) {
        w->conn[i].watch = w;
        w->conn[i].index = (uint32_t)i;
        w->conn[i].fd = -1;
        CHECK(pthread_mutex_init(&w->conn[i].mutex, NULL) == 0);
    }
    if (pthread_create(&w->thread, NULL, watch_run, w) != 0) {
        (void)err_set(err, ERR_MEMORY, "the watcher thread cannot be started");
        goto fail;
    }
    w->has_thread = true;
    *watch = w;
    return ERR_OK;
fail:
    watch_close(w);
    return err != NULL ? err->code : ERR_MEMORY;
}

void watch_close(struct watch *watch)
{
    if (watch == NULL) {
        return;
    }
    if (watch->has_thread) {
        const uint64_t one = 1;
        CHECK(write(watch->stop_fd, &one, sizeof one) == sizeof one);
        CHECK(pthread_join(watch->thread, NULL) == 0);
    }
    if (watch->epoll_fd >= 0) {
        (void)close(watch->epoll_fd);
    }
    if (watch->stop_fd >= 0) {
        (void)close(watch->stop_fd);
    }
    free(watch->conn);
    free(watch);
}
