/* The arithmetic of scoring that needs no model: windows, sums, and the normalisers of a text. Used
 * by the engine thread, the server and the command line. */
#ifndef ENGINE_SCORING_H
#define ENGINE_SCORING_H

#include "engine/request.h"

/* Windows of lm-evaluation-harness's rolling scheme over a sequence of n_ids tokens (BOS included,
 * n_ids >= 1) of which those from score_from on (1 .. n_ids) are scored: window k feeds tokens
 * first .. first+n_feed-1 and its last n_count predictions count; each scored token is predicted by
 * exactly one window. Window 0 counts as many as it can, window at most, and feeds what stands
 * before them as far as it fits; later ones count stride (the last: what is left) and start so that
 * they feed window tokens. With score_from 1 window 0 thus counts all of its predictions; with a
 * context before score_from and few tokens behind, there is one window that has lost what does not
 * fit on the left. The last token predicts nothing: none of these windows feeds it. */
struct score_window {
    int64_t first;  /* index into ids of the first token fed */
    int64_t n_feed; /* tokens fed */
    /* Predictions that count: the last n_count of n_feed tokens. A last token that is fed all the
     * same (score_item_feeds_last) predicts nothing and is not among them. */
    int64_t n_count;
};
int64_t score_window_count(int64_t n_ids, int64_t score_from, int64_t window, int64_t stride);
struct score_window score_window_at(int64_t n_ids, int64_t score_from, int64_t window,
                                    int64_t stride, int64_t k);

/* The same for an item, with its request's window and stride, or with the item's blocks. */
int64_t score_item_window_count(const struct request *request, const struct item *item);
struct score_window score_item_window_at(const struct request *request, const struct item *item,
                                         int64_t k);

/* Windows that the engine runs for an item. One more than score_item_window_count if the last token
 * must be fed (for the memory trace or the targets) and no window has room for it. */
int64_t score_item_total(const struct request *request, const struct item *item);
/* Whether window k feeds the last token, which predicts nothing; with blocks, the last token of
 * each. */
bool score_item_feeds_last(const struct request *request, const struct item *item, int64_t k);
/* Tokens that window k (0 .. score_item_total - 1) feeds. */
int64_t score_item_feed(const struct request *request, const struct item *item, int64_t k);
/* Positions that scoring the item computes: what all its windows feed. */
int64_t score_item_positions(const struct request *request, const struct item *item);

/* Sums over one item or pooled over items; the definitions are those of the HTTP contract. */
struct score_sum {
    int64_t n_scored;
    int64_t n_best;     /* of them: the most probable token (rank 1) */
    double sum_logprob; /* in double, in position order */
    double min_logprob; /* 0 if n_scored is 0 */
    bool is_greedy;     /* every rank is 1 (false if n_scored is 0) */
    bool impossible;    /* some log-probability is -inf */
    bool nan;
};
struct score_sum score_sum_item(const struct item *item);

/* Bytes of text without the white space at its end (Python's str.rstrip), over UTF-8. */
size_t text_rstrip(const char *text, size_t bytes);
/* 1 + runs of white space of Python's \s (str), over UTF-8. */
int64_t text_count_words(const char *text, size_t bytes);
/* The pieces between white space, none of which is empty. */
int64_t text_count_pieces(const char *text, size_t bytes);
int64_t text_count_chars(const char *text, size_t bytes);

#endif
