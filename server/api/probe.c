/* The deep health check: see probe.h. */
#include "server/api/probe.h"

#include "engine/clock.h"

#include <stdlib.h>
#include <string.h>

void probe_begin(struct probe *probe, bool exact)
{
    *probe = (struct probe){.exact = exact};
    CHECK(pthread_mutex_init(&probe->mutex, NULL) == 0);
}

enum probe_state probe_ask(struct probe *probe)
{
    pthread_mutex_lock(&probe->mutex);
    enum probe_state state = PROBE_YOURS;
    if (probe->checked_us != 0 && clock_now_us() - probe->checked_us < PROBE_KEEP_US) {
        state = probe->ok ? PROBE_OK : PROBE_WRONG;
    } else if (probe->running) {
        state = PROBE_RUNNING;
    } else {
        probe->running = true;
    }
    pthread_mutex_unlock(&probe->mutex);
    return state;
}

struct request *probe_request(const struct model_info *info)
{
    struct request *const request = request_new(REQUEST_GENERATE, 1);
    int32_t *const ids = malloc(sizeof *ids);
    if (request == NULL || ids == NULL) {
        request_release(request);
        free(ids);
        return NULL;
    }
    ids[0] = info->bos_id >= 0 ? info->bos_id : 0;
    request->sampling = (struct sampling){.top_p = 1, .repetition = 1, .max_tokens = 1};
    request->n_top = 0;
    request->deadline_us = clock_now_us() + PROBE_TIMEOUT_US;
    if (request_set_item(request, 0, ids, 1, info, NULL) != ERR_OK) {
        request_release(request);
        return NULL;
    }
    return request;
}

void probe_end(struct probe *probe, const struct request *request)
{
    pthread_mutex_lock(&probe->mutex);
    probe->running = false;
    const struct item *const item = request != NULL ? &request->item[0] : NULL;
    const int state = item != NULL ? atomic_load(&item->state) : FINISH_NONE;
    const bool done = state == FINISH_STOP || state == FINISH_LENGTH;
    if (done || state == FINISH_ERROR) {
        uint32_t bits = 0;
        if (done) {
            memcpy(&bits, &item->out_logprob[0], sizeof bits);
        }
        if (done && !probe->known) {
            probe->known = true;
            probe->token = item->out_id[0];
            probe->logprob_bits = bits;
        }
        probe->ok = done && (!probe->exact ||
                             (probe->token == item->out_id[0] && probe->logprob_bits == bits));
        probe->checked_us = clock_now_us();
    }
    pthread_mutex_unlock(&probe->mutex);
}
