/* From "overlay" to versions of overlays, and back: see overlay.h. */
#include "server/io/overlay.h"

#include "server/json/json.h"

#include <jansson.h>
#include <string.h>

/* The names that apply, each once. Borrowed from the fields and the binding. */
struct overlay_wish {
    const char *name[OVERLAYS_OF_REQUEST];
    int n;
    const char *param; /* the field that names overlays, NULL if only the API key does */
};

static bool wishes(const struct overlay_wish *wish, const char *name)
{
    for (int i = 0; i < wish->n; i++) {
        if (strcmp(wish->name[i], name) == 0) {
            return true;
        }
    }
    return false;
}

static bool is_bound_to(const struct overlay_names *binding, const char *name)
{
    for (int i = 0; i < binding->n; i++) {
        if (strcmp(binding->name[i], name) == 0) {
            return true;
        }
    }
    return false;
}

/* Adds the names in the field param. */
static bool add(struct fields *fields, const struct api_limits *limits, const char *param,
                const char *name, struct overlay_wish *wish)
{
    if (limits->binding != NULL && !is_bound_to(limits->binding, name)) {
        return api_error_set(
            fields->error, 403, "overlay_forbidden", param,
            "this API key may not use the overlay \"%.80s\": it is bound to others", name);
    }
    if (!wishes(wish, name)) {
        if (wish->n == OVERLAYS_OF_REQUEST) {
            return api_error_set(
                fields->error, 400, "invalid_value", param,
                "a request may have %d overlays at most, and \"%.80s\" is one more",
                OVERLAYS_OF_REQUEST, name);
        }
        wish->name[wish->n++] = name;
    }
    return true;
}

static bool add_list(struct fields *fields, const struct api_limits *limits, const json_t *list,
                     struct overlay_wish *wish)
{
    for (size_t i = 0; i < json_array_size(list); i++) {
        const char *const name = fields_word(json_array_get(list, i));
        if (name == NULL) {
            return api_error_set(fields->error, 400, "invalid_value", "overlay",
                                 "overlay[%zu] must be the name of an overlay, not %s", i,
                                 fields_type_name(json_array_get(list, i)));
        }
        for (size_t j = 0; j < i; j++) {
            if (strcmp(fields_word(json_array_get(list, j)), name) == 0) {
                return api_error_set(fields->error, 400, "overlay_mismatch", "overlay",
                                     "overlay names \"%.80s\" twice", name);
            }
        }
        if (!add(fields, limits, "overlay", name, wish)) {
            return false;
        }
    }
    return true;
}

/* The overlay in MODEL:OVERLAY, or NULL. */
static const char *name_in_model(struct fields *fields, const struct api_limits *limits)
{
    const char *const model = fields_word(fields_get(fields, "model", NULL));
    const size_t n = strlen(limits->model_name);
    return model != NULL && strncmp(model, limits->model_name, n) == 0 && model[n] == ':'
               ? model + n + 1
               : NULL;
}

static bool read_wish(struct fields *fields, const struct api_limits *limits,
                      struct overlay_wish *wish)
{
    const json_t *const value = fields_get(fields, "overlay", NULL);
    const char *const of_model = limits->overlays != NULL ? name_in_model(fields, limits) : NULL;
    if (value != NULL && limits->info->n_memory == 0) {
        return api_error_set(fields->error, 400, "unsupported_parameter", "overlay",
                             "overlays are rows of memories, and this model has none");
    }
    wish->param = value != NULL ? "overlay" : of_model != NULL ? "model" : NULL;
    for (int i = 0; limits->binding != NULL && i < limits->binding->n; i++) {
        (void)add(fields, limits, NULL, limits->binding->name[i], wish);
    }
    if (of_model != NULL && !add(fields, limits, "model", of_model, wish)) {
        return false;
    }
    if (json_is_array(value)) {
        return add_list(fields, limits, value, wish);
    }
    const char *const name = fields_word(value);
    if (value != NULL && name == NULL) {
        return api_error_set(fields->error, 400, "invalid_value", "overlay",
                             "overlay must be the name of an overlay, or a list of names, not %s",
                             fields_type_name(value));
    }
    return name == NULL || add(fields, limits, "overlay", name, wish);
}

void overlay_read(struct fields *fields, const struct api_limits *limits,
                  struct request_overlays *taken)
{
    struct overlay_wish wish = {0};
    struct err err = {0};
    *taken = (struct request_overlays){0};
    if (!read_wish(fields, limits, &wish) || wish.n == 0) {
        return;
    }
    if (limits->overlays == NULL) {
        (void)api_error_set(
            fields->error, 404, "overlay_not_found", wish.param,
            "there is no overlay \"%.80s\" here: none are taken without --overlay-dir or "
            "--admin-port of serve, or --overlay of the other commands",
            wish.name[0]);
        return;
    }
    switch (overlays_take(limits->overlays, wish.name, wish.n, taken, &err)) {
    case ERR_OK: return;
    case ERR_IO:
        (void)api_error_set(fields->error, 404, "overlay_not_found", wish.param, "%s", err.message);
        return;
    case ERR_ARGUMENT:
        (void)api_error_set(fields->error, 400, "overlay_mismatch", wish.param, "%s", err.message);
        return;
    default:
        (void)api_error_set(fields->error, 500, "out_of_memory", NULL, "%s", err.message);
        return;
    }
}

void overlay_give(struct request *request, struct request_overlays *taken)
{
    request->overlays = *taken;
    *taken = (struct request_overlays){0};
}

void overlay_put_info(struct text *out, const struct overlay_info *info)
{
    json_field_string(out, "name", info->name);
    json_field_int(out, "version", info->version);
    json_field_string(out, "sha256", info->sha256);
}

void overlay_put(struct text *out, const struct request_overlays *taken)
{
    if (taken == NULL || taken->n == 0) {
        return;
    }
    json_key(out, "overlay");
    json_open(out, '[');
    for (int i = 0; i < taken->n; i++) {
        struct overlay_info info;
        overlays_tell(taken, i, &info);
        json_open(out, '{');
        overlay_put_info(out, &info);
        json_close(out, '}');
    }
    json_close(out, ']');
}
