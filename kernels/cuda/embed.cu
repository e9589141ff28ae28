/* Embedding: rows of up to three tables are added. Bound by memory, and for a few rows by latency:
 * a launch and two or three dependent reads. Share of the bound reached: not measured yet. */
#include "kernels/cuda/embed.cuh"

namespace
{

struct embed_args {
    float *y;
    int64_t y_stride;
    struct embed_from from;
};

/* y = tok[token] (+ pos[position]) (+ lang[language]). Grid: rows × parts of a row; a group of
 * columns per thread. Bytes per row: d · (4 + the tables' 2 or 4 each). */
template <bool aligned> __global__ void embed_kernel(struct embed_args a)
{
    const int64_t row = blockIdx.x;
    const int c = my_first_column();
    const int n = a.from.d - c;
    grid_wait();
    if (n <= 0) {
        return;
    }
    const float4 sum = embed_group<aligned>(a.from, embed_row_of(a.from, row), c, n);
    group_store<aligned>(a.y + row * a.y_stride + c, sum, n);
}

} // namespace

void cuda_embed(struct cuda *cu, struct tensor y, const struct step_view *view,
                const struct weight *tok, const struct weight *pos, const struct weight *lang)
{
    CHECK(y.rows <= INT32_MAX && y.cols <= INT32_MAX - BLOCK * GROUP);
    if (y.rows == 0) {
        return;
    }
    const struct embed_args a = {
        .y = static_cast<float *>(y.data),
        .y_stride = y.stride,
        .from = embed_from_of(y, view, tok, pos, lang),
    };
    /* tables start at 256-byte boundaries, so their rows have groups where cols allow */
    const dim3 grid = groups_grid(y.rows, y.cols);
    if (has_groups(y) && y.cols % GROUP == 0) {
        LAUNCH(embed_kernel<true>, grid, dim3(BLOCK), 0, cuda_queue(cu), a);
    } else {
        LAUNCH(embed_kernel<false>, grid, dim3(BLOCK), 0, cuda_queue(cu), a);
    }
    cuda_check(cu, "embed");
}
