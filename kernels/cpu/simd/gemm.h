/* What gemm.c and gemm_pack.c share: how words are multiplied, and so how rows are packed. */
#ifndef KERNELS_CPU_SIMD_GEMM_H
#define KERNELS_CPU_SIMD_GEMM_H

#include "kernels/cpu/simd/internal.h"

/* How a 32-bit word of K is multiplied. */
enum gemm_kind {
    F32,         /* one float: fused multiply-add */
    PAIRS,       /* two BF16: VDPBF16PS, BFDOT */
    WIDE,        /* two BF16, widened to two floats */
    BYTES,       /* four INT8: dot product, sums are I32 in the place of floats */
    AMX,         /* two BF16 by the matrix unit: gemm_amx.c, as what follows */
    AMX_BYTES,   /* four INT8 */
    AMX_SPLIT,   /* x and W each split into high and low BF16: 3 products */
    AMX_SPLIT_X, /* x alone is split: 2 products */
};

/* Words of x that a word of W is multiplied by: two where pairs or bytes are widened (bytes where
 * the processor has no dot product of four), or where x is split. */
#if defined(HAS_DOT_BYTES)
#define X_WORDS(kind) ((kind) == WIDE || (kind) == AMX_SPLIT_X ? 2 : 1)
#else
#define X_WORDS(kind) ((kind) == WIDE || (kind) == BYTES ? 2 : 1)
#endif

/* Words of W that a chunk of x is multiplied by. */
#define CHUNK_WORDS(kind) (CHUNK / X_WORDS(kind))

static inline bool is_amx(enum gemm_kind kind)
{
    return kind == AMX || kind == AMX_BYTES || kind == AMX_SPLIT || kind == AMX_SPLIT_X;
}

static inline bool is_pairs(enum gemm_kind kind)
{
    return kind == PAIRS || kind == AMX;
}

static inline enum gemm_kind kind_of(const struct gemm *g)
{
    static const enum gemm_kind kinds[] = {
        [GEMM_WIDE] = WIDE, [GEMM_PAIRS] = PAIRS, [GEMM_AMX] = AMX};
    return g->is_split              ? (g->dtype == DTYPE_F32 ? AMX_SPLIT : AMX_SPLIT_X)
           : g->dtype == DTYPE_F32  ? F32
           : g->dtype == DTYPE_BF16 ? kinds[g->bf16]
           : gemm_is_amx(g)         ? AMX_BYTES
                                    : BYTES;
}

/* gemm_pack.c: n_row rows of x by chunks; all kinds but those of bytes. */
void SIMD(pack_tile)(uint32_t *to, const float *x, int64_t x_stride, int n_row, int n_in,
                     enum gemm_kind kind);

#endif
