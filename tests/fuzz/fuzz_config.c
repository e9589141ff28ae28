/* Fuzz target: config.json from any bytes. What is accepted must be within the bounds that the
 * families rely on. Needs models/, kernels/ and jansson (model_type is looked up among the
 * families). Run by `make fuzz`; tests/fuzz/corpus/config holds the seeds. */
#include "models/config.h"

#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

static void check_memory(const struct config *c, const struct config_memory *memory)
{
    const struct pkm_shape *const s = &memory->info.shape;
    const int64_t n_slot = s->kind == PKM_PRODUCT ? (int64_t)s->n_key * s->n_key : s->n_key;
    CHECK(memory->info.layer >= 0 && memory->info.layer < c->n_layer);
    CHECK(s->n_head >= 1 && s->n_head <= CONFIG_HEAD_MAX);
    CHECK(s->k_top >= 1 && s->k_top <= s->n_key && s->k_top <= PKM_K_TOP_MAX);
    CHECK(s->d_key >= 1 && s->d_key <= CONFIG_WIDTH_MAX);
    CHECK(s->kind == PKM_FLAT || s->d_key % 2 == 0);
    CHECK(n_slot <= INT32_MAX && memory->info.n_slot >= 1);
    CHECK(memory->modulo ? memory->info.n_slot < n_slot : memory->info.n_slot == n_slot);
    CHECK(memory->info.values_of >= 0 && &c->memory[memory->info.values_of] <= memory);
    CHECK(c->memory[memory->info.values_of].info.n_slot == memory->info.n_slot);
    CHECK(memory->info.n_hidden >= 0 && memory->info.n_hidden <= MODEL_HIDDEN_MAX);
    CHECK(memory->info.rescore.temperature > 0 && memory->info.rescore.n_slot >= 1);
    CHECK(memory->info.query < QUERY_IDENTITY || s->d_key == c->d_model);
    const struct pkm_info *const info = &memory->info;
    const struct pkm_info *const owner = &c->memory[memory->info.values_of].info;
    CHECK(info->d_value >= 1 && info->d_value <= CONFIG_WIDTH_MAX);
    CHECK(info->d_value == c->d_model || (c->gated && info->value_projection));
    CHECK(info->d_value == owner->d_value && info->experts == owner->experts);
    CHECK(!info->value_gate || info->value_projection);
    CHECK(!info->experts || !info->value_projection);
    CHECK(c->gated || info->place != MEMORY_BESIDE);
    CHECK(!c->gated || s->kind == PKM_PRODUCT);
    CHECK((info->output_gate == OUTPUT_GATE_MLP) == (info->gate_hidden > 0));
    CHECK(info->query_norm.n >= 1 && s->n_head * (int64_t)s->d_key % info->query_norm.n == 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    static struct config c;
    struct err err = {0};
    const enum err_code code = config_parse(&c, (const char *)data, bytes, "fuzz", &err);
    if (code != ERR_OK) {
        CHECK(err.code == code && err.message[0] != '\0' && strchr(err.message, '\n') == NULL);
        return 0;
    }
    CHECK(c.family != NULL);
    CHECK(c.n_vocab >= 1 && c.n_vocab <= CONFIG_VOCAB_MAX && c.bos_id < c.n_vocab);
    CHECK(c.n_head >= 1 && c.d_model <= CONFIG_WIDTH_MAX);
    CHECK(c.d_head >= 1 && (int64_t)c.n_head * c.d_head <= CONFIG_WIDTH_MAX);
    CHECK(c.n_kv_head >= 1 && c.n_head % c.n_kv_head == 0);
    CHECK(c.gated ? c.d_head % 2 == 0 && c.rope_theta >= 1 && c.rope_theta <= 1e12
                  : c.d_head * c.n_head == c.d_model && c.n_kv_head == c.n_head);
    const struct rope_scaling *const rope = &c.rope_scaling;
    CHECK(rope->kind == ROPE_PLAIN || (c.gated && rope->factor >= 1 && rope->factor <= 1e6));
    CHECK(rope->kind != ROPE_LLAMA3 ||
          (rope->low > 0 && rope->high > rope->low && rope->original >= 1));
    CHECK(c.ends.n >= 0 && c.ends.n <= MODEL_END_MAX && (c.eos_id >= 0) == (c.ends.n > 0));
    for (int i = 0; i < c.ends.n; i++) {
        CHECK(c.ends.id[i] >= 0 && c.ends.id[i] < c.n_vocab);
    }
    CHECK(c.n_layer >= 1 && c.n_layer <= CONFIG_LAYER_MAX);
    const bool has_spans = c.max_span > 0; /* then persistent vectors may stand for the d_ff */
    CHECK(has_spans ? c.context == 0 && (c.d_ff >= 1) == (c.n_persistent == 0)
                    : c.context >= 1 && c.d_ff >= 1);
    CHECK(c.norm_eps > 0 && c.norm_eps <= 1);
    CHECK(c.n_lang >= 0 && c.n_lang <= MODEL_LANG_MAX);
    CHECK(c.n_memory >= 0 && c.n_memory <= MODEL_PKM_MAX);
    for (int m = 0; m < c.n_memory; m++) {
        check_memory(&c, &c.memory[m]);
    }
    return 0;
}
