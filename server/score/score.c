/* The figures of scoring: see score.h. */
#include "server/score/score.h"

#include "engine/scoring.h"
#include "engine/tokenizer.h"

#include <math.h>
#include <stdlib.h>

struct item *score_item(const struct score_job *job, int result)
{
    return &job->request->item[result * job->n_per];
}

int64_t score_n_prompt(const struct score_job *job)
{
    int64_t n = 0;
    for (int i = 0; i < job->inputs.n; i++) {
        n += job->inputs.input[i].n_ids;
        n += job->n_per == 2 ? 1 + job->inputs.input[i].n_ids - job->entry[i].first : 0;
    }
    return n;
}

/* Infinite with an impossible token; NaN where nothing was scored, or a count is not known. */
void score_figures_derive(struct score_figures *f)
{
    const double nll = -f->sum_logprob;
    const double ln2 = 0.693147180559945309417232121458176568;
    f->accuracy = f->n_scored > 0 ? (double)f->n_best / (double)f->n_scored : (double)NAN;
    f->mean_nll = f->n_scored > 0 ? nll / (double)f->n_scored : (double)NAN;
    f->perplexity = exp(f->mean_nll);
    f->bits_per_token = f->mean_nll / ln2;
    const bool has_bytes = f->n_scored > 0 && f->n_bytes > 0;
    f->bits_per_byte = has_bytes ? nll / ((double)f->n_bytes * ln2) : (double)NAN;
    f->byte_perplexity = has_bytes ? exp(nll / (double)f->n_bytes) : (double)NAN;
    const bool has_chars = f->n_scored > 0 && f->n_chars > 0;
    f->bits_per_char = has_chars ? nll / ((double)f->n_chars * ln2) : (double)NAN;
    const bool has_words = f->n_scored > 0 && f->n_words > 0;
    f->word_perplexity = has_words ? exp(nll / (double)f->n_words) : (double)NAN;
}

/* What the ids of a continuation add to the text of the context's. Tokens with the id between, -1
 * for none, become line feeds. */
static bool ending_text(struct text *out, const struct input *input, const struct item *item,
                        int64_t first, int32_t between, const struct tokenizer *tokenizer,
                        struct api_error *error)
{
    const size_t max = tokenizer_bytes_max(tokenizer) + 16;
    char *const bytes = malloc(max);
    if (bytes == NULL) {
        return api_error_set(error, 500, "out_of_memory", NULL, "no memory for the text");
    }
    struct detok detok;
    detok_begin(&detok, tokenizer, true);
    for (int64_t i = input->n_bos; i < item->n_ids - input->n_eos; i++) {
        if (item->ids[i] == between && between >= 0) {
            text_add(out, bytes, detok_end(&detok, bytes, max));
            text_add(out, "\n", 1);
            detok_begin(&detok, tokenizer, true);
            continue;
        }
        const size_t n = detok_push(&detok, item->ids[i], bytes, max);
        text_add(out, bytes, i >= first ? n : 0);
    }
    text_add(out, bytes, detok_end(&detok, bytes, max));
    free(bytes);
    return true;
}

/* The text that the result is about. */
static bool result_text(struct text *out, const struct score_job *job, int result,
                        const struct api_limits *limits, struct api_error *error)
{
    const struct tokenizer *const tokenizer = limits->tokenizer;
    const struct score_entry *const entry = &job->entry[result];
    const struct input *const input = &job->inputs.input[result];
    if (entry->ending != NULL) {
        text_add(out, entry->ending, entry->ending_bytes);
        return true;
    }
    if (job->scheme ==
        SCORE_SCHEME_SPARSE_MEMORY) { /* documents, between which an end token stands */
        return ending_text(out, input, score_item(job, result), 0, limits->info->eos_id, tokenizer,
                           error);
    }
    return entry->first > input->n_bos
               ? ending_text(out, input, score_item(job, result), entry->first, -1, tokenizer,
                             error)
               : answer_input_text(out, input, score_item(job, result)->ids, tokenizer, error);
}

int64_t score_n_unk(const struct score_job *job, int result, const struct model_info *info)
{
    const struct item *const item = score_item(job, result);
    const int64_t end = item->n_ids - job->inputs.input[result].n_eos;
    int64_t n = 0;
    for (int64_t i = job->entry[result].first; i < end; i++) {
        n += info->unk_id >= 0 && item->ids[i] == info->unk_id;
    }
    return n;
}

int64_t score_count_unknown(const struct score_job *job, const struct model_info *info,
                            int64_t *n_tokens)
{
    int64_t n_unk = 0;
    *n_tokens = 0;
    for (int i = 0; i < job->inputs.n; i++) {
        n_unk += score_n_unk(job, i, info);
        *n_tokens += score_item(job, i)->n_ids - job->entry[i].first;
    }
    return n_unk;
}

bool score_figures_item(struct score_figures *figures, const struct score_job *job, int result,
                        const struct api_limits *limits, struct api_error *error)
{
    const struct tokenizer *const tokenizer = limits->tokenizer;
    const struct score_entry *const entry = &job->entry[result];
    const struct item *const item = score_item(job, result);
    const struct score_sum sum = score_sum_item(item);
    *figures = (struct score_figures){.n_items = 1,
                                      .n_tokens = item->n_ids - entry->first,
                                      .n_scored = sum.n_scored,
                                      .n_unk = score_n_unk(job, result, limits->info),
                                      .n_best = sum.n_best,
                                      .n_bytes = -1,
                                      .n_chars = -1,
                                      .n_words = -1,
                                      .sum_logprob = sum.sum_logprob,
                                      .min_logprob = sum.min_logprob,
                                      .unconditional = (double)NAN,
                                      .is_greedy = sum.is_greedy,
                                      .impossible = sum.impossible,
                                      .nan = sum.nan};
    if (job->n_per == 2) {
        figures->unconditional = score_sum_item(item + 1).sum_logprob;
    }
    /* In blocks some tokens are not scored: a sum over the others is not one over the text. */
    if (tokenizer != NULL && !score_scheme_blocks(job->scheme)) {
        struct text text = {0};
        const bool ok = result_text(&text, job, result, limits, error);
        if (!ok || text.failed) {
            text_free(&text);
            return api_error_set(error, 500, "out_of_memory", NULL, "no memory for the text");
        }
        const char *const data = text.data != NULL ? text.data : "";
        const bool has_ends = job->scheme == SCORE_SCHEME_SPARSE_MEMORY; /* which are no text */
        figures->n_bytes = has_ends ? -1 : (int64_t)text.n;
        figures->n_chars = has_ends ? -1 : text_count_chars(data, text.n);
        figures->n_words =
            has_ends ? text_count_pieces(data, text.n) : text_count_words(data, text.n);
        text_free(&text);
    }
    figures->n_bytes = entry->bytes > 0 ? entry->bytes : figures->n_bytes;
    figures->n_words = entry->words > 0 ? entry->words : figures->n_words;
    score_figures_derive(figures);
    return true;
}

static int64_t add_known(int64_t a, int64_t b)
{
    return a < 0 || b < 0 ? -1 : a + b;
}

void score_figures_add(struct score_figures *pool, const struct score_figures *item)
{
    pool->n_items += item->n_items;
    pool->n_tokens += item->n_tokens;
    pool->n_scored += item->n_scored;
    pool->n_unk += item->n_unk;
    pool->n_best += item->n_best;
    pool->n_bytes = add_known(pool->n_bytes, item->n_bytes);
    pool->n_chars = add_known(pool->n_chars, item->n_chars);
    pool->n_words = add_known(pool->n_words, item->n_words);
    pool->sum_logprob += item->sum_logprob;
    pool->impossible = pool->impossible || item->impossible;
    pool->nan = pool->nan || item->nan;
}

void score_ranking_add(struct score_ranking *ranking, int result,
                       const struct score_figures *figures)
{
    const double sum = figures->sum_logprob;
    /* Where a count is 0 or unknown the quotient is no finite number, and does not compete. */
    const double value[SCORE_MEASURE_N] = {
        [SCORE_SUM] = sum,
        [SCORE_PER_TOKEN] = sum / (double)figures->n_scored,
        [SCORE_PER_CHAR] = figures->n_chars > 0 ? sum / (double)figures->n_chars : (double)NAN,
        [SCORE_PER_BYTE] = figures->n_bytes > 0 ? sum / (double)figures->n_bytes : (double)NAN,
        [SCORE_MUTUAL] = sum - figures->unconditional};
    for (int m = 0; m < SCORE_MEASURE_N; m++) {
        if (isfinite(value[m]) && (ranking->index[m] == 0 || value[m] > ranking->best[m])) {
            ranking->best[m] = value[m];
            ranking->index[m] = result + 1;
        }
    }
}
