/* The engine's inside: what engine.c builds, loop.c runs and publish.c shows. Not for other
 * folders. Guard of everything not atomic and not in queue: the engine thread, once it runs. */
#ifndef ENGINE_LOOP_H
#define ENGINE_LOOP_H

#include "engine/kvpages.h"
#include "engine/lookups.h"
#include "engine/pkm_counts.h"
#include "engine/pkm_totals.h"
#include "engine/engine.h"
#include "engine/plan.h"
#include "engine/publish.h"

struct engine {
    struct engine_options options; /* effective; its strings are Borrowed */
    struct backend *be;            /* Owner: this, and of all that follows */
    struct model *model;
    struct tokenizer *tokenizer; /* NULL: ids only */
    struct identity *identity;   /* NULL: there is no model.sha256 */
    struct engine_identity compared;
    struct step *step;
    struct kvpages pages;
    struct pkm_totals totals;
    struct pkm_counts counts;
    struct queue queue;
    struct publisher publisher;
    struct request_memory *requests; /* one reference */
    struct overlays *overlays;       /* NULL: none are taken */

    struct sequence *sequence;  /* [max_seqs] */
    struct sequence **free;     /* [max_seqs] the first n_free: not running */
    struct sequence **active;   /* [max_seqs] the first n_active: running, in order of admission */
    struct plan_sequence *plan; /* [max_seqs] of active */
    int n_free, n_active;
    struct plan_bulk_budget bulk_budget[2]; /* [has_interactive] */
    int n_bulk_row;                         /* in the current step */
    bool has_interactive;                   /* interactive sequences run */
    int n_in_a_row;         /* interactive sequences admitted since the last bulk one */
    struct lookups lookups; /* of the current step */
    char *text;             /* [text_max] scratch of the detokeniser */
    size_t text_max;
    int64_t files_us;                /* when the model's files are checked next */
    bool backlog;                    /* the last admission left requests in the queue */
    double drain_positions, drain_s; /* positions admitted while there was backlog, and time */

    pthread_t thread;
    bool started;     /* the thread was started and not yet joined: guard: the thread that opened */
    atomic_int state; /* enum engine_state */
    atomic_llong drain_us;   /* 0 = no drain asked for; else when its patience ends */
    atomic_int n_aborted;    /* requests that the drain cut short */
    atomic_llong drain_rate; /* positions per 1000 s, admitted from a backlog; 0 = unknown */
    struct engine_stats stats;
};

/* The engine thread's main function; arg is the engine. */
void *loop_main(void *arg);

#endif
