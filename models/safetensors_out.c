/* Writes one safetensors file: see safetensors_out.h. */
#include "models/safetensors_out.h"

#include <jansson.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

static json_t *part_json(const struct safetensors_part *part, int64_t *offset)
{
    json_t *const shape = json_array();
    const int64_t size = (int64_t)safetensors_dtype_bytes(part->dtype);
    int64_t bytes = size;
    CHECK(part->n_dim >= 1 && part->n_dim <= 2 && *offset % size == 0);
    bool ok = true;
    for (int i = 0; i < part->n_dim; i++) {
        ok = json_array_append_new(shape, json_integer(part->dim[i])) == 0 && ok;
        CHECK(!__builtin_mul_overflow(bytes, part->dim[i], &bytes));
    }
    const int64_t begin = *offset;
    CHECK(!__builtin_add_overflow(begin, bytes, offset));
    if (!ok) {
        json_decref(shape);
        return NULL;
    }
    return json_pack("{s:s, s:o, s:[I, I]}", "dtype", safetensors_dtype_name(part->dtype), "shape",
                     shape, "data_offsets", (json_int_t)begin, (json_int_t)*offset);
}

/* The JSON of the header, or NULL. Owner: the caller. */
static char *header_json(const struct safetensors_part *part, int n_part,
                         const struct safetensors_string *metadata, int n_metadata)
{
    json_t *const root = json_object();
    json_t *const strings = json_object();
    int64_t offset = 0;
    bool ok = root != NULL && strings != NULL;
    for (int i = 0; ok && i < n_metadata; i++) {
        ok = json_object_set_new(strings, metadata[i].key, json_string(metadata[i].value)) == 0;
    }
    ok = ok && json_object_set(root, "__metadata__", strings) == 0;
    for (int i = 0; ok && i < n_part; i++) {
        ok = json_object_set_new(root, part[i].name, part_json(&part[i], &offset)) == 0;
    }
    char *text = ok ? json_dumps(root, JSON_COMPACT) : NULL;
    /* Where memory fails, jansson may leave out a part of the text and say nothing. */
    json_t *const again = text != NULL ? json_loads(text, 0, NULL) : NULL;
    if (text != NULL && !json_equal(root, again)) {
        free(text);
        text = NULL;
    }
    json_decref(again);
    json_decref(strings);
    json_decref(root);
    return text;
}

char *safetensors_header(const struct safetensors_part *part, int n_part,
                         const struct safetensors_string *metadata, int n_metadata, size_t *bytes)
{
    char *const text = header_json(part, n_part, metadata, n_metadata);
    const size_t n = text != NULL ? strlen(text) : 0;
    const size_t filled = (n + 7) / 8 * 8;
    char *const header = text != NULL ? malloc(8 + filled + 1) : NULL;
    if (header != NULL) {
        for (int i = 0; i < 8; i++) {
            header[i] = (char)((uint64_t)filled >> 8 * i & 255);
        }
        (void)snprintf(header + 8, filled + 1, "%-*s", (int)filled, text);
        *bytes = 8 + filled;
    }
    free(text);
    return header;
}

enum err_code safetensors_out_open(struct safetensors_out *out, const char *path,
                                   const struct safetensors_part *part, int n_part,
                                   const struct safetensors_string *metadata, int n_metadata,
                                   struct err *err)
{
    size_t bytes = 0;
    *out = (struct safetensors_out){0};
    char *const header = safetensors_header(part, n_part, metadata, n_metadata, &bytes);
    if (header == NULL) {
        return err_set(err, ERR_MEMORY, "%s: no memory to write it", path);
    }
    const enum err_code code = file_out_open(&out->file, path, err);
    if (code == ERR_OK) {
        safetensors_out_add(out, header, bytes);
    }
    free(header);
    return code;
}

void safetensors_out_add(struct safetensors_out *out, const void *data, size_t bytes)
{
    (void)fwrite(data, 1, bytes, out->file.file); /* file_out_close reports failures */
}

enum err_code safetensors_out_close(struct safetensors_out *out, enum err_code code,
                                    struct err *err)
{
    return file_out_close(&out->file, code, err);
}
