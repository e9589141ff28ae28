/* The arithmetic of scoring: see scoring.h. */
#include "engine/scoring.h"

#include "kernels/utf8.h"

#include <math.h>

/* ---- windows ------------------------------------------------------------------------------- */

int64_t score_window_count(int64_t n_ids, int64_t score_from, int64_t window, int64_t stride)
{
    CHECK(score_from >= 1 && score_from <= n_ids && stride >= 1 && stride <= window);
    const int64_t n_predict = n_ids - score_from;
    if (n_predict <= window) {
        return n_predict > 0 ? 1 : 0;
    }
    return 1 + (n_predict - window + stride - 1) / stride;
}

struct score_window score_window_at(int64_t n_ids, int64_t score_from, int64_t window,
                                    int64_t stride, int64_t k)
{
    CHECK(k >= 0 && k < score_window_count(n_ids, score_from, window, stride));
    const int64_t n_context = score_from - 1; /* tokens fed before the one that makes the first
                                               * prediction */
    const int64_t n_predict = n_ids - score_from;
    if (k == 0) {
        const int64_t n = n_predict < window ? n_predict : window;
        const int64_t end = n_context + n;
        const int64_t first = end > window ? end - window : 0;
        return (struct score_window){.first = first, .n_feed = end - first, .n_count = n};
    }
    const int64_t done = window + (k - 1) * stride; /* predictions of the windows before this one */
    const int64_t left = n_predict - done;
    const int64_t n = left < stride ? left : stride;
    return (struct score_window){
        .first = n_context + done + n - window, .n_feed = window, .n_count = n};
}

int64_t score_item_window_count(const struct request *request, const struct item *item)
{
    return item->block > 0 ? item->n_ids / item->block
                           : score_window_count(item->n_ids, item->score_from, request->window,
                                                request->stride);
}

struct score_window score_item_window_at(const struct request *request, const struct item *item,
                                         int64_t k)
{
    if (item->block == 0 && request->is_apart) {
        CHECK(k >= 0 && k < score_item_window_count(request, item) && item->score_from == 1);
        const int64_t first = k * request->window;
        const int64_t left = item->n_ids - 1 - first;
        const int64_t n = left < request->window ? left : request->window;
        return (struct score_window){.first = first, .n_feed = n, .n_count = n};
    }
    if (item->block == 0) {
        return score_window_at(item->n_ids, item->score_from, request->window, request->stride, k);
    }
    CHECK(k >= 0 && k < item->n_ids / item->block);
    const int64_t n = item->block_used - 1;
    return (struct score_window){.first = k * item->block, .n_feed = n, .n_count = n};
}

/* Whether the last token runs through the model too: its memory look-ups are traced, or the tokens
 * that may follow it are scored. */
static bool feeds_last(const struct item *item)
{
    return item->traced || item->out_target != NULL;
}

bool score_item_feeds_last(const struct request *request, const struct item *item, int64_t k)
{
    if (item->block > 0) {
        return feeds_last(item);
    }
    return feeds_last(item) && k >= 0 && k == score_item_window_count(request, item) - 1 &&
           score_item_window_at(request, item, k).n_feed < request->window;
}

int64_t score_item_total(const struct request *request, const struct item *item)
{
    const int64_t n = score_item_window_count(request, item);
    const bool one_more =
        item->block == 0 && feeds_last(item) && !score_item_feeds_last(request, item, n - 1);
    return n + one_more;
}

int64_t score_item_feed(const struct request *request, const struct item *item, int64_t k)
{
    if (k == score_item_window_count(request, item)) { /* the last token and its context */
        return item->n_ids < request->window ? item->n_ids : request->window;
    }
    return score_item_window_at(request, item, k).n_feed + score_item_feeds_last(request, item, k);
}

int64_t score_item_positions(const struct request *request, const struct item *item)
{
    const int64_t n = score_item_total(request, item);
    if (n < 3) {
        return (n > 0 ? score_item_feed(request, item, 0) : 0) +
               (n > 1 ? score_item_feed(request, item, 1) : 0);
    }
    /* The windows between the first and the last one are alike. */
    return score_item_feed(request, item, 0) + (n - 2) * score_item_feed(request, item, 1) +
           score_item_feed(request, item, n - 1);
}

/* ---- sums ---------------------------------------------------------------------------------- */

struct score_sum score_sum_item(const struct item *item)
{
    struct score_sum sum = {0};
    for (int64_t i = 0; i < item->n_ids - item->score_from; i++) {
        if (item->out_rank[i] == 0) {
            continue; /* the first token of a block */
        }
        const double logprob = (double)item->out_logprob[i];
        sum.sum_logprob += logprob;
        sum.min_logprob =
            sum.n_scored == 0 || logprob < sum.min_logprob ? logprob : sum.min_logprob;
        sum.n_scored++;
        sum.n_best += item->out_rank[i] == 1;
        sum.impossible = sum.impossible || (isinf(logprob) && logprob < 0);
        sum.nan = sum.nan || isnan(logprob);
    }
    sum.is_greedy = sum.n_scored > 0 && sum.n_best == sum.n_scored;
    return sum;
}

/* ---- words and characters ------------------------------------------------------------------ */

/* What Python's \s matches in a str: the characters of str.isspace(). */
static bool is_space(uint32_t c)
{
    return (c >= 0x09 && c <= 0x0d) || (c >= 0x1c && c <= 0x20) || c == 0x85 || c == 0xa0 ||
           c == 0x1680 || (c >= 0x2000 && c <= 0x200a) || c == 0x2028 || c == 0x2029 ||
           c == 0x202f || c == 0x205f || c == 0x3000;
}

/* Goes behind the next character and says whether it is white space. */
static bool pass_space(const char *text, size_t bytes, size_t *at)
{
    const struct utf8_char c = utf8_next(text + *at, bytes - *at);
    *at += (size_t)c.bytes;
    return c.status == UTF8_CHAR && is_space(c.code);
}

size_t text_rstrip(const char *text, size_t bytes)
{
    size_t end = 0; /* behind the last character that is not white space */
    for (size_t at = 0; at < bytes;) {
        end = pass_space(text, bytes, &at) ? end : at;
    }
    return end;
}

int64_t text_count_words(const char *text, size_t bytes)
{
    int64_t n_run = 0;
    bool in_run = false;
    for (size_t at = 0; at < bytes;) {
        const bool space = pass_space(text, bytes, &at);
        n_run += space && !in_run;
        in_run = space;
    }
    return 1 + n_run;
}

int64_t text_count_pieces(const char *text, size_t bytes)
{
    int64_t n = 0;
    bool was_space = true;
    for (size_t at = 0; at < bytes;) {
        const bool space = pass_space(text, bytes, &at);
        n += was_space && !space;
        was_space = space;
    }
    return n;
}

int64_t text_count_chars(const char *text, size_t bytes)
{
    int64_t n = 0;
    for (size_t at = 0; at < bytes; n++) {
        at += (size_t)utf8_next(text + at, bytes - at).bytes;
    }
    return n;
}
