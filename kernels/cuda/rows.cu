/* What works row by row: embedding, layer norms, gathering rows, storing keys and values.
 *
 * All are bound by memory, and for a few rows by latency alone: a launch and two or three dependent
 * reads. Four columns form a group. Where all addresses and strides allow it a group is one 16-byte
 * access, else single words; the arithmetic is the same either way, so alignment does not change a
 * row's bits.
 * Share of the bound reached: not measured yet. */
#include "kernels/cuda/cuda.cuh"

namespace
{

enum {
    WARP = 32,
    GROUP = 4,
    BLOCK = 128,
    NORM_COLS = WARP * GROUP /* columns of a warp's sweep */
};

/* ---- groups of four columns ------------------------------------------------------------------ */

/* Whether groups of t start at multiples of their size in every row. */
bool has_groups(struct tensor t)
{
    return reinterpret_cast<uintptr_t>(t.data) % (GROUP * dtype_bytes(t.dtype)) == 0 &&
           (t.stride % GROUP == 0 || t.rows == 1);
}

/* Columns 0 .. n-1 of a group, n > 0; those from n on are 0. */
template <bool aligned> __device__ __forceinline__ float4 group_load(const float *from, int n)
{
    if (aligned && n >= GROUP) {
        return *reinterpret_cast<const float4 *>(from);
    }
    float4 group = {0, 0, 0, 0};
    group.x = from[0];
    group.y = n > 1 ? from[1] : 0;
    group.z = n > 2 ? from[2] : 0;
    group.w = n > 3 ? from[3] : 0;
    return group;
}

template <bool aligned> __device__ __forceinline__ void group_store(float *to, float4 group, int n)
{
    if (aligned && n >= GROUP) {
        *reinterpret_cast<float4 *>(to) = group;
        return;
    }
    to[0] = group.x;
    if (n > 1) {
        to[1] = group.y;
    }
    if (n > 2) {
        to[2] = group.z;
    }
    if (n > 3) {
        to[3] = group.w;
    }
}

__device__ __forceinline__ float4 group_add(float4 a, float4 b)
{
    return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w};
}

/* The grid of kernels that give each row blocks of BLOCK threads, a group each. */
dim3 groups_grid(int64_t rows, int64_t cols)
{
    const int64_t n_block = (cols + BLOCK * GROUP - 1) / (BLOCK * GROUP);
    return dim3(static_cast<unsigned>(rows), static_cast<unsigned>(n_block));
}

__device__ __forceinline__ int my_first_column()
{
    return static_cast<int>((blockIdx.y * BLOCK + threadIdx.x) * GROUP);
}

/* ---- embed ----------------------------------------------------------------------------------- */

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

/* ---- layer norm ------------------------------------------------------------------------------ */

struct norm_args {
    float *y;                  /* may be x or r */
    const float *x;            /* y, x, r [n_row, d] */
    const float *r;            /* NULL: nothing is added to x */
    const float *gamma, *beta; /* [d] */
    int64_t y_stride, x_stride, r_stride;
    int n_row, d;
    float eps;
    bool starts_early; /* the kernel before may still run, gamma and beta need not wait for it */
};

template <bool aligned>
__device__ __forceinline__ float4 norm_input(const struct norm_args &a, int64_t row, int c)
{
    const float4 x = group_load<aligned>(a.x + row * a.x_stride + c, a.d - c);
    return a.r == NULL ? x : group_add(x, group_load<aligned>(a.r + row * a.r_stride + c, a.d - c));
}

/* in's squared distances from mean, added to sum; columns from n on do not count. */
__device__ __forceinline__ float4 add_squares(float4 sum, float4 in, float mean, int n)
{
    const float4 e = {in.x - mean, n > 1 ? in.y - mean : 0, n > 2 ? in.z - mean : 0,
                      n > 3 ? in.w - mean : 0};
    return {fmaf(e.x, e.x, sum.x), fmaf(e.y, e.y, sum.y), fmaf(e.z, e.z, sum.z),
            fmaf(e.w, e.w, sum.w)};
}

__device__ __forceinline__ float4 norm_output(float4 in, float mean, float inverse, float4 gamma,
                                              float4 beta)
{
    return {fmaf((in.x - mean) * inverse, gamma.x, beta.x),
            fmaf((in.y - mean) * inverse, gamma.y, beta.y),
            fmaf((in.z - mean) * inverse, gamma.z, beta.z),
            fmaf((in.w - mean) * inverse, gamma.w, beta.w)};
}

__device__ __forceinline__ float sum_of_group(float4 g)
{
    return (g.x + g.y) + (g.z + g.w);
}

/* y = (v - mean) / sqrt(variance + eps) · gamma + beta with v = x (+ r), a warp per row.
 *
 * Lane l takes the groups l, l + 32, .. of a row; the sums of its four columns are chains over the
 * groups, folded by ((0+1) + (2+3)) and then over the lanes by a butterfly: an order that d alone
 * decides. Rows of up to n_held · 128 columns stay in registers, with gamma and beta loaded before
 * they are needed, so a row costs one latency of memory; n_held 0 reads the row again for each of
 * the passes (each lane its own columns, hence y may be x or r), for rows of any width.
 * Bytes per row: 8·d, 12·d with r. A step's weights may drive gamma and beta out of the
 * second-level cache, so where kernels overlap they are asked for first. */
template <bool aligned, int n_held> __global__ void norm_kernel(struct norm_args a)
{
    const int lane = static_cast<int>(threadIdx.x) % WARP;
    const int row = static_cast<int>((blockIdx.x * blockDim.x + threadIdx.x) / WARP);
    if (a.starts_early) {
        for (int c = lane * GROUP; c < a.d; c += NORM_COLS) {
            prefetch_l2(a.gamma + c);
            prefetch_l2(a.beta + c);
        }
    }
    grid_wait();
    if (row >= a.n_row) {
        return;
    }
    float4 in[n_held > 0 ? n_held : 1];
    float4 gamma[n_held > 0 ? n_held : 1];
    float4 beta[n_held > 0 ? n_held : 1];
    const int first = lane * GROUP;
#pragma unroll
    for (int i = 0; i < n_held; i++) {
        const int c = first + i * NORM_COLS;
        if (c < a.d) {
            in[i] = norm_input<aligned>(a, row, c);
            gamma[i] = group_load<aligned>(a.gamma + c, a.d - c);
            beta[i] = group_load<aligned>(a.beta + c, a.d - c);
        }
    }
    const auto sweep = [&](auto visit) {
        if constexpr (n_held > 0) {
#pragma unroll
            for (int i = 0; i < n_held; i++) {
                const int c = first + i * NORM_COLS;
                if (c < a.d) {
                    visit(c, in[i], gamma[i], beta[i]);
                }
            }
        } else {
            for (int c = first; c < a.d; c += NORM_COLS) {
                visit(c, norm_input<aligned>(a, row, c), float4{}, float4{});
            }
        }
    };
    float4 sum = {0, 0, 0, 0};
    sweep([&](int, float4 v, float4, float4) { sum = group_add(sum, v); });
    const float mean = warp_sum(sum_of_group(sum)) / static_cast<float>(a.d);

    float4 squares = {0, 0, 0, 0};
    sweep(
        [&](int c, float4 v, float4, float4) { squares = add_squares(squares, v, mean, a.d - c); });
    const float variance = warp_sum(sum_of_group(squares)) / static_cast<float>(a.d);
    const float inverse = 1 / sqrtf(variance + a.eps);

    sweep([&](int c, float4 v, float4 g, float4 b) {
        if constexpr (n_held == 0) {
            g = group_load<aligned>(a.gamma + c, a.d - c);
            b = group_load<aligned>(a.beta + c, a.d - c);
        }
        group_store<aligned>(a.y + row * a.y_stride + c, norm_output(v, mean, inverse, g, b),
                             a.d - c);
    });
}

template <bool aligned> void norm_launch(struct cuda *cu, const struct norm_args &a)
{
    const int rows_per_block = BLOCK / WARP;
    const dim3 grid(static_cast<unsigned>((a.n_row + rows_per_block - 1) / rows_per_block));
    if (a.d <= 8 * NORM_COLS) {
        LAUNCH((norm_kernel<aligned, 8>), grid, dim3(BLOCK), 0, cuda_queue(cu), a);
    } else if (a.d <= 16 * NORM_COLS) {
        LAUNCH((norm_kernel<aligned, 16>), grid, dim3(BLOCK), 0, cuda_queue(cu), a);
    } else {
        LAUNCH((norm_kernel<aligned, 0>), grid, dim3(BLOCK), 0, cuda_queue(cu), a);
    }
}

void norm_rows(struct cuda *cu, struct tensor y, struct tensor x, struct tensor r,
               struct tensor gamma, struct tensor beta, float eps, const char *op)
{
    CHECK(y.rows <= INT32_MAX - BLOCK && y.cols <= INT32_MAX - NORM_COLS);
    if (y.rows == 0) {
        return;
    }
    const struct norm_args a = {
        .y = static_cast<float *>(y.data),
        .x = static_cast<const float *>(x.data),
        .r = static_cast<const float *>(r.data),
        .gamma = static_cast<const float *>(gamma.data),
        .beta = static_cast<const float *>(beta.data),
        .y_stride = y.stride,
        .x_stride = x.stride,
        .r_stride = r.stride,
        .n_row = static_cast<int>(y.rows),
        .d = static_cast<int>(y.cols),
        .eps = eps,
        .starts_early = cu->overlaps,
    };
    if (has_groups(y) && has_groups(x) && (r.data == NULL || has_groups(r)) && has_groups(gamma) &&
        has_groups(beta)) {
        norm_launch<true>(cu, a);
    } else {
        norm_launch<false>(cu, a);
    }
    cuda_check(cu, op);
}

/* ---- gather ---------------------------------------------------------------------------------- */

struct gather_args {
    float *y;
    const float *x;
    int64_t y_stride, x_stride;
    int d, first;
    const struct step_view *view;
};

/* y row i = x row out_row[first + i]. Grid as embed's. Bytes per row: 8·d. */
template <bool aligned> __global__ void gather_kernel(struct gather_args a)
{
    const int64_t row = blockIdx.x;
    const int c = my_first_column();
    const int n = a.d - c;
    grid_wait();
    if (n > 0) {
        const int64_t from = a.view->out_row[a.first + row];
        group_store<aligned>(a.y + row * a.y_stride + c,
                             group_load<aligned>(a.x + from * a.x_stride + c, n), n);
    }
}

/* ---- kv_store -------------------------------------------------------------------------------- */

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
    const struct step_view *const view = a.view;
    const int pos = view->pos[row];
    const int64_t page = view->page[static_cast<int64_t>(view->row_seq[row]) * view->n_page_max +
                                    pos / KV_PAGE % view->n_page_max];
    T *const k_page = static_cast<T *>(a.k_pages) + page * a.k_page_stride;
    T *const v_page = static_cast<T *>(a.v_pages) + page * a.v_page_stride;
    const float *const k = a.k + row * a.k_stride;
    const float *const v = a.v + row * a.v_stride;
    const auto place = [&](int c) {
        return (static_cast<int64_t>(c / a.d_head) * KV_PAGE + pos % KV_PAGE) * a.d_head +
               c % a.d_head;
    };
    if constexpr (aligned) {
        const int64_t at = place(first);
        cache_store_group(k_page + at, *reinterpret_cast<const float4 *>(k + first));
        cache_store_group(v_page + at, *reinterpret_cast<const float4 *>(v + first));
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

void cuda_norm(struct cuda *cu, struct tensor y, struct tensor x, struct tensor gamma,
               struct tensor beta, float eps)
{
    const struct tensor none = {};
    norm_rows(cu, y, x, none, gamma, beta, eps, "norm");
}

void cuda_add_norm(struct cuda *cu, struct tensor y, struct tensor x, struct tensor r,
                   struct tensor gamma, struct tensor beta, float eps)
{
    norm_rows(cu, y, x, r, gamma, beta, eps, "add_norm");
}

void cuda_gather(struct cuda *cu, struct tensor y, struct tensor x, const struct step_view *view,
                 int first)
{
    CHECK(y.rows <= INT32_MAX && y.cols <= INT32_MAX - BLOCK * GROUP);
    if (y.rows == 0) {
        return;
    }
    const struct gather_args a = {
        .y = static_cast<float *>(y.data),
        .x = static_cast<const float *>(x.data),
        .y_stride = y.stride,
        .x_stride = x.stride,
        .d = static_cast<int>(y.cols),
        .first = first,
        .view = view,
    };
    const dim3 grid = groups_grid(y.rows, y.cols);
    if (has_groups(y) && has_groups(x) && x.stride % GROUP == 0) {
        LAUNCH(gather_kernel<true>, grid, dim3(BLOCK), 0, cuda_queue(cu), a);
    } else {
        LAUNCH(gather_kernel<false>, grid, dim3(BLOCK), 0, cuda_queue(cu), a);
    }
    cuda_check(cu, "gather");
}

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
