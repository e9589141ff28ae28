/* Rows of logits on the GPU: what the steps of outputs.cu's kernel share.
 *
 * A row is spread over many warps: each reads groups of 256 consecutive ids and leaves a group's
 * largest logit and sums in scratch. The last block of a row to arrive merges the groups in a fixed
 * order, and from then on reads only groups that can matter: whatever it looks for lies above some
 * bound, and a group whose largest logit is below the bound is skipped. So each logit is read once
 * from memory, and few of them again from the L2.
 *
 * An element (a token with its logit) is one 64-bit number that is larger the earlier the token
 * comes: the logit's bits, made to order like an integer, above n_vocab - 1 - id. Elements are
 * distinct, so "the k best" is "all from some element up", and ties need no care of their own. */
#ifndef KERNELS_CUDA_VOCAB_CUH
#define KERNELS_CUDA_VOCAB_CUH

#include "kernels/cuda/cuda.cuh"

enum {
    VOCAB_WARP = 32,
    VOCAB_LANE = 8, /* logits of a group that one lane holds */
    VOCAB_GROUP = VOCAB_WARP * VOCAB_LANE,
    VOCAB_BLOCK = 512, /* threads */
    VOCAB_WARPS = VOCAB_BLOCK / VOCAB_WARP,
    VOCAB_LIST = 2048, /* elements that fit in shared memory, and parts that vocab_find cuts in */
    VOCAB_SUMS = 2,    /* sums that are made at a time */
};

typedef unsigned long long vocab_element;

constexpr vocab_element VOCAB_FIRST = ~0ull; /* before every element */
constexpr vocab_element VOCAB_LAST = 0;      /* after every element */
constexpr unsigned VOCAB_ALL_LANES = ~0u;

/* A function that is compiled once: what the last block does is called from several places, and
 * inlined everywhere it would make minutes of compiling. */
#define VOCAB_CALLED __attribute__((noinline))

static inline int vocab_groups(int64_t n_vocab)
{
    return static_cast<int>((n_vocab + VOCAB_GROUP - 1) / VOCAB_GROUP);
}

/* A row whose groups have all been read. */
struct vocab_row {
    const float *z;         /* [n] */
    const float *group_max; /* [n_group] */
    int n, n_group;
};

/* Shared memory of the last block. */
struct vocab_shared {
    vocab_element list[VOCAB_LIST];
    unsigned long long
        part[VOCAB_LIST]; /* vocab_find's sums, and whether they are of its whole range */
    bool has_parts;
    unsigned long long sum[VOCAB_SUMS][VOCAB_WARPS];
    double real[VOCAB_WARPS];
    uint32_t word[VOCAB_WARPS];
    uint32_t n_list;
    vocab_element border;
    unsigned long long border_sum;
};

namespace
{

/* The block's own. A static one in a function, so that functions that are not inlined, too, know
 * that it is shared memory. */
__device__ __forceinline__ struct vocab_shared *vocab_shared_here()
{
    __shared__ struct vocab_shared shared;
    return &shared;
}

/* ---- elements ------------------------------------------------------------------------------- */

/* Orders as the floats do; -0 is 0. */
__device__ __forceinline__ uint32_t vocab_key(float z)
{
    const uint32_t bits = __float_as_uint(z + 0.0f);
    return bits ^ ((bits >> 31) != 0 ? 0xffffffffu : 0x80000000u);
}

__device__ __forceinline__ float vocab_logit(uint32_t key)
{
    return __uint_as_float((key >> 31) != 0 ? key ^ 0x80000000u : ~key);
}

/* The first element that a logit can have; the last one has 0 instead of the ones. */
__device__ __forceinline__ vocab_element vocab_last_of(uint32_t key)
{
    return static_cast<vocab_element>(key) << 32;
}

__device__ __forceinline__ vocab_element vocab_element_of(float z, int id, int n)
{
    return vocab_last_of(vocab_key(z)) | static_cast<uint32_t>(n - 1 - id);
}

__device__ __forceinline__ uint32_t vocab_element_key(vocab_element e)
{
    return static_cast<uint32_t>(e >> 32);
}

__device__ __forceinline__ int vocab_element_id(vocab_element e, int n)
{
    return n - 1 - static_cast<int>(e & 0xffffffffu);
}

/* ---- groups --------------------------------------------------------------------------------- */

__device__ __forceinline__ int vocab_lane()
{
    return static_cast<int>(threadIdx.x) % VOCAB_WARP;
}

/* The id of a lane's number i of a group: two runs of four, so that a warp reads whole lines. */
__device__ __forceinline__ int vocab_id(int group, int i)
{
    return group * VOCAB_GROUP + i / 4 * (VOCAB_GROUP / 2) + vocab_lane() * 4 + i % 4;
}

/* The lane's logits of a group; -infinity past the end. The same ones whether z is aligned or not,
 * so that sums do not depend on where a row starts. */
__device__ __forceinline__ void vocab_load(float (&v)[VOCAB_LANE], const float *z, int n, int group,
                                           bool is_aligned)
{
    const bool is_whole = is_aligned && (group + 1) * VOCAB_GROUP <= n;
#pragma unroll
    for (int i = 0; i < VOCAB_LANE; i += 4) {
        const int id = vocab_id(group, i);
        if (is_whole) {
            const float4 quad = *reinterpret_cast<const float4 *>(z + id);
            v[i] = quad.x;
            v[i + 1] = quad.y;
            v[i + 2] = quad.z;
            v[i + 3] = quad.w;
        } else {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                v[i + j] = id + j < n ? z[id + j] : -INFINITY;
            }
        }
    }
}

__device__ __forceinline__ bool vocab_is_aligned(const float *z)
{
    return reinterpret_cast<uintptr_t>(z) % 16 == 0;
}

/* The largest of the warp's logits; NaN is passed over. */
__device__ __forceinline__ float vocab_group_max(const float (&v)[VOCAB_LANE])
{
    float max = v[0];
#pragma unroll
    for (int i = 1; i < VOCAB_LANE; i++) {
        max = fmaxf(max, v[i]);
    }
    max = fmaxf(max, -INFINITY);
    return vocab_logit(__reduce_max_sync(VOCAB_ALL_LANES, vocab_key(max)));
}

/* Whether a logit of the warp's is NaN or +infinity. */
__device__ __forceinline__ bool vocab_is_broken(const float (&v)[VOCAB_LANE])
{
    bool is_broken = false;
#pragma unroll
    for (int i = 0; i < VOCAB_LANE; i++) {
        is_broken = is_broken || !(v[i] < INFINITY);
    }
    return __any_sync(VOCAB_ALL_LANES, is_broken);
}

/* The sum of the warp's values, the same in all lanes: pairs, then pairs of pairs. */
__device__ __forceinline__ float vocab_group_sum(const float (&v)[VOCAB_LANE])
{
    float sum = ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
#pragma unroll
    for (int lanes = VOCAB_WARP / 2; lanes > 0; lanes /= 2) {
        sum += __shfl_xor_sync(VOCAB_ALL_LANES, sum, lanes);
    }
    return sum;
}

/* ---- shares --------------------------------------------------------------------------------- */

/* exp((z - max) / temperature), max finite and >= z: the rounding of the difference and of the
 * quotient is carried along, or a flat row's shares would all be off by the same 1e-6. */
struct vocab_share {
    float max, rate, rate_low; /* 1 / temperature in two floats */
};

__device__ __forceinline__ struct vocab_share vocab_share_of(float max, float temperature)
{
    /* the inverse of a subnormal temperature is held at the largest float: logits that differ by
     * more than 1e-36 are as good as infinitely far apart then */
    const float rate = fminf(1.0f / temperature, 3.402823466e38f);
    const float rest = fmaf(-rate, temperature, 1.0f);
    return {max, rate, rest * rate};
}

__device__ __forceinline__ float vocab_share(const struct vocab_share &s, float z)
{
    const float d = z - s.max;
    const float taken = d - z;
    const float d_low = (z - (d - taken)) - (s.max + taken);
    const float x = d * s.rate;
    const float x_low = fmaf(d, s.rate, -x) + fmaf(d, s.rate_low, d_low * s.rate);
    const float share = expf(x);
    return x > -104.0f ? fmaf(share, x_low, share) : 0.0f; /* false for what -infinity makes */
}

/* That of temperature 1, to the same bits in half as many operations. */
__device__ __forceinline__ float vocab_plain_share(float max, float z)
{
    const float d = z - max;
    const float taken = d - z;
    const float d_low = (z - (d - taken)) - (max + taken);
    const float share = expf(d);
    return d > -104.0f ? fmaf(share, d_low, share) : 0.0f;
}

/* ---- the block ------------------------------------------------------------------------------ */

/* All functions from here on are called by all threads of a block of VOCAB_BLOCK together, leave
 * the same result in each, and start and end where shared memory may be rewritten. */

__device__ __forceinline__ uint32_t vocab_block_max(uint32_t v)
{
    struct vocab_shared *const s = vocab_shared_here();
    v = __reduce_max_sync(VOCAB_ALL_LANES, v);
    if (vocab_lane() == 0) {
        s->word[threadIdx.x / VOCAB_WARP] = v;
    }
    __syncthreads();
    v = __reduce_max_sync(VOCAB_ALL_LANES, s->word[vocab_lane() % VOCAB_WARPS]);
    __syncthreads();
    return v;
}

__device__ __forceinline__ uint32_t vocab_block_min(uint32_t v)
{
    return ~vocab_block_max(~v);
}

/* Each v[j] becomes its sum over the block. */
template <class T, int n> __device__ __forceinline__ void vocab_block_sums(T (&v)[n])
{
    struct vocab_shared *const s = vocab_shared_here();
#pragma unroll
    for (int j = 0; j < n; j++) {
#pragma unroll
        for (int lanes = VOCAB_WARP / 2; lanes > 0; lanes /= 2) {
            v[j] += __shfl_xor_sync(VOCAB_ALL_LANES, v[j], lanes);
        }
        if (vocab_lane() == 0) {
            s->sum[j][threadIdx.x / VOCAB_WARP] = v[j];
        }
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < n; j++) {
        v[j] = 0;
#pragma unroll 1
        for (int w = 0; w < VOCAB_WARPS; w++) {
            v[j] += static_cast<T>(s->sum[j][w]);
        }
    }
    __syncthreads();
}

__device__ __forceinline__ unsigned long long vocab_block_sum(unsigned long long v)
{
    unsigned long long sum[1] = {v};
    vocab_block_sums(sum);
    return sum[0];
}

/* Always by the same tree. */
__device__ __forceinline__ double vocab_block_sum(double v)
{
    struct vocab_shared *const s = vocab_shared_here();
#pragma unroll
    for (int lanes = VOCAB_WARP / 2; lanes > 0; lanes /= 2) {
        v += __shfl_xor_sync(VOCAB_ALL_LANES, v, lanes);
    }
    if (vocab_lane() == 0) {
        s->real[threadIdx.x / VOCAB_WARP] = v;
    }
    __syncthreads();
    v = 0;
    for (int w = 0; w < VOCAB_WARPS; w++) {
        v += s->real[w];
    }
    __syncthreads();
    return v;
}

__device__ __forceinline__ vocab_element vocab_block_max(vocab_element v)
{
    struct vocab_shared *const s = vocab_shared_here();
#pragma unroll
    for (int lanes = VOCAB_WARP / 2; lanes > 0; lanes /= 2) {
        const vocab_element other = __shfl_xor_sync(VOCAB_ALL_LANES, v, lanes);
        v = other > v ? other : v;
    }
    if (vocab_lane() == 0) {
        s->sum[0][threadIdx.x / VOCAB_WARP] = v;
    }
    __syncthreads();
#pragma unroll 1
    for (int w = 0; w < VOCAB_WARPS; w++) {
        v = s->sum[0][w] > v ? s->sum[0][w] : v;
    }
    __syncthreads();
    return v;
}

/* The sum of the v of the threads before this one. */
__device__ __forceinline__ unsigned long long vocab_block_before(unsigned long long v)
{
    struct vocab_shared *const s = vocab_shared_here();
    const int warp = static_cast<int>(threadIdx.x) / VOCAB_WARP;
    unsigned long long sum = v;
#pragma unroll
    for (int lanes = 1; lanes < VOCAB_WARP; lanes *= 2) {
        const unsigned long long other =
            __shfl_up_sync(VOCAB_ALL_LANES, sum, static_cast<unsigned>(lanes));
        sum += vocab_lane() >= lanes ? other : 0;
    }
    if (vocab_lane() == VOCAB_WARP - 1) {
        s->sum[0][warp] = sum;
    }
    __syncthreads();
#pragma unroll 1
    for (int w = 0; w < warp; w++) {
        sum += s->sum[0][w];
    }
    __syncthreads();
    return sum - v;
}

} // namespace

#endif
