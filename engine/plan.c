/* The scheduling policy: see plan.h. */
#include "engine/plan.h"

static int64_t min64(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static bool in_class(const struct plan_sequence *seq, enum priority priority)
{
    return !seq->decode && seq->priority == priority;
}

/* Serves at most budget rows, shortest prompts and documents first; returns the rows that are
 * left. */
static int serve_short(struct plan_sequence *seq, int n_seq, enum priority priority, int budget)
{
    while (budget > 0) {
        struct plan_sequence *shortest = NULL;
        for (int i = 0; i < n_seq; i++) {
            const bool fits = in_class(&seq[i], priority) && !seq[i].ordered &&
                              seq[i].n_take == 0 && seq[i].n_left > 0;
            if (fits && (shortest == NULL || seq[i].n_left < shortest->n_left)) {
                shortest = &seq[i];
            }
        }
        if (shortest == NULL) {
            break;
        }
        shortest->n_take = (int)min64(shortest->n_left, budget);
        budget -= shortest->n_take;
    }
    return budget;
}

/* Serves the sequences of a rank in order; rank -1: all of the class. Returns the rows that are
 * left. */
static int serve_rank(struct plan_sequence *seq, int n_seq, enum priority priority, int rank,
                      int budget)
{
    for (int i = 0; i < n_seq && budget > 0; i++) {
        if (in_class(&seq[i], priority) && (rank < 0 || seq[i].rank == rank)) {
            const int more = (int)min64(seq[i].n_left - seq[i].n_take, budget);
            seq[i].n_take += more;
            budget -= more;
        }
    }
    return budget;
}

/* For each sequence that can use rows, counts those of its group before it. Returns the number of
 * ranks. */
static int set_ranks(struct plan_sequence *seq, int n_seq, enum priority priority)
{
    int n_rank = 0;
    for (int i = 0; i < n_seq; i++) {
        seq[i].n_in_group = 0;
    }
    for (int i = 0; i < n_seq; i++) {
        if (in_class(&seq[i], priority) && seq[i].n_left > 0) {
            seq[i].rank = seq[seq[i].group].n_in_group++;
            n_rank = seq[i].rank < n_rank ? n_rank : seq[i].rank + 1;
        }
    }
    return n_rank;
}

/* Serves the prompts and documents of one class from at most budget rows; returns the rows that are
 * left. */
static int serve_class(struct plan_sequence *seq, int n_seq, enum priority priority, int budget)
{
    int64_t want = 0;
    for (int i = 0; i < n_seq; i++) {
        want += in_class(&seq[i], priority) ? seq[i].n_left : 0;
    }
    if (want <= budget) {
        return serve_rank(seq, n_seq, priority, -1, budget);
    }
    const int share = budget / PLAN_SHORT_SHARE;
    budget -= share - serve_short(seq, n_seq, priority, share);
    const int n_rank = set_ranks(seq, n_seq, priority);
    for (int rank = 0; rank < n_rank && budget > 0; rank++) {
        budget = serve_rank(seq, n_seq, priority, rank, budget);
    }
    return budget;
}

bool plan_is_shared(const struct plan_sequence *seq, int n_seq)
{
    int n_group = 0; /* that decode: 0, 1 or more */
    int group = -1;  /* one of them */
    for (int i = 0; i < n_seq; i++) {
        if (seq[i].decode && seq[i].group != group) {
            group = seq[i].group;
            n_group++;
        }
    }
    for (int i = 0; i < n_seq; i++) {
        if (!seq[i].decode && seq[i].n_left > 0 &&
            (n_group > 1 || (n_group == 1 && seq[i].group != group))) {
            return true;
        }
    }
    return false;
}

void plan_rows(struct plan_sequence *seq, int n_seq, int budget, int prompt_max, int bulk_max)
{
    CHECK(n_seq <= budget && prompt_max >= 1 && bulk_max >= 1);
    int left = budget;
    int64_t want_bulk = 0;
    for (int i = 0; i < n_seq; i++) {
        CHECK(seq[i].n_left >= 0 && (!seq[i].decode || seq[i].n_left == 1));
        seq[i].n_take = seq[i].decode ? 1 : 0;
        left -= seq[i].n_take;
        if (!seq[i].decode && seq[i].priority == PRIORITY_BULK) {
            want_bulk += seq[i].n_left;
        }
    }
    left = left < prompt_max ? left : prompt_max;
    const int share = left / PLAN_BULK_SHARE > 0 ? left / PLAN_BULK_SHARE : 1;
    const int kept = (int)min64(min64(want_bulk, min64(share, bulk_max)), left);
    left = kept + serve_class(seq, n_seq, PRIORITY_INTERACTIVE, left - kept);
    (void)serve_class(seq, n_seq, PRIORITY_BULK, (int)min64(left, bulk_max));
}

/* If the step was too slow, the rows that would have fitted if time were proportional to rows. If
 * it was in time with all rows that it was allowed, a quarter more. */
void plan_adapt(struct plan_limit *limit, int n_row, double step_ms, double target_ms, int least,
                int budget)
{
    if (target_ms <= 0) {
        limit->rows = budget;
    } else if (step_ms > target_ms) {
        const double fitting = n_row * target_ms / step_ms;
        limit->rows = fitting < limit->rows ? fitting : limit->rows;
    } else if (n_row >= (int)limit->rows) {
        limit->rows *= 1.25;
    }
    limit->rows = limit->rows < least ? least : limit->rows;
    limit->rows = limit->rows > budget ? budget : limit->rows;
}

/* Of n places, those that are kept for others. */
static int kept_places(int n)
{
    return n < 2 ? 0 : n / PLAN_BULK_SHARE > 0 ? n / PLAN_BULK_SHARE : 1;
}

static int free_places(const struct plan_running *running, enum priority priority)
{
    const int left = running->n_max - running->n_interactive - running->n_bulk;
    const int left_bulk = running->n_max - kept_places(running->n_max) - running->n_bulk;
    return priority == PRIORITY_BULK && left_bulk < left ? left_bulk : left;
}

bool plan_may_take(const struct plan_running *running, enum priority priority,
                   const struct plan_job *job)
{
    const int n_all =
        running->n_max - (priority == PRIORITY_BULK ? kept_places(running->n_max) : 0);
    const int n_free = free_places(running, priority);
    const int n_held = job->is_tenant ? job->n_client : job->n_running;
    return n_free > (running->leaves ? kept_places(n_all) : 0) || n_held < n_free;
}

bool plan_precedes(const struct plan_job *a, const struct plan_job *b)
{
    return a->n_client != b->n_client ? a->n_client < b->n_client : a->n_running < b->n_running;
}

int plan_class(const struct plan_running *running)
{
    const bool interactive =
        running->wait[PRIORITY_INTERACTIVE] && free_places(running, PRIORITY_INTERACTIVE) > 0;
    const bool bulk = running->wait[PRIORITY_BULK] && free_places(running, PRIORITY_BULK) > 0;
    if (interactive && !(bulk && running->n_in_a_row >= PLAN_BULK_SHARE - 1)) {
        return PRIORITY_INTERACTIVE;
    }
    return bulk ? PRIORITY_BULK : -1;
}
