/* Causal attention of a few consecutive rows and one head over the pages of the cache.
 *
 * Scores: 16 positions are one cache line of a key page, and a chain of multiply-adds runs over the
 * head's columns; pages and rows are independent chains that hide the latency. Values: a chain over
 * positions per column. Up to ATTEND_ROWS rows share every load of the cache. Each score, share and
 * sum is formed in the same order whichever rows stand beside it.
 * Bytes: 8·d_head per position and row group; flops: 4·d_head per position and row. */
#include "kernels/cpu/simd/internal.h"
#include "kernels/cpu/simd/vmath.h"

#include <math.h>

enum { PAGE_VECS = KV_PAGE / LANES };

/* Rows taken together; for n of them the key pages in flight, and the vectors of value columns:
 * what fits the registers. */
#if defined(ISA_AVX512)
#define ROWS 8
#define PAGE_GROUP(n) ((n) == 1 ? 4 : 2)
#define VALUE_VECS(n) ((n) <= 4 ? 4 : 2)
#else
#define ROWS 4
#define PAGE_GROUP(n) ((n) == 1 ? 2 : 1)
#define VALUE_VECS(n) 2
#endif

void SIMD(kv_row)(float *k_page, float *v_page, const float *k, const float *v, int offset,
                  int n_head, int d_head)
{
    for (int h = 0; h < n_head; h++) {
        float *const k_piece = k_page + (int64_t)h * KV_PAGE * d_head;
        float *const v_piece = v_page + (int64_t)h * KV_PAGE * d_head;
        for (int c = 0; c < d_head; c++) {
            k_piece[(int64_t)c * KV_PAGE + offset] = k[(int64_t)h * d_head + c];
        }
        memcpy(v_piece + (int64_t)offset * d_head, v + (int64_t)h * d_head,
               sizeof *v * (size_t)d_head);
    }
}

/* Columns of q that are packed at a time: chunks of KV_PAGE columns of each row after each other,
 * so that all rows are reached by one pointer with constant offsets. Scores lie the same way:
 * [page] [ROWS][KV_PAGE]. With a stride per row the addresses alone took half of the time. */
enum { Q_COLS = 64, PAGE_SCORES = ROWS * KV_PAGE };

static void pack_q(float *to, const struct attend *a, int col, int n_col)
{
    for (int r = 0; r < a->n_row; r++) {
        const float *const from = a->q + r * a->q_stride + col;
        for (int c = 0; c < n_col; c++) {
            to[(c / KV_PAGE * ROWS + r) * KV_PAGE + c % KV_PAGE] = from[c];
        }
    }
}

/* Adds the products of column c+i of the packed q and of the pages. */
static ALWAYS_INLINE void add_column(vf sum[ROWS][PAGE_GROUP(1)][PAGE_VECS], const int n_row,
                                     const int n_page, const float *const *piece, const float *q,
                                     int c, int i)
{
    const float *const in = q + c / KV_PAGE * PAGE_SCORES + i;
    UNROLL
    for (int p = 0; p < n_page; p++) {
        UNROLL
        for (int v = 0; v < PAGE_VECS; v++) {
            const vf key = v_load(piece[p] + (int64_t)(c + i) * KV_PAGE + v * LANES);
            UNROLL
            for (int r = 0; r < n_row; r++) {
                sum[r][p][v] = v_fma(v_set1(in[r * KV_PAGE]), key, sum[r][p][v]);
            }
        }
    }
}

/* Adds n_col columns from column col on to the scores of n_row rows and n_page pages. */
static ALWAYS_INLINE void score_pages(const struct attend *a, const int n_row, const int n_page,
                                      int first, const float *q, int col, int n_col)
{
    float *const score = a->score + (int64_t)first * PAGE_SCORES;
    const float *piece[PAGE_GROUP(1)];
    vf sum[ROWS][PAGE_GROUP(1)][PAGE_VECS];
    UNROLL
    for (int p = 0; p < n_page; p++) {
        piece[p] = a->k_pages + a->page[first + p] * a->k_stride + (int64_t)col * KV_PAGE;
        UNROLL
        for (int r = 0; r < n_row; r++) {
            UNROLL
            for (int v = 0; v < PAGE_VECS; v++) {
                const float *const from = score + p * PAGE_SCORES + r * KV_PAGE + v * LANES;
                sum[r][p][v] = col == 0 ? v_set1(0) : v_load(from);
            }
        }
    }
    for (int c = 0; c < n_col; c += KV_PAGE) {
        const int n = n_col - c < KV_PAGE ? n_col - c : KV_PAGE;
        if (n == KV_PAGE) {
            UNROLL_4
            for (int i = 0; i < KV_PAGE; i++) {
                add_column(sum, n_row, n_page, piece, q, c, i);
            }
        } else {
            for (int i = 0; i < n; i++) {
                add_column(sum, n_row, n_page, piece, q, c, i);
            }
        }
    }
    UNROLL
    for (int r = 0; r < n_row; r++) {
        UNROLL
        for (int p = 0; p < n_page; p++) {
            UNROLL
            for (int v = 0; v < PAGE_VECS; v++) {
                v_store(score + p * PAGE_SCORES + r * KV_PAGE + v * LANES, sum[r][p][v]);
            }
        }
    }
}

static ALWAYS_INLINE void score_all(const struct attend *a, const int n_row, int n_page)
{
    const int group = PAGE_GROUP(n_row);
    for (int col = 0; col < a->d_head; col += Q_COLS) {
        float q[ROWS * Q_COLS];
        const int n_col = a->d_head - col < Q_COLS ? a->d_head - col : Q_COLS;
        pack_q(q, a, col, n_col);
        int p = 0;
        for (; p + group <= n_page; p += group) {
            score_pages(a, n_row, group, p, q, col, n_col);
        }
        for (; p < n_page; p++) {
            score_pages(a, n_row, 1, p, q, col, n_col);
        }
    }
}

/* Turns a row's scores of positions 0 .. n-1 into exp(scale · score - max), 0 up to the end of the
 * page, and returns their sum. */
static float exp_scores(float *score, int n, float scale)
{
    const int n_page = (n + KV_PAGE - 1) / KV_PAGE;
    float *const last = score + (int64_t)(n_page - 1) * PAGE_SCORES;
    for (int u = 0; u < n - (n_page - 1) * KV_PAGE; u++) {
        last[u] *= scale;
    }
    for (int u = n - (n_page - 1) * KV_PAGE; u < KV_PAGE; u++) {
        last[u] = -INFINITY; /* positions that are not written yet, or hold another's data */
    }
    vf best = v_set1(-INFINITY);
    for (int p = 0; p < n_page; p++) {
        for (int u = 0; u < KV_PAGE; u += LANES) {
            float *const at = score + (int64_t)p * PAGE_SCORES + u;
            const vf scaled = v_load(at) * (p + 1 < n_page ? scale : 1.0f);
            best = v_max(scaled, best);
            v_store(at, scaled);
        }
    }
    const float max = v_max_of(best);
    vf sum = v_set1(0);
    for (int p = 0; p < n_page; p++) {
        for (int u = 0; u < KV_PAGE; u += LANES) {
            float *const at = score + (int64_t)p * PAGE_SCORES + u;
            const vf e = v_exp(v_load(at) - max);
            v_store(at, e);
            sum = sum + e;
        }
    }
    return v_sum(sum);
}

/* Adds the value of position u of one page to n_row rows from row on, columns c .. of n_vec
 * vectors.
 */
static ALWAYS_INLINE void add_value(vf sum[ROWS][VALUE_VECS(1)], const struct attend *a,
                                    const int row, const int n_row, const int n_vec,
                                    const float *piece, const float *score, int u)
{
    UNROLL
    for (int v = 0; v < n_vec; v++) {
        const vf value = v_load(piece + (int64_t)u * a->d_head + v * LANES);
        UNROLL
        for (int r = row; r < row + n_row; r++) {
            sum[r][v] = v_fma(v_set1(score[r * KV_PAGE + u]), value, sum[r][v]);
        }
    }
}

/* The same for positions first .. first+n-1. */
static ALWAYS_INLINE void add_values(vf sum[ROWS][VALUE_VECS(1)], const struct attend *a,
                                     const int row, const int n_row, const int n_vec, int page,
                                     int first, int n, int c)
{
    const float *const piece = a->v_pages + a->page[page] * a->v_stride + c;
    const float *const score = a->score + (int64_t)page * PAGE_SCORES;
    if (n == KV_PAGE) {
        UNROLL_4
        for (int u = 0; u < KV_PAGE; u++) {
            add_value(sum, a, row, n_row, n_vec, piece, score, u);
        }
        return;
    }
    for (int u = first; u < first + n; u++) {
        add_value(sum, a, row, n_row, n_vec, piece, score, u);
    }
}

/* Rows of a group end at consecutive positions: what all see is added for all, the rest by row. A
 * share of 0 is not enough to keep a position out, because 0 · NaN is NaN. */
static ALWAYS_INLINE void weigh_values(const struct attend *a, const int n_row, const int n_vec,
                                       const float *total, int c)
{
    vf sum[ROWS][VALUE_VECS(1)];
    UNROLL
    for (int r = 0; r < n_row; r++) {
        UNROLL
        for (int v = 0; v < n_vec; v++) {
            sum[r][v] = v_set1(0);
        }
    }
    const int n_common = a->pos + 1;
    for (int u = 0; u < n_common; u += KV_PAGE) {
        const int n = n_common - u < KV_PAGE ? n_common - u : KV_PAGE;
        add_values(sum, a, 0, n_row, n_vec, u / KV_PAGE, 0, n, c);
    }
    UNROLL
    for (int r = 1; r < n_row; r++) {
        for (int u = n_common; u < n_common + r; u++) {
            add_values(sum, a, r, 1, n_vec, u / KV_PAGE, u % KV_PAGE, 1, c);
        }
    }
    UNROLL
    for (int r = 0; r < n_row; r++) {
        UNROLL
        for (int v = 0; v < n_vec; v++) {
            v_store(a->y + r * a->y_stride + c + v * LANES, sum[r][v] / total[r]);
        }
    }
}

/* The columns that fill no vector, one by one, in the same order of positions. */
static void weigh_column(const struct attend *a, const float *total, int c)
{
    for (int r = 0; r < a->n_row; r++) {
        float sum = 0;
        for (int u = 0; u <= a->pos + r; u++) {
            const int page = u / KV_PAGE;
            const float *const piece = a->v_pages + a->page[page] * a->v_stride;
            const float share = a->score[(int64_t)page * PAGE_SCORES + r * KV_PAGE + u % KV_PAGE];
            sum += share * piece[(int64_t)(u % KV_PAGE) * a->d_head + c];
        }
        a->y[r * a->y_stride + c] = sum / total[r];
    }
}

static ALWAYS_INLINE void attend_rows(const struct attend *a, const int n_row)
{
    float total[ROWS];
    score_all(a, n_row, (a->pos + n_row - 1) / KV_PAGE + 1);
    for (int r = 0; r < n_row; r++) {
        total[r] = exp_scores(a->score + r * KV_PAGE, a->pos + r + 1, a->scale);
    }
    int c = 0;
    for (; c + VALUE_VECS(n_row) * LANES <= a->d_head; c += VALUE_VECS(n_row) * LANES) {
        weigh_values(a, n_row, VALUE_VECS(n_row), total, c);
    }
    for (; c + LANES <= a->d_head; c += LANES) {
        weigh_values(a, n_row, 1, total, c);
    }
    for (; c < a->d_head; c++) {
        weigh_column(a, total, c);
    }
}

static void attend_up_to_rows(const struct attend *a)
{
    switch (a->n_row) {
    case 1: attend_rows(a, 1); break;
    case 2: attend_rows(a, 2); break;
    case 3: attend_rows(a, 3); break;
#if ROWS == 8
    case 4: attend_rows(a, 4); break;
    case 5: attend_rows(a, 5); break;
    case 6: attend_rows(a, 6); break;
    case 7: attend_rows(a, 7); break;
#endif
    default: attend_rows(a, ROWS); break;
    }
}

void SIMD(attend)(const struct attend *a)
{
    CHECK(a->n_row >= 1 && a->n_row <= ATTEND_ROWS);
    for (int r = 0; r < a->n_row; r += ROWS) {
        struct attend part = *a;
        part.y += r * a->y_stride;
        part.q += r * a->q_stride;
        part.pos += r;
        part.n_row = a->n_row - r < ROWS ? a->n_row - r : ROWS;
        attend_up_to_rows(&part);
    }
}
