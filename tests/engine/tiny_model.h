/* A model directory with random weights, small enough for tests: config.json and model.safetensors
 * in a temporary folder. Header only, since each test is one program. */
#ifndef TESTS_ENGINE_TINY_MODEL_H
#define TESTS_ENGINE_TINY_MODEL_H

#include "kernels/err.h"

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* A test that wants a wider one says so before. */
#ifndef TINY_WIDTH
#define TINY_WIDTH 32
#endif

enum {
    TINY_D = TINY_WIDTH,
    TINY_LAYER = 3,
    TINY_HEAD = 4,
    TINY_FF = 2 * TINY_WIDTH,
    TINY_CONTEXT = 96,
    TINY_MEMORY_HEAD = 2,
    TINY_K_TOP = 4,
    TINY_N_KEY = 8,
    TINY_D_KEY = 16,
    TINY_SLOT = TINY_N_KEY * TINY_N_KEY
};

struct tiny_writer {
    char header[1 << 14];
    size_t n_header;
    float *data;
    size_t n_data, n_data_max;
    uint64_t random;
};

/* Uniform in [-1, 1): xorshift, fixed seed, the same model each time. */
static inline float tiny_random(struct tiny_writer *w)
{
    w->random ^= w->random << 13;
    w->random ^= w->random >> 7;
    w->random ^= w->random << 17;
    return (float)((double)(w->random >> 11) * 0x1p-52 - 1.0);
}

/* Adds a tensor of rows·cols values mean ± spread; cols 0: one dimension. */
static inline void tiny_tensor(struct tiny_writer *w, const char *name, int rows, int cols,
                               int depth, float mean, float spread)
{
    const size_t n = (size_t)rows * (size_t)(cols > 0 ? cols : 1) * (size_t)(depth > 0 ? depth : 1);
    CHECK(n <= w->n_data_max - w->n_data);
    char shape[64];
    if (cols == 0) {
        (void)snprintf(shape, sizeof shape, "%d", rows);
    } else if (depth == 0) {
        (void)snprintf(shape, sizeof shape, "%d,%d", rows, cols);
    } else { /* keys: [n_head, 2, n_key, d_half] */
        (void)snprintf(shape, sizeof shape, "%d,2,%d,%d", rows / 2, cols, depth);
    }
    const int added =
        snprintf(w->header + w->n_header, sizeof w->header - w->n_header,
                 "%s\"%s\":{\"dtype\":\"F32\",\"shape\":[%s],\"data_offsets\":[%zu,%zu]}",
                 w->n_header > 1 ? "," : "", name, shape, w->n_data * 4, (w->n_data + n) * 4);
    CHECK(added > 0 && (size_t)added < sizeof w->header - w->n_header);
    w->n_header += (size_t)added;
    for (size_t i = 0; i < n; i++) {
        w->data[w->n_data++] = mean + spread * tiny_random(w);
    }
}

static inline void tiny_linear(struct tiny_writer *w, const char *name, int n_out, int n_in)
{
    char full[160];
    (void)snprintf(full, sizeof full, "%s.weight", name);
    tiny_tensor(w, full, n_out, n_in, 0, 0, 0.4f);
    (void)snprintf(full, sizeof full, "%s.bias", name);
    tiny_tensor(w, full, n_out, 0, 0, 0, 0.2f);
}

static inline void tiny_norm(struct tiny_writer *w, const char *name)
{
    char full[160];
    (void)snprintf(full, sizeof full, "%s.weight", name);
    tiny_tensor(w, full, TINY_D, 0, 0, 1, 0.2f);
    (void)snprintf(full, sizeof full, "%s.bias", name);
    tiny_tensor(w, full, TINY_D, 0, 0, 0, 0.2f);
}

static inline void tiny_weights(struct tiny_writer *w, int n_vocab, int nan_position, int n_lang)
{
    tiny_tensor(w, "embeddings.weight", n_vocab, TINY_D, 0, 0, 0.6f);
    tiny_tensor(w, "position_embeddings.weight", TINY_CONTEXT, TINY_D, 0, 0, 0.6f);
    if (nan_position >= 0) {
        w->data[w->n_data - (size_t)(TINY_CONTEXT - nan_position) * TINY_D] = -NAN;
    }
    tiny_norm(w, "layer_norm_emb");
    static const char *const attention[] = {"q_lin", "k_lin", "v_lin", "out_lin"};
    char name[128];
    for (int i = 0; i < TINY_LAYER; i++) {
        for (int a = 0; a < 4; a++) {
            (void)snprintf(name, sizeof name, "attentions.%d.%s", i, attention[a]);
            tiny_linear(w, name, TINY_D, TINY_D);
        }
        for (int norm = 1; norm <= 2; norm++) {
            (void)snprintf(name, sizeof name, "layer_norm%d.%d", norm, i);
            tiny_norm(w, name);
        }
        if (i != 1) { /* an "in" memory replaces layer 1's network */
            (void)snprintf(name, sizeof name, "ffns.%d.lin1", i);
            tiny_linear(w, name, TINY_FF, TINY_D);
            (void)snprintf(name, sizeof name, "ffns.%d.lin2", i);
            tiny_linear(w, name, TINY_D, TINY_FF);
        }
    }
    tiny_tensor(w, "memories.1_in.keys", 2 * TINY_MEMORY_HEAD, TINY_N_KEY, TINY_D_KEY / 2, 0, 1);
    tiny_tensor(w, "memories.1_in.values.weight", TINY_SLOT, TINY_D, 0, 0, 1);
    tiny_linear(w, "memories.1_in.query_proj.query_mlps.0", TINY_MEMORY_HEAD * TINY_D_KEY, TINY_D);
    tiny_tensor(w, "pred_layer.proj.bias", n_vocab, 0, 0, 0, 0.5f);
    if (n_lang > 0) {
        tiny_tensor(w, "lang_embeddings.weight", n_lang, TINY_D, 0, 0, 0.6f);
    }
}

/* Writes the model into a new folder below $TMPDIR and returns its name, which tiny_model_remove
 * frees with the folder. nan_position: whose embedding holds a NaN, -1 = none. n_lang: 0 or 2. */
static inline char *tiny_model_speaking(int n_vocab, int nan_position, int n_lang)
{
    const size_t dir_max = 256;
    char *const dir = malloc(dir_max);
    CHECK(dir != NULL);
    const char *const tmp = getenv("TMPDIR");
    (void)snprintf(dir, dir_max, "%s/pkmserve-tiny-XXXXXX", tmp != NULL ? tmp : "/tmp");
    CHECK(mkdtemp(dir) != NULL);

    struct tiny_writer *const w = calloc(1, sizeof *w);
    CHECK(w != NULL);
    w->random = 88172645463325252u;
    w->n_data_max =
        (size_t)(n_vocab + TINY_CONTEXT + TINY_SLOT + 9 * TINY_LAYER * TINY_D) * (TINY_D + 1) +
        100000;
    w->data = malloc(w->n_data_max * sizeof(float));
    CHECK(w->data != NULL);
    w->header[w->n_header++] = '{';
    tiny_weights(w, n_vocab, nan_position, n_lang);
    w->header[w->n_header++] = '}';
    while (w->n_header % 8 != 0) {
        w->header[w->n_header++] = ' ';
    }
    char path[300];
    (void)snprintf(path, sizeof path, "%s/model.safetensors", dir);
    FILE *file = fopen(path, "wb");
    CHECK(file != NULL);
    const uint64_t length = w->n_header;
    CHECK(fwrite(&length, 8, 1, file) == 1);
    CHECK(fwrite(w->header, 1, w->n_header, file) == w->n_header);
    CHECK(fwrite(w->data, sizeof(float), w->n_data, file) == w->n_data);
    CHECK(fclose(file) == 0);
    free(w->data);
    free(w);

    (void)snprintf(path, sizeof path, "%s/config.json", dir);
    file = fopen(path, "w");
    CHECK(file != NULL);
    (void)fprintf(file,
                  "{\"model_type\":\"pkm_transformer\",\"vocab_size\":%d,\"d_model\":%d,"
                  "\"n_layer\":%d,\"n_head\":%d,\"d_ff\":%d,\"max_position\":%d,"
                  "\"activation\":\"gelu\",\"norm_eps\":1e-12,\"tie_output\":true,"
                  "\"bos_token_id\":1,\"eos_token_id\":1,\"pad_token_id\":2,\"unk_token_id\":3,"
                  "\"add_bos\":true,\"memories\":[{\"layer\":1,\"place\":\"in\","
                  "\"kind\":\"product\",\"n_head\":%d,\"k_top\":%d,\"n_key\":%d,\"d_key\":%d,"
                  "\"n_slot\":%d,\"query_batch_norm\":false,\"query_bias\":true}]%s}\n",
                  n_vocab, TINY_D, TINY_LAYER, TINY_HEAD, TINY_FF, TINY_CONTEXT, TINY_MEMORY_HEAD,
                  TINY_K_TOP, TINY_N_KEY, TINY_D_KEY, TINY_SLOT,
                  n_lang > 0 ? ",\"languages\":[\"en\",\"fr\"]" : "");
    CHECK(fclose(file) == 0);
    return dir;
}

static inline char *tiny_model(int n_vocab, int nan_position)
{
    return tiny_model_speaking(n_vocab, nan_position, 0);
}

static inline void tiny_model_remove(char *dir)
{
    static const char *const files[] = {"model.safetensors", "config.json"};
    char path[300];
    for (int i = 0; i < 2; i++) {
        (void)snprintf(path, sizeof path, "%s/%s", dir, files[i]);
        (void)unlink(path);
    }
    (void)rmdir(dir);
    free(dir);
}

#endif
