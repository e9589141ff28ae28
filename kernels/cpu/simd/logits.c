/* Passes over a block of a row's logits. A row is cut into a fixed number of blocks, whatever the
 * number of threads, and their results are merged in block order.
 *
 * Bound: bytes for the comparisons, arithmetic for the exponentials (about 1 ns per 16). */
#include "kernels/cpu/simd/internal.h"
#include "kernels/cpu/simd/vmath.h"

#include <math.h>

/* Vectors summed in F32 before the sum goes on in double: few enough to keep F32's rounding far
 * below that of the logits. */
enum { SUM_VECS = 16 };

bool SIMD(logit_max)(float *max, const float *z, int n)
{
    vf best = v_set1(-INFINITY);
    vi is_good = vi_set1(-1);
    int i = 0;
    for (; i + LANES <= n; i += LANES) {
        const vf v = v_load(z + i);
        best = v_max(v, best);
        is_good &= (vi)(v < INFINITY); /* false for NaN */
    }
    bool all_good = v_bits(~is_good) == 0;
    *max = v_max_of(best);
    for (; i < n; i++) {
        *max = z[i] > *max ? z[i] : *max;
        all_good = all_good && z[i] < INFINITY;
    }
    return all_good;
}

int SIMD(logit_find)(const float *z, int n, float value)
{
    int i = 0;
    for (; i + LANES <= n; i += LANES) {
        const uint32_t bits = v_bits((vi)(v_load(z + i) == value));
        if (bits != 0) {
            return i + __builtin_ctz(bits);
        }
    }
    for (; i < n; i++) {
        if (z[i] == value) {
            return i;
        }
    }
    return -1;
}

static double add_lanes(vf v)
{
    float lane[LANES];
    v_store(lane, v);
    double sum = 0;
    for (int l = 0; l < LANES; l++) {
        sum += (double)lane[l];
    }
    return sum;
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

double SIMD(logit_sum)(const float *z, int n, float max, float inverse_temperature)
{
    double total = 0;
    int i = 0;
    for (; i + SUM_VECS * LANES <= n; i += SUM_VECS * LANES) {
        vf sum = v_set1(0);
        for (int v = 0; v < SUM_VECS; v += EXP_VECS) {
            vf e[EXP_VECS];
            shares(e, z + i + v * LANES, max, inverse_temperature);
            UNROLL
            for (int j = 0; j < EXP_VECS; j++) {
                sum = sum + e[j];
            }
        }
        total += add_lanes(sum);
    }
    while (i < n) {
        vf sum = v_set1(0);
        for (int v = 0; v < SUM_VECS && i < n; v++, i += LANES) {
            sum = sum + share(z + i, n - i < LANES ? n - i : LANES, max, inverse_temperature);
        }
        total += add_lanes(sum);
    }
    return total;
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
        total += add_lanes(sum);
    }
    return total;
}

void SIMD(logit_buckets)(float *to, int32_t *bucket, const float *z, int n, float max,
                         float inverse_temperature, float scale, int last)
{
    const vf end = v_set1((float)last);
    int i = 0;
    for (; i + EXP_VECS * LANES <= n; i += EXP_VECS * LANES) {
        vf e[EXP_VECS];
        shares(e, z + i, max, inverse_temperature);
        UNROLL
        for (int v = 0; v < EXP_VECS; v++) {
            const vf distance = (max - v_load(z + i + v * LANES)) * scale;
            v_store(to + i + v * LANES, e[v]);
            vi_store(bucket + i + v * LANES, vi_from_f32(v_select(distance < end, distance, end)));
        }
    }
    for (; i < n; i += LANES) {
        const int n_lane = n - i < LANES ? n - i : LANES;
        const vf distance = (max - v_load_n(z + i, n_lane)) * scale;
        const vi whole = vi_from_f32(v_select(distance < end, distance, end));
        v_store_n(to + i, share(z + i, n_lane, max, inverse_temperature), n_lane);
        v_store_n((float *)(void *)(bucket + i), (vf)whole, n_lane);
    }
}

int SIMD(find_equal)(int32_t *at, const int32_t *v, int n, int32_t value)
{
    int n_found = 0;
    int i = 0;
    for (; i + LANES <= n; i += LANES) {
        for (uint32_t bits = v_bits((vi)(vi_load(v + i) == value)); bits != 0; bits &= bits - 1) {
            at[n_found++] = i + __builtin_ctz(bits);
        }
    }
    for (; i < n; i++) {
        if (v[i] == value) {
            at[n_found++] = i;
        }
    }
    return n_found;
}

int32_t SIMD(logit_before)(const float *z, int first, int n, float target, int32_t id)
{
    vi count = vi_set1(0);
    int i = 0;
    vi lane_id;
    int32_t ids[LANES];
    for (int l = 0; l < LANES; l++) {
        ids[l] = first + l;
    }
    lane_id = vi_load(ids);
    for (; i + LANES <= n; i += LANES) {
        const vf v = v_load(z + first + i);
        count -= (vi)(v > target) | ((vi)(v == target) & (vi)(lane_id < id));
        lane_id += LANES;
    }
    int32_t lane[LANES];
    vi_store(lane, count);
    int32_t sum = 0;
    for (int l = 0; l < LANES; l++) {
        sum += lane[l];
    }
    for (; i < n; i++) {
        const float x = z[first + i];
        sum += x > target || (x == target && first + i < id);
    }
    return sum;
}
