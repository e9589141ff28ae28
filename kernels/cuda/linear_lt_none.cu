/* What stands in for linear_lt.cu and lt_library.cu where the CUDA toolkit has come without
 * cuBLASLt's headers: fast math is left out, and the backend's note says why. */
#include "kernels/cuda/backend.cuh"
#include "kernels/cuda/linear.cuh"
#include "kernels/cuda/lt_library.cuh"

#if !LT_IS_BUILT

enum err_code linear_lt_open(struct cuda *, struct err *err)
{
    return err_set(err, ERR_UNSUPPORTED,
                   "this library was built without cuBLASLt; install its headers (cublasLt.h) and "
                   "build again, or do without (deterministic on)");
}

void linear_lt_close(struct cuda *)
{
}

bool linear_lt_run(struct cuda *, const struct linear_args *, enum dtype)
{
    return false;
}

#endif
