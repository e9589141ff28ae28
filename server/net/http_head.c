/* The head of a request: what the library read becomes an exchange, and what the head alone decides
 * is decided. See http.h. */
#include "engine/clock.h"
#include "kernels/fnv.h"
#include "server/net/head.h"
#include "server/net/http_inside.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* What this server and a proxy in front of it must understand alike: where the body ends, and whose
 * it is. */
struct http_framing {
    int n_length, n_encoding, n_host;
    bool chunked;
    bool spaced; /* a header's name has a space in it, as "Content-Length :" */
};

static enum MHD_Result http_see_framing(void *cls, enum MHD_ValueKind kind, const char *key,
                                        const char *value)
{
    (void)kind;
    struct http_framing *const framing = cls;
    framing->spaced = framing->spaced || strpbrk(key, " \t") != NULL;
    framing->n_host += strcasecmp(key, MHD_HTTP_HEADER_HOST) == 0;
    if (strcasecmp(key, MHD_HTTP_HEADER_CONTENT_LENGTH) == 0) {
        framing->n_length++;
    } else if (strcasecmp(key, MHD_HTTP_HEADER_TRANSFER_ENCODING) == 0) {
        framing->n_encoding++;
        framing->chunked = value != NULL && strcasecmp(value, "chunked") == 0;
    }
    return MHD_YES;
}

/* If two readers can disagree about where a body ends, requests can be smuggled past a proxy; the
 * library takes the first length, or the encoding before the length. */
static bool http_check_framing(struct http_exchange *hx, const char *version,
                               struct api_error *error)
{
    struct http_framing framing = {0};
    (void)MHD_get_connection_values(hx->mhd, MHD_HEADER_KIND, http_see_framing, &framing);
    if (framing.spaced) {
        return api_error_set(error, 400, "invalid_value", NULL,
                             "the name of a header has a space in it or behind it");
    }
    /* The library would ask for one, but its own refusals of a whole head go out with two heads. */
    if (framing.n_host == 0 && strcmp(version, MHD_HTTP_VERSION_1_1) == 0) {
        return api_error_set(error, 400, "missing_field", "Host",
                             "an HTTP/1.1 request needs a Host header");
    }
    if (framing.n_host > 1) {
        return api_error_set(error, 400, "invalid_value", "Host",
                             "the request has %d Host headers, but one is the limit",
                             framing.n_host);
    }
    if (framing.n_length + framing.n_encoding > 1) {
        return api_error_set(error, 400, "invalid_value", "Content-Length",
                             "the request has %d Content-Length and %d Transfer-Encoding headers, "
                             "but one of either is the limit",
                             framing.n_length, framing.n_encoding);
    }
    if (framing.n_encoding == 1 && !framing.chunked) {
        return api_error_set(error, 400, "invalid_value", "Transfer-Encoding",
                             "chunked is the only Transfer-Encoding that is understood");
    }
    return true;
}

/* Checks everything that depends on the head alone. false: refused. */
static bool http_check_head(struct http_exchange *hx, const char *version, struct api_error *error)
{
    const struct http_config *const config = &hx->http->config;
    hx->x.close = watch_is_surplus(hx->conn);
    /* First the route, which determines the form of errors and is counted. */
    if (!config->head(
            config->ctx, &hx->x,
            MHD_lookup_connection_value(hx->mhd, MHD_HEADER_KIND, MHD_HTTP_HEADER_AUTHORIZATION),
            error) ||
        !http_check_framing(hx, version, error)) {
        return false;
    }
    if (hx->x.close && !hx->x.is_probe) {
        error->retry_after_s = 1;
        return api_error_set(error, 503, "too_many_connections", NULL,
                             "all connections of the server are in use (--max-connections %d)",
                             config->max_connections);
    }
    const char *const length =
        MHD_lookup_connection_value(hx->mhd, MHD_HEADER_KIND, MHD_HTTP_HEADER_CONTENT_LENGTH);
    if (length != NULL) {
        errno = 0;
        const unsigned long long bytes = strtoull(length, NULL, 10);
        if (errno != 0 || bytes > (unsigned long long)config->max_body_bytes) {
            return api_error_set(error, 413, "body_too_large", NULL,
                                 "the body has %s bytes, but %lld are the limit (%s)", length,
                                 (long long)config->max_body_bytes, config->max_body_flag);
        }
    }
    return true;
}

/* The values of all X-Forwarded-For headers as one list; of a longer one the end, which is ours. */
struct http_forwarded {
    char list[1024];
    size_t n;
};

static enum MHD_Result http_see_forwarded(void *cls, enum MHD_ValueKind kind, const char *key,
                                          const char *value)
{
    (void)kind;
    struct http_forwarded *const all = cls;
    if (strcasecmp(key, "X-Forwarded-For") == 0 && value != NULL) {
        size_t bytes = strlen(value);
        if (bytes >= sizeof all->list) {
            value += bytes - (sizeof all->list - 1);
            bytes = sizeof all->list - 1;
        }
        if (all->n + 1 + bytes >= sizeof all->list) {
            all->n = 0;
        }
        if (all->n > 0) {
            all->list[all->n++] = ',';
        }
        memcpy(all->list + all->n, value, bytes);
        all->n += bytes;
        all->list[all->n] = '\0';
    }
    return MHD_YES;
}

/* Whose request it is, judging by addresses. */
static void http_see_client(struct http_exchange *hx)
{
    const struct proxies *const proxies = hx->http->config.proxies;
    const union MHD_ConnectionInfo *const peer =
        MHD_get_connection_info(hx->mhd, MHD_CONNECTION_INFO_CLIENT_ADDRESS);
    struct http_forwarded forwarded = {0};
    if (proxies->n > 0) {
        (void)MHD_get_connection_values(hx->mhd, MHD_HEADER_KIND, http_see_forwarded, &forwarded);
    }
    struct proxies_address address = {0};
    if (peer != NULL && proxies_client(proxies, peer->client_addr,
                                       forwarded.n > 0 ? forwarded.list : NULL, &address)) {
        hx->x.client = fnv_hash(FNV_BEGIN, &address, sizeof address);
        hx->x.knows_client = proxies->n > 0;
    }
}

struct http_exchange *http_begin(struct http *http, struct MHD_Connection *mhd, const char *url,
                                 const char *method, const char *version)
{
    const union MHD_ConnectionInfo *const info =
        MHD_get_connection_info(mhd, MHD_CONNECTION_INFO_SOCKET_CONTEXT);
    struct watch_conn *const conn = info != NULL ? info->socket_context : NULL;
    struct http_exchange *const hx = conn != NULL ? calloc(1, sizeof *hx) : NULL;
    if (hx == NULL) {
        return NULL; /* the table is full, or there is no memory: the connection closes */
    }
    hx->http = http;
    hx->conn = conn;
    hx->mhd = mhd;
    struct exchange *const x = &hx->x;
    x->begin_us = clock_now_us();
    x->waker = conn;
    x->route = -1;
    (void)snprintf(x->method, sizeof x->method, "%s", method);
    (void)snprintf(x->path, sizeof x->path, "%s", head_path(url));
    x->is_get = strcmp(method, "GET") == 0 || strcmp(method, "HEAD") == 0;
    x->is_post = strcmp(method, "POST") == 0;
    x->is_put = strcmp(method, "PUT") == 0;
    x->is_delete = strcmp(method, "DELETE") == 0;
    const char *const deep = MHD_lookup_connection_value(mhd, MHD_GET_ARGUMENT_KIND, "deep");
    x->deep = deep != NULL && strcmp(deep, "1") == 0;
    x->admin = http->config.admin;
    http_see_client(hx);
    (void)keys_trace(MHD_lookup_connection_value(mhd, MHD_HEADER_KIND, "traceparent"), x->trace_id,
                     x->span_id);
    const char *const accept =
        MHD_lookup_connection_value(mhd, MHD_HEADER_KIND, MHD_HTTP_HEADER_ACCEPT);
    x->wants_events = accept != NULL && strcasestr(accept, "text/event-stream") != NULL;
    x->wants_html = accept != NULL && strcasestr(accept, "text/html") != NULL;
    head_id(x->id, MHD_lookup_connection_value(mhd, MHD_HEADER_KIND, "x-request-id"));
    struct api_error error = {0};
    const bool accepted = http_check_head(hx, version, &error);
    budget_join(&http->budget, &hx->share, x->knows_client ? x->client : 0);
    watch_body(conn, x); /* from here on the watcher may refuse it, too */
    if (!accepted) {
        watch_refuse(conn, &error);
    }
    return hx;
}
