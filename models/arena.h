/* Lays tensors out in one buffer, each at a multiple of 64 bytes. The same code computes the
 * buffer's size and the addresses in it: it runs twice, and with base NULL the arena only counts.
 */
#ifndef MODELS_ARENA_H
#define MODELS_ARENA_H

#include "kernels/tensor.h"

struct arena {
    char *base;  /* Borrowed: the buffer, in the address space of its backend; or NULL */
    size_t used; /* bytes; SIZE_MAX once it overflowed: no buffer is that large */
};

struct tensor arena_take(struct arena *arena, int64_t rows, int64_t cols, enum dtype dtype);

/* a · b, or SIZE_MAX if that overflows. */
size_t arena_mul(size_t a, size_t b);

#endif
