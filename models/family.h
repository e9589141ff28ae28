/* A family of models: one file with its parameters (a struct that begins with a struct network and
 * may end in an array of layers), where they are in the files (bind), which activations it needs
 * (lay_out), and what is computed (forward). model.c does the rest: it opens, reserves and closes.
 */
#ifndef MODELS_FAMILY_H
#define MODELS_FAMILY_H

#include "models/model.h"

struct arena;  /* models/arena.h */
struct config; /* models/config.h */
struct loader; /* models/loader.h */

struct model_family {
    const char *name;               /* config.json "model_type" */
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
