/* The ops: what a model's forward pass is a list of.
 *
 * Each op has its contract here, beside the type of its functions: op_<op>_fn. Models call the
 * checked entry op_<op> (op.c), which CHECKs shapes and indices, the same for all backends, and
 * calls the backend's own function, which need not check them again. A backend declares its
 * functions and fills its table by OP_LIST. kernels/ref is plain C and IS the specification of
 * every op. One checker (tests/kernels) compares every op of every backend with ref.
 *
 * Rules that hold for every op:
 *   - The handle is first, then outputs, then inputs, then weights, then shapes.
 *   - Matrices are row-major views; a linear layer is y = act(x·Wᵀ + b), weights [n_out, n_in].
 *   - Activations, biases, norms, scores and their softmax weights are F32, whatever the
 *     type of the parameters.
 *   - Row r of a result depends on row r of the inputs alone (attention: also on the earlier
 *     positions of its own sequence). It is the same BITS whatever other rows share the call,
 *     however a prompt is cut into chunks, and however many threads run. Hence the same request
 *     gives the same answer alone and in a batch. A backend may compute rows of drawn tokens
 *     otherwise than those of a request's own (backend.phases_apart), never rows of one kind.
 *   - Compute ops return nothing and may run later; a failure is sticky and the backend's finish
 *     reports the first one, with the op's name. Wrong shapes are bugs and CHECKed.
 *   - No op allocates. Buffers, weights and steps are made before the first step.
 *   - Every backend has every op. */
#ifndef KERNELS_OP_H
#define KERNELS_OP_H

#include "kernels/step.h"
#include "kernels/tensor.h"
#include "kernels/weight.h"

struct backend;

/* All ops, as lines X(op): a new one enters here, with its contract below. */
#define OP_LIST(X)                                                                                 \
    X(embed)                                                                                       \
    X(norm)                                                                                        \
    X(add_norm)                                                                                    \
    X(rms_norm)                                                                                    \
    X(l2_norm)                                                                                     \
    X(head_norm)                                                                                   \
    X(rope)                                                                                        \
    X(gate)                                                                                        \
    X(linear)                                                                                      \
    X(ffn)                                                                                         \
    X(kv_store)                                                                                    \
    X(attention)                                                                                   \
    X(span_attention)                                                                              \
    X(pkm_search)                                                                                  \
    X(pkm_rescore)                                                                                 \
    X(pkm_experts)                                                                                 \
    X(pkm_ablate)                                                                                  \
    X(pkm_read)                                                                                    \
    X(gather)                                                                                      \
    X(log_softmax)                                                                                 \
    X(outputs)                                                                                     \
    X(linear_outputs)

/* ---- embedding, norms ----------------------------------------------------------------------- */

/* y[n_tok, d] = tok[token] (+ pos[position]) (+ lang[language]); pos and lang may be NULL, but not
 * pos alone where there is lang. Tables of d columns and any dtype, sums in F32. */
typedef void op_embed_fn(struct backend *be, struct tensor y, const struct step *step,
                         const struct weight *tok, const struct weight *pos,
                         const struct weight *lang);

/* y = layer norm of x by rows: (x-μ)/sqrt(σ²+eps)·gamma + beta, biased variance, two passes.
 * gamma, beta [1, d]. y may be x. */
typedef void op_norm_fn(struct backend *be, struct tensor y, struct tensor x, struct tensor gamma,
                        struct tensor beta, float eps);

/* y = layer norm of x + r. y may be x or r. */
typedef void op_add_norm_fn(struct backend *be, struct tensor y, struct tensor x, struct tensor r,
                            struct tensor gamma, struct tensor beta, float eps);

/* sum = x + r, y = sum / sqrt(mean of sum² + eps) · gamma by rows (RMS norm; Zhang, Sennrich
 * 2019). gamma [1, d]. sum and r data NULL: of x itself. sum may be x or r; y is apart. */
typedef void op_rms_norm_fn(struct backend *be, struct tensor y, struct tensor sum, struct tensor x,
                            struct tensor r, struct tensor gamma, float eps);

/* y = x with each of the n_run equal runs of columns of a row divided by its L2 norm; a run of
 * zeros becomes NaN. y may be x. */
typedef void op_l2_norm_fn(struct backend *be, struct tensor y, struct tensor x, int n_run);

/* x = the RMS norm of each of the n_head equal runs of columns of a row, in place: of queries or
 * keys, before rope (Henry et al. 2020; Qwen3). gamma [1, columns of a run], the same for all
 * heads. */
typedef void op_head_norm_fn(struct backend *be, struct tensor x, struct tensor gamma, int n_head,
                             float eps);

/* ---- rotary positions, gates ---------------------------------------------------------------- */

/* Rotary position embedding (RoPE; Su et al. 2021), in place: in each of n_head runs of d_head
 * columns of row r, the neighbours (a, b) of a pair become (a·cos - b·sin, b·cos + a·sin).
 * table [n_pos, 2·d_head]: row pos[r] has the cosine of each column, then the sine, negative for
 * the first of a pair. */
typedef void op_rope_fn(struct backend *be, struct tensor x, struct tensor table,
                        const struct step *step, int n_head);

/* What a gate does with its input g. SILU: g/(1 + e^-g), one value for each number that is gated
 * (with two linear layers this is SwiGLU). SIGMOID: 1/(1 + e^-g), one value for each row. FACTOR: g
 * itself, one value for each row. */
enum gate_kind { GATE_SILU, GATE_SIGMOID, GATE_FACTOR };

/* y = x · f(g). g is [n, d] for GATE_SILU and [n, 1] for the others; with GATE_FACTOR and stride 0
 * it is one number for all rows. y may be x. */
typedef void op_gate_fn(struct backend *be, struct tensor y, struct tensor x, struct tensor g,
                        enum gate_kind kind);

/* ---- linear layers -------------------------------------------------------------------------- */

enum act { ACT_NONE, ACT_RELU, ACT_GELU /* exact: x/2 (1 + erf(x/√2)) */ };

/* y[n, n_out] = act(x[n, n_in]·Wᵀ + bias). bias [1, n_out] or data NULL. One chain of
 * multiply-adds per output, in ascending k. BF16 weights: x is rounded to BF16, products and sums
 * are F32; where instructions multiply pairs, up to 32 neighbours are added up before they join
 * the chain, always the same ones. F16 weights: likewise, x rounded to F16, to nearest, and what
 * that would make infinite, infinities too, becomes 65504 with its sign; NaN stays NaN. I8 weights
 * q·scale: x is rounded to INT8 by rows (kernels/int8.h), y = act((float)(Σ qx·qw) ·
 * (scale_x·scale_w) + bias), the sum being exact. y does not overlap x. */
typedef void op_linear_fn(struct backend *be, struct tensor y, struct tensor x,
                          const struct weight *w, struct tensor bias, enum act act);

/* A feed-forward network: two linear layers. Everything is borrowed. */
struct ffn {
    const struct weight *up, *down;   /* [n_hidden, n_in], [n_out, n_hidden] */
    struct tensor up_bias, down_bias; /* as linear's bias */
    enum act act;
};

/* y[n, n_out] = act(x·Upᵀ + up_bias)·Downᵀ + down_bias, the same bits as linear twice.
 * hidden [n, rows of up] is scratch: its contents afterwards are undefined. None overlaps. */
typedef void op_ffn_fn(struct backend *be, struct tensor y, struct tensor hidden, struct tensor x,
                       const struct ffn *ffn);

/* ---- attention ------------------------------------------------------------------------------ */

/* Writes row r of k and v [n_tok, d] into the cache at the page and offset of pos[r].
 * k_pages, v_pages: [n_page, KV_PAGE·d] F32, or BF16, which they are rounded to, where d_head is
 * even; the order inside a page is the backend's own. A page's positions are stored in order: to
 * store one again, begin with the page's first. */
typedef void op_kv_store_fn(struct backend *be, struct tensor k_pages, struct tensor v_pages,
                            struct tensor k, struct tensor v, const struct step *step, int n_head);

/* Stores the rows of k and v as kv_store does, unless their data are NULL (they have been stored),
 * then causal attention over the cache: for each row r, head h with d_head = d/n_head columns,
 *   y = Σ_u softmax_u(q·k_u · scale) v_u  over positions u = 0 .. pos[r] of r's sequence.
 * The pages may hold fewer heads, of which n_head is a multiple: then as many neighbours read one
 * of them (grouped queries; Ainslie et al. 2023); k and v have as many columns as the pages' heads.
 * Where the cache is BF16, q·scale and e^(score - max) may be rounded to BF16 too.
 * y overlaps neither k nor v. */
typedef void op_attention_fn(struct backend *be, struct tensor y, struct tensor q,
                             struct tensor k_pages, struct tensor v_pages, struct tensor k,
                             struct tensor v, const struct step *step, int n_head, float scale);

/* What a head of span_attention sees (Sukhbaatar et al. 2019, "Augmenting Self-attention with
 * Persistent Memory" and "Adaptive Attention Span in Transformers"): the window positions before
 * its own, and keys and values that are parameters; either may be none. F32, in the backend's
 * memory. */
struct span_shape {
    int n_head, window, n_persistent;
    float scale;
    struct tensor position; /* [d_head, window] column window-j: what distance j adds to a key;
                             * unused without a window */
    struct tensor mask;     /* [n_head, window] column window-j: part of distance j that counts,
                             * 0 .. 1; data NULL = all counts */
    struct tensor key;      /* [n_head·d_head, n_persistent] by column of the head, as position */
    struct tensor value;    /* [n_head·n_persistent, d_head] */
};

/* Added, times the sum before the mask, to the sum that masked weights are divided by. */
#define SPAN_EPSILON 1e-8f

/* Attention to the last shape->window positions before each row's own, which is not among them,
 * and to persistent keys. For head h of the row at position t, over distances j = 1 .. window and
 * persistent keys i, with k_u = v_u = 0 for the positions u < 0 before the text:
 *   s_j = q·(k_{t-j} + position_j) · scale    s'_i = q·key_i · scale
 *   e = exp(s - max), e' = exp(s' - max)      Z = Σ_j e_j + Σ_i e'_i
 *   y = (Σ_j e_j mask_j v_{t-j} + Σ_i e'_i value_i) / (Σ_j e_j mask_j + Σ_i e'_i + ε·Z)
 * with ε = SPAN_EPSILON, or 0 where there is no mask. The step's own rows have been stored; the
 * ring holds at least window positions before the first of each sequence. */
typedef void op_span_attention_fn(struct backend *be, struct tensor y, struct tensor q,
                                  struct tensor k_pages, struct tensor v_pages,
                                  const struct step *step, const struct span_shape *shape);

/* ---- product-key memories ------------------------------------------------------------------- */

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
    bool scores; /* the weights are the scores themselves: pkm_rescore follows */
};

/* The k_top best slots of each head, and their weights.
 *   query [n, n_head·d_key], head-major, first half first; slots I32 and weights F32
 *   [n, n_head·k_top], each head's slots best first.
 * Product keys (paper eq. 3-5; keys [n_head·2·n_key, d_key/2], group 2h+half): the k_top best of
 * each half, then the k_top best of the sums a_i + b_j among the pairs of ranks i·j <= k_top (119
 * of 1024 for 32: no other pair can be among the best). Slot = i·n_key + j. Flat keys:
 * keys [n_head·n_key, d_key], slot = row. Ties at every selection: larger score, then the smaller
 * index. Weights are the softmax of the k_top scores, subnormal ones included (a slot whose weight
 * is not 0 counts as used), or with shape->scores these. */
typedef void op_pkm_search_fn(struct backend *be, struct tensor slots, struct tensor weights,
                              struct tensor query, const struct weight *keys,
                              const struct pkm_shape *shape);

enum pkm_subtract {
    PKM_SUBTRACT_NONE,
    PKM_SUBTRACT_MIN,
    PKM_SUBTRACT_MEAN,
    PKM_SUBTRACT_MEDIAN /* the lower middle: ascending element (k_top - 1) / 2 */
};

/* How a memory turns what a search found into slots and weights, where that is not the plain
 * softmax. */
struct pkm_rescore {
    int n_head, k_top;
    int n_slot;        /* slots are taken modulo this: 1 .. 2^31 - 1 */
    float temperature; /* > 0 */
    bool softmax;
    bool relu; /* scores below 0 become 0; not with softmax */
    enum pkm_subtract subtract;
    bool normalize; /* divide by Σ|weight| */
};

/* In place, for each row and head of what pkm_search with shape->scores found:
 *   slot = slot_map[head, slot] (slot_map I32 [n_head, slots of the keys], or data NULL), then
 *   slot mod n_slot; so a slot may occur several times;
 *   s = score / temperature, then the softmax of them or max(s, 0) if wanted, minus what subtract
 *   names of them, divided by Σ|s| if normalize. Without both, or minus the mean, weights of both
 *   signs. */
typedef void op_pkm_rescore_fn(struct backend *be, struct tensor slots, struct tensor weights,
                               struct tensor slot_map, const struct pkm_rescore *rescore);

/* Redirection: if a row's sequence has entries in step->redirect for this memory, the slots that
 * the entries list are read from the entries' rows instead of from the table (from their experts,
 * where experts are read). What is read is the row's numbers, of whatever type, times its scale.
 * All other rows are computed as without redirections, to the bit. A redirected row with the
 * table's own type and numbers gives the table's bits, and so does one of F32 with the numbers of a
 * table of Q4. */
struct pkm_redirect {
    const struct step *step; /* the call has one row for each row of the step */
    int memory;              /* that owns the table */
};

/* y[j] = weights[j] · gelu(x · experts[slots[j]]). pkm_read then sums the outputs of experts that
 * have one hidden unit each (He 2024, "Mixture of A Million Experts"). y, weights and slots are as
 * in pkm_read; x [n, d]; experts [n_slot, d], a table. y may be weights. redirect may be NULL. */
typedef void op_pkm_experts_fn(struct backend *be, struct tensor y, struct tensor weights,
                               struct tensor slots, struct tensor x, const struct weight *experts,
                               const struct pkm_redirect *redirect);

/* The memory that the look-ups belong to, and how their columns are divided among heads. */
struct pkm_place {
    int memory; /* as step_ablate.memory */
    int n_head, k_top;
};

/* Knock-out, in place, between what makes the weights and pkm_read: for each row r and column j, of
 * head j / k_top,
 *   weights[j] = weights[j] · f,   f = 1 · scale of each entry that is in the list of r's sequence
 *                                  (step->ablate) and names place's memory, the head or all heads,
 *                                  and the slot or all slots, multiplied in the list's order.
 * Nothing is normalised again. Rows of sequences with an empty list stay as they are, to the bit.
 * weights and slots have a row for each of the step's. */
typedef void op_pkm_ablate_fn(struct backend *be, struct tensor weights, struct tensor slots,
                              const struct step *step, const struct pkm_place *place);

/* y[n, d] = residual + Σ_j weights[j] · values[slots[j]] over all n_head·k_top columns, in column
 * order, F32 sums. residual may be y, or data NULL (nothing is added). Subnormal weights may count
 * as 0. redirect may be NULL. */
typedef void op_pkm_read_fn(struct backend *be, struct tensor y, struct tensor residual,
                            struct tensor slots, struct tensor weights, const struct weight *values,
                            const struct pkm_redirect *redirect);

/* ---- outputs -------------------------------------------------------------------------------- */

/* y row i = x row step->out_row[first + i], i < y.rows. */
typedef void op_gather_fn(struct backend *be, struct tensor y, struct tensor x,
                          const struct step *step, int first);

/* y = log softmax of y by rows, plus base: (y - max) + (base - log Σ exp(y - max)), in F32 but for
 * the second bracket. base [n, 1], a column that is not among y's, or data NULL for 0. A row with
 * NaN or +infinity, or with -infinity alone, becomes NaN. */
typedef void op_log_softmax_fn(struct backend *be, struct tensor y, struct tensor base);

/* Computes what the outputs first .. first+logits.rows-1 request of their logits [n, n_vocab],
 * which are not changed: draws out_token, then fills out_logprob, out_rank, top_*, out_entropy,
 * whose bits do not depend on whether a row also draws. A row with a logit of NaN or +infinity, or
 * with all at -infinity, gets NaN for every log-probability and the entropy, rank 0 and top_id -1.
 * Entries of top_* past n_vocab get id -1 and -infinity. */
typedef void op_outputs_fn(struct backend *be, struct tensor logits, struct step *step, int first);

/* linear without an activation, followed by outputs on its result: the same bits as calling both.
 * logits [n, n_vocab] is scratch: its contents afterwards are undefined. None overlaps. */
typedef void op_linear_outputs_fn(struct backend *be, struct tensor logits, struct tensor x,
                                  const struct weight *w, struct tensor bias, struct step *step,
                                  int first);

/* ---- tables --------------------------------------------------------------------------------- */

/* A backend's functions. */
#define OP_SLOT(op) op_##op##_fn *op;
struct op_table {
    OP_LIST(OP_SLOT)
};

/* The checked entries: op_linear(be, y, x, w, bias, act) and so on. */
#define OP_ENTRY(op) op_##op##_fn op_##op;
OP_LIST(OP_ENTRY)

#endif
