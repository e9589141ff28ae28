/* F32 weights that may be split (struct weight_desc), multiplied by rows of requests: three BF16
 * products on tensor cores in place of one by F32 multiply-adds.
 *
 * A number is hi + lo and a rest, hi and lo BF16, rounded to nearest even: lo is within 2^-8 of the
 * number, the rest within 2^-17. Of the four products three are summed, as one of rows three times
 * as long:
 *   x' = [hi(x) | lo(x) | hi(x)]   w' = [lo(w) | hi(w) | hi(w)]   y = act(x'·w'ᵀ + bias)
 * w' is an ordinary matrix of BF16 that linear.cu packs, cuBLASLt may take, and gemm and gemv read:
 * a row has the bits that they give to it, by linear.cuh's sum over 3·n_in columns. The small
 * products come first, so that what the sum of a long chain cuts off is small too until the last
 * third.
 *
 * Left out are lo·lo, within 2^-16 of |x·w|, and the rests, 2^-17 each: a product is off by less
 * than 2^-15 (2^-15.01 where x = w = 0x1.01008p0), by 2^-18 on average; a sum of eight and more of
 * like size by less than 2^-16 of Σ|x·w|, unless made for it (uniform ones: 2^-16.5 for 8, 2^-18.5
 * for 64, the worst of 250,000 and 31,000). The products that are kept are exact. To that comes
 * what adding them loses, as with any BF16 weights: PTX promises single precision within an
 * instruction, rounded in a way it does not tell; our own kernels add chunks in F32; of cuBLASLt
 * linear_choose.cu accepts 2^-15 of Σ|x·w| beside them. That all stay within 1.6e-5 of Σ|x·w| is
 * what check-gpu's ops ask of a GPU. Infinities give NaN.
 *
 * Drawn tokens are multiplied by the F32 weights: of few rows those are 4 bytes per element and one
 * launch, these 6 and two. (1024 outputs of 1024, by count: 1 row 3.5 µs, split 6.5; 32 rows 7.3
 * and 9.9; 256 rows 19 and 20.)
 *
 * Bytes of the preparing kernel: 4 read and 6 written (for gemv 12) per value. Operations of the
 * product: 6·n_tok·n_in·n_out. Three products of n_in columns each would prepare 4 bytes per value
 * and read 4 of weights, but read and write y twice more, 16 bytes per output, in two launches
 * more. */
#include "kernels/cuda/linear.cuh"

enum { PIECE = 8, SPLIT_THREADS = 128 };

namespace
{

__device__ __forceinline__ void store_piece(uint16_t *to, const uint32_t (&pair)[PIECE / 2])
{
    *reinterpret_cast<uint4 *>(to) = make_uint4(pair[0], pair[1], pair[2], pair[3]);
}

__device__ __forceinline__ void store_piece(float *to, const uint32_t (&pair)[PIECE / 2])
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        reinterpret_cast<float4 *>(to)[i] =
            bf16_widen_four(make_uint2(pair[2 * i], pair[2 * i + 1]));
    }
}

/* to[rows of the grid, 3·n_in] ← hi, lo, hi of x[n_tok, n_in], zeros in rows from n_tok on; as BF16
 * or as F32. One thread per 8 values. */
template <typename T>
__global__ void linear_split(T *to, const float *x, int64_t x_stride, int n_tok, int n_in,
                             bool x_is_aligned)
{
    const int first = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x) * PIECE;
    grid_wait();
    if (first >= n_in) {
        return;
    }
    const int64_t r = blockIdx.y;
    const float *const in = x + r * x_stride + first;
    float v[PIECE] = {};
    if (r < n_tok && x_is_aligned) {
        const float4 lower = *reinterpret_cast<const float4 *>(in);
        const float4 upper = *reinterpret_cast<const float4 *>(in + 4);
        v[0] = lower.x, v[1] = lower.y, v[2] = lower.z, v[3] = lower.w;
        v[4] = upper.x, v[5] = upper.y, v[6] = upper.z, v[7] = upper.w;
    } else if (r < n_tok) {
#pragma unroll
        for (int i = 0; i < PIECE; i++) {
            v[i] = in[i];
        }
    }
    uint32_t hi[PIECE / 2];
    uint32_t lo[PIECE / 2];
    bf16_split_eight(hi, lo, v);
    T *const row = to + r * 3 * n_in + first;
    store_piece(row, hi);
    store_piece(row + n_in, lo);
    store_piece(row + 2 * n_in, hi);
}

} // namespace

void linear_split_rows(struct cuda *cu, void *to, const struct linear_args *args, int n_row,
                       bool few)
{
    const float *const x = static_cast<const float *>(args->x);
    const dim3 grid(
        static_cast<unsigned>((args->n_x + PIECE * SPLIT_THREADS - 1) / (PIECE * SPLIT_THREADS)),
        static_cast<unsigned>(n_row));
    if (few) {
        LAUNCH(linear_split<float>, grid, dim3(SPLIT_THREADS), 0, cuda_queue(cu),
               static_cast<float *>(to), x, args->x_stride, args->n_tok, args->n_x,
               args->x_is_aligned);
    } else {
        LAUNCH(linear_split<uint16_t>, grid, dim3(SPLIT_THREADS), 0, cuda_queue(cu),
               static_cast<uint16_t *>(to), x, args->x_stride, args->n_tok, args->n_x,
               args->x_is_aligned);
    }
    cuda_check(cu, "linear");
}

bool linear_can_split(const struct weight *w)
{
    return w->kind == WEIGHT_MATRIX && w->dtype == DTYPE_F32 && w->cols % LINEAR_BLOCK_BF16 == 0;
}

void linear_split_pack(uint16_t *dst, const struct cuda_source *source)
{
    const int64_t n_in = source->view.cols;
    for (int64_t r = 0; r < source->view.rows; r++) {
        uint16_t *const row = dst + 3 * r * n_in;
        for (int64_t k = 0; k < n_in; k++) {
            const float value = cuda_host_value(source, r, k);
            const uint16_t hi = bf16_from_f32(value);
            row[k] = bf16_from_f32(value - bf16_to_f32(hi));
            row[n_in + k] = row[2 * n_in + k] = hi;
        }
    }
}
