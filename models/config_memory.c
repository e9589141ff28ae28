/* A memory's entry in config.json: its table of fields, and what must hold between them. See
 * config.h; the keys are explained in models/FORMAT.md and models/MEMORY.md. */
#include "models/config_memory.h"
#include "models/family.h"
#include "models/read.h"

#include <stdio.h>

static enum err_code read_place(void *base, const json_t *value, const struct place *at,
                                struct err *err)
{
    static const char *const places[] = {"in", "beside", "after", NULL};
    struct config_memory *const memory = base;
    int index = 0;
    const enum err_code code = read_choice(&index, value, "place", places, at, err);
    memory->info.place = (enum memory_place)index;
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

static enum err_code read_query(void *base, const json_t *value, const struct place *at,
                                struct err *err)
{
    static const char *const names[] = {"mlp", "per_half", "identity", "shuffled", NULL};
    struct config_memory *const memory = base;
    int index = 0;
    const enum err_code code = read_choice(&index, value, "query", names, at, err);
    memory->info.query = (enum query_kind)index;
    return code;
}

static enum err_code read_hidden(void *base, const json_t *value, const struct place *at,
                                 struct err *err)
{
    static const struct field width = {"query_hidden[]", FIELD_INT, 0, 1, CONFIG_WIDTH_MAX, NULL};
    struct pkm_info *const info = &((struct config_memory *)base)->info;
    const size_t n = json_array_size(value);
    if (!json_is_array(value) || n > MODEL_HIDDEN_MAX) {
        return err_set(err, ERR_FORMAT, "%s: %squery_hidden must be an array of at most %d widths",
                       at->path, at->prefix, (int)MODEL_HIDDEN_MAX);
    }
    for (size_t i = 0; i < n; i++) {
        int64_t number = 0;
        const enum err_code code = read_integer(&number, json_array_get(value, i), &width, at, err);
        if (code != ERR_OK) {
            return code;
        }
        info->hidden[i] = (int)number;
    }
    info->n_hidden = (int)n;
    return ERR_OK;
}

static enum err_code read_subtract(void *base, const json_t *value, const struct place *at,
                                   struct err *err)
{
    static const char *const names[] = {"none", "min", "mean", "median", NULL};
    struct config_memory *const memory = base;
    int index = 0;
    const enum err_code code = read_choice(&index, value, "subtract", names, at, err);
    memory->info.rescore.subtract = (enum pkm_subtract)index;
    return code;
}

/* A name, or true for a linear layer and false for none. */
static enum err_code read_output_gate(void *base, const json_t *value, const struct place *at,
                                      struct err *err)
{
    static const char *const names[] = {"none", "scalar", "linear", "mlp", NULL};
    struct config_memory *const memory = base;
    int index = json_is_true(value) ? OUTPUT_GATE_LINEAR : OUTPUT_GATE_NONE;
    const enum err_code code =
        json_is_boolean(value) ? ERR_OK : read_choice(&index, value, "output_gate", names, at, err);
    memory->info.output_gate = (enum output_gate)index;
    return code;
}

static enum err_code read_gate_activation(void *base, const json_t *value, const struct place *at,
                                          struct err *err)
{
    static const char *const names[] = {"relu", "gelu", NULL};
    struct config_memory *const memory = base;
    int index = 0;
    const enum err_code code = read_choice(&index, value, "gate_activation", names, at, err);
    memory->info.gate_act = index == 0 ? ACT_RELU : ACT_GELU;
    return code;
}

static const char *const norm_names[] = {"none", "rms", "layer", NULL};

static enum err_code read_input_norm(void *base, const json_t *value, const struct place *at,
                                     struct err *err)
{
    int index = 0;
    const enum err_code code = read_choice(&index, value, "input_norm", norm_names, at, err);
    ((struct config_memory *)base)->info.input_norm.kind = (enum norm_kind)index;
    return code;
}

static enum err_code read_query_norm(void *base, const json_t *value, const struct place *at,
                                     struct err *err)
{
    int index = 0;
    const enum err_code code = read_choice(&index, value, "query_norm", norm_names, at, err);
    ((struct config_memory *)base)->info.query_norm.kind = (enum norm_kind)index;
    return code;
}

#define AT_MEMORY(member) offsetof(struct config_memory, member)

/* Every key that a memory of some family may have. */
static const struct field fields[] = {
    {"layer", FIELD_INT, AT_MEMORY(info.layer), 0, CONFIG_LAYER_MAX - 1, NULL},
    {"place", FIELD_CUSTOM, 0, 0, 0, read_place},
    {"kind", FIELD_CUSTOM, 0, 0, 0, read_kind},
    {"n_head", FIELD_INT, AT_MEMORY(info.shape.n_head), 1, CONFIG_HEAD_MAX, NULL},
    {"k_top", FIELD_INT, AT_MEMORY(info.shape.k_top), 1, PKM_K_TOP_MAX, NULL},
    {"n_key", FIELD_INT, AT_MEMORY(info.shape.n_key), 1, CONFIG_KEY_MAX, NULL},
    {"d_key", FIELD_INT, AT_MEMORY(info.shape.d_key), 1, CONFIG_WIDTH_MAX, NULL},
    {"n_slot", FIELD_LONG, AT_MEMORY(info.n_slot), 1, INT32_MAX, NULL},
    {"query_batch_norm", FIELD_BOOL, AT_MEMORY(query_batch_norm), 0, 0, NULL},
    {"query_bias", FIELD_BOOL, AT_MEMORY(query_bias), 0, 0, NULL},
    {"query", FIELD_CUSTOM, 0, 0, 0, read_query},
    {"query_hidden", FIELD_CUSTOM, 0, 0, 0, read_hidden},
    {"query_normalize", FIELD_BOOL, AT_MEMORY(query_normalize), 0, 0, NULL},
    {"shared_keys", FIELD_BOOL, AT_MEMORY(shared_keys), 0, 0, NULL},
    {"slot_map", FIELD_BOOL, AT_MEMORY(slot_map), 0, 0, NULL},
    {"modulo", FIELD_BOOL, AT_MEMORY(modulo), 0, 0, NULL},
    {"temperature", FIELD_REAL, AT_MEMORY(info.rescore.temperature), 0, 0, NULL},
    {"softmax", FIELD_BOOL, AT_MEMORY(info.rescore.softmax), 0, 0, NULL},
    {"subtract", FIELD_CUSTOM, 0, 0, 0, read_subtract},
    {"normalize", FIELD_BOOL, AT_MEMORY(info.rescore.normalize), 0, 0, NULL},
    {"d_value", FIELD_LONG, AT_MEMORY(info.d_value), 1, CONFIG_WIDTH_MAX, NULL},
    {"value_gate", FIELD_BOOL, AT_MEMORY(info.value_gate), 0, 0, NULL},
    {"value_projection", FIELD_BOOL, AT_MEMORY(info.value_projection), 0, 0, NULL},
    {"output_gate", FIELD_CUSTOM, 0, 0, 0, read_output_gate},
    {"gate_hidden", FIELD_INT, AT_MEMORY(info.gate_hidden), 1, CONFIG_WIDTH_MAX, NULL},
    {"gate_activation", FIELD_CUSTOM, 0, 0, 0, read_gate_activation},
    {"input_norm", FIELD_CUSTOM, 0, 0, 0, read_input_norm},
    {"input_norm_eps", FIELD_REAL, AT_MEMORY(info.input_norm.eps), 0, 0, NULL},
    {"query_norm", FIELD_CUSTOM, 0, 0, 0, read_query_norm},
    {"query_norm_width", FIELD_INT, AT_MEMORY(info.query_norm.n), 1, CONFIG_WIDTH_MAX, NULL},
    {"query_norm_eps", FIELD_REAL, AT_MEMORY(info.query_norm.eps), 0, 0, NULL},
    {"relu", FIELD_BOOL, AT_MEMORY(info.rescore.relu), 0, 0, NULL},
    {"experts", FIELD_BOOL, AT_MEMORY(info.experts), 0, 0, NULL},
    {"values_of", FIELD_INT, AT_MEMORY(info.values_of), 0, MODEL_PKM_MAX - 1, NULL},
};

/* Checks the query network's fields against the memory's other fields. */
static enum err_code check_query(const struct config_memory *memory, const struct config *config,
                                 const struct place *at, struct err *err)
{
    const struct pkm_info *const info = &memory->info;
    const int n_head = info->shape.n_head;
    const int d_key = info->shape.d_key;
    if (info->query == QUERY_MLP) {
        return ERR_OK;
    }
    if (info->query == QUERY_PER_HALF) {
        return d_key % 2 == 0 && info->n_hidden > 0
                   ? ERR_OK
                   : err_set(err, ERR_FORMAT,
                             "%s: %squery \"per_half\" needs query_hidden and an even d_key",
                             at->path, at->prefix);
    }
    if (d_key != config->d_model || info->n_hidden > 0 || memory->query_bias ||
        memory->query_batch_norm) {
        return err_set(err, ERR_FORMAT,
                       "%s: %squery without a network needs d_key = d_model = %d (d_key is %d), no "
                       "query_hidden, query_bias or query_batch_norm",
                       at->path, at->prefix, config->d_model, d_key);
    }
    if (info->query == QUERY_SHUFFLED && n_head > 1 &&
        (n_head > 16 || config->d_model % (1 << n_head) != 0)) {
        return err_set(
            err, ERR_FORMAT,
            "%s: %squery \"shuffled\" cuts d_model %d into 2^n_head pieces: it must be a "
            "multiple of that, n_head (%d) at most 16",
            at->path, at->prefix, config->d_model, n_head);
    }
    return ERR_OK;
}

/* Checks the fields about slots and weights against the memory's other fields, and completes the
 * rescoring. */
static enum err_code check_rescore(struct config_memory *memory, const struct place *at,
                                   struct err *err)
{
    struct pkm_shape *const shape = &memory->info.shape;
    struct pkm_rescore *const rescore = &memory->info.rescore;
    const float temperature = rescore->temperature;
    if (!(temperature >= 1e-6f && temperature <= 1e6f)) { /* also refuses NaN */
        return err_set(err, ERR_FORMAT, "%s: %stemperature is %g, outside 1e-6 .. 1e6", at->path,
                       at->prefix, (double)temperature);
    }
    if (rescore->softmax && rescore->normalize && rescore->subtract == PKM_SUBTRACT_NONE) {
        return err_set(err, ERR_FORMAT,
                       "%s: %snormalize after a softmax needs subtract: its weights sum to 1",
                       at->path, at->prefix);
    }
    if (shape->k_top == 1 && rescore->subtract != PKM_SUBTRACT_NONE && rescore->normalize) {
        return err_set(
            err, ERR_FORMAT,
            "%s: %sk_top is 1: subtract leaves 0 of a single score, and normalize divides "
            "that by 0",
            at->path, at->prefix);
    }
    if (rescore->relu && rescore->softmax) {
        return err_set(
            err, ERR_FORMAT,
            "%s: %srelu goes with softmax false: the weights of a softmax are not negative",
            at->path, at->prefix);
    }
    const bool is_plain = rescore->softmax && rescore->subtract == PKM_SUBTRACT_NONE &&
                          !rescore->normalize && !(temperature < 1 || temperature > 1);
    shape->scores = !is_plain || memory->slot_map || memory->modulo;
    rescore->n_head = shape->n_head;
    rescore->k_top = shape->k_top;
    rescore->n_slot = (int)memory->info.n_slot;
    return ERR_OK;
}

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
    const bool fits = memory->modulo ? memory->info.n_slot < n_slot && n_slot <= INT32_MAX
                                     : memory->info.n_slot == n_slot;
    if (!fits) {
        return err_set(err, ERR_FORMAT,
                       "%s: %sn_slot is %lld, but %s keys with n_key %d have %lld%s", at->path,
                       at->prefix, (long long)memory->info.n_slot, product ? "product" : "flat",
                       shape->n_key, (long long)n_slot,
                       memory->modulo ? ", and modulo makes it fewer than these (below 2^31)" : "");
    }
    return ERR_OK;
}

/* Checks what happens to the sum of values against the model's width. */
static enum err_code check_values(const struct pkm_info *info, const struct config *config,
                                  const struct place *at, struct err *err)
{
    if (info->experts && (info->value_gate || info->value_projection)) {
        return err_set(err, ERR_FORMAT,
                       "%s: %sexperts take neither value_gate nor value_projection", at->path,
                       at->prefix);
    }
    if (info->d_value != config->d_model && !info->value_projection) {
        return err_set(err, ERR_FORMAT,
                       "%s: %sd_value is %lld, d_model %d: without value_projection they must be "
                       "equal",
                       at->path, at->prefix, (long long)info->d_value, config->d_model);
    }
    return ERR_OK;
}

static enum err_code check_eps(const struct norm_info *norm, const char *key,
                               const struct place *at, struct err *err)
{
    if (norm->eps > 0 && norm->eps <= 1) {
        return ERR_OK;
    }
    return err_set(err, ERR_FORMAT, "%s: %s%s is %g, outside 0 < %s <= 1", at->path, at->prefix,
                   key, (double)norm->eps, key);
}

/* Checks the place, the norms and the gate against the memory's other fields, and completes the
 * norms. */
static enum err_code check_frame(struct pkm_info *info, const struct config *config,
                                 const struct place *at, struct err *err)
{
    const int64_t d_query = (int64_t)info->shape.n_head * info->shape.d_key;
    struct norm_info *const norm = &info->query_norm;
    norm->n = norm->n == 0 ? info->shape.d_key : norm->n;
    info->input_norm.n = config->d_model;
    if (info->place == MEMORY_BESIDE && !config->gated) {
        return err_set(
            err, ERR_FORMAT,
            "%s: %splace is \"beside\", which only models of the memory_llama family have",
            at->path, at->prefix);
    }
    if (norm->n != info->shape.d_key / 2 && norm->n != info->shape.d_key && norm->n != d_query) {
        return err_set(err, ERR_FORMAT,
                       "%s: %squery_norm_width is %d; it must be d_key/2 = %d, d_key = %d, or "
                       "n_head*d_key = %lld",
                       at->path, at->prefix, norm->n, info->shape.d_key / 2, info->shape.d_key,
                       (long long)d_query);
    }
    if ((info->output_gate == OUTPUT_GATE_MLP) != (info->gate_hidden > 0)) {
        return err_set(err, ERR_FORMAT, "%s: %sgate_hidden goes with output_gate \"mlp\", %s",
                       at->path, at->prefix,
                       info->gate_hidden > 0 ? "which is not there" : "and is missing");
    }
    const enum err_code code = check_eps(&info->input_norm, "input_norm_eps", at, err);
    return code != ERR_OK ? code : check_eps(norm, "query_norm_eps", at, err);
}

/* The memory at index may read the table of an earlier one that is like its own. */
static enum err_code check_values_of(const struct config *config, int index, const struct place *at,
                                     struct err *err)
{
    const struct config_memory *const memory = &config->memory[index];
    if (memory->info.values_of > index) {
        return err_set(err, ERR_FORMAT, "%s: %svalues_of is %d, not the index of an earlier memory",
                       at->path, at->prefix, memory->info.values_of);
    }
    const int64_t n_slot = config->memory[memory->info.values_of].info.n_slot;
    if (memory->info.n_slot != n_slot) {
        return err_set(err, ERR_FORMAT,
                       "%s: %sn_slot is %lld, but the table of memories[%d] has %lld rows",
                       at->path, at->prefix, (long long)memory->info.n_slot, memory->info.values_of,
                       (long long)n_slot);
    }
    const struct pkm_info *const owner = &config->memory[memory->info.values_of].info;
    if (memory->info.d_value != owner->d_value || memory->info.experts != owner->experts) {
        return err_set(err, ERR_FORMAT,
                       "%s: %sd_value is %lld%s, but the table of memories[%d] has %lld columns%s",
                       at->path, at->prefix, (long long)memory->info.d_value,
                       memory->info.experts ? " of experts" : "", memory->info.values_of,
                       (long long)owner->d_value, owner->experts ? " of experts" : "");
    }
    return ERR_OK;
}

/* A memory's place in the order of execution. */
static int memory_order(const struct pkm_info *info)
{
    static const int order[] = {[MEMORY_BESIDE] = 0, [MEMORY_IN] = 1, [MEMORY_AFTER] = 2};
    return 3 * info->layer + order[info->place];
}

enum err_code config_memory_read(struct config *config, const json_t *value, int index,
                                 const char *path, struct err *err)
{
    struct place at = {.path = path};
    (void)snprintf(at.prefix, sizeof at.prefix, "memories[%d].", index);
    if (!json_is_object(value)) {
        return err_set(err, ERR_FORMAT, "%s: memories[%d] must be an object", path, index);
    }
    struct config_memory *const memory = &config->memory[index];
    *memory = config->memory_default;
    memory->info.values_of = index;
    memory->info.d_value = config->d_model;
    CHECK(config->family->memory_keys != NULL);
    enum err_code code = read_fields(memory, value, fields, sizeof fields / sizeof *fields,
                                     config->family->memory_keys, NULL, &at, err);
    if (code != ERR_OK) {
        return code;
    }
    code = check_memory(memory, config, &at, err);
    if (code == ERR_OK) {
        code = check_values(&memory->info, config, &at, err);
    }
    if (code == ERR_OK) {
        code = check_frame(&memory->info, config, &at, err);
    }
    if (code == ERR_OK) {
        code = check_query(memory, config, &at, err);
    }
    if (code == ERR_OK) {
        code = check_rescore(memory, &at, err);
    }
    if (code == ERR_OK) {
        code = check_values_of(config, index, &at, err);
    }
    if (code != ERR_OK) {
        return code;
    }
    if (index > 0) {
        const int before = memory_order(&config->memory[index - 1].info);
        const int here = memory_order(&memory->info);
        if (here == before) {
            return err_set(err, ERR_FORMAT, "%s: memories[%d] and [%d] are both %s layer %d", path,
                           index - 1, index, memory_place_name(memory->info.place),
                           memory->info.layer);
        }
        if (here < before) {
            return err_set(err, ERR_FORMAT,
                           "%s: memories[%d] runs before memories[%d]: list them "
                           "by layer, \"beside\" before \"in\" before \"after\"",
                           path, index, index - 1);
        }
    }
    return ERR_OK;
}
