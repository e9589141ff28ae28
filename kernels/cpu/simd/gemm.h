/* What gemm.c and gemm_pack.c share: how words are multiplied, and so how rows are packed. */
#ifndef KERNELS_CPU_SIMD_GEMM_H
#define KERNELS_CPU_SIMD_GEMM_H

#include "kernels/cpu/simd/internal.h"

/* How a word of K is multiplied: one float, a pair of BF16 by the instruction for pairs, a pair of
 * BF16 widened to two floats, four bytes, whose sums are I32 in the place of floats; or a pair or
 * four bytes by the matrix unit: see gemm_amx.c; or there a number of both, or of x alone, as the sum of
 * two BF16. */
enum kind { F32, PAIRS, WIDE, BYTES, AMX, AMX_BYTES, AMX_SPLIT, AMX_SPLIT_X };

/* Words of x that meet a word of W: where pairs are widened, or bytes are (for want of the
 * instruction for four of them), or of x there are two numbers, two. */
#if defined(ISA_AVX512)
#define X_WORDS(kind) ((kind) == WIDE || (kind) == AMX_SPLIT_X ? 2 : 1)
#else
#define X_WORDS(kind) ((kind) == WIDE || (kind) == BYTES ? 2 : 1)
#endif

/* Words of W that meet a chunk of x. */
#define CHUNK_WORDS(kind) (CHUNK / X_WORDS(kind))

static inline bool is_amx(enum kind kind)
{
    return kind == AMX || kind == AMX_BYTES || kind == AMX_SPLIT || kind == AMX_SPLIT_X;
}

static inline bool is_pairs(enum kind kind)
{
    return kind == PAIRS || kind == AMX;
}

static inline enum kind kind_of(const struct gemm *g)
{
    static const enum kind kinds[] = {[GEMM_WIDE] = WIDE, [GEMM_PAIRS] = PAIRS, [GEMM_AMX] = AMX};
    return g->is_split              ? (g->dtype == DTYPE_F32 ? AMX_SPLIT : AMX_SPLIT_X)
           : g->dtype == DTYPE_F32  ? F32
           : g->dtype == DTYPE_BF16 ? kinds[g->bf16]
           : gemm_is_amx(g)         ? AMX_BYTES
                                    : BYTES;
}

/* gemm_pack.c: n_row rows of x by chunks; all kinds but those of bytes. */
void SIMD(pack_tile)(uint32_t *to, const float *x, int64_t x_stride, int n_row, int n_in,
                     enum kind kind);

#endif
