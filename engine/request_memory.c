/* The memory that requests hold: see request_memory.h.
 *
 * The blocks of the arena are a list in the order of their addresses, and the first gap that is
 * large enough is taken. There are at most as many blocks as requests, so a walk is short. A block
 * is whole pages; giving it back drops them, so that the next holder finds zeros. */
#include "engine/request_memory.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

struct request_memory {
    atomic_int refs;
    atomic_llong counted;
    int64_t arrays_max;                        /* 0 = any */
    void (*relieve)(void *ctx, int64_t bytes); /* NULL: nobody */
    void *relieve_ctx;
    char *arena; /* Owner: this. [arena_bytes], mapped */
    size_t arena_bytes;
    pthread_mutex_t mutex;
    struct memory_block *first; /* Guard: mutex. In the order of addresses */
};

static size_t page_bytes(void)
{
    return (size_t)sysconf(_SC_PAGESIZE);
}

/* What a block of bytes takes of the arena. */
static size_t rounded(size_t bytes)
{
    const size_t page = page_bytes();
    return (bytes + page - 1) / page * page;
}

enum err_code request_memory_open(struct request_memory **memory, int64_t arrays_max,
                                  size_t arena_bytes, struct err *err)
{
    *memory = NULL;
    struct request_memory *const new = calloc(1, sizeof *new);
    if (new == NULL) {
        return err_set(err, ERR_MEMORY, "no memory to count that of requests");
    }
    new->arrays_max = arrays_max;
    if (arena_bytes > 0) {
        new->arena_bytes = rounded(arena_bytes);
        /* Untouched pages cost nothing. */
        void *const arena = mmap(NULL, new->arena_bytes, PROT_READ | PROT_WRITE,
                                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (arena == MAP_FAILED) {
            const size_t wanted = new->arena_bytes;
            free(new);
            return err_set(err, ERR_MEMORY,
                           "cannot reserve %zu bytes for memory traces: lower --memory-trace-bytes",
                           wanted);
        }
        new->arena = arena;
    }
    CHECK(pthread_mutex_init(&new->mutex, NULL) == 0);
    atomic_init(&new->refs, 1);
    *memory = new;
    return ERR_OK;
}

struct request_memory *request_memory_keep(struct request_memory *memory)
{
    (void)atomic_fetch_add_explicit(&memory->refs, 1, memory_order_relaxed);
    return memory;
}

void request_memory_drop(struct request_memory *memory)
{
    if (memory == NULL || atomic_fetch_sub_explicit(&memory->refs, 1, memory_order_acq_rel) != 1) {
        return;
    }
    CHECK(memory->first == NULL && atomic_load(&memory->counted) == 0);
    if (memory->arena != NULL) {
        CHECK(munmap(memory->arena, memory->arena_bytes) == 0);
    }
    (void)pthread_mutex_destroy(&memory->mutex);
    free(memory);
}

/* ---- arrays -------------------------------------------------------------------------------- */

void request_memory_relieved_by(struct request_memory *memory,
                                void (*relieve)(void *ctx, int64_t bytes), void *ctx)
{
    memory->relieve = relieve;
    memory->relieve_ctx = ctx;
}

/* Bytes that are lacking; 0: they were counted. */
static int64_t count(struct request_memory *memory, int64_t bytes)
{
    long long now = atomic_load_explicit(&memory->counted, memory_order_relaxed);
    do {
        if (memory->arrays_max > 0 && bytes > memory->arrays_max - now) {
            return bytes - (memory->arrays_max - now);
        }
    } while (!atomic_compare_exchange_weak_explicit(&memory->counted, &now, now + bytes,
                                                    memory_order_relaxed, memory_order_relaxed));
    return 0;
}

bool request_memory_count(struct request_memory *memory, int64_t bytes)
{
    const int64_t lacking = count(memory, bytes);
    if (lacking > 0 && memory->relieve != NULL) {
        memory->relieve(memory->relieve_ctx, lacking);
        return count(memory, bytes) == 0;
    }
    return lacking == 0;
}

void request_memory_uncount(struct request_memory *memory, int64_t bytes)
{
    (void)atomic_fetch_sub_explicit(&memory->counted, bytes, memory_order_relaxed);
}

int64_t request_memory_counted(const struct request_memory *memory)
{
    return atomic_load_explicit(&memory->counted, memory_order_relaxed);
}

int64_t request_memory_arrays_max(const struct request_memory *memory)
{
    return memory->arrays_max;
}

/* ---- the arena ----------------------------------------------------------------------------- */

void *request_memory_take(struct request_memory *memory, struct memory_block *block, size_t bytes)
{
    CHECK(block->bytes == 0 && bytes > 0);
    const size_t wanted = rounded(bytes);
    void *taken = NULL;
    CHECK(pthread_mutex_lock(&memory->mutex) == 0);
    size_t at = 0;
    struct memory_block *before = NULL;
    struct memory_block *after = memory->first;
    while (after != NULL && after->first - at < wanted) {
        at = after->first + after->bytes;
        before = after;
        after = after->after;
    }
    if (wanted <= (after != NULL ? after->first : memory->arena_bytes) - at) {
        *block =
            (struct memory_block){.first = at, .bytes = wanted, .before = before, .after = after};
        *(before != NULL ? &before->after : &memory->first) = block;
        if (after != NULL) {
            after->before = block;
        }
        taken = memory->arena + at;
    }
    CHECK(pthread_mutex_unlock(&memory->mutex) == 0);
    return taken;
}

void request_memory_give(struct request_memory *memory, struct memory_block *block)
{
    if (block->bytes == 0) {
        return;
    }
    CHECK(madvise(memory->arena + block->first, block->bytes, MADV_DONTNEED) == 0);
    CHECK(pthread_mutex_lock(&memory->mutex) == 0);
    *(block->before != NULL ? &block->before->after : &memory->first) = block->after;
    if (block->after != NULL) {
        block->after->before = block->before;
    }
    CHECK(pthread_mutex_unlock(&memory->mutex) == 0);
    *block = (struct memory_block){0};
}

size_t request_memory_arena_bytes(const struct request_memory *memory)
{
    return memory->arena_bytes;
}

size_t request_memory_arena_used(struct request_memory *memory)
{
    size_t used = 0;
    CHECK(pthread_mutex_lock(&memory->mutex) == 0);
    for (const struct memory_block *b = memory->first; b != NULL; b = b->after) {
        used += b->bytes;
    }
    CHECK(pthread_mutex_unlock(&memory->mutex) == 0);
    return used;
}
