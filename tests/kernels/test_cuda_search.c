/* The memory search of the CUDA backend where test_kernels does not look: that the same row has the
 * same slots and weights, to the bit, in calls of every size, of which each has one of several
 * kernels; and what is chosen of scores that are far apart, close together or equal. */
#include "kernels/backend.h"
#include "tests/cuda_library.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

struct search_shape {
    int n_head, n_key, d_half, k_top;
    bool is_split; /* on tensor cores */
    bool scores;
    bool is_flat; /* keys of d_half columns, whole */
};

static int halves_of(const struct search_shape *s)
{
    return s->is_flat ? 1 : 2;
}

/* Keys and room for the queries, slots and weights of rows. */
struct rig {
    struct backend *be;
    struct weight *keys;
    struct tensor query, slots, weights;
};

static float random_float(uint32_t *state)
{
    *state = *state * 1664525u + 1013904223u;
    return (float)(*state >> 8) * 0x1p-23f - 1;
}

static struct tensor buffer_new(struct backend *be, int rows, int cols, enum dtype dtype)
{
    void *data = NULL;
    const size_t bytes = (size_t)rows * (size_t)cols * dtype_bytes(dtype);
    assert_int_equal(be->op->buffer_new(be, &data, bytes, "test", NULL), ERR_OK);
    return tensor_make(data, rows, cols, dtype);
}

/* keys[n_half·n_head·n_key, d_half], query[n_row, n_half·n_head·d_half] */
static struct rig rig_new(const struct search_shape *s, int n_row, const float *keys,
                          const float *query)
{
    struct rig r = {0};
    const int n_group = halves_of(s) * s->n_head;
    const struct backend_options options = {"cuda", 1, false, NULL};
    const struct tensor host =
        tensor_make((void *)(uintptr_t)keys, n_group * s->n_key, s->d_half, DTYPE_F32);
    const struct weight_desc desc = {.kind = WEIGHT_KEYS,
                                     .dtype = DTYPE_F32,
                                     .placement = PLACEMENT_DEVICE,
                                     .n_group = n_group,
                                     .is_split = s->is_split};
    if (!cuda_library_find()) {
        skip();
    }
    assert_int_equal(backend_open(&r.be, &options, NULL), ERR_OK);
    assert_int_equal(r.be->op->weight_new(r.be, &r.keys, &host, &desc, "keys", NULL), ERR_OK);
    r.query = buffer_new(r.be, n_row, n_group * s->d_half, DTYPE_F32);
    r.slots = buffer_new(r.be, n_row, s->n_head * s->k_top, DTYPE_I32);
    r.weights = buffer_new(r.be, n_row, s->n_head * s->k_top, DTYPE_F32);
    r.be->op->upload(r.be, r.query, query);
    return r;
}

static void rig_free(struct rig *r)
{
    r->be->op->buffer_free(r->be, r->query.data);
    r->be->op->buffer_free(r->be, r->slots.data);
    r->be->op->buffer_free(r->be, r->weights.data);
    r->be->op->weight_free(r->be, r->keys);
    backend_close(r->be);
}

/* Searches for rows first .. first+n-1: slots and weights [n, n_head·k_top]. */
static void search(const struct rig *r, const struct search_shape *s, int first, int n,
                   int32_t *slots, float *weights)
{
    const struct pkm_shape shape = {.kind = s->is_flat ? PKM_FLAT : PKM_PRODUCT,
                                    .n_head = s->n_head,
                                    .n_key = s->n_key,
                                    .d_key = halves_of(s) * s->d_half,
                                    .k_top = s->k_top,
                                    .scores = s->scores};
    const struct tensor to_slots = tensor_head(r->slots, n);
    const struct tensor to_weights = tensor_head(r->weights, n);
    op_pkm_search(r->be, to_slots, to_weights, tensor_rows(r->query, first, n), r->keys, &shape);
    r->be->op->download(r->be, slots, to_slots);
    r->be->op->download(r->be, weights, to_weights);
}

/* ---- calls of every size
 * ------------------------------------------------------------------------ */

enum { ROWS_MAX = 300, CALLS_UP_TO = 40, COLUMNS_MAX = 64, FLOATS_MAX = 1 << 15 };

/* The double's multiprocessors decide how many rows and warps a block has. */
static const struct row_case {
    struct search_shape shape;
    const char *n_sm;
    bool has_ties; /* keys and queries are -1, 0 and 1 */
} row_cases[] = {
    {{2, 40, 8, 32, true, false, false}, "8", false},
    {{1, 70, 36, 9, true, true, false}, "12", false},
    {{1, 40, 8, 32, true, false, false}, "20", false},
    {{1, 530, 4, 32, true, false, false}, "8", false},
    {{1, 530, 4, 32, true, false, false}, "20", true},
    {{2, 40, 8, 32, false, false, false}, "8", false},
    {{1, 1030, 4, 20, true, false, false}, "8", true},
    {{2, 1100, 8, 32, false, false, true}, "8", false},
    {{1, 600, 4, 17, false, true, true}, "8", true},
};

static void expect_rows(const struct search_shape *s, int first, int n, const uint32_t *due,
                        const uint32_t *got, const char *what)
{
    const int n_col = s->n_head * s->k_top;
    for (int i = 0; i < n * n_col; i++) {
        if (due[first * n_col + i] != got[i]) {
            fail_msg(
                "%d %skeys, %s, rows %d to %d: row %d, column %d: expected the %s of a call of %d "
                "rows, %#x, got %#x",
                s->n_key, s->is_flat ? "flat " : "", s->is_split ? "split" : "whole", first,
                first + n - 1, first + i / n_col, i % n_col, what, ROWS_MAX, due[first * n_col + i],
                got[i]);
        }
    }
}

static void test_a_row_has_the_same_bits_in_calls_of_every_size(void **state)
{
    static const int large[] = {127, 128, 129, 255, 256, 257};
    enum { N_LARGE = sizeof large / sizeof *large };
    static float keys[FLOATS_MAX];
    static float query[FLOATS_MAX];
    static int32_t slots[2][ROWS_MAX * COLUMNS_MAX];
    static float weights[2][ROWS_MAX * COLUMNS_MAX];
    const bool is_few = getenv("TEST_FEW") != NULL;
    (void)state;
    for (size_t i = 0; i < (is_few ? 1 : sizeof row_cases / sizeof *row_cases); i++) {
        const struct search_shape *const s = &row_cases[i].shape;
        uint32_t random = (uint32_t)i + 1;
        for (int e = 0; e < FLOATS_MAX; e++) {
            keys[e] = random_float(&random);
            query[e] = random_float(&random);
            if (row_cases[i].has_ties) {
                keys[e] = roundf(keys[e]);
                query[e] = roundf(query[e]);
            }
        }
        assert_int_equal(setenv("CUDA_HOST_SMS", row_cases[i].n_sm, 1), 0);
        struct rig r = rig_new(s, ROWS_MAX, keys, query);
        search(&r, s, 0, ROWS_MAX, slots[0], weights[0]);
        for (int call = 0; call < (is_few ? 20 : CALLS_UP_TO + N_LARGE); call++) {
            const int n = call < CALLS_UP_TO ? call + 1 : large[call - CALLS_UP_TO];
            const int first = call * 7 % (ROWS_MAX - n);
            if (i > 0 && n > 6 && n != 17 && n != 33 && n != 257) {
                continue;
            }
            search(&r, s, first, n, slots[1], weights[1]);
            expect_rows(s, first, n, (uint32_t *)slots[0], (uint32_t *)slots[1], "slots");
            expect_rows(s, first, n, (uint32_t *)weights[0], (uint32_t *)weights[1], "weights");
        }
        rig_free(&r);
    }
}

/* ---- what is chosen
 * ----------------------------------------------------------------------------- */

enum { CHOICE_KEYS = 512, CHOICE_K = 32, CHOICE_ROWS = 3, PAIR_MAX = 119 };

struct choice {
    float score;
    int32_t number;
};

static int by_score(const void *a, const void *b)
{
    const struct choice *const x = a;
    const struct choice *const y = b;
    return x->score != y->score ? (x->score < y->score ? 1 : -1) : x->number - y->number;
}

/* The k best of both halves' n keys, as the paper chooses: from pairs of ranks i·j <= k. */
static void choose(struct choice (*half)[CHOICE_KEYS], int n, int k, struct choice *pair)
{
    int n_pair = 0;
    qsort(half[0], (size_t)n, sizeof *half[0], by_score);
    qsort(half[1], (size_t)n, sizeof *half[1], by_score);
    for (int i = 0; i < k; i++) {
        for (int j = 0; (i + 1) * (j + 1) <= k; j++) {
            pair[n_pair++] = (struct choice){half[0][i].score + half[1][j].score,
                                             half[0][i].number * n + half[1][j].number};
        }
    }
    qsort(pair, (size_t)n_pair, sizeof *pair, by_score);
}

/* Scores of keys, of which each is the key's one column: a BF16 number, so that all products are
 * exact. */
enum { NEAR, FAR, NEGATIVE, TWO_VALUES, ALL_EQUAL, ONE_LANE, N_KIND };

static float key_of(int kind, int key, uint32_t *random)
{
    const float number = random_float(random);
    switch (kind) {
    case NEAR: return bf16_to_f32(bf16_from_f32(1 + number * 0x1p-3f));
    case FAR: {
        const float scale = (float)(1 << (int)((number + 1) * 12));
        return bf16_to_f32(bf16_from_f32(random_float(random) * scale * scale * 0x1p-24f));
    }
    case NEGATIVE: return bf16_to_f32(bf16_from_f32(-2 + number));
    case TWO_VALUES: return number > 0.9f ? 1 : -1;
    case ALL_EQUAL: return key % 2 == 0 ? 0.0f : -0.0f; /* which counts as equal */
    default:
        return key % 32 == 5 ? 2 + (float)key / 32
                             : -(float)(key % 32); /* the best are one lane's */
    }
}

static void check_choice(int kind, int n_key, int k, bool is_split)
{
    const struct search_shape shape = {1, n_key, 1, k, is_split, true, false};
    float keys[2 * CHOICE_KEYS];
    float query[CHOICE_ROWS * 2] = {1, 1, -1, 1, 0, 1};
    int32_t slots[CHOICE_ROWS * CHOICE_K];
    float scores[CHOICE_ROWS * CHOICE_K];
    struct choice half[2][CHOICE_KEYS];
    struct choice pair[PAIR_MAX];
    uint32_t random = (uint32_t)(kind * 100 + n_key + k);
    for (int key = 0; key < 2 * n_key; key++) {
        keys[key] = key_of(kind, key % n_key, &random);
    }
    struct rig r = rig_new(&shape, CHOICE_ROWS, keys, query);
    search(&r, &shape, 0, CHOICE_ROWS, slots, scores);
    rig_free(&r);
    for (int row = 0; row < CHOICE_ROWS; row++) {
        for (int key = 0; key < 2 * n_key; key++) {
            half[key / n_key][key % n_key] =
                (struct choice){query[row * 2 + key / n_key] * keys[key], key % n_key};
        }
        choose(half, n_key, k, pair);
        for (int j = 0; j < k; j++) {
            if (slots[row * k + j] != pair[j].number || scores[row * k + j] != pair[j].score) {
                fail_msg(
                    "kind %d, %d keys, %d wanted, %s, row %d: expected slot %d (%.9g) at rank %d, "
                    "got slot %d (%.9g)",
                    kind, n_key, k, is_split ? "split" : "whole", row, pair[j].number,
                    (double)pair[j].score, j, slots[row * k + j], (double)scores[row * k + j]);
            }
        }
    }
}

static void test_the_best_are_chosen_whatever_the_scores(void **state)
{
    static const int sizes[][2] = {{512, 32}, {512, 1}, {100, 17}, {33, 32},
                                   {32, 32},  {7, 7},   {1, 1}};
    const int n_size = getenv("TEST_FEW") != NULL ? 2 : (int)(sizeof sizes / sizeof *sizes);
    (void)state;
    for (int i = 0; i < n_size; i++) {
        for (int kind = 0; kind < N_KIND; kind++) {
            check_choice(kind, sizes[i][0], sizes[i][1], true);
            check_choice(kind, sizes[i][0], sizes[i][1], false);
        }
    }
}

enum { FLAT_KEYS_MAX = 70000, FLAT_ROWS_MAX = 6 };

static void check_flat(int kind, int n_key, int k, int n_row)
{
    static const float query[FLAT_ROWS_MAX] = {1, -1, 0, 2, -0.5f, 1};
    static float keys[FLAT_KEYS_MAX];
    static struct choice due[FLAT_KEYS_MAX];
    const struct search_shape shape = {1, n_key, 1, k, false, true, true};
    int32_t slots[FLAT_ROWS_MAX * CHOICE_K];
    float scores[FLAT_ROWS_MAX * CHOICE_K];
    uint32_t random = (uint32_t)(kind * 100 + n_key + k);
    for (int key = 0; key < n_key; key++) {
        keys[key] = key_of(kind, key, &random);
    }
    struct rig r = rig_new(&shape, n_row, keys, query);
    search(&r, &shape, 0, n_row, slots, scores);
    rig_free(&r);
    for (int row = 0; row < n_row; row++) {
        for (int key = 0; key < n_key; key++) {
            due[key] = (struct choice){query[row] * keys[key], key};
        }
        qsort(due, (size_t)n_key, sizeof *due, by_score);
        for (int j = 0; j < k; j++) {
            if (slots[row * k + j] != due[j].number || scores[row * k + j] != due[j].score) {
                fail_msg(
                    "kind %d, %d flat keys, %d wanted, %d rows, row %d: expected slot %d (%.9g) "
                    "at rank %d, got slot %d (%.9g)",
                    kind, n_key, k, n_row, row, due[j].number, (double)due[j].score, j,
                    slots[row * k + j], (double)scores[row * k + j]);
            }
        }
    }
}

/* Parts of 512 keys, the last of which may have fewer than are wanted, and so many that what they
 * chose is merged in several runs. */
static void test_the_best_of_flat_keys_are_chosen(void **state)
{
    static const int sizes[][3] = {{520, 32, 1}, {1030, 17, 6}, {513, 32, 3}, {512, 32, 1},
                                   {33, 32, 6},  {1, 1, 1},     {2048, 1, 3}};
    const bool is_few = getenv("TEST_FEW") != NULL;
    const int n_size = is_few ? 2 : (int)(sizeof sizes / sizeof *sizes);
    (void)state;
    for (int i = 0; i < n_size; i++) {
        for (int kind = 0; kind < N_KIND; kind++) {
            check_flat(kind, sizes[i][0], sizes[i][1], sizes[i][2]);
        }
    }
    for (int n_row = 1; !is_few && n_row <= 4; n_row += 3) {
        check_flat(NEAR, FLAT_KEYS_MAX, CHOICE_K, n_row);
        check_flat(ALL_EQUAL, FLAT_KEYS_MAX, CHOICE_K, n_row);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_row_has_the_same_bits_in_calls_of_every_size),
        cmocka_unit_test(test_the_best_are_chosen_whatever_the_scores),
        cmocka_unit_test(test_the_best_of_flat_keys_are_chosen),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
