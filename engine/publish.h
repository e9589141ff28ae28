/* What the front ends and the metrics see of the loop's work: states, times, counters, wakes. The
 * loop calls these after it has changed sequences; publish_wake alone tells the front ends, so that
 * it can run while a device computes the next step. Engine thread only. */
#ifndef ENGINE_PUBLISH_H
#define ENGINE_PUBLISH_H

#include "engine/queue.h"
#include "engine/sequence.h"
#include "engine/stats.h"

struct publisher {
    struct engine_stats *stats; /* Borrowed */
    struct queue *queue;        /* Borrowed: jobs that are over go back to it */
    struct job *dirty;          /* jobs with something published since the last wake */
    bool failures_told;         /* who submits reports failures: the log does not */
};

/* A sequence of the job was admitted. */
void publish_start(struct publisher *publisher, struct job *job, int64_t now_us);
/* seq published n results (tokens or predictions). */
void publish_results(struct publisher *publisher, struct sequence *seq, int n, int64_t now_us);
/* seq ends: records its time per output token. */
void publish_tpot(struct publisher *publisher, const struct sequence *seq);
/* The item is over. error is used with FINISH_ERROR alone. */
void publish_item(struct publisher *publisher, struct job *job, struct item *item,
                  enum finish finish, const struct err *error, int64_t now_us);
/* Wakes the front ends of all dirty jobs and releases those that are over. No lock is held. */
void publish_wake(struct publisher *publisher);

#endif
