/* Attention of drawn tokens, a block's work: attention_drawn.cu launches it.
 *
 * Decode is bound by the bytes of the cache, 8·d_head per position, row and head (BF16: half of
 * that), at 4 flops per column, and where rows are few by a chain of dependent reads. Hence no warp
 * waits for another before its sums are done, and keys and values lie in registers: a position's
 * columns are shared by the fewest lanes that hold them in pieces of 16 bytes, and a warp asks for
 * all that is its own of a turn, keys and values, before it computes.
 *
 * A row's result is defined like this, for one head; all is in ascending order. Positions are cut
 * into splits of DRAWN_SPLIT, by absolute position, and of the splits runs are parts: of n splits
 * there are PART_MAX parts at most, of the same number of splits but the last. A part belongs to a
 * warp, which takes its positions in turns: lane (j, l) has of each, of the positions j, j +
 * stride, .. the columns of piece l. In a turn
 *   score_u = scale · Σ_c q_c·k_uc       a chain over the lane's columns, then a butterfly over the lanes
 *   max' = max(max, max_u score_u)       f = expf(max - max')        e_u = expf(score_u - max')
 *   sum_j = sum_j·f + Σ_u e_u            a chain over the lane's positions
 *   o_jc = o_jc·f + Σ_u e_u·v_uc         likewise
 * and sum, o of the part are butterflies over j. Of the row's parts at last
 *   w_p = expf(max_p - max_p max_p)      sum = Σ_p w_p·sum_p, by a warp     o_c = Σ_p w_p·o_pc, a chain
 *   y_c = o_c / sum
 * So a row's bits depend on its length and on the shape alone, not on how its parts are shared out.
 * Positions that it does not see are not read.
 *
 * The chain, by estimate, in µs: the unit with its first pages 0.3 (second-level cache) → keys,
 * values and the query 0.7 (memory) → a turn 0.35 (scores, 4 or 5 butterflies, exponentials,
 * values) → barrier and merge 0.1. Where blocks share a row, then → parts written, fence 0.5 →
 * atomic 0.45 → parts read 0.3 → barrier and merge 0.15. So units (attention_unit.cu) share a row
 * only where its bytes would take a block longer than that. Where kernels overlap, unit, keys and
 * values are on their way before the kernel before ends: drawn_begin. On an H200 it takes some 5.
 *
 * Parts merged by the blocks of the product that follows, as it norms rows, would spare the 1.5 µs,
 * but each of its 128 blocks would read the parts of all heads: 38 KB, 1 µs, of a row at 288
 * positions, 1.7 at 512, and of two rows twice that. By count it gains 0.4 to 0.8 µs of a layer up
 * to some 300 positions of a single row, and loses beyond: not done. */
#ifndef KERNELS_CUDA_ATTENTION_DRAWN_CUH
#define KERNELS_CUDA_ATTENTION_DRAWN_CUH

#include "kernels/cuda/attention_piece.cuh"

namespace
{

static_assert(PART_MAX == 64, "a lane merges two parts");

/* How a warp shares its positions out: lanes by columns times stride by positions. */
template <typename T, int lanes_, int pieces_> struct drawn_shape {
    static constexpr int lanes = lanes_;
    static constexpr int pieces = pieces_;       /* of 16 bytes that a lane has of a position */
    static constexpr int group = 16 / sizeof(T); /* columns of a piece */
    static constexpr int cols = pieces * group;  /* of a lane */
    static constexpr int rows = 8 / pieces;      /* positions of a lane in a turn */
    static constexpr int stride = 32 / lanes;    /* from one to the next */
    static constexpr int turn = rows * stride;   /* positions */
    static constexpr int pages = turn > KV_PAGE ? turn / KV_PAGE : 1; /* of a turn */
    static_assert(lanes % rows == 0, "columns_sum");
    static_assert(DRAWN_SPLIT % turn == 0 && (turn % KV_PAGE == 0 || KV_PAGE % turn == 0), "");
};

/* First column of piece i of a lane. */
template <class S> __device__ __forceinline__ int drawn_column(int i, int lane)
{
    return (i * S::lanes + lane % S::lanes) * S::group;
}

/* ---- a part ---------------------------------------------------------------------------------- */

/* What a block reads and writes, of one row and head. */
template <typename T> struct drawn_head {
    const float *q, *k, *v;   /* the row's; k and v NULL: nothing is to be stored */
    T *k_pages, *v_pages;     /* at the head, of page 0 */
    const int32_t *unit_page; /* the unit's first pages */
    const int32_t *page;      /* the sequence's */
    int first_page;           /* of the unit */
    int n_pos;
};

/* Of a lane, over the turns so far; max is the warp's. */
template <class S> struct drawn_sums {
    float max, sum;
    float o[S::cols];
};

/* Over the warp's positions: every lane of the same columns gets the same bits. */
template <class S> __device__ __forceinline__ float positions_sum(float value)
{
#pragma unroll
    for (int step = S::lanes; step < 32; step *= 2) {
        value += __shfl_xor_sync(0xffffffffu, value, step);
    }
    return value;
}

/* Over the lanes of a position: dot[r] of each of a lane's positions, each halving the lanes that
 * go on with one, so that none adds up what another does. The lane gets that of position row_of; in
 * the order of a butterfly, and its bits. */
template <class S> __device__ __forceinline__ float columns_sum(float (&dot)[S::rows])
{
    const int lane = static_cast<int>(threadIdx.x) % 32;
    int n = S::rows;
#pragma unroll
    for (int step = S::lanes / 2; step > 0; step /= 2) {
        if (n > 1) {
            n /= 2;
            const bool is_upper = (lane & step) != 0;
#pragma unroll
            for (int r = 0; r < S::rows / 2; r++) {
                if (r < n) {
                    const float kept = is_upper ? dot[r + n] : dot[r];
                    const float given = is_upper ? dot[r] : dot[r + n];
                    dot[r] = kept + __shfl_xor_sync(0xffffffffu, given, step);
                }
            }
        } else {
            dot[0] += __shfl_xor_sync(0xffffffffu, dot[0], step);
        }
    }
    return dot[0];
}

/* Lanes that have the sum of a position, and which of a lane's positions that is. */
template <class S> constexpr int LANES_OF_SUM = S::lanes / S::rows;

template <class S> __device__ __forceinline__ int row_of(int lane)
{
    return lane % S::lanes / LANES_OF_SUM<S>;
}

/* The shares of a turn, of which the lane sees the positions before n_seen. */
template <class S>
__device__ __forceinline__ void
turn_scores(float (&e)[S::rows], struct drawn_sums<S> &m, const float (&q)[S::pieces][S::group],
            const uint4 (&k)[S::rows][S::pieces], int n_seen, float scale)
{
    const int lane = static_cast<int>(threadIdx.x) % 32;
    float dot[S::rows] = {};
#pragma unroll
    for (int r = 0; r < S::rows; r++) {
#pragma unroll
        for (int i = 0; i < S::pieces; i++) {
            float key[S::group];
            piece_widen(key, k[r][i]);
#pragma unroll
            for (int c = 0; c < S::group; c++) {
                dot[r] = fmaf(q[i][c], key[c], dot[r]);
            }
        }
    }
    const float sum_of_one = columns_sum<S>(dot);
    const float score =
        row_of<S>(lane) * S::stride + lane / S::lanes < n_seen ? sum_of_one * scale : -INFINITY;
    float max = fmaxf(m.max, score);
#pragma unroll
    for (int step = 16; step >= LANES_OF_SUM<S>; step /= 2) {
        max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, step));
    }
    const float base = exponent_base(max);
    const float old = expf(m.max - base);
    const float share = expf(score - base);
    float sum = 0;
#pragma unroll
    for (int r = 0; r < S::rows; r++) {
        e[r] = __shfl_sync(0xffffffffu, share, lane / S::lanes * S::lanes + r * LANES_OF_SUM<S>);
        sum += e[r];
    }
    m.max = max;
    m.sum = fmaf(m.sum, old, sum);
#pragma unroll
    for (int c = 0; c < S::cols; c++) {
        m.o[c] *= old;
    }
}

/* A lane's pieces of a turn. page_of(i): the turn's page i, already at the lane's first position
 * and column; n: positions from there on that are there. */
template <class S, bool is_whole, typename T, typename Page>
__device__ __forceinline__ void turn_load(uint4 (&to)[S::rows][S::pieces], const Page &page_of,
                                          int d_head, int n, const int (&n_col)[S::pieces])
{
    const T *page = NULL;
#pragma unroll
    for (int r = 0; r < S::rows; r++) {
        const int u = r * S::stride;
        if (u % KV_PAGE == 0) {
            page = page_of(u / KV_PAGE);
        }
#pragma unroll
        for (int i = 0; i < S::pieces; i++) {
            to[r][i] = piece_load<is_whole>(page + u % KV_PAGE * d_head + i * S::lanes * S::group,
                                            u < n ? n_col[i] : 0);
        }
    }
}

/* Takes the row's own keys or values, as the cache has them, for position r·stride of a lane, and
 * stores them to to; r < 0: it is none of the lane's. */
template <class S, bool is_whole, typename T>
__device__ __forceinline__ void own_take(uint4 (&piece)[S::rows][S::pieces], T *to,
                                         const float *from, int r, const int (&n_col)[S::pieces])
{
#pragma unroll
    for (int i = 0; i < S::pieces; i++) {
        const int c = i * S::lanes * S::group;
        float fresh[S::group];
        floats_load<is_whole>(fresh, from + c, n_col[i]);
        const uint4 own = piece_of(fresh);
        if (r >= 0) {
            piece_store<is_whole>(to + c, own, n_col[i]);
        }
#pragma unroll
        for (int j = 0; j < S::rows; j++) {
            piece[j][i] = j == r ? own : piece[j][i];
        }
    }
}

/* A lane's keys and values of a turn. */
template <class S> struct drawn_turn {
    uint4 k[S::rows][S::pieces], v[S::rows][S::pieces];
};

/* Whose pages a lane knows the numbers of: 32 of the positions from pos on, one a lane. */
template <typename T>
__device__ __forceinline__ int pages_look(const drawn_head<T> &h, int pos, int end)
{
    const int at = pos / KV_PAGE + static_cast<int>(threadIdx.x) % 32;
    const int in_unit = at - h.first_page;
    return at * KV_PAGE >= end ? 0 : in_unit < UNIT_PAGES ? h.unit_page[in_unit] : h.page[at];
}

/* The place of a lane's first position and column in page i of a turn, in elements. */
template <class S>
__device__ __forceinline__ int64_t turn_place(const struct attention_args &a, int pages, int page,
                                              int pos, int64_t stride)
{
    const int lane = static_cast<int>(threadIdx.x) % 32;
    return __shfl_sync(0xffffffffu, pages, page) * stride +
           (pos + lane / S::lanes) % KV_PAGE * a.d_head + drawn_column<S>(0, lane);
}

/* What the cache has of the turn from pos on, all asked for at once. pages: of 32, among which page
 * is its first. */
template <class S, bool is_whole, typename T>
__device__ __forceinline__ void turn_ask(struct drawn_turn<S> &turn, const struct attention_args &a,
                                         const drawn_head<T> &h, int pages, int page, int pos,
                                         int end_stored)
{
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int n = end_stored - pos - lane / S::lanes;
    int n_col[S::pieces];
#pragma unroll
    for (int i = 0; i < S::pieces; i++) {
        n_col[i] = a.d_head - drawn_column<S>(i, lane);
    }
    turn_load<S, is_whole, T>(
        turn.k,
        [&](int i) { return h.k_pages + turn_place<S>(a, pages, page + i, pos, a.k_page_stride); },
        a.d_head, n, n_col);
    turn_load<S, is_whole, T>(
        turn.v,
        [&](int i) { return h.v_pages + turn_place<S>(a, pages, page + i, pos, a.v_page_stride); },
        a.d_head, n, n_col);
}

/* The positions first .. end-1 of a row and head, which begin at a split, by a warp. The row's own,
 * its last, comes from k and v if these are there, and is stored: nobody else reads it. turn: the
 * first, already asked for, if is_asked; pages as well. */
template <class S, bool is_whole, typename T>
__device__ __forceinline__ void part_attend(struct drawn_sums<S> &m, const struct attention_args &a,
                                            const drawn_head<T> &h, int first, int end,
                                            struct drawn_turn<S> &turn, int pages, bool is_asked)
{
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int mine = lane / S::lanes; /* the lane's first position of a turn */
    const int column = drawn_column<S>(0, lane);
    int n_col[S::pieces];
    float q[S::pieces][S::group];
    m.max = -INFINITY;
    m.sum = 0;
#pragma unroll
    for (int c = 0; c < S::cols; c++) {
        m.o[c] = 0;
    }
#pragma unroll
    for (int i = 0; i < S::pieces; i++) {
        n_col[i] = a.d_head - drawn_column<S>(i, lane);
        floats_load<is_whole>(q[i], h.q + drawn_column<S>(i, lane), n_col[i]);
    }
    const bool stores = h.k != NULL && end == h.n_pos;
    const int end_stored = stores ? end - 1 : end;
#pragma unroll 1
    for (int pos = first; pos < end; pos += S::turn) {
        const int page = (pos - first) / KV_PAGE % 32; /* of these */
        if (!is_asked) {
            if (page == 0 && pos % KV_PAGE == 0) {
                pages = pages_look(h, pos, end);
            }
            turn_ask<S, is_whole>(turn, a, h, pages, page, pos, end_stored);
        }
        is_asked = false;
        if (stores && end - pos <= S::turn) {
            const int own = end - 1 - pos;
            const int r = own % S::stride == mine ? own / S::stride : -1;
            const int below = own % KV_PAGE / S::stride * S::stride * a.d_head;
            const int own_page = page + own / KV_PAGE;
            own_take<S, is_whole>(
                turn.k, h.k_pages + turn_place<S>(a, pages, own_page, pos, a.k_page_stride) + below,
                h.k + column, r, n_col);
            own_take<S, is_whole>(
                turn.v, h.v_pages + turn_place<S>(a, pages, own_page, pos, a.v_page_stride) + below,
                h.v + column, r, n_col);
        }
        float e[S::rows];
        turn_scores<S>(e, m, q, turn.k, end - pos, a.scale);
#pragma unroll
        for (int r = 0; r < S::rows; r++) {
#pragma unroll
            for (int i = 0; i < S::pieces; i++) {
                float value[S::group];
                piece_widen(value, turn.v[r][i]);
#pragma unroll
                for (int c = 0; c < S::group; c++) {
                    m.o[i * S::group + c] = fmaf(e[r], value[c], m.o[i * S::group + c]);
                }
            }
        }
    }
    m.sum = positions_sum<S>(m.sum);
#pragma unroll
    for (int c = 0; c < S::cols; c++) {
        m.o[c] = positions_sum<S>(m.o[c]);
    }
}

/* Leaves a part: its sums at part, o [d_pad] at o. */
template <class S>
__device__ __forceinline__ void part_leave(struct softmax_part *part, float *o,
                                           const struct attention_args &a,
                                           const struct drawn_sums<S> &m)
{
    const int lane = static_cast<int>(threadIdx.x) % 32;
    if (lane == 0) {
        *part = {m.max, m.sum};
    }
#pragma unroll
    for (int i = 0; i < S::cols; i += 4) {
        const int c = drawn_column<S>(i / S::group, lane) + i % S::group;
        if (lane < S::lanes && c < a.d_pad) {
            *reinterpret_cast<float4 *>(o + c) =
                make_float4(m.o[i], m.o[i + 1], m.o[i + 2], m.o[i + 3]);
        }
    }
}

/* ---- a row ----------------------------------------------------------------------------------- */

/* Shared memory of a block: parts of a row. */
struct drawn_shared {
    struct softmax_part *part; /* [PART_MAX] */
    float *o;                  /* [n_part_max][d_pad], 16-byte aligned */
};

/* y ← the row's parts, which are in shared memory; each warp has the columns of its lanes. */
__device__ __forceinline__ void parts_merge(const struct attention_args &a,
                                            const struct drawn_shared &m, int64_t row, int head,
                                            int n_part)
{
    const int thread = static_cast<int>(threadIdx.x);
    const int lane = thread % 32;
    const struct softmax_part none = {-INFINITY, 0};
    const struct softmax_part low = lane < n_part ? m.part[lane] : none;
    const struct softmax_part high = lane + 32 < n_part ? m.part[lane + 32] : none;
    float max = fmaxf(low.max, high.max);
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
        max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, step));
    }
    const float base = exponent_base(max);
    const float w_low = expf(low.max - base);
    const float w_high = expf(high.max - base);
    const float sum = warp_sum(fmaf(w_high, high.sum, w_low * low.sum));
    float *const y = a.y + row * a.y_stride + static_cast<int64_t>(head) * a.d_head;
#pragma unroll 1
    for (int c = thread; c - lane < a.d_head; c += static_cast<int>(blockDim.x)) {
        float o = 0;
#pragma unroll 8
        for (int p = 0; p < n_part; p++) {
            const float w = __shfl_sync(0xffffffffu, p < 32 ? w_low : w_high, p % 32);
            o = fmaf(w, c < a.d_pad ? m.o[p * a.d_pad + c] : 0, o);
        }
        if (c < a.d_head) {
            y[c] = o / sum;
            if (a.rounded.data != NULL) {
                room_store(a.rounded, (row * a.n_head + head) * a.d_head + c, y[c]);
            }
        }
    }
}

/* What a block knows before it waits for the kernel before, and has asked for. */
template <class S, typename T> struct drawn_begun {
    drawn_head<T> head;
    int row, first, run, n_unit;
    int n_part;                /* of the unit; 0: there is nothing to do */
    int64_t place;             /* of the unit's first part */
    struct drawn_turn<S> turn; /* the first of the warp, with its pages */
    int pages;                 /* numbers of 32 pages, one a lane */
    bool is_asked;             /* for both */
};

/* First and last position, and one, of the block's part i. */
template <class B> __device__ __forceinline__ int part_begin_of(const B &b, int i)
{
    return (b.first + i * b.run) * DRAWN_SPLIT;
}

template <class B> __device__ __forceinline__ int part_end_of(const B &b, int i)
{
    return min(part_begin_of(b, i) + b.run * DRAWN_SPLIT, b.head.n_pos);
}

/* Of the block of a unit and head, before grid_wait.
 *
 * A step's units, its pages and what earlier steps left in them were there when its upload was
 * done, before any other of its kernels began (grid_wait_alone), and where the row is stored on its
 * way (starts_early) no kernel before writes to pages: so each warp asks for its first turn, and
 * only the row's own is left to be read after. */
template <class S, bool is_whole, typename T>
__device__ __forceinline__ void drawn_begin(struct drawn_begun<S, T> &b,
                                            const struct attention_args &a, const struct parts &p,
                                            const struct attention_unit *at, int head)
{
    const int64_t n_page = a.view->n_page_max; /* asked for together with the unit */
    const int32_t *const page = a.view->page;
    b.row = at->row;
    b.first = at->first;
    b.run = at->run;
    b.n_unit = at->n_unit;
    b.n_part = b.first < at->end ? (at->end - b.first + b.run - 1) / max(b.run, 1) : 0;
    const int64_t column = static_cast<int64_t>(head) * a.d_head;
    const int64_t in_page = static_cast<int64_t>(head / a.n_share) * KV_PAGE * a.d_head;
    b.head = {
        .q = a.q + b.row * a.q_stride + column,
        .k = a.k != NULL ? a.k + b.row * a.k_stride + column : NULL,
        .v = a.k != NULL ? a.v + b.row * a.v_stride + column : NULL,
        .k_pages = static_cast<T *>(a.k_pages) + in_page,
        .v_pages = static_cast<T *>(a.v_pages) + in_page,
        .unit_page = at->page,
        .page = page + at->seq * n_page,
        .first_page = b.first * (DRAWN_SPLIT / KV_PAGE),
        .n_pos = at->n_pos,
    };
    b.place = (static_cast<int64_t>(b.row) * a.n_head + head) * p.n_part_max + at->part;
    b.pages = 0;
    b.is_asked = a.starts_early;
    const int warp = static_cast<int>(threadIdx.x) / 32;
    if (a.starts_early && warp < b.n_part) {
        const int from = part_begin_of(b, warp);
        const int end = part_end_of(b, warp);
        b.pages = pages_look(b.head, from, end);
        turn_ask<S, is_whole>(b.turn, a, b.head, b.pages, 0, from,
                              b.head.k != NULL && end == b.head.n_pos ? end - 1 : end);
    }
}

/* And after it; of any number of warps. */
template <class S, bool is_whole, typename T>
__device__ __forceinline__ void drawn_attend(const struct attention_args &a, const struct parts &p,
                                             const struct drawn_shared &m,
                                             struct drawn_begun<S, T> &b, int head)
{
    const int n_part = b.n_part;
    const int n_unit = b.n_unit;
    if (n_part == 0) {
        return;
    }
    const int row = b.row;
    const int64_t item = static_cast<int64_t>(row) * a.n_head + head;
    const int thread = static_cast<int>(threadIdx.x);
    const int n_thread = static_cast<int>(blockDim.x);
#pragma unroll 1
    for (int i = thread / 32; i < n_part; i += n_thread / 32) {
        struct drawn_sums<S> sums;
        part_attend<S, is_whole>(sums, a, b.head, part_begin_of(b, i), part_end_of(b, i), b.turn,
                                 b.pages, b.is_asked);
        b.is_asked = false;
        if (n_unit == 1) {
            part_leave<S>(m.part + i, m.o + i * a.d_pad, a, sums);
        } else {
            part_leave<S>(p.part + b.place + i, p.o + (b.place + i) * a.d_pad, a, sums);
        }
    }
    int n_all = n_part;
    if (n_unit == 1) {
        __syncthreads();
    } else {
        if (!parts_arrive(&p.n_arrived[item], n_unit)) {
            return;
        }
        const int n_split = drawn_splits_of(b.head.n_pos);
        n_all = (n_split + b.run - 1) / b.run;
        for (int i = thread * 4; i < n_all * a.d_pad; i += n_thread * 4) {
            copy_async_16(m.o + i, p.o + item * p.n_part_max * a.d_pad + i);
        }
        copy_async_commit();
        if (thread < n_all) {
            m.part[thread] = p.part[item * p.n_part_max + thread];
        }
        copy_async_wait<0>();
        __syncthreads();
    }
    parts_merge(a, m, row, head, n_all);
}

} // namespace

#endif
