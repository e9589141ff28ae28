/* Knock-out of memories, heads and slots for the sequences that ask for it.
 *
 * A thread per look-up searches its sequence's list by halves, at most four times. Only steps with
 * such a sequence have this op. Bound by launch latency; the bytes are 12·n_head·k_top per row, and
 * the lists. Share of the bound reached: not measured yet. */
#include "kernels/cuda/rows.cuh"

namespace
{

struct ablate_args {
    struct tensor weights, slots;
    const struct step_view *view;
    struct pkm_place place;
};

/* Whether the entry stands before these of the same memory. */
__device__ __forceinline__ bool precedes(const struct step_ablate &entry, int memory, int head,
                                         int slot)
{
    return entry.memory != memory ? entry.memory < memory
           : entry.head != head   ? entry.head < head
                                  : entry.slot < slot;
}

/* The scale of the entry of these, or 1. */
__device__ float ablate_scale(const struct step_ablate *list, int n_entry, int memory, int head,
                              int slot)
{
    int first = 0;
    int n = n_entry;
    while (n > 0) {
        const int half = n / 2;
        const bool before = precedes(list[first + half], memory, head, slot);
        first += before ? half + 1 : 0;
        n = before ? n - half - 1 : half;
    }
    const bool found = first < n_entry && list[first].memory == memory &&
                       list[first].head == head && list[first].slot == slot;
    return found ? list[first].scale : 1;
}

/* A thread per look-up. */
__global__ void __launch_bounds__(BLOCK) ablate_kernel(struct ablate_args a)
{
    const int64_t element = my_element();
    grid_wait();
    if (element >= a.weights.rows * a.weights.cols) {
        return;
    }
    const int64_t row = element / a.weights.cols;
    const int64_t j = element % a.weights.cols;
    const int seq = a.view->row_seq[row];
    const int first = a.view->ablate_first[seq];
    const int n = a.view->ablate_first[seq + 1] - first;
    if (n == 0) {
        return;
    }
    const struct step_ablate *const list = a.view->ablate + first;
    const int memory = a.place.memory;
    const int head = static_cast<int>(j / a.place.k_top);
    const int slot = (static_cast<const int32_t *>(a.slots.data) + row * a.slots.stride)[j];
    /* In the order of the list. */
    const float all =
        ablate_scale(list, n, memory, -1, -1) * ablate_scale(list, n, memory, -1, slot);
    const float factor =
        all * ablate_scale(list, n, memory, head, -1) * ablate_scale(list, n, memory, head, slot);
    row_of(a.weights, row)[j] *= factor;
}

} // namespace

void cuda_pkm_ablate(struct cuda *cu, struct tensor weights, struct tensor slots,
                     const struct step_view *view, const struct pkm_place *place)
{
    const struct ablate_args args = {weights, slots, view, *place};
    LAUNCH(ablate_kernel, grid_of(weights.rows * weights.cols, BLOCK), dim3(BLOCK), 0,
           cuda_queue(cu), args);
    cuda_check(cu, "pkm_ablate");
}
