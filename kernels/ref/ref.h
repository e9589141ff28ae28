/* The reference backend: plain C, the specification of every op.
 *
 * An op is in the file of its name or of its group (attention.c has kv_store too, pkm.c the
 * pkm_* ops, outputs.c also gather and log_softmax); weight.c and weight.h hold the parameters,
 * ref.c the table. Everything is written to be read, one row and one element after the other, with
 * sums in double where a better sum makes a better specification. Memory and steps are those of all
 * backends on the host (kernels/host).
 *
 * Other backends may call an op of ref's for what is rare or cheap, but for those that read ref's
 * own weights (weight.h) or ref's own order inside a cache page. */
#ifndef KERNELS_REF_REF_H
#define KERNELS_REF_REF_H

#include "kernels/host/host.h"

/* weight.c */
enum err_code ref_weight_new(struct backend *be, struct weight **weight, const struct tensor *host,
                             const struct weight_desc *desc, const char *name, struct err *err);
void ref_weight_free(struct backend *be, struct weight *weight);
size_t ref_weight_bytes(const struct weight *weight);

/* Working memory of one row, made with the step. */
struct step_scratch {
    double *score;      /* [n_page_max·KV_PAGE] attention of one row and head */
    double *span;       /* [n_span_max] span_attention of one row and head */
    float *logit;       /* [n_vocab] adjusted logits of the row being drawn */
    int32_t *candidate; /* [n_vocab] token ids, partly ordered */
};

/* step must come from the reference backend. ref.c */
const struct step_scratch *ref_step_scratch(const struct step *step);

/* attention.c */
/* Element of column 0 of position pos of sequence s in a cache. */
int64_t ref_cache_row(struct tensor pages, const struct step *step, int s, int pos, int64_t d);
/* Element i of a cache. */
static inline double ref_cached(struct tensor pages, int64_t i)
{
    return (double)(pages.dtype == DTYPE_BF16 ? bf16_to_f32(((const uint16_t *)pages.data)[i])
                                              : ((const float *)pages.data)[i]);
}

/* sample.c */
/* A logit after one token's correction. */
float ref_adjusted(float z, const struct sample_adjust *a, const struct sample_params *p);
/* Draws for output i (index into step->sample) from logits[n_vocab]. logit and candidate are
 * working memory of n_vocab entries each: a backend that draws rows on several threads gives each
 * thread its own. */
int32_t ref_sample_row(const struct step *step, int i, const float *logits, int n_vocab,
                       float *logit, int32_t *candidate);

/* The ops: ref_linear and so on, as op.h says. */
#define REF_OP(op) op_##op##_fn ref_##op;
OP_LIST(REF_OP)

#endif
