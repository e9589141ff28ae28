/* Writes a model directory with random weights, to measure full-size shapes without a checkpoint:
 *
 *   make_model DIR [--layers 12] [--width 1024] [--heads 16] [--ff 4096] [--vocab 60000]
 *              [--positions 512] [--memory-layer 6] [--memory-heads 4] [--k 32] [--keys 512]
 *              [--key-width 256] [--dtype f32|bf16]
 *
 * The defaults are model A of the performance notes: one memory of 512² slots in layer 6. A memory
 * layer of -1 makes the dense twin. Weights are uniform with the variance a trained initialiser
 * would give, from a fixed seed, so that nothing overflows and two runs write the same file. Run by
 * tests/bench/run.sh. */
#include "kernels/tensor.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum { TENSOR_MAX = 8192, NAME_MAX_BYTES = 80, PATH_BYTES = 4096 };

struct shape {
    int layers, width, heads, ff, vocab, positions, memory_layer, memory_heads, k, keys, key_width;
    enum dtype dtype;
};

struct entry {
    char name[NAME_MAX_BYTES];
    int64_t dim[4];
    int n_dim;
    enum dtype dtype;
    double spread; /* uniform in ±spread */
    double offset; /* added: 1 for norm gains and variances */
};

struct plan {
    struct entry *entry; /* Owner: main */
    int n;
};

/* ---- the list of tensors ------------------------------------------------------------------- */

static struct entry *add(struct plan *plan, const char *prefix, const char *name, double spread,
                         double offset)
{
    if (plan->n == TENSOR_MAX) {
        fprintf(stderr, "make_model: more than %d tensors\n", TENSOR_MAX);
        exit(1);
    }
    struct entry *const entry = &plan->entry[plan->n++];
    *entry = (struct entry){.dtype = DTYPE_F32, .spread = spread, .offset = offset};
    snprintf(entry->name, sizeof entry->name, "%s%s", prefix, name);
    return entry;
}

static void vector(struct plan *plan, const char *prefix, const char *name, int64_t n,
                   double spread, double offset)
{
    struct entry *const entry = add(plan, prefix, name, spread, offset);
    entry->n_dim = 1;
    entry->dim[0] = n;
}

static void matrix(struct plan *plan, const struct shape *shape, const char *prefix,
                   const char *name, int64_t rows, int64_t cols)
{
    struct entry *const entry = add(plan, prefix, name, sqrt(3.0 / (double)cols), 0);
    entry->n_dim = 2;
    entry->dim[0] = rows;
    entry->dim[1] = cols;
    entry->dtype = shape->dtype;
}

static void linear(struct plan *plan, const struct shape *shape, const char *prefix,
                   const char *name, int64_t n_out, int64_t n_in)
{
    char part[NAME_MAX_BYTES];
    snprintf(part, sizeof part, "%s%s.", prefix, name);
    matrix(plan, shape, part, "weight", n_out, n_in);
    vector(plan, part, "bias", n_out, 0.01, 0);
}

static void norm(struct plan *plan, const struct shape *shape, const char *prefix)
{
    vector(plan, prefix, "weight", shape->width, 0.1, 1);
    vector(plan, prefix, "bias", shape->width, 0.1, 0);
}

static void memory(struct plan *plan, const struct shape *shape)
{
    char prefix[NAME_MAX_BYTES];
    const int64_t query = (int64_t)shape->memory_heads * shape->key_width;
    snprintf(prefix, sizeof prefix, "memories.%d_in.", shape->memory_layer);
    struct entry *const keys = add(plan, prefix, "keys", sqrt(3.0 / shape->key_width), 0);
    keys->n_dim = 4;
    keys->dim[0] = shape->memory_heads;
    keys->dim[1] = 2;
    keys->dim[2] = shape->keys;
    keys->dim[3] = shape->key_width / 2;
    keys->dtype = shape->dtype;
    matrix(plan, shape, prefix, "values.weight", (int64_t)shape->keys * shape->keys, shape->width);
    linear(plan, shape, prefix, "query_proj.query_mlps.0", query, shape->width);
    vector(plan, prefix, "query_proj.query_mlps.1.weight", query, 0.1, 1);
    vector(plan, prefix, "query_proj.query_mlps.1.bias", query, 0.1, 0);
    vector(plan, prefix, "query_proj.query_mlps.1.running_mean", query, 0.1, 0);
    vector(plan, prefix, "query_proj.query_mlps.1.running_var", query, 0.1, 1);
}

static void plan_model(struct plan *plan, const struct shape *shape)
{
    const int64_t d = shape->width;
    matrix(plan, shape, "embeddings.", "weight", shape->vocab, d);
    matrix(plan, shape, "position_embeddings.", "weight", shape->positions, d);
    norm(plan, shape, "layer_norm_emb.");
    for (int i = 0; i < shape->layers; i++) {
        static const char *const parts[] = {"q_lin", "k_lin", "v_lin", "out_lin"};
        char prefix[NAME_MAX_BYTES];
        for (int p = 0; p < 4; p++) {
            snprintf(prefix, sizeof prefix, "attentions.%d.", i);
            linear(plan, shape, prefix, parts[p], d, d);
        }
        snprintf(prefix, sizeof prefix, "layer_norm1.%d.", i);
        norm(plan, shape, prefix);
        if (i != shape->memory_layer) {
            snprintf(prefix, sizeof prefix, "ffns.%d.", i);
            linear(plan, shape, prefix, "lin1", shape->ff, d);
            linear(plan, shape, prefix, "lin2", d, shape->ff);
        } else {
            memory(plan, shape);
        }
        snprintf(prefix, sizeof prefix, "layer_norm2.%d.", i);
        norm(plan, shape, prefix);
    }
    vector(plan, "", "pred_layer.proj.bias", shape->vocab, 0.01, 0);
}

/* ---- writing ------------------------------------------------------------------------------- */

static int64_t entry_elems(const struct entry *entry)
{
    int64_t n = 1;
    for (int i = 0; i < entry->n_dim; i++) {
        n *= entry->dim[i];
    }
    return n;
}

/* The header, padded with blanks so that the data behind it is aligned. */
static void write_header(FILE *file, const struct plan *plan)
{
    char *text = NULL;
    size_t bytes = 0;
    FILE *const header = open_memstream(&text, &bytes);
    int64_t offset = 0;
    for (int i = 0; header && i < plan->n; i++) {
        const struct entry *const entry = &plan->entry[i];
        const int64_t end = offset + entry_elems(entry) * (int64_t)dtype_bytes(entry->dtype);
        fprintf(header, "%s\"%s\":{\"dtype\":\"%s\",\"shape\":[", i ? "," : "{", entry->name,
                entry->dtype == DTYPE_F32 ? "F32" : "BF16");
        for (int k = 0; k < entry->n_dim; k++) {
            fprintf(header, "%s%lld", k ? "," : "", (long long)entry->dim[k]);
        }
        fprintf(header, "],\"data_offsets\":[%lld,%lld]}", (long long)offset, (long long)end);
        offset = end;
    }
    if (header) {
        fputc('}', header);
        while (ftell(header) % 64 != 56) { /* the length before it has 8 bytes */
            fputc(' ', header);
        }
        fclose(header);
    }
    const uint64_t length = bytes;
    fwrite(&length, sizeof length, 1, file);
    fwrite(text, 1, bytes, file);
    free(text);
}

static void write_data(FILE *file, const struct entry *entry, uint64_t *state)
{
    union {
        float f32[4096];
        uint16_t bf16[4096];
    } block;
    int64_t left = entry_elems(entry);
    while (left > 0) {
        const int64_t n = left < 4096 ? left : 4096;
        for (int64_t i = 0; i < n; i++) {
            *state ^= *state << 13; /* xorshift64 */
            *state ^= *state >> 7;
            *state ^= *state << 17;
            const double unit = (double)(int64_t)*state * 0x1p-63; /* [-1, 1) */
            const float value = (float)(entry->offset + entry->spread * unit);
            if (entry->dtype == DTYPE_F32) {
                block.f32[i] = value;
            } else {
                block.bf16[i] = bf16_from_f32(value);
            }
        }
        fwrite(&block, dtype_bytes(entry->dtype), (size_t)n, file);
        left -= n;
    }
}

static FILE *create(char path[PATH_BYTES], const char *dir, const char *name)
{
    snprintf(path, PATH_BYTES, "%s/%s", dir, name);
    return fopen(path, "wb");
}

static int finish(FILE *file, const char *path)
{
    const int failed = !file || ferror(file);
    if ((file && fclose(file) != 0) || failed) {
        fprintf(stderr, "make_model: %s cannot be written\n", path);
        return 1;
    }
    return 0;
}

static int write_weights(const char *dir, const struct shape *shape)
{
    char path[PATH_BYTES];
    struct plan plan = {.entry = calloc(TENSOR_MAX, sizeof(struct entry))};
    FILE *const file = plan.entry ? create(path, dir, "model.safetensors") : NULL;
    uint64_t state = 88172645463325252u;
    if (file) {
        plan_model(&plan, shape);
        write_header(file, &plan);
        for (int i = 0; i < plan.n; i++) {
            write_data(file, &plan.entry[i], &state);
        }
    }
    free(plan.entry);
    return finish(file, path);
}

static int write_config(const char *dir, const struct shape *shape)
{
    char path[PATH_BYTES];
    FILE *const file = create(path, dir, "config.json");
    if (file) {
        fprintf(file,
                "{\"model_type\":\"pkm_transformer\",\"vocab_size\":%d,\"d_model\":%d,"
                "\"n_layer\":%d,\"n_head\":%d,\"d_ff\":%d,\"max_position\":%d,"
                "\"activation\":\"gelu\",\"norm_eps\":1e-12,\"tie_output\":true,\"bos_token_id\":1,"
                "\"eos_token_id\":1,\"pad_token_id\":2,\"unk_token_id\":3,\"add_bos\":true,"
                "\"memories\":[",
                shape->vocab, shape->width, shape->layers, shape->heads, shape->ff,
                shape->positions);
        if (shape->memory_layer >= 0) {
            fprintf(file,
                    "{\"layer\":%d,\"place\":\"in\",\"kind\":\"product\",\"n_head\":%d,"
                    "\"k_top\":%d,\"n_key\":%d,\"d_key\":%d,\"n_slot\":%lld,"
                    "\"query_batch_norm\":true,\"query_bias\":true}",
                    shape->memory_layer, shape->memory_heads, shape->k, shape->keys,
                    shape->key_width, (long long)shape->keys * shape->keys);
        }
        fprintf(file, "]}\n");
    }
    return finish(file, path);
}

/* ---- arguments ----------------------------------------------------------------------------- */

static int set_argument(struct shape *shape, const char *flag, const char *value)
{
    const struct {
        const char *flag;
        int *field;
        long min, max;
    } fields[] = {
        {"--layers", &shape->layers, 1, 128},
        {"--width", &shape->width, 16, 16384},
        {"--heads", &shape->heads, 1, 256},
        {"--ff", &shape->ff, 16, 65536},
        {"--vocab", &shape->vocab, 16, 1 << 20},
        {"--positions", &shape->positions, 1, 65536},
        {"--memory-layer", &shape->memory_layer, -1, 127},
        {"--memory-heads", &shape->memory_heads, 1, 64},
        {"--k", &shape->k, 1, 128},
        {"--keys", &shape->keys, 1, 4096},
        {"--key-width", &shape->key_width, 2, 4096},
    };
    if (strcmp(flag, "--dtype") == 0 && (!strcmp(value, "f32") || !strcmp(value, "bf16"))) {
        shape->dtype = strcmp(value, "f32") ? DTYPE_BF16 : DTYPE_F32;
        return 0;
    }
    for (size_t i = 0; i < sizeof fields / sizeof fields[0]; i++) {
        char *end = NULL;
        const long number = strtol(value, &end, 10);
        if (strcmp(flag, fields[i].flag) == 0 && end != value && *end == '\0' &&
            number >= fields[i].min && number <= fields[i].max) {
            *fields[i].field = (int)number;
            return 0;
        }
    }
    fprintf(stderr, "make_model: %s %s is not an option or out of bounds\n", flag, value);
    return 2;
}

int main(int argc, char **argv)
{
    struct shape shape = {12, 1024, 16, 4096, 60000, 512, 6, 4, 32, 512, 256, DTYPE_F32};
    if (argc < 2 || argc % 2 != 0) {
        fprintf(stderr, "make_model: usage: make_model DIR [--FLAG VALUE]...\n");
        return 2;
    }
    for (int i = 2; i < argc; i += 2) {
        const int status = set_argument(&shape, argv[i], argv[i + 1]);
        if (status != 0) {
            return status;
        }
    }
    mkdir(argv[1], 0777);
    return write_weights(argv[1], &shape) || write_config(argv[1], &shape);
}
