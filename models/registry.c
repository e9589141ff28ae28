/* The model families of this build: one file and one line each. */
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
