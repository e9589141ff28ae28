/* See sha256.h. Names as in FIPS 180-4, section 6.2. */
#include "models/sha256.h"

#include <stdio.h>
#include <string.h>

enum { BLOCK = 64, LENGTH_AT = 56 /* where the last block has the message's length in bits */ };

/* The first 32 bits of the fractional parts of the cube roots of the first 64 primes. */
static const uint32_t K[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

static uint32_t rotate(uint32_t x, int n)
{
    return x >> n | x << (32 - n);
}

static void add_block(uint32_t state[8], const unsigned char *block)
{
    uint32_t w[64];
    uint32_t v[8];
    for (int t = 0; t < 16; t++) {
        w[t] = (uint32_t)block[4 * t] << 24 | (uint32_t)block[4 * t + 1] << 16 |
               (uint32_t)block[4 * t + 2] << 8 | (uint32_t)block[4 * t + 3];
    }
    for (int t = 16; t < 64; t++) {
        const uint32_t s0 = rotate(w[t - 15], 7) ^ rotate(w[t - 15], 18) ^ w[t - 15] >> 3;
        const uint32_t s1 = rotate(w[t - 2], 17) ^ rotate(w[t - 2], 19) ^ w[t - 2] >> 10;
        w[t] = w[t - 16] + s0 + w[t - 7] + s1;
    }
    memcpy(v, state, sizeof v);
    for (int t = 0; t < 64; t++) {
        const uint32_t s1 = rotate(v[4], 6) ^ rotate(v[4], 11) ^ rotate(v[4], 25);
        const uint32_t choice = (v[4] & v[5]) ^ (~v[4] & v[6]);
        const uint32_t t1 = v[7] + s1 + choice + K[t] + w[t];
        const uint32_t s0 = rotate(v[0], 2) ^ rotate(v[0], 13) ^ rotate(v[0], 22);
        const uint32_t majority = (v[0] & v[1]) ^ (v[0] & v[2]) ^ (v[1] & v[2]);
        memmove(v + 1, v, 7 * sizeof *v);
        v[4] += t1;
        v[0] = t1 + s0 + majority;
    }
    for (int i = 0; i < 8; i++) {
        state[i] += v[i];
    }
}

void sha256_begin(struct sha256 *sum)
{
    /* The first 32 bits of the fractional parts of the square roots of the first 8 primes. */
    *sum = (struct sha256){.state = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f,
                                     0x9b05688c, 0x1f83d9ab, 0x5be0cd19}};
}

void sha256_add(struct sha256 *sum, const void *data, size_t bytes)
{
    const unsigned char *at = data;
    size_t used = (size_t)(sum->n_byte % BLOCK);
    sum->n_byte += bytes;
    while (bytes > 0) {
        if (used == 0 && bytes >= BLOCK) {
            add_block(sum->state, at);
            at += BLOCK;
            bytes -= BLOCK;
            continue;
        }
        const size_t n = bytes < BLOCK - used ? bytes : BLOCK - used;
        memcpy(sum->block + used, at, n);
        at += n;
        bytes -= n;
        used += n;
        if (used == BLOCK) {
            add_block(sum->state, sum->block);
            used = 0;
        }
    }
}

void sha256_end(struct sha256 *sum, unsigned char digest[SHA256_BYTES])
{
    static const unsigned char padding[BLOCK] = {0x80};
    const uint64_t n_bit = 8 * sum->n_byte;
    const size_t used = (size_t)(sum->n_byte % BLOCK);
    unsigned char length[8];
    for (int i = 0; i < 8; i++) {
        length[i] = (unsigned char)(n_bit >> (56 - 8 * i));
    }
    sha256_add(sum, padding, used < LENGTH_AT ? LENGTH_AT - used : BLOCK + LENGTH_AT - used);
    sha256_add(sum, length, sizeof length);
    for (int i = 0; i < SHA256_BYTES; i++) {
        digest[i] = (unsigned char)(sum->state[i / 4] >> (24 - 8 * (i % 4)));
    }
}

bool sha256_is_hex(const char *text)
{
    return strlen(text) == SHA256_HEX - 1 && strspn(text, "0123456789abcdef") == SHA256_HEX - 1;
}

void sha256_end_hex(struct sha256 *sum, char hex[SHA256_HEX])
{
    unsigned char digest[SHA256_BYTES];
    sha256_end(sum, digest);
    for (int i = 0; i < SHA256_BYTES; i++) {
        (void)snprintf(hex + 2 * i, 3, "%02x", digest[i]);
    }
}
