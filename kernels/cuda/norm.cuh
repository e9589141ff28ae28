/* What a layer norm is made of: for norm.cu, and for products of few rows (gemv.cu), which norm
 * their rows themselves.
 *
 * A warp sums a row: lane l takes the groups l, l + 32, .. of it; the sums of its four columns are
 * chains over the groups, folded by norm_fold and then over the lanes by a butterfly: an order that
 * d alone decides. */
#ifndef KERNELS_CUDA_NORM_CUH
#define KERNELS_CUDA_NORM_CUH

#include "kernels/cuda/embed.cuh"

enum { NORM_COLS = WARP * GROUP /* columns of a warp's sweep */ };

struct norm_args {
    float *y;                  /* may be x or r */
    const float *x;            /* y, x, r [n_row, d] */
    const float *r;            /* NULL: nothing is added to x */
    const float *gamma, *beta; /* [d] */
    struct room rounded;       /* of norm.cu: for y once more, [n_row, d] */
    struct embed_from from;    /* with a view: x is not read, its rows are these */
    int64_t y_stride, x_stride, r_stride;
    int n_row, d; /* d 0: there is no norm */
    float eps;
    bool starts_early; /* the kernel before may still run, gamma and beta need not wait for it */
};

static inline struct norm_args norm_args_of(const struct cuda *cu, const struct norm_op *op)
{
    CHECK(op->y.rows <= INT32_MAX - BLOCK && op->y.cols <= INT32_MAX - NORM_COLS);
    return {
        .y = static_cast<float *>(op->y.data),
        .x = static_cast<const float *>(op->x.data),
        .r = static_cast<const float *>(op->r.data),
        .gamma = static_cast<const float *>(op->gamma.data),
        .beta = static_cast<const float *>(op->beta.data),
        .rounded = {},
        .from = embed_from_of(op->y, op->view, op->tok, op->pos, op->lang),
        .y_stride = op->y.stride,
        .x_stride = op->x.stride,
        .r_stride = op->r.stride,
        .n_row = static_cast<int>(op->y.rows),
        .d = static_cast<int>(op->y.cols),
        .eps = op->eps,
        .starts_early = cu->overlaps,
    };
}

/* Whether all that it reads and writes has groups, and nothing else: tables begin at 256-byte
 * boundaries. */
static inline bool norm_has_groups(const struct norm_op *op)
{
    return op->y.cols % GROUP == 0 && has_groups(op->y) && has_groups(op->x) &&
           (op->r.data == NULL || has_groups(op->r)) && has_groups(op->gamma) &&
           has_groups(op->beta);
}

/* A row's groups at n columns, all asked for at once. */
template <int n>
__device__ __forceinline__ void norm_groups(float4 (&to)[n], const float *row, const int (&c)[n])
{
#pragma unroll
    for (int i = 0; i < n; i++) {
        to[i] = *reinterpret_cast<const float4 *>(row + c[i]);
    }
}

/* What a row's norm is of: its groups at n columns of x or of the embedding and, if there is one,
 * of r. */
template <int n>
__device__ __forceinline__ void norm_operands(float4 (&v)[n], float4 (&r)[n],
                                              const struct norm_args &norm, int row,
                                              const int (&c)[n])
{
    if (norm.from.view != NULL) {
        embed_groups(v, norm.from, embed_row_of(norm.from, row), c);
    } else {
        norm_groups(v, norm.x + row * norm.x_stride, c);
    }
    if (norm.r != NULL) {
        norm_groups(r, norm.r + row * norm.r_stride, c);
    }
}

/* in's squared distances from mean, added to sum; columns from n on do not count. */
__device__ __forceinline__ float4 norm_squares(float4 sum, float4 in, float mean, int n)
{
    const float4 e = {in.x - mean, n > 1 ? in.y - mean : 0, n > 2 ? in.z - mean : 0,
                      n > 3 ? in.w - mean : 0};
    return {fmaf(e.x, e.x, sum.x), fmaf(e.y, e.y, sum.y), fmaf(e.z, e.z, sum.z),
            fmaf(e.w, e.w, sum.w)};
}

/* (in - mean) · inverse · gamma + beta */
__device__ __forceinline__ float4 norm_output(float4 in, float mean, float inverse, float4 gamma,
                                              float4 beta)
{
    return {fmaf((in.x - mean) * inverse, gamma.x, beta.x),
            fmaf((in.y - mean) * inverse, gamma.y, beta.y),
            fmaf((in.z - mean) * inverse, gamma.z, beta.z),
            fmaf((in.w - mean) * inverse, gamma.w, beta.w)};
}

/* Of a lane's four sums. */
__device__ __forceinline__ float norm_fold(float4 g)
{
    return (g.x + g.y) + (g.z + g.w);
}

__device__ __forceinline__ float norm_inverse(float variance, float eps)
{
    return 1 / sqrtf(variance + eps);
}

/* {mean, 1 / √(variance + eps)} of a row of d columns in shared memory, groups all, by a warp: each
 * lane gets both. */
__device__ __forceinline__ float2 norm_sum(const float *row, int d, float eps, int lane)
{
    float4 sum = {0, 0, 0, 0};
#pragma unroll 4
    for (int c = lane * GROUP; c < d; c += NORM_COLS) {
        sum = group_add(sum, *reinterpret_cast<const float4 *>(row + c));
    }
    const float mean = warp_sum(norm_fold(sum)) / static_cast<float>(d);
    float4 squares = {0, 0, 0, 0};
#pragma unroll 4
    for (int c = lane * GROUP; c < d; c += NORM_COLS) {
        squares = norm_squares(squares, *reinterpret_cast<const float4 *>(row + c), mean, GROUP);
    }
    const float variance = warp_sum(norm_fold(squares)) / static_cast<float>(d);
    return make_float2(mean, norm_inverse(variance, eps));
}

#endif
