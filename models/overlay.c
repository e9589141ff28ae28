/* See overlay.h. */
#include "models/overlay.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- a file alone --------------------------------------------------------------------------- */

/* What follows "memories.I." in the names of the tensors. */
enum part { PART_SLOTS, PART_ROWS, PART_ROWS_SCALE, PART_EXPERTS, PART_EXPERTS_SCALE, PART_N };
static const char *const part_names[PART_N] = {"slots", "rows", "rows.scale", "experts",
                                               "experts.scale"};

/* The file's tensors by memory and part. */
struct parts {
    const struct safetensors_entry *entry[MODEL_PKM_MAX][PART_N];
};

/* Where parts keeps the tensor called name, or NULL. */
static const struct safetensors_entry **part_of(struct parts *parts, const char *name)
{
    static const char prefix[] = "memories.";
    char again[SAFETENSORS_NAME_MAX];
    if (strncmp(name, prefix, sizeof prefix - 1) != 0) {
        return NULL;
    }
    const long m = strtol(name + sizeof prefix - 1, NULL, 10);
    for (int part = 0; m >= 0 && m < MODEL_PKM_MAX && part < PART_N; part++) {
        (void)snprintf(again, sizeof again, "%s%ld.%s", prefix, m, part_names[part]);
        if (strcmp(name, again) == 0) {
            return &parts->entry[m][part];
        }
    }
    return NULL;
}

static enum err_code sort_parts(struct parts *parts, const struct safetensors *st, const char *path,
                                struct err *err)
{
    for (int i = 0; i < st->n_entry; i++) {
        const struct safetensors_entry **const place = part_of(parts, st->entry[i].name);
        if (place == NULL) {
            return err_set(err, ERR_FORMAT,
                           "%s: tensor %s is no part of an overlay: memories.I.slots, .rows, "
                           ".rows.scale, .experts and .experts.scale are, with I from 0 to %d",
                           path, st->entry[i].name, MODEL_PKM_MAX - 1);
        }
        *place = &st->entry[i]; /* names are distinct */
    }
    return ERR_OK;
}

static enum err_code check_slots(const struct safetensors_entry *entry, struct err *err)
{
    if (entry->dtype != SAFETENSORS_I32 || entry->n_dim != 1 || entry->n_elem == 0) {
        return err_set(err, ERR_FORMAT, "%s: tensor %s must be I32 [n], and name a slot",
                       entry->path, entry->name);
    }
    if ((uintptr_t)entry->data % sizeof(int32_t) != 0) {
        return err_set(err, ERR_FORMAT,
                       "%s: tensor %s does not start at a multiple of its element size",
                       entry->path, entry->name);
    }
    const int32_t *const slot = (const int32_t *)(const void *)entry->data;
    for (int64_t i = 0; i < entry->n_elem; i++) {
        if (slot[i] < 0 || (i > 0 && slot[i] <= slot[i - 1])) {
            return err_set(err, ERR_FORMAT,
                           "%s: tensor %s: slot %d at index %lld: slots must be ascending, "
                           "distinct and not negative",
                           entry->path, entry->name, slot[i], (long long)i);
        }
    }
    return ERR_OK;
}

static float element(const struct safetensors_entry *entry, int64_t i)
{
    if (entry->dtype == SAFETENSORS_F32) {
        return ((const float *)(const void *)entry->data)[i];
    }
    const uint16_t bits = ((const uint16_t *)(const void *)entry->data)[i];
    return entry->dtype == SAFETENSORS_F16 ? f16_to_f32(bits) : bf16_to_f32(bits);
}

/* Checks a tensor of numbers: aligned, none NaN or infinite. */
static enum err_code check_numbers(const struct safetensors_entry *entry, struct err *err)
{
    if ((uintptr_t)entry->data % safetensors_dtype_bytes(entry->dtype) != 0) {
        return err_set(err, ERR_FORMAT,
                       "%s: tensor %s does not start at a multiple of its element size",
                       entry->path, entry->name);
    }
    for (int64_t i = 0; entry->dtype != SAFETENSORS_I8 && i < entry->n_elem; i++) {
        if (!isfinite(element(entry, i))) {
            return err_set(err, ERR_NUMERICAL, "%s: tensor %s is %s at index %lld", entry->path,
                           entry->name, isnan(element(entry, i)) ? "NaN" : "infinite",
                           (long long)i);
        }
    }
    return ERR_OK;
}

/* rows [n, columns] and, where they are I8, scale. */
static enum err_code take_rows(struct overlay_rows *out, int64_t n,
                               const struct safetensors_entry *rows,
                               const struct safetensors_entry *scale, struct err *err)
{
    const bool quantised = rows->dtype == SAFETENSORS_I8;
    if (!quantised && rows->dtype != SAFETENSORS_F32 && rows->dtype != SAFETENSORS_F16 &&
        rows->dtype != SAFETENSORS_BF16) {
        return err_set(err, ERR_UNSUPPORTED,
                       "%s: tensor %s has dtype %s; rows must be F32, F16, BF16 or I8", rows->path,
                       rows->name, safetensors_dtype_name(rows->dtype));
    }
    if (rows->n_dim != 2 || rows->dim[0] != n || rows->dim[1] < 1) {
        return err_set(err, ERR_FORMAT, "%s: tensor %s must have two dimensions and %lld rows",
                       rows->path, rows->name, (long long)n);
    }
    if (quantised != (scale != NULL)) {
        return err_set(err, ERR_FORMAT, "%s: tensor %s has dtype %s and %s %s.scale", rows->path,
                       rows->name, safetensors_dtype_name(rows->dtype),
                       quantised ? "needs" : "takes no", rows->name);
    }
    if (scale != NULL &&
        (scale->dtype != SAFETENSORS_F32 || scale->n_dim != 1 || scale->n_elem != n)) {
        return err_set(err, ERR_FORMAT, "%s: tensor %s must be F32 [%lld]", scale->path,
                       scale->name, (long long)n);
    }
    enum err_code code = check_numbers(rows, err);
    if (code == ERR_OK && scale != NULL) {
        code = check_numbers(scale, err);
    }
    for (int64_t i = 0; code == ERR_OK && scale != NULL && i < n; i++) {
        if (!isfinite(element(scale, i) * 128)) { /* of an I8 number the most is -128 */
            code = err_set(err, ERR_NUMERICAL,
                           "%s: tensor %s is %g at index %lld: 128 times that is infinite",
                           scale->path, scale->name, (double)element(scale, i), (long long)i);
        }
    }
    if (code == ERR_OK) {
        out->rows = tensors_view(rows, n, rows->dim[1]);
        out->scale = scale == NULL ? NULL : (const float *)(const void *)scale->data;
    }
    return code;
}

static enum err_code take_memory(struct overlay *overlay, int m,
                                 const struct safetensors_entry *const entry[PART_N],
                                 struct err *err)
{
    struct overlay_memory *const memory = &overlay->memory[overlay->n_memory++];
    if (entry[PART_SLOTS] == NULL || entry[PART_ROWS] == NULL) {
        return err_set(err, ERR_FORMAT, "%s: tensor memories.%d.%s is missing", overlay->path, m,
                       part_names[entry[PART_SLOTS] == NULL ? PART_SLOTS : PART_ROWS]);
    }
    if (entry[PART_EXPERTS] == NULL && entry[PART_EXPERTS_SCALE] != NULL) {
        return err_set(err, ERR_FORMAT, "%s: tensor memories.%d.experts is missing", overlay->path,
                       m);
    }
    enum err_code code = check_slots(entry[PART_SLOTS], err);
    if (code != ERR_OK) {
        return code;
    }
    memory->memory = m;
    memory->n = entry[PART_SLOTS]->n_elem;
    memory->slot = (const int32_t *)(const void *)entry[PART_SLOTS]->data;
    code = take_rows(&memory->values, memory->n, entry[PART_ROWS], entry[PART_ROWS_SCALE], err);
    if (code == ERR_OK && entry[PART_EXPERTS] != NULL) {
        code = take_rows(&memory->experts, memory->n, entry[PART_EXPERTS],
                         entry[PART_EXPERTS_SCALE], err);
    }
    return code;
}

static enum err_code read_metadata(struct overlay *overlay, struct err *err)
{
    const struct safetensors *const st = &overlay->tensor;
    const char *const format = safetensors_metadata(st, "format");
    const char *const mode = safetensors_metadata(st, "mode");
    if (format == NULL || strcmp(format, OVERLAY_FORMAT) != 0) {
        return err_set(err, ERR_FORMAT,
                       "%s: no overlay: the metadata's format is \"%.64s\", not \"" OVERLAY_FORMAT
                       "\"",
                       overlay->path, format == NULL ? "" : format);
    }
    if (mode == NULL || (strcmp(mode, "replace") != 0 && strcmp(mode, "add") != 0)) {
        return err_set(err, ERR_FORMAT,
                       "%s: the metadata's mode is \"%.64s\": it must be \"replace\" or \"add\"",
                       overlay->path, mode == NULL ? "" : mode);
    }
    overlay->add = strcmp(mode, "add") == 0;
    for (int i = 0; i < overlay->n_memory; i++) {
        struct overlay_memory *const memory = &overlay->memory[i];
        char key[32];
        (void)snprintf(key, sizeof key, "base.%d", memory->memory);
        memory->base = safetensors_metadata(st, key);
        if (memory->base == NULL && overlay->n_memory == 1) {
            memory->base = safetensors_metadata(st, "base");
        }
        if (memory->base == NULL || !sha256_is_hex(memory->base)) {
            return err_set(err, ERR_FORMAT,
                           "%s: the metadata's %s must be the SHA-256 of memory %d's values in 64 "
                           "digits, as pkmserve inspect --hash prints it",
                           overlay->path, overlay->n_memory == 1 ? "base" : key, memory->memory);
        }
    }
    return ERR_OK;
}

static enum err_code read_memories(struct overlay *overlay, struct err *err)
{
    struct parts parts = {0};
    enum err_code code = sort_parts(&parts, &overlay->tensor, overlay->path, err);
    for (int m = 0; m < MODEL_PKM_MAX && code == ERR_OK; m++) {
        bool any = false;
        for (int part = 0; part < PART_N; part++) {
            any = any || parts.entry[m][part] != NULL;
        }
        if (any) {
            code = take_memory(overlay, m, parts.entry[m], err);
        }
    }
    if (code == ERR_OK && overlay->n_memory == 0) {
        return err_set(err, ERR_FORMAT, "%s: an overlay must have rows of at least one memory",
                       overlay->path);
    }
    return code;
}

enum err_code overlay_parse(struct overlay *overlay, const void *file, size_t bytes,
                            const char *path, struct err *err)
{
    *overlay = (struct overlay){.path = path};
    enum err_code code = safetensors_parse(&overlay->tensor, file, bytes, path, err);
    if (code == ERR_OK) {
        code = read_memories(overlay, err);
    }
    if (code == ERR_OK) {
        code = read_metadata(overlay, err);
    }
    if (code != ERR_OK) {
        overlay_free(overlay);
        return code;
    }
    struct sha256 sum;
    sha256_begin(&sum);
    sha256_add(&sum, file, bytes);
    sha256_end_hex(&sum, overlay->sha256);
    return ERR_OK;
}

void overlay_free(struct overlay *overlay)
{
    safetensors_free(&overlay->tensor);
    *overlay = (struct overlay){0};
}

/* ---- against a model ------------------------------------------------------------------------ */

static enum err_code check_memory(const struct overlay *overlay, const struct overlay_memory *part,
                                  const struct model_info *info, const char (*hash)[SHA256_HEX],
                                  struct err *err)
{
    const int m = part->memory;
    if (m >= info->n_memory) {
        return err_set(err, ERR_FORMAT, "%s: memory %d does not exist: the model has %d",
                       overlay->path, m, info->n_memory);
    }
    const struct pkm_info *const memory = &info->memory[m];
    if (memory->values_of != m) {
        return err_set(err, ERR_FORMAT,
                       "%s: memory %d reads the table of memory %d: change that one's rows",
                       overlay->path, m, memory->values_of);
    }
    if (part->slot[part->n - 1] >= memory->n_slot) {
        return err_set(err, ERR_FORMAT,
                       "%s: tensor memories.%d.slots: slot %d does not exist: memory %d has %lld",
                       overlay->path, m, part->slot[part->n - 1], m, (long long)memory->n_slot);
    }
    if (part->values.rows.cols != memory->d_value) {
        return err_set(
            err, ERR_FORMAT, "%s: tensor memories.%d.rows has %lld columns: memory %d has %lld",
            overlay->path, m, (long long)part->values.rows.cols, m, (long long)memory->d_value);
    }
    if (memory->experts != (part->experts.rows.data != NULL)) {
        return err_set(err, ERR_FORMAT, "%s: tensor memories.%d.experts %s: memory %d has %s",
                       overlay->path, m, memory->experts ? "is missing" : "must not be there", m,
                       memory->experts ? "experts" : "none");
    }
    if (memory->experts && part->experts.rows.cols != info->d_model) {
        return err_set(err, ERR_FORMAT,
                       "%s: tensor memories.%d.experts has %lld columns: the model's width is %d",
                       overlay->path, m, (long long)part->experts.rows.cols, info->d_model);
    }
    if (hash != NULL && strcmp(part->base, hash[m]) != 0) {
        return err_set(err, ERR_FORMAT,
                       "%s: made for another base: the values of memory %d have the SHA-256 %s, "
                       "the overlay's is %s",
                       overlay->path, m, hash[m], part->base);
    }
    return ERR_OK;
}

enum err_code overlay_check(const struct overlay *overlay, const struct model_info *info,
                            const char (*hash)[SHA256_HEX], struct err *err)
{
    enum err_code code = ERR_OK;
    for (int i = 0; i < overlay->n_memory && code == ERR_OK; i++) {
        code = check_memory(overlay, &overlay->memory[i], info, hash, err);
    }
    return code;
}

/* Adds the tensor, and its scales if it has any. */
static enum err_code add_table(struct sha256 *sum, const struct tensors *tensors,
                               const struct pkm_info *memory, const char *table, struct err *err)
{
    enum { HASH_BYTES = 1 << 20 }; /* between releases of what was read */
    static const char *const suffixes[] = {"", ".scale"};
    for (int i = 0; i < 2; i++) {
        char name[SAFETENSORS_NAME_MAX];
        (void)snprintf(name, sizeof name, "memories.%d_%s.%s.weight%s", memory->layer,
                       memory_place_name(memory->place), table, suffixes[i]);
        const int index = tensors_find(tensors, name);
        if (index >= 0) {
            const struct safetensors_entry *const entry = tensors_at(tensors, index);
            for (size_t at = 0, n = 0; at < entry->bytes; at += n) {
                n = entry->bytes - at < HASH_BYTES ? entry->bytes - at : HASH_BYTES;
                sha256_add(sum, entry->data + at, n);
                tensors_release_part(entry, at, n);
            }
        } else if (i == 0) {
            return err_set(err, ERR_FORMAT, "%s: tensor %s is missing", tensors_path(tensors),
                           name);
        }
    }
    return ERR_OK;
}

enum err_code overlay_base_hash(char hex[SHA256_HEX], const struct tensors *tensors,
                                const struct model_info *info, int m, struct err *err)
{
    CHECK(m >= 0 && m < info->n_memory);
    const struct pkm_info *const memory = &info->memory[m];
    struct sha256 sum;
    hex[0] = '\0';
    if (memory->values_of != m) {
        return ERR_OK;
    }
    sha256_begin(&sum);
    enum err_code code = add_table(&sum, tensors, memory, "values", err);
    if (code == ERR_OK && memory->experts) {
        code = add_table(&sum, tensors, memory, "experts", err);
    }
    if (code == ERR_OK) {
        sha256_end_hex(&sum, hex);
    }
    return code;
}
