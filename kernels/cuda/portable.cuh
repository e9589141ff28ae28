/* What the kernels use of CUDA beyond the plain language, in one place.
 *
 * Two compilers read the .cu files of this folder: nvcc, for the GPU, and g++ or clang++ with
 * tests/cuda_host (PKMSERVE_CUDA_HOST defined), which runs each CUDA thread as a fiber on the CPU
 * so that the sanitizers see the kernels. So the kernels keep to a subset that both know:
 *   - launches by LAUNCH, dynamic shared memory by DYN_SHARED; no <<<>>>, no cooperative groups, no
 *     cub, no textures, no inline PTX outside this file, no cuda_bf16.h (conversions are below);
 *   - __shared__ variables, __syncthreads and its _count/_and/_or, __syncwarp(mask),
 *     __shfl_sync/_up/_down/_xor, __ballot_sync, __any_sync, __all_sync,
 *     __reduce_{add,min,max,and,or}_sync (integers), atomicAdd/Inc/Max/CAS/Exch, __threadfence,
 *     __ldg, __clz, __ffs, __float_as_uint and its kin, fmaf, expf, exp2f, logf, erff, sqrtf,
 *     int4/uint4/float4/uint2/float2/dim3;
 *   - blocks of one kernel do not wait for one another, but the last one to arrive at an atomic
 *     counter may finish the work of all;
 *   - every thread of every kernel calls grid_wait; __ldg, whose reads compilers move past it, is
 *     for constants of the model.
 * The build passes -fmad=false (-ffp-contract=off): a multiply and an add are fused where fmaf says
 * so and nowhere else, or a row's bits would depend on which kernel computed it. */
#ifndef KERNELS_CUDA_PORTABLE_CUH
#define KERNELS_CUDA_PORTABLE_CUH

#include <cuda_runtime.h>

#include <stdint.h>
#include <type_traits>

/* Where kernels are launched. overlaps: a kernel may begin while the one before it in the stream
 * still runs, up to its grid_wait (programmatic dependent launch). After a copy, a fill or an event
 * it begins when that is done, as always. Of compute capability 9.0 and newer. */
struct launch_queue {
    cudaStream_t stream;
    bool overlaps;
};

#ifdef PKMSERVE_CUDA_HOST
#include "tests/cuda_host/cuda_host.h" /* LAUNCH, DYN_SHARED, mma_*, copy_async*, grid_* */
#else

/* LAUNCH(kernel, grid, block, dynamic shared bytes, queue, arguments...) */
#define LAUNCH(kernel, grid, block, shared_bytes, queue, ...)                                      \
    launch_kernel((kernel), (grid), (block), (shared_bytes), (queue)__VA_OPT__(, ) __VA_ARGS__)

/* A failure is what cudaGetLastError gives, either way. */
template <typename... P>
static inline void launch_kernel(void (*kernel)(P...), dim3 grid, dim3 block, size_t shared_bytes,
                                 struct launch_queue queue, std::type_identity_t<P>... args)
{
    if (!queue.overlaps) {
        kernel<<<grid, block, shared_bytes, queue.stream>>>(args...);
        return;
    }
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = shared_bytes;
    config.stream = queue.stream;
    config.attrs = &attribute;
    config.numAttrs = 1;
    (void)cudaLaunchKernelEx(&config, kernel, args...);
}

/* Comes back when the kernel before is complete and what it wrote can be read; at once in one that
 * was launched without overlap. Since that kernel has waited too, each of its threads, all before
 * it are complete as well; a thread that left without would break this chain. README.md's rules say
 * where the call must be.
 * Once all blocks of this kernel have come here, or have ended, the next kernel may begin, while
 * this one still waits: so the way of a launch to its first instructions, 1.7 to 2.5 µs on an H200,
 * is gone while others compute. Several kernels may wait behind one another, but a block of a later
 * one takes no room that a block of an earlier one still needs, since all of those have begun. */
__device__ __forceinline__ void grid_wait()
{
#if defined __CUDA_ARCH__ && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/* The same, but the next kernel, and all behind it, begin when this one is complete: they may read
 * what it writes before they wait. */
__device__ __forceinline__ void grid_wait_alone()
{
#if defined __CUDA_ARCH__ && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/* Asks for the 32 bytes around a global address to come to the second-level cache. */
__device__ __forceinline__ void prefetch_l2(const void *global)
{
    asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(global)));
}

/* Asks for n bytes from there to come to that cache; address and n are multiples of 16. Nothing is
 * waited for. Where there is no such instruction it does nothing. */
__device__ __forceinline__ void prefetch_l2_many(const void *global, uint32_t n)
{
#if defined __CUDA_ARCH__ && __CUDA_ARCH__ >= 900
    asm volatile(
        "cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(__cvta_generic_to_global(global)),
        "r"(n));
#endif
}

/* 16 bytes from a global address, or zeros. A load that is only sometimes done: where an if says
 * so, compilers load elsewhere and move what has come, and wait for it before the next load is on
 * its way. */
__device__ __forceinline__ uint4 load_16_if(bool is_there, const void *global)
{
    uint4 v;
    asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.s32 p, %4, 0;\n\t"
                 "mov.u32 %0, 0;\n\tmov.u32 %1, 0;\n\tmov.u32 %2, 0;\n\tmov.u32 %3, 0;\n\t"
                 "@p ld.global.v4.u32 {%0, %1, %2, %3}, [%5];\n\t}"
                 : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
                 : "r"(static_cast<int>(is_there)), "l"(__cvta_generic_to_global(global)));
    return v;
}

/* Half a microsecond, for a thread that looks again and again. */
__device__ __forceinline__ void device_pause()
{
    __nanosleep(500);
}

/* T *const name: the block's dynamic shared memory, 16-byte aligned. */
#define DYN_SHARED(T, name)                                                                        \
    extern __shared__ __align__(16) unsigned char dyn_shared_bytes[];                              \
    T *const name = reinterpret_cast<T *>(dyn_shared_bytes)

/* d[16, 8] += a[16, 16] · b[16, 8], BF16 products, F32 sums; all 32 lanes of a warp together (PTX
 * mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32). With g = lane / 4 and t = lane % 4:
 *   d[0], d[1]: row g,   columns 2t, 2t+1       d[2], d[3]: row g+8, the same columns
 *   a[0]: row g,   k 2t, 2t+1 (low half first)  a[1]: row g+8, the same k
 *   a[2]: row g,   k 2t+8, 2t+9                 a[3]: row g+8, k 2t+8, 2t+9
 *   b[0]: k 2t, 2t+1 of column g                b[1]: k 2t+8, 2t+9 of column g
 * An element of d depends on its own row of a and column of b alone. */
__device__ __forceinline__ void mma_bf16(float (&d)[4], const uint32_t (&a)[4],
                                         const uint32_t (&b)[2])
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

/* Four matrices of 8 rows of 16 bytes in shared memory: lane 8·i + r names row r of the i-th. to[i]
 * of lane (g, t) is what row g of it has at 2t and 2t+1, of 16 bits each: mma's fragment of a
 * matrix [n, k]. */
__device__ __forceinline__ void load_matrices(uint32_t (&to)[4], const void *row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(row)))
                 : "memory");
}

/* The same, but to[i] is what rows 2t and 2t+1 have at g: the fragment of a matrix [k, n]. */
__device__ __forceinline__ void load_matrices_turned(uint32_t (&to)[4], const void *row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(row)))
                 : "memory");
}

/* 2^x within 2 units of the last place, 0 for what is below 2^-126. */
__device__ __forceinline__ float exp2_quick(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* 1 / x within 1 unit of the last place, of x from 1 on. */
__device__ __forceinline__ float reciprocal_quick(float x)
{
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* mma_bf16 of F16 operands. */
__device__ __forceinline__ void mma_f16(float (&d)[4], const uint32_t (&a)[4],
                                        const uint32_t (&b)[2])
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

/* Starts copying 16 bytes from global to shared memory, both 16-byte aligned (cp.async). With n <
 * 16 only the first n bytes are read and the rest becomes zero. */
__device__ __forceinline__ void copy_async_16(void *shared, const void *global, int n = 16)
{
    const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(global), "r"(n)
                 : "memory");
}
/* The same of 8 bytes. */
__device__ __forceinline__ void copy_async_8(void *shared, const void *global, int n = 8)
{
    const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(address), "l"(global), "r"(n)
                 : "memory");
}
/* Ends a group of copies. */
__device__ __forceinline__ void copy_async_commit()
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}
/* Waits until at most n groups of this thread are under way; others' copies need a barrier too. */
template <int n> __device__ __forceinline__ void copy_async_wait()
{
    asm volatile("cp.async.wait_group %0;" ::"n"(n) : "memory");
}

/* x and y rounded to BF16, x in the lower half: as bf16_round, but every NaN becomes 0x7fff. */
__device__ __forceinline__ uint32_t bf16_pair(float x, float y)
{
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(y), "f"(x));
    return pair;
}

/* The same to F16: as f16_saturated, but every NaN becomes 0x7fff. */
__device__ __forceinline__ uint32_t f16_pair(float x, float y)
{
    uint32_t pair;
    asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(y), "f"(x));
    return pair;
}

__device__ __forceinline__ float f16_widen(uint16_t bits)
{
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

#endif

/* BF16 is held as its upper 16 bits, as in kernels/tensor.h. */
__host__ __device__ __forceinline__ float bf16_widen(uint16_t bits)
{
    union {
        uint32_t u;
        float f;
    } v;
    v.u = static_cast<uint32_t>(bits) << 16;
    return v.f;
}

/* To nearest, ties to even; NaN stays NaN. */
__host__ __device__ __forceinline__ uint16_t bf16_round(float value)
{
    union {
        float f;
        uint32_t u;
    } v;
    v.f = value;
    if ((v.u & 0x7fffffffu) > 0x7f800000u) {
        return static_cast<uint16_t>((v.u >> 16) | 0x40u);
    }
    return static_cast<uint16_t>((v.u + 0x7fffu + ((v.u >> 16) & 1u)) >> 16);
}

/* Four of them that follow one another. */
__device__ __forceinline__ float4 bf16_widen_four(uint2 four)
{
    return {__uint_as_float(four.x << 16), __uint_as_float(four.x & 0xffff0000u),
            __uint_as_float(four.y << 16), __uint_as_float(four.y & 0xffff0000u)};
}

#ifdef PKMSERVE_CUDA_HOST

static inline uint32_t bf16_pair(float x, float y)
{
    const uint32_t lo = x != x ? 0x7fff : bf16_round(x);
    const uint32_t hi = y != y ? 0x7fff : bf16_round(y);
    return hi << 16 | lo;
}

static inline uint32_t f16_pair(float x, float y)
{
    const uint32_t lo = x != x ? 0x7fff : f16_saturated(x);
    const uint32_t hi = y != y ? 0x7fff : f16_saturated(y);
    return hi << 16 | lo;
}

static inline float f16_widen(uint16_t bits)
{
    return f16_to_f32(bits);
}

#endif

/* x and y as sums of two BF16 numbers: pairs as of bf16_pair, in x what they are rounded to, in y
 * what that leaves of them, rounded too. */
__device__ __forceinline__ uint2 bf16_split_pair(float x, float y)
{
    const uint32_t hi = bf16_pair(x, y);
    const uint32_t lo =
        bf16_pair(x - __uint_as_float(hi << 16), y - __uint_as_float(hi & 0xffff0000u));
    return make_uint2(hi, lo);
}

/* The same of eight numbers, four pairs each. */
__device__ __forceinline__ void bf16_split_eight(uint32_t (&hi)[4], uint32_t (&lo)[4],
                                                 const float (&x)[8])
{
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint2 pair = bf16_split_pair(x[2 * i], x[2 * i + 1]);
        hi[i] = pair.x;
        lo[i] = pair.y;
    }
}

#endif
