/* What becomes of a step's memory look-ups: see lookups.h. */
#include "engine/lookups.h"

/* Copies the memory look-ups into the traces of the sequences that keep one. */
static void trace_step(struct engine *engine)
{
    const struct model_info *const info = model_info(engine->model);
    bool wanted = false;
    for (int i = 0; i < engine->n_active; i++) {
        wanted = wanted || (engine->active[i]->n_row > 0 && engine->active[i]->item->traced);
    }
    for (int m = 0; wanted && m < info->n_memory; m++) {
        struct tensor slots;
        struct tensor weights;
        model_pkm_hits(engine->model, m, engine->step->n_tok, &slots, &weights);
        CHECK(slots.cols <= engine->n_hit_column && slots.cols == weights.cols);
        for (int i = 0; i < engine->n_active; i++) {
            const struct sequence *const seq = engine->active[i];
            if (seq->n_row > 0 && seq->item->traced) {
                const struct tensor rows = tensor_rows(slots, seq->row_first, seq->n_row);
                engine->be->op->download(engine->be, engine->hit_slots, rows);
                engine->be->op->download(engine->be, engine->hit_weights,
                                         tensor_rows(weights, seq->row_first, seq->n_row));
                sequence_trace(seq, m, engine->hit_slots, engine->hit_weights, (int)slots.cols);
            }
        }
    }
}

/* In one of so many steps with overlays, counts how many look-ups of one row were answered by an
 * overlay. */
static void count_overlays(struct engine *engine)
{
    enum { EVERY = 16 };
    const struct model_info *const info = model_info(engine->model);
    if (engine->step->n_redirect == 0 || engine->n_overlay_step++ % EVERY != 0) {
        return;
    }
    for (int i = 0; i < engine->n_active; i++) { /* the sequences take turns */
        const int at =
            (int)((engine->n_overlay_step / EVERY + (uint32_t)i) % (uint32_t)engine->n_active);
        const struct sequence *const seq = engine->active[at];
        const struct request_overlays *const overlays = &seq->job->request->overlays;
        if (seq->n_row == 0 || overlays->n == 0) {
            continue;
        }
        for (int m = 0; m < info->n_memory; m++) {
            struct tensor slots;
            struct tensor weights;
            model_pkm_hits(engine->model, m, engine->step->n_tok, &slots, &weights);
            const int row = seq->row_first + seq->n_row - 1;
            engine->be->op->download(engine->be, engine->hit_slots, tensor_rows(slots, row, 1));
            overlays_count(engine->overlays, overlays, model_table_of(info, m), engine->hit_slots,
                           (int)slots.cols);
        }
        return;
    }
}

/* Adds the step's look-ups to the counts of all traffic. */
static void count_slots(struct engine *engine)
{
    const struct model_info *const info = model_info(engine->model);
    const bool is_host = engine->be->is_host;
    const int n_tok = engine->step->n_tok;
    for (int m = 0; m < info->n_memory; m++) {
        struct tensor slots;
        struct tensor weights;
        model_pkm_hits(engine->model, m, n_tok, &slots, &weights);
        CHECK(slots.stride == slots.cols && weights.stride == weights.cols);
        if (!is_host) {
            engine->be->op->download(engine->be, engine->hit_slots, tensor_head(slots, n_tok));
            engine->be->op->download(engine->be, engine->hit_weights, tensor_head(weights, n_tok));
        }
        for (int i = 0; i < engine->n_active; i++) {
            const struct sequence *const seq = engine->active[i];
            const int64_t first = seq->row_first * slots.cols;
            if (seq->n_row > 0) {
                pkm_counts_add(&engine->counts, info, m, (int)(seq - engine->sequence),
                               (is_host ? (const int32_t *)slots.data : engine->hit_slots) + first,
                               (is_host ? (const float *)weights.data : engine->hit_weights) +
                                   first,
                               seq->n_row * slots.cols);
            }
        }
    }
    pkm_counts_end_step(&engine->counts, n_tok);
}

void lookups_take(struct engine *engine)
{
    trace_step(engine);
    if (engine->counts.n_seq > 0) {
        count_slots(engine);
    }
    pkm_totals_take(&engine->totals, engine->be, engine->model, engine->step->n_tok);
    count_overlays(engine);
}

/* ---- for other threads ---------------------------------------------------------------------- */

enum err_code engine_pkm_stats(const struct engine *engine, int m, struct pkm_stats *stats,
                               struct err *err)
{
    return pkm_totals_stats(&engine->totals, model_info(engine->model), m, stats, err);
}

int64_t engine_pkm_sampled(const struct engine *engine)
{
    return atomic_load_explicit(&engine->totals.n_position, memory_order_relaxed);
}

const struct pkm_counts *engine_counts(const struct engine *engine)
{
    return engine->counts.n_seq > 0 ? &engine->counts : NULL;
}
