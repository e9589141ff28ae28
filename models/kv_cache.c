/* See kv_cache.h. */
#include "models/kv_cache.h"

#include "models/arena.h"

#include <stdlib.h>

size_t kv_cache_page_bytes(int n_layer, int64_t d_kv, enum dtype dtype)
{
    return (size_t)n_layer * 2 * KV_PAGE * (size_t)d_kv * dtype_bytes(dtype);
}

enum err_code kv_cache_open(struct kv_cache *cache, struct backend *be, int n_layer, int n_page,
                            int64_t d_kv, enum dtype dtype, struct err *err)
{
    const size_t bytes = arena_mul(kv_cache_page_bytes(n_layer, d_kv, dtype), (size_t)n_page);
    *cache = (struct kv_cache){.be = be};
    cache->page = calloc(2 * (size_t)n_layer, sizeof *cache->page);
    if (cache->page == NULL) {
        return err_set(err, ERR_MEMORY, "key/value cache: no memory for %d layers", n_layer);
    }
    const enum err_code code = be->op->buffer_new(be, &cache->data, bytes, "key/value cache", err);
    if (code != ERR_OK) {
        return code;
    }
    struct arena arena = {.base = cache->data};
    for (int i = 0; i < 2 * n_layer; i++) {
        cache->page[i] = arena_take(&arena, n_page, KV_PAGE * d_kv, dtype);
    }
    CHECK(arena.used == bytes); /* a page of one layer is a multiple of 64 bytes */
    return ERR_OK;
}

void kv_cache_close(struct kv_cache *cache)
{
    if (cache->data != NULL) {
        cache->be->op->buffer_free(cache->be, cache->data);
    }
    free(cache->page);
    *cache = (struct kv_cache){.be = NULL};
}
