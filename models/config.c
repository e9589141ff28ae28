/* config.json → struct config. See config.h.
 *
 * Two tables, of the model's keys here and of a memory's in config_memory.c, have every key with
 * its type and bounds; a family lists which of them it takes. Other keys are refused, since a field
 * that this build does not know may change what the model computes. Conditions on several fields
 * are checked afterwards, by the family if they concern that family alone. */
#include "models/config.h"
#include "models/config_memory.h"
#include "models/config_rope.h"
#include "models/family.h"
#include "models/file.h"
#include "models/json_file.h"
#include "models/read.h"

#include <limits.h>
#include <stdio.h>
#include <string.h>

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

/* The key is for people: the files themselves say which type their tensors have. */
static enum err_code read_dtype(void *base, const json_t *value, const struct place *at,
                                struct err *err)
{
    static const char *const names[] = {"f32", "bf16", "f16", "int8", NULL};
    int index = 0;
    (void)base;
    return read_choice(&index, value, "dtype", names, at, err);
}

static enum err_code read_tokenizer(void *base, const json_t *value, const struct place *at,
                                    struct err *err)
{
    static const char *const names[] = {"xlm", "word", "char", "byte", NULL};
    struct config *const config = base;
    int index = 0;
    const enum err_code code = read_choice(&index, value, "tokenizer", names, at, err);
    (void)snprintf(config->tokenizer, sizeof config->tokenizer, "%s", names[index]);
    return code;
}

static enum err_code read_attention(void *base, const json_t *value, const struct place *at,
                                    struct err *err)
{
    static const char *const names[] = {"joint", "attn-split", "head-split", NULL};
    struct config *const config = base;
    int index = 0;
    const enum err_code code = read_choice(&index, value, "attention", names, at, err);
    config->attention = (enum attention)index;
    return code;
}

/* A family whose layers may have persistent vectors in place of a network takes 0. */
static enum err_code read_d_ff(void *base, const json_t *value, const struct place *at,
                               struct err *err)
{
    struct config *const config = base;
    const int64_t min = read_is_key(config->family->keys, "n_persistent") ? 0 : 1;
    const struct field field = {"d_ff", FIELD_INT, 0, min, CONFIG_FF_MAX, NULL};
    int64_t number = 0;
    const enum err_code code = read_integer(&number, value, &field, at, err);
    config->d_ff = (int)number;
    return code;
}

static enum err_code read_rope_theta(void *base, const json_t *value, const struct place *at,
                                     struct err *err)
{
    struct config *const config = base;
    config->rope_theta = json_number_value(value);
    if (!json_is_number(value)) {
        return read_wrong_type(at, "rope_theta", "a number", err);
    }
    if (!(config->rope_theta >= 1 && config->rope_theta <= 1e12)) { /* also NaN */
        return err_set(err, ERR_FORMAT, "%s: rope_theta is %g, outside 1 .. 1e12", at->path,
                       config->rope_theta);
    }
    return ERR_OK;
}

static enum err_code read_rope_scaling(void *base, const json_t *value, const struct place *at,
                                       struct err *err)
{
    struct config *const config = base;
    return config_rope_read(&config->rope_scaling, value, at->path, err);
}

/* A list of 1 to n_max integers min .. max. */
static enum err_code read_list(int *list, int *n, int n_max, const json_t *value, const char *key,
                               int min, int max, const struct place *at, struct err *err)
{
    *n = (int)json_array_size(value);
    if (!json_is_array(value) || json_array_size(value) < 1 ||
        json_array_size(value) > (size_t)n_max) {
        return err_set(err, ERR_FORMAT, "%s: %s must be an array of 1 to %d integers", at->path,
                       key, n_max);
    }
    for (int i = 0; i < *n; i++) {
        const json_t *const each = json_array_get(value, (size_t)i);
        const json_int_t number = json_integer_value(each);
        if (!json_is_integer(each) || number < min || number > max) {
            return err_set(err, ERR_FORMAT, "%s: %s[%d] must be an integer %d .. %d", at->path, key,
                           i, min, max);
        }
        list[i] = (int)number;
    }
    return ERR_OK;
}

static enum err_code read_cutoffs(void *base, const json_t *value, const struct place *at,
                                  struct err *err)
{
    struct config *const config = base;
    return read_list(config->cutoff, &config->n_cutoff, CONFIG_CUTOFF_MAX, value,
                     "adaptive_cutoffs", 1, CONFIG_VOCAB_MAX, at, err);
}

static enum err_code read_widths(void *base, const json_t *value, const struct place *at,
                                 struct err *err)
{
    struct config *const config = base;
    return read_list(config->cutoff_width, &config->n_cutoff_width, CONFIG_CUTOFF_MAX, value,
                     "adaptive_widths", 1, CONFIG_WIDTH_MAX, at, err);
}

/* An id, -1 for none, or a list of ids. */
static enum err_code read_eos(void *base, const json_t *value, const struct place *at,
                              struct err *err)
{
    static const struct field one = {"eos_token_id", FIELD_INT, 0, -1, CONFIG_VOCAB_MAX - 1, NULL};
    struct config *const config = base;
    struct end_ids *const ends = &config->ends;
    int64_t id = -1;
    enum err_code code;
    if (json_is_array(value)) {
        code =
            read_list(ends->id, &ends->n, MODEL_END_MAX, value, one.key, 0, (int)one.max, at, err);
        id = ends->id[0];
    } else {
        code = read_integer(&id, value, &one, at, err);
        ends->id[0] = (int32_t)id;
        ends->n = id >= 0 ? 1 : 0;
    }
    config->eos_id = code == ERR_OK ? (int)id : -1;
    return code;
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

/* The last row of the table, because a memory is checked against the model's other fields. */
static enum err_code read_memories(void *base, const json_t *value, const struct place *at,
                                   struct err *err)
{
    struct config *const config = base;
    const size_t n = json_array_size(value);
    if (!json_is_array(value) || n > MODEL_PKM_MAX) {
        return err_set(err, ERR_FORMAT, "%s: memories must be an array of at most %d objects",
                       at->path, (int)MODEL_PKM_MAX);
    }
    for (size_t i = 0; i < n; i++) {
        const enum err_code code =
            config_memory_read(config, json_array_get(value, i), (int)i, at->path, err);
        if (code != ERR_OK) {
            return code;
        }
    }
    config->n_memory = (int)n;
    return ERR_OK;
}

#define AT(member) offsetof(struct config, member)

/* Every key that a family may have: "memories" last, since its entries are checked against the
 * model's other fields. */
static const struct field fields[] = {
    {"model_type", FIELD_CUSTOM, 0, 0, 0, read_model_type},
    {"vocab_size", FIELD_INT, AT(n_vocab), 1, CONFIG_VOCAB_MAX, NULL},
    {"d_model", FIELD_INT, AT(d_model), 1, CONFIG_WIDTH_MAX, NULL},
    {"n_layer", FIELD_INT, AT(n_layer), 1, CONFIG_LAYER_MAX, NULL},
    {"n_head", FIELD_INT, AT(n_head), 1, CONFIG_HEAD_MAX, NULL},
    {"n_kv_head", FIELD_INT, AT(n_kv_head), 1, CONFIG_HEAD_MAX, NULL},
    {"d_head", FIELD_INT, AT(d_head), 1, CONFIG_WIDTH_MAX, NULL},
    {"d_ff", FIELD_CUSTOM, 0, 0, 0, read_d_ff},
    {"n_persistent", FIELD_INT, AT(n_persistent), 0, CONFIG_SPAN_MAX, NULL},
    {"max_span", FIELD_INT, AT(max_span), 1, CONFIG_SPAN_MAX, NULL},
    {"span_ramp", FIELD_INT, AT(span_ramp), 1, CONFIG_SPAN_MAX, NULL},
    {"attention", FIELD_CUSTOM, 0, 0, 0, read_attention},
    {"max_position", FIELD_INT, AT(context), 1, CONFIG_POSITION_MAX, NULL},
    {"activation", FIELD_CUSTOM, 0, 0, 0, read_activation},
    {"rope_theta", FIELD_CUSTOM, 0, 0, 0, read_rope_theta},
    {"rope_scaling", FIELD_CUSTOM, 0, 0, 0, read_rope_scaling},
    {"attention_bias", FIELD_BOOL, AT(attention_bias), 0, 0, NULL},
    {"attention_out_bias", FIELD_BOOL, AT(attention_out_bias), 0, 0, NULL},
    {"ffn_bias", FIELD_BOOL, AT(ffn_bias), 0, 0, NULL},
    {"query_key_norm", FIELD_BOOL, AT(query_key_norm), 0, 0, NULL},
    {"norm_eps", FIELD_REAL, AT(norm_eps), 0, 0, NULL},
    {"tie_output", FIELD_BOOL, AT(tie_output), 0, 0, NULL},
    {"bos_token_id", FIELD_INT, AT(bos_id), -1, CONFIG_VOCAB_MAX - 1, NULL},
    {"eos_token_id", FIELD_CUSTOM, 0, 0, 0, read_eos},
    {"pad_token_id", FIELD_INT, AT(pad_id), -1, CONFIG_VOCAB_MAX - 1, NULL},
    {"unk_token_id", FIELD_INT, AT(unk_id), -1, CONFIG_VOCAB_MAX - 1, NULL},
    {"add_bos", FIELD_BOOL, AT(add_bos), 0, 0, NULL},
    {"dtype", FIELD_CUSTOM, 0, 0, 0, read_dtype},
    {"tokenizer", FIELD_CUSTOM, 0, 0, 0, read_tokenizer},
    {"adaptive_cutoffs", FIELD_CUSTOM, 0, 0, 0, read_cutoffs},
    {"adaptive_widths", FIELD_CUSTOM, 0, 0, 0, read_widths},
    {"languages", FIELD_CUSTOM, 0, 0, 0, read_languages},
    {"memories", FIELD_CUSTOM, 0, 0, 0, read_memories},
};

/* Those of all families; a family lists the others. */
static const char *const common_keys[] = {
    "model_type",    "vocab_size", "d_model",       "n_layer",       "n_head",
    "norm_eps",      "tie_output", "bos_token_id?", "eos_token_id?", "pad_token_id?",
    "unk_token_id?", "add_bos?",   "dtype?",        "tokenizer?",    NULL};

/* Reads the keys that the file's family takes. If model_type is missing or unknown, its reader
 * reports that before any other key is read. */
static enum err_code read_model(struct config *config, const json_t *root, const struct place *at,
                                struct err *err)
{
    const char *const type = json_string_value(json_object_get(root, "model_type"));
    int f = 0;
    while (type != NULL && model_families[f] != NULL &&
           strcmp(type, model_families[f]->name) != 0) {
        f++;
    }
    config->family = model_families[f] != NULL ? model_families[f] : model_families[0];
    if (config->family->set_defaults != NULL) {
        config->family->set_defaults(config);
    }
    return read_fields(config, root, fields, sizeof fields / sizeof *fields, common_keys,
                       config->family->keys, at, err);
}

static enum err_code check_ids(const struct config *config, const char *path, struct err *err)
{
    const struct {
        const char *key;
        int id;
    } ids[] = {{"bos_token_id", config->bos_id},
               {"pad_token_id", config->pad_id},
               {"unk_token_id", config->unk_id}};
    for (size_t i = 0; i < sizeof ids / sizeof *ids; i++) {
        if (ids[i].id >= config->n_vocab) {
            return err_set(err, ERR_FORMAT, "%s: %s is %d, but vocab_size is %d", path, ids[i].key,
                           ids[i].id, config->n_vocab);
        }
    }
    for (int i = 0; i < config->ends.n; i++) {
        if (config->ends.id[i] >= config->n_vocab) {
            return err_set(err, ERR_FORMAT, "%s: eos_token_id is %d, but vocab_size is %d", path,
                           config->ends.id[i], config->n_vocab);
        }
    }
    if (config->add_bos && config->bos_id < 0) {
        return err_set(err, ERR_FORMAT, "%s: add_bos is true, but there is no bos_token_id", path);
    }
    return ERR_OK;
}

static enum err_code check_cutoffs(const struct config *config, const char *path, struct err *err)
{
    if (config->n_cutoff != config->n_cutoff_width) {
        return err_set(err, ERR_FORMAT,
                       "%s: %d adaptive_cutoffs, but %d adaptive_widths: each tail has both", path,
                       config->n_cutoff, config->n_cutoff_width);
    }
    for (int i = 0; i < config->n_cutoff; i++) {
        const int least = i > 0 ? config->cutoff[i - 1] : 0;
        if (config->cutoff[i] <= least || config->cutoff[i] >= config->n_vocab) {
            return err_set(err, ERR_FORMAT,
                           "%s: adaptive_cutoffs[%d] is %d: they must ascend and be below "
                           "vocab_size %d",
                           path, i, config->cutoff[i], config->n_vocab);
        }
    }
    if (config->n_cutoff > 0 && config->tie_output) {
        return err_set(err, ERR_FORMAT,
                       "%s: tie_output is true, but an adaptive output has no such matrix", path);
    }
    return ERR_OK;
}

/* Checks d_head and the numbers of heads, and fills in what is missing. */
static enum err_code check_heads(struct config *config, const char *path, struct err *err)
{
    if (config->d_head == 0 && config->d_model % config->n_head != 0) {
        return err_set(err, ERR_FORMAT, "%s: d_model %d is not a multiple of n_head %d", path,
                       config->d_model, config->n_head);
    }
    config->d_head = config->d_head > 0 ? config->d_head : config->d_model / config->n_head;
    config->n_kv_head = config->n_kv_head > 0 ? config->n_kv_head : config->n_head;
    if (config->n_head % config->n_kv_head != 0) {
        return err_set(err, ERR_FORMAT, "%s: n_head %d is not a multiple of n_kv_head %d", path,
                       config->n_head, config->n_kv_head);
    }
    if ((int64_t)config->n_head * config->d_head > CONFIG_WIDTH_MAX) {
        return err_set(err, ERR_FORMAT, "%s: n_head %d times d_head %d exceeds %d", path,
                       config->n_head, config->d_head, (int)CONFIG_WIDTH_MAX);
    }
    return ERR_OK;
}

static enum err_code check_config(struct config *config, const char *path, struct err *err)
{
    const enum err_code heads = check_heads(config, path, err);
    if (heads != ERR_OK) {
        return heads;
    }
    if (!(config->norm_eps > 0 && config->norm_eps <= 1)) { /* also refuses NaN */
        return err_set(err, ERR_FORMAT, "%s: norm_eps is %g, outside 0 < norm_eps <= 1", path,
                       (double)config->norm_eps);
    }
    const enum err_code own =
        config->family->check != NULL ? config->family->check(config, path, err) : ERR_OK;
    if (own != ERR_OK) {
        return own;
    }
    const enum err_code code = check_cutoffs(config, path, err);
    return code != ERR_OK ? code : check_ids(config, path, err);
}

static enum err_code config_from_json(struct config *config, const json_t *root, const char *path,
                                      struct err *err)
{
    *config = (struct config){.bos_id = -1, .eos_id = -1, .pad_id = -1, .unk_id = -1};
    config->memory_default.info.rescore = (struct pkm_rescore){.temperature = 1, .softmax = true};
    config->memory_default.info.input_norm.eps = 1e-5f;
    config->memory_default.info.query_norm.eps = 1e-5f;
    config->memory_default.info.gate_act = ACT_RELU;
    const struct place at = {.path = path};
    const enum err_code code = read_model(config, root, &at, err);
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
    if (file_path(path, dir, "config.json", err) != ERR_OK) {
        return err->code;
    }
    json_t *root = NULL;
    enum err_code code = json_file_read(&root, path, CONFIG_BYTES_MAX, false, err);
    if (code == ERR_OK) {
        code = config_from_json(config, root, path, err);
    }
    json_decref(root);
    return code;
}
