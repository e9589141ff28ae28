/* The query network of a memory: from the layer's input to the queries of all heads. For families
 * with memories; runs as plain linear ops. */
#ifndef MODELS_QUERY_H
#define MODELS_QUERY_H

#include "models/loader.h"
#include "models/config.h"

struct query_net {
    int n_layer;
    struct nets layer[MODEL_HIDDEN_MAX + 1]; /* ReLU between them */
};

/* Loads the network of a memory; its tensors are below "memories.<layer>_<place>.query_proj". */
void query_bind(struct loader *loader, struct query_net *net, const struct config_memory *config,
                int64_t d_model);
/* Columns that its widest layer writes, and its widest hidden layer (0 = none). */
int64_t query_width(const struct query_net *net);
int64_t query_hidden_width(const struct query_net *net);
/* The queries [x.rows, n_head·d_key] of x, in the memory at queries [x.rows, query_width]. hidden
 * [x.rows, query_hidden_width] is working memory. */
struct tensor query_run(const struct query_net *net, const struct store *store, float *queries,
                        float *hidden, struct tensor x);

#endif
