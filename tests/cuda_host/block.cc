/* Runs the threads of a block, one at a time: who is next, the barrier, what is said when all wait.
 *
 * A thread runs until it must wait for others; then the next that can run does, straight from its
 * stack to the other's. A thread that ends without having waited costs no switch: the next one
 * begins on the same stack. Who can run is a bit per lane and a bit per warp, so choosing takes a
 * few instructions in every order.
 *
 * For ThreadSanitizer every thread has a stack and a fiber of its own, and those of two blocks that
 * follow one another are different ones; a launch comes before all its threads, and they before
 * what follows the launch, but nothing orders two blocks except __threadfence: so a race between
 * between blocks is seen like one between threads.
 *
 * A launch that may overlap with the kernel before it: one of its blocks, the first in the order,
 * is run as far as grid_wait before that kernel has begun, and kept with all that is its own in a
 * bank. So what it reads too early is what stood there before, what it writes too early the other
 * kernel meets, and for ThreadSanitizer nothing orders the two. A thread that leaves without
 * grid_wait is reported in any block. */
#include "tests/cuda_host/block.h"
#include "tests/cuda_host/sanitizer.h"

#include <stdlib.h>
#include <sys/mman.h>
#include <vector>

const uint3 *cuda_host_thread_idx;
uint3 cuda_host_block_idx;
dim3 cuda_host_block_dim, cuda_host_grid_dim;
unsigned char *cuda_host_dynamic_shared;

/* The __shared__ variables of all kernels: shared.ld. */
extern unsigned char cuda_host_shared_begin[] __attribute__((visibility("hidden")));
extern unsigned char cuda_host_shared_end[] __attribute__((visibility("hidden")));

struct block block;
struct thread *self;

namespace
{

enum { CANARY_BYTES = 64, SYNC_RING = 1 << 16 };
constexpr int PAGE = 4096;

enum thread_order order;
/* Fibers that no thread uses, the last given back first. */
struct fiber *idle[BLOCK_MAX];
int n_idle;

/* The order of a grid's blocks: around it, in steps that meet every one. */
struct walk {
    uint64_t n, at, step;
};

/* A block that waits at grid_wait, with what another would overwrite. */
struct begun {
    bool is_there;
    struct walk walk;
    struct block block;
    uint3 idx;
    unsigned char *dynamic; /* Owner */
    std::vector<unsigned char> shared;
    struct fiber *idle[BLOCK_MAX];
    int n_idle;
};
struct begun begun[2]; /* by bank */

/* What orders threads, for ThreadSanitizer: addresses only, which it tells apart by words. */
alignas(8) char sync_launch, sync_end, sync_fence;
alignas(8) char sync_ring[SYNC_RING];
unsigned sync_at;

} // namespace

void *sync_new(void)
{
    sync_at = (sync_at + 8) % SYNC_RING;
    return &sync_ring[sync_at];
}

bool is_shared(const void *data)
{
    const auto *const at = static_cast<const unsigned char *>(data);
    return (at >= cuda_host_shared_begin && at < cuda_host_shared_end) ||
           (at >= cuda_host_dynamic_shared &&
            at < cuda_host_dynamic_shared + block.call->shared_bytes);
}

/* ---- who is next ---------------------------------------------------------------------------- */

namespace
{

int bit_choose(unsigned int bits)
{
    if (order == ORDER_FORWARD) {
        return __builtin_ctz(bits);
    }
    if (order == ORDER_REVERSE) {
        return 31 - __builtin_clz(bits);
    }
    const auto n = static_cast<unsigned int>(__builtin_popcount(bits));
    for (uint64_t skip = random_next() % n; skip > 0; --skip) {
        bits &= bits - 1;
    }
    return __builtin_ctz(bits);
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
    warp_keep(warp, 1u << lane);
    return lane_thread(warp, lane);
}

/* The fiber for a thread that begins. */
struct fiber *fiber_take(const struct thread *thread);

void thread_switch(struct thread *thread)
{
    self = thread;
    cuda_host_thread_idx = &thread->idx;
    if (thread->fiber == nullptr) {
        thread->fiber = fiber_take(thread);
        fiber_restart(thread->fiber);
    }
    fiber_switch(thread->fiber);
}

} // namespace

void warp_wake(struct warp *warp, unsigned int lanes)
{
    warp->ready |= lanes;
    if (warp->ready != 0) {
        block.warps_ready |= 1u << (warp - block.warp);
    }
}

void warp_keep(struct warp *warp, unsigned int lane_bit)
{
    warp->ready &= ~lane_bit;
    if (warp->ready == 0) {
        block.warps_ready &= ~(1u << (warp - block.warp));
    }
}

/* ---- reports -------------------------------------------------------------------------------- */

const char *which_block(void)
{
    static char text[200];
    const uint3 b = cuda_host_block_idx;
    snprintf(text, sizeof text, "%s, block (%u, %u, %u)", block.call->name, b.x, b.y, b.z);
    return text;
}

const char *who(void)
{
    static char text[256];
    const uint3 t = self->idx;
    snprintf(text, sizeof text, "%s, thread (%u, %u, %u)", which_block(), t.x, t.y, t.z);
    return text;
}

namespace
{

bool is_same_state(const struct thread *a, const struct thread *b)
{
    if (a->place == nullptr || b->place == nullptr) {
        return a->place == b->place;
    }
    return a->mask == b->mask && is_same_place(a->place, b->place);
}

/* Nobody can run, and not all have ended. */
[[noreturn]] void report_stuck(void)
{
    say("%s: its threads wait for one another for ever:", which_block());
    for (int first = 0, end; first < block.n_thread; first = end) {
        const struct thread *const thread = &block.thread[first];
        for (end = first + 1; end < block.n_thread; ++end) {
            if (!is_same_state(thread, &block.thread[end])) {
                break;
            }
        }
        const struct cuda_host_place *const place = thread->place;
        if (place == nullptr) {
            say("  threads %d-%d have left the kernel", first, end - 1);
        } else if (thread->mask == 0) {
            say("  threads %d-%d wait at %s:%d, %s", first, end - 1, place->file, place->line,
                place->what);
        } else {
            say("  threads %d-%d wait at %s:%d, %s with mask %08x", first, end - 1, place->file,
                place->line, place->what, thread->mask);
        }
    }
    die("a barrier must be reached by all threads of the block, a collective by "
        "all of its mask");
}

/* ---- threads -------------------------------------------------------------------------------- */

/* The kernel, for one thread after another while they end without having waited. */
void thread_main(void)
{
    for (;;) {
        struct thread *const me = self;
        sync_acquire(&sync_launch);
        block.call->run(block.call);
        if (block.call->overlaps && !me->has_waited) {
            die("%s left without grid_wait: the kernel may then be complete before those before it",
                who());
        }
        sync_release(&sync_end);

        struct fiber *const fiber = me->fiber;
        me->fiber = nullptr;
        block.n_done++;
        me->warp->alive &= ~(1u << me->lane);
        warp_thread_ended(me->warp);
        struct thread *const next = next_take();
        if (next == nullptr) {
            if (block.n_done < block.n_thread) {
                report_stuck();
            }
            idle[n_idle++] = fiber;
            fiber_switch(fiber_caller());
        } else if (next->fiber == nullptr && !tsan_is_on()) {
            self = next;
            cuda_host_thread_idx = &next->idx;
            next->fiber = fiber;
        } else {
            idle[n_idle++] = fiber;
            thread_switch(next);
        }
    }
}

struct fiber *fiber_take(const struct thread *thread)
{
    if (tsan_is_on()) {
        return fiber_get((block.bank * 2 + block.parity) * BLOCK_MAX + thread->i, thread_main);
    }
    return idle[--n_idle];
}

} // namespace

void wait_for_others(const struct cuda_host_place *place, unsigned int mask)
{
    struct thread *const me = self;
    me->place = place;
    me->mask = mask;
    struct thread *const next = next_take();
    if (next != nullptr) {
        thread_switch(next);
    } else if (block.n_held > 0) {
        fiber_switch(fiber_caller());
    } else {
        report_stuck();
    }
    me->place = nullptr;
}

void cuda_host_grid_wait(const struct cuda_host_place &place)
{
    struct thread *const me = self;
    me->has_waited = true;
    if (block.is_early) {
        copies_read(me);
        me->is_held = true;
        block.n_held++;
        wait_for_others(&place, 0);
        sync_acquire(&sync_launch);
    }
}

/* ---- the barrier ---------------------------------------------------------------------------- */

int cuda_host_barrier(int value, const struct cuda_host_place &place)
{
    struct thread *const me = self;
    if (block.n_arrived == 0) {
        block.place = place;
        block.sum = 0;
        block.sync = sync_new();
    } else if (!is_same_place(&block.place, &place)) {
        wait_for_others(&place, 0); /* for ever */
    }
    void *const sync = block.sync;
    sync_release(sync);
    block.sum += value;
    if (++block.n_arrived < block.n_thread) {
        wait_for_others(&place, 0);
    } else {
        block.n_arrived = 0;
        block.result = block.sum;
        for (int i = 0; i < block.n_warp; ++i) {
            warp_wake(&block.warp[i], block.warp[i].all);
        }
        warp_keep(me->warp, 1u << me->lane);
    }
    sync_acquire(sync);
    return block.result;
}

void cuda_host_fence(void)
{
    sync_release(&sync_fence);
    sync_acquire(&sync_fence);
}

/* ---- blocks --------------------------------------------------------------------------------- */

namespace
{

/* With a canary behind it where AddressSanitizer does not watch its end. ThreadSanitizer forgets
 * what it knows of pages that are mapped anew. */
void dynamic_shared_new(size_t bytes)
{
    void *memory;
    if (tsan_is_on()) {
        memory = mmap(nullptr, SHARED_OPTIN + PAGE, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        memory = memory == MAP_FAILED ? nullptr : memory;
    } else {
        const size_t canary = __asan_poison_memory_region == nullptr ? CANARY_BYTES : 0;
        if (posix_memalign(&memory, 16, bytes + canary + (bytes + canary == 0)) != 0) {
            memory = nullptr;
        }
        if (memory != nullptr) {
            memory_fill(memory, POISON, bytes + canary);
        }
    }
    if (memory == nullptr) {
        die("no memory for dynamic shared memory");
    }
    cuda_host_dynamic_shared = static_cast<unsigned char *>(memory);
}

void dynamic_shared_free(void)
{
    if (tsan_is_on()) {
        munmap(cuda_host_dynamic_shared, SHARED_OPTIN + PAGE);
    } else {
        free(cuda_host_dynamic_shared);
    }
    cuda_host_dynamic_shared = nullptr;
}

void canary_check(void)
{
    if (tsan_is_on() || __asan_poison_memory_region != nullptr) {
        return;
    }
    const unsigned char *const canary = cuda_host_dynamic_shared + block.call->shared_bytes;
    for (int i = 0; i < CANARY_BYTES; ++i) {
        if (canary[i] != POISON) {
            die("%s wrote past its %zu bytes of dynamic shared memory", which_block(),
                block.call->shared_bytes);
        }
    }
}

void map_anew(void *data, size_t bytes)
{
    if (bytes > 0 && mmap(data, bytes, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) != data) {
        die("shared memory cannot be mapped anew");
    }
}

void shared_poison(void)
{
    const size_t bytes = static_cast<size_t>(cuda_host_shared_end - cuda_host_shared_begin);
    if (tsan_is_on()) {
        map_anew(cuda_host_shared_begin, bytes);
        map_anew(cuda_host_dynamic_shared, SHARED_OPTIN + PAGE);
    }
    memory_fill(cuda_host_shared_begin, POISON, bytes);
    memory_fill(cuda_host_dynamic_shared, POISON, block.call->shared_bytes);
}

void block_prepare(const struct cuda_host_call *call, int bank)
{
    const dim3 size = call->block;
    const int first_fiber = bank * 2 * BLOCK_MAX;
    block.call = call;
    block.bank = bank;
    block.n_thread = static_cast<int>(size.x * size.y * size.z);
    block.n_warp = (block.n_thread + WARP - 1) / WARP;
    cuda_host_block_dim = size;
    cuda_host_grid_dim = call->grid;
    n_idle = 0;
    for (int i = block.n_thread - 1; i >= 0; --i) {
        struct thread *const thread = &block.thread[i];
        const auto u = static_cast<unsigned int>(i);
        thread->idx = {u % size.x, u / size.x % size.y, u / (size.x * size.y)};
        thread->i = i;
        thread->lane = i % WARP;
        thread->warp = &block.warp[i / WARP];
        thread->fiber = nullptr;
        thread->place = nullptr;
        idle[n_idle++] = fiber_get(first_fiber + i, thread_main);
        if (tsan_is_on()) {
            /* Made here: a thread comes after who makes its fiber. */
            fiber_get(first_fiber + BLOCK_MAX + i, thread_main);
        }
    }
    for (int i = 0; i < block.n_warp; ++i) {
        const int n = block.n_thread - i * WARP;
        block.warp[i].all = n >= WARP ? 0xffffffffu : (1u << n) - 1;
    }
}

/* Up to where nobody can run; of an early one that is grid_wait. */
void block_run(uint3 idx, bool is_early)
{
    cuda_host_block_idx = idx;
    shared_poison();
    block.n_done = block.n_arrived = block.n_held = 0;
    block.is_early = is_early;
    for (int i = 0; i < block.n_warp; ++i) {
        struct warp *const warp = &block.warp[i];
        warp->alive = warp->ready = warp->all;
        warp->n_group = 0;
    }
    for (int i = 0; i < block.n_thread; ++i) {
        copies_reset(&block.thread[i]);
        block.thread[i].has_waited = block.thread[i].is_held = false;
    }
    block.warps_ready = block.n_warp == WARP_MAX ? 0xffffffffu : (1u << block.n_warp) - 1;
    n_idle = tsan_is_on() ? 0 : n_idle;
    block.parity ^= 1;
    self = nullptr;
    sync_release(&sync_launch);
    thread_switch(next_take());
    canary_check();
}

/* Whom grid_wait held goes on. */
void block_continue(void)
{
    block.is_early = false;
    block.n_held = 0;
    for (int i = 0; i < block.n_thread; ++i) {
        struct thread *const thread = &block.thread[i];
        if (thread->is_held) {
            warp_wake(thread->warp, 1u << thread->lane);
        }
    }
    self = nullptr;
    sync_release(&sync_launch);
    thread_switch(next_take());
    canary_check();
}

void block_keep(struct begun *to, const struct walk *walk)
{
    to->is_there = true;
    to->walk = *walk;
    memory_copy(&to->block, &block, sizeof block);
    to->idx = cuda_host_block_idx;
    to->dynamic = cuda_host_dynamic_shared;
    to->shared.resize(static_cast<size_t>(cuda_host_shared_end - cuda_host_shared_begin));
    memory_copy(to->shared.data(), cuda_host_shared_begin, to->shared.size());
    memory_copy(to->idle, idle, sizeof idle);
    to->n_idle = n_idle;
}

void block_restore(struct begun *from)
{
    from->is_there = false;
    memory_copy(&block, &from->block, sizeof block); /* not an assignment, which TSan would see */
    cuda_host_block_idx = from->idx;
    cuda_host_block_dim = block.call->block;
    cuda_host_grid_dim = block.call->grid;
    cuda_host_dynamic_shared = from->dynamic;
    if (tsan_is_on()) {
        map_anew(cuda_host_shared_begin, from->shared.size());
    }
    memory_copy(cuda_host_shared_begin, from->shared.data(), from->shared.size());
    memory_copy(idle, from->idle, sizeof idle);
    n_idle = from->n_idle;
}

uint64_t common_divisor(uint64_t a, uint64_t b)
{
    while (b != 0) {
        const uint64_t rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

struct walk walk_of(dim3 grid)
{
    const uint64_t n = static_cast<uint64_t>(grid.x) * grid.y * grid.z;
    struct walk walk = {n, 0, 1};
    if (order == ORDER_REVERSE) {
        walk.at = walk.step = n - 1;
    } else if (order == ORDER_RANDOM) {
        walk.at = random_next() % n;
        do {
            walk.step = random_next() % n + 1;
        } while (common_divisor(walk.step, n) != 1);
    }
    return walk;
}

void walk_run(struct walk *walk, dim3 grid, bool is_early)
{
    const uint64_t at = walk->at;
    walk->at = (at + walk->step) % walk->n;
    block_run({static_cast<unsigned>(at % grid.x), static_cast<unsigned>(at / grid.x % grid.y),
               static_cast<unsigned>(at / grid.x / grid.y)},
              is_early);
}

struct walk grid_begin(const struct cuda_host_call *call, int bank)
{
    order = environment_get()->order;
    block_prepare(call, bank);
    dynamic_shared_new(call->shared_bytes);
    return walk_of(call->grid);
}

} // namespace

int block_begin(const struct cuda_host_call *call, bool other_has_bank)
{
    const int n_taken = begun[0].is_there + begun[1].is_there + !other_has_bank;
    if (n_taken > 1) {
        return 0;
    }
    const int bank = begun[0].is_there ? 1 : 0;
    struct walk walk = grid_begin(call, bank);
    walk_run(&walk, call->grid, true);
    block_keep(&begun[bank], &walk);
    return bank + 1;
}

void block_run_grid(const struct cuda_host_call *call, int bank)
{
    struct walk walk;
    uint64_t n_done = 0;
    if (bank != 0) {
        walk = begun[bank - 1].walk;
        block_restore(&begun[bank - 1]);
        block_continue();
        n_done = 1;
    } else {
        walk = grid_begin(call, begun[0].is_there ? 1 : 0);
    }
    for (; n_done < walk.n; ++n_done) {
        walk_run(&walk, call->grid, false);
    }
    sync_acquire(&sync_end);
    dynamic_shared_free();
}

void block_forget(int bank)
{
    if (bank != 0) {
        block_restore(&begun[bank - 1]);
        dynamic_shared_free();
    }
}
