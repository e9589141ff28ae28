/* Runs the blocks of a grid, one after another.
 *
 * For ThreadSanitizer every thread has a stack and a fiber of its own, and those of two blocks that
 * follow one another are different ones; a launch comes before all its threads, and they before
 * what follows the launch, but nothing orders two blocks except __threadfence: so a race between
 * blocks is seen like one between threads.
 *
 * A launch that may overlap with the kernels before it: one of its blocks, the first in the order,
 * is run as far as grid_wait before those have begun, up to two of them, and kept with all that is
 * its own in a bank. So what it reads too early is what stood there before, what it writes too
 * early another kernel meets, and for ThreadSanitizer nothing orders the two. Behind a kernel that
 * waits at grid_wait_alone none begins early. A thread that leaves without grid_wait is reported in
 * any block. */
#include "tests/cuda_host/block.h"
#include "tests/cuda_host/sanitizer.h"

#include <stdlib.h>
#include <sys/mman.h>
#include <unordered_map>
#include <vector>

/* The __shared__ variables of all kernels: shared.ld. */
extern unsigned char cuda_host_shared_begin[] __attribute__((visibility("hidden")));
extern unsigned char cuda_host_shared_end[] __attribute__((visibility("hidden")));

bool is_shared(const void *data)
{
    const auto *const at = static_cast<const unsigned char *>(data);
    return (at >= cuda_host_shared_begin && at < cuda_host_shared_end) ||
           (at >= cuda_host_dynamic_shared &&
            at < cuda_host_dynamic_shared + block.call->shared_bytes);
}

/* Of a kernel: how many of its blocks ran, and which pages of the __shared__ variables of all
 * kernels they were seen to write to. */
struct shared_use {
    uint64_t n_block;
    std::vector<bool> page;
};

namespace
{

enum { CANARY_BYTES = 64 };
constexpr size_t PAGE = 4096;
constexpr uint64_t POISON_WORD = POISON * 0x0101010101010101u;

/* The order of a grid's blocks: around it, in steps that meet every one. */
struct walk {
    uint64_t n, at, step;
};

/* What stood in a page of the __shared__ variables. */
struct kept_page {
    unsigned char *at;
    unsigned char data[PAGE];
};

/* A block that waits at grid_wait, with what another would overwrite. */
struct begun {
    bool is_there;
    struct walk walk;
    struct block block;
    uint3 idx;
    unsigned char *dynamic;               /* Owner */
    std::vector<struct kept_page> shared; /* of those that it wrote to */
};
struct begun begun[BANK_MAX];

/* With a canary behind it where AddressSanitizer does not watch its end. ThreadSanitizer forgets
 * what it knows of pages that are mapped anew. */
void dynamic_shared_new(size_t bytes)
{
    void *memory;
    if (tsan_is_on()) {
        memory =
            mmap(nullptr, bytes + PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
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
        munmap(cuda_host_dynamic_shared, block.call->shared_bytes + PAGE);
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

/* Whether nothing was written into the page since it was poisoned. */
bool is_poison(const unsigned char *page)
{
    typedef uint64_t words __attribute__((vector_size(16), may_alias));
    const words poison = {POISON_WORD, POISON_WORD};
    words differ = {}, differ_next = {};
    for (size_t i = 0; i < PAGE; i += 4 * sizeof poison) {
        const words *const at = reinterpret_cast<const words *>(page + i);
        differ |= (at[0] ^ poison) | (at[1] ^ poison);
        differ_next |= (at[2] ^ poison) | (at[3] ^ poison);
    }
    differ |= differ_next;
    return (differ[0] | differ[1]) == 0;
}

/* Between launches all is poison. Within one, what is looked at before a block is the pages that
 * blocks of its kernel were seen to write to, which are few of those of all kernels; and all of
 * them before some blocks, and before each for ThreadSanitizer, which takes what an earlier block
 * wrote for a race. */
void static_shared_poison(struct shared_use *use, bool is_all)
{
    for (size_t i = 0; i < use->page.size(); ++i) {
        unsigned char *const page = cuda_host_shared_begin + i * PAGE;
        if ((is_all || use->page[i]) && !is_poison(page)) {
            use->page[i] = true;
            if (tsan_is_on()) {
                map_anew(page, PAGE);
            }
            memory_fill(page, POISON, PAGE);
        }
    }
}

void shared_poison(void)
{
    const uint64_t n = ++block.use->n_block;
    static_shared_poison(block.use, tsan_is_on() || (n & (n - 1)) == 0);
    if (tsan_is_on()) {
        map_anew(cuda_host_dynamic_shared, block.call->shared_bytes);
    }
    memory_fill(cuda_host_dynamic_shared, POISON, block.call->shared_bytes);
}

/* That of a kernel. */
struct shared_use *shared_use_get(const void *kernel)
{
    static std::unordered_map<const void *, struct shared_use> uses;
    const size_t bytes = static_cast<size_t>(cuda_host_shared_end - cuda_host_shared_begin);
    if (uses.empty()) {
        memory_fill(cuda_host_shared_begin, POISON, bytes);
    }
    struct shared_use *const use = &uses[kernel];
    use->page.resize(bytes / PAGE);
    return use;
}

void shared_end(void)
{
    static_shared_poison(block.use, true);
    dynamic_shared_free();
}

void block_prepare(const struct cuda_host_call *call, int bank)
{
    const dim3 size = call->block;
    const int first_fiber = bank * 2 * BLOCK_MAX;
    block.call = call;
    block.use = shared_use_get(call->kernel);
    block.bank = bank;
    block.n_thread = static_cast<int>(size.x * size.y * size.z);
    block.n_warp = (block.n_thread + WARP - 1) / WARP;
    cuda_host_block_dim = size;
    cuda_host_grid_dim = call->grid;
    block.n_idle = 0;
    for (int i = block.n_thread - 1; i >= 0; --i) {
        struct thread *const thread = &block.thread[i];
        const auto u = static_cast<unsigned int>(i);
        thread->idx = {u % size.x, u / size.x % size.y, u / (size.x * size.y)};
        thread->i = i;
        thread->lane = i % WARP;
        thread->warp = &block.warp[i / WARP];
        thread->fiber = nullptr;
        thread->place = nullptr;
        block.idle[block.n_idle++] = fiber_get(first_fiber + i, thread_main);
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
    block.n_done = block.n_held = 0;
    block.is_alone = false;
    block.barrier.n_arrived = 0;
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
    block.n_idle = tsan_is_on() ? 0 : block.n_idle;
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
            thread->is_held = false;
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
    to->shared.clear();
    for (size_t i = 0; i < block.use->page.size(); ++i) {
        unsigned char *const page = cuda_host_shared_begin + i * PAGE;
        if (!is_poison(page)) {
            to->shared.push_back({page, {}});
            memory_copy(to->shared.back().data, page, PAGE);
        }
    }
    static_shared_poison(block.use, true);
}

void block_restore(struct begun *from)
{
    from->is_there = false;
    memory_copy(&block, &from->block, sizeof block); /* not an assignment, which TSan would see */
    cuda_host_block_idx = from->idx;
    cuda_host_block_dim = block.call->block;
    cuda_host_grid_dim = block.call->grid;
    cuda_host_dynamic_shared = from->dynamic;
    for (const struct kept_page &page : from->shared) {
        memory_copy(page.at, page.data, PAGE);
    }
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

/* The first of those from there on, or BANK_MAX. */
int bank_free(int bank)
{
    while (bank < BANK_MAX && begun[bank].is_there) {
        ++bank;
    }
    return bank;
}

struct walk grid_begin(const struct cuda_host_call *call, int bank)
{
    order = environment_get()->order;
    block_prepare(call, bank);
    dynamic_shared_new(call->shared_bytes);
    return walk_of(call->grid);
}

} // namespace

int block_begin(const struct cuda_host_call *call)
{
    const int bank = bank_free(0);
    if (bank_free(bank + 1) == BANK_MAX) {
        return 0;
    }
    struct walk walk = grid_begin(call, bank);
    walk_run(&walk, call->grid, true);
    block_keep(&begun[bank], &walk);
    return bank + 1;
}

bool block_is_alone(int bank)
{
    return begun[bank - 1].block.is_alone;
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
        walk = grid_begin(call, bank_free(0));
    }
    for (; n_done < walk.n; ++n_done) {
        walk_run(&walk, call->grid, false);
    }
    sync_acquire(&sync_end);
    shared_end();
}

void block_forget(int bank)
{
    if (bank != 0) {
        block_restore(&begun[bank - 1]);
        shared_end();
    }
}
