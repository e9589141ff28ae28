/* Writes one safetensors file front to back: a header that lists the tensors, then their data in
 * that order, in pieces of any size. For counts, slot lists and overlays; models/convert writes
 * models. The file appears as file_out.h says. */
#ifndef MODELS_SAFETENSORS_OUT_H
#define MODELS_SAFETENSORS_OUT_H

#include "models/file_out.h"
#include "models/safetensors.h"

/* A tensor of the file. */
struct safetensors_part {
    char name[SAFETENSORS_NAME_MAX];
    enum safetensors_dtype dtype;
    int n_dim;      /* 1 or 2 */
    int64_t dim[2]; /* outermost first */
};

/* A line of __metadata__. */
struct safetensors_string {
    const char *key, *value; /* Borrowed; value is made valid UTF-8 by the caller */
};

/* The header as it stands in the file, its length first, filled with blanks to a multiple of 8
 * bytes. Parts come in the order of their data and must each begin at a multiple of their element's
 * size: wide types first. Owner: the caller, by free. NULL: no memory. */
char *safetensors_header(const struct safetensors_part *part, int n_part,
                         const struct safetensors_string *metadata, int n_metadata, size_t *bytes);

struct safetensors_out {
    struct file_out file;
};

/* Opens the file and writes the header. It must be closed in either case. ERR_IO, ERR_MEMORY. */
enum err_code safetensors_out_open(struct safetensors_out *out, const char *path,
                                   const struct safetensors_part *part, int n_part,
                                   const struct safetensors_string *metadata, int n_metadata,
                                   struct err *err);
/* The next bytes of data; safetensors_out_close tells whether they could be written. */
void safetensors_out_add(struct safetensors_out *out, const void *data, size_t bytes);
/* With code ERR_OK the file gets its name; else it is removed. Returns code, or what goes wrong
 * now. Zeroed is fine. */
enum err_code safetensors_out_close(struct safetensors_out *out, enum err_code code,
                                    struct err *err);

#endif
