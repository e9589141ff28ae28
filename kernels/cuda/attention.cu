/* Causal attention over the pages of the cache. A block per row and head. */
#include "kernels/cuda/cuda.cuh"

namespace
{

struct attention_args {
    float *y;
    const float *q, *k_pages, *v_pages;
    int64_t y_stride, q_stride, k_page_stride, v_page_stride;
    int d_head;
    float scale;
    const struct step_view *view;
};

__global__ void attention_kernel(struct attention_args a)
{
    const int64_t row = blockIdx.x;
    const int head = static_cast<int>(blockIdx.y);
    const struct step_view *const view = a.view;
    const int pos = view->pos[row];
    const int32_t *const page =
        view->page + static_cast<int64_t>(view->row_seq[row]) * view->n_page_max;
    const float *const q = a.q + row * a.q_stride + head * a.d_head;
    const int64_t piece = static_cast<int64_t>(head) * KV_PAGE * a.d_head;
    const auto score = [&](int u) {
        const float *const k = a.k_pages + page[u / KV_PAGE] * a.k_page_stride + piece +
                               static_cast<int64_t>(u % KV_PAGE) * a.d_head;
        float dot = 0;
        for (int c = 0; c < a.d_head; c++) {
            dot = fmaf(q[c], k[c], dot);
        }
        return dot * a.scale;
    };
    for (int c = static_cast<int>(threadIdx.x); c < a.d_head; c += static_cast<int>(blockDim.x)) {
        float max = -INFINITY;
        for (int u = 0; u <= pos; u++) {
            max = fmaxf(max, score(u));
        }
        float total = 0;
        float sum = 0;
        for (int u = 0; u <= pos; u++) {
            const float e = expf(score(u) - max);
            const float *const v = a.v_pages + page[u / KV_PAGE] * a.v_page_stride + piece +
                                   static_cast<int64_t>(u % KV_PAGE) * a.d_head;
            total += e;
            sum = fmaf(e, v[c], sum);
        }
        a.y[row * a.y_stride + head * a.d_head + c] = sum / total;
    }
}

} // namespace

void cuda_attention(struct cuda *cu, struct tensor y, struct tensor q, struct tensor k_pages,
                    struct tensor v_pages, const struct step_view *view,
                    const struct step_scratch *scratch, int n_page_max, int n_head, float scale)
{
    (void)scratch;
    (void)n_page_max;
    if (y.rows == 0) {
        return;
    }
    const struct attention_args a = {
        .y = static_cast<float *>(y.data),
        .q = static_cast<const float *>(q.data),
        .k_pages = static_cast<const float *>(k_pages.data),
        .v_pages = static_cast<const float *>(v_pages.data),
        .y_stride = y.stride,
        .q_stride = q.stride,
        .k_page_stride = k_pages.stride,
        .v_page_stride = v_pages.stride,
        .d_head = static_cast<int>(y.cols) / n_head,
        .scale = scale,
        .view = view,
    };
    LAUNCH(attention_kernel, dim3(static_cast<unsigned>(y.rows), static_cast<unsigned>(n_head)),
           dim3(64), 0, cu->stream, a);
    cuda_check(cu, "attention");
}

size_t attention_scratch(const struct step_limits *limits)
{
    (void)limits;
    return 0;
}
