/* The steps of a turn.
 *
 * A turn's rows are shared out (plan.c), fill a step, the model runs, the results are taken, the
 * front ends woken; where the backend computes drawn tokens apart (phases_apart) there is a step of
 * these, which somebody waits for, and then one of the other rows.
 *
 * A step feeds on the results of the one before, and a device would idle while the host takes them
 * and fills the next. Where the backend runs ahead, two steps are under way at a time:
 *
 *   - a turn's step of other rows begins before its step of drawn tokens is finished: they have
 *     nothing to do with one another;
 *   - a turn that has rows of drawn tokens alone, or the last ones of prompts, begins the next
 *     turn's step before its own is finished. Each row of that holds the token that the row before
 *     draws, by its place (step_token_drawn). A sequence that ends with that token has then
 *     computed a row for nothing, whose result is dropped; its pages may go to another at once,
 *     because the device computes in the order in which steps began.
 *
 *   host     fill n+1 · wake for n-1 · wait for n · take n · fill n+2 · wake for n · wait for n+1 ·
 *   device   ────────────── compute n ────────────┴────────────── compute n+1 ───────────────┴──────
 *
 * Nothing runs ahead of a turn while a sequence has rows that are not in its step, or what it wants
 * next depends on the token (sequence_next). Elsewhere a step begins when the one before is taken;
 * where the backend computes by itself (is_async) the front ends are woken for the last step
 * meanwhile, so that it is not kept waiting while they are; where the model runs on this thread,
 * before it does. */
#include "engine/loop.h"

#include "engine/clock.h"
#include "engine/log.h"
#include "engine/lookups.h"
#include "engine/prefix.h"

#include <stdlib.h>
#include <string.h>

/* ---- opening ------------------------------------------------------------------------------- */

static enum err_code open_batch(struct engine *engine, struct batch *batch, struct err *err)
{
    const int max_seqs = engine->options.max_seqs;
    batch->step->ops_list = 1; /* the model's forward pass, always the same */
    batch->rows = calloc((size_t)max_seqs, sizeof *batch->rows);
    return batch->rows != NULL ? lookups_open(&batch->lookups, max_seqs, err)
                               : err_set(err, ERR_MEMORY, "no memory for a step's rows");
}

enum err_code turn_open(struct engine *engine, const struct step_limits *limits, struct err *err)
{
    struct backend *const be = engine->be;
    struct batch *const batch = engine->batch;
    if (be->op->step_new(be, &batch[0].step, limits, err) != ERR_OK ||
        open_batch(engine, &batch[0], err) != ERR_OK) {
        return err->code;
    }
    if (!be->runs_ahead) {
        return ERR_OK;
    }
    const enum err_code code = be->op->step_twin(be, &batch[1].step, batch[0].step, err);
    return code == ERR_OK ? open_batch(engine, &batch[1], err) : code;
}

void turn_close(struct engine *engine)
{
    for (int i = 1; i >= 0; i--) {
        struct batch *const batch = &engine->batch[i];
        if (batch->step != NULL) {
            engine->be->op->step_free(engine->be, batch->step);
        }
        free(batch->rows);
        lookups_close(&batch->lookups);
        *batch = (struct batch){0};
    }
}

/* ---- rows into a step ---------------------------------------------------------------------- */

/* Numbers the groups that share a step's rows: plan_sequence.group. */
static int *group_of(const struct sequence *seq)
{
    return seq->job->client != NULL ? &seq->job->client->group : &seq->job->group;
}

static void number_groups(struct engine *engine)
{
    int n_group = 0;
    for (int i = 0; i < engine->n_active; i++) {
        *group_of(engine->active[i]) = -1;
    }
    for (int i = 0; i < engine->n_active; i++) {
        int *const group = group_of(engine->active[i]);
        *group = *group < 0 ? n_group++ : *group;
    }
}

/* Shares the rows of a turn out among the sequences of which no step has begun. */
static void plan_turn(struct engine *engine)
{
    number_groups(engine);
    for (int i = 0; i < engine->n_active; i++) {
        struct sequence *const seq = engine->active[i];
        engine->plan[i] = (struct plan_sequence){
            .priority = seq->job->request->priority,
            .decode = !seq->has_begun && sequence_decodes(seq),
            .ordered = !seq->waits,
            .group = *group_of(seq),
            .n_left = !seq->has_begun && prefix_advance(&engine->pages, &engine->stats, seq)
                          ? sequence_rows(seq)
                          : 0,
        };
    }
    engine->has_interactive = false;
    for (int i = 0; i < engine->n_active; i++) {
        const struct plan_sequence *const seq = &engine->plan[i];
        engine->has_interactive |= seq->priority == PRIORITY_INTERACTIVE;
    }
    const int budget = engine->options.max_batch_tokens;
    engine->is_shared = plan_is_shared(engine->plan, engine->n_active);
    plan_rows(engine->plan, engine->n_active, budget,
              engine->is_shared ? (int)engine->prompt_limit.rows : budget,
              (int)engine->bulk_limit[engine->has_interactive].rows);
    engine->n_prompt_row = engine->n_bulk_row = 0;
    for (int i = 0; i < engine->n_active; i++) {
        const struct plan_sequence *const seq = &engine->plan[i];
        if (!seq->decode) {
            engine->n_prompt_row += seq->n_take;
            engine->n_bulk_row += seq->priority == PRIORITY_BULK ? seq->n_take : 0;
        }
        engine->active[i]->n_planned = seq->n_take;
    }
}

static void clear_batch(struct batch *batch, int64_t now_us)
{
    struct step *const step = batch->step;
    step->n_tok = step->n_seq = step->n_out = 0;
    step->n_top = step->n_adjust = step->n_allow = step->n_ablate = step->n_redirect = 0;
    step->n_before = 0;
    step->is_drawn = false;
    batch->n_seq = 0;
    batch->begin_us = now_us;
}

/* Puts planned rows into the step: those of drawn tokens, or all that are left. Whether there are
 * any. */
static bool fill(struct engine *engine, struct batch *batch, bool is_drawn, int64_t now_us)
{
    clear_batch(batch, now_us);
    struct step *const step = batch->step;
    step->is_drawn = is_drawn;
    for (int i = 0; i < engine->n_active; i++) {
        struct sequence *const seq = engine->active[i];
        if (is_drawn && !sequence_decodes(seq)) {
            continue;
        }
        const int n_take = sequence_fit(seq, step, seq->n_planned);
        if (n_take > 0) {
            batch->rows[batch->n_seq++] = sequence_fill(seq, step, n_take);
        }
        seq->n_planned = 0;
    }
    return step->n_tok > 0;
}

/* Puts the rows into next that follow those of batch, which has begun. Whether that can be told of
 * all sequences, and any has one. */
static bool fill_next(const struct engine *engine, const struct batch *batch, struct batch *next)
{
    int n_sequence = 0; /* that have not ended since batch began */
    int n_row = 0;
    for (int i = 0; i < batch->n_seq; i++) {
        const struct sequence_rows *const rows = &batch->rows[i];
        const enum sequence_next what = rows->seq == NULL ? NEXT_NONE : sequence_next(rows);
        if (what == NEXT_UNKNOWN) {
            return false;
        }
        n_sequence += rows->seq != NULL;
        n_row += what == NEXT_ROW;
    }
    if (n_row == 0 || n_sequence < engine->n_active) {
        return false;
    }
    clear_batch(next, clock_now_us());
    next->step->is_drawn = engine->be->phases_apart;
    next->step->n_before = batch->step->n_out;
    for (int i = 0; i < batch->n_seq; i++) {
        const struct sequence_rows *const rows = &batch->rows[i];
        if (rows->seq != NULL && sequence_next(rows) == NEXT_ROW) {
            next->rows[next->n_seq++] = sequence_fill_next(rows, next->step);
        }
    }
    return true;
}

/* ---- results out of a step ----------------------------------------------------------------- */

void turn_forget(struct engine *engine, const struct sequence *seq)
{
    for (int b = 0; b < 2; b++) {
        for (int i = 0; i < engine->batch[b].n_seq; i++) {
            struct sequence_rows *const rows = &engine->batch[b].rows[i];
            rows->seq = rows->seq == seq ? NULL : rows->seq;
        }
    }
}

static int64_t later(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

/* A step's time begins when the device has come to it. */
static void count_step(struct engine *engine, const struct batch *batch, int64_t end_us)
{
    struct engine_stats *const stats = &engine->stats;
    const struct model_info *const info = model_info(engine->model);
    const int n_tok = batch->step->n_tok;
    for (int m = 0; m < info->n_memory; m++) {
        const struct pkm_shape *const shape = &info->memory[m].shape;
        (void)atomic_fetch_add_explicit(&stats->memory_lookups[m],
                                        (long long)n_tok * shape->n_head * shape->k_top,
                                        memory_order_relaxed);
    }
    for (int i = 0; i < batch->n_seq; i++) {
        const struct sequence *const seq = batch->rows[i].seq;
        if (seq != NULL && seq->job->request->kind == REQUEST_GENERATE &&
            seq->item->n_ids > seq->n_done) {
            (void)atomic_fetch_add_explicit(&stats->prompt_tokens, batch->rows[i].n_row,
                                            memory_order_relaxed);
        }
    }
    const int64_t begin_us = later(batch->begin_us, engine->finished_us);
    histogram_add(&stats->step_tokens, n_tok);
    histogram_add(&stats->step_requests, batch->step->n_seq);
    histogram_add(&stats->step_time, (double)(end_us - begin_us) * 1e-6);
    atomic_store_explicit(&stats->last_step_us, end_us, memory_order_relaxed);
    (void)atomic_fetch_add_explicit(&stats->steps, 1, memory_order_relaxed);
    (void)atomic_fetch_add_explicit(&stats->model_us,
                                    end_us - later(batch->filled_us, engine->finished_us),
                                    memory_order_relaxed);
    engine->finished_us = end_us;
}

static bool has_ended(const struct item *item)
{
    return atomic_load_explicit(&item->state, memory_order_relaxed) != FINISH_NONE;
}

/* Takes the results of a sequence and ends it if it is over. */
static void take_rows(struct engine *engine, const struct batch *batch,
                      const struct sequence_rows *rows, int64_t now_us)
{
    struct sequence *const seq = rows->seq;
    struct job *const job = seq->job;
    struct item *const item = seq->item;
    seq->has_begun = false;
    if (has_ended(item)) {
        return; /* an earlier window of its item has failed */
    }
    const struct sequence_result result = sequence_consume(
        rows, batch->step, model_info(engine->model), engine->text, engine->text_max);
    publish_results(&engine->publisher, seq, result.n_published, now_us);
    if (result.finish == FINISH_ERROR) {
        kvpages_forget(&engine->pages); /* nobody knows where the failure began */
    } else {
        prefix_keep(&engine->pages, seq, !engine->be->phases_apart);
    }
    if (!result.over) {
        return;
    }
    publish_tpot(&engine->publisher, seq);
    loop_remove(engine, seq);
    if (result.item_over) {
        struct err error = {.code = ERR_OK};
        (void)err_set(&error, ERR_NUMERICAL,
                      "the model gave no number for a log-probability: its weights or this "
                      "input are out of range");
        publish_item(&engine->publisher, job, item, result.finish, &error, now_us);
    }
}

/* Takes the results of all sequences of the step. */
static void take(struct engine *engine, const struct batch *batch, int64_t now_us)
{
    for (int i = 0; i < batch->n_seq; i++) {
        if (batch->rows[i].seq != NULL) {
            take_rows(engine, batch, &batch->rows[i], now_us);
        }
    }
    for (int i = engine->n_active - 1; i >= 0; i--) {
        if (has_ended(engine->active[i]->item)) {
            loop_remove(engine, engine->active[i]); /* of an item of which a window has failed */
        }
    }
    /* A failed item may have been the last one that the queue still held windows of. */
    for (struct job *job = engine->publisher.dirty; job != NULL; job = job->dirty_next) {
        if (job->queued && !loop_next_sequence(engine, job, now_us)) {
            queue_remove(&engine->queue, job);
        }
    }
}

/* ---- a turn -------------------------------------------------------------------------------- */

static void begin(struct engine *engine, struct batch *batch)
{
    batch->filled_us = clock_now_us();
    engine->be->op->step_begin(engine->be, batch->step);
    model_forward(engine->model, batch->step, NULL);
    engine->be->op->submit(engine->be, batch->step);
    lookups_ask(engine, batch);
}

/* Wakes the front ends for the step before, while the device computes, and takes this one's
 * results. */
static enum err_code finish(struct engine *engine, struct batch *batch, struct err *err)
{
    struct backend *const be = engine->be;
    publish_wake(&engine->publisher);
    pkm_totals_add(&engine->totals, model_info(engine->model)); /* of the step before */
    if (be->op->finish(be, batch->step, err) != ERR_OK ||
        model_check_files(engine->model, true, err) != ERR_OK) {
        return err->code;
    }
    if (be->warning[0] != '\0') {
        char why[2 * sizeof be->warning];
        log_event(LEVEL_WARN, "backend_slow", "why=%s", log_quote(why, sizeof why, be->warning));
        be->warning[0] = '\0';
    }
    const int64_t end_us = clock_now_us();
    lookups_take(engine, batch);
    count_step(engine, batch, end_us);
    take(engine, batch, end_us);
    return ERR_OK;
}

/* The turn's first step, which begins now unless it has begun ahead. */
static struct batch *first_step(struct engine *engine, int64_t now_us)
{
    struct batch *const ahead = engine->ahead;
    engine->ahead = NULL;
    if (ahead != NULL) {
        return ahead;
    }
    struct batch *const batch = &engine->batch[0];
    const bool has_drawn = engine->be->phases_apart && fill(engine, batch, true, now_us);
    const bool has_any = has_drawn || fill(engine, batch, false, now_us);
    CHECK(has_any);
    begin(engine, batch);
    return batch;
}

/* Begins what the device computes next while first is under way, and says whether it belongs to
 * this turn; else it runs ahead of the next one. */
static bool begin_second(struct engine *engine, const struct batch *first, struct batch *second)
{
    const bool has_others = fill(engine, second, false, clock_now_us());
    if (!has_others && !fill_next(engine, first, second)) {
        return false;
    }
    begin(engine, second);
    engine->ahead = has_others ? NULL : second;
    return has_others;
}

/* Adapts the rows that the next turns may have to the time that this one took. */
static void update_limits(struct engine *engine, double step_ms)
{
    const double target_ms = engine->options.bulk_step_ms;
    const int budget = engine->options.max_batch_tokens;
    if (engine->n_bulk_row > 0) {
        const int times = engine->has_interactive ? 1 : PLAN_ALONE;
        plan_adapt(&engine->bulk_limit[engine->has_interactive], engine->n_bulk_row, step_ms,
                   target_ms * times, PLAN_BULK_MIN, budget);
    }
    /* A long prompt alone tells what the next one may take beside its tokens. */
    if (engine->is_shared || engine->n_prompt_row >= PLAN_PROMPT_MIN) {
        plan_adapt(&engine->prompt_limit, engine->n_prompt_row, step_ms, target_ms, PLAN_PROMPT_MIN,
                   budget);
    }
}

enum err_code turn_run(struct engine *engine, struct err *err)
{
    const int64_t begin_us = clock_now_us();
    plan_turn(engine);
    struct batch *const first = first_step(engine, begin_us);
    struct batch *second = &engine->batch[first == &engine->batch[0]];
    const bool runs_ahead = engine->be->runs_ahead && second->step != NULL;
    bool has_second = runs_ahead && begin_second(engine, first, second);
    if (finish(engine, first, err) != ERR_OK) {
        return err->code;
    }
    if (!runs_ahead) {
        second = first;
        has_second = fill(engine, second, false, clock_now_us());
        if (has_second) {
            begin(engine, second);
        }
    }
    if (has_second && finish(engine, second, err) != ERR_OK) {
        return err->code;
    }
    for (int i = 0; engine->ahead != NULL && i < engine->ahead->n_seq; i++) {
        if (engine->ahead->rows[i].seq != NULL) {
            engine->ahead->rows[i].seq->has_begun = true;
        }
    }
    update_limits(engine, (double)(clock_now_us() - begin_us) * 1e-3);
    return ERR_OK;
}

void turn_end(struct engine *engine)
{
    if (engine->ahead != NULL) {
        struct err ignored;
        (void)engine->be->op->finish(engine->be, engine->ahead->step, &ignored);
        engine->ahead = NULL;
    }
}
