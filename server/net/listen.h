/* The listening socket and the descriptors behind it. Used by http.c. */
#ifndef SERVER_LISTEN_H
#define SERVER_LISTEN_H

#include "kernels/err.h"

#include <stdbool.h>

/* Binds host and port (0 = a free one, told in *bound_port) and listens. ERR_IO names the address
 * that is taken or impossible; *listen_fd is -1 then. */
enum err_code listen_open(int *listen_fd, int *bound_port, const char *host, int port,
                          struct err *err);

/* Whether a descriptor is left. A connection that took the last one must be closed: as long as one
 * is free, whoever waits can be accepted. Else the listening socket would stay readable, and its
 * threads would try to accept again and again. */
bool listen_has_descriptor(void);

/* Raises the limit of open files for max_connections connections, n_more of others, and the rest of
 * the process, if that is needed and allowed. */
enum err_code listen_reserve_files(int max_connections, int n_more, struct err *err);

#endif
