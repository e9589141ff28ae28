/* Threads for requests whose reading takes long.
 *
 * Parsing and tokenising megabytes takes seconds; done on an http thread it would hold up the other
 * connections of that thread, health checks among them. http.c detaches such connections and hands
 * their exchanges to these threads.
 *
 * Short bodies go first, but none waits for ever: a body counts as if it had come later by the time
 * that it takes to read, so whatever comes after that time comes behind it. Of several threads one
 * takes no body above WORKER_SHORT_BYTES, so that a row of the longest holds up nobody else. */
#ifndef SERVER_WORKER_H
#define SERVER_WORKER_H

#include "kernels/err.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    WORKER_SHORT_BYTES = 1 << 20,
    WORKER_BYTES_PER_US = 1, /* about what a body's reading takes; tokenising is most of it */
};

/* Part of what is queued: no allocation, and the number of connections bounds the queue. */
struct worker_task {
    struct worker_task *next; /* the queue's */
    void (*run)(struct worker_task *task);
    size_t bytes;  /* of the body */
    int64_t at_us; /* the queue's: its place */
};

struct worker;

enum err_code worker_open(struct worker **worker, int n_thread, struct err *err);
/* Runs what is queued, then ends the threads. NULL is fine. */
void worker_close(struct worker *worker);
void worker_push(struct worker *worker, struct worker_task *task);
/* Takes a task back that no thread has begun; false: one has, or it was never pushed. */
bool worker_remove(struct worker *worker, struct worker_task *task);
/* Tasks that wait or run. Any thread. */
int worker_n_task(struct worker *worker);

#endif
