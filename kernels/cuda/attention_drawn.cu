/* Attention of drawn tokens: attention_drawn.cuh says how, and what it costs.
 *
 * The grid depends on the number of rows, never on positions, so that a captured step can be
 * replayed: blocks whose unit has no split leave. Bytes: 8·d_head (BF16: 4·d_head) per position,
 * row and head; flops: 4·d_head; bound: the memory's bandwidth, for few rows the latencies of a
 * chain. Share reached on an H200: 57 % of 256 rows of 270 positions. */
#include "kernels/cuda/attention_drawn.cuh"

namespace
{

/* Most threads: as many warps as find room on a multiprocessor with the keys and values of a turn
 * in registers, so that few rows take few rounds. Where rows and heads are more than
 * multiprocessors, a block has a third of them and more rounds: while one of several waits or
 * merges, the others read. Of most rows it has two warps, few of which are idle in the last
 * round. */
constexpr int BLOCK = 384;
constexpr int BLOCK_OF_MANY = 128;
constexpr int BLOCK_OF_MOST = 64;
constexpr int MANY_PER_SM = 4; /* blocks of many that find room on a multiprocessor */

/* Heads of up to width columns. */
template <typename T, int width> struct drawn_of {
    static constexpr int n_piece = width / (16 / static_cast<int>(sizeof(T)));
    static constexpr int pieces = n_piece > 32 ? n_piece / 32 : 1;
    using shape = drawn_shape<T, n_piece / pieces, pieces>;
};

/* Grid: heads × units. */
template <typename T, int width, bool is_whole, int n_thread>
__global__ void __launch_bounds__(n_thread,
                                  n_thread == BLOCK ? 1 : MANY_PER_SM * BLOCK_OF_MANY / n_thread)
    drawn_kernel(const struct attention_args a, const struct parts p)
{
    using shape = typename drawn_of<T, width>::shape;
    DYN_SHARED(float, o);
    __shared__ struct softmax_part part[PART_MAX];
    const struct attention_unit *const unit = &p.unit[blockIdx.y];
    const int head = static_cast<int>(blockIdx.x);
    struct drawn_begun<shape, T> begun;
    drawn_begin<shape, is_whole>(begun, a, p, unit, head);
    grid_wait();
    drawn_attend<shape, is_whole>(a, p, {.part = part, .o = o}, begun, head);
}

template <typename T, int width, bool is_whole, int n_thread>
void drawn_launch(struct cuda *cu, const struct attention_args *a, const struct parts *p,
                  int n_unit)
{
    const size_t bytes = sizeof(float) * static_cast<size_t>(p->n_part_max * a->d_pad);
    CHECK(bytes <= SHARED_BYTES_MAX);
    if (!cuda_shared(cu, drawn_kernel<T, width, is_whole, n_thread>, bytes, "attention")) {
        return;
    }
    const dim3 grid(static_cast<unsigned>(a->n_head), static_cast<unsigned>(n_unit));
    LAUNCH((drawn_kernel<T, width, is_whole, n_thread>), grid, dim3(n_thread), bytes,
           cuda_queue(cu), *a, *p);
    cuda_check(cu, "attention");
}

template <typename T, int width, bool is_whole>
void drawn_launch_by_rows(struct cuda *cu, const struct attention_args *a, const struct parts *p,
                          int n_row, int n_unit)
{
    if (n_row * a->n_head > MANY_PER_SM * cu->n_sm) {
        drawn_launch<T, width, is_whole, BLOCK_OF_MOST>(cu, a, p, n_unit);
    } else if (n_row * a->n_head > cu->n_sm) {
        drawn_launch<T, width, is_whole, BLOCK_OF_MANY>(cu, a, p, n_unit);
    } else {
        drawn_launch<T, width, is_whole, BLOCK>(cu, a, p, n_unit);
    }
}

template <typename T, int width>
void drawn_launch_of(struct cuda *cu, const struct attention_args *a, const struct parts *p,
                     int n_row, int n_unit)
{
    if constexpr (width > 64) {
        if (a->d_head <= width / 2) {
            drawn_launch_of<T, width / 2>(cu, a, p, n_row, n_unit);
            return;
        }
    }
    if (a->kv_piece == 16 && a->has_groups) {
        drawn_launch_by_rows<T, width, true>(cu, a, p, n_row, n_unit);
    } else {
        drawn_launch_by_rows<T, width, false>(cu, a, p, n_row, n_unit);
    }
}

} // namespace

void attention_drawn_launch(struct cuda *cu, const struct attention_args *a, const struct parts *p,
                            enum dtype cache, int n_row, int n_unit)
{
    if (cache == DTYPE_BF16) {
        drawn_launch_of<uint16_t, D_HEAD_MAX>(cu, a, p, n_row, n_unit);
    } else {
        drawn_launch_of<float, D_HEAD_MAX>(cu, a, p, n_row, n_unit);
    }
}
