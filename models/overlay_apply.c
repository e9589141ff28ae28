/* See overlay_apply.h. */
#include "models/overlay_apply.h"

#include "kernels/int8.h"
#include "models/file.h"
#include "models/identity.h"
#include "models/mapped.h"
#include "models/table.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { COPY_BYTES = 1 << 20 };

struct apply {
    const char *base, *to;
    char part[PATH_MAX]; /* the incomplete directory; "" = not made yet */
    struct model_info info;
    struct tensors *tensors; /* Owner: this */
    struct mapped file;      /* Owner: this. The overlay */
    struct overlay overlay;
    float *row; /* Owner: this. [2, width] */
};

static enum err_code failed(const char *path, const char *what, struct err *err)
{
    return err_set(err, ERR_IO, "%s: %s: %s", path, what, strerror(errno));
}

/* ---- the files ------------------------------------------------------------------------------ */

static enum err_code copy_bytes(int from, int to, const char *from_path, const char *to_path,
                                struct err *err)
{
    char *const buffer = malloc(COPY_BYTES);
    enum err_code code =
        buffer != NULL ? ERR_OK : err_set(err, ERR_MEMORY, "%s: no memory to copy it", from_path);
    for (ssize_t n = 1; n > 0 && code == ERR_OK;) {
        n = read(from, buffer, COPY_BYTES);
        code = n < 0 ? failed(from_path, "cannot be read", err) : ERR_OK;
        for (ssize_t at = 0; at < n && code == ERR_OK;) {
            const ssize_t written = write(to, buffer + at, (size_t)(n - at));
            code = written < 0 ? failed(to_path, "cannot be written", err) : ERR_OK;
            at += written;
        }
    }
    free(buffer);
    return code;
}

static enum err_code copy_file(const struct apply *it, const char *name, struct err *err)
{
    char from_path[PATH_MAX];
    char to_path[PATH_MAX];
    struct stat status;
    if (file_path(from_path, it->base, name, err) != ERR_OK ||
        file_path(to_path, it->part, name, err) != ERR_OK) {
        return err->code;
    }
    if (stat(from_path, &status) != 0) {
        return failed(from_path, "cannot be looked at", err);
    }
    if (!S_ISREG(status.st_mode)) {
        return ERR_OK; /* a folder, say */
    }
    const int from = open(from_path, O_RDONLY | O_CLOEXEC);
    if (from < 0) {
        return failed(from_path, "cannot be opened", err);
    }
    const int to = open(to_path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    enum err_code code = to >= 0 ? copy_bytes(from, to, from_path, to_path, err)
                                 : failed(to_path, "cannot be written", err);
    (void)close(from);
    if (to >= 0 && close(to) != 0 && code == ERR_OK) {
        code = failed(to_path, "cannot be written", err);
    }
    return code;
}

/* Whether a file describes the base in a way that would be wrong for the copy. */
static bool is_about_base(const char *name)
{
    return name[0] == '.' || strcmp(name, "README.md") == 0 || strcmp(name, "parity.json") == 0 ||
           strcmp(name, IDENTITY_NAME) == 0;
}

static enum err_code copy_files(const struct apply *it, struct err *err)
{
    DIR *const dir = opendir(it->base);
    if (dir == NULL) {
        return failed(it->base, "cannot be read", err);
    }
    enum err_code code = ERR_OK;
    const struct dirent *entry = NULL;
    while (code == ERR_OK && (errno = 0, entry = readdir(dir)) != NULL) {
        code = is_about_base(entry->d_name) ? ERR_OK : copy_file(it, entry->d_name, err);
    }
    if (code == ERR_OK && errno != 0) {
        code = failed(it->base, "cannot be read", err);
    }
    (void)closedir(dir);
    return code;
}

/* Removes the incomplete directory, which has no folders. */
static void remove_part(const struct apply *it)
{
    DIR *const dir = it->part[0] != '\0' ? opendir(it->part) : NULL;
    char path[PATH_MAX];
    for (const struct dirent *entry = dir != NULL ? readdir(dir) : NULL; entry != NULL;
         entry = readdir(dir)) {
        if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0 &&
            file_path(path, it->part, entry->d_name, NULL) == ERR_OK) {
            (void)unlink(path);
        }
    }
    if (dir != NULL) {
        (void)closedir(dir);
        (void)rmdir(it->part);
    }
}

/* ---- the rows ------------------------------------------------------------------------------- */

/* The copy of a tensor, mapped for writing. */
struct copy {
    char path[PATH_MAX];
    void *map; /* Owner: this; MAP_FAILED = none */
    size_t bytes;
    unsigned char *data; /* Borrowed: of the tensor, in map */
};

static void copy_close(struct copy *copy)
{
    if (copy->map != MAP_FAILED) {
        (void)munmap(copy->map, copy->bytes);
    }
    copy->map = MAP_FAILED;
}

static enum err_code copy_open(struct copy *copy, const struct apply *it,
                               const struct safetensors_entry *entry, struct err *err)
{
    struct stat status;
    struct safetensors st;
    const char *const slash = strrchr(entry->path, '/');
    copy->map = MAP_FAILED;
    if (file_path(copy->path, it->part, slash != NULL ? slash + 1 : entry->path, err) != ERR_OK) {
        return err->code;
    }
    const int fd = open(copy->path, O_RDWR | O_CLOEXEC);
    if (fd >= 0 && fstat(fd, &status) == 0 && status.st_size > 0) {
        copy->bytes = (size_t)status.st_size;
        copy->map = mmap(NULL, copy->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    }
    if (fd >= 0) {
        (void)close(fd);
    }
    if (copy->map == MAP_FAILED) {
        return failed(copy->path, "cannot be changed", err);
    }
    enum err_code code = safetensors_parse(&st, copy->map, copy->bytes, copy->path, err);
    copy->data = NULL;
    for (int i = 0; i < st.n_entry && code == ERR_OK; i++) {
        if (strcmp(st.entry[i].name, entry->name) == 0 && st.entry[i].bytes == entry->bytes) {
            copy->data =
                (unsigned char *)copy->map + (st.entry[i].data - (const unsigned char *)copy->map);
        }
    }
    safetensors_free(&st);
    if (code == ERR_OK && copy->data == NULL) {
        code =
            err_set(err, ERR_FORMAT, "%s: tensor %s is missing: was the model changed meanwhile?",
                    copy->path, entry->name);
    }
    return code;
}

/* Writes row [cols] in the type of the table. */
static enum err_code put_row(unsigned char *to, float *scale, const float *row,
                             const struct table *table, int64_t slot, struct err *err)
{
    uint16_t *const half = (uint16_t *)(void *)to;
    float max = 0;
    bool fits = true;
    for (int64_t c = 0; c < table->cols; c++) {
        max = fabsf(row[c]) > max ? fabsf(row[c]) : max;
    }
    const struct int8_scale by = int8_scale_of(max);
    for (int64_t c = 0; c < table->cols; c++) {
        switch (table->dtype) {
        case DTYPE_F32: ((float *)(void *)to)[c] = row[c]; break;
        case DTYPE_BF16:
            half[c] = bf16_from_f32(row[c]);
            fits = fits && isfinite(bf16_to_f32(half[c]));
            break;
        case DTYPE_F16:
            half[c] = f16_from_f32(row[c]);
            fits = fits && isfinite(f16_to_f32(half[c]));
            break;
        case DTYPE_I8: to[c] = (unsigned char)int8_round(row[c], by.inverse); break;
        default: UNREACHABLE();
        }
    }
    if (scale != NULL) {
        *scale = by.scale;
    }
    return fits && isfinite(max)
               ? ERR_OK
               : err_set(err, ERR_NUMERICAL,
                         "tensor %s: the new row %lld has the number %g, beyond those of %s",
                         table->entry->name, (long long)slot, (double)max,
                         dtype_name(table->dtype));
}

/* Writes the overlay's rows of one table into the copy. scales: of the copy, NULL unless int8. */
static enum err_code put_rows(const struct apply *it, const struct overlay_memory *part,
                              const struct overlay_rows *rows, const struct table *table,
                              unsigned char *data, float *scales, struct err *err)
{
    const size_t bytes = table->entry->bytes / (size_t)table->rows;
    const bool as_it_is = !it->overlay.add && rows->rows.dtype == table->dtype;
    float *const base = it->row + table->cols;
    enum err_code code = ERR_OK;
    for (int64_t i = 0; i < part->n && code == ERR_OK; i++) {
        const size_t slot = (size_t)part->slot[i];
        unsigned char *const to = data + slot * bytes;
        float *const scale = scales != NULL ? &scales[slot] : NULL;
        if (as_it_is) {
            memcpy(to, tensor_rows(rows->rows, i, 1).data, bytes);
            if (scale != NULL) {
                *scale = rows->scale[i];
            }
            continue;
        }
        table_overlay_row(it->row, rows, i);
        if (it->overlay.add) {
            table_row(base, table, part->slot[i]);
            for (int64_t c = 0; c < table->cols; c++) {
                it->row[c] += base[c];
            }
        }
        code = put_row(to, scale, it->row, table, part->slot[i], err);
    }
    return code;
}

static enum err_code change_table(const struct apply *it, const struct overlay_memory *part,
                                  bool experts, struct overlay_applied *applied, struct err *err)
{
    const struct overlay_rows *const rows = experts ? &part->experts : &part->values;
    struct table table;
    enum err_code code = table_open(&table, it->tensors, &it->info, part->memory, experts, err);
    if (code == ERR_OK && table.dtype == DTYPE_Q4) {
        code = err_set(err, ERR_UNSUPPORTED,
                       "%s: tensor %s has 4 bits: rows cannot be written into it without loss; "
                       "serve the overlay beside it instead",
                       table.entry->path, table.entry->name);
    }
    if (code != ERR_OK) {
        return code;
    }
    struct copy copy = {.map = MAP_FAILED};
    struct copy scale = {.map = MAP_FAILED};
    code = copy_open(&copy, it, table.entry, err);
    if (code == ERR_OK && table.scale != NULL) {
        code = copy_open(&scale, it, table.scale, err);
    }
    if (code == ERR_OK) {
        float *const scales = table.scale != NULL ? (float *)(void *)scale.data : NULL;
        const bool as_served =
            table.dtype == DTYPE_F32 || (!it->overlay.add && rows->rows.dtype == table.dtype);
        applied->rounded = applied->rounded || !as_served;
        code = put_rows(it, part, rows, &table, copy.data, scales, err);
    }
    copy_close(&scale);
    copy_close(&copy);
    return code;
}

/* ---- all of it ------------------------------------------------------------------------------ */

static enum err_code open_all(struct apply *it, const char *overlay, struct err *err)
{
    char hash[MODEL_PKM_MAX][SHA256_HEX] = {0};
    int64_t width = 0;
    enum err_code code = model_info_read(&it->info, it->base, err);
    if (code == ERR_OK) {
        code = tensors_open(&it->tensors, it->base, err);
    }
    if (code == ERR_OK) {
        code = mapped_open(&it->file, overlay, 8, err);
    }
    if (code == ERR_OK) {
        code = overlay_parse(&it->overlay, it->file.data, it->file.bytes, overlay, err);
    }
    if (code == ERR_OK) { /* what costs nothing first */
        code = overlay_check(&it->overlay, &it->info, NULL, err);
    }
    for (int i = 0; i < it->overlay.n_memory && code == ERR_OK; i++) {
        const int m = it->overlay.memory[i].memory;
        code = overlay_base_hash(hash[m], it->tensors, &it->info, m, err);
        width = it->info.memory[m].d_value > width ? it->info.memory[m].d_value : width;
    }
    if (code == ERR_OK) {
        code = overlay_check(&it->overlay, &it->info, (const char(*)[SHA256_HEX])hash, err);
    }
    width = it->info.d_model > width ? it->info.d_model : width;
    it->row = code == ERR_OK ? malloc(2 * (size_t)width * sizeof *it->row) : NULL;
    return code == ERR_OK && it->row == NULL ? err_set(err, ERR_MEMORY, "no memory for two rows")
                                             : code;
}

static enum err_code make_directory(struct apply *it, struct err *err)
{
    size_t n = strlen(it->to);
    while (n > 1 && it->to[n - 1] == '/') {
        n--;
    }
    if (access(it->to, F_OK) == 0) {
        return err_set(err, ERR_ARGUMENT, "%s: is there already: name a directory to be made",
                       it->to);
    }
    const int length = snprintf(it->part, sizeof it->part, "%.*s.part", (int)n, it->to);
    if (length >= 0 && (size_t)length < sizeof it->part && mkdir(it->part, 0777) == 0) {
        return ERR_OK;
    }
    const enum err_code code =
        errno == EEXIST
            ? err_set(err, ERR_IO,
                      "%s: is there already: an apply is making it, or one was interrupted and it "
                      "may be removed",
                      it->part)
            : failed(it->part, "cannot be made", err);
    it->part[0] = '\0';
    return code;
}

enum err_code overlay_apply(struct overlay_applied *applied, const char *base, const char *overlay,
                            const char *to, struct err *err)
{
    *applied = (struct overlay_applied){0};
    struct apply *const it = calloc(1, sizeof *it);
    if (it == NULL) {
        return err_set(err, ERR_MEMORY, "%s: no memory to copy it", base);
    }
    it->base = base;
    it->to = to;
    enum err_code code = open_all(it, overlay, err);
    if (code == ERR_OK) {
        code = make_directory(it, err);
    }
    if (code == ERR_OK) {
        code = copy_files(it, err);
    }
    for (int i = 0; i < it->overlay.n_memory && code == ERR_OK; i++) {
        const struct overlay_memory *const part = &it->overlay.memory[i];
        code = change_table(it, part, false, applied, err);
        if (code == ERR_OK && part->experts.rows.data != NULL) {
            code = change_table(it, part, true, applied, err);
        }
        applied->n_row[part->memory] = part->n;
    }
    if (code == ERR_OK) { /* or what was copied is not what was checked */
        code = tensors_check_files(it->tensors, false, err);
    }
    if (code == ERR_OK && rename(it->part, to) != 0) {
        code = failed(to, "cannot be made", err);
    }
    if (code != ERR_OK) {
        remove_part(it);
    }
    overlay_free(&it->overlay);
    mapped_close(&it->file);
    tensors_close(it->tensors);
    free(it->row);
    free(it);
    return code;
}
