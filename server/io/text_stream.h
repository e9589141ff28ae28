/* The text of one generated continuation, token by token.
 *
 * Held back are bytes that do not yet form a character and characters that may be the beginning of
 * a stop string; the stop string itself never comes out unless the request keeps it. The same calls
 * make the streamed and the whole text, so both are equal. Ids alone (no tokenizer) have no text.
 */
#ifndef SERVER_TEXT_STREAM_H
#define SERVER_TEXT_STREAM_H

#include "engine/engine.h"
#include "engine/tokenizer.h"
#include "server/json/text.h"

struct text_stream {
    const struct request *request;     /* Borrowed */
    const struct item *item;           /* Borrowed */
    const struct tokenizer *tokenizer; /* Borrowed; may be NULL */
    const struct end_ids *ends;        /* Borrowed */
    struct detok detok;
    char *buffer; /* Owner: this. [buffer_max] */
    size_t buffer_max;
    struct text held;   /* characters that have not been given out */
    int64_t n_out_byte; /* bytes given out */
    int64_t n_char;     /* characters that the tokens so far have completed */
    int n_token;        /* tokens taken */
    size_t n_fresh;     /* bytes of buffer: the characters that the last token completed */
    bool matched;       /* held contains a whole stop string */
};

bool text_stream_begin(struct text_stream *gen, const struct request *request,
                       const struct item *item, const struct tokenizer *tokenizer,
                       const struct end_ids *ends); /* false: out of memory */
void text_stream_end(struct text_stream *gen);      /* zeroed is fine */

/* Whether token n_token of the item can be taken: it is there, and how it is shown is known. A
 * token that may end the text waits until the item's state says whether it did. */
bool text_stream_ready(const struct text_stream *gen, int n_out, enum finish state);
/* Takes the next token, appends the text that is ready to out, and returns the token's offset in
 * characters of the continuation (-1 without a tokenizer). */
int64_t text_stream_push(struct text_stream *gen, enum finish state, int n_out, struct text *out);
/* Whether the token taken last ends the text, but the item's state does not say so yet: it will in
 * a moment, from the same step. */
bool text_stream_undecided(const struct text_stream *gen, int n_out, enum finish state);
/* After the last token: appends the characters held back that belong to the text. */
void text_stream_flush(struct text_stream *gen, struct text *out);

#endif
