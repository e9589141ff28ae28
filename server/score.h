/* One scoring request: from its bytes to the /score answer.
 *
 *   score_parse → engine_submit(job.request) → wait for n_item_done == n_item → score_write
 *
 * Used by POST /score and by the command line, so that there is one way. The definitions of all
 * figures are in server/README.md. */
#ifndef SERVER_SCORE_H
#define SERVER_SCORE_H

#include "server/answer.h"

enum { SCORE_ID_MAX = 129 };

/* Override of an item's normalisers; -1 = counted. */
struct score_units {
    int64_t words, bytes;
};

struct score_job {
    json_t *body;              /* Owner: this. Texts are borrowed from it */
    struct input_list inputs;  /* Owner: this; their ids belong to the request */
    struct request *request;   /* Owner: one reference. Item i scores input i */
    struct score_units *units; /* Owner: this. [n_item] */
    bool by_text;              /* form A; else B */
    int logprobs;              /* -1 = not asked for */
    bool ranks;
    enum input_memory memory;
    char id[SCORE_ID_MAX]; /* the client's, "" = none */
    char ignored[FIELDS_IGNORED_MAX];
};

/* Reads and checks everything, tokenises, fills the request (all but id and wake). false: error
 * says why. The job must be freed in either case. */
bool score_parse(struct score_job *job, const char *body, size_t bytes,
                 const struct api_limits *limits, struct api_error *error);
/* Cancels what still runs. Zeroed is fine. */
void score_free(struct score_job *job);

/* Counts and sums of one item, or pooled over items. A count of -1 is unknown (ids without a
 * tokenizer); a figure that is not defined is NaN. */
struct score_figures {
    int64_t n_items, n_tokens, n_scored, n_bytes, n_chars, n_words;
    double sum_logprob, min_logprob;
    bool is_greedy, impossible, nan;
    double mean_nll, perplexity, bits_per_token;
    double bits_per_byte, byte_perplexity, word_perplexity;
};
/* false: no memory for the text of ids. The item is over. */
bool score_figures_item(struct score_figures *figures, const struct score_job *job, int item,
                        const struct tokenizer *tokenizer, struct api_error *error);
/* Adds one item's counts and sums to the pool; score_figures_derive then makes the rest. */
void score_figures_add(struct score_figures *pool, const struct score_figures *item);
void score_figures_derive(struct score_figures *figures);

int64_t score_n_prompt(const struct score_job *job);
/* Windows of an item as the answer reports them. */
int64_t score_n_window(const struct score_job *job, int item);

/* The whole answer. false: an item failed; what was written is useless. */
bool score_write(struct text *out, const struct score_job *job, const struct api_limits *limits,
                 const struct answer_meta *meta, struct api_error *error);

#endif
