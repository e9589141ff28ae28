/* A family of models: one file with the keys of its config.json, its parameters (a struct that
 * begins with a struct network and may end in an array of layers), where they are in the files
 * (bind), which activations it needs (lay_out), and what is computed (forward). model.c does the
 * rest: it opens, reserves and closes. */
#ifndef MODELS_FAMILY_H
#define MODELS_FAMILY_H

#include "models/model.h"

struct arena;  /* models/arena.h */
struct config; /* models/config.h */
struct loader; /* models/loader.h */

struct model_family {
    const char *name; /* config.json "model_type" */
    /* The keys of config.json that its models have besides those of all, and those of an entry of
     * its "memories" (NULL = it has none), from the tables of config.c and config_memory.c. "key?"
     * may be missing. Each list ends with NULL. */
    const char *const *keys, *const *memory_keys;
    /* Sets fields for which it has no keys, before any is read. NULL = nothing to set. */
    void (*set_defaults)(struct config *config);
    /* Checks its keys against one another, after all are read. NULL = nothing to check. */
    enum err_code (*check)(const struct config *config, const char *path, struct err *err);
    size_t self_bytes, layer_bytes; /* of its struct, without and per layer; zeroed before bind */
    /* Loads the parameters of self. */
    void (*bind)(void *self, struct loader *loader, const struct config *config);
    /* Takes all activations from arena, for steps within limits. */
    void (*lay_out)(void *self, struct arena *arena, const struct step_limits *limits);
    /* See model_forward. */
    void (*forward)(const void *self, struct step *step, const struct model_tap *tap);
};

/* NULL-terminated: models/registry.c. */
extern const struct model_family *const model_families[];

#endif
