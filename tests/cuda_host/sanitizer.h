/* What the sanitizers must be told: that stacks are switched, what may be accessed, and which
 * threads are ordered. The double itself is compiled without them (it would be reported for what it
 * does on purpose); their runtimes are found when the library is loaded, and each function below
 * does nothing where there is none. */
#ifndef CUDA_HOST_SANITIZER_H
#define CUDA_HOST_SANITIZER_H

#include <stddef.h>

extern "C" {
#define CUDA_HOST_WEAK __attribute__((weak))
CUDA_HOST_WEAK void __sanitizer_start_switch_fiber(void **fake, const void *bottom, size_t bytes);
CUDA_HOST_WEAK void __sanitizer_finish_switch_fiber(void *fake, const void **bottom, size_t *bytes);
CUDA_HOST_WEAK void __asan_poison_memory_region(const volatile void *data, size_t bytes);
CUDA_HOST_WEAK void __asan_unpoison_memory_region(const volatile void *data, size_t bytes);
CUDA_HOST_WEAK void *__asan_region_is_poisoned(void *data, size_t bytes);
CUDA_HOST_WEAK void __asan_describe_address(void *data);
CUDA_HOST_WEAK void *__tsan_get_current_fiber(void);
CUDA_HOST_WEAK void *__tsan_create_fiber(unsigned flags);
CUDA_HOST_WEAK void __tsan_destroy_fiber(void *fiber);
CUDA_HOST_WEAK void __tsan_switch_to_fiber(void *fiber, unsigned flags);
CUDA_HOST_WEAK void __tsan_acquire(void *address);
CUDA_HOST_WEAK void __tsan_release(void *address);
#undef CUDA_HOST_WEAK
}

static inline bool tsan_is_on(void)
{
    return __tsan_create_fiber != nullptr;
}

/* What this thread did so far happens before what another does after its sync_acquire. */
static inline void sync_release(void *address)
{
    if (__tsan_release != nullptr) {
        __tsan_release(address);
    }
}
static inline void sync_acquire(void *address)
{
    if (__tsan_acquire != nullptr) {
        __tsan_acquire(address);
    }
}

static inline void access_forbid(const void *data, size_t bytes)
{
    if (__asan_poison_memory_region != nullptr) {
        __asan_poison_memory_region(data, bytes);
    }
}
static inline void access_allow(const void *data, size_t bytes)
{
    if (__asan_unpoison_memory_region != nullptr) {
        __asan_unpoison_memory_region(data, bytes);
    }
}

#endif
