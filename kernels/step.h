/* The step: one ragged batch of token rows, their pages of the cache, and what is wanted of them.
 *
 * The engine fills the inputs, calls the backend's step_begin, runs the model, calls finish and
 * reads the results. All arrays are host memory of the backend, at fixed addresses for the life of
 * the step. One thread (the engine's) works on a step. */
#ifndef KERNELS_STEP_H
#define KERNELS_STEP_H

#include "kernels/err.h"
#include "kernels/tensor.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Token positions per page of the key/value cache. 16 floats are one AVX-512 register. */
enum { KV_PAGE = 16 };

/* Sizes that a step's arrays are made for. */
struct step_limits {
    int n_tok_max;       /* rows */
    int n_seq_max;       /* sequences */
    int n_page_max;      /* pages of one sequence: ceil(context / KV_PAGE) */
    int n_out_max;       /* rows whose next-token distribution is wanted */
    int n_top_max;       /* alternatives reported per such row */
    int n_adjust_max;    /* entries of all rows' adjustment lists together */
    int n_allow_max;     /* entries of all rows' allow lists together */
    int n_ablate_max;    /* entries of all sequences' knock-out lists together */
    int n_redirect_max;  /* the same of redirections */
    int n_vocab;         /* columns of the logits: sizes the scratch of sample; 0 = never sampled */
    int d_model, n_head; /* of attention, columns of all heads: size its scratch; 0 = the step never
                          * attends */
    int n_span_max; /* keys that a head of span_attention sees: its window and the persistent ones;
                     * 0 = never called. Where it is set, a sequence's pages are a ring of
                     * n_page_max: see step_page */
    int64_t n_fetch_bytes; /* what a device keeps room for beside the results: backend.h, fetch */
};

/* One token's correction of its logit. Applied in this order, z being the logit (OpenAI's and the
 * CTRL paper's definitions):
 *   if n_prompt + n_generated > 0:  z = z > 0 ? z / repetition : z * repetition
 *   z -= presence * (n_generated > 0) + frequency * n_generated
 *   z += bias                        (may be -infinity: the token is never drawn) */
struct sample_adjust {
    int32_t token;
    int32_t n_prompt;    /* times the token occurs in the prompt */
    int32_t n_generated; /* times it was generated */
    float bias;
};

/* How the next token of one row is drawn. The order of operations: adjustments, the allow list
 * (other tokens become -infinity), temperature, top_k, top_p, min_p, typical_p, draw. Candidates
 * are ordered by larger logit, then smaller id. top_k keeps the first k. top_p keeps the shortest
 * prefix whose probability (softmax over what top_k kept) is >= top_p. min_p keeps tokens with
 * probability >= min_p · the best token's. typical_p keeps, of what these left, the tokens whose
 * log-probability is nearest to its mean (the negative entropy): all within the smallest distance
 * that holds typical_p of their mass (locally typical sampling, Meister et al. 2023). The draw
 * takes the first candidate, in that order, whose cumulative share of the kept mass exceeds u;
 * without top_k, top_p, min_p and typical_p the candidates are taken in id order instead (no
 * sort). temperature 0 takes the largest adjusted logit, the lowest id on ties. Shares are
 * exp((z - z_max) / temperature), summed in candidate order; a backend's sums may be off by 1e-6 of
 * the total, so backends may draw different tokens where u is that close to a border. Rounding
 * never leaves the draw empty: if no cumulative share exceeds u, the last candidate with a share
 * above 0 is taken. If every allowed token is at -infinity, the lowest allowed id is taken. If a
 * logit is NaN or +infinity, the lowest such id is taken; its log-probability is then NaN. */
struct sample_params {
    double u;          /* uniform in [0, 1): the sequence's own counter-based random number */
    float temperature; /* >= 0 */
    float top_p;       /* (0, 1]; 1 = off */
    float min_p;       /* [0, 1); 0 = off */
    float typical_p;   /* [0, 1); 0 = off */
    float repetition;  /* > 0; 1 = off */
    float presence;    /* 0 = off */
    float frequency;   /* 0 = off */
    int32_t top_k;     /* 0 = off */
    int32_t adjust_first, n_adjust; /* this row's slice of step.adjust: distinct tokens */
    int32_t allow_first, n_allow;   /* this row's slice of step.allow; n_allow 0 = all allowed */
};

/* What a sequence switches off or scales among the look-ups of its memories: see pkm_ablate. The
 * entries of a list are sorted by memory, head and slot, and no two agree in all three. */
struct step_ablate {
    int32_t memory;
    int32_t head; /* -1 = all */
    int32_t slot; /* -1 = all */
    float scale;
};

/* Rows of a table that a sequence reads instead of those of the model. What it points to is in the
 * backend's memory and does not change while a step may use it. */
struct redirect_rows {
    /* [n, columns of the table] of dtype, without gaps; NULL = the table has none */
    const void *data;
    const float *scale; /* [n] what the numbers of a row are multiplied by; NULL = 1 */
    enum dtype dtype;   /* F32 or BF16; where the backend is_host, also F16 or I8 */
};

/* Which slots of a memory's tables are read from which rows: an open hash table. The search for a
 * slot begins at redirect_place_of and goes on from place to place, around the end, until it meets
 * an empty one. */
struct redirect_place {
    int32_t slot; /* -1 = empty, which at least one place is */
    int32_t row;
};
struct step_redirect {
    int32_t memory; /* pkm_redirect.memory */
    int32_t n_bit;  /* 1 .. 30: there are 2^n_bit places */
    const struct redirect_place *place;
    struct redirect_rows values, experts;
};

#define REDIRECT_HASH 0x9e3779b1u /* 2^32 over the golden ratio */

static inline uint32_t redirect_place_of(int32_t slot, int n_bit)
{
    return ((uint32_t)slot * REDIRECT_HASH) >> (32 - n_bit);
}

enum out_want {
    OUT_SAMPLE = 1,  /* draw a token with sample[]: out_token */
    OUT_LOGPROB = 2, /* log-probability and rank of the target: out_logprob, out_rank */
    OUT_TOP = 4,     /* the n_top best tokens: top_id, top_logprob */
    OUT_ENTROPY = 8, /* entropy of the distribution in nats: out_entropy */
};

/* target[] value that means "the token drawn for this row" (OUT_SAMPLE must be wanted too). */
enum { TARGET_SAMPLED = -1 };

/* Largest value + 1 of a step's inputs: what ops index with is checked against these. */
struct step_bounds {
    int32_t token, pos, lang, page;
};

struct step {
    struct step_limits limits;

    /* inputs */
    int n_tok, n_seq, n_out;
    int n_top;             /* alternatives computed for rows with OUT_TOP, <= n_top_max */
    int n_adjust, n_allow; /* used entries of the lists */
    int n_ablate;          /* 0: no sequence has a knock-out list */
    int n_redirect;        /* 0: no sequence has redirections */
    /* Of a backend with phases_apart: all rows hold tokens that were drawn, one of each sequence;
     * false: none does. */
    bool is_drawn;
    /* Not 0: steps of this number and as many rows call the same ops with the same arguments, and
     * read no result before the last one was called. A backend may replay what it recorded of one
     * of them. */
    int ops_list;
    /* Of a backend with runs_ahead: the outputs of the step that began before this one, whose drawn
     * tokens rows of this one may hold. It need not have finished. Else 0. */
    int n_before;
    int32_t *token;     /* [n_tok], or step_token_drawn */
    int32_t *pos;       /* [n_tok] position in its own sequence = index into its cache */
    int32_t *lang;      /* [n_tok] language id; 0 where the model has no languages */
    int32_t *seq_first; /* [n_seq+1] rows seq_first[s] .. seq_first[s+1]-1 belong to sequence s;
                         * their positions are consecutive; seq_first[n_seq] = n_tok */
    int32_t *page;      /* [n_seq, n_page_max] cache pages: step_page says of which positions */
    int32_t *out_row;   /* [n_out] row of this output, ascending */
    uint8_t *out_want;  /* [n_out] enum out_want, never 0 */
    int32_t *target;    /* [n_out] token whose log-probability is wanted, or TARGET_SAMPLED */
    struct sample_params *sample; /* [n_out] */
    struct sample_adjust *adjust; /* [n_adjust] */
    int32_t *allow;               /* [n_allow] */
    int32_t *ablate_first;        /* [n_seq+1] sequence s has the entries ablate_first[s] ..
                                   * ablate_first[s+1]-1; ablate_first[n_seq] = n_ablate */
    struct step_ablate *ablate;   /* [n_ablate] */
    int32_t *redirect_first;      /* [n_seq+1] as ablate_first */
    /* [n_redirect] those of a sequence ascend by memory; if several are for one memory, the first
     * that has the slot counts */
    struct step_redirect *redirect;

    struct step_bounds bounds; /* of the inputs above, written by step_check */

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

/* In place of a token: the one that output i of the step before draws. */
static inline int32_t step_token_drawn(int i)
{
    return -1 - i;
}

/* The cache page of position pos of sequence seq. In a ring, a position's place is taken over by
 * the one that is n_page_max pages later. */
static inline int32_t step_page(const struct step *step, int seq, int pos)
{
    const int n = step->limits.n_page_max;
    return step->page[(int64_t)seq * n + pos / KV_PAGE % n];
}

/* Pages that hold n_pos positions; in a ring that has been filled once, all of them. */
static inline int step_pages_used(const struct step *step, int n_pos)
{
    const int n = n_pos / KV_PAGE + (n_pos % KV_PAGE != 0);
    return n < step->limits.n_page_max ? n : step->limits.n_page_max;
}

/* Whether entry a of a knock-out list stands before b. */
static inline bool step_ablate_precedes(const struct step_ablate *a, const struct step_ablate *b)
{
    return a->memory != b->memory ? a->memory < b->memory
           : a->head != b->head   ? a->head < b->head
                                  : a->slot < b->slot;
}

/* ---- for backends --------------------------------------------------------------------------- */

/* The redirections of a memory for one row. */
struct redirect_list {
    const struct step_redirect *entry; /* Borrowed: [n] */
    int n;
};
struct redirect_list step_redirects(const struct step *step, int64_t row, int memory);
/* Which row of which entry a slot is read from; -1: of none, and *entry stays. For backends whose
 * memory is the host's. */
int32_t step_redirect_row(const struct redirect_list *list, int32_t slot,
                          const struct step_redirect **entry);

/* Takes the limits and allocates the arrays, zero-filled, each an allocation of its own, so that a
 * sanitizer sees a write past its end. Owner: the step, until step_arrays_free, which is also
 * called after a failure and takes arrays that are NULL. */
enum err_code step_arrays_new(struct step *step, const struct step_limits *limits, struct err *err);
void step_arrays_free(struct step *step);

/* CHECKs what the inputs promise: counts within the limits, rows in order, positions consecutive
 * and within the pages, numbers that ops index with not negative, outputs ascending and wanted.
 * Takes the bounds. For step_begin. */
void step_check(struct step *step);

#endif
