/* The last part of every family's forward: the logits of the rows whose outputs a step requests,
 * from one matrix or by adaptive softmax, and sampling and scoring from them. Logits are computed a
 * chunk of rows at a time, so that their memory does not grow with the step. */
#ifndef MODELS_OUTPUT_H
#define MODELS_OUTPUT_H

#include "models/adaptive.h"

struct output {
    int n_vocab;
    struct linear head; /* [n_vocab, d_model]; unless adaptive */
    struct adaptive adaptive;
    /* Views of the workspace, of a chunk. */
    struct tensor rows;   /* [n_chunk, d_model] the requested rows, if not consecutive */
    struct tensor logits; /* [n_chunk, adaptive_extra + n_vocab] */
    struct tensor proj;   /* [n_chunk, adaptive_width] a tail's projection */
};

/* Loads name.weight, or embeddings.weight if the output is tied, and name.bias if has_bias; or, if
 * the output is adaptive, what adaptive_bind says. */
void output_bind(struct loader *loader, struct output *output, const struct config *config,
                 const char *name, bool has_bias, bool tails_have_bias);

void output_lay_out(struct output *output, struct arena *arena, const struct step_limits *limits,
                    int64_t d_model);

/* Logits, sampling and log-probabilities of the rows of x [n_tok, d_model] that step requests. With
 * a tap, which sees the logits, the ops linear and outputs run in place of linear_outputs: the same
 * bits, but more memory traffic. */
void output_run(struct backend *be, const struct output *output, struct tensor x, struct step *step,
                const struct model_tap *tap);

#endif
