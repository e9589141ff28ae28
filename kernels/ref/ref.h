/* The reference backend: plain C, the specification of every op.
 *
 * One file per group of ops: resource.c (memory, weights), step.c, norm.c, linear.c, attention.c,
 * span.c, pkm.c, vocab.c (gather, log-probabilities), sample.c; ref.c holds the table. Everything
 * is written to be read, one row and one element after the other, with sums in double where a
 * better sum makes a better specification.
 *
 * Other backends start from this table. What they can keep as it is: memory, upload and download,
 * the step, norms, gather, sample and log-probabilities, which know nothing of struct weight. The
 * other ops read ref's own struct weight (weight.h) or ref's own order inside a cache page. */
#ifndef KERNELS_REF_REF_H
#define KERNELS_REF_REF_H

#include "kernels/backend.h"

/* resource.c */
enum err_code ref_buffer_new(struct backend *be, void **data, size_t bytes, const char *purpose,
                             struct err *err);
void ref_buffer_free(struct backend *be, void *data);
void ref_upload(struct backend *be, struct tensor dst, const void *host);
void ref_download(struct backend *be, void *host, struct tensor src);
enum err_code ref_weight_new(struct backend *be, struct weight **weight, const struct tensor *host,
                             const struct weight_desc *desc, const char *name, struct err *err);
void ref_weight_free(struct backend *be, struct weight *weight);
size_t ref_weight_bytes(const struct weight *weight);
int64_t ref_memory_available(struct backend *be);

/* step.c */
enum err_code ref_step_new(struct backend *be, struct step **step, const struct step_limits *limits,
                           struct err *err);
void ref_step_free(struct backend *be, struct step *step);
void ref_step_begin(struct backend *be, struct step *step);
void ref_submit(struct backend *be, struct step *step);
enum err_code ref_finish(struct backend *be, struct step *step, struct err *err);

/* Working memory of one row, reserved by ref_step_new beside the step. */
struct step_scratch {
    double *score;      /* [n_page_max·KV_PAGE] attention of one row and head */
    double *span;       /* [n_span_max] span_attention of one row and head */
    float *logit;       /* [n_vocab] adjusted logits of the row being drawn */
    int32_t *candidate; /* [n_vocab] token ids, partly ordered */
};

/* step must come from ref_step_new. */
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
