/* What blocks.c, blocks_weight.c and blocks_memory.c share; families see blocks.h alone. */
#ifndef MODELS_BLOCKS_INSIDE_H
#define MODELS_BLOCKS_INSIDE_H

#include "models/blocks.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

struct name {
    char text[SAFETENSORS_NAME_MAX];
};

/* Names come from a family's own formats and small numbers, so a name that does not fit is a bug.
 */
#define FORMAT_NAME(name, format)                                                                  \
    do {                                                                                           \
        va_list args;                                                                              \
        va_start(args, format);                                                                    \
        const int length = vsnprintf((name)->text, sizeof(name)->text, format, args);              \
        va_end(args);                                                                              \
        CHECK(length > 0 && (size_t)length < sizeof(name)->text);                                  \
    } while (0)

static inline struct name name_join(const struct name *prefix, const char *suffix)
{
    struct name name;
    const int length = snprintf(name.text, sizeof name.text, "%s.%s", prefix->text, suffix);
    CHECK(length > 0 && (size_t)length < sizeof name.text);
    return name;
}

/* What the elements of a tensor may be. */
enum elements {
    FLOATS,  /* F32, F16, BF16 */
    WEIGHTS, /* the same, or I8 with the scales of its rows: [n, m] */
    SLOTS,   /* I32 */
};

/* The tensor of that name, whose shape must be dim; NULL after a failure. */
const struct safetensors_entry *blocks_take(struct blocks_loader *loader, const struct name *name,
                                            const int64_t *dim, int n_dim, enum elements elements);

/* Copies rows·cols host words into the store's buffer. */
struct tensor blocks_store_words(struct blocks_store *store, const void *host, int64_t rows,
                                 int64_t cols, enum dtype dtype);

/* A weight on the device in F32; NULL after a failure. */
const struct weight *blocks_f32_weight(struct blocks_loader *loader, const struct tensor *host,
                                       enum weight_kind kind, int n_group, const char *name);

/* The tensor called name as a vector of the store. */
void blocks_load_vector(struct blocks_loader *loader, struct tensor *vector, int64_t n,
                        const struct name *name);
struct tensor blocks_store_vector(struct blocks_store *store, const float *host, int64_t n);

/* Tells the caller of model_open how far loading is. */
void blocks_report(const struct blocks_loader *loader);

static inline float *host_floats(struct blocks_loader *loader, int64_t n, const struct name *name)
{
    float *const host = loader->code == ERR_OK ? calloc((size_t)n, sizeof *host) : NULL;
    if (host == NULL && loader->code == ERR_OK) {
        loader->code = err_set(loader->err, ERR_MEMORY, "%s: no memory to load %lld values",
                               name->text, (long long)n);
    }
    return host;
}

/* Reads the vector called name into host[n], and whether that worked. */
static inline bool read_vector(struct blocks_loader *loader, float *host, int64_t n,
                               const struct name *name)
{
    const struct safetensors_entry *const entry = blocks_take(loader, name, &n, 1, FLOATS);
    if (entry == NULL) {
        return false;
    }
    tensors_widen(host, entry);
    return true;
}

#endif
