/* The register tile of attention: sums of up to TILE_ROWS rows and a few vectors of outputs.
 *
 * It is that of gemm.c over what the cache holds: the rows' queries meet pages of keys, which are
 * [column][position], and their shares meet pages of values, [position][column]. Both are taken by
 * chunks of CHUNK floats of each row, one row after the other, so that all rows are reached by one
 * pointer with constant offsets. */
#ifndef KERNELS_CPU_SIMD_TILE_H
#define KERNELS_CPU_SIMD_TILE_H

#include "kernels/cpu/simd/internal.h"

/* Vectors of outputs of a tile of n rows: what fits the registers, and enough chains to hide the
 * latency of a multiply-add. Whole pages of positions. */
#if defined(ISA_AVX512)
#define ATTEND_VECS(n) ((n) <= 6 ? 4 : 2)
#elif defined(ISA_AVX2)
#define ATTEND_VECS(n) ((n) <= 3 ? 4 : 2)
#else
#define ATTEND_VECS(n) ((n) == 1 ? 8 : 4)
#endif

enum { PAGE_VECS = KV_PAGE / LANES, TILE_CHUNK = TILE_ROWS * CHUNK };

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

/* A vector of outputs: where their floats are, and those that come next, which are asked for. */
struct tile_vec {
    const float *from, *ahead;
};

/* Adds the products of n floats of each row's chunk x and as many of each output, stride apart. Of
 * a vector alone n_lane lanes are read. */
static ALWAYS_INLINE void tile_add(tile_sums sum, const int n_row, const int n_vec, const float *x,
                                   const struct tile_vec *w, int64_t stride, int n, int n_lane)
{
    for (int i = 0; i < n; i++) {
        vf weight[ATTEND_VECS(1)];
        UNROLL
        for (int v = 0; v < n_vec; v++) {
            const float *const from = w[v].from + i * stride;
            __builtin_prefetch(w[v].ahead + i * stride);
            weight[v] = n_vec == 1 ? v_load_n(from, n_lane) : v_load(from);
        }
        UNROLL
        for (int r = 0; r < n_row; r++) { /* outside: one broadcast at a time, or registers spill */
            const vf in = v_set1(x[r * CHUNK + i]);
            UNROLL
            for (int v = 0; v < n_vec; v++) {
                sum[r][v] = v_fma(in, weight[v], sum[r][v]);
            }
        }
    }
}

/* Sums over d columns: of packed queries and the keys of n_vec vectors. */
static ALWAYS_INLINE void tile_dots(tile_sums sum, const int n_row, const int n_vec,
                                    const float *query, int d, struct tile_vec *key, int64_t stride,
                                    int n_lane)
{
    tile_zero(sum, n_row, n_vec);
    for (int c = 0; c < d; c += CHUNK) {
        tile_add(sum, n_row, n_vec, query + c * TILE_ROWS, key, stride,
                 d - c < CHUNK ? d - c : CHUNK, n_lane);
        UNROLL
        for (int v = 0; v < n_vec; v++) {
            key[v].from += CHUNK * stride;
            key[v].ahead += CHUNK * stride;
        }
    }
}

/* Sums as chunks of a page's positions. */
static ALWAYS_INLINE void tile_store_pages(float *to, tile_sums sum, const int n_row,
                                           const int n_vec, int n_lane)
{
    UNROLL
    for (int r = 0; r < n_row; r++) {
        UNROLL
        for (int v = 0; v < n_vec; v++) {
            float *const at = to + v / PAGE_VECS * TILE_CHUNK + r * KV_PAGE + v % PAGE_VECS * LANES;
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
                                       const float *share, const float *value, int n_lane)
{
    vf part[ATTEND_VECS(1)];
    UNROLL
    for (int v = 0; v < n_vec; v++) {
        part[v] = n_vec == 1 ? v_load_n(value, n_lane) : v_load(value + v * LANES);
    }
    UNROLL
    for (int r = 0; r < TILE_ROWS; r++) {
        if (r >= from && r < to) {
            UNROLL
            for (int v = 0; v < n_vec; v++) {
                sum[r][v] = v_fma(v_set1(share[r * CHUNK]), part[v], sum[r][v]);
            }
        }
    }
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
static inline void tile_pack(float *to, const float *q, int64_t q_stride, int n_row, int n,
                             float scale)
{
    for (int c = 0; c < n; c += LANES) {
        for (int r = 0; r < n_row; r++) {
            const int n_lane = lanes_left(n, c);
            v_store_n(to + c / CHUNK * TILE_CHUNK + r * CHUNK + c % CHUNK,
                      v_load_n(q + r * q_stride + c, n_lane) * scale, n_lane);
        }
    }
}

/* The sizes of tiles that there are functions for, largest first; what is left of the rows is taken
 * by several. Each size costs 10 KiB of code, and under a sanitizer 10 s of compiling. */
#if TILE_ROWS == 12
#define EACH_TILE(MAKE) MAKE(12) MAKE(8) MAKE(6) MAKE(4) MAKE(3) MAKE(2) MAKE(1)
#elif TILE_ROWS == 6
#define EACH_TILE(MAKE) MAKE(6) MAKE(4) MAKE(2) MAKE(1)
#else
#define EACH_TILE(MAKE) MAKE(3) MAKE(2) MAKE(1)
#endif

#endif
