/* How all traffic since the start has used the memories: sums per slot over a sample.
 *
 * The sample is one in TOTALS_EVERY of the positions that steps compute, so prompts, documents and
 * decoding have their natural weight. A step contributes at most TOTALS_ROW_MAX neighbouring rows,
 * beginning at a row that changes from step to step. Positions taken from the prefix cache are not
 * looked up and therefore not counted. The engine thread keeps a copy of the rows and adds them up
 * while the next step runs (at most tens of microseconds); it never waits for a reader. Any
 * thread may read at any time: each sum is atomic, but together they are not a snapshot. */
#ifndef ENGINE_PKM_TOTALS_H
#define ENGINE_PKM_TOTALS_H

#include "engine/pkm_stats.h"

enum { TOTALS_EVERY = 64, TOTALS_ROW_MAX = 16 };

struct pkm_total;

struct pkm_totals {
    struct pkm_total *total[MODEL_PKM_MAX]; /* Owner: this. [n_slot] */
    int32_t *slots[MODEL_PKM_MAX];          /* Owner: this. [TOTALS_ROW_MAX, n_column] */
    float *weights[MODEL_PKM_MAX];          /* same */
    int n_row;                              /* rows taken and not yet added */
    int n_due;                              /* positions computed since the last sample */
    uint32_t turn;                          /* samples taken: places the next one */
    atomic_llong n_position;                /* sampled and added */
};

enum err_code pkm_totals_open(struct pkm_totals *totals, const struct model_info *info,
                              struct err *err);
void pkm_totals_close(struct pkm_totals *totals); /* zeroed ones are fine */

/* Engine thread, once for each step: how many of its n_tok rows the sample takes, from row *first
 * on. */
int pkm_totals_due(struct pkm_totals *totals, int n_tok, int *first);
/* Engine thread, after finish, for each memory in turn: takes the look-ups of these n rows. What an
 * earlier step gave must have been added. */
void pkm_totals_take(struct pkm_totals *totals, const struct model_info *info, int m, int n,
                     const int32_t *slots, const float *weights);
/* Engine thread, at any time: adds it. */
void pkm_totals_add(struct pkm_totals *totals, const struct model_info *info);

/* Any thread. The statistics of memory m; lookups are those sampled. Sorts its slots: tens of
 * milliseconds and 16 bytes for each of a million. */
enum err_code pkm_totals_stats(const struct pkm_totals *totals, const struct model_info *info,
                               int m, struct pkm_stats *stats, struct err *err);

#endif
