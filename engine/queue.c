/* The bounded queue: see queue.h. */
#include "engine/queue.h"

#include "engine/clock.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

/* A tenant leaves one in so many of the waiting places to other clients. */
enum { QUEUE_TENANT_SHARE = 8 };

enum err_code queue_open(struct queue *queue, const struct queue_limits *limits,
                         struct engine_stats *stats, struct err *err)
{
    CHECK(limits->n_waiting > 0 && limits->n_position > 0 && limits->n_running > 0);
    const size_t n_job = (size_t)limits->n_waiting + (size_t)limits->n_running;
    uint32_t n_bucket = 1;
    while (n_bucket < n_job) {
        n_bucket *= 2;
    }
    *queue = (struct queue){.limits = *limits, .bucket_mask = n_bucket - 1, .stats = stats};
    queue->pool = calloc(n_job, sizeof *queue->pool);
    queue->client_pool = calloc(n_job, sizeof *queue->client_pool);
    queue->bucket = calloc(n_bucket, sizeof(struct client *));
    if (queue->pool == NULL || queue->client_pool == NULL || queue->bucket == NULL) {
        free(queue->pool);
        free(queue->client_pool);
        free(queue->bucket);
        return err_set(err, ERR_MEMORY, "no memory for a queue of %zu requests", n_job);
    }
    for (size_t i = 0; i < n_job; i++) {
        queue->pool[i].next = queue->free;
        queue->free = &queue->pool[i];
        queue->client_pool[i].next = queue->client_free;
        queue->client_free = &queue->client_pool[i];
    }
    CHECK(pthread_mutex_init(&queue->mutex, NULL) == 0);
    pthread_condattr_t monotonic;
    CHECK(pthread_condattr_init(&monotonic) == 0);
    CHECK(pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC) == 0);
    CHECK(pthread_cond_init(&queue->changed, &monotonic) == 0);
    (void)pthread_condattr_destroy(&monotonic);
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
    free(queue->client_pool);
    free(queue->bucket);
    queue->pool = NULL;
    queue->opened = false;
}

/* ---- clients. Guard: mutex ----------------------------------------------------------------- */

static struct client **client_bucket(const struct queue *queue, uint64_t id)
{
    const uint64_t hash = id * UINT64_C(0x9e3779b97f4a7c15); /* Fibonacci hashing */
    return &queue->bucket[(uint32_t)(hash >> 32) & queue->bucket_mask];
}

/* NULL: it has no requests. */
static struct client *client_find(const struct queue *queue, uint64_t id)
{
    struct client *client = *client_bucket(queue, id);
    while (client != NULL && client->id != id) {
        client = client->next;
    }
    return client;
}

/* The client's record for one more request. There are as many records as requests. */
static struct client *client_take(struct queue *queue, uint64_t id)
{
    struct client *client = client_find(queue, id);
    if (client == NULL) {
        struct client **const first = client_bucket(queue, id);
        client = queue->client_free;
        queue->client_free = client->next;
        *client = (struct client){.id = id, .next = *first};
        *first = client;
    }
    client->n_job++;
    return client;
}

static void client_give(struct queue *queue, struct client *client)
{
    if (--client->n_job > 0) {
        return;
    }
    CHECK(client->n_waiting == 0 && client->n_running == 0);
    struct client **link = client_bucket(queue, client->id);
    while (*link != client) {
        link = &(*link)->next;
    }
    *link = client->next;
    client->next = queue->client_free;
    queue->client_free = client;
}

/* ---- pushing ------------------------------------------------------------------------------- */

/* The most positions that one client has waiting; clients that are not told apart by keys are
 * counted request by request, since many may share one address. Guard: mutex. */
static int64_t most_waiting(const struct queue *queue)
{
    int64_t most = 0;
    for (int prio = 0; prio < 2; prio++) {
        for (const struct job *job = queue->head[prio]; job != NULL; job = job->next) {
            const int64_t n = job->request->is_tenant ? job->client->n_position : job->n_position;
            most = n > most ? n : most;
        }
    }
    return most;
}

/* Why a request cannot be taken now. Guard: mutex. */
static enum err_code refuse(const struct queue *queue, const struct request *request,
                            int64_t n_position, struct err *err)
{
    if (queue->closed != ERR_OK) {
        return err_set(err, queue->closed, "%s", queue->closed_why);
    }
    const int n_max = queue->limits.n_waiting;
    if (queue->n_waiting >= n_max || queue->free == NULL) {
        return err_set(err, ERR_QUEUE_FULL,
                       "the queue is full: requests that wait: %d of %d (--max-queue); try later",
                       queue->n_waiting, n_max);
    }
    const struct client *const tenant =
        request->is_tenant ? client_find(queue, request->client) : NULL;
    const int n_tenant_max = n_max - n_max / QUEUE_TENANT_SHARE;
    if (tenant != NULL && tenant->n_waiting >= n_tenant_max) {
        return err_set(err, ERR_QUEUE_FULL,
                       "%d requests of this client wait, and of the %d that may wait "
                       "(--max-queue) %d are for other clients; try later",
                       tenant->n_waiting, n_max, n_max - n_tenant_max);
    }
    /* A request larger than the whole limit may still enter an empty queue. Otherwise it would
     * never be accepted, although the answer says to try again. Then it does not count against
     * others: those who have less waiting are accepted as if it were not there. */
    const int64_t own = n_position + (tenant != NULL ? tenant->n_position : 0);
    const int64_t most = most_waiting(queue);
    const int64_t counted = queue->n_position - (own < most ? most : 0);
    if (queue->n_waiting > 0 && n_position > queue->limits.n_position - counted) {
        return err_set(err, ERR_QUEUE_TOKENS,
                       "the queue is full: %lld positions wait to be computed, the limit "
                       "(--max-queue-tokens) is %lld, and this request has %lld; try later",
                       (long long)queue->n_position, (long long)queue->limits.n_position,
                       (long long)n_position);
    }
    return ERR_OK;
}

static void publish_gauges(struct queue *queue)
{
    atomic_store_explicit(&queue->stats->waiting, queue->n_waiting, memory_order_relaxed);
    atomic_store_explicit(&queue->stats->waiting_tokens, queue->n_position, memory_order_relaxed);
}

/* n_position positions more or fewer wait. Guard: mutex. */
static void count_positions(struct queue *queue, struct job *job, int64_t n_position)
{
    job->n_position += n_position;
    queue->n_position += n_position;
    if (job->client != NULL) {
        job->client->n_position += n_position;
    }
}

/* Puts the job at the end of its class. Guard: mutex. */
static void append(struct queue *queue, struct job *job)
{
    const int prio = job->request->priority == PRIORITY_BULK;
    job->prev = queue->tail[prio];
    job->next = NULL;
    *(job->prev != NULL ? &job->prev->next : &queue->head[prio]) = job;
    queue->tail[prio] = job;
}

/* Takes the job out of its class. Guard: mutex. */
static void detach(struct queue *queue, struct job *job)
{
    const int prio = job->request->priority == PRIORITY_BULK;
    *(job->prev != NULL ? &job->prev->next : &queue->head[prio]) = job->next;
    *(job->next != NULL ? &job->next->prev : &queue->tail[prio]) = job->prev;
    job->prev = job->next = NULL;
}

enum err_code queue_push(struct queue *queue, struct request *request, int64_t n_position,
                         struct err *err)
{
    const int64_t now_us = clock_now_us();
    CHECK(!request->is_tenant || request->client != 0);
    CHECK(pthread_mutex_lock(&queue->mutex) == 0);
    const enum err_code code = refuse(queue, request, n_position, err);
    if (code == ERR_OK) {
        struct job *const job = queue->free;
        queue->free = job->next;
        *job = (struct job){.request = request, .push_us = now_us, .queued = true};
        if (request->client != 0) {
            job->client = client_take(queue, request->client);
            job->client->n_waiting++;
        }
        append(queue, job);
        count_positions(queue, job, n_position);
        queue->n_waiting++;
        publish_gauges(queue);
        (void)atomic_fetch_add_explicit(&request->refs, 1, memory_order_relaxed);
        atomic_store_explicit(&request->submit_us, now_us, memory_order_relaxed);
        if (atomic_load_explicit(&queue->idle, memory_order_relaxed)) {
            atomic_store_explicit(&queue->heartbeat_us, now_us, memory_order_relaxed);
            atomic_store_explicit(&queue->idle, false, memory_order_release);
        }
    }
    CHECK(pthread_mutex_unlock(&queue->mutex) == 0);
    (void)pthread_cond_signal(&queue->changed); /* now: whom it wakes takes the mutex */
    return code;
}

int64_t queue_positions_ahead(struct queue *queue, int64_t n_sequence)
{
    int64_t fewest = INT64_MAX;
    int64_t n = 0;
    CHECK(pthread_mutex_lock(&queue->mutex) == 0);
    for (int prio = 0; prio < 2; prio++) {
        for (const struct job *job = queue->head[prio]; job != NULL; job = job->next) {
            fewest = job->n_position < fewest ? job->n_position : fewest;
        }
    }
    const int64_t most = fewest > n_sequence ? fewest : n_sequence;
    for (int prio = 0; prio < 2; prio++) {
        for (const struct job *job = queue->head[prio]; job != NULL; job = job->next) {
            n += job->n_position < most ? job->n_position : most;
        }
    }
    CHECK(pthread_mutex_unlock(&queue->mutex) == 0);
    return n;
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

static struct timespec time_in(int ms)
{
    struct timespec until;
    CHECK(clock_gettime(CLOCK_MONOTONIC, &until) == 0);
    until.tv_sec += ms / 1000;
    until.tv_nsec += ms % 1000 * 1000000L;
    until.tv_sec += until.tv_nsec / 1000000000L;
    until.tv_nsec %= 1000000000L;
    return until;
}

void queue_wait(struct queue *queue, int ms)
{
    const struct timespec until = time_in(ms);
    int code = 0;
    CHECK(pthread_mutex_lock(&queue->mutex) == 0);
    while (queue->n_waiting == 0 && !queue->woken && code == 0) {
        atomic_store_explicit(&queue->idle, true, memory_order_release);
        code = pthread_cond_timedwait(&queue->changed, &queue->mutex, &until);
    }
    queue->woken = false;
    CHECK(pthread_mutex_unlock(&queue->mutex) == 0);
}

void queue_pause(struct queue *queue, int ms)
{
    const struct timespec until = time_in(ms);
    CHECK(pthread_mutex_lock(&queue->mutex) == 0);
    if (!queue->woken) {
        (void)pthread_cond_timedwait(&queue->changed, &queue->mutex, &until);
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

static struct plan_job plan_job_of(const struct job *job)
{
    const bool is_tenant = job->request->is_tenant;
    return (struct plan_job){
        .n_running = job->n_running,
        .n_client = job->client != NULL ? job->client->n_running : job->n_running,
        .is_tenant = is_tenant,
    };
}

struct job *queue_pick(struct queue *queue, const struct plan_running *running,
                       enum priority priority, bool traces)
{
    struct job *best = NULL;
    struct plan_job best_plan = {0};
    CHECK(pthread_mutex_lock(&queue->mutex) == 0);
    for (struct job *job = queue->head[priority]; job != NULL; job = job->next) {
        const struct plan_job plan = plan_job_of(job);
        const struct request *const request = job->request;
        if (job->lacks_pages) {
            continue;
        }
        if (!traces && request->trace_bytes > 0 && request->traces.bytes == 0) {
            continue;
        }
        if (plan_may_take(running, priority, &plan) &&
            (best == NULL || plan_precedes(&plan, &best_plan))) {
            best = job;
            best_plan = plan;
        }
    }
    CHECK(pthread_mutex_unlock(&queue->mutex) == 0);
    return best;
}

struct job *queue_pick_passed(struct queue *queue, const struct plan_running *running)
{
    struct job *passed = NULL;
    CHECK(pthread_mutex_lock(&queue->mutex) == 0);
    for (int prio = 1; prio >= 0; prio--) {
        for (struct job *job = queue->head[prio]; job != NULL; job = job->next) {
            const struct plan_job plan = plan_job_of(job);
            const int most = passed != NULL ? passed->n_passed : PLAN_PASS_MAX - 1;
            if (!job->lacks_pages && job->n_passed > most &&
                plan_may_take(running, (enum priority)prio, &plan)) {
                passed = job;
            }
        }
    }
    CHECK(pthread_mutex_unlock(&queue->mutex) == 0);
    return passed;
}

struct job *queue_trace_waiter(struct queue *queue)
{
    struct job *waiter = NULL;
    CHECK(pthread_mutex_lock(&queue->mutex) == 0);
    for (int prio = 0; prio < 2; prio++) {
        for (struct job *job = queue->head[prio]; job != NULL && waiter == NULL; job = job->next) {
            waiter = job->lacks_traces ? job : NULL;
        }
    }
    CHECK(pthread_mutex_unlock(&queue->mutex) == 0);
    return waiter;
}

void queue_try_pages(struct queue *queue)
{
    CHECK(pthread_mutex_lock(&queue->mutex) == 0);
    for (int prio = 0; prio < 2; prio++) {
        for (struct job *job = queue->head[prio]; job != NULL; job = job->next) {
            job->lacks_pages = false;
        }
    }
    CHECK(pthread_mutex_unlock(&queue->mutex) == 0);
}

void queue_admitted(struct queue *queue, struct job *job, int64_t n_position)
{
    CHECK(pthread_mutex_lock(&queue->mutex) == 0);
    CHECK(job->queued);
    for (int prio = 0; prio < 2; prio++) {
        for (struct job *other = queue->head[prio]; other != NULL; other = other->next) {
            other->n_passed += other->lacked_pages;
        }
    }
    job->n_passed = 0;
    job->lacked_pages = false;
    detach(queue, job);
    append(queue, job);
    count_positions(queue, job, -(n_position < job->n_position ? n_position : job->n_position));
    publish_gauges(queue);
    CHECK(pthread_mutex_unlock(&queue->mutex) == 0);
    job->n_running++;
    if (job->client != NULL) {
        job->client->n_running++;
    }
}

void queue_ended(struct job *job)
{
    job->n_running--;
    if (job->client != NULL) {
        job->client->n_running--;
    }
}

/* Guard: mutex. */
static void unlink_job(struct queue *queue, struct job *job)
{
    CHECK(job->queued);
    detach(queue, job);
    count_positions(queue, job, -job->n_position);
    if (job->client != NULL) {
        job->client->n_waiting--;
    }
    job->queued = false;
    queue->n_waiting--;
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
    CHECK(!job->queued && job->n_running == 0);
    if (job->client != NULL) {
        client_give(queue, job->client);
    }
    job->request = NULL;
    job->client = NULL;
    job->next = queue->free;
    queue->free = job;
    CHECK(pthread_mutex_unlock(&queue->mutex) == 0);
}
