/* Device and pinned memory.
 *
 * Both are the host's here. Each allocation is one of malloc, so AddressSanitizer sees accesses
 * beyond its end; device memory is poisoned for it, but for the time that kernels run, so it also
 * sees the host touching it. Fresh memory is filled with 0xFD: floats of -4e37, indices far out. */
#include "tests/cuda_host/double.h"

#include <vector>

namespace
{

struct region {
    char *data;
    size_t bytes;
    enum memory_kind kind;
};

std::vector<struct region> regions;
size_t device_bytes; /* in use */
int n_open;

struct region *region_find(const void *data)
{
    const char *const at = static_cast<const char *>(data);
    for (struct region &region : regions) {
        if (at >= region.data && at < region.data + region.bytes) {
            return &region;
        }
    }
    return nullptr;
}

cudaError_t region_new(void **data, size_t bytes, enum memory_kind kind)
{
    if (data == nullptr) {
        return cudaErrorInvalidValue;
    }
    *data = nullptr;
    if (bytes == 0) {
        return cudaSuccess;
    }
    if (kind == MEMORY_DEVICE && bytes > device_memory_bytes() - device_bytes) {
        return cudaErrorMemoryAllocation;
    }
    void *memory;
    if (posix_memalign(&memory, 256, bytes) != 0) {
        return cudaErrorMemoryAllocation;
    }
    memset(memory, POISON, bytes);
    regions.push_back({static_cast<char *>(memory), bytes, kind});
    if (kind == MEMORY_DEVICE) {
        device_bytes += bytes;
    }
    *data = memory;
    return cudaSuccess;
}

cudaError_t region_free(void *data, enum memory_kind kind)
{
    if (data == nullptr) {
        return cudaSuccess;
    }
    struct region *const region = region_find(data);
    if (region == nullptr || region->data != data || region->kind != kind) {
        return cudaErrorInvalidValue;
    }
    if (kind == MEMORY_DEVICE) {
        device_bytes -= region->bytes;
    }
    free(data);
    *region = regions.back();
    regions.pop_back();
    return cudaSuccess;
}

} // namespace

enum memory_kind memory_kind(const void *data, size_t bytes)
{
    const struct region *const region = region_find(data);
    if (region == nullptr) {
        return MEMORY_PAGEABLE;
    }
    const size_t left =
        static_cast<size_t>(region->data + region->bytes - static_cast<const char *>(data));
    if (bytes > left) {
        die("an access of %zu bytes where %zu are left of an allocation of %zu", bytes, left,
            region->bytes);
    }
    return region->kind;
}

void memory_copy(void *dst, const void *src, size_t bytes)
{
    memmove(dst, src, bytes);
}

void memory_fill(void *dst, int value, size_t bytes)
{
    memset(dst, value, bytes);
}

void memory_open(void)
{
    n_open++;
}

void memory_close(void)
{
    n_open--;
}

void cuda_host_check_pointer(const struct cuda_host_call *call, int i, const void *pointer)
{
    const struct api lock;
    if (pointer != nullptr && memory_kind(pointer, 1) == MEMORY_PAGEABLE) {
        die("%s:%d: argument %d of %s is an address that the device cannot follow", call->file,
            call->line, i, call->name);
    }
}

cudaError_t cudaMalloc(void **data, size_t bytes)
{
    API_BEGIN;
    if (stream_is_capturing()) {
        return api_end(cudaErrorStreamCaptureUnsupported);
    }
    const cudaError_t error = inject(INJECT_MALLOC);
    return api_end(error != cudaSuccess ? error : region_new(data, bytes, MEMORY_DEVICE));
}

cudaError_t cudaFree(void *data)
{
    API_BEGIN;
    if (data != nullptr) {
        stream_run_all();
    }
    return api_end(region_free(data, MEMORY_DEVICE));
}

cudaError_t cudaHostAlloc(void **data, size_t bytes, unsigned int flags)
{
    API_BEGIN;
    (void)flags;
    const cudaError_t error = inject(INJECT_HOST_ALLOC);
    return api_end(error != cudaSuccess ? error : region_new(data, bytes, MEMORY_PINNED));
}

cudaError_t cudaMallocHost(void **data, size_t bytes)
{
    return cudaHostAlloc(data, bytes, cudaHostAllocDefault);
}

cudaError_t cudaFreeHost(void *data)
{
    API_BEGIN;
    stream_run_all();
    return api_end(region_free(data, MEMORY_PINNED));
}

cudaError_t cudaHostGetDevicePointer(void **device, void *host, unsigned int flags)
{
    API_BEGIN;
    if (flags != 0 || device == nullptr || memory_kind(host, 1) != MEMORY_PINNED) {
        return api_end(cudaErrorInvalidValue);
    }
    *device = host;
    return api_end(cudaSuccess);
}

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes)
{
    API_BEGIN;
    *total_bytes = device_memory_bytes();
    *free_bytes = *total_bytes - device_bytes;
    return api_end(cudaSuccess);
}
