/* Kullback-Leibler divergence and perplexities from logits: see compare.h. */
#include "server/cli/compare.h"

#include "kernels/err.h"

#include <math.h>
#include <stdlib.h>

/* The largest of z[n], the first of equals. */
static int best_of(const float *z, int n)
{
    int best = 0;
    for (int i = 1; i < n; i++) {
        best = z[i] > z[best] ? i : best;
    }
    return best;
}

/* With p and q the softmax of the two rows, a and b their logits less the largest, A and B the sums
 * of exp(a) and exp(b):
 *   KL(p || q) = Σ exp(a)·(a - b) / A + log B - log A
 * Where b is -infinity and p is not 0, that is infinite. Equal rows give exactly 0: each term of
 * the sum does, and A is B. */
bool compare_add(struct compare_sums *sums, const float *model, const float *reference, int n_vocab,
                 int32_t target)
{
    CHECK(sums->n < sums->n_max && target >= 0 && target < n_vocab);
    const int best = best_of(model, n_vocab);
    const int reference_best = best_of(reference, n_vocab);
    const double top = (double)model[best];
    const double reference_top = (double)reference[reference_best];
    double sum = 0;
    double reference_sum = 0;
    double distance = 0;
    for (int i = 0; i < n_vocab; i++) {
        const double a = (double)reference[i] - reference_top;
        const double b = (double)model[i] - top;
        const double weight = exp(a);
        reference_sum += weight;
        sum += exp(b);
        distance += weight > 0 ? weight * (a - b) : 0;
    }
    if (!isfinite(sum) || !isfinite(reference_sum)) { /* the largest is no number, or another one is
                                                       * NaN */
        return false;
    }
    const double kl = distance / reference_sum + log(sum) - log(reference_sum);
    sums->kl[sums->n++] = kl > 0 ? kl : 0; /* below is rounding */
    sums->n_same += best == reference_best;
    sums->logprob += (double)model[target] - top - log(sum);
    sums->reference_logprob += (double)reference[target] - reference_top - log(reference_sum);
    return true;
}

static int compare_double(const void *a, const void *b)
{
    const double x = *(const double *)a;
    const double y = *(const double *)b;
    return (x > y) - (x < y);
}

struct compare_figures compare_figures_of(struct compare_sums *sums)
{
    CHECK(sums->n > 0);
    const double n = (double)sums->n;
    double total = 0;
    qsort(sums->kl, (size_t)sums->n, sizeof *sums->kl, compare_double);
    for (int64_t i = 0; i < sums->n; i++) { /* ascending: the small ones are not lost */
        total += sums->kl[i];
    }
    return (struct compare_figures){
        .n = sums->n,
        .perplexity = exp(-sums->logprob / n),
        .reference_perplexity = exp(-sums->reference_logprob / n),
        .worse_percent = sums->reference_logprob == sums->logprob /* both infinite, too */
                             ? 0
                             : 100 * expm1((sums->reference_logprob - sums->logprob) / n),
        .kl_mean = total / n,
        .kl_p99 = sums->kl[(sums->n * 99 + 99) / 100 - 1],
        .kl_max = sums->kl[sums->n - 1],
        .same_best = (double)sums->n_same / n,
    };
}
