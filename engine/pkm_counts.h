/* Counts of all memory look-ups since the start, slot by slot: GET /memory/counts. Nothing of any
 * text is in them. Where they are on, the engine thread adds up each step's look-ups before it
 * takes the step's results; positions taken from the prefix cache are not looked up and not
 * counted. A document is a sequence: a sample of a generation, or a window of a text that is
 * scored.
 *
 * Any thread may read at any time: each number is atomic, but together they are not a snapshot.
 * Besides 24 bytes a slot there is a bit for each slot and sequence that may run, by which
 * documents count once. */
#ifndef ENGINE_PKM_COUNTS_H
#define ENGINE_PKM_COUNTS_H

#include "models/counts.h"

#include <stdatomic.h>

/* What counts.h keeps of a slot, in the order of its tensors. */
enum pkm_counts_part { COUNTS_READS, COUNTS_WEIGHT, COUNTS_DOCUMENTS, COUNTS_PART_N };

struct pkm_count;

struct pkm_counts {
    char model[SHA256_HEX];
    int n_seq;                              /* sequences that may run; 0 = counts are off */
    struct pkm_count *count[MODEL_PKM_MAX]; /* Owner: this. [n_slot] */
    uint64_t *seen[MODEL_PKM_MAX];          /* Owner: this. [n_seq, (n_slot + 63) / 64] bits */
    atomic_llong n_document, n_position;
};

/* Takes the memory, and the model's identity from the files in dir. */
enum err_code pkm_counts_open(struct pkm_counts *counts, const struct model_info *info,
                              const char *dir, int n_seq, struct err *err);
void pkm_counts_close(struct pkm_counts *counts); /* zeroed ones are fine */

/* Engine thread, as of the next two: sequence seq, of 0 .. n_seq-1, begins. */
void pkm_counts_begin(struct pkm_counts *counts, const struct model_info *info, int seq);
/* Adds n_hit look-ups of memory m, slots and weights [n_hit], from sequence seq's rows of a
 * step. */
void pkm_counts_add(struct pkm_counts *counts, const struct model_info *info, int m, int seq,
                    const int32_t *slots, const float *weights, int64_t n_hit);
/* A step looked up n_tok positions in all memories. */
void pkm_counts_end_step(struct pkm_counts *counts, int n_tok);

/* Any thread. Fills in what the header of a file says; the arrays of its memories stay NULL. */
void pkm_counts_head(const struct pkm_counts *counts, const struct model_info *info,
                     struct counts *head);
/* Writes slots first .. first+n-1 of memory m as the file stores them, 8 bytes each, to go with
 * that header: no count of documents is above the header's. */
void pkm_counts_copy(const struct pkm_counts *counts, const struct counts *head, int m,
                     enum pkm_counts_part part, int64_t first, int64_t n, void *out);

#endif
