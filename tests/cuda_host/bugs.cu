/* What is wrong, and must be found; and what the environment asks to fail. test_double.py says
 * which build and order finds what. Without a finding each prints "right" or "wrong" of its result.
 */
#include "tests/cuda_host/cases.h"

namespace
{

enum { N = 128 };

int values_counting[N];

const int *counting(void)
{
    for (int i = 0; i < N; ++i) {
        values_counting[i] = i;
    }
    return values_counting;
}

/* ---- between threads ------------------------------------------------------------------------ */

/* y = x reversed, through shared memory; the barrier is missing. */
__global__ void no_barrier(int *y, const int *x)
{
    __shared__ int copy[N];
    copy[threadIdx.x] = x[threadIdx.x];
    y[threadIdx.x] = copy[N - 1 - threadIdx.x];
}

bool missing_syncthreads(void)
{
    int expected[N];
    for (int i = 0; i < N; ++i) {
        expected[i] = N - 1 - i;
    }
    int *const x = device_array(N, counting()), *const y = device_array<int>(N);
    LAUNCH(no_barrier, 1, N, 0, nullptr, y, x);
    return device_equals(y, expected, N);
}

/* Each warp passes its lanes' values round by shared memory. The shuffles bring the lanes together,
 * so the result is right, but they do not order accesses of memory: on a GPU nothing promises it.
 */
__global__ void no_warp_barrier(int *y, const int *x)
{
    __shared__ int copy[N];
    const int next = (threadIdx.x & ~31u) + (threadIdx.x + 1) % 32;
    int sum = x[threadIdx.x];
    for (int i = 0; i < 4; ++i) {
        copy[threadIdx.x] = sum;
        __shfl_sync(0xffffffffu, sum, 0);
        const int other = copy[next];
        __shfl_sync(0xffffffffu, sum, 0);
        sum += other;
    }
    y[threadIdx.x] = sum;
}

/* The same with one of the two barriers: a lane may write the next value before it was read. */
__global__ void one_warp_barrier(int *y, const int *x)
{
    __shared__ int copy[N];
    const int next = (threadIdx.x & ~31u) + (threadIdx.x + 1) % 32;
    int sum = x[threadIdx.x];
    for (int i = 0; i < 4; ++i) {
        copy[threadIdx.x] = sum;
        __syncwarp();
        sum += copy[next];
    }
    y[threadIdx.x] = sum;
}

bool rounds(void (*kernel)(int *, const int *))
{
    int expected[N], before[N];
    memcpy(expected, counting(), sizeof expected);
    for (int i = 0; i < 4; ++i) {
        memcpy(before, expected, sizeof before);
        for (int at = 0; at < N; ++at) {
            expected[at] += before[at / 32 * 32 + (at + 1) % 32];
        }
    }
    int *const x = device_array(N, counting()), *const y = device_array<int>(N);
    LAUNCH(kernel, 1, N, 0, nullptr, y, x);
    return device_equals(y, expected, N);
}

bool shuffle_for_syncwarp(void)
{
    return rounds(no_warp_barrier);
}

bool missing_syncwarp(void)
{
    return rounds(one_warp_barrier);
}

/* Each block adds to one word without an atomic. */
__global__ void add_plainly(int *y)
{
    if (threadIdx.x == blockIdx.x) {
        *y += 1;
    }
}

bool race_of_blocks(void)
{
    const int zero = 0, expected = 8;
    int *const y = device_array(1, &zero);
    LAUNCH(add_plainly, 8, 32, 0, nullptr, y);
    return device_equals(y, &expected, 1);
}

__global__ void some_reach_barrier(int *y)
{
    if (threadIdx.x < 96) {
        __syncthreads();
    }
    y[threadIdx.x] = 0;
}

bool divergent_barrier(void)
{
    int *const y = device_array<int>(N);
    LAUNCH(some_reach_barrier, 1, N, 0, nullptr, y);
    return cudaDeviceSynchronize() == cudaSuccess;
}

__global__ void two_barriers(int *y)
{
    if (threadIdx.x < 32) {
        __syncthreads();
    } else {
        __syncthreads();
    }
    y[threadIdx.x] = 0;
}

bool different_barriers(void)
{
    int *const y = device_array<int>(N);
    LAUNCH(two_barriers, 1, N, 0, nullptr, y);
    return cudaDeviceSynchronize() == cudaSuccess;
}

__global__ void half_shuffle(int *y)
{
    if (threadIdx.x % 32 < 16) {
        y[threadIdx.x] = __shfl_sync(0xffffffffu, 1, 0);
    } else {
        __syncwarp();
    }
}

bool divergent_shuffle(void)
{
    int *const y = device_array<int>(N);
    LAUNCH(half_shuffle, 1, N, 0, nullptr, y);
    return cudaDeviceSynchronize() == cudaSuccess;
}

__global__ void shuffle_from_outside(int *y)
{
    if (threadIdx.x < 16) {
        y[threadIdx.x] = __shfl_sync(0xffffu, 1, 20);
    }
}

bool shuffle_outside(void)
{
    int *const y = device_array<int>(N);
    LAUNCH(shuffle_from_outside, 1, 32, 0, nullptr, y);
    return cudaDeviceSynchronize() == cudaSuccess;
}

/* ---- between kernels that overlap ----------------------------------------------------------- */

enum early { NOT_EARLY, READS_EARLY, COPIES_EARLY, WRITES_EARLY, LEAVES_EARLY };

/* y = x + 1. x is what the kernel before writes, y what it reads. */
template <enum early early> __global__ void add_one(int *y, const int *x)
{
    __shared__ __align__(16) int copy[N];
    const int i = static_cast<int>(threadIdx.x);
    int value = 0;
    if (early == READS_EARLY) {
        value = x[i];
    }
    if (early == COPIES_EARLY && i % 4 == 0) {
        copy_async_16(&copy[i], x + i);
    }
    if (early == WRITES_EARLY) {
        y[i] = 0;
    }
    if (early == LEAVES_EARLY && i == 5) {
        return;
    }
    grid_wait();
    copy_async_commit();
    copy_async_wait<0>();
    __syncwarp();
    value = early == READS_EARLY ? value : early == COPIES_EARLY ? copy[i] : x[i];
    y[i] = value + 1;
}

/* 0 1 2 ... goes from x to y and back, one more each time; maybe with a kernel in between. */
template <enum early early> bool overlap(bool has_between = false)
{
    int expected[N];
    for (int i = 0; i < N; ++i) {
        expected[i] = i + 2;
    }
    cudaStream_t stream;
    REQUIRE(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
    int *const x = device_array(N, counting()), *const y = device_array<int>(N);
    const struct launch_queue queue = {stream, true};
    LAUNCH(add_one<NOT_EARLY>, 1, N, 0, queue, y, x);
    if (has_between) {
        LAUNCH(add_one<NOT_EARLY>, 1, N, 0, queue, device_array<int>(N), x);
    }
    LAUNCH(add_one<early>, 1, N, 0, queue, x, y);
    return device_equals(x, expected, N);
}

bool read_before_grid_wait(void)
{
    return overlap<READS_EARLY>();
}

bool read_of_the_kernel_before_the_last(void)
{
    return overlap<READS_EARLY>(true);
}

bool copy_before_grid_wait(void)
{
    return overlap<COPIES_EARLY>();
}

bool write_before_grid_wait(void)
{
    return overlap<WRITES_EARLY>();
}

bool missing_grid_wait(void)
{
    return overlap<LEAVES_EARLY>();
}

/* ---- memory --------------------------------------------------------------------------------- */

__global__ void write_static(int *y, int n)
{
    __shared__ int before[64];
    __shared__ int values[64];
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        before[i] = values[i] = i;
    }
    __syncthreads();
    y[threadIdx.x] = before[threadIdx.x] + values[63 - threadIdx.x];
}

bool static_overflow(void)
{
    int *const y = device_array<int>(N);
    LAUNCH(write_static, 1, 32, 0, nullptr, y, 65);
    return cudaDeviceSynchronize() == cudaSuccess;
}

__device__ void write_by_address(int *values, int n)
{
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        values[i] = i;
    }
}

/* A template, whose variables compilers treat otherwise than a function's. */
template <int size> __global__ void write_static_by_address(int *y, int n)
{
    __shared__ int values[size];
    int *volatile address = values;
    write_by_address(address, n);
    __syncthreads();
    y[threadIdx.x] = values[63 - threadIdx.x];
}

/* No index says how large the array is: the redzone behind it does. */
bool static_overflow_by_address(void)
{
    int *const y = device_array<int>(N);
    LAUNCH(write_static_by_address<64>, 1, 32, 0, nullptr, y, 66);
    return cudaDeviceSynchronize() == cudaSuccess;
}

__global__ void write_dynamic(int *y, int n)
{
    DYN_SHARED(int, values);
    write_by_address(values, n);
    __syncthreads();
    y[threadIdx.x] = values[threadIdx.x];
}

bool dynamic_overflow(void)
{
    int *const y = device_array<int>(N);
    LAUNCH(write_dynamic, 1, 32, 64 * sizeof(int), nullptr, y, 65);
    return cudaDeviceSynchronize() == cudaSuccess;
}

template <int size> __device__ float read_and_clear(void)
{
    __shared__ float values[size];
    const float value = values[threadIdx.x];
    values[threadIdx.x] = 0;
    return value;
}

template <int which> __global__ void read_shared_first(float *y)
{
    __shared__ float values[32];
    DYN_SHARED(float, more);
    y[threadIdx.x] = which == 0   ? read_and_clear<32>()
                     : which == 1 ? values[threadIdx.x]
                                  : more[threadIdx.x];
    values[threadIdx.x] = more[threadIdx.x] = 0;
}

/* Two blocks: what the first left must not look like fresh memory to the second. */
bool reads_zeros(void (*kernel)(float *))
{
    float expected[32];
    memset(expected, 0, sizeof expected);
    float *const y = device_array<float>(32);
    LAUNCH(kernel, 2, 32, sizeof expected, nullptr, y);
    return device_equals(y, expected, 32);
}

/* Wrong only if one of the three ways to shared memory is. */
bool uninitialised_shared(void)
{
    return reads_zeros(read_shared_first<0>) || reads_zeros(read_shared_first<1>) ||
           reads_zeros(read_shared_first<2>);
}

bool uninitialised_device(void)
{
    float expected[32];
    memset(expected, 0, sizeof expected);
    return device_equals(device_array<float>(32), expected, 32);
}

bool device_overflow(void)
{
    int *const y = device_array<int>(N - 1);
    LAUNCH(write_dynamic, 1, N, 64 * sizeof(int), nullptr, y, 64);
    return cudaDeviceSynchronize() == cudaSuccess;
}

bool host_reads_device(void)
{
    const int *const y = device_array(N, counting());
    return *const_cast<const volatile int *>(y) == 0;
}

bool host_pointer_to_kernel(void)
{
    LAUNCH(add_plainly, 1, 32, 0, nullptr, values_counting);
    return cudaDeviceSynchronize() == cudaSuccess;
}

__global__ void read_four(float *y, const float *x)
{
    const float4 v = *reinterpret_cast<const float4 *>(x + threadIdx.x);
    y[threadIdx.x] = v.x + v.w;
}

bool misaligned_vector(void)
{
    float *const y = device_array<float>(N), *const x = device_array<float>(N);
    LAUNCH(read_four, 1, 2, 0, nullptr, y, x);
    return cudaDeviceSynchronize() == cudaSuccess;
}

__global__ void no_copy_wait(int *y, const int *x)
{
    __shared__ __align__(16) int copy[N];
    copy_async_16(&copy[4 * threadIdx.x], x + 4 * threadIdx.x);
    copy_async_commit();
    __syncthreads();
    for (int i = threadIdx.x; i < N; i += blockDim.x) {
        y[i] = copy[i];
    }
    copy_async_wait<0>();
}

bool missing_copy_wait(void)
{
    int *const x = device_array(N, counting()), *const y = device_array<int>(N);
    LAUNCH(no_copy_wait, 1, N / 4, 0, nullptr, y, x);
    return device_equals(y, counting(), N);
}

/* ---- between host and device ---------------------------------------------------------------- */

__global__ void copy_values(int *y, const int *x)
{
    y[threadIdx.x] = x[threadIdx.x];
}

struct pinned {
    int *x, *y;
    cudaStream_t stream;
};

struct pinned pinned_new(void)
{
    struct pinned it;
    REQUIRE(cudaHostAlloc(&it.x, N * sizeof(int), cudaHostAllocDefault) == cudaSuccess);
    REQUIRE(cudaHostAlloc(&it.y, N * sizeof(int), cudaHostAllocDefault) == cudaSuccess);
    REQUIRE(cudaStreamCreateWithFlags(&it.stream, cudaStreamNonBlocking) == cudaSuccess);
    memcpy(it.x, counting(), N * sizeof(int));
    return it;
}

bool missing_sync(void)
{
    const struct pinned it = pinned_new();
    LAUNCH(copy_values, 1, N, 0, it.stream, it.y, it.x);
    const bool is_right = memcmp(it.y, counting(), N * sizeof(int)) == 0;
    cudaStreamSynchronize(it.stream);
    return is_right;
}

bool source_changed_early(void)
{
    const struct pinned it = pinned_new();
    int *const y = device_array<int>(N);
    REQUIRE(cudaMemcpyAsync(y, it.x, N * sizeof(int), cudaMemcpyHostToDevice, it.stream) ==
            cudaSuccess);
    it.x[3] = 1000;
    return device_equals(y, counting(), N);
}

/* ---- what a launch must not ask for --------------------------------------------------------- */

bool is_refused(dim3 grid, dim3 block, size_t shared_bytes, cudaError_t error)
{
    int *const y = device_array<int>(N);
    LAUNCH(write_dynamic, grid, block, shared_bytes, nullptr, y, 0);
    const cudaError_t got = cudaGetLastError();
    if (got != error) {
        fprintf(stderr, "expected %s, got %s\n", cudaGetErrorName(error), cudaGetErrorName(got));
    }
    return got == error && cudaGetLastError() == cudaSuccess;
}

/* A graph whose kernel is allowed less than when it was captured. */
bool graph_is_refused(void)
{
    const auto attribute = cudaFuncAttributeMaxDynamicSharedMemorySize;
    int *const y = device_array<int>(N);
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    REQUIRE(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
    REQUIRE(cudaFuncSetAttribute(write_dynamic, attribute, 60 * 1024) == cudaSuccess);
    REQUIRE(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
    LAUNCH(write_dynamic, 1, 1, 60 * 1024, stream, y, 0);
    REQUIRE(cudaStreamEndCapture(stream, &graph) == cudaSuccess);
    REQUIRE(cudaGraphInstantiate(&exec, graph) == cudaSuccess);
    REQUIRE(cudaGraphLaunch(exec, stream) == cudaSuccess);
    REQUIRE(cudaFuncSetAttribute(write_dynamic, attribute, 50 * 1024) == cudaSuccess);
    const bool is_refused = cudaGraphLaunch(exec, stream) == cudaErrorInvalidValue &&
                            cudaGetLastError() == cudaErrorInvalidValue;
    return cudaStreamSynchronize(stream) == cudaSuccess && is_refused;
}

bool launch_limits(void)
{
    const auto attribute = cudaFuncAttributeMaxDynamicSharedMemorySize;
    return is_refused(1, 1025, 0, cudaErrorInvalidConfiguration) &&
           is_refused(1, dim3(64, 32), 0, cudaErrorInvalidConfiguration) &&
           is_refused(1, 0, 0, cudaErrorInvalidConfiguration) &&
           is_refused(0, 32, 0, cudaErrorInvalidConfiguration) &&
           is_refused(dim3(1, 65536), 32, 0, cudaErrorInvalidConfiguration) &&
           is_refused(1, 32, 48 * 1024 + 1, cudaErrorInvalidValue) &&
           cudaFuncSetAttribute(write_dynamic, attribute, 227 * 1024 + 1) ==
               cudaErrorInvalidValue &&
           cudaGetLastError() == cudaErrorInvalidValue &&
           cudaFuncSetAttribute(write_dynamic, attribute, 227 * 1024) == cudaSuccess &&
           is_refused(1, 32, 227 * 1024, cudaSuccess) &&
           is_refused(1, 32, 227 * 1024 + 1, cudaErrorInvalidValue) && graph_is_refused();
}

/* ---- what the environment asks for ---------------------------------------------------------- */

/* Prints what each call says, for test_double.py to compare. */
bool environment_calls(void)
{
    int n = -7, version = -7;
    void *data[4] = {nullptr, nullptr, nullptr, nullptr};
    printf("count %d", cudaGetDeviceCount(&n));
    printf(" n %d version %d malloc", n, cudaDriverGetVersion(&version) == 0 ? version : -1);
    for (int i = 0; i < 2; ++i) {
        printf(" %d", cudaMalloc(&data[i], 1 << 20));
    }
    printf(" host_alloc");
    for (int i = 2; i < 4; ++i) {
        printf(" %d", cudaHostAlloc(&data[i], 1 << 20, cudaHostAllocDefault));
    }
    cudaGetLastError();
    printf(" launch");
    for (int i = 0; i < 3; ++i) {
        LAUNCH(write_dynamic, 1, 1, 256, nullptr, static_cast<int *>(data[0]), 0);
        printf(" %d", cudaGetLastError());
    }
    printf(" sync");
    for (int i = 0; i < 2; ++i) {
        printf(" %d", cudaDeviceSynchronize());
    }
    printf(" free %d %d %d %d\n", cudaFree(data[0]), cudaFree(data[1]), cudaFreeHost(data[2]),
           cudaFreeHost(data[3]));
    return true;
}

} // namespace

const struct test_case bug_cases[] = {
    {"missing_syncthreads", missing_syncthreads},
    {"missing_syncwarp", missing_syncwarp},
    {"shuffle_for_syncwarp", shuffle_for_syncwarp},
    {"race_of_blocks", race_of_blocks},
    {"divergent_barrier", divergent_barrier},
    {"different_barriers", different_barriers},
    {"divergent_shuffle", divergent_shuffle},
    {"shuffle_outside", shuffle_outside},
    {"read_before_grid_wait", read_before_grid_wait},
    {"read_of_the_kernel_before_the_last", read_of_the_kernel_before_the_last},
    {"copy_before_grid_wait", copy_before_grid_wait},
    {"write_before_grid_wait", write_before_grid_wait},
    {"missing_grid_wait", missing_grid_wait},
    {"static_overflow", static_overflow},
    {"static_overflow_by_address", static_overflow_by_address},
    {"dynamic_overflow", dynamic_overflow},
    {"uninitialised_shared", uninitialised_shared},
    {"uninitialised_device", uninitialised_device},
    {"device_overflow", device_overflow},
    {"host_reads_device", host_reads_device},
    {"host_pointer_to_kernel", host_pointer_to_kernel},
    {"misaligned_vector", misaligned_vector},
    {"missing_copy_wait", missing_copy_wait},
    {"missing_sync", missing_sync},
    {"source_changed_early", source_changed_early},
    {"launch_limits", launch_limits},
    {"environment_calls", environment_calls},
    {nullptr, nullptr},
};
