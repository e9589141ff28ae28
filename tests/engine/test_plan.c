/* The scheduling policy as a table: who gets how many rows, whose sequence is admitted next. */
#include "engine/plan.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>

#include <cmocka.h>

/* One row of the table. Sequences are written as letters: d, D = decode (interactive, bulk),
 * i, b = prompt or document of that class wanting the given number of rows, w = one of several
 * windows, interactive. */
struct row_case {
    const char *name;
    int budget;
    const char *seq;
    int64_t left[8];
    int take[8];
    int bulk_max; /* 0 = the budget */
    int group[8];
};

static const struct row_case row_cases[] = {
    {"nothing runs", 8, "", {0}, {0}, 0, {0}},
    {"one prompt takes what it needs", 64, "i", {20}, {20}, 0, {0}},
    {"a long prompt is cut at the budget", 64, "i", {500}, {64}, 0, {0}},
    {"decode rows come first", 4, "iddd", {100, 1, 1, 1}, {1, 1, 1, 1}, 0, {0}},
    {"the rest goes in order of arrival", 16, "dii", {1, 10, 10}, {1, 10, 5}, 0, {0}},
    {"a later prompt waits for an earlier one", 7, "ii", {7, 4}, {7, 0}, 0, {0}},
    {"but the shortest gets an eighth", 64, "iii", {500, 400, 5}, {56, 3, 5}, 0, {0}},
    {"which may not be enough for it", 64, "iii", {500, 100, 20}, {56, 0, 8}, 0, {0}},
    {"or for more than one", 64, "iiii", {500, 3, 400, 4}, {56, 3, 1, 4}, 0, {0}},
    {"among bulk sequences too", 64, "ibb", {32, 500, 3}, {32, 29, 3}, 0, {0}},
    {"no window overtakes another", 64, "www", {500, 400, 5}, {64, 0, 0}, 0, {0}},
    {"nor a prompt before it", 64, "iw", {500, 5}, {64, 0}, 0, {0}},
    {"but a prompt may pass windows", 64, "wwi", {500, 400, 5}, {59, 0, 5}, 0, {0}},
    {"bulk comes after interactive", 64, "bi", {30, 40}, {24, 40}, 0, {0}},
    {"bulk is never shut out: an eighth", 64, "ib", {500, 500}, {56, 8}, 0, {0}},
    {"an eighth of what decode left", 64, "diDb", {1, 500, 1, 500}, {1, 55, 1, 7}, 0, {0}},
    {"at least one row", 4, "ib", {500, 500}, {3, 1}, 0, {0}},
    {"no more than bulk can use", 64, "ib", {500, 3}, {61, 3}, 0, {0}},
    {"bulk alone takes all", 64, "bb", {60, 60}, {60, 4}, 0, {0}},
    {"bulk sequences share in order", 64, "ibb", {500, 5, 9}, {56, 5, 3}, 0, {0}},
    {"what interactive does not use goes to bulk", 64, "ib", {10, 500}, {10, 54}, 0, {0}},
    {"a decoding bulk sequence is served like any other", 2, "dD", {1, 1}, {1, 1}, 0, {0}},
    {"bulk keeps to its limit", 64, "db", {1, 500}, {1, 20}, 20, {0}},
    {"also alone", 64, "bb", {15, 500}, {15, 5}, 20, {0}},
    {"its eighth keeps to it too", 64, "ib", {500, 500}, {60, 4}, 4, {0}},
    {"the limit is not for interactive prompts", 64, "ib", {30, 500}, {30, 20}, 20, {0}},
    {"a client's second prompt waits for the first of others",
     64,
     "iiii",
     {40, 40, 40, 30},
     {40, 0, 0, 24},
     0,
     {0, 0, 0, 3}},
    {"thirds come after all seconds",
     96,
     "iiiiii",
     {20, 20, 20, 20, 20, 20},
     {20, 20, 20, 20, 16, 0},
     0,
     {1, 1, 2, 2, 2, 1}},
    {"windows of a client do not hold up those of another",
     64,
     "wwww",
     {40, 40, 30, 40},
     {40, 0, 24, 0},
     0,
     {2, 2, 1, 1}},
    {"what all can have, all have", 64, "iii", {20, 20, 20}, {20, 20, 20}, 0, {0, 0, 1}},
};

static void shares_the_rows_of_a_step(void **state)
{
    (void)state;
    for (size_t c = 0; c < sizeof row_cases / sizeof row_cases[0]; c++) {
        const struct row_case *const row = &row_cases[c];
        struct plan_sequence seq[8];
        int n = 0;
        for (; row->seq[n] != '\0'; n++) {
            const char u = row->seq[n];
            seq[n] = (struct plan_sequence){
                .priority = u == 'D' || u == 'b' ? PRIORITY_BULK : PRIORITY_INTERACTIVE,
                .decode = u == 'd' || u == 'D',
                .ordered = u == 'w',
                .group = row->group[n],
                .n_left = row->left[n],
                .n_take = -1,
            };
        }
        plan_rows(seq, n, row->budget, row->budget,
                  row->bulk_max > 0 ? row->bulk_max : row->budget);
        for (int i = 0; i < n; i++) {
            if (seq[i].n_take != row->take[i]) {
                fail_msg("%s: sequence %d: expected %d rows, got %d", row->name, i, row->take[i],
                         seq[i].n_take);
            }
        }
    }
}

/* Steps that cost a millisecond per row, and 10 for what else is in them. */
static void learns_how_many_rows_fit_the_time(void **state)
{
    (void)state;
    struct plan_limit bulk = {.rows = 512};
    for (int i = 0; i < 50; i++) {
        const int n = (int)bulk.rows;
        plan_adapt(&bulk, n, 10 + n, 50, PLAN_BULK_MIN, 512);
    }
    assert_true(bulk.rows >= 28 && bulk.rows <= 51);
    plan_adapt(&bulk, 3, 13, 50, PLAN_BULK_MIN, 512); /* too few to learn from */
    assert_true(bulk.rows <= 51);
    for (int i = 0; i < 50; i++) { /* nothing fits: a little goes on all the same */
        plan_adapt(&bulk, (int)bulk.rows, 900, 50, PLAN_BULK_MIN, 512);
    }
    assert_int_equal((int)bulk.rows, PLAN_BULK_MIN);
    for (int i = 0; i < 50; i++) { /* a fast machine: all of the budget, and no more */
        plan_adapt(&bulk, (int)bulk.rows, 2, 50, PLAN_BULK_MIN, 512);
    }
    assert_int_equal((int)bulk.rows, 512);
    plan_adapt(&bulk, 4, 900, 50, PLAN_BULK_MIN, 4);
    assert_int_equal((int)bulk.rows, 4); /* a small budget is its own least */
    plan_adapt(&bulk, 512, 9000, 0, PLAN_BULK_MIN, 512);
    assert_int_equal((int)bulk.rows, 512); /* no target */
    plan_adapt(&bulk, 512, 9000, 50, PLAN_PROMPT_MIN, 512);
    assert_int_equal((int)bulk.rows, PLAN_PROMPT_MIN); /* prompts beside others' tokens */
}

struct shared_case {
    const char *name;
    const char *seq; /* d = decode, i = prompt, w = prompt that waits for another sequence */
    int group[4];
    bool expected;
};

static const struct shared_case shared_cases[] = {
    {"a prompt alone makes nobody wait", "i", {0}, false},
    {"nor do prompts of many", "ii", {0, 1}, false},
    {"nor tokens alone", "dd", {0, 1}, false},
    {"a client's own prompt may slow its tokens", "di", {0, 0}, false},
    {"but another's may not", "di", {0, 1}, true},
    {"in whatever order they came", "id", {0, 1}, true},
    {"among a client's own sequences too", "ddi", {0, 1, 0}, true},
    {"who waits takes no rows", "dw", {0, 1}, false},
};

static void knows_whose_tokens_wait_for_prompts(void **state)
{
    (void)state;
    for (size_t c = 0; c < sizeof shared_cases / sizeof shared_cases[0]; c++) {
        const struct shared_case *const row = &shared_cases[c];
        struct plan_sequence seq[4];
        int n = 0;
        for (; row->seq[n] != '\0'; n++) {
            seq[n] = (struct plan_sequence){.decode = row->seq[n] == 'd',
                                            .group = row->group[n],
                                            .n_left = row->seq[n] == 'd'   ? 1
                                                      : row->seq[n] == 'i' ? 500
                                                                           : 0};
        }
        if (plan_is_shared(seq, n) != row->expected) {
            fail_msg("%s: expected %d", row->name, row->expected);
        }
    }
}

static void prompts_keep_to_their_limit(void **state)
{
    (void)state;
    struct plan_sequence seq[] = {{.decode = true, .n_left = 1},
                                  {.n_left = 500, .group = 1},
                                  {.n_left = 500, .group = 2, .priority = PRIORITY_BULK}};
    plan_rows(seq, 3, 512, 64, 512);
    assert_int_equal(seq[0].n_take, 1);
    assert_int_equal(seq[1].n_take, 56);
    assert_int_equal(seq[2].n_take, 8);
}

struct class_case {
    const char *name;
    struct plan_running running;
    int expected;
};

#define NONE (-1)
#define INTER PRIORITY_INTERACTIVE
#define BULK PRIORITY_BULK

static const struct class_case class_cases[] = {
    {"nobody waits", {8, 0, 0, 0, {false, false}, false}, NONE},
    {"no place is free", {8, 5, 3, 0, {true, true}, false}, NONE},
    {"interactive first", {8, 0, 0, 0, {true, true}, false}, INTER},
    {"bulk if alone", {8, 0, 0, 0, {false, true}, false}, BULK},
    {"six in a row: still interactive", {16, 0, 0, 6, {true, true}, false}, INTER},
    {"after seven in a row bulk has a turn", {16, 0, 0, 7, {true, true}, false}, BULK},
    {"in a row counts only while bulk waits", {16, 0, 0, 7, {true, false}, false}, INTER},
    {"bulk leaves a place free", {8, 0, 7, 0, {false, true}, false}, NONE},
    {"that place is for interactive", {8, 0, 7, 0, {true, true}, false}, INTER},
    {"even when bulk would have a turn", {8, 0, 7, 7, {true, true}, false}, INTER},
    {"bulk may use up to seven of eight", {8, 0, 6, 0, {false, true}, false}, BULK},
    {"of two places bulk gets one", {2, 0, 1, 0, {false, true}, false}, NONE},
    {"of one place bulk gets it", {1, 0, 0, 0, {false, true}, false}, BULK},
};

static void chooses_the_class_to_admit(void **state)
{
    (void)state;
    for (size_t c = 0; c < sizeof class_cases / sizeof class_cases[0]; c++) {
        const int got = plan_class(&class_cases[c].running);
        if (got != class_cases[c].expected) {
            fail_msg("%s: expected class %d, got %d", class_cases[c].name, class_cases[c].expected,
                     got);
        }
    }
}

struct take_case {
    const char *name;
    struct plan_running running;
    enum priority priority;
    struct plan_job job; /* running: its own, its client's */
    bool expected;
};

static const struct take_case take_cases[] = {
    {"a tool's request takes all", {8, 7, 0, 0, {0}, false}, INTER, {7, 7, false}, true},
    {"one request leaves a place", {8, 7, 0, 0, {0}, true}, INTER, {7, 7, false}, false},
    {"the last place is for another", {8, 7, 0, 0, {0}, true}, INTER, {0, 0, false}, true},
    {"of the same address too", {8, 7, 0, 0, {0}, true}, INTER, {0, 7, false}, true},
    {"not of the same key", {8, 7, 0, 0, {0}, true}, INTER, {0, 7, true}, false},
    {"no place is free", {8, 8, 0, 0, {0}, true}, INTER, {0, 0, false}, false},
    {"one in eight is left", {32, 28, 0, 0, {0}, true}, INTER, {28, 28, false}, false},
    {"and shared by those who have few", {32, 29, 0, 0, {0}, true}, INTER, {1, 1, false}, true},
    {"so that a third one finds some", {32, 30, 0, 0, {0}, true}, INTER, {2, 2, false}, false},
    {"the only place is not kept", {1, 0, 0, 0, {0}, true}, INTER, {0, 0, true}, true},
    {"what bulk leaves is for interactive", {8, 0, 7, 0, {0}, true}, BULK, {0, 0, false}, false},
    {"bulk leaves a place to bulk", {8, 0, 6, 0, {0}, true}, BULK, {6, 6, false}, false},
    {"which other bulk may take", {8, 0, 6, 0, {0}, true}, BULK, {0, 0, false}, true},
};

static void leaves_places_to_others(void **state)
{
    (void)state;
    for (size_t c = 0; c < sizeof take_cases / sizeof take_cases[0]; c++) {
        const struct take_case *const row = &take_cases[c];
        if (plan_may_take(&row->running, row->priority, &row->job) != row->expected) {
            fail_msg("%s: expected %d", row->name, row->expected);
        }
    }
}

static void the_client_with_the_fewest_goes_first(void **state)
{
    (void)state;
    static const struct plan_job job[] = {
        {0, 0, false}, {1, 1, false}, {0, 2, true}, {1, 2, true}, {2, 2, false}};
    const size_t n = sizeof job / sizeof job[0];
    for (size_t a = 0; a < n; a++) {
        for (size_t b = 0; b < n; b++) { /* the table is in their order */
            assert_int_equal(plan_precedes(&job[a], &job[b]), a < b);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(shares_the_rows_of_a_step),
        cmocka_unit_test(learns_how_many_rows_fit_the_time),
        cmocka_unit_test(knows_whose_tokens_wait_for_prompts),
        cmocka_unit_test(prompts_keep_to_their_limit),
        cmocka_unit_test(chooses_the_class_to_admit),
        cmocka_unit_test(leaves_places_to_others),
        cmocka_unit_test(the_client_with_the_fewest_goes_first),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
