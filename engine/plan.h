/* The scheduling policy: pure functions from small arrays to decisions, nothing else.
 *
 * Called by the loop before each step. Changing who runs when means changing this file and its
 * table of tests. The policy:
 *
 *   1. Every decoding sequence gets its one row. The number of sequences never exceeds the budget.
 *   2. What is left goes to prompts and documents: interactive ones first, then bulk, each class
 *      in the order of arrival, each sequence as much as it can use. Where that is too little for a
 *      class, one row in PLAN_SHORT_SHARE goes to its shortest ones, wherever they stand: else one
 *      endless prompt would hold up all that come after it.
 *   3. Bulk work that is ready is never shut out: it gets at least one row in PLAN_BULK_SHARE of
 *      what step 1 left (at least one row).
 *   4. The next place goes to the interactive queue first; after PLAN_BULK_SHARE - 1
 *      interactive sequences in a row while bulk work waits, the next one is bulk.
 *   5. Bulk rows do not make others wait: a step that they share with interactive sequences aims at
 * a given time, one without at PLAN_ALONE times as much, since a new request waits for the step
 *      under way (plan_bulk_budget).
 *   6. Bulk sequences never hold all places: one in PLAN_BULK_SHARE (at least one, where there are
 * two or more) stays free for interactive work, so that it starts within a step. */
#ifndef ENGINE_PLAN_H
#define ENGINE_PLAN_H

#include "engine/request.h"

enum { PLAN_BULK_SHARE = 8, PLAN_SHORT_SHARE = 8, PLAN_ALONE = 2, PLAN_BULK_MIN = 8 };

/* One running sequence, in order of admission. */
struct plan_sequence {
    enum priority priority;
    bool decode;    /* wants exactly one row, always served */
    bool ordered;   /* a window of several; may not overtake the one before it */
    int64_t n_left; /* rows it could use now; 1 if decode, 0 if it waits for another sequence */
    int n_take;     /* result: its rows in this step */
};

/* How many bulk rows a step may have, so that it takes the time aimed at: learnt from the steps. */
struct plan_bulk_budget {
    double rows; /* PLAN_BULK_MIN ... the budget */
};

/* A step with n_row bulk rows took step_ms; target_ms 0 = as many as the budget has. */
void plan_adapt(struct plan_bulk_budget *bulk, int n_row, double step_ms, double target_ms,
                int budget);

/* Shares budget rows out to seq[0 .. n_seq-1], at most bulk_max >= 1 of them to bulk prompts and
 * documents; n_seq <= budget. An ordered sequence gets rows only when all earlier ones of its class
 * have all they can use: results of a text's windows come in order. */
void plan_rows(struct plan_sequence *seq, int n_seq, int budget, int bulk_max);

/* What admission may look at. */
struct plan_running {
    int n_max;         /* sequences that may run at once */
    int n_interactive; /* running */
    int n_bulk;        /* running */
    int n_in_a_row; /* interactive sequences admitted since the last bulk one, while bulk waited */
    bool wait[2];   /* by enum priority: something waits */
};

/* The class whose next sequence is admitted, or -1: none now. */
int plan_class(const struct plan_running *running);

#endif
