/* The deep health check: see probe.h. */
#include "server/api/probe.h"

#include "engine/clock.h"
#include "engine/log.h"

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

bool probe_is_wrong(struct probe *probe)
{
    pthread_mutex_lock(&probe->mutex);
    const bool wrong = probe->checked_us != 0 && !probe->ok;
    pthread_mutex_unlock(&probe->mutex);
    return wrong;
}

struct request *probe_request(const struct probe *probe, const struct model_info *info)
{
    const struct engine_identity *const compared = probe->compared;
    const bool scores = compared->n > 0;
    const int n = scores ? compared->n : 1;
    const int32_t first = info->bos_id >= 0 ? info->bos_id : 0;
    struct request *const request = request_new(scores ? REQUEST_SCORE : REQUEST_GENERATE, 1);
    int32_t *const ids = malloc((size_t)n * sizeof *ids);
    if (request == NULL || ids == NULL) {
        request_release(request);
        free(ids);
        return NULL;
    }
    memcpy(ids, scores ? compared->file->token : &first, (size_t)n * sizeof *ids);
    request->sampling = (struct sampling){.top_p = 1, .repetition = 1, .max_tokens = 1};
    request->n_top = 0;
    request->window = request->stride = n;
    request->deadline_us = clock_now_us() + PROBE_TIMEOUT_US;
    if (request_set_item(request, 0, ids, n, info, NULL) != ERR_OK) {
        request_release(request);
        return NULL;
    }
    return request;
}

/* Whether a result is right, and if not, why. */
static bool is_right(const struct probe *probe, const struct item *item, struct err *err)
{
    const struct engine_identity *const compared = probe->compared;
    const int n = atomic_load(&item->n_out);
    float difference = 0;
    if (compared->n > 0 && identity_compare(compared->file, item->out_logprob, n,
                                            compared->tolerance, &difference, err) != ERR_OK) {
        return false;
    }
    for (int i = 0; i < n && probe->exact && probe->known; i++) {
        if (memcmp(&probe->logprob[i], &item->out_logprob[i], sizeof(float)) != 0) {
            (void)err_set(err, ERR_NUMERICAL,
                          "log-probability %d of the deep check is %.9g, but was %.9g when it ran "
                          "first: this device computes wrongly; start anew, on another one",
                          i, (double)item->out_logprob[i], (double)probe->logprob[i]);
            return false;
        }
    }
    return true;
}

/* A check has ended: stores what is known from now on. */
static void learn(struct probe *probe, const struct item *item)
{
    struct err err = {0};
    char why[2 * sizeof err.message];
    const bool was_ok = probe->ok || probe->checked_us == 0;
    probe->ok = is_right(probe, item, &err);
    if (probe->ok && !probe->known) {
        const size_t n = (size_t)atomic_load(&item->n_out);
        CHECK(n <= IDENTITY_TOKEN_MAX);
        memcpy(probe->logprob, item->out_logprob, n * sizeof(float));
        probe->known = true;
    }
    if (was_ok && !probe->ok) {
        log_event(LEVEL_ERROR, "deep_check_failed", "reason=%s",
                  log_quote(why, sizeof why, err.message));
    }
}

void probe_end(struct probe *probe, const struct request *request)
{
    pthread_mutex_lock(&probe->mutex);
    probe->running = false;
    const struct item *const item = request != NULL ? &request->item[0] : NULL;
    const int state = item != NULL ? atomic_load(&item->state) : FINISH_NONE;
    const bool done = state == FINISH_STOP || state == FINISH_LENGTH;
    if (done) {
        learn(probe, item);
    } else if (state == FINISH_ERROR) {
        probe->ok = false;
    }
    if (done || state == FINISH_ERROR) {
        probe->checked_us = clock_now_us();
    }
    pthread_mutex_unlock(&probe->mutex);
}
