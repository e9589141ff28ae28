/* `pkmserve score`: perplexity of files. The files become the body of one /score request, which the
 * code of that route parses and answers; only the table is made here. */
#include "engine/clock.h"
#include "engine/pkm_stats.h"
#include "server/cli/jsonl.h"
#include "server/cli/npz.h"
#include "server/cli/progress.h"

#include <math.h>

struct scoring {
    const struct options *options;
    struct cmd_engine ce;
    struct score_job job;
    struct progress progress;
    const char *const *path; /* [n] */
    int n;
};

static int64_t n_predicted(const struct request *request)
{
    int64_t n = 0;
    for (int i = 0; i < request->n_item; i++) {
        n += atomic_load(&request->item[i].n_out);
    }
    return n;
}

static void look(void *ctx)
{
    struct scoring *const it = ctx;
    const double total = it->progress.unit_total;
    progress_show(&it->progress, "scoring", (double)n_predicted(it->job.request) / total);
}

/* ---- results ------------------------------------------------------------------------------- */

static enum err_code print_json(const struct scoring *it, int64_t begin_us, struct err *err)
{
    const struct answer_meta meta = cmd_meta(it->options, begin_us);
    struct text out = {0};
    struct api_error error = {0};
    const bool ok = score_write(&out, &it->job, &it->ce.limits, &meta, &error);
    return cmd_print_answer(&out, ok ? NULL : &error, err);
}

static void print_count(int64_t count)
{
    if (count < 0) {
        printf(" %10s", "-");
    } else {
        printf(" %10lld", (long long)count);
    }
}

static void print_figure(double figure)
{
    if (isnan(figure)) {
        printf(" %10s", "-");
    } else {
        printf(" %10.4f", figure);
    }
}

static void print_row(const struct score_figures *figures, const char *name)
{
    print_count(figures->n_scored);
    print_count(figures->n_unk);
    print_count(figures->n_words);
    print_count(figures->n_bytes);
    print_figure(figures->perplexity);
    print_figure(figures->word_perplexity);
    print_figure(figures->byte_perplexity);
    print_figure(figures->bits_per_byte);
    printf("  %s\n", name);
}

/* With --windows: the figures that the evaluator prints, with its names and its number of
 * digits. */
static void print_evaluator(const struct scoring *it, const struct score_figures *pool)
{
    switch (it->job.scheme) {
    case SCORE_SCHEME_OWN: break;
    case SCORE_SCHEME_LM_EVAL:
        printf("lm-eval: word_perplexity %.10g, byte_perplexity %.10g, bits_per_byte %.10g\n",
               pool->word_perplexity, pool->byte_perplexity, pool->bits_per_byte);
        break;
    case SCORE_SCHEME_XLM:
        printf("XLM: ppl %.10g, acc %.10g %%, %lld predicted\n", pool->perplexity,
               100 * pool->accuracy, (long long)pool->n_scored);
        break;
    case SCORE_SCHEME_ADAPTIVE_SPAN:
        printf("adaptive-span: loss %.10g, ppl %.10g, bpc %.10g, %lld predicted\n", pool->mean_nll,
               pool->perplexity, pool->bits_per_token, (long long)pool->n_scored);
        break;
    case SCORE_SCHEME_SPARSE_MEMORY:
        printf(
            "sparse-memory-lm: loss %.10g, ppl %.10g, word ppl %.10g, nll %.10g, %lld predicted\n",
            pool->mean_nll, pool->perplexity, pool->word_perplexity, -pool->sum_logprob,
            (long long)pool->n_scored);
        break;
    }
}

static enum err_code print_memory(const struct scoring *it, int item, struct err *err)
{
    const struct model_info *const info = it->ce.limits.info;
    for (int m = 0; m < info->n_memory; m++) {
        const struct pkm_info *const memory = &info->memory[m];
        struct pkm_stats stats;
        if (pkm_stats_of(&it->job.request->item[item].trace[m], memory->n_slot, &stats, err) !=
            ERR_OK) {
            return err->code;
        }
        printf("%s: memory %d_%s: %.2f %% of %lld slots used, KL %.4f by count", it->path[item],
               memory->layer, memory_place_name(memory->place), 100 * stats.used,
               (long long)memory->n_slot, stats.kl_u);
        if (stats.top50_w < 0) {
            printf("; by weight undefined: weights of both signs\n");
            continue;
        }
        printf(", %.4f by weight; slots with half of the weight: %lld, 90 %%: %lld, 99 %%: %lld\n",
               stats.kl_w, (long long)stats.top50_w, (long long)stats.top90_w,
               (long long)stats.top99_w);
    }
    return ERR_OK;
}

static enum err_code print_table(const struct scoring *it, struct err *err)
{
    struct score_figures pool = {0};
    struct api_error error = {0};
    printf(" %10s %10s %10s %10s %10s %10s %10s %10s\n", "scored", "unknown", "words", "bytes",
           "ppl/token", "ppl/word", "ppl/byte", "bits/byte");
    for (int i = 0; i < it->n; i++) {
        struct score_figures figures;
        if (!score_figures_item(&figures, &it->job, i, &it->ce.limits, &error)) {
            return cmd_refused(&error, err);
        }
        score_figures_add(&pool, &figures);
        print_row(&figures, it->path[i]);
    }
    score_figures_derive(&pool);
    if (it->n > 1) {
        print_row(&pool, "all");
    }
    print_evaluator(it, &pool);
    fflush(stdout);
    enum err_code code = ERR_OK;
    for (int i = 0; i < it->n && code == ERR_OK && it->options->memory; i++) {
        code = print_memory(it, i, err);
    }
    return code;
}

/* ---- slots --------------------------------------------------------------------------------- */

static bool is_alike(const struct model_info *info, int a, int b)
{
    return info->memory[a].shape.n_head == info->memory[b].shape.n_head &&
           info->memory[a].shape.k_top == info->memory[b].shape.k_top;
}

/* The name of an array: what it contains; then _T for text number T if there are several, and _mM
 * for the memories that have the same shape as memory M, the first of them, if shapes differ. */
static void slots_name(char *name, size_t bytes, const struct scoring *it, const char *what,
                       int text, int memory)
{
    const struct model_info *const info = it->ce.limits.info;
    char of_text[16] = "";
    char of_shape[12] = "";
    bool alike = true;
    for (int m = 1; m < info->n_memory; m++) {
        alike = alike && is_alike(info, 0, m);
    }
    if (it->n > 1) {
        (void)snprintf(of_text, sizeof of_text, "_%d", text);
    }
    if (!alike) {
        (void)snprintf(of_shape, sizeof of_shape, "_m%d", memory);
    }
    (void)snprintf(name, bytes, "%s%s%s", what, of_text, of_shape);
}

/* The look-ups of the item in the memories of one shape, [n_position, n, heads, k_top]. */
static enum err_code put_lookups(struct npz *npz, const struct scoring *it, int text,
                                 const int *memory, int n, bool is_weights, struct err *err)
{
    const struct item *const item = score_item(&it->job, text);
    const struct pkm_shape *const shape = &it->ce.limits.info->memory[memory[0]].shape;
    const int64_t n_position = item->trace[0].n_position;
    const int64_t n_hit = (int64_t)shape->n_head * shape->k_top;
    const int64_t dim[4] = {n_position, n, shape->n_head, shape->k_top};
    char name[NPZ_NAME_MAX / 2];
    slots_name(name, sizeof name, it, is_weights ? "weights" : "indices", text, memory[0]);
    if (npz_begin(npz, name, is_weights ? "<f4" : "<i4", dim, 4, err) != ERR_OK) {
        return err->code;
    }
    for (int64_t p = 0; p < n_position; p++) {
        for (int i = 0; i < n; i++) {
            const struct pkm_trace *const trace = &item->trace[memory[i]];
            const int64_t at = p * n_hit;
            npz_add(npz, is_weights ? (const void *)(trace->weights + at) : trace->slots + at,
                    n_hit);
        }
    }
    return npz_end(npz, err);
}

/* The arrays of a text: for the memories of each shape their numbers, slots and weights. */
static enum err_code put_text(struct npz *npz, const struct scoring *it, int text, struct err *err)
{
    const struct model_info *const info = it->ce.limits.info;
    enum err_code code = ERR_OK;
    for (int m = 0; m < info->n_memory && code == ERR_OK; m++) {
        int32_t number[MODEL_PKM_MAX];
        int memory[MODEL_PKM_MAX];
        int n = 0;
        bool told = false;
        for (int other = 0; other < info->n_memory; other++) {
            if (is_alike(info, m, other)) {
                told = told || other < m;
                number[n] = other;
                memory[n++] = other;
            }
        }
        if (told) {
            continue;
        }
        char name[NPZ_NAME_MAX / 2];
        const int64_t dim = n;
        slots_name(name, sizeof name, it, "memories", text, m);
        code = npz_begin(npz, name, "<i4", &dim, 1, err);
        if (code == ERR_OK) {
            npz_add(npz, number, n);
            code = npz_end(npz, err);
        }
        code = code == ERR_OK ? put_lookups(npz, it, text, memory, n, false, err) : code;
        code = code == ERR_OK ? put_lookups(npz, it, text, memory, n, true, err) : code;
    }
    return code;
}

static enum err_code write_slots(const struct scoring *it, struct err *err)
{
    struct npz npz;
    enum err_code code = npz_open(&npz, it->options->slots, err);
    for (int i = 0; i < it->n && code == ERR_OK; i++) {
        code = put_text(&npz, it, i, err);
    }
    return npz_close(&npz, code, err);
}

/* ---- lines ---------------------------------------------------------------------------------- */

static bool line_parse(union jsonl_job *job, const char *body, size_t bytes,
                       const struct api_limits *limits, struct api_error *error)
{
    return score_parse(&job->score, body, bytes, limits, error);
}

static struct request *line_request(const union jsonl_job *job)
{
    return job->score.request;
}

static void line_id(const union jsonl_job *job, struct answer_meta *meta)
{
    if (job->score.id[0] != '\0') {
        meta->id = job->score.id;
        meta->id_is_integer = job->score.id_is_integer;
    }
}

static bool line_write(struct text *out, const union jsonl_job *job, uint64_t fields,
                       const struct api_limits *limits, const struct answer_meta *meta,
                       struct api_error *error)
{
    struct score_writer writer;
    bool done = false;
    score_writer_begin(&writer, &job->score, limits);
    writer.fields = fields;
    const bool ok = score_write_piece(&writer, out, SIZE_MAX, meta, &done, error);
    score_writer_end(&writer);
    return ok;
}

static int64_t line_n_token(const union jsonl_job *job)
{
    return score_n_prompt(&job->score);
}

static int64_t line_n_unk(const union jsonl_job *job, const struct model_info *info,
                          int64_t *n_tokens)
{
    return score_count_unknown(&job->score, info, n_tokens);
}

static void line_free(union jsonl_job *job)
{
    score_free(&job->score);
}

static const struct jsonl_kind lines = {.doing = "scoring",
                                        .text_field = "text",
                                        .put_defaults = cmd_put_score_options,
                                        .parse = line_parse,
                                        .request = line_request,
                                        .id = line_id,
                                        .write = line_write,
                                        .n_token = line_n_token,
                                        .n_unk = line_n_unk,
                                        .free = line_free};

int cmd_score(const struct options *options)
{
    if (options->jsonl && options->slots[0] != '\0') {
        struct err err;
        (void)err_set(&err, ERR_ARGUMENT,
                      "--slots writes the slots of whole texts; with --jsonl ask for \"memory\": "
                      "\"slots\" in the lines");
        return cmd_fail(&err);
    }
    if (options->jsonl) {
        return jsonl_run(options, &lines);
    }
    struct scoring it = {.options = options};
    it.path = cmd_paths(options, &it.n);
    const int64_t begin_us = clock_now_us();
    struct err err;
    enum err_code code = options->slots[0] == '\0'
                             ? ERR_OK
                             : cmd_check_output("--slots", options->slots, options, &err);
    if (code == ERR_OK) {
        code = cmd_engine_open(&it.ce, options, &err);
    }
    if (code == ERR_OK && options->slots[0] != '\0' && it.ce.limits.info->n_memory == 0) {
        code = err_set(&err, ERR_ARGUMENT, "--slots needs a model with memories, %s has none",
                       options->model);
    }
    if (code == ERR_OK) {
        code = cmd_read_score(&it.job, options, &it.ce.limits, it.path, it.n, &err);
    }
    if (code == ERR_OK) {
        const int64_t n_token = score_n_prompt(&it.job);
        progress_begin(&it.progress, "tokens", (double)(n_token > 0 ? n_token : 1));
        code = cmd_engine_run(&it.ce, it.job.request, look, &it, &err);
        progress_end(&it.progress);
    }
    if (code == ERR_OK) {
        code = cmd_answered(it.job.request, it.path, it.n, &err);
    }
    struct err slots_err;
    enum err_code slots_code = ERR_OK; /* the figures are printed whatever becomes of the file */
    if (code == ERR_OK && options->slots[0] != '\0') {
        slots_code = write_slots(&it, &slots_err);
        it.job.memory = options->memory ? MEMORY_SUMMARY : MEMORY_OFF; /* the rest is in the file */
    }
    if (code == ERR_OK) {
        code = options->json ? print_json(&it, begin_us, &err) : print_table(&it, &err);
    }
    if (code == ERR_OK) {
        int64_t n_tokens = 0;
        const int64_t n_unk = score_count_unknown(&it.job, it.ce.limits.info, &n_tokens);
        cmd_warn_unknown(n_unk, n_tokens, it.ce.limits.tokenizer);
    }
    score_free(&it.job);
    cmd_engine_close(&it.ce);
    if (code == ERR_OK && slots_code != ERR_OK) {
        return cmd_fail(&slots_err);
    }
    return code == ERR_OK ? 0 : cmd_fail(&err);
}
