/* The all-attention network and its siblings: a post-norm transformer over relative positions whose
 * layers have persistent key and value vectors in place of a feed-forward network (Sukhbaatar,
 * Grave, Lample, Jégou, Joulin 2019, "Augmenting Self-attention with Persistent Memory", section
 * 3), or that network and no such vectors; each with spans of fixed length, or learned for each
 * head (Sukhbaatar et al. 2019, "Adaptive Attention Span in Transformers", section 2.2).
 *
 *   x[t] = tokens[id]
 *   per layer:  x = LN1(x + W_out·attention(x))     op span_attention says what is attended to
 *               x = LN2(x + ffn(x))                 without persistent vectors
 *   logits[t] = W_out·x[t] + b_out                  or the log-probabilities of adaptive.h
 *
 * A token sees the window positions before its own, so a stream has no end: the cache is a ring of
 * the longest layer's window. Positions before its start take part in the softmax with keys and
 * values of zero, as in the authors' code, which begins with a cache of zeros.
 *
 * The file reads top down: configuration, parameters, spans, binding table, workspace, forward. */
#include "models/network.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- configuration ------------------------------------------------------------------------ */

static const char *const keys[] = {
    "d_ff",       "n_persistent",      "max_span",         "span_ramp?",
    "attention?", "adaptive_cutoffs?", "adaptive_widths?", NULL};

static void set_defaults(struct config *config)
{
    config->act = ACT_RELU;
}

static enum err_code check(const struct config *config, const char *path, struct err *err)
{
    if ((config->n_persistent > 0) == (config->d_ff > 0)) {
        return err_set(err, ERR_FORMAT,
                       "%s: d_ff is %d and n_persistent %d: layers have either a feed-forward "
                       "network or persistent vectors, so one of the two must be 0",
                       path, config->d_ff, config->n_persistent);
    }
    if (config->attention != ATTENTION_JOINT && config->n_persistent == 0) {
        return err_set(err, ERR_FORMAT,
                       "%s: attention is split, but n_persistent is 0: there is nothing to split "
                       "off; make it \"joint\" or leave it out",
                       path);
    }
    if (config->attention == ATTENTION_HEAD_SPLIT && config->n_head % 2 != 0) {
        return err_set(err, ERR_FORMAT,
                       "%s: attention is \"head-split\", but n_head is %d: each half of the heads "
                       "sees something else, so it must be even",
                       path, config->n_head);
    }
    return ERR_OK;
}

/* ---- parameters --------------------------------------------------------------------------- */

/* Linear layers have no bias, but for the network's. d_text: the columns of the heads that see the
 * text; all, unless heads are split. */
struct layer {
    struct linear query;               /* [d_model, d_model] */
    struct linear key, value;          /* [d_text, d_model] */
    struct linear out;                 /* [d_model, d_text + d_persistent] */
    struct span_shape span;            /* for the heads that see the text; joint: they see the
                                        * persistent vectors too */
    struct span_shape persistent_only; /* split: for the heads that see persistent vectors alone */
    struct norm norm1;
    struct linear up, down; /* [d_ff, d_model], [d_model, d_ff]; with a network */
    struct norm norm2;      /* with a network */
};

/* Views of the workspace buffer, as long as the largest step. */
struct scratch {
    struct tensor x;        /* [n_tok, d_model] the residual stream */
    struct tensor q;        /* [n_tok, d_model] queries */
    struct tensor delta;    /* [n_tok, d_model] what is added to x, in the place of q */
    struct tensor k, v;     /* [n_tok, d_text] */
    struct tensor attn_out; /* [n_tok, d_text + d_persistent] the outputs of all heads */
    struct tensor ff;       /* [n_tok, d_ff] */
};

struct all_attention {
    struct network net;
    int n_text, n_persistent; /* heads that see the text, and heads that see persistent vectors
                               * alone */
    int d_text, d_persistent; /* their columns */
    const struct weight *tok; /* [n_vocab, d_model] */
    struct scratch scratch;
    struct layer layer[]; /* [n_layer] */
};

/* ---- spans -------------------------------------------------------------------------------- */

/* The authors' cache is cut in steps of this many positions. The positions that it holds beyond a
 * head's own span take part in the sum before the mask, so the size of the window is part of the
 * model. */
enum { WINDOW_STEP = 64 };

/* Distances that a layer sees: those of its longest head, rounded up so that the distances left out
 * are a multiple of WINDOW_STEP. */
static int window_of(const struct config *config, const float *span, int n_head)
{
    double longest = 0;
    for (int h = 0; h < n_head; h++) {
        const double own = ceil((double)span[h] * config->max_span) + config->span_ramp;
        longest = own > longest ? own : longest;
    }
    const int unseen = longest < config->max_span ? config->max_span - (int)longest : 0;
    const int trim = unseen < config->max_span - 1 ? unseen : config->max_span - 1;
    return config->max_span - trim / WINDOW_STEP * WINDOW_STEP;
}

/* mask[n_head, window]: column window-j is the share of distance j that a head's span lets count
 * (adaptive span, equation 3, over max_span as the authors' code scales it). */
static void fill_mask(float *mask, const struct config *config, const float *span,
                      const struct span_shape *shape)
{
    for (int h = 0; h < shape->n_head; h++) {
        for (int i = 0; i < shape->window; i++) {
            const float beyond =
                (float)(1 - (shape->window - i)) + span[h] * (float)config->max_span;
            const float share = beyond / (float)config->span_ramp + 1;
            mask[(int64_t)h * shape->window + i] = share < 0 ? 0 : share > 1 ? 1 : share;
        }
    }
}

/* Reads layer i's spans and makes its window and mask from them. */
static void bind_spans(struct loader *loader, struct span_shape *shape, const struct config *config,
                       int i)
{
    const int64_t dim[1] = {shape->n_head};
    const struct name name = name_make("layers.%d.spans", i);
    float *const span = loader_floats(loader, dim, 1, &name);
    for (int h = 0; span != NULL && h < shape->n_head; h++) {
        if (!(span[h] >= 0 && span[h] <= 1)) { /* also NaN */
            loader->code = err_set(loader->err, ERR_NUMERICAL,
                                   "tensor layers.%d.spans: head %d has %.9g, but spans are shares "
                                   "of max_span, 0 to 1",
                                   i, h, (double)span[h]);
            break;
        }
    }
    if (loader->code == ERR_OK) {
        shape->window = window_of(config, span, shape->n_head);
        const struct name mask_name = name_make("%s: masks of %d heads for %d distances", name.text,
                                                shape->n_head, shape->window);
        const int64_t n = (int64_t)shape->n_head * shape->window;
        float *const mask = loader_fits(loader, (size_t)n * sizeof *mask, mask_name.text)
                                ? loader_zeros(loader, n, mask_name.text)
                                : NULL;
        if (mask != NULL) {
            fill_mask(mask, config, span, shape);
        }
        loader_array(loader, &shape->mask, mask, shape->n_head, shape->window, mask_name.text);
        free(mask);
    }
    free(span);
}

/* ---- binding table ------------------------------------------------------------------------ */

/* n_head heads of n_persistent keys, which the op reads by column, and values. */
static void bind_persistent(struct loader *loader, struct span_shape *shape, int d_head, int i)
{
    const int64_t n = shape->n_persistent;
    const int64_t dim[3] = {shape->n_head, n, d_head};
    const int64_t n_key = dim[0] * n;
    const struct name key_name = name_make("layers.%d.persistent.keys", i);
    const struct name value_name = name_make("layers.%d.persistent.values", i);
    float *const key = loader_floats(loader, dim, 3, &key_name);
    float *const by_column = loader_zeros(loader, n_key * d_head, key_name.text);
    for (int64_t k = 0; loader->code == ERR_OK && k < n_key; k++) {
        for (int c = 0; c < d_head; c++) {
            by_column[(k / n * d_head + c) * n + k % n] = key[k * d_head + c];
        }
    }
    loader_array(loader, &shape->key, by_column, dim[0] * d_head, n, key_name.text);
    float *const value = loader_floats(loader, dim, 3, &value_name);
    loader_array(loader, &shape->value, value, n_key, d_head, value_name.text);
    free(key);
    free(by_column);
    free(value);
}

/* layers.<i>.out.weight [d_model, d_model]. With attn-split it takes the sum of two attentions,
 * which is the matrix twice side by side, [d_model, 2·d_model], times both. */
static void bind_out(struct loader *loader, struct linear *out, int64_t d, bool is_double, int i)
{
    const struct name name = name_make("layers.%d.out.weight", i);
    if (!is_double) {
        loader_matrix(loader, &out->weight, d, d, "%s", name.text);
        return;
    }
    const struct source source = loader_source(loader, &name, d, d);
    float *const data = loader_zeros(loader, 2 * d * d, name.text); /* F32 is the widest type */
    if (data != NULL) {
        const enum dtype dtype = tensors_dtype(source.entry);
        const size_t row_bytes = (size_t)d * dtype_bytes(dtype);
        for (int64_t half = 0; half < 2 * d; half++) {
            memcpy((char *)data + (size_t)half * row_bytes,
                   source.entry->data + (size_t)(half / 2) * row_bytes, row_bytes);
        }
        const struct tensor host = tensor_make(data, d, 2 * d, dtype);
        out->weight = loader_pack(loader, &host, source.scale, &name);
        tensors_release(source.entry);
    }
    free(data);
}

static void bind_layer(struct loader *loader, struct all_attention *model,
                       const struct config *config, int i)
{
    const struct network *const net = &model->net;
    struct layer *const layer = &model->layer[i];
    const int64_t d = net->d_model;
    const float scale = 1.0f / sqrtf((float)net->d_head);
    const bool is_joint = config->attention == ATTENTION_JOINT;
    loader_matrix(loader, &layer->query.weight, d, d, "layers.%d.query.weight", i);
    loader_matrix(loader, &layer->key.weight, model->d_text, d, "layers.%d.key.weight", i);
    loader_matrix(loader, &layer->value.weight, model->d_text, d, "layers.%d.value.weight", i);
    bind_out(loader, &layer->out, d, config->attention == ATTENTION_SPLIT, i);
    layer->span = (struct span_shape){.n_head = model->n_text,
                                      .window = config->max_span,
                                      .n_persistent = is_joint ? config->n_persistent : 0,
                                      .scale = scale};
    layer->persistent_only = (struct span_shape){
        .n_head = model->n_persistent, .n_persistent = config->n_persistent, .scale = scale};
    if (config->n_persistent > 0) {
        bind_persistent(loader, is_joint ? &layer->span : &layer->persistent_only, net->d_head, i);
    }
    if (config->span_ramp > 0) {
        bind_spans(loader, &layer->span, config, i);
    }
    loader_norm(loader, &layer->norm1, d, "layers.%d.norm1", i);
    if (net->d_ff > 0) {
        loader_linear(loader, &layer->up, net->d_ff, d, "layers.%d.ffn.lin1", i);
        loader_linear(loader, &layer->down, d, net->d_ff, "layers.%d.ffn.lin2", i);
        loader_norm(loader, &layer->norm2, d, "layers.%d.norm2", i);
    }
}

/* positions [d_head, max_span]: what each distance adds to a key, the longest first. */
static struct tensor bind_positions(struct loader *loader, const struct config *config)
{
    const int64_t dim[2] = {config->d_head, config->max_span};
    const struct name name = name_make("positions");
    float *const host = loader_floats(loader, dim, 2, &name);
    struct tensor position = NO_TENSOR;
    loader_array(loader, &position, host, dim[0], dim[1], name.text);
    free(host);
    return position;
}

static void bind(void *self, struct loader *loader, const struct config *config)
{
    struct all_attention *const model = self;
    struct network *const net = &model->net;
    const int n_head = config->n_head;
    model->n_text = config->attention == ATTENTION_HEAD_SPLIT ? n_head / 2 : n_head;
    model->n_persistent = config->attention == ATTENTION_JOINT ? 0 : model->n_text;
    model->d_text = model->n_text * net->d_head;
    model->d_persistent = model->n_persistent * net->d_head;
    net->d_kv = model->d_text;
    loader_table(loader, &model->tok, net->n_vocab, net->d_model, "embeddings.weight");
    const struct tensor position = bind_positions(loader, config);
    for (int i = 0; i < net->n_layer && loader->code == ERR_OK; i++) {
        bind_layer(loader, model, config, i);
        struct span_shape *const span = &model->layer[i].span;
        span->position = tensor_cols(position, config->max_span - span->window, span->window);
        const int window = loader->info->window;
        loader->info->window = span->window > window ? span->window : window;
        loader->info->window_sum += span->window;
    }
    output_bind(loader, &net->output, config, "output", true, true);
}

/* ---- workspace ---------------------------------------------------------------------------- */

static void lay_out(void *self, struct arena *arena, const struct step_limits *limits)
{
    struct all_attention *const model = self;
    struct network *const net = &model->net;
    struct scratch *const s = &model->scratch;
    const int64_t n_tok = limits->n_tok_max;
    const int64_t d = net->d_model;
    s->x = arena_take(arena, n_tok, d, DTYPE_F32);
    s->attn_out = arena_take(arena, n_tok, model->d_text + model->d_persistent, DTYPE_F32);
    s->q = arena_take(arena, n_tok, d, DTYPE_F32);
    s->delta = s->q;
    s->k = arena_take(arena, n_tok, model->d_text, DTYPE_F32);
    s->v = arena_take(arena, n_tok, model->d_text, DTYPE_F32);
    s->ff = arena_take(arena, n_tok, net->d_ff, DTYPE_F32);
    output_lay_out(&net->output, arena, limits, d);
}

/* ---- forward ------------------------------------------------------------------------------ */

/* The views of the step's n_tok rows. */
static struct scratch scratch_head(const struct scratch *full, int64_t n_tok)
{
    struct scratch s = *full;
    s.x.rows = s.attn_out.rows = s.q.rows = s.delta.rows = s.k.rows = s.v.rows = s.ff.rows = n_tok;
    return s;
}

/* Stores keys and values of layer i; s->attn_out = the outputs of its heads. Split attention asks
 * the same queries twice, split heads ask with the columns of each half. */
static void attend(const struct all_attention *model, int i, const struct scratch *s,
                   const struct step *step)
{
    const struct network *const net = &model->net;
    const struct layer *const layer = &model->layer[i];
    struct backend *const be = net->be;
    const int d_text = model->d_text;
    const int d_persistent = model->d_persistent;
    const struct tensor k_pages = kv_cache_keys(&net->cache, i);
    const struct tensor v_pages = kv_cache_values(&net->cache, i);
    op_kv_store(be, k_pages, v_pages, s->k, s->v, step, model->n_text);
    op_span_attention(be, tensor_cols(s->attn_out, 0, d_text), tensor_cols(s->q, 0, d_text),
                      k_pages, v_pages, step, &layer->span);
    if (model->n_persistent > 0) {
        op_span_attention(be, tensor_cols(s->attn_out, d_text, d_persistent),
                          tensor_cols(s->q, net->d_model - d_persistent, d_persistent), k_pages,
                          v_pages, step, &layer->persistent_only);
    }
}

/* s->x = the output of layer i */
static void run_layer(const struct all_attention *model, int i, const struct scratch *s,
                      const struct step *step)
{
    const struct network *const net = &model->net;
    const struct layer *const layer = &model->layer[i];
    struct backend *const be = net->be;
    linear_run(be, s->q, s->x, &layer->query, ACT_NONE);
    linear_run(be, s->k, s->x, &layer->key, ACT_NONE);
    linear_run(be, s->v, s->x, &layer->value, ACT_NONE);
    attend(model, i, s, step);
    linear_run(be, s->delta, s->attn_out, &layer->out, ACT_NONE);
    op_add_norm(be, s->x, s->x, s->delta, layer->norm1.gamma, layer->norm1.beta, net->norm_eps);
    if (net->d_ff > 0) {
        const struct ffn ffn = linear_ffn(&layer->up, &layer->down, net->act);
        op_ffn(be, s->delta, s->ff, s->x, &ffn);
        op_add_norm(be, s->x, s->x, s->delta, layer->norm2.gamma, layer->norm2.beta, net->norm_eps);
    }
}

static void forward(const void *self, struct step *step, const struct model_tap *tap)
{
    const struct all_attention *const model = self;
    const struct network *const net = &model->net;
    struct backend *const be = net->be;
    const struct scratch s = scratch_head(&model->scratch, step->n_tok);
    op_embed(be, s.x, step, model->tok, NULL, NULL);
    model_see(tap, "hidden", -1, &s.x);
    for (int i = 0; i < net->n_layer; i++) {
        run_layer(model, i, &s, step);
        model_see(tap, "hidden", i, &s.x);
    }
    output_run(be, &net->output, s.x, step, tap);
}

extern const struct model_family all_attention_family;
const struct model_family all_attention_family = {
    .name = "all_attention",
    .keys = keys,
    .set_defaults = set_defaults,
    .check = check,
    .self_bytes = sizeof(struct all_attention),
    .layer_bytes = sizeof(struct layer),
    .bind = bind,
    .lay_out = lay_out,
    .forward = forward,
};
