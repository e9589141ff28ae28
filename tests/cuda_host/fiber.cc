/* Stacks and switching between them. Used by block.cc, which decides who runs.
 *
 * A switch on x86-64 is sixteen instructions; elsewhere it is swapcontext, an order of magnitude
 * slower. The tops of the stacks are staggered, as fibers that run the same kernel use the same
 * depths: at equal offsets in their pages all would compete for the same lines of the cache.
 *
 * AddressSanitizer is told each stack's bounds. For ThreadSanitizer each fiber is a thread of its
 * own, and switching orders nothing: what orders threads is said where they wait for one another.
 */
#include "tests/cuda_host/double.h"
#include "tests/cuda_host/sanitizer.h"

#include <sys/mman.h>

#if defined __x86_64__ && !defined CUDA_HOST_UCONTEXT
#define HAS_SWITCH 1
#else
#include <ucontext.h>
#endif

namespace
{

enum { STACK_BYTES = 256 << 10, GUARD_BYTES = 4096, STAGGER_LINES = 48, LINE = 64 };
enum { TSAN_NO_SYNC = 1 };

} // namespace

struct fiber {
    void *sp; /* while it does not run */
    void (*main)(void);
    void *memory; /* Owner: of the stack and its guard page; NULL for the caller's
                   */
    const void *bottom;
    size_t stack_bytes;
    size_t stagger;
    void *fake; /* AddressSanitizer's */
    void *tsan; /* Owner, but for the caller's */
#ifndef HAS_SWITCH
    ucontext_t context;
#endif
};

namespace
{

struct fiber caller;
struct fiber *current = &caller;
struct fiber *previous; /* from whom the last switch came */

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

/* First thing on the stack that was switched to. */
void arrive(void)
{
    if (__sanitizer_finish_switch_fiber != nullptr) {
        __sanitizer_finish_switch_fiber(current->fake, &previous->bottom, &previous->stack_bytes);
    }
}

void begin(void)
{
    arrive();
    current->main();
}

/* Last thing on the stack that is left. */
void leave_for(struct fiber *fiber)
{
    previous = current;
    current = fiber;
    if (__sanitizer_start_switch_fiber != nullptr) {
        __sanitizer_start_switch_fiber(&previous->fake, fiber->bottom, fiber->stack_bytes);
    }
    if (tsan_is_on()) {
        if (previous == &caller) {
            caller.tsan = __tsan_get_current_fiber();
        }
        __tsan_switch_to_fiber(fiber->tsan, TSAN_NO_SYNC);
    }
}

} // namespace

#ifdef HAS_SWITCH

/* cuda_host_switch(void **save, void *sp): pushes what a callee must keep, saves the stack pointer
 * and takes the other. The return is an indirect jump, which the processor predicts where it would
 * not predict a return. */
__asm__(".text\n"
        ".p2align 4\n"
        ".type cuda_host_switch, @function\n"
        "cuda_host_switch:\n"
        "    pushq %rbp\n"
        "    pushq %rbx\n"
        "    pushq %r12\n"
        "    pushq %r13\n"
        "    pushq %r14\n"
        "    pushq %r15\n"
        "    movq %rsp, (%rdi)\n"
        "    movq %rsi, %rsp\n"
        "    popq %r15\n"
        "    popq %r14\n"
        "    popq %r13\n"
        "    popq %r12\n"
        "    popq %rbx\n"
        "    popq %rbp\n"
        "    popq %rcx\n"
        "    jmpq *%rcx\n"
        ".size cuda_host_switch, . - cuda_host_switch\n");
extern "C" void cuda_host_switch(void **save, void *sp);

void fiber_restart(struct fiber *fiber)
{
    /* Six registers, where to begin, and a return address of 0 that ends a debugger's walk. */
    char *const end = static_cast<char *>(fiber->memory) + GUARD_BYTES + STACK_BYTES;
    void **const top = reinterpret_cast<void **>(end - fiber->stagger);
    top[-1] = nullptr;
    top[-2] = reinterpret_cast<void *>(begin);
    for (int i = 3; i <= 8; ++i) {
        top[-i] = nullptr;
    }
    fiber->sp = top - 8;
    fiber->fake = nullptr;
}

void fiber_switch(struct fiber *fiber)
{
    struct fiber *const from = current;
    leave_for(fiber);
    cuda_host_switch(&from->sp, fiber->sp);
    arrive();
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

void fiber_switch(struct fiber *fiber)
{
    struct fiber *const from = current;
    leave_for(fiber);
    swapcontext(&from->context, &fiber->context);
    arrive();
}

#endif

struct fiber *fiber_caller(void)
{
    return &caller;
}

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
