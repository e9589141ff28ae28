/* The register tile of attention: sums of up to TILE_ROWS rows and a few vectors of outputs.
 *
 * It is that of gemm.c over what the cache holds: the rows' queries are multiplied by pages of
 * keys, which are [column][position], and their weights by pages of values, [position][column]; of
 * a cache in BF16 two columns, or two positions, share a word, and are widened or multiplied as a
 * pair. Both are taken by chunks of CHUNK floats of each row, one row after the other, so that all
 * rows are reached by one pointer with constant offsets. */
#ifndef KERNELS_CPU_SIMD_TILE_H
#define KERNELS_CPU_SIMD_TILE_H

#include "kernels/cpu/simd/internal.h"

/* Vectors of outputs of a tile of n rows: what fits the registers, and enough chains to hide the
 * latency of a multiply-add. Whole pages of positions. */
#if defined(ISA_AVX512)
#define ATTEND_VECS(n) ((n) <= 6 ? 4 : 2)
#elif defined(ISA_AVX2)
#define ATTEND_VECS(n) ((n) <= 3 ? 4 : 2)
#elif defined(ISA_NEON)
#define ATTEND_VECS(n) ((n) <= 2 ? 8 : 4)
#else
#define ATTEND_VECS(n) ((n) == 1 ? 8 : 4)
#endif

enum { PAGE_VECS = KV_PAGE / LANES, TILE_CHUNK = TILE_ROWS * CHUNK }; /* floats to the next chunk */

typedef vf tile_sums[TILE_ROWS][ATTEND_VECS(1)];

static ALWAYS_INLINE void tile_zero(tile_sums sum, const int n_row, const int n_vec)
{
    UNROLL
    for (int r = 0; r < n_row; r++) {
        UNROLL
        for (int v = 0; v < n_vec; v++) {
            sum[r][v] = v_set1(0);
        }
    }
}

/* A vector of outputs: the address of its words; of those that come next, which are prefetched; and
 * of those that follow them, which are prefetched into L2 alone, or NULL. */
struct tile_vec {
    const float *from, *ahead, *far;
};

/* What words of the cache hold: floats; pairs of BF16, each of which is widened to a float; or
 * pairs that an instruction multiplies by pairs of the rows' numbers. */
enum words { FLOATS, WIDENED, PAIRS };

/* What of a word is multiplied: the float that it is; the lower or the higher BF16 of a pair, as a
 * float; a pair; or a pair whose higher number is left out. */
enum part { WHOLE, LOW, HIGH, PAIR, FIRST };

static ALWAYS_INLINE vf part_of(vf word, const enum part part)
{
    return part == LOW     ? (vf)((vu)word << 16)
           : part == HIGH  ? (vf)((vu)word & 0xffff0000u)
           : part == FIRST ? (vf)((vu)word & 0xffffu)
                           : word;
}

static ALWAYS_INLINE vf add_product(vf sum, vf in, vf weight, const enum part part)
{
    if (part == PAIR || part == FIRST) {
        return v_dot_pairs(sum, in, weight);
    }
    return v_fma(in, weight, sum);
}

/* Adds the products of one number of each row and one of each output, whose words are at w + at. */
static ALWAYS_INLINE void tile_add_part(tile_sums sum, const int n_row, const int n_vec,
                                        const enum part part, const float *x,
                                        const struct tile_vec *w, int64_t at, int n_lane)
{
    vf weight[ATTEND_VECS(1)];
    UNROLL
    for (int v = 0; v < n_vec; v++) {
        const float *const from = w[v].from + at;
        if (part != HIGH) {
            __builtin_prefetch(w[v].ahead + at);
            if (w[v].far != NULL) {
                __builtin_prefetch(w[v].far + at, 0, 2);
            }
        }
        weight[v] = part_of(n_vec == 1 ? v_load_n(from, n_lane) : v_load(from), part);
    }
    UNROLL
    for (int r = 0; r < n_row; r++) { /* outside: one broadcast at a time, or registers spill */
        const vf in = v_set1(x[r * CHUNK]);
        UNROLL
        for (int v = 0; v < n_vec; v++) {
            sum[r][v] = add_product(sum[r][v], in, weight[v], part);
        }
    }
}

/* Adds the products of n numbers (or pairs) of each row's chunk x and as many of each output, in
 * rows of words that are stride apart. If words are widened, is_odd: the first number is the higher
 * one of its word. If there is a single vector, n_lane lanes of it are read. */
static ALWAYS_INLINE void tile_add(tile_sums sum, const int n_row, const int n_vec,
                                   const enum words words, const float *x, const struct tile_vec *w,
                                   int64_t stride, bool is_odd, int n, int n_lane)
{
    if (words != WIDENED) {
        const enum part part = words == PAIRS ? PAIR : WHOLE;
        for (int i = 0; i < n; i++) {
            tile_add_part(sum, n_row, n_vec, part, x + i, w, i * stride, n_lane);
        }
        return;
    }
    int i = 0;
    int64_t at = 0;
    if (is_odd) {
        tile_add_part(sum, n_row, n_vec, HIGH, x, w, 0, n_lane);
        i++;
        at += stride;
    }
    for (; i + 2 <= n; i += 2, at += stride) {
        tile_add_part(sum, n_row, n_vec, LOW, x + i, w, at, n_lane);
        tile_add_part(sum, n_row, n_vec, HIGH, x + i + 1, w, at, n_lane);
    }
    if (i < n) {
        tile_add_part(sum, n_row, n_vec, LOW, x + i, w, at, n_lane);
    }
}

/* Sums over d columns: of queries packed by chunk floats or pairs, and the keys of n_vec
 * vectors. */
static ALWAYS_INLINE void tile_dots(tile_sums sum, const int n_row, const int n_vec,
                                    const enum words words, const float *query, const int chunk,
                                    int d, struct tile_vec *key, int64_t stride, int n_lane)
{
    const int n = words == PAIRS ? d / 2 : d;
    tile_zero(sum, n_row, n_vec);
    for (int c = 0; c < n; c += CHUNK) {
        tile_add(sum, n_row, n_vec, words, query + c / CHUNK * chunk, key, stride, false,
                 n - c < CHUNK ? n - c : CHUNK, n_lane);
        UNROLL
        for (int v = 0; v < n_vec; v++) {
            const int64_t step = CHUNK / (words == WIDENED ? 2 : 1) * stride;
            key[v].from += step;
            key[v].ahead += step;
            key[v].far += key[v].far != NULL ? step : 0;
        }
    }
}

/* Stores sums as scores by page, a chunk of KV_PAGE positions for each row. */
static ALWAYS_INLINE void tile_store_pages(float *to, const int chunk, tile_sums sum,
                                           const int n_row, const int n_vec, int n_lane)
{
    UNROLL
    for (int r = 0; r < n_row; r++) {
        UNROLL
        for (int v = 0; v < n_vec; v++) {
            float *const at = to + v / PAGE_VECS * chunk + r * KV_PAGE + v % PAGE_VECS * LANES;
            if (n_vec == 1) {
                v_store_n(at, sum[r][v], n_lane);
            } else {
                v_store(at, sum[r][v]);
            }
        }
    }
}

/* Adds the value of one position, in n_vec vectors, times the shares of rows from .. to-1. */
static ALWAYS_INLINE void tile_add_one(tile_sums sum, const int n_vec, const int from, const int to,
                                       const float *share, const float *value, const enum part part,
                                       int n_lane)
{
    vf whole[ATTEND_VECS(1)];
    UNROLL
    for (int v = 0; v < n_vec; v++) {
        whole[v] = part_of(n_vec == 1 ? v_load_n(value, n_lane) : v_load(value + v * LANES), part);
    }
    UNROLL
    for (int r = 0; r < TILE_ROWS; r++) {
        if (r >= from && r < to) {
            UNROLL
            for (int v = 0; v < n_vec; v++) {
                sum[r][v] = add_product(sum[r][v], v_set1(share[r * CHUNK]), whole[v], part);
            }
        }
    }
}

/* The row of words that holds position u of a page of values, and which part of each word it is. */
static ALWAYS_INLINE int64_t value_row(const enum words words, int u)
{
    return words == FLOATS ? u % KV_PAGE : u % KV_PAGE / 2;
}

static ALWAYS_INLINE enum part value_part(const enum words words, int u)
{
    return words == FLOATS ? WHOLE : u % 2 == 0 ? LOW : HIGH;
}

/* y = sums, each row divided by its total. */
static ALWAYS_INLINE void tile_store_means(float *y, int64_t y_stride, tile_sums sum,
                                           const int n_row, const int n_vec, const float *total,
                                           int n_lane)
{
    UNROLL
    for (int r = 0; r < n_row; r++) {
        UNROLL
        for (int v = 0; v < n_vec; v++) {
            float *const to = y + r * y_stride + v * LANES;
            if (n_vec == 1) {
                v_store_n(to, sum[r][v] / total[r], n_lane);
            } else {
                v_store(to, sum[r][v] / total[r]);
            }
        }
    }
}

/* Scales n columns of n_row rows of q and lays them out in chunks. */
static inline void tile_pack(float *to, int chunk, const float *q, int64_t q_stride, int n_row,
                             int n, float scale)
{
    for (int c = 0; c < n; c += LANES) {
        for (int r = 0; r < n_row; r++) {
            const int n_lane = lanes_left(n, c);
            v_store_n(to + c / CHUNK * chunk + r * CHUNK + c % CHUNK,
                      v_load_n(q + r * q_stride + c, n_lane) * scale, n_lane);
        }
    }
}

/* The same, as pairs of BF16; a chunk's pairs past the n columns are 0. */
static inline void tile_pack_pairs(float *to, int chunk, const float *q, int64_t q_stride,
                                   int n_row, int n, float scale)
{
    for (int c = 0; c < n; c += 2 * LANES) {
        const int word = c / 2;
        for (int r = 0; r < n_row; r++) {
            const float *const from = q + r * q_stride + c;
            v_store(to + word / CHUNK * chunk + r * CHUNK + word % CHUNK,
                    v_pairs(v_load_left(from, n - c) * scale,
                            v_load_left(from + LANES, n - c - LANES) * scale));
        }
    }
}

/* The numbers of rows that there are functions for, largest first; a tile of another size is
 * computed by several. Each size costs 10 KiB of code, and 10 s of compiling under a sanitizer. */
#if TILE_ROWS == 12
#define EACH_TILE(MAKE) MAKE(12) MAKE(8) MAKE(6) MAKE(4) MAKE(3) MAKE(2) MAKE(1)
#define EACH_PAIRS_TILE(MAKE) MAKE(12) MAKE(4) MAKE(1)
#elif TILE_ROWS == 6
#define EACH_TILE(MAKE) MAKE(6) MAKE(4) MAKE(2) MAKE(1)
#define EACH_PAIRS_TILE(MAKE) MAKE(6) MAKE(2) MAKE(1)
#else
#define EACH_TILE(MAKE) MAKE(3) MAKE(2) MAKE(1)
#define EACH_PAIRS_TILE(MAKE) MAKE(3) MAKE(1)
#endif

#endif
