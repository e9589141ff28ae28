/* The tile registers of Intel's matrix unit (AMX), as gemm_amx.c and attention_amx.c use them:
 * tiles 0 to 3 accumulate, 4 and 5 hold x (two blocks of rows), 6 and 7 hold W. With one block of
 * rows only, 2 and 3 are more accumulators for it and 5 is a third tile of W. */
#ifndef KERNELS_CPU_SIMD_AMX_H
#define KERNELS_CPU_SIMD_AMX_H

#include "kernels/cpu/simd/internal.h"

enum { BLOCK = 16 }; /* rows of a register, and words of its rows */

#if defined(ISA_AVX512)

/* gcc does not know what the instructions read: this has it written before. */
#define WRITTEN(pointer) __asm__ volatile("" : : "r"(pointer) : "memory")

/* The layout that the instruction LDTILECFG reads. */
struct amx_palette {
    uint8_t id, start_row, zero[14];
    uint16_t row_bytes[16];
    uint8_t n_row[16];
};

static inline void amx_shape(struct amx_palette *p, int reg, int n_row, int n_word)
{
    p->n_row[reg] = (uint8_t)n_row;
    p->row_bytes[reg] = (uint16_t)(n_row > 0 ? n_word * (int)sizeof(uint32_t) : 0);
}

/* What the unit is set up for on this thread: zeroed before the first use, and _tile_release()
 * after the last. */
struct amx {
    int n_first, n_second, n_word;
};

static inline void amx_load(const struct amx_palette *p)
{
    WRITTEN(p);
    _tile_loadconfig(p);
}

/* For blocks of n_first and n_second rows and steps of n_word words. Empties the registers. */
static inline void amx_set_up(struct amx *amx, int n_first, int n_second, int n_word)
{
    if (amx->n_first == n_first && amx->n_second == n_second && amx->n_word == n_word) {
        return;
    }
    amx->n_first = n_first;
    amx->n_second = n_second;
    amx->n_word = n_word;
    _Alignas(64) struct amx_palette p = {.id = 1};
    for (int i = 0; i < 2; i++) {
        amx_shape(&p, i, n_first, BLOCK);
        amx_shape(&p, 2 + i, n_second > 0 ? n_second : n_first, BLOCK);
        amx_shape(&p, 6 + i, n_word, BLOCK);
    }
    amx_shape(&p, 4, n_first, n_word);
    amx_shape(&p, 5, n_second > 0 ? n_second : n_word, n_second > 0 ? n_word : BLOCK);
    amx_load(&p);
}

/* For n_row rows in tile 4, multiplied by one column of CHUNK words in tile 6 and accumulated in
 * tile 0. */
static inline void amx_set_up_column(struct amx *amx, int n_row)
{
    *amx = (struct amx){0};
    _Alignas(64) struct amx_palette p = {.id = 1};
    amx_shape(&p, 0, n_row, 1);
    amx_shape(&p, 4, n_row, CHUNK);
    amx_shape(&p, 6, CHUNK, 1);
    amx_load(&p);
}

#endif

#endif
