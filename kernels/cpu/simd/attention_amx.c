/* Causal attention of consecutive rows and one head over pages in BF16, by the matrix unit.
 *
 * Rows are taken in groups of up to 16 whose own positions lie in one page, two groups at a time.
 * Both products are those of gemm_amx.c: queries, rounded to BF16, by pages of keys, 32 columns a
 * step; and softmax weights, rounded too, by pages of values, 16 positions a step. In the page of a
 * row's own position the values are weighted by vector instructions, one position at a time,
 * because behind that position lie positions that the row must not see, and 0 · NaN is NaN. So the
 * order in which a score, a weight or a sum is computed depends on the row's own position alone,
 * not on the other rows of the group.
 *
 * Bytes: 4·d_head per position and two groups; flops: 4·d_head per position and row. Few rows:
 * bound by the bytes; many: by the unit and exp together. Achieved shares of these bounds: see
 * SPEED.md. */
#include "kernels/cpu/simd/amx.h"
#include "kernels/cpu/simd/tile.h"
#include "kernels/cpu/simd/vmath.h"

#include <math.h>

#if defined(ISA_AVX512)

enum {
    PAIR_WORDS = KV_PAGE / 2, /* words that hold the positions of a page */
    GROUP_WORDS = BLOCK * CHUNK,
    ROW_BYTES = CHUNK * sizeof(uint32_t),
    STEP = 2 * CHUNK /* columns of a step: one tile row of queries, or two tile rows of sums */
};

struct group {
    const float *q;
    float *y;
    float *query;   /* [steps][room][CHUNK] words of pairs; the last step may begin with zeros */
    float *score;   /* [pages][room][KV_PAGE] scores; then pairs of weights, KV_PAGE / 2 words for
                     * each row, except in the own page, whose weights are floats */
    int n_row, pos; /* of the first row */
    int own;        /* the page of the rows' own positions */
    int room;       /* for rows: BLOCK, or 1 */
};

/* The first column of step i of a head; the last step begins earlier if the columns run out. */
static int step_column(int i, int d_head)
{
    const int last = d_head - STEP;
    return i * STEP < last ? i * STEP : last;
}

static int step_word(int i, int d_head)
{
    return step_column(i, d_head) / 2;
}

static void pack_queries(const struct attend *a, const struct group *g)
{
    const int n_step = (a->d_head + STEP - 1) / STEP;
    for (int i = 0; i < n_step; i++) {
        const int first = step_word(i, a->d_head);
        const unsigned taken = (unsigned)(i * CHUNK - first); /* words of the step before */
        for (int r = 0; r < g->n_row; r++) {
            const float *const q = g->q + r * a->q_stride + (int64_t)2 * first;
            const __m512bh pairs =
                _mm512_cvtne2ps_pbh(v_load(q + LANES) * a->scale, v_load(q) * a->scale);
            const __mmask16 fresh = (__mmask16)(0xffffu << taken);
            _mm512_storeu_si512(g->query + (i * g->room + r) * CHUNK,
                                _mm512_maskz_mov_epi32(fresh, (__m512i)pairs));
        }
    }
}

static ALWAYS_INLINE void zero_sums(const bool two)
{
    _tile_zero(0);
    _tile_zero(1);
    if (two) { /* instructions must not name a register that has no rows */
        _tile_zero(2);
        _tile_zero(3);
    }
}

static ALWAYS_INLINE void prefetch_rows(const float *from, int64_t stride, int n)
{
    for (int i = 0; i < n; i++) {
        __builtin_prefetch(from + i * stride);
    }
}

/* The page whose keys are stored by position, because the last row is not the page's last; -1 =
 * none. */
static int open_page(const struct attend *a)
{
    const int end = a->pos + a->n_row;
    return end % KV_PAGE == 0 ? -1 : end / KV_PAGE;
}

static ALWAYS_INLINE const float *keys_of(const struct attend *a, int open, int page)
{
    return page == open ? a->closed : a->k_pages + a->page[page] * a->k_stride;
}

/* Scores of the groups' rows for pages first and first + 1 of n_page. If there is no page first +
 * 1, the last one is used again, and its scores go where nobody reads them. */
static ALWAYS_INLINE void score_pages(const struct attend *a, const struct group *g, const bool two,
                                      int first, int n_page)
{
    const int open = open_page(a);
    const int last = n_page - 1;
    const int ahead = first + 2 < last ? first + 2 : last;
    const float *const key0 = keys_of(a, open, first);
    const float *const key1 = keys_of(a, open, first < last ? first + 1 : last);
    const float *const next0 = keys_of(a, open, ahead);
    const float *const next1 = keys_of(a, open, ahead < last ? ahead + 1 : last);
    zero_sums(two);
    for (int i = 0; i * STEP < a->d_head; i++) {
        const int64_t at = (int64_t)step_word(i, a->d_head) * KV_PAGE;
        _tile_loadd(4, g[0].query + i * GROUP_WORDS, ROW_BYTES);
        _tile_loadd(6, key0 + at, KV_PAGE * sizeof(float));
        _tile_loadd(7, key1 + at, KV_PAGE * sizeof(float));
        prefetch_rows(next0 + at, KV_PAGE, CHUNK);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        prefetch_rows(next1 + at, KV_PAGE, CHUNK);
        if (two) {
            _tile_loadd(5, g[1].query + i * GROUP_WORDS, ROW_BYTES);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    float *const score = g[0].score + (int64_t)first * GROUP_WORDS;
    _tile_stored(0, score, ROW_BYTES);
    _tile_stored(1, score + GROUP_WORDS, ROW_BYTES);
    if (two) {
        _tile_stored(2, g[1].score + (int64_t)first * GROUP_WORDS, ROW_BYTES);
        _tile_stored(3, g[1].score + (int64_t)(first + 1) * GROUP_WORDS, ROW_BYTES);
    }
}

/* Turns scores of n_row rows from row on into e^(score - max), rounded, and writes their sums to
 * total. Rows in step: see v_exp_n. */
static ALWAYS_INLINE void share_rows(const struct group *g, int row, const int n_row, float *total)
{
    const int page_words = g->room * KV_PAGE;
    float *const own = g->score + (int64_t)g->own * page_words + row * KV_PAGE;
    vf max[EXP_VECS];
    vf sum[EXP_VECS];
    UNROLL
    for (int r = 0; r < n_row; r++) { /* positions after the row's own do not count */
        const vi is_later = v_lane() > (g->pos + row + r) % KV_PAGE;
        max[r] = v_select(is_later, v_set1(-INFINITY), v_load(own + r * KV_PAGE));
        v_store(own + r * KV_PAGE, max[r]);
        sum[r] = v_set1(0);
    }
    for (const float *s = g->score + row * KV_PAGE; s < own; s += page_words) {
        UNROLL
        for (int r = 0; r < n_row; r++) {
            max[r] = v_max(v_load(s + r * KV_PAGE), max[r]);
        }
    }
    UNROLL
    for (int r = 0; r < n_row; r++) {
        max[r] = v_set1(v_max_of(max[r]));
    }
    for (float *s = g->score + row * KV_PAGE; s <= own; s += page_words) {
        vf e[EXP_VECS];
        UNROLL
        for (int r = 0; r < n_row; r++) {
            e[r] = v_load(s + r * KV_PAGE) - max[r];
        }
        v_exp_n(e, n_row);
        UNROLL
        for (int r = 0; r < n_row; r++) {
            const __m256bh half = _mm512_cvtneps_pbh(e[r]);
            const vf rounded = (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)half), 16);
            sum[r] = sum[r] + rounded;
            if (s < own) {
                memcpy(s + r * KV_PAGE, &half, sizeof half);
            } else {
                v_store(s + r * KV_PAGE, rounded);
            }
        }
    }
    UNROLL
    for (int r = 0; r < n_row; r++) {
        total[r] = v_sum(sum[r]);
    }
}

/* y's columns c .. c+31 of the groups' rows: the sums over the pages before each group's own. */
static ALWAYS_INLINE void weigh_pages(const struct attend *a, const struct group *g, const bool two,
                                      int c)
{
    const size_t y_bytes = (size_t)a->y_stride * sizeof *a->y;
    const size_t row_bytes = (size_t)a->d_head * sizeof(uint32_t);
    const int n_page = g[two].own;
    zero_sums(two);
    for (int p = 0; p < n_page; p++) {
        const float *const v = a->v_pages + a->page[p] * a->v_stride + c;
        const float *const next = a->v_pages + a->page[p + 1] * a->v_stride + c;
        _tile_loadd(6, v, row_bytes);
        _tile_loadd(7, v + BLOCK, row_bytes);
        prefetch_rows(next, a->d_head, PAIR_WORDS);
        prefetch_rows(next + BLOCK, a->d_head, PAIR_WORDS);
        if (!two || p < g[0].own) {
            _tile_loadd(4, g[0].score + (int64_t)p * GROUP_WORDS, ROW_BYTES);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
        }
        if (two) {
            _tile_loadd(5, g[1].score + (int64_t)p * GROUP_WORDS, ROW_BYTES);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, g[0].y + c, y_bytes);
    _tile_stored(1, g[0].y + c + BLOCK, y_bytes);
    if (two) {
        _tile_stored(2, g[1].y + c, y_bytes);
        _tile_stored(3, g[1].y + c + BLOCK, y_bytes);
    }
}

/* Adds the own page of n_row rows from row on to y, which is then complete. */
static ALWAYS_INLINE void weigh_own(const struct attend *a, const struct group *g, int row,
                                    const int n_row, const int n_vec, int c, int n_lane,
                                    const float *total)
{
    const int at = (g->pos + row) % KV_PAGE;
    const float *const share = g->score + ((int64_t)g->own * g->room + row) * KV_PAGE;
    const float *const piece = a->v_pages + a->page[g->own] * a->v_stride + c;
    float *const y = g->y + row * a->y_stride + c;
    tile_sums sum;
    struct tile_vec value[ATTEND_VECS(1)];
    UNROLL
    for (int v = 0; v < n_vec; v++) {
        value[v] = (struct tile_vec){.from = piece + v * LANES, .ahead = piece + v * LANES};
        UNROLL
        for (int r = 0; r < n_row; r++) {
            sum[r][v] = v_load_n(y + r * a->y_stride + v * LANES, n_lane);
        }
    }
    tile_add(sum, n_row, n_vec, WIDENED, share, value, a->d_head, false, at + 1, n_lane);
    UNROLL
    for (int i = 1; i < n_row; i++) {
        tile_add_one(sum, n_vec, i, n_row, share + at + i,
                     piece + value_row(WIDENED, at + i) * a->d_head, value_part(WIDENED, at + i),
                     n_lane);
    }
    tile_store_means(y, a->y_stride, sum, n_row, n_vec, total + row, n_lane);
}

static ALWAYS_INLINE void weigh_own_rows(const struct attend *a, const struct group *g, int row,
                                         const int n_row, const float *total)
{
    enum { VECS = 4 };
    int c = 0;
    for (; c + VECS * LANES <= a->d_head; c += VECS * LANES) {
        weigh_own(a, g, row, n_row, VECS, c, LANES, total);
    }
    for (; c < a->d_head; c += LANES) {
        weigh_own(a, g, row, n_row, 1, c, lanes_left(a->d_head, c), total);
    }
}

static void finish_group(const struct attend *a, const struct group *g, const float *total)
{
    const int in_step = g->n_row / EXP_VECS * EXP_VECS;
    for (int r = 0; r < in_step; r += EXP_VECS) {
        weigh_own_rows(a, g, r, EXP_VECS, total);
    }
    for (int r = in_step; r < g->n_row; r++) {
        weigh_own_rows(a, g, r, 1, total);
    }
}

static void share_group(const struct group *g, float *total)
{
    const int in_step = g->n_row / EXP_VECS * EXP_VECS;
    for (int r = 0; r < in_step; r += EXP_VECS) {
        share_rows(g, r, EXP_VECS, total + r);
    }
    for (int r = in_step; r < g->n_row; r++) {
        share_rows(g, r, 1, total + r);
    }
}

/* One group, or two. */
static ALWAYS_INLINE void attend_groups(const struct attend *a, const struct group *g,
                                        const bool two, struct amx *amx)
{
    const int n_page = g[two].own + 1;
    const int n_second = two ? g[1].n_row : 0;
    float total[2][BLOCK];
    for (int i = 0; i <= two; i++) {
        pack_queries(a, &g[i]);
        WRITTEN(g[i].query);
    }
    amx_set_up(amx, g[0].n_row, n_second, CHUNK);
    for (int p = 0; p < n_page; p += 2) {
        score_pages(a, g, two, p, n_page);
    }
    for (int i = 0; i <= two; i++) {
        share_group(&g[i], total[i]);
        WRITTEN(g[i].score);
    }
    amx_set_up(amx, g[0].n_row, n_second, PAIR_WORDS);
    for (int i = 0; i * STEP < a->d_head; i++) { /* the last two may compute the same columns */
        weigh_pages(a, g, two, step_column(i, a->d_head));
    }
    for (int i = 0; i <= two; i++) {
        finish_group(a, &g[i], total[i]);
    }
}

static void attend_one(const struct attend *a, const struct group *g, struct amx *amx)
{
    attend_groups(a, g, false, amx);
}

static void attend_two(const struct attend *a, const struct group *g, struct amx *amx)
{
    attend_groups(a, g, true, amx);
}

static void attend_rows(const struct attend *a, struct amx *amx)
{
    const size_t n_query = attend_amx_query_words(a->d_head);
    for (int r = 0; r < a->n_row;) {
        struct group g[2];
        int n = 0;
        for (; n < 2 && r < a->n_row; n++) {
            const int pos = a->pos + r;
            const int room = KV_PAGE - pos % KV_PAGE;
            const int left = a->n_row - r;
            g[n] = (struct group){.q = a->q + r * a->q_stride,
                                  .y = a->y + r * a->y_stride,
                                  .query = a->query + (size_t)n * n_query,
                                  .n_row = left < room ? left : room,
                                  .pos = pos,
                                  .own = pos / KV_PAGE,
                                  .room = BLOCK};
            r += g[n].n_row;
        }
        const int n_page = g[n - 1].own + 1;
        g[0].score = a->score;
        g[1].score = a->score + attend_amx_score_words(n_page);
        (n == 2 ? attend_two : attend_one)(a, g, amx);
    }
}

/* ---- one row, several heads --------------------------------------------------------------------
 *
 * Heads' pieces of a page lie side by side. Some pages at a time, each is a stream of memory, and a
 * core draws more from several of them than from one; head by head, a piece here and a piece there.
 */

enum { ROW_PAGES = 4 };

/* Up to ROW_PAGES pages, beginning with page first. */
struct pages {
    const float *at[ROW_PAGES]; /* a head's first piece of each page; past n it repeats the last
                                 * page */
    int n;
};

static struct pages pages_from(const struct attend *a, const float *pages, int64_t stride,
                               int first, int end)
{
    struct pages of;
    of.n = end - first < ROW_PAGES ? end - first : ROW_PAGES;
    for (int i = 0; i < ROW_PAGES; i++) {
        const int page = first + i < end ? first + i : end - 1;
        of.at[i] = pages + a->page[page] * stride;
    }
    return of;
}

/* Prefetches part number part of n_part of a page's pieces, which are n_word words from at on. */
static ALWAYS_INLINE void prefetch_part(const struct pages *pages, int64_t at, int64_t n_word,
                                        int part, int n_part)
{
    const int64_t n_line = n_word / LINE_WORDS;
    for (int64_t i = n_line * part / n_part; i < n_line * (part + 1) / n_part; i++) {
        for (int p = 0; p < pages->n; p++) {
            __builtin_prefetch(pages->at[p] + at + i * LINE_WORDS);
        }
    }
}

/* Scores of a single row for a piece of each page; prefetches the next pieces. sum and keys are
 * tile registers and must be literal numbers. */
#define SCORE_PAGE(i, sum, keys)                                                                   \
    do {                                                                                           \
        if ((i) < pages->n) {                                                                      \
            _tile_loadd(keys, pages->at[i] + piece + at, KV_PAGE * sizeof(float));                 \
            prefetch_rows(next->at[i] + next_piece + at, KV_PAGE, CHUNK);                          \
            _tile_dpbf16ps(sum, 4, keys);                                                          \
        }                                                                                          \
    } while (0)

#define STORE_SCORE(i, sum)                                                                        \
    do {                                                                                           \
        if ((i) < pages->n) {                                                                      \
            _tile_stored(sum, score + (i)*KV_PAGE, ROW_BYTES);                                     \
        }                                                                                          \
    } while (0)

static ALWAYS_INLINE void score_row(const struct group *g, int d_head, float *score,
                                    const struct pages *pages, int64_t piece,
                                    const struct pages *next, int64_t next_piece)
{
    zero_sums(true);
    for (int i = 0; i * STEP < d_head; i++) {
        const int64_t at = (int64_t)step_word(i, d_head) * KV_PAGE;
        _tile_loadd(4, g->query + i * CHUNK, ROW_BYTES);
        SCORE_PAGE(0, 0, 5);
        SCORE_PAGE(1, 1, 6);
        SCORE_PAGE(2, 2, 7);
        SCORE_PAGE(3, 3, 5);
    }
    STORE_SCORE(0, 0);
    STORE_SCORE(1, 1);
    STORE_SCORE(2, 2);
    STORE_SCORE(3, 3);
}

/* Adds the weighted values of a piece of each page to the sums of a single row, [steps][STEP]
 * columns. */
static ALWAYS_INLINE void weigh_row(const float *share, int d_head, float *sum,
                                    const struct pages *pages, int64_t piece,
                                    const struct pages *next, int64_t next_piece)
{
    const size_t row_bytes = (size_t)d_head * sizeof(uint32_t);
    for (int i = 0; i * STEP < d_head; i++, sum += STEP) {
        const int c = step_column(i, d_head);
        _tile_loadd(0, sum, ROW_BYTES);
        _tile_loadd(1, sum + BLOCK, ROW_BYTES);
        for (int p = 0; p < pages->n; p++) {
            const float *const v = pages->at[p] + piece + c;
            const float *const ahead = next->at[p] + next_piece + c;
            _tile_loadd(4, share + p * KV_PAGE, ROW_BYTES);
            _tile_loadd(6, v, row_bytes);
            _tile_loadd(7, v + BLOCK, row_bytes);
            prefetch_rows(ahead, d_head, PAIR_WORDS);
            _tile_dpbf16ps(0, 4, 6);
            prefetch_rows(ahead + BLOCK, d_head, PAIR_WORDS);
            _tile_dpbf16ps(1, 4, 7);
        }
        _tile_stored(0, sum, ROW_BYTES);
        _tile_stored(1, sum + BLOCK, ROW_BYTES);
    }
}

/* Scores of a single row for the positions of its own page, whose keys are stored by position: the
 * keys are the rows of the product and the query is its column. The products and their order are
 * the same as in a full page. */
static ALWAYS_INLINE void score_open(const struct group *g, int d_head, const float *keys)
{
    _tile_zero(0);
    for (int i = 0; i * STEP < d_head; i++) {
        _tile_loadd(4, keys + step_word(i, d_head), (size_t)d_head / 2 * sizeof *keys);
        _tile_loadd(6, g->query + i * CHUNK, sizeof *g->query);
        _tile_dpbf16ps(0, 4, 6);
    }
    _tile_stored(0, g->score + g->own * KV_PAGE, sizeof *g->score);
}

/* Prefetches the keys of the positions up to the row's own. */
static ALWAYS_INLINE void prefetch_open(const struct attend *a, const float *keys)
{
    const int n_word = (a->pos % KV_PAGE + 1) * (a->d_head / 2);
    for (int i = 0; i < n_word; i += LINE_WORDS) {
        __builtin_prefetch(keys + i);
    }
}

static void score_heads(const struct attend *a, const struct group *g, int own, struct amx *amx)
{
    const int64_t piece = attend_piece_words(a);
    const bool is_open = open_page(a) >= 0;
    const float *const open = a->k_pages + a->page[own] * a->k_stride;
    const int n_full = is_open ? own : own + 1;
    struct pages pages = pages_from(a, a->k_pages, a->k_stride, 0, n_full > 0 ? n_full : 1);
    for (int h = 0; h < a->n_head && n_full == 0; h++) {
        prefetch_open(a, open + h * piece);
    }
    for (int p = 0; p < n_full; p += ROW_PAGES) {
        const bool is_end = p + ROW_PAGES >= n_full;
        const struct pages after =
            is_end ? pages_from(a, a->v_pages, a->v_stride, 0, own + 1)
                   : pages_from(a, a->k_pages, a->k_stride, p + ROW_PAGES, n_full);
        for (int h = 0; h < a->n_head; h++) {
            if (is_end && is_open) {
                prefetch_open(a, open + h * piece);
            }
            const bool is_last = h + 1 == a->n_head;
            score_row(&g[h], a->d_head, g[h].score + p * KV_PAGE, &pages, h * piece,
                      is_last ? &after : &pages, is_last ? 0 : (h + 1) * piece);
        }
        pages = after;
    }
    if (is_open) {
        amx_set_up_column(amx, a->pos % KV_PAGE + 1);
        for (int h = 0; h < a->n_head; h++) {
            score_open(&g[h], a->d_head, open + h * piece);
        }
    }
}

/* sum: the sums of each head, stride apart. */
static void weigh_heads(const struct attend *a, const struct group *g, float *sum, size_t stride,
                        int own)
{
    const int64_t piece = attend_piece_words(a);
    for (int p = 0; p < own; p += ROW_PAGES) {
        const struct pages pages = pages_from(a, a->v_pages, a->v_stride, p, own);
        const struct pages after = pages_from(a, a->v_pages, a->v_stride, p + pages.n, own + 1);
        for (int h = 0; h < a->n_head; h++) {
            const bool is_last = h + 1 == a->n_head;
            weigh_row(g[h].score + p * KV_PAGE, a->d_head, sum + (size_t)h * stride, &pages,
                      h * piece, is_last ? &after : &pages, is_last ? 0 : (h + 1) * piece);
        }
    }
}

static void attend_heads(const struct attend *a, struct amx *amx)
{
    const size_t n_query = attend_amx_query_words(a->d_head) / BLOCK;
    const int own = a->pos / KV_PAGE;
    struct group g[ATTEND_HEADS];
    float total[ATTEND_HEADS];
    const int64_t piece = attend_piece_words(a);
    const struct pages keys = pages_from(a, a->k_pages, a->k_stride, 0, own > 0 ? own : 1);
    const struct pages values = pages_from(a, a->v_pages, a->v_stride, 0, own + 1);
    for (int h = 0; h < a->n_head; h++) {
        prefetch_part(&keys, 0, piece, h, a->n_head);
        const struct attend head = attend_head(a, h);
        g[h] = (struct group){.q = head.q,
                              .y = head.y,
                              .query = a->query + (size_t)h * n_query,
                              .score = a->score + (int64_t)h * (own + 1) * KV_PAGE,
                              .n_row = 1,
                              .pos = a->pos,
                              .own = own,
                              .room = 1};
        pack_queries(&head, &g[h]);
    }
    WRITTEN(a->query);
    amx_set_up(amx, 1, 0, CHUNK);
    score_heads(a, g, own, amx);
    for (int h = 0; h < a->n_head; h++) {
        prefetch_part(&values, a->n_head > 1 ? piece : 0, piece, h, a->n_head);
        share_group(&g[h], &total[h]);
    }
    float *const sum = a->query; /* the queries have been read; there is room for two floats for
                                  * each of their words */
    memset(sum, 0, (size_t)a->n_head * 2 * n_query * sizeof *sum);
    WRITTEN(a->score);
    amx_set_up(amx, 1, 0, PAIR_WORDS);
    weigh_heads(a, g, sum, 2 * n_query, own);
    for (int h = 0; h < a->n_head; h++) {
        const struct attend head = attend_head(a, h);
        for (int i = 0; i * STEP < a->d_head; i++) {
            memcpy(head.y + step_column(i, a->d_head), sum + (size_t)h * 2 * n_query + i * STEP,
                   STEP * sizeof *sum);
        }
        finish_group(&head, &g[h], &total[h]);
    }
}

void SIMD(amx_attend)(const struct attend *a)
{
    struct amx amx = {0};
    if (a->n_row == 1) {
        attend_heads(a, &amx);
    } else {
        const int open = open_page(a);
        for (int h = 0; h < a->n_head; h++) {
            const struct attend head = attend_head(a, h);
            if (open >= 0) {
                SIMD(close_keys)
                (a->closed, head.k_pages + a->page[open] * a->k_stride, a->d_head / 2);
                WRITTEN(a->closed);
            }
            attend_rows(&head, &amx);
        }
    }
    _tile_release();
}

#else

void SIMD(amx_attend)(const struct attend *a)
{
    (void)a;
    UNREACHABLE(); /* machine.c asks for it on machines that have it */
}

#endif
