/* A library that claims to be a CUDA backend of another version: test_backend.c opens it and
 * expects to be told. Built into a shared library of its own. */
#include "kernels/cuda/entry.h"

const struct cuda_entry *pkmserve_cuda_entry(void);

const struct cuda_entry *pkmserve_cuda_entry(void)
{
    static const struct cuda_entry entry = {.abi = CUDA_ENTRY_ABI + 1};
    return &entry;
}
