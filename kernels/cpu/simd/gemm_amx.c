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

/* The accumulators of one or two blocks of rows: where they are stored, and loaded from unless they
 * begin at 0. */
struct accum {
    float *at;         /* [n_row, PANEL] */
    int64_t row_bytes; /* from row to row */
    bool accumulates;
};

/* Deferred epilogue of a tile's sums [n_row, PANEL]: while AMX multiplies the next tile, the vector
 * units finish this one. */
struct epilogue {
    const struct gemm *g;
    struct tile_ref at;
    struct outputs outputs;
    const float *sum;
    int row, n_row; /* done, and in all */
};

/* Rows up to end, without the last one if their number is odd. */
static ALWAYS_INLINE void epilogue_rows_to(struct epilogue *epilogue, const enum gemm_kind kind,
                                           int end)
{
    for (; epilogue->row + DONE_ROWS <= end; epilogue->row += DONE_ROWS) {
        finish_rect(epilogue->g, &epilogue->at, &epilogue->outputs, epilogue->sum,
                    (struct rect){epilogue->row, 0}, DONE_ROWS, kind, true);
    }
}

static void epilogue_finish(struct epilogue *epilogue, enum gemm_kind kind)
{
    epilogue_rows_to(epilogue, kind, epilogue->n_row);
    if (epilogue->row < epilogue->n_row) {
        finish_rect(epilogue->g, &epilogue->at, &epilogue->outputs, epilogue->sum,
                    (struct rect){epilogue->row, 0}, 1, kind, true);
        epilogue->row++;
    }
}

/* Defers the epilogue of this tile; the one before has been finished. */
static void epilogue_defer(struct epilogue *epilogue, const struct gemm *g,
                           const struct tile_ref *at, const float *sum)
{
    *epilogue = (struct epilogue){g, *at, outputs_of(g, at), sum, 0, at->n_row};
}

/* Tiles of x times panels of W. */
struct amx_run {
    struct product product;
    struct amx amx;
    struct epilogue epilogue;
    int current; /* of sum: the tile's number; or, where a tile takes all of K at once, 0 and 1 in
                  * turn */
    _Alignas(64) float sum[GEMM_ROWS / AMX_ROWS][AMX_ROWS * PANEL];
};

static void amx_rows(struct amx *amx, int n_row, int n_word)
{
    const int n_first = n_row < BLOCK ? n_row : BLOCK;
    amx_set_up(amx, n_first, n_row - n_first, n_word);
}

/* Several tiles read the same words of W from L2 and prefetch the next panel, a part each. A single
 * tile prefetches the words that it reads from memory. */
static ALWAYS_INLINE void fetch(const uint32_t *w, struct prefetch *prefetch)
{
    if (prefetch->n_line == 0) {
        prefetch_words(w, BLOCK * PANEL, true);
    }
    for (int i = 0; i < prefetch->n_line; i++) {
        __builtin_prefetch(prefetch->w, 0, 2);
        prefetch->w += LINE_WORDS;
    }
}

/* Sums of BLOCK rows. a and b are tile registers and must be literal numbers. */
#define LOAD_SUMS(a, b, from, stride, accumulates)                                                 \
    do {                                                                                           \
        if (accumulates) {                                                                         \
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

/* n_step steps, and meanwhile the deferred epilogue. */
static ALWAYS_INLINE void multiply(const bool two, const enum gemm_kind kind,
                                   struct epilogue *epilogue, const uint32_t *x, size_t x_step,
                                   const uint32_t *w, int n_step, const struct accum *sums,
                                   struct prefetch prefetch)
{
    enum { W_STEP = BLOCK * PANEL };
    const bool is_int8 = kind == AMX_BYTES;
    const int step = kind == AMX_SPLIT ? 2 : 1;
    const int n_epilogue = DONE_ROWS * (n_step / step);
    const int epilogue_rows =
        DONE_ROWS * ((epilogue->n_row - epilogue->row + n_epilogue - 1) / n_epilogue);
    const size_t below = BLOCK * (size_t)sums->row_bytes / sizeof(float);
    LOAD_SUMS(0, 1, sums->at, sums->row_bytes, sums->accumulates);
    if (two) {
        LOAD_SUMS(2, 3, sums->at + below, sums->row_bytes, sums->accumulates);
    }
    for (int i = 0; i < n_step; i += step) {
        fetch(w, &prefetch);
        if (epilogue->row < epilogue->n_row) { /* while the unit computes the previous step */
            const int end = epilogue->row + epilogue_rows;
            epilogue_rows_to(epilogue, kind, end < epilogue->n_row ? end : epilogue->n_row);
        }
        add_step(two, is_int8, x, w);
        if (kind == AMX_SPLIT || kind == AMX_SPLIT_X) {
            add_step(two, is_int8, x + x_step, w);
        }
        if (kind == AMX_SPLIT) {
            fetch(w + W_STEP, &prefetch);
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

typedef void multiply_fn(struct epilogue *epilogue, const uint32_t *x, size_t x_step,
                         const uint32_t *w, int n_step, const struct accum *sums,
                         struct prefetch prefetch);

#define MULTIPLY(name, two, kind)                                                                  \
    static void name(struct epilogue *epilogue, const uint32_t *x, size_t x_step,                  \
                     const uint32_t *w, int n_step, const struct accum *sums,                      \
                     struct prefetch prefetch)                                                     \
    {                                                                                              \
        multiply(two, kind, epilogue, x, x_step, w, n_step, sums, prefetch);                       \
    }

MULTIPLY(few_pairs, false, AMX)
MULTIPLY(many_pairs, true, AMX)
MULTIPLY(few_bytes, false, AMX_BYTES)
MULTIPLY(many_bytes, true, AMX_BYTES)
MULTIPLY(few_split, false, AMX_SPLIT)
MULTIPLY(many_split, true, AMX_SPLIT)
MULTIPLY(few_split_x, false, AMX_SPLIT_X)
MULTIPLY(many_split_x, true, AMX_SPLIT_X)

static void start(struct amx_run *run, const struct product *product)
{
    run->product = *product;
    run->amx = (struct amx){0};
    run->epilogue.n_row = run->epilogue.row = 0;
    run->current = 0;
}

static void multiply_tile(struct amx_run *run, int n_row, const uint32_t *x, const uint32_t *w,
                          int n_word, struct accum sums, struct prefetch prefetch)
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
        run_tile(&run->epilogue, x, x_step, w, n_step, &sums, prefetch);
        sums.accumulates = true;
    }
    if (n_word % BLOCK > 0) { /* nothing behind the last word is read */
        amx_rows(&run->amx, n_row, n_word % BLOCK);
        run_tile(&run->epilogue, x + (size_t)n_step * x_step, x_step,
                 w + (size_t)n_step * BLOCK * PANEL, 1, &sums, (struct prefetch){w, 1});
    }
    /* an odd row may remain, and the next piece may overwrite its sums */
    epilogue_finish(&run->epilogue, run->product.kind);
}

/* Adds some words of K to the sums [n_row, PANEL] of a tile. */
static void multiply_piece(struct amx_run *run, const struct k_range *piece,
                           const struct tile_ref *at, struct prefetch prefetch, float *sum)
{
    enum { SUM_BYTES = PANEL * sizeof *sum };
    const struct accum sums = {sum, SUM_BYTES, piece->first > 0};
    multiply_tile(run, at->n_row, at->x, at->w, piece->n_word, sums, prefetch);
    if (piece->is_last && at->n_col == PANEL) {
        epilogue_defer(&run->epilogue, run->product.g, at, sum);
    } else if (piece->is_last) {
        finish_tile(run->product.g, at, sum);
    }
}

/* Words of a range that all tiles are multiplied by before they go on: 32 KiB of W stay in L1 while
 * the rows of x stream past, loaded in a way that does not evict W. */
static int piece_words(const struct k_range *range, int n_tile)
{
    enum { PIECE = 16 * CHUNK, TILES = 4 };
    return n_tile < TILES || range->n_word <= PIECE ? range->n_word : PIECE;
}

static void multiply_panel(void *ctx, const struct k_range *range, int panel, const uint32_t *next,
                           float *partial)
{
    struct amx_run *const run = ctx;
    const struct product *const p = &run->product;
    const int step = piece_words(range, p->n_tile);
    for (int k = 0; k < range->n_word; k += step) {
        const int left = range->n_word - k;
        const bool is_last = left <= step;
        const struct k_range piece = {range->first + k, is_last ? left : step,
                                      range->is_last && is_last};
        for (int t = 0; t < p->n_tile; t++) {
            const struct tile_ref at = tile_ref_of(p->g, p->kind, &piece, panel, p->tile + t);
            const uint32_t *const after = is_last ? next : at.w + (size_t)step * PANEL;
            run->current = step < range->n_word ? t : !run->current;
            multiply_piece(run, &piece, &at, prefetch_of(after, &piece, p->kind, t, p->n_tile),
                           partial != NULL ? partial + at.row * PANEL : run->sum[run->current]);
        }
    }
}

void SIMD(amx_panels)(const struct product *product, int first, int n, float *sums)
{
    struct amx_run run;
    start(&run, product);
    for_panels(&run.product, first, n, sums, multiply_panel, &run);
    epilogue_finish(&run.epilogue, product->kind);
    _tile_release();
}

void SIMD(amx_scores)(float *score, int64_t stride, const float *x, int64_t x_stride, int n_row,
                      const uint32_t *w, enum dtype dtype, int n_in, int n_out, uint32_t *words)
{
    struct amx_run run;
    const enum gemm_kind kind = dtype == DTYPE_F32 ? AMX_SPLIT : AMX_SPLIT_X;
    start(&run, &(struct product){.kind = kind});
    SIMD(pack_tile)(words, x, x_stride, n_row, n_in, kind);
    const size_t panel_words = gemm_panel_words(n_in, dtype);
    const int64_t stride_bytes = stride * (int64_t)sizeof *score;
    for (int panel = 0; panel < gemm_n_panel(n_out); panel++) {
        const struct accum sums = {score + panel * PANEL, stride_bytes, false};
        multiply_tile(&run, n_row, words, w + (size_t)panel * panel_words,
                      gemm_k_words(n_in, dtype), sums, (struct prefetch){w, 0});
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
    *flops = 4.0 * 2 * (is_int8 ? 4 : 2) * (double)(BLOCK * BLOCK * BLOCK) * (double)n;
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
    (void)product;
    (void)first;
    (void)n;
    (void)sums;
    UNREACHABLE(); /* machine.c asks for it on machines that have it */
}

void SIMD(amx_scores)(float *score, int64_t stride, const float *x, int64_t x_stride, int n_row,
                      const uint32_t *w, enum dtype dtype, int n_in, int n_out, uint32_t *words)
{
    (void)score;
    (void)dtype;
    (void)stride;
    (void)x;
    (void)x_stride;
    (void)n_row;
    (void)w;
    (void)n_in;
    (void)n_out;
    (void)words;
    UNREACHABLE();
}

#endif
