/* All tensors of a model directory: model.safetensors, or the shards that
 * model.safetensors.index.json names, mapped read-only and looked up by name.
 *
 * model_open opens them; families take their weights through loader.h. Nothing is copied: an
 * entry's data lies in the mapping, and pages that were packed can be handed back to the system.
 *
 * The files must not be changed or truncated while a model is open: tensors_check_files tells
 * whether they were (mapped.h). Replace a model by writing a new directory (or renaming new files
 * into place), which leaves the mapping intact. */
#ifndef MODELS_TENSORS_H
#define MODELS_TENSORS_H

#include "kernels/tensor.h"
#include "models/model.h"
#include "models/safetensors.h"

struct tensors;

/* Owner of *tensors: the caller, by tensors_close. Every entry has dtype F32, F16, BF16, I8 or I32,
 * or holds a memory's values in U8 (codes of 4 bits, DTYPE_Q4), and starts at a multiple of its
 * element size; any other is ERR_UNSUPPORTED and names the tensor. */
enum err_code tensors_open(struct tensors **tensors, const char *dir, struct err *err);
void tensors_close(struct tensors *tensors); /* NULL is fine */
/* Whether the files are still what was mapped; ERR_IO names the first that is not. With reads_only
 * only whether each read so far has found its bytes, which costs nothing. */
enum err_code tensors_check_files(const struct tensors *tensors, bool reads_only, struct err *err);

/* Entries in ascending order of their names, which are distinct. */
int tensors_n(const struct tensors *tensors);
/* Of the first file, for messages about tensors that are in none. Borrowed. */
const char *tensors_path(const struct tensors *tensors);
const struct safetensors_entry *tensors_at(const struct tensors *tensors, int index);
/* The index of name, or -1. */
int tensors_find(const struct tensors *tensors, const char *name);

/* Whether it is a memory's values, experts or their scales, which may be larger than all other
 * weights and of another type. */
bool tensors_is_value_table(const struct safetensors_entry *entry);
/* The entry's dtype, and its data as rows of cols columns (rows · cols = n_elem). */
enum dtype tensors_dtype(const struct safetensors_entry *entry);
const char *tensors_dtype_name(const struct safetensors_entry *entry); /* as the file spells it */
struct tensor tensors_view(const struct safetensors_entry *entry, int64_t rows, int64_t cols);
/* Widens all elements of an F32, F16 or BF16 entry to F32, exactly; another dtype is a bug. */
void tensors_widen(float *out, const struct safetensors_entry *entry);
/* Tells the system that the entry's pages are not needed for now. A later read brings them back. */
void tensors_release(const struct safetensors_entry *entry);
/* The same of some of its bytes: whoever reads a table from end to end keeps little of it. */
void tensors_release_part(const struct safetensors_entry *entry, size_t first, size_t bytes);

/* I8 where any weight is, else the floating type of most bytes. */
enum dtype tensors_main_dtype(const struct tensors *tensors);
/* Reads every element; NaN or infinity is ERR_NUMERICAL and names the tensor and its index. */
enum err_code tensors_check(const struct tensors *tensors, const struct model_options *options,
                            struct err *err);

#endif
