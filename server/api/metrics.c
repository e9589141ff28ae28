/* GET /metrics in the Prometheus text format: see metrics.h. Names and buckets are the contract's.
 */
#include "server/api/metrics.h"

#include "engine/clock.h"
#include "engine/engine.h"
#include "engine/stats.h"
#include "server/api/metrics_compat.h"
#include "server/api/routes.h"
#include "server/api/usage.h"
#include "server/net/http.h"
#include "server/version.h"

#include <math.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { METRICS_NAME_MAX = 96 };

static const int codes[METRICS_CODE_N - 1] = {200, 400, 401, 403, 404, 405, 408, 413,
                                              422, 424, 429, 499, 500, 503, 504};
static const char *const methods[METRICS_METHOD_N] = {"GET", "HEAD", "POST", "other"};
static const char *const forms[METRICS_FORM_N] = {"text", "ids", "ranking", "pairs"};

/* Why a request was turned away, by the code of its error. */
static const char *const reasons[METRICS_REASON_N] = {
    "queue_full", "queue_tokens_full", "client_limit", "loading",
    "draining",   "invalid",           "auth",         "too_large"};

int64_t metrics_unix_seconds(void)
{
    return (int64_t)time(NULL);
}

void metrics_begin(struct metrics *metrics)
{
    histogram_begin(&metrics->tokenize, stats_bounds_e2e, stats_n_e2e);
}

static void add(atomic_llong *counter, long long n)
{
    (void)atomic_fetch_add_explicit(counter, n, memory_order_relaxed);
}

static long long get(const atomic_llong *counter)
{
    return atomic_load_explicit(counter, memory_order_relaxed);
}

static int reason_of(int status, const char *code)
{
    const char *reason = NULL;
    if (code == NULL) {
        return -1;
    }
    if (strcmp(code, "queue_full") == 0 || strcmp(code, "queue_tokens_full") == 0 ||
        strcmp(code, "client_limit") == 0) {
        reason = code;
    } else if (strcmp(code, "model_loading") == 0) {
        reason = "loading";
    } else if (strcmp(code, "shutting_down") == 0) {
        reason = "draining";
    } else if (status == 413) {
        reason = "too_large";
    } else if (status == 401 || status == 403) {
        reason = "auth";
    } else if (status >= 400 && status < 499 && status != 424) { /* that one was accepted */
        reason = "invalid";
    }
    for (int i = 0; reason != NULL && i < METRICS_REASON_N; i++) {
        if (strcmp(reasons[i], reason) == 0) {
            return i;
        }
    }
    return -1;
}

void metrics_count(struct metrics *metrics, int route, const char *method, int status,
                   const char *code)
{
    int c = 0;
    while (c < METRICS_CODE_N - 1 && codes[c] != status) {
        c++;
    }
    add(&metrics->request[route][c], 1);
    int m = 0;
    while (m < METRICS_METHOD_N - 1 && strcmp(methods[m], method) != 0) {
        m++;
    }
    add(&metrics->method[m], 1);
    const int reason = reason_of(status, code);
    if (reason >= 0) {
        add(&metrics->rejected[reason], 1);
    }
}

void metrics_add_score(struct metrics_score *score, int64_t n_token, int64_t n_unk,
                       int64_t n_position, double nll)
{
    add(&score->items, 1);
    add(&score->tokens, n_token);
    add(&score->unknown, n_unk);
    add(&score->positions, n_position);
    if (isfinite(nll) && nll > 0) {
        add(&score->nll_micro, llround(nll * 1e6));
    }
}

void metrics_tokenize_time(struct metrics *metrics, int64_t from_us)
{
    histogram_add(&metrics->tokenize, (double)(clock_now_us() - from_us) * 1e-6);
}

/* ---- writing ------------------------------------------------------------------------------- */

static void write_head(struct text *out, const char *name, const char *type, const char *help)
{
    text_printf(out, "# HELP pkmserve_%s %s\n# TYPE pkmserve_%s %s\n", name, help, name, type);
}

static void write_one(struct text *out, const char *name, const char *type, const char *help,
                      double value)
{
    write_head(out, name, type, help);
    text_printf(out, "pkmserve_%s %.17g\n", name, value);
}

void metrics_put_histogram(struct text *out, const char *name, const char *labels, const char *help,
                           const struct histogram *h, int every)
{
    const char *const comma = labels[0] != '\0' ? "," : "";
    text_printf(out, "# HELP %s %s\n# TYPE %s histogram\n", name, help, name);
    long long sum = 0;
    for (int i = 0; i < h->n_bound; i++) {
        sum += get(&h->bucket[i]);
        if (i % every == 0) {
            text_printf(out, "%s_bucket{%s%sle=\"%.15g\"} %lld\n", name, labels, comma, h->bound[i],
                        sum);
        }
    }
    /* The count is the sum of the buckets, so that a scrape in the middle of an observation is
     * consistent. */
    sum += get(&h->bucket[h->n_bound]);
    text_printf(out, "%s_bucket{%s%sle=\"+Inf\"} %lld\n", name, labels, comma, sum);
    const char *const open = labels[0] != '\0' ? "{" : "";
    const char *const close = labels[0] != '\0' ? "}" : "";
    text_printf(out, "%s_sum%s%s%s %.17g\n", name, open, labels, close,
                atomic_load_explicit(&h->sum, memory_order_relaxed));
    text_printf(out, "%s_count%s%s%s %lld\n", name, open, labels, close, sum);
}

void metrics_put_finished(struct text *out, const char *name, const char *labels,
                          const struct engine_stats *stats)
{
    const char *const comma = labels[0] != '\0' ? "," : "";
    const struct {
        const char *reason;
        const atomic_llong *n;
    } finished[] = {{"stop", &stats->success_stop},
                    {"length", &stats->success_length},
                    {"abort", &stats->aborted},
                    {"error", &stats->errored}};
    text_printf(out, "# HELP %s Sequences ended, by reason.\n# TYPE %s counter\n", name, name);
    for (size_t i = 0; i < sizeof finished / sizeof finished[0]; i++) {
        text_printf(out, "%s{%s%sfinished_reason=\"%s\"} %lld\n", name, labels, comma,
                    finished[i].reason, get(finished[i].n));
    }
}

static void write_histogram(struct text *out, const char *name, const char *help,
                            const struct histogram *h)
{
    char full[METRICS_NAME_MAX];
    const int n = snprintf(full, sizeof full, "pkmserve_%s", name);
    CHECK(n > 0 && n < (int)sizeof full);
    metrics_put_histogram(out, full, "", help, h, 1);
}

void metrics_put_label(struct text *out, const char *value)
{
    for (const char *c = value; *c != '\0'; c++) {
        if (*c == '"' || *c == '\\') {
            text_add(out, "\\", 1);
        }
        text_add(out, *c == '\n' ? " " : c, 1);
    }
}

static void write_front(struct text *out, struct server *server)
{
    const struct metrics *const metrics = &server->metrics;
    write_head(out, "requests_total", "counter", "Requests by route and HTTP status.");
    for (int r = 0; r < routes_n(); r++) {
        for (int c = 0; c < METRICS_CODE_N; c++) {
            const long long n = get(&metrics->request[r][c]);
            if (n == 0) {
                continue;
            }
            char code[8] = "other";
            if (c < METRICS_CODE_N - 1) {
                (void)snprintf(code, sizeof code, "%d", codes[c]);
            }
            text_printf(out, "pkmserve_requests_total{route=\"%s\",code=\"%s\"} %lld\n",
                        routes_name(r), code, n);
        }
    }
    write_head(out, "requests_rejected_total", "counter", "Requests turned away, by reason.");
    for (int i = 0; i < METRICS_REASON_N; i++) {
        text_printf(out, "pkmserve_requests_rejected_total{reason=\"%s\"} %lld\n", reasons[i],
                    get(&metrics->rejected[i]));
    }
    write_head(out, "http_requests_total", "counter", "HTTP requests by method.");
    for (int i = 0; i < METRICS_METHOD_N; i++) {
        text_printf(out, "pkmserve_http_requests_total{method=\"%s\"} %lld\n", methods[i],
                    get(&metrics->method[i]));
    }
    write_one(out, "http_connections", "gauge", "Open connections.",
              http_connections(server->http));
    write_histogram(out, "request_tokenize_time_seconds", "Time to read and tokenise a request.",
                    &metrics->tokenize);
}

static void write_score(struct text *out, const struct metrics *metrics)
{
    static const char *const names[] = {"score_items_total", "score_tokens_total",
                                        "score_unknown_tokens_total", "score_positions_total",
                                        "score_nll_nats_total"};
    static const char *const helps[] = {
        "Items scored.", "Tokens whose log-probability was counted.",
        "Tokens of scored texts that the vocabulary does not know.",
        "Positions computed for scoring, overlaps of windows included.",
        "Sum of the negative log-probabilities of all scored tokens, in nats."};
    for (int k = 0; k < 5; k++) {
        write_head(out, names[k], "counter", helps[k]);
        for (int f = 0; f < METRICS_FORM_N; f++) {
            const struct metrics_score *const s = &metrics->score[f];
            const atomic_llong *const value[] = {&s->items, &s->tokens, &s->unknown, &s->positions,
                                                 &s->nll_micro};
            text_printf(out, "pkmserve_%s{form=\"%s\"} %.17g\n", names[k], forms[f],
                        (double)get(value[k]) * (k == 4 ? 1e-6 : 1));
        }
    }
}

static void write_engine_counters(struct text *out, const struct engine_stats *stats)
{
    write_one(out, "prompt_tokens_total", "counter", "Prompt tokens computed.",
              (double)get(&stats->prompt_tokens));
    write_one(out, "generation_tokens_total", "counter", "Tokens generated.",
              (double)get(&stats->generation_tokens));
    metrics_put_finished(out, "pkmserve_request_success_total", "", stats);
    static const char *const stages[STAGE_N] = {"queued", "prefill", "decode", "score"};
    write_head(out, "requests_cancelled_total", "counter",
               "Requests whose client left, by what they were doing.");
    for (int i = 0; i < STAGE_N; i++) {
        text_printf(out, "pkmserve_requests_cancelled_total{stage=\"%s\"} %lld\n", stages[i],
                    get(&stats->cancelled[i]));
    }
    write_one(out, "prefix_cache_queries_total", "counter",
              "Tokens looked for in the cache, of texts that may leave some uncomputed.",
              (double)get(&stats->prefix_queries));
    write_one(out, "prefix_cache_hits_total", "counter",
              "Tokens found in the cache and not computed again.",
              (double)get(&stats->prefix_hits));
    write_one(out, "engine_steps_total", "counter", "Steps of the engine.",
              (double)get(&stats->steps));
    write_one(out, "engine_busy_seconds_total", "counter", "Time in which the engine had work.",
              (double)get(&stats->busy_us) * 1e-6);
    write_one(out, "engine_model_seconds_total", "counter",
              "Of it, time in which the model computed and drew tokens.",
              (double)get(&stats->model_us) * 1e-6);
}

static void write_engine_gauges(struct text *out, struct engine *engine,
                                const struct engine_stats *stats)
{
    const struct engine_options *const limits = engine_limits(engine);
    write_one(out, "num_requests_running", "gauge", "Requests being computed.",
              (double)get(&stats->running));
    write_one(out, "num_requests_waiting", "gauge", "Requests in the queue.",
              (double)get(&stats->waiting));
    const long long pages = get(&stats->kv_pages);
    write_one(out, "kv_cache_usage_perc", "gauge", "Share of the cache in use, 0 to 1.",
              pages > 0 ? (double)get(&stats->kv_pages_used) / (double)pages : 0);
    write_one(out, "queue_tokens", "gauge", "Tokens in the queue.",
              (double)get(&stats->waiting_tokens));
    write_one(out, "queue_limit_requests", "gauge", "Requests that the queue takes.",
              limits->max_queue);
    write_one(out, "queue_limit_tokens", "gauge", "Tokens that the queue takes.",
              (double)limits->max_queue_tokens);
    const long long last_us = get(&stats->last_step_us);
    struct timespec now;
    (void)clock_gettime(CLOCK_REALTIME, &now);
    const double age = (double)(clock_now_us() - last_us) * 1e-6;
    write_one(out, "engine_last_step_timestamp_seconds", "gauge",
              "When the last step ended, in Unix time; 0 = none yet.",
              last_us > 0 ? (double)now.tv_sec + (double)now.tv_nsec * 1e-9 - age : 0);
}

static void write_state(struct text *out, struct server *server, struct engine *engine)
{
    static const char *const states[] = {"loading", "ready", "draining", "failed", "stopped"};
    int state = engine != NULL ? (int)engine_state(engine) : ENGINE_LOADING;
    if (state == ENGINE_READY && atomic_load(&server->draining)) {
        state = ENGINE_DRAINING;
    }
    write_head(out, "engine_state", "gauge", "1 for the state that the engine is in.");
    for (int i = 0; i < 5; i++) {
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
        write_histogram(out, all[i].name, all[i].help, all[i].h);
    }
}

/* What the device has, and what was left of it after starting: each where it is known. */
static void write_device_memory(struct text *out, struct engine *engine,
                                const struct engine_stats *stats)
{
    const size_t total = engine_backend(engine)->memory_bytes;
    write_head(out, "device_memory_bytes", "gauge", "Memory of the device; left after starting.");
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
    write_head(out, "model_bytes", "gauge", "Memory reserved at start, by what it holds.");
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
    write_head(out, "startup_seconds", "gauge", "Duration of the phases of starting.");
    for (size_t i = 0; i < sizeof phases / sizeof phases[0]; i++) {
        text_printf(out, "pkmserve_startup_seconds{phase=\"%s\"} %.17g\n", phases[i].name,
                    phases[i].seconds);
    }
    write_head(out, "memory_slots", "gauge", "Slots of a memory layer.");
    for (int m = 0; m < info->n_memory; m++) {
        text_printf(out, "pkmserve_memory_slots{layer=\"%d%s\"} %lld\n", info->memory[m].layer,
                    info->memory[m].after ? "+" : "", (long long)info->memory[m].n_slot);
    }
    write_head(out, "memory_lookups_total", "counter", "Slots read by a memory layer.");
    for (int m = 0; m < info->n_memory; m++) {
        text_printf(out, "pkmserve_memory_lookups_total{layer=\"%d%s\"} %lld\n",
                    info->memory[m].layer, info->memory[m].after ? "+" : "",
                    get(&stats->memory_lookups[m]));
    }
    const struct engine_options *const limits = engine_limits(engine);
    write_head(out, "cache_config_info", "gauge", "The key/value cache.");
    text_printf(out,
                "pkmserve_cache_config_info{block_size=\"%d\",num_blocks=\"%lld\","
                "cache_dtype=\"%s\"} 1\n",
                KV_PAGE, get(&stats->kv_pages), dtype_name(info->cache_dtype));
    write_head(out, "model_info", "gauge", "The model.");
    text_puts(out, "pkmserve_model_info{model_name=\"");
    metrics_put_label(out, server->limits.model_name);
    text_printf(out,
                "\",family=\"%s\",dtype=\"%s\",n_layer=\"%d\",d_model=\"%d\",n_memory=\"%d\","
                "max_model_len=\"%d\",memory_placement=\"%s\",deterministic=\"%s\"} 1\n",
                info->family, dtype_name(info->dtype), info->n_layer, info->d_model, info->n_memory,
                engine_context(limits->max_model_len), placement_name(info->value_placement),
                limits->backend.fast_math ? "off" : "on");
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
    write_front(out, server);
    write_score(out, &server->metrics);
    if (engine != NULL) {
        const struct engine_stats *const stats = engine_stats(engine);
        write_engine_counters(out, stats);
        write_engine_gauges(out, engine, stats);
        write_histograms(out, stats);
        write_model(out, server, engine, stats);
        usage_write(out, server->usage);
        metrics_compat_write(out, compat_of(server->options->metrics_compat),
                             server->limits.model_name, engine);
    }
    write_head(out, "build_info", "gauge", "The program.");
    text_printf(out, "pkmserve_build_info{version=\"%s\",backend=\"%s\"} 1\n", PKMSERVE_VERSION,
                engine != NULL ? engine_backend(engine)->name : "");
    write_process(out, server);
}
