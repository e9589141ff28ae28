/* What the files of the double share.
 *
 *   environment.cc  what the environment asks for: order, device, failures
 *   runtime.cc      devices, errors, limits of kernels
 *   memory.cc       device and pinned memory, who may access it when
 *   stream.cc       streams and events: work that waits for the next synchronisation
 *   submit.cc       launches, copies, fills
 *   graph.cc        captured work
 *   grid.cc         runs the blocks of a launch
 *   block.cc        runs the threads of a block: order, barriers, diagnosis
 *   warp.cc         shuffles, votes, reductions, the matrix instruction; asynchronous copies
 *   trace.cc        what was asked for, for who counts it
 *   fiber.cc        stacks and switching between them
 *   cublaslt.cc     matrix products
 *
 * One mutex guards everything: each function of the runtime's interface takes it by API_BEGIN, and
 * work runs on the thread that synchronises. */
#ifndef CUDA_HOST_DOUBLE_H
#define CUDA_HOST_DOUBLE_H

#include "tests/cuda_host/cuda_host.h"

enum { POISON = 0xfd, WARP = 32, BLOCK_MAX = 1024, WARP_MAX = BLOCK_MAX / WARP };
/* What must outlive other blocks lies in banks: all but one may hold a block that waits for the
 * kernels before its own. */
enum { BANK_MAX = 4 };
enum { SHARED_DEFAULT = 48 << 10, SHARED_OPTIN = 227 << 10 }; /* bytes; what a device has at most */

/* ---- environment.cc ------------------------------------------------------------------------- */

enum thread_order { ORDER_FORWARD, ORDER_REVERSE, ORDER_RANDOM };
enum driver { DRIVER_FINE, DRIVER_NONE, DRIVER_OLD, DRIVER_NO_DEVICE };
enum injection {
    INJECT_MALLOC,
    INJECT_HOST_ALLOC,
    INJECT_LAUNCH,
    INJECT_SYNC,
    INJECT_CAPTURE,
    INJECT_N
};

struct environment {
    enum driver driver;
    int sm;   /* 90 = compute capability 9.0 */
    int n_sm; /* multiprocessors */
    int code; /* that kernels were compiled for */
    size_t memory_bytes;
    enum thread_order order;
    uint64_t random;   /* state */
    const char *hang;  /* waits take as long as this file is there. NULL: none does */
    const char *trace; /* trace.cc's file. NULL: none */
    const char *skip;  /* of kernels whose name holds this nothing is run. NULL: of none */
    bool is_idle;      /* nothing is run, copied or filled; what comes back is zeros */
    struct {
        long at, count; /* the at-th of its kind fails; 0 = none does */
        cudaError_t error;
        const char *file; /* the first that finds this file fails. NULL: none does */
    } inject[INJECT_N];
};

/* Reads the environment again, and counts from 0. */
void environment_read(void);
/* What was read last; reads it if that was never done. */
struct environment *environment_get(void);
/* Counts one event of this kind: the error that it must end with. */
cudaError_t inject(enum injection kind);
/* Comes back when the file of CUDA_HOST_HANG is not there. */
void hang(void);
uint64_t random_next(void);

/* ---- runtime.cc ----------------------------------------------------------------------------- */

/* Prints a line that begins with "cuda_host: ". */
void say(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* The same, and aborts: for what a kernel must never do. */
[[noreturn]] void die(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Holds the mutex. */
struct api {
    api();
    ~api();
    api(const api &) = delete;
    api &operator=(const api &) = delete;
};
/* What every call returns: no driver, no device, a failure that stays; else success. */
CUDA_HOST_SHARED cudaError_t api_refused(void);
/* Makes error what cudaGetLastError gives. Returns it. */
cudaError_t api_end(cudaError_t error);
/* From now on every call returns error, until environment_read. */
void api_fail(cudaError_t error);

/* Begins a function of the interface; returns from it where all is refused. */
#define API_BEGIN                                                                                  \
    const struct api api_lock;                                                                     \
    do {                                                                                           \
        if (api_refused() != cudaSuccess) {                                                        \
            return api_end(api_refused());                                                         \
        }                                                                                          \
    } while (0)

/* Bytes of dynamic shared memory that a launch of kernel may ask for. */
size_t dynamic_shared_max(const void *kernel);

/* ---- memory.cc ------------------------------------------------------------------------------ */

enum memory_kind { MEMORY_PAGEABLE, MEMORY_PINNED, MEMORY_DEVICE };
/* Whose memory data is. Dies if it begins in device or pinned memory and ends outside. */
enum memory_kind memory_kind(const void *data, size_t bytes);
/* Unseen by sanitizers. */
void memory_copy(void *dst, const void *src, size_t bytes);
void memory_fill(void *dst, int value, size_t bytes);
/* Dies where the host's own memory may not be accessed. */
void memory_check(const void *data, size_t bytes);
/* Kernels may use device memory between the two, the host may not outside. They nest. */
void memory_open(void);
void memory_close(void);

/* ---- stream.cc: see stream.h ---------------------------------------------------------------- */

/* Runs all that was handed to any stream. */
void stream_run_all(void);
/* Whether a stream is being captured, when much is forbidden: the capture then ends with an error.
 */
bool stream_spoils_capture(void);

/* ---- trace.cc ------------------------------------------------------------------------------- */

/* The innermost range that is open; "" without. Kept for ever. */
const char *trace_range(void);
void trace_launch(const struct cuda_host_call *call);
void trace_graph(size_t n_launch);
void trace_copy(int kind, size_t bytes);
void trace_fill(size_t bytes);
void trace_wait(void);

/* ---- grid.cc -------------------------------------------------------------------------------- */

/* Runs one block of a call as far as grid_wait and keeps it there. Returns the bank that it lies
 * in, for block_run_grid; 0 if the last free one is left, which a call that has not begun needs. */
int block_begin(const struct cuda_host_call *call);
/* Whether the call in the bank waits at grid_wait_alone, and lets none behind it begin. */
bool block_is_alone(int bank);
/* Runs all blocks of a call, what is left of them if one has begun. */
void block_run_grid(const struct cuda_host_call *call, int bank);
/* The call in the bank will not be run. */
void block_forget(int bank);

#endif
