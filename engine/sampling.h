/* How a sequence's next token is drawn: its random numbers and its lists of adjusted tokens.
 *
 * The drawing itself is the backend's op `sample`; this file says with what. Random numbers are a
 * pure function of (seed, prompt, sample, position), so what else runs, and in which order, cannot
 * change them.
 *
 * Penalties are OpenAI's and the CTRL paper's: repetition looks at prompt and generated tokens,
 * presence and frequency at generated ones. min_tokens forbids, with a bias of minus infinity, the
 * tokens that would end the sequence. */
#ifndef ENGINE_SAMPLING_H
#define ENGINE_SAMPLING_H

#include "engine/request.h"

/* Philox4x32-10 (Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3, SC 2011):
 * 128 random bits from a 128-bit counter and a 64-bit key. */
void sampling_philox(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4]);

/* Uniform in [0, 1) with 53 random bits: the first two words of Philox4x32-10 with
 *   key     = (seed low, seed high)
 *   counter = (position low, position high, prompt_index, sample_index)
 * as ((word0 << 32 | word1) >> 11) · 2^-53. position is the index of the drawn token in its
 * sequence, prompt included. */
double sampling_uniform(uint64_t seed, int prompt_index, int sample_index, int64_t position);

/* The tokens of one sequence whose logits are adjusted, with their counts. */
struct sampling_counts {
    struct sample_adjust *entry; /* Owner: this. [n_entry_max], distinct tokens */
    int32_t *index;              /* Owner: this. Open addressing: token → entry, -1 = none */
    int n_entry, n_entry_max;
    uint32_t mask; /* of index: its length, a power of two, less one */
    int n_banned;  /* entry[0 .. n_banned) end the sequence: forbidden before min_tokens */
    bool counting; /* some penalty is on: generated tokens are counted */
};

/* Entries that a sequence of at most context tokens can need. */
int sampling_entries_max(int64_t context, int n_vocab);
enum err_code sampling_counts_open(struct sampling_counts *counts, int n_entry_max,
                                   struct err *err);
void sampling_counts_close(struct sampling_counts *counts); /* zeroed ones are fine */

/* Starts a sequence with this prompt. ends: of the model. */
void sampling_begin(struct sampling_counts *counts, const struct sampling *sampling,
                    const int32_t *prompt, int64_t n_prompt, const struct end_ids *ends);
/* token was generated. */
void sampling_count(struct sampling_counts *counts, int32_t token);
/* Writes the parameters and lists of output row i of step. position as above, n_generated tokens
 * were generated before. */
void sampling_fill(const struct sampling_counts *counts, const struct sampling *sampling,
                   const struct item *item, int n_generated, struct step *step, int i);

#endif
