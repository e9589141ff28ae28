/* The life of the server: `pkmserve serve`. */
#ifndef SERVER_SERVE_H
#define SERVER_SERVE_H

#include "server/options/options.h"

/* Serves until a signal ends it. Returns the exit status: 0 after a drain, 1 after one line on
 * standard error that says what is wrong. */
int serve_run(const struct options *options);

#endif
