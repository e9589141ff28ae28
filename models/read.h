/* Reading the fields of a JSON object into a struct. A table has every key there may be with its
 * type and bounds; lists say which of them this object takes, and any other is refused. For
 * models/config*.c. Errors say where the value is:
 * "dir/config.json: memories[2].n_key is 0, outside 1 .. 16777216". */
#ifndef MODELS_READ_H
#define MODELS_READ_H

#include "kernels/err.h"
#include "models/json_file.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Where a value is, for messages: "dir/config.json: memories[2].n_key". */
struct place {
    const char *path;
    char prefix[32]; /* "" or "memories[2]." */
};

enum field_type { FIELD_INT, FIELD_LONG, FIELD_REAL, FIELD_BOOL, FIELD_CUSTOM };

struct field {
    const char *key;
    enum field_type type;
    size_t offset; /* in struct config or struct config_memory */
    int64_t min, max;
    enum err_code (*read)(void *base, const json_t *value, const struct place *at, struct err *err);
};

enum err_code read_wrong_type(const struct place *at, const char *key, const char *expected,
                              struct err *err);
/* The index of value among choices, which end with NULL. */
enum err_code read_choice(int *index, const json_t *value, const char *key,
                          const char *const *choices, const struct place *at, struct err *err);
enum err_code read_integer(int64_t *number, const json_t *value, const struct field *field,
                           const struct place *at, struct err *err);
/* Whether keys names key. keys ends with NULL; "key?" may be missing from an object, other keys may
 * not. */
bool read_is_key(const char *const *keys, const char *key);
/* Reads the fields of object that keys and more_keys (or NULL) name into base, in the order of the
 * table, and refuses others. */
enum err_code read_fields(void *base, const json_t *object, const struct field *fields,
                          size_t n_field, const char *const *keys, const char *const *more_keys,
                          const struct place *at, struct err *err);

#endif
