/* Stop strings: found across borders, the same wherever the text is cut. */
#include "engine/stop.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static struct sampling *with_stops(const char *const *stops)
{
    static struct sampling sampling;
    memset(&sampling, 0, sizeof sampling);
    for (; stops[sampling.n_stop] != NULL; sampling.n_stop++) {
        const char *const text = stops[sampling.n_stop];
        sampling.stop[sampling.n_stop].bytes = (int)strlen(text);
        memcpy(sampling.stop[sampling.n_stop].text, text, strlen(text));
    }
    return &sampling;
}

/* Pushes text in pieces of the given size until something matches. */
static struct stop_match scan_text(const struct sampling *sampling, const char *text, size_t piece)
{
    /* stop_begin wants a tokenizer where there are stop strings; text is pushed directly here. */
    struct stop_scan scan;
    memset(&scan, 0, sizeof scan);
    scan.sampling = sampling;
    struct stop_match match = {.index = -1};
    const size_t n = strlen(text);
    for (size_t at = 0; at < n && match.index < 0; at += piece) {
        match = stop_push_text(&scan, text + at, piece < n - at ? piece : n - at, true);
    }
    return match;
}

struct stop_case {
    const char *name;
    const char *stops[4];
    const char *text;
    int index;
    int begin;
};

static const struct stop_case stop_cases[] = {
    {"no match", {"xyz", NULL}, "a long text without it", -1, 0},
    {"in the middle", {"END", NULL}, "some text END more", 0, 10},
    {"at the very start", {"ab", NULL}, "abc", 0, 0},
    {"at the very end", {"bc", NULL}, "abc", 0, 1},
    {"a false start before it", {"aab", NULL}, "aaab", 0, 1},
    {"the one that ends first", {"long stop", "st", NULL}, "a long stop", 1, 7},
    {"of those that end together the longer", {"b", "ab", NULL}, "xxab", 1, 2},
    {"equal strings: the lower index", {"ab", "ab", NULL}, "ab", 0, 0},
    {"characters of several bytes", {"\xe2\x82\xac!", NULL}, "5 \xe2\x82\xac\xe2\x82\xac!", 0, 5},
    {"a newline", {"\n\n", NULL}, "one\ntwo\n\nthree", 0, 7},
};

static void same_match_wherever_the_text_is_cut(void **state)
{
    (void)state;
    for (size_t c = 0; c < sizeof stop_cases / sizeof stop_cases[0]; c++) {
        const struct stop_case *const test = &stop_cases[c];
        for (size_t piece = 1; piece < 12; piece++) {
            const struct stop_match got = scan_text(with_stops(test->stops), test->text, piece);
            if (got.index != test->index || (got.index >= 0 && got.begin != test->begin)) {
                fail_msg("%s, pieces of %zu bytes: expected stop %d at %d, got %d at %lld",
                         test->name, piece, test->index, test->begin, got.index,
                         (long long)got.begin);
            }
        }
    }
}

/* The kept tail moves many times; offsets keep counting. */
static void long_texts_and_the_longest_stop(void **state)
{
    (void)state;
    static char stop[STOP_BYTES_MAX + 1];
    static char text[10000];
    memset(stop, 'x', STOP_BYTES_MAX);
    memset(text, 'x', sizeof text - 1);
    for (size_t i = 0; i < sizeof text - STOP_BYTES_MAX - 5; i += STOP_BYTES_MAX) {
        text[i] = 'y'; /* each run is one short */
    }
    size_t last = 0;
    for (size_t i = 0; i < sizeof text - 1; i++) {
        last = text[i] == 'y' ? i : last;
    }
    const char *const stops[] = {stop, NULL};
    for (size_t piece = 1; piece < 600; piece += 97) {
        const struct stop_match got = scan_text(with_stops(stops), text, piece);
        assert_int_equal(got.index, 0);
        assert_int_equal(got.begin, last + 1);
    }
}

/* Also where the kept tail has just moved. */
static void the_longest_stop_is_found_at_any_place(void **state)
{
    (void)state;
    static char stop[STOP_BYTES_MAX + 1];
    static char text[4 * STOP_BYTES_MAX + 1];
    for (int i = 0; i < STOP_BYTES_MAX; i++) {
        stop[i] = (char)('b' + i % 7);
    }
    const char *const stops[] = {stop, NULL};
    for (int at = 0; at <= 3 * STOP_BYTES_MAX; at++) {
        memset(text, 'a', (size_t)at);
        (void)snprintf(text + at, sizeof text - (size_t)at, "%s", stop);
        const struct stop_match got = scan_text(with_stops(stops), text, 97);
        if (got.index != 0 || got.begin != at) {
            fail_msg("expected the stop at %d, got stop %d at %lld", at, got.index,
                     (long long)got.begin);
        }
    }
}

static void matches_before_min_tokens_do_not_count(void **state)
{
    (void)state;
    const char *const stops[] = {"ab", NULL};
    struct stop_scan scan;
    memset(&scan, 0, sizeof scan);
    scan.sampling = with_stops(stops);
    assert_int_equal(stop_push_text(&scan, "abab", 4, false).index, -1);
    const struct stop_match match = stop_push_text(&scan, "ab", 2, true);
    assert_int_equal(match.index, 0);
    assert_int_equal(match.begin, 4);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(same_match_wherever_the_text_is_cut),
        cmocka_unit_test(long_texts_and_the_longest_stop),
        cmocka_unit_test(the_longest_stop_is_found_at_any_place),
        cmocka_unit_test(matches_before_min_tokens_do_not_count),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
