/* What the environment asks of the double. README.md lists the variables.
 *
 * It is read at the first call and again by each cudaGetDeviceCount, which is how the backend
 * begins: so a test sets variables, opens the backend, and closes it. */
#include "tests/cuda_host/double.h"

#include <stdlib.h>
#include <unistd.h>

namespace
{

bool is_read;
struct environment state;

void read_order(void)
{
    const char *const text = getenv("CUDA_HOST_ORDER");
    state.random = 1;
    state.order = ORDER_FORWARD;
    if (text == nullptr || *text == 0 || strcmp(text, "forward") == 0) {
        return;
    }
    if (strcmp(text, "reverse") == 0) {
        state.order = ORDER_REVERSE;
    } else if (strncmp(text, "random", 6) == 0 && (text[6] == 0 || text[6] == ':')) {
        state.order = ORDER_RANDOM;
        state.random = text[6] == 0 ? 1 : strtoull(text + 7, nullptr, 10);
    } else {
        die("CUDA_HOST_ORDER is forward, reverse, random or random:SEED, not %s", text);
    }
}

void read_driver(void)
{
    const char *const text = getenv("CUDA_HOST_DRIVER");
    if (text == nullptr || *text == 0) {
        state.driver = DRIVER_FINE;
    } else if (strcmp(text, "none") == 0) {
        state.driver = DRIVER_NONE;
    } else if (strcmp(text, "old") == 0) {
        state.driver = DRIVER_OLD;
    } else if (strcmp(text, "no_device") == 0) {
        state.driver = DRIVER_NO_DEVICE;
    } else {
        die("CUDA_HOST_DRIVER is none, old or no_device, not %s", text);
    }
}

/* NAME=bytes, or with a suffix K, M or G. */
size_t read_size(const char *name, size_t value)
{
    const char *const text = getenv(name);
    if (text == nullptr || *text == 0) {
        return value;
    }
    char *end;
    const unsigned long long n = strtoull(text, &end, 10);
    const int shift = *end == 'K' ? 10 : *end == 'M' ? 20 : *end == 'G' ? 30 : 0;
    if (end == text || end[shift != 0] != 0 || n > SIZE_MAX >> shift) {
        die("%s is a number, or one of K, M or G, not %s", name, text);
    }
    return n << shift;
}

/* NAME=n, n:error or @FILE; 0 or unset: never. */
void read_injection(enum injection kind, const char *name, cudaError_t error)
{
    const char *const text = getenv(name);
    state.inject[kind] = {0, 0, error, nullptr};
    if (text == nullptr || *text == 0) {
        return;
    }
    if (*text == '@') {
        state.inject[kind].file = text + 1;
        return;
    }
    char *end;
    state.inject[kind].at = strtol(text, &end, 10);
    if (*end == ':') {
        state.inject[kind].error = static_cast<cudaError_t>(strtol(end + 1, &end, 10));
    }
    if (*end != 0) {
        die("%s is a count, count:error or @FILE, not %s", name, text);
    }
}

} // namespace

void environment_read(void)
{
    is_read = true;
    state.memory_bytes = read_size("CUDA_HOST_MEMORY", static_cast<size_t>(1) << 30);
    state.sm = static_cast<int>(read_size("CUDA_HOST_SM", 90));
    state.n_sm = static_cast<int>(read_size("CUDA_HOST_SMS", 8));
    state.code = static_cast<int>(read_size("CUDA_HOST_CODE", static_cast<size_t>(state.sm)));
    read_driver();
    read_order();
    read_injection(INJECT_MALLOC, "CUDA_HOST_FAIL_MALLOC", cudaErrorMemoryAllocation);
    read_injection(INJECT_HOST_ALLOC, "CUDA_HOST_FAIL_HOST_ALLOC", cudaErrorMemoryAllocation);
    read_injection(INJECT_LAUNCH, "CUDA_HOST_FAIL_LAUNCH", cudaErrorLaunchOutOfResources);
    read_injection(INJECT_SYNC, "CUDA_HOST_FAIL_SYNC", cudaErrorLaunchFailure);
    read_injection(INJECT_CAPTURE, "CUDA_HOST_FAIL_CAPTURE", cudaErrorStreamCaptureInvalidated);
    state.hang = getenv("CUDA_HOST_HANG");
    state.trace = getenv("CUDA_HOST_TRACE");
    state.skip = getenv("CUDA_HOST_SKIP");
    const char *const idle = getenv("CUDA_HOST_IDLE");
    state.is_idle = idle != nullptr && strcmp(idle, "1") == 0;
}

struct environment *environment_get(void)
{
    if (!is_read) {
        environment_read();
    }
    return &state;
}

void hang(void)
{
    const char *const file = environment_get()->hang;
    while (file != nullptr && access(file, F_OK) == 0) {
        usleep(10000);
    }
}

cudaError_t inject(enum injection kind)
{
    auto *const it = &environment_get()->inject[kind];
    if (it->file != nullptr && access(it->file, F_OK) == 0) {
        it->file = nullptr; /* once */
    } else if (++it->count != it->at) {
        return cudaSuccess;
    }
    switch (it->error) {
    case cudaErrorECCUncorrectable:
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchFailure:
    case cudaErrorTensorMemoryLeak:
    case cudaErrorContained:
    case cudaErrorUnknown: api_fail(it->error); break; /* as the device: nothing works any more */
    default: break;
    }
    return it->error;
}

/* splitmix64 */
uint64_t random_next(void)
{
    uint64_t x = state.random += 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}
