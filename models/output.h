/* The end of a family's forward pass: the vocabulary's logits of the wanted rows, from one matrix
 * or by adaptive softmax, a chunk of reserved size at a time, and what is drawn and scored by them.
 */
#ifndef MODELS_OUTPUT_H
#define MODELS_OUTPUT_H

#include "models/adaptive.h"

struct output {
    int n_vocab;
    struct linear head; /* [n_vocab, d_model]; unless adaptive */
    struct adaptive adaptive;
    /* Views of the workspace, of a chunk. */
    struct tensor rows;   /* [n_chunk, d_model] wanted rows that do not stand side by side */
    struct tensor logits; /* [n_chunk, adaptive_extra + n_vocab] */
    struct tensor proj;   /* [n_chunk, adaptive_width] a tail's projection */
};

/* Loads name.weight, or embeddings.weight if the output is tied, and if has_bias name.bias; of an
 * adaptive output what adaptive_bind says. */
void output_bind(struct loader *loader, struct output *output, const struct config *config,
                 const char *name, bool has_bias, bool tails_have_bias);

void output_lay_out(struct output *output, struct arena *arena, const struct step_limits *limits,
                    int64_t d_model);

/* Logits, sampling and log-probabilities of the rows of x [n_tok, d_model] that step wants. */
void output_run(struct backend *be, const struct output *output, struct tensor x, struct step *step,
                const struct model_tap *tap);

#endif
