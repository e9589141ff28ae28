/* Causal attention over the pages of the cache, for many rows of requests: prompts, scoring, and
 * any mix of them.
 *
 * Work is given out in tiles of up to 16, 32 or 64 consecutive rows of a sequence. A block finds
 * its tile by a prefix sum over the sequences, so the host need not know them; blocks take tile
 * after tile in fixed steps.
 *
 * A tile reads each split's keys and values once for all of its rows, 16-byte asynchronous copies
 * under way while the other half is computed with. The scores and the sums of values are small
 * matrix products in F32, up to four rows by eight positions (or columns) of a thread in registers.
 *
 * For a prompt of n rows and one head: 8·d_head·n²/(2·64) bytes (of BF16 half), nearly all from the
 * L2 cache, and 2·d_head·n² flops: bound by F32 multiply-adds and, close to it, by shared memory
 * (12 16-byte reads per 128 multiply-adds; of BF16 8 of them of 8 bytes, and 32 instructions to
 * widen). Share reached: not measured yet. */
#include "kernels/cuda/attention_tile.cuh"

namespace
{

constexpr int ROW_GROUPS = 16;         /* of threads: 8 threads share the rows of a group */
constexpr int E_STRIDE = SPLIT + 8;    /* so that 4 rows by 8 lanes write to 32 banks */
constexpr int D_HEAD_LARGE_TILE = 100; /* for tiles of 64 rows: beyond, SHARED_BYTES_MAX */

/* ---- tiles of a step ------------------------------------------------------------------------- */

/* Rows row .. row+n_row-1 of sequence seq. */
struct tile {
    int seq, row, n_row;
};

__device__ __forceinline__ int tiles_of(int n_row, int tile_rows)
{
    return (n_row + tile_rows - 1) / tile_rows;
}

/* Tile number i of a sequence. The last one is the longest work, so it comes first. */
__device__ __forceinline__ struct tile tile_of(int seq, int first, int n_row, int tile_rows, int i)
{
    const int skipped = (tiles_of(n_row, tile_rows) - 1 - i) * tile_rows;
    return {seq, first + skipped, min(n_row - skipped, tile_rows)};
}

/* Tile number i of the step, in the order of its sequences; false if it has no more. By the whole
 * block, which gets the same answer. */
__device__ bool tile_find(const struct step_view *view, int tile_rows, int i, struct tile *tile)
{
    __shared__ int warp_tiles[BLOCK_WARPS];
    __shared__ struct tile found;
    const int n_seq = view->n_seq;
    const int32_t *const seq_first = view->seq_first;
    const int thread = static_cast<int>(threadIdx.x);
    int before = 0;
    for (int base = 0; base < n_seq && before <= i; base += BLOCK) {
        const int seq = base + thread;
        const int first = seq < n_seq ? seq_first[seq] : 0;
        const int n_row = seq < n_seq ? seq_first[seq + 1] - first : 0;
        const int n = tiles_of(n_row, tile_rows);
        int end = n;
        for (int step = 1; step < 32; step *= 2) {
            const int other = __shfl_up_sync(0xffffffffu, end, static_cast<unsigned>(step));
            end += thread % 32 >= step ? other : 0;
        }
        if (thread % 32 == 31) {
            warp_tiles[thread / 32] = end;
        }
        __syncthreads();
        end += before;
        for (int w = 0; w < BLOCK_WARPS; w++) {
            before += warp_tiles[w];
            end += w < thread / 32 ? warp_tiles[w] : 0;
        }
        if (i < end && i >= end - n) {
            found = tile_of(seq, first, n_row, tile_rows, i - (end - n));
        }
        __syncthreads();
    }
    if (i >= before) {
        return false;
    }
    *tile = found;
    __syncthreads(); /* the next call writes again */
    return true;
}

/* ---- a tile ---------------------------------------------------------------------------------- */

/* A thread's rows are those of its group: warp·4·R + lane_row + 4·r, r < R. Its positions
 * are lane_pos + 8·j, its columns the G groups of four lane_pos + 8·g. */

/* The layout of shared memory. */
template <typename T> struct tile_shared {
    float *q; /* [tile_rows][stride] */
    T *k, *v; /* [SPLIT][kv_stride]; the same buffer if is_one_buffer */
    float *e; /* [tile_rows][E_STRIDE] */
};

/* What a thread keeps of its rows between splits. */
template <int R, int G> struct tile_sums {
    struct softmax_part all[R];
    float4 o[R][G];
};

/* Dot products of the thread's rows with its positions. q: the first of its rows. */
template <int R, typename T>
__device__ __forceinline__ void tile_scores(float (&s)[R][SPLIT_EACH],
                                            const struct attention_args &a, const float *q,
                                            const T *k, int lane)
{
#pragma unroll
    for (int r = 0; r < R; r++) {
#pragma unroll
        for (int j = 0; j < SPLIT_EACH; j++) {
            s[r][j] = 0;
        }
    }
    const T *const my_k = k + lane_pos(lane) * a.kv_stride;
#pragma unroll 1
    for (int c = 0; c < a.d_pad; c += 4) {
        float4 q4[R];
#pragma unroll
        for (int r = 0; r < R; r++) {
            q4[r] = widen_group(q + 4 * r * a.stride + c);
        }
#pragma unroll
        for (int j = 0; j < SPLIT_EACH; j++) {
            const float4 k4 = widen_group(my_k + j * SPLIT_LANES * a.kv_stride + c);
#pragma unroll
            for (int r = 0; r < R; r++) {
                s[r][j] = dot_add(s[r][j], q4[r], k4);
            }
        }
    }
}

__device__ __forceinline__ void add_weighted(float4 &o, float e, float4 v)
{
    o.x = fmaf(e, v.x, o.x);
    o.y = fmaf(e, v.y, o.y);
    o.z = fmaf(e, v.z, o.z);
    o.w = fmaf(e, v.w, o.w);
}

/* o = Σ e·v over the positions that each row sees: the first n_seen + 4·r. All rows of the warp see
 * the first n_all positions, and none sees more than n_last. e: the first of the thread's rows. */
template <int R, int G, typename T>
__device__ __forceinline__ void tile_weigh(float4 (&o)[R][G], const struct attention_args &a,
                                           const float *e, const T *v, const int (&col)[G],
                                           int n_seen, int n_all, int n_last)
{
#pragma unroll
    for (int r = 0; r < R; r++) {
#pragma unroll
        for (int g = 0; g < G; g++) {
            o[r][g] = {0, 0, 0, 0};
        }
    }
    int u = 0;
#pragma unroll 1
    for (; u + 4 <= n_all; u += 4) {
        float4 e4[R];
#pragma unroll
        for (int r = 0; r < R; r++) {
            e4[r] = widen_group(e + 4 * r * E_STRIDE + u);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
#pragma unroll
            for (int g = 0; g < G; g++) {
                const float4 v4 = widen_group(v + (u + i) * a.kv_stride + col[g]);
#pragma unroll
                for (int r = 0; r < R; r++) {
                    const float w = i == 0   ? e4[r].x
                                    : i == 1 ? e4[r].y
                                    : i == 2 ? e4[r].z
                                             : e4[r].w;
                    add_weighted(o[r][g], w, v4);
                }
            }
        }
    }
#pragma unroll 1
    for (; u < n_last; u++) {
#pragma unroll
        for (int r = 0; r < R; r++) {
            if (u < n_seen + 4 * r) {
                const float w = e[4 * r * E_STRIDE + u];
#pragma unroll
                for (int g = 0; g < G; g++) {
                    add_weighted(o[r][g], w, widen_group(v + u * a.kv_stride + col[g]));
                }
            }
        }
    }
}

/* Merges the split into the rows that see any of it. */
template <int R, int G>
__device__ __forceinline__ void tile_merge(struct tile_sums<R, G> &sums,
                                           const struct softmax_part (&part)[R],
                                           const float4 (&o)[R][G], int n_seen)
{
#pragma unroll
    for (int r = 0; r < R; r++) {
        if (n_seen + 4 * r <= 0) {
            continue;
        }
        const struct merge_factors f = merge_part(&sums.all[r], part[r]);
#pragma unroll
        for (int g = 0; g < G; g++) {
            float4 &all = sums.o[r][g];
            all = {weigh_in(all.x, o[r][g].x, f), weigh_in(all.y, o[r][g].y, f),
                   weigh_in(all.z, o[r][g].z, f), weigh_in(all.w, o[r][g].w, f)};
        }
    }
}

template <int R, int G>
__device__ __forceinline__ void tile_store(const struct attention_args &a, const struct tile &tile,
                                           int head, int row, const struct tile_sums<R, G> &sums,
                                           int lane)
{
#pragma unroll
    for (int r = 0; r < R; r++) {
        if (row + 4 * r >= tile.n_row) {
            continue;
        }
        float *const y =
            a.y + (tile.row + row + 4 * r) * a.y_stride + static_cast<int64_t>(head) * a.d_head;
        const float sum = sums.all[r].sum;
#pragma unroll
        for (int g = 0; g < G; g++) {
            const int c = 4 * (lane_pos(lane) + SPLIT_LANES * g);
            const float4 o = {sums.o[r][g].x / sum, sums.o[r][g].y / sum, sums.o[r][g].z / sum,
                              sums.o[r][g].w / sum};
            if (a.has_groups && c < a.d_head) {
                *reinterpret_cast<float4 *>(y + c) = o;
                continue;
            }
            const float single[4] = {o.x, o.y, o.z, o.w};
#pragma unroll
            for (int i = 0; i < 4; i++) {
                if (c + i < a.d_head) {
                    y[c + i] = single[i];
                }
            }
        }
    }
}

/* One tile and head. Warps whose rows see nothing of a split only wait. */
template <typename T, int R, int G, bool is_one_buffer>
__device__ __forceinline__ void tile_attend(const struct attention_args &a, const tile_shared<T> &m,
                                            const struct tile &tile, int head)
{
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int warp_row = static_cast<int>(threadIdx.x) / 32 * 4 * R;
    const int warp_end = min(tile.n_row, warp_row + 4 * R);
    const int row = warp_row + lane_row(lane);
    const int pos = a.view->pos[tile.row];
    int col[G];
    struct tile_sums<R, G> sums;
#pragma unroll
    for (int g = 0; g < G; g++) {
        col[g] = min(4 * (lane_pos(lane) + SPLIT_LANES * g), a.d_pad - 4);
    }
#pragma unroll
    for (int r = 0; r < R; r++) {
        sums.all[r] = {-INFINITY, 0};
#pragma unroll
        for (int g = 0; g < G; g++) {
            sums.o[r][g] = {0, 0, 0, 0};
        }
    }
    const float *const q = a.q + tile.row * a.q_stride + static_cast<int64_t>(head) * a.d_head;
    for (int i = static_cast<int>(threadIdx.x) / 16; i < R * ROW_GROUPS; i += BLOCK / 16) {
        const bool is_zero = i >= tile.n_row;
        query_load(a, m.q + i * a.stride, q + (is_zero ? 0 : i * a.q_stride), is_zero,
                   static_cast<int>(threadIdx.x) % 16);
    }
    struct softmax_part part[R];
    /* Positions of a split that row 0 sees, and row i sees i more; not cut to 0 .. SPLIT. */
    const auto seen_by_first = [&](int split) { return pos + 1 - split * SPLIT; };
    const auto is_idle = [&](int split) {
        return warp_row >= tile.n_row || seen_by_first(split) + warp_end - 1 <= 0;
    };
    splits_visit<BLOCK_WARPS, is_one_buffer>(
        a, m.k, m.v, cache_head_of<T>(a, tile.seq, head, pos + tile.n_row), 0,
        splits_of(pos + tile.n_row),
        [&](int split) {
            if (is_idle(split)) {
                return;
            }
            float s[R][SPLIT_EACH];
            tile_scores(s, a, m.q + row * a.stride, m.k, lane);
#pragma unroll
            for (int r = 0; r < R; r++) {
                part[r] = softmax_split(s[r], seen_by_first(split) + row + 4 * r, a.scale, lane);
#pragma unroll
                for (int j = 0; j < SPLIT_EACH; j++) {
                    m.e[(row + 4 * r) * E_STRIDE + lane_pos(lane) + SPLIT_LANES * j] = s[r][j];
                }
            }
            __syncwarp();
        },
        [&](int split) {
            if (is_idle(split)) {
                return;
            }
            const int first_seen = seen_by_first(split);
            float4 o[R][G];
            tile_weigh(o, a, m.e + row * E_STRIDE, m.v, col, first_seen + row,
                       min(first_seen + warp_row, SPLIT), min(first_seen + warp_end - 1, SPLIT));
            tile_merge<R, G>(sums, part, o, first_seen + row);
        });
    tile_store<R, G>(a, tile, head, row, sums, lane);
}

/* ---- the kernel ------------------------------------------------------------------------------ */

/* Heads of up to 32·G columns, tiles of 16·R rows. Grid: any number of blocks. */
template <typename T, int R, int G, bool is_one_buffer, int blocks_per_sm>
__global__ void __launch_bounds__(BLOCK, blocks_per_sm) tile_kernel(struct attention_args a)
{
    DYN_SHARED(float, shared);
    constexpr int tile_rows = R * ROW_GROUPS;
    T *const k = reinterpret_cast<T *>(shared + tile_rows * a.stride);
    T *const v = k + (is_one_buffer ? 0 : SPLIT * a.kv_stride);
    float *const e = reinterpret_cast<float *>(v + SPLIT * a.kv_stride);
    const tile_shared<T> m = {.q = shared, .k = k, .v = v, .e = e};
    grid_wait();
    for (int64_t item = blockIdx.x;; item += gridDim.x) {
        const int head = static_cast<int>(item % a.n_head);
        struct tile tile;
        if (!tile_find(a.view, tile_rows, static_cast<int>(item / a.n_head), &tile)) {
            return;
        }
        tile_attend<T, R, G, is_one_buffer>(a, m, tile, head);
    }
}

template <typename T, int R, int G, bool is_one_buffer, int blocks_per_sm>
void tile_launch(struct cuda *cu, const struct attention_args *a, int n_row)
{
    const int tile_rows = R * ROW_GROUPS;
    const size_t bytes = shared_bytes<T>(a, tile_rows, is_one_buffer ? 1 : 2) +
                         sizeof(float) * static_cast<size_t>(tile_rows * E_STRIDE);
    CHECK(bytes <= SHARED_BYTES_MAX);
    if (!cuda_shared(cu, tile_kernel<T, R, G, is_one_buffer, blocks_per_sm>, bytes, "attention")) {
        return;
    }
    LAUNCH((tile_kernel<T, R, G, is_one_buffer, blocks_per_sm>), tile_grid(cu, a, n_row),
           dim3(BLOCK), bytes, cuda_queue(cu), *a);
    cuda_check(cu, "attention");
}

template <typename T>
void tile_launch_of(struct cuda *cu, const struct attention_args *a, int n_row)
{
    /* Tiles of 64 rows read least, but a short prompt has too few of them to occupy the device. */
    const bool is_small = static_cast<int64_t>(n_row) * a->n_head < 2 * 64 * cu->n_sm;
    if (a->d_head <= 64 && is_small) {
        tile_launch<T, 2, 2, false, 3>(cu, a, n_row);
    } else if (a->d_head <= 64) {
        tile_launch<T, 4, 2, false, 3>(cu, a, n_row);
    } else if (a->d_head <= D_HEAD_LARGE_TILE && !is_small) {
        tile_launch<T, 4, 4, false, 2>(cu, a, n_row);
    } else if (a->d_head <= D_HEAD_TWO_BUFFERS) {
        tile_launch<T, 2, 4, false, 2>(cu, a, n_row);
    } else {
        tile_launch<T, 1, 8, true, 2>(cu, a, n_row);
    }
}

} // namespace

void attention_tile_launch(struct cuda *cu, const struct attention_args *a, enum dtype cache,
                           int n_row)
{
    if (cache == DTYPE_BF16) {
        tile_launch_of<uint16_t>(cu, a, n_row);
    } else {
        tile_launch_of<float>(cu, a, n_row);
    }
}
