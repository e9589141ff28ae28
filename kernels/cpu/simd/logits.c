/* Passes over a row's logits or a block of them. For log-probabilities a row is cut into a fixed
 * number of blocks, whatever the number of threads, and their results are merged in block order.
 *
 * Bound: bytes for the comparisons; arithmetic for the exponentials (3 ns per 16); for picking the
 * instruction that compresses, 6 cycles per 16 with AVX-512. */
#include "kernels/cpu/simd/internal.h"
#include "kernels/cpu/simd/vmath.h"

#include <math.h>

/* Vectors summed in F32 before the sum goes on in double: few enough to keep F32's rounding far
 * below that of the logits. */
enum { SUM_VECS = 16 };

/* The largest of many numbers: several vectors at a time, each with a maximum of its own, since one
 * would wait for itself. */
enum { MAX_VECS = 4 };
struct maxima {
    vf best[MAX_VECS];
    vm is_nan;
};

static ALWAYS_INLINE struct maxima maxima_of_none(void)
{
    const vm none = {0};
    struct maxima m;
    m.is_nan = none;
    UNROLL
    for (int v = 0; v < MAX_VECS; v++) {
        m.best[v] = v_set1(-INFINITY);
    }
    return m;
}

static ALWAYS_INLINE void maxima_add(struct maxima *m, const float *z)
{
    vf x[MAX_VECS];
    UNROLL
    for (int v = 0; v < MAX_VECS; v++) {
        x[v] = v_load(z + v * LANES);
        m->best[v] = v_max(x[v], m->best[v]);
    }
    m->is_nan |= vm_unordered(x[0], x[1]) | vm_unordered(x[2], x[3]);
}

/* Adds the rest, n numbers, as logit_max does. */
static ALWAYS_INLINE bool maxima_end(struct maxima m, float *max, const float *z, int n)
{
    int i = 0;
    for (; i + MAX_VECS * LANES <= n; i += MAX_VECS * LANES) {
        maxima_add(&m, z + i);
    }
    bool is_good = vm_bits(m.is_nan) == 0;
    *max = v_max_of(v_max(v_max(m.best[0], m.best[1]), v_max(m.best[2], m.best[3])));
    for (; i < n; i++) {
        *max = z[i] > *max ? z[i] : *max;
        is_good = is_good && !isnan(z[i]);
    }
    return is_good && *max < INFINITY;
}

bool SIMD(logit_max)(float *max, const float *z, int n)
{
    return maxima_end(maxima_of_none(), max, z, n);
}

int SIMD(logit_find)(const float *z, int n, float value, int n_skip)
{
    for (int i = 0; i < n; i += LANES) {
        const int n_lane = lanes_left(n, i);
        const vf v = n_lane == LANES ? v_load(z + i) : v_load_n(z + i, n_lane);
        uint32_t bits = v_bits((vi)(v == value)) & (0xffffffffu >> (32 - n_lane));
        for (; bits != 0; bits &= bits - 1) {
            if (n_skip == 0) {
                return i + __builtin_ctz(bits);
            }
            n_skip--;
        }
    }
    return -1;
}

/* exp((z - max) · scale), 0 past the end. */
static ALWAYS_INLINE vf share(const float *z, int n, float max, float scale)
{
    const vf e = v_exp((v_load_n(z, n) - max) * scale);
    if (n == LANES) {
        return e;
    }
    float lane[LANES];
    v_store(lane, e);
    return v_load_n(lane, n);
}

/* The same of EXP_VECS whole vectors, in step. */
static ALWAYS_INLINE void shares(vf e[EXP_VECS], const float *z, float max, float scale)
{
    UNROLL
    for (int v = 0; v < EXP_VECS; v++) {
        e[v] = (v_load(z + v * LANES) - max) * scale;
    }
    v_exp_n(e, EXP_VECS);
}

/* total and the sum of the shares, which are stored if to is not NULL. Exponentials leave the
 * memory idle: meanwhile it brings what is summed next. */
static ALWAYS_INLINE double sum_shares(double total, float *to, const float *z, const float *next,
                                       int n, float max, float scale)
{
    int i = 0;
    for (; i + SUM_VECS * LANES <= n; i += SUM_VECS * LANES) {
        vf sum = v_set1(0);
        for (int v = 0; v < SUM_VECS; v += EXP_VECS) {
            vf e[EXP_VECS];
            shares(e, z + i + v * LANES, max, scale);
            for (int j = 0; j < EXP_VECS * LANES && next != NULL; j += LINE_WORDS) {
                __builtin_prefetch(next + i + v * LANES + j, 0, 2);
            }
            UNROLL
            for (int j = 0; j < EXP_VECS; j++) {
                sum = sum + e[j];
                if (to != NULL) {
                    v_store(to + i + (v + j) * LANES, e[j]);
                }
            }
        }
        total += v_sum_wide(sum);
    }
    while (i < n) {
        vf sum = v_set1(0);
        for (int v = 0; v < SUM_VECS && i < n; v++, i += LANES) {
            const int n_lane = lanes_left(n, i);
            const vf e = share(z + i, n_lane, max, scale);
            sum = sum + e;
            if (to != NULL) {
                v_store_n(to + i, e, n_lane);
            }
        }
        total += v_sum_wide(sum);
    }
    return total;
}

double SIMD(logit_sum)(const float *z, const float *next, int n, float max,
                       float inverse_temperature)
{
    return sum_shares(0, NULL, z, next, n, max, inverse_temperature);
}

double SIMD(logit_sum_max)(const float *z, int n, float max, struct logit_max *next)
{
    enum { NEAR = 512, FAR = 1024 }; /* asked for into L1 and into L2, as by the products */
    struct maxima maxima = maxima_of_none();
    double total = 0;
    int i = 0;
    for (; i + SUM_VECS * LANES <= n && i + SUM_VECS * LANES <= next->n; i += SUM_VECS * LANES) {
        vf sum = v_set1(0);
        for (int v = 0; v < SUM_VECS; v += EXP_VECS) {
            const float *const ahead = next->z + i + v * LANES;
            for (int j = 0; j < EXP_VECS * LANES; j += LINE_WORDS) {
                __builtin_prefetch(ahead + NEAR + j, 0, 3);
                __builtin_prefetch(ahead + FAR + j, 0, 2);
            }
            vf e[EXP_VECS];
            shares(e, z + i + v * LANES, max, 1.0f);
            UNROLL
            for (int j = 0; j < EXP_VECS; j++) {
                sum = sum + e[j];
            }
            for (int j = 0; j < EXP_VECS; j += MAX_VECS) {
                maxima_add(&maxima, ahead + j * LANES);
            }
        }
        total += v_sum_wide(sum);
    }
    next->is_good = maxima_end(maxima, &next->max, next->z + i, next->n - i);
    return sum_shares(total, NULL, z + i, NULL, n - i, max, 1.0f);
}

double SIMD(logit_shares)(float *to, const float *z, const float *next, int n, float max,
                          float inverse_temperature)
{
    return sum_shares(0, to, z, next, n, max, inverse_temperature);
}

double SIMD(logit_moment)(const float *z, int n, float max)
{
    double total = 0;
    for (int i = 0; i < n;) {
        vf sum = v_set1(0);
        for (int v = 0; v < SUM_VECS && i < n; v++, i += LANES) {
            const int n_lane = n - i < LANES ? n - i : LANES;
            const vf e = share(z + i, n_lane, max, 1.0f);
            const vf term = e * (v_load_n(z + i, n_lane) - max);
            /* 0 · -infinity is no number: such tokens have no share */
            sum = sum + v_select(e > 0.0f, term, v_set1(0));
        }
        total += v_sum_wide(sum);
    }
    return total;
}

/* What a pass over a list moves and adds up. */
struct pick {
    vf low, high;
    vf above, within; /* F32 sums of a few vectors */
    float *to_z, *to_share;
    int n;
};

static ALWAYS_INLINE void pick_vector(struct pick *p, vf z, vf share, const bool is_weighed)
{
    const vm is_above = vm_gt(z, p->high);
    const vm is_within = (vm)(vm_ge(z, p->low) & ~is_above);
    p->above = v_add_where(p->above, is_above, share);
    p->within = v_add_where(p->within, is_within, share);
    const uint32_t bits = vm_bits(is_within);
    v_store_some(p->to_z + p->n, z, bits);
    if (is_weighed) {
        v_store_some(p->to_share + p->n, share, bits);
    }
    p->n += v_count_bits(bits);
}

static ALWAYS_INLINE double pick_all(struct logit_list *to, const struct logit_room *room,
                                     const struct logit_list *from, float low, float high,
                                     const bool is_weighed)
{
    const float *const z = from->z;
    const float *const share = from->share;
    const int n = from->n;
    struct pick p = {
        .low = v_set1(low), .high = v_set1(high), .to_z = room->z, .to_share = room->share};
    double above = 0;
    double within = 0;
    for (int i = 0; i < n;) {
        const int end = n - i < SUM_VECS * LANES ? n : i + SUM_VECS * LANES;
        p.above = p.within = v_set1(0);
        for (; i + LANES <= end; i += LANES) {
            pick_vector(&p, v_load(z + i), is_weighed ? v_load(share + i) : v_set1(1), is_weighed);
        }
        if (i < end) { /* lanes past the end are NaN, which no comparison holds for */
            const vi is_token = (vi)(v_lane() < end - i);
            const vf tail = v_select(is_token, v_load_n(z + i, end - i), v_set1(NAN));
            pick_vector(&p, tail, is_weighed ? v_load_n(share + i, end - i) : v_set1(1),
                        is_weighed);
            i = end;
        }
        above += v_sum_wide(p.above);
        within += v_sum_wide(p.within);
    }
    *to = (struct logit_list){room->z, room->share, is_weighed, p.n, within};
    return above;
}

double SIMD(logit_pick)(struct logit_list *to, const struct logit_room *room,
                        const struct logit_list *from, float low, float high)
{
    return from->is_weighed ? pick_all(to, room, from, low, high, true)
                            : pick_all(to, room, from, low, high, false);
}

int SIMD(logit_count)(const float *z, int n, float least)
{
    const vf bound = v_set1(least);
    vi count = vi_set1(0);
    int i = 0;
    for (; i + LANES <= n; i += LANES) {
        count = vi_count_where(count, vm_ge(v_load(z + i), bound));
    }
    int32_t lane[LANES];
    vi_store(lane, count);
    int sum = 0;
    for (int l = 0; l < LANES; l++) {
        sum += lane[l];
    }
    for (; i < n; i++) {
        sum += z[i] >= least;
    }
    return sum;
}
