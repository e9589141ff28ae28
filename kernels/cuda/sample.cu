/* Drawing the next token of a row: one thread, candidates from a heap. */
#include "kernels/cuda/cuda.cuh"

namespace
{

struct candidates {
    int32_t *ids; /* [n] ids[0 .. n_heap-1]: heap; after it those taken, the last taken first */
    const float *z;
    int n, n_heap;
};

__device__ bool is_before(const struct candidates *c, int32_t a, int32_t b)
{
    return c->z[a] > c->z[b] || (c->z[a] == c->z[b] && a < b);
}

__device__ void sift_down(struct candidates *c, int at)
{
    const int32_t id = c->ids[at];
    for (int child = 2 * at + 1; child < c->n_heap; child = 2 * at + 1) {
        if (child + 1 < c->n_heap && is_before(c, c->ids[child + 1], c->ids[child])) {
            child++;
        }
        if (is_before(c, id, c->ids[child])) {
            break;
        }
        c->ids[at] = c->ids[child];
        at = child;
    }
    c->ids[at] = id;
}

/* The candidate of rank i, i <= the number taken before. */
__device__ int32_t candidate_at(struct candidates *c, int i)
{
    if (i == c->n - c->n_heap) {
        const int32_t id = c->ids[0];
        c->n_heap--;
        c->ids[0] = c->ids[c->n_heap];
        sift_down(c, 0);
        c->ids[c->n_heap] = id;
    }
    return c->ids[c->n - 1 - i];
}

__device__ double share_of(float z, float max, float temperature)
{
    return exp(((double)z - (double)max) / (double)temperature);
}

__device__ int32_t draw_by_id(const float *z, int n, float max, const struct sample_params *p)
{
    double total = 0;
    for (int id = 0; id < n; id++) {
        total += share_of(z[id], max, p->temperature);
    }
    double sum = 0;
    int32_t last = 0;
    for (int id = 0; id < n && sum <= p->u * total; id++) {
        const double s = share_of(z[id], max, p->temperature);
        sum += s;
        last = s > 0 ? id : last;
    }
    return last;
}

__device__ int32_t draw_by_rank(const float *z, int n, float max, const struct sample_params *p,
                                int32_t *ids)
{
    struct candidates c = {ids, z, n, n};
    for (int i = 0; i < n; i++) {
        ids[i] = i;
    }
    for (int at = n / 2 - 1; at >= 0; at--) {
        sift_down(&c, at);
    }
    const int n_max = p->top_k > 0 && p->top_k < n ? p->top_k : n;
    double total = 0;
    for (int i = 0; i < n_max; i++) {
        total += share_of(z[n_max < n ? candidate_at(&c, i) : i], max, p->temperature);
    }
    double kept = 0;
    int n_kept = 0;
    while (n_kept < n_max && (p->top_p >= 1 || kept < (double)p->top_p * total)) {
        const double s = share_of(z[candidate_at(&c, n_kept)], max, p->temperature);
        if (s < (double)p->min_p || s == 0) {
            break;
        }
        kept += s;
        n_kept++;
    }
    double sum = 0;
    for (int i = 0; i < n_kept; i++) {
        sum += share_of(z[candidate_at(&c, i)], max, p->temperature);
        if (sum > p->u * kept) {
            return candidate_at(&c, i);
        }
    }
    return candidate_at(&c, n_kept - 1);
}

__device__ void adjust_row(float *z, const float *logits, int n, const struct step_view *view,
                           const struct sample_params *p)
{
    for (int id = 0; id < n; id++) {
        z[id] = p->n_allow == 0 ? logits[id] : -INFINITY;
    }
    for (int i = 0; i < p->n_allow; i++) {
        const int32_t id = view->allow[p->allow_first + i];
        z[id] = logits[id];
    }
    for (int i = 0; i < p->n_adjust; i++) {
        const struct sample_adjust a = view->adjust[p->adjust_first + i];
        float v = z[a.token];
        if (a.n_prompt > 0 || a.n_generated > 0) {
            v = v > 0 ? v / p->repetition : v * p->repetition;
        }
        v -= p->presence * (a.n_generated > 0 ? 1.0f : 0.0f) + p->frequency * (float)a.n_generated;
        z[a.token] = v + a.bias;
    }
}

__device__ int32_t sample_row(const float *logits, int n, const struct step_view *view,
                              const struct sample_params *p, float *z, int32_t *ids)
{
    for (int id = 0; id < n; id++) {
        if (!(logits[id] < INFINITY)) {
            return id;
        }
    }
    adjust_row(z, logits, n, view, p);
    int32_t best = 0;
    for (int id = 1; id < n; id++) {
        best = z[id] > z[best] ? id : best;
    }
    if (z[best] == -INFINITY && p->n_allow > 0) {
        best = view->allow[p->allow_first];
        for (int i = 1; i < p->n_allow; i++) {
            const int32_t id = view->allow[p->allow_first + i];
            best = id < best ? id : best;
        }
    }
    if (p->temperature == 0 || !(fabsf(z[best]) < INFINITY)) {
        return best;
    }
    return p->top_k == 0 && p->top_p >= 1 && p->min_p == 0 ? draw_by_id(z, n, z[best], p)
                                                           : draw_by_rank(z, n, z[best], p, ids);
}

__global__ void sample_kernel(const float *logits, int64_t rows, int64_t stride, int n_vocab,
                              const struct step_view *view, float *z, int32_t *ids, int first)
{
    for (int r = 0; r < rows; r++) {
        if ((view->out_want[first + r] & OUT_SAMPLE) != 0) {
            view->out_token[first + r] =
                sample_row(logits + r * stride, n_vocab, view, &view->sample[first + r], z, ids);
        }
    }
}

} // namespace

void cuda_sample(struct cuda *cu, struct tensor logits, const struct step_view *view,
                 const struct step_scratch *scratch, int first)
{
    float *const z = static_cast<float *>(scratch->vocab);
    LAUNCH(sample_kernel, dim3(1), dim3(1), 0, cu->stream, static_cast<const float *>(logits.data),
           logits.rows, logits.stride, (int)logits.cols, view, z,
           reinterpret_cast<int32_t *>(z + logits.cols), first);
    cuda_check(cu, "sample");
}

size_t vocab_scratch(const struct step_limits *limits)
{
    return 8 * (size_t)limits->n_vocab;
}
