/* cuBLASLt as a library that is opened where it is found: half a gigabyte that a machine may do
 * without, so libpkmserve_cuda.so is not linked with it. All calls go through this table. */
#ifndef KERNELS_CUDA_LT_LIBRARY_CUH
#define KERNELS_CUDA_LT_LIBRARY_CUH

extern "C" {
#include "kernels/err.h"
}

/* A toolkit may come without its headers: linear_lt_none.cu. A test looks for one that is not
 * there. */
#ifndef LT_HEADER
#define LT_HEADER <cublasLt.h>
#endif
#if __has_include(LT_HEADER)
#define LT_IS_BUILT 1
#include <cublasLt.h>

/* The functions in use, each known by its own name. */
#define LT_FUNCTIONS(DO)                                                                           \
    DO(cublasLtCreate)                                                                             \
    DO(cublasLtDestroy)                                                                            \
    DO(cublasLtGetStatusString)                                                                    \
    DO(cublasLtGetVersion)                                                                         \
    DO(cublasLtMatmul)                                                                             \
    DO(cublasLtMatmulAlgoConfigGetAttribute)                                                       \
    DO(cublasLtMatmulAlgoGetHeuristic)                                                             \
    DO(cublasLtMatmulDescCreate)                                                                   \
    DO(cublasLtMatmulDescDestroy)                                                                  \
    DO(cublasLtMatmulDescSetAttribute)                                                             \
    DO(cublasLtMatmulPreferenceCreate)                                                             \
    DO(cublasLtMatmulPreferenceDestroy)                                                            \
    DO(cublasLtMatmulPreferenceSetAttribute)                                                       \
    DO(cublasLtMatrixLayoutCreate)                                                                 \
    DO(cublasLtMatrixLayoutDestroy)

#define LT_MEMBER(name) decltype(&::name) name;
struct lt_library {
    LT_FUNCTIONS(LT_MEMBER)
};
#undef LT_MEMBER

/* Opens the major version that this was compiled for: beside libpkmserve_cuda.so, in the CUDA
 * toolkit that it was built with, or where the loader looks. It stays open, as CUDA's libraries do
 * not survive being closed. ERR_UNSUPPORTED: it is not there; the message says what to do. */
enum err_code lt_library_open(struct lt_library *lt, struct err *err);

#else
#define LT_IS_BUILT 0
#endif

#endif
