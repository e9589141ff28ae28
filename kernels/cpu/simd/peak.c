/* Loops that measure the machine: a plain read, and multiply-adds from registers. */
#include "kernels/cpu/simd/internal.h"

/* Chains of multiply-adds: enough to hide the latency of two units, few enough for registers. */
#if defined(ISA_AVX512)
enum { CHAINS = 24 };
#elif defined(ISA_AVX2)
enum { CHAINS = 12 };
#elif defined(ISA_NEON)
enum { CHAINS = 16 };
#else
enum { CHAINS = 8 };
#endif

double SIMD(sum_bytes)(const void *data, size_t bytes)
{
    enum { STREAMS = 8, STEP = STREAMS * sizeof(vu) };
    vu sum[STREAMS] = {{0}};
    const char *const from = data;
    for (size_t at = 0; at + STEP <= bytes; at += STEP) {
        UNROLL
        for (int s = 0; s < STREAMS; s++) {
            sum[s] += (vu)vi_load(from + at + (size_t)s * sizeof(vu));
        }
    }
    double total = 0;
    for (int s = 0; s < STREAMS; s++) {
        total += (double)sum[s][0];
    }
    return total;
}

void SIMD(peak_f32)(int64_t n, double *flops)
{
    vf sum[CHAINS];
    for (int c = 0; c < CHAINS; c++) {
        sum[c] = v_set1((float)c);
    }
    const vf a = v_set1((float)(n & 1) * 0.5f + 0.25f);
    const vf b = v_set1(0.5f);
    for (int64_t i = 0; i < n; i++) {
        UNROLL
        for (int c = 0; c < CHAINS; c++) {
            sum[c] = v_fma(a, sum[c], b);
        }
    }
    volatile float sink = 0;
    for (int c = 0; c < CHAINS; c++) {
        sink = sink + v_sum(sum[c]);
    }
    *flops = 2.0 * (double)(LANES * CHAINS) * (double)n;
}

#if defined(HAS_DOT_PAIRS)

void SIMD(peak_bf16)(int64_t n, double *flops)
{
    vf sum[CHAINS];
    for (int c = 0; c < CHAINS; c++) {
        sum[c] = v_set1(0);
    }
    const vf a = v_set1_bits((uint32_t)(0x3f003f00 + (n & 1)));
    for (int64_t i = 0; i < n; i++) {
        UNROLL
        for (int c = 0; c < CHAINS; c++) {
            sum[c] = v_dot_pairs(sum[c], a, a);
        }
    }
    volatile float sink = 0;
    for (int c = 0; c < CHAINS; c++) {
        sink = sink + v_sum(sum[c]);
    }
    *flops = 4.0 * (double)(LANES * CHAINS) * (double)n;
}

#endif
#if defined(HAS_DOT_BYTES)

void SIMD(peak_int8)(int64_t n, double *flops)
{
    vi sum[CHAINS];
    for (int c = 0; c < CHAINS; c++) {
        sum[c] = vi_set1(0);
    }
    const vi a = vi_set1((int32_t)(0x01010101 + (n & 1)));
    for (int64_t i = 0; i < n; i++) {
        UNROLL
        for (int c = 0; c < CHAINS; c++) {
            sum[c] = vi_dot_bytes(sum[c], a, a);
        }
    }
    volatile int sink = 0;
    for (int c = 0; c < CHAINS; c++) {
        sink = sink + (sum[c][0] & 1);
    }
    *flops = 8.0 * (double)(LANES * CHAINS) * (double)n;
}

#endif
