/* What the tiles of gemm.c and gemm_amx.c share: where their work is, and what their sums
 * become. */
#ifndef KERNELS_CPU_SIMD_GEMM_TILE_H
#define KERNELS_CPU_SIMD_GEMM_TILE_H

#include "kernels/cpu/simd/gemm.h"
#include "kernels/cpu/simd/vmath.h"

/* A range of K that all panels of a call are multiplied by before the next range. */
struct k_range {
    int first, n_word; /* words of K */
    bool is_last;
};

/* Packed rows kept in L2: 1 MiB. Less costs more in partial sums than it saves in rows. Of a panel
 * 128 KiB of F32: it passes once for each tile, while the next one comes in beside it. */
enum { L2_WORDS = 1 << 18, MIN_CHUNKS = 16, MAX_CHUNKS = 64 };

/* Of the matrix unit's panel: 64 KiB, which stay in L2 beside the packed rows. */
enum { AMX_CHUNKS = 32 };

/* Tiles of x that are multiplied by panels of W. */
struct product {
    const struct gemm *g;
    enum gemm_kind kind;
    int tile, n_tile;
};

/* Words of K in a range: as many as let the packed rows of the tiles stay in L2 beside a panel
 * while GEMM_SUM_PANELS panels pass, whose partial sums are kept in memory. A single tile takes all
 * of K at once. */
static inline int range_words(const struct product *p)
{
    const int n_row = gemm_tile_row(p->g, p->tile + p->n_tile) - gemm_tile_row(p->g, p->tile);
    const int n_word = gemm_k_words(p->g->n_in, p->g->dtype);
    const int most = is_amx(p->kind) ? AMX_CHUNKS : MAX_CHUNKS;
    const int wanted = L2_WORDS / (n_row * CHUNK);
    const int n_chunk = wanted < MIN_CHUNKS ? MIN_CHUNKS : wanted > most ? most : wanted;
    const int words = n_chunk * CHUNK_WORDS(p->kind);
    return p->n_tile == 1 || words > n_word ? n_word : words;
}

/* Multiplies the tiles by one range of one panel. next: the words of W that come after these.
 * partial [GEMM_ROWS, PANEL]: the panel's sums between two ranges; NULL where there is one
 * range. */
typedef void panel_fn(void *ctx, const struct k_range *range, int panel, const uint32_t *next,
                      float *partial);

/* Panels first .. first+n-1: groups of GEMM_SUM_PANELS go through one range of K after another. */
static inline void for_panels(const struct product *p, int first, int n, float *sums, panel_fn *fn,
                              void *ctx)
{
    const size_t panel_words = gemm_panel_words(p->g->n_in, p->g->dtype);
    const int n_word = gemm_k_words(p->g->n_in, p->g->dtype);
    const int step = range_words(p);
    const int n_together = step < n_word && GEMM_SUM_PANELS < n ? GEMM_SUM_PANELS : n;
    for (int group = first; group < first + n; group += n_together) {
        const int left = first + n - group;
        const int end = group + (left < n_together ? left : n_together);
        for (int k = 0; k < n_word; k += step) {
            const bool is_last = n_word - k <= step;
            const struct k_range range = {k, is_last ? n_word - k : step, is_last};
            const uint32_t *const begin = p->g->w + (size_t)group * panel_words + (size_t)k * PANEL;
            for (int panel = group; panel < end; panel++) {
                const size_t i = (size_t)(panel - group);
                const uint32_t *next = begin + (i + 1) * panel_words;
                if (panel + 1 == end) {
                    next = is_last ? begin + i * panel_words : begin + (size_t)step * PANEL;
                }
                fn(ctx, &range, panel, next, step < n_word ? sums + i * GEMM_ROWS * PANEL : NULL);
            }
        }
    }
}

/* Of several tiles only the first one would read a panel that is not in L2 yet: it would wait for
 * memory, and the others would leave memory idle. So each tile prefetches its part of the next
 * panel. */
static inline struct prefetch prefetch_of(const uint32_t *next, const struct k_range *range,
                                          enum gemm_kind kind, int tile, int n_tile)
{
    const int n_chunk = range->n_word / (is_amx(kind) ? CHUNK : CHUNK_WORDS(kind));
    if (n_tile == 1 || n_chunk == 0) {
        return (struct prefetch){next, 0};
    }
    const int n_line = range->n_word * (PANEL / LINE_WORDS) / n_tile;
    return (struct prefetch){next + (size_t)n_line * LINE_WORDS * (size_t)tile,
                             (n_line + n_chunk - 1) / n_chunk};
}

/* The operands of one tile, one panel, one range of K. */
struct tile_ref {
    const uint32_t *x, *w;
    float *y;
    int row, col, n_row, n_col;
};

static inline struct tile_ref tile_ref_of(const struct gemm *g, enum gemm_kind kind,
                                          const struct k_range *range, int panel, int tile)
{
    const int row = gemm_tile_row(g, tile);
    const int n_row = gemm_tile_row(g, tile + 1) - row;
    const int col = panel * PANEL;
    const size_t x_first = (size_t)(range->first / CHUNK_WORDS(kind)) * CHUNK * (size_t)n_row;
    const size_t w_first =
        (size_t)panel * gemm_panel_words(g->n_in, g->dtype) + (size_t)range->first * PANEL;
    return (struct tile_ref){.x = g->words + (size_t)row * gemm_row_words(g->n_in) + x_first,
                             .w = g->w + w_first,
                             .y = g->y + row * g->y_stride + col,
                             .row = row,
                             .col = col,
                             .n_col = g->n_out - col < PANEL ? g->n_out - col : PANEL,
                             .n_row = n_row};
}

/* The epilogue processes GELU_VECS vectors per call: DONE_ROWS rows of DONE_VECS vectors each. */
enum {
    PANEL_VECS = PANEL / LANES,
    DONE_VECS = PANEL_VECS < GELU_VECS ? PANEL_VECS : GELU_VECS,
    DONE_ROWS = GELU_VECS / DONE_VECS,
};

/* What outputs are made with, by vectors of a panel. */
struct outputs {
    vf bias[PANEL_VECS], scale[PANEL_VECS];
    vi offset[PANEL_VECS];
};

static inline struct outputs outputs_of(const struct gemm *g, const struct tile_ref *at)
{
    struct outputs o;
    const uint32_t *const end =
        g->w + (size_t)(at->col / PANEL + 1) * gemm_panel_words(g->n_in, g->dtype);
    for (int v = 0; v < PANEL_VECS; v++) {
        const int c = v * LANES;
        const int n = at->n_col - c < LANES ? at->n_col - c : LANES;
        o.bias[v] = g->bias != NULL && n > 0 ? v_load_n(g->bias + at->col + c, n) : v_set1(0);
        o.scale[v] = v_set1(1);
        o.offset[v] = vi_set1(0);
        if (g->dtype == DTYPE_I8) {
            o.scale[v] = v_load(end - 2 * PANEL + c);
#if defined(ISA_AVX512) /* x has an offset that makes its bytes unsigned; elsewhere it has none */
            o.offset[v] = vi_load(end - PANEL + c);
#endif
        }
    }
    return o;
}

/* A rectangle of the tile: n_row <= DONE_ROWS rows from row on, DONE_VECS vectors of each from
 * column col on. */
struct rect {
    int row, col;
};

/* Outputs as packed words: see pack_tile. */
static ALWAYS_INLINE void pack_outputs(const struct gemm *g, const struct tile_ref *at,
                                       struct rect rect, const int n_row, const enum gemm_kind kind,
                                       const vf *z)
{
    uint32_t *const tile = g->next_words + (size_t)at->row * gemm_row_words(g->n_out);
    const size_t col = (size_t)at->col + (size_t)rect.col;
#if defined(HAS_DOT_PAIRS)
    if (is_pairs(kind)) { /* a row's part of a panel is a chunk */
        uint32_t *const to =
            tile + (col / PANEL * (size_t)at->n_row + (size_t)rect.row) * CHUNK + col % PANEL / 2;
        UNROLL
        for (int i = 0; i < n_row * DONE_VECS; i += 2) {
            v_store(to + i / DONE_VECS * CHUNK + i % DONE_VECS / 2 * LANES,
                    v_pairs(z[i], z[i + 1]));
        }
        return;
    }
#endif
    UNROLL
    for (int i = 0; i < n_row * DONE_VECS; i++) {
        const size_t c = col + (size_t)(i % DONE_VECS * LANES);
        const size_t row = (size_t)(rect.row + i / DONE_VECS);
        uint32_t *const to = tile + (c / CHUNK * (size_t)at->n_row + row) * CHUNK;
        v_store(to + c % CHUNK, kind == WIDE ? v_round_bf16(z[i]) : z[i]);
    }
}

/* Outputs are logits: see struct gemm. */
static ALWAYS_INLINE void add_logits(const struct gemm *g, const struct tile_ref *at,
                                     struct rect rect, const int n_row, const vf *z,
                                     const bool is_whole)
{
    vf of_panel[GELU_VECS];
    UNROLL
    for (int i = 0; i < GELU_VECS; i++) { /* zeros past n_row are not looked at */
        const int c = rect.col + i % DONE_VECS * LANES;
        of_panel[i] =
            is_whole ? z[i] : v_select((vi)(v_lane() < at->n_col - c), z[i], v_set1(-INFINITY));
    }
    SIMD(logit_add_vecs)
    (g->logits + at->row + rect.row, of_panel[0], of_panel[1], of_panel[2], of_panel[3], n_row,
     DONE_VECS, at->col + rect.col);
}

static ALWAYS_INLINE void store_outputs(const struct gemm *g, const struct tile_ref *at,
                                        struct rect rect, const int n_row, const vf *z,
                                        const bool is_whole)
{
    const struct logit_block *const logits = g->logits != NULL ? g->logits + at->row : NULL;
    float *y = at->y + rect.row * g->y_stride + rect.col;
    UNROLL
    for (int r = 0; r < n_row; r++, y += g->y_stride) {
        if (logits != NULL && !logits[rect.row + r].goal.is_kept) {
            continue;
        }
        UNROLL
        for (int v = 0; v < DONE_VECS; v++) {
            const int c = v * LANES;
            if (is_whole && g->is_streamed) {
                v_stream(y + c, z[r * DONE_VECS + v]);
            } else if (is_whole) {
                v_store(y + c, z[r * DONE_VECS + v]);
            } else if (rect.col + c < at->n_col) {
                v_store_n(y + c, z[r * DONE_VECS + v], lanes_left(at->n_col, rect.col + c));
            }
        }
    }
}

/* The epilogue of one rectangle: scale, bias, activation, then where the outputs go. */
static ALWAYS_INLINE void finish_rect(const struct gemm *g, const struct tile_ref *at,
                                      const struct outputs *o, const float *sum, struct rect rect,
                                      const int n_row, const enum gemm_kind kind,
                                      const bool is_whole)
{
    vf z[GELU_VECS];
    const int first = (int)((unsigned)rect.col / LANES);
    sum += rect.row * PANEL + rect.col;
    UNROLL
    for (int i = 0; i < GELU_VECS; i++) {
        const int r = i / DONE_VECS;
        const int v = i % DONE_VECS;
        if (r >= n_row) {
            z[i] = v_set1(0);
            continue;
        }
        z[i] = v_load(sum + r * PANEL + v * LANES);
        if (kind == BYTES || kind == AMX_BYTES) {
            const vf scale = v_set1(g->x_scale[at->row + rect.row + r]) * o->scale[first + v];
            z[i] = v_from_i32((vi)z[i] + o->offset[first + v]) * scale;
        }
        if (g->bias != NULL) {
            z[i] = z[i] + o->bias[first + v];
        }
    }
    if (g->act == ACT_GELU) {
        v_gelu(z);
    }
    if (g->act == ACT_RELU) {
        UNROLL
        for (int i = 0; i < n_row * DONE_VECS; i++) {
            z[i] = v_relu(z[i]);
        }
    }
    if (g->next_words != NULL) {
        pack_outputs(g, at, rect, n_row, kind, z);
        return;
    }
    if (g->logits != NULL) {
        add_logits(g, at, rect, n_row, z, is_whole);
    }
    store_outputs(g, at, rect, n_row, z, is_whole);
}

/* The epilogue of a tile's sums [n_row, PANEL] when K is done. */
static ALWAYS_INLINE void finish_panel(const struct gemm *g, const struct tile_ref *at,
                                       const float *sum, const bool is_whole)
{
    const struct outputs o = outputs_of(g, at);
    const enum gemm_kind kind = kind_of(g);
    for (int col = 0; col < PANEL; col += DONE_VECS * LANES) {
        int row = 0;
        for (; row + DONE_ROWS <= at->n_row; row += DONE_ROWS) {
            finish_rect(g, at, &o, sum, (struct rect){row, col}, DONE_ROWS, kind, is_whole);
        }
        if (row < at->n_row) { /* of two */
            finish_rect(g, at, &o, sum, (struct rect){row, col}, 1, kind, is_whole);
        }
    }
}

static inline void finish_tile(const struct gemm *g, const struct tile_ref *at, const float *sum)
{
    if (at->n_col == PANEL) {
        finish_panel(g, at, sum, true);
    } else {
        finish_panel(g, at, sum, false);
    }
}

#endif
