/* The family of "Memory Layers at Scale" (Berges, Oğuz, Haziza, Yih, Zettlemoyer, Ghosh 2024): a
 * Llama-style decoder in which memories stand in place of some feed-forward networks, with values
 * that layers may share.
 *
 *   x[t] = tokens[id]
 *   per layer:  x = x + W_out·attention(RMS(x))        queries and keys turned by their position
 *               x = x + (network or memory)(RMS(x))
 *   network:    W_down (silu(W_gate·r) * W_up·r)
 *   memory:     y = Σ_heads Σ_k softmax(scores)·values, its heads added up; of r = RMS(x)
 *               with a value gate ("Memory+", section 3.1): y = y * silu(W_s·r + b_s)
 *               with a value projection:                    y = W_v·y + b_v
 *               of experts (PEER, He 2024): each share times gelu(r · expert)
 *               with an output gate:                        y = y · sigmoid(w_g·r + b_g)
 *   logits[t] = W_vocabulary·RMS(x)
 *
 * Several heads of queries may share one of keys and values.
 *
 * The file reads top down: parameters, binding table, workspace, forward. */
#include "models/output.h"
#include "models/query.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

/* ---- parameters --------------------------------------------------------------------------- */

struct memory {
    int index; /* in model_info.memory */
    struct pkm_shape shape;
    struct query_net query;       /* d_model → n_head·d_key */
    const struct weight *keys;    /* [n_head·2·n_key, d_key/2] */
    const struct weight *values;  /* [n_slot, d_value] */
    const struct weight *experts; /* [n_slot, d_model], or NULL */
    struct linear gate;           /* [d_value, d_model]; weight NULL = none, as of these two */
    struct linear project;        /* [d_model, d_value] */
    struct linear out_gate;       /* [1, d_model] */
    int64_t d_value;
    struct tensor slots, shares; /* [n_tok_max, n_head·k_top]; kept until the next step */
};

struct layer {
    struct tensor norm1, norm2; /* [1, d_model] gamma before attention, and before the network */
    const struct weight *qkv;   /* [d_attention + 2·d_kv, d_model]: queries, keys, values */
    const struct weight *out;   /* [d_model, d_attention] */
    const struct weight *up;    /* [2·d_ff, d_model]: gates, then what they gate; unless memory */
    const struct weight *down;  /* [d_model, d_ff] */
    struct memory *memory;      /* Borrowed; NULL = none */
};

/* Views of the workspace buffer, as long as the largest step. */
struct scratch {
    struct tensor x;      /* [n_tok, d_model] the residual stream */
    struct tensor y;      /* [n_tok, d_model] its norm */
    struct tensor z;      /* [n_tok, d_model] what is added to it */
    struct tensor seen;   /* [n_tok, d_attention] what each head has seen */
    struct tensor qkv;    /* [n_tok, d_attention + 2·d_kv]   these three */
    struct tensor ff;     /* [n_tok, 2·d_ff]                 share one */
    struct tensor query;  /* [n_tok, n_head·d_key]           place */
    struct tensor weight; /* [n_tok, n_head·k_top] shares of experts */
    struct tensor value;  /* [n_tok, d_value] */
    struct tensor gate;   /* [n_tok, d_value] */
};

struct memory_llama {
    struct backend *be; /* Borrowed */
    struct store store;
    int n_layer, n_head, n_kv_head;
    int64_t n_vocab, d_model;
    int64_t d_attention, d_kv; /* columns of all heads of queries, and of keys or values */
    int64_t d_ff;              /* 0 where every layer has a memory in its place */
    enum dtype cache_dtype;
    float norm_eps;
    const struct weight *tok; /* [n_vocab, d_model] */
    struct tensor turns;      /* [context, 2·d_head] of the op rope */
    struct tensor norm;       /* [1, d_model] before the vocabulary */
    struct layer *layer;      /* Owner. [n_layer] */
    int n_memory;
    struct memory memory[MODEL_MEMORY_MAX];
    struct output output;
    struct scratch scratch;
    struct buffers room;
};

/* ---- binding table ------------------------------------------------------------------------ */

/* The turn of each position: its pair j by position · theta^(-2j / d_head). */
static void fill_turns(float *turns, const struct config *config)
{
    const int d = config->d_head;
    for (int j = 0; j < d / 2; j++) {
        const double frequency = pow(config->rope_theta, -2.0 * j / d);
        for (int64_t pos = 0; pos < config->context; pos++) {
            float *const row = turns + pos * 2 * d + (ptrdiff_t)2 * j;
            const double angle = (double)pos * frequency;
            row[0] = row[1] = (float)cos(angle);
            row[d + 1] = (float)sin(angle);
            row[d] = -row[d + 1];
        }
    }
}

static void bind_turns(struct loader *loader, struct memory_llama *model,
                       const struct config *config)
{
    const int64_t cols = (int64_t)2 * config->d_head;
    const size_t n = (size_t)config->context * (size_t)cols;
    char name[80];
    (void)snprintf(name, sizeof name, "max_position: turns of %d positions", config->context);
    if (!loader_fits(loader, n * sizeof(float), name)) {
        return;
    }
    float *const turns = calloc(n, sizeof *turns);
    if (turns == NULL) {
        loader->code = err_set(loader->err, ERR_MEMORY, "%s: no memory", name);
        return;
    }
    fill_turns(turns, config);
    loader_computed(loader, &model->turns, turns, config->context, cols, name);
    free(turns);
}

static void bind_memory(struct loader *loader, struct memory *memory,
                        const struct config_memory *config, int64_t d_model)
{
    const struct memory_info *const info = &config->info;
    const int i = info->layer;
    struct memory *const owner = memory + (config->values_of - memory->index);
    memory->shape = info->shape;
    memory->d_value = info->d_value;
    query_bind(loader, &memory->query, config, d_model);
    loader_keys(loader, &memory->keys, &info->shape, false, "memories.%d_in.keys", i);
    if (owner == memory) {
        loader_values(loader, &memory->values, info->n_slot, info->d_value,
                      "memories.%d_in.values.weight", i);
    }
    if (owner == memory && info->experts) {
        loader_values(loader, &memory->experts, info->n_slot, d_model,
                      "memories.%d_in.experts.weight", i);
    }
    memory->values = owner->values;
    memory->experts = owner->experts;
    if (info->value_gate) {
        loader_linear(loader, &memory->gate, info->d_value, d_model, "memories.%d_in.value_gate",
                      i);
    }
    if (info->value_projection) {
        loader_linear(loader, &memory->project, d_model, info->d_value, "memories.%d_in.value_proj",
                      i);
    }
    if (info->output_gate) {
        loader_linear(loader, &memory->out_gate, 1, d_model, "memories.%d_in.output_gate", i);
    }
}

static void bind_layer(struct loader *loader, const struct memory_llama *model, int i)
{
    struct layer *const layer = &model->layer[i];
    const int64_t d = model->d_model;
    const struct part qkv[] = {
        {"query", model->d_attention}, {"key", model->d_kv}, {"value", model->d_kv}};
    const struct part up[] = {{"gate", model->d_ff}, {"up", model->d_ff}};
    loader_vector(loader, &layer->norm1, d, "layers.%d.attention_norm.weight", i);
    loader_matrix_stack(loader, &layer->qkv, qkv, 3, d, "layers.%d.attention", i);
    loader_matrix(loader, &layer->out, d, model->d_attention, "layers.%d.attention.out.weight", i);
    loader_vector(loader, &layer->norm2, d, "layers.%d.ffn_norm.weight", i);
    if (layer->memory == NULL) {
        loader_matrix_stack(loader, &layer->up, up, 2, d, "layers.%d.ffn", i);
        loader_matrix(loader, &layer->down, d, model->d_ff, "layers.%d.ffn.down.weight", i);
    }
}

static void bind_model(struct loader *loader, struct memory_llama *model,
                       const struct config *config)
{
    loader_table(loader, &model->tok, model->n_vocab, model->d_model, "embeddings.weight");
    bind_turns(loader, model, config);
    for (int m = 0; m < model->n_memory; m++) {
        bind_memory(loader, &model->memory[m], &config->memory[m], model->d_model);
    }
    for (int i = 0; i < model->n_layer; i++) {
        bind_layer(loader, model, i);
    }
    loader_vector(loader, &model->norm, model->d_model, "norm.weight");
    output_bind(loader, &model->output, config, "output", false, false);
}

static void memory_llama_close(void *self)
{
    struct memory_llama *const model = self;
    store_close(&model->store);
    buffers_close(&model->room);
    free(model->layer);
    free(model);
}

static enum err_code memory_llama_open(void **self, struct backend *be, const struct config *config,
                                       const struct tensors *tensors,
                                       const struct model_options *options, struct model_info *info,
                                       struct err *err)
{
    *self = NULL;
    struct memory_llama *const model = calloc(1, sizeof *model);
    struct layer *const layer = calloc((size_t)config->n_layer, sizeof *layer);
    if (model == NULL || layer == NULL) {
        free(model);
        free(layer);
        return err_set(err, ERR_MEMORY, "model: no memory for its %d layers", config->n_layer);
    }
    *model = (struct memory_llama){.be = be,
                                   .n_vocab = config->n_vocab,
                                   .d_model = config->d_model,
                                   .d_attention = (int64_t)config->n_head * config->d_head,
                                   .n_layer = config->n_layer,
                                   .n_head = config->n_head,
                                   .n_kv_head = config->n_kv_head,
                                   .d_kv = (int64_t)config->n_kv_head * config->d_head,
                                   .cache_dtype = info->cache_dtype,
                                   .norm_eps = config->norm_eps,
                                   .layer = layer,
                                   .n_memory = config->n_memory};
    for (int m = 0; m < config->n_memory; m++) {
        layer[config->memory[m].info.layer].memory = &model->memory[m];
        model->memory[m].index = m;
    }
    for (int i = 0; i < config->n_layer; i++) {
        model->d_ff = layer[i].memory == NULL ? config->d_ff : model->d_ff;
    }
    struct loader loader;
    loader_begin(&loader, &model->store, be, tensors, options, info, err);
    bind_model(&loader, model, config);
    const enum err_code code = loader_end(&loader);
    if (code != ERR_OK) {
        memory_llama_close(model);
        return code;
    }
    *self = model;
    return ERR_OK;
}

/* ---- workspace ---------------------------------------------------------------------------- */

static int64_t max_i64(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

/* Lays out all activations at base and returns their size; with base NULL it only counts. Slots
 * and shares have a place per memory, since model_memory_hits reads them after the step. */
static size_t lay_out(struct memory_llama *model, const struct step_limits *limits, void *base)
{
    struct scratch *const s = &model->scratch;
    struct arena arena = {.base = base};
    const int64_t n_tok = limits->n_tok_max;
    const int64_t d = model->d_model;
    int64_t wide = max_i64(model->d_attention + 2 * model->d_kv, 2 * model->d_ff);
    int64_t value = 0;
    int64_t weight = 0;
    for (int m = 0; m < model->n_memory; m++) {
        struct memory *const memory = &model->memory[m];
        const int64_t n_hit = (int64_t)memory->shape.n_head * memory->shape.k_top;
        memory->slots = arena_take(&arena, n_tok, n_hit, DTYPE_I32);
        memory->shares = arena_take(&arena, n_tok, n_hit, DTYPE_F32);
        wide = max_i64(wide, query_width(&memory->query));
        value = max_i64(value, memory->d_value);
        weight = memory->experts != NULL ? max_i64(weight, n_hit) : weight;
    }
    s->x = arena_take(&arena, n_tok, d, DTYPE_F32);
    s->y = arena_take(&arena, n_tok, d, DTYPE_F32);
    s->z = arena_take(&arena, n_tok, d, DTYPE_F32);
    s->seen = arena_take(&arena, n_tok, model->d_attention, DTYPE_F32);
    s->query = arena_take(&arena, n_tok, wide, DTYPE_F32);
    s->qkv = tensor_make(s->query.data, n_tok, model->d_attention + 2 * model->d_kv, DTYPE_F32);
    s->ff = tensor_make(s->query.data, n_tok, 2 * model->d_ff, DTYPE_F32);
    s->weight = arena_take(&arena, n_tok, weight, DTYPE_F32);
    s->value = arena_take(&arena, n_tok, value, DTYPE_F32);
    s->gate = arena_take(&arena, n_tok, max_i64(value, 1), DTYPE_F32);
    output_lay_out(&model->output, &arena, limits, d);
    return arena.used;
}

static size_t memory_llama_workspace_bytes(const void *self, const struct step_limits *limits)
{
    struct memory_llama copy = *(const struct memory_llama *)self;
    return lay_out(&copy, limits, NULL);
}

static size_t memory_llama_page_bytes(const void *self)
{
    const struct memory_llama *const model = self;
    return buffers_page_bytes(model->n_layer, model->d_kv, model->cache_dtype);
}

static enum err_code memory_llama_reserve(void *self, const struct step_limits *limits, int n_page,
                                          struct err *err)
{
    struct memory_llama *const model = self;
    const enum err_code code =
        buffers_open(&model->room, model->be, lay_out(model, limits, NULL), model->n_layer, n_page,
                     model->d_kv, model->cache_dtype, err);
    (void)lay_out(model, limits, model->room.workspace);
    return code;
}

/* ---- forward ------------------------------------------------------------------------------ */

static const struct tensor NO_TENSOR = {.data = NULL};

/* The views of the step's n_tok rows. */
static struct scratch scratch_head(const struct scratch *full, int64_t n_tok)
{
    struct scratch s = *full;
    s.x.rows = s.y.rows = s.z.rows = s.seen.rows = s.query.rows = s.qkv.rows = s.ff.rows = n_tok;
    s.weight.rows = s.value.rows = s.gate.rows = n_tok;
    return s;
}

/* s->z = W_out·attention(s->y) */
static void attend(const struct memory_llama *model, const struct layer *layer,
                   const struct scratch *s, const struct step *step)
{
    struct backend *const be = model->be;
    const int64_t d = model->d_attention;
    const int64_t d_kv = model->d_kv;
    const int64_t d_head = d / model->n_head;
    const float scale = 1.0f / sqrtf((float)d_head);
    const struct tensor q = tensor_cols(s->qkv, 0, d);
    const struct tensor k = tensor_cols(s->qkv, d, d_kv);
    const struct tensor v = tensor_cols(s->qkv, d + d_kv, d_kv);
    const int index = (int)(layer - model->layer);
    const struct tensor k_pages = buffers_k_pages(&model->room, index);
    const struct tensor v_pages = buffers_v_pages(&model->room, index);
    op_linear(be, s->qkv, s->y, layer->qkv, NO_TENSOR, ACT_NONE);
    op_rope(be, tensor_cols(s->qkv, 0, d + d_kv), model->turns, step,
            model->n_head + model->n_kv_head);
    op_attention(be, s->seen, q, k_pages, v_pages, k, v, step, model->n_head, scale);
    op_linear(be, s->z, s->seen, layer->out, NO_TENSOR, ACT_NONE);
}

/* s->z = W_down (silu(W_gate·s->y) * W_up·s->y) */
static void feed_forward(const struct memory_llama *model, const struct layer *layer,
                         const struct scratch *s)
{
    struct backend *const be = model->be;
    const struct tensor gate = tensor_cols(s->ff, 0, model->d_ff);
    const struct tensor up = tensor_cols(s->ff, model->d_ff, model->d_ff);
    op_linear(be, s->ff, s->y, layer->up, NO_TENSOR, ACT_NONE);
    op_gate(be, up, up, gate, GATE_SILU);
    op_linear(be, s->z, up, layer->down, NO_TENSOR, ACT_NONE);
}

/* y = x's linear layer */
static void apply(struct backend *be, struct tensor y, struct tensor x, const struct linear *linear)
{
    op_linear(be, y, x, linear->weight, linear->bias, ACT_NONE);
}

/* s->z = memory(s->y) */
static void remember(const struct memory_llama *model, const struct memory *memory,
                     const struct scratch *s, const struct model_tap *tap)
{
    struct backend *const be = model->be;
    const struct tensor query = query_run(&memory->query, &model->store, s->query.data, NULL, s->y);
    const struct tensor slots = tensor_head(memory->slots, s->y.rows);
    const struct tensor shares = tensor_head(memory->shares, s->y.rows);
    const bool is_projected = memory->project.weight != NULL;
    const struct tensor value =
        is_projected ? tensor_make(s->value.data, s->y.rows, memory->d_value, DTYPE_F32) : s->z;
    model_see(tap, "query", memory->index, &query);
    op_pkm_search(be, slots, shares, query, memory->keys, &memory->shape);
    model_see(tap, "slots", memory->index, &slots);
    model_see(tap, "shares", memory->index, &shares);
    struct tensor weight = shares;
    if (memory->experts != NULL) {
        weight = tensor_make(s->weight.data, shares.rows, shares.cols, DTYPE_F32);
        op_pkm_experts(be, weight, shares, slots, s->y, memory->experts);
    }
    op_pkm_read(be, value, NO_TENSOR, slots, weight, memory->values);
    if (memory->gate.weight != NULL) {
        const struct tensor gate =
            tensor_make(s->gate.data, value.rows, memory->d_value, DTYPE_F32);
        apply(be, gate, s->y, &memory->gate);
        op_gate(be, value, value, gate, GATE_SILU);
    }
    if (is_projected) {
        apply(be, s->z, value, &memory->project);
    }
    if (memory->out_gate.weight != NULL) {
        const struct tensor gate = tensor_make(s->gate.data, value.rows, 1, DTYPE_F32);
        apply(be, gate, s->y, &memory->out_gate);
        op_gate(be, s->z, s->z, gate, GATE_SIGMOID);
    }
    model_see(tap, "memory_out", memory->index, &s->z);
}

static void memory_llama_forward(void *self, struct step *step, const struct model_tap *tap)
{
    const struct memory_llama *const model = self;
    struct backend *const be = model->be;
    const float eps = model->norm_eps;
    CHECK(step->n_tok <= model->scratch.x.rows);
    const struct scratch s = scratch_head(&model->scratch, step->n_tok);
    op_embed(be, s.x, step, model->tok, NULL, NULL);
    model_see(tap, "hidden", -1, &s.x);
    op_rms_norm(be, s.y, NO_TENSOR, s.x, NO_TENSOR, model->layer[0].norm1, eps);
    for (int i = 0; i < model->n_layer; i++) {
        const struct layer *const layer = &model->layer[i];
        const bool is_last = i + 1 == model->n_layer;
        attend(model, layer, &s, step);
        op_rms_norm(be, s.y, s.x, s.x, s.z, layer->norm2, eps);
        if (layer->memory != NULL) {
            remember(model, layer->memory, &s, tap);
        } else {
            feed_forward(model, layer, &s);
        }
        op_rms_norm(be, s.y, s.x, s.x, s.z, is_last ? model->norm : layer[1].norm1, eps);
        model_see(tap, "hidden", i, &s.x);
    }
    output_run(be, &model->output, s.y, step, tap);
}

static void memory_llama_memory_hits(const void *self, int m, int n_tok, struct tensor *slots,
                                     struct tensor *shares)
{
    const struct memory_llama *const model = self;
    CHECK(n_tok <= model->scratch.x.rows);
    *slots = tensor_head(model->memory[m].slots, n_tok);
    *shares = tensor_head(model->memory[m].shares, n_tok);
}

extern const struct model_family memory_llama_family;
const struct model_family memory_llama_family = {
    .name = "memory_llama",
    .open = memory_llama_open,
    .close = memory_llama_close,
    .page_bytes = memory_llama_page_bytes,
    .workspace_bytes = memory_llama_workspace_bytes,
    .reserve = memory_llama_reserve,
    .forward = memory_llama_forward,
    .memory_hits = memory_llama_memory_hits,
};
