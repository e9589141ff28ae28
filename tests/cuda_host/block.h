/* A block whose threads run: what block.cc, grid.cc and warp.cc share. */
#ifndef CUDA_HOST_BLOCK_H
#define CUDA_HOST_BLOCK_H

#include "tests/cuda_host/fiber.h"

enum { COPY_MAX = 256 };

/* An asynchronous copy under way. */
struct copy {
    struct cuda_host_copy what;
    int group;
    unsigned char read[16]; /* by copies_read */
};

struct thread {
    uint3 idx;
    int i, lane;
    struct warp *warp;
    struct fiber *fiber; /* NULL before it begins and after it ended */
    uint64_t result;     /* of the last collective */
    /* Where it waits, and with which mask if it is a collective; NULL while it does not. */
    const struct cuda_host_place *place;
    unsigned int mask;
    /* Copies under way: [copy_first, copy_end), oldest first. */
    int copy_first, copy_end;
    int copy_group;           /* that copies belong to until the next commit */
    bool has_waited, is_held; /* at grid_wait */
};

/* Of a block's threads. */
struct barrier {
    int n_arrived, sum, result;
    struct cuda_host_place place;
    void *sync;
};

/* Lanes that wait for one another. */
struct group {
    enum cuda_host_collective op;
    unsigned int mask, arrived;
    struct cuda_host_place place;
    void *sync;
};

struct warp {
    unsigned int all, alive, ready;
    int n_group;
    struct group group[WARP];
    /* What the lanes brought to their groups. */
    uint64_t value[WARP];
    int arg[WARP];
};

struct shared_use;
struct block {
    const struct cuda_host_call *call;
    struct shared_use *use; /* grid.cc */
    int n_thread, n_warp;
    int n_done;
    unsigned int warps_ready; /* those with a ready lane */
    int bank;                 /* of what must outlive other blocks: fibers, copies */
    int parity;               /* of the block in its bank, for ThreadSanitizer */
    bool is_early;            /* grid_wait holds its threads */
    bool is_alone;            /* a thread has come to grid_wait_alone */
    int n_held;
    struct barrier barrier;
    struct warp warp[WARP_MAX];
    struct thread thread[BLOCK_MAX];
    struct fiber *idle[BLOCK_MAX]; /* that no thread uses, the last given back first */
    int n_idle;
};

extern struct block block;
extern struct thread *self; /* that runs */
extern enum thread_order order;
/* What orders threads, for ThreadSanitizer: the launch before them, them before its end. */
extern char sync_launch, sync_end;

static inline bool is_same_place(const struct cuda_host_place *a, const struct cuda_host_place *b)
{
    return a->line == b->line && (a->file == b->file || strcmp(a->file, b->file) == 0) &&
           (a->what == b->what || strcmp(a->what, b->what) == 0);
}

static inline struct thread *lane_thread(const struct warp *warp, int lane)
{
    return &block.thread[(warp - block.warp) * WARP + lane];
}

/* One of the lanes or warps whose bits are set, by the order. */
int bit_choose_random(unsigned int bits);
static inline int bit_choose(unsigned int bits)
{
    if (order == ORDER_FORWARD) {
        return __builtin_ctz(bits);
    }
    if (order == ORDER_REVERSE) {
        return 31 - __builtin_clz(bits);
    }
    return bit_choose_random(bits);
}

/* These lanes may run again. */
static inline void warp_wake(struct warp *warp, unsigned int lanes)
{
    warp->ready |= lanes;
    if (warp->ready != 0) {
        block.warps_ready |= 1u << (warp - block.warp);
    }
}

/* This one runs on: nobody need switch to it. */
static inline void warp_keep(struct warp *warp, unsigned int lane_bit)
{
    warp->ready &= ~lane_bit;
    if (warp->ready == 0) {
        block.warps_ready &= ~(1u << (warp - block.warp));
    }
}

/* Who runs next, which no longer counts as ready; NULL: nobody can. */
static inline struct thread *next_take(void)
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

/* Gives a thread that begins its fiber. */
void thread_begin(struct thread *thread);
/* Lets this thread run. */
__attribute__((always_inline)) static inline void thread_switch(struct thread *thread)
{
    self = thread;
    cuda_host_thread_idx = &thread->idx;
    if (thread->fiber == nullptr) {
        thread_begin(thread);
    }
    fiber_switch(thread->fiber);
}

/* Nobody can run, and not all have ended: dies. */
[[noreturn]] void report_stuck(void);
/* Lets others run until somebody wakes this thread. */
__attribute__((always_inline)) static inline void
wait_for_others(const struct cuda_host_place *place, unsigned int mask)
{
    struct thread *const me = self;
    me->place = place;
    me->mask = mask;
    struct thread *const next = next_take();
    if (next != nullptr) {
        thread_switch(next);
    } else if (block.n_held > 0) {
        fiber_switch(&fiber_caller);
    } else {
        report_stuck();
    }
    me->place = nullptr;
}

/* What each fiber runs. */
void thread_main(void);
/* An address that stands for one meeting of threads, for ThreadSanitizer. */
void *sync_new(void);
/* Completes the groups of a warp that waited for a lane that has ended. warp.cc */
void warp_thread_ended(struct warp *warp);
/* The thread's copies under way are dropped. warp.cc */
void copies_reset(struct thread *thread);
/* Those under way read their sources: as early as they may. warp.cc */
void copies_read(const struct thread *thread);
/* Whether data lies in the block's shared memory. grid.cc */
bool is_shared(const void *data);
/* Says where the threads of the block wait. */
void say_waiting(void);
/* For messages: "kernel, block (0, 0, 0)", and with ", thread (0, 0, 0)". */
const char *which_block(void);
const char *who(void);

#endif
