/* Products of BF16 pairs, or of four bytes, by the matrix unit of Intel's processors (AMX-BF16,
 * AMX-INT8).
 *
 * An instruction multiplies 16 words of 16 rows by 16 words of 16 outputs: 16 times the work of one
 * for vectors. Two blocks of rows by two of outputs fill the unit's eight registers: four loads
 * feed four products, and four chains hide their latency. Each output is one chain in ascending k,
 * in steps of 16 words; within a step the unit adds up the even and the odd products of the row and
 * the output, whatever other rows there are; of bytes it adds whole numbers. Few rows: bound by the
 * bytes of W, as in gemm.c. Many: by the unit. Share reached: see SPEED.md. */
#include "kernels/cpu/simd/amx.h"

#if defined(ISA_AVX512)

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
#define LOAD_SUMS(a, b, from, stride)                                                              \
    do {                                                                                           \
        if ((from) == NULL) {                                                                      \
            _tile_zero(a);                                                                         \
            _tile_zero(b);                                                                         \
        } else {                                                                                   \
            _tile_loadd(a, from, stride);                                                          \
            _tile_loadd(b, (from) + BLOCK, stride);                                                \
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

/* n_step times 16 words, or once fewer. two: there are more than BLOCK rows. */
static ALWAYS_INLINE void multiply(const bool two, const bool is_int8, const uint32_t *x,
                                   size_t x_step, const uint32_t *w, int n_step,
                                   const struct amx_sums *sums, struct ahead ahead)
{
    const size_t from_block = BLOCK * (size_t)sums->from_bytes / sizeof(float);
    const size_t to_block = BLOCK * (size_t)sums->to_bytes / sizeof(float);
    LOAD_SUMS(0, 1, sums->from, sums->from_bytes);
    if (two) {
        const float *const below = sums->from != NULL ? sums->from + from_block : NULL;
        LOAD_SUMS(2, 3, below, sums->from_bytes);
    }
    for (int i = 0; i < n_step; i++) {
        fetch(w, &ahead);
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
        x += x_step;
        w += BLOCK * PANEL;
    }
    STORE_SUMS(0, 1, sums->to, sums->to_bytes);
    if (two) {
        STORE_SUMS(2, 3, sums->to + to_block, sums->to_bytes);
    }
}

typedef void multiply_fn(const uint32_t *x, size_t x_step, const uint32_t *w, int n_step,
                         const struct amx_sums *sums, struct ahead ahead);

#define MULTIPLY(name, two, is_int8)                                                               \
    static void name(const uint32_t *x, size_t x_step, const uint32_t *w, int n_step,              \
                     const struct amx_sums *sums, struct ahead ahead)                              \
    {                                                                                              \
        multiply(two, is_int8, x, x_step, w, n_step, sums, ahead);                                 \
    }

MULTIPLY(few_pairs, false, false)
MULTIPLY(many_pairs, true, false)
MULTIPLY(few_bytes, false, true)
MULTIPLY(many_bytes, true, true)

void SIMD(amx_tile)(struct amx *amx, int n_row, const uint32_t *x, const uint32_t *w, int n_word,
                    struct amx_sums sums, struct ahead ahead)
{
    static multiply_fn *const runs[2][2] = {{few_pairs, many_pairs}, {few_bytes, many_bytes}};
    multiply_fn *const run = runs[amx->is_int8][n_row > BLOCK];
    const size_t x_step = (size_t)n_row * CHUNK;
    const int n_step = n_word / BLOCK;
    WRITTEN(sums.from);
    if (n_step > 0) {
        amx_rows(amx, n_row, BLOCK);
        run(x, x_step, w, n_step, &sums, ahead);
        sums.from = sums.to;
        sums.from_bytes = sums.to_bytes;
    }
    if (n_word % BLOCK > 0) { /* what lies behind the last word is not read */
        amx_rows(amx, n_row, n_word % BLOCK);
        run(x + (size_t)n_step * x_step, x_step, w + (size_t)n_step * BLOCK * PANEL, 1, &sums,
            (struct ahead){w, 1});
    }
}

void SIMD(amx_release)(void)
{
    _tile_release();
}

static ALWAYS_INLINE void peak(const bool is_int8, int64_t n, double *flops)
{
    struct amx amx = {.is_int8 = is_int8};
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

void SIMD(amx_tile)(struct amx *amx, int n_row, const uint32_t *x, const uint32_t *w, int n_word,
                    struct amx_sums sums, struct ahead ahead)
{
    (void)n_row;
    (void)x;
    (void)w;
    (void)n_word;
    (void)sums;
    (void)ahead;
    CHECK(amx == NULL); /* machine.c asks for it on machines that have it */
}

void SIMD(amx_release)(void)
{
}

#endif
