/* Rows of a memory's tables at random places: the gather of value rows, and the products of
 * experts. Both are bound by memory; the search among keys is gemm.c's scores and select.c. Shares
 * of the bound reached: see SPEED.md. */
#include "kernels/cpu/simd/internal.h"

#include <float.h>
#include <math.h>

/* ---- value rows -------------------------------------------------------------------------------
 *
 * Rows are read side by side, a block of each in turn, and each is asked for some bytes ahead, at
 * its end the row that takes its place: a core draws more from many streams than from one, and most
 * rows are too short for the processor to notice that they are read in order. */
enum {
    READ_GROUP = 16, /* rows */
    READ_AHEAD = 512,
    LONG_BYTES = 4096, /* rows of this length are long enough for the processor to notice; they also
                        * compete for the same set of L1 */
    LONG_GROUP = 8,
    LONG_AHEAD = 256,
    BLOCK = 8 * LANES, /* bytes: 2 vectors of F32, 8 of I8 */
    LINE = LINE_WORDS * sizeof(uint32_t),
};

struct read_group {
    const char *row[READ_GROUP]; /* past n it repeats the first one */
    float weight[READ_GROUP];
    float scale[READ_GROUP];      /* of Q4 only; elsewhere weight includes it */
    enum dtype dtype[READ_GROUP]; /* where they differ */
    int n;
};

/* What the numbers of a row are multiplied by. In a file, fp16 may begin at any byte. */
static ALWAYS_INLINE float scale_of(const struct value_table *table, int32_t slot)
{
    if (table->scale_f16 != NULL) {
        uint16_t bits;
        memcpy(&bits, table->scale_f16 + slot, sizeof bits);
        return f16_to_f32(bits);
    }
    return table->scale != NULL ? table->scale[slot] : 1;
}

static ALWAYS_INLINE struct value_row row_of(const struct value_table *table, int32_t slot)
{
    if (table->row != NULL) {
        return table->row[slot];
    }
    return (struct value_row){(const char *)table->data + slot * table->row_bytes,
                              scale_of(table, slot)};
}

/* Takes the first of n slots, at most most of them. */
static void set_group(struct read_group *group, const int32_t *slots, const float *weights, int n,
                      int most, const struct value_table *table, int64_t first_byte)
{
    group->n = n < most ? n : most;
    for (int i = 0; i < READ_GROUP; i++) {
        const int j = i < group->n ? i : 0;
        const struct value_row row = row_of(table, slots[j]);
        group->row[i] = row.data + first_byte;
        group->scale[i] = row.scale;
        const float weight = weights[j] * (table->dtype == DTYPE_Q4 ? 1 : row.scale);
        group->weight[i] = fabsf(weight) < FLT_MIN ? 0 : weight; /* slow, and adds nothing */
    }
}

/* How the numbers of a row are stored: as a dtype, or in the high halves of Q4's bytes (DTYPE_Q4
 * itself means the low halves). */
enum { Q4_HIGH = DTYPE_N };

static inline int64_t stored_bytes(int stored)
{
    return stored == Q4_HIGH ? 1 : (int64_t)dtype_bytes((enum dtype)stored);
}

/* n <= LANES numbers from element col on; the lanes past n hold some finite number. */
static ALWAYS_INLINE vf load_stored(const char *row, const int stored, int64_t col, int n)
{
    if (stored != DTYPE_Q4 && stored != Q4_HIGH) {
        return v_load_as(row, (enum dtype)stored, col, n);
    }
    vb b = {0};
    memcpy(&b, row + col, (size_t)n);
    return v_from_i8((stored == Q4_HIGH ? b >> 4 & 15 : b & 15) - 8);
}

/* The same of row j, times its scale if that is not in its weight: a number of Q4 is its code times
 * its scale, which is exact in fp32. So an overlay's F32 row with these numbers gives the same
 * bits. */
static ALWAYS_INLINE vf load_row(const struct read_group *group, int j, const int stored,
                                 int64_t col, int n)
{
    vf x = load_stored(group->row[j], stored, col, n);
    if (stored == DTYPE_Q4 || stored == Q4_HIGH) {
        x *= v_set1(group->scale[j]);
    }
    return x;
}

static ALWAYS_INLINE vf load_any(const char *row, enum dtype dtype, int64_t col, int n)
{
    switch (dtype) {
    case DTYPE_F32: return v_load_as(row, DTYPE_F32, col, n);
    case DTYPE_F16: return v_load_as(row, DTYPE_F16, col, n);
    case DTYPE_BF16: return v_load_as(row, DTYPE_BF16, col, n);
    default: return v_load_as(row, DTYPE_I8, col, n);
    }
}

/* set_group for rows of different types, from column first on. */
static void set_mixed_group(struct read_group *group, const int32_t *slots, const float *weights,
                            int n, const struct value_table *table, int64_t first)
{
    set_group(group, slots, weights, n, READ_GROUP, table, 0);
    for (int i = 0; i < READ_GROUP; i++) {
        const enum dtype dtype = table->row_dtype[slots[i < group->n ? i : 0]];
        group->dtype[i] = dtype;
        group->row[i] += first * stored_bytes((int)dtype);
    }
}

/* y[n] += Σ_j weights[j] · rows[j], j ascending. */
static ALWAYS_INLINE void add_group(float *y, const struct read_group *group,
                                    const struct read_group *next, const int dtype, int64_t n,
                                    int64_t ahead)
{
    const int64_t elem_bytes = stored_bytes(dtype);
    const int n_vec = (int)(BLOCK / (LANES * elem_bytes));
    const int64_t end = n * elem_bytes;
    int64_t c = 0;
    for (; c + n_vec * LANES <= n; c += n_vec * LANES) {
        const int64_t to = c * elem_bytes + ahead;
        const struct read_group *const from = to < end ? group : next;
        vf sum[BLOCK / LANES];
        UNROLL
        for (int v = 0; v < n_vec; v++) {
            sum[v] = v_load(y + c + v * LANES);
        }
        for (int j = 0; j < group->n; j++) {
            for (int b = 0; b < BLOCK; b += LINE) {
                __builtin_prefetch(from->row[j] + (to < end ? to : to - end) + b);
            }
            const vf weight = v_set1(group->weight[j]);
            UNROLL
            for (int v = 0; v < n_vec; v++) {
                sum[v] = v_fma(weight, load_row(group, j, dtype, c + v * LANES, LANES), sum[v]);
            }
        }
        UNROLL
        for (int v = 0; v < n_vec; v++) {
            v_store(y + c + v * LANES, sum[v]);
        }
    }
    for (; c < n; c += LANES) {
        const int n_lane = lanes_left(n, c);
        vf sum = v_load_n(y + c, n_lane);
        for (int j = 0; j < group->n; j++) {
            sum = v_fma(v_set1(group->weight[j]), load_row(group, j, dtype, c, n_lane), sum);
        }
        v_store_n(y + c, sum, n_lane);
    }
}

#define ADD_GROUP(name, dtype)                                                                     \
    static void name(float *y, const struct read_group *group, const struct read_group *next,      \
                     int64_t n, int64_t ahead)                                                     \
    {                                                                                              \
        add_group(y, group, next, dtype, n, ahead);                                                \
    }

ADD_GROUP(add_f32, DTYPE_F32)
ADD_GROUP(add_f16, DTYPE_F16)
ADD_GROUP(add_bf16, DTYPE_BF16)
ADD_GROUP(add_i8, DTYPE_I8)
ADD_GROUP(add_q4_low, DTYPE_Q4)
ADD_GROUP(add_q4_high, Q4_HIGH)

/* The same for rows of different types, but not Q4. A row's type is the same in every block of
 * columns, so the processor soon predicts the branch. */
static void add_mixed(float *y, const struct read_group *group, const struct read_group *next,
                      int64_t n)
{
    enum { AHEAD = 64 }; /* columns */
    for (int64_t c = 0; c < n; c += 2 * LANES) {
        const int n_first = lanes_left(n, c);
        const int n_second = n - c > LANES ? lanes_left(n, c + LANES) : 0;
        const bool ends = c + AHEAD >= n;
        const struct read_group *const from = ends ? next : group;
        const int64_t to = ends ? c + AHEAD - n : c + AHEAD;
        vf first = v_load_n(y + c, n_first);
        vf second = n_second > 0 ? v_load_n(y + c + LANES, n_second) : v_set1(0);
        for (int j = 0; j < group->n; j++) {
            const char *const row = group->row[j];
            const enum dtype dtype = group->dtype[j];
            const vf weight = v_set1(group->weight[j]);
            __builtin_prefetch(from->row[j] + to * stored_bytes((int)from->dtype[j]));
            first = v_fma(weight, load_any(row, dtype, c, n_first), first);
            if (n_second > 0) {
                second = v_fma(weight, load_any(row, dtype, c + LANES, n_second), second);
            }
        }
        v_store_n(y + c, first, n_first);
        if (n_second > 0) {
            v_store_n(y + c + LANES, second, n_second);
        }
    }
}

/* Columns first .. first+n-1 of rows of different types. */
static void read_mixed(float *y, const int32_t *slots, const float *weights, int n_slot,
                       const struct value_table *table, int64_t first, int64_t n)
{
    struct read_group groups[2];
    set_mixed_group(&groups[0], slots, weights, n_slot, table, first);
    for (int j = 0; j < n_slot; j += READ_GROUP) {
        const struct read_group *const group = &groups[j / READ_GROUP % 2];
        struct read_group *const next = &groups[(j / READ_GROUP + 1) % 2];
        const int left = n_slot - j - READ_GROUP;
        if (left > 0) {
            set_mixed_group(next, slots + j + READ_GROUP, weights + j + READ_GROUP, left, table,
                            first);
        } else {
            *next = *group;
        }
        add_mixed(y, group, next, n);
    }
}

/* Columns that are stored alike, beginning with element first of each row. */
static void read_stored(float *y, const int32_t *slots, const float *weights, int n_slot,
                        const struct value_table *table, int stored, int64_t first, int64_t n,
                        const int32_t *next_slots)
{
    static void (*const add_fns[])(float *, const struct read_group *, const struct read_group *,
                                   int64_t, int64_t) = {
        [DTYPE_F32] = add_f32, [DTYPE_F16] = add_f16,   [DTYPE_BF16] = add_bf16,
        [DTYPE_I8] = add_i8,   [DTYPE_Q4] = add_q4_low, [Q4_HIGH] = add_q4_high};
    const int64_t elem_bytes = stored_bytes(stored);
    const int64_t first_byte = first * elem_bytes;
    const int64_t n_bytes = n * elem_bytes;
    const bool is_long = n_bytes >= LONG_BYTES;
    const int most = is_long ? LONG_GROUP : READ_GROUP;
    const int64_t ahead = is_long ? LONG_AHEAD : n_bytes < READ_AHEAD ? n_bytes : READ_AHEAD;
    struct read_group groups[2];
    set_group(&groups[0], slots, weights, n_slot, most, table, first_byte);
    for (int i = 0; i < groups[0].n; i++) {
        for (int64_t b = 0; b < ahead; b += LINE) {
            __builtin_prefetch(groups[0].row[i] + b);
        }
    }
    for (int j = 0; j < n_slot; j += most) {
        const struct read_group *const group = &groups[j / most % 2];
        struct read_group *const next = &groups[(j / most + 1) % 2];
        const int left = n_slot - j - most;
        if (left > 0) {
            set_group(next, slots + j + most, weights + j + most, left, most, table, first_byte);
        } else if (next_slots != NULL) {
            set_group(next, next_slots, weights, n_slot, most, table, first_byte);
        } else {
            *next = *group;
        }
        add_fns[stored](y, group, next, n, ahead);
    }
}

void SIMD(pkm_read)(float *y, const int32_t *slots, const float *weights, int n_slot,
                    const struct value_table *table, int64_t first, int64_t n,
                    const int32_t *next_slots)
{
    if (table->row_dtype != NULL) {
        read_mixed(y, slots, weights, n_slot, table, first, n);
        return;
    }
    if (table->dtype != DTYPE_Q4) {
        read_stored(y, slots, weights, n_slot, table, (int)table->dtype, first, n, next_slots);
        return;
    }
    const int64_t half = table->half;
    const int64_t n_low = first >= half ? 0 : half - first < n ? half - first : n;
    if (n_low > 0) {
        read_stored(y, slots, weights, n_slot, table, DTYPE_Q4, first, n_low,
                    n_low == n ? next_slots : slots);
    }
    if (n_low < n) {
        read_stored(y + n_low, slots, weights, n_slot, table, Q4_HIGH, first + n_low - half,
                    n - n_low, next_slots);
    }
}

/* ---- experts ----------------------------------------------------------------------------------*/

/* Each row is prefetched while the ones before it are read. */
static ALWAYS_INLINE void dots(float *dot, const int32_t *slots, int n_slot, const float *x,
                               const struct value_table *table, const enum dtype dtype, int64_t d)
{
    enum { ROWS_AHEAD = 2 };
    for (int j = 0; j < n_slot; j++) {
        const struct value_row row = row_of(table, slots[j]);
        const int next = j + ROWS_AHEAD < n_slot ? j + ROWS_AHEAD : n_slot - 1;
        const char *const ahead = row_of(table, slots[next]).data;
        vf sum = v_set1(0);
        for (int64_t c = 0; c < d; c += LANES) {
            const int n = lanes_left(d, c);
            __builtin_prefetch(ahead + c * (int64_t)dtype_bytes(dtype));
            sum = v_fma(v_load_n(x + c, n), v_load_as(row.data, dtype, c, n), sum);
        }
        dot[j] = v_sum(sum) * row.scale;
    }
}

void SIMD(row_dots)(float *dot, const int32_t *slots, int n_slot, const float *x,
                    const struct value_table *table, int64_t d)
{
    switch (table->dtype) {
    case DTYPE_F32: dots(dot, slots, n_slot, x, table, DTYPE_F32, d); break;
    case DTYPE_F16: dots(dot, slots, n_slot, x, table, DTYPE_F16, d); break;
    case DTYPE_BF16: dots(dot, slots, n_slot, x, table, DTYPE_BF16, d); break;
    default: dots(dot, slots, n_slot, x, table, DTYPE_I8, d); break;
    }
}
