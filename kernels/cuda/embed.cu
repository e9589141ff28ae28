/* Embedding: rows of up to three tables are added. Bound by memory, and for a few rows by latency: a
 * launch and two or three dependent reads. Share of the bound reached: not measured yet. */
#include "kernels/cuda/rows.cuh"

namespace
{

struct embed_table {
    const void *data; /* [rows, d]; NULL: no such table */
    bool is_bf16;
};

struct embed_args {
    float *y;
    int64_t y_stride;
    int d;
    const struct step_view *view;
    struct embed_table tok, pos, lang;
};

template <bool aligned>
__device__ __forceinline__ float4 table_load(struct embed_table t, int64_t at, int n)
{
    if (!t.is_bf16) {
        return group_load<aligned>(static_cast<const float *>(t.data) + at, n);
    }
    const uint16_t *const from = static_cast<const uint16_t *>(t.data) + at;
    if (aligned && n >= GROUP) {
        return bf16_widen_four(*reinterpret_cast<const uint2 *>(from));
    }
    float4 group = {0, 0, 0, 0};
    group.x = bf16_widen(from[0]);
    group.y = n > 1 ? bf16_widen(from[1]) : 0;
    group.z = n > 2 ? bf16_widen(from[2]) : 0;
    group.w = n > 3 ? bf16_widen(from[3]) : 0;
    return group;
}

/* y = tok[token] (+ pos[position]) (+ lang[language]). Grid: rows × parts of a row; a group of
 * columns per thread. Bytes per row: d · (4 + the tables' 2 or 4 each). */
template <bool aligned> __global__ void embed_kernel(struct embed_args a)
{
    const int64_t row = blockIdx.x;
    const int c = my_first_column();
    const int n = a.d - c;
    grid_wait();
    if (n <= 0) {
        return;
    }
    const int64_t token = a.view->token[row];
    const int64_t pos = a.view->pos[row];
    float4 sum = table_load<aligned>(a.tok, token * a.d + c, n);
    if (a.pos.data != NULL) {
        sum = group_add(sum, table_load<aligned>(a.pos, pos * a.d + c, n));
    }
    if (a.lang.data != NULL) {
        const int64_t lang = a.view->lang[row];
        sum = group_add(sum, table_load<aligned>(a.lang, lang * a.d + c, n));
    }
    group_store<aligned>(a.y + row * a.y_stride + c, sum, n);
}

struct embed_table embed_table_of(const struct weight *w)
{
    return {w == NULL ? NULL : cuda_weight_of(w)->data, w != NULL && w->dtype == DTYPE_BF16};
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
        .d = static_cast<int>(y.cols),
        .view = view,
        .tok = embed_table_of(tok),
        .pos = embed_table_of(pos),
        .lang = embed_table_of(lang),
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
