/* The thread for long requests: see worker.h. */
#include "server/net/worker.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>

struct worker {
    pthread_t thread;
    pthread_mutex_t mutex; /* guards the rest */
    pthread_cond_t changed;
    struct worker_task *first;
    struct worker_task **last; /* where the next one goes */
    bool closing;
};

static void *worker_run(void *arg)
{
    struct worker *const worker = arg;
    pthread_mutex_lock(&worker->mutex);
    for (;;) {
        while (worker->first == NULL && !worker->closing) {
            pthread_cond_wait(&worker->changed, &worker->mutex);
        }
        struct worker_task *const task = worker->first;
        if (task == NULL) {
            break;
        }
        worker->first = task->next;
        if (worker->first == NULL) {
            worker->last = &worker->first;
        }
        pthread_mutex_unlock(&worker->mutex);
        task->run(task);
        pthread_mutex_lock(&worker->mutex);
    }
    pthread_mutex_unlock(&worker->mutex);
    return NULL;
}

enum err_code worker_open(struct worker **worker, struct err *err)
{
    *worker = NULL;
    struct worker *const w = calloc(1, sizeof *w);
    if (w == NULL) {
        return err_set(err, ERR_MEMORY, "no memory for the worker thread");
    }
    w->last = &w->first;
    CHECK(pthread_mutex_init(&w->mutex, NULL) == 0 && pthread_cond_init(&w->changed, NULL) == 0);
    if (pthread_create(&w->thread, NULL, worker_run, w) != 0) {
        free(w);
        return err_set(err, ERR_MEMORY, "the worker thread cannot be started");
    }
    *worker = w;
    return ERR_OK;
}

void worker_push(struct worker *worker, struct worker_task *task)
{
    task->next = NULL;
    pthread_mutex_lock(&worker->mutex);
    *worker->last = task;
    worker->last = &task->next;
    pthread_cond_signal(&worker->changed);
    pthread_mutex_unlock(&worker->mutex);
}

void worker_close(struct worker *worker)
{
    if (worker == NULL) {
        return;
    }
    pthread_mutex_lock(&worker->mutex);
    worker->closing = true;
    pthread_cond_signal(&worker->changed);
    pthread_mutex_unlock(&worker->mutex);
    CHECK(pthread_join(worker->thread, NULL) == 0);
    free(worker);
}
