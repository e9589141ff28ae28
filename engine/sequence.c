/* One running sequence: see sequence.h. */
#include "engine/sequence.h"

#include "engine/scoring.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum err_code sequence_open(struct sequence *seq, int n_page_max, int n_entry_max, struct err *err)
{
    *seq = (struct sequence){.page = malloc((size_t)n_page_max * sizeof *seq->page)};
    if (seq->page == NULL) {
        return err_set(err, ERR_MEMORY, "no memory for a sequence of %d pages", n_page_max);
    }
    return sampling_counts_open(&seq->counts, n_entry_max, err);
}

void sequence_close(struct sequence *seq)
{
    free(seq->page);
    sampling_counts_close(&seq->counts);
    *seq = (struct sequence){0};
}

/* ---- windows ------------------------------------------------------------------------------- */

int64_t sequence_position_max(const struct request *request, const struct item *item,
                              int64_t window)
{
    if (request->kind == REQUEST_GENERATE) {
        return item_position_max(request, item);
    }
    if (item->block == 0 && (item->traced || window == score_item_window_count(request, item))) {
        return item->n_ids < request->window ? item->n_ids : request->window;
    }
    return score_item_window_at(request, item, window).n_feed +
           score_item_feeds_last(request, item, window);
}

int64_t sequence_positions(const struct request *request, const struct item *item, int64_t window)
{
    return request->kind == REQUEST_GENERATE || item->traced
               ? item_positions(request, item)
               : score_item_feed(request, item, window);
}

static void begin_window(struct sequence *seq, int64_t k)
{
    const struct request *const request = seq->job->request;
    const struct item *const item = seq->item;
    const int64_t n_ids = item->n_ids;
    seq->window = k;
    seq->n_done = 0;
    if (k ==
        score_item_window_count(request, item)) { /* of the last token, with what context fits */
        seq->n_feed = n_ids < request->window ? n_ids : request->window;
        seq->base = n_ids - seq->n_feed;
        seq->count_from = seq->count_end = seq->n_feed;
        return;
    }
    const struct score_window w = score_item_window_at(request, item, k);
    seq->base = w.first;
    seq->n_feed = w.n_feed + score_item_feeds_last(request, item, k);
    seq->count_end = w.n_feed;
    seq->count_from = w.n_feed - w.n_count;
}

/* ---- start --------------------------------------------------------------------------------- */

void sequence_assign(struct sequence *seq, struct job *job, struct item *item, int64_t window)
{
    const struct request *const request = job->request;
    CHECK(seq->job == NULL && !seq->has_begun);
    seq->job = job;
    seq->item = item;
    seq->n_done = 0;
    seq->shares = seq->waits = true;
    if (request->kind == REQUEST_GENERATE) {
        seq->base = seq->trace_base = 0;
        seq->n_feed = item->n_ids;
        seq->n_skip = item->traced || item->prompt_logprob != NULL ? 0 : item->n_ids - 1;
        return;
    }
    const int64_t n_window = score_item_total(request, item);
    seq->window_end = item->traced ? n_window : window + 1;
    begin_window(seq, window);
    seq->trace_base = seq->base;
    seq->n_skip = seq->count_from < seq->n_feed ? seq->count_from : seq->n_feed - 1;
    seq->waits = n_window == 1;
    if (item->traced) { /* windows one after another, in the same pages */
        seq->shares = false;
        seq->n_skip = 0;
    }
}

void sequence_start(struct sequence *seq, const struct model_info *info,
                    const struct tokenizer *tokenizer)
{
    const struct request *const request = seq->job->request;
    const struct item *const item = seq->item;
    seq->n_out = 0;
    seq->ending = FINISH_NONE;
    seq->first_us = seq->last_us = 0;
    if (request->kind == REQUEST_GENERATE) {
        sampling_begin(&seq->counts, &request->sampling, item->ids, item->n_ids, &info->ends);
        stop_begin(&seq->stop, &request->sampling, tokenizer);
        if (request->sampling.n_stop > 0 && item->n_ids > 0) {
            detok_follow(&seq->stop.detok, item->ids[item->n_ids - 1]);
        }
    }
}

void sequence_skip(struct sequence *seq, int64_t n, int64_t n_own)
{
    CHECK(n >= 0 && seq->n_done + n <= seq->n_skip);
    seq->n_done += n;
    seq->item->n_position += n;
    seq->item->n_cached += n;
    seq->item->n_own += n_own;
}

bool sequence_decodes(const struct sequence *seq)
{
    return seq->job->request->kind == REQUEST_GENERATE && seq->n_done >= seq->item->n_ids;
}

int64_t sequence_rows(const struct sequence *seq)
{
    return seq->n_feed - seq->n_done;
}

/* ---- rows into a step ---------------------------------------------------------------------- */

int32_t sequence_token(const struct sequence *seq, int64_t position)
{
    const int64_t at = seq->base + position;
    return at < seq->item->n_ids ? seq->item->ids[at] : seq->item->out_id[at - seq->item->n_ids];
}

/* Alternatives that the item keeps. */
static int n_top_of(const struct sequence *seq)
{
    return seq->item->bare ? 0 : seq->job->request->n_top;
}

/* Adds an output for the step's newest row. */
static void want_output(struct sequence_rows *rows, struct step *step, int want, int32_t target,
                        int n_top)
{
    CHECK(step->n_out < step->limits.n_out_max);
    const int i = step->n_out++;
    step->out_row[i] = step->n_tok - 1;
    step->out_want[i] = (uint8_t)(want | (n_top > 0 ? OUT_TOP : 0));
    step->target[i] = target;
    step->n_top = n_top > step->n_top ? n_top : step->n_top;
    rows->n_out_row++;
}

/* Draws the sequence's token n_out from the step's newest row. */
static void want_token(struct sequence_rows *rows, struct step *step, int n_out)
{
    const struct sequence *const seq = rows->seq;
    /* Always compute the log-probability: a NaN here is how we detect broken logits. */
    want_output(rows, step, OUT_SAMPLE | OUT_LOGPROB, TARGET_SAMPLED, n_top_of(seq));
    sampling_fill(&seq->counts, &seq->job->request->sampling, seq->item, n_out, step,
                  step->n_out - 1);
}

/* Requests the outputs of the row at this position, if it has any. */
static void fill_output(struct sequence_rows *rows, struct step *step, int64_t position)
{
    const struct sequence *const seq = rows->seq;
    const struct request *const request = seq->job->request;
    const struct item *const item = seq->item;
    const int n_top = n_top_of(seq);
    if (request->kind == REQUEST_SCORE) {
        if (position >= seq->count_from && position < seq->count_end) {
            want_output(rows, step, OUT_LOGPROB | (item->out_entropy != NULL ? OUT_ENTROPY : 0),
                        item->ids[seq->base + position + 1], n_top);
        } else if (item->out_target != NULL && seq->base + position == item->n_ids - 1) {
            for (int j = 0; j < request->n_target; j++) {
                want_output(rows, step, OUT_LOGPROB, request->target[j], 0);
            }
        }
    } else if (position + 1 < item->n_ids) {
        if (item->prompt_logprob != NULL) {
            want_output(rows, step, OUT_LOGPROB, item->ids[position + 1], n_top);
        }
    } else if (seq->ending == FINISH_NONE && item_max_tokens(request, item) > 0) {
        want_token(rows, step, seq->n_out);
    }
}

/* A step has TARGET_MAX = n_out_max - n_tok_max more outputs than rows. No other row has more than
 * one output, so it is enough to keep this surplus whenever a row with targets is added. */
int sequence_fit(const struct sequence *seq, const struct step *step, int n_row)
{
    const bool last = n_row > 0 && seq->item->out_target != NULL &&
                      seq->base + seq->n_done + n_row == seq->item->n_ids;
    const int surplus = step->limits.n_out_max - step->limits.n_tok_max;
    const int n_target = seq->job->request->n_target;
    return last && step->n_out + n_target > step->n_tok + 1 + surplus ? n_row - 1 : n_row;
}

/* The knock-out list of the step's newest sequence. There is room for the longest list of each. */
static void fill_ablate(const struct request_ablate *ablate, struct step *step)
{
    CHECK(ablate->n <= step->limits.n_ablate_max - step->n_ablate);
    if (ablate->n > 0) {
        memcpy(step->ablate + step->n_ablate, ablate->entry,
               (size_t)ablate->n * sizeof *ablate->entry);
        step->n_ablate += ablate->n;
    }
    step->ablate_first[step->n_seq] = step->n_ablate;
}

/* The overlays that it reads instead of the model's rows, in the same way. */
static void fill_redirects(const struct request_overlays *overlays, struct step *step)
{
    CHECK(overlays->n_entry <= step->limits.n_redirect_max - step->n_redirect);
    if (overlays->n_entry > 0) {
        memcpy(step->redirect + step->n_redirect, overlays->entry,
               (size_t)overlays->n_entry * sizeof *overlays->entry);
        step->n_redirect += overlays->n_entry;
    }
    step->redirect_first[step->n_seq] = step->n_redirect;
}

/* The sequence becomes the step's newest one, without rows yet. */
static struct sequence_rows add_sequence(struct sequence *seq, struct step *step)
{
    CHECK(step->n_seq < step->limits.n_seq_max);
    memcpy(step->page + (size_t)step->n_seq * (size_t)step->limits.n_page_max, seq->page,
           (size_t)seq->n_page * sizeof *seq->page);
    step->seq_first[step->n_seq++] = step->n_tok;
    fill_ablate(&seq->job->request->ablate, step);
    fill_redirects(&seq->job->request->overlays, step);
    return (struct sequence_rows){.seq = seq, .row_first = step->n_tok, .out_first = step->n_out};
}

/* Appends a row of the step's newest sequence. */
static void add_row(struct sequence_rows *rows, struct step *step, int32_t token, int64_t position)
{
    CHECK(step->n_tok < step->limits.n_tok_max);
    const int row = step->n_tok++;
    rows->n_row++;
    step->token[row] = token;
    step->pos[row] = (int32_t)position;
    step->lang[row] = rows->seq->job->request->lang;
    step->seq_first[step->n_seq] = step->n_tok;
}

struct sequence_rows sequence_fill(struct sequence *seq, struct step *step, int n_row)
{
    CHECK(n_row >= 1 && n_row <= sequence_rows(seq));
    struct sequence_rows rows = add_sequence(seq, step);
    for (int r = 0; r < n_row; r++) {
        const int64_t position = seq->n_done + r;
        add_row(&rows, step, sequence_token(seq, position), position);
        fill_output(&rows, step, position);
    }
    return rows;
}

enum sequence_next sequence_next(const struct sequence_rows *rows)
{
    const struct sequence *const seq = rows->seq;
    const struct request *const request = seq->job->request;
    const struct item *const item = seq->item;
    const bool draws = request->kind == REQUEST_GENERATE && rows->n_out_row > 0 &&
                       seq->ending == FINISH_NONE && seq->n_done + rows->n_row == seq->n_feed;
    if (!draws || item->traced || request->overlays.n > 0 || seq->counts.counting) {
        return NEXT_UNKNOWN;
    }
    return seq->n_out + 1 < item_max_tokens(request, item) ? NEXT_ROW : NEXT_NONE;
}

struct sequence_rows sequence_fill_next(const struct sequence_rows *rows, struct step *step)
{
    struct sequence *const seq = rows->seq;
    struct sequence_rows next = add_sequence(seq, step);
    add_row(&next, step, step_token_drawn(rows->out_first + rows->n_out_row - 1),
            seq->n_done + rows->n_row);
    want_token(&next, step, seq->n_out + 1);
    return next;
}

/* ---- results out of a step ----------------------------------------------------------------- */

void sequence_trace(const struct sequence_rows *rows, int m, const int32_t *slots,
                    const float *weights, int n_column)
{
    const struct sequence *const seq = rows->seq;
    struct pkm_trace *const trace = &seq->item->trace[m];
    for (int r = 0; r < rows->n_row; r++) {
        const int64_t at = seq->base + seq->n_done + r - seq->trace_base;
        if (at < trace->n_position) {
            continue; /* context that an earlier window has counted */
        }
        CHECK(at == trace->n_position); /* each position of the text once, in order */
        const size_t from = (size_t)r * (size_t)n_column;
        for (int j = 0; trace->count != NULL && j < n_column; j++) {
            const float weight = weights[from + (size_t)j];
            const int32_t slot = slots[from + (size_t)j];
            trace->count[slot]++;
            trace->weight[slot] += (double)weight;
        }
        if (trace->slots != NULL) {
            const size_t to = (size_t)at * (size_t)n_column;
            memcpy(trace->slots + to, slots + from, (size_t)n_column * sizeof *slots);
            memcpy(trace->weights + to, weights + from, (size_t)n_column * sizeof *weights);
        }
        trace->lookups += n_column;
        trace->n_position++;
    }
}

static void copy_top(const struct step *step, int i, int n_top, int64_t at, int32_t *id,
                     float *logprob)
{
    if (n_top > 0) {
        const size_t from = (size_t)i * (size_t)step->limits.n_top_max;
        memcpy(id + at * n_top, step->top_id + from, (size_t)n_top * sizeof *id);
        memcpy(logprob + at * n_top, step->top_logprob + from, (size_t)n_top * sizeof *logprob);
    }
}

/* The outputs of a window. Predictions are appended in the order of the text, also across windows.
 * Blocks leave gaps, whose results stay as they were allocated: 0. */
static struct sequence_result take_scores(const struct sequence_rows *rows, const struct step *step)
{
    struct sequence *const seq = rows->seq;
    struct item *const item = seq->item;
    const struct request *const request = seq->job->request;
    int n = atomic_load_explicit(&item->n_out, memory_order_relaxed);
    int n_target = 0;
    for (int i = rows->out_first; i < rows->out_first + rows->n_out_row; i++) {
        const int64_t at = seq->base + seq->n_done + step->out_row[i] - rows->row_first;
        if (isnan(step->out_logprob[i])) {
            return (struct sequence_result){true, true, FINISH_ERROR, 0};
        }
        if (at == item->n_ids - 1) { /* behind the text: a target */
            item->out_target[n_target++] = step->out_logprob[i];
            continue;
        }
        CHECK(n + item->score_from == at + 1 || (item->block > 0 && n + item->score_from <= at));
        n = (int)(at + 1 - item->score_from);
        item->out_logprob[n] = step->out_logprob[i];
        item->out_rank[n] = step->out_rank[i];
        if (item->out_entropy != NULL) {
            item->out_entropy[n] = step->out_entropy[i];
        }
        copy_top(step, i, n_top_of(seq), n++, item->out_top_id, item->out_top_logprob);
    }
    atomic_store_explicit(&item->n_out, n, memory_order_release);
    struct sequence_result result = {.n_published = rows->n_out_row};
    seq->n_done += rows->n_row;
    if (seq->n_done == seq->n_feed) {
        if (seq->window + 1 < seq->window_end) {
            begin_window(seq, seq->window + 1);
        } else {
            result.over = true;
            result.item_over = seq->window_end == score_item_total(request, item);
            result.finish = result.item_over ? FINISH_LENGTH : FINISH_NONE;
        }
    }
    return result;
}

/* Whether and why the text ends with token, which was just appended. */
static enum finish ending_of(struct sequence *seq, int32_t token, const struct end_ids *ends,
                             char *text, size_t text_max)
{
    const struct sampling *const sampling = &seq->job->request->sampling;
    bool stop = end_ids_have(ends, token) && !sampling->ignore_eos;
    for (int i = 0; i < sampling->n_stop_id; i++) {
        stop = stop || token == sampling->stop_id[i];
    }
    if (stop) {
        seq->item->stop_id = token;
        return FINISH_STOP;
    }
    const struct stop_match match =
        stop_push(&seq->stop, token, seq->n_out >= sampling->min_tokens, text, text_max);
    if (match.index >= 0) {
        seq->item->stop_string = match.index;
        seq->item->stop_begin = match.begin;
        return FINISH_STOP;
    }
    return seq->n_out == item_max_tokens(seq->job->request, seq->item) ? FINISH_LENGTH
                                                                       : FINISH_NONE;
}

/* Appends the token drawn in output i. */
static void append_token(struct sequence *seq, const struct step *step, int i,
                         const struct end_ids *ends, char *text, size_t text_max)
{
    struct item *const item = seq->item;
    const int32_t token = step->out_token[i];
    const int n = seq->n_out++;
    item->out_id[n] = token;
    if (item->out_logprob != NULL) {
        item->out_logprob[n] = step->out_logprob[i];
        item->out_rank[n] = step->out_rank[i];
        copy_top(step, i, seq->job->request->n_top, n, item->out_top_id, item->out_top_logprob);
    }
    sampling_count(&seq->counts, token);
    seq->ending = ending_of(seq, token, ends, text, text_max);
    atomic_store_explicit(&item->n_out, seq->n_out, memory_order_release);
}

static struct sequence_result take_generation(const struct sequence_rows *rows,
                                              const struct step *step, const struct end_ids *ends,
                                              char *text, size_t text_max)
{
    struct sequence *const seq = rows->seq;
    struct item *const item = seq->item;
    const struct request *const request = seq->job->request;
    const bool was_ending = seq->ending != FINISH_NONE;
    struct sequence_result result = {0};
    for (int i = rows->out_first; i < rows->out_first + rows->n_out_row; i++) {
        if (isnan(step->out_logprob[i])) {
            return (struct sequence_result){true, true, FINISH_ERROR, 0};
        }
        if ((step->out_want[i] & OUT_SAMPLE) != 0) {
            append_token(seq, step, i, ends, text, text_max);
            result.n_published = 1;
            continue;
        }
        const int64_t at = seq->n_done + step->out_row[i] - rows->row_first + 1;
        item->prompt_logprob[at] = step->out_logprob[i];
        item->prompt_rank[at] = step->out_rank[i];
        copy_top(step, i, request->n_top, at, item->prompt_top_id, item->prompt_top_logprob);
    }
    seq->n_done += rows->n_row;
    if (seq->n_done < seq->n_feed) {
        return result; /* more of the prompt */
    }
    if (item_max_tokens(request, item) == 0) {
        seq->ending = FINISH_LENGTH;
    }
    /* A memory trace covers all positions of the text, so the last token runs through as well. */
    if (seq->ending == FINISH_NONE || (item->traced && !was_ending && seq->n_out > 0)) {
        seq->n_feed = item->n_ids + seq->n_out;
        return result;
    }
    result.over = result.item_over = true;
    result.finish = seq->ending;
    return result;
}

struct sequence_result sequence_consume(const struct sequence_rows *rows, const struct step *step,
                                        const struct model_info *info, char *text, size_t text_max)
{
    rows->seq->item->n_position += rows->n_row;
    return rows->seq->job->request->kind == REQUEST_SCORE
               ? take_scores(rows, step)
               : take_generation(rows, step, &info->ends, text, text_max);
}
