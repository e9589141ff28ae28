/* See file.h. */
#include "models/file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum err_code file_path(char path[PATH_MAX], const char *dir, const char *name, struct err *err)
{
    const int n = snprintf(path, PATH_MAX, "%s/%s", dir, name);
    return n >= 0 && n < PATH_MAX
               ? ERR_OK
               : err_set(err, ERR_ARGUMENT, "%.200s/%.64s: the path is longer than %d bytes", dir,
                         name, PATH_MAX - 1);
}

bool file_exists(const char *path)
{
    struct stat status;
    return lstat(path, &status) == 0;
}

enum err_code file_open(FILE **file, const char *path, bool optional, struct err *err)
{
    *file = NULL;
    struct stat status;
    const int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0 && optional && errno == ENOENT) {
        return !file_exists(path)
                   ? ERR_OK
                   : err_set(err, ERR_IO, "%s: is a link to a file that is not there", path);
    }
    const bool known = fd >= 0 && fstat(fd, &status) == 0;
    enum err_code code = ERR_OK;
    if (known && !S_ISREG(status.st_mode)) {
        code = err_set(err, ERR_IO, "%s: not a regular file", path);
    } else if (!known || (*file = fdopen(fd, "rb")) == NULL) {
        code = err_set(err, ERR_IO, "%s: cannot open: %s", path, strerror(errno));
    }
    if (code != ERR_OK && fd >= 0) {
        (void)close(fd);
    }
    return code;
}

static enum err_code read_open_file(char **text, size_t *bytes, FILE *file, const char *path,
                                    size_t bytes_max, struct err *err)
{
    size_t room = 1 << 16;
    size_t n = 0;
    char *grown = NULL;
    for (;;) {
        /* A read of one byte more than allowed detects a file that is too long, whatever its size
         * claims. */
        room = room > bytes_max ? bytes_max + 1 : room;
        char *const more = realloc(grown, room + 1);
        if (more == NULL) {
            free(grown);
            return err_set(err, ERR_MEMORY, "%s: no memory for %zu bytes", path, room + 1);
        }
        grown = more;
        n += fread(grown + n, 1, room - n, file);
        if (n < room || n > bytes_max) {
            break;
        }
        room *= 2;
    }
    if (ferror(file) || n > bytes_max) {
        free(grown);
        return n > bytes_max ? err_set(err, ERR_FORMAT, "%s: longer than the limit of %zu bytes",
                                       path, bytes_max)
                             : err_set(err, ERR_IO, "%s: cannot read: %s", path, strerror(errno));
    }
    grown[n] = '\0';
    *text = grown;
    *bytes = n;
    return ERR_OK;
}

enum err_code file_read(char **text, size_t *bytes, const char *path, size_t bytes_max,
                        bool optional, struct err *err)
{
    *text = NULL;
    *bytes = 0;
    FILE *file = NULL;
    enum err_code code = file_open(&file, path, optional, err);
    if (file != NULL) {
        code = read_open_file(text, bytes, file, path, bytes_max, err);
        (void)fclose(file);
    }
    return code;
}
