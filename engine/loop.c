/* The engine thread: the only one that touches backend, model, pages and sequences.
 *
 * Each turn: look for requests that were cancelled or are late, admit sequences as there is room,
 * and run the steps of the turn (turn.c), which wake the front ends. With nothing to do it sleeps
 * on the queue's condition variable. No allocation in here. */
#include "engine/loop.h"

#include "engine/clock.h"
#include "engine/log.h"
#include "engine/prefix.h"
#include "engine/scoring.h"

#include <string.h>

/* How often to look for memory that front ends are about to release, and for cancelled requests,
 * while there is nothing to compute because requests wait for memory. */
enum { PAUSE_MS = 10 };
/* How often the model's files are checked for changes. */
enum { FILES_MS = 1000 };

/* ---- sequences come and go ---------------------------------------------------------------------
 */

void loop_remove(struct engine *engine, struct sequence *seq)
{
    int i = 0;
    while (engine->active[i] != seq) {
        i++;
    }
    turn_forget(engine, seq);
    seq->has_begun = false;
    kvpages_give(&engine->pages, seq->n_page, seq->page);
    seq->n_page = seq->n_kept = 0;
    queue_ended(seq->job);
    seq->job = NULL;
    seq->item = NULL;
    engine->n_active--;
    memmove(engine->active + i, engine->active + i + 1,
            (size_t)(engine->n_active - i) * sizeof(struct sequence *));
    engine->free[engine->n_free++] = seq;
}

/* Ends all items of a job that are not over yet, wherever they are. */
static void end_job(struct engine *engine, struct job *job, enum finish finish,
                    const struct err *error, int64_t now_us)
{
    for (int i = engine->n_active - 1; i >= 0; i--) {
        if (engine->active[i]->job == job) {
            loop_remove(engine, engine->active[i]);
        }
    }
    if (job->queued) {
        queue_remove(&engine->queue, job);
    }
    for (int i = 0; i < job->request->n_item; i++) {
        struct item *const item = &job->request->item[i];
        if (atomic_load_explicit(&item->state, memory_order_relaxed) == FINISH_NONE) {
            publish_item(&engine->publisher, job, item, finish, error, now_us);
        }
    }
}

/* Ends everything that runs or waits. Returns the number of requests. */
static int end_all(struct engine *engine, enum finish finish, const struct err *error)
{
    const int64_t now_us = clock_now_us();
    int n = 0;
    for (; engine->n_active > 0; n++) {
        end_job(engine, engine->active[0]->job, finish, error, now_us);
    }
    struct job *job = NULL;
    for (; (job = queue_take_dead(&engine->queue, now_us, true)) != NULL; n++) {
        end_job(engine, job, finish, error, now_us);
    }
    publish_wake(&engine->publisher);
    return n;
}

static enum finish reason_to_end(const struct request *request, int64_t now_us)
{
    if (atomic_load_explicit(&request->cancel, memory_order_relaxed)) {
        return FINISH_CANCELLED;
    }
    return request->deadline_us != 0 && now_us >= request->deadline_us ? FINISH_TIMEOUT
                                                                       : FINISH_NONE;
}

/* Ends the requests that were cancelled or whose deadline has passed, running or queued. */
static void sweep(struct engine *engine, int64_t now_us)
{
    for (int i = 0; i < engine->n_active;) {
        struct job *const job = engine->active[i]->job;
        const enum finish finish = reason_to_end(job->request, now_us);
        if (finish != FINISH_NONE) {
            end_job(engine, job, finish, NULL, now_us);
            i = 0; /* several entries may have gone */
        } else {
            i++;
        }
    }
    struct job *job = NULL;
    while ((job = queue_take_dead(&engine->queue, now_us, false)) != NULL) {
        const enum finish finish = reason_to_end(job->request, now_us);
        end_job(engine, job, finish != FINISH_NONE ? finish : FINISH_CANCELLED, NULL, now_us);
    }
}

/* ---- admission ----------------------------------------------------------------------------- */

/* Items that need no computation (one token to score) end here. */
bool loop_next_sequence(struct engine *engine, struct job *job, int64_t now_us)
{
    const struct request *const request = job->request;
    for (; job->next_item < request->n_item; job->next_item++, job->next_window = 0) {
        struct item *const item = &job->request->item[job->next_item];
        if (atomic_load_explicit(&item->state, memory_order_relaxed) != FINISH_NONE) {
            continue; /* failed in an earlier window */
        }
        if (request->kind == REQUEST_GENERATE) {
            if (job->next_window == 0) {
                return true;
            }
            continue;
        }
        const int64_t n = score_item_total(request, item);
        if (n == 0) {
            publish_start(&engine->publisher, job, now_us);
            publish_item(&engine->publisher, job, item, FINISH_LENGTH, NULL, now_us);
        } else if (job->next_window < (item->traced ? 1 : n)) {
            return true; /* a trace runs all windows in one sequence */
        }
    }
    return false;
}

/* Takes pages for a sequence: all that it can ever need. false: there are too few. A request that
 * is running already leaves one page in PLAN_BULK_SHARE to others, as with places. */
static bool take_pages(struct engine *engine, struct sequence *seq, int n_page)
{
    const struct kvpages *const pages = &engine->pages;
    const int n_kept =
        engine->options.shared && seq->job->n_running > 0 ? pages->n_page / PLAN_BULK_SHARE : 0;
    return n_page <= pages->n_page - kvpages_n_held(pages) - n_kept &&
           prefix_take(&engine->pages, &engine->stats, seq, n_page);
}

/* Admits the job's next sequence; false if it does not fit yet. */
static bool admit_sequence(struct engine *engine, struct job *job, int64_t now_us)
{
    if (loop_next_sequence(engine, job, now_us)) {
        struct item *const item = &job->request->item[job->next_item];
        struct sequence *const seq = engine->free[engine->n_free - 1];
        const int n_all = kvpages_for(sequence_position_max(job->request, item, job->next_window));
        const int n_page_max = engine->batch[0].step->limits.n_page_max;
        const int n_page = n_all < n_page_max ? n_all : n_page_max; /* a ring reuses them in turn */
        sequence_assign(seq, job, item, job->next_window);
        if (!take_pages(engine, seq, n_page)) {
            seq->job = NULL;
            return false;
        }
        const int64_t n_position = sequence_positions(job->request, item, job->next_window);
        engine->drain_positions += engine->backlog ? (double)n_position : 0;
        queue_admitted(&engine->queue, job, n_position);
        engine->n_free--;
        engine->active[engine->n_active++] = seq;
        publish_start(&engine->publisher, job, now_us);
        sequence_start(seq, model_info(engine->model), engine->tokenizer);
        if (engine->counts.n_seq > 0) {
            pkm_counts_begin(&engine->counts, model_info(engine->model),
                             (int)(seq - engine->sequence));
        }
        job->next_window++;
    }
    if (!loop_next_sequence(engine, job, now_us)) {
        queue_remove(&engine->queue, job);
    }
    return true;
}

/* The job's next sequence lacks pages. Whether others may be admitted nevertheless: yes if the job
 * runs already, since it has had a turn, and what it lacks may only be what is kept for others. */
static bool lets_others_pass(struct job *job)
{
    job->lacks_pages = job->lacked_pages = true;
    return job->n_running > 0 || job->n_passed < PLAN_PASS_MAX;
}

/* The job whose sequence is tried for the next place; NULL: none may take it. Fills
 * running->wait. */
static struct job *next_job(struct engine *engine, struct plan_running *running, bool traces)
{
    struct job *job[2];
    for (int c = 0; c < 2; c++) {
        job[c] = queue_pick(&engine->queue, running, (enum priority)c, traces);
        running->wait[c] = job[c] != NULL;
    }
    struct job *const passed = queue_pick_passed(&engine->queue, running);
    const int priority = plan_class(running);
    return passed != NULL ? passed : priority >= 0 ? job[priority] : NULL;
}

/* Takes memory for the job's traces unless it has it. false: there is not enough; *lacking becomes
 * what it needs, and until it is served no other request gets any. */
static bool has_traces(struct engine *engine, struct job *job, size_t *lacking)
{
    job->lacks_traces = !request_take_traces(job->request, model_info(engine->model));
    *lacking = job->lacks_traces ? job->request->trace_bytes : *lacking;
    return !job->lacks_traces;
}

static void admit(struct engine *engine)
{
    size_t trace_wait_bytes = 0;
    struct job *const waiter = queue_trace_waiter(&engine->queue);
    bool traces = waiter == NULL || has_traces(engine, waiter, &trace_wait_bytes);
    queue_try_pages(&engine->queue);
    for (;;) {
        struct plan_running running = {.n_max = engine->options.max_seqs,
                                       .leaves = engine->options.shared,
                                       .n_in_a_row = engine->n_in_a_row};
        for (int i = 0; i < engine->n_active; i++) {
            const bool bulk = engine->active[i]->job->request->priority == PRIORITY_BULK;
            running.n_bulk += bulk;
            running.n_interactive += !bulk;
        }
        struct job *const job = next_job(engine, &running, traces);
        if (job == NULL) {
            break;
        }
        if (!has_traces(engine, job, &trace_wait_bytes)) {
            traces = false; /* requests without go on */
            continue;
        }
        /* Also if its traces are why it is left out now: else it would not come to its turn. */
        const bool waits = job->request->priority == PRIORITY_INTERACTIVE &&
                           queue_pick(&engine->queue, &running, PRIORITY_BULK, true) != NULL;
        if (!admit_sequence(engine, job, clock_now_us())) { /* not before it was pushed */
            if (lets_others_pass(job)) {
                continue;
            }
            break;
        }
        engine->n_in_a_row = waits ? engine->n_in_a_row + 1 : 0;
    }
    atomic_store_explicit(&engine->stats.kv_pages_used, kvpages_n_held(&engine->pages),
                          memory_order_relaxed);
    atomic_store_explicit(&engine->stats.trace_wait_bytes, (long long)trace_wait_bytes,
                          memory_order_relaxed);
}

/* ---- the thread ---------------------------------------------------------------------------- */

/* Measures the rate at which a queue with a backlog empties, over about ten seconds of backlog.
 * Without a backlog requests leave the queue as they come, which does not tell how fast they
 * could. */
static void keep_drain_rate(struct engine *engine, int64_t busy_us)
{
    const double memory_s = 10;
    if (!engine->backlog) {
        return;
    }
    engine->drain_s += (double)busy_us * 1e-6;
    if (engine->drain_s > memory_s) {
        engine->drain_s /= 2;
        engine->drain_positions /= 2;
    }
    if (engine->drain_positions > 0 && engine->drain_s > 0) {
        atomic_store_explicit(&engine->drain_rate,
                              (long long)(1000 * engine->drain_positions / engine->drain_s),
                              memory_order_relaxed);
    }
}

static void fail(struct engine *engine, const struct err *error)
{
    char message[700];
    if (!engine->options.failures_told) {
        log_event(LEVEL_ERROR, "engine_failed", "code=%s error=%s", err_code_name(error->code),
                  log_quote(message, sizeof message, error->message));
    }
    queue_shut(&engine->queue, ERR_CLOSED,
               "the engine has failed, see its log; restart the server");
    atomic_store_explicit(&engine->state, ENGINE_FAILED, memory_order_release);
    (void)end_all(engine, FINISH_ERROR, error);
    if (engine->options.failed != NULL) {
        engine->options.failed(engine->options.failed_ctx);
    }
}

/* Wakes the front ends; but if a device is about to compute a step by itself, run_step wakes them
 * meanwhile. */
static void wake_before_step(struct engine *engine)
{
    if (engine->n_active == 0 || !engine->be->is_async) {
        publish_wake(&engine->publisher);
    }
}

/* Once in FILES_MS: whether the model's files are still what was opened. */
static enum err_code check_files(struct engine *engine, int64_t now_us, struct err *err)
{
    if (now_us < engine->files_us) {
        return ERR_OK;
    }
    engine->files_us = now_us + FILES_MS * INT64_C(1000);
    return model_check_files(engine->model, false, err);
}

/* One turn of the loop; false when the thread is to end. */
static bool turn(struct engine *engine)
{
    const int64_t begin_us = clock_now_us();
    const int64_t drain_us = atomic_load_explicit(&engine->drain_us, memory_order_acquire);
    atomic_store_explicit(&engine->queue.heartbeat_us, begin_us, memory_order_relaxed);
    if (drain_us != 0 && begin_us >= drain_us) {
        const int n_aborted = end_all(engine, FINISH_SHUTDOWN, NULL);
        atomic_store_explicit(&engine->n_aborted, n_aborted, memory_order_relaxed);
        return false;
    }
    sweep(engine, begin_us);
    const bool uploads = engine->overlays != NULL && overlays_turn(engine->overlays);
    admit(engine);
    engine->backlog = !queue_is_empty(&engine->queue);
    wake_before_step(engine); /* cancelled and late requests need not wait for the end of the
                               * step */
    struct err error = {.code = ERR_OK};
    const bool stepped = engine->n_active > 0 || engine->ahead != NULL;
    if (check_files(engine, begin_us, &error) != ERR_OK ||
        (stepped && turn_run(engine, &error) != ERR_OK)) {
        fail(engine, &error);
        return false;
    }
    wake_before_step(engine);
    const int64_t busy_us = clock_now_us() - begin_us;
    if (stepped) {
        (void)atomic_fetch_add_explicit(&engine->stats.busy_us, busy_us, memory_order_relaxed);
    }
    keep_drain_rate(engine, busy_us);
    const bool empty = queue_is_empty(&engine->queue);
    if (!stepped && !empty) {
        queue_pause(&engine->queue, PAUSE_MS);
    }
    if (engine->n_active == 0 && engine->ahead == NULL && empty && !uploads) {
        atomic_store_explicit(&engine->stats.kv_pages_used, 0, memory_order_relaxed);
        pkm_totals_add(&engine->totals, model_info(engine->model));
        if (drain_us != 0) {
            return false;
        }
        queue_wait(&engine->queue, FILES_MS);
    }
    return true;
}

void *loop_main(void *arg)
{
    struct engine *const engine = arg;
    (void)pthread_setname_np(pthread_self(), "engine"); /* for top -H, and tests/bench/compare.py */
    while (turn(engine)) {
    }
    turn_end(engine);
    if (engine->overlays != NULL) {
        overlays_end(engine->overlays);
    }
    atomic_store_explicit(&engine->queue.idle, true, memory_order_release);
    int running = ENGINE_DRAINING;
    (void)atomic_compare_exchange_strong(&engine->state, &running, ENGINE_STOPPED);
    return NULL;
}
