/* Switching between the stacks of fibers; fiber.cc has what makes them.
 *
 * A switch on x86-64 is a dozen instructions within the function that waits: no call, so that the
 * processor's predictions of returns stay right, which cost more than all else where each switch
 * was a function's. Elsewhere it is swapcontext, an order of magnitude slower.
 *
 * AddressSanitizer is told each stack's bounds. For ThreadSanitizer each fiber is a thread of its
 * own, and switching orders nothing: what orders threads is said where they wait for one
 * another. */
#ifndef CUDA_HOST_FIBER_H
#define CUDA_HOST_FIBER_H

#include "tests/cuda_host/double.h"
#include "tests/cuda_host/sanitizer.h"

#if defined __x86_64__ && !defined CUDA_HOST_UCONTEXT
#define HAS_SWITCH 1
#else
#include <ucontext.h>
#endif

enum { TSAN_NO_SYNC = 1 };

struct fiber {
    void *sp; /* while it does not run */
    void (*main)(void);
    void *memory; /* Owner: of the stack and its guard page; NULL for the caller's */
    const void *bottom;
    size_t stack_bytes;
    size_t stagger;
    void *fake; /* AddressSanitizer's */
    void *tsan; /* Owner, but for the caller's */
#ifndef HAS_SWITCH
    ucontext_t context;
#endif
};

/* What runs where no fiber does: the thread that called. */
extern struct fiber fiber_caller;
extern struct fiber *fiber_current;
extern struct fiber *fiber_previous; /* from whom the last switch came */

/* Fiber number i of 2 · BANK_MAX · BLOCK_MAX, which will run main, which must not return. Kept for
 * reuse. */
struct fiber *fiber_get(int i, void (*main)(void));
/* Makes it begin anew at its next switch; it must not be running. */
void fiber_restart(struct fiber *fiber);

/* First thing on the stack that was switched to. */
static inline void fiber_arrive(void)
{
    if (__sanitizer_finish_switch_fiber != nullptr) {
        __sanitizer_finish_switch_fiber(fiber_current->fake, &fiber_previous->bottom,
                                        &fiber_previous->stack_bytes);
    }
}

/* Continues fiber; returns when another switches back. */
__attribute__((always_inline)) static inline void fiber_switch(struct fiber *fiber)
{
    struct fiber *const from = fiber_current;
    fiber_previous = from;
    fiber_current = fiber;
    if (__sanitizer_start_switch_fiber != nullptr) {
        __sanitizer_start_switch_fiber(&from->fake, fiber->bottom, fiber->stack_bytes);
    }
    if (tsan_is_on()) {
        if (from == &fiber_caller) {
            fiber_caller.tsan = __tsan_get_current_fiber();
        }
        __tsan_switch_to_fiber(fiber->tsan, TSAN_NO_SYNC);
    }
#ifdef HAS_SWITCH
    /* Leaves the frame and where to go on on the stack, below what a function may use without
     * saying so. */
    void **save = &from->sp;
    void *sp = fiber->sp;
    __asm__ volatile("leaq -128(%%rsp), %%rsp\n\t"
                     "pushq %%rbp\n\t"
                     "leaq 1f(%%rip), %%rax\n\t"
                     "pushq %%rax\n\t"
                     "movq %%rsp, (%0)\n\t"
                     "movq %1, %%rsp\n\t"
                     "popq %%rax\n\t"
                     "jmpq *%%rax\n\t"
                     ".p2align 4\n"
                     "1:\n\t"
                     "popq %%rbp\n\t"
                     "leaq 128(%%rsp), %%rsp"
                     : "+D"(save), "+S"(sp)
                     :
                     : "rax", "rbx", "rcx", "rdx", "r8", "r9", "r10", "r11", "r12", "r13", "r14",
                       "r15", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7",
                       "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", "xmm15",
                       "memory", "cc");
#else
    swapcontext(&from->context, &fiber->context);
#endif
    fiber_arrive();
}

#endif
