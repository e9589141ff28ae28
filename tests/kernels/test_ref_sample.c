/* Sampling by hand: each rule of struct sample_params on logits whose shares are known. */
#include "kernels/ref/ref.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

enum { N_VOCAB = 5 };

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

static const struct sample_params neutral = {.temperature = 1, .top_p = 1, .repetition = 1};

/* One draw from logits with these lists. */
static int32_t draw_with(const float *logits, struct sample_params params,
                         const struct sample_adjust *adjust, int n_adjust, const int32_t *allow,
                         int n_allow)
{
    const struct step_limits limits = {.n_tok_max = 1,
                                       .n_seq_max = 1,
                                       .n_page_max = 1,
                                       .n_out_max = 1,
                                       .n_adjust_max = n_adjust,
                                       .n_allow_max = n_allow,
                                       .n_vocab = N_VOCAB};
    struct step *step = NULL;
    assert_int_equal(be->op->step_new(be, &step, &limits, NULL), ERR_OK);
    step->n_tok = step->n_seq = step->n_out = 1;
    step->seq_first[1] = 1;
    step->out_want[0] = OUT_SAMPLE;
    params.n_adjust = step->n_adjust = n_adjust;
    params.n_allow = step->n_allow = n_allow;
    for (int i = 0; i < n_adjust; i++) {
        step->adjust[i] = adjust[i];
    }
    for (int i = 0; i < n_allow; i++) {
        step->allow[i] = allow[i];
    }
    step->sample[0] = params;
    float row[N_VOCAB];
    memcpy(row, logits, sizeof row);
    be->op->step_begin(be, step);
    op_outputs(be, tensor_make(row, 1, N_VOCAB, DTYPE_F32), step, 0);
    assert_int_equal(be->op->finish(be, step, NULL), ERR_OK);
    assert_memory_equal(row, logits, sizeof row);
    const int32_t token = step->out_token[0];
    be->op->step_free(be, step);
    return token;
}

static int32_t draw(const float *logits, struct sample_params params)
{
    return draw_with(logits, params, NULL, 0, NULL, 0);
}

/* Shares 1, 4, 2, 1, 2 of 10. */
static const float shares_of_ten[N_VOCAB] = {0, 1.38629436f, 0.69314718f, 0, 0.69314718f};

static void test_zero_temperature_takes_the_lowest_best(void **state)
{
    (void)state;
    struct sample_params p = neutral;
    p.temperature = 0;
    p.u = 0.99;
    assert_int_equal(draw((const float[N_VOCAB]){1, 3, 2, 3, 0}, p), 1);
}

/* Without filters the shares lie side by side in id order. */
static void test_plain_draw_goes_by_id(void **state)
{
    (void)state;
    static const struct {
        double u;
        int32_t token;
    } cases[] = {{0, 0},    {0.09, 0}, {0.11, 1}, {0.49, 1},       {0.51, 2},
                 {0.71, 3}, {0.81, 4}, {0.99, 4}, {1 - 0x1p-53, 4}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct sample_params p = neutral;
        p.u = cases[i].u;
        assert_int_equal(draw(shares_of_ten, p), cases[i].token);
    }
}

/* With a filter they lie best first, the smaller id first among equals: 1, 2, 4, 0, 3. */
static void test_filtered_draw_goes_by_rank(void **state)
{
    (void)state;
    static const struct {
        double u;
        int32_t token;
    } cases[] = {{0, 1},    {0.39, 1}, {0.41, 2}, {0.59, 2},
                 {0.61, 4}, {0.81, 0}, {0.91, 3}, {1 - 0x1p-53, 3}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct sample_params p = neutral;
        p.u = cases[i].u;
        p.top_k = N_VOCAB;
        assert_int_equal(draw(shares_of_ten, p), cases[i].token);
    }
}

static void test_top_k_keeps_the_first_k(void **state)
{
    (void)state;
    struct sample_params p = neutral;
    p.top_k = 2; /* shares 4 and 2 of 6 */
    p.u = 0.66;
    assert_int_equal(draw(shares_of_ten, p), 1);
    p.u = 0.67;
    assert_int_equal(draw(shares_of_ten, p), 2);
    p.u = 1 - 0x1p-53;
    assert_int_equal(draw(shares_of_ten, p), 2);
    p.top_k = 1000;
    assert_int_equal(draw(shares_of_ten, p), 3);
}

static void test_top_p_keeps_the_shortest_prefix(void **state)
{
    (void)state;
    struct sample_params p = neutral;
    p.u = 1 - 0x1p-53;
    p.top_p = 0.39f; /* the best alone has more */
    assert_int_equal(draw(shares_of_ten, p), 1);
    p.top_p = 0.41f;
    assert_int_equal(draw(shares_of_ten, p), 2);
    p.top_p = 0.61f;
    assert_int_equal(draw(shares_of_ten, p), 4);
    p.top_p = 1e-9f; /* never fewer than one */
    assert_int_equal(draw(shares_of_ten, p), 1);
}

/* top_p is a share of what top_k kept: 4 of 6, not of 10. */
static void test_top_p_follows_top_k(void **state)
{
    (void)state;
    struct sample_params p = neutral;
    p.u = 1 - 0x1p-53;
    p.top_k = 2;
    p.top_p = 0.65f;
    assert_int_equal(draw(shares_of_ten, p), 1);
    p.top_k = 0;
    assert_int_equal(draw(shares_of_ten, p), 4);
}

static void test_min_p_is_relative_to_the_best(void **state)
{
    (void)state;
    struct sample_params p = neutral;
    p.u = 1 - 0x1p-53;
    p.min_p = 0.49f;
    assert_int_equal(draw(shares_of_ten, p), 4);
    p.min_p = 0.51f;
    assert_int_equal(draw(shares_of_ten, p), 1);
    p.min_p = 0.24f;
    assert_int_equal(draw(shares_of_ten, p), 3);
}

/* The entropy is 1.47 nats: shares of 2 (1.61) are nearest to it, then that of 4 (0.92), then those
 * of 1 (2.30). What is kept stands in the order of ranks. */
static void test_typical_p_keeps_what_is_as_probable_as_expected(void **state)
{
    (void)state;
    static const struct {
        float typical_p;
        int first, last;
    } cases[] = {{0.05f, 2, 4}, {0.3f, 2, 4}, {0.5f, 1, 4}, {0.79f, 1, 4}, {0.9f, 1, 3}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct sample_params p = neutral;
        p.typical_p = cases[i].typical_p;
        p.u = 0;
        assert_int_equal(draw(shares_of_ten, p), cases[i].first);
        p.u = 1 - 0x1p-53;
        assert_int_equal(draw(shares_of_ten, p), cases[i].last);
    }
}

/* Temperature 1/2 squares the shares: 1, 16, 4, 1, 4 of 26. It acts before top_p. */
static void test_temperature_comes_before_top_p(void **state)
{
    (void)state;
    struct sample_params p = neutral;
    p.temperature = 0.5f;
    p.u = 1 - 0x1p-53;
    p.top_p = 0.6f;
    assert_int_equal(draw(shares_of_ten, p), 1);
    p.top_p = 0.63f;
    assert_int_equal(draw(shares_of_ten, p), 2);
}

static void test_tiny_temperature_is_greedy(void **state)
{
    (void)state;
    struct sample_params p = neutral;
    p.temperature = 1e-38f;
    p.u = 0.5;
    assert_int_equal(draw((const float[N_VOCAB]){-30, 80, 90, 89.9f, -90}, p), 2);
}

static void test_repetition_divides_or_multiplies(void **state)
{
    (void)state;
    struct sample_params p = neutral;
    p.temperature = 0;
    p.repetition = 2;
    const struct sample_adjust prompt = {1, 3, 0, 0};
    assert_int_equal(draw_with((const float[N_VOCAB]){0, 4, 2.1f, 0, 0}, p, &prompt, 1, NULL, 0),
                     2);
    assert_int_equal(draw_with((const float[N_VOCAB]){0, 4, 1.9f, 0, 0}, p, &prompt, 1, NULL, 0),
                     1);
    /* below 0 it multiplies: -1 becomes -2 */
    assert_int_equal(
        draw_with((const float[N_VOCAB]){-9, -1, -1.5f, -9, -9}, p, &prompt, 1, NULL, 0), 2);
}

/* Presence and frequency count what was generated, not the prompt. */
static void test_presence_and_frequency(void **state)
{
    (void)state;
    struct sample_params p = neutral;
    const float logits[N_VOCAB] = {0, 4, 2.5f, 0, 0};
    p.temperature = 0;
    p.presence = 1;
    p.frequency = 0.25f;
    const struct sample_adjust prompt = {1, 9, 0, 0};
    assert_int_equal(draw_with(logits, p, &prompt, 1, NULL, 0), 1);
    const struct sample_adjust once = {1, 0, 1, 0}; /* 4 - 1 - 0.25 */
    assert_int_equal(draw_with(logits, p, &once, 1, NULL, 0), 1);
    const struct sample_adjust thrice = {1, 0, 3, 0}; /* 4 - 1 - 0.75 */
    assert_int_equal(draw_with(logits, p, &thrice, 1, NULL, 0), 2);
}

/* repetition, then presence, then bias: (4/2 - 1) + 2 = 3, not (4+2-1)/2. */
static void test_order_of_adjustments(void **state)
{
    (void)state;
    struct sample_params p = neutral;
    p.temperature = 0;
    p.repetition = 2;
    p.presence = 1;
    const struct sample_adjust adjust = {1, 0, 1, 2};
    assert_int_equal(draw_with((const float[N_VOCAB]){0, 4, 2.9f, 0, 0}, p, &adjust, 1, NULL, 0),
                     1);
    assert_int_equal(draw_with((const float[N_VOCAB]){0, 4, 3.1f, 0, 0}, p, &adjust, 1, NULL, 0),
                     2);
}

static void test_banned_token_is_never_drawn(void **state)
{
    (void)state;
    struct sample_params p = neutral;
    const struct sample_adjust ban = {1, 0, 0, -INFINITY};
    for (int i = 0; i < 100; i++) {
        p.u = i / 100.0;
        p.top_k = i % 2 * 5;
        assert_int_not_equal(draw_with(shares_of_ten, p, &ban, 1, NULL, 0), 1);
    }
}

static void test_allow_list_keeps_its_tokens(void **state)
{
    (void)state;
    struct sample_params p = neutral;
    const int32_t allow[3] = {4, 2, 4}; /* any order; twice is once: shares 2 and 2 */
    p.u = 0.49;
    assert_int_equal(draw_with(shares_of_ten, p, NULL, 0, allow, 3), 2);
    p.u = 0.51;
    assert_int_equal(draw_with(shares_of_ten, p, NULL, 0, allow, 3), 4);
    p.temperature = 0;
    assert_int_equal(draw_with(shares_of_ten, p, NULL, 0, allow, 3), 2);
}

/* A bias does not bring a token back that is not allowed. */
static void test_bias_does_not_allow(void **state)
{
    (void)state;
    struct sample_params p = neutral;
    const struct sample_adjust bias = {1, 0, 0, 100};
    const int32_t allow = 3;
    p.u = 0.5;
    assert_int_equal(draw_with(shares_of_ten, p, &bias, 1, &allow, 1), 3);
}

static void test_nothing_left_takes_the_lowest_allowed(void **state)
{
    (void)state;
    struct sample_params p = neutral;
    const float nothing[N_VOCAB] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY, -INFINITY};
    const int32_t allow[2] = {4, 3};
    p.u = 0.7;
    assert_int_equal(draw(nothing, p), 0);
    assert_int_equal(draw_with(nothing, p, NULL, 0, allow, 2), 3);
    p.temperature = 0;
    assert_int_equal(draw_with(nothing, p, NULL, 0, allow, 2), 3);
}

/* Tokens at -infinity are not drawn, whatever u is and wherever they stand. */
static void test_minus_infinity_has_no_share(void **state)
{
    (void)state;
    const float logits[N_VOCAB] = {-INFINITY, 1, -INFINITY, 1, -INFINITY};
    static const double us[] = {0, 0.49, 0.51, 1 - 0x1p-53};
    for (int i = 0; i < 4; i++) {
        struct sample_params p = neutral;
        p.u = us[i];
        assert_int_equal(draw(logits, p), us[i] < 0.5 ? 1 : 3);
        p.top_k = 4;
        assert_int_equal(draw(logits, p), us[i] < 0.5 ? 1 : 3);
        p.top_k = 0;
        p.top_p = 0.999f;
        assert_int_equal(draw(logits, p), us[i] < 0.5 ? 1 : 3);
    }
}

static void test_broken_logit_is_pointed_at(void **state)
{
    (void)state;
    struct sample_params p = neutral;
    p.u = 0.5;
    assert_int_equal(draw((const float[N_VOCAB]){1, 2, NAN, 3, NAN}, p), 2);
    p.temperature = 0;
    assert_int_equal(draw((const float[N_VOCAB]){1, 2, 0, INFINITY, NAN}, p), 3);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_zero_temperature_takes_the_lowest_best),
        cmocka_unit_test(test_plain_draw_goes_by_id),
        cmocka_unit_test(test_filtered_draw_goes_by_rank),
        cmocka_unit_test(test_top_k_keeps_the_first_k),
        cmocka_unit_test(test_top_p_keeps_the_shortest_prefix),
        cmocka_unit_test(test_top_p_follows_top_k),
        cmocka_unit_test(test_min_p_is_relative_to_the_best),
        cmocka_unit_test(test_typical_p_keeps_what_is_as_probable_as_expected),
        cmocka_unit_test(test_temperature_comes_before_top_p),
        cmocka_unit_test(test_tiny_temperature_is_greedy),
        cmocka_unit_test(test_repetition_divides_or_multiplies),
        cmocka_unit_test(test_presence_and_frequency),
        cmocka_unit_test(test_order_of_adjustments),
        cmocka_unit_test(test_banned_token_is_never_drawn),
        cmocka_unit_test(test_allow_list_keeps_its_tokens),
        cmocka_unit_test(test_bias_does_not_allow),
        cmocka_unit_test(test_nothing_left_takes_the_lowest_allowed),
        cmocka_unit_test(test_minus_infinity_has_no_share),
        cmocka_unit_test(test_broken_logit_is_pointed_at),
    };
    return cmocka_run_group_tests(tests, group_open, group_close);
}
