/* Captured work. A graph holds what was appended to its stream: launches with copies of their
 * arguments, copies and fills with their addresses. Replaying it appends them again, if its kernels
 * are still allowed what they were captured with. */
#include "tests/cuda_host/stream.h"

struct cuda_host_graph_exec {
    struct cuda_host_graph graph;
};

namespace
{

void graph_clear(struct cuda_host_graph *graph)
{
    for (struct work &node : graph->nodes) {
        work_drop(&node);
    }
    graph->nodes.clear();
}

} // namespace

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode)
{
    API_BEGIN;
    (void)mode;
    if (stream == nullptr || stream->capture != nullptr) {
        return api_end(cudaErrorStreamCaptureUnsupported);
    }
    const cudaError_t error = inject(INJECT_CAPTURE);
    if (error != cudaSuccess) {
        return api_end(error);
    }
    stream->capture = new cuda_host_graph{};
    stream->is_spoilt = false;
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
    const cudaError_t error =
        stream->is_spoilt ? cudaErrorStreamCaptureInvalidated : inject(INJECT_CAPTURE);
    if (error != cudaSuccess) {
        cudaGraphDestroy(capture);
        return api_end(error);
    }
    *graph = capture;
    return api_end(cudaSuccess);
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t graph, unsigned long long flags)
{
    API_BEGIN;
    (void)flags;
    const cudaError_t error = inject(INJECT_CAPTURE);
    if (error != cudaSuccess) {
        return api_end(error);
    }
    *exec = new cuda_host_graph_exec{};
    for (const struct work &node : graph->nodes) {
        (*exec)->graph.nodes.push_back(work_share(&node));
    }
    return api_end(cudaSuccess);
}

cudaError_t cudaGraphUpload(cudaGraphExec_t exec, cudaStream_t stream)
{
    API_BEGIN;
    (void)exec, (void)stream;
    return api_end(cudaSuccess);
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream)
{
    API_BEGIN;
    cudaError_t error = inject(INJECT_LAUNCH);
    for (const struct work &node : exec->graph.nodes) {
        if (error == cudaSuccess && node.kind == WORK_CALL) {
            error = launch_error(node.call);
        }
    }
    if (error == cudaSuccess) {
        trace_graph(exec->graph.nodes.size());
    }
    for (const struct work &node : exec->graph.nodes) {
        if (error == cudaSuccess) {
            struct work work = work_share(&node);
            error = stream_append(stream_of(stream), &work);
        }
    }
    return api_end(error);
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph)
{
    const struct api lock;
    graph_clear(graph);
    delete graph;
    return api_end(api_refused());
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec)
{
    const struct api lock;
    graph_clear(&exec->graph);
    delete exec;
    return api_end(api_refused());
}
