/* Kernels that pass over rows: embedding sums, layer norm, and the gather of value rows.
 *
 * All are bound by the bytes of their rows. The norm's row (4 KiB at width 1024) stays in L1 during
 * its three passes. The gather reads rows at random from a table larger than any cache. Shares
 * reached: see SPEED.md. */
#include "kernels/cpu/simd/internal.h"

#include <math.h>

void SIMD(row_sum)(float *y, const struct row_source *source, int n_source, int64_t d)
{
    for (int64_t c = 0; c < d; c += LANES) {
        const int n = lanes_left(d, c);
        vf sum = v_load_as(source[0].row, source[0].dtype, c, n) * v_set1(source[0].scale);
        for (int i = 1; i < n_source; i++) {
            sum = sum + v_load_as(source[i].row, source[i].dtype, c, n) * v_set1(source[i].scale);
        }
        v_store_n(y + c, sum, n);
    }
}

/* ---- layer norm -------------------------------------------------------------------------------*/

static float mean_of(const float *x, int64_t d)
{
    vf sum = v_set1(0);
    for (int64_t c = 0; c < d; c += LANES) {
        sum = sum + v_load_n(x + c, lanes_left(d, c));
    }
    return v_sum(sum) / (float)d;
}

/* Mean of the squared distances from mean; lanes past the end count for nothing. */
static float variance_of(const float *x, int64_t d, float mean)
{
    vf sum = v_set1(0);
    int64_t c = 0;
    for (; c + LANES <= d; c += LANES) {
        const vf centred = v_load(x + c) - mean;
        sum = v_fma(centred, centred, sum);
    }
    if (c < d) {
        float rest[LANES];
        for (int i = 0; i < LANES; i++) {
            rest[i] = c + i < d ? x[c + i] : mean;
        }
        const vf centred = v_load(rest) - mean;
        sum = v_fma(centred, centred, sum);
    }
    return v_sum(sum) / (float)d;
}

void SIMD(row_norm)(float *y, const float *x, const float *r, const float *gamma, const float *beta,
                    int64_t d, float eps)
{
    if (r != NULL) {
        for (int64_t c = 0; c < d; c += LANES) {
            const int n = lanes_left(d, c);
            v_store_n(y + c, v_load_n(x + c, n) + v_load_n(r + c, n), n);
        }
        x = y;
    }
    const float mean = mean_of(x, d);
    const float inverse = 1.0f / sqrtf(variance_of(x, d, mean) + eps);
    for (int64_t c = 0; c < d; c += LANES) {
        const int n = lanes_left(d, c);
        const vf centred = (v_load_n(x + c, n) - mean) * inverse;
        v_store_n(y + c, v_fma(centred, v_load_n(gamma + c, n), v_load_n(beta + c, n)), n);
    }
}

/* ---- value rows -------------------------------------------------------------------------------*/

/* Rows added in one pass over y, so that y is loaded and stored once for all of them, and as many
 * are read side by side. The beginnings of the next group are asked for meanwhile: the processor
 * notices what is read in order and goes ahead by itself, faster than if it is asked for every
 * line. */
enum { READ_GROUP = 8, PREFETCH_BYTES = 512 };

static void prefetch_row(const char *row, int64_t bytes)
{
    for (int64_t b = 0; b < bytes && b < PREFETCH_BYTES; b += 64) {
        __builtin_prefetch(row + b);
    }
}

/* y[n] += Σ_j shares[j] · rows[j], j ascending; from: byte offset of the first column. */
static ALWAYS_INLINE void add_rows(float *y, const char *const *row, const float *share,
                                   const int n_row, enum dtype dtype, int64_t n)
{
    int64_t c = 0;
    for (; c + LANES <= n; c += LANES) {
        vf sum = v_load(y + c);
        for (int j = 0; j < n_row; j++) {
            sum = v_fma(v_set1(share[j]), v_load_as(row[j], dtype, c, LANES), sum);
        }
        v_store(y + c, sum);
    }
    if (c < n) {
        vf sum = v_load_n(y + c, (int)(n - c));
        for (int j = 0; j < n_row; j++) {
            sum = v_fma(v_set1(share[j]), v_load_as(row[j], dtype, c, (int)(n - c)), sum);
        }
        v_store_n(y + c, sum, (int)(n - c));
    }
}

static void add_group(float *y, const char *const *row, const float *share, int n_row,
                      enum dtype dtype, int64_t n)
{
    if (n_row == READ_GROUP && dtype == DTYPE_F32) {
        add_rows(y, row, share, READ_GROUP, DTYPE_F32, n);
    } else if (n_row == READ_GROUP && dtype == DTYPE_BF16) {
        add_rows(y, row, share, READ_GROUP, DTYPE_BF16, n);
    } else if (n_row == READ_GROUP && dtype == DTYPE_I8) {
        add_rows(y, row, share, READ_GROUP, DTYPE_I8, n);
    } else {
        add_rows(y, row, share, n_row, dtype, n);
    }
}

void SIMD(pkm_read)(float *y, const int32_t *slots, const float *shares, int n_slot,
                    const struct value_table *table, int64_t first, int64_t n)
{
    const int64_t elem_bytes = (int64_t)dtype_bytes(table->dtype);
    const int64_t row_bytes = table->row_bytes;
    const char *const base = (const char *)table->data + first * elem_bytes;
    const int64_t n_bytes = n * elem_bytes;
    for (int j = 0; j < n_slot && j < READ_GROUP; j++) {
        prefetch_row(base + slots[j] * row_bytes, n_bytes);
    }
    for (int j = 0; j < n_slot; j += READ_GROUP) {
        const int n_row = n_slot - j < READ_GROUP ? n_slot - j : READ_GROUP;
        const char *row[READ_GROUP];
        float share[READ_GROUP];
        for (int i = 0; i < n_row; i++) {
            row[i] = base + slots[j + i] * row_bytes;
            share[i] = shares[j + i];
            if (table->scale != NULL) {
                share[i] *= table->scale[slots[j + i]];
            }
            const int ahead = j + i + READ_GROUP;
            if (ahead < n_slot) {
                prefetch_row(base + slots[ahead] * row_bytes, n_bytes);
            }
        }
        add_group(y, row, share, n_row, table->dtype, n);
    }
}
