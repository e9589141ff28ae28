/* A file that is mapped read-only for as long as a model uses it, and whether it is still what it
 * was.
 *
 * The system answers reads past a file's new end with SIGBUS, which would end the process without a
 * word. Here such a read gives zeros, and mapped_check says from then on that the file was cut. */
#ifndef MODELS_MAPPED_H
#define MODELS_MAPPED_H

#include "kernels/err.h"

#include <stddef.h>
#include <time.h>

enum { MAPPED_MAX = 4096 }; /* files mapped at once by the whole process */

struct mapped {
    const char *path; /* Borrowed */
    void *data;       /* Owner; NULL = not open. [bytes] */
    size_t bytes;
    struct timespec modified; /* the time of the last change, when it was mapped */
    int fd;                   /* Owner: the mapped file itself, whichever file has its name later */
    int range;                /* its place in the list that the handler of SIGBUS reads */
};

/* Maps the file whole: ERR_IO, or ERR_FORMAT if it has fewer than bytes_min bytes (> 0). On failure
 * there is nothing to close. */
enum err_code mapped_open(struct mapped *mapped, const char *path, size_t bytes_min,
                          struct err *err);
void mapped_close(struct mapped *mapped); /* a zeroed one is fine */
/* ERR_IO, and names the file, once a read went past its new end. Costs nothing; any thread. */
enum err_code mapped_check_reads(const struct mapped *mapped, struct err *err);
/* The same, and also when its size or its time of change is another than when it was mapped. */
enum err_code mapped_check(const struct mapped *mapped, struct err *err);

#endif
