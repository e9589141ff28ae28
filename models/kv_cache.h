/* The key/value cache of a model: for each layer the pages of keys and those of values, all in one
 * buffer of the backend. The step says which page holds which positions (kernels/op.h, kv_store);
 * how a page is laid out inside is the backend's business. */
#ifndef MODELS_KV_CACHE_H
#define MODELS_KV_CACHE_H

#include "kernels/backend.h"

struct kv_cache {
    struct backend *be;  /* Borrowed; NULL = never opened */
    void *data;          /* Owner */
    struct tensor *page; /* Owner. [n_layer, 2]: keys, values; each [n_page, KV_PAGE·d_kv] */
};

/* d_kv: columns of a position's keys in a layer. What a failure leaves behind, kv_cache_close
 * frees. */
enum err_code kv_cache_open(struct kv_cache *cache, struct backend *be, int n_layer, int n_page,
                            int64_t d_kv, enum dtype dtype, struct err *err);
void kv_cache_close(struct kv_cache *cache); /* a zeroed cache is fine */

/* Bytes of one page over all layers. */
size_t kv_cache_page_bytes(int n_layer, int64_t d_kv, enum dtype dtype);

static inline struct tensor kv_cache_keys(const struct kv_cache *cache, int layer)
{
    return cache->page[2 * (ptrdiff_t)layer];
}

static inline struct tensor kv_cache_values(const struct kv_cache *cache, int layer)
{
    return cache->page[2 * (ptrdiff_t)layer + 1];
}

#endif
