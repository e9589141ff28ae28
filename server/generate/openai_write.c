/* The answers of a completion: see openai.h. */
#include "engine/scoring.h"
#include "server/generate/generate_writer.h"
#include "server/generate/openai.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* Most alternatives of a token: above any --max-logprobs. */
enum { OPENAI_TOP_MAX = 1024 };

static float shown(float logprob)
{
    return isinf(logprob) ? -9999.0f : logprob;
}

/* ---- log-probabilities --------------------------------------------------------------------- */

/* NULL: tokens are spelled token_id:N. */
static const struct tokenizer *speller(const struct generate_writer *w)
{
    return w->job->openai.tokens_as_ids ? NULL : w->limits->tokenizer;
}

/* Appends a spelling to keys and tells where it ends. */
static size_t keys_add(struct text *keys, const struct generate_writer *w, int32_t id,
                       int32_t before)
{
    keys->comma = false;
    answer_put_spelling(keys, speller(w), id, before);
    return keys->n;
}

/* Whether spelling i of keys, which end at end[], equals spelling j. */
static bool keys_same(const struct text *keys, const size_t *end, int i, int j)
{
    const size_t from_i = i > 0 ? end[i - 1] : 0;
    const size_t from_j = j > 0 ? end[j - 1] : 0;
    const size_t bytes = end[i] - from_i;
    return bytes == end[j] - from_j && memcmp(keys->data + from_i, keys->data + from_j, bytes) == 0;
}

/* One member of an object of alternatives; key is a JSON string. */
static void tops_put(struct text *tops, const char *key, size_t key_bytes, float logprob)
{
    if (tops->comma) {
        text_add(tops, ",", 1);
    }
    text_add(tops, key, key_bytes);
    text_add(tops, ":", 1);
    tops->comma = false;
    json_put_float(tops, shown(logprob));
}

/* The k best and the chosen token. Spelling 0 is the chosen one's, 1 + j that of alternative j. */
static void put_tops(struct generate_writer *w, struct text *out, const struct answer_token *token)
{
    if (token->first) {
        json_put_null(out);
        return;
    }
    const int k = token->n_top < w->job->logprobs ? token->n_top : w->job->logprobs;
    struct text *const keys = &w->scratch;
    size_t end[OPENAI_TOP_MAX + 1];
    CHECK(k <= OPENAI_TOP_MAX);
    text_clear(keys);
    end[0] = keys_add(keys, w, token->id, token->before);
    bool listed = false;
    for (int j = 0; j < k; j++) {
        end[j + 1] = keys_add(keys, w, token->top_id[j], token->before);
        listed = listed || token->top_id[j] == token->id;
    }
    if (keys->failed) {
        out->failed = true;
        return;
    }
    json_open(out, '{');
    for (int j = 0; j < k; j++) {
        bool taken = false;
        for (int i = 0; i <= j && !taken && token->top_id[j] != token->id; i++) {
            taken = keys_same(keys, end, i, j + 1);
        }
        if (taken) {
            char key[32];
            const int n = snprintf(key, sizeof key, "\"token_id:%d\"", token->top_id[j]);
            tops_put(out, key, (size_t)n, token->top_logprob[j]);
        } else {
            tops_put(out, keys->data + end[j], end[j + 1] - end[j], token->top_logprob[j]);
        }
    }
    if (!listed) {
        tops_put(out, keys->data, end[0], token->logprob);
    }
    json_close(out, '}');
}

static void put_spelling(struct generate_writer *w, struct text *out,
                         const struct answer_token *token)
{
    if (token->added && speller(w) != NULL) {
        json_put_string(out, ""); /* so that each token stands at its offset */
    } else {
        answer_put_spelling(out, speller(w), token->id, token->before);
    }
}

static void put_logprob(struct generate_writer *w, struct text *out,
                        const struct answer_token *token)
{
    (void)w;
    if (token->first) {
        json_put_null(out);
    } else {
        json_put_float(out, shown(token->logprob));
    }
}

static void put_offset(struct generate_writer *w, struct text *out,
                       const struct answer_token *token)
{
    (void)w;
    json_put_int(out, token->offset >= 0 ? token->offset : 0);
}

/* The tokens that are listed. A BOS that the server put in front is no token of an echoed prompt:
 * who counts tokens, as lm-eval does, would read one too far to the left. */
static struct generate_span all_tokens(const struct generate_writer *w)
{
    return generate_writer_span(
        w, w->job->openai.echo_bos ? 0 : generate_input(w->job, w->item)->n_bos);
}

/* "logprobs", null if they were not asked for, and its first array. */
static bool list_tokens(struct generate_writer *w, struct text *out, struct api_error *error)
{
    json_key(out, "logprobs");
    if (w->job->logprobs < 0) {
        json_put_null(out);
        return true;
    }
    json_open(out, '{');
    return generate_writer_list(w, out, "tokens", all_tokens(w), false, put_spelling, error);
}

static bool list_logprobs(struct generate_writer *w, struct text *out, struct api_error *error)
{
    return w->job->logprobs < 0 ||
           generate_writer_list(w, out, "token_logprobs", all_tokens(w), false, put_logprob, error);
}

static bool list_tops(struct generate_writer *w, struct text *out, struct api_error *error)
{
    return w->job->logprobs < 0 ||
           generate_writer_list(w, out, "top_logprobs", all_tokens(w), false, put_tops, error);
}

static bool list_offsets(struct generate_writer *w, struct text *out, struct api_error *error)
{
    return w->job->logprobs < 0 ||
           generate_writer_list(w, out, "text_offset", all_tokens(w), true, put_offset, error);
}

static void close_logprobs(const struct generate_writer *w, struct text *out)
{
    if (w->job->logprobs >= 0) {
        json_close(out, '}');
    }
}

/* ---- the prompt's own log-probabilities ---------------------------------------------------- */

static void put_prompt_id(const struct generate_writer *w, struct text *out, int32_t id,
                          int32_t before, float logprob, int32_t rank)
{
    char key[16];
    (void)snprintf(key, sizeof key, "%d", id);
    json_key(out, key);
    json_open(out, '{');
    json_field_float(out, "logprob", shown(logprob));
    json_field_int(out, "rank", rank);
    json_key(out, "decoded_token");
    answer_put_spelling(out, w->limits->tokenizer, id, before);
    json_close(out, '}');
}

static void put_prompt(struct generate_writer *w, struct text *out,
                       const struct answer_token *token)
{
    const int asked = w->job->prompt_logprobs;
    if (token->first) {
        json_put_null(out);
        return;
    }
    json_open(out, '{');
    put_prompt_id(w, out, token->id, token->before, token->logprob, token->rank);
    for (int j = 0; j < asked && j < token->n_top; j++) {
        if (token->top_id[j] != token->id) {
            put_prompt_id(w, out, token->top_id[j], token->before, token->top_logprob[j], j + 1);
        }
    }
    json_close(out, '}');
}

/* vLLM's "prompt_logprobs": per token null or an object from ids to what is known of them. */
static bool list_prompt(struct generate_writer *w, struct text *out, struct api_error *error)
{
    return w->job->prompt_logprobs < 0 ||
           generate_writer_list(w, out, "prompt_logprobs", generate_writer_prompt(w), false,
                                put_prompt, error);
}

/* ---- one choice ---------------------------------------------------------------------------- */

static void write_head(struct text *out, const struct generate_writer *w)
{
    answer_head(out, w->meta, "text_completion");
    json_field_string(out, "system_fingerprint", w->limits->fingerprint);
    json_key(out, "choices");
    json_open(out, '[');
}

static bool open_choice(struct generate_writer *w, struct text *out, struct api_error *error)
{
    if (w->item == 0) {
        json_open(out, '{');
        write_head(out, w);
    }
    json_open(out, '{');
    json_field_int(out, "index", w->item);
    return generate_writer_text(w, out, "text",
                                (w->job->echo ? GENERATE_PROMPT : 0) | GENERATE_OUTPUT, error);
}

static bool list_prompt_ids(struct generate_writer *w, struct text *out, struct api_error *error)
{
    return !w->job->openai.ids || (w->event != NULL && !w->event->first) ||
           generate_writer_ids(w, out, "prompt_token_ids", generate_writer_prompt(w), error);
}

static bool list_ids(struct generate_writer *w, struct text *out, struct api_error *error)
{
    return !w->job->openai.ids ||
           generate_writer_ids(w, out, "token_ids", generate_writer_output(w), error);
}

static bool write_finish(struct generate_writer *w, struct text *out, struct api_error *error)
{
    close_logprobs(w, out);
    generate_write_finish(out, generate_writer_item(w), &w->job->request->sampling);
    return list_prompt_ids(w, out, error);
}

static bool close_choice(struct generate_writer *w, struct text *out, struct api_error *error)
{
    const struct generate_job *const job = w->job;
    (void)error;
    json_close(out, '}');
    if (w->item == job->request->n_item - 1) {
        json_close(out, ']');
        answer_usage(out, job->request, generate_n_prompt(job), generate_n_completion(job));
        json_close(out, '}');
    }
    return true;
}

generate_part *const openai_choice_parts[] = {
    open_choice, list_tokens, list_logprobs,        list_tops,    list_offsets, write_finish,
    list_ids,    list_prompt, generate_memory_part, close_choice, NULL};

/* ---- events -------------------------------------------------------------------------------- */

/* A chunk has one choice: what is new, and how it ended if it has. */
static bool open_event(struct generate_writer *w, struct text *out, struct api_error *error)
{
    generate_event_open(out);
    write_head(out, w);
    json_open(out, '{');
    json_field_int(out, "index", w->item);
    return generate_writer_text(
        w, out, "text", (w->job->echo && w->event->first ? GENERATE_PROMPT : 0) | GENERATE_NEWS,
        error);
}

static bool event_finish(struct generate_writer *w, struct text *out, struct api_error *error)
{
    const struct generate_event *const event = w->event;
    const struct item *const item = generate_writer_item(w);
    (void)error;
    close_logprobs(w, out);
    if (event->last) {
        generate_write_finish(out, item, &w->job->request->sampling);
        generate_writer_memory(w, event->token >= 0 ? event->token : atomic_load(&item->n_out));
        return true;
    }
    json_field_null(out, "finish_reason");
    json_field_null(out, "stop_reason");
    if (event->token >= 0) {
        generate_writer_slots(w, event->token);
    }
    return true;
}

static bool close_event(struct generate_writer *w, struct text *out, struct api_error *error)
{
    const struct generate_job *const job = w->job;
    const struct generate_event *const event = w->event;
    (void)error;
    json_close(out, '}');
    json_close(out, ']');
    if (job->openai.usage_always) {
        const int n_out = atomic_load(&generate_writer_item(w)->n_out);
        answer_usage(out, NULL, generate_input(job, w->item)->n_ids,
                     event->token >= 0 ? event->token + 1 : n_out);
    } else if (job->openai.usage) {
        json_field_null(out, "usage");
    }
    generate_event_close(out);
    if (event->all && job->openai.usage) {
        generate_event_open(out);
        write_head(out, w);
        json_close(out, ']');
        answer_usage(out, job->request, generate_n_prompt(job), generate_n_completion(job));
        generate_event_close(out);
    }
    return true;
}

generate_part *const openai_event_parts[] = {open_event,   list_tokens,  list_logprobs,   list_tops,
                                             list_offsets, event_finish, list_prompt_ids, list_ids,
                                             close_event,  NULL};
