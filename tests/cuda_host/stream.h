/* Work that waits in streams: what stream.cc, submit.cc and graph.cc share. */
#ifndef CUDA_HOST_STREAM_H
#define CUDA_HOST_STREAM_H

#include "tests/cuda_host/double.h"

#include <deque>
#include <vector>

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
    int bank;                    /* of block_begin; 0: it has not begun */
    /* COPY and FILL: height rows of width bytes */
    char *dst;
    const char *src;
    char *staged; /* Owner: what pageable memory held at the call; else NULL */
    size_t dst_pitch, src_pitch, width, height;
    int value;
};

struct work work_share(const struct work *work);
void work_drop(struct work *work);

struct cuda_host_graph {
    std::vector<struct work> nodes;
};

struct cuda_host_stream {
    bool is_blocking; /* waits for the default stream, and it for this */
    std::deque<struct work> queue;
    struct cuda_host_graph *capture; /* Owner while it lasts; else NULL */
    bool is_spoilt;                  /* the capture ends with an error */
};

/* The default stream for NULL. */
struct cuda_host_stream *stream_of(cudaStream_t stream);
/* Takes work over: to the end of the stream's queue, or into the graph that is being captured. */
cudaError_t stream_append(struct cuda_host_stream *stream, struct work *work);
/* What a launch of this call would say now: of its grid, and of what its kernel is allowed. */
cudaError_t launch_error(const struct cuda_host_call *call);
/* Runs all that was handed to it. */
void stream_run(struct cuda_host_stream *stream);
/* What every function that waits for the device does first: whether the device is still there. If
 * not, what was to run is lost. */
cudaError_t stream_wait_begin(void);

#endif
