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
    CHECK(false);
    return ERR_FORMAT;
}

enum err_code read_fields(void *base, const json_t *object, const struct field *fields,
                          size_t n_field, const struct place *at, struct err *err)
{
    size_t n_seen = 0;
    for (size_t i = 0; i < n_field; i++) {
        const json_t *const value = json_object_get(object, fields[i].key);
        if (value == NULL) {
            if (fields[i].required) {
                return err_set(err, ERR_FORMAT, "%s: %s%s is missing", at->path, at->prefix,
                               fields[i].key);
            }
            continue;
        }
        n_seen++;
        const enum err_code code = read_field(base, value, &fields[i], at, err);
        if (code != ERR_OK) {
            return code;
        }
    }
    if (n_seen == json_object_size(object)) {
        return ERR_OK;
    }
    const char *key;
    json_t *value;
    json_object_foreach((json_t *)object, key, value)
    {
        size_t i = 0;
        while (i < n_field && strcmp(key, fields[i].key) != 0) {
            i++;
        }
        if (i == n_field) {
            return err_set(err, ERR_FORMAT, "%s: unknown key \"%s%.64s\"", at->path, at->prefix,
                           key);
        }
    }
    return ERR_OK;
}
