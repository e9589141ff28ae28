/* The order in which long bodies are read: see worker.h. */
#include "server/net/worker.h"

#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

enum { N_TASK = 12 };

struct noted {
    struct worker_task task; /* first: a task's address is this one's */
    char name;
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static bool is_open;
static int n_held;
static char order[N_TASK + 1]; /* names, as they ran */
static int n_run;

/* Holds the thread until the rest is queued. */
static void hold(struct worker_task *task)
{
    (void)task;
    pthread_mutex_lock(&mutex);
    n_held++;
    pthread_cond_broadcast(&changed);
    while (!is_open) {
        pthread_cond_wait(&changed, &mutex);
    }
    pthread_mutex_unlock(&mutex);
}

static void note(struct worker_task *task)
{
    pthread_mutex_lock(&mutex);
    order[n_run++] = ((struct noted *)(void *)task)->name;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&mutex);
}

static void begin(void)
{
    is_open = false;
    n_held = n_run = 0;
}

/* Under the mutex. */
static void await(const int *number, int least)
{
    while (*number < least) {
        pthread_cond_wait(&changed, &mutex);
    }
}

static void let_go(void)
{
    is_open = true;
    pthread_cond_broadcast(&changed);
}

struct order_case {
    const char *name;
    const char *queued; /* A, B: clients; x, y: of clients that are not known */
    const char *expected;
};

/* Bodies of a quarter of an hour, so that the time between two pushes does not count. */
static const struct order_case order_cases[] = {
    {"as they come", "AAA", "AAA"},
    {"a client's many do not hold up another's one", "AAAAB", "ABAAA"},
    {"clients take turns", "AAABBB", "ABABAB"},
    {"who is not known waits as one who is alone", "xxxy", "xxxy"},
    {"and is not held up by a client's many", "AAAx", "AxAA"},
};

static void clients_take_turns(void **state)
{
    (void)state;
    for (size_t c = 0; c < sizeof order_cases / sizeof order_cases[0]; c++) {
        const struct order_case *const row = &order_cases[c];
        struct worker *worker = NULL;
        struct worker_task holder = {.run = hold};
        struct noted noted[N_TASK] = {0};
        begin();
        assert_int_equal(worker_open(&worker, 1, NULL), ERR_OK);
        worker_push(worker, &holder);
        pthread_mutex_lock(&mutex);
        await(&n_held, 1);
        for (int i = 0; row->queued[i] != '\0'; i++) {
            const char client = row->queued[i];
            noted[i] = (struct noted){.task = {.run = note,
                                               .bytes = 900 * 1000 * (size_t)1000,
                                               .client = client < 'a' ? (uint64_t)client : 0},
                                      .name = client};
            worker_push(worker, &noted[i].task);
        }
        let_go();
        pthread_mutex_unlock(&mutex);
        worker_close(worker); /* runs what is queued */
        order[n_run] = '\0';
        if (strcmp(order, row->expected) != 0) {
            fail_msg("%s: %s came, %s ran, expected %s", row->name, row->queued, order,
                     row->expected);
        }
    }
}

/* The longest body takes the first thread, then a shorter one the second; another of either waits,
 * and a prompt does not. */
static void long_bodies_leave_a_thread_to_shorter_ones(void **state)
{
    (void)state;
    struct worker *worker = NULL;
    struct noted noted[] = {
        {.task = {.run = hold, .bytes = WORKER_SHORT_BYTES + 1}},
        {.task = {.run = note, .bytes = WORKER_SHORT_BYTES + 1}, .name = 'l'},
        {.task = {.run = hold, .bytes = WORKER_SHORT_BYTES}},
        {.task = {.run = note, .bytes = WORKER_PROMPT_BYTES + 1}, .name = 's'},
        {.task = {.run = note, .bytes = WORKER_PROMPT_BYTES}, .name = 'p'},
    };
    begin();
    assert_int_equal(worker_open(&worker, 3, NULL), ERR_OK);
    pthread_mutex_lock(&mutex);
    worker_push(worker, &noted[0].task);
    await(&n_held, 1);
    worker_push(worker, &noted[1].task);
    worker_push(worker, &noted[2].task);
    await(&n_held, 2);
    worker_push(worker, &noted[3].task);
    worker_push(worker, &noted[4].task);
    await(&n_run, 1);
    assert_int_equal(order[0], 'p');
    assert_int_equal(n_run, 1);
    let_go();
    pthread_mutex_unlock(&mutex);
    worker_close(worker);
    assert_int_equal(n_run, 3);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(clients_take_turns),
        cmocka_unit_test(long_bodies_leave_a_thread_to_shorter_ones)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
