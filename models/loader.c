/* See loader.h. The file reads: names and shapes; begin and end; vectors and arrays; weights; what
 * a binding table lists. */
#include "models/loader.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { N_PART_MAX = 8 /* of one stack */ };

/* ---- names and shapes --------------------------------------------------------------------- */

#define FORMAT_NAME(name, format)                                                                  \
    do {                                                                                           \
        va_list args;                                                                              \
        va_start(args, format);                                                                    \
        const int length = vsnprintf((name)->text, sizeof(name)->text, format, args);              \
        va_end(args);                                                                              \
        CHECK(length > 0 && (size_t)length < sizeof(name)->text);                                  \
    } while (0)

struct name name_make(const char *format, ...)
{
    struct name name;
    FORMAT_NAME(&name, format);
    return name;
}

struct name name_vmake(const char *format, va_list args)
{
    struct name name;
    const int length = vsnprintf(name.text, sizeof name.text, format, args);
    CHECK(length > 0 && (size_t)length < sizeof name.text);
    return name;
}

struct name name_join(const struct name *prefix, const char *suffix)
{
    struct name name;
    const int length = snprintf(name.text, sizeof name.text, "%s.%s", prefix->text, suffix);
    CHECK(length > 0 && (size_t)length < sizeof name.text);
    return name;
}

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
    static const char *const wanted_text[] = {
        "it must be F32, F16 or BF16", "weights must be F32, F16, BF16 or I8",
        "it holds slots and must be I32", "it holds codes and must be U8"};
    if (loader->code != ERR_OK) {
        return NULL;
    }
    const int index = tensors_find(loader->tensors, name->text);
    if (index < 0) {
        loader->code =
            err_set(loader->err, ERR_FORMAT, "%s: tensor %s is missing: config.json promises it",
                    tensors_path(loader->tensors), name->text);
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
        (entry->dtype == SAFETENSORS_U8) != (elements == CODES) ||
        (entry->dtype == SAFETENSORS_I8 && elements != WEIGHTS)) {
        loader->code =
            err_set(loader->err, ERR_UNSUPPORTED, "%s: tensor %s has dtype %s; %s", entry->path,
                    entry->name, tensors_dtype_name(entry), wanted_text[elements]);
        return NULL;
    }
    if (!loader->taken[index]) {
        loader->taken[index] = true;
        loader->bytes_taken += entry->bytes;
        loader->info->n_param += elements == SLOTS   ? 0
                                 : elements == CODES ? 2 * entry->n_elem
                                                     : entry->n_elem;
    }
    return entry;
}

/* Reports to the caller of model_open how far loading is. */
static void report(const struct loader *loader)
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
    int64_t n_word = 0;
    *loader = (struct loader){.store = store,
                              .tensors = tensors,
                              .options = options,
                              .info = info,
                              .err = err,
                              .taken = calloc((size_t)n + 1, sizeof *loader->taken)};
    for (int i = 0; i < n; i++) {
        const struct safetensors_entry *const entry = tensors_at(tensors, i);
        loader->bytes_total += entry->bytes;
        if ((entry->n_dim == 1 && !is_scale(entry)) || entry->dtype == SAFETENSORS_I32) {
            n_word += store_padded(entry->n_elem);
        }
    }
    loader->code = loader->taken != NULL
                       ? store_open(store, be, n_word, err)
                       : err_set(err, ERR_MEMORY, "model: no memory for a list of %d tensors", n);
    info->weight_bytes += (size_t)n_word * sizeof(float);
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
        report(loader); /* the last tensors may have been vectors, which do not report */
    }
    free(loader->taken);
    loader->taken = NULL;
    return loader->code;
}

/* ---- memory ------------------------------------------------------------------------------- */

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
                           "%s: its %zu bytes do not fit into %s memory: %lld are left after %zu "
                           "of weights and %zu of value tables; %s",
                           name, bytes, be->is_host ? "the machine's" : "device", (long long)left,
                           info->weight_bytes, info->value_bytes, advice);
    return false;
}

float *loader_zeros(struct loader *loader, int64_t n, const char *name)
{
    float *const host = loader->code == ERR_OK ? calloc((size_t)n, sizeof *host) : NULL;
    if (host == NULL && loader->code == ERR_OK) {
        loader->code = err_set(loader->err, ERR_MEMORY, "%s: no memory to load %lld values", name,
                               (long long)n);
    }
    return host;
}

/* ---- vectors and arrays ------------------------------------------------------------------- */

void loader_read(struct loader *loader, float *host, int64_t n, const struct name *name)
{
    const struct safetensors_entry *const entry = loader_take(loader, name, &n, 1, FLOATS);
    if (entry != NULL) {
        tensors_widen(host, entry);
    }
}

float *loader_floats(struct loader *loader, const int64_t *dim, int n_dim, const struct name *name)
{
    const struct safetensors_entry *const entry = loader_take(loader, name, dim, n_dim, FLOATS);
    if (entry == NULL || !loader_fits(loader, (size_t)entry->n_elem * sizeof(float), name->text)) {
        return NULL;
    }
    float *const host = loader_zeros(loader, entry->n_elem, name->text);
    if (host != NULL) {
        tensors_widen(host, entry);
        tensors_release(entry);
    }
    return host;
}

void loader_array(struct loader *loader, struct tensor *array, const float *host, int64_t rows,
                  int64_t cols, const char *name)
{
    if (loader->code == ERR_OK) {
        loader->code = store_array(loader->store, array, host, rows, cols, name, loader->err);
        loader->info->weight_bytes += (size_t)(rows * cols) * sizeof *host;
        report(loader);
    }
}

void loader_words(struct loader *loader, struct tensor *words, const void *host, int64_t rows,
                  int64_t cols, enum dtype dtype)
{
    if (loader->code == ERR_OK) {
        *words = store_words(loader->store, host, rows, cols, dtype);
    }
}

static void load_vector(struct loader *loader, struct tensor *vector, int64_t n,
                        const struct name *name)
{
    float *const host = loader_zeros(loader, n, name->text);
    loader_read(loader, host, n, name);
    loader_words(loader, vector, host, 1, n, DTYPE_F32);
    free(host);
}

void loader_vector(struct loader *loader, struct tensor *vector, int64_t n, const char *format, ...)
{
    struct name name;
    FORMAT_NAME(&name, format);
    load_vector(loader, vector, n, &name);
}

void loader_norm(struct loader *loader, struct norm *norm, int64_t n, const char *format, ...)
{
    struct name name;
    FORMAT_NAME(&name, format);
    const struct name weight = name_join(&name, "weight");
    const struct name bias = name_join(&name, "bias");
    load_vector(loader, &norm->gamma, n, &weight);
    load_vector(loader, &norm->beta, n, &bias);
}

/* ---- weights ------------------------------------------------------------------------------ */

static bool weight_fits(struct loader *loader, const struct tensor *host,
                        const struct weight_desc *desc, const char *name)
{
    /* Host memory that a device reads in place is granted by the system, which refuses by
     * itself. */
    const bool is_free = desc->placement == PLACEMENT_MMAP ||
                         (!loader->store->be->is_host && desc->placement == PLACEMENT_HOST);
    const size_t n = (size_t)host->rows * (size_t)host->cols;
    return is_free || loader_fits(loader, n * dtype_bytes(desc->dtype), name);
}

const struct weight *loader_weight(struct loader *loader, const struct tensor *host,
                                   const struct weight_desc *desc, const char *name, size_t *bytes)
{
    const struct weight *weight = NULL;
    if (loader->code != ERR_OK || !weight_fits(loader, host, desc, name)) {
        return NULL;
    }
    loader->code = store_weight(loader->store, &weight, host, desc, name, loader->err);
    if (loader->code == ERR_OK) {
        *bytes +=
            desc->placement == PLACEMENT_MMAP ? 0 : loader->store->be->op->weight_bytes(weight);
        report(loader);
    }
    return weight;
}

const struct weight *loader_f32_weight(struct loader *loader, const struct tensor *host,
                                       enum weight_kind kind, int n_group, bool is_flat,
                                       const char *name)
{
    /* Of queries only a device's: no CPU that could multiply split ones has been tried with a
     * model. */
    const bool is_split =
        loader->info->dtype != DTYPE_F32 && (kind == WEIGHT_KEYS || !loader->store->be->is_host);
    const struct weight_desc desc = {.kind = kind,
                                     .dtype = DTYPE_F32,
                                     .placement = PLACEMENT_DEVICE,
                                     .n_group = n_group,
                                     .is_flat = is_flat,
                                     .is_split = is_split};
    return loader_weight(loader, host, &desc, name, &loader->info->weight_bytes);
}

const void *loader_scale(struct loader *loader, const struct name *name, int64_t rows,
                         enum safetensors_dtype dtype)
{
    const struct name scale_name = name_join(name, "scale");
    const int64_t n_param = loader->info->n_param;
    const struct safetensors_entry *const scale =
        loader_take(loader, &scale_name, &rows, 1, FLOATS);
    loader->info->n_param = n_param; /* they are part of their weights */
    if (scale != NULL && scale->dtype != dtype) {
        loader->code =
            err_set(loader->err, ERR_UNSUPPORTED, "%s: tensor %s has dtype %s; scales must be %s",
                    scale->path, scale->name, tensors_dtype_name(scale),
                    dtype == SAFETENSORS_F16 ? "F16" : "F32");
    }
    return loader->code == ERR_OK ? scale->data : NULL;
}

struct source loader_source(struct loader *loader, const struct name *name, int64_t rows,
                            int64_t cols)
{
    const int64_t dim[2] = {rows, cols};
    struct source source = {loader_take(loader, name, dim, 2, WEIGHTS), NULL};
    if (source.entry == NULL || source.entry->dtype != SAFETENSORS_I8) {
        return source;
    }
    source.scale = loader_scale(loader, name, rows, SAFETENSORS_F32);
    if (source.scale == NULL) {
        return (struct source){NULL, NULL};
    }
    return source;
}

const struct weight *loader_pack(struct loader *loader, const struct tensor *host,
                                 const float *scale, const struct name *name)
{
    const struct weight_desc desc = {.kind = WEIGHT_MATRIX,
                                     .dtype = loader->info->dtype,
                                     .placement = PLACEMENT_DEVICE,
                                     .n_group = 1,
                                     .row_scale = scale,
                                     .loss_max = loader->options->int8_max_loss};
    return loader_weight(loader, host, &desc, name->text, &loader->info->weight_bytes);
}

static void load_matrix(struct loader *loader, const struct weight **weight, int64_t rows,
                        int64_t cols, const struct name *name)
{
    const struct source source = loader_source(loader, name, rows, cols);
    if (source.entry != NULL) {
        const struct tensor host = tensors_view(source.entry, rows, cols);
        *weight = loader_pack(loader, &host, source.scale, name);
        tensors_release(source.entry);
    }
}

void loader_matrix(struct loader *loader, const struct weight **weight, int64_t rows, int64_t cols,
                   const char *format, ...)
{
    struct name name;
    FORMAT_NAME(&name, format);
    load_matrix(loader, weight, rows, cols, &name);
}

void loader_linear(struct loader *loader, struct linear *linear, int64_t n_out, int64_t n_in,
                   const char *format, ...)
{
    struct name name;
    FORMAT_NAME(&name, format);
    const struct name weight = name_join(&name, "weight");
    const struct name bias = name_join(&name, "bias");
    load_matrix(loader, &linear->weight, n_out, n_in, &weight);
    load_vector(loader, &linear->bias, n_out, &bias);
}

/* ---- stacks ------------------------------------------------------------------------------- */

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

/* The rows of the file that a part takes. */
static int64_t part_rows(const struct loader_part *part)
{
    return part->n > 0 ? part->n : part->rows;
}

/* Copies the rows of part out of its source to out; widens them where the stack is F32 and the file
 * is not. */
static void copy_rows(void *out, enum dtype dtype, const struct source *source,
                      const struct loader_part *part, int64_t n_in)
{
    const size_t row_bytes = (size_t)n_in * dtype_bytes(dtype);
    if (tensors_dtype(source->entry) == dtype) {
        memcpy(out, source->entry->data + (size_t)part->first * row_bytes,
               (size_t)part_rows(part) * row_bytes);
        return;
    }
    CHECK(part_rows(part) == part->rows && dtype == DTYPE_F32);
    tensors_widen(out, source->entry);
}

static void stack_weights(struct loader *loader, const struct weight **weight,
                          const struct loader_part *part, int n_part, int64_t n_in,
                          const struct name *name)
{
    struct source source[N_PART_MAX] = {{NULL, NULL}};
    int64_t rows = 0;
    for (int p = 0; p < n_part; p++) {
        const struct name part_name = name_join(name, part[p].name);
        const struct name weight_name = name_join(&part_name, "weight");
        source[p] = loader_source(loader, &weight_name, part[p].rows, n_in);
        rows += part_rows(&part[p]);
    }
    const enum dtype dtype = stack_dtype(loader, source, n_part);
    /* Floats are large enough for elements of any type, and for the scales of I8 behind them. */
    float *const data = loader_zeros(loader, rows * (n_in + 1), name->text);
    float *const scale = data != NULL && dtype == DTYPE_I8 ? data + rows * n_in : NULL;
    int64_t row = 0;
    for (int p = 0; p < n_part && data != NULL; p++) {
        char *const out = (char *)data + (size_t)row * (size_t)n_in * dtype_bytes(dtype);
        copy_rows(out, dtype, &source[p], &part[p], n_in);
        tensors_release(source[p].entry);
        if (scale != NULL) {
            memcpy(scale + row, source[p].scale + part[p].first,
                   (size_t)part_rows(&part[p]) * sizeof *scale);
        }
        row += part_rows(&part[p]);
    }
    const struct tensor host = tensor_make(data, rows, n_in, dtype);
    *weight = loader_pack(loader, &host, scale, name);
    free(data);
}

static void stack_biases(struct loader *loader, struct tensor *bias, const struct loader_part *part,
                         int n_part, const struct name *name)
{
    int64_t n_all = 0; /* numbers in the files */
    for (int p = 0; p < n_part; p++) {
        n_all += part[p].rows;
    }
    float *const host = loader_zeros(loader, n_all, name->text);
    int64_t n = 0;
    for (int p = 0; p < n_part && loader->code == ERR_OK; p++) {
        const struct name part_name = name_join(name, part[p].name);
        const struct name bias_name = name_join(&part_name, "bias");
        loader_read(loader, host + n, part[p].rows, &bias_name);
        memmove(host + n, host + n + part[p].first, (size_t)part_rows(&part[p]) * sizeof *host);
        n += part_rows(&part[p]);
    }
    loader_words(loader, bias, host, 1, n, DTYPE_F32);
    free(host);
}

void loader_stack(struct loader *loader, struct linear *linear, const struct loader_part *part,
                  int n_part, int64_t n_in, bool has_bias, const char *format, ...)
{
    struct name name;
    FORMAT_NAME(&name, format);
    CHECK(n_part >= 1 && n_part <= N_PART_MAX);
    for (int p = 0; p < n_part; p++) {
        CHECK(part[p].first >= 0 && part[p].first + part_rows(&part[p]) <= part[p].rows);
    }
    stack_weights(loader, &linear->weight, part, n_part, n_in, &name);
    if (has_bias) {
        stack_biases(loader, &linear->bias, part, n_part, &name);
    }
}

/* ---- tables ------------------------------------------------------------------------------- */
