/* The reference backend: opening, the op table and the measured rates. See ref.h. */
#include "kernels/ref/ref.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static double now_s(void)
{
    struct timespec t;
    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Well beyond the caches of a server core's share. */
enum { READ_BYTES = 64 << 20 };

static double measure_read(void)
{
    const size_t n = READ_BYTES / sizeof(uint64_t);
    uint64_t *const data = malloc(READ_BYTES);
    if (data == NULL) {
        return 0;
    }
    memset(data, 1, READ_BYTES);
    const double start = now_s();
    double seconds = 0;
    double bytes = 0;
    volatile uint64_t sink = 0; /* keeps the loop */
    while (seconds < 0.25) {
        uint64_t sum = 0;
        for (size_t i = 0; i < n; i++) {
            sum += data[i];
        }
        sink = sink + sum;
        bytes += READ_BYTES;
        seconds = now_s() - start;
    }
    free(data);
    return bytes / seconds;
}

/* The multiply-add of ref_linear: one chain, plain C. */
static double measure_flops(void)
{
    float x[1024];
    for (int i = 0; i < 1024; i++) {
        x[i] = 1.0f / (float)(i + 1);
    }
    const double start = now_s();
    double seconds = 0;
    double flops = 0;
    volatile float sink = 0;
    while (seconds < 0.25) {
        float sum = sink;
        for (int k = 0; k < 1 << 16; k++) {
            sum += x[k % 1024] * x[(k + 1) % 1024];
        }
        sink = sum * 1e-3f;
        flops += 2.0 * (1 << 16);
        seconds = now_s() - start;
    }
    return flops / seconds;
}

static void ref_measure(struct backend *be, struct machine_rate *rate)
{
    (void)be;
    rate->read_bytes_per_s = measure_read();
    rate->flops_f32_per_s = measure_flops();
    rate->flops_bf16_per_s = 0;
}

static void ref_close(struct backend *be)
{
    free(be);
}

#define REF_SLOT(op) .op = ref_##op,

static const struct backend_ops ref_ops = {.close = ref_close,
                                           .buffer_new = ref_buffer_new,
                                           .buffer_free = ref_buffer_free,
                                           .weight_new = ref_weight_new,
                                           .weight_free = ref_weight_free,
                                           .weight_bytes = ref_weight_bytes,
                                           .step_new = ref_step_new,
                                           .step_free = ref_step_free,
                                           .upload = ref_upload,
                                           .download = ref_download,
                                           .memory_available = ref_memory_available,
                                           .step_begin = ref_step_begin,
                                           .submit = ref_submit,
                                           .finish = ref_finish,
                                           .measure = ref_measure,
                                           OP_LIST(REF_SLOT)};

enum err_code ref_open(struct backend **be, struct err *err)
{
    *be = calloc(1, sizeof **be);
    if (*be == NULL) {
        return err_set(err, ERR_MEMORY, "no memory left to open the reference backend");
    }
    (*be)->op = &ref_ops;
    (*be)->n_thread = 1;
    (*be)->is_host = true;
    (*be)->has_int8 = true;
    (void)snprintf((*be)->name, sizeof(*be)->name, "ref");
    (void)snprintf((*be)->description, sizeof(*be)->description,
                   "plain C, one thread: the specification, for tests");
    return ERR_OK;
}
