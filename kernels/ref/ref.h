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

/* A view must have this type and shape; without rows it need not have an address. */
#define CHECK_VIEW(t, type, n_row, n_col)                                                          \
    CHECK((t).dtype == (type) && (t).rows == (n_row) && (t).cols == (n_col) &&                     \
          (t).stride >= (t).cols && ((t).data != NULL || (t).rows == 0))

static inline float *row_f32(struct tensor t, int64_t row)
{
    return (float *)t.data + row * t.stride;
}

static inline int32_t *row_i32(struct tensor t, int64_t row)
{
    return (int32_t *)t.data + row * t.stride;
}

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
void ref_step_begin(struct backend *be, const struct step *step);
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

/* norm.c */
void ref_embed(struct backend *be, struct tensor y, const struct step *step,
               const struct weight *tok, const struct weight *pos, const struct weight *lang);
void ref_norm(struct backend *be, struct tensor y, struct tensor x, struct tensor gamma,
              struct tensor beta, float eps);
void ref_add_norm(struct backend *be, struct tensor y, struct tensor x, struct tensor r,
                  struct tensor gamma, struct tensor beta, float eps);
void ref_unit_norm(struct backend *be, struct tensor y, struct tensor x, int n_run);

/* gated.c */
void ref_rms_norm(struct backend *be, struct tensor y, struct tensor sum, struct tensor x,
                  struct tensor r, struct tensor gamma, float eps);
void ref_rotate(struct backend *be, struct tensor x, struct tensor table, const struct step *step,
                int n_head);
void ref_gate(struct backend *be, struct tensor y, struct tensor x, struct tensor g,
              enum gate_kind kind);
void ref_pkm_experts(struct backend *be, struct tensor y, struct tensor shares, struct tensor slots,
                     struct tensor x, const struct weight *experts);
/* CHECKs what the ops of the same name may be given. */
void ref_rms_norm_check(struct tensor y, struct tensor sum, struct tensor x, struct tensor r,
                        struct tensor gamma);
void ref_rotate_check(struct tensor x, struct tensor table, const struct step *step, int n_head);
void ref_gate_check(struct tensor y, struct tensor x, struct tensor g, enum gate_kind kind);

/* linear.c */
void ref_linear(struct backend *be, struct tensor y, struct tensor x, const struct weight *w,
                struct tensor bias, enum act act);
void ref_ffn(struct backend *be, struct tensor y, struct tensor hidden, struct tensor x,
             const struct ffn *ffn);

/* attention.c */
/* Element of column 0 of position pos of sequence s in a cache. */
int64_t ref_cache_row(struct tensor pages, const struct step *step, int s, int pos, int64_t d);
/* Element i of a cache. */
static inline double ref_cached(struct tensor pages, int64_t i)
{
    return (double)(pages.dtype == DTYPE_BF16 ? bf16_to_f32(((const uint16_t *)pages.data)[i])
                                              : ((const float *)pages.data)[i]);
}
/* CHECKs what pages of keys and values for rows of d columns may be. */
void ref_pages_check(struct tensor k_pages, struct tensor v_pages, int64_t d, int n_head);
/* The same of pages for n_head heads of d_head columns; how many of these read one of the pages'.
 */
int ref_pages_share(struct tensor k_pages, struct tensor v_pages, int64_t d_head, int n_head);
void ref_kv_store(struct backend *be, struct tensor k_pages, struct tensor v_pages, struct tensor k,
                  struct tensor v, const struct step *step, int n_head);
void ref_attention(struct backend *be, struct tensor y, struct tensor q, struct tensor k_pages,
                   struct tensor v_pages, const struct step *step, int n_head, float scale);

/* span.c */
void ref_span_attention(struct backend *be, struct tensor y, struct tensor q, struct tensor k_pages,
                        struct tensor v_pages, const struct step *step,
                        const struct span_shape *shape);
/* CHECKs the shapes and the ring. */
void ref_span_check(struct tensor y, struct tensor q, struct tensor k_pages, struct tensor v_pages,
                    const struct step *step, const struct span_shape *shape);

/* pkm.c */
void ref_pkm_search(struct backend *be, struct tensor slots, struct tensor shares,
                    struct tensor query, const struct weight *keys, const struct pkm_shape *shape);
void ref_pkm_rescore(struct backend *be, struct tensor slots, struct tensor shares,
                     struct tensor slot_map, const struct pkm_rescore *rescore);
void ref_pkm_read(struct backend *be, struct tensor y, struct tensor residual, struct tensor slots,
                  struct tensor shares, const struct weight *values);

/* vocab.c */
void ref_gather(struct backend *be, struct tensor y, struct tensor x, const struct step *step,
                int first);
void ref_log_softmax(struct backend *be, struct tensor y, struct tensor base);
void ref_outputs(struct backend *be, struct tensor logits, struct step *step, int first);
void ref_linear_outputs(struct backend *be, struct tensor logits, struct tensor x,
                        const struct weight *w, struct tensor bias, struct step *step, int first);

/* sample.c */
/* A logit after one token's correction. */
float ref_adjusted(float z, const struct sample_adjust *a, const struct sample_params *p);
/* Draws for output i (index into step->sample) from logits[n_vocab]. logit and candidate are
 * working memory of n_vocab entries each: a backend that draws rows on several threads gives each
 * thread its own. */
int32_t ref_sample_row(const struct step *step, int i, const float *logits, int n_vocab,
                       float *logit, int32_t *candidate);

#endif
