/* How a step's ops reach the device: launched as they are called, recorded meanwhile, or replayed.
 *
 *   EAGER    each op is launched when it is called (launch.cu); so is every op outside of a step
 *   RECORD   likewise, and launched once more into a recording, which the step's end makes a graph
 *   REPLAY   one launch of that graph has begun the whole step; ops that are called are only counted
 *
 * Decode steps (of drawn tokens, each row an output) of one batch size launch identical kernels;
 * what differs (positions, pages, requested outputs) is read from device memory. Which
 * recorded step a new one equals is said by its key: where its view is, its list of ops (ops_list),
 * its rows, and whether any sequence has knock-outs or redirections, since a model calls other ops
 * or passes other arguments then. Where that holds, a hundred launches become one, which begins as
 * soon as the step's inputs are on their way, before the model calls its first op. At the end the
 * number of ops that were called must be the number that was recorded.
 *
 * A recording is a capture of a stream of its own, on which nothing ever runs: a step that cannot
 * be recorded has been computed all the same, stays eager, and the backend's warning says why. Each
 * kernel is launched on the working stream before it is captured, so it is loaded by then and may
 * have the shared memory it wants. Loading is what the capture would else forbid to this thread:
 * hence its relaxed mode. The number of graphs is bounded; when it is reached, or results are read
 * in the middle of a recorded step, steps of that key stay eager. What a graph's kernels read is
 * named by address: so freeing anything drops all graphs.
 *
 * All ways launch the same kernels with the same arguments, hence give the same bits.
 * PKMSERVE_CUDA_GRAPHS=0 keeps everything eager, for comparing and for finding a failing kernel.
 *
 * A kernel may begin while the one before it ends (struct launch_queue), of compute capability 9.0
 * and newer: between the launches of a decode step the device idles, and the weights of the next
 * product need not wait. A capture keeps it, as edges that the runtime knows since CUDA 12.3; what
 * comes after a copy or an event, the first kernel of a step too, waits for it as a whole. A driver
 * that cannot capture it is treated as any failing capture. The bits are the same;
 * PKMSERVE_CUDA_OVERLAP=0 does without. */
#include "kernels/cuda/backend.cuh"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    GRAPH_MAX = 512 /* two for each batch size */
};

enum step_mode { STEP_EAGER, STEP_RECORD, STEP_REPLAY };

struct graph_key {
    const struct step_view *view; /* Borrowed: the same of twins */
    int ops_list, n_tok;
    bool ablates, redirects;
};

struct graph {
    struct graph_key key;
    int n_op;
    cudaGraphExec_t exec; /* Owner; NULL: could not be recorded */
};

struct cuda_graphs {
    struct graph graph[GRAPH_MAX];
    int n_graph;
    cudaStream_t recorder; /* Owner */
    enum step_mode mode;
    struct graph *now;  /* Borrowed: that of the step, unless EAGER */
    int n_op;           /* called since the step began */
    bool is_open;       /* a step has begun and not been submitted */
    struct err failure; /* of a launch into the recording */
};

enum err_code graphs_new(struct cuda *cu, struct err *err)
{
    cu->graphs = static_cast<struct cuda_graphs *>(calloc(1, sizeof *cu->graphs));
    return cu->graphs != NULL
               ? ERR_OK
               : err_set(err, ERR_MEMORY, "cuda: no host memory left for %zu bytes of graphs",
                         sizeof *cu->graphs);
}

bool graphs_open(struct cuda *cu)
{
    return cuda_ok(cu, cudaStreamCreateWithFlags(&cu->graphs->recorder, cudaStreamNonBlocking),
                   "stream");
}

static void graphs_drop(struct cuda *cu)
{
    struct cuda_graphs *const g = cu->graphs;
    for (int i = 0; i < g->n_graph; i++) {
        if (g->graph[i].exec != NULL) {
            (void)cudaGraphExecDestroy(g->graph[i].exec);
        }
    }
    g->n_graph = 0;
}

void graphs_free(struct cuda *cu)
{
    if (cu->graphs == NULL) {
        return;
    }
    graphs_drop(cu);
    if (cu->graphs->recorder != NULL) {
        (void)cudaStreamDestroy(cu->graphs->recorder);
    }
    free(cu->graphs);
    cu->graphs = NULL;
}

/* ---- recording ------------------------------------------------------------------------------ */

/* Steps are then right, but slower by what a hundred launches cost: an operator would wonder. */
static void say_unrecorded(struct cuda *cu, const char *what)
{
    (void)snprintf(
        cu->be.warning, sizeof cu->be.warning,
        "cuda: a decode step cannot become a graph: %.*s; steps like it are launched op by "
        "op, which is slower",
        static_cast<int>(strcspn(what, ";")), what);
}

static void record_begin(struct cuda *cu)
{
    struct cuda_graphs *const g = cu->graphs;
    const cudaError_t status = cudaStreamBeginCapture(g->recorder, cudaStreamCaptureModeRelaxed);
    g->failure = {ERR_OK, ""};
    g->mode = status == cudaSuccess ? STEP_RECORD : STEP_EAGER;
    if (status != cudaSuccess) {
        say_unrecorded(cu, cudaGetErrorString(status));
        (void)cudaGetLastError(); /* what went wrong here is not the next op's */
    }
}

/* Ends a recording. is_wanted: makes it the step's graph; else, and where that fails, steps like
 * this one stay eager. */
static void record_end(struct cuda *cu, bool is_wanted)
{
    struct cuda_graphs *const g = cu->graphs;
    cudaGraph_t graph = NULL;
    cudaGraphExec_t exec = NULL;
    cudaError_t status = cudaStreamEndCapture(g->recorder, &graph);
    const bool is_whole = status == cudaSuccess && g->failure.code == ERR_OK;
    if (is_whole && is_wanted) {
        status = cudaGraphInstantiate(&exec, graph, 0);
    }
    if (status != cudaSuccess || !is_whole) {
        exec = NULL;
        say_unrecorded(cu,
                       g->failure.code != ERR_OK ? g->failure.message : cudaGetErrorString(status));
    }
    if (exec != NULL) {
        (void)cudaGraphUpload(exec, cu->stream); /* now, not at its first launch */
    }
    if (graph != NULL) {
        (void)cudaGraphDestroy(graph);
    }
    (void)cudaGetLastError();
    g->now->exec = exec;
    g->now->n_op = g->n_op;
    g->mode = STEP_EAGER;
}

static void streams_swap(struct cuda *cu)
{
    cudaStream_t const stream = cu->stream;
    cu->stream = cu->graphs->recorder;
    cu->graphs->recorder = stream;
}

bool graphs_record(struct cuda *cu)
{
    const struct cuda_graphs *const g = cu->graphs;
    if (g->mode != STEP_RECORD || g->failure.code != ERR_OK || cu->failure.code != ERR_OK) {
        return false;
    }
    streams_swap(cu);
    return true;
}

void graphs_recorded(struct cuda *cu)
{
    streams_swap(cu);
    cu->graphs->failure = cu->failure;
    cu->failure = {ERR_OK, ""}; /* the step itself goes on */
}

/* ---- a step --------------------------------------------------------------------------------- */

/* Whether the step's like will come again: a whole decode step of a list of ops that has a
 * number. */
static bool may_repeat(const struct cuda *cu, const struct step *step)
{
    bool repeats = step->is_drawn && step->ops_list != 0 && step->n_out == step->n_tok &&
                   step->n_tok > 0 && step->n_tok <= cu->be.capture_max;
    for (int i = 0; repeats && i < step->n_tok; i++) { /* else a model gathers rows */
        repeats = step->out_row[i] == i;
    }
    return repeats;
}

static bool is_same(const struct graph_key *a, const struct graph_key *b)
{
    return a->n_tok == b->n_tok && a->view == b->view && a->ops_list == b->ops_list &&
           a->ablates == b->ablates && a->redirects == b->redirects;
}

/* The graph of this key, made empty where there is none; NULL: there is no room for one more. */
static struct graph *graph_of(struct cuda_graphs *g, const struct graph_key *key)
{
    for (int i = 0; i < g->n_graph; i++) {
        if (is_same(&g->graph[i].key, key)) {
            return &g->graph[i];
        }
    }
    if (g->n_graph == GRAPH_MAX) {
        return NULL;
    }
    struct graph *const graph = &g->graph[g->n_graph++];
    *graph = {*key, -1, NULL};
    return graph;
}

bool graphs_choose(struct cuda *cu, const struct step *step)
{
    struct cuda_graphs *const g = cu->graphs;
    g->now = NULL;
    if (cu->failure.code != ERR_OK || !may_repeat(cu, step)) {
        return false;
    }
    const struct graph_key key = {cuda_step_of(step)->view, step->ops_list, step->n_tok,
                                  step->n_ablate > 0, step->n_redirect > 0};
    g->now = graph_of(g, &key);
    return g->now != NULL && g->now->exec != NULL;
}

void graphs_begin(struct cuda *cu, const struct step *step)
{
    struct cuda_graphs *const g = cu->graphs;
    g->is_open = true;
    cu->is_drawn = step->is_drawn;
    g->mode = STEP_EAGER;
    g->n_op = 0;
    trace_list_begin(cu);
    if (cu->failure.code != ERR_OK || g->now == NULL) {
        return;
    }
    if (g->now->n_op < 0) {
        g->now->n_op = 0;
        record_begin(cu);
    } else if (g->now->exec != NULL) {
        g->mode = STEP_REPLAY;
        cu->be.n_prepared++;
        (void)cuda_ok(cu, cudaGraphLaunch(g->now->exec, cu->stream), "the graph of a decode step");
    }
}

bool graphs_launch(struct cuda *cu, int64_t rows)
{
    struct cuda_graphs *const g = cu->graphs;
    g->n_op++;
    if (g->mode == STEP_REPLAY || rows == 0 || cu->failure.code != ERR_OK) {
        return false;
    }
    return true;
}

void graphs_end(struct cuda *cu)
{
    struct cuda_graphs *const g = cu->graphs;
    launch_held(cu);
    trace_list_end(cu);
    if (g->mode == STEP_RECORD) {
        record_end(cu, cu->failure.code == ERR_OK);
    }
    CHECK(g->mode != STEP_REPLAY || g->n_op == g->now->n_op);
    g->mode = STEP_EAGER;
    g->is_open = false;
    cu->is_drawn = false;
}

bool graphs_is_open(const struct cuda *cu)
{
    return cu->graphs->is_open;
}

/* ---- waiting -------------------------------------------------------------------------------- */

bool graphs_wait(struct cuda *cu)
{
    struct cuda_graphs *const g = cu->graphs;
    CHECK(g->mode != STEP_REPLAY); /* between its ops there is nothing to be seen */
    launch_held(cu);
    if (g->mode == STEP_RECORD) {
        record_end(cu, false);
    }
    trace_list_end(cu);
    const bool is_good = cuda_ok(cu, cudaStreamSynchronize(cu->stream), "the wait for a step");
    trace_collect(cu);
    return is_good && cu->failure.code == ERR_OK;
}

bool graphs_wait_for(struct cuda *cu, cudaEvent_t event)
{
    CHECK(!cu->graphs->is_open);
    if (cu->trace != NULL ||
        cu->failure.code != ERR_OK) { /* whose times are read when all is done */
        return graphs_wait(cu);
    }
    return cuda_ok(cu, cudaEventSynchronize(event), "the wait for a step");
}

void graphs_forget(struct cuda *cu)
{
    (void)graphs_wait(cu);
    graphs_drop(cu);
}
