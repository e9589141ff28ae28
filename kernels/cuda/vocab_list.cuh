/* Rows of logits on the GPU: lists of the best tokens, and the search for what does not fit in a
 * list.
 *
 * The k best tokens (vocab_best): the k-th largest of the groups' maxima is a lower bound of the
 * k-th largest logit, and a sharp one while k is small against the number of groups. What is above
 * it is collected in shared memory (55 elements for k = 50 of 60 000 normally distributed ones) and
 * sorted. Where that does not fit, vocab_find searches: it cuts a range of elements in VOCAB_LIST
 * parts, summing a measure (how many, how much probability) of each in integers, until the part
 * that holds the goal fits in shared memory, as it nearly always does at once. Integers make every
 * sum exact, whatever its order. */
#ifndef KERNELS_CUDA_VOCAB_LIST_CUH
#define KERNELS_CUDA_VOCAB_LIST_CUH

#include "kernels/cuda/vocab.cuh"

namespace
{

/* ---- lists ---------------------------------------------------------------------------------- */

/* Calls visit(element, logit) for the elements of all groups that hold one of this key or larger:
 * all of those, and some others. A warp takes every VOCAB_WARPS-th group; n logits are under way at
 * once. */
template <int n, class Visit>
__device__ __forceinline__ void vocab_visit(const struct vocab_row &row, uint32_t key, Visit visit)
{
    const int warp = static_cast<int>(threadIdx.x) / VOCAB_WARP;
#pragma unroll 1
    for (int first = 0; first < row.n_group; first += VOCAB_BLOCK) {
        const int mine = first + vocab_lane() * VOCAB_WARPS + warp;
        const bool is_wanted = mine < row.n_group && vocab_key(row.group_max[mine]) >= key;
        unsigned wanted = __ballot_sync(VOCAB_ALL_LANES, is_wanted);
#pragma unroll 1
        for (; wanted != 0; wanted &= wanted - 1) {
            const int group = first + (__ffs(static_cast<int>(wanted)) - 1) * VOCAB_WARPS + warp;
            const int first_id = group * VOCAB_GROUP + vocab_lane();
#pragma unroll 1
            for (int i = 0; i < VOCAB_LANE; i += n) {
                float v[n];
#pragma unroll
                for (int j = 0; j < n; j++) {
                    const int id = first_id + (i + j) * VOCAB_WARP;
                    v[j] = id < row.n ? row.z[id] : 0;
                }
#pragma unroll
                for (int j = 0; j < n; j++) {
                    const int id = first_id + (i + j) * VOCAB_WARP;
                    if (id < row.n) {
                        visit(vocab_element_of(v[j], id, row.n), v[j]);
                    }
                }
            }
        }
    }
}

/* Puts the elements that want(element, logit) into the list, in any order, of the groups that hold
 * one of this key or larger, and returns how many there are: more than VOCAB_LIST if they do not
 * fit. */
template <class Want>
__device__ __forceinline__ int vocab_collect_if(const struct vocab_row &row, uint32_t key,
                                                Want want)
{
    struct vocab_shared *const s = vocab_shared_here();
    if (threadIdx.x == 0) {
        s->n_list = 0;
    }
    __syncthreads();
    vocab_visit<VOCAB_LANE>(row, key, [&](vocab_element e, float z) {
        if (want(e, z)) {
            const uint32_t at = atomicAdd(&s->n_list, 1u);
            if (at < VOCAB_LIST) {
                s->list[at] = e;
            }
        }
    });
    __syncthreads();
    const int n = static_cast<int>(s->n_list);
    __syncthreads();
    return n;
}

/* The same of the elements last .. first. */
__device__ inline VOCAB_CALLED int vocab_collect(struct vocab_row row, vocab_element last,
                                                 vocab_element first)
{
    return vocab_collect_if(row, vocab_element_key(last),
                            [=](vocab_element e, float) { return e >= last && e <= first; });
}

/* Sorts the first n <= VOCAB_LIST of the list, the largest first: a bitonic network. Where a warp's
 * 32 pairs stay within 64 elements of its own, the warp alone keeps step. */
__device__ inline VOCAB_CALLED void vocab_sort(int n)
{
    struct vocab_shared *const s = vocab_shared_here();
    int size = 2;
    while (size < n) {
        size *= 2;
    }
    for (int i = n + static_cast<int>(threadIdx.x); i < size; i += VOCAB_BLOCK) {
        s->list[i] = 0;
    }
    __syncthreads();
#pragma unroll 1
    for (int run = 2; run <= size; run *= 2) {
#pragma unroll 1
        for (int apart = run / 2; apart > 0; apart /= 2) {
            for (int t = static_cast<int>(threadIdx.x); t < size / 2; t += VOCAB_BLOCK) {
                const int i = 2 * t - (t & (apart - 1));
                const vocab_element a = s->list[i];
                const vocab_element b = s->list[i + apart];
                if ((a < b) == ((i & run) == 0)) {
                    s->list[i] = b;
                    s->list[i + apart] = a;
                }
            }
            const int next = apart > 1 ? apart / 2 : run;
            if (apart > VOCAB_WARP || next > VOCAB_WARP) {
                __syncthreads();
            } else {
                __syncwarp();
            }
        }
    }
    __syncthreads();
}

/* A measure of elements: each counts 1. */
struct vocab_count {
    __device__ unsigned long long operator()(uint32_t) const
    {
        return 1;
    }
};

/* An element and the sum of the measure up to it, itself included. */
struct vocab_border {
    vocab_element element;
    unsigned long long sum;
    bool is_found;
};

/* The first of the n sorted elements of the list at which the sum of measure(key) exceeds goal. */
template <class Measure>
__device__ VOCAB_CALLED struct vocab_border vocab_cross(int n, unsigned long long goal,
                                                        Measure measure)
{
    struct vocab_shared *const s = vocab_shared_here();
    constexpr int each = VOCAB_LIST / VOCAB_BLOCK;
    const int n_each = (n + VOCAB_BLOCK - 1) / VOCAB_BLOCK;
    const int first = static_cast<int>(threadIdx.x) * n_each;
    unsigned long long m[each];
    unsigned long long sum = 0;
#pragma unroll
    for (int i = 0; i < each; i++) {
        const bool is_mine = i < n_each && first + i < n;
        m[i] = is_mine ? measure(vocab_element_key(s->list[first + i])) : 0;
        sum += m[i];
    }
    if (threadIdx.x == 0) {
        s->border = VOCAB_LAST;
        s->border_sum = 0;
    }
    sum = vocab_block_before(sum);
#pragma unroll
    for (int i = 0; i < each; i++) {
        sum += m[i];
        if (m[i] > 0 && sum > goal && sum - m[i] <= goal) {
            s->border = s->list[first + i];
            s->border_sum = sum;
        }
    }
    __syncthreads();
    const struct vocab_border border = {s->border, s->border_sum, s->border != VOCAB_LAST};
    __syncthreads();
    return border;
}

/* How a range of elements is cut in VOCAB_LIST parts, the first elements first: by equal steps of
 * the logit, or where those are not finite, or equal, of the element. */
struct vocab_cut {
    vocab_element first, width;
    float max, rate; /* parts a unit of the logit; 0: by the element */
};

__device__ __forceinline__ struct vocab_cut vocab_cut_of(vocab_element last, vocab_element first)
{
    const float max = vocab_logit(vocab_element_key(first));
    const float span = max - vocab_logit(vocab_element_key(last));
    const bool is_by_logit = span > 1e-30f && span < 1e30f; /* no for NaN */
    return {first, (first - last) / VOCAB_LIST + 1, max,
            is_by_logit ? static_cast<float>(VOCAB_LIST) / span : 0};
}

__device__ __forceinline__ int vocab_part(const struct vocab_cut &cut, vocab_element e, float z)
{
    const int part = cut.rate > 0 ? static_cast<int>((cut.max - z) * cut.rate)
                                  : static_cast<int>((cut.first - e) / cut.width);
    return part < VOCAB_LIST ? part : VOCAB_LIST - 1;
}

/* The part at which the sum of the parts exceeds goal, or the last that has any; before: the sum of
 * those before it. */
__device__ __forceinline__ int vocab_part_at(unsigned long long goal, unsigned long long *before)
{
    struct vocab_shared *const s = vocab_shared_here();
    constexpr int each = VOCAB_LIST / VOCAB_BLOCK;
    const int first = static_cast<int>(threadIdx.x) * each;
    unsigned long long sum = 0;
#pragma unroll
    for (int i = 0; i < each; i++) {
        sum += s->part[first + i];
    }
    const unsigned long long total = vocab_block_sum(sum);
    goal = goal < total ? goal : total - 1;
    sum = vocab_block_before(sum);
#pragma unroll
    for (int i = 0; i < each; i++) {
        const unsigned long long own = s->part[first + i];
        if (sum <= goal && goal < sum + own) {
            s->border = static_cast<vocab_element>(first + i);
            s->border_sum = sum;
        }
        sum += own;
    }
    __syncthreads();
    const int part = static_cast<int>(s->border);
    *before = s->border_sum;
    __syncthreads();
    return part;
}

/* Among the elements from last up, the first at which the sum of measure(key) exceeds goal; if none
 * is, the last that has a measure. Some element must have one. The sums must fit in 64 bits. again:
 * of a row, last and measure as in the call before, whose sums may serve once more. */
template <class Measure>
__device__ VOCAB_CALLED struct vocab_border vocab_find(struct vocab_row row, vocab_element last,
                                                       unsigned long long goal, Measure measure,
                                                       bool again)
{
    struct vocab_shared *const s = vocab_shared_here();
    uint32_t max_key = 0;
    for (int g = static_cast<int>(threadIdx.x); g < row.n_group; g += VOCAB_BLOCK) {
        const uint32_t key = vocab_key(row.group_max[g]);
        max_key = key > max_key ? key : max_key;
    }
    vocab_element first = vocab_last_of(vocab_block_max(max_key)) | 0xffffffffull;
    unsigned long long before = 0; /* of the elements before first */
    for (bool is_whole = true;; is_whole = again = false) {
        const struct vocab_cut cut = vocab_cut_of(last, first);
        const auto is_in = [=](vocab_element e) { return e >= last && e <= first; };
        if (!again || !s->has_parts) {
            again = false;
            for (int i = static_cast<int>(threadIdx.x); i < VOCAB_LIST; i += VOCAB_BLOCK) {
                s->part[i] = 0;
            }
            __syncthreads();
            vocab_visit<VOCAB_LANE>(row, vocab_element_key(last), [&](vocab_element e, float z) {
                const unsigned long long m = is_in(e) ? measure(vocab_element_key(e)) : 0;
                if (m > 0) {
                    (void)atomicAdd(&s->part[vocab_part(cut, e, z)], m);
                }
            });
            if (threadIdx.x == 0) {
                s->has_parts = is_whole;
            }
            __syncthreads();
        }
        unsigned long long above = 0;
        const int part = vocab_part_at(goal - before, &above);
        vocab_element lowest = VOCAB_FIRST; /* of the part, as this thread sees it */
        vocab_element highest = VOCAB_LAST;
        const int n = vocab_collect_if(row, vocab_element_key(last), [&](vocab_element e, float z) {
            const bool is_wanted = is_in(e) && vocab_part(cut, e, z) == part;
            lowest = is_wanted && e < lowest ? e : lowest;
            highest = is_wanted && e > highest ? e : highest;
            return is_wanted;
        });
        before += above;
        if (n <= VOCAB_LIST) {
            vocab_sort(n);
            break;
        }
        first = vocab_block_max(highest);
        last = ~vocab_block_max(~lowest);
    }
    const int n = static_cast<int>(s->n_list);
    /* past all that has a measure the goal is the last that has */
    unsigned long long sum = 0;
    for (int i = static_cast<int>(threadIdx.x); i < n; i += VOCAB_BLOCK) {
        sum += measure(vocab_element_key(s->list[i]));
    }
    const unsigned long long all = vocab_block_sum(sum);
    const unsigned long long left = goal - before < all ? goal - before : all - 1;
    struct vocab_border border = vocab_cross(n, left, measure);
    border.sum += before;
    return border;
}

/* Puts the k best elements into the list, sorted, and perhaps some that follow them; returns how
 * many. 1 <= k <= min(n, VOCAB_LIST). */
__device__ inline VOCAB_CALLED int vocab_best(struct vocab_row row, int k)
{
    struct vocab_shared *const s = vocab_shared_here();
    const int n_max = row.n_group < VOCAB_LIST ? row.n_group : VOCAB_LIST;
    uint32_t key = 0; /* k elements at least are of this key or larger */
    if (k <= n_max) {
        for (int g = static_cast<int>(threadIdx.x); g < n_max; g += VOCAB_BLOCK) {
            s->list[g] = vocab_last_of(vocab_key(row.group_max[g]));
        }
        __syncthreads();
        vocab_sort(n_max);
        key = vocab_element_key(s->list[k - 1]);
        __syncthreads();
    }
    int n = VOCAB_LIST + 1;
    if (k <= n_max || row.n <= VOCAB_LIST) {
        n = vocab_collect(row, vocab_last_of(key), VOCAB_FIRST);
    }
    if (n > VOCAB_LIST) {
        const struct vocab_border border = vocab_find(
            row, VOCAB_LAST, static_cast<unsigned long long>(k - 1), vocab_count{}, false);
        n = vocab_collect(row, border.element, VOCAB_FIRST);
    }
    vocab_sort(n);
    return n;
}

} // namespace

#endif
