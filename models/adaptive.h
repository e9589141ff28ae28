/* Adaptive softmax (Grave et al. 2017; XLM's `asm`): the vocabulary is split into a head of
 * frequent words and tails of rarer ones. Used by output.c.
 *
 *   h = log softmax(x·W_headᵀ + b), one entry per word below cutoff 0 and one per tail
 *   log p(w) = h[w]                                                in the head,
 *              h[tail i] + log softmax((x·Downᵀ_i)·Upᵀ_i (+ b_i))[w - cutoff i]   in tail i
 *
 * All of it is computed in place in one row: first the tails' entries of h, then the words in the
 * order of their ids. Sampling and scoring read the words' part. */
#ifndef MODELS_ADAPTIVE_H
#define MODELS_ADAPTIVE_H

#include "models/arena.h"
#include "models/config.h"
#include "models/layers.h"
#include "models/loader.h"

struct adaptive {
    int n_vocab;
    int n_tail;                       /* 0 = the output is not adaptive */
    int first[CONFIG_CUTOFF_MAX + 1]; /* [n_tail + 1] first word of a tail; the last is n_vocab */
    int width[CONFIG_CUTOFF_MAX];     /* [n_tail] of x·Downᵀ */
    struct linear head;               /* tails' entries first */
    const struct weight *down[CONFIG_CUTOFF_MAX]; /* [n_tail] */
    struct linear up[CONFIG_CUTOFF_MAX];          /* [n_tail] */
};

/* Columns that adaptive_logprobs needs besides the n_vocab of the words. */
static inline int64_t adaptive_extra(const struct adaptive *adaptive)
{
    return adaptive->n_tail;
}
/* Columns of its scratch: the widest tail. */
int64_t adaptive_width(const struct adaptive *adaptive);

/* Loads name.head and name.tail.I.{0,1}, as XLM names them, if config has cutoffs. has_bias: the
 * tails' second layers have biases; XLM's have none. */
void adaptive_bind(struct loader *loader, struct adaptive *adaptive, const struct config *config,
                   const char *name, bool has_bias);

/* Fills logprobs [n, adaptive_extra + n_vocab] from x [n, d_model]; those of the words are its last
 * n_vocab columns. scratch [n, >= adaptive_width] holds x·Downᵀ of one tail after the other. */
void adaptive_logprobs(struct backend *be, const struct adaptive *adaptive, struct tensor logprobs,
                       struct tensor x, struct tensor scratch);

#endif
