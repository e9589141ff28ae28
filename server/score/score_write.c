/* The answer of scoring: see score.h. */
#include "engine/scoring.h"
#include "server/score/score.h"

#include <math.h>
#include <stddef.h>
#include <string.h>

void score_writer_begin(struct score_writer *writer, const struct score_job *job,
                        const struct api_limits *limits)
{
    *writer = (struct score_writer){.job = job, .limits = limits};
}

void score_writer_end(struct score_writer *writer)
{
    answer_walk_end(&writer->walk);
}

/* ---- one result ---------------------------------------------------------------------------- */

static void put_count(struct text *out, const char *name, int64_t n)
{
    json_key(out, name);
    if (n >= 0) {
        json_put_int(out, n);
    } else {
        json_put_null(out);
    }
}

/* The fields of a result that can be chosen, in their order: figures first, then what is larger. */
enum kind { KIND_INT, KIND_COUNT, KIND_DOUBLE, KIND_BOOL, KIND_OWN };
enum {
    FIELD_MIN_LOGPROB = 16,
    FIELD_IMPOSSIBLE,
    FIELD_UNCONDITIONAL,
    FIELD_INDEX,
    FIELD_WINDOWS,
    FIELD_TARGETS,
    FIELD_TOKENS,
    FIELD_MEMORY,
    FIELD_RANKING,
    FIELD_AGGREGATE,
    FIELD_N
};

#define FIGURE(kind, name)                                                                         \
    {                                                                                              \
#name, kind, offsetof(struct score_figures, name)                                          \
    }
static const struct {
    const char *name;
    enum kind kind;
    size_t offset; /* in struct score_figures */
} rows[FIELD_N] = {
    FIGURE(KIND_INT, n_tokens),
    FIGURE(KIND_INT, n_scored),
    FIGURE(KIND_INT, n_unk),
    FIGURE(KIND_COUNT, n_bytes),
    FIGURE(KIND_COUNT, n_chars),
    FIGURE(KIND_COUNT, n_words),
    FIGURE(KIND_DOUBLE, sum_logprob), /* -infinity is written as null */
    FIGURE(KIND_DOUBLE, mean_nll),
    FIGURE(KIND_DOUBLE, perplexity),
    FIGURE(KIND_DOUBLE, bits_per_token),
    FIGURE(KIND_DOUBLE, bits_per_byte),
    FIGURE(KIND_DOUBLE, bits_per_char),
    FIGURE(KIND_DOUBLE, byte_perplexity),
    FIGURE(KIND_DOUBLE, word_perplexity),
    FIGURE(KIND_DOUBLE, accuracy),
    FIGURE(KIND_BOOL, is_greedy),
    [FIELD_MIN_LOGPROB] = {"min_logprob", KIND_OWN, 0},
    [FIELD_IMPOSSIBLE] = {"impossible", KIND_OWN, 0},
    [FIELD_UNCONDITIONAL] = {"unconditional_sum_logprob", KIND_OWN, 0},
    [FIELD_INDEX] = {"index", KIND_OWN, 0},
    [FIELD_WINDOWS] = {"windows", KIND_OWN, 0},
    [FIELD_TARGETS] = {"target_logprobs", KIND_OWN, 0},
    [FIELD_TOKENS] = {"tokens", KIND_OWN, 0},
    [FIELD_MEMORY] = {"memory", KIND_OWN, 0},
    [FIELD_RANKING] = {"ranking", KIND_OWN, 0},
    [FIELD_AGGREGATE] = {"aggregate", KIND_OWN, 0},
};

enum err_code score_fields_read(uint64_t *fields, const char *list, struct err *err)
{
    *fields = 0;
    for (const char *name = list; *name != '\0';) {
        const size_t bytes = strcspn(name, ",");
        int field = 0;
        while (field < FIELD_N &&
               (strlen(rows[field].name) != bytes || memcmp(rows[field].name, name, bytes) != 0)) {
            field++;
        }
        if (field == FIELD_N) {
            return err_set(err, ERR_ARGUMENT,
                           "--fields: '%.*s' is no field of a result of /score: take some of "
                           "perplexity, bits_per_byte, n_tokens, ..., separated by commas",
                           (int)(bytes < 100 ? bytes : 100), name);
        }
        *fields |= UINT64_C(1) << field;
        name += bytes + (name[bytes] == ',');
    }
    return ERR_OK;
}

static bool wants(const struct score_writer *w, int field)
{
    return w->fields == 0 || (w->fields >> field & 1) != 0;
}

static void write_figures(struct text *out, const struct score_writer *w)
{
    const struct score_figures *const f = &w->figures;
    for (int i = 0; i < FIELD_MIN_LOGPROB; i++) {
        const void *const value = (const char *)f + rows[i].offset;
        const char *const name = rows[i].name;
        if (!wants(w, i)) {
            continue;
        }
        switch (rows[i].kind) {
        case KIND_INT: json_field_int(out, name, *(const int64_t *)value); break;
        case KIND_COUNT: put_count(out, name, *(const int64_t *)value); break;
        case KIND_DOUBLE: json_field_double(out, name, *(const double *)value); break;
        case KIND_BOOL: json_field_bool(out, name, *(const bool *)value); break;
        case KIND_OWN: break;
        }
    }
    if (wants(w, FIELD_MIN_LOGPROB)) {
        json_field_float(out, "min_logprob", f->n_scored > 0 ? (float)f->min_logprob : NAN);
    }
    if (f->impossible && wants(w, FIELD_IMPOSSIBLE)) {
        json_field_bool(out, "impossible", true);
    }
}

static void write_windows(struct text *out, const struct score_job *job, const struct item *item)
{
    const struct request *const request = job->request;
    json_key(out, "windows");
    json_open(out, '{');
    json_field_int(out, "count", score_item_window_count(request, item));
    if (score_scheme_blocks(job->scheme)) {
        json_field_null(out, "max_context");
        json_field_null(out, "stride");
    } else if (request->window < ENGINE_TEXT_MAX) {
        json_field_int(out, "max_context", request->window);
        json_field_int(out, "stride", request->stride);
    } else { /* one stream */
        json_field_null(out, "max_context");
        json_field_null(out, "stride");
    }
    json_field_int(out, "positions_computed", item->n_position);
    if (job->scheme != SCORE_SCHEME_OWN) {
        json_field_string(out, "scheme", score_scheme_name(job->scheme));
        json_field_int(out, "bptt", job->bptt);
    }
    json_close(out, '}');
}

static void write_targets(struct text *out, const struct request *request, const struct item *item,
                          const struct tokenizer *tokenizer)
{
    json_key(out, "target_logprobs");
    json_open(out, '[');
    for (int j = 0; j < request->n_target; j++) {
        json_open(out, '{');
        answer_put_piece(out, tokenizer, request->target[j]);
        answer_put_logprob(out, item->out_target[j]);
        json_close(out, '}');
    }
    json_close(out, ']');
}

static bool lists_tokens(const struct score_writer *w)
{
    const struct score_job *const job = w->job;
    return wants(w, FIELD_TOKENS) && (job->logprobs >= 0 || job->ranks || job->request->entropy);
}

/* Everything of a result that stands before its tokens. */
static bool open_result(struct score_writer *w, struct text *out, struct api_error *error)
{
    const struct score_job *const job = w->job;
    const struct request *const request = job->request;
    const struct item *const item = score_item(job, w->result);
    const struct input *const input = &job->inputs.input[w->result];
    if (!score_figures_item(&w->figures, job, w->result, w->limits, error)) {
        return false;
    }
    if (w->figures.nan || (job->n_per == 2 && score_sum_item(item + 1).nan)) {
        return api_error_set(error, 500, "numerical_error", NULL,
                             "item %d has a log-probability that is not a number", w->result);
    }
    json_open(out, '{');
    if (wants(w, FIELD_INDEX)) {
        json_field_int(out, "index", w->result);
    }
    write_figures(out, w);
    if (job->n_per == 2 && wants(w, FIELD_UNCONDITIONAL)) {
        json_field_double(out, "unconditional_sum_logprob", w->figures.unconditional);
    }
    if (wants(w, FIELD_WINDOWS)) {
        write_windows(out, job, item);
    }
    if (request->n_target > 0 && wants(w, FIELD_TARGETS)) {
        write_targets(out, request, item, w->limits->tokenizer);
    }
    w->token = item->n_ids;
    if (lists_tokens(w)) {
        if (!answer_walk_begin(&w->walk, input, w->limits->tokenizer)) {
            return api_error_set(error, 500, "out_of_memory", NULL, "no memory for the answer");
        }
        for (w->token = input->n_bos; w->token < job->entry[w->result].first; w->token++) {
            (void)answer_walk_next(&w->walk, w->token - input->n_bos, item->ids[w->token]);
        }
        json_key(out, "tokens");
        json_open(out, '[');
    }
    w->open = true;
    return true;
}

static void write_token(struct score_writer *w, struct text *out)
{
    const struct score_job *const job = w->job;
    const struct item *const item = score_item(job, w->result);
    const struct input *const input = &job->inputs.input[w->result];
    const int n_top = job->request->n_top;
    const int64_t at = w->token - item->score_from;
    const bool scored = at >= 0 && item->out_rank[at] > 0;
    const int32_t id = item->ids[w->token];
    struct answer_token token = {.id = id,
                                 .before = w->token > 0 ? item->ids[w->token - 1] : -1,
                                 .offset = answer_walk_next(&w->walk, w->token - input->n_bos, id),
                                 .first = !scored,
                                 .has_rank = job->ranks,
                                 .has_entropy = job->request->entropy,
                                 .n_top = job->logprobs >= 0 ? n_top : -1};
    if (scored) {
        token.logprob = item->out_logprob[at];
        token.rank = item->out_rank[at];
        token.entropy = job->request->entropy ? item->out_entropy[at] : 0;
    }
    if (scored && n_top > 0) {
        token.top_id = item->out_top_id + at * n_top;
        token.top_logprob = item->out_top_logprob + at * n_top;
    }
    answer_put_token(out, w->walk.tokenizer, &token);
    w->token++;
}

/* After the last token. */
static void close_tokens(struct score_writer *w, struct text *out)
{
    const struct score_job *const job = w->job;
    if (lists_tokens(w)) {
        json_close(out, ']');
        answer_walk_end(&w->walk);
    }
    if (job->memory != MEMORY_OFF && wants(w, FIELD_MEMORY)) {
        answer_memory_begin(&w->memory, job->request, score_item(job, w->result), w->limits->info,
                            job->memory, &job->slots, 0);
    }
    w->told = true;
}

static void close_result(struct score_writer *w, struct text *out)
{
    json_close(out, '}');
    score_figures_add(&w->pool, &w->figures);
    score_ranking_add(&w->ranking, w->result, &w->figures);
    w->open = false;
    w->told = false;
    w->result++;
}

bool score_writer_next(struct score_writer *writer, struct text *out, size_t enough,
                       struct api_error *error)
{
    if (writer->open) {
        out->comma = writer->comma;
    } else if (!open_result(writer, out, error)) {
        return false;
    }
    const int64_t n_ids = score_item(writer->job, writer->result)->n_ids;
    while (writer->token < n_ids && out->n < enough) {
        write_token(writer, out);
    }
    if (writer->token == n_ids && !writer->told) {
        close_tokens(writer, out);
    }
    if (writer->told && !answer_memory_next(&writer->memory, out, enough, error)) {
        return false;
    }
    if (writer->told && writer->memory.next == ANSWER_MEMORY_OVER) {
        close_result(writer, out);
    }
    writer->comma = out->comma;
    return true;
}

/* ---- all of them --------------------------------------------------------------------------- */

static void write_ranking(struct text *out, const struct score_ranking *ranking, bool mutual)
{
    static const char *const names[SCORE_MEASURE_N] = {"sum", "per_token", "per_char", "per_byte",
                                                       "mutual_information"};
    json_key(out, "ranking");
    json_open(out, '{');
    for (int m = 0; m < SCORE_MEASURE_N; m++) {
        if (m != SCORE_MUTUAL || mutual) {
            put_count(out, names[m], ranking->index[m] - 1);
        }
    }
    json_close(out, '}');
}

static void write_aggregate(struct text *out, const struct score_figures *pool)
{
    json_key(out, "aggregate");
    json_open(out, '{');
    json_field_int(out, "n_items", pool->n_items);
    json_field_int(out, "n_tokens", pool->n_tokens);
    json_field_int(out, "n_scored", pool->n_scored);
    json_field_int(out, "n_unk", pool->n_unk);
    put_count(out, "n_bytes", pool->n_bytes);
    put_count(out, "n_words", pool->n_words);
    json_field_double(out, "sum_logprob", pool->sum_logprob);
    json_field_double(out, "perplexity", pool->perplexity);
    json_field_double(out, "bits_per_token", pool->bits_per_token);
    json_field_double(out, "bits_per_byte", pool->bits_per_byte);
    json_field_double(out, "bits_per_char", pool->bits_per_char);
    json_field_double(out, "word_perplexity", pool->word_perplexity);
    json_field_double(out, "accuracy", pool->accuracy);
    json_close(out, '}');
}

void score_writer_tail(struct score_writer *writer, struct text *out,
                       const struct answer_meta *meta)
{
    const struct score_job *const job = writer->job;
    const int64_t n_prompt = score_n_prompt(job);
    if (job->form == SCORE_RANKING && wants(writer, FIELD_RANKING)) {
        write_ranking(out, &writer->ranking, job->n_per == 2);
    }
    if (wants(writer, FIELD_AGGREGATE)) {
        score_figures_derive(&writer->pool);
        write_aggregate(out, &writer->pool);
    }
    if (meta->bare) {
        return;
    }
    answer_usage(out, job->request, n_prompt, 0);
    answer_timings(out, job->request, meta->begin_us, n_prompt, 0);
}

bool score_write_piece(struct score_writer *writer, struct text *out, size_t enough,
                       const struct answer_meta *meta, bool *done, struct api_error *error)
{
    const struct score_job *const job = writer->job;
    if (!writer->begun) {
        if (!answer_check(job->request, error)) {
            return false;
        }
        json_open(out, '{');
        answer_head(out, meta, "score");
        json_key(out, "results");
        json_open(out, '[');
        writer->begun = true;
    } else if (!writer->open) {
        out->comma = writer->list_comma;
    }
    int64_t n_lookup = 0;
    while (writer->result < job->inputs.n && out->n < enough && n_lookup < ANSWER_PIECE_LOOKUPS) {
        const struct item *const item = score_item(job, writer->result);
        if (!score_writer_next(writer, out, enough, error)) {
            return false;
        }
        n_lookup +=
            enough == SIZE_MAX || writer->open ? 0 : answer_lookups(item, writer->limits->info);
    }
    writer->list_comma = out->comma;
    *done = writer->result == job->inputs.n;
    if (*done) {
        json_close(out, ']');
        score_writer_tail(writer, out, meta);
        json_close(out, '}');
    }
    return true;
}

bool score_write(struct text *out, const struct score_job *job, const struct api_limits *limits,
                 const struct answer_meta *meta, struct api_error *error)
{
    struct score_writer writer;
    bool done = false;
    score_writer_begin(&writer, job, limits);
    const bool ok = score_write_piece(&writer, out, SIZE_MAX, meta, &done, error);
    score_writer_end(&writer);
    return ok;
}
