/* Matrix products over packed panels: y = act(x·Wᵀ + b).
 *
 * One register tile holds the sums of up to TILE_ROWS rows and n_vec vectors of outputs and runs
 * over all of K; so each output is one chain of multiply-adds in ascending k, whatever the number
 * of rows, and rows do not know of each other. Few rows: a tile streams each panel once, from
 * memory (bound: bytes of W). Many rows: the panel stays in L2 while the tiles pass over it (bound:
 * multiply-adds; 12 x 32 floats take 24 of AVX-512's 32 registers, 14 loads feed 24 fma).
 * Shares reached: see SPEED.md. */
#include "kernels/cpu/simd/internal.h"
#include "kernels/cpu/simd/vmath.h"

/* Vectors per row of a tile of n rows: what fits the registers beside TILE_ROWS. */
#if defined(ISA_AVX512)
#define TILE_VECS(n) 2
#elif defined(ISA_AVX2)
#define TILE_VECS(n) ((n) <= 3 ? 4 : 2)
#else
#define TILE_VECS(n) ((n) == 1 ? 8 : 4)
#endif

/* Streams of one or two rows run ahead by themselves; with more the loads come too far apart. 2 KiB
 * ahead did best of 1 to 16 KiB, and the nearest cache best of L1 and L2 (SPEED.md). */
enum { PREFETCH_ROWS = 3, PREFETCH_WORDS = 512, LINE_WORDS = 16 };

static ALWAYS_INLINE void prefetch_words(const uint32_t *w, int n_word)
{
    for (int i = 0; i < n_word; i += LINE_WORDS) {
        __builtin_prefetch(w + PREFETCH_WORDS + i);
    }
}

/* How a word of K is multiplied: one float, a pair of BF16 by the instruction for pairs, or a pair
 * of BF16 widened to two floats. */
enum kind { F32, PAIRS, WIDE };

/* Words of W that meet a chunk of x: where pairs are widened, a word takes two floats of x. */
#define CHUNK_WORDS(kind) ((kind) == WIDE ? CHUNK / 2 : CHUNK)

static ALWAYS_INLINE vf multiply_add(const enum kind kind, vf in, vf weight, vf sum)
{
#if defined(ISA_AVX512)
    if (kind == PAIRS) {
        return _mm512_dpbf16_ps(sum, (__m512bh)in, (__m512bh)weight);
    }
#endif
    (void)kind;
    return v_fma(in, weight, sum);
}

/* Adds the products of word i of the rows' chunk and one word of each output to the sums. */
static ALWAYS_INLINE void add_word(vf sum[TILE_ROWS][PANEL / LANES], const int n_row,
                                   const int n_vec, const enum kind kind, const uint32_t *x,
                                   const uint32_t *w, int i)
{
    const int n_part = kind == WIDE ? 2 : 1;
    UNROLL
    for (int part = 0; part < n_part; part++) {
        vf weight[PANEL / LANES];
        UNROLL
        for (int v = 0; v < n_vec; v++) {
            weight[v] = v_load(w + v * LANES);
            if (kind == WIDE) {
                const vu pair = (vu)weight[v];
                weight[v] = part == 0 ? (vf)(pair << 16) : (vf)(pair & 0xffff0000u);
            }
        }
        UNROLL
        for (int r = 0; r < n_row; r++) {
            const vf in = v_set1_bits(x[r * CHUNK + n_part * i + part]);
            UNROLL
            for (int v = 0; v < n_vec; v++) {
                sum[r][v] = multiply_add(kind, in, weight[v], sum[r][v]);
            }
        }
    }
}

/* What a tile asks for while it computes: cache lines of the panel that comes next. */
struct ahead {
    const uint32_t *w;
    int n_line; /* per chunk of x */
};

/* out[n_row, PANEL] = tile of x times n_vec vectors of the panel, full K. */
static ALWAYS_INLINE void tile(const int n_row, const int n_vec, const enum kind kind,
                               const uint32_t *x, const uint32_t *w, int n_word, float *out,
                               struct ahead ahead)
{
    vf sum[TILE_ROWS][PANEL / LANES];
    UNROLL
    for (int r = 0; r < n_row; r++) {
        UNROLL
        for (int v = 0; v < n_vec; v++) {
            sum[r][v] = v_set1(0);
        }
    }
    for (; n_word >= CHUNK_WORDS(kind); n_word -= CHUNK_WORDS(kind)) {
        for (int i = 0; i < CHUNK_WORDS(kind); i++) {
            if (n_row >= PREFETCH_ROWS) {
                prefetch_words(w, n_vec * LANES);
            }
            add_word(sum, n_row, n_vec, kind, x, w, i);
            w += PANEL;
        }
        x += n_row * CHUNK;
        for (int i = 0; i < ahead.n_line; i++) {
            __builtin_prefetch(ahead.w, 0, 2); /* into L2 */
            ahead.w += LINE_WORDS;
        }
    }
    for (int i = 0; i < n_word; i++) {
        add_word(sum, n_row, n_vec, kind, x, w, i);
        w += PANEL;
    }
    UNROLL
    for (int r = 0; r < n_row; r++) {
        UNROLL
        for (int v = 0; v < n_vec; v++) {
            v_store(out + r * PANEL + v * LANES, sum[r][v]);
        }
    }
}

/* One function per kind and number of rows: out[n_row, PANEL] of one panel. */
typedef void tile_fn(const uint32_t *x, const uint32_t *w, int n_word, float *out,
                     struct ahead ahead);

#define TILE_OF(kind, n)                                                                           \
    static void tile_##kind##_##n(const uint32_t *x, const uint32_t *w, int n_word, float *out,    \
                                  struct ahead ahead)                                              \
    {                                                                                              \
        for (int c = 0; c < PANEL; c += TILE_VECS(n) * LANES) {                                    \
            tile(n, TILE_VECS(n), kind, x, w + c, n_word, out + c, ahead);                         \
            ahead.n_line = 0;                                                                      \
        }                                                                                          \
    }
#if defined(ISA_AVX512)
#define TILE(n) TILE_OF(F32, n) TILE_OF(PAIRS, n) TILE_OF(WIDE, n)
#else
#define TILE(n) TILE_OF(F32, n) TILE_OF(WIDE, n)
#endif

TILE(1)
TILE(2)
TILE(3)
#if TILE_ROWS >= 6
TILE(4)
TILE(5)
TILE(6)
#endif
#if TILE_ROWS >= 12
TILE(7)
TILE(8)
TILE(9)
TILE(10)
TILE(11)
TILE(12)
#endif

#define TILES_3(kind) tile_##kind##_1, tile_##kind##_2, tile_##kind##_3
#define TILES_6(kind) TILES_3(kind), tile_##kind##_4, tile_##kind##_5, tile_##kind##_6
#define TILES_12(kind)                                                                             \
    TILES_6(kind), tile_##kind##_7, tile_##kind##_8, tile_##kind##_9, tile_##kind##_10,            \
        tile_##kind##_11, tile_##kind##_12

static tile_fn *const tiles[][TILE_ROWS] = {
#if TILE_ROWS == 12
    [F32] = {TILES_12(F32)},
    [PAIRS] = {TILES_12(PAIRS)},
    [WIDE] = {TILES_12(WIDE)},
#elif TILE_ROWS == 6
    [F32] = {TILES_6(F32)},
    [WIDE] = {TILES_6(WIDE)},
#else
    [F32] = {TILES_3(F32)},
    [WIDE] = {TILES_3(WIDE)},
#endif
};

static enum kind kind_of(const struct gemm *g)
{
    return g->dtype != DTYPE_BF16 ? F32 : g->has_pairs ? PAIRS : WIDE;
}

/* ---- packing x --------------------------------------------------------------------------------*/

/* 2·CHUNK elements as CHUNK pairs. */
static void pack_pairs(uint32_t *to, const float *from, int n)
{
#if defined(ISA_AVX512)
    const vf low = n >= LANES ? v_load(from) : v_load_n(from, n);
    const vf high = n >= 2 * LANES
                        ? v_load(from + LANES)
                        : v_load_n(from + (n > LANES ? LANES : 0), n > LANES ? n - LANES : 0);
    const __m512bh pairs = _mm512_cvtne2ps_pbh(high, low);
    memcpy(to, &pairs, sizeof pairs);
#else
    (void)from;
    (void)n;
    CHECK(to == NULL); /* without the instruction nobody asks for pairs */
#endif
}

/* CHUNK floats, 0 past the end of the row. */
static void pack_floats(uint32_t *to, const float *from, int n, bool round_bf16)
{
    for (int c = 0; c < CHUNK; c += LANES) {
        vf v = v_set1(0);
        if (c < n) {
            v = n - c >= LANES ? v_load(from + c) : v_load_n(from + c, n - c);
        }
        v_store(to + c, round_bf16 ? v_round_bf16(v) : v);
    }
}

static void pack_tile(uint32_t *to, const float *x, int64_t x_stride, int n_row, int n_in,
                      enum kind kind)
{
    const int step = kind == PAIRS ? 2 * CHUNK : CHUNK;
    for (int k = 0; k < n_in; k += step) {
        const int n = n_in - k < step ? n_in - k : step;
        for (int r = 0; r < n_row; r++) {
            const float *const from = x + r * x_stride + k;
            if (kind == PAIRS) {
                pack_pairs(to, from, n);
            } else {
                pack_floats(to, from, n, kind == WIDE);
            }
            to += CHUNK;
        }
    }
}

void SIMD(gemm_pack)(const struct gemm *g, int tile)
{
    const int row = gemm_tile_row(g, tile);
    const int n_row = gemm_tile_row(g, tile + 1) - row;
    pack_tile(g->words + (size_t)row * gemm_row_words(g->n_in), g->x + row * g->x_stride,
              g->x_stride, n_row, g->n_in, kind_of(g));
}

/* ---- products ---------------------------------------------------------------------------------*/

/* Adds the bias, applies the activation and writes the n_col columns that exist. */
static void finish_row(float *y, const float *sum, const float *bias, int n_col, enum act act)
{
    for (int c = 0; c < n_col; c += LANES) {
        const int n = n_col - c < LANES ? n_col - c : LANES;
        vf v = v_load(sum + c);
        if (bias != NULL) {
            v = v + (n == LANES ? v_load(bias + c) : v_load_n(bias + c, n));
        }
        v = act == ACT_GELU ? v_gelu(v) : act == ACT_RELU ? v_relu(v) : v;
        if (n == LANES) {
            v_store(y + c, v);
        } else {
            v_store_n(y + c, v, n);
        }
    }
}

/* Of several tiles only the first one meets a panel that is not in L2 yet, and it would wait for
 * memory while the others leave memory idle. So each tile fetches its share of the next panel. */
static struct ahead ahead_of(const struct gemm *g, enum kind kind, const uint32_t *next, int tile,
                             int n_tile)
{
    const int n_word = gemm_k_words(g->n_in, g->dtype);
    const int n_chunk = n_word / CHUNK_WORDS(kind);
    if (n_tile == 1 || n_chunk == 0) {
        return (struct ahead){next, 0};
    }
    const int n_line = n_word * (PANEL / LINE_WORDS) / n_tile;
    return (struct ahead){next + (size_t)n_line * LINE_WORDS * (size_t)tile,
                          (n_line + n_chunk - 1) / n_chunk};
}

void SIMD(gemm_panels)(const struct gemm *g, int first, int n, int tile, int n_tile)
{
    const enum kind kind = kind_of(g);
    const int n_word = gemm_k_words(g->n_in, g->dtype);
    const size_t panel_words = gemm_panel_words(g->n_in, g->dtype);
    for (int panel = first; panel < first + n; panel++) {
        const uint32_t *const w = g->w + (size_t)panel * panel_words;
        const uint32_t *const next = panel + 1 < first + n ? w + panel_words : w;
        const int col = panel * PANEL;
        const int n_col = g->n_out - col < PANEL ? g->n_out - col : PANEL;
        for (int t = 0; t < n_tile; t++) {
            _Alignas(64) float sum[TILE_ROWS * PANEL];
            const int row = gemm_tile_row(g, tile + t);
            const int n_row = gemm_tile_row(g, tile + t + 1) - row;
            tiles[kind][n_row - 1](g->words + (size_t)row * gemm_row_words(g->n_in), w, n_word, sum,
                                   ahead_of(g, kind, next, t, n_tile));
            for (int r = 0; r < n_row; r++) {
                finish_row(g->y + (row + r) * g->y_stride + col, sum + r * PANEL,
                           g->bias == NULL ? NULL : g->bias + col, n_col, g->act);
            }
        }
    }
}

void SIMD(gemm_scores)(float *score, int64_t stride, const float *x, int64_t x_stride, int n_row,
                       const uint32_t *w, int n_in, int n_out, uint32_t *words)
{
    pack_tile(words, x, x_stride, n_row, n_in, F32);
    for (int panel = 0; panel < gemm_n_panel(n_out); panel++) {
        _Alignas(64) float sum[TILE_ROWS * PANEL];
        tiles[F32][n_row - 1](words, w + (size_t)panel * gemm_panel_words(n_in, DTYPE_F32), n_in,
                              sum, (struct ahead){w, 0});
        for (int r = 0; r < n_row; r++) {
            memcpy(score + r * stride + panel * PANEL, sum + r * PANEL, PANEL * sizeof *sum);
        }
    }
}
