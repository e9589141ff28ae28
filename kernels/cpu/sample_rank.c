/* Drawing with top_k, top_p or min_p: among the best tokens, best first.
 *
 * The best 32 are selected first: most filters end within them. Where they keep more, the order of
 * all is not needed: tokens are put into buckets by their distance from the best one, the shares of
 * each bucket are added up, and only the bucket where the filters end and the one where the drawn
 * token lies are put into order. A large top_k, and a distribution so flat that a bucket overflows,
 * sort the whole vocabulary. */
#include "kernels/cpu/sample.h"

#include <math.h>
#include <string.h>

enum { DRAW_FEW = 32 }; /* best tokens looked at first: as many as select finds quickest */

/* Buckets reach over this many temperatures; the last one takes what is farther, e^-32 and less. */
#define BUCKET_RANGE 32.0f

static double share_of(const struct draw *d, float z)
{
    return exp(((double)z - (double)d->max) / (double)d->params->temperature);
}

/* What the filters keep. */
struct kept {
    double mass;
    int bucket;  /* the last one, where there are buckets */
    int n;       /* at most its best n tokens */
    bool is_end; /* found */
};

static bool has_mass(const struct draw *d, const struct kept *kept, double total)
{
    return d->params->top_p < 1 && kept->mass >= (double)d->params->top_p * total;
}

/* Adds the n tokens in best, in order, until a filter ends them. total: of what top_k keeps,
 * top_p's denominator. */
static void keep_some(const struct draw *d, struct kept *kept, int n, double total)
{
    kept->n = 0;
    for (; kept->n < n && !has_mass(d, kept, total); kept->n++) {
        const double share = share_of(d, d->scratch.best_score[kept->n]);
        kept->is_end = share < (double)d->params->min_p || share == 0;
        if (kept->is_end) {
            return;
        }
        kept->mass += share;
    }
    kept->is_end = has_mass(d, kept, total);
}

/* The first of the n tokens in best with which *sum, which their shares are added to, exceeds goal;
 * NOT_DRAWN if it does not. */
static int32_t walk(const struct draw *d, int n, double *sum, double goal)
{
    for (int i = 0; i < n; i++) {
        *sum += share_of(d, d->scratch.best_score[i]);
        if (*sum > goal) {
            return d->scratch.best[i];
        }
    }
    return NOT_DRAWN;
}

/* Draws among the n tokens in best, or NOT_DRAWN if the filters keep more than those. */
static int32_t draw_among(const struct draw *d, int n, double total, bool n_is_all)
{
    struct kept kept = {.mass = 0};
    keep_some(d, &kept, n, total);
    if (!kept.is_end && !n_is_all) {
        return NOT_DRAWN;
    }
    double sum = 0;
    const int32_t id = walk(d, kept.n, &sum, d->params->u * kept.mass);
    /* rounding may leave the goal unreached; the best token's share is 1: one is kept */
    return id != NOT_DRAWN ? id : d->scratch.best[kept.n - 1];
}

/* Ascending key = descending logit; no NaN comes here, and -0 was made 0. */
static uint32_t sort_key(float z)
{
    const float positive_zero = z + 0.0f;
    uint32_t bits;
    memcpy(&bits, &positive_zero, sizeof bits);
    return (bits & 0x80000000u) != 0 ? bits : ~bits & 0x7fffffffu;
}

/* Sorts the whole vocabulary into scratch.best and best_score: three passes of a radix sort, which
 * keep the order of ids among equal logits. */
static void sort_all(const struct draw *d)
{
    enum { BITS = 11, N_BUCKET = 1 << BITS };
    const int n = d->n_vocab;
    uint32_t *from_key = d->scratch.key[0];
    uint32_t *to_key = d->scratch.key[1];
    int32_t *from = d->scratch.candidate;
    int32_t *to = d->scratch.best; /* an odd number of passes ends here */
    for (int i = 0; i < n; i++) {
        from_key[i] = sort_key(d->z[i]);
        from[i] = i;
    }
    for (int shift = 0; shift < 32; shift += BITS) {
        int place[N_BUCKET + 1] = {0};
        for (int i = 0; i < n; i++) {
            place[(from_key[i] >> shift & (N_BUCKET - 1)) + 1]++;
        }
        for (int b = 0; b < N_BUCKET; b++) {
            place[b + 1] += place[b];
        }
        for (int i = 0; i < n; i++) {
            const int at = place[from_key[i] >> shift & (N_BUCKET - 1)]++;
            to_key[at] = from_key[i];
            to[at] = from[i];
        }
        uint32_t *const key = from_key;
        int32_t *const id = from;
        from_key = to_key;
        from = to;
        to_key = key;
        to = id;
    }
    for (int i = 0; i < n; i++) {
        d->scratch.best_score[i] = d->z[d->scratch.best[i]];
    }
}

/* ---- buckets ----------------------------------------------------------------------------------*/

/* Fills mass; leaves the bucket of each token in key[1]. */
static void fill_buckets(const struct draw *d)
{
    const struct vocab_scratch *const s = &d->scratch;
    float *const share = (float *)(void *)s->key[0];
    int32_t *const bucket = (int32_t *)(void *)s->key[1];
    const float inverse = 1.0f / d->params->temperature;
    d->simd->logit_buckets(share, bucket, d->z, d->n_vocab, d->max, inverse,
                           inverse * (DRAW_BUCKETS / BUCKET_RANGE), DRAW_BUCKETS - 1);
    memset(s->mass, 0, DRAW_BUCKETS * sizeof *s->mass);
    for (int i = 0; i < d->n_vocab; i++) {
        s->mass[bucket[i]] += (double)share[i];
    }
}

/* Puts the tokens of a bucket into best and best_score, best first, and returns how many there are,
 * or -1 if it cannot. */
static int order_bucket(const struct draw *d, int bucket)
{
    const struct vocab_scratch *const s = &d->scratch;
    float *const score = (float *)(void *)s->key[0];
    const int n = d->simd->find_equal(s->candidate, (const int32_t *)(const void *)s->key[1],
                                      d->n_vocab, bucket);
    if (n > SELECT_MANY || bucket == DRAW_BUCKETS - 1) {
        return -1;
    }
    for (int i = 0; i < n; i++) {
        score[i] = d->z[s->candidate[i]];
    }
    d->simd->select(s->best, s->best_score, score, n, n, &s->select);
    for (int i = 0; i < n; i++) {
        s->best[i] = s->candidate[s->best[i]];
    }
    return n;
}

/* Finds where the filters end; false if a bucket in question cannot be put into order. */
static bool find_end(const struct draw *d, struct kept *kept, double total)
{
    const struct sample_params *const p = d->params;
    const double step = (double)BUCKET_RANGE / DRAW_BUCKETS;
    for (int b = 0; b < DRAW_BUCKETS && !kept->is_end; b++) {
        if (d->scratch.mass[b] <= 0 && b < DRAW_BUCKETS - 1) {
            continue; /* empty: shares are 0 in the last one alone */
        }
        kept->bucket = b;
        /* a little less than the least share that it can hold */
        const bool is_wide = exp(-(b + 1.01) * step) >= (double)p->min_p;
        const double after = kept->mass + d->scratch.mass[b];
        if (is_wide && b < DRAW_BUCKETS - 1 &&
            (p->top_p >= 1 || after < (double)p->top_p * total)) {
            kept->mass = after;
            kept->n = d->n_vocab;
            continue;
        }
        const int n = order_bucket(d, b);
        if (n < 0) {
            return false;
        }
        keep_some(d, kept, n, total);
    }
    return true;
}

/* Draws with top_p or min_p among all tokens, or NOT_DRAWN where only a full order helps. */
static int32_t draw_by_bucket(const struct draw *d, double total)
{
    struct kept kept = {.mass = 0};
    fill_buckets(d);
    if (!find_end(d, &kept, total)) {
        return NOT_DRAWN;
    }
    const double goal = d->params->u * kept.mass;
    double sum = 0;
    int32_t last = NOT_DRAWN;
    for (int b = 0; b <= kept.bucket; b++) {
        const bool is_last = b == kept.bucket;
        if (!is_last && sum + d->scratch.mass[b] <= goal) {
            sum += d->scratch.mass[b];
            continue;
        }
        const int n = order_bucket(d, b);
        if (n < 0) {
            return NOT_DRAWN;
        }
        const int n_kept = is_last && kept.n < n ? kept.n : n;
        const int32_t id = walk(d, n_kept, &sum, goal);
        if (id != NOT_DRAWN) {
            return id;
        }
        last = n_kept > 0 ? d->scratch.best[n_kept - 1] : last;
    }
    return last;
}

/* ---- all together -----------------------------------------------------------------------------*/

int32_t cpu_draw_by_rank(const struct draw *d)
{
    const struct sample_params *const p = d->params;
    const bool has_top_k = p->top_k > 0 && p->top_k < d->n_vocab;
    const int most = has_top_k ? p->top_k : d->n_vocab;
    double total = 0; /* of the whole row; of top_k's tokens it is added up below */
    for (int b = 0; b < LOGIT_BLOCKS && !has_top_k && p->top_p < 1; b++) {
        const int from = cpu_block_first(d->n_vocab, b);
        total += draw_sum(d, from, cpu_block_first(d->n_vocab, b + 1) - from);
    }
    int32_t id = NOT_DRAWN;
    if (!has_top_k || most <= SELECT_MANY) {
        const int n = has_top_k || most < DRAW_FEW ? most : DRAW_FEW;
        d->simd->select(d->scratch.best, d->scratch.best_score, d->z, d->n_vocab, n,
                        &d->scratch.select);
        for (int i = 0; i < n && has_top_k; i++) {
            total += share_of(d, d->scratch.best_score[i]);
        }
        id = draw_among(d, n, total, n == most);
    }
    if (id == NOT_DRAWN && !has_top_k) {
        id = draw_by_bucket(d, total);
    }
    if (id != NOT_DRAWN) {
        return id;
    }
    sort_all(d);
    for (int i = 0; i < most && has_top_k; i++) {
        total += share_of(d, d->scratch.best_score[i]);
    }
    return draw_among(d, most, total, true);
}
