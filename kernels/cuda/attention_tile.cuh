/* The blocks of the kernels for many rows of requests, which take tiles of consecutive rows of a
 * sequence. */
#ifndef KERNELS_CUDA_ATTENTION_TILE_CUH
#define KERNELS_CUDA_ATTENTION_TILE_CUH

#include "kernels/cuda/attention.cuh"

namespace
{

constexpr int BLOCK = 128; /* threads */
constexpr int BLOCK_WARPS = BLOCK / 32;
constexpr int BLOCKS_PER_SM = 16; /* in the grid: enough to even out tiles of different length */

/* Blocks that take tile after tile of n_row rows, each head's apart. */
inline dim3 tile_grid(const struct cuda *cu, const struct attention_args *a, int n_row)
{
    const int64_t n_item = static_cast<int64_t>(n_row) * a->n_head; /* tiles × heads, at most */
    const int64_t n_block = static_cast<int64_t>(BLOCKS_PER_SM) * cu->n_sm;
    return dim3(static_cast<unsigned>(n_item < n_block ? n_item : n_block));
}

} // namespace

#endif
