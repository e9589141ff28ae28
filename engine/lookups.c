/* What becomes of a step's memory look-ups: see lookups.h. */
#include "engine/loop.h"

#include <stdlib.h>

enum err_code lookups_open(struct lookups *lookups, int max_seqs, struct err *err)
{
    *lookups = (struct lookups){0};
    lookups->range = calloc((size_t)max_seqs + 2, sizeof *lookups->range);
    return lookups->range != NULL
               ? ERR_OK
               : err_set(err, ERR_MEMORY, "no memory for the look-ups of %d sequences", max_seqs);
}

void lookups_close(struct lookups *lookups)
{
    free(lookups->range);
    *lookups = (struct lookups){0};
}

/* All rows may be traced; the sample and the overlays' count have rows of their own beside them. */
int64_t lookups_fetch_bytes(const struct model_info *info, int n_tok_max)
{
    int64_t n_column = 0;
    for (int m = 0; m < info->n_memory; m++) {
        n_column += model_pkm_columns(&info->memory[m]);
    }
    const int64_t bytes = (int64_t)sizeof(int32_t) + (int64_t)sizeof(float);
    return ((int64_t)n_tok_max + TOTALS_ROW_MAX + 1) * n_column * bytes;
}

/* ---- choosing rows -------------------------------------------------------------------------- */

static void want(struct lookups *lookups, int first, int n)
{
    if (n > 0) {
        struct lookup_range *const range = &lookups->range[lookups->n_range++];
        range->first = first;
        range->n = n;
    }
}

static int last_row(const struct sequence_rows *rows)
{
    return rows->row_first + rows->n_row - 1;
}

static void want_traced(struct batch *batch)
{
    struct lookups *const lookups = &batch->lookups;
    for (int i = 0; i < batch->n_seq; i++) {
        const struct sequence_rows *const rows = &batch->rows[i];
        if (!rows->seq->item->traced) {
            continue;
        }
        struct lookup_range *const last =
            lookups->n_range > 0 ? &lookups->range[lookups->n_range - 1] : NULL;
        if (last != NULL && last->first + last->n == rows->row_first) {
            last->n += rows->n_row;
        } else {
            want(lookups, rows->row_first, rows->n_row);
        }
    }
}

/* In one of so many steps with overlays, whose last row shows how many look-ups overlays answer:
 * the sequences take turns. */
static const struct sequence_rows *choose_overlaid(struct engine *engine, const struct batch *batch)
{
    enum { EVERY = 16 };
    const struct sequence_rows *chosen = NULL;
    for (int i = 0; chosen == NULL && i < batch->n_seq; i++) {
        const uint32_t at = (engine->n_overlay_step / EVERY + (uint32_t)i) % (uint32_t)batch->n_seq;
        const struct sequence_rows *const rows = &batch->rows[at];
        chosen = rows->seq->job->request->overlays.n > 0 ? rows : NULL;
    }
    return chosen != NULL && engine->n_overlay_step++ % EVERY == 0 ? chosen : NULL;
}

void lookups_ask(struct engine *engine, struct batch *batch)
{
    struct lookups *const lookups = &batch->lookups;
    const struct model_info *const info = model_info(engine->model);
    struct step *const step = batch->step;
    lookups->n_range = 0;
    if (info->n_memory == 0) {
        return;
    }
    lookups->n_sampled = pkm_totals_due(&engine->totals, step->n_tok, &lookups->sampled_first);
    lookups->overlaid = choose_overlaid(engine, batch);
    if (engine->be->is_host || engine->counts.n_seq > 0) { /* it costs nothing, or all count */
        want(lookups, 0, step->n_tok);
    } else {
        want_traced(batch);
        want(lookups, lookups->sampled_first, lookups->n_sampled);
        if (lookups->overlaid != NULL) {
            want(lookups, last_row(lookups->overlaid), 1);
        }
    }
    for (int m = 0; m < info->n_memory; m++) {
        struct tensor slots;
        struct tensor weights;
        model_pkm_hits(engine->model, m, step->n_tok, &slots, &weights);
        CHECK(slots.cols == model_pkm_columns(&info->memory[m]) && weights.cols == slots.cols);
        for (int i = 0; i < lookups->n_range; i++) {
            struct lookup_range *const range = &lookups->range[i];
            range->slots[m] =
                engine->be->op->fetch(engine->be, step, tensor_rows(slots, range->first, range->n));
            range->weights[m] = engine->be->op->fetch(engine->be, step,
                                                      tensor_rows(weights, range->first, range->n));
        }
    }
}

/* ---- taking them ---------------------------------------------------------------------------- */

/* The look-ups of rows first .. first+n-1 in memory m, which were asked for. */
static void find(const struct lookups *lookups, int m, int n_column, int first, int n,
                 const int32_t **slots, const float **weights)
{
    const struct lookup_range *range = lookups->range;
    while (range < lookups->range + lookups->n_range &&
           (first < range->first || first + n > range->first + range->n)) {
        range++;
    }
    CHECK(range < lookups->range + lookups->n_range);
    const int64_t at = (int64_t)(first - range->first) * n_column;
    *slots = range->slots[m] + at;
    *weights = range->weights[m] + at;
}

void lookups_take(struct engine *engine, const struct batch *batch)
{
    const struct lookups *const lookups = &batch->lookups;
    const struct model_info *const info = model_info(engine->model);
    const bool counts = engine->counts.n_seq > 0;
    const struct sequence_rows *const overlaid = lookups->overlaid;
    const int32_t *slots = NULL;
    const float *weights = NULL;
    int n_counted = 0;
    for (int m = 0; m < info->n_memory; m++) {
        const int n_column = (int)model_pkm_columns(&info->memory[m]);
        n_counted = 0;
        for (int i = 0; i < batch->n_seq; i++) {
            const struct sequence_rows *const rows = &batch->rows[i];
            if (rows->seq == NULL || !(counts || rows->seq->item->traced)) {
                continue;
            }
            find(lookups, m, n_column, rows->row_first, rows->n_row, &slots, &weights);
            if (rows->seq->item->traced) {
                sequence_trace(rows, m, slots, weights, n_column);
            }
            if (counts) {
                pkm_counts_add(&engine->counts, info, m, (int)(rows->seq - engine->sequence), slots,
                               weights, (int64_t)rows->n_row * n_column);
                n_counted += rows->n_row;
            }
        }
        if (lookups->n_sampled > 0) {
            find(lookups, m, n_column, lookups->sampled_first, lookups->n_sampled, &slots,
                 &weights);
            pkm_totals_take(&engine->totals, info, m, lookups->n_sampled, slots, weights);
        }
        if (overlaid != NULL && overlaid->seq != NULL) {
            find(lookups, m, n_column, last_row(overlaid), 1, &slots, &weights);
            overlays_count(engine->overlays, &overlaid->seq->job->request->overlays,
                           model_table_of(info, m), slots, n_column);
        }
    }
    if (counts) {
        pkm_counts_end_step(&engine->counts, n_counted);
    }
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
