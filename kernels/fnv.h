/* FNV-1a, a hash of 64 bits for tables and fingerprints.
 * Source: the Internet-Draft "The FNV Non-Cryptographic Hash Algorithm". */
#ifndef KERNELS_FNV_H
#define KERNELS_FNV_H

#include <stddef.h>
#include <stdint.h>

#define FNV_BEGIN UINT64_C(0xcbf29ce484222325)

/* hash: FNV_BEGIN, or of the bytes before. */
static inline uint64_t fnv_hash(uint64_t hash, const void *data, size_t bytes)
{
    const unsigned char *const byte = (const unsigned char *)data;
    for (size_t i = 0; i < bytes; i++) {
        hash = (hash ^ byte[i]) * UINT64_C(0x100000001b3);
    }
    return hash;
}

#endif
