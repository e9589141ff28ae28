/* Drawing the next token of a row that asks for one, as struct sample_params in step.h says: two of
 * the steps of outputs.cu's kernel.
 *
 * draw_group, by the blocks that share a row, applies the row's adjustments and allow list, to a
 * copy if there are any, and leaves each group's largest logit and sum of shares. draw_token, by
 * the last of these blocks, merges them and draws:
 *   - temperature 0: the first group with the largest logit, the first id in it;
 *   - no filter: the group, then the token, at which the sum of shares in id order exceeds u;
 *   - filters: the best tokens are listed in order (vocab_list.cuh), first about as many as two
 *     thirds of the groups, then about five times the groups, and the list is cut and drawn from.
 *     Only a distribution so flat that it keeps more than VOCAB_LIST tokens is searched instead of
 *     sorted.
 *
 * Shares are summed as integers, in units of 2^-s, s so large that a row of ones just fits: exact
 * in any order, and the first sum that exceeds u times the whole always exists. Every filter keeps
 * a prefix of the tokens in order, so prefixes are compared by their sums, and the shortest has the
 * smallest. */
#ifndef KERNELS_CUDA_SAMPLE_CUH
#define KERNELS_CUDA_SAMPLE_CUH

#include "kernels/cuda/vocab_list.cuh"

namespace
{

/* By group: the largest logit, NaN if one of the group is NaN or +infinity, and the sum of the
 * shares relative to the group's largest. */
struct draw_parts {
    float *max, *sum;
};

__device__ __forceinline__ bool has_lists(const struct sample_params &p)
{
    return p.n_adjust > 0 || p.n_allow > 0;
}

__device__ __forceinline__ bool cuts_by_rank(const struct sample_params &p, int n_vocab)
{
    return p.top_k > 0 && p.top_k < n_vocab;
}

/* ---- by group ------------------------------------------------------------------------------- */

/* As in kernels/ref/sample.c. */
__device__ __forceinline__ float adjusted(float z, const struct sample_adjust &a,
                                          const struct sample_params &p)
{
    if (a.n_prompt > 0 || a.n_generated > 0) {
        z = z > 0 ? z / p.repetition : z * p.repetition;
    }
    const float is_present = a.n_generated > 0 ? 1.0f : 0.0f;
    z -= p.presence * is_present + p.frequency * static_cast<float>(a.n_generated);
    return z + a.bias;
}

/* Writes the ids first .. end-1 of the adjusted row to copy; the block's work. */
__device__ void adjust_ids(float *copy, const float *z, const struct step_view *view,
                           const struct sample_params &p, int first, int end)
{
    const int thread = static_cast<int>(threadIdx.x);
    for (int id = first + thread; id < end; id += VOCAB_BLOCK) {
        copy[id] = p.n_allow == 0 ? z[id] : -INFINITY;
    }
    __syncthreads();
    for (int i = thread; i < p.n_allow; i += VOCAB_BLOCK) {
        const int id = view->allow[p.allow_first + i];
        if (id >= first && id < end) { /* by an exchange, as a token may be in the list twice */
            atomicExch(copy + id, z[id]);
        }
    }
    __syncthreads();
    for (int i = thread; i < p.n_adjust; i += VOCAB_BLOCK) {
        const struct sample_adjust *const a = view->adjust + p.adjust_first + i;
        const int id = a->token;
        if (id >= first && id < end) {
            copy[id] = adjusted(copy[id], *a, p);
        }
    }
    __syncthreads();
}

/* A group of the row, of which the warp has the logits v, the largest of them max; copy: the
 * adjusted row where it has lists. */
__device__ __forceinline__ void draw_group(const struct draw_parts &parts, const float *copy, int n,
                                           int group, const float (&v)[VOCAB_LANE], float max,
                                           bool is_broken, const struct sample_params &p)
{
    float share[VOCAB_LANE];
    if (has_lists(p)) {
        vocab_load(share, copy, n, group, vocab_is_aligned(copy));
        max = vocab_group_max(share);
    } else {
#pragma unroll
        for (int i = 0; i < VOCAB_LANE; i++) {
            share[i] = v[i];
        }
    }
    if (vocab_lane() == 0) {
        parts.max[group] = is_broken ? NAN : max;
    }
    if (p.temperature == 0 || cuts_by_rank(p, n)) { /* nobody asks for the sum */
        return;
    }
    float sum = 0;
    if (fabsf(max) < INFINITY) {
        const struct vocab_share scale = vocab_share_of(max, p.temperature);
#pragma unroll
        for (int i = 0; i < VOCAB_LANE; i++) {
            share[i] = vocab_share(scale, share[i]);
        }
        sum = vocab_group_sum(share);
    }
    if (vocab_lane() == 0) {
        parts.sum[group] = sum;
    }
}

/* ---- by row --------------------------------------------------------------------------------- */

/* One row that is being drawn from, its largest logit finite, its temperature above 0. */
struct draw {
    struct vocab_row row;
    const float *group_sum;
    struct vocab_share share;
    float unit; /* 2^s: what a share of 1 counts */
    double u;
    float temperature, top_p, min_p, typical_p;
    int top_k; /* 0 if it cuts nothing */
};

enum { NOT_DRAWN = -1 };

__device__ __forceinline__ unsigned long long mass_of(const struct draw &d, float z)
{
    return static_cast<unsigned long long>(vocab_share(d.share, z) * d.unit);
}

/* That as a measure of elements. */
struct mass {
    struct vocab_share share;
    float unit;
    __device__ unsigned long long operator()(uint32_t key) const
    {
        return static_cast<unsigned long long>(vocab_share(share, vocab_logit(key)) * unit);
    }
};

/* What u leaves before the drawn token, of the sum of what is kept: the first sum above it is the
 * token's. */
__device__ __forceinline__ unsigned long long goal_of(double u, unsigned long long kept)
{
    const unsigned long long goal = static_cast<unsigned long long>(u * static_cast<double>(kept));
    return goal < kept ? goal : kept - 1;
}

__device__ __forceinline__ unsigned long long group_mass(const struct draw &d, int group)
{
    const double share = static_cast<double>(vocab_share(d.share, d.row.group_max[group]));
    return static_cast<unsigned long long>(share * static_cast<double>(d.group_sum[group]) *
                                           static_cast<double>(d.unit));
}

__device__ unsigned long long total_mass(const struct draw &d)
{
    unsigned long long mass = 0;
    for (int g = static_cast<int>(threadIdx.x); g < d.row.n_group; g += VOCAB_BLOCK) {
        mass += group_mass(d, g);
    }
    return vocab_block_sum(mass);
}

/* The token of a group at which the sum of its shares in id order exceeds part of the whole; each
 * warp finds it for itself. Here a lane holds consecutive ids. */
__device__ int draw_in_group(const struct draw &d, int group, double part)
{
    const float max = d.row.group_max[group];
    const struct vocab_share share = vocab_share_of(max, d.temperature);
    const int first = group * VOCAB_GROUP + vocab_lane() * VOCAB_LANE;
    unsigned long long mass[VOCAB_LANE];
    unsigned long long sum = 0;
#pragma unroll
    for (int i = 0; i < VOCAB_LANE; i++) {
        const float z = first + i < d.row.n ? d.row.z[first + i] : -INFINITY;
        mass[i] = static_cast<unsigned long long>(vocab_share(share, z) * d.unit);
        sum += mass[i];
    }
    const unsigned long long own = sum;
#pragma unroll
    for (int lanes = 1; lanes < VOCAB_WARP; lanes *= 2) {
        const unsigned long long other =
            __shfl_up_sync(VOCAB_ALL_LANES, sum, static_cast<unsigned>(lanes));
        sum += vocab_lane() >= lanes ? other : 0;
    }
    const unsigned long long goal =
        goal_of(part, __shfl_sync(VOCAB_ALL_LANES, sum, VOCAB_WARP - 1));
    unsigned long long before = sum - own;
    uint32_t id = UINT32_MAX;
#pragma unroll
    for (int i = 0; i < VOCAB_LANE; i++) {
        id = before <= goal && goal < before + mass[i] ? static_cast<uint32_t>(first + i) : id;
        before += mass[i];
    }
    return static_cast<int>(__reduce_min_sync(VOCAB_ALL_LANES, id));
}

/* Draws among all tokens in id order. */
__device__ int draw_by_id(const struct draw &d)
{
    struct vocab_shared *const s = vocab_shared_here();
    unsigned long long goal = goal_of(d.u, total_mass(d));
    for (int first = 0; first < d.row.n_group; first += VOCAB_BLOCK) {
        const int group = first + static_cast<int>(threadIdx.x);
        const unsigned long long mass = group < d.row.n_group ? group_mass(d, group) : 0;
        const unsigned long long before = vocab_block_before(mass);
        if (threadIdx.x == VOCAB_BLOCK - 1) {
            s->sum[0][0] = before + mass;
        }
        const bool is_here = before <= goal && goal < before + mass;
        if (is_here) {
            s->border = static_cast<vocab_element>(group);
            s->border_sum = goal - before;
        }
        const bool is_found = __syncthreads_or(is_here) != 0;
        const int found = static_cast<int>(s->border);
        const unsigned long long rest = s->border_sum;
        const unsigned long long sum = s->sum[0][0];
        __syncthreads();
        if (is_found) {
            const double whole = static_cast<double>(group_mass(d, found));
            return draw_in_group(d, found, static_cast<double>(rest) / whole);
        }
        goal -= sum;
    }
    return NOT_DRAWN;
}

/* The sum of what is left of the elements from last up by min_p. */
__device__ unsigned long long mass_from(const struct draw &d, vocab_element last, float min_p)
{
    unsigned long long mass = 0;
    vocab_visit<2>(d.row, vocab_element_key(last), [&](vocab_element e, float z) {
        if (e >= last && vocab_share(d.share, z) >= min_p) {
            mass += mass_of(d, z);
        }
    });
    return vocab_block_sum(mass);
}

/* The sum that top_p's prefix exceeds before its last token comes, of what top_k keeps. */
__device__ __forceinline__ unsigned long long top_p_goal(const struct draw &d,
                                                         unsigned long long total)
{
    const double reach = ceil(static_cast<double>(d.top_p) * static_cast<double>(total));
    return reach < 1 ? 0 : static_cast<unsigned long long>(reach) - 1;
}

/* Draws from the first n elements, sorted in the list, or returns NOT_DRAWN if the filters keep
 * more than those; is_all: they do not. total: of what top_k keeps, if it does not cut. */
__device__ VOCAB_CALLED int draw_from_list(const struct draw &d, int n, bool is_all,
                                           unsigned long long total)
{
    n = d.top_k > 0 && d.top_k < n ? d.top_k : n;
    const struct mass measure = {d.share, d.unit};
    unsigned long long sum[2] = {0, 0}; /* of all, and of what min_p leaves */
    for (int i = static_cast<int>(threadIdx.x); i < n; i += VOCAB_BLOCK) {
        const float z = vocab_logit(vocab_element_key(vocab_shared_here()->list[i]));
        const unsigned long long mass = mass_of(d, z);
        sum[0] += mass;
        sum[1] += vocab_share(d.share, z) >= d.min_p ? mass : 0;
    }
    vocab_block_sums(sum);
    unsigned long long kept = sum[1];
    if (d.top_p < 1) {
        const unsigned long long goal = top_p_goal(d, d.top_k > 0 ? sum[0] : total);
        const struct vocab_border border = vocab_cross(n, goal, measure);
        kept = border.is_found && border.sum < kept ? border.sum : kept;
        is_all = is_all || border.is_found;
    }
    if (!is_all) {
        return NOT_DRAWN;
    }
    const struct vocab_border drawn = vocab_cross(n, goal_of(d.u, kept), measure);
    return vocab_element_id(drawn.element, d.row.n);
}

/* The lowest key that the draw can depend on: below it shares count nothing, or min_p leaves
 * nothing. */
__device__ uint32_t lowest_key(const struct draw &d)
{
    /* 2^-62 is exp(-43): no share of less counts. Rounding the bound does no harm: no logit lies
     * between it and its neighbour. */
    float x = -44.0f;
    if (d.min_p > 0 && (d.top_k == 0 || d.top_p >= 1)) { /* else top_p needs all that top_k keeps */
        x = fmaxf(x, logf(d.min_p) * 1.0001f - 0.0001f);
    }
    return vocab_key(d.share.max + d.temperature * x);
}

/* Draws from a list of the best tokens that all filters together cannot exceed, or of so many that
 * top_p ends among them; NOT_DRAWN if VOCAB_LIST are too few. */
__device__ int draw_from_best(const struct draw &d, uint32_t lowest, unsigned long long total)
{
    struct vocab_shared *const s = vocab_shared_here();
    const int n_max = d.row.n_group < VOCAB_LIST ? d.row.n_group : VOCAB_LIST;
    for (int g = static_cast<int>(threadIdx.x); g < n_max; g += VOCAB_BLOCK) {
        s->list[g] = vocab_last_of(vocab_key(d.row.group_max[g]));
    }
    __syncthreads();
    vocab_sort(n_max);
    const uint32_t few = vocab_element_key(s->list[n_max / 2]);
    const uint32_t many = vocab_element_key(s->list[n_max - 1]);
    __syncthreads();
    for (int t = 0; t < 3; t++) {
        const uint32_t bound = t == 0 ? few : t == 1 ? many : 0;
        const uint32_t key = bound > lowest ? bound : lowest;
        const int n = vocab_collect(d.row, vocab_last_of(key), VOCAB_FIRST);
        if (n > VOCAB_LIST) {
            return NOT_DRAWN;
        }
        vocab_sort(n);
        const int id = draw_from_list(d, n, key == lowest, total);
        if (id != NOT_DRAWN) {
            return id;
        }
    }
    return NOT_DRAWN;
}

/* Draws without a list of what is kept, by searching for the ends of the prefixes. */
__device__ VOCAB_CALLED int draw_by_search(const struct draw &d, uint32_t lowest,
                                           unsigned long long total)
{
    vocab_element last = VOCAB_LAST;
    if (d.top_k > 0) {
        const unsigned long long rank = static_cast<unsigned long long>(d.top_k - 1);
        last = vocab_find(d.row, VOCAB_LAST, rank, vocab_count{}, false).element;
        total = mass_from(d, last, 0);
    }
    const struct mass measure = {d.share, d.unit};
    unsigned long long kept = d.min_p > 0 ? mass_from(d, last, d.min_p) : total;
    if (d.top_p < 1) {
        const struct vocab_border border =
            vocab_find(d.row, vocab_last_of(lowest), top_p_goal(d, total), measure, false);
        kept = border.sum < kept ? border.sum : kept;
    }
    const struct vocab_border drawn =
        vocab_find(d.row, vocab_last_of(lowest), goal_of(d.u, kept), measure, d.top_p < 1);
    return vocab_element_id(drawn.element, d.row.n);
}

/* Draws among the best tokens, best first. */
__device__ int draw_by_rank(const struct draw &d)
{
    if (d.top_k > 0 && d.top_k <= VOCAB_LIST) {
        const int n = vocab_best(d.row, d.top_k);
        return draw_from_list(d, n, true, 0);
    }
    const uint32_t lowest = lowest_key(d);
    const unsigned long long total = d.top_k > 0 ? 0 : total_mass(d);
    /* Not even of the largest share would so many as a list has be enough. */
    const bool is_flat =
        d.top_p < 1 && d.min_p <= 0 && total > 0 &&
        top_p_goal(d, total) > static_cast<unsigned long long>(static_cast<double>(+VOCAB_LIST) *
                                                               static_cast<double>(d.unit));
    const int id = d.top_k > 0 || is_flat ? NOT_DRAWN : draw_from_best(d, lowest, total);
    return id != NOT_DRAWN ? id : draw_by_search(d, lowest, total);
}

/* How far a token's log-share is from its mean. */
__device__ __forceinline__ float distance_of(const struct draw &d, float z, float mean)
{
    return fabsf((z - d.share.max) / d.temperature - mean);
}

/* Draws among the tokens that typical_p leaves of those that the other filters keep. They stand
 * side by side in the order of ranks, around the mean of their log-shares; how far they reach is
 * searched for among the bits of a distance. Rare, so it takes some forty passes over the row. */
__device__ VOCAB_CALLED int draw_typical(const struct draw &d)
{
    const uint32_t lowest = lowest_key(d);
    const struct mass measure = {d.share, d.unit};
    vocab_element last = vocab_last_of(lowest);
    if (d.top_k > 0) {
        const unsigned long long rank = static_cast<unsigned long long>(d.top_k - 1);
        const vocab_element end = vocab_find(d.row, VOCAB_LAST, rank, vocab_count{}, false).element;
        last = end > last ? end : last;
    }
    if (d.top_p < 1) {
        /* where top_k does not cut, also what lies below lowest, which min_p leaves out */
        const unsigned long long total = d.top_k > 0 ? mass_from(d, last, 0) : total_mass(d);
        const vocab_element end =
            vocab_find(d.row, vocab_last_of(lowest), top_p_goal(d, total), measure, false).element;
        last = end > last ? end : last;
    }
    unsigned long long sum[2] = {0, 0}; /* of the kept shares, and of each times -log of it */
    vocab_visit<2>(d.row, vocab_element_key(last), [&](vocab_element e, float z) {
        const float share = vocab_share(d.share, z);
        if (e >= last && share >= d.min_p) {
            const float x = (d.share.max - z) / d.temperature;
            sum[0] += static_cast<unsigned long long>(share * d.unit);
            sum[1] += share > 0 ? static_cast<unsigned long long>(share * x * d.unit) : 0;
        }
    });
    vocab_block_sums(sum);
    const float mean =
        -static_cast<float>(static_cast<double>(sum[1]) / static_cast<double>(sum[0]));
    const unsigned long long wanted = static_cast<unsigned long long>(
        ceil(static_cast<double>(d.typical_p) * static_cast<double>(sum[0])));
    int below = -1; /* bits of a distance that is too small, and of one that is not */
    int enough = 0x7f7fffff;
    unsigned long long kept = sum[0];
    while (enough - below > 1) {
        const int middle = below + (enough - below) / 2;
        unsigned long long within = 0;
        vocab_visit<2>(d.row, vocab_element_key(last), [&](vocab_element e, float z) {
            const bool is_kept = e >= last && vocab_share(d.share, z) >= d.min_p;
            const bool is_near = distance_of(d, z, mean) <= __int_as_float(middle);
            within += is_kept && is_near ? mass_of(d, z) : 0;
        });
        within = vocab_block_sum(within);
        kept = within >= wanted ? within : kept;
        *(within >= wanted ? &enough : &below) = middle;
    }
    unsigned long long above = 0;
    vocab_visit<2>(d.row, vocab_element_key(last), [&](vocab_element e, float z) {
        const bool is_better = (z - d.share.max) / d.temperature > mean;
        if (e >= last && is_better && distance_of(d, z, mean) > __int_as_float(enough)) {
            above += mass_of(d, z);
        }
    });
    above = vocab_block_sum(above);
    const struct vocab_border drawn =
        vocab_find(d.row, vocab_last_of(lowest), above + goal_of(d.u, kept), measure, false);
    return vocab_element_id(drawn.element, d.row.n);
}

/* The lowest id of a group whose logit is at least as good as key says; UINT32_MAX: one that is
 * no number to draw by. */
__device__ int first_in_group(const float *z, int n, int group, uint32_t key)
{
    float v[VOCAB_LANE];
    vocab_load(v, z, n, group, vocab_is_aligned(z));
    uint32_t id = static_cast<uint32_t>(n - 1);
#pragma unroll
    for (int i = VOCAB_LANE - 1; i >= 0; i--) {
        const bool is_it = key == UINT32_MAX ? !(v[i] < INFINITY) : vocab_key(v[i]) >= key;
        const uint32_t own = static_cast<uint32_t>(vocab_id(group, i));
        id = is_it && own < id ? own : id;
    }
    return static_cast<int>(__reduce_min_sync(VOCAB_ALL_LANES, id));
}

/* The row's lowest id with the largest logit; the lowest allowed one if all are at -infinity. */
__device__ int best_id(const struct vocab_row &row, uint32_t max_key, const int32_t *allow,
                       int n_allow)
{
    if (max_key == vocab_key(-INFINITY) && n_allow > 0) {
        uint32_t id = UINT32_MAX;
        for (int i = static_cast<int>(threadIdx.x); i < n_allow; i += VOCAB_BLOCK) {
            const uint32_t own = static_cast<uint32_t>(allow[i]);
            id = own < id ? own : id;
        }
        return static_cast<int>(vocab_block_min(id));
    }
    uint32_t group = UINT32_MAX;
    for (int g = static_cast<int>(threadIdx.x); g < row.n_group && group == UINT32_MAX;
         g += VOCAB_BLOCK) {
        group = vocab_key(row.group_max[g]) == max_key ? static_cast<uint32_t>(g) : group;
    }
    group = vocab_block_min(group);
    return first_in_group(row.z, row.n, static_cast<int>(group), max_key);
}

__device__ struct draw draw_of(const struct vocab_row &row, const float *group_sum, float max,
                               const struct sample_params &p)
{
    const int bits = row.n > 1 ? 32 - __clz(row.n - 1) : 0; /* n shares of 1 sum up to 2^62 */
    struct draw d = {};
    d.row = row;
    d.group_sum = group_sum;
    d.share = vocab_share_of(max, p.temperature);
    d.unit = static_cast<float>(1ull << (62 - bits));
    d.u = p.u;
    d.temperature = p.temperature;
    d.top_p = p.top_p;
    d.min_p = p.min_p;
    d.typical_p = p.typical_p;
    d.top_k = cuts_by_rank(p, row.n) ? p.top_k : 0;
    return d;
}

/* Draws a token of the row of logits raw, or of their adjusted copy where the row has lists. */
__device__ __forceinline__ int draw_token(const struct draw_parts &parts, const float *raw,
                                          const float *copy, int n, int n_group,
                                          const struct step_view *view,
                                          const struct sample_params &p)
{
    const struct vocab_row row = {has_lists(p) ? copy : raw, parts.max, n, n_group};
    uint32_t max_key = 0;
    uint32_t broken = UINT32_MAX;
    for (int g = static_cast<int>(threadIdx.x); g < row.n_group; g += VOCAB_BLOCK) {
        const float max = row.group_max[g];
        const bool is_broken = isnan(max);
        broken = is_broken && broken == UINT32_MAX ? static_cast<uint32_t>(g) : broken;
        max_key = !is_broken && vocab_key(max) > max_key ? vocab_key(max) : max_key;
    }
    max_key = vocab_block_max(max_key);
    const float max = vocab_logit(max_key);
    if (__syncthreads_or(broken != UINT32_MAX) != 0) {
        return first_in_group(raw, row.n, static_cast<int>(vocab_block_min(broken)), UINT32_MAX);
    }
    if (p.temperature == 0 || !(fabsf(max) < INFINITY)) {
        return best_id(row, max_key, view->allow + p.allow_first, p.n_allow);
    }
    const struct draw d = draw_of(row, parts.sum, max, p);
    const bool is_filtered = p.top_k > 0 || p.top_p < 1 || p.min_p > 0;
    return p.typical_p > 0 ? draw_typical(d) : is_filtered ? draw_by_rank(d) : draw_by_id(d);
}

} // namespace

#endif
