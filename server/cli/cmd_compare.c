/* `pkmserve compare`: what a choice of weights costs. A text goes through two models, the one that
 * --model and --dtype describe and a reference (--against, by default the same directory) that is
 * computed in F32; printed are the perplexities of both and how far the model's distributions are
 * from the reference's, and the exit status is 1 when that is farther than --max-kl and --max-worse
 * allow.
 *
 * The texts are read and cut into windows as `pkmserve score` does it. Each window goes through
 * both models in steps of the same rows; the logits of both are fetched and compared. */
#include "engine/kvpages.h"
#include "engine/scoring.h"
#include "engine/tokenizer.h"
#include "server/cli/cmd_engine.h"
#include "server/cli/compare.h"
#include "server/cli/progress.h"
#include "server/json/json.h"

#include <stdlib.h>
#include <string.h>

/* Rows of a step, and bytes that the logits of one may take. */
enum { ROWS_MAX = 512, LOGITS_BYTES_MAX = 64 << 20 };

/* One of the two models. */
struct side {
    const char *path;
    struct backend *be;  /* Borrowed */
    struct model *model; /* Owner: this, as of the next two */
    struct step *step;
    float *logits;                       /* [n_row, n_vocab] of the last step's outputs */
    const struct model_info *info;       /* Borrowed from the model */
    const struct request_ablate *ablate; /* Borrowed; NULL = nothing is switched off */
    struct overlays *overlays; /* Owner: this, as of the next; NULL = --overlay names none */
    struct request_overlays taken;
};

struct comparison {
    const struct options *options;
    struct backend *be;          /* Owner: this, as of all below */
    struct side side, reference; /* the model in question, and what it is to be like */
    struct tokenizer *tokenizer;
    struct score_job job;
    double *kl;
    struct compare_sums sums;
    int n_row; /* of a step at most */
    struct progress progress;
};

/* ---- opening ------------------------------------------------------------------------------- */

static enum err_code open_models(struct comparison *it, struct err *err)
{
    const struct options *const options = it->options;
    struct engine_options engine = options_engine(options);
    progress_begin(&it->progress, NULL, 0);
    engine.model.progress = progress_load;
    engine.model.progress_ctx = &it->progress;
    enum err_code code = backend_open(&it->be, &engine.backend, err);
    if (code == ERR_OK) {
        code = model_open(&it->side.model, it->be, it->side.path, &engine.model, err);
    }
    if (code == ERR_OK) {
        engine.model.dtype = engine.model.cache_dtype = "f32";
        code = model_open(&it->reference.model, it->be, it->reference.path, &engine.model, err);
    }
    progress_end(&it->progress);
    if (code != ERR_OK) {
        return code;
    }
    it->side.be = it->reference.be = it->be;
    it->side.info = model_info(it->side.model);
    it->reference.info = model_info(it->reference.model);
    return tokenizer_open(&it->tokenizer, it->side.path, engine.tokenizer_path,
                          it->side.info->tokenizer, it->side.info->n_vocab, err);
}

/* --overlay, whose rows --model alone reads. */
static enum err_code open_overlay(struct side *side, const struct options *options, struct err *err)
{
    char name[OVERLAY_NAME_MAX];
    const char *const names[] = {name};
    if (options->overlay[0] == '\0') {
        return ERR_OK;
    }
    if (side->info->n_memory == 0) {
        return cmd_no_overlay(options, err);
    }
    if (overlays_open(&side->overlays, side->be, side->info, side->path, options->overlay_bytes,
                      err) != ERR_OK ||
        overlays_read_file(side->overlays, options->overlay, name, err) != ERR_OK) {
        return err->code;
    }
    return overlays_take(side->overlays, names, 1, &side->taken, err);
}

/* The vocabularies must name the same tokens, as far as both exist. */
static enum err_code check_pieces(const struct comparison *it, struct err *err)
{
    struct tokenizer *other = NULL;
    const int n_vocab = it->side.info->n_vocab;
    enum err_code code = tokenizer_open(&other, it->reference.path, NULL,
                                        it->reference.info->tokenizer, n_vocab, err);
    for (int32_t id = 0; id < n_vocab && code == ERR_OK && other != NULL; id++) {
        const char *const piece = tokenizer_piece(it->tokenizer, id);
        const char *const theirs = tokenizer_piece(other, id);
        if (strcmp(piece, theirs) != 0) {
            code = err_set(err, ERR_FORMAT,
                           "%s and %s have different tokenizers: token %d is '%.60s' in one and "
                           "'%.60s' in the other",
                           it->side.path, it->reference.path, id, piece, theirs);
        }
    }
    tokenizer_close(other);
    return code;
}

/* The same ids must be valid for both models, and mean the same. */
static enum err_code check_alike(const struct comparison *it, struct err *err)
{
    const struct model_info *const a = it->side.info;
    const struct model_info *const b = it->reference.info;
    const struct {
        const char *what;
        int ours, theirs;
    } facts[] = {{"vocab_size", a->n_vocab, b->n_vocab},
                 {"add_bos", a->add_bos, b->add_bos},
                 {"bos_token_id", a->bos_id, b->bos_id},
                 {"languages", a->n_lang, b->n_lang}};
    for (size_t i = 0; i < sizeof facts / sizeof facts[0]; i++) {
        if (facts[i].ours != facts[i].theirs) {
            return err_set(
                err, ERR_FORMAT, "%s and %s cannot be compared: they differ in %s, %d and %d",
                it->side.path, it->reference.path, facts[i].what, facts[i].ours, facts[i].theirs);
        }
    }
    const bool one = strcmp(it->side.path, it->reference.path) == 0;
    const bool given = it->options->ids || it->options->tokenizer[0] != '\0';
    return one || given || it->tokenizer == NULL ? ERR_OK : check_pieces(it, err);
}

static enum err_code read_texts(struct comparison *it, struct err *err)
{
    const struct options *const options = it->options;
    struct api_limits limits = {.info = it->side.info,
                                .tokenizer = it->tokenizer,
                                .model_name = options->served_model_name,
                                .context = it->side.info->context};
    int n = 0;
    const char *const *const path = cmd_paths(options, &n);
    cmd_lift_limits(&limits);
    if (cmd_check_tokenizer(options, it->tokenizer, err) != ERR_OK) {
        return err->code;
    }
    return cmd_read_score(&it->job, options, &limits, path, n, err);
}

/* ---- room ---------------------------------------------------------------------------------- */

/* Positions that count, and the longest window. */
static int64_t measure_texts(const struct request *request, int64_t *longest)
{
    int64_t n = 0;
    *longest = 0;
    for (int i = 0; i < request->n_item; i++) {
        const struct item *const item = &request->item[i];
        for (int64_t k = 0; k < score_item_window_count(request, item); k++) {
            const struct score_window window = score_item_window_at(request, item, k);
            n += window.n_count;
            *longest = window.n_feed > *longest ? window.n_feed : *longest;
        }
    }
    return n;
}

/* One sequence of at most longest positions, in steps of n_row. */
static enum err_code reserve_side(struct side *side, int64_t longest, int n_row, struct err *err)
{
    struct backend *const be = side->be;
    const struct model_info *const info = side->info;
    if (info->context > 0 && longest > info->context) {
        return err_set(err, ERR_ARGUMENT,
                       "%s takes %d positions, but a window of the text has %lld: lower "
                       "--max-context, or compare models of the same context",
                       side->path, info->context, (long long)longest);
    }
    /* Where a token sees a window of earlier positions, the pages are a ring of it and a step. */
    const int64_t ring = (int64_t)info->window + n_row;
    const int n_page = kvpages_for(info->window > 0 && ring < longest ? ring : longest);
    const struct step_limits limits = {.n_tok_max = n_row,
                                       .n_seq_max = 1,
                                       .n_page_max = n_page,
                                       .n_out_max = n_row,
                                       .n_ablate_max = ABLATE_MAX,
                                       .n_redirect_max = side->taken.n_entry,
                                       .n_vocab = info->n_vocab,
                                       .d_model = info->d_attention,
                                       .n_head = info->n_head,
                                       .n_span_max = model_span_max(info)};
    CHECK(n_row >= 1 && info->n_vocab >= 1);
    side->logits = malloc((size_t)n_row * (size_t)info->n_vocab * sizeof *side->logits);
    if (side->logits == NULL) {
        return err_set(err, ERR_MEMORY, "no memory for the logits of %d rows", n_row);
    }
    if (be->op->step_new(be, &side->step, &limits, err) != ERR_OK) {
        return err->code;
    }
    for (int p = 0; p < n_page; p++) {
        side->step->page[p] = p;
    }
    return model_reserve(side->model, &limits, n_page, err);
}

static enum err_code reserve(struct comparison *it, struct err *err)
{
    int64_t longest = 0;
    const int64_t n = measure_texts(it->job.request, &longest);
    if (n == 0) {
        return err_set(err, ERR_FORMAT, "nothing to compare: the text has no token to predict");
    }
    const int64_t row_bytes = (int64_t)sizeof(float) * it->side.info->n_vocab;
    const int64_t fitting = LOGITS_BYTES_MAX / row_bytes > 0 ? LOGITS_BYTES_MAX / row_bytes : 1;
    it->n_row = (int)(fitting < ROWS_MAX ? fitting : ROWS_MAX);
    it->n_row = longest < it->n_row ? (int)longest : it->n_row;
    it->kl = malloc((size_t)n * sizeof *it->kl);
    if (it->kl == NULL) {
        return err_set(err, ERR_MEMORY, "no memory for %lld positions", (long long)n);
    }
    it->sums = (struct compare_sums){.kl = it->kl, .n_max = n};
    if (reserve_side(&it->side, longest, it->n_row, err) != ERR_OK) {
        return err->code;
    }
    return reserve_side(&it->reference, longest, it->n_row, err);
}

/* ---- the text ------------------------------------------------------------------------------ */

/* Rows of a step: positions pos .. pos+n_row-1 of a window. */
struct rows {
    const int32_t *id; /* [n_row+1] the last one is only predicted */
    int64_t pos;
    int n_row;
    int first_out; /* rows from this one on count */
    int lang;
};

static void see(void *ctx, const char *name, int layer, const struct tensor *t)
{
    const struct side *const side = ctx;
    if (strcmp(name, "logits") == 0) { /* layer: the chunk's first output */
        float *const logits = side->logits + (int64_t)layer * side->info->n_vocab;
        side->be->op->download(side->be, logits, *t);
    }
}

static enum err_code run_side(struct side *side, const struct rows *rows, struct err *err)
{
    const struct model_tap tap = {see, side};
    struct step *const step = side->step;
    step->n_seq = 1;
    step->n_tok = rows->n_row;
    step->n_out = rows->n_row - rows->first_out;
    step->seq_first[0] = 0;
    step->seq_first[1] = rows->n_row;
    step->n_ablate = step->ablate_first[1] = side->ablate == NULL ? 0 : side->ablate->n;
    for (int i = 0; i < step->n_ablate; i++) {
        step->ablate[i] = side->ablate->entry[i];
    }
    step->n_redirect = step->redirect_first[1] = side->taken.n_entry;
    for (int i = 0; i < step->n_redirect; i++) {
        step->redirect[i] = side->taken.entry[i];
    }
    for (int r = 0; r < rows->n_row; r++) {
        step->token[r] = rows->id[r];
        step->pos[r] = (int32_t)(rows->pos + r);
        step->lang[r] = rows->lang;
    }
    for (int o = 0; o < step->n_out; o++) {
        step->out_row[o] = rows->first_out + o;
        step->out_want[o] = OUT_LOGPROB;
        step->target[o] = rows->id[rows->first_out + o + 1];
    }
    side->be->op->step_begin(side->be, step);
    model_forward(side->model, step, &tap);
    return side->be->op->finish(side->be, step, err);
}

static enum err_code compare_rows(struct comparison *it, const struct rows *rows, struct err *err)
{
    const int n_vocab = it->side.info->n_vocab;
    if (run_side(&it->side, rows, err) != ERR_OK || run_side(&it->reference, rows, err) != ERR_OK) {
        return err->code;
    }
    for (int r = rows->first_out; r < rows->n_row; r++) {
        const int64_t first = (int64_t)(r - rows->first_out) * n_vocab;
        if (!compare_add(&it->sums, it->side.logits + first, it->reference.logits + first, n_vocab,
                         rows->id[r + 1])) {
            return err_set(err, ERR_NUMERICAL,
                           "the logits of prediction %lld are no distribution: look for NaN and "
                           "infinity in the weights with --check",
                           (long long)it->sums.n + 1);
        }
    }
    return ERR_OK;
}

static enum err_code compare_window(struct comparison *it, const struct item *item,
                                    const struct score_window *window, struct err *err)
{
    const int64_t first_out = window->n_feed - window->n_count;
    for (int64_t pos = 0; pos < window->n_feed; pos += it->n_row) {
        const int64_t left = window->n_feed - pos;
        struct rows rows = {.id = item->ids + window->first + pos,
                            .pos = pos,
                            .n_row = left < it->n_row ? (int)left : it->n_row,
                            .lang = it->job.request->lang};
        const int64_t before = first_out > pos ? first_out - pos : 0;
        rows.first_out = before < rows.n_row ? (int)before : rows.n_row;
        if (compare_rows(it, &rows, err) != ERR_OK) {
            return err->code;
        }
        progress_show(&it->progress, "comparing", (double)it->sums.n / (double)it->sums.n_max);
    }
    return ERR_OK;
}

static enum err_code compare_texts(struct comparison *it, struct err *err)
{
    const struct request *const request = it->job.request;
    enum err_code code = ERR_OK;
    progress_begin(&it->progress, "tokens", (double)it->sums.n_max);
    for (int i = 0; i < request->n_item && code == ERR_OK; i++) {
        const struct item *const item = &request->item[i];
        for (int64_t k = 0; k < score_item_window_count(request, item) && code == ERR_OK; k++) {
            const struct score_window window = score_item_window_at(request, item, k);
            code = compare_window(it, item, &window, err);
        }
    }
    progress_end(&it->progress);
    return code;
}

/* ---- results ------------------------------------------------------------------------------- */

/* Not close enough; NaN is not, either. */
static bool is_kl_close(const struct options *options, const struct compare_figures *f)
{
    return f->kl_mean <= options->max_kl;
}

static bool is_close(const struct options *options, const struct compare_figures *f)
{
    return is_kl_close(options, f) && f->worse_percent <= options->max_worse;
}

static enum err_code print_json(const struct comparison *it, const struct compare_figures *f,
                                int64_t n_unk, struct err *err)
{
    const struct options *const options = it->options;
    struct text out = {0};
    json_open(&out, '{');
    json_field_string(&out, "model", it->side.path);
    json_field_string(&out, "dtype", dtype_name(it->side.info->dtype));
    json_field_string(&out, "against", it->reference.path);
    json_field_string(&out, "against_dtype", dtype_name(it->reference.info->dtype));
    json_field_string(&out, "backend", it->be->name);
    json_field_int(&out, "n_scored", f->n);
    json_field_int(&out, "n_unk", n_unk);
    json_field_double(&out, "perplexity", f->perplexity);
    json_field_double(&out, "against_perplexity", f->reference_perplexity);
    json_field_double(&out, "worse_percent", f->worse_percent);
    json_field_double(&out, "kl_mean", f->kl_mean);
    json_field_double(&out, "kl_p99", f->kl_p99);
    json_field_double(&out, "kl_max", f->kl_max);
    json_field_double(&out, "same_best", f->same_best);
    json_field_double(&out, "max_kl", options->max_kl);
    json_field_double(&out, "max_worse", options->max_worse);
    json_field_bool(&out, "is_close", is_close(options, f));
    json_close(&out, '}');
    const enum err_code code = cmd_print(&out, err);
    text_free(&out);
    return code;
}

static void print_table(const struct comparison *it, const struct compare_figures *f, int64_t n_unk)
{
    printf("%s in %s against %s in %s, on %s\n", it->side.path, dtype_name(it->side.info->dtype),
           it->reference.path, dtype_name(it->reference.info->dtype), it->be->name);
    printf("tokens      %lld predicted, %.2f %% with the same best token; %lld unknown\n",
           (long long)f->n, 100 * f->same_best, (long long)n_unk);
    printf("perplexity  %.6f, reference %.6f: %+.4f %%\n", f->perplexity, f->reference_perplexity,
           f->worse_percent);
    printf("KL, nats    %.3g in the mean, %.3g at 99 %%, %.3g at most\n", f->kl_mean, f->kl_p99,
           f->kl_max);
}

static enum err_code judge(const struct comparison *it, const struct compare_figures *f,
                           struct err *err)
{
    const struct options *const options = it->options;
    const char *const dtype = dtype_name(it->side.info->dtype);
    if (!is_kl_close(options, f)) {
        return err_set(err, ERR_NUMERICAL,
                       "%s in %s is too far from %s in f32: a mean KL of %.3g nats per token, at "
                       "most %g allowed (--max-kl)",
                       it->side.path, dtype, it->reference.path, f->kl_mean, options->max_kl);
    }
    if (!is_close(options, f)) {
        return err_set(err, ERR_NUMERICAL,
                       "%s in %s is too far from %s in f32: perplexity is %.3g %% worse, at most "
                       "%g %% allowed (--max-worse)",
                       it->side.path, dtype, it->reference.path, f->worse_percent,
                       options->max_worse);
    }
    return ERR_OK;
}

/* ---- a sweep ------------------------------------------------------------------------------- */

/* The figures with one memory switched off, or if head >= 0 with one head of it, in addition to
 * what --ablate names; with memory -1, with --ablate alone. */
static enum err_code sweep_one(struct comparison *it, int memory, int head, struct text *out,
                               struct err *err)
{
    const struct request_ablate *const base = &it->job.request->ablate;
    struct request_ablate ablate = {0};
    const int n = base->n + (memory >= 0);
    struct step_ablate *const entry = malloc((size_t)(n > 0 ? n : 1) * sizeof *entry);
    if (entry == NULL) {
        return err_set(err, ERR_MEMORY, "no memory for the sweep");
    }
    for (int i = 0; i < base->n; i++) {
        entry[i] = base->entry[i];
    }
    if (memory >= 0) {
        entry[base->n] = (struct step_ablate){.memory = memory, .head = head, .slot = -1};
    }
    enum err_code code = request_ablate_make(&ablate, entry, n, err);
    it->side.ablate = &ablate;
    it->sums = (struct compare_sums){.kl = it->kl, .n_max = it->sums.n_max};
    code = code == ERR_OK ? compare_texts(it, err) : code;
    request_ablate_free(&ablate);
    it->side.ablate = NULL;
    if (code != ERR_OK) {
        return code;
    }
    const struct compare_figures f = compare_figures_of(&it->sums);
    if (it->options->json) {
        json_open(out, '{');
        if (memory < 0) {
            json_field_null(out, "memory");
        } else {
            json_field_int(out, "memory", memory);
        }
        if (head < 0) {
            json_field_null(out, "head");
        } else {
            json_field_int(out, "head", head);
        }
        json_field_double(out, "perplexity", f.perplexity);
        json_field_double(out, "worse_percent", f.worse_percent);
        json_field_double(out, "kl_mean", f.kl_mean);
        json_field_double(out, "kl_p99", f.kl_p99);
        json_field_double(out, "kl_max", f.kl_max);
        json_field_double(out, "same_best", f.same_best);
        json_close(out, '}');
        return ERR_OK;
    }
    char place[2][16] = {"-", "-"};
    if (memory >= 0) {
        (void)snprintf(place[0], sizeof place[0], "%d", memory);
    }
    if (head >= 0) {
        (void)snprintf(place[1], sizeof place[1], "%d", head);
    }
    printf("%6s %6s %14.6f %+12.4f %12.4g %10.2f\n", place[0], place[1], f.perplexity,
           f.worse_percent, f.kl_mean, 100 * f.same_best);
    return ERR_OK;
}

/* A row with nothing of the sweep, then one for each memory and each head. */
static enum err_code sweep(struct comparison *it, struct err *err)
{
    const struct model_info *const info = it->side.info;
    struct text out = {0};
    if (info->n_memory == 0) {
        return err_set(err, ERR_ARGUMENT, "--ablate-sweep needs a model with memories, %s has none",
                       it->side.path);
    }
    if (it->options->json) {
        json_open(&out, '[');
    } else {
        printf("%6s %6s %14s %12s %12s %10s\n", "memory", "head", "perplexity", "worse, %",
               "KL, nats", "same, %");
    }
    enum err_code code = sweep_one(it, -1, -1, &out, err);
    for (int m = 0; m < info->n_memory && code == ERR_OK; m++) {
        for (int h = -1; h < info->memory[m].shape.n_head && code == ERR_OK; h++) {
            code = sweep_one(it, m, h, &out, err);
        }
    }
    if (it->options->json && code == ERR_OK) {
        json_close(&out, ']');
        return cmd_print_answer(&out, NULL, err);
    }
    text_free(&out);
    return code;
}

static void side_close(struct side *side)
{
    if (side->step) {
        side->be->op->step_free(side->be, side->step);
    }
    overlays_drop(&side->taken);
    overlays_close(side->overlays);
    model_close(side->model);
    free(side->logits);
}

static enum err_code run(struct comparison *it, struct err *err)
{
    enum err_code code = open_models(it, err);
    code = code == ERR_OK ? check_alike(it, err) : code;
    code = code == ERR_OK ? open_overlay(&it->side, it->options, err) : code;
    code = code == ERR_OK ? read_texts(it, err) : code;
    code = code == ERR_OK ? reserve(it, err) : code;
    if (code == ERR_OK && it->options->ablate_sweep) {
        return sweep(it, err);
    }
    it->side.ablate = code == ERR_OK ? &it->job.request->ablate : NULL;
    code = code == ERR_OK ? compare_texts(it, err) : code;
    if (code != ERR_OK) {
        return code;
    }
    const struct compare_figures figures = compare_figures_of(&it->sums);
    int64_t n_tokens = 0;
    const int64_t n_unk = score_count_unknown(&it->job, it->side.info, &n_tokens);
    if (!it->options->json) {
        print_table(it, &figures, n_unk);
    } else if (print_json(it, &figures, n_unk, err) != ERR_OK) {
        return err->code;
    }
    fflush(stdout);
    cmd_warn_unknown(n_unk, n_tokens, it->tokenizer);
    return judge(it, &figures, err);
}

int cmd_compare(const struct options *options)
{
    const bool given = options->against[0] != '\0';
    struct comparison it = {.options = options,
                            .side.path = options->model,
                            .reference.path = given ? options->against : options->model};
    struct err err;
    const enum err_code code = run(&it, &err);
    score_free(&it.job);
    side_close(&it.side);
    side_close(&it.reference);
    tokenizer_close(it.tokenizer);
    backend_close(it.be);
    free(it.kl);
    return code == ERR_OK ? 0 : cmd_fail(&err);
}
