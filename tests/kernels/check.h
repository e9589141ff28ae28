/* The checker: compares every op of a backend with kernels/ref, and the backend with itself.
 *
 * test_kernels.c runs it over each instruction set of the machine; test_checker.c plants bugs and
 * demands that it finds them. A new kernel enters with a row in check_kernels.c.
 *
 * A case draws a shape and data from its seed, runs the op on three sides (ref, the backend with
 * one thread, the backend with several) and demands:
 *   - results within the tolerance of check_tolerance from ref's, exactly ref's where the op
 *     chooses (slots, tokens, ranks) and the choice does not hang on a rounding error;
 *   - the same bits for all rows at once, one by one, in random chunks, and with more threads;
 *   - nothing written outside of the outputs: they lie between guard words, in rows with gaps, at
 *     odd offsets, filled with NaN before.
 * All data go through the backend's own buffers, uploads and downloads. */
#ifndef TESTS_KERNELS_CHECK_H
#define TESTS_KERNELS_CHECK_H

#include "kernels/backend.h"

enum side { SIDE_REF, SIDE_ONE, SIDE_MANY, SIDE_N };

struct check_row;

/* What outputs hold before the op: a NaN, and no index. */
enum { CHECK_POISON = 0x7fc07fdd };

enum { CHECK_BLOCK_MAX = 256, CHECK_HOST_MAX = 256, CHECK_WEIGHT_MAX = 32 };

/* Memory of a backend with a view in it; everything else in it is guard. */
struct block {
    struct backend *be; /* Borrowed */
    void *device;       /* Owner: the block */
    uint32_t *image;    /* Owner: the block; [n_word] what was uploaded */
    size_t n_word, first;
    struct tensor view;
    const char *name;
    bool is_output; /* the view's own words may change */
};

struct check {
    struct backend *side[SIDE_N]; /* Borrowed: opened by the test */
    /* Opens the sides anew before one case in REOPEN, so that it has the scratch memory that its
     * own weights and steps asked for, and no more; NULL: all cases share them */
    void (*reopen)(struct check *c, const void *subject);
    const void *subject;
    const struct check_row *row;
    uint64_t seed; /* of the running case */
    uint64_t rng;
    char shape[256]; /* of the running case, for messages */
    bool is_quiet;   /* count failures without printing them */
    bool is_double;  /* the backend runs on the test double: rows of the host alone are left out */
    bool is_plain;   /* the running case: all views are as models make them */
    bool has_failed; /* the running case; its later failures are not reported */
    int n_case, n_failed;
    int n_near; /* slots that searches chose instead of ref's, whose scores rounding cannot tell
                 * apart */
    char message[1024]; /* the first failure, "" without */

    /* what the running case has taken; given back at its end */
    struct block block[CHECK_BLOCK_MAX];
    int n_block;
    void *host[CHECK_HOST_MAX];
    int n_host;
    struct weight *weight[CHECK_WEIGHT_MAX];
    enum side weight_side[CHECK_WEIGHT_MAX];
    int n_weight;
};

/* One op's entry. */
struct check_row {
    const char *name;
    void (*run)(struct check *c);
    int n_case;
    bool is_host; /* large shapes at which only the host's kernels change their ways */
};

/* The table of all ops, ended by a row without name. */
extern const struct check_row check_rows[];

/* Runs percent % of every row's n_case, at least one (of the row named only, unless it is NULL;
 * else without rows that a double leaves out). */
void check_run(struct check *c, const char *only, uint64_t seed, int percent);
/* Runs the single case of this seed. */
void check_run_case(struct check *c, const struct check_row *row, uint64_t seed);
/* Times the ops of c->side[SIDE_MANY] at serving sizes and prints a table. */
void check_bench(struct check *c);

/* ---- for the rows: check_*.c ----------------------------------------------------------------- */

/* Reports a failure of the running case; the message gets op, shape, seed and how to rerun. */
void check_fail(struct check *c, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* Writes the running case's shape. */
void check_shape(struct check *c, const char *format, ...) __attribute__((format(printf, 2, 3)));

uint64_t check_random(struct check *c);
int check_int(struct check *c, int first, int last);    /* uniform in first .. last */
bool check_chance(struct check *c, double probability); /* true that often */
double check_uniform(struct check *c);                  /* [0, 1) */
int check_many(struct check *c); /* rows: more or fewer than backends take at a time, 256 or 512 */
int check_dim(struct check *c, int max);                     /* 1 .. max; often near 8, 16, 32.. */
float *check_normal(struct check *c, size_t n, float sigma); /* host array of the case */
float *check_small(struct check *c, size_t n);               /* of -1, -1/2, 0, 1/2, 1: exact */
void *check_host(struct check *c, size_t n, size_t elem_bytes); /* zero-filled array of the case */
void check_host_drop(struct check *c); /* frees the newest of the case's host arrays early */

/* Host tensor [rows, cols] of any floating type or I8, of the case; as in a file, it may start at
 * any byte, and there may be gaps between its rows. The scale of an I8 row follows from its number;
 * check_weight hands it on. */
struct tensor check_host_tensor(struct check *c, int64_t rows, int64_t cols, enum dtype dtype,
                                float sigma);
/* The value of its element, as F32. */
float check_value(const struct tensor *t, int64_t row, int64_t col);
/* A description of a weight that the backend takes, and its type as computed with: drawn, but a
 * table keeps its file's precision. */
struct weight_desc check_desc(struct check *c, enum weight_kind kind, enum dtype source);
/* Of a table of values or experts. */
struct weight_desc check_slots_desc(struct check *c, enum dtype source);
struct weight *check_weight(struct check *c, enum side side, const struct tensor *host,
                            const struct weight_desc *desc);

/* A step of n rows that are each a sequence of its own, so that positions are free (8 pages) and
 * rows may be cut anywhere; not begun. The caller frees it. */
struct step *check_step_rows(struct check *c, enum side side, int n);
/* Whether large cases take long: a GPU computes them in no time. */
bool check_is_slow(const struct check *c);
/* finish of a step; a failure of the device is one of the case. */
void check_finish(struct check *c, enum side side, struct step *step);

/* An input, from host words [rows, cols] 4 bytes each: must come out of the op unchanged. */
struct tensor check_in(struct check *c, enum side side, const char *name, const void *host,
                       int64_t rows, int64_t cols, enum dtype dtype);
/* An output, poisoned. */
struct tensor check_out(struct check *c, enum side side, const char *name, int64_t rows,
                        int64_t cols, enum dtype dtype);
/* An input that the op overwrites. */
struct tensor check_inout(struct check *c, enum side side, const char *name, const void *host,
                          int64_t rows, int64_t cols, enum dtype dtype);
/* Poisoned output without gaps, aligned as buffers are. */
struct tensor check_pages(struct check *c, enum side side, const char *name, int64_t rows,
                          int64_t cols, enum dtype dtype);
/* Downloads a view as rows·cols words. */
void check_get(struct check *c, enum side side, struct tensor view, void *host);
/* Downloads what a memory's search gives as words [rows, 2, cols]: a row's slots, then its shares.
 */
void check_get_hits(struct check *c, enum side side, struct tensor slots, struct tensor shares,
                    uint32_t *out);
/* Verifies the guards of the blocks taken since n_block was mark, and frees them. */
void check_release(struct check *c, int mark);

/* Tolerances, relative to the magnitude that the caller knows. */
enum tolerance {
    TOL_NORM,
    TOL_LINEAR_F32,
    TOL_LINEAR_HALF,
    TOL_LINEAR_GELU,
    TOL_LINEAR_SPLIT,
    TOL_ATTENTION,
    TOL_ATTENTION_BF16, /* scores and shares may be rounded */
    TOL_SCORE,
    TOL_SCORE_SPLIT,
    TOL_SHARE,
    TOL_SHARE_SPLIT,
    TOL_READ,
    TOL_LOGPROB,
    TOL_ENTROPY,
    TOL_N
};
double check_tolerance(enum tolerance tolerance);
/* got equals expected within tolerance · magnitude; NaN and infinities exactly. */
bool check_close(float expected, float got, enum tolerance tolerance, double magnitude);
/* The same for [rows, cols]; reports the first difference. magnitude: one for each element, or one
 * for each row (n_magnitude = rows). */
void check_values(struct check *c, const char *what, const float *expected, const float *got,
                  int64_t rows, int64_t cols, enum tolerance tolerance, const double *magnitude,
                  int64_t n_magnitude);
/* [rows, cols] words equal; what says which two runs are compared. */
void check_words(struct check *c, const char *what, const void *expected, const void *got,
                 int64_t rows, int64_t cols);

/* Runs rows first .. first+n-1 of a case on a side and writes n rows of n_word words to out. */
typedef void check_rows_fn(struct check *c, enum side side, const void *data, int first, int n,
                           uint32_t *out);
/* Compares the backend with itself: whole (the result of SIDE_ONE for all rows) must be the bits of
 * each row alone, of random chunks and of several threads. */
void check_invariance(struct check *c, check_rows_fn *run, const void *data, int n_row, int n_word,
                      const uint32_t *whole);

/* Makes one row of the case's input [n_row, n_input] NaN: the other rows must keep their bits, for
 * they belong to other users. Last in a case, as it spoils the input. */
void check_isolation(struct check *c, check_rows_fn *run, const void *data, float *input,
                     int n_input, int n_row, int n_word, const uint32_t *whole);

/* Redirections of a case's rows: some have none, some several. check_redirect.c */
struct check_redirect;
/* For rows 0 .. n_row-1 of a call that reads a table [n_slot, cols]. experts: for that table, not
 * for the values. */
struct check_redirect *check_redirect_new(struct check *c, int n_row, int n_slot, int cols,
                                          bool experts);
/* A step of rows first .. first+n-1 on a side, begun; *redirect is for the op. The caller frees
 * it. */
struct step *check_redirect_step(struct check *c, enum side side, const struct check_redirect *k,
                                 int first, int n, struct pkm_redirect *redirect);
/* What row reads at [slot, col]: a stand-in's number, else value. */
float check_redirect_value(const struct check_redirect *k, int row, int32_t slot, int col,
                           float value);

/* the rows, by file */
void check_transfer(struct check *c); /* check_dense.c */
void check_embed(struct check *c);
void check_norm(struct check *c);
void check_add_norm(struct check *c);
void check_linear(struct check *c); /* check_linear.c */
void check_linear_drawn(struct check *c);
void check_norm_linear(struct check *c);
void check_linear_many(struct check *c);
void check_linear_deep(struct check *c);
void check_linear_stream(struct check *c);
void check_ffn(struct check *c);
void check_attention(struct check *c); /* check_attention.c */
void check_attention_bf16(struct check *c);
void check_attention_long(struct check *c);
void check_attention_many(struct check *c);
void check_span_attention(struct check *c);
void check_pkm_search(struct check *c); /* check_pkm.c */
void check_pkm_search_many(struct check *c);
void check_pkm_search_large(struct check *c);
void check_pkm_ties(struct check *c);
void check_pkm_nan(struct check *c);
void check_pkm_read(struct check *c);
void check_l2_norm(struct check *c); /* check_rescore.c */
void check_pkm_rescore(struct check *c);
void check_pkm_ablate(struct check *c);
void check_rms_norm(struct check *c); /* check_gate.c */
void check_head_norm(struct check *c);
void check_rope(struct check *c);
void check_gate(struct check *c);
void check_pkm_experts(struct check *c);
void check_gather(struct check *c); /* check_vocab.c */
void check_log_softmax(struct check *c);
void check_logprobs(struct check *c);
void check_logprobs_large(struct check *c);
void check_linear_outputs(struct check *c);
void check_sample(struct check *c); /* check_sample.c */
void check_sample_large(struct check *c);

#endif
