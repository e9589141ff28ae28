/* POST /score and POST /v1/score: log-probabilities of texts and ids, whole or as a stream. */
#include "engine/clock.h"
#include "engine/scoring.h"
#include "server/api/routes.h"
#include "server/io/answer.h"
#include "server/score/score_labels.h"
#include "server/score/score_stream.h"

#include <stdlib.h>

_Static_assert((int)SCORE_TEXT == (int)METRICS_FORM_TEXT &&
                   (int)SCORE_IDS == (int)METRICS_FORM_IDS &&
                   (int)SCORE_RANKING == (int)METRICS_FORM_RANKING &&
                   (int)SCORE_PAIRS == (int)METRICS_FORM_PAIRS,
               "forms are counted by their own number");

/* What differs between the two routes. */
struct score_route {
    bool (*parse)(struct score_job *job, const char *body, size_t bytes,
                  const struct api_limits *limits, struct api_error *error);
    /* The whole answer, in pieces. */
    bool (*write)(struct score_writer *writer, struct text *out, size_t enough,
                  const struct answer_meta *meta, bool *done, struct api_error *error);
};

struct score_work {
    struct server *server; /* Borrowed */
    const struct score_route *route;
    struct score_job job;
    struct answer_meta meta;
    struct score_stream stream;
    int n_counted; /* results that are counted in the metrics */
};

static void work_free(void *data)
{
    struct score_work *const work = data;
    score_stream_end(&work->stream);
    score_free(&work->job);
    free(work);
}

static void work_gone(void *data)
{
    struct score_work *const work = data;
    request_cancel(work->job.request);
}

/* Counts the results up to n, which have been written. */
static void count_results(struct score_work *work, int n)
{
    const struct score_job *const job = &work->job;
    const struct model_info *const info = work->server->limits.info;
    struct metrics_score *const count = &work->server->metrics.score[job->form];
    for (; work->n_counted < n; work->n_counted++) {
        const struct item *const item = score_item(job, work->n_counted);
        const struct score_sum sum = score_sum_item(item);
        int64_t n_position = 0;
        for (int i = 0; i < job->n_per; i++) {
            n_position += item[i].n_position - item[i].n_cached;
        }
        metrics_add_score(count, sum.n_scored, score_n_unk(job, work->n_counted, info), n_position,
                          -sum.sum_logprob);
    }
}

static enum exchange_next work_stream(struct score_work *work, struct exchange *x)
{
    struct api_error error = {0};
    const enum exchange_next next = score_stream_next(&work->stream, x, &work->meta, &error);
    if (next == EXCHANGE_ANSWER) {
        routes_error(work->server, x, &error);
    } else {
        count_results(work, work->stream.writer.result);
    }
    return next;
}

static enum exchange_next work_next(struct exchange *x, void *data)
{
    struct score_work *const work = data;
    struct request *const request = work->job.request;
    if (routes_gone(x, request)) {
        return EXCHANGE_ANSWER;
    }
    if (work->job.stream) {
        return work_stream(work, x);
    }
    if (atomic_load(&request->n_item_done) < request->n_item) {
        (void)answer_end_failed(request);
        return EXCHANGE_WAIT;
    }
    struct api_error error = {0};
    struct score_writer *const writer = &work->stream.writer;
    bool done = true;
    if (!work->route->write(writer, &x->out, ANSWER_PIECE_BYTES, &work->meta, &done, &error)) {
        return routes_broken(work->server, x, &error);
    }
    count_results(work, writer->result);
    return routes_piece(x, request, done);
}

static const struct exchange_work work_ops = {
    .next = work_next, .gone = work_gone, .free = work_free};

static void score_begin(struct server *server, struct exchange *x, const struct score_route *route)
{
    struct score_work *const work = calloc(1, sizeof *work);
    if (work == NULL) {
        exchange_refuse(x, 500, "out_of_memory", NULL, "no memory for the request");
        return;
    }
    work->server = server;
    work->route = route;
    struct api_error error = {0};
    const int64_t parse_us = clock_now_us();
    struct overlay_names binding;
    const struct api_limits limits = routes_limits(server, x, &binding);
    const bool ok = route->parse(&work->job, x->body.data, x->body.n, &limits, &error);
    metrics_tokenize_time(&server->metrics, parse_us);
    if (!ok) {
        routes_error(server, x, &error);
        work_free(work);
        return;
    }
    score_stream_begin(&work->stream, &work->job, &server->limits, x->wants_events);
    x->n_prompt = score_n_prompt(&work->job);
    work->job.request->wakes_at_ends = !work->job.stream;
    if (!routes_submit(server, x, work->job.request, parse_us)) {
        work_free(work);
        return;
    }
    work->meta = routes_accept(server, x, work->job.request, work->job.id, work->job.ignored);
    x->work = &work_ops;
    x->work_data = work;
}

void api_score(struct server *server, struct exchange *x)
{
    static const struct score_route route = {score_parse, score_write_piece};
    score_begin(server, x, &route);
}

void api_score_labels(struct server *server, struct exchange *x)
{
    static const struct score_route route = {score_labels_parse, score_labels_write_piece};
    score_begin(server, x, &route);
}
