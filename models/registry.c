/* The list of model families: each is one file, and one line here. */
#include "models/family.h"

extern const struct model_family all_attention_family;
extern const struct model_family memory_llama_family;
extern const struct model_family pkm_transformer_family;

const struct model_family *const model_families[] = {
    &pkm_transformer_family,
    &all_attention_family,
    &memory_llama_family,
    NULL,
};
