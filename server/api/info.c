/* GET /info: the model, the device that computes, and the limits. The first names are those that
 * text generation clients read; the others are ours. */
#include "server/api/info.h"

#include "engine/stats.h"
#include "engine/tokenizer.h"
#include "server/io/model_json.h"
#include "server/json/json.h"
#include "server/version.h"

static void write_peer_names(struct text *out, const struct options *options,
                             const struct engine_options *limits, const char *model_name)
{
    json_field_string(out, "model_id", model_name);
    json_field_null(out, "model_sha");
    json_field_string(out, "model_pipeline_tag", "text-generation");
    json_field_int(out, "max_concurrent_requests", limits->max_queue);
    json_field_int(out, "max_best_of", 1);
    json_field_int(out, "max_stop_sequences", STOP_MAX);
    json_field_int(out, "max_input_tokens", engine_context(limits->max_model_len) - 1);
    json_field_int(out, "max_total_tokens", engine_context(limits->max_model_len));
    json_field_int(out, "validation_workers", 4);
    json_field_int(out, "max_client_batch_size", options->max_items);
    json_field_string(out, "router", "pkmserve");
    json_field_string(out, "version", PKMSERVE_VERSION);
    json_field_null(out, "sha");
    json_field_null(out, "docker_label");
}

/* null for a model without a context limit: none was set, and nothing is cut into windows. */
static void write_context(struct text *out, const char *name, int context)
{
    if (context > 0) {
        json_field_int(out, name, context);
    } else {
        json_field_null(out, name);
    }
}

static void write_identity(struct text *out, const struct engine_identity *compared)
{
    const char *const gap = engine_identity_gap(compared);
    json_key(out, "identity");
    json_open(out, '{');
    json_field_string(out, "probe", gap == NULL ? "ok" : "unchecked");
    json_field_string(out, "files", compared->files ? "ok" : "unchecked");
    json_field_string(out, "why", gap);
    if (gap == NULL) {
        json_field_int(out, "tokens", compared->n);
        json_field_float(out, "largest_difference", compared->difference);
        json_field_float(out, "tolerance", compared->tolerance);
    }
    json_close(out, '}');
}

static void write_model(struct text *out, const struct model_info *info,
                        const struct tokenizer *tokenizer, const struct engine_identity *compared)
{
    json_key(out, "model");
    json_open(out, '{');
    model_json_write(out, MODEL_JSON_INFO, info,
                     tokenizer != NULL ? tokenizer_kind(tokenizer) : NULL);
    write_context(out, "context", info->context);
    json_field_string(out, "file_dtype", dtype_name(info->file_dtype));
    json_field_string(out, "dtype", dtype_name(info->dtype));
    json_field_string(out, "kv_cache_dtype", dtype_name(info->cache_dtype));
    json_field_int(out, "n_param", info->n_param);
    json_field_int(out, "n_param_memory", info->n_param_values);
    json_field_bool(out, "add_bos", info->add_bos);
    const int ids[] = {info->bos_id, info->eos_id, info->pad_id, info->unk_id};
    static const char *const names[] = {"bos_token_id", "eos_token_id", "pad_token_id",
                                        "unk_token_id"};
    for (int i = 0; i < 4; i++) {
        if (ids[i] >= 0) {
            json_field_int(out, names[i], ids[i]);
        } else {
            json_field_null(out, names[i]);
        }
    }
    json_key(out, "eos_token_ids");
    json_open(out, '[');
    for (int i = 0; i < info->ends.n; i++) {
        json_put_int(out, info->ends.id[i]);
    }
    json_close(out, ']');
    write_identity(out, compared);
    json_close(out, '}');
}

static void write_limits(struct text *out, const struct options *options,
                         const struct engine_options *limits, const struct model_sampling *sampling)
{
    json_key(out, "limits");
    json_open(out, '{');
    json_field_int(out, "max_model_len", engine_context(limits->max_model_len));
    json_field_int(out, "max_seqs", limits->max_seqs);
    json_field_int(out, "max_batch_tokens", limits->max_batch_tokens);
    json_field_int(out, "kv_tokens", limits->kv_tokens);
    json_field_int(out, "max_queue", limits->max_queue);
    json_field_int(out, "max_queue_tokens", limits->max_queue_tokens);
    json_field_int(out, "max_items", options->max_items);
    json_field_int(out, "max_score_items", options->max_score_items);
    json_field_int(out, "max_score_tokens", options->max_score_tokens);
    json_field_int(out, "max_score_positions", options_score_positions(options));
    json_field_int(out, "max_logprobs", limits->max_logprobs);
    json_field_int(out, "max_body_bytes", options->max_body_bytes);
    json_field_int(out, "max_connections", options->max_connections);
    json_field_int(out, "max_timeout_ms", options->max_timeout_ms);
    json_close(out, '}');
    json_key(out, "defaults");
    json_open(out, '{');
    json_field_int(out, "max_tokens", options->default_max_tokens);
    json_field_setting(out, "temperature", sampling->temperature);
    json_field_setting(out, "top_p", sampling->top_p);
    json_field_int(out, "top_k", sampling->top_k);
    json_field_setting(out, "min_p", sampling->min_p);
    json_field_setting(out, "repetition_penalty", sampling->repetition);
    json_field_int(out, "timeout_ms", options->timeout_ms);
    write_context(out, "max_context", limits->max_model_len);
    write_context(out, "stride", limits->max_model_len);
    json_field_bool(out, "strict", options->strict);
    json_field_string(out, "memory_trace", options->memory_trace);
    json_field_bool(out, "memory_counts", options->memory_counts);
    json_field_string(out, "prefix_cache", limits->prefix_cache ? options->prefix_cache : "off");
    json_close(out, '}');
}

void info_write(struct text *out, struct engine *engine, const struct options *options,
                const char *model_name)
{
    const struct engine_options *const limits = engine_limits(engine);
    const struct model_info *const info = engine_model(engine);
    const struct backend *const backend = engine_backend(engine);
    const struct engine_stats *const stats = engine_stats(engine);
    json_open(out, '{');
    write_peer_names(out, options, limits, model_name);
    write_model(out, info, engine_tokenizer(engine), engine_identity(engine));
    json_key(out, "backend");
    json_open(out, '{');
    json_field_string(out, "name", backend->name);
    json_field_string(out, "description", backend->description);
    json_field_int(out, "threads", backend->n_thread);
    json_field_string(out, "device", limits->backend.device);
    json_field_string(out, "why", backend->note[0] != '\0' ? backend->note : NULL);
    json_field_bool(out, "deterministic", !limits->backend.fast_math);
    json_field_string(out, "products", backend->products[0] != '\0' ? backend->products : NULL);
    json_key(out, "fast_paths");
    json_open(out, '[');
    for (int i = 0; i < backend->n_fast_path; i++) {
        if (backend->fast_path[i].is_used) {
            json_put_string(out, backend->fast_path[i].name);
        }
    }
    json_close(out, ']');
    json_close(out, '}');
    json_key(out, "memory");
    json_open(out, '{');
    json_field_int(out, "weight_bytes", (int64_t)info->weight_bytes);
    json_field_int(out, "value_bytes", (int64_t)info->value_bytes);
    json_field_string(out, "value_placement", placement_name(info->value_placement));
    json_field_int(out, "kv_bytes", stats->kv_bytes);
    json_field_int(out, "workspace_bytes", stats->workspace_bytes);
    if (stats->available_bytes >= 0) {
        json_field_int(out, "available_bytes", stats->available_bytes);
    } else {
        json_field_null(out, "available_bytes");
    }
    json_close(out, '}');
    write_limits(out, options, limits, &info->sampling);
    json_close(out, '}');
}
