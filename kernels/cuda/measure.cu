/* The device's own limits, for the accesses and instructions that this backend uses: what the
 * bench divides by.
 *
 *   copy   device to device, bytes read plus bytes written, between two blocks beyond the caches
 *   F32    fused multiply-adds, eight chains per thread, two full blocks' worth of warps per
 *          multiprocessor
 *   BF16   mma.sync m16n8k16 with F32 sums, four chains per warp: what linear.cu is made of, about
 *          two thirds of what the newest devices' wider instructions reach
 *
 * Each is repeated, with doubled work, until one run takes long enough for the clock to mean
 * something: so it also ends soon where the device is slow. */
#include "kernels/cuda/backend.cuh"

#include <time.h>

namespace
{

enum { THREADS = 256, BLOCKS_PER_SM = 8, CHAINS = 8, MMA_CHAINS = 4 };

const double RUN_SECONDS = 0.02;
const size_t COPY_BYTES = static_cast<size_t>(512) << 20;

__global__ void fma_kernel(float *out, int n_round, float a, float b)
{
    grid_wait();
    float x[CHAINS];
    for (int i = 0; i < CHAINS; i++) {
        x[i] = static_cast<float>(threadIdx.x + i);
    }
    for (int round = 0; round < n_round; round++) {
#pragma unroll
        for (int i = 0; i < CHAINS; i++) {
            x[i] = fmaf(x[i], a, b);
        }
    }
    float sum = 0;
    for (int i = 0; i < CHAINS; i++) {
        sum += x[i];
    }
    if (sum == -1.0f) { /* never, but the compiler cannot know */
        out[0] = sum;
    }
}

__global__ void mma_kernel(float *out, int n_round)
{
    grid_wait();
    float d[MMA_CHAINS][4] = {};
    const uint32_t one = 0x3f803f80u; /* two BF16 ones */
    const uint32_t a[4] = {one, one, one, one};
    const uint32_t b[2] = {one, one};
    for (int round = 0; round < n_round; round++) {
#pragma unroll
        for (int i = 0; i < MMA_CHAINS; i++) {
            mma_bf16(d[i], a, b);
        }
    }
    float sum = 0;
    for (int i = 0; i < MMA_CHAINS; i++) {
        sum += d[i][0] + d[i][1] + d[i][2] + d[i][3];
    }
    if (sum == -1.0f) {
        out[0] = sum;
    }
}

double now_s()
{
    struct timespec t;
    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

struct work {
    struct cuda *cu;
    char *block[2];
    size_t bytes;
};

/* Starts n rounds; returns what one round is worth, in bytes or operations. */
typedef double round_fn(const struct work *work, int n);

double copy_rounds(const struct work *work, int n)
{
    for (int i = 0; i < n; i++) {
        (void)cuda_ok(work->cu,
                      cudaMemcpyAsync(work->block[1], work->block[0], work->bytes,
                                      cudaMemcpyDeviceToDevice, work->cu->stream),
                      "measure");
    }
    return 2.0 * static_cast<double>(work->bytes);
}

double fma_rounds(const struct work *work, int n)
{
    const int n_block = work->cu->n_sm * BLOCKS_PER_SM;
    LAUNCH(fma_kernel, n_block, THREADS, 0, cuda_queue(work->cu),
           reinterpret_cast<float *>(work->block[0]), n, 0.999f, 0.5f);
    cuda_check(work->cu, "measure");
    return 2.0 * static_cast<double>(CHAINS * THREADS) * n_block;
}

double mma_rounds(const struct work *work, int n)
{
    const int n_block = work->cu->n_sm * BLOCKS_PER_SM;
    LAUNCH(mma_kernel, n_block, THREADS, 0, cuda_queue(work->cu),
           reinterpret_cast<float *>(work->block[0]), n);
    cuda_check(work->cu, "measure");
    return 2.0 * static_cast<double>(16 * 8 * 16 * MMA_CHAINS * (THREADS / 32)) * n_block;
}

/* Worth per second: the best of three runs of a length that takes RUN_SECONDS. */
double rate_of(const struct work *work, round_fn *rounds)
{
    double best = 0;
    int n = 1;
    for (int n_run = 0; n_run < 3 && work->cu->failure.code == ERR_OK;) {
        const double start = now_s();
        const double worth = rounds(work, n) * n;
        (void)graphs_wait(work->cu);
        const double seconds = now_s() - start;
        if (seconds < RUN_SECONDS && n < 1 << 28) {
            n *= 2;
            continue;
        }
        best = worth / seconds > best ? worth / seconds : best;
        n_run++;
    }
    return best;
}

} // namespace

cudaError_t measure_code_version(int *version)
{
    cudaFuncAttributes attributes = {};
    const cudaError_t status = cudaFuncGetAttributes(&attributes, fma_kernel);
    *version = attributes.ptxVersion;
    return status;
}

void measure_rates(struct backend *be, enum dtype dtype, struct machine_rate *rate)
{
    *rate = {};
    struct cuda *const cu = cuda_of(be);
    struct work work = {cu, {NULL, NULL}, COPY_BYTES};
    const size_t quarter = static_cast<size_t>(resource_memory_available(be)) / 4;
    work.bytes = work.bytes < quarter ? work.bytes : quarter;
    void *blocks = NULL;
    if (work.bytes == 0 ||
        resource_buffer_new(be, &blocks, 2 * work.bytes, "measure", NULL) != ERR_OK) {
        return;
    }
    work.block[0] = static_cast<char *>(blocks);
    work.block[1] = work.block[0] + work.bytes;
    rate->read_bytes_per_s = rate_of(&work, copy_rounds);
    rate->peak_per_s =
        rate_of(&work, dtype == DTYPE_BF16 || dtype == DTYPE_F16 ? mma_rounds : fma_rounds);
    resource_buffer_free(be, blocks);
}
