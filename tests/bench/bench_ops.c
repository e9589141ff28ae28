/* Measures the CPU backend op by op at full size: 12 layers of 1024, FFN 4096, 60k vocabulary, one
 * memory of 512² slots, random weights.
 *
 *   make build/tests/bench/bench_ops
 *   build/tests/bench/bench_ops [f32|bf16] [THREADS [ROUNDS]]     PKMSERVE_ISA forces a set
 *
 * An op is timed over all weights of its shape in turn, so that they come from memory as they do in
 * a step. Its limit is measured in the same round, because memory and clock of shared machines
 * drift: up to 16 rows a plain read of the very same bytes by the same threads, beyond that the
 * peak of the type's multiply-add from registers. The table shows medians over the rounds; share is
 * the median of the rounds' ratios, followed by their range. It reads the backend's own structs
 * (kernels/cpu/cpu.h): a plain read needs to know where the packed bytes are. */
#include "kernels/cpu/cpu.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum {
    N_LAYER = 12,
    D = 1024,
    D_FF = 4096,
    N_VOCAB = 60000,
    N_HEAD = 16,
    CONTEXT = 512,
    N_KEY = 512,
    D_KEY = 256,
    MEM_HEADS = 4,
    K_TOP = 32,
    N_SLOT = N_KEY * N_KEY,
    ROWS_MAX = 256,
    ROUNDS_MAX = 99,
    STREAM_ROWS_MAX = 16,
};

struct bench {
    struct cpu_backend *cpu;
    struct backend *be;
    enum dtype dtype;
    struct weight *square[4 * N_LAYER], *up[N_LAYER], *down[N_LAYER]; /* 1024², 1024→4096→1024 */
    struct weight *vocab, *query, *keys, *values;
    struct step *decode[2], *prefill; /* 1 and 8 sequences at the end of their context; 256 rows */
    struct tensor x, wide, logits, slots, shares, gamma, rope_table, k_pages, v_pages;
    float *host; /* [N_VOCAB, D] random source of all weights */
    uint64_t seed;
};

static void die(const char *what)
{
    (void)fprintf(stderr, "bench_ops: %s\n", what);
    exit(1);
}

static double now_s(void)
{
    struct timespec t;
    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Uniform in ±1: xorshift. */
static float draw(struct bench *b)
{
    b->seed ^= b->seed << 13;
    b->seed ^= b->seed >> 7;
    b->seed ^= b->seed << 17;
    return (float)(b->seed >> 40) * 0x1p-23f - 1;
}

/* ---- making -----------------------------------------------------------------------------------*/

static struct weight *make_weight(struct bench *b, enum weight_kind kind, enum dtype dtype,
                                  int64_t rows, int64_t cols, int n_group)
{
    struct weight *w = NULL;
    struct err err = {0};
    const struct weight_desc desc = {.kind = kind,
                                     .dtype = dtype,
                                     .placement = PLACEMENT_DEVICE,
                                     .n_group = n_group,
                                     .is_split = dtype == DTYPE_F32 && b->dtype != DTYPE_F32};
    struct tensor host = tensor_make(b->host, rows, cols, DTYPE_F32);
    uint16_t *stored = NULL;
    if (b->dtype == DTYPE_BF16 && dtype == DTYPE_F32) { /* as a file of BF16 has them */
        stored = malloc(sizeof *stored * (size_t)(rows * cols));
        if (stored == NULL) {
            die("no memory");
        }
        for (int64_t i = 0; i < rows * cols; i++) {
            stored[i] = bf16_from_f32(b->host[i]);
        }
        host = tensor_make(stored, rows, cols, DTYPE_BF16);
    }
    if (b->be->op->weight_new(b->be, &w, &host, &desc, "bench", &err) != ERR_OK) {
        die(err.message);
    }
    free(stored);
    return w;
}

static struct tensor make_buffer(struct bench *b, int64_t rows, int64_t cols, enum dtype dtype)
{
    void *data = NULL;
    struct err err = {0};
    const size_t bytes = (size_t)(rows * cols) * dtype_bytes(dtype);
    if (b->be->op->buffer_new(b->be, &data, bytes, "bench", &err) != ERR_OK) {
        die(err.message);
    }
    if (dtype == DTYPE_F32) {
        for (int64_t i = 0; i < rows * cols; i++) {
            ((float *)data)[i] = draw(b);
        }
    }
    return tensor_make(data, rows, cols, dtype);
}

/* n_seq sequences of n_row rows each that end at the end of the context, with pages of their own.
 */
static struct step *make_step(struct bench *b, int n_seq, int n_row)
{
    const int n_page = CONTEXT / KV_PAGE;
    const struct step_limits limits = {.n_tok_max = ROWS_MAX,
                                       .n_seq_max = n_seq,
                                       .n_page_max = n_page,
                                       .n_out_max = ROWS_MAX,
                                       .n_top_max = 10,
                                       .n_vocab = N_VOCAB,
                                       .d_model = D,
                                       .n_head = N_HEAD};
    struct step *s = NULL;
    struct err err = {0};
    if (b->be->op->step_new(b->be, &s, &limits, &err) != ERR_OK) {
        die(err.message);
    }
    s->n_seq = n_seq;
    s->n_tok = n_seq * n_row;
    s->n_out = s->n_tok;
    for (int r = 0; r < s->n_tok; r++) {
        s->pos[r] = CONTEXT - n_row + r % n_row;
        s->out_row[r] = r;
        s->out_want[r] = OUT_SAMPLE;
        s->target[r] = TARGET_SAMPLED;
        s->sample[r] =
            (struct sample_params){.u = 0.5, .temperature = 1, .top_p = 0.9f, .repetition = 1};
    }
    for (int i = 0; i <= n_seq; i++) {
        s->seq_first[i] = i * n_row;
    }
    for (int i = 0; i < n_seq * n_page; i++) {
        s->page[i] = i;
    }
    return s;
}

static void make_all(struct bench *b)
{
    b->host = malloc(sizeof(float) * N_VOCAB * D);
    if (b->host == NULL) {
        die("no memory");
    }
    for (int64_t i = 0; i < (int64_t)N_VOCAB * D; i++) {
        b->host[i] = draw(b) * 0.05f;
    }
    for (int i = 0; i < 4 * N_LAYER; i++) {
        b->square[i] = make_weight(b, WEIGHT_MATRIX, b->dtype, D, D, 1);
    }
    for (int i = 0; i < N_LAYER; i++) {
        b->up[i] = make_weight(b, WEIGHT_MATRIX, b->dtype, D_FF, D, 1);
        b->down[i] = make_weight(b, WEIGHT_MATRIX, b->dtype, D, D_FF, 1);
    }
    b->vocab = make_weight(b, WEIGHT_MATRIX, b->dtype, N_VOCAB, D, 1);
    b->query = make_weight(b, WEIGHT_MATRIX, DTYPE_F32, MEM_HEADS * D_KEY, D, 1);
    b->keys =
        make_weight(b, WEIGHT_KEYS, DTYPE_F32, MEM_HEADS * 2 * N_KEY, D_KEY / 2, MEM_HEADS * 2);
    free(b->host);
    b->host = calloc((size_t)N_SLOT * D, sizeof(float));
    if (b->host == NULL) {
        die("no memory");
    }
    b->values = make_weight(b, WEIGHT_TABLE, b->dtype, N_SLOT, D, 1);
    free(b->host);
    const int n_col = MEM_HEADS * K_TOP;
    b->x = make_buffer(b, ROWS_MAX, D, DTYPE_F32);
    b->wide = make_buffer(b, ROWS_MAX, D_FF, DTYPE_F32);
    b->logits = make_buffer(b, ROWS_MAX, N_VOCAB, DTYPE_F32);
    b->slots = make_buffer(b, ROWS_MAX, n_col, DTYPE_I32);
    b->shares = make_buffer(b, ROWS_MAX, n_col, DTYPE_F32);
    b->gamma = make_buffer(b, 1, D, DTYPE_F32);
    b->rope_table = make_buffer(b, CONTEXT, 2 * (D / N_HEAD), DTYPE_F32);
    for (int64_t i = 0; i < b->rope_table.rows * b->rope_table.cols; i += 2) { /* a quarter turn */
        const bool is_sine = i % b->rope_table.cols >= D / N_HEAD;
        ((float *)b->rope_table.data)[i] = is_sine ? -1 : 0;
        ((float *)b->rope_table.data)[i + 1] = is_sine ? 1 : 0;
    }
    const enum dtype cache = b->dtype == DTYPE_F32 ? DTYPE_F32 : DTYPE_BF16; /* as models have it */
    b->k_pages = make_buffer(b, 8 * CONTEXT / KV_PAGE, (int64_t)KV_PAGE * D, cache);
    b->v_pages = make_buffer(b, 8 * CONTEXT / KV_PAGE, (int64_t)KV_PAGE * D, cache);
    b->decode[0] = make_step(b, 1, 1);
    b->decode[1] = make_step(b, 8, 1);
    b->prefill = make_step(b, 1, ROWS_MAX);
}

/* ---- the ops ----------------------------------------------------------------------------------*/

/* A pass over weights of one shape. */
struct product {
    const char *name;
    struct weight **w;
    int n_w;
    int n_in, n_out;
    enum act act;
};

static void run_product(struct bench *b, const struct product *p, int rows)
{
    const struct tensor x = p->n_in == D ? b->x : b->wide;
    const struct tensor y = p->n_out == D ? b->x : p->n_out == D_FF ? b->wide : b->logits;
    const struct tensor from =
        p->n_in == p->n_out ? tensor_cols(b->wide, 0, D) : x; /* y must not overlap x */
    for (int i = 0; i < p->n_w; i++) {
        op_linear(b->be, tensor_head(y, rows), tensor_head(from, rows), p->w[i], (struct tensor){0},
                  p->act);
    }
}

struct read_job {
    const struct simd_kernels *simd;
    const char *data;
    size_t bytes;
};

enum { READ_PIECES = 64 };

static void read_pieces(void *arg, int thread, int first, int n)
{
    (void)thread;
    const struct read_job *const job = arg;
    const size_t piece = job->bytes / READ_PIECES;
    volatile double sink =
        job->simd->sum_bytes(job->data + (size_t)first * piece, (size_t)n * piece);
    (void)sink;
}

/* Reads the packed bytes of the same weights; returns their number. */
static double read_weights(struct bench *b, const struct product *p)
{
    double bytes = 0;
    for (int i = 0; i < p->n_w; i++) {
        struct read_job job = {b->cpu->simd, cpu_weight_of(p->w[i])->data,
                               b->be->op->weight_bytes(p->w[i])};
        pool_for(b->cpu->pool, READ_PIECES, POOL_STREAM, read_pieces, &job);
        bytes += (double)job.bytes;
    }
    return bytes;
}

/* Some 60 ms: long enough for the clock to settle where it stays under load. */
enum { PEAK_ROUNDS = 1 << 16, PEAK_ITEMS = 256 };

static void run_peak(void *arg, int thread, int first, int n)
{
    (void)thread;
    (void)first;
    void (*const *const peak)(int64_t, double *) = arg;
    double flops;
    for (int i = 0; i < n; i++) {
        (*peak)(PEAK_ROUNDS, &flops);
    }
}

/* Flops per second of the type's multiply-add, all threads. */
static double peak_rate(struct bench *b)
{
    const struct simd_kernels *const simd = b->cpu->simd;
    const bool is_amx = b->cpu->bf16 == GEMM_AMX;
    const bool is_int8 = b->dtype == DTYPE_I8;
    void (*peak)(int64_t, double *) = NULL;
    if (is_int8) {
        peak = is_amx ? simd->peak_amx_int8 : simd->peak_int8;
    } else if (b->dtype == DTYPE_BF16) {
        peak = is_amx ? simd->peak_amx : b->cpu->bf16 == GEMM_PAIRS ? simd->peak_bf16 : NULL;
    }
    peak = peak != NULL ? peak : simd->peak_f32;
    double flops;
    peak(1, &flops);
    const int n_item = PEAK_ITEMS * b->be->n_thread;
    const double start = now_s();
    pool_for(b->cpu->pool, n_item, POOL_STREAM, run_peak, &peak);
    return flops * (double)PEAK_ROUNDS * n_item / (now_s() - start);
}

static struct step *step_of(struct bench *b, int rows)
{
    return rows == 1 ? b->decode[0] : rows == 8 ? b->decode[1] : b->prefill;
}

static void run_attention(struct bench *b, int rows)
{
    struct step *const s = step_of(b, rows);
    const struct tensor q = tensor_head(tensor_cols(b->wide, 0, D), rows);
    b->be->op->step_begin(b->be, s);
    op_attention(b->be, tensor_head(b->x, rows), q, b->k_pages, b->v_pages, q, q, s, N_HEAD,
                 0.125f);
}

/* Of a pre-norm transformer with rotary positions and gated networks of the same size. */
static void run_rms_norm(struct bench *b, int rows)
{
    const struct tensor x = tensor_head(b->x, rows);
    op_rms_norm(b->be, tensor_head(tensor_cols(b->wide, D, D), rows), x, x,
                tensor_head(tensor_cols(b->wide, 0, D), rows), b->gamma, 1e-5f);
}

static void run_head_norm(struct bench *b, int rows)
{
    const struct tensor gamma = tensor_cols(b->gamma, 0, D / N_HEAD);
    op_head_norm(b->be, tensor_head(tensor_cols(b->wide, 0, 2 * D), rows), gamma, 2 * N_HEAD,
                 1e-5f);
}

static void run_rope(struct bench *b, int rows)
{
    op_rope(b->be, tensor_head(tensor_cols(b->wide, 0, 2 * D), rows), b->rope_table,
            step_of(b, rows), 2 * N_HEAD);
}

static void run_gate(struct bench *b, int rows)
{
    const struct tensor wide = tensor_head(b->wide, rows);
    op_gate(b->be, tensor_cols(wide, 0, D), tensor_cols(wide, D, D), tensor_cols(wide, 2 * D, D),
            GATE_SILU);
}

static void run_norm(struct bench *b, int rows)
{
    const struct tensor x = tensor_head(b->x, rows);
    op_add_norm(b->be, x, x, tensor_head(tensor_cols(b->wide, 0, D), rows), b->gamma, b->gamma,
                1e-12f);
}

static void run_query(struct bench *b, int rows)
{
    op_linear(b->be, tensor_head(tensor_cols(b->wide, 0, D), rows), tensor_head(b->x, rows),
              b->query, (struct tensor){0}, ACT_NONE);
}

static void run_search(struct bench *b, int rows)
{
    const struct pkm_shape shape = {PKM_PRODUCT, MEM_HEADS, K_TOP, N_KEY, D_KEY, false};
    op_pkm_search(b->be, tensor_head(b->slots, rows), tensor_head(b->shares, rows),
                  tensor_head(tensor_cols(b->wide, 0, D), rows), b->keys, &shape);
}

static void run_read(struct bench *b, int rows)
{
    const struct tensor y = tensor_head(tensor_cols(b->wide, D, D), rows);
    op_pkm_read(b->be, y, (struct tensor){0}, tensor_head(b->slots, rows),
                tensor_head(b->shares, rows), b->values, NULL);
}

static struct step *step_wanting(struct bench *b, int rows, int want, float temperature)
{
    struct step *const step = step_of(b, rows);
    for (int i = 0; i < rows; i++) {
        step->out_want[i] = (uint8_t)want;
        step->target[i] = (want & OUT_SAMPLE) != 0 ? TARGET_SAMPLED : i * 37 % N_VOCAB;
        step->sample[i].temperature = temperature;
    }
    return step;
}

static void run_outputs(struct bench *b, int rows, int want, float temperature)
{
    struct step *const step = step_wanting(b, rows, want, temperature);
    op_outputs(b->be, tensor_head(b->logits, rows), step, 0);
}

static void run_linear_outputs(struct bench *b, int rows, int want)
{
    struct step *const step = step_wanting(b, rows, want, 0);
    const struct tensor none = {.data = NULL};
    op_linear_outputs(b->be, tensor_head(b->logits, rows), tensor_head(b->x, rows), b->vocab, none,
                      step, 0);
}

static void run_greedy(struct bench *b, int rows)
{
    run_outputs(b, rows, OUT_SAMPLE, 0);
}

/* As the engine asks for it. */
static void run_greedy_logprob(struct bench *b, int rows)
{
    run_outputs(b, rows, OUT_SAMPLE | OUT_LOGPROB, 0);
}

/* Random logits are nearly flat: top_p keeps most of the vocabulary, the worst case. */
static void run_flat(struct bench *b, int rows)
{
    run_outputs(b, rows, OUT_SAMPLE, 1);
}

/* Of its own results, which takes as long. */
static void run_softmax(struct bench *b, int rows)
{
    const struct tensor none = {.data = NULL};
    op_log_softmax(b->be, tensor_head(b->logits, rows), none);
}

static void run_logprobs(struct bench *b, int rows)
{
    run_outputs(b, rows, OUT_LOGPROB, 0);
}

/* One whole step without the embedding: what a model's forward does. */
static void run_step(struct bench *b, int rows)
{
    for (int layer = 0; layer < N_LAYER; layer++) {
        const struct product qkvo = {"", b->square + 4 * (size_t)layer, 4, D, D, ACT_NONE};
        const struct product up = {"", b->up + layer, 1, D, D_FF, ACT_GELU};
        const struct product down = {"", b->down + layer, 1, D_FF, D, ACT_NONE};
        run_product(b, &qkvo, rows);
        run_attention(b, rows);
        run_norm(b, rows);
        if (layer == N_LAYER / 2) {
            run_query(b, rows);
            run_search(b, rows);
            run_read(b, rows);
        } else {
            run_product(b, &up, rows);
            run_product(b, &down, rows);
        }
        run_norm(b, rows);
    }
    const int n_out = rows == ROWS_MAX ? 1 : rows; /* a prompt wants its last row's alone */
    run_linear_outputs(b, n_out, OUT_SAMPLE);
}

/* ---- statistics -------------------------------------------------------------------------------*/

static int compare(const void *a, const void *b)
{
    const double x = *(const double *)a;
    const double y = *(const double *)b;
    return (x > y) - (x < y);
}

struct series {
    double value[ROUNDS_MAX];
    int n;
};

static void add(struct series *s, double value)
{
    s->value[s->n++] = value;
}

static double median(struct series *s)
{
    qsort(s->value, (size_t)s->n, sizeof *s->value, compare);
    return s->value[s->n / 2];
}

static void print_share(struct series *share)
{
    const double middle = median(share);
    (void)printf(" %3.0f %% (%.0f-%.0f) |\n", 100 * middle, 100 * share->value[0],
                 100 * share->value[share->n - 1]);
    (void)fflush(stdout);
}

/* ---- the tables -------------------------------------------------------------------------------*/

static void bench_product(struct bench *b, const struct product *p, int rows, int n_round)
{
    struct series us = {.n = 0};
    struct series rate = {.n = 0};
    struct series limit = {.n = 0};
    struct series share = {.n = 0};
    const bool is_stream = rows <= STREAM_ROWS_MAX;
    const double flops = 2.0 * rows * p->n_in * p->n_out * p->n_w;
    for (int round = 0; round < n_round; round++) {
        const double start = now_s();
        const double bytes = is_stream ? read_weights(b, p) : 0;
        const double ceiling = is_stream ? bytes / (now_s() - start) : peak_rate(b);
        const double from = now_s();
        run_product(b, p, rows);
        const double seconds = now_s() - from;
        const double reached = (is_stream ? bytes : flops) / seconds;
        add(&us, seconds * 1e6 / p->n_w);
        add(&rate, reached * 1e-9);
        add(&limit, ceiling * 1e-9);
        add(&share, reached / ceiling);
    }
    (void)printf("| %s | %d | %.0f | %.1f | %.1f %s |", p->name, rows, median(&us), median(&rate),
                 median(&limit), is_stream ? "GB/s" : "GFLOP/s");
    print_share(&share);
}

static void bench_products(struct bench *b, int n_round)
{
    const struct product products[] = {
        {"1024 → 1024", b->square, 4 * N_LAYER, D, D, ACT_NONE},
        {"1024 → 4096, GELU", b->up, N_LAYER, D, D_FF, ACT_GELU},
        {"4096 → 1024", b->down, N_LAYER, D_FF, D, ACT_NONE},
        {"1024 → 60000", &b->vocab, 1, D, N_VOCAB, ACT_NONE},
    };
    static const int rows[] = {1, 4, 8, 16, 64, 256};
    (void)printf(
        "\n| product | rows | us | reached | limit | share |\n|---|---|---|---|---|---|\n");
    for (size_t p = 0; p < sizeof products / sizeof *products; p++) {
        for (size_t r = 0; r < sizeof rows / sizeof *rows; r++) {
            bench_product(b, &products[p], rows[r], n_round);
        }
    }
}

/* The product that makes logits, the log-probabilities that are taken of them, and both as one op,
 * which does not keep the logits. */
static void bench_scores(struct bench *b, int n_round)
{
    static const int rows[] = {8, 32, 64, ROWS_MAX};
    const struct product vocab = {"", &b->vocab, 1, D, N_VOCAB, ACT_NONE};
    (void)printf(
        "\n| rows | 1024 → 60000, us | log-probabilities | both as one op | one op over the "
        "product |\n|---|---|---|---|---|\n");
    for (size_t r = 0; r < sizeof rows / sizeof *rows; r++) {
        struct series us[3] = {{.n = 0}};
        struct series ratio = {.n = 0};
        for (int round = 0; round < n_round; round++) {
            const double start = now_s();
            run_product(b, &vocab, rows[r]);
            const double product = now_s();
            run_logprobs(b, rows[r]);
            const double logprobs = now_s();
            run_linear_outputs(b, rows[r], OUT_LOGPROB);
            const double end = now_s();
            add(&us[0], 1e6 * (product - start));
            add(&us[1], 1e6 * (logprobs - product));
            add(&us[2], 1e6 * (end - logprobs));
            add(&ratio, (end - logprobs) / (product - start));
        }
        (void)printf("| %d | %.0f | %.0f | %.0f |", rows[r], median(&us[0]), median(&us[1]),
                     median(&us[2]));
        print_share(&ratio);
    }
}

/* Cold rows. */
static void draw_slots(struct bench *b, int rows)
{
    for (int i = 0; i < rows * MEM_HEADS * K_TOP; i++) {
        ((int32_t *)b->slots.data)[i] = (int32_t)(b->seed % N_SLOT);
        (void)draw(b);
    }
}

static void run_ffn(struct bench *b, int rows)
{
    const struct ffn ffn = {.up = b->up[0], .down = b->down[0], .act = ACT_GELU};
    op_ffn(b->be, tensor_head(tensor_cols(b->logits, 0, D), rows), tensor_head(b->wide, rows),
           tensor_head(b->x, rows), &ffn);
}

/* The memory layer beside the FFN that it takes the place of, each with weights that another
 * layer's have driven out of the caches next to the cores. */
static void bench_memory(struct bench *b, int n_round)
{
    static const int rows[] = {1, 8, 16, 32, 64, ROWS_MAX};
    enum { QUERY, SEARCH, READ, FFN, N_PART };
    const struct product other = {"", b->up + 1, N_LAYER - 1, D, D_FF, ACT_NONE};
    (void)printf(
        "\n| rows | memory, us | of which query | search | read | FFN, us | memory over FFN "
        "|\n|---|---|---|---|---|---|---|\n");
    for (size_t r = 0; r < sizeof rows / sizeof *rows; r++) {
        struct series us[N_PART] = {{.n = 0}};
        struct series ratio = {.n = 0};
        for (int round = 0; round < n_round; round++) {
            (void)read_weights(b, &other);
            const double start = now_s();
            run_query(b, rows[r]);
            const double query = now_s();
            run_search(b, rows[r]);
            const double search = now_s();
            draw_slots(b, rows[r]);
            const double from = now_s();
            run_read(b, rows[r]);
            const double read = now_s() - from;
            (void)read_weights(b, &other);
            const double ffn = now_s();
            run_ffn(b, rows[r]);
            add(&us[FFN], 1e6 * (now_s() - ffn));
            add(&us[QUERY], 1e6 * (query - start));
            add(&us[SEARCH], 1e6 * (search - query));
            add(&us[READ], 1e6 * read);
            add(&ratio, 1e6 * (search - start + read) / us[FFN].value[round]);
        }
        const double part[] = {median(&us[QUERY]), median(&us[SEARCH]), median(&us[READ])};
        (void)printf("| %d | %.0f | %.0f | %.0f | %.0f | %.0f |", rows[r],
                     part[0] + part[1] + part[2], part[0], part[1], part[2], median(&us[FFN]));
        print_share(&ratio);
    }
}

static void bench_other(struct bench *b, const char *name, void (*run)(struct bench *, int rows),
                        int n_round)
{
    static const int rows[] = {1, 8, ROWS_MAX};
    (void)printf("| %s |", name);
    for (size_t r = 0; r < sizeof rows / sizeof *rows; r++) {
        struct series us = {.n = 0};
        for (int round = 0; round < n_round; round++) {
            if (run == run_read) {
                draw_slots(b, rows[r]);
            }
            const double start = now_s();
            run(b, rows[r]);
            add(&us, (now_s() - start) * 1e6);
        }
        (void)printf(" %.1f |", median(&us));
    }
    (void)printf("\n");
    (void)fflush(stdout);
}

enum { STEP_PRODUCTS = 5 };

static void set_step_products(struct bench *b, struct product all[STEP_PRODUCTS])
{
    const struct product products[] = {
        {"", b->square, 4 * N_LAYER, D, D, ACT_NONE},
        {"", b->up, N_LAYER - 1, D, D_FF, ACT_GELU},
        {"", b->down, N_LAYER - 1, D_FF, D, ACT_NONE},
        {"", &b->vocab, 1, D, N_VOCAB, ACT_NONE},
        {"", &b->query, 1, D, MEM_HEADS * D_KEY, ACT_NONE},
    };
    memcpy(all, products, sizeof products);
}

/* The products of a step alone against the tighter of their limits: the plain read of all their
 * weights, and the peak of the multiply-adds. */
static void bench_step_products(struct bench *b, int n_round)
{
    static const int rows[] = {1, 4, 8, 16, 32, 64, ROWS_MAX};
    struct product all[STEP_PRODUCTS];
    set_step_products(b, all);
    (void)printf("\n| products of a step, rows | ms | plain read, ms | at the peak, ms | share of "
                 "the tighter |\n|---|---|---|---|---|\n");
    for (size_t r = 0; r < sizeof rows / sizeof *rows; r++) {
        struct series ms = {.n = 0};
        struct series read_ms = {.n = 0};
        struct series peak_ms = {.n = 0};
        struct series share = {.n = 0};
        for (int round = 0; round < n_round; round++) {
            double flops = 0;
            double start = now_s();
            for (int i = 0; i < STEP_PRODUCTS; i++) {
                (void)read_weights(b, &all[i]);
                flops += 2.0 * rows[r] * all[i].n_in * all[i].n_out * all[i].n_w;
            }
            const double read = now_s() - start;
            const double peak = flops / peak_rate(b);
            start = now_s();
            for (int i = 0; i < STEP_PRODUCTS; i++) {
                run_product(b, &all[i], rows[r]);
            }
            const double seconds = now_s() - start;
            add(&ms, seconds * 1e3);
            add(&read_ms, read * 1e3);
            add(&peak_ms, peak * 1e3);
            add(&share, (read > peak ? read : peak) / seconds);
        }
        (void)printf("| %d | %.2f | %.2f | %.2f |", rows[r], median(&ms), median(&read_ms),
                     median(&peak_ms));
        print_share(&share);
    }
}

/* The whole step against the plain read of all its weights (few rows) or the peak of its products.
 */
static void bench_steps(struct bench *b, int n_round)
{
    struct product all[STEP_PRODUCTS + 1] = {
        [STEP_PRODUCTS] = {"", &b->keys, 1, 0, 0, ACT_NONE},
    };
    set_step_products(b, all);
    static const int rows[] = {1, 8, ROWS_MAX};
    (void)printf(
        "\n| whole step, context 512 | ms | tokens/s | limit | share |\n|---|---|---|---|---|\n");
    for (size_t r = 0; r < sizeof rows / sizeof *rows; r++) {
        struct series ms = {.n = 0};
        struct series limit_ms = {.n = 0};
        struct series share = {.n = 0};
        for (int round = 0; round < n_round; round++) {
            double flops = 2.0 * (double)(D * N_VOCAB); /* one row of logits */
            double start = now_s();
            for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
                flops += all[i].n_out == N_VOCAB
                             ? 0
                             : 2.0 * rows[r] * all[i].n_in * all[i].n_out * all[i].n_w;
                if (rows[r] < ROWS_MAX) {
                    (void)read_weights(b, &all[i]);
                }
            }
            const double limit = rows[r] < ROWS_MAX ? now_s() - start : flops / peak_rate(b);
            start = now_s();
            run_step(b, rows[r]);
            const double seconds = now_s() - start;
            add(&ms, seconds * 1e3);
            add(&limit_ms, limit * 1e3);
            add(&share, limit / seconds);
        }
        const double middle = median(&ms);
        (void)printf("| %s of %d rows | %.2f | %.0f | %.2f ms |",
                     rows[r] == ROWS_MAX ? "prefill" : "decode", rows[r], middle,
                     1e3 * rows[r] / middle, median(&limit_ms));
        print_share(&share);
    }
}

int main(int argc, char **argv)
{
    struct bench b = {.seed = 0x9e3779b97f4a7c15};
    const int n_thread = argc > 2 ? atoi(argv[2]) : 0;
    const int n_round = argc > 3 ? atoi(argv[3]) : 7;
    const char *const dtype = argc > 1 ? argv[1] : "f32";
    b.dtype = strcmp(dtype, "int8") == 0   ? DTYPE_I8
              : strcmp(dtype, "bf16") == 0 ? DTYPE_BF16
                                           : DTYPE_F32;
    if (n_round < 1 || n_round > ROUNDS_MAX || strcmp(dtype, dtype_name(b.dtype)) != 0) {
        die("usage: bench_ops [f32|bf16|int8] [THREADS [ROUNDS 1..99]]");
    }
    struct err err = {0};
    if (cpu_open(&b.be, getenv("PKMSERVE_ISA"), n_thread, &err) != ERR_OK) {
        die(err.message);
    }
    b.cpu = cpu_of(b.be);
    make_all(&b);
    (void)printf("%s; %s; medians of %d rounds\n", b.be->description, dtype_name(b.dtype), n_round);
    bench_steps(&b, n_round);
    bench_step_products(&b, n_round);
    bench_memory(&b, n_round);
    bench_products(&b, n_round);
    bench_scores(&b, n_round);
    (void)printf("\n| other ops, us | 1 row | 8 rows | 256 rows |\n|---|---|---|---|\n");
    bench_other(&b, "attention and kv_store, context 512", run_attention, n_round);
    bench_other(&b, "add_norm", run_norm, n_round);
    bench_other(&b, "rms_norm", run_rms_norm, n_round);
    bench_other(&b, "head_norm, 32 heads of 64", run_head_norm, n_round);
    bench_other(&b, "rope, 32 heads of 64", run_rope, n_round);
    bench_other(&b, "gate, 1024", run_gate, n_round);
    bench_other(&b, "memory: query", run_query, n_round);
    bench_other(&b, "memory: search", run_search, n_round);
    bench_other(&b, "memory: read", run_read, n_round);
    bench_other(&b, "sample, greedy", run_greedy, n_round);
    bench_other(&b, "sample, greedy, its logprob", run_greedy_logprob, n_round);
    bench_other(&b, "sample, top_p 0.9, flat", run_flat, n_round);
    bench_other(&b, "logprobs", run_logprobs, n_round);
    bench_other(&b, "log_softmax", run_softmax, n_round);
    return 0; /* the system takes the memory back */
}
