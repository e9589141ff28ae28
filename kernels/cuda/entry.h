/* The one symbol of the library that holds the CUDA backend: libpkmserve_cuda.so on a GPU, or the
 * test double's libpkmserve_cudahost.so. kernels/backend.c opens the library at run time, so that
 * one program serves machines with and without CUDA. */
#ifndef KERNELS_CUDA_ENTRY_H
#define KERNELS_CUDA_ENTRY_H

#include "kernels/backend.h"

/* Raised whenever anything in backend.h, op.h, step.h, weight.h, tensor.h or err.h changes that the
 * two sides share. */
enum { CUDA_ENTRY_ABI = 23 };

#define CUDA_ENTRY_SYMBOL "pkmserve_cuda_entry"

struct cuda_entry {
    uint32_t abi;          /* CUDA_ENTRY_ABI of the library */
    uint32_t table_size;   /* its sizeof(struct backend_ops) */
    uint32_t step_size;    /* its sizeof(struct step) */
    uint32_t backend_size; /* its sizeof(struct backend) */
    /* Opens the device that options name, of those that CUDA_VISIBLE_DEVICES leaves.
     * ERR_UNSUPPORTED: no driver, too old a driver, no device, one too old; ERR_ARGUMENT: no such
     * device; ERR_DEVICE, ERR_MEMORY. The message says which and what to do. */
    enum err_code (*open)(struct backend **be, const struct backend_options *options,
                          struct err *err);
};

/* extern "C" const struct cuda_entry *pkmserve_cuda_entry(void); */

#endif
