/* The table of the instruction set being compiled. */
#include "kernels/cpu/simd/internal.h"

const struct simd_kernels SIMD(simd_kernels) = {
    .tile_rows = TILE_ROWS,
    .gemm_pack = SIMD(gemm_pack),
    .gemm_panels = SIMD(gemm_panels),
    .gemm_scores = SIMD(gemm_scores),
    .amx_scores = SIMD(amx_scores),
    .row_sum = SIMD(row_sum),
    .row_norm = SIMD(row_norm),
    .row_rms_norm = SIMD(row_rms_norm),
    .row_rope = SIMD(row_rope),
    .row_silu = SIMD(row_silu),
    .row_dots = SIMD(row_dots),
    .kv_rows = SIMD(kv_rows),
    .attend = SIMD(attend),
    .amx_attend = SIMD(amx_attend),
    .attend_span = SIMD(attend_span),
    .select = SIMD(select),
    .pkm_select = SIMD(pkm_select),
    .pkm_read = SIMD(pkm_read),
    .logit_max = SIMD(logit_max),
    .logit_find = SIMD(logit_find),
    .logit_sum = SIMD(logit_sum),
    .logit_shares = SIMD(logit_shares),
    .logit_pick = SIMD(logit_pick),
    .logit_count = SIMD(logit_count),
    .logit_add = SIMD(logit_add),
    .logit_end = SIMD(logit_end),
    .sum_bytes = SIMD(sum_bytes),
    .peak_f32 = SIMD(peak_f32),
#if defined(ISA_AVX512)
    .peak_bf16 = SIMD(peak_bf16),
    .peak_int8 = SIMD(peak_int8),
    .peak_amx = SIMD(peak_amx),
    .peak_amx_int8 = SIMD(peak_amx_int8),
#endif
};
