/* An overlay as the read op takes it (kernels/step.h, struct step_redirect): hash tables of its
 * slots and its rows in the type that they are kept in, one after the other in one block of bytes,
 * which goes into the backend's memory as it is.
 *
 * Rows keep their file's type, but:
 *   - mode add: the base's row plus the overlay's, computed once, in F32;
 *   - where the table is int8 because all weights are, its rounding (kernels/int8.h);
 *   - in the memory of a device, what its kernels read: F16 and I8 become F32, or I8 beside a table
 *     that is I8 in the file the BF16 that this becomes there.
 * So an overlay in mode replace, of the table's type, gives the bits that the table with these rows
 * gives. */
#ifndef MODELS_OVERLAY_IMAGE_H
#define MODELS_OVERLAY_IMAGE_H

#include "models/overlay.h"
#include "models/table.h"

/* Where the parts of one memory begin in the block, in bytes. */
struct overlay_image_rows {
    struct table base;
    enum dtype dtype;
    size_t rows, scale; /* scale 0 = none */
};

struct overlay_image {
    size_t bytes;
    bool add;
    int n_memory;
    struct overlay_image_memory {
        int memory; /* in model_info.memory */
        int n_bit;
        size_t place;
        struct overlay_image_rows values, experts; /* experts.dtype DTYPE_N: there are none */
    } memory[MODEL_PKM_MAX];                       /* [n_memory] ascending */
};

/* Sizes the block of a checked overlay. tensors: the base's, borrowed by image. ERR_FORMAT where
 * these do not have the tables that info says. */
enum err_code overlay_image_plan(struct overlay_image *image, const struct overlay *overlay,
                                 const struct tensors *tensors, const struct model_info *info,
                                 const struct backend *be, struct err *err);
/* Fills block, image->bytes aligned as malloc aligns. ERR_NUMERICAL: a sum of mode add is out of
 * range; ERR_MEMORY. */
enum err_code overlay_image_fill(void *block, const struct overlay_image *image,
                                 const struct overlay *overlay, struct err *err);
/* The redirection for memory image->memory[i], if the block is at `at` in the backend's memory. */
struct step_redirect overlay_image_redirect(const struct overlay_image *image, int i,
                                            const void *at);

#endif
