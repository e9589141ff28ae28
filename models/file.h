/* Opens the files of a model directory, for models and engine: regular files only, since a pipe in
 * place of one would block the start until someone writes, and a device would never end. */
#ifndef MODELS_FILE_H
#define MODELS_FILE_H

#include "kernels/err.h"

#include <limits.h>
#include <stdbool.h>
#include <stdio.h>

/* path = dir "/" name. ERR_ARGUMENT: it would be too long. */
enum err_code file_path(char path[PATH_MAX], const char *dir, const char *name, struct err *err);
/* Whether there is something of that name, be it a link to nothing. */
bool file_exists(const char *path);
/* Owner of *file: the caller, by fclose. With optional, a missing file leaves it NULL without an
 * error. */
enum err_code file_open(FILE **file, const char *path, bool optional, struct err *err);
/* The whole file, with a NUL behind it; of more than bytes_max bytes ERR_FORMAT. With optional, a
 * missing file leaves *text NULL without an error. Owner of *text: the caller, by free. */
enum err_code file_read(char **text, size_t *bytes, const char *path, size_t bytes_max,
                        bool optional, struct err *err);

#endif
