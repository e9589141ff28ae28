/* `pkmserve bench`: tokens per second of prefill, scoring and decode, and how near they come to
 * what the machine can do.
 *
 * The machine's own rates drift, by a factor of two on some hosts, so each round measures a plain
 * read (a GPU: a copy, bytes read and bytes written) and the peak of the multiply-add or matrix
 * instruction that the backend uses, and then every kind of step; shares are taken within a round,
 * and the median over the rounds is printed. Times are those of a caller who waits for each step.
 * The hash covers the bits of every log-probability and drawn token: it is the same in each round
 * (or the run fails), and changes when results do.
 *
 * With --rounds 0 a round is run for each line of standard input and printed as a line of JSON: so
 * tests/bench/compare.py interleaves its rounds with those of other programs. */
#include "engine/clock.h"
#include "kernels/fnv.h"
#include "server/cli/bench_cost.h"
#include "server/cli/cmd.h"
#include "server/cli/progress.h"
#include "server/json/json.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    N_BATCH_MAX = 11,             /* 1, 2, 4 .. 1024 */
    N_KIND_MAX = 2 + N_BATCH_MAX, /* prefill, score, decode by batch size */
    DECODE_STEPS = 8,             /* per round and batch size */
};

/* One kind of step, measured once per round. */
struct kind {
    const char *name;
    struct bench_shape shape;
    struct bench_cost cost; /* of one step */
    double *seconds;        /* Owner: the bench. [rounds], of one step */
    double *read_share;     /* [rounds] bytes/s over the plain read's */
    double *peak_share;     /* [rounds] flop/s over the peak */
};

struct bench {
    struct backend *be; /* Owner: this, as of the next two */
    struct model *model;
    struct step *step;
    struct step *twin; /* of a device that runs ahead; else NULL */
    const struct model_info *info;
    int rows, positions;
    int rounds;       /* that the series hold */
    bool fill_always; /* prefill leaves another cache behind than it found */
    int n_seq;        /* the largest batch */
    int n_page;       /* pages of one sequence */
    int n_kind;
    struct kind kind[N_KIND_MAX];
    double *sample;                /* Owner: this: [n_kind · 3 + 2][rounds] behind all series */
    double *read_rate, *peak_rate; /* [rounds] */
    float *logprob;                /* Owner: this: [rows] of the last scoring step */
    uint64_t hash;
};

/* ---- steps --------------------------------------------------------------------------------- */

static void step_clear(struct step *step)
{
    step->n_tok = step->n_seq = step->n_out = 0;
    step->n_top = step->n_adjust = step->n_allow = 0;
    step->is_drawn = false;
    step->seq_first[0] = 0;
}

/* Any fixed spread over the vocabulary serves as text. */
static int32_t some_token(const struct bench *bench, int seq, int pos)
{
    const uint32_t mixed = ((uint32_t)seq * 7919u + (uint32_t)pos + 1u) * 2654435761u;
    return (int32_t)(mixed % (uint32_t)bench->info->n_vocab);
}

/* Appends n positions of sequence seq, from pos on. */
static void step_add(const struct bench *bench, struct step *step, int seq, int pos, int n)
{
    int32_t *const page = step->page + (ptrdiff_t)step->n_seq * step->limits.n_page_max;
    for (int p = 0; p < bench->n_page; p++) {
        page[p] = seq * bench->n_page + p;
    }
    for (int i = 0; i < n; i++, step->n_tok++) {
        step->token[step->n_tok] = some_token(bench, seq, pos + i);
        step->pos[step->n_tok] = pos + i;
        step->lang[step->n_tok] = 0;
    }
    step->seq_first[++step->n_seq] = step->n_tok;
}

/* Wants something of the row: its target's log-probability, or a greedy draw. */
static void step_want(struct step *step, int row, enum out_want want)
{
    const int o = step->n_out++;
    step->out_row[o] = row;
    step->out_want[o] = (uint8_t)want;
    step->target[o] = want == OUT_LOGPROB ? step->token[(row + 1) % step->n_tok] : TARGET_SAMPLED;
    step->sample[o] = (struct sample_params){.top_p = 1, .repetition = 1};
}

static void step_start(const struct bench *bench, struct step *step)
{
    bench->be->op->step_begin(bench->be, step);
    model_forward(bench->model, step, NULL);
    bench->be->op->submit(bench->be, step);
}

static enum err_code step_run(const struct bench *bench, struct err *err)
{
    step_start(bench, bench->step);
    return bench->be->op->finish(bench->be, bench->step, err);
}

/* All rows in one step, as sequences no longer than the context; n_out 1 or rows. */
static enum err_code run_prefill(const struct bench *bench, const struct kind *kind, uint64_t *hash,
                                 struct err *err)
{
    struct step *const step = bench->step;
    const int n_seq = kind->shape.n_seq;
    step_clear(step);
    for (int s = 0; s < n_seq; s++) {
        const int first = (int)((int64_t)bench->rows * s / n_seq);
        step_add(bench, step, s, 0, (int)((int64_t)bench->rows * (s + 1) / n_seq) - first);
    }
    for (int row = bench->rows - kind->shape.n_out; row < bench->rows; row++) {
        step_want(step, row, OUT_LOGPROB);
    }
    const enum err_code code = step_run(bench, err);
    const size_t bytes = (size_t)step->n_out * sizeof(float);
    *hash = fnv_hash(*hash, step->out_logprob, bytes);
    memcpy(bench->logprob, step->out_logprob, bytes); /* scoring comes last and fills it */
    return code;
}

/* One token of each of the first n_seq sequences, at each of DECODE_STEPS positions. On a device
 * that runs ahead a step begins before the one before is finished, as in the engine. */
static enum err_code run_decode(const struct bench *bench, const struct kind *kind, uint64_t *hash,
                                struct err *err)
{
    const int ahead = bench->twin != NULL;
    struct step *const twins[2] = {bench->step, ahead ? bench->twin : bench->step};
    enum err_code code = ERR_OK;
    for (int i = 0; i < DECODE_STEPS + ahead && code == ERR_OK; i++) {
        struct step *const step = twins[i % 2];
        if (i < DECODE_STEPS) {
            step_clear(step);
            step->is_drawn = bench->be->phases_apart;
            for (int s = 0; s < kind->shape.n_seq; s++) {
                step_add(bench, step, s, bench->positions + i, 1);
                step_want(step, s, OUT_SAMPLE);
            }
            step_start(bench, step);
        }
        if (i >= ahead) {
            struct step *const done = twins[(i - ahead) % 2];
            code = bench->be->op->finish(bench->be, done, err);
            *hash = fnv_hash(*hash, done->out_token, (size_t)done->n_out * sizeof(int32_t));
        }
    }
    return code;
}

/* Fills the cache of n_seq sequences from a position up to the first decoded one. */
static enum err_code fill_cache(const struct bench *bench, int first, int n_seq, struct err *err)
{
    const int n_max = bench->step->limits.n_tok_max;
    for (int s = 0; s < n_seq; s++) {
        for (int pos = first; pos < bench->positions; pos += n_max) {
            const int left = bench->positions - pos;
            step_clear(bench->step);
            step_add(bench, bench->step, s, pos, left < n_max ? left : n_max);
            if (step_run(bench, err) != ERR_OK) {
                return err->code;
            }
        }
    }
    return ERR_OK;
}

/* ---- rounds -------------------------------------------------------------------------------- */

/* Seconds of one step of this kind. */
static enum err_code measure_kind(const struct bench *bench, const struct kind *kind,
                                  double *seconds, uint64_t *hash, struct err *err)
{
    enum err_code code = ERR_OK;
    const bool decode = kind >= bench->kind + 2;
    const int n_step = decode ? DECODE_STEPS : 1;
    if (decode) { /* a page is stored in order: who goes back begins with its first position */
        code = fill_cache(bench, bench->positions / KV_PAGE * KV_PAGE, kind->shape.n_seq, err);
    }
    const int64_t begin_us = clock_now_us();
    if (code == ERR_OK) {
        code = decode ? run_decode(bench, kind, hash, err) : run_prefill(bench, kind, hash, err);
    }
    *seconds = (double)(clock_now_us() - begin_us) / 1e6 / n_step;
    return code;
}

/* The share of a rate that was reached; 0 of one that the backend does not measure. */
static double share(double reached, double rate)
{
    return rate > 0 ? reached / rate : 0;
}

/* round -1 warms up: its results count for the hash alone. */
static enum err_code run_round(struct bench *bench, int round, struct err *err)
{
    struct machine_rate rate = {0};
    if (round >= 0) {
        bench->be->op->measure(bench->be, bench->info->dtype, &rate);
        bench->read_rate[round] = rate.read_bytes_per_s;
        bench->peak_rate[round] = rate.peak_per_s;
    }
    uint64_t hash = FNV_BEGIN;
    for (int k = 0; k < bench->n_kind; k++) {
        double seconds = 0;
        const bool fill = k == 2 && (round < 0 || bench->fill_always);
        if ((fill && fill_cache(bench, 0, bench->n_seq, err) != ERR_OK) ||
            measure_kind(bench, &bench->kind[k], &seconds, &hash, err) != ERR_OK) {
            return err->code;
        }
        if (round >= 0) {
            const struct kind *const kind = &bench->kind[k];
            kind->seconds[round] = seconds;
            kind->read_share[round] = share(kind->cost.bytes / seconds, bench->read_rate[round]);
            kind->peak_share[round] = share(kind->cost.flops / seconds, bench->peak_rate[round]);
        }
    }
    if (round >= 0 && hash != bench->hash) {
        return err_set(err, ERR_NUMERICAL,
                       "bench: the results of round %d differ from the first (hash %016llx, "
                       "expected %016llx)",
                       round + 1, (unsigned long long)hash, (unsigned long long)bench->hash);
    }
    bench->hash = hash;
    return ERR_OK;
}

static int compare_double(const void *a, const void *b)
{
    const double x = *(const double *)a;
    const double y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Sorts the series. */
static double median(double *series, int n)
{
    qsort(series, (size_t)n, sizeof *series, compare_double);
    return n % 2 ? series[n / 2] : (series[n / 2 - 1] + series[n / 2]) / 2;
}

/* ---- setting up ---------------------------------------------------------------------------- */

static void set_kinds(struct bench *bench)
{
    const int context = bench->info->context > 0 ? bench->info->context : bench->rows;
    const int n_seq = (bench->rows + context - 1) / context;
    const bool values_apart =
        !bench->be->is_host && bench->info->value_placement != PLACEMENT_DEVICE;
    const struct bench_shape prefill = {.n_tok = bench->rows,
                                        .n_out = 1,
                                        .n_seq = n_seq,
                                        .mean_pos = (double)bench->rows / n_seq / 2,
                                        .values_apart = values_apart};
    bench->kind[0] = (struct kind){.name = "prefill", .shape = prefill};
    bench->kind[1] = (struct kind){.name = "score", .shape = prefill};
    bench->kind[1].shape.n_out = bench->rows;
    for (int k = 2; k < bench->n_kind; k++) {
        const int n = 1 << (k - 2);
        bench->kind[k] = (struct kind){.name = "decode",
                                       .shape = {.n_tok = n,
                                                 .n_out = n,
                                                 .n_seq = n,
                                                 .mean_pos = bench->positions,
                                                 .values_apart = values_apart}};
    }
    double *next = bench->sample;
    bench->read_rate = next;
    bench->peak_rate = next += bench->rounds;
    for (int k = 0; k < bench->n_kind; k++) {
        bench->kind[k].cost = bench_cost_of(bench->info, &bench->kind[k].shape);
        bench->kind[k].seconds = next += bench->rounds;
        bench->kind[k].read_share = next += bench->rounds;
        bench->kind[k].peak_share = next += bench->rounds;
    }
}

static enum err_code reserve(struct bench *bench, const struct options *options, struct err *err)
{
    const int context = bench->info->context;
    const int longest = bench->positions + DECODE_STEPS;
    if (context > 0 && longest > context) {
        return err_set(err, ERR_ARGUMENT,
                       "--positions %d and %d decode steps exceed the model's context of %d",
                       bench->positions, DECODE_STEPS, context);
    }
    if (context > 0 && bench->rows > bench->n_seq * (int64_t)context) {
        return err_set(
            err, ERR_ARGUMENT,
            "--rows %d exceeds the %lld positions of all sequences together: lower it or raise "
            "--max-batch",
            bench->rows, bench->n_seq * (long long)context);
    }
    int position_max = bench->rows > longest ? bench->rows : longest;
    position_max = context > 0 && position_max > context ? context : position_max;
    bench->n_page = (position_max + KV_PAGE - 1) / KV_PAGE;
    const int n_row = bench->rows > bench->n_seq ? bench->rows : bench->n_seq;
    const struct step_limits limits = {.n_tok_max = n_row,
                                       .n_seq_max = bench->n_seq,
                                       .n_page_max = bench->n_page,
                                       .n_out_max = n_row,
                                       .n_vocab = bench->info->n_vocab,
                                       .d_model = bench->info->d_attention,
                                       .n_head = bench->info->n_head,
                                       .n_span_max = model_span_max(bench->info)};
    const size_t n_series = (size_t)bench->n_kind * 3 + 2;
    bench->sample = calloc((size_t)bench->rounds * n_series, sizeof *bench->sample);
    bench->logprob = calloc((size_t)bench->rows, sizeof *bench->logprob);
    if (!bench->sample || !bench->logprob) {
        return err_set(err, ERR_MEMORY, "no memory for %d rounds", bench->rounds);
    }
    /* Prefill writes what decode reads: where bits depend on nothing else, a position has one place
     * and a page is filled to its end, the same as was there. */
    const bool is_cut = bench->rows % KV_PAGE != 0 || (context > 0 && bench->rows > context);
    bench->fill_always =
        !options->deterministic || bench->be->phases_apart || bench->info->window > 0 || is_cut;
    if (bench->be->op->step_new(bench->be, &bench->step, &limits, err) != ERR_OK) {
        return err->code;
    }
    bench->step->ops_list = 1; /* the model's forward pass, always the same */
    if (bench->be->runs_ahead) {
        if (bench->be->op->step_twin(bench->be, &bench->twin, bench->step, err) != ERR_OK) {
            return err->code;
        }
        bench->twin->ops_list = 1;
    }
    return model_reserve(bench->model, &limits, bench->n_page * bench->n_seq, err);
}

static void bench_close(struct bench *bench)
{
    if (bench->twin) {
        bench->be->op->step_free(bench->be, bench->twin);
    }
    if (bench->step) {
        bench->be->op->step_free(bench->be, bench->step);
    }
    model_close(bench->model);
    backend_close(bench->be);
    free(bench->sample);
    free(bench->logprob);
}

static enum err_code bench_open(struct bench *bench, const struct options *options, struct err *err)
{
    struct progress progress;
    struct engine_options engine = options_engine(options);
    progress_begin(&progress, NULL, 0);
    engine.model.progress = progress_load;
    engine.model.progress_ctx = &progress;
    enum err_code code = backend_open(&bench->be, &engine.backend, err);
    if (code == ERR_OK) {
        code = model_open(&bench->model, bench->be, options->model, &engine.model, err);
    }
    progress_end(&progress);
    if (code == ERR_OK) {
        bench->info = model_info(bench->model);
        code = reserve(bench, options, err);
    }
    if (code == ERR_OK) {
        set_kinds(bench);
    }
    return code;
}

/* ---- results ------------------------------------------------------------------------------- */

/* What read_bytes_per_s is the rate of. */
static const char *read_name(const struct bench *bench)
{
    return bench->be->is_host ? "plain read" : "copy";
}

static enum err_code print_json(struct bench *bench, const struct options *options, struct err *err)
{
    struct text out = {0};
    char hash[17];
    snprintf(hash, sizeof hash, "%016llx", (unsigned long long)bench->hash);
    json_open(&out, '{');
    json_field_string(&out, "model", options->model);
    json_field_string(&out, "backend", bench->be->name);
    json_field_string(&out, "description", bench->be->description);
    json_field_int(&out, "threads", bench->be->n_thread);
    json_field_string(&out, "dtype", dtype_name(bench->info->dtype));
    json_field_string(&out, "kv_cache_dtype", dtype_name(bench->info->cache_dtype));
    json_field_string(&out, "memory_placement", placement_name(bench->info->value_placement));
    json_field_bool(&out, "deterministic", options->deterministic);
    json_field_int(&out, "rounds", bench->rounds);
    json_field_int(&out, "positions", bench->positions);
    json_field_string(&out, "read_is", read_name(bench));
    json_field_double(&out, "read_bytes_per_s", median(bench->read_rate, bench->rounds));
    json_field_double(&out, "peak_flops_per_s", median(bench->peak_rate, bench->rounds));
    json_key(&out, "steps");
    json_open(&out, '[');
    for (int k = 0; k < bench->n_kind; k++) {
        struct kind *const kind = &bench->kind[k];
        const double seconds = median(kind->seconds, bench->rounds);
        json_open(&out, '{');
        json_field_string(&out, "step", kind->name);
        json_field_int(&out, "rows", kind->shape.n_tok);
        json_field_double(&out, "seconds", seconds);
        json_field_double(&out, "tokens_per_s", kind->shape.n_tok / seconds);
        json_field_double(&out, "bytes_per_token", kind->cost.bytes / kind->shape.n_tok);
        json_field_double(&out, "flops_per_token", kind->cost.flops / kind->shape.n_tok);
        json_field_double(&out, "read_share", median(kind->read_share, bench->rounds));
        json_field_double(&out, "peak_share", median(kind->peak_share, bench->rounds));
        json_close(&out, '}');
    }
    json_close(&out, ']');
    json_field_string(&out, "hash", hash);
    json_key(&out, "logprobs"); /* of the scoring step */
    json_open(&out, '[');
    for (int row = 0; row < bench->rows; row++) {
        json_put_double(&out, (double)bench->logprob[row]);
    }
    json_close(&out, ']');
    json_close(&out, '}');
    const enum err_code code = cmd_print(&out, err);
    text_free(&out);
    return code;
}

static void print_table(struct bench *bench, const struct options *options)
{
    printf("%s in %s, cache in %s, on %s: %s\n", options->model, dtype_name(bench->info->dtype),
           dtype_name(bench->info->cache_dtype), bench->be->name, bench->be->description);
    printf("%s %.1f GB/s, %s peak %.0f GFLOP/s; medians, rounds %d; decode at position %d\n",
           read_name(bench), median(bench->read_rate, bench->rounds) / 1e9,
           bench->be->is_host ? "multiply-add" : "measured instruction",
           median(bench->peak_rate, bench->rounds) / 1e9, bench->rounds, bench->positions);
    if (bench->kind[0].shape.values_apart) {
        printf("value rows come from host memory: they are not in the MB per token\n");
    }
    printf("\n| step | rows | ms | tokens/s | MB per token | of %s | of peak |\n",
           read_name(bench));
    printf("|---|---:|---:|---:|---:|---:|---:|\n");
    for (int k = 0; k < bench->n_kind; k++) {
        struct kind *const kind = &bench->kind[k];
        const double seconds = median(kind->seconds, bench->rounds);
        printf("| %s | %d | %.2f | %.1f | %.2f | %.0f %% | %.0f %% |\n", kind->name,
               kind->shape.n_tok, seconds * 1e3, kind->shape.n_tok / seconds,
               kind->cost.bytes / kind->shape.n_tok / 1e6,
               100 * median(kind->read_share, bench->rounds),
               100 * median(kind->peak_share, bench->rounds));
    }
    printf("\nhash %016llx\n", (unsigned long long)bench->hash);
}

/* Warms up and runs all rounds, then prints. */
static enum err_code run_rounds(struct bench *bench, const struct options *options, struct err *err)
{
    enum err_code code = ERR_OK;
    struct progress progress;
    progress_begin(&progress, NULL, 0);
    for (int round = -1; round < bench->rounds && code == ERR_OK; round++) {
        progress_show(&progress, "measuring", (double)(round + 1) / (bench->rounds + 1));
        code = run_round(bench, round, err);
    }
    progress_end(&progress);
    if (code == ERR_OK && options->json) {
        code = print_json(bench, options, err);
    } else if (code == ERR_OK) {
        print_table(bench, options);
    }
    return code;
}

/* Warms up and prints an empty line, then runs a round for each line that comes. */
static enum err_code run_on_demand(struct bench *bench, const struct options *options,
                                   struct err *err)
{
    char *line = NULL;
    size_t bytes = 0;
    enum err_code code = run_round(bench, -1, err);
    if (code == ERR_OK) {
        (void)puts("");
        (void)fflush(stdout);
    }
    while (code == ERR_OK && getline(&line, &bytes, stdin) > 0) {
        code = run_round(bench, 0, err);
        if (code == ERR_OK) {
            code = print_json(bench, options, err);
            (void)fflush(stdout);
        }
    }
    free(line);
    return code;
}

int cmd_bench(const struct options *options)
{
    struct err err;
    struct bench bench = {.rows = options->rows,
                          .positions = options->positions,
                          .rounds = options->rounds > 0 ? options->rounds : 1};
    for (bench.n_seq = 1, bench.n_kind = 3; bench.n_seq <= options->max_batch / 2; bench.n_kind++) {
        bench.n_seq *= 2;
    }
    enum err_code code = bench_open(&bench, options, &err);
    if (code == ERR_OK) {
        code = options->rounds > 0 ? run_rounds(&bench, options, &err)
                                   : run_on_demand(&bench, options, &err);
    }
    bench_close(&bench);
    return code == ERR_OK ? 0 : cmd_fail(&err);
}
