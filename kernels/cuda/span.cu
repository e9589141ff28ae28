/* Attention of each row and head to its window of the cache and to persistent keys.
 *
 * A block per row and head goes over the keys in tiles of BLOCK, the window's columns first, then
 * the persistent ones, and keeps a running maximum (Milakov and Gimelshein): a thread scores a key,
 * the block weighs the tile, each thread sums its columns of the values. The tiles begin at the
 * window's first column, whatever the position, so a row's bits depend on its own text alone, and
 * memory does not grow with the window. Bytes per row and head: 8·d_head per key (4·d_head of a
 * cache in BF16), and 4·d_head per distance that mostly come from the cache of the device; flops:
 * 6·d_head per key; bound: the memory's bandwidth. Share reached: not measured yet. */
#include "kernels/cuda/cuda.cuh"

namespace
{

constexpr int BLOCK = 128; /* threads, and keys of a tile */
constexpr int WARP = 32;
constexpr int D_HEAD_MAX = 256;
constexpr int COLS = D_HEAD_MAX / BLOCK; /* of the values, per thread */

struct span_args {
    float *y;
    const float *q;
    const void *k_pages, *v_pages;              /* of T */
    const float *position, *mask, *key, *value; /* mask may be NULL */
    int64_t y_stride, q_stride, k_page_stride, v_page_stride;
    int64_t position_stride, mask_stride, key_stride, value_stride;
    int n_head, d_head, window, n_persistent;
    float scale;
    const struct step_view *view;
};

/* One key of a row and head, in a page (of T) or persistent (F32). */
struct span_key {
    const void *key, *value; /* NULL: before the text, or beyond the last key */
    int column;              /* of the window; -1: persistent */
    bool is_key;
};

template <typename T>
__device__ __forceinline__ struct span_key key_of(const struct span_args &a, int64_t row, int head,
                                                  int i)
{
    if (i >= a.window) {
        const int64_t j = i - a.window;
        const int64_t first = static_cast<int64_t>(head) * a.d_head;
        const int64_t at = static_cast<int64_t>(head) * a.n_persistent + j;
        const bool is_key = j < a.n_persistent;
        return {is_key ? a.key + first * a.key_stride + j : NULL,
                is_key ? a.value + at * a.value_stride : NULL, -1, is_key};
    }
    const int u = a.view->pos[row] - a.window + i;
    if (u < 0) {
        return {NULL, NULL, i, true};
    }
    const int64_t n_page = a.view->n_page_max;
    const int64_t page = a.view->page[a.view->row_seq[row] * n_page + u / KV_PAGE % n_page];
    const int64_t at = (static_cast<int64_t>(head) * KV_PAGE + u % KV_PAGE) * a.d_head;
    return {static_cast<const T *>(a.k_pages) + page * a.k_page_stride + at,
            static_cast<const T *>(a.v_pages) + page * a.v_page_stride + at, i, true};
}

/* Element i of what a key has in the cache, or of a parameter. */
template <typename T>
__device__ __forceinline__ float element_of(const void *from, bool is_cached, int64_t i)
{
    return is_cached ? widen(static_cast<const T *>(from)[i]) : static_cast<const float *>(from)[i];
}

template <typename T>
__device__ __forceinline__ float score_of(const struct span_args &a, const struct span_key &k,
                                          const float *q)
{
    const bool is_cached = k.column >= 0;
    const int64_t step = is_cached ? 1 : a.key_stride; /* from column to column of the key */
    float sum = 0;
    for (int c = 0; c < a.d_head; c++) {
        float key = is_cached ? a.position[c * a.position_stride + k.column] : 0;
        key = k.key != NULL ? key + element_of<T>(k.key, is_cached, c * step) : key;
        sum = fmaf(q[c], key, sum);
    }
    return k.is_key ? sum * a.scale : -INFINITY;
}

/* The block's largest value, or its sum, in every thread: butterflies, then the warps in order. */
template <bool is_max> __device__ __forceinline__ float block_fold(float value)
{
    __shared__ float part[BLOCK / WARP];
    for (int step = WARP / 2; step > 0; step /= 2) {
        const float other = __shfl_xor_sync(0xffffffffu, value, step);
        value = is_max ? fmaxf(value, other) : value + other;
    }
    __syncthreads(); /* the last fold has been read */
    if (threadIdx.x % WARP == 0) {
        part[threadIdx.x / WARP] = value;
    }
    __syncthreads();
    float all = part[0];
    for (int w = 1; w < BLOCK / WARP; w++) {
        all = is_max ? fmaxf(all, part[w]) : all + part[w];
    }
    return all;
}

/* Grid: rows × heads. */
template <typename T> __global__ void __launch_bounds__(BLOCK) span_kernel(struct span_args a)
{
    __shared__ float q[D_HEAD_MAX];
    __shared__ float weight[BLOCK];
    __shared__ const void *value[BLOCK]; /* NULL: adds nothing */
    const int head = static_cast<int>(blockIdx.y);
    const int64_t row = blockIdx.x;
    const int thread = static_cast<int>(threadIdx.x);
    const int64_t first = static_cast<int64_t>(head) * a.d_head;
    grid_wait();
    for (int c = thread; c < a.d_head; c += BLOCK) {
        q[c] = a.q[row * a.q_stride + first + c];
    }
    __syncthreads();
    float max = -INFINITY;
    float all = 0;
    float kept = 0;
    float o[COLS] = {};
    const int n_key = a.window + a.n_persistent;
    for (int tile = 0; tile < n_key; tile += BLOCK) {
        const struct span_key k = key_of<T>(a, row, head, tile + thread);
        const float score = score_of<T>(a, k, q);
        const float before = max;
        max = fmaxf(max, block_fold<true>(score));
        const float factor = expf(before - max); /* 0 in the first tile */
        const float e = expf(score - max);
        const bool is_masked = a.mask != NULL && k.column >= 0;
        const float w = is_masked ? e * a.mask[head * a.mask_stride + k.column] : e;
        all = fmaf(all, factor, block_fold<false>(e));
        kept = fmaf(kept, factor, block_fold<false>(w));
        weight[thread] = w;
        value[thread] = w > 0 ? k.value : NULL;
        __syncthreads();
        const int n = min(n_key - tile, BLOCK);
        for (int i = 0; i < COLS; i++) {
            const int c = thread + i * BLOCK;
            o[i] *= factor;
            for (int j = 0; c < a.d_head && j < n; j++) {
                if (value[j] != NULL) {
                    o[i] = fmaf(weight[j], element_of<T>(value[j], tile + j < a.window, c), o[i]);
                }
            }
        }
    }
    const float total = a.mask != NULL ? fmaf(SPAN_EPSILON, all, kept) : kept;
    for (int i = 0; i < COLS; i++) {
        const int c = thread + i * BLOCK;
        if (c < a.d_head) {
            a.y[row * a.y_stride + first + c] = o[i] / total;
        }
    }
}

const float *floats(struct tensor t)
{
    return static_cast<const float *>(t.data);
}

} // namespace

void cuda_span_attention(struct cuda *cu, struct tensor y, struct tensor q, struct tensor k_pages,
                         struct tensor v_pages, const struct step_view *view,
                         const struct span_shape *shape)
{
    const int64_t d_head = y.cols / shape->n_head;
    if (d_head > D_HEAD_MAX) {
        cuda_fail(cu, ERR_UNSUPPORTED, "span_attention",
                  "heads wider than 256 columns are not supported on the GPU; use the CPU");
        return;
    }
    const struct span_args a = {
        .y = static_cast<float *>(y.data),
        .q = floats(q),
        .k_pages = k_pages.data,
        .v_pages = v_pages.data,
        .position = floats(shape->position),
        .mask = floats(shape->mask),
        .key = floats(shape->key),
        .value = floats(shape->value),
        .y_stride = y.stride,
        .q_stride = q.stride,
        .k_page_stride = k_pages.stride,
        .v_page_stride = v_pages.stride,
        .position_stride = shape->position.stride,
        .mask_stride = shape->mask.stride,
        .key_stride = shape->key.stride,
        .value_stride = shape->value.stride,
        .n_head = shape->n_head,
        .d_head = static_cast<int>(d_head),
        .window = shape->window,
        .n_persistent = shape->n_persistent,
        .scale = shape->scale,
        .view = view,
    };
    const dim3 grid(static_cast<unsigned>(y.rows), static_cast<unsigned>(shape->n_head));
    if (k_pages.dtype == DTYPE_BF16) {
        LAUNCH(span_kernel<uint16_t>, grid, dim3(BLOCK), 0, cuda_queue(cu), a);
    } else {
        LAUNCH(span_kernel<float>, grid, dim3(BLOCK), 0, cuda_queue(cu), a);
    }
    cuda_check(cu, "span_attention");
}
