/* The blocks of SHA-256, for sha256.c and its test. */
#ifndef MODELS_SHA256_INSIDE_H
#define MODELS_SHA256_INSIDE_H

#include <stddef.h>
#include <stdint.h>

enum { SHA256_BLOCK = 64 /* bytes */ };

/* Adds n blocks to the state (FIPS 180-4, 6.2.2), with the processor's own instructions where it
 * has them; plain: in C alone. */
void sha256_blocks(uint32_t state[8], const unsigned char *data, size_t n);
void sha256_blocks_plain(uint32_t state[8], const unsigned char *data, size_t n);

#endif
