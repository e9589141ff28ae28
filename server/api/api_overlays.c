/* The overlays of a running server, at the admin port: PUT, GET and DELETE of /memory/overlays. */
#include "engine/log.h"
#include "server/api/routes.h"
#include "server/io/overlay.h"
#include "server/json/json.h"

#include <stdlib.h>
#include <string.h>

enum { PREFIX_BYTES = sizeof "/memory/overlays/" - 1 };

/* The store of overlays; NULL: there is none, and x holds the error. */
static struct overlays *store_of(struct server *server, struct exchange *x)
{
    if (server->limits.overlays == NULL) {
        exchange_refuse(x, 400, "unsupported_parameter", NULL,
                        "overlays are rows of memories, and this model has none");
    }
    return server->limits.overlays;
}

static void put_overlay(struct text *out, const struct overlay_info *info)
{
    json_open(out, '{');
    overlay_put_info(out, info);
    json_field_string(out, "mode", info->add ? "add" : "replace");
    json_field_int(out, "bytes", info->bytes);
    json_field_int(out, "requests", info->n_request);
    json_key(out, "memories");
    json_open(out, '[');
    for (int i = 0; i < info->n_memory; i++) {
        json_open(out, '{');
        json_field_int(out, "memory", info->memory[i]);
        json_field_int(out, "rows", info->n_row[i]);
        json_close(out, '}');
    }
    json_close(out, ']');
    json_close(out, '}');
}

static void no_such(struct exchange *x, const char *name)
{
    exchange_refuse(x, 404, "overlay_not_found", NULL, "there is no overlay \"%.80s\" here", name);
}

void api_overlays(struct server *server, struct exchange *x)
{
    struct overlays *const overlays = store_of(server, x);
    struct overlay_info *const info = overlays != NULL ? malloc(OVERLAYS_MAX * sizeof *info) : NULL;
    if (overlays == NULL) {
        return;
    }
    if (info == NULL) {
        exchange_refuse(x, 500, "out_of_memory", NULL, "no memory for the list");
        return;
    }
    struct text *const out = &x->out;
    const int n = overlays_list(overlays, info, OVERLAYS_MAX);
    json_open(out, '{');
    json_field_string(out, "object", "list");
    json_key(out, "data");
    json_open(out, '[');
    for (int i = 0; i < n; i++) {
        put_overlay(out, &info[i]);
    }
    json_close(out, ']');
    json_field_int(out, "bytes", overlays_used(overlays));
    json_field_int(out, "bytes_max", overlays_bytes(overlays));
    json_close(out, '}');
    free(info);
    exchange_json(x, 200);
}

/* The answer for a file that was refused. */
static void refuse_put(struct server *server, struct exchange *x, const struct err *err)
{
    struct api_error error = {0};
    switch (err->code) {
    case ERR_QUEUE_FULL:
        (void)api_error_set(&error, 413, "overlays_full", NULL, "%s", err->message);
        break;
    case ERR_CLOSED:
        (void)api_error_set(&error, 503, "shutting_down", NULL, "%s", err->message);
        break;
    case ERR_MEMORY:
        (void)api_error_set(&error, 500, "out_of_memory", NULL, "%s", err->message);
        break;
    case ERR_IO:
        (void)api_error_set(&error, 500, "internal_error", NULL, "%s", err->message);
        break;
    default: (void)api_error_set(&error, 400, "overlay_mismatch", NULL, "%s", err->message); break;
    }
    routes_error(server, x, &error);
}

static void put(struct server *server, struct exchange *x, struct overlays *overlays,
                const char *name)
{
    struct overlay_info info = {0};
    struct err err = {0};
    if (!overlays_is_name(name)) {
        exchange_refuse(x, 400, "invalid_value", "name",
                        "an overlay's name must be 1 to %d of a-z, 0-9, \".\", \"_\" and \"-\"",
                        OVERLAY_NAME_MAX - 1);
        return;
    }
    if (x->body.n == 0) {
        exchange_refuse(x, 400, "overlay_mismatch", NULL,
                        "the body is empty: send the overlay's file, for example with curl -T");
        return;
    }
    if (overlays_put(overlays, name, x->body.data, x->body.n, &info, &err) != ERR_OK) {
        refuse_put(server, x, &err);
        return;
    }
    log_event(LEVEL_INFO, "overlay", "action=put name=%s version=%d sha256=%s bytes=%lld", name,
              info.version, info.sha256, (long long)info.bytes);
    put_overlay(&x->out, &info);
    exchange_json(x, 200);
}

void api_overlay(struct server *server, struct exchange *x)
{
    struct overlays *const overlays = store_of(server, x);
    const char *const name = x->path + PREFIX_BYTES;
    struct overlay_info info;
    if (overlays == NULL) {
        return;
    }
    if (x->is_put) {
        put(server, x, overlays, name);
    } else if (x->is_delete ? !overlays_delete(overlays, name)
                            : !overlays_find(overlays, name, &info)) {
        no_such(x, name);
    } else if (x->is_delete) {
        log_event(LEVEL_INFO, "overlay", "action=delete name=%s", name);
        json_open(&x->out, '{');
        json_field_string(&x->out, "name", name);
        json_field_bool(&x->out, "deleted", true);
        json_close(&x->out, '}');
        exchange_json(x, 200);
    } else {
        put_overlay(&x->out, &info);
        exchange_json(x, 200);
    }
}
