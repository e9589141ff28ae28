/* Measures any backend at full size with random weights made in memory: whole steps of a model, the
 * memory layer alone, and each op. One JSON line per figure on standard output.
 *
 *   bench_device [--device cuda] [--threads 0] [--deterministic on|off] [--placement device|host]
 *                [--seconds 0.2] [--clock wall|cpu] [--cold-mb 160] [--top-p 1] [--layers 12] ...
 *                PART...
 *
 *   rates                the backend's own measure of its machine
 *   decode:1,8,32        steps of so many sequences, one token each, in the middle of the context
 *   prefill:512,4096     steps of so many rows, sequences as long as the context, last rows wanted
 *   score:512,4096       the same, with the log-probability of every row
 *   memory:1,32          the memory layer alone, its parts, and the feed-forward it replaces
 *   ops:1,32             each op of the model
 *
 * --layers and its like are the flags of make_model; the model defaults to its model A in bf16.
 * --ahead on begins each decode step before the one before is finished, as the engine does.
 * --top-p below 1 draws at temperature 1 in steps, which are greedy otherwise. The
 * clock is the host's, from step_begin to the return of finish: what a caller of the backend sees;
 * with --clock cpu the processor time in between, for one thread on a machine that has other work.
 * tests/gpu/check.py runs it on a GPU; on a CPU it works as well:
 *
 *   make build/tests/bench/bench_device && build/tests/bench/bench_device --device cpu decode:1,8
 */
#include "tests/bench/bench_device.h"

#include "server/cli/bench_cost.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { SAMPLE_MAX = 4096, RUN_MIN = 3, WARM_RUNS = 3, FILL_ROWS = 2048, SPAN = 64 };

/* ---- tools ---------------------------------------------------------------------------------- */

void bench_die(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    (void)fputs("bench_device: ", stderr);
    (void)vfprintf(stderr, format, args);
    (void)fputc('\n', stderr);
    va_end(args);
    exit(1);
}

static double clock_s(clockid_t clock)
{
    struct timespec t;
    (void)clock_gettime(clock, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static double now_s(void)
{
    return clock_s(CLOCK_MONOTONIC);
}

static int compare(const void *a, const void *b)
{
    const double x = *(const double *)a;
    const double y = *(const double *)b;
    return (x > y) - (x < y);
}

struct timing bench_time(const struct bench *b, void (*run)(void *ctx), void *ctx)
{
    static double sample[SAMPLE_MAX];
    const clockid_t clock = b->cpu_clock ? CLOCK_PROCESS_CPUTIME_ID : CLOCK_MONOTONIC;
    const double warm = now_s();
    /* The first run loads kernels, the second may be captured; a slow backend has no time for more.
     */
    for (int i = 0; i < WARM_RUNS && (i < 1 || now_s() - warm < b->seconds); i++) {
        run(ctx);
    }
    int n = 0;
    const double begin = now_s();
    while (n < SAMPLE_MAX && (n < RUN_MIN || now_s() - begin < b->seconds)) {
        const double start = clock_s(clock);
        run(ctx);
        sample[n++] = (clock_s(clock) - start) * 1e6;
    }
    qsort(sample, (size_t)n, sizeof *sample, compare);
    return (struct timing){sample[n / 2], sample[0], sample[n * 9 / 10], n};
}

void bench_print(const struct bench *b, const char *part, const char *op, int rows,
                 const struct timing *timing, double bytes, double flops)
{
    const struct plan_shape *const s = &b->shape;
    const char *const memory = s->n_memory == 0 ? "none" : s->flat ? "flat" : "product";
    (void)printf("{\"part\":\"%s\",\"op\":\"%s\",\"rows\":%d,\"us\":%.3f,\"us_min\":%.3f,"
                 "\"us_p90\":%.3f,\"n\":%d,\"bytes\":%.0f,\"flops\":%.0f,",
                 part, op, rows, timing->us, timing->us_min, timing->us_p90, timing->n, bytes,
                 flops);
    (void)printf("\"backend\":\"%s\",\"layers\":%d,\"width\":%d,\"memory\":\"%s\",\"memories\":%d,"
                 "\"keys\":%d,"
                 "\"dtype\":\"%s\",\"placement\":\"%s\",\"deterministic\":%s}\n",
                 b->be->name, s->layers, s->width, memory, s->n_memory,
                 s->n_memory == 0 ? 0 : s->keys, dtype_name(s->dtype), placement_name(b->values),
                 b->deterministic ? "true" : "false");
    (void)fflush(stdout);
}

void bench_print_spread(const struct bench *b, struct tensor slots)
{
    const double n_slot = (double)plan_slots(&b->shape);
    const int64_t n_read = slots.rows * slots.cols;
    int32_t *const slot = calloc((size_t)n_read, sizeof *slot);
    bool *const seen = calloc((size_t)n_slot, sizeof *seen);
    if (slot == NULL || seen == NULL) {
        bench_die("no memory for %.0f slots", n_slot);
    }
    b->be->op->download(b->be, slot, slots);
    int64_t n_distinct = 0;
    for (int64_t i = 0; i < n_read; i++) {
        n_distinct += !seen[slot[i]];
        seen[slot[i]] = true;
    }
    (void)printf("{\"part\":\"spread\",\"slots\":%.0f,\"reads\":%lld,\"distinct\":%lld,"
                 "\"even\":%.0f}\n",
                 n_slot, (long long)n_read, (long long)n_distinct,
                 -n_slot * expm1((double)n_read * log1p(-1 / n_slot)));
    (void)fflush(stdout);
    free(slot);
    free(seen);
}

static int max_of(int a, int b)
{
    return a > b ? a : b;
}

int bench_rows_max(const struct bench_rows *rows)
{
    int max = 0;
    for (int i = 0; i < rows->n; i++) {
        max = max_of(max, rows->row[i]);
    }
    return max;
}

struct tensor bench_buffer(const struct bench *b, int64_t rows, int64_t cols, enum dtype dtype)
{
    enum { CHUNK_ROWS = 64 };
    void *data = NULL;
    struct err err = {0};
    const size_t bytes = (size_t)(rows * cols) * dtype_bytes(dtype);
    if (b->be->op->buffer_new(b->be, &data, bytes, "benchmark", &err) != ERR_OK) {
        bench_die("%s", err.message);
    }
    const struct tensor t = tensor_make(data, rows, cols, dtype);
    float *const host = calloc((size_t)CHUNK_ROWS * (size_t)cols, sizeof *host);
    if (host == NULL) {
        bench_die("no memory for %d rows of %lld", CHUNK_ROWS, (long long)cols);
    }
    uint64_t state = 0x9e3779b97f4a7c15u;
    for (int64_t first = 0; dtype == DTYPE_F32 && first < rows; first += CHUNK_ROWS) {
        const int64_t n = rows - first < CHUNK_ROWS ? rows - first : CHUNK_ROWS;
        for (int64_t i = 0; i < n * cols && first < 64 * CHUNK_ROWS; i++) {
            state = state * 6364136223846793005u + 1442695040888963407u;
            host[i] = 1.7320508f * ((float)(state >> 40) * 0x1p-23f - 1); /* variance 1 */
        }
        const struct tensor part =
            tensor_make((float *)data + first * cols, n, cols, dtype); /* device address */
        b->be->op->upload(b->be, part, host);
    }
    free(host);
    return t;
}

struct step *bench_step(const struct bench *b, int n_seq, int n_row, int last_pos, int n_vocab)
{
    const int n_page = last_pos / KV_PAGE + 1;
    const int n_tok = n_seq * n_row;
    const struct step_limits limits = {.n_tok_max = n_tok,
                                       .n_seq_max = n_seq,
                                       .n_page_max = n_page,
                                       .n_out_max = n_tok,
                                       .n_vocab = n_vocab,
                                       .d_model = b->shape.width,
                                       .n_head = b->shape.heads};
    struct step *s = NULL;
    struct err err = {0};
    if (b->be->op->step_new(b->be, &s, &limits, &err) != ERR_OK) {
        bench_die("%s", err.message);
    }
    s->n_seq = n_seq;
    s->n_tok = s->n_out = n_tok;
    for (int r = 0; r < n_tok; r++) {
        s->token[r] = r % 97 % b->shape.vocab;
        s->pos[r] = last_pos - n_row + 1 + r % n_row;
        s->out_row[r] = r;
        s->out_want[r] = OUT_SAMPLE;
        s->target[r] = TARGET_SAMPLED;
        s->sample[r] = (struct sample_params){.top_p = 1, .repetition = 1};
    }
    for (int i = 0; i <= n_seq; i++) {
        s->seq_first[i] = i * n_row;
    }
    s->is_drawn = b->be->phases_apart && n_row == 1;
    for (int i = 0; i < n_seq * n_page; i++) {
        s->page[i] = i;
    }
    return s;
}

void bench_finish(const struct bench *b, struct step *step)
{
    struct err err = {0};
    if (b->be->op->finish(b->be, step, &err) != ERR_OK) {
        bench_die("%s", err.message);
    }
}

/* ---- whole steps ---------------------------------------------------------------------------- */

struct steps {
    const struct bench *b;
    struct model *model; /* Owner */
    struct step *step;
    struct step *twins[2]; /* step is one of them; the second with --ahead alone */
    bool runs_ahead;       /* the other one is under way */
    int n_page;            /* pages of one sequence */
    int first, span;       /* decoded positions: first .. first+span-1, over and over */
    int rows, at;          /* of the running measurement */
    enum out_want want;
};

/* Other tokens in every run, so that it looks up other slots: a memory's rows are to be cold. */
static int32_t some_token(const struct steps *t, int seq, int pos)
{
    const uint32_t salt = (uint32_t)t->at * 15485863u;
    const uint32_t mixed = ((uint32_t)seq * 7919u + (uint32_t)pos + 1u + salt) * 2654435761u;
    return (int32_t)(mixed % (uint32_t)t->b->shape.vocab);
}

static void step_clear(struct step *step)
{
    step->n_tok = step->n_seq = step->n_out = 0;
    step->is_drawn = false;
    step->seq_first[0] = 0;
}

/* Appends positions pos .. pos+n-1 of sequence seq; the last n_want rows are outputs. */
static void step_add(const struct steps *t, int seq, int pos, int n, int n_want)
{
    struct step *const step = t->step;
    int32_t *const page = step->page + (ptrdiff_t)step->n_seq * step->limits.n_page_max;
    for (int p = 0; p < t->n_page; p++) {
        page[p] = seq * t->n_page + p;
    }
    for (int i = 0; i < n; i++, step->n_tok++) {
        step->token[step->n_tok] = some_token(t, seq, pos + i);
        step->pos[step->n_tok] = pos + i;
        step->lang[step->n_tok] = 0;
        if (i >= n - n_want) {
            const int o = step->n_out++;
            step->out_row[o] = step->n_tok;
            step->out_want[o] = (uint8_t)t->want;
            step->target[o] =
                t->want == OUT_LOGPROB ? some_token(t, seq, pos + i + 1) : TARGET_SAMPLED;
            step->sample[o] = (struct sample_params){.u = 0.5,
                                                     .temperature = t->b->top_p < 1 ? 1 : 0,
                                                     .top_p = t->b->top_p,
                                                     .repetition = 1};
        }
    }
    step->seq_first[++step->n_seq] = step->n_tok;
}

static void step_begin(const struct steps *t)
{
    t->b->be->op->step_begin(t->b->be, t->step);
    model_forward(t->model, t->step, NULL);
    t->b->be->op->submit(t->b->be, t->step);
}

static void step_run(const struct steps *t)
{
    step_begin(t);
    bench_finish(t->b, t->step);
}

static void run_decode(void *ctx)
{
    struct steps *const t = ctx;
    const int pos = t->first + t->at++ % t->span;
    step_clear(t->step);
    t->step->is_drawn = t->b->be->phases_apart;
    for (int seq = 0; seq < t->rows; seq++) {
        step_add(t, seq, pos, 1, 1);
    }
    if (t->twins[1] == NULL) {
        step_run(t);
        return;
    }
    step_begin(t);
    t->step = t->twins[t->step == t->twins[0]];
    if (t->runs_ahead) {
        bench_finish(t->b, t->step);
    }
    t->runs_ahead = true;
}

/* Sequences of the context's length, and what is left as one more. */
static void run_prompt(void *ctx)
{
    struct steps *const t = ctx;
    const int context = t->b->shape.positions;
    step_clear(t->step);
    t->at++;
    for (int seq = 0, left = t->rows; left > 0; seq++, left -= context) {
        const int n = left < context ? left : context;
        step_add(t, seq, 0, n, t->want == OUT_LOGPROB ? n : 1);
    }
    step_run(t);
}

/* Computes the positions before those that are decoded, so that attention reads what it would. */
static void fill_cache(struct steps *t, int n_seq)
{
    const int n_max = t->step->limits.n_tok_max;
    for (int seq = 0; seq < n_seq;) {
        step_clear(t->step);
        for (; seq < n_seq && t->step->n_tok + t->first <= n_max; seq++) {
            step_add(t, seq, 0, t->first, 1);
        }
        step_run(t);
    }
}

static int n_prompt_seq(const struct bench *b, int rows)
{
    return (rows + b->shape.positions - 1) / b->shape.positions;
}

/* How many of the steps ran as the backend had prepared them: all but the first, if all is well. */
static void print_prepared(int rows, int64_t n_prepared)
{
    (void)printf("{\"part\":\"prepared\",\"rows\":%d,\"steps\":%lld}\n", rows,
                 (long long)n_prepared);
    (void)fflush(stdout);
}

static void measure_steps(struct steps *t, const char *part, const struct bench_rows *rows)
{
    const bool decode = strcmp(part, "decode") == 0;
    t->want = strcmp(part, "score") == 0 ? OUT_LOGPROB : OUT_SAMPLE;
    if (decode && rows->n > 0) {
        fill_cache(t, bench_rows_max(rows));
    }
    for (int i = 0; i < rows->n; i++) {
        const int n = rows->row[i];
        const int n_seq = decode ? n : n_prompt_seq(t->b, n);
        const double pos = decode ? t->first + t->span / 2.0 : (double)n / n_seq / 2;
        const struct bench_shape shape = {.n_tok = n,
                                          .n_out = t->want == OUT_LOGPROB ? n : n_seq,
                                          .n_seq = n_seq,
                                          .mean_pos = pos};
        const struct bench_cost cost = bench_cost_of(model_info(t->model), &shape);
        t->rows = n;
        t->at = 0;
        const int64_t n_prepared = t->b->be->n_prepared;
        const struct timing timing = bench_time(t->b, decode ? run_decode : run_prompt, t);
        if (t->runs_ahead) {
            bench_finish(t->b, t->twins[t->step == t->twins[0]]);
            t->runs_ahead = false;
        }
        bench_print(t->b, part, "step", n, &timing, cost.bytes, cost.flops);
        if (decode && n <= t->b->be->capture_max) {
            print_prepared(n, t->b->be->n_prepared - n_prepared);
            if (t->b->be->warning[0] != '\0') {
                (void)fprintf(stderr, "%s\n", t->b->be->warning);
            }
        }
    }
}

/* Of the last step. */
static void print_spread(const struct steps *t)
{
    for (int m = 0; m < model_info(t->model)->n_memory; m++) {
        struct tensor slots = {0};
        struct tensor shares = {0};
        model_pkm_hits(t->model, m, t->step->n_tok, &slots, &shares);
        bench_print_spread(t->b, slots);
    }
}

static void open_model(struct steps *t, const struct bench_rows *decode,
                       const struct bench_rows *prefill, const struct bench_rows *score)
{
    const struct bench *const b = t->b;
    struct err err = {0};
    const double begin = now_s();
    if (random_model_open(&t->model, b->be, &b->shape, b->values, &err) != ERR_OK) {
        bench_die("%s", err.message);
    }
    const int context = b->shape.positions;
    if (context < 2) {
        bench_die("--positions %d leaves no position to decode", context);
    }
    t->n_page = (context + KV_PAGE - 1) / KV_PAGE;
    t->first = context / 2 < KV_PAGE ? context / 2 : context / 2 / KV_PAGE * KV_PAGE;
    t->span = context - t->first < SPAN ? context - t->first : SPAN;
    const int n_decode = bench_rows_max(decode);
    const int n_score = bench_rows_max(score);
    const int n_prompt = max_of(bench_rows_max(prefill), n_score);
    const int n_seq = max_of(n_decode, n_prompt_seq(b, n_prompt));
    const int n_fill = max_of(FILL_ROWS, t->first); /* rows of a step that fills the cache */
    const int n_seq_max = max_of(n_seq, n_fill / t->first);
    const struct step_limits limits = {.n_tok_max = max_of(max_of(n_prompt, n_decode), n_fill),
                                       .n_seq_max = n_seq_max,
                                       .n_page_max = t->n_page,
                                       .n_out_max = max_of(n_score, n_seq_max),
                                       .n_vocab = b->shape.vocab,
                                       .d_model = b->shape.width,
                                       .n_head = b->shape.heads};
    if (model_reserve(t->model, &limits, n_seq * t->n_page, &err) != ERR_OK ||
        b->be->op->step_new(b->be, &t->twins[0], &limits, &err) != ERR_OK) {
        bench_die("%s", err.message);
    }
    t->step = t->twins[0];
    t->step->ops_list = 1;
    if (b->runs_ahead && !b->be->runs_ahead) {
        (void)fprintf(stderr, "bench_device: this device does not run ahead\n");
    } else if (b->runs_ahead) {
        if (b->be->op->step_twin(b->be, &t->twins[1], t->step, &err) != ERR_OK) {
            bench_die("%s", err.message);
        }
        t->twins[1]->ops_list = 1;
    }
    const struct model_info *const info = model_info(t->model);
    (void)printf("{\"part\":\"model\",\"seconds\":%.2f,\"parameters\":%lld,\"weight_bytes\":%zu,"
                 "\"value_bytes\":%zu}\n",
                 now_s() - begin, (long long)info->n_param, info->weight_bytes, info->value_bytes);
    (void)fflush(stdout);
}

static void bench_steps(const struct bench *b, const struct bench_rows *decode,
                        const struct bench_rows *prefill, const struct bench_rows *score)
{
    struct steps t = {.b = b};
    open_model(&t, decode, prefill, score);
    measure_steps(&t, "prefill", prefill);
    measure_steps(&t, "score", score);
    if (score->n > 0) {
        print_spread(&t);
    }
    measure_steps(&t, "decode", decode);
    if (t.twins[1] != NULL) {
        b->be->op->step_free(b->be, t.twins[1]);
    }
    b->be->op->step_free(b->be, t.twins[0]);
    model_close(t.model);
}

static void bench_rates(const struct bench *b)
{
    struct machine_rate rate = {0};
    struct machine_rate of_bf16 = {0};
    b->be->op->measure(b->be, DTYPE_F32, &rate);
    b->be->op->measure(b->be, DTYPE_BF16, &of_bf16);
    (void)printf("{\"part\":\"rates\",\"backend\":\"%s\",\"description\":\"%s\","
                 "\"read_bytes_per_s\":%.4g,\"flops_f32_per_s\":%.4g,\"flops_bf16_per_s\":%.4g}\n",
                 b->be->name, b->be->description, rate.read_bytes_per_s, rate.peak_per_s,
                 of_bf16.peak_per_s);
    (void)fflush(stdout);
}

/* ---- arguments ------------------------------------------------------------------------------ */

enum part { PART_DECODE, PART_PREFILL, PART_SCORE, PART_MEMORY, PART_OPS, PART_N };

static const char *const part_names[PART_N] = {"decode", "prefill", "score", "memory", "ops"};

static void parse_rows(struct bench_rows *rows, const char *text, const char *argument)
{
    while (*text != '\0') {
        char *end = NULL;
        const long n = strtol(text, &end, 10);
        if (end == text || n < 1 || n > 1 << 20 || rows->n == BENCH_ROWS_MAX) {
            bench_die("%s: row counts are 1 to %d, at most %d of them", argument, 1 << 20,
                      BENCH_ROWS_MAX);
        }
        rows->row[rows->n++] = (int)n;
        text = *end == ',' ? end + 1 : end;
    }
}

/* "decode:1,8" → its place in rows; "rates" → true in *rates. */
static void parse_part(struct bench_rows rows[PART_N], bool *rates, const char *argument)
{
    const char *const colon = strchr(argument, ':');
    const size_t length = colon == NULL ? strlen(argument) : (size_t)(colon - argument);
    if (strcmp(argument, "rates") == 0) {
        *rates = true;
        return;
    }
    for (int part = 0; colon != NULL && part < PART_N; part++) {
        if (strlen(part_names[part]) == length &&
            strncmp(part_names[part], argument, length) == 0) {
            parse_rows(&rows[part], colon + 1, argument);
            return;
        }
    }
    bench_die("%s: parts are rates, decode:N,..., prefill:N,..., score:N,..., memory:N,..., "
              "ops:N,...",
              argument);
}

static void parse_flag(struct bench *b, struct backend_options *options, const char *flag,
                       const char *value)
{
    if (strcmp(flag, "--device") == 0) {
        options->device = value;
    } else if (strcmp(flag, "--threads") == 0) {
        options->n_thread = (int)strtol(value, NULL, 10);
    } else if (strcmp(flag, "--clock") == 0) {
        b->cpu_clock = strcmp(value, "cpu") == 0;
    } else if (strcmp(flag, "--deterministic") == 0) {
        b->deterministic = strcmp(value, "off") != 0;
    } else if (strcmp(flag, "--placement") == 0) {
        b->values = strcmp(value, "host") == 0 ? PLACEMENT_HOST : PLACEMENT_DEVICE;
    } else if (strcmp(flag, "--seconds") == 0) {
        b->seconds = strtod(value, NULL);
    } else if (strcmp(flag, "--cold-mb") == 0) {
        b->cold_bytes = strtol(value, NULL, 10) << 20;
    } else if (strcmp(flag, "--ahead") == 0) {
        b->runs_ahead = strcmp(value, "on") == 0;
    } else if (strcmp(flag, "--top-p") == 0) {
        b->top_p = strtof(value, NULL);
    } else if (!plan_argument(&b->shape, flag, value)) {
        bench_die("%s %s is not an option or out of bounds", flag, value);
    }
}

int main(int argc, char **argv)
{
    struct bench b = {.shape = PLAN_MODEL_A,
                      .values = PLACEMENT_DEVICE,
                      .deterministic = true,
                      .seconds = 0.2,
                      .top_p = 1,
                      .cold_bytes = (int64_t)160 << 20};
    b.shape.dtype = DTYPE_BF16;
    struct backend_options options = {.device = "cuda"};
    bool rates = false;
    struct bench_rows rows[PART_N] = {0};
    for (int i = 1; i < argc; i++) {
        if (strncmp(argv[i], "--", 2) != 0) {
            parse_part(rows, &rates, argv[i]);
        } else if (i + 1 < argc) {
            parse_flag(&b, &options, argv[i], argv[i + 1]);
            i++;
        } else {
            bench_die("%s needs a value", argv[i]);
        }
    }
    options.fast_math = !b.deterministic;
    struct err err = {0};
    if (backend_open(&b.be, &options, &err) != ERR_OK) {
        bench_die("%s", err.message);
    }
    if (b.be->note[0] != '\0') {
        (void)fprintf(stderr, "bench_device: %s\n", b.be->note);
    }
    if (rates) {
        bench_rates(&b);
    }
    if (rows[PART_DECODE].n + rows[PART_PREFILL].n + rows[PART_SCORE].n > 0) {
        bench_steps(&b, &rows[PART_DECODE], &rows[PART_PREFILL], &rows[PART_SCORE]);
    }
    if (rows[PART_MEMORY].n > 0 && b.shape.n_memory > 0) {
        bench_memory(&b, &rows[PART_MEMORY]);
    }
    if (rows[PART_OPS].n > 0) {
        bench_single_ops(&b, &rows[PART_OPS]);
    }
    backend_close(b.be); /* which may have times of ops to write; buffers go with the process */
    return 0;
}
