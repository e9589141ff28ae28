/* What XLM's options do after a memory's search: slots permuted or wrapped, and scores made to
 * weights by more than a softmax (XLM's HashingMemory; weights of the plain memory come out of
 * pkm_search.cu itself).
 *
 * A warp per row and head sweeps its elements in lanes; sums are a chain per lane and then a fixed
 * tree. A few microseconds: bound by launch latency; the bytes are 8·n_head·k_top per row. Share of
 * the bound reached: not measured yet. */
#include "kernels/cuda/rows.cuh"

namespace
{

struct rescore_args {
    struct tensor slots, weights, slot_map;
    struct pkm_rescore rescore;
};

/* Element j of k that the lanes hold: lane j % 32 has it in memory. */
__device__ __forceinline__ float warp_element(const float *weight, int j)
{
    const int owner = j % WARP;
    const float mine = static_cast<int>(threadIdx.x % WARP) == owner ? weight[j] : 0;
    return __shfl_sync(0xffffffffu, mine, owner);
}

/* What is subtracted of the k weights, best first. */
__device__ float subtrahend(const float *weight, int k, enum pkm_subtract subtract)
{
    if (subtract == PKM_SUBTRACT_NONE) {
        return 0;
    }
    if (subtract != PKM_SUBTRACT_MEAN) {
        return warp_element(weight, subtract == PKM_SUBTRACT_MIN ? k - 1 : k - 1 - (k - 1) / 2);
    }
    float sum = 0;
    for (int j = threadIdx.x % WARP; j < k; j += WARP) {
        sum += weight[j];
    }
    return warp_sum(sum) / static_cast<float>(k);
}

/* The weights of one row and head. A lane reads only what it wrote itself. */
__device__ void rescore_weights(float *weight, const struct pkm_rescore *r)
{
    const int lane = threadIdx.x % WARP;
    for (int j = lane; j < r->k_top; j += WARP) {
        const float score = weight[j] / r->temperature;
        weight[j] = r->relu && score < 0 ? 0 : score;
    }
    if (r->softmax) {
        const float best = warp_element(weight, 0);
        float sum = 0;
        for (int j = lane; j < r->k_top; j += WARP) {
            weight[j] = expf(weight[j] - best);
            sum += weight[j];
        }
        const float total = warp_sum(sum);
        for (int j = lane; j < r->k_top; j += WARP) {
            weight[j] /= total;
        }
    }
    const float less = subtrahend(weight, r->k_top, r->subtract);
    float sum = 0;
    for (int j = lane; j < r->k_top; j += WARP) {
        weight[j] -= less;
        sum += fabsf(weight[j]);
    }
    const float total = warp_sum(sum);
    for (int j = lane; j < r->k_top && r->normalize; j += WARP) {
        weight[j] /= total;
    }
}

__global__ void __launch_bounds__(BLOCK) rescore_kernel(struct rescore_args a)
{
    const int n_head = a.rescore.n_head;
    const int64_t item = my_item();
    grid_wait();
    if (item >= a.slots.rows * n_head) {
        return;
    }
    const int64_t row = item / n_head;
    const int64_t head = item % n_head;
    const int64_t column = head * a.rescore.k_top;
    int32_t *const slot = static_cast<int32_t *>(a.slots.data) + row * a.slots.stride + column;
    const int32_t *const map = static_cast<const int32_t *>(a.slot_map.data);
    for (int j = threadIdx.x % WARP; j < a.rescore.k_top; j += WARP) {
        const int32_t to = map == NULL ? slot[j] : map[head * a.slot_map.stride + slot[j]];
        slot[j] = to % a.rescore.n_slot;
    }
    rescore_weights(static_cast<float *>(a.weights.data) + row * a.weights.stride + column,
                    &a.rescore);
}

} // namespace

void cuda_pkm_rescore(struct cuda *cu, struct tensor slots, struct tensor weights,
                      struct tensor slot_map, const struct pkm_rescore *rescore)
{
    const struct rescore_args args = {slots, weights, slot_map, *rescore};
    LAUNCH(rescore_kernel, grid_of(slots.rows * rescore->n_head, ITEMS), dim3(BLOCK), 0,
           cuda_queue(cu), args);
    cuda_check(cu, "pkm_rescore");
}
