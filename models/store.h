/* The store: everything of a model that lives in the backend's memory for as long as the model
 * does. The loader fills it, model.c closes it, families and memories borrow from it.
 *
 * Errors begin with the name that is given. */
#ifndef MODELS_STORE_H
#define MODELS_STORE_H

#include "kernels/backend.h"

struct store {
    struct backend *be;     /* Borrowed */
    struct weight **weight; /* Owner. [n_weight] of n_weight_max */
    int n_weight, n_weight_max;
    void **array; /* Owner: a buffer each. [n_array] of n_array_max */
    int n_array, n_array_max;
    float *words; /* Owner: one buffer for all vectors and slot maps; n_word of n_word_max used */
    int64_t n_word, n_word_max;
};

/* The words that a vector of n takes: vectors start at multiples of 64 bytes. */
static inline int64_t store_padded(int64_t n)
{
    return (n + 15) / 16 * 16;
}

/* n_word_max: the sum of store_padded over all that store_words will take. What a failure leaves
 * behind, store_close frees. */
enum err_code store_open(struct store *store, struct backend *be, int64_t n_word_max,
                         struct err *err);
void store_close(struct store *store); /* a zeroed store is fine */

/* These copy host, which stays the caller's (but for a weight with PLACEMENT_MMAP). */
enum err_code store_weight(struct store *store, const struct weight **weight,
                           const struct tensor *host, const struct weight_desc *desc,
                           const char *name, struct err *err);
enum err_code store_array(struct store *store, struct tensor *array, const float *host,
                          int64_t rows, int64_t cols, const char *name, struct err *err);
struct tensor store_words(struct store *store, const void *host, int64_t rows, int64_t cols,
                          enum dtype dtype);

#endif
