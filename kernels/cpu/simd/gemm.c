/* Matrix products over packed panels: y = act(x·Wᵀ + b).
 *
 * One register tile holds the sums of up to TILE_ROWS rows and n_vec vectors of outputs and runs
 * over all of K; so each output is one chain of multiply-adds in ascending k, whatever the number
 * of rows, and rows do not know of each other. Few rows: a tile streams each panel once, from
 * memory (bound: bytes of W). Many rows: the panel stays in L2 while the tiles pass over it (bound:
 * multiply-adds; 12 x 32 floats take 24 of AVX-512's 32 registers, 14 loads feed 24 fma).
 * Shares reached: see SPEED.md. */
#include "kernels/cpu/simd/gemm_tile.h"

/* Vectors per row of a tile of n rows: what fits the registers beside TILE_ROWS. */
#if defined(ISA_AVX512)
#define TILE_VECS(n) 2
#elif defined(ISA_AVX2)
#define TILE_VECS(n) ((n) <= 3 ? 4 : 2)
#elif defined(ISA_NEON) /* of 32 registers: 6 x 4 sums, 4 words, 1 number */
#define TILE_VECS(n) ((n) <= 2 ? 8 : 4)
#else
#define TILE_VECS(n) ((n) == 1 ? 8 : 4)
#endif

/* On AVX2 a tile's sums take 12 of the 16 registers. Where words are widened, gcc writes each sum
 * to another register than it was in and spills, which takes 1.2 to 1.4 times as long; so the
 * instruction is named that keeps it where it is. */
static ALWAYS_INLINE vf multiply_add(const enum gemm_kind kind, vf in, vf weight, vf sum)
{
#if defined(HAS_DOT_PAIRS)
    if (kind == PAIRS) {
        return v_dot_pairs(sum, in, weight);
    }
#endif
    if (kind == BYTES) {
#if defined(HAS_DOT_BYTES)
        return (vf)vi_dot_bytes((vi)sum, (vi)in, (vi)weight);
#elif defined(ISA_AVX2)
        const vi product = vi_dot2((vs)in, (vs)weight);
        __asm__("vpaddd %1, %0, %0" : "+x"(sum) : "x"(product));
        return sum;
#else
        return (vf)((vi)sum + vi_dot2((vs)in, (vs)weight));
#endif
    }
#if defined(ISA_AVX2)
    if (kind == WIDE) {
        __asm__("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(in), "x"(weight));
        return sum;
    }
#endif
    return v_fma(in, weight, sum);
}

/* One of the two parts of a widened word: its low or its high half, or, as 16-bit numbers, its even
 * or its odd bytes. */
static ALWAYS_INLINE vf part_of(const enum gemm_kind kind, vf word, const int part)
{
    if (kind == WIDE) {
        const vu pair = (vu)word;
        return part == 0 ? (vf)(pair << 16) : (vf)(pair & 0xffff0000u);
    }
    const vs pair = part == 0 ? (vs)((vsu)word << 8) : (vs)word;
    return (vf)(pair >> 8);
}

/* Adds the products of word i of the rows' chunk and one word of each output. */
static ALWAYS_INLINE void add_word(vf sum[TILE_ROWS][PANEL / LANES], const int n_row,
                                   const int n_vec, const enum gemm_kind kind, const uint32_t *x,
                                   const uint32_t *w, int i)
{
    const int n_part = X_WORDS(kind);
    UNROLL
    for (int part = 0; part < n_part; part++) {
        vf weight[PANEL / LANES];
        UNROLL
        for (int v = 0; v < n_vec; v++) {
            weight[v] = v_load(w + v * LANES);
            if (n_part == 2) {
                weight[v] = part_of(kind, weight[v], part);
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

/* total[n_row, PANEL] += a tile of x by n_vec vectors of the panel, over n_word words of K. */
static ALWAYS_INLINE void tile(const int n_row, const int n_vec, const enum gemm_kind kind,
                               const uint32_t *x, const uint32_t *w, int n_word, float *total,
                               struct prefetch prefetch)
{
    vf sum[TILE_ROWS][PANEL / LANES];
    UNROLL
    for (int r = 0; r < n_row; r++) {
        UNROLL
        for (int v = 0; v < n_vec; v++) {
            sum[r][v] = v_load(total + r * PANEL + v * LANES);
        }
    }
    for (; n_word >= CHUNK_WORDS(kind); n_word -= CHUNK_WORDS(kind)) {
        for (int i = 0; i < CHUNK_WORDS(kind); i++) {
            prefetch_words(w, n_vec * LANES, prefetch.n_line == 0);
            if (i < prefetch.n_line) { /* one at a time: a burst fills the miss buffers */
                __builtin_prefetch(prefetch.w, 0, 2); /* into L2 */
                prefetch.w += LINE_WORDS;
            }
            add_word(sum, n_row, n_vec, kind, x, w, i);
            w += PANEL;
        }
        x += n_row * CHUNK;
    }
    for (int i = 0; i < n_word; i++) {
        add_word(sum, n_row, n_vec, kind, x, w, i);
        w += PANEL;
    }
    UNROLL
    for (int r = 0; r < n_row; r++) {
        UNROLL
        for (int v = 0; v < n_vec; v++) {
            v_store(total + r * PANEL + v * LANES, sum[r][v]);
        }
    }
}

/* One function per kind and number of rows: sum[n_row, PANEL] of one panel. */
typedef void tile_fn(const uint32_t *x, const uint32_t *w, int n_word, float *sum,
                     struct prefetch prefetch);

#define TILE_OF(kind, n)                                                                           \
    static void tile_##kind##_##n(const uint32_t *x, const uint32_t *w, int n_word, float *sum,    \
                                  struct prefetch prefetch)                                        \
    {                                                                                              \
        for (int c = 0; c < PANEL; c += TILE_VECS(n) * LANES) {                                    \
            tile(n, TILE_VECS(n), kind, x, w + c, n_word, sum + c, prefetch);                      \
            prefetch.n_line = 0;                                                                   \
        }                                                                                          \
    }
#if defined(HAS_DOT_PAIRS)
#define TILE(n) TILE_OF(F32, n) TILE_OF(PAIRS, n) TILE_OF(WIDE, n) TILE_OF(BYTES, n)
#else
#define TILE(n) TILE_OF(F32, n) TILE_OF(WIDE, n) TILE_OF(BYTES, n)
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
    [BYTES] = {TILES_12(BYTES)},
#elif TILE_ROWS == 6
    [F32] = {TILES_6(F32)},
#if defined(HAS_DOT_PAIRS)
    [PAIRS] = {TILES_6(PAIRS)},
#endif
    [WIDE] = {TILES_6(WIDE)},
    [BYTES] = {TILES_6(BYTES)},
#else
    [F32] = {TILES_3(F32)},
    [WIDE] = {TILES_3(WIDE)},
    [BYTES] = {TILES_3(BYTES)},
#endif
};

/* ---- products ---------------------------------------------------------------------------------*/

/* Rows of y lie on pages of their own: 3 % of the time. */
static ALWAYS_INLINE void fetch_y(const struct gemm *g, const struct tile_ref *at)
{
    for (int r = 0; r < at->n_row && g->next_words == NULL && !g->is_streamed; r++) {
        __builtin_prefetch(at->y + r * g->y_stride, 1, 2);
        __builtin_prefetch(at->y + r * g->y_stride + LINE_WORDS, 1, 2);
    }
}

/* The sums of a tile: kept between ranges of K in partial, or here where there is one range. */
static float *start_sums(const struct k_range *range, const struct tile_ref *at, float *partial,
                         float here[TILE_ROWS * PANEL])
{
    float *const sum = partial != NULL ? partial + at->row * PANEL : here;
    if (range->first == 0) {
        memset(sum, 0, (size_t)at->n_row * PANEL * sizeof *sum);
    }
    return sum;
}

static void multiply_tile(const struct product *p, const struct k_range *range,
                          const struct tile_ref *at, struct prefetch prefetch, float *partial)
{
    _Alignas(64) float here[TILE_ROWS * PANEL];
    float *const sum = start_sums(range, at, partial, here);
    if (range->is_last) {
        fetch_y(p->g, at);
    }
    tiles[p->kind][at->n_row - 1](at->x, at->w, range->n_word, sum, prefetch);
    if (range->is_last) {
        finish_tile(p->g, at, sum);
    }
}

/* Two or three tiles take turns: each is multiplied by TURN_WORDS words (4 KiB) of a panel before
 * any goes on. The first tile brings the words from memory; the others find them in L1 and
 * meanwhile prefetch what comes after the first one's own prefetches. Tile by tile, memory would be
 * idle during all tiles but the first. So do the parts of the columns that one tile takes after one
 * another: each would otherwise read every other line of the whole panel. */
enum { TURN_TILES = 3, TURN_WORDS = 32 };

/* Whether a tile of n rows takes a panel's columns in parts. */
static inline bool is_in_parts(int n)
{
    (void)n;
    return TILE_VECS(n) * LANES < PANEL;
}

/* Lines that the others prefetch, all together, per chunk of x: half of the words that a turn takes
 * from memory, so that it is as busy during their part as during the first one's. */
enum { TURN_LINES = 16 };

static void multiply_in_turns(const struct product *p, const struct k_range *range, int panel,
                              float *partial)
{
    const bool is_short = is_in_parts(TILE_ROWS) && p->n_tile < TURN_TILES;
    const int turn = is_short ? TURN_WORDS / 2 : TURN_WORDS;
    _Alignas(64) float here[TURN_TILES][TILE_ROWS * PANEL];
    float *sum[TURN_TILES];
    struct tile_ref at[TURN_TILES];
    for (int t = 0; t < p->n_tile; t++) {
        at[t] = tile_ref_of(p->g, p->kind, range, panel, p->tile + t);
        sum[t] = start_sums(range, &at[t], partial, here[t]);
        if (range->is_last) {
            fetch_y(p->g, &at[t]);
        }
    }
    for (int k = 0; k < range->n_word; k += turn) {
        const int left = range->n_word - k;
        const int n_word = left < turn ? left : turn;
        const uint32_t *const w = at[0].w + (size_t)k * PANEL;
        struct prefetch prefetch = {w + (size_t)n_word * PANEL + PREFETCH_FAR, 0};
        for (int t = 0; t < p->n_tile; t++) {
            const size_t x = (size_t)(k / CHUNK_WORDS(p->kind)) * CHUNK * (size_t)at[t].n_row;
            tiles[p->kind][at[t].n_row - 1](at[t].x + x, w, n_word, sum[t], prefetch);
            prefetch.w += prefetch.n_line * LINE_WORDS * (turn / CHUNK);
            prefetch.n_line = p->n_tile > 1 ? TURN_LINES / (p->n_tile - 1) : 0;
        }
    }
    for (int t = 0; t < p->n_tile && range->is_last; t++) {
        finish_tile(p->g, &at[t], sum[t]);
    }
}

static void multiply_panel(void *ctx, const struct k_range *range, int panel, const uint32_t *next,
                           float *partial)
{
    const struct product *const p = ctx;
    const int n_row = gemm_tile_row(p->g, p->tile + 1) - gemm_tile_row(p->g, p->tile);
    if (p->n_tile <= TURN_TILES && (p->n_tile > 1 || is_in_parts(n_row))) {
        multiply_in_turns(p, range, panel, partial);
        return;
    }
    for (int t = 0; t < p->n_tile; t++) {
        const struct tile_ref at = tile_ref_of(p->g, p->kind, range, panel, p->tile + t);
        multiply_tile(p, range, &at, prefetch_of(next, range, p->kind, t, p->n_tile), partial);
    }
}

void SIMD(gemm_panels)(const struct gemm *g, int first, int n, int tile, int n_tile, float *sums)
{
    struct product product = {g, kind_of(g), tile, n_tile};
    if (is_amx(product.kind)) {
        SIMD(amx_panels)(&product, first, n, sums);
    } else {
        for_panels(&product, first, n, sums, multiply_panel, &product);
    }
    stream_end();
}

void SIMD(gemm_scores)(float *score, int64_t stride, const float *x, int64_t x_stride, int n_row,
                       const uint32_t *w, int n_in, int n_out, uint32_t *words)
{
    SIMD(pack_tile)(words, x, x_stride, n_row, n_in, F32);
    for (int panel = 0; panel < gemm_n_panel(n_out); panel++) {
        _Alignas(64) float sum[TILE_ROWS * PANEL] = {0};
        tiles[F32][n_row - 1](words, w + (size_t)panel * gemm_panel_words(n_in, DTYPE_F32), n_in,
                              sum, (struct prefetch){w, 0});
        for (int r = 0; r < n_row; r++) {
            memcpy(score + r * stride + panel * PANEL, sum + r * PANEL, PANEL * sizeof *sum);
        }
    }
}
