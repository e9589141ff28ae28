/* What the files of this folder share, for the instruction set being compiled: the kernels that
 * table.c gathers, whose contracts are in kernels.h, and a few more. */
#ifndef KERNELS_CPU_SIMD_INTERNAL_H
#define KERNELS_CPU_SIMD_INTERNAL_H

#include "kernels/cpu/simd/dot.h"
#include "kernels/cpu/simd/kernels.h"
#include "kernels/cpu/simd/simd.h"

/* Rows of a full register tile: see gemm.c. */
#if defined(ISA_AVX512)
#define TILE_ROWS 12
#elif defined(ISA_AVX2) || defined(ISA_NEON)
#define TILE_ROWS 6
#else
#define TILE_ROWS 3
#endif

/* What a tile prefetches while it computes: cache lines of the panel that comes next. */
struct prefetch {
    const uint32_t *w;
    int n_line; /* per chunk of x */
};

enum {
    LINE_WORDS = 16,     /* of a cache line */
    PREFETCH_NEAR = 512, /* 2 KiB ahead of the tile: into L1 */
    PREFETCH_FAR = 1024, /* 4 KiB ahead, where the panel comes from memory: into L2 */
};

/* Prefetches the words that a tile reads soon. Both distances matter: one alone loses up to a fifth
 * of the bandwidth (SPEED.md). */
static ALWAYS_INLINE void prefetch_words(const uint32_t *w, int n_word, bool is_far)
{
    for (int i = 0; i < n_word; i += LINE_WORDS) {
        __builtin_prefetch(w + PREFETCH_NEAR + i);
        if (is_far) {
            __builtin_prefetch(w + PREFETCH_FAR + i, 0, 2);
        }
    }
}

/* The kernels of the table. */
#define SIMD_DECLARE(kernel) simd_##kernel##_fn SIMD(kernel);
SIMD_LIST(SIMD_DECLARE)
#if defined(HAS_DOT_PAIRS)
SIMD_LIST_PAIRS(SIMD_DECLARE)
#endif
#if defined(HAS_DOT_BYTES)
SIMD_LIST_BYTES(SIMD_DECLARE)
#endif
#if defined(ISA_AVX512)
SIMD_LIST_AMX(SIMD_DECLARE)
#endif

/* More that these files call of each other. gemm_amx.c: gemm_panels for the AMX kinds. */
struct product; /* gemm_tile.h */
void SIMD(amx_panels)(const struct product *product, int first, int n, float *sums);
/* attention_store.c */
void SIMD(close_keys)(float *piece, const float *by_position, int n_word);
/* outputs.c: the same as logit_add with n_row · n_vec <= EXP_VECS vectors, of one or two rows. */
void SIMD(logit_add_vecs)(struct logit_block *block, vf a, vf b, vf c, vf d, int n_row, int n_vec,
                          int first);

#endif
