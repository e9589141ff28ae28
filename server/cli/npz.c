/* Writes .npz files: see npz.h. The format of ZIP's headers is PKWARE's APPNOTE.TXT, sections
 * 4.3.7, 4.3.12 and 4.3.16; that of .npy files NumPy's NEP 1. Sizes have 32 bits, as the plain
 * format says. */
#include "server/cli/npz.h"

#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

enum { LOCAL_BYTES = 30, CENTRAL_BYTES = 46, NPY_HEAD = 128 };
/* Version 1.0, followed by the length of the header. */
static const unsigned char magic[10] = {0x93, 'N', 'U', 'M', 'P', 'Y', 1, 0, NPY_HEAD - 10, 0};

enum { DOS_DATE = 33 /* 1980-01-01: the same arrays always make the same file */ };

static uint32_t crc_add(uint32_t crc, const unsigned char *data, size_t n)
{
    static uint32_t table[256];
    if (table[1] == 0) {
        for (uint32_t i = 0; i < 256; i++) {
            table[i] = i;
            for (int bit = 0; bit < 8; bit++) {
                table[i] = table[i] >> 1 ^ ((table[i] & 1) != 0 ? UINT32_C(0xedb88320) : 0);
            }
        }
    }
    for (size_t i = 0; i < n; i++) {
        crc = crc >> 8 ^ table[(crc ^ data[i]) & 255];
    }
    return crc;
}

/* Little-endian numbers: digits of `as` are their bytes, '2' or '4'. */
static size_t put(unsigned char *to, const char *as, ...)
{
    va_list list;
    size_t n = 0;
    va_start(list, as);
    for (; *as != '\0'; as++) {
        const uint32_t value = va_arg(list, uint32_t);
        for (int i = 0; i < *as - '0'; i++) {
            to[n++] = (unsigned char)(value >> 8 * i & 255);
        }
    }
    va_end(list);
    return n;
}

enum err_code npz_open(struct npz *npz, const char *path, struct err *err)
{
    *npz = (struct npz){0};
    if (file_out_open(&npz->out, path, err) != ERR_OK) {
        return err->code;
    }
    npz->array = calloc(NPZ_ARRAY_MAX, sizeof *npz->array);
    return npz->array != NULL ? ERR_OK : err_set(err, ERR_MEMORY, "%s: no memory", path);
}

/* The header of an array's entry; its checksum is filled in at the end. */
static bool write_local(const struct npz *npz, const struct npz_array *array)
{
    unsigned char head[LOCAL_BYTES];
    const uint32_t name = (uint32_t)strlen(array->name);
    const size_t n = put(head, "42222244422", UINT32_C(0x04034b50), 20, 0, 0, 0, DOS_DATE,
                         array->crc, array->bytes, array->bytes, name, 0);
    return fseek(npz->out.file, (long)array->offset, SEEK_SET) == 0 &&
           fwrite(head, 1, n, npz->out.file) == n &&
           fwrite(array->name, 1, name, npz->out.file) == name;
}

enum err_code npz_begin(struct npz *npz, const char *name, const char *type, const int64_t *dim,
                        int n_dim, struct err *err)
{
    char shape[128] = "";
    int64_t n = 1;
    CHECK(n_dim >= 1 && n_dim <= NPZ_DIM_MAX);
    for (int i = 0; i < n_dim; i++) {
        const size_t at = strlen(shape);
        (void)snprintf(shape + at, sizeof shape - at, "%" PRId64 ",", dim[i]);
        n = dim[i] > 0 && n > UINT32_MAX / dim[i] ? UINT32_MAX : n * dim[i];
    }
    const uint64_t bytes = NPY_HEAD + 4 * (uint64_t)n;
    if (npz->n == NPZ_ARRAY_MAX || npz->offset + bytes > UINT32_MAX - (1 << 20)) {
        return err_set(err, ERR_UNSUPPORTED,
                       "%s: more than %d arrays or 4 GiB do not fit into an .npz file: score fewer "
                       "texts at once",
                       npz->out.path, NPZ_ARRAY_MAX);
    }
    struct npz_array *const array = &npz->array[npz->n++];
    *array = (struct npz_array){
        .crc = UINT32_MAX, .bytes = (uint32_t)bytes, .offset = (uint32_t)npz->offset};
    (void)snprintf(array->name, sizeof array->name, "%s.npy", name);
    npz->offset += LOCAL_BYTES + strlen(array->name) + bytes;
    char head[NPY_HEAD + 1];
    memset(head, ' ', sizeof head);
    memcpy(head, magic, sizeof magic);
    const int used =
        snprintf(head + sizeof magic, sizeof head - sizeof magic,
                 "{'descr': '%s', 'fortran_order': False, 'shape': (%s), }", type, shape);
    CHECK(used > 0 && used < NPY_HEAD - (int)sizeof magic - 1);
    head[(int)sizeof magic + used] = ' ';
    head[NPY_HEAD - 1] = '\n';
    if (!write_local(npz, array)) {
        return file_out_failed(&npz->out, err);
    }
    array->crc = crc_add(array->crc, (const unsigned char *)head, NPY_HEAD);
    return fwrite(head, 1, NPY_HEAD, npz->out.file) == NPY_HEAD ? ERR_OK
                                                                : file_out_failed(&npz->out, err);
}

void npz_add(struct npz *npz, const void *data, int64_t n)
{
    struct npz_array *const array = &npz->array[npz->n - 1];
    array->crc = crc_add(array->crc, data, (size_t)n * 4);
    (void)fwrite(data, 4, (size_t)n, npz->out.file); /* npz_end reports failures */
}

enum err_code npz_end(struct npz *npz, struct err *err)
{
    struct npz_array *const array = &npz->array[npz->n - 1];
    array->crc = ~array->crc;
    return ferror(npz->out.file) == 0 && write_local(npz, array) &&
                   fseek(npz->out.file, (long)npz->offset, SEEK_SET) == 0
               ? ERR_OK
               : file_out_failed(&npz->out, err);
}

static bool write_directory(struct npz *npz)
{
    unsigned char head[CENTRAL_BYTES];
    size_t bytes = 0;
    for (int i = 0; i < npz->n; i++) {
        const struct npz_array *const array = &npz->array[i];
        const uint32_t name = (uint32_t)strlen(array->name);
        const size_t n =
            put(head, "42222224442222244", UINT32_C(0x02014b50), 20, 20, 0, 0, 0, DOS_DATE,
                array->crc, array->bytes, array->bytes, name, 0, 0, 0, 0, 0, array->offset);
        if (fwrite(head, 1, n, npz->out.file) != n ||
            fwrite(array->name, 1, name, npz->out.file) != name) {
            return false;
        }
        bytes += n + name;
    }
    const uint32_t n_array = (uint32_t)npz->n;
    const size_t n = put(head, "42222442", UINT32_C(0x06054b50), 0, 0, n_array, n_array,
                         (uint32_t)bytes, (uint32_t)npz->offset, 0);
    return fwrite(head, 1, n, npz->out.file) == n;
}

enum err_code npz_close(struct npz *npz, enum err_code code, struct err *err)
{
    if (code == ERR_OK && !write_directory(npz)) {
        code = file_out_failed(&npz->out, err);
    }
    code = file_out_close(&npz->out, code, err);
    free(npz->array);
    *npz = (struct npz){0};
    return code;
}
