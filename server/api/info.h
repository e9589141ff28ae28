/* The body of GET /info, also printed by --check. */
#ifndef SERVER_INFO_H
#define SERVER_INFO_H

#include "server/json/text.h"
#include "server/options/options.h"

void info_write(struct text *out, struct engine *engine, const struct options *options,
                const char *model_name);

#endif
