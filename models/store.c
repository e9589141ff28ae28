/* See store.h. */
#include "models/store.h"

#include "models/arena.h"

#include <limits.h>
#include <stdlib.h>

enum err_code store_open(struct store *store, struct backend *be, int64_t n_word_max,
                         struct err *err)
{
    void *words = NULL;
    const size_t bytes = (size_t)n_word_max * sizeof(float);
    *store = (struct store){.be = be, .n_word_max = n_word_max};
    const enum err_code code = be->op->buffer_new(be, &words, bytes, "biases and norms", err);
    store->words = words;
    return code;
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
    if (store->words != NULL) {
        store->be->op->buffer_free(store->be, store->words);
    }
    *store = (struct store){0};
}

/* Makes list, of n elements of the given size, long enough for one more. */
static enum err_code grow(void **list, int n, int *n_max, size_t bytes, const char *name,
                          struct err *err)
{
    if (n < *n_max) {
        return ERR_OK;
    }
    const int n_new = n < INT_MAX / 2 - 16 ? 2 * n + 16 : n;
    void *const grown = n_new > n ? realloc(*list, (size_t)n_new * bytes) : NULL;
    if (grown == NULL) {
        return err_set(err, ERR_MEMORY, "%s: no memory for a list of %d weights", name, n_new);
    }
    *list = grown;
    *n_max = n_new;
    return ERR_OK;
}

enum err_code store_weight(struct store *store, const struct weight **weight,
                           const struct tensor *host, const struct weight_desc *desc,
                           const char *name, struct err *err)
{
    struct weight *made = NULL;
    void *list = store->weight;
    enum err_code code =
        grow(&list, store->n_weight, &store->n_weight_max, sizeof(struct weight *), name, err);
    store->weight = list;
    if (code == ERR_OK) {
        code = store->be->op->weight_new(store->be, &made, host, desc, name, err);
    }
    if (code == ERR_OK) {
        store->weight[store->n_weight++] = made;
    }
    *weight = made;
    return code;
}

enum err_code store_array(struct store *store, struct tensor *array, const float *host,
                          int64_t rows, int64_t cols, const char *name, struct err *err)
{
    void *data = NULL;
    void *list = store->array;
    const size_t bytes = arena_mul(arena_mul((size_t)rows, (size_t)cols), sizeof *host);
    enum err_code code =
        grow(&list, store->n_array, &store->n_array_max, sizeof(void *), name, err);
    store->array = list;
    if (code == ERR_OK) {
        code = store->be->op->buffer_new(store->be, &data, bytes, name, err);
    }
    if (code == ERR_OK) {
        store->array[store->n_array++] = data;
        *array = tensor_make(data, rows, cols, DTYPE_F32);
        store->be->op->upload(store->be, *array, host);
    }
    return code;
}

struct tensor store_words(struct store *store, const void *host, int64_t rows, int64_t cols,
                          enum dtype dtype)
{
    CHECK(dtype_bytes(dtype) == sizeof *store->words);
    const struct tensor words = tensor_make(store->words + store->n_word, rows, cols, dtype);
    store->n_word += store_padded(rows * cols);
    CHECK(store->n_word <= store->n_word_max);
    store->be->op->upload(store->be, words, host);
    return words;
}
