/* Products of BF16 pairs, or of four bytes, by the matrix unit of Intel's processors (AMX-BF16,
 * AMX-INT8).
 *
 * An instruction multiplies 16 words of 16 rows by 16 words of 16 outputs: 16 times the work of one
 * for vectors. Two blocks of rows by two of outputs fill the unit's eight registers: four loads
 * feed four products, and four chains hide their latency. Each output is one chain in ascending k,
 * in steps of 16 words; within a step the unit adds up the even and the odd products of the row and
 * the output, whatever other rows there are; of bytes it adds whole numbers. Of numbers as sums of
 * two BF16, (x + x')(w + w') without x'w', which is 2^-18 of xw like what the halves leave out, a
 * step is three products, and less than half of the time of F32 by vectors; of weights that are
 * BF16 two products. Few rows: bound by the bytes of W, as in gemm.c. Many: by the unit. Share
 * reached: see SPEED.md. */
#include "kernels/cpu/simd/amx.h"
#include "kernels/cpu/simd/gemm_tile.h"

#if defined(ISA_AVX512)

/* Sums of BLOCK rows or two times as many, in registers: where they go to and, unless they begin at
 * 0, come from. */
struct sums {
    float *at;         /* [n_row, PANEL] */
    int64_t row_bytes; /* from row to row */
    bool is_begun;
};

/* Sums of a tile [n_row, PANEL] that have yet to become outputs: that is done beside the next
 * tile's products, which leave the vectors idle. */
struct late {
    const struct gemm *g;
    struct place at;
    struct outputs outputs;
    const float *sum;
    int row, n_row; /* done, and in all */
};

/* Rows up to end, but for an odd one. */
static ALWAYS_INLINE void finish_late(struct late *late, const enum kind kind, int end)
{
    for (; late->row + DONE_ROWS <= end; late->row += DONE_ROWS) {
        finish_part(late->g, &late->at, &late->outputs, late->sum, (struct part){late->row, 0},
                    DONE_ROWS, kind, true);
    }
}

static void finish_rest(struct late *late, enum kind kind)
{
    finish_late(late, kind, late->n_row);
    if (late->row < late->n_row) {
        finish_part(late->g, &late->at, &late->outputs, late->sum, (struct part){late->row, 0}, 1,
                    kind, true);
        late->row++;
    }
}

/* What was late before has been finished. */
static void finish_later(struct late *late, const struct gemm *g, const struct place *at,
                         const float *sum)
{
    *late = (struct late){g, *at, outputs_of(g, at), sum, 0, at->n_row};
}

/* Tiles of x times panels of W. */
struct run {
    struct product product;
    struct amx amx;
    struct late late;
    int slot; /* of sum: a tile's, or where tiles go through at once one of two in turn */
    _Alignas(64) float sum[GEMM_ROWS / AMX_ROWS][AMX_ROWS * PANEL];
};

static void amx_rows(struct amx *amx, int n_row, int n_word)
{
    const int n_first = n_row < BLOCK ? n_row : BLOCK;
    amx_set_up(amx, n_first, n_row - n_first, n_word);
}

/* One tile after another meets the same words: those are in L2, where the tiles bring the next ones
 * by shares. A tile alone asks for the words that come from memory. */
static ALWAYS_INLINE void fetch(const uint32_t *w, struct ahead *ahead)
{
    if (ahead->n_line == 0) {
        prefetch_words(w, BLOCK * PANEL, true);
    }
    for (int i = 0; i < ahead->n_line; i++) {
        __builtin_prefetch(ahead->w, 0, 2);
        ahead->w += LINE_WORDS;
    }
}

/* Sums of BLOCK rows: registers a and b, which must be numbers. */
#define LOAD_SUMS(a, b, from, stride, is_begun)                                                    \
    do {                                                                                           \
        if (is_begun) {                                                                            \
            _tile_loadd(a, from, stride);                                                          \
            _tile_loadd(b, (from) + BLOCK, stride);                                                \
        } else {                                                                                   \
            _tile_zero(a);                                                                         \
            _tile_zero(b);                                                                         \
        }                                                                                          \
    } while (0)

#define STORE_SUMS(a, b, to, stride)                                                               \
    do {                                                                                           \
        _tile_stored(a, to, stride);                                                               \
        _tile_stored(b, (to) + BLOCK, stride);                                                     \
    } while (0)

enum { ROW_BYTES = CHUNK * sizeof(uint32_t), WORD_BYTES = PANEL * sizeof(uint32_t) };

#define PRODUCT(sum, x, w)                                                                         \
    do {                                                                                           \
        if (is_int8) {                                                                             \
            _tile_dpbusd(sum, x, w);                                                               \
        } else {                                                                                   \
            _tile_dpbf16ps(sum, x, w);                                                             \
        }                                                                                          \
    } while (0)

/* The products of 16 words, or once fewer. two: there are more than BLOCK rows. */
static ALWAYS_INLINE void add_step(const bool two, const bool is_int8, const uint32_t *x,
                                   const uint32_t *w)
{
    _tile_stream_loadd(4, x, ROW_BYTES);
    _tile_loadd(6, w, WORD_BYTES);
    _tile_loadd(7, w + BLOCK, WORD_BYTES);
    PRODUCT(0, 4, 6);
    PRODUCT(1, 4, 7);
    if (two) {
        _tile_stream_loadd(5, x + BLOCK * CHUNK, ROW_BYTES);
        PRODUCT(2, 5, 6);
        PRODUCT(3, 5, 7);
    }
}

/* n_step steps, and beside them what is late. */
static ALWAYS_INLINE void multiply(const bool two, const enum kind kind, struct late *late,
                                   const uint32_t *x, size_t x_step, const uint32_t *w, int n_step,
                                   const struct sums *sums, struct ahead ahead)
{
    enum { W_STEP = BLOCK * PANEL };
    const bool is_int8 = kind == AMX_BYTES;
    const int step = kind == AMX_SPLIT ? 2 : 1;
    const int n_late = DONE_ROWS * (n_step / step);
    const int late_rows = DONE_ROWS * ((late->n_row - late->row + n_late - 1) / n_late);
    const size_t below = BLOCK * (size_t)sums->row_bytes / sizeof(float);
    LOAD_SUMS(0, 1, sums->at, sums->row_bytes, sums->is_begun);
    if (two) {
        LOAD_SUMS(2, 3, sums->at + below, sums->row_bytes, sums->is_begun);
    }
    for (int i = 0; i < n_step; i += step) {
        fetch(w, &ahead);
        if (late->row < late->n_row) { /* first, while the last step's products go on */
            const int end = late->row + late_rows;
            finish_late(late, kind, end < late->n_row ? end : late->n_row);
        }
        add_step(two, is_int8, x, w);
        if (kind == AMX_SPLIT || kind == AMX_SPLIT_X) {
            add_step(two, is_int8, x + x_step, w);
        }
        if (kind == AMX_SPLIT) {
            fetch(w + W_STEP, &ahead);
            add_step(two, is_int8, x, w + W_STEP);
        }
        x += (size_t)(kind == AMX_SPLIT_X ? 2 : step) * x_step;
        w += step * W_STEP;
    }
    STORE_SUMS(0, 1, sums->at, sums->row_bytes);
    if (two) {
        STORE_SUMS(2, 3, sums->at + below, sums->row_bytes);
    }
}

typedef void multiply_fn(struct late *late, const uint32_t *x, size_t x_step, const uint32_t *w,
                         int n_step, const struct sums *sums, struct ahead ahead);

#define MULTIPLY(name, two, kind)                                                                  \
    static void name(struct late *late, const uint32_t *x, size_t x_step, const uint32_t *w,       \
                     int n_step, const struct sums *sums, struct ahead ahead)                      \
    {                                                                                              \
        multiply(two, kind, late, x, x_step, w, n_step, sums, ahead);                              \
    }

MULTIPLY(few_pairs, false, AMX)
MULTIPLY(many_pairs, true, AMX)
MULTIPLY(few_bytes, false, AMX_BYTES)
MULTIPLY(many_bytes, true, AMX_BYTES)
MULTIPLY(few_split, false, AMX_SPLIT)
MULTIPLY(many_split, true, AMX_SPLIT)
MULTIPLY(few_split_x, false, AMX_SPLIT_X)
MULTIPLY(many_split_x, true, AMX_SPLIT_X)

static void start(struct run *run, const struct product *product)
{
    run->product = *product;
    run->amx = (struct amx){0};
    run->late.n_row = run->late.row = 0;
    run->slot = 0;
}

static void multiply_tile(struct run *run, int n_row, const uint32_t *x, const uint32_t *w,
                          int n_word, struct sums sums, struct ahead ahead)
{
    static multiply_fn *const multiply_fns[][2] = {[AMX] = {few_pairs, many_pairs},
                                                   [AMX_BYTES] = {few_bytes, many_bytes},
                                                   [AMX_SPLIT] = {few_split, many_split},
                                                   [AMX_SPLIT_X] = {few_split_x, many_split_x}};
    multiply_fn *const run_tile = multiply_fns[run->product.kind][n_row > BLOCK];
    const size_t x_step = (size_t)n_row * CHUNK;
    const int n_step = n_word / BLOCK;
    WRITTEN(sums.at);
    if (n_step > 0) {
        amx_rows(&run->amx, n_row, BLOCK);
        run_tile(&run->late, x, x_step, w, n_step, &sums, ahead);
        sums.is_begun = true;
    }
    if (n_word % BLOCK > 0) { /* what lies behind the last word is not read */
        amx_rows(&run->amx, n_row, n_word % BLOCK);
        run_tile(&run->late, x + (size_t)n_step * x_step, x_step,
                 w + (size_t)n_step * BLOCK * PANEL, 1, &sums, (struct ahead){w, 1});
    }
    /* an odd row is left: the next piece may need the place of its sums */
    finish_rest(&run->late, run->product.kind);
}

/* Words of K of a tile, whose sums [n_row, PANEL] go on. */
static void multiply_piece(struct run *run, const struct span *piece, const struct place *at,
                           struct ahead ahead, float *sum)
{
    enum { SUM_BYTES = PANEL * sizeof *sum };
    const struct sums sums = {sum, SUM_BYTES, piece->first > 0};
    multiply_tile(run, at->n_row, at->x, at->w, piece->n_word, sums, ahead);
    if (piece->is_last && at->n_col == PANEL) {
        finish_later(&run->late, run->product.g, at, sum);
    } else if (piece->is_last) {
        finish_tile(run->product.g, at, sum);
    }
}

/* Words of a span that the tiles meet before the next ones: 32 KiB of W stay in L1 while the rows
 * of x stream by, loaded so that they do not displace it. */
static int piece_words(const struct span *span, int n_tile)
{
    enum { PIECE = 16 * CHUNK, TILES = 4 };
    return n_tile < TILES || span->n_word <= PIECE ? span->n_word : PIECE;
}

static void multiply_panel(void *ctx, const struct span *span, int panel, const uint32_t *next,
                           float *waiting)
{
    struct run *const run = ctx;
    const struct product *const p = &run->product;
    const int step = piece_words(span, p->n_tile);
    for (int k = 0; k < span->n_word; k += step) {
        const int left = span->n_word - k;
        const bool is_last = left <= step;
        const struct span piece = {span->first + k, is_last ? left : step,
                                   span->is_last && is_last};
        for (int t = 0; t < p->n_tile; t++) {
            const struct place at = place_of(p->g, p->kind, &piece, panel, p->tile + t);
            const uint32_t *const after = is_last ? next : at.w + (size_t)step * PANEL;
            run->slot = step < span->n_word ? t : !run->slot;
            multiply_piece(run, &piece, &at, ahead_of(after, &piece, p->kind, t, p->n_tile),
                           waiting != NULL ? waiting + at.row * PANEL : run->sum[run->slot]);
        }
    }
}

void SIMD(amx_panels)(const struct product *product, int first, int n, float *sums)
{
    struct run run;
    start(&run, product);
    for_panels(&run.product, first, n, sums, multiply_panel, &run);
    finish_rest(&run.late, product->kind);
    _tile_release();
}

void SIMD(amx_scores)(float *score, int64_t stride, const float *x, int64_t x_stride, int n_row,
                      const uint32_t *w, enum dtype dtype, int n_in, int n_out, uint32_t *words)
{
    struct run run;
    const enum kind kind = dtype == DTYPE_F32 ? AMX_SPLIT : AMX_SPLIT_X;
    start(&run, &(struct product){.kind = kind});
    SIMD(pack_tile)(words, x, x_stride, n_row, n_in, kind);
    const size_t panel_words = gemm_panel_words(n_in, dtype);
    const int64_t stride_bytes = stride * (int64_t)sizeof *score;
    for (int panel = 0; panel < gemm_n_panel(n_out); panel++) {
        const struct sums sums = {score + panel * PANEL, stride_bytes, false};
        multiply_tile(&run, n_row, words, w + (size_t)panel * panel_words,
                      gemm_k_words(n_in, dtype), sums, (struct ahead){w, 0});
    }
    _tile_release();
}

static ALWAYS_INLINE void peak(const bool is_int8, int64_t n, double *flops)
{
    struct amx amx = {0};
    amx_rows(&amx, 2 * BLOCK, BLOCK);
    for (int64_t i = 0; i < n; i++) {
        PRODUCT(0, 4, 6);
        PRODUCT(1, 4, 7);
        PRODUCT(2, 5, 6);
        PRODUCT(3, 5, 7);
    }
    _tile_release();
    *flops = 4.0 * 2 * (is_int8 ? 4 : 2) * BLOCK * BLOCK * BLOCK * (double)n;
}

void SIMD(peak_amx)(int64_t n, double *flops)
{
    peak(false, n, flops);
}

void SIMD(peak_amx_int8)(int64_t n, double *flops)
{
    peak(true, n, flops);
}

#else

void SIMD(amx_panels)(const struct product *product, int first, int n, float *sums)
{
    (void)first;
    (void)n;
    (void)sums;
    CHECK(product == NULL); /* machine.c asks for it on machines that have it */
}

void SIMD(amx_scores)(float *score, int64_t stride, const float *x, int64_t x_stride, int n_row,
                      const uint32_t *w, enum dtype dtype, int n_in, int n_out, uint32_t *words)
{
    (void)dtype;
    (void)stride;
    (void)x;
    (void)x_stride;
    (void)n_row;
    (void)w;
    (void)n_in;
    (void)n_out;
    (void)words;
    CHECK(score == NULL);
}

#endif
