/* Streams, events and graphs: work that waits for the next synchronisation.
 *
 * A real device runs what it is given at some time between the call and the synchronisation that
 * waits for it. The double takes the last moment: who forgets to wait reads what was there before,
 * and who changes an argument's memory too early changes what the work reads. Kernels' arguments
 * are copied by the launch; a captured graph keeps them. */
#include "tests/cuda_host/double.h"

#include <deque>
#include <time.h>
#include <vector>

namespace
{

enum work_kind { WORK_CALL, WORK_COPY, WORK_FILL, WORK_MARK, WORK_WAIT };

/* A point in a stream that an event stands for. */
struct mark {
    int n_ref;
    bool is_done;
    double time_ms;
    struct cuda_host_stream *stream;
};

struct work {
    enum work_kind kind;
    struct cuda_host_call *call; /* Shared */
    struct mark *mark;           /* Shared */
    /* COPY and FILL: rows of width bytes */
    char *dst;
    const char *src;
    char *staged; /* Owner: what pageable memory held at the call */
    size_t dst_pitch, src_pitch, width, height;
    int value;
};

} // namespace

struct cuda_host_stream {
    bool is_blocking; /* waits for the default stream, and it for this */
    std::deque<struct work> queue;
    struct cuda_host_graph *capture; /* Owner while it lasts */
    bool is_invalidated;
};

struct cuda_host_event {
    struct mark *mark; /* Shared; NULL before the first record */
};

struct cuda_host_graph {
    std::vector<struct work> nodes;
};

struct cuda_host_graph_exec {
    std::vector<struct work> nodes;
};

namespace
{

struct cuda_host_stream default_stream = {true, {}, nullptr, false};
std::vector<struct cuda_host_stream *> streams;

/* ---- work ----------------------------------------------------------------------------------- */

void mark_drop(struct mark *mark)
{
    if (mark != nullptr && --mark->n_ref == 0) {
        free(mark);
    }
}

struct work work_share(const struct work *work)
{
    struct work copy = *work;
    if (copy.call != nullptr) {
        copy.call->n_ref++;
    }
    if (copy.mark != nullptr) {
        copy.mark->n_ref++;
    }
    copy.staged = nullptr;
    return copy;
}

void work_drop(struct work *work)
{
    if (work->call != nullptr && --work->call->n_ref == 0) {
        free(work->call);
    }
    mark_drop(work->mark);
    free(work->staged);
}

double now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<double>(now.tv_sec) * 1e3 + static_cast<double>(now.tv_nsec) * 1e-6;
}

void run_until(const struct mark *mark);

void work_run(const struct work *work)
{
    switch (work->kind) {
    case WORK_CALL: block_run_grid(work->call); break;
    case WORK_COPY: {
        const char *const src = work->staged != nullptr ? work->staged : work->src;
        for (size_t i = 0; i < work->height; ++i) {
            memory_copy(work->dst + i * work->dst_pitch, src + i * work->src_pitch, work->width);
        }
        break;
    }
    case WORK_FILL: memory_fill(work->dst, work->value, work->width); break;
    case WORK_MARK:
        work->mark->is_done = true;
        work->mark->time_ms = now_ms();
        break;
    case WORK_WAIT: run_until(work->mark); break;
    }
}

void run_first(struct cuda_host_stream *stream)
{
    struct work work = stream->queue.front();
    stream->queue.pop_front();
    work_run(&work);
    work_drop(&work);
}

void run_until(const struct mark *mark)
{
    while (!mark->is_done) {
        run_first(mark->stream);
    }
}

void run(struct cuda_host_stream *stream)
{
    if (stream->queue.empty()) {
        return;
    }
    memory_open();
    while (!stream->queue.empty()) {
        run_first(stream);
    }
    memory_close();
}

struct cuda_host_stream *stream_of(cudaStream_t stream)
{
    return stream == nullptr ? &default_stream : stream;
}

/* Takes work over: into the graph that is being captured, or to the end of the stream's queue. */
void append(struct cuda_host_stream *stream, const struct work *work)
{
    if (stream->capture != nullptr) {
        stream->capture->nodes.push_back(*work);
        return;
    }
    /* The default stream and the others that wait for it run in the order of the calls. */
    if (stream == &default_stream) {
        stream_run_blocking();
    } else if (stream->is_blocking) {
        run(&default_stream);
    }
    stream->queue.push_back(*work);
}

/* What every function that waits for the device does last. */
cudaError_t synchronised(void)
{
    const cudaError_t error = inject(INJECT_SYNC);
    if (error != cudaSuccess) {
        fail_for_good(error);
    }
    return error;
}

} // namespace

void stream_run_all(void)
{
    run(&default_stream);
    for (struct cuda_host_stream *stream : streams) {
        run(stream);
    }
}

void stream_run_blocking(void)
{
    run(&default_stream);
    for (struct cuda_host_stream *stream : streams) {
        if (stream->is_blocking) {
            run(stream);
        }
    }
}

bool stream_is_capturing(void)
{
    bool is_capturing = false;
    for (struct cuda_host_stream *stream : streams) {
        if (stream->capture != nullptr) {
            stream->is_invalidated = true;
            is_capturing = true;
        }
    }
    return is_capturing;
}

/* ---- launches, copies, fills ---------------------------------------------------------------- */

void cuda_host_launch(struct cuda_host_call *call, cudaStream_t stream)
{
    const struct api lock;
    cudaError_t error = api_refused();
    if (error == cudaSuccess) {
        error = inject(INJECT_LAUNCH);
    }
    const dim3 grid = call->grid, block = call->block;
    const uint64_t n_thread = static_cast<uint64_t>(block.x) * block.y * block.z;
    if (error == cudaSuccess &&
        (grid.x == 0 || grid.y == 0 || grid.z == 0 || grid.x > 0x7fffffff || grid.y > 65535 ||
         grid.z > 65535 || block.x == 0 || block.y == 0 || block.z == 0 || block.x > 1024 ||
         block.y > 1024 || block.z > 64 || n_thread > BLOCK_MAX)) {
        say("%s:%d: %s cannot be launched with a grid of %u x %u x %u and a block of %u x %u x %u",
            call->file, call->line, call->name, grid.x, grid.y, grid.z, block.x, block.y, block.z);
        error = cudaErrorInvalidConfiguration;
    }
    if (error == cudaSuccess && call->shared_bytes > dynamic_shared_max(call->kernel)) {
        say("%s:%d: %s wants %zu bytes of dynamic shared memory and may have %zu", call->file,
            call->line, call->name, call->shared_bytes, dynamic_shared_max(call->kernel));
        error = cudaErrorInvalidValue;
    }
    struct work work = {};
    work.kind = WORK_CALL;
    work.call = call;
    if (error != cudaSuccess) {
        work_drop(&work);
        api_end(error);
        return;
    }
    append(stream_of(stream), &work);
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
    if (!is_kind(kind, dst, src) || work->dst == nullptr || work->src == nullptr) {
        return cudaErrorInvalidValue;
    }
    if (src == MEMORY_PAGEABLE && stream->capture == nullptr) {
        work->staged = static_cast<char *>(malloc(src_bytes));
        if (work->staged == nullptr) {
            return cudaErrorMemoryAllocation;
        }
        memcpy(work->staged, work->src, src_bytes);
    }
    append(stream, work);
    if (dst == MEMORY_PAGEABLE && stream->capture == nullptr) {
        run(stream);
    }
    return cudaSuccess;
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

cudaError_t cudaMemcpy2D(void *dst, size_t dst_pitch, const void *src, size_t src_pitch,
                         size_t width, size_t height, enum cudaMemcpyKind kind)
{
    API_BEGIN;
    if (stream_is_capturing()) {
        return api_end(cudaErrorStreamCaptureImplicit);
    }
    cudaError_t error = copy_2d(dst, dst_pitch, src, src_pitch, width, height, kind, nullptr);
    if (error == cudaSuccess) {
        run(&default_stream);
        error = synchronised();
    }
    return api_end(error);
}

cudaError_t cudaMemcpy(void *dst, const void *src, size_t bytes, enum cudaMemcpyKind kind)
{
    return cudaMemcpy2D(dst, bytes, src, bytes, bytes, 1, kind);
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
    append(stream_of(stream), &work);
    return api_end(cudaSuccess);
}

cudaError_t cudaMemset(void *dst, int value, size_t bytes)
{
    return cudaMemsetAsync(dst, value, bytes, nullptr);
}

/* ---- streams -------------------------------------------------------------------------------- */

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned int flags)
{
    API_BEGIN;
    *stream = new cuda_host_stream{(flags & cudaStreamNonBlocking) == 0, {}, nullptr, false};
    streams.push_back(*stream);
    return api_end(cudaSuccess);
}

cudaError_t cudaStreamCreate(cudaStream_t *stream)
{
    return cudaStreamCreateWithFlags(stream, cudaStreamDefault);
}

cudaError_t cudaStreamDestroy(cudaStream_t stream)
{
    const struct api lock;
    for (size_t i = 0; i < streams.size(); ++i) {
        if (streams[i] == stream) {
            run(stream);
            streams[i] = streams.back();
            streams.pop_back();
            delete stream;
            return api_end(api_refused());
        }
    }
    return api_end(cudaErrorInvalidResourceHandle);
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream)
{
    API_BEGIN;
    if (stream_of(stream)->capture != nullptr) {
        stream->is_invalidated = true;
        return api_end(cudaErrorStreamCaptureUnsupported);
    }
    if (stream == nullptr) {
        stream_run_blocking();
    }
    run(stream_of(stream));
    return api_end(synchronised());
}

cudaError_t cudaDeviceSynchronize(void)
{
    API_BEGIN;
    if (stream_is_capturing()) {
        return api_end(cudaErrorStreamCaptureUnsupported);
    }
    stream_run_all();
    return api_end(synchronised());
}

cudaError_t cudaStreamQuery(cudaStream_t stream)
{
    API_BEGIN;
    struct cuda_host_stream *const it = stream_of(stream);
    if (it->queue.empty()) {
        return api_end(cudaSuccess);
    }
    /* Who asks often enough sees it end. */
    memory_open();
    run_first(it);
    memory_close();
    return api_end(cudaErrorNotReady);
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int flags)
{
    API_BEGIN;
    if (flags != 0 || event == nullptr) {
        return api_end(cudaErrorInvalidValue);
    }
    if (event->mark != nullptr) {
        struct work work = {};
        work.kind = WORK_WAIT;
        work.mark = event->mark;
        work.mark->n_ref++;
        append(stream_of(stream), &work);
    }
    return api_end(cudaSuccess);
}

/* ---- events --------------------------------------------------------------------------------- */

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned int flags)
{
    API_BEGIN;
    (void)flags;
    *event = new cuda_host_event{nullptr};
    return api_end(cudaSuccess);
}

cudaError_t cudaEventCreate(cudaEvent_t *event)
{
    return cudaEventCreateWithFlags(event, cudaEventDefault);
}

cudaError_t cudaEventDestroy(cudaEvent_t event)
{
    const struct api lock;
    mark_drop(event->mark);
    delete event;
    return api_end(api_refused());
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream)
{
    API_BEGIN;
    auto *const mark = static_cast<struct mark *>(malloc(sizeof(struct mark)));
    if (mark == nullptr) {
        return api_end(cudaErrorMemoryAllocation);
    }
    *mark = {2, false, 0, stream_of(stream)};
    mark_drop(event->mark);
    event->mark = mark;
    struct work work = {};
    work.kind = WORK_MARK;
    work.mark = mark;
    append(stream_of(stream), &work);
    return api_end(cudaSuccess);
}

cudaError_t cudaEventSynchronize(cudaEvent_t event)
{
    API_BEGIN;
    if (event->mark != nullptr) {
        memory_open();
        run_until(event->mark);
        memory_close();
    }
    return api_end(synchronised());
}

cudaError_t cudaEventQuery(cudaEvent_t event)
{
    API_BEGIN;
    if (event->mark == nullptr || event->mark->is_done) {
        return api_end(cudaSuccess);
    }
    memory_open();
    run_first(event->mark->stream);
    memory_close();
    return api_end(cudaErrorNotReady);
}

cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t to)
{
    API_BEGIN;
    if (from->mark == nullptr || to->mark == nullptr) {
        return api_end(cudaErrorInvalidResourceHandle);
    }
    if (!from->mark->is_done || !to->mark->is_done) {
        return api_end(cudaErrorNotReady);
    }
    *ms = static_cast<float>(to->mark->time_ms - from->mark->time_ms);
    return api_end(cudaSuccess);
}

/* ---- graphs --------------------------------------------------------------------------------- */

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode)
{
    API_BEGIN;
    (void)mode;
    if (stream == nullptr || stream->capture != nullptr) {
        return api_end(cudaErrorStreamCaptureUnsupported);
    }
    stream->capture = new cuda_host_graph{};
    stream->is_invalidated = false;
    return api_end(cudaSuccess);
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph)
{
    API_BEGIN;
    *graph = nullptr;
    if (stream == nullptr || stream->capture == nullptr) {
        return api_end(cudaErrorInvalidValue);
    }
    struct cuda_host_graph *const capture = stream->capture;
    stream->capture = nullptr;
    if (stream->is_invalidated) {
        cudaGraphDestroy(capture);
        return api_end(cudaErrorStreamCaptureInvalidated);
    }
    *graph = capture;
    return api_end(cudaSuccess);
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status)
{
    API_BEGIN;
    const struct cuda_host_stream *const it = stream_of(stream);
    *status = it->capture == nullptr ? cudaStreamCaptureStatusNone
              : it->is_invalidated   ? cudaStreamCaptureStatusInvalidated
                                     : cudaStreamCaptureStatusActive;
    return api_end(cudaSuccess);
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t graph, unsigned long long flags)
{
    API_BEGIN;
    (void)flags;
    *exec = new cuda_host_graph_exec{};
    for (const struct work &node : graph->nodes) {
        (*exec)->nodes.push_back(work_share(&node));
    }
    return api_end(cudaSuccess);
}

cudaError_t cudaGraphUpload(cudaGraphExec_t exec, cudaStream_t stream)
{
    API_BEGIN;
    (void)exec;
    (void)stream;
    return api_end(cudaSuccess);
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream)
{
    API_BEGIN;
    for (const struct work &node : exec->nodes) {
        const struct work work = work_share(&node);
        append(stream_of(stream), &work);
    }
    return api_end(inject(INJECT_LAUNCH));
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph)
{
    const struct api lock;
    for (struct work &node : graph->nodes) {
        work_drop(&node);
    }
    delete graph;
    return api_end(api_refused());
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec)
{
    const struct api lock;
    for (struct work &node : exec->nodes) {
        work_drop(&node);
    }
    delete exec;
    return api_end(api_refused());
}

cudaError_t cudaDeviceReset(void)
{
    API_BEGIN;
    stream_run_all();
    return api_end(cudaSuccess);
}
