/* The memory layer of all families: a product-key memory (Lample et al. 2019, "Large Memory Layers
 * with Product Keys"; Berges et al. 2024, "Memory Layers at Scale"; He 2024, "Mixture of A Million
 * Experts"), with every option that a configuration may ask for. One function computes it:
 *
 *   input     x = RMS or layer norm of x                                                (option)
 *   query     q = query network(x), batch norms folded in; or x itself, or x in another order
 *   norm      each half of a head's q (flat keys: each q) divided by its length, or an RMS or
 *             layer norm of each half, each head or all of q                            (option)
 *   search    the k_top best slots of each head, and the softmax of their scores: op pkm_search
 *   rescore   slot map, modulo, temperature, subtraction, normalisation: op pkm_rescore (options)
 *   experts   each weight multiplied by gelu(x·expert)                                  (option)
 *   ablate    scales the weights that a request names: op pkm_ablate                   (request)
 *   read      v = Σ weight·values[slot] over all heads: op pkm_read. Requests with an overlay read its
 *             rows in place of the table's (step.redirect)
 *   gate      v = v * silu(W_s·x + b_s)                                                 (option)
 *   project   v = W_v·v + b_v                                                           (option)
 *   out gate  v = v · a number, v · sigmoid(w_g·x + b_g), or with two layers
 *             v · sigmoid(w_g·act(W_h·x + b_h) + b_g)                                   (option)
 *   y         residual + v, or v
 *
 * The configuration (models/config_memory.c) says which of these a family's memories have;
 * models/MEMORY.md explains the keys and the tensors. */
#ifndef MODELS_MEMORY_H
#define MODELS_MEMORY_H

#include "models/arena.h"
#include "models/config.h"
#include "models/layers.h"
#include "models/loader.h"

/* n linear layers side by side, each from n_in columns of its own to n_out of its own; or, with n =
 * 1, a single one. */
struct nets {
    int n;
    int64_t n_in, n_out;
    int first;          /* their weights are weight[first .. first+n-1] of the store */
    struct tensor bias; /* [1, n·n_out], or data NULL */
};

/* From a memory's input to the queries of all heads; ReLU between the layers. */
struct query_net {
    int n_layer;
    struct nets layer[MODEL_HIDDEN_MAX + 1];
};

struct memory {
    int index; /* in model_info.memory */
    int owner; /* of the tables that it reads: itself, or an earlier one */
    int layer; /* of the model */
    enum memory_place place;
    struct pkm_shape shape;
    struct norm_info input_norm, query_norm;
    struct norm input_norm_by, query_norm_by; /* beta of layer norms alone */
    struct query_net query;                   /* d_model → n_head·d_key */
    int n_unit;                 /* parts of a query that are given length 1; 0 = left as they are */
    struct pkm_rescore rescore; /* with shape.scores */
    struct tensor slot_map;     /* [n_head, slots of the keys]; data NULL = none */
    const struct weight *keys;  /* [n_head·2·n_key, d_key/2]; flat: [n_head·n_key, d_key];
                                 * shared: [n_key, ...] */
    const struct weight *values;  /* [n_slot, d_value] */
    const struct weight *experts; /* [n_slot, d_model], or NULL */
    struct linear gate;           /* [d_value, d_model]; weight NULL = none, as of these two */
    struct linear project;        /* [d_model, d_value]; without it d_value = d_model */
    struct linear gate_hidden;    /* [width, d_model] of a gate of two layers */
    enum act gate_act;            /* behind it */
    int64_t d_gate;               /* its width, or 0 */
    struct linear out_gate;       /* [1, d_model or width] */
    struct tensor out_factor;     /* [1, 1] in its place; data NULL = none */
    int64_t d_model, d_value;
    struct tensor slots, weights; /* [n_tok_max, n_head·k_top]; kept until the next step */
};

/* All memories of a model, in order of execution, and the working memory they share. */
struct memories {
    struct backend *be;        /* Borrowed */
    const struct store *store; /* Borrowed */
    int n;
    struct memory memory[MODEL_PKM_MAX];
    /* Views of the workspace buffer, as long as the largest step. */
    struct tensor query;          /* [n_tok, memory_query_width] */
    struct tensor hidden;         /* [n_tok, widest hidden layer of a query network] */
    struct tensor expert_weights; /* [n_tok, n_head·k_top] */
    struct tensor value;          /* [n_tok, d_value] before the projection */
    struct tensor gate;           /* [n_tok, d_value] */
    struct tensor input;          /* [n_tok, d_model] normed */
};

/* Loads the memories of a configuration, whose tensors are below "memories.<layer>_<place>". */
void memory_bind(struct loader *loader, struct memories *memories, const struct config *config);

/* The memory of a layer at that place; NULL = none. */
const struct memory *memory_at(const struct memories *memories, int layer, enum memory_place place);

/* Columns of working memory that queries need: at least d_model. */
int64_t memory_query_width(const struct memories *memories);

/* Lays out what memories need for steps of n_tok rows. query [n_tok, >= memory_query_width] is
 * working memory that nobody else uses while a memory is computed. */
void memory_lay_out(struct memories *memories, struct arena *arena, int64_t n_tok,
                    struct tensor query);

/* y = residual + memory(in); residual may be y, or data NULL. in, y [n_tok, d_model], all rows of
 * step, whose knock-out lists and redirections apply; the weights kept are those used, without an
 * expert's gelu. y is not in, and there is no residual, unless the memory is a plain sum of values
 * (no gates, no projection). */
void memory_run(const struct memories *memories, const struct memory *memory, struct tensor y,
                struct tensor residual, struct tensor in, const struct step *step,
                const struct model_tap *tap);

#endif
