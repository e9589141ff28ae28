/* A decode step of few rows as one kernel, which stays from its first op to its last.
 *
 * A graph of 63 nodes pays for each from the end of a kernel to the first weights of the next. Here the
 * blocks, one a multiprocessor, go through a list of the launches that were recorded (struct body_op).
 * They share each one's blocks out among themselves, and groups of a block's threads stand for them: as
 * many side by side as there are threads and shared memory. Where a kernel has its grid_wait, the first of
 * a block's groups waits until all blocks have done the op before: so what a kernel asks for early, the
 * weights of a product above all, is under way meanwhile, and the body of the next op arrives with it.
 *
 * The bodies are the kernels' own text, read as as_body.cuh says: the bits are those of the graph. A step
 * that launches anything else, and one that finds no room, is a graph.
 *
 * What blocks wait for is a count in device memory, of blocks times ops. The last one to come sets it to 0
 * for the next launch. Global memory that other blocks have written is read by plain loads: count_wait is
 * an acquire, count_up a release, and the block's barriers carry both to all threads; what is read by
 * __ldg are constants.
 *
 * Bound: as the kernels', and a barrier of the grid for each op. No GPU has seen it yet, hence only with
 * PKMSERVE_CUDA_PERSISTENT=1, and a fast path, which the engine's self-test compares with the graph. */
#include "kernels/cuda/backend.cuh"
#include "kernels/cuda/persistent.cuh"

#include <stdio.h>
#include <stdlib.h>

namespace
{

enum {
    THREADS = 512, /* of a block: 128 registers each */
    WARP_THREADS = 32,
    PLACE_GROUPS = 8, /* most groups of a block; barrier 0 is the block's, these have 1 to 8 */
    PROGRAM_OPS = 256,
    PROGRAM_MAX = 40 /* 8 numbers of rows, in some kinds of steps */
};

/* ---- places --------------------------------------------------------------------------------- */

/* The block that a warp's group stands for. */
struct place {
    uint3 block, grid;
    unsigned first_thread, n_thread;
    unsigned shared_at; /* of its dynamic shared memory in the block's */
    int group;
    unsigned goal; /* what the counter must reach before inputs are read */
    const unsigned *counter;
    bool waits; /* else somebody has */
};

/* Each warp has its own. */
__device__ __forceinline__ struct place *place_here()
{
    __shared__ struct place places[THREADS / WARP_THREADS];
    return &places[threadIdx.x / WARP_THREADS];
}

__device__ __forceinline__ uint3 place_thread()
{
    return {threadIdx.x - place_here()->first_thread, 0, 0};
}

__device__ __forceinline__ uint3 place_block()
{
    return place_here()->block;
}

__device__ __forceinline__ uint3 place_block_size()
{
    return {place_here()->n_thread, 1, 1};
}

__device__ __forceinline__ uint3 place_grid_size()
{
    return place_here()->grid;
}

__device__ __forceinline__ int place_group()
{
    return place_here()->group;
}

__device__ __forceinline__ unsigned char *place_shared()
{
    DYN_SHARED(unsigned char, shared);
    return shared + place_here()->shared_at;
}

__device__ __forceinline__ void place_sync()
{
    group_sync(place_group() + 1, static_cast<int>(place_here()->n_thread));
}

/* Comes back when all blocks have done the ops before. By all threads of the block, once an op. */
__device__ __forceinline__ void ops_wait(const unsigned *counter, unsigned goal)
{
    if (threadIdx.x == 0) {
        count_wait(counter, goal);
    }
    __syncthreads();
}

__device__ __forceinline__ void place_wait()
{
    const struct place *const here = place_here();
    if (here->waits) {
        ops_wait(here->counter, here->goal);
    }
}

/* ---- the kernel ----------------------------------------------------------------------------- */

/* Computes the block that place_here() says. */
__device__ __forceinline__ void body_run(int body, const unsigned char *args);

/* Starts copying an op to shared memory. */
__device__ __forceinline__ void op_load(struct body_op *to, const struct body_op *from)
{
    constexpr unsigned n_piece = sizeof(struct body_op) / 16;
    static_assert(sizeof(struct body_op) % 16 == 0 && n_piece <= THREADS, "a piece a thread");
    if (threadIdx.x < n_piece) {
        copy_async_16(reinterpret_cast<uint4 *>(to) + threadIdx.x,
                      reinterpret_cast<const uint4 *>(from) + threadIdx.x);
    }
    copy_async_commit();
}

/* This block's share of an op. */
__device__ __forceinline__ void op_run(const struct body_op *op, const unsigned *counter,
                                       unsigned goal)
{
    const unsigned n_thread = static_cast<unsigned>(op->n_thread);
    const unsigned n_group = static_cast<unsigned>(op->n_group);
    const unsigned n_tile = op->grid[0] * op->grid[1] * op->grid[2];
    const unsigned group = threadIdx.x / n_thread;
    bool waits = true;
    for (unsigned tile = group < n_group ? blockIdx.x + group * gridDim.x : n_tile; tile < n_tile;
         tile += gridDim.x * n_group) {
        if (threadIdx.x % WARP_THREADS == 0) {
            *place_here() = {
                .block = {tile % op->grid[0], tile / op->grid[0] % op->grid[1],
                          tile / op->grid[0] / op->grid[1]},
                .grid = {op->grid[0], op->grid[1], op->grid[2]},
                .first_thread = group * n_thread,
                .n_thread = n_thread,
                .shared_at = group * op->group_bytes,
                .group = static_cast<int>(group),
                .goal = goal,
                .counter = counter,
                .waits = waits,
            };
        }
        __syncwarp();
        body_run(op->body, op->args);
        place_sync(); /* the next one writes what this one read */
        waits = false;
    }
    if (waits) {
        ops_wait(counter, goal);
    }
}

__global__ void __launch_bounds__(THREADS, 1)
    persistent_kernel(const struct body_op *program, int n_op, unsigned *counter)
{
    __shared__ struct body_op ops[2]; /* this one, and the next on its way */
    grid_wait();
    op_load(&ops[0], program);
    for (int i = 0; i < n_op; i++) {
        copy_async_wait<0>();
        __syncthreads(); /* the op is there, and this block has done the one before */
        if (threadIdx.x == 0 && i > 0) {
            count_up(counter);
        }
        if (i + 1 < n_op) {
            op_load(&ops[(i + 1) % 2], program + i + 1);
        }
        op_run(&ops[i % 2], counter, static_cast<unsigned>(i) * gridDim.x);
    }
    __syncthreads();
    if (threadIdx.x == 0 && atomicAdd(counter, 1u) == static_cast<unsigned>(n_op) * gridDim.x - 1) {
        (void)atomicExch(counter, 0u);
    }
}

} // namespace

/* ---- programs ------------------------------------------------------------------------------- */

struct cuda_persistent {
    struct body_op op[PROGRAM_OPS]; /* of the step that is recorded */
    int n_op;
    bool fits;               /* all that was launched */
    struct body_op *program; /* Owner: device memory, [PROGRAM_MAX][PROGRAM_OPS] */
    int program_ops[PROGRAM_MAX];
    int n_program;
    unsigned *counter; /* Owner: device memory, 0 between launches */
    size_t room;       /* bytes of dynamic shared memory of a block */
};

static enum err_code memory_new(struct cuda *cu, struct cuda_persistent *p, struct err *err)
{
    void *program = NULL;
    void *counter = NULL;
    enum err_code code =
        resource_device_new(cu, &program, sizeof(struct body_op) * PROGRAM_MAX * PROGRAM_OPS,
                            "the persistent kernel's steps", err);
    p->program = static_cast<struct body_op *>(program);
    if (code == ERR_OK) {
        code = resource_device_new(cu, &counter, sizeof(unsigned),
                                   "the persistent kernel's counter", err);
        p->counter = static_cast<unsigned *>(counter);
    }
    if (code == ERR_OK &&
        !cuda_ok(cu, cudaMemsetAsync(p->counter, 0, sizeof(unsigned), cu->stream), "persistent")) {
        *err = cu->failure;
        code = cu->failure.code;
    }
    return code;
}

/* Whether a block of the kernel fits a multiprocessor, with as much shared memory as there is. */
static bool kernel_fits(struct cuda *cu, struct cuda_persistent *p)
{
    cudaFuncAttributes now = {};
    int n_block = 0;
    if (cudaFuncGetAttributes(&now, persistent_kernel) != cudaSuccess ||
        now.sharedSizeBytes > cu->shared_max) {
        return false;
    }
    p->room = (cu->shared_max - now.sharedSizeBytes) / 16 * 16;
    return cudaFuncSetAttribute(persistent_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                static_cast<int>(p->room)) == cudaSuccess &&
           cudaOccupancyMaxActiveBlocksPerMultiprocessor(&n_block, persistent_kernel, THREADS,
                                                         p->room) == cudaSuccess &&
           n_block > 0;
}

enum err_code persistent_open(struct cuda *cu, struct err *err)
{
    struct cuda_persistent *const p =
        static_cast<struct cuda_persistent *>(calloc(1, sizeof(struct cuda_persistent)));
    if (p == NULL) {
        return err_set(err, ERR_MEMORY, "cuda: no host memory left for the persistent kernel");
    }
    cu->persistent = p;
    if (!cu->launches_together || !kernel_fits(cu, p)) {
        (void)cudaGetLastError();
        const size_t used = strlen(cu->be.note);
        (void)snprintf(cu->be.note + used, sizeof cu->be.note - used,
                       "%ssteps are no persistent kernels: the device cannot keep such a kernel's "
                       "blocks all at once",
                       used > 0 ? "; " : "");
        return ERR_OK;
    }
    const enum err_code code = memory_new(cu, p, err);
    cu->persists = code == ERR_OK;
    if (cu->persists) {
        cuda_fast_path(cu, "persistent", true, &cu->persists);
    }
    return code;
}

void persistent_close(struct cuda *cu)
{
    if (cu->persistent != NULL) {
        (void)cudaFree(cu->persistent->program);
        (void)cudaFree(cu->persistent->counter);
        free(cu->persistent);
        cu->persistent = NULL;
    }
}

void persistent_begin(struct cuda *cu)
{
    if (cu->persists) {
        cu->persistent->n_op = 0;
        cu->persistent->fits = cu->persistent->n_program < PROGRAM_MAX;
    }
}

/* Whether a body has shared variables of its own, which are the block's: one group has them. */
static bool has_block(enum body body)
{
    return body >= BODY_ATTENTION;
}

void persistent_append(struct cuda *cu, enum body body, dim3 grid, int n_thread,
                       size_t shared_bytes, const void *args, size_t args_bytes)
{
    struct cuda_persistent *const p = cu->persistent;
    const size_t group_bytes = (shared_bytes + 15) / 16 * 16;
    const int by_threads = has_block(body) ? 1 : THREADS / n_thread;
    const size_t by_bytes = group_bytes == 0 ? +PLACE_GROUPS : p->room / group_bytes;
    int n_group = by_threads < PLACE_GROUPS ? by_threads : +PLACE_GROUPS;
    n_group = by_bytes < static_cast<size_t>(n_group) ? static_cast<int>(by_bytes) : n_group;
    if (p->n_op == PROGRAM_OPS || n_group == 0) {
        p->fits = false;
        return;
    }
    struct body_op *const op = &p->op[p->n_op++];
    memset(op, 0, sizeof *op);
    op->body = body;
    op->grid[0] = grid.x;
    op->grid[1] = grid.y;
    op->grid[2] = grid.z;
    op->n_thread = n_thread;
    op->n_group = n_group;
    op->group_bytes = static_cast<unsigned>(group_bytes);
    memcpy(op->args, args, args_bytes);
}

int persistent_end(struct cuda *cu, size_t n_launch)
{
    struct cuda_persistent *const p = cu->persistent;
    if (!cu->persists || !p->fits || p->n_op == 0 || static_cast<size_t>(p->n_op) != n_launch) {
        return -1;
    }
    const size_t bytes = static_cast<size_t>(p->n_op) * sizeof(struct body_op);
    if (!cuda_ok(cu,
                 cudaMemcpyAsync(p->program + static_cast<size_t>(p->n_program) * PROGRAM_OPS,
                                 p->op, bytes, cudaMemcpyHostToDevice, cu->stream),
                 "the persistent kernel's steps")) {
        return -1;
    }
    p->program_ops[p->n_program] = p->n_op;
    return p->n_program++;
}

void persistent_launch(struct cuda *cu, int program)
{
    const struct cuda_persistent *const p = cu->persistent;
    LAUNCH_TOGETHER(persistent_kernel, dim3(static_cast<unsigned>(cu->n_sm)), dim3(THREADS),
                    p->room, cu->stream, p->program + static_cast<size_t>(program) * PROGRAM_OPS,
                    p->program_ops[program], p->counter);
    cuda_check(cu, "the persistent kernel of a decode step");
}

void persistent_forget(struct cuda *cu)
{
    if (cu->persistent != NULL) {
        cu->persistent->n_program = 0;
    }
}

/* ---- bodies --------------------------------------------------------------------------------- */

#include <type_traits>

#include "kernels/cuda/as_body.cuh"

/* Headers once, for all; then the files, whose names are their own. */
#include "kernels/cuda/attention_drawn.cuh"
#include "kernels/cuda/gemv.cuh"
#include "kernels/cuda/pkm_search_mma.cuh"
#include "kernels/cuda/redirect.cuh"
#include "kernels/cuda/sample.cuh"

namespace body_attention_file
{
#include "kernels/cuda/attention_drawn.cu"
}
namespace body_gemv_file
{
#include "kernels/cuda/gemv.cu"
}
namespace body_gemv_f32_file
{
#include "kernels/cuda/gemv_f32.cu"
}
namespace body_search_file
{
#include "kernels/cuda/pkm_search_mma.cu"
}
namespace body_search_f32_file
{
#include "kernels/cuda/pkm_search.cu"
}
namespace body_read_file
{
#include "kernels/cuda/pkm_read.cu"
}
namespace body_outputs_file
{
#include "kernels/cuda/outputs.cu"
}

namespace
{

/* Calls a body with the arguments that were recorded. */
template <auto kernel> struct body_call;

template <typename... P, void (*kernel)(P...)> struct body_call<kernel> {
    static __device__ __forceinline__ void run(const unsigned char *args)
    {
        unfold(*reinterpret_cast<const struct body_args<std::remove_cvref_t<P>...> *>(args));
    }

    template <typename A, typename... R, typename... D>
    static __device__ __forceinline__ void unfold(const struct body_args<A, R...> &args,
                                                  const D &...done)
    {
        unfold(args.rest, done..., args.first);
    }

    template <typename... D>
    static __device__ __forceinline__ void unfold(const struct body_args<> &, const D &...done)
    {
        kernel(done...);
    }
};

template <int n_half, bool is_normed>
__device__ __forceinline__ void run_gemv_bf16(const unsigned char *args)
{
    body_call<body_gemv_file::gemv_kernel_bf16<
        body_gemv_file::gemv_bf16<n_half, 1, is_normed, !is_normed>, DTYPE_BF16>>::run(args);
}

template <int n_token, int n_half, bool is_normed>
__device__ __forceinline__ void run_gemv_f32(const unsigned char *args)
{
    body_call<body_gemv_f32_file::gemv_kernel_f32<
        body_gemv_f32_file::gemv_f32<n_token, n_half, false, is_normed>>>::run(args);
}

template <typename T> __device__ __forceinline__ void run_read(const unsigned char *args)
{
    using table = body_read_file::float_table<T>;
    body_call<body_read_file::read_kernel<table, true, false>>::run(args);
}

__device__ __forceinline__ void body_run(int body, const unsigned char *args)
{
    switch (body) {
    case BODY_GEMV_BF16: run_gemv_bf16<1, false>(args); break;
    case BODY_GEMV_BF16 + 1: run_gemv_bf16<1, true>(args); break;
    case BODY_GEMV_BF16 + 2: run_gemv_bf16<2, false>(args); break;
    case BODY_GEMV_BF16 + 3: run_gemv_bf16<2, true>(args); break;
    case BODY_GEMV_BF16 + 4: run_gemv_bf16<4, false>(args); break;
    case BODY_GEMV_BF16 + 5: run_gemv_bf16<4, true>(args); break;
    case BODY_GEMV_BF16 + 6: run_gemv_bf16<8, false>(args); break;
    case BODY_GEMV_BF16 + 7: run_gemv_bf16<8, true>(args); break;
    case BODY_GEMV_F32: run_gemv_f32<1, 1, false>(args); break;
    case BODY_GEMV_F32 + 1: run_gemv_f32<1, 1, true>(args); break;
    case BODY_GEMV_F32 + 2: run_gemv_f32<1, 2, false>(args); break;
    case BODY_GEMV_F32 + 3: run_gemv_f32<1, 2, true>(args); break;
    case BODY_GEMV_F32 + 4: run_gemv_f32<4, 1, false>(args); break;
    case BODY_GEMV_F32 + 5: run_gemv_f32<4, 1, true>(args); break;
    case BODY_GEMV_F32 + 6: run_gemv_f32<4, 2, false>(args); break;
    case BODY_GEMV_F32 + 7: run_gemv_f32<4, 2, true>(args); break;
    case BODY_GEMV_F32 + 8: run_gemv_f32<8, 1, false>(args); break;
    case BODY_GEMV_F32 + 9: run_gemv_f32<8, 1, true>(args); break;
    case BODY_GEMV_F32 + 10: run_gemv_f32<8, 2, false>(args); break;
    case BODY_GEMV_F32 + 11: run_gemv_f32<8, 2, true>(args); break;
    case BODY_ATTENTION:
        body_call<body_attention_file::drawn_kernel<float, 64, true>>::run(args);
        break;
    case BODY_ATTENTION + 1:
        body_call<body_attention_file::drawn_kernel<uint16_t, 64, true>>::run(args);
        break;
    case BODY_SEARCH: body_call<body_search_file::few_kernel<16, 8>>::run(args); break;
    case BODY_SEARCH + 1: body_call<body_search_file::few_kernel<16, 16>>::run(args); break;
    case BODY_READ: run_read<float>(args); break;
    case BODY_READ + 1: run_read<uint16_t>(args); break;
    case BODY_SEARCH_F32: body_call<body_search_f32_file::split_kernel<1>>::run(args); break;
    case BODY_SEARCH_F32 + 1: body_call<body_search_f32_file::split_kernel<4>>::run(args); break;
    case BODY_OUTPUTS: body_call<body_outputs_file::outputs_kernel>::run(args); break;
    default: break;
    }
}

} // namespace
