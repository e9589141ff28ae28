/* Attention of consecutive rows and one head over their windows of the cache and over persistent
 * keys.
 *
 * q·(k + p) is taken as q·k + q·p, so that a tile of rows can be multiplied by a page of keys,
 * whose positions are the same for all rows, and a block of distances, whose positions are not:
 * sums with keys lie by position, those with distances by distance, and both are added shifted by
 * the row's own position.
 *
 *   score: pages of the window, then of persistent keys, [page][row][16]   column 0 = position u0
 *   distance: [row][PAD + window + PAD]                 column PAD + i = position pos - window + i
 *
 * Every score, share and sum is formed in an order that the row's position and window give, so its
 * bits are the same whatever other rows share the tile. Bytes: 8·d_head per key and tile; flops:
 * 6·d_head per distance and row, 4 per persistent key. Bound: multiply-adds, with many rows. */
#include "kernels/cpu/simd/tile.h"
#include "kernels/cpu/simd/vmath.h"

#include <math.h>

/* A tile of rows at work. */
struct span_tile {
    const struct attend_span *a;
    const float *q;
    float *y;
    float *query, *score, *distance, *mask; /* scratch */
    int64_t distance_stride;
    int pos;    /* of the first row */
    int u0;     /* position of column 0 of the score */
    int n_page; /* pages of the score that belong to the window */
    int n_key_page;
    int reach; /* distances 1 .. reach count for values; farther ones have a mask of 0 */
};

/* The head's piece of the page of position u >= 0. */
static const float *piece_of(const struct attend_span *a, const float *pages, int64_t stride, int u)
{
    return pages + a->page[u / KV_PAGE % a->n_page] * stride;
}

/* ---- scores -----------------------------------------------------------------------------------*/

/* Scores of n_page pages of the window from page number first on; before the text, keys are 0. */
static ALWAYS_INLINE void score_pages(const struct span_tile *t, const int n_row, const int n_page,
                                      const enum words words, int first)
{
    const struct attend_span *const a = t->a;
    const int n_vec = n_page * PAGE_VECS;
    struct tile_vec key[ATTEND_VECS(1)];
    tile_sums sum;
    UNROLL
    for (int v = 0; v < n_vec; v++) {
        const int page = first + v / PAGE_VECS;
        const int next = page + n_page < t->n_page ? page + n_page : page;
        const int64_t lane = v % PAGE_VECS * LANES;
        key[v] = (struct tile_vec){
            .from = piece_of(a, a->k_pages, a->k_stride, t->u0 + page * KV_PAGE) + lane,
            .ahead = piece_of(a, a->k_pages, a->k_stride, t->u0 + next * KV_PAGE) + lane};
    }
    tile_dots(sum, n_row, n_vec, words, t->query, TILE_CHUNK, a->d_head, key, KV_PAGE, LANES);
    tile_store_pages(t->score + (int64_t)first * TILE_CHUNK, TILE_CHUNK, sum, n_row, n_vec, LANES);
}

/* Sums in n_vec vectors of columns from i on, over a table whose rows are the columns of the
 * head. */
static ALWAYS_INLINE void score_columns(const struct span_tile *t, tile_sums sum, const int n_row,
                                        const int n_vec, const float *table, int64_t stride, int i,
                                        int n_lane)
{
    struct tile_vec key[ATTEND_VECS(1)];
    UNROLL
    for (int v = 0; v < n_vec; v++) { /* each row is in a page of its own: nothing to prefetch */
        const float *const from = table + i + v * LANES;
        key[v] = (struct tile_vec){.from = from, .ahead = from};
    }
    tile_dots(sum, n_row, n_vec, FLOATS, t->query, TILE_CHUNK, t->a->d_head, key, stride, n_lane);
}

static ALWAYS_INLINE void score_distances(const struct span_tile *t, const int n_row,
                                          const int n_vec, int i, int n_lane)
{
    tile_sums sum;
    score_columns(t, sum, n_row, n_vec, t->a->position, t->a->position_stride, i, n_lane);
    UNROLL
    for (int r = 0; r < n_row; r++) {
        UNROLL
        for (int v = 0; v < n_vec; v++) {
            v_store(t->distance + r * t->distance_stride + SPAN_PAD + i + v * LANES, sum[r][v]);
        }
    }
}

static ALWAYS_INLINE void score_persistent(const struct span_tile *t, const int n_row,
                                           const int n_vec, int i, int n_lane)
{
    tile_sums sum;
    float *const score = t->score + (int64_t)t->n_page * TILE_CHUNK;
    score_columns(t, sum, n_row, n_vec, t->a->key, t->a->key_stride, i, n_lane);
    tile_store_pages(score + (int64_t)(i / KV_PAGE) * TILE_CHUNK + i % KV_PAGE, TILE_CHUNK, sum,
                     n_row, n_vec, n_lane);
}

static ALWAYS_INLINE void score_all(const struct span_tile *t, const int n_row,
                                    const enum words words)
{
    const struct attend_span *const a = t->a;
    const int n_vec = ATTEND_VECS(n_row);
    const int group = n_vec / PAGE_VECS;
    int p = 0;
    for (; p < t->n_page && t->u0 + p * KV_PAGE < 0; p++) {
        memset(t->score + (int64_t)p * TILE_CHUNK, 0, TILE_CHUNK * sizeof *t->score);
    }
    for (; p + group <= t->n_page; p += group) {
        score_pages(t, n_row, group, words, p);
    }
    for (; p < t->n_page; p++) {
        score_pages(t, n_row, 1, words, p);
    }
    int i = 0;
    for (; i + n_vec * LANES <= a->window; i += n_vec * LANES) {
        score_distances(t, n_row, n_vec, i, LANES);
    }
    for (; i < a->window; i += LANES) {
        score_distances(t, n_row, 1, i, lanes_left(a->window, i));
    }
    for (i = 0; i + n_vec * LANES <= a->n_persistent; i += n_vec * LANES) {
        score_persistent(t, n_row, n_vec, i, LANES);
    }
    for (; i < a->n_persistent; i += LANES) {
        score_persistent(t, n_row, 1, i, lanes_left(a->n_persistent, i));
    }
}

/* ---- shares -----------------------------------------------------------------------------------*/

/* Column of the window at which row r's page begins; it may lie outside. */
static int column_of(const struct span_tile *t, int r, int page)
{
    return t->u0 + page * KV_PAGE - (t->pos + r - t->a->window);
}

/* Adds the sums with distances to the scores of row r from column i of its window on; -infinity
 * outside of the window. */
static ALWAYS_INLINE vf join(const struct span_tile *t, int r, int i, const float *score)
{
    const vf sum = v_load(score) + v_load(t->distance + r * t->distance_stride + SPAN_PAD + i);
    const vu column = (vu)(v_lane() + i);
    return v_select(column < (uint32_t)t->a->window, sum, v_set1(-INFINITY));
}

/* Turns the scores of n_row rows from row on into shares, e^(score - max) times the mask, and
 * writes what they are divided by to total. Rows in step: see v_exp_n. */
static ALWAYS_INLINE void share(const struct span_tile *t, const int row, const int n_row,
                                float *total)
{
    float *const begin = t->score + row * KV_PAGE;
    const int n_page = t->n_page + t->n_key_page;
    vf max[EXP_VECS];
    vf all[EXP_VECS];
    vf kept[EXP_VECS];
    UNROLL
    for (int r = 0; r < n_row; r++) {
        max[r] = v_set1(-INFINITY);
        all[r] = kept[r] = v_set1(0);
    }
    for (int p = 0; p < n_page; p++) {
        for (int u = 0; u < KV_PAGE; u += LANES) {
            UNROLL
            for (int r = 0; r < n_row; r++) {
                float *const at = begin + (int64_t)p * TILE_CHUNK + r * KV_PAGE + u;
                if (p < t->n_page) {
                    v_store(at, join(t, row + r, column_of(t, row + r, p) + u, at));
                }
                max[r] = v_max(v_load(at), max[r]);
            }
        }
    }
    UNROLL
    for (int r = 0; r < n_row; r++) {
        max[r] = v_set1(v_max_of(max[r]));
    }
    for (int p = 0; p < n_page; p++) {
        for (int u = 0; u < KV_PAGE; u += LANES) {
            float *const at = begin + (int64_t)p * TILE_CHUNK + u;
            vf e[EXP_VECS];
            UNROLL
            for (int r = 0; r < n_row; r++) {
                e[r] = v_load(at + r * KV_PAGE) - max[r];
            }
            v_exp_n(e, n_row);
            UNROLL
            for (int r = 0; r < n_row; r++) {
                all[r] = all[r] + e[r];
                if (p < t->n_page) {
                    e[r] = e[r] * v_load(t->mask + SPAN_PAD + column_of(t, row + r, p) + u);
                }
                kept[r] = kept[r] + e[r];
                v_store(at + r * KV_PAGE, e[r]);
            }
        }
    }
    UNROLL
    for (int r = 0; r < n_row; r++) {
        total[r] = v_sum(kept[r]);
        if (t->a->mask != NULL) {
            total[r] = total[r] + SPAN_EPSILON * v_sum(all[r]);
        }
    }
}

static void share_all(const struct span_tile *t, int n_row, float *total)
{
    const int in_step = n_row / EXP_VECS * EXP_VECS;
    for (int r = 0; r < in_step; r += EXP_VECS) {
        share(t, r, EXP_VECS, total + r);
    }
    for (int r = in_step; r < n_row; r++) {
        share(t, r, 1, total + r);
    }
}

/* ---- values -----------------------------------------------------------------------------------*/

/* Adds the value of position u to rows from .. to-1 of the tile. */
static ALWAYS_INLINE void add_position(const struct span_tile *t, tile_sums sum, const int n_vec,
                                       const enum words words, const int from, const int to,
                                       int row, int u, int c, int n_lane)
{
    const float *const piece = piece_of(t->a, t->a->v_pages, t->a->v_stride, u) + c;
    tile_add_one(sum, n_vec, from, to,
                 t->score + (int64_t)((u - t->u0) / KV_PAGE) * TILE_CHUNK + row * KV_PAGE +
                     u % KV_PAGE,
                 piece + value_row(words, u) * t->a->d_head, value_part(words, u), n_lane);
}

/* The values of the window. Rows of a tile begin and end at consecutive positions: what all see is
 * added for all, the rest by position and row. */
static ALWAYS_INLINE void add_window(const struct span_tile *t, tile_sums sum, int row,
                                     const int n_row, const int n_vec, const enum words words,
                                     int c, int n_lane)
{
    const struct attend_span *const a = t->a;
    const int pos = t->pos + row;
    UNROLL
    for (int i = 0; i + 1 < n_row; i++) {
        if (pos - t->reach + i >= 0) {
            add_position(t, sum, n_vec, words, 0, i + 1, row, pos - t->reach + i, c, n_lane);
        }
    }
    const int first = pos + n_row - 1 - t->reach > 0 ? pos + n_row - 1 - t->reach : 0;
    for (int u = first; u < pos; u += KV_PAGE - u % KV_PAGE) {
        const int offset = u % KV_PAGE;
        const int n = pos - u < KV_PAGE - offset ? pos - u : KV_PAGE - offset;
        const int next = u + KV_PAGE < pos ? u + KV_PAGE : u;
        struct tile_vec value[ATTEND_VECS(1)];
        UNROLL
        for (int v = 0; v < n_vec; v++) {
            const int64_t at = value_row(words, u) * a->d_head + c + v * LANES;
            value[v] = (struct tile_vec){.from = piece_of(a, a->v_pages, a->v_stride, u) + at,
                                         .ahead = piece_of(a, a->v_pages, a->v_stride, next) + at};
        }
        tile_add(sum, n_row, n_vec, words,
                 t->score + (int64_t)((u - t->u0) / KV_PAGE) * TILE_CHUNK + row * KV_PAGE + offset,
                 value, a->d_head, offset % 2 != 0, n, n_lane);
    }
    UNROLL
    for (int i = 1; i < n_row; i++) {
        add_position(t, sum, n_vec, words, i, n_row, row, pos + i - 1, c, n_lane);
    }
}

static ALWAYS_INLINE void add_persistent(const struct span_tile *t, tile_sums sum, int row,
                                         const int n_row, const int n_vec, int c, int n_lane)
{
    const struct attend_span *const a = t->a;
    const float *score = t->score + (int64_t)t->n_page * TILE_CHUNK + row * KV_PAGE;
    for (int i = 0; i < a->n_persistent; i += KV_PAGE) {
        const int n = a->n_persistent - i < KV_PAGE ? a->n_persistent - i : KV_PAGE;
        const int next = i + 2 * KV_PAGE <= a->n_persistent ? i + KV_PAGE : i;
        struct tile_vec value[ATTEND_VECS(1)];
        UNROLL
        for (int v = 0; v < n_vec; v++) {
            const float *const from = a->value + c + v * LANES;
            value[v] = (struct tile_vec){.from = from + i * a->value_stride,
                                         .ahead = from + next * a->value_stride};
        }
        tile_add(sum, n_row, n_vec, FLOATS, score, value, a->value_stride, false, n, n_lane);
        score += TILE_CHUNK;
    }
}

/* y of n_row rows from row on in n_vec vectors of columns from c on. */
static ALWAYS_INLINE void weigh_values(const struct span_tile *t, int row, const int n_row,
                                       const int n_vec, const enum words words, const float *total,
                                       int c, int n_lane)
{
    tile_sums sum;
    tile_zero(sum, n_row, n_vec);
    if (t->reach > 0) {
        add_window(t, sum, row, n_row, n_vec, words, c, n_lane);
    }
    add_persistent(t, sum, row, n_row, n_vec, c, n_lane);
    tile_store_means(t->y + row * t->a->y_stride + c, t->a->y_stride, sum, n_row, n_vec,
                     total + row, n_lane);
}

static ALWAYS_INLINE void weigh_rows(const struct span_tile *t, int row, const int n_row,
                                     const enum words words, const float *total)
{
    const int n_vec = ATTEND_VECS(n_row);
    const int d_head = t->a->d_head;
    int c = 0;
    for (; c + n_vec * LANES <= d_head; c += n_vec * LANES) {
        weigh_values(t, row, n_row, n_vec, words, total, c, LANES);
    }
    for (; c < d_head; c += LANES) {
        weigh_values(t, row, n_row, 1, words, total, c, lanes_left(d_head, c));
    }
}

static void weigh_row(const struct span_tile *t, int row, const float *total)
{
    weigh_rows(t, row, 1, false, total);
}

static void weigh_row_pairs(const struct span_tile *t, int row, const float *total)
{
    weigh_rows(t, row, 1, true, total);
}

/* ---- a tile -----------------------------------------------------------------------------------*/

static ALWAYS_INLINE void attend_rows(const struct span_tile *t, const int n_row,
                                      const enum words words)
{
    float total[TILE_ROWS];
    tile_pack(t->query, TILE_CHUNK, t->q, t->a->q_stride, n_row, t->a->d_head, t->a->scale);
    score_all(t, n_row, words);
    share_all(t, n_row, total);
    if (n_row == 1 || t->reach == 0 || t->reach >= n_row) {
        weigh_rows(t, 0, n_row, words, total);
        return;
    }
    for (int r = 0; r < n_row; r++) { /* no position is seen by all */
        (words == WIDENED ? weigh_row_pairs : weigh_row)(t, r, total);
    }
}

#define ATTEND(n)                                                                                  \
    static void attend_##n(const struct span_tile *t)                                              \
    {                                                                                              \
        attend_rows(t, n, FLOATS);                                                                 \
    }
#define ATTEND_PAIRS(n)                                                                            \
    static void attend_pairs_##n(const struct span_tile *t)                                        \
    {                                                                                              \
        attend_rows(t, n, WIDENED);                                                                \
    }
EACH_TILE(ATTEND)
EACH_PAIRS_TILE(ATTEND_PAIRS)

/* The mask with zeros on both sides, so that what lies outside of a window is 0. */
static int pad_mask(float *to, const struct attend_span *a)
{
    memset(to, 0, SPAN_PAD * sizeof *to);
    memset(to + SPAN_PAD + a->window, 0, SPAN_PAD * sizeof *to);
    int n_zero = 0;
    bool is_zero = true;
    for (int i = 0; i < a->window; i++) {
        to[SPAN_PAD + i] = a->mask != NULL ? a->mask[i] : 1;
        is_zero = is_zero && to[SPAN_PAD + i] == 0;
        n_zero += is_zero;
    }
    return a->window - n_zero;
}

/* Places the first row of a tile. Persistent keys that fill no page are followed by -infinity. */
static void place(struct span_tile *t, int row, int n_row)
{
    const struct attend_span *const a = t->a;
    t->pos = a->pos + row;
    t->q = a->q + row * a->q_stride;
    t->y = a->y + row * a->y_stride;
    const int first = t->pos - a->window;
    t->u0 = (first >= 0 ? first : first - KV_PAGE + 1) / KV_PAGE * KV_PAGE;
    t->n_page = a->window > 0 ? (t->pos + n_row - 2 - t->u0) / KV_PAGE + 1 : 0;
    if (a->n_persistent % KV_PAGE != 0) {
        float *const last = t->score + (int64_t)(t->n_page + t->n_key_page - 1) * TILE_CHUNK;
        for (int i = 0; i < TILE_CHUNK; i++) {
            last[i] = -INFINITY;
        }
    }
}

struct size {
    int n_row;
    void (*attend)(const struct span_tile *);
};

void SIMD(attend_span)(const struct attend_span *a)
{
#define TILE(n) {n, attend_##n},
#define TILE_PAIRS(n) {n, attend_pairs_##n},
    static const struct size tiles[] = {EACH_TILE(TILE)};
    static const struct size pairs_tiles[] = {EACH_PAIRS_TILE(TILE_PAIRS)};
    struct span_tile t = {.a = a,
                          .mask = a->scratch,
                          .distance_stride = (int64_t)span_row_floats(a->window),
                          .n_key_page = (a->n_persistent + KV_PAGE - 1) / KV_PAGE};
    t.distance = t.mask + t.distance_stride;
    t.query = t.distance + TILE_ROWS * t.distance_stride;
    t.score = t.query + attend_columns(a->d_head) * TILE_ROWS;
    t.reach = pad_mask(t.mask, a);
    const struct size *size = a->is_pairs ? pairs_tiles : tiles;
    for (int r = 0; r < a->n_row; r += size->n_row) {
        while (size->n_row > a->n_row - r) {
            size++;
        }
        place(&t, r, size->n_row);
        size->attend(&t);
    }
}
