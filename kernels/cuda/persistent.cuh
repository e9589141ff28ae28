/* What is recorded of a decode step for the persistent kernel (persistent.cu): which kernels it would
 * launch, in what grids and with what arguments. */
#ifndef KERNELS_CUDA_PERSISTENT_CUH
#define KERNELS_CUDA_PERSISTENT_CUH

#include "kernels/cuda/cuda.cuh"

#include <string.h>

/* The kernels that the persistent one can stand for: what steps of up to 8 drawn rows launch. */
enum body {
    BODY_NONE,
    BODY_GEMV_BF16, /* of 1, 2, 4 and 8 halves, of rounded rows and normed */
    BODY_GEMV_F32 =
        BODY_GEMV_BF16 + 8, /* of 1, 4 and 8 tokens, each of 1 and 2 halves, plain and normed */
    BODY_ATTENTION = BODY_GEMV_F32 + 12, /* of a cache of F32 and BF16, heads of up to 64 columns */
    BODY_SEARCH = BODY_ATTENTION + 2,    /* of up to 512 keys, by 8 and 16 warps */
    BODY_READ = BODY_SEARCH + 2,         /* of values of F32 and BF16 */
    BODY_SEARCH_F32 = BODY_READ + 2,     /* of keys that are not split, for 1 and 4 rows */
    BODY_OUTPUTS = BODY_SEARCH_F32 + 2
};

__host__ __device__ constexpr enum body body_gemv_bf16(int n_half, int n_nt, bool is_normed,
                                                       bool is_rounded)
{
    const int at = n_half == 8 ? 3 : n_half / 2;
    return n_nt > 1 || is_rounded == is_normed
               ? BODY_NONE
               : static_cast<enum body>(BODY_GEMV_BF16 + 2 * at + is_normed);
}

__host__ __device__ constexpr enum body body_gemv_f32(int n_token, int n_half, bool is_row_major,
                                                      bool is_normed)
{
    const int at = 2 * (n_token / 4) + n_half - 1;
    return is_row_major ? BODY_NONE : static_cast<enum body>(BODY_GEMV_F32 + 2 * at + is_normed);
}

__host__ __device__ constexpr enum body body_attention(size_t element_bytes, int width,
                                                       bool is_whole)
{
    return width > 64 || !is_whole ? BODY_NONE
                                   : static_cast<enum body>(BODY_ATTENTION + (element_bytes == 2));
}

__host__ __device__ constexpr enum body body_search(int n_key_lane, int n_warp)
{
    return n_key_lane > 16 ? BODY_NONE : static_cast<enum body>(BODY_SEARCH + (n_warp == 16));
}

__host__ __device__ constexpr enum body body_search_f32(int n_row)
{
    return static_cast<enum body>(BODY_SEARCH_F32 + (n_row > 1));
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
