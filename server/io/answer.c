/* Pieces of answers: see answer.h. */
#include "server/io/answer.h"

#include "engine/scoring.h"
#include "engine/tokenizer.h"
#include "kernels/utf8.h"
#include "server/io/overlay.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void answer_head(struct text *out, const struct answer_meta *meta, const char *object)
{
    if (meta->id_is_integer) {
        json_key(out, "id");
        json_put_int(out, strtoll(meta->id, NULL, 10));
    } else {
        json_field_string(out, "id", meta->id);
    }
    if (meta->bare) {
        return;
    }
    json_field_string(out, "object", object);
    json_field_int(out, "created", meta->created);
    json_field_string(out, "model", meta->model);
    overlay_put(out, meta->overlays);
}

/* The overlap of a window with another one may be cached as well: an item counts no more tokens
 * than it has. */
static int64_t answer_n_cached(const struct request *request, int64_t n_prompt)
{
    int64_t n = 0;
    for (int i = 0; i < request->n_item; i++) {
        const struct item *const item = &request->item[i];
        if (item->sample_index == 0) {
            n += item->n_own < item->n_ids ? item->n_own : item->n_ids;
        }
    }
    return n < n_prompt ? n : n_prompt;
}

void answer_usage(struct text *out, const struct request *request, int64_t n_prompt,
                  int64_t n_completion)
{
    json_key(out, "usage");
    json_open(out, '{');
    json_field_int(out, "prompt_tokens", n_prompt);
    json_field_int(out, "completion_tokens", n_completion);
    json_field_int(out, "total_tokens", n_prompt + n_completion);
    if (request != NULL) {
        json_key(out, "prompt_tokens_details");
        json_open(out, '{');
        json_field_int(out, "cached_tokens", answer_n_cached(request, n_prompt));
        json_close(out, '}');
    }
    json_close(out, '}');
}

static double answer_ms(int64_t from_us, int64_t to_us)
{
    return from_us != 0 && to_us > from_us ? (double)(to_us - from_us) * 1e-3 : 0;
}

struct answer_times answer_times_of(const struct request *request, int64_t begin_us)
{
    const int64_t submit_us = atomic_load(&request->submit_us);
    const int64_t start_us = atomic_load(&request->start_us);
    const int64_t first_us = atomic_load(&request->first_us);
    const int64_t done_us = atomic_load(&request->done_us);
    const int64_t filled_us = first_us != 0 ? first_us : done_us; /* no token was drawn: prefill
                                                                   * only */
    const bool scoring = request->kind == REQUEST_SCORE;
    return (struct answer_times){.queue_ms = answer_ms(submit_us, start_us),
                                 .prefill_ms = answer_ms(start_us, scoring ? done_us : filled_us),
                                 .decode_ms = scoring ? 0 : answer_ms(first_us, done_us),
                                 .total_ms = answer_ms(begin_us, done_us)};
}

static void answer_rate(struct text *out, const char *name, int64_t n, double ms)
{
    if (ms > 0) {
        json_field_fixed(out, name, (double)n / ms * 1e3);
    } else {
        json_field_null(out, name);
    }
}

void answer_timings(struct text *out, const struct request *request, int64_t begin_us,
                    int64_t n_prompt, int64_t n_decoded)
{
    const struct answer_times times = answer_times_of(request, begin_us);
    json_key(out, "timings");
    json_open(out, '{');
    json_field_fixed(out, "queue_ms", times.queue_ms);
    json_field_fixed(out, "prefill_ms", times.prefill_ms);
    json_field_fixed(out, "decode_ms", times.decode_ms);
    json_field_fixed(out, "total_ms", times.total_ms);
    answer_rate(out, "prompt_per_second", n_prompt, times.prefill_ms);
    answer_rate(out, "predicted_per_second", n_decoded, times.decode_ms);
    json_close(out, '}');
}

int answer_without_number(const struct request *request)
{
    const bool several = request->item[request->n_item - 1].prompt_index > 0;
    for (int i = 0; several && i < request->n_item; i++) {
        if (atomic_load(&request->item[i].state) == FINISH_ERROR) {
            return request->error.code == ERR_NUMERICAL ? request->item[i].prompt_index : -1;
        }
    }
    return -1;
}

static void answer_engine_error(const struct err *err, struct api_error *error)
{
    if (err->code == ERR_NUMERICAL) {
        (void)api_error_set(error, 500, "numerical_error", NULL, "%s", err->message);
    } else if (err->code == ERR_MEMORY) {
        (void)api_error_set(error, 500, "out_of_memory", NULL, "%s", err->message);
    } else if (err->code == ERR_DEVICE) {
        /* Nobody knows whether this request would succeed elsewhere: unlike the requests after it,
         * which get 503 engine_failed, it may be what made the device fail. */
        (void)api_error_set(error, 500, "internal_error", NULL, "the device failed: %s",
                            err->message);
    } else {
        (void)api_error_set(error, 500, "internal_error", NULL, "%s", err->message);
    }
}

/* Why the engine failed; of several inputs the one without numbers is told. */
static void request_error(const struct request *request, struct api_error *error)
{
    const int input = answer_without_number(request);
    if (input < 0) {
        answer_engine_error(&request->error, error);
    } else if (request->kind == REQUEST_SCORE) {
        (void)api_error_set(error, 500, "numerical_error", NULL, "item %d: %s", input,
                            request->error.message);
    } else {
        (void)api_error_set(error, 500, "numerical_error", NULL, "prompt[%d]: %s", input,
                            request->error.message);
    }
}

bool answer_state_failed(enum finish state)
{
    return state != FINISH_NONE && state != FINISH_STOP && state != FINISH_LENGTH;
}

bool answer_end_failed(struct request *request)
{
    for (int i = 0; i < request->n_item; i++) {
        if (answer_state_failed((enum finish)atomic_load(&request->item[i].state))) {
            request_cancel(request);
            return true;
        }
    }
    return false;
}

bool answer_check(const struct request *request, struct api_error *error)
{
    for (int i = 0; i < request->n_item; i++) {
        if (atomic_load(&request->item[i].state) == FINISH_ERROR) {
            request_error(request, error); /* why the others were cancelled */
            return false;
        }
    }
    for (int i = 0; i < request->n_item; i++) {
        switch ((enum finish)atomic_load(&request->item[i].state)) {
        case FINISH_STOP:
        case FINISH_LENGTH: break;
        case FINISH_CANCELLED:
            return api_error_set(error, 499, "client_closed_request", NULL, "the client went away");
        case FINISH_TIMEOUT:
            if (atomic_load(&request->start_us) == 0) {
                return api_error_set(error, 504, "queue_timeout", "timeout_ms",
                                     "the request's time was over before it could start: try again "
                                     "later or give it a longer timeout_ms");
            }
            return api_error_set(error, 504, "run_timeout", "timeout_ms",
                                 "the request's time was over before it was done: ask for less or "
                                 "give it a longer timeout_ms");
        case FINISH_SHUTDOWN:
            return api_error_set(error, 503, "shutting_down", NULL,
                                 "the server ended before the request was done");
        case FINISH_ERROR: request_error(request, error); return false;
        case FINISH_NONE:
            return api_error_set(error, 500, "internal_error", NULL, "item %d never ended", i);
        }
    }
    return true;
}

/* ---- tokens -------------------------------------------------------------------------------- */

void answer_put_logprob(struct text *out, float value)
{
    json_field_float(out, "logprob", value); /* infinity is written as null */
    if (isinf(value)) {
        json_field_bool(out, "impossible", true);
    }
}

/* The bytes of a token after the token before. */
struct token_bytes {
    const char *at; /* [n]; NULL: out of memory */
    size_t n;
    char *owned; /* Owner: this; NULL = they are in small */
    char small[256];
};

static void bytes_take(struct token_bytes *bytes, const struct tokenizer *tokenizer, int32_t id,
                       int32_t before)
{
    bytes->owned = NULL;
    bytes->at = bytes->small;
    bytes->n = tokenizer_bytes(tokenizer, id, bytes->small, sizeof bytes->small);
    if (bytes->n > sizeof bytes->small) {
        bytes->at = bytes->owned = malloc(bytes->n);
        if (bytes->owned == NULL) {
            return;
        }
        (void)tokenizer_bytes(tokenizer, id, bytes->owned, bytes->n);
    }
    const bool joined = before >= 0 && tokenizer_joins(tokenizer, before);
    if (joined && bytes->n > 0 && bytes->at[0] == ' ') {
        bytes->at++;
        bytes->n--;
    }
}

static void answer_put_bytes(struct text *out, const struct tokenizer *tokenizer, int32_t id,
                             int32_t before)
{
    struct token_bytes bytes;
    bytes_take(&bytes, tokenizer, id, before);
    if (bytes.at == NULL) {
        out->failed = true;
        return;
    }
    json_key(out, "bytes");
    json_open(out, '[');
    for (size_t i = 0; i < bytes.n; i++) {
        json_put_int(out, (unsigned char)bytes.at[i]);
    }
    json_close(out, ']');
    free(bytes.owned);
}

void answer_put_spelling(struct text *out, const struct tokenizer *tokenizer, int32_t id,
                         int32_t before)
{
    if (tokenizer == NULL) {
        char text[32];
        (void)snprintf(text, sizeof text, "token_id:%d", id);
        json_put_string(out, text);
        return;
    }
    if (tokenizer_is_control(tokenizer, id)) {
        json_put_string(out, tokenizer_piece(tokenizer, id));
        return;
    }
    struct token_bytes bytes;
    bytes_take(&bytes, tokenizer, id, before);
    if (bytes.at == NULL) {
        out->failed = true;
        return;
    }
    json_string_n(out, bytes.at, bytes.n);
    free(bytes.owned);
}

void answer_put_piece(struct text *out, const struct tokenizer *tokenizer, int32_t id)
{
    json_field_int(out, "id", id);
    json_field_string(out, "piece", tokenizer != NULL ? tokenizer_piece(tokenizer, id) : NULL);
}

void answer_put_token(struct text *out, const struct tokenizer *tokenizer,
                      const struct answer_token *token)
{
    json_open(out, '{');
    answer_put_piece(out, tokenizer, token->id);
    if (token->has_bytes && tokenizer != NULL) {
        answer_put_bytes(out, tokenizer, token->id, token->before);
    }
    json_key(out, "offset");
    if (token->offset >= 0) {
        json_put_int(out, token->offset);
    } else {
        json_put_null(out);
    }
    if (token->first) {
        json_field_null(out, "logprob");
    } else {
        answer_put_logprob(out, token->logprob);
    }
    if (token->has_rank && token->first) {
        json_field_null(out, "rank");
    } else if (token->has_rank) {
        json_field_int(out, "rank", token->rank);
    }
    if (token->has_entropy && token->first) {
        json_field_null(out, "entropy");
    } else if (token->has_entropy) {
        json_field_float(out, "entropy", token->entropy);
    }
    if (token->n_top >= 0) {
        json_key(out, "top");
        json_open(out, '[');
        for (int j = 0; j < token->n_top && !token->first; j++) {
            json_open(out, '{');
            answer_put_piece(out, tokenizer, token->top_id[j]);
            answer_put_logprob(out, token->top_logprob[j]);
            json_close(out, '}');
        }
        json_close(out, ']');
    }
    json_close(out, '}');
}

/* ---- offsets ------------------------------------------------------------------------------- */

bool answer_walk_begin(struct answer_walk *walk, const struct input *input,
                       const struct tokenizer *tokenizer)
{
    *walk = (struct answer_walk){.input = input, .tokenizer = tokenizer};
    if (tokenizer == NULL || input->text != NULL) {
        return true;
    }
    detok_begin(&walk->detok, tokenizer, true);
    walk->buffer_max = tokenizer_bytes_max(tokenizer) + 16;
    walk->buffer = malloc(walk->buffer_max);
    return walk->buffer != NULL;
}

int64_t answer_walk_next(struct answer_walk *walk, int64_t i, int32_t id)
{
    const struct input *const input = walk->input;
    if (walk->tokenizer == NULL) {
        return -1;
    }
    if (input->text == NULL) {
        const size_t n = detok_push(&walk->detok, id, walk->buffer, walk->buffer_max);
        const int64_t offset = walk->n_char + walk->detok.n_before;
        walk->n_char += text_count_chars(walk->buffer, n);
        return offset;
    }
    const int64_t n_own = input->n_ids - input->n_bos - input->n_eos;
    const size_t target = i < n_own ? input->offsets[i] : input->text_bytes;
    while (walk->byte < target) {
        const struct utf8_char c =
            utf8_next(input->text + walk->byte, input->text_bytes - walk->byte);
        if (walk->byte + (size_t)c.bytes > target) {
            break; /* the token begins inside this character */
        }
        walk->byte += (size_t)c.bytes;
        walk->n_char++;
    }
    return walk->n_char;
}

void answer_walk_end(struct answer_walk *walk)
{
    free(walk->buffer);
    walk->buffer = NULL;
}

bool answer_input_text(struct text *out, const struct input *input, const int32_t *ids,
                       const struct tokenizer *tokenizer, struct api_error *error)
{
    if (input->text != NULL) {
        text_add(out, input->text, input->text_bytes);
        return true;
    }
    if (tokenizer == NULL) {
        return true;
    }
    char *text = NULL;
    size_t bytes = 0;
    struct err err = {0};
    if (tokenizer_decode(tokenizer, ids + input->n_bos,
                         (size_t)(input->n_ids - input->n_bos - input->n_eos), &text, &bytes,
                         &err) != ERR_OK) {
        answer_engine_error(&err, error);
        return false;
    }
    text_add(out, text, bytes);
    free(text);
    return true;
}
