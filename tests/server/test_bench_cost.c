/* What a step must read at least, counted by hand for a small model with two memories. */
#include "server/cli/bench_cost.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

enum { D = 8, FF = 16, N_KEY = 4, N_SLOT = N_KEY * N_KEY, N_HEAD = 2, K_TOP = 3, D_KEY = 4 };

/* One layer with a memory in it and one after it. n_table: 2, or 1 that both read. */
static struct model_info two_memories(int n_table)
{
    struct model_info info = {.n_vocab = 10,
                              .d_model = D,
                              .d_attention = D,
                              .n_layer = 1,
                              .n_head = 2,
                              .n_kv_head = 2,
                              .d_ff = FF,
                              .n_memory = 2,
                              .value_dtype = DTYPE_F32,
                              .dtype = DTYPE_F32,
                              .n_param_values = (int64_t)n_table * N_SLOT * D,
                              .value_bytes = (size_t)n_table * N_SLOT * D * sizeof(float)};
    for (int m = 0; m < info.n_memory; m++) {
        info.memory[m] = (struct pkm_info){.place = m == 1 ? MEMORY_AFTER : MEMORY_IN,
                                           .shape = {.kind = PKM_PRODUCT,
                                                     .n_head = N_HEAD,
                                                     .k_top = K_TOP,
                                                     .n_key = N_KEY,
                                                     .d_key = D_KEY},
                                           .n_slot = N_SLOT,
                                           .d_value = D};
    }
    return info;
}

static double bytes_of(const struct model_info *info)
{
    const struct bench_shape shape = {.n_tok = 5, .n_out = 1, .n_seq = 5, .mean_pos = 7};
    return bench_cost_of(info, &shape).bytes;
}

static void assert_bytes(double got, double expected)
{
    if (!(fabs(got - expected) < 0.5)) {
        fail_msg("expected %.0f bytes, got %.0f", expected, got);
    }
}

static const double WEIGHTS = 4 * D * D                    /* attention; the FFN is replaced */
                              + 2 * D * N_HEAD * D_KEY     /* query networks */
                              + 2 * N_HEAD * N_KEY * D_KEY /* keys */
                              + 10 * D;                    /* vocabulary */
static const double ROWS = 5 * (2 * D /* embeddings */ + 7 * 2 * D /* cache */);
static const double GATHERED = 5 * 2 * N_HEAD * K_TOP * D;

static void a_row_reads_its_values_in_every_memory(void **state)
{
    (void)state;
    const struct model_info info = two_memories(2);
    assert_bytes(bytes_of(&info), 4 * (WEIGHTS + ROWS + GATHERED));
}

static void a_table_that_two_memories_read_is_read_twice(void **state)
{
    (void)state;
    const struct model_info info = two_memories(1);
    assert_bytes(bytes_of(&info), 4 * (WEIGHTS + ROWS + GATHERED));
}

static void values_have_the_bytes_of_their_tables(void **state)
{
    (void)state;
    struct model_info info = two_memories(1);
    info.value_bytes /= 2; /* resident in BF16 */
    assert_bytes(bytes_of(&info), 4 * (WEIGHTS + ROWS) + 2 * GATHERED);
    info.value_bytes = 0; /* read in place: the file's type */
    assert_bytes(bytes_of(&info), 4 * (WEIGHTS + ROWS + GATHERED));
    info.value_dtype = DTYPE_BF16;
    assert_bytes(bytes_of(&info), 4 * (WEIGHTS + ROWS) + 2 * GATHERED);
}

static void the_cache_has_the_bytes_of_its_dtype(void **state)
{
    (void)state;
    struct model_info info = two_memories(2);
    info.cache_dtype = DTYPE_BF16;
    assert_bytes(bytes_of(&info), 4 * (WEIGHTS + ROWS + GATHERED) - 2 * 5 * 7 * 2 * D);
}

/* Two layers with windows of 2 and 3 positions, and 5 persistent keys and values each. */
static void a_window_bounds_what_a_row_attends_to(void **state)
{
    (void)state;
    const struct model_info info = {.n_vocab = 10,
                                    .d_model = D,
                                    .d_attention = D,
                                    .n_layer = 2,
                                    .n_head = 2,
                                    .n_kv_head = 2,
                                    .window = 3,
                                    .window_sum = 2 + 3,
                                    .n_persistent = 5,
                                    .dtype = DTYPE_F32};
    const double weights = 2 * 4 * D * D + 10 * D + 2 * 5 * 2 * D;
    assert_bytes(bytes_of(&info), 4 * (weights + 5 * (2 * D + (2 + 3) * 2 * D)));
    const struct bench_shape shape = {.n_tok = 1, .n_out = 1, .n_seq = 1, .mean_pos = 1};
    const struct bench_cost early = bench_cost_of(&info, &shape); /* one position in each layer */
    assert_bytes(early.bytes, 4 * (weights + 2 * D + 2 * 2 * D));
    assert_true(fabs(early.flops - 2 * (2 * 4 * D * D + 10 * D + (2 + 2 * 5) * 2 * D)) < 0.5);
}

/* A gated network and grouped queries; a memory's gates and projection; experts in 4 bits. */
static void what_other_families_add_is_counted(void **state)
{
    (void)state;
    enum { D_VALUE = 6, HIDDEN = 5, NET = 7 };
    struct model_info info = two_memories(1);
    info.gated = true;
    info.n_kv_head = 1;
    info.value_bytes = 0;
    info.value_dtype = DTYPE_Q4;
    info.memory[0].query = QUERY_PER_HALF;
    info.memory[0].n_hidden = 1;
    info.memory[0].hidden[0] = NET;
    info.memory[0].value_gate = info.memory[0].value_projection = true;
    info.memory[0].output_gate = OUTPUT_GATE_MLP;
    info.memory[0].gate_hidden = HIDDEN;
    info.memory[0].d_value = D_VALUE;
    info.memory[1].output_gate = OUTPUT_GATE_LINEAR;
    info.memory[1].experts = true;
    const double matrices = 3 * D * D /* keys and values of half the width */
                            + 2 * D * D_VALUE + (D + 1) * HIDDEN /* of the first memory */
                            + D; /* of the second; the FFN stays replaced */
    const double search = 2 * N_HEAD * D * NET + NET * N_HEAD * D_KEY + D * N_HEAD * D_KEY +
                          2 * N_HEAD * N_KEY * D_KEY;
    const double rows = 5 * (2 * D + 7 * D);
    const double gathered = 5 * N_HEAD * K_TOP * (D_VALUE + 2 * D);
    assert_bytes(bytes_of(&info), 4 * (matrices + search + 10 * D + rows) + gathered / 2);
    info.memory[0].place = MEMORY_AFTER; /* none replaces the layer's network */
    info.memory[1].output_gate = OUTPUT_GATE_SCALAR;
    assert_bytes(bytes_of(&info),
                 4 * (matrices + (double)(3 * D * FF - D) + search + 10 * D + rows) + gathered / 2);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_row_reads_its_values_in_every_memory),
        cmocka_unit_test(a_table_that_two_memories_read_is_read_twice),
        cmocka_unit_test(values_have_the_bytes_of_their_tables),
        cmocka_unit_test(the_cache_has_the_bytes_of_its_dtype),
        cmocka_unit_test(a_window_bounds_what_a_row_attends_to),
        cmocka_unit_test(what_other_families_add_is_counted),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
