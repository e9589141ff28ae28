/* The route table and what comes before and after each route: see routes.h. */
#include "server/api/routes.h"

#include "engine/clock.h"
#include "engine/log.h"
#include "server/generate/openai.h"
#include "server/generate/tgi.h"
#include "server/io/answer.h"

#include <stdio.h>
#include <string.h>

enum {
    ROUTE_GET = 1,
    ROUTE_POST = 2,
    ROUTE_ENGINE = 4,  /* needs the loaded model */
    ROUTE_WORK = 8,    /* gives the engine work: not while draining */
    ROUTE_QUIET = 16,  /* probed all the time: logged only when it fails or at debug */
    ROUTE_PREFIX = 32, /* the path goes on */
    ROUTE_OPEN = 64,   /* needs no key, and is at the admin port too */
    ROUTE_METRICS = 128,
    ROUTE_PUT = 256,
    ROUTE_DELETE = 512,
    ROUTE_ADMIN = 1024, /* only at the admin port */
    ROUTE_FILE = ROUTE_GET | ROUTE_PUT | ROUTE_DELETE | ROUTE_ADMIN
};

struct route {
    const char *path;
    int flags;
    void (*run)(struct server *server, struct exchange *x); /* NULL: POST alone, by dialect */
    const struct generate_dialect *dialect; /* POST is a generation in it; NULL = run takes all */
};

static const struct route table[] = {
    {"/generate", ROUTE_POST, NULL, &generate_route},
    {"/generate_stream", ROUTE_POST, NULL, &tgi_stream_dialect},
    {"/v1/completions", ROUTE_POST, NULL, &openai_dialect},
    {"/score", ROUTE_POST | ROUTE_ENGINE | ROUTE_WORK, api_score, NULL},
    {"/v1/score", ROUTE_POST | ROUTE_ENGINE | ROUTE_WORK, api_score_labels, NULL},
    {"/tokenize", ROUTE_POST | ROUTE_ENGINE, api_tokenize, NULL},
    {"/detokenize", ROUTE_POST | ROUTE_ENGINE, api_detokenize, NULL},
    {"/tokenizer_info", ROUTE_GET | ROUTE_ENGINE, api_tokenizer_info, NULL},
    {"/v1/models", ROUTE_GET | ROUTE_ENGINE, api_models, NULL},
    {"/v1/models/", ROUTE_GET | ROUTE_ENGINE | ROUTE_PREFIX, api_models, NULL},
    {"/v1/chat/completions", ROUTE_POST | ROUTE_ENGINE, api_chat, NULL},
    {"/info", ROUTE_GET | ROUTE_ENGINE, api_info, NULL},
    {"/version", ROUTE_GET | ROUTE_OPEN, api_version, NULL},
    {"/health", ROUTE_GET | ROUTE_QUIET | ROUTE_OPEN, api_ready, NULL},
    {"/health/ready", ROUTE_GET | ROUTE_QUIET | ROUTE_OPEN, api_ready, NULL},
    {"/health/live", ROUTE_GET | ROUTE_QUIET | ROUTE_OPEN, api_live, NULL},
    {"/ping", ROUTE_GET | ROUTE_POST | ROUTE_QUIET | ROUTE_OPEN, api_ready, NULL},
    {"/v1/health", ROUTE_GET | ROUTE_QUIET | ROUTE_OPEN, api_ready, NULL},
    {"/livez", ROUTE_GET | ROUTE_QUIET | ROUTE_OPEN, api_live, NULL},
    {"/readyz", ROUTE_GET | ROUTE_QUIET | ROUTE_OPEN, api_ready, NULL},
    {"/v2/health/live", ROUTE_GET | ROUTE_QUIET | ROUTE_OPEN, api_live, NULL},
    {"/v2/health/ready", ROUTE_GET | ROUTE_QUIET | ROUTE_OPEN, api_ready, NULL},
    {"/openapi.json", ROUTE_GET | ROUTE_OPEN, api_openapi, NULL},
    {"/ui", ROUTE_GET | ROUTE_OPEN, api_page, NULL},
    {"/ui/", ROUTE_GET | ROUTE_OPEN | ROUTE_PREFIX, api_page, NULL},
    {"/memory/overlays", ROUTE_GET | ROUTE_ENGINE | ROUTE_ADMIN, api_overlays, NULL},
    {"/memory/overlays/", ROUTE_FILE | ROUTE_ENGINE | ROUTE_PREFIX, api_overlay, NULL},
    {"/memory/counts", ROUTE_GET | ROUTE_ENGINE | ROUTE_ADMIN, api_counts, NULL},
    {"/metrics", ROUTE_GET | ROUTE_QUIET | ROUTE_METRICS, api_metrics, NULL},
    {"/", ROUTE_GET | ROUTE_POST | ROUTE_OPEN, api_root, &tgi_root_dialect},
};

enum { ROUTE_N = sizeof table / sizeof table[0] };
_Static_assert((int)ROUTE_N < (int)METRICS_ROUTE_MAX,
               "metrics count one more route than there are");

int routes_n(void)
{
    return ROUTE_N + 1;
}

const char *routes_name(int route)
{
    return route >= 0 && route < ROUTE_N ? table[route].path : "other";
}

static int routes_find(const char *path)
{
    for (int i = 0; i < ROUTE_N; i++) {
        const bool prefix = (table[i].flags & ROUTE_PREFIX) != 0;
        if (prefix ? strncmp(path, table[i].path, strlen(table[i].path)) == 0
                   : strcmp(path, table[i].path) == 0) {
            return i;
        }
    }
    return -1;
}

/* ---- errors -------------------------------------------------------------------------------- */

/* Completes the error as this server reports it: when to try again, and the status of an
 * overload. */
static struct api_error routes_told(struct server *server, const struct api_error *given)
{
    struct api_error error = *given;
    struct engine *const engine = atomic_load(&server->engine);
    if (given->status == 429) {
        const bool of_all = strcmp(given->code, "queue_tokens_full") == 0;
        error.retry_after_s = engine != NULL ? engine_retry_after_s(engine, of_all) : 1;
        error.status = strcmp(server->options->overload_status, "503") == 0 ? 503 : 429;
    } else if (given->status == 503) {
        error.retry_after_s = strcmp(error.code, "model_loading") == 0 ? 2 : 5;
    }
    return error;
}

void routes_error(struct server *server, struct exchange *x, const struct api_error *given)
{
    const struct api_error error = routes_told(server, given);
    if (error.status == 504) {
        const bool queued = strcmp(error.code, "queue_timeout") == 0;
        exchange_header(x, "x-should-retry", "%s", queued ? "true" : "false");
    }
    exchange_error(x, &error);
}

static void routes_refuse(struct server *server, struct exchange *x, int status, const char *code,
                          const char *message)
{
    struct api_error error = {0};
    (void)api_error_set(&error, status, code, NULL, "%s", message);
    routes_error(server, x, &error);
}

/* Counts the request among its client's. false: too many, and error says so. */
static bool routes_enter(struct server *server, struct exchange *x, struct api_error *error)
{
    const int max = server->options->max_client_requests;
    x->counted = max > 0 && clients_enter(&server->clients, x->client, max);
    if (max > 0 && !x->counted) {
        struct api_error full = {0};
        (void)api_error_set(&full, 429, "client_limit", NULL,
                            "this client has as many requests under way as it may have "
                            "(--max-client-requests %d): wait for one to end",
                            max);
        *error = routes_told(server, &full);
        return false;
    }
    return true;
}

bool routes_submit(struct server *server, struct exchange *x, struct request *request,
                   int64_t parse_us)
{
    /* The parser counted the request's time from its own start; it must count from the head. */
    request->deadline_us -= parse_us - x->begin_us;
    struct engine *const engine = atomic_load(&server->engine);
    const int id_max = (int)sizeof request->id - 1; /* the log is useful even with a part of it */
    (void)snprintf(request->id, sizeof request->id, "%.*s", id_max, x->id);
    request->client = x->knows_client ? x->client : 0;
    request->is_tenant = request->client != 0 && (server->keys == NULL || keys_n(server->keys) > 1);
    if (server->keys != NULL) {
        const bool is_shared = strcmp(server->options->prefix_cache, "shared") == 0;
        request->scope ^= is_shared ? 0 : x->client; /* beside the request's own salt */
        request->owner = x->client;
    }
    request->wake = exchange_wake;
    request->wake_ctx = x->waker;
    struct err err = {0};
    const enum err_code code = engine_submit(engine, request, &err);
    if (code == ERR_OK) {
        atomic_store(&x->request, request);
        return true;
    }
    struct api_error error = {0};
    switch (code) {
    case ERR_QUEUE_FULL:
        (void)api_error_set(&error, 429, "queue_full", NULL, "%s", err.message);
        break;
    case ERR_QUEUE_TOKENS:
        (void)api_error_set(&error, 429, "queue_tokens_full", NULL, "%s", err.message);
        break;
    case ERR_ARGUMENT:
        (void)api_error_set(&error, 400, "invalid_value", NULL, "%s", err.message);
        break;
    case ERR_CLOSED:
        x->close = true;
        (void)api_error_set(
            &error, 503, engine_state(engine) == ENGINE_FAILED ? "engine_failed" : "shutting_down",
            NULL, "%s", err.message);
        break;
    case ERR_MEMORY:
        (void)api_error_set(&error, 500, "out_of_memory", NULL, "%s", err.message);
        break;
    default: (void)api_error_set(&error, 500, "internal_error", NULL, "%s", err.message); break;
    }
    routes_error(server, x, &error);
    return false;
}

struct api_limits routes_limits(struct server *server, const struct exchange *x,
                                struct overlay_names *binding)
{
    struct api_limits limits = server->limits;
    binding->n = 0;
    if (server->keys != NULL) {
        keys_binding(server->keys, x->client, binding);
        limits.binding = binding->n > 0 ? binding : NULL;
    }
    return limits;
}

struct answer_meta routes_accept(struct server *server, struct exchange *x,
                                 const struct request *request, const char *id, const char *ignored)
{
    if (ignored[0] != '\0') {
        exchange_header(x, "X-Ignored-Fields", "%s", ignored);
        ignored_note(&server->ignored, x->path, ignored);
    }
    return (struct answer_meta){.id = id[0] != '\0' ? id : x->id,
                                .model = server->limits.model_name,
                                .created = metrics_unix_seconds(),
                                .begin_us = x->begin_us,
                                .overlays = &request->overlays};
}

bool routes_gone(struct exchange *x, struct request *request)
{
    if (!atomic_load(&x->gone)) {
        return false;
    }
    request_cancel(request);
    x->status = 499;
    return true;
}

/* Queue, inference and total time in whole milliseconds, and the token counts. */
static void routes_time_headers(struct exchange *x, const struct request *request)
{
    const struct answer_times times = answer_times_of(request, x->begin_us);
    exchange_header(x, "x-queue-time", "%.0f", times.queue_ms);
    exchange_header(x, "x-inference-time", "%.0f", times.prefill_ms + times.decode_ms);
    exchange_header(x, "x-total-time", "%.0f", times.total_ms);
    exchange_header(x, "x-prompt-tokens", "%lld", (long long)x->n_prompt);
    exchange_header(x, "x-generated-tokens", "%lld", (long long)x->n_generated);
}

enum exchange_next routes_piece(struct exchange *x, const struct request *request, bool done)
{
    const bool first = x->status == 0;
    if (first && request != NULL) {
        routes_time_headers(x, request);
    }
    if (first && done) {
        exchange_json(x, 200);
        return EXCHANGE_ANSWER;
    }
    if (first) {
        x->status = 200;
        x->content_type = "application/json";
    }
    if (done) {
        text_puts(&x->out, "\n");
    }
    return done ? EXCHANGE_END : EXCHANGE_STREAM;
}

enum exchange_next routes_broken(struct server *server, struct exchange *x,
                                 const struct api_error *error)
{
    if (x->status == 0) {
        routes_error(server, x, error);
        return EXCHANGE_ANSWER;
    }
    x->code = error->code;
    x->out.failed = true;
    return EXCHANGE_END;
}

/* ---- before and after ---------------------------------------------------------------------- */

/* The dialect in which this request is a generation, or NULL. */
static const struct generate_dialect *routes_dialect(const struct exchange *x)
{
    return x->route >= 0 && x->is_post ? table[x->route].dialect : NULL;
}

/* The flags that hold for this request: a generation gives the engine work, whatever a GET of the
 * same path does. */
static int routes_flags(const struct exchange *x)
{
    const int flags = x->route >= 0 ? table[x->route].flags : ROUTE_OPEN;
    return routes_dialect(x) != NULL ? (flags & ~ROUTE_OPEN) | ROUTE_ENGINE | ROUTE_WORK : flags;
}

/* Whether the route exists at the port that the request came in by. */
static bool routes_is_here(const struct server *server, const struct exchange *x, int flags)
{
    if ((flags & ROUTE_ADMIN) != 0) {
        return x->admin;
    }
    if ((flags & ROUTE_METRICS) != 0) {
        return x->admin || server->options->admin_port == 0;
    }
    return !x->admin || (flags & ROUTE_OPEN) != 0;
}

/* Whether this is a browser's question which pages may call this route, and --cors answers it. */
static bool routes_is_preflight(const struct server *server, const struct exchange *x)
{
    return server->options->cors[0] != '\0' && strcmp(x->method, "OPTIONS") == 0;
}

/* Lets pages of the origin that --cors names read the answer; "*" allows all pages. */
static void routes_cors(const struct server *server, struct exchange *x)
{
    const char *const origin = server->options->cors;
    if (origin[0] == '\0') {
        return;
    }
    exchange_header(x, "Access-Control-Allow-Origin", "%s", origin);
    exchange_header(x, "Access-Control-Expose-Headers", "*");
    if (strcmp(origin, "*") != 0) {
        exchange_header(x, "Vary", "Origin");
    }
    if (routes_is_preflight(server, x)) {
        exchange_header(x, "Access-Control-Allow-Methods", "GET, HEAD, POST");
        exchange_header(x, "Access-Control-Allow-Headers", "*, Authorization");
        exchange_header(x, "Access-Control-Max-Age", "3600");
    }
}

/* Whether the client sent the key that the route requires. */
static bool routes_allow(struct server *server, struct exchange *x, int flags,
                         const char *authorization, struct api_error *error)
{
    const bool free_metrics = (flags & ROUTE_METRICS) != 0 && !server->options->metrics_auth;
    /* Browsers ask first whether they may send a key, and send none with that question. */
    const bool has_key =
        server->keys != NULL && keys_allow(server->keys, authorization, &x->client);
    x->knows_client = x->knows_client || has_key;
    if (server->keys == NULL || has_key || routes_is_preflight(server, x) || x->admin ||
        (flags & ROUTE_OPEN) != 0 || free_metrics) {
        return true;
    }
    exchange_header(x, "WWW-Authenticate", "Bearer");
    return api_error_set(
        error, 401, "invalid_api_key", "Authorization",
        authorization == NULL || authorization[0] == '\0'
            ? "this server asks for an API key: send Authorization: Bearer KEY"
            : "the API key is not valid: the Authorization header must be Bearer KEY with "
              "a key of this server");
}

/* Whether the route takes the request's method. */
static bool routes_takes(const struct exchange *x, int flags)
{
    return ((flags & ROUTE_GET) != 0 && x->is_get) || ((flags & ROUTE_POST) != 0 && x->is_post) ||
           ((flags & ROUTE_PUT) != 0 && x->is_put) || ((flags & ROUTE_DELETE) != 0 && x->is_delete);
}

bool routes_head(void *ctx, struct exchange *x, const char *authorization, struct api_error *error)
{
    struct server *const server = ctx;
    x->route = routes_find(x->path);
    const int flags = routes_flags(x);
    const struct generate_dialect *const dialect = routes_dialect(x);
    x->errors = dialect != NULL ? dialect->errors : NULL;
    routes_cors(server, x);
    x->is_probe = (flags & ROUTE_QUIET) != 0 && (flags & ROUTE_OPEN) != 0;
    /* At routes without a key, a body must not use memory that belongs to those who have one. */
    x->drops_body = (flags & ROUTE_ENGINE) == 0 ||
                    !(routes_takes(x, flags) && (x->is_post || (x->is_put && x->admin)));
    /* A connection for which there is no room is told so, whatever else its client has running. */
    return routes_allow(server, x, flags, authorization, error) &&
           (x->drops_body || x->admin || x->close || routes_enter(server, x, error));
}

/* Says which methods the path takes. */
static void routes_refuse_method(struct server *server, struct exchange *x, int flags)
{
    static const struct {
        const char *name;
        int flag;
    } methods[] = {{"GET", ROUTE_GET},
                   {"HEAD", ROUTE_GET},
                   {"POST", ROUTE_POST},
                   {"PUT", ROUTE_PUT},
                   {"DELETE", ROUTE_DELETE}};
    const size_t n = sizeof methods / sizeof methods[0];
    size_t last = 0;
    for (size_t i = 0; i < n; i++) {
        last = (flags & methods[i].flag) != 0 ? i : last;
    }
    char list[64] = "";
    char advice[96] = "use ";
    for (size_t i = 0; i < n; i++) {
        if ((flags & methods[i].flag) != 0) {
            const bool first = list[0] == '\0';
            const size_t n_list = strlen(list);
            const size_t n_advice = strlen(advice);
            (void)snprintf(list + n_list, sizeof list - n_list, "%s%s", first ? "" : ", ",
                           methods[i].name);
            (void)snprintf(advice + n_advice, sizeof advice - n_advice, "%s%s",
                           first       ? ""
                           : i == last ? " or "
                                       : ", ",
                           methods[i].name);
        }
    }
    const size_t end = strlen(advice);
    (void)snprintf(advice + end, sizeof advice - end, " here");
    exchange_header(x, "Allow", "%s", list);
    routes_refuse(server, x, 405, "method_not_allowed", advice);
}

/* Checks everything that may prevent the route from running; true = the request was answered. */
static bool routes_blocked(struct server *server, struct exchange *x, int flags)
{
    if (!routes_takes(x, flags)) {
        routes_refuse_method(server, x, flags);
        return true;
    }
    struct engine *const engine = atomic_load(&server->engine);
    const int64_t closed_us = atomic_load(&server->closed_us);
    if ((flags & ROUTE_WORK) != 0 && closed_us != 0 && x->body_us >= closed_us) {
        x->close = true;
        routes_refuse(server, x, 503, "shutting_down", "the server is shutting down");
        return true;
    }
    if ((flags & ROUTE_ENGINE) != 0 && engine == NULL) {
        routes_refuse(server, x, 503, "model_loading", "the model is being loaded: try again soon");
        return true;
    }
    if ((flags & ROUTE_WORK) != 0 && engine_state(engine) == ENGINE_FAILED) {
        routes_refuse(server, x, 503, "engine_failed",
                      "the engine has failed; the server's log says why: restart it");
        return true;
    }
    const int stall_s = server->options->stall_ready_s;
    if ((flags & ROUTE_WORK) != 0 && engine_stalled_ms(engine) >= stall_s * INT64_C(1000)) {
        struct api_error error = {0};
        (void)api_error_set(&error, 503, "engine_stalled", NULL,
                            "the engine has work but has made no step for %d s (--stall-ready-s): "
                            "try another server, or this one later",
                            stall_s);
        routes_error(server, x, &error);
        return true;
    }
    return false;
}

/* Says what was probably meant: for instance by an OpenAI client whose base_url lacks /v1. */
static void routes_unknown(struct exchange *x)
{
    char path[EXCHANGE_PATH_MAX + 8];
    (void)snprintf(path, sizeof path, "/v1%s", x->path);
    const int route = x->admin ? -1 : routes_find(path);
    exchange_refuse(x, 404, "route_not_found", NULL, "there is no %.100s at this port%s%s%s",
                    x->path, route >= 0 ? "; " : "", route >= 0 ? path : "",
                    route >= 0 ? " is there: end the client's base_url with /v1" : "");
}

/* How long the request may take, without parsing its JSON: for a request that has waited for a
 * thread to read it. If timeout_ms occurs several times, the longest counts; in a text the quotes
 * would be escaped. What is not written in digits alone, or is 0, is left to whoever reads the
 * body. */
static int64_t routes_patience_ms(const struct server *server, const struct exchange *x)
{
    static const char name[] = "\"timeout_ms\"";
    const char *at = x->body.data;
    const char *const end = at + x->body.n;
    int64_t longest = -1;
    while (at != NULL && (at = memmem(at, (size_t)(end - at), name, sizeof name - 1)) != NULL) {
        at += sizeof name - 1;
        const char *digit = at;
        while (digit < end && strchr(": \t\n\r", *digit) != NULL && *digit != '\0') {
            digit++;
        }
        int64_t ms = 0;
        for (; digit < end && *digit >= '0' && *digit <= '9' && ms < INT32_MAX; digit++) {
            ms = ms * 10 + (*digit - '0');
        }
        const bool is_plain = ms > 0 && (digit == end || strchr(".eE", *digit) == NULL);
        ms = is_plain ? ms : INT64_MAX;
        longest = ms > longest ? ms : longest;
    }
    return longest >= 0 ? longest : server->options->timeout_ms;
}

/* A long body has waited for a thread to read it: counts the time, and refuses the request if it is
 * late. true = it was answered. */
static bool routes_late(struct server *server, struct exchange *x)
{
    if (x->wait_us == 0) {
        return false;
    }
    metrics_body_wait(&server->metrics, x->wait_us);
    if ((clock_now_us() - x->begin_us) / 1000 < routes_patience_ms(server, x)) {
        return false;
    }
    routes_refuse(server, x, 504, "queue_timeout",
                  "the request's time was over before its body could be read");
    return true;
}

void routes_handle(void *ctx, struct exchange *x)
{
    struct server *const server = ctx;
    if (x->route < 0 || !routes_is_here(server, x, routes_flags(x))) {
        routes_unknown(x);
    } else if (routes_is_preflight(server, x)) {
        x->status = 200;
        x->content_type = "text/plain";
    } else if (!routes_blocked(server, x, routes_flags(x)) && !routes_late(server, x)) {
        const struct generate_dialect *const dialect = routes_dialect(x);
        if (dialect != NULL) {
            api_generate_as(server, x, dialect);
        } else {
            table[x->route].run(server, x);
        }
    }
    CHECK(x->status != 0 || x->work != NULL);
}

void routes_done(void *ctx, const struct exchange *x)
{
    struct server *const server = ctx;
    const int route = x->route >= 0 ? x->route : ROUTE_N;
    const int status = atomic_load(&x->gone) ? 499 : x->status;
    const char *const end_code = atomic_load(&x->end_code);
    const char *const error = end_code != NULL ? end_code : x->code;
    metrics_count(&server->metrics, route, x->method, status, error);
    if (x->counted) {
        clients_leave(&server->clients, x->client);
    }
    const bool quiet = x->route >= 0 && (table[x->route].flags & ROUTE_QUIET) != 0;
    char id[2 * EXCHANGE_ID_MAX];
    char method[6 * sizeof x->method];
    char path[2 * EXCHANGE_PATH_MAX];
    char trace[TRACE_ID_MAX + TRACE_SPAN_MAX + 32] = "";
    if (x->trace_id[0] != '\0') {
        (void)snprintf(trace, sizeof trace, " trace_id=\"%s\" parent_id=\"%s\"", x->trace_id,
                       x->span_id);
    }
    log_event(quiet && (status < 400 || status == 503) ? LEVEL_DEBUG : LEVEL_INFO, "request",
              "id=%s method=%s path=%s status=%d code=%s ms=%.3f prompt_tokens=%lld "
              "generated_tokens=%lld bytes=%zu%s",
              log_quote(id, sizeof id, x->id), log_quote(method, sizeof method, x->method),
              log_quote(path, sizeof path, x->path), status,
              status == 499   ? "client_left"
              : x->cut        ? "cut_short"
              : error != NULL ? error
                              : "-",
              (double)(clock_now_us() - x->begin_us) * 1e-3, (long long)x->n_prompt,
              (long long)x->n_generated, x->sent_bytes, trace);
}
