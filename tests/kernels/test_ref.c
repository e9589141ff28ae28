/* The reference ops against values worked out by hand and against slower definitions: the checker
 * takes ref for granted, so here it is not. Sampling has its own file, test_ref_sample.c. */
#include "kernels/ref/ref.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static struct backend *be; /* opened for the group */

static int group_open(void **state)
{
    (void)state;
    return ref_open(&be, NULL) == ERR_OK ? 0 : -1;
}

static int group_close(void **state)
{
    (void)state;
    backend_close(be);
    return 0;
}

static struct tensor rows_of(const float *data, int64_t rows, int64_t cols)
{
    return tensor_make((void *)(uintptr_t)data, rows, cols, DTYPE_F32);
}

static struct weight *weight_of(struct tensor host, enum weight_kind kind, enum dtype dtype,
                                enum placement placement, int n_group)
{
    const struct weight_desc desc = {
        .kind = kind, .dtype = dtype, .placement = placement, .n_group = n_group};
    struct weight *w = NULL;
    assert_int_equal(be->op->weight_new(be, &w, &host, &desc, "w", NULL), ERR_OK);
    return w;
}

static void expect_floats(const char *what, const float *expected, const float *got, int n,
                          double tolerance)
{
    for (int i = 0; i < n; i++) {
        if (!(fabs((double)expected[i] - (double)got[i]) <= tolerance)) {
            fail_msg("%s[%d]: expected %.9g, got %.9g", what, i, (double)expected[i],
                     (double)got[i]);
        }
    }
}

/* ---- resources ------------------------------------------------------------------------------ */

static void test_buffers_are_zero_and_aligned(void **state)
{
    (void)state;
    static const size_t sizes[] = {0, 1, 63, 64, 65, 4096};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        void *data = NULL;
        assert_int_equal(be->op->buffer_new(be, &data, sizes[i], "test", NULL), ERR_OK);
        assert_non_null(data);
        assert_int_equal((uintptr_t)data % 64, 0);
        for (size_t b = 0; b < sizes[i]; b++) {
            assert_int_equal(((const char *)data)[b], 0);
        }
        be->op->buffer_free(be, data);
    }
    be->op->buffer_free(be, NULL);
}

static void test_absurd_buffer_is_refused_by_purpose(void **state)
{
    (void)state;
    void *data = &data;
    struct err err = {0};
    assert_int_equal(be->op->buffer_new(be, &data, SIZE_MAX - 3, "kv cache", &err), ERR_MEMORY);
    assert_null(data);
    assert_non_null(strstr(err.message, "kv cache"));
}

static void test_absurd_weight_is_refused_by_name(void **state)
{
    (void)state;
    const float one = 1;
    const struct tensor host = rows_of(&one, INT64_MAX, INT64_MAX / 2);
    const struct weight_desc desc = {
        .kind = WEIGHT_MATRIX, .dtype = DTYPE_F32, .placement = PLACEMENT_DEVICE, .n_group = 1};
    struct weight *w = NULL;
    struct err err = {0};
    assert_int_equal(be->op->weight_new(be, &w, &host, &desc, "pred_layer.proj.weight", &err),
                     ERR_MEMORY);
    assert_null(w);
    assert_non_null(strstr(err.message, "pred_layer.proj.weight"));
}

static void test_weight_bytes_count_the_source_in_place(void **state)
{
    (void)state;
    const uint16_t half[6] = {0};
    const struct tensor host = tensor_make((void *)(uintptr_t)half, 3, 2, DTYPE_F16);
    struct weight *const copied = weight_of(host, WEIGHT_TABLE, DTYPE_F32, PLACEMENT_DEVICE, 1);
    struct weight *const mapped = weight_of(host, WEIGHT_TABLE, DTYPE_F32, PLACEMENT_MMAP, 1);
    assert_int_equal(be->op->weight_bytes(copied), 24);
    assert_int_equal(be->op->weight_bytes(mapped), 12);
    be->op->weight_free(be, copied);
    be->op->weight_free(be, mapped);
    be->op->weight_free(be, NULL);
}

/* A file may place a table at any byte. */
static void test_table_in_place_may_be_unaligned(void **state)
{
    (void)state;
    const float values[4] = {1, 2, 3, 4};
    char file[3 + sizeof values];
    memcpy(file + 3, values, sizeof values);
    struct weight *const w = weight_of(tensor_make(file + 3, 2, 2, DTYPE_F32), WEIGHT_TABLE,
                                       DTYPE_F32, PLACEMENT_MMAP, 1);
    int32_t slot = 1;
    float share = 1;
    float y[2] = {0};
    const struct tensor none = {0};
    op_pkm_read(be, rows_of(y, 1, 2), none, tensor_make(&slot, 1, 1, DTYPE_I32),
                rows_of(&share, 1, 1), w, NULL);
    expect_floats("y", values + 2, y, 2, 0);
    be->op->weight_free(be, w);
}

/* ---- ops ------------------------------------------------------------------------------------ */

static void test_norm_by_hand(void **state)
{
    (void)state;
    /* mean 2.5, variance 1.25; eps 3.75 makes the deviation sqrt(5) */
    const float x[4] = {1, 2, 3, 4};
    const float gamma[4] = {1, 2, 1, -1};
    const float beta[4] = {0, 0, 10, 0};
    const float root = 2.2360680f;
    const float expected[4] = {-1.5f / root, -1 / root, 10 + 0.5f / root, -1.5f / root};
    float y[4] = {0};
    op_norm(be, rows_of(y, 1, 4), rows_of(x, 1, 4), rows_of(gamma, 1, 4), rows_of(beta, 1, 4),
            3.75f);
    expect_floats("y", expected, y, 4, 1e-6);
}

/* The mean of squares minus the square of the mean would be 0 or worse here. */
static void test_norm_of_a_large_mean(void **state)
{
    (void)state;
    const float x[4] = {1e6f, 1e6f + 1, 1e6f, 1e6f + 1};
    const float one[4] = {1, 1, 1, 1};
    const float zero[4] = {0};
    const float expected[4] = {-1, 1, -1, 1};
    float y[4] = {0};
    op_norm(be, rows_of(y, 1, 4), rows_of(x, 1, 4), rows_of(one, 1, 4), rows_of(zero, 1, 4),
            1e-12f);
    expect_floats("y", expected, y, 4, 1e-6);
}

static void test_add_norm_adds_first(void **state)
{
    (void)state;
    float x[2] = {3, -2};
    const float r[2] = {-1, 6};
    const float one[2] = {1, 1};
    const float zero[2] = {0};
    const float expected[2] = {-1, 1}; /* of 2 and 4 */
    op_add_norm(be, rows_of(x, 1, 2), rows_of(x, 1, 2), rows_of(r, 1, 2), rows_of(one, 1, 2),
                rows_of(zero, 1, 2), 1e-12f);
    expect_floats("y", expected, x, 2, 1e-6);
}

static void test_linear_by_hand(void **state)
{
    (void)state;
    const float w[6] = {1, 2, 3, -1, 0.5f, 0}; /* [2, 3] */
    const float x[3] = {2, -1, 1};
    const float bias[2] = {10, 1};
    struct weight *const weight =
        weight_of(rows_of(w, 2, 3), WEIGHT_MATRIX, DTYPE_F32, PLACEMENT_DEVICE, 1);
    float y[2] = {0};
    op_linear(be, rows_of(y, 1, 2), rows_of(x, 1, 3), weight, rows_of(bias, 1, 2), ACT_NONE);
    expect_floats("with bias", (const float[2]){13, -1.5f}, y, 2, 0);
    op_linear(be, rows_of(y, 1, 2), rows_of(x, 1, 3), weight, rows_of(bias, 1, 2), ACT_RELU);
    expect_floats("relu", (const float[2]){13, 0}, y, 2, 0);
    const struct tensor none = {0};
    op_linear(be, rows_of(y, 1, 2), rows_of(x, 1, 3), weight, none, ACT_NONE);
    expect_floats("without bias", (const float[2]){3, -2.5f}, y, 2, 0);
    be->op->weight_free(be, weight);
}

/* Values of x/2·(1 + erf(x/√2)), from tables of the normal distribution. */
static void test_gelu_is_the_exact_one(void **state)
{
    (void)state;
    const float one = 1;
    struct weight *const weight =
        weight_of(rows_of(&one, 1, 1), WEIGHT_MATRIX, DTYPE_F32, PLACEMENT_DEVICE, 1);
    const float x[6] = {0, 1, -1, 2, -3, -10};
    const float expected[6] = {0, 0.84134475f, -0.15865525f, 1.9544997f, -0.0040496941f, 0};
    float y[6] = {0};
    const struct tensor none = {0};
    op_linear(be, rows_of(y, 6, 1), rows_of(x, 6, 1), weight, none, ACT_GELU);
    expect_floats("gelu", expected, y, 6, 2e-7);
    assert_true(y[5] < 0 && y[5] > -1e-22f); /* -10 · 7.6e-24: does not cancel to 0 */
    be->op->weight_free(be, weight);
}

/* With BF16 weights the inputs are rounded to BF16 too, the sums are not. */
static void test_bf16_linear_rounds_the_inputs(void **state)
{
    (void)state;
    const float w[2] = {1 + 0x1p-9f, 1};         /* the first rounds to 1 */
    const float x[2] = {1, 0x1p-12f + 0x1p-24f}; /* the second rounds to 2^-12 */
    struct weight *const weight =
        weight_of(rows_of(w, 1, 2), WEIGHT_MATRIX, DTYPE_BF16, PLACEMENT_DEVICE, 1);
    float y = 0;
    const struct tensor none = {0};
    op_linear(be, rows_of(&y, 1, 1), rows_of(x, 1, 2), weight, none, ACT_NONE);
    const float expected = 1 + 0x1p-12f;
    expect_floats("y", &expected, &y, 1, 0);
    be->op->weight_free(be, weight);
}

/* Likewise with F16 weights, which keep three bits more; beyond the largest number rows are that,
 * and weights are. */
static void test_f16_linear_rounds_the_inputs(void **state)
{
    (void)state;
    const float w[2] = {1 + 0x1p-9f + 0x1p-12f, 1}; /* the first rounds to 1 + 2^-9 */
    const float x[2 * 2] = {1, 0x1p-12f + 0x1p-24f, 1e5f, -INFINITY};
    const float expected[2] = {1 + 0x1p-9f + 0x1p-12f, 0x1p-9f * 65504};
    struct weight *weight =
        weight_of(rows_of(w, 1, 2), WEIGHT_MATRIX, DTYPE_F16, PLACEMENT_DEVICE, 1);
    float y[2] = {0};
    const struct tensor none = {0};
    op_linear(be, rows_of(y, 2, 1), rows_of(x, 2, 2), weight, none, ACT_NONE);
    expect_floats("y", expected, y, 2, 0);
    be->op->weight_free(be, weight);
    const float large[2] = {-7e4f, 0};
    const float two = -131008;
    weight = weight_of(rows_of(large, 1, 2), WEIGHT_MATRIX, DTYPE_F16, PLACEMENT_DEVICE, 1);
    op_linear(be, rows_of(y, 1, 1), rows_of((const float[]){2, 0}, 1, 2), weight, none, ACT_NONE);
    expect_floats("y", &two, y, 1, 0);
    be->op->weight_free(be, weight);
}

static struct step *step_of(int n_tok, int n_out, int n_vocab)
{
    const struct step_limits limits = {.n_tok_max = n_tok,
                                       .n_seq_max = 1,
                                       .n_page_max = 4,
                                       .n_out_max = n_out,
                                       .n_top_max = 4,
                                       .n_vocab = n_vocab,
                                       .d_model = 1,
                                       .n_head = 1};
    struct step *step = NULL;
    assert_int_equal(be->op->step_new(be, &step, &limits, NULL), ERR_OK);
    step->n_tok = n_tok;
    step->n_seq = 1;
    step->seq_first[1] = n_tok;
    for (int r = 0; r < n_tok; r++) {
        step->pos[r] = r;
    }
    step->n_out = n_out;
    for (int i = 0; i < n_out; i++) {
        step->out_row[i] = i;
        step->out_want[i] = OUT_SAMPLE;
    }
    return step;
}

/* q = (127, -64) and (127, 64), the second of each a tie that goes to the even number. */
static void test_int8_linear_by_hand(void **state)
{
    (void)state;
    const float w[2] = {1, -0.5f};
    const float x[4] = {2, 1, 0, 1e-31f}; /* the second row is below what counts */
    struct weight *const weight =
        weight_of(rows_of(w, 1, 2), WEIGHT_MATRIX, DTYPE_I8, PLACEMENT_DEVICE, 1);
    float y[2] = {0};
    const struct tensor none = {0};
    op_linear(be, rows_of(y, 2, 1), rows_of(x, 2, 2), weight, none, ACT_NONE);
    const float expected[2] = {(127.0f * 127 - 64 * 64) * 2 / (127.0f * 127), 0};
    expect_floats("y", expected, y, 2, 2e-7);
    be->op->weight_free(be, weight);
}

static void test_attention_by_hand(void **state)
{
    (void)state;
    /* One head of one column: scores q·k·scale = 0 and log 3 for the second row. */
    struct step *const step = step_of(2, 0, 0);
    const float q[2] = {5, 1};
    const float k[2] = {0, 1.0986123f * 2};
    const float v[2] = {8, 4};
    float k_pages[2 * KV_PAGE] = {0};
    float v_pages[2 * KV_PAGE] = {0};
    float y[2] = {0};
    step->page[0] = 1;
    const struct tensor k_cache = rows_of(k_pages, 2, KV_PAGE);
    const struct tensor v_cache = rows_of(v_pages, 2, KV_PAGE);
    be->op->step_begin(be, step);
    op_attention(be, rows_of(y, 2, 1), rows_of(q, 2, 1), k_cache, v_cache, rows_of(k, 2, 1),
                 rows_of(v, 2, 1), step, 1, 0.5f);
    expect_floats("y", (const float[2]){8, (8 + 3 * 4) / 4.0f}, y, 2, 1e-6);
    be->op->step_free(be, step);
}

/* ---- memory --------------------------------------------------------------------------------- */

static uint32_t random_state;

static int random_int(int n)
{
    random_state = random_state * 1664525u + 1013904223u;
    return (int)((random_state >> 8) % (uint32_t)n);
}

/* The best k of all n² sums, by looking at each of them k times. */
static void exhaustive(const float *a, const float *b, int n, int k, int32_t *slots)
{
    float last = INFINITY;
    int32_t last_slot = -1;
    for (int j = 0; j < k; j++) {
        float best = -INFINITY;
        int32_t best_slot = -1;
        for (int s = 0; s < n * n; s++) {
            const float score = a[s / n] + b[s % n];
            const bool is_left = score < last || (score == last && s > last_slot);
            if (is_left && (best_slot < 0 || score > best)) {
                best = score;
                best_slot = s;
            }
        }
        slots[j] = last_slot = best_slot;
        last = best;
    }
}

/* Pruned search finds what the full search finds, in its order, also among heavy ties: keys of one
 * column and a query of 1 make the scores the keys themselves. */
static void test_product_search_is_exact(void **state)
{
    (void)state;
    enum { N = 12, CASES = 400 };
    random_state = 1;
    for (int i = 0; i < CASES; i++) {
        const int n_value = 1 + random_int(i % 2 == 0 ? 4 : 1000);
        float keys[2 * N];
        for (int j = 0; j < 2 * N; j++) {
            keys[j] = (float)random_int(n_value);
        }
        const int k = 1 + random_int(N);
        const struct pkm_shape shape = {PKM_PRODUCT, 1, k, N, 2, false};
        struct weight *const w =
            weight_of(rows_of(keys, 2 * N, 1), WEIGHT_KEYS, DTYPE_F32, PLACEMENT_DEVICE, 2);
        const float query[2] = {1, 1};
        int32_t expected[N];
        int32_t slots[N];
        float shares[N];
        exhaustive(keys, keys + N, N, k, expected);
        op_pkm_search(be, tensor_make(slots, 1, k, DTYPE_I32), rows_of(shares, 1, k),
                      rows_of(query, 1, 2), w, &shape);
        for (int j = 0; j < k; j++) {
            if (slots[j] != expected[j]) {
                fail_msg("case %d, %d values, k_top %d, rank %d: expected slot %d, got %d", i,
                         n_value, k, j, expected[j], slots[j]);
            }
        }
        be->op->weight_free(be, w);
    }
}

static void test_flat_search_by_hand(void **state)
{
    (void)state;
    const float keys[8] = {1, 0, 0, 1, 2, 0, 0, 1}; /* two heads of two keys of two columns */
    const float query[4] = {3, 3, 0, 1};
    const struct pkm_shape shape = {PKM_FLAT, 2, 2, 2, 2, false};
    struct weight *const w =
        weight_of(rows_of(keys, 4, 2), WEIGHT_KEYS, DTYPE_F32, PLACEMENT_DEVICE, 2);
    int32_t slots[4];
    float shares[4];
    op_pkm_search(be, tensor_make(slots, 1, 4, DTYPE_I32), rows_of(shares, 1, 4),
                  rows_of(query, 1, 4), w, &shape);
    assert_memory_equal(slots, ((const int32_t[4]){0, 1, 1, 0}), sizeof slots);
    const float low = 1 / (1 + 2.7182818f);
    expect_floats("shares", (const float[4]){0.5f, 0.5f, 1 - low, low}, shares, 4, 1e-6);
    be->op->weight_free(be, w);
}

/* One key set that both heads search, and scores instead of shares. */
static void test_shared_keys_give_scores(void **state)
{
    (void)state;
    const float keys[4] = {1, 0, 0, 1};
    const float query[4] = {3, 4, 2, -1};
    const struct pkm_shape shape = {PKM_FLAT, 2, 2, 2, 2, true};
    struct weight *const w =
        weight_of(rows_of(keys, 2, 2), WEIGHT_KEYS, DTYPE_F32, PLACEMENT_DEVICE, 1);
    int32_t slots[4];
    float shares[4];
    op_pkm_search(be, tensor_make(slots, 1, 4, DTYPE_I32), rows_of(shares, 1, 4),
                  rows_of(query, 1, 4), w, &shape);
    assert_memory_equal(slots, ((const int32_t[4]){1, 0, 0, 1}), sizeof slots);
    expect_floats("shares", (const float[4]){4, 3, 2, -1}, shares, 4, 0);
    be->op->weight_free(be, w);
}

static void rescore(int32_t *slots, float *shares, int n_head, int k, const int32_t *map,
                    int n_pair, struct pkm_rescore how)
{
    how.n_head = n_head;
    how.k_top = k;
    const struct tensor slot_map = {(void *)(uintptr_t)map, n_head, n_pair, n_pair, DTYPE_I32};
    const struct tensor none = {0};
    op_pkm_rescore(be, tensor_make(slots, 1, n_head * k, DTYPE_I32), rows_of(shares, 1, n_head * k),
                   map == NULL ? none : slot_map, &how);
}

static void test_rescore_by_hand(void **state)
{
    (void)state;
    int32_t slots[4] = {4, 0, 3, 1};
    float shares[4] = {8, 4, 2, -2};
    const struct pkm_rescore plain = {.n_slot = 5, .temperature = 2};
    rescore(slots, shares, 1, 4, NULL, 0, plain);
    expect_floats("temperature", (const float[4]){4, 2, 1, -1}, shares, 4, 0);
    struct pkm_rescore how = {.n_slot = 3, .temperature = 1, .subtract = PKM_SUBTRACT_MEDIAN};
    rescore(slots, shares, 1, 4, NULL, 0, how); /* the lower of 1 and 2 */
    expect_floats("median", (const float[4]){3, 1, 0, -2}, shares, 4, 0);
    assert_memory_equal(slots, ((const int32_t[4]){1, 0, 0, 1}), sizeof slots); /* modulo 3 */
    how.subtract = PKM_SUBTRACT_MEAN;
    rescore(slots, shares, 1, 4, NULL, 0, how);
    expect_floats("mean", (const float[4]){2.5f, 0.5f, -0.5f, -2.5f}, shares, 4, 0);
    how.subtract = PKM_SUBTRACT_MIN;
    how.normalize = true;
    rescore(slots, shares, 1, 4, NULL, 0, how);
    expect_floats("min, norm", (const float[4]){0.5f, 0.3f, 0.2f, 0}, shares, 4, 1e-7);
    const int32_t map[6] = {2, 0, 1, 0, 1, 2}; /* two heads of three slots */
    const struct pkm_rescore soft = {.n_slot = 3, .temperature = 0.5f, .softmax = true};
    int32_t two[4] = {0, 1, 0, 1};
    float scores[4] = {1, 0.5f, 0, 0};
    rescore(two, scores, 2, 2, map, 3, soft);
    assert_memory_equal(two, ((const int32_t[4]){2, 0, 0, 1}), sizeof two);
    const float low = 1 / (1 + 2.7182818f);
    expect_floats("softmax", (const float[4]){1 - low, low, 0.5f, 0.5f}, scores, 4, 1e-6);
}

static void test_l2_norm_by_hand(void **state)
{
    (void)state;
    float x[6] = {3, 4, 0, 0, -2, 0};
    op_l2_norm(be, rows_of(x, 1, 6), rows_of(x, 1, 6), 3);
    assert_true(isnan(x[2]) && isnan(x[3])); /* no direction */
    expect_floats("first", (const float[2]){0.6f, 0.8f}, x, 2, 1e-7);
    expect_floats("last", (const float[2]){-1, 0}, x + 4, 2, 0);
}

static void test_rms_norm_by_hand(void **state)
{
    (void)state;
    const float gamma[2] = {1, 10};
    float x[2] = {1, -2};
    const float r[2] = {2, 6};
    float y[2] = {0};
    const struct tensor none = {0};
    op_rms_norm(be, rows_of(y, 1, 2), rows_of(x, 1, 2), rows_of(x, 1, 2), rows_of(r, 1, 2),
                rows_of(gamma, 1, 2), 0);
    expect_floats("sum", (const float[2]){3, 4}, x, 2, 0);
    expect_floats("y", (const float[2]){0.84852814f, 11.3137085f}, y, 2, 1e-6); /* rms √12.5 */
    op_rms_norm(be, rows_of(y, 1, 2), none, rows_of(x, 1, 2), none, rows_of(gamma, 1, 2), 3.5f);
    expect_floats("alone, with eps", (const float[2]){0.75f, 10}, y, 2, 1e-6); /* √16 */
}

static void test_head_norm_by_hand(void **state)
{
    (void)state;
    float x[6] = {3, 3, 0, 4, -1, 7}; /* root mean squares 3, √8, 5 */
    const float gamma[2] = {1, 10};
    op_head_norm(be, rows_of(x, 1, 6), rows_of(gamma, 1, 2), 3, 0);
    expect_floats("heads", (const float[6]){1, 10, 0, 14.1421356f, -0.2f, 14}, x, 6, 1e-6);
}

/* Half a turn and a quarter: (a, b) becomes (-a, -b) and (-b, a). */
static void test_rotate_by_hand(void **state)
{
    (void)state;
    const float table[2][8] = {{1, 1, 1, 1, 0, 0, 0, 0}, {-1, -1, 0, 0, 0, 0, -1, 1}};
    float x[2][8] = {{1, 2, 3, 4, 5, 6, 7, 8}, {1, 2, 3, 4, 5, 6, 7, 8}};
    const struct step_limits limits = {
        .n_tok_max = 2, .n_seq_max = 1, .n_page_max = 1, .n_out_max = 1};
    struct step *step = NULL;
    assert_int_equal(be->op->step_new(be, &step, &limits, NULL), ERR_OK);
    step->n_tok = 2;
    step->n_seq = 1;
    step->pos[1] = 1;
    step->seq_first[1] = 2;
    op_rope(be, rows_of(x[0], 2, 8), rows_of(table[0], 2, 8), step, 2);
    expect_floats("position 0", (const float[8]){1, 2, 3, 4, 5, 6, 7, 8}, x[0], 8, 0);
    expect_floats("position 1", (const float[8]){-1, -2, -4, 3, -5, -6, -8, 7}, x[1], 8, 0);
    be->op->step_free(be, step);
}

static void test_gate_by_hand(void **state)
{
    (void)state;
    float x[2] = {3, 5};
    const float g[2] = {0, 1};
    float y[2] = {0};
    op_gate(be, rows_of(y, 1, 2), rows_of(x, 1, 2), rows_of(g, 1, 2), GATE_SILU);
    expect_floats("silu", (const float[2]){0, 3.65529289f}, y, 2, 1e-6);
    op_gate(be, rows_of(x, 1, 2), rows_of(x, 1, 2), rows_of(g, 1, 1), GATE_SIGMOID);
    expect_floats("sigmoid", (const float[2]){1.5f, 2.5f}, x, 2, 0);
    op_gate(be, rows_of(x, 1, 2), rows_of(x, 1, 2), rows_of((const float[1]){-2}, 1, 1),
            GATE_FACTOR);
    expect_floats("factor", (const float[2]){-3, -5}, x, 2, 0);
}

static void test_experts_by_hand(void **state)
{
    (void)state;
    const float rows[4] = {1, 0, 1, -1};
    const float x[2] = {1, 2};
    const int32_t slots[2] = {1, 0};
    float shares[2] = {10, 2};
    struct weight *const w =
        weight_of(rows_of(rows, 2, 2), WEIGHT_TABLE, DTYPE_F32, PLACEMENT_DEVICE, 1);
    const struct tensor slot_view = tensor_make((void *)(uintptr_t)slots, 1, 2, DTYPE_I32);
    op_pkm_experts(be, rows_of(shares, 1, 2), rows_of(shares, 1, 2), slot_view, rows_of(x, 1, 2), w,
                   NULL);
    /* gelu(-1), gelu(1) */
    expect_floats("shares", (const float[2]){-1.58655254f, 1.68268949f}, shares, 2, 1e-6);
    be->op->weight_free(be, w);
}

static void test_read_sums_over_the_residual(void **state)
{
    (void)state;
    const float values[6] = {1, 2, 10, 20, 100, 200};
    const int32_t slots[3] = {2, 0, 2};
    const float shares[3] = {0.5f, 3, 0.25f};
    float y[2] = {1000, 2000};
    struct weight *const w =
        weight_of(rows_of(values, 3, 2), WEIGHT_TABLE, DTYPE_F32, PLACEMENT_DEVICE, 1);
    const struct tensor slot_view = tensor_make((void *)(uintptr_t)slots, 1, 3, DTYPE_I32);
    op_pkm_read(be, rows_of(y, 1, 2), rows_of(y, 1, 2), slot_view, rows_of(shares, 1, 3), w, NULL);
    expect_floats("y", (const float[2]){1078, 2156}, y, 2, 0);
    be->op->weight_free(be, w);
}

/* ---- log-probabilities ---------------------------------------------------------------------- */

static void test_logprobs_by_hand(void **state)
{
    (void)state;
    struct step *const step = step_of(1, 1, 4);
    const float logits[4] = {0, 1.0986123f, 0, -INFINITY}; /* 1, 3, 1, 0 of 5 */
    step->out_want[0] = OUT_LOGPROB | OUT_TOP | OUT_ENTROPY;
    step->target[0] = 2;
    step->n_top = 4;
    op_outputs(be, rows_of(logits, 1, 4), step, 0);
    const float p_low = logf(0.2f);
    const float p_high = logf(0.6f);
    expect_floats("logprob", &p_low, step->out_logprob, 1, 1e-6);
    assert_int_equal(step->out_rank[0], 3); /* after 1, and after 0, its equal */
    assert_memory_equal(step->top_id, ((const int32_t[4]){1, 0, 2, 3}), 16);
    expect_floats("top_logprob", (const float[3]){p_high, p_low, p_low}, step->top_logprob, 3,
                  1e-6);
    assert_true(step->top_logprob[3] == -INFINITY);
    const float entropy = -0.6f * p_high - 0.4f * p_low;
    expect_floats("entropy", &entropy, step->out_entropy, 1, 1e-6);
    be->op->step_free(be, step);
}

/* A tail of an adaptive softmax: its share of the head is the base. */
static void test_log_softmax_by_hand(void **state)
{
    (void)state;
    float y[9] = {0, 1.0986123f, 0, 7, 1000, 1000, -INFINITY, 7, 9};
    const float base[2] = {logf(0.5f), 0};
    const struct tensor view = {y, 2, 3, 4, DTYPE_F32};
    op_log_softmax(be, view, tensor_make((void *)(uintptr_t)base, 2, 1, DTYPE_F32));
    const float due[3] = {logf(0.1f), logf(0.3f), logf(0.1f)};
    expect_floats("row 0", due, y, 3, 1e-6);
    expect_floats("row 1", (const float[2]){logf(0.5f), logf(0.5f)}, y + 4, 2, 1e-6);
    assert_true(y[6] == -INFINITY && y[3] == 7 && y[7] == 7); /* not the gaps */
    const struct tensor none = {.data = NULL};
    const float broken[3] = {NAN, INFINITY, -INFINITY};
    for (int i = 0; i < 3; i++) {
        float z[2] = {i < 2 ? 0 : -INFINITY, broken[i]};
        op_log_softmax(be, tensor_make(z, 1, 2, DTYPE_F32), none);
        assert_true(isnan(z[0]) && isnan(z[1]));
    }
}

/* More alternatives than tokens: the rest says so. */
static void test_top_of_a_small_vocabulary(void **state)
{
    (void)state;
    struct step *const step = step_of(1, 1, 2);
    const float logits[2] = {0, 1};
    step->out_want[0] = OUT_TOP;
    step->n_top = 4;
    op_outputs(be, rows_of(logits, 1, 2), step, 0);
    assert_memory_equal(step->top_id, ((const int32_t[4]){1, 0, -1, -1}), 16);
    assert_true(step->top_logprob[2] == -INFINITY && step->top_logprob[3] == -INFINITY);
    be->op->step_free(be, step);
}

static void test_broken_logits_give_nan(void **state)
{
    (void)state;
    static const float rows[3][2] = {{NAN, 1}, {INFINITY, 1}, {-INFINITY, -INFINITY}};
    for (int i = 0; i < 3; i++) {
        struct step *const step = step_of(1, 1, 2);
        step->out_want[0] = OUT_LOGPROB | OUT_TOP | OUT_ENTROPY;
        step->target[0] = 1;
        step->n_top = 1;
        op_outputs(be, rows_of(rows[i], 1, 2), step, 0);
        assert_true(isnan(step->out_logprob[0]) && isnan(step->out_entropy[0]));
        assert_true(isnan(step->top_logprob[0]));
        assert_int_equal(step->out_rank[0], 0);
        assert_int_equal(step->top_id[0], -1);
        be->op->step_free(be, step);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_buffers_are_zero_and_aligned),
        cmocka_unit_test(test_absurd_buffer_is_refused_by_purpose),
        cmocka_unit_test(test_absurd_weight_is_refused_by_name),
        cmocka_unit_test(test_weight_bytes_count_the_source_in_place),
        cmocka_unit_test(test_table_in_place_may_be_unaligned),
        cmocka_unit_test(test_norm_by_hand),
        cmocka_unit_test(test_norm_of_a_large_mean),
        cmocka_unit_test(test_add_norm_adds_first),
        cmocka_unit_test(test_linear_by_hand),
        cmocka_unit_test(test_gelu_is_the_exact_one),
        cmocka_unit_test(test_bf16_linear_rounds_the_inputs),
        cmocka_unit_test(test_f16_linear_rounds_the_inputs),
        cmocka_unit_test(test_int8_linear_by_hand),
        cmocka_unit_test(test_attention_by_hand),
        cmocka_unit_test(test_product_search_is_exact),
        cmocka_unit_test(test_flat_search_by_hand),
        cmocka_unit_test(test_shared_keys_give_scores),
        cmocka_unit_test(test_rescore_by_hand),
        cmocka_unit_test(test_l2_norm_by_hand),
        cmocka_unit_test(test_rms_norm_by_hand),
        cmocka_unit_test(test_rotate_by_hand),
        cmocka_unit_test(test_head_norm_by_hand),
        cmocka_unit_test(test_gate_by_hand),
        cmocka_unit_test(test_experts_by_hand),
        cmocka_unit_test(test_read_sums_over_the_residual),
        cmocka_unit_test(test_logprobs_by_hand),
        cmocka_unit_test(test_log_softmax_by_hand),
        cmocka_unit_test(test_top_of_a_small_vocabulary),
        cmocka_unit_test(test_broken_logits_give_nan),
    };
    return cmocka_run_group_tests(tests, group_open, group_close);
}
