/* What the files about cuBLASLt share: linear_lt.cu multiplies with it, linear_choose.cu chooses
 * its algorithms. */
#ifndef KERNELS_CUDA_LINEAR_LT_CUH
#define KERNELS_CUDA_LINEAR_LT_CUH

#include "kernels/cuda/linear.cuh"
#include "kernels/cuda/lt_library.cuh"

#if LT_IS_BUILT

enum {
    LT_PLANS = 128,
    LT_SHAPES = 64, /* of weights; a model has less than ten */
    LT_SIZES = 5,   /* of calls that have an algorithm each, by their rows */
    LT_WORKSPACE_BYTES = 32 << 20
};

/* A product as cuBLASLt is told of it, by all that tells products apart. */
struct lt_key {
    enum dtype dtype; /* of weights and rows */
    int n_tok, n_out, k;
    int x_alignment, y_alignment, bias_alignment; /* bytes */
    int64_t x_stride, y_stride;
    cublasLtEpilogue_t epilogue;
};

struct lt_plan {
    bool is_set, is_possible;
    struct lt_key key;
    cublasLtMatmulDesc_t product;
    cublasLtMatrixLayout_t w, x, y;
    cublasLtMatmulAlgo_t algo;
};

/* Who multiplies rows of requests by weights of a type and shape. */
struct lt_shape {
    enum dtype dtype;
    int n_out, k;  /* k up to the end of its block */
    bool is_taken; /* by cuBLASLt */
    bool is_untried;
    cublasLtMatmulAlgo_t algo; /* that defines the bits of all */
    /* For calls of up to so many rows, and of more than the size before: as fast as there is with
     * these bits. */
    struct {
        int n_max;
        cublasLtMatmulAlgo_t algo;
    } size[LT_SIZES];
};

struct linear_lt {
    bool is_fast; /* fast math: an algorithm for each number of rows, which may split sums */
    struct lt_library library;
    cublasLtHandle_t handle;
    void *workspace; /* Owner: device memory; NULL unless is_fast */
    size_t workspace_bytes;
    struct lt_plan plan[LT_PLANS];
    struct lt_shape shape[LT_SHAPES];
    int n_shape;
};

/* Describes args' product; false if cuBLASLt refuses. lt_plan_clear follows in any case. */
bool lt_plan_describe(const struct linear_lt *lt, struct lt_plan *plan,
                      const struct linear_args *args, enum dtype dtype);
void lt_plan_clear(const struct linear_lt *lt, struct lt_plan *plan);
/* Up to n algorithms for a described product, the best first; returns how many. */
int lt_recommend(const struct linear_lt *lt, const struct lt_plan *plan, int n,
                 cublasLtMatmulHeuristicResult_t *found);
/* Starts a described product by plan->algo. */
cublasStatus_t lt_multiply(const struct cuda *cu, const struct lt_plan *plan,
                           const struct linear_args *args);
/* Of a call of n_tok rows. */
const cublasLtMatmulAlgo_t *lt_shape_algo(const struct lt_shape *shape, int n_tok);
/* NULL: nobody has chosen yet. */
const struct lt_shape *lt_shape_find(const struct linear_lt *lt, int n_out, int k,
                                     enum dtype dtype);

#endif

#endif
