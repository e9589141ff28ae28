/* A network: what the models of all families have. For models/ only; the engine sees model.h.
 *
 * model.c makes a network from a configuration and open tensors, reserves its buffers and closes
 * it; families fill it in. See family.h. */
#ifndef MODELS_NETWORK_H
#define MODELS_NETWORK_H

#include "models/arena.h"
#include "models/config.h"
#include "models/family.h"
#include "models/kv_cache.h"
#include "models/loader.h"
#include "models/memory.h"
#include "models/output.h"
#include "models/store.h"

struct network {
    struct backend *be; /* Borrowed */
    struct store store; /* Owner of all weights */
    int n_vocab, d_model, n_layer, n_head, n_kv_head, d_head;
    int d_attention; /* n_head·d_head: columns of all queries */
    int d_kv; /* columns of a position's keys in a layer, hence of the cache. n_kv_head·d_head
               * unless the family's bind changes it */
    int d_ff; /* 0 where every layer has a memory in its place: config.json may then say
               * anything */
    enum act act;
    float norm_eps;
    struct memories memories;
    struct output output;
    void *workspace; /* Owner: all activations; what lay_out lays out */
    struct kv_cache cache;
};

/* Makes a model of a configuration and its tensors: the end of model_open, which has read both and
 * chosen the types in info. Owner of tensors: this, also after a failure. */
enum err_code model_new(struct model **model, struct backend *be, const struct config *config,
                        struct tensors *tensors, const struct model_options *options,
                        const struct model_info *info, struct err *err);

#endif
