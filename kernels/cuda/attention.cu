/* Causal attention over the pages of the cache: the op, and the kernel for few rows.
 *
 * Decode is bound by the bytes of the cache: 8·d_head per position, row and head, half of that in
 * BF16, at 4 flops per column. With few rows, rows × heads does not fill the device, so the splits
 * of a row (attention.cuh) are spread over several blocks, which leave (max, sum, o) of each split
 * in scratch; the last block of a row and head to arrive merges them in ascending order. The grid
 * depends on the number of rows, never on positions, so that a captured step can be replayed:
 * blocks without a split leave.
 *
 * Many rows go to attention_tile.cu; both give the same bits, so the limit is a matter of speed: up
 * to PART_ROWS rows, a prompt reads its keys once per row, but from the cache of the device. */
#include "kernels/cuda/attention.cuh"

namespace
{

constexpr int PART_ROWS = 64;               /* most rows whose splits are spread */
constexpr size_t PART_BYTES_MAX = 64 << 20; /* of scratch, unless one row needs more */
constexpr int BLOCKS_PER_SM = 16;           /* wanted: three rounds of what an SM holds at once */

/* What the blocks of a row and head leave for the one that merges. Items are rows × heads. */
struct parts {
    struct softmax_part *part; /* [n_item, n_split_max] */
    float *o;                  /* [n_item, n_split_max, d_head] */
    unsigned *n_arrived;       /* [n_item] 0 between launches */
    int n_split_max;
};

/* Whether t, whose rows are runs of run_bytes, one a head or position, may be accessed piece bytes
 * at a time. */
bool has_pieces(struct tensor t, size_t run_bytes, size_t piece)
{
    const size_t stride_bytes = static_cast<size_t>(t.stride) * dtype_bytes(t.dtype);
    return reinterpret_cast<uintptr_t>(t.data) % piece == 0 && run_bytes % piece == 0 &&
           (stride_bytes % piece == 0 || t.rows == 1);
}

/* Bytes of a position that may be copied at a time; at least a group of four columns, or 0. */
int cache_piece(struct tensor k_pages, struct tensor v_pages, int64_t d_head)
{
    const size_t column_bytes = dtype_bytes(k_pages.dtype);
    const size_t run_bytes = static_cast<size_t>(d_head) * column_bytes;
    for (size_t piece = 16; piece >= 4 * column_bytes; piece /= 2) {
        if (has_pieces(k_pages, run_bytes, piece) && has_pieces(v_pages, run_bytes, piece)) {
            return static_cast<int>(piece);
        }
    }
    return 0;
}

/* From row to row of d_pad elements in shared memory: an odd number of 16-byte groups. */
int shared_stride(int d_pad, enum dtype dtype)
{
    const int group = 16 / static_cast<int>(dtype_bytes(dtype));
    return ((d_pad + group - 1) / group | 1) * group;
}

int split_count(int n_page)
{
    return (n_page + SPLIT / KV_PAGE - 1) / (SPLIT / KV_PAGE);
}

/* Of scratch, for one row. */
size_t part_row_bytes(int n_page_max, int64_t d_model, int n_head)
{
    const size_t n_split = static_cast<size_t>(split_count(n_page_max));
    const size_t split_bytes = static_cast<size_t>(n_head) * sizeof(struct softmax_part) +
                               static_cast<size_t>(d_model) * sizeof(float);
    return n_split * split_bytes + static_cast<size_t>(n_head) * sizeof(unsigned);
}

/* The block that came last merges the splits of its row and head. Factors are computed by a thread
 * per split, each looking at the maxima before its own; then each thread folds its columns. */
__device__ void merge_parts(const struct attention_args &a, const struct parts &p, int64_t item,
                            int n_split, float *y)
{
    __shared__ struct softmax_part part[BLOCK];
    __shared__ struct merge_factors factors[BLOCK];
    const int thread = static_cast<int>(threadIdx.x);
    float max = -INFINITY; /* of the splits before this round */
    float sum = 0;
    float o[ROW_COLS] = {};
    for (int first = 0; first < n_split; first += BLOCK) {
        const int n = min(n_split - first, BLOCK);
        const int64_t at = item * p.n_split_max + first;
        if (thread < n) {
            part[thread] = p.part[at + thread];
        }
        __syncthreads();
        float before = max;
        for (int s = 0; s < n; s++) {
            max = fmaxf(max, part[s].max);
            before = s < thread ? max : before;
        }
        if (thread < n) {
            factors[thread] = merge_factors_of(before, part[thread].max);
        }
        __syncthreads();
#pragma unroll 4
        for (int s = 0; s < n; s++) {
            sum = weigh_in(sum, part[s].sum, factors[s]);
#pragma unroll
            for (int i = 0; i < ROW_COLS; i++) {
                const int c = thread + i * BLOCK;
                if (c < a.d_head) {
                    o[i] = weigh_in(o[i], p.o[(at + s) * a.d_head + c], factors[s]);
                }
            }
        }
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < ROW_COLS; i++) {
        if (thread + i * BLOCK < a.d_head) {
            y[thread + i * BLOCK] = o[i] / sum;
        }
    }
}

/* Writes k and v of a row, the last of its sequence, to their place at one head. */
template <typename T>
__device__ __forceinline__ void row_store(const struct attention_args &a, int64_t row, int head,
                                          int pos)
{
    const int64_t seq = a.view->row_seq[row];
    const int64_t page = a.view->page[seq * a.view->n_page_max + pos / KV_PAGE];
    const int64_t at = (static_cast<int64_t>(head) * KV_PAGE + pos % KV_PAGE) * a.d_head;
    T *const k = static_cast<T *>(a.k_pages) + page * a.k_page_stride + at;
    T *const v = static_cast<T *>(a.v_pages) + page * a.v_page_stride + at;
    for (int c = static_cast<int>(threadIdx.x); c < a.d_head; c += BLOCK) {
        const int64_t column = static_cast<int64_t>(head) * a.d_head + c;
        cache_store(k + c, a.k[row * a.k_stride + column]);
        cache_store(v + c, a.v[row * a.v_stride + column]);
    }
}

/* Grid: heads × parts × rows; part i of a row takes the splits i, i + n_part, .., and who takes the
 * last one, which nobody else reads, stores the row's own k and v before if that is wanted: a
 * launch less in each layer of a decode step. Bytes: 8·d_head (BF16: 4·d_head) per position, row
 * and head; flops: 4·d_head; bound: the memory's bandwidth, and
 * for a row or two the latency of five dependent reads. Share reached: not measured yet. */
template <typename T, bool is_one_buffer>
__global__ void __launch_bounds__(BLOCK, 5) part_kernel(struct attention_args a, struct parts p)
{
    DYN_SHARED(float, shared);
    __shared__ __align__(16) float small[ROW_SHARED_FLOATS];
    __shared__ bool is_last;
    const int head = static_cast<int>(blockIdx.x);
    const int first = static_cast<int>(blockIdx.y);
    const int64_t row = blockIdx.z;
    const int n_part = static_cast<int>(gridDim.y);
    grid_wait();
    const int n_pos = a.view->pos[row] + 1;
    const int n_split = (n_pos + SPLIT - 1) / SPLIT;
    if (first >= n_split) {
        return;
    }
    if (a.k != NULL && (n_split - 1) % n_part == first) {
        row_store<T>(a, row, head, n_pos - 1);
        __syncthreads(); /* all of it is there before the first copy begins */
    }
    const int64_t item = row * a.n_head + head;
    T *const k = reinterpret_cast<T *>(shared + a.stride);
    T *const v = k + (is_one_buffer ? 0 : SPLIT * a.kv_stride);
    const row_shared<T> m = {.q = shared, .k = k, .v = v, .score = small, .e = small + SPLIT};
    row_visit<is_one_buffer>(a, m, row, head, n_pos, first, n_part,
                             [&](int split, struct softmax_part part, const float(&o)[ROW_COLS]) {
                                 const int64_t at = item * p.n_split_max + split;
                                 if (threadIdx.x == 0) {
                                     p.part[at] = part;
                                 }
#pragma unroll
                                 for (int i = 0; i < ROW_COLS; i++) {
                                     const int c = static_cast<int>(threadIdx.x) + i * BLOCK;
                                     if (c < a.d_head) {
                                         p.o[at * a.d_head + c] = o[i];
                                     }
                                 }
                             });
    __syncthreads();
    if (threadIdx.x == 0) {
        const unsigned n = static_cast<unsigned>(min(n_part, n_split));
        __threadfence(); /* for all of the block: what it saw behind the barrier goes first too */
        is_last = atomicAdd(&p.n_arrived[item], 1u) == n - 1;
    }
    __syncthreads();
    if (is_last) {
        __threadfence();
        merge_parts(a, p, item, n_split,
                    a.y + row * a.y_stride + static_cast<int64_t>(head) * a.d_head);
        if (threadIdx.x == 0) {
            (void)atomicExch(&p.n_arrived[item], 0u); /* for the next launch */
        }
    }
}

/* Where the parts lie in a scratch for n_row_max rows. */
struct parts parts_of(const struct step_scratch *scratch, const struct attention_args *a,
                      int n_row_max, int n_split_max)
{
    const size_t n_item = static_cast<size_t>(n_row_max) * static_cast<size_t>(a->n_head);
    const size_t n_part = n_item * static_cast<size_t>(n_split_max);
    struct softmax_part *const part = static_cast<struct softmax_part *>(scratch->attention);
    float *const o = reinterpret_cast<float *>(part + n_part);
    return {
        .part = part,
        .o = o,
        .n_arrived = reinterpret_cast<unsigned *>(o + n_part * static_cast<size_t>(a->d_head)),
        .n_split_max = n_split_max,
    };
}

template <typename T, bool is_one_buffer>
void part_launch(struct cuda *cu, const struct attention_args *a, const struct parts *p, int n_row)
{
    const int n_item = n_row * a->n_head;
    const int wanted = (BLOCKS_PER_SM * cu->n_sm + n_item - 1) / n_item;
    const int n_part = wanted < p->n_split_max ? wanted : p->n_split_max;
    const size_t bytes = shared_bytes<T>(a, 1, is_one_buffer ? 1 : 2);
    CHECK(bytes <= SHARED_BYTES_MAX);
    if (!cuda_shared(cu, part_kernel<T, is_one_buffer>, bytes, "attention")) {
        return;
    }
    const dim3 grid(static_cast<unsigned>(a->n_head), static_cast<unsigned>(n_part),
                    static_cast<unsigned>(n_row));
    LAUNCH((part_kernel<T, is_one_buffer>), grid, dim3(BLOCK), bytes, cuda_queue(cu), *a, *p);
    cuda_check(cu, "attention");
}

template <typename T>
void part_launch_of(struct cuda *cu, const struct attention_args *a, const struct parts *p,
                    int n_row)
{
    if (a->d_head > D_HEAD_TWO_BUFFERS) {
        part_launch<T, true>(cu, a, p, n_row);
    } else {
        part_launch<T, false>(cu, a, p, n_row);
    }
}

} // namespace

void cuda_attention(struct cuda *cu, struct tensor y, struct tensor q, struct tensor k_pages,
                    struct tensor v_pages, struct tensor k, struct tensor v,
                    const struct step_view *view, const struct step_scratch *scratch,
                    int n_page_max, int n_head, float scale)
{
    if (y.rows == 0) {
        return;
    }
    const int64_t d_head = y.cols / n_head;
    if (d_head > D_HEAD_MAX) {
        cuda_fail(cu, ERR_UNSUPPORTED, "attention",
                  "heads wider than 256 columns are not supported on the GPU; use the CPU");
        return;
    }
    const int d_pad = static_cast<int>(d_head + 3) / 4 * 4;
    const enum dtype cache = k_pages.dtype;
    const size_t run_bytes = static_cast<size_t>(d_head) * sizeof(float);
    const struct attention_args a = {
        .y = static_cast<float *>(y.data),
        .q = static_cast<const float *>(q.data),
        .k = static_cast<const float *>(k.data),
        .v = static_cast<const float *>(v.data),
        .k_pages = k_pages.data,
        .v_pages = v_pages.data,
        .y_stride = y.stride,
        .q_stride = q.stride,
        .k_stride = k.stride,
        .v_stride = v.stride,
        .k_page_stride = k_pages.stride,
        .v_page_stride = v_pages.stride,
        .n_head = n_head,
        .d_head = static_cast<int>(d_head),
        .n_share = static_cast<int>(y.cols * KV_PAGE / k_pages.cols),
        .d_pad = d_pad,
        .stride = shared_stride(d_pad, DTYPE_F32),
        .kv_stride = shared_stride(d_pad, cache),
        .kv_piece = cache_piece(k_pages, v_pages, d_head),
        .has_groups = has_pieces(y, run_bytes, 16) && has_pieces(q, run_bytes, 16),
        .scale = scale,
        .view = view,
    };
    const int n_row = static_cast<int>(y.rows);
    const int n_row_max =
        static_cast<int>(scratch->attention_bytes / part_row_bytes(n_page_max, y.cols, n_head));
    if (n_row > n_row_max) {
        if (k.data != NULL) {
            cuda_kv_store(cu, k_pages, v_pages, k, v, view, n_head);
        }
        attention_tile_launch(cu, &a, cache, n_row);
        return;
    }
    const struct parts p = parts_of(scratch, &a, n_row_max, split_count(n_page_max));
    if (cache == DTYPE_BF16) {
        part_launch_of<uint16_t>(cu, &a, &p, n_row);
    } else {
        part_launch_of<float>(cu, &a, &p, n_row);
    }
}

size_t attention_scratch(const struct step_limits *limits)
{
    if (limits->n_head == 0) {
        return 0;
    }
    const size_t row_bytes = part_row_bytes(limits->n_page_max, limits->d_model, limits->n_head);
    const size_t n_fit = PART_BYTES_MAX / row_bytes;
    const size_t n_tok = static_cast<size_t>(limits->n_tok_max);
    const size_t n_row = n_fit < 1 ? 1 : n_fit < PART_ROWS ? n_fit : PART_ROWS;
    return row_bytes * (n_row < n_tok ? n_row : n_tok);
}
