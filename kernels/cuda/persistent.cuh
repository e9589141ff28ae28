/* What is recorded of a decode step for the persistent kernel (persistent.cu): which kernels it would
 * launch, in what grids and with what arguments. */
#ifndef KERNELS_CUDA_PERSISTENT_CUH
#define KERNELS_CUDA_PERSISTENT_CUH

#include "kernels/cuda/cuda.cuh"

#include <string.h>

/* The kernels that the persistent one can stand for. */
enum body {
    BODY_NONE,
    BODY_GEMV_BF16,                         /* of 1, 2, 4 and 8 halves, plain and normed */
    BODY_GEMV_F32 = BODY_GEMV_BF16 + 8,     /* of 1, 4 and 8 tokens, plain and normed */
    BODY_ATTENTION_F32 = BODY_GEMV_F32 + 6, /* of a cache of F32 */
    BODY_ATTENTION_BF16,
    BODY_SEARCH,
    BODY_READ_F32,
    BODY_READ_BF16,
    BODY_OUTPUTS
};

__host__ __device__ constexpr enum body body_gemv_bf16(int n_half, int n_nt, bool is_normed)
{
    const int at = n_half == 8 ? 3 : n_half / 2;
    return n_nt > 1 ? BODY_NONE : static_cast<enum body>(BODY_GEMV_BF16 + 2 * at + is_normed);
}

__host__ __device__ constexpr enum body body_gemv_f32(int n_token, bool is_row_major,
                                                      bool is_normed)
{
    return is_row_major ? BODY_NONE
                        : static_cast<enum body>(BODY_GEMV_F32 + 2 * (n_token / 4) + is_normed);
}

__host__ __device__ constexpr enum body body_attention(size_t element_bytes, bool is_one_buffer)
{
    return is_one_buffer        ? BODY_NONE
           : element_bytes == 2 ? BODY_ATTENTION_BF16
                                : BODY_ATTENTION_F32;
}

enum { BODY_ARGS_BYTES = 720 };

/* A launch, as the persistent kernel reads it. */
struct __align__(16) body_op
{
    int body; /* enum body */
    unsigned grid[3];
    int n_thread;         /* of a block */
    int n_group;          /* blocks that are computed side by side */
    unsigned group_bytes; /* of dynamic shared memory of each */
    int unused;
    unsigned char args[BODY_ARGS_BYTES]; /* a body_args */
};

/* A kernel's arguments. */
template <typename... P> struct body_args;
template <> struct body_args<> {
};
template <typename A, typename... R> struct body_args<A, R...> {
    A first;
    struct body_args<R...> rest;
};

static inline struct body_args<> body_args_of() {
    return {};
}

template <typename A, typename... R>
static inline struct body_args<A, R...> body_args_of(const A &first, const R &...rest) {
    return {first, body_args_of(rest...)};
}

/* Adds a launch to the step that is being recorded. */
void persistent_append(struct cuda *cu, enum body body, dim3 grid, int n_thread,
                       size_t shared_bytes, const void *args, size_t args_bytes);

template <typename... P>
static inline void persistent_add(struct cuda *cu, enum body body, void (*kernel)(P...), dim3 grid,
                                  dim3 block, size_t shared_bytes, std::type_identity_t<P>... args)
{
    (void)kernel;
    if (cu->adds_bodies && body != BODY_NONE) {
        const struct body_args<P...> packed = body_args_of<P...>(args...);
        static_assert(sizeof packed <= BODY_ARGS_BYTES, "the arguments of an op");
        persistent_append(cu, body, grid, static_cast<int>(block.x), shared_bytes, &packed,
                          sizeof packed);
    }
}

/* LAUNCH on cu's queue, of a kernel that has a body. */
#define LAUNCH_BODY(cu, body, kernel, grid, block, shared_bytes, ...)                              \
    do {                                                                                           \
        LAUNCH(kernel, grid, block, shared_bytes, cuda_queue(cu), __VA_ARGS__);                    \
        persistent_add(cu, body, kernel, grid, block, shared_bytes, __VA_ARGS__);                  \
    } while (0)

#endif
