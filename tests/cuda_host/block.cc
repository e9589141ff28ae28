/* Runs the threads of a block, one at a time: who is next, the barrier, what is said when all wait.
 *
 * A thread runs until it must wait for others; then the next that can run does, straight from its
 * stack to the other's. A thread that ends without having waited costs no switch: the next one
 * begins on the same stack. Who can run is a bit per lane and a bit per warp, so choosing takes a
 * few instructions in every order. */
#include "tests/cuda_host/block.h"
#include "tests/cuda_host/sanitizer.h"

const uint3 *cuda_host_thread_idx;
uint3 cuda_host_block_idx;
dim3 cuda_host_block_dim, cuda_host_grid_dim;
unsigned char *cuda_host_dynamic_shared;

struct block block;
struct thread *self;
enum thread_order order;
alignas(8) char sync_launch, sync_end;

namespace
{

enum { SYNC_RING = 1 << 16 };

/* What orders threads, for ThreadSanitizer: addresses only, which it tells apart by words. */
alignas(8) char sync_fence;
alignas(8) char sync_ring[SYNC_RING];
unsigned sync_at;

} // namespace

void *sync_new(void)
{
    sync_at = (sync_at + 8) % SYNC_RING;
    return &sync_ring[sync_at];
}

/* ---- who is next ---------------------------------------------------------------------------- */

/* The first at or after a random place: after a gap more often than elsewhere, which no test minds,
 * and in a tenth of the time of an even choice. */
int bit_choose_random(unsigned int bits)
{
    const auto from = static_cast<unsigned int>(random_next() >> 59);
    const unsigned int turned = bits >> from | bits << (-from & 31);
    return static_cast<int>((static_cast<unsigned int>(__builtin_ctz(turned)) + from) & 31);
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

} // namespace

void say_waiting(void)
{
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
}

void report_stuck(void)
{
    say("%s: its threads wait for one another for ever:", which_block());
    say_waiting();
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
            block.idle[block.n_idle++] = fiber;
            fiber_switch(&fiber_caller);
        } else if (next->fiber == nullptr && !tsan_is_on()) {
            self = next;
            cuda_host_thread_idx = &next->idx;
            next->fiber = fiber;
        } else {
            block.idle[block.n_idle++] = fiber;
            thread_switch(next);
        }
    }
}

void thread_begin(struct thread *thread)
{
    if (tsan_is_on()) {
        thread->fiber =
            fiber_get((block.bank * 2 + block.parity) * BLOCK_MAX + thread->i, thread_main);
    } else {
        thread->fiber = block.idle[--block.n_idle];
    }
    fiber_restart(thread->fiber);
}

void cuda_host_grid_wait(bool is_alone, const struct cuda_host_place &place)
{
    struct thread *const me = self;
    me->has_waited = true;
    block.is_alone = block.is_alone || is_alone;
    if (block.is_early) {
        copies_read(me);
        me->is_held = true;
        block.n_held++;
        wait_for_others(&place, 0);
        sync_acquire(&sync_launch);
    }
}

/* ---- barriers ------------------------------------------------------------------------------- */

namespace
{

/* Lets whom the barrier held go on. */
void barrier_open(void)
{
    for (int i = 0; i < block.n_warp; ++i) {
        warp_wake(&block.warp[i], block.warp[i].all);
    }
    warp_keep(self->warp, 1u << self->lane);
}

} // namespace

int cuda_host_barrier(int value, const struct cuda_host_place &place)
{
    struct barrier *const barrier = &block.barrier;
    if (barrier->n_arrived == 0) {
        barrier->place = place;
        barrier->sum = 0;
        barrier->sync = sync_new();
    } else if (!is_same_place(&barrier->place, &place)) {
        wait_for_others(&place, 0); /* for ever */
    }
    void *const sync = barrier->sync;
    sync_release(sync);
    barrier->sum += value;
    if (++barrier->n_arrived < block.n_thread) {
        wait_for_others(&place, 0);
    } else {
        barrier->n_arrived = 0;
        barrier->result = barrier->sum;
        barrier_open();
    }
    sync_acquire(sync);
    return barrier->result;
}

void cuda_host_fence(void)
{
    sync_release(&sync_fence);
    sync_acquire(&sync_fence);
}
