/* The listening socket and the descriptors behind it. Used by http.c. */
#ifndef SERVER_LISTEN_H
#define SERVER_LISTEN_H

#include "kernels/err.h"

/* Binds host and port (0 = a free one, told in *bound_port) and listens. ERR_IO names the address
 * that is taken or impossible; *listen_fd is -1 then. */
enum err_code listen_open(int *listen_fd, int *bound_port, const char *host, int port,
                          struct err *err);

/* If no descriptor is free, the listening socket stays readable, and its threads would try to
 * accept a connection again and again. Then the waiting connections are accepted with the
 * descriptor *reserve_fd, which is kept for that, and closed. Called once before the first
 * connection, which opens the reserve, and then a few times per second; *reserve_fd is -1 at first
 * and is owned by the caller. */
void listen_shed(int listen_fd, int *reserve_fd);

/* Raises the limit of open files for n_conn connections, if that is needed and allowed. */
enum err_code listen_reserve_files(int n_conn, struct err *err);

#endif
