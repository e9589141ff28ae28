/* Random weights in memory, behind the interface of models/tensors.h: see random_model.h. */
#include "tests/bench/random_model.h"

#include "models/config.h"
#include "models/network.h"
#include "models/tensors.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* ---- the pool ------------------------------------------------------------------------------ */

enum {
    POOL_BYTES = 1 << 25, /* of distinct numbers */
    POOL_SHIFT = 4099,    /* elements from the start of one view to that of the next: a prime, so
                           * that rows do not line up */
    POOL_VIEWS = 1024
};

struct random_pool {
    enum dtype dtype;
    unsigned char *data; /* Owner: a mapping of mapped_bytes */
    size_t mapped_bytes;
};

static uint64_t next(uint64_t *state)
{
    *state ^= *state << 13; /* xorshift64 */
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

/* Uniform in [-1, 1). */
static double next_unit(uint64_t *state)
{
    return (double)(int64_t)next(state) * 0x1p-63;
}

static void pool_fill(const struct random_pool *pool)
{
    uint64_t state = 88172645463325252u;
    const size_t n = POOL_BYTES / dtype_bytes(pool->dtype);
    for (size_t i = 0; i < n; i++) {
        const float value = (float)(0.05 * next_unit(&state));
        if (pool->dtype == DTYPE_F32) {
            ((float *)(void *)pool->data)[i] = value;
        } else {
            ((uint16_t *)(void *)pool->data)[i] = bf16_from_f32(value);
        }
    }
}

/* Maps the file of POOL_BYTES behind itself until mapped_bytes are covered. */
static bool pool_map(struct random_pool *pool, int file)
{
    void *const range =
        mmap(NULL, pool->mapped_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (range == MAP_FAILED) {
        return false;
    }
    pool->data = range;
    for (size_t at = 0; at < pool->mapped_bytes; at += POOL_BYTES) {
        if (mmap(pool->data + at, POOL_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file,
                 0) == MAP_FAILED) {
            return false;
        }
    }
    return true;
}

enum err_code random_pool_open(struct random_pool **pool, enum dtype dtype, int64_t n_elem_max,
                               struct err *err)
{
    CHECK(dtype == DTYPE_F32 || dtype == DTYPE_BF16);
    const size_t n_elem = (size_t)n_elem_max + (size_t)POOL_SHIFT * POOL_VIEWS;
    *pool = calloc(1, sizeof **pool);
    const int file = memfd_create("random weights", MFD_CLOEXEC);
    if (*pool == NULL || file < 0 || ftruncate(file, POOL_BYTES) != 0) {
        goto fail;
    }
    (*pool)->dtype = dtype;
    (*pool)->mapped_bytes =
        (n_elem * dtype_bytes(dtype) + POOL_BYTES - 1) / POOL_BYTES * POOL_BYTES;
    if (!pool_map(*pool, file)) {
        goto fail;
    }
    pool_fill(*pool);
    (void)close(file);
    return ERR_OK;
fail:
    err_set(err, ERR_MEMORY, "no memory for %zu random numbers: %s", n_elem, strerror(errno));
    if (file >= 0) {
        (void)close(file);
    }
    random_pool_close(*pool);
    *pool = NULL;
    return ERR_MEMORY;
}

void random_pool_close(struct random_pool *pool)
{
    if (pool == NULL) {
        return;
    }
    if (pool->data != NULL) {
        (void)munmap(pool->data, pool->mapped_bytes);
    }
    free(pool);
}

struct tensor random_pool_view(const struct random_pool *pool, int i, int64_t rows, int64_t cols)
{
    const size_t first = (size_t)(i % POOL_VIEWS) * POOL_SHIFT * dtype_bytes(pool->dtype);
    CHECK(first + (size_t)rows * (size_t)cols * dtype_bytes(pool->dtype) <= pool->mapped_bytes);
    return tensor_make(pool->data + first, rows, cols, pool->dtype);
}

/* ---- models/tensors.h ---------------------------------------------------------------------- */

struct tensors {
    struct safetensors_entry *entry; /* Owner. [n] in the order of the plan */
    int n;
    float *vector; /* Owner: of all entries of one dimension */
    struct random_pool *pool;
};

void tensors_close(struct tensors *tensors)
{
    if (tensors != NULL) {
        random_pool_close(tensors->pool);
        free(tensors->vector);
        free(tensors->entry);
        free(tensors);
    }
}

/* There are none. */
enum err_code tensors_check_files(const struct tensors *tensors, bool reads_only, struct err *err)
{
    (void)tensors;
    (void)reads_only;
    (void)err;
    return ERR_OK;
}

const char *tensors_path(const struct tensors *tensors)
{
    (void)tensors;
    return "random weights";
}

int tensors_n(const struct tensors *tensors)
{
    return tensors->n;
}

const struct safetensors_entry *tensors_at(const struct tensors *tensors, int index)
{
    return &tensors->entry[index];
}

int tensors_find(const struct tensors *tensors, const char *name)
{
    for (int i = 0; i < tensors->n; i++) {
        if (strcmp(tensors->entry[i].name, name) == 0) {
            return i;
        }
    }
    return -1;
}

const char *tensors_dtype_name(const struct safetensors_entry *entry)
{
    return dtype_name(tensors_dtype(entry));
}

enum dtype tensors_dtype(const struct safetensors_entry *entry)
{
    return entry->dtype == SAFETENSORS_F32 ? DTYPE_F32 : DTYPE_BF16;
}

struct tensor tensors_view(const struct safetensors_entry *entry, int64_t rows, int64_t cols)
{
    union { /* the numbers are ours and writable */
        const unsigned char *from;
        void *to;
    } data = {.from = entry->data};
    return tensor_make(data.to, rows, cols, tensors_dtype(entry));
}

void tensors_widen(float *out, const struct safetensors_entry *entry)
{
    for (int64_t i = 0; i < entry->n_elem; i++) {
        if (entry->dtype == SAFETENSORS_F32) {
            out[i] = ((const float *)(const void *)entry->data)[i];
        } else {
            out[i] = bf16_to_f32(((const uint16_t *)(const void *)entry->data)[i]);
        }
    }
}

void tensors_release(const struct safetensors_entry *entry)
{
    (void)entry;
}

/* ---- the tensors of a plan ----------------------------------------------------------------- */

static void fill_entry(struct tensors *tensors, const struct plan_entry *from, int64_t *n_vector,
                       uint64_t *state)
{
    struct safetensors_entry *const entry = &tensors->entry[tensors->n];
    *entry = (struct safetensors_entry){.path = "memory",
                                        .n_dim = from->n_dim,
                                        .n_elem = plan_elems(from),
                                        .dtype = from->dtype == DTYPE_F32 ? SAFETENSORS_F32
                                                                          : SAFETENSORS_BF16};
    memcpy(entry->name, from->name, sizeof from->name);
    memcpy(entry->dim, from->dim, sizeof from->dim);
    entry->bytes = (size_t)entry->n_elem * dtype_bytes(from->dtype);
    if (from->n_dim > 1) {
        entry->data = random_pool_view(tensors->pool, tensors->n, entry->n_elem, 1).data;
    } else {
        float *const vector = tensors->vector + *n_vector;
        *n_vector += entry->n_elem;
        for (int64_t i = 0; i < entry->n_elem; i++) {
            vector[i] = (float)(from->offset + from->spread * next_unit(state));
        }
        entry->data = (const unsigned char *)vector;
    }
    tensors->n++;
}

static enum err_code tensors_make(struct tensors **made, const struct plan_shape *shape,
                                  struct err *err)
{
    struct plan plan = {0};
    struct tensors *const tensors = calloc(1, sizeof *tensors);
    int64_t n_vector = 0;
    int64_t n_largest = 0;
    *made = tensors;
    if (tensors == NULL || !plan_new(&plan, shape)) {
        return err_set(err, ERR_MEMORY, "no memory for the list of tensors");
    }
    for (int i = 0; i < plan.n; i++) {
        const int64_t n = plan_elems(&plan.entry[i]);
        n_vector += plan.entry[i].n_dim == 1 ? n : 0;
        n_largest = n > n_largest ? n : n_largest;
    }
    tensors->entry = calloc((size_t)plan.n, sizeof *tensors->entry);
    tensors->vector = calloc((size_t)n_vector, sizeof *tensors->vector);
    enum err_code code = random_pool_open(&tensors->pool, shape->dtype, n_largest, err);
    if (code == ERR_OK && (tensors->entry == NULL || tensors->vector == NULL)) {
        code = err_set(err, ERR_MEMORY, "no memory for %d tensors", plan.n);
    }
    uint64_t state = 0x9e3779b97f4a7c15u;
    n_vector = 0;
    for (int i = 0; i < plan.n && code == ERR_OK; i++) {
        fill_entry(tensors, &plan.entry[i], &n_vector, &state);
    }
    plan_free(&plan);
    return code;
}

/* ---- the model ------------------------------------------------------------------------------ */

static void describe(struct model_info *info, const struct plan_shape *shape, enum placement values)
{
    *info = (struct model_info){.n_vocab = shape->vocab,
                                .d_model = shape->width,
                                .d_attention = shape->width,
                                .n_layer = shape->layers,
                                .n_head = shape->heads,
                                .n_kv_head = shape->heads,
                                .d_ff = shape->ff,
                                .context = shape->positions,
                                .act = ACT_GELU,
                                .tie_output = true,
                                .file_dtype = shape->dtype,
                                .value_dtype = shape->dtype,
                                .dtype = shape->dtype,
                                .cache_dtype = plan_cache(shape),
                                .value_placement = values};
    info->n_memory = shape->n_memory;
    for (int m = 0; m < shape->n_memory; m++) {
        const struct pkm_shape memory = {shape->flat ? PKM_FLAT : PKM_PRODUCT,
                                         shape->memory_heads,
                                         shape->k,
                                         shape->keys,
                                         shape->key_width,
                                         false};
        info->memory[m] = (struct pkm_info){.layer = shape->memory_layer[m],
                                            .values_of = m,
                                            .shape = memory,
                                            .n_slot = plan_slots(shape),
                                            .d_value = shape->width};
    }
}

extern const struct model_family pkm_transformer_family;

static void configure(struct config *config, const struct model_info *info)
{
    config->family = &pkm_transformer_family;
    config->n_vocab = info->n_vocab;
    config->d_model = info->d_model;
    config->n_layer = info->n_layer;
    config->n_head = info->n_head;
    config->n_kv_head = info->n_kv_head;
    config->d_head = info->d_attention / info->n_head;
    config->d_ff = info->d_ff;
    config->context = info->context;
    config->act = info->act;
    config->norm_eps = 1e-12f;
    config->tie_output = info->tie_output;
    config->n_memory = info->n_memory;
    for (int m = 0; m < info->n_memory; m++) {
        config->memory[m] = (struct config_memory){
            .info = info->memory[m], .query_batch_norm = true, .query_bias = true};
    }
}

enum err_code random_model_open(struct model **model, struct backend *be,
                                const struct plan_shape *shape, enum placement values,
                                struct err *err)
{
    *model = NULL;
    const int last = shape->n_memory > 0 ? shape->memory_layer[shape->n_memory - 1] : -1;
    if (last >= shape->layers || shape->width % shape->heads != 0) {
        return err_set(err, ERR_ARGUMENT,
                       "memory layer %d of %d layers, or width %d for %d heads, makes no model",
                       last, shape->layers, shape->width, shape->heads);
    }
    struct tensors *tensors = NULL;
    struct model_info *const info = calloc(1, sizeof *info);
    struct config *const config = calloc(1, sizeof *config);
    enum err_code code = ERR_OK;
    if (info == NULL || config == NULL) {
        code = err_set(err, ERR_MEMORY, "no memory for a configuration");
        goto done;
    }
    describe(info, shape, values);
    configure(config, info);
    const struct model_options options = {.dtype = "auto", .value_placement = values};
    code = tensors_make(&tensors, shape, err);
    if (code == ERR_OK) {
        code = model_new(model, be, config, tensors, &options, info, err);
    } else {
        tensors_close(tensors);
    }
done:
    free(info);
    free(config);
    return code;
}
