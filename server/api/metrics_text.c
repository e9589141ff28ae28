/* GET /metrics: see metrics_text.h. Names and buckets are the contract's. */
#include "server/api/metrics_text.h"

#include "engine/clock.h"
#include "engine/engine.h"
#include "engine/log.h"
#include "engine/stats.h"
#include "server/api/metrics_compat.h"
#include "server/api/routes.h"
#include "server/api/usage.h"
#include "server/net/http.h"
#include "server/version.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static void write_engine_counters(struct text *out, const struct engine_stats *stats)
{
    metrics_put_one(out, "prompt_tokens_total", "counter",
                    "Tokens of prompts read, computed or found in the cache.",
                    (double)metrics_get(&stats->prompt_tokens));
    metrics_put_one(out, "generation_tokens_total", "counter", "Tokens generated.",
                    (double)metrics_get(&stats->generation_tokens));
    metrics_put_finished(out, "pkmserve_request_success_total", "", stats);
    static const char *const stages[STAGE_N] = {"queued", "prefill", "decode", "score"};
    metrics_put_head(out, "requests_cancelled_total", "counter",
                     "Requests whose client left, by what they were doing.");
    for (int i = 0; i < STAGE_N; i++) {
        text_printf(out, "pkmserve_requests_cancelled_total{stage=\"%s\"} %lld\n", stages[i],
                    metrics_get(&stats->cancelled[i]));
    }
    metrics_put_one(out, "prefix_cache_queries_total", "counter",
                    "Tokens looked for in the cache, of texts that may leave some uncomputed.",
                    (double)metrics_get(&stats->prefix_queries));
    metrics_put_one(out, "prefix_cache_hits_total", "counter",
                    "Tokens found in the cache and not computed again.",
                    (double)metrics_get(&stats->prefix_hits));
    metrics_put_one(out, "engine_steps_total", "counter", "Steps of the engine.",
                    (double)metrics_get(&stats->steps));
    metrics_put_one(out, "engine_busy_seconds_total", "counter",
                    "Time in which the engine had work.",
                    (double)metrics_get(&stats->busy_us) * 1e-6);
    metrics_put_one(out, "engine_model_seconds_total", "counter",
                    "Of it, time in which the model computed and drew tokens.",
                    (double)metrics_get(&stats->model_us) * 1e-6);
}

static void write_engine_gauges(struct text *out, struct engine *engine,
                                const struct engine_stats *stats)
{
    const struct engine_options *const limits = engine_limits(engine);
    metrics_put_one(out, "num_requests_running", "gauge", "Requests being computed.",
                    (double)metrics_get(&stats->running));
    metrics_put_one(out, "num_requests_waiting", "gauge", "Requests in the queue.",
                    (double)metrics_get(&stats->waiting));
    const long long pages = metrics_get(&stats->kv_pages);
    metrics_put_one(out, "kv_cache_usage_perc", "gauge", "Share of the cache in use, 0 to 1.",
                    pages > 0 ? (double)metrics_get(&stats->kv_pages_used) / (double)pages : 0);
    metrics_put_one(out, "queue_tokens", "gauge",
                    "Positions in the queue that wait to be computed.",
                    (double)metrics_get(&stats->waiting_tokens));
    struct request_memory *const requests = engine_request_memory(engine);
    metrics_put_head(out, "request_memory_bytes", "gauge",
                     "Memory that requests hold until their answers are read.");
    text_printf(out, "pkmserve_request_memory_bytes{kind=\"results\"} %lld\n",
                (long long)request_memory_counted(requests));
    text_printf(out, "pkmserve_request_memory_bytes{kind=\"traces\"} %zu\n",
                request_memory_arena_used(requests));
    metrics_put_one(out, "queue_limit_requests", "gauge", "Requests that the queue takes.",
                    limits->max_queue);
    metrics_put_one(out, "queue_limit_tokens", "gauge", "Positions that the queue takes.",
                    (double)limits->max_queue_tokens);
    const long long last_us = metrics_get(&stats->last_step_us);
    struct timespec now;
    (void)clock_gettime(CLOCK_REALTIME, &now);
    const double age = (double)(clock_now_us() - last_us) * 1e-6;
    metrics_put_one(out, "engine_last_step_timestamp_seconds", "gauge",
                    "When the last step ended, in Unix time; 0 = none yet.",
                    last_us > 0 ? (double)now.tv_sec + (double)now.tv_nsec * 1e-9 - age : 0);
}

static void write_state(struct text *out, struct server *server, struct engine *engine)
{
    static const char *const states[] = {[ENGINE_LOADING] = "loading",
                                         [ENGINE_READY] = "ready",
                                         [ENGINE_DRAINING] = "draining",
                                         [ENGINE_FAILED] = "failed",
                                         [ENGINE_STOPPED] = "stopped"};
    int state = engine != NULL ? (int)engine_state(engine) : ENGINE_LOADING;
    if (state == ENGINE_READY && atomic_load(&server->draining)) {
        state = ENGINE_DRAINING;
    }
    metrics_put_head(out, "engine_state", "gauge", "1 for the state that the engine is in.");
    for (int i = 0; i < (int)(sizeof states / sizeof states[0]); i++) {
        text_printf(out, "pkmserve_engine_state{state=\"%s\"} %d\n", states[i], i == state);
    }
}

static void write_histograms(struct text *out, const struct engine_stats *stats)
{
    const struct {
        const char *name, *help;
        const struct histogram *h;
    } all[] = {
        {"time_to_first_token_seconds", "From arrival to the first token.", &stats->ttft},
        {"inter_token_latency_seconds", "Between two tokens of a sequence.", &stats->itl},
        {"request_time_per_output_token_seconds", "Mean time per token after the first.",
         &stats->tpot},
        {"e2e_request_latency_seconds", "From arrival to the end.", &stats->e2e},
        {"request_queue_time_seconds", "In the queue.", &stats->queue_time},
        {"request_inference_time_seconds", "From start to end.", &stats->inference_time},
        {"request_prefill_time_seconds", "From start to the first token.", &stats->prefill_time},
        {"request_decode_time_seconds", "From the first token to the end.", &stats->decode_time},
        {"score_request_seconds", "Scoring requests from arrival to the end.", &stats->score_time},
        {"request_prompt_tokens", "Prompt tokens of a sequence.", &stats->prompt_len},
        {"request_generation_tokens", "Generated tokens of a sequence.", &stats->generation_len},
        {"request_params_max_tokens", "The max_tokens of a sequence.", &stats->max_tokens},
        {"step_tokens", "Rows of a step.", &stats->step_tokens},
        {"step_seconds", "Duration of a step.", &stats->step_time},
        {"step_requests", "Sequences of a step.", &stats->step_requests},
    };
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        metrics_put_own_histogram(out, all[i].name, all[i].help, all[i].h);
    }
}

/* What the device has, and what was left of it after starting: each where it is known. */
static void write_device_memory(struct text *out, struct engine *engine,
                                const struct engine_stats *stats)
{
    const size_t total = engine_backend(engine)->memory_bytes;
    metrics_put_head(out, "device_memory_bytes", "gauge",
                     "Memory of the device; left after starting.");
    if (total > 0) {
        text_printf(out, "pkmserve_device_memory_bytes{kind=\"total\"} %zu\n", total);
    }
    if (stats->available_bytes >= 0) {
        text_printf(out, "pkmserve_device_memory_bytes{kind=\"available\"} %lld\n",
                    (long long)stats->available_bytes);
    }
}

static void write_model(struct text *out, struct server *server, struct engine *engine,
                        const struct engine_stats *stats)
{
    const struct model_info *const info = engine_model(engine);
    const struct {
        const char *name;
        int64_t bytes;
    } kinds[] = {{"weights", stats->weight_bytes},
                 {"memory_values", stats->value_bytes},
                 {"kv", stats->kv_bytes},
                 {"workspace", stats->workspace_bytes}};
    metrics_put_head(out, "model_bytes", "gauge", "Memory reserved at start, by what it holds.");
    for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++) {
        text_printf(out, "pkmserve_model_bytes{kind=\"%s\",placement=\"%s\"} %lld\n", kinds[i].name,
                    i == 1 ? placement_name(info->value_placement) : "device",
                    (long long)kinds[i].bytes);
    }
    write_device_memory(out, engine, stats);
    const struct {
        const char *name;
        double seconds;
    } phases[] = {{"map", stats->startup_map_s},
                  {"upload", stats->startup_pack_s},
                  {"warmup", stats->startup_warmup_s},
                  {"selftest", stats->startup_selftest_s}};
    metrics_put_head(out, "startup_seconds", "gauge", "Duration of the phases of starting.");
    for (size_t i = 0; i < sizeof phases / sizeof phases[0]; i++) {
        text_printf(out, "pkmserve_startup_seconds{phase=\"%s\"} %.17g\n", phases[i].name,
                    phases[i].seconds);
    }
    metrics_put_head(out, "memory_slots", "gauge", "Slots of a memory layer.");
    for (int m = 0; m < info->n_memory; m++) {
        text_printf(out, "pkmserve_memory_slots{layer=\"%d%s\"} %lld\n", info->memory[m].layer,
                    memory_place_mark(info->memory[m].place), (long long)info->memory[m].n_slot);
    }
    metrics_put_head(out, "memory_lookups_total", "counter", "Slots read by a memory layer.");
    for (int m = 0; m < info->n_memory; m++) {
        text_printf(out, "pkmserve_memory_lookups_total{layer=\"%d%s\"} %lld\n",
                    info->memory[m].layer, memory_place_mark(info->memory[m].place),
                    metrics_get(&stats->memory_lookups[m]));
    }
    const struct engine_options *const limits = engine_limits(engine);
    metrics_put_head(out, "cache_config_info", "gauge", "The key/value cache.");
    text_printf(out,
                "pkmserve_cache_config_info{block_size=\"%d\",num_blocks=\"%lld\","
                "cache_dtype=\"%s\"} 1\n",
                KV_PAGE, metrics_get(&stats->kv_pages), dtype_name(info->cache_dtype));
    metrics_put_head(out, "model_info", "gauge", "The model.");
    text_puts(out, "pkmserve_model_info{model_name=\"");
    metrics_put_label(out, server->limits.model_name);
    text_printf(out,
                "\",family=\"%s\",dtype=\"%s\",n_layer=\"%d\",d_model=\"%d\",n_memory=\"%d\","
                "max_model_len=\"%d\",memory_placement=\"%s\",deterministic=\"%s\"} 1\n",
                info->family, dtype_name(info->dtype), info->n_layer, info->d_model, info->n_memory,
                engine_context(limits->max_model_len), placement_name(info->value_placement),
                limits->backend.fast_math ? "off" : "on");
}

/* Requests by overlay: of the first OVERLAY_LABELS names, and of all others together, because
 * /metrics has a bound; and how much of what requests with overlays read came from them. */
static void write_overlays(struct text *out, struct engine *engine)
{
    enum { OVERLAY_LABELS = 32 };
    struct overlays *const overlays = engine_overlays(engine);
    struct overlay_info *const info = overlays != NULL ? malloc(OVERLAYS_MAX * sizeof *info) : NULL;
    if (info == NULL) {
        return;
    }
    const int n = overlays_list(overlays, info, OVERLAYS_MAX);
    long long n_read = 0;
    long long n_hit = 0;
    long long n_other = 0;
    overlays_reads(overlays, &n_read, &n_hit);
    metrics_put_head(out, "overlay_requests_total", "counter", "Requests that named an overlay.");
    for (int i = 0; i < n; i++) {
        if (i < OVERLAY_LABELS) {
            text_printf(out, "pkmserve_overlay_requests_total{overlay=\"%s\"} %lld\n", info[i].name,
                        (long long)info[i].n_request);
        } else {
            n_other += info[i].n_request;
        }
    }
    if (n > OVERLAY_LABELS) { /* no name has a space */
        text_printf(out, "pkmserve_overlay_requests_total{overlay=\"all others\"} %lld\n", n_other);
    }
    free(info);
    metrics_put_one(out, "overlays", "gauge", "Overlays that requests may name.", n);
    metrics_put_one(out, "overlay_bytes", "gauge", "Memory that overlays take.",
                    (double)overlays_used(overlays));
    metrics_put_one(out, "overlay_limit_bytes", "gauge", "Memory for overlays.",
                    (double)overlays_bytes(overlays));
    metrics_put_one(out, "overlay_sampled_reads_total", "counter",
                    "Slots read by a sample of the positions of requests with overlays.",
                    (double)n_read);
    metrics_put_one(out, "overlay_sampled_hits_total", "counter",
                    "Of them, those read from an overlay.", (double)n_hit);
}

/* From /proc, under the names that every Prometheus client uses. */
static void write_process(struct text *out, const struct server *server)
{
    unsigned long long user = 0;
    unsigned long long system = 0;
    unsigned long long virtual_bytes = 0;
    unsigned long long pages = 0;
    FILE *const file = fopen("/proc/self/stat", "re");
    const int n = file != NULL ? fscanf(file,
                                        "%*d (%*[^)]) %*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u "
                                        "%llu %llu %*d %*d %*d %*d %*d %*d %*u %llu %llu",
                                        &user, &system, &virtual_bytes, &pages)
                               : 0;
    if (file != NULL) {
        (void)fclose(file);
    }
    const double tick = (double)sysconf(_SC_CLK_TCK);
    text_printf(out,
                "# HELP process_start_time_seconds Start of the process in Unix time.\n"
                "# TYPE process_start_time_seconds gauge\nprocess_start_time_seconds %lld\n",
                (long long)server->created);
    if (n == 4) {
        text_printf(out,
                    "# HELP process_cpu_seconds_total Processor time used.\n"
                    "# TYPE process_cpu_seconds_total counter\nprocess_cpu_seconds_total %.17g\n"
                    "# HELP process_virtual_memory_bytes Virtual memory.\n"
                    "# TYPE process_virtual_memory_bytes gauge\nprocess_virtual_memory_bytes %llu\n"
                    "# HELP process_resident_memory_bytes Resident memory.\n"
                    "# TYPE process_resident_memory_bytes gauge\n"
                    "process_resident_memory_bytes %llu\n",
                    (double)(user + system) / tick, virtual_bytes,
                    pages * (unsigned long long)sysconf(_SC_PAGESIZE));
    }
}

static enum metrics_compat compat_of(const char *name)
{
    return strcmp(name, "vllm") == 0  ? METRICS_COMPAT_VLLM
           : strcmp(name, "tgi") == 0 ? METRICS_COMPAT_TGI
                                      : METRICS_COMPAT_NONE;
}

void metrics_write(struct text *out, struct server *server)
{
    struct engine *const engine = atomic_load(&server->engine);
    write_state(out, server, engine);
    metrics_put_front(out, &server->metrics, routes_n(), routes_name);
    metrics_put_one(out, "http_connections", "gauge", "Open connections.",
                    http_connections(server->http));
    metrics_put_one(out, "buffered_bytes", "gauge", "Bodies and answers that wait to be read.",
                    (double)http_buffered(server->http));
    metrics_put_one(out, "long_bodies_unread", "gauge",
                    "Long bodies that wait for a thread to read them, or are being read.",
                    http_n_unread(server->http));
    metrics_put_one(out, "log_lines_dropped_total", "counter",
                    "Log lines dropped because standard error took none.", (double)log_dropped());
    if (engine != NULL) {
        const struct engine_stats *const stats = engine_stats(engine);
        write_engine_counters(out, stats);
        write_engine_gauges(out, engine, stats);
        write_histograms(out, stats);
        write_model(out, server, engine, stats);
        usage_write(out, server->usage);
        write_overlays(out, engine);
        metrics_compat_write(out, compat_of(server->options->metrics_compat),
                             server->limits.model_name, engine);
    }
    metrics_put_head(out, "build_info", "gauge", "The program.");
    text_printf(out, "pkmserve_build_info{version=\"%s\",backend=\"%s\"} 1\n", PKMSERVE_VERSION,
                engine != NULL ? engine_backend(engine)->name : "");
    write_process(out, server);
}
