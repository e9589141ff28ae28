/* Packing of rows of x for gemm.c: struct gemm's layout, in the words that the kind multiplies. */
#include "kernels/cpu/simd/gemm.h"
#include "kernels/int8.h"

/* 2·CHUNK elements as CHUNK pairs; 0 past the end of the row. */
static void pack_pairs(uint32_t *to, const float *from, int n)
{
#if defined(HAS_DOT_PAIRS)
    for (int c = 0; c < CHUNK; c += LANES, from += 2 * LANES, n -= 2 * LANES) {
        v_store(to + c, v_pairs(v_load_left(from, n), v_load_left(from + LANES, n - LANES)));
    }
#else
    (void)to;
    (void)from;
    (void)n;
    UNREACHABLE(); /* without the instruction no weights are packed as pairs */
#endif
}

/* 2·CHUNK elements as sums of two BF16 numbers: CHUNK pairs of the higher, and of the lower. */
static void pack_split(uint32_t *to, uint32_t *to_low, const float *from)
{
#if defined(ISA_AVX512)
    float low[2 * CHUNK];
    for (int c = 0; c < 2 * CHUNK; c += LANES) {
        const vf x = v_load(from + c);
        v_store(low + c, x - v_round_bf16(x));
    }
    pack_pairs(to, from, 2 * CHUNK);
    pack_pairs(to_low, low, 2 * CHUNK);
#else
    (void)to;
    (void)from;
    (void)to_low;
    UNREACHABLE();
#endif
}

/* CHUNK floats, 0 past the end of the row. */
static void pack_floats(uint32_t *to, const float *from, int n, bool round_bf16)
{
    for (int c = 0; c < CHUNK; c += LANES) {
        const vf v = v_load_left(from + c, n - c);
        v_store(to + c, round_bf16 ? v_round_bf16(v) : v);
    }
}

/* The scale of a row of x. */
static struct int8_scale scale_of(const float *x, int n)
{
    vi max = vi_set1(0);
    for (int k = 0; k < n; k += LANES) {
        max = vi_max(max, (vi)v_abs(v_load_left(x + k, n - k)));
    }
    uint32_t most = 0;
    for (int i = 0; i < LANES; i++) {
        most = (uint32_t)max[i] > most ? (uint32_t)max[i] : most;
    }
    return int8_scale_of(int8_from_magnitude(most));
}

/* Up to 64 / X_WORDS inputs as CHUNK words; 0 past the end of the row. */
static void pack_bytes(uint32_t *to, const float *from, int n, float inverse)
{
    enum { INPUTS = 4 * CHUNK_WORDS(BYTES) };
#if defined(HAS_DOT_BYTES)
    int8_t *const q = (int8_t *)to;
#else
    int8_t q[INPUTS];
#endif
#if defined(ISA_AVX512)
    const vb offset = (vb)_mm_set1_epi8(-128);
#else
    const vb offset = {0};
#endif
    for (int c = 0; c < INPUTS; c += LANES) {
        const vf scaled = v_load_left(from + c, n - c) * v_set1(inverse);
        const vb bytes = offset ^ vi_low_bytes((vi)(scaled + v_set1(INT8_MAGIC)));
        memcpy(q + c, &bytes, sizeof bytes);
    }
#if !defined(HAS_DOT_BYTES)
    for (int i = 0; i < CHUNK; i++) {
        const int8_t *const at = q + i / 2 * 4 + i % 2;
        to[i] = (uint32_t)(uint16_t)at[0] | (uint32_t)(uint16_t)at[2] << 16;
    }
#endif
}

/* Rows first .. first+n-1 of a tile of n_row rows, whose packed words begin at to. */
struct rows {
    uint32_t *to;
    const float *x; /* of the tile's first row */
    int64_t x_stride;
    int n_row, first, n;
};

static void pack_byte_rows(const struct rows *rows, int n_in, float *x_scale)
{
    enum { INPUTS = 4 * CHUNK_WORDS(BYTES) };
    struct int8_scale scale[AMX_ROWS];
    for (int r = 0; r < rows->n; r++) {
        scale[r] = scale_of(rows->x + (rows->first + r) * rows->x_stride, n_in);
        x_scale[rows->first + r] = scale[r].scale;
    }
    uint32_t *to = rows->to + rows->first * CHUNK;
    for (int k = 0; k < n_in; k += INPUTS, to += rows->n_row * CHUNK) {
        const int n = n_in - k < INPUTS ? n_in - k : INPUTS;
        const float *const from = rows->x + rows->first * rows->x_stride + k;
        for (int r = 0; r < rows->n; r++) {
            pack_bytes(to + r * CHUNK, from + r * rows->x_stride, n, scale[r].inverse);
        }
    }
}

static void pack_rows(const struct rows *rows, int n_in, enum gemm_kind kind)
{
    const bool is_split = kind == AMX_SPLIT || kind == AMX_SPLIT_X;
    const int step = is_pairs(kind) || is_split ? 2 * CHUNK : CHUNK;
    const int n_chunk = is_split ? 2 : 1;
    uint32_t *to = rows->to + rows->first * CHUNK;
    for (int k = 0; k < n_in; k += step, to += n_chunk * rows->n_row * CHUNK) {
        const int n = n_in - k < step ? n_in - k : step;
        for (int r = 0; r < rows->n; r++) {
            const float *const from = rows->x + (rows->first + r) * rows->x_stride + k;
            uint32_t *const at = to + r * CHUNK;
            if (is_split) {
                pack_split(at, at + rows->n_row * CHUNK, from);
            } else if (is_pairs(kind)) {
                pack_pairs(at, from, n);
            } else {
                pack_floats(at, from, n, kind == WIDE);
            }
        }
    }
}

void SIMD(pack_tile)(uint32_t *to, const float *x, int64_t x_stride, int n_row, int n_in,
                     enum gemm_kind kind)
{
    const struct rows all = {to, x, x_stride, n_row, 0, n_row};
    pack_rows(&all, n_in, kind);
}

void SIMD(gemm_pack)(const struct gemm *g, int tile, int first, int n)
{
    const int row = gemm_tile_row(g, tile);
    const struct rows rows = {g->words + (size_t)row * gemm_row_words(g->n_in),
                              g->x + row * g->x_stride,
                              g->x_stride,
                              gemm_tile_row(g, tile + 1) - row,
                              first,
                              n};
    if (g->dtype == DTYPE_I8) {
        pack_byte_rows(&rows, g->n_in, g->x_scale + row);
    } else {
        pack_rows(&rows, g->n_in, kind_of(g));
    }
}
