/* Requests in progress by client: see clients.h. Searching a thousand entries takes less than a
 * microsecond, so a plain list is enough. */
#include "server/net/clients.h"

#include <stdlib.h>

enum err_code clients_open(struct clients *clients, int n_place, struct err *err)
{
    *clients = (struct clients){.n_place = n_place};
    clients->client = calloc((size_t)n_place, sizeof *clients->client);
    if (clients->client == NULL || pthread_mutex_init(&clients->mutex, NULL) != 0) {
        free(clients->client);
        *clients = (struct clients){0};
        return err_set(err, ERR_MEMORY, "no memory to count %d requests", n_place);
    }
    return ERR_OK;
}

void clients_close(struct clients *clients)
{
    if (clients->client != NULL) {
        (void)pthread_mutex_destroy(&clients->mutex);
        free(clients->client);
        *clients = (struct clients){0};
    }
}

bool clients_enter(struct clients *clients, uint64_t client, int max)
{
    (void)pthread_mutex_lock(&clients->mutex);
    int n = 0;
    for (int i = 0; i < clients->n_used; i++) {
        n += clients->client[i] == client;
    }
    const bool enters = n < max && clients->n_used < clients->n_place;
    if (enters) {
        clients->client[clients->n_used++] = client;
    }
    (void)pthread_mutex_unlock(&clients->mutex);
    return enters;
}

void clients_leave(struct clients *clients, uint64_t client)
{
    (void)pthread_mutex_lock(&clients->mutex);
    int i = 0;
    while (i < clients->n_used && clients->client[i] != client) {
        i++;
    }
    CHECK(i < clients->n_used);
    clients->client[i] = clients->client[--clients->n_used];
    (void)pthread_mutex_unlock(&clients->mutex);
}
