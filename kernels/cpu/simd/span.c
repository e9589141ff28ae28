/* Attention of one row and one head over its window of the cache and over persistent keys.
 *
 * Inside a page the scores of 16 positions are one chain of multiply-adds over the head's columns;
 * where the window begins or ends inside a page, positions are taken one by one. The keys of
 * distances lie like those of a page (a row per column of the head), so they are added as they are
 * read. A row's window begins and ends at the same positions whatever shares the call, so its bits
 * are the same. Bytes: 12·d_head per position (8 where the table stays in the core's cache); flops:
 * 6·d_head. */
#include "kernels/cpu/simd/internal.h"
#include "kernels/cpu/simd/vmath.h"

#include <math.h>

enum { PAGE_VECS = KV_PAGE / LANES };

/* The head's piece of the page of position u >= 0. */
static const float *piece_of(const struct attend_span *a, const float *pages, int64_t stride, int u)
{
    return pages + a->page[u / KV_PAGE % a->n_page] * stride;
}

/* Scores of the KV_PAGE positions from u on, all within the window and within a page. */
static void score_page(const struct attend_span *a, int u)
{
    const int first = u - (a->pos - a->window);
    const float *const k = u >= 0 ? piece_of(a, a->k_pages, a->k_stride, u) : NULL;
    vf sum[PAGE_VECS];
    UNROLL
    for (int i = 0; i < PAGE_VECS; i++) {
        sum[i] = v_set1(0.0f);
    }
    for (int c = 0; c < a->d_head; c++) {
        const float *const p = a->position + c * a->position_stride + first;
        const vf q = v_set1(a->q[c]);
        UNROLL
        for (int i = 0; i < PAGE_VECS; i++) {
            vf key = v_load(p + i * LANES);
            if (k != NULL) {
                key = key + v_load(k + c * KV_PAGE + i * LANES);
            }
            sum[i] = v_fma(q, key, sum[i]);
        }
    }
    UNROLL
    for (int i = 0; i < PAGE_VECS; i++) {
        v_store(a->score + first + i * LANES, sum[i] * a->scale);
    }
}

/* Scores of the n positions from u on, all within a page. */
static void score_some(const struct attend_span *a, int u, int n)
{
    const int first = u - (a->pos - a->window);
    const float *const k = u >= 0 ? piece_of(a, a->k_pages, a->k_stride, u) + u % KV_PAGE : NULL;
    for (int i = 0; i < n; i++) {
        float sum = 0;
        for (int c = 0; c < a->d_head; c++) {
            const float p = a->position[c * a->position_stride + first + i];
            sum += a->q[c] * (k != NULL ? p + k[(int64_t)c * KV_PAGE + i] : p);
        }
        a->score[first + i] = sum * a->scale;
    }
}

static void score_window(const struct attend_span *a)
{
    for (int u = a->pos - a->window; u < a->pos;) {
        const int offset = (u % KV_PAGE + KV_PAGE) % KV_PAGE; /* u may be negative */
        const int n = KV_PAGE - offset < a->pos - u ? KV_PAGE - offset : a->pos - u;
        if (n == KV_PAGE) {
            score_page(a, u);
        } else {
            score_some(a, u, n);
        }
        u += n;
    }
}

static void score_persistent(const struct attend_span *a)
{
    for (int i = 0; i < a->n_persistent; i += LANES) {
        const int n = lanes_left(a->n_persistent, i);
        vf sum = v_set1(0.0f);
        for (int c = 0; c < a->d_head; c++) {
            sum = v_fma(v_set1(a->q[c]), v_load_n(a->key + c * a->key_stride + i, n), sum);
        }
        v_store_n(a->score + a->window + i, sum * a->scale, n);
    }
}

static float max_score(const struct attend_span *a)
{
    const int n = a->window + a->n_persistent;
    float max = -INFINITY;
    for (int i = 0; i < n; i++) {
        max = a->score[i] > max ? a->score[i] : max;
    }
    return max;
}

/* Scores first .. first+n-1 become e^(score - max), times the mask if there is one. Adds up what
 * they are before and after it. */
static void weigh(const struct attend_span *a, float max, const float *mask, int first, int n,
                  float *all, float *kept)
{
    vf all_sum = v_set1(0.0f);
    vf kept_sum = v_set1(0.0f);
    for (int i = 0; i < n; i += LANES) {
        const int m = lanes_left(n, i);
        float *const at = a->score + first + i;
        float lane[LANES];
        v_store(lane, v_exp(v_load_n(at, m) - max));
        vf e = v_load_n(lane, m); /* nothing beyond n counts */
        all_sum = all_sum + e;
        if (mask != NULL) {
            e = e * v_load_n(mask + i, m);
        }
        kept_sum = kept_sum + e;
        v_store_n(at, e, m);
    }
    *all += v_sum(all_sum);
    *kept += v_sum(kept_sum);
}

/* The weighted sum of values in n columns from c on. */
static vf read_values(const struct attend_span *a, int c, int n)
{
    vf sum = v_set1(0.0f);
    const int begin = a->pos - a->window;
    for (int u = begin < 0 ? 0 : begin; u < a->pos; u++) {
        const float weight = a->score[u - begin];
        if (weight != 0) { /* beyond the head's span: most of a long window, for most heads */
            const float *const v =
                piece_of(a, a->v_pages, a->v_stride, u) + (int64_t)(u % KV_PAGE) * a->d_head;
            sum = v_fma(v_set1(weight), v_load_n(v + c, n), sum);
        }
    }
    for (int i = 0; i < a->n_persistent; i++) {
        const float *const v = a->value + i * a->value_stride;
        sum = v_fma(v_set1(a->score[a->window + i]), v_load_n(v + c, n), sum);
    }
    return sum;
}

void SIMD(attend_span)(const struct attend_span *a)
{
    score_window(a);
    score_persistent(a);
    const float max = max_score(a);
    float all = 0;
    float kept = 0;
    weigh(a, max, a->mask, 0, a->window, &all, &kept);
    weigh(a, max, NULL, a->window, a->n_persistent, &all, &kept);
    const float total = a->mask != NULL ? kept + SPAN_EPSILON * all : kept;
    for (int c = 0; c < a->d_head; c += LANES) {
        const int n = lanes_left(a->d_head, c);
        v_store_n(a->y + c, read_values(a, c, n) / total, n);
    }
}
