/* Passes over a row's logits or a block of them. For log-probabilities a row is cut into a fixed
 * number of blocks, whatever the number of threads, and their results are merged in block order;
 * a block has the same bits whether its logits are read or come from the product that makes them.
 *
 * Bound: bytes for the comparisons; arithmetic for the exponentials (3 ns per 16); for picking the
 * instruction that compresses, 6 cycles per 16 with AVX-512. */
#include "kernels/cpu/simd/internal.h"
#include "kernels/cpu/simd/vmath.h"

#include <math.h>

/* Vectors summed in F32 before the sum goes on in double: few enough to keep F32's rounding far
 * below that of the logits. */
enum { SUM_VECS = 16 };

bool SIMD(logit_max)(float *max, const float *z, int n)
{
    enum {
        MAX_VECS = 4
    }; /* each with a maximum of its own: a single one would be a chain of
        * dependent instructions */
    vf best[MAX_VECS];
    UNROLL
    for (int v = 0; v < MAX_VECS; v++) {
        best[v] = v_set1(-INFINITY);
    }
    vm is_nan = {0};
    int i = 0;
    for (; i + MAX_VECS * LANES <= n; i += MAX_VECS * LANES) {
        vf x[MAX_VECS];
        UNROLL
        for (int v = 0; v < MAX_VECS; v++) {
            x[v] = v_load(z + i + v * LANES);
            best[v] = v_max(x[v], best[v]);
        }
        is_nan |= vm_unordered(x[0], x[1]) | vm_unordered(x[2], x[3]);
    }
    bool is_good = vm_bits(is_nan) == 0;
    *max = v_max_of(v_max(v_max(best[0], best[1]), v_max(best[2], best[3])));
    for (; i < n; i++) {
        *max = z[i] > *max ? z[i] : *max;
        is_good = is_good && !isnan(z[i]);
    }
    return is_good && *max < INFINITY;
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

/* The same of EXP_VECS whole vectors, step by step. */
static ALWAYS_INLINE void shares(vf e[EXP_VECS], const float *z, float max, float scale)
{
    UNROLL
    for (int v = 0; v < EXP_VECS; v++) {
        e[v] = (v_load(z + v * LANES) - max) * scale;
    }
    v_exp_n(e, EXP_VECS);
}

/* Adds the shares to total and, if to is not NULL, stores them. While exponentials are computed
 * memory is idle, so the numbers that are summed next are prefetched. */
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

double SIMD(logit_shares)(float *to, const float *z, const float *next, int n, float max,
                          float inverse_temperature)
{
    return sum_shares(0, to, z, next, n, max, inverse_temperature);
}

/* What a pass over a list stores and adds up. */
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
        if (i < end) { /* lanes past the end are NaN, for which every comparison is false */
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

/* ---- a block of a row, as its logits pass -----------------------------------------------------*/

enum { SLACK = 32 }; /* a logit may exceed the base by this much */

/* Adds a vector to the sums and moments. */
static ALWAYS_INLINE void add_terms(struct logit_block *b, vf z, vf e)
{
    v_store(b->sum, v_load(b->sum) + e);
    if (b->more != NULL) { /* 0 · -infinity is NaN: such tokens are left out */
        const vf term = v_select((vi)(e > 0.0f), e * (z - b->base), v_set1(0));
        v_store(b->more->moment, v_load(b->more->moment) + term);
    }
}

/* The same; before that the base is raised to the largest of them if that exceeds it by far. */
static __attribute__((noinline)) void add_above(struct logit_block *b, vf z)
{
    const float top = v_max_of(z);
    if (top > b->base + (float)SLACK) {
        const float above = b->base - top;
        const vf sum = v_load(b->sum);
        const vf down = v_exp(v_set1(above));
        v_store(b->sum, sum * down);
        if (b->more != NULL) {
            const vf moved = v_select((vi)(sum > 0.0f), above * sum, v_set1(0));
            v_store(b->more->moment, (v_load(b->more->moment) + moved) * down);
        }
        b->base = top;
    }
    add_terms(b, z, v_exp(z - b->base));
}

/* Counts the tokens of some vectors that rank before the target, whose logit is in one of them.
 * first: the id of the first token. */
static __attribute__((noinline)) int count_around(const struct logit_goal *goal, const vf *z,
                                                  int n_vec, int first)
{
    int n = 0;
    for (int v = 0; v < n_vec; v++, first += LANES) {
        const vf target = v_set1(goal->target_z);
        const int n_smaller = goal->target < first           ? 0
                              : goal->target - first < LANES ? goal->target - first
                                                             : LANES;
        const uint32_t as_large = vm_bits(vm_ge(z[v], target)) & ((1u << n_smaller) - 1);
        n += v_count_bits(vm_bits(vm_gt(z[v], target)) | as_large);
    }
    return n;
}

static ALWAYS_INLINE int count_before(const struct logit_goal *goal, const vf *z, const int n_vec,
                                      int first)
{
    const vf target = v_set1(goal->target_z);
    int n = 0;
    if (goal->target >= first + n_vec * LANES) {
        UNROLL
        for (int v = 0; v < n_vec; v++) {
            n += v_count_bits(vm_bits(vm_ge(z[v], target)));
        }
    } else if (goal->target < first) {
        UNROLL
        for (int v = 0; v < n_vec; v++) {
            n += v_count_bits(vm_bits(vm_gt(z[v], target)));
        }
    } else {
        n = count_around(goal, z, n_vec, first);
    }
    return n;
}

static ALWAYS_INLINE void add_vecs(struct logit_block *row, const vf *z, const int n_row,
                                   const int n_vec, int first)
{
    vf e[EXP_VECS];
    vm is_above = {0};
    UNROLL
    for (int r = 0; r < n_row; r++) {
        struct logit_block *const b = &row[r];
        const vf *const of_row = z + r * n_vec;
        vf top = of_row[0];
        UNROLL
        for (int v = 1; v < n_vec; v++) {
            top = v_max(of_row[v], top);
        }
        UNROLL
        for (int v = 0; v < n_vec; v++) {
            e[r * n_vec + v] = of_row[v] - b->base;
        }
        is_above |= vm_gt(top, v_set1(b->base + (float)SLACK));
        if (b->more != NULL) {
            v_store(b->more->max, v_max(top, v_load(b->more->max)));
        }
        if (vm_bits(vm_ge(top, v_set1(b->goal.target_z))) != 0) {
            b->n_before += count_before(&b->goal, of_row, n_vec, first);
        }
    }
    if (vm_bits(is_above) != 0) {
        for (int i = 0; i < n_row * n_vec; i++) {
            add_above(&row[i / n_vec], z[i]);
        }
        return;
    }
    v_exp_n(e, n_row * n_vec);
    UNROLL
    for (int i = 0; i < n_row * n_vec; i++) {
        add_terms(&row[i / n_vec], z[i], e[i]);
    }
}

void SIMD(logit_add_vecs)(struct logit_block *block, vf a, vf b, vf c, vf d, int n_row, int n_vec,
                          int first)
{
    const vf z[EXP_VECS] = {a, b, c, d};
    if (n_row == 2) {
        add_vecs(block, z, 2, 2, first);
    } else if (n_vec == EXP_VECS) {
        add_vecs(block, z, 1, EXP_VECS, first);
    } else {
        add_vecs(block, z, 1, 2, first);
    }
}

void SIMD(logit_add)(struct logit_block *block, const float *z, int n, int first)
{
    enum { NEAR = 512, FAR = 1024 }; /* prefetched into L1 and into L2, as in the products */
    int i = 0;
    for (; i + EXP_VECS * LANES <= n; i += EXP_VECS * LANES) {
        vf v[EXP_VECS];
        UNROLL
        for (int j = 0; j < EXP_VECS; j++) {
            v[j] = v_load(z + i + j * LANES);
        }
        for (int j = 0; j < EXP_VECS * LANES; j += LINE_WORDS) {
            __builtin_prefetch(z + i + NEAR + j, 0, 3);
            __builtin_prefetch(z + i + FAR + j, 0, 2);
        }
        add_vecs(block, v, 1, EXP_VECS, first + i);
    }
    for (; i < n; i += LANES) {
        const int n_lane = lanes_left(n, i);
        const vi is_token = (vi)(v_lane() < n_lane);
        const vf v[EXP_VECS] = {v_select(is_token, v_load_n(z + i, n_lane), v_set1(-INFINITY))};
        add_vecs(block, v, 1, 1, first + i);
    }
}

void SIMD(logit_end)(struct logit_part *part, const struct logit_block *block)
{
    const double sum = v_sum_wide(v_load(block->sum));
    *part = (struct logit_part){.sum = sum,
                                .base = sum > 0 ? block->base : -INFINITY,
                                .n_before = block->n_before,
                                .is_good = !isnan(sum)};
    if (block->more != NULL) {
        part->max = v_max_of(v_load(block->more->max));
        part->moment = v_sum_wide(v_load(block->more->moment));
    }
}
