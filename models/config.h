/* config.json, read and validated. model_open reads it once; families see only this struct, in
 * which every number is within its bounds and no field contradicts another, so that sizes computed
 * from it in 64 bits do not overflow. The fields and their bounds are tabled in config.c and
 * explained in models/FORMAT.md. */
#ifndef MODELS_CONFIG_H
#define MODELS_CONFIG_H

#include "models/model.h"

enum {
    CONFIG_BYTES_MAX = 1 << 20, /* of config.json */
    CONFIG_VOCAB_MAX = 1 << 24,
    CONFIG_WIDTH_MAX = 1 << 16, /* d_model, d_key */
    CONFIG_FF_MAX = 1 << 20,
    CONFIG_LAYER_MAX = 1024,
    CONFIG_HEAD_MAX = 1024,
    CONFIG_POSITION_MAX = 1 << 20,
    CONFIG_KEY_MAX = 1 << 24,
    CONFIG_CUTOFF_MAX = 16,    /* tails of an adaptive softmax */
    CONFIG_SPAN_MAX = 1 << 20, /* distances, and persistent keys of a head */
};

struct config_memory {
    struct pkm_info info;
    bool query_batch_norm; /* running statistics follow the query projection: folded at load */
    bool query_bias;
    bool query_normalize; /* each half of a query (flat keys: each query) has length 1 */
    bool shared_keys;     /* one key set for all halves and heads */
    bool slot_map;        /* slots are permuted for each head */
    bool modulo;          /* slots wrap at n_slot */
};

/* How heads share the text and the persistent vectors ("Augmenting Self-attention with Persistent
 * Memory", its ablations): one softmax over both; two, whose outputs are added; half of the heads
 * for each. */
enum attention { ATTENTION_JOINT, ATTENTION_SPLIT, ATTENTION_HEAD_SPLIT };

/* How the frequencies f of rotary positions are made slower, so that a model can be used for longer
 * texts than it was first trained on. LINEAR: f / factor. LLAMA3 (Llama 3.1): a frequency that
 * turns more than high times within original positions stays as it is, one that turns less than low
 * times becomes f / factor, and between these a mixture of the two, linear in the number of
 * turns. */
enum rope_kind { ROPE_PLAIN, ROPE_LINEAR, ROPE_LLAMA3 };
struct rope_scaling {
    enum rope_kind kind;
    double factor, low, high;
    int original; /* positions */
};

struct config {
    const struct model_family *family; /* what model_type names */
    int n_vocab, d_model, n_layer, n_head, d_ff;
    int d_head;  /* columns of a head: d_model / n_head but for memory_llama */
    int context; /* 0 = no limit */
    /* memory_llama: gated networks; heads of keys and values, each for n_head / n_kv_head heads of
     * queries; and the base of the rotary positions */
    bool gated;
    int n_kv_head;
    double rope_theta;
    struct rope_scaling rope_scaling;
    /* memory_llama: biases of queries, keys and values, of what attention gives out, and of
     * networks; and whether each head's queries and keys have an RMS norm. */
    bool attention_bias, attention_out_bias, ffn_bias, query_key_norm;
    /* all_attention: the longest distance, persistent keys per head (then d_ff is 0), and over how
     * many distances a head's own span ends (0 = all heads see max_span) */
    int max_span, n_persistent, span_ramp;
    enum attention attention;
    enum act act;
    float norm_eps;
    char tokenizer[MODEL_NAME_MAX];      /* kind of vocab.txt; "" = none */
    int n_cutoff;                        /* 0 = the output is not adaptive: adaptive.h */
    int cutoff[CONFIG_CUTOFF_MAX];       /* [n_cutoff] ascending: first word of each tail */
    int n_cutoff_width;                  /* = n_cutoff */
    int cutoff_width[CONFIG_CUTOFF_MAX]; /* [n_cutoff] */
    bool tie_output;                     /* the output matrix is embeddings.weight */
    int bos_id, eos_id, pad_id, unk_id;  /* -1 = none */
    struct end_ids ends;
    bool add_bos;
    int n_lang; /* 0 = no language embeddings */
    char lang[MODEL_LANG_MAX][MODEL_NAME_MAX];
    struct config_memory memory_default; /* an entry of "memories" without any key */
    int n_memory;
    struct config_memory memory[MODEL_PKM_MAX]; /* in order of execution */
};

/* Reads dir/config.json. */
enum err_code config_read(struct config *config, const char *dir, struct err *err);

/* Reads a configuration from memory; path is only named in errors. */
enum err_code config_parse(struct config *config, const char *text, size_t bytes, const char *path,
                           struct err *err);

#endif
