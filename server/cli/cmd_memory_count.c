/* `pkmserve memory count`: which slots texts read. Each file is a text, or with --jsonl each line; they
 * run as `score` runs them, and each position of a text counts once, whatever its windows. What is kept
 * are the counts alone, 28 bytes a slot, and the texts on their way. */
#include "models/counts.h"
#include "server/cli/jsonl.h"
#include "server/cli/progress.h"

#include <stdlib.h>
#include <sys/stat.h>

/* Of files that run together, so that short ones share steps: bytes, and files. */
enum { GROUP_BYTES = 1 << 20, GROUP_FILES = 256 };

struct tally {
    struct counts counts;
    /* Owner: this. [n_slot] the number, from 1, of the last text that read the slot; only its low 32
     * bits, which suffices for the 4 billion texts before it. */
    uint32_t *seen[MODEL_PKM_MAX];
};

static void tally_free(struct tally *tally)
{
    for (int m = 0; m < MODEL_PKM_MAX; m++) {
        free(tally->seen[m]);
    }
    counts_free(&tally->counts);
}

static enum err_code tally_new(struct tally *tally, const char *dir, struct err *err)
{
    char model[SHA256_HEX] = "";
    struct tensors *tensors = NULL;
    struct model_info *const info = calloc(1, sizeof *info);
    if (info == NULL) {
        return err_set(err, ERR_MEMORY, "%s: no memory to open it", dir);
    }
    enum err_code code = model_info_read(info, dir, err);
    if (code == ERR_OK) {
        code = tensors_open(&tensors, dir, err);
    }
    if (code == ERR_OK && info->n_memory > 0) {
        counts_identity(model, tensors);
    }
    tensors_close(tensors);
    if (code == ERR_OK) {
        code = counts_new(&tally->counts, info, model, err);
    }
    for (int m = 0; m < info->n_memory && code == ERR_OK; m++) {
        tally->seen[m] = calloc((size_t)info->memory[m].n_slot, sizeof *tally->seen[m]);
        if (tally->seen[m] == NULL) {
            code = err_set(err, ERR_MEMORY, "no memory for the counts of %lld slots",
                           (long long)info->memory[m].n_slot);
        }
    }
    free(info);
    return code;
}

static void add_reads(struct tally *tally, int m, int64_t slot, int64_t reads, double weight)
{
    struct counts_memory *const memory = &tally->counts.memory[m];
    const uint32_t document = (uint32_t)tally->counts.n_document;
    memory->reads[slot] += reads;
    memory->weight[slot] += weight;
    if (tally->seen[m][slot] != document) {
        tally->seen[m][slot] = document;
        memory->documents[slot]++;
    }
}

/* Adds the look-ups of the request's texts, each of which is a document. */
static void tally_request(struct tally *tally, const struct request *request)
{
    for (int i = 0; i < request->n_item; i++) {
        const struct pkm_trace *const traces = request->item[i].trace;
        if (traces == NULL || traces[0].n_position == 0) {
            continue; /* the same ending after BOS alone, or a text of no position */
        }
        tally->counts.n_document++;
        tally->counts.n_position += traces[0].n_position;
        for (int m = 0; m < tally->counts.n_memory; m++) {
            const struct pkm_trace *const trace = &traces[m];
            for (int64_t j = 0; trace->slots != NULL && j < trace->lookups; j++) {
                add_reads(tally, m, trace->slots[j], 1, (double)trace->shares[j]);
            }
            for (int64_t s = 0; trace->count != NULL && s < tally->counts.memory[m].n_slot; s++) {
                if (trace->count[s] > 0) {
                    add_reads(tally, m, s, trace->count[s], trace->weight[s]);
                }
            }
        }
    }
}

/* ---- files ---------------------------------------------------------------------------------- */

struct files {
    struct cmd_engine ce;
    struct tally *tally;
    struct progress progress;
    int64_t n_token;
    int n_done, n; /* files */
};

static void look(void *ctx)
{
    struct files *const it = ctx;
    progress_count(&it->progress, "counting", it->n_done, it->n_token,
                   (double)it->n_done / (double)it->n);
}

/* How many of the n files run together next: at least one. */
static int group_of(const char *const *path, int n)
{
    int64_t bytes = 0;
    int count = 0;
    while (count < n && count < GROUP_FILES) {
        struct stat status;
        bytes += stat(path[count], &status) == 0 ? (int64_t)status.st_size : GROUP_BYTES;
        if (count > 0 && bytes > GROUP_BYTES) {
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
    struct api_error error = {0};
    enum err_code code = cmd_read_score(&job, options, &it->ce.limits, path, n, err);
    if (code == ERR_OK) {
        code = cmd_engine_run(&it->ce, job.request, look, it, err);
    }
    if (code == ERR_OK && !answer_check(job.request, &error)) {
        code = cmd_refused(&error, err);
    }
    if (code == ERR_OK) {
        tally_request(it->tally, job.request);
        it->n_token += score_n_prompt(&job);
        it->n_done += n;
    }
    score_free(&job);
    return code;
}

static enum err_code count_files(struct tally *tally, const struct options *options,
                                 struct err *err)
{
    struct files it = {.tally = tally};
    const char *const *const path = cmd_paths(options, &it.n);
    enum err_code code = cmd_engine_open(&it.ce, options, err);
    progress_begin(&it.progress, "tokens", 0);
    while (code == ERR_OK && it.n_done < it.n) {
        code = run_group(&it, options, path + it.n_done,
                         group_of(path + it.n_done, it.n - it.n_done), err);
    }
    progress_end(&it.progress);
    cmd_engine_close(&it.ce);
    return code;
}

/* ---- lines ---------------------------------------------------------------------------------- */

static bool line_parse(union jsonl_job *job, const char *body, size_t bytes,
                       const struct api_limits *limits, struct api_error *error)
{
    if (!score_parse(&job->score, body, bytes, limits, error)) {
        return false;
    }
    return job->score.memory != MEMORY_OFF ||
           api_error_set(error, 400, "invalid_value", "memory",
                         "memory is false in a line whose slots are to be counted");
}

static struct request *line_request(const union jsonl_job *job)
{
    return job->score.request;
}

static enum err_code line_take(void *ctx, const union jsonl_job *job, struct err *err)
{
    (void)err;
    tally_request(ctx, job->score.request);
    return ERR_OK;
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

int cmd_memory_count(const struct options *options)
{
    struct err err;
    struct tally tally = {0};
    struct options own = *options;
    own.memory = true; /* the traces that are counted */
    const struct jsonl_kind lines = {.doing = "counting",
                                     .text_field = "text",
                                     .put_defaults = cmd_put_score_options,
                                     .parse = line_parse,
                                     .request = line_request,
                                     .id = line_id,
                                     .take = line_take,
                                     .ctx = &tally,
                                     .n_token = line_n_token,
                                     .free = line_free};
    int status = 0;
    enum err_code code = tally_new(&tally, options->model, &err);
    if (code == ERR_OK && options->jsonl) {
        status = jsonl_run(&own, &lines);
    } else if (code == ERR_OK) {
        code = count_files(&tally, &own, &err);
    }
    if (code == ERR_OK && status == 0) {
        code = counts_write(&tally.counts, options->output, &err);
    }
    if (code == ERR_OK && status == 0) {
        printf("%lld texts, %lld positions\n", (long long)tally.counts.n_document,
               (long long)tally.counts.n_position);
    }
    tally_free(&tally);
    return code == ERR_OK ? status : cmd_fail(&err);
}
