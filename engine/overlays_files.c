/* Overlays from files: see overlays.h. */
#include "engine/overlays.h"

#include "models/file.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char file_ending[] = ".safetensors";

/* The length of a file's name before the ending .safetensors; 0 = it has another ending. */
static size_t stem_of(const char *file)
{
    const size_t n = strlen(file);
    const size_t n_ending = sizeof file_ending - 1;
    return n > n_ending && strcmp(file + n - n_ending, file_ending) == 0 ? n - n_ending : 0;
}

/* The name before the ending; false: it is not a valid one. */
static bool name_of(const char *file, char name[OVERLAY_NAME_MAX])
{
    const size_t n = stem_of(file);
    if (n == 0 || n >= OVERLAY_NAME_MAX) {
        return false;
    }
    memcpy(name, file, n);
    name[n] = '\0';
    return overlays_is_name(name);
}

/* The whole file, malloc'd, at most most bytes. */
static enum err_code read_whole(const char *path, int64_t most, char **data, size_t *bytes,
                                struct err *err)
{
    FILE *file = NULL;
    enum err_code code = file_open(&file, path, false, err);
    if (code != ERR_OK) {
        return code;
    }
    const long size = fseek(file, 0, SEEK_END) == 0 ? ftell(file) : -1;
    if (size > most) {
        code =
            err_set(err, ERR_QUEUE_FULL, "%s: %ld bytes, but %lld are the limit (--overlay-bytes)",
                    path, size, (long long)most);
    } else if (size < 0 || fseek(file, 0, SEEK_SET) != 0) {
        code = err_set(err, ERR_IO, "%s: cannot be read", path);
    }
    *bytes = size > 0 ? (size_t)size : 0;
    *data = code == ERR_OK ? malloc(*bytes + 1) : NULL;
    if (code == ERR_OK && *data == NULL) {
        code = err_set(err, ERR_MEMORY, "%s: no memory to read it", path);
    }
    if (code == ERR_OK && fread(*data, 1, *bytes, file) != *bytes) {
        code = err_set(err, ERR_IO, "%s: cannot be read", path);
        free(*data);
        *data = NULL;
    }
    (void)fclose(file);
    return code;
}

static enum err_code put_file(struct overlays *overlays, const char *path, const char *name,
                              struct err *err)
{
    struct overlay_info info;
    struct err cause = {0};
    char *data = NULL;
    size_t bytes = 0;
    enum err_code code = read_whole(path, overlays_bytes(overlays), &data, &bytes, err);
    if (data != NULL) {
        code = overlays_put(overlays, name, data, bytes, &info, &cause);
        free(data);
        if (code != ERR_OK) { /* the message begins with the overlay's name: add the file */
            const size_t n = strlen(name);
            const bool named = strncmp(cause.message, name, n) == 0 && cause.message[n] == ':';
            code = err_set(err, code, "%s: %.400s", path, cause.message + (named ? n + 2 : 0));
        }
    }
    return code;
}

enum err_code overlays_read_file(struct overlays *overlays, const char *path,
                                 char name[OVERLAY_NAME_MAX], struct err *err)
{
    const char *const slash = strrchr(path, '/');
    if (!name_of(slash != NULL ? slash + 1 : path, name)) {
        (void)snprintf(name, OVERLAY_NAME_MAX, "overlay");
    }
    return put_file(overlays, path, name, err);
}

/* Puts each file NAME.safetensors of dir. */
static enum err_code read_dir(struct overlays *overlays, const char *dir, struct err *err)
{
    struct dirent **entry = NULL;
    const int n = scandir(dir, &entry, NULL, alphasort);
    if (n < 0) {
        return err_set(err, ERR_IO, "%s: cannot be read as a directory (--overlay-dir)", dir);
    }
    enum err_code code = ERR_OK;
    for (int i = 0; i < n; i++) {
        char name[OVERLAY_NAME_MAX];
        char path[PATH_MAX];
        const bool is_overlay = stem_of(entry[i]->d_name) > 0;
        if (code == ERR_OK && is_overlay) {
            code = file_path(path, dir, entry[i]->d_name, err);
        }
        if (code == ERR_OK && is_overlay) {
            code = name_of(entry[i]->d_name, name)
                       ? put_file(overlays, path, name, err)
                       : err_set(err, ERR_ARGUMENT,
                                 "%s: an overlay's name must be 1 to %d of a-z, 0-9, \".\", \"_\" "
                                 "and \"-\"",
                                 path, OVERLAY_NAME_MAX - 1);
        }
        free(entry[i]);
    }
    free(entry);
    return code;
}

enum err_code overlays_reserve(struct overlays **overlays, struct backend *be,
                               const struct model_info *info, const char *model_dir, int64_t bytes,
                               const char *dir, struct err *err)
{
    if (bytes == 0 || info->n_memory == 0) {
        return dir == NULL ? ERR_OK
                           : err_set(err, ERR_ARGUMENT,
                                     "--overlay-dir %.200s: overlays are rows of memories, and the "
                                     "model has none",
                                     dir);
    }
    const enum err_code code = overlays_open(overlays, be, info, model_dir, bytes, err);
    return code == ERR_OK && dir != NULL ? read_dir(*overlays, dir, err) : code;
}
