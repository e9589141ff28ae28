/* Log-probabilities, rank, best tokens and entropy of rows of logits: one thread per row. */
#include "kernels/cuda/cuda.cuh"

namespace
{

__device__ void row_logprobs(const float *z, int n, const struct step_view *view, int i)
{
    const int want = view->out_want[i];
    float max = -INFINITY;
    bool is_good = true;
    for (int id = 0; id < n; id++) {
        is_good = is_good && z[id] < INFINITY;
        max = z[id] > max ? z[id] : max;
    }
    is_good = is_good && max > -INFINITY;
    double total = 0;
    double moment = 0;
    for (int id = 0; id < n && is_good; id++) {
        const double x = (double)z[id] - (double)max;
        const double share = exp(x);
        total += share;
        moment += share > 0 ? share * x : 0;
    }
    const double log_total = is_good ? log(total) : (double)NAN;
    if ((want & OUT_LOGPROB) != 0) {
        const int id = view->target[i] == TARGET_SAMPLED ? view->out_token[i] : view->target[i];
        int rank = 1;
        for (int j = 0; j < n; j++) {
            rank += z[j] > z[id] || (z[j] == z[id] && j < id);
        }
        view->out_logprob[i] = (float)((double)z[id] - (double)max - log_total);
        view->out_rank[i] = is_good ? rank : 0;
    }
    if ((want & OUT_ENTROPY) != 0) {
        view->out_entropy[i] = (float)(log_total - moment / total);
    }
    if ((want & OUT_TOP) == 0) {
        return;
    }
    int32_t *const top_id = view->top_id + (int64_t)i * view->n_top_max;
    float *const top_logprob = view->top_logprob + (int64_t)i * view->n_top_max;
    for (int j = 0; j < view->n_top; j++) {
        int best = -1;
        for (int id = 0; id < n && is_good; id++) {
            const int last = j > 0 ? top_id[j - 1] : -1;
            const bool is_after = last < 0 || z[id] < z[last] || (z[id] == z[last] && id > last);
            best = is_after && j < n && (best < 0 || z[id] > z[best]) ? id : best;
        }
        top_id[j] = best;
        top_logprob[j] = best >= 0 ? (float)((double)z[best] - (double)max - log_total)
                         : is_good ? -INFINITY
                                   : NAN;
    }
}

__global__ void logprobs_kernel(const float *logits, int64_t stride, int n_vocab,
                                const struct step_view *view, int first)
{
    const int r = (int)blockIdx.x;
    if ((view->out_want[first + r] & (OUT_LOGPROB | OUT_TOP | OUT_ENTROPY)) != 0) {
        row_logprobs(logits + r * stride, n_vocab, view, first + r);
    }
}

} // namespace

void cuda_logprobs(struct cuda *cu, struct tensor logits, const struct step_view *view,
                   const struct step_scratch *scratch, int first)
{
    (void)scratch;
    LAUNCH(logprobs_kernel, dim3((unsigned)logits.rows), dim3(1), 0, cu->stream,
           static_cast<const float *>(logits.data), logits.stride, (int)logits.cols, view, first);
    cuda_check(cu, "logprobs");
}
