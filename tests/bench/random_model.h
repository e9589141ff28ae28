/* A model of any shape with random weights that exist in memory alone, on any backend: what is
 * measured is the family's own binding and forward (models/pkm_transformer.c), without writing and
 * reading gigabytes of files.
 *
 * random_model.c takes the place of models/tensors.c and models/open.c: programs link one or the
 * other. All matrices are views of one small pool of random numbers that is mapped as often as the
 * largest needs it, so a table of 8 GB costs neither time nor memory on the host. */
#ifndef TESTS_BENCH_RANDOM_MODEL_H
#define TESTS_BENCH_RANDOM_MODEL_H

#include "models/model.h"
#include "tests/bench/model_plan.h"

/* Owner of *model: the caller, by model_close. be must outlive it. On failure *model is NULL. */
enum err_code random_model_open(struct model **model, struct backend *be,
                                const struct plan_shape *shape, enum placement values,
                                struct err *err);

/* A view of pool numbers, uniform in ±0.05 (about what a trained matrix of width 1024 has), for
 * weights that stand alone. Owner of what random_pool_open makes: the caller. */
struct random_pool;
enum err_code random_pool_open(struct random_pool **pool, enum dtype dtype, int64_t n_elem_max,
                               struct err *err);
void random_pool_close(struct random_pool *pool); /* NULL is fine */
/* Different numbers for different i. */
struct tensor random_pool_view(const struct random_pool *pool, int i, int64_t rows, int64_t cols);

#endif
