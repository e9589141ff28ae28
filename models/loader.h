/* The loader: takes the checked tensors of a model directory into weights of the backend.
 *
 * A family's binding table is a list of loader_* calls between loader_begin and loader_end. The
 * loader is sticky: after the first failure the calls that follow do nothing, and loader_end
 * reports it. loader_end also refuses tensors that no call has taken, so a model directory holds
 * exactly what the family reads. Names are printf formats; the name of a linear layer or a norm is
 * the part before ".weight" and ".bias".
 *
 * Everything made goes into a struct store, which model.c closes. */
#ifndef MODELS_LOADER_H
#define MODELS_LOADER_H

#include "models/layers.h"
#include "models/store.h"
#include "models/tensors.h"

#include <stdarg.h>

struct loader {
    struct store *store; /* Borrowed, as are all below */
    const struct tensors *tensors;
    const struct model_options *options;
    struct model_info *info; /* its dtype is read; parameters and bytes are counted into it */
    struct err *err;
    enum err_code code; /* the first failure */
    bool *taken;        /* Owner. [tensors_n] */
    size_t bytes_taken, bytes_total;
};

void loader_begin(struct loader *loader, struct store *store, struct backend *be,
                  const struct tensors *tensors, const struct model_options *options,
                  struct model_info *info, struct err *err);
enum err_code loader_end(struct loader *loader);

/* ---- what a binding table lists ----------------------------------------------------------- */

/* [n] → vector. */
void loader_vector(struct loader *loader, struct tensor *vector, int64_t n, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
/* name.weight, name.bias, both [n]. */
void loader_norm(struct loader *loader, struct norm *norm, int64_t n, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
/* [rows, cols] → a packed matrix of info->dtype. */
void loader_matrix(struct loader *loader, const struct weight **weight, int64_t rows, int64_t cols,
                   const char *format, ...) __attribute__((format(printf, 5, 6)));
/* name.weight [n_out, n_in], name.bias [n_out]. */
void loader_linear(struct loader *loader, struct linear *linear, int64_t n_out, int64_t n_in,
                   const char *format, ...) __attribute__((format(printf, 5, 6)));
/* [rows, cols] → a table that is read by rows (embeddings): in the memory of a device that has its
 * own, else where info->value_placement says. It keeps the file's precision in every placement, so
 * all placements give the same bits. */
void loader_table(struct loader *loader, const struct weight **weight, int64_t rows, int64_t cols,
                  const char *format, ...) __attribute__((format(printf, 5, 6)));
/* The same, as the values of a product-key memory: always where info->value_placement says. In the
 * file it may be Q4 too: codes [rows, cols / 2] of U8, and the F16 tensor NAME.scale [rows]. */
void loader_values(struct loader *loader, const struct weight **weight, int64_t rows, int64_t cols,
                   const char *format, ...) __attribute__((format(printf, 5, 6)));
/* The same, as its experts, which are not Q4. */
void loader_experts(struct loader *loader, const struct weight **weight, int64_t rows, int64_t cols,
                    const char *format, ...) __attribute__((format(printf, 5, 6)));

/* Linear layers with the same input as one: the outputs of part 0, then those of part 1, ... Each
 * part is prefix.name.weight [rows, n_in] and, if has_bias, prefix.name.bias [rows]; or n of these
 * rows, from first on. Parts are all I8 or none; they keep a floating type that all share, and
 * become F32 if they differ. */
struct loader_part {
    const char *name;
    int64_t rows;
    int64_t first, n; /* n 0 = all rows */
};
void loader_stack(struct loader *loader, struct linear *linear, const struct loader_part *part,
                  int n_part, int64_t n_in, bool has_bias, const char *format, ...)
    __attribute__((format(printf, 7, 8)));

/* ---- pieces, for parameters that are computed from tensors -------------------------------- */

struct name {
    char text[SAFETENSORS_NAME_MAX];
};

/* Names come from a family's own formats and small numbers, so one that does not fit is a bug. */
struct name name_vmake(const char *format, va_list args) __attribute__((format(printf, 1, 0)));
struct name name_make(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* prefix.suffix */
struct name name_join(const struct name *prefix, const char *suffix);

/* What the elements of a tensor may be. */
enum elements {
    FLOATS,  /* F32, F16, BF16 */
    WEIGHTS, /* the same, or I8 with the scales of its rows: [n, m] */
    SLOTS,   /* I32 */
    CODES,   /* U8: two of 4 bits each, kernels/tensor.h's Q4: [n, m/2] */
};

/* The tensor of that name, whose shape must be dim; NULL after a failure. */
const struct safetensors_entry *loader_take(struct loader *loader, const struct name *name,
                                            const int64_t *dim, int n_dim, enum elements elements);
/* True if bytes more fit into the backend's memory; else sets the error, which starts with name.
 * Asked before they are allocated: Linux grants memory that it does not have, and would kill the
 * process later. */
bool loader_fits(struct loader *loader, size_t bytes, const char *name);
/* n zeros in host memory. NULL after a failure; the message starts with name. Owner: the caller. */
float *loader_zeros(struct loader *loader, int64_t n, const char *name);
/* The numbers of the tensor of that name as F32, for an array: loader_fits is asked. NULL after a
 * failure. Owner: the caller. */
float *loader_floats(struct loader *loader, const int64_t *dim, int n_dim, const struct name *name);
/* The vector called name into host[n]; nothing after a failure. */
void loader_read(struct loader *loader, float *host, int64_t n, const struct name *name);

/* These copy from host, which stays the caller's; after a failure they do nothing, and host may be
 * NULL. An array has a buffer of its own: ask loader_fits first. Words (biases, slot maps) share a
 * buffer that is as large as all one-dimensional tensors and those of I32. */
void loader_array(struct loader *loader, struct tensor *array, const float *host, int64_t rows,
                  int64_t cols, const char *name);
void loader_words(struct loader *loader, struct tensor *words, const void *host, int64_t rows,
                  int64_t cols, enum dtype dtype);

/* A weight on the device in F32, whatever info->dtype is; is_flat: keys of a PKM_FLAT memory. NULL
 * after a failure. */
const struct weight *loader_f32_weight(struct loader *loader, const struct tensor *host,
                                       enum weight_kind kind, int n_group, bool is_flat,
                                       const char *name);

/* Hands host to the backend; bytes is where the weight is counted. NULL after a failure. */
const struct weight *loader_weight(struct loader *loader, const struct tensor *host,
                                   const struct weight_desc *desc, const char *name, size_t *bytes);
/* The scales of the rows of the tensor called name, NAME.scale; NULL after a failure. */
const void *loader_scale(struct loader *loader, const struct name *name, int64_t rows,
                         enum safetensors_dtype dtype);

/* A matrix or table as it stands in the file. */
struct source {
    const struct safetensors_entry *entry; /* NULL after a failure */
    const float *scale;                    /* [rows] of I8: the tensor NAME.scale; else NULL */
};
struct source loader_source(struct loader *loader, const struct name *name, int64_t rows,
                            int64_t cols);
/* A packed matrix of info->dtype, of host and the scale of its rows (NULL unless I8); NULL after a
 * failure. */
const struct weight *loader_pack(struct loader *loader, const struct tensor *host,
                                 const float *scale, const struct name *name);

#endif
