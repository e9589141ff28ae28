/* Routes about the server itself: models, info, version, health, metrics. */
#include "engine/clock.h"
#include "engine/stats.h"
#include "engine/tokenizer.h"
#include "server/api/info.h"
#include "server/api/metrics_text.h"
#include "server/api/page.h"
#include "server/api/routes.h"
#include "server/io/overlay.h"
#include "server/json/json.h"
#include "server/version.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- models -------------------------------------------------------------------------------- */

static void write_id(struct text *out, const struct server *server,
                     const struct overlay_info *overlay)
{
    char id[OPTIONS_MODEL_NAME_MAX + OVERLAY_NAME_MAX + 1];
    (void)snprintf(id, sizeof id, "%s%s%s", server->limits.model_name, overlay != NULL ? ":" : "",
                   overlay != NULL ? overlay->name : "");
    json_put_string(out, id);
}

/* The entry of the model; with overlay, of MODEL:OVERLAY, the model with the rows of that
 * overlay. */
static void write_model(struct text *out, const struct server *server,
                        const struct overlay_info *overlay)
{
    const struct model_info *const info = server->limits.info;
    json_open(out, '{');
    json_key(out, "id");
    write_id(out, server, overlay);
    json_field_string(out, "object", "model");
    json_field_int(out, "created", server->created);
    json_field_string(out, "owned_by", "pkmserve");
    json_field_string(out, "root", server->limits.model_name);
    json_field_string(out, "parent", overlay != NULL ? server->limits.model_name : NULL);
    json_field_int(out, "max_model_len", engine_context(server->limits.context));
    json_key(out, "permission");
    json_open(out, '[');
    json_close(out, ']');
    json_key(out, "meta");
    json_open(out, '{');
    json_field_string(out, "vocab_type",
                      server->limits.tokenizer != NULL ? tokenizer_kind(server->limits.tokenizer)
                                                       : NULL);
    json_field_int(out, "n_vocab", info->n_vocab);
    json_field_int(out, "n_ctx_train", engine_context(info->context));
    json_field_int(out, "n_embd", info->d_model);
    json_field_int(out, "n_params", info->n_param);
    json_field_int(out, "size", info->file_bytes);
    json_close(out, '}');
    if (overlay != NULL) {
        json_key(out, "overlay");
        json_open(out, '{');
        overlay_put_info(out, overlay);
        json_close(out, '}');
    }
    json_close(out, '}');
}

/* Whether the client may use the overlay. */
static bool may_use(const struct api_limits *limits, const char *name)
{
    bool named = limits->binding == NULL;
    for (int i = 0; limits->binding != NULL && i < limits->binding->n; i++) {
        named = named || strcmp(limits->binding->name[i], name) == 0;
    }
    return named;
}

/* Lists the model, and the model with each overlay that the client may use. */
static void list_models(struct server *server, struct exchange *x, const struct api_limits *limits)
{
    struct text *const out = &x->out;
    struct overlay_info *const info =
        limits->overlays != NULL ? malloc(OVERLAYS_MAX * sizeof *info) : NULL;
    const int n = info != NULL ? overlays_list(limits->overlays, info, OVERLAYS_MAX) : 0;
    json_open(out, '{');
    json_field_string(out, "object", "list");
    json_key(out, "data");
    json_open(out, '[');
    write_model(out, server, NULL);
    for (int i = 0; i < n; i++) {
        if (may_use(limits, info[i].name)) {
            write_model(out, server, &info[i]);
        }
    }
    json_close(out, ']');
    json_close(out, '}');
    out->failed = out->failed || (limits->overlays != NULL && info == NULL);
    free(info);
}

/* The model called id, perhaps with an overlay; false: there is none. */
static bool write_model_called(struct server *server, struct exchange *x,
                               const struct api_limits *limits, const char *id)
{
    const size_t n = strlen(limits->model_name);
    struct overlay_info info;
    if (strncmp(id, limits->model_name, n) != 0) {
        return false;
    }
    const bool found = id[n] == ':' && limits->overlays != NULL && may_use(limits, id + n + 1) &&
                       overlays_find(limits->overlays, id + n + 1, &info);
    if (id[n] == '\0' || found) {
        write_model(&x->out, server, found ? &info : NULL);
    }
    return id[n] == '\0' || found;
}

void api_models(struct server *server, struct exchange *x)
{
    static const char prefix[] = "/v1/models/";
    struct overlay_names binding;
    const struct api_limits limits = routes_limits(server, x, &binding);
    if (strncmp(x->path, prefix, sizeof prefix - 1) != 0) {
        list_models(server, x, &limits);
    } else if (!write_model_called(server, x, &limits, x->path + sizeof prefix - 1)) {
        exchange_refuse(x, 404, "model_not_found", "model",
                        "the model %.80s is not served here; %.80s is", x->path + sizeof prefix - 1,
                        server->limits.model_name);
        return;
    }
    exchange_json(x, 200);
}

/* ---- info, version, root ------------------------------------------------------------------- */

void api_info(struct server *server, struct exchange *x)
{
    info_write(&x->out, atomic_load(&server->engine), server->options, server->limits.model_name);
    exchange_json(x, 200);
}

void api_version(struct server *server, struct exchange *x)
{
    /* For the page, which is at both ports and asks this first: what it can ask for here. */
    exchange_header(x, "X-Port", "%s",
                    x->admin                           ? "admin"
                    : server->options->admin_port != 0 ? "main"
                                                       : "all");
    json_open(&x->out, '{');
    json_field_string(&x->out, "version", PKMSERVE_VERSION);
    json_close(&x->out, '}');
    exchange_json(x, 200);
}

void api_root(struct server *server, struct exchange *x)
{
    if (server->options->ui) {
        exchange_header(x, "Vary", "Accept");
    }
    if (page_is_wanted(server, x)) {
        page_write(x);
        return;
    }
    text_puts(&x->out, "pkmserve " PKMSERVE_VERSION "\n\n");
    x->status = 200;
    x->content_type = "text/plain; charset=utf-8";
    if (x->admin) {
        text_puts(&x->out, "GET  /metrics  /health  /memory/overlays  /memory/counts\n"
                           "PUT  /memory/overlays/NAME, DELETE\n");
        return;
    }
    text_printf(&x->out,
                "POST /generate    {\"prompt\": \"...\", \"max_tokens\": 64}\n"
                "POST /score       {\"text\": \"...\"}\n"
                "POST /tokenize    {\"prompt\": \"...\"}\n"
                "POST /detokenize  {\"tokens\": [...]}\n"
                "GET  /v1/models   /info  /version  /health  /openapi.json%s%s\n",
                server->options->admin_port == 0 ? "  /metrics" : "",
                server->options->ui ? "  /ui" : "");
    if (x->out.failed) {
        exchange_refuse(x, 500, "out_of_memory", NULL, "no memory for the answer");
    }
}

void api_chat(struct server *server, struct exchange *x)
{
    (void)server;
    exchange_refuse(x, 400, "chat_template_missing", NULL,
                    "the model continues text and has no chat template: use /v1/completions");
}

void api_metrics(struct server *server, struct exchange *x)
{
    metrics_write(&x->out, server);
    if (x->out.failed) {
        exchange_refuse(x, 500, "out_of_memory", NULL, "no memory for the metrics");
        return;
    }
    x->status = 200;
    x->content_type = "text/plain; version=0.0.4; charset=utf-8";
}

/* ---- health -------------------------------------------------------------------------------- */

static void write_health(struct server *server, struct exchange *x, const char *status, int code)
{
    struct engine *const engine = atomic_load(&server->engine);
    struct text *const out = &x->out;
    json_open(out, '{');
    json_field_string(out, "status", status);
    json_field_string(out, "model", server->options->served_model_name);
    json_field_fixed(out, "uptime_s", (double)(clock_now_us() - server->begin_us) * 1e-6);
    const struct engine_stats *const stats = engine != NULL ? engine_stats(engine) : NULL;
    json_field_int(out, "queue", stats != NULL ? atomic_load(&stats->waiting) : 0);
    json_field_int(out, "running", stats != NULL ? atomic_load(&stats->running) : 0);
    json_field_int(out, "last_step_age_ms", engine != NULL ? engine_stalled_ms(engine) : 0);
    json_field_string(out, "phase", engine != NULL ? "serve" : atomic_load(&server->phase));
    json_field_fixed(out, "progress",
                     engine != NULL ? 1 : atomic_load(&server->progress_permille) * 1e-3);
    json_close(out, '}');
    exchange_json(x, code);
    exchange_header(x, "Cache-Control", "no-store");
    if (code == 503) {
        exchange_header(x, "Retry-After", "%d", engine == NULL ? 2 : 5);
    }
}

void api_live(struct server *server, struct exchange *x)
{
    struct engine *const engine = atomic_load(&server->engine);
    if (engine == NULL) {
        write_health(server, x, "loading", 200); /* the process answers, and being live means no
                                                  * more than that */
    } else if (engine_state(engine) == ENGINE_FAILED) {
        write_health(server, x, "failed", 503);
    } else if (engine_stalled_ms(engine) >= server->options->stall_live_s * INT64_C(1000)) {
        write_health(server, x, "stalled", 503);
    } else {
        write_health(server, x, atomic_load(&server->draining) ? "draining" : "ok", 200);
    }
}

/* The server's own state, whatever the last deep check found. */
static const char *running_status(struct server *server)
{
    struct engine *const engine = atomic_load(&server->engine);
    if (engine == NULL) {
        return "loading";
    }
    if (engine_state(engine) == ENGINE_FAILED) {
        return "failed";
    }
    if (atomic_load(&server->draining) || engine_state(engine) != ENGINE_READY) {
        return "draining";
    }
    return engine_stalled_ms(engine) >= server->options->stall_ready_s * INT64_C(1000) ? "stalled"
                                                                                       : "ok";
}

/* What is known without giving the engine work. */
static const char *ready_status(struct server *server)
{
    const char *const status = running_status(server);
    return strcmp(status, "ok") == 0 && probe_is_wrong(&server->probe) ? "failed" : status;
}

static void write_ready(struct server *server, struct exchange *x, const char *status)
{
    write_health(server, x, status, strcmp(status, "ok") == 0 ? 200 : 503);
}

/* The deep check runs a request of its own, or waits for the one that another check runs. */
struct deep_work {
    struct server *server;   /* Borrowed */
    struct request *request; /* Owner: one reference; NULL = waiting for another's check */
    bool over;               /* probe_end was called */
    int64_t begin_us;
};

static void deep_free(void *data)
{
    struct deep_work *const work = data;
    if (work->request != NULL && !work->over) {
        probe_end(&work->server->probe, NULL);
    }
    request_release(work->request);
    free(work);
}

static void deep_gone(void *data)
{
    (void)data; /* the check goes on for the others: it is only one token */
}

/* The check has no result yet. Whether it makes sense to wait on: a full server completes steps but
 * has no place for the check, and that must not make it unready. */
static bool deep_waits(const struct deep_work *work)
{
    const int64_t age_us = clock_now_us() - work->begin_us;
    const bool seated = work->request == NULL || atomic_load(&work->request->start_us) != 0;
    const bool moves = engine_stalled_ms(atomic_load(&work->server->engine)) * 2000 < PROBE_SEAT_US;
    return age_us < (!seated && moves ? PROBE_SEAT_US : PROBE_TIMEOUT_US);
}

static enum exchange_next deep_next(struct exchange *x, void *data)
{
    struct deep_work *const work = data;
    struct server *const server = work->server;
    if (atomic_load(&x->gone)) {
        x->status = 499;
        return EXCHANGE_ANSWER;
    }
    if (work->request != NULL && !work->over) {
        if (atomic_load(&work->request->n_item_done) == 0 && deep_waits(work)) {
            x->wake_at_us = clock_now_us() + 50000;
            return EXCHANGE_WAIT;
        }
        work->over = true;
        request_cancel(work->request); /* if it is not done */
        probe_end(&server->probe, work->request);
    }
    const enum probe_state state = probe_ask(&server->probe);
    if (state == PROBE_RUNNING && deep_waits(work)) {
        x->wake_at_us = clock_now_us() + 50000;
        return EXCHANGE_WAIT;
    }
    if (state == PROBE_YOURS) { /* the check gave no result, and nobody runs another one */
        probe_end(&server->probe, NULL);
    }
    const int64_t age_us = engine_stalled_ms(atomic_load(&server->engine)) * 1000;
    const bool hangs = state != PROBE_OK && age_us >= PROBE_TIMEOUT_US - PROBE_SEAT_US;
    write_ready(server, x,
                state == PROBE_WRONG ? "failed"
                : hangs              ? "stalled"
                                     : ready_status(server));
    return EXCHANGE_ANSWER;
}

static const struct exchange_work deep_ops = {
    .next = deep_next, .gone = deep_gone, .free = deep_free};

/* Not by routes_submit: neither a full queue nor a client's limit makes the server unready. */
static bool deep_submit(struct server *server, struct exchange *x, struct request *request)
{
    (void)snprintf(request->id, sizeof request->id, "health");
    request->wake = exchange_wake;
    request->wake_ctx = x->waker;
    return engine_submit(atomic_load(&server->engine), request, NULL) == ERR_OK;
}

static void deep_check(struct server *server, struct exchange *x)
{
    struct deep_work *const work = calloc(1, sizeof *work);
    if (work == NULL) {
        exchange_refuse(x, 500, "out_of_memory", NULL, "no memory for the check");
        return;
    }
    work->server = server;
    work->begin_us = clock_now_us();
    if (probe_ask(&server->probe) == PROBE_YOURS) {
        work->request = probe_request(&server->probe, server->limits.info);
        if (work->request == NULL || !deep_submit(server, x, work->request)) {
            work->over = true;
            probe_end(&server->probe, NULL);
            deep_free(work);
            write_ready(server, x, ready_status(server));
            return;
        }
    }
    x->work = &deep_ops;
    x->work_data = work;
}

void api_ready(struct server *server, struct exchange *x)
{
    if (x->deep && strcmp(running_status(server), "ok") == 0) {
        deep_check(server, x);
    } else {
        write_ready(server, x, ready_status(server));
    }
}
