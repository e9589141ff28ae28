/* What the attention kernels share: above all the arithmetic of those that must give the same bits
 * for a row.
 *
 *   attention.cu        few rows of requests in F32: the splits of a row on several blocks, merged at
 *                       the end
 *   attention_tile.cu   many of them: a block per tile of a sequence's rows
 *   attention_mma.cu    rows of requests on tensor cores, in BF16: an arithmetic of its own
 *   attention_drawn.cu  drawn tokens: likewise, in F32
 *
 * In the first two a row's result for one head is defined like this, whichever computes it.
 * Positions are cut into splits of SPLIT, by absolute position. Within a split
 *   score_u = scale · Σ_c q_c·k_uc       one chain of multiply-adds in ascending c
 *   max = max_u score_u                  over the positions that the row sees
 *   e_u = expf(score_u - max)
 *   sum = Σ_u e_u                        8 chains u = i, i + 8, .. , then a butterfly
 *   o_c = Σ_u e_u·v_uc                   one chain in ascending u
 * and the splits are merged in ascending order by merge_factors_of and weigh_in: the online softmax
 * of Milakov and Gimelshein, cut as in FlashAttention. Positions that a row does not see are left
 * out, not multiplied by 0: what memory holds there may be NaN.
 *
 * The cache is F32 or BF16 (T: float, uint16_t). Its elements are kept in shared memory as they are
 * and are widened when a group of four columns is read; all else is F32 either way, so the two
 * differ in what kv_store rounded alone.
 *
 * In shared memory a position (and a query) is a row of d_pad elements, d_head rounded up to a
 * multiple of 4 by zeros; rows are an odd number of 16-byte groups apart, so that 8 lanes that read
 * the same columns of 8 rows cause no bank conflict. */
#ifndef KERNELS_CUDA_ATTENTION_CUH
#define KERNELS_CUDA_ATTENTION_CUH

#include "kernels/cuda/cuda.cuh"

constexpr int SPLIT = 64;      /* positions */
constexpr int SPLIT_LANES = 8; /* lanes that share the positions of a row */
constexpr int SPLIT_EACH = SPLIT / SPLIT_LANES;
constexpr int DRAWN_SPLIT = 32; /* positions of a drawn token's split */
constexpr int PART_MAX = 64;    /* parts of a drawn token's row: blocks that it may occupy */
constexpr int D_HEAD_MAX = 256;
/* Dynamic shared memory of a block: the smaller devices have 99 KB, up to 4 of them for static
 * use. */
constexpr size_t SHARED_BYTES_MAX = 95 << 10;
/* Wider heads have one buffer for the keys and then the values of a split: two would not fit. */
constexpr int D_HEAD_TWO_BUFFERS = 128;
constexpr int SPLIT_PAGES = SPLIT / KV_PAGE;
constexpr int MMA_ROWS = 64; /* of a tile in attention_mma.cu */
constexpr int MMA_RUN = 16;  /* splits of a part there */

struct attention_args {
    float *y;                /* [n_tok, n_head·d_head] */
    struct room rounded;     /* for y once more, without gaps; not of attention_tile.cu */
    const float *q;          /* [n_tok, n_head·d_head] */
    const float *k, *v;      /* the same, of rows that are to be stored first; or NULL */
    void *k_pages, *v_pages; /* [n_page, n_head/n_share·KV_PAGE·d_head] of T */
    int64_t y_stride, q_stride, k_stride, v_stride, k_page_stride, v_page_stride;
    int n_head, d_head;
    int n_share;     /* heads that read one of the pages' */
    int d_pad;       /* columns of a row in shared memory, see above */
    int stride;      /* from row to row there, of queries */
    int kv_stride;   /* the same of keys and values, in elements of T */
    int kv_piece;    /* bytes of keys and values that may be copied at a time: 16, 8; 0 = none */
    bool has_groups; /* y, q, k and v may be read and written 16 bytes at a time */
    float scale;
    bool starts_early; /* drawn tokens: the kernel before may still run, and writes to no page */
    const struct step_view *view;
};

/* Bytes in shared memory of n_query queries and n_buffer times the keys, or values, of a split. */
template <typename T>
static inline size_t shared_bytes(const struct attention_args *a, int n_query, int n_buffer)
{
    return sizeof(float) * static_cast<size_t>(n_query * a->stride) +
           sizeof(T) * static_cast<size_t>(n_buffer * SPLIT * a->kv_stride);
}

/* Of a row over a split, a part, or all so far. */
struct softmax_part {
    float max, sum;
};

/* What the blocks of a row and head leave for the one that merges. Items are rows × heads. */
struct parts {
    const struct attention_unit *unit;
    struct softmax_part *part; /* [n_item, n_part_max] */
    float *o;                  /* [n_item, n_part_max, d_pad] */
    unsigned *n_arrived;       /* [n_item] 0 between launches */
    int n_part_max;
};

/* attention_unit.cu: most parts of a row; bytes of scratch for the parts of n_row rows. */
int attention_part_max(int n_page_max, bool is_drawn);
size_t attention_part_bytes(int64_t n_row, int n_part_max, int64_t d_model, int n_head);

/* attention_drawn.cu: drawn tokens, which are stored first if there are k and v. */
void attention_drawn_launch(struct cuda *cu, const struct attention_args *a, const struct parts *p,
                            enum dtype cache, int n_row, int n_unit);

/* attention_tile.cu: any number of rows of requests. cache: the dtype of the pages. */
void attention_tile_launch(struct cuda *cu, const struct attention_args *a, enum dtype cache,
                           int n_row);

/* attention_mma.cu: the same on tensor cores, to other bits. Not of every head. */
bool attention_mma_can(const struct attention_args *a, enum dtype cache);
void attention_mma_launch(struct cuda *cu, const struct attention_args *a,
                          const struct step_scratch *scratch, int n_page_max);
/* Bytes of a part of a tile and head in scratch. */
size_t attention_mma_part_bytes(int64_t d_head);

static __host__ __device__ __forceinline__ int splits_of(int n_pos)
{
    return (n_pos + SPLIT - 1) / SPLIT;
}

static __host__ __device__ __forceinline__ int drawn_splits_of(int n_pos)
{
    return (n_pos + DRAWN_SPLIT - 1) / DRAWN_SPLIT;
}

namespace
{

/* ---- lanes ----------------------------------------------------------------------------------- */

/* A warp is 8 lanes by positions (or columns) times 4 by rows. Bits 0, 2 and 3 of the lane are the
 * former, bits 1 and 4 the latter: then lanes that differ in bit 1 read the same keys and those
 * that differ in bit 0 the same queries, and 16-byte reads of a half-warp can be served together.
 */
__device__ __forceinline__ int lane_pos(int lane)
{
    return (lane & 1) | (lane >> 1 & 6);
}

__device__ __forceinline__ int lane_row(int lane)
{
    return (lane >> 1 & 1) | (lane >> 3 & 2);
}

/* Over the 8 lanes of a row. Each lane gets the same bits, because both sides of an exchange add
 * the same two numbers. */
__device__ __forceinline__ float lanes_sum(float value)
{
    value += __shfl_xor_sync(0xffffffffu, value, 8);
    value += __shfl_xor_sync(0xffffffffu, value, 4);
    return value + __shfl_xor_sync(0xffffffffu, value, 1);
}

__device__ __forceinline__ float lanes_max(float value)
{
    value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, 8));
    value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, 4));
    return fmaxf(value, __shfl_xor_sync(0xffffffffu, value, 1));
}

/* ---- the arithmetic -------------------------------------------------------------------------- */

/* Four more columns of the chain of a score. */
__device__ __forceinline__ float dot_add(float dot, float4 q, float4 k)
{
    return fmaf(q.w, k.w, fmaf(q.z, k.z, fmaf(q.y, k.y, fmaf(q.x, k.x, dot))));
}

/* What is subtracted in an exponent. If all scores are -infinity it is 0, so that the subtraction
 * makes no NaN. */
__device__ __forceinline__ float exponent_base(float max)
{
    return max == -INFINITY ? 0 : max;
}

/* s: the dot products of a row with positions lane_pos + 8·j of a split, of which it sees the first
 * n_seen. They become e, 0 where the row does not see. By the 8 lanes of the row together. */
__device__ __forceinline__ struct softmax_part softmax_split(float (&s)[SPLIT_EACH], int n_seen,
                                                             float scale, int lane)
{
    const int first = lane_pos(lane);
    float max = -INFINITY;
#pragma unroll
    for (int j = 0; j < SPLIT_EACH; j++) {
        s[j] = first + SPLIT_LANES * j < n_seen ? s[j] * scale : -INFINITY;
        max = fmaxf(max, s[j]);
    }
    max = lanes_max(max);
    const float base = exponent_base(max);
    float sum = 0;
#pragma unroll
    for (int j = 0; j < SPLIT_EACH; j++) {
        s[j] = expf(s[j] - base);
        sum += s[j];
    }
    return {max, lanes_sum(sum)};
}

/* How a split is merged into the splits before it: both are scaled to the new maximum,
 *   sum ← sum·old + part.sum·fresh     o ← o·old + part.o·fresh     (weigh_in)
 * Before the first split the maximum is -infinity, sum and o are 0. */
struct merge_factors {
    float old, fresh;
};

__device__ __forceinline__ struct merge_factors merge_factors_of(float max_before, float max_part)
{
    const float base = exponent_base(fmaxf(max_before, max_part));
    return {expf(max_before - base), expf(max_part - base)};
}

__device__ __forceinline__ float weigh_in(float all, float part, struct merge_factors f)
{
    return fmaf(part, f.fresh, all * f.old);
}

/* Merges the sums of a split into all and returns the factors for o. */
__device__ __forceinline__ struct merge_factors merge_part(struct softmax_part *all,
                                                           struct softmax_part part)
{
    const struct merge_factors f = merge_factors_of(all->max, part.max);
    all->max = fmaxf(all->max, part.max);
    all->sum = weigh_in(all->sum, part.sum, f);
    return f;
}

/* Whether this block is the last of its row's and head's, and sees then what the others have left.
 * Fences by one thread are enough: behind a barrier they speak for the block, and each costs all
 * that is under way. */
__device__ __forceinline__ bool parts_arrive(unsigned *n_arrived, int n_unit)
{
    __shared__ bool is_last;
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        is_last = atomicAdd(n_arrived, 1u) == static_cast<unsigned>(n_unit) - 1;
        if (is_last) {
            __threadfence();
            (void)atomicExch(n_arrived, 0u); /* for the next launch */
        }
    }
    __syncthreads();
    return is_last;
}

/* ---- reading the cache ----------------------------------------------------------------------- */

/* Starts copying a row of d_head elements to shared memory, piece bytes at a time (0: one element),
 * or filling it with zeros; by 16 lanes. Not unrolled: the copies take four turns at most, and in
 * all the places that call this they would be nearly half of the kernels' code. */
template <typename T>
__device__ __forceinline__ void row_load(const struct attention_args &a, T *to, const T *from,
                                         int piece, bool is_zero, int lane)
{
    constexpr int cols_16 = 16 / sizeof(T);
    constexpr int cols_8 = 8 / sizeof(T);
    if (piece == 16) {
#pragma unroll 1
        for (int c = cols_16 * lane; c < a.d_head; c += cols_16 * 16) {
            copy_async_16(to + c, from + c, is_zero ? 0 : 16);
        }
    } else if (sizeof(T) == 2 && piece == 8) {
#pragma unroll 1
        for (int c = cols_8 * lane; c < a.d_head; c += cols_8 * 16) {
            copy_async_8(to + c, from + c, is_zero ? 0 : 8);
        }
    } else {
#pragma unroll 1
        for (int c = lane; c < a.d_pad; c += 16) {
            to[c] = is_zero || c >= a.d_head ? T{0} : from[c];
        }
    }
}

__device__ __forceinline__ void query_load(const struct attention_args &a, float *to,
                                           const float *from, bool is_zero, int lane)
{
    row_load(a, to, from, a.has_groups ? 16 : 0, is_zero, lane);
}

/* The cache of one sequence, at one head. */
template <typename T> struct cache_head {
    const T *k, *v;
    const int32_t *page;
    int n_pos; /* positions that are written */
};

template <typename T>
__device__ __forceinline__ cache_head<T> cache_head_of(const struct attention_args &a, int seq,
                                                       int head, int n_pos)
{
    const int64_t first = static_cast<int64_t>(head / a.n_share) * KV_PAGE * a.d_head;
    return {static_cast<const T *>(a.k_pages) + first, static_cast<const T *>(a.v_pages) + first,
            a.view->page + static_cast<int64_t>(seq) * a.view->n_page_max, n_pos};
}

/* Starts copying a split to to[SPLIT][kv_stride], whole pages by each of n_warp warps; positions
 * from n_pos on are zeros. pages: cache.k or cache.v. */
template <int n_warp, typename T>
__device__ __forceinline__ void split_load(const struct attention_args &a, T *to, const T *pages,
                                           int64_t page_stride, const cache_head<T> &cache,
                                           int split)
{
    static_assert(SPLIT_PAGES % n_warp == 0, "warps load equal shares");
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int i = 0; i < SPLIT_PAGES; i += n_warp) {
        const int page = i + static_cast<int>(threadIdx.x) / 32;
        const int n = cache.n_pos - split * SPLIT - page * KV_PAGE; /* of it; may be <= 0 */
        const T *const from =
            pages + (n > 0 ? cache.page[split * SPLIT_PAGES + page] * page_stride : 0);
#pragma unroll 2
        for (int p = lane / 16; p < KV_PAGE; p += 2) {
            row_load(a, to + (page * KV_PAGE + p) * a.kv_stride, from + p * a.d_head, a.kv_piece,
                     p >= n, lane % 16);
        }
    }
}

/* Calls score(split) when the keys of split first .. end-1 are in k[SPLIT][kv_stride], and
 * weigh(split) when its values are in v. Values arrive while scores are computed, and the next keys
 * while values are summed; with one buffer (k = v) only other blocks of the SM fill the wait.
 * Copies that the caller has started arrive with the first keys. By the whole block of n_warp
 * warps; on return nobody reads shared memory any more. */
template <int n_warp, bool is_one_buffer, typename T, typename Score, typename Weigh>
__device__ __forceinline__ void splits_visit(const struct attention_args &a, T *k, T *v,
                                             const cache_head<T> &cache, int first, int end,
                                             Score score, Weigh weigh)
{
    if (!is_one_buffer && first < end) {
        split_load<n_warp>(a, k, cache.k, a.k_page_stride, cache, first);
        copy_async_commit();
    }
#pragma unroll 1
    for (int split = first; split < end; split++) {
        if constexpr (is_one_buffer) {
            split_load<n_warp>(a, k, cache.k, a.k_page_stride, cache, split);
            copy_async_commit();
            copy_async_wait<0>();
        } else {
            split_load<n_warp>(a, v, cache.v, a.v_page_stride, cache, split);
            copy_async_commit();
            copy_async_wait<1>();
        }
        __syncthreads();
        score(split);
        if constexpr (is_one_buffer) {
            __syncthreads(); /* the keys are done */
            split_load<n_warp>(a, v, cache.v, a.v_page_stride, cache, split);
            copy_async_commit();
        }
        copy_async_wait<0>();
        __syncthreads(); /* the values are there, and the keys are done */
        if (!is_one_buffer && split + 1 < end) {
            split_load<n_warp>(a, k, cache.k, a.k_page_stride, cache, split + 1);
            copy_async_commit();
        }
        weigh(split);
        __syncthreads(); /* the values are done */
    }
}

} // namespace

#endif
