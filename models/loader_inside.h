/* What loader.c, loader_weight.c and loader_memory.c share; families see loader.h alone. */
#ifndef MODELS_LOADER_INSIDE_H
#define MODELS_LOADER_INSIDE_H

#include "models/loader.h"

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
const struct safetensors_entry *loader_take(struct loader *loader, const struct name *name,
                                            const int64_t *dim, int n_dim, enum elements elements);

/* Copies rows·cols host words into the store's buffer. */
struct tensor store_words(struct store *store, const void *host, int64_t rows, int64_t cols,
                          enum dtype dtype);

/* A weight on the device in F32; NULL after a failure. */
const struct weight *loader_f32_weight(struct loader *loader, const struct tensor *host,
                                       enum weight_kind kind, int n_group, const char *name);

/* The tensor called name as a vector of the store. */
void loader_load_vector(struct loader *loader, struct tensor *vector, int64_t n,
                        const struct name *name);
struct tensor store_vector(struct store *store, const float *host, int64_t n);

/* Tells the caller of model_open how far loading is. */
void loader_report(const struct loader *loader);

static inline float *host_floats(struct loader *loader, int64_t n, const struct name *name)
{
    float *const host = loader->code == ERR_OK ? calloc((size_t)n, sizeof *host) : NULL;
    if (host == NULL && loader->code == ERR_OK) {
        loader->code = err_set(loader->err, ERR_MEMORY, "%s: no memory to load %lld values",
                               name->text, (long long)n);
    }
    return host;
}

/* Reads the vector called name into host[n], and whether that worked. */
static inline bool read_vector(struct loader *loader, float *host, int64_t n,
                               const struct name *name)
{
    const struct safetensors_entry *const entry = loader_take(loader, name, &n, 1, FLOATS);
    if (entry == NULL) {
        return false;
    }
    tensors_widen(host, entry);
    return true;
}

#endif
