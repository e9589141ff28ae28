/* An overlay written into a model: what `pkmserve memory apply` does. */
#ifndef MODELS_OVERLAY_APPLY_H
#define MODELS_OVERLAY_APPLY_H

#include "models/overlay.h"

struct overlay_applied {
    int64_t n_row[MODEL_PKM_MAX];
    bool rounded; /* the table's type cannot hold what the overlay's rows are when served */
};

/* Makes the directory `to`, which must not exist, of the files of `base` with the overlay's rows in
 * its tables; what describes the base itself (README.md, parity.json, model.sha256) is left out.
 * Tables keep their type: rows of that type are copied bit for bit, others rounded to it, int8 as
 * kernels/int8.h says. The directory appears under its name when it is complete. Files are copied
 * in pieces and rows changed in place, so tables may have any size. ERR_UNSUPPORTED: a table of 4
 * bits; and see overlay_check. */
enum err_code overlay_apply(struct overlay_applied *applied, const char *base, const char *overlay,
                            const char *to, struct err *err);

#endif
