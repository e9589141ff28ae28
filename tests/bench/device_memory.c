/* The memory layer alone, at any number of tokens, beside the feed-forward network that it
 * replaces: part of bench_device. The layer is three ops: query projection (F32, as models keep
 * it), search, read. */
#include "tests/bench/bench_device.h"

#include <stdlib.h>

/* Different inputs one after the other, so that each looks up other slots. */
enum { X_TIMES = 4, X_ROWS_MIN = 256 };

struct memory {
    struct pkm_shape shape;
    struct tensor x, query, slots, shares, y; /* [n_x | rows_max, ...] */
    struct tensor wide;
    int64_t n_x;
    struct weight *query_w[SWEEP_MAX], *keys[SWEEP_MAX], *up[SWEEP_MAX], *down[SWEEP_MAX];
    struct weight *values;
};

/* Rows of t for the i-th use: they follow one another and start anew at the end. */
static struct tensor window(const struct memory *m, struct tensor t, int i, int rows)
{
    const int64_t first = (int64_t)i * rows % (m->n_x - rows + 1);
    t.data = (char *)t.data + (size_t)(first * t.stride) * dtype_bytes(t.dtype);
    return tensor_head(t, rows);
}

static void run_query(const struct sweep *s, int copy)
{
    const struct memory *const m = s->ctx;
    op_linear(s->b->be, window(m, m->query, copy, s->rows), window(m, m->x, copy, s->rows),
              m->query_w[copy], (struct tensor){0}, ACT_NONE);
}

static void run_search(const struct sweep *s, int copy)
{
    const struct memory *const m = s->ctx;
    op_pkm_search(s->b->be, window(m, m->slots, copy, s->rows), window(m, m->shares, copy, s->rows),
                  window(m, m->query, copy, s->rows), m->keys[copy], &m->shape);
}

static void run_read(const struct sweep *s, int copy)
{
    const struct memory *const m = s->ctx;
    op_pkm_read(s->b->be, tensor_head(m->y, s->rows), (struct tensor){0},
                window(m, m->slots, copy, s->rows), window(m, m->shares, copy, s->rows), m->values,
                NULL);
}

static void run_layer(const struct sweep *s, int copy)
{
    run_query(s, copy);
    run_search(s, copy);
    run_read(s, copy);
}

static void run_feed_forward(const struct sweep *s, int copy)
{
    const struct memory *const m = s->ctx;
    const struct ffn ffn = {.up = m->up[copy], .down = m->down[copy], .act = ACT_GELU};
    op_ffn(s->b->be, tensor_head(m->y, s->rows), tensor_head(m->wide, s->rows),
           window(m, m->x, copy, s->rows), &ffn);
}

/* ---- making --------------------------------------------------------------------------------- */

static void make_memory(const struct bench *b, struct memory *m, int n_copy, int rows_max)
{
    const struct plan_shape *const s = &b->shape;
    const int64_t d = s->width;
    const int64_t d_query = (int64_t)m->shape.n_head * m->shape.d_key;
    const int64_t n_hit = (int64_t)m->shape.n_head * m->shape.k_top;
    const int n_group = s->flat ? m->shape.n_head : 2 * m->shape.n_head;
    const int64_t n_key = (int64_t)n_group * m->shape.n_key;
    const int64_t d_half = s->flat ? m->shape.d_key : m->shape.d_key / 2;
    const struct weight_desc f32 = {.kind = WEIGHT_MATRIX,
                                    .dtype = DTYPE_F32,
                                    .placement = PLACEMENT_DEVICE,
                                    .n_group = 1,
                                    .is_split = s->dtype != DTYPE_F32};
    const struct weight_desc keys = {.kind = WEIGHT_KEYS,
                                     .dtype = DTYPE_F32,
                                     .placement = PLACEMENT_DEVICE,
                                     .n_group = n_group,
                                     .is_split = s->dtype != DTYPE_F32};
    const struct weight_desc table = {
        .kind = WEIGHT_TABLE, .dtype = s->dtype, .placement = b->values, .n_group = 1};
    struct random_pool *pool = NULL;
    struct random_pool *pool_f32 = NULL;
    struct err err = {0};
    const int64_t n_f32 = n_key * d_half > d_query * d ? n_key * d_half : d_query * d;
    if (random_pool_open(&pool, s->dtype, plan_slots(s) * d, &err) != ERR_OK ||
        random_pool_open(&pool_f32, DTYPE_F32, n_f32, &err) != ERR_OK) {
        bench_die("%s", err.message);
    }
    m->n_x = (int64_t)X_TIMES * rows_max > X_ROWS_MIN ? (int64_t)X_TIMES * rows_max : X_ROWS_MIN;
    m->x = bench_buffer(b, m->n_x, d, DTYPE_F32);
    m->query = bench_buffer(b, m->n_x, d_query, DTYPE_F32);
    m->slots = bench_buffer(b, m->n_x, n_hit, DTYPE_I32);
    m->shares = bench_buffer(b, m->n_x, n_hit, DTYPE_F32);
    m->y = bench_buffer(b, rows_max, d, DTYPE_F32);
    for (int i = 0; i < n_copy; i++) {
        m->query_w[i] = bench_weight(b, pool_f32, i, d_query, d, &f32);
        m->keys[i] = bench_weight(b, pool_f32, i + n_copy, n_key, d_half, &keys);
    }
    m->values = bench_weight(b, pool, 0, plan_slots(s), d, &table);
    random_pool_close(pool);
    random_pool_close(pool_f32);
}

static void make_feed_forward(const struct bench *b, struct memory *m, int n_copy, int rows_max)
{
    const int64_t d = b->shape.width;
    const int64_t d_ff = b->shape.ff;
    const struct weight_desc matrix = {.kind = WEIGHT_MATRIX,
                                       .dtype = b->shape.dtype,
                                       .placement = PLACEMENT_DEVICE,
                                       .n_group = 1};
    struct random_pool *pool = NULL;
    struct err err = {0};
    if (random_pool_open(&pool, b->shape.dtype, d * d_ff, &err) != ERR_OK) {
        bench_die("%s", err.message);
    }
    m->wide = bench_buffer(b, rows_max, d_ff, DTYPE_F32);
    for (int i = 0; i < n_copy; i++) {
        m->up[i] = bench_weight(b, pool, i, d_ff, d, &matrix);
        m->down[i] = bench_weight(b, pool, i + n_copy, d, d_ff, &matrix);
    }
    random_pool_close(pool);
}

/* ---- measuring ------------------------------------------------------------------------------ */

/* What the three ops move and compute at least. */
struct cost {
    double query_bytes, key_bytes, row_bytes; /* the last: value rows of one token */
    double query_flops, key_flops, row_flops; /* of one token */
};

static struct cost cost_of(const struct bench *b, const struct memory *m)
{
    const double d = b->shape.width;
    const double d_query = (double)m->shape.n_head * m->shape.d_key;
    const double key = (double)m->shape.n_head * m->shape.n_key * m->shape.d_key;
    const double hits = (double)m->shape.n_head * m->shape.k_top;
    return (struct cost){.query_bytes = 4 * d * d_query,
                         .key_bytes = 4 * key,
                         .row_bytes = hits * d * (double)dtype_bytes(b->shape.dtype),
                         .query_flops = 2 * d * d_query,
                         .key_flops = 2 * key,
                         .row_flops = 2 * hits * d};
}

static void measure(struct sweep *s, const char *op,
                    void (*run)(const struct sweep *sweep, int copy), double bytes, double flops)
{
    s->run = run;
    const struct timing t = sweep_time(s);
    bench_print(s->b, "memory", op, s->rows, &t, bytes, flops);
}

static void measure_rows(struct sweep *s, const struct cost *c)
{
    const double n = s->rows;
    measure(s, "layer", run_layer, c->query_bytes + c->key_bytes + n * c->row_bytes,
            n * (c->query_flops + c->key_flops + c->row_flops));
    measure(s, "query", run_query, c->query_bytes, n * c->query_flops);
    measure(s, "search", run_search, c->key_bytes, n * c->key_flops);
    measure(s, "read", run_read, n * c->row_bytes, n * c->row_flops);
}

/* Last, for its copies take the place of the others'. */
static void measure_feed_forward(const struct bench *b, struct sweep *s, struct memory *m,
                                 const struct bench_rows *rows)
{
    const double elem = (double)dtype_bytes(b->shape.dtype);
    const double weights = 2.0 * b->shape.width * b->shape.ff;
    s->n_copy = sweep_copies(b, elem * weights);
    make_feed_forward(b, m, s->n_copy, bench_rows_max(rows));
    for (int i = 0; i < rows->n; i++) {
        sweep_rows(s, rows->row[i]);
        measure(s, "feed-forward", run_feed_forward, elem * weights, 2.0 * s->rows * weights);
    }
}

static void measure_spread(const struct sweep *s, const struct memory *m)
{
    struct sweep whole = *s;
    whole.rows = X_ROWS_MIN;
    s->step->ops_list++;
    s->b->be->op->step_begin(s->b->be, s->step);
    run_query(&whole, 0);
    run_search(&whole, 0);
    bench_finish(s->b, s->step);
    bench_print_spread(s->b, tensor_head(m->slots, X_ROWS_MIN));
}

void bench_memory(const struct bench *b, const struct bench_rows *rows)
{
    const struct plan_shape *const shape = &b->shape;
    struct memory m = {.shape = {shape->flat ? PKM_FLAT : PKM_PRODUCT, shape->memory_heads,
                                 shape->k, shape->keys, shape->key_width, false}};
    const struct cost cost = cost_of(b, &m);
    struct sweep s = {.b = b, .ctx = &m, .step = bench_step(b, 1, 1, 0, 0)};
    s.n_copy = sweep_copies(b, cost.query_bytes + cost.key_bytes);
    make_memory(b, &m, s.n_copy, bench_rows_max(rows));
    for (int i = 0; i < rows->n; i++) {
        sweep_rows(&s, rows->row[i]);
        measure_rows(&s, &cost);
    }
    measure_spread(&s, &m);
    measure_feed_forward(b, &s, &m, rows);
}
