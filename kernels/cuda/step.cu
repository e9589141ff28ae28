/* The step: one ragged batch, on its way to the device and back.
 *
 * The engine's arrays are plain host memory, each an allocation of its own, so that a sanitizer
 * sees a write past its end. cuda_step_begin packs their used parts into one pinned block and
 * starts one copy of it to the device's block:
 *
 *   step_view | attention's units, tiles | token pos lang row_seq seq_first page out_row ... redirect | out_token | out_logprob
 *   out_rank out_entropy top_id top_logprob
 *   <-------------------------- uploaded ------------------------------->
 *                                                           <------- downloaded --------------->
 *
 * out_token goes both ways: a target may be a token drawn earlier. Only the view's own address is
 * fixed; it says where the arrays are in this step. After the ops, one copy brings the results into
 * a second pinned block, and finish hands those out that were asked for and computed. Behind them in
 * that block is what is fetched, a copy each, in the same wait.
 *
 * One block each way suffices: begin waits if the device still works, so what it packs over has
 * been read, and results are handed out before the next begin. */
#include "kernels/cuda/backend.cuh"

#include <stdlib.h>
#include <string.h>

enum { PACK_ALIGN = 16 };

/* Outputs that ops of this step have computed, as far as they lie in one piece (they do). */
struct out_range {
    int64_t first, end;
};

struct step_inside {
    char *device;          /* Owner */
    char *up;              /* Owner: pinned, what is uploaded */
    char *down;            /* Owner: pinned, what was downloaded */
    size_t bytes;          /* of device and up; down has as much, and limits.n_fetch_bytes */
    size_t fetched;        /* bytes of these in this step */
    struct step_view view; /* of this step */
    size_t down_first, down_bytes; /* of this step, in device */
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
                                  int n_page, const struct step_scratch *scratch,
                                  size_t *down_first)
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
    *down_first = p->used;
    v.out_token = pack_copy(p, s->out_token, s->n_out, 1);
    return v;
}

static void pack_results(struct pack *p, const struct step *s, struct step_view *v)
{
    v->out_logprob = pack_room<float>(p, s->n_out, 1);
    v->out_rank = pack_room<int32_t>(p, s->n_out, 1);
    v->out_entropy = pack_room<float>(p, s->n_out, 1);
    v->top_id = pack_room<int32_t>(p, s->n_out, s->limits.n_top_max);
    v->top_logprob = pack_room<float>(p, s->n_out, s->limits.n_top_max);
}

/* Bytes of the fullest step. */
static size_t pack_bytes(const struct cuda *cu, const struct step_limits *limits)
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
    struct pack p = {};
    size_t down_first = 0;
    struct step_scratch scratch = {};
    scratch.n_unit = attention_unit_max(cu, limits);
    scratch.n_tile = attention_tile_max(cu, limits);
    struct step_view v = pack_step(&p, cu, &full, limits->n_page_max, &scratch, &down_first);
    pack_results(&p, &full, &v);
    return p.used;
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

static enum err_code memory_new(struct cuda *cu, struct cuda_step *s, struct err *err)
{
    struct step_inside *const in = inside_of(s);
    struct step_scratch *const scratch = &s->scratch;
    const struct step_limits *const limits = &s->step.limits;
    in->bytes = pack_bytes(cu, limits);
    scratch->attention_bytes = attention_scratch(limits);
    scratch->vocab_bytes = vocab_scratch(limits);
    void *device = NULL;
    void *up = NULL;
    void *down = NULL;
    enum err_code code = resource_device_new(cu, &device, in->bytes, "the step's arrays", err);
    in->device = static_cast<char *>(device);
    s->view = reinterpret_cast<const struct step_view *>(device);
    if (code == ERR_OK) {
        code = resource_pinned_new(cu, &up, in->bytes, "the step's upload", err);
        in->up = static_cast<char *>(up);
    }
    if (code == ERR_OK) {
        code =
            resource_pinned_new(cu, &down, in->bytes + static_cast<size_t>(limits->n_fetch_bytes),
                                "the step's download", err);
        in->down = static_cast<char *>(down);
    }
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

enum err_code cuda_step_new(struct backend *be, struct step **step,
                            const struct step_limits *limits, struct err *err)
{
    *step = NULL;
    struct cuda_step *const s = static_cast<struct cuda_step *>(calloc(1, sizeof *s));
    struct step_inside *const in = static_cast<struct step_inside *>(calloc(1, sizeof *in));
    if (s != NULL) {
        s->inside = in;
    }
    if (s == NULL || in == NULL) {
        free(s);
        free(in);
        return err_set(err, ERR_MEMORY, "cuda: no host memory left for a step");
    }
    enum err_code code = step_arrays_new(&s->step, limits, err);
    code = code == ERR_OK ? memory_new(cuda_of(be), s, err) : code;
    if (code != ERR_OK) {
        cuda_step_free(be, &s->step);
        return code;
    }
    *step = &s->step;
    return ERR_OK;
}

void cuda_step_free(struct backend *be, struct step *step)
{
    if (step == NULL) {
        return;
    }
    graphs_forget(cuda_of(be));
    struct cuda_step *const s = cuda_step_of(step);
    struct step_inside *const in = inside_of(s);
    if (in != NULL) {
        (void)cudaFree(in->device);
        (void)cudaFreeHost(in->up);
        (void)cudaFreeHost(in->down);
    }
    (void)cudaFree(s->scratch.attention);
    (void)cudaFree(s->scratch.vocab);
    step_arrays_free(&s->step);
    free(in);
    free(s);
}

/* ---- running -------------------------------------------------------------------------------- */

void cuda_step_begin(struct backend *be, struct step *step)
{
    struct cuda *const cu = cuda_of(be);
    struct cuda_step *const s = cuda_step_of(step);
    struct step_inside *const in = inside_of(s);
    step_check(step);
    if (graphs_is_open(cu)) {
        graphs_end(cu);
    }
    if (graphs_is_busy(cu)) {
        (void)graphs_wait(cu);
    }
    in->ready = {INT64_MAX, 0};
    in->fetched = 0;
    struct pack p = {in->up, in->device, 0};
    const int n_page = step_pages_used(step, step->bounds.pos);
    s->scratch.n_unit = attention_unit_count(cu, &step->limits, step->n_tok, step->is_drawn);
    s->scratch.n_tile = attention_tiles(cu, step, s->scratch.attention_bytes, NULL);
    in->view = pack_step(&p, cu, step, n_page, &s->scratch, &in->down_first);
    const size_t up_bytes = p.used;
    pack_results(&p, step, &in->view);
    CHECK(p.used <= in->bytes);
    memcpy(in->up, &in->view, sizeof in->view);
    const char *const down_end =
        step->n_top > 0 ? in->device + p.used : reinterpret_cast<const char *>(in->view.top_id);
    in->down_bytes = static_cast<size_t>(down_end - (in->device + in->down_first));
    if (cu->failure.code == ERR_OK) {
        (void)cuda_ok(
            cu, cudaMemcpyAsync(in->device, in->up, up_bytes, cudaMemcpyHostToDevice, cu->stream),
            "step upload");
    }
    graphs_begin(cu, step);
}

void step_will_output(const struct step *step, int64_t first, int64_t n)
{
    struct out_range *const ready = &inside_of(cuda_step_of(step))->ready;
    ready->first = first < ready->first ? first : ready->first;
    ready->end = first + n > ready->end ? first + n : ready->end;
}

void cuda_step_submit(struct backend *be, struct step *step)
{
    struct cuda *const cu = cuda_of(be);
    const struct step_inside *const in = inside_of(cuda_step_of(step));
    graphs_end(cu);
    if (cu->failure.code == ERR_OK && step->n_out > 0) {
        (void)cuda_ok(cu,
                      cudaMemcpyAsync(in->down, in->device + in->down_first, in->down_bytes,
                                      cudaMemcpyDeviceToHost, cu->stream),
                      "step download");
    }
}

/* After a failure it is 0: nobody shall read what was never written. */
const void *cuda_step_fetch(struct backend *be, struct step *step, struct tensor src)
{
    struct cuda *const cu = cuda_of(be);
    struct step_inside *const in = inside_of(cuda_step_of(step));
    const size_t bytes =
        static_cast<size_t>(src.rows) * static_cast<size_t>(src.cols) * dtype_bytes(src.dtype);
    CHECK(src.stride == src.cols && !graphs_is_open(cu));
    CHECK(in->fetched + bytes <= static_cast<size_t>(step->limits.n_fetch_bytes));
    char *const host = in->down + in->bytes + in->fetched;
    in->fetched += bytes;
    if (cu->failure.code != ERR_OK ||
        !cuda_ok(cu, cudaMemcpyAsync(host, src.data, bytes, cudaMemcpyDeviceToHost, cu->stream),
                 "fetch")) {
        memset(host, 0, bytes);
    }
    return host;
}

/* The address of an array of the device's block in the downloaded copy. */
template <class T> static const T *down_at(const struct step_inside *in, const T *device)
{
    const char *const at = reinterpret_cast<const char *>(device);
    return reinterpret_cast<const T *>(in->down + (at - (in->device + in->down_first)));
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
    if (!graphs_wait(cu)) {
        if (err != NULL) {
            *err = cu->failure;
        }
        return cu->failure.code;
    }
    results_copy(step, inside_of(cuda_step_of(step)));
    return ERR_OK;
}
