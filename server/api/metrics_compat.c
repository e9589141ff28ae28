/* The same figures under the names of other servers (--metrics-compat), so that their dashboards,
 * autoscalers and load generators read them unchanged. Called by metrics_text.c; reads the engine's
 * counters and keeps none. */
#include "server/api/metrics_compat.h"

#include "engine/engine.h"
#include "engine/stats.h"
#include "server/api/metrics.h"

#include <string.h>

/* Each sample of vLLM's carries the model's name, OPTIONS_MODEL_NAME_MAX bytes at most, which its
 * quotation marks double. With every third bound, or one in so many bytes of labels, there is room
 * for them and all of our own within the contract's 64 KiB. */
enum { COMPAT_VLLM_EVERY = 3, COMPAT_VLLM_LABEL_BYTES = 16 };

struct compat_histogram {
    const char *name, *help;
    const struct histogram *h;
};

struct compat_value {
    const char *name, *type, *help;
    double value;
};

static double get(const atomic_llong *counter)
{
    return (double)atomic_load_explicit(counter, memory_order_relaxed);
}

static double usage_of(const struct engine_stats *stats)
{
    const double pages = get(&stats->kv_pages);
    return pages > 0 ? get(&stats->kv_pages_used) / pages : 0;
}

/* labels: of each sample, "" or "name=\"value\",..." */
static void write_values(struct text *out, const struct compat_value *value, size_t n,
                         const char *labels)
{
    for (size_t i = 0; i < n; i++) {
        text_printf(out, "# HELP %s %s\n# TYPE %s %s\n%s", value[i].name, value[i].help,
                    value[i].name, value[i].type, value[i].name);
        text_printf(out, labels[0] != '\0' ? "{%s}" : "%s", labels);
        text_printf(out, " %.17g\n", value[i].value);
    }
}

static void write_histograms(struct text *out, const struct compat_histogram *all, size_t n,
                             const char *labels, int every)
{
    for (size_t i = 0; i < n; i++) {
        metrics_put_histogram(out, all[i].name, labels, all[i].help, all[i].h, every);
    }
}

static void write_vllm(struct text *out, const struct engine_stats *stats, const char *labels)
{
    const int by_labels = (int)strlen(labels) / COMPAT_VLLM_LABEL_BYTES;
    const int every = by_labels > COMPAT_VLLM_EVERY ? by_labels : COMPAT_VLLM_EVERY;
    const struct compat_value value[] = {
        {"vllm:num_requests_running", "gauge", "Requests being computed.", get(&stats->running)},
        {"vllm:num_requests_waiting", "gauge", "Requests in the queue.", get(&stats->waiting)},
        {"vllm:kv_cache_usage_perc", "gauge", "Share of the cache in use, 0 to 1.",
         usage_of(stats)},
        {"vllm:prompt_tokens_total", "counter",
         "Tokens of prompts read, computed or found in the cache.", get(&stats->prompt_tokens)},
        {"vllm:generation_tokens_total", "counter", "Tokens generated.",
         get(&stats->generation_tokens)},
        {"vllm:prefix_cache_queries_total", "counter", "Tokens looked for in the cache.",
         get(&stats->prefix_queries)},
        {"vllm:prefix_cache_hits_total", "counter", "Tokens found in the cache.",
         get(&stats->prefix_hits)},
    };
    write_values(out, value, sizeof value / sizeof value[0], labels);
    text_printf(out,
                "# HELP vllm:engine_sleep_state 1 for the engine's state: ours never sleeps.\n"
                "# TYPE vllm:engine_sleep_state gauge\n"
                "vllm:engine_sleep_state{%s,sleep_state=\"awake\"} 1\n",
                labels);
    metrics_put_finished(out, "vllm:request_success_total", labels, stats);
    text_printf(out,
                "# HELP vllm:cache_config_info The key/value cache.\n"
                "# TYPE vllm:cache_config_info gauge\n"
                "vllm:cache_config_info{%s,block_size=\"%d\",num_gpu_blocks=\"%.0f\"} 1\n",
                labels, KV_PAGE, get(&stats->kv_pages));
    const struct compat_histogram all[] = {
        {"vllm:time_to_first_token_seconds", "From arrival to the first token.", &stats->ttft},
        {"vllm:inter_token_latency_seconds", "Between two tokens of a sequence.", &stats->itl},
        {"vllm:request_time_per_output_token_seconds", "Mean time per token after the first.",
         &stats->tpot},
        {"vllm:e2e_request_latency_seconds", "From arrival to the end.", &stats->e2e},
        {"vllm:request_queue_time_seconds", "In the queue.", &stats->queue_time},
        {"vllm:request_inference_time_seconds", "From start to end.", &stats->inference_time},
        {"vllm:request_prefill_time_seconds", "From start to the first token.",
         &stats->prefill_time},
        {"vllm:request_decode_time_seconds", "From the first token to the end.",
         &stats->decode_time},
        {"vllm:request_prompt_tokens", "Prompt tokens of a sequence.", &stats->prompt_len},
        {"vllm:request_generation_tokens", "Generated tokens of a sequence.",
         &stats->generation_len},
        {"vllm:request_params_max_tokens", "The max_tokens of a sequence.", &stats->max_tokens},
        {"vllm:iteration_tokens_total", "Rows of a step.", &stats->step_tokens},
    };
    write_histograms(out, all, sizeof all / sizeof all[0], labels, every);
}

/* The names that kubernetes-sigs/inference-perf asks for. */
static void write_tgi(struct text *out, const struct engine_stats *stats)
{
    const struct compat_value value[] = {
        {"tgi_queue_size", "gauge", "Requests in the queue.", get(&stats->waiting)},
        {"tgi_request_success", "counter", "Sequences that ended well.",
         get(&stats->success_stop) + get(&stats->success_length)},
    };
    const struct compat_histogram all[] = {
        {"tgi_request_duration", "From arrival to the end.", &stats->e2e},
        {"tgi_request_mean_time_per_token_duration", "Mean time per token after the first.",
         &stats->tpot},
        {"tgi_request_input_length", "Prompt tokens of a sequence.", &stats->prompt_len},
        {"tgi_request_generated_tokens", "Generated tokens of a sequence.", &stats->generation_len},
    };
    write_values(out, value, sizeof value / sizeof value[0], "");
    write_histograms(out, all, sizeof all / sizeof all[0], "", 1);
}

void metrics_compat_write(struct text *out, enum metrics_compat names, const char *model_name,
                          struct engine *engine)
{
    const struct engine_stats *const stats = engine_stats(engine);
    if (names == METRICS_COMPAT_TGI) {
        write_tgi(out, stats);
    } else if (names == METRICS_COMPAT_VLLM) {
        struct text labels = {0};
        text_puts(&labels, "model_name=\"");
        metrics_put_label(&labels, model_name);
        text_puts(&labels, "\",engine=\"0\"");
        if (labels.failed) {
            out->failed = true;
        } else {
            text_add(&labels, "", 1);
            write_vllm(out, stats, labels.data);
        }
        text_free(&labels);
    }
}
