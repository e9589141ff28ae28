/* The memory layer of the reference backend: exact search among product or flat keys, and the
 * weighted sum of value rows. */
#include "kernels/ref/weight.h"

#include <math.h>

/* The best entries seen so far, best first: larger score, then smaller index. */
struct best {
    int32_t *index; /* [k] */
    float *score;   /* [k] */
    int n, k;
};

/* A NaN score ranks below every number, so that a broken query still names existing slots. */
static bool is_better(float score, int32_t index, float than_score, int32_t than_index)
{
    if (isnan(score) || isnan(than_score)) {
        return isnan(score) == isnan(than_score) ? index < than_index : isnan(than_score);
    }
    return score > than_score || (score == than_score && index < than_index);
}

static void best_offer(struct best *best, int32_t index, float score)
{
    int at = best->n;
    while (at > 0 && is_better(score, index, best->score[at - 1], best->index[at - 1])) {
        at--;
    }
    if (at == best->k) {
        return;
    }
    best->n = best->n < best->k ? best->n + 1 : best->k;
    for (int i = best->n - 1; i > at; i--) {
        best->index[i] = best->index[i - 1];
        best->score[i] = best->score[i - 1];
    }
    best->index[at] = index;
    best->score[at] = score;
}

/* The best of n_key keys from row first on, by their product with the d columns of q. */
static void search_keys(struct best *best, const float *q, const struct weight *keys, int64_t first,
                        int n_key, int64_t d)
{
    for (int key = 0; key < n_key; key++) {
        const float *const row = row_f32(ref_weight_of(keys)->view, first + key);
        float sum = 0;
        for (int64_t c = 0; c < d; c++) {
            sum += q[c] * row[c];
        }
        best_offer(best, key, sum);
    }
}

/* The row where a group's keys begin; a single group serves all. */
static int64_t first_key(const struct weight *keys, int group, int n_key)
{
    return keys->n_group == 1 ? 0 : (int64_t)group * n_key;
}

static void search_product(struct best *best, const float *q, const struct weight *keys, int h,
                           const struct pkm_shape *shape)
{
    int32_t index[2][PKM_K_TOP_MAX] = {{0}};
    float score[2][PKM_K_TOP_MAX] = {{0}};
    const int64_t d_half = shape->d_key / 2;
    for (int half = 0; half < 2; half++) {
        struct best side = {index[half], score[half], 0, shape->k_top};
        search_keys(&side, q + half * d_half, keys, first_key(keys, 2 * h + half, shape->n_key),
                    shape->n_key, d_half);
    }
    /* A pair of ranks i, j (from 1) has i·j pairs at or above it, itself included. If those are
     * more than k_top, the pair is not among the best. */
    for (int i = 0; i < shape->k_top; i++) {
        for (int j = 0; (i + 1) * (j + 1) <= shape->k_top; j++) {
            best_offer(best, index[0][i] * shape->n_key + index[1][j], score[0][i] + score[1][j]);
        }
    }
}

static void softmax(float *score, int n)
{
    double total = 0;
    const double max = (double)score[0];
    for (int i = 0; i < n; i++) {
        total += exp((double)score[i] - max);
    }
    for (int i = n - 1; i >= 0; i--) {
        score[i] = (float)(exp((double)score[i] - max) / total);
    }
}

void ref_pkm_search(struct backend *be, struct tensor slots, struct tensor weights,
                    struct tensor query, const struct weight *keys, const struct pkm_shape *shape)
{
    (void)be;
    for (int64_t r = 0; r < query.rows; r++) {
        for (int h = 0; h < shape->n_head; h++) {
            const float *const q = row_f32(query, r) + (int64_t)h * shape->d_key;
            const int64_t column = (int64_t)h * shape->k_top;
            struct best best = {row_i32(slots, r) + column, row_f32(weights, r) + column, 0,
                                shape->k_top};
            if (shape->kind == PKM_PRODUCT) {
                search_product(&best, q, keys, h, shape);
            } else {
                search_keys(&best, q, keys, first_key(keys, h, shape->n_key), shape->n_key,
                            shape->d_key);
            }
            if (!shape->scores) {
                softmax(best.score, best.n);
            }
        }
    }
}

/* What is subtracted of k weights, best first. */
static float subtrahend(const float *weight, int k, enum pkm_subtract subtract)
{
    double sum = 0;
    switch (subtract) {
    case PKM_SUBTRACT_NONE: break;
    case PKM_SUBTRACT_MIN: return weight[k - 1];
    case PKM_SUBTRACT_MEDIAN: return weight[k - 1 - (k - 1) / 2];
    case PKM_SUBTRACT_MEAN:
        for (int j = 0; j < k; j++) {
            sum += (double)weight[j];
        }
        return (float)(sum / k);
    }
    return 0;
}

static void rescore_head(float *weight, const struct pkm_rescore *rescore)
{
    const int k = rescore->k_top;
    for (int j = 0; j < k; j++) {
        weight[j] /= rescore->temperature;
    }
    if (rescore->softmax) {
        softmax(weight, k);
    }
    for (int j = 0; j < k && rescore->relu; j++) {
        weight[j] = weight[j] < 0 ? 0 : weight[j];
    }
    const float less = subtrahend(weight, k, rescore->subtract);
    double total = 0;
    for (int j = 0; j < k; j++) {
        weight[j] -= less;
        total += fabs((double)weight[j]);
    }
    for (int j = 0; j < k && rescore->normalize; j++) {
        weight[j] = (float)((double)weight[j] / total);
    }
}

void ref_pkm_rescore(struct backend *be, struct tensor slots, struct tensor weights,
                     struct tensor slot_map, const struct pkm_rescore *rescore)
{
    (void)be;
    const int k = rescore->k_top;
    const int64_t n_hit = (int64_t)rescore->n_head * k;
    for (int64_t r = 0; r < slots.rows; r++) {
        int32_t *const slot = row_i32(slots, r);
        for (int64_t j = 0; j < n_hit; j++) {
            if (slot_map.data != NULL) {
                CHECK(slot[j] >= 0 && slot[j] < slot_map.cols);
                slot[j] = row_i32(slot_map, j / k)[slot[j]];
            }
            CHECK(slot[j] >= 0);
            slot[j] %= rescore->n_slot;
        }
        for (int h = 0; h < rescore->n_head; h++) {
            rescore_head(row_f32(weights, r) + (int64_t)h * k, rescore);
        }
    }
}

/* Where a slot of a row's is read from. */
struct read_from {
    const struct redirect_rows *rows; /* Borrowed; NULL: the table itself */
    int32_t row;
};

static struct read_from read_from(const struct pkm_redirect *redirect, int64_t r, int32_t slot,
                                  bool experts)
{
    const struct step_redirect *entry = NULL;
    if (redirect != NULL) {
        const struct redirect_list list = step_redirects(redirect->step, r, redirect->memory);
        const int32_t row = step_redirect_row(&list, slot, &entry);
        if (row >= 0) {
            return (struct read_from){experts ? &entry->experts : &entry->values, row};
        }
    }
    return (struct read_from){NULL, slot};
}

static float read_at(const struct weight *table, struct read_from from, int64_t col)
{
    if (from.rows == NULL) {
        return weight_at(table, from.row, col);
    }
    const float value = float_at(from.rows->data, from.rows->dtype, from.row * table->cols + col);
    return from.rows->scale == NULL ? value : value * from.rows->scale[from.row];
}

void ref_pkm_experts(struct backend *be, struct tensor y, struct tensor weights,
                     struct tensor slots, struct tensor x, const struct weight *experts,
                     const struct pkm_redirect *redirect)
{
    (void)be;
    for (int64_t r = 0; r < x.rows; r++) {
        for (int64_t j = 0; j < slots.cols; j++) {
            const int32_t slot = row_i32(slots, r)[j];
            CHECK(slot >= 0 && slot < experts->rows);
            const struct read_from from = read_from(redirect, r, slot, true);
            double dot = 0;
            for (int64_t c = 0; c < x.cols; c++) {
                dot += (double)row_f32(x, r)[c] * (double)read_at(experts, from, c);
            }
            const double gelu = 0.5 * dot * erfc(-dot * 0.70710678118654752440);
            row_f32(y, r)[j] = (float)((double)row_f32(weights, r)[j] * gelu);
        }
    }
}

static float ablate_factor(const struct step *step, int seq, int32_t memory, int32_t head,
                           int32_t slot)
{
    float factor = 1;
    for (int i = step->ablate_first[seq]; i < step->ablate_first[seq + 1]; i++) {
        const struct step_ablate *const entry = &step->ablate[i];
        if (entry->memory == memory && (entry->head < 0 || entry->head == head) &&
            (entry->slot < 0 || entry->slot == slot)) {
            factor *= entry->scale;
        }
    }
    return factor;
}

void ref_pkm_ablate(struct backend *be, struct tensor weights, struct tensor slots,
                    const struct step *step, const struct pkm_place *place)
{
    (void)be;
    for (int seq = 0; seq < step->n_seq; seq++) {
        const bool is_plain = step->ablate_first[seq] == step->ablate_first[seq + 1];
        for (int r = step->seq_first[seq]; r < step->seq_first[seq + 1] && !is_plain; r++) {
            for (int j = 0; j < place->n_head * place->k_top; j++) {
                row_f32(weights, r)[j] *=
                    ablate_factor(step, seq, place->memory, j / place->k_top, row_i32(slots, r)[j]);
            }
        }
    }
}

void ref_pkm_read(struct backend *be, struct tensor y, struct tensor residual, struct tensor slots,
                  struct tensor weights, const struct weight *values,
                  const struct pkm_redirect *redirect)
{
    (void)be;
    for (int64_t r = 0; r < y.rows; r++) {
        if (residual.data == NULL) {
            memset(row_f32(y, r), 0, (size_t)y.cols * sizeof(float));
        } else {
            memmove(row_f32(y, r), row_f32(residual, r), (size_t)y.cols * sizeof(float));
        }
        for (int64_t j = 0; j < slots.cols; j++) {
            const int32_t slot = row_i32(slots, r)[j];
            CHECK(slot >= 0 && slot < values->rows);
            const struct read_from from = read_from(redirect, r, slot, false);
            for (int64_t c = 0; c < y.cols; c++) {
                row_f32(y, r)[c] += row_f32(weights, r)[j] * read_at(values, from, c);
            }
        }
    }
}
