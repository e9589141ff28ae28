/* Query networks: see query.h. XLM's QueryMLP, GroupedConv and QueryIdentity (its options
 * mem_query_layer_sizes, mem_multi_query_net, mem_grouped_conv, mem_shuffle_query).
 *
 *   mlp       x → hidden → ... → n_head·d_key columns, head-major, first half first
 *   per_half  the same once for each half of each head: the first layers read the same input and
 * are one wide linear layer; each later one reads and writes columns of its own identity  x for
 * each head; shuffled: for head h >= 1 in chunks of d_model / 2^(h+1), the chunks 0, 2, 4 .. before
 * 1, 3, 5 .. Both are a linear layer that picks columns: exact, and no dearer than the usual
 * projection.
 *
 * Layer l stands in the file as query_mlps.<j>, j = 2·l, or 3·l with batch norms (at j + 1):
 * linear, norm and ReLU are counted alike. */
#include "models/query.h"

#include <stdlib.h>

/* The column of x that column c of head h's query is. */
static int32_t source_column(enum query_kind kind, int h, int c, int d_model)
{
    if (kind == QUERY_IDENTITY || h == 0) {
        return c;
    }
    const int n_chunk = 1 << (h + 1);
    const int chunk = d_model / n_chunk;
    const int at = c / chunk;
    const int from = at < n_chunk / 2 ? 2 * at : 2 * (at - n_chunk / 2) + 1;
    return from * chunk + c % chunk;
}

static void bind_columns(struct loader *loader, struct nets *nets, const struct memory_info *info)
{
    const int d = info->shape.d_key;
    int32_t *const column = calloc((size_t)nets->n_out, sizeof *column);
    if (column == NULL && loader->code == ERR_OK) {
        loader->code = err_set(loader->err, ERR_MEMORY, "no memory for the order of %lld columns",
                               (long long)nets->n_out);
    }
    for (int64_t i = 0; column != NULL && i < nets->n_out; i++) {
        column[i] = source_column(info->query, (int)(i / d), (int)(i % d), d);
    }
    if (loader->code == ERR_OK) {
        loader_columns(loader, nets, column, "the identity query");
    }
    free(column);
}

void query_bind(struct loader *loader, struct query_net *net, const struct config_memory *config,
                int64_t d_model)
{
    const struct memory_info *const info = &config->info;
    const int n_net = info->query == QUERY_PER_HALF ? 2 * info->shape.n_head : 1;
    const int64_t d_query = (int64_t)info->shape.n_head * info->shape.d_key;
    *net = (struct query_net){.n_layer = info->n_hidden + 1};
    for (int l = 0; l < net->n_layer; l++) {
        const int64_t n_out = l < info->n_hidden ? info->hidden[l] : d_query / n_net;
        net->layer[l] =
            l == 0 ? (struct nets){.n = 1, .n_in = d_model, .n_out = n_net * n_out}
                   : (struct nets){.n = n_net, .n_in = info->hidden[l - 1], .n_out = n_out};
        if (info->query == QUERY_IDENTITY || info->query == QUERY_SHUFFLED) {
            bind_columns(loader, &net->layer[l], info);
        } else {
            loader_query(loader, &net->layer[l], l * (config->query_batch_norm ? 3 : 2),
                         config->query_bias, config->query_batch_norm,
                         "memories.%d_%s.query_proj.query_mlps", info->layer,
                         info->after ? "after" : "in");
        }
    }
}

int64_t query_width(const struct query_net *net)
{
    const struct nets *const last = &net->layer[net->n_layer - 1];
    const int64_t hidden = query_hidden_width(net);
    return last->n * last->n_out > hidden ? last->n * last->n_out : hidden;
}

int64_t query_hidden_width(const struct query_net *net)
{
    int64_t width = 0;
    for (int l = 0; l + 1 < net->n_layer; l++) {
        const int64_t n_out = net->layer[l].n * net->layer[l].n_out;
        width = n_out > width ? n_out : width;
    }
    return width;
}

struct tensor query_run(const struct query_net *net, const struct store *store, float *queries,
                        float *hidden, struct tensor x)
{
    struct tensor in = x;
    for (int l = 0; l < net->n_layer; l++) {
        const struct nets *const nets = &net->layer[l];
        const int left = net->n_layer - 1 - l; /* the two places take turns, queries is last */
        const struct tensor out =
            tensor_make(left % 2 == 0 ? queries : hidden, x.rows, nets->n * nets->n_out, DTYPE_F32);
        for (int i = 0; i < nets->n; i++) {
            const struct tensor bias = nets->bias.data == NULL
                                           ? nets->bias
                                           : tensor_cols(nets->bias, i * nets->n_out, nets->n_out);
            op_linear(store->be, tensor_cols(out, i * nets->n_out, nets->n_out),
                      tensor_cols(in, i * nets->n_in, nets->n_in), store->weight[nets->first + i],
                      bias, left == 0 ? ACT_NONE : ACT_RELU);
        }
        in = out;
    }
    return in;
}
