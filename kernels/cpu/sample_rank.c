/* Drawing with top_k, top_p or min_p: among the best tokens, best first.
 *
 * Nothing is sorted. Every question about the order of ranks is a search for a place in it by the
 * weight of the tokens before that place: the k-th token, the token at which top_p's mass is
 * reached, the token that is drawn. A place is a logit and a number among the tokens that have that
 * logit. The search narrows a list step by step (Floyd and Rivest 1975, "Expected time bounds for
 * selection", with weights): a sample of the list tells between which two logits the place probably
 * lies; one pass adds up what comes before and picks out what lies between. If the sample misled,
 * that pass tells on which side the place is. All masses are sums over all tokens, so a bad sample
 * costs time but never changes the result. */
#include "kernels/cpu/sample.h"

#include <math.h>

/* Tokens of a sample on each side of the guess: two standard deviations of a binomial. */
enum { REACH = 8 };

static double share_of(const struct draw *d, float z)
{
    return exp(((double)z - (double)d->max) / (double)d->params->temperature);
}

/* A place in the order: the tokens with a logit larger than z, and the first n_equal, by id, of
 * those with logit z, come before it or are it. */
struct place {
    float z;
    int n_equal; /* 0 where rounding has hidden it */
    double mass;
};

/* A search under way. */
struct search {
    const struct draw *d;
    struct logit_list *best; /* the best tokens; the place is among them */
    struct logit_list list;  /* those of best with low <= z <= high, the place among them */
    float low, high;
    double above; /* mass of those with z > high */
    double goal;  /* the place is the first with so much mass */
};

static double weight(const struct logit_list *list, int i)
{
    return list->is_weighed ? (double)list->share[i] : 1;
}

/* The buffers that do not hold best. */
static const struct logit_room *room_of(const struct draw *d, const struct logit_list *best)
{
    return &d->scratch.room[best->z == d->scratch.room[0].z];
}

/* Narrows low and high to where the place probably lies in list: reach tokens of a sample around
 * it. The sample's weights are added up from its end, since the few that outweigh the others are
 * rarely in it. */
static void guess(const struct search *s, int reach, float *low, float *high)
{
    const struct logit_list *const list = &s->list;
    const struct draw *const d = s->d;
    float z[DRAW_SAMPLE];
    float sorted[DRAW_SAMPLE];
    int32_t order[DRAW_SAMPLE];
    for (int i = 0; i < DRAW_SAMPLE; i++) {
        z[i] = list->z[(int64_t)list->n * i / DRAW_SAMPLE];
    }
    d->simd->select(order, sorted, z, DRAW_SAMPLE, DRAW_SAMPLE, &d->scratch.select);
    double after = (list->mass - (s->goal - s->above)) * (double)DRAW_SAMPLE / list->n;
    int at = DRAW_SAMPLE;
    do {
        at--;
        after -= weight(list, (int)((int64_t)list->n * order[at] / DRAW_SAMPLE));
    } while (at > 0 && after >= 0);
    *high = at >= reach ? sorted[at - reach] : *high;
    *low = at + reach < DRAW_SAMPLE ? sorted[at + reach] : *low;
}

/* Makes list what lies between low and high of list, or of best where that tells more. */
static void narrow(struct search *s, int reach)
{
    float low = s->low;
    float high = s->high;
    guess(s, reach, &low, &high);
    const struct logit_room *const room = room_of(s->d, s->best);
    struct logit_list list;
    double above = s->above + s->d->simd->logit_pick(&list, room, &s->list, low, high);
    const bool is_before = high < s->high && above >= s->goal;
    const bool is_after = low > s->low && above + list.mass < s->goal;
    s->low = is_before ? nextafterf(high, INFINITY) : is_after ? s->low : low;
    s->high = is_before ? s->high : is_after ? nextafterf(low, -INFINITY) : high;
    if (is_before || is_after) {
        above = s->d->simd->logit_pick(&list, room, s->best, s->low, s->high);
    }
    s->list = list;
    s->above = above;
    if (s->high == INFINITY) { /* nothing above: later searches need no others than these */
        *s->best = list;
    }
}

/* The place within a list of equal logits. */
static struct place place_of_equal(const struct search *s)
{
    const double each = weight(&s->list, 0);
    if (each <= 0) {
        return (struct place){.n_equal = 0};
    }
    const double n = fmax(1, fmin(ceil((s->goal - s->above) / each), s->list.n));
    return (struct place){s->list.z[0], (int)n, s->above + n * each};
}

/* The place within a list no longer than a sample; if rounding leaves the goal unreached, the last
 * token that weighs something. n_equal is 0 if none does. */
static struct place place_of_few(const struct search *s)
{
    float sorted[DRAW_SAMPLE];
    int32_t order[DRAW_SAMPLE];
    s->d->simd->select(order, sorted, s->list.z, s->list.n, s->list.n, &s->d->scratch.select);
    struct place place = {.mass = s->above};
    for (int i = 0; i < s->list.n && (place.n_equal == 0 || place.mass < s->goal); i++) {
        const double more = weight(&s->list, order[i]);
        if (more > 0) {
            place.n_equal = sorted[i] == place.z ? place.n_equal + 1 : 1;
            place.z = sorted[i];
            place.mass += more;
        }
    }
    return place;
}

/* The first place of best whose mass is at least goal, where 0 < goal <= best's own mass but for
 * rounding. best then holds the tokens that may come before the place, and a few more. */
static struct place find_place(const struct draw *d, struct logit_list *best, double goal)
{
    struct search s = {
        .d = d, .best = best, .list = *best, .low = -INFINITY, .high = INFINITY, .goal = goal};
    int reach = REACH;
    while (s.list.n > DRAW_SAMPLE && s.low < s.high) {
        const int n = s.list.n;
        narrow(&s, reach);
        /* equal logits do not split: in the end try one logit, which is left out or is the place */
        reach = s.list.n > n / 2 ? reach / 2 : REACH;
    }
    return s.list.n > DRAW_SAMPLE ? place_of_equal(&s) : place_of_few(&s);
}

/* ---- filters ----------------------------------------------------------------------------------*/

/* Leaves the tokens with z >= low in best. */
static void keep_from(const struct draw *d, struct logit_list *best, float low)
{
    struct logit_list kept;
    (void)d->simd->logit_pick(&kept, room_of(d, best), best, low, INFINITY);
    *best = kept;
}

/* Leaves the k best tokens in best. */
static void keep_top_k(const struct draw *d, struct logit_list *best, int k)
{
    const struct place last = find_place(d, best, k);
    float *const z = room_of(d, best)->z;
    keep_from(d, best, nextafterf(last.z, INFINITY));
    for (int i = 0; i < last.n_equal; i++) {
        z[best->n++] = last.z;
    }
}

/* The smallest logit with a share of at least min_p. */
static float least_logit(const struct draw *d)
{
    int64_t below = key_of(-INFINITY);
    int64_t least = key_of(d->max);
    while (least - below > 1) {
        const int64_t middle = below + (least - below) / 2;
        const bool is_kept =
            share_of(d, number_of_key((int32_t)middle)) >= (double)d->params->min_p;
        *(is_kept ? &least : &below) = middle;
    }
    return number_of_key((int32_t)least);
}

/* Fills in the tokens' probabilities. */
static void weigh(const struct draw *d, struct logit_list *best)
{
    best->is_weighed = true;
    best->mass = d->simd->logit_shares(best->share, best->z, d->next, best->n, d->max,
                                       1.0f / d->params->temperature);
}

int32_t cpu_draw_by_rank(const struct draw *d)
{
    const struct sample_params *const p = d->params;
    struct logit_list best = {
        .z = d->z, .share = d->scratch.share, .n = d->n_vocab, .mass = d->n_vocab};
    if (p->top_k > 0 && p->top_k < d->n_vocab) {
        keep_top_k(d, &best, p->top_k);
    }
    double total = INFINITY; /* the total is of what top_k keeps, if top_p needs it */
    if (p->top_p < 1) {
        weigh(d, &best);
        total = best.mass;
    }
    if (p->min_p > 0) {
        keep_from(d, &best, least_logit(d));
    }
    if (p->top_p >= 1) {
        weigh(d, &best);
    }
    struct place end = {-INFINITY, best.n, best.mass};
    if (best.mass > (double)p->top_p * total) {
        end = find_place(d, &best, (double)p->top_p * total);
    }
    /* the draw needs more than u of the mass, find_place finds at least that much */
    const double goal = nextafter(p->u * end.mass, (double)INFINITY);
    const struct place drawn = find_place(d, &best, goal);
    if (end.n_equal == 0 || drawn.n_equal == 0) {
        return NOT_DRAWN;
    }
    /* beyond by rounding alone */
    const bool is_beyond = drawn.z < end.z || (drawn.z == end.z && drawn.n_equal > end.n_equal);
    const struct place *const at = is_beyond ? &end : &drawn;
    return d->simd->logit_find(d->z, d->n_vocab, at->z, at->n_equal - 1);
}
