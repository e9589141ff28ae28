/* Counts by the formulas of the architecture; see bench_cost.h. */
#include "server/cli/bench_cost.h"

/* Multiply-adds of a memory's query network for a row; picking columns is a linear layer too. */
static double query_params(const struct pkm_info *memory, double d)
{
    const double n_net = memory->query == QUERY_PER_HALF ? 2.0 * memory->shape.n_head : 1;
    double width = d;
    double params = 0;
    for (int i = 0; i < memory->n_hidden; i++) {
        params += n_net * width * memory->hidden[i];
        width = memory->hidden[i];
    }
    return params + width * memory->shape.n_head * memory->shape.d_key;
}

/* Columns of a position's keys, or of its values. */
static double kv_width(const struct model_info *info)
{
    return (double)info->d_attention * info->n_kv_head / info->n_head;
}

/* Of what is done with a memory's sum of values. */
static double value_params(const struct pkm_info *memory, double d)
{
    const int n_square = (memory->value_gate ? 1 : 0) + (memory->value_projection ? 1 : 0);
    const double gate = memory->output_gate == OUTPUT_GATE_LINEAR ? d
                        : memory->output_gate == OUTPUT_GATE_MLP  ? (d + 1) * memory->gate_hidden
                                                                  : 0;
    return n_square * d * (double)memory->d_value + gate;
}

/* Parameters of the matrices that every row goes through, without the vocabulary's. */
static double matrix_params(const struct model_info *info)
{
    const double d = info->d_model;
    const double network = (info->gated ? 3 : 2) * d * info->d_ff;
    double params = info->n_layer * (2 * d * (info->d_attention + kv_width(info)) + network);
    for (int m = 0; m < info->n_memory; m++) {
        const struct pkm_info *const memory = &info->memory[m];
        params -= memory->place == MEMORY_IN ? network : 0; /* it replaces that one */
        params += value_params(memory, d);
    }
    return params;
}

/* Parameters of the queries and keys of all memories: F32 in any model. */
static double search_params(const struct model_info *info)
{
    double params = 0;
    for (int m = 0; m < info->n_memory; m++) {
        const struct pkm_shape *const shape = &info->memory[m].shape;
        params += query_params(&info->memory[m], info->d_model);
        /* Product keys are two halves of half the width: the same number. */
        params += (double)shape->n_head * shape->n_key * shape->d_key;
    }
    return params;
}

/* Bytes per element of the value tables: tables that are read in place (no resident bytes) keep the
 * file's type. A table that several memories read is in both counts once. */
static double value_elem_bytes(const struct model_info *info)
{
    if (info->value_bytes == 0) {
        /* A byte of Q4 holds two elements. */
        return (double)dtype_bytes(info->value_dtype) / (info->value_dtype == DTYPE_Q4 ? 2 : 1);
    }
    return (double)info->value_bytes / (double)info->n_param_values;
}

/* Value elements that a row gathers. */
static double row_values(const struct model_info *info)
{
    double n = 0;
    for (int m = 0; m < info->n_memory; m++) {
        const struct pkm_info *const memory = &info->memory[m];
        const double width = (double)memory->d_value + (memory->experts ? info->d_model : 0);
        n += (double)memory->shape.n_head * memory->shape.k_top * width;
    }
    return n;
}

/* Positions that a row at position pos attends to, over all layers. */
static double attended(const struct model_info *info, double pos)
{
    const double all = pos * info->n_layer;
    const double seen = (double)info->window_sum;
    return info->window > 0 && seen < all ? seen : all;
}

struct bench_cost bench_cost_of(const struct model_info *info, const struct bench_shape *shape)
{
    const double rows = shape->n_tok;
    const double d = info->d_model;
    const double elem = (double)dtype_bytes(info->dtype);
    const double vocabulary = d * info->n_vocab;
    const double cache_row = 2 * kv_width(info) * (double)dtype_bytes(info->cache_dtype);
    const double persistent = (double)info->n_persistent * info->n_layer;
    /* The rows of one sequence share its cache; on average a row of a prefill sees half of it. */
    const double cached = shape->n_tok == shape->n_seq ? shape->mean_pos : 2 * shape->mean_pos;
    const double values = shape->values_apart ? 0 : row_values(info) * value_elem_bytes(info);
    struct bench_cost cost;
    cost.bytes = elem * (matrix_params(info) + (shape->n_out > 0 ? vocabulary : 0)) +
                 sizeof(float) * search_params(info) + rows * (values + 2 * elem * d) +
                 shape->n_seq * attended(info, cached) * cache_row +
                 persistent * 2 * d * sizeof(float);
    cost.flops =
        2 * (rows * (matrix_params(info) + search_params(info) + row_values(info)) +
             shape->n_out * vocabulary +
             rows * (attended(info, shape->mean_pos) + persistent) * 2 * info->d_attention);
    return cost;
}
