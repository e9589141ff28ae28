/* What families share: taking checked tensors into backend weights, and laying out workspace.
 *
 * A family's binding table is a list of loader_* calls between loader_begin and loader_end. The
 * loader is sticky: after the first failure the calls that follow do nothing, and loader_end
 * reports it. loader_end also refuses tensors that no call has taken, so a model directory holds
 * exactly what the family reads. Names are printf formats; a linear layer's or norm's name is the
 * part before ".weight" and ".bias".
 *
 * Everything made is owned by one struct store, which the family closes once. */
#ifndef MODELS_LOADER_H
#define MODELS_LOADER_H

#include "models/model.h"
#include "models/tensors.h"

/* A linear layer, and a norm. Borrowed from the store. */
struct linear {
    const struct weight *weight; /* [n_out, n_in] */
    struct tensor bias;          /* [1, n_out]; data NULL = none */
};

/* The two of a feed-forward network, as the op takes them. */
static inline struct ffn linear_ffn(const struct linear *up, const struct linear *down,
                                    enum act act)
{
    return (struct ffn){.up = up->weight,
                        .down = down->weight,
                        .up_bias = up->bias,
                        .down_bias = down->bias,
                        .act = act};
}

struct norm {
    struct tensor gamma, beta; /* [1, d] */
};

/* n linear layers side by side, each from n_in columns of its own to n_out of its own; or, with
 * n = 1, a single one. */
struct nets {
    int n;
    int64_t n_in, n_out;
    int first;          /* their weights are weight[first .. first+n-1] of the store */
    struct tensor bias; /* [1, n·n_out], or data NULL */
};

/* Owner of all weights and vectors of a model. */
struct store {
    struct backend *be;     /* Borrowed */
    struct weight **weight; /* Owner. [n_weight] of n_weight_max */
    int n_weight, n_weight_max;
    float *vector; /* Owner: one buffer for all vectors and slot maps. [n_vector] of n_vector_max
                    * words used */
    int64_t n_vector, n_vector_max;
    void **array; /* Owner: a buffer each. [n_array] of n_array_max */
    int n_array, n_array_max;
};

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
void store_close(struct store *store); /* a zeroed store is fine */

/* [n] → vector. */
void loader_vector(struct loader *loader, struct tensor *vector, int64_t n, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
/* [n] → host[n], for what a family computes from it. Zeros after a failure. */
void loader_host(struct loader *loader, float *host, int64_t n, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
/* A tensor of any shape dim[n_dim] → [rows, cols] in F32, as ops read it. */
void loader_array(struct loader *loader, struct tensor *array, int64_t rows, int64_t cols,
                  const int64_t *dim, int n_dim, const char *format, ...)
    __attribute__((format(printf, 7, 8)));
/* dim[0] matrices [dim[1], dim[2]], each by column → [dim[0]·dim[2], dim[1]]. */
void loader_array_by_column(struct loader *loader, struct tensor *array, const int64_t dim[3],
                            const char *format, ...) __attribute__((format(printf, 4, 5)));
/* Whether bytes more fit into the backend's memory, else the failure that says so: asked before
 * they are taken, since the system may grant what it cannot give and kill us for it later. */
bool loader_fits(struct loader *loader, size_t bytes, const char *name);
/* As loader_array, of computed numbers that were asked to fit; at most one for each tensor of the
 * files. */
void loader_computed(struct loader *loader, struct tensor *array, const float *host, int64_t rows,
                     int64_t cols, const char *purpose);
/* name.weight, name.bias, both [n]. */
void loader_norm(struct loader *loader, struct norm *norm, int64_t n, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
/* [rows, cols] → a packed matrix of info->dtype. */
void loader_matrix(struct loader *loader, const struct weight **weight, int64_t rows, int64_t cols,
                   const char *format, ...) __attribute__((format(printf, 5, 6)));
/* The same, n_tile times side by side: [rows, n_tile·cols]. */
void loader_matrix_tiled(struct loader *loader, const struct weight **weight, int64_t rows,
                         int64_t cols, int n_tile, const char *format, ...)
    __attribute__((format(printf, 6, 7)));
/* name.weight [n_out, n_in], name.bias [n_out]. */
void loader_linear(struct loader *loader, struct linear *linear, int64_t n_out, int64_t n_in,
                   const char *format, ...) __attribute__((format(printf, 5, 6)));
/* The same, with its outputs in the order first, first + 1, .. n_out - 1, 0, .. first - 1. */
void loader_linear_from(struct loader *loader, struct linear *linear, int64_t n_out, int64_t n_in,
                        int64_t first, const char *format, ...)
    __attribute__((format(printf, 6, 7)));
/* n_part linear layers name.<part[p]> with the same input, as one: the outputs of part 0, then of
 * part 1, ... Each [n_out, n_in]. */
void loader_linear_stack(struct loader *loader, struct linear *linear, const char *const *part,
                         int n_part, int64_t n_out, int64_t n_in, const char *format, ...)
    __attribute__((format(printf, 7, 8)));

/* Matrices with the same input name.<part>.weight [rows, n_in] as one: the rows of part 0, then of
 * part 1, ... */
struct part {
    const char *name;
    int64_t rows;
};
void loader_matrix_stack(struct loader *loader, const struct weight **weight,
                         const struct part *part, int n_part, int64_t n_in, const char *format, ...)
    __attribute__((format(printf, 6, 7)));

/* A layer of a memory's query network, name.<at>.weight [n·n_out, n_in] (nets says which), with
 * name.<at>.bias if has_bias. If batch_norm, the normalisation
 * name.<at+1>.{weight,bias,running_mean,running_var} that follows it is folded into it, in double:
 * W' = s·W, b' = s·(b - mean) + beta with s = gamma / sqrt(var + 1e-5). Stays F32 whatever
 * info->dtype is: it decides which slots are read, and is small. */
void loader_query(struct loader *loader, struct nets *nets, int at, bool has_bias, bool batch_norm,
                  const char *format, ...) __attribute__((format(printf, 6, 7)));
/* A linear layer without a tensor: output r is input column[r]; sums of it and exact zeros. */
void loader_columns(struct loader *loader, struct nets *nets, const int32_t *column,
                    const char *purpose);
/* A memory's keys: product [n_head, 2, n_key, d_key/2], flat [n_head, n_key, d_key]; shared:
 * [n_key, d_key/2] or [n_key, d_key]. */
void loader_keys(struct loader *loader, const struct weight **weight, const struct pkm_shape *shape,
                 bool is_shared, const char *format, ...) __attribute__((format(printf, 5, 6)));
/* I32 [n_head, n_pair], each 0 .. n_pair-1: where the slots of each head are. */
void loader_slot_map(struct loader *loader, struct tensor *map, int64_t n_head, int64_t n_pair,
                     const char *format, ...) __attribute__((format(printf, 5, 6)));

/* [rows, cols] → a table that is read by rows (embeddings): in the memory of a device that has its
 * own, else where info->value_placement says. It keeps the file's precision in every placement, so
 * all placements give the same bits. */
void loader_table(struct loader *loader, const struct weight **weight, int64_t rows, int64_t cols,
                  const char *format, ...) __attribute__((format(printf, 5, 6)));
/* The same, as a memory's values: always where info->value_placement says. */
void loader_values(struct loader *loader, const struct weight **weight, int64_t rows, int64_t cols,
                   const char *format, ...) __attribute__((format(printf, 5, 6)));

/* ---- workspace ---------------------------------------------------------------------------- */

/* Lays tensors out in one buffer, each 64-byte aligned. With base NULL it only counts, so the same
 * code computes the size and the addresses. */
struct arena {
    char *base;
    size_t used; /* SIZE_MAX once it overflowed: no buffer is that large */
};

struct tensor arena_take(struct arena *arena, int64_t rows, int64_t cols, enum dtype dtype);

/* a · b, or SIZE_MAX if that overflows. */
size_t arena_mul(size_t a, size_t b);

/* A model's buffers: the activations, and the pages of keys and values. */
struct buffers {
    struct backend *be;  /* Borrowed */
    void *workspace;     /* Owner */
    void *cache;         /* Owner */
    struct tensor *page; /* Owner. [n_layer, 2]: keys, values; each [n_page, KV_PAGE·d_kv] */
};

/* d_kv: columns of a position's keys in a layer. What a failure leaves behind, buffers_close
 * frees. */
enum err_code buffers_open(struct buffers *room, struct backend *be, size_t workspace_bytes,
                           int n_layer, int n_page, int64_t d_kv, enum dtype dtype,
                           struct err *err);
void buffers_close(struct buffers *room); /* a zeroed room is fine */

/* Of a layer. */
static inline struct tensor buffers_k_pages(const struct buffers *room, int layer)
{
    return room->page[2 * (ptrdiff_t)layer];
}

static inline struct tensor buffers_v_pages(const struct buffers *room, int layer)
{
    return room->page[2 * (ptrdiff_t)layer + 1];
}

/* Bytes of one page over all layers. */
size_t buffers_page_bytes(int n_layer, int64_t d_kv, enum dtype dtype);

#endif
