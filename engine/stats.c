/* Histograms and their bounds: see stats.h. */
#include "engine/stats.h"

#include "kernels/err.h"

#include <stddef.h>

const double stats_bounds_ttft[] = {.00025, .0005, .001, .002, .005, .01, .02, .04, .06,
                                    .08,    .1,    .25,  .5,   .75,  1,   2.5, 5,   7.5,
                                    10,     20,    40,   80,   160,  640, 2560};
const double stats_bounds_itl[] = {.00025, .0005, .001, .0025, .005, .01, .025, .05,
                                   .075,   .1,    .15,  .2,    .3,   .4,  .5,   .75,
                                   1,      2.5,   5,    7.5,   10,   20,  40,   80};
const double stats_bounds_e2e[] = {.001, .0025, .005, .01, .025, .05, .1,  .2,   .3,  .5,
                                   .8,   1,     1.5,  2,   2.5,  5,   10,  15,   20,  30,
                                   40,   50,    60,   120, 240,  480, 960, 1920, 7680};
const double stats_bounds_tokens[] = {1,    2,    5,    10,    20,    50,    100,    200,   500,
                                      1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000};
const double stats_bounds_step_tokens[] = {1,   8,    16,   32,   64,   128,  256,
                                           512, 1024, 2048, 4096, 8192, 16384};
const double stats_bounds_pow2[] = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024};

#define N_BOUND(array) ((int)(sizeof(array) / sizeof(array)[0]))
const int stats_n_ttft = N_BOUND(stats_bounds_ttft);
const int stats_n_itl = N_BOUND(stats_bounds_itl);
const int stats_n_e2e = N_BOUND(stats_bounds_e2e);
const int stats_n_tokens = N_BOUND(stats_bounds_tokens);
const int stats_n_step_tokens = N_BOUND(stats_bounds_step_tokens);
const int stats_n_pow2 = N_BOUND(stats_bounds_pow2);

void histogram_begin(struct histogram *h, const double *bound, int n_bound)
{
    CHECK(n_bound > 0 && n_bound <= HISTOGRAM_BUCKET_MAX);
    *h = (struct histogram){.bound = bound, .n_bound = n_bound};
}

void histogram_add(struct histogram *h, double value)
{
    if (!(value >= 0)) { /* a clock that jumped must not spoil the sum */
        return;
    }
    int i = 0;
    while (i < h->n_bound && value > h->bound[i]) {
        i++;
    }
    (void)atomic_fetch_add_explicit(&h->bucket[i], 1, memory_order_relaxed);
    double sum = atomic_load_explicit(&h->sum, memory_order_relaxed);
    while (!atomic_compare_exchange_weak_explicit(&h->sum, &sum, sum + value, memory_order_relaxed,
                                                  memory_order_relaxed)) {
    }
    (void)atomic_fetch_add_explicit(&h->count, 1, memory_order_relaxed);
}

void engine_stats_begin(struct engine_stats *s, int context)
{
    int n_tokens = stats_n_tokens;
    while (n_tokens > 1 && stats_bounds_tokens[n_tokens - 1] > context) {
        n_tokens--;
    }
    histogram_begin(&s->ttft, stats_bounds_ttft, stats_n_ttft);
    histogram_begin(&s->itl, stats_bounds_itl, stats_n_itl);
    histogram_begin(&s->tpot, stats_bounds_itl, stats_n_itl);
    histogram_begin(&s->step_time, stats_bounds_itl, stats_n_itl);
    struct histogram *const times[] = {&s->e2e,          &s->queue_time,  &s->inference_time,
                                       &s->prefill_time, &s->decode_time, &s->score_time};
    for (size_t i = 0; i < sizeof times / sizeof times[0]; i++) {
        histogram_begin(times[i], stats_bounds_e2e, stats_n_e2e);
    }
    histogram_begin(&s->prompt_len, stats_bounds_tokens, n_tokens);
    histogram_begin(&s->generation_len, stats_bounds_tokens, n_tokens);
    histogram_begin(&s->max_tokens, stats_bounds_tokens, n_tokens);
    histogram_begin(&s->step_tokens, stats_bounds_step_tokens, stats_n_step_tokens);
    histogram_begin(&s->step_requests, stats_bounds_pow2, stats_n_pow2);
}
