/* The functions of this folder that table.c gathers, for the instruction set being compiled. Their
 * contracts stand at the table's entries in kernels.h. */
#ifndef KERNELS_CPU_SIMD_INTERNAL_H
#define KERNELS_CPU_SIMD_INTERNAL_H

#include "kernels/cpu/simd/kernels.h"
#include "kernels/cpu/simd/simd.h"

/* Rows of a full register tile: see gemm.c. */
#if defined(ISA_AVX512)
#define TILE_ROWS 12
#elif defined(ISA_AVX2)
#define TILE_ROWS 6
#else
#define TILE_ROWS 3
#endif

/* What a tile asks for while it computes: cache lines of the panel that comes next. */
struct ahead {
    const uint32_t *w;
    int n_line; /* per chunk of x */
};

enum {
    LINE_WORDS = 16,  /* of a cache line */
    NEAR_WORDS = 512, /* 2 KiB ahead of the tile: into L1 */
    FAR_WORDS = 1024, /* 4 KiB ahead, where the panel comes from memory: into L2 */
};

/* Asks for the words that a tile will meet soon. Both distances matter: one alone loses up to a
 * fifth of the bandwidth (SPEED.md). */
static ALWAYS_INLINE void prefetch_words(const uint32_t *w, int n_word, bool is_far)
{
    for (int i = 0; i < n_word; i += LINE_WORDS) {
        __builtin_prefetch(w + NEAR_WORDS + i);
        if (is_far) {
            __builtin_prefetch(w + FAR_WORDS + i, 0, 2);
        }
    }
}

/* gemm_amx.c: gemm_panels of AMX kinds; the rest: see the table's entries. */
struct product; /* gemm_tile.h */
void SIMD(amx_panels)(const struct product *product, int first, int n, float *sums);
void SIMD(amx_scores)(float *score, int64_t stride, const float *x, int64_t x_stride, int n_row,
                      const uint32_t *w, enum dtype dtype, int n_in, int n_out, uint32_t *words);

/* gemm.c */
void SIMD(gemm_pack)(const struct gemm *g, int tile, int first, int n);
void SIMD(gemm_panels)(const struct gemm *g, int first, int n, int tile, int n_tile, float *sums);
void SIMD(gemm_scores)(float *score, int64_t stride, const float *x, int64_t x_stride, int n_row,
                       const uint32_t *w, int n_in, int n_out, uint32_t *words);

/* embed.c, norm.c, rope.c, gate.c */
void SIMD(row_sum)(float *y, const struct row_source *source, int n_source, int64_t d);
void SIMD(row_norm)(float *y, const float *x, const float *r, const float *gamma, const float *beta,
                    int64_t d, float eps);
void SIMD(row_rms_norm)(float *y, float *sum, const float *x, const float *r, const float *gamma,
                        int64_t d, float eps);
void SIMD(row_rope)(float *x, const float *table, int n_head, int64_t d_head);
void SIMD(row_silu)(float *y, const float *x, const float *g, int64_t d);

/* pkm.c */
void SIMD(row_dots)(float *dot, const int32_t *slots, int n_slot, const float *x,
                    const struct value_table *table, int64_t d);
void SIMD(pkm_read)(float *y, const int32_t *slots, const float *shares, int n_slot,
                    const struct value_table *table, int64_t first, int64_t n,
                    const int32_t *next_slots);

/* attention.c */
void SIMD(kv_rows)(const struct kv_rows *a);
void SIMD(close_keys)(float *piece, const float *by_position, int n_word);
void SIMD(attend)(const struct attend *a);

/* attention_amx.c */
void SIMD(amx_attend)(const struct attend *a);

/* span.c */
void SIMD(attend_span)(const struct attend_span *a);

/* select.c */
void SIMD(select)(int32_t *best, float *best_score, const float *score, int n, int k,
                  const struct select_scratch *scratch);
void SIMD(pkm_select)(int32_t *slots, float *shares, const float *score, int64_t half_stride,
                      const struct pkm_shape *shape);

/* outputs.c */
bool SIMD(logit_max)(float *max, const float *z, int n);
int SIMD(logit_find)(const float *z, int n, float value, int n_skip);
double SIMD(logit_sum)(const float *z, const float *next, int n, float max,
                       float inverse_temperature);
double SIMD(logit_shares)(float *share, const float *z, const float *next, int n, float max,
                          float inverse_temperature);
double SIMD(logit_pick)(struct logit_list *to, const struct logit_room *room,
                        const struct logit_list *from, float low, float high);
int SIMD(logit_count)(const float *z, int n, float least);
void SIMD(logit_add)(struct logit_block *block, const float *z, int n, int first);
void SIMD(logit_end)(struct logit_part *part, const struct logit_block *block);
/* The same as logit_add with n_row · n_vec <= EXP_VECS vectors, of one or two rows. */
void SIMD(logit_add_vecs)(struct logit_block *block, vf a, vf b, vf c, vf d, int n_row, int n_vec,
                          int first);

/* peak.c */
double SIMD(sum_bytes)(const void *data, size_t bytes);
void SIMD(peak_f32)(int64_t n, double *flops);
#if defined(ISA_AVX512)
void SIMD(peak_bf16)(int64_t n, double *flops);
void SIMD(peak_int8)(int64_t n, double *flops);
void SIMD(peak_amx)(int64_t n, double *flops);
void SIMD(peak_amx_int8)(int64_t n, double *flops);
#endif

#endif
