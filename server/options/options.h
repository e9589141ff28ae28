/* The options of every sub-command, from one table.
 *
 * A row of the table in options_table.c is a flag (--max-queue), its environment variable
 * (PKMSERVE_MAX_QUEUE), its type, default, bounds, help and the commands that take it; parsing,
 * validation and `pkmserve help` all read that table. A flag beats the environment, which beats the
 * default. main.c parses once; the rest of the program only reads struct options. */
#ifndef SERVER_OPTIONS_H
#define SERVER_OPTIONS_H

#include "engine/engine.h"

#include <limits.h>
#include <stdio.h>

enum command {
    COMMAND_SERVE = 1,
    COMMAND_SCORE = 2,
    COMMAND_GENERATE = 4,
    COMMAND_INSPECT = 8,
    COMMAND_BENCH = 16,
    COMMAND_HEALTH = 32,
    COMMAND_COMPARE = 64,
    COMMAND_MEMORY_COUNT = 128,
    COMMAND_MEMORY_ADD = 256,
    COMMAND_MEMORY_RANK = 512,
    COMMAND_MEMORY_HOT = 1024,
    COMMAND_MEMORY_INSPECT = 2048,
    COMMAND_MEMORY_DIFF = 4096,
    COMMAND_MEMORY_APPLY = 8192,
    COMMAND_MEMORY_EXAMPLES = 16384,
};

/* The value of a number without a default that was not given: below every allowed number. */
#define OPTION_NOT_GIVEN (-1e300)
enum { OPTION_INT_NOT_GIVEN = INT_MIN };

enum {
    OPTIONS_PATH_MAX = 4096,
    OPTIONS_NAME_MAX = 256,
    OPTIONS_MODEL_NAME_MAX =
        96 /* bytes: it is in every answer, and in vLLM's metrics in each line */
};

/* Every field has its default even when the command does not take the option. Strings are never
 * NULL; "" means not given. */
struct options {
    /* model */
    const char *model;             /* directory */
    const char *tokenizer;         /* "" = the model directory's */
    const char *served_model_name; /* "" is resolved to the last part of model */
    const char *device;            /* auto | cpu | cuda | ref */
    const char *gpu;               /* "" = the first */
    const char *dtype;             /* auto | f32 | bf16 | int8 | f16 */
    const char *kv_cache_dtype;    /* auto | f32 | bf16 */
    const char *memory_placement;  /* auto | device | host | mmap */
    bool force_int8;               /* whatever it loses */
    bool deterministic;            /* results do not depend on what else is computed */
    const char *memory_trace;      /* off | summary | on */
    bool memory_counts;            /* count look-ups slot by slot */
    const char *check;             /* off | on | full */
    int threads;

    /* engine */
    int max_model_len; /* 0 = the model's context */
    int max_seqs;
    int max_batch_tokens;
    int bulk_step_ms;  /* 0 = any */
    int64_t kv_tokens; /* 0 = max_seqs · context, less if memory is short */
    const char *prefix_cache;
    int max_queue;
    int64_t max_queue_tokens;
    int max_logprobs;

    /* requests */
    int max_items;
    int max_score_items;
    int64_t max_score_tokens;
    int64_t max_request_bytes, memory_trace_bytes, max_trace_bytes;
    const char *overlay_dir; /* "" = none */
    int64_t overlay_bytes;
    int64_t max_score_positions; /* 0 = OPTIONS_POSITIONS_PER_TOKEN times max_score_tokens */
    int64_t max_body_bytes;
    int default_max_tokens;
    int timeout_ms;
    int max_timeout_ms;
    bool strict;
    bool echo_bos;

    /* HTTP */
    const char *host;
    int port;                 /* 0 = take a free one */
    int admin_port;           /* 0 = none */
    const char *admin_host;   /* the address that it listens on */
    const char *api_key_file; /* "" = no keys are asked for */
    const char *cors;         /* origin of pages that may call; "" = none */
    bool ui;                  /* the web page */
    bool metrics_auth;
    int max_client_requests;     /* 0 = no limit */
    const char *trusted_proxies; /* "" = none */
    int body_threads;            /* read long bodies */
    const char *overload_status; /* 429 | 503 */
    const char *metrics_compat;  /* none | vllm | tgi */
    int max_connections;
    int64_t max_buffered_bytes;
    int min_read_rate;
    int read_window_s;
    int keepalive_s;
    double ping_s; /* a stream that has been silent for so long sends a comment */
    int header_timeout_s;
    int body_timeout_s;
    int stall_ready_s;
    int stall_live_s;
    int drain_delay_s;
    int shutdown_timeout_s;
    const char *log_format;   /* text | json */
    const char *log_level;    /* error | warn | info | debug */
    int64_t log_buffer_bytes; /* lines that wait to be written */

    /* command line tools */
    bool json;
    bool hash;          /* inspect: the SHA-256 of value tables */
    bool jsonl;         /* files hold one request a line */
    const char *output; /* "" = standard output; memory: none */
    bool resume;
    const char *text_field; /* "" = the route's */
    const char *fields;     /* of results; "" = all */
    const char *shard;      /* I/N; "" = all lines */
    int64_t max_line_bytes;
    bool ids;          /* files and prompts are token ids */
    bool memory;       /* score: usage and KL of the memories */
    const char *slots; /* score: an .npz file; memory examples: a list; "" = none */
    int max_context;
    int stride;
    const char *add_bos; /* auto | on | off */
    bool as_text;
    const char *windows; /* own | lm-eval | xlm | adaptive-span | sparse-memory-lm */
    int bptt;            /* 0 = not given */
    int batch_size;      /* the same */
    int max_tokens;      /* OPTION_INT_NOT_GIVEN: as a request that does not say */
    int min_tokens;
    double temperature; /* OPTION_NOT_GIVEN, as the next four may be: as the model recommends */
    int top_k;          /* OPTION_INT_NOT_GIVEN */
    double top_p;
    double min_p;
    double repetition_penalty;
    double typical_p;
    double presence_penalty;
    double frequency_penalty;
    const char *stop;
    bool ignore_eos;
    uint64_t seed;
    bool has_seed;        /* seed was given: otherwise the command draws one */
    const char *language; /* name or id; "" = the model's first */
    const char *ablate;   /* score, compare, generate: JSON; "" = none */
    const char *overlay;  /* score, compare, generate: a file; "" = none */
    bool ablate_sweep;    /* compare: each memory and head switched off in turn */
    const char *against;  /* compare: directory of the reference; "" = model */
    double max_kl;        /* compare: mean of nats per token that is still near enough */
    double max_worse;     /* compare: percent that perplexity may be worse */
    int rows;
    int max_batch; /* bench: largest number of sequences decoded at once */
    int positions;
    int rounds;
    /* memory */
    const char *background; /* rank: a counts file */
    int top;                /* rank: slots in the list */
    const char *by;         /* rank: tfidf | kl */
    double share;           /* hot: of the slots */
    int most;               /* examples: places of a slot */
    const char *counts;     /* inspect: a counts file; "" = none */
    const char *path;       /* health: what to ask for */
    int timeout_s;          /* health: for connecting, asking and the answer together */

    /* what follows the flags */
    int n_operand;
    const char *const *operand; /* Borrowed from argv: [n_operand] */

    char model_path[OPTIONS_PATH_MAX]; /* backs model when the shipped one is taken */
    char served_name_text[OPTIONS_MODEL_NAME_MAX +
                          1]; /* backs served_model_name when it is resolved */
};

/* Fills options from the defaults, the environment and argv[0..argc-1] (what follows the command's
 * name; operands are moved to its front). ERR_ARGUMENT names the flag or variable, the value and
 * its bounds. Strings are borrowed from argv and the environment. */
enum err_code options_parse(struct options *options, enum command command, int argc, char **argv,
                            struct err *err);

/* Resolves what the table cannot: an empty model becomes the one shipped with the program, looked
 * for in share/pkmserve/models/demo beside the bin directory (installed) and then in models/demo of
 * the folders above the executable (source tree); an empty served name becomes the directory's. */
enum err_code options_resolve(struct options *options, struct err *err);

/* The engine's part of options. Borrows their strings. */
struct engine_options options_engine(const struct options *options);

/* The flag, without its dashes, of the option that a request's field of this name stands for:
 * "top-k" for "top_k". NULL if no option does. */
const char *options_flag(const char *name);

enum { OPTIONS_POSITIONS_PER_TOKEN = 64 };
/* --max-score-positions, with 0 resolved. */
int64_t options_score_positions(const struct options *options);

/* Writes one line for each PKMSERVE_ variable that no option reads: most likely a typing error. */
void options_warn_environment(FILE *out);

/* Writes the flags of command, or with 0 the list of commands without those in missing, which this
 * program does not have. */
void options_help(FILE *out, unsigned command, unsigned missing);
/* Lists the commands of two words that begin with word. false: there is none. */
bool options_help_group(FILE *out, const char *word);

/* Writes the manual page ("man"), or the completions of a shell ("bash", "zsh", "fish"), of all
 * commands but those in missing. false: kind is none of them. */
bool options_document(FILE *out, const char *kind, unsigned missing);

/* The command whose name is nearest to what was typed, or NULL if none is near. */
const char *options_command_near(const char *typed);
/* COMMAND_* of a name, 0 if there is none. */
unsigned options_command(const char *name);

#endif
