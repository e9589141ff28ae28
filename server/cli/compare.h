/* How far the distributions of one model are from those of another, the reference, over a text: the
 * figures of `pkmserve compare`. Of logits in F32; all arithmetic is in double. */
#ifndef SERVER_COMPARE_H
#define SERVER_COMPARE_H

#include <stdbool.h>
#include <stdint.h>

/* Sums over the positions so far. Zeroed, with kl and n_max set, it is empty. */
struct compare_sums {
    double *kl; /* Borrowed. [n_max], of each position in nats */
    int64_t n, n_max;
    int64_t n_same;                    /* positions where both have the same best token */
    double logprob, reference_logprob; /* sums of the log-probabilities of the actual tokens */
};

/* Adds a position: both models' logits, [n_vocab], and the actual token. A constant that is added
 * to all logits of a row changes nothing, so log-probabilities will do. false: a row is no
 * distribution (NaN, +infinity, or -infinity alone), and nothing was added. */
bool compare_add(struct compare_sums *sums, const float *model, const float *reference, int n_vocab,
                 int32_t target);

struct compare_figures {
    int64_t n;
    double perplexity, reference_perplexity;
    double worse_percent; /* perplexity / reference_perplexity - 1, in percent */
    double kl_mean;       /* of KL(reference || model) = Σ p·(log p - log q), in nats */
    double kl_p99;        /* the smallest that 99 % of the positions do not exceed */
    double kl_max;
    double same_best; /* share of the positions */
};

/* Of at least one position. Sorts sums->kl. */
struct compare_figures compare_figures_of(struct compare_sums *sums);

#endif
