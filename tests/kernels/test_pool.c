/* The CPU backend's thread pool: every item once, whatever the threads do.
 *
 * Rerun one case: build/tests/kernels/test_pool (cmocka runs them in order; none takes long). Under
 * ThreadSanitizer: make test-tsan. */
#include "kernels/cpu/pool.h"

#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>

#include <cmocka.h>

enum { ITEMS_MAX = 1000 };

/* What a job writes: plain memory, so that a sanitizer sees an item done twice or read too early.
 */
struct record {
    int done[ITEMS_MAX]; /* times an item was done */
    int n_thread;
    _Atomic int n_call;
};

static void mark(void *arg, int thread, int first, int n)
{
    struct record *const r = arg;
    atomic_fetch_add(&r->n_call, 1);
    CHECK(thread >= 0 && thread < r->n_thread && n > 0);
    for (int i = first; i < first + n; i++) {
        r->done[i]++;
    }
}

static struct pool *pool_of(int n_thread)
{
    struct pool *pool = NULL;
    struct err err = {0};
    if (pool_new(&pool, n_thread, &err) != ERR_OK) {
        fail_msg("pool_new(%d): expected ERR_OK, got: %s", n_thread, err.message);
    }
    return pool;
}

static void expect_each_once(const struct record *r, int n_item, int n_thread)
{
    for (int i = 0; i < ITEMS_MAX; i++) {
        const int expected = i < n_item;
        if (r->done[i] != expected) {
            fail_msg("%d threads, %d items: item %d: expected %d times, got %d", n_thread, n_item,
                     i, expected, r->done[i]);
        }
    }
}

static void test_every_item_is_done_once(void **state)
{
    (void)state;
    static const int threads[] = {1, 2, 3, 8, 64};
    static const int items[] = {0, 1, 2, 7, 8, 63, 64, 65, 1000};
    for (size_t t = 0; t < sizeof threads / sizeof *threads; t++) {
        struct pool *const pool = pool_of(threads[t]);
        assert_int_equal(pool_n_thread(pool), threads[t]);
        for (size_t i = 0; i < sizeof items / sizeof *items; i++) {
            for (int split = POOL_STREAM; split <= POOL_DYNAMIC; split++) {
                struct record r = {.n_thread = threads[t]};
                pool_for(pool, items[i], (enum pool_split)split, mark, &r);
                expect_each_once(&r, items[i], threads[t]);
            }
        }
        pool_free(pool);
    }
}

/* Jobs that follow at once: a worker must neither miss one nor do one twice. */
static void test_many_jobs_in_a_row(void **state)
{
    (void)state;
    struct pool *const pool = pool_of(4);
    for (int job = 0; job < 2000; job++) {
        struct record r = {.n_thread = 4};
        const int n_item = 1 + job % 9;
        pool_for(pool, n_item, job % 2 == 0 ? POOL_DYNAMIC : POOL_STREAM, mark, &r);
        expect_each_once(&r, n_item, 4);
    }
    pool_free(pool);
}

static void pause_us(long us)
{
    const struct timespec t = {0, us * 1000};
    (void)nanosleep(&t, NULL);
}

static void slow_item(void *arg, int thread, int first, int n)
{
    if (thread != 0) {
        pause_us(400); /* the caller has finished its share and sleeps */
    }
    mark(arg, thread, first, n);
}

/* Pauses around the time that a thread spins: jobs meet workers that spin, fall asleep or sleep,
 * and callers that wait asleep. */
static void test_jobs_wake_sleepers(void **state)
{
    (void)state;
    struct pool *const pool = pool_of(3);
    for (int job = 0; job < 100; job++) {
        struct record r = {.n_thread = 3};
        pause_us(10 * (job % 30));
        pool_for(pool, 16, POOL_STREAM, job % 5 == 0 ? slow_item : mark, &r);
        expect_each_once(&r, 16, 3);
    }
    pool_free(pool);
}

/* What one job wrote, the next one and the caller read. */
struct relay {
    int64_t value[ITEMS_MAX];
    int shift;
};

static void relay_item(void *arg, int thread, int first, int n)
{
    (void)thread;
    struct relay *const r = arg;
    for (int i = first; i < first + n; i++) {
        r->value[(i + r->shift) % ITEMS_MAX]++;
    }
}

static void test_writes_are_visible_to_the_next_job(void **state)
{
    (void)state;
    struct pool *const pool = pool_of(4);
    struct relay *const r = calloc(1, sizeof *r);
    assert_non_null(r);
    for (r->shift = 0; r->shift < 100; r->shift++) {
        pool_for(pool, ITEMS_MAX, POOL_STREAM, relay_item, r);
    }
    for (int i = 0; i < ITEMS_MAX; i++) {
        assert_int_equal(r->value[i], 100);
    }
    free(r);
    pool_free(pool);
}

/* Several pools at once on few cores: more threads than cores, all must get through. */
static void *crowd_main(void *arg)
{
    struct pool *const pool = arg;
    for (int job = 0; job < 50; job++) {
        struct record r = {.n_thread = pool_n_thread(pool)};
        pool_for(pool, 40, POOL_DYNAMIC, mark, &r);
        expect_each_once(&r, 40, r.n_thread);
    }
    return NULL;
}

static void test_oversubscribed_machine_makes_progress(void **state)
{
    (void)state;
    enum { CROWD = 4, EACH = 8 };
    pthread_t threads[CROWD];
    struct pool *pools[CROWD];
    for (int i = 0; i < CROWD; i++) {
        pools[i] = pool_of(EACH);
        assert_int_equal(pthread_create(&threads[i], NULL, crowd_main, pools[i]), 0);
    }
    for (int i = 0; i < CROWD; i++) {
        assert_int_equal(pthread_join(threads[i], NULL), 0);
        pool_free(pools[i]);
    }
}

/* On one core a worker only begins when the caller has slept: a caller that does all itself never
 * does, one that waits for the worker does once a job. */
static void test_no_worker_is_waited_for_that_has_not_begun(void **state)
{
    (void)state;
    enum { JOBS = 1000 };
    cpu_set_t all;
    cpu_set_t one;
    CPU_ZERO(&one);
    assert_int_equal(sched_getaffinity(0, sizeof all, &all), 0);
    for (size_t cpu = 0; CPU_COUNT(&one) == 0; cpu++) {
        if (CPU_ISSET(cpu, &all)) {
            CPU_SET(cpu, &one);
        }
    }
    assert_int_equal(sched_setaffinity(0, sizeof one, &one), 0);
    struct pool *const pool = pool_of(2);
    struct rusage before;
    struct rusage after;
    assert_int_equal(getrusage(RUSAGE_THREAD, &before), 0);
    for (int job = 0; job < JOBS; job++) {
        struct record r = {.n_thread = 2};
        pool_for(pool, 40, job % 2 == 0 ? POOL_DYNAMIC : POOL_STREAM, mark, &r);
        expect_each_once(&r, 40, 2);
    }
    assert_int_equal(getrusage(RUSAGE_THREAD, &after), 0);
    const long n_slept = after.ru_nvcsw - before.ru_nvcsw;
    pool_free(pool);
    assert_int_equal(sched_setaffinity(0, sizeof all, &all), 0);
    if (n_slept > JOBS / 2) {
        fail_msg("%d jobs: the caller slept %ld times", JOBS, n_slept);
    }
}

static void test_thread_count_has_bounds(void **state)
{
    (void)state;
    static const int counts[] = {-1, 0, POOL_THREADS_MAX + 1};
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        struct pool *pool = NULL;
        struct err err = {0};
        assert_int_equal(pool_new(&pool, counts[i], &err), ERR_ARGUMENT);
        assert_null(pool);
        assert_non_null(strstr(err.message, "threads"));
    }
    pool_free(NULL);
}

/* A pool that never got a job ends at once, sleeping workers and all. */
static void test_idle_pool_ends(void **state)
{
    (void)state;
    pool_free(pool_of(8));
    struct pool *const pool = pool_of(8);
    pause_us(1000);
    pool_free(pool);
}

struct masks {
    _Atomic int n_worker; /* calls on threads of the pool's own */
    _Atomic int n_bus, n_term;
};

static void note_mask(void *arg, int thread, int first, int n)
{
    struct masks *const m = arg;
    sigset_t mask;
    (void)first;
    (void)n;
    CHECK(pthread_sigmask(SIG_BLOCK, NULL, &mask) == 0);
    if (thread > 0) {
        atomic_fetch_add(&m->n_worker, 1);
        atomic_fetch_add(&m->n_bus, sigismember(&mask, SIGBUS));
        atomic_fetch_add(&m->n_term, sigismember(&mask, SIGTERM));
    }
    pause_us(1000);
}

/* A file that is cut while it is mapped is a SIGBUS of whoever reads it; where that is blocked, the
 * kernel ends the process without asking the handler. */
static void test_workers_take_bus_errors_and_no_other_signal(void **state)
{
    (void)state;
    struct pool *const pool = pool_of(4);
    struct masks m = {0};
    while (atomic_load(&m.n_worker) == 0) {
        pool_for(pool, 16, POOL_DYNAMIC, note_mask, &m);
    }
    assert_int_equal(atomic_load(&m.n_bus), 0);
    assert_int_equal(atomic_load(&m.n_term), atomic_load(&m.n_worker));
    pool_free(pool);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_item_is_done_once),
        cmocka_unit_test(test_many_jobs_in_a_row),
        cmocka_unit_test(test_jobs_wake_sleepers),
        cmocka_unit_test(test_writes_are_visible_to_the_next_job),
        cmocka_unit_test(test_oversubscribed_machine_makes_progress),
        cmocka_unit_test(test_no_worker_is_waited_for_that_has_not_begun),
        cmocka_unit_test(test_thread_count_has_bounds),
        cmocka_unit_test(test_idle_pool_ends),
        cmocka_unit_test(test_workers_take_bus_errors_and_no_other_signal),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
