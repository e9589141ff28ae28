/* From "ablate" to a checked list: see ablate.h.
 *
 * An entry is {"memory": m, "head": h, "slots": [...], "scale": s}; only memory must be there. Each
 * slot becomes an entry of its own in the request's list, an entry without slots one for all. */
#include "server/io/ablate.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct ablate_reading {
    const struct model_info *info;
    struct api_error *error;
    struct step_ablate *list; /* Owner: ablate_read. [ABLATE_MAX] */
    int n_slot, n_whole;
};

/* An integer 0 .. most - 1 at ablate[at].name. */
static bool read_index(const struct ablate_reading *it, size_t at, const char *name,
                       const json_t *value, int64_t most, int32_t *index)
{
    int64_t n = -1;
    if (!fields_is_integer(value, &n) || n < 0 || n >= most) {
        return api_error_set(it->error, 400, "invalid_value", "ablate",
                             "ablate[%zu].%s must be an integer 0 ... %lld, not %s", at, name,
                             (long long)most - 1, fields_shown(value).text);
    }
    *index = (int32_t)n;
    return true;
}

static bool add(struct ablate_reading *it, struct step_ablate entry)
{
    int *const n = entry.slot < 0 ? &it->n_whole : &it->n_slot;
    const int most = entry.slot < 0 ? ABLATE_WHOLE_MAX : ABLATE_SLOT_MAX;
    if (*n >= most) {
        return api_error_set(it->error, 400, "invalid_value", "ablate",
                             "ablate names more than %d %s, which is the limit of a request", most,
                             entry.slot < 0 ? "whole memories and heads" : "slots");
    }
    it->list[it->n_whole + it->n_slot] = entry;
    (*n)++;
    return true;
}

static bool read_slots(struct ablate_reading *it, size_t at, const json_t *value,
                       struct step_ablate entry)
{
    if (!json_is_array(value)) {
        return api_error_set(it->error, 400, "invalid_value", "ablate",
                             "ablate[%zu].slots must be a list of slots, not %s", at,
                             fields_type_name(value));
    }
    const int64_t n_slot = it->info->memory[entry.memory].n_slot;
    for (size_t i = 0; i < json_array_size(value); i++) {
        char name[48];
        (void)snprintf(name, sizeof name, "slots[%zu]", i);
        if (!read_index(it, at, name, json_array_get(value, i), n_slot, &entry.slot) ||
            !add(it, entry)) {
            return false;
        }
    }
    return true;
}

static bool check_keys(const struct ablate_reading *it, size_t at, json_t *value)
{
    static const char *const known[] = {"memory", "head", "slots", "scale"};
    const char *key = NULL;
    json_t *each = NULL;
    if (!json_is_object(value)) {
        return api_error_set(
            it->error, 400, "invalid_value", "ablate",
            "ablate[%zu] must be an object with memory and, as wanted, head, slots "
            "and scale, not %s",
            at, fields_type_name(value));
    }
    json_object_foreach(value, key, each)
    {
        bool is_known = false;
        for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
            is_known = is_known || strcmp(key, known[i]) == 0;
        }
        if (!is_known) {
            return api_error_set(it->error, 400, "invalid_value", "ablate",
                                 "ablate[%zu] takes memory, head, slots and scale, not %.40s", at,
                                 key);
        }
    }
    return true;
}

/* The value of a key, NULL if it is absent or null. */
static const json_t *given(const json_t *object, const char *key)
{
    const json_t *const value = json_object_get(object, key);
    return json_is_null(value) ? NULL : value;
}

static bool read_entry(struct ablate_reading *it, size_t at, json_t *value)
{
    if (!check_keys(it, at, value)) {
        return false;
    }
    struct step_ablate entry = {.head = -1, .slot = -1};
    const json_t *const head = given(value, "head");
    const json_t *const slots = given(value, "slots");
    const json_t *const scale = given(value, "scale");
    if (!read_index(it, at, "memory", given(value, "memory"), it->info->n_memory, &entry.memory)) {
        return false;
    }
    const int n_head = it->info->memory[entry.memory].shape.n_head;
    if (head != NULL && !read_index(it, at, "head", head, n_head, &entry.head)) {
        return false;
    }
    if (scale != NULL) {
        const double factor = json_number_value(scale);
        if (!json_is_number(scale) || !(factor >= 0 && factor <= ABLATE_SCALE_MAX)) {
            return api_error_set(it->error, 400, "invalid_value", "ablate",
                                 "ablate[%zu].scale must be a number 0 ... %d, not %s", at,
                                 ABLATE_SCALE_MAX, fields_shown(scale).text);
        }
        entry.scale = (float)factor;
    }
    return slots != NULL ? read_slots(it, at, slots, entry) : add(it, entry);
}

void ablate_read(struct fields *fields, const struct api_limits *limits,
                 struct request_ablate *ablate)
{
    struct ablate_reading it = {.info = limits->info, .error = fields->error};
    json_t *const value = fields_get(fields, "ablate", NULL);
    if (value == NULL) {
        return;
    }
    if (limits->info->n_memory == 0) {
        (void)api_error_set(fields->error, 400, "unsupported_parameter", "ablate",
                            "ablate switches memories off, and this model has none");
        return;
    }
    if (!json_is_array(value)) {
        (void)api_error_set(fields->error, 400, "invalid_value", "ablate",
                            "ablate must be a list of objects with memory, head, slots and scale, "
                            "not %s",
                            fields_type_name(value));
        return;
    }
    it.list = malloc(ABLATE_MAX * sizeof *it.list);
    if (it.list == NULL) {
        (void)api_error_set(fields->error, 500, "out_of_memory", NULL, "no memory for ablate");
        return;
    }
    for (size_t i = 0; i < json_array_size(value); i++) {
        if (!read_entry(&it, i, json_array_get(value, i))) {
            free(it.list);
            return;
        }
    }
    struct err err = {0};
    const enum err_code code = request_ablate_make(ablate, it.list, it.n_slot + it.n_whole, &err);
    if (code != ERR_OK) {
        const bool is_memory = code == ERR_MEMORY;
        (void)api_error_set(fields->error, is_memory ? 500 : 400,
                            is_memory ? "out_of_memory" : "invalid_value",
                            is_memory ? NULL : "ablate", "%s", err.message);
    }
}

void ablate_give(struct request *request, struct request_ablate *ablate)
{
    request->ablate = *ablate;
    *ablate = (struct request_ablate){0};
}
