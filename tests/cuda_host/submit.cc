/* What is handed to streams: launches, copies, fills. What the device would refuse is refused here,
 * with the same error, and with a line that says why. */
#include "tests/cuda_host/stream.h"

#include <stdlib.h>

cudaError_t launch_error(const struct cuda_host_call *call)
{
    const dim3 grid = call->grid, block = call->block;
    const uint64_t n_thread = static_cast<uint64_t>(block.x) * block.y * block.z;
    if (grid.x == 0 || grid.y == 0 || grid.z == 0 || grid.x > 0x7fffffff || grid.y > 65535 ||
        grid.z > 65535 || n_thread == 0 || n_thread > BLOCK_MAX || block.z > 64) {
        say("%s:%d: %s cannot have a grid of %u x %u x %u and a block of %u x %u x "
            "%u",
            call->file, call->line, call->name, grid.x, grid.y, grid.z, block.x, block.y, block.z);
        return cudaErrorInvalidConfiguration;
    }
    const size_t shared_max = dynamic_shared_max(call->kernel);
    if (call->shared_bytes > shared_max) {
        say("%s:%d: %s wants %zu bytes of dynamic shared memory and may have %zu", call->file,
            call->line, call->name, call->shared_bytes, shared_max);
        return cudaErrorInvalidValue;
    }
    return cudaSuccess;
}

namespace
{

bool is_kind(enum cudaMemcpyKind kind, enum memory_kind dst, enum memory_kind src)
{
    switch (kind) {
    case cudaMemcpyHostToHost: return dst != MEMORY_DEVICE && src != MEMORY_DEVICE;
    case cudaMemcpyHostToDevice: return dst != MEMORY_PAGEABLE && src != MEMORY_DEVICE;
    case cudaMemcpyDeviceToHost: return dst != MEMORY_DEVICE && src != MEMORY_PAGEABLE;
    case cudaMemcpyDeviceToDevice: return dst != MEMORY_PAGEABLE && src != MEMORY_PAGEABLE;
    case cudaMemcpyDefault: return true;
    }
    return false;
}

/* Pageable memory is read by the call itself, and written before it returns. */
cudaError_t copy(struct work *work, enum cudaMemcpyKind kind, struct cuda_host_stream *stream)
{
    if (work->width == 0 || work->height == 0) {
        return cudaSuccess;
    }
    const size_t dst_bytes = (work->height - 1) * work->dst_pitch + work->width;
    const size_t src_bytes = (work->height - 1) * work->src_pitch + work->width;
    const enum memory_kind dst = memory_kind(work->dst, dst_bytes);
    const enum memory_kind src = memory_kind(work->src, src_bytes);
    if (work->dst == nullptr || work->src == nullptr || !is_kind(kind, dst, src)) {
        say("a copy of kind %d from %s to %s", kind, src == MEMORY_DEVICE ? "device" : "host",
            dst == MEMORY_DEVICE ? "device" : "host");
        return cudaErrorInvalidValue;
    }
    if (src != MEMORY_DEVICE) {
        memory_check(work->src, src_bytes);
    }
    if (dst != MEMORY_DEVICE) {
        memory_check(work->dst, dst_bytes);
    }
    if (src == MEMORY_PAGEABLE && stream->capture == nullptr) {
        work->staged = static_cast<char *>(malloc(src_bytes));
        if (work->staged == nullptr) {
            return cudaErrorMemoryAllocation;
        }
        memory_copy(work->staged, work->src, src_bytes);
    }
    trace_copy(kind, work->width * work->height);
    const cudaError_t error = stream_append(stream, work);
    if (error == cudaSuccess && dst == MEMORY_PAGEABLE && stream->capture == nullptr) {
        stream_run(stream);
    }
    return error;
}

cudaError_t copy_2d(void *dst, size_t dst_pitch, const void *src, size_t src_pitch, size_t width,
                    size_t height, enum cudaMemcpyKind kind, cudaStream_t stream)
{
    if (width > dst_pitch || width > src_pitch) {
        return cudaErrorInvalidValue;
    }
    struct work work = {};
    work.kind = WORK_COPY;
    work.dst = static_cast<char *>(dst);
    work.src = static_cast<const char *>(src);
    work.dst_pitch = dst_pitch;
    work.src_pitch = src_pitch;
    work.width = width;
    work.height = height;
    return copy(&work, kind, stream_of(stream));
}

} // namespace

cudaError_t cuda_host_launch(struct cuda_host_call *call, cudaStream_t stream)
{
    const struct api lock;
    struct work work = {};
    work.kind = WORK_CALL;
    work.call = call;
    call->range = trace_range();
    cudaError_t error = api_refused();
    if (error == cudaSuccess) {
        error = inject(INJECT_LAUNCH);
    }
    if (error == cudaSuccess) {
        error = launch_error(call);
    }
    if (error != cudaSuccess) {
        work_drop(&work);
    } else {
        error = stream_append(stream_of(stream), &work);
    }
    return api_end(error);
}

cudaError_t cudaMemcpyAsync(void *dst, const void *src, size_t bytes, enum cudaMemcpyKind kind,
                            cudaStream_t stream)
{
    API_BEGIN;
    return api_end(copy_2d(dst, bytes, src, bytes, bytes, 1, kind, stream));
}

cudaError_t cudaMemcpy2DAsync(void *dst, size_t dst_pitch, const void *src, size_t src_pitch,
                              size_t width, size_t height, enum cudaMemcpyKind kind,
                              cudaStream_t stream)
{
    API_BEGIN;
    return api_end(copy_2d(dst, dst_pitch, src, src_pitch, width, height, kind, stream));
}

cudaError_t cudaMemcpy(void *dst, const void *src, size_t bytes, enum cudaMemcpyKind kind)
{
    API_BEGIN;
    cudaError_t error = stream_wait_begin();
    if (error == cudaSuccess) {
        error = copy_2d(dst, bytes, src, bytes, bytes, 1, kind, nullptr);
    }
    if (error == cudaSuccess) {
        stream_run(stream_of(nullptr));
    }
    return api_end(error);
}

cudaError_t cudaMemsetAsync(void *dst, int value, size_t bytes, cudaStream_t stream)
{
    API_BEGIN;
    if (bytes == 0) {
        return api_end(cudaSuccess);
    }
    if (memory_kind(dst, bytes) == MEMORY_PAGEABLE) {
        return api_end(cudaErrorInvalidValue);
    }
    struct work work = {};
    work.kind = WORK_FILL;
    work.dst = static_cast<char *>(dst);
    work.width = bytes;
    work.value = value;
    trace_fill(bytes);
    return api_end(stream_append(stream_of(stream), &work));
}
