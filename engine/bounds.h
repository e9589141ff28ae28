/* The engine's options, checked and completed, and the size of a step that follows from them. */
#ifndef ENGINE_BOUNDS_H
#define ENGINE_BOUNDS_H

#include "engine/engine.h"

/* Checks the options against each other and the model, and resolves those that are 0; n_tok_good is
 * the backend's. ERR_ARGUMENT names the option, its value and what is accepted. */
enum err_code bounds_resolve(struct engine_options *o, const struct model_info *info,
                             int n_tok_good, struct err *err);

/* Of resolved options. */
struct step_limits bounds_of_step(const struct engine_options *o, const struct model_info *info);

#endif
