/* kv_store: new keys and values go to their pages. Bound by memory, and for a few rows by latency:
 * a launch and two or three dependent reads. Share of the bound reached: not measured yet. */
#include "kernels/cuda/rows.cuh"

namespace
{

struct store_args {
    void *k_pages, *v_pages; /* [n_page, n_head·KV_PAGE·d_head] */
    const float *k, *v;      /* [n_tok, n_head·d_head] */
    int64_t k_page_stride, v_page_stride, k_stride, v_stride;
    int d, d_head;
    const struct step_view *view;
};

__device__ __forceinline__ void cache_store_group(float *to, float4 group)
{
    *reinterpret_cast<float4 *>(to) = group;
}

__device__ __forceinline__ void cache_store_group(uint16_t *to, float4 group)
{
    *reinterpret_cast<uint2 *>(to) = {bf16_pair(group.x, group.y), bf16_pair(group.z, group.w)};
}

/* Row r of k and v goes to the place of its position in the pages of its sequence: piece h of
 * d_head columns to [h][pos % KV_PAGE]. Groups lie within a head (d_head is a multiple of 4 if
 * aligned), so a thread moves a group of k and one of v, or four single columns. Bytes per row:
 * 16·d, into BF16 12·d. */
template <typename T, bool aligned> __global__ void store_kernel(struct store_args a)
{
    const int64_t row = blockIdx.x;
    const int first = my_first_column();
    grid_wait();
    if (first >= a.d) {
        return;
    }
    const float *const k = a.k + row * a.k_stride;
    const float *const v = a.v + row * a.v_stride;
    float4 k_group = {0, 0, 0, 0}; /* on their way while the page is looked up */
    float4 v_group = {0, 0, 0, 0};
    if constexpr (aligned) {
        k_group = *reinterpret_cast<const float4 *>(k + first);
        v_group = *reinterpret_cast<const float4 *>(v + first);
    }
    const struct step_view *const view = a.view;
    const int pos = view->pos[row];
    const int64_t page = view->page[static_cast<int64_t>(view->row_seq[row]) * view->n_page_max +
                                    pos / KV_PAGE % view->n_page_max];
    T *const k_page = static_cast<T *>(a.k_pages) + page * a.k_page_stride;
    T *const v_page = static_cast<T *>(a.v_pages) + page * a.v_page_stride;
    const auto place = [&](int c) {
        return (static_cast<int64_t>(c / a.d_head) * KV_PAGE + pos % KV_PAGE) * a.d_head +
               c % a.d_head;
    };
    if constexpr (aligned) {
        const int64_t at = place(first);
        cache_store_group(k_page + at, k_group);
        cache_store_group(v_page + at, v_group);
    } else {
        const int end = first + GROUP < a.d ? first + GROUP : a.d;
        for (int c = first; c < end; c++) {
            const int64_t at = place(c);
            cache_store(k_page + at, k[c]);
            cache_store(v_page + at, v[c]);
        }
    }
}

template <typename T>
void store_launch(struct cuda *cu, const struct store_args &a, bool aligned, dim3 grid)
{
    if (aligned) {
        LAUNCH((store_kernel<T, true>), grid, dim3(BLOCK), 0, cuda_queue(cu), a);
    } else {
        LAUNCH((store_kernel<T, false>), grid, dim3(BLOCK), 0, cuda_queue(cu), a);
    }
}

} // namespace

void cuda_kv_store(struct cuda *cu, struct tensor k_pages, struct tensor v_pages, struct tensor k,
                   struct tensor v, const struct step_view *view, int n_head)
{
    CHECK(k.rows <= INT32_MAX && k.cols <= INT32_MAX - BLOCK * GROUP);
    if (k.rows == 0) {
        return;
    }
    const struct store_args a = {
        .k_pages = k_pages.data,
        .v_pages = v_pages.data,
        .k = static_cast<const float *>(k.data),
        .v = static_cast<const float *>(v.data),
        .k_page_stride = k_pages.stride,
        .v_page_stride = v_pages.stride,
        .k_stride = k.stride,
        .v_stride = v.stride,
        .d = static_cast<int>(k.cols),
        .d_head = static_cast<int>(k.cols) / n_head,
        .view = view,
    };
    const dim3 grid = groups_grid(k.rows, k.cols);
    const bool aligned = has_groups(k_pages) && has_groups(v_pages) && has_groups(k) &&
                         has_groups(v) && a.d_head % GROUP == 0;
    if (k_pages.dtype == DTYPE_BF16) {
        store_launch<uint16_t>(cu, a, aligned, grid);
    } else {
        store_launch<float>(cu, a, aligned, grid);
    }
    cuda_check(cu, "kv_store");
}
