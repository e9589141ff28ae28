/* The mapped files of a model directory: see tensors.h. */
#include "models/tensors.h"
#include "models/file.h"
#include "models/json_file.h"
#include "models/mapped.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum {
    INDEX_BYTES_MAX = SAFETENSORS_HEADER_MAX, /* of model.safetensors.index.json */
    N_SHARD_MAX = 512,
};

struct shard {
    char path[PATH_MAX];
    struct mapped file;
    struct safetensors content;
};

struct tensors {
    struct shard *shard; /* Owner. [n_shard] */
    int n_shard;
    const struct safetensors_entry **entry; /* Owner of the array. [n_entry], by name */
    int n_entry;
};

/* ---- files -------------------------------------------------------------------------------- */

static enum err_code map_file(struct shard *shard, struct err *err)
{
    const enum err_code code = mapped_open(&shard->file, shard->path, 8, err);
    return code != ERR_OK ? code
                          : safetensors_parse(&shard->content, shard->file.data, shard->file.bytes,
                                              shard->path, err);
}

/* ---- the index of a sharded model --------------------------------------------------------- */

/* A shard is a plain file of the model's own directory. */
static bool is_shard_name(const char *name)
{
    const size_t n = strlen(name);
    const char *const suffix = ".safetensors";
    return n <= NAME_MAX && n > strlen(suffix) && name[0] != '.' && strchr(name, '/') == NULL &&
           strcmp(name + n - strlen(suffix), suffix) == 0;
}

/* The shard whose file is called name, or -1. */
static int find_shard(const struct tensors *tensors, const char *name)
{
    for (int i = 0; i < tensors->n_shard; i++) {
        if (strcmp(strrchr(tensors->shard[i].path, '/') + 1, name) == 0) {
            return i;
        }
    }
    return -1;
}

/* Maps each file that the index names, once. */
static enum err_code map_shards(struct tensors *tensors, const json_t *weight_map, const char *dir,
                                const char *index_path, struct err *err)
{
    const size_t n_name = json_object_size(weight_map);
    const size_t n_max = n_name < N_SHARD_MAX ? n_name : N_SHARD_MAX;
    tensors->shard = calloc(n_max + 1, sizeof *tensors->shard);
    if (tensors->shard == NULL) {
        return err_set(err, ERR_MEMORY, "%s: no memory for %zu shards", index_path, n_max);
    }
    const char *tensor;
    json_t *value;
    json_object_foreach((json_t *)weight_map, tensor, value)
    {
        const char *const name = json_string_value(value);
        if (name == NULL || !is_shard_name(name)) {
            return err_set(err, ERR_FORMAT,
                           "%s: tensor %.128s is said to be in \"%.64s\", which is "
                           "not the name of a .safetensors file in this directory",
                           index_path, tensor, name == NULL ? "(not a string)" : name);
        }
        if (find_shard(tensors, name) >= 0) {
            continue;
        }
        if ((size_t)tensors->n_shard == n_max) {
            return err_set(err, ERR_FORMAT, "%s: more than %d shards", index_path, N_SHARD_MAX);
        }
        struct shard *const shard = &tensors->shard[tensors->n_shard++];
        enum err_code code = file_path(shard->path, dir, name, err);
        if (code == ERR_OK) {
            code = map_file(shard, err);
        }
        if (code != ERR_OK) {
            return code;
        }
    }
    return ERR_OK;
}

/* Checks that the shards hold exactly what the index says, each tensor in its own file. */
static enum err_code check_index(const struct tensors *tensors, const json_t *weight_map,
                                 const char *index_path, struct err *err)
{
    for (int i = 0; i < tensors->n_entry; i++) {
        const struct safetensors_entry *const entry = tensors->entry[i];
        const char *const name = json_string_value(json_object_get(weight_map, entry->name));
        if (name == NULL || strcmp(strrchr(entry->path, '/') + 1, name) != 0) {
            return err_set(err, ERR_FORMAT, "%s: tensor %s is in this file, but %s says \"%.64s\"",
                           entry->path, entry->name, index_path, name == NULL ? "nowhere" : name);
        }
    }
    if (json_object_size(weight_map) == (size_t)tensors->n_entry) {
        return ERR_OK;
    }
    const char *tensor;
    json_t *value;
    json_object_foreach((json_t *)weight_map, tensor, value)
    {
        if (tensors_find(tensors, tensor) < 0) {
            return err_set(err, ERR_FORMAT, "%s: tensor %.128s is missing from shard %.64s",
                           index_path, tensor, json_string_value(value));
        }
    }
    UNREACHABLE(); /* an index and its shards differ in number, but not in names */
    return ERR_FORMAT;
}

/* ---- the list ----------------------------------------------------------------------------- */

static int by_name(const void *a, const void *b)
{
    const struct safetensors_entry *const *const x = a;
    const struct safetensors_entry *const *const y = b;
    return strcmp((*x)->name, (*y)->name);
}

bool tensors_is_value_table(const struct safetensors_entry *entry)
{
    return strncmp(entry->name, "memories.", 9) == 0 &&
           (strstr(entry->name, ".values.") != NULL || strstr(entry->name, ".experts.") != NULL);
}

/* Refuses a weight that could not be computed with in place. */
static enum err_code check_entry(const struct safetensors_entry *entry, struct err *err)
{
    if (entry->dtype != SAFETENSORS_F32 && entry->dtype != SAFETENSORS_F16 &&
        entry->dtype != SAFETENSORS_BF16 && entry->dtype != SAFETENSORS_I8 &&
        entry->dtype != SAFETENSORS_I32 &&
        !(entry->dtype == SAFETENSORS_U8 && tensors_is_value_table(entry))) {
        return err_set(err, ERR_UNSUPPORTED,
                       "%s: tensor %s has dtype %s; weights must be F32, F16, BF16 or I8, and a "
                       "memory's values may be U8, codes of 4 bits",
                       entry->path, entry->name, safetensors_dtype_name(entry->dtype));
    }
    /* Mappings start at a page, so an address is as aligned as its place in the file. */
    if ((uintptr_t)entry->data % safetensors_dtype_bytes(entry->dtype) != 0) {
        return err_set(err, ERR_UNSUPPORTED,
                       "%s: tensor %s does not start at a multiple of its element size: write the "
                       "file again with safetensors 0.3 or later, which aligns it",
                       entry->path, entry->name);
    }
    return ERR_OK;
}

/* Sorts the entries of all shards by name and checks each. */
static enum err_code list_entries(struct tensors *tensors, struct err *err)
{
    size_t n = 0;
    for (int i = 0; i < tensors->n_shard; i++) {
        n += (size_t)tensors->shard[i].content.n_entry;
    }
    tensors->entry = calloc(n + 1, sizeof *tensors->entry);
    if (tensors->entry == NULL || n > INT_MAX) {
        return err_set(err, ERR_MEMORY, "%s: no memory for a list of %zu tensors",
                       tensors->shard[0].path, n);
    }
    for (int i = 0; i < tensors->n_shard; i++) {
        for (int j = 0; j < tensors->shard[i].content.n_entry; j++) {
            tensors->entry[tensors->n_entry++] = &tensors->shard[i].content.entry[j];
        }
    }
    qsort(tensors->entry, n, sizeof *tensors->entry, by_name);
    for (int i = 0; i < tensors->n_entry; i++) {
        const struct safetensors_entry *const entry = tensors->entry[i];
        if (i > 0 && strcmp(tensors->entry[i - 1]->name, entry->name) == 0) {
            return err_set(err, ERR_FORMAT, "%s: tensor %s is also in %s", entry->path, entry->name,
                           tensors->entry[i - 1]->path);
        }
        const enum err_code code = check_entry(entry, err);
        if (code != ERR_OK) {
            return code;
        }
    }
    return ERR_OK;
}

static enum err_code open_single(struct tensors *tensors, const char *path, struct err *err)
{
    tensors->shard = calloc(1, sizeof *tensors->shard);
    if (tensors->shard == NULL) {
        return err_set(err, ERR_MEMORY, "%s: no memory to open it", path);
    }
    tensors->n_shard = 1;
    (void)snprintf(tensors->shard->path, sizeof tensors->shard->path, "%s", path);
    const enum err_code code = map_file(tensors->shard, err);
    return code != ERR_OK ? code : list_entries(tensors, err);
}

static enum err_code open_sharded(struct tensors *tensors, const char *dir, const char *index_path,
                                  struct err *err)
{
    json_t *root = NULL;
    enum err_code code = json_file_read(&root, index_path, INDEX_BYTES_MAX, false, err);
    if (code != ERR_OK) {
        return code;
    }
    const json_t *const weight_map = json_object_get(root, "weight_map");
    if (!json_is_object(weight_map) || json_object_size(weight_map) == 0) {
        code = err_set(err, ERR_FORMAT, "%s: weight_map must be an object and name a tensor",
                       index_path);
    }
    if (code == ERR_OK) {
        code = map_shards(tensors, weight_map, dir, index_path, err);
    }
    if (code == ERR_OK) {
        code = list_entries(tensors, err);
    }
    if (code == ERR_OK) {
        code = check_index(tensors, weight_map, index_path, err);
    }
    json_decref(root);
    return code;
}

enum err_code tensors_open(struct tensors **tensors, const char *dir, struct err *err)
{
    *tensors = NULL;
    char single[PATH_MAX];
    char sharded[PATH_MAX];
    enum err_code code = file_path(single, dir, "model.safetensors", err);
    if (code == ERR_OK) {
        code = file_path(sharded, dir, "model.safetensors.index.json", err);
    }
    if (code != ERR_OK) {
        return code;
    }
    const bool has_index = file_exists(sharded);
    if (has_index && file_exists(single)) {
        return err_set(err, ERR_FORMAT, "%s: there is also %s: remove the one that is not meant",
                       sharded, single);
    }
    struct tensors *const made = calloc(1, sizeof *made);
    if (made == NULL) {
        return err_set(err, ERR_MEMORY, "%s: no memory to open it", single);
    }
    code = has_index ? open_sharded(made, dir, sharded, err) : open_single(made, single, err);
    if (code != ERR_OK) {
        tensors_close(made);
        return code;
    }
    *tensors = made;
    return ERR_OK;
}

void tensors_close(struct tensors *tensors)
{
    if (tensors == NULL) {
        return;
    }
    for (int i = 0; i < tensors->n_shard; i++) {
        safetensors_free(&tensors->shard[i].content);
        mapped_close(&tensors->shard[i].file);
    }
    free(tensors->shard);
    free(tensors->entry);
    free(tensors);
}

enum err_code tensors_check_files(const struct tensors *tensors, bool reads_only, struct err *err)
{
    for (int i = 0; i < tensors->n_shard; i++) {
        const struct mapped *const file = &tensors->shard[i].file;
        if ((reads_only ? mapped_check_reads : mapped_check)(file, err) != ERR_OK) {
            return ERR_IO;
        }
    }
    return ERR_OK;
}

/* ---- access ------------------------------------------------------------------------------- */

const char *tensors_path(const struct tensors *tensors)
{
    return tensors->n_shard > 0 ? tensors->shard[0].path : "model.safetensors";
}

int tensors_n(const struct tensors *tensors)
{
    return tensors->n_entry;
}

const struct safetensors_entry *tensors_at(const struct tensors *tensors, int index)
{
    CHECK(index >= 0 && index < tensors->n_entry);
    return tensors->entry[index];
}

int tensors_find(const struct tensors *tensors, const char *name)
{
    int low = 0;
    int high = tensors->n_entry;
    while (low < high) {
        const int middle = low + (high - low) / 2;
        if (strcmp(tensors->entry[middle]->name, name) < 0) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    const bool found = low < tensors->n_entry && strcmp(tensors->entry[low]->name, name) == 0;
    return found ? low : -1;
}

const char *tensors_dtype_name(const struct safetensors_entry *entry)
{
    return safetensors_dtype_name(entry->dtype);
}

enum dtype tensors_dtype(const struct safetensors_entry *entry)
{
    switch (entry->dtype) {
    case SAFETENSORS_F32: return DTYPE_F32;
    case SAFETENSORS_F16: return DTYPE_F16;
    case SAFETENSORS_BF16: return DTYPE_BF16;
    case SAFETENSORS_I8: return DTYPE_I8;
    case SAFETENSORS_U8: return DTYPE_Q4;
    case SAFETENSORS_I32: return DTYPE_I32;
    default: break;
    }
    UNREACHABLE(); /* list_entries let no other type in */
    return DTYPE_N;
}

struct tensor tensors_view(const struct safetensors_entry *entry, int64_t rows, int64_t cols)
{
    CHECK(rows * cols == entry->n_elem);
    return tensor_make((void *)entry->data, rows, cols, tensors_dtype(entry));
}

void tensors_widen(float *out, const struct safetensors_entry *entry)
{
    const uint16_t *const half = (const uint16_t *)(const void *)entry->data;
    switch (tensors_dtype(entry)) {
    case DTYPE_F32: memcpy(out, entry->data, entry->bytes); break;
    case DTYPE_F16:
        for (int64_t i = 0; i < entry->n_elem; i++) {
            out[i] = f16_to_f32(half[i]);
        }
        break;
    case DTYPE_BF16:
        for (int64_t i = 0; i < entry->n_elem; i++) {
            out[i] = bf16_to_f32(half[i]);
        }
        break;
    default: UNREACHABLE();
    }
}

void tensors_release(const struct safetensors_entry *entry)
{
    tensors_release_part(entry, 0, entry->bytes);
}

void tensors_release_part(const struct safetensors_entry *entry, size_t first, size_t bytes)
{
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    const uintptr_t from = ((uintptr_t)entry->data + first) / page * page;
    const uintptr_t end = ((uintptr_t)entry->data + first + bytes) / page * page;
    if (from < end) {
        /* Only advice: the pages are an unchanged view of the file, so nothing is lost either
         * way. */
        (void)madvise((void *)from, end - from, MADV_DONTNEED);
    }
}

enum dtype tensors_main_dtype(const struct tensors *tensors)
{
    size_t bytes[DTYPE_N] = {0};
    enum dtype best = DTYPE_F32;
    for (int i = 0; i < tensors->n_entry; i++) {
        const struct safetensors_entry *const entry = tensors->entry[i];
        const enum dtype dtype = tensors_dtype(entry);
        bytes[dtype] += dtype == DTYPE_I32 || tensors_is_value_table(entry) ? 0 : entry->bytes;
        best = bytes[dtype] > bytes[best] ? dtype : best;
    }
    /* I8 if any tensor is: keys and vectors stay F32, and may be most of the bytes of a small
     * model */
    return bytes[DTYPE_I8] > 0 ? DTYPE_I8 : best;
}

/* ---- NaN and infinity --------------------------------------------------------------------- */

/* The index of the first element that is not finite, or -1: all exponent bits are set. */
static int64_t find_not_finite(const struct safetensors_entry *entry)
{
    const uint32_t *const word = (const uint32_t *)(const void *)entry->data;
    const uint16_t *const half = (const uint16_t *)(const void *)entry->data;
    if (entry->dtype == SAFETENSORS_I32 || entry->dtype == SAFETENSORS_I8 ||
        entry->dtype == SAFETENSORS_U8) {
        return -1;
    }
    const bool wide = entry->dtype == SAFETENSORS_F32;
    const uint32_t mask = wide ? 0x7f800000u : entry->dtype == SAFETENSORS_F16 ? 0x7c00u : 0x7f80u;
    for (int64_t i = 0; i < entry->n_elem; i++) {
        const uint32_t bits = wide ? word[i] : half[i];
        if ((bits & mask) == mask) {
            return i;
        }
    }
    return -1;
}

enum err_code tensors_check(const struct tensors *tensors, const struct model_options *options,
                            struct err *err)
{
    for (int i = 0; i < tensors->n_entry; i++) {
        const struct safetensors_entry *const entry = tensors->entry[i];
        const int64_t bad = find_not_finite(entry);
        if (bad >= 0) {
            return err_set(err, ERR_NUMERICAL, "%s: tensor %s: element %lld is NaN or infinite",
                           entry->path, entry->name, (long long)bad);
        }
        if (options->progress != NULL) {
            options->progress(options->progress_ctx, "check", (i + 1.0) / tensors->n_entry);
        }
    }
    return ERR_OK;
}
