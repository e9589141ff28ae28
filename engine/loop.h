/* The engine's inside: what engine.c builds, loop.c and turn.c run and publish.c shows. Not for
 * other folders. Guard of everything not atomic and not in queue: the engine thread, once it
 * runs. */
#ifndef ENGINE_LOOP_H
#define ENGINE_LOOP_H

#include "engine/kvpages.h"
#include "engine/lookups.h"
#include "engine/pkm_counts.h"
#include "engine/pkm_totals.h"
#include "engine/engine.h"
#include "engine/plan.h"
#include "engine/publish.h"

/* A step, whose rows it has, and what becomes of their look-ups. */
struct batch {
    struct step *step;          /* Owner: this; NULL: there is no such batch */
    struct sequence_rows *rows; /* Owner: this. [max_seqs], the first n_seq, in the step's order */
    int n_seq;
    struct lookups lookups;
    int64_t begin_us, filled_us;
};

struct engine {
    struct engine_options options; /* effective; its strings are Borrowed */
    struct backend *be;            /* Owner: this, and of all that follows */
    struct model *model;
    struct tokenizer *tokenizer; /* NULL: ids only */
    struct identity *identity;   /* NULL: there is no model.sha256 */
    struct engine_identity compared;
    struct batch batch[2]; /* the second is the first one's twin, of a backend that runs ahead */
    struct batch *ahead;   /* Borrowed: has begun already, before its turn; NULL: none has */
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
    struct plan_limit bulk_limit[2]; /* [has_interactive] */
    struct plan_limit prompt_limit;  /* where is_shared */
    int n_prompt_row, n_bulk_row; /* of prompts and documents in the current turn; of these, bulk */
    bool has_interactive;         /* interactive sequences run */
    bool is_shared;               /* in the current turn, prompts beside others' tokens */
    int n_in_a_row;               /* interactive sequences admitted since the last bulk one */
    uint32_t n_overlay_step;      /* steps with overlays */
    int64_t finished_us;          /* when the last step was finished */
    char *text;                   /* [text_max] scratch of the detokeniser */
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

/* loop.c: ends the run of an active sequence; the order of the others stays. */
void loop_remove(struct engine *engine, struct sequence *seq);
/* loop.c: moves the job's cursor to its next sequence that has work; false if there is none. */
bool loop_next_sequence(struct engine *engine, struct job *job, int64_t now_us);

/* turn.c */
enum err_code turn_open(struct engine *engine, const struct step_limits *limits, struct err *err);
void turn_close(struct engine *engine);
/* Runs the steps of a turn. Sequences are active, or a step has begun ahead of it. */
enum err_code turn_run(struct engine *engine, struct err *err);
/* Nobody wants the results of seq any more that steps under way may have. */
void turn_forget(struct engine *engine, const struct sequence *seq);
/* Waits for a step that has begun ahead, if one has: nobody wants its results. */
void turn_end(struct engine *engine);

#endif
