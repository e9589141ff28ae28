/* The XLM / PKM family: a causal post-norm transformer whose feed-forward networks may be replaced
 * by product-key memories (Lample et al. 2019, "Large Memory Layers with Product Keys"), or
 * followed by them.
 *
 *   x[t] = LN(tokens[id] + positions[t] (+ languages[lang]))
 *   per layer:  x = LN1(x + attention(x))
 *               x = LN2(x + (ffn or "in" memory)(x))
 *               x = x + "after" memory(x)                     if there is one
 *   logits[t] = W_out·x[t] + b_out                            no norm before it; or the
 *                                                             log-probabilities of adaptive.h
 *
 * The file reads top down: parameters, binding table, workspace, forward. */
#include "models/output.h"
#include "models/query.h"

#include <math.h>
#include <stdlib.h>

/* ---- parameters --------------------------------------------------------------------------- */

struct memory {
    int index; /* in model_info.memory */
    struct pkm_shape shape;
    struct query_net query;     /* d_model → n_head·d_key, batch norms folded in */
    int n_unit;                 /* parts of a query that are given length 1; 0 = left as they are */
    struct pkm_rescore rescore; /* with shape.scores */
    struct tensor slot_map;     /* [n_head, slots of the keys]; data NULL: none */
    const struct weight *keys;  /* [n_head·2·n_key, d_key/2]; flat: [n_head·n_key, d_key];
                                 * shared: [n_key, ...] */
    const struct weight *values; /* [n_slot, d_model] */
    struct tensor slots, shares; /* [n_tok_max, n_head·k_top]; kept until the next step */
};

struct layer {
    struct linear qkv; /* [3·d_model, d_model]: queries, keys, values */
    struct linear out; /* [d_model, d_model] */
    struct norm norm1, norm2;
    struct linear up, down;    /* [d_ff, d_model], [d_model, d_ff]; unless memory_in */
    struct memory *in, *after; /* Borrowed; NULL = none */
};

/* Views of the workspace buffer, as long as the largest step. */
struct scratch {
    struct tensor x;      /* [n_tok, d_model] the residual stream */
    struct tensor y, z;   /* [n_tok, d_model] */
    struct tensor qkv;    /* [n_tok, 3·d_model]   these three */
    struct tensor ff;     /* [n_tok, d_ff]        share one */
    struct tensor query;  /* [n_tok, widest]      place */
    struct tensor hidden; /* [n_tok, widest hidden layer of a query network] */
};

struct pkm_transformer {
    struct backend *be; /* Borrowed */
    struct store store;
    int n_vocab, d_model, n_layer, n_head;
    int d_ff; /* 0 where every layer has a memory in its place: config.json may then say anything */
    enum dtype cache_dtype;
    enum act act;
    float norm_eps;
    const struct weight *tok, *pos, *lang; /* [n_vocab | context | n_lang, d_model]; lang or NULL */
    struct norm norm_emb;
    struct layer *layer; /* Owner. [n_layer] */
    int n_memory;
    struct memory memory[MODEL_MEMORY_MAX];
    struct output output;
    struct scratch scratch;
    struct buffers room;
};

/* ---- binding table ------------------------------------------------------------------------ */

static void bind_memory(struct loader *loader, struct memory *memory,
                        const struct config_memory *config, int64_t d_model)
{
    const struct memory_info *const info = &config->info;
    const char *const place = info->after ? "after" : "in";
    const struct pkm_shape *const shape = &info->shape;
    const bool product = shape->kind == PKM_PRODUCT;
    memory->shape = *shape;
    memory->rescore = info->rescore;
    memory->n_unit = config->query_normalize ? shape->n_head * (product ? 2 : 1) : 0;
    loader_keys(loader, &memory->keys, shape, config->shared_keys, "memories.%d_%s.keys",
                info->layer, place);
    if (config->slot_map) {
        const int64_t n_pair = product ? (int64_t)shape->n_key * shape->n_key : shape->n_key;
        loader_slot_map(loader, &memory->slot_map, shape->n_head, n_pair, "memories.%d_%s.slot_map",
                        info->layer, place);
    }
    struct memory *const owner = memory + (config->values_of - memory->index);
    if (owner == memory) {
        loader_values(loader, &memory->values, info->n_slot, d_model,
                      "memories.%d_%s.values.weight", info->layer, place);
    }
    memory->values = owner->values;
    query_bind(loader, &memory->query, config, d_model);
}

static void bind_layer(struct loader *loader, const struct pkm_transformer *model, int i)
{
    static const char *const qkv[] = {"q_lin", "k_lin", "v_lin"};
    struct layer *const layer = &model->layer[i];
    const int64_t d = model->d_model;
    loader_linear_stack(loader, &layer->qkv, qkv, 3, d, d, "attentions.%d", i);
    loader_linear(loader, &layer->out, d, d, "attentions.%d.out_lin", i);
    loader_norm(loader, &layer->norm1, d, "layer_norm1.%d", i);
    if (layer->in == NULL) {
        loader_linear(loader, &layer->up, model->d_ff, d, "ffns.%d.lin1", i);
        loader_linear(loader, &layer->down, d, model->d_ff, "ffns.%d.lin2", i);
    }
    loader_norm(loader, &layer->norm2, d, "layer_norm2.%d", i);
}

static void bind_model(struct loader *loader, struct pkm_transformer *model,
                       const struct config *config)
{
    const int64_t d = model->d_model;
    loader_table(loader, &model->tok, model->n_vocab, d, "embeddings.weight");
    loader_table(loader, &model->pos, config->context, d, "position_embeddings.weight");
    if (config->n_lang > 0) {
        loader_table(loader, &model->lang, config->n_lang, d, "lang_embeddings.weight");
    }
    loader_norm(loader, &model->norm_emb, d, "layer_norm_emb");
    for (int m = 0; m < model->n_memory; m++) {
        bind_memory(loader, &model->memory[m], &config->memory[m], d);
    }
    for (int i = 0; i < model->n_layer; i++) {
        bind_layer(loader, model, i);
    }
    output_bind(loader, &model->output, config, "pred_layer.proj", true, false);
}

static void pkm_transformer_close(void *self)
{
    struct pkm_transformer *const model = self;
    store_close(&model->store);
    buffers_close(&model->room);
    free(model->layer);
    free(model);
}

static enum err_code pkm_transformer_open(void **self, struct backend *be,
                                          const struct config *config,
                                          const struct tensors *tensors,
                                          const struct model_options *options,
                                          struct model_info *info, struct err *err)
{
    *self = NULL;
    struct pkm_transformer *const model = calloc(1, sizeof *model);
    struct layer *const layer = calloc((size_t)config->n_layer, sizeof *layer);
    if (model == NULL || layer == NULL) {
        free(model);
        free(layer);
        return err_set(err, ERR_MEMORY, "model: no memory for its %d layers", config->n_layer);
    }
    *model = (struct pkm_transformer){.be = be,
                                      .n_vocab = config->n_vocab,
                                      .d_model = config->d_model,
                                      .n_layer = config->n_layer,
                                      .n_head = config->n_head,
                                      .cache_dtype = info->cache_dtype,
                                      .act = config->act,
                                      .norm_eps = config->norm_eps,
                                      .layer = layer,
                                      .n_memory = config->n_memory};
    for (int m = 0; m < config->n_memory; m++) {
        const struct memory_info *const memory = &config->memory[m].info;
        struct layer *const at = &layer[memory->layer];
        *(memory->after ? &at->after : &at->in) = &model->memory[m];
        model->memory[m].index = m;
    }
    for (int i = 0; i < config->n_layer; i++) {
        model->d_ff = layer[i].in == NULL ? config->d_ff : model->d_ff;
    }
    struct loader loader;
    loader_begin(&loader, &model->store, be, tensors, options, info, err);
    bind_model(&loader, model, config);
    const enum err_code code = loader_end(&loader);
    if (code != ERR_OK) {
        pkm_transformer_close(model);
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
static size_t lay_out(struct pkm_transformer *model, const struct step_limits *limits, void *base)
{
    struct scratch *const s = &model->scratch;
    struct arena arena = {.base = base};
    const int64_t n_tok = limits->n_tok_max;
    const int64_t d = model->d_model;
    int64_t wide = max_i64(3 * d, model->d_ff);
    int64_t hidden = 0;
    for (int m = 0; m < model->n_memory; m++) {
        struct memory *const memory = &model->memory[m];
        const int64_t n_hit = (int64_t)memory->shape.n_head * memory->shape.k_top;
        memory->slots = arena_take(&arena, n_tok, n_hit, DTYPE_I32);
        memory->shares = arena_take(&arena, n_tok, n_hit, DTYPE_F32);
        wide = max_i64(wide, query_width(&memory->query));
        hidden = max_i64(hidden, query_hidden_width(&memory->query));
    }
    s->x = arena_take(&arena, n_tok, d, DTYPE_F32);
    s->y = arena_take(&arena, n_tok, d, DTYPE_F32);
    s->z = arena_take(&arena, n_tok, d, DTYPE_F32);
    s->query = arena_take(&arena, n_tok, wide, DTYPE_F32);
    s->qkv = tensor_make(s->query.data, n_tok, 3 * d, DTYPE_F32);
    s->ff = tensor_make(s->query.data, n_tok, model->d_ff, DTYPE_F32);
    s->hidden = arena_take(&arena, n_tok, hidden, DTYPE_F32);
    output_lay_out(&model->output, &arena, limits, d);
    return arena.used;
}

static size_t pkm_transformer_workspace_bytes(const void *self, const struct step_limits *limits)
{
    struct pkm_transformer copy = *(const struct pkm_transformer *)self;
    return lay_out(&copy, limits, NULL);
}

static size_t pkm_transformer_page_bytes(const void *self)
{
    const struct pkm_transformer *const model = self;
    return buffers_page_bytes(model->n_layer, model->d_model, model->cache_dtype);
}

static enum err_code pkm_transformer_reserve(void *self, const struct step_limits *limits,
                                             int n_page, struct err *err)
{
    struct pkm_transformer *const model = self;
    const enum err_code code =
        buffers_open(&model->room, model->be, lay_out(model, limits, NULL), model->n_layer, n_page,
                     model->d_model, model->cache_dtype, err);
    (void)lay_out(model, limits, model->room.workspace);
    return code;
}

/* ---- forward ------------------------------------------------------------------------------ */

static const struct tensor NO_TENSOR = {.data = NULL};

/* The views of the step's n_tok rows. */
static struct scratch scratch_head(const struct scratch *full, int64_t n_tok)
{
    struct scratch s = *full;
    s.x.rows = s.y.rows = s.z.rows = s.qkv.rows = s.ff.rows = s.query.rows = n_tok;
    return s;
}

/* s->x = LN1(s->x + attention(s->x)) */
static void attend(const struct pkm_transformer *model, const struct layer *layer,
                   const struct scratch *s, const struct step *step)
{
    struct backend *const be = model->be;
    const int64_t d = model->d_model;
    const int n_head = model->n_head;
    const int d_head = model->d_model / n_head;
    const float scale = 1.0f / sqrtf((float)d_head);
    const struct tensor q = tensor_cols(s->qkv, 0, d);
    const struct tensor k = tensor_cols(s->qkv, d, d);
    const struct tensor v = tensor_cols(s->qkv, 2 * d, d);
    const int index = (int)(layer - model->layer);
    const struct tensor k_pages = buffers_k_pages(&model->room, index);
    const struct tensor v_pages = buffers_v_pages(&model->room, index);
    op_linear(be, s->qkv, s->x, layer->qkv.weight, layer->qkv.bias, ACT_NONE);
    op_attention(be, s->y, q, k_pages, v_pages, k, v, step, n_head, scale);
    op_linear(be, s->z, s->y, layer->out.weight, layer->out.bias, ACT_NONE);
    op_add_norm(be, s->x, s->x, s->z, layer->norm1.gamma, layer->norm1.beta, model->norm_eps);
}

/* y = residual + memory(s->x); residual may be NO_TENSOR. */
static void remember(const struct pkm_transformer *model, const struct memory *memory,
                     struct tensor y, struct tensor residual, const struct scratch *s,
                     const struct model_tap *tap)
{
    struct backend *const be = model->be;
    const struct tensor query =
        query_run(&memory->query, &model->store, s->query.data, s->hidden.data, s->x);
    const struct tensor slots = tensor_head(memory->slots, s->x.rows);
    const struct tensor shares = tensor_head(memory->shares, s->x.rows);
    model_see(tap, "query", memory->index, &query);
    if (memory->n_unit > 0) {
        op_l2_norm(be, query, query, memory->n_unit);
    }
    op_pkm_search(be, slots, shares, query, memory->keys, &memory->shape);
    if (memory->shape.scores) {
        op_pkm_rescore(be, slots, shares, memory->slot_map, &memory->rescore);
    }
    if (tap != NULL) { /* the output without the residual is computed for the tap alone */
        op_pkm_read(be, s->z, NO_TENSOR, slots, shares, memory->values);
        model_see(tap, "slots", memory->index, &slots);
        model_see(tap, "shares", memory->index, &shares);
        model_see(tap, "memory_out", memory->index, &s->z);
    }
    op_pkm_read(be, y, residual, slots, shares, memory->values);
}

/* s->x = the layer's output */
static void run_layer(const struct pkm_transformer *model, const struct layer *layer,
                      const struct scratch *s, const struct step *step, const struct model_tap *tap)
{
    struct backend *const be = model->be;
    attend(model, layer, s, step);
    if (layer->in != NULL) {
        remember(model, layer->in, s->y, NO_TENSOR, s, tap);
    } else {
        const struct ffn ffn = linear_ffn(&layer->up, &layer->down, model->act);
        op_ffn(be, s->y, s->ff, s->x, &ffn);
    }
    op_add_norm(be, s->x, s->x, s->y, layer->norm2.gamma, layer->norm2.beta, model->norm_eps);
    if (layer->after != NULL) {
        remember(model, layer->after, s->x, s->x, s, tap);
    }
}

static void pkm_transformer_forward(void *self, struct step *step, const struct model_tap *tap)
{
    const struct pkm_transformer *const model = self;
    struct backend *const be = model->be;
    CHECK(step->n_tok <= model->scratch.x.rows);
    const struct scratch s = scratch_head(&model->scratch, step->n_tok);
    op_embed(be, s.x, step, model->tok, model->pos, model->lang);
    op_norm(be, s.x, s.x, model->norm_emb.gamma, model->norm_emb.beta, model->norm_eps);
    model_see(tap, "hidden", -1, &s.x);
    for (int i = 0; i < model->n_layer; i++) {
        run_layer(model, &model->layer[i], &s, step, tap);
        model_see(tap, "hidden", i, &s.x);
    }
    output_run(be, &model->output, s.x, step, tap);
}

static void pkm_transformer_memory_hits(const void *self, int m, int n_tok, struct tensor *slots,
                                        struct tensor *shares)
{
    const struct pkm_transformer *const model = self;
    CHECK(n_tok <= model->scratch.x.rows);
    *slots = tensor_head(model->memory[m].slots, n_tok);
    *shares = tensor_head(model->memory[m].shares, n_tok);
}

extern const struct model_family pkm_transformer_family;
const struct model_family pkm_transformer_family = {
    .name = "pkm_transformer",
    .open = pkm_transformer_open,
    .close = pkm_transformer_close,
    .page_bytes = pkm_transformer_page_bytes,
    .workspace_bytes = pkm_transformer_workspace_bytes,
    .reserve = pkm_transformer_reserve,
    .forward = pkm_transformer_forward,
    .memory_hits = pkm_transformer_memory_hits,
};
