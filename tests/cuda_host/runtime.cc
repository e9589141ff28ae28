/* Devices, errors, launches' bounds, and what the environment asks for.
 *
 * The environment is read at the first call and again by each cudaGetDeviceCount, which is how the
 * backend begins; the counts of injected failures then begin anew. README.md lists the variables.
 */
#include "tests/cuda_host/double.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdlib.h>
#include <unistd.h>
#include <vector>

namespace
{

pthread_mutex_t mutex = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
thread_local cudaError_t last_error;

enum driver { DRIVER_FINE, DRIVER_NONE, DRIVER_OLD, DRIVER_NO_DEVICE };

struct setting {
    bool is_read;
    enum driver driver;
    int sm;
    size_t memory;
    enum thread_order order;
    uint64_t random;
    struct {
        long at, count;
        cudaError_t error;
        const char *file; /* of the environment; nullptr: by count */
    } inject[INJECT_N];
    cudaError_t failure;
};
struct setting setting;

struct kernel_limit {
    const void *kernel;
    size_t shared_bytes;
};
std::vector<struct kernel_limit> limits;

void read_order(void)
{
    const char *const text = getenv("CUDA_HOST_ORDER");
    setting.random = 1;
    setting.order = ORDER_FORWARD;
    if (text == nullptr || strcmp(text, "forward") == 0) {
        return;
    }
    if (strcmp(text, "reverse") == 0) {
        setting.order = ORDER_REVERSE;
    } else if (strncmp(text, "random", 6) == 0 && (text[6] == 0 || text[6] == ':')) {
        setting.order = ORDER_RANDOM;
        setting.random = text[6] == 0 ? 1 : strtoull(text + 7, nullptr, 10);
    } else {
        die("CUDA_HOST_ORDER is forward, reverse, random or random:SEED, not %s", text);
    }
}

void read_driver(void)
{
    const char *const text = getenv("CUDA_HOST_DRIVER");
    setting.driver = DRIVER_FINE;
    if (text == nullptr || *text == 0) {
        return;
    }
    if (strcmp(text, "none") == 0) {
        setting.driver = DRIVER_NONE;
    } else if (strcmp(text, "old") == 0) {
        setting.driver = DRIVER_OLD;
    } else if (strcmp(text, "no_device") == 0) {
        setting.driver = DRIVER_NO_DEVICE;
    } else {
        die("CUDA_HOST_DRIVER is none, old or no_device, not %s", text);
    }
}

size_t read_size(const char *name, size_t value)
{
    const char *const text = getenv(name);
    if (text == nullptr || *text == 0) {
        return value;
    }
    char *end;
    const unsigned long long n = strtoull(text, &end, 10);
    const int shift = *end == 'K' ? 10 : *end == 'M' ? 20 : *end == 'G' ? 30 : 0;
    if (end == text || end[shift != 0] != 0) {
        die("%s is a number of bytes, or of K, M or G, not %s", name, text);
    }
    return n << shift;
}

/* NAME=n or n:error: the n-th; NAME=@FILE: the first that finds that file. 0 or unset: never. */
void read_injection(enum injection kind, const char *name, cudaError_t error)
{
    const char *const text = getenv(name);
    setting.inject[kind] = {0, 0, error, nullptr};
    if (text == nullptr || *text == 0) {
        return;
    }
    if (*text == '@') {
        setting.inject[kind].file = text + 1;
        return;
    }
    char *end;
    setting.inject[kind].at = strtol(text, &end, 10);
    if (*end == ':') {
        setting.inject[kind].error = static_cast<cudaError_t>(strtol(end + 1, &end, 10));
    }
    if (*end != 0) {
        die("%s is a count, count:error or @FILE, not %s", name, text);
    }
}

void environment_read(void)
{
    setting.is_read = true;
    setting.failure = cudaSuccess;
    setting.memory = read_size("CUDA_HOST_MEMORY", static_cast<size_t>(1) << 30);
    setting.sm = static_cast<int>(read_size("CUDA_HOST_SM", 90));
    read_driver();
    read_order();
    read_injection(INJECT_MALLOC, "CUDA_HOST_FAIL_MALLOC", cudaErrorMemoryAllocation);
    read_injection(INJECT_HOST_ALLOC, "CUDA_HOST_FAIL_HOST_ALLOC", cudaErrorMemoryAllocation);
    read_injection(INJECT_LAUNCH, "CUDA_HOST_FAIL_LAUNCH", cudaErrorLaunchOutOfResources);
    read_injection(INJECT_SYNC, "CUDA_HOST_FAIL_SYNC", cudaErrorLaunchFailure);
}

struct setting *settings(void)
{
    if (!setting.is_read) {
        environment_read();
    }
    return &setting;
}

void print(const char *format, va_list args)
{
    fputs("cuda_host: ", stderr);
    vfprintf(stderr, format, args);
    fputc('\n', stderr);
}

struct error_text {
    cudaError_t error;
    const char *name, *text;
};
constexpr struct error_text error_texts[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInvalidConfiguration, "cudaErrorInvalidConfiguration",
     "invalid configuration argument"},
    {cudaErrorInsufficientDriver, "cudaErrorInsufficientDriver",
     "CUDA driver version is insufficient for CUDA runtime version"},
    {cudaErrorNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
    {cudaErrorIllegalAddress, "cudaErrorIllegalAddress",
     "an illegal memory access was encountered"},
    {cudaErrorLaunchOutOfResources, "cudaErrorLaunchOutOfResources",
     "too many resources requested for launch"},
    {cudaErrorLaunchFailure, "cudaErrorLaunchFailure", "unspecified launch failure"},
    {cudaErrorStreamCaptureUnsupported, "cudaErrorStreamCaptureUnsupported",
     "operation not permitted when stream is capturing"},
    {cudaErrorStreamCaptureInvalidated, "cudaErrorStreamCaptureInvalidated",
     "operation failed due to a previous error during capture"},
    {cudaErrorUnknown, "cudaErrorUnknown", "unknown error"},
};

} // namespace

void say(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    print(format, args);
    va_end(args);
}

void die(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    print(format, args);
    va_end(args);
    abort();
}

enum thread_order order_get(void)
{
    return settings()->order;
}

/* splitmix64 */
uint64_t random_next(void)
{
    uint64_t x = setting.random += 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

/* ---- errors --------------------------------------------------------------------------------- */

api::api()
{
    pthread_mutex_lock(&mutex);
}

api::~api()
{
    pthread_mutex_unlock(&mutex);
}

cudaError_t api_refused(void)
{
    switch (settings()->driver) {
    case DRIVER_NONE:
    case DRIVER_OLD: return cudaErrorInsufficientDriver;
    case DRIVER_NO_DEVICE: return cudaErrorNoDevice;
    default: return setting.failure;
    }
}

cudaError_t api_end(cudaError_t error)
{
    if (error != cudaSuccess && error != cudaErrorNotReady) {
        last_error = error;
    }
    return error;
}

void fail_for_good(cudaError_t error)
{
    setting.failure = error;
    last_error = error;
}

cudaError_t inject(enum injection kind)
{
    auto *const it = &settings()->inject[kind];
    const bool found = it->file != nullptr && access(it->file, F_OK) == 0;
    it->file = found ? nullptr : it->file;
    return ++it->count == it->at || found ? it->error : cudaSuccess;
}

cudaError_t cudaPeekAtLastError(void)
{
    const struct api lock;
    return setting.failure != cudaSuccess ? setting.failure : last_error;
}

cudaError_t cudaGetLastError(void)
{
    const struct api lock;
    const cudaError_t error = setting.failure != cudaSuccess ? setting.failure : last_error;
    last_error = cudaSuccess;
    return error;
}

const char *cudaGetErrorName(cudaError_t error)
{
    for (const struct error_text &row : error_texts) {
        if (row.error == error) {
            return row.name;
        }
    }
    return "unrecognized error code";
}

const char *cudaGetErrorString(cudaError_t error)
{
    for (const struct error_text &row : error_texts) {
        if (row.error == error) {
            return row.text;
        }
    }
    return "unrecognized error code";
}

/* ---- devices -------------------------------------------------------------------------------- */

cudaError_t cudaDriverGetVersion(int *version)
{
    const struct api lock;
    const enum driver driver = settings()->driver;
    *version = driver == DRIVER_NONE ? 0 : driver == DRIVER_OLD ? 12020 : CUDART_VERSION;
    return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int *version)
{
    *version = CUDART_VERSION;
    return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int *n)
{
    const struct api lock;
    environment_read();
    /* As the real one, which leaves the count as it is where it finds no driver. */
    if (setting.driver == DRIVER_NO_DEVICE) {
        *n = 0;
    }
    if (api_refused() != cudaSuccess) {
        return api_end(api_refused());
    }
    *n = 1;
    return cudaSuccess;
}

cudaError_t cudaGetDevice(int *device)
{
    API_BEGIN;
    *device = 0;
    return api_end(cudaSuccess);
}

cudaError_t cudaSetDevice(int device)
{
    API_BEGIN;
    return api_end(device == 0 ? cudaSuccess : cudaErrorInvalidDevice);
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *prop, int device)
{
    API_BEGIN;
    if (device != 0) {
        return api_end(cudaErrorInvalidDevice);
    }
    *prop = cudaDeviceProp();
    snprintf(prop->name, sizeof prop->name, "test double");
    prop->totalGlobalMem = setting.memory;
    prop->sharedMemPerBlock = SHARED_DEFAULT;
    prop->sharedMemPerBlockOptin = SHARED_OPTIN;
    prop->regsPerBlock = 65536;
    prop->warpSize = WARP;
    prop->maxThreadsPerBlock = BLOCK_MAX;
    prop->maxGridSize[0] = 0x7fffffff;
    prop->maxGridSize[1] = prop->maxGridSize[2] = 65535;
    prop->major = setting.sm / 10;
    prop->minor = setting.sm % 10;
    prop->multiProcessorCount = 8;
    prop->canMapHostMemory = 1;
    prop->unifiedAddressing = 1;
    prop->l2CacheSize = 4 << 20;
    return api_end(cudaSuccess);
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attr, int device)
{
    struct cudaDeviceProp prop;
    const cudaError_t error = cudaGetDeviceProperties(&prop, device);
    if (error != cudaSuccess) {
        return error;
    }
    const struct api lock;
    switch (attr) {
    case cudaDevAttrMaxThreadsPerBlock: *value = prop.maxThreadsPerBlock; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = SHARED_DEFAULT; break;
    case cudaDevAttrWarpSize: *value = WARP; break;
    case cudaDevAttrMultiProcessorCount: *value = prop.multiProcessorCount; break;
    case cudaDevAttrIntegrated: *value = 0; break;
    case cudaDevAttrCanMapHostMemory: *value = 1; break;
    case cudaDevAttrL2CacheSize: *value = prop.l2CacheSize; break;
    case cudaDevAttrComputeCapabilityMajor: *value = prop.major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = prop.minor; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = SHARED_OPTIN + 1024; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = SHARED_OPTIN; break;
    default: return api_end(cudaErrorInvalidValue);
    }
    return api_end(cudaSuccess);
}

size_t device_memory_bytes(void)
{
    return settings()->memory;
}

/* ---- limits of launches --------------------------------------------------------------------- */

size_t dynamic_shared_max(const void *kernel)
{
    for (const struct kernel_limit &limit : limits) {
        if (limit.kernel == kernel) {
            return limit.shared_bytes;
        }
    }
    return SHARED_DEFAULT;
}

cudaError_t cuda_host_func_set_attribute(const void *kernel, enum cudaFuncAttribute attr, int value)
{
    API_BEGIN;
    if (attr == cudaFuncAttributePreferredSharedMemoryCarveout) {
        return api_end(value >= -1 && value <= 100 ? cudaSuccess : cudaErrorInvalidValue);
    }
    if (attr != cudaFuncAttributeMaxDynamicSharedMemorySize || value < 0 || value > SHARED_OPTIN) {
        return api_end(cudaErrorInvalidValue);
    }
    for (struct kernel_limit &limit : limits) {
        if (limit.kernel == kernel) {
            limit.shared_bytes = static_cast<size_t>(value);
            return api_end(cudaSuccess);
        }
    }
    limits.push_back({kernel, static_cast<size_t>(value)});
    return api_end(cudaSuccess);
}
