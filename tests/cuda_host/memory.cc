/* Device and pinned memory.
 *
 * Both are the host's here. Each allocation is one of malloc, so AddressSanitizer sees accesses
 * beyond its end; device memory is poisoned for it, but for the time that kernels run, so it also
 * sees the host touching it. Fresh memory is filled with 0xFD: floats of -4e37, indices far out. */
#include "tests/cuda_host/double.h"
#include "tests/cuda_host/sanitizer.h"

#include <vector>

namespace
{

/* Of each allocation, so much at most is closed to the host: doing so takes time for every byte. */
enum { CLOSED_MAX = 1 << 20 };

struct region {
    char *data;
    size_t bytes;
    enum memory_kind kind;
};

std::vector<struct region> regions;
size_t device_bytes; /* in use */
int n_open;

size_t closed_bytes(const struct region *region)
{
    return region->bytes < CLOSED_MAX ? region->bytes : size_t{CLOSED_MAX};
}

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
    if (kind == MEMORY_DEVICE && bytes > environment_get()->memory_bytes - device_bytes) {
        return cudaErrorMemoryAllocation;
    }
    void *memory;
    if (posix_memalign(&memory, 256, bytes) != 0) {
        return cudaErrorMemoryAllocation;
    }
    if (!environment_get()->is_idle) {
        memory_fill(memory, POISON, bytes);
    }
    regions.push_back({static_cast<char *>(memory), bytes, kind});
    if (kind == MEMORY_DEVICE) {
        device_bytes += bytes;
        access_forbid(memory, closed_bytes(&regions.back()));
    }
    *data = memory;
    return cudaSuccess;
}

/* Frees even where calls are refused, as the process's end would. */
cudaError_t region_free(void *data, enum memory_kind kind)
{
    if (data == nullptr) {
        return api_refused();
    }
    struct region *const region = region_find(data);
    if (region == nullptr || region->data != data || region->kind != kind) {
        return cudaErrorInvalidValue;
    }
    if (stream_spoils_capture()) {
        return cudaErrorStreamCaptureUnsupported;
    }
    stream_run_all();
    if (kind == MEMORY_DEVICE) {
        device_bytes -= region->bytes;
        access_allow(region->data, closed_bytes(region));
    }
    free(data);
    *region = regions.back();
    regions.pop_back();
    return api_refused();
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

/* Not memmove and memset, which sanitizers replace by their own. */
void memory_copy(void *dst, const void *src, size_t bytes)
{
#ifdef __x86_64__
    __asm__ volatile("rep movsb" : "+D"(dst), "+S"(src), "+c"(bytes) : : "memory");
#else
    volatile char *const to = static_cast<char *>(dst);
    for (size_t i = 0; i < bytes; ++i) {
        to[i] = static_cast<const char *>(src)[i];
    }
#endif
}

void memory_fill(void *dst, int value, size_t bytes)
{
#ifdef __x86_64__
    __asm__ volatile("rep stosb" : "+D"(dst), "+c"(bytes) : "a"(value) : "memory");
#else
    volatile char *const to = static_cast<char *>(dst);
    for (size_t i = 0; i < bytes; ++i) {
        to[i] = static_cast<char>(value);
    }
#endif
}

void memory_check(const void *data, size_t bytes)
{
    if (__asan_region_is_poisoned == nullptr) {
        return;
    }
    void *const bad = __asan_region_is_poisoned(const_cast<void *>(data), bytes);
    if (bad != nullptr) {
        __asan_describe_address(bad);
        die("a copy of %zu bytes between the device and %p, which the host may not "
            "access there",
            bytes, data);
    }
}

void memory_open(void)
{
    if (n_open++ > 0) {
        return;
    }
    for (const struct region &region : regions) {
        if (region.kind == MEMORY_DEVICE) {
            access_allow(region.data, closed_bytes(&region));
        }
    }
}

void memory_close(void)
{
    if (--n_open > 0) {
        return;
    }
    for (const struct region &region : regions) {
        if (region.kind == MEMORY_DEVICE) {
            access_forbid(region.data, closed_bytes(&region));
        }
    }
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
    if (stream_spoils_capture()) {
        return api_end(cudaErrorStreamCaptureUnsupported);
    }
    const cudaError_t error = inject(INJECT_MALLOC);
    return api_end(error != cudaSuccess ? error : region_new(data, bytes, MEMORY_DEVICE));
}

cudaError_t cudaFree(void *data)
{
    const struct api lock;
    return api_end(region_free(data, MEMORY_DEVICE));
}

cudaError_t cudaHostAlloc(void **data, size_t bytes, unsigned int flags)
{
    API_BEGIN;
    (void)flags;
    if (stream_spoils_capture()) {
        return api_end(cudaErrorStreamCaptureUnsupported);
    }
    const cudaError_t error = inject(INJECT_HOST_ALLOC);
    return api_end(error != cudaSuccess ? error : region_new(data, bytes, MEMORY_PINNED));
}

cudaError_t cudaFreeHost(void *data)
{
    const struct api lock;
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
    *total_bytes = environment_get()->memory_bytes;
    *free_bytes = *total_bytes - device_bytes;
    return api_end(cudaSuccess);
}
