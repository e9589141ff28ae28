/* A progress bar on standard error, for the command line tools. It draws only on a terminal, and at
 * most ten times a second, so that it costs nothing in scripts. */
#ifndef SERVER_PROGRESS_H
#define SERVER_PROGRESS_H

#include <stdbool.h>
#include <stdint.h>

struct progress {
    bool shown;        /* standard error is a terminal */
    int64_t begin_us;  /* when the work began */
    int64_t last_us;   /* when the bar was drawn last */
    const char *unit;  /* Borrowed: "tokens"; NULL = show no rate */
    double unit_total; /* units at share 1 */
    double from;       /* share that was done when the work began */
};

void progress_begin(struct progress *progress, const char *unit, double unit_total);
/* share 0 .. 1 of what label says is done. */
void progress_show(struct progress *progress, const char *label, double share);
/* n documents with so many units are done; share -1: the total is not known. */
void progress_count(struct progress *progress, const char *label, int64_t n_document,
                    int64_t n_unit, double share);
/* Removes the bar, so that the result begins on an empty line. */
void progress_end(struct progress *progress);

/* The progress callback of struct model_options; ctx is a struct progress. */
void progress_load(void *ctx, const char *phase, double done);

#endif
