/* The life of the server: `pkmserve serve`. */
#ifndef SERVER_SERVE_H
#define SERVER_SERVE_H

#include "server/options/options.h"

/* false in pkmserve-engine, which has none/serve.c in place of serve.c. */
extern const bool serve_is_here;

/* Serves until a signal ends it. Returns the exit status: 0 after a drain, 1 after one line on
 * standard error that says what is wrong. */
int serve_run(const struct options *options);

#endif
