/* Tables of memories, row by row: see table.h. */
#include "models/table.h"

#include <stdio.h>

/* The name "memories.6_in.values" or "memories.6_in.experts". */
static void table_name(char name[SAFETENSORS_NAME_MAX], const struct pkm_info *memory, bool experts)
{
    (void)snprintf(name, SAFETENSORS_NAME_MAX, "memories.%d_%s.%s", memory->layer,
                   memory_place_name(memory->place), experts ? "experts" : "values");
}

static const struct safetensors_entry *find(const struct tensors *tensors, const char *name,
                                            const char *suffix)
{
    char full[SAFETENSORS_NAME_MAX + 16];
    (void)snprintf(full, sizeof full, "%s%s", name, suffix);
    const int index = tensors_find(tensors, full);
    return index < 0 ? NULL : tensors_at(tensors, index);
}

enum err_code table_open(struct table *table, const struct tensors *tensors,
                         const struct model_info *info, int m, bool experts, struct err *err)
{
    const struct pkm_info *const memory = &info->memory[m];
    char name[SAFETENSORS_NAME_MAX];
    table_name(name, memory, experts);
    const struct safetensors_entry *const entry = find(tensors, name, ".weight");
    if (entry == NULL) {
        return err_set(err, ERR_FORMAT, "%s: tensor %s.weight is missing", tensors_path(tensors),
                       name);
    }
    *table = (struct table){.entry = entry,
                            .scale = find(tensors, name, ".weight.scale"),
                            .dtype = tensors_dtype(entry),
                            .rows = memory->n_slot,
                            .cols = experts ? info->d_model : memory->d_value};
    const int64_t wide = table->dtype == DTYPE_Q4 ? 2 : 1;
    if (entry->n_dim != 2 || entry->dim[0] != table->rows || entry->dim[1] * wide != table->cols) {
        return err_set(err, ERR_FORMAT, "%s: tensor %s must have the shape [%lld, %lld]",
                       entry->path, entry->name, (long long)table->rows,
                       (long long)(table->cols / wide));
    }
    const bool quantised = table->dtype == DTYPE_I8 || table->dtype == DTYPE_Q4;
    const enum safetensors_dtype type =
        table->dtype == DTYPE_Q4 ? SAFETENSORS_F16 : SAFETENSORS_F32;
    if (quantised && (table->scale == NULL || table->scale->dtype != type ||
                      table->scale->n_elem != table->rows)) {
        return err_set(err, ERR_FORMAT, "%s: tensor %s needs %s.scale, %s [%lld]", entry->path,
                       entry->name, entry->name, safetensors_dtype_name(type),
                       (long long)table->rows);
    }
    table->scale = quantised ? table->scale : NULL;
    return ERR_OK;
}

/* out = row [cols] of elements, multiplied by scale where they are whole numbers. */
static void widen(float *out, const unsigned char *row, enum dtype dtype, int64_t cols, float scale)
{
    const uint16_t *const half = (const uint16_t *)(const void *)row;
    for (int64_t c = 0; c < cols; c++) {
        switch (dtype) {
        case DTYPE_F32: out[c] = ((const float *)(const void *)row)[c]; break;
        case DTYPE_F16: out[c] = f16_to_f32(half[c]); break;
        case DTYPE_BF16: out[c] = bf16_to_f32(half[c]); break;
        case DTYPE_I8: out[c] = (float)(int8_t)row[c] * scale; break;
        case DTYPE_Q4: out[c] = (float)q4_code(row, cols / 2, c) * scale; break;
        default: UNREACHABLE();
        }
    }
}

void table_row(float *out, const struct table *table, int64_t i)
{
    float scale = 1;
    if (table->dtype == DTYPE_I8) {
        scale = ((const float *)(const void *)table->scale->data)[i];
    } else if (table->dtype == DTYPE_Q4) {
        scale = f16_to_f32(((const uint16_t *)(const void *)table->scale->data)[i]);
    }
    const size_t bytes = table->entry->bytes / (size_t)table->rows;
    widen(out, table->entry->data + (size_t)i * bytes, table->dtype, table->cols, scale);
}

static void release(const struct safetensors_entry *entry, const struct table *table, int64_t first,
                    int64_t n)
{
    const size_t bytes = entry->bytes / (size_t)table->rows;
    tensors_release_part(entry, (size_t)first * bytes, (size_t)n * bytes);
}

void table_release(const struct table *table, int64_t first, int64_t n)
{
    release(table->entry, table, first, n);
    if (table->scale != NULL) {
        release(table->scale, table, first, n);
    }
}

void table_overlay_row(float *out, const struct overlay_rows *rows, int64_t i)
{
    const struct tensor row = tensor_rows(rows->rows, i, 1);
    widen(out, row.data, row.dtype, row.cols, rows->scale != NULL ? rows->scale[i] : 1);
}
