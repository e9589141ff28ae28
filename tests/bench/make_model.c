/* Writes a model directory with random weights, to measure full-size shapes without a checkpoint:
 *
 *   make_model DIR [--layers 12] [--width 1024] [--heads 16] [--ff 4096] [--vocab 60000]
 *              [--positions 512] [--memory-layer 6] [--memory-heads 4] [--k 32] [--keys 512]
 *              [--key-width 256] [--kind product|flat] [--dtype f32|bf16]
 *              [--family pkm_transformer|memory_llama [--kv-heads 16] [--output own|tied]
 *              [--values plain|q4]]
 *
 * The defaults are model A of the performance notes: one memory of 512² slots in layer 6. A memory
 * layer of -1 makes the dense twin, a list (3,7,11) as many memories. memory_llama has gated
 * networks and memories ("Memory+") with product keys, which share their values. Weights are
 * uniform with the variance a trained initialiser would give, from a fixed seed, so that nothing
 * overflows and two runs write the same file. Run by tests/bench/run.sh. */
#include "tests/bench/model_plan.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum { PATH_BYTES = 4096 };

/* ---- writing ------------------------------------------------------------------------------- */

/* The header, padded with blanks so that the data behind it is aligned. */
static void write_header(FILE *file, const struct plan *plan)
{
    char *text = NULL;
    size_t bytes = 0;
    FILE *const header = open_memstream(&text, &bytes);
    int64_t offset = 0;
    for (int i = 0; header && i < plan->n; i++) {
        const struct plan_entry *const entry = &plan->entry[i];
        const int64_t end = offset + plan_elems(entry) * (int64_t)dtype_bytes(entry->dtype);
        static const char *const names[DTYPE_N] = {
            [DTYPE_F32] = "F32", [DTYPE_BF16] = "BF16", [DTYPE_F16] = "F16", [DTYPE_Q4] = "U8"};
        fprintf(header, "%s\"%s\":{\"dtype\":\"%s\",\"shape\":[", i ? "," : "{", entry->name,
                names[entry->dtype]);
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

static void write_data(FILE *file, const struct plan_entry *entry, uint64_t *state)
{
    union {
        float f32[4096];
        uint16_t bf16[4096];
        uint8_t codes[4096];
    } block;
    int64_t left = plan_elems(entry);
    while (left > 0) {
        const int64_t n = left < 4096 ? left : 4096;
        for (int64_t i = 0; i < n; i++) {
            *state ^= *state << 13; /* xorshift64 */
            *state ^= *state >> 7;
            *state ^= *state << 17;
            const double unit = (double)(int64_t)*state * 0x1p-63; /* [-1, 1) */
            const float value = (float)(entry->offset + entry->spread * unit);
            switch (entry->dtype) {
            case DTYPE_F32: block.f32[i] = value; break;
            case DTYPE_Q4: block.codes[i] = (uint8_t)(*state >> 32); break;
            case DTYPE_F16: block.bf16[i] = f16_from_f32(value); break;
            default: block.bf16[i] = bf16_from_f32(value);
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

static int write_weights(const char *dir, const struct plan_shape *shape)
{
    char path[PATH_BYTES];
    struct plan plan;
    FILE *const file = plan_new(&plan, shape) ? create(path, dir, "model.safetensors") : NULL;
    uint64_t state = 88172645463325252u;
    if (file) {
        write_header(file, &plan);
        for (int i = 0; i < plan.n; i++) {
            write_data(file, &plan.entry[i], &state);
        }
    }
    plan_free(&plan);
    return finish(file, path);
}

static void write_llama_config(FILE *file, const struct plan_shape *shape)
{
    fprintf(file,
            "{\"model_type\":\"memory_llama\",\"vocab_size\":%d,\"d_model\":%d,\"n_layer\":%d,"
            "\"n_head\":%d,\"d_ff\":%d,\"max_position\":%d,\"rope_theta\":500000,"
            "\"norm_eps\":1e-5,\"tie_output\":%s,\"bos_token_id\":1,\"eos_token_id\":2,"
            "\"add_bos\":true,\"n_kv_head\":%d,\"memories\":[",
            shape->vocab, shape->width, shape->layers, shape->heads, shape->ff, shape->positions,
            shape->tied ? "true" : "false", shape->kv_heads > 0 ? shape->kv_heads : shape->heads);
    for (int m = 0; m < shape->n_memory; m++) {
        fprintf(file,
                "%s{\"layer\":%d,\"n_head\":%d,\"k_top\":%d,\"n_key\":%d,\"d_key\":%d,"
                "\"n_slot\":%lld,\"value_gate\":true,\"value_projection\":true%s}",
                m > 0 ? "," : "", shape->memory_layer[m], shape->memory_heads, shape->k,
                shape->keys, shape->key_width, (long long)plan_slots(shape),
                m > 0 ? ",\"values_of\":0" : "");
    }
    fprintf(file, "]}\n");
}

static int write_config(const char *dir, const struct plan_shape *shape)
{
    char path[PATH_BYTES];
    FILE *const file = create(path, dir, "config.json");
    if (file && shape->is_llama) {
        write_llama_config(file, shape);
    } else if (file) {
        fprintf(file,
                "{\"model_type\":\"pkm_transformer\",\"vocab_size\":%d,\"d_model\":%d,"
                "\"n_layer\":%d,\"n_head\":%d,\"d_ff\":%d,\"max_position\":%d,"
                "\"activation\":\"gelu\",\"norm_eps\":1e-12,\"tie_output\":true,\"bos_token_id\":1,"
                "\"eos_token_id\":1,\"pad_token_id\":2,\"unk_token_id\":3,\"add_bos\":true,"
                "\"memories\":[",
                shape->vocab, shape->width, shape->layers, shape->heads, shape->ff,
                shape->positions);
        for (int m = 0; m < shape->n_memory; m++) {
            fprintf(file,
                    "%s{\"layer\":%d,\"place\":\"in\",\"kind\":\"%s\",\"n_head\":%d,"
                    "\"k_top\":%d,\"n_key\":%d,\"d_key\":%d,\"n_slot\":%lld,"
                    "\"query_batch_norm\":true,\"query_bias\":true}",
                    m > 0 ? "," : "", shape->memory_layer[m], shape->flat ? "flat" : "product",
                    shape->memory_heads, shape->k, shape->keys, shape->key_width,
                    (long long)plan_slots(shape));
        }
        fprintf(file, "]}\n");
    }
    return finish(file, path);
}

int main(int argc, char **argv)
{
    struct plan_shape shape = PLAN_MODEL_A;
    if (argc < 2 || argc % 2 != 0 || argv[1][0] == '-') {
        fprintf(stderr, "make_model: usage: make_model DIR [--FLAG VALUE]...\n");
        return 2;
    }
    for (int i = 2; i < argc; i += 2) {
        if (strcmp(argv[i], "--family") == 0 && (strcmp(argv[i + 1], "memory_llama") == 0 ||
                                                 strcmp(argv[i + 1], "pkm_transformer") == 0)) {
            shape.is_llama = argv[i + 1][0] == 'm';
            continue;
        }
        if (!plan_argument(&shape, argv[i], argv[i + 1])) {
            fprintf(stderr, "make_model: %s %s is not an option or out of bounds\n", argv[i],
                    argv[i + 1]);
            return 2;
        }
    }
    if (shape.is_llama && shape.flat) {
        fprintf(stderr, "make_model: memory_llama has product keys alone\n");
        return 2;
    }
    if (!shape.is_llama && (shape.kv_heads > 0 || shape.tied || shape.has_codes)) {
        fprintf(stderr,
                "make_model: --kv-heads, --output and --values go with --family memory_llama\n");
        return 2;
    }
    mkdir(argv[1], 0777);
    return write_weights(argv[1], &shape) || write_config(argv[1], &shape);
}
