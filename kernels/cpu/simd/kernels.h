/* What an instruction set provides: one table of row and tile kernels per set.
 *
 * The files of kernels/cpu cut an op into items, give them to the pool and call these; the files of
 * kernels/cpu/simd implement them. Nothing here allocates, waits or knows of threads. All results
 * depend on a row's own data alone, never on how the caller cut the work. */
#ifndef KERNELS_CPU_SIMD_KERNELS_H
#define KERNELS_CPU_SIMD_KERNELS_H

#include "kernels/backend.h"

#include <float.h>
#include <math.h>
#include <string.h>

/* ---- matrix products ----------------------------------------------------------------------------
 *
 * Weights are packed in panels of PANEL outputs: word [k][o] of a panel is a 32-bit word that holds
 * the weight(s) of output o for input k (F32), for the inputs 2k and 2k+1 (BF16, low half first),
 * or for 4k to 4k+3 (INT8, low byte first). A panel is one contiguous stream that a tile reads
 * once, front to back. Behind an INT8 panel follow the scales of its outputs, F32, and for each
 * -128 times the sum of its weights, I32: instructions want the bytes of x without a sign, 128 too
 * large.
 *
 * Rows of x are packed by tiles of up to tile_rows rows: CHUNK words of each row of the tile, then
 * the next CHUNK words, so that one pointer with constant offsets reaches all rows. The words are
 * floats, or BF16 pairs or four bytes where an instruction multiplies those. Both are just what the
 * matrix unit loads: 16 words of 16 outputs, and 16 words of 16 rows. INT8 without such an
 * instruction: the pair of inputs 4k and 4k+2 as 16-bit numbers, then that of 4k+1 and 4k+3.
 *
 * Split: each number as the sum of two BF16 numbers, where n_in is a multiple of 2·CHUNK. Of
 * 2·CHUNK inputs CHUNK words of the higher halves come first, then as many of the lower ones.
 * Weights of BF16, which have no lower halves, are packed as above; both halves of x are multiplied
 * by them.
 *
 *   panel:  k=0: o0 o1 .. o31        tile:  row 0: words 0..15
 *           k=1: o0 o1 .. o31               row 1: words 0..15
 *           ..                              row 0: words 16..31 ..
 */
enum { PANEL = 32, CHUNK = 16, TILE_ROWS_MAX = 32 };

/* How BF16 weights are multiplied: widened to floats; by the vector instruction for pairs; or by
 * the matrix unit (AMX), which takes more rows at a time and multiplies INT8 weights too. */
enum gemm_bf16 { GEMM_WIDE, GEMM_PAIRS, GEMM_AMX };
enum { AMX_ROWS = 32 };

/* Rows of x that are packed at a time, by the matrix unit and by vectors: 512 rows of 4096 BF16
 * numbers, or 256 of floats, stay within a core's share of L3. */
enum { GEMM_ROWS = 512, GEMM_VECTOR_ROWS = 256 };

/* Panels of W that go through one range of a long K before the next range: 512 KiB of sums of 256
 * rows, which stay in L2. */
enum { GEMM_SUM_PANELS = 16 };

struct gemm {
    float *y;       /* [n_row, n_out], n_row <= GEMM_ROWS */
    const float *x; /* [n_row, n_in] */
    int64_t y_stride, x_stride;
    uint32_t *words;            /* packed x: [n_row, gemm_row_words(n_in)] */
    float *x_scale;             /* [n_row] of INT8 weights: written by gemm_pack */
    const uint32_t *w;          /* packed weights: [n_panel, gemm_panel_words] */
    const float *bias;          /* [n_out] or NULL */
    uint32_t *next_words;       /* NULL, or where outputs go instead: packed rows for the product
                                 * that follows, [n_row, gemm_row_words(n_out)]. Its weights have
                                 * the same type, not I8, and n_out is a multiple of PANEL */
    struct logit_block *logits; /* [n_row], or NULL. If given, outputs are logits: they are added to
                                 * these blocks, and only rows that are kept are stored in y */
    bool is_streamed; /* y is written with non-temporal stores: y and its rows are aligned to a
                       * line */
    int n_row, n_in, n_out;
    int n_tile;          /* the rows are divided among this many tiles: gemm_tile_row */
    enum dtype dtype;    /* of the weights: F32, BF16 or I8 */
    bool is_split;       /* F32 weights are packed as split words; with BF16 weights, x alone is
                          * split */
    enum gemm_bf16 bf16; /* of the machine */
    enum act act;
};

/* Sums of bytes are whole numbers and the same from either unit, so few rows go to the vectors,
 * which stream W faster. */
static inline bool gemm_is_amx(const struct gemm *g)
{
    enum { FEW_ROWS = 8 };
    return g->bf16 == GEMM_AMX &&
           (g->dtype == DTYPE_BF16 || g->is_split || (g->dtype == DTYPE_I8 && g->n_row > FEW_ROWS));
}

static inline size_t gemm_row_words(int n_in)
{
    return ((size_t)n_in + 2 * CHUNK - 1) / (2 * CHUNK) * (2 * CHUNK);
}

/* Words of k in a panel. */
static inline int gemm_k_words(int n_in, enum dtype dtype)
{
    const int per_word = dtype == DTYPE_I8 ? 4 : dtype == DTYPE_BF16 ? 2 : 1;
    return n_in / per_word + (n_in % per_word != 0);
}

static inline size_t gemm_panel_words(int n_in, enum dtype dtype)
{
    return ((size_t)gemm_k_words(n_in, dtype) + (dtype == DTYPE_I8 ? 2 : 0)) * PANEL;
}

static inline int gemm_n_panel(int n_out)
{
    return n_out / PANEL + (n_out % PANEL != 0);
}

/* First row of a tile; tile n_tile starts where the rows end. Tiles have equal sizes. The matrix
 * unit, which must be set up anew for every size, gets full ones but for the last. */
static inline int gemm_tile_row(const struct gemm *g, int tile)
{
    if (gemm_is_amx(g)) {
        return tile * AMX_ROWS < g->n_row ? tile * AMX_ROWS : g->n_row;
    }
    return (int)((int64_t)g->n_row * tile / g->n_tile);
}

/* ---- rows ------------------------------------------------------------------------------------ */

/* n_source table rows added up to one row of y: embeddings. */
struct row_source {
    const void *row; /* [d], any floating-point type or I8, any alignment */
    enum dtype dtype;
    float scale; /* of the row: 1 but for I8 */
};

/* Where a row is, and what its numbers are multiplied by. */
struct value_row {
    const char *data;
    float scale;
};

/* Rows of values. */
struct value_table {
    /* [rows] the address and scale of each, if the rows are not in one array; then data, the scales
     * and row_bytes are unused. Else NULL. */
    const struct value_row *row;
    /* [rows] the type of each of these, if they are not all of dtype (Q4 never mixes with others).
     * Else NULL. */
    const enum dtype *row_dtype;
    const void *data;
    const float *scale;        /* [rows] of I8, else NULL */
    const uint16_t *scale_f16; /* [rows] of Q4, else NULL */
    int64_t row_bytes;
    int64_t half; /* Q4: columns 0 .. half-1 are in the low halves of the bytes, the others in the
                   * high halves */
    enum dtype dtype;
};

/* ---- attention ----------------------------------------------------------------------------------
 *
 * Inside a page of the cache each head has its own piece of 32-bit words. In a page of keys it is
 * [d_head][KV_PAGE]: the scores of 16 positions are one chain of multiply-adds over columns,
 * without any sum across lanes. In a page of values it is [KV_PAGE][d_head]. Words are floats, or
 * pairs of BF16, low half first: of two columns in a page of keys, which is [d_head/2][KV_PAGE], of
 * two positions in a page of values, [KV_PAGE/2][d_head]. Strides from page to page are in words.
 *
 * Appending one key to the transposed layout [d_head/2][KV_PAGE] touches the whole page. So where
 * amx_attend reads them, the keys of a sequence's last, partial page stay position-major,
 * [KV_PAGE][d_head/2], and are transposed when the page is full.
 */
struct kv_rows {
    float *k_page, *v_page;
    const float *k, *v; /* [n_row, n_head·d_head] */
    int64_t k_stride, v_stride;
    int n_row, offset; /* positions offset .. offset+n_row-1 of the page */
    int n_head, d_head;
    bool is_pairs;
    float *closing; /* scratch: a piece of keys; NULL = [d_head/2][KV_PAGE] from the first row on */
};

struct attend {
    float *y;             /* first row, first column of the first head */
    const float *q;       /* same */
    const float *k_pages; /* page 0, first word of the first head's piece */
    const float *v_pages;
    const int32_t *page; /* of the sequence */
    float *query;        /* scratch: [attend_columns(d_head), tile_rows], of one row [.., n_head] */
    float *score;        /* scratch: [pages, tile_rows, KV_PAGE], of one row [n_head, pages, ..] */
    float *closed;       /* scratch of amx_attend: a piece of keys */
    int64_t y_stride, q_stride, k_stride, v_stride;
    int n_row;          /* consecutive positions */
    int pos;            /* of the first row */
    int n_head, d_head; /* heads side by side: up to ATTEND_HEADS */
    bool is_pairs;      /* the pages hold */
    bool by_pairs;      /* the instruction for pairs multiplies them by queries and shares, which
                         * are rounded to BF16 */
    float scale;
};

enum { ATTEND_HEADS = 16 };

/* Words of a head's piece of a page. */
static inline int64_t attend_piece_words(const struct attend *a)
{
    return (int64_t)KV_PAGE * a->d_head / (a->is_pairs ? 2 : 1);
}

/* One of the heads. */
static inline struct attend attend_head(const struct attend *a, int head)
{
    struct attend one = *a;
    one.y += (int64_t)head * a->d_head;
    one.q += (int64_t)head * a->d_head;
    one.k_pages += head * attend_piece_words(a);
    one.v_pages += head * attend_piece_words(a);
    one.n_head = 1;
    return one;
}

/* The matrix unit takes heads of this many columns and more, 16 rows of one page at a time, and two
 * such groups: words of a group's packed query, of its scores with n_page pages, and of a head's
 * piece of a page of keys. */
enum { ATTEND_AMX_COLUMNS = 32, ATTEND_AMX_ROWS = 16, ATTEND_AMX_GROUPS = 2 };

static inline size_t attend_amx_query_words(int d_head)
{
    return ((size_t)d_head + 2 * CHUNK - 1) / (2 * CHUNK) * CHUNK * ATTEND_AMX_ROWS;
}

static inline size_t attend_amx_score_words(int n_page)
{
    return ((size_t)n_page + 1) * ATTEND_AMX_ROWS * KV_PAGE;
}

static inline size_t attend_amx_key_words(int d_head)
{
    return (size_t)d_head / 2 * KV_PAGE;
}

/* Columns of a packed query: a multiple of a chunk. */
static inline size_t attend_columns(int d_head)
{
    return ((size_t)d_head + CHUNK - 1) / CHUNK * CHUNK;
}

/* Padding on both sides of a window: a page, and the rows of a tile, each of which begins one later
 * than the row before. */
enum { SPAN_PAD = KV_PAGE + TILE_ROWS_MAX };

/* Floats of a window's scores, or of its mask: whole vectors and the padding. */
static inline size_t span_row_floats(int window)
{
    return attend_columns(window) + 2 * SPAN_PAD;
}

/* Consecutive rows and one head of span_attention; see struct span_shape. */
struct attend_span {
    float *y;             /* first row, first column of the head */
    const float *q;       /* same */
    const float *k_pages; /* as of struct attend */
    const float *v_pages;
    const int32_t *page;        /* [n_page] the ring */
    float *scratch;             /* [span_scratch_floats] */
    const float *position;      /* [d_head, window] */
    const float *mask;          /* [window] or NULL */
    const float *key;           /* [d_head, n_persistent] */
    const float *value;         /* [n_persistent, d_head] */
    int64_t y_stride, q_stride; /* from row to row */
    int64_t k_stride, v_stride; /* from page to page, in words */
    int64_t position_stride;    /* from row to row */
    int64_t key_stride, value_stride;
    int n_row, pos; /* of the first row */
    int n_page, d_head, window, n_persistent;
    bool is_pairs; /* the pages hold */
    float scale;
};

/* Scratch: a mask; and for each row of a tile its scores by distance, its query, and its scores by
 * page, of the window's pages (also those that the row sees only in part) and of n_key - window
 * persistent keys. */
static inline size_t span_scratch_floats(int n_key, int d_head, int tile_rows)
{
    const size_t n_page = ((size_t)n_key + (size_t)tile_rows) / KV_PAGE + 4;
    return span_row_floats(n_key) +
           (size_t)tile_rows * (span_row_floats(n_key) + attend_columns(d_head) + n_page * KV_PAGE);
}

/* ---- selection --------------------------------------------------------------------------------
 *
 * The k best of n scores: larger score, then smaller id; NaN below every number. */
enum {
    SELECT_SLACK = 24, /* candidates beyond k: more of them cost ranking, fewer cost steps of the
                        * bisection */
    SELECT_PAD = 16,   /* room for a vector that starts at the last candidate */
};

/* Order-preserving map of numbers to integers and back. */
static inline int32_t key_of(float x)
{
    int32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits ^ ((bits >> 31) & 0x7fffffff);
}

static inline float number_of_key(int32_t key)
{
    const int32_t bits = key ^ ((key >> 31) & 0x7fffffff);
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

struct select_scratch {
    float *score; /* [k + SELECT_SLACK + SELECT_PAD] */
    int32_t *id;  /* [k + SELECT_SLACK + SELECT_PAD] */
};

/* Logits, and the weight of each in a search for a place among them. */
struct logit_list {
    const float *z;  /* [n] none is NaN */
    float *share;    /* [n] buffer; holds their weights if is_weighed */
    bool is_weighed; /* else each weighs 1 */
    int n;
    double mass; /* Σ weights */
};

/* Where a list may be put. */
struct logit_room {
    float *z, *share; /* [n + LOGIT_PAD] */
};

/* What is requested of a row of logits. */
struct logit_goal {
    float target_z; /* tokens that rank before the target are counted; +infinity = there is no
                     * target */
    int32_t target;
    bool is_summed;  /* sums are requested, or help with the draw */
    bool is_entropy; /* moments are wanted */
    bool is_kept;    /* the logits are needed again after their sums */
};

/* A block of a row's logits, which are added as they are computed or read, a vector at a time; lane
 * l has the logits whose number is l modulo the number of lanes. Sums are relative to a base, which
 * is raised when a logit exceeds it by far: so nothing overflows, and sums rarely have to be
 * rescaled. */
enum { LOGIT_LANES = 16 }; /* at most */
struct logit_more {
    _Alignas(64) float max[LOGIT_LANES];
    float moment[LOGIT_LANES]; /* Σ e^(z - base) · (z - base) */
};
struct logit_block {
    _Alignas(64) float base;
    int32_t n_before; /* tokens before the target: with a larger logit, or an equal one and a
                       * smaller id */
    struct logit_goal goal;
    struct logit_more *more;             /* NULL unless the goal has is_entropy or is_kept */
    _Alignas(64) float sum[LOGIT_LANES]; /* Σ e^(z - base); NaN if a logit is NaN or +infinity */
};

/* An empty block. more: memory for block->more. */
static inline void logit_begin(struct logit_block *block, struct logit_more *more,
                               const struct logit_goal *goal)
{
    *block = (struct logit_block){.base = -FLT_MAX, .goal = *goal};
    if (goal->is_entropy || goal->is_kept) {
        block->more = more;
        for (int l = 0; l < LOGIT_LANES; l++) {
            more->max[l] = -INFINITY;
            more->moment[l] = 0;
        }
    }
}

/* What a block comes to. */
struct logit_part {
    double sum, moment; /* Σ e^(z - base), Σ e^(z - base) · (z - base) */
    float base;         /* -infinity where the sum is 0 */
    float max;          /* if the goal has is_kept */
    int32_t n_before;
    bool is_good; /* no logit is NaN or +infinity */
};

enum { LOGIT_PAD = 16 }; /* floats behind the last one, for a vector that starts there */

/* ---- the kernels
 * ------------------------------------------------------------------------------ */

/* Rows first .. first+n-1 of a tile. */
typedef void simd_gemm_pack_fn(const struct gemm *g, int tile, int first, int n);
/* Panels first .. first+n-1 of all tiles tile .. tile+n_tile-1. sums [GEMM_SUM_PANELS,
 * GEMM_ROWS, PANEL]: partial sums between ranges of a long K. */
typedef void simd_gemm_panels_fn(const struct gemm *g, int first, int n, int tile, int n_tile,
                                 float *sums);
/* score[n_row, stride] = x·Wᵀ of one packed F32 matrix; up to tile_rows rows of x. stride is a
 * multiple of PANEL; columns from n_out on are 0. words: scratch of the packed rows. */
typedef void simd_gemm_scores_fn(float *score, int64_t stride, const float *x, int64_t x_stride,
                                 int n_row, const uint32_t *w, int n_in, int n_out,
                                 uint32_t *words);
/* The same by the matrix unit of a matrix packed as split words (dtype F32) or of BF16, and of
 * split rows, up to AMX_ROWS of them. */
typedef void simd_amx_scores_fn(float *score, int64_t stride, const float *x, int64_t x_stride,
                                int n_row, const uint32_t *w, enum dtype dtype, int n_in, int n_out,
                                uint32_t *words);

typedef void simd_row_sum_fn(float *y, const struct row_source *source, int n_source, int64_t d);
/* y = layer norm of x (+ r where r is not NULL) */
typedef void simd_row_norm_fn(float *y, const float *x, const float *r, const float *gamma,
                              const float *beta, int64_t d, float eps);
/* As rms_norm. sum and r NULL: of x itself; y may then be x. */
typedef void simd_row_rms_norm_fn(float *y, float *sum, const float *x, const float *r,
                                  const float *gamma, int64_t d, float eps);
typedef void simd_row_rope_fn(float *x, const float *table, int n_head,
                              int64_t d_head); /* as rope */
typedef void simd_row_silu_fn(float *y, const float *x, const float *g,
                              int64_t d); /* y = x·silu(g) */
/* dot[j] = x · row slots[j] */
typedef void simd_row_dots_fn(float *dot, const int32_t *slots, int n_slot, const float *x,
                              const struct value_table *table, int64_t d);
typedef void simd_kv_rows_fn(const struct kv_rows *a);
typedef void simd_attend_fn(const struct attend *a);
typedef void simd_amx_attend_fn(const struct attend *a); /* pairs; ATTEND_AMX_COLUMNS or more */
typedef void simd_attend_span_fn(const struct attend_span *a);

/* The positions and values of the k <= n best scores, best first. */
typedef void simd_select_fn(int32_t *best, float *best_score, const float *score, int n, int k,
                            const struct select_scratch *scratch);
/* Slots and weights of one row and head from its scores: score[0 .. n_key-1] and, for product
 * keys, score[half_stride ..]. */
typedef void simd_pkm_select_fn(int32_t *slots, float *weights, const float *score,
                                int64_t half_stride, const struct pkm_shape *shape);
/* y[n] += Σ_j weights[j] · row slots[j], columns first .. first+n-1 of the table, n_slot > 0.
 * next_slots: as many slots that are read next, which are prefetched; NULL = none. */
typedef void simd_pkm_read_fn(float *y, const int32_t *slots, const float *weights, int n_slot,
                              const struct value_table *table, int64_t first, int64_t n,
                              const int32_t *next_slots);

/* Logits. max: the largest number, -infinity if there is none. False if one is NaN or
 * +infinity. */
typedef bool simd_logit_max_fn(float *max, const float *z, int n);
/* The position of the first with this value after skipping n_skip of them, or -1. */
typedef int simd_logit_find_fn(const float *z, int n, float value, int n_skip);
/* Σ e^((z - max) · inverse_temperature), max finite and >= z. next: as many numbers that are
 * probably read next, which are prefetched; NULL = none. */
typedef double simd_logit_sum_fn(const float *z, const float *next, int n, float max,
                                 float inverse_temperature);
/* The same; share[i] = the terms. */
typedef double simd_logit_shares_fn(float *share, const float *z, const float *next, int n,
                                    float max, float inverse_temperature);
/* to = the logits of from with low <= z <= high, stored in room, where from may be stored itself.
 * Returns the mass of those with z > high. */
typedef double simd_logit_pick_fn(struct logit_list *to, const struct logit_room *room,
                                  const struct logit_list *from, float low, float high);
/* How many are at least that large. */
typedef int simd_logit_count_fn(const float *z, int n, float least);
/* Adds logits first .. first+n-1 of a row to a block. A row's logits come in order, in whole panels
 * but for the last call. */
typedef void simd_logit_add_fn(struct logit_block *block, const float *z, int n, int first);
typedef void simd_logit_end_fn(struct logit_part *part, const struct logit_block *block);

typedef double simd_sum_bytes_fn(const void *data, size_t bytes); /* reads them all */
typedef void simd_peak_f32_fn(int64_t n, double *flops);          /* n rounds of multiply-adds */
typedef void simd_peak_bf16_fn(int64_t n, double *flops); /* NULL without such an instruction */
typedef void simd_peak_int8_fn(int64_t n, double *flops); /* likewise */
typedef void simd_peak_amx_fn(int64_t n, double *flops);  /* of BF16; only where AMX is enabled */
typedef void simd_peak_amx_int8_fn(int64_t n, double *flops); /* likewise */

/* All kernels, as lines X(kernel); the second list has those of sets that have the instructions. */
#define SIMD_LIST(X)                                                                               \
    X(gemm_pack)                                                                                   \
    X(gemm_panels)                                                                                 \
    X(gemm_scores)                                                                                 \
    X(amx_scores)                                                                                  \
    X(row_sum)                                                                                     \
    X(row_norm)                                                                                    \
    X(row_rms_norm)                                                                                \
    X(row_rope)                                                                                    \
    X(row_silu)                                                                                    \
    X(row_dots)                                                                                    \
    X(kv_rows)                                                                                     \
    X(attend)                                                                                      \
    X(amx_attend)                                                                                  \
    X(attend_span)                                                                                 \
    X(select)                                                                                      \
    X(pkm_select)                                                                                  \
    X(pkm_read)                                                                                    \
    X(logit_max)                                                                                   \
    X(logit_find)                                                                                  \
    X(logit_sum)                                                                                   \
    X(logit_shares)                                                                                \
    X(logit_pick)                                                                                  \
    X(logit_count)                                                                                 \
    X(logit_add)                                                                                   \
    X(logit_end)                                                                                   \
    X(sum_bytes)                                                                                   \
    X(peak_f32)
/* Of sets that have the instructions. */
#define SIMD_LIST_PAIRS(X) X(peak_bf16)
#define SIMD_LIST_BYTES(X) X(peak_int8)
#define SIMD_LIST_AMX(X) X(peak_amx) X(peak_amx_int8)

#define SIMD_SLOT(kernel) simd_##kernel##_fn *kernel;
struct simd_kernels {
    int tile_rows; /* rows of a full register tile, <= TILE_ROWS_MAX */
    SIMD_LIST(SIMD_SLOT)
    SIMD_LIST_PAIRS(SIMD_SLOT) /* NULL without the instructions, as those below */
    SIMD_LIST_BYTES(SIMD_SLOT)
    SIMD_LIST_AMX(SIMD_SLOT)
};

/* Of the machine's family only; plain is everywhere. */
extern const struct simd_kernels simd_kernels_avx512;
extern const struct simd_kernels simd_kernels_avx2;
extern const struct simd_kernels simd_kernels_neon_bf16;
extern const struct simd_kernels simd_kernels_neon_dot;
extern const struct simd_kernels simd_kernels_neon;
extern const struct simd_kernels simd_kernels_plain;

#endif
