/* Requests: made and filled by the front end, checked when they are submitted, released by both.
 * See request.h. */
#include "engine/request.h"

#include "engine/scoring.h"

#include <float.h>
#include <math.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>

/* Bounds of one request: result arrays are indexed by int, and their sizes must not overflow. */
enum { N_TOP_MAX = 1 << 10, N_ITEM_MAX = 1 << 20 };

enum { GUARD_IDLE, GUARD_WAKING, GUARD_LEFT };

/* ---- made, filled, freed -------------------------------------------------------------------- */

struct request *request_new(enum request_kind kind, int n_item)
{
    if (n_item < 1 || n_item > N_ITEM_MAX) {
        return NULL;
    }
    struct request *const request = calloc(1, sizeof *request);
    if (request == NULL) {
        return NULL;
    }
    request->item = calloc((size_t)n_item, sizeof *request->item);
    if (request->item == NULL) {
        free(request);
        return NULL;
    }
    request->kind = kind;
    request->n_item = n_item;
    request->n_top = -1;
    for (int i = 0; i < n_item; i++) {
        request->item[i].stop_id = -1;
        request->item[i].stop_string = -1;
    }
    atomic_init(&request->refs, 1);
    return request;
}

int64_t request_uncount(struct request *request)
{
    const int64_t bytes = atomic_exchange_explicit(&request->bytes, 0, memory_order_relaxed);
    if (request->memory != NULL) {
        request_memory_uncount(request->memory, bytes);
    }
    return bytes;
}

static void free_request(struct request *request)
{
    for (int i = 0; i < request->n_item; i++) {
        struct item *const item = &request->item[i];
        free(item->ids);
        free(item->out_id);
        free(item->out_logprob);
        free(item->out_rank);
        free(item->out_entropy);
        free(item->out_top_id);
        free(item->out_top_logprob);
        free(item->out_target);
        free(item->prompt_logprob);
        free(item->prompt_rank);
        free(item->prompt_top_id);
        free(item->prompt_top_logprob);
    }
    if (request->memory != NULL) {
        request_memory_give(request->memory, &request->traces);
        (void)request_uncount(request);
        request_memory_drop(request->memory);
    }
    request_ablate_free(&request->ablate);
    overlays_drop(&request->overlays);
    free(request->item);
    free(request);
}

void request_drop(struct request *request)
{
    if (atomic_fetch_sub_explicit(&request->refs, 1, memory_order_acq_rel) == 1) {
        free_request(request);
    }
}

void request_cancel(struct request *request)
{
    atomic_store_explicit(&request->cancel, true, memory_order_relaxed);
}

void request_release(struct request *request)
{
    if (request == NULL) {
        return;
    }
    request_cancel(request);
    /* wake may not block, so a call in progress ends after a few instructions. */
    for (int idle = GUARD_IDLE; !atomic_compare_exchange_weak_explicit(
             &request->wake_guard, &idle, GUARD_LEFT, memory_order_acq_rel, memory_order_acquire);
         idle = GUARD_IDLE) {
        (void)sched_yield();
    }
    request_drop(request);
}

void request_wake(struct request *request)
{
    int idle = GUARD_IDLE;
    if (request->wake != NULL &&
        atomic_compare_exchange_strong_explicit(&request->wake_guard, &idle, GUARD_WAKING,
                                                memory_order_acq_rel, memory_order_acquire)) {
        request->wake(request->wake_ctx);
        atomic_store_explicit(&request->wake_guard, GUARD_IDLE, memory_order_release);
    }
}

/* ---- result arrays ------------------------------------------------------------------------- */

int item_max_tokens(const struct request *request, const struct item *item)
{
    const int most = request->sampling.max_tokens;
    return item->max_tokens > 0 && item->max_tokens < most ? item->max_tokens : most;
}

int64_t item_position_max(const struct request *request, const struct item *item)
{
    return item->n_ids + (request->kind == REQUEST_GENERATE ? item_max_tokens(request, item) : 0);
}

int64_t item_positions(const struct request *request, const struct item *item)
{
    return request->kind == REQUEST_GENERATE ? item_position_max(request, item)
                                             : score_item_positions(request, item);
}

int64_t request_positions(const struct request *request)
{
    int64_t n = 0;
    for (int i = 0; i < request->n_item; i++) {
        n += item_positions(request, &request->item[i]);
    }
    return n;
}

/* Whether a trace keeps every look-up of the positions; else it keeps sums per slot. */
static bool keeps_lookups(const struct pkm_info *memory, int64_t n_position, bool tokens)
{
    const size_t per_slot = sizeof(double) + sizeof(uint32_t);
    const size_t per_lookup = sizeof(int32_t) + sizeof(float);
    return tokens || (size_t)n_position <= (size_t)memory->n_slot * per_slot / per_lookup /
                                               (size_t)model_pkm_columns(memory);
}

static size_t trace_bytes(const struct pkm_info *memory, int64_t n_position, bool tokens)
{
    const size_t bytes = keeps_lookups(memory, n_position, tokens)
                             ? (size_t)n_position * (size_t)model_pkm_columns(memory) *
                                   (sizeof(int32_t) + sizeof(float))
                             : (size_t)memory->n_slot * (sizeof(double) + sizeof(uint32_t));
    return (bytes + sizeof(double) - 1) / sizeof(double) *
           sizeof(double); /* keeps the next aligned */
}

size_t request_trace_bytes(const struct model_info *info, int64_t n_ids_and_out, bool tokens)
{
    size_t bytes = (size_t)info->n_memory * sizeof(struct pkm_trace);
    for (int m = 0; m < info->n_memory; m++) {
        bytes += trace_bytes(&info->memory[m], n_ids_and_out, tokens);
    }
    return bytes;
}

/* Lays an item's traces out at `at`, which is zeroed: the structs, then each memory's arrays. */
static void lay_traces(struct item *item, const struct model_info *info, int64_t n_position,
                       bool tokens, char *at)
{
    item->trace = (struct pkm_trace *)(void *)at;
    at += (size_t)info->n_memory * sizeof *item->trace;
    for (int m = 0; m < info->n_memory; m++) {
        const struct pkm_info *const memory = &info->memory[m];
        struct pkm_trace *const trace = &item->trace[m];
        if (keeps_lookups(memory, n_position, tokens)) {
            trace->slots = (int32_t *)(void *)at;
            trace->weights =
                (float *)(void *)(trace->slots +
                                  (size_t)n_position * (size_t)model_pkm_columns(memory));
        } else {
            trace->weight = (double *)(void *)at;
            trace->count = (uint32_t *)(void *)(trace->weight + memory->n_slot);
        }
        at += trace_bytes(memory, n_position, tokens);
    }
}

bool request_take_traces(struct request *request, const struct model_info *info)
{
    if (request->trace_bytes == 0 || request->traces.bytes > 0) {
        return true;
    }
    char *const block =
        request_memory_take(request->memory, &request->traces, request->trace_bytes);
    size_t at = 0;
    for (int i = 0; block != NULL && i < request->n_item; i++) {
        struct item *const item = &request->item[i];
        if (item->traced) {
            const int64_t n = item_position_max(request, item);
            lay_traces(item, info, n, request->trace_tokens, block + at);
            at += request_trace_bytes(info, n, request->trace_tokens);
        }
    }
    CHECK(block == NULL || at == request->trace_bytes);
    return block != NULL;
}

/* calloc that returns a pointer even for size 0, so that NULL always means failure. */
static void *new_array(int64_t n, int64_t width, size_t size)
{
    const size_t count = (size_t)n * (size_t)width;
    return calloc(count > 0 ? count : 1, size);
}

static bool new_generation(const struct request *request, struct item *item)
{
    const int64_t n = item_max_tokens(request, item);
    const int64_t n_top = request->n_top;
    bool ok = (item->out_id = new_array(n, 1, sizeof(int32_t))) != NULL;
    if (n_top >= 0) {
        ok = ok && (item->out_logprob = new_array(n, 1, sizeof(float))) != NULL;
        ok = ok && (item->out_rank = new_array(n, 1, sizeof(int32_t))) != NULL;
    }
    if (n_top > 0) {
        ok = ok && (item->out_top_id = new_array(n, n_top, sizeof(int32_t))) != NULL;
        ok = ok && (item->out_top_logprob = new_array(n, n_top, sizeof(float))) != NULL;
    }
    if (request->echo && n_top >= 0) {
        ok = ok && (item->prompt_logprob = new_array(item->n_ids, 1, sizeof(float))) != NULL;
        ok = ok && (item->prompt_rank = new_array(item->n_ids, 1, sizeof(int32_t))) != NULL;
        if (ok) {
            item->prompt_logprob[0] = NAN; /* nothing predicts the first token */
        }
    }
    if (request->echo && n_top > 0) {
        ok = ok && (item->prompt_top_id = new_array(item->n_ids, n_top, sizeof(int32_t))) != NULL;
        ok =
            ok && (item->prompt_top_logprob = new_array(item->n_ids, n_top, sizeof(float))) != NULL;
    }
    return ok;
}

static bool new_scores(const struct request *request, struct item *item)
{
    const int64_t n = item->n_ids - item->score_from;
    const int64_t n_top = item->bare ? 0 : request->n_top;
    bool ok = (item->out_logprob = new_array(n, 1, sizeof(float))) != NULL;
    ok = ok && (item->out_rank = new_array(n, 1, sizeof(int32_t))) != NULL;
    if (request->n_target > 0 && !item->bare) {
        ok = ok && (item->out_target = new_array(request->n_target, 1, sizeof(float))) != NULL;
    }
    if (request->entropy && !item->bare) {
        ok = ok && (item->out_entropy = new_array(n, 1, sizeof(float))) != NULL;
    }
    if (n_top > 0) {
        ok = ok && (item->out_top_id = new_array(n, n_top, sizeof(int32_t))) != NULL;
        ok = ok && (item->out_top_logprob = new_array(n, n_top, sizeof(float))) != NULL;
    }
    return ok;
}

/* Bytes of the ids and of what new_generation or new_scores allocates. */
static int64_t array_bytes(const struct request *request, const struct item *item)
{
    const int64_t pair = sizeof(int32_t) + sizeof(float);
    const int64_t n_top = request->n_top > 0 && !item->bare ? request->n_top : 0;
    int64_t bytes = item->n_ids * (int64_t)sizeof(int32_t) + item->slot_bytes;
    if (request->kind == REQUEST_GENERATE) {
        const int64_t n_logprob = request->n_top >= 0;
        const int64_t n = item_max_tokens(request, item);
        bytes += n * ((int64_t)sizeof(int32_t) + pair * (n_logprob + n_top));
        bytes += request->echo ? item->n_ids * pair * (n_logprob + n_top) : 0;
    } else {
        const int64_t n = item->n_ids - item->score_from;
        bytes += n * pair * (1 + n_top);
        bytes += request->entropy && !item->bare ? n * (int64_t)sizeof(float) : 0;
        bytes += item->bare ? 0 : request->n_target * (int64_t)sizeof(float);
    }
    return bytes;
}

void request_use_memory(struct request *request, struct request_memory *memory)
{
    CHECK(request->memory == NULL && request->bytes == 0);
    request->memory = memory != NULL ? request_memory_keep(memory) : NULL;
}

static enum err_code count_arrays(struct request *request, const struct item *item, struct err *err)
{
    const int64_t bytes = array_bytes(request, item);
    if (request->memory == NULL) {
        return ERR_OK;
    }
    const int64_t most = request_memory_arrays_max(request->memory);
    const bool never = most > 0 && bytes > most - request->bytes;
    if (never || !request_memory_count(request->memory, bytes)) {
        return err_set(err, never ? ERR_ARGUMENT : ERR_QUEUE_MEMORY,
                       never
                           ? "the results of this request would take %lld bytes or more, the limit "
                             "(--max-request-bytes) is %lld: ask for less at once"
                           : "the results of this request take %lld bytes and all requests "
                             "together may hold %lld (--max-request-bytes); try later",
                       (long long)(request->bytes + bytes), (long long)most);
    }
    request->bytes += bytes;
    return ERR_OK;
}

enum err_code request_set_item(struct request *request, int i, int32_t *ids, int64_t n_ids,
                               const struct model_info *info, struct err *err)
{
    CHECK(i >= 0 && i < request->n_item);
    struct item *const item = &request->item[i];
    CHECK(item->ids == NULL);
    item->ids = ids; /* from here on freed with the request, also on failure */
    if (n_ids < 1 || n_ids > ENGINE_TEXT_MAX) {
        return err_set(err, ERR_ARGUMENT, "item %d has %lld tokens, accepted are 1 to %d", i,
                       (long long)n_ids, ENGINE_TEXT_MAX);
    }
    if (request->n_top < -1 || request->n_top > N_TOP_MAX) {
        return err_set(err, ERR_ARGUMENT, "logprobs is %d, the limit is %d", request->n_top,
                       N_TOP_MAX);
    }
    item->n_ids = n_ids;
    item->score_from = item->score_from == 0 ? 1 : item->score_from;
    if (item->score_from < 1 || item->score_from > n_ids) {
        return err_set(err, ERR_ARGUMENT, "item %d scores from token %lld, accepted are 1 to %lld",
                       i, (long long)item->score_from, (long long)n_ids);
    }
    const int64_t limit = info->context > 0 ? info->context : ENGINE_TEXT_MAX;
    const int max_tokens = item_max_tokens(request, item);
    if (request->kind == REQUEST_GENERATE && (max_tokens < 0 || n_ids > limit - max_tokens)) {
        return err_set(err, ERR_ARGUMENT,
                       "item %d: a prompt of %lld tokens and max_tokens %d exceed the context: "
                       "max_length=%lld",
                       i, (long long)n_ids, max_tokens, (long long)limit);
    }
    item->traced = request->trace_memory && info->n_memory > 0 && !item->bare;
    if (item->traced) {
        request->trace_bytes +=
            request_trace_bytes(info, item_position_max(request, item), request->trace_tokens);
    }
    const enum err_code counted = count_arrays(request, item, err);
    if (counted != ERR_OK) {
        return counted;
    }
    const bool ok = request->kind == REQUEST_GENERATE ? new_generation(request, item)
                                                      : new_scores(request, item);
    return ok ? ERR_OK
              : err_set(err, ERR_MEMORY, "no memory for the results of item %d with %lld tokens", i,
                        (long long)n_ids);
}

/* ---- what it changes in the model ------------------------------------------------------------ */

void request_sum_change(struct request *request)
{
    _Static_assert(sizeof request->change == sizeof request->ablate.digest, "both are two words");
    memcpy(request->change, request->ablate.digest, sizeof request->change);
    if (request->overlays.n > 0) {
        struct sha256 sum;
        unsigned char digest[SHA256_BYTES];
        sha256_begin(&sum);
        sha256_add(&sum, request->ablate.digest, sizeof request->ablate.digest);
        sha256_add(&sum, request->overlays.digest, sizeof request->overlays.digest);
        sha256_end(&sum, digest);
        memcpy(request->change, digest, sizeof request->change);
    }
}

/* ---- checked at the door ------------------------------------------------------------------- */

/* The ends of the range are floats, as the values are. */
static enum err_code check_range(double value, double low, double high, const char *field,
                                 struct err *err)
{
    if (!(value >= (double)(float)low && value <= high)) { /* NaN is refused too */
        return err_set(err, ERR_ARGUMENT, "%s is %g, accepted are %g to %g", field, value, low,
                       high);
    }
    return ERR_OK;
}

static enum err_code check_ids(const int32_t *ids, int64_t n, int n_vocab, const char *field,
                               struct err *err)
{
    for (int64_t i = 0; i < n; i++) {
        if (ids[i] < 0 || ids[i] >= n_vocab) {
            return err_set(err, ERR_ARGUMENT, "%s[%lld] is token %d, the vocabulary has %d", field,
                           (long long)i, ids[i], n_vocab);
        }
    }
    return ERR_OK;
}

bool sampling_bans_all(const struct sampling *s, const struct end_ids *ends)
{
    for (int i = 0; i < s->n_allow; i++) {
        bool banned = end_ids_have(ends, s->allow[i]) && !s->ignore_eos;
        for (int j = 0; j < s->n_stop_id; j++) {
            banned = banned || s->allow[i] == s->stop_id[j];
        }
        if (!banned) {
            return false;
        }
    }
    return s->n_allow > 0 && s->min_tokens > 0;
}

static enum err_code check_lists(const struct sampling *s, const struct model_info *info,
                                 bool has_tokenizer, struct err *err)
{
    if (s->n_stop < 0 || s->n_stop > STOP_MAX || s->n_stop_id < 0 || s->n_stop_id > STOP_ID_MAX ||
        s->n_bias < 0 || s->n_bias > LOGIT_BIAS_MAX || s->n_allow < 0 || s->n_allow > ALLOW_MAX) {
        return err_set(err, ERR_ARGUMENT,
                       "a list is too long: stop %d of %d, stop_token_ids %d of %d, logit_bias %d "
                       "of %d, allowed_token_ids %d of %d",
                       s->n_stop, STOP_MAX, s->n_stop_id, STOP_ID_MAX, s->n_bias, LOGIT_BIAS_MAX,
                       s->n_allow, ALLOW_MAX);
    }
    if (s->n_stop > 0 && !has_tokenizer) {
        return err_set(err, ERR_ARGUMENT, "stop strings need a tokenizer, this model has none");
    }
    for (int i = 0; i < s->n_stop; i++) {
        if (s->stop[i].bytes < 1 || s->stop[i].bytes > STOP_BYTES_MAX) {
            return err_set(err, ERR_ARGUMENT, "stop[%d] has %d bytes, accepted are 1 to %d", i,
                           s->stop[i].bytes, STOP_BYTES_MAX);
        }
    }
    for (int i = 0; i < s->n_bias; i++) {
        if (check_ids(&s->bias[i].token, 1, info->n_vocab, "logit_bias", err) != ERR_OK ||
            check_range((double)s->bias[i].bias, -100, 100, "logit_bias", err) != ERR_OK) {
            return ERR_ARGUMENT;
        }
    }
    if (check_ids(s->stop_id, s->n_stop_id, info->n_vocab, "stop_token_ids", err) != ERR_OK ||
        check_ids(s->allow, s->n_allow, info->n_vocab, "allowed_token_ids", err) != ERR_OK) {
        return ERR_ARGUMENT;
    }
    for (int i = 0; i < s->n_allow; i++) {
        for (int j = 0; j < i; j++) {
            if (s->allow[i] == s->allow[j]) {
                return err_set(err, ERR_ARGUMENT, "allowed_token_ids holds token %d twice",
                               s->allow[i]);
            }
        }
    }
    if (sampling_bans_all(s, &info->ends)) {
        return err_set(err, ERR_ARGUMENT,
                       "allowed_token_ids holds only tokens that end the text, min_tokens %d "
                       "forbids them",
                       s->min_tokens);
    }
    return ERR_OK;
}

static enum err_code check_sampling(const struct sampling *s, const struct model_info *info,
                                    bool has_tokenizer, struct err *err)
{
    if (check_range((double)s->temperature, 0, 1e6, "temperature", err) != ERR_OK ||
        check_range((double)s->top_p, FLT_TRUE_MIN, 1, "top_p", err) != ERR_OK ||
        check_range((double)s->min_p, 0, 1 - 1e-9, "min_p", err) != ERR_OK ||
        check_range((double)s->typical_p, 0, 1, "typical_p", err) != ERR_OK ||
        check_range((double)s->repetition, 1e-6, 1e6, "repetition_penalty", err) != ERR_OK ||
        check_range((double)s->presence, -100, 100, "presence_penalty", err) != ERR_OK ||
        check_range((double)s->frequency, -100, 100, "frequency_penalty", err) != ERR_OK ||
        check_range(s->top_k, 0, info->n_vocab, "top_k", err) != ERR_OK ||
        check_range(s->min_tokens, 0, s->max_tokens, "min_tokens", err) != ERR_OK) {
        return ERR_ARGUMENT;
    }
    return check_lists(s, info, has_tokenizer, err);
}

static enum err_code check_item(const struct request *request, const struct item *item,
                                const struct model_info *info, int64_t context, struct err *err)
{
    const bool generate = request->kind == REQUEST_GENERATE;
    if (item->ids == NULL || (generate && item->out_id == NULL) ||
        ((!generate || request->n_top >= 0) && item->out_logprob == NULL)) {
        return err_set(err, ERR_ARGUMENT, "an item was not set");
    }
    if (generate && item->n_ids > context - item_max_tokens(request, item)) {
        return err_set(err, ERR_ARGUMENT,
                       "a prompt of %lld tokens and max_tokens %d exceed the context: "
                       "max_length=%lld",
                       (long long)item->n_ids, item_max_tokens(request, item), (long long)context);
    }
    const int64_t used_max = context + !item->traced;
    if (item->block != 0 &&
        (item->block_used < 2 || item->block_used > item->block || item->block_used > used_max ||
         item->score_from != 1 || item->out_target != NULL ||
         (item->traced && item->block_used != item->block))) {
        return err_set(
            err, ERR_ARGUMENT,
            "a block has %lld tokens of which %lld are used, accepted are 2 to %lld; all "
            "of them with a memory trace; no context and no targets",
            (long long)item->block, (long long)item->block_used, (long long)used_max);
    }
    if (item->sample_index < 0 || item->prompt_index < 0) {
        return err_set(err, ERR_ARGUMENT, "sample_index %d or prompt_index %d is negative",
                       item->sample_index, item->prompt_index);
    }
    return check_ids(item->ids, item->n_ids, info->n_vocab, "tokens", err);
}

enum err_code request_check(const struct request *request, const struct model_info *info,
                            const struct request_limits *limits, int64_t *n_position,
                            struct err *err)
{
    const int64_t context = limits->context;
    if (request->n_top < -1 || request->n_top > limits->n_top_max) {
        return err_set(err, ERR_ARGUMENT, "logprobs is %d, the limit is %d", request->n_top,
                       limits->n_top_max);
    }
    if (request->lang < 0 || request->lang >= (info->n_lang > 0 ? info->n_lang : 1)) {
        return err_set(err, ERR_ARGUMENT, "language is %d, the model has %d", request->lang,
                       info->n_lang);
    }
    if (request->trace_bytes > limits->trace_bytes) {
        return err_set(err, ERR_ARGUMENT,
                       "the memory traces of this request take %zu bytes, the limit "
                       "(--memory-trace-bytes) is %zu: send fewer texts at once",
                       request->trace_bytes, limits->trace_bytes);
    }
    if (request->trace_memory && !limits->trace) {
        return err_set(err, ERR_ARGUMENT, "memory traces are switched off");
    }
    if (request->kind == REQUEST_SCORE &&
        (request->window < 1 || request->window > context || request->stride < 1 ||
         request->stride > request->window)) {
        return err_set(err, ERR_ARGUMENT,
                       "max_context is %lld and stride %lld, accepted are 1 <= stride <= "
                       "max_context <= %lld",
                       (long long)request->window, (long long)request->stride, (long long)context);
    }
    if (request->n_target < 0 || request->n_target > TARGET_MAX) {
        return err_set(err, ERR_ARGUMENT, "%d target ids, the limit is %d", request->n_target,
                       TARGET_MAX);
    }
    if (check_ids(request->target, request->n_target, info->n_vocab, "target_ids", err) != ERR_OK) {
        return ERR_ARGUMENT;
    }
    if (request->kind == REQUEST_GENERATE &&
        check_sampling(&request->sampling, info, limits->tokenizer, err) != ERR_OK) {
        return ERR_ARGUMENT;
    }
    if (request->ablate.n > 0 && info->n_memory == 0) {
        return err_set(err, ERR_ARGUMENT, "ablate needs a model with memories, this one has none");
    }
    *n_position = 0;
    for (int i = 0; i < request->n_item; i++) {
        if (check_item(request, &request->item[i], info, context, err) != ERR_OK) {
            return ERR_ARGUMENT;
        }
        *n_position += item_positions(request, &request->item[i]);
    }
    return ERR_OK;
}
