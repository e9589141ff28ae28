/* The inside of the CUDA backend: what its files share. README.md says which file does what.
 *
 * The table's ops (launch.cu) call the cuda_<op> functions below, which launch kernels on
 * cu->stream and return. A step in which every sequence has one row is recorded as a CUDA graph at
 * its first run and replayed from then on. Hence the rules for the cuda_<op> functions:
 *   - they depend on their arguments alone; what varies between steps of the same shape (positions,
 *     pages, requested outputs, n_top, list lengths) is read by the kernels from the step_view in
 *     device memory;
 *   - they have no effect on the host but the launches: while a step is recorded they run twice;
 *   - they never wait, allocate, free or copy to the host, and use no memory beyond their
 *     arguments' and what step_new and weight_new reserved;
 *   - after each launch they call cuda_check(cu, "op").
 * Pointers of tensors are device addresses. Views may start at any 4-byte address and have any
 * stride; 16-byte accesses are for those that allow them.
 *
 * Determinism: each element of a result is a fixed function of its own row (attention: sequence):
 * how a sum is split depends on its length, never on the number of rows, so alone, in chunks and in
 * a batch give the same bits. Which function it is may depend on cu->is_drawn. Only with fast math
 * may linear choose otherwise. */
#ifndef KERNELS_CUDA_CUDA_CUH
#define KERNELS_CUDA_CUDA_CUH

#include "kernels/cuda/portable.cuh"

extern "C" {
#include "kernels/backend.h"
}

/* ---- the step on the device ----------------------------------------------------------------- */

/* What kernels see of a step; lives in device memory at a fixed address for the life of the step,
 * is rewritten before each one. All pointers are device addresses and may differ from step to step.
 */
struct step_view {
    int32_t n_tok, n_seq, n_out, n_top;
    int32_t n_adjust, n_allow;
    int32_t n_page_max;                /* row length of page: what this step's longest needs; of a
                                        * ring, its pages at most */
    int32_t n_top_max;                 /* row length of top_id and top_logprob */
    const int32_t *token, *pos, *lang; /* [n_tok]; a token below 0: step_token_drawn */
    int32_t *drawn;                    /* [n_out_max] by output, of the last step that drew any */
    const int32_t *row_seq;            /* [n_tok] sequence of each row */
    const int32_t *seq_first;          /* [n_seq + 1] */
    const int32_t *page;               /* [n_seq, n_page_max] */
    const int32_t *out_row;            /* [n_out] and so on, as in struct step */
    const uint8_t *out_want;
    const int32_t *target;
    const struct sample_params *sample;
    const struct sample_adjust *adjust; /* [n_adjust] */
    const int32_t *allow;               /* [n_allow] */
    const int32_t *ablate_first;        /* [n_seq + 1] */
    const struct step_ablate *ablate;
    const int32_t *redirect_first; /* [n_seq + 1] */
    const struct step_redirect *redirect;
    int32_t *out_token; /* results: in the host's memory */
    float *out_logprob;
    int32_t *out_rank;
    float *out_entropy;
    int32_t *top_id; /* [n_out, n_top_max] */
    float *top_logprob;
};

enum { UNIT_PAGES = 16 };

/* The splits first .. end-1 of a row's attention, the work of one block of each head; those that
 * have no split are filled up with 0. */
struct __align__(16) attention_unit
{
    int32_t row, seq;
    int32_t n_pos; /* positions that the row sees */
    int32_t first, end;
    int32_t run;    /* splits of a part */
    int32_t part;   /* of the first split */
    int32_t n_unit; /* of the row */
    int32_t
        page[UNIT_PAGES]; /* of a drawn token: its first pages, which are read at once with it */
};

/* Up to 64 rows of requests, one after the other of a sequence, and the parts first .. end-1 of
 * what they see: the work of one block of each head in attention_mma.cu. */
struct __align__(16) attention_tile
{
    int32_t row, n_row, seq;
    int32_t n_split; /* that its last row sees any of */
    int32_t first, end;
    /* Of each head, that share the rows; their parts go to scratch if there are several. */
    int32_t n_block;
    int32_t part; /* in scratch, of the rows' first part: n_head items each */
};

/* Units lie behind the step's view, at the same address in each step, and behind them tiles. */
static inline const struct attention_unit *step_units(const struct step_view *view)
{
    constexpr size_t at = (sizeof(struct step_view) + 15) / 16 * 16;
    return reinterpret_cast<const struct attention_unit *>(reinterpret_cast<const char *>(view) +
                                                           at);
}

/* Scratch in device memory, reserved with the step by the sizes its users state (attention_scratch,
 * vocab_scratch). Contents do not outlive one op, but for counters, which each launch leaves at 0:
 * the memory is zeroed when the step is made. */
struct step_scratch {
    void *attention; /* parts */
    size_t attention_bytes;
    unsigned *arrived; /* of attention: counters */
    int n_unit;        /* of attention, in this step; 0: its rows are not spread */
    int n_tile;        /* of rows of requests; likewise */
    void *vocab;       /* outputs */
    size_t vocab_bytes;
};

struct cuda_step {
    struct step step;             /* first: the engine's pointer to it is ours. Host arrays */
    const struct step_view *view; /* device */
    struct step_scratch scratch;  /* device */
    void *inside;                 /* Owner: step.cu's own */
};

static inline struct cuda_step *cuda_step_of(const struct step *step)
{
    return reinterpret_cast<struct cuda_step *>(const_cast<struct step *>(step));
}

/* ---- the cache ------------------------------------------------------------------------------ */

/* A page holds KV_PAGE positions of all heads, [n_head][KV_PAGE][d_head], in k and in v pages. Its
 * elements are float or, of BF16, uint16_t: what reads or writes them is a template on that type T,
 * and computes in F32. */
__device__ __forceinline__ float widen(float value)
{
    return value;
}

__device__ __forceinline__ float widen(uint16_t value)
{
    return bf16_widen(value);
}

/* An F16 number of a table, which templates tell from a BF16 one. */
struct f16_bits {
    uint16_t bits;
};

__device__ __forceinline__ float widen(f16_bits value)
{
    return f16_widen(value.bits);
}

/* Into the cache. */
__device__ __forceinline__ void cache_store(float *to, float value)
{
    *to = value;
}

__device__ __forceinline__ void cache_store(uint16_t *to, float value)
{
    *to = static_cast<uint16_t>(bf16_pair(value, 0));
}

/* Four columns, which start at a multiple of their size. */
__device__ __forceinline__ float4 widen_group(const float *at)
{
    return *reinterpret_cast<const float4 *>(at);
}

__device__ __forceinline__ float4 widen_group(const uint16_t *at)
{
    return bf16_widen_four(*reinterpret_cast<const uint2 *>(at));
}

/* ---- 16-bit operands ------------------------------------------------------------------------ */

/* The kernels of products by 16-bit weights are templates on their type, BF16 or F16, which differ
 * in these alone. */
template <enum dtype type> __device__ __forceinline__ uint32_t operand_pair(float x, float y)
{
    static_assert(type == DTYPE_BF16 || type == DTYPE_F16, "16 bits");
    return type == DTYPE_F16 ? f16_pair(x, y) : bf16_pair(x, y);
}

template <enum dtype type>
__device__ __forceinline__ void operand_mma(float (&d)[4], const uint32_t (&a)[4],
                                            const uint32_t (&b)[2])
{
    static_assert(type == DTYPE_BF16 || type == DTYPE_F16, "16 bits");
    if constexpr (type == DTYPE_F16) {
        mma_f16(d, a, b);
    } else {
        mma_bf16(d, a, b);
    }
}

/* ---- warps ---------------------------------------------------------------------------------- */

/* The sum over a warp; every lane gets the same bits, because both sides of an exchange add the
 * same two numbers. */
__device__ __forceinline__ float warp_sum(float value)
{
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
        value += __shfl_xor_sync(0xffffffffu, value, step);
    }
    return value;
}

/* ---- weights -------------------------------------------------------------------------------- */

/* Of F32, BF16, F16, I8 or Q4, in device memory or in the host's. */
struct cuda_weight {
    struct weight head; /* first: the models' pointer to it is ours */
    void *data;         /* device address, also for HOST (mapped pinned memory) */
    void *pinned;       /* Owner with HOST: the host address of data; else NULL */
    size_t bytes;       /* of data, padding included */
    size_t split_at;    /* KEYS: the byte of data where keys_split_pack's begin; 0: none */
    bool is_row_major;  /* of a MATRIX: as cuBLASLt reads it */
    /* Owner: of a MATRIX that is split, what rows of requests are multiplied by: linear_split.cu;
     * else NULL */
    struct weight *split;
    /* TABLE: row-major, rows of table_row_bytes without gaps, at least 16-byte aligned where cols
     * allow. Of I8 and Q4, behind them, at cuda_table_scales, the scale of each row: F32, or fp16
     * of Q4. MATRIX, KEYS: as linear_pack and keys_pack lay them out. */
};

static inline const struct cuda_weight *cuda_weight_of(const struct weight *w)
{
    return reinterpret_cast<const struct cuda_weight *>(w);
}

/* What a weight is made of. */
struct cuda_source {
    struct tensor view;            /* of host memory */
    const float *row_scale;        /* Borrowed: [rows] of I8, else NULL */
    const uint16_t *row_scale_f16; /* Borrowed: [rows] of Q4, else NULL */
};

/* Bytes of a table's row: of Q4 half of one a column. */
static inline size_t table_row_bytes(const struct weight *w)
{
    const int64_t n = w->dtype == DTYPE_Q4 ? w->cols / 2 : w->cols;
    return static_cast<size_t>(n) * dtype_bytes(w->dtype);
}

/* The byte of an I8 or Q4 table at which its scales begin. */
static inline size_t cuda_table_scales(const struct weight *w)
{
    return (static_cast<size_t>(w->rows) * table_row_bytes(w) + 15) / 16 * 16;
}

/* ---- norms ---------------------------------------------------------------------------------- */

/* A layer norm y of x (+ r), or of the rows that an embedding would give x. */
struct norm_op {
    struct tensor y, x, r, gamma, beta; /* r: data NULL, nothing is added */
    float eps;
    const struct step_view *view;          /* of the embedding; NULL: there is none */
    const struct weight *tok, *pos, *lang; /* Borrowed: its tables; pos and lang may be NULL */
};

/* ---- the backend ---------------------------------------------------------------------------- */

struct cuda_graphs; /* graph.cu */
struct cuda_trace;  /* trace.cu */

/* Bytes of dynamic shared memory that a kernel has been allowed. */
struct cuda_kernel_shared {
    const void *kernel;
    size_t bytes;
};
enum { CUDA_KERNEL_MAX = 256 }; /* of such kernels; there are some 130 */

/* What the matrices of weights are: F32 alone means that nothing is to be rounded. The last of
 * those that there are: beside F16 there may be BF16, which F32 ones are split into. */
enum cuda_dense { CUDA_DENSE_NONE, CUDA_DENSE_F32, CUDA_DENSE_BF16, CUDA_DENSE_F16 };

struct cuda {
    struct backend be; /* first */
    int device;
    int n_sm;
    int sm_version;    /* 90 = compute capability 9.0 */
    int code_version;  /* that the kernels in use were compiled for, before any translation */
    size_t shared_max; /* bytes of dynamic shared memory a block may opt into */
    cudaStream_t stream;
    bool overlaps;               /* kernels: see launch_queue */
    bool fuses;                  /* ops: launch.cu */
    bool splits;                 /* what may be: pkm_search_mma.cu, linear_split.cu */
    bool attends_mma;            /* rows of requests, where it may: attention_mma.cu */
    bool attends_drawn;          /* drawn tokens by attention_drawn.cu; else as attention_tile.cu */
    bool searches_flat;          /* flat keys by pkm_search_flat.cu; else by search_any */
    bool uses_gemm;              /* of many rows, where it may; else gemv multiplies them */
    enum cuda_dense dense;       /* matrices so far */
    bool is_fast;                /* fast math: products may depend on the number of rows */
    bool uses_lt;                /* where it may; else own kernels multiply */
    bool is_drawn;               /* ops that are launched now: step.is_drawn of the open step */
    struct norm_op held;         /* launch.cu: called and not launched yet; y.data NULL: nothing */
    struct linear_lt *lt;        /* Owner: cuBLASLt; NULL: it is not open */
    struct linear_state *linear; /* Owner: linear.cu's own; NULL until a matrix is made */
    struct cuda_graphs *graphs;  /* Owner */
    struct cuda_trace *trace;    /* Owner: trace.cu's own; NULL unless ops are timed */
    bool names_ops;              /* for a profiler */
    struct cuda_kernel_shared shared[CUDA_KERNEL_MAX];
    int n_shared;
    void *staging; /* pinned, mapped block that tables pass through; its halves take turns */
    size_t staging_bytes;
    cudaEvent_t staging_read[2];    /* recorded when the device has read a half */
    bool *fast_path[FAST_PATH_MAX]; /* be.fast_path's: the field that says whether it is used */
    struct err failure;             /* the first one; code ERR_OK while all is well */
};

static inline struct cuda *cuda_of(struct backend *be)
{
    return reinterpret_cast<struct cuda *>(be);
}

/* For LAUNCH. */
static inline struct launch_queue cuda_queue(const struct cuda *cu)
{
    return {cu->stream, cu->overlaps};
}

/* Records the failure of op (ERR_DEVICE; ERR_MEMORY for an allocation) unless one is recorded.
 * Returns whether status was success. */
bool cuda_ok(struct cuda *cu, cudaError_t status, const char *op);
/* cuda_ok of cudaGetLastError(): after each launch. */
void cuda_check(struct cuda *cu, const char *op);
void cuda_fail(struct cuda *cu, enum err_code code, const char *op, const char *what);

/* Adds to be.fast_path what field, of cu, says the use of; once. */
void cuda_fast_path(struct cuda *cu, const char *name, bool is_exact, bool *field);
/* Ends its use for good. */
void cuda_fast_path_end(struct cuda *cu, bool *field);

/* Lets op's kernel use so many bytes of dynamic shared memory; false after a failure. What a kernel
 * may use never shrinks: a graph that was captured needs what it needed then. Kernels that may have
 * them cost a look into the table. */
bool cuda_shared_at_least(struct cuda *cu, const void *kernel, size_t bytes, const char *op);

template <typename K>
static inline bool cuda_shared(struct cuda *cu, K *kernel, size_t bytes, const char *op)
{
    return cuda_shared_at_least(cu, reinterpret_cast<const void *>(kernel), bytes, op);
}

/* ---- ops: one function each, by file -------------------------------------------------------- */

/* embed.cu, norm.cu, outputs_gather.cu, attention_store.cu */
void cuda_embed(struct cuda *cu, struct tensor y, const struct step_view *view,
                const struct weight *tok, const struct weight *pos, const struct weight *lang);
void cuda_norm(struct cuda *cu, const struct norm_op *op);
const char *norm_op_name(const struct norm_op *op); /* for profilers and errors */
void cuda_gather(struct cuda *cu, struct tensor y, struct tensor x, const struct step_view *view,
                 int first);
void cuda_kv_store(struct cuda *cu, struct tensor k_pages, struct tensor v_pages, struct tensor k,
                   struct tensor v, const struct step_view *view, int n_head);

/* attention.cu. n_tok = y.rows; n_page_max is that of the step's limits. k and v [n_tok,
 * n_head·d_head] of rows that are each a sequence of their own are stored as by kv_store before
 * they are attended to; data NULL: they have been. y overlaps neither. */
void cuda_attention(struct cuda *cu, struct tensor y, struct tensor q, struct tensor k_pages,
                    struct tensor v_pages, struct tensor k, struct tensor v,
                    const struct step_view *view, const struct step_scratch *scratch,
                    int n_page_max, int n_head, float scale);

/* attention_unit.cu. Of scratch for a step: bytes for parts, and how many counters. */
size_t attention_scratch(const struct step_limits *limits);
size_t attention_counters(const struct step_limits *limits);
/* Units of a step of n_row rows, which nothing else decides; 0: it has none. At most so many. */
int attention_unit_count(const struct cuda *cu, const struct step_limits *limits, int n_row,
                         bool is_drawn);
int attention_unit_max(const struct cuda *cu, const struct step_limits *limits);
/* Shares the rows of a step out among so many units. */
void attention_units(const struct step *step, struct attention_unit *unit, int n_unit);
/* The tiles of a step of requests, with so many bytes for parts: their number, and if tile is not
 * NULL, they themselves. At most attention_tile_max. */
int attention_tiles(const struct cuda *cu, const struct step *step, size_t part_bytes,
                    struct attention_tile *tile);
int attention_tile_max(const struct cuda *cu, const struct step_limits *limits);

/* span.cu. y has rows. */
void cuda_span_attention(struct cuda *cu, struct tensor y, struct tensor q, struct tensor k_pages,
                         struct tensor v_pages, const struct step_view *view,
                         const struct span_shape *shape);

/* linear.cu. Where a product's result goes: to y, or, as the next product alone reads it, to a room
 * for rounded rows where there is one. */
enum linear_result { LINEAR_TO_Y, LINEAR_TO_PRODUCT };

/* linear.cu. Bytes that a packed matrix needs, and packing on the host: dst[bytes] ← rows of host
 * (any floating type). weight_new calls linear_reserve for each matrix before it is packed: it says
 * whether it is to be row-major, and makes room on the device for the rows of a call, at addresses
 * that change when a wider matrix comes, so the device must be idle then and no graph be kept.
 * close calls linear_release. */
void cuda_linear(struct cuda *cu, struct tensor y, struct tensor x, const struct weight *w,
                 struct tensor bias, enum act act, enum linear_result result);
/* The same of the rows x = norm's y, which are yet to be normed: each block of the product does it
 * for itself, to norm.cu's bits, and one writes y. Whether it can, linear_takes_norm says: y then
 * has few rows and overlaps neither x nor r of the norm, nor does the product's y any of them. */
void cuda_linear_normed(struct cuda *cu, struct tensor y, const struct norm_op *norm,
                        const struct weight *w, struct tensor bias, enum act act,
                        enum linear_result result);
bool linear_takes_norm(const struct cuda *cu, struct tensor y, const struct norm_op *norm,
                       const struct weight *w);
size_t linear_bytes(int64_t n_out, int64_t n_in, enum dtype dtype);
void linear_pack(void *dst, const struct cuda_source *source, enum dtype dtype, bool row_major);
enum err_code linear_reserve(struct cuda *cu, struct cuda_weight *w, struct err *err);
void linear_release(struct cuda *cu);

/* linear_split.cu: dst[rows, 3·cols] BF16 ← an F32 matrix as rows of requests are multiplied by it,
 * where it may be split. Not of every shape. */
bool linear_can_split(const struct weight *w);
void linear_split_pack(uint16_t *dst, const struct cuda_source *source);

/* Results that only a product reads are left rounded, as it would round them, by the op that
 * computes them. An op gets room for y's rows [y.rows, y.cols] without gaps, or none: then it
 * leaves them in F32 alone, and the product rounds them. What is in the room counts for the op that
 * is launched next, and if that is a product that reads it, for the one after it: run (launch.cu)
 * calls linear_next. */
struct room {
    uint16_t *data;   /* NULL: none */
    enum dtype dtype; /* of the model's matrices (dense), BF16 or F16 */
};
struct room linear_room(struct cuda *cu, struct tensor y);
void linear_next(struct cuda *cu);
/* A weight is about to be freed. */
void linear_forget_order(struct cuda *cu);

/* Into a room that there is: a number, or four that begin at a multiple of four. */
__device__ __forceinline__ void room_store(const struct room &room, int64_t at, float value)
{
    room.data[at] =
        static_cast<uint16_t>(room.dtype == DTYPE_F16 ? f16_pair(value, 0) : bf16_pair(value, 0));
}

__device__ __forceinline__ void room_store_four(const struct room &room, int64_t at, float4 four)
{
    *reinterpret_cast<uint2 *>(room.data + at) =
        room.dtype == DTYPE_F16 ? make_uint2(f16_pair(four.x, four.y), f16_pair(four.z, four.w))
                                : make_uint2(bf16_pair(four.x, four.y), bf16_pair(four.z, four.w));
}

/* linear_lt.cu. Opens cuBLASLt as cu->lt: with fast math before any weight is made, else when the
 * first one is that it may multiply by. ERR_UNSUPPORTED where there is none, which says what to do
 * about it and leaves cu->lt NULL. close takes NULL. */
enum err_code linear_lt_open(struct cuda *cu, struct err *err);
void linear_lt_say(struct cuda *cu); /* who multiplies, in be.products */
void linear_lt_close(struct cuda *cu);

/* pkm_search.cu */
void cuda_pkm_search(struct cuda *cu, struct tensor slots, struct tensor weights,
                     struct tensor query, const struct weight *keys, const struct pkm_shape *shape);
size_t keys_bytes(int64_t rows, int64_t cols, int n_group);
void keys_pack(void *dst, const struct cuda_source *source, int n_group);

/* pkm_search_mma.cu: keys once more, as sums of two BF16 numbers, and what their search works in.
 * At a multiple of 16 bytes. Not of every shape. */
bool keys_can_split(int64_t rows, int64_t cols, int n_group);
size_t keys_split_bytes(int64_t rows, int64_t cols, int n_group);
void keys_split_pack(void *dst, const struct cuda_source *source, int n_group);

/* norm.cu, pkm_rescore.cu */
void cuda_l2_norm(struct cuda *cu, struct tensor y, struct tensor x, int n_run);
void cuda_pkm_rescore(struct cuda *cu, struct tensor slots, struct tensor weights,
                      struct tensor slot_map, const struct pkm_rescore *rescore);

/* norm.cu, rope.cu, gate.cu, pkm_experts.cu */
void cuda_rms_norm(struct cuda *cu, struct tensor y, struct tensor sum, struct tensor x,
                   struct tensor r, struct tensor gamma, float eps);
void cuda_head_norm(struct cuda *cu, struct tensor x, struct tensor gamma, int n_head, float eps);
void cuda_rope(struct cuda *cu, struct tensor x, struct tensor table, const struct step_view *view,
               int n_head);
void cuda_gate(struct cuda *cu, struct tensor y, struct tensor x, struct tensor g,
               enum gate_kind kind);
void cuda_pkm_experts(struct cuda *cu, struct tensor y, struct tensor weights, struct tensor slots,
                      struct tensor x, const struct weight *experts, const struct step_view *view,
                      int memory);

/* pkm_ablate.cu */
void cuda_pkm_ablate(struct cuda *cu, struct tensor weights, struct tensor slots,
                     const struct step_view *view, const struct pkm_place *place);

/* pkm_read.cu. view NULL: nothing is redirected; else memory is the redirections'. */
void cuda_pkm_read(struct cuda *cu, struct tensor y, struct tensor residual, struct tensor slots,
                   struct tensor weights, const struct weight *values, const struct step_view *view,
                   int memory);

/* outputs_softmax.cu */
void cuda_log_softmax(struct cuda *cu, struct tensor y, struct tensor base);

/* outputs.cu */
void cuda_outputs(struct cuda *cu, struct tensor logits, const struct step_view *view,
                  const struct step_scratch *scratch, int first);
size_t vocab_scratch(const struct step_limits *limits);

/* The element at [row, col] as F32. resource.cu */
float cuda_host_value(const struct cuda_source *source, int64_t row, int64_t col);
/* dst[n] of dtype, F32, BF16 or F16 ← columns col .. col+n-1 of a row. A model has some 10^8 of
 * them. */
void cuda_host_values(void *dst, const struct cuda_source *source, int64_t row, int64_t col,
                      int64_t n, enum dtype dtype);

#endif
