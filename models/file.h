/* Opens the files of a model directory, for models and engine: regular files only, since a pipe in
 * place of one would block the start until someone writes, and a device would never end. */
#ifndef MODELS_FILE_H
#define MODELS_FILE_H

#include "kernels/err.h"

#include <stdbool.h>
#include <stdio.h>

/* Owner of *file: the caller, by fclose. With optional, a missing file leaves it NULL without an
 * error. */
enum err_code file_open(FILE **file, const char *path, bool optional, struct err *err);

#endif
