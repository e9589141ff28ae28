/* The free list of cache pages: all or none, no page twice, nothing lost. */
#include "engine/kvpages.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

static void positions_round_up_to_pages(void **state)
{
    (void)state;
    assert_int_equal(kvpages_for(0), 0);
    assert_int_equal(kvpages_for(1), 1);
    assert_int_equal(kvpages_for(16), 1);
    assert_int_equal(kvpages_for(17), 2);
    assert_int_equal(kvpages_for(512), 32);
}

static void takes_all_or_none(void **state)
{
    (void)state;
    struct kvpages pages;
    int32_t page[8];
    assert_int_equal(kvpages_open(&pages, 5, NULL), ERR_OK);
    assert_true(kvpages_take(&pages, 3, page));
    assert_int_equal(pages.n_free, 2);
    assert_false(kvpages_take(&pages, 3, page + 3));
    assert_int_equal(pages.n_free, 2);
    assert_true(kvpages_take(&pages, 2, page + 3));
    assert_true(kvpages_take(&pages, 0, page));
    kvpages_give(&pages, 3, page);
    assert_int_equal(pages.n_free, 3);
    kvpages_close(&pages);
    kvpages_close(&pages);
}

static void never_hands_a_page_out_twice(void **state)
{
    (void)state;
    enum { N = 64 };
    struct kvpages pages;
    assert_int_equal(kvpages_open(&pages, N, NULL), ERR_OK);
    int32_t held[8][N];
    int n_held[8] = {0};
    unsigned random = 1;
    for (int turn = 0; turn < 2000; turn++) {
        random = random * 1664525u + 1013904223u;
        const int s = (int)(random >> 29);
        if (n_held[s] > 0) {
            kvpages_give(&pages, n_held[s], held[s]);
            n_held[s] = 0;
        } else {
            const int want = (int)(random >> 8 & 15);
            n_held[s] = kvpages_take(&pages, want, held[s]) ? want : 0;
        }
        int total = 0;
        bool seen[N] = {false};
        for (int i = 0; i < 8; i++) {
            for (int j = 0; j < n_held[i]; j++) {
                assert_false(seen[held[i][j]]);
                seen[held[i][j]] = true;
            }
            total += n_held[i];
        }
        assert_int_equal(total + pages.n_free, N);
    }
    kvpages_close(&pages);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(positions_round_up_to_pages),
        cmocka_unit_test(takes_all_or_none),
        cmocka_unit_test(never_hands_a_page_out_twice),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
