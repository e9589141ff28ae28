/* See file.h. */
#include "models/file.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum err_code file_open(FILE **file, const char *path, bool optional, struct err *err)
{
    *file = NULL;
    struct stat status;
    const int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0 && optional && errno == ENOENT) {
        return ERR_OK;
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
