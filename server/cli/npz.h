/* Arrays as NumPy reads them with numpy.load: an uncompressed .npz file, a ZIP archive of .npy
 * files. */
#ifndef SERVER_NPZ_H
#define SERVER_NPZ_H

#include "models/file_out.h"

#include <stdint.h>

enum { NPZ_ARRAY_MAX = 4096, NPZ_DIM_MAX = 4, NPZ_NAME_MAX = 64 };

struct npz_array {
    char name[NPZ_NAME_MAX];
    uint32_t crc, bytes, offset;
};

struct npz {
    struct file_out out;
    struct npz_array *array; /* Owner: this. [n] */
    int n;
    uint64_t offset;
};

/* Errors name the file. The file must be closed in either case. */
enum err_code npz_open(struct npz *npz, const char *path, struct err *err);
/* Adds an array of 4-byte elements, of type "<i4" or "<f4", in pieces: begin, then its elements in
 * C order, then end. */
enum err_code npz_begin(struct npz *npz, const char *name, const char *type, const int64_t *dim,
                        int n_dim, struct err *err);
void npz_add(struct npz *npz, const void *data, int64_t n);
enum err_code npz_end(struct npz *npz, struct err *err);
/* Writes the directory, if code is ERR_OK. Returns code, or what goes wrong now. Zeroed is fine. */
enum err_code npz_close(struct npz *npz, enum err_code code, struct err *err);

#endif
