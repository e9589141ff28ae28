/* Steps of backends whose device is the host: their arrays are read where the engine wrote them,
 * and every op has run to its end when it returns. */
#include "kernels/host/host.h"

#include <stdlib.h>

enum err_code host_step_new(struct backend *be, struct step **step,
                            const struct step_limits *limits, struct err *err)
{
    *step = NULL;
    struct step *const s = calloc(1, sizeof *s);
    if (s == NULL) {
        return err_set(err, ERR_MEMORY, "no memory left for a step");
    }
    const enum err_code code = step_arrays_new(s, limits, err);
    if (code != ERR_OK) {
        host_step_free(be, s);
        return code;
    }
    *step = s;
    return ERR_OK;
}

enum err_code host_step_twin(struct backend *be, struct step **twin, struct step *step,
                             struct err *err)
{
    (void)step;
    *twin = NULL;
    return err_set(err, ERR_UNSUPPORTED, "%s: no step begins before the last one is finished",
                   be->name);
}

void host_step_free(struct backend *be, struct step *step)
{
    (void)be;
    if (step != NULL) {
        step_arrays_free(step);
        free(step);
    }
}

void host_step_begin(struct backend *be, struct step *step)
{
    (void)be;
    step_check(step);
    CHECK(step->n_before == 0);
}

void host_submit(struct backend *be, struct step *step)
{
    (void)be;
    (void)step;
}

const void *host_fetch(struct backend *be, struct step *step, struct tensor src)
{
    (void)be;
    (void)step;
    CHECK(src.stride == src.cols);
    return src.data;
}

enum err_code host_finish(struct backend *be, struct step *step, struct err *err)
{
    (void)be;
    (void)step;
    (void)err;
    return ERR_OK;
}

void host_fast_path_use(struct backend *be, int i, bool is_used)
{
    (void)be;
    (void)i;
    (void)is_used;
}
