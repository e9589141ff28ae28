/* The life cycle of a model: made of a configuration and tensors, reserved, closed. See model.h and
 * network.h; open.c reads the directory. */
#include "models/network.h"

#include "models/tensors.h"

#include <stdlib.h>

struct model {
    const struct model_family *family;
    struct network *net;       /* Owner: the beginning of the family's own struct */
    struct tensors *tensors;   /* Owner: open while tables are read in place; else NULL */
    struct step_limits limits; /* of model_reserve */
    bool reserved;
    struct model_info info;
};

static void fill_network(struct network *net, struct backend *be, const struct config *config)
{
    int n_replaced = 0; /* layers whose feed-forward network is a memory */
    for (int m = 0; m < config->n_memory; m++) {
        n_replaced += config->memory[m].info.place == MEMORY_IN ? 1 : 0;
    }
    net->be = be;
    net->n_vocab = config->n_vocab;
    net->d_model = config->d_model;
    net->n_layer = config->n_layer;
    net->n_head = config->n_head;
    net->n_kv_head = config->n_kv_head;
    net->d_head = config->d_head;
    net->d_attention = config->n_head * config->d_head;
    net->d_kv = config->n_kv_head * config->d_head;
    net->d_ff = n_replaced < config->n_layer ? config->d_ff : 0;
    net->act = config->act;
    net->norm_eps = config->norm_eps;
}

enum err_code model_new(struct model **model, struct backend *be, const struct config *config,
                        struct tensors *tensors, const struct model_options *options,
                        const struct model_info *info, struct err *err)
{
    const struct model_family *const family = config->family;
    const size_t bytes = family->self_bytes + (size_t)config->n_layer * family->layer_bytes;
    struct model *const made = calloc(1, sizeof *made);
    struct network *const net = calloc(1, bytes);
    *model = NULL;
    if (made == NULL || net == NULL) {
        free(made);
        free(net);
        tensors_close(tensors);
        return err_set(err, ERR_MEMORY, "model: no memory for its %d layers", config->n_layer);
    }
    *made = (struct model){.family = family, .net = net, .tensors = tensors, .info = *info};
    fill_network(net, be, config);
    struct loader loader;
    loader_begin(&loader, &net->store, be, tensors, options, &made->info, err);
    family->bind(net, &loader, config);
    enum err_code code = loader_end(&loader);
    if (code == ERR_OK && tensors != NULL) {
        code = tensors_check_files(tensors, false, err);
    }
    if (code != ERR_OK) {
        model_close(made);
        return code;
    }
    if (info->value_placement != PLACEMENT_MMAP) {
        tensors_close(tensors);
        made->tensors = NULL;
    }
    *model = made;
    return ERR_OK;
}

void model_close(struct model *model)
{
    if (model == NULL) {
        return;
    }
    struct network *const net = model->net;
    store_close(&net->store);
    kv_cache_close(&net->cache);
    if (net->workspace != NULL) {
        net->be->op->buffer_free(net->be, net->workspace);
    }
    free(net);
    tensors_close(model->tensors);
    free(model);
}

enum err_code model_check_files(const struct model *model, bool reads_only, struct err *err)
{
    return model->tensors != NULL ? tensors_check_files(model->tensors, reads_only, err) : ERR_OK;
}

const struct model_info *model_info(const struct model *model)
{
    return &model->info;
}

size_t model_page_bytes(const struct model *model)
{
    const struct network *const net = model->net;
    return kv_cache_page_bytes(net->n_layer, net->d_kv, model->info.cache_dtype);
}

/* Lays out all activations at base, and returns their size; with base NULL it only counts. */
static size_t lay_out(const struct model *model, const struct step_limits *limits, void *base)
{
    struct arena arena = {.base = base};
    model->family->lay_out(model->net, &arena, limits);
    return arena.used;
}

size_t model_workspace_bytes(const struct model *model, const struct step_limits *limits)
{
    const size_t bytes = lay_out(model, limits, NULL);
    if (model->reserved) {
        (void)lay_out(model, &model->limits, model->net->workspace);
    }
    return bytes;
}

enum err_code model_reserve(struct model *model, const struct step_limits *limits, int n_page,
                            struct err *err)
{
    struct network *const net = model->net;
    struct backend *const be = net->be;
    CHECK(!model->reserved);
    CHECK(limits->n_tok_max >= 1 && limits->n_out_max >= 0 && n_page >= 1);
    const size_t bytes = lay_out(model, limits, NULL);
    enum err_code code = be->op->buffer_new(be, &net->workspace, bytes, "activations", err);
    if (code == ERR_OK) {
        code = kv_cache_open(&net->cache, be, net->n_layer, n_page, net->d_kv,
                             model->info.cache_dtype, err);
    }
    if (code != ERR_OK) {
        return code;
    }
    (void)lay_out(model, limits, net->workspace);
    model->limits = *limits;
    model->reserved = true;
    return ERR_OK;
}

void model_forward(struct model *model, struct step *step, const struct model_tap *tap)
{
    CHECK(model->reserved && step->n_tok <= model->limits.n_tok_max);
    model->family->forward(model->net, step, tap);
}

void model_pkm_hits(const struct model *model, int m, int n_tok, struct tensor *slots,
                    struct tensor *weights)
{
    CHECK(model->reserved && m >= 0 && m < model->info.n_memory);
    CHECK(n_tok <= model->limits.n_tok_max);
    const struct memory *const memory = &model->net->memories.memory[m];
    *slots = tensor_head(memory->slots, n_tok);
    *weights = tensor_head(memory->weights, n_tok);
}
