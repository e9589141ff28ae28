/* See output.h. */
#include "models/output.h"

/* Rows of a chunk: as many as backends multiply in one pass over the vocabulary's matrix, or fewer
 * if their logits would take more than LOGITS_BYTES_MAX. */
enum { CHUNK_ROWS_MAX = 256, LOGITS_BYTES_MAX = 64 << 20 };

/* Each row of logits starts at a cache line, so that backends may use non-temporal stores. */
enum { LINE_FLOATS = 16 };

void output_bind(struct loader *loader, struct output *output, const struct config *config,
                 const char *name, bool has_bias, bool tails_have_bias)
{
    output->n_vocab = config->n_vocab;
    adaptive_bind(loader, &output->adaptive, config, name, tails_have_bias);
    if (output->adaptive.n_tail > 0) {
        return;
    }
    loader_matrix(loader, &output->head.weight, config->n_vocab, config->d_model, "%s.weight",
                  config->tie_output ? "embeddings" : name);
    if (has_bias) {
        loader_vector(loader, &output->head.bias, config->n_vocab, "%s.bias", name);
    }
}

/* Output rows per chunk, at least one. */
static int64_t chunk_rows(int n_vocab, const struct step_limits *limits)
{
    const int64_t fitting = LOGITS_BYTES_MAX / ((int64_t)sizeof(float) * n_vocab);
    const int64_t most = limits->n_out_max < CHUNK_ROWS_MAX ? limits->n_out_max : CHUNK_ROWS_MAX;
    return fitting < 1 ? 1 : fitting < most ? fitting : most;
}

void output_lay_out(struct output *output, struct arena *arena, const struct step_limits *limits,
                    int64_t d_model)
{
    const struct adaptive *const adaptive = &output->adaptive;
    const int64_t n_chunk = chunk_rows(output->n_vocab, limits);
    output->rows = arena_take(arena, n_chunk, d_model, DTYPE_F32);
    const int64_t n_logit = adaptive_extra(adaptive) + output->n_vocab;
    const int64_t stride = (n_logit + LINE_FLOATS - 1) / LINE_FLOATS * LINE_FLOATS;
    output->logits = tensor_cols(arena_take(arena, n_chunk, stride, DTYPE_F32), 0, n_logit);
    output->proj = arena_take(arena, n_chunk, adaptive_width(adaptive), DTYPE_F32);
}

/* The rows of x of outputs first .. first+n-1: a view of x where they are consecutive, as in
 * decoding and scoring, else gathered. */
static struct tensor requested_rows(struct backend *be, const struct output *output,
                                    struct tensor x, const struct step *step, int first, int n)
{
    const int32_t *const row = step->out_row + first;
    for (int i = 1; i < n; i++) {
        if (row[i] != row[0] + i) {
            const struct tensor rows = tensor_head(output->rows, n);
            op_gather(be, rows, x, step, first);
            return rows;
        }
    }
    return tensor_rows(x, row[0], n);
}

void output_run(struct backend *be, const struct output *output, struct tensor x, struct step *step,
                const struct model_tap *tap)
{
    const struct adaptive *const adaptive = &output->adaptive;
    const int n_chunk = (int)output->logits.rows;
    for (int first = 0; first < step->n_out; first += n_chunk) {
        const int n = step->n_out - first < n_chunk ? step->n_out - first : n_chunk;
        const struct tensor rows = requested_rows(be, output, x, step, first, n);
        const struct tensor whole = tensor_head(output->logits, n);
        const struct tensor logits = tensor_cols(whole, adaptive_extra(adaptive), output->n_vocab);
        if (adaptive->n_tail > 0) {
            adaptive_logprobs(be, adaptive, whole, rows, output->proj);
        } else if (tap != NULL) {
            op_linear(be, logits, rows, output->head.weight, output->head.bias, ACT_NONE);
        } else {
            op_linear_outputs(be, logits, rows, output->head.weight, output->head.bias, step,
                              first);
            continue;
        }
        model_see(tap, "logits", first, &logits);
        op_outputs(be, logits, step, first);
    }
}
