/* What a request switches off or scales among the look-ups of the memories: its knock-out list, in
 * a form that is the same however the request was written. Front ends make it before they
 * submit. */
#ifndef ENGINE_REQUEST_ABLATE_H
#define ENGINE_REQUEST_ABLATE_H

#include "kernels/step.h"

enum {
    ABLATE_SLOT_MAX = 4096,  /* slots that a request may name */
    ABLATE_WHOLE_MAX = 1024, /* whole memories and heads that it may name */
    ABLATE_MAX = ABLATE_SLOT_MAX + ABLATE_WHOLE_MAX,
};

/* The largest scale of one entry, and the largest product of several entries for the same. */
#define ABLATE_SCALE_MAX 4
#define ABLATE_PRODUCT_MAX 1e6f

struct request_ablate {
    struct step_ablate *entry; /* Owner: the request. [n] ascending, distinct, no scale of 1 */
    int n;
    uint64_t digest[2]; /* of the entries; zeros without any */
};

/* Sorts the n entries, multiplies those for the same memory, head and slot, the same in whatever
 * order they came, and drops what multiplies by 1. Takes the entries, malloc'd, or NULL with n 0.
 * ERR_ARGUMENT: a product is above ABLATE_PRODUCT_MAX. */
enum err_code request_ablate_make(struct request_ablate *ablate, struct step_ablate *entry, int n,
                                  struct err *err);
void request_ablate_free(struct request_ablate *ablate); /* zeroed is fine */

#endif
