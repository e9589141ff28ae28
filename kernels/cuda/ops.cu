/* The compute ops of the table: each checks its shapes, as kernels/ref does, and what the kernels
 * would index with, since they cannot CHECK; then it becomes a command, or one with the command
 * before. Nothing runs here. */
#include "kernels/cuda/frame.cuh"

void op_embed(struct backend *be, struct tensor y, const struct step *step,
              const struct weight *tok, const struct weight *pos, const struct weight *lang)
{
    const struct step_bounds *const bounds = step_bounds(cuda_step_of(step));
    CHECK(tok->kind == WEIGHT_TABLE && (pos != NULL || lang == NULL));
    CHECK_VIEW(y, DTYPE_F32, step->n_tok, tok->cols);
    CHECK(bounds->token <= tok->rows);
    CHECK(pos == NULL ||
          (pos->kind == WEIGHT_TABLE && pos->cols == y.cols && bounds->pos <= pos->rows));
    CHECK(lang == NULL ||
          (lang->kind == WEIGHT_TABLE && lang->cols == y.cols && bounds->lang <= lang->rows));
    struct command c = {};
    c.op = COMMAND_EMBED;
    c.step = cuda_step_of(step);
    c.tensor[0] = y;
    c.weight[0] = tok;
    c.weight[1] = pos;
    c.weight[2] = lang;
    command_append(cuda_of(be), &c);
}

void op_norm(struct backend *be, struct tensor y, struct tensor x, struct tensor gamma,
             struct tensor beta, float eps)
{
    CHECK_VIEW(x, DTYPE_F32, y.rows, y.cols);
    CHECK_VIEW(y, DTYPE_F32, x.rows, x.cols);
    CHECK_VIEW(gamma, DTYPE_F32, 1, y.cols);
    CHECK_VIEW(beta, DTYPE_F32, 1, y.cols);
    struct command c = {};
    c.op = COMMAND_NORM;
    c.f = eps;
    c.tensor[0] = y;
    c.tensor[1] = x;
    c.tensor[2] = gamma;
    c.tensor[3] = beta;
    command_append(cuda_of(be), &c);
}

void op_add_norm(struct backend *be, struct tensor y, struct tensor x, struct tensor r,
                 struct tensor gamma, struct tensor beta, float eps)
{
    CHECK_VIEW(x, DTYPE_F32, y.rows, y.cols);
    CHECK_VIEW(r, DTYPE_F32, y.rows, y.cols);
    CHECK_VIEW(y, DTYPE_F32, x.rows, x.cols);
    CHECK_VIEW(gamma, DTYPE_F32, 1, y.cols);
    CHECK_VIEW(beta, DTYPE_F32, 1, y.cols);
    struct command c = {};
    c.op = COMMAND_ADD_NORM;
    c.f = eps;
    c.tensor[0] = y;
    c.tensor[1] = x;
    c.tensor[2] = r;
    c.tensor[3] = gamma;
    c.tensor[4] = beta;
    command_append(cuda_of(be), &c);
}

void op_unit_norm(struct backend *be, struct tensor y, struct tensor x, int n_run)
{
    CHECK_VIEW(x, DTYPE_F32, y.rows, y.cols);
    CHECK_VIEW(y, DTYPE_F32, x.rows, x.cols);
    CHECK(n_run > 0 && y.cols % n_run == 0);
    struct command c = {};
    c.op = COMMAND_UNIT_NORM;
    c.n = n_run;
    c.tensor[0] = y;
    c.tensor[1] = x;
    command_append(cuda_of(be), &c);
}

void op_rms_norm(struct backend *be, struct tensor y, struct tensor sum, struct tensor x,
                 struct tensor r, struct tensor gamma, float eps)
{
    CHECK_VIEW(y, DTYPE_F32, x.rows, x.cols);
    CHECK_VIEW(x, DTYPE_F32, y.rows, y.cols);
    CHECK_VIEW(gamma, DTYPE_F32, 1, y.cols);
    CHECK((r.data == NULL) == (sum.data == NULL));
    CHECK(r.data == NULL ||
          (is_view(r, DTYPE_F32, y.rows, y.cols) && is_view(sum, DTYPE_F32, y.rows, y.cols)));
    struct command c = {};
    c.op = COMMAND_RMS_NORM;
    c.f = eps;
    c.tensor[0] = y;
    c.tensor[1] = sum;
    c.tensor[2] = x;
    c.tensor[3] = r;
    c.tensor[4] = gamma;
    command_append(cuda_of(be), &c);
}

void op_rotate(struct backend *be, struct tensor x, struct tensor table, const struct step *step,
               int n_head)
{
    CHECK(n_head > 0 && x.cols % n_head == 0 && x.cols / n_head % 2 == 0);
    CHECK_VIEW(x, DTYPE_F32, step->n_tok, x.cols);
    CHECK_VIEW(table, DTYPE_F32, table.rows, 2 * (x.cols / n_head));
    CHECK(step_bounds(cuda_step_of(step))->pos <= table.rows);
    struct command c = {};
    c.op = COMMAND_ROTATE;
    c.n = n_head;
    c.step = cuda_step_of(step);
    c.tensor[0] = x;
    c.tensor[1] = table;
    command_append(cuda_of(be), &c);
}

void op_gate(struct backend *be, struct tensor y, struct tensor x, struct tensor g,
             enum gate_kind kind)
{
    CHECK(kind == GATE_SILU || kind == GATE_SIGMOID);
    CHECK_VIEW(y, DTYPE_F32, x.rows, x.cols);
    CHECK_VIEW(x, DTYPE_F32, y.rows, y.cols);
    CHECK_VIEW(g, DTYPE_F32, y.rows, kind == GATE_SIGMOID ? 1 : y.cols);
    struct command c = {};
    c.op = COMMAND_GATE;
    c.n = kind;
    c.tensor[0] = y;
    c.tensor[1] = x;
    c.tensor[2] = g;
    command_append(cuda_of(be), &c);
}

void op_linear(struct backend *be, struct tensor y, struct tensor x, const struct weight *w,
               struct tensor bias, enum act act)
{
    CHECK(w->kind == WEIGHT_MATRIX);
    CHECK_VIEW(x, DTYPE_F32, y.rows, w->cols);
    CHECK_VIEW(y, DTYPE_F32, x.rows, w->rows);
    CHECK(bias.data == NULL || (bias.dtype == DTYPE_F32 && bias.rows == 1 && bias.cols == w->rows));
    CHECK(act == ACT_NONE || act == ACT_RELU || act == ACT_GELU);
    struct command c = {};
    c.op = COMMAND_LINEAR;
    c.n = act;
    c.tensor[0] = y;
    c.tensor[1] = x;
    c.tensor[2] = bias;
    c.weight[0] = w;
    command_append(cuda_of(be), &c);
}

void op_ffn(struct backend *be, struct tensor y, struct tensor hidden, struct tensor x,
            const struct ffn *ffn)
{
    op_linear(be, hidden, x, ffn->up, ffn->up_bias, ffn->act);
    op_linear(be, y, hidden, ffn->down, ffn->down_bias, ACT_NONE);
}

static void check_pages(const struct step *step, struct tensor k_pages, struct tensor v_pages,
                        int64_t d, int n_head)
{
    const enum dtype dtype = k_pages.dtype;
    CHECK(n_head > 0 && d % n_head == 0);
    CHECK(dtype == DTYPE_F32 || (dtype == DTYPE_BF16 && d / n_head % 2 == 0));
    CHECK_VIEW(k_pages, dtype, v_pages.rows, KV_PAGE * d);
    CHECK_VIEW(v_pages, dtype, k_pages.rows, KV_PAGE * d);
    CHECK(step_bounds(cuda_step_of(step))->page <= k_pages.rows);
}

void op_kv_store(struct backend *be, struct tensor k_pages, struct tensor v_pages, struct tensor k,
                 struct tensor v, const struct step *step, int n_head)
{
    CHECK_VIEW(k, DTYPE_F32, step->n_tok, v.cols);
    CHECK_VIEW(v, DTYPE_F32, step->n_tok, k.cols);
    check_pages(step, k_pages, v_pages, k.cols, n_head);
    struct command c = {};
    c.op = COMMAND_KV_STORE;
    c.n = n_head;
    c.step = cuda_step_of(step);
    c.tensor[0] = k_pages;
    c.tensor[1] = v_pages;
    c.tensor[2] = k;
    c.tensor[3] = v;
    command_append(cuda_of(be), &c);
}

static bool is_same_view(struct tensor a, struct tensor b)
{
    return a.data == b.data && a.rows == b.rows && a.cols == b.cols && a.stride == b.stride &&
           a.dtype == b.dtype;
}

/* Whether some element may be in both; F32. */
static bool may_overlap(struct tensor a, struct tensor b)
{
    const float *const a_first = static_cast<const float *>(a.data);
    const float *const b_first = static_cast<const float *>(b.data);
    return a.rows > 0 && b.rows > 0 && a_first < b_first + (b.rows - 1) * b.stride + b.cols &&
           b_first < a_first + (a.rows - 1) * a.stride + a.cols;
}

static bool is_decode(const struct step *step)
{
    for (int s = 0; s < step->n_seq; s++) {
        if (step->seq_first[s + 1] - step->seq_first[s] != 1) {
            return false;
        }
    }
    return true;
}

/* The kv_store that the attention c follows at once and can do on its way, since each sequence has
 * one row and each head of it one block that reads what is stored; else NULL. Sequences share pages
 * that earlier steps have filled and none that this one writes to. */
static struct command *store_before(struct cuda *cu, const struct command *c)
{
    struct command *const last = command_last(cu);
    const bool is_store = last != NULL && last->op == COMMAND_KV_STORE && last->step == c->step &&
                          last->n == c->n && is_same_view(last->tensor[0], c->tensor[2]) &&
                          is_same_view(last->tensor[1], c->tensor[3]) &&
                          !may_overlap(c->tensor[0], last->tensor[2]) &&
                          !may_overlap(c->tensor[0], last->tensor[3]);
    return is_store && is_decode(&c->step->step) ? last : NULL;
}

void op_attention(struct backend *be, struct tensor y, struct tensor q, struct tensor k_pages,
                  struct tensor v_pages, const struct step *step, int n_head, float scale)
{
    /* the scratch was sized for these */
    CHECK(step->limits.d_model == y.cols && step->limits.n_head == n_head);
    CHECK_VIEW(y, DTYPE_F32, step->n_tok, q.cols);
    CHECK_VIEW(q, DTYPE_F32, step->n_tok, y.cols);
    CHECK(n_head > 0 && y.cols % n_head == 0);
    const int64_t d_head = y.cols / n_head;
    const int64_t n_kv_head = k_pages.cols / KV_PAGE / d_head;
    CHECK(n_kv_head > 0 && n_head % n_kv_head == 0);
    check_pages(step, k_pages, v_pages, n_kv_head * d_head, static_cast<int>(n_kv_head));
    struct command c = {};
    c.op = COMMAND_ATTENTION;
    c.n = n_head;
    c.f = scale;
    c.step = cuda_step_of(step);
    c.tensor[0] = y;
    c.tensor[1] = q;
    c.tensor[2] = k_pages;
    c.tensor[3] = v_pages;
    struct command *const store = store_before(cuda_of(be), &c);
    if (store == NULL) {
        command_append(cuda_of(be), &c);
        return;
    }
    c.tensor[4] = store->tensor[2];
    c.tensor[5] = store->tensor[3];
    *store = c;
}

void op_span_attention(struct backend *be, struct tensor y, struct tensor q, struct tensor k_pages,
                       struct tensor v_pages, const struct step *step,
                       const struct span_shape *shape)
{
    CHECK_VIEW(y, DTYPE_F32, step->n_tok, q.cols);
    CHECK_VIEW(q, DTYPE_F32, step->n_tok, y.cols);
    check_pages(step, k_pages, v_pages, y.cols, shape->n_head);
    const int64_t d_head = y.cols / shape->n_head;
    CHECK(shape->window >= 0 && shape->window + shape->n_persistent > 0);
    CHECK(shape->n_persistent >= 0);
    CHECK(shape->window == 0 || is_view(shape->position, DTYPE_F32, d_head, shape->window));
    CHECK(shape->mask.data == NULL ||
          is_view(shape->mask, DTYPE_F32, shape->n_head, shape->window));
    if (shape->n_persistent > 0) {
        const int64_t n_key = (int64_t)shape->n_head * shape->n_persistent;
        CHECK(is_view(shape->key, DTYPE_F32, y.cols, shape->n_persistent));
        CHECK(is_view(shape->value, DTYPE_F32, n_key, d_head));
    }
    step_check_window(step, shape);
    struct command c = {};
    c.op = COMMAND_SPAN_ATTENTION;
    c.span = *shape;
    c.step = cuda_step_of(step);
    c.tensor[0] = y;
    c.tensor[1] = q;
    c.tensor[2] = k_pages;
    c.tensor[3] = v_pages;
    command_append(cuda_of(be), &c);
}

void op_pkm_search(struct backend *be, struct tensor slots, struct tensor shares,
                   struct tensor query, const struct weight *keys, const struct pkm_shape *shape)
{
    const bool is_product = shape->kind == PKM_PRODUCT;
    const int64_t n_group = (int64_t)shape->n_head * (is_product ? 2 : 1);
    CHECK(shape->n_head > 0 && shape->n_key > 0 && shape->d_key > 0);
    CHECK(!is_product || (shape->d_key % 2 == 0 && shape->n_key <= 46340)); /* n_key² < 2^31 */
    CHECK(shape->k_top > 0 && shape->k_top <= shape->n_key && shape->k_top <= PKM_K_TOP_MAX);
    CHECK(keys->kind == WEIGHT_KEYS && (keys->n_group == 1 || keys->n_group == n_group));
    CHECK(keys->rows == static_cast<int64_t>(keys->n_group) * shape->n_key);
    CHECK(keys->cols == shape->d_key / (is_product ? 2 : 1));
    CHECK_VIEW(query, DTYPE_F32, slots.rows, (int64_t)shape->n_head * shape->d_key);
    CHECK_VIEW(slots, DTYPE_I32, query.rows, (int64_t)shape->n_head * shape->k_top);
    CHECK_VIEW(shares, DTYPE_F32, query.rows, (int64_t)shape->n_head * shape->k_top);
    struct command c = {};
    c.op = COMMAND_PKM_SEARCH;
    c.shape = *shape;
    c.tensor[0] = slots;
    c.tensor[1] = shares;
    c.tensor[2] = query;
    c.weight[0] = keys;
    command_append(cuda_of(be), &c);
}

void op_pkm_rescore(struct backend *be, struct tensor slots, struct tensor shares,
                    struct tensor slot_map, const struct pkm_rescore *rescore)
{
    const int64_t n_hit = static_cast<int64_t>(rescore->n_head) * rescore->k_top;
    CHECK(rescore->n_head > 0 && rescore->k_top > 0 && rescore->k_top <= PKM_K_TOP_MAX);
    CHECK(rescore->n_slot > 0 && rescore->temperature > 0);
    CHECK_VIEW(slots, DTYPE_I32, shares.rows, n_hit);
    CHECK_VIEW(shares, DTYPE_F32, slots.rows, n_hit);
    CHECK(slot_map.data == NULL ||
          (slot_map.dtype == DTYPE_I32 && slot_map.rows == rescore->n_head));
    struct command c = {};
    c.op = COMMAND_PKM_RESCORE;
    c.rescore = *rescore;
    c.tensor[0] = slots;
    c.tensor[1] = shares;
    c.tensor[2] = slot_map;
    command_append(cuda_of(be), &c);
}

void op_pkm_experts(struct backend *be, struct tensor y, struct tensor shares, struct tensor slots,
                    struct tensor x, const struct weight *experts)
{
    CHECK(experts->kind == WEIGHT_TABLE);
    CHECK_VIEW(slots, DTYPE_I32, x.rows, shares.cols);
    CHECK_VIEW(shares, DTYPE_F32, x.rows, slots.cols);
    CHECK_VIEW(y, DTYPE_F32, x.rows, slots.cols);
    CHECK_VIEW(x, DTYPE_F32, slots.rows, experts->cols);
    struct command c = {};
    c.op = COMMAND_PKM_EXPERTS;
    c.tensor[0] = y;
    c.tensor[1] = shares;
    c.tensor[2] = slots;
    c.tensor[3] = x;
    c.weight[0] = experts;
    command_append(cuda_of(be), &c);
}

void op_pkm_read(struct backend *be, struct tensor y, struct tensor residual, struct tensor slots,
                 struct tensor shares, const struct weight *values)
{
    CHECK(values->kind == WEIGHT_TABLE);
    CHECK_VIEW(y, DTYPE_F32, slots.rows, values->cols);
    CHECK_VIEW(slots, DTYPE_I32, y.rows, shares.cols);
    CHECK_VIEW(shares, DTYPE_F32, y.rows, slots.cols);
    CHECK(residual.data == NULL || (residual.dtype == DTYPE_F32 && residual.rows == y.rows &&
                                    residual.cols == y.cols && residual.stride >= y.cols));
    struct command c = {};
    c.op = COMMAND_PKM_READ;
    c.tensor[0] = y;
    c.tensor[1] = residual;
    c.tensor[2] = slots;
    c.tensor[3] = shares;
    c.weight[0] = values;
    command_append(cuda_of(be), &c);
}

void op_gather(struct backend *be, struct tensor y, struct tensor x, const struct step *step,
               int first)
{
    CHECK(first >= 0 && first + y.rows <= step->n_out);
    CHECK_VIEW(y, DTYPE_F32, y.rows, x.cols);
    CHECK_VIEW(x, DTYPE_F32, x.rows, y.cols);
    CHECK(y.rows == 0 || step->out_row[first + y.rows - 1] < x.rows); /* they ascend */
    struct command c = {};
    c.op = COMMAND_GATHER;
    c.n = first;
    c.step = cuda_step_of(step);
    c.tensor[0] = y;
    c.tensor[1] = x;
    command_append(cuda_of(be), &c);
}

void op_log_softmax(struct backend *be, struct tensor y, struct tensor base)
{
    CHECK_VIEW(y, DTYPE_F32, y.rows, y.cols);
    CHECK(y.rows <= INT32_MAX && y.cols > 0 && y.cols <= INT32_MAX / 2);
    CHECK(base.data == NULL || (base.dtype == DTYPE_F32 && base.rows == y.rows && base.cols == 1));
    struct command c = {};
    c.op = COMMAND_LOG_SOFTMAX;
    c.tensor[0] = y;
    c.tensor[1] = base;
    command_append(cuda_of(be), &c);
}

/* The lists of one drawn row: slices within the step's, tokens within the vocabulary. */
static void check_sample_row(const struct step *step, int64_t i, int64_t n_vocab)
{
    const struct sample_params *const p = &step->sample[i];
    CHECK(p->adjust_first >= 0 && p->n_adjust >= 0 &&
          p->n_adjust <= step->n_adjust - p->adjust_first);
    CHECK(p->allow_first >= 0 && p->n_allow >= 0 && p->n_allow <= step->n_allow - p->allow_first);
    for (int j = 0; j < p->n_adjust; j++) {
        const int32_t token = step->adjust[p->adjust_first + j].token;
        CHECK(token >= 0 && token < n_vocab);
    }
    for (int j = 0; j < p->n_allow; j++) {
        const int32_t token = step->allow[p->allow_first + j];
        CHECK(token >= 0 && token < n_vocab);
    }
}

void op_outputs(struct backend *be, struct tensor logits, struct step *step, int first)
{
    CHECK(first >= 0 && first + logits.rows <= step->n_out);
    CHECK(logits.cols > 0 && logits.cols <= step->limits.n_vocab);
    CHECK_VIEW(logits, DTYPE_F32, logits.rows, logits.cols);
    for (int64_t i = first; i < first + logits.rows; i++) {
        if ((step->out_want[i] & OUT_SAMPLE) != 0) {
            check_sample_row(step, i, logits.cols);
        }
        const int32_t target = step->target[i];
        CHECK((step->out_want[i] & OUT_LOGPROB) == 0 ||
              (target == TARGET_SAMPLED ? (step->out_want[i] & OUT_SAMPLE) != 0
                                        : target >= 0 && target < logits.cols));
    }
    step_will_output(step, first, logits.rows);
    struct command c = {};
    c.n = first;
    c.step = cuda_step_of(step);
    c.tensor[0] = logits;
    c.op = COMMAND_SAMPLE;
    command_append(cuda_of(be), &c);
    c.op = COMMAND_LOGPROBS;
    command_append(cuda_of(be), &c);
}

void op_linear_outputs(struct backend *be, struct tensor logits, struct tensor x,
                       const struct weight *w, struct tensor bias, struct step *step, int first)
{
    op_linear(be, logits, x, w, bias, ACT_NONE);
    op_outputs(be, logits, step, first);
}
