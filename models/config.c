/* config.json → struct config. See config.h.
 *
 * Two tables, one for the model and one for each of its memories, name every key with its type and
 * bounds; a key that stands in neither is refused, since a field this build does not know may
 * change what the model computes. What concerns several fields at once is checked after. */
#include "models/config.h"
#include "models/json_file.h"

#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

/* Where a value stands, for messages: "dir/config.json: memories[2].n_key". */
struct place {
    const char *path;
    char prefix[32]; /* "" or "memories[2]." */
};

enum field_type { FIELD_INT, FIELD_LONG, FIELD_REAL, FIELD_BOOL, FIELD_CUSTOM };

struct field {
    const char *key;
    enum field_type type;
    bool required;
    size_t offset; /* in struct config or struct config_memory */
    int64_t min, max;
    enum err_code (*read)(void *base, const json_t *value, const struct place *at, struct err *err);
};

/* ---- one value ---------------------------------------------------------------------------- */

static enum err_code wrong_type(const struct place *at, const char *key, const char *expected,
                                struct err *err)
{
    return err_set(err, ERR_FORMAT, "%s: %s%s must be %s", at->path, at->prefix, key, expected);
}

/* The index of value among choices, which end with NULL. */
static enum err_code read_choice(int *index, const json_t *value, const char *key,
                                 const char *const *choices, const struct place *at,
                                 struct err *err)
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
        return wrong_type(at, key, "a string", err);
    }
    return err_set(err, ERR_FORMAT, "%s: %s%s is \"%.64s\"; served are %s", at->path, at->prefix,
                   key, text, list);
}

static enum err_code read_integer(int64_t *number, const json_t *value, const struct field *field,
                                  const struct place *at, struct err *err)
{
    if (!json_is_integer(value)) {
        return wrong_type(at, field->key, "an integer", err);
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
            return wrong_type(at, field->key, "a number", err);
        }
        *(float *)(void *)target = (float)json_number_value(value);
        return ERR_OK;
    case FIELD_BOOL:
        if (!json_is_boolean(value)) {
            return wrong_type(at, field->key, "true or false", err);
        }
        *(bool *)(void *)target = json_is_true(value);
        return ERR_OK;
    case FIELD_CUSTOM: return field->read(base, value, at, err);
    }
    CHECK(false);
    return ERR_FORMAT;
}

/* Reads every field of object into base by the table, and refuses keys that are not in it. */
static enum err_code read_fields(void *base, const json_t *object, const struct field *fields,
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

/* ---- memories ----------------------------------------------------------------------------- */

static enum err_code read_place(void *base, const json_t *value, const struct place *at,
                                struct err *err)
{
    static const char *const places[] = {"in", "after", NULL};
    struct config_memory *const memory = base;
    int index = 0;
    const enum err_code code = read_choice(&index, value, "place", places, at, err);
    memory->info.after = index == 1;
    return code;
}

static enum err_code read_kind(void *base, const json_t *value, const struct place *at,
                               struct err *err)
{
    static const char *const kinds[] = {"product", "flat", NULL};
    struct config_memory *const memory = base;
    int index = 0;
    const enum err_code code = read_choice(&index, value, "kind", kinds, at, err);
    memory->info.shape.kind = index == 1 ? PKM_FLAT : PKM_PRODUCT;
    return code;
}

#define AT_MEMORY(member) offsetof(struct config_memory, member)

static const struct field memory_fields[] = {
    {"layer", FIELD_INT, true, AT_MEMORY(info.layer), 0, CONFIG_LAYER_MAX - 1, NULL},
    {"place", FIELD_CUSTOM, true, 0, 0, 0, read_place},
    {"kind", FIELD_CUSTOM, true, 0, 0, 0, read_kind},
    {"n_head", FIELD_INT, true, AT_MEMORY(info.shape.n_head), 1, CONFIG_HEAD_MAX, NULL},
    {"k_top", FIELD_INT, true, AT_MEMORY(info.shape.k_top), 1, PKM_K_TOP_MAX, NULL},
    {"n_key", FIELD_INT, true, AT_MEMORY(info.shape.n_key), 1, CONFIG_KEY_MAX, NULL},
    {"d_key", FIELD_INT, true, AT_MEMORY(info.shape.d_key), 1, CONFIG_WIDTH_MAX, NULL},
    {"n_slot", FIELD_LONG, true, AT_MEMORY(info.n_slot), 1, INT32_MAX, NULL},
    {"query_batch_norm", FIELD_BOOL, true, AT_MEMORY(query_batch_norm), 0, 0, NULL},
    {"query_bias", FIELD_BOOL, true, AT_MEMORY(query_bias), 0, 0, NULL},
};

/* What must hold between the fields of one memory. */
static enum err_code check_memory(const struct config_memory *memory, const struct config *config,
                                  const struct place *at, struct err *err)
{
    const struct pkm_shape *const shape = &memory->info.shape;
    const bool product = shape->kind == PKM_PRODUCT;
    const int64_t n_slot = product ? (int64_t)shape->n_key * shape->n_key : shape->n_key;
    if (memory->info.layer >= config->n_layer) {
        return err_set(err, ERR_FORMAT, "%s: %slayer is %d, but the last of n_layer %d is %d",
                       at->path, at->prefix, memory->info.layer, config->n_layer,
                       config->n_layer - 1);
    }
    if (shape->k_top > shape->n_key) {
        return err_set(err, ERR_FORMAT, "%s: %sk_top is %d, more than n_key %d", at->path,
                       at->prefix, shape->k_top, shape->n_key);
    }
    if (product && shape->d_key % 2 != 0) {
        return err_set(err, ERR_FORMAT,
                       "%s: %sd_key is %d, but product keys halve it: it must be "
                       "even",
                       at->path, at->prefix, shape->d_key);
    }
    if (memory->info.n_slot != n_slot) {
        return err_set(err, ERR_FORMAT, "%s: %sn_slot is %lld, but %s keys with n_key %d have %lld",
                       at->path, at->prefix, (long long)memory->info.n_slot,
                       product ? "product" : "flat", shape->n_key, (long long)n_slot);
    }
    return ERR_OK;
}

/* Position in the order of execution. */
static int memory_order(const struct memory_info *info)
{
    return 2 * info->layer + (info->after ? 1 : 0);
}

static enum err_code read_memory(struct config *config, const json_t *value, int index,
                                 const char *path, struct err *err)
{
    struct place at = {.path = path};
    (void)snprintf(at.prefix, sizeof at.prefix, "memories[%d].", index);
    if (!json_is_object(value)) {
        return err_set(err, ERR_FORMAT, "%s: memories[%d] must be an object", path, index);
    }
    struct config_memory *const memory = &config->memory[index];
    enum err_code code = read_fields(memory, value, memory_fields,
                                     sizeof memory_fields / sizeof *memory_fields, &at, err);
    if (code != ERR_OK) {
        return code;
    }
    code = check_memory(memory, config, &at, err);
    if (code != ERR_OK) {
        return code;
    }
    memory->info.d_value = config->d_model;
    if (index > 0) {
        const int before = memory_order(&config->memory[index - 1].info);
        const int here = memory_order(&memory->info);
        if (here == before) {
            return err_set(err, ERR_FORMAT, "%s: memories[%d] and [%d] are both %s layer %d", path,
                           index - 1, index, memory->info.after ? "after" : "in",
                           memory->info.layer);
        }
        if (here < before) {
            return err_set(err, ERR_FORMAT,
                           "%s: memories[%d] runs before memories[%d]: list them "
                           "by layer, \"in\" before \"after\"",
                           path, index, index - 1);
        }
    }
    return ERR_OK;
}

/* ---- the model ---------------------------------------------------------------------------- */

static enum err_code read_model_type(void *base, const json_t *value, const struct place *at,
                                     struct err *err)
{
    struct config *const config = base;
    const char *names[16] = {NULL};
    int n_family = 0;
    while (model_families[n_family] != NULL) {
        CHECK(n_family + 1 < (int)(sizeof names / sizeof *names));
        names[n_family] = model_families[n_family]->name;
        n_family++;
    }
    int index = 0;
    const enum err_code code = read_choice(&index, value, "model_type", names, at, err);
    config->family = code == ERR_OK ? model_families[index] : NULL;
    return code;
}

static enum err_code read_activation(void *base, const json_t *value, const struct place *at,
                                     struct err *err)
{
    static const char *const names[] = {"gelu", "relu", NULL};
    struct config *const config = base;
    int index = 0;
    const enum err_code code = read_choice(&index, value, "activation", names, at, err);
    config->act = index == 1 ? ACT_RELU : ACT_GELU;
    return code;
}

/* The files say themselves which type their tensors have; the key is for people. */
static enum err_code read_dtype(void *base, const json_t *value, const struct place *at,
                                struct err *err)
{
    static const char *const names[] = {"f32", "bf16", "f16", NULL};
    int index = 0;
    (void)base;
    return read_choice(&index, value, "dtype", names, at, err);
}

static enum err_code read_languages(void *base, const json_t *value, const struct place *at,
                                    struct err *err)
{
    struct config *const config = base;
    const size_t n = json_array_size(value);
    if (!json_is_array(value) || n < 1 || n > MODEL_LANG_MAX) {
        return err_set(err, ERR_FORMAT, "%s: languages must be an array of 1 to %d names", at->path,
                       (int)MODEL_LANG_MAX);
    }
    for (size_t i = 0; i < n; i++) {
        const char *const name = json_string_value(json_array_get(value, i));
        if (name == NULL || name[0] == '\0' || strlen(name) >= MODEL_NAME_MAX) {
            return err_set(err, ERR_FORMAT, "%s: languages[%zu] must be a string of 1 to %d bytes",
                           at->path, i, (int)MODEL_NAME_MAX - 1);
        }
        for (size_t j = 0; j < i; j++) {
            if (strcmp(config->lang[j], name) == 0) {
                return err_set(err, ERR_FORMAT, "%s: languages names \"%s\" twice", at->path, name);
            }
        }
        (void)snprintf(config->lang[i], sizeof config->lang[i], "%s", name);
    }
    config->n_lang = (int)n;
    return ERR_OK;
}

/* Runs last of the table: a memory is checked against the model's other fields. */
static enum err_code read_memories(void *base, const json_t *value, const struct place *at,
                                   struct err *err)
{
    struct config *const config = base;
    const size_t n = json_array_size(value);
    if (!json_is_array(value) || n > MODEL_MEMORY_MAX) {
        return err_set(err, ERR_FORMAT, "%s: memories must be an array of at most %d objects",
                       at->path, (int)MODEL_MEMORY_MAX);
    }
    for (size_t i = 0; i < n; i++) {
        const enum err_code code =
            read_memory(config, json_array_get(value, i), (int)i, at->path, err);
        if (code != ERR_OK) {
            return code;
        }
    }
    config->n_memory = (int)n;
    return ERR_OK;
}

#define AT(member) offsetof(struct config, member)

static const struct field fields[] = {
    {"model_type", FIELD_CUSTOM, true, 0, 0, 0, read_model_type},
    {"vocab_size", FIELD_INT, true, AT(n_vocab), 1, CONFIG_VOCAB_MAX, NULL},
    {"d_model", FIELD_INT, true, AT(d_model), 1, CONFIG_WIDTH_MAX, NULL},
    {"n_layer", FIELD_INT, true, AT(n_layer), 1, CONFIG_LAYER_MAX, NULL},
    {"n_head", FIELD_INT, true, AT(n_head), 1, CONFIG_HEAD_MAX, NULL},
    {"d_ff", FIELD_INT, true, AT(d_ff), 1, CONFIG_FF_MAX, NULL},
    {"max_position", FIELD_INT, true, AT(context), 1, CONFIG_POSITION_MAX, NULL},
    {"activation", FIELD_CUSTOM, true, 0, 0, 0, read_activation},
    {"norm_eps", FIELD_REAL, true, AT(norm_eps), 0, 0, NULL},
    {"tie_output", FIELD_BOOL, true, AT(tie_output), 0, 0, NULL},
    {"bos_token_id", FIELD_INT, false, AT(bos_id), -1, CONFIG_VOCAB_MAX - 1, NULL},
    {"eos_token_id", FIELD_INT, false, AT(eos_id), -1, CONFIG_VOCAB_MAX - 1, NULL},
    {"pad_token_id", FIELD_INT, false, AT(pad_id), -1, CONFIG_VOCAB_MAX - 1, NULL},
    {"unk_token_id", FIELD_INT, false, AT(unk_id), -1, CONFIG_VOCAB_MAX - 1, NULL},
    {"add_bos", FIELD_BOOL, false, AT(add_bos), 0, 0, NULL},
    {"dtype", FIELD_CUSTOM, false, 0, 0, 0, read_dtype},
    {"languages", FIELD_CUSTOM, false, 0, 0, 0, read_languages},
    {"memories", FIELD_CUSTOM, false, 0, 0, 0, read_memories},
};

static enum err_code check_ids(const struct config *config, const char *path, struct err *err)
{
    const struct {
        const char *key;
        int id;
    } ids[] = {{"bos_token_id", config->bos_id},
               {"eos_token_id", config->eos_id},
               {"pad_token_id", config->pad_id},
               {"unk_token_id", config->unk_id}};
    for (size_t i = 0; i < sizeof ids / sizeof *ids; i++) {
        if (ids[i].id >= config->n_vocab) {
            return err_set(err, ERR_FORMAT, "%s: %s is %d, but vocab_size is %d", path, ids[i].key,
                           ids[i].id, config->n_vocab);
        }
    }
    if (config->add_bos && config->bos_id < 0) {
        return err_set(err, ERR_FORMAT, "%s: add_bos is true, but there is no bos_token_id", path);
    }
    return ERR_OK;
}

static enum err_code check_config(const struct config *config, const char *path, struct err *err)
{
    if (config->d_model % config->n_head != 0) {
        return err_set(err, ERR_FORMAT, "%s: d_model %d is not a multiple of n_head %d", path,
                       config->d_model, config->n_head);
    }
    if (!(config->norm_eps > 0 && config->norm_eps <= 1)) { /* also refuses NaN */
        return err_set(err, ERR_FORMAT, "%s: norm_eps is %g, outside 0 < norm_eps <= 1", path,
                       (double)config->norm_eps);
    }
    return check_ids(config, path, err);
}

static enum err_code config_from_json(struct config *config, const json_t *root, const char *path,
                                      struct err *err)
{
    *config = (struct config){.bos_id = -1, .eos_id = -1, .pad_id = -1, .unk_id = -1};
    const struct place at = {.path = path};
    const enum err_code code =
        read_fields(config, root, fields, sizeof fields / sizeof *fields, &at, err);
    return code != ERR_OK ? code : check_config(config, path, err);
}

enum err_code config_parse(struct config *config, const char *text, size_t bytes, const char *path,
                           struct err *err)
{
    json_t *root = NULL;
    enum err_code code = json_file_parse(&root, text, bytes, path, err);
    if (code == ERR_OK) {
        code = config_from_json(config, root, path, err);
    }
    json_decref(root);
    return code;
}

enum err_code config_read(struct config *config, const char *dir, struct err *err)
{
    char path[PATH_MAX];
    const int n = snprintf(path, sizeof path, "%s/config.json", dir);
    if (n < 0 || (size_t)n >= sizeof path) {
        return err_set(err, ERR_ARGUMENT, "model directory's path is longer than %d bytes",
                       PATH_MAX - 1);
    }
    json_t *root = NULL;
    enum err_code code = json_file_read(&root, path, CONFIG_BYTES_MAX, err);
    if (code == ERR_OK) {
        code = config_from_json(config, root, path, err);
    }
    json_decref(root);
    return code;
}
