/* Plants bugs in a backend and demands that the checker finds each of them: a checker that passes
 * everything would look the same as kernels without faults.
 *
 * The broken backend is ref with one op wrapped. Each bug is of a kind that fast kernels have: a
 * forgotten tail, a write past the end, a tie taken from the wrong side, sums that depend on the
 * batch, what a page's former user left behind. */
#include "kernels/ref/ref.h"
#include "tests/kernels/check.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

/* ---- the bugs ------------------------------------------------------------------------------- */

/* Leaves the last output column of odd widths as it was. */
static void linear_forgets_tail(struct backend *be, struct tensor y, struct tensor x,
                                const struct weight *w, struct tensor bias, enum act act)
{
    const int64_t last = y.cols - 1;
    float before[64];
    CHECK(y.rows <= 64);
    for (int64_t r = 0; r < y.rows; r++) {
        before[r] = row_f32(y, r)[last];
    }
    ref_linear(be, y, x, w, bias, act);
    for (int64_t r = 0; r < y.rows && y.cols % 16 == 1; r++) {
        row_f32(y, r)[last] = before[r];
    }
}

/* Stores whole registers: the last row runs over its end. */
static void linear_writes_past_end(struct backend *be, struct tensor y, struct tensor x,
                                   const struct weight *w, struct tensor bias, enum act act)
{
    ref_linear(be, y, x, w, bias, act);
    if (y.cols % 8 != 0) {
        row_f32(y, y.rows - 1)[y.cols] = 0;
    }
}

/* Another order of the sum where four rows share the call: the last bits change. */
static void linear_depends_on_batch(struct backend *be, struct tensor y, struct tensor x,
                                    const struct weight *w, struct tensor bias, enum act act)
{
    ref_linear(be, y, x, w, bias, act);
    for (int64_t r = 0; r < y.rows && y.rows >= 4; r++) {
        row_f32(y, r)[0] = nextafterf(row_f32(y, r)[0], INFINITY);
    }
}

/* Adds nothing of the next row: only a NaN there shows it. */
static void linear_mixes_rows(struct backend *be, struct tensor y, struct tensor x,
                              const struct weight *w, struct tensor bias, enum act act)
{
    ref_linear(be, y, x, w, bias, act);
    for (int64_t r = 0; r + 1 < y.rows; r++) {
        row_f32(y, r)[0] -= 0 * row_f32(x, r + 1)[0];
    }
}

/* The tanh form of GELU instead of the exact one. */
static void linear_approximates_gelu(struct backend *be, struct tensor y, struct tensor x,
                                     const struct weight *w, struct tensor bias, enum act act)
{
    ref_linear(be, y, x, w, bias, act == ACT_GELU ? ACT_NONE : act);
    for (int64_t r = 0; r < y.rows && act == ACT_GELU; r++) {
        for (int64_t i = 0; i < y.cols; i++) {
            const float z = row_f32(y, r)[i];
            row_f32(y, r)[i] = 0.5f * z * (1 + tanhf(0.79788456f * (z + 0.044715f * z * z * z)));
        }
    }
}

/* x is scratch to it. */
static void linear_spoils_input(struct backend *be, struct tensor y, struct tensor x,
                                const struct weight *w, struct tensor bias, enum act act)
{
    ref_linear(be, y, x, w, bias, act);
    row_f32(x, 0)[0] += 1;
}

/* The sample variance: d - 1 instead of d. */
static void norm_is_unbiased(struct backend *be, struct tensor y, struct tensor x,
                             struct tensor gamma, struct tensor beta, float eps)
{
    ref_norm(be, y, x, gamma, beta, eps);
    const float factor = y.cols > 1 ? sqrtf((float)(y.cols - 1) / (float)y.cols) : 1;
    for (int64_t r = 0; r < y.rows; r++) {
        for (int64_t i = 0; i < y.cols; i++) {
            float *const at = row_f32(y, r) + i;
            *at = (*at - row_f32(beta, 0)[i]) * factor + row_f32(beta, 0)[i];
        }
    }
}

/* One position too many: the row sees its successor, or what the page held before. The checker
 * writes the positions anew for each step. */
static void attention_sees_next(struct backend *be, struct tensor y, struct tensor q,
                                struct tensor k_pages, struct tensor v_pages, struct tensor k,
                                struct tensor v, const struct step *step, int n_head, float scale)
{
    if (k.data != NULL) {
        ref_kv_store(be, k_pages, v_pages, k, v, step, n_head);
        k.data = v.data = NULL;
    }
    for (int r = 0; r < step->n_tok; r++) {
        step->pos[r] += (step->pos[r] + 1) % KV_PAGE != 0;
    }
    ref_attention(be, y, q, k_pages, v_pages, k, v, step, n_head, scale);
}

/* Takes the page numbers for consecutive. */
static void kv_store_ignores_pages(struct backend *be, struct tensor k_pages, struct tensor v_pages,
                                   struct tensor k, struct tensor v, const struct step *step,
                                   int n_head)
{
    const int32_t page = step->page[0];
    step->page[0] = page > 0 ? page - 1 : page + 1;
    ref_kv_store(be, k_pages, v_pages, k, v, step, n_head);
    step->page[0] = page;
}

static void swap_last_slots(struct tensor slots, const struct pkm_shape *shape)
{
    for (int64_t r = 0; r < slots.rows && shape->k_top > 1; r++) {
        int32_t *const last = row_i32(slots, r) + shape->k_top - 1;
        const int32_t slot = last[0];
        last[0] = last[-1];
        last[-1] = slot;
    }
}

/* The last two slots of the first head in the wrong order. */
static void search_swaps_slots(struct backend *be, struct tensor slots, struct tensor shares,
                               struct tensor query, const struct weight *keys,
                               const struct pkm_shape *shape)
{
    ref_pkm_search(be, slots, shares, query, keys, shape);
    swap_last_slots(slots, shape);
}

/* The same where their scores are equal: the larger slot first. */
static void search_breaks_ties(struct backend *be, struct tensor slots, struct tensor shares,
                               struct tensor query, const struct weight *keys,
                               const struct pkm_shape *shape)
{
    ref_pkm_search(be, slots, shares, query, keys, shape);
    const struct tensor first_row = tensor_head(slots, 1);
    const float *const share = row_f32(shares, 0) + shape->k_top - 1;
    if (shape->k_top > 1 && share[0] == share[-1]) {
        swap_last_slots(first_row, shape);
    }
}

/* Takes the upper of the two middle shares. */
static void rescore_takes_upper(struct backend *be, struct tensor slots, struct tensor shares,
                                struct tensor slot_map, const struct pkm_rescore *rescore)
{
    const int k = rescore->k_top;
    struct pkm_rescore plain = *rescore;
    const bool is_upper = rescore->subtract == PKM_SUBTRACT_MEDIAN && !rescore->normalize;
    plain.subtract = is_upper ? PKM_SUBTRACT_NONE : rescore->subtract;
    ref_pkm_rescore(be, slots, shares, slot_map, &plain);
    for (int64_t i = 0; is_upper && i < slots.rows * rescore->n_head; i++) {
        float *const share = row_f32(shares, i / rescore->n_head) + i % rescore->n_head * k;
        const float less = share[(k - 1) / 2];
        for (int j = 0; j < k; j++) {
            share[j] -= less;
        }
    }
}

/* Maps the slots of every head by the first head's row. */
static void rescore_maps_alike(struct backend *be, struct tensor slots, struct tensor shares,
                               struct tensor slot_map, const struct pkm_rescore *rescore)
{
    slot_map.stride = 0;
    ref_pkm_rescore(be, slots, shares, slot_map, rescore);
}

/* One norm for the whole row. */
static void l2_norm_joins_runs(struct backend *be, struct tensor y, struct tensor x, int n_run)
{
    (void)n_run;
    ref_l2_norm(be, y, x, 1);
}

/* Normalises by what was there before the sum. */
static void rms_norm_forgets_sum(struct backend *be, struct tensor y, struct tensor sum,
                                 struct tensor x, struct tensor r, struct tensor gamma, float eps)
{
    const struct tensor none = {0};
    ref_rms_norm(be, y, sum, x, r, gamma, eps);
    if (r.data != NULL && sum.data != x.data) {
        ref_rms_norm(be, y, none, x, none, gamma, eps);
    }
}

/* All heads have the length of the first one. */
static void head_norm_takes_first(struct backend *be, struct tensor x, struct tensor gamma,
                                  int n_head, float eps)
{
    for (int h = n_head - 1; h >= 0; h--) {
        for (int64_t r = 0; r < x.rows; r++) {
            const float *const first = (const float *)x.data + r * x.stride;
            float *const head = (float *)x.data + r * x.stride + h * gamma.cols;
            double squares = 0;
            for (int64_t c = 0; c < gamma.cols; c++) {
                squares += (double)first[c] * (double)first[c];
            }
            for (int64_t c = 0; c < gamma.cols; c++) {
                head[c] = (float)((double)head[c] * (double)((const float *)gamma.data)[c] /
                                  sqrt(squares / (double)gamma.cols + (double)eps));
            }
        }
    }
    (void)be;
}

/* All heads as one, whose later columns turn as the first head's. */
static void rope_takes_row(struct backend *be, struct tensor x, struct tensor table,
                           const struct step *step, int n_head)
{
    const struct tensor first = tensor_cols(x, 0, x.cols / n_head);
    (void)n_head;
    ref_rope(be, first, table, step, 1);
}

/* The sigmoid alone. */
static void gate_forgets_silu(struct backend *be, struct tensor y, struct tensor x, struct tensor g,
                              enum gate_kind kind)
{
    (void)kind;
    ref_gate(be, y, x, tensor_cols(g, 0, 1), GATE_SIGMOID);
}

/* Takes the first slot for all. */
static void experts_repeat_slot(struct backend *be, struct tensor y, struct tensor shares,
                                struct tensor slots, struct tensor x, const struct weight *experts,
                                const struct pkm_redirect *redirect)
{
    for (int64_t j = 0; j < slots.cols; j++) {
        ref_pkm_experts(be, tensor_cols(y, j, 1), tensor_cols(shares, j, 1),
                        tensor_cols(slots, 0, 1), x, experts, redirect);
    }
}

/* Reads the table's own experts, whatever stands in for them. */
static void experts_stay(struct backend *be, struct tensor y, struct tensor shares,
                         struct tensor slots, struct tensor x, const struct weight *experts,
                         const struct pkm_redirect *redirect)
{
    (void)redirect;
    ref_pkm_experts(be, y, shares, slots, x, experts, NULL);
}

/* Takes a head's entries for all heads. */
static void ablate_forgets_head(struct backend *be, struct tensor weights, struct tensor slots,
                                const struct step *step, const struct pkm_place *place)
{
    for (int h = 0; h < place->n_head; h++) {
        const struct pkm_place first = {place->memory, 1, place->k_top};
        const int64_t col = (int64_t)h * place->k_top;
        ref_pkm_ablate(be, tensor_cols(weights, col, place->k_top),
                       tensor_cols(slots, col, place->k_top), step, &first);
    }
}

/* Multiplies twice. */
static void ablate_repeats(struct backend *be, struct tensor weights, struct tensor slots,
                           const struct step *step, const struct pkm_place *place)
{
    ref_pkm_ablate(be, weights, slots, step, place);
    ref_pkm_ablate(be, weights, slots, step, place);
}

/* Forgets the last column. */
static void read_drops_column(struct backend *be, struct tensor y, struct tensor residual,
                              struct tensor slots, struct tensor shares,
                              const struct weight *values, const struct pkm_redirect *redirect)
{
    const int64_t n = slots.cols > 1 ? slots.cols - 1 : 1;
    ref_pkm_read(be, y, residual, tensor_cols(slots, 0, n), tensor_cols(shares, 0, n), values,
                 redirect);
}

/* Takes what stands in for another memory's rows. */
static void read_mixes_memories(struct backend *be, struct tensor y, struct tensor residual,
                                struct tensor slots, struct tensor shares,
                                const struct weight *values, const struct pkm_redirect *redirect)
{
    const struct pkm_redirect other = {redirect != NULL ? redirect->step : NULL,
                                       redirect != NULL ? redirect->memory - 1 : 0};
    ref_pkm_read(be, y, residual, slots, shares, values, redirect != NULL ? &other : NULL);
}

/* Gives all rows what the first row's sequence has. */
static void read_mixes_tenants(struct backend *be, struct tensor y, struct tensor residual,
                               struct tensor slots, struct tensor shares,
                               const struct weight *values, const struct pkm_redirect *redirect)
{
    struct step step = redirect != NULL ? *redirect->step : (struct step){0};
    const struct pkm_redirect one = {&step, redirect != NULL ? redirect->memory : 0};
    step.n_seq = 1;
    ref_pkm_read(be, y, residual, slots, shares, values, redirect != NULL ? &one : NULL);
}

/* Ranks ties as if they came after. */
static void logprobs_ranks_ties(struct backend *be, struct tensor logits, struct step *step,
                                int first)
{
    ref_outputs(be, logits, step, first);
    for (int64_t r = 0; r < logits.rows; r++) {
        const int64_t i = first + r;
        if ((step->out_want[i] & OUT_LOGPROB) == 0 || step->out_rank[i] == 0) {
            continue;
        }
        const int32_t id = step->target[i] == TARGET_SAMPLED ? step->out_token[i] : step->target[i];
        for (int64_t t = id + 1; t < logits.cols; t++) {
            step->out_rank[i] += row_f32(logits, r)[t] == row_f32(logits, r)[id];
        }
    }
}

/* Fills outputs of the whole step instead of the chunk's. */
static void logprobs_leaves_chunk(struct backend *be, struct tensor logits, struct step *step,
                                  int first)
{
    ref_outputs(be, logits, step, first);
    if (first > 0) {
        step->out_logprob[first - 1] = 0;
    }
}

/* top_p keeps one candidate too few where it keeps several. */
static void sample_cuts_early(struct backend *be, struct tensor logits, struct step *step,
                              int first)
{
    struct sample_params *const p = step->sample;
    for (int64_t r = 0; r < logits.rows; r++) {
        p[first + r].top_p *= p[first + r].top_p < 1 ? 0.9f : 1;
    }
    ref_outputs(be, logits, step, first);
}

/* Applies a quarter of the bias once more. */
static void sample_exaggerates_bias(struct backend *be, struct tensor logits, struct step *step,
                                    int first)
{
    for (int i = 0; i < step->n_adjust; i++) {
        step->adjust[i].bias *= 1.25f;
    }
    ref_outputs(be, logits, step, first);
}

static void embed_forgets_language(struct backend *be, struct tensor y, const struct step *step,
                                   const struct weight *tok, const struct weight *pos,
                                   const struct weight *lang)
{
    (void)lang;
    ref_embed(be, y, step, tok, pos, NULL);
}

static void gather_ignores_first(struct backend *be, struct tensor y, struct tensor x,
                                 const struct step *step, int first)
{
    (void)first;
    ref_gather(be, y, x, step, 0);
}

static void upload_ignores_stride(struct backend *be, struct tensor dst, const void *host)
{
    dst.stride = dst.cols;
    host_upload(be, dst, host);
}

/* ---- the tests ------------------------------------------------------------------------------ */

/* Checks a backend with this table on SIDE_ONE and SIDE_MANY, in so many per cent of the usual
 * cases; returns the number of failures, and the first message. */
static int failures_of(const struct backend_ops *ops, const char *row, int percent, char *message,
                       size_t bytes)
{
    struct check *const c = calloc(1, sizeof *c);
    assert_non_null(c);
    c->is_quiet = true;
    for (int side = 0; side < SIDE_N; side++) {
        assert_int_equal(ref_open(&c->side[side], NULL), ERR_OK);
    }
    c->side[SIDE_ONE]->op = c->side[SIDE_MANY]->op = ops;
    check_run(c, row, 1, percent);
    const int n_failed = c->n_failed;
    memcpy(message, c->message, bytes < sizeof c->message ? bytes : sizeof c->message);
    for (int side = 0; side < SIDE_N; side++) {
        backend_close(c->side[side]);
    }
    free(c);
    return n_failed;
}

static int failures(const struct backend_ops *ops, const char *row, char *message, size_t bytes)
{
    return failures_of(ops, row, 100, message, bytes);
}

static struct backend_ops ref_table(void)
{
    struct backend *be = NULL;
    assert_int_equal(ref_open(&be, NULL), ERR_OK);
    const struct backend_ops ops = *be->op;
    backend_close(be);
    return ops;
}

/* The message names the op, the shape and how to run the case again. */
static void expect_found(const struct backend_ops *ops, const char *row)
{
    char message[1024] = "";
    const int n_failed = failures(ops, row, message, sizeof message);
    print_message("%s", message);
    print_message("\n  (%d cases of %s failed, as they should)\n", n_failed, row);
    assert_true(n_failed > 0);
    assert_non_null(strstr(message, row));
    assert_non_null(strstr(message, "shape: "));
    assert_non_null(strstr(message, "CHECK_CASE=0x"));
}

#define TEST_BUG(slot, bug, row)                                                                   \
    static void test_##bug(void **state)                                                           \
    {                                                                                              \
        (void)state;                                                                               \
        struct backend_ops ops = ref_table();                                                      \
        ops.slot = bug;                                                                            \
        expect_found(&ops, row);                                                                   \
    }

TEST_BUG(compute.linear, linear_forgets_tail, "linear")
TEST_BUG(compute.linear, linear_writes_past_end, "linear")
TEST_BUG(compute.linear, linear_depends_on_batch, "linear")
TEST_BUG(compute.linear, linear_mixes_rows, "linear")
TEST_BUG(compute.linear, linear_approximates_gelu, "linear")
TEST_BUG(compute.linear, linear_spoils_input, "linear")
TEST_BUG(compute.norm, norm_is_unbiased, "norm")
TEST_BUG(compute.attention, attention_sees_next, "attention")
TEST_BUG(compute.kv_store, kv_store_ignores_pages, "attention")
TEST_BUG(compute.pkm_search, search_swaps_slots, "pkm_search")
TEST_BUG(compute.pkm_search, search_breaks_ties, "pkm_ties")
TEST_BUG(compute.pkm_rescore, rescore_takes_upper, "pkm_rescore")
TEST_BUG(compute.pkm_rescore, rescore_maps_alike, "pkm_rescore")
TEST_BUG(compute.l2_norm, l2_norm_joins_runs, "l2_norm")
TEST_BUG(compute.rms_norm, rms_norm_forgets_sum, "rms_norm")
TEST_BUG(compute.head_norm, head_norm_takes_first, "head_norm")
TEST_BUG(compute.rope, rope_takes_row, "rope")
TEST_BUG(compute.gate, gate_forgets_silu, "gate")
TEST_BUG(compute.pkm_experts, experts_repeat_slot, "pkm_experts")
TEST_BUG(compute.pkm_ablate, ablate_forgets_head, "pkm_ablate")
TEST_BUG(compute.pkm_ablate, ablate_repeats, "pkm_ablate")
TEST_BUG(compute.pkm_read, read_drops_column, "pkm_read")
TEST_BUG(compute.pkm_experts, experts_stay, "pkm_experts")
TEST_BUG(compute.pkm_read, read_mixes_memories, "pkm_read")
TEST_BUG(compute.pkm_read, read_mixes_tenants, "pkm_read")
TEST_BUG(compute.outputs, logprobs_ranks_ties, "logprobs")
TEST_BUG(compute.outputs, logprobs_leaves_chunk, "logprobs")
TEST_BUG(compute.outputs, sample_cuts_early, "sample")
TEST_BUG(compute.outputs, sample_exaggerates_bias, "sample")
TEST_BUG(compute.embed, embed_forgets_language, "embed")
TEST_BUG(compute.gather, gather_ignores_first, "gather")
TEST_BUG(upload, upload_ignores_stride, "transfer")

static void test_faultless_passes(void **state)
{
    (void)state;
    const struct backend_ops ops = ref_table();
    char message[1024] = "";
    if (failures_of(&ops, NULL, 20, message, sizeof message) != 0) {
        fail_msg("ref against ref: expected no failure, got %s", message);
    }
}

/* A failing case fails again when its seed alone is given. */
static void test_case_reruns(void **state)
{
    (void)state;
    struct backend_ops ops = ref_table();
    ops.compute.linear = linear_forgets_tail;
    char message[1024] = "";
    assert_true(failures(&ops, "linear", message, sizeof message) > 0);
    const uint64_t seed = strtoull(strstr(message, "CHECK_CASE=") + strlen("CHECK_CASE="), NULL, 0);
    const struct check_row *row = check_rows;
    while (strcmp(row->name, "linear") != 0) {
        row++;
    }
    struct check *const c = calloc(1, sizeof *c);
    assert_non_null(c);
    c->is_quiet = true;
    for (int side = 0; side < SIDE_N; side++) {
        assert_int_equal(ref_open(&c->side[side], NULL), ERR_OK);
    }
    c->side[SIDE_ONE]->op = c->side[SIDE_MANY]->op = &ops;
    check_run_case(c, row, seed);
    assert_int_equal(c->n_failed, 1);
    assert_string_equal(c->message, message);
    for (int side = 0; side < SIDE_N; side++) {
        backend_close(c->side[side]);
    }
    free(c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_faultless_passes),
        cmocka_unit_test(test_case_reruns),
        cmocka_unit_test(test_linear_forgets_tail),
        cmocka_unit_test(test_linear_writes_past_end),
        cmocka_unit_test(test_linear_depends_on_batch),
        cmocka_unit_test(test_linear_mixes_rows),
        cmocka_unit_test(test_linear_approximates_gelu),
        cmocka_unit_test(test_linear_spoils_input),
        cmocka_unit_test(test_norm_is_unbiased),
        cmocka_unit_test(test_attention_sees_next),
        cmocka_unit_test(test_kv_store_ignores_pages),
        cmocka_unit_test(test_search_swaps_slots),
        cmocka_unit_test(test_search_breaks_ties),
        cmocka_unit_test(test_rescore_takes_upper),
        cmocka_unit_test(test_rescore_maps_alike),
        cmocka_unit_test(test_l2_norm_joins_runs),
        cmocka_unit_test(test_rms_norm_forgets_sum),
        cmocka_unit_test(test_head_norm_takes_first),
        cmocka_unit_test(test_rope_takes_row),
        cmocka_unit_test(test_gate_forgets_silu),
        cmocka_unit_test(test_experts_repeat_slot),
        cmocka_unit_test(test_ablate_forgets_head),
        cmocka_unit_test(test_ablate_repeats),
        cmocka_unit_test(test_experts_stay),
        cmocka_unit_test(test_read_mixes_memories),
        cmocka_unit_test(test_read_mixes_tenants),
        cmocka_unit_test(test_read_drops_column),
        cmocka_unit_test(test_logprobs_ranks_ties),
        cmocka_unit_test(test_logprobs_leaves_chunk),
        cmocka_unit_test(test_sample_cuts_early),
        cmocka_unit_test(test_sample_exaggerates_bias),
        cmocka_unit_test(test_embed_forgets_language),
        cmocka_unit_test(test_gather_ignores_first),
        cmocka_unit_test(test_upload_ignores_stride),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
