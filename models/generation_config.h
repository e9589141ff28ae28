/* generation_config.json: how a model's makers recommend to draw from it. model_open reads it into
 * model_info.sampling; the server uses it where a request of its own dialect says nothing.
 *
 * The file is optional, and other programs write many more keys into it (lengths, ids, beams):
 * those that are not about drawing tokens are passed over. What is read, a null being nothing
 * given:
 *
 *   do_sample           false: the likeliest token always, whatever temperature says
 *   temperature         0 .. 2
 *   top_p               above 0, at most 1
 *   top_k               -1 .. 2^24; -1 and 0: off, and so is what exceeds the vocabulary
 *   min_p               0 .. below 1
 *   repetition_penalty  1e-6 .. 10 */
#ifndef MODELS_GENERATION_CONFIG_H
#define MODELS_GENERATION_CONFIG_H

#include "models/model.h"

enum { GENERATION_CONFIG_BYTES_MAX = 1 << 20 };

/* Reads dir/generation_config.json; MODEL_SAMPLING_PLAIN if there is none. */
enum err_code generation_config_read(struct model_sampling *sampling, const char *dir,
                                     struct err *err);

/* Reads it from memory; path is only named in errors. */
enum err_code generation_config_parse(struct model_sampling *sampling, const char *text,
                                      size_t bytes, const char *path, struct err *err);

#endif
