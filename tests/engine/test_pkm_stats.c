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

/* Of few look-ups, whose statistics cost nothing for the slots without one; and of many. */
static void look_ups_have_the_bits_of_their_sums(void **state)
{
    (void)state;
    enum { N_SLOT = 500, N_LOOKUP = 1200 };
    static int32_t slots[N_LOOKUP];
    static float weights[N_LOOKUP];
    uint32_t random = 1;
    for (int i = 0; i < N_LOOKUP; i++) {
        random = random * 1664525 + 1013904223;
        slots[i] = (int32_t)((random >> 8) % 97 * ((random >> 16) % 6) % N_SLOT);
        weights[i] = i % 7 == 0 ? 0 : (float)(random >> 8) / (1 << 24);
    }
    static const int64_t lookups[] = {0, 1, 2, 50, N_SLOT - 1, N_SLOT, N_LOOKUP};
    for (size_t k = 0; k < sizeof lookups / sizeof *lookups; k++) {
        double weight[N_SLOT] = {0};
        uint32_t count[N_SLOT] = {0};
        for (int64_t i = 0; i < lookups[k]; i++) {
            weight[slots[i]] += (double)weights[i];
            count[slots[i]]++;
        }
        const struct pkm_trace sums = {.lookups = lookups[k], .weight = weight, .count = count};
        const struct pkm_trace each = {.lookups = lookups[k], .slots = slots, .weights = weights};
        struct pkm_stats expected;
        struct pkm_stats got;
        assert_int_equal(pkm_stats_of(&sums, N_SLOT, &expected, NULL), ERR_OK);
        assert_int_equal(pkm_stats_of(&each, N_SLOT, &got, NULL), ERR_OK);
        assert_memory_equal(&got, &expected, sizeof got);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(four_slots_by_hand),
        cmocka_unit_test(uniform_use_has_no_distance),
        cmocka_unit_test(one_slot_alone_is_log_s_away),
        cmocka_unit_test(nothing_looked_up_is_undefined),
        cmocka_unit_test(signed_weights_are_undefined),
        cmocka_unit_test(look_ups_have_the_bits_of_their_sums),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
