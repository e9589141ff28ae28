/* Files that appear when they are complete: see file_out.h. */
#include "models/file_out.h"

#include <errno.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum err_code file_out_failed(const struct file_out *out, struct err *err)
{
    return err_set(err, ERR_IO, "%s: cannot be written: %s", out->path, strerror(errno));
}

static bool is_in_place(const char *path)
{
    struct stat status;
    return stat(path, &status) == 0 && !S_ISREG(status.st_mode);
}

enum err_code file_out_open(struct file_out *out, const char *path, struct err *err)
{
    const bool in_place = is_in_place(path);
    *out = (struct file_out){.path = path};
    if (!in_place && asprintf(&out->beside, "%s.part", path) < 0) {
        out->beside = NULL;
        return err_set(err, ERR_MEMORY, "%s: no memory to write it", path);
    }
    out->file = fopen(in_place ? path : out->beside, "wb");
    return out->file != NULL ? ERR_OK : file_out_failed(out, err);
}

enum err_code file_out_check(const char *path, struct err *err)
{
    struct file_out out;
    if (is_in_place(path)) {
        return ERR_OK; /* to open a pipe may wait for its reader */
    }
    const enum err_code code = file_out_open(&out, path, err);
    (void)file_out_close(&out, code == ERR_OK ? ERR_CLOSED : code, err);
    return code;
}

enum err_code file_out_check_apart(const char *option, const char *path, const char *const *input,
                                   int n, struct err *err)
{
    struct stat own;
    struct stat other;
    for (int i = 0; i < n && stat(path, &own) == 0 && S_ISREG(own.st_mode); i++) {
        const bool standard = strcmp(input[i], "-") == 0;
        if ((standard ? fstat(STDIN_FILENO, &other) : stat(input[i], &other)) == 0 &&
            own.st_dev == other.st_dev && own.st_ino == other.st_ino) {
            return err_set(err, ERR_ARGUMENT,
                           "%s: %s would be written and is an input too: give another name", option,
                           path);
        }
    }
    return ERR_OK;
}

enum err_code file_out_close(struct file_out *out, enum err_code code, struct err *err)
{
    if (out->file != NULL) {
        const bool written = fflush(out->file) == 0 && ferror(out->file) == 0;
        if (code == ERR_OK && !written) {
            code = file_out_failed(out, err);
        }
        if (fclose(out->file) != 0 && code == ERR_OK) {
            code = file_out_failed(out, err);
        }
        if (out->beside != NULL && code == ERR_OK && rename(out->beside, out->path) != 0) {
            code = file_out_failed(out, err);
        }
        if (out->beside != NULL && code != ERR_OK) {
            (void)unlink(out->beside);
        }
    }
    free(out->beside);
    *out = (struct file_out){0};
    return code;
}
