/* What stands in for linear_lt.cu, linear_choose.cu and lt_library.cu where the CUDA toolkit has
 * come without cuBLASLt's headers: our own kernels multiply, and the backend says why. */
#include "kernels/cuda/backend.cuh"
#include "kernels/cuda/linear.cuh"
#include "kernels/cuda/lt_library.cuh"

#include <stdio.h>

#if !LT_IS_BUILT

#define WITHOUT "this library was built without cuBLASLt's headers (cublasLt.h)"

enum err_code linear_lt_open(struct cuda *, struct err *err)
{
    return err_set(err, ERR_UNSUPPORTED, WITHOUT "; install them and build again, or do without");
}

void linear_lt_close(struct cuda *)
{
}

enum err_code linear_lt_takes(struct cuda *cu, const struct weight *, int64_t, bool *takes,
                              struct err *)
{
    *takes = false;
    cu->uses_lt = false;
    (void)snprintf(cu->be.products, sizeof cu->be.products, "own kernels: " WITHOUT);
    return ERR_OK;
}

void linear_lt_say(struct cuda *)
{
}

bool linear_lt_run(struct cuda *, const struct linear_args *, enum dtype)
{
    return false;
}

#endif
