/* The stacks of fibers; fiber.h switches between them, and block.cc decides who runs.
 *
 * The tops of the stacks are staggered, as fibers that run the same kernel use the same depths: at
 * equal offsets in their pages all would compete for the same lines of the cache. */
#include "tests/cuda_host/fiber.h"

#include <sys/mman.h>

struct fiber fiber_caller;
struct fiber *fiber_current = &fiber_caller;
struct fiber *fiber_previous;

namespace
{

enum { STACK_BYTES = 256 << 10, GUARD_BYTES = 4096, STAGGER_LINES = 48, LINE = 64 };

struct fiber_pool {
    struct fiber fiber[2 * BANK_MAX * BLOCK_MAX];
    ~fiber_pool()
    {
        for (struct fiber &it : fiber) {
            if (it.tsan != nullptr) {
                __tsan_destroy_fiber(it.tsan);
            }
            if (it.memory != nullptr) {
                munmap(it.memory, GUARD_BYTES + STACK_BYTES);
            }
        }
    }
};
struct fiber_pool pool;

void begin(void)
{
    fiber_arrive();
    fiber_current->main();
}

} // namespace

#ifdef HAS_SWITCH

void fiber_restart(struct fiber *fiber)
{
    /* Where to begin, and a return address of 0 that ends a debugger's walk. */
    char *const end = static_cast<char *>(fiber->memory) + GUARD_BYTES + STACK_BYTES;
    void **const top = reinterpret_cast<void **>(end - fiber->stagger);
    top[-1] = nullptr;
    top[-2] = reinterpret_cast<void *>(begin);
    fiber->sp = top - 2;
    fiber->fake = nullptr;
}

#else

void fiber_restart(struct fiber *fiber)
{
    getcontext(&fiber->context);
    fiber->context.uc_stack.ss_sp = static_cast<char *>(fiber->memory) + GUARD_BYTES;
    fiber->context.uc_stack.ss_size = STACK_BYTES - fiber->stagger;
    fiber->context.uc_link = nullptr;
    makecontext(&fiber->context, begin, 0);
    fiber->fake = nullptr;
}

#endif

struct fiber *fiber_get(int i, void (*main)(void))
{
    struct fiber *const fiber = &pool.fiber[i];
    if (fiber->memory == nullptr) {
        void *const memory = mmap(nullptr, GUARD_BYTES + STACK_BYTES, PROT_READ | PROT_WRITE,
                                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK, -1, 0);
        if (memory == MAP_FAILED || mprotect(memory, GUARD_BYTES, PROT_NONE) != 0) {
            die("no memory for the stack of a thread");
        }
        fiber->memory = memory;
        fiber->bottom = static_cast<char *>(memory) + GUARD_BYTES;
        fiber->stack_bytes = STACK_BYTES;
        fiber->stagger = static_cast<size_t>(i * 5 % STAGGER_LINES) * LINE;
        fiber->main = main;
        if (tsan_is_on()) {
            fiber->tsan = __tsan_create_fiber(0);
        }
        fiber_restart(fiber);
    }
    return fiber;
}
