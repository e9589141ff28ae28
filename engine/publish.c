/* States, times, counters and wakes: see publish.h. */
#include "engine/publish.h"

#include "engine/log.h"

static void add(atomic_llong *counter, int64_t n)
{
    (void)atomic_fetch_add_explicit(counter, n, memory_order_relaxed);
}

static int64_t get(const atomic_llong *time)
{
    return atomic_load_explicit(time, memory_order_relaxed);
}

static void observe_us(struct histogram *h, int64_t from_us, int64_t to_us)
{
    histogram_add(h, (double)(to_us - from_us) * 1e-6);
}

static void touch(struct publisher *publisher, struct job *job)
{
    if (!job->dirty) {
        job->dirty = true;
        job->dirty_next = publisher->dirty;
        publisher->dirty = job;
    }
}

void publish_start(struct publisher *publisher, struct job *job, int64_t now_us)
{
    struct request *const request = job->request;
    if (get(&request->start_us) == 0) {
        atomic_store_explicit(&request->start_us, now_us, memory_order_relaxed);
        observe_us(&publisher->stats->queue_time, job->push_us, now_us);
        add(&publisher->stats->running, 1);
    }
}

void publish_results(struct publisher *publisher, struct sequence *seq, int n, int64_t now_us)
{
    if (n == 0) {
        return;
    }
    struct engine_stats *const stats = publisher->stats;
    struct request *const request = seq->job->request;
    if (!request->wakes_at_ends) {
        touch(publisher, seq->job);
    }
    const bool first = get(&request->first_us) == 0;
    if (first) {
        atomic_store_explicit(&request->first_us, now_us, memory_order_relaxed);
    }
    if (request->kind == REQUEST_SCORE) {
        return;
    }
    add(&stats->generation_tokens, n);
    if (first) {
        observe_us(&stats->ttft, seq->job->push_us, now_us);
        observe_us(&stats->prefill_time, get(&request->start_us), now_us);
    }
    if (seq->first_us == 0) {
        seq->first_us = now_us;
    } else {
        observe_us(&stats->itl, seq->last_us, now_us);
    }
    seq->last_us = now_us;
}

void publish_tpot(struct publisher *publisher, const struct sequence *seq)
{
    if (seq->job->request->kind == REQUEST_GENERATE && seq->n_out > 1) {
        const double s = (double)(seq->last_us - seq->first_us) * 1e-6;
        histogram_add(&publisher->stats->tpot, s / (seq->n_out - 1));
    }
}

/* ---- an item ends -------------------------------------------------------------------------- */

static void count_finish(struct engine_stats *stats, enum finish finish)
{
    switch (finish) {
    case FINISH_STOP: add(&stats->success_stop, 1); break;
    case FINISH_LENGTH: add(&stats->success_length, 1); break;
    case FINISH_CANCELLED:
    case FINISH_TIMEOUT:
    case FINISH_SHUTDOWN: add(&stats->aborted, 1); break;
    case FINISH_ERROR: add(&stats->errored, 1); break;
    case FINISH_NONE: UNREACHABLE();
    }
}

static void count_generation(struct engine_stats *stats, const struct request *request,
                             const struct item *item)
{
    histogram_add(&stats->prompt_len, (double)item->n_ids);
    histogram_add(&stats->generation_len, atomic_load_explicit(&item->n_out, memory_order_relaxed));
    histogram_add(&stats->max_tokens, item_max_tokens(request, item));
}

/* All items of the request are over. */
static void count_request(struct publisher *publisher, const struct job *job, enum finish finish,
                          int64_t now_us)
{
    struct engine_stats *const stats = publisher->stats;
    const struct request *const request = job->request;
    const int64_t start_us = get(&request->start_us);
    const int64_t first_us = get(&request->first_us);
    const bool scoring = request->kind == REQUEST_SCORE;
    if (start_us != 0) {
        add(&stats->running, -1);
    }
    if (finish == FINISH_CANCELLED && request->error.code == ERR_OK) {
        const enum stats_stage stage = start_us == 0   ? STAGE_QUEUED
                                       : scoring       ? STAGE_SCORE
                                       : first_us == 0 ? STAGE_PREFILL
                                                       : STAGE_DECODE;
        add(&stats->cancelled[stage], 1);
    }
    if (finish != FINISH_STOP && finish != FINISH_LENGTH) {
        return; /* the times of work that was cut short would distort the statistics of finished
                 * work */
    }
    observe_us(&stats->e2e, job->push_us, now_us);
    observe_us(&stats->inference_time, start_us != 0 ? start_us : now_us, now_us);
    if (scoring) {
        observe_us(&stats->score_time, job->push_us, now_us);
    } else if (first_us != 0) {
        observe_us(&stats->decode_time, first_us, now_us);
    }
}

void publish_item(struct publisher *publisher, struct job *job, struct item *item,
                  enum finish finish, const struct err *error, int64_t now_us)
{
    struct request *const request = job->request;
    CHECK(atomic_load_explicit(&item->state, memory_order_relaxed) == FINISH_NONE);
    count_finish(publisher->stats, finish);
    if (request->kind == REQUEST_GENERATE && (finish == FINISH_STOP || finish == FINISH_LENGTH)) {
        count_generation(publisher->stats, request, item);
    }
    /* The first failure is kept: the front end may read it as soon as one item has failed. */
    if (finish == FINISH_ERROR && request->error.code == ERR_OK) {
        char id[160];
        char message[700];
        request->error = *error;
        if (!publisher->failures_told) {
            log_event(LEVEL_ERROR, "request_failed", "id=%s code=%s error=%s",
                      log_quote(id, sizeof id, request->id), err_code_name(error->code),
                      log_quote(message, sizeof message, error->message));
        }
    }
    const int n_done = atomic_load_explicit(&request->n_item_done, memory_order_relaxed) + 1;
    if (n_done == request->n_item) {
        atomic_store_explicit(&request->done_us, now_us, memory_order_relaxed);
        count_request(publisher, job, finish, now_us);
    }
    atomic_store_explicit(&item->state, finish, memory_order_release);
    atomic_store_explicit(&request->n_item_done, n_done, memory_order_release);
    touch(publisher, job);
}

void publish_wake(struct publisher *publisher)
{
    while (publisher->dirty != NULL) {
        struct job *const job = publisher->dirty;
        struct request *const request = job->request;
        publisher->dirty = job->dirty_next;
        job->dirty = false;
        job->dirty_next = NULL;
        const bool is_over =
            atomic_load_explicit(&request->n_item_done, memory_order_relaxed) == request->n_item;
        if (is_over) { /* whoever reads the answer may take long */
            overlays_leave_all(&request->overlays);
        }
        request_wake(request);
        if (is_over) {
            CHECK(!job->queued && job->n_running == 0);
            queue_job_free(publisher->queue, job);
            request_drop(request);
        }
    }
}
