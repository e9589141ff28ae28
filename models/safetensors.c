/* Checked parsing of one safetensors file: see safetensors.h. */
#include "models/safetensors.h"
#include "models/json_file.h"

#include <stdbool.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

static const struct {
    const char *name;
    unsigned char bytes;
} dtypes[SAFETENSORS_DTYPE_N] = {
    [SAFETENSORS_F32] = {"F32", 4},         [SAFETENSORS_F16] = {"F16", 2},
    [SAFETENSORS_BF16] = {"BF16", 2},       [SAFETENSORS_F64] = {"F64", 8},
    [SAFETENSORS_I64] = {"I64", 8},         [SAFETENSORS_I32] = {"I32", 4},
    [SAFETENSORS_I16] = {"I16", 2},         [SAFETENSORS_I8] = {"I8", 1},
    [SAFETENSORS_U64] = {"U64", 8},         [SAFETENSORS_U32] = {"U32", 4},
    [SAFETENSORS_U16] = {"U16", 2},         [SAFETENSORS_U8] = {"U8", 1},
    [SAFETENSORS_BOOL] = {"BOOL", 1},       [SAFETENSORS_F8_E4M3] = {"F8_E4M3", 1},
    [SAFETENSORS_F8_E5M2] = {"F8_E5M2", 1},
};

const char *safetensors_dtype_name(enum safetensors_dtype dtype)
{
    return dtypes[dtype].name;
}

size_t safetensors_dtype_bytes(enum safetensors_dtype dtype)
{
    return dtypes[dtype].bytes;
}

/* The data section of the file being read. */
struct section {
    const char *path;
    const unsigned char *data;
    uint64_t bytes;
};

static enum err_code read_dtype(struct safetensors_entry *entry, const json_t *value,
                                struct err *err)
{
    const char *const name = json_string_value(value);
    for (int i = 0; name != NULL && i < SAFETENSORS_DTYPE_N; i++) {
        if (strcmp(name, dtypes[i].name) == 0) {
            entry->dtype = (enum safetensors_dtype)i;
            return ERR_OK;
        }
    }
    return err_set(err, ERR_FORMAT,
                   "%s: tensor %s has dtype \"%.32s\", which this reader does not "
                   "know",
                   entry->path, entry->name, name == NULL ? "(not a string)" : name);
}

/* Reads the shape and multiplies it out. */
static enum err_code read_shape(struct safetensors_entry *entry, const json_t *value,
                                struct err *err)
{
    const size_t n_dim = json_array_size(value);
    if (!json_is_array(value) || n_dim > SAFETENSORS_RANK_MAX) {
        return err_set(err, ERR_FORMAT, "%s: tensor %s: shape must be an array of at most %d sizes",
                       entry->path, entry->name, (int)SAFETENSORS_RANK_MAX);
    }
    int64_t n_elem = 1;
    for (size_t i = 0; i < n_dim; i++) {
        const json_t *const size = json_array_get(value, i);
        if (!json_is_integer(size) || json_integer_value(size) < 0) {
            return err_set(err, ERR_FORMAT, "%s: tensor %s: shape[%zu] is not a size", entry->path,
                           entry->name, i);
        }
        entry->dim[i] = json_integer_value(size);
        if (__builtin_mul_overflow(n_elem, entry->dim[i], &n_elem)) {
            return err_set(err, ERR_FORMAT, "%s: tensor %s: the product of its shape overflows",
                           entry->path, entry->name);
        }
    }
    entry->n_dim = (int)n_dim;
    entry->n_elem = n_elem;
    return ERR_OK;
}

/* Reads the byte range and holds it against the file, the shape and the dtype. */
static enum err_code read_range(struct safetensors_entry *entry, const json_t *value,
                                const struct section *section, struct err *err)
{
    const json_t *const first = json_array_get(value, 0);
    const json_t *const last = json_array_get(value, 1);
    if (json_array_size(value) != 2 || !json_is_integer(first) || !json_is_integer(last)) {
        return err_set(err, ERR_FORMAT, "%s: tensor %s: data_offsets must be two integers",
                       entry->path, entry->name);
    }
    const json_int_t begin = json_integer_value(first);
    const json_int_t end = json_integer_value(last);
    if (begin < 0 || end < begin || (uint64_t)end > section->bytes) {
        return err_set(err, ERR_FORMAT,
                       "%s: tensor %s: bytes %lld .. %lld are not within the data "
                       "of %llu bytes: the file is truncated or damaged",
                       entry->path, entry->name, (long long)begin, (long long)end,
                       (unsigned long long)section->bytes);
    }
    const int64_t size = (int64_t)safetensors_dtype_bytes(entry->dtype);
    int64_t bytes = 0;
    if (__builtin_mul_overflow(entry->n_elem, size, &bytes) || bytes != end - begin) {
        return err_set(err, ERR_FORMAT, "%s: tensor %s: %lld x %s do not fill data of length %lld",
                       entry->path, entry->name, (long long)entry->n_elem,
                       safetensors_dtype_name(entry->dtype), (long long)(end - begin));
    }
    entry->bytes = (size_t)bytes;
    entry->data = section->data + begin;
    return ERR_OK;
}

static enum err_code read_entry(struct safetensors_entry *entry, const char *name,
                                const json_t *object, const struct section *section,
                                struct err *err)
{
    const size_t length = strlen(name);
    if (length == 0 || length >= sizeof entry->name) {
        return err_set(err, ERR_FORMAT, "%s: a tensor's name is %zu bytes long, outside 1 .. %d",
                       section->path, length, (int)sizeof entry->name - 1);
    }
    entry->path = section->path;
    memcpy(entry->name, name, length + 1);
    if (!json_is_object(object) || json_object_size(object) != 3) {
        return err_set(err, ERR_FORMAT,
                       "%s: tensor %s must have dtype, shape and data_offsets, and "
                       "nothing else",
                       entry->path, entry->name);
    }
    enum err_code code = read_dtype(entry, json_object_get(object, "dtype"), err);
    if (code == ERR_OK) {
        code = read_shape(entry, json_object_get(object, "shape"), err);
    }
    if (code == ERR_OK) {
        code = read_range(entry, json_object_get(object, "data_offsets"), section, err);
    }
    return code;
}

static int by_data(const void *a, const void *b)
{
    const struct safetensors_entry *const x = a;
    const struct safetensors_entry *const y = b;
    if (x->data != y->data) {
        return x->data < y->data ? -1 : 1;
    }
    if (x->bytes != y->bytes) { /* an empty tensor may share its begin with a full one */
        return x->bytes < y->bytes ? -1 : 1;
    }
    return strcmp(x->name, y->name);
}

/* The tensors, in the order of their data, must follow one another from the first byte of the
 * section to its last. */
static enum err_code check_cover(const struct safetensors *st, const struct section *section,
                                 struct err *err)
{
    const unsigned char *end = section->data;
    for (int i = 0; i < st->n_entry; i++) {
        const struct safetensors_entry *const entry = &st->entry[i];
        if (entry->data < end) {
            return err_set(err, ERR_FORMAT, "%s: tensors %s and %s overlap", section->path,
                           st->entry[i - 1].name, entry->name);
        }
        if (entry->data > end) {
            return err_set(err, ERR_FORMAT,
                           "%s: the data before tensor %s, of length %lld, belong to no tensor",
                           section->path, entry->name, (long long)(entry->data - end));
        }
        end = entry->data + entry->bytes;
    }
    const uint64_t used = (uint64_t)(end - section->data);
    if (used != section->bytes) {
        return err_set(err, ERR_FORMAT,
                       "%s: the data after the last tensor, of length %llu, belong to no tensor",
                       section->path, (unsigned long long)(section->bytes - used));
    }
    return ERR_OK;
}

/* __metadata__ is kept as it is: an object of strings. */
static enum err_code read_metadata(struct safetensors *st, json_t *metadata, const char *path,
                                   struct err *err)
{
    const char *key;
    json_t *value;
    bool strings = json_is_object(metadata);
    json_object_foreach(metadata, key, value)
    {
        strings = strings && json_is_string(value);
    }
    if (!strings) {
        return err_set(err, ERR_FORMAT, "%s: __metadata__ must be an object of strings", path);
    }
    st->metadata = json_incref(metadata);
    return ERR_OK;
}

static enum err_code read_header(struct safetensors *st, const json_t *header,
                                 const struct section *section, struct err *err)
{
    st->entry = calloc(json_object_size(header) + 1, sizeof *st->entry);
    if (st->entry == NULL) {
        return err_set(err, ERR_MEMORY, "%s: no memory for a list of %zu tensors", section->path,
                       json_object_size(header));
    }
    const char *name;
    json_t *value;
    json_object_foreach((json_t *)header, name, value)
    {
        const bool metadata = strcmp(name, "__metadata__") == 0;
        const enum err_code code =
            metadata ? read_metadata(st, value, section->path, err)
                     : read_entry(&st->entry[st->n_entry], name, value, section, err);
        if (code != ERR_OK) {
            return code;
        }
        st->n_entry += metadata ? 0 : 1;
    }
    qsort(st->entry, (size_t)st->n_entry, sizeof *st->entry, by_data);
    return check_cover(st, section, err);
}

/* The little-endian number at bytes. */
static uint64_t read_u64(const unsigned char *bytes)
{
    uint64_t value = 0;
    for (int i = 7; i >= 0; i--) {
        value = value << 8 | bytes[i];
    }
    return value;
}

enum err_code safetensors_parse(struct safetensors *st, const void *file, size_t file_bytes,
                                const char *path, struct err *err)
{
    const unsigned char *const bytes = file;
    *st = (struct safetensors){0};
    if (file_bytes < 8) {
        return err_set(err, ERR_FORMAT, "%s: its length of %zu is too short for a safetensors file",
                       path, file_bytes);
    }
    const uint64_t header_bytes = read_u64(bytes);
    if (header_bytes > SAFETENSORS_HEADER_MAX) {
        return err_set(err, ERR_FORMAT,
                       "%s: the header claims %llu bytes, more than the limit of "
                       "%d: it is not in the safetensors format",
                       path, (unsigned long long)header_bytes, (int)SAFETENSORS_HEADER_MAX);
    }
    if (header_bytes > file_bytes - 8) {
        return err_set(err, ERR_FORMAT,
                       "%s: the header claims %llu bytes, but the file has %zu: it "
                       "is truncated",
                       path, (unsigned long long)header_bytes, file_bytes);
    }
    json_t *header = NULL;
    enum err_code code =
        json_file_parse(&header, (const char *)bytes + 8, (size_t)header_bytes, path, err);
    if (code == ERR_OK) {
        const uint64_t offset = 8 + header_bytes;
        const struct section section = {path, bytes + offset, file_bytes - offset};
        code = read_header(st, header, &section, err);
    }
    json_decref(header);
    if (code != ERR_OK) {
        safetensors_free(st);
    }
    return code;
}

const char *safetensors_metadata(const struct safetensors *st, const char *key)
{
    return json_string_value(json_object_get(st->metadata, key));
}

void safetensors_free(struct safetensors *st)
{
    json_decref(st->metadata);
    free(st->entry);
    *st = (struct safetensors){0};
}
