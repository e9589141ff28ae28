/* The CPU backend's threads.
 *
 * One caller (the engine's thread) hands out one job at a time and works on it itself as thread 0;
 * the call returns when every item is done. Between jobs a worker first spins, because the next op
 * of a step follows within microseconds, and then sleeps on a futex, so that an idle server costs
 * nothing and an oversubscribed machine makes progress: nobody ever spins longer than a fixed time.
 *
 * Nor does the caller wait for a worker that has not begun: it does the items itself, and shuts the
 * gate.
 *
 *   caller                                   worker
 *   write job; open the gate                 spin, then sleep, until job_number changes
 *   job_number++ ; wake sleepers             enter, if the gate is open
 *   work, until all items are taken          work
 *   shut the gate                            leave; the last one wakes the caller if it sleeps
 *   spin, then sleep, until nobody is inside
 */
#ifndef KERNELS_CPU_POOL_H
#define KERNELS_CPU_POOL_H

#include "kernels/err.h"

enum { POOL_THREADS_MAX = 256 };

/* How items are given to threads. It decides who computes an item, never what comes out. */
enum pool_split {
    /* 7/8 of the items in one contiguous piece per thread, so that each streams its own memory and
     * finds what it touched before; the rest one by one to whoever is done. A piece that its thread
     * has not begun goes to the caller in the end. For few rows. */
    POOL_STREAM,
    /* One by one to whoever is free. For items of many microseconds each. */
    POOL_DYNAMIC,
};

/* Does items first .. first+n-1 as thread number thread (0 = the caller). */
typedef void pool_fn(void *arg, int thread, int first, int n);

struct pool;

/* Owner of *pool: the caller, who ends it with pool_free. n_thread counts the caller. */
enum err_code pool_new(struct pool **pool, int n_thread, struct err *err);
void pool_free(struct pool *pool); /* NULL is fine */
int pool_n_thread(const struct pool *pool);

/* Runs fn over the items 0 .. n_item-1 and returns when all are done; their writes are visible. */
void pool_for(struct pool *pool, int n_item, enum pool_split split, pool_fn *fn, void *arg);

#endif
