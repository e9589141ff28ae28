/* See adaptive.h. */
#include "models/adaptive.h"

int64_t adaptive_width(const struct adaptive *adaptive)
{
    int64_t width = 0;
    for (int i = 0; i < adaptive->n_tail; i++) {
        width = adaptive->width[i] > width ? adaptive->width[i] : width;
    }
    return width;
}

void adaptive_bind(struct loader *loader, struct adaptive *adaptive, const struct config *config,
                   const char *name, bool has_bias)
{
    const int n = config->n_cutoff;
    *adaptive = (struct adaptive){.n_vocab = config->n_vocab, .n_tail = n};
    if (n == 0) {
        return;
    }
    for (int i = 0; i < n; i++) {
        adaptive->first[i] = config->cutoff[i];
        adaptive->width[i] = config->cutoff_width[i];
    }
    adaptive->first[n] = config->n_vocab;
    const int n_word = config->cutoff[0];
    const struct loader_part head[] = {/* in the file the words come first, then the tails */
                                       {"head", n_word + n, n_word, n},
                                       {"head", n_word + n, 0, n_word}};
    loader_stack(loader, &adaptive->head, head, 2, config->d_model, true, "%s", name);
    for (int i = 0; i < n; i++) {
        loader_matrix(loader, &adaptive->down[i], adaptive->width[i], config->d_model,
                      "%s.tail.%d.0.weight", name, i);
        const int n_tail_word = adaptive->first[i + 1] - adaptive->first[i];
        if (has_bias) {
            loader_linear(loader, &adaptive->up[i], n_tail_word, adaptive->width[i], "%s.tail.%d.1",
                          name, i);
        } else {
            loader_matrix(loader, &adaptive->up[i].weight, n_tail_word, adaptive->width[i],
                          "%s.tail.%d.1.weight", name, i);
        }
    }
}

void adaptive_logprobs(struct backend *be, const struct adaptive *adaptive, struct tensor logprobs,
                       struct tensor x, struct tensor scratch)
{
    const int n = adaptive->n_tail;
    CHECK(n > 0 && logprobs.cols == n + adaptive->n_vocab);
    const struct tensor head = tensor_cols(logprobs, 0, n + adaptive->first[0]);
    op_linear(be, head, x, adaptive->head.weight, adaptive->head.bias, ACT_NONE);
    op_log_softmax(be, head, NO_TENSOR);
    for (int i = 0; i < n; i++) {
        const int64_t n_word = adaptive->first[i + 1] - adaptive->first[i];
        const struct tensor tail = tensor_cols(logprobs, n + adaptive->first[i], n_word);
        const struct tensor proj = tensor_make(scratch.data, x.rows, adaptive->width[i], DTYPE_F32);
        op_linear(be, proj, x, adaptive->down[i], NO_TENSOR, ACT_NONE);
        op_linear(be, tail, proj, adaptive->up[i].weight, adaptive->up[i].bias, ACT_NONE);
        op_log_softmax(be, tail, tensor_cols(logprobs, i, 1));
    }
}
