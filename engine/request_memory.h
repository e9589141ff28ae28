/* The memory that requests hold, bounded in all.
 *
 *   arrays   ids and results, allocated when a request is built and freed with it. Each request
 *            counts its bytes here first and is refused when they do not fit.
 *   arena    memory traces: one region, reserved at open. A request takes a block of it when its
 *            first sequence is admitted and gives it back when it is freed. Pages that no block
 *            holds are returned to the system.
 *
 * Shared by the engine and the requests, which may outlive it; the last one to drop it frees it.
 * Any thread. */
#ifndef ENGINE_REQUEST_MEMORY_H
#define ENGINE_REQUEST_MEMORY_H

#include "kernels/err.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct request_memory;

/* A piece of the arena. Its owner is who took it. */
struct memory_block {
    size_t first, bytes; /* multiples of the page size; bytes 0 = not taken */
    struct memory_block *before, *after;
};

/* arrays_max: bytes of arrays together, 0 = any. arena_bytes may be 0. Gives one reference.
 * ERR_MEMORY. */
enum err_code request_memory_open(struct request_memory **memory, int64_t arrays_max,
                                  size_t arena_bytes, struct err *err);
struct request_memory *request_memory_keep(struct request_memory *memory); /* one more reference */
void request_memory_drop(struct request_memory *memory);                   /* NULL is fine */

/* Who may make room: relieve is called, without a lock, when arrays do not fit, with the bytes that
 * are lacking. Set before the first request. */
void request_memory_relieved_by(struct request_memory *memory,
                                void (*relieve)(void *ctx, int64_t bytes), void *ctx);
/* Counts bytes of arrays; false: they would exceed the bound. */
bool request_memory_count(struct request_memory *memory, int64_t bytes);
void request_memory_uncount(struct request_memory *memory, int64_t bytes);
int64_t request_memory_counted(const struct request_memory *memory);
int64_t request_memory_arrays_max(const struct request_memory *memory);

/* A zeroed block of the arena, NULL if it has no free piece of this size now. */
void *request_memory_take(struct request_memory *memory, struct memory_block *block, size_t bytes);
/* Does nothing for a block that was not taken. */
void request_memory_give(struct request_memory *memory, struct memory_block *block);
size_t request_memory_arena_bytes(const struct request_memory *memory);
size_t request_memory_arena_used(struct request_memory *memory);

#endif
