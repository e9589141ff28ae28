/* POST /score: log-probabilities of texts and ids. */
#include "server/routes.h"
#include "server/score.h"

#include <stdlib.h>

struct score_work {
    struct server *server; /* Borrowed */
    struct score_job job;
    struct answer_meta meta;
};

static void work_free(void *data)
{
    struct score_work *const work = data;
    score_free(&work->job);
    free(work);
}

static void work_gone(void *data)
{
    struct score_work *const work = data;
    request_cancel(work->job.request);
}

static void count_items(struct metrics *metrics, const struct score_job *job)
{
    struct metrics_score *const count =
        &metrics->score[job->by_text ? METRICS_FORM_TEXT : METRICS_FORM_IDS];
    for (int i = 0; i < job->request->n_item; i++) {
        const struct item *const item = &job->request->item[i];
        const struct score_sum sum = score_sum_item(item);
        metrics_add_score(count, sum.n_scored, item->n_position, -sum.sum_logprob);
    }
}

static enum exchange_next work_next(struct exchange *x, void *data)
{
    struct score_work *const work = data;
    const struct request *const request = work->job.request;
    if (routes_gone(x, work->job.request)) {
        return EXCHANGE_ANSWER;
    }
    if (atomic_load(&request->n_item_done) < request->n_item) {
        return EXCHANGE_WAIT;
    }
    struct api_error error = {0};
    if (!score_write(&x->out, &work->job, &work->server->limits, &work->meta, &error)) {
        routes_error(work->server, x, &error);
        return EXCHANGE_ANSWER;
    }
    count_items(&work->server->metrics, &work->job);
    exchange_json(x, 200);
    routes_time_headers(x, request);
    return EXCHANGE_ANSWER;
}

static const struct exchange_work work_ops = {
    .next = work_next, .gone = work_gone, .free = work_free};

void api_score(struct server *server, struct exchange *x)
{
    struct score_work *const work = calloc(1, sizeof *work);
    if (work == NULL) {
        exchange_refuse(x, 500, "out_of_memory", NULL, "no memory for the request");
        return;
    }
    work->server = server;
    struct api_error error = {0};
    const int64_t parse_us = engine_now_us();
    const bool ok = score_parse(&work->job, x->body.data, x->body.n, &server->limits, &error);
    metrics_tokenize_time(&server->metrics, parse_us);
    if (!ok) {
        routes_error(server, x, &error);
        work_free(work);
        return;
    }
    x->n_prompt = score_n_prompt(&work->job);
    if (!routes_submit(server, x, work->job.request)) {
        work_free(work);
        return;
    }
    work->meta = routes_accept(server, x, work->job.id, work->job.ignored);
    x->work = &work_ops;
    x->work_data = work;
}
