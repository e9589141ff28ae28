/* The bounded queue: order, limits, cancellation and deadlines while waiting, shutting. */
#include "engine/queue.h"

#include "engine/request.h"
#include "engine/stats.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

static struct engine_stats stats;

static struct request *new_request(enum priority priority)
{
    struct request *const request = request_new(REQUEST_SCORE, 1);
    assert_non_null(request);
    request->priority = priority;
    return request;
}

static enum err_code open_queue(struct queue *queue, int n_waiting, int64_t n_position,
                                int n_running)
{
    const struct queue_limits limits = {n_waiting, n_position, n_running};
    return queue_open(queue, &limits, &stats, NULL);
}

/* The next one, as if every place were free. */
static struct job *pick(struct queue *queue, enum priority priority)
{
    const struct plan_running nothing = {.n_max = 64};
    return queue_pick(queue, &nothing, priority, true);
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
    assert_int_equal(open_queue(&queue, 10, 1000, 2), ERR_OK);
    struct request *request[6];
    for (int i = 0; i < 6; i++) {
        request[i] = new_request(i % 2 == 0 ? PRIORITY_BULK : PRIORITY_INTERACTIVE);
        assert_int_equal(queue_push(&queue, request[i], i == 4 ? 500 : 10, NULL), ERR_OK);
    }
    assert_int_equal(atomic_load(&stats.waiting), 6);
    assert_int_equal(atomic_load(&stats.waiting_tokens), 550);
    /* The large one is ahead of others with its turn alone. */
    assert_int_equal(queue_positions_ahead(&queue, 100), 5 * 10 + 100);
    assert_int_equal(queue_positions_ahead(&queue, 5), 6 * 10); /* until the others have left */
    assert_int_equal(queue_positions_ahead(&queue, INT64_MAX), 550);
    static const int order[] = {1, 3, 5, 0, 2, 4};
    for (int i = 0; i < 6; i++) {
        struct job *const job = pick(&queue, i < 3 ? PRIORITY_INTERACTIVE : PRIORITY_BULK);
        assert_ptr_equal(job->request, request[order[i]]);
        queue_remove(&queue, job);
        end_job(&queue, job);
    }
    assert_null(pick(&queue, PRIORITY_INTERACTIVE));
    assert_null(pick(&queue, PRIORITY_BULK));
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
    assert_int_equal(open_queue(&queue, 2, 100, 1), ERR_OK);
    struct request *const a = new_request(PRIORITY_INTERACTIVE);
    struct request *const b = new_request(PRIORITY_INTERACTIVE);
    struct request *const c = new_request(PRIORITY_BULK);
    assert_int_equal(queue_push(&queue, a, 60, &err), ERR_OK);
    assert_int_equal(queue_push(&queue, b, 61, &err), ERR_QUEUE_TOKENS);
    assert_non_null(strstr(
        err.message, "60 positions wait to be computed, the limit (--max-queue-tokens) is 100"));
    assert_int_equal(queue_push(&queue, b, 40, &err), ERR_OK);
    assert_int_equal(queue_push(&queue, c, 1, &err), ERR_QUEUE_FULL);
    assert_non_null(strstr(err.message, "requests that wait: 2 of 2"));
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
    assert_int_equal(open_queue(&queue, 8, 1000, 1), ERR_OK);
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
    assert_ptr_equal(pick(&queue, PRIORITY_INTERACTIVE)->request, request[1]);
    assert_ptr_equal(pick(&queue, PRIORITY_BULK)->request, request[3]);
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
    assert_int_equal(open_queue(&queue, 1, 1000, 1), ERR_OK);
    for (int i = 0; i < 100; i++) {
        struct request *const request = new_request(PRIORITY_BULK);
        assert_int_equal(queue_push(&queue, request, 5, NULL), ERR_OK);
        struct job *const job = pick(&queue, PRIORITY_BULK);
        queue_remove(&queue, job);
        end_job(&queue, job);
        request_release(request);
    }
    queue_close(&queue);
}

/* A request that is pushed, and what must come of it. */
struct push {
    uint64_t client;
    bool is_tenant;
    int64_t n_position;
    enum err_code code;
};

/* Into a queue for 1000 positions. */
static void push_each(const struct push *push, size_t n)
{
    struct queue queue;
    assert_int_equal(open_queue(&queue, 10, 1000, 1), ERR_OK);
    for (size_t i = 0; i < n; i++) {
        struct request *const request = new_request(PRIORITY_BULK);
        request->client = push[i].client;
        request->is_tenant = push[i].is_tenant;
        const enum err_code code = queue_push(&queue, request, push[i].n_position, NULL);
        if (code != push[i].code) {
            fail_msg("push %zu: expected %s, got %s", i, err_code_name(push[i].code),
                     err_code_name(code));
        }
        request_release(request);
    }
    struct job *job = NULL;
    while ((job = queue_take_dead(&queue, 0, true)) != NULL) {
        end_job(&queue, job);
    }
    queue_close(&queue);
}

/* The largest waiting request does not keep the others out. */
static void the_largest_is_refused_first(void **state)
{
    (void)state;
    static const struct push push[] = {
        {1, false, 5000, ERR_OK}, /* more than the limit, into an empty queue */
        {1, false, 400, ERR_OK},  /* of the same address perhaps another user */
        {2, false, 5000, ERR_QUEUE_TOKENS},
        {2, false, 4999, ERR_QUEUE_TOKENS}, /* one such request is enough */
        {0, false, 500, ERR_OK},
        {3, true, 101, ERR_QUEUE_TOKENS},
        {3, true, 100, ERR_OK},
        {4, true, 1, ERR_QUEUE_TOKENS}, /* now the queue is full for all */
    };
    push_each(push, sizeof push / sizeof push[0]);
}

/* All that waits of a key counts as one: nor do many small requests keep others out. */
static void the_key_with_most_waiting_is_refused_first(void **state)
{
    (void)state;
    static const struct push push[] = {
        {1, true, 250, ERR_OK},
        {1, true, 250, ERR_OK},
        {1, true, 250, ERR_OK},
        {1, true, 250, ERR_OK},
        {1, true, 1, ERR_QUEUE_TOKENS},
        {2, true, 600, ERR_OK}, /* as if those of key 1 were not there */
        {3, true, 401, ERR_QUEUE_TOKENS},
        {3, true, 400, ERR_OK},
        {2, true, 1, ERR_QUEUE_TOKENS},
    };
    static const struct push alike[] = {
        {1, true, 600, ERR_OK}, {2, true, 600, ERR_QUEUE_TOKENS}, /* nobody has more waiting */
    };
    push_each(alike, sizeof alike / sizeof alike[0]);
    push_each(push, sizeof push / sizeof push[0]);
}

static void a_key_leaves_waiting_places_to_others(void **state)
{
    (void)state;
    struct queue queue;
    struct err err = {0};
    assert_int_equal(open_queue(&queue, 16, 1000, 1), ERR_OK);
    for (int i = 0; i < 16; i++) {
        struct request *const request = new_request(PRIORITY_BULK);
        request->client = i < 15 ? 7 : 8;
        request->is_tenant = true;
        const enum err_code code = queue_push(&queue, request, 1, &err);
        assert_int_equal(code, i == 14 ? ERR_QUEUE_FULL : ERR_OK);
        request_release(request);
    }
    assert_non_null(strstr(err.message, "of the 16 that may wait (--max-queue) 2 are for other"));
    struct job *job = NULL;
    while ((job = queue_take_dead(&queue, 0, true)) != NULL) {
        end_job(&queue, job);
    }
    queue_close(&queue);
}

static int n_free_clients(const struct queue *queue)
{
    int n = 0;
    for (const struct client *client = queue->client_free; client != NULL; client = client->next) {
        n++;
    }
    return n;
}

/* Of many clients some share a bucket; each is found, and goes, whichever of them goes first. */
static void clients_of_one_bucket_are_apart(void **state)
{
    (void)state;
    enum { N = 48 };
    struct queue queue;
    assert_int_equal(open_queue(&queue, 2 * N, 1000, 1), ERR_OK);
    const int n_free = n_free_clients(&queue);
    for (int round = 0; round < 2; round++) {
        struct request *request[2 * N];
        for (int i = 0; i < 2 * N; i++) { /* two of each client */
            request[i] = new_request(PRIORITY_BULK);
            request[i]->client = (uint64_t)(i % N + 1) * 0x10001;
            assert_int_equal(queue_push(&queue, request[i], 1, NULL), ERR_OK);
        }
        assert_int_equal(n_free_clients(&queue), n_free - N);
        int longest = 0;
        for (uint32_t b = 0; b <= queue.bucket_mask; b++) {
            int n = 0;
            for (const struct client *c = queue.bucket[b]; c != NULL; c = c->next) {
                n++;
            }
            longest = n > longest ? n : longest;
        }
        assert_true(longest >= 2);
        for (int n = 2 * N; n > 0; n--) { /* the last ones first, or the first ones */
            struct job *job = queue.head[PRIORITY_BULK];
            for (int i = 0; i < n && job != NULL && job->next != NULL && round == 0; i++) {
                job = job->next;
            }
            const struct client *const client = job->client;
            assert_int_equal(client->id, job->request->client);
            assert_int_equal(client->n_job, n > N ? 2 : 1);
            queue_remove(&queue, job);
            end_job(&queue, job);
        }
        assert_int_equal(n_free_clients(&queue), n_free);
        for (int i = 0; i < 2 * N; i++) {
            request_release(request[i]);
        }
    }
    queue_close(&queue);
}

/* Requests take turns, one sequence each; clients before requests. */
static void the_requests_of_a_class_take_turns(void **state)
{
    (void)state;
    static const uint64_t client[] = {1, 1, 2};
    static const int order[] = {0, 2, 1, 2, 0, 2, 1};
    struct queue queue;
    struct request *request[3];
    assert_int_equal(open_queue(&queue, 10, 1000, 1), ERR_OK);
    for (int i = 0; i < 3; i++) {
        request[i] = new_request(PRIORITY_INTERACTIVE);
        request[i]->client = client[i];
        assert_int_equal(queue_push(&queue, request[i], 100, NULL), ERR_OK);
    }
    struct job *job[3] = {NULL};
    for (size_t i = 0; i < sizeof order / sizeof order[0]; i++) {
        struct job *const next = pick(&queue, PRIORITY_INTERACTIVE);
        assert_ptr_equal(next->request, request[order[i]]);
        queue_admitted(&queue, next, 10);
        job[order[i]] = next;
    }
    assert_int_equal(atomic_load(&stats.waiting_tokens), 300 - 70);
    for (int i = 0; i < 3; i++) {
        while (job[i]->n_running > 0) {
            queue_ended(job[i]);
        }
        queue_remove(&queue, job[i]);
        end_job(&queue, job[i]);
        request_release(request[i]);
    }
    assert_int_equal(atomic_load(&stats.waiting_tokens), 0);
    queue_close(&queue);
}

/* A job that was passed often enough comes first, once: it is passed anew from then on. */
static void who_was_passed_comes_first_once(void **state)
{
    (void)state;
    struct queue queue;
    const struct plan_running nothing = {.n_max = 64};
    struct request *const request[2] = {new_request(PRIORITY_INTERACTIVE),
                                        new_request(PRIORITY_INTERACTIVE)};
    assert_int_equal(open_queue(&queue, 2, 1000, 1), ERR_OK);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(queue_push(&queue, request[i], 100, NULL), ERR_OK);
    }
    struct job *const lacking = queue.head[0];
    struct job *const other = lacking->next;
    lacking->lacked_pages = true;
    for (int i = 0; i < PLAN_PASS_MAX; i++) {
        assert_null(queue_pick_passed(&queue, &nothing));
        queue_admitted(&queue, other, 1);
    }
    assert_ptr_equal(queue_pick_passed(&queue, &nothing), lacking);
    queue_admitted(&queue, lacking, 1);
    assert_null(queue_pick_passed(&queue, &nothing));
    queue_ended(lacking);
    while (other->n_running > 0) {
        queue_ended(other);
    }
    struct job *job = NULL;
    while ((job = queue_take_dead(&queue, 0, true)) != NULL) {
        end_job(&queue, job);
    }
    for (int i = 0; i < 2; i++) {
        request_release(request[i]);
    }
    queue_close(&queue);
}

/* Ends all that waits. */
static void end_all(struct queue *queue)
{
    struct job *job = NULL;
    while ((job = queue_take_dead(queue, 0, true)) != NULL) {
        end_job(queue, job);
    }
}

/* What is left out of a class's turns, and for how long. */
static void who_lacks_memory_is_left_out(void **state)
{
    (void)state;
    const struct plan_running nothing = {.n_max = 64};
    struct queue queue;
    struct request *request[2];
    assert_int_equal(open_queue(&queue, 2, 1000, 1), ERR_OK);
    for (int i = 0; i < 2; i++) {
        request[i] = new_request(PRIORITY_BULK);
        assert_int_equal(queue_push(&queue, request[i], 100, NULL), ERR_OK);
    }
    struct job *const first = queue.head[PRIORITY_BULK];
    struct job *const second = first->next;
    first->lacks_pages = true;
    first->n_passed = PLAN_PASS_MAX;
    assert_ptr_equal(pick(&queue, PRIORITY_BULK), second);
    assert_null(queue_pick_passed(&queue, &nothing));
    queue_try_pages(&queue);
    assert_ptr_equal(pick(&queue, PRIORITY_BULK), first);
    assert_ptr_equal(queue_pick_passed(&queue, &nothing), first);
    request[0]->trace_bytes = 8;
    assert_ptr_equal(pick(&queue, PRIORITY_BULK), first);
    assert_ptr_equal(queue_pick(&queue, &nothing, PRIORITY_BULK, false), second);
    request[0]->trace_bytes = 0;

    /* Only who has lacked pages was passed, and no longer once it is admitted. The sequence had
     * more positions than the rest of its request was counted for. */
    queue_admitted(&queue, second, 101);
    assert_int_equal(first->n_passed, PLAN_PASS_MAX);
    first->lacked_pages = true;
    queue_admitted(&queue, first, 10);
    assert_ptr_equal(pick(&queue, PRIORITY_BULK), second); /* it is the other's turn */
    queue_admitted(&queue, second, 1);
    assert_int_equal(first->n_passed, 0);
    assert_int_equal(second->n_passed, 0);
    assert_int_equal(atomic_load(&stats.waiting_tokens), 90);
    queue_ended(first);
    queue_ended(second);
    queue_ended(second);
    end_all(&queue);
    request_release(request[0]);
    request_release(request[1]);
    queue_close(&queue);
}

/* Of the same number of times passed, the bulk one comes first, then the one that came first. */
static void of_those_passed_alike_a_bulk_one_is_first(void **state)
{
    (void)state;
    const struct plan_running nothing = {.n_max = 64};
    struct queue queue;
    assert_int_equal(open_queue(&queue, 4, 1000, 1), ERR_OK);
    for (int i = 0; i < 4; i++) {
        struct request *const request = new_request(i < 2 ? PRIORITY_INTERACTIVE : PRIORITY_BULK);
        assert_int_equal(queue_push(&queue, request, 1, NULL), ERR_OK);
        request_release(request);
    }
    for (int prio = 0; prio < 2; prio++) {
        queue.head[prio]->n_passed = queue.tail[prio]->n_passed = PLAN_PASS_MAX;
    }
    assert_ptr_equal(queue_pick_passed(&queue, &nothing), queue.head[PRIORITY_BULK]);
    end_all(&queue);
    queue_close(&queue);
}

enum { HOUR_MS = 3600 * 1000, PATIENCE_S = 60 };

/* The engine thread, which waits twice. */
static void *wait_twice(void *ctx)
{
    queue_wait(ctx, HOUR_MS);
    queue_wait(ctx, HOUR_MS);
    return NULL;
}

static void await_idle(struct queue *queue)
{
    while (!atomic_load(&queue->idle)) {
        (void)usleep(100);
    }
}

/* A push and a wake end an hour's wait at once, and a wake is not lost on who waits later. */
static void who_waits_is_woken(void **state)
{
    (void)state;
    struct queue queue;
    pthread_t thread;
    struct request *const request = new_request(PRIORITY_BULK);
    assert_int_equal(open_queue(&queue, 1, 100, 1), ERR_OK);
    (void)alarm(PATIENCE_S); /* ends the test */
    queue_wake(&queue);
    queue_wait(&queue, HOUR_MS);
    assert_false(queue.woken);
    queue_wake(&queue);
    queue_pause(&queue, HOUR_MS);
    assert_false(queue.woken);

    atomic_store(&queue.idle, false);
    assert_int_equal(pthread_create(&thread, NULL, wait_twice, &queue), 0);
    await_idle(&queue); /* told under the mutex, which the wait gives back */
    atomic_store(&queue.idle, false);
    queue_wake(&queue);
    await_idle(&queue);
    assert_int_equal(queue_push(&queue, request, 1, NULL), ERR_OK);
    assert_int_equal(pthread_join(thread, NULL), 0);
    (void)alarm(0);
    /* The engine has work from then on. */
    assert_false(atomic_load(&queue.idle));
    assert_int_equal(atomic_load(&queue.heartbeat_us), atomic_load(&request->submit_us));
    end_all(&queue);
    request_release(request);
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
        cmocka_unit_test(the_largest_is_refused_first),
        cmocka_unit_test(the_key_with_most_waiting_is_refused_first),
        cmocka_unit_test(a_key_leaves_waiting_places_to_others),
        cmocka_unit_test(clients_of_one_bucket_are_apart),
        cmocka_unit_test(the_requests_of_a_class_take_turns),
        cmocka_unit_test(who_was_passed_comes_first_once),
        cmocka_unit_test(who_lacks_memory_is_left_out),
        cmocka_unit_test(of_those_passed_alike_a_bulk_one_is_first),
        cmocka_unit_test(who_waits_is_woken),
        cmocka_unit_test(no_wake_after_release),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
