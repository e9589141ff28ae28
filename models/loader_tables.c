/* The part of the loader (loader.h) that takes tables, which are read by rows: embeddings, and the
 * values and experts of memories. They keep the file's precision in every placement. */
#include "models/loader.h"

#include <stdarg.h>

/* The type of a table's rows: their file's, except that they become INT8 where all weights do. A
 * backend without INT8 takes INT8 rows as BF16, but for those of slots if it can; F16 rows become
 * F32, with the same exception. */
static enum dtype table_dtype(const struct loader *loader, enum dtype file, bool of_slots)
{
    if (file == DTYPE_Q4 || loader->info->dtype == DTYPE_I8) {
        return file == DTYPE_Q4 ? DTYPE_Q4 : DTYPE_I8;
    }
    if (file == DTYPE_I8) {
        const struct backend *const be = loader->store->be;
        return be->has_int8 || (of_slots && be->has_int8_slots) ? DTYPE_I8 : DTYPE_BF16;
    }
    if (file == DTYPE_F16 && of_slots && loader->store->be->has_f16) {
        return DTYPE_F16;
    }
    return file == DTYPE_BF16 ? DTYPE_BF16 : DTYPE_F32;
}

static const struct safetensors_entry *
load_table(struct loader *loader, const struct weight **weight, int64_t rows, int64_t cols,
           const struct name *name, enum placement placement, bool of_slots, size_t *bytes)
{
    const struct source source = loader_source(loader, name, rows, cols);
    if (source.entry == NULL) {
        return NULL;
    }
    const struct tensor host = tensors_view(source.entry, rows, cols);
    const struct weight_desc desc = {.kind = WEIGHT_TABLE,
                                     .dtype = table_dtype(loader, host.dtype, of_slots),
                                     .placement = placement,
                                     .n_group = 1,
                                     .row_scale = source.scale,
                                     .loss_max = loader->options->int8_max_loss};
    *weight = loader_weight(loader, &host, &desc, name->text, bytes);
    if (placement != PLACEMENT_MMAP) {
        tensors_release(source.entry);
    }
    return source.entry;
}

/* The same for Q4: codes, and the scales of their rows. */
static const struct safetensors_entry *load_codes(struct loader *loader,
                                                  const struct weight **weight, int64_t rows,
                                                  int64_t cols, const struct name *name)
{
    const int64_t dim[2] = {rows, cols / 2};
    const struct safetensors_entry *const codes = loader_take(loader, name, dim, 2, CODES);
    const void *const scale =
        codes != NULL ? loader_scale(loader, name, rows, SAFETENSORS_F16) : NULL;
    if (scale == NULL) {
        return NULL;
    }
    if (cols % 2 != 0) {
        loader->code = err_set(loader->err, ERR_FORMAT,
                               "%s: tensor %s has dtype U8, codes of 4 bits; rows of %lld columns "
                               "have no two halves",
                               codes->path, codes->name, (long long)cols);
        return NULL;
    }
    const struct tensor host = tensors_view(codes, rows, cols / 2);
    const struct weight_desc desc = {.kind = WEIGHT_TABLE,
                                     .dtype = DTYPE_Q4,
                                     .placement = loader->info->value_placement,
                                     .n_group = 1,
                                     .row_scale_f16 = scale};
    *weight = loader_weight(loader, &host, &desc, name->text, &loader->info->value_bytes);
    if (desc.placement != PLACEMENT_MMAP) {
        tensors_release(codes);
    }
    return codes;
}

static bool is_codes(const struct loader *loader, const struct name *name)
{
    const int index = loader->code == ERR_OK ? tensors_find(loader->tensors, name->text) : -1;
    return index >= 0 && tensors_at(loader->tensors, index)->dtype == SAFETENSORS_U8;
}

void loader_table(struct loader *loader, const struct weight **weight, int64_t rows, int64_t cols,
                  const char *format, ...)
{
    va_list args;
    va_start(args, format);
    const struct name name = name_vmake(format, args);
    va_end(args);
    /* Every token reads one row. A device keeps the table in its own memory, which is fast and much
     * larger; on the host it may stay in the file, like the values. */
    const enum placement placement =
        loader->store->be->is_host ? loader->info->value_placement : PLACEMENT_DEVICE;
    (void)load_table(loader, weight, rows, cols, &name, placement, false,
                     &loader->info->weight_bytes);
}

static void load_values(struct loader *loader, const struct weight **weight, int64_t rows,
                        int64_t cols, const struct name *name, bool may_be_codes)
{
    const struct safetensors_entry *const entry =
        may_be_codes && is_codes(loader, name)
            ? load_codes(loader, weight, rows, cols, name)
            : load_table(loader, weight, rows, cols, name, loader->info->value_placement, true,
                         &loader->info->value_bytes);
    if (entry != NULL) {
        loader->info->n_param_values += rows * cols;
        loader->info->value_dtype = loader->info->value_placement == PLACEMENT_MMAP
                                        ? tensors_dtype(entry)
                                        : table_dtype(loader, tensors_dtype(entry), true);
    }
}

void loader_values(struct loader *loader, const struct weight **weight, int64_t rows, int64_t cols,
                   const char *format, ...)
{
    va_list args;
    va_start(args, format);
    const struct name name = name_vmake(format, args);
    va_end(args);
    load_values(loader, weight, rows, cols, &name, true);
}

void loader_experts(struct loader *loader, const struct weight **weight, int64_t rows, int64_t cols,
                    const char *format, ...)
{
    va_list args;
    va_start(args, format);
    const struct name name = name_vmake(format, args);
    va_end(args);
    load_values(loader, weight, rows, cols, &name, false);
}
