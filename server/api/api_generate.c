/* Generations over HTTP, in any dialect, whole or as a stream. */
#include "engine/clock.h"
#include "server/api/routes.h"
#include "server/generate/sse.h"
#include "server/io/answer.h"

#include <stdio.h>
#include <stdlib.h>

struct generate_work {
    struct server *server; /* Borrowed */
    struct generate_job job;
    struct answer_meta meta;
    char id[JOB_ID_MAX + 8]; /* meta's id, if the dialect puts a prefix before it */
    struct sse sse;          /* its writer is that of whole answers, too */
};

static void work_free(void *data)
{
    struct generate_work *const work = data;
    sse_end(&work->sse);
    generate_free(&work->job);
    free(work);
}

static void work_gone(void *data)
{
    struct generate_work *const work = data;
    request_cancel(work->job.request);
}

static enum exchange_next work_answer(struct generate_work *work, struct exchange *x)
{
    struct api_error error = {0};
    x->n_generated = generate_n_completion(&work->job);
    bool done = false;
    if (!answer_check(work->job.request, &error) ||
        !generate_writer_next(&work->sse.writer, &x->out, ANSWER_PIECE_BYTES, &done, &error)) {
        return routes_broken(work->server, x, &error);
    }
    return routes_piece(x, work->job.request, done);
}

static enum exchange_next work_next(struct exchange *x, void *data)
{
    struct generate_work *const work = data;
    struct request *const request = work->job.request;
    if (routes_gone(x, request)) {
        return EXCHANGE_ANSWER;
    }
    if (work->job.stream) {
        struct api_error error = {0};
        const enum exchange_next next = sse_next(&work->sse, x, &error);
        if (next == EXCHANGE_ANSWER) {
            routes_error(work->server, x, &error);
        }
        return next;
    }
    if (atomic_load(&request->n_item_done) < request->n_item) {
        (void)answer_end_failed(request);
        return EXCHANGE_WAIT;
    }
    return work_answer(work, x);
}

static const struct exchange_work work_ops = {
    .next = work_next, .gone = work_gone, .free = work_free};

static void work_accept(struct generate_work *work, struct exchange *x)
{
    const struct generate_job *const job = &work->job;
    work->meta = routes_accept(work->server, x, job->request, job->id, job->ignored);
    if (job->dialect->id_prefix[0] != '\0') {
        (void)snprintf(work->id, sizeof work->id, "%s%s", job->dialect->id_prefix, work->meta.id);
        work->meta.id = work->id;
    }
    x->work = &work_ops;
    x->work_data = work;
}

void api_generate_as(struct server *server, struct exchange *x,
                     const struct generate_dialect *dialect)
{
    struct generate_work *const work = calloc(1, sizeof *work);
    if (work == NULL) {
        exchange_refuse(x, 500, "out_of_memory", NULL, "no memory for the request");
        return;
    }
    work->server = server;
    struct api_error error = {0};
    const int64_t parse_us = clock_now_us();
    struct overlay_names binding;
    const struct api_limits limits = routes_limits(server, x, &binding);
    bool ok = generate_parse(&work->job, dialect, x->body.data, x->body.n, &limits, &error);
    x->errors = work->job.dialect->errors;
    metrics_tokenize_time(&server->metrics, parse_us);
    if (ok && !work->job.stream) {
        generate_writer_begin(&work->sse.writer, &work->job, &server->limits, &work->meta);
    } else if (ok && !sse_begin(&work->sse, &work->job, &server->limits, &work->meta)) {
        ok = api_error_set(&error, 500, "out_of_memory", NULL, "no memory for the stream");
    }
    if (!ok) {
        routes_error(server, x, &error);
        work_free(work);
        return;
    }
    x->n_prompt = generate_n_prompt(&work->job);
    work->job.request->wakes_at_ends = !work->job.stream;
    if (!routes_submit(server, x, work->job.request, parse_us)) {
        work_free(work);
        return;
    }
    work_accept(work, x);
}
