/* Who pays when bodies and answers together take too much memory: server/net/budget.c. */
#include "server/net/budget.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

enum { ALICE = 1, BOB = 2, UNKNOWN = 0 };

static struct budget_share *ended[8];
static int n_ended;

static void end(struct budget_share *share)
{
    ended[n_ended++] = share;
}

static void begin(struct budget *budget, struct budget_share *share, const uint64_t *client, int n)
{
    n_ended = 0;
    budget_open(budget, 100, end);
    for (int i = 0; i < n; i++) {
        budget_join(budget, &share[i], client[i]);
    }
}

static void finish(struct budget *budget, struct budget_share *share, int n)
{
    for (int i = 0; i < n; i++) {
        budget_leave(budget, &share[i]);
    }
    assert_int_equal(budget_used(budget), 0);
    budget_close(budget);
}

static void the_largest_ends_and_nobody_else(void **state)
{
    (void)state;
    struct budget budget;
    struct budget_share share[4];
    begin(&budget, share, (uint64_t[]){UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN}, 4);
    budget_hold(&budget, &share[0], 30);
    budget_hold(&budget, &share[1], 60);
    budget_hold(&budget, &share[2], 10);
    assert_int_equal(n_ended, 0);
    budget_hold(&budget, &share[3], 1);
    assert_int_equal(n_ended, 1);
    assert_ptr_equal(ended[0], &share[1]);
    assert_int_equal(budget_used(&budget), 41);
    budget_hold(&budget, &share[1], 1000); /* it has been told to end and counts no more */
    assert_int_equal(n_ended, 1);
    finish(&budget, share, 4);
}

static void of_equal_shares_the_oldest_ends(void **state)
{
    (void)state;
    struct budget budget;
    struct budget_share share[3];
    begin(&budget, share, (uint64_t[]){UNKNOWN, UNKNOWN, UNKNOWN}, 3);
    for (int i = 0; i < 3; i++) {
        budget_hold(&budget, &share[i], 40);
    }
    assert_int_equal(n_ended, 1);
    assert_ptr_equal(ended[0], &share[0]);
    finish(&budget, share, 3);
}

static void many_small_shares_of_one_client_are_one_large_one(void **state)
{
    (void)state;
    struct budget budget;
    struct budget_share share[5];
    begin(&budget, share, (uint64_t[]){BOB, ALICE, ALICE, ALICE, UNKNOWN}, 5);
    budget_hold(&budget, &share[0], 40); /* Bob's is the largest, but Alice holds more */
    budget_hold(&budget, &share[1], 15);
    budget_hold(&budget, &share[2], 25);
    budget_hold(&budget, &share[3], 15);
    budget_hold(&budget, &share[4], 5);
    assert_int_equal(n_ended, 0);
    budget_hold(&budget, &share[4], 10);
    assert_int_equal(n_ended, 1);
    assert_ptr_equal(ended[0], &share[2]);
    finish(&budget, share, 5);
}

static void what_exceeds_the_bound_alone_ends_itself(void **state)
{
    (void)state;
    struct budget budget;
    struct budget_share share[2];
    begin(&budget, share, (uint64_t[]){ALICE, BOB}, 2);
    budget_hold(&budget, &share[0], 50);
    budget_hold(&budget, &share[1], 101);
    assert_int_equal(n_ended, 1);
    assert_ptr_equal(ended[0], &share[1]);
    assert_int_equal(budget_used(&budget), 50);
    finish(&budget, share, 2);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_largest_ends_and_nobody_else),
        cmocka_unit_test(of_equal_shares_the_oldest_ends),
        cmocka_unit_test(many_small_shares_of_one_client_are_one_large_one),
        cmocka_unit_test(what_exceeds_the_bound_alone_ends_itself),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
