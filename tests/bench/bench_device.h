/* The inside of bench_device: one backend, one shape of model, and how runs are timed and printed.
 */
#ifndef TESTS_BENCH_BENCH_DEVICE_H
#define TESTS_BENCH_BENCH_DEVICE_H

#include "tests/bench/random_model.h"

struct bench {
    struct backend *be; /* Owner: main */
    struct plan_shape shape;
    enum placement values; /* of the value table */
    bool deterministic;
    double seconds;  /* that a measurement takes */
    float top_p;     /* of steps: 1 draws greedily, less at temperature 1 */
    bool runs_ahead; /* decode steps: --ahead */
    bool cpu_clock;  /* samples are processor time, not wall time */
    /* Ops sweep over at least so many bytes of weights: more than a cache holds. */
    int64_t cold_bytes;
};

/* Row counts of one part of the benchmark: "decode:1,8,32". */
enum { BENCH_ROWS_MAX = 16 };
struct bench_rows {
    int n;
    int row[BENCH_ROWS_MAX];
};

/* Time of a run that ends with the backend's finish. */
struct timing {
    double us, us_min, us_p90; /* median, fastest, slowest but a tenth */
    int n;
};

struct timing bench_time(const struct bench *b, void (*run)(void *ctx), void *ctx);
/* One JSON line. bytes and flops: what the run must move and compute at least. */
void bench_print(const struct bench *b, const char *part, const char *op, int rows,
                 const struct timing *timing, double bytes, double flops);
/* One JSON line: how evenly reads spread over the slots, since their cost depends on that. The
 * distinct ones of these slots (on the device), and how many as many even draws would be expected
 * to give. */
void bench_print_spread(const struct bench *b, struct tensor slots);
/* One line on standard error, exit status 1. */
_Noreturn void bench_die(const char *format, ...) __attribute__((format(printf, 1, 2)));

int bench_rows_max(const struct bench_rows *rows);
/* A buffer of the backend; n(0, 1)-like numbers in it if it is F32. Never freed: the process ends.
 */
struct tensor bench_buffer(const struct bench *b, int64_t rows, int64_t cols, enum dtype dtype);
/* A step of n_seq sequences with n_row rows each, of which the last has position last_pos; every
 * row is an output that wants a greedy token. Sequences have pages of their own. Owner: the caller.
 */
struct step *bench_step(const struct bench *b, int n_seq, int n_row, int last_pos, int n_vocab);
void bench_finish(const struct bench *b, struct step *step);

/* ---- single ops: device_ops.c --------------------------------------------------------------- */

/* A list of ops is run again and again as one step, so that a GPU replays it as a graph. */
enum { SWEEP_MAX = 64 };

/* One op, or a few in a row, on one of n_copy sets of weights that lie in different places: a list
 * runs through all of them, since a model's step never finds its weights in a cache. */
struct sweep {
    const struct bench *b;
    void (*run)(const struct sweep *sweep, int copy);
    void *ctx;
    struct step *step; /* Borrowed: the list's carrier; what the op reads of a step */
    int n_copy, rows;
};

/* As many copies of bytes as make cold_bytes, at least one and at most SWEEP_MAX. */
int sweep_copies(const struct bench *b, double bytes);
/* So many rows are drawn tokens; more came in a request, which a backend may compute otherwise. */
enum { SWEEP_DRAWN_MAX = 32 };
void sweep_rows(struct sweep *sweep, int rows);
/* Time of one op. */
struct timing sweep_time(const struct sweep *sweep);

struct weight *bench_weight(const struct bench *b, const struct random_pool *pool, int i,
                            int64_t rows, int64_t cols, const struct weight_desc *desc);

/* The parts: device_ops.c, device_memory.c. */
void bench_single_ops(const struct bench *b, const struct bench_rows *rows);
void bench_memory(const struct bench *b, const struct bench_rows *rows);

#endif
