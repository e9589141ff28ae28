/* What the files of linear share: the sum's definition, the arguments of its kernels, the layout of
 * packed weights. What is said of BF16 weights, here and in names, holds for F16 ones as well: the
 * same kernels, layouts and choices, which differ in the instruction and in what rows are rounded
 * to.
 *
 * The sum. y[r, o] = act(Σ_k x[r, k]·w[o, k] + bias[o]) is one fixed function of row r of x and row
 * o of w, for every number of rows, every kernel and every block that computes it:
 *   - k is cut into chunks: 128 with 16-bit weights, 64 with F32. The last may be shorter.
 *   - A chunk is one chain that starts at 0. F32: one fmaf per k, ascending. BF16, F16: x rounded
 *     to nearest even, then mma instructions of 16 products each, ascending by blocks of 32 k: of
 *     block b the first instruction takes the k with (k - 32·b) % 8 < 4, the second the others.
 *   - The chunks' sums are added in ascending order to a total that starts at 0, then the bias is
 *     added, then the activation applied.
 *   - k from n_in to the end of its block (BF16: 32, F32: 16) multiplies zeros of both operands.
 * Chunks let the warps of a block share the k of few rows; with many rows a chunk's border costs an
 * addition per output. 128 of BF16 are 8 instructions in a row, some 33 cycles each, and the
 * columns that a warp norms at a time. Of many rows' loop the border is at most 12 % of the time to
 * issue (3 instructions per 4 matrix instructions, of 6 cycles or more), which another warp's
 * matrix instructions hide in part. Borders also bound what tensor cores lose: they cut off where
 * an F32 addition would round.
 *
 * Why blocks of 32 k. An mma takes from lane t of four the k's 2t, 2t+1, 2t+8, 2t+9. Which k of the
 * matrices stand there is ours to say as long as both operands agree, so lane t's share of two
 * instructions is k 8t .. 8t+7 of a block of 32: 16 consecutive bytes of a BF16 row of x. A warp
 * reads its fragments with 16-byte loads from rows as they are, without ldmatrix or shuffles.
 *
 * Layouts of weights (rows padded with zeros to a multiple of 16, k to the end of a block):
 *   - BF16, packed: [n_out/16][n_in/32][2 instructions][32 lanes][16 bytes]. Lane (g, t), which
 *     is (lane / 4, lane % 4), of instruction i has outputs g and g+8 at k', k'+1, then both at
 *     k'+2, k'+3, where k' = 8t + 4i in the block: the mma's fragment, in its registers' order.
 *   - F32, packed: [n_out/16][n_in/4][16 outputs][4 k].
 *   - row-major: [n_out][n_in], of weights that cuBLASLt multiplies by, which knows no layout that
 *     the packed ones are. Of BF16 read directly, a lane's two 16 bytes are k 8t to 8t+7 of output
 *     g and of g+8, and registers change places; F32 is packed on its way into shared memory, by
 *     the kernels for few rows alone. */
#ifndef KERNELS_CUDA_LINEAR_CUH
#define KERNELS_CUDA_LINEAR_CUH

#include "kernels/cuda/norm.cuh"

enum {
    LINEAR_TILE = 16,               /* outputs of one tile of packed weights */
    LINEAR_BLOCK_BF16 = 32,         /* k of a block */
    LINEAR_BLOCK_F32 = 16,          /* likewise */
    LINEAR_CHUNK_BF16 = 128,        /* k of a chunk */
    LINEAR_CHUNK_F32 = 64,          /* likewise */
    LINEAR_CHUNK_BLOCKS = 4,        /* blocks of a chunk of BF16 */
    LINEAR_TILE_BLOCK_BYTES = 1024, /* of a tile in one block: BF16 and F32 alike */
    LT_ROWS = 16,                   /* calls of cuBLASLt have a multiple of so many rows */
    GEMV_WARPS_MAX = 8,             /* of a block, but of one that norms its rows */
    GEMV_F32_ROWS = 8,              /* so many gemv reads in F32 and rounds itself */
    GEMV_FEW_ROWS = 8, /* so many, rounded or yet to be normed, have kernels of their own */
    GEMV_IN_MAX =
        152 * 128 /* columns of BF16 weights that gemv takes: their sums lie in shared memory */
};

/* Where 16 bytes of weights are stored: of tile i, block b, half h (outputs g or g+8; packed BF16:
 * instruction), output g, piece t of its k in the block (packed BF16: lane (g, t)):
 * w + i·tile + b·block + h·half + g·row + t·piece. */
struct linear_map {
    int64_t tile;
    int32_t block, half, row, piece;
};

struct linear_args {
    float *y; /* [n_tok, n_out] */
    int64_t y_stride;
    const void *
        x; /* [n_tok, n_in] F32 or, of weights of 16 bits, rounded to theirs in whole blocks of k */
    int64_t x_stride;  /* elements */
    const float *bias; /* [n_out] or NULL */
    const unsigned char *w;
    struct linear_map map;
    int n_tok, n_in, n_out;
    int n_x;     /* columns of x before it is prepared: n_in, or a third of it, to be split */
    int n_block; /* of k */
    int n_tile;  /* of outputs */
    enum act act;
    uint16_t *rounded; /* instead of y: [n_tok, n_out] as the weights; NULL: to y */
    bool is_row_major; /* weights */
    bool is_f16;       /* weights */
    bool x_is_aligned; /* its rows allow 16-byte loads */
    bool x_is_rounded;
    bool starts_early; /* drawn tokens: weights need not wait for the kernel before to end */
    const unsigned char *next;       /* drawn tokens: what the next product reads, or NULL */
    uint32_t next_bytes, next_slice; /* all, of a block */
    uint32_t zero;                   /* 0, which the compiler does not know: gemm.cu */
    struct norm_args norm; /* few rows, with its d not 0: x is what this will make of them */
};

/* The end of every output's sum. */
__device__ __forceinline__ float linear_finish(float total, float bias, enum act act)
{
    const float z = total + bias;
    if (act == ACT_RELU) {
        return z > 0 ? z : 0;
    }
    const float half = 0.5f * z;
    return act == ACT_GELU ? fmaf(half, erff(z * 0.70710678118654752f), half) : z;
}

/* GELU within 2^-21 of |z|, of a third of erff's instructions: of those a pass over many results
 * would be bound by, not by memory. With E(a) = erfc(a / √2) it is max(z, 0) - |z|/2 · E(|z|),
 * nothing of which cancels where z is low; E by Abramowitz and Stegun 7.1.26, whose error is
 * 1.5e-7. Of ∞ it is ∞, of -∞ 0, of NaN NaN. */
__device__ __forceinline__ float gelu_quick(float z)
{
    const float a = fminf(fabsf(z), 16.0f); /* from 14 on E is 0 */
    const float t = reciprocal_quick(fmaf(0.23164189f, a, 1.0f));
    float e = fmaf(1.061405429f, t, -1.453152027f);
    e = fmaf(e, t, 1.421413741f);
    e = fmaf(e, t, -0.284496736f);
    e = fmaf(e, t, 0.254829592f) * t;
    e *= exp2_quick(a * a * -0.72134752f);
    return fmaf(-0.5f * a, e, z < 0 ? 0 : z);
}

/* The same of weights of 16 bits, whose operands are rounded to these. */
__device__ __forceinline__ float linear_finish_16(float total, float bias, enum act act)
{
    return act == ACT_GELU ? gelu_quick(total + bias) : linear_finish(total, bias, act);
}

/* Where a kernel of ours leaves it. */
__device__ __forceinline__ void linear_store(const struct linear_args &a, int tok, int out,
                                             float value)
{
    if (a.rounded != NULL) {
        room_store({a.rounded, a.is_f16 ? DTYPE_F16 : DTYPE_BF16},
                   static_cast<int64_t>(tok) * a.n_out + out, value);
    } else {
        a.y[tok * a.y_stride + out] = value;
    }
}

/* Asks for what the next product reads, a slice by each block: before grid_wait. So memory is
 * busy while this product waits for its rows and adds up, and the next one finds its weights in the
 * second-level cache. */
__device__ __forceinline__ void linear_ask_next(const struct linear_args &a)
{
    const uint32_t first = (blockIdx.y * gridDim.x + blockIdx.x) * a.next_slice;
    if (threadIdx.x == 0 && first < a.next_bytes) {
        prefetch_l2_many(a.next + first, min(a.next_slice, a.next_bytes - first));
    }
}

/* The arguments of a launch: what comes next in slices for its blocks. */
static inline struct linear_args linear_sliced(const struct linear_args *a, dim3 grid)
{
    struct linear_args args = *a;
    const uint32_t n_block = grid.x * grid.y;
    args.next_slice = ((a->next_bytes + n_block - 1) / n_block + 15) / 16 * 16;
    return args;
}

struct linear_map linear_map_of(int64_t n_in, enum dtype dtype, bool row_major); /* linear.cu */

/* gemv.cu, gemm.cu: whole calls on args; gemm reads no row-major F32 weights and no x in F32 beside
 * weights of 16 bits, nor does gemv of more than GEMV_F32_ROWS. */
void gemv(struct cuda *cu, const struct linear_args *args, enum dtype dtype);
void gemm(struct cuda *cu, const struct linear_args *args, enum dtype dtype);
/* gemv_few.cu: gemv's call of up to GEMV_FEW_ROWS rows by row-major weights of 16 bits, but of some
 * shapes; of rows that are yet to be normed whatever the shape. */
bool gemv_is_few(const struct cuda *cu, const struct linear_args *args, enum dtype dtype);
void gemv_few(struct cuda *cu, const struct linear_args *args);
/* gemv_f32.cu: gemv's call with F32 weights. */
void gemv_run_f32(struct cuda *cu, const struct linear_args *args);

/* linear_choose.cu, without fast math: whether cuBLASLt multiplies rows of requests by weights of
 * w's type, of 16 bits, and shape, in calls of up to n_max rows, a multiple of LT_ROWS. Opens
 * cuBLASLt at the first weight and says in be.products how it is, and who multiplies by each shape.
 * The device is idle. */
enum err_code linear_lt_takes(struct cuda *cu, const struct weight *w, int64_t n_max, bool *takes,
                              struct err *err);
/* linear_lt.cu: y = act(x·Wᵀ + bias) by cuBLASLt; x as gemm reads it, W row-major. Without fast
 * math x has zeros up to a multiple of LT_ROWS. False: it could not, and y is to be computed by
 * other kernels. */
bool linear_lt_run(struct cuda *cu, const struct linear_args *args, enum dtype dtype);

/* linear_split.cu: to[n_row, 3·n_x] ← rows of x split, zeros from n_tok on; for gemv (few) as F32,
 * else BF16. */
void linear_split_rows(struct cuda *cu, void *to, const struct linear_args *args, int n_row,
                       bool few);

/* What an op left in a room for rounded rows: those of a tensor at this address. */
struct linear_rounded {
    const void *of; /* NULL: none */
    int64_t of_stride, rows, cols;
    enum dtype dtype;
    const uint16_t *data; /* [rows and what is missing of LT_ROWS, cols] */
};

enum { LINEAR_ROOMS = 2 }; /* an op reads one and fills the other */

/* A weight that rows were multiplied by, and the one that came next. */
struct linear_order {
    const struct cuda_weight *weight, *next; /* Borrowed */
};

enum {
    LINEAR_ORDER_MAX = 512,
    LINEAR_NEXT_MAX =
        12 << 20 /* bytes of it that are asked for: of what is larger, its beginning */
};

struct linear_state {
    uint16_t *room[LINEAR_ROOMS]; /* Owner: device memory for rounded rows */
    size_t room_bytes[LINEAR_ROOMS];
    struct linear_rounded ready;   /* by the op before */
    struct linear_rounded leaving; /* by this op */
    struct linear_order
        order[LINEAR_ORDER_MAX]; /* in which products follow one another, as seen so far */
    int n_order, last;           /* last: the place of the latest product's; -1: none */
    void *x;                     /* Owner: device memory for a pass of prepared rows */
    size_t x_bytes;
    void *y; /* Owner: device memory for LT_ROWS rows of F32 results, with cuBLASLt */
    size_t y_bytes;
    void *bias; /* Owner: device memory for a bias, where cuBLASLt could not read it in its place */
    size_t bias_bytes;
};

#endif
