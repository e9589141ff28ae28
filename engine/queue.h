/* The bounded queue between the front ends and the engine thread.
 *
 * Any thread pushes; the engine thread alone looks, removes and frees. Two classes, each first in,
 * first out; the policy (plan.c) chooses the class. A request stays in the queue until its last
 * sequence (a sample, a window of a text) has been admitted, so a long one can be cancelled or
 * overtaken by the other class half-way.
 *
 * A job is the engine's own record of one request. Jobs come from a pool made at open, so neither
 * pushing nor running allocates. */
#ifndef ENGINE_QUEUE_H
#define ENGINE_QUEUE_H

#include "engine/request.h"
#include "engine/stats.h"

#include <pthread.h>

struct job {
    struct request *request; /* one reference: the engine's */
    int64_t n_token;         /* what it counts in the queue */
    int64_t push_us;

    /* The rest belongs to the engine thread (links while queued: guard queue.mutex). */
    bool queued;
    int next_item;       /* the next sequence to admit */
    int64_t next_window; /* of that item */
    int n_running;       /* sequences running */
    bool dirty;          /* something was published since the last wake */
    struct job *dirty_next;
    struct job *prev, *next;
};

struct queue {
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    /* Guard of the following: mutex. */
    struct job *pool; /* Owner: this. [n_job] */
    struct job *free;
    struct job *head[2], *tail[2]; /* by enum priority */
    int n_waiting;
    int64_t n_token;
    bool woken; /* queue_wake was called since the last queue_wait */
    enum err_code closed;
    char closed_why[256];
    /* Fixed after open. */
    int n_waiting_max;
    int64_t n_token_max;
    bool opened;
    /* idle: the engine thread waits for work. heartbeat_us: when it last began a turn, or work
     * arrived. */
    atomic_bool idle;
    atomic_llong heartbeat_us;
    struct engine_stats *stats; /* Borrowed: its waiting gauges follow the queue */
};

/* n_running_max: requests that may be out of the queue and not freed yet. */
enum err_code queue_open(struct queue *queue, int n_waiting_max, int64_t n_token_max,
                         int n_running_max, struct engine_stats *stats, struct err *err);
void queue_close(struct queue *queue); /* must be empty; zeroed or closed ones are fine */

/* Takes a reference on success. ERR_QUEUE_FULL, ERR_QUEUE_TOKENS, or what queue_shut said. */
enum err_code queue_push(struct queue *queue, struct request *request, int64_t n_token,
                         struct err *err);
/* From now on every push fails with this code and reason. A later call changes the reason. */
void queue_shut(struct queue *queue, enum err_code code, const char *why);
/* Makes queue_wait return. Any thread. */
void queue_wake(struct queue *queue);

/* ---- engine thread only ---- */

/* Blocks until something waits or queue_wake was called. The engine counts as idle meanwhile. */
void queue_wait(struct queue *queue);
bool queue_is_empty(struct queue *queue);
struct job *queue_head(struct queue *queue, enum priority priority); /* NULL if none */
void queue_remove(struct queue *queue, struct job *job);
/* Removes and returns a job whose request was cancelled or is past its deadline; any job with all
 * set. NULL if there is none. */
struct job *queue_take_dead(struct queue *queue, int64_t now_us, bool all);
/* Back to the pool; the request's reference is the caller's to drop. */
void queue_job_free(struct queue *queue, struct job *job);

#endif
