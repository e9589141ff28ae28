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
 * The file reads top down: parameters, spans, binding table, workspace, forward. */
#include "models/output.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

/* ---- parameters --------------------------------------------------------------------------- */

/* Linear layers have no bias. d_text: the columns of the heads that see the text; all, unless heads
 * are split. */
struct layer {
    struct linear query;      /* [d_model, d_model] */
    struct linear key, value; /* [d_text, d_model] */
    struct linear out;        /* [d_model, the columns of y] */
    struct span_shape span;   /* of the text; joint: and of the persistent vectors */
    struct span_shape alone;  /* split: of heads that see persistent vectors alone */
    struct norm norm1;
    struct linear up, down; /* [d_ff, d_model], [d_model, d_ff]; with a network */
    struct norm norm2;      /* with a network */
};

/* Views of the workspace buffer, as long as the largest step. */
struct scratch {
    struct tensor x;    /* [n_tok, d_model] the residual stream */
    struct tensor y;    /* [n_tok, d_text + d_alone] */
    struct tensor q;    /* [n_tok, d_model] */
    struct tensor k, v; /* [n_tok, d_text] */
    struct tensor ff;   /* [n_tok, d_ff] */
};

struct all_attention {
    struct backend *be; /* Borrowed */
    struct store store;
    int n_vocab, d_model, n_layer, d_ff;
    int n_text, n_alone; /* heads that see the text, and heads that see persistent vectors alone */
    int d_text, d_alone; /* their columns */
    enum dtype cache_dtype;
    float norm_eps;
    const struct weight *tok; /* [n_vocab, d_model] */
    struct layer *layer;      /* Owner. [n_layer] */
    struct output output;
    struct scratch scratch;
    struct buffers room;
};

/* ---- spans -------------------------------------------------------------------------------- */

/* The authors' cache is cut in steps of this many positions. What it holds beyond a head's own span
 * takes part in the sum before the mask, so the window is part of the model. */
enum { WINDOW_STEP = 64 };

/* Distances that a layer sees: those of its longest head, rounded up from the far end. */
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

/* Reads layer i's spans and makes its window and mask of them. */
static void bind_spans(struct loader *loader, struct span_shape *shape, const struct config *config,
                       int i)
{
    float span[CONFIG_HEAD_MAX];
    loader_host(loader, span, shape->n_head, "layers.%d.spans", i);
    for (int h = 0; h < shape->n_head && loader->code == ERR_OK; h++) {
        if (!(span[h] >= 0 && span[h] <= 1)) { /* also NaN */
            loader->code = err_set(loader->err, ERR_NUMERICAL,
                                   "tensor layers.%d.spans: head %d has %.9g, but spans are shares "
                                   "of max_span, 0 to 1",
                                   i, h, (double)span[h]);
        }
    }
    if (loader->code != ERR_OK) {
        return;
    }
    shape->window = window_of(config, span, shape->n_head);
    char name[96];
    (void)snprintf(name, sizeof name, "layers.%d.spans: masks of %d heads for %d distances", i,
                   shape->n_head, shape->window);
    const size_t n = (size_t)shape->n_head * (size_t)shape->window;
    if (!loader_fits(loader, n * sizeof(float), name)) {
        return;
    }
    float *const mask = calloc(n, sizeof *mask);
    if (mask == NULL) {
        loader->code = err_set(loader->err, ERR_MEMORY, "%s: no memory", name);
        return;
    }
    fill_mask(mask, config, span, shape);
    loader_computed(loader, &shape->mask, mask, shape->n_head, shape->window, name);
    free(mask);
}

/* ---- binding table ------------------------------------------------------------------------ */

/* n_head heads of n_persistent keys and values. */
static void bind_persistent(struct loader *loader, struct span_shape *shape, int64_t d_head, int i)
{
    const int64_t dim[3] = {shape->n_head, shape->n_persistent, d_head};
    const int64_t n_key = dim[0] * dim[1];
    loader_array_by_column(loader, &shape->key, dim, "layers.%d.persistent.keys", i);
    loader_array(loader, &shape->value, n_key, d_head, dim, 3, "layers.%d.persistent.values", i);
}

static void bind_attention(struct loader *loader, const struct all_attention *model,
                           const struct config *config, int i)
{
    struct layer *const layer = &model->layer[i];
    const int64_t d = model->d_model;
    const int64_t d_head = d / config->n_head;
    const float scale = 1.0f / sqrtf((float)d_head);
    loader_matrix(loader, &layer->query.weight, d, d, "layers.%d.query.weight", i);
    loader_matrix(loader, &layer->key.weight, model->d_text, d, "layers.%d.key.weight", i);
    loader_matrix(loader, &layer->value.weight, model->d_text, d, "layers.%d.value.weight", i);
    /* One output matrix takes the sum of two attentions as it takes them side by side, twice. */
    loader_matrix_tiled(loader, &layer->out.weight, d, d,
                        config->attention == ATTENTION_SPLIT ? 2 : 1, "layers.%d.out.weight", i);
    layer->span = (struct span_shape){.n_head = model->n_text,
                                      .window = config->max_span,
                                      .n_persistent = model->n_alone > 0 ? 0 : config->n_persistent,
                                      .scale = scale};
    layer->alone = (struct span_shape){
        .n_head = model->n_alone, .n_persistent = config->n_persistent, .scale = scale};
    if (config->n_persistent > 0) {
        bind_persistent(loader, model->n_alone > 0 ? &layer->alone : &layer->span, d_head, i);
    }
    if (config->span_ramp > 0) {
        bind_spans(loader, &layer->span, config, i);
    }
}

static void bind_layer(struct loader *loader, const struct all_attention *model,
                       const struct config *config, int i)
{
    struct layer *const layer = &model->layer[i];
    const int64_t d = model->d_model;
    bind_attention(loader, model, config, i);
    loader_norm(loader, &layer->norm1, d, "layers.%d.norm1", i);
    if (model->d_ff > 0) {
        loader_linear(loader, &layer->up, model->d_ff, d, "layers.%d.ffn.lin1", i);
        loader_linear(loader, &layer->down, d, model->d_ff, "layers.%d.ffn.lin2", i);
        loader_norm(loader, &layer->norm2, d, "layers.%d.norm2", i);
    }
}

static void bind_model(struct loader *loader, struct all_attention *model,
                       const struct config *config)
{
    const int64_t d_head = model->d_model / config->n_head;
    const int64_t dim[2] = {d_head, config->max_span};
    struct tensor position = {0};
    loader_table(loader, &model->tok, model->n_vocab, model->d_model, "embeddings.weight");
    loader_array(loader, &position, d_head, config->max_span, dim, 2, "positions");
    for (int i = 0; i < model->n_layer && loader->code == ERR_OK; i++) {
        bind_layer(loader, model, config, i);
        struct span_shape *const span = &model->layer[i].span;
        span->position = tensor_cols(position, config->max_span - span->window, span->window);
        const int window = loader->info->window;
        loader->info->window = span->window > window ? span->window : window;
        loader->info->window_sum += span->window;
    }
    output_bind(loader, &model->output, config, "output", true, true);
}

static void all_attention_close(void *self)
{
    struct all_attention *const model = self;
    store_close(&model->store);
    buffers_close(&model->room);
    free(model->layer);
    free(model);
}

static enum err_code all_attention_open(void **self, struct backend *be,
                                        const struct config *config, const struct tensors *tensors,
                                        const struct model_options *options,
                                        struct model_info *info, struct err *err)
{
    *self = NULL;
    struct all_attention *const model = calloc(1, sizeof *model);
    struct layer *const layer = calloc((size_t)config->n_layer, sizeof *layer);
    if (model == NULL || layer == NULL) {
        free(model);
        free(layer);
        return err_set(err, ERR_MEMORY, "model: no memory for its %d layers", config->n_layer);
    }
    const int d_head = config->d_model / config->n_head;
    const int n_half = config->n_head / 2;
    const int n_text = config->attention == ATTENTION_HEAD_SPLIT ? n_half : config->n_head;
    const int n_alone = config->attention == ATTENTION_JOINT ? 0 : n_text;
    *model = (struct all_attention){.be = be,
                                    .n_vocab = config->n_vocab,
                                    .d_model = config->d_model,
                                    .n_layer = config->n_layer,
                                    .d_ff = config->d_ff,
                                    .n_text = n_text,
                                    .n_alone = n_alone,
                                    .d_text = n_text * d_head,
                                    .d_alone = n_alone * d_head,
                                    .cache_dtype = info->cache_dtype,
                                    .norm_eps = config->norm_eps,
                                    .layer = layer};
    struct loader loader;
    loader_begin(&loader, &model->store, be, tensors, options, info, err);
    bind_model(&loader, model, config);
    const enum err_code code = loader_end(&loader);
    if (code != ERR_OK) {
        all_attention_close(model);
        return code;
    }
    *self = model;
    return ERR_OK;
}

/* ---- workspace ---------------------------------------------------------------------------- */

/* Lays out all activations at base and returns their size; with base NULL it only counts. */
static size_t lay_out(struct all_attention *model, const struct step_limits *limits, void *base)
{
    struct scratch *const s = &model->scratch;
    struct arena arena = {.base = base};
    const int64_t n_tok = limits->n_tok_max;
    const int64_t d = model->d_model;
    s->x = arena_take(&arena, n_tok, d, DTYPE_F32);
    s->y = arena_take(&arena, n_tok, model->d_text + model->d_alone, DTYPE_F32);
    s->q = arena_take(&arena, n_tok, d, DTYPE_F32);
    s->k = arena_take(&arena, n_tok, model->d_text, DTYPE_F32);
    s->v = arena_take(&arena, n_tok, model->d_text, DTYPE_F32);
    s->ff = arena_take(&arena, n_tok, model->d_ff, DTYPE_F32);
    output_lay_out(&model->output, &arena, limits, d);
    return arena.used;
}

static size_t all_attention_workspace_bytes(const void *self, const struct step_limits *limits)
{
    struct all_attention copy = *(const struct all_attention *)self;
    return lay_out(&copy, limits, NULL);
}

static size_t all_attention_page_bytes(const void *self)
{
    const struct all_attention *const model = self;
    return buffers_page_bytes(model->n_layer, model->d_text, model->cache_dtype);
}

static enum err_code all_attention_reserve(void *self, const struct step_limits *limits, int n_page,
                                           struct err *err)
{
    struct all_attention *const model = self;
    const enum err_code code =
        buffers_open(&model->room, model->be, lay_out(model, limits, NULL), model->n_layer, n_page,
                     model->d_text, model->cache_dtype, err);
    (void)lay_out(model, limits, model->room.workspace);
    return code;
}

/* ---- forward ------------------------------------------------------------------------------ */

/* The views of the step's n_tok rows. */
static struct scratch scratch_head(const struct scratch *full, int64_t n_tok)
{
    struct scratch s = *full;
    s.x.rows = s.y.rows = s.q.rows = s.k.rows = s.v.rows = s.ff.rows = n_tok;
    return s;
}

static void apply(struct backend *be, struct tensor y, struct tensor x, const struct linear *linear,
                  enum act act)
{
    op_linear(be, y, x, linear->weight, linear->bias, act);
}

/* Stores keys and values; s->y = what each head has seen. Split attention asks the same queries
 * twice, split heads ask with the columns of each half. */
static void attend(const struct all_attention *model, const struct layer *layer,
                   const struct scratch *s, const struct step *step)
{
    const int d_text = model->d_text;
    const int index = (int)(layer - model->layer);
    const struct tensor k_pages = buffers_k_pages(&model->room, index);
    const struct tensor v_pages = buffers_v_pages(&model->room, index);
    op_kv_store(model->be, k_pages, v_pages, s->k, s->v, step, model->n_text);
    op_span_attention(model->be, tensor_cols(s->y, 0, d_text), tensor_cols(s->q, 0, d_text),
                      k_pages, v_pages, step, &layer->span);
    if (model->n_alone > 0) {
        op_span_attention(model->be, tensor_cols(s->y, d_text, model->d_alone),
                          tensor_cols(s->q, model->d_model - model->d_alone, model->d_alone),
                          k_pages, v_pages, step, &layer->alone);
    }
}

/* s->x = the layer's output */
static void run_layer(const struct all_attention *model, const struct layer *layer,
                      const struct scratch *s, const struct step *step)
{
    struct backend *const be = model->be;
    apply(be, s->q, s->x, &layer->query, ACT_NONE);
    apply(be, s->k, s->x, &layer->key, ACT_NONE);
    apply(be, s->v, s->x, &layer->value, ACT_NONE);
    attend(model, layer, s, step);
    apply(be, s->q, s->y, &layer->out, ACT_NONE);
    op_add_norm(be, s->x, s->x, s->q, layer->norm1.gamma, layer->norm1.beta, model->norm_eps);
    if (model->d_ff > 0) {
        const struct ffn ffn = linear_ffn(&layer->up, &layer->down, ACT_RELU);
        op_ffn(be, s->q, s->ff, s->x, &ffn);
        op_add_norm(be, s->x, s->x, s->q, layer->norm2.gamma, layer->norm2.beta, model->norm_eps);
    }
}

static void all_attention_forward(void *self, struct step *step, const struct model_tap *tap)
{
    const struct all_attention *const model = self;
    struct backend *const be = model->be;
    CHECK(step->n_tok <= model->scratch.x.rows);
    const struct scratch s = scratch_head(&model->scratch, step->n_tok);
    op_embed(be, s.x, step, model->tok, NULL, NULL);
    model_see(tap, "hidden", -1, &s.x);
    for (int i = 0; i < model->n_layer; i++) {
        run_layer(model, &model->layer[i], &s, step);
        model_see(tap, "hidden", i, &s.x);
    }
    output_run(be, &model->output, s.x, step, tap);
}

extern const struct model_family all_attention_family;
const struct model_family all_attention_family = {
    .name = "all_attention",
    .open = all_attention_open,
    .close = all_attention_close,
    .page_bytes = all_attention_page_bytes,
    .workspace_bytes = all_attention_workspace_bytes,
    .reserve = all_attention_reserve,
    .forward = all_attention_forward,
};
