/* The bounded queue: order, limits, cancellation and deadlines while waiting, shutting. */
#include "engine/queue.h"

#include "engine/request.h"
#include "engine/stats.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

static struct engine_stats stats;

static struct request *new_request(enum priority priority)
{
    struct request *const request = request_new(REQUEST_SCORE, 1);
    assert_non_null(request);
    request->priority = priority;
    return request;
}

/* What the engine does when a job is over. */
static void end_job(struct queue *queue, struct job *job)
{
    struct request *const request = job->request;
    queue_job_free(queue, job);
    request_drop(request);
}

static void classes_are_first_in_first_out(void **state)
{
    (void)state;
    struct queue queue;
    assert_int_equal(queue_open(&queue, 10, 1000, 2, &stats, NULL), ERR_OK);
    struct request *request[6];
    for (int i = 0; i < 6; i++) {
        request[i] = new_request(i % 2 == 0 ? PRIORITY_BULK : PRIORITY_INTERACTIVE);
        assert_int_equal(queue_push(&queue, request[i], 10, NULL), ERR_OK);
    }
    assert_int_equal(atomic_load(&stats.waiting), 6);
    assert_int_equal(atomic_load(&stats.waiting_tokens), 60);
    static const int order[] = {1, 3, 5, 0, 2, 4};
    for (int i = 0; i < 6; i++) {
        struct job *const job = queue_head(&queue, i < 3 ? PRIORITY_INTERACTIVE : PRIORITY_BULK);
        assert_ptr_equal(job->request, request[order[i]]);
        queue_remove(&queue, job);
        end_job(&queue, job);
    }
    assert_null(queue_head(&queue, PRIORITY_INTERACTIVE));
    assert_null(queue_head(&queue, PRIORITY_BULK));
    assert_true(queue_is_empty(&queue));
    assert_int_equal(atomic_load(&stats.waiting_tokens), 0);
    for (int i = 0; i < 6; i++) {
        request_release(request[i]);
    }
    queue_close(&queue);
}

static void limits_are_kept(void **state)
{
    (void)state;
    struct queue queue;
    struct err err = {0};
    assert_int_equal(queue_open(&queue, 2, 100, 1, &stats, NULL), ERR_OK);
    struct request *const a = new_request(PRIORITY_INTERACTIVE);
    struct request *const b = new_request(PRIORITY_INTERACTIVE);
    struct request *const c = new_request(PRIORITY_BULK);
    assert_int_equal(queue_push(&queue, a, 60, &err), ERR_OK);
    assert_int_equal(queue_push(&queue, b, 41, &err), ERR_QUEUE_TOKENS);
    assert_non_null(strstr(err.message, "60 tokens wait, the limit (--max-queue-tokens) is 100"));
    assert_int_equal(queue_push(&queue, b, 40, &err), ERR_OK);
    assert_int_equal(queue_push(&queue, c, 1, &err), ERR_QUEUE_FULL);
    assert_non_null(strstr(err.message, "2 of 2 requests wait"));
    struct job *job = NULL;
    while ((job = queue_take_dead(&queue, 0, true)) != NULL) {
        end_job(&queue, job);
    }
    /* Larger than the limit, but it would never fit better than into an empty queue. */
    assert_int_equal(queue_push(&queue, c, 101, &err), ERR_OK);
    queue_shut(&queue, ERR_CLOSED, "closing");
    assert_int_equal(queue_push(&queue, a, 1, &err), ERR_CLOSED);
    assert_string_equal(err.message, "closing");
    end_job(&queue, queue_take_dead(&queue, 0, true));
    request_release(a);
    request_release(b);
    request_release(c);
    queue_close(&queue);
}

static void finds_the_cancelled_and_the_late(void **state)
{
    (void)state;
    struct queue queue;
    assert_int_equal(queue_open(&queue, 8, 1000, 1, &stats, NULL), ERR_OK);
    struct request *request[4];
    for (int i = 0; i < 4; i++) {
        request[i] = new_request(i < 2 ? PRIORITY_INTERACTIVE : PRIORITY_BULK);
        request[i]->deadline_us = i == 2 ? 500 : 0;
        assert_int_equal(queue_push(&queue, request[i], 1, NULL), ERR_OK);
    }
    assert_null(queue_take_dead(&queue, 499, false));
    struct job *job = queue_take_dead(&queue, 500, false);
    assert_ptr_equal(job->request, request[2]);
    end_job(&queue, job);
    request_cancel(request[0]);
    job = queue_take_dead(&queue, 0, false);
    assert_ptr_equal(job->request, request[0]);
    end_job(&queue, job);
    assert_null(queue_take_dead(&queue, 0, false));
    /* The links closed: the others are still there, in order. */
    assert_ptr_equal(queue_head(&queue, PRIORITY_INTERACTIVE)->request, request[1]);
    assert_ptr_equal(queue_head(&queue, PRIORITY_BULK)->request, request[3]);
    while ((job = queue_take_dead(&queue, 0, true)) != NULL) {
        end_job(&queue, job);
    }
    for (int i = 0; i < 4; i++) {
        request_release(request[i]);
    }
    queue_close(&queue);
}

static void jobs_are_used_again(void **state)
{
    (void)state;
    struct queue queue;
    assert_int_equal(queue_open(&queue, 1, 1000, 1, &stats, NULL), ERR_OK);
    for (int i = 0; i < 100; i++) {
        struct request *const request = new_request(PRIORITY_BULK);
        assert_int_equal(queue_push(&queue, request, 5, NULL), ERR_OK);
        struct job *const job = queue_head(&queue, PRIORITY_BULK);
        queue_remove(&queue, job);
        end_job(&queue, job);
        request_release(request);
    }
    queue_close(&queue);
}

static void count_wake(void *ctx)
{
    ++*(int *)ctx;
}

/* After the front end's release, wake_ctx may be gone: nobody may call wake. */
static void no_wake_after_release(void **state)
{
    (void)state;
    int n_wake = 0;
    struct request *const request = new_request(PRIORITY_BULK);
    request->wake = count_wake;
    request->wake_ctx = &n_wake;
    (void)atomic_fetch_add(&request->refs, 1); /* the engine's */
    request_wake(request);
    assert_int_equal(n_wake, 1);
    request_release(request);
    assert_true(atomic_load(&request->cancel));
    request_wake(request);
    assert_int_equal(n_wake, 1);
    request_drop(request);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(classes_are_first_in_first_out),
        cmocka_unit_test(limits_are_kept),
        cmocka_unit_test(finds_the_cancelled_and_the_late),
        cmocka_unit_test(jobs_are_used_again),
        cmocka_unit_test(no_wake_after_release),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
