/* Weights: the parameters of a model in a backend's own layout, made once at load, immutable after.
 *
 * A backend's own struct begins with struct weight, which says what all of them know: so the checks
 * of op.c are the same for all. */
#ifndef KERNELS_WEIGHT_H
#define KERNELS_WEIGHT_H

#include "kernels/err.h"
#include "kernels/tensor.h"

#include <stdbool.h>

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

/* What a weight is made as. */
struct weight_desc {
    enum weight_kind kind;
    /* As computed with. F32, BF16: any kind. F16: a MATRIX where the backend has_f16 (numbers
     * beyond 65504 become 65504 with their sign), and there a TABLE of an F16 source that only
     * pkm_read or pkm_experts read. I8: a MATRIX or TABLE where it has_int8; where it
     * has_int8_slots, a TABLE of an I8 source that only pkm_read or pkm_experts read. Q4: if and
     * only if the source is, a TABLE that only pkm_read reads. A TABLE with PLACEMENT_MMAP keeps
     * its source's dtype. */
    enum dtype dtype;
    enum placement placement;
    int n_group;            /* KEYS: independent key sets that follow one another; else 1 */
    bool is_flat;           /* KEYS, of a PKM_FLAT memory, which may be searched otherwise */
    bool is_split;          /* KEYS, and MATRIX of F32: rows and weights may be split into sums of
                             * two BF16 numbers, and the product of the two low parts left out. A
                             * product x·w is then off by less than 2^-15 of it, by some 2^-18 on
                             * average; a sum of eight and more of like size by less than 2^-16 of
                             * Σ|x·w|, unless made for it; and adding them rounds, as always */
    const float *row_scale; /* Borrowed: [rows] scales of an I8 source, as in kernels/int8.h; with
                             * PLACEMENT_MMAP they must live as long as the weight. Else NULL */
    const uint16_t *row_scale_f16; /* the same of a Q4 source */
    double loss_max; /* I8 made from other numbers w: refused (ERR_NUMERICAL) where |w - q·scale|
                      * > loss_max·|w|, norms over the whole weight; 0 = never */
};

/* The head of every backend's weight. */
struct weight {
    enum weight_kind kind;
    enum dtype dtype; /* as computed with; KEYS: F32 */
    enum placement placement;
    int n_group;
    int64_t rows, cols; /* of the parameter, before it was packed */
};

/* ---- for backends' weight_new --------------------------------------------------------------- */

/* The head of a weight that is made of host; CHECKs what the caller of weight_new promises. */
struct weight weight_head(const struct tensor *host, const struct weight_desc *desc);
/* Checks that int8 can hold the weight's numbers; and that rounding them did not lose too much.
 * name is the weight's. */
enum err_code weight_int8_check(const struct tensor *host, const struct weight_desc *desc,
                                const char *name, struct err *err);
enum err_code weight_loss_check(double loss, const struct weight_desc *desc, const char *name,
                                struct err *err);

#endif
