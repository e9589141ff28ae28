/* Random numbers against published vectors; the lists of adjusted tokens against the contract. */
#include "engine/sampling.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static const struct end_ids END = {.n = 2, .id = {1, 60}};

/* The known-answer vectors that the authors of Philox publish for philox4x32 with 10 rounds. */
static void philox_matches_the_published_vectors(void **state)
{
    (void)state;
    static const struct {
        uint32_t counter[4], key[2], expected[4];
    } vectors[] = {
        {{0, 0, 0, 0}, {0, 0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
        {{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff},
         {0xffffffff, 0xffffffff},
         {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
        {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
         {0xa4093822, 0x299f31d0},
         {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
    };
    for (size_t v = 0; v < sizeof vectors / sizeof vectors[0]; v++) {
        uint32_t out[4];
        sampling_philox(vectors[v].counter, vectors[v].key, out);
        assert_memory_equal(out, vectors[v].expected, sizeof out);
    }
}

/* Fixed for ever: seeds that users have noted must give the same texts. */
static void uniform_is_the_documented_function(void **state)
{
    (void)state;
    const double expected = (double)(((uint64_t)0x6627e8d5 << 32 | 0xe169c58d) >> 11) * 0x1p-53;
    assert_true(fabs(sampling_uniform(0, 0, 0, 0) - expected) < 1e-18);
    const uint64_t seed = (uint64_t)0x299f31d0 << 32 | 0xa4093822;
    const int64_t position = (int64_t)((uint64_t)0x05a308d3 << 32 | 0x243f6a88);
    const uint32_t counter[4] = {0x243f6a88, 0x05a308d3, 3, 4};
    const uint32_t key[2] = {0xa4093822, 0x299f31d0};
    uint32_t word[4];
    sampling_philox(counter, key, word);
    const double other = (double)(((uint64_t)word[0] << 32 | word[1]) >> 11) * 0x1p-53;
    assert_true(fabs(sampling_uniform(seed, 3, 4, position) - other) < 1e-18);
}

static void uniform_is_uniform_and_keyed_by_all(void **state)
{
    (void)state;
    double sum = 0;
    for (int i = 0; i < 10000; i++) {
        const double u = sampling_uniform(42, 0, 0, i);
        assert_true(u >= 0 && u < 1);
        sum += u;
    }
    assert_true(fabs(sum / 10000 - 0.5) < 0.02);
    const double base = sampling_uniform(1, 1, 1, 1);
    assert_true(fabs(base - sampling_uniform(2, 1, 1, 1)) > 1e-9);
    assert_true(fabs(base - sampling_uniform(1, 2, 1, 1)) > 1e-9);
    assert_true(fabs(base - sampling_uniform(1, 1, 2, 1)) > 1e-9);
    assert_true(fabs(base - sampling_uniform(1, 1, 1, 2)) > 1e-9);
    assert_true(fabs(base - sampling_uniform((uint64_t)1 << 32 | 1, 1, 1, 1)) > 1e-9);
}

/* ---- lists ---- */

enum { ENTRIES = 64, OUTPUTS = 4 };

/* Just the arrays that sampling_fill writes. */
struct lists {
    struct step step;
    struct sample_params sample[OUTPUTS];
    struct sample_adjust adjust[OUTPUTS * ENTRIES];
    int32_t allow[OUTPUTS * ALLOW_MAX];
};

static void lists_begin(struct lists *lists)
{
    memset(lists, 0, sizeof *lists);
    lists->step.limits.n_adjust_max = OUTPUTS * ENTRIES;
    lists->step.limits.n_allow_max = OUTPUTS * ALLOW_MAX;
    lists->step.sample = lists->sample;
    lists->step.adjust = lists->adjust;
    lists->step.allow = lists->allow;
}

static struct sampling neutral(void)
{
    return (struct sampling){.temperature = 1, .top_p = 1, .repetition = 1, .max_tokens = 10};
}

/* The entry of token in output i's list; NULL if it has none. */
static const struct sample_adjust *find(const struct lists *lists, int i, int32_t token)
{
    const struct sample_params *const p = &lists->sample[i];
    const struct sample_adjust *found = NULL;
    for (int a = p->adjust_first; a < p->adjust_first + p->n_adjust; a++) {
        if (lists->adjust[a].token == token) {
            assert_null(found); /* distinct */
            found = &lists->adjust[a];
        }
    }
    return found;
}

static void assert_entry(const struct lists *lists, int i, int32_t token, int n_prompt,
                         int n_generated, float bias)
{
    const struct sample_adjust *const entry = find(lists, i, token);
    if (entry == NULL) {
        fail_msg("output %d has no entry for token %d", i, token);
        return;
    }
    assert_int_equal(entry->n_prompt, n_prompt);
    assert_int_equal(entry->n_generated, n_generated);
    assert_memory_equal(&entry->bias, &bias, sizeof bias);
}

static const int32_t prompt[] = {1, 20, 21, 20, 22};
static const struct item item = {.n_ids = 5, .prompt_index = 2, .sample_index = 3};
static struct lists lists;

static void neutral_sampling_adjusts_nothing(void **state)
{
    (void)state;
    struct sampling_counts counts;
    const struct sampling sampling = neutral();
    assert_int_equal(sampling_counts_open(&counts, ENTRIES, NULL), ERR_OK);
    sampling_begin(&counts, &sampling, prompt, 5, &END);
    sampling_count(&counts, 30);
    lists_begin(&lists);
    sampling_fill(&counts, &sampling, &item, 1, &lists.step, 0);
    assert_int_equal(lists.sample[0].n_adjust, 0);
    assert_int_equal(lists.sample[0].n_allow, 0);
    assert_true(fabs(lists.sample[0].u - sampling_uniform(0, 2, 3, 6)) < 1e-18);
    sampling_counts_close(&counts);
}

static void repetition_counts_prompt_and_generated(void **state)
{
    (void)state;
    struct sampling_counts counts;
    struct sampling sampling = neutral();
    sampling.repetition = 1.3f;
    assert_int_equal(sampling_counts_open(&counts, ENTRIES, NULL), ERR_OK);
    sampling_begin(&counts, &sampling, prompt, 5, &END);
    sampling_count(&counts, 20);
    sampling_count(&counts, 30);
    sampling_count(&counts, 30);
    lists_begin(&lists);
    sampling_fill(&counts, &sampling, &item, 3, &lists.step, 0);
    assert_int_equal(lists.sample[0].n_adjust, 5);
    assert_entry(&lists, 0, 20, 2, 1, 0);
    assert_entry(&lists, 0, 22, 1, 0, 0);
    assert_entry(&lists, 0, 30, 0, 2, 0);
    sampling_counts_close(&counts);
}

static void presence_and_frequency_count_generated_alone(void **state)
{
    (void)state;
    struct sampling_counts counts;
    struct sampling sampling = neutral();
    sampling.frequency = 0.5f;
    assert_int_equal(sampling_counts_open(&counts, ENTRIES, NULL), ERR_OK);
    sampling_begin(&counts, &sampling, prompt, 5, &END);
    sampling_count(&counts, 20);
    lists_begin(&lists);
    sampling_fill(&counts, &sampling, &item, 1, &lists.step, 0);
    assert_int_equal(lists.sample[0].n_adjust, 1);
    assert_entry(&lists, 0, 20, 0, 1, 0);
    sampling_counts_close(&counts);
}

static void min_tokens_bans_what_would_end_the_text(void **state)
{
    (void)state;
    struct sampling_counts counts;
    struct sampling sampling = neutral();
    sampling.min_tokens = 2;
    sampling.n_stop_id = 2;
    sampling.stop_id[0] = 40;
    sampling.stop_id[1] = 41;
    sampling.n_bias = 2;
    sampling.bias[0].token = 40;
    sampling.bias[0].bias = 2.5f;
    sampling.bias[1].token = 50;
    sampling.bias[1].bias = -3;
    assert_int_equal(sampling_counts_open(&counts, ENTRIES, NULL), ERR_OK);
    sampling_begin(&counts, &sampling, prompt, 5, &END);
    lists_begin(&lists);
    sampling_fill(&counts, &sampling, &item, 1, &lists.step, 0);
    assert_entry(&lists, 0, 1, 0, 0, -INFINITY);
    assert_entry(&lists, 0, 60, 0, 0, -INFINITY);
    assert_entry(&lists, 0, 40, 0, 0, -INFINITY);
    assert_entry(&lists, 0, 41, 0, 0, -INFINITY);
    assert_entry(&lists, 0, 50, 0, 0, -3);
    /* Over: the user's own bias is back. */
    sampling_fill(&counts, &sampling, &item, 2, &lists.step, 1);
    assert_entry(&lists, 1, 1, 0, 0, 0);
    assert_entry(&lists, 1, 60, 0, 0, 0);
    assert_entry(&lists, 1, 40, 0, 0, 2.5f);
    assert_int_equal(lists.sample[1].adjust_first, 5);
    sampling_counts_close(&counts);
}

static void min_tokens_leaves_eos_that_is_ignored(void **state)
{
    (void)state;
    struct sampling_counts counts;
    struct sampling sampling = neutral();
    sampling.min_tokens = 2;
    sampling.ignore_eos = true;
    assert_int_equal(sampling_counts_open(&counts, ENTRIES, NULL), ERR_OK);
    sampling_begin(&counts, &sampling, prompt, 5, &END);
    lists_begin(&lists);
    sampling_fill(&counts, &sampling, &item, 0, &lists.step, 0);
    assert_int_equal(lists.sample[0].n_adjust, 0);
    sampling_counts_close(&counts);
}

static void allow_lists_follow_one_another(void **state)
{
    (void)state;
    struct sampling_counts counts;
    struct sampling sampling = neutral();
    sampling.n_allow = 3;
    memcpy(sampling.allow, (int32_t[]){5, 9, 7}, 3 * sizeof(int32_t));
    assert_int_equal(sampling_counts_open(&counts, ENTRIES, NULL), ERR_OK);
    sampling_begin(&counts, &sampling, prompt, 5, &END);
    lists_begin(&lists);
    sampling_fill(&counts, &sampling, &item, 0, &lists.step, 0);
    sampling_fill(&counts, &sampling, &item, 1, &lists.step, 1);
    assert_int_equal(lists.sample[1].allow_first, 3);
    assert_int_equal(lists.sample[1].n_allow, 3);
    assert_int_equal(lists.step.n_allow, 6);
    assert_memory_equal(lists.allow + 3, sampling.allow, 3 * sizeof(int32_t));
    sampling_counts_close(&counts);
}

/* Against a plain array of counts, with a table as full as it may get, and used again. */
static void counts_survive_collisions_and_reuse(void **state)
{
    (void)state;
    enum { N = 500 };
    struct sampling_counts counts;
    struct sampling sampling = neutral();
    sampling.presence = 1;
    assert_int_equal(sampling_counts_open(&counts, N, NULL), ERR_OK);
    for (int round = 0; round < 3; round++) {
        int expected[N] = {0};
        sampling_begin(&counts, &sampling, prompt, 5, &END);
        unsigned random = 7u + (unsigned)round;
        for (int i = 0; i < 4000; i++) {
            random = random * 1664525u + 1013904223u;
            const int t = (int)(random >> 8) % N;
            expected[t]++;
            sampling_count(&counts, t * 128); /* multiples collide in weak hashes */
        }
        int n_expected = 0;
        for (int t = 0; t < N; t++) {
            n_expected += expected[t] > 0;
        }
        assert_int_equal(counts.n_entry, n_expected);
        for (int e = 0; e < counts.n_entry; e++) {
            assert_int_equal(counts.entry[e].n_generated, expected[counts.entry[e].token / 128]);
        }
    }
    sampling_counts_close(&counts);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(philox_matches_the_published_vectors),
        cmocka_unit_test(uniform_is_the_documented_function),
        cmocka_unit_test(uniform_is_uniform_and_keyed_by_all),
        cmocka_unit_test(neutral_sampling_adjusts_nothing),
        cmocka_unit_test(repetition_counts_prompt_and_generated),
        cmocka_unit_test(presence_and_frequency_count_generated_alone),
        cmocka_unit_test(min_tokens_bans_what_would_end_the_text),
        cmocka_unit_test(min_tokens_leaves_eos_that_is_ignored),
        cmocka_unit_test(allow_lists_follow_one_another),
        cmocka_unit_test(counts_survive_collisions_and_reuse),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
