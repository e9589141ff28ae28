/* Pieces of 16 bytes of a row of keys, values or queries, of which a lane of attention_drawn.cuh
 * holds some. */
#ifndef KERNELS_CUDA_ATTENTION_PIECE_CUH
#define KERNELS_CUDA_ATTENTION_PIECE_CUH

#include "kernels/cuda/attention.cuh"

namespace
{

/* 16 bytes of a position, of which n columns exist: whole ones have all or none. */
template <bool is_whole, typename T>
__device__ __forceinline__ uint4 piece_load(const T *from, int n)
{
    constexpr int group = 16 / sizeof(T);
    uint4 piece = make_uint4(0, 0, 0, 0);
    if constexpr (is_whole) {
        piece = load_16_if(n > 0, from);
    } else {
        uint32_t word[4] = {};
#pragma unroll
        for (int i = 0; i < group; i++) {
            if (i < n) {
                const uint32_t bits = sizeof(T) == 2 ? static_cast<uint32_t>(from[i])
                                                     : __float_as_uint(widen(from[i]));
                word[i * sizeof(T) / 4] |= bits << (sizeof(T) == 2 ? i % 2 * 16 : 0);
            }
        }
        piece = make_uint4(word[0], word[1], word[2], word[3]);
    }
    return piece;
}

template <bool is_whole> __device__ __forceinline__ void piece_store(float *to, uint4 piece, int n)
{
    const uint32_t word[4] = {piece.x, piece.y, piece.z, piece.w};
    if (is_whole && n > 0) {
        *reinterpret_cast<uint4 *>(to) = piece;
    }
#pragma unroll
    for (int i = 0; i < 4 && !is_whole; i++) {
        if (i < n) {
            to[i] = __uint_as_float(word[i]);
        }
    }
}

template <bool is_whole>
__device__ __forceinline__ void piece_store(uint16_t *to, uint4 piece, int n)
{
    const uint32_t word[4] = {piece.x, piece.y, piece.z, piece.w};
    if (is_whole && n > 0) {
        *reinterpret_cast<uint4 *>(to) = piece;
    }
#pragma unroll
    for (int i = 0; i < 8 && !is_whole; i++) {
        if (i < n) {
            to[i] = static_cast<uint16_t>(word[i / 2] >> i % 2 * 16);
        }
    }
}

__device__ __forceinline__ void piece_widen(float (&to)[4], uint4 piece)
{
    to[0] = __uint_as_float(piece.x), to[1] = __uint_as_float(piece.y);
    to[2] = __uint_as_float(piece.z), to[3] = __uint_as_float(piece.w);
}

__device__ __forceinline__ void piece_widen(float (&to)[8], uint4 piece)
{
    const float4 a = bf16_widen_four(make_uint2(piece.x, piece.y));
    const float4 b = bf16_widen_four(make_uint2(piece.z, piece.w));
    to[0] = a.x, to[1] = a.y, to[2] = a.z, to[3] = a.w;
    to[4] = b.x, to[5] = b.y, to[6] = b.z, to[7] = b.w;
}

/* As the cache has them. */
__device__ __forceinline__ uint4 piece_of(const float (&from)[4])
{
    return make_uint4(__float_as_uint(from[0]), __float_as_uint(from[1]), __float_as_uint(from[2]),
                      __float_as_uint(from[3]));
}

__device__ __forceinline__ uint4 piece_of(const float (&from)[8])
{
    return make_uint4(bf16_pair(from[0], from[1]), bf16_pair(from[2], from[3]),
                      bf16_pair(from[4], from[5]), bf16_pair(from[6], from[7]));
}

/* The columns of a piece, n of which exist, from F32. */
template <bool is_whole, int group>
__device__ __forceinline__ void floats_load(float (&to)[group], const float *from, int n)
{
#pragma unroll
    for (int i = 0; i < group; i += 4) {
        float four[4];
        piece_widen(four, piece_load<is_whole>(from + i, n - i));
#pragma unroll
        for (int j = 0; j < 4; j++) {
            to[i + j] = four[j];
        }
    }
}

} // namespace

#endif
