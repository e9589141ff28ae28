/* For the fuzz targets of tokenizers: the parts of an input; ids as text, whole and as a stream.
 * Header only. */
#ifndef TESTS_FUZZ_FUZZ_DECODE_H
#define TESTS_FUZZ_FUZZ_DECODE_H

#include "engine/tokenizer.h"
#include "kernels/utf8.h"

#include <stdlib.h>
#include <string.h>

/* Decodes ids both ways, checks that they agree and are valid UTF-8; *text is malloc'd. */
static inline void fuzz_decode(const struct tokenizer *tokenizer, const int32_t *ids, size_t n_ids,
                               char **text, size_t *text_bytes)
{
    CHECK(tokenizer_decode(tokenizer, ids, n_ids, text, text_bytes, NULL) == ERR_OK);
    CHECK(utf8_valid_prefix(*text, *text_bytes) == *text_bytes);
    const size_t room = tokenizer_bytes_max(tokenizer) + 16;
    char *const out = malloc(room);
    CHECK(out != NULL);
    struct detok detok;
    detok_begin(&detok, tokenizer, true);
    size_t at = 0;
    for (size_t i = 0; i <= n_ids; i++) {
        const size_t n =
            i < n_ids ? detok_push(&detok, ids[i], out, room) : detok_end(&detok, out, room);
        CHECK(n <= *text_bytes - at && memcmp(*text + at, out, n) == 0);
        at += n;
    }
    CHECK(at == *text_bytes);
    free(out);
}

/* data up to the next NUL, malloc'd; *at goes behind it. */
static inline char *fuzz_take(const uint8_t *data, size_t bytes, size_t *at, size_t *n)
{
    const uint8_t *const end = memchr(data + *at, '\0', bytes - *at);
    *n = end != NULL ? (size_t)(end - data) - *at : bytes - *at;
    char *const text = malloc(*n + 1);
    CHECK(text != NULL);
    memcpy(text, data + *at, *n);
    text[*n] = '\0';
    *at += *n + (end != NULL ? 1 : 0);
    return text;
}

#endif
