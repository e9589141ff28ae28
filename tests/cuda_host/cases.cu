/* cases NAME: runs one case and prints "right" or "wrong" (exit 1). test_double.py calls it, built
 * plainly and with sanitizers. This file: what must work in every build and order. */
#include "tests/cuda_host/cases.h"

#include <cublasLt.h>

namespace
{

/* ---- blocks --------------------------------------------------------------------------------- */

enum { N_SUM = 1000, N_BLOCK = 5, THREADS = 96 };

/* y[block] = the sum of a row of x, by warps, then of the warps' sums. */
__global__ void __launch_bounds__(THREADS) sum_rows(int *y, const int *x)
{
    __shared__ int part[THREADS / 32];
    DYN_SHARED(int, whole);
    int sum = 0;
    for (int i = threadIdx.x; i < N_SUM; i += blockDim.x) {
        sum += x[blockIdx.x * N_SUM + i];
    }
    whole[threadIdx.x] = sum;
    __syncthreads();
    sum = whole[THREADS - 1 - threadIdx.x];
    for (int step = 16; step > 0; step /= 2) {
        sum += __shfl_down_sync(0xffffffffu, sum, step);
    }
    if (threadIdx.x % 32 == 0) {
        part[threadIdx.x / 32] = sum;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        y[blockIdx.x] = part[0] + part[1] + part[2];
    }
}

bool sums(void)
{
    int x[N_BLOCK * N_SUM], expected[N_BLOCK] = {0, 0, 0, 0, 0};
    for (int i = 0; i < N_BLOCK * N_SUM; ++i) {
        x[i] = i * 7 % 11;
        expected[i / N_SUM] += x[i];
    }
    int *const device_x = device_array(N_BLOCK * N_SUM, x), *const y = device_array<int>(N_BLOCK);
    LAUNCH(sum_rows, N_BLOCK, THREADS, THREADS * sizeof(int), nullptr, y, device_x);
    return device_equals(y, expected, N_BLOCK) && cudaFree(y) == cudaSuccess &&
           cudaFree(device_x) == cudaSuccess;
}

/* Three dimensions: each thread writes its own number. */
__global__ void number(int *y)
{
    const int block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    const int thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
    const int at = block * static_cast<int>(blockDim.x * blockDim.y * blockDim.z) + thread;
    y[at] = at;
}

bool dimensions(void)
{
    enum { N = 2 * 3 * 4 * 5 * 3 * 2 };
    int expected[N];
    for (int i = 0; i < N; ++i) {
        expected[i] = i;
    }
    int *const y = device_array<int>(N);
    LAUNCH(number, dim3(2, 3, 4), dim3(5, 3, 2), 0, nullptr, y);
    return device_equals(y, expected, N) && cudaFree(y) == cudaSuccess;
}

/* ---- warps ---------------------------------------------------------------------------------- */

enum { N_WARP_RESULT = 16 };

/* 40 threads: the second warp has eight lanes. */
__global__ void warp_functions(int *y)
{
    const int lane = threadIdx.x % 32, n = threadIdx.x < 32 ? 32 : 8;
    const unsigned int all = n == 32 ? 0xffffffffu : 0xffu;
    int *const out = y + threadIdx.x * N_WARP_RESULT;
    out[0] = __shfl_sync(0xffffffffu, lane * 3, n - 1 - lane);
    out[1] = __shfl_up_sync(0xffffffffu, lane, 2);
    out[2] = __shfl_down_sync(all, lane, 3, 8);
    out[3] = __shfl_xor_sync(0xffffffffu, lane, 5);
    out[4] = static_cast<int>(__ballot_sync(0xffffffffu, lane % 3 == 0) & all);
    out[5] = __any_sync(0xffffffffu, lane == 7);
    out[6] = __all_sync(0xffffffffu, lane < 8);
    out[7] = __reduce_add_sync(0xffffffffu, lane - 5);
    out[8] = __reduce_min_sync(0xffffffffu, lane - 5);
    out[9] = static_cast<int>(__reduce_max_sync(0xffffffffu, static_cast<unsigned int>(lane - 5)));
    out[10] = static_cast<int>(__reduce_and_sync(0xffffffffu, 0x100u | lane));
    out[11] = static_cast<int>(__reduce_or_sync(0xffffffffu, 1u << (lane & 3)));
    /* Odd and even lanes apart; the odd ones once more. */
    const unsigned int mine = all & (lane % 2 == 0 ? 0x55555555u : 0xaaaaaaaau);
    int sum = __reduce_add_sync(mine, lane);
    if (lane % 2 == 1) {
        sum += __reduce_add_sync(mine, 1);
    }
    out[12] = sum;
    const double wide = __shfl_sync(0xffffffffu, lane + 0.5, 3);
    out[13] = static_cast<int>(wide * 2);
    out[14] = __syncthreads_count(lane < 4);
    out[15] = __syncthreads_or(threadIdx.x == 33) * 2 + __syncthreads_and(lane < 32);
}

bool warps(void)
{
    int expected[40 * N_WARP_RESULT];
    for (int thread = 0; thread < 40; ++thread) {
        const int lane = thread % 32, n = thread < 32 ? 32 : 8;
        int odd = 0, even = 0, ballot = 0, sum = 0;
        for (int i = 0; i < n; ++i) {
            (i % 2 == 1 ? odd : even) += i;
            ballot |= static_cast<int>(static_cast<unsigned int>(i % 3 == 0) << i);
            sum += i - 5;
        }
        const int row[N_WARP_RESULT] = {
            3 * (n - 1 - lane),
            lane < 2 ? lane : lane - 2,
            lane % 8 + 3 > 7 ? lane : lane + 3,
            lane ^ 5,
            ballot,
            1,
            n == 8,
            sum,
            -5,
            -1,
            0x100,
            0xf,
            lane % 2 == 1 ? odd + n / 2 : even,
            7,
            8,
            3,
        };
        memcpy(expected + thread * N_WARP_RESULT, row, sizeof row);
    }
    int *const y = device_array<int>(40 * N_WARP_RESULT);
    LAUNCH(warp_functions, 1, 40, 0, nullptr, y);
    return device_equals(y, expected, 40 * N_WARP_RESULT) && cudaFree(y) == cudaSuccess;
}

__global__ void atomics(unsigned int *y, int *largest, float *sum)
{
    atomicAdd(&y[0], 1u);
    atomicMax(largest, static_cast<int>(threadIdx.x * 7 % 100));
    atomicAdd(sum, 0.5f);
    atomicInc(&y[1], 9u);
    atomicExch(&y[2], 4u);
    if (atomicCAS(&y[3], 0u, 1u) == 0u) {
        atomicAdd(&y[4], 1u);
    }
}

bool counts(void)
{
    const unsigned int zero[5] = {0, 0, 0, 0, 0}, expected[5] = {200, 0, 4, 1, 1};
    const int none = -1, largest = 99;
    const float nothing = 0, hundred = 100;
    unsigned int *const y = device_array(5, zero);
    int *const max = device_array(1, &none);
    float *const sum = device_array(1, &nothing);
    LAUNCH(atomics, 2, 100, 0, nullptr, y, max, sum);
    const bool is_right = device_equals(y, expected, 5) && device_equals(max, &largest, 1) &&
                          device_equals(sum, &hundred, 1);
    cudaFree(y);
    cudaFree(max);
    cudaFree(sum);
    return is_right;
}

/* ---- 16-bit numbers ------------------------------------------------------------------------- */

__global__ void round_pairs(uint32_t *pair, float *wide, const float *x)
{
    pair[threadIdx.x] = f16_pair(x[threadIdx.x], -x[threadIdx.x]);
    wide[threadIdx.x] = f16_widen(static_cast<uint16_t>(pair[threadIdx.x]));
}

/* To nearest, halves to even; subnormal ones; the largest instead of infinity; any NaN is
 * 0x7fff. */
bool f16_numbers(void)
{
    enum { N = 10 };
    const float x[N] = {1,     1 + 0x1p-11f, 1 + 0x3p-11f, 0x1p-24f, 0x1p-26f,
                        65504, 65519,        65520,        INFINITY, NAN};
    const uint32_t low[N] = {0x3c00, 0x3c00, 0x3c02, 0x0001, 0x0000,
                             0x7bff, 0x7bff, 0x7bff, 0x7bff, 0x7fff};
    uint32_t expected[N];
    float wide[N];
    for (int i = 0; i < N; ++i) {
        expected[i] = low[i] | (i == N - 1 ? low[i] : low[i] | 0x8000) << 16;
        wide[i] = f16_to_f32(static_cast<uint16_t>(low[i]));
    }
    float *const device_x = device_array(N, x), *const device_wide = device_array<float>(N);
    uint32_t *const pair = device_array<uint32_t>(N);
    LAUNCH(round_pairs, 1, N, 0, nullptr, pair, device_wide, device_x);
    const bool is_right = device_equals(pair, expected, N) &&
                          device_equals(device_wide, wide, N - 1); /* NaN equals nothing */
    cudaFree(device_x);
    cudaFree(device_wide);
    cudaFree(pair);
    return is_right;
}

/* ---- the matrix instructions, asynchronous copies ------------------------------------------- */

/* d[16, 8] = c + a · b by the layout that portable.cuh states, elements picked one by one. */
template <bool is_f16>
__global__ void multiply(float *d, const uint16_t *a, const uint16_t *b, const float *c)
{
    const int g = threadIdx.x / 4, t = threadIdx.x % 4;
    uint32_t a_part[4], b_part[2];
    float d_part[4];
    for (int i = 0; i < 4; ++i) {
        const int row = g + 8 * (i % 2), k = 2 * t + 8 * (i / 2);
        a_part[i] = a[row * 16 + k] | static_cast<uint32_t>(a[row * 16 + k + 1]) << 16;
        d_part[i] = c[(g + 8 * (i / 2)) * 8 + 2 * t + i % 2];
    }
    for (int i = 0; i < 2; ++i) {
        const int k = 2 * t + 8 * i;
        b_part[i] = b[k * 8 + g] | static_cast<uint32_t>(b[(k + 1) * 8 + g]) << 16;
    }
    if (is_f16) {
        mma_f16(d_part, a_part, b_part);
    } else {
        mma_bf16(d_part, a_part, b_part);
    }
    for (int i = 0; i < 4; ++i) {
        d[(g + 8 * (i / 2)) * 8 + 2 * t + i % 2] = d_part[i];
    }
}

template <bool is_f16> bool matrices(void)
{
    const auto narrow = [](float value) {
        return is_f16 ? f16_saturated(value) : bf16_round(value);
    };
    const auto wide = [](uint16_t bits) { return is_f16 ? f16_widen(bits) : bf16_widen(bits); };
    uint16_t a[256], b[128];
    float c[128], expected[128];
    for (int i = 0; i < 256; ++i) {
        a[i] = narrow(static_cast<float>(i * 37 % 101) / 64 - 1);
        b[i % 128] = narrow(static_cast<float>(i * 53 % 97) / 32 - 1);
        c[i % 128] = static_cast<float>(i % 128) / 3;
    }
    for (int i = 0; i < 128; ++i) {
        expected[i] = c[i];
        for (int k = 0; k < 16; ++k) {
            expected[i] += wide(a[i / 8 * 16 + k]) * wide(b[k * 8 + i % 8]);
        }
    }
    uint16_t *const device_a = device_array(256, a), *const device_b = device_array(128, b);
    float *const device_c = device_array(128, c), *const d = device_array<float>(128);
    LAUNCH(multiply<is_f16>, 1, 32, 0, nullptr, d, device_a, device_b, device_c);
    const bool is_right = device_equals(d, expected, 128);
    cudaFree(device_a);
    cudaFree(device_b);
    cudaFree(device_c);
    cudaFree(d);
    return is_right;
}

/* Two stages under way, the second in halves; the last copy has three bytes and zeros. */
__global__ void staged(int *y, const int *x)
{
    __shared__ __align__(16) int stage[3][4 * 32];
    for (int i = 0; i < 3; ++i) {
        int *const to = &stage[i][4 * threadIdx.x];
        const int *const from = x + (i * 32 + threadIdx.x) * 4;
        if (i == 1) {
            copy_async_8(to, from);
            copy_async_8(to + 2, from + 2, 5);
        } else {
            copy_async_16(to, from, i == 0 ? 16 : 3);
        }
        copy_async_commit();
    }
    copy_async_wait<1>();
    __syncthreads();
    const int other = 127 - threadIdx.x;
    y[threadIdx.x] = stage[0][other] + stage[1][other];
    copy_async_wait<0>();
    __syncthreads();
    y[threadIdx.x] += stage[2][other];
}

bool copies(void)
{
    int x[3 * 128], expected[32];
    for (int i = 0; i < 3 * 128; ++i) {
        x[i] = i * i;
    }
    for (int i = 0; i < 32; ++i) {
        const int at = 127 - i;
        const int half = at % 4 < 3 ? x[128 + at] : x[128 + at] & 0xff;
        expected[i] = x[at] + half + (at % 4 == 0 ? x[256 + at] & 0xffffff : 0);
    }
    int *const device_x = device_array(3 * 128, x), *const y = device_array<int>(32);
    LAUNCH(staged, 1, 32, 0, nullptr, y, device_x);
    return device_equals(y, expected, 32) && cudaFree(y) == cudaSuccess &&
           cudaFree(device_x) == cudaSuccess;
}

/* ---- blocks that leave the rest to the last ------------------------------------------------- */

template <int n> __global__ void last_block_sums(int *y, int *part, unsigned int *arrived)
{
    __shared__ bool is_last;
    if (threadIdx.x == n) {
        part[blockIdx.x] = static_cast<int>(blockIdx.x) + 1;
        __threadfence();
        is_last = atomicAdd(arrived, 1u) == gridDim.x - 1;
        __threadfence();
    }
    __syncthreads();
    if (is_last && threadIdx.x == 0) {
        int sum = 0;
        for (unsigned int i = 0; i < gridDim.x; ++i) {
            sum += part[i];
        }
        *y = sum;
        atomicExch(arrived, 0u);
    }
}

bool last_block(void)
{
    const unsigned int zero = 0;
    const int expected = 20 * 21 / 2;
    int *const y = device_array<int>(1), *const part = device_array<int>(20);
    unsigned int *const arrived = device_array(1, &zero);
    LAUNCH(last_block_sums<0>, 20, 32, 0, nullptr, y, part, arrived);
    LAUNCH(last_block_sums<0>, 20, 32, 0, nullptr, y, part, arrived);
    const bool is_right = device_equals(y, &expected, 1) && device_equals(arrived, &zero, 1);
    cudaFree(y);
    cudaFree(part);
    cudaFree(arrived);
    return is_right;
}

/* ---- streams and graphs --------------------------------------------------------------------- */

__global__ void add(int *y, int n)
{
    *y += n;
}

/* What was captured is what is replayed, whatever became of the variables it was captured from. */
bool graphs(void)
{
    const int zero = 0, expected = 2 * (3 + 4) + 100;
    int *y = device_array(1, &zero);
    int *const captured_y = y;
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    REQUIRE(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
    REQUIRE(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
    int n = 3;
    LAUNCH(add, 1, 1, 0, stream, y, n);
    n = 4;
    LAUNCH(add, 1, 1, 0, stream, y, n);
    n = 1000;
    y = nullptr;
    REQUIRE(cudaStreamEndCapture(stream, &graph) == cudaSuccess);
    REQUIRE(cudaGraphInstantiate(&exec, graph) == cudaSuccess);
    REQUIRE(cudaGraphDestroy(graph) == cudaSuccess);
    bool is_right = device_equals(captured_y, &zero, 1); /* capturing runs nothing */
    REQUIRE(cudaGraphLaunch(exec, stream) == cudaSuccess);
    LAUNCH(add, 1, 1, 0, stream, captured_y, 100);
    REQUIRE(cudaGraphLaunch(exec, stream) == cudaSuccess);
    REQUIRE(cudaGraphExecDestroy(exec) == cudaSuccess);
    is_right = device_equals(captured_y, &expected, 1) && is_right;
    REQUIRE(cudaStreamDestroy(stream) == cudaSuccess && cudaFree(captured_y) == cudaSuccess);
    return is_right;
}

/* An allocation is refused during a capture, and spoils it. */
bool capture_rules(void)
{
    int *const y = device_array<int>(1);
    void *more;
    cudaStream_t stream;
    cudaGraph_t graph;
    REQUIRE(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
    REQUIRE(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
    LAUNCH(add, 1, 1, 0, stream, y, 1);
    const bool is_refused = cudaMalloc(&more, 16) == cudaErrorStreamCaptureUnsupported;
    const bool is_spoilt =
        cudaStreamEndCapture(stream, &graph) == cudaErrorStreamCaptureInvalidated;
    cudaGetLastError();
    REQUIRE(cudaStreamDestroy(stream) == cudaSuccess && cudaFree(y) == cudaSuccess);
    return is_refused && is_spoilt;
}

/* One stream waits for an event of another. */
bool events(void)
{
    const int zero = 0, expected = 11;
    int *const y = device_array(1, &zero);
    int *copy;
    cudaStream_t first, second;
    cudaEvent_t event;
    REQUIRE(cudaHostAlloc(&copy, sizeof *copy, cudaHostAllocDefault) == cudaSuccess);
    REQUIRE(cudaStreamCreateWithFlags(&first, cudaStreamNonBlocking) == cudaSuccess);
    REQUIRE(cudaStreamCreateWithFlags(&second, cudaStreamNonBlocking) == cudaSuccess);
    REQUIRE(cudaEventCreateWithFlags(&event, cudaEventDisableTiming) == cudaSuccess);
    LAUNCH(add, 1, 1, 0, first, y, expected);
    REQUIRE(cudaEventRecord(event, first) == cudaSuccess);
    LAUNCH(add, 1, 1, 0, first, y, 1000);
    REQUIRE(cudaStreamWaitEvent(second, event) == cudaSuccess);
    REQUIRE(cudaMemcpyAsync(copy, y, sizeof *y, cudaMemcpyDeviceToHost, second) == cudaSuccess);
    REQUIRE(cudaStreamSynchronize(second) == cudaSuccess);
    const bool is_right = *copy == expected;
    cudaStreamDestroy(first);
    cudaStreamDestroy(second);
    cudaEventDestroy(event);
    cudaFreeHost(copy);
    cudaFree(y);
    return is_right;
}

/* ---- matrix products ------------------------------------------------------------------------ */

template <typename T> T number_of(int i, cudaDataType type)
{
    const float value = static_cast<float>(i);
    if constexpr (sizeof(T) == sizeof(float)) {
        return value;
    } else {
        return type == CUDA_R_16F ? f16_saturated(value) : bf16_round(value);
    }
}

/* y[n, m] = relu(x[n, k] · w[m, k]ᵀ + bias), as kernels/cuda calls it. T: uint16_t for BF16 and
 * F16. The algorithm then counts on more than the address of x allows. */
template <typename T> bool product(cudaDataType type)
{
    enum { M = 5, N = 3, K = 7 };
    T w[M * K], x[N * K];
    float bias[M], expected[N * M];
    for (int i = 0; i < M * K; ++i) {
        w[i] = number_of<T>(i % 5 - 2, type);
        x[i % (N * K)] = number_of<T>(i % (N * K) % 7 - 3, type);
        bias[i % M] = static_cast<float>(i % M - 2);
    }
    for (int i = 0; i < N * M; ++i) {
        float sum = bias[i % M];
        for (int k = 0; k < K; ++k) {
            sum += static_cast<float>((i % M * K + k) % 5 - 2) *
                   static_cast<float>((i / M * K + k) % 7 - 3);
        }
        expected[i] = sum < 0 ? 0 : sum;
    }
    T *const device_w = device_array(M * K, w), *const device_x = device_array(N * K, x);
    float *const device_bias = device_array(M, bias), *const y = device_array<float>(N * M);
    cublasLtHandle_t lt;
    cublasLtMatmulDesc_t desc;
    cublasLtMatrixLayout_t w_layout, x_layout, y_layout;
    const cublasOperation_t turned = CUBLAS_OP_T;
    const cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_RELU_BIAS;
    const float one = 1, zero = 0;
    REQUIRE(cublasLtCreate(&lt) == CUBLAS_STATUS_SUCCESS);
    REQUIRE(cublasLtMatmulDescCreate(&desc, CUBLAS_COMPUTE_32F, CUDA_R_32F) ==
            CUBLAS_STATUS_SUCCESS);
    cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_TRANSA, &turned, sizeof turned);
    cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof epilogue);
    cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &device_bias,
                                   sizeof device_bias);
    cublasLtMatrixLayoutCreate(&w_layout, type, K, M, K);
    cublasLtMatrixLayoutCreate(&x_layout, type, K, N, K);
    cublasLtMatrixLayoutCreate(&y_layout, CUDA_R_32F, M, N, M);
    REQUIRE(cublasLtMatmul(lt, desc, &one, device_w, w_layout, device_x, x_layout, &zero, y,
                           y_layout, y, y_layout, nullptr, nullptr, 0,
                           nullptr) == CUBLAS_STATUS_SUCCESS);
    const bool is_right = device_equals(y, expected, N * M);
    const cublasLtMatmulAlgo_t strict = {{1, 256, 1, 1}};
    REQUIRE(cublasLtMatmul(lt, desc, &one, device_w, w_layout, device_x + 2, x_layout, &zero, y,
                           y_layout, y, y_layout, &strict, nullptr, 0,
                           nullptr) == CUBLAS_STATUS_INVALID_VALUE);
    cublasLtMatrixLayoutDestroy(w_layout);
    cublasLtMatrixLayoutDestroy(x_layout);
    cublasLtMatrixLayoutDestroy(y_layout);
    cublasLtMatmulDescDestroy(desc);
    cublasLtDestroy(lt);
    cudaFree(device_w);
    cudaFree(device_x);
    cudaFree(device_bias);
    cudaFree(y);
    return is_right;
}

/* ---- overlap -------------------------------------------------------------------------------- */

enum { N_LINK = 5, LINK_BLOCKS = 3, LINK_THREADS = 96, N_CHAIN = LINK_BLOCKS * LINK_THREADS };

/* y = x + 1; none behind it begins before it is complete. */
__global__ void add_alone(int *y, const int *x)
{
    const int i = static_cast<int>(threadIdx.x);
    grid_wait_alone();
    y[i] = x[i] + 1;
}

/* z = x + y; y was there before any but the first of these kernels began. */
__global__ void add_early(int *z, const int *x, const int *y)
{
    const int i = static_cast<int>(threadIdx.x);
    const int early = y[i];
    grid_wait();
    z[i] = x[i] + early;
}

/* What a kernel alone writes is read early by all behind it, after a copy and another kernel. */
bool overlaps_alone(void)
{
    int start[LINK_THREADS], expected[LINK_THREADS];
    for (int i = 0; i < LINK_THREADS; ++i) {
        start[i] = i;
        expected[i] = 9 * i + 8;
    }
    int *const x = device_array(LINK_THREADS, start);
    int *const y = device_array<int>(LINK_THREADS), *const z = device_array<int>(LINK_THREADS);
    cudaStream_t stream;
    REQUIRE(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
    const struct launch_queue queue = {stream, true};
    REQUIRE(cudaMemcpyAsync(z, x, sizeof start, cudaMemcpyDeviceToDevice, stream) == cudaSuccess);
    for (int i = 0; i < 2; ++i) {
        LAUNCH(add_alone, 1, LINK_THREADS, 0, queue, y, z);
        LAUNCH(add_early, 1, LINK_THREADS, 0, queue, x, z, y);
        LAUNCH(add_early, 1, LINK_THREADS, 0, queue, z, x, y);
    }
    const bool is_right = device_equals(z, expected, LINK_THREADS);
    cudaStreamDestroy(stream);
    cudaFree(x);
    cudaFree(y);
    cudaFree(z);
    return is_right;
}

/* y = x + w, and w's neighbour in the block; w is constant and comes early, by both kinds of shared
 * memory, across barriers. */
__global__ void link(int *y, const int *x, const int *w)
{
    DYN_SHARED(int, copy);
    __shared__ int turned[LINK_THREADS];
    const int first = static_cast<int>(blockIdx.x) * LINK_THREADS;
    const int i = static_cast<int>(threadIdx.x);
    if (i % 4 == 0) {
        copy_async_16(copy + i, w + first + i);
    }
    turned[LINK_THREADS - 1 - i] = w[first + i];
    __syncthreads();
    const int other = turned[i];
    grid_wait();
    copy_async_commit();
    copy_async_wait<0>();
    __syncthreads();
    y[first + i] = x[first + i] + copy[i] + (turned[i] == other ? other : 1000000);
}

/* Of a stream: rooms for what goes in and what each kernel makes of it. */
struct chain {
    cudaStream_t stream;
    cudaEvent_t end;
    int *y; /* [N_LINK + 1][N_CHAIN] */
};

void chain_launch(const struct chain *c, const int *w)
{
    for (int i = 0; i < N_LINK; ++i) {
        int *const x = c->y + i * N_CHAIN;
        LAUNCH(link, LINK_BLOCKS, LINK_THREADS, LINK_THREADS * sizeof(int),
               (launch_queue{c->stream, true}), x + N_CHAIN, x, w);
    }
}

/* Kernels that overlap, after a copy, in two streams by turns: in one as they come, in the other as
 * a graph. */
bool overlaps(void)
{
    int w[N_CHAIN], start[N_CHAIN], expected[N_CHAIN];
    for (int i = 0; i < N_CHAIN; ++i) {
        w[i] = i * 5 % 17;
        start[i] = i;
    }
    for (int i = 0; i < N_CHAIN; ++i) {
        const int first = i / LINK_THREADS * LINK_THREADS;
        expected[i] = i + N_LINK * (w[i] + w[first + LINK_THREADS - 1 - i % LINK_THREADS]);
    }
    int *const device_w = device_array(N_CHAIN, w), *const x = device_array(N_CHAIN, start);
    struct chain chain[2];
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    for (struct chain &it : chain) {
        REQUIRE(cudaStreamCreateWithFlags(&it.stream, cudaStreamNonBlocking) == cudaSuccess);
        REQUIRE(cudaEventCreateWithFlags(&it.end, cudaEventDisableTiming) == cudaSuccess);
        it.y = device_array<int>((N_LINK + 1) * N_CHAIN);
        REQUIRE(cudaMemcpyAsync(it.y, x, sizeof start, cudaMemcpyDeviceToDevice, it.stream) ==
                cudaSuccess);
    }
    chain_launch(&chain[0], device_w);
    REQUIRE(cudaStreamBeginCapture(chain[1].stream, cudaStreamCaptureModeThreadLocal) ==
            cudaSuccess);
    chain_launch(&chain[1], device_w);
    REQUIRE(cudaStreamEndCapture(chain[1].stream, &graph) == cudaSuccess);
    REQUIRE(cudaGraphInstantiate(&exec, graph) == cudaSuccess);
    REQUIRE(cudaGraphLaunch(exec, chain[1].stream) == cudaSuccess);
    for (struct chain &it : chain) {
        REQUIRE(cudaEventRecord(it.end, it.stream) == cudaSuccess);
    }
    for (int i = 0; i < 4 * N_LINK; ++i) { /* each runs one thing */
        (void)cudaEventQuery(chain[i % 2].end);
    }
    bool is_right = true;
    for (struct chain &it : chain) {
        is_right = device_equals(it.y + N_LINK * N_CHAIN, expected, N_CHAIN) && is_right;
        cudaFree(it.y);
        cudaEventDestroy(it.end);
        cudaStreamDestroy(it.stream);
    }
    cudaFree(x);
    cudaFree(device_w);
    cudaGraphDestroy(graph);
    cudaGraphExecDestroy(exec);
    return is_right;
}

bool products(void)
{
    return product<uint16_t>(CUDA_R_16BF) && product<uint16_t>(CUDA_R_16F) &&
           product<float>(CUDA_R_32F);
}

} // namespace

const struct test_case good_cases[] = {
    {"sums", sums},
    {"dimensions", dimensions},
    {"warps", warps},
    {"counts", counts},
    {"f16_numbers", f16_numbers},
    {"matrices", matrices<false>},
    {"f16_matrices", matrices<true>},
    {"copies", copies},
    {"last_block", last_block},
    {"graphs", graphs},
    {"capture_rules", capture_rules},
    {"events", events},
    {"overlaps", overlaps},
    {"overlaps_alone", overlaps_alone},
    {"products", products},
    {nullptr, nullptr},
};

static bool is_it(const struct test_case *it, const char *name)
{
    return strcmp(it->name, name) == 0;
}

int main(int argc, char **argv)
{
    int n_device, n_run = 0;
    REQUIRE(argc == 2);
    if (strncmp(argv[1], "environment_", 12) != 0) {
        REQUIRE(cudaGetDeviceCount(&n_device) == cudaSuccess && n_device == 1);
    }
    for (const struct test_case *it = good_cases; it->name != nullptr; ++it) {
        if (strcmp(argv[1], "good") == 0 || is_it(it, argv[1])) {
            const bool is_right = it->run();
            printf("%s: %s\n", it->name, is_right ? "right" : "wrong");
            if (!is_right) {
                return 1;
            }
            n_run++;
        }
    }
    for (const struct test_case *it = bug_cases; it->name != nullptr; ++it) {
        if (is_it(it, argv[1])) {
            const bool is_right = it->run();
            printf("%s: %s\n", it->name, is_right ? "right" : "wrong");
            return is_right ? 0 : 1;
        }
    }
    REQUIRE(n_run > 0);
    return 0;
}
