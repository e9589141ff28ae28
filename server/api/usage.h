/* How the memories are used by all traffic, for /metrics.
 *
 * The statistics sort all slots, which takes longer than a scrape may. One thread computes them
 * from the engine's totals when a scrape has asked, at most every USAGE_EVERY_S seconds and only if
 * there was traffic since; a scrape writes what was computed last and waits for nothing. */
#ifndef SERVER_USAGE_H
#define SERVER_USAGE_H

#include "engine/engine.h"
#include "server/json/text.h"

enum { USAGE_EVERY_S = 5 };

struct usage;

/* A model without memories gets NULL. The engine must outlive it. */
enum err_code usage_open(struct usage **usage, const struct engine *engine, struct err *err);
void usage_close(struct usage *usage); /* NULL is fine */

/* Writes the metrics, and starts computing newer ones. NULL is fine. */
void usage_write(struct text *out, struct usage *usage);

#endif
