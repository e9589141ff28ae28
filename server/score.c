/* The figures and the answer of scoring: see score.h. */
#include "server/score.h"

#include <math.h>

int64_t score_n_prompt(const struct score_job *job)
{
    int64_t n = 0;
    for (int i = 0; i < job->inputs.n; i++) {
        n += job->inputs.input[i].n_ids;
    }
    return n;
}

int64_t score_n_window(const struct score_job *job, int item)
{
    return score_window_count(job->inputs.input[item].n_ids, 1, job->request->window,
                              job->request->stride);
}

/* ---- figures ------------------------------------------------------------------------------- */

/* NaN where the figure is not defined: nothing scored, an impossible token, an unknown count. */
void score_figures_derive(struct score_figures *f)
{
    const double nll = f->impossible ? (double)NAN : -f->sum_logprob;
    const double ln2 = 0.693147180559945309417232121458176568;
    f->mean_nll = f->n_scored > 0 ? nll / (double)f->n_scored : (double)NAN;
    f->perplexity = exp(f->mean_nll);
    f->bits_per_token = f->mean_nll / ln2;
    const bool has_bytes = f->n_scored > 0 && f->n_bytes > 0;
    f->bits_per_byte = has_bytes ? nll / ((double)f->n_bytes * ln2) : (double)NAN;
    f->byte_perplexity = has_bytes ? exp(nll / (double)f->n_bytes) : (double)NAN;
    const bool has_words = f->n_scored > 0 && f->n_words > 0;
    f->word_perplexity = has_words ? exp(nll / (double)f->n_words) : (double)NAN;
}

bool score_figures_item(struct score_figures *figures, const struct score_job *job, int item,
                        const struct tokenizer *tokenizer, struct api_error *error)
{
    const struct input *const input = &job->inputs.input[item];
    const struct score_sum sum = score_sum_item(&job->request->item[item]);
    *figures = (struct score_figures){.n_items = 1,
                                      .n_tokens = input->n_ids - input->n_bos,
                                      .n_scored = sum.n_scored,
                                      .n_bytes = -1,
                                      .n_chars = -1,
                                      .n_words = -1,
                                      .sum_logprob = sum.sum_logprob,
                                      .min_logprob = sum.min_logprob,
                                      .is_greedy = sum.is_greedy,
                                      .impossible = sum.impossible,
                                      .nan = sum.nan};
    if (tokenizer != NULL) {
        struct text text = {0};
        if (!answer_input_text(&text, input, job->request->item[item].ids, tokenizer, error)) {
            text_free(&text);
            return false;
        }
        const char *const data = text.data != NULL ? text.data : "";
        figures->n_bytes = (int64_t)text.n;
        figures->n_chars = text_count_chars(data, text.n);
        figures->n_words = text_count_words(data, text.n);
        text_free(&text);
    }
    const struct score_units *const units = &job->units[item];
    figures->n_bytes = units->bytes > 0 ? units->bytes : figures->n_bytes;
    figures->n_words = units->words > 0 ? units->words : figures->n_words;
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
    pool->n_bytes = add_known(pool->n_bytes, item->n_bytes);
    pool->n_chars = add_known(pool->n_chars, item->n_chars);
    pool->n_words = add_known(pool->n_words, item->n_words);
    pool->sum_logprob += item->sum_logprob;
    pool->impossible = pool->impossible || item->impossible;
    pool->nan = pool->nan || item->nan;
}

/* ---- the answer ---------------------------------------------------------------------------- */

static void put_count(struct text *out, const char *name, int64_t n)
{
    json_key(out, name);
    if (n >= 0) {
        json_put_int(out, n);
    } else {
        json_put_null(out);
    }
}

static void write_tokens(struct text *out, const struct score_job *job, int index,
                         struct answer_walk *walk)
{
    const struct request *const request = job->request;
    const struct item *const item = &request->item[index];
    const struct input *const input = &job->inputs.input[index];
    const int n_top = request->n_top;
    json_key(out, "tokens");
    json_open(out, '[');
    for (int64_t i = input->n_bos; i < item->n_ids; i++) {
        const int64_t at = i - 1; /* prediction at is that of token at + 1 */
        struct answer_token token = {.id = item->ids[i],
                                     .offset =
                                         answer_walk_next(walk, i - input->n_bos, item->ids[i]),
                                     .first = i == 0,
                                     .has_rank = job->ranks,
                                     .has_entropy = request->entropy,
                                     .n_top = job->logprobs >= 0 ? n_top : -1};
        if (i > 0) {
            token.logprob = item->out_logprob[at];
            token.rank = item->out_rank[at];
            token.entropy = request->entropy ? item->out_entropy[at] : 0;
        }
        if (i > 0 && n_top > 0) {
            token.top_id = item->out_top_id + at * n_top;
            token.top_logprob = item->out_top_logprob + at * n_top;
        }
        answer_put_token(out, walk->tokenizer, &token);
    }
    json_close(out, ']');
}

static void write_figures(struct text *out, const struct score_figures *f)
{
    json_field_int(out, "n_tokens", f->n_tokens);
    json_field_int(out, "n_scored", f->n_scored);
    put_count(out, "n_bytes", f->n_bytes);
    put_count(out, "n_chars", f->n_chars);
    put_count(out, "n_words", f->n_words);
    json_field_double(out, "sum_logprob", f->sum_logprob); /* -infinity is written as null */
    json_field_double(out, "mean_nll", f->mean_nll);
    json_field_double(out, "perplexity", f->perplexity);
    json_field_double(out, "bits_per_token", f->bits_per_token);
    json_field_double(out, "bits_per_byte", f->bits_per_byte);
    json_field_double(out, "byte_perplexity", f->byte_perplexity);
    json_field_double(out, "word_perplexity", f->word_perplexity);
    json_field_bool(out, "is_greedy", f->is_greedy);
    json_field_double(out, "min_logprob", f->n_scored > 0 ? f->min_logprob : (double)NAN);
    if (f->impossible) {
        json_field_bool(out, "impossible", true);
    }
}

static bool write_result(struct text *out, const struct score_job *job, int index,
                         const struct api_limits *limits, struct score_figures *figures,
                         struct api_error *error)
{
    const struct request *const request = job->request;
    const struct item *const item = &request->item[index];
    if (!score_figures_item(figures, job, index, limits->tokenizer, error)) {
        return false;
    }
    if (figures->nan) {
        return api_error_set(error, 500, "numerical_error", NULL,
                             "item %d has a log-probability that is not a number", index);
    }
    json_open(out, '{');
    json_field_int(out, "index", index);
    write_figures(out, figures);
    json_key(out, "windows");
    json_open(out, '{');
    json_field_int(out, "count", score_n_window(job, index));
    json_field_int(out, "max_context", request->window);
    json_field_int(out, "stride", request->stride);
    json_field_int(out, "positions_computed", item->n_position);
    json_close(out, '}');
    if (job->logprobs >= 0 || job->ranks || request->entropy) {
        struct answer_walk walk;
        if (!answer_walk_begin(&walk, &job->inputs.input[index], limits->tokenizer)) {
            return api_error_set(error, 500, "out_of_memory", NULL, "no memory for the answer");
        }
        write_tokens(out, job, index, &walk);
        answer_walk_end(&walk);
    }
    if (job->memory != MEMORY_OFF && !answer_memory(out, item, limits->info, job->memory, error)) {
        return false;
    }
    json_close(out, '}');
    return true;
}

static void write_aggregate(struct text *out, const struct score_figures *pool)
{
    json_key(out, "aggregate");
    json_open(out, '{');
    json_field_int(out, "n_items", pool->n_items);
    json_field_int(out, "n_tokens", pool->n_tokens);
    json_field_int(out, "n_scored", pool->n_scored);
    put_count(out, "n_bytes", pool->n_bytes);
    put_count(out, "n_words", pool->n_words);
    json_field_double(out, "sum_logprob", pool->sum_logprob);
    json_field_double(out, "perplexity", pool->perplexity);
    json_field_double(out, "bits_per_byte", pool->bits_per_byte);
    json_field_double(out, "word_perplexity", pool->word_perplexity);
    json_close(out, '}');
}

bool score_write(struct text *out, const struct score_job *job, const struct api_limits *limits,
                 const struct answer_meta *meta, struct api_error *error)
{
    if (!answer_check(job->request, error)) {
        return false;
    }
    json_open(out, '{');
    answer_head(out, meta, "score");
    json_key(out, "results");
    json_open(out, '[');
    struct score_figures pool = {0};
    for (int i = 0; i < job->request->n_item; i++) {
        struct score_figures figures;
        if (!write_result(out, job, i, limits, &figures, error)) {
            return false;
        }
        score_figures_add(&pool, &figures);
    }
    json_close(out, ']');
    score_figures_derive(&pool);
    write_aggregate(out, &pool);
    answer_usage(out, score_n_prompt(job), 0);
    answer_timings(out, job->request, meta->begin_us, score_n_prompt(job), 0);
    json_close(out, '}');
    return true;
}
