/* Streams and events.
 *
 * A real device runs what it is given at some time between the call and the synchronisation that
 * waits for it. The double takes the last moment: who forgets to wait reads what was there before,
 * and who changes an argument's memory too early changes what the work reads. A kernel that may
 * overlap with those before it begins at the first moment: before they have. */
#include "tests/cuda_host/stream.h"
#include "tests/cuda_host/sanitizer.h"

#include <stdlib.h>
#include <time.h>

struct cuda_host_event {
    struct mark *mark; /* Shared; NULL before the first record */
};

namespace
{

struct cuda_host_stream default_stream = {true, {}, nullptr, false};
std::vector<struct cuda_host_stream *> streams;

void mark_drop(struct mark *mark)
{
    if (mark != nullptr && --mark->n_ref == 0) {
        free(mark);
    }
}

double now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<double>(now.tv_sec) * 1e3 + static_cast<double>(now.tv_nsec) * 1e-6;
}

void run_until(const struct mark *mark);

/* Nothing is run, copied or filled, but what comes back to the host is zeros: they say that every
 * trial of a kernel went well. */
void work_run_idle(const struct work *work)
{
    if (work->kind != WORK_COPY || memory_kind(work->dst, 1) == MEMORY_DEVICE) {
        return;
    }
    for (size_t i = 0; i < work->height; ++i) {
        memory_fill(work->dst + i * work->dst_pitch, 0, work->width);
    }
}

bool is_skipped(const struct work *work)
{
    const struct environment *const environment = environment_get();
    return environment->is_idle ||
           (environment->skip != nullptr && strstr(work->call->name, environment->skip) != nullptr);
}

void work_run(const struct work *work)
{
    const bool moves =
        work->kind == WORK_CALL || work->kind == WORK_COPY || work->kind == WORK_FILL;
    if (moves && environment_get()->is_idle) {
        work_run_idle(work);
        return;
    }
    switch (work->kind) {
    case WORK_CALL:
        if (!is_skipped(work)) {
            block_run_grid(work->call, work->bank);
        }
        break;
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

bool may_begin(const struct work *work)
{
    return work->kind == WORK_CALL && work->call->overlaps && !is_skipped(work);
}

/* A block begins of each kernel that may overlap with the first of the queue, as far as there are
 * banks; and of the first, which may let none behind it begin. For ThreadSanitizer, which is slower
 * the more stacks there are, of one behind it alone. */
void begin_early(std::deque<struct work> *queue)
{
    const struct work *const first = &queue->front();
    if (first->kind != WORK_CALL || is_skipped(first) || queue->size() == 1 ||
        !may_begin(&(*queue)[1])) {
        return;
    }
    for (size_t i = first->call->overlaps ? 0 : 1; i < queue->size(); ++i) {
        struct work *const work = &(*queue)[i];
        if (!may_begin(work) || (tsan_is_on() && i > 1)) {
            return;
        }
        work->bank = work->bank == 0 ? block_begin(work->call) : work->bank;
        if (work->bank == 0 || block_is_alone(work->bank)) {
            return;
        }
    }
}

void run_first(struct cuda_host_stream *stream)
{
    memory_open();
    begin_early(&stream->queue);
    struct work work = stream->queue.front();
    stream->queue.pop_front();
    work_run(&work);
    memory_close();
    work_drop(&work);
}

void run_until(const struct mark *mark)
{
    memory_open();
    while (!mark->is_done) {
        run_first(mark->stream);
    }
    memory_close();
}

void run_blocking(void)
{
    stream_run(&default_stream);
    for (struct cuda_host_stream *stream : streams) {
        if (stream->is_blocking) {
            stream_run(stream);
        }
    }
}

void lose(struct cuda_host_stream *stream)
{
    for (struct work &work : stream->queue) {
        if (work.kind == WORK_MARK) {
            work.mark->is_done = true;
        }
        block_forget(work.bank);
        work_drop(&work);
    }
    stream->queue.clear();
}

} // namespace

/* ---- work ----------------------------------------------------------------------------------- */

struct work work_share(const struct work *work)
{
    struct work copy = *work;
    if (copy.call != nullptr) {
        copy.call->n_ref++;
    }
    if (copy.mark != nullptr) {
        copy.mark->n_ref++;
    }
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

struct cuda_host_stream *stream_of(cudaStream_t stream)
{
    return stream == nullptr ? &default_stream : stream;
}

void stream_run(struct cuda_host_stream *stream)
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

void stream_run_all(void)
{
    stream_run(&default_stream);
    for (struct cuda_host_stream *stream : streams) {
        stream_run(stream);
    }
}

bool stream_spoils_capture(void)
{
    bool is_capturing = false;
    for (struct cuda_host_stream *stream : streams) {
        if (stream->capture != nullptr) {
            stream->is_spoilt = true;
            is_capturing = true;
        }
    }
    return is_capturing;
}

cudaError_t stream_append(struct cuda_host_stream *stream, struct work *work)
{
    if (stream->capture != nullptr) {
        stream->capture->nodes.push_back(*work);
        return cudaSuccess;
    }
    if (stream == &default_stream && stream_spoils_capture()) {
        work_drop(work);
        return cudaErrorStreamCaptureImplicit;
    }
    /* The default stream and those that wait for it run in the order of the calls. */
    if (stream == &default_stream) {
        run_blocking();
    } else if (stream->is_blocking) {
        stream_run(&default_stream);
    }
    if (work->kind == WORK_CALL) {
        trace_launch(work->call);
    }
    stream->queue.push_back(*work);
    return cudaSuccess;
}

cudaError_t stream_wait_begin(void)
{
    hang();
    trace_wait();
    const cudaError_t error = inject(INJECT_SYNC);
    if (api_refused() != cudaSuccess) {
        lose(&default_stream);
        for (struct cuda_host_stream *stream : streams) {
            lose(stream);
        }
    }
    return error;
}

/* ---- streams -------------------------------------------------------------------------------- */

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned int flags)
{
    API_BEGIN;
    *stream = new cuda_host_stream{(flags & cudaStreamNonBlocking) == 0, {}, nullptr, false};
    streams.push_back(*stream);
    return api_end(cudaSuccess);
}

cudaError_t cudaStreamDestroy(cudaStream_t stream)
{
    const struct api lock;
    for (size_t i = 0; i < streams.size(); ++i) {
        if (streams[i] == stream) {
            stream_run(stream);
            streams[i] = streams.back();
            streams.pop_back();
            if (stream->capture != nullptr) {
                cudaGraphDestroy(stream->capture);
            }
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
        stream->is_spoilt = true;
        return api_end(cudaErrorStreamCaptureUnsupported);
    }
    const cudaError_t error = stream_wait_begin();
    if (stream == nullptr) {
        run_blocking();
    }
    stream_run(stream_of(stream));
    return api_end(error);
}

cudaError_t cudaDeviceSynchronize(void)
{
    API_BEGIN;
    if (stream_spoils_capture()) {
        return api_end(cudaErrorStreamCaptureUnsupported);
    }
    const cudaError_t error = stream_wait_begin();
    stream_run_all();
    return api_end(error);
}

/* ---- events --------------------------------------------------------------------------------- */

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned int flags)
{
    API_BEGIN;
    (void)flags;
    *event = new cuda_host_event{nullptr};
    return api_end(cudaSuccess);
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
    if (stream_of(stream)->capture != nullptr) {
        stream->is_spoilt = true;
        say("events in captured work are not part of the double");
        return api_end(cudaErrorStreamCaptureUnsupported);
    }
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
    return api_end(stream_append(stream_of(stream), &work));
}

cudaError_t cudaEventSynchronize(cudaEvent_t event)
{
    API_BEGIN;
    const cudaError_t error = stream_wait_begin();
    if (event->mark != nullptr) {
        run_until(event->mark);
    }
    return api_end(error);
}

/* Who asks often enough sees it happen. */
cudaError_t cudaEventQuery(cudaEvent_t event)
{
    API_BEGIN;
    if (event->mark == nullptr || event->mark->is_done) {
        return api_end(cudaSuccess);
    }
    run_first(event->mark->stream);
    return cudaErrorNotReady;
}

cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t to)
{
    API_BEGIN;
    if (from->mark == nullptr || to->mark == nullptr) {
        return api_end(cudaErrorInvalidResourceHandle);
    }
    if (!from->mark->is_done || !to->mark->is_done) {
        return cudaErrorNotReady;
    }
    *ms = static_cast<float>(to->mark->time_ms - from->mark->time_ms);
    return api_end(cudaSuccess);
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int flags)
{
    API_BEGIN;
    if (flags != 0 || event == nullptr) {
        return api_end(cudaErrorInvalidValue);
    }
    if (event->mark == nullptr) {
        return api_end(cudaSuccess);
    }
    struct work work = {};
    work.kind = WORK_WAIT;
    work.mark = event->mark;
    work.mark->n_ref++;
    return api_end(stream_append(stream_of(stream), &work));
}
