/* Divergence and perplexity of rows of logits, against values computed by hand. */
#include "server/cli/compare.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

enum { N_VOCAB = 3 };

static double kl[1000];

static struct compare_sums empty(void)
{
    return (struct compare_sums){.kl = kl, .n_max = sizeof kl / sizeof kl[0]};
}

static void assert_near(double got, double expected)
{
    if (!(fabs(got - expected) <= 1e-12 * fmax(1, fabs(expected)))) {
        fail_msg("expected %.17g, got %.17g", expected, got);
    }
}

static void the_divergence_is_the_reference_over_the_model(void **state)
{
    (void)state;
    const float reference[] = {0, 0, -40}; /* 1/2, 1/2, nothing to speak of */
    const float model[] = {1, 0, -40};
    const double e = exp(1);
    struct compare_sums sums = empty();
    assert_true(compare_add(&sums, model, reference, N_VOCAB, 1));
    const struct compare_figures f = compare_figures_of(&sums);
    assert_near(f.kl_mean, log((1 + e) / 2) - 0.5);
    assert_near(f.perplexity, 1 + e);
    assert_near(f.reference_perplexity, 2);
    assert_near(f.worse_percent, 100 * ((1 + e) / 2 - 1));
    assert_true(f.same_best == 1); /* of two equal ones the first */
}

static void equal_rows_differ_by_exactly_nothing(void **state)
{
    (void)state;
    const float row[] = {0.1f, -7.3f, 2.9f};
    struct compare_sums sums = empty();
    assert_true(compare_add(&sums, row, row, N_VOCAB, 0));
    const struct compare_figures f = compare_figures_of(&sums);
    assert_true(f.kl_max == 0 && f.worse_percent == 0 && f.same_best == 1);
}

static void a_constant_that_is_added_changes_nothing(void **state)
{
    (void)state;
    const float reference[] = {1, 2, 4};
    const float model[] = {65, 66, 68};
    struct compare_sums sums = empty();
    assert_true(compare_add(&sums, model, reference, N_VOCAB, 2));
    assert_true(sums.kl[0] == 0 && sums.logprob == sums.reference_logprob);
}

static void what_the_model_rules_out_is_infinitely_far(void **state)
{
    (void)state;
    const float reference[] = {0, 0, -INFINITY};
    const float model[] = {0, -INFINITY, -INFINITY};
    struct compare_sums sums = empty();
    assert_true(compare_add(&sums, reference, model, N_VOCAB, 0)); /* this way round it is not */
    assert_near(sums.kl[0], log(2));
    assert_true(compare_add(&sums, model, reference, N_VOCAB, 1));
    const struct compare_figures f = compare_figures_of(&sums);
    assert_true(isinf(f.kl_mean) && isinf(f.perplexity) && isinf(f.worse_percent));
}

static void what_is_no_distribution_is_told(void **state)
{
    (void)state;
    const float good[] = {1, 2, 3};
    const float bad[][N_VOCAB] = {
        {NAN, 0, 0}, {0, 0, NAN}, {0, INFINITY, 0}, {-INFINITY, -INFINITY, -INFINITY}};
    struct compare_sums sums = empty();
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        assert_false(compare_add(&sums, good, bad[i], N_VOCAB, 0));
        assert_false(compare_add(&sums, bad[i], good, N_VOCAB, 0));
    }
    assert_int_equal(sums.n, 0);
}

static void the_percentile_is_a_position_of_the_text(void **state)
{
    (void)state;
    static const int64_t n[] = {1, 99, 100, 101, 200};
    static const double expected[] = {1, 99, 99, 100, 198};
    for (size_t i = 0; i < sizeof n / sizeof n[0]; i++) {
        struct compare_sums sums = empty();
        sums.n = n[i];
        for (int64_t k = 0; k < n[i]; k++) {
            kl[k] = (double)(n[i] - k);
        }
        const struct compare_figures f = compare_figures_of(&sums);
        assert_near(f.kl_p99, expected[i]);
        assert_near(f.kl_max, (double)n[i]);
        assert_near(f.kl_mean, (double)(n[i] + 1) / 2);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_divergence_is_the_reference_over_the_model),
        cmocka_unit_test(equal_rows_differ_by_exactly_nothing),
        cmocka_unit_test(a_constant_that_is_added_changes_nothing),
        cmocka_unit_test(what_the_model_rules_out_is_infinitely_far),
        cmocka_unit_test(what_is_no_distribution_is_told),
        cmocka_unit_test(the_percentile_is_a_position_of_the_text),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
