/* See model_json.h. */
#include "server/io/model_json.h"

#include "server/json/json.h"

/* The names that differ, by form. */
static const struct names {
    const char *n_vocab, *d_model, *n_layer, *n_head, *n_kv_head, *d_head, *d_ff;
    const char *d_key, *d_value;
} names[] = {
    [MODEL_JSON_INFO] = {"n_vocab", "d_model", "n_layer", "n_head", "n_kv_head", "d_head", "d_ff",
                         "d_key", "d_value"},
    [MODEL_JSON_INSPECT] = {"vocab_size", "width", "layers", "heads", "kv_heads", "head_width",
                            "feed_forward", "key_width", "value_width"},
};

static void write_memory(struct text *out, enum model_json_form form, const struct pkm_info *memory)
{
    const struct pkm_shape *const shape = &memory->shape;
    json_open(out, '{');
    json_field_int(out, "layer", memory->layer);
    json_field_string(out, "place", memory_place_name(memory->place));
    json_field_string(out, "kind", shape->kind == PKM_PRODUCT ? "product" : "flat");
    json_field_int(out, "slots", memory->n_slot);
    json_field_int(out, "heads", shape->n_head);
    json_field_int(out, "knn", shape->k_top);
    if (form == MODEL_JSON_INSPECT) {
        json_field_int(out, "keys", shape->n_key);
    }
    json_field_int(out, names[form].d_key, shape->d_key);
    json_field_int(out, names[form].d_value, memory->d_value);
    json_field_string(out, "query", pkm_query_name(memory->query));
    json_field_bool(out, "rescored", shape->scores);
    json_field_bool(out, "value_gate", memory->value_gate);
    json_field_bool(out, "value_projection", memory->value_projection);
    json_field_bool(out, "output_gate", memory->output_gate != OUTPUT_GATE_NONE);
    json_field_bool(out, "experts", memory->experts);
    json_field_int(out, "values_of", memory->values_of);
    json_close(out, '}');
}

void model_json_write(struct text *out, enum model_json_form form, const struct model_info *info,
                      const char *tokenizer)
{
    const struct names *const name = &names[form];
    json_field_string(out, "family", info->family);
    json_field_int(out, name->n_vocab, info->n_vocab);
    json_field_int(out, name->d_model, info->d_model);
    json_field_int(out, name->n_layer, info->n_layer);
    json_field_int(out, name->n_head, info->n_head);
    json_field_int(out, name->n_kv_head, info->n_kv_head);
    json_field_int(out, name->d_head, info->d_attention / info->n_head);
    json_field_int(out, name->d_ff, info->d_ff);
    json_field_string(out, "tokenizer", tokenizer);
    json_key(out, "languages");
    json_open(out, '[');
    for (int i = 0; i < info->n_lang; i++) {
        json_put_string(out, info->lang[i]);
    }
    json_close(out, ']');
    json_key(out, "memories");
    json_open(out, '[');
    for (int m = 0; m < info->n_memory; m++) {
        write_memory(out, form, &info->memory[m]);
    }
    json_close(out, ']');
}
