/* See texts.h. */
#include "server/cli/texts.h"

#include "server/cli/jsonl.h"
#include "server/cli/progress.h"

#include <sys/stat.h>

enum { GROUP_FILES = 256 };

static enum err_code take_all(const struct texts *texts, const struct request *request,
                              const char *const *path, int64_t line, struct err *err)
{
    enum err_code code = ERR_OK;
    for (int i = 0; i < request->n_item && code == ERR_OK; i++) {
        const struct item *const item = &request->item[i];
        /* A continuation that was also scored after BOS alone is traced once. */
        if (item->trace != NULL && item->trace[0].n_position > 0) {
            const struct texts_item it = {request, item, path[line > 0 ? 0 : i], line};
            code = texts->take(texts->ctx, &it, err);
        }
    }
    return code;
}

/* ---- files ---------------------------------------------------------------------------------- */

struct files {
    const struct texts *texts;
    struct cmd_engine ce;
    struct progress progress;
    int64_t n_token;
    int n_done, n; /* files */
};

static void look(void *ctx)
{
    struct files *const it = ctx;
    progress_count(&it->progress, it->texts->doing, it->n_done, it->n_token,
                   (double)it->n_done / (double)it->n);
}

/* How many of the n files run together next: at least one. */
static int group_of(const struct texts *texts, const char *const *path, int n)
{
    int64_t bytes = 0;
    int count = 0;
    while (count < n && count < GROUP_FILES) {
        struct stat status;
        bytes += stat(path[count], &status) == 0 ? (int64_t)status.st_size : texts->group_bytes;
        if (count > 0 && bytes > texts->group_bytes) {
            break;
        }
        count++;
    }
    return count;
}

static enum err_code run_group(struct files *it, const struct options *options,
                               const char *const *path, int n, struct err *err)
{
    struct score_job job = {0};
    enum err_code code = cmd_read_score(&job, options, &it->ce.limits, path, n, err);
    if (code == ERR_OK) {
        code = cmd_engine_run(&it->ce, job.request, look, it, err);
    }
    if (code == ERR_OK) {
        code = cmd_answered(job.request, path, n, err);
    }
    if (code == ERR_OK) {
        code = take_all(it->texts, job.request, path, 0, err);
        it->n_token += score_n_prompt(&job);
        it->n_done += n;
    }
    score_free(&job);
    return code;
}

static enum err_code run_files(const struct texts *texts, const struct options *options,
                               struct err *err)
{
    struct files it = {.texts = texts};
    const char *const *const path = cmd_paths(options, &it.n);
    enum err_code code = cmd_engine_open(&it.ce, options, err);
    if (code == ERR_OK && texts->begin != NULL) {
        code = texts->begin(texts->ctx, &it.ce, err);
    }
    progress_begin(&it.progress, "tokens", 0);
    while (code == ERR_OK && it.n_done < it.n) {
        const char *const *const next = path + it.n_done;
        code = run_group(&it, options, next, group_of(texts, next, it.n - it.n_done), err);
    }
    progress_end(&it.progress);
    cmd_engine_close(&it.ce);
    return code;
}

/* ---- lines ---------------------------------------------------------------------------------- */

static enum err_code line_begin(void *ctx, const struct cmd_engine *ce, struct err *err)
{
    const struct texts *const texts = ctx;
    return texts->begin != NULL ? texts->begin(texts->ctx, ce, err) : ERR_OK;
}

static bool line_parse(union jsonl_job *job, const char *body, size_t bytes,
                       const struct api_limits *limits, struct api_error *error)
{
    if (!score_parse(&job->score, body, bytes, limits, error)) {
        return false;
    }
    return job->score.memory != MEMORY_OFF ||
           api_error_set(error, 400, "invalid_value", "memory",
                         "memory is false in a line whose slots are wanted");
}

static struct request *line_request(const union jsonl_job *job)
{
    return job->score.request;
}

static enum err_code line_take(void *ctx, const union jsonl_job *job, const char *path,
                               int64_t number, struct err *err)
{
    return take_all(ctx, job->score.request, &path, number, err);
}

static void line_id(const union jsonl_job *job, struct answer_meta *meta)
{
    (void)job;
    (void)meta;
}

static int64_t line_n_token(const union jsonl_job *job)
{
    return score_n_prompt(&job->score);
}

static void line_free(union jsonl_job *job)
{
    score_free(&job->score);
}

enum err_code texts_run(const struct texts *texts, const struct options *options, int *status,
                        struct err *err)
{
    struct texts own = *texts;
    const struct jsonl_kind lines = {.doing = texts->doing,
                                     .text_field = "text",
                                     .put_defaults = cmd_put_score_options,
                                     .parse = line_parse,
                                     .request = line_request,
                                     .id = line_id,
                                     .begin = line_begin,
                                     .take = line_take,
                                     .ctx = &own,
                                     .n_token = line_n_token,
                                     .free = line_free};
    *status = -1;
    if (options->jsonl) {
        const int ended = jsonl_run(options, &lines);
        *status = ended != 0 ? ended : -1;
        return ERR_OK;
    }
    return run_files(texts, options, err);
}
