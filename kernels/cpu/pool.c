/* Thread pool: see pool.h for the protocol. */
#include "kernels/cpu/pool.h"

#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum {
    CACHE_LINE = 64,
    /* Longer than the pauses within a step, shorter than a scheduler's slice: a spinning thread
     * never holds a core that another one needs for long. */
    SPIN_NS = 100 * 1000,
    SPIN_BATCH = 32, /* pauses between two looks at the clock */
};

struct job {
    pool_fn *fn;
    void *arg;
    int n_item;
    int n_static;    /* items 0 .. n_static-1 are divided beforehand, a piece for each thread */
    uint32_t number; /* never 0 */
};

/* For each thread's piece, the number of the last job in which somebody took it. */
struct piece {
    _Alignas(CACHE_LINE) _Atomic uint32_t taken;
};

/* The gate of a job: open, and the number of workers inside. */
#define GATE_OPEN (UINT32_C(1) << 31)

struct worker {
    struct pool *pool; /* Borrowed */
    pthread_t thread;
    int number; /* 1 .. n_thread-1 */
};

struct pool {
    struct worker *workers; /* Owner: [n_thread-1] */
    struct piece *piece;    /* Owner: [n_thread] */
    int n_thread;
    int n_started;
    atomic_bool stop;
    struct job job; /* Guard: gate; written by the caller while it is shut and nobody is inside */
    /* Each on a line of its own: they are written by different threads at the same time. */
    _Alignas(CACHE_LINE) _Atomic uint32_t job_number;
    _Alignas(CACHE_LINE) _Atomic uint32_t n_asleep; /* workers that sleep or are about to */
    _Alignas(CACHE_LINE) _Atomic uint32_t gate;
    _Atomic uint32_t caller_asleep;
    _Alignas(CACHE_LINE) _Atomic int next; /* first item that nobody has taken */
};

static void futex_wait(_Atomic uint32_t *word, uint32_t value)
{
    (void)syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
}

static void futex_wake_all(_Atomic uint32_t *word)
{
    (void)syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

static void cpu_relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb"); /* waits a few dozen cycles; yield is a no-op on most processors */
#endif
}

static int64_t now_ns(void)
{
    struct timespec t;
    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* Waits for at most SPIN_NS until *word differs from value (wait_for_change) or equals it. Returns
 * the last value seen. */
static uint32_t spin(const _Atomic uint32_t *word, uint32_t value, bool wait_for_change)
{
    const int64_t end = now_ns() + SPIN_NS;
    do {
        for (int i = 0; i < SPIN_BATCH; i++) {
            const uint32_t seen = atomic_load_explicit(word, memory_order_acquire);
            if ((seen != value) == wait_for_change) {
                return seen;
            }
            cpu_relax();
        }
    } while (now_ns() < end);
    return atomic_load_explicit(word, memory_order_acquire);
}

/* Does the piece of thread number owner, unless somebody has taken it. */
static void work_piece(struct pool *pool, const struct job *job, int thread, int owner)
{
    const int64_t n_static = job->n_static;
    const int first = (int)(n_static * owner / pool->n_thread);
    const int end = (int)(n_static * (owner + 1) / pool->n_thread);
    if (first < end && atomic_exchange_explicit(&pool->piece[owner].taken, job->number,
                                                memory_order_relaxed) != job->number) {
        job->fn(job->arg, thread, first, end - first);
    }
}

/* The part of the job that thread number thread does. The caller only leaves when all items are
 * taken: on a busy machine a worker may start long after the caller has done the work without
 * it. */
static void work(struct pool *pool, int thread)
{
    const struct job job = pool->job;
    work_piece(pool, &job, thread, thread);
    for (;;) {
        const int item = atomic_fetch_add_explicit(&pool->next, 1, memory_order_relaxed);
        if (item >= job.n_item) {
            break;
        }
        job.fn(job.arg, thread, item, 1);
    }
    for (int owner = 1; thread == 0 && owner < pool->n_thread; owner++) {
        work_piece(pool, &job, thread, owner);
    }
}

/* Returns the number of the next job, which is not last. The order "say that I sleep, then look"
 * here against "publish, then look who sleeps" in publish() makes sure that one of both sees the
 * other; the kernel looks at the word again before it lets the thread sleep. */
static uint32_t next_job(struct pool *pool, uint32_t last)
{
    uint32_t number = spin(&pool->job_number, last, true);
    if (number != last) {
        return number;
    }
    atomic_fetch_add(&pool->n_asleep, 1);
    while ((number = atomic_load(&pool->job_number)) == last) {
        futex_wait(&pool->job_number, last);
    }
    atomic_fetch_sub(&pool->n_asleep, 1);
    return number;
}

/* Whether there is a job to work on: the one that the worker was woken for, or a later one. */
static bool enter(struct pool *pool)
{
    uint32_t gate = atomic_load(&pool->gate);
    while ((gate & GATE_OPEN) != 0) {
        if (atomic_compare_exchange_weak(&pool->gate, &gate, gate + 1)) {
            return true;
        }
    }
    return false;
}

static void *worker_main(void *arg)
{
    struct worker *const self = arg;
    struct pool *const pool = self->pool;
    uint32_t number = 0;
    (void)pthread_setname_np(pthread_self(), "compute"); /* for top -H */
    for (;;) {
        number = next_job(pool, number);
        if (atomic_load(&pool->stop)) {
            return NULL;
        }
        if (!enter(pool)) {
            continue; /* the others have done it */
        }
        work(pool, self->number);
        if (atomic_fetch_sub(&pool->gate, 1) == 1 && atomic_load(&pool->caller_asleep) != 0) {
            futex_wake_all(&pool->gate);
        }
    }
}

static void publish(struct pool *pool)
{
    atomic_fetch_add(&pool->job_number, 1);
    if (atomic_load(&pool->n_asleep) != 0) {
        futex_wake_all(&pool->job_number);
    }
}

/* Closes the gate, and waits for the workers inside. */
static void wait_for_workers(struct pool *pool)
{
    if (atomic_fetch_and(&pool->gate, ~GATE_OPEN) == GATE_OPEN ||
        spin(&pool->gate, 0, false) == 0) {
        return;
    }
    atomic_store(&pool->caller_asleep, 1);
    for (uint32_t n = atomic_load(&pool->gate); n != 0; n = atomic_load(&pool->gate)) {
        futex_wait(&pool->gate, n);
    }
    atomic_store(&pool->caller_asleep, 0);
}

void pool_for(struct pool *pool, int n_item, enum pool_split split, pool_fn *fn, void *arg)
{
    CHECK(n_item >= 0);
    if (n_item == 0) {
        return;
    }
    if (pool->n_thread == 1 || n_item == 1) {
        fn(arg, 0, 0, n_item);
        return;
    }
    const int n_static = split == POOL_STREAM ? n_item - n_item / 8 : 0;
    const uint32_t number = pool->job.number + 1;
    pool->job = (struct job){fn, arg, n_item, n_static, number > 0 ? number : 1};
    atomic_store_explicit(&pool->next, n_static, memory_order_relaxed);
    atomic_store(&pool->gate, GATE_OPEN);
    publish(pool);
    work(pool, 0);
    wait_for_workers(pool);
}

int pool_n_thread(const struct pool *pool)
{
    return pool->n_thread;
}

/* Workers block all signals, which the main thread handles, except bus errors: those go to the
 * thread that reads past the end of a mapped file, and would kill the process if they were
 * blocked. */
static int start_workers(struct pool *pool)
{
    sigset_t all;
    sigset_t before;
    (void)sigfillset(&all);
    (void)sigdelset(&all, SIGBUS);
    (void)pthread_sigmask(SIG_SETMASK, &all, &before);
    int failure = 0;
    for (int i = 0; i < pool->n_thread - 1 && failure == 0; i++) {
        pool->workers[i] = (struct worker){.pool = pool, .number = i + 1};
        failure = pthread_create(&pool->workers[i].thread, NULL, worker_main, &pool->workers[i]);
        pool->n_started += failure == 0;
    }
    (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
    return failure;
}

enum err_code pool_new(struct pool **pool, int n_thread, struct err *err)
{
    *pool = NULL;
    if (n_thread < 1 || n_thread > POOL_THREADS_MAX) {
        return err_set(err, ERR_ARGUMENT, "threads: %d is not in 1..%d", n_thread,
                       POOL_THREADS_MAX);
    }
    struct pool *const p = aligned_alloc(CACHE_LINE, sizeof *p);
    if (p == NULL) {
        return err_set(err, ERR_MEMORY, "no memory left for %d threads", n_thread);
    }
    memset(p, 0, sizeof *p);
    p->n_thread = n_thread;
    p->workers = calloc((size_t)n_thread, sizeof *p->workers);
    p->piece = aligned_alloc(CACHE_LINE, (size_t)n_thread * sizeof *p->piece);
    if (p->workers == NULL || p->piece == NULL) {
        pool_free(p);
        return err_set(err, ERR_MEMORY, "no memory left for %d threads", n_thread);
    }
    memset(p->piece, 0, (size_t)n_thread * sizeof *p->piece);
    const int failure = start_workers(p);
    if (failure != 0) {
        const int n_started = p->n_started;
        pool_free(p);
        return err_set(err, ERR_MEMORY, "cannot start thread %d of %d: %s; ask for fewer threads",
                       n_started + 2, n_thread, strerror(failure));
    }
    *pool = p;
    return ERR_OK;
}

void pool_free(struct pool *pool)
{
    if (pool == NULL) {
        return;
    }
    atomic_store(&pool->stop, true);
    publish(pool);
    for (int i = 0; i < pool->n_started; i++) {
        (void)pthread_join(pool->workers[i].thread, NULL);
    }
    free(pool->piece);
    free(pool->workers);
    free(pool);
}
