/* Reads a JSON object from a file or from memory, with every bound stated. config.c, tensors.c and
 * safetensors.c call it, and the server for bodies of requests; what comes back is syntax only, its
 * meaning is theirs to check. */
#ifndef MODELS_JSON_FILE_H
#define MODELS_JSON_FILE_H

#include "kernels/err.h"

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>

/* As json_loadb. Where there is no memory, frees what it has taken, returns NULL and sets
 * *no_memory: jansson 2.14 by itself goes on without the bytes that found no room, to an assertion,
 * past the end of a text, or to an error that calls the JSON wrong. fault->text is empty then,
 * unless it is the text that takes too much: 512 MiB are the limit. */
json_t *json_read(const char *text, size_t bytes, size_t flags, json_error_t *fault,
                  bool *no_memory);

/* Reads path, at most bytes_max bytes of it (a larger file is an error). With optional, a missing
 * file leaves *root NULL without an error. Owner of *root: the caller, by json_decref. */
enum err_code json_file_read(json_t **root, const char *path, size_t bytes_max, bool optional,
                             struct err *err);

/* The same for text of the given length; path is only named in errors. Duplicate keys, text after
 * the object and anything that is no object are errors. */
enum err_code json_file_parse(json_t **root, const char *text, size_t bytes, const char *path,
                              struct err *err);

#endif
