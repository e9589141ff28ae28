/* Which connection makes room for another one when all places are taken: see watch.h. */
#include "server/net/watch_inside.h"

#include "engine/clock.h"

#include <sys/socket.h>

enum {
    WATCH_SLOW_US = 1000000, /* for a body to arrive, or a client to read */
    WATCH_STAYS = 4,         /* more than any claim */
};

/* Which connection is shut for another one: that with the least of this number. First those that
 * wait for a head, then those whose body has been coming for a while, then those whose client has
 * been reading slowly for a while: each by the share of its time that is left. Others have
 * WATCH_STAYS. Under the mutex. */
static double watch_claim(const struct watch_conn *conn, int64_t now_us)
{
    const struct watch_config *const config = &conn->watch->config;
    int64_t deadline_us = conn->deadline_us;
    int order = 0;
    int limit_s = 0;
    switch (conn->state) {
    case CONN_HEAD: limit_s = config->header_timeout_s; break;
    case CONN_IDLE: limit_s = config->keepalive_s; break;
    case CONN_BODY:
        order = 1;
        limit_s = config->body_timeout_s;
        break;
    case CONN_ANSWER:
        order = 2;
        limit_s = config->read_window_s;
        deadline_us = conn->read_us == 0 || atomic_load(&conn->x->end_code) != NULL
                          ? 0
                          : conn->read_us + limit_s * INT64_C(1000000);
        break;
    case CONN_FREE:
    case CONN_REFUSED: return WATCH_STAYS;
    }
    const int64_t left_us = deadline_us - now_us;
    if (deadline_us == 0 || (order > 0 && limit_s * INT64_C(1000000) - left_us < WATCH_SLOW_US)) {
        return WATCH_STAYS;
    }
    return order + (double)left_us / (1e6 * limit_s);
}

/* The connection with the least claim to its place, *claim; NULL: all stay. */
static struct watch_conn *watch_least(struct watch *watch, int64_t now_us, double *claim)
{
    struct watch_conn *least = NULL;
    *claim = WATCH_STAYS;
    for (int i = 0; i < watch->config.n_conn; i++) {
        struct watch_conn *const conn = &watch->conn[i];
        pthread_mutex_lock(&conn->mutex);
        const double own = watch_claim(conn, now_us);
        if (own < *claim) {
            least = conn;
            *claim = own;
        }
        pthread_mutex_unlock(&conn->mutex);
    }
    return least;
}

/* Under the mutex. */
static void watch_shut(struct watch_conn *conn)
{
    struct api_error error = {.retry_after_s = 1};
    switch (conn->state) {
    case CONN_BODY:
        (void)api_error_set(&error, 503, "too_many_connections", NULL,
                            "all connections of the server are in use (--max-connections %d), and "
                            "this request's body came "
                            "more slowly than others",
                            conn->watch->config.max_connections);
        watch_cut_locked(conn, &error);
        break;
    case CONN_ANSWER: watch_end_locked(conn, "slow_reader"); break;
    default: conn->deadline_us = 0; (void)shutdown(conn->fd, SHUT_RDWR);
    }
}

bool watch_replace(struct watch *watch)
{
    const int64_t now_us = clock_now_us();
    double claim = 0;
    struct watch_conn *conn = watch_least(watch, now_us, &claim);
    bool is_shut = false;
    bool is_surplus = true;
    while (conn != NULL && !is_shut) {
        pthread_mutex_lock(&conn->mutex);
        /* Unless what it waited for has come meanwhile, or another thread has shut it. */
        is_shut = watch_claim(conn, now_us) <= claim;
        if (is_shut) {
            is_surplus = conn->surplus;
            watch_shut(conn);
        }
        pthread_mutex_unlock(&conn->mutex);
        conn = is_shut ? conn : watch_least(watch, now_us, &claim);
    }
    return is_surplus;
}
