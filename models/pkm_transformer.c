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
 * The file reads top down: configuration, parameters, binding table, workspace, forward. */
#include "models/network.h"

#include <math.h>

/* ---- configuration ------------------------------------------------------------------------ */

static const char *const keys[] = {"d_ff",
                                   "max_position",
                                   "activation",
                                   "languages?",
                                   "adaptive_cutoffs?",
                                   "adaptive_widths?",
                                   "memories?",
                                   NULL};

static const char *const memory_keys[] = {"layer",
                                          "place",
                                          "kind",
                                          "n_head",
                                          "k_top",
                                          "n_key",
                                          "d_key",
                                          "n_slot",
                                          "query_batch_norm",
                                          "query_bias",
                                          "query?",
                                          "query_hidden?",
                                          "slot_map?",
                                          "query_normalize?",
                                          "shared_keys?",
                                          "modulo?",
                                          "temperature?",
                                          "softmax?",
                                          "subtract?",
                                          "normalize?",
                                          "values_of?",
                                          NULL};

/* ---- parameters --------------------------------------------------------------------------- */

struct layer {
    struct linear qkv; /* [3·d_model, d_model]: queries, keys, values */
    struct linear out; /* [d_model, d_model] */
    struct norm norm1, norm2;
    struct linear up, down;          /* [d_ff, d_model], [d_model, d_ff]; unless in */
    const struct memory *in, *after; /* Borrowed; NULL = none */
};

/* Views of the workspace buffer, as long as the largest step. */
struct scratch {
    struct tensor x;        /* [n_tok, d_model] the residual stream */
    struct tensor attn_out; /* [n_tok, d_model] the outputs of all heads; it and x change places */
    struct tensor delta;    /* [n_tok, d_model] what is added to x */
    struct tensor shared;   /* [n_tok, widest] the place of qkv, ff and the queries of memories */
    struct tensor qkv;      /* [n_tok, 3·d_model] */
    struct tensor ff;       /* [n_tok, d_ff] */
};

struct pkm_transformer {
    struct network net;
    const struct weight *tok, *pos, *lang; /* [n_vocab | context | n_lang, d_model]; lang or NULL */
    struct norm norm_emb;
    struct scratch scratch;
    struct layer layer[]; /* [n_layer] */
};

/* ---- binding table ------------------------------------------------------------------------ */

static void bind_layer(struct loader *loader, struct pkm_transformer *model, int i)
{
    const struct network *const net = &model->net;
    struct layer *const layer = &model->layer[i];
    const int64_t d = net->d_model;
    const struct loader_part qkv[] = {
        {.name = "q_lin", .rows = d}, {.name = "k_lin", .rows = d}, {.name = "v_lin", .rows = d}};
    layer->in = memory_at(&net->memories, i, MEMORY_IN);
    layer->after = memory_at(&net->memories, i, MEMORY_AFTER);
    loader_stack(loader, &layer->qkv, qkv, 3, d, true, "attentions.%d", i);
    loader_linear(loader, &layer->out, d, d, "attentions.%d.out_lin", i);
    loader_norm(loader, &layer->norm1, d, "layer_norm1.%d", i);
    if (layer->in == NULL) {
        loader_linear(loader, &layer->up, net->d_ff, d, "ffns.%d.lin1", i);
        loader_linear(loader, &layer->down, d, net->d_ff, "ffns.%d.lin2", i);
    }
    loader_norm(loader, &layer->norm2, d, "layer_norm2.%d", i);
}

static void bind(void *self, struct loader *loader, const struct config *config)
{
    struct pkm_transformer *const model = self;
    struct network *const net = &model->net;
    const int64_t d = net->d_model;
    loader_table(loader, &model->tok, net->n_vocab, d, "embeddings.weight");
    loader_table(loader, &model->pos, config->context, d, "position_embeddings.weight");
    if (config->n_lang > 0) {
        loader_table(loader, &model->lang, config->n_lang, d, "lang_embeddings.weight");
    }
    loader_norm(loader, &model->norm_emb, d, "layer_norm_emb");
    memory_bind(loader, &net->memories, config);
    for (int i = 0; i < net->n_layer; i++) {
        bind_layer(loader, model, i);
    }
    output_bind(loader, &net->output, config, "pred_layer.proj", true, false);
}

/* ---- workspace ---------------------------------------------------------------------------- */

static void lay_out(void *self, struct arena *arena, const struct step_limits *limits)
{
    struct pkm_transformer *const model = self;
    struct network *const net = &model->net;
    struct scratch *const s = &model->scratch;
    const int64_t n_tok = limits->n_tok_max;
    const int64_t d = net->d_model;
    const int64_t n_shared = max_i64(max_i64(3 * d, net->d_ff), memory_query_width(&net->memories));
    s->x = arena_take(arena, n_tok, d, DTYPE_F32);
    s->attn_out = arena_take(arena, n_tok, d, DTYPE_F32);
    s->delta = arena_take(arena, n_tok, d, DTYPE_F32);
    s->shared = arena_take(arena, n_tok, n_shared, DTYPE_F32);
    s->qkv = tensor_make(s->shared.data, n_tok, 3 * d, DTYPE_F32);
    s->ff = tensor_make(s->shared.data, n_tok, net->d_ff, DTYPE_F32);
    memory_lay_out(&net->memories, arena, n_tok, s->shared);
    output_lay_out(&net->output, arena, limits, d);
}

/* ---- forward ------------------------------------------------------------------------------ */

/* The views of the step's n_tok rows. */
static struct scratch scratch_head(const struct scratch *full, int64_t n_tok)
{
    struct scratch s = *full;
    s.x.rows = s.attn_out.rows = s.delta.rows = s.qkv.rows = s.ff.rows = n_tok;
    return s;
}

/* s->x = LN(s->x + s->delta), in the place of s->attn_out, whose content has been used: who
 * computes the next product from it may then norm and read x at once (op_add_norm). */
static void add_norm(const struct network *net, const struct norm *norm, struct scratch *s)
{
    const struct tensor x = s->x;
    s->x = s->attn_out;
    s->attn_out = x;
    op_add_norm(net->be, s->x, x, s->delta, norm->gamma, norm->beta, net->norm_eps);
}

/* s->x = LN1(s->x + attention(s->x)) */
static void attend(const struct network *net, const struct layer *layer, int i, struct scratch *s,
                   const struct step *step)
{
    struct backend *const be = net->be;
    const int64_t d = net->d_model;
    const float scale = 1.0f / sqrtf((float)net->d_head);
    const struct tensor q = tensor_cols(s->qkv, 0, d);
    const struct tensor k = tensor_cols(s->qkv, d, d);
    const struct tensor v = tensor_cols(s->qkv, 2 * d, d);
    const struct tensor k_pages = kv_cache_keys(&net->cache, i);
    const struct tensor v_pages = kv_cache_values(&net->cache, i);
    linear_run(be, s->qkv, s->x, &layer->qkv, ACT_NONE);
    op_attention(be, s->attn_out, q, k_pages, v_pages, k, v, step, net->n_head, scale);
    linear_run(be, s->delta, s->attn_out, &layer->out, ACT_NONE);
    add_norm(net, &layer->norm1, s);
}

/* s->x = the output of layer i */
static void run_layer(const struct pkm_transformer *model, int i, struct scratch *s,
                      const struct step *step, const struct model_tap *tap)
{
    const struct network *const net = &model->net;
    const struct layer *const layer = &model->layer[i];
    struct backend *const be = net->be;
    attend(net, layer, i, s, step);
    if (layer->in != NULL) {
        memory_run(&net->memories, layer->in, s->delta, NO_TENSOR, s->x, step, tap);
    } else {
        const struct ffn ffn = linear_ffn(&layer->up, &layer->down, net->act);
        op_ffn(be, s->delta, s->ff, s->x, &ffn);
    }
    add_norm(net, &layer->norm2, s);
    if (layer->after != NULL) {
        memory_run(&net->memories, layer->after, s->x, s->x, s->x, step, tap);
    }
}

static void forward(const void *self, struct step *step, const struct model_tap *tap)
{
    const struct pkm_transformer *const model = self;
    const struct network *const net = &model->net;
    struct backend *const be = net->be;
    struct scratch s = scratch_head(&model->scratch, step->n_tok);
    op_embed(be, s.x, step, model->tok, model->pos, model->lang);
    op_norm(be, s.x, s.x, model->norm_emb.gamma, model->norm_emb.beta, net->norm_eps);
    model_see(tap, "hidden", -1, &s.x);
    for (int i = 0; i < net->n_layer; i++) {
        run_layer(model, i, &s, step, tap);
        model_see(tap, "hidden", i, &s.x);
    }
    output_run(be, &net->output, s.x, step, tap);
}

extern const struct model_family pkm_transformer_family;
const struct model_family pkm_transformer_family = {
    .name = "pkm_transformer",
    .keys = keys,
    .memory_keys = memory_keys,
    .self_bytes = sizeof(struct pkm_transformer),
    .layer_bytes = sizeof(struct layer),
    .bind = bind,
    .lay_out = lay_out,
    .forward = forward,
};
