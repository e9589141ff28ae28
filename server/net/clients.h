/* How many requests each client has in progress, for --max-client-requests.
 *
 * A client is an API key, or without keys the address it comes from; both are identified by a
 * 64-bit hash. The table has an entry for every connection, so it cannot be full. Any thread. */
#ifndef SERVER_CLIENTS_H
#define SERVER_CLIENTS_H

#include "kernels/err.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

struct clients {
    pthread_mutex_t mutex;
    uint64_t *client; /* Owner: this. [n_place], the first n_used: one for each request in
                       * progress */
    int n_place, n_used;
};

enum err_code clients_open(struct clients *clients, int n_place, struct err *err);
void clients_close(struct clients *clients); /* zeroed is fine */

/* Counts one more request, unless the client has max already. */
bool clients_enter(struct clients *clients, uint64_t client, int max);
void clients_leave(struct clients *clients, uint64_t client);

#endif
