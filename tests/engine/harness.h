/* An engine on a tiny model, for tests/engine: the model's folder for a group of tests, opening the
 * engine, building requests, waiting for them, a device that computes by itself, and a gate that
 * lets the test decide when a step may end. Header only. */
#ifndef TESTS_ENGINE_HARNESS_H
#define TESTS_ENGINE_HARNESS_H

#include "engine/loop.h"
#include "tests/engine/tiny_model.h"

#include <limits.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

enum { HARNESS_VOCAB = 101 };

/* The group's model: a test of other weights makes its own in a setup of its own. */
static char *harness_dir;

static inline int harness_setup(void **state)
{
    (void)state;
    harness_dir = tiny_model(HARNESS_VOCAB, -1);
    return 0;
}

static inline int harness_teardown(void **state)
{
    (void)state;
    tiny_model_remove(harness_dir);
    return 0;
}

/* The device that TEST_DEVICE names; else the reference backend. */
static inline const char *harness_device_name(void)
{
    const char *const name = getenv("TEST_DEVICE");
    return name != NULL && name[0] != '\0' ? name : "ref";
}

static inline struct engine_options harness_options(const char *dir)
{
    return (struct engine_options){
        .model_dir = dir,
        .backend = {.device = harness_device_name(), .n_thread = 2},
        .model = {.dtype = "f32"},
        .max_seqs = 32,
        .max_batch_tokens = 64,
        .max_queue = 64,
        .max_queue_tokens = 100000,
        .max_logprobs = 5,
        .memory_trace = true,
        .memory_trace_bytes = 64 << 20,
        .prefix_cache = true,
    };
}

static inline struct engine *harness_open(const struct engine_options *options)
{
    struct engine *engine = NULL;
    struct err err = {0};
    if (engine_open(&engine, options, &err) != ERR_OK) {
        fail_msg("engine_open: %s", err.message);
    }
    return engine;
}

/* ---- requests ---- */

/* Counts wakes; waiting is by wake, as a front end would. */
struct waiter {
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    int n_wake;
};

static inline void waiter_begin(struct waiter *waiter)
{
    CHECK(pthread_mutex_init(&waiter->mutex, NULL) == 0);
    CHECK(pthread_cond_init(&waiter->changed, NULL) == 0);
    waiter->n_wake = 0;
}

static inline void waiter_wake(void *ctx)
{
    struct waiter *const waiter = ctx;
    CHECK(pthread_mutex_lock(&waiter->mutex) == 0);
    waiter->n_wake++;
    CHECK(pthread_cond_signal(&waiter->changed) == 0);
    CHECK(pthread_mutex_unlock(&waiter->mutex) == 0);
}

/* Waits until all items of request are over. */
static inline void waiter_wait(struct waiter *waiter, const struct request *request)
{
    CHECK(pthread_mutex_lock(&waiter->mutex) == 0);
    while (atomic_load(&request->n_item_done) < request->n_item) {
        CHECK(pthread_cond_wait(&waiter->changed, &waiter->mutex) == 0);
    }
    CHECK(pthread_mutex_unlock(&waiter->mutex) == 0);
}

static inline int32_t *harness_ids(int salt, int n)
{
    int32_t *const ids = malloc((size_t)n * sizeof *ids);
    CHECK(ids != NULL);
    ids[0] = 1;
    for (int i = 1; i < n; i++) { /* no control token */
        ids[i] = 8 + (int32_t)((uint32_t)(i * 31 + salt * 977 + i * i * salt) % 90u);
    }
    return ids;
}

/* A generation with neutral sampling: greedy, never ended by eos. */
static inline struct request *harness_generation(int n_item, int max_tokens)
{
    struct request *const request = request_new(REQUEST_GENERATE, n_item);
    CHECK(request != NULL);
    (void)snprintf(request->id, sizeof request->id, "test");
    request->sampling = (struct sampling){.temperature = 0,
                                          .top_p = 1,
                                          .repetition = 1,
                                          .max_tokens = max_tokens,
                                          .ignore_eos = true};
    request->n_top = 0;
    return request;
}

static inline struct request *harness_score(int n_item, int64_t window, int64_t stride)
{
    struct request *const request = request_new(REQUEST_SCORE, n_item);
    CHECK(request != NULL);
    (void)snprintf(request->id, sizeof request->id, "test");
    request->n_top = 0;
    request->window = window;
    request->stride = stride;
    return request;
}

/* Sets item i to n ids made from salt. */
static inline void harness_item(const struct engine *engine, struct request *request, int i,
                                int salt, int n)
{
    struct err err = {0};
    if (request_set_item(request, i, harness_ids(salt, n), n, engine_model(engine), &err) !=
        ERR_OK) {
        fail_msg("request_set_item: %s", err.message);
    }
}

static inline void harness_submit(struct engine *engine, struct request *request,
                                  struct waiter *waiter)
{
    struct err err = {0};
    if (waiter != NULL) {
        request->wake = waiter_wake;
        request->wake_ctx = waiter;
    }
    if (engine_submit(engine, request, &err) != ERR_OK) {
        fail_msg("engine_submit: %s", err.message);
    }
}

/* Submits and waits for the end. The waiter outlives every request, as wake_ctx must. */
static inline void harness_run(struct engine *engine, struct request *request)
{
    static struct waiter waiter = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, 0};
    harness_submit(engine, request, &waiter);
    waiter_wait(&waiter, request);
}

/* ---- a device that computes by itself: nothing of a step is to be read before its end ---- */

/* A step of the device. */
struct device_step {
    struct step kept; /* its arrays while it is computed; the engine has none meanwhile */
    bool computing;
    char *fetched;  /* Owner: limits.n_fetch_bytes, written when the step ends */
    char *computed; /* Owner: the same, by the device */
    size_t n_fetched;
};

struct device {
    struct backend_ops op; /* the backend's, with some replaced */
    const struct backend_ops *original;
    const struct engine *engine;
    bool is_real;               /* the backend is one already, and only what it gives is watched */
    struct device_step step[2]; /* as engine.batch */
    const struct device_step *last; /* that began last */
    int n_ahead, n_beside; /* steps that began while another was computed: feeding on it, or not */
    void (*submitted)(void *ctx); /* called by submit. May be NULL */
    void *ctx;
};

/* One device at a time, like gates. */
static struct device harness_device;

static inline struct device_step *device_step_of(const struct step *step)
{
    return &harness_device.step[step == harness_device.engine->batch[1].step];
}

static inline void device_submit(struct backend *be, struct step *step)
{
    struct device *const device = &harness_device;
    struct device_step *const own = device_step_of(step);
    CHECK(!own->computing);
    device->original->submit(be, step);
    own->kept = *step;
    own->computing = true;
    device->last = own;
    *step = (struct step){.limits = step->limits,
                          .n_tok = step->n_tok,
                          .n_seq = step->n_seq,
                          .n_out = step->n_out,
                          .is_drawn = step->is_drawn};
    if (device->submitted != NULL) {
        device->submitted(device->ctx);
    }
}

static inline enum err_code device_finish(struct backend *be, struct step *step, struct err *err)
{
    struct device_step *const own = device_step_of(step);
    if (!own->computing) {
        device_submit(be, step);
    }
    CHECK(own == harness_device.last || harness_device.last->computing); /* in their order */
    *step = own->kept;
    own->computing = false;
    memcpy(own->fetched, own->computed, own->n_fetched);
    return harness_device.original->finish(be, step, err);
}

static inline void device_step_begin(struct backend *be, struct step *step)
{
    struct device_step *const own = device_step_of(step);
    const size_t bytes = (size_t)step->limits.n_fetch_bytes;
    if (own->fetched == NULL) {
        own->fetched = malloc(bytes + 1);
        own->computed = malloc(bytes + 1);
        CHECK(own->fetched != NULL && own->computed != NULL);
    }
    memset(own->fetched, 0xFD, bytes);
    own->n_fetched = 0;
    for (int r = 0; r < step->n_tok; r++) {
        if (step->token[r] < 0 && !harness_device.is_real) {
            const struct step *const before = &harness_device.last->kept;
            CHECK(harness_device.last->computing && step->n_before == before->n_out);
            step->token[r] = before->out_token[-1 - step->token[r]];
        }
    }
    const bool is_beside = harness_device.last != NULL && harness_device.last->computing;
    harness_device.n_ahead += step->n_before > 0;
    harness_device.n_beside += is_beside && step->n_before == 0;
    step->n_before = harness_device.is_real ? step->n_before : 0; /* known to the device alone */
    harness_device.original->step_begin(be, step);
}

static inline const void *device_fetch(struct backend *be, struct step *step, struct tensor src)
{
    struct device_step *const own = device_step_of(step);
    const size_t bytes = (size_t)src.rows * (size_t)src.cols * dtype_bytes(src.dtype);
    if (harness_device.is_real) {
        return harness_device.original->fetch(be, step, src);
    }
    CHECK(own->computing && own->n_fetched + bytes <= (size_t)step->limits.n_fetch_bytes);
    const size_t at = own->n_fetched;
    memcpy(own->computed + at, harness_device.original->fetch(be, step, src), bytes);
    own->n_fetched += bytes;
    return own->fetched + at;
}

/* Each would be a wait of its own: a step's results come with it. */
static inline void device_download(struct backend *be, void *host, struct tensor src)
{
    (void)be;
    (void)host;
    (void)src;
    CHECK(0);
}

/* The engine must be idle: the submit that follows publishes the change. */
static inline void device_begin(struct engine *engine)
{
    for (int i = 0; i < 2; i++) {
        free(harness_device.step[i].fetched);
        free(harness_device.step[i].computed);
    }
    harness_device = (struct device){.op = *engine->be->op,
                                     .original = engine->be->op,
                                     .engine = engine,
                                     .is_real = !engine->be->is_host};
    harness_device.op.submit = device_submit;
    harness_device.op.finish = device_finish;
    harness_device.op.download = device_download;
    harness_device.op.step_begin = device_step_begin;
    harness_device.op.fetch = device_fetch;
    engine->be->op = &harness_device.op;
    engine->be->is_async = true;
    engine->be->runs_ahead = false;
    engine->be->is_host = false; /* it brings what is asked for */
}

/* The same of a device that runs ahead and computes drawn tokens apart. */
static inline void device_begin_ahead(struct engine *engine)
{
    struct batch *const twin = &engine->batch[1];
    device_begin(engine);
    if (twin->step == NULL) {
        struct err err;
        const int max_seqs = engine->options.max_seqs;
        CHECK(engine->be->op->step_new(engine->be, &twin->step, &engine->batch[0].step->limits,
                                       &err) == ERR_OK &&
              lookups_open(&twin->lookups, max_seqs, &err) == ERR_OK);
        twin->rows = calloc((size_t)max_seqs, sizeof *twin->rows);
        CHECK(twin->rows != NULL);
    }
    engine->be->phases_apart = true;
    engine->be->runs_ahead = true;
}

/* ---- a device that computes drawn tokens apart: no step has rows of both kinds ---- */

struct apart {
    struct backend_ops op;
    const struct backend_ops *original;
    const struct engine *engine;
    atomic_int n_step[2]; /* by step.is_drawn */
};

static struct apart harness_apart;

static inline void apart_begin_step(struct backend *be, struct step *step)
{
    const struct batch *batch = harness_apart.engine->batch;
    batch += step == batch[1].step;
    for (int i = 0; i < batch->n_seq && step->n_before == 0; i++) {
        CHECK(sequence_decodes(batch->rows[i].seq) == step->is_drawn);
    }
    (void)atomic_fetch_add(&harness_apart.n_step[step->is_drawn], 1);
    harness_apart.original->step_begin(be, step);
}

/* The engine must be idle. */
static inline void apart_begin(struct engine *engine)
{
    harness_apart =
        (struct apart){.op = *engine->be->op, .original = engine->be->op, .engine = engine};
    harness_apart.op.step_begin = apart_begin_step;
    engine->be->op = &harness_apart.op;
    engine->be->phases_apart = true;
}

/* What a test's state says: "async" is a device that computes by itself, "ahead" one that also
 * begins a step before the last one is finished, "apart" one that computes drawn tokens apart, NULL
 * the plain one. */
static inline struct engine *harness_open_as(void **state, const struct engine_options *options)
{
    struct engine *const engine = harness_open(options);
    if (*state != NULL && strcmp(*state, "apart") == 0) {
        apart_begin(engine);
    } else if (*state != NULL && strcmp(*state, "ahead") == 0) {
        device_begin_ahead(engine);
    } else if (*state != NULL) {
        device_begin(engine);
    }
    return engine;
}

/* Rows of the table of tests: on the plain device and on one that computes by itself; and on one
 * that runs ahead, too. */
#define HARNESS_TEST(test, state)                                                                  \
    {                                                                                              \
#test ", " state, test, NULL, NULL, (void *)(state)                                        \
    }
#define HARNESS_APART(test) HARNESS_TEST(test, "apart")
#define HARNESS_BOTH(test) cmocka_unit_test(test), HARNESS_TEST(test, "async")
#define HARNESS_EACH(test) HARNESS_BOTH(test), HARNESS_TEST(test, "ahead")

/* TEST_FEW: sanitizers have test_engine_ahead.c. */
__attribute__((constructor)) static void harness_few(void)
{
    if (getenv("TEST_FEW") != NULL) {
        cmocka_set_skip_filter("*, ahead");
    }
}

/* ---- the gate: a backend whose steps end when the test says so ---- */

struct gate {
    struct backend_ops op; /* the backend's, with finish replaced */
    const struct backend_ops *original;
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    int n_allowed;              /* steps that may still end; < 0: all */
    int n_arrived;              /* steps that wanted to end since gate_begin */
    bool fail;                  /* the next finish fails */
    int last_n_tok, last_n_seq; /* of the step that arrived last */
};

/* One gate at a time: the op table has no room for a context. */
static struct gate *harness_gate;

static inline enum err_code gate_finish(struct backend *be, struct step *step, struct err *err)
{
    struct gate *const gate = harness_gate;
    CHECK(pthread_mutex_lock(&gate->mutex) == 0);
    gate->n_arrived++;
    gate->last_n_tok = step->n_tok;
    gate->last_n_seq = step->n_seq;
    CHECK(pthread_cond_broadcast(&gate->changed) == 0);
    while (gate->n_allowed == 0) {
        CHECK(pthread_cond_wait(&gate->changed, &gate->mutex) == 0);
    }
    gate->n_allowed -= gate->n_allowed > 0;
    const bool failing = gate->fail;
    CHECK(pthread_mutex_unlock(&gate->mutex) == 0);
    const enum err_code code = gate->original->finish(be, step, err);
    return failing ? err_set(err, ERR_DEVICE, "the test made the device fail") : code;
}

/* Closed from the start. The engine must be idle: the submit that follows publishes the change. */
static inline void gate_begin(struct gate *gate, struct engine *engine)
{
    *gate = (struct gate){.op = *engine->be->op, .original = engine->be->op};
    gate->op.finish = gate_finish;
    CHECK(pthread_mutex_init(&gate->mutex, NULL) == 0);
    CHECK(pthread_cond_init(&gate->changed, NULL) == 0);
    harness_gate = gate;
    engine->be->op = &gate->op;
}

/* As the test's state says, with the gate closed and a waiter for its requests. */
static inline struct engine *harness_open_gated(void **state, const struct engine_options *options,
                                                struct gate *gate, struct waiter *waiter)
{
    struct engine *const engine = harness_open_as(state, options);
    gate_begin(gate, engine);
    waiter_begin(waiter);
    return engine;
}

/* Lets n more steps end; n < 0: all from now on. */
static inline void gate_allow(struct gate *gate, int n)
{
    CHECK(pthread_mutex_lock(&gate->mutex) == 0);
    gate->n_allowed = n < 0 ? -1 : gate->n_allowed + n;
    CHECK(pthread_cond_broadcast(&gate->changed) == 0);
    CHECK(pthread_mutex_unlock(&gate->mutex) == 0);
}

/* Waits until n steps have arrived in all. */
static inline void gate_await(struct gate *gate, int n)
{
    CHECK(pthread_mutex_lock(&gate->mutex) == 0);
    while (gate->n_arrived < n) {
        CHECK(pthread_cond_wait(&gate->changed, &gate->mutex) == 0);
    }
    CHECK(pthread_mutex_unlock(&gate->mutex) == 0);
}

/* A thread, arg the engine: opens the gate once the engine is asked to end. */
static inline void *gate_open_when_draining(void *arg)
{
    struct engine *const engine = arg;
    while (atomic_load(&engine->drain_us) == 0) {
        (void)usleep(200);
    }
    gate_allow(harness_gate, -1);
    return NULL;
}

#endif
