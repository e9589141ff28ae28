/* The list of a model's tensors: see model_plan.h. */
#include "tests/bench/model_plan.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct plan_entry *add(struct plan *plan, const char *prefix, const char *name,
                              double spread, double offset)
{
    CHECK(plan->n < PLAN_TENSOR_MAX); /* plan_argument bounds the layers */
    struct plan_entry *const entry = &plan->entry[plan->n++];
    *entry = (struct plan_entry){.dtype = DTYPE_F32, .spread = spread, .offset = offset};
    snprintf(entry->name, sizeof entry->name, "%s%s", prefix, name);
    return entry;
}

static void vector(struct plan *plan, const char *prefix, const char *name, int64_t n,
                   double spread, double offset)
{
    struct plan_entry *const entry = add(plan, prefix, name, spread, offset);
    entry->n_dim = 1;
    entry->dim[0] = n;
}

static void matrix(struct plan *plan, const struct plan_shape *shape, const char *prefix,
                   const char *name, int64_t rows, int64_t cols)
{
    struct plan_entry *const entry = add(plan, prefix, name, sqrt(3.0 / (double)cols), 0);
    entry->n_dim = 2;
    entry->dim[0] = rows;
    entry->dim[1] = cols;
    entry->dtype = shape->dtype;
}

static void linear(struct plan *plan, const struct plan_shape *shape, const char *prefix,
                   const char *name, int64_t n_out, int64_t n_in)
{
    char part[PLAN_NAME_MAX];
    snprintf(part, sizeof part, "%s%s.", prefix, name);
    matrix(plan, shape, part, "weight", n_out, n_in);
    vector(plan, part, "bias", n_out, 0.01, 0);
}

static void norm(struct plan *plan, const struct plan_shape *shape, const char *prefix)
{
    vector(plan, prefix, "weight", shape->width, 0.1, 1);
    vector(plan, prefix, "bias", shape->width, 0.1, 0);
}

static void memory(struct plan *plan, const struct plan_shape *shape, int layer)
{
    char prefix[PLAN_NAME_MAX];
    const int64_t query = (int64_t)shape->memory_heads * shape->key_width;
    snprintf(prefix, sizeof prefix, "memories.%d_in.", layer);
    struct plan_entry *const keys = add(plan, prefix, "keys", sqrt(3.0 / shape->key_width), 0);
    keys->dtype = shape->dtype;
    keys->dim[keys->n_dim++] = shape->memory_heads;
    if (!shape->flat) {
        keys->dim[keys->n_dim++] = 2;
    }
    keys->dim[keys->n_dim++] = shape->keys;
    keys->dim[keys->n_dim++] = shape->flat ? shape->key_width : shape->key_width / 2;
    matrix(plan, shape, prefix, "values.weight", plan_slots(shape), shape->width);
    linear(plan, shape, prefix, "query_proj.query_mlps.0", query, shape->width);
    vector(plan, prefix, "query_proj.query_mlps.1.weight", query, 0.1, 1);
    vector(plan, prefix, "query_proj.query_mlps.1.bias", query, 0.1, 0);
    vector(plan, prefix, "query_proj.query_mlps.1.running_mean", query, 0.1, 0);
    vector(plan, prefix, "query_proj.query_mlps.1.running_var", query, 0.1, 1);
}

/* A memory of the family memory_llama; the first one's values are all others'. */
static void gated_memory(struct plan *plan, const struct plan_shape *shape, int layer)
{
    char prefix[PLAN_NAME_MAX];
    const int64_t d = shape->width;
    snprintf(prefix, sizeof prefix, "memories.%d_in.", layer);
    struct plan_entry *const keys = add(plan, prefix, "keys", sqrt(3.0 / shape->key_width), 0);
    keys->dtype = shape->dtype;
    keys->n_dim = 4;
    keys->dim[0] = shape->memory_heads;
    keys->dim[1] = 2;
    keys->dim[2] = shape->keys;
    keys->dim[3] = shape->key_width / 2;
    if (layer == shape->memory_layer[0]) {
        matrix(plan, shape, prefix, "values.weight", plan_slots(shape), d);
    }
    if (layer == shape->memory_layer[0] && shape->has_codes) {
        struct plan_entry *const codes = &plan->entry[plan->n - 1];
        codes->dtype = DTYPE_Q4;
        codes->dim[1] = d / 2;
        vector(plan, prefix, "values.weight.scale", plan_slots(shape), codes->spread / 8, 0);
        plan->entry[plan->n - 1].dtype = DTYPE_F16;
    }
    linear(plan, shape, prefix, "query_proj.query_mlps.0",
           (int64_t)shape->memory_heads * shape->key_width, d);
    linear(plan, shape, prefix, "value_gate", d, d);
    linear(plan, shape, prefix, "value_proj", d, d);
}

static bool has_memory(const struct plan_shape *shape, int layer)
{
    for (int m = 0; m < shape->n_memory; m++) {
        if (shape->memory_layer[m] == layer) {
            return true;
        }
    }
    return false;
}

static void llama_plan(struct plan *plan, const struct plan_shape *shape)
{
    const int64_t d = shape->width;
    matrix(plan, shape, "embeddings.", "weight", shape->vocab, d);
    if (!shape->tied) {
        matrix(plan, shape, "output.", "weight", shape->vocab, d);
    }
    vector(plan, "norm.", "weight", d, 0.1, 1);
    const int64_t n_kv_head = shape->kv_heads > 0 ? shape->kv_heads : shape->heads;
    const int64_t d_kv = n_kv_head * (d / shape->heads);
    for (int i = 0; i < shape->layers; i++) {
        static const char *const parts[] = {"attention.query.weight", "attention.key.weight",
                                            "attention.value.weight", "attention.out.weight"};
        const int64_t rows[] = {d, d_kv, d_kv, d};
        char prefix[PLAN_NAME_MAX];
        snprintf(prefix, sizeof prefix, "layers.%d.", i);
        for (int p = 0; p < 4; p++) {
            matrix(plan, shape, prefix, parts[p], rows[p], d);
        }
        vector(plan, prefix, "attention_norm.weight", d, 0.1, 1);
        vector(plan, prefix, "ffn_norm.weight", d, 0.1, 1);
        if (has_memory(shape, i)) {
            gated_memory(plan, shape, i);
            continue;
        }
        matrix(plan, shape, prefix, "ffn.gate.weight", shape->ff, d);
        matrix(plan, shape, prefix, "ffn.up.weight", shape->ff, d);
        matrix(plan, shape, prefix, "ffn.down.weight", d, shape->ff);
    }
}

bool plan_new(struct plan *plan, const struct plan_shape *shape)
{
    *plan = (struct plan){.entry = calloc(PLAN_TENSOR_MAX, sizeof *plan->entry)};
    if (plan->entry == NULL) {
        return false;
    }
    if (shape->is_llama) {
        llama_plan(plan, shape);
        return true;
    }
    const int64_t d = shape->width;
    matrix(plan, shape, "embeddings.", "weight", shape->vocab, d);
    matrix(plan, shape, "position_embeddings.", "weight", shape->positions, d);
    norm(plan, shape, "layer_norm_emb.");
    for (int i = 0; i < shape->layers; i++) {
        static const char *const parts[] = {"q_lin", "k_lin", "v_lin", "out_lin"};
        char prefix[PLAN_NAME_MAX];
        for (int p = 0; p < 4; p++) {
            snprintf(prefix, sizeof prefix, "attentions.%d.", i);
            linear(plan, shape, prefix, parts[p], d, d);
        }
        snprintf(prefix, sizeof prefix, "layer_norm1.%d.", i);
        norm(plan, shape, prefix);
        if (!has_memory(shape, i)) {
            snprintf(prefix, sizeof prefix, "ffns.%d.", i);
            linear(plan, shape, prefix, "lin1", shape->ff, d);
            linear(plan, shape, prefix, "lin2", d, shape->ff);
        } else {
            memory(plan, shape, i);
        }
        snprintf(prefix, sizeof prefix, "layer_norm2.%d.", i);
        norm(plan, shape, prefix);
    }
    vector(plan, "", "pred_layer.proj.bias", shape->vocab, 0.01, 0);
    return true;
}

void plan_free(struct plan *plan)
{
    free(plan->entry);
    *plan = (struct plan){0};
}

int64_t plan_elems(const struct plan_entry *entry)
{
    int64_t n = 1;
    for (int i = 0; i < entry->n_dim; i++) {
        n *= entry->dim[i];
    }
    return n;
}

int64_t plan_slots(const struct plan_shape *shape)
{
    return shape->flat ? shape->keys : (int64_t)shape->keys * shape->keys;
}

enum dtype plan_cache(const struct plan_shape *shape)
{
    const bool is_odd = shape->width / shape->heads % 2 != 0;
    return shape->dtype == DTYPE_F32 || is_odd ? DTYPE_F32 : DTYPE_BF16;
}

/* "-1", or layers in ascending order: "3,7,11". */
static bool parse_memory_layers(struct plan_shape *shape, const char *value)
{
    shape->n_memory = 0;
    if (strcmp(value, "-1") == 0) {
        return true;
    }
    for (long last = -1;;) {
        char *end = NULL;
        const long layer = strtol(value, &end, 10);
        if (end == value || layer <= last || layer > 127 || shape->n_memory == PLAN_MEMORY_MAX) {
            return false;
        }
        shape->memory_layer[shape->n_memory++] = (int)layer;
        last = layer;
        if (*end != ',') {
            return *end == '\0';
        }
        value = end + 1;
    }
}

bool plan_argument(struct plan_shape *shape, const char *flag, const char *value)
{
    const struct {
        const char *flag;
        int *field;
        long min, max;
    } fields[] = {
        {"--layers", &shape->layers, 1, 128},
        {"--width", &shape->width, 16, 16384},
        {"--heads", &shape->heads, 1, 256},
        {"--kv-heads", &shape->kv_heads, 1, 256},
        {"--ff", &shape->ff, 16, 65536},
        {"--vocab", &shape->vocab, 16, 1 << 20},
        {"--positions", &shape->positions, 1, 65536},
        {"--memory-heads", &shape->memory_heads, 1, 64},
        {"--k", &shape->k, 1, 128},
        {"--keys", &shape->keys, 1, 1 << 20},
        {"--key-width", &shape->key_width, 2, 4096},
    };
    if (strcmp(flag, "--memory-layer") == 0) {
        return parse_memory_layers(shape, value);
    }
    if (strcmp(flag, "--dtype") == 0 && (!strcmp(value, "f32") || !strcmp(value, "bf16"))) {
        shape->dtype = strcmp(value, "f32") ? DTYPE_BF16 : DTYPE_F32;
        return true;
    }
    if (strcmp(flag, "--output") == 0 && (!strcmp(value, "tied") || !strcmp(value, "own"))) {
        shape->tied = value[0] == 't';
        return true;
    }
    if (strcmp(flag, "--values") == 0 && (!strcmp(value, "q4") || !strcmp(value, "plain"))) {
        shape->has_codes = value[0] == 'q';
        return true;
    }
    for (size_t i = 0; i < sizeof fields / sizeof fields[0]; i++) {
        char *end = NULL;
        const long number = strtol(value, &end, 10);
        if (strcmp(flag, fields[i].flag) == 0 && end != value && *end == '\0' &&
            number >= fields[i].min && number <= fields[i].max) {
            *fields[i].field = (int)number;
            return true;
        }
    }
    if (strcmp(flag, "--kind") == 0 && (!strcmp(value, "product") || !strcmp(value, "flat"))) {
        shape->flat = value[0] == 'f';
        return true;
    }
    return false;
}
