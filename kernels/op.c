/* The checked entry of each op: what its contract in op.h demands of shapes and indices is CHECKed
 * here, the same for all backends; then the backend's own function runs. Slots and tokens that only
 * the device knows are left to the backends. */
#include "kernels/backend.h"

/* A view must have this type and shape; without rows it need not have an address. */
static bool is_view(struct tensor t, enum dtype dtype, int64_t rows, int64_t cols)
{
    return t.dtype == dtype && t.rows == rows && t.cols == cols && t.stride >= t.cols &&
           (t.data != NULL || t.rows == 0);
}

static bool is_f32(struct tensor t, int64_t rows, int64_t cols)
{
    return is_view(t, DTYPE_F32, rows, cols);
}

static bool is_none(struct tensor t)
{
    return t.data == NULL;
}

/* A table with rows for all numbers below bound. */
static bool is_table(const struct weight *w, int64_t cols, int32_t bound)
{
    return w->kind == WEIGHT_TABLE && w->cols == cols && bound <= w->rows;
}

/* ---- embedding, norms ----------------------------------------------------------------------- */

void op_embed(struct backend *be, struct tensor y, const struct step *step,
              const struct weight *tok, const struct weight *pos, const struct weight *lang)
{
    CHECK(is_f32(y, step->n_tok, tok->cols));
    CHECK(is_table(tok, y.cols, step->bounds.token));
    CHECK(pos == NULL || is_table(pos, y.cols, step->bounds.pos));
    CHECK(lang == NULL || (pos != NULL && is_table(lang, y.cols, step->bounds.lang)));
    be->op->compute.embed(be, y, step, tok, pos, lang);
}

void op_norm(struct backend *be, struct tensor y, struct tensor x, struct tensor gamma,
             struct tensor beta, float eps)
{
    CHECK(is_f32(y, x.rows, x.cols) && is_f32(x, y.rows, y.cols));
    CHECK(is_f32(gamma, 1, y.cols) && is_f32(beta, 1, y.cols));
    be->op->compute.norm(be, y, x, gamma, beta, eps);
}

void op_add_norm(struct backend *be, struct tensor y, struct tensor x, struct tensor r,
                 struct tensor gamma, struct tensor beta, float eps)
{
    CHECK(is_f32(y, x.rows, x.cols) && is_f32(x, y.rows, y.cols) && is_f32(r, y.rows, y.cols));
    CHECK(is_f32(gamma, 1, y.cols) && is_f32(beta, 1, y.cols));
    be->op->compute.add_norm(be, y, x, r, gamma, beta, eps);
}

void op_rms_norm(struct backend *be, struct tensor y, struct tensor sum, struct tensor x,
                 struct tensor r, struct tensor gamma, float eps)
{
    CHECK(is_f32(y, x.rows, x.cols) && is_f32(x, y.rows, y.cols));
    CHECK(is_f32(gamma, 1, y.cols) && is_none(r) == is_none(sum));
    CHECK(is_none(r) || (is_f32(r, y.rows, y.cols) && is_f32(sum, y.rows, y.cols)));
    be->op->compute.rms_norm(be, y, sum, x, r, gamma, eps);
}

void op_l2_norm(struct backend *be, struct tensor y, struct tensor x, int n_run)
{
    CHECK(is_f32(y, x.rows, x.cols) && is_f32(x, y.rows, y.cols));
    CHECK(n_run > 0 && y.cols % n_run == 0);
    be->op->compute.l2_norm(be, y, x, n_run);
}

void op_head_norm(struct backend *be, struct tensor x, struct tensor gamma, int n_head, float eps)
{
    CHECK(n_head > 0 && x.cols % n_head == 0);
    CHECK(is_f32(x, x.rows, x.cols) && is_f32(gamma, 1, x.cols / n_head));
    be->op->compute.head_norm(be, x, gamma, n_head, eps);
}

/* ---- rotary positions, gates ---------------------------------------------------------------- */

void op_rope(struct backend *be, struct tensor x, struct tensor table, const struct step *step,
             int n_head)
{
    CHECK(n_head > 0 && x.cols % n_head == 0 && x.cols / n_head % 2 == 0);
    CHECK(is_f32(x, step->n_tok, x.cols) && is_f32(table, table.rows, 2 * (x.cols / n_head)));
    CHECK(step->bounds.pos <= table.rows);
    be->op->compute.rope(be, x, table, step, n_head);
}

void op_gate(struct backend *be, struct tensor y, struct tensor x, struct tensor g,
             enum gate_kind kind)
{
    CHECK(kind == GATE_SILU || kind == GATE_SIGMOID || kind == GATE_FACTOR);
    CHECK(is_f32(y, x.rows, x.cols) && is_f32(x, y.rows, y.cols));
    const bool is_one = kind == GATE_FACTOR && g.stride == 0;
    CHECK(is_one ? g.dtype == DTYPE_F32 && g.rows == y.rows && g.cols == 1 && !is_none(g)
                 : is_f32(g, y.rows, kind == GATE_SILU ? y.cols : 1));
    be->op->compute.gate(be, y, x, g, kind);
}

/* ---- linear layers -------------------------------------------------------------------------- */

static void check_linear(struct tensor y, struct tensor x, const struct weight *w,
                         struct tensor bias, enum act act)
{
    CHECK(w->kind == WEIGHT_MATRIX);
    CHECK(is_f32(x, y.rows, w->cols) && is_f32(y, x.rows, w->rows));
    CHECK(is_none(bias) || is_f32(bias, 1, w->rows));
    CHECK(act == ACT_NONE || act == ACT_RELU || act == ACT_GELU);
}

void op_linear(struct backend *be, struct tensor y, struct tensor x, const struct weight *w,
               struct tensor bias, enum act act)
{
    check_linear(y, x, w, bias, act);
    be->op->compute.linear(be, y, x, w, bias, act);
}

void op_ffn(struct backend *be, struct tensor y, struct tensor hidden, struct tensor x,
            const struct ffn *ffn)
{
    check_linear(hidden, x, ffn->up, ffn->up_bias, ffn->act);
    check_linear(y, hidden, ffn->down, ffn->down_bias, ACT_NONE);
    be->op->compute.ffn(be, y, hidden, x, ffn);
}

/* ---- attention ------------------------------------------------------------------------------ */

/* Pages of keys and values of n_head heads, d columns together, that hold the step's positions. */
static void check_pages(struct tensor k_pages, struct tensor v_pages, const struct step *step,
                        int64_t d, int64_t n_head)
{
    const enum dtype dtype = k_pages.dtype;
    CHECK(n_head > 0 && d % n_head == 0 && d <= INT32_MAX / KV_PAGE);
    CHECK(dtype == DTYPE_F32 || (dtype == DTYPE_BF16 && d / n_head % 2 == 0));
    CHECK(is_view(k_pages, dtype, v_pages.rows, KV_PAGE * d));
    CHECK(is_view(v_pages, dtype, k_pages.rows, KV_PAGE * d));
    CHECK(step->bounds.page <= k_pages.rows);
}

void op_kv_store(struct backend *be, struct tensor k_pages, struct tensor v_pages, struct tensor k,
                 struct tensor v, const struct step *step, int n_head)
{
    CHECK(is_f32(k, step->n_tok, v.cols) && is_f32(v, step->n_tok, k.cols));
    check_pages(k_pages, v_pages, step, k.cols, n_head);
    be->op->compute.kv_store(be, k_pages, v_pages, k, v, step, n_head);
}

void op_attention(struct backend *be, struct tensor y, struct tensor q, struct tensor k_pages,
                  struct tensor v_pages, struct tensor k, struct tensor v, const struct step *step,
                  int n_head, float scale)
{
    CHECK(n_head > 0 && y.cols > 0 && y.cols % n_head == 0);
    CHECK(is_f32(y, step->n_tok, q.cols) && is_f32(q, step->n_tok, y.cols));
    /* the scratch was sized for these, and for no spans */
    CHECK(step->limits.d_model == y.cols && step->limits.n_head == n_head);
    CHECK(step->limits.n_span_max == 0);
    const int64_t d_head = y.cols / n_head;
    const int64_t n_kv_head = k_pages.cols / KV_PAGE / d_head;
    CHECK(n_kv_head > 0 && n_head % n_kv_head == 0);
    check_pages(k_pages, v_pages, step, n_kv_head * d_head, n_kv_head);
    CHECK(is_none(k) == is_none(v));
    if (!is_none(k)) {
        CHECK(is_f32(k, step->n_tok, n_kv_head * d_head));
        CHECK(is_f32(v, step->n_tok, n_kv_head * d_head));
    }
    be->op->compute.attention(be, y, q, k_pages, v_pages, k, v, step, n_head, scale);
}

void op_span_attention(struct backend *be, struct tensor y, struct tensor q, struct tensor k_pages,
                       struct tensor v_pages, const struct step *step,
                       const struct span_shape *shape)
{
    check_pages(k_pages, v_pages, step, y.cols, shape->n_head);
    const int64_t d_head = y.cols / shape->n_head;
    CHECK(is_f32(y, step->n_tok, q.cols) && is_f32(q, step->n_tok, y.cols));
    CHECK(shape->window >= 0 && shape->n_persistent >= 0);
    CHECK(shape->window + shape->n_persistent > 0);
    CHECK(shape->window + shape->n_persistent <= step->limits.n_span_max);
    CHECK(shape->window == 0 || is_f32(shape->position, d_head, shape->window));
    CHECK(is_none(shape->mask) || is_f32(shape->mask, shape->n_head, shape->window));
    if (shape->n_persistent > 0) {
        CHECK(is_f32(shape->key, y.cols, shape->n_persistent));
        CHECK(is_f32(shape->value, (int64_t)shape->n_head * shape->n_persistent, d_head));
    }
    const int64_t ring = (int64_t)step->limits.n_page_max * KV_PAGE;
    for (int s = 0; s < step->n_seq; s++) { /* each holds the window of its first row */
        const int n_row = step->seq_first[s + 1] - step->seq_first[s];
        CHECK(n_row == 0 || shape->window + n_row <= ring ||
              step->pos[step->seq_first[s + 1] - 1] < ring);
    }
    be->op->compute.span_attention(be, y, q, k_pages, v_pages, step, shape);
}

/* ---- product-key memories ------------------------------------------------------------------- */

/* Slots and weights of n_hit hits in each row. */
static void check_hits(struct tensor slots, struct tensor weights, int64_t n_row, int64_t n_hit)
{
    CHECK(is_view(slots, DTYPE_I32, n_row, n_hit));
    CHECK(is_view(weights, DTYPE_F32, n_row, n_hit));
}

void op_pkm_search(struct backend *be, struct tensor slots, struct tensor weights,
                   struct tensor query, const struct weight *keys, const struct pkm_shape *shape)
{
    const int n_half = shape->kind == PKM_PRODUCT ? 2 : 1;
    CHECK(shape->n_head > 0 && shape->n_key > 0 && shape->d_key > 0);
    CHECK(n_half == 1 || (shape->d_key % 2 == 0 && shape->n_key <= 46340)); /* n_key² < 2^31 */
    CHECK(shape->k_top > 0 && shape->k_top <= shape->n_key && shape->k_top <= PKM_K_TOP_MAX);
    CHECK(keys->kind == WEIGHT_KEYS && keys->cols == shape->d_key / n_half);
    CHECK(keys->n_group == 1 || keys->n_group == shape->n_head * n_half);
    CHECK(keys->rows == (int64_t)keys->n_group * shape->n_key);
    CHECK(is_f32(query, slots.rows, (int64_t)shape->n_head * shape->d_key));
    check_hits(slots, weights, query.rows, (int64_t)shape->n_head * shape->k_top);
    be->op->compute.pkm_search(be, slots, weights, query, keys, shape);
}

void op_pkm_rescore(struct backend *be, struct tensor slots, struct tensor weights,
                    struct tensor slot_map, const struct pkm_rescore *rescore)
{
    CHECK(rescore->n_head > 0 && rescore->k_top > 0 && rescore->k_top <= PKM_K_TOP_MAX);
    CHECK(rescore->n_slot > 0 && rescore->temperature > 0);
    check_hits(slots, weights, slots.rows, (int64_t)rescore->n_head * rescore->k_top);
    CHECK(is_none(slot_map) || is_view(slot_map, DTYPE_I32, rescore->n_head, slot_map.cols));
    be->op->compute.pkm_rescore(be, slots, weights, slot_map, rescore);
}

/* rows: of the call. */
static bool is_redirect(const struct pkm_redirect *redirect, int64_t rows)
{
    return redirect == NULL || (redirect->memory >= 0 && redirect->step->n_tok == rows);
}

void op_pkm_experts(struct backend *be, struct tensor y, struct tensor weights, struct tensor slots,
                    struct tensor x, const struct weight *experts,
                    const struct pkm_redirect *redirect)
{
    CHECK(is_table(experts, x.cols, 0) && is_f32(x, slots.rows, experts->cols));
    check_hits(slots, weights, x.rows, slots.cols);
    CHECK(is_f32(y, x.rows, slots.cols) && is_redirect(redirect, y.rows));
    be->op->compute.pkm_experts(be, y, weights, slots, x, experts, redirect);
}

void op_pkm_ablate(struct backend *be, struct tensor weights, struct tensor slots,
                   const struct step *step, const struct pkm_place *place)
{
    CHECK(place->memory >= 0 && place->n_head > 0 && place->k_top > 0);
    check_hits(slots, weights, step->n_tok, (int64_t)place->n_head * place->k_top);
    be->op->compute.pkm_ablate(be, weights, slots, step, place);
}

void op_pkm_read(struct backend *be, struct tensor y, struct tensor residual, struct tensor slots,
                 struct tensor weights, const struct weight *values,
                 const struct pkm_redirect *redirect)
{
    CHECK(is_table(values, y.cols, 0) && is_f32(y, slots.rows, values->cols));
    CHECK(slots.cols > 0 && slots.cols <= INT32_MAX);
    check_hits(slots, weights, y.rows, slots.cols);
    CHECK(is_none(residual) || is_f32(residual, y.rows, y.cols));
    CHECK(is_redirect(redirect, y.rows));
    be->op->compute.pkm_read(be, y, residual, slots, weights, values, redirect);
}

/* ---- outputs -------------------------------------------------------------------------------- */

void op_gather(struct backend *be, struct tensor y, struct tensor x, const struct step *step,
               int first)
{
    CHECK(first >= 0 && first + y.rows <= step->n_out);
    CHECK(is_f32(y, y.rows, x.cols) && is_f32(x, x.rows, y.cols));
    CHECK(y.rows == 0 || step->out_row[first + y.rows - 1] < x.rows); /* they ascend */
    be->op->compute.gather(be, y, x, step, first);
}

void op_log_softmax(struct backend *be, struct tensor y, struct tensor base)
{
    CHECK(is_f32(y, y.rows, y.cols));
    CHECK(y.rows <= INT32_MAX && y.cols > 0 && y.cols <= INT32_MAX / 2);
    CHECK(is_none(base) || is_f32(base, y.rows, 1));
    be->op->compute.log_softmax(be, y, base);
}

/* How a row is drawn: slices within the step's lists, tokens within the vocabulary. */
static void check_sample(const struct step *step, const struct sample_params *p, int64_t n_vocab)
{
    CHECK(p->u >= 0 && p->u < 1 && p->temperature >= 0 && p->top_k >= 0);
    CHECK(p->top_p > 0 && p->min_p >= 0 && p->min_p < 1 && p->repetition > 0);
    CHECK(p->typical_p >= 0 && p->typical_p < 1);
    CHECK(p->adjust_first >= 0 && p->n_adjust >= 0);
    CHECK(p->n_adjust <= step->n_adjust - p->adjust_first);
    CHECK(p->allow_first >= 0 && p->n_allow >= 0);
    CHECK(p->n_allow <= step->n_allow - p->allow_first);
    for (int i = 0; i < p->n_adjust; i++) {
        const int32_t token = step->adjust[p->adjust_first + i].token;
        CHECK(token >= 0 && token < n_vocab);
    }
    for (int i = 0; i < p->n_allow; i++) {
        const int32_t token = step->allow[p->allow_first + i];
        CHECK(token >= 0 && token < n_vocab);
    }
}

static void check_outputs(struct tensor logits, const struct step *step, int first)
{
    CHECK(first >= 0 && first + logits.rows <= step->n_out);
    CHECK(logits.cols > 0 && logits.cols <= step->limits.n_vocab);
    CHECK(is_f32(logits, logits.rows, logits.cols));
    for (int64_t i = first; i < first + logits.rows; i++) {
        const bool draws = (step->out_want[i] & OUT_SAMPLE) != 0;
        const int32_t target = step->target[i];
        if (draws) {
            check_sample(step, &step->sample[i], logits.cols);
        }
        if ((step->out_want[i] & OUT_LOGPROB) != 0) {
            CHECK(target == TARGET_SAMPLED ? draws : target >= 0 && target < logits.cols);
        }
    }
}

void op_outputs(struct backend *be, struct tensor logits, struct step *step, int first)
{
    check_outputs(logits, step, first);
    be->op->compute.outputs(be, logits, step, first);
}

void op_linear_outputs(struct backend *be, struct tensor logits, struct tensor x,
                       const struct weight *w, struct tensor bias, struct step *step, int first)
{
    check_linear(logits, x, w, bias, ACT_NONE);
    check_outputs(logits, step, first);
    be->op->compute.linear_outputs(be, logits, x, w, bias, step, first);
}
