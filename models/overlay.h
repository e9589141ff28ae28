/* Overlays: rows that stand in for rows of the value tables of one base model, from a safetensors
 * file. For each memory I that it changes:
 *   memories.I.slots        I32 [n], ascending and distinct
 *   memories.I.rows         [n, d_value] F32, F16, BF16, or I8 with memories.I.rows.scale F32 [n]
 *   memories.I.experts      [n, d_model] likewise, with memories.I.experts.scale, where and only
 *                           where the memory has experts
 * and as metadata: format, OVERLAY_FORMAT; mode, "replace" or "add"; base, or base.I where there
 * are several memories: what overlay_base_hash gives for memory I of the base.
 *
 * A file is believed nothing: overlay_parse checks all that the file alone can tell, overlay_check
 * the rest against a model. Errors begin with the file's path and name the tensor. */
#ifndef MODELS_OVERLAY_H
#define MODELS_OVERLAY_H

#include "models/sha256.h"
#include "models/tensors.h"

#define OVERLAY_FORMAT "pkmserve-overlay-1"

/* Rows of one table, in the file's own type. */
struct overlay_rows {
    /* Borrowed: [n, columns] F32, F16, BF16 or I8; data NULL = there are none */
    struct tensor rows;
    const float *scale; /* Borrowed: [n] of I8, else NULL */
};

/* What an overlay has for one memory. */
struct overlay_memory {
    int memory;          /* index into model_info.memory */
    int64_t n;           /* slots, at least one */
    const int32_t *slot; /* Borrowed: [n] ascending, distinct, from 0 */
    struct overlay_rows values, experts;
    const char *base; /* Borrowed: the hash of the table it was made for, 64 digits */
};

struct overlay {
    const char *path;          /* Borrowed: for messages */
    struct safetensors tensor; /* Owner of the list, not of the bytes */
    bool add;                  /* rows are added to the base's, rather than replacing them */
    char sha256[SHA256_HEX];   /* of the file's bytes */
    struct overlay_memory memory[MODEL_PKM_MAX]; /* [n_memory] by ascending index */
    int n_memory;
};

/* file, aligned as malloc aligns, and path must outlive overlay. Refused: what is not as described
 * above, slots that are not ascending, NaN and infinity. Owner of what overlay holds: the caller,
 * by overlay_free; on failure there is nothing to free. */
enum err_code overlay_parse(struct overlay *overlay, const void *file, size_t bytes,
                            const char *path, struct err *err);
void overlay_free(struct overlay *overlay);

/* Refuses an overlay for another model: a memory that does not exist or reads another's table, a
 * slot past its end, rows of another width, experts missing or too many, and another base.
 * hash [info->n_memory] as overlay_base_hash gives them, or NULL: bases are not compared. */
enum err_code overlay_check(const struct overlay *overlay, const struct model_info *info,
                            const char (*hash)[SHA256_HEX], struct err *err);

/* The hash of the value tensor of memory m in the file: its bytes, where it is quantised then those
 * of its scales; where the memory has experts, then theirs likewise. A memory that reads another's
 * table has none: hex becomes "". Reads the whole table once. */
enum err_code overlay_base_hash(char hex[SHA256_HEX], const struct tensors *tensors,
                                const struct model_info *info, int m, struct err *err);

#endif
