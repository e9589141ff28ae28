/* The pages of the cache: all or none, no page twice, nothing lost; and no page for a text that it
 * does not hold, whatever was taken, kept, claimed and given back before. */
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

static struct kvpages open_pages(int n_page)
{
    struct kvpages pages;
    assert_int_equal(kvpages_open(&pages, n_page, true, NULL), ERR_OK);
    return pages;
}

static void takes_all_or_none(void **state)
{
    (void)state;
    struct kvpages pages = open_pages(5);
    int32_t page[8];
    assert_true(kvpages_take(&pages, 3, page));
    assert_int_equal(kvpages_n_held(&pages), 3);
    assert_false(kvpages_take(&pages, 3, page + 3));
    assert_int_equal(kvpages_n_held(&pages), 3);
    assert_true(kvpages_take(&pages, 2, page + 3));
    assert_true(kvpages_take(&pages, 0, page));
    kvpages_give(&pages, 3, page);
    assert_int_equal(kvpages_n_held(&pages), 2);
    kvpages_close(&pages);
    kvpages_close(&pages);
}

static struct kvpages_key key_of(int32_t before, int lang, int salt)
{
    struct kvpages_key key = {.before = before, .lang = lang};
    for (int i = 0; i < KV_PAGE; i++) {
        key.ids[i] = salt * 100 + i;
    }
    return key;
}

/* Takes a page after before and keeps it. */
static int32_t keep_new(struct kvpages *pages, int32_t before, int salt)
{
    int32_t page = -1;
    const struct kvpages_key key = key_of(before, 0, salt);
    assert_true(kvpages_take(pages, 1, &page));
    return kvpages_keep(pages, &key, page, 0);
}

static int32_t use(struct kvpages *pages, int32_t before, int lang, int salt)
{
    const struct kvpages_key key = key_of(before, lang, salt);
    return kvpages_use(pages, &key);
}

/* In one bucket all keys collide: what is told apart here is told apart by comparing. */
static void equal_hashes_do_not_make_pages_equal(void **state)
{
    (void)state;
    struct kvpages pages = open_pages(8);
    pages.mask = 0;
    const int32_t a = keep_new(&pages, -1, 1);
    const int32_t b = keep_new(&pages, a, 2);
    const int32_t c = keep_new(&pages, -1, 2);
    assert_int_equal(use(&pages, -1, 0, 1), a);
    assert_int_equal(use(&pages, a, 0, 2), b);
    assert_int_equal(use(&pages, -1, 0, 2), c); /* the same tokens at another place */
    assert_int_equal(use(&pages, c, 0, 2), -1);
    assert_int_equal(use(&pages, -1, 1, 1), -1); /* another language */
    struct kvpages_key key = key_of(-1, 0, 1);
    for (int i = 0; i < KV_PAGE; i++) { /* one token differs */
        key.ids[i]++;
        assert_int_equal(kvpages_use(&pages, &key), -1);
        key.ids[i]--;
    }
    assert_int_equal(kvpages_use(&pages, &key), a);
    kvpages_close(&pages);
}

static void idle_pages_go_oldest_and_leaves_first(void **state)
{
    (void)state;
    struct kvpages pages = open_pages(5);
    int32_t old[2];
    int32_t late[2];
    old[0] = keep_new(&pages, -1, 1);
    old[1] = keep_new(&pages, old[0], 2);
    late[0] = keep_new(&pages, -1, 3);
    late[1] = keep_new(&pages, late[0], 4);
    kvpages_give(&pages, 2, old);
    kvpages_give(&pages, 2, late);
    assert_int_equal(kvpages_n_held(&pages), 0);
    assert_int_equal(pages.n_idle, 4);
    int32_t taken[5];
    assert_true(kvpages_take(&pages, 2, taken)); /* the free one, then a leaf */
    assert_int_equal(taken[1], old[1]);
    assert_int_equal(use(&pages, -1, 0, 1), old[0]); /* the root is there, and in use again */
    assert_int_equal(use(&pages, old[0], 0, 2), -1);
    assert_true(kvpages_take(&pages, 1, taken + 2));
    assert_int_equal(taken[2], late[1]);
    kvpages_give(&pages, 1, old);
    assert_true(kvpages_take(&pages, 2, taken + 3)); /* late's root is the older one now */
    assert_int_equal(taken[3], late[0]);
    assert_int_equal(taken[4], old[0]);
    assert_int_equal(pages.n_finished, 0);
    assert_false(kvpages_take(&pages, 1, taken));
    kvpages_close(&pages);
}

static void twins_become_one(void **state)
{
    (void)state;
    struct kvpages pages = open_pages(4);
    const int32_t a = keep_new(&pages, -1, 1);
    assert_int_equal(keep_new(&pages, -1, 1), a);
    assert_int_equal(kvpages_n_held(&pages), 1); /* held twice */
    kvpages_give(&pages, 1, &a);
    assert_int_equal(kvpages_n_held(&pages), 1);
    kvpages_give(&pages, 1, &a);
    assert_int_equal(kvpages_n_held(&pages), 0);
    assert_int_equal(use(&pages, -1, 0, 1), a);
    kvpages_close(&pages);
}

static void claims_hold_until_they_are_kept_or_given_back(void **state)
{
    (void)state;
    enum { GOOD, BAD };
    struct kvpages pages = open_pages(4);
    const struct kvpages_key key = key_of(-1, 0, 1);
    int32_t page[3];
    assert_true(kvpages_take(&pages, 3, page));
    assert_true(kvpages_claim(&pages, &key, page[0], BAD));
    assert_true(kvpages_claim(&pages, &key, page[0], BAD));
    assert_false(kvpages_claim(&pages, &key, page[1], BAD));
    assert_int_equal(kvpages_use(&pages, &key), -1); /* it is not finished */
    assert_true(kvpages_claim(&pages, &key, page[1], GOOD));
    assert_false(kvpages_claim(&pages, &key, page[0], BAD));
    kvpages_give(&pages, 1, page + 1); /* its holder has gone */
    assert_true(kvpages_claim(&pages, &key, page[0], BAD));
    assert_int_equal(kvpages_keep(&pages, &key, page[2], 0), page[2]); /* someone came first */
    assert_true(kvpages_claim(&pages, &key, page[0], BAD));            /* nobody waits any more */
    assert_int_equal(kvpages_keep(&pages, &key, page[0], 0), page[2]);
    assert_int_equal(kvpages_n_held(&pages), 1);
    kvpages_close(&pages);
}

static void forgotten_pages_are_used_no_more(void **state)
{
    (void)state;
    struct kvpages pages = open_pages(4);
    const int32_t a = keep_new(&pages, -1, 1);
    const int32_t b = keep_new(&pages, a, 2);
    kvpages_give(&pages, 1, &b);
    kvpages_forget(&pages);
    assert_int_equal(kvpages_n_held(&pages), 1);
    assert_int_equal(pages.n_idle, 0);
    assert_int_equal(use(&pages, -1, 0, 1), -1);
    const int32_t c = keep_new(&pages, a, 3); /* its holder goes on, alone */
    assert_int_equal(use(&pages, a, 0, 3), -1);
    kvpages_give(&pages, 1, &c);
    kvpages_give(&pages, 1, &a);
    assert_int_equal(pages.n_free, 4);
    kvpages_close(&pages);
}

static void nothing_is_kept_where_it_is_switched_off(void **state)
{
    (void)state;
    struct kvpages pages;
    assert_int_equal(kvpages_open(&pages, 2, false, NULL), ERR_OK);
    const struct kvpages_key key = key_of(-1, 0, 1);
    int32_t page[2];
    assert_true(kvpages_take(&pages, 2, page));
    assert_true(kvpages_claim(&pages, &key, page[0], 0));
    assert_true(kvpages_claim(&pages, &key, page[1], 0)); /* nobody waits for anybody */
    assert_int_equal(kvpages_keep(&pages, &key, page[0], 0), page[0]);
    assert_int_equal(kvpages_keep(&pages, &key, page[1], 0), page[1]);
    kvpages_give(&pages, 2, page);
    assert_int_equal(pages.n_free, 2);
    kvpages_close(&pages);
}

/* ---- at random, against a model that keeps whole texts ---- */

enum { N_PAGE = 24, N_HOLDER = 6, N_TEXT_PAGE = 6 };

struct holder {
    int n; /* pages, 0: idle */
    int32_t page[N_TEXT_PAGE];
};

/* Sees that held pages hold what their first holder wrote: content[] stands for the cache. */
static void check_content(const int content[N_PAGE][N_TEXT_PAGE], const struct holder *h,
                          const int *text)
{
    for (int i = 0; i < h->n; i++) {
        assert_memory_equal(content[h->page[i]], text, (size_t)(i + 1) * sizeof *text);
    }
}

static void never_gives_a_page_of_another_text(void **state)
{
    (void)state;
    struct kvpages pages = open_pages(N_PAGE);
    struct holder holder[N_HOLDER] = {0};
    int text[N_HOLDER][N_TEXT_PAGE];
    int content[N_PAGE][N_TEXT_PAGE] = {0};
    unsigned random = 1;
    int n_found = 0;
    for (int turn = 0; turn < 20000; turn++) {
        random = random * 1664525u + 1013904223u;
        struct holder *const h = &holder[(random >> 28) % N_HOLDER];
        int *const own = text[h - holder];
        if (h->n > 0) {
            check_content((const int(*)[N_TEXT_PAGE])content, h, own);
            kvpages_give(&pages, h->n, h->page);
            h->n = 0;
        } else {
            const int n = 1 + (int)(random >> 20 & 7) % N_TEXT_PAGE;
            int n_use = 0;
            for (int i = 0; i < n; i++) { /* few choices: many texts begin alike */
                own[i] = 1 + (int)(random >> (4 + 2 * i) & 1);
            }
            while (n_use < n && (h->page[n_use] = use(&pages, n_use > 0 ? h->page[n_use - 1] : -1,
                                                      0, own[n_use])) >= 0) {
                n_use++;
            }
            n_found += n_use;
            if (!kvpages_take(&pages, n - n_use, h->page + n_use)) {
                kvpages_give(&pages, n_use, h->page);
                continue;
            }
            h->n = n;
            for (int i = n_use; i < n; i++) {
                memcpy(content[h->page[i]], own, (size_t)(i + 1) * sizeof *own);
                const struct kvpages_key key = key_of(i > 0 ? h->page[i - 1] : -1, 0, own[i]);
                h->page[i] = kvpages_keep(&pages, &key, h->page[i], 0);
            }
        }
        int32_t seen[N_PAGE] = {0};
        int n_held = 0;
        for (int i = 0; i < N_HOLDER; i++) {
            check_content((const int(*)[N_TEXT_PAGE])content, &holder[i], text[i]);
            for (int j = 0; j < holder[i].n; j++) {
                n_held += seen[holder[i].page[j]]++ == 0;
            }
        }
        assert_int_equal(kvpages_n_held(&pages), n_held);
    }
    assert_true(n_found > 1000);
    kvpages_close(&pages);
}

/* One bucket for all: nothing but the comparison of whole keys tells two scopes apart. */
static void scopes_do_not_meet(void **state)
{
    (void)state;
    struct kvpages pages;
    assert_int_equal(kvpages_open(&pages, 3, true, NULL), ERR_OK);
    pages.mask = 0;
    int32_t page[3];
    assert_true(kvpages_take(&pages, 3, page));
    struct kvpages_key key = key_of(-1, 0, 1);
    key.scope = 7;
    assert_int_equal(kvpages_keep(&pages, &key, page[0], 70), page[0]);
    key.scope = 8;
    assert_int_equal(kvpages_use(&pages, &key), -1);
    assert_true(kvpages_claim(&pages, &key, page[1], 0)); /* nor does one wait for the other */
    assert_int_equal(kvpages_keep(&pages, &key, page[1], 80), page[1]);
    assert_int_equal(kvpages_use(&pages, &key), page[1]);
    assert_int_equal(kvpages_owner(&pages, page[1]), 80);
    key.scope = 7;
    assert_int_equal(kvpages_use(&pages, &key), page[0]);
    assert_int_equal(kvpages_owner(&pages, page[0]), 70);
    kvpages_close(&pages);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(scopes_do_not_meet),
        cmocka_unit_test(positions_round_up_to_pages),
        cmocka_unit_test(takes_all_or_none),
        cmocka_unit_test(equal_hashes_do_not_make_pages_equal),
        cmocka_unit_test(idle_pages_go_oldest_and_leaves_first),
        cmocka_unit_test(twins_become_one),
        cmocka_unit_test(claims_hold_until_they_are_kept_or_given_back),
        cmocka_unit_test(forgotten_pages_are_used_no_more),
        cmocka_unit_test(nothing_is_kept_where_it_is_switched_off),
        cmocka_unit_test(never_gives_a_page_of_another_text),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
