/* The ops of the table, whose arguments kernels/op.c has checked: each launches its kernels, the
 * cuda_<op> functions, as graph.cu says: once, once more into a recording, or not at all where the
 * step is replayed. An op without rows has nothing to launch.
 *
 * A kernel less is a microsecond or two less of a step of few rows. So an embedding is held back
 * until the norm that follows takes it along, and in steps of drawn tokens a norm until the product
 * that follows does, each block of which norms its rows itself (gemv.cu). Before any other op,
 * before the host waits and at the end of the step, what is held back is launched as it is. The
 * bits are those of the ops one by one. PKMSERVE_CUDA_FUSE=0 holds nothing back. */
#include "kernels/cuda/backend.cuh"

/* y: the op's result; w: its weight or NULL; both, like its name, for profilers. */
template <class Launch>
static void perform(struct cuda *cu, const char *op, struct tensor y, const struct weight *w,
                    const Launch &launch)
{
    linear_next(cu);
    trace_begin(cu, op, y, w);
    launch(cu);
    if (graphs_record(cu)) {
        launch(cu);
        graphs_recorded(cu);
    }
    trace_end(cu);
}

/* An op that was called. */
template <class Launch>
static void run(struct backend *be, const char *op, struct tensor y, const struct weight *w,
                const Launch &launch)
{
    struct cuda *const cu = cuda_of(be);
    if (graphs_launch(cu, y.rows)) {
        launch_held(cu);
        perform(cu, op, y, w, launch);
    }
}

/* ---- what is held back ---------------------------------------------------------------------- */

/* cu->held is an embedding if it has no gamma, a norm if it has no view, or both in one. */
void launch_held(struct cuda *cu)
{
    const struct norm_op held = cu->held;
    cu->held = {};
    if (held.y.data == NULL || cu->failure.code != ERR_OK) {
        return;
    }
    if (held.gamma.data == NULL) {
        perform(cu, "embed", held.y, held.tok, [&](struct cuda *) {
            cuda_embed(cu, held.y, held.view, held.tok, held.pos, held.lang);
        });
    } else {
        perform(cu, norm_op_name(&held), held.y, held.tok,
                [&](struct cuda *) { cuda_norm(cu, &held); });
    }
}

static void hold(struct cuda *cu, const struct norm_op *op, bool is_worth_it)
{
    cu->held = *op;
    if (!cu->fuses || !is_worth_it) {
        launch_held(cu);
    }
}

static bool is_same(struct tensor a, struct tensor b)
{
    return a.data == b.data && a.rows == b.rows && a.cols == b.cols && a.stride == b.stride;
}

static void hold_norm(struct backend *be, struct norm_op norm)
{
    struct cuda *const cu = cuda_of(be);
    if (!graphs_launch(cu, norm.y.rows)) {
        return;
    }
    const struct norm_op held = cu->held;
    if (held.view != NULL && held.gamma.data == NULL && norm.r.data == NULL &&
        is_same(held.y, norm.x) && is_same(norm.y, norm.x)) {
        norm.view = held.view;
        norm.tok = held.tok;
        norm.pos = held.pos;
        norm.lang = held.lang;
    } else {
        launch_held(cu);
    }
    hold(cu, &norm, cu->is_drawn);
}

static const struct step_view *view_of(const struct step *step)
{
    return cuda_step_of(step)->view;
}

/* ---- embedding, norms, positions, gates ----------------------------------------------------- */

void launch_embed(struct backend *be, struct tensor y, const struct step *step,
                  const struct weight *tok, const struct weight *pos, const struct weight *lang)
{
    struct cuda *const cu = cuda_of(be);
    if (!graphs_launch(cu, y.rows)) {
        return;
    }
    launch_held(cu);
    struct norm_op embedding = {};
    embedding.y = y;
    embedding.view = view_of(step);
    embedding.tok = tok;
    embedding.pos = pos;
    embedding.lang = lang;
    hold(cu, &embedding, graphs_is_open(cu));
}

void launch_norm(struct backend *be, struct tensor y, struct tensor x, struct tensor gamma,
                 struct tensor beta, float eps)
{
    const struct tensor none = {};
    hold_norm(be, {y, x, none, gamma, beta, eps, NULL, NULL, NULL, NULL});
}

void launch_add_norm(struct backend *be, struct tensor y, struct tensor x, struct tensor r,
                     struct tensor gamma, struct tensor beta, float eps)
{
    hold_norm(be, {y, x, r, gamma, beta, eps, NULL, NULL, NULL, NULL});
}

void launch_rms_norm(struct backend *be, struct tensor y, struct tensor sum, struct tensor x,
                     struct tensor r, struct tensor gamma, float eps)
{
    run(be, "rms_norm", y, NULL,
        [&](struct cuda *cu) { cuda_rms_norm(cu, y, sum, x, r, gamma, eps); });
}

void launch_l2_norm(struct backend *be, struct tensor y, struct tensor x, int n_run)
{
    run(be, "l2_norm", y, NULL, [&](struct cuda *cu) { cuda_l2_norm(cu, y, x, n_run); });
}

void launch_head_norm(struct backend *be, struct tensor x, struct tensor gamma, int n_head,
                      float eps)
{
    run(be, "head_norm", x, NULL,
        [&](struct cuda *cu) { cuda_head_norm(cu, x, gamma, n_head, eps); });
}

void launch_rope(struct backend *be, struct tensor x, struct tensor table, const struct step *step,
                 int n_head)
{
    run(be, "rope", x, NULL,
        [&](struct cuda *cu) { cuda_rope(cu, x, table, view_of(step), n_head); });
}

void launch_gate(struct backend *be, struct tensor y, struct tensor x, struct tensor g,
                 enum gate_kind kind)
{
    run(be, "gate", y, NULL, [&](struct cuda *cu) { cuda_gate(cu, y, x, g, kind); });
}

/* ---- linear layers -------------------------------------------------------------------------- */

static void linear_to(struct backend *be, struct tensor y, struct tensor x, const struct weight *w,
                      struct tensor bias, enum act act, enum linear_result result)
{
    struct cuda *const cu = cuda_of(be);
    const struct norm_op norm = cu->held;
    if (norm.gamma.data == NULL || !is_same(norm.y, x) || !linear_takes_norm(cu, y, &norm, w)) {
        run(be, "linear", y, w,
            [&](struct cuda *) { cuda_linear(cu, y, x, w, bias, act, result); });
    } else if (graphs_launch(cu, y.rows)) {
        cu->held = {};
        perform(cu,
                norm.view != NULL     ? "embed_norm_linear"
                : norm.r.data != NULL ? "add_norm_linear"
                                      : "norm_linear",
                y, w,
                [&](struct cuda *) { cuda_linear_normed(cu, y, &norm, w, bias, act, result); });
    }
}

void launch_linear(struct backend *be, struct tensor y, struct tensor x, const struct weight *w,
                   struct tensor bias, enum act act)
{
    linear_to(be, y, x, w, bias, act, LINEAR_TO_Y);
}

void launch_ffn(struct backend *be, struct tensor y, struct tensor hidden, struct tensor x,
                const struct ffn *ffn)
{
    linear_to(be, hidden, x, ffn->up, ffn->up_bias, ffn->act,
              ffn->up->dtype == ffn->down->dtype ? LINEAR_TO_PRODUCT : LINEAR_TO_Y);
    launch_linear(be, y, hidden, ffn->down, ffn->down_bias, ACT_NONE);
}

/* ---- attention ------------------------------------------------------------------------------ */

void launch_kv_store(struct backend *be, struct tensor k_pages, struct tensor v_pages,
                     struct tensor k, struct tensor v, const struct step *step, int n_head)
{
    run(be, "kv_store", k, NULL,
        [&](struct cuda *cu) { cuda_kv_store(cu, k_pages, v_pages, k, v, view_of(step), n_head); });
}

/* In a step of drawn tokens, one of each sequence, one kernel stores k and v on its way: each head
 * of a sequence has one block that reads what is stored. Sequences share pages that earlier steps
 * have filled and none that this one writes to. */
void launch_attention(struct backend *be, struct tensor y, struct tensor q, struct tensor k_pages,
                      struct tensor v_pages, struct tensor k, struct tensor v,
                      const struct step *step, int n_head, float scale)
{
    const struct cuda_step *const s = cuda_step_of(step);
    const int n_kv_head = static_cast<int>(k_pages.cols / KV_PAGE / (y.cols / n_head));
    const bool is_apart =
        k.data != NULL && (n_kv_head != n_head || !step->is_drawn || !cuda_of(be)->attends_drawn);
    const struct tensor none = {};
    const struct tensor k_left = is_apart ? none : k;
    const struct tensor v_left = is_apart ? none : v;
    if (is_apart) {
        launch_kv_store(be, k_pages, v_pages, k, v, step, n_kv_head);
    }
    run(be, "attention", y, NULL, [&](struct cuda *cu) {
        cuda_attention(cu, y, q, k_pages, v_pages, k_left, v_left, s->view, &s->scratch,
                       s->step.limits.n_page_max, n_head, scale);
    });
}

void launch_span_attention(struct backend *be, struct tensor y, struct tensor q,
                           struct tensor k_pages, struct tensor v_pages, const struct step *step,
                           const struct span_shape *shape)
{
    run(be, "span_attention", y, NULL, [&](struct cuda *cu) {
        cuda_span_attention(cu, y, q, k_pages, v_pages, view_of(step), shape);
    });
}

/* ---- memories ------------------------------------------------------------------------------- */

void launch_pkm_search(struct backend *be, struct tensor slots, struct tensor weights,
                       struct tensor query, const struct weight *keys,
                       const struct pkm_shape *shape)
{
    run(be, "pkm_search", slots, keys,
        [&](struct cuda *cu) { cuda_pkm_search(cu, slots, weights, query, keys, shape); });
}

void launch_pkm_rescore(struct backend *be, struct tensor slots, struct tensor weights,
                        struct tensor slot_map, const struct pkm_rescore *rescore)
{
    run(be, "pkm_rescore", slots, NULL,
        [&](struct cuda *cu) { cuda_pkm_rescore(cu, slots, weights, slot_map, rescore); });
}

static const struct step_view *view_of_redirect(const struct pkm_redirect *redirect)
{
    return redirect == NULL ? NULL : view_of(redirect->step);
}

void launch_pkm_experts(struct backend *be, struct tensor y, struct tensor weights,
                        struct tensor slots, struct tensor x, const struct weight *experts,
                        const struct pkm_redirect *redirect)
{
    const int memory = redirect == NULL ? 0 : redirect->memory;
    run(be, "pkm_experts", y, experts, [&](struct cuda *cu) {
        cuda_pkm_experts(cu, y, weights, slots, x, experts, view_of_redirect(redirect), memory);
    });
}

void launch_pkm_ablate(struct backend *be, struct tensor weights, struct tensor slots,
                       const struct step *step, const struct pkm_place *place)
{
    run(be, "pkm_ablate", weights, NULL,
        [&](struct cuda *cu) { cuda_pkm_ablate(cu, weights, slots, view_of(step), place); });
}

void launch_pkm_read(struct backend *be, struct tensor y, struct tensor residual,
                     struct tensor slots, struct tensor weights, const struct weight *values,
                     const struct pkm_redirect *redirect)
{
    const int memory = redirect == NULL ? 0 : redirect->memory;
    run(be, "pkm_read", y, values, [&](struct cuda *cu) {
        cuda_pkm_read(cu, y, residual, slots, weights, values, view_of_redirect(redirect), memory);
    });
}

/* ---- outputs -------------------------------------------------------------------------------- */

void launch_gather(struct backend *be, struct tensor y, struct tensor x, const struct step *step,
                   int first)
{
    run(be, "gather", y, NULL,
        [&](struct cuda *cu) { cuda_gather(cu, y, x, view_of(step), first); });
}

void launch_log_softmax(struct backend *be, struct tensor y, struct tensor base)
{
    run(be, "log_softmax", y, NULL, [&](struct cuda *cu) { cuda_log_softmax(cu, y, base); });
}

void launch_outputs(struct backend *be, struct tensor logits, struct step *step, int first)
{
    const struct cuda_step *const s = cuda_step_of(step);
    step_will_output(step, first, logits.rows);
    run(be, "outputs", logits, NULL,
        [&](struct cuda *cu) { cuda_outputs(cu, logits, s->view, &s->scratch, first); });
}

void launch_linear_outputs(struct backend *be, struct tensor logits, struct tensor x,
                           const struct weight *w, struct tensor bias, struct step *step, int first)
{
    launch_linear(be, logits, x, w, bias, ACT_NONE);
    launch_outputs(be, logits, step, first);
}
