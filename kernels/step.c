/* A step's arrays and its checks, the same for all backends.
 *
 * The engine's arithmetic about rows, sequences, pages and outputs is checked once for each step
 * and not in each op: an op compares its tables with the step's bounds. */
#include "kernels/step.h"

#include <stdlib.h>

/* ---- arrays --------------------------------------------------------------------------------- */

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
           array_new(&s->allow, l->n_allow_max, 1, sizeof *s->allow) &&
           array_new(&s->ablate_first, l->n_seq_max + 1, 1, sizeof *s->ablate_first) &&
           array_new(&s->ablate, l->n_ablate_max, 1, sizeof *s->ablate) &&
           array_new(&s->redirect_first, l->n_seq_max + 1, 1, sizeof *s->redirect_first) &&
           array_new(&s->redirect, l->n_redirect_max, 1, sizeof *s->redirect);
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

enum err_code step_arrays_new(struct step *step, const struct step_limits *limits, struct err *err)
{
    CHECK(limits->n_tok_max > 0 && limits->n_seq_max > 0 && limits->n_seq_max < INT32_MAX);
    CHECK(limits->n_page_max > 0 && limits->n_out_max >= 0 && limits->n_top_max >= 0);
    CHECK(limits->n_adjust_max >= 0 && limits->n_allow_max >= 0 && limits->n_vocab >= 0);
    CHECK(limits->n_ablate_max >= 0 && limits->n_redirect_max >= 0);
    CHECK(limits->n_span_max >= 0 && limits->d_model >= 0 && limits->n_head >= 0);
    CHECK(limits->n_head == 0 || limits->d_model % limits->n_head == 0);
    step->limits = *limits;
    if (!inputs_new(step, limits) || !results_new(step, limits)) {
        return err_set(err, ERR_MEMORY,
                       "no memory left for a step of %d tokens, %d sequences and %d outputs; lower "
                       "the limits",
                       limits->n_tok_max, limits->n_seq_max, limits->n_out_max);
    }
    return ERR_OK;
}

void step_arrays_free(struct step *s)
{
    void *const arrays[] = {
        s->token,       s->pos,         s->lang,         s->seq_first, s->page,
        s->out_row,     s->target,      s->sample,       s->allow,     s->out_want,
        s->adjust,      s->out_token,   s->top_id,       s->out_rank,  s->out_logprob,
        s->out_entropy, s->top_logprob, s->ablate_first, s->ablate,    s->redirect_first,
        s->redirect,
    };
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++) {
        free(arrays[i]);
    }
}

/* ---- checks --------------------------------------------------------------------------------- */

static int32_t bound(int32_t before, int32_t value)
{
    CHECK(value >= 0 && value < INT32_MAX);
    return value >= before ? value + 1 : before;
}

/* Rows, positions and pages of sequence s, whose bounds are added. */
static void check_sequence(const struct step *step, int s, struct step_bounds *bounds)
{
    const int first = step->seq_first[s];
    const int end = step->seq_first[s + 1];
    CHECK(first <= end && end <= step->n_tok);
    for (int r = first; r < end; r++) {
        CHECK(r == first || step->pos[r] == step->pos[r - 1] + 1);
        if (step->token[r] < 0) {
            CHECK(step->token[r] >= step_token_drawn(step->n_before - 1));
        } else {
            bounds->token = bound(bounds->token, step->token[r]);
        }
        bounds->pos = bound(bounds->pos, step->pos[r]);
        bounds->lang = bound(bounds->lang, step->lang[r]);
    }
    const int n_pos = end > first ? step->pos[end - 1] + 1 : 0;
    CHECK(step->limits.n_span_max > 0 || (n_pos - 1) / KV_PAGE < step->limits.n_page_max);
    for (int p = 0; p < step_pages_used(step, n_pos); p++) {
        bounds->page = bound(bounds->page, step_page(step, s, p * KV_PAGE));
    }
}

static void check_outputs(const struct step *step)
{
    CHECK(step->n_out >= 0 && step->n_out <= step->limits.n_out_max);
    CHECK(step->n_top >= 0 && step->n_top <= step->limits.n_top_max);
    CHECK(step->n_adjust >= 0 && step->n_adjust <= step->limits.n_adjust_max);
    CHECK(step->n_allow >= 0 && step->n_allow <= step->limits.n_allow_max);
    for (int i = 0; i < step->n_out; i++) {
        CHECK(step->out_row[i] >= 0 && step->out_row[i] < step->n_tok);
        CHECK(i == 0 || step->out_row[i] >= step->out_row[i - 1]);
        CHECK(step->out_want[i] != 0);
    }
}

static void check_ablate(const struct step *step)
{
    CHECK(step->n_ablate >= 0 && step->n_ablate <= step->limits.n_ablate_max);
    CHECK(step->ablate_first[0] == 0 && step->ablate_first[step->n_seq] == step->n_ablate);
    for (int s = 0; s < step->n_seq; s++) {
        const int end = step->ablate_first[s + 1];
        CHECK(step->ablate_first[s] <= end && end <= step->n_ablate);
        for (int i = step->ablate_first[s]; i < end; i++) {
            const struct step_ablate *const entry = &step->ablate[i];
            CHECK(entry->memory >= 0 && entry->head >= -1 && entry->slot >= -1);
            CHECK(i == step->ablate_first[s] || step_ablate_precedes(entry - 1, entry));
        }
    }
}

static void check_redirects(const struct step *step)
{
    CHECK(step->n_redirect >= 0 && step->n_redirect <= step->limits.n_redirect_max);
    CHECK(step->redirect_first[0] == 0 && step->redirect_first[step->n_seq] == step->n_redirect);
    for (int s = 0; s < step->n_seq; s++) {
        const int end = step->redirect_first[s + 1];
        CHECK(step->redirect_first[s] <= end && end <= step->n_redirect);
        for (int i = step->redirect_first[s]; i < end; i++) {
            const struct step_redirect *const entry = &step->redirect[i];
            CHECK(entry->memory >= 0 && entry->place != NULL && entry->values.data != NULL);
            CHECK(entry->n_bit >= 1 && entry->n_bit <= 30);
            CHECK(i == step->redirect_first[s] || entry[-1].memory <= entry->memory);
        }
    }
}

void step_check(struct step *step)
{
    CHECK(step->n_tok >= 0 && step->n_tok <= step->limits.n_tok_max);
    CHECK(step->n_seq >= 0 && step->n_seq <= step->limits.n_seq_max);
    CHECK(step->n_before >= 0 && step->n_before <= step->limits.n_out_max);
    CHECK(step->seq_first[0] == 0 && step->seq_first[step->n_seq] == step->n_tok);
    for (int s = 0; step->is_drawn && s <= step->n_seq; s++) {
        CHECK(step->seq_first[s] == s);
    }
    step->bounds = (struct step_bounds){0};
    for (int s = 0; s < step->n_seq; s++) {
        check_sequence(step, s, &step->bounds);
    }
    check_outputs(step);
    check_ablate(step);
    check_redirects(step);
}

/* ---- redirections --------------------------------------------------------------------------- */

/* The sequence that a row belongs to: a search by halves. */
static int sequence_of(const struct step *step, int64_t row)
{
    int first = 0;
    int n = step->n_seq;
    while (n > 1) { /* it is one of first .. first + n - 1 */
        const int half = n / 2;
        const bool later = step->seq_first[first + half] <= row;
        first += later ? half : 0;
        n = later ? n - half : half;
    }
    return first;
}

struct redirect_list step_redirects(const struct step *step, int64_t row, int memory)
{
    const int seq = sequence_of(step, row);
    int first = step->redirect_first[seq];
    const int end = step->redirect_first[seq + 1];
    while (first < end && step->redirect[first].memory < memory) {
        first++;
    }
    struct redirect_list list = {step->redirect + first, 0};
    while (first + list.n < end && list.entry[list.n].memory == memory) {
        list.n++;
    }
    return list;
}

int32_t step_redirect_row(const struct redirect_list *list, int32_t slot,
                          const struct step_redirect **entry)
{
    for (int i = 0; i < list->n; i++) {
        const struct step_redirect *const one = &list->entry[i];
        const uint32_t last = (UINT32_C(1) << one->n_bit) - 1;
        uint32_t at = redirect_place_of(slot, one->n_bit);
        for (; one->place[at].slot >= 0; at = (at + 1) & last) {
            if (one->place[at].slot == slot) {
                *entry = one;
                return one->place[at].row;
            }
        }
    }
    return -1;
}
