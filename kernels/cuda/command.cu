/* The command list: what the ops of the table append, and how it runs.
 *
 *   append   outside of a step too: uploads, downloads and frees run what is pending first
 *   begin    a step starts: from here to submit, the list is that step's
 *   submit   runs the list, eagerly (one launch function after the other) or as a captured graph
 *   wait     submits what is left and waits for the device
 *
 * Decode steps (each sequence has one row, each row an output) of one batch size launch identical
 * kernels; what differs (positions, pages, requested outputs) is read from device memory. So such a
 * list is captured as a CUDA graph after its first run, which is eager and loads its kernels; from
 * then on one graph launch replaces a hundred kernel launches. Graphs are found by a hash over
 * all arguments of all commands, with the number of commands beside it. The table is bounded; when
 * it is full, or a list was cut by a download in mid-step or by its own length, the list runs
 * eagerly. A list that cannot be captured stays eager too, and the backend's warning says so.
 * What a graph's kernels read is named by address: so freeing anything drops all graphs.
 *
 * Both ways launch the same kernels with the same arguments, hence give the same bits.
 * PKMSERVE_CUDA_GRAPHS=0 keeps everything eager, for comparing and for finding a failing kernel.
 *
 * PKMSERVE_CUDA_OVERLAP=1 lets a kernel begin while the one before it ends (struct launch_queue),
 * of compute capability 9.0 and newer: between the hundred launches of a decode step the device
 * idles, and the weights of the next product need not wait. A capture keeps it, as edges that the
 * runtime knows since CUDA 12.3; what comes after a copy or an event, the first kernel of a list
 * too, waits for it as a whole. A driver that cannot capture it is treated as any failing capture.
 * Off unless asked for: nobody has measured it. The bits are the same. */
#include "kernels/cuda/backend.cuh"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    LIST_MAX = 4096,   /* commands; a model of 48 layers has some 500 */
    GRAPH_MAX = 512,   /* two for each batch size */
    GRAPH_SLOTS = 1024 /* a power of two, so that a search soon finds an empty slot */
};

struct graph {
    uint64_t hash;
    int n_command;        /* 0 = empty slot */
    cudaGraphExec_t exec; /* Owner; NULL with n_command > 0: could not be captured */
};

struct cuda_command_list {
    struct command command[LIST_MAX];
    int n;
    const struct cuda_step *step; /* Borrowed: begun and not submitted; else NULL */
    bool is_cut;                  /* part of the step's commands has run already */
    bool is_busy;                 /* started and not waited for */
    bool has_graphs;
    struct graph graph[GRAPH_SLOTS];
    int n_graph;
};

static const char *const op_names[COMMAND_N] = {
    "embed",       "norm",        "add_norm",    "l2_norm",    "head_norm", "rms_norm",
    "rope",        "gate",        "linear",      "kv_store",   "attention", "span_attention",
    "pkm_search",  "pkm_rescore", "pkm_experts", "pkm_ablate", "pkm_read",  "gather",
    "log_softmax", "sample",      "logprobs",
};

enum err_code command_list_new(struct cuda *cu, struct err *err)
{
    cu->list = static_cast<struct cuda_command_list *>(calloc(1, sizeof *cu->list));
    if (cu->list == NULL) {
        return err_set(err, ERR_MEMORY, "cuda: no host memory left for %zu bytes of commands",
                       sizeof *cu->list);
    }
    const char *const setting = getenv("PKMSERVE_CUDA_GRAPHS");
    cu->list->has_graphs = setting == NULL || strcmp(setting, "0") != 0;
    return ERR_OK;
}

static void graphs_drop(struct cuda_command_list *list)
{
    for (int i = 0; i < GRAPH_SLOTS; i++) {
        if (list->graph[i].exec != NULL) {
            (void)cudaGraphExecDestroy(list->graph[i].exec);
        }
        list->graph[i] = {};
    }
    list->n_graph = 0;
}

void command_list_free(struct cuda *cu)
{
    if (cu->list != NULL) {
        graphs_drop(cu->list);
        free(cu->list);
        cu->list = NULL;
    }
}

/* ---- one command ---------------------------------------------------------------------------- */

static void run_one(struct cuda *cu, const struct command *c)
{
    const struct tensor *const t = c->tensor;
    const struct step_view *const view = c->step == NULL ? NULL : c->step->view;
    const struct step_scratch *const scratch = c->step == NULL ? NULL : &c->step->scratch;
    switch (c->op) {
    case COMMAND_EMBED: cuda_embed(cu, t[0], view, c->weight[0], c->weight[1], c->weight[2]); break;
    case COMMAND_NORM: cuda_norm(cu, t[0], t[1], t[2], t[3], c->f); break;
    case COMMAND_ADD_NORM: cuda_add_norm(cu, t[0], t[1], t[2], t[3], t[4], c->f); break;
    case COMMAND_L2_NORM: cuda_l2_norm(cu, t[0], t[1], c->n); break;
    case COMMAND_HEAD_NORM: cuda_head_norm(cu, t[0], t[1], c->n, c->f); break;
    case COMMAND_RMS_NORM: cuda_rms_norm(cu, t[0], t[1], t[2], t[3], t[4], c->f); break;
    case COMMAND_ROPE: cuda_rope(cu, t[0], t[1], view, c->n); break;
    case COMMAND_GATE: cuda_gate(cu, t[0], t[1], t[2], static_cast<enum gate_kind>(c->n)); break;
    case COMMAND_LINEAR:
        cuda_linear(cu, t[0], t[1], c->weight[0], t[2], static_cast<enum act>(c->n));
        break;
    case COMMAND_KV_STORE: cuda_kv_store(cu, t[0], t[1], t[2], t[3], view, c->n); break;
    case COMMAND_ATTENTION:
        cuda_attention(cu, t[0], t[1], t[2], t[3], t[4], t[5], view, scratch,
                       c->step->step.limits.n_page_max, c->n, c->f);
        break;
    case COMMAND_SPAN_ATTENTION:
        cuda_span_attention(cu, t[0], t[1], t[2], t[3], view, &c->span);
        break;
    case COMMAND_PKM_SEARCH: cuda_pkm_search(cu, t[0], t[1], t[2], c->weight[0], &c->shape); break;
    case COMMAND_PKM_RESCORE: cuda_pkm_rescore(cu, t[0], t[1], t[2], &c->rescore); break;
    case COMMAND_PKM_EXPERTS:
        cuda_pkm_experts(cu, t[0], t[1], t[2], t[3], c->weight[0], view, c->n);
        break;
    case COMMAND_PKM_ABLATE: cuda_pkm_ablate(cu, t[0], t[1], view, &c->place); break;
    case COMMAND_PKM_READ:
        cuda_pkm_read(cu, t[0], t[1], t[2], t[3], c->weight[0], view, c->n);
        break;
    case COMMAND_GATHER: cuda_gather(cu, t[0], t[1], view, c->n); break;
    case COMMAND_LOG_SOFTMAX: cuda_log_softmax(cu, t[0], t[1]); break;
    case COMMAND_SAMPLE: cuda_sample(cu, t[0], view, scratch, c->n); break;
    case COMMAND_LOGPROBS: cuda_logprobs(cu, t[0], view, scratch, c->n); break;
    case COMMAND_N: UNREACHABLE();
    }
}

/* Launches the whole list. After a failure nothing is launched any more: what it would work on may
 * not be there. An op without rows has nothing to launch. */
static void run_all(struct cuda *cu)
{
    const struct cuda_command_list *const list = cu->list;
    for (int i = 0; i < list->n && cu->failure.code == ERR_OK; i++) {
        const struct command *const c = &list->command[i];
        const bool is_store = c->op == COMMAND_KV_STORE;
        if (c->tensor[is_store ? 2 : 0].rows > 0) {
            run_one(cu, c);
            cuda_check(cu, op_names[c->op]);
        }
    }
}

static void run_eager(struct cuda *cu)
{
    struct cuda_command_list *const list = cu->list;
    list->is_busy = list->is_busy || list->n > 0;
    run_all(cu);
}

/* ---- graphs --------------------------------------------------------------------------------- */

/* Sums of words times odd constants: independent of one another, so that hashing the hundred
 * commands of a decode step takes about a microsecond. */
static uint64_t hash_tensor(const struct tensor *t)
{
    return reinterpret_cast<uintptr_t>(t->data) * 0x9e3779b97f4a7c15u +
           static_cast<uint64_t>(t->rows) * 0xbf58476d1ce4e5b9u +
           static_cast<uint64_t>(t->cols) * 0x94d049bb133111ebu +
           static_cast<uint64_t>(t->stride) * 0xd6e8feb86659fd93u +
           static_cast<uint64_t>(t->dtype) * 0xa0761d6478bd642fu;
}

static uint64_t hash_mix(uint64_t hash, uint64_t word)
{
    hash = (hash ^ word) * 0xff51afd7ed558ccdu;
    return hash ^ (hash >> 32);
}

static uint64_t hash_rescore(uint64_t hash, const struct pkm_rescore *r)
{
    uint32_t temperature_bits = 0;
    memcpy(&temperature_bits, &r->temperature, sizeof temperature_bits);
    hash = hash_mix(hash, static_cast<uint64_t>(r->n_head) << 32 | static_cast<uint32_t>(r->k_top));
    hash = hash_mix(hash, static_cast<uint64_t>(r->n_slot) << 32 | temperature_bits);
    return hash_mix(hash, static_cast<uint64_t>(r->subtract) << 2 | r->softmax << 1 | r->normalize);
}

static uint64_t hash_span(uint64_t hash, const struct span_shape *s)
{
    uint32_t scale_bits = 0;
    memcpy(&scale_bits, &s->scale, sizeof scale_bits);
    hash = hash_mix(hash, static_cast<uint64_t>(s->n_head) << 32 | scale_bits);
    hash = hash_mix(hash, static_cast<uint64_t>(s->window) << 32 |
                              static_cast<uint32_t>(s->n_persistent));
    const struct tensor *const tensors[] = {&s->position, &s->mask, &s->key, &s->value};
    for (const struct tensor *const t : tensors) {
        hash = hash_mix(hash, hash_tensor(t));
    }
    return hash;
}

/* Field by field: the bytes between fields are anything. */
static uint64_t hash_command(uint64_t hash, const struct command *c)
{
    uint32_t f_bits = 0;
    memcpy(&f_bits, &c->f, sizeof f_bits);
    hash = hash_mix(hash, static_cast<uint64_t>(c->op) << 32 | static_cast<uint32_t>(c->n));
    hash = hash_mix(hash, f_bits);
    hash = hash_mix(hash, reinterpret_cast<uintptr_t>(c->step));
    for (int i = 0; i < COMMAND_WEIGHT_MAX && c->weight[i] != NULL; i++) {
        hash = hash_mix(hash, reinterpret_cast<uintptr_t>(c->weight[i]));
    }
    for (int i = 0; i < COMMAND_TENSOR_MAX; i++) {
        hash = hash_mix(hash, hash_tensor(&c->tensor[i]));
    }
    if (c->op == COMMAND_SPAN_ATTENTION) {
        hash = hash_span(hash, &c->span);
    }
    if (c->op == COMMAND_PKM_SEARCH) {
        hash = hash_mix(hash, static_cast<uint64_t>(c->shape.kind) << 32 |
                                  static_cast<uint32_t>(c->shape.n_head));
        hash = hash_mix(hash, static_cast<uint64_t>(c->shape.k_top) << 32 |
                                  static_cast<uint32_t>(c->shape.n_key));
        hash = hash_mix(hash, static_cast<uint64_t>(c->shape.d_key) << 1 | c->shape.scores);
    }
    if (c->op == COMMAND_PKM_RESCORE) {
        hash = hash_rescore(hash, &c->rescore);
    }
    if (c->op == COMMAND_PKM_ABLATE) {
        hash = hash_mix(hash, static_cast<uint64_t>(c->place.n_head) << 32 |
                                  static_cast<uint32_t>(c->place.k_top));
        hash = hash_mix(hash, static_cast<uint64_t>(c->place.memory));
    }
    return hash;
}

static uint64_t hash_list(const struct cuda_command_list *list)
{
    uint64_t hash = 0x2545f4914f6cdd1du;
    for (int i = 0; i < list->n; i++) {
        hash = hash_command(hash, &list->command[i]);
    }
    return hash;
}

/* The graph of this hash and length, or the empty slot where it belongs. */
static struct graph *graph_find(struct cuda_command_list *list, uint64_t hash)
{
    for (uint64_t i = hash;; i++) {
        struct graph *const graph = &list->graph[i % GRAPH_SLOTS];
        if (graph->n_command == 0 || (graph->hash == hash && graph->n_command == list->n)) {
            return graph;
        }
    }
}

/* Steps are then right, but slower by what a hundred launches cost: an operator would wonder. */
static void capture_failed(struct cuda *cu, const char *what)
{
    (void)snprintf(
        cu->be.warning, sizeof cu->be.warning,
        "cuda: a decode step cannot become a graph: %.*s; steps like it are launched op by "
        "op, which is slower",
        static_cast<int>(strcspn(what, ";")), what);
}

/* Records the list's launches. A list that cannot be recorded stays eager: no failure, since all
 * its commands have just run. */
static cudaGraphExec_t graph_capture(struct cuda *cu)
{
    cudaGraph_t graph = NULL;
    cudaGraphExec_t exec = NULL;
    const struct err before = cu->failure;
    struct err failure = before;
    cudaError_t status = cudaStreamBeginCapture(cu->stream, cudaStreamCaptureModeThreadLocal);
    if (status == cudaSuccess) {
        run_all(cu);
        failure = cu->failure;
        cu->failure = before;
        status = cudaStreamEndCapture(cu->stream, &graph);
    }
    const bool is_whole = status == cudaSuccess && failure.code == ERR_OK;
    status = is_whole ? cudaGraphInstantiate(&exec, graph, 0) : status;
    if (is_whole && status == cudaSuccess) {
        (void)cudaGraphUpload(exec, cu->stream); /* now, not at its first launch */
    } else {
        exec = NULL;
        capture_failed(cu, failure.code != ERR_OK ? failure.message : cudaGetErrorString(status));
    }
    if (graph != NULL) {
        (void)cudaGraphDestroy(graph);
    }
    (void)cudaGetLastError(); /* what went wrong here is not the next op's */
    return exec;
}

/* Whether the list is a whole decode step's, whose like will come again. */
static bool may_repeat(const struct cuda *cu)
{
    const struct cuda_command_list *const list = cu->list;
    if (!list->has_graphs || list->is_cut || list->step == NULL || list->n == 0) {
        return false;
    }
    const struct step *const step = &list->step->step;
    return step->n_tok == step->n_seq && step->n_out == step->n_tok && step->n_tok > 0 &&
           step->n_tok <= cu->be.capture_max;
}

static void run_repeated(struct cuda *cu)
{
    struct cuda_command_list *const list = cu->list;
    const uint64_t hash = hash_list(list);
    struct graph *const graph = graph_find(list, hash);
    if (graph->n_command > 0 && graph->exec != NULL) {
        list->is_busy = true;
        cu->be.n_prepared++;
        (void)cuda_ok(cu, cudaGraphLaunch(graph->exec, cu->stream), "the graph of a decode step");
        return;
    }
    run_eager(cu);
    if (graph->n_command == 0 && list->n_graph < GRAPH_MAX && cu->failure.code == ERR_OK) {
        *graph = {hash, list->n, graph_capture(cu)};
        list->n_graph++;
    }
}

/* ---- the list ------------------------------------------------------------------------------- */

static void run_pending(struct cuda *cu)
{
    run_eager(cu);
    cu->list->is_cut = cu->list->is_cut || cu->list->n > 0;
    cu->list->n = 0;
}

void command_append(struct cuda *cu, const struct command *command)
{
    struct cuda_command_list *const list = cu->list;
    if (list->n == LIST_MAX) {
        run_pending(cu);
    }
    list->command[list->n++] = *command;
}

void command_begin(struct cuda *cu, const struct cuda_step *step)
{
    if (cu->list->n > 0 || cu->list->is_busy) {
        (void)command_wait(cu);
    }
    cu->list->step = step;
    cu->list->is_cut = false;
    cu->list->is_busy = true; /* the step's upload follows */
}

bool command_is_open(const struct cuda *cu)
{
    return cu->list->n > 0 || cu->list->step != NULL;
}

void command_submit(struct cuda *cu)
{
    struct cuda_command_list *const list = cu->list;
    if (may_repeat(cu) && cu->failure.code == ERR_OK) {
        run_repeated(cu);
    } else {
        run_eager(cu);
    }
    list->n = 0;
    list->step = NULL;
    list->is_cut = false;
}

bool command_wait(struct cuda *cu)
{
    run_pending(cu);
    cu->list->is_busy = false;
    return cuda_ok(cu, cudaStreamSynchronize(cu->stream), "the wait for a step") &&
           cu->failure.code == ERR_OK;
}

void command_forget(struct cuda *cu)
{
    (void)command_wait(cu);
    if (cu->list->n_graph > 0) {
        graphs_drop(cu->list);
    }
}
