/* The backend: the one way from the models to the arithmetic.
 *
 * A model's forward pass is a list of calls of the ops below; nothing above kernels/ knows which
 * machine executes them. kernels/ref is plain C and IS the specification of every op; kernels/cpu
 * starts from ref's table and overrides; kernels/cuda implements the table on the GPU. One checker
 * (tests/kernels) compares every op of every backend with ref.
 *
 * Rules that hold for every op:
 *   - The handle is first, then outputs, then inputs, then weights, then shapes.
 *   - Matrices are row-major views; a linear layer is y = act(x·Wᵀ + b), weights [n_out, n_in].
 *   - Activations, biases, norms, scores and shares are F32, whatever the weights are.
 *   - Row r of a result depends on row r of the inputs alone (attention: also on the earlier
 *     positions of its own sequence) and is the same BITS whatever other rows share the call,
 * however a prompt is cut into chunks, and however many threads run. Hence the same request gives
 * the same answer alone and in a crowd.
 *   - Compute ops return nothing and may run later; a failure is sticky and finish() reports the
 *     first one, with the op's name. Wrong shapes are bugs and CHECKed.
 *   - No op allocates. Buffers, weights and steps are made before the first step.
 *   - Every slot of the table is filled.
 *
 * One thread (the engine's) calls a backend; a backend may own more threads below this line. */
#ifndef KERNELS_BACKEND_H
#define KERNELS_BACKEND_H

#include "kernels/err.h"
#include "kernels/tensor.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Token positions per page of the key/value cache. 16 floats are one AVX-512 register. */
enum { KV_PAGE = 16 };

enum act { ACT_NONE, ACT_RELU, ACT_GELU /* exact: x/2 (1 + erf(x/√2)) */ };

/* ---- weights ------------------------------------------------------------------------------ */

/* A parameter in the backend's own layout. Made once at load, immutable after. */
struct weight;

enum weight_kind {
    WEIGHT_MATRIX, /* of a linear layer, [n_out, n_in]: packed */
    WEIGHT_TABLE,  /* read by rows (embeddings, values), [rows, cols]: kept in row order */
    WEIGHT_KEYS,   /* memory keys, [n_group·n_key, d_half]: packed by group; kept in F32 */
};

enum placement {
    PLACEMENT_DEVICE, /* copied into the device's memory */
    PLACEMENT_HOST,   /* copied into host memory that the device reads in place */
    PLACEMENT_MMAP,   /* read in place from the mapped file, which must stay mapped: tables
                       * only, and only where the backend is_host */
};

/* "device", "host", "mmap": as options and metrics call them. */
static inline const char *placement_name(enum placement placement)
{
    static const char *const names[] = {"device", "host", "mmap"};
    return names[placement];
}

struct weight_desc {
    enum weight_kind kind;
    enum dtype dtype; /* as computed with: F32, BF16 (F16 sources become F32), or where the backend
                       * has_int8, and not of KEYS, I8; a TABLE with PLACEMENT_MMAP keeps its
                       * source's dtype, whatever it is */
    enum placement placement;
    int n_group;            /* KEYS: independent key sets that follow one another; else 1 */
    bool is_split;          /* KEYS, and MATRIX of F32: rows and weights may be taken as sums of two
                             * BF16 numbers, and the products without those of the lower two:
                             * within 2^-16 of Σ|x·w| */
    const float *row_scale; /* Borrowed: [rows] of an I8 source, as kernels/int8.h; with
                             * PLACEMENT_MMAP as long as the weight lives. Else NULL */
    double loss_max;        /* I8 made of other numbers w: refused (ERR_NUMERICAL) where
                             * |w - q·scale| > loss_max·|w|, the norms over all of it; 0 = never */
};

/* CHECKs what a weight's caller promises. For backends' weight_new. weight.c */
void weight_check(const struct tensor *host, const struct weight_desc *desc);
/* What int8 cannot hold, and what it would lose too much of. name is the weight's. */
enum err_code weight_int8_check(const struct tensor *host, const struct weight_desc *desc,
                                const char *name, struct err *err);
enum err_code weight_loss_check(double loss, const struct weight_desc *desc, const char *name,
                                struct err *err);

/* ---- the step: one ragged batch ----------------------------------------------------------- */

/* Sizes that a step's arrays are made for. */
struct step_limits {
    int n_tok_max;       /* rows */
    int n_seq_max;       /* sequences */
    int n_page_max;      /* pages of one sequence: ceil(context / KV_PAGE) */
    int n_out_max;       /* rows whose next-token distribution is wanted */
    int n_top_max;       /* alternatives reported per such row */
    int n_adjust_max;    /* entries of all rows' adjustment lists together */
    int n_allow_max;     /* entries of all rows' allow lists together */
    int n_vocab;         /* columns of the logits: sizes the scratch of sample; 0 = never sampled */
    int d_model, n_head; /* of attention, columns of all heads: size its scratch; 0 = the step never
                          * attends */
    int n_span_max; /* keys that a head of span_attention sees: its window and the persistent ones;
                     * 0 = never called. Where it is set, a sequence's pages are a ring of
                     * n_page_max: see step_page */
};

/* One token's correction of its logit. Applied in this order, z being the logit (OpenAI's and the
 * CTRL paper's definitions):
 *   if n_prompt + n_generated > 0:  z = z > 0 ? z / repetition : z * repetition
 *   z -= presence * (n_generated > 0) + frequency * n_generated
 *   z += bias                        (may be -infinity: the token is never drawn) */
struct sample_adjust {
    int32_t token;
    int32_t n_prompt;    /* times the token stands in the prompt */
    int32_t n_generated; /* times it was generated */
    float bias;
};

/* How the next token of one row is drawn. The order of operations: adjustments, the allow list
 * (other tokens become -infinity), temperature, top_k, top_p, min_p, draw. Candidates are ordered
 * by larger logit, then smaller id. top_k keeps the first k. top_p keeps the shortest prefix whose
 * probability (softmax over what top_k kept) is >= top_p. min_p keeps tokens with probability >=
 * min_p · the best token's. The draw takes the first candidate, in that order, whose cumulative
 * share of the kept mass exceeds u; without top_k, top_p and min_p the candidates are taken in id
 * order instead (no sort). temperature 0 takes the largest adjusted logit, the lowest id on ties.
 * Shares are exp((z - z_max) / temperature), summed in candidate order; a backend's sums may be off
 * by 1e-6 of the total, so backends may draw different tokens where u is that close to a border.
 * Rounding never leaves the draw empty: if no cumulative share exceeds u, the last candidate with a
 * share above 0 is taken. If every allowed token is at -infinity, the lowest allowed id is taken.
 * If a logit is NaN or +infinity, the lowest such id is taken; its log-probability is then NaN. */
struct sample_params {
    double u;          /* uniform in [0, 1): the sequence's own counter-based random number */
    float temperature; /* >= 0 */
    float top_p;       /* (0, 1]; 1 = off */
    float min_p;       /* [0, 1); 0 = off */
    float repetition;  /* > 0; 1 = off */
    float presence;    /* 0 = off */
    float frequency;   /* 0 = off */
    int32_t top_k;     /* 0 = off */
    int32_t adjust_first, n_adjust; /* this row's slice of step.adjust: distinct tokens */
    int32_t allow_first, n_allow;   /* this row's slice of step.allow; n_allow 0 = all allowed */
};

enum out_want {
    OUT_SAMPLE = 1,  /* draw a token with sample[]: out_token */
    OUT_LOGPROB = 2, /* log-probability and rank of the target: out_logprob, out_rank */
    OUT_TOP = 4,     /* the n_top best tokens: top_id, top_logprob */
    OUT_ENTROPY = 8, /* entropy of the distribution in nats: out_entropy */
};

/* target[] value that means "the token drawn for this row" (OUT_SAMPLE must be wanted too). */
enum { TARGET_SAMPLED = -1 };

/* The engine fills the inputs, calls step_begin, runs the model, calls finish and reads the
 * results. Arrays are host memory of the backend, at fixed addresses for the life of the step. */
struct step {
    struct step_limits limits;

    /* inputs */
    int n_tok, n_seq, n_out;
    int n_top;             /* alternatives computed for rows with OUT_TOP, <= n_top_max */
    int n_adjust, n_allow; /* used entries of the lists */
    int32_t *token;        /* [n_tok] */
    int32_t *pos;          /* [n_tok] position in its own sequence = index into its cache */
    int32_t *lang;         /* [n_tok] language id; 0 where the model has no languages */
    int32_t *seq_first;    /* [n_seq+1] rows seq_first[s] .. seq_first[s+1]-1 belong to sequence s;
                            * their positions are consecutive; seq_first[n_seq] = n_tok */
    int32_t *page;         /* [n_seq, n_page_max] cache pages: step_page says of which positions */
    int32_t *out_row;      /* [n_out] row of this output, ascending */
    uint8_t *out_want;     /* [n_out] enum out_want, never 0 */
    int32_t *target;       /* [n_out] token whose log-probability is wanted, or TARGET_SAMPLED */
    struct sample_params *sample; /* [n_out] */
    struct sample_adjust *adjust; /* [n_adjust] */
    int32_t *allow;               /* [n_allow] */

    /* results, valid after finish(); log-probabilities are of the model's own distribution,
     * before any adjustment and temperature: z - log-sum-exp(z) in F32 */
    int32_t *out_token; /* [n_out] */
    float *out_logprob; /* [n_out] */
    int32_t *out_rank;  /* [n_out] 1 + number of tokens with a larger logit, or an equal one and
                         * a smaller id */
    float *out_entropy; /* [n_out] */
    int32_t *top_id;    /* [n_out, n_top_max], best first: larger logit, then smaller id */
    float *top_logprob; /* [n_out, n_top_max] */
};

/* CHECKs what a step promises: counts within its limits, rows in order, positions consecutive and
 * within the pages, outputs ascending and wanted. For backends' step_begin. step.c */
void step_check(const struct step *step);

/* The cache page of position pos of sequence seq. In a ring, a position's place is taken over by
 * the one that is n_page_max pages later. */
static inline int32_t step_page(const struct step *step, int seq, int pos)
{
    const int n = step->limits.n_page_max;
    return step->page[(int64_t)seq * n + pos / KV_PAGE % n];
}

/* ---- feed-forward networks ------------------------------------------------------------------ */

/* A feed-forward network: two linear layers. Everything is borrowed. */
struct ffn {
    const struct weight *up, *down;   /* [n_hidden, n_in], [n_out, n_hidden] */
    struct tensor up_bias, down_bias; /* as linear's bias */
    enum act act;
};

/* ---- attention with spans ----------------------------------------------------------------- */

/* What a head of span_attention sees (Sukhbaatar et al. 2019, "Augmenting Self-attention with
 * Persistent Memory" and "Adaptive Attention Span in Transformers"): the window positions before
 * its own, and keys and values that are parameters; either may be none. F32, in the backend's
 * memory. */
struct span_shape {
    int n_head, window, n_persistent;
    float scale;
    struct tensor position; /* [d_head, window] column window-j: what distance j adds to a key;
                             * unused without a window */
    struct tensor mask;     /* [n_head, window] column window-j: share of distance j that counts,
                             * 0 .. 1; data NULL = all counts */
    struct tensor key;      /* [n_head·d_head, n_persistent] by column of the head, as position */
    struct tensor value;    /* [n_head·n_persistent, d_head] */
};

/* Added, times the sum before the mask, to the sum that masked shares are divided by. */
#define SPAN_EPSILON 1e-8f

/* CHECKs that a step's pages hold the window of each of its rows. step.c */
void step_check_window(const struct step *step, const struct span_shape *shape);

/* ---- memory layers ------------------------------------------------------------------------ */

enum pkm_kind { PKM_PRODUCT, PKM_FLAT };

/* Largest k_top of any memory: bounds the candidate lists that an op keeps on its stack. */
enum { PKM_K_TOP_MAX = 1024 };

/* Shape of one memory (Large Memory Layers with Product Keys, section 3.1). Keys with one group are
 * one set that all halves and heads search. */
struct pkm_shape {
    enum pkm_kind kind;
    int n_head;
    int k_top;   /* slots read per head, 1 .. min(n_key, PKM_K_TOP_MAX) */
    int n_key;   /* product: sub-keys per half, slots = n_key²; flat: keys = slots */
    int d_key;   /* query width of a head; a product half is d_key/2 */
    bool scores; /* the shares are the scores themselves: pkm_rescore follows */
};

enum pkm_subtract {
    PKM_SUBTRACT_NONE,
    PKM_SUBTRACT_MIN,
    PKM_SUBTRACT_MEAN,
    PKM_SUBTRACT_MEDIAN /* the lower middle: ascending element (k_top - 1) / 2 */
};

/* How a memory makes slots and shares of what a search found, where it is not the plain softmax. */
struct pkm_rescore {
    int n_head, k_top;
    int n_slot;        /* slots are taken modulo this: 1 .. 2^31 - 1 */
    float temperature; /* > 0 */
    bool softmax;
    enum pkm_subtract subtract;
    bool normalize; /* divide by Σ|share| */
};

/* ---- gates ---------------------------------------------------------------------------------- */

/* What a gate makes of its numbers g: g/(1 + e^-g), one for each number that is gated, or
 * 1/(1 + e^-g), one for a row. */
enum gate_kind { GATE_SILU, GATE_SIGMOID };

/* ---- measured rates of the machine -------------------------------------------------------- */

struct machine_rate {
    double read_bytes_per_s; /* plain read of a large array by all threads */
    double flops_f32_per_s;  /* peak of the F32 multiply-add this backend uses */
    double flops_bf16_per_s; /* same for BF16; 0 where it has no such instruction */
    double ops_int8_per_s;   /* same for INT8, two for a multiply-add */
};

/* Of weights of that type; where there is no instruction for it, they are computed with as F32. */
static inline double machine_peak(const struct machine_rate *rate, enum dtype dtype)
{
    const double own = dtype == DTYPE_I8     ? rate->ops_int8_per_s
                       : dtype == DTYPE_BF16 ? rate->flops_bf16_per_s
                                             : 0;
    return own > 0 ? own : rate->flops_f32_per_s;
}

/* ---- the table ---------------------------------------------------------------------------- */

struct backend;

struct backend_ops {
    /* Resources. Owner of everything made here: the caller, who frees it before close. */
    void (*close)(struct backend *be);
    /* Zero-filled memory of the device, 64-byte aligned. purpose names it in errors. */
    enum err_code (*buffer_new)(struct backend *be, void **data, size_t bytes, const char *purpose,
                                struct err *err);
    void (*buffer_free)(struct backend *be, void *data);
    /* Packs host (a view of host memory, F32/F16/BF16/I8) into a new weight. */
    enum err_code (*weight_new)(struct backend *be, struct weight **weight,
                                const struct tensor *host, const struct weight_desc *desc,
                                const char *name, struct err *err);
    void (*weight_free)(struct backend *be, struct weight *weight);
    size_t (*weight_bytes)(const struct weight *weight);
    enum err_code (*step_new)(struct backend *be, struct step **step,
                              const struct step_limits *limits, struct err *err);
    void (*step_free)(struct backend *be, struct step *step);
    void (*upload)(struct backend *be, struct tensor dst, const void *host);
    void (*download)(struct backend *be, void *host, struct tensor src);
    /* Bytes of the device's memory that may still be taken; INT64_MAX if nothing says. */
    int64_t (*memory_available)(struct backend *be);
    /* Brings the step's inputs to the device; the ops that follow work on it. */
    void (*step_begin)(struct backend *be, const struct step *step);
    /* Starts the ops since step_begin where they do not run as they are called (is_async), and
     * returns without waiting for them. */
    void (*submit)(struct backend *be, struct step *step);
    /* Submits if that has not been done, waits for all ops since step_begin, makes the results
     * readable, reports the first failure. */
    enum err_code (*finish)(struct backend *be, struct step *step, struct err *err);
    /* Measures for about half a second. */
    void (*measure)(struct backend *be, struct machine_rate *rate);

    /* y[n_tok, d] = tok[token] (+ pos[position]) (+ lang[language]); pos and lang may be NULL, but
     * not pos alone where there is lang. d_model columns; tables of any dtype, sums in F32. */
    void (*embed)(struct backend *be, struct tensor y, const struct step *step,
                  const struct weight *tok, const struct weight *pos, const struct weight *lang);
    /* y = layer norm of x by rows: (x-μ)/sqrt(σ²+eps)·gamma + beta, biased variance, two passes.
     * gamma, beta [1, d]. y may be x. */
    void (*norm)(struct backend *be, struct tensor y, struct tensor x, struct tensor gamma,
                 struct tensor beta, float eps);
    /* y = layer norm of x + r. y may be x or r. */
    void (*add_norm)(struct backend *be, struct tensor y, struct tensor x, struct tensor r,
                     struct tensor gamma, struct tensor beta, float eps);
    /* y = x with each of the n_run equal runs of columns of a row divided by its L2 norm; a run of
     * zeros becomes NaN. y may be x. */
    void (*unit_norm)(struct backend *be, struct tensor y, struct tensor x, int n_run);
    /* sum = x + r, y = sum / sqrt(mean of sum² + eps) · gamma by rows (RMS norm; Zhang, Sennrich
     * 2019). gamma [1, d]. sum and r data NULL: of x itself. sum may be x or r; y is apart. */
    void (*rms_norm)(struct backend *be, struct tensor y, struct tensor sum, struct tensor x,
                     struct tensor r, struct tensor gamma, float eps);
    /* Rotary positions (Su et al. 2021), in place: in each of n_head runs of d_head columns of row
     * r, the neighbours (a, b) of a pair become (a·cos - b·sin, b·cos + a·sin). table [n_pos,
     * 2·d_head]: row pos[r] has the cosine of each column, then the sine, negative for the first of
     * a pair. */
    void (*rotate)(struct backend *be, struct tensor x, struct tensor table,
                   const struct step *step, int n_head);
    /* y = x · f(g). g [n, d], or of GATE_SIGMOID [n, 1]. y may be x. */
    void (*gate)(struct backend *be, struct tensor y, struct tensor x, struct tensor g,
                 enum gate_kind kind);
    /* y[n, n_out] = act(x[n, n_in]·Wᵀ + bias). bias [1, n_out] or data NULL. One chain of
     * multiply-adds per output, in ascending k. BF16 weights: x is rounded to BF16, products and
     * sums are F32; where instructions multiply pairs, up to 32 neighbours are added up before they
     * join the chain, always the same ones. I8 weights q·scale: x is rounded to INT8 by rows
     * (kernels/int8.h), y = act((float)(Σ qx·qw) · (scale_x·scale_w) + bias), the sum being exact.
     * y does not overlap x. */
    void (*linear)(struct backend *be, struct tensor y, struct tensor x, const struct weight *w,
                   struct tensor bias, enum act act);
    /* y[n, n_out] = act(x·Upᵀ + up_bias)·Downᵀ + down_bias, as linear twice makes it, to the bit.
     * hidden [n, rows of up] is scratch: what it holds afterwards is not said. None overlaps. */
    void (*ffn)(struct backend *be, struct tensor y, struct tensor hidden, struct tensor x,
                const struct ffn *ffn);
    /* Writes row r of k and v [n_tok, d] into the cache at the page and offset of pos[r].
     * k_pages, v_pages: [n_page, KV_PAGE·d] F32, or BF16, which they are rounded to, where d_head
     * is even; the order inside a page is the backend's own. A page's positions are stored in
     * order: to store one again, begin with the page's first. */
    void (*kv_store)(struct backend *be, struct tensor k_pages, struct tensor v_pages,
                     struct tensor k, struct tensor v, const struct step *step, int n_head);
    /* Causal attention over the cache: for each row r, head h with d_head = d/n_head columns,
     *   y = Σ_u softmax_u(q·k_u · scale) v_u  over positions u = 0 .. pos[r] of r's sequence.
     * The pages may hold fewer heads, of which n_head is a multiple: then as many neighbours read
     * one of them (grouped queries; Ainslie et al. 2023).
     * Where the cache is BF16, q·scale and e^(score - max) may be rounded to BF16 too. */
    void (*attention)(struct backend *be, struct tensor y, struct tensor q, struct tensor k_pages,
                      struct tensor v_pages, const struct step *step, int n_head, float scale);
    /* Attention to the last shape->window positions before each row's own, which is not among
     * them, and to persistent keys. For head h of the row at position t, over distances j = 1 ..
     * window and persistent keys i, with k_u = v_u = 0 for the positions u < 0 before the text:
     *   s_j = q·(k_{t-j} + position_j) · scale    s'_i = q·key_i · scale
     *   e = exp(s - max), e' = exp(s' - max)      Z = Σ_j e_j + Σ_i e'_i
     *   y = (Σ_j e_j mask_j v_{t-j} + Σ_i e'_i value_i) / (Σ_j e_j mask_j + Σ_i e'_i + ε·Z)
     * with ε = SPAN_EPSILON, or 0 where there is no mask. The step's own rows have been stored;
     * the ring holds at least window positions before the first of each sequence. */
    void (*span_attention)(struct backend *be, struct tensor y, struct tensor q,
                           struct tensor k_pages, struct tensor v_pages, const struct step *step,
                           const struct span_shape *shape);
    /* The k_top best slots of each head, and their shares.
     *   query [n, n_head·d_key], head-major, first half first; slots I32 and shares F32
     *   [n, n_head·k_top], each head's slots best first.
     * Product keys (paper eq. 3-5; keys [n_head·2·n_key, d_key/2], group 2h+half): the k_top best
     * of each half, then the k_top best of the sums a_i + b_j among the pairs of ranks i·j <= k_top
     * (119 of 1024 for 32: no other pair can be among the best). Slot = i·n_key + j. Flat keys:
     * keys [n_head·n_key, d_key], slot = row. Ties at every selection: larger score, then the
     * smaller index. Shares are the softmax of the k_top scores, subnormal ones included (a slot
     * whose share is not 0 counts as used), or with shape->scores these. */
    void (*pkm_search)(struct backend *be, struct tensor slots, struct tensor shares,
                       struct tensor query, const struct weight *keys,
                       const struct pkm_shape *shape);
    /* In place, for each row and head of what pkm_search with shape->scores found:
     *   slot = slot_map[head, slot] (slot_map I32 [n_head, slots of the keys], or data NULL), then
     *   slot mod n_slot; so a slot may stand several times;
     *   s = score / temperature, then the softmax of them if wanted, minus what subtract names of
     *   them, divided by Σ|s| if normalize. Without softmax, or minus the mean, shares of both
     *   signs. */
    void (*pkm_rescore)(struct backend *be, struct tensor slots, struct tensor shares,
                        struct tensor slot_map, const struct pkm_rescore *rescore);
    /* y[j] = shares[j] · gelu(x · experts[slots[j]]), with which pkm_read sums the outputs of
     * experts of one hidden unit (He 2024, "Mixture of A Million Experts"). y, shares and slots as
     * of pkm_read; x [n, d]; experts [n_slot, d], a table. y may be shares. */
    void (*pkm_experts)(struct backend *be, struct tensor y, struct tensor shares,
                        struct tensor slots, struct tensor x, const struct weight *experts);
    /* y[n, d] = residual + Σ_j shares[j] · values[slots[j]] over all n_head·k_top columns, in
     * column order, F32 sums. residual may be y, or data NULL (nothing is added). Subnormal shares
     * may count as 0. */
    void (*pkm_read)(struct backend *be, struct tensor y, struct tensor residual,
                     struct tensor slots, struct tensor shares, const struct weight *values);
    /* y row i = x row step->out_row[first + i], i < y.rows. */
    void (*gather)(struct backend *be, struct tensor y, struct tensor x, const struct step *step,
                   int first);
    /* y = log softmax of y by rows, plus base: (y - max) + (base - log Σ exp(y - max)), in F32
     * but for the second bracket.
     * base [n, 1], a column that is not among y's, or data NULL for 0. A row with NaN or
     * +infinity, or with -infinity alone, becomes NaN. */
    void (*log_softmax)(struct backend *be, struct tensor y, struct tensor base);
    /* What the rows first .. first+logits.rows-1 want of logits [n, n_vocab], which stay as they
     * are: draws out_token, then fills out_logprob, out_rank, top_*, out_entropy, whose bits do
     * not depend on whether a row also draws. A row with a logit of NaN or +infinity, or with all
     * at -infinity, gets NaN for every log-probability and the entropy, rank 0 and top_id -1.
     * Entries of top_* past n_vocab get id -1 and -infinity. */
    void (*outputs)(struct backend *be, struct tensor logits, struct step *step, int first);
    /* What linear, without an activation, and outputs make of x one after the other, to the bit.
     * logits [n, n_vocab] is room: what it holds afterwards is not said. None overlaps. */
    void (*linear_outputs)(struct backend *be, struct tensor logits, struct tensor x,
                           const struct weight *w, struct tensor bias, struct step *step,
                           int first);
};

struct backend {
    const struct backend_ops *op;
    char name[32];         /* "ref", "cpu-amx", "cpu-avx512", "cpu-avx2", "cpu-plain", "cuda" */
    char description[160]; /* for logs and /info: instruction set or device name, threads, memory */
    char note[384]; /* for the log, one line or "": why "auto" chose it; what was asked for and
                     * is not there */
    int n_thread;
    size_t memory_bytes; /* memory usable for weights and cache; 0 = unknown */
    bool is_host;        /* its memory is the host's: it reads mapped files in place */
    bool has_int8;       /* makes I8 weights */
    bool is_async;       /* the host is free between submit and finish */
    int capture_max;    /* a step of that many sequences or fewer, one row each, is prepared when it
                         * first runs: run one of each size before serving. 0 = nothing is */
    int64_t n_prepared; /* steps so far that ran as prepared. Guard: the engine's thread */
};

struct backend_options {
    const char *device; /* "auto", "cpu", "cuda"; "ref" for tests */
    int n_thread;       /* 0 = one per core available to the process */
    bool fast_math;     /* matrix products may depend on how many rows share the call */
};

/* Opens the best backend that options allow. "auto" takes the GPU where there is one, else the CPU.
 * The CPU's instruction set is the best of the machine, or what PKMSERVE_ISA names (amx, avx512,
 * avx2, plain, ref); a set the machine lacks or an unknown name is ERR_UNSUPPORTED / ERR_ARGUMENT.
 * Owner of *be: the caller, who ends it with backend_close. */
enum err_code backend_open(struct backend **be, const struct backend_options *options,
                           struct err *err);
void backend_close(struct backend *be); /* NULL is fine */

/* The backends, opened by backend_open alone and by the checker. */
enum err_code ref_open(struct backend **be, struct err *err);
enum err_code cpu_open(struct backend **be, const char *isa /* NULL = best */, int n_thread,
                       struct err *err);

#endif
