/* The reference backend: opening, the table, and steps with the working memory of ops. See
 * ref.h. */
#include "kernels/ref/ref.h"

#include <stdio.h>
#include <stdlib.h>

/* ---- steps ---------------------------------------------------------------------------------- */

struct ref_step {
    struct step step; /* first: the engine's pointer to it is ours */
    struct step_scratch scratch;
};

const struct step_scratch *ref_step_scratch(const struct step *step)
{
    return &((const struct ref_step *)step)->scratch;
}

static void *zeros_new(int n_a, int n_b, size_t element_bytes)
{
    const size_t n = (size_t)n_a * (size_t)n_b;
    return calloc(n > 0 ? n : 1, element_bytes);
}

static void ref_step_free(struct backend *be, struct step *step)
{
    (void)be;
    if (step == NULL) {
        return;
    }
    struct ref_step *const s = (struct ref_step *)step;
    step_arrays_free(step);
    free(s->scratch.score);
    free(s->scratch.span);
    free(s->scratch.logit);
    free(s->scratch.candidate);
    free(s);
}

static enum err_code ref_step_new(struct backend *be, struct step **step,
                                  const struct step_limits *limits, struct err *err)
{
    *step = NULL;
    struct ref_step *const s = calloc(1, sizeof *s);
    if (s == NULL) {
        return err_set(err, ERR_MEMORY, "no memory left for a step");
    }
    enum err_code code = step_arrays_new(&s->step, limits, err);
    s->scratch.score = zeros_new(limits->n_page_max, KV_PAGE, sizeof(double));
    s->scratch.span = zeros_new(limits->n_span_max, 1, sizeof(double));
    s->scratch.logit = zeros_new(limits->n_vocab, 1, sizeof(float));
    s->scratch.candidate = zeros_new(limits->n_vocab, 1, sizeof(int32_t));
    if (code == ERR_OK && (s->scratch.score == NULL || s->scratch.span == NULL ||
                           s->scratch.logit == NULL || s->scratch.candidate == NULL)) {
        code = err_set(err, ERR_MEMORY, "no memory left for a step of %d tokens and %d pages",
                       limits->n_tok_max, limits->n_page_max);
    }
    if (code != ERR_OK) {
        ref_step_free(be, &s->step);
        return code;
    }
    *step = &s->step;
    return ERR_OK;
}

/* ---- the table ------------------------------------------------------------------------------ */

/* Not measured: the specification is slow on purpose. */
static void ref_measure(struct backend *be, enum dtype dtype, struct machine_rate *rate)
{
    (void)be;
    (void)dtype;
    *rate = (struct machine_rate){0};
}

static void ref_close(struct backend *be)
{
    free(be);
}

#define REF_SLOT(op) .op = ref_##op,

static const struct backend_ops ref_ops = {
    .close = ref_close,
    .buffer_new = host_buffer_new,
    .buffer_free = host_buffer_free,
    .weight_new = ref_weight_new,
    .weight_free = ref_weight_free,
    .weight_bytes = ref_weight_bytes,
    .step_new = ref_step_new,
    .step_twin = host_step_twin,
    .step_free = ref_step_free,
    .upload = host_upload,
    .download = host_download,
    .memory_available = host_memory_available,
    .step_begin = host_step_begin,
    .submit = host_submit,
    .fetch = host_fetch,
    .finish = host_finish,
    .fast_path_use = host_fast_path_use,
    .measure = ref_measure,
    .compute = {OP_LIST(REF_SLOT)},
};

enum err_code ref_open(struct backend **be, struct err *err)
{
    *be = calloc(1, sizeof **be);
    if (*be == NULL) {
        return err_set(err, ERR_MEMORY, "no memory left to open the reference backend");
    }
    (*be)->op = &ref_ops;
    (*be)->n_thread = 1;
    (*be)->is_host = true;
    (*be)->has_int8 = (*be)->has_int8_slots = true;
    (*be)->has_f16 = true;
    (*be)->n_tok_good = HOST_TOK_GOOD;
    (void)snprintf((*be)->name, sizeof(*be)->name, "ref");
    (void)snprintf((*be)->description, sizeof(*be)->description,
                   "plain C, one thread: the specification, for tests");
    return ERR_OK;
}
