/* The scheduling policy: pure functions from small arrays to decisions, nothing else.
 *
 * Called by the loop before each step. Changing who runs when means changing this file and its
 * table of tests. The policy:
 *
 *   1. Every decoding sequence gets its one row. There are never more sequences than rows.
 *   2. What is left goes to prompts and documents: interactive ones first, then bulk, each class in
 *      the order of admission, each sequence as much as it can use. Where that is too little for a
 *      class, a client's second one comes after the first ones of all (of a request whose client is
 *      unknown likewise), and one row in PLAN_SHORT_SHARE goes to the shortest ones, whatever their
 *      order: otherwise many long prompts of one client, or a single one, would delay all that were
 *      admitted after them.
 *   3. Bulk work that is ready gets at least one row in PLAN_BULK_SHARE of what step 1 left, and at
 *      least one row.
 *   4. The next place goes to the interactive class first. After PLAN_BULK_SHARE - 1 interactive
 *      sequences in a row while bulk work waits, the next one is bulk.
 *   5. Rows do not make others wait: a step that mixes bulk rows with interactive sequences has a
 *      target time. One without them may take PLAN_ALONE times as long, since a new request waits
 *      for the step under way. The same target has a step with prompts or documents in which others
 *      decode, another client or, of requests whose client is unknown, another request; but
 *      PLAN_PROMPT_MIN rows it may have, since fewer take almost as long. How many rows fit is
 *      learnt from the steps so far, those of long prompts alone too (plan_limit).
 *   6. Bulk sequences never hold all places: one in PLAN_BULK_SHARE (at least one, where there are
 *      two or more) stays free for interactive work, so that it starts within a step.
 *   7. Within a class the requests take turns, one sequence each. The next place goes to the client
 *      that has the fewest sequences running, and of its requests to the one that has the fewest.
 *   8. One request never holds all places of its class, nor does one client that is known to be one
 *      of several: the last one in PLAN_BULK_SHARE goes only to those who run fewer sequences than
 *      there are places left. So another client's request starts at once.
 *   9. A sequence for which the cache has too few free pages lets others go first that fit; once
 *      PLAN_PASS_MAX have gone nobody does, so that the pages that become free are its own. */
#ifndef ENGINE_PLAN_H
#define ENGINE_PLAN_H

#include "engine/request.h"

enum {
    PLAN_BULK_SHARE = 8,
    PLAN_SHORT_SHARE = 8,
    PLAN_ALONE = 2,
    PLAN_BULK_MIN = 8,
    PLAN_PROMPT_MIN = 64,
    PLAN_PASS_MAX = 32
};

/* One running sequence, in order of admission. */
struct plan_sequence {
    enum priority priority;
    bool decode;    /* wants exactly one row, always served */
    bool ordered;   /* a window of several; may not overtake the one before it */
    int group;      /* 0 .. n_seq-1: of its client, or of its request if that is unknown */
    int64_t n_left; /* rows it could use now; 1 if decode, 0 if it waits for another sequence */
    int n_take;     /* result: its rows in this step */
    int rank, n_in_group; /* of plan_rows: those before it in its group; of group [index] so far */
};

/* How many rows of a kind a step may have to meet its target time: learnt from the steps so far. */
struct plan_limit {
    double rows; /* the least number ... the budget */
};

/* A step with n_row of these rows took step_ms; target_ms 0 = as many as the budget has. least:
 * PLAN_BULK_MIN or PLAN_PROMPT_MIN. */
void plan_adapt(struct plan_limit *limit, int n_row, double step_ms, double target_ms, int least,
                int budget);

/* Whether prompts or documents want rows of a step in which others decode. */
bool plan_is_shared(const struct plan_sequence *seq, int n_seq);

/* Shares budget rows out to seq[0 .. n_seq-1], at most prompt_max >= 1 of them to prompts and
 * documents, and of these at most bulk_max >= 1 to bulk ones; n_seq <= budget. An ordered sequence
 * gets rows only when all earlier ones of its class and group have all they can use: results of a
 * text's windows come in order. */
void plan_rows(struct plan_sequence *seq, int n_seq, int budget, int prompt_max, int bulk_max);

/* What admission depends on. */
struct plan_running {
    int n_max;         /* sequences that may run at once */
    int n_interactive; /* running */
    int n_bulk;        /* running */
    int n_in_a_row; /* interactive sequences admitted since the last bulk one, while bulk waited */
    bool wait[2];   /* by enum priority: a request waits that may take a place */
    bool leaves;    /* rule 8 holds: others may come */
};

/* A request that has sequences to admit. */
struct plan_job {
    int n_running;  /* its sequences */
    int n_client;   /* those of its client, its own included */
    bool is_tenant; /* its client is known to be one of several */
};

/* Whether a request of the class may take one more place (rules 6 and 8). */
bool plan_may_take(const struct plan_running *running, enum priority priority,
                   const struct plan_job *job);
/* Whether a goes before b, which is of the same class and has waited longer (rule 7). */
bool plan_precedes(const struct plan_job *a, const struct plan_job *b);

/* The class whose next sequence is admitted, or -1: none now. */
int plan_class(const struct plan_running *running);

#endif
