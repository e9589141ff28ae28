/* What kernels call: thread indices, barriers, shuffles, votes, reductions, atomics, arithmetic.
 * Included by cuda_host.h.
 *
 * A function that waits for other threads takes the place of its call as defaulted arguments, so
 * that a report of threads waiting for one another names the lines. Its behaviour is block.cc's. */
#ifndef CUDA_HOST_DEVICE_H
#define CUDA_HOST_DEVICE_H

#include <cuda_runtime.h>

#include <stdlib.h>
#include <type_traits>

/* ---- who am I ------------------------------------------------------------------------------- */

/* Set by block.cc at each switch between threads. */
extern const uint3 *cuda_host_thread_idx;
extern uint3 cuda_host_block_idx;
extern dim3 cuda_host_block_dim, cuda_host_grid_dim;

#define threadIdx (*cuda_host_thread_idx)
#define blockIdx (static_cast<const uint3 &>(cuda_host_block_idx))
#define blockDim (static_cast<const dim3 &>(cuda_host_block_dim))
#define gridDim (static_cast<const dim3 &>(cuda_host_grid_dim))
enum { warpSize = 32 };

/* ---- waiting for one another ---------------------------------------------------------------- */

struct cuda_host_place {
    const char *what, *file;
    int line;
};

#define CUDA_HOST_HERE const char *file = __builtin_FILE(), const int line = __builtin_LINE()
#define CUDA_HOST_PLACE(what)                                                                      \
    cuda_host_place                                                                                \
    {                                                                                              \
        what, file, line                                                                           \
    }

/* Returns once all threads of the block have arrived: the sum of their values. */
int cuda_host_barrier(int value, const struct cuda_host_place &place);

enum cuda_host_collective {
    COLLECTIVE_SYNC,
    COLLECTIVE_SHUFFLE, /* value of lane arg */
    COLLECTIVE_BALLOT,  /* bit of each lane whose value is not 0 */
    COLLECTIVE_ADD,
    COLLECTIVE_AND,
    COLLECTIVE_OR,
    COLLECTIVE_MIN_SIGNED,
    COLLECTIVE_MAX_SIGNED,
    COLLECTIVE_MIN_UNSIGNED,
    COLLECTIVE_MAX_UNSIGNED,
    COLLECTIVE_MMA, /* value: address of a cuda_host_mma */
};
/* Returns once all lanes of mask that have not left the kernel called it at the same place. */
uint64_t cuda_host_collect(enum cuda_host_collective op, unsigned int mask, uint64_t value, int arg,
                           const struct cuda_host_place &place);
int cuda_host_lane(void);
void cuda_host_fence(void);

static inline void __syncthreads(CUDA_HOST_HERE)
{
    cuda_host_barrier(0, CUDA_HOST_PLACE("__syncthreads"));
}
static inline int __syncthreads_count(int predicate, CUDA_HOST_HERE)
{
    return cuda_host_barrier(predicate != 0, CUDA_HOST_PLACE("__syncthreads_count"));
}
static inline int __syncthreads_or(int predicate, CUDA_HOST_HERE)
{
    return cuda_host_barrier(predicate != 0, CUDA_HOST_PLACE("__syncthreads_or")) != 0;
}
static inline int __syncthreads_and(int predicate, CUDA_HOST_HERE)
{
    return cuda_host_barrier(predicate == 0, CUDA_HOST_PLACE("__syncthreads_and")) == 0;
}
static inline void __syncwarp(unsigned int mask = 0xffffffffu, CUDA_HOST_HERE)
{
    cuda_host_collect(COLLECTIVE_SYNC, mask, 0, 0, CUDA_HOST_PLACE("__syncwarp"));
}
static inline void __threadfence(void)
{
    cuda_host_fence();
}

/* ---- shuffles ------------------------------------------------------------------------------- */

template <typename T>
T cuda_host_shuffle(unsigned int mask, T value, int lane, const struct cuda_host_place &place)
{
    static_assert(std::is_arithmetic_v<T> && sizeof(T) >= 4, "shuffles take 4 or 8 bytes");
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof(T));
    bits = cuda_host_collect(COLLECTIVE_SHUFFLE, mask, bits, lane, place);
    memcpy(&value, &bits, sizeof(T));
    return value;
}

template <typename T>
T __shfl_sync(unsigned int mask, T value, int lane, int width = 32, CUDA_HOST_HERE)
{
    const int first = cuda_host_lane() & -width;
    return cuda_host_shuffle(mask, value, first + (lane & (width - 1)),
                             CUDA_HOST_PLACE("__shfl_sync"));
}
template <typename T>
T __shfl_up_sync(unsigned int mask, T value, unsigned int delta, int width = 32, CUDA_HOST_HERE)
{
    const int self = cuda_host_lane(), lane = self - static_cast<int>(delta);
    return cuda_host_shuffle(mask, value, lane < (self & -width) ? self : lane,
                             CUDA_HOST_PLACE("__shfl_up_sync"));
}
template <typename T>
T __shfl_down_sync(unsigned int mask, T value, unsigned int delta, int width = 32, CUDA_HOST_HERE)
{
    const int self = cuda_host_lane(), lane = self + static_cast<int>(delta);
    return cuda_host_shuffle(mask, value, lane >= (self & -width) + width ? self : lane,
                             CUDA_HOST_PLACE("__shfl_down_sync"));
}
template <typename T>
T __shfl_xor_sync(unsigned int mask, T value, int bits, int width = 32, CUDA_HOST_HERE)
{
    const int self = cuda_host_lane(), lane = self ^ bits;
    return cuda_host_shuffle(mask, value, lane >= (self & -width) + width ? self : lane,
                             CUDA_HOST_PLACE("__shfl_xor_sync"));
}

/* Each lane names a row of 16 bytes of shared memory, and reads of those of others. */
static inline void cuda_host_load_matrices(uint32_t (&to)[4], const void *row, bool is_turned,
                                           const struct cuda_host_place &place)
{
    const int g = cuda_host_lane() / 4, t = cuda_host_lane() % 4;
    if (reinterpret_cast<uintptr_t>(row) % 16 != 0) {
        (void)fprintf(stderr, "%s:%d: %s: a row at an address that is no multiple of 16\n",
                      place.file, place.line, place.what);
        abort();
    }
    for (int i = 0; i < 4; ++i) {
        uint16_t pair[2];
        for (int e = 0; e < 2; ++e) {
            const int of = 8 * i + (is_turned ? 2 * t + e : g);
            const uint64_t at = cuda_host_shuffle(
                0xffffffffu, static_cast<uint64_t>(reinterpret_cast<uintptr_t>(row)), of, place);
            pair[e] = reinterpret_cast<const uint16_t *>(at)[is_turned ? g : 2 * t + e];
        }
        to[i] = pair[0] | static_cast<uint32_t>(pair[1]) << 16;
    }
}
static inline void load_matrices(uint32_t (&to)[4], const void *row, CUDA_HOST_HERE)
{
    cuda_host_load_matrices(to, row, false, CUDA_HOST_PLACE("load_matrices"));
}
static inline void load_matrices_turned(uint32_t (&to)[4], const void *row, CUDA_HOST_HERE)
{
    cuda_host_load_matrices(to, row, true, CUDA_HOST_PLACE("load_matrices_turned"));
}
static inline float reciprocal_quick(float x)
{
    return 1 / x;
}

static inline float exp2_quick(float x)
{
    return x < -126.0f ? 0.0f : exp2f(x);
}

/* ---- votes and reductions ------------------------------------------------------------------- */

static inline unsigned int __ballot_sync(unsigned int mask, int predicate, CUDA_HOST_HERE)
{
    return static_cast<unsigned int>(cuda_host_collect(COLLECTIVE_BALLOT, mask, predicate != 0, 0,
                                                       CUDA_HOST_PLACE("__ballot_sync")));
}
static inline int __any_sync(unsigned int mask, int predicate, CUDA_HOST_HERE)
{
    return cuda_host_collect(COLLECTIVE_BALLOT, mask, predicate != 0, 0,
                             CUDA_HOST_PLACE("__any_sync")) != 0;
}
static inline int __all_sync(unsigned int mask, int predicate, CUDA_HOST_HERE)
{
    return cuda_host_collect(COLLECTIVE_BALLOT, mask, predicate == 0, 0,
                             CUDA_HOST_PLACE("__all_sync")) == 0;
}

#define CUDA_HOST_REDUCE(type, name, op)                                                           \
    static inline type name(unsigned int mask, type value, CUDA_HOST_HERE)                         \
    {                                                                                              \
        return static_cast<type>(                                                                  \
            cuda_host_collect(op, mask, static_cast<uint64_t>(value), 0, CUDA_HOST_PLACE(#name))); \
    }
CUDA_HOST_REDUCE(int, __reduce_add_sync, COLLECTIVE_ADD)
CUDA_HOST_REDUCE(unsigned int, __reduce_add_sync, COLLECTIVE_ADD)
CUDA_HOST_REDUCE(int, __reduce_min_sync, COLLECTIVE_MIN_SIGNED)
CUDA_HOST_REDUCE(unsigned int, __reduce_min_sync, COLLECTIVE_MIN_UNSIGNED)
CUDA_HOST_REDUCE(int, __reduce_max_sync, COLLECTIVE_MAX_SIGNED)
CUDA_HOST_REDUCE(unsigned int, __reduce_max_sync, COLLECTIVE_MAX_UNSIGNED)
CUDA_HOST_REDUCE(unsigned int, __reduce_and_sync, COLLECTIVE_AND)
CUDA_HOST_REDUCE(unsigned int, __reduce_or_sync, COLLECTIVE_OR)
#undef CUDA_HOST_REDUCE

/* ---- atomics -------------------------------------------------------------------------------- */

/* Relaxed, as the GPU's: they order nothing else. Each returns the value before. */
template <typename T, typename F> T cuda_host_update(T *address, F next)
{
    T old = __atomic_load_n(address, __ATOMIC_RELAXED);
    while (!__atomic_compare_exchange_n(address, &old, next(old), true, __ATOMIC_RELAXED,
                                        __ATOMIC_RELAXED)) {
    }
    return old;
}
#define CUDA_HOST_ATOMIC(type)                                                                     \
    static inline type atomicAdd(type *address, type value)                                        \
    {                                                                                              \
        return __atomic_fetch_add(address, value, __ATOMIC_RELAXED);                               \
    }                                                                                              \
    static inline type atomicExch(type *address, type value)                                       \
    {                                                                                              \
        return __atomic_exchange_n(address, value, __ATOMIC_RELAXED);                              \
    }                                                                                              \
    static inline type atomicCAS(type *address, type expected, type value)                         \
    {                                                                                              \
        __atomic_compare_exchange_n(address, &expected, value, false, __ATOMIC_RELAXED,            \
                                    __ATOMIC_RELAXED);                                             \
        return expected;                                                                           \
    }                                                                                              \
    static inline type atomicMax(type *address, type value)                                        \
    {                                                                                              \
        return cuda_host_update(address, [=](type old) { return old > value ? old : value; });     \
    }
CUDA_HOST_ATOMIC(int)
CUDA_HOST_ATOMIC(unsigned int)
CUDA_HOST_ATOMIC(unsigned long long)
#undef CUDA_HOST_ATOMIC

static inline unsigned int __float_as_uint(float value)
{
    unsigned int bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}
static inline float __uint_as_float(unsigned int bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}
static inline float __int_as_float(int bits)
{
    return __uint_as_float(static_cast<unsigned int>(bits));
}

static inline float atomicAdd(float *address, float value)
{
    return __uint_as_float(
        cuda_host_update(reinterpret_cast<unsigned int *>(address), [=](unsigned int old) {
            return __float_as_uint(__uint_as_float(old) + value);
        }));
}
static inline float atomicExch(float *address, float value)
{
    return __uint_as_float(
        atomicExch(reinterpret_cast<unsigned int *>(address), __float_as_uint(value)));
}
static inline unsigned int atomicInc(unsigned int *address, unsigned int last)
{
    return cuda_host_update(address, [=](unsigned int old) { return old >= last ? 0 : old + 1; });
}

/* ---- arithmetic ----------------------------------------------------------------------------- */

template <typename T> T __ldg(const T *address)
{
    return *address;
}

static inline int __clz(int x)
{
    return x == 0 ? 32 : __builtin_clz(static_cast<unsigned int>(x));
}
static inline int __ffs(int x)
{
    return __builtin_ffs(x);
}

#define CUDA_HOST_MIN_MAX(type)                                                                    \
    static inline constexpr type min(type x, type y)                                               \
    {                                                                                              \
        return y < x ? y : x;                                                                      \
    }                                                                                              \
    static inline constexpr type max(type x, type y)                                               \
    {                                                                                              \
        return x < y ? y : x;                                                                      \
    }
CUDA_HOST_MIN_MAX(int)
CUDA_HOST_MIN_MAX(unsigned int)
CUDA_HOST_MIN_MAX(long)
CUDA_HOST_MIN_MAX(unsigned long)
CUDA_HOST_MIN_MAX(long long)
CUDA_HOST_MIN_MAX(unsigned long long)
#undef CUDA_HOST_MIN_MAX
/* Of floats the device's take the number where the other is a NaN. */
static inline float min(float x, float y)
{
    return fminf(x, y);
}
static inline float max(float x, float y)
{
    return fmaxf(x, y);
}

#endif
