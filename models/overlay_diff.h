/* The rows in which two model directories differ, as an overlay (overlay.h) of the first: what
 * `pkmserve memory diff` writes. The tables are read twice, row by row; what is kept is a number
 * for each row that differs. */
#ifndef MODELS_OVERLAY_DIFF_H
#define MODELS_OVERLAY_DIFF_H

#include "models/overlay.h"

/* How many rows of each memory were written. */
struct overlay_diff {
    int64_t n_row[MODEL_PKM_MAX];
};

/* Writes the rows of tuned that are not, bit for bit, those of base to path, in the type that they
 * have in tuned (4 bits: widened to F32), in mode "replace". Refused, naming what it is about:
 * models of another shape, any other tensor that differs, rows with NaN or infinity, and two models
 * without a difference.
 */
enum err_code overlay_diff_write(struct overlay_diff *diff, const char *base, const char *tuned,
                                 const char *path, struct err *err);

#endif
