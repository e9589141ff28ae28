/* Exact selection of the k best of n scores, and what product-key search does with it.
 *
 * A threshold is found that at least k and at most k + SELECT_SLACK scores reach: start from a sure
 * lower bound (each of 32 groups' maximum is a score, so 32 scores reach the smallest of them),
 * then bisect on the floats' integer order, counting 16 comparisons at a time; 31 steps at worst.
 * Those that reach it are compressed out in order and ranked by counting who is better: no sort, no
 * heap. Where ties leave no such threshold the bisection ends on the tied value itself.
 *
 * Bound: arithmetic in L1. 512 scores, k = 32: see SPEED.md. */
#include "kernels/cpu/simd/internal.h"
#include "kernels/cpu/simd/vmath.h"

#include <math.h>

enum {
    GROUPS = 32, /* lanes, each of which keeps a maximum */
    GROUP_VECS = GROUPS / LANES,
    /* Pairs of ranks i·j <= k: at most k (1 + log k) */
    PAIRS_MAX = 8 * PKM_K_TOP_MAX,
};

/* Scores with the ids that break their ties. */
struct candidates {
    float *score; /* [max + SELECT_PAD] */
    int32_t *id;  /* [max + SELECT_PAD] */
    int n;
};

/* The smallest of the groups' maxima, which at least GROUPS scores reach, the largest, and the
 * mean. */
struct bounds {
    float low, high, mean;
};

static struct bounds first_bounds(const float *score, int n)
{
    vf best[GROUP_VECS];
    for (int v = 0; v < GROUP_VECS; v++) {
        best[v] = v_set1(-INFINITY);
    }
    int i = 0;
    for (; i + GROUPS <= n; i += GROUPS) {
        for (int v = 0; v < GROUP_VECS; v++) {
            best[v] = v_max(v_load(score + i + v * LANES), best[v]);
        }
    }
    float lane[GROUPS];
    for (int v = 0; v < GROUP_VECS; v++) {
        v_store(lane + v * LANES, best[v]);
    }
    for (; i < n; i++) {
        lane[i % GROUPS] = score[i] > lane[i % GROUPS] ? score[i] : lane[i % GROUPS];
    }
    vf least = v_load(lane);
    vf most = least;
    vf sum = least;
    for (int l = LANES; l < GROUPS; l += LANES) {
        const vf v = v_load(lane + l);
        least = -v_max(-least, -v);
        most = v_max(most, v);
        sum = sum + v;
    }
    return (struct bounds){-v_max_of(-least), v_max_of(most), v_sum(sum) / (float)GROUPS};
}

struct threshold {
    float value;
    int n_reach; /* scores >= value, at least k */
    int n_above; /* if n_reach > k + SELECT_SLACK: scores > value, fewer than k */
};

/* The middle between the smallest group maximum and their mean usually is such a threshold. */
static struct threshold find_threshold(const float *score, int n, int k)
{
    const struct bounds bounds = first_bounds(score, n);
    const float low_value = k > GROUPS ? -INFINITY : bounds.low;
    int64_t low = key_of(low_value);
    int64_t high = (int64_t)key_of(bounds.high) + 1;
    struct threshold t = {0.5f * (bounds.low + bounds.mean), 0, 0};
    int64_t middle = isfinite(t.value) ? key_of(t.value) : low;
    if (middle > low && middle < high) {
        t.n_reach = SIMD(logit_count)(score, n, t.value);
        if (t.n_reach >= k) {
            low = middle;
        } else {
            t.n_above = t.n_reach;
            high = middle;
        }
    }
    if (t.n_reach < k) {
        t.value = low_value;
        t.n_reach = SIMD(logit_count)(score, n, low_value);
    }
    while (t.n_reach > k + SELECT_SLACK && high - low > 1) {
        middle = low + (high - low) / 2;
        const float value = number_of_key((int32_t)middle);
        const int n_reach = SIMD(logit_count)(score, n, value);
        if (n_reach >= k) {
            low = middle;
            t.value = value;
            t.n_reach = n_reach;
        } else {
            high = middle;
            t.n_above = n_reach;
        }
    }
    return t;
}

static void collect_all(struct candidates *c, const float *score, const int32_t *ids, int n,
                        float least)
{
    c->n = 0;
    for (int i = 0; i < n; i += LANES) {
        const int n_lane = n - i < LANES ? n - i : LANES;
        const vf v = n_lane == LANES ? v_load(score + i) : v_load_n(score + i, n_lane);
        const vf id = ids == NULL       ? (vf)(v_lane() + i)
                      : n_lane == LANES ? v_load(ids + i)
                                        : v_load_n((const float *)(const void *)(ids + i), n_lane);
        const uint32_t bits = v_bits((vi)(v >= least)) & (0xffffffffu >> (32 - n_lane));
        v_store_some(c->score + c->n, v, bits);
        v_store_some((float *)(void *)(c->id + c->n), id, bits);
        c->n += __builtin_popcount(bits);
    }
}

/* Collects the scores that reach the threshold in ascending order of position. ids NULL: the id is
 * the position, and of scores equal to a tied threshold only the first ones are taken. */
static void collect(struct candidates *c, const float *score, const int32_t *ids, int n, int k,
                    const struct threshold *t)
{
    const bool is_tied = ids == NULL && t->n_reach > k + SELECT_SLACK;
    if (!is_tied) {
        collect_all(c, score, ids, n, t->value);
        return;
    }
    int n_equal = k - t->n_above; /* how many equal ones may still be taken */
    c->n = 0;
    for (int i = 0; i < n; i += LANES) {
        const int n_lane = n - i < LANES ? n - i : LANES;
        const vf v = n_lane == LANES ? v_load(score + i) : v_load_n(score + i, n_lane);
        uint32_t bits = v_bits((vi)(v >= t->value)) & (0xffffffffu >> (32 - n_lane));
        for (; bits != 0; bits &= bits - 1) {
            const int at = i + __builtin_ctz(bits);
            if (!(score[at] > t->value)) {
                if (n_equal == 0) {
                    continue;
                }
                n_equal--;
            }
            c->score[c->n] = score[at];
            c->id[c->n] = at;
            c->n++;
        }
    }
}

/* The candidates that rank before those of a vector; equal scores rank by id. */
static vi count_before(const struct candidates *c, vf score, vi id)
{
    vi before = vi_set1(0);
    for (int j = 0; j < c->n; j++) {
        const vf other = v_set1(c->score[j]);
        const vi tie = (vi)(other == score) & (vi)(vi_set1(c->id[j]) < id);
        before -= (vi)(other > score) | tie;
    }
    return before;
}

/* The candidates that are no worse than those of a vector, not counting themselves. */
static vi count_others(const struct candidates *c, vf score)
{
    vi count = vi_set1(-1);
    for (int j = 0; j < c->n; j++) {
        count = vi_count_where(count, vm_ge(v_set1(c->score[j]), score));
    }
    return count;
}

/* Writes candidates i .. to their places if these are below k: without a branch, which the
 * processor could not predict. Returns the sum of the places. */
static int put_places(const struct candidates *c, int i, vi places, int k, int32_t *best,
                      float *best_score)
{
    int32_t place[LANES];
    int32_t no_id;
    float no_score;
    int sum = 0;
    vi_store(place, places);
    for (int l = 0; l < LANES && i + l < c->n; l++) {
        int32_t *const id = place[l] < k ? best + place[l] : &no_id;
        float *const score = place[l] < k ? best_score + place[l] : &no_score;
        *id = c->id[i + l];
        *score = c->score[i + l];
        sum += place[l];
    }
    return sum;
}

/* Writes the k best candidates in order. A candidate's place is the number of candidates before it;
 * if no two scores are equal, the number of those that are no worse. */
static void rank(struct candidates *c, int k, int32_t *best, float *best_score)
{
    for (int i = 0; i < SELECT_PAD; i++) {
        c->score[c->n + i] = -INFINITY;
        c->id[c->n + i] = INT32_MAX;
    }
    int sum = 0;
    for (int i = 0; i < c->n; i += LANES) {
        const vi places = count_others(c, v_load(c->score + i));
        sum += put_places(c, i, places, k, best, best_score);
    }
    if (sum == c->n * (c->n - 1) / 2) {
        return;
    }
    for (int i = 0; i < c->n; i += LANES) {
        const vi places = count_before(c, v_load(c->score + i), vi_load(c->id + i));
        (void)put_places(c, i, places, k, best, best_score);
    }
}

/* Fills the places n_number .. k-1 with the smallest ids whose score is NaN. */
static void append_nan(const float *score, const int32_t *ids, int n, int n_number, int k,
                       int32_t *best, float *best_score)
{
    int32_t last = -1;
    for (int at = n_number; at < k; at++) {
        int32_t next = INT32_MAX;
        for (int i = 0; i < n; i++) {
            const int32_t id = ids == NULL ? i : ids[i];
            if (isnan(score[i]) && id > last && id < next) {
                next = id;
            }
        }
        best[at] = next;
        best_score[at] = NAN;
        last = next;
    }
}

static void select_best(int32_t *best, float *best_score, const float *score, const int32_t *ids,
                        int n, int k, struct candidates *c)
{
    const struct threshold t = find_threshold(score, n, k);
    int n_number = k;
    if (t.n_reach < k) { /* the bound was -infinity: the remaining scores are NaN */
        n_number = t.n_reach;
        append_nan(score, ids, n, n_number, k, best, best_score);
    }
    if (n_number > 0) {
        collect(c, score, ids, n, n_number, &t);
        rank(c, n_number, best, best_score);
    }
}

void SIMD(select)(int32_t *best, float *best_score, const float *score, int n, int k,
                  const struct select_scratch *scratch)
{
    struct candidates c = {scratch->score, scratch->id, 0};
    select_best(best, best_score, score, NULL, n, k, &c);
}

/* ---- product and flat keys --------------------------------------------------------------------*/

/* Replaces k scores, best first, by their softmax. A slot counts as used unless its weight is 0, so
 * weights may be subnormal; few memories have scores so far apart. */
static void softmax(float *score, int k)
{
    const float max = score[0];
    const bool is_far = score[k - 1] - max < exp_low;
    vf sum = v_set1(0);
    for (int i = 0; i < k; i += LANES) {
        const int n = k - i < LANES ? k - i : LANES;
        const vf x = v_load_n(score + i, n) - max;
        v_store_n(score + i, is_far ? v_exp_far(x) : v_exp(x), n);
        sum = sum + v_load_n(score + i, n); /* 0 past the end */
    }
    const float total = v_sum(sum);
    for (int i = 0; i < k; i++) {
        score[i] /= total;
    }
}

static void select_keys(int32_t *best, float *best_score, const float *score, int n_key, int k)
{
    float candidate_score[PKM_K_TOP_MAX + SELECT_SLACK + SELECT_PAD];
    int32_t candidate_id[PKM_K_TOP_MAX + SELECT_SLACK + SELECT_PAD];
    struct candidates c = {candidate_score, candidate_id, 0};
    select_best(best, best_score, score, NULL, n_key, k, &c);
}

/* Only pairs of ranks i·j <= k can be among the best (kernels/op.h). */
static void select_pairs(int32_t *slots, float *weights, const float *score, int64_t half_stride,
                         const struct pkm_shape *shape)
{
    int32_t first[PKM_K_TOP_MAX];
    int32_t second[PKM_K_TOP_MAX];
    float a[PKM_K_TOP_MAX];
    float b[PKM_K_TOP_MAX];
    float sum[PAIRS_MAX];
    int32_t slot[PAIRS_MAX];
    float candidate_score[PAIRS_MAX + SELECT_PAD];
    int32_t candidate_id[PAIRS_MAX + SELECT_PAD];
    const int k = shape->k_top;
    select_keys(first, a, score, shape->n_key, k);
    select_keys(second, b, score + half_stride, shape->n_key, k);
    int n = 0;
    sum[0] = a[0] + b[0]; /* for the compiler, which cannot know that k >= 1 */
    for (int i = 0; i < k; i++) {
        const int n_j = k / (i + 1);
        for (int j = 0; j < n_j; j++) {
            sum[n + j] = a[i] + b[j];
            slot[n + j] = first[i] * shape->n_key + second[j];
        }
        n += n_j;
    }
    struct candidates c = {candidate_score, candidate_id, 0};
    select_best(slots, weights, sum, slot, n, k, &c);
}

void SIMD(pkm_select)(int32_t *slots, float *weights, const float *score, int64_t half_stride,
                      const struct pkm_shape *shape)
{
    if (shape->kind == PKM_PRODUCT) {
        select_pairs(slots, weights, score, half_stride, shape);
    } else {
        select_keys(slots, weights, score, shape->n_key, shape->k_top);
    }
    if (!shape->scores) {
        softmax(weights, shape->k_top);
    }
}
