/* Redirection (struct pkm_redirect) as the kernels of the memory's tables see it: where a row's
 * look-up is read from. The lists, the places and the rows are in device memory. */
#ifndef KERNELS_CUDA_REDIRECT_CUH
#define KERNELS_CUDA_REDIRECT_CUH

#include "kernels/cuda/cuda.cuh"

/* A row of F32 or BF16 that stands in for one of a table; data 0 = the table's own is read. An
 * address as a number, because shuffles take numbers. */
struct redirected_row {
    unsigned long long data;
    int is_bf16;
};

/* The place of a slot in an entry's table, or -1: its row. */
static __device__ __forceinline__ int redirect_row(const struct step_redirect &entry, int slot)
{
    const unsigned last = (1u << entry.n_bit) - 1;
    unsigned at = static_cast<unsigned>(slot) * REDIRECT_HASH >> (32 - entry.n_bit);
    for (; entry.place[at].slot >= 0; at = (at + 1) & last) {
        if (entry.place[at].slot == slot) {
            return entry.place[at].row;
        }
    }
    return -1;
}

/* Where a slot of a row of the step is read from; rows have n_column columns. */
static __device__ struct redirected_row redirect_find(const struct step_view *view, int64_t row,
                                                      int memory, int slot, int64_t n_column,
                                                      bool experts)
{
    const int seq = view->row_seq[row];
    for (int i = view->redirect_first[seq]; i < view->redirect_first[seq + 1]; i++) {
        const struct step_redirect &entry = view->redirect[i];
        const int at = entry.memory == memory ? redirect_row(entry, slot) : -1;
        if (at >= 0) {
            const struct redirect_rows &rows = experts ? entry.experts : entry.values;
            const int is_bf16 = rows.dtype == DTYPE_BF16;
            const unsigned long long bytes = at * n_column * (is_bf16 ? 2 : 4);
            return {reinterpret_cast<unsigned long long>(rows.data) + bytes, is_bf16};
        }
    }
    return {0, 0};
}

static __device__ __forceinline__ float redirected_value(struct redirected_row row, int column)
{
    return row.is_bf16 ? bf16_widen(reinterpret_cast<const uint16_t *>(row.data)[column])
                       : reinterpret_cast<const float *>(row.data)[column];
}

#endif
