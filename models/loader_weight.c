/* Matrices and tables for families: from the files' tensors to the backend's weights. See loader.h.
 */
#include "models/loader_inside.h"

#include <limits.h>
#include <string.h>

enum { N_PART_MAX = 8 /* of one stack */ };

/* ---- making ------------------------------------------------------------------------------ */

/* Bytes that weights may still take: of the machine's memory, or of a device's own. */
static int64_t bytes_left(struct backend *be, const struct model_info *info)
{
    if (!be->is_host) {
        return be->op->memory_available(be);
    }
    const size_t used = info->weight_bytes + info->value_bytes;
    return be->memory_bytes == 0      ? INT64_MAX
           : used <= be->memory_bytes ? (int64_t)(be->memory_bytes - used)
                                      : 0;
}

bool loader_fits(struct loader *loader, size_t bytes, const char *name)
{
    struct backend *const be = loader->store->be;
    const struct model_info *const info = loader->info;
    if (loader->code != ERR_OK) {
        return false;
    }
    const int64_t left = bytes_left(be, info);
    if (left == INT64_MAX || bytes <= (size_t)left) {
        return true;
    }
    const char *const advice =
        be->is_host ? "use a machine with more memory, bf16 weights, or memory-mapped value tables"
        : info->value_placement == PLACEMENT_DEVICE
            ? "put the value tables into host memory (memory placement host), use bf16 weights, or "
              "a device with more memory"
            : "use bf16 weights, or a device with more memory";
    loader->code = err_set(loader->err, ERR_MEMORY,
                           "%s: its %zu bytes do not fit into %s memory: %lld are left beside %zu "
                           "of weights and %zu of value tables; %s",
                           name, bytes, be->is_host ? "the machine's" : "device", (long long)left,
                           info->weight_bytes, info->value_bytes, advice);
    return false;
}

static bool weight_fits(struct loader *loader, const struct tensor *host,
                        const struct weight_desc *desc, const char *name)
{
    /* Host memory that a device reads in place is the system's to grant: it says no by itself. */
    const bool is_free = desc->placement == PLACEMENT_MMAP ||
                         (!loader->store->be->is_host && desc->placement == PLACEMENT_HOST);
    const size_t n = (size_t)host->rows * (size_t)host->cols;
    return is_free || loader_fits(loader, n * dtype_bytes(desc->dtype), name);
}

/* Room for one more weight. */
static bool has_room(struct loader *loader, const char *name)
{
    struct store *const store = loader->store;
    if (store->n_weight < store->n_weight_max) {
        return true;
    }
    const size_t n = 2 * (size_t)store->n_weight_max + 1;
    struct weight **const weight = realloc(store->weight, n * sizeof(struct weight *));
    if (weight == NULL || n > INT_MAX) {
        store->weight = weight != NULL ? weight : store->weight;
        loader->code =
            err_set(loader->err, ERR_MEMORY, "%s: no memory for a list of %zu weights", name, n);
        return false;
    }
    store->weight = weight;
    store->n_weight_max = (int)n;
    return true;
}

/* Hands host to the backend; bytes is where the weight is counted. */
static const struct weight *make_weight(struct loader *loader, const struct tensor *host,
                                        const struct weight_desc *desc, const char *name,
                                        size_t *bytes)
{
    struct store *const store = loader->store;
    struct weight *weight = NULL;
    if (loader->code != ERR_OK || !weight_fits(loader, host, desc, name) ||
        !has_room(loader, name)) {
        return NULL;
    }
    loader->code = store->be->op->weight_new(store->be, &weight, host, desc, name, loader->err);
    if (loader->code != ERR_OK) {
        return NULL;
    }
    store->weight[store->n_weight++] = weight;
    *bytes += desc->placement == PLACEMENT_MMAP ? 0 : store->be->op->weight_bytes(weight);
    loader_report(loader);
    return weight;
}

const struct weight *loader_f32_weight(struct loader *loader, const struct tensor *host,
                                       enum weight_kind kind, int n_group, const char *name)
{
    const struct weight_desc desc = {.kind = kind,
                                     .dtype = DTYPE_F32,
                                     .placement = PLACEMENT_DEVICE,
                                     .n_group = n_group,
                                     .is_split =
                                         kind == WEIGHT_KEYS && loader->info->dtype != DTYPE_F32};
    return make_weight(loader, host, &desc, name, &loader->info->weight_bytes);
}

/* A matrix or table as it stands in the file. */
struct source {
    const struct safetensors_entry *entry; /* NULL after a failure */
    const float *scale;                    /* [rows] of I8: the tensor NAME.scale; else NULL */
};

static struct source take(struct loader *loader, const struct name *name, int64_t rows,
                          int64_t cols)
{
    const int64_t dim[2] = {rows, cols};
    struct source source = {loader_take(loader, name, dim, 2, WEIGHTS), NULL};
    if (source.entry == NULL || source.entry->dtype != SAFETENSORS_I8) {
        return source;
    }
    const struct name scale_name = name_join(name, "scale");
    const int64_t n_param = loader->info->n_param;
    const struct safetensors_entry *const scale =
        loader_take(loader, &scale_name, &rows, 1, FLOATS);
    loader->info->n_param = n_param; /* they are part of their weights */
    if (scale != NULL && scale->dtype != SAFETENSORS_F32) {
        loader->code =
            err_set(loader->err, ERR_UNSUPPORTED, "%s: tensor %s has dtype %s; scales must be F32",
                    scale->path, scale->name, tensors_dtype_name(scale));
    }
    if (loader->code != ERR_OK) {
        return (struct source){NULL, NULL};
    }
    source.scale = (const float *)(const void *)scale->data;
    return source;
}

static void make_matrix(struct loader *loader, const struct weight **weight,
                        const struct tensor *host, const float *scale, const struct name *name)
{
    const struct weight_desc desc = {.kind = WEIGHT_MATRIX,
                                     .dtype = loader->info->dtype,
                                     .placement = PLACEMENT_DEVICE,
                                     .n_group = 1,
                                     .row_scale = scale,
                                     .loss_max = loader->options->int8_max_loss};
    *weight = make_weight(loader, host, &desc, name->text, &loader->info->weight_bytes);
}

static void load_matrix(struct loader *loader, const struct weight **weight, int64_t rows,
                        int64_t cols, const struct name *name)
{
    const struct source source = take(loader, name, rows, cols);
    if (source.entry == NULL) {
        return;
    }
    const struct tensor host = tensors_view(source.entry, rows, cols);
    make_matrix(loader, weight, &host, source.scale, name);
    tensors_release(source.entry);
}

/* A matrix put together of rows of the files: of their own type where they share one, else F32. */
struct assembly {
    struct tensor host;
    float *scale; /* [rows] of I8, else NULL */
    void *owned;  /* Owner */
};

/* Room for rows rows. data is NULL after a failure. */
static struct assembly assemble(struct loader *loader, int64_t rows, int64_t cols, enum dtype dtype,
                                const struct name *name)
{
    /* floats are room enough for elements of any type, and behind them for the scales */
    float *const room = host_floats(loader, rows * (cols + 1), name);
    return (struct assembly){.host = tensor_make(room, rows, cols, dtype),
                             .scale = room != NULL && dtype == DTYPE_I8 ? room + rows * cols : NULL,
                             .owned = room};
}

/* Rows first .. first+n-1 of the source become the rows from at on. */
static void add_rows(struct assembly *a, int64_t at, const struct source *source, int64_t first,
                     int64_t n)
{
    const int64_t cols = a->host.cols;
    const size_t row_bytes = (size_t)cols * dtype_bytes(a->host.dtype);
    char *const to = (char *)a->host.data + (size_t)at * row_bytes;
    if (tensors_dtype(source->entry) != a->host.dtype) {
        CHECK(first == 0 && n * cols == source->entry->n_elem && a->host.dtype == DTYPE_F32);
        tensors_widen((float *)(void *)to, source->entry);
        return;
    }
    memcpy(to, source->entry->data + (size_t)first * row_bytes, (size_t)n * row_bytes);
    if (a->scale != NULL) {
        memcpy(a->scale + at, source->scale + first, (size_t)n * sizeof *a->scale);
    }
}

void loader_matrix(struct loader *loader, const struct weight **weight, int64_t rows, int64_t cols,
                   const char *format, ...)
{
    struct name name;
    FORMAT_NAME(&name, format);
    load_matrix(loader, weight, rows, cols, &name);
}

void loader_matrix_tiled(struct loader *loader, const struct weight **weight, int64_t rows,
                         int64_t cols, int n_tile, const char *format, ...)
{
    struct name name;
    FORMAT_NAME(&name, format);
    if (n_tile == 1) {
        load_matrix(loader, weight, rows, cols, &name);
        return;
    }
    const struct source source = take(loader, &name, rows, cols);
    if (source.entry == NULL) {
        return;
    }
    const enum dtype dtype = tensors_dtype(source.entry);
    struct assembly tiled = assemble(loader, rows, cols * n_tile, dtype, &name);
    if (tiled.owned != NULL) {
        const size_t row_bytes = (size_t)cols * dtype_bytes(dtype);
        for (int64_t i = 0; i < rows * n_tile; i++) {
            memcpy((char *)tiled.host.data + (size_t)i * row_bytes,
                   source.entry->data + (size_t)(i / n_tile) * row_bytes, row_bytes);
        }
        make_matrix(loader, weight, &tiled.host, source.scale, &name);
        tensors_release(source.entry);
    }
    free(tiled.owned);
}

void loader_linear(struct loader *loader, struct linear *linear, int64_t n_out, int64_t n_in,
                   const char *format, ...)
{
    struct name name;
    FORMAT_NAME(&name, format);
    const struct name weight = name_join(&name, "weight");
    const struct name bias = name_join(&name, "bias");
    load_matrix(loader, &linear->weight, n_out, n_in, &weight);
    loader_load_vector(loader, &linear->bias, n_out, &bias);
}

/* The type of a stack: the one its parts share, or F32, which holds the others exactly. */
static enum dtype stack_dtype(struct loader *loader, const struct source *source, int n_part)
{
    if (loader->code != ERR_OK) {
        return DTYPE_F32;
    }
    enum dtype dtype = tensors_dtype(source[0].entry);
    for (int p = 1; p < n_part; p++) {
        const enum dtype other = tensors_dtype(source[p].entry);
        if (other != dtype && (dtype == DTYPE_I8 || other == DTYPE_I8)) {
            loader->code = err_set(loader->err, ERR_UNSUPPORTED,
                                   "%s: tensor %s has dtype %s and tensor %s has %s: they are one "
                                   "matrix here, so all of its parts must be I8, or none",
                                   source[p].entry->path, source[0].entry->name,
                                   tensors_dtype_name(source[0].entry), source[p].entry->name,
                                   tensors_dtype_name(source[p].entry));
            return DTYPE_F32;
        }
        dtype = other == dtype ? dtype : DTYPE_F32;
    }
    return dtype;
}

static void load_stack(struct loader *loader, const struct weight **weight, const struct part *part,
                       int n_part, int64_t n_in, const struct name *name)
{
    struct source source[N_PART_MAX] = {{NULL, NULL}};
    int64_t rows = 0;
    CHECK(n_part >= 1 && n_part <= N_PART_MAX);
    for (int p = 0; p < n_part; p++) {
        const struct name part_name = name_join(name, part[p].name);
        const struct name weight_name = name_join(&part_name, "weight");
        source[p] = take(loader, &weight_name, part[p].rows, n_in);
        rows += part[p].rows;
    }
    struct assembly stack = assemble(loader, rows, n_in, stack_dtype(loader, source, n_part), name);
    int64_t at = 0;
    for (int p = 0; p < n_part && loader->code == ERR_OK; p++) {
        add_rows(&stack, at, &source[p], 0, part[p].rows);
        at += part[p].rows;
        tensors_release(source[p].entry);
    }
    if (loader->code == ERR_OK) {
        make_matrix(loader, weight, &stack.host, stack.scale, name);
    }
    free(stack.owned);
}

void loader_matrix_stack(struct loader *loader, const struct weight **weight,
                         const struct part *part, int n_part, int64_t n_in, const char *format, ...)
{
    struct name name;
    FORMAT_NAME(&name, format);
    load_stack(loader, weight, part, n_part, n_in, &name);
}

void loader_linear_stack(struct loader *loader, struct linear *linear, const char *const *part,
                         int n_part, int64_t n_out, int64_t n_in, const char *format, ...)
{
    struct name name;
    FORMAT_NAME(&name, format);
    struct part parts[N_PART_MAX];
    CHECK(n_part >= 1 && n_part <= N_PART_MAX);
    for (int p = 0; p < n_part; p++) {
        parts[p] = (struct part){part[p], n_out};
    }
    load_stack(loader, &linear->weight, parts, n_part, n_in, &name);
    float *const bias = host_floats(loader, n_part * n_out, &name);
    for (int p = 0; p < n_part && loader->code == ERR_OK; p++) {
        const struct name part_name = name_join(&name, part[p]);
        const struct name bias_name = name_join(&part_name, "bias");
        (void)read_vector(loader, bias + p * n_out, n_out, &bias_name);
    }
    if (loader->code == ERR_OK) {
        linear->bias = store_vector(loader->store, bias, n_part * n_out);
    }
    free(bias);
}

void loader_linear_from(struct loader *loader, struct linear *linear, int64_t n_out, int64_t n_in,
                        int64_t first, const char *format, ...)
{
    struct name name;
    FORMAT_NAME(&name, format);
    const struct name weight_name = name_join(&name, "weight");
    const struct name bias_name = name_join(&name, "bias");
    CHECK(first >= 0 && first <= n_out);
    const struct source source = take(loader, &weight_name, n_out, n_in);
    if (source.entry == NULL) {
        return;
    }
    struct assembly turned =
        assemble(loader, n_out, n_in, tensors_dtype(source.entry), &weight_name);
    float *const bias = host_floats(loader, 2 * n_out, &name); /* twice over: a window is wanted */
    if (loader->code == ERR_OK && read_vector(loader, bias, n_out, &bias_name)) {
        add_rows(&turned, 0, &source, first, n_out - first);
        add_rows(&turned, n_out - first, &source, 0, first);
        tensors_release(source.entry);
        memcpy(bias + n_out, bias, (size_t)n_out * sizeof *bias);
        make_matrix(loader, &linear->weight, &turned.host, turned.scale, &name);
        linear->bias = store_vector(loader->store, bias + first, n_out);
    }
    free(turned.owned);
    free(bias);
}

/* ---- tables ------------------------------------------------------------------------------- */

/* Rows keep their file's precision, but where all weights are to be INT8 or are. A backend without
 * INT8 takes such rows as BF16. */
static enum dtype table_dtype(const struct loader *loader, enum dtype file)
{
    if (loader->info->dtype == DTYPE_I8) {
        return DTYPE_I8;
    }
    if (file == DTYPE_I8) {
        return loader->store->be->has_int8 ? DTYPE_I8 : DTYPE_BF16;
    }
    return file == DTYPE_BF16 ? DTYPE_BF16 : DTYPE_F32;
}

static const struct safetensors_entry *load_table(struct loader *loader,
                                                  const struct weight **weight, int64_t rows,
                                                  int64_t cols, const struct name *name,
                                                  enum placement placement, size_t *bytes)
{
    const struct source source = take(loader, name, rows, cols);
    if (source.entry == NULL) {
        return NULL;
    }
    const struct tensor host = tensors_view(source.entry, rows, cols);
    const struct weight_desc desc = {.kind = WEIGHT_TABLE,
                                     .dtype = table_dtype(loader, host.dtype),
                                     .placement = placement,
                                     .n_group = 1,
                                     .row_scale = source.scale,
                                     .loss_max = loader->options->int8_max_loss};
    *weight = make_weight(loader, &host, &desc, name->text, bytes);
    if (placement != PLACEMENT_MMAP) {
        tensors_release(source.entry);
    }
    return source.entry;
}

void loader_table(struct loader *loader, const struct weight **weight, int64_t rows, int64_t cols,
                  const char *format, ...)
{
    struct name name;
    FORMAT_NAME(&name, format);
    /* Every row of a step reads one: on a device they are small beside its own memory, and fast
     * there; on the host they may as well stay in the file, like the values. */
    const enum placement placement =
        loader->store->be->is_host ? loader->info->value_placement : PLACEMENT_DEVICE;
    (void)load_table(loader, weight, rows, cols, &name, placement, &loader->info->weight_bytes);
}

void loader_values(struct loader *loader, const struct weight **weight, int64_t rows, int64_t cols,
                   const char *format, ...)
{
    struct name name;
    FORMAT_NAME(&name, format);
    const struct safetensors_entry *const entry =
        load_table(loader, weight, rows, cols, &name, loader->info->value_placement,
                   &loader->info->value_bytes);
    if (entry != NULL) {
        loader->info->n_param_memory += rows * cols;
        loader->info->value_dtype = loader->info->value_placement == PLACEMENT_MMAP
                                        ? tensors_dtype(entry)
                                        : table_dtype(loader, tensors_dtype(entry));
    }
}
