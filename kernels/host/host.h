/* What the backends whose device is the host (ref, cpu) share: memory, transfers, steps. The
 * contracts of the table's functions are in kernels/backend.h. */
#ifndef KERNELS_HOST_HOST_H
#define KERNELS_HOST_HOST_H

#include "kernels/backend.h"

enum { HOST_TOK_GOOD = 512 }; /* backend.n_tok_good */

/* ---- memory.c ------------------------------------------------------------------------------- */

/* Zero-filled memory, aligned for vectors; NULL if there is not enough. Owner: the caller, until
 * host_free, which takes NULL. Large blocks are mapped by themselves, in huge pages: memory from
 * the heap that was touched before stays in small pages. A page takes up RAM when it is first
 * touched. So a cache of gigabytes costs no time before the first request, and only as much RAM as
 * has been used of it. */
void *host_alloc(size_t bytes);
void host_free(void *data);

enum err_code host_buffer_new(struct backend *be, void **data, size_t bytes, const char *purpose,
                              struct err *err);
void host_buffer_free(struct backend *be, void *data);
void host_upload(struct backend *be, struct tensor dst, const void *host);
void host_download(struct backend *be, void *host, struct tensor src);
/* What Linux deems available to this process, within the limit of its container. */
int64_t host_memory_available(struct backend *be);

/* ---- step.c --------------------------------------------------------------------------------- */

enum err_code host_step_new(struct backend *be, struct step **step,
                            const struct step_limits *limits, struct err *err);
enum err_code host_step_twin(struct backend *be, struct step **twin, struct step *step,
                             struct err *err);
void host_step_free(struct backend *be, struct step *step);
void host_step_begin(struct backend *be, struct step *step);
/* Nothing is left to start, to bring or to wait for, nothing can have failed, and no library is
 * used. */
void host_submit(struct backend *be, struct step *step);
const void *host_fetch(struct backend *be, struct step *step, struct tensor src);
enum err_code host_finish(struct backend *be, struct step *step, struct err *err);
void host_fast_path_use(struct backend *be, int i, bool is_used);

#endif
