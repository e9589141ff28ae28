/* What the F32 kernels of the memory search share: a block's queries in shared memory, and the
 * scores of keys for them. */
#ifndef KERNELS_CUDA_PKM_SEARCH_TILE_CUH
#define KERNELS_CUDA_PKM_SEARCH_TILE_CUH

#include "kernels/cuda/pkm_search.cuh"

namespace
{

enum {
    TILE_THREADS = 256,
    LOADS = 8 /* of a thread in flight, where a block loads its queries */
};

/* Copies the queries of a head, rows first .. first+T-1, to to[T][n_half·d_quad]; what is not there
 * is zero. A barrier follows. */
template <int T, int n_half>
__device__ void load_queries(float *to, const struct search *s, int64_t first, int head)
{
    const int width = static_cast<int>(s->layout.d_quad) * 4;
    const int n = T * n_half * width;
    for (int at = threadIdx.x; at < n; at += LOADS * blockDim.x) {
        float value[LOADS];
#pragma unroll
        for (int v = 0; v < LOADS; v++) {
            const int i = at + v * static_cast<int>(blockDim.x);
            const int half = i / width; /* of all rows */
            const int c = i - half * width;
            const int64_t row = first + half / n_half;
            const bool is_there = i < n && row < s->query.rows && c < s->d;
            const int64_t column = (n_half * head + half % n_half) * s->d + c;
            value[v] =
                is_there ? static_cast<const float *>(s->query.data)[row * s->query.stride + column]
                         : 0;
        }
#pragma unroll
        for (int v = 0; v < LOADS; v++) {
            const int i = at + v * static_cast<int>(blockDim.x);
            if (i < n) {
                to[i] = value[v];
            }
        }
    }
}

__device__ __forceinline__ float chain(float4 key, float4 q, float sum)
{
    sum = fmaf(q.x, key.x, sum);
    sum = fmaf(q.y, key.y, sum);
    sum = fmaf(q.z, key.z, sum);
    return fmaf(q.w, key.w, sum);
}

/* ranks[T][rank_stride] ← of n_key packed keys (a multiple of 32) for T rows, two keys per thread
 * of TILE_THREADS, n_ahead groups of four columns at a time. padded: from one group to the next;
 * q[T][q_stride]. */
template <int T, int n_ahead = (T > 4 ? 2 : 8)>
__device__ __forceinline__ void tile_scores(uint32_t *ranks, int rank_stride, const float4 *keys,
                                            int64_t padded, int n_key, const float4 *q,
                                            int q_stride, int n_quad)
{
    for (int key = threadIdx.x; key < n_key; key += 2 * TILE_THREADS) {
        const int other = key + TILE_THREADS < n_key ? key + TILE_THREADS : key;
        float sum[2][T] = {};
#pragma unroll n_ahead
        for (int c = 0; c < n_quad; c++) {
            const float4 a = __ldg(keys + c * padded + key);
            const float4 b = __ldg(keys + c * padded + other);
#pragma unroll
            for (int t = 0; t < T; t++) {
                const float4 row = q[t * q_stride + c];
                sum[0][t] = chain(a, row, sum[0][t]);
                sum[1][t] = chain(b, row, sum[1][t]);
            }
        }
#pragma unroll
        for (int t = 0; t < T; t++) {
            ranks[t * rank_stride + key] = rank_of_score(sum[0][t]);
            ranks[t * rank_stride + other] = rank_of_score(sum[1][t]);
        }
    }
}

} // namespace

#endif
