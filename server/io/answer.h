/* Pieces that the answers of /generate and /score share. */
#ifndef SERVER_ANSWER_H
#define SERVER_ANSWER_H

#include "engine/tokenizer.h"
#include "server/io/slots.h"
#include "server/json/json.h"

/* What an answer says besides its results. */
struct answer_meta {
    bool bare; /* only what is about this request: no model, no times, no usage */
    bool id_is_integer;
    const char *id;
    const char *model;
    int64_t created;                         /* seconds since 1970 */
    int64_t begin_us;                        /* when the request arrived, by clock_now_us() */
    const struct request_overlays *overlays; /* Borrowed: overlays that it was computed with; NULL =
                                              * none */
};

/* "id", "object", "created", "model", in the contract's order, and "overlay" where there are
 * some. */
void answer_head(struct text *out, const struct answer_meta *meta, const char *object);
/* "usage". Cached tokens are the prompt tokens that did not have to be computed, because an earlier
 * text had them; of the samples of a prompt the first counts, as the prompt itself counts once.
 * They are not known while a request runs: then give NULL for it. */
void answer_usage(struct text *out, const struct request *request, int64_t n_prompt,
                  int64_t n_completion);

/* Milliseconds; a time that did not happen is 0. */
struct answer_times {
    double queue_ms, prefill_ms, decode_ms, total_ms;
};
struct answer_times answer_times_of(const struct request *request, int64_t begin_us);
/* "timings". n_decoded: tokens drawn in the decode phase, the first of each sequence left out. */
void answer_timings(struct text *out, const struct request *request, int64_t begin_us,
                    int64_t n_prompt, int64_t n_decoded);

/* Whether an item in this state has ended, and not well. */
bool answer_state_failed(enum finish state);
/* Whether an item did not end well. Then the answer is an error, and the other items are
 * cancelled. */
bool answer_end_failed(struct request *request);
/* Of several inputs the one for which the model gave no number, so that the request failed; -1 is
 * none. */
int answer_without_number(const struct request *request);
/* The error of the first item for which the engine failed, or else that did not end well; it names
 * the input without numbers. true: all did. */
bool answer_check(const struct request *request, struct api_error *error);

/* ---- tokens -------------------------------------------------------------------------------- */

/* One entry of native log-probabilities. */
struct answer_token {
    int32_t id;
    int32_t before; /* the id before it, -1 = none: after "da@@" there is no space */
    int64_t offset; /* characters of the text before it; -1 = unknown */
    bool first;     /* nothing predicts it: logprob and rank are null */
    bool added;     /* the server put it in front: not part of the text */
    float logprob;
    bool has_rank, has_entropy, has_bytes;
    int32_t rank;
    float entropy;
    int n_top; /* -1 = no list is written */
    const int32_t *top_id;
    const float *top_logprob;
    const char *fresh; /* generated: the characters that it completed; NULL for a prompt's */
    size_t n_fresh;
};
void answer_put_token(struct text *out, const struct tokenizer *tokenizer,
                      const struct answer_token *token);
/* How a token is shown after the token before (-1 = none): a control token by its name, bytes that
 * are no character as U+FFFD, without a tokenizer token_id:N. Appends a JSON string. */
void answer_put_spelling(struct text *out, const struct tokenizer *tokenizer, int32_t id,
                         int32_t before);
/* "id" and "piece", which is null without a tokenizer. */
void answer_put_piece(struct text *out, const struct tokenizer *tokenizer, int32_t id);
/* "logprob" of value: a number, or null and "impossible" for minus infinity. */
void answer_put_logprob(struct text *out, float value);

/* Walks over the tokens of an input and returns the offset of each in characters. */
struct answer_walk {
    const struct input *input;         /* Borrowed */
    const struct tokenizer *tokenizer; /* Borrowed; NULL: all offsets are unknown */
    size_t byte;                       /* text: the characters before it have been counted */
    int64_t n_char;
    struct detok detok; /* ids */
    char *buffer;       /* Owner: this. [buffer_max] */
    size_t buffer_max;
};
bool answer_walk_begin(struct answer_walk *walk, const struct input *input,
                       const struct tokenizer *tokenizer); /* false: out of memory */
/* Of token i, counted without the BOS that the server added; in order, each once. */
int64_t answer_walk_next(struct answer_walk *walk, int64_t i, int32_t id);
void answer_walk_end(struct answer_walk *walk);

/* The text of an input: its own, or what its ids spell. false: error. */
bool answer_input_text(struct text *out, const struct input *input, const int32_t *ids,
                       const struct tokenizer *tokenizer, struct api_error *error);

#endif
