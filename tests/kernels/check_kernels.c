/* The table of checks: one row per op, or two where an op needs data of two kinds. A new kernel
 * enters here. The bench of the same ops stands below it. */
#include "tests/kernels/check.h"

#include <math.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

const struct check_row check_rows[] = {
    {"transfer", check_transfer, 20, false},
    {"embed", check_embed, 40, false},
    {"norm", check_norm, 60, false},
    {"add_norm", check_add_norm, 60, false},
    {"linear", check_linear, 150, false},
    {"linear_drawn", check_linear_drawn, 40, false},
    {"norm_linear", check_norm_linear, 40, false},
    {"linear_many", check_linear_many, 10, false},
    {"linear_deep", check_linear_deep, 6, true},
    {"linear_stream", check_linear_stream, 4, true},
    {"ffn", check_ffn, 60, false},
    {"attention", check_attention, 30, false}, /* with kv_store */
    {"attention_bf16", check_attention_bf16, 20, false},
    {"attention_long", check_attention_long, 12, false},
    {"attention_many", check_attention_many, 20, false},
    {"span_attention", check_span_attention, 40, false},
    {"pkm_search", check_pkm_search, 60, false},
    {"pkm_search_many", check_pkm_search_many, 20, false},
    {"pkm_search_large", check_pkm_search_large, 40, false},
    {"pkm_ties", check_pkm_ties, 60, false},
    {"pkm_nan", check_pkm_nan, 20, false},
    {"l2_norm", check_l2_norm, 40, false},
    {"pkm_rescore", check_pkm_rescore, 80, false},
    {"rms_norm", check_rms_norm, 40, false},
    {"head_norm", check_head_norm, 40, false},
    {"rope", check_rope, 30, false},
    {"gate", check_gate, 40, false},
    {"pkm_experts", check_pkm_experts, 80, false},
    {"pkm_ablate", check_pkm_ablate, 60, false},
    {"pkm_read", check_pkm_read, 120, false},
    {"gather", check_gather, 20, false},
    {"log_softmax", check_log_softmax, 60, false},
    {"logprobs", check_logprobs, 60, false},
    {"logprobs_large", check_logprobs_large, 30, false},
    {"linear_outputs", check_linear_outputs, 20, false},
    {"sample", check_sample, 100, false},
    {"sample_large", check_sample_large, 40, false},
    {NULL, NULL, 0, false},
};

/* ---- bench ---------------------------------------------------------------------------------- */

enum { BENCH_D = 1024, BENCH_OUT = 4096, BENCH_ROWS = 256, BENCH_SLOTS = 1 << 16 };

static double now_s(void)
{
    struct timespec t;
    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* What the timed ops work on. */
struct bench {
    struct backend *be; /* Borrowed */
    int n_tok;
    struct tensor x, y, query, slots, shares;
    struct weight *w, *keys, *values;
    struct pkm_shape shape;
};

static void time_linear(const struct bench *b)
{
    const struct tensor none = {0};
    op_linear(b->be, tensor_head(b->y, b->n_tok), tensor_head(b->x, b->n_tok), b->w, none,
              ACT_NONE);
}

static void time_search(const struct bench *b)
{
    op_pkm_search(b->be, tensor_head(b->slots, b->n_tok), tensor_head(b->shares, b->n_tok),
                  tensor_head(b->query, b->n_tok), b->keys, &b->shape);
}

static void time_read(const struct bench *b)
{
    const struct tensor none = {0};
    op_pkm_read(b->be, tensor_head(b->x, b->n_tok), none, tensor_head(b->slots, b->n_tok),
                tensor_head(b->shares, b->n_tok), b->values, NULL);
}

/* The best of as many runs as fit into a fifth of a second. */
static void bench_op(const struct bench *b, const char *name, void (*op)(const struct bench *))
{
    double best = INFINITY;
    const double start = now_s();
    do {
        const double before = now_s();
        op(b);
        best = fmin(best, now_s() - before);
    } while (now_s() - start < 0.2);
    (void)printf("| %-10s | %-16s | %5d | %12.1f |\n", b->be->name, name, b->n_tok, best * 1e6);
}

void check_bench(struct check *c)
{
    struct bench b = {.be = c->side[SIDE_MANY], .shape = {PKM_PRODUCT, 4, 32, 256, 256, false}};
    const int n_query = b.shape.n_head * b.shape.d_key;
    const int n_col = b.shape.n_head * b.shape.k_top;
    const enum side side = SIDE_MANY;
    const struct weight_desc matrix = {
        .kind = WEIGHT_MATRIX, .dtype = DTYPE_F32, .placement = PLACEMENT_DEVICE, .n_group = 1};
    const struct weight_desc keys = {
        .kind = WEIGHT_KEYS, .dtype = DTYPE_F32, .placement = PLACEMENT_DEVICE, .n_group = 8};
    const struct weight_desc table = {
        .kind = WEIGHT_TABLE, .dtype = DTYPE_F32, .placement = PLACEMENT_DEVICE, .n_group = 1};
    const struct tensor host_w =
        tensor_make(check_normal(c, (size_t)BENCH_D * BENCH_OUT, 1), BENCH_OUT, BENCH_D, DTYPE_F32);
    const struct tensor host_keys =
        tensor_make(host_w.data, 8 * (int64_t)b.shape.n_key, b.shape.d_key / 2, DTYPE_F32);
    const struct tensor host_values =
        tensor_make(check_host(c, (size_t)BENCH_SLOTS * BENCH_D, sizeof(float)), BENCH_SLOTS,
                    BENCH_D, DTYPE_F32);
    b.w = check_weight(c, side, &host_w, &matrix);
    b.keys = check_weight(c, side, &host_keys, &keys);
    b.values = check_weight(c, side, &host_values, &table);
    const float *const data = check_normal(c, (size_t)BENCH_ROWS * BENCH_D, 1);
    b.x = check_inout(c, side, "x", data, BENCH_ROWS, BENCH_D, DTYPE_F32);
    b.y = check_out(c, side, "y", BENCH_ROWS, BENCH_OUT, DTYPE_F32);
    b.query = check_in(c, side, "query", data, BENCH_ROWS, n_query, DTYPE_F32);
    b.slots = check_out(c, side, "slots", BENCH_ROWS, n_col, DTYPE_I32);
    b.shares = check_out(c, side, "shares", BENCH_ROWS, n_col, DTYPE_F32);
    static const int rows[] = {1, 8, BENCH_ROWS};
    const size_t n_run = strcmp(b.be->name, "ref") == 0 ? 2 : 3; /* ref would take seconds */
    for (size_t i = 0; i < n_run; i++) {
        b.n_tok = rows[i];
        bench_op(&b, "linear 1024x4096", time_linear);
        bench_op(&b, "pkm_search", time_search);
        bench_op(&b, "pkm_read", time_read);
    }
}
