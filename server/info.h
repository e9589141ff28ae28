/* The body of GET /info, also printed by --check. */
#ifndef SERVER_INFO_H
#define SERVER_INFO_H

#include "server/options.h"
#include "server/text.h"

void info_write(struct text *out, struct engine *engine, const struct options *options,
                const char *model_name);

#endif
