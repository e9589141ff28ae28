/* Devices, errors, and what kernels are allowed. */
#include "tests/cuda_host/double.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdlib.h>
#include <vector>

namespace
{

enum { PCI_BUS = 0x3b };

pthread_mutex_t mutex = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
thread_local cudaError_t last_error;
cudaError_t failure; /* that stays */

struct kernel_limit {
    const void *kernel;
    size_t shared_bytes;
};
std::vector<struct kernel_limit> limits;

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
    {cudaErrorNoKernelImageForDevice, "cudaErrorNoKernelImageForDevice",
     "no kernel image is available for execution on the device"},
    {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
    {cudaErrorIllegalAddress, "cudaErrorIllegalAddress",
     "an illegal memory access was encountered"},
    {cudaErrorLaunchOutOfResources, "cudaErrorLaunchOutOfResources",
     "too many resources requested for launch"},
    {cudaErrorLaunchFailure, "cudaErrorLaunchFailure", "unspecified launch failure"},
    {cudaErrorTensorMemoryLeak, "cudaErrorTensorMemoryLeak", "tensor memory not completely freed"},
    {cudaErrorNotSupported, "cudaErrorNotSupported", "operation not supported"},
    {cudaErrorContained, "cudaErrorContained",
     "Invalid access of peer GPU memory over nvlink or a hardware error"},
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
    switch (environment_get()->driver) {
    case DRIVER_NONE:
    case DRIVER_OLD: return cudaErrorInsufficientDriver;
    case DRIVER_NO_DEVICE: return cudaErrorNoDevice;
    default: return failure;
    }
}

cudaError_t api_end(cudaError_t error)
{
    if (error != cudaSuccess && error != cudaErrorNotReady) {
        last_error = error;
    }
    return error;
}

void api_fail(cudaError_t error)
{
    failure = error;
}

cudaError_t cudaGetLastError(void)
{
    const struct api lock;
    const cudaError_t error = failure != cudaSuccess ? failure : last_error;
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
    const enum driver driver = environment_get()->driver;
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
    failure = cudaSuccess;
    /* As the real one, which leaves the count as it is where it finds no driver. */
    if (environment_get()->driver == DRIVER_NO_DEVICE) {
        *n = 0;
    }
    if (api_refused() != cudaSuccess) {
        return api_end(api_refused());
    }
    *n = 1;
    return cudaSuccess;
}

/* Domains are written with four digits or more, and letters are small or large. */
cudaError_t cudaDeviceGetByPCIBusId(int *device, const char *id)
{
    API_BEGIN;
    unsigned domain, bus, slot, function;
    char more;
    if (sscanf(id, "%x:%x:%x.%x%c", &domain, &bus, &slot, &function, &more) != 4 || domain != 0 ||
        bus != PCI_BUS || slot != 0 || function != 0) {
        return api_end(cudaErrorInvalidValue);
    }
    *device = 0;
    return api_end(cudaSuccess);
}

cudaError_t cudaSetDevice(int device)
{
    API_BEGIN;
    return api_end(device == 0 ? cudaSuccess : cudaErrorInvalidDevice);
}

/* Bytes that a block may opt into, by compute capability. */
static int shared_optin(void)
{
    const int sm = environment_get()->sm;
    if (sm == 86 || sm == 89 || sm >= 120) {
        return 99 << 10;
    }
    return sm < 90 ? 163 << 10 : SHARED_OPTIN;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *prop, int device)
{
    API_BEGIN;
    if (device != 0) {
        return api_end(cudaErrorInvalidDevice);
    }
    const struct environment *const environment = environment_get();
    *prop = cudaDeviceProp();
    snprintf(prop->name, sizeof prop->name, "test double");
    prop->sharedMemPerBlockOptin = static_cast<size_t>(shared_optin());
    prop->major = environment->sm / 10;
    prop->minor = environment->sm % 10;
    prop->multiProcessorCount = environment->n_sm;
    prop->pciBusID = PCI_BUS;
    return api_end(cudaSuccess);
}

cudaError_t cudaDeviceSetCacheConfig(enum cudaFuncCache config)
{
    API_BEGIN;
    return api_end(config == cudaFuncCachePreferNone || config == cudaFuncCachePreferShared
                       ? cudaSuccess
                       : cudaErrorInvalidValue);
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

cudaError_t cuda_host_func_get_attributes(struct cudaFuncAttributes *attributes, const void *kernel)
{
    API_BEGIN;
    const struct environment *const environment = environment_get();
    attributes->ptxVersion = environment->code;
    attributes->maxDynamicSharedSizeBytes = static_cast<int>(dynamic_shared_max(kernel));
    return api_end(environment->code > environment->sm ? cudaErrorNoKernelImageForDevice
                                                       : cudaSuccess);
}

cudaError_t cuda_host_func_set_attribute(const void *kernel, enum cudaFuncAttribute attr, int value)
{
    API_BEGIN;
    if (attr == cudaFuncAttributePreferredSharedMemoryCarveout) {
        return api_end(value >= -1 && value <= 100 ? cudaSuccess : cudaErrorInvalidValue);
    }
    if (attr != cudaFuncAttributeMaxDynamicSharedMemorySize || value < 0 ||
        value > shared_optin()) {
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
