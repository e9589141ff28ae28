/* The text of GET /metrics: the counters of the front end (metrics.h), the engine's
 * (engine/stats.h), the model, the process, and on request the names of other servers
 * (metrics_compat.h). */
#ifndef SERVER_METRICS_TEXT_H
#define SERVER_METRICS_TEXT_H

#include "server/json/text.h"

struct server;

/* Appends everything in Prometheus' text format. */
void metrics_write(struct text *out, struct server *server);

#endif
