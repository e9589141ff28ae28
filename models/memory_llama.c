/* The family of "Memory Layers at Scale" (Berges, Oğuz, Haziza, Yih, Zettlemoyer, Ghosh 2024): a
 * Llama-style decoder in which memories replace some feed-forward networks, with values that layers
 * may share.
 *
 *   x[t] = tokens[id]
 *   per layer:  x = x + W_out·attention(RMS(x))        rotary positions in queries and keys
 *               x = x + (network or memory)(RMS(x)) + memory beside it(RMS(x))
 *               x = x + memory after the layer(x)
 *   network:    W_down (silu(W_gate·r) * W_up·r)
 *   memory:     y = Σ_heads Σ_k softmax(scores)·values, its heads added up; of r = RMS(x)
 *               with a value gate ("Memory+", section 3.1): y = y * silu(W_s·r + b_s)
 *               with a value projection:                    y = W_v·y + b_v
 *               of experts (PEER, He 2024): each weight times gelu(r · expert)
 *               with an output gate:                        y = y · sigmoid(w_g·r + b_g)
 *               with a norm of its own first:               r = RMS or layer norm of its input
 *               and what else memory.h tells
 *   logits[t] = W_vocabulary·RMS(x)
 *
 * Several query heads may share one head of keys and values (grouped queries). Without memories
 * this is the decoder of Llama (Touvron et al. 2023), and with its options that of Mistral, Qwen2
 * and Qwen3: linear layers may have biases, each head of the queries and keys an RMS norm before it
 * is rotated, and the frequencies of the positions may be scaled (struct rope_scaling).
 *
 * The file reads top down: configuration, parameters, binding table, workspace, forward. */
#include "models/network.h"

#include <math.h>
#include <stdlib.h>

/* ---- configuration ------------------------------------------------------------------------ */

static const char *const keys[] = {"n_kv_head?",
                                   "d_head?",
                                   "d_ff",
                                   "max_position",
                                   "rope_theta",
                                   "rope_scaling?",
                                   "attention_bias?",
                                   "attention_out_bias?",
                                   "ffn_bias?",
                                   "query_key_norm?",
                                   "memories?",
                                   NULL};

/* Product keys, without XLM's options. */
static const char *const memory_keys[] = {"layer",
                                          "place?",
                                          "n_head",
                                          "k_top",
                                          "n_key",
                                          "d_key",
                                          "n_slot",
                                          "d_value?",
                                          "value_gate?",
                                          "value_projection?",
                                          "output_gate?",
                                          "gate_hidden?",
                                          "gate_activation?",
                                          "input_norm?",
                                          "input_norm_eps?",
                                          "query_norm?",
                                          "query_norm_width?",
                                          "query_norm_eps?",
                                          "softmax?",
                                          "relu?",
                                          "experts?",
                                          "values_of?",
                                          NULL};

static void set_defaults(struct config *config)
{
    config->gated = true;
    config->memory_default.query_bias = true;
}

static enum err_code check(const struct config *config, const char *path, struct err *err)
{
    if (config->d_head % 2 != 0) {
        return err_set(err, ERR_FORMAT,
                       "%s: d_head is %d, but rotary positions turn pairs of columns: it must be "
                       "even",
                       path, config->d_head);
    }
    return ERR_OK;
}

/* ---- parameters --------------------------------------------------------------------------- */

struct layer {
    struct tensor norm1, norm2; /* [1, d_model] gamma before attention, and before the network */
    struct tensor query_norm, key_norm; /* [1, d_head] gamma; data NULL = none */
    struct linear qkv; /* [d_attention + 2·d_kv, d_model]: queries, keys, values */
    struct linear out; /* [d_model, d_attention] */
    struct linear up; /* [2·d_ff, d_model]: gates, then what they gate; unless there is a memory */
    struct linear down;                           /* [d_model, d_ff] */
    const struct memory *beside, *memory, *after; /* Borrowed; memory in place of up and down;
                                                   * NULL = none */
};

/* Views of the workspace buffer, as long as the largest step. */
struct scratch {
    struct tensor x;        /* [n_tok, d_model] the residual stream */
    struct tensor normed;   /* [n_tok, d_model] its norm */
    struct tensor delta;    /* [n_tok, d_model] what is added to it */
    struct tensor attn_out; /* [n_tok, d_attention] the outputs of all heads */
    struct tensor shared;   /* [n_tok, widest] the place of qkv, ff and the queries of memories */
    struct tensor qkv;      /* [n_tok, d_attention + 2·d_kv] */
    struct tensor ff;       /* [n_tok, 2·d_ff] */
};

struct memory_llama {
    struct network net;
    const struct weight *tok; /* [n_vocab, d_model] */
    struct tensor rope_table; /* [context, 2·d_head] of the op rope */
    struct tensor norm;       /* [1, d_model] before the vocabulary */
    struct scratch scratch;
    struct layer layer[]; /* [n_layer] */
};

/* ---- binding table ------------------------------------------------------------------------ */

/* Applies the scaling to a frequency, in radians per position. */
static double scaled(double frequency, const struct rope_scaling *scaling)
{
    if (scaling->kind == ROPE_PLAIN) {
        return frequency;
    }
    const double slow = frequency / scaling->factor;
    if (scaling->kind == ROPE_LINEAR) {
        return slow;
    }
    const double two_pi = 6.283185307179586;
    const double turns = scaling->original * frequency / two_pi;
    const double share = (turns - scaling->low) / (scaling->high - scaling->low);
    return share <= 0 ? slow : share >= 1 ? frequency : (1 - share) * slow + share * frequency;
}

/* Rotary positions: pair j of a head turns by the angle position · theta^(-2j / d_head), or what
 * scaling makes of it. */
static void bind_rope_table(struct loader *loader, struct tensor *rope_table,
                            const struct config *config)
{
    const int d = config->d_head;
    const int64_t cols = (int64_t)2 * d;
    const int64_t n = config->context * cols;
    const struct name name =
        name_make("max_position: the rope table of %d positions", config->context);
    float *const table = loader_fits(loader, (size_t)n * sizeof(float), name.text)
                             ? loader_zeros(loader, n, name.text)
                             : NULL;
    for (int j = 0; j < d / 2 && table != NULL; j++) {
        const double frequency =
            scaled(pow(config->rope_theta, -2.0 * j / d), &config->rope_scaling);
        for (int64_t pos = 0; pos < config->context; pos++) {
            float *const row = table + pos * cols + (ptrdiff_t)2 * j;
            const double angle = (double)pos * frequency;
            row[0] = row[1] = (float)cos(angle);
            row[d + 1] = (float)sin(angle);
            row[d] = -row[d + 1];
        }
    }
    loader_array(loader, rope_table, table, config->context, cols, name.text);
    free(table);
}

/* name.weight [n_out, n_in], and name.bias if it has one. */
static void bind_linear(struct loader *loader, struct linear *linear, int64_t n_out, int64_t n_in,
                        bool has_bias, const struct name *name)
{
    if (has_bias) {
        loader_linear(loader, linear, n_out, n_in, "%s", name->text);
    } else {
        loader_matrix(loader, &linear->weight, n_out, n_in, "%s.weight", name->text);
    }
}

static void bind_layer(struct loader *loader, struct memory_llama *model,
                       const struct config *config, int i)
{
    const struct network *const net = &model->net;
    struct layer *const layer = &model->layer[i];
    const int64_t d = net->d_model;
    const struct loader_part qkv[] = {{.name = "query", .rows = net->d_attention},
                                      {.name = "key", .rows = net->d_kv},
                                      {.name = "value", .rows = net->d_kv}};
    const struct loader_part up[] = {{.name = "gate", .rows = net->d_ff},
                                     {.name = "up", .rows = net->d_ff}};
    layer->beside = memory_at(&net->memories, i, MEMORY_BESIDE);
    layer->memory = memory_at(&net->memories, i, MEMORY_IN);
    layer->after = memory_at(&net->memories, i, MEMORY_AFTER);
    loader_vector(loader, &layer->norm1, d, "layers.%d.attention_norm.weight", i);
    const struct name out = name_make("layers.%d.attention.out", i);
    const struct name down = name_make("layers.%d.ffn.down", i);
    loader_stack(loader, &layer->qkv, qkv, 3, d, config->attention_bias, "layers.%d.attention", i);
    if (config->query_key_norm) {
        loader_vector(loader, &layer->query_norm, net->d_head,
                      "layers.%d.attention.query_norm.weight", i);
        loader_vector(loader, &layer->key_norm, net->d_head, "layers.%d.attention.key_norm.weight",
                      i);
    }
    bind_linear(loader, &layer->out, d, net->d_attention, config->attention_out_bias, &out);
    loader_vector(loader, &layer->norm2, d, "layers.%d.ffn_norm.weight", i);
    if (layer->memory == NULL) {
        loader_stack(loader, &layer->up, up, 2, d, config->ffn_bias, "layers.%d.ffn", i);
        bind_linear(loader, &layer->down, d, net->d_ff, config->ffn_bias, &down);
    }
}

static void bind(void *self, struct loader *loader, const struct config *config)
{
    struct memory_llama *const model = self;
    struct network *const net = &model->net;
    loader_table(loader, &model->tok, net->n_vocab, net->d_model, "embeddings.weight");
    bind_rope_table(loader, &model->rope_table, config);
    memory_bind(loader, &net->memories, config);
    for (int i = 0; i < net->n_layer; i++) {
        bind_layer(loader, model, config, i);
    }
    loader_vector(loader, &model->norm, net->d_model, "norm.weight");
    output_bind(loader, &net->output, config, "output", false, false);
}

/* ---- workspace ---------------------------------------------------------------------------- */

static void lay_out(void *self, struct arena *arena, const struct step_limits *limits)
{
    struct memory_llama *const model = self;
    struct network *const net = &model->net;
    struct scratch *const s = &model->scratch;
    const int64_t n_tok = limits->n_tok_max;
    const int64_t d = net->d_model;
    const int64_t d_qkv = net->d_attention + (int64_t)2 * net->d_kv;
    const int64_t d_up = (int64_t)2 * net->d_ff;
    const int64_t n_shared = max_i64(max_i64(d_qkv, d_up), memory_query_width(&net->memories));
    s->x = arena_take(arena, n_tok, d, DTYPE_F32);
    s->normed = arena_take(arena, n_tok, d, DTYPE_F32);
    s->delta = arena_take(arena, n_tok, d, DTYPE_F32);
    s->attn_out = arena_take(arena, n_tok, net->d_attention, DTYPE_F32);
    s->shared = arena_take(arena, n_tok, n_shared, DTYPE_F32);
    s->qkv = tensor_make(s->shared.data, n_tok, d_qkv, DTYPE_F32);
    s->ff = tensor_make(s->shared.data, n_tok, d_up, DTYPE_F32);
    memory_lay_out(&net->memories, arena, n_tok, s->shared);
    output_lay_out(&net->output, arena, limits, d);
}

/* ---- forward ------------------------------------------------------------------------------ */

/* The views of the step's n_tok rows. */
static struct scratch scratch_head(const struct scratch *full, int64_t n_tok)
{
    struct scratch s = *full;
    s.x.rows = s.normed.rows = s.delta.rows = s.attn_out.rows = s.qkv.rows = s.ff.rows = n_tok;
    return s;
}

/* s->delta = W_out·attention(s->normed) in layer i */
static void attend(const struct memory_llama *model, int i, const struct scratch *s,
                   const struct step *step)
{
    const struct network *const net = &model->net;
    const struct layer *const layer = &model->layer[i];
    struct backend *const be = net->be;
    const int64_t d = net->d_attention;
    const int64_t d_kv = net->d_kv;
    const float scale = 1.0f / sqrtf((float)net->d_head);
    const struct tensor q = tensor_cols(s->qkv, 0, d);
    const struct tensor k = tensor_cols(s->qkv, d, d_kv);
    const struct tensor v = tensor_cols(s->qkv, d + d_kv, d_kv);
    const struct tensor q_and_k = tensor_cols(s->qkv, 0, d + d_kv);
    const struct tensor k_pages = kv_cache_keys(&net->cache, i);
    const struct tensor v_pages = kv_cache_values(&net->cache, i);
    linear_run(be, s->qkv, s->normed, &layer->qkv, ACT_NONE);
    if (layer->query_norm.data != NULL) {
        op_head_norm(be, q, layer->query_norm, net->n_head, net->norm_eps);
        op_head_norm(be, k, layer->key_norm, net->n_kv_head, net->norm_eps);
    }
    op_rope(be, q_and_k, model->rope_table, step, net->n_head + net->n_kv_head);
    op_attention(be, s->attn_out, q, k_pages, v_pages, k, v, step, net->n_head, scale);
    linear_run(be, s->delta, s->attn_out, &layer->out, ACT_NONE);
}

/* s->delta = W_down (silu(W_gate·s->normed) * W_up·s->normed) */
static void feed_forward(const struct network *net, const struct layer *layer,
                         const struct scratch *s)
{
    struct backend *const be = net->be;
    const struct tensor gate = tensor_cols(s->ff, 0, net->d_ff);
    const struct tensor up = tensor_cols(s->ff, net->d_ff, net->d_ff);
    linear_run(be, s->ff, s->normed, &layer->up, ACT_NONE);
    op_gate(be, up, up, gate, GATE_SILU);
    linear_run(be, s->delta, up, &layer->down, ACT_NONE);
}

/* s->x += s->delta. There is no op for that alone: a norm does it, and its other result is not
 * used. */
static void add_delta(const struct network *net, const struct layer *layer, const struct scratch *s)
{
    const struct tensor unread = tensor_make(s->shared.data, s->x.rows, net->d_model, DTYPE_F32);
    op_rms_norm(net->be, unread, s->x, s->x, s->delta, layer->norm2, net->norm_eps);
}

/* s->delta = (network or memory)(s->normed); what memories beside it or after the layer give is
 * added to s->x, or left in s->delta. */
static void transform(const struct memory_llama *model, const struct layer *layer,
                      const struct scratch *s, const struct step *step, const struct model_tap *tap)
{
    const struct network *const net = &model->net;
    if (layer->beside != NULL) {
        memory_run(&net->memories, layer->beside, s->delta, NO_TENSOR, s->normed, step, tap);
        add_delta(net, layer, s);
    }
    if (layer->memory != NULL) {
        memory_run(&net->memories, layer->memory, s->delta, NO_TENSOR, s->normed, step, tap);
    } else {
        feed_forward(net, layer, s);
    }
    if (layer->after != NULL) {
        add_delta(net, layer, s);
        memory_run(&net->memories, layer->after, s->delta, NO_TENSOR, s->x, step, tap);
    }
}

static void forward(const void *self, struct step *step, const struct model_tap *tap)
{
    const struct memory_llama *const model = self;
    const struct network *const net = &model->net;
    struct backend *const be = net->be;
    const float eps = net->norm_eps;
    const struct scratch s = scratch_head(&model->scratch, step->n_tok);
    op_embed(be, s.x, step, model->tok, NULL, NULL);
    model_see(tap, "hidden", -1, &s.x);
    op_rms_norm(be, s.normed, NO_TENSOR, s.x, NO_TENSOR, model->layer[0].norm1, eps);
    for (int i = 0; i < net->n_layer; i++) {
        const struct layer *const layer = &model->layer[i];
        const bool is_last = i + 1 == net->n_layer;
        attend(model, i, &s, step);
        op_rms_norm(be, s.normed, s.x, s.x, s.delta, layer->norm2, eps);
        transform(model, layer, &s, step, tap);
        op_rms_norm(be, s.normed, s.x, s.x, s.delta, is_last ? model->norm : layer[1].norm1, eps);
        model_see(tap, "hidden", i, &s.x);
    }
    output_run(be, &net->output, s.normed, step, tap);
}

extern const struct model_family memory_llama_family;
const struct model_family memory_llama_family = {
    .name = "memory_llama",
    .keys = keys,
    .memory_keys = memory_keys,
    .set_defaults = set_defaults,
    .check = check,
    .self_bytes = sizeof(struct memory_llama),
    .layer_bytes = sizeof(struct layer),
    .bind = bind,
    .lay_out = lay_out,
    .forward = forward,
};
