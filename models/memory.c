/* See memory.h. The file reads: query networks, keys and slot maps, the binding of a memory,
 * working memory, forward. */
#include "models/memory.h"

#include <math.h>
#include <stdlib.h>

/* ---- query networks -----------------------------------------------------------------------
 *
 * XLM's QueryMLP, GroupedConv and QueryIdentity (its options mem_query_layer_sizes,
 * mem_multi_query_net, mem_grouped_conv, mem_shuffle_query):
 *
 *   mlp        x → hidden → ... → n_head·d_key columns, head-major, first half first
 *   per_half   the same once for each half of each head: the first layers read the same input and
 *              are one wide linear layer; each later one reads and writes its own columns
 *   identity   x for each head
 *   shuffled   for head h >= 1, x in pieces of d_model / 2^(h+1) columns, the pieces 0, 2, 4 ..
 *              before 1, 3, 5 ..
 *
 * The last two are a linear layer that picks columns: exact, and as fast as the usual projection.
 *
 * Layer l is query_mlps.<j> in the file, j = 2·l, or 3·l with batch norms (at j + 1), because
 * linear layers, norms and ReLUs all count. All of it stays F32 whatever info->dtype is: it decides
 * which slots are read, and is small. */

#define BATCH_NORM_EPS 1e-5

/* Folds the batch norm called name into the linear layer before it, in double: W' = s·W, b' = s·(b
 * - mean) + beta with s = gamma / sqrt(var + eps). bias holds the layer's own, or zeros. */
static void fold_batch_norm(struct loader *loader, float *matrix, float *bias, int64_t n_out,
                            int64_t n_in, const struct name *name)
{
    static const char *const part[4] = {"weight", "bias", "running_mean", "running_var"};
    float *const norm = loader_zeros(loader, 4 * n_out, name->text);
    for (int p = 0; p < 4; p++) {
        const struct name part_name = name_join(name, part[p]);
        loader_read(loader, norm == NULL ? NULL : norm + p * n_out, n_out, &part_name);
    }
    for (int64_t r = 0; r < n_out && loader->code == ERR_OK; r++) {
        const double gamma = (double)norm[r];
        const double beta = (double)norm[n_out + r];
        const double mean = (double)norm[2 * n_out + r];
        const double var = (double)norm[3 * n_out + r];
        if (!(var >= 0)) { /* also NaN */
            loader->code = err_set(loader->err, ERR_NUMERICAL,
                                   "tensor %s.running_var: element %lld is %g, but a variance is "
                                   "never negative",
                                   name->text, (long long)r, var);
            break;
        }
        const double scale = gamma / sqrt(var + BATCH_NORM_EPS);
        for (int64_t c = 0; c < n_in; c++) {
            matrix[r * n_in + c] = (float)(scale * (double)matrix[r * n_in + c]);
        }
        bias[r] = (float)(scale * ((double)bias[r] - mean) + beta);
    }
    if (loader->code == ERR_OK) {
        loader->info->n_param -= 2 * n_out; /* running statistics are no parameters */
    }
    free(norm);
}

/* Makes a weight of each n_out rows of the host matrix [n·n_out, n_in]. */
static void make_nets(struct loader *loader, struct nets *nets, float *matrix, const char *name)
{
    nets->first = loader->store->n_weight;
    for (int i = 0; i < nets->n && loader->code == ERR_OK; i++) {
        const struct tensor host =
            tensor_make(matrix + i * nets->n_out * nets->n_in, nets->n_out, nets->n_in, DTYPE_F32);
        (void)loader_f32_weight(loader, &host, WEIGHT_MATRIX, 1, false, name);
    }
}

/* Layer number at of the network called prefix. */
static void bind_layer(struct loader *loader, struct nets *nets, const struct config_memory *config,
                       const struct name *prefix, int at)
{
    const struct name name = name_make("%s.%d", prefix->text, at);
    const struct name norm_name = name_make("%s.%d", prefix->text, at + 1);
    const struct name weight_name = name_join(&name, "weight");
    const struct name bias_name = name_join(&name, "bias");
    const int64_t dim[2] = {nets->n * nets->n_out, nets->n_in};
    const struct safetensors_entry *const entry = loader_take(loader, &weight_name, dim, 2, FLOATS);
    float *const matrix = loader_zeros(loader, dim[0] * dim[1], name.text);
    float *const bias = loader_zeros(loader, dim[0], name.text);
    if (loader->code == ERR_OK) {
        tensors_widen(matrix, entry);
        tensors_release(entry);
    }
    if (config->query_bias) {
        loader_read(loader, bias, dim[0], &bias_name);
    }
    if (config->query_batch_norm) {
        fold_batch_norm(loader, matrix, bias, dim[0], dim[1], &norm_name);
    }
    make_nets(loader, nets, matrix, weight_name.text);
    if (config->query_bias || config->query_batch_norm) {
        loader_words(loader, &nets->bias, bias, 1, dim[0], DTYPE_F32);
    }
    free(matrix);
    free(bias);
}

/* Which column of x becomes column c of head h's query. */
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

/* A linear layer without tensors, which picks columns of its input: each output is a sum of one
 * number and exact zeros. */
static void bind_columns(struct loader *loader, struct nets *nets, const struct pkm_info *info)
{
    const int d = info->shape.d_key;
    float *const matrix = loader_zeros(loader, nets->n_out * nets->n_in, "the identity query");
    for (int64_t i = 0; matrix != NULL && i < nets->n_out; i++) {
        const int32_t column = source_column(info->query, (int)(i / d), (int)(i % d), d);
        CHECK(column >= 0 && column < nets->n_in);
        matrix[i * nets->n_in + column] = 1;
    }
    make_nets(loader, nets, matrix, "the identity query");
    free(matrix);
}

static void bind_query(struct loader *loader, struct query_net *net,
                       const struct config_memory *config, const struct name *prefix,
                       int64_t d_model)
{
    const struct pkm_info *const info = &config->info;
    const struct name name = name_join(prefix, "query_proj.query_mlps");
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
            bind_layer(loader, &net->layer[l], config, &name,
                       l * (config->query_batch_norm ? 3 : 2));
        }
    }
}

/* Columns of the widest layer before the last one. */
static int64_t hidden_width(const struct query_net *net)
{
    int64_t width = 0;
    for (int l = 0; l + 1 < net->n_layer; l++) {
        width = max_i64(width, net->layer[l].n * net->layer[l].n_out);
    }
    return width;
}

static int64_t query_width(const struct query_net *net)
{
    const struct nets *const last = &net->layer[net->n_layer - 1];
    return max_i64(last->n * last->n_out, hidden_width(net));
}

/* The queries [x.rows, n_head·d_key] of x. */
static struct tensor run_query(const struct memories *all, const struct query_net *net,
                               struct tensor x)
{
    struct tensor in = x;
    for (int l = 0; l < net->n_layer; l++) {
        const struct nets *const nets = &net->layer[l];
        const int left = net->n_layer - 1 - l; /* layers alternate, so that the last is in query */
        const struct tensor *const place = left % 2 == 0 ? &all->query : &all->hidden;
        const struct tensor out =
            tensor_make(place->data, x.rows, nets->n * nets->n_out, DTYPE_F32);
        for (int i = 0; i < nets->n; i++) {
            const struct tensor bias = nets->bias.data == NULL
                                           ? nets->bias
                                           : tensor_cols(nets->bias, i * nets->n_out, nets->n_out);
            op_linear(all->be, tensor_cols(out, i * nets->n_out, nets->n_out),
                      tensor_cols(in, i * nets->n_in, nets->n_in),
                      all->store->weight[nets->first + i], bias, left == 0 ? ACT_NONE : ACT_RELU);
        }
        in = out;
    }
    return in;
}

/* ---- keys and slot maps ------------------------------------------------------------------- */

/* Product keys [n_head, 2, n_key, d_key/2], flat keys [n_head, n_key, d_key]; shared by all heads
 * and halves [n_key, d_key/2] or [n_key, d_key]. */
static const struct weight *bind_keys(struct loader *loader, const struct pkm_shape *shape,
                                      bool is_shared, const struct name *name)
{
    const bool product = shape->kind == PKM_PRODUCT;
    const int64_t n_half = product ? 2 : 1;
    const int64_t cols = shape->d_key / n_half;
    const int64_t product_dim[4] = {shape->n_head, 2, shape->n_key, cols};
    const int64_t flat_dim[3] = {shape->n_head, shape->n_key, cols};
    const int64_t shared_dim[2] = {shape->n_key, cols};
    const struct safetensors_entry *const entry =
        is_shared ? loader_take(loader, name, shared_dim, 2, FLOATS)
        : product ? loader_take(loader, name, product_dim, 4, FLOATS)
                  : loader_take(loader, name, flat_dim, 3, FLOATS);
    if (entry == NULL) {
        return NULL;
    }
    const int n_group = is_shared ? 1 : shape->n_head * (int)n_half;
    const struct tensor host = tensors_view(entry, (int64_t)n_group * shape->n_key, cols);
    const struct weight *const keys =
        loader_f32_weight(loader, &host, WEIGHT_KEYS, n_group, !product, name->text);
    tensors_release(entry);
    return keys;
}

/* I32 [n_head, n_pair], each 0 .. n_pair-1: the slots of each head are permuted. */
static void bind_slot_map(struct loader *loader, struct tensor *map, const struct pkm_shape *shape,
                          const struct name *name)
{
    const int64_t n_key = shape->n_key;
    const int64_t n_pair = shape->kind == PKM_PRODUCT ? n_key * n_key : n_key;
    const int64_t dim[2] = {shape->n_head, n_pair};
    const struct safetensors_entry *const entry = loader_take(loader, name, dim, 2, SLOTS);
    if (entry == NULL) {
        return;
    }
    const int32_t *const slot = (const int32_t *)(const void *)entry->data;
    for (int64_t i = 0; i < entry->n_elem; i++) {
        if (slot[i] < 0 || slot[i] >= n_pair) {
            loader->code = err_set(
                loader->err, ERR_FORMAT, "%s: tensor %s: element %lld is %d, not a slot 0 .. %lld",
                entry->path, entry->name, (long long)i, slot[i], (long long)n_pair - 1);
            return;
        }
    }
    loader_words(loader, map, slot, shape->n_head, n_pair, DTYPE_I32);
    tensors_release(entry);
}

/* ---- binding table ------------------------------------------------------------------------ */

static void bind_norm(struct loader *loader, struct norm *norm, const struct norm_info *info,
                      const char *name, const struct name *prefix)
{
    if (info->kind == NORM_LAYER) {
        loader_norm(loader, norm, info->n, "%s.%s", prefix->text, name);
    } else if (info->kind == NORM_RMS) {
        loader_vector(loader, &norm->gamma, info->n, "%s.%s.weight", prefix->text, name);
    }
}

static void bind_output_gate(struct loader *loader, struct memory *memory,
                             const struct pkm_info *info, const struct name *prefix)
{
    int64_t n_in = memory->d_model;
    if (info->output_gate == OUTPUT_GATE_SCALAR) {
        loader_vector(loader, &memory->out_factor, 1, "%s.output_gate.factor", prefix->text);
        return;
    }
    if (info->output_gate == OUTPUT_GATE_MLP) {
        n_in = info->gate_hidden;
        loader_linear(loader, &memory->gate_hidden, n_in, memory->d_model, "%s.output_gate.hidden",
                      prefix->text);
    }
    if (info->output_gate != OUTPUT_GATE_NONE) {
        loader_linear(loader, &memory->out_gate, 1, n_in, "%s.output_gate", prefix->text);
    }
}

static void bind_memory(struct loader *loader, struct memory *memory,
                        const struct config_memory *config, int64_t d_model)
{
    const struct pkm_info *const info = &config->info;
    const struct pkm_shape *const shape = &info->shape;
    const struct name prefix =
        name_make("memories.%d_%s", info->layer, memory_place_name(info->place));
    const struct name keys = name_join(&prefix, "keys");
    const struct name slot_map = name_join(&prefix, "slot_map");
    const int n_part = shape->kind == PKM_PRODUCT ? 2 : 1;
    memory->layer = info->layer;
    memory->place = info->place;
    memory->shape = *shape;
    memory->rescore = info->rescore;
    memory->n_unit = config->query_normalize ? shape->n_head * n_part : 0;
    memory->d_model = d_model;
    memory->d_value = info->d_value;
    memory->d_gate = info->gate_hidden;
    memory->gate_act = info->gate_act;
    memory->input_norm = info->input_norm;
    memory->query_norm = info->query_norm;
    bind_norm(loader, &memory->input_norm_by, &info->input_norm, "input_norm", &prefix);
    bind_norm(loader, &memory->query_norm_by, &info->query_norm, "query_norm", &prefix);
    memory->keys = bind_keys(loader, shape, config->shared_keys, &keys);
    if (config->slot_map) {
        bind_slot_map(loader, &memory->slot_map, shape, &slot_map);
    }
    struct memory *const owner = memory + (info->values_of - memory->index);
    memory->owner = owner == memory ? memory->index : owner->owner;
    if (owner == memory) {
        loader_values(loader, &memory->values, info->n_slot, info->d_value, "%s.values.weight",
                      prefix.text);
    }
    if (owner == memory && info->experts) {
        loader_experts(loader, &memory->experts, info->n_slot, d_model, "%s.experts.weight",
                       prefix.text);
    }
    memory->values = owner->values;
    memory->experts = owner->experts;
    bind_query(loader, &memory->query, config, &prefix, d_model);
    if (info->value_gate) {
        loader_linear(loader, &memory->gate, info->d_value, d_model, "%s.value_gate", prefix.text);
    }
    if (info->value_projection) {
        loader_linear(loader, &memory->project, d_model, info->d_value, "%s.value_proj",
                      prefix.text);
    }
    bind_output_gate(loader, memory, info, &prefix);
}

void memory_bind(struct loader *loader, struct memories *memories, const struct config *config)
{
    memories->be = loader->store->be;
    memories->store = loader->store;
    memories->n = config->n_memory;
    for (int m = 0; m < memories->n; m++) {
        memories->memory[m].index = m;
        bind_memory(loader, &memories->memory[m], &config->memory[m], config->d_model);
    }
}

const struct memory *memory_at(const struct memories *memories, int layer, enum memory_place place)
{
    for (int m = 0; m < memories->n; m++) {
        if (memories->memory[m].layer == layer && memories->memory[m].place == place) {
            return &memories->memory[m];
        }
    }
    return NULL;
}

/* ---- workspace ---------------------------------------------------------------------------- */

/* A row's output gate is column 0 of the gates. The outputs of its hidden layer begin here, at a
 * multiple of four columns. */
enum { GATE_AT = 4 };

int64_t memory_query_width(const struct memories *memories)
{
    int64_t width = 0;
    for (int m = 0; m < memories->n; m++) {
        const struct memory *const memory = &memories->memory[m];
        width = max_i64(width, max_i64(query_width(&memory->query), memory->d_model));
    }
    return width;
}

/* Slots and weights have a place per memory, since model_pkm_hits reads them after the step. */
void memory_lay_out(struct memories *memories, struct arena *arena, int64_t n_tok,
                    struct tensor query)
{
    int64_t hidden = 0;
    int64_t expert = 0;
    int64_t value = 0;
    int64_t gate = 0;
    int64_t input = 0;
    for (int m = 0; m < memories->n; m++) {
        struct memory *const memory = &memories->memory[m];
        const int64_t n_hit = (int64_t)memory->shape.n_head * memory->shape.k_top;
        memory->slots = arena_take(arena, n_tok, n_hit, DTYPE_I32);
        memory->weights = arena_take(arena, n_tok, n_hit, DTYPE_F32);
        hidden = max_i64(hidden, hidden_width(&memory->query));
        expert = max_i64(expert, memory->experts != NULL ? n_hit : 0);
        value = max_i64(value, memory->project.weight != NULL ? memory->d_value : 0);
        gate = max_i64(gate, memory->gate.weight != NULL ? memory->d_value : 0);
        gate = max_i64(gate, memory->out_gate.weight != NULL ? GATE_AT + memory->d_gate : 0);
        input = max_i64(input, memory->input_norm.kind != NORM_NONE ? memory->d_model : 0);
    }
    CHECK(query.cols >= memory_query_width(memories));
    memories->query = query;
    memories->hidden = arena_take(arena, n_tok, hidden, DTYPE_F32);
    memories->expert_weights = arena_take(arena, n_tok, expert, DTYPE_F32);
    memories->value = arena_take(arena, n_tok, value, DTYPE_F32);
    memories->gate = arena_take(arena, n_tok, gate, DTYPE_F32);
    memories->input = arena_take(arena, n_tok, input, DTYPE_F32);
}

/* ---- forward ------------------------------------------------------------------------------ */

static void run_norm(struct backend *be, const struct norm_info *info, const struct norm *by,
                     struct tensor y, struct tensor x)
{
    if (info->kind == NORM_LAYER) {
        op_norm(be, y, x, by->gamma, by->beta, info->eps);
    } else {
        op_rms_norm(be, y, NO_TENSOR, x, NO_TENSOR, by->gamma, info->eps);
    }
}

/* In place. RMS norms of parts of a row are an op; for a layer norm each part is viewed as a row,
 * since the columns of queries are contiguous. */
static void run_query_norm(struct backend *be, const struct memory *memory, struct tensor query)
{
    const struct norm_info *const info = &memory->query_norm;
    const int n_run = (int)(query.cols / info->n);
    if (info->kind == NORM_RMS) {
        op_head_norm(be, query, memory->query_norm_by.gamma, n_run, info->eps);
        return;
    }
    CHECK(query.stride == query.cols);
    const struct tensor runs = tensor_make(query.data, query.rows * n_run, info->n, DTYPE_F32);
    run_norm(be, info, &memory->query_norm_by, runs, runs);
}

/* y times the gate's value for x. */
static void run_output_gate(const struct memories *all, const struct memory *memory,
                            struct tensor y, struct tensor x)
{
    struct backend *const be = all->be;
    if (memory->out_factor.data != NULL) { /* the same number for each row */
        struct tensor factor = tensor_head(memory->out_factor, y.rows);
        factor.stride = 0;
        op_gate(be, y, y, factor, GATE_FACTOR);
        return;
    }
    const int64_t cols = GATE_AT + memory->d_gate;
    const struct tensor gates = tensor_make(all->gate.data, y.rows, cols, DTYPE_F32);
    const struct tensor gate = tensor_cols(gates, 0, 1);
    const struct tensor hidden = tensor_cols(gates, GATE_AT, memory->d_gate);
    if (memory->gate_hidden.weight != NULL) {
        linear_run(be, hidden, x, &memory->gate_hidden, memory->gate_act);
    }
    linear_run(be, gate, memory->gate_hidden.weight != NULL ? hidden : x, &memory->out_gate,
               ACT_NONE);
    op_gate(be, y, y, gate, GATE_SIGMOID);
}

/* Slots and weights of x, kept in the memory. */
static void search(const struct memories *all, const struct memory *memory, struct tensor slots,
                   struct tensor weights, struct tensor x, const struct model_tap *tap)
{
    struct backend *const be = all->be;
    const struct tensor query = run_query(all, &memory->query, x);
    model_see(tap, "query", memory->index, &query);
    if (memory->n_unit > 0) {
        op_l2_norm(be, query, query, memory->n_unit);
    }
    if (memory->query_norm.kind != NORM_NONE) {
        run_query_norm(be, memory, query);
    }
    op_pkm_search(be, slots, weights, query, memory->keys, &memory->shape);
    if (memory->shape.scores) {
        op_pkm_rescore(be, slots, weights, memory->slot_map, &memory->rescore);
    }
    model_see(tap, "slots", memory->index, &slots);
    model_see(tap, "weights", memory->index, &weights);
}

/* Only steps in which a sequence has a knock-out list run this op. */
static void ablate(const struct memories *all, const struct memory *memory, struct tensor weights,
                   struct tensor slots, const struct step *step)
{
    const struct pkm_place place = {memory->index, memory->shape.n_head, memory->shape.k_top};
    if (step->n_ablate > 0) {
        op_pkm_ablate(all->be, weights, slots, step, &place);
    }
}

void memory_run(const struct memories *memories, const struct memory *memory, struct tensor y,
                struct tensor residual, struct tensor in, const struct step *step,
                const struct model_tap *tap)
{
    struct backend *const be = memories->be;
    const int64_t n = in.rows;
    const bool is_normed = memory->input_norm.kind != NORM_NONE;
    const bool is_gated = memory->gate.weight != NULL;
    const bool is_projected = memory->project.weight != NULL;
    const bool is_scaled = memory->out_gate.weight != NULL || memory->out_factor.data != NULL;
    const struct tensor x =
        is_normed ? tensor_make(memories->input.data, n, memory->d_model, DTYPE_F32) : in;
    const struct tensor slots = tensor_head(memory->slots, n);
    const struct tensor weights = tensor_head(memory->weights, n);
    const struct tensor value =
        is_projected ? tensor_make(memories->value.data, n, memory->d_value, DTYPE_F32) : y;
    const struct pkm_redirect other = {step, memory->owner};
    const struct pkm_redirect *const redirect = step->n_redirect > 0 ? &other : NULL;
    struct tensor used = weights;
    if (is_normed) {
        run_norm(be, &memory->input_norm, &memory->input_norm_by, x, in);
    }
    search(memories, memory, slots, weights, x, tap);
    if (memory->experts != NULL) {
        used = tensor_make(memories->expert_weights.data, n, weights.cols, DTYPE_F32);
        op_pkm_experts(be, used, weights, slots, x, memory->experts, redirect);
    }
    ablate(memories, memory, weights, slots, step);
    if (memory->experts != NULL) {
        ablate(memories, memory, used, slots, step);
    }
    if (residual.data != NULL) {
        CHECK(!is_gated && !is_projected && !is_scaled);
        if (tap != NULL) { /* so that the tap sees the memory's own result */
            const struct tensor part =
                tensor_make(memories->query.data, n, memory->d_model, DTYPE_F32);
            op_pkm_read(be, part, NO_TENSOR, slots, used, memory->values, redirect);
            model_see(tap, "memory_out", memory->index, &part);
        }
        op_pkm_read(be, y, residual, slots, used, memory->values, redirect);
        return;
    }
    op_pkm_read(be, value, NO_TENSOR, slots, used, memory->values, redirect);
    if (is_gated) {
        const struct tensor gate = tensor_make(memories->gate.data, n, memory->d_value, DTYPE_F32);
        linear_run(be, gate, x, &memory->gate, ACT_NONE);
        op_gate(be, value, value, gate, GATE_SILU);
    }
    if (is_projected) {
        linear_run(be, y, value, &memory->project, ACT_NONE);
    }
    if (is_scaled) {
        run_output_gate(memories, memory, y, x);
    }
    model_see(tap, "memory_out", memory->index, &y);
}
