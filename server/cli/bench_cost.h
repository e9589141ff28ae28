/* What a step must read and compute at least, counted from the model's shape: the yardstick of
 * `pkmserve bench`. Biases and norms are left out; they are below a thousandth. */
#ifndef SERVER_BENCH_COST_H
#define SERVER_BENCH_COST_H

#include "models/model.h"

struct bench_shape {
    int n_tok; /* rows of the step */
    int n_out; /* rows whose next-token distribution is wanted */
    int n_seq;
    double mean_pos;   /* positions that a row attends to, on average */
    bool values_apart; /* value rows are read from another memory than everything else, and are not
                        * in its bytes */
};

struct bench_cost {
    double bytes; /* each weight once; each row's memory values, unless values_apart; each
                   * sequence's cache once */
    double flops; /* two per multiply-add */
};

struct bench_cost bench_cost_of(const struct model_info *info, const struct bench_shape *shape);

#endif
