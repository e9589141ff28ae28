/* One running unit: see sequence.h. */
#include "engine/sequence.h"

#include "engine/request.h"

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

int64_t sequence_window_total(const struct request *request, const struct item *item)
{
    const int64_t n = score_window_count(item->n_ids, request->window, request->stride);
    if (item->trace == NULL) {
        return n;
    }
    const bool room =
        n > 0 && score_window_at(item->n_ids, request->window, request->stride, n - 1).n_feed <
                     request->window;
    return room ? n : n + 1;
}

int64_t sequence_position_max(const struct request *request, const struct item *item,
                              int64_t window)
{
    if (request->kind == REQUEST_GENERATE) {
        return item_position_max(request, item);
    }
    if (item->trace != NULL) {
        return item->n_ids < request->window ? item->n_ids : request->window;
    }
    return score_window_at(item->n_ids, request->window, request->stride, window).n_feed;
}

static void begin_window(struct sequence *seq, int64_t k)
{
    const struct request *const request = seq->job->request;
    const int64_t n_ids = seq->item->n_ids;
    const int64_t n = score_window_count(n_ids, request->window, request->stride);
    seq->window = k;
    seq->n_done = 0;
    if (k == n) { /* the trace's own: the last token with as much context as fits */
        seq->n_feed = n_ids < request->window ? n_ids : request->window;
        seq->base = n_ids - seq->n_feed;
        seq->count_from = seq->count_end = seq->n_feed;
        return;
    }
    const struct score_window w = score_window_at(n_ids, request->window, request->stride, k);
    seq->base = w.first;
    seq->n_feed = w.n_feed;
    seq->count_end = w.n_feed;
    seq->count_from = w.n_feed - w.n_count;
    if (seq->item->trace != NULL && k == n - 1 && w.n_feed < request->window) {
        seq->n_feed++; /* the last token, which predicts nothing */
    }
}

/* ---- start --------------------------------------------------------------------------------- */

void sequence_start(struct sequence *seq, struct job *job, struct item *item, int64_t window,
                    const struct model_info *info, const struct tokenizer *tokenizer,
                    int64_t now_us)
{
    const struct request *const request = job->request;
    CHECK(seq->job == NULL);
    seq->job = job;
    seq->item = item;
    seq->n_done = 0;
    seq->n_out = 0;
    seq->ending = FINISH_NONE;
    seq->start_us = now_us;
    seq->first_us = seq->last_us = 0;
    seq->n_row = seq->n_out_row = 0;
    if (request->kind == REQUEST_SCORE) {
        seq->window_end = item->trace != NULL ? sequence_window_total(request, item) : window + 1;
        begin_window(seq, window);
        return;
    }
    seq->base = 0;
    seq->n_feed = item->n_ids;
    sampling_begin(&seq->counts, &request->sampling, item->ids, item->n_ids, info->eos_id);
    stop_begin(&seq->stop, &request->sampling, tokenizer);
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

static int32_t token_at(const struct sequence *seq, int64_t position)
{
    const int64_t at = seq->base + position;
    return at < seq->item->n_ids ? seq->item->ids[at] : seq->item->out_id[at - seq->item->n_ids];
}

/* Adds an output for the step's row. */
static void want_output(struct sequence *seq, struct step *step, int row, int want, int32_t target)
{
    CHECK(step->n_out < step->limits.n_out_max);
    const int i = step->n_out++;
    const int n_top = seq->job->request->n_top;
    step->out_row[i] = row;
    step->out_want[i] = (uint8_t)(want | (n_top > 0 ? OUT_TOP : 0));
    step->target[i] = target;
    step->n_top = n_top > step->n_top ? n_top : step->n_top;
    seq->n_out_row++;
}

/* What is wanted of the row at this position, if anything. */
static void fill_output(struct sequence *seq, struct step *step, int row, int64_t position)
{
    const struct request *const request = seq->job->request;
    const struct item *const item = seq->item;
    if (request->kind == REQUEST_SCORE) {
        if (position >= seq->count_from && position < seq->count_end) {
            want_output(seq, step, row, OUT_LOGPROB | (request->entropy ? OUT_ENTROPY : 0),
                        item->ids[seq->base + position + 1]);
        }
    } else if (position + 1 < item->n_ids) {
        if (item->prompt_logprob != NULL) {
            want_output(seq, step, row, OUT_LOGPROB, item->ids[position + 1]);
        }
    } else if (seq->ending == FINISH_NONE && request->sampling.max_tokens > 0) {
        /* The log-probability is taken also where nobody asked for it: it is what tells a
         * distribution that is not one. */
        want_output(seq, step, row, OUT_SAMPLE | OUT_LOGPROB, TARGET_SAMPLED);
        sampling_fill(&seq->counts, &request->sampling, item, seq->n_out, step, step->n_out - 1);
    }
}

void sequence_fill(struct sequence *seq, struct step *step, int n_row)
{
    CHECK(n_row >= 1 && n_row <= sequence_rows(seq));
    CHECK(n_row <= step->limits.n_tok_max - step->n_tok && step->n_seq < step->limits.n_seq_max);
    seq->row_first = step->n_tok;
    seq->n_row = n_row;
    seq->out_first = step->n_out;
    seq->n_out_row = 0;
    memcpy(step->page + (size_t)step->n_seq * (size_t)step->limits.n_page_max, seq->page,
           (size_t)seq->n_page * sizeof *seq->page);
    step->seq_first[step->n_seq++] = step->n_tok;
    for (int r = 0; r < n_row; r++) {
        const int64_t position = seq->n_done + r;
        const int row = step->n_tok++;
        step->token[row] = token_at(seq, position);
        step->pos[row] = (int32_t)position;
        step->lang[row] = seq->job->request->lang;
        fill_output(seq, step, row, position);
    }
    step->seq_first[step->n_seq] = step->n_tok;
}

/* ---- results out of a step ----------------------------------------------------------------- */

void sequence_trace(const struct sequence *seq, int m, const int32_t *slots, const float *shares,
                    int n_column)
{
    struct memory_trace *const trace = &seq->item->trace[m];
    const bool scoring = seq->job->request->kind == REQUEST_SCORE;
    for (int r = 0; r < seq->n_row; r++) {
        const int64_t position = seq->n_done + r;
        const int64_t at = seq->base + position;
        if (scoring && position < seq->count_from && at != seq->item->n_ids - 1) {
            continue; /* context that an earlier window has counted */
        }
        CHECK(at == trace->n_position); /* each position of the text once, in order */
        const size_t from = (size_t)(seq->row_first + r) * (size_t)n_column;
        for (int j = 0; j < n_column; j++) {
            const float share = shares[from + (size_t)j];
            const int32_t slot = slots[from + (size_t)j];
            trace->count[slot] += share > 0.0f || share < 0.0f;
            trace->weight[slot] += (double)share;
        }
        if (trace->slots != NULL) {
            const size_t to = (size_t)at * (size_t)n_column;
            memcpy(trace->slots + to, slots + from, (size_t)n_column * sizeof *slots);
            memcpy(trace->shares + to, shares + from, (size_t)n_column * sizeof *shares);
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

/* The outputs of a window: predictions come in the order of the text, also over windows. */
static struct sequence_result take_scores(struct sequence *seq, const struct step *step)
{
    struct item *const item = seq->item;
    const struct request *const request = seq->job->request;
    int n = atomic_load_explicit(&item->n_out, memory_order_relaxed);
    for (int i = seq->out_first; i < seq->out_first + seq->n_out_row; i++, n++) {
        CHECK(n == seq->base + seq->n_done + step->out_row[i] - seq->row_first);
        if (isnan(step->out_logprob[i])) {
            return (struct sequence_result){true, true, FINISH_ERROR, 0};
        }
        item->out_logprob[n] = step->out_logprob[i];
        item->out_rank[n] = step->out_rank[i];
        if (item->out_entropy != NULL) {
            item->out_entropy[n] = step->out_entropy[i];
        }
        copy_top(step, i, request->n_top, n, item->out_top_id, item->out_top_logprob);
    }
    atomic_store_explicit(&item->n_out, n, memory_order_release);
    struct sequence_result result = {.n_published = seq->n_out_row};
    seq->n_done += seq->n_row;
    if (seq->n_done == seq->n_feed) {
        if (seq->window + 1 < seq->window_end) {
            begin_window(seq, seq->window + 1);
        } else {
            result.over = true;
            result.item_over = seq->window_end == sequence_window_total(request, item);
            result.finish = result.item_over ? FINISH_LENGTH : FINISH_NONE;
        }
    }
    return result;
}

/* Whether and why the text ends with token, which was just appended. */
static enum finish ending_of(struct sequence *seq, int32_t token, int eos_id, char *text,
                             size_t text_max)
{
    const struct sampling *const sampling = &seq->job->request->sampling;
    bool stop = token == eos_id && !sampling->ignore_eos;
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
    return seq->n_out == sampling->max_tokens ? FINISH_LENGTH : FINISH_NONE;
}

/* Appends the token drawn in output i. */
static void append_token(struct sequence *seq, const struct step *step, int i, int eos_id,
                         char *text, size_t text_max)
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
    seq->ending = ending_of(seq, token, eos_id, text, text_max);
    atomic_store_explicit(&item->n_out, seq->n_out, memory_order_release);
}

static struct sequence_result take_generation(struct sequence *seq, const struct step *step,
                                              int eos_id, char *text, size_t text_max)
{
    struct item *const item = seq->item;
    const struct request *const request = seq->job->request;
    const bool was_ending = seq->ending != FINISH_NONE;
    struct sequence_result result = {0};
    for (int i = seq->out_first; i < seq->out_first + seq->n_out_row; i++) {
        if (isnan(step->out_logprob[i])) {
            return (struct sequence_result){true, true, FINISH_ERROR, 0};
        }
        if ((step->out_want[i] & OUT_SAMPLE) != 0) {
            append_token(seq, step, i, eos_id, text, text_max);
            result.n_published = 1;
            continue;
        }
        const int64_t at = seq->n_done + step->out_row[i] - seq->row_first + 1;
        item->prompt_logprob[at] = step->out_logprob[i];
        item->prompt_rank[at] = step->out_rank[i];
        copy_top(step, i, request->n_top, at, item->prompt_top_id, item->prompt_top_logprob);
    }
    seq->n_done += seq->n_row;
    if (seq->n_done < seq->n_feed) {
        return result; /* more of the prompt */
    }
    if (request->sampling.max_tokens == 0) {
        seq->ending = FINISH_LENGTH;
    }
    /* A memory trace covers all positions of the text, so the last token runs through as well. */
    if (seq->ending == FINISH_NONE || (item->trace != NULL && !was_ending && seq->n_out > 0)) {
        seq->n_feed = item->n_ids + seq->n_out;
        return result;
    }
    result.over = result.item_over = true;
    result.finish = seq->ending;
    return result;
}

struct sequence_result sequence_take(struct sequence *seq, const struct step *step,
                                     const struct model_info *info, char *text, size_t text_max)
{
    seq->item->n_position += seq->n_row;
    return seq->job->request->kind == REQUEST_SCORE
               ? take_scores(seq, step)
               : take_generation(seq, step, info->eos_id, text, text_max);
}
