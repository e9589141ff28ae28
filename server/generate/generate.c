/* The native answer of a generation: see generate.h. */
#include "server/generate/generate.h"

#include "engine/scoring.h"
#include "server/io/text_stream.h"

const struct input *generate_input(const struct generate_job *job, int item)
{
    return &job->inputs.input[item / job->n_sample];
}

int64_t generate_n_prompt(const struct generate_job *job)
{
    int64_t n = 0;
    for (int i = 0; i < job->inputs.n; i++) {
        n += job->inputs.input[i].n_ids;
    }
    return n;
}

int64_t generate_n_completion(const struct generate_job *job)
{
    int64_t n = 0;
    for (int i = 0; i < job->request->n_item; i++) {
        n += atomic_load(&job->request->item[i].n_out);
    }
    return n;
}

/* ---- tokens -------------------------------------------------------------------------------- */

struct answer_token generate_token(const struct generate_job *job, const struct item *item, int i,
                                   int64_t offset)
{
    const struct request *const request = job->request;
    const int32_t *const ids = i > 0 ? item->out_id + i : item->ids + item->n_ids;
    struct answer_token token = {.id = item->out_id[i],
                                 .before = i > 0 || item->n_ids > 0 ? ids[-1] : -1,
                                 .offset = offset,
                                 .n_top = -1};
    if (item->out_logprob != NULL) {
        token.logprob = item->out_logprob[i];
    }
    if (job->logprobs >= 0) {
        token.has_bytes = true;
        token.has_rank = true;
        token.rank = item->out_rank[i];
        token.n_top = request->n_top;
    }
    if (token.n_top > 0) {
        token.top_id = item->out_top_id + (int64_t)i * request->n_top;
        token.top_logprob = item->out_top_logprob + (int64_t)i * request->n_top;
    }
    return token;
}

bool generate_walk_prompt(const struct generate_job *job, int item_index, int64_t from,
                          const struct tokenizer *tokenizer, const struct generate_sink *sink,
                          struct api_error *error)
{
    const struct request *const request = job->request;
    const struct item *const item = &request->item[item_index];
    const struct input *const input = generate_input(job, item_index);
    struct answer_walk walk;
    if (!answer_walk_begin(&walk, input, tokenizer)) {
        return api_error_set(error, 500, "out_of_memory", NULL, "no memory for the answer");
    }
    for (int64_t i = from; i < item->n_ids; i++) {
        const bool own = i >= input->n_bos; /* the server's BOS comes before the text */
        const int64_t offset = own ? answer_walk_next(&walk, i - input->n_bos, item->ids[i])
                               : tokenizer != NULL ? 0
                                                   : -1;
        struct answer_token token = {.id = item->ids[i],
                                     .before = i > 0 ? item->ids[i - 1] : -1,
                                     .offset = offset,
                                     .first = i == 0,
                                     .added = !own,
                                     .logprob = item->prompt_logprob[i],
                                     .has_bytes = true,
                                     .has_rank = true,
                                     .rank = item->prompt_rank[i],
                                     .n_top = request->n_top};
        if (request->n_top > 0) {
            token.top_id = item->prompt_top_id + i * request->n_top;
            token.top_logprob = item->prompt_top_logprob + i * request->n_top;
        }
        sink->put(sink->ctx, &token);
    }
    answer_walk_end(&walk);
    return true;
}

bool generate_walk(struct text *text, const struct generate_job *job, int item_index,
                   int64_t n_before, const struct api_limits *limits,
                   const struct generate_sink *sink, struct api_error *error)
{
    const struct item *const item = &job->request->item[item_index];
    const int n_out = atomic_load(&item->n_out);
    const enum finish state = (enum finish)atomic_load(&item->state);
    struct text_stream gen = {0};
    if (!text_stream_begin(&gen, job->request, item, limits->tokenizer, &limits->info->ends)) {
        return api_error_set(error, 500, "out_of_memory", NULL, "no memory for the answer");
    }
    for (int i = 0; i < n_out; i++) {
        const int64_t offset = text_stream_push(&gen, state, n_out, text);
        if (sink != NULL) {
            struct answer_token token =
                generate_token(job, item, i, offset >= 0 ? n_before + offset : -1);
            token.fresh = gen.buffer;
            token.n_fresh = gen.n_fresh;
            sink->put(sink->ctx, &token);
        }
    }
    text_stream_flush(&gen, text);
    text_stream_end(&gen);
    return true;
}

/* ---- choices ------------------------------------------------------------------------------- */

void generate_write_finish(struct text *out, const struct item *item,
                           const struct sampling *sampling)
{
    const bool stop = atomic_load(&item->state) == FINISH_STOP;
    json_field_string(out, "finish_reason", stop ? "stop" : "length");
    json_key(out, "stop_reason");
    if (item->stop_string >= 0) {
        json_string_n(out, sampling->stop[item->stop_string].text,
                      (size_t)sampling->stop[item->stop_string].bytes);
    } else if (item->stop_id >= 0) {
        json_put_int(out, item->stop_id);
    } else {
        json_put_null(out);
    }
}

/* A list of native entries that is being written. */
struct entries {
    struct text *out;
    const struct tokenizer *tokenizer;
};

static void entries_put(void *ctx, const struct answer_token *token)
{
    const struct entries *const entries = ctx;
    answer_put_token(entries->out, entries->tokenizer, token);
}

/* "text" (prompt first with echo) and "logprobs" are made in one walk over the tokens. */
static bool walk_choice(struct text *text, struct text *list, const struct generate_job *job,
                        int index, const struct api_limits *limits, struct api_error *error)
{
    const struct item *const item = &job->request->item[index];
    const struct input *const input = generate_input(job, index);
    struct entries entries = {list, limits->tokenizer};
    const struct generate_sink sink = {entries_put, &entries};
    const bool listed = job->logprobs >= 0;
    if (job->echo && !answer_input_text(text, input, item->ids, limits->tokenizer, error)) {
        return false;
    }
    const int64_t n_before = text_count_chars(text->data != NULL ? text->data : "", text->n);
    if (job->echo && listed &&
        !generate_walk_prompt(job, index, input->n_bos, limits->tokenizer, &sink, error)) {
        return false;
    }
    return generate_walk(text, job, index, n_before, limits, listed ? &sink : NULL, error);
}

static bool write_text_and_logprobs(struct text *out, const struct generate_job *job, int index,
                                    const struct api_limits *limits, struct api_error *error)
{
    const struct item *const item = &job->request->item[index];
    struct text text = {0};
    struct text list = {0};
    const bool ok = walk_choice(&text, &list, job, index, limits, error);
    if (ok) {
        json_key(out, "text");
        if (limits->tokenizer != NULL) {
            json_string_n(out, text.data, text.n);
        } else {
            json_put_null(out);
        }
        json_key(out, "token_ids");
        json_open(out, '[');
        for (int64_t i = job->echo ? generate_input(job, index)->n_bos : item->n_ids;
             i < item->n_ids; i++) {
            json_put_int(out, item->ids[i]);
        }
        for (int i = 0; i < atomic_load(&item->n_out); i++) {
            json_put_int(out, item->out_id[i]);
        }
        json_close(out, ']');
        generate_write_finish(out, item, &job->request->sampling);
        json_key(out, "logprobs");
        if (job->logprobs >= 0) {
            json_open(out, '[');
            text_add(out, list.data, list.n);
            json_close(out, ']');
        } else {
            json_put_null(out);
        }
        out->failed = out->failed || text.failed || list.failed;
    }
    text_free(&text);
    text_free(&list);
    return ok;
}

/* ---- the rest ------------------------------------------------------------------------------ */

void generate_write_ids(struct text *out, const char *name, const int32_t *ids, int64_t n)
{
    json_key(out, name);
    json_open(out, '[');
    for (int64_t i = 0; i < n; i++) {
        json_put_int(out, ids[i]);
    }
    json_close(out, ']');
}

/* What the request came down to: every sampling field with the value that was used. */
static void write_params(struct text *out, const struct generate_job *job)
{
    const struct sampling *const s = &job->request->sampling;
    json_key(out, "params");
    json_open(out, '{');
    json_field_int(out, "max_tokens", s->max_tokens);
    json_field_int(out, "min_tokens", s->min_tokens);
    json_field_setting(out, "temperature", s->temperature);
    json_field_setting(out, "top_p", s->top_p);
    json_field_int(out, "top_k", s->top_k);
    json_field_setting(out, "min_p", s->min_p);
    json_field_setting(out, "typical_p", s->typical_p);
    json_field_setting(out, "repetition_penalty", s->repetition);
    json_field_setting(out, "presence_penalty", s->presence);
    json_field_setting(out, "frequency_penalty", s->frequency);
    json_key(out, "logit_bias");
    json_open(out, '{');
    for (int i = 0; i < s->n_bias; i++) {
        char id[16];
        (void)snprintf(id, sizeof id, "%d", s->bias[i].token);
        json_field_setting(out, id, s->bias[i].bias);
    }
    json_close(out, '}');
    generate_write_ids(out, "allowed_token_ids", s->allow, s->n_allow);
    generate_write_ids(out, "stop_token_ids", s->stop_id, s->n_stop_id);
    json_key(out, "stop");
    json_open(out, '[');
    for (int i = 0; i < s->n_stop; i++) {
        json_string_n(out, s->stop[i].text, (size_t)s->stop[i].bytes);
    }
    json_close(out, ']');
    json_field_bool(out, "ignore_eos", s->ignore_eos);
    json_field_bool(out, "include_stop", s->include_stop);
    json_field_int(out, "n", job->n_sample);
    json_key(out, "seed");
    json_put_uint(out, s->seed);
    json_field_string(out, "priority",
                      job->request->priority == PRIORITY_BULK ? "bulk" : "interactive");
    json_close(out, '}');
}

/* "usage", "seed", "params" (with details) and "timings". */
static void write_tail(struct text *out, const struct generate_job *job,
                       const struct answer_meta *meta)
{
    const struct request *const request = job->request;
    const int64_t n_prompt = generate_n_prompt(job);
    const int64_t n_completion = generate_n_completion(job);
    if (!meta->bare) {
        answer_usage(out, request, n_prompt, n_completion);
    }
    json_key(out, "seed");
    json_put_uint(out, request->sampling.seed);
    if (job->details) {
        write_params(out, job);
    }
    int64_t n_decoded = 0;
    for (int i = 0; i < request->n_item; i++) {
        const int n_out = atomic_load(&request->item[i].n_out);
        n_decoded += n_out > 1 ? n_out - 1 : 0;
    }
    if (meta->bare) {
        return;
    }
    answer_timings(out, request, meta->begin_us, n_prompt, n_decoded);
}

bool generate_write(struct text *out, const struct generate_job *job, int item,
                    const struct api_limits *limits, const struct answer_meta *meta,
                    struct api_error *error)
{
    const struct request *const request = job->request;
    if (item == 0) {
        json_open(out, '{');
        answer_head(out, meta, "generation");
        json_key(out, "choices");
        json_open(out, '[');
    }
    json_open(out, '{');
    json_field_int(out, "index", item);
    if (!write_text_and_logprobs(out, job, item, limits, error)) {
        return false;
    }
    if (job->memory != MEMORY_OFF &&
        !answer_memory(out, request, &request->item[item], limits->info, job->memory, &job->slots,
                       0, error)) {
        return false;
    }
    json_close(out, '}');
    if (item == request->n_item - 1) {
        json_close(out, ']');
        write_tail(out, job, meta);
        json_close(out, '}');
    }
    return true;
}

bool generate_write_items(struct text *out, const struct generate_job *job, int *item,
                          size_t enough, const struct api_limits *limits,
                          const struct answer_meta *meta, struct api_error *error)
{
    out->comma = *item > 0; /* the items are a list */
    bool ok = true;
    int64_t n_lookup = 0;
    while (ok && *item < job->request->n_item && out->n < enough &&
           n_lookup < ANSWER_PIECE_LOOKUPS) {
        ok = job->dialect->write(out, job, *item, limits, meta, error);
        n_lookup +=
            enough == SIZE_MAX ? 0 : answer_lookups(&job->request->item[*item], limits->info);
        ++*item;
    }
    return ok;
}

/* ---- events -------------------------------------------------------------------------------- */

void generate_event_open(struct text *out)
{
    text_puts(out, "data: ");
    out->comma = false;
    json_open(out, '{');
}

void generate_event_close(struct text *out)
{
    json_close(out, '}');
    text_puts(out, "\n\n");
}

/* The prompt, when echo asks for it: its text and, with logprobs, its tokens. */
static bool event_prompt(struct text *out, const struct generate_job *job, int index,
                         const struct api_limits *limits, struct api_error *error)
{
    const struct input *const input = generate_input(job, index);
    struct text text = {0};
    bool ok =
        answer_input_text(&text, input, job->request->item[index].ids, limits->tokenizer, error);
    generate_event_open(out);
    json_field_int(out, "index", index);
    json_key(out, "text");
    json_string_n(out, text.data, text.n);
    if (ok && job->logprobs >= 0) {
        struct entries entries = {out, limits->tokenizer};
        const struct generate_sink sink = {entries_put, &entries};
        json_key(out, "prompt");
        json_open(out, '[');
        ok = generate_walk_prompt(job, index, input->n_bos, limits->tokenizer, &sink, error);
        json_close(out, ']');
    }
    generate_event_close(out);
    out->failed = out->failed || text.failed;
    text_free(&text);
    return ok;
}

bool generate_write_memory(struct text *out, const struct generate_job *job,
                           const struct item *item, int token, bool last,
                           const struct api_limits *limits, struct api_error *error)
{
    /* The step that drew token n read the positions before it: see sequence_trace. */
    const int64_t from = token > 0 ? item->n_ids + token - 1 : 0;
    const struct request *const request = job->request;
    if (last) {
        return job->memory == MEMORY_OFF || answer_memory(out, request, item, limits->info,
                                                          job->memory, &job->slots, from, error);
    }
    if (job->memory != MEMORY_SLOTS || item->n_ids + token <= job->slots.start) {
        return true;
    }
    json_key(out, "memory");
    json_open(out, '{');
    const bool ok = slots_write(out, request, item, limits->info, &job->slots, from,
                                item->n_ids + token, true, error);
    json_close(out, '}');
    return ok;
}

static bool event_token(struct text *out, const struct generate_job *job,
                        const struct generate_event *event, const struct api_limits *limits,
                        struct api_error *error)
{
    const struct item *const item = &job->request->item[event->item];
    const struct answer_token token = generate_token(
        job, item, event->token, event->offset >= 0 ? event->n_before + event->offset : -1);
    generate_event_open(out);
    json_field_int(out, "index", event->item);
    json_key(out, "token");
    answer_put_token(out, limits->tokenizer, &token);
    json_key(out, "text");
    json_string_n(out, event->text->data, event->text->n);
    if (!generate_write_memory(out, job, item, event->token, false, limits, error)) {
        return false;
    }
    generate_event_close(out);
    return true;
}

/* Ends a choice; the last one brings the figures of the whole request. */
static bool event_end(struct text *out, const struct generate_job *job,
                      const struct generate_event *event, const struct api_limits *limits,
                      const struct answer_meta *meta, struct api_error *error)
{
    const struct item *const item = &job->request->item[event->item];
    const int n_told = atomic_load(&item->n_out); /* tokens, each in an event of its own */
    generate_event_open(out);
    json_field_int(out, "index", event->item);
    json_key(out, "text");
    json_string_n(out, event->rest->data, event->rest->n);
    generate_write_finish(out, item, &job->request->sampling);
    if (!generate_write_memory(out, job, item, n_told, true, limits, error)) {
        return false;
    }
    if (event->all) {
        answer_head(out, meta, "generation");
        write_tail(out, job, meta);
    }
    generate_event_close(out);
    return true;
}

bool generate_write_event(struct text *out, const struct generate_job *job,
                          const struct generate_event *event, const struct api_limits *limits,
                          const struct answer_meta *meta, struct api_error *error)
{
    if (event->first && job->echo && !event_prompt(out, job, event->item, limits, error)) {
        return false;
    }
    if (event->token >= 0 && !event_token(out, job, event, limits, error)) {
        return false;
    }
    return !event->last || event_end(out, job, event, limits, meta, error);
}
