/* libmicrohttpd behind the exchange: see http.h. The rules kept here were found by trying the
 * library; each has a test in tests/server/test_http_rules.py. */
#include "server/net/http.h"

#include "engine/clock.h"
#include "engine/log.h"
#include "server/net/head.h"
#include "server/net/listen.h"
#include "server/net/http_inside.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

/* ---- the body ------------------------------------------------------------------------------ */

/* The share is the largest: its connection ends, whatever it is doing. */
static void http_end(struct budget_share *share)
{
    struct http_exchange *const hx =
        (struct http_exchange *)((char *)share - offsetof(struct http_exchange, share));
    struct api_error error = {.retry_after_s = 1};
    (void)api_error_set(
        &error, hx->http->config.overload_status, "buffers_full", NULL,
        "bodies and answers of all requests together exceed %lld bytes "
        "(--max-buffered-bytes), and this client holds most of them: read the answers, "
        "and send less at once",
        (long long)hx->http->config.max_buffered_bytes);
    if (worker_remove(hx->http->worker, &hx->task)) {
        exchange_error(&hx->x, &error);
        text_free(&hx->x.body);
        watch_attach(hx->conn);
    } else {
        watch_end(hx->conn, &error);
    }
}

static void http_take_body(struct http_exchange *hx, const char *data, size_t n)
{
    struct http *const http = hx->http;
    struct text *const body = &hx->x.body;
    struct api_error error = {0};
    if (watch_refused(hx->conn)) {
        return;
    }
    const int64_t max = http->config.max_body_bytes;
    hx->body_seen += n;
    if (hx->body_seen > (size_t)max) {
        (void)api_error_set(&error, 413, "body_too_large", NULL,
                            "the body has more than %lld bytes, the limit (%s)", (long long)max,
                            http->config.max_body_flag);
    } else if (hx->x.drops_body) {
        return;
    } else {
        budget_hold(&http->budget, &hx->share, (int64_t)hx->body_seen);
        if (watch_refused(hx->conn)) { /* this connection itself had the largest share */
            text_free(body);
            return;
        }
        text_add(body, data, n);
        if (body->failed) {
            (void)api_error_set(&error, 500, "out_of_memory", NULL, "no memory for the body");
        }
    }
    if (error.status != 0) {
        text_free(body);
        watch_refuse(hx->conn, &error);
    }
}

static void http_drop_body(struct http_exchange *hx)
{
    text_free(&hx->x.body);
    budget_hold(&hx->http->budget, &hx->share, hx->x.held_bytes + (int64_t)hx->x.out.capacity);
}

/* ---- the answer ---------------------------------------------------------------------------- */

/* The rest of the answer cannot be had: hangs up on the client, and gives the library a byte that
 * reaches nobody, at which it finds the connection closed. Told of an error, or of an end where
 * that closes the connection, it may forget one that has slept: closed then, and never freed
 * (0.9.75 waits for an event of a socket that is in no epoll set; tests/cli/test_faults.py). */
static ssize_t http_break_off(struct http_exchange *hx, char *buffer)
{
    const char *const code = hx->x.code;
    const struct api_error error = {.code = code != NULL ? code : "out_of_memory"};
    watch_end(hx->conn, &error);
    buffer[0] = '\n';
    return 1;
}

/* Pulls the next bytes of a stream out of its work. */
static ssize_t http_read_stream(void *cls, uint64_t pos, char *buffer, size_t max)
{
    (void)pos;
    struct http_exchange *const hx = cls;
    struct exchange *const x = &hx->x;
    for (;;) {
        if (x->out.failed) {
            return http_break_off(hx, buffer);
        }
        const size_t left = x->out.n - hx->out_pos;
        if (left > 0) {
            const size_t n = left < max ? left : max;
            memcpy(buffer, x->out.data + hx->out_pos, n);
            hx->out_pos += n;
            x->sent_bytes += n;
            return (ssize_t)n;
        }
        if (hx->ended) {
            return MHD_CONTENT_READER_END_OF_STREAM;
        }
        text_clear(&x->out);
        hx->out_pos = 0;
        const enum exchange_next next = x->work->next(x, x->work_data);
        hx->ended = next == EXCHANGE_END || next == EXCHANGE_ANSWER;
        if (next == EXCHANGE_WAIT && watch_sleep(hx->conn, hx->mhd)) {
            return 0;
        }
    }
}

static enum MHD_Result http_send(struct http_exchange *hx, bool stream)
{
    struct exchange *const x = &hx->x;
    struct MHD_Response *response = NULL;
    if (x->status == 499) { /* the client has left: there is nobody to answer */
        return MHD_NO;
    }
    if (stream) {
        response = MHD_create_response_from_callback(MHD_SIZE_UNKNOWN, HTTP_BLOCK_BYTES,
                                                     http_read_stream, hx, NULL);
    } else {
        x->sent_bytes = x->out.n;
        budget_hold(&hx->http->budget, &hx->share, x->held_bytes + (int64_t)x->out.capacity);
        response = MHD_create_response_from_buffer(x->out.n, x->out.data, MHD_RESPMEM_MUST_FREE);
        if (response != NULL) {
            x->out = (struct text){0}; /* the response owns it now */
        }
    }
    if (response == NULL) {
        return MHD_NO;
    }
    bool ok = MHD_add_response_header(response, "x-request-id", x->id) == MHD_YES;
    if (x->content_type != NULL) {
        ok = ok && MHD_add_response_header(response, MHD_HTTP_HEADER_CONTENT_TYPE,
                                           x->content_type) == MHD_YES;
    }
    for (int i = 0; ok && i < x->n_header; i++) {
        ok = MHD_add_response_header(response, x->header[i].name, x->header[i].value) == MHD_YES;
    }
    if (ok && (x->close || atomic_load(&hx->http->draining))) {
        ok = MHD_add_response_header(response, MHD_HTTP_HEADER_CONNECTION, "close") == MHD_YES;
    }
    hx->queued = true;
    const enum MHD_Result result =
        ok ? MHD_queue_response(hx->mhd, (unsigned)x->status, response) : MHD_NO;
    MHD_destroy_response(response);
    return result;
}

/* Calls the work until it sleeps or has an answer. */
static enum MHD_Result http_advance(struct http_exchange *hx)
{
    struct exchange *const x = &hx->x;
    while (x->work != NULL) {
        const enum exchange_next next = x->work->next(x, x->work_data);
        if (next == EXCHANGE_ANSWER) {
            break;
        }
        if (next == EXCHANGE_STREAM || next == EXCHANGE_END) {
            hx->ended = next == EXCHANGE_END;
            return http_send(hx, true);
        }
        if (watch_sleep(hx->conn, hx->mhd)) {
            return MHD_YES;
        }
    }
    CHECK(x->status != 0);
    return http_send(hx, false);
}

static void http_handle(struct http_exchange *hx)
{
    hx->http->config.handle(hx->http->config.ctx, &hx->x);
    http_drop_body(hx);
}

static struct http_exchange *http_of_task(struct worker_task *task)
{
    return (struct http_exchange *)((char *)task - offsetof(struct http_exchange, task));
}

/* On a worker thread. The connection sleeps until the last line. If the client has left, its body
 * is not read: the client may have sent the same again, and others are waiting. */
static void http_handle_long(struct worker_task *task)
{
    struct http_exchange *const hx = http_of_task(task);
    hx->x.wait_us = clock_now_us() - hx->x.body_us + 1;
    if (watch_has_left(hx->conn)) {
        const bool cut = atomic_load(&hx->http->cutting); /* by us: its client waits */
        atomic_store(&hx->x.gone, !cut);
        hx->x.status = cut ? 503 : 499; /* the body goes when this is over */
    } else {
        http_handle(hx);
    }
    watch_attach(hx->conn);
}

/* The library's one entry. It calls with the head, with each piece of the body, when the body is
 * complete, and again after each resume. The answer is given when the body is complete, never in
 * the first call: that would end the connection. */
static enum MHD_Result http_access(void *cls, struct MHD_Connection *mhd, const char *url,
                                   const char *method, const char *version, const char *upload,
                                   size_t *upload_bytes, void **con_cls)
{
    struct http *const http = cls;
    struct http_exchange *hx = *con_cls;
    if (hx == NULL) {
        hx = http_begin(http, mhd, url, method, version);
        *con_cls = hx;
        return hx != NULL ? MHD_YES : MHD_NO;
    }
    if (*upload_bytes > 0) {
        http_take_body(hx, upload, *upload_bytes);
        *upload_bytes = 0;
        return MHD_YES;
    }
    if (!hx->handled) {
        if (!watch_answer(hx->conn)) {
            return MHD_NO; /* refused, and now the whole body has come */
        }
        hx->handled = true;
        hx->x.body_us = clock_now_us();
        /* A file that is put may have to wait for others, whatever its size. */
        if (hx->x.body.n >= HTTP_LONG_BYTES || (hx->x.is_put && !hx->x.drops_body)) {
            hx->task.run = http_handle_long;
            hx->task.bytes = hx->x.body.n;
            hx->task.client = hx->x.knows_client ? hx->x.client : 0;
            watch_detach(hx->conn, mhd);
            worker_push(http->worker, &hx->task);
            return MHD_YES;
        }
        http_handle(hx);
    }
    return hx->queued ? MHD_NO : http_advance(hx);
}

/* ---- connections come and go --------------------------------------------------------------- */

static void http_completed(void *cls, struct MHD_Connection *mhd, void **con_cls,
                           enum MHD_RequestTerminationCode why)
{
    (void)mhd;
    struct http *const http = cls;
    struct http_exchange *const hx = *con_cls;
    *con_cls = NULL;
    if (hx == NULL) {
        return;
    }
    watch_idle(hx->conn);
    /* A refused request is over when its client hangs up; in any other case the client has left the
     * request, unless we hung up: that looks the same. */
    if (atomic_load(&hx->x.end_code) != NULL) {
        atomic_store(&hx->x.gone, false);
        if (hx->x.status == 0 || hx->x.status == 499) {
            hx->x.status = http->config.overload_status;
        }
    } else if (why != MHD_REQUEST_TERMINATED_COMPLETED_OK && (hx->x.status == 0 || hx->queued)) {
        if (!atomic_load(&http->cutting)) {
            atomic_store(&hx->x.gone, true);
        } else if (hx->x.code == NULL) { /* an error that breaks off was counted elsewhere */
            hx->x.cut = true;
            (void)atomic_fetch_add(&http->n_cut, 1);
        }
    }
    http->config.done(http->config.ctx, &hx->x);
    budget_leave(&http->budget, &hx->share);
    exchange_free(&hx->x);
}

/* Of each connection that the library has accepted, before anything else: whether it is kept. */
static enum MHD_Result http_accept(void *cls, const struct sockaddr *address, socklen_t bytes)
{
    (void)address;
    (void)bytes;
    struct http *const http = cls;
    if (listen_has_descriptor()) {
        return MHD_YES;
    }
    const long long n_shed = 1 + atomic_fetch_add(&http->n_shed, 1);
    const int64_t now_us = clock_now_us();
    long long told_us = atomic_load(&http->shed_told_us);
    if (now_us >= told_us + HTTP_SHED_TOLD_US &&
        atomic_compare_exchange_strong(&http->shed_told_us, &told_us, now_us)) {
        log_event(LEVEL_WARN, "no_descriptors",
                  "connections=%d closed=%lld why=\"the process has as many files open as it may: "
                  "raise ulimit -n or lower --max-connections\"",
                  http_connections(http), n_shed);
    }
    return MHD_NO;
}

static void http_connection(void *cls, struct MHD_Connection *mhd, void **socket_context,
                            enum MHD_ConnectionNotificationCode why)
{
    struct http *const http = cls;
    if (why == MHD_CONNECTION_NOTIFY_STARTED) {
        const union MHD_ConnectionInfo *const info =
            MHD_get_connection_info(mhd, MHD_CONNECTION_INFO_CONNECTION_FD);
        *socket_context = info != NULL ? watch_take(http->watch, info->connect_fd) : NULL;
        if (info != NULL && *socket_context == NULL) { /* nobody would watch it */
            (void)shutdown(info->connect_fd, SHUT_RDWR);
        }
    } else if (*socket_context != NULL) {
        watch_give(*socket_context);
        *socket_context = NULL;
    }
}

static size_t http_unescape(void *cls, struct MHD_Connection *mhd, char *text)
{
    (void)cls;
    (void)mhd;
    return head_unescape(text);
}

static void http_suspend(void *connection)
{
    MHD_suspend_connection(connection);
}

static void http_resume(void *connection)
{
    MHD_resume_connection(connection);
}

/* ---- starting and stopping ----------------------------------------------------------------- */

static enum err_code http_start_daemon(struct http *http, struct err *err)
{
    const struct http_config *const config = &http->config;
    /* Over the library's own limit clients would wait in the backlog without an answer: it is set
     * so high that each of its threads could take all connections. */
    const unsigned limit = HTTP_THREADS * (unsigned)(config->max_connections + HTTP_SURPLUS + 1);
    http->daemon = MHD_start_daemon(
        MHD_USE_EPOLL_INTERNAL_THREAD | MHD_ALLOW_SUSPEND_RESUME | MHD_USE_ITC, 0, http_accept,
        http, http_access, http, MHD_OPTION_LISTEN_SOCKET, http->listen_fd,
        MHD_OPTION_THREAD_POOL_SIZE, config->admin ? 0u : (unsigned)HTTP_THREADS,
        MHD_OPTION_CONNECTION_LIMIT, limit, MHD_OPTION_CONNECTION_TIMEOUT, 0u,
        MHD_OPTION_CONNECTION_MEMORY_LIMIT, (size_t)HTTP_HEAD_BYTES, MHD_OPTION_UNESCAPE_CALLBACK,
        http_unescape, NULL, MHD_OPTION_NOTIFY_COMPLETED, http_completed, http,
        MHD_OPTION_NOTIFY_CONNECTION, http_connection, http, MHD_OPTION_END);
    if (http->daemon == NULL) {
        return err_set(err, ERR_IO, "the HTTP threads cannot be started");
    }
    return ERR_OK;
}

enum err_code http_start(struct http **http, const struct http_config *config, struct err *err)
{
    *http = NULL;
    struct http *const h = calloc(1, sizeof *h);
    if (h == NULL) {
        return err_set(err, ERR_MEMORY, "no memory for the HTTP server");
    }
    h->config = *config;
    h->listen_fd = h->silent_fd = -1;
    budget_open(&h->budget, config->max_buffered_bytes, http_end);
    CHECK(pthread_mutex_init(&h->listen_mutex, NULL) == 0);
    const struct watch_config watch = {.n_conn = config->max_connections + HTTP_SURPLUS,
                                       .max_connections = config->max_connections,
                                       .header_timeout_s = config->header_timeout_s,
                                       .body_timeout_s = config->body_timeout_s,
                                       .keepalive_s = config->keepalive_s,
                                       .min_read_rate = config->min_read_rate,
                                       .read_window_s = config->read_window_s,
                                       .suspend = http_suspend,
                                       .resume = http_resume,
                                       .tick = config->tick,
                                       .ctx = config->ctx};
    enum err_code code =
        listen_reserve_files(config->max_connections, HTTP_SURPLUS + config->n_more_files, err);
    if (code == ERR_OK) {
        code = listen_open(&h->listen_fd, &h->port, config->host, config->port, err);
    }
    if (code == ERR_OK && (h->silent_fd = eventfd(0, EFD_CLOEXEC)) < 0) {
        code = err_set(err, ERR_IO, "no descriptor for the end of listening: %s", strerror(errno));
    }
    if (code == ERR_OK) {
        code = watch_open(&h->watch, &watch, err);
    }
    if (code == ERR_OK) {
        code = worker_open(&h->worker, config->admin ? 1 : config->body_threads, err);
    }
    *http = h; /* before the first request can come: routes ask for http_connections */
    if (code == ERR_OK) {
        code = http_start_daemon(h, err);
    }
    if (code != ERR_OK) {
        *http = NULL;
        (void)http_stop(h, 0);
    }
    return code;
}

int http_port(const struct http *http)
{
    return http->port;
}

int http_connections(const struct http *http)
{
    return watch_n_conn(http->watch);
}

int64_t http_buffered(struct http *http)
{
    return budget_used(&http->budget);
}

void http_relieve(struct http *http, bool traces, int64_t bytes)
{
    watch_relieve(http->watch, traces, bytes);
}

int http_n_unread(const struct http *http)
{
    return worker_n_task(http->worker);
}

void http_drain(struct http *http)
{
    atomic_store(&http->draining, true);
}

/* Accepts no more connections: the port is closed. */
static void refuse_connections(struct http *http)
{
    pthread_mutex_lock(&http->listen_mutex);
    if (!http->refuses) {
        http->refuses = true;
        /* Closes the socket. The library keeps its descriptor, at which no connection comes any
         * more; stopped, it closes that. MHD_quiesce_daemon would end the process where a thread of
         * the library stops listening in the same moment (0.9.75: its second removal from an epoll
         * set fails, which it takes for a bug). */
        CHECK(dup3(http->silent_fd, http->listen_fd, O_CLOEXEC) == http->listen_fd);
    }
    pthread_mutex_unlock(&http->listen_mutex);
}

/* Nobody came to read these bodies in time. */
static void http_refuse_unread(struct http *http)
{
    struct api_error error = {.retry_after_s = 5};
    (void)api_error_set(&error, 503, "shutting_down", NULL, "the server is shutting down");
    for (struct worker_task *task; (task = worker_take_back(http->worker)) != NULL;) {
        struct http_exchange *const hx = http_of_task(task);
        exchange_error(&hx->x, &error);
        http_drop_body(hx);
        watch_attach(hx->conn);
    }
}

int http_stop(struct http *http, int64_t deadline_us)
{
    if (http == NULL) {
        return 0;
    }
    if (http->daemon != NULL) {
        refuse_connections(http);
        if (deadline_us > 0) {
            http_refuse_unread(http);
        }
        /* Uploads would only be refused; their clients get the time to read that. */
        const int64_t upload_us = clock_now_us() + HTTP_REFUSAL_US;
        while (clock_now_us() < deadline_us &&
               watch_n_exchange(http->watch, clock_now_us() >= upload_us) > 0) {
            (void)usleep(5000);
        }
        atomic_store(&http->cutting, true);
        /* The library aborts when it is stopped with a suspended connection. Hanging up wakes them
         * all, and no work sleeps again once its client is gone. */
        while (watch_hang_up(http->watch) > 0) {
            (void)usleep(5000);
        }
        MHD_stop_daemon(http->daemon); /* closes listen_fd */
    } else if (http->listen_fd >= 0) {
        (void)close(http->listen_fd);
    }
    worker_close(http->worker);
    watch_close(http->watch);
    if (http->silent_fd >= 0) {
        (void)close(http->silent_fd);
    }
    budget_close(&http->budget);
    const int n_cut = atomic_load(&http->n_cut);
    free(http);
    return n_cut;
}
