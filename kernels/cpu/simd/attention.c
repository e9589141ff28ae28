/* Causal attention of consecutive rows and one head over the pages of the cache.
 *
 * A tile of up to TILE_ROWS rows goes over the keys, then over the values; its scores of all
 * positions wait in scratch, which stays in L1 or L2. Scores: 16 positions are one cache line of a
 * key page, and a chain of multiply-adds runs over the head's columns. Values: a chain over
 * positions per column. Each score, share and sum is formed in the same order whatever rows are
 * beside it.
 *
 * A cache in BF16 is widened to floats, or, where the machine multiplies pairs as fast as floats,
 * multiplied as pairs: of two columns by queries, of two positions by shares, both rounded to BF16
 * as attention_amx.c rounds them. Pairs begin at even positions, and a row that ends at one leaves
 * out the later half of its last pair: so here, too, the row's own position decides the order.
 *
 * Bytes: 8·d_head per position and tile; flops: 4·d_head per position and row. Few rows: bound by
 * the bytes; many: by multiply-adds, of which exp takes an eighth. Shares reached: see SPEED.md. */
#include "kernels/cpu/simd/tile.h"
#include "kernels/cpu/simd/vmath.h"

#include <math.h>

static ALWAYS_INLINE void pack_query(const struct attend *a, const int chunk, const int n_row,
                                     const enum words words)
{
    if (words == PAIRS) {
        tile_pack_pairs(a->query, chunk, a->q, a->q_stride, n_row, a->d_head, a->scale);
        return;
    }
    tile_pack(a->query, chunk, a->q, a->q_stride, n_row, a->d_head, a->scale);
}

/* Scores of n_page pages from page number first on, of those below end. */
static ALWAYS_INLINE void score_pages(const struct attend *a, const int n_row, const int n_page,
                                      const enum words words, int first, int end)
{
    const int n_vec = n_page * PAGE_VECS;
    struct tile_vec key[ATTEND_VECS(1)];
    tile_sums sum;
    UNROLL
    for (int v = 0; v < n_vec; v++) {
        const float *const from = a->k_pages + v % PAGE_VECS * LANES;
        const int page = first + v / PAGE_VECS;
        const int next = page + n_page < end ? page + n_page : page;
        key[v] = (struct tile_vec){.from = from + a->page[page] * a->k_stride,
                                   .ahead = from + a->page[next] * a->k_stride};
    }
    tile_dots(sum, n_row, n_vec, words, a->query, TILE_CHUNK, a->d_head, key, KV_PAGE, LANES);
    tile_store_pages(a->score + (int64_t)first * TILE_CHUNK, TILE_CHUNK, sum, n_row, n_vec, LANES);
}

/* Positions behind a row's own get -infinity: they are not written yet, or hold another's data. */
static void hide_later(const struct attend *a, int chunk, int n_row, int n_page)
{
    for (int p = (a->pos + 1) / KV_PAGE; p < n_page; p++) {
        for (int r = 0; r < n_row; r++) {
            for (int u = 0; u < KV_PAGE; u += LANES) {
                float *const at = a->score + (int64_t)p * chunk + r * KV_PAGE + u;
                const vi is_later = v_lane() + u > a->pos + r - p * KV_PAGE;
                v_store(at, v_select(is_later, v_set1(-INFINITY), v_load(at)));
            }
        }
    }
}

/* Stores a vector of shares, as floats, or rounded as pairs in half as many words. Returns what is
 * stored. */
static ALWAYS_INLINE vf store_shares(float *page, int u, vf share, const enum words words)
{
    if (words == PAIRS) {
        const vf pairs = v_pairs(share, share);
        vh half;
        memcpy(&half, &pairs, sizeof half);
        memcpy(page + u / 2, &half, sizeof half);
        return v_from_bf16(half);
    }
    v_store(page + u, share);
    return share;
}

/* Turns the scores of n_row rows into exp(score - max) and writes their sums to total. Rows in
 * step: see v_exp_n. */
static ALWAYS_INLINE void exp_scores(float *score, const int chunk, const int n_row,
                                     const enum words words, int n_page, float *total)
{
    float *const end = score + (int64_t)n_page * chunk;
    vf max[EXP_VECS];
    vf sum[EXP_VECS];
    UNROLL
    for (int r = 0; r < n_row; r++) {
        max[r] = v_set1(-INFINITY);
        sum[r] = v_set1(0);
    }
    for (const float *page = score; page < end; page += chunk) {
        UNROLL
        for (int u = 0; u < KV_PAGE; u += LANES) {
            UNROLL
            for (int r = 0; r < n_row; r++) {
                max[r] = v_max(v_load(page + r * KV_PAGE + u), max[r]);
            }
        }
    }
    UNROLL
    for (int r = 0; r < n_row; r++) {
        max[r] = v_set1(v_max_of(max[r]));
    }
    for (float *page = score; page < end; page += chunk) {
        UNROLL
        for (int u = 0; u < KV_PAGE; u += LANES) {
            vf e[EXP_VECS];
            UNROLL
            for (int r = 0; r < n_row; r++) {
                e[r] = v_load(page + r * KV_PAGE + u) - max[r];
            }
            v_exp_n(e, n_row);
            UNROLL
            for (int r = 0; r < n_row; r++) {
                sum[r] = sum[r] + store_shares(page + r * KV_PAGE, u, e[r], words);
            }
        }
    }
    UNROLL
    for (int r = 0; r < n_row; r++) {
        total[r] = v_sum(sum[r]);
    }
}

static ALWAYS_INLINE void exp_all(const struct attend *a, int n_row, const enum words words,
                                  int n_page, float *total)
{
    const int in_step = n_row / EXP_VECS * EXP_VECS;
    for (int r = 0; r < in_step; r += EXP_VECS) {
        exp_scores(a->score + r * KV_PAGE, TILE_CHUNK, EXP_VECS, words, n_page, total + r);
    }
    for (int r = in_step; r < n_row; r++) {
        exp_scores(a->score + r * KV_PAGE, TILE_CHUNK, 1, words, n_page, total + r);
    }
}

/* Shares of n positions: numbers, or whole pairs of them. */
static ALWAYS_INLINE int n_share(const enum words words, int n)
{
    return words == PAIRS ? n / 2 : n;
}

/* The rows of a tile end at consecutive positions: adds the values that only some of them see, and
 * the one that a row sees of the pair in which it ends. A weight of 0 is not enough to leave a
 * position out, because 0 · NaN is NaN. */
static ALWAYS_INLINE void add_last_values(tile_sums sum, const struct attend *a, const int n_row,
                                          const int n_vec, const enum words words, int c,
                                          int n_lane)
{
    UNROLL
    for (int i = words == PAIRS ? 0 : 1; i < n_row; i++) {
        const int u = a->pos + i;
        const int page = u / KV_PAGE;
        const float *const share =
            a->score + (int64_t)page * TILE_CHUNK + n_share(words, u % KV_PAGE);
        const float *const piece =
            a->v_pages + a->page[page] * a->v_stride + value_row(words, u) * a->d_head + c;
        if (words != PAIRS) {
            tile_add_one(sum, n_vec, i, n_row, share, piece, value_part(words, u), n_lane);
        } else if (u % 2 == 0) {
            tile_add_one(sum, n_vec, i, i + 1, share, piece, FIRST, n_lane);
            tile_add_one(sum, n_vec, i + 1, n_row, share, piece, PAIR, n_lane);
        }
    }
}

/* y in n_vec vectors of columns from c on. */
static ALWAYS_INLINE void weigh_values(const struct attend *a, const int n_row, const int n_vec,
                                       const enum words words, const float *total, int c,
                                       int n_lane)
{
    const int n_common = a->pos + 1;
    tile_sums sum;
    tile_zero(sum, n_row, n_vec);
    for (int u = 0; u < n_common; u += KV_PAGE) {
        const int page = u / KV_PAGE;
        const int next = u + KV_PAGE < n_common ? page + 1 : page;
        struct tile_vec value[ATTEND_VECS(1)];
        UNROLL
        for (int v = 0; v < n_vec; v++) {
            const float *const from = a->v_pages + c + v * LANES;
            value[v] = (struct tile_vec){.from = from + a->page[page] * a->v_stride,
                                         .ahead = from + a->page[next] * a->v_stride};
        }
        const int n = n_common - u < KV_PAGE ? n_common - u : KV_PAGE;
        tile_add(sum, n_row, n_vec, words, a->score + (int64_t)page * TILE_CHUNK, value, a->d_head,
                 false, n_share(words, n), n_lane);
    }
    add_last_values(sum, a, n_row, n_vec, words, c, n_lane);
    tile_store_means(a->y + c, a->y_stride, sum, n_row, n_vec, total, n_lane);
}

static ALWAYS_INLINE void attend_rows(const struct attend *a, const int n_row,
                                      const enum words words)
{
    const int n_vec = ATTEND_VECS(n_row);
    const int group = n_vec / PAGE_VECS;
    const int n_page = (a->pos + n_row - 1) / KV_PAGE + 1;
    pack_query(a, TILE_CHUNK, n_row, words);
    int p = 0;
    for (; p + group <= n_page; p += group) {
        score_pages(a, n_row, group, words, p, n_page);
    }
    for (; p < n_page; p++) {
        score_pages(a, n_row, 1, words, p, n_page);
    }
    hide_later(a, TILE_CHUNK, n_row, n_page);
    float total[TILE_ROWS];
    exp_all(a, n_row, words, n_page, total);
    int c = 0;
    for (; c + n_vec * LANES <= a->d_head; c += n_vec * LANES) {
        weigh_values(a, n_row, n_vec, words, total, c, LANES);
    }
    for (; c < a->d_head; c += LANES) {
        weigh_values(a, n_row, 1, words, total, c, lanes_left(a->d_head, c));
    }
}

/* ---- one row, several heads --------------------------------------------------------------------
 *
 * Heads' pieces of a page lie side by side. Page by page they are one stream of memory; head by
 * head, a piece here and a piece there. */

/* A head's piece of a page, or of several from this one on. */
struct piece {
    const struct attend *head;
    int page;
};

/* The piece that is computed n pieces after that of head h of n_head and of n_page pages from page
 * on; the same one if there are not as many before page end. */
static ALWAYS_INLINE struct piece piece_after(const struct attend *head, int n_head, int h,
                                              int n_page, int page, int end, const int n)
{
    int next = h + n;
    int to = page;
    for (; next >= n_head; next -= n_head) {
        to += n_page;
    }
    return to + n_page <= end ? (struct piece){&head[next], to} : (struct piece){&head[h], page};
}

/* Scores of one head, whose query and scores are at a->query and a->score, for n_page pages from
 * first on. The keys of ahead and far, the pieces that follow, are prefetched. */
static ALWAYS_INLINE void score_head(const struct attend *a, const struct piece *ahead,
                                     const struct piece *far, const int n_page,
                                     const enum words words, int first)
{
    const int n_vec = n_page * PAGE_VECS;
    struct tile_vec key[ATTEND_VECS(1)];
    tile_sums sum;
    UNROLL
    for (int v = 0; v < n_vec; v++) {
        const int page = v / PAGE_VECS;
        const int lane = v % PAGE_VECS * LANES;
        key[v] = (struct tile_vec){
            .from = a->k_pages + a->page[first + page] * a->k_stride + lane,
            .ahead = ahead->head->k_pages + a->page[ahead->page + page] * a->k_stride + lane,
            .far = far->head->k_pages + a->page[far->page + page] * a->k_stride + lane};
    }
    tile_dots(sum, 1, n_vec, words, a->query, CHUNK, a->d_head, key, KV_PAGE, LANES);
    tile_store_pages(a->score + (int64_t)first * CHUNK, CHUNK, sum, 1, n_vec, LANES);
}

/* Adds page p of one head to the sums in n_vec vectors of y from column c on; after the last page
 * divides them by total. */
static ALWAYS_INLINE void weigh_page(const struct attend *a, const float *ahead, const float *far,
                                     const int n_vec, const enum words words, int p,
                                     const float *total, int c, int n_lane)
{
    const int left = a->pos + 1 - p * KV_PAGE;
    float *const y = a->y + c;
    tile_sums sum;
    struct tile_vec value[ATTEND_VECS(1)];
    UNROLL
    for (int v = 0; v < n_vec; v++) {
        const int64_t at = a->page[p] * a->v_stride + c + v * LANES;
        value[v] = (struct tile_vec){
            .from = a->v_pages + at, .ahead = ahead + c + v * LANES, .far = far + c + v * LANES};
        sum[0][v] = p == 0 ? v_set1(0) : v_load_n(y + v * LANES, n_lane);
    }
    const int n = left < KV_PAGE ? left : KV_PAGE;
    const float *const share = a->score + (int64_t)p * CHUNK;
    tile_add(sum, 1, n_vec, words, share, value, a->d_head, false, n_share(words, n), n_lane);
    if (words == PAIRS && n % 2 != 0) {
        tile_add_one(sum, n_vec, 0, 1, share + n / 2, value[0].from + (int64_t)(n / 2) * a->d_head,
                     FIRST, n_lane);
    }
    if (left <= KV_PAGE) {
        tile_store_means(y, a->y_stride, sum, 1, n_vec, total, n_lane);
        return;
    }
    UNROLL
    for (int v = 0; v < n_vec; v++) {
        v_store_n(y + v * LANES, sum[0][v], n_lane);
    }
}

static ALWAYS_INLINE void attend_heads(const struct attend *a, const enum words words)
{
    enum { VECS = ATTEND_VECS(1), PAGES = VECS / PAGE_VECS };
    const int n_page = a->pos / KV_PAGE + 1;
    const int64_t n_query = (int64_t)attend_columns(a->d_head);
    struct attend head[ATTEND_HEADS];
    float total[ATTEND_HEADS];
    for (int h = 0; h < a->n_head; h++) {
        head[h] = attend_head(a, h);
        head[h].query += h * n_query;
        head[h].score += (int64_t)h * n_page * CHUNK;
        pack_query(&head[h], CHUNK, 1, words);
    }
    for (int p = 0; p < n_page;) {
        const int n = p + PAGES <= n_page ? PAGES : 1;
        for (int h = 0; h < a->n_head; h++) {
            const struct piece ahead = piece_after(head, a->n_head, h, n, p, n_page, 1);
            const struct piece far = piece_after(head, a->n_head, h, n, p, n_page, 2);
            if (n == PAGES) {
                score_head(&head[h], &ahead, &far, PAGES, words, p);
            } else {
                score_head(&head[h], &ahead, &far, 1, words, p);
            }
        }
        p += n;
    }
    for (int h = 0; h < a->n_head; h++) {
        hide_later(&head[h], CHUNK, 1, n_page);
        exp_scores(head[h].score, CHUNK, 1, words, n_page, &total[h]);
    }
    for (int p = 0; p < n_page; p++) {
        for (int h = 0; h < a->n_head; h++) {
            const struct piece next = piece_after(head, a->n_head, h, 1, p, n_page, 1);
            const struct piece later = piece_after(head, a->n_head, h, 1, p, n_page, 2);
            const float *const ahead = next.head->v_pages + a->page[next.page] * a->v_stride;
            const float *const far = later.head->v_pages + a->page[later.page] * a->v_stride;
            int c = 0;
            for (; c + VECS * LANES <= a->d_head; c += VECS * LANES) {
                weigh_page(&head[h], ahead, far, VECS, words, p, &total[h], c, LANES);
            }
            for (; c < a->d_head; c += LANES) {
                weigh_page(&head[h], ahead, far, 1, words, p, &total[h], c,
                           lanes_left(a->d_head, c));
            }
        }
    }
}

static void attend_heads_floats(const struct attend *a)
{
    attend_heads(a, FLOATS);
}

static void attend_heads_widened(const struct attend *a)
{
    attend_heads(a, WIDENED);
}

#if defined(HAS_DOT_PAIRS)
static void attend_heads_pairs(const struct attend *a)
{
    attend_heads(a, PAIRS);
}
#endif

/* ---- several rows, one head ------------------------------------------------------------------ */

#define ATTEND(n, kind, words)                                                                     \
    static void attend_##kind##_##n(const struct attend *a)                                        \
    {                                                                                              \
        attend_rows(a, n, words);                                                                  \
    }
#define ATTEND_FLOATS(n) ATTEND(n, floats, FLOATS)
#define ATTEND_WIDENED(n) ATTEND(n, widened, WIDENED)
#define ATTEND_PAIRS(n) ATTEND(n, pairs, PAIRS)
EACH_TILE(ATTEND_FLOATS)
EACH_PAIRS_TILE(ATTEND_WIDENED)
#if defined(HAS_DOT_PAIRS)
EACH_PAIRS_TILE(ATTEND_PAIRS)
#endif

struct size {
    int n_row;
    void (*attend)(const struct attend *);
};

/* By kind of words. */
#define SIZE_FLOATS(n) {n, attend_floats_##n},
#define SIZE_WIDENED(n) {n, attend_widened_##n},
#define SIZE_PAIRS(n) {n, attend_pairs_##n},
static const struct size sizes_floats[] = {EACH_TILE(SIZE_FLOATS)};
static const struct size sizes_widened[] = {EACH_PAIRS_TILE(SIZE_WIDENED)};
#if defined(HAS_DOT_PAIRS)
static const struct size sizes_pairs[] = {EACH_PAIRS_TILE(SIZE_PAIRS)};
#endif

static const struct {
    void (*heads)(const struct attend *);
    const struct size *sizes;
} kinds[] = {
    [FLOATS] = {attend_heads_floats, sizes_floats},
    [WIDENED] = {attend_heads_widened, sizes_widened},
#if defined(HAS_DOT_PAIRS)
    [PAIRS] = {attend_heads_pairs, sizes_pairs},
#endif
};

static void attend_tiles(const struct attend *a, const struct size *size)
{
    for (int r = 0; r < a->n_row; r += size->n_row) {
        while (size->n_row > a->n_row - r) {
            size++;
        }
        struct attend part = *a;
        part.y += r * a->y_stride;
        part.q += r * a->q_stride;
        part.pos += r;
        size->attend(&part);
    }
}

void SIMD(attend)(const struct attend *a)
{
    const enum words words = !a->is_pairs ? FLOATS : a->by_pairs ? PAIRS : WIDENED;
    if (a->n_row == 1) {
        kinds[words].heads(a);
        return;
    }
    for (int h = 0; h < a->n_head; h++) {
        const struct attend head = attend_head(a, h);
        attend_tiles(&head, kinds[words].sizes);
    }
}
