/* Threads for requests that take long to read.
 *
 * Parsing and tokenising megabytes takes seconds; on an http thread this would hold up the other
 * connections of that thread, health checks among them. http.c detaches such connections and hands
 * their exchanges to these threads.
 *
 * Short bodies go first, but none waits for ever: a body is queued as if it had come later by the
 * time that it takes to read, so bodies that come after that time are read after it. The bodies of
 * one client are queued one behind the other, so that those of others come between. The first
 * thread takes bodies of any length, others none above WORKER_SHORT_BYTES and the last of several
 * none above WORKER_PROMPT_BYTES, so that long ones do not hold up all others. */
#ifndef SERVER_WORKER_H
#define SERVER_WORKER_H

#include "kernels/err.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    WORKER_SHORT_BYTES = 1 << 20,
    WORKER_PROMPT_BYTES = 64 * 1024,
    WORKER_BYTES_PER_US = 1, /* about what a body's reading takes; tokenising is most of it */
};

/* Part of what is queued: no allocation, and the number of connections bounds the queue. */
struct worker_task {
    struct worker_task *next; /* the queue's */
    void (*run)(struct worker_task *task);
    size_t bytes;    /* of the body */
    uint64_t client; /* whose it is; 0 = unknown */
    int64_t at_us;   /* the queue's: its place */
};

struct worker;

enum err_code worker_open(struct worker **worker, int n_thread, struct err *err);
/* Runs what is queued, then ends the threads. NULL is fine. */
void worker_close(struct worker *worker);
void worker_push(struct worker *worker, struct worker_task *task);
/* Takes back a task that no thread has begun; false: a thread has, or it was never pushed. */
bool worker_remove(struct worker *worker, struct worker_task *task);
/* Takes back any task that no thread has begun; NULL: there is none. */
struct worker_task *worker_take_back(struct worker *worker);
/* Tasks that wait or run. Any thread. */
int worker_n_task(struct worker *worker);

#endif
