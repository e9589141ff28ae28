/* What the files of the double share.
 *
 *   fiber.cc     stacks and switching between them
 *   block.cc     runs the threads of a block: order, barriers, warp collectives, diagnosis
 *   memory.cc    device and pinned memory, what may be accessed from where
 *   stream.cc    streams, events, graphs: work that waits for the next synchronisation
 *   runtime.cc   devices, errors, and the environment: what is injected, which order
 *   cublaslt.cc  matrix products
 *
 * One mutex guards everything: each function of the runtime's interface takes it (struct api), and
 * work runs on the thread that synchronises. */
#ifndef CUDA_HOST_DOUBLE_H
#define CUDA_HOST_DOUBLE_H

#include "tests/cuda_host/cuda_host.h"

enum { POISON = 0xfd, WARP = 32, BLOCK_MAX = 1024, WARP_MAX = BLOCK_MAX / WARP };

/* ---- runtime.cc ----------------------------------------------------------------------------- */

enum thread_order { ORDER_FORWARD, ORDER_REVERSE, ORDER_RANDOM };

/* Prints a line that begins with "cuda_host: ". */
void say(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* The same, and aborts: for what a kernel must never do. */
[[noreturn]] void die(const char *format, ...) __attribute__((format(printf, 1, 2)));

enum thread_order order_get(void);
uint64_t random_next(void);

/* Every function of the interface holds one from beginning to end: it takes the mutex. */
struct api {
    api();
    ~api();
    api(const api &) = delete;
    api &operator=(const api &) = delete;
};
/* What every call returns: no driver, no device, a failure that stays; else success. */
cudaError_t api_refused(void);
/* Makes error what cudaGetLastError gives. Returns it. */
cudaError_t api_end(cudaError_t error);

/* Begins a function of the interface; on refusal returns from it. */
#define API_BEGIN                                                                                  \
    const struct api api_lock;                                                                     \
    do {                                                                                           \
        if (api_refused() != cudaSuccess) {                                                        \
            return api_end(api_refused());                                                         \
        }                                                                                          \
    } while (0)

/* Counts one event of this kind: the error that it must end with. */
enum injection { INJECT_MALLOC, INJECT_HOST_ALLOC, INJECT_LAUNCH, INJECT_SYNC, INJECT_N };
cudaError_t inject(enum injection kind);
/* From now on every call returns error. */
void fail_for_good(cudaError_t error);

size_t device_memory_bytes(void);
size_t dynamic_shared_max(const void *kernel);
enum { SHARED_DEFAULT = 48 << 10, SHARED_OPTIN = 227 << 10 };

/* ---- fiber.cc ------------------------------------------------------------------------------- */

struct fiber;

/* Fiber number i, which will run main, which must not return. Kept for reuse; never freed. */
struct fiber *fiber_get(int i, void (*main)(void));
/* Makes it begin anew at its next switch; it must not be running. */
void fiber_restart(struct fiber *fiber);
/* Continues fiber; returns when another switches back. */
void fiber_switch(struct fiber *fiber);
/* What ran before any fiber did. */
struct fiber *fiber_caller(void);

/* ---- block.cc ------------------------------------------------------------------------------- */

/* Runs all blocks of a call. */
void block_run_grid(const struct cuda_host_call *call);

/* ---- memory.cc ------------------------------------------------------------------------------ */

enum memory_kind { MEMORY_PAGEABLE, MEMORY_PINNED, MEMORY_DEVICE };
/* Whose memory data is. Dies if it begins in device or pinned memory and ends outside. */
enum memory_kind memory_kind(const void *data, size_t bytes);
/* Copies and fills, wherever the two lie. */
void memory_copy(void *dst, const void *src, size_t bytes);
void memory_fill(void *dst, int value, size_t bytes);
/* Kernels may use device memory between the two, the host may not outside. */
void memory_open(void);
void memory_close(void);

/* ---- stream.cc ------------------------------------------------------------------------------ */

/* Runs all that was handed to any stream. */
void stream_run_all(void);
/* Runs what the default stream waits for. */
void stream_run_blocking(void);
/* Whether the calling thread's stream is being captured, when much is forbidden. */
bool stream_is_capturing(void);

#endif
