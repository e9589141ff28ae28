/* Runs the threads of a block, one at a time: who is next, barriers, warp collectives.
 *
 * A thread runs until it must wait for others; then the next that can run does, straight from its
 * stack to the other's. A thread that ends without waiting costs no switch: the next one starts on
 * the same stack. Who can run is a bit per lane and a bit per warp, so choosing takes a few
 * instructions in every order. */
#include "tests/cuda_host/double.h"

const uint3 *cuda_host_thread_idx;
uint3 cuda_host_block_idx;
dim3 cuda_host_block_dim, cuda_host_grid_dim;
unsigned char *cuda_host_dynamic_shared;

/* The __shared__ variables of all kernels: shared.ld. */
extern unsigned char cuda_host_shared_begin[] __attribute__((visibility("hidden")));
extern unsigned char cuda_host_shared_end[] __attribute__((visibility("hidden")));

namespace
{

struct copy {
    struct cuda_host_copy what;
    int group;
};

struct thread {
    uint3 idx;
    int lane;
    struct warp *warp;
    struct fiber *fiber; /* NULL before it starts and after it ended */
    uint64_t result;     /* of the last collective */
    const struct cuda_host_place *place;
    unsigned int mask; /* of the collective waited at, for reports */
    /* Asynchronous copies under way, oldest first. */
    struct copy *copy; /* Owner */
    int copy_first, copy_end, copy_max;
    int group; /* the one that copies belong to until the next commit */
};

/* Lanes that wait for one another. */
struct group {
    enum cuda_host_collective op;
    unsigned int mask, arrived;
    struct cuda_host_place place;
};

struct warp {
    unsigned int all, alive, ready;
    int n_group;
    struct group group[WARP];
    uint64_t value[WARP];
    int arg[WARP];
};

struct block {
    const struct cuda_host_call *call;
    int n_thread, n_warp;
    int n_done;
    unsigned int warps_ready;
    /* the barrier */
    int n_arrived, sum, result;
    struct cuda_host_place place;
    /* unused fibers, the last given first */
    int n_free;
    struct fiber *free[BLOCK_MAX];
    struct warp warp[WARP_MAX];
    struct thread thread[BLOCK_MAX];
};

struct block block;
struct thread *self;
enum thread_order order;

bool is_same_place(const struct cuda_host_place *a, const struct cuda_host_place *b)
{
    return a->line == b->line && strcmp(a->file, b->file) == 0 && strcmp(a->what, b->what) == 0;
}

/* ---- who is next ---------------------------------------------------------------------------- */

int bit_choose(unsigned int bits)
{
    if (order == ORDER_FORWARD) {
        return __builtin_ctz(bits);
    }
    if (order == ORDER_REVERSE) {
        return 31 - __builtin_clz(bits);
    }
    for (uint64_t skip = random_next() % static_cast<unsigned>(__builtin_popcount(bits)); skip > 0;
         --skip) {
        bits &= bits - 1;
    }
    return __builtin_ctz(bits);
}

void warp_wake(struct warp *warp, unsigned int lanes)
{
    warp->ready |= lanes;
    if (warp->ready != 0) {
        block.warps_ready |= 1u << (warp - block.warp);
    }
}

struct thread *next_take(void)
{
    if (block.warps_ready == 0) {
        return nullptr;
    }
    struct warp *warp = self == nullptr ? nullptr : self->warp;
    if (warp == nullptr || warp->ready == 0 || order == ORDER_RANDOM) {
        warp = &block.warp[bit_choose(block.warps_ready)];
    }
    const int lane = bit_choose(warp->ready);
    warp->ready &= ~(1u << lane);
    if (warp->ready == 0) {
        block.warps_ready &= ~(1u << (warp - block.warp));
    }
    return &block.thread[(warp - block.warp) * WARP + lane];
}

void self_set(struct thread *thread)
{
    self = thread;
    cuda_host_thread_idx = &thread->idx;
}

/* ---- reports -------------------------------------------------------------------------------- */

void report_stuck(void)
{
    die("%s: threads wait for one another", block.call->name);
}

/* ---- warp collectives ----------------------------------------------------------------------- */

float bf16(uint32_t pair, int half)
{
    const uint32_t bits = half == 0 ? pair << 16 : pair & 0xffff0000u;
    return __uint_as_float(bits);
}

/* The fragments' layout is that of kernels/cuda/portable.cuh. */
void mma(const uint64_t *value)
{
    float a[16][16], b[16][8], d[16][8];
    for (int lane = 0; lane < WARP; ++lane) {
        const auto *const part = reinterpret_cast<const struct cuda_host_mma *>(value[lane]);
        const int g = lane / 4, t = lane % 4;
        for (int half = 0; half < 2; ++half) {
            a[g][2 * t + half] = bf16(part->a[0], half);
            a[g + 8][2 * t + half] = bf16(part->a[1], half);
            a[g][2 * t + 8 + half] = bf16(part->a[2], half);
            a[g + 8][2 * t + 8 + half] = bf16(part->a[3], half);
            b[2 * t + half][g] = bf16(part->b[0], half);
            b[2 * t + 8 + half][g] = bf16(part->b[1], half);
            d[g][2 * t + half] = part->d[half];
            d[g + 8][2 * t + half] = part->d[2 + half];
        }
    }
    for (int row = 0; row < 16; ++row) {
        for (int k = 0; k < 16; ++k) {
            for (int col = 0; col < 8; ++col) {
                d[row][col] += a[row][k] * b[k][col];
            }
        }
    }
    for (int lane = 0; lane < WARP; ++lane) {
        const auto *const part = reinterpret_cast<const struct cuda_host_mma *>(value[lane]);
        const int g = lane / 4, t = lane % 4;
        for (int half = 0; half < 2; ++half) {
            part->d[half] = d[g][2 * t + half];
            part->d[2 + half] = d[g + 8][2 * t + half];
        }
    }
}

uint64_t combine(enum cuda_host_collective op, uint64_t x, uint64_t y)
{
    const auto xs = static_cast<int32_t>(x), ys = static_cast<int32_t>(y);
    const auto xu = static_cast<uint32_t>(x), yu = static_cast<uint32_t>(y);
    switch (op) {
    case COLLECTIVE_ADD: return xu + yu;
    case COLLECTIVE_AND: return xu & yu;
    case COLLECTIVE_OR: return xu | yu;
    case COLLECTIVE_XOR: return xu ^ yu;
    case COLLECTIVE_MIN_SIGNED: return static_cast<uint32_t>(xs < ys ? xs : ys);
    case COLLECTIVE_MAX_SIGNED: return static_cast<uint32_t>(xs > ys ? xs : ys);
    case COLLECTIVE_MIN_UNSIGNED: return xu < yu ? xu : yu;
    case COLLECTIVE_MAX_UNSIGNED: return xu > yu ? xu : yu;
    default: die("a collective without a meaning");
    }
}

void result_set(const struct warp *warp, unsigned int lanes, uint64_t result)
{
    for (; lanes != 0; lanes &= lanes - 1) {
        block.thread[(warp - block.warp) * WARP + __builtin_ctz(lanes)].result = result;
    }
}

void shuffle(const struct warp *warp, const struct group *group)
{
    for (unsigned int lanes = group->arrived; lanes != 0; lanes &= lanes - 1) {
        const int lane = __builtin_ctz(lanes), from = warp->arg[lane];
        if ((group->arrived >> from & 1) == 0) {
            die("%s:%d: lane %d takes a value of lane %d, which does not take part",
                group->place.file, group->place.line, lane, from);
        }
        block.thread[(warp - block.warp) * WARP + lane].result = warp->value[from];
    }
}

/* All of the group have arrived: computes their results and lets them run. */
void group_complete(struct warp *warp, struct group *group)
{
    const unsigned int arrived = group->arrived;
    switch (group->op) {
    case COLLECTIVE_SYNC: break;
    case COLLECTIVE_MMA:
        if (arrived != 0xffffffffu) {
            die("%s:%d: mma_bf16 without all lanes", group->place.file, group->place.line);
        }
        mma(warp->value);
        break;
    case COLLECTIVE_SHUFFLE: shuffle(warp, group); break;
    case COLLECTIVE_BALLOT: {
        unsigned int bits = 0;
        for (unsigned int lanes = arrived; lanes != 0; lanes &= lanes - 1) {
            const int lane = __builtin_ctz(lanes);
            bits |= static_cast<unsigned int>(warp->value[lane] != 0) << lane;
        }
        result_set(warp, arrived, bits);
        break;
    }
    case COLLECTIVE_MATCH:
        for (unsigned int lanes = arrived; lanes != 0; lanes &= lanes - 1) {
            const int lane = __builtin_ctz(lanes);
            unsigned int bits = 0;
            for (int other = 0; other < WARP; ++other) {
                bits |= static_cast<unsigned int>((arrived >> other & 1) != 0 &&
                                                  warp->value[other] == warp->value[lane])
                        << other;
            }
            result_set(warp, 1u << lane, bits);
        }
        break;
    default: {
        unsigned int lanes = arrived;
        uint64_t result = warp->value[__builtin_ctz(lanes)];
        for (lanes &= lanes - 1; lanes != 0; lanes &= lanes - 1) {
            result = combine(group->op, result, warp->value[__builtin_ctz(lanes)]);
        }
        result_set(warp, arrived, result);
    }
    }
    *group = warp->group[--warp->n_group];
    warp_wake(warp, arrived);
}

/* ---- threads -------------------------------------------------------------------------------- */

/* The kernel, for one thread after another on this stack while they end without having waited. */
void thread_main(void)
{
    for (;;) {
        block.call->run(block.call);

        struct thread *const done = self;
        struct warp *const warp = done->warp;
        struct fiber *const fiber = done->fiber;
        done->fiber = nullptr;
        block.n_done++;
        warp->alive &= ~(1u << done->lane);
        for (int i = warp->n_group - 1; i >= 0; --i) {
            struct group *const group = &warp->group[i];
            if ((group->mask & warp->alive & ~group->arrived) == 0) {
                group_complete(warp, group);
            }
        }
        struct thread *const next = next_take();
        if (next == nullptr) {
            if (block.n_done < block.n_thread) {
                report_stuck();
            }
            block.free[block.n_free++] = fiber;
            fiber_switch(fiber_caller());
        }
        self_set(next);
        if (next->fiber == nullptr) {
            next->fiber = fiber;
            continue;
        }
        block.free[block.n_free++] = fiber;
        fiber_switch(next->fiber);
    }
}

void thread_continue(struct thread *thread)
{
    self_set(thread);
    if (thread->fiber == nullptr) {
        thread->fiber = block.free[--block.n_free];
        fiber_restart(thread->fiber);
    }
    fiber_switch(thread->fiber);
}

/* Lets others run until somebody wakes this thread. */
void wait_for_others(void)
{
    struct thread *const me = self;
    struct thread *const next = next_take();
    if (next == nullptr) {
        report_stuck();
    }
    if (next != me) {
        thread_continue(next);
    }
}

} // namespace

int cuda_host_lane(void)
{
    return self->lane;
}

void cuda_host_fence(void)
{
}

uint64_t cuda_host_collect(enum cuda_host_collective op, unsigned int mask, uint64_t value, int arg,
                           const struct cuda_host_place &place)
{
    struct thread *const me = self;
    struct warp *const warp = me->warp;
    const unsigned int bit = 1u << me->lane;
    if ((mask & bit) == 0) {
        die("%s:%d: lane %d calls %s with mask %08x, which leaves it out", place.file, place.line,
            me->lane, place.what, mask);
    }
    struct group *group = warp->group;
    struct group *const end = group + warp->n_group;
    while (group < end &&
           (group->op != op || group->mask != mask || group->place.line != place.line ||
            (group->place.file != place.file && strcmp(group->place.file, place.file) != 0))) {
        group++;
    }
    if (group == end) {
        warp->n_group++;
        *group = {op, mask, 0, place};
    }
    warp->value[me->lane] = value;
    warp->arg[me->lane] = arg;
    group->arrived |= bit;
    if ((mask & warp->alive & ~group->arrived) == 0) {
        group_complete(warp, group);
        /* The last one goes on: no switch. */
        warp->ready &= ~bit;
        if (warp->ready == 0) {
            block.warps_ready &= ~(1u << (warp - block.warp));
        }
    } else {
        me->place = &place;
        me->mask = mask;
        wait_for_others();
        me->place = nullptr;
    }
    return me->result;
}

int cuda_host_barrier(int value, const struct cuda_host_place &place)
{
    struct thread *const me = self;
    if (block.n_arrived == 0) {
        block.place = place;
        block.sum = 0;
    } else if (!is_same_place(&block.place, &place)) {
        me->place = &place;
        report_stuck();
    }
    block.n_arrived++;
    block.sum += value;
    if (block.n_arrived < block.n_thread) {
        me->place = &place;
        wait_for_others();
        me->place = nullptr;
    } else {
        block.n_arrived = 0;
        block.result = block.sum;
        for (int i = 0; i < block.n_warp; ++i) {
            warp_wake(&block.warp[i], block.warp[i].all);
        }
        struct warp *const warp = me->warp;
        warp->ready &= ~(1u << me->lane);
        if (warp->ready == 0) {
            block.warps_ready &= ~(1u << (warp - block.warp));
        }
    }
    return block.result;
}

/* ---- asynchronous copies -------------------------------------------------------------------- */

void cuda_host_copy_start(void *shared, const void *global, int n,
                          const struct cuda_host_place &place)
{
    if ((reinterpret_cast<uintptr_t>(shared) | reinterpret_cast<uintptr_t>(global)) % 16 != 0) {
        die("%s:%d: copy_async_16 of addresses that are no multiples of 16", place.file,
            place.line);
    }
    if (n < 0 || n > 16) {
        die("%s:%d: copy_async_16 of %d bytes", place.file, place.line, n);
    }
    struct thread *const me = self;
    if (me->copy_end == me->copy_max) {
        const int n_max = me->copy_max == 0 ? 16 : 2 * me->copy_max;
        me->copy = static_cast<struct copy *>(
            realloc(me->copy, static_cast<size_t>(n_max) * sizeof *me->copy));
        if (me->copy == nullptr) {
            die("no memory for asynchronous copies");
        }
        me->copy_max = n_max;
    }
    me->copy[me->copy_end++] = {{shared, global, n}, me->group};
}

void cuda_host_copy_commit(void)
{
    self->group++;
}

bool cuda_host_copy_next(int n, struct cuda_host_copy *copy)
{
    struct thread *const me = self;
    if (me->copy_first == me->copy_end) {
        me->copy_first = me->copy_end = 0;
        return false;
    }
    if (me->copy[me->copy_first].group >= me->group - n) {
        return false;
    }
    *copy = me->copy[me->copy_first++].what;
    return true;
}

/* ---- blocks --------------------------------------------------------------------------------- */

namespace
{

void block_prepare(const struct cuda_host_call *call)
{
    const dim3 size = call->block;
    block.call = call;
    block.n_thread = static_cast<int>(size.x * size.y * size.z);
    block.n_warp = (block.n_thread + WARP - 1) / WARP;
    cuda_host_block_dim = size;
    cuda_host_grid_dim = call->grid;
    block.n_free = 0;
    for (int i = block.n_thread - 1; i >= 0; --i) {
        struct thread *const thread = &block.thread[i];
        const unsigned u = static_cast<unsigned>(i);
        thread->idx = {u % size.x, u / size.x % size.y, u / (size.x * size.y)};
        thread->lane = i % WARP;
        thread->warp = &block.warp[i / WARP];
        thread->fiber = nullptr;
        block.free[block.n_free++] = fiber_get(i, thread_main);
    }
    for (int i = 0; i < block.n_warp; ++i) {
        const int n = block.n_thread - i * WARP;
        block.warp[i].all = n >= WARP ? 0xffffffffu : (1u << n) - 1;
    }
}

void block_run(uint3 idx)
{
    cuda_host_block_idx = idx;
    memset(cuda_host_shared_begin, POISON,
           static_cast<size_t>(cuda_host_shared_end - cuda_host_shared_begin));
    memset(cuda_host_dynamic_shared, POISON, block.call->shared_bytes);
    block.n_done = block.n_arrived = 0;
    for (int i = 0; i < block.n_warp; ++i) {
        struct warp *const warp = &block.warp[i];
        warp->alive = warp->ready = warp->all;
        warp->n_group = 0;
    }
    for (int i = 0; i < block.n_thread; ++i) {
        struct thread *const thread = &block.thread[i];
        thread->copy_first = thread->copy_end = thread->group = 0;
    }
    block.warps_ready = block.n_warp == WARP_MAX ? 0xffffffffu : (1u << block.n_warp) - 1;
    self = nullptr;
    thread_continue(next_take());
}

} // namespace

void block_run_grid(const struct cuda_host_call *call)
{
    order = order_get();
    block_prepare(call);
    cuda_host_dynamic_shared =
        static_cast<unsigned char *>(aligned_alloc(16, (call->shared_bytes + 31) / 16 * 16));
    if (cuda_host_dynamic_shared == nullptr) {
        die("no memory for dynamic shared memory");
    }
    const dim3 grid = call->grid;
    const uint64_t n = static_cast<uint64_t>(grid.x) * grid.y * grid.z;
    for (uint64_t i = 0; i < n; ++i) {
        const uint64_t at = order == ORDER_REVERSE ? n - 1 - i : i;
        block_run({static_cast<unsigned>(at % grid.x), static_cast<unsigned>(at / grid.x % grid.y),
                   static_cast<unsigned>(at / grid.x / grid.y)});
    }
    free(cuda_host_dynamic_shared);
    cuda_host_dynamic_shared = nullptr;
}
