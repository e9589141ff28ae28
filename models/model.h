/* A model: configuration, weights and one forward pass.
 *
 * Made by model_open from a directory (config.json, model.safetensors or shards with
 * model.safetensors.index.json; models/FORMAT.md documents both), immutable after model_reserve.
 * The engine fills a struct step, calls model_forward and then the backend's finish. Prefill,
 * decode and scoring are the same function with another number of rows.
 *
 * Each family is one file: see models/family.h. */
#ifndef MODELS_MODEL_H
#define MODELS_MODEL_H

#include "kernels/backend.h"

enum {
    MODEL_PKM_MAX = 64,
    MODEL_LANG_MAX = 256,
    MODEL_NAME_MAX = 64,
    MODEL_HIDDEN_MAX = 8, /* hidden layers of a query network */
    MODEL_END_MAX = 16,   /* ids that end a text */
};

/* Where the queries of a memory come from. */
enum query_kind {
    QUERY_MLP,      /* one network for all heads */
    QUERY_PER_HALF, /* a network for each half of each head */
    QUERY_IDENTITY, /* the layer's input itself */
    QUERY_SHUFFLED, /* the same, its columns in an order of each head's own */
};

/* As config.json says it. */
static inline const char *pkm_query_name(enum query_kind kind)
{
    static const char *const names[] = {"mlp", "per_half", "identity", "shuffled"};
    return names[kind];
}

/* Where a memory is: in place of its layer's feed-forward network; beside it, on the same input and
 * added; or added after the layer. */
enum memory_place { MEMORY_IN, MEMORY_BESIDE, MEMORY_AFTER };

/* The names in config.json and of tensors, and what metrics add to the layer's number. */
static inline const char *memory_place_name(enum memory_place place)
{
    static const char *const names[] = {"in", "beside", "after"};
    return names[place];
}
static inline const char *memory_place_mark(enum memory_place place)
{
    static const char *const marks[] = {"", "&", "+"};
    return marks[place];
}

/* What a memory's output is multiplied by: nothing; a number; the sigmoid of a linear layer of the
 * memory's input, or of two. */
enum output_gate { OUTPUT_GATE_NONE, OUTPUT_GATE_SCALAR, OUTPUT_GATE_LINEAR, OUTPUT_GATE_MLP };

/* How a memory's input, or parts of n columns of its queries, are normalised. */
enum norm_kind { NORM_NONE, NORM_RMS, NORM_LAYER };
struct norm_info {
    enum norm_kind kind;
    int n;
    float eps;
};

/* The shape and options of a memory layer. */
struct pkm_info {
    int layer; /* 0-based */
    enum memory_place place;
    struct pkm_shape shape;
    struct pkm_rescore rescore; /* with shape.scores */
    enum query_kind query;
    int n_hidden;
    int hidden[MODEL_HIDDEN_MAX]; /* [n_hidden] widths of one query network's hidden layers */
    int64_t n_slot;
    int64_t d_value;
    int values_of; /* the memory whose value table is read: an earlier one, or this one */
    /* memory_llama: what is done with the sum of values, whether the slots are experts, and
     * norms. */
    bool value_gate, value_projection, experts;
    enum output_gate output_gate;
    int gate_hidden; /* of OUTPUT_GATE_MLP */
    enum act gate_act;
    struct norm_info input_norm, query_norm;
};

/* The ids that end a text when they are generated: models that answer questions have several. */
struct end_ids {
    int n;                     /* 0 = the model has none */
    int32_t id[MODEL_END_MAX]; /* [n] the first is model_info.eos_id */
};

static inline bool end_ids_have(const struct end_ids *ends, int32_t id)
{
    for (int i = 0; i < ends->n; i++) {
        if (ends->id[i] == id) {
            return true;
        }
    }
    return false;
}

/* How to draw tokens where a request says nothing: what the model's generation_config.json
 * recommends, or MODEL_SAMPLING_PLAIN, which draws from the distribution as it is. */
struct model_sampling {
    float temperature, top_p, min_p, repetition;
    int top_k; /* 0 = off */
};
#define MODEL_SAMPLING_PLAIN                                                                       \
    (struct model_sampling)                                                                        \
    {                                                                                              \
        .temperature = 1, .top_p = 1, .repetition = 1                                              \
    }

/* A description of a model: for /info, inspect and the engine's limits. */
struct model_info {
    char family[MODEL_NAME_MAX];    /* "pkm_transformer" */
    char tokenizer[MODEL_NAME_MAX]; /* the kind of its vocab.txt; "" = it has none */
    int n_vocab, d_model, n_layer, n_head, d_ff;
    int d_attention; /* columns of all heads of queries: d_model but for memory_llama */
    int n_kv_head;   /* heads of keys and values: n_head but for memory_llama */
    bool gated;      /* feed-forward networks are W_down (silu(W_gate·x) * W_up·x) */
    int context;     /* positions the model can take; 0 = no limit */
    /* In a model without a limit: how many earlier positions a token sees in a layer, and the
     * persistent keys of a head. A sequence's pages are then a ring: see step_limits.n_span_max. */
    int window, n_persistent;
    int64_t window_sum; /* over all layers; window is that of the longest */
    enum act act;
    bool tie_output;
    int n_cutoff;                              /* tails of an adaptive softmax; 0 = none */
    int bos_id, eos_id, pad_id, unk_id;        /* -1 = the model has none */
    struct end_ids ends;                       /* eos_id, and what else ends a text */
    bool add_bos;                              /* sequences of this model start with bos_id */
    int n_lang;                                /* 0 = no language embeddings */
    char lang[MODEL_LANG_MAX][MODEL_NAME_MAX]; /* [n_lang] names, index = id */
    int n_memory;
    struct pkm_info memory[MODEL_PKM_MAX]; /* in order of execution */
    enum dtype file_dtype;                 /* the type of most weight bytes but the value tables' */
    enum dtype value_dtype;                /* the type of the value tables, as they are read */
    enum dtype dtype;                      /* what is computed with: F32, BF16, F16 or I8 */
    enum dtype cache_dtype;                /* of keys and values: F32 or BF16 */
    int64_t n_param, n_param_values;       /* all parameters; those in value tables */
    struct model_sampling sampling;        /* recommended defaults */
    int64_t file_bytes;                    /* of all tensors, as the model's files hold them */
    size_t weight_bytes, value_bytes;      /* resident weights without / value tables */
    enum placement value_placement;        /* of the value tables */
};

/* The memory that owns the table of values that memory m reads. */
static inline int model_table_of(const struct model_info *info, int m)
{
    while (info->memory[m].values_of != m) {
        m = info->memory[m].values_of;
    }
    return m;
}

/* Look-ups of one row in a memory. */
static inline int64_t model_pkm_columns(const struct pkm_info *memory)
{
    return (int64_t)memory->shape.n_head * memory->shape.k_top;
}

/* For step_limits. */
static inline int model_span_max(const struct model_info *info)
{
    return info->window > 0 ? info->window + info->n_persistent : 0;
}

/* The largest error (root mean square, relative) of a weight that is made int8, unless forced. Rows
 * of normally distributed numbers lose 0.7 to 0.9 %, rows with a few outliers ten times as large
 * 2 %. */
#define MODEL_INT8_LOSS 0.03

struct model_options {
    const char *dtype; /* "auto" (BF16 files → bf16, I8 → int8 where the backend has_int8, else
                        * bf16; where the backend prefers_bf16 F16 → f16 if it has_f16 and others
                        * → bf16; else f32), "f32", "bf16", "int8", "f16" where the backend
                        * has_f16 */
    const char *cache_dtype; /* "auto" or NULL (F32 beside F32 weights and where heads have an odd
                              * number of columns, else BF16), "f32", "bf16" */
    double int8_max_loss;    /* weight_desc.loss_max of weights made I8: MODEL_INT8_LOSS, or 0 */
    enum placement value_placement; /* of value tables; MMAP needs a backend that is_host */
    bool value_auto;  /* choose it: in place from the file where the backend can, else DEVICE */
    bool check;       /* read every weight and refuse NaN and infinity by name */
    bool check_files; /* compare the files with model.sha256, if there is one (identity.h) */
    /* Called while loading: phase "map", "pack" ..., share done 0..1. May be NULL. */
    void (*progress)(void *ctx, const char *phase, double done);
    void *progress_ctx;
};

struct model;

/* Reads, validates and packs. Errors name the file and the field or tensor. On failure *model is
 * NULL. Owner of *model: the caller. be must outlive it. */
enum err_code model_open(struct model **model, struct backend *be, const char *dir,
                         const struct model_options *options, struct err *err);
/* What the configuration alone says of the model in dir; types, sizes and sampling stay 0. */
enum err_code model_info_read(struct model_info *info, const char *dir, struct err *err);
void model_close(struct model *model); /* NULL is fine */
const struct model_info *model_info(const struct model *model);
/* Whether the files that are read in place are still what was opened; ERR_IO names the first that
 * is not. With reads_only only whether each read so far has found its bytes, which costs
 * nothing. */
enum err_code model_check_files(const struct model *model, bool reads_only, struct err *err);

/* Bytes of key/value cache per page of KV_PAGE positions, over all layers. */
size_t model_page_bytes(const struct model *model);
/* Bytes of workspace that model_reserve would take for these limits, without the cache. */
size_t model_workspace_bytes(const struct model *model, const struct step_limits *limits);
/* Allocates workspace and a cache of n_page pages. Once, before the first forward. */
enum err_code model_reserve(struct model *model, const struct step_limits *limits, int n_page,
                            struct err *err);

/* Sees intermediate results by name; the tensor is in the backend's address space. Used by tests.
 * Results have the same bits with and without a tap, but with a tap some ops run separately that
 * otherwise are fused. Names: "hidden" (layer -1: embedding after its norm; i: output of layer i,
 * with an "after" memory), "query", "slots", "weights", "memory_out" (layer = index of the memory),
 * "logits" (layer = first output row of the chunk). */
struct model_tap {
    void (*see)(void *ctx, const char *name, int layer, const struct tensor *t);
    void *ctx;
};

/* Runs step through the model: embeds, all layers, and for the rows of out_row the vocabulary,
 * sampling and log-probabilities, in chunks of a reserved size. tap may be NULL. */
void model_forward(struct model *model, struct step *step, const struct model_tap *tap);

/* After finish: what memory m (index into pkm_info) looked up for the step's rows:
 * slots I32 and weights F32, [n_tok, n_head·k_top], in the backend's address space. */
void model_pkm_hits(const struct model *model, int m, int n_tok, struct tensor *slots,
                    struct tensor *weights);

#endif
