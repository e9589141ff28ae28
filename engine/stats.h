/* Counters and histograms that the engine and the front end keep and /metrics prints. Everything is
 * atomic and relaxed: a scrape reads without stopping anyone. */
#ifndef ENGINE_STATS_H
#define ENGINE_STATS_H

#include "models/model.h"

#include <stdatomic.h>
#include <stdint.h>

enum { HISTOGRAM_BUCKET_MAX = 32 };

/* Cumulative in the print, per bucket here. bound[] ascending; the last bucket is +Inf. */
struct histogram {
    const double *bound; /* Borrowed: static, [n_bound] */
    int n_bound;
    atomic_llong bucket[HISTOGRAM_BUCKET_MAX + 1];
    atomic_llong count;
    _Atomic double sum; /* of the observations; an integer of small units would overflow */
};

void histogram_begin(struct histogram *h, const double *bound, int n_bound);
void histogram_add(struct histogram *h, double value);

/* Cancellation stages: a closed label set of the contract. */
enum stats_stage { STAGE_QUEUED, STAGE_PREFILL, STAGE_DECODE, STAGE_SCORE, STAGE_N };

struct engine_stats {
    atomic_llong running, waiting, waiting_tokens; /* gauges */
    atomic_llong trace_wait_bytes; /* of the traces that a request waits for; 0 = none does */
    atomic_llong kv_pages_used, kv_pages; /* gauges */
    /* Counters: tokens of prompts, those found in the cache too, and drawn ones. */
    atomic_llong prompt_tokens, generation_tokens;
    atomic_llong success_stop, success_length, aborted, errored; /* sequences by finish */
    atomic_llong cancelled[STAGE_N];
    atomic_llong prefix_queries, prefix_hits; /* tokens looked for in the cache, and found */
    atomic_llong steps, last_step_us;
    /* Of the engine's thread: time with work to do, and of it, time in which the model computes and
     * draws. What is left is scheduling, and taking and publishing results. */
    atomic_llong busy_us, model_us;
    atomic_llong memory_lookups[MODEL_PKM_MAX];
    struct histogram ttft, itl, tpot, e2e, queue_time, inference_time, prefill_time, decode_time,
        score_time, prompt_len, generation_len, max_tokens, step_tokens, step_time, step_requests;
    /* Set once at start-up. */
    double startup_map_s, startup_pack_s, startup_warmup_s, startup_selftest_s;
    int64_t weight_bytes, value_bytes, kv_bytes, workspace_bytes;
    int64_t available_bytes; /* of the device's memory, after all was reserved; -1 = unknown */
};

/* Gives the histograms their bounds, those of lengths only as far as context, in positions; the
 * rest is zero already. */
void engine_stats_begin(struct engine_stats *stats, int context);

/* Bounds of the contract's table. */
extern const double stats_bounds_ttft[], stats_bounds_itl[], stats_bounds_e2e[],
    stats_bounds_tokens[], stats_bounds_step_tokens[], stats_bounds_pow2[];
extern const int stats_n_ttft, stats_n_itl, stats_n_e2e, stats_n_tokens, stats_n_step_tokens,
    stats_n_pow2;

#endif
