/* The pages of the key/value cache that are free. A stack: the pages given back last, still warm,
 * are taken first. Engine thread only. */
#ifndef ENGINE_KVPAGES_H
#define ENGINE_KVPAGES_H

#include "kernels/err.h"

#include <stdbool.h>
#include <stdint.h>

struct kvpages {
    int32_t *free_page; /* Owner: this. [n_page], the first n_free are free */
    int n_free;
    int n_page;
};

enum err_code kvpages_open(struct kvpages *pages, int n_page, struct err *err);
void kvpages_close(struct kvpages *pages); /* zeroed or closed ones are fine */

/* All n pages or none. Admission takes a unit's worst case at once, so no unit can run out later
 * and nothing is ever preempted. */
bool kvpages_take(struct kvpages *pages, int n, int32_t *page);
void kvpages_give(struct kvpages *pages, int n, const int32_t *page);

/* Pages that hold n positions. */
int kvpages_for(int64_t n_position);

#endif
