/* `pkmserve inspect`: what a model is. It is opened as the server would open it, so a model that
 * can be inspected can be served. */
#include "engine/tokenizer.h"
#include "models/overlay.h"
#include "server/cli/cmd.h"
#include "server/cli/progress.h"
#include "server/io/model_json.h"
#include "server/json/json.h"

#include <string.h>

/* Parameters by purpose. A tensor belongs to the first row whose mark occurs in its name;
 * neighbouring rows of the same name are one kind. */
struct kind {
    const char *mark;
    const char *name;
};
static const struct kind kinds[] = {
    {"persistent.", "persistent vectors"},
    {".values.", "memory values"},
    {".experts.", "memory values"},
    {".keys", "memory keys"},
    {".query_", "memory queries"},
    {".value_gate.", "memory gates"},
    {".value_proj.", "memory gates"},
    {".output_gate.", "memory gates"},
    {"norm", "norms"},
    {"embeddings", "embeddings"},
    {"positions", "embeddings"},
    {"attention", "attention"},
    {".query.", "attention"},
    {".key.", "attention"},
    {".value.", "attention"},
    {".out.", "attention"},
    {"ffn", "feed-forward"},
    {"output.", "output"},
    {"pred_layer.", "output"},
    {"", "other"},
};
enum { N_KIND = sizeof kinds / sizeof kinds[0] };

struct kind_sum {
    int64_t n_param;
    int64_t bytes;
    unsigned dtypes; /* bit d: enum dtype d occurs */
};

struct inspection {
    const char *path;
    const char *backend;
    const struct model_info *info;
    const char *tokenizer;          /* kind, NULL = none */
    const char (*hash)[SHA256_HEX]; /* [n_memory] "" = it reads another's table; or NULL */
    struct kind_sum kind[N_KIND];
    struct kind_sum total;
};

static void add_entry(struct kind_sum *sum, const struct safetensors_entry *entry)
{
    /* Running statistics and the scales of int8 weights take bytes, but are no parameters. */
    const bool learned = !strstr(entry->name, ".running_") && !strstr(entry->name, ".scale");
    const int per_element = tensors_dtype(entry) == DTYPE_Q4 ? 2 : 1;
    sum->n_param += learned ? per_element * entry->n_elem : 0;
    sum->bytes += (int64_t)entry->bytes;
    sum->dtypes |= 1u << tensors_dtype(entry);
}

static void sum_kinds(struct inspection *it, const struct tensors *tensors)
{
    for (int i = 0; i < tensors_n(tensors); i++) {
        const struct safetensors_entry *const entry = tensors_at(tensors, i);
        int k = 0;
        while (!strstr(entry->name, kinds[k].mark)) {
            k++;
        }
        while (k > 0 && strcmp(kinds[k].name, kinds[k - 1].name) == 0) {
            k--;
        }
        add_entry(&it->kind[k], entry);
        add_entry(&it->total, entry);
    }
}

/* "bf16 f32" */
static const char *dtype_list(char list[32], unsigned dtypes)
{
    int n = 0;
    list[0] = '\0';
    for (unsigned d = 0; d < DTYPE_N; d++) {
        if (dtypes & (1u << d)) {
            n +=
                snprintf(list + n, 32 - (size_t)n, "%s%s", n ? " " : "", dtype_name((enum dtype)d));
        }
    }
    return list;
}

static const char *act_name(const struct model_info *info)
{
    return info->gated             ? "silu, gated"
           : info->act == ACT_GELU ? "gelu"
           : info->act == ACT_RELU ? "relu"
                                   : "none";
}

/* ---- JSON ---------------------------------------------------------------------------------- */

static void json_kind(struct text *out, const struct kind_sum *sum)
{
    char list[32];
    json_field_int(out, "parameters", sum->n_param);
    json_field_int(out, "bytes", sum->bytes);
    json_field_string(out, "dtype", dtype_list(list, sum->dtypes));
}

static void json_hashes(struct text *out, const struct inspection *it)
{
    json_key(out, "hashes");
    json_open(out, '[');
    for (int m = 0; m < it->info->n_memory; m++) {
        json_open(out, '{');
        json_field_int(out, "memory", m);
        if (it->hash[m][0] != '\0') {
            json_field_string(out, "sha256", it->hash[m]);
        } else {
            json_field_int(out, "values_of", it->info->memory[m].values_of);
        }
        json_close(out, '}');
    }
    json_close(out, ']');
}

static enum err_code print_json(const struct inspection *it, struct err *err)
{
    const struct model_info *const info = it->info;
    struct text out = {0};
    json_open(&out, '{');
    json_field_string(&out, "model", it->path);
    model_json_write(&out, MODEL_JSON_INSPECT, info, it->tokenizer);
    json_field_int(&out, "context", info->context);
    json_field_string(&out, "activation", act_name(info));
    json_field_bool(&out, "tied_output", info->tie_output);
    json_key(&out, "kinds");
    json_open(&out, '[');
    for (int k = 0; k < N_KIND; k++) {
        if (it->kind[k].n_param > 0) {
            json_open(&out, '{');
            json_field_string(&out, "kind", kinds[k].name);
            json_kind(&out, &it->kind[k]);
            json_close(&out, '}');
        }
    }
    json_close(&out, ']');
    json_key(&out, "total");
    json_open(&out, '{');
    json_kind(&out, &it->total);
    json_close(&out, '}');
    json_field_string(&out, "backend", it->backend);
    json_field_string(&out, "computed_in", dtype_name(info->dtype));
    json_field_int(&out, "weight_bytes", (int64_t)info->weight_bytes);
    json_field_int(&out, "value_bytes", (int64_t)info->value_bytes);
    if (it->hash != NULL) {
        json_hashes(&out, it);
    }
    json_close(&out, '}');
    const enum err_code code = cmd_print(&out, err);
    text_free(&out);
    return code;
}

/* ---- text ---------------------------------------------------------------------------------- */

static void print_memory(const struct pkm_info *memory, int m)
{
    const struct pkm_shape *const shape = &memory->shape;
    printf("  memory      layer %d, %s: %lld slots (", memory->layer,
           memory->place == MEMORY_AFTER    ? "added after it"
           : memory->place == MEMORY_BESIDE ? "beside its feed-forward"
                                            : "in place of its feed-forward",
           (long long)memory->n_slot);
    if (shape->kind == PKM_PRODUCT) {
        printf("%d x %d product keys", shape->n_key, shape->n_key);
    } else {
        printf("flat keys");
    }
    printf("), heads %d, k %d, keys %d wide, queries %s%s%s%s%s%s", shape->n_head, shape->k_top,
           shape->d_key, pkm_query_name(memory->query), shape->scores ? ", rescored" : "",
           memory->experts ? ", of experts" : "", memory->value_gate ? ", gated values" : "",
           memory->value_projection ? ", projected values" : "",
           memory->output_gate ? ", gated output" : "");
    if (memory->values_of != m) {
        printf(", values of memory %d", memory->values_of);
    }
    putchar('\n');
}

static void print_kind(const char *name, const struct kind_sum *sum)
{
    char list[32];
    printf("  %-16s %14lld %14lld  %s\n", name, (long long)sum->n_param, (long long)sum->bytes,
           dtype_list(list, sum->dtypes));
}

static void print_hashes(const struct inspection *it)
{
    printf("\n");
    for (int m = 0; m < it->info->n_memory; m++) {
        if (it->hash[m][0] != '\0') {
            printf("  memory %d  values, SHA-256 %s\n", m, it->hash[m]);
        } else {
            printf("  memory %d  reads the values of memory %d\n", m,
                   it->info->memory[m].values_of);
        }
    }
}

static void print_text(const struct inspection *it)
{
    const struct model_info *const info = it->info;
    printf("%s\n  family      %s\n  vocabulary  %d, %s\n", it->path, info->family, info->n_vocab,
           it->tokenizer ? it->tokenizer : "no tokenizer: token ids only");
    if (info->context > 0) {
        printf("  context     %d positions\n", info->context);
    } else {
        printf("  context     no limit; a layer sees at most %d positions back\n", info->window);
    }
    printf("  layers      %d, width %d, heads %d of %d (%d of keys and values), feed-forward %d "
           "(%s)\n",
           info->n_layer, info->d_model, info->n_head, info->d_attention / info->n_head,
           info->n_kv_head, info->d_ff, act_name(info));
    if (info->n_cutoff > 0) {
        printf("  output      adaptive: a head of frequent words and %d of rarer ones\n",
               info->n_cutoff);
    } else {
        printf("  output      %s\n",
               info->tie_output ? "tied to the embeddings" : "its own matrix");
    }
    for (int i = 0; i < info->n_lang; i++) {
        printf("  language    %d %s\n", i, info->lang[i]);
    }
    for (int m = 0; m < info->n_memory; m++) {
        print_memory(&info->memory[m], m);
    }
    printf("  computed    in %s by %s; %.1f MB of weights", dtype_name(info->dtype), it->backend,
           (double)info->weight_bytes / 1e6);
    if (info->value_bytes > 0) {
        printf(" and %.1f MB of memory values\n\n", (double)info->value_bytes / 1e6);
    } else {
        printf("%s\n\n", info->n_memory ? "; memory values are read in place" : "");
    }
    printf("  %-16s %14s %14s  %s\n", "kind", "parameters", "bytes", "dtype");
    for (int k = 0; k < N_KIND; k++) {
        if (it->kind[k].n_param > 0) {
            print_kind(kinds[k].name, &it->kind[k]);
        }
    }
    print_kind("total", &it->total);
    if (it->hash != NULL) {
        print_hashes(it);
    }
}

int cmd_inspect(const struct options *options)
{
    struct err err;
    struct progress progress;
    struct backend *be = NULL;
    struct model *model = NULL;
    struct tensors *tensors = NULL;
    struct tokenizer *tokenizer = NULL;
    struct engine_options engine = options_engine(options);
    progress_begin(&progress, NULL, 0);
    engine.model.progress = progress_load;
    engine.model.progress_ctx = &progress;
    enum err_code code = backend_open(&be, &engine.backend, &err);
    if (code == ERR_OK) {
        code = model_open(&model, be, options->model, &engine.model, &err);
    }
    if (code == ERR_OK) {
        code = tensors_open(&tensors, options->model, &err);
    }
    if (code == ERR_OK) {
        code = tokenizer_open(&tokenizer, options->model, engine.tokenizer_path,
                              model_info(model)->tokenizer, model_info(model)->n_vocab, &err);
    }
    char hash[MODEL_PKM_MAX][SHA256_HEX];
    for (int m = 0; code == ERR_OK && options->hash && m < model_info(model)->n_memory; m++) {
        code = overlay_base_hash(hash[m], tensors, model_info(model), m, &err);
    }
    progress_end(&progress);
    if (code == ERR_OK) {
        struct inspection it = {.path = options->model,
                                .backend = be->name,
                                .info = model_info(model),
                                .hash = options->hash ? (const char(*)[SHA256_HEX])hash : NULL,
                                .tokenizer = tokenizer ? tokenizer_kind(tokenizer) : NULL};
        sum_kinds(&it, tensors);
        if (options->json) {
            code = print_json(&it, &err);
        } else {
            print_text(&it);
        }
    }
    tokenizer_close(tokenizer);
    tensors_close(tensors);
    model_close(model);
    backend_close(be);
    return code == ERR_OK ? 0 : cmd_fail(&err);
}
