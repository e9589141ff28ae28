/* The engine's arithmetic about rows, sequences, pages and outputs is checked once for each step,
 * by every backend's step_begin, and not in each op. */
#include "kernels/backend.h"

static void check_rows(const struct step *step)
{
    CHECK(step->n_tok >= 0 && step->n_tok <= step->limits.n_tok_max);
    CHECK(step->n_seq >= 0 && step->n_seq <= step->limits.n_seq_max);
    CHECK(step->seq_first[0] == 0 && step->seq_first[step->n_seq] == step->n_tok);
    for (int s = 0; s < step->n_seq; s++) {
        CHECK(step->seq_first[s] <= step->seq_first[s + 1]);
        for (int r = step->seq_first[s]; r < step->seq_first[s + 1]; r++) {
            CHECK(step->pos[r] >= 0 && (step->limits.n_span_max > 0 ||
                                        step->pos[r] / KV_PAGE < step->limits.n_page_max));
            CHECK(r == step->seq_first[s] || step->pos[r] == step->pos[r - 1] + 1);
        }
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

void step_check(const struct step *step)
{
    check_rows(step);
    check_outputs(step);
}

void step_check_window(const struct step *step, const struct span_shape *shape)
{
    const int64_t ring = (int64_t)step->limits.n_page_max * KV_PAGE;
    CHECK(shape->window + shape->n_persistent <= step->limits.n_span_max);
    for (int s = 0; s < step->n_seq; s++) {
        const int n_row = step->seq_first[s + 1] - step->seq_first[s];
        CHECK(n_row == 0 || shape->window + n_row <= ring ||
              step->pos[step->seq_first[s + 1] - 1] < ring);
    }
}
