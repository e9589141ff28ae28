/* The safetensors format: one file's bytes → a checked list of its tensors.
 *
 * A file is: header length N (8 bytes, little-endian), N bytes of JSON, then the data section. The
 * header maps each tensor's name to its dtype, its shape and its range of bytes in the data.
 * Nothing in a file is believed: when safetensors_parse returns ERR_OK, each entry's data lies
 * inside the buffer, is as long as its shape and dtype say and overlaps no other, and together they
 * cover the data section without a gap. The format does not promise alignment, so an entry's data
 * may start at any byte.
 *
 * The reader works on memory, so that the fuzzer and the tests reach it without files; tensors.c
 * maps files and calls it. */
#ifndef MODELS_SAFETENSORS_H
#define MODELS_SAFETENSORS_H

#include "kernels/err.h"

#include <stddef.h>
#include <stdint.h>

/* Every dtype of the format whose elements are whole bytes, so that its size is known. */
enum safetensors_dtype {
    SAFETENSORS_F32,
    SAFETENSORS_F16,
    SAFETENSORS_BF16,
    SAFETENSORS_F64,
    SAFETENSORS_I64,
    SAFETENSORS_I32,
    SAFETENSORS_I16,
    SAFETENSORS_I8,
    SAFETENSORS_U64,
    SAFETENSORS_U32,
    SAFETENSORS_U16,
    SAFETENSORS_U8,
    SAFETENSORS_BOOL,
    SAFETENSORS_F8_E4M3,
    SAFETENSORS_F8_E5M2,
    SAFETENSORS_DTYPE_N
};

enum {
    SAFETENSORS_RANK_MAX = 8,
    SAFETENSORS_NAME_MAX = 256, /* bytes of a tensor's name, with the final 0 */
    /* Bytes of the JSON header: 1024 layers of tensors with long names and scales take 10 MB. The
     * format allows 100 MB, where small tensors would take half a minute to list. */
    SAFETENSORS_HEADER_MAX = 16 << 20,
};

struct safetensors_entry {
    char name[SAFETENSORS_NAME_MAX];
    const char *path; /* Borrowed: the file it is in, for messages */
    enum safetensors_dtype dtype;
    int n_dim;                         /* 0 for a scalar */
    int64_t dim[SAFETENSORS_RANK_MAX]; /* outermost first */
    int64_t n_elem;
    size_t bytes;
    const unsigned char *data; /* Borrowed: inside the parsed buffer */
};

struct safetensors {
    struct safetensors_entry *entry; /* Owner. [n_entry], in the order of their data */
    int n_entry;
    struct json_t *metadata; /* Owner. The strings of __metadata__, or NULL */
};

/* "F32", as the format writes it. */
const char *safetensors_dtype_name(enum safetensors_dtype dtype);
size_t safetensors_dtype_bytes(enum safetensors_dtype dtype);

/* Parses file, which must outlive st, as must path. Owner of what st holds: the caller, by
 * safetensors_free; on failure there is nothing to free. */
enum err_code safetensors_parse(struct safetensors *st, const void *file, size_t file_bytes,
                                const char *path, struct err *err);
/* The string that __metadata__ has under key, or NULL. Borrowed from st. */
const char *safetensors_metadata(const struct safetensors *st, const char *key);
void safetensors_free(struct safetensors *st);

#endif
