/* The memory that bodies and answers take, charged to those who use it.
 *
 * Each exchange has a share: the bytes of its body until the body is read, then those of its answer
 * until the client has taken them. The sum of all shares is bounded. When it would exceed the
 * bound, the request that needs the memory is not refused; instead the largest share is ended, of
 * the client whose shares are the largest together (among equals the oldest). So a stalled upload
 * or an unread answer costs its own client a connection, and other clients nothing. Any thread. */
#ifndef SERVER_BUDGET_H
#define SERVER_BUDGET_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

struct budget_share {
    struct budget_share *next, *previous; /* the budget's, from the oldest on */
    uint64_t client;                      /* 0 = unknown: counts as a client of its own */
    int64_t bytes;
    bool ended; /* it has been told to end, and its bytes no longer count */
};

struct budget {
    pthread_mutex_t mutex; /* guards the rest and all shares */
    int64_t most, used;
    struct budget_share *first, *last;
    /* Ends the share's connection. Called under the mutex, so that the share lives. */
    void (*end)(struct budget_share *share);
};

void budget_open(struct budget *budget, int64_t most, void (*end)(struct budget_share *share));
void budget_close(struct budget *budget); /* no share may be left */

void budget_join(struct budget *budget, struct budget_share *share, uint64_t client);
void budget_leave(struct budget *budget, struct budget_share *share);
/* From now on the share has so many bytes; ends the largest shares, perhaps this one, until all
 * fit. */
void budget_hold(struct budget *budget, struct budget_share *share, int64_t bytes);
int64_t budget_used(struct budget *budget);

/* The share to end next of a list, of any owner; NULL if all have ended or hold nothing. */
struct budget_share *budget_largest(struct budget_share *first);

#endif
