/* One thread for requests whose reading takes long.
 *
 * Parsing and tokenising megabytes takes seconds; done on an http thread it would hold up the other
 * connections of that thread, health checks among them. http.c detaches such connections and hands their exchanges to this thread,
 * in the order of their arrival. */
#ifndef SERVER_WORKER_H
#define SERVER_WORKER_H

#include "kernels/err.h"

/* Part of what is queued: no allocation, and the number of connections bounds the queue. */
struct worker_task {
    struct worker_task *next; /* the queue's */
    void (*run)(struct worker_task *task);
};

struct worker;

enum err_code worker_open(struct worker **worker, struct err *err);
/* Runs what is queued, then ends the thread. NULL is fine. */
void worker_close(struct worker *worker);
void worker_push(struct worker *worker, struct worker_task *task);

#endif
