/* What the binding tables and forwards of families, memories and the output share: linear layers
 * and norms as they are loaded, and showing results to a tap. */
#ifndef MODELS_LAYERS_H
#define MODELS_LAYERS_H

#include "models/model.h"

/* A linear layer, and a norm. Borrowed from the store. */
struct linear {
    const struct weight *weight; /* [n_out, n_in]; NULL = there is no such layer */
    struct tensor bias;          /* [1, n_out]; data NULL = none */
};

struct norm {
    struct tensor gamma, beta; /* [1, d] */
};

static const struct tensor NO_TENSOR = {.data = NULL};

/* y = act(x's linear layer) */
static inline void linear_run(struct backend *be, struct tensor y, struct tensor x,
                              const struct linear *linear, enum act act)
{
    op_linear(be, y, x, linear->weight, linear->bias, act);
}

/* The two linear layers of a feed-forward network, as the op takes them. */
static inline struct ffn linear_ffn(const struct linear *up, const struct linear *down,
                                    enum act act)
{
    return (struct ffn){.up = up->weight,
                        .down = down->weight,
                        .up_bias = up->bias,
                        .down_bias = down->bias,
                        .act = act};
}

/* Shows tap, if there is one, an intermediate result. */
static inline void model_see(const struct model_tap *tap, const char *name, int layer,
                             const struct tensor *t)
{
    if (tap != NULL) {
        tap->see(tap->ctx, name, layer, t);
    }
}

static inline int64_t max_i64(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

#endif
