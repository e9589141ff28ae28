/* Weights and workspace for families: see loader.h. */
#include "models/loader_inside.h"

#include <limits.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    ALIGN_FLOATS = 16, /* 64 bytes */
};

/* ---- names and shapes --------------------------------------------------------------------- */

static void shape_text(char *text, size_t bytes, const int64_t *dim, int n_dim)
{
    size_t used = (size_t)snprintf(text, bytes, "[");
    for (int i = 0; i < n_dim && used < bytes; i++) {
        used += (size_t)snprintf(text + used, bytes - used, "%s%lld", i > 0 ? ", " : "",
                                 (long long)dim[i]);
    }
    if (used < bytes) {
        (void)snprintf(text + used, bytes - used, "]");
    }
}

const struct safetensors_entry *loader_take(struct loader *loader, const struct name *name,
                                            const int64_t *dim, int n_dim, enum elements elements)
{
    static const char *const wanted_text[] = {"it must be F32, F16 or BF16",
                                              "weights must be F32, F16, BF16 or I8",
                                              "it holds slots and must be I32"};
    if (loader->code != ERR_OK) {
        return NULL;
    }
    const int index = tensors_find(loader->tensors, name->text);
    if (index < 0) {
        loader->code =
            err_set(loader->err, ERR_FORMAT, "%s: tensor %s is missing: config.json promises it",
                    tensors_n(loader->tensors) > 0 ? tensors_at(loader->tensors, 0)->path
                                                   : "model.safetensors",
                    name->text);
        return NULL;
    }
    const struct safetensors_entry *const entry = tensors_at(loader->tensors, index);
    bool same = entry->n_dim == n_dim;
    for (int i = 0; same && i < n_dim; i++) {
        same = entry->dim[i] == dim[i];
    }
    if (!same) {
        char has[128];
        char wanted[128];
        shape_text(has, sizeof has, entry->dim, entry->n_dim);
        shape_text(wanted, sizeof wanted, dim, n_dim);
        loader->code =
            err_set(loader->err, ERR_FORMAT, "%s: tensor %s has shape %s; config.json makes it %s",
                    entry->path, entry->name, has, wanted);
        return NULL;
    }
    if ((entry->dtype == SAFETENSORS_I32) != (elements == SLOTS) ||
        (entry->dtype == SAFETENSORS_I8 && elements != WEIGHTS)) {
        loader->code =
            err_set(loader->err, ERR_UNSUPPORTED, "%s: tensor %s has dtype %s; %s", entry->path,
                    entry->name, tensors_dtype_name(entry), wanted_text[elements]);
        return NULL;
    }
    if (!loader->taken[index]) {
        loader->taken[index] = true;
        loader->bytes_taken += entry->bytes;
        loader->info->n_param += elements == SLOTS ? 0 : entry->n_elem;
    }
    return entry;
}

void loader_report(const struct loader *loader)
{
    if (loader->options->progress != NULL && loader->bytes_total > 0) {
        loader->options->progress(loader->options->progress_ctx, "pack",
                                  (double)loader->bytes_taken / (double)loader->bytes_total);
    }
}

/* ---- begin, end --------------------------------------------------------------------------- */

/* Scales of I8 rows stay where they are, or go with their weight. */
static bool is_scale(const struct safetensors_entry *entry)
{
    const size_t n = strlen(entry->name);
    return n > 6 && strcmp(entry->name + n - 6, ".scale") == 0;
}

void loader_begin(struct loader *loader, struct store *store, struct backend *be,
                  const struct tensors *tensors, const struct model_options *options,
                  struct model_info *info, struct err *err)
{
    const int n = tensors_n(tensors);
    *loader = (struct loader){.store = store,
                              .tensors = tensors,
                              .options = options,
                              .info = info,
                              .err = err,
                              .code = ERR_OK};
    /* A tensor makes at most two weights (a tied table and matrix; only query networks make more)
     * or one vector. */
    *store = (struct store){.be = be, .n_weight_max = 2 * n, .n_array_max = 2 * n};
    for (int i = 0; i < n; i++) {
        const struct safetensors_entry *const entry = tensors_at(tensors, i);
        loader->bytes_total += entry->bytes;
        if ((entry->n_dim == 1 && !is_scale(entry)) || entry->dtype == SAFETENSORS_I32) {
            store->n_vector_max += (entry->n_elem + ALIGN_FLOATS - 1) / ALIGN_FLOATS * ALIGN_FLOATS;
        }
    }
    loader->taken = calloc((size_t)n + 1, sizeof *loader->taken);
    store->weight = calloc((size_t)store->n_weight_max + 1, sizeof(struct weight *));
    store->array = calloc((size_t)store->n_array_max + 1, sizeof *store->array);
    if (loader->taken == NULL || store->weight == NULL || store->array == NULL) {
        loader->code = err_set(err, ERR_MEMORY, "model: no memory for a list of %d weights", n);
        return;
    }
    const size_t bytes = (size_t)store->n_vector_max * sizeof(float);
    void *vector = NULL;
    loader->code = be->op->buffer_new(be, &vector, bytes, "biases and norms", err);
    store->vector = vector;
    info->weight_bytes += bytes;
}

enum err_code loader_end(struct loader *loader)
{
    for (int i = 0; loader->code == ERR_OK && i < tensors_n(loader->tensors); i++) {
        if (!loader->taken[i]) {
            const struct safetensors_entry *const entry = tensors_at(loader->tensors, i);
            loader->code =
                err_set(loader->err, ERR_FORMAT,
                        "%s: tensor %s is not part of the model that config.json describes",
                        entry->path, entry->name);
        }
    }
    if (loader->code == ERR_OK) {
        loader_report(loader); /* the last tensors may have been vectors, which do not report */
    }
    free(loader->taken);
    loader->taken = NULL;
    return loader->code;
}

void store_close(struct store *store)
{
    for (int i = 0; i < store->n_weight; i++) {
        store->be->op->weight_free(store->be, store->weight[i]);
    }
    free(store->weight);
    for (int i = 0; i < store->n_array; i++) {
        store->be->op->buffer_free(store->be, store->array[i]);
    }
    free(store->array);
    if (store->vector != NULL) {
        store->be->op->buffer_free(store->be, store->vector);
    }
    *store = (struct store){0};
}

/* ---- vectors ------------------------------------------------------------------------------ */

struct tensor store_words(struct store *store, const void *host, int64_t rows, int64_t cols,
                          enum dtype dtype)
{
    const struct tensor words = tensor_make(store->vector + store->n_vector, rows, cols, dtype);
    store->n_vector += (rows * cols + ALIGN_FLOATS - 1) / ALIGN_FLOATS * ALIGN_FLOATS;
    CHECK(store->n_vector <= store->n_vector_max);
    store->be->op->upload(store->be, words, host);
    return words;
}

struct tensor store_vector(struct store *store, const float *host, int64_t n)
{
    return store_words(store, host, 1, n, DTYPE_F32);
}

void loader_load_vector(struct loader *loader, struct tensor *vector, int64_t n,
                        const struct name *name)
{
    float *const host = host_floats(loader, n, name);
    if (host != NULL && read_vector(loader, host, n, name)) {
        *vector = store_vector(loader->store, host, n);
    }
    free(host);
}

void loader_vector(struct loader *loader, struct tensor *vector, int64_t n, const char *format, ...)
{
    struct name name;
    FORMAT_NAME(&name, format);
    loader_load_vector(loader, vector, n, &name);
}

void loader_norm(struct loader *loader, struct norm *norm, int64_t n, const char *format, ...)
{
    struct name name;
    FORMAT_NAME(&name, format);
    const struct name weight = name_join(&name, "weight");
    const struct name bias = name_join(&name, "bias");
    loader_load_vector(loader, &norm->gamma, n, &weight);
    loader_load_vector(loader, &norm->beta, n, &bias);
}

void loader_host(struct loader *loader, float *host, int64_t n, const char *format, ...)
{
    struct name name;
    FORMAT_NAME(&name, format);
    memset(host, 0, (size_t)n * sizeof *host);
    (void)read_vector(loader, host, n, &name);
}

/* ---- arrays ------------------------------------------------------------------------------- */

void loader_computed(struct loader *loader, struct tensor *array, const float *host, int64_t rows,
                     int64_t cols, const char *purpose)
{
    struct store *const store = loader->store;
    const size_t bytes = arena_mul((size_t)rows * sizeof *host, (size_t)cols);
    void *data = NULL;
    if (loader->code != ERR_OK) {
        return;
    }
    loader->code = store->be->op->buffer_new(store->be, &data, bytes, purpose, loader->err);
    if (loader->code == ERR_OK) {
        CHECK(store->n_array < store->n_array_max);
        store->array[store->n_array++] = data;
        loader->info->weight_bytes += bytes;
        *array = tensor_make(data, rows, cols, DTYPE_F32);
        store->be->op->upload(store->be, *array, host);
    }
}

/* The n numbers of a tensor of shape dim[n_dim], which the caller frees; NULL after a failure. */
static float *read_array(struct loader *loader, int64_t n, const int64_t *dim, int n_dim,
                         const struct name *name)
{
    const struct safetensors_entry *const entry = loader_take(loader, name, dim, n_dim, FLOATS);
    const bool fits = loader_fits(loader, (size_t)n * sizeof(float), name->text);
    float *const host = fits ? host_floats(loader, n, name) : NULL;
    if (host != NULL) {
        CHECK(entry->n_elem == n);
        tensors_widen(host, entry);
        tensors_release(entry);
    }
    return host;
}

void loader_array(struct loader *loader, struct tensor *array, int64_t rows, int64_t cols,
                  const int64_t *dim, int n_dim, const char *format, ...)
{
    struct name name;
    FORMAT_NAME(&name, format);
    float *const host = read_array(loader, rows * cols, dim, n_dim, &name);
    if (host != NULL) {
        loader_computed(loader, array, host, rows, cols, name.text);
        loader_report(loader);
    }
    free(host);
}

void loader_array_by_column(struct loader *loader, struct tensor *array, const int64_t dim[3],
                            const char *format, ...)
{
    struct name name;
    FORMAT_NAME(&name, format);
    const int64_t rows = dim[1];
    const int64_t cols = dim[2];
    const int64_t n = dim[0] * rows * cols;
    float *const from = read_array(loader, n, dim, 3, &name);
    float *const to = host_floats(loader, n, &name);
    if (from != NULL && to != NULL) {
        for (int64_t i = 0; i < n; i++) {
            const int64_t matrix = i / (rows * cols);
            const int64_t row = i / cols % rows;
            to[(matrix * cols + i % cols) * rows + row] = from[i];
        }
        loader_computed(loader, array, to, dim[0] * cols, rows, name.text);
        loader_report(loader);
    }
    free(from);
    free(to);
}

/* ---- workspace ---------------------------------------------------------------------------- */

size_t arena_mul(size_t a, size_t b)
{
    size_t product = 0;
    return __builtin_mul_overflow(a, b, &product) ? SIZE_MAX : product;
}

struct tensor arena_take(struct arena *arena, int64_t rows, int64_t cols, enum dtype dtype)
{
    CHECK(rows >= 0 && cols >= 0);
    const size_t offset = arena->used;
    char *const data = arena->base == NULL ? NULL : arena->base + offset;
    const size_t bytes = arena_mul(arena_mul((size_t)rows, (size_t)cols), dtype_bytes(dtype));
    const size_t padded = bytes > SIZE_MAX - 63 ? SIZE_MAX : (bytes + 63) / 64 * 64;
    if (__builtin_add_overflow(arena->used, padded, &arena->used)) {
        arena->used = SIZE_MAX;
    }
    return tensor_make(data, rows, cols, dtype);
}

/* ---- buffers ------------------------------------------------------------------------------- */

enum err_code buffers_open(struct buffers *room, struct backend *be, size_t workspace_bytes,
                           int n_layer, int n_page, int64_t d_kv, enum dtype dtype, struct err *err)
{
    const size_t bytes = arena_mul(buffers_page_bytes(n_layer, d_kv, dtype), (size_t)n_page);
    *room = (struct buffers){.be = be};
    room->page = calloc(2 * (size_t)n_layer, sizeof *room->page);
    if (room->page == NULL) {
        return err_set(err, ERR_MEMORY, "key/value cache: no memory for %d layers", n_layer);
    }
    enum err_code code =
        be->op->buffer_new(be, &room->workspace, workspace_bytes, "activations", err);
    if (code == ERR_OK) {
        code = be->op->buffer_new(be, &room->cache, bytes, "key/value cache", err);
    }
    if (code != ERR_OK) {
        return code;
    }
    struct arena arena = {.base = room->cache};
    for (int i = 0; i < 2 * n_layer; i++) {
        room->page[i] = arena_take(&arena, n_page, KV_PAGE * d_kv, dtype);
    }
    CHECK(arena.used == bytes); /* a page of one layer is a multiple of 64 bytes */
    return ERR_OK;
}

void buffers_close(struct buffers *room)
{
    void *const buffers[] = {room->workspace, room->cache};
    for (int i = 0; i < 2; i++) {
        if (buffers[i] != NULL) {
            room->be->op->buffer_free(room->be, buffers[i]);
        }
    }
    free(room->page);
    *room = (struct buffers){.be = NULL};
}

size_t buffers_page_bytes(int n_layer, int64_t d_kv, enum dtype dtype)
{
    return (size_t)n_layer * 2 * KV_PAGE * (size_t)d_kv * dtype_bytes(dtype);
}
