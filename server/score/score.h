/* One scoring request: from its bytes to the /score answer.
 *
 *   score_parse → engine_submit(job.request) → wait for n_item_done == n_item → score_write
 *
 * Used by POST /score, its stream (score_stream.h) and the command line, so that there is one way;
 * POST /v1/score (score_labels.h) makes another kind of job. The definitions of all figures are in
 * server/SCORING.md.
 *
 * Result i of the answer is item i · n_per of the request. With "unconditional" n_per is 2, and the
 * item that follows is the same ending after BOS alone. */
#ifndef SERVER_SCORE_H
#define SERVER_SCORE_H

#include "server/io/ablate.h"
#include "server/io/overlay.h"
#include "server/io/answer.h"
#include "server/io/answer_memory.h"
#include "server/io/slots.h"

enum { SCORE_ID_MAX = 129, SCORE_BATCH_MAX = 65536 };

/* The forms of input, in the order of enum metrics_form. */
enum score_form { SCORE_TEXT, SCORE_IDS, SCORE_RANKING, SCORE_PAIRS };

/* Whose windows are used: the request's own, or those of an evaluator (score_windows.c). */
enum score_scheme {
    SCORE_SCHEME_OWN,
    SCORE_SCHEME_LM_EVAL,
    SCORE_SCHEME_XLM,
    SCORE_SCHEME_ADAPTIVE_SPAN,
    SCORE_SCHEME_SPARSE_MEMORY
};

/* The fields that say how texts are cut. */
struct score_windows {
    enum score_scheme scheme;
    int64_t window, stride; /* in positions, and in new tokens for each window */
    int64_t bptt;           /* as its evaluator calls it; 0 = not given */
    int64_t batch;          /* rows of adaptive-span's evaluator */
    int32_t prefix;         /* the token that lm-eval puts in front */
    int on_long;            /* 0 = cut into windows, 1 = refused; -1 = not given */
};

/* What a result is about. */
struct score_entry {
    int64_t words, bytes;      /* "units": override of the normalisers; -1 = counted */
    int64_t first;             /* the result is about ids[first ..]; before them are BOS and
                                * context */
    int64_t block, block_used; /* of its item (engine/request.h) */
    const char *ending;        /* Borrowed from the body: a continuation given as text; else NULL */
    size_t ending_bytes;
};

struct score_job {
    struct json_t *body; /* Owner: this. Texts are borrowed from it */
    enum score_form form;
    struct input_list inputs;  /* Owner: this; their ids belong to the request. One per result */
    struct score_entry *entry; /* Owner: this. [inputs.n] */
    struct request *request;   /* Owner: one reference */
    int n_per;                 /* items of the request for each result */
    enum score_scheme scheme;
    int64_t bptt; /* of the scheme */
    int logprobs; /* -1 = not asked for */
    bool ranks, stream;
    bool softmax; /* of /v1/score */
    enum input_memory memory;
    struct slots_wish slots;          /* with MEMORY_SLOTS */
    struct request_ablate ablate;     /* until the request takes it */
    struct request_overlays overlays; /* likewise */
    char id[SCORE_ID_MAX];            /* the client's, "" = none */
    bool id_is_integer;
    char ignored[FIELDS_IGNORED_MAX];
};

/* Reads and checks everything, tokenises, fills the request (all but id and wake). false: error
 * says why. The job must be freed in either case. */
bool score_parse(struct score_job *job, const char *body, size_t bytes,
                 const struct api_limits *limits, struct api_error *error);
/* Cancels what still runs. Zeroed is fine. */
void score_free(struct score_job *job);

struct item *score_item(const struct score_job *job, int result);
/* Tokens that the model reads, BOS and each result's context included. */
int64_t score_n_prompt(const struct score_job *job);

/* ---- pieces of the parsers (score_parse.c, score_forms.c) ----------------------------------- */

/* Reads whichever form the body has: inputs, entry, form and n_per. */
bool score_read_forms(struct fields *fields, struct score_job *job,
                      const struct score_windows *windows, const struct api_limits *limits);
/* How texts are to be cut; an error is in fields. */
void score_windows_read(struct fields *fields, struct score_windows *windows,
                        const struct api_limits *limits);
/* Cuts the job's inputs into blocks, where the scheme does so. */
bool score_windows_cut(struct score_job *job, const struct score_windows *windows,
                       const struct api_limits *limits, struct api_error *error);
const char *score_scheme_name(enum score_scheme scheme); /* NULL for the request's own */
/* Whether the text is scored in blocks, of which not every token is predicted. */
bool score_scheme_blocks(enum score_scheme scheme);
/* Makes the input's own text of two parts. *total is the sum over the request, which is bounded. */
bool score_join(struct input *input, const char *const part[2], const size_t bytes[2],
                size_t *total, const char *param, const struct api_limits *limits,
                struct api_error *error);
/* Bodies of servers that compare texts; false: it is one. */
bool score_refuse_similarity(struct fields *fields);
/* Token ids, 1 to TARGET_MAX of them. *target is malloc'd; both stay as they are if absent. */
void score_read_targets(struct fields *fields, const char *name, const struct api_limits *limits,
                        int32_t **target, int64_t *n_target);
/* The request of all inputs, without its items. */
bool score_new_request(struct score_job *job, const int32_t *target, int64_t n_target,
                       const struct api_limits *limits, struct api_error *error);
/* Sets what depends on the number of positions that all items together make the engine compute: the
 * limit, and the class if priority is -1. All items are set. */
bool score_set_priority(struct score_job *job, int priority, const struct api_limits *limits,
                        struct api_error *error);
bool score_set_item(struct score_job *job, int i, int32_t *ids, int64_t n_ids,
                    const struct api_limits *limits, struct api_error *error);

/* ---- figures (score.c) ---------------------------------------------------------------------- */

/* Counts and sums of one result, or pooled over results. A count of -1 is unknown (ids without a
 * tokenizer); a figure that is not defined is NaN, and with an impossible token figures are
 * infinite. */
struct score_figures {
    int64_t n_items, n_tokens, n_scored, n_bytes, n_chars, n_words;
    int64_t n_unk;  /* of n_tokens: unknown to the vocabulary */
    int64_t n_best; /* of n_scored: the most probable token */
    double sum_logprob, min_logprob;
    double unconditional; /* sum after BOS alone; NaN = not requested */
    bool is_greedy, impossible, nan;
    double mean_nll, perplexity, bits_per_token, accuracy;
    double bits_per_byte, bits_per_char, byte_perplexity, word_perplexity;
};
/* false: no memory for the text of ids. The result is over. */
bool score_figures_item(struct score_figures *figures, const struct score_job *job, int result,
                        const struct api_limits *limits, struct api_error *error);
/* Adds one result's counts and sums to the pool; score_figures_derive then makes the rest. */
void score_figures_add(struct score_figures *pool, const struct score_figures *item);
void score_figures_derive(struct score_figures *figures);

/* The number of a result's tokens that the vocabulary does not know; the end token that was
 * appended does not count. */
int64_t score_n_unk(const struct score_job *job, int result, const struct model_info *info);
/* Their sum over all results, and *n_tokens of which they are. */
int64_t score_count_unknown(const struct score_job *job, const struct model_info *info,
                            int64_t *n_tokens);

/* The best continuation by each measure; the first of equals. */
enum score_measure {
    SCORE_SUM,
    SCORE_PER_TOKEN,
    SCORE_PER_CHAR,
    SCORE_PER_BYTE,
    SCORE_MUTUAL,
    SCORE_MEASURE_N
};
struct score_ranking {
    double best[SCORE_MEASURE_N];
    int index[SCORE_MEASURE_N]; /* + 1; 0 = none has a finite value */
};
void score_ranking_add(struct score_ranking *ranking, int result,
                       const struct score_figures *figures);

/* ---- the answer (score_write.c) ------------------------------------------------------------- */

/* Reads a list like "perplexity,n_unk". ERR_ARGUMENT names the first that is no field of a
 * result. */
enum err_code score_fields_read(uint64_t *fields, const char *list, struct err *err);

/* Writes results one after another, in pieces if need be. */
struct score_writer {
    const struct score_job *job;     /* Borrowed */
    const struct api_limits *limits; /* Borrowed */
    uint64_t fields;                 /* of results that are wanted, by score_fields_read; 0 = all */
    int result;                      /* the next one to write, or the open one */
    struct score_figures pool;
    struct score_ranking ranking;

    bool begun;      /* what precedes the results is written */
    bool list_comma; /* of the list of results, between two pieces */

    /* Of the open result. */
    bool open, comma;
    int64_t token; /* index into its ids of the next entry of "tokens" */
    bool told;     /* the entries are complete */
    struct score_figures figures;
    struct answer_walk walk;
    struct answer_memory memory; /* what follows them */
};
void score_writer_begin(struct score_writer *writer, const struct score_job *job,
                        const struct api_limits *limits);
void score_writer_end(struct score_writer *writer); /* zeroed is fine */
/* Writes the result, or goes on with it, until out holds enough bytes; it is complete when
 * writer.result has moved on. The result's items are over and ended well. false: error. */
bool score_writer_next(struct score_writer *writer, struct text *out, size_t enough,
                       struct api_error *error);
/* What follows the results, when all are written: ranking, aggregate, usage, timings. */
void score_writer_tail(struct score_writer *writer, struct text *out,
                       const struct answer_meta *meta);

/* The whole answer in pieces: goes on with it until out holds enough bytes. *done: it is complete.
 * false: an item failed, or there is no memory; what was written is useless. */
bool score_write_piece(struct score_writer *writer, struct text *out, size_t enough,
                       const struct answer_meta *meta, bool *done, struct api_error *error);
/* The whole answer. false: an item failed; what was written is useless. */
bool score_write(struct text *out, const struct score_job *job, const struct api_limits *limits,
                 const struct answer_meta *meta, struct api_error *error);

#endif
