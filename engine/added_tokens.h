/* Tokens that are found in a text before it is cut and merged: <|endoftext|>, <think>. Of several
 * that begin at one place the longest counts, and of several places the leftmost. Filled once,
 * then read by any number of threads. */
#ifndef ENGINE_ADDED_TOKENS_H
#define ENGINE_ADDED_TOKENS_H

#include "kernels/err.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { ADDED_TOKEN_BYTES_MAX = 4096, ADDED_TOKENS_MAX = 1 << 20 };

struct added_token {
    const char *text; /* Borrowed. Valid UTF-8, [bytes], bytes >= 1 */
    uint32_t bytes;
    int32_t id;
    bool special;        /* found only where special tokens are asked for */
    bool single_word;    /* only if it is not part of a word */
    bool lstrip, rstrip; /* takes the white space before or behind it */
};

struct added_tokens {
    struct added_token *token; /* [n] by bytes, once sorted. Owner: the caller */
    int32_t n;
    int32_t first[257]; /* the tokens that begin with byte b are first[b] to first[b + 1] - 1 */
};

/* Sorts the tokens. Returns one that is there twice, or NULL. */
const struct added_token *added_tokens_sort(struct added_tokens *tokens);

/* A search through one text (valid UTF-8). */
struct added_search {
    const struct added_tokens *tokens;
    const char *text;
    size_t bytes;
    bool special; /* special tokens are found too; otherwise they are passed over */
    size_t at;    /* where the search goes on */
    size_t plain; /* end of the last token found: from here on the text is not taken yet */
};

struct added_match {
    size_t first, end; /* the token with the white space that it takes */
    int32_t id;
};

/* The next token; false: there are no more. first is never before the end of the match before it,
 * unless that match took white space which is a token itself: then both are returned. */
bool added_search_next(struct added_search *search, struct added_match *match);

#endif
