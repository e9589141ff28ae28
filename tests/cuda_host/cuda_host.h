/* The test double's half of kernels/cuda/portable.cuh: launching, dynamic shared memory, the matrix
 * instruction, asynchronous copies. See README.md for what the double sees. */
#ifndef CUDA_HOST_H
#define CUDA_HOST_H

#include "kernels/tensor.h" /* F16 */
#include "tests/cuda_host/device.h"

#include <new>
#include <tuple>
#include <utility>

/* ---- launches ------------------------------------------------------------------------------- */

/* A kernel and its arguments, copied at the launch. Made by LAUNCH with malloc, freed by stream.cc.
 */
struct cuda_host_call {
    void (*run)(const struct cuda_host_call *call); /* one thread of it */
    const void *kernel;
    const char *name;
    const char *file;
    int line;
    bool overlaps; /* launch_queue's */
    int n_ref;
    dim3 grid, block;
    size_t shared_bytes;
    const char *range; /* of NVTX, that it was launched in */
};

/* For cuBLASLt's double too, which is a library of its own. */
#define CUDA_HOST_SHARED __attribute__((visibility("default")))

/* Checks the shape and hands the call to the stream, which owns it from then on. Returns what
 * cudaGetLastError will give. */
CUDA_HOST_SHARED cudaError_t cuda_host_launch(struct cuda_host_call *call, cudaStream_t stream);
/* Reports an argument that the device could not follow: neither NULL nor device nor pinned. */
CUDA_HOST_SHARED void cuda_host_check_pointer(const struct cuda_host_call *call, int i,
                                              const void *pointer);

template <typename... P> struct cuda_host_call_of {
    struct cuda_host_call base; /* first */
    void (*kernel)(P...);
    std::tuple<P...> args;
};

template <typename... P> void cuda_host_run(const struct cuda_host_call *call)
{
    const auto *const whole = reinterpret_cast<const cuda_host_call_of<P...> *>(call);
    std::apply(whole->kernel, whole->args);
}

template <typename P>
void cuda_host_check_arg(const struct cuda_host_call *call, int i, const P &value)
{
    if constexpr (std::is_pointer_v<P>) {
        cuda_host_check_pointer(call, i, reinterpret_cast<const void *>(value));
    }
}

/* A stream, or a launch_queue. */
struct cuda_host_queue {
    cudaStream_t stream;
    bool overlaps;
    cuda_host_queue(cudaStream_t stream_) : stream(stream_), overlaps(false)
    {
    }
    template <typename Q, typename = decltype(Q::overlaps)>
    cuda_host_queue(const Q &queue) : stream(queue.stream), overlaps(queue.overlaps)
    {
    }
};

template <typename... P>
cudaError_t cuda_host_call_new(const char *name, const char *file, int line, cuda_host_queue queue,
                               dim3 grid, dim3 block, size_t shared_bytes, void (*kernel)(P...),
                               std::type_identity_t<P>... args)
{
    static_assert((std::is_trivially_copyable_v<P> && ...), "arguments are copied as bytes");
    static_assert((sizeof(P) + ... + 0) <= 4096, "a launch takes 4 KB of arguments");
    using call_type = cuda_host_call_of<P...>;
    void *const memory = malloc(sizeof(call_type));
    if (memory == nullptr) {
        abort();
    }
    auto *const call =
        new (memory) call_type{{cuda_host_run<P...>, reinterpret_cast<const void *>(kernel), name,
                                file, line, queue.overlaps, 1, grid, block, shared_bytes, ""},
                               kernel,
                               std::tuple<P...>(args...)};
    int i = 0;
    (cuda_host_check_arg(&call->base, ++i, args), ...);
    (void)i;
    return cuda_host_launch(&call->base, queue.stream);
}

#define LAUNCH(kernel, grid, block, shared_bytes, queue, ...)                                      \
    static_cast<void>(cuda_host_call_new(#kernel, __FILE__, __LINE__, (queue), (grid), (block),    \
                                         (shared_bytes), (kernel)__VA_OPT__(, ) __VA_ARGS__))

/* ---- overlap -------------------------------------------------------------------------------- */

/* Of a launch that overlaps, a block comes here before kernels before it have begun. is_alone: none
 * behind it begins before this one is complete. */
void cuda_host_grid_wait(bool is_alone, const struct cuda_host_place &place);

static inline void grid_wait(CUDA_HOST_HERE)
{
    cuda_host_grid_wait(false, CUDA_HOST_PLACE("grid_wait"));
}
static inline void grid_wait_alone(CUDA_HOST_HERE)
{
    cuda_host_grid_wait(true, CUDA_HOST_PLACE("grid_wait_alone"));
}
/* A read, so that it is seen. */
static inline void prefetch_l2(const void *global)
{
    (void)*static_cast<const volatile unsigned char *>(global);
}

static inline uint4 load_16_if(bool is_there, const void *global)
{
    return is_there ? *static_cast<const uint4 *>(global) : make_uint4(0, 0, 0, 0);
}

static inline void prefetch_l2_many(const void *global, uint32_t n)
{
    prefetch_l2(global);
    prefetch_l2(static_cast<const unsigned char *>(global) + n - 1);
}

static inline void device_pause()
{
}

/* ---- dynamic shared memory ------------------------------------------------------------------ */

extern unsigned char *cuda_host_dynamic_shared;

#define DYN_SHARED(T, name) T *const name = reinterpret_cast<T *>(cuda_host_dynamic_shared)

/* ---- the matrix instructions ---------------------------------------------------------------- */

/* A lane's fragments. */
struct cuda_host_mma {
    float *d;
    const uint32_t *a, *b;
    bool is_f16; /* else BF16 */
};

static inline void mma_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                            CUDA_HOST_HERE)
{
    const struct cuda_host_mma lane = {d, a, b, false};
    cuda_host_collect(COLLECTIVE_MMA, 0xffffffffu, reinterpret_cast<uintptr_t>(&lane), 0,
                      CUDA_HOST_PLACE("mma_bf16"));
}

static inline void mma_f16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                           CUDA_HOST_HERE)
{
    const struct cuda_host_mma lane = {d, a, b, true};
    cuda_host_collect(COLLECTIVE_MMA, 0xffffffffu, reinterpret_cast<uintptr_t>(&lane), 0,
                      CUDA_HOST_PLACE("mma_f16"));
}

/* ---- asynchronous copies -------------------------------------------------------------------- */

/* A copy is noted when it is asked for and done by the wait, so that reading before the wait reads
 * poison. */
struct cuda_host_copy {
    void *shared;
    const void *global;
    int size, n; /* bytes that are written, and of these read; the rest become zero */
};
void cuda_host_copy_start(const struct cuda_host_copy &copy, const struct cuda_host_place &place);
void cuda_host_copy_commit(void);
/* The next copy of this thread that must be done so that at most n groups remain; false if none. */
bool cuda_host_copy_next(int n, struct cuda_host_copy *copy);

/* Reads and writes what the copy will, so that it is seen where the copy is asked for. */
static inline void cuda_host_copy_touch(const struct cuda_host_copy &copy)
{
    volatile unsigned char *const to = static_cast<unsigned char *>(copy.shared);
    const volatile unsigned char *const from = static_cast<const unsigned char *>(copy.global);
    to[0] = to[0];
    to[copy.size - 1] = to[copy.size - 1];
    if (copy.n > 0) {
        (void)from[0];
        (void)from[copy.n - 1];
    }
}

static inline void copy_async_16(void *shared, const void *global, int n = 16, CUDA_HOST_HERE)
{
    const struct cuda_host_copy copy = {shared, global, 16, n};
    cuda_host_copy_start(copy, CUDA_HOST_PLACE("copy_async_16"));
    cuda_host_copy_touch(copy);
}
static inline void copy_async_8(void *shared, const void *global, int n = 8, CUDA_HOST_HERE)
{
    const struct cuda_host_copy copy = {shared, global, 8, n};
    cuda_host_copy_start(copy, CUDA_HOST_PLACE("copy_async_8"));
    cuda_host_copy_touch(copy);
}
static inline void copy_async_commit()
{
    cuda_host_copy_commit();
}
template <int n> inline void copy_async_wait()
{
    struct cuda_host_copy copy;
    while (cuda_host_copy_next(n, &copy)) {
        unsigned char bytes[16] = {0};
        memcpy(bytes, copy.global, static_cast<size_t>(copy.n));
        memcpy(copy.shared, bytes, static_cast<size_t>(copy.size));
    }
}

#endif
