/* One running sequence: a sample of a generation, or a window of a text to score (all windows, one
 * after another, if the item traces memory). It knows which rows it feeds into a step and what to
 * do with their results. It knows nothing about other sequences, scheduling or threads.
 *
 *   sequence_assign → sequence_start
 *     → { sequence_fill → (the step runs) → sequence_trace → sequence_consume } … → over
 *
 * Engine thread only. Its arrays are sized at open for the longest sequence. */
#ifndef ENGINE_SEQUENCE_H
#define ENGINE_SEQUENCE_H

#include "engine/queue.h"
#include "engine/sampling.h"
#include "engine/stop.h"

struct sequence {
    struct job *job;   /* Borrowed: the queue's pool. NULL: it is free */
    struct item *item; /* Borrowed: the request's */
    int32_t *page;     /* Owner: this. [n_page_max]; its pages while it runs */
    int n_page;

    /* Positions 0 .. n_feed-1 hold the tokens base .. of the item's text; n_done are computed. */
    int64_t base;
    int64_t n_feed;
    int64_t n_done;

    /* Pages shared with others (prefix.c). */
    int n_kept;     /* leading pages that were found in the cache or kept for others */
    int64_t n_skip; /* leading positions without outputs: they may be taken from the cache */
    bool shares;    /* its pages hold one text from position 0 on, so others may use them */
    bool waits; /* may wait for a page that another sequence is filling, and overtake others. false
                 * for a window of several, because the predictions of a text are appended in
                 * order */

    /* Scoring: the current window. The predictions of positions count_from .. count_end-1 count. */
    int64_t window, window_end;
    int64_t count_from, count_end;
    int64_t trace_base; /* the token of the text at the trace's first position */

    /* Generation. */
    int n_out;
    enum finish ending; /* decided, but the last token is still to be fed, for the memory trace */
    struct sampling_counts counts;
    struct stop_scan stop;
    int64_t first_us, last_us;

    int n_planned;  /* rows of this turn that no step has had yet */
    bool has_begun; /* its next row is in a step that has begun ahead of its turn */
};

/* What a step has of a sequence: rows row_first .. row_first+n_row-1, outputs out_first ..
 * out_first+n_out_row-1. */
struct sequence_rows {
    struct sequence *seq; /* Borrowed; NULL: it has ended since, and nobody wants the results */
    int row_first, n_row;
    int out_first, n_out_row;
};

enum err_code sequence_open(struct sequence *seq, int n_page_max, int n_entry_max, struct err *err);
void sequence_close(struct sequence *seq); /* zeroed ones are fine */

/* The most positions that a sequence beginning at this window (scoring) can hold in the cache. */
int64_t sequence_position_max(const struct request *request, const struct item *item,
                              int64_t window);

/* Positions that a sequence beginning at this window (scoring) computes at most. */
int64_t sequence_positions(const struct request *request, const struct item *item, int64_t window);

/* Sets what the sequence will feed, beginning at this window (scoring). To take that back, set job
 * to NULL. */
void sequence_assign(struct sequence *seq, struct job *job, struct item *item, int64_t window);
/* Begins it: its pages are set. */
void sequence_start(struct sequence *seq, const struct model_info *info,
                    const struct tokenizer *tokenizer);

/* The token at a position that it has fed or could feed. */
int32_t sequence_token(const struct sequence *seq, int64_t position);
/* The next n positions are in its pages already; n_own of them were computed for its own client. */
void sequence_skip(struct sequence *seq, int64_t n, int64_t n_own);

/* Whether it decodes: it feeds exactly one row, the token drawn in the last step. */
bool sequence_decodes(const struct sequence *seq);
/* Rows it could feed now, >= 1. */
int64_t sequence_rows(const struct sequence *seq);

/* How many of its next n_row rows fit into step: all, or all but the last one, whose targets must
 * wait for the next step. There is always room for the targets of the first sequence of a step, so
 * every sequence makes progress if the order of service stays the same. */
int sequence_fit(const struct sequence *seq, const struct step *step, int n_row);
/* Appends its next n_row rows and their outputs to step. */
struct sequence_rows sequence_fill(struct sequence *seq, struct step *step, int n_row);

/* What is known of the row behind rows that a step holds, before that step's results are. */
enum sequence_next {
    NEXT_UNKNOWN, /* what it is, or what is wanted of it, depends on the token that is drawn */
    NEXT_NONE,    /* the sequence ends with that token, whichever it is */
    NEXT_ROW,     /* that token, unless the sequence ends with it */
};
enum sequence_next sequence_next(const struct sequence_rows *rows);
/* Appends that row to step, which begins next: NEXT_ROW. */
struct sequence_rows sequence_fill_next(const struct sequence_rows *rows, struct step *step);

/* Adds the look-ups of memory m for its rows of the step to the item's trace. slots and weights:
 * [n_row, n_column], its own rows. Before sequence_consume. */
void sequence_trace(const struct sequence_rows *rows, int m, const int32_t *slots,
                    const float *weights, int n_column);

struct sequence_result {
    bool over;          /* the sequence has ended */
    bool item_over;     /* and with it the item: finish is its state */
    enum finish finish; /* FINISH_ERROR: a log-probability was not a number */
    int n_published;    /* results that are visible since this call */
};

/* Takes the step's results into the item. text is scratch of text_max bytes for the detokeniser. */
struct sequence_result sequence_consume(const struct sequence_rows *rows, const struct step *step,
                                        const struct model_info *info, char *text, size_t text_max);

#endif
