/* Finds stop strings in a text that arrives token by token, also across token borders.
 *
 * Of all matches the one that ends first counts; among those that end together the one that begins
 * first, then the lower index. So the answer depends on the text alone, not on how it was cut into
 * tokens. Owned by a sequence; engine thread only; no allocation. */
#ifndef ENGINE_STOP_H
#define ENGINE_STOP_H

#include "engine/request.h"
#include "engine/tokenizer.h"

struct stop_match {
    int index;     /* into sampling.stop; -1 = none */
    int64_t begin; /* byte of the text where the match begins */
};

struct stop_scan {
    const struct sampling *sampling; /* Borrowed: the request's */
    struct detok detok;
    int64_t n_byte;                /* bytes of text so far */
    int n_tail;                    /* the last of them are kept */
    char tail[2 * STOP_BYTES_MAX]; /* moved down when full, so that matches are contiguous */
};

/* tokenizer may be NULL if there are no stop strings. */
void stop_begin(struct stop_scan *scan, const struct sampling *sampling,
                const struct tokenizer *tokenizer);
/* Adds the text of token. Matches that end in it count only if count is set. buffer is scratch of
 * buffer_max >= tokenizer_bytes_max + 16 bytes. */
struct stop_match stop_push(struct stop_scan *scan, int32_t token, bool count, char *buffer,
                            size_t buffer_max);
/* The same for bytes of text. */
struct stop_match stop_push_text(struct stop_scan *scan, const char *text, size_t bytes,
                                 bool count);

#endif
