/* The memory search of pkm_search.cu with its scores on tensor cores, for keys that may be taken as
 * sums of two BF16 numbers (struct weight_desc). Steps and selection are the same.
 *
 * A score. Query and key are split, x = hi + lo, both rounded to nearest even, and of the four
 * products three are summed:
 *   score = Σ hi·hi + Σ (hi·lo + lo·hi)
 * How far that is from the score: linear_split.cu.
 * The two sums are chains of mma_bf16 instructions over blocks of 32 columns, ascending: of a block
 * the first instruction takes the columns c with c % 8 < 4, the second the others, as in
 * linear.cuh; in the second chain an instruction's hi·lo comes before its lo·hi. Rows are always
 * the instruction's rows and keys its columns, so a row has the same bits from both kernels,
 * whatever rows are beside it. How tensor cores round within an instruction is not documented;
 * test_kernels tells whether it matters.
 *
 * Keys in memory: [group][8 keys][32 columns][hi, lo][32 lanes][16 bytes]; lane (g, t), which is
 * (lane / 4, lane % 4), has columns 8t .. 8t+7 of key g. That is the fragment of two instructions,
 * (b[0], b[1]) = (x, y) and then (z, w), and a warp reads 512 consecutive bytes. Of queries shared
 * memory holds, of a tile of rows and a block, [hi, lo][2 instructions][32 lanes][16 bytes], a[0 ..
 * 3]: of rows g and g+8 in turn the first two columns that the lane's instruction takes, then the
 * other two. Pieces that lie as those of keys would cost four moves for each instruction (gemm.cu
 * says why).
 *
 *   few   up to FEW_ROWS rows. A block scores 64 keys of one half for 16 rows, 8 keys a warp, which
 *         are under way before the kernel before has ended; ranks go to scratch. Of up to half as
 *         many rows as it has warps the last block of a head selects, both halves of all rows at
 *         once, a warp each; of more, the last of each half selects that half, and the last of the
 *         two the slots. Grid (2·n_key / 64, n_head, rows / 16).
 *   many  more rows of up to CHUNK keys (pkm_search_many.cu). A block scores all keys for T rows,
 *   half by half, 16
 *         keys a warp at a time, keeps ranks in shared memory and selects. Grid (n_head, rows / T).
 *   wide  the same where each block has a multiprocessor to itself, or there are more keys: these
 *   are taken a chunk at
 *         a time, and half of the warps select of one while the others score the next. What has
 *         been chosen of a half so far stands beside the keys of its next chunk. Where even 16 rows
 *         do not fit the shared memory, few takes FEW_ROWS rows at a time.
 * A block has 8 warps; 16 where it has a multiprocessor to itself, since a warp's selections wait
 * for their own results: of few rows the upper 8 do nothing else.
 *
 * Per row and head 3 · 2·n_key·d_half multiply-adds on tensor cores (393 k for 512 keys of 128),
 * then 2·n_key ranks to select among: 1920 instructions of a warp, of the code for sm_90, at 7
 * probes each (660 a half and 600 for the pairs; every bit probed in turn, and the chosen counted
 * one after the other, they were 4030). Bytes: few reads the keys (4 per column) once per 16 rows,
 * many once per T, from L2 after the first. Bound: few latency, three dependent phases, of which a
 * half takes some 1600 clocks and the pairs 1400; many L2, then the selection (1024 rows, 4 heads,
 * 512 keys of 128, T = 32: 64 MB, some 13 us; 31 selections of both halves and pairs per
 * multiprocessor, some 8, of which wide hides a third). So 256 rows are few: 1024 blocks draw 42 MB
 * by all multiprocessors, 32 blocks of 32 rows 17 MB by a quarter of them. Of 2·2048 keys the
 * blocks of 1024 rows draw 268 MB in one round, some 50 us; of T = 16, which is all that has room
 * where a half is not cut in chunks, it was 537 MB in two, 141 us on an H200. Registers on sm_90
 * and sm_100 (nvcc 13.0): few 104 and 108, of more than 512 keys 202 and 157; many and wide 80 to
 * 128; nothing is spilled. Two blocks of 8 warps of a multiprocessor at a time, one where a thread
 * takes more than 128; T = 32 takes 99 KB of shared memory with keys of 128 columns, wide 183, few
 * 14. On an H200 1, 32, 256 and 1024 rows took 7.5, 12.5, 32 and 32 us. */
#include "kernels/cuda/pkm_search_mma.cuh"

#include <string.h>

namespace
{

/* ---- few rows -------------------------------------------------------------------------------- */

/* Blocks first .. first+FEW_AHEAD-1 of a warp's keys, of those that there are. */
__device__ __forceinline__ void load_keys(uint4 (&keys)[FEW_AHEAD][1][2], const uint4 *from,
                                          int first, int n_block)
{
#pragma unroll
    for (int b = 0; b < FEW_AHEAD; b++) {
        if (first + b < n_block) {
            keys[b][0][0] = __ldg(from + (first + b) * 2 * LANES);
            keys[b][0][1] = __ldg(from + (first + b) * 2 * LANES + LANES);
        }
    }
}

/* The best keys of both halves of a row. */
struct lists {
    struct candidate half[2][K_MAX];
};

template <int V, int W>
__global__ void __launch_bounds__(W *LANES, V > 16 || W > WARPS ? 1 : 2)
    few_kernel(const struct mma_args a)
{
    DYN_SHARED(uint4, queries); /* [n_block][hi, lo][g, g+8][32 lanes] */
    __shared__ __align__(16) struct lists best[W];
    __shared__ __align__(16) struct candidate chosen[W][K_MAX];
    __shared__ uint16_t pair[PAIR_MAX];
    const int warp = static_cast<int>(threadIdx.x) / LANES;
    const int lane = static_cast<int>(threadIdx.x) % LANES;
    const int n_part = a.n_key_padded / FEW_KEYS;
    const int half = static_cast<int>(blockIdx.x) / n_part;
    const int key = (static_cast<int>(blockIdx.x) % n_part * WARPS + warp) * KEYS;
    const int head = static_cast<int>(blockIdx.y);
    const int64_t first = static_cast<int64_t>(blockIdx.z) * ROWS;
    const int n_row = static_cast<int>(a.s.query.rows - first < ROWS ? a.s.query.rows - first
                                                                     : static_cast<int>(ROWS));
    const uint4 *const keys =
        a.keys + (2 * head + half) * a.group_pieces + key / KEYS * a.n_block * 2 * LANES + lane;
    const bool scores = warp < WARPS; /* the others select alone */
    uint4 now[FEW_AHEAD][1][2];
    load_keys(now, keys, 0, scores ? a.n_block : 0);
    grid_wait();
    load_queries<1>(queries, a, first, n_row, head, half);
    load_pairs(pair, a.pairs);
    __syncthreads();
    struct chains<1, 1> sum = {
    };
    for (int from = 0; scores && from < a.n_block; from += FEW_AHEAD) {
        uint4 next[FEW_AHEAD][1][2];
        load_keys(next, keys, from + FEW_AHEAD, a.n_block);
#pragma unroll
        for (int b = 0; b < FEW_AHEAD; b++) {
            if (from + b < a.n_block) {
                add_block(sum, queries + (from + b) * 4 * LANES + lane, 0, now[b]);
            }
        }
#pragma unroll
        for (int b = 0; b < FEW_AHEAD; b++) {
            now[b][0][0] = next[b][0][0];
            now[b][0][1] = next[b][0][1];
        }
    }
    const int64_t n_head = a.s.n_head;
    const auto group_of = [&](int row, int of_half) {
        return ((first + row) * n_head + head) * 2 + of_half;
    };
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int row = lane / 4 + 8 * h;
        if (scores && row < n_row) {
            *reinterpret_cast<uint2 *>(a.ranks + group_of(row, half) * a.n_key_padded + key +
                                       lane % 4 * 2) = ranks_of(sum, 0, 0, h);
        }
    }
    unsigned *const arrived = a.arrived + (blockIdx.z * n_head + head) * COUNTERS;
    const bool is_apart = n_row > W / 2;
    if (!is_last_block(arrived + (is_apart ? half : 0),
                       static_cast<unsigned>(is_apart ? n_part : 2 * n_part))) {
        return;
    }
    if (!is_apart && warp < 2 * n_row) {
        (void)select_keys<V>(best[warp / 2].half[warp % 2],
                             a.ranks + group_of(warp / 2, warp % 2) * a.n_key_padded, a.s.n_key,
                             a.s.k_top);
    }
    for (int row = warp; is_apart && row < n_row; row += W) {
        a.best[group_of(row, half) * K_MAX + lane] = select_keys<V>(
            chosen[warp], a.ranks + group_of(row, half) * a.n_key_padded, a.s.n_key, a.s.k_top);
    }
    if (is_apart && !is_last_block(arrived + 2, 2)) {
        return;
    }
    __syncthreads(); /* without a second counter: the lists are there */
    for (int row = warp; row < n_row; row += W) {
        struct lists *const mine = &best[is_apart ? warp : row];
        if (is_apart) {
            mine->half[0][lane] = a.best[group_of(row, 0) * K_MAX + lane];
            mine->half[1][lane] = a.best[group_of(row, 1) * K_MAX + lane];
            __syncwarp();
        }
        select_slots(&a.s, mine->half[0], mine->half[1], chosen[warp], pair, a.pairs.n, first + row,
                     head);
    }
}

/* ---- launches -------------------------------------------------------------------------------- */

template <int V, int W> void launch_few_of(struct cuda *cu, const struct mma_args *a, dim3 grid)
{
    LAUNCH((few_kernel<V, W>), grid, dim3(W * LANES), query_bytes(a, 1), cuda_queue(cu), *a);
}

/* Where each block has a multiprocessor to itself, it gets twice the warps to select with. */
void launch_few(struct cuda *cu, const struct mma_args *a)
{
    const dim3 grid(static_cast<unsigned>(2 * a->n_key_padded / FEW_KEYS),
                    static_cast<unsigned>(a->s.n_head),
                    static_cast<unsigned>((a->s.query.rows + ROWS - 1) / ROWS));
    if (a->s.n_key > 16 * SELECT_WARP) {
        launch_few_of<64, WARPS>(cu, a, grid);
    } else if (grid.x * grid.y * grid.z > static_cast<unsigned>(cu->n_sm)) {
        launch_few_of<16, WARPS>(cu, a, grid);
    } else {
        launch_few_of<16, 2 * WARPS>(cu, a, grid);
    }
}

/* One launch after the other uses the same scratch. */
void launch_few_at_a_time(struct cuda *cu, const struct mma_args *a)
{
    for (int64_t first = 0; first < a->s.query.rows; first += FEW_ROWS) {
        const int64_t left = a->s.query.rows - first;
        const int64_t n = left < FEW_ROWS ? left : static_cast<int64_t>(FEW_ROWS);
        struct mma_args part = *a;
        part.s.query = tensor_rows(a->s.query, first, n);
        part.s.slots = tensor_rows(a->s.slots, first, n);
        part.s.weights = tensor_rows(a->s.weights, first, n);
        launch_few(cu, &part);
    }
}

} // namespace

void search_mma(struct cuda *cu, const struct search *s, const struct cuda_weight *keys)
{
    const struct mma_layout l = mma_layout(s->n_key, s->d, 2 * s->n_head);
    char *const at = static_cast<char *>(keys->data) + keys->split_at;
    const bool has_groups = reinterpret_cast<uintptr_t>(s->query.data) % 16 == 0 &&
                            (s->query.stride % 4 == 0 || s->query.rows == 1) && s->d % 4 == 0;
    const struct mma_args a = {
        .s = *s,
        .pairs = pairs_of(s->k_top),
        .keys = reinterpret_cast<const uint4 *>(at),
        .group_pieces = l.group_pieces,
        .n_block = l.n_block,
        .n_key_padded = l.n_key_padded,
        .has_groups = has_groups,
        .ranks = reinterpret_cast<uint32_t *>(at + l.rank_at),
        .best = reinterpret_cast<struct candidate *>(at + l.best_at),
        .arrived = reinterpret_cast<unsigned *>(at + l.counter_at),
    };
    if (s->query.rows <= FEW_ROWS || !search_many(cu, &a)) {
        launch_few_at_a_time(cu, &a);
    }
}

/* ---- packing --------------------------------------------------------------------------------- */

bool keys_can_split(int64_t rows, int64_t cols, int n_group)
{
    return n_group > 1 && n_group % 2 == 0 && rows / n_group <= N_KEY_MAX && cols <= D_MAX;
}

size_t keys_split_bytes(int64_t rows, int64_t cols, int n_group)
{
    return mma_layout(rows / n_group, cols, n_group).bytes;
}

void keys_split_pack(void *dst, const struct cuda_source *source, int n_group)
{
    const struct tensor *const host = &source->view;
    const int64_t n_key = host->rows / n_group;
    const struct mma_layout l = mma_layout(n_key, host->cols, n_group);
    memset(dst, 0, l.bytes);
    uint16_t *const packed = static_cast<uint16_t *>(dst);
    for (int64_t row = 0; row < host->rows; row++) {
        const int64_t key = row % n_key;
        const int64_t group = row / n_key * static_cast<int64_t>(l.group_pieces);
        for (int64_t c = 0; c < host->cols; c++) {
            const int64_t block = key / KEYS * l.n_block + c / COLUMNS;
            const int64_t piece =
                group + block * 2 * LANES + key % KEYS * PIECES + c % COLUMNS / PIECE;
            const float value = cuda_host_value(source, row, c);
            const uint16_t upper = bf16_round(value);
            packed[piece * PIECE + c % PIECE] = upper;
            packed[(piece + LANES) * PIECE + c % PIECE] = bf16_round(value - bf16_widen(upper));
        }
    }
}
