/* Opening and closing the engine, engine_submit and the functions that read its state. The work
 * itself is in loop.c. */
#include "engine/loop.h"

#include "engine/bounds.h"
#include "engine/clock.h"
#include "engine/log.h"
#include "engine/selftest.h"
#include "engine/tokenizer.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>

/* ---- memory -------------------------------------------------------------------------------- */

/* Default size of the cache, from the bytes that are free: a quarter of the machine's memory,
 * because other programs run there too; nine tenths of a device's own memory, because its driver
 * and libraries need some. */
static int64_t cache_share(const struct backend *be, int64_t bytes)
{
    return be->is_host ? bytes / 4 : bytes / 10 * 9;
}

/* The cache does not fit: the message shows the plan, and what to lower. */
static enum err_code refuse_cache(const struct engine *engine, int64_t n_page, int64_t page_bytes,
                                  int64_t workspace, int64_t free_bytes, struct err *err)
{
    const struct model_info *const info = model_info(engine->model);
    const bool is_host = engine->be->is_host;
    const bool values = !is_host && info->value_placement == PLACEMENT_DEVICE && info->n_memory > 0;
    return err_set(
        err, ERR_MEMORY,
        "not enough %smemory: the cache needs %lld bytes (%lld positions), the workspace "
        "%lld, and %lld are available beside the weights' %zu and the value tables' %zu; "
        "lower %s--max-model-len, --max-seqs or --max-batch-tokens%s%s",
        is_host ? "" : "device ", (long long)(n_page * page_bytes), (long long)(n_page * KV_PAGE),
        (long long)workspace, (long long)free_bytes, info->weight_bytes, info->value_bytes,
        engine->options.kv_tokens > 0 ? "--kv-tokens, " : "",
        values ? ", put the value tables into host memory (memory placement host)" : "",
        is_host || info->dtype != DTYPE_F32 ? "" : ", or use dtype bf16");
}

/* The number of pages of the cache. Called when everything else has been reserved. */
static enum err_code size_cache(struct engine *engine, const struct step_limits *limits,
                                int *n_page, struct err *err)
{
    struct engine_options *const o = &engine->options;
    const int64_t page_bytes = (int64_t)model_page_bytes(engine->model);
    const int64_t workspace = (int64_t)model_workspace_bytes(engine->model, limits);
    const int64_t free_bytes = engine->be->op->memory_available(engine->be);
    const int64_t least = limits->n_page_max;
    int64_t n =
        o->kv_tokens > 0 ? (o->kv_tokens + KV_PAGE - 1) / KV_PAGE : least * (int64_t)o->max_seqs;
    if (o->kv_tokens > 0 && n < least) {
        return err_set(err, ERR_ARGUMENT,
                       "--kv-tokens %lld does not hold one text, of which %lld positions are kept: "
                       "raise it",
                       (long long)o->kv_tokens, (long long)least * KV_PAGE);
    }
    engine->stats.workspace_bytes += workspace;
    const int64_t left = free_bytes - workspace;
    const int64_t most = free_bytes == INT64_MAX ? n
                         : o->kv_tokens > 0      ? left / page_bytes
                                                 : cache_share(engine->be, left) / page_bytes;
    if (o->kv_tokens == 0 && n > most) {
        n = most;
    }
    if (n < least || n > most || n > INT_MAX / KV_PAGE) {
        return refuse_cache(engine, n > least ? n : least, page_bytes, workspace, free_bytes, err);
    }
    o->kv_tokens = n * KV_PAGE;
    *n_page = (int)n;
    engine->stats.kv_bytes = n * page_bytes;
    return ERR_OK;
}

/* ---- opening ------------------------------------------------------------------------------- */

/* Adds up the time of loading by phase, then calls the caller's own progress function. */
struct loading {
    const struct model_options *options;
    struct engine_stats *stats;
    int64_t last_us;
};

static void note_progress(void *ctx, const char *phase, double done)
{
    struct loading *const loading = ctx;
    const int64_t now_us = clock_now_us();
    const double s = (double)(now_us - loading->last_us) * 1e-6;
    if (strcmp(phase, "map") == 0) {
        loading->stats->startup_map_s += s;
    } else {
        loading->stats->startup_pack_s += s;
    }
    loading->last_us = now_us;
    if (loading->options->progress != NULL) {
        loading->options->progress(loading->options->progress_ctx, phase, done);
    }
}

/* The log line that says which backend computes, and why. */
static void log_backend(const struct engine *engine)
{
    const struct engine_options *const o = &engine->options;
    char what[2 * sizeof engine->be->description];
    char why[2 * sizeof engine->be->note];
    log_event(LEVEL_INFO, "backend", "name=%s device=%s why=%s deterministic=%s", engine->be->name,
              log_quote(what, sizeof what, engine->be->description),
              log_quote(why, sizeof why,
                        engine->be->note[0] != '\0' ? engine->be->note : "it was asked for"),
              o->backend.fast_math ? "off" : "on");
    if (engine->be->products[0] != '\0') {
        char products[2 * sizeof engine->be->products];
        log_event(LEVEL_INFO, "products", "what=%s",
                  log_quote(products, sizeof products, engine->be->products));
    }
    if (o->backend.fast_math) {
        log_event(LEVEL_WARN, "not_deterministic",
                  "what=\"results may depend on which requests share a step\"");
    }
}

/* The log line that says that weights are not computed with in their files' type. */
static void log_dtype(const struct model_info *info, const char *wanted)
{
    if (info->dtype == info->file_dtype) {
        return;
    }
    const bool chosen = strcmp(wanted, "auto") == 0;
    const bool loses = info->dtype == DTYPE_BF16 && info->file_dtype != DTYPE_I8;
    log_event(LEVEL_INFO, "dtype", "files=%s weights=%s why=\"%s\"", dtype_name(info->file_dtype),
              dtype_name(info->dtype),
              !chosen ? "it was asked for"
              : loses ? "this device multiplies it many times as fast; --dtype f32 loses no bits"
                      : "this device does not compute in the files' type");
}

static enum err_code load_model(struct engine *engine, struct err *err)
{
    const struct engine_options *const o = &engine->options;
    struct loading loading = {&o->model, &engine->stats, clock_now_us()};
    struct model_options options = o->model;
    options.progress = note_progress;
    options.progress_ctx = &loading;
    if (backend_open(&engine->be, &o->backend, err) != ERR_OK ||
        model_open(&engine->model, engine->be, o->model_dir, &options, err) != ERR_OK) {
        return err->code;
    }
    log_backend(engine);
    engine->options.backend.n_thread = engine->be->n_thread;
    const struct model_info *const info = model_info(engine->model);
    log_dtype(info, o->model.dtype);
    engine->stats.weight_bytes = (int64_t)info->weight_bytes;
    engine->stats.value_bytes = (int64_t)info->value_bytes;
    if (identity_read(&engine->identity, o->model_dir, err) != ERR_OK) {
        return err->code;
    }
    return tokenizer_open(&engine->tokenizer, o->model_dir, o->tokenizer_path, info->tokenizer,
                          info->n_vocab, err);
}

/* Makes the steps; what they take of a device's own memory is counted as workspace. */
static enum err_code reserve_step(struct engine *engine, const struct step_limits *limits,
                                  struct err *err)
{
    struct backend *const be = engine->be;
    const int64_t before = be->op->memory_available(be);
    const enum err_code code = turn_open(engine, limits, err);
    const int64_t taken = before - be->op->memory_available(be);
    if (!be->is_host && taken > 0) {
        engine->stats.workspace_bytes = taken;
    }
    return code;
}

/* Allocates everything that the loop needs, at its full size. */
static enum err_code reserve(struct engine *engine, struct err *err)
{
    struct engine_options *const o = &engine->options;
    const struct model_info *const info = model_info(engine->model);
    const struct step_limits limits = bounds_of_step(o, info);
    int n_page = 0;
    /* Requests that ended with one step are released when the next one has begun. */
    const struct queue_limits queue_limits = {
        .n_waiting = o->max_queue, .n_position = o->max_queue_tokens, .n_running = 2 * o->max_seqs};
    if (reserve_step(engine, &limits, err) != ERR_OK ||
        overlays_reserve(&engine->overlays, engine->be, info, o->model_dir, o->overlay_bytes,
                         o->overlay_dir, err) != ERR_OK ||
        size_cache(engine, &limits, &n_page, err) != ERR_OK ||
        model_reserve(engine->model, &limits, n_page, err) != ERR_OK ||
        pkm_totals_open(&engine->totals, info, err) != ERR_OK ||
        pkm_counts_open(&engine->counts, info, o->model_dir, o->memory_counts ? o->max_seqs : 0,
                        err) != ERR_OK ||
        request_memory_open(&engine->requests, o->max_request_bytes,
                            info->n_memory > 0 ? (size_t)o->memory_trace_bytes : 0,
                            err) != ERR_OK ||
        kvpages_open(&engine->pages, n_page, o->prefix_cache, err) != ERR_OK ||
        queue_open(&engine->queue, &queue_limits, &engine->stats, err) != ERR_OK) {
        return err->code;
    }
    atomic_store_explicit(&engine->stats.kv_pages, n_page, memory_order_relaxed);
    engine->bulk_limit[0].rows = engine->bulk_limit[1].rows = o->max_batch_tokens;
    engine->prompt_limit.rows = o->max_batch_tokens;
    const size_t n_seq = (size_t)o->max_seqs;
    engine->text_max = engine->tokenizer != NULL ? tokenizer_bytes_max(engine->tokenizer) + 16 : 1;
    engine->sequence = calloc(n_seq, sizeof *engine->sequence);
    engine->free = calloc(n_seq, sizeof *engine->free);
    engine->active = calloc(n_seq, sizeof *engine->active);
    engine->plan = calloc(n_seq, sizeof *engine->plan);
    engine->text = malloc(engine->text_max);
    if (engine->sequence == NULL || engine->free == NULL || engine->active == NULL ||
        engine->plan == NULL || engine->text == NULL) {
        return err_set(err, ERR_MEMORY, "no memory for %d sequences: lower --max-seqs",
                       o->max_seqs);
    }
    const int n_entry_max = sampling_entries_max(engine_context(o->max_model_len), info->n_vocab);
    for (int i = 0; i < o->max_seqs; i++) {
        if (sequence_open(&engine->sequence[i], limits.n_page_max, n_entry_max, err) != ERR_OK) {
            return err->code;
        }
        engine->free[engine->n_free++] = &engine->sequence[o->max_seqs - 1 - i];
    }
    return ERR_OK;
}

/* Logs what was reserved; after a failure, as far as it got. */
static void log_memory_plan(const struct engine *engine)
{
    const struct engine_stats *const s = &engine->stats;
    const struct model_info *const info = model_info(engine->model);
    log_event(LEVEL_INFO, "memory_plan",
              "weights_bytes=%lld memory_values_bytes=%lld memory_placement=%s kv_bytes=%lld "
              "kv_tokens=%lld workspace_bytes=%lld overlay_bytes=%lld available_bytes=%lld "
              "max_seqs=%d "
              "max_batch_tokens=%d max_model_len=%d",
              (long long)s->weight_bytes, (long long)s->value_bytes,
              placement_name(info->value_placement), (long long)s->kv_bytes,
              (long long)engine->options.kv_tokens, (long long)s->workspace_bytes,
              engine->overlays != NULL ? (long long)overlays_bytes(engine->overlays) : 0,
              (long long)s->available_bytes, engine->options.max_seqs,
              engine->options.max_batch_tokens, engine->options.max_model_len);
}

/* Reserves everything, and logs it. */
static enum err_code plan_memory(struct engine *engine, struct err *err)
{
    const enum err_code code = reserve(engine, err);
    const int64_t available = engine->be->op->memory_available(engine->be);
    /* A host takes up the memory only when it is first written. */
    const int64_t overlays = engine->overlays != NULL ? overlays_bytes(engine->overlays) : 0;
    const int64_t promised =
        engine->be->is_host ? engine->stats.kv_bytes + engine->stats.workspace_bytes + overlays : 0;
    const int64_t left = available > promised ? available - promised : 0;
    engine->stats.available_bytes = available == INT64_MAX ? -1 : left;
    log_memory_plan(engine);
    return code;
}

static void begin_phase(const struct engine *engine, const char *phase)
{
    const struct model_options *const options = &engine->options.model;
    if (options->progress != NULL) {
        options->progress(options->progress_ctx, phase, 0);
    }
}

static void log_identity(const struct engine_identity *compared)
{
    const char *const files = compared->files ? "ok" : "unchecked";
    const char *const gap = engine_identity_gap(compared);
    char quoted[600];
    if (gap != NULL) {
        log_event(LEVEL_INFO, "identity", "probe=unchecked files=%s why=%s", files,
                  log_quote(quoted, sizeof quoted, gap));
        return;
    }
    log_event(LEVEL_INFO, "identity",
              "probe=ok files=%s tokens=%d largest_difference=%.3g tolerance=%.3g file=%s", files,
              compared->n, (double)compared->difference, (double)compared->tolerance,
              log_quote(quoted, sizeof quoted, compared->file->path));
}

/* Compares what the model computes with what it computed when it was made. */
static enum err_code compare_identity(struct engine *engine, const struct selftest *test,
                                      struct err *err)
{
    struct engine_identity *const compared = &engine->compared;
    const struct identity *const file = engine->identity;
    *compared = (struct engine_identity){.file = file};
    if (file != NULL) {
        compared->files = engine->options.model.check_files && file->n_file > 0;
        compared->tolerance = identity_tolerance(file, model_info(engine->model), test->fast_math);
    }
    if (compared->tolerance > 0 && test->context > 1 &&
        selftest_identity(test, file, compared->tolerance, &compared->n, &compared->difference,
                          err) != ERR_OK) {
        return err->code;
    }
    log_identity(compared);
    return ERR_OK;
}

/* The warm-up, the self-test and the probe. */
static enum err_code test_backend(struct engine *engine, const struct selftest *test,
                                  struct err *err)
{
    const int64_t begin_us = clock_now_us();
    begin_phase(engine, "warmup");
    if (selftest_warm_up(test, err) != ERR_OK) {
        return err->code;
    }
    const int64_t warm_us = clock_now_us();
    engine->stats.startup_warmup_s += (double)(warm_us - begin_us) * 1e-6;
    begin_phase(engine, "selftest");
    enum err_code code = selftest_run(test, err);
    code = code == ERR_OK ? compare_identity(engine, test, err) : code;
    engine->stats.startup_selftest_s += (double)(clock_now_us() - warm_us) * 1e-6;
    return code;
}

/* Likewise; where it fails with fast paths, once more without. */
static enum err_code test_backends(struct engine *engine, const struct selftest *test,
                                   struct err *err)
{
    const int64_t begin_us = clock_now_us();
    begin_phase(engine, "selftest");
    enum err_code code = selftest_fast_paths(test, err);
    engine->stats.startup_selftest_s = (double)(clock_now_us() - begin_us) * 1e-6;
    code = code == ERR_OK ? test_backend(engine, test, err) : code;
    if ((code != ERR_NUMERICAL && code != ERR_FORMAT) || !selftest_leave_fast_paths(test)) {
        return code;
    }
    char why[2 * sizeof err->message];
    log_event(LEVEL_WARN, "fast_paths_off", "why=%s", log_quote(why, sizeof why, err->message));
    *err = (struct err){0};
    return test_backend(engine, test, err);
}

/* Runs what comes before the first request. */
static enum err_code prepare(struct engine *engine, struct err *err)
{
    const struct selftest test = {
        .be = engine->be,
        .model = engine->model,
        .step = engine->batch[0].step,
        .twin = engine->batch[1].step,
        .n_page = engine->pages.n_page,
        .max_seqs = engine->options.max_seqs,
        .context = engine_context(engine->options.max_model_len),
        .fast_math = engine->options.backend.fast_math,
    };
    const enum err_code code = test_backends(engine, &test, err);
    if (code == ERR_OK &&
        !engine->be->is_host) { /* its driver takes memory for graphs and for code */
        log_event(LEVEL_INFO, "warm", "available_bytes=%lld",
                  (long long)engine->be->op->memory_available(engine->be));
    }
    return code;
}

static void wake_for_overlays(void *ctx)
{
    queue_wake(ctx);
}

enum err_code engine_open(struct engine **engine, const struct engine_options *options,
                          struct err *err)
{
    struct err local; /* the callees' codes are read back from here */
    struct err *const e = err != NULL ? err : &local;
    *engine = NULL;
    struct engine *const new = calloc(1, sizeof *new);
    if (new == NULL) {
        return err_set(e, ERR_MEMORY, "no memory for the engine");
    }
    new->options = *options;
    new->publisher = (struct publisher){&new->stats, &new->queue, NULL, options->failures_told};
    atomic_init(&new->state, ENGINE_LOADING);
    if (load_model(new, e) != ERR_OK ||
        bounds_resolve(&new->options, model_info(new->model), new->be->n_tok_good, e) != ERR_OK) {
        goto fail;
    }
    engine_stats_begin(&new->stats, engine_context(new->options.max_model_len));
    if (plan_memory(new, e) != ERR_OK || prepare(new, e) != ERR_OK) {
        goto fail;
    }
    atomic_store(&new->state, ENGINE_READY);
    if (new->overlays != NULL) {
        overlays_begin(new->overlays, wake_for_overlays, &new->queue);
    }
    if (pthread_create(&new->thread, NULL, loop_main, new) != 0) {
        err_set(e, ERR_MEMORY, "cannot start the engine thread");
        goto fail;
    }
    new->started = true;
    *engine = new;
    return ERR_OK;
fail:
    engine_close(new);
    return e->code;
}

/* ---- closing ------------------------------------------------------------------------------- */

int engine_drain(struct engine *engine, int64_t deadline_us)
{
    if (!engine->started) {
        return 0;
    }
    int ready = ENGINE_READY;
    if (atomic_compare_exchange_strong(&engine->state, &ready, ENGINE_DRAINING)) {
        queue_shut(&engine->queue, ERR_CLOSED, "the server is shutting down; try another one");
    }
    atomic_store_explicit(&engine->drain_us, deadline_us > 0 ? deadline_us : 1,
                          memory_order_release);
    queue_wake(&engine->queue);
    CHECK(pthread_join(engine->thread, NULL) == 0);
    engine->started = false;
    return atomic_load(&engine->n_aborted);
}

void engine_close(struct engine *engine)
{
    if (engine == NULL) {
        return;
    }
    (void)engine_drain(engine, 1);
    for (int i = 0; engine->sequence != NULL && i < engine->options.max_seqs; i++) {
        sequence_close(&engine->sequence[i]);
    }
    free(engine->sequence);
    free(engine->free);
    free(engine->active);
    free(engine->plan);
    free(engine->text);
    queue_close(&engine->queue);
    kvpages_close(&engine->pages);
    pkm_totals_close(&engine->totals);
    pkm_counts_close(&engine->counts);
    request_memory_drop(engine->requests);
    overlays_close(engine->overlays);
    tokenizer_close(engine->tokenizer);
    identity_free(engine->identity);
    turn_close(engine);
    model_close(engine->model);
    backend_close(engine->be);
    free(engine);
}

/* ---- the door and the windows -------------------------------------------------------------- */

enum err_code engine_submit(struct engine *engine, struct request *request, struct err *err)
{
    struct err local;
    struct err *const e = err != NULL ? err : &local;
    int64_t n_position = 0;
    const struct request_limits limits = {
        .context = engine_context(engine->options.max_model_len),
        .n_top_max = engine->options.max_logprobs,
        .trace = engine->options.memory_trace,
        .trace_bytes = request_memory_arena_bytes(engine->requests),
        .tokenizer = engine->tokenizer != NULL,
    };
    if (request_check(request, model_info(engine->model), &limits, &n_position, e) != ERR_OK) {
        return e->code;
    }
    if (request->memory == NULL) {
        request_use_memory(request, engine->requests);
    }
    request_sum_change(request);
    return queue_push(&engine->queue, request, n_position, e);
}

const struct model_info *engine_model(const struct engine *engine)
{
    return model_info(engine->model);
}

const struct tokenizer *engine_tokenizer(const struct engine *engine)
{
    return engine->tokenizer;
}

const struct engine_options *engine_limits(const struct engine *engine)
{
    return &engine->options;
}

const struct engine_identity *engine_identity(const struct engine *engine)
{
    return &engine->compared;
}

const char *engine_identity_gap(const struct engine_identity *compared)
{
    return compared->n > 0          ? NULL
           : compared->file == NULL ? "the model has no " IDENTITY_NAME
                                      "; models/convert/identity.py writes one"
           : compared->file->n_token == 0 ? "its " IDENTITY_NAME " has no probe"
                                          : "its " IDENTITY_NAME
                                            " has no tolerance for what is computed with";
}

const struct backend *engine_backend(const struct engine *engine)
{
    return engine->be;
}

enum engine_state engine_state(const struct engine *engine)
{
    return (enum engine_state)atomic_load_explicit(&engine->state, memory_order_acquire);
}

int64_t engine_stalled_ms(const struct engine *engine)
{
    if (atomic_load_explicit(&engine->queue.idle, memory_order_acquire)) {
        return 0;
    }
    const int64_t heartbeat_us =
        atomic_load_explicit(&engine->queue.heartbeat_us, memory_order_relaxed);
    const int64_t now_us = clock_now_us();
    return now_us > heartbeat_us ? (now_us - heartbeat_us) / 1000 : 0;
}

struct overlays *engine_overlays(const struct engine *engine)
{
    return engine->overlays;
}

struct request_memory *engine_request_memory(const struct engine *engine)
{
    return engine->requests;
}

struct engine_stats *engine_stats(struct engine *engine)
{
    return &engine->stats;
}

int engine_retry_after_s(struct engine *engine, bool of_all)
{
    const long long rate = atomic_load_explicit(&engine->drain_rate, memory_order_relaxed);
    const int64_t n_sequence = of_all ? INT64_MAX : engine_context(engine->options.max_model_len);
    const int64_t waiting = queue_positions_ahead(&engine->queue, n_sequence);
    const double longest = 600; /* more than ten minutes would be a guess */
    const double s = rate > 0 ? 1000.0 * (double)waiting / (double)rate : 1;
    return (int)(s < 1 ? 1 : s > longest ? longest : s + 0.5);
}
