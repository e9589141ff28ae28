/* See arena.h. */
#include "models/arena.h"

#include "kernels/err.h"

size_t arena_mul(size_t a, size_t b)
{
    size_t product = 0;
    return __builtin_mul_overflow(a, b, &product) ? SIZE_MAX : product;
}

struct tensor arena_take(struct arena *arena, int64_t rows, int64_t cols, enum dtype dtype)
{
    CHECK(rows >= 0 && cols >= 0);
    char *const data = arena->base == NULL ? NULL : arena->base + arena->used;
    const size_t bytes = arena_mul(arena_mul((size_t)rows, (size_t)cols), dtype_bytes(dtype));
    const size_t padded = bytes > SIZE_MAX - 63 ? SIZE_MAX : (bytes + 63) / 64 * 64;
    if (__builtin_add_overflow(arena->used, padded, &arena->used)) {
        arena->used = SIZE_MAX;
    }
    return tensor_make(data, rows, cols, dtype);
}
