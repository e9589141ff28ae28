/* The table of the instruction set being compiled. */
#include "kernels/cpu/simd/internal.h"

#define SIMD_ENTRY(kernel) .kernel = SIMD(kernel),

const struct simd_kernels SIMD(simd_kernels) = {.tile_rows = TILE_ROWS,
                                                SIMD_LIST(SIMD_ENTRY)
#if defined(HAS_DOT_PAIRS)
                                                    SIMD_LIST_PAIRS(SIMD_ENTRY)
#endif
#if defined(HAS_DOT_BYTES)
                                                        SIMD_LIST_BYTES(SIMD_ENTRY)
#endif
#if defined(ISA_AVX512)
                                                            SIMD_LIST_AMX(SIMD_ENTRY)
#endif
};
