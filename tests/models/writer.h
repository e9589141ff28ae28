/* Writes safetensors files and small model directories for the tests of models/, honest ones and,
 * by the caller's choice of header, lying ones. Header only, since each test is one program. */
#ifndef TESTS_MODELS_WRITER_H
#define TESTS_MODELS_WRITER_H

#include "kernels/tensor.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { WRITER_N_MAX = 128, WRITER_PATH_MAX = 256 };

/* ---- a folder of its own -------------------------------------------------------------------- */

static inline void writer_folder(char dir[WRITER_PATH_MAX])
{
    (void)snprintf(dir, WRITER_PATH_MAX, "/tmp/test_models.XXXXXX");
    assert_non_null(mkdtemp(dir));
}

static inline void writer_remove(const char *dir)
{
    char command[WRITER_PATH_MAX + 16];
    (void)snprintf(command, sizeof command, "rm -r '%s'", dir);
    assert_int_equal(system(command), 0);
}

static inline void writer_file(const char *dir, const char *name, const void *data, size_t bytes)
{
    char path[2 * WRITER_PATH_MAX];
    (void)snprintf(path, sizeof path, "%s/%s", dir, name);
    FILE *const file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(data, 1, bytes, file), bytes);
    assert_int_equal(fclose(file), 0);
}

static inline void writer_text(const char *dir, const char *name, const char *text)
{
    writer_file(dir, name, text, strlen(text));
}

/* ---- images: header text and data, as they would stand in a file ---------------------------- */

/* Owner of the result: the caller. It has exactly *bytes bytes, so that a sanitizer sees the first
 * byte read behind it; data is zero. */
static inline unsigned char *writer_image(size_t *bytes, const char *header, size_t header_bytes,
                                          size_t data_bytes)
{
    *bytes = 8 + header_bytes + data_bytes;
    unsigned char *const image = calloc(*bytes, 1);
    assert_non_null(image);
    for (int i = 0; i < 8; i++) {
        image[i] = (unsigned char)((uint64_t)header_bytes >> (8 * i));
    }
    memcpy(image + 8, header, header_bytes);
    return image;
}

/* ---- models --------------------------------------------------------------------------------- */

struct writer_tensor {
    char name[96];
    enum dtype dtype;
    int n_dim;
    int64_t dim[4];
    int64_t n_elem;
    float *value; /* Owner. [n_elem] */
};

struct writer {
    struct writer_tensor tensor[WRITER_N_MAX];
    int n;
};

/* Adds a tensor of small numbers that depend on its place, which F16 and BF16 hold exactly. */
static inline struct writer_tensor *writer_add(struct writer *w, const char *name, int n_dim,
                                               const int64_t *dim)
{
    assert_true(w->n < WRITER_N_MAX);
    struct writer_tensor *const t = &w->tensor[w->n];
    *t = (struct writer_tensor){.dtype = DTYPE_F32, .n_dim = n_dim, .n_elem = 1};
    (void)snprintf(t->name, sizeof t->name, "%s", name);
    for (int i = 0; i < n_dim; i++) {
        t->dim[i] = dim[i];
        t->n_elem *= dim[i];
    }
    t->value = malloc((size_t)t->n_elem * sizeof(float));
    assert_non_null(t->value);
    uint32_t state = 2463534242u + (uint32_t)w->n;
    for (int64_t i = 0; i < t->n_elem; i++) {
        state = state * 1664525u + 1013904223u;
        t->value[i] = (float)((int)(state >> 26) - 31) / 32;
    }
    w->n++;
    return t;
}

static inline struct writer_tensor *writer_find(struct writer *w, const char *name)
{
    for (int i = 0; i < w->n; i++) {
        if (strcmp(w->tensor[i].name, name) == 0) {
            return &w->tensor[i];
        }
    }
    fail_msg("the test looks for tensor %s, which it did not write", name);
    return NULL;
}

static inline void writer_drop(struct writer *w, const char *name)
{
    struct writer_tensor *const t = writer_find(w, name);
    free(t->value);
    w->n--;
    memmove(t, t + 1, (size_t)(&w->tensor[w->n] - t) * sizeof *t);
}

static inline void writer_free(struct writer *w)
{
    for (int i = 0; i < w->n; i++) {
        free(w->tensor[i].value);
    }
    *w = (struct writer){.n = 0};
}

/* Round to nearest even for values that F16 holds exactly, which is all that writer_add makes. */
static inline uint16_t writer_f16(float value)
{
    for (uint32_t bits = 0; bits < 0x10000; bits++) {
        if (f16_to_f32((uint16_t)bits) == value) {
            return (uint16_t)bits;
        }
    }
    fail_msg("%g is no F16 number", (double)value);
    return 0;
}

static inline void writer_put(unsigned char *out, const struct writer_tensor *t, int64_t i)
{
    const uint16_t half = t->dtype == DTYPE_BF16  ? bf16_from_f32(t->value[i])
                          : t->dtype == DTYPE_F16 ? writer_f16(t->value[i])
                                                  : 0;
    const int32_t whole = (int32_t)t->value[i];
    const int8_t byte = (int8_t)(t->value[i] * 32);
    const uint8_t code = (uint8_t)t->value[i];
    const void *const from = t->dtype == DTYPE_F32   ? (const void *)&t->value[i]
                             : t->dtype == DTYPE_I32 ? (const void *)&whole
                             : t->dtype == DTYPE_I8  ? (const void *)&byte
                             : t->dtype == DTYPE_Q4  ? (const void *)&code
                                                     : &half;
    memcpy(out + (size_t)i * dtype_bytes(t->dtype), from, dtype_bytes(t->dtype));
}

/* Stores a matrix as I8, exactly: writer_add's numbers are whole numbers of 1/32, which becomes the
 * scale of each row. */
static inline void writer_int8(struct writer *w, int index)
{
    char name[sizeof w->tensor->name];
    const int n = snprintf(name, sizeof name, "%s.scale", w->tensor[index].name);
    assert_true(n > 0 && (size_t)n < sizeof name);
    struct writer_tensor *const scale = writer_add(w, name, 1, &w->tensor[index].dim[0]);
    for (int64_t r = 0; r < scale->n_elem; r++) {
        scale->value[r] = 1.0f / 32;
    }
    w->tensor[index].dtype = DTYPE_I8;
}

/* Saves tensors first .. last-1 as one honest file. */
static inline void writer_save(const struct writer *w, int first, int last, const char *dir,
                               const char *name)
{
    static const char *const dtypes[DTYPE_N] = {"F32", "F16", "BF16", "I8", "U8", "I32"};
    static char header[1 << 16];
    size_t used = (size_t)snprintf(header, sizeof header, "{\"__metadata__\":{\"format\":\"pt\"}");
    size_t offset = 0;
    for (int i = first; i < last; i++) {
        const struct writer_tensor *const t = &w->tensor[i];
        const size_t end = offset + (size_t)t->n_elem * dtype_bytes(t->dtype);
        used +=
            (size_t)snprintf(header + used, sizeof header - used,
                             ",\"%s\":{\"dtype\":\"%s\",\"shape\":[", t->name, dtypes[t->dtype]);
        for (int d = 0; d < t->n_dim; d++) {
            used += (size_t)snprintf(header + used, sizeof header - used, "%s%lld",
                                     d > 0 ? "," : "", (long long)t->dim[d]);
        }
        used += (size_t)snprintf(header + used, sizeof header - used,
                                 "],\"data_offsets\":[%zu,%zu]}", offset, end);
        offset = end;
    }
    header[used++] = '}';
    while (used % 8 != 0) {
        header[used++] = ' ';
    }
    size_t bytes = 0;
    unsigned char *const image = writer_image(&bytes, header, used, offset);
    unsigned char *out = image + 8 + used;
    for (int i = first; i < last; i++) {
        for (int64_t e = 0; e < w->tensor[i].n_elem; e++) {
            writer_put(out, &w->tensor[i], e);
        }
        out += (size_t)w->tensor[i].n_elem * dtype_bytes(w->tensor[i].dtype);
    }
    writer_file(dir, name, image, bytes);
    free(image);
}

#endif
