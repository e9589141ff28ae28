/* JSON objects by tables: see read.h. */
#include "models/read.h"

#include <stdio.h>
#include <string.h>

enum err_code read_wrong_type(const struct place *at, const char *key, const char *expected,
                              struct err *err)
{
    return err_set(err, ERR_FORMAT, "%s: %s%s must be %s", at->path, at->prefix, key, expected);
}

enum err_code read_choice(int *index, const json_t *value, const char *key,
                          const char *const *choices, const struct place *at, struct err *err)
{
    const char *const text = json_string_value(value);
    char list[128] = "";
    size_t used = 0;
    for (int i = 0; choices[i] != NULL; i++) {
        if (text != NULL && strcmp(text, choices[i]) == 0) {
            *index = i;
            return ERR_OK;
        }
        const int n =
            snprintf(list + used, sizeof list - used, "%s\"%s\"", i > 0 ? ", " : "", choices[i]);
        CHECK(n > 0 && (size_t)n < sizeof list - used);
        used += (size_t)n;
    }
    if (text == NULL) {
        return read_wrong_type(at, key, "a string", err);
    }
    return err_set(err, ERR_FORMAT, "%s: %s%s is \"%.64s\"; served are %s", at->path, at->prefix,
                   key, text, list);
}

enum err_code read_integer(int64_t *number, const json_t *value, const struct field *field,
                           const struct place *at, struct err *err)
{
    if (!json_is_integer(value)) {
        return read_wrong_type(at, field->key, "an integer", err);
    }
    *number = json_integer_value(value);
    if (*number < field->min || *number > field->max) {
        return err_set(err, ERR_FORMAT, "%s: %s%s is %lld, outside %lld .. %lld", at->path,
                       at->prefix, field->key, (long long)*number, (long long)field->min,
                       (long long)field->max);
    }
    return ERR_OK;
}

static enum err_code read_field(char *base, const json_t *value, const struct field *field,
                                const struct place *at, struct err *err)
{
    char *const target = base + field->offset;
    int64_t number = 0;
    enum err_code code = ERR_OK;
    switch (field->type) {
    case FIELD_INT:
        code = read_integer(&number, value, field, at, err);
        *(int *)(void *)target = code == ERR_OK ? (int)number : 0;
        return code;
    case FIELD_LONG:
        code = read_integer(&number, value, field, at, err);
        *(int64_t *)(void *)target = number;
        return code;
    case FIELD_REAL:
        if (!json_is_number(value)) {
            return read_wrong_type(at, field->key, "a number", err);
        }
        *(float *)(void *)target = (float)json_number_value(value);
        return ERR_OK;
    case FIELD_BOOL:
        if (!json_is_boolean(value)) {
            return read_wrong_type(at, field->key, "true or false", err);
        }
        *(bool *)(void *)target = json_is_true(value);
        return ERR_OK;
    case FIELD_CUSTOM: return field->read(base, value, at, err);
    }
    UNREACHABLE();
    return ERR_FORMAT;
}

/* The entry "key" or "key?" of keys, which may be NULL; NULL if there is none. */
static const char *find_key(const char *const *keys, const char *key)
{
    const size_t n = strlen(key);
    for (int i = 0; keys != NULL && keys[i] != NULL; i++) {
        const char *const rest = strncmp(keys[i], key, n) == 0 ? keys[i] + n : "-";
        if (strcmp(rest, "") == 0 || strcmp(rest, "?") == 0) {
            return keys[i];
        }
    }
    return NULL;
}

bool read_is_key(const char *const *keys, const char *key)
{
    return find_key(keys, key) != NULL;
}

enum err_code read_fields(void *base, const json_t *object, const struct field *fields,
                          size_t n_field, const char *const *keys, const char *const *more_keys,
                          const struct place *at, struct err *err)
{
    for (size_t i = 0; i < n_field; i++) {
        const char *const own = find_key(keys, fields[i].key);
        const char *const key = own != NULL ? own : find_key(more_keys, fields[i].key);
        const json_t *const value = json_object_get(object, fields[i].key);
        if (key != NULL && value == NULL && strchr(key, '?') == NULL) {
            return err_set(err, ERR_FORMAT, "%s: %s%s is missing", at->path, at->prefix, key);
        }
        const enum err_code code =
            key != NULL && value != NULL ? read_field(base, value, &fields[i], at, err) : ERR_OK;
        if (code != ERR_OK) {
            return code;
        }
    }
    const char *key;
    json_t *value;
    json_object_foreach((json_t *)object, key, value)
    {
        if (!read_is_key(keys, key) && !read_is_key(more_keys, key)) {
            return err_set(err, ERR_FORMAT, "%s: unknown key \"%s%.64s\"", at->path, at->prefix,
                           key);
        }
    }
    return ERR_OK;
}
