/* rope_scaling of config.json: see config_rope.h. */
#include "models/config_rope.h"
#include "models/read.h"

#include <stddef.h>

static const double FACTOR_MAX = 1e6;

static enum err_code read_kind(void *base, const json_t *value, const struct place *at,
                               struct err *err)
{
    static const char *const names[] = {"linear", "llama3", NULL};
    struct rope_scaling *const scaling = base;
    int index = 0;
    const enum err_code code = read_choice(&index, value, "rope_type", names, at, err);
    scaling->kind = index == 0 ? ROPE_LINEAR : ROPE_LLAMA3;
    return code;
}

static enum err_code read_number(double *number, double min, const json_t *value, const char *key,
                                 const struct place *at, struct err *err)
{
    *number = json_number_value(value);
    if (!json_is_number(value)) {
        return read_wrong_type(at, key, "a number", err);
    }
    if (!(*number >= min && *number <= FACTOR_MAX)) { /* also NaN */
        return err_set(err, ERR_FORMAT, "%s: %s%s is %g, outside %g .. %g", at->path, at->prefix,
                       key, *number, min, FACTOR_MAX);
    }
    return ERR_OK;
}

static enum err_code read_factor(void *base, const json_t *value, const struct place *at,
                                 struct err *err)
{
    return read_number(&((struct rope_scaling *)base)->factor, 1, value, "factor", at, err);
}

static enum err_code read_low(void *base, const json_t *value, const struct place *at,
                              struct err *err)
{
    return read_number(&((struct rope_scaling *)base)->low, 1e-6, value, "low_freq_factor", at,
                       err);
}

static enum err_code read_high(void *base, const json_t *value, const struct place *at,
                               struct err *err)
{
    return read_number(&((struct rope_scaling *)base)->high, 1e-6, value, "high_freq_factor", at,
                       err);
}

static const struct field fields[] = {
    {"rope_type", FIELD_CUSTOM, 0, 0, 0, read_kind},
    {"factor", FIELD_CUSTOM, 0, 0, 0, read_factor},
    {"low_freq_factor", FIELD_CUSTOM, 0, 0, 0, read_low},
    {"high_freq_factor", FIELD_CUSTOM, 0, 0, 0, read_high},
    {"original_max_position_embeddings", FIELD_INT, offsetof(struct rope_scaling, original), 1,
     CONFIG_POSITION_MAX, NULL},
};
static const char *const linear_keys[] = {"rope_type", "factor", NULL};
static const char *const llama3_keys[] = {"low_freq_factor", "high_freq_factor",
                                          "original_max_position_embeddings", NULL};

enum err_code config_rope_read(struct rope_scaling *scaling, const json_t *value, const char *path,
                               struct err *err)
{
    const struct place whole = {.path = path};
    const struct place at = {.path = path, .prefix = "rope_scaling."};
    const json_t *const kind = json_object_get(value, "rope_type");
    if (!json_is_object(value)) {
        return read_wrong_type(&whole, "rope_scaling", "an object", err);
    }
    if (kind == NULL) {
        return err_set(err, ERR_FORMAT, "%s: rope_scaling.rope_type is missing", path);
    }
    enum err_code code = read_kind(scaling, kind, &at, err);
    if (code != ERR_OK) {
        return code;
    }
    const bool is_linear = scaling->kind == ROPE_LINEAR;
    code = read_fields(scaling, value, fields, sizeof fields / sizeof *fields, linear_keys,
                       is_linear ? NULL : llama3_keys, &at, err);
    if (code == ERR_OK && !is_linear && scaling->high <= scaling->low) {
        return err_set(err, ERR_FORMAT,
                       "%s: rope_scaling.high_freq_factor is %g, not above low_freq_factor %g",
                       path, scaling->high, scaling->low);
    }
    return code;
}
