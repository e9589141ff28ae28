/* Which op the device works on, for profilers, and how long each takes, for who has none.
 *
 * Ranges: under a tool that listens to NVTX (it sets NVTX_INJECTION64_PATH), the launches of an op
 * lie in a range named "linear rows=32 cols=3072 of 1024 bf16". Without one nothing is done.
 *
 * Times: PKMSERVE_CUDA_TRACE=FILE records an event before and after each op and, when the backend
 * is closed, appends a JSON line for each op of each shape to FILE:
 *
 *   {"part":"trace","op":"linear","rows":1,"cols":3072,"inner":1024,"dtype":"bf16","n":240,
 *    "us":3.1,"us_min":2.9}
 *
 * us is the mean of n runs. "nothing" is what two events take with no op between them, and part of
 * every time. Steps run op by op then: events in a captured graph would not be these, and kernels
 * that an event stands between do not overlap. So that what is measured is the device and not the
 * host that launches, a kernel before the first op waits until all of the step has been launched,
 * some 20 ms at most. */
#include "kernels/cuda/backend.cuh"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#if __has_include(<nvtx3/nvToolsExt.h>)
#include <nvtx3/nvToolsExt.h>
#else
static void nvtxRangePushA(const char *)
{
}
static void nvtxRangePop(void)
{
}
#endif

enum {
    OP_MAX = 4096,      /* of one step; a model of 48 layers has some 500 */
    SHAPE_MAX = 1024,   /* a power of two */
    GATE_ROUNDS = 10000 /* of half a microsecond and a read across the bus */
};

/* An op of one shape, and what its runs took. */
struct traced_shape {
    const char *op; /* NULL: empty */
    enum dtype dtype;
    int64_t rows, cols, inner; /* inner 0: no weight */
    int64_t n;
    double us, us_min; /* us: of all runs together */
};

struct cuda_trace {
    int file;
    uint32_t *gate;    /* Owner: pinned; 0 holds the device */
    int n_op, n_event; /* of this step; events beyond n_op exist already */
    bool is_begun;     /* op n_op has its first event */
    cudaEvent_t event[2 * OP_MAX];
    int shape_of[OP_MAX];
    struct traced_shape shape[SHAPE_MAX];
    int n_shape;
};

namespace
{

/* Holds what comes after it until the host has launched it, or GATE_ROUNDS are over. */
__global__ void gate_kernel(const uint32_t *gate)
{
    grid_wait();
    for (int i = 0; i < GATE_ROUNDS && *const_cast<const volatile uint32_t *>(gate) == 0; i++) {
        device_pause();
    }
}

/* Where a shape's times are kept; -1 when the table is full. */
int find_shape(struct cuda_trace *trace, const struct traced_shape *s)
{
    uint64_t at = reinterpret_cast<uintptr_t>(s->op) * 31 + static_cast<uint64_t>(s->dtype);
    at = ((at * 0x9e3779b97f4a7c15u + static_cast<uint64_t>(s->rows)) * 0xbf58476d1ce4e5b9u +
          static_cast<uint64_t>(s->cols)) *
             0x94d049bb133111ebu +
         static_cast<uint64_t>(s->inner);
    for (at ^= at >> 32;; at++) {
        struct traced_shape *const shape = &trace->shape[at % SHAPE_MAX];
        if (shape->op == NULL && trace->n_shape < SHAPE_MAX / 2) {
            *shape = *s;
            trace->n_shape++;
        } else if (shape->op == NULL) {
            return -1;
        }
        if (shape->op == s->op && shape->dtype == s->dtype && shape->rows == s->rows &&
            shape->cols == s->cols && shape->inner == s->inner) {
            return static_cast<int>(at % SHAPE_MAX);
        }
    }
}

bool event_record(struct cuda *cu, int i)
{
    struct cuda_trace *const trace = cu->trace;
    if (i == trace->n_event) {
        if (!cuda_ok(cu, cudaEventCreateWithFlags(&trace->event[i], cudaEventDefault), "trace")) {
            return false;
        }
        trace->n_event++;
    }
    return cuda_ok(cu, cudaEventRecord(trace->event[i], cu->stream), "trace");
}

void write_shape(int file, const struct traced_shape *s)
{
    (void)dprintf(file,
                  "{\"part\":\"trace\",\"op\":\"%s\",\"rows\":%lld,\"cols\":%lld,\"inner\":%lld,"
                  "\"dtype\":\"%s\",\"n\":%lld,\"us\":%.3f,\"us_min\":%.3f}\n",
                  s->op, static_cast<long long>(s->rows), static_cast<long long>(s->cols),
                  static_cast<long long>(s->inner), dtype_name(s->dtype),
                  static_cast<long long>(s->n), s->us / static_cast<double>(s->n), s->us_min);
}

void begin_timed(struct cuda *cu, const struct traced_shape *s)
{
    struct cuda_trace *const trace = cu->trace;
    if (trace->n_op < OP_MAX && !trace->is_begun && cu->failure.code == ERR_OK) {
        trace->shape_of[trace->n_op] = find_shape(trace, s);
        trace->is_begun = event_record(cu, 2 * trace->n_op);
    }
}

void end_timed(struct cuda *cu)
{
    struct cuda_trace *const trace = cu->trace;
    if (trace->is_begun) {
        trace->is_begun = false;
        trace->n_op += event_record(cu, 2 * trace->n_op + 1);
    }
}

} // namespace

enum err_code trace_open(struct cuda *cu, struct err *err)
{
    const char *const path = getenv("PKMSERVE_CUDA_TRACE");
    cu->names_ops = getenv("NVTX_INJECTION64_PATH") != NULL;
    if (path == NULL || path[0] == '\0') {
        return ERR_OK;
    }
    struct cuda_trace *const trace = static_cast<struct cuda_trace *>(calloc(1, sizeof *cu->trace));
    if (trace == NULL) {
        return err_set(err, ERR_MEMORY, "cuda: no host memory left for times of ops");
    }
    cu->trace = trace;
    trace->file = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    if (trace->file < 0) {
        return err_set(err, ERR_ARGUMENT, "cuda: PKMSERVE_CUDA_TRACE=%.200s cannot be written",
                       path);
    }
    void *gate = NULL;
    const enum err_code code = resource_pinned_new(cu, &gate, sizeof *trace->gate, "trace", err);
    trace->gate = static_cast<uint32_t *>(gate);
    return code;
}

void trace_close(struct cuda *cu)
{
    struct cuda_trace *const trace = cu->trace;
    if (trace == NULL) {
        return;
    }
    for (int i = 0; i < SHAPE_MAX; i++) {
        if (trace->shape[i].n > 0) {
            write_shape(trace->file, &trace->shape[i]);
        }
    }
    for (int i = 0; i < trace->n_event; i++) {
        (void)cudaEventDestroy(trace->event[i]);
    }
    (void)cudaFreeHost(trace->gate);
    (void)close(trace->file);
    free(trace);
    cu->trace = NULL;
}

void trace_begin(struct cuda *cu, const char *op, struct tensor y, const struct weight *w)
{
    const struct traced_shape s = {
        op, w == NULL ? DTYPE_F32 : w->dtype, y.rows, y.cols, w == NULL ? 0 : w->cols, 0, 0, 0};
    if (cu->names_ops) {
        char name[128];
        int n = snprintf(name, sizeof name, "%s rows=%lld cols=%lld", op,
                         static_cast<long long>(s.rows), static_cast<long long>(s.cols));
        if (w != NULL) {
            n += snprintf(name + n, sizeof name - static_cast<size_t>(n), " of %lld %s",
                          static_cast<long long>(s.inner), dtype_name(s.dtype));
        }
        nvtxRangePushA(name);
    }
    if (cu->trace != NULL) {
        begin_timed(cu, &s);
    }
}

void trace_end(struct cuda *cu)
{
    if (cu->trace != NULL) {
        end_timed(cu);
    }
    if (cu->names_ops) {
        nvtxRangePop();
    }
}

void trace_list_begin(struct cuda *cu)
{
    if (cu->trace != NULL && cu->trace->n_op == 0 && cu->failure.code == ERR_OK) {
        *const_cast<volatile uint32_t *>(cu->trace->gate) = 0;
        LAUNCH(gate_kernel, 1, 1, 0, cuda_queue(cu), cu->trace->gate);
        cuda_check(cu, "trace");
        trace_begin(cu, "nothing", {}, NULL);
        trace_end(cu);
    }
}

void trace_list_end(struct cuda *cu)
{
    if (cu->trace != NULL) {
        *const_cast<volatile uint32_t *>(cu->trace->gate) = 1;
    }
}

void trace_collect(struct cuda *cu)
{
    struct cuda_trace *const trace = cu->trace;
    if (trace == NULL) {
        return;
    }
    for (int i = 0; i < trace->n_op && cu->failure.code == ERR_OK; i++) {
        float ms = 0;
        if (trace->shape_of[i] >= 0 &&
            cuda_ok(cu, cudaEventElapsedTime(&ms, trace->event[2 * i], trace->event[2 * i + 1]),
                    "trace")) {
            struct traced_shape *const shape = &trace->shape[trace->shape_of[i]];
            const double us = static_cast<double>(ms) * 1e3;
            shape->us_min = shape->n == 0 || us < shape->us_min ? us : shape->us_min;
            shape->us += us;
            shape->n++;
        }
    }
    trace->n_op = 0;
    trace->is_begun = false;
}
