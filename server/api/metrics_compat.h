/* Metrics under the names of other servers. */
#ifndef SERVER_METRICS_COMPAT_H
#define SERVER_METRICS_COMPAT_H

#include "server/json/text.h"

struct engine;

enum metrics_compat { METRICS_COMPAT_NONE, METRICS_COMPAT_VLLM, METRICS_COMPAT_TGI };

/* Appends the figures of an open engine. */
void metrics_compat_write(struct text *out, enum metrics_compat names, const char *model_name,
                          struct engine *engine);

#endif
