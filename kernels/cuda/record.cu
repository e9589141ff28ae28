/* The compute ops of the table, whose arguments kernels/op.c has checked: each becomes a command.
 * Nothing runs here. */
#include "kernels/cuda/backend.cuh"

void record_embed(struct backend *be, struct tensor y, const struct step *step,
                  const struct weight *tok, const struct weight *pos, const struct weight *lang)
{
    struct command c = {};
    c.op = COMMAND_EMBED;
    c.step = cuda_step_of(step);
    c.tensor[0] = y;
    c.weight[0] = tok;
    c.weight[1] = pos;
    c.weight[2] = lang;
    command_append(cuda_of(be), &c);
}

void record_norm(struct backend *be, struct tensor y, struct tensor x, struct tensor gamma,
                 struct tensor beta, float eps)
{
    struct command c = {};
    c.op = COMMAND_NORM;
    c.f = eps;
    c.tensor[0] = y;
    c.tensor[1] = x;
    c.tensor[2] = gamma;
    c.tensor[3] = beta;
    command_append(cuda_of(be), &c);
}

void record_add_norm(struct backend *be, struct tensor y, struct tensor x, struct tensor r,
                     struct tensor gamma, struct tensor beta, float eps)
{
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

void record_l2_norm(struct backend *be, struct tensor y, struct tensor x, int n_run)
{
    struct command c = {};
    c.op = COMMAND_L2_NORM;
    c.n = n_run;
    c.tensor[0] = y;
    c.tensor[1] = x;
    command_append(cuda_of(be), &c);
}

void record_head_norm(struct backend *be, struct tensor x, struct tensor gamma, int n_head,
                      float eps)
{
    struct command c = {};
    c.op = COMMAND_HEAD_NORM;
    c.n = n_head;
    c.f = eps;
    c.tensor[0] = x;
    c.tensor[1] = gamma;
    command_append(cuda_of(be), &c);
}

void record_rms_norm(struct backend *be, struct tensor y, struct tensor sum, struct tensor x,
                     struct tensor r, struct tensor gamma, float eps)
{
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

void record_rope(struct backend *be, struct tensor x, struct tensor table, const struct step *step,
                 int n_head)
{
    struct command c = {};
    c.op = COMMAND_ROPE;
    c.n = n_head;
    c.step = cuda_step_of(step);
    c.tensor[0] = x;
    c.tensor[1] = table;
    command_append(cuda_of(be), &c);
}

void record_gate(struct backend *be, struct tensor y, struct tensor x, struct tensor g,
                 enum gate_kind kind)
{
    struct command c = {};
    c.op = COMMAND_GATE;
    c.n = kind;
    c.tensor[0] = y;
    c.tensor[1] = x;
    c.tensor[2] = g;
    command_append(cuda_of(be), &c);
}

void record_linear(struct backend *be, struct tensor y, struct tensor x, const struct weight *w,
                   struct tensor bias, enum act act)
{
    struct command c = {};
    c.op = COMMAND_LINEAR;
    c.n = act;
    c.tensor[0] = y;
    c.tensor[1] = x;
    c.tensor[2] = bias;
    c.weight[0] = w;
    command_append(cuda_of(be), &c);
}

void record_ffn(struct backend *be, struct tensor y, struct tensor hidden, struct tensor x,
                const struct ffn *ffn)
{
    record_linear(be, hidden, x, ffn->up, ffn->up_bias, ffn->act);
    record_linear(be, y, hidden, ffn->down, ffn->down_bias, ACT_NONE);
}

void record_kv_store(struct backend *be, struct tensor k_pages, struct tensor v_pages,
                     struct tensor k, struct tensor v, const struct step *step, int n_head)
{
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

static bool is_decode(const struct step *step)
{
    for (int s = 0; s < step->n_seq; s++) {
        if (step->seq_first[s + 1] - step->seq_first[s] != 1) {
            return false;
        }
    }
    return true;
}

/* In a step whose sequences have one row each, attention stores k and v on its way: each head of a
 * sequence has one block that reads what is stored. Sequences share pages that earlier steps have
 * filled and none that this one writes to. */
void record_attention(struct backend *be, struct tensor y, struct tensor q, struct tensor k_pages,
                      struct tensor v_pages, struct tensor k, struct tensor v,
                      const struct step *step, int n_head, float scale)
{
    const int n_kv_head = static_cast<int>(k_pages.cols / KV_PAGE / (y.cols / n_head));
    const bool is_joint = k.data != NULL && n_kv_head == n_head && is_decode(step);
    if (k.data != NULL && !is_joint) {
        record_kv_store(be, k_pages, v_pages, k, v, step, n_kv_head);
    }
    struct command c = {};
    c.op = COMMAND_ATTENTION;
    c.n = n_head;
    c.f = scale;
    c.step = cuda_step_of(step);
    c.tensor[0] = y;
    c.tensor[1] = q;
    c.tensor[2] = k_pages;
    c.tensor[3] = v_pages;
    if (is_joint) {
        c.tensor[4] = k;
        c.tensor[5] = v;
    }
    command_append(cuda_of(be), &c);
}

void record_span_attention(struct backend *be, struct tensor y, struct tensor q,
                           struct tensor k_pages, struct tensor v_pages, const struct step *step,
                           const struct span_shape *shape)
{
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

void record_pkm_search(struct backend *be, struct tensor slots, struct tensor weights,
                       struct tensor query, const struct weight *keys,
                       const struct pkm_shape *shape)
{
    struct command c = {};
    c.op = COMMAND_PKM_SEARCH;
    c.shape = *shape;
    c.tensor[0] = slots;
    c.tensor[1] = weights;
    c.tensor[2] = query;
    c.weight[0] = keys;
    command_append(cuda_of(be), &c);
}

void record_pkm_rescore(struct backend *be, struct tensor slots, struct tensor weights,
                        struct tensor slot_map, const struct pkm_rescore *rescore)
{
    struct command c = {};
    c.op = COMMAND_PKM_RESCORE;
    c.rescore = *rescore;
    c.tensor[0] = slots;
    c.tensor[1] = weights;
    c.tensor[2] = slot_map;
    command_append(cuda_of(be), &c);
}

static void set_redirect(struct command *c, const struct pkm_redirect *redirect)
{
    c->step = redirect == NULL ? NULL : cuda_step_of(redirect->step);
    c->n = redirect == NULL ? 0 : redirect->memory;
}

void record_pkm_experts(struct backend *be, struct tensor y, struct tensor weights,
                        struct tensor slots, struct tensor x, const struct weight *experts,
                        const struct pkm_redirect *redirect)
{
    struct command c = {};
    c.op = COMMAND_PKM_EXPERTS;
    c.tensor[0] = y;
    c.tensor[1] = weights;
    c.tensor[2] = slots;
    c.tensor[3] = x;
    c.weight[0] = experts;
    set_redirect(&c, redirect);
    command_append(cuda_of(be), &c);
}

void record_pkm_ablate(struct backend *be, struct tensor weights, struct tensor slots,
                       const struct step *step, const struct pkm_place *place)
{
    struct command c = {};
    c.op = COMMAND_PKM_ABLATE;
    c.place = *place;
    c.step = cuda_step_of(step);
    c.tensor[0] = weights;
    c.tensor[1] = slots;
    command_append(cuda_of(be), &c);
}

void record_pkm_read(struct backend *be, struct tensor y, struct tensor residual,
                     struct tensor slots, struct tensor weights, const struct weight *values,
                     const struct pkm_redirect *redirect)
{
    struct command c = {};
    c.op = COMMAND_PKM_READ;
    c.tensor[0] = y;
    c.tensor[1] = residual;
    c.tensor[2] = slots;
    c.tensor[3] = weights;
    c.weight[0] = values;
    set_redirect(&c, redirect);
    command_append(cuda_of(be), &c);
}

void record_gather(struct backend *be, struct tensor y, struct tensor x, const struct step *step,
                   int first)
{
    struct command c = {};
    c.op = COMMAND_GATHER;
    c.n = first;
    c.step = cuda_step_of(step);
    c.tensor[0] = y;
    c.tensor[1] = x;
    command_append(cuda_of(be), &c);
}

void record_log_softmax(struct backend *be, struct tensor y, struct tensor base)
{
    struct command c = {};
    c.op = COMMAND_LOG_SOFTMAX;
    c.tensor[0] = y;
    c.tensor[1] = base;
    command_append(cuda_of(be), &c);
}

void record_outputs(struct backend *be, struct tensor logits, struct step *step, int first)
{
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

void record_linear_outputs(struct backend *be, struct tensor logits, struct tensor x,
                           const struct weight *w, struct tensor bias, struct step *step, int first)
{
    record_linear(be, logits, x, w, bias, ACT_NONE);
    record_outputs(be, logits, step, first);
}
