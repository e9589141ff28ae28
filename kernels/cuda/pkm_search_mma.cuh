/* What the kernels of the memory search on tensor cores share: how keys lie, and scores.
 * pkm_search_mma.cu says how they work. */
#ifndef KERNELS_CUDA_PKM_SEARCH_MMA_CUH
#define KERNELS_CUDA_PKM_SEARCH_MMA_CUH

#include "kernels/cuda/pkm_search.cuh"

enum {
    ROWS = 16,    /* of an instruction */
    KEYS = 8,     /* likewise */
    COLUMNS = 32, /* of a block */
    PIECE = 8,    /* columns of 16 bytes */
    PIECES = COLUMNS / PIECE,
    LANES = 32,
    WARPS = 8, /* of a block, or twice as many */
    FEW_ROWS = 256,
    FEW_KEYS = WARPS * KEYS, /* of a block; keys are padded to a multiple of it */
    FEW_AHEAD = 4,           /* blocks of 32 columns that are asked for early */
    MANY_TILES = 2,          /* of 8 keys that a warp scores at a time */
    CHUNK = 512,             /* keys of many rows that are scored, then selected from */
    RANK_STRIDE =
        CHUNK + 8 /* from row to row in shared memory: 8 rows' stores fall into 32 banks */
};

/* Of keys packed for this kernel, and its scratch behind them. */
struct mma_layout {
    int n_block; /* of 32 columns */
    int n_key_padded;
    size_t group_pieces; /* of 16 bytes, from one group to the next */
    size_t rank_at;      /* offset of ranks [FEW_ROWS, n_group, n_key_padded] */
    size_t best_at;      /* of candidates [FEW_ROWS, n_group, K_MAX] */
    size_t counter_at;   /* of counters [FEW_ROWS / ROWS, n_group / 2, COUNTERS] */
    size_t bytes;        /* of all */
};

enum { COUNTERS = 3 }; /* of a tile and head: one for each half, one for both */

static inline struct mma_layout mma_layout(int64_t n_key, int64_t d, int n_group)
{
    struct mma_layout l;
    l.n_block = static_cast<int>((d + COLUMNS - 1) / COLUMNS);
    l.n_key_padded = static_cast<int>((n_key + FEW_KEYS - 1) / FEW_KEYS * FEW_KEYS);
    l.group_pieces =
        static_cast<size_t>(l.n_key_padded / KEYS) * static_cast<size_t>(l.n_block) * 2 * LANES;
    const size_t n = static_cast<size_t>(n_group);
    l.rank_at = n * l.group_pieces * sizeof(uint4);
    l.best_at = l.rank_at + FEW_ROWS * n * static_cast<size_t>(l.n_key_padded) * sizeof(uint32_t);
    l.counter_at = l.best_at + FEW_ROWS * n * K_MAX * sizeof(struct candidate);
    l.bytes = l.counter_at + FEW_ROWS / ROWS * n / 2 * COUNTERS * sizeof(unsigned);
    return l;
}

struct mma_args {
    struct search s;
    struct pairs pairs;
    const uint4 *keys;
    size_t group_pieces;
    int n_block, n_key_padded;
    bool has_groups; /* queries may be read 16 bytes at a time, and columns come in fours */
    uint32_t *ranks; /* scratch of few rows */
    struct candidate *best;
    unsigned *arrived;
};

/* ---- scores ---------------------------------------------------------------------------------- */

/* Columns c .. c+7 of a query; what is not there is zero. */
static __device__ __forceinline__ void load_piece(float (&x)[PIECE], const struct mma_args &a,
                                                  const float *query, int c, bool is_row)
{
    if (a.has_groups) {
#pragma unroll
        for (int i = 0; i < PIECE; i += 4) {
            const float4 four = is_row && c + i < a.s.d
                                    ? *reinterpret_cast<const float4 *>(query + c + i)
                                    : make_float4(0, 0, 0, 0);
            x[i] = four.x, x[i + 1] = four.y, x[i + 2] = four.z, x[i + 3] = four.w;
        }
        return;
    }
#pragma unroll
    for (int i = 0; i < PIECE; i++) {
        x[i] = is_row && c + i < a.s.d ? query[c + i] : 0;
    }
}

/* to[tiles of 16 rows][n_block][hi, lo][2 instructions][32 lanes] ← one half of a head's queries,
 * of rows first .. first+n_row-1; other rows and columns are zero. A thread has a piece of rows g
 * and g+8, whose words an instruction takes in turn. A barrier follows. */
template <int n_tile>
static __device__ __forceinline__ void load_queries(uint4 *to, const struct mma_args &a,
                                                    int64_t first, int n_row, int head, int half)
{
    const int n_piece = a.n_block * PIECES;
    const float *const query = static_cast<const float *>(a.s.query.data) +
                               first * a.s.query.stride +
                               static_cast<int64_t>(2 * head + half) * a.s.d;
    for (int i = threadIdx.x; i < n_tile * (ROWS / 2) * n_piece; i += blockDim.x) {
        const int g = i / n_piece % (ROWS / 2);
        const int tile = i / n_piece / (ROWS / 2);
        const int piece = i % n_piece;
        uint32_t hi[2][PIECE / 2]; /* of row g, of row g+8 */
        uint32_t lo[2][PIECE / 2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int row = tile * ROWS + h * (ROWS / 2) + g;
            const bool is_row = row < n_row;
            float x[PIECE];
            load_piece(x, a, query + (is_row ? row : 0) * a.s.query.stride, piece * PIECE, is_row);
            bf16_split_eight(hi[h], lo[h], x);
        }
        uint4 *const at =
            to + (tile * a.n_block + piece / PIECES) * 4 * LANES + g * PIECES + piece % PIECES;
#pragma unroll
        for (int n = 0; n < 2; n++) { /* instruction */
            const int w = 2 * n;
            at[n * LANES] = make_uint4(hi[0][w], hi[1][w], hi[0][w + 1], hi[1][w + 1]);
            at[(2 + n) * LANES] = make_uint4(lo[0][w], lo[1][w], lo[0][w + 1], lo[1][w + 1]);
        }
    }
}

/* The two chains of a warp's scores: d[tile of rows][tile of keys] of the instruction. */
template <int n_row_tile, int n_key_tile> struct chains {
    float upper[n_row_tile][n_key_tile][4];
    float lower[n_row_tile][n_key_tile][4];
};

/* Adds a block of 32 columns. queries: this lane's of the block, in the first tile; keys: hi and lo
 * of each tile. */
template <int n_row_tile, int n_key_tile>
static __device__ __forceinline__ void add_block(struct chains<n_row_tile, n_key_tile> &sum,
                                                 const uint4 *queries, int tile_pieces,
                                                 const uint4 (&keys)[n_key_tile][2])
{
#pragma unroll
    for (int m = 0; m < n_row_tile; m++) {
        const uint4 *const q = queries + m * tile_pieces;
#pragma unroll
        for (int i = 0; i < 2; i++) { /* instruction */
            const uint4 q_hi = q[i * LANES];
            const uint4 q_lo = q[(2 + i) * LANES];
            const uint32_t a_hi[4] = {q_hi.x, q_hi.y, q_hi.z, q_hi.w};
            const uint32_t a_lo[4] = {q_lo.x, q_lo.y, q_lo.z, q_lo.w};
#pragma unroll
            for (int n = 0; n < n_key_tile; n++) {
                const uint4 k_hi = keys[n][0];
                const uint4 k_lo = keys[n][1];
                const uint32_t b_hi[2] = {i == 0 ? k_hi.x : k_hi.z, i == 0 ? k_hi.y : k_hi.w};
                const uint32_t b_lo[2] = {i == 0 ? k_lo.x : k_lo.z, i == 0 ? k_lo.y : k_lo.w};
                mma_bf16(sum.upper[m][n], a_hi, b_hi);
                mma_bf16(sum.lower[m][n], a_hi, b_lo);
                mma_bf16(sum.lower[m][n], a_lo, b_hi);
            }
        }
    }
}

/* Ranks of the lane's two scores of row tile m, rows g (h 0) or g+8 (h 1), keys 2t and 2t+1 of tile
 * n. */
template <int n_row_tile, int n_key_tile>
static __device__ __forceinline__ uint2 ranks_of(const struct chains<n_row_tile, n_key_tile> &sum,
                                                 int m, int n, int h)
{
    return make_uint2(rank_of_score(sum.upper[m][n][2 * h] + sum.lower[m][n][2 * h]),
                      rank_of_score(sum.upper[m][n][2 * h + 1] + sum.lower[m][n][2 * h + 1]));
}

/* Of the shared memory, for one half of n_tile tiles of rows. */
static inline size_t query_bytes(const struct mma_args *a, int n_tile)
{
    return static_cast<size_t>(n_tile * a->n_block) * 4 * LANES * sizeof(uint4);
}

/* pkm_search_many.cu: false if even the fewest rows do not fit this GPU's shared memory. */
bool search_many(struct cuda *cu, const struct mma_args *a);

#endif
