/* A request's knock-out list: see request_ablate.h. */
#include "engine/request_ablate.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Of entries that overlap the smaller first: their order in the request says nothing. */
static bool precedes(const struct step_ablate *a, const struct step_ablate *b)
{
    return step_ablate_precedes(a, b) || (!step_ablate_precedes(b, a) && a->scale < b->scale);
}

/* Merges two sorted runs. */
static void merge(struct step_ablate *to, const struct step_ablate *a, int n_a,
                  const struct step_ablate *b, int n_b)
{
    while (n_a > 0 || n_b > 0) {
        const bool takes_b = n_a == 0 || (n_b > 0 && precedes(b, a));
        *to++ = takes_b ? *b++ : *a++;
        n_a -= !takes_b;
        n_b -= takes_b;
    }
}

static enum err_code sort(struct step_ablate *entry, int n, struct err *err)
{
    struct step_ablate *const other = malloc((size_t)n * sizeof *other);
    if (other == NULL) {
        return err_set(err, ERR_MEMORY, "no memory for %d entries of ablate", n);
    }
    for (int run = 1; run < n; run *= 2) {
        for (int first = 0; first < n; first += 2 * run) {
            const int n_a = n - first < run ? n - first : run;
            const int n_b = n - first - n_a < run ? n - first - n_a : run;
            merge(other + first, entry + first, n_a, entry + first + n_a, n_b);
        }
        memcpy(entry, other, (size_t)n * sizeof *entry);
    }
    free(other);
    return ERR_OK;
}

/* Multiply and fold, the constants being those of MurmurHash and the golden ratio. */
static uint64_t fold(uint64_t digest, uint64_t word)
{
    digest = (digest ^ word) * UINT64_C(0x9e3779b97f4a7c15);
    digest = (digest ^ (digest >> 32)) * UINT64_C(0xff51afd7ed558ccd);
    return digest ^ (digest >> 29);
}

static void digest_entries(struct request_ablate *ablate)
{
    uint64_t *const digest = ablate->digest;
    digest[0] = ablate->n > 0 ? 1 : 0;
    digest[1] = ablate->n > 0 ? UINT64_C(0xd6e8feb86659fd93) : 0;
    for (int i = 0; i < ablate->n; i++) {
        uint32_t word[4] = {0};
        _Static_assert(sizeof word == sizeof *ablate->entry, "an entry is four words");
        memcpy(word, &ablate->entry[i], sizeof word);
        for (int d = 0; d < 2; d++) {
            digest[d] = fold(digest[d], (uint64_t)word[0] << 32 | word[1]);
            digest[d] = fold(digest[d], (uint64_t)word[2] << 32 | word[3]);
        }
    }
}

enum err_code request_ablate_make(struct request_ablate *ablate, struct step_ablate *entry, int n,
                                  struct err *err)
{
    *ablate = (struct request_ablate){.entry = entry};
    if (n > 0 && sort(entry, n, err) != ERR_OK) {
        return err->code;
    }
    int n_kept = 0;
    for (int i = 0; i < n;) {
        struct step_ablate one = entry[i];
        double product = 1; /* times 2^exponent: many factors neither overflow nor vanish */
        int exponent = 0;
        for (; i < n && !step_ablate_precedes(&one, &entry[i]); i++) {
            int shift = 0;
            product = frexp(product * (double)entry[i].scale, &shift);
            exponent += shift;
        }
        one.scale = (float)ldexp(product, exponent);
        if (!(one.scale <= ABLATE_PRODUCT_MAX)) {
            return err_set(err, ERR_ARGUMENT,
                           "entries of ablate that overlap multiply to %g in memory %d, the limit "
                           "is %g",
                           (double)one.scale, one.memory, (double)ABLATE_PRODUCT_MAX);
        }
        if (one.scale < 1 || one.scale > 1) {
            entry[n_kept++] = one;
        }
    }
    ablate->n = n_kept;
    digest_entries(ablate);
    return ERR_OK;
}

void request_ablate_free(struct request_ablate *ablate)
{
    free(ablate->entry);
    *ablate = (struct request_ablate){0};
}
