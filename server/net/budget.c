/* Memory charged to those who use it: see budget.h. There is a share for each connection with a
 * request, a thousand or so, and the bound is rarely reached: so plain lists are enough. */
#include "server/net/budget.h"

#include "kernels/err.h"

#include <stddef.h>

void budget_open(struct budget *budget, int64_t most, void (*end)(struct budget_share *share))
{
    *budget = (struct budget){.most = most, .end = end};
    CHECK(pthread_mutex_init(&budget->mutex, NULL) == 0);
}

void budget_close(struct budget *budget)
{
    CHECK(budget->first == NULL && budget->used == 0);
    CHECK(pthread_mutex_destroy(&budget->mutex) == 0);
}

void budget_join(struct budget *budget, struct budget_share *share, uint64_t client)
{
    pthread_mutex_lock(&budget->mutex);
    *share = (struct budget_share){.client = client, .previous = budget->last};
    if (budget->last != NULL) {
        budget->last->next = share;
    } else {
        budget->first = share;
    }
    budget->last = share;
    pthread_mutex_unlock(&budget->mutex);
}

void budget_leave(struct budget *budget, struct budget_share *share)
{
    pthread_mutex_lock(&budget->mutex);
    budget->used -= share->ended ? 0 : share->bytes;
    *(share->previous != NULL ? &share->previous->next : &budget->first) = share->next;
    *(share->next != NULL ? &share->next->previous : &budget->last) = share->previous;
    pthread_mutex_unlock(&budget->mutex);
}

/* What the client of a share holds in all. */
static int64_t client_bytes(const struct budget_share *first, const struct budget_share *of)
{
    int64_t bytes = 0;
    for (const struct budget_share *s = first; s != NULL; s = s->next) {
        const bool same = s == of || (of->client != 0 && s->client == of->client);
        bytes += same && !s->ended ? s->bytes : 0;
    }
    return bytes;
}

struct budget_share *budget_largest(struct budget_share *first)
{
    struct budget_share *best = NULL;
    int64_t best_client = 0;
    for (struct budget_share *s = first; s != NULL; s = s->next) {
        if (s->ended || s->bytes == 0) {
            continue;
        }
        /* Of one client only the largest share is compared with those of others. */
        const bool same = best != NULL && s->client != 0 && s->client == best->client;
        const int64_t bytes = same ? best_client : client_bytes(first, s);
        if (best == NULL || bytes > best_client || (same && s->bytes > best->bytes)) {
            best = s;
            best_client = bytes;
        }
    }
    return best;
}

void budget_hold(struct budget *budget, struct budget_share *share, int64_t bytes)
{
    pthread_mutex_lock(&budget->mutex);
    budget->used += share->ended ? 0 : bytes - share->bytes;
    share->bytes = bytes;
    while (budget->used > budget->most) {
        struct budget_share *const victim = budget_largest(budget->first);
        CHECK(victim != NULL);
        victim->ended = true;
        budget->used -= victim->bytes;
        budget->end(victim);
    }
    pthread_mutex_unlock(&budget->mutex);
}

int64_t budget_used(struct budget *budget)
{
    pthread_mutex_lock(&budget->mutex);
    const int64_t used = budget->used;
    pthread_mutex_unlock(&budget->mutex);
    return used;
}
