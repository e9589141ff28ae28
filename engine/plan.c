/* The scheduling policy: see plan.h. */
#include "engine/plan.h"

static int64_t min64(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* Serves the prompts and documents of one class from at most budget rows; returns what is left. */
static int serve_class(struct plan_unit *unit, int n_unit, enum priority priority, int budget)
{
    for (int i = 0; i < n_unit && budget > 0; i++) {
        if (unit[i].decode || unit[i].priority != priority) {
            continue;
        }
        unit[i].n_take = (int)min64(unit[i].n_left, budget);
        budget -= unit[i].n_take;
    }
    return budget;
}

void plan_rows(struct plan_unit *unit, int n_unit, int budget)
{
    CHECK(n_unit <= budget);
    int left = budget;
    int64_t want_bulk = 0;
    for (int i = 0; i < n_unit; i++) {
        CHECK(unit[i].n_left >= 1 && (!unit[i].decode || unit[i].n_left == 1));
        unit[i].n_take = unit[i].decode ? 1 : 0;
        left -= unit[i].n_take;
        if (!unit[i].decode && unit[i].priority == PRIORITY_BULK) {
            want_bulk += unit[i].n_left;
        }
    }
    const int share = left / PLAN_BULK_SHARE > 0 ? left / PLAN_BULK_SHARE : 1;
    const int kept = (int)min64(min64(want_bulk, share), left);
    left = kept + serve_class(unit, n_unit, PRIORITY_INTERACTIVE, left - kept);
    (void)serve_class(unit, n_unit, PRIORITY_BULK, left);
}

int plan_class(const struct plan_slots *slots)
{
    if (slots->n_interactive + slots->n_bulk >= slots->n_slot) {
        return -1;
    }
    const int spare = slots->n_slot / PLAN_BULK_SHARE > 0 ? slots->n_slot / PLAN_BULK_SHARE : 1;
    const int bulk_max = slots->n_slot > 1 ? slots->n_slot - spare : 1;
    const bool bulk = slots->wait[PRIORITY_BULK] && slots->n_bulk < bulk_max;
    if (slots->wait[PRIORITY_INTERACTIVE] && !(bulk && slots->n_in_a_row >= PLAN_BULK_SHARE - 1)) {
        return PRIORITY_INTERACTIVE;
    }
    return bulk ? PRIORITY_BULK : -1;
}
