/* Causal attention over the pages of the cache: the op, and the kernel for few rows of requests.
 *
 * Drawn tokens go to attention_drawn.cu, or without that path to attention_tile.cu, whatever their
 * number; rows of requests that tensor cores may compute to attention_mma.cu, others to the kernel
 * here while they are few, and many to attention_tile.cu; these two give the same bits, so that is
 * a matter of speed.
 *
 * Rows × heads of few rows do not fill the device, so the splits of a row (attention.cuh) are
 * shared out among units, a block of each head to each: step_begin makes them of the rows' lengths,
 * and they travel with the step. Where a row has several units, their blocks leave (max, sum, o) of
 * each split in scratch, and the last one of a row and head to arrive merges them in ascending
 * order. How they are shared out changes no bits. Blocks whose unit has no split leave. Up to
 * PART_ROWS rows are spread, where the scratch holds all their splits: a prompt reads its keys once
 * per row then, but from the cache of the device. */
#include "kernels/cuda/attention.cuh"

namespace
{

constexpr int BLOCK = SPLIT; /* threads: one for each score, so that none is idle meanwhile */
constexpr int BLOCK_WARPS = BLOCK / 32;

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

/* ---- a row's splits -------------------------------------------------------------------------- */

/* Shared memory of a block; all 16-byte aligned. */
template <typename T> struct row_shared {
    float *q;     /* [stride] */
    T *k, *v;     /* [SPLIT][kv_stride] */
    float *score; /* [SPLIT] */
    float *e;     /* [BLOCK_WARPS][SPLIT]: each warp has its own */
};

constexpr int ROW_SHARED_FLOATS = SPLIT + BLOCK_WARPS * SPLIT; /* score and e */

/* The sums of the row over the split whose keys are in shared memory, and its e for this warp. */
template <typename T>
__device__ __forceinline__ struct softmax_part row_scores(const struct attention_args &a,
                                                          const row_shared<T> &m, int n_seen)
{
    const int thread = static_cast<int>(threadIdx.x);
    const int lane = thread % 32;
    const T *const k = m.k + thread * a.kv_stride;
    float dot = 0;
#pragma unroll 4
    for (int c = 0; c < a.d_pad; c += 4) {
        dot = dot_add(dot, widen_group(m.q + c), widen_group(k + c));
    }
    m.score[thread] = dot;
    __syncthreads();
    float s[SPLIT_EACH];
#pragma unroll
    for (int j = 0; j < SPLIT_EACH; j++) {
        s[j] = m.score[lane_pos(lane) + SPLIT_LANES * j];
    }
    const struct softmax_part part = softmax_split(s, n_seen, a.scale, lane);
    float *const e = m.e + thread / 32 * SPLIT;
    if (lane_row(lane) == 0) {
#pragma unroll
        for (int j = 0; j < SPLIT_EACH; j++) {
            e[lane_pos(lane) + SPLIT_LANES * j] = s[j];
        }
    }
    __syncwarp();
    return part;
}

/* Column c of o for the split whose values are in shared memory. */
template <typename T>
__device__ __forceinline__ float row_weigh(const struct attention_args &a, const row_shared<T> &m,
                                           int n_seen, int c)
{
    const float *const e = m.e + threadIdx.x / 32 * SPLIT;
    const T *const v = m.v + c;
    float o = 0;
    int u = 0;
#pragma unroll 2
    for (; u + 4 <= n_seen; u += 4) {
        const float4 e4 = widen_group(e + u);
        o = fmaf(e4.x, widen(v[u * a.kv_stride]), o);
        o = fmaf(e4.y, widen(v[(u + 1) * a.kv_stride]), o);
        o = fmaf(e4.z, widen(v[(u + 2) * a.kv_stride]), o);
        o = fmaf(e4.w, widen(v[(u + 3) * a.kv_stride]), o);
    }
    for (; u < n_seen; u++) {
        o = fmaf(e[u], widen(v[u * a.kv_stride]), o);
    }
    return o;
}

/* Calls use(split, part, o) for the unit's splits: o[i] is column threadIdx.x + i·BLOCK, for
 * columns below d_head. */
template <bool is_one_buffer, int n_col, typename T, typename Use>
__device__ __forceinline__ void unit_visit(const struct attention_args &a, const row_shared<T> &m,
                                           const struct attention_unit &unit, int head, Use use)
{
    const float *const q = a.q + unit.row * a.q_stride + static_cast<int64_t>(head) * a.d_head;
    if (threadIdx.x < 16) {
        query_load(a, m.q, q, false, static_cast<int>(threadIdx.x));
    }
    struct softmax_part part = {};
    splits_visit<BLOCK_WARPS, is_one_buffer>(
        a, m.k, m.v, cache_head_of<T>(a, unit.seq, head, unit.n_pos), unit.first, unit.end,
        [&](int split) { part = row_scores(a, m, min(unit.n_pos - split * SPLIT, SPLIT)); },
        [&](int split) {
            float o[n_col];
#pragma unroll
            for (int i = 0; i < n_col; i++) {
                const int c = static_cast<int>(threadIdx.x) + i * BLOCK;
                o[i] =
                    c < a.d_head ? row_weigh(a, m, min(unit.n_pos - split * SPLIT, SPLIT), c) : 0;
            }
            use(split, part, o);
        });
}

/* What a thread keeps of some splits: the sums of its columns, and the row's. */
template <int n_col> struct fold {
    struct softmax_part all;
    float o[n_col];
};

/* Merges what comes next behind it. */
template <int n_col>
__device__ __forceinline__ void fold_in(struct fold<n_col> *fold, struct softmax_part part,
                                        const float (&o)[n_col])
{
    const struct merge_factors f = merge_part(&fold->all, part);
#pragma unroll
    for (int i = 0; i < n_col; i++) {
        fold->o[i] = weigh_in(fold->o[i], o[i], f);
    }
}

template <int n_col>
__device__ __forceinline__ void row_write(const struct attention_args &a, int64_t row, int head,
                                          const struct fold<n_col> &fold)
{
    float *const y = a.y + row * a.y_stride + static_cast<int64_t>(head) * a.d_head;
#pragma unroll
    for (int i = 0; i < n_col; i++) {
        const int c = static_cast<int>(threadIdx.x) + i * BLOCK;
        if (c < a.d_head) {
            const float out = fold.o[i] / fold.all.sum;
            y[c] = out;
            if (a.rounded.data != NULL) {
                room_store(a.rounded, (row * a.n_head + head) * a.d_head + c, out);
            }
        }
    }
}

/* The block that came last merges the parts of its row and head. Factors are computed by a thread
 * per part, each looking at the maxima before its own; then each thread folds its columns. */
template <int n_col>
__device__ void merge_parts(const struct attention_args &a, const struct parts &p, int64_t item,
                            int n_part, struct fold<n_col> *fold)
{
    __shared__ struct softmax_part part[BLOCK];
    __shared__ struct merge_factors factors[BLOCK];
    const int thread = static_cast<int>(threadIdx.x);
    for (int first = 0; first < n_part; first += BLOCK) {
        const int n = min(n_part - first, BLOCK);
        const int64_t at = item * p.n_part_max + first;
        if (thread < n) {
            part[thread] = p.part[at + thread];
        }
        __syncthreads();
        float before = fold->all.max; /* of the parts before this round */
        for (int s = 0; s < n; s++) {
            fold->all.max = fmaxf(fold->all.max, part[s].max);
            before = s < thread ? fold->all.max : before;
        }
        if (thread < n) {
            factors[thread] = merge_factors_of(before, part[thread].max);
        }
        __syncthreads();
#pragma unroll 4
        for (int s = 0; s < n; s++) {
            fold->all.sum = weigh_in(fold->all.sum, part[s].sum, factors[s]);
#pragma unroll
            for (int i = 0; i < n_col; i++) {
                const int c = thread + i * BLOCK;
                if (c < a.d_head) {
                    fold->o[i] = weigh_in(fold->o[i], p.o[(at + s) * a.d_pad + c], factors[s]);
                }
            }
        }
        __syncthreads();
    }
}

/* Leaves a part for the block that merges. */
template <int n_col>
__device__ __forceinline__ void part_write(const struct attention_args &a, const struct parts &p,
                                           int64_t at, struct softmax_part part,
                                           const float (&o)[n_col])
{
    if (threadIdx.x == 0) {
        p.part[at] = part;
    }
#pragma unroll
    for (int i = 0; i < n_col; i++) {
        const int c = static_cast<int>(threadIdx.x) + i * BLOCK;
        if (c < a.d_head) {
            p.o[at * a.d_pad + c] = o[i];
        }
    }
}

/* Grid: heads × units. Bytes: 8·d_head (BF16: 4·d_head) per position, row and head; flops:
 * 4·d_head; bound: the memory's bandwidth, and for a row or two the latency of dependent reads.
 * Share reached: not measured yet. */
template <typename T, bool is_one_buffer>
__global__ void __launch_bounds__(BLOCK, 10) part_kernel(struct attention_args a, struct parts p)
{
    DYN_SHARED(float, shared);
    __shared__ __align__(16) float small[ROW_SHARED_FLOATS];
    constexpr int n_col = (is_one_buffer ? D_HEAD_MAX : D_HEAD_TWO_BUFFERS) / BLOCK;
    const int head = static_cast<int>(blockIdx.x);
    grid_wait();
    const struct attention_unit unit = p.unit[blockIdx.y];
    if (unit.first >= unit.end) {
        return;
    }
    const int64_t item = static_cast<int64_t>(unit.row) * a.n_head + head;
    T *const k = reinterpret_cast<T *>(shared + a.stride);
    T *const v = k + (is_one_buffer ? 0 : SPLIT * a.kv_stride);
    const row_shared<T> m = {.q = shared, .k = k, .v = v, .score = small, .e = small + SPLIT};
    struct fold<n_col> all = {
        {-INFINITY, 0},
        {
        }
    };
    unit_visit<is_one_buffer, n_col>(
        a, m, unit, head, [&](int split, struct softmax_part part, const float(&o)[n_col]) {
            if (unit.n_unit == 1) {
                fold_in(&all, part, o);
            } else {
                part_write(a, p, item * p.n_part_max + split, part, o);
            }
        });
    if (unit.n_unit > 1) {
        if (!parts_arrive(&p.n_arrived[item], unit.n_unit)) {
            return;
        }
        merge_parts(a, p, item, splits_of(unit.n_pos), &all);
    }
    row_write(a, unit.row, head, all);
}

/* Where a launch's parts lie in the scratch. */
struct parts parts_of(const struct step_scratch *scratch, const struct attention_args *a, int n_row,
                      int n_part_max)
{
    const size_t n_part = static_cast<size_t>(n_row) * static_cast<size_t>(a->n_head) *
                          static_cast<size_t>(n_part_max);
    const size_t bytes = attention_part_bytes(
        n_row, n_part_max, static_cast<int64_t>(a->n_head) * a->d_head, a->n_head);
    CHECK(bytes <= scratch->attention_bytes);
    float *const o = static_cast<float *>(scratch->attention);
    return {
        .unit = step_units(a->view),
        .part = reinterpret_cast<struct softmax_part *>(o + n_part * static_cast<size_t>(a->d_pad)),
        .o = o,
        .n_arrived = scratch->arrived,
        .n_part_max = n_part_max,
    };
}

template <typename T, bool is_one_buffer>
void part_launch(struct cuda *cu, const struct attention_args *a, const struct parts *p, int n_unit)
{
    const size_t bytes = shared_bytes<T>(a, 1, is_one_buffer ? 1 : 2);
    CHECK(bytes <= SHARED_BYTES_MAX);
    if (!cuda_shared(cu, part_kernel<T, is_one_buffer>, bytes, "attention")) {
        return;
    }
    const dim3 grid(static_cast<unsigned>(a->n_head), static_cast<unsigned>(n_unit));
    LAUNCH((part_kernel<T, is_one_buffer>), grid, dim3(BLOCK), bytes, cuda_queue(cu), *a, *p);
    cuda_check(cu, "attention");
}

template <typename T>
void part_launch_of(struct cuda *cu, const struct attention_args *a, const struct parts *p,
                    int n_unit)
{
    if (a->d_head > D_HEAD_TWO_BUFFERS) {
        part_launch<T, true>(cu, a, p, n_unit);
    } else {
        part_launch<T, false>(cu, a, p, n_unit);
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
    struct attention_args a = {
        .y = static_cast<float *>(y.data),
        .rounded = {},
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
        .has_groups =
            has_pieces(y, run_bytes, 16) && has_pieces(q, run_bytes, 16) &&
            (k.data == NULL || (has_pieces(k, run_bytes, 16) && has_pieces(v, run_bytes, 16))),
        .scale = scale,
        .starts_early = cu->overlaps && k.data != NULL,
        .view = view,
    };
    CHECK(cu->is_drawn || k.data == NULL);
    if (!cu->is_drawn && cu->attends_mma && cu->dense != CUDA_DENSE_F32 &&
        attention_mma_can(&a, cache)) {
        a.rounded = linear_room(cu, y);
        attention_mma_launch(cu, &a, scratch, n_page_max);
        return;
    }
    if (scratch->n_unit == 0 || (cu->is_drawn && !cu->attends_drawn)) {
        CHECK(!cu->is_drawn || k.data == NULL);
        attention_tile_launch(cu, &a, cache, static_cast<int>(y.rows));
        return;
    }
    a.rounded = linear_room(cu, y);
    const struct parts p = parts_of(scratch, &a, static_cast<int>(y.rows),
                                    attention_part_max(n_page_max, cu->is_drawn));
    if (cu->is_drawn) {
        attention_drawn_launch(cu, &a, &p, cache, static_cast<int>(y.rows), scratch->n_unit);
    } else if (cache == DTYPE_BF16) {
        part_launch_of<uint16_t>(cu, &a, &p, scratch->n_unit);
    } else {
        part_launch_of<float>(cu, &a, &p, scratch->n_unit);
    }
}
