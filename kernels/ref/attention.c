/* The key/value cache and causal attention of the reference backend.
 *
 * A page holds KV_PAGE positions one after the other, each a row of d columns. */
#include "kernels/ref/ref.h"

#include <math.h>

int64_t ref_cache_row(struct tensor pages, const struct step *step, int s, int pos, int64_t d)
{
    return step_page(step, s, pos) * pages.stride + pos % KV_PAGE * d;
}

static void store_row(struct tensor pages, const struct step *step, int s, int pos,
                      const float *row, int64_t d)
{
    const int64_t at = ref_cache_row(pages, step, s, pos, d);
    for (int64_t c = 0; c < d; c++) {
        if (pages.dtype == DTYPE_BF16) {
            ((uint16_t *)pages.data)[at + c] = bf16_from_f32(row[c]);
        } else {
            ((float *)pages.data)[at + c] = row[c];
        }
    }
}

void ref_kv_store(struct backend *be, struct tensor k_pages, struct tensor v_pages, struct tensor k,
                  struct tensor v, const struct step *step, int n_head)
{
    (void)be;
    (void)n_head;
    const int64_t d = k.cols;
    for (int s = 0; s < step->n_seq; s++) {
        for (int r = step->seq_first[s]; r < step->seq_first[s + 1]; r++) {
            store_row(k_pages, step, s, step->pos[r], row_f32(k, r), d);
            store_row(v_pages, step, s, step->pos[r], row_f32(v, r), d);
        }
    }
}

/* One row and one head, whose keys and values are columns first .. first+d_head-1 of d. score
 * [n_pos] is working memory. */
static void attend(float *y, const float *q, struct tensor k_pages, struct tensor v_pages,
                   const struct step *step, int s, int n_pos, int64_t first, int64_t d_head,
                   int64_t d, float scale, double *score)
{
    double max = -INFINITY;
    for (int u = 0; u < n_pos; u++) {
        const int64_t k = ref_cache_row(k_pages, step, s, u, d) + first;
        double dot = 0;
        for (int64_t c = 0; c < d_head; c++) {
            dot += (double)q[c] * ref_cached(k_pages, k + c);
        }
        score[u] = dot * (double)scale;
        max = score[u] > max ? score[u] : max;
    }
    double total = 0;
    for (int u = 0; u < n_pos; u++) {
        score[u] = exp(score[u] - max);
        total += score[u];
    }
    for (int64_t c = 0; c < d_head; c++) {
        double sum = 0;
        for (int u = 0; u < n_pos; u++) {
            sum +=
                score[u] * ref_cached(v_pages, ref_cache_row(v_pages, step, s, u, d) + first + c);
        }
        y[c] = (float)(sum / total);
    }
}

void ref_attention(struct backend *be, struct tensor y, struct tensor q, struct tensor k_pages,
                   struct tensor v_pages, struct tensor k, struct tensor v, const struct step *step,
                   int n_head, float scale)
{
    const int64_t d_head = y.cols / n_head;
    const int64_t d_cache = k_pages.cols / KV_PAGE;
    const int n_share = (int)(y.cols / d_cache); /* heads that read one of the pages' */
    if (k.data != NULL) {
        ref_kv_store(be, k_pages, v_pages, k, v, step, n_head / n_share);
    }
    for (int s = 0; s < step->n_seq; s++) {
        for (int r = step->seq_first[s]; r < step->seq_first[s + 1]; r++) {
            for (int h = 0; h < n_head; h++) {
                attend(row_f32(y, r) + h * d_head, row_f32(q, r) + h * d_head, k_pages, v_pages,
                       step, s, step->pos[r] + 1, h / n_share * d_head, d_head, d_cache, scale,
                       ref_step_scratch(step)->score);
            }
        }
    }
}
