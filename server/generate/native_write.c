/* The native answers of generations: see generate.h. */
#include "server/generate/generate_writer.h"

#include <stdio.h>

/* ---- choices ------------------------------------------------------------------------------- */

static void put_entry(struct generate_writer *w, struct text *out, const struct answer_token *token)
{
    answer_put_token(out, w->limits->tokenizer, token);
}

/* The tokens that the text shows: with echo the prompt's, but for a BOS that the server added. */
static struct generate_span shown(const struct generate_writer *w)
{
    return generate_writer_span(w, generate_input(w->job, w->item)->n_bos);
}

static bool open_choice(struct generate_writer *w, struct text *out, struct api_error *error)
{
    if (w->item == 0) {
        json_open(out, '{');
        answer_head(out, w->meta, "generation");
        json_key(out, "choices");
        json_open(out, '[');
    }
    json_open(out, '{');
    json_field_int(out, "index", w->item);
    if (w->limits->tokenizer == NULL) {
        json_field_null(out, "text");
        return true;
    }
    return generate_writer_text(w, out, "text",
                                (w->job->echo ? GENERATE_PROMPT : 0) | GENERATE_OUTPUT, error);
}

static bool list_ids(struct generate_writer *w, struct text *out, struct api_error *error)
{
    return generate_writer_ids(w, out, "token_ids", shown(w), error);
}

static bool list_logprobs(struct generate_writer *w, struct text *out, struct api_error *error)
{
    generate_write_finish(out, generate_writer_item(w), &w->job->request->sampling);
    if (w->job->logprobs < 0) {
        json_field_null(out, "logprobs");
        return true;
    }
    return generate_writer_list(w, out, "logprobs", shown(w), true, put_entry, error);
}

/* ---- the rest ------------------------------------------------------------------------------ */

static void write_ids(struct text *out, const char *name, const int32_t *ids, int64_t n)
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
    write_ids(out, "allowed_token_ids", s->allow, s->n_allow);
    write_ids(out, "stop_token_ids", s->stop_id, s->n_stop_id);
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

static bool close_choice(struct generate_writer *w, struct text *out, struct api_error *error)
{
    const struct generate_job *const job = w->job;
    (void)error;
    json_close(out, '}');
    if (w->item == job->request->n_item - 1) {
        json_close(out, ']');
        write_tail(out, job, w->meta);
        json_close(out, '}');
    }
    return true;
}

generate_part *const native_choice_parts[] = {open_choice,          list_ids,     list_logprobs,
                                              generate_memory_part, close_choice, NULL};

/* ---- events -------------------------------------------------------------------------------- */

/* The prompt, when echo asks for it, has an event of its own: its text and, with logprobs, its
 * tokens. */
static bool tells_prompt(const struct generate_writer *w)
{
    return w->event->first && w->job->echo;
}

static bool event_prompt(struct generate_writer *w, struct text *out, struct api_error *error)
{
    if (!tells_prompt(w)) {
        return true;
    }
    generate_event_open(out);
    json_field_int(out, "index", w->item);
    return generate_writer_text(w, out, "text", GENERATE_PROMPT, error);
}

static bool event_prompt_tokens(struct generate_writer *w, struct text *out,
                                struct api_error *error)
{
    if (!tells_prompt(w) || w->job->logprobs < 0) {
        return true;
    }
    const struct generate_span span = {generate_input(w->job, w->item)->n_bos,
                                       generate_writer_item(w)->n_ids};
    return generate_writer_list(w, out, "prompt", span, true, put_entry, error);
}

static bool event_prompt_end(struct generate_writer *w, struct text *out, struct api_error *error)
{
    (void)error;
    if (tells_prompt(w)) {
        generate_event_close(out);
    }
    return true;
}

static bool event_token(struct generate_writer *w, struct text *out, struct api_error *error)
{
    (void)error;
    const struct generate_event *const event = w->event;
    const struct item *const item = generate_writer_item(w);
    if (event->token < 0) {
        return true;
    }
    const struct answer_token token = generate_token(
        w->job, item, event->token, event->offset >= 0 ? w->n_before + event->offset : -1);
    generate_event_open(out);
    json_field_int(out, "index", w->item);
    json_key(out, "token");
    answer_put_token(out, w->limits->tokenizer, &token);
    json_key(out, "text");
    json_string_n(out, event->text->data, event->text->n);
    generate_writer_slots(w, event->token);
    return true;
}

static bool event_token_end(struct generate_writer *w, struct text *out, struct api_error *error)
{
    (void)error;
    if (w->event->token >= 0) {
        generate_event_close(out);
    }
    return true;
}

/* Ends a choice; the last one brings the figures of the whole request. */
static bool event_last(struct generate_writer *w, struct text *out, struct api_error *error)
{
    (void)error;
    const struct generate_event *const event = w->event;
    const struct item *const item = generate_writer_item(w);
    if (!event->last) {
        return true;
    }
    const int n_told = atomic_load(&item->n_out); /* tokens, each in an event of its own */
    generate_event_open(out);
    json_field_int(out, "index", w->item);
    json_key(out, "text");
    json_string_n(out, event->rest->data, event->rest->n);
    generate_write_finish(out, item, &w->job->request->sampling);
    generate_writer_memory(w, n_told);
    return true;
}

static bool event_last_end(struct generate_writer *w, struct text *out, struct api_error *error)
{
    (void)error;
    if (w->event->all) {
        answer_head(out, w->meta, "generation");
        write_tail(out, w->job, w->meta);
    }
    if (w->event->last) {
        generate_event_close(out);
    }
    return true;
}

generate_part *const native_event_parts[] = {
    event_prompt,    event_prompt_tokens, event_prompt_end, event_token,
    event_token_end, event_last,          event_last_end,   NULL};
