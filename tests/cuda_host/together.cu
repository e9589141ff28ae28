/* Groups of a block's threads with barriers of their own, and blocks that are under way together: what must
 * work, and planted bugs. */
#include "tests/cuda_host/cases.h"

namespace
{

/* ---- what must work ------------------------------------------------------------------------- */

enum { TOGETHER_BLOCKS = 3, TOGETHER_GROUPS = 2, TOGETHER_TURNS = 5 };

/* In each turn each thread adds what its neighbour to the right wrote in the one before: around the
 * groups of the block, then around the blocks. */
__global__ void neighbours(int *y, unsigned int *counter)
{
    __shared__ int row[TOGETHER_GROUPS][64];
    const int group = static_cast<int>(threadIdx.x) / 64;
    const int thread = static_cast<int>(threadIdx.x) % 64;
    const int block = static_cast<int>(blockIdx.x);
    const int n_block = static_cast<int>(gridDim.x);
    int mine = block * 128 + static_cast<int>(threadIdx.x);
    for (int turn = 0; turn < TOGETHER_TURNS; ++turn) {
        row[group][thread] = mine;
        for (int i = 0; i <= group; ++i) { /* groups take barriers of their own */
            group_sync(group + 1, 64);
        }
        mine = mine % 1000 + row[group][(thread + 1) % 64];
        group_sync(group + 1, 64);
        int *const now = y + turn % 2 * n_block * 128;
        now[block * 128 + threadIdx.x] = mine;
        __syncthreads();
        if (threadIdx.x == 0) {
            count_up(counter);
            count_wait(counter, static_cast<unsigned int>(n_block * (turn + 1)));
        }
        __syncthreads();
        mine += now[(block + 1) % n_block * 128 + threadIdx.x];
    }
    y[2 * n_block * 128 + block * 128 + threadIdx.x] = mine;
}

bool together(void)
{
    constexpr int n = TOGETHER_BLOCKS * 128;
    const unsigned int zero = 0;
    int now[n], next[n];
    for (int i = 0; i < n; ++i) {
        now[i] = i;
    }
    for (int turn = 0; turn < TOGETHER_TURNS; ++turn) {
        for (int i = 0; i < n; ++i) {
            next[i] = now[i] % 1000 + now[i / 64 * 64 + (i + 1) % 64];
        }
        for (int i = 0; i < n; ++i) {
            now[i] = next[i] + next[(i + 128) % n];
        }
    }
    int *const y = device_array<int>(3 * n);
    unsigned int *const counter = device_array(1, &zero);
    LAUNCH_TOGETHER(neighbours, TOGETHER_BLOCKS, 128, 0, nullptr, y, counter);
    return device_equals(y + 2 * n, now, n) && cudaFree(y) == cudaSuccess &&
           cudaFree(counter) == cudaSuccess;
}

/* ---- what must be found --------------------------------------------------------------------- */

template <bool has_sync> __global__ void group_turns(int *y)
{
    __shared__ int row[2][64];
    const int group = static_cast<int>(threadIdx.x) / 64;
    const int thread = static_cast<int>(threadIdx.x) % 64;
    row[group][thread] = static_cast<int>(threadIdx.x);
    if (has_sync) {
        group_sync(1, 64 + 32 * group); /* one barrier for two groups */
    }
    y[threadIdx.x] = row[group][63 - thread];
}

template <bool has_sync> bool turns_are_right(void)
{
    int expected[128];
    for (int i = 0; i < 128; ++i) {
        expected[i] = i / 64 * 64 + 63 - i % 64;
    }
    int *const y = device_array<int>(128);
    LAUNCH(group_turns<has_sync>, 1, 128, 0, nullptr, y);
    return device_equals(y, expected, 128);
}

bool missing_group_sync(void)
{
    return turns_are_right<false>();
}

bool group_of_two_sizes(void)
{
    return turns_are_right<true>();
}

enum { COUNTS, COUNTS_NOT, WAITS_NOT };

/* Each block reads what the next one wrote. */
template <int how> __global__ void read_next(int *y, int *x, unsigned int *counter)
{
    const unsigned int i = blockIdx.x;
    x[i] = static_cast<int>(i) + 1;
    if (how != COUNTS_NOT || i > 0) {
        count_up(counter);
    }
    if (how != WAITS_NOT) {
        count_wait(counter, gridDim.x);
    }
    y[i] = x[(i + 1) % gridDim.x];
}

template <int how> bool next_is_read(bool is_together)
{
    const unsigned int zero = 0;
    const int expected[3] = {2, 3, 1};
    int *const y = device_array<int>(3), *const x = device_array<int>(3);
    unsigned int *const counter = device_array(1, &zero);
    if (is_together) {
        LAUNCH_TOGETHER(read_next<how>, 3, 1, 0, nullptr, y, x, counter);
    } else {
        LAUNCH(read_next<how>, 3, 1, 0, nullptr, y, x, counter);
    }
    return device_equals(y, expected, 3);
}

bool blocks_without_count(void)
{
    return next_is_read<WAITS_NOT>(true);
}

bool count_that_never_comes(void)
{
    return next_is_read<COUNTS_NOT>(true);
}

bool blocks_wait_apart(void)
{
    return next_is_read<COUNTS>(false);
}

} // namespace

const struct test_case together_cases[] = {
    {"together", together},
    {nullptr, nullptr},
};

const struct test_case together_bug_cases[] = {
    {"missing_group_sync", missing_group_sync},
    {"group_of_two_sizes", group_of_two_sizes},
    {"blocks_without_count", blocks_without_count},
    {"count_that_never_comes", count_that_never_comes},
    {"blocks_wait_apart", blocks_wait_apart},
    {nullptr, nullptr},
};
