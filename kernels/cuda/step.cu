/* The step: one ragged batch, on its way to the device and back.
 *
 * The engine's arrays are plain host memory, each an allocation of its own, so that a sanitizer
 * sees a write past its end. cuda_step_begin packs their used parts into one pinned block and
 * starts one copy of it to the device's block, at whose beginning kernels find the view:
 *
 *   step_view | attention's units, tiles | token pos lang row_seq seq_first page ... redirect |
 *   drawn <--------------------------------- uploaded ------------------------------------>
 *
 * Only the view's own address is fixed, and that of drawn; the view says where the arrays are in
 * this step. Results are written by the kernels into a second pinned block, whose addresses the
 * view has, too: they are there when the event behind the step's work has been, and finish hands
 * those out that were asked for and computed. Behind them in that block is what is fetched, a copy
 * each, in the same wait.
 *
 * Twins have pinned blocks of their own each, and one device's block: what is uploaded for the one
 * that began second waits, in the stream, for the kernels of the first. A token that the first
 * draws is then on the device only: in drawn, which uploads leave alone. The few kilobytes of a
 * step that is replayed as a graph are copied by a kernel, which reads the host's memory itself:
 * between kernels a copy by the device's copying unit would hand the stream over to that and back.
 * What is launched op by op comes after a copy, so that no kernel of a step, even if it begins
 * early, does so before its inputs are there. */
#include "kernels/cuda/backend.cuh"

#include <stdlib.h>
#include <string.h>

enum { PACK_ALIGN = 16 };

/* Outputs that ops of this step have computed, as far as they lie in one piece (they do). */
struct out_range {
    int64_t first, end;
};

/* Pinned memory of the host, and its address on the device. */
struct pinned {
    char *host;   /* Owner */
    char *device; /* Borrowed */
};

struct step_inside {
    char *device;          /* Owner: the first of twins */
    int32_t *drawn;        /* Borrowed: in device */
    bool is_second;        /* of twins */
    struct pinned up;      /* what is uploaded */
    struct pinned down;    /* results, and behind them what is fetched */
    size_t up_bytes;       /* of up; device has as much, and drawn */
    size_t result_bytes;   /* of down; it has limits.n_fetch_bytes more */
    size_t fetched;        /* bytes of these in this step */
    cudaEvent_t done;      /* Owner: recorded behind all of the step's work */
    bool is_under_way;     /* begun and not finished */
    struct step_view view; /* of this step */
    struct out_range ready;
};

static struct step_inside *inside_of(const struct cuda_step *step)
{
    return static_cast<struct step_inside *>(step->inside);
}

/* ---- packing -------------------------------------------------------------------------------- */

/* Lays arrays one after the other; with up NULL it only counts. */
struct pack {
    char *up;     /* Borrowed */
    char *device; /* Borrowed */
    size_t used;
};

/* Room for n_a·n_b elements, and its address on the device. */
template <class T> static T *pack_room(struct pack *p, int n_a, int n_b)
{
    T *const at = reinterpret_cast<T *>(reinterpret_cast<uintptr_t>(p->device) + p->used);
    const size_t bytes = static_cast<size_t>(n_a) * static_cast<size_t>(n_b) * sizeof(T);
    p->used += (bytes + PACK_ALIGN - 1) / PACK_ALIGN * PACK_ALIGN;
    return at;
}

template <class T> static T *pack_copy(struct pack *p, const T *host, int n_a, int n_b)
{
    const size_t bytes = static_cast<size_t>(n_a) * static_cast<size_t>(n_b) * sizeof(T);
    if (p->up != NULL && bytes > 0) {
        memcpy(p->up + p->used, host, bytes);
    }
    return pack_room<T>(p, n_a, n_b);
}

/* The first n_page pages of each sequence: most are far from the longest that may come. */
static const int32_t *pack_pages(struct pack *p, const struct step *s, int n_page)
{
    for (int seq = 0; p->up != NULL && seq < s->n_seq; seq++) {
        memcpy(p->up + p->used + static_cast<size_t>(seq) * n_page * sizeof(int32_t),
               s->page + static_cast<int64_t>(seq) * s->limits.n_page_max,
               static_cast<size_t>(n_page) * sizeof(int32_t));
    }
    return pack_room<int32_t>(p, s->n_seq, n_page);
}

/* Addresses of the arrays of s, for the counts of s. Copies the inputs if p has a block. */
static struct step_view pack_step(struct pack *p, const struct cuda *cu, const struct step *s,
                                  int n_page, const struct step_scratch *scratch)
{
    struct step_view v = {};
    const struct step_view *const at = pack_room<struct step_view>(p, 1, 1);
    if (p->up != NULL) {
        attention_units(s, reinterpret_cast<struct attention_unit *>(p->up + p->used),
                        scratch->n_unit);
    }
    CHECK(pack_room<struct attention_unit>(p, scratch->n_unit, 1) == step_units(at));
    if (p->up != NULL) {
        (void)attention_tiles(cu, s, scratch->attention_bytes,
                              reinterpret_cast<struct attention_tile *>(p->up + p->used));
    }
    (void)pack_room<struct attention_tile>(p, scratch->n_tile, 1);
    v.n_tok = s->n_tok;
    v.n_seq = s->n_seq;
    v.n_out = s->n_out;
    v.n_top = s->n_top;
    v.n_adjust = s->n_adjust;
    v.n_allow = s->n_allow;
    v.n_page_max = n_page;
    v.n_top_max = s->limits.n_top_max;
    v.token = pack_copy(p, s->token, s->n_tok, 1);
    v.pos = pack_copy(p, s->pos, s->n_tok, 1);
    v.lang = pack_copy(p, s->lang, s->n_tok, 1);
    int32_t *const row_seq = p->up == NULL ? NULL : reinterpret_cast<int32_t *>(p->up + p->used);
    for (int seq = 0; row_seq != NULL && seq < s->n_seq; seq++) {
        for (int r = s->seq_first[seq]; r < s->seq_first[seq + 1]; r++) {
            row_seq[r] = seq;
        }
    }
    v.row_seq = pack_room<int32_t>(p, s->n_tok, 1);
    v.seq_first = pack_copy(p, s->seq_first, s->n_seq + 1, 1);
    v.page = pack_pages(p, s, n_page);
    v.out_row = pack_copy(p, s->out_row, s->n_out, 1);
    v.out_want = pack_copy(p, s->out_want, s->n_out, 1);
    v.target = pack_copy(p, s->target, s->n_out, 1);
    v.sample = pack_copy(p, s->sample, s->n_out, 1);
    v.adjust = pack_copy(p, s->adjust, s->n_adjust, 1);
    v.allow = pack_copy(p, s->allow, s->n_allow, 1);
    v.ablate_first = pack_copy(p, s->ablate_first, s->n_seq + 1, 1);
    v.ablate = pack_copy(p, s->ablate, s->n_ablate, 1);
    v.redirect_first = pack_copy(p, s->redirect_first, s->n_seq + 1, 1);
    v.redirect = pack_copy(p, s->redirect, s->n_redirect, 1);
    return v;
}

static void pack_results(struct pack *p, const struct step *s, struct step_view *v)
{
    v->out_token = pack_room<int32_t>(p, s->n_out, 1);
    v->out_logprob = pack_room<float>(p, s->n_out, 1);
    v->out_rank = pack_room<int32_t>(p, s->n_out, 1);
    v->out_entropy = pack_room<float>(p, s->n_out, 1);
    v->top_id = pack_room<int32_t>(p, s->n_out, s->limits.n_top_max);
    v->top_logprob = pack_room<float>(p, s->n_out, s->limits.n_top_max);
}

/* Bytes of the fullest step: of its inputs, and of its results. */
static void pack_bytes(const struct cuda *cu, const struct step_limits *limits,
                       struct step_inside *in)
{
    struct step full = {};
    full.limits = *limits;
    full.n_tok = limits->n_tok_max;
    full.n_seq = limits->n_seq_max;
    full.n_out = limits->n_out_max;
    full.n_top = limits->n_top_max;
    full.n_adjust = limits->n_adjust_max;
    full.n_allow = limits->n_allow_max;
    full.n_ablate = limits->n_ablate_max;
    full.n_redirect = limits->n_redirect_max;
    struct pack up = {};
    struct pack down = {};
    struct step_scratch scratch = {};
    scratch.n_unit = attention_unit_max(cu, limits);
    scratch.n_tile = attention_tile_max(cu, limits);
    struct step_view v = pack_step(&up, cu, &full, limits->n_page_max, &scratch);
    pack_results(&down, &full, &v);
    in->up_bytes = up.used;
    in->result_bytes = down.used;
}

/* ---- making --------------------------------------------------------------------------------- */

/* Zeroed: blocks that arrive are counted from 0 on. */
static enum err_code scratch_new(struct cuda *cu, void **data, size_t bytes, const char *purpose,
                                 struct err *err)
{
    const enum err_code code = resource_device_new(cu, data, bytes, purpose, err);
    if (code == ERR_OK && bytes > 0) {
        (void)cuda_ok(cu, cudaMemsetAsync(*data, 0, bytes, cu->stream), "cuda_step_new");
    }
    return code;
}

static enum err_code pinned_new(struct cuda *cu, struct pinned *block, size_t bytes,
                                const char *purpose, struct err *err)
{
    void *host = NULL;
    void *device = NULL;
    const enum err_code code = resource_pinned_new(cu, &host, bytes, purpose, err);
    if (code != ERR_OK) {
        return code;
    }
    block->host = static_cast<char *>(host);
    memset(block->host, 0, bytes);
    if (!cuda_ok(cu, cudaHostGetDevicePointer(&device, host, 0), purpose)) {
        *err = cu->failure;
        return err->code;
    }
    block->device = static_cast<char *>(device);
    return ERR_OK;
}

/* What each of twins has for itself. */
static enum err_code own_new(struct cuda *cu, struct cuda_step *s, struct err *err)
{
    struct step_inside *const in = inside_of(s);
    pack_bytes(cu, &s->step.limits, in);
    const size_t down_bytes = in->result_bytes + static_cast<size_t>(s->step.limits.n_fetch_bytes);
    enum err_code code = pinned_new(cu, &in->up, in->up_bytes, "the step's upload", err);
    code =
        code == ERR_OK ? pinned_new(cu, &in->down, down_bytes, "the step's download", err) : code;
    if (code == ERR_OK && !cuda_ok(cu, cudaEventCreateWithFlags(&in->done, cudaEventDisableTiming),
                                   "cuda_step_new")) {
        *err = cu->failure;
        return err->code;
    }
    return code;
}

static enum err_code device_new(struct cuda *cu, struct cuda_step *s, struct err *err)
{
    struct step_inside *const in = inside_of(s);
    struct step_scratch *const scratch = &s->scratch;
    const struct step_limits *const limits = &s->step.limits;
    const size_t drawn_bytes = static_cast<size_t>(limits->n_out_max) * sizeof(int32_t);
    scratch->attention_bytes = attention_scratch(limits);
    scratch->vocab_bytes = vocab_scratch(limits);
    void *device = NULL;
    enum err_code code =
        resource_device_new(cu, &device, in->up_bytes + drawn_bytes, "the step's arrays", err);
    in->device = static_cast<char *>(device);
    if (code == ERR_OK) {
        const size_t n_counter = attention_counters(limits);
        code = scratch_new(cu, &scratch->attention,
                           scratch->attention_bytes + n_counter * sizeof(unsigned),
                           "attention's scratch", err);
        scratch->arrived = reinterpret_cast<unsigned *>(static_cast<char *>(scratch->attention) +
                                                        scratch->attention_bytes);
    }
    if (code == ERR_OK) {
        code =
            scratch_new(cu, &scratch->vocab, scratch->vocab_bytes, "the vocabulary's scratch", err);
    }
    return code;
}

static enum err_code step_new(struct cuda *cu, struct step **step, const struct cuda_step *first,
                              const struct step_limits *limits, struct err *err)
{
    struct err local;
    struct err *const e = err != NULL ? err : &local;
    *step = NULL;
    struct cuda_step *const s = static_cast<struct cuda_step *>(calloc(1, sizeof *s));
    struct step_inside *const in = static_cast<struct step_inside *>(calloc(1, sizeof *in));
    if (s == NULL || in == NULL) {
        free(s);
        free(in);
        return err_set(e, ERR_MEMORY, "cuda: no host memory left for a step");
    }
    s->inside = in;
    in->is_second = first != NULL;
    enum err_code code = step_arrays_new(&s->step, limits, e);
    code = code == ERR_OK ? own_new(cu, s, e) : code;
    if (first != NULL) {
        in->device = inside_of(first)->device;
        s->scratch = first->scratch;
    } else if (code == ERR_OK) {
        code = device_new(cu, s, e);
    }
    if (code != ERR_OK) {
        cuda_step_free(&cu->be, &s->step);
        return code;
    }
    s->view = reinterpret_cast<const struct step_view *>(in->device);
    in->drawn = reinterpret_cast<int32_t *>(in->device + in->up_bytes);
    *step = &s->step;
    return ERR_OK;
}

enum err_code cuda_step_new(struct backend *be, struct step **step,
                            const struct step_limits *limits, struct err *err)
{
    return step_new(cuda_of(be), step, NULL, limits, err);
}

enum err_code cuda_step_twin(struct backend *be, struct step **twin, struct step *step,
                             struct err *err)
{
    return step_new(cuda_of(be), twin, cuda_step_of(step), &step->limits, err);
}

void cuda_step_free(struct backend *be, struct step *step)
{
    if (step == NULL) {
        return;
    }
    graphs_forget(cuda_of(be));
    struct cuda_step *const s = cuda_step_of(step);
    struct step_inside *const in = inside_of(s);
    (void)cudaFreeHost(in->up.host);
    (void)cudaFreeHost(in->down.host);
    if (in->done != NULL) {
        (void)cudaEventDestroy(in->done);
    }
    if (!in->is_second) {
        (void)cudaFree(in->device);
        (void)cudaFree(s->scratch.attention);
        (void)cudaFree(s->scratch.vocab);
    }
    step_arrays_free(&s->step);
    free(in);
    free(s);
}

/* ---- running -------------------------------------------------------------------------------- */

enum { UPLOAD_THREADS = 128 };

/* n pieces of 16 bytes from the host's memory. Bytes: 16·n across the bus. Bound: one read's
 * latency. */
__global__ void __launch_bounds__(UPLOAD_THREADS)
    upload_kernel(uint4 *to, const uint4 *from, unsigned n)
{
    const unsigned i = blockIdx.x * UPLOAD_THREADS + threadIdx.x;
    grid_wait_alone(); /* attention reads units and pages early */
    if (i < n) {
        to[i] = from[i];
    }
}

static void upload(struct cuda *cu, const struct step_inside *in, size_t bytes, bool by_kernel)
{
    if (!by_kernel) {
        (void)cuda_ok(
            cu, cudaMemcpyAsync(in->device, in->up.host, bytes, cudaMemcpyHostToDevice, cu->stream),
            "step upload");
        return;
    }
    const unsigned n = static_cast<unsigned>(bytes / sizeof(uint4));
    LAUNCH(upload_kernel, dim3((n + UPLOAD_THREADS - 1) / UPLOAD_THREADS), dim3(UPLOAD_THREADS), 0,
           cuda_queue(cu), reinterpret_cast<uint4 *>(in->device),
           reinterpret_cast<const uint4 *>(in->up.device), n);
    cuda_check(cu, "step upload");
}

void cuda_step_begin(struct backend *be, struct step *step)
{
    struct cuda *const cu = cuda_of(be);
    struct cuda_step *const s = cuda_step_of(step);
    struct step_inside *const in = inside_of(s);
    step_check(step);
    if (graphs_is_open(cu)) {
        graphs_end(cu);
    }
    if (in->is_under_way) { /* nobody wants its results, but the device may yet read its inputs */
        (void)graphs_wait(cu);
    }
    in->is_under_way = true;
    in->ready = {INT64_MAX, 0};
    in->fetched = 0;
    struct pack up = {in->up.host, in->device, 0};
    struct pack down = {NULL, in->down.device, 0};
    const int n_page = step_pages_used(step, step->bounds.pos);
    s->scratch.n_unit = attention_unit_count(cu, &step->limits, step->n_tok, step->is_drawn);
    s->scratch.n_tile = attention_tiles(cu, step, s->scratch.attention_bytes, NULL);
    in->view = pack_step(&up, cu, step, n_page, &s->scratch);
    in->view.drawn = in->drawn;
    pack_results(&down, step, &in->view);
    CHECK(up.used <= in->up_bytes && down.used <= in->result_bytes);
    memcpy(in->up.host, &in->view, sizeof in->view);
    const bool is_replayed = graphs_choose(cu, step);
    if (cu->failure.code == ERR_OK) {
        upload(cu, in, up.used, is_replayed);
    }
    graphs_begin(cu, step);
}

void step_will_output(const struct step *step, int64_t first, int64_t n)
{
    struct out_range *const ready = &inside_of(cuda_step_of(step))->ready;
    ready->first = first < ready->first ? first : ready->first;
    ready->end = first + n > ready->end ? first + n : ready->end;
}

/* All of the step's work so far has been handed to the device. */
static void record_done(struct cuda *cu, const struct step_inside *in)
{
    if (cu->failure.code == ERR_OK) {
        (void)cuda_ok(cu, cudaEventRecord(in->done, cu->stream), "step end");
    }
}

void cuda_step_submit(struct backend *be, struct step *step)
{
    struct cuda *const cu = cuda_of(be);
    graphs_end(cu);
    record_done(cu, inside_of(cuda_step_of(step)));
}

/* After a failure it is 0: nobody shall read what was never written. */
const void *cuda_step_fetch(struct backend *be, struct step *step, struct tensor src)
{
    struct cuda *const cu = cuda_of(be);
    struct step_inside *const in = inside_of(cuda_step_of(step));
    const size_t bytes =
        static_cast<size_t>(src.rows) * static_cast<size_t>(src.cols) * dtype_bytes(src.dtype);
    CHECK(src.stride == src.cols && !graphs_is_open(cu) && in->is_under_way);
    CHECK(in->fetched + bytes <= static_cast<size_t>(step->limits.n_fetch_bytes));
    char *const host = in->down.host + in->result_bytes + in->fetched;
    in->fetched += bytes;
    if (cu->failure.code != ERR_OK ||
        !cuda_ok(cu, cudaMemcpyAsync(host, src.data, bytes, cudaMemcpyDeviceToHost, cu->stream),
                 "fetch")) {
        memset(host, 0, bytes);
    }
    record_done(cu, in);
    return host;
}

/* Where the host finds a result. */
template <class T> static const T *down_at(const struct step_inside *in, const T *device)
{
    const char *const at = reinterpret_cast<const char *>(device);
    return reinterpret_cast<const T *>(in->down.host + (at - in->down.device));
}

/* Hands out what was asked for and computed; all else stays as it was. */
static void results_copy(struct step *step, const struct step_inside *in)
{
    const struct step_view *const v = &in->view;
    const int32_t *const token = down_at(in, v->out_token);
    const float *const logprob = down_at(in, v->out_logprob);
    const int32_t *const rank = down_at(in, v->out_rank);
    const float *const entropy = down_at(in, v->out_entropy);
    for (int64_t i = in->ready.first; i < in->ready.end; i++) {
        if ((step->out_want[i] & OUT_SAMPLE) != 0) {
            step->out_token[i] = token[i];
        }
        if ((step->out_want[i] & OUT_LOGPROB) != 0) {
            step->out_logprob[i] = logprob[i];
            step->out_rank[i] = rank[i];
        }
        if ((step->out_want[i] & OUT_ENTROPY) != 0) {
            step->out_entropy[i] = entropy[i];
        }
        if ((step->out_want[i] & OUT_TOP) != 0 && step->n_top > 0) {
            const int64_t at = i * step->limits.n_top_max;
            const size_t n = static_cast<size_t>(step->n_top);
            memcpy(step->top_id + at, down_at(in, v->top_id) + at, n * sizeof(int32_t));
            memcpy(step->top_logprob + at, down_at(in, v->top_logprob) + at, n * sizeof(float));
        }
    }
}

enum err_code cuda_step_finish(struct backend *be, struct step *step, struct err *err)
{
    struct cuda *const cu = cuda_of(be);
    if (graphs_is_open(cu)) {
        cuda_step_submit(be, step);
    }
    struct step_inside *const in = inside_of(cuda_step_of(step));
    in->is_under_way = false;
    if (!graphs_wait_for(cu, in->done)) {
        if (err != NULL) {
            *err = cu->failure;
        }
        return cu->failure.code;
    }
    results_copy(step, in);
    return ERR_OK;
}
