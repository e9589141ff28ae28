/* The deep health check: a real forward pass with a known result.
 *
 * If the model's model.sha256 has results, its tokens are scored and compared with them; otherwise
 * one token is drawn greedily after a single token. The first answer after start-up is kept, and
 * every later answer must have the same bits (with --deterministic off an answer is enough, because
 * other requests in the step may change its bits).
 *
 * The result is kept for 10 s, and only one check runs at a time: others wait for it. A wrong
 * result keeps the server not ready until a check finds a right one. If a full server cannot run a
 * check, that does not count against the server: nothing is kept, and the answer is that of the
 * plain check. */
#ifndef SERVER_PROBE_H
#define SERVER_PROBE_H

#include "engine/engine.h"
#include "models/identity.h"

#include <pthread.h>

enum {
    PROBE_KEEP_US = 10 * 1000000,
    PROBE_SEAT_US = 500000, /* time for the check to begin, while the engine makes steps for
                             * others */
    PROBE_TIMEOUT_US = 5 * 1000000,
};

struct probe {
    bool exact; /* answers are compared; fixed at the start */
    /* Borrowed: set before the first check */
    const struct engine_identity *compared;
    pthread_mutex_t mutex; /* guards the rest */
    bool running, known, ok;
    int64_t checked_us;                /* 0 = never */
    float logprob[IDENTITY_TOKEN_MAX]; /* the first answer's */
};

void probe_begin(struct probe *probe, bool exact);

enum probe_state { PROBE_OK, PROBE_WRONG, PROBE_RUNNING, PROBE_YOURS };
/* The result as known now. PROBE_YOURS: there is none that is recent; the caller runs the check and
 * calls probe_end. */
enum probe_state probe_ask(struct probe *probe);
/* Whether the last check that had a result had a wrong one. */
bool probe_is_wrong(struct probe *probe);
/* The check's request, ready to submit; NULL if out of memory. */
struct request *probe_request(const struct probe *probe, const struct model_info *info);
/* The check is over; NULL = it could not run. A check that was given up without a result changes
 * nothing. */
void probe_end(struct probe *probe, const struct request *request);

#endif
