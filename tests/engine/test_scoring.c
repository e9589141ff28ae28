/* Windows against a plain enumeration of lm-evaluation-harness's rolling scheme, sums, and the
 * counting of words and characters. */
#include "engine/engine.h"
#include "engine/scoring.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

/* ---- windows ---- */

/* The scheme in its own terms: text of n tokens after a prefix token, windows of max_len
 * predictions or fewer, context tokens repeated so that every later window has at least
 * max_len - stride + 1 of them. Calls see with each window as (first token fed, tokens fed,
 * predictions), counted in ids = prefix + text. */
struct rolling {
    struct score_window window[4096];
    int n;
};

static void enumerate_rolling(struct rolling *rolling, int64_t n_ids, int64_t max_len,
                              int64_t stride)
{
    const int64_t n_text = n_ids - 1;
    rolling->n = 0;
    int64_t predicted = 0;
    while (predicted < n_text) {
        const bool first = predicted == 0;
        int64_t n_new = first ? max_len : stride;
        n_new = n_new < n_text - predicted ? n_new : n_text - predicted;
        const int64_t end = predicted + n_new; /* text tokens [predicted, end) are predicted */
        /* Inputs end with text token end-2, which is ids[end-1]. */
        const int64_t begin = first ? 0 : end - max_len;
        rolling->window[rolling->n++] =
            (struct score_window){.first = begin, .n_feed = end - begin, .n_count = n_new};
        predicted = end;
    }
}

static void windows_are_the_rolling_scheme(void **state)
{
    (void)state;
    static struct rolling rolling;
    static const int64_t lengths[] = {1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 64, 100, 257};
    static const int64_t sizes[] = {1, 2, 3, 8, 16, 17, 64, 300};
    for (size_t l = 0; l < sizeof lengths / sizeof lengths[0]; l++) {
        for (size_t w = 0; w < sizeof sizes / sizeof sizes[0]; w++) {
            for (int64_t stride = 1; stride <= sizes[w]; stride += stride < 4 ? 1 : 5) {
                enumerate_rolling(&rolling, lengths[l], sizes[w], stride);
                const int64_t n = score_window_count(lengths[l], 1, sizes[w], stride);
                if (n != rolling.n) {
                    fail_msg("n_ids %lld window %lld stride %lld: expected %d windows, got %lld",
                             (long long)lengths[l], (long long)sizes[w], (long long)stride,
                             rolling.n, (long long)n);
                }
                for (int k = 0; k < rolling.n; k++) {
                    const struct score_window got =
                        score_window_at(lengths[l], 1, sizes[w], stride, k);
                    const struct score_window *const want = &rolling.window[k];
                    if (got.first != want->first || got.n_feed != want->n_feed ||
                        got.n_count != want->n_count) {
                        fail_msg("n_ids %lld window %lld stride %lld, window %d: expected %lld "
                                 "%lld %lld, got %lld %lld %lld",
                                 (long long)lengths[l], (long long)sizes[w], (long long)stride, k,
                                 (long long)want->first, (long long)want->n_feed,
                                 (long long)want->n_count, (long long)got.first,
                                 (long long)got.n_feed, (long long)got.n_count);
                    }
                }
            }
        }
    }
}

/* Known values: 10 tokens after the prefix in windows of 4, as published for the rolling scheme. */
static void stride_equal_to_the_window_has_one_token_of_context(void **state)
{
    (void)state;
    assert_int_equal(score_window_count(11, 1, 4, 4), 3);
    const struct score_window w1 = score_window_at(11, 1, 4, 4, 1);
    assert_int_equal(w1.first, 4); /* the last token predicted before is the first one fed */
    assert_int_equal(w1.n_feed, 4);
    assert_int_equal(w1.n_count, 4);
    const struct score_window w2 = score_window_at(11, 1, 4, 4, 2);
    assert_int_equal(w2.first, 6); /* the rest of two gets all the context that fits */
    assert_int_equal(w2.n_feed, 4);
    assert_int_equal(w2.n_count, 2);
}

/* lm-evaluation-harness cuts a context that does not fit on the left: its request is the last
 * window + 1 tokens of context and continuation. */
static void a_long_context_is_cut_on_the_left(void **state)
{
    (void)state;
    assert_int_equal(score_window_count(100, 95, 20, 20), 1);
    const struct score_window w = score_window_at(100, 95, 20, 20, 0);
    assert_int_equal(w.first, 79);
    assert_int_equal(w.n_feed, 20);
    assert_int_equal(w.n_count, 5);
    const struct score_window fits = score_window_at(21, 15, 20, 3, 0);
    assert_int_equal(fits.first, 0);
    assert_int_equal(fits.n_feed, 20);
    assert_int_equal(fits.n_count, 6);
    assert_int_equal(score_window_count(7, 7, 4, 4), 0); /* nothing but context */
}

/* Whatever the context: each scored token is predicted once, in order, within the window. */
static void windows_predict_what_is_scored_and_no_more(void **state)
{
    (void)state;
    for (int64_t n_ids = 1; n_ids <= 40; n_ids += 3) {
        for (int64_t from = 1; from <= n_ids; from += 2) {
            for (int64_t window = 1; window <= 12; window++) {
                for (int64_t stride = 1; stride <= window; stride += 2) {
                    int64_t next = from; /* the next token to be predicted */
                    const int64_t n = score_window_count(n_ids, from, window, stride);
                    for (int64_t k = 0; k < n; k++) {
                        const struct score_window w =
                            score_window_at(n_ids, from, window, stride, k);
                        assert_true(w.first >= 0 && w.n_feed <= window && w.n_count <= w.n_feed);
                        assert_true(w.first == 0 || w.n_feed == window);
                        assert_int_equal(w.first + w.n_feed - w.n_count + 1, next);
                        next += w.n_count;
                    }
                    assert_int_equal(next, n_ids);
                }
            }
        }
    }
}

/* As the authors of XLM cut a text: each block alone, its first token never predicted. */
static void blocks_are_cut_from_the_first_token_on(void **state)
{
    (void)state;
    const struct request request = {.window = 100, .stride = 100};
    const struct item item = {.n_ids = 17, .score_from = 1, .block = 5, .block_used = 5};
    assert_int_equal(score_item_window_count(&request, &item), 3); /* ids 15 and 16: no block */
    for (int64_t k = 0; k < 3; k++) {
        const struct score_window w = score_item_window_at(&request, &item, k);
        assert_int_equal(w.first, 5 * k);
        assert_int_equal(w.n_feed, 4);
        assert_int_equal(w.n_count, 4);
    }
}

/* As adaptive-span's authors cut it: rows, each without what is left over behind its last step. */
static void a_block_may_end_before_the_next_one_begins(void **state)
{
    (void)state;
    const struct request request = {.window = 100, .stride = 100};
    const struct item item = {.n_ids = 31, .score_from = 1, .block = 10, .block_used = 9};
    assert_int_equal(score_item_window_count(&request, &item), 3);
    const struct score_window w = score_item_window_at(&request, &item, 2);
    assert_int_equal(w.first, 20);
    assert_int_equal(w.n_feed, 8);
    assert_int_equal(w.n_count, 8);
}

/* As sparse-memory-lm's author cuts it. */
static void windows_apart_run_no_position_twice(void **state)
{
    (void)state;
    const struct request request = {.window = 4, .stride = 4, .is_apart = true};
    const struct item item = {.n_ids = 11, .score_from = 1};
    assert_int_equal(score_item_window_count(&request, &item), 3);
    int64_t end = 0;
    for (int64_t k = 0; k < 3; k++) {
        const struct score_window w = score_item_window_at(&request, &item, k);
        assert_int_equal(w.first, end);
        assert_int_equal(w.n_feed, k < 2 ? 4 : 2);
        assert_int_equal(w.n_count, w.n_feed);
        end += w.n_feed;
    }
    assert_int_equal(end, item.n_ids - 1);
    assert_int_equal(score_item_positions(&request, &item), end);
}

static void without_blocks_an_item_has_the_windows_of_its_request(void **state)
{
    (void)state;
    const struct request request = {.window = 4, .stride = 3};
    const struct item item = {.n_ids = 12, .score_from = 2};
    assert_int_equal(score_item_window_count(&request, &item), score_window_count(12, 2, 4, 3));
    const struct score_window got = score_item_window_at(&request, &item, 1);
    const struct score_window want = score_window_at(12, 2, 4, 3, 1);
    assert_memory_equal(&got, &want, sizeof got);
}

/* ---- sums ---- */

/* The positions that an item costs are the sum over its windows, which a queue cannot walk. */
static void positions_are_those_of_all_windows(void **state)
{
    (void)state;
    struct request request = {.kind = REQUEST_SCORE};
    struct item item = {0};
    float target = 0;
    int64_t n_case = 0;
    for (item.n_ids = 1; item.n_ids <= 40; item.n_ids++) {
        for (request.window = 1; request.window <= 12; request.window++) {
            for (request.stride = 1; request.stride <= request.window; request.stride++) {
                for (int kind = 0; kind < 3; kind++) {
                    item.score_from = kind == 1 ? 1 + item.n_ids / 3 : 1;
                    item.out_target = kind == 1 ? &target : NULL;
                    item.traced = kind == 2;
                    int64_t n = 0;
                    for (int64_t k = 0; k < score_item_total(&request, &item); k++) {
                        n += score_item_feed(&request, &item, k);
                    }
                    assert_int_equal(score_item_positions(&request, &item), n);
                    n_case++;
                }
            }
        }
    }
    assert_true(n_case > 5000);
    item = (struct item){.n_ids = 100, .score_from = 1, .block = 10, .block_used = 8};
    assert_int_equal(score_item_positions(&request, &item), 10 * 7);
    item = (struct item){.n_ids = INT64_C(262144), .score_from = 1};
    request.window = 512;
    request.stride = 1; /* the review's largest: no walk over 261,632 windows */
    assert_int_equal(score_item_positions(&request, &item), INT64_C(261632) * 512);
}

static void sums_are_in_double_and_in_order(void **state)
{
    (void)state;
    float logprob[] = {-1.5f, -0.25f, -3.0f};
    int32_t rank[] = {1, 1, 1};
    const struct item item = {
        .n_ids = 4, .score_from = 1, .out_logprob = logprob, .out_rank = rank};
    struct score_sum sum = score_sum_item(&item);
    assert_int_equal(sum.n_scored, 3);
    assert_true(fabs(sum.sum_logprob + 4.75) < 1e-12);
    assert_true(fabs(sum.min_logprob + 3.0) < 1e-12);
    assert_true(sum.is_greedy && !sum.impossible && !sum.nan);
    rank[1] = 2;
    logprob[2] = -INFINITY;
    sum = score_sum_item(&item);
    assert_true(!sum.is_greedy && sum.impossible && !sum.nan);
    logprob[0] = NAN;
    assert_true(score_sum_item(&item).nan);
}

/* Rank 0 marks what no block predicts: its log-probability, which nobody computed, is no number of
 * the sum. */
static void what_no_block_predicts_is_not_summed(void **state)
{
    (void)state;
    float logprob[] = {-1.0f, 0.0f, -2.0f, 0.0f};
    int32_t rank[] = {1, 0, 3, 0};
    const struct item item = {
        .n_ids = 5, .score_from = 1, .out_logprob = logprob, .out_rank = rank};
    const struct score_sum sum = score_sum_item(&item);
    assert_int_equal(sum.n_scored, 2);
    assert_int_equal(sum.n_best, 1);
    assert_true(fabs(sum.sum_logprob + 3.0) < 1e-12);
    assert_true(fabs(sum.min_logprob + 2.0) < 1e-12);
    assert_false(sum.is_greedy);
}

static void nothing_scored_is_not_greedy(void **state)
{
    (void)state;
    const struct item item = {.n_ids = 1, .score_from = 1};
    const struct score_sum sum = score_sum_item(&item);
    assert_int_equal(sum.n_scored, 0);
    assert_false(sum.is_greedy);
    assert_true(fabs(sum.min_logprob) < 1e-12);
}

/* ---- words and characters ---- */

static void white_space_at_the_end_is_pythons(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        size_t n; /* len(text.rstrip().encode()) in Python */
    } cases[] = {
        {"", 0},
        {"one", 3},
        {" one two ", 8},
        {" \t\n", 0},
        {"a\xe3\x80\x80\x1c", 1},
        {"a\xc2\xa0\xe2\x80\x8b ", 6}, /* U+200B is none, so what stands before it stays */
    };
    for (size_t c = 0; c < sizeof cases / sizeof cases[0]; c++) {
        assert_int_equal(text_rstrip(cases[c].text, strlen(cases[c].text)), cases[c].n);
    }
}

static void words_are_runs_of_white_space_plus_one(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        int64_t n; /* len(re.split(r"\s+", text)) in Python */
    } cases[] = {
        {"", 1},
        {"one", 1},
        {"one two", 2},
        {"one  \t\n two", 2},
        {" one", 2},
        {"one ", 2},
        {" ", 2},
        {"a\x1c"
         "b\x1f"
         "c",
         3},
        {"a\xc2\x85"
         "b\xc2\xa0"
         "c",
         3},                                             /* U+0085, U+00A0 */
        {"a\xe1\x9a\x80z\xe2\x80\x80y\xe2\x80\x8ax", 4}, /* U+1680, U+2000, U+200A */
        {"a\xe2\x80\xa8z\xe2\x80\xa9y\xe2\x80\xafx\xe2\x81\x9fw\xe3\x80\x80v", 6},
        {"a\xe2\x80\x8b"
         "b",
         1}, /* U+200B, zero width space, is none */
        {"a\xef\xbb\xbf"
         "b",
         1}, /* nor is U+FEFF */
    };
    for (size_t c = 0; c < sizeof cases / sizeof cases[0]; c++) {
        const int64_t got = text_count_words(cases[c].text, strlen(cases[c].text));
        if (got != cases[c].n) {
            fail_msg("case %zu: expected %lld words, got %lld", c, (long long)cases[c].n,
                     (long long)got);
        }
    }
}

static void pieces_have_white_space_around_them(void **state)
{
    (void)state;
    assert_int_equal(text_count_pieces("", 0), 0);
    assert_int_equal(text_count_pieces(" \n", 2), 0);
    assert_int_equal(text_count_pieces("a b\n\nc", 6), 3);
    assert_int_equal(text_count_pieces("\n a\xe3\x80\x80v ", 8), 2); /* U+3000 */
}

static void characters_are_code_points(void **state)
{
    (void)state;
    assert_int_equal(text_count_chars("", 0), 0);
    assert_int_equal(text_count_chars("abc", 3), 3);
    assert_int_equal(text_count_chars("\xc3\xa9\xe2\x82\xac\xf0\x9f\x99\x82", 9), 3);
    assert_int_equal(text_count_chars("e\xcc\x81", 3), 2); /* combining marks count */
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(windows_are_the_rolling_scheme),
        cmocka_unit_test(stride_equal_to_the_window_has_one_token_of_context),
        cmocka_unit_test(a_long_context_is_cut_on_the_left),
        cmocka_unit_test(windows_predict_what_is_scored_and_no_more),
        cmocka_unit_test(blocks_are_cut_from_the_first_token_on),
        cmocka_unit_test(a_block_may_end_before_the_next_one_begins),
        cmocka_unit_test(windows_apart_run_no_position_twice),
        cmocka_unit_test(without_blocks_an_item_has_the_windows_of_its_request),
        cmocka_unit_test(positions_are_those_of_all_windows),
        cmocka_unit_test(sums_are_in_double_and_in_order),
        cmocka_unit_test(what_no_block_predicts_is_not_summed),
        cmocka_unit_test(white_space_at_the_end_is_pythons),
        cmocka_unit_test(nothing_scored_is_not_greedy),
        cmocka_unit_test(words_are_runs_of_white_space_plus_one),
        cmocka_unit_test(pieces_have_white_space_around_them),
        cmocka_unit_test(characters_are_code_points),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
