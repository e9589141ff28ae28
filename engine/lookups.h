/* What becomes of a step's memory look-ups: the traces of requests that want them, the counts and
 * the sample of all traffic, and the share that overlays have answered. Part of the engine thread's
 * loop. A device brings the rows that are wanted, and no others, with the step's results. */
#ifndef ENGINE_LOOKUPS_H
#define ENGINE_LOOKUPS_H

#include "models/model.h"

struct engine;
struct batch;
struct sequence_rows;

/* Neighbouring rows of a step, and their look-ups: [n, columns of the memory]. */
struct lookup_range {
    int first, n;
    const int32_t *slots[MODEL_PKM_MAX]; /* Borrowed: of the backend, until the step begins anew */
    const float *weights[MODEL_PKM_MAX]; /* same */
};

struct lookups {
    struct lookup_range *range; /* Owner: this. [max_seqs + 2] */
    int n_range;
    int n_sampled, sampled_first; /* rows of the step that the sample takes */
    /* Borrowed: whose last row's look-ups in overlays are counted; or NULL */
    const struct sequence_rows *overlaid;
};

enum err_code lookups_open(struct lookups *lookups, int max_seqs, struct err *err);
void lookups_close(struct lookups *lookups); /* zeroed ones are fine */

/* The most that is fetched of one step: step_limits.n_fetch_bytes. */
int64_t lookups_fetch_bytes(const struct model_info *info, int n_tok_max);

/* After the step's submit: chooses rows and asks for them. */
void lookups_ask(struct engine *engine, struct batch *batch);
/* After the step's finish, before its results are taken. */
void lookups_take(struct engine *engine, const struct batch *batch);

#endif
