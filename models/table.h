/* A memory's table of values or experts as it stands in a model's file, row by row: nothing of it
 * is kept, so that tables of any size are read in bounded memory. Of overlays likewise. For the
 * tools that compare and change tables; the network reads them through its backend. */
#ifndef MODELS_TABLE_H
#define MODELS_TABLE_H

#include "models/overlay.h"

struct table {
    const struct safetensors_entry *entry; /* Borrowed: the rows, or their codes */
    const struct safetensors_entry *scale; /* Borrowed: [rows] F32 of I8, F16 of Q4; else NULL */
    enum dtype dtype;                      /* F32, F16, BF16, I8 or Q4 */
    int64_t rows, cols;                    /* cols as the model sees them */
};

/* The table that memory m owns; its shape must be the model's. Errors name the tensor. */
enum err_code table_open(struct table *table, const struct tensors *tensors,
                         const struct model_info *info, int m, bool experts, struct err *err);
/* Row i widened to fp32, out [cols]: code times scale where it is quantised. */
void table_row(float *out, const struct table *table, int64_t i);
/* Tells the system that rows first .. first+n-1 are not needed for now. */
void table_release(const struct table *table, int64_t first, int64_t n);
/* The same as table_row of an overlay's rows. */
void table_overlay_row(float *out, const struct overlay_rows *rows, int64_t i);

#endif
