/* config.c's reader of one entry of "memories". */
#ifndef MODELS_CONFIG_MEMORY_H
#define MODELS_CONFIG_MEMORY_H

#include "models/config.h"
#include "models/json_file.h"

/* Reads value into config->memory[index] and checks it against the earlier ones and the model's
 * other fields, which must have been read. */
enum err_code config_memory_read(struct config *config, const json_t *value, int index,
                                 const char *path, struct err *err);

#endif
