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

/* Zero-filled array of n_a · n_b elements; never empty, so that NULL means failure. */
static bool array_new(void *array, int n_a, int n_b, size_t element_bytes)
{
    const size_t n = (size_t)n_a * (size_t)n_b; /* two ints: fits size_t */
    void *const data = calloc(n > 0 ? n : 1, element_bytes);
    *(void **)array = data;
    return data != NULL;
}

static bool inputs_new(struct step *s, const struct step_limits *l)
{
    return array_new(&s->token, l->n_tok_max, 1, sizeof *s->token) &&
           array_new(&s->pos, l->n_tok_max, 1, sizeof *s->pos) &&
           array_new(&s->lang, l->n_tok_max, 1, sizeof *s->lang) &&
           array_new(&s->seq_first, l->n_seq_max + 1, 1, sizeof *s->seq_first) &&
           array_new(&s->page, l->n_seq_max, l->n_page_max, sizeof *s->page) &&
           array_new(&s->out_row, l->n_out_max, 1, sizeof *s->out_row) &&
           array_new(&s->out_want, l->n_out_max, 1, sizeof *s->out_want) &&
           array_new(&s->target, l->n_out_max, 1, sizeof *s->target) &&
           array_new(&s->sample, l->n_out_max, 1, sizeof *s->sample) &&
           array_new(&s->adjust, l->n_adjust_max, 1, sizeof *s->adjust) &&
           array_new(&s->allow, l->n_allow_max, 1, sizeof *s->allow);
}

static bool results_new(struct step *s, const struct step_limits *l)
{
    return array_new(&s->out_token, l->n_out_max, 1, sizeof *s->out_token) &&
           array_new(&s->out_logprob, l->n_out_max, 1, sizeof *s->out_logprob) &&
           array_new(&s->out_rank, l->n_out_max, 1, sizeof *s->out_rank) &&
           array_new(&s->out_entropy, l->n_out_max, 1, sizeof *s->out_entropy) &&
           array_new(&s->top_id, l->n_out_max, l->n_top_max, sizeof *s->top_id) &&
           array_new(&s->top_logprob, l->n_out_max, l->n_top_max, sizeof *s->top_logprob);
}

static bool scratch_new(struct step_scratch *s, const struct step_limits *l)
{
    return array_new(&s->score, l->n_page_max, KV_PAGE, sizeof *s->score) &&
           array_new(&s->span, l->n_span_max, 1, sizeof *s->span) &&
           array_new(&s->logit, l->n_vocab, 1, sizeof *s->logit) &&
           array_new(&s->candidate, l->n_vocab, 1, sizeof *s->candidate);
}

enum err_code ref_step_new(struct backend *be, struct step **step, const struct step_limits *limits,
                           struct err *err)
{
    CHECK(limits->n_tok_max > 0 && limits->n_seq_max > 0 && limits->n_seq_max < INT32_MAX);
    CHECK(limits->n_page_max > 0 && limits->n_out_max >= 0 && limits->n_top_max >= 0);
    CHECK(limits->n_adjust_max >= 0 && limits->n_allow_max >= 0 && limits->n_vocab >= 0);
    CHECK(limits->n_span_max >= 0);

    *step = NULL;
    struct ref_step *const s = calloc(1, sizeof *s);
    if (s == NULL || !inputs_new(&s->step, limits) || !results_new(&s->step, limits) ||
        !scratch_new(&s->scratch, limits)) {
        ref_step_free(be, s == NULL ? NULL : &s->step);
        return err_set(err, ERR_MEMORY,
                       "no memory left for a step of %d tokens, %d sequences and %d outputs; lower "
                       "the limits",
                       limits->n_tok_max, limits->n_seq_max, limits->n_out_max);
    }
    s->step.limits = *limits;
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
    void *const arrays[] = {
        step->token,          step->pos,        step->lang,        step->seq_first,
        step->page,           step->out_row,    step->out_want,    step->target,
        step->sample,         step->adjust,     step->allow,       step->out_token,
        step->out_logprob,    step->out_rank,   step->out_entropy, step->top_id,
        step->top_logprob,    s->scratch.score, s->scratch.span,   s->scratch.logit,
        s->scratch.candidate,
    };
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++) {
        free(arrays[i]);
    }
    free(s);
}

void ref_step_begin(struct backend *be, const struct step *step)
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
