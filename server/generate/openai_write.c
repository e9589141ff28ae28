/* The answers of a completion: see openai.h. */
#include "engine/scoring.h"
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

/* The four arrays, written side by side. */
struct openai_lists {
    const struct generate_job *job;
    const struct tokenizer *tokenizer; /* NULL: tokens are spelled token_id:N */
    struct text tokens, logprobs, tops, offsets;
    struct text keys; /* scratch: spellings of one token's alternatives */
};

static void lists_begin(struct openai_lists *lists, const struct generate_job *job,
                        const struct api_limits *limits)
{
    *lists = (struct openai_lists){
        .job = job, .tokenizer = job->openai.tokens_as_ids ? NULL : limits->tokenizer};
}

static void lists_end(struct openai_lists *lists)
{
    text_free(&lists->tokens);
    text_free(&lists->logprobs);
    text_free(&lists->tops);
    text_free(&lists->offsets);
    text_free(&lists->keys);
}

/* Appends a spelling to keys and tells where it ends. */
static size_t lists_spell(struct openai_lists *lists, int32_t id, int32_t before)
{
    lists->keys.comma = false;
    answer_put_spelling(&lists->keys, lists->tokenizer, id, before);
    return lists->keys.n;
}

/* Whether spelling i of keys, which end at end[], equals spelling j. */
static bool lists_same(const struct openai_lists *lists, const size_t *end, int i, int j)
{
    const size_t from_i = i > 0 ? end[i - 1] : 0;
    const size_t from_j = j > 0 ? end[j - 1] : 0;
    const size_t bytes = end[i] - from_i;
    return bytes == end[j] - from_j &&
           memcmp(lists->keys.data + from_i, lists->keys.data + from_j, bytes) == 0;
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
static void lists_put_tops(struct openai_lists *lists, const struct answer_token *token, int k)
{
    size_t end[OPENAI_TOP_MAX + 1];
    CHECK(k <= OPENAI_TOP_MAX);
    text_clear(&lists->keys);
    end[0] = lists_spell(lists, token->id, token->before);
    bool listed = false;
    for (int j = 0; j < k; j++) {
        end[j + 1] = lists_spell(lists, token->top_id[j], token->before);
        listed = listed || token->top_id[j] == token->id;
    }
    if (lists->keys.failed) {
        lists->tops.failed = true;
        return;
    }
    const char *const keys = lists->keys.data;
    json_open(&lists->tops, '{');
    for (int j = 0; j < k; j++) {
        bool taken = false;
        for (int i = 0; i <= j && !taken && token->top_id[j] != token->id; i++) {
            taken = lists_same(lists, end, i, j + 1);
        }
        if (taken) {
            char key[32];
            const int n = snprintf(key, sizeof key, "\"token_id:%d\"", token->top_id[j]);
            tops_put(&lists->tops, key, (size_t)n, token->top_logprob[j]);
        } else {
            tops_put(&lists->tops, keys + end[j], end[j + 1] - end[j], token->top_logprob[j]);
        }
    }
    if (!listed) {
        tops_put(&lists->tops, keys, end[0], token->logprob);
    }
    json_close(&lists->tops, '}');
}

static void lists_put(void *ctx, const struct answer_token *token)
{
    struct openai_lists *const lists = ctx;
    const int asked = lists->job->logprobs;
    if (token->added && lists->tokenizer != NULL) {
        json_put_string(&lists->tokens, ""); /* so that each token stands at its offset */
    } else {
        answer_put_spelling(&lists->tokens, lists->tokenizer, token->id, token->before);
    }
    json_put_int(&lists->offsets, token->offset >= 0 ? token->offset : 0);
    if (token->first) {
        json_put_null(&lists->logprobs);
        json_put_null(&lists->tops);
        return;
    }
    json_put_float(&lists->logprobs, shown(token->logprob));
    lists_put_tops(lists, token, token->n_top < asked ? token->n_top : asked);
}

/* "logprobs", null if they were not asked for. */
static void lists_write(struct text *out, const struct openai_lists *lists)
{
    json_key(out, "logprobs");
    if (lists->job->logprobs < 0) {
        json_put_null(out);
        return;
    }
    json_open(out, '{');
    json_field_list(out, "tokens", &lists->tokens);
    json_field_list(out, "token_logprobs", &lists->logprobs);
    json_field_list(out, "top_logprobs", &lists->tops);
    json_field_list(out, "text_offset", &lists->offsets);
    json_close(out, '}');
}

/* ---- the prompt's own log-probabilities ---------------------------------------------------- */

/* vLLM's "prompt_logprobs": per token null or an object from ids to what is known of them. */
struct openai_prompt {
    struct text *out;
    const struct generate_job *job;
    const struct tokenizer *tokenizer;
};

static void prompt_put_id(const struct openai_prompt *prompt, int32_t id, int32_t before,
                          float logprob, int32_t rank)
{
    char key[16];
    (void)snprintf(key, sizeof key, "%d", id);
    json_key(prompt->out, key);
    json_open(prompt->out, '{');
    json_field_float(prompt->out, "logprob", shown(logprob));
    json_field_int(prompt->out, "rank", rank);
    json_key(prompt->out, "decoded_token");
    answer_put_spelling(prompt->out, prompt->tokenizer, id, before);
    json_close(prompt->out, '}');
}

static void prompt_put(void *ctx, const struct answer_token *token)
{
    const struct openai_prompt *const prompt = ctx;
    const int asked = prompt->job->prompt_logprobs;
    if (token->first) {
        json_put_null(prompt->out);
        return;
    }
    json_open(prompt->out, '{');
    prompt_put_id(prompt, token->id, token->before, token->logprob, token->rank);
    for (int j = 0; j < asked && j < token->n_top; j++) {
        if (token->top_id[j] != token->id) {
            prompt_put_id(prompt, token->top_id[j], token->before, token->top_logprob[j], j + 1);
        }
    }
    json_close(prompt->out, '}');
}

static bool write_prompt_logprobs(struct text *out, const struct generate_job *job, int index,
                                  const struct api_limits *limits, struct api_error *error)
{
    struct openai_prompt prompt = {out, job, limits->tokenizer};
    const struct generate_sink sink = {prompt_put, &prompt};
    json_key(out, "prompt_logprobs");
    json_open(out, '[');
    const bool ok = generate_walk_prompt(job, index, 0, limits->tokenizer, &sink, error);
    json_close(out, ']');
    return ok;
}

/* ---- one choice ---------------------------------------------------------------------------- */

/* Text and log-probabilities of the echoed prompt. A BOS that the server put in front is no token
 * of the prompt: who counts tokens, as lm-eval does, would read one too far to the left. */
static bool walk_echo(struct text *text, struct openai_lists *lists, int index,
                      const struct api_limits *limits, struct api_error *error)
{
    const struct generate_job *const job = lists->job;
    const struct generate_sink sink = {lists_put, lists};
    return answer_input_text(text, generate_input(job, index), job->request->item[index].ids,
                             limits->tokenizer, error) &&
           (job->logprobs < 0 ||
            generate_walk_prompt(job, index,
                                 job->openai.echo_bos ? 0 : generate_input(job, index)->n_bos,
                                 limits->tokenizer, &sink, error));
}

/* "memory" of a choice that is over, if it was asked for. */
static bool write_memory(struct text *out, const struct generate_job *job, const struct item *item,
                         const struct api_limits *limits, struct api_error *error)
{
    return job->memory == MEMORY_OFF ||
           answer_memory(out, job->request, item, limits->info, job->memory, &job->slots, 0, error);
}

static void write_ids(struct text *out, const struct generate_job *job, const struct item *item,
                      bool prompt, int from, int n)
{
    if (job->openai.ids && prompt) {
        generate_write_ids(out, "prompt_token_ids", item->ids, item->n_ids);
    }
    if (job->openai.ids) {
        generate_write_ids(out, "token_ids", item->out_id + from, n);
    }
}

static bool write_choice(struct text *out, struct openai_lists *lists, int index,
                         const struct api_limits *limits, struct api_error *error)
{
    const struct generate_job *const job = lists->job;
    const struct item *const item = &job->request->item[index];
    const struct generate_sink sink = {lists_put, lists};
    struct text text = {0};
    bool ok = !job->echo || walk_echo(&text, lists, index, limits, error);
    const int64_t n_before = text_count_chars(text.data != NULL ? text.data : "", text.n);
    ok = ok && generate_walk(&text, job, index, n_before, limits, job->logprobs >= 0 ? &sink : NULL,
                             error);
    json_open(out, '{');
    json_field_int(out, "index", index);
    json_key(out, "text");
    json_string_n(out, text.data, text.n);
    out->failed = out->failed || text.failed;
    text_free(&text);
    lists_write(out, lists);
    generate_write_finish(out, item, &job->request->sampling);
    write_ids(out, job, item, true, 0, atomic_load(&item->n_out));
    if (ok && job->prompt_logprobs >= 0) {
        ok = write_prompt_logprobs(out, job, index, limits, error);
    }
    ok = ok && write_memory(out, job, item, limits, error);
    json_close(out, '}');
    return ok;
}

/* ---- the whole ----------------------------------------------------------------------------- */

static void write_head(struct text *out, const struct api_limits *limits,
                       const struct answer_meta *meta)
{
    answer_head(out, meta, "text_completion");
    json_field_string(out, "system_fingerprint", limits->fingerprint);
}

bool openai_write(struct text *out, const struct generate_job *job, int item,
                  const struct api_limits *limits, const struct answer_meta *meta,
                  struct api_error *error)
{
    if (item == 0) {
        json_open(out, '{');
        write_head(out, limits, meta);
        json_key(out, "choices");
        json_open(out, '[');
    }
    struct openai_lists lists;
    lists_begin(&lists, job, limits);
    const bool ok = write_choice(out, &lists, item, limits, error);
    lists_end(&lists);
    if (item == job->request->n_item - 1) {
        json_close(out, ']');
        answer_usage(out, job->request, generate_n_prompt(job), generate_n_completion(job));
        json_close(out, '}');
    }
    return ok;
}

/* ---- events -------------------------------------------------------------------------------- */

/* The one choice of a chunk: what is new, and how it ended if it has. */
static bool write_delta(struct text *out, struct openai_lists *lists,
                        const struct generate_event *event, const struct api_limits *limits,
                        struct api_error *error)
{
    const struct generate_job *const job = lists->job;
    const struct item *const item = &job->request->item[event->item];
    struct text text = {0};
    bool ok = !event->first || !job->echo || walk_echo(&text, lists, event->item, limits, error);
    if (event->token >= 0 && job->logprobs >= 0) {
        const struct answer_token token = generate_token(
            job, item, event->token, event->offset >= 0 ? event->n_before + event->offset : -1);
        lists_put(lists, &token);
    }
    text_add(&text, event->text->data, event->text->n);
    text_add(&text, event->rest->data, event->rest->n);
    json_open(out, '{');
    json_field_int(out, "index", event->item);
    json_key(out, "text");
    json_string_n(out, text.data, text.n);
    out->failed = out->failed || text.failed;
    text_free(&text);
    lists_write(out, lists);
    if (event->last) {
        generate_write_finish(out, item, &job->request->sampling);
        const int n_told = event->token >= 0 ? event->token : atomic_load(&item->n_out);
        ok = ok && generate_write_memory(out, job, item, n_told, true, limits, error);
    } else {
        json_field_null(out, "finish_reason");
        json_field_null(out, "stop_reason");
        ok = ok && (event->token < 0 ||
                    generate_write_memory(out, job, item, event->token, false, limits, error));
    }
    write_ids(out, job, item, event->first, event->token >= 0 ? event->token : 0,
              event->token >= 0 ? 1 : 0);
    json_close(out, '}');
    return ok;
}

bool openai_write_event(struct text *out, const struct generate_job *job,
                        const struct generate_event *event, const struct api_limits *limits,
                        const struct answer_meta *meta, struct api_error *error)
{
    struct openai_lists lists;
    lists_begin(&lists, job, limits);
    generate_event_open(out);
    write_head(out, limits, meta);
    json_key(out, "choices");
    json_open(out, '[');
    const bool ok = write_delta(out, &lists, event, limits, error);
    json_close(out, ']');
    lists_end(&lists);
    if (job->openai.usage_always) {
        const int n_out = atomic_load(&job->request->item[event->item].n_out);
        answer_usage(out, NULL, generate_input(job, event->item)->n_ids,
                     event->token >= 0 ? event->token + 1 : n_out);
    } else if (job->openai.usage) {
        json_field_null(out, "usage");
    }
    generate_event_close(out);
    if (ok && event->all && job->openai.usage) {
        generate_event_open(out);
        write_head(out, limits, meta);
        json_key(out, "choices");
        json_open(out, '[');
        json_close(out, ']');
        answer_usage(out, job->request, generate_n_prompt(job), generate_n_completion(job));
        generate_event_close(out);
    }
    return ok;
}
