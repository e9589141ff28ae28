/* See overlay_image.h. */
#include "models/overlay_image.h"

#include "kernels/int8.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { ALIGN = 64 };

/* Reserves n elements at the end of the block. */
static size_t take(struct overlay_image *image, int64_t n, size_t element_bytes)
{
    const size_t at = image->bytes;
    image->bytes += ((size_t)n * element_bytes + ALIGN - 1) / ALIGN * ALIGN;
    return at;
}

static enum dtype kept_dtype(const struct overlay *overlay, const struct overlay_rows *rows,
                             const struct model_info *info, bool is_host)
{
    const enum dtype dtype = rows->rows.dtype;
    if (info->dtype == DTYPE_I8 && info->value_dtype == DTYPE_I8) {
        return DTYPE_I8;
    }
    const bool is_widened = (dtype == DTYPE_F16 || dtype == DTYPE_I8) && !is_host;
    return overlay->add || is_widened ? DTYPE_F32 : dtype;
}

static void plan_rows(struct overlay_image *image, struct overlay_image_rows *to, int64_t n,
                      enum dtype dtype)
{
    to->dtype = dtype;
    to->rows = take(image, n * to->base.cols, dtype_bytes(dtype));
    to->scale = dtype == DTYPE_I8 ? take(image, n, sizeof(float)) : 0;
}

enum err_code overlay_image_plan(struct overlay_image *image, const struct overlay *overlay,
                                 const struct tensors *tensors, const struct model_info *info,
                                 const struct backend *be, struct err *err)
{
    *image = (struct overlay_image){.add = overlay->add, .n_memory = overlay->n_memory};
    enum err_code code = ERR_OK;
    for (int i = 0; i < overlay->n_memory && code == ERR_OK; i++) {
        const struct overlay_memory *const from = &overlay->memory[i];
        struct overlay_image_memory *const to = &image->memory[i];
        *to = (struct overlay_image_memory){.memory = from->memory, .n_bit = 1};
        while ((INT64_C(1) << to->n_bit) <
               2 * from->n) { /* n is below 2^29: its rows are in memory */
            to->n_bit++;
        }
        to->place = take(image, INT64_C(1) << to->n_bit, sizeof(struct redirect_place));
        code = table_open(&to->values.base, tensors, info, from->memory, false, err);
        if (code == ERR_OK) {
            plan_rows(image, &to->values, from->n,
                      kept_dtype(overlay, &from->values, info, be->is_host));
        }
        to->experts.dtype = DTYPE_N;
        if (code == ERR_OK && from->experts.rows.data != NULL) {
            code = table_open(&to->experts.base, tensors, info, from->memory, true, err);
            plan_rows(image, &to->experts, from->n,
                      kept_dtype(overlay, &from->experts, info, be->is_host));
        }
    }
    return code;
}

/* ---- filling -------------------------------------------------------------------------------- */

static void fill_places(struct redirect_place *place, const struct overlay_memory *from, int n_bit)
{
    const uint32_t last = (UINT32_C(1) << n_bit) - 1;
    for (uint32_t p = 0; p <= last; p++) {
        place[p] = (struct redirect_place){-1, -1};
    }
    for (int64_t i = 0; i < from->n; i++) {
        uint32_t at = redirect_place_of(from->slot[i], n_bit);
        while (place[at].slot >= 0) {
            at = (at + 1) & last;
        }
        place[at] = (struct redirect_place){from->slot[i], (int32_t)i};
    }
}

/* Writes one row of numbers as dtype, F32 or I8; an I8 row with its scale. Rows of other types are
 * kept as they are. */
static void put_row(char *to, float *scale, const float *row, int64_t cols, enum dtype dtype)
{
    if (dtype == DTYPE_F32) {
        memcpy(to, row, (size_t)cols * sizeof *row);
        return;
    }
    CHECK(dtype == DTYPE_I8);
    uint32_t most = 0;
    for (int64_t c = 0; c < cols; c++) {
        const uint32_t magnitude = int8_magnitude(row[c]);
        most = magnitude > most ? magnitude : most;
    }
    const struct int8_scale rounding = int8_scale_of(int8_from_magnitude(most));
    *scale = rounding.scale;
    for (int64_t c = 0; c < cols; c++) {
        to[c] = (char)int8_round(row[c], rounding.inverse);
    }
}

static bool is_finite(const float *row, int64_t n)
{
    bool finite = true;
    for (int64_t c = 0; c < n; c++) {
        finite = finite && isfinite(row[c]);
    }
    return finite;
}

static enum err_code fill_rows(char *block, const struct overlay_image *image,
                               const struct overlay_image_rows *to,
                               const struct overlay_memory *part, const struct overlay_rows *from,
                               const char *path, struct err *err)
{
    const int64_t cols = to->base.cols;
    const size_t row_bytes = (size_t)cols * dtype_bytes(to->dtype);
    float *const scale = to->scale > 0 ? (float *)(void *)(block + to->scale) : NULL;
    if (!image->add && to->dtype == from->rows.dtype) {
        memcpy(block + to->rows, from->rows.data, (size_t)part->n * row_bytes);
        if (scale != NULL) {
            memcpy(scale, from->scale, (size_t)part->n * sizeof *scale);
        }
        return ERR_OK;
    }
    float *const row = malloc(2 * (size_t)cols * sizeof *row);
    if (row == NULL) {
        return err_set(err, ERR_MEMORY, "%s: no memory for a row of %lld numbers", path,
                       (long long)cols);
    }
    float *const base = row + cols;
    enum err_code code = ERR_OK;
    for (int64_t i = 0; i < part->n && code == ERR_OK; i++) {
        table_overlay_row(row, from, i);
        if (image->add) {
            table_row(base, &to->base, part->slot[i]);
            for (int64_t c = 0; c < cols; c++) {
                row[c] = base[c] + row[c];
            }
        }
        if (!is_finite(row, cols)) {
            code =
                err_set(err, ERR_NUMERICAL, "%s: memory %d: slot %d: what the row %s is no number",
                        path, part->memory, part->slot[i],
                        image->add ? "and the base's add up to" : "holds times its scale");
        }
        put_row(block + to->rows + (size_t)i * row_bytes, scale == NULL ? NULL : scale + i, row,
                cols, to->dtype);
    }
    free(row);
    return code;
}

enum err_code overlay_image_fill(void *block, const struct overlay_image *image,
                                 const struct overlay *overlay, struct err *err)
{
    enum err_code code = ERR_OK;
    for (int i = 0; i < image->n_memory && code == ERR_OK; i++) {
        const struct overlay_image_memory *const to = &image->memory[i];
        const struct overlay_memory *const from = &overlay->memory[i];
        fill_places((struct redirect_place *)(void *)((char *)block + to->place), from, to->n_bit);
        code = fill_rows(block, image, &to->values, from, &from->values, overlay->path, err);
        if (code == ERR_OK && to->experts.dtype != DTYPE_N) {
            code = fill_rows(block, image, &to->experts, from, &from->experts, overlay->path, err);
        }
    }
    return code;
}

/* ---- reading -------------------------------------------------------------------------------- */

static struct redirect_rows rows_at(const struct overlay_image_rows *rows, const char *at)
{
    return (struct redirect_rows){
        .data = at + rows->rows,
        .scale = rows->scale > 0 ? (const float *)(const void *)(at + rows->scale) : NULL,
        .dtype = rows->dtype};
}

struct step_redirect overlay_image_redirect(const struct overlay_image *image, int i,
                                            const void *at)
{
    const struct overlay_image_memory *const memory = &image->memory[i];
    const char *const begin = at;
    struct step_redirect redirect = {
        .memory = memory->memory,
        .n_bit = memory->n_bit,
        .place = (const struct redirect_place *)(const void *)(begin + memory->place),
        .values = rows_at(&memory->values, begin)};
    if (memory->experts.dtype != DTYPE_N) {
        redirect.experts = rows_at(&memory->experts, begin);
    }
    return redirect;
}
