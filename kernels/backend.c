/* Opening a backend by the names that users write. Called by the engine and the tests. */
#include "kernels/backend.h"

#include <stdlib.h>
#include <string.h>

static enum err_code open_cpu(struct backend **be, int n_thread, struct err *err)
{
    const char *const isa = getenv("PKMSERVE_ISA");
    if (isa != NULL && strcmp(isa, "ref") == 0) {
        return ref_open(be, err);
    }
    return cpu_open(be, isa != NULL && isa[0] != '\0' ? isa : NULL, n_thread, err);
}

enum err_code backend_open(struct backend **be, const struct backend_options *options,
                           struct err *err)
{
    *be = NULL;
    const char *const device = options->device;
    if (options->n_thread < 0) {
        return err_set(err, ERR_ARGUMENT, "threads: %d is below 0 (0 = one per core)",
                       options->n_thread);
    }
    if (strcmp(device, "auto") == 0 || strcmp(device, "cpu") == 0) {
        return open_cpu(be, options->n_thread, err);
    }
    if (strcmp(device, "ref") == 0) {
        return ref_open(be, err);
    }
    if (strcmp(device, "cuda") == 0) {
        return err_set(err, ERR_UNSUPPORTED,
                       "device: this build has no cuda backend; use auto or cpu");
    }
    return err_set(err, ERR_ARGUMENT, "device: %.40s is unknown; use auto or cpu", device);
}

void backend_close(struct backend *be)
{
    if (be != NULL) {
        be->op->close(be);
    }
}
