/* The bounded queue: see queue.h. */
#include "engine/queue.h"

#include "engine/clock.h"

#include <stdio.h>
#include <stdlib.h>

enum err_code queue_open(struct queue *queue, int n_waiting_max, int64_t n_token_max,
                         int n_running_max, struct engine_stats *stats, struct err *err)
{
    CHECK(n_waiting_max > 0 && n_token_max > 0 && n_running_max > 0);
    *queue =
        (struct queue){.n_waiting_max = n_waiting_max, .n_token_max = n_token_max, .stats = stats};
    const size_t n_job = (size_t)n_waiting_max + (size_t)n_running_max;
    queue->pool = calloc(n_job, sizeof *queue->pool);
    if (queue->pool == NULL) {
        return err_set(err, ERR_MEMORY, "no memory for a queue of %zu requests", n_job);
    }
    for (size_t i = 0; i < n_job; i++) {
        queue->pool[i].next = queue->free;
        queue->free = &queue->pool[i];
    }
    CHECK(pthread_mutex_init(&queue->mutex, NULL) == 0);
    CHECK(pthread_cond_init(&queue->changed, NULL) == 0);
    atomic_init(&queue->idle, true);
    queue->opened = true;
    return ERR_OK;
}

void queue_close(struct queue *queue)
{
    if (!queue->opened) {
        return;
    }
    CHECK(queue->n_waiting == 0);
    (void)pthread_cond_destroy(&queue->changed);
    (void)pthread_mutex_destroy(&queue->mutex);
    free(queue->pool);
    queue->pool = NULL;
    queue->opened = false;
}

/* Why a request cannot be taken now. Guard: mutex. */
static enum err_code refuse(const struct queue *queue, int64_t n_token, struct err *err)
{
    if (queue->closed != ERR_OK) {
        return err_set(err, queue->closed, "%s", queue->closed_why);
    }
    if (queue->n_waiting >= queue->n_waiting_max || queue->free == NULL) {
        return err_set(err, ERR_QUEUE_FULL,
                       "the queue is full: %d of %d requests wait (--max-queue); try later",
                       queue->n_waiting, queue->n_waiting_max);
    }
    /* A request larger than the whole limit may still enter an empty queue. Otherwise it would
     * never be accepted, although the answer says to try again. */
    if (queue->n_waiting > 0 && n_token > queue->n_token_max - queue->n_token) {
        return err_set(err, ERR_QUEUE_TOKENS,
                       "the queue is full: %lld tokens wait, the limit (--max-queue-tokens) is "
                       "%lld, and this request has %lld; try later",
                       (long long)queue->n_token, (long long)queue->n_token_max,
                       (long long)n_token);
    }
    return ERR_OK;
}

static void publish_gauges(struct queue *queue)
{
    atomic_store_explicit(&queue->stats->waiting, queue->n_waiting, memory_order_relaxed);
    atomic_store_explicit(&queue->stats->waiting_tokens, queue->n_token, memory_order_relaxed);
}

enum err_code queue_push(struct queue *queue, struct request *request, int64_t n_token,
                         struct err *err)
{
    const int64_t now_us = clock_now_us();
    const int prio = request->priority == PRIORITY_BULK ? PRIORITY_BULK : PRIORITY_INTERACTIVE;
    CHECK(pthread_mutex_lock(&queue->mutex) == 0);
    const enum err_code code = refuse(queue, n_token, err);
    if (code == ERR_OK) {
        struct job *const job = queue->free;
        queue->free = job->next;
        *job = (struct job){.request = request,
                            .n_token = n_token,
                            .push_us = now_us,
                            .queued = true,
                            .prev = queue->tail[prio]};
        if (job->prev != NULL) {
            job->prev->next = job;
        } else {
            queue->head[prio] = job;
        }
        queue->tail[prio] = job;
        queue->n_waiting++;
        queue->n_token += n_token;
        publish_gauges(queue);
        (void)atomic_fetch_add_explicit(&request->refs, 1, memory_order_relaxed);
        atomic_store_explicit(&request->submit_us, now_us, memory_order_relaxed);
        if (atomic_load_explicit(&queue->idle, memory_order_relaxed)) {
            atomic_store_explicit(&queue->heartbeat_us, now_us, memory_order_relaxed);
            atomic_store_explicit(&queue->idle, false, memory_order_release);
        }
        (void)pthread_cond_signal(&queue->changed);
    }
    CHECK(pthread_mutex_unlock(&queue->mutex) == 0);
    return code;
}

void queue_shut(struct queue *queue, enum err_code code, const char *why)
{
    CHECK(code != ERR_OK);
    CHECK(pthread_mutex_lock(&queue->mutex) == 0);
    queue->closed = code;
    (void)snprintf(queue->closed_why, sizeof queue->closed_why, "%s", why);
    CHECK(pthread_mutex_unlock(&queue->mutex) == 0);
}

void queue_wake(struct queue *queue)
{
    CHECK(pthread_mutex_lock(&queue->mutex) == 0);
    queue->woken = true;
    (void)pthread_cond_signal(&queue->changed);
    CHECK(pthread_mutex_unlock(&queue->mutex) == 0);
}

void queue_wait(struct queue *queue)
{
    CHECK(pthread_mutex_lock(&queue->mutex) == 0);
    while (queue->n_waiting == 0 && !queue->woken) {
        atomic_store_explicit(&queue->idle, true, memory_order_release);
        (void)pthread_cond_wait(&queue->changed, &queue->mutex);
    }
    queue->woken = false;
    CHECK(pthread_mutex_unlock(&queue->mutex) == 0);
}

bool queue_is_empty(struct queue *queue)
{
    CHECK(pthread_mutex_lock(&queue->mutex) == 0);
    const bool empty = queue->n_waiting == 0;
    CHECK(pthread_mutex_unlock(&queue->mutex) == 0);
    return empty;
}

struct job *queue_head(struct queue *queue, enum priority priority)
{
    CHECK(pthread_mutex_lock(&queue->mutex) == 0);
    struct job *const job = queue->head[priority];
    CHECK(pthread_mutex_unlock(&queue->mutex) == 0);
    return job;
}

/* Guard: mutex. */
static void unlink_job(struct queue *queue, struct job *job)
{
    CHECK(job->queued);
    for (int prio = 0; prio < 2; prio++) {
        if (queue->head[prio] == job) {
            queue->head[prio] = job->next;
        }
        if (queue->tail[prio] == job) {
            queue->tail[prio] = job->prev;
        }
    }
    if (job->prev != NULL) {
        job->prev->next = job->next;
    }
    if (job->next != NULL) {
        job->next->prev = job->prev;
    }
    job->prev = job->next = NULL;
    job->queued = false;
    queue->n_waiting--;
    queue->n_token -= job->n_token;
    publish_gauges(queue);
}

void queue_remove(struct queue *queue, struct job *job)
{
    CHECK(pthread_mutex_lock(&queue->mutex) == 0);
    unlink_job(queue, job);
    CHECK(pthread_mutex_unlock(&queue->mutex) == 0);
}

struct job *queue_take_dead(struct queue *queue, int64_t now_us, bool all)
{
    struct job *dead = NULL;
    CHECK(pthread_mutex_lock(&queue->mutex) == 0);
    for (int prio = 0; prio < 2 && dead == NULL; prio++) {
        for (struct job *job = queue->head[prio]; job != NULL && dead == NULL; job = job->next) {
            const struct request *const r = job->request;
            if (all || atomic_load_explicit(&r->cancel, memory_order_relaxed) ||
                (r->deadline_us != 0 && now_us >= r->deadline_us)) {
                dead = job;
            }
        }
    }
    if (dead != NULL) {
        unlink_job(queue, dead);
    }
    CHECK(pthread_mutex_unlock(&queue->mutex) == 0);
    return dead;
}

void queue_job_free(struct queue *queue, struct job *job)
{
    CHECK(pthread_mutex_lock(&queue->mutex) == 0);
    CHECK(!job->queued);
    job->request = NULL;
    job->next = queue->free;
    queue->free = job;
    CHECK(pthread_mutex_unlock(&queue->mutex) == 0);
}
