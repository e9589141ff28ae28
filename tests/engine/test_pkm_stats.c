/* Memory statistics against values computed by hand from the definitions. */
#include "engine/engine.h"
#include "engine/pkm_stats.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

static void assert_near(double got, double expected)
{
    if (!(fabs(got - expected) < 1e-12)) {
        fail_msg("expected %.15g, got %.15g", expected, got);
    }
}

/* Four slots; by weight z = 0, 0.25, 0.25, 0.5; by count z = 0, 0.5, 0.25, 0.25. */
static void four_slots_by_hand(void **state)
{
    (void)state;
    double weight[] = {0, 0.5, 0.5, 1};
    uint32_t count[] = {0, 2, 1, 1};
    const struct pkm_trace trace = {.lookups = 4, .weight = weight, .count = count};
    struct pkm_stats stats;
    assert_int_equal(pkm_stats_of(&trace, 4, &stats, NULL), ERR_OK);
    assert_int_equal(stats.lookups, 4);
    assert_near(stats.used, 0.75);
    const double kl = log(4) + 2 * 0.25 * log(0.25) + 0.5 * log(0.5);
    assert_near(stats.kl_w, kl);
    assert_near(stats.kl_u, kl);
    /* Cumulative sums of ascending z: 0, .25, .5, 1: mean 0.4375. */
    assert_near(stats.gini_w, 1 - 2 * 0.4375);
    assert_near(stats.gini_u, 1 - 2 * 0.4375);
    assert_int_equal(stats.top50_w, 2); /* first index reaching 0.5 is 2 */
    assert_int_equal(stats.top90_w, 3); /* reaching 0.1: 1 */
    assert_int_equal(stats.top99_w, 3);
    assert_int_equal(stats.top50_u, 2);
    assert_int_equal(stats.top90_u, 3);
    assert_int_equal(stats.top99_u, 3);
}

static void uniform_use_has_no_distance(void **state)
{
    (void)state;
    double weight[8];
    uint32_t count[8];
    for (int i = 0; i < 8; i++) {
        weight[i] = 0.125;
        count[i] = 3;
    }
    const struct pkm_trace trace = {.weight = weight, .count = count};
    struct pkm_stats stats;
    assert_int_equal(pkm_stats_of(&trace, 8, &stats, NULL), ERR_OK);
    assert_near(stats.used, 1);
    assert_near(stats.kl_w, 0);
    assert_near(stats.kl_u, 0);
    /* Sums 1/8 .. 8/8, mean 4.5/8. */
    assert_near(stats.gini_w, 1 - 2 * 4.5 / 8);
    assert_int_equal(stats.top50_w, 5); /* 4/8 is reached at index 3 */
    assert_int_equal(stats.top99_w, 8);
}

static void one_slot_alone_is_log_s_away(void **state)
{
    (void)state;
    double weight[16] = {[5] = 0.3};
    uint32_t count[16] = {[5] = 7};
    const struct pkm_trace trace = {.weight = weight, .count = count};
    struct pkm_stats stats;
    assert_int_equal(pkm_stats_of(&trace, 16, &stats, NULL), ERR_OK);
    assert_near(stats.used, 1.0 / 16);
    assert_near(stats.kl_w, log(16));
    assert_int_equal(stats.top50_w, 1);
    assert_int_equal(stats.top99_u, 1);
}

static void nothing_looked_up_is_undefined(void **state)
{
    (void)state;
    double weight[4] = {0};
    uint32_t count[4] = {0};
    const struct pkm_trace trace = {.weight = weight, .count = count};
    struct pkm_stats stats;
    assert_int_equal(pkm_stats_of(&trace, 4, &stats, NULL), ERR_OK);
    assert_near(stats.used, 0);
    assert_true(isnan(stats.kl_w) && isnan(stats.kl_u) && isnan(stats.gini_w));
    assert_int_equal(stats.top50_w, 0);
}

/* Shares of both signs are no distribution; accesses are one, also those of weight 0. */
static void signed_weights_are_undefined(void **state)
{
    (void)state;
    double weight[4] = {0.5, -0.25, 0, 0.75};
    uint32_t count[4] = {1, 1, 2, 0};
    const struct pkm_trace trace = {.weight = weight, .count = count};
    struct pkm_stats stats;
    assert_int_equal(pkm_stats_of(&trace, 4, &stats, NULL), ERR_OK);
    assert_near(stats.used, 0.75);
    assert_true(isnan(stats.kl_w) && isnan(stats.gini_w));
    assert_int_equal(stats.top50_w, -1);
    assert_int_equal(stats.top99_w, -1);
    assert_near(stats.kl_u, log(4) + 2 * 0.25 * log(0.25) + 0.5 * log(0.5));
    assert_int_equal(stats.top99_u, 3);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(four_slots_by_hand),
        cmocka_unit_test(uniform_use_has_no_distance),
        cmocka_unit_test(one_slot_alone_is_log_s_away),
        cmocka_unit_test(nothing_looked_up_is_undefined),
        cmocka_unit_test(signed_weights_are_undefined),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
