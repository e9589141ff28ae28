/* The step of a backend whose device is the host: its arrays are read where the engine wrote them.
 *
 * Each array is an allocation of its own, so that a sanitizer sees a write past its end. Beside the
 * step lies the working memory of the ops that need some, because ops do not allocate. */
#include "kernels/ref/ref.h"

#include <stdlib.h>

struct ref_step {
    struct step step; /* first: the engine's pointer to it is ours */
    struct step_scratch scratch;
};

const struct step_scratch *ref_step_scratch(const struct step *step)
{
    return &((const struct ref_step *)step)->scratch;
}

static void *floats_new(int n_a, int n_b, size_t element_bytes)
{
    const size_t n = (size_t)n_a * (size_t)n_b;
    return calloc(n > 0 ? n : 1, element_bytes);
}

enum err_code ref_step_new(struct backend *be, struct step **step, const struct step_limits *limits,
                           struct err *err)
{
    *step = NULL;
    struct ref_step *const s = calloc(1, sizeof *s);
    if (s == NULL) {
        return err_set(err, ERR_MEMORY, "no memory left for a step");
    }
    enum err_code code = step_arrays_new(&s->step, limits, err);
    s->scratch.score = floats_new(limits->n_page_max, KV_PAGE, sizeof(double));
    s->scratch.span = floats_new(limits->n_span_max, 1, sizeof(double));
    s->scratch.logit = floats_new(limits->n_vocab, 1, sizeof(float));
    s->scratch.candidate = floats_new(limits->n_vocab, 1, sizeof(int32_t));
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

void ref_step_free(struct backend *be, struct step *step)
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

void ref_step_begin(struct backend *be, struct step *step)
{
    (void)be;
    step_check(step);
}

/* Every op has run to its end when it returns. */
void ref_submit(struct backend *be, struct step *step)
{
    (void)be;
    (void)step;
}

/* Nothing is left to wait for, and plain C has no failures to report. */
enum err_code ref_finish(struct backend *be, struct step *step, struct err *err)
{
    (void)be;
    (void)step;
    (void)err;
    return ERR_OK;
}
