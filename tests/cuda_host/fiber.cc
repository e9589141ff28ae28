/* Stacks and switching between them. Used by block.cc, which decides who runs.
 *
 * A switch on x86-64 is ten instructions; elsewhere it is swapcontext, an order of magnitude
 * slower. The tops of the stacks are staggered, as fibers that run the same kernel use the same
 * depths: at equal offsets in their pages all would compete for the same lines of the cache. */
#include "tests/cuda_host/double.h"

#include <sys/mman.h>

#ifndef __x86_64__
#include <ucontext.h>
#endif

namespace
{

enum { STACK_BYTES = 256 << 10, GUARD_BYTES = 4096, STAGGER_LINES = 48, LINE = 64 };

} // namespace

struct fiber {
    void *sp; /* while it does not run */
    void (*main)(void);
    char *stack; /* Owner; NULL for the caller's */
    size_t stagger;
#ifndef __x86_64__
    ucontext_t context;
#endif
};

namespace
{

struct fiber caller;
struct fiber fibers[BLOCK_MAX];
struct fiber *current = &caller;

} // namespace

#ifdef __x86_64__

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
    /* Six registers, main, and a return address of 0 that ends a debugger's walk. */
    void **const top = reinterpret_cast<void **>(fiber->stack + STACK_BYTES - fiber->stagger);
    top[-1] = nullptr;
    top[-2] = reinterpret_cast<void *>(fiber->main);
    for (int i = 3; i <= 8; ++i) {
        top[-i] = nullptr;
    }
    fiber->sp = top - 8;
}

void fiber_switch(struct fiber *fiber)
{
    struct fiber *const from = current;
    current = fiber;
    cuda_host_switch(&from->sp, fiber->sp);
}

#else

void fiber_restart(struct fiber *fiber)
{
    getcontext(&fiber->context);
    fiber->context.uc_stack.ss_sp = fiber->stack;
    fiber->context.uc_stack.ss_size = STACK_BYTES - fiber->stagger;
    fiber->context.uc_link = nullptr;
    makecontext(&fiber->context, fiber->main, 0);
}

void fiber_switch(struct fiber *fiber)
{
    struct fiber *const from = current;
    current = fiber;
    swapcontext(&from->context, &fiber->context);
}

#endif

struct fiber *fiber_caller(void)
{
    return &caller;
}

struct fiber *fiber_get(int i, void (*main)(void))
{
    struct fiber *const fiber = &fibers[i];
    if (fiber->stack == nullptr) {
        void *const memory = mmap(nullptr, GUARD_BYTES + STACK_BYTES, PROT_READ | PROT_WRITE,
                                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK, -1, 0);
        if (memory == MAP_FAILED || mprotect(memory, GUARD_BYTES, PROT_NONE) != 0) {
            die("no memory for the stack of a thread");
        }
        fiber->stack = static_cast<char *>(memory) + GUARD_BYTES;
        fiber->stagger = static_cast<size_t>(i * 5 % STAGGER_LINES) * LINE;
        fiber->main = main;
        fiber_restart(fiber);
    }
    return fiber;
}
