/* How the kernels for many rows of requests share them out: in tiles of consecutive rows of a
 * sequence. */
#ifndef KERNELS_CUDA_ATTENTION_TILE_CUH
#define KERNELS_CUDA_ATTENTION_TILE_CUH

#include "kernels/cuda/attention.cuh"

namespace
{

constexpr int BLOCK = 128; /* threads */
constexpr int BLOCK_WARPS = BLOCK / 32;
constexpr int BLOCKS_PER_SM = 16; /* in the grid: enough to even out tiles of different length */

/* Rows row .. row+n_row-1 of sequence seq. */
struct tile {
    int seq, row, n_row;
};

__device__ __forceinline__ int tiles_of(int n_row, int tile_rows)
{
    return (n_row + tile_rows - 1) / tile_rows;
}

/* Tile number i of a sequence. The last one is the longest work, so it comes first. */
__device__ __forceinline__ struct tile tile_of(int seq, int first, int n_row, int tile_rows, int i)
{
    const int skipped = (tiles_of(n_row, tile_rows) - 1 - i) * tile_rows;
    return {seq, first + skipped, min(n_row - skipped, tile_rows)};
}

/* Tile number i of the step, in the order of its sequences; false if it has no more. By the whole
 * block, which gets the same answer. */
__device__ bool tile_find(const struct step_view *view, int tile_rows, int i, struct tile *tile)
{
    __shared__ int warp_tiles[BLOCK_WARPS];
    __shared__ struct tile found;
    const int n_seq = view->n_seq;
    const int32_t *const seq_first = view->seq_first;
    const int thread = static_cast<int>(threadIdx.x);
    int before = 0;
    for (int base = 0; base < n_seq && before <= i; base += BLOCK) {
        const int seq = base + thread;
        const int first = seq < n_seq ? seq_first[seq] : 0;
        const int n_row = seq < n_seq ? seq_first[seq + 1] - first : 0;
        const int n = tiles_of(n_row, tile_rows);
        int end = n;
        for (int step = 1; step < 32; step *= 2) {
            const int other = __shfl_up_sync(0xffffffffu, end, static_cast<unsigned>(step));
            end += thread % 32 >= step ? other : 0;
        }
        if (thread % 32 == 31) {
            warp_tiles[thread / 32] = end;
        }
        __syncthreads();
        end += before;
        for (int w = 0; w < BLOCK_WARPS; w++) {
            before += warp_tiles[w];
            end += w < thread / 32 ? warp_tiles[w] : 0;
        }
        if (i < end && i >= end - n) {
            found = tile_of(seq, first, n_row, tile_rows, i - (end - n));
        }
        __syncthreads();
    }
    if (i >= before) {
        return false;
    }
    *tile = found;
    __syncthreads(); /* the next call writes again */
    return true;
}

/* Blocks that take tile after tile of n_row rows, each head's apart. */
inline dim3 tile_grid(const struct cuda *cu, const struct attention_args *a, int n_row)
{
    const int64_t n_item = static_cast<int64_t>(n_row) * a->n_head; /* tiles × heads, at most */
    const int64_t n_block = static_cast<int64_t>(BLOCKS_PER_SM) * cu->n_sm;
    return dim3(static_cast<unsigned>(n_item < n_block ? n_item : n_block));
}

} // namespace

#endif
