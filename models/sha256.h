/* SHA-256 (FIPS 180-4): the name of a content. It tells whether an overlay was made for this table,
 * and which rows a cached page was computed with. */
#ifndef MODELS_SHA256_H
#define MODELS_SHA256_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { SHA256_BYTES = 32, SHA256_HEX = 2 * SHA256_BYTES + 1 /* with the final 0 */ };

struct sha256 {
    uint32_t state[8];
    uint64_t n_byte; /* added so far */
    unsigned char block[64];
};

/* Whether text is a sum as sha256_end_hex writes it. */
bool sha256_is_hex(const char *text);

void sha256_begin(struct sha256 *sum);
void sha256_add(struct sha256 *sum, const void *data, size_t bytes);
/* Writes the sum of all that was added; sum must begin again before it is used again. */
void sha256_end(struct sha256 *sum, unsigned char digest[SHA256_BYTES]);
/* The same as lower-case hexadecimal digits. */
void sha256_end_hex(struct sha256 *sum, char hex[SHA256_HEX]);

#endif
