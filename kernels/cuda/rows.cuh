/* How kernels that work row by row share their work: a thread per group of four columns, a warp per
 * item, or a thread per element.
 *
 * Where all addresses and strides allow it a group is one 16-byte access, else single words; the
 * arithmetic is the same either way, so alignment does not change a row's bits. */
#ifndef KERNELS_CUDA_ROWS_CUH
#define KERNELS_CUDA_ROWS_CUH

#include "kernels/cuda/cuda.cuh"

enum {
    WARP = 32,
    GROUP = 4, /* columns */
    ITEMS = 4, /* warps of a block at most */
    BLOCK = WARP * ITEMS
};

/* ---- groups of four columns ------------------------------------------------------------------ */

/* Whether groups of t start at multiples of their size in every row. */
static inline bool has_groups(struct tensor t)
{
    return reinterpret_cast<uintptr_t>(t.data) % (GROUP * dtype_bytes(t.dtype)) == 0 &&
           (t.stride % GROUP == 0 || t.rows == 1);
}

/* Columns 0 .. n-1 of a group, n > 0; those from n on are 0. */
template <bool aligned>
static __device__ __forceinline__ float4 group_load(const float *from, int n)
{
    if (aligned && n >= GROUP) {
        return *reinterpret_cast<const float4 *>(from);
    }
    float4 group = {0, 0, 0, 0};
    group.x = from[0];
    group.y = n > 1 ? from[1] : 0;
    group.z = n > 2 ? from[2] : 0;
    group.w = n > 3 ? from[3] : 0;
    return group;
}

template <bool aligned>
static __device__ __forceinline__ void group_store(float *to, float4 group, int n)
{
    if (aligned && n >= GROUP) {
        *reinterpret_cast<float4 *>(to) = group;
        return;
    }
    to[0] = group.x;
    if (n > 1) {
        to[1] = group.y;
    }
    if (n > 2) {
        to[2] = group.z;
    }
    if (n > 3) {
        to[3] = group.w;
    }
}

static __device__ __forceinline__ float4 group_add(float4 a, float4 b)
{
    return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w};
}

/* The grid of kernels that give each row blocks of BLOCK threads, a group each. */
static inline dim3 groups_grid(int64_t rows, int64_t cols)
{
    const int64_t n_block = (cols + BLOCK * GROUP - 1) / (BLOCK * GROUP);
    return dim3(static_cast<unsigned>(rows), static_cast<unsigned>(n_block));
}

static __device__ __forceinline__ int my_first_column()
{
    return static_cast<int>((blockIdx.y * BLOCK + threadIdx.x) * GROUP);
}

/* ---- items and elements ---------------------------------------------------------------------- */

/* This warp's item of n, or n or more: no such item. */
static __device__ __forceinline__ int64_t my_item()
{
    return static_cast<int64_t>(blockIdx.x) * (blockDim.x / WARP) + threadIdx.x / WARP;
}

/* Threads of a block for n items: a warp each, and only where all multiprocessors have one more
 * than one of them, since few items then wait for memory's latency and not for what a
 * multiprocessor draws. */
static inline dim3 items_block(const struct cuda *cu, int64_t n)
{
    const int64_t n_warp = n / cu->n_sm;
    return dim3(WARP * static_cast<unsigned>(n_warp < 1 ? 1 : n_warp < ITEMS ? n_warp : +ITEMS));
}

/* This thread's element of n, or n or more: no such element. */
static __device__ __forceinline__ int64_t my_element()
{
    return static_cast<int64_t>(blockIdx.x) * BLOCK + threadIdx.x;
}

static inline dim3 grid_of(int64_t n, int64_t per_block)
{
    return dim3(static_cast<unsigned>((n + per_block - 1) / per_block));
}

static __device__ __forceinline__ float *row_of(const struct tensor &t, int64_t row)
{
    return static_cast<float *>(t.data) + row * t.stride;
}

#endif
