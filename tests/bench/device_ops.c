/* Each op of the model alone: part of bench_device. */
#include "tests/bench/bench_device.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- sweeps --------------------------------------------------------------------------------- */

int sweep_copies(const struct bench *b, double bytes)
{
    const double n = (double)b->cold_bytes / (bytes < 1 ? 1 : bytes) + 1;
    return n < (double)SWEEP_MAX ? (int)n : SWEEP_MAX;
}

/* At least so many ops per list, so that the upload and the wait of a step weigh little; few where
 * one set of weights is all of cold_bytes, for then an op is long. */
static int sweep_length(const struct sweep *s)
{
    const int wanted = s->n_copy == 1 ? 4 : s->rows <= 64 ? SWEEP_MAX : 8;
    return s->n_copy > wanted ? s->n_copy : wanted - wanted % s->n_copy;
}

static void sweep_run(void *ctx)
{
    const struct sweep *const s = ctx;
    const struct backend *const be = s->b->be;
    be->op->step_begin(s->b->be, s->step);
    for (int i = 0; i < sweep_length(s); i++) {
        s->run(s, i % s->n_copy);
    }
    bench_finish(s->b, s->step);
}

void sweep_rows(struct sweep *sweep, int rows)
{
    sweep->rows = rows;
    sweep->step->is_drawn = sweep->b->be->phases_apart && rows <= SWEEP_DRAWN_MAX;
}

struct timing sweep_time(const struct sweep *sweep)
{
    struct sweep s = *sweep;
    s.step->ops_list++; /* other ops than the sweeps before */
    struct timing t = bench_time(s.b, sweep_run, &s);
    const int n = sweep_length(&s);
    t.us /= n;
    t.us_min /= n;
    t.us_p90 /= n;
    t.n *= n;
    return t;
}

struct weight *bench_weight(const struct bench *b, const struct random_pool *pool, int i,
                            int64_t rows, int64_t cols, const struct weight_desc *desc)
{
    struct weight *w = NULL;
    struct err err = {0};
    const struct tensor host = random_pool_view(pool, i, rows, cols);
    if (b->be->op->weight_new(b->be, &w, &host, desc, "benchmark", &err) != ERR_OK) {
        bench_die("%s", err.message);
    }
    return w;
}

/* ---- products ------------------------------------------------------------------------------- */

struct product {
    struct weight *w[SWEEP_MAX];
    struct tensor x, y, bias;
    enum act act;
};

static void run_product(const struct sweep *s, int copy)
{
    const struct product *const p = s->ctx;
    op_linear(s->b->be, tensor_head(p->y, s->rows), tensor_head(p->x, s->rows), p->w[copy], p->bias,
              p->act);
}

static void bench_product(const struct bench *b, const struct bench_rows *rows,
                          const struct random_pool *pool, const char *name, int64_t n_in,
                          int64_t n_out, enum act act)
{
    const int n_max = bench_rows_max(rows);
    const double elem = (double)dtype_bytes(b->shape.dtype);
    const double weight_bytes = elem * (double)n_in * (double)n_out;
    const struct weight_desc desc = {.kind = WEIGHT_MATRIX,
                                     .dtype = b->shape.dtype,
                                     .placement = PLACEMENT_DEVICE,
                                     .n_group = 1};
    struct product p = {.x = bench_buffer(b, n_max, n_in, DTYPE_F32),
                        .y = bench_buffer(b, n_max, n_out, DTYPE_F32),
                        .bias = bench_buffer(b, 1, n_out, DTYPE_F32),
                        .act = act};
    struct sweep s = {b, run_product, &p, bench_step(b, 1, 1, 0, 0), 1, 1};
    s.n_copy = sweep_copies(b, weight_bytes);
    for (int i = 0; i < s.n_copy; i++) {
        p.w[i] = bench_weight(b, pool, i, n_out, n_in, &desc);
    }
    for (int i = 0; i < rows->n; i++) {
        sweep_rows(&s, rows->row[i]);
        const double n = s.rows;
        const struct timing t = sweep_time(&s);
        bench_print(b, "op", name, s.rows, &t, weight_bytes + 4 * n * (double)(n_in + n_out),
                    2 * n * (double)n_in * (double)n_out);
    }
    b->be->op->step_free(b->be, s.step);
    for (int i = 0; i < s.n_copy; i++) {
        b->be->op->weight_free(b->be, p.w[i]);
    }
    b->be->op->buffer_free(b->be, p.x.data);
    b->be->op->buffer_free(b->be, p.y.data);
    b->be->op->buffer_free(b->be, p.bias.data);
}

static void bench_products(const struct bench *b, const struct bench_rows *rows)
{
    const int64_t d = b->shape.width;
    struct random_pool *pool = NULL;
    struct err err = {0};
    const int64_t largest = d * (b->shape.vocab > 4 * d ? b->shape.vocab : 4 * d);
    const int64_t widest = d * (b->shape.ff > 3 * d ? b->shape.ff : 3 * d);
    if (random_pool_open(&pool, b->shape.dtype, largest > widest ? largest : widest, &err) !=
        ERR_OK) {
        bench_die("%s", err.message);
    }
    bench_product(b, rows, pool, "linear d to 3d", d, 3 * d, ACT_NONE);
    bench_product(b, rows, pool, "linear d to d", d, d, ACT_NONE);
    bench_product(b, rows, pool, "linear d to ff, GELU", d, b->shape.ff, ACT_GELU);
    bench_product(b, rows, pool, "linear ff to d", b->shape.ff, d, ACT_NONE);
    bench_product(b, rows, pool, "linear d to vocabulary", d, b->shape.vocab, ACT_NONE);
    random_pool_close(pool);
}

/* ---- attention and norms -------------------------------------------------------------------- */

struct attend {
    struct tensor qkv, y, k_pages[SWEEP_MAX], v_pages[SWEEP_MAX], gamma;
};

static void run_attention(const struct sweep *s, int copy)
{
    const struct attend *const a = s->ctx;
    const int64_t d = s->b->shape.width;
    const struct tensor qkv = tensor_head(a->qkv, s->rows);
    op_attention(s->b->be, tensor_head(a->y, s->rows), tensor_cols(qkv, 0, d), a->k_pages[copy],
                 a->v_pages[copy], tensor_cols(qkv, d, d), tensor_cols(qkv, 2 * d, d), s->step,
                 s->b->shape.heads, 0.125f);
}

static void run_norm(const struct sweep *s, int copy)
{
    const struct attend *const a = s->ctx;
    (void)copy;
    const struct tensor y = tensor_head(a->y, s->rows);
    op_add_norm(s->b->be, y, y, tensor_cols(tensor_head(a->qkv, s->rows), 0, s->b->shape.width),
                a->gamma, a->gamma, 1e-12f);
}

/* n_seq sequences of n_row rows that end in the middle of the context (decode) or at its end. */
static void bench_attention(const struct bench *b, const char *name, int n_seq, int n_row)
{
    const int64_t d = b->shape.width;
    const int context = b->shape.positions;
    const int last = n_row == 1 ? context / 2 : n_row - 1;
    const int64_t n_page = (int64_t)n_seq * (last / KV_PAGE + 1);
    const double mean_pos = n_row == 1 ? last + 1 : (n_row + 1) / 2.0;
    const enum dtype dtype = plan_cache(&b->shape);
    const double row_bytes = 2 * (double)d * (double)dtype_bytes(dtype); /* keys and values */
    const double cache = row_bytes * (n_row == 1 ? last + 1 : n_row) * n_seq;
    struct attend a = {.qkv = bench_buffer(b, (int64_t)n_seq * n_row, 3 * d, DTYPE_F32),
                       .y = bench_buffer(b, (int64_t)n_seq * n_row, d, DTYPE_F32),
                       .gamma = bench_buffer(b, 1, d, DTYPE_F32)};
    struct sweep s = {b, run_attention, &a, bench_step(b, n_seq, n_row, last, 0), 1, n_seq * n_row};
    s.n_copy = sweep_copies(b, cache);
    for (int i = 0; i < s.n_copy; i++) {
        a.k_pages[i] = bench_buffer(b, n_page, KV_PAGE * d, dtype);
        a.v_pages[i] = bench_buffer(b, n_page, KV_PAGE * d, dtype);
    }
    struct timing t = sweep_time(&s);
    const double rows = s.rows;
    bench_print(b, "op", name, s.rows, &t, cache + 16 * rows * (double)d,
                4 * rows * mean_pos * (double)d);
    s.run = run_norm;
    t = sweep_time(&s);
    bench_print(b, "op", n_row == 1 ? "add_norm" : "add_norm of a prompt", s.rows, &t,
                12 * rows * (double)d, 8 * rows * (double)d);
    b->be->op->step_free(b->be, s.step);
    for (int i = 0; i < s.n_copy; i++) {
        b->be->op->buffer_free(b->be, a.k_pages[i].data);
        b->be->op->buffer_free(b->be, a.v_pages[i].data);
    }
    b->be->op->buffer_free(b->be, a.qkv.data);
    b->be->op->buffer_free(b->be, a.y.data);
    b->be->op->buffer_free(b->be, a.gamma.data);
}

/* ---- the vocabulary ------------------------------------------------------------------------- */

static void run_outputs(const struct sweep *s, int copy)
{
    (void)copy;
    op_outputs(s->b->be, *(const struct tensor *)s->ctx, s->step, 0);
}

static void want(struct step *step, enum out_want wanted, float temperature, float top_p)
{
    for (int i = 0; i < step->n_out; i++) {
        step->out_want[i] = (uint8_t)wanted;
        step->target[i] = wanted == OUT_LOGPROB ? 0 : TARGET_SAMPLED;
        step->sample[i] = (struct sample_params){
            .u = 0.5, .temperature = temperature, .top_p = top_p, .repetition = 1};
    }
}

static void bench_vocabulary(const struct bench *b, int rows)
{
    const double bytes = 4.0 * rows * b->shape.vocab;
    struct tensor logits = bench_buffer(b, rows, b->shape.vocab, DTYPE_F32);
    struct sweep s = {b, run_outputs, &logits, bench_step(b, rows, 1, 0, b->shape.vocab), 1, rows};
    want(s.step, OUT_SAMPLE, 0, 1);
    struct timing t = sweep_time(&s);
    bench_print(b, "op", "sample, greedy", rows, &t, bytes, 0);
    want(s.step, OUT_SAMPLE, 1, 0.9f); /* random logits are nearly flat: the worst case */
    t = sweep_time(&s);
    bench_print(b, "op", "sample, top_p 0.9", rows, &t, bytes, 0);
    want(s.step, OUT_LOGPROB, 0, 1);
    t = sweep_time(&s);
    bench_print(b, "op", "logprobs", rows, &t, bytes, 0);
    b->be->op->step_free(b->be, s.step);
    b->be->op->buffer_free(b->be, logits.data);
}

enum { VOCABULARY_ROWS = 256 }; /* more make logits that no step has at once */

void bench_single_ops(const struct bench *b, const struct bench_rows *rows)
{
    const int context = b->shape.positions;
    for (int i = 0; i < rows->n; i++) {
        const int n = rows->row[i];
        if (n <= VOCABULARY_ROWS) {
            bench_attention(b, "kv_store, attention", n, 1);
            bench_vocabulary(b, n);
        }
    }
    const int n_prompt = bench_rows_max(rows) / context;
    if (n_prompt > 0) {
        bench_attention(b, "kv_store, attention of a prompt", n_prompt, context);
    }
    bench_products(b, rows);
}
