/* The threads for long requests: see worker.h. */
#include "server/net/worker.h"

#include "engine/clock.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>

struct worker_thread {
    struct worker *worker; /* Borrowed */
    pthread_t id;
    size_t max_bytes; /* of the bodies that it takes */
};

struct worker {
    struct worker_thread *thread; /* Owner: this. [n_thread] */
    int n_thread;
    pthread_mutex_t mutex; /* guards the rest */
    pthread_cond_t changed;
    struct worker_task *first; /* by at_us */
    int n_task;                /* queued and running */
    bool closing;
};

/* The first task that the thread may take, removed from the queue; NULL if there is none. Under the
 * mutex. */
static struct worker_task *worker_take(struct worker *worker, size_t max_bytes)
{
    struct worker_task **at = &worker->first;
    while (*at != NULL && (*at)->bytes > max_bytes) {
        at = &(*at)->next;
    }
    struct worker_task *const task = *at;
    if (task != NULL) {
        *at = task->next;
    }
    return task;
}

static void *worker_run(void *arg)
{
    const struct worker_thread *const thread = arg;
    struct worker *const worker = thread->worker;
    pthread_mutex_lock(&worker->mutex);
    for (;;) {
        struct worker_task *const task = worker_take(worker, thread->max_bytes);
        if (task != NULL) {
            pthread_mutex_unlock(&worker->mutex);
            task->run(task); /* after this call the task may no longer exist */
            pthread_mutex_lock(&worker->mutex);
            worker->n_task--;
        } else if (worker->closing) {
            break;
        } else {
            pthread_cond_wait(&worker->changed, &worker->mutex);
        }
    }
    pthread_mutex_unlock(&worker->mutex);
    return NULL;
}

enum err_code worker_open(struct worker **worker, int n_thread, struct err *err)
{
    *worker = NULL;
    struct worker *const w = calloc(1, sizeof *w);
    struct worker_thread *const thread = calloc((size_t)n_thread, sizeof *thread);
    if (w == NULL || thread == NULL) {
        free(w);
        free(thread);
        return err_set(err, ERR_MEMORY, "no memory for the worker threads");
    }
    w->thread = thread;
    CHECK(pthread_mutex_init(&w->mutex, NULL) == 0 && pthread_cond_init(&w->changed, NULL) == 0);
    for (int i = 0; i < n_thread; i++) {
        thread[i].worker = w;
        thread[i].max_bytes = i == 0              ? SIZE_MAX
                              : i == n_thread - 1 ? WORKER_PROMPT_BYTES
                                                  : WORKER_SHORT_BYTES;
        if (pthread_create(&thread[i].id, NULL, worker_run, &thread[i]) != 0) {
            worker_close(w);
            return err_set(err, ERR_MEMORY, "%d worker threads cannot be started", n_thread);
        }
        w->n_thread++;
    }
    *worker = w;
    return ERR_OK;
}

void worker_push(struct worker *worker, struct worker_task *task)
{
    pthread_mutex_lock(&worker->mutex);
    task->at_us = clock_now_us();
    for (const struct worker_task *own = worker->first; own != NULL; own = own->next) {
        if (task->client != 0 && own->client == task->client && own->at_us > task->at_us) {
            task->at_us = own->at_us;
        }
    }
    task->at_us += (int64_t)(task->bytes / WORKER_BYTES_PER_US);
    struct worker_task **at = &worker->first;
    while (*at != NULL && (*at)->at_us <= task->at_us) {
        at = &(*at)->next;
    }
    task->next = *at;
    *at = task;
    worker->n_task++;
    pthread_mutex_unlock(&worker->mutex);
    pthread_cond_broadcast(&worker->changed); /* now: whom it wakes takes the mutex */
}

bool worker_remove(struct worker *worker, struct worker_task *task)
{
    pthread_mutex_lock(&worker->mutex);
    struct worker_task **at = &worker->first;
    while (*at != NULL && *at != task) {
        at = &(*at)->next;
    }
    const bool found = *at != NULL;
    if (found) {
        *at = task->next;
        worker->n_task--;
    }
    pthread_mutex_unlock(&worker->mutex);
    return found;
}

struct worker_task *worker_take_back(struct worker *worker)
{
    pthread_mutex_lock(&worker->mutex);
    struct worker_task *const task = worker_take(worker, SIZE_MAX);
    worker->n_task -= task != NULL;
    pthread_mutex_unlock(&worker->mutex);
    return task;
}

int worker_n_task(struct worker *worker)
{
    pthread_mutex_lock(&worker->mutex);
    const int n = worker->n_task;
    pthread_mutex_unlock(&worker->mutex);
    return n;
}

void worker_close(struct worker *worker)
{
    if (worker == NULL) {
        return;
    }
    pthread_mutex_lock(&worker->mutex);
    worker->closing = true;
    pthread_cond_broadcast(&worker->changed);
    pthread_mutex_unlock(&worker->mutex);
    for (int i = 0; i < worker->n_thread; i++) {
        CHECK(pthread_join(worker->thread[i].id, NULL) == 0);
    }
    free(worker->thread);
    free(worker);
}
