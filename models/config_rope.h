/* rope_scaling of config.json. For models/config.c. */
#ifndef MODELS_CONFIG_ROPE_H
#define MODELS_CONFIG_ROPE_H

#include "models/config.h"
#include "models/json_file.h"

/* Reads value, an object with rope_type and what that kind needs, under the names that Hugging
 * Face's config.json has for them. path is only named in errors. */
enum err_code config_rope_read(struct rope_scaling *scaling, const json_t *value, const char *path,
                               struct err *err);

#endif
