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

/* Key pages in flight for n rows, and vectors of value columns: what fits the registers. */
#if defined(ISA_AVX512)
#define PAGE_GROUP(n) ((n) == 1 ? 4 : 2)
#define VALUE_VECS 4
#else
#define PAGE_GROUP(n) ((n) == 1 ? 2 : 1)
#define VALUE_VECS 2
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

/* Scores of n_row rows for n_page pages from page first on. */
static ALWAYS_INLINE void score_pages(const struct attend *a, const int n_row, const int n_page,
                                      int first)
{
    const float *piece[PAGE_GROUP(1)];
    vf sum[ATTEND_ROWS][PAGE_GROUP(1)][PAGE_VECS];
    UNROLL
    for (int p = 0; p < n_page; p++) {
        piece[p] = a->k_pages + a->page[first + p] * a->k_stride;
        UNROLL
        for (int r = 0; r < n_row; r++) {
            UNROLL
            for (int v = 0; v < PAGE_VECS; v++) {
                sum[r][p][v] = v_set1(0);
            }
        }
    }
    for (int c = 0; c < a->d_head; c++) {
        UNROLL
        for (int p = 0; p < n_page; p++) {
            UNROLL
            for (int v = 0; v < PAGE_VECS; v++) {
                const vf key = v_load(piece[p] + (int64_t)c * KV_PAGE + v * LANES);
                UNROLL
                for (int r = 0; r < n_row; r++) {
                    sum[r][p][v] = v_fma(v_set1(a->q[r * a->q_stride + c]), key, sum[r][p][v]);
                }
            }
        }
    }
    UNROLL
    for (int r = 0; r < n_row; r++) {
        UNROLL
        for (int p = 0; p < n_page; p++) {
            UNROLL
            for (int v = 0; v < PAGE_VECS; v++) {
                v_store(a->score + r * a->score_stride + (int64_t)(first + p) * KV_PAGE + v * LANES,
                        sum[r][p][v] * a->scale);
            }
        }
    }
}

static ALWAYS_INLINE void score_all(const struct attend *a, const int n_row, const int group,
                                    int n_page)
{
    int p = 0;
    for (; p + group <= n_page; p += group) {
        score_pages(a, n_row, group, p);
    }
    for (; p < n_page; p++) {
        score_pages(a, n_row, 1, p);
    }
}

/* Turns the scores of positions 0 .. n-1 into exp(score - max), 0 up to the end of the page, and
 * returns their sum. */
static float exp_scores(float *score, int n)
{
    const int n_full = n / LANES * LANES;
    vf best = v_set1(-INFINITY);
    for (int u = 0; u < n_full; u += LANES) {
        best = v_max(v_load(score + u), best);
    }
    float max = v_max_of(best);
    for (int u = n_full; u < n; u++) {
        max = score[u] > max ? score[u] : max;
    }
    const int end = (n + KV_PAGE - 1) / KV_PAGE * KV_PAGE;
    for (int u = n; u < end; u++) {
        score[u] = -INFINITY; /* positions that are not written yet, or hold another's data */
    }
    vf sum = v_set1(0);
    for (int u = 0; u < end; u += LANES) {
        const vf e = v_exp(v_load(score + u) - max);
        v_store(score + u, e);
        sum = sum + e;
    }
    return v_sum(sum);
}

/* Adds the values of positions first .. first+n-1 of one page, columns c .. of n_vec vectors. */
static ALWAYS_INLINE void add_values(vf sum[ATTEND_ROWS][VALUE_VECS], const struct attend *a,
                                     const int row, const int n_row, const int n_vec, int page,
                                     int first, int n, int c)
{
    const float *const piece = a->v_pages + a->page[page] * a->v_stride + c;
    const float *const score = a->score + (int64_t)page * KV_PAGE;
    for (int u = first; u < first + n; u++) {
        UNROLL
        for (int v = 0; v < n_vec; v++) {
            const float *const from = piece + (int64_t)u * a->d_head + v * LANES;
            const vf value = v_load(from);
            UNROLL
            for (int r = row; r < row + n_row; r++) {
                sum[r][v] = v_fma(v_set1(score[r * a->score_stride + u]), value, sum[r][v]);
            }
        }
    }
}

/* Rows of a group end at consecutive positions: what all see is added for all, the rest by row. A
 * share of 0 is not enough to keep a position out, because 0 · NaN is NaN. */
static ALWAYS_INLINE void weigh_values(const struct attend *a, const int n_row, const int n_vec,
                                       const float *total, int c)
{
    vf sum[ATTEND_ROWS][VALUE_VECS];
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
static void weigh_column(const struct attend *a, int n_row, const float *total, int c)
{
    for (int r = 0; r < n_row; r++) {
        const float *const score = a->score + r * a->score_stride;
        float sum = 0;
        for (int u = 0; u <= a->pos + r; u++) {
            const float *const piece = a->v_pages + a->page[u / KV_PAGE] * a->v_stride;
            sum += score[u] * piece[(int64_t)(u % KV_PAGE) * a->d_head + c];
        }
        a->y[r * a->y_stride + c] = sum / total[r];
    }
}

static ALWAYS_INLINE void attend_rows(const struct attend *a, const int n_row, const int group)
{
    float total[ATTEND_ROWS];
    score_all(a, n_row, group, (a->pos + n_row - 1) / KV_PAGE + 1);
    for (int r = 0; r < n_row; r++) {
        total[r] = exp_scores(a->score + r * a->score_stride, a->pos + r + 1);
    }
    int c = 0;
    for (; c + VALUE_VECS * LANES <= a->d_head; c += VALUE_VECS * LANES) {
        weigh_values(a, n_row, VALUE_VECS, total, c);
    }
    for (; c + LANES <= a->d_head; c += LANES) {
        weigh_values(a, n_row, 1, total, c);
    }
    for (; c < a->d_head; c++) {
        weigh_column(a, n_row, total, c);
    }
}

void SIMD(attend)(const struct attend *a)
{
    CHECK(a->n_row >= 1 && a->n_row <= ATTEND_ROWS);
    switch (a->n_row) {
    case 1: attend_rows(a, 1, PAGE_GROUP(1)); break;
    case 2: attend_rows(a, 2, PAGE_GROUP(2)); break;
    case 3: attend_rows(a, 3, PAGE_GROUP(3)); break;
    default: attend_rows(a, 4, PAGE_GROUP(4)); break;
    }
}
