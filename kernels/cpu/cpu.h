/* The CPU backend, inside.
 *
 * An op is cut into items (panels of weights, tiles of rows, row and head, blocks of the
 * vocabulary), the pool's threads take them, and the kernels of one instruction set (simd/) do
 * them. What an item is depends on shapes, never on who does it: results are the same bits for any
 * number of threads.
 *
 * cpu.c opens the backend and reserves memory; machine.c knows cores, memory, instruction sets and
 * rates; pool.c has the threads; weight.c packs. The ops are in files of their own names, drawing
 * by rank in sample_rank.c. */
#ifndef KERNELS_CPU_CPU_H
#define KERNELS_CPU_CPU_H

#include "kernels/cpu/pool.h"
#include "kernels/cpu/simd/kernels.h"
#include "kernels/host/host.h"
#include "kernels/ref/ref.h"

enum {
    LOGIT_BLOCKS = 32, /* blocks of a row of logits, at most */
    DRAW_SAMPLE = 64,  /* tokens that are taken as a sample of all in a search by rank */
};

struct cpu_weight {
    struct weight head; /* first: the models' pointer to it is ours */
    /* MATRIX and KEYS: panels of 32-bit words (simd/kernels.h), those of a group after each other;
     * TABLE: rows of row_bytes. */
    const void *data;
    void *owned; /* Owner: the weight; NULL with PLACEMENT_MMAP */
    size_t owned_bytes;
    int64_t row_bytes;      /* TABLE */
    enum dtype stored;      /* of a TABLE's rows, with PLACEMENT_MMAP maybe F16; of panels' words */
    const float *row_scale; /* TABLE: [rows] of I8; else NULL */
    const uint16_t *row_scale_f16; /* TABLE: [rows] of Q4; else NULL */
    bool is_split; /* MATRIX and KEYS, for the matrix unit: packed as sums of two BF16 numbers; or
                    * stored as BF16, because every number is one exactly, and multiplied by rows
                    * that are such sums */
};

/* Words of n elements of a cache's pages. */
static inline int64_t cpu_page_words(struct tensor pages, int64_t n)
{
    return n * (int64_t)dtype_bytes(pages.dtype) / (int64_t)sizeof(float);
}

/* The first word of a page. */
static inline float *cpu_page(struct tensor pages, int64_t page)
{
    return (float *)pages.data + page * cpu_page_words(pages, pages.stride);
}

/* Consecutive rows of one sequence that attention takes together. */
struct row_block {
    int32_t seq, row, n_row;
};

/* A block of the logits of each row that a product computes. */
struct logit_rows {
    struct logit_block block[GEMM_ROWS];
    struct logit_more more[GEMM_ROWS];
};

/* Memory that ops work in, reserved when a weight or a step is made and grown to the largest need.
 * Guard: the calling thread outside of pool_for; inside, each thread has its slice or item. */
struct scratch {
    void *data; /* Owner: the backend */
    size_t bytes;
};

/* A thread's scratch for a row of logits. */
struct vocab_scratch {
    float *z;                  /* [n_vocab] adjusted logits */
    float *share;              /* [n_vocab] of all tokens */
    struct logit_room room[2]; /* for n_vocab of them */
    struct select_scratch select;
};

struct cpu_backend {
    struct backend base; /* first: the engine's pointer to it is ours */
    const struct simd_kernels *simd;
    enum gemm_bf16 bf16;         /* struct gemm */
    float x_scale[GEMM_ROWS];    /* of rows of x packed as INT8 */
    struct pool *pool;           /* Owner */
    struct scratch words;        /* packed rows of x: GEMM_ROWS rows of the widest weight */
    struct scratch hidden_words; /* the same, of ffn's hidden layer */
    struct scratch thread;       /* n_thread slices of slice_bytes */
    size_t slice_bytes;          /* scratch of one thread */
    struct scratch blocks;       /* row_block [n_tok_max] of the step begun last */
    struct scratch row_seq;      /* int32_t [n_tok_max]: sequence of each row */
    struct scratch goals;        /* logit_goal [n_out_max] */
    struct scratch parts;        /* logit_part [n_out_max, LOGIT_BLOCKS] */
    int n_block;
};

static inline struct cpu_backend *cpu_of(struct backend *be)
{
    return (struct cpu_backend *)be;
}

static inline const struct cpu_weight *cpu_weight_of(const struct weight *w)
{
    return (const struct cpu_weight *)w;
}

/* Thread number thread's own scratch. */
static inline void *cpu_slice(const struct cpu_backend *cpu, int thread)
{
    return (char *)cpu->thread.data + (size_t)thread * cpu->slice_bytes;
}

/* Largest number of best tokens that an op selects. */
static inline size_t cpu_select_max(const struct step_limits *limits)
{
    const size_t n_top = (size_t)limits->n_top_max;
    return n_top > DRAW_SAMPLE ? n_top : DRAW_SAMPLE;
}

/* Blocks in a row of logits: whole panels, and few enough that a block is worth merging its
 * sums. */
static inline int cpu_n_block(int n_vocab)
{
    enum { PANELS = 16 };
    const int n = gemm_n_panel(n_vocab) / PANELS;
    return n < 1 ? 1 : n < LOGIT_BLOCKS ? n : LOGIT_BLOCKS;
}

/* First panel of a block; block cpu_n_block starts where the panels end. */
static inline int cpu_block_panel(int n_vocab, int block)
{
    return (int)((int64_t)gemm_n_panel(n_vocab) * block / cpu_n_block(n_vocab));
}

/* First token of a block; block cpu_n_block starts where the vocabulary ends. */
static inline int cpu_block_first(int n_vocab, int block)
{
    return block < cpu_n_block(n_vocab) ? cpu_block_panel(n_vocab, block) * PANEL : n_vocab;
}

static inline struct logit_goal *cpu_goals(const struct cpu_backend *cpu)
{
    return cpu->goals.data;
}

/* The blocks of a row. */
static inline struct logit_part *cpu_parts(const struct cpu_backend *cpu, int row)
{
    return (struct logit_part *)cpu->parts.data + (size_t)row * LOGIT_BLOCKS;
}

/* In a thread's slice: the partial sums of a product, or one packed row. struct logit_rows
 * follows. */
static inline size_t cpu_linear_slice_bytes(int n_in)
{
    const size_t sum_bytes = (size_t)GEMM_SUM_PANELS * GEMM_ROWS * PANEL * sizeof(float);
    const size_t row_bytes = gemm_row_words(n_in) * sizeof(uint32_t);
    return row_bytes > sum_bytes ? row_bytes : sum_bytes;
}

/* Ops whose rows are independent hand out CPU_ITEM_ROWS rows at a time; if there are few elements,
 * the calling thread does them alone. cpu.c */
enum { CPU_ITEM_ROWS = 4 };
void cpu_for_rows(struct cpu_backend *cpu, struct tensor y, pool_fn *fn, void *arg);

/* The row of t behind the last one of items first .. first+n-1. */
static inline int64_t cpu_end_row(struct tensor t, int first, int n)
{
    const int64_t end = ((int64_t)first + n) * CPU_ITEM_ROWS;
    return end < t.rows ? end : t.rows;
}

/* The rows of t in items first .. first+n-1. */
static inline struct tensor cpu_item_rows(struct tensor t, int first, int n)
{
    const int64_t row = (int64_t)first * CPU_ITEM_ROWS;
    return tensor_rows(t, row, cpu_end_row(t, first, n) - row);
}

/* sample.c */
struct vocab_scratch cpu_vocab_scratch(const struct cpu_backend *cpu, int thread,
                                       const struct step_limits *limits);

/* cpu.c */
enum err_code cpu_reserve(struct scratch *scratch, size_t bytes, const char *purpose,
                          struct err *err);
enum err_code cpu_reserve_slices(struct cpu_backend *cpu, size_t bytes, const char *purpose,
                                 struct err *err);

/* machine.c */
int machine_n_core(void);          /* cores that this process may use */
size_t machine_memory_bytes(void); /* memory that this process may use; 0 = unknown */
struct cpu_isa {
    const char *name;
    const struct simd_kernels *simd;
    enum gemm_bf16 bf16;
};
/* The kernels of the instruction set isa, or of the machine's best one if isa is NULL. */
enum err_code machine_kernels(struct cpu_isa *found, const char *isa, struct err *err);
void cpu_measure(struct backend *be, enum dtype dtype, struct machine_rate *rate);

/* weight.c */
enum err_code cpu_weight_new(struct backend *be, struct weight **weight, const struct tensor *host,
                             const struct weight_desc *desc, const char *name, struct err *err);
void cpu_weight_free(struct backend *be, struct weight *weight);
size_t cpu_weight_bytes(const struct weight *weight);

void cpu_step_rows(struct cpu_backend *cpu,
                   const struct step *step); /* attention.c: at step_begin */

/* outputs.c, for linear_outputs. cpu_set_goals: what outputs first .. request of their rows of
 * logits, except for the targets' own logits. cpu_write_outputs: computes it from the parts of
 * their blocks. */
void cpu_set_goals(struct cpu_backend *cpu, struct tensor logits, const struct step *step,
                   int first);
void cpu_write_outputs(struct cpu_backend *cpu, struct tensor logits, struct step *step, int first);

/* Scratch that each thread needs for a memory's keys (pkm.c), the vocabulary (sample.c), attention
 * (attention.c) and spans (span.c). */
size_t cpu_keys_slice_bytes(const struct cpu_backend *cpu, const struct cpu_weight *keys);
size_t cpu_vocab_slice_bytes(const struct step_limits *limits);
size_t cpu_attention_slice_bytes(const struct cpu_backend *cpu, const struct step_limits *limits);
size_t cpu_span_slice_bytes(const struct simd_kernels *simd, const struct step_limits *limits);

/* The ops: cpu_linear and so on, as op.h says. */
#define CPU_OP(op) op_##op##_fn cpu_##op;
OP_LIST(CPU_OP)

#endif
