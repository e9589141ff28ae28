/* The bounded queue between the front ends and the engine thread.
 *
 * Any thread pushes; the engine thread alone looks, removes and frees. There are two classes, and
 * the policy (plan.h) chooses the class and the request. A request stays in the queue until its
 * last sequence (a sample, a window of a text) has been admitted. Each time one is admitted the
 * request moves to the end of its class, so that requests take turns.
 *
 * What a request counts in the queue is the number of positions that it still makes the engine
 * compute. The limit does not count those of whoever has the most of them against the others, so
 * one large request does not keep them out.
 *
 * A job is the engine's own record of one request; a client's record counts what its requests have
 * waiting and running. Both come from pools made at open, so neither pushing nor running
 * allocates. */
#ifndef ENGINE_QUEUE_H
#define ENGINE_QUEUE_H

#include "engine/plan.h"
#include "engine/request.h"
#include "engine/stats.h"

#include <pthread.h>

/* Who has sent requests that are not over: request.client. Guard: queue.mutex, but n_running. */
struct client {
    uint64_t id;
    int n_job;          /* requests that are not over; 0 = the record is free */
    int n_waiting;      /* of them in the queue */
    int64_t n_position; /* positions of those */
    int n_running;      /* sequences. Engine thread only */
    int group;          /* its group in the step that is being filled: plan_sequence.group. Engine
                         * thread only */
    struct client *next;
};

struct job {
    struct request *request; /* one reference: the engine's */
    struct client *client;   /* NULL: unknown */
    int64_t n_position;      /* positions of its sequences that are not admitted. Guard: mutex */
    int64_t push_us;

    /* The rest belongs to the engine thread (links while queued: guard queue.mutex). */
    bool queued;
    int next_item;       /* the next sequence to admit */
    int64_t next_window; /* of that item */
    int n_running;       /* sequences running */
    int group;           /* as in struct client, if the client is unknown */
    bool lacks_traces;   /* no memory for them; until there is, no other request's get any */
    bool lacks_pages;    /* its next sequence lacks pages, as the cache is now */
    bool lacked_pages;   /* or has lacked them in an earlier turn */
    int n_passed;        /* sequences admitted since it first did */
    bool dirty;          /* something was published since the last wake */
    struct job *dirty_next;
    struct job *prev, *next;
};

struct queue_limits {
    int n_waiting;      /* requests */
    int64_t n_position; /* of all of them together */
    int n_running;      /* requests that may be out of the queue and not freed yet */
};

struct queue {
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    /* Guard of the following: mutex. */
    struct job *pool; /* Owner: this. [n_waiting + n_running] */
    struct job *free;
    struct client *client_pool; /* Owner: this. As many */
    struct client *client_free;
    struct client **bucket;        /* Owner: this. [bucket_mask + 1] clients by id */
    struct job *head[2], *tail[2]; /* by enum priority */
    int n_waiting;
    int64_t n_position;
    bool woken; /* queue_wake was called since the last queue_wait */
    enum err_code closed;
    char closed_why[256];
    /* Fixed after open. */
    struct queue_limits limits;
    uint32_t bucket_mask; /* buckets, a power of two, less one */
    bool opened;
    /* idle: the engine thread waits for work. heartbeat_us: when it last began a turn, or work
     * arrived. */
    atomic_bool idle;
    atomic_llong heartbeat_us;
    struct engine_stats *stats; /* Borrowed: its waiting gauges follow the queue */
};

enum err_code queue_open(struct queue *queue, const struct queue_limits *limits,
                         struct engine_stats *stats, struct err *err);
void queue_close(struct queue *queue); /* must be empty; zeroed or closed ones are fine */

/* Takes a reference on success. n_position: request_positions. ERR_QUEUE_FULL, ERR_QUEUE_TOKENS, or
 * what queue_shut said. */
enum err_code queue_push(struct queue *queue, struct request *request, int64_t n_position,
                         struct err *err);
/* From now on every push fails with this code and reason. A later call changes the reason. */
void queue_shut(struct queue *queue, enum err_code code, const char *why);
/* The waiting positions that are admitted before a further request's turn: each request has had one
 * by then, of n_sequence positions at the most, and the one with the fewest has left. Any thread.
 */
int64_t queue_positions_ahead(struct queue *queue, int64_t n_sequence);
/* Makes queue_wait return. Any thread. */
void queue_wake(struct queue *queue);

/* ---- engine thread only ---- */

/* Blocks until a request waits or queue_wake was called, but no longer than ms. The engine counts
 * as idle meanwhile. */
void queue_wait(struct queue *queue, int ms);
/* Waits for a push or queue_wake, but no longer than ms: the requests in the queue cannot begin
 * now. */
void queue_pause(struct queue *queue, int ms);
bool queue_is_empty(struct queue *queue);
/* The request of the class that takes the next place, by plan_may_take and plan_precedes; NULL if
 * none may take one now. Requests that lack pages are left out, and without traces those whose
 * traces have no memory yet. */
struct job *queue_pick(struct queue *queue, const struct plan_running *running,
                       enum priority priority, bool traces);
/* Of the requests that PLAN_PASS_MAX sequences have passed for want of pages and that may take the
 * next place, the one that most have passed, of the same number a bulk one: it is tried before all
 * others. NULL if there is none. */
struct job *queue_pick_passed(struct queue *queue, const struct plan_running *running);
/* The request whose traces found no memory, NULL if there is none. */
struct job *queue_trace_waiter(struct queue *queue);
/* Pages may have become free: the requests that lack pages are tried again. */
void queue_try_pages(struct queue *queue);
/* A sequence of n_position positions was admitted: the job moves to the end of its class, and those
 * that have lacked pages were passed. */
void queue_admitted(struct queue *queue, struct job *job, int64_t n_position);
/* A sequence of the job has ended. */
void queue_ended(struct job *job);
void queue_remove(struct queue *queue, struct job *job);
/* Removes and returns a job whose request was cancelled or is past its deadline; any job with all
 * set. NULL if there is none. */
struct job *queue_take_dead(struct queue *queue, int64_t now_us, bool all);
/* Back to the pool; the request's reference is the caller's to drop. */
void queue_job_free(struct queue *queue, struct job *job);

#endif
