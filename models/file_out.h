/* A file that appears under its name when it is complete: until then it is NAME.part beside it. So
 * nobody reads half a file, a failure leaves an earlier one as it is, and a file may be made of
 * itself. What is no regular file (a pipe, a device) is written in place. */
#ifndef MODELS_FILE_OUT_H
#define MODELS_FILE_OUT_H

#include "kernels/err.h"

#include <stdio.h>

struct file_out {
    const char *path; /* Borrowed */
    char *beside;     /* Owner: this. The name until it is complete; NULL = written in place */
    FILE *file;       /* Owner: this. To write with; file_out_close reports failures */
};

/* It must be closed in either case. ERR_IO, ERR_MEMORY. */
enum err_code file_out_open(struct file_out *out, const char *path, struct err *err);
/* Whether path could be opened so, before work that takes long. Leaves nothing behind. */
enum err_code file_out_check(const char *path, struct err *err);
/* With code ERR_OK the file gets its name; else it is removed. Returns code, or what goes wrong
 * now. Zeroed is fine. */
enum err_code file_out_close(struct file_out *out, enum err_code code, struct err *err);
/* Whether path, if it is a regular file, is none of the n inputs; "-" is standard input.
 * ERR_ARGUMENT names the option that path is of. */
enum err_code file_out_check_apart(const char *option, const char *path, const char *const *input,
                                   int n, struct err *err);
/* That it cannot be written, for the reason in errno. */
enum err_code file_out_failed(const struct file_out *out, struct err *err);

#endif
