/* What the lanes of a warp do together, and asynchronous copies.
 *
 * Lanes that arrive at the same place with the same mask form a group. The last of them computes
 * the results of all, so that nothing a lane brings later can be mixed up with them. Only
 * __syncwarp orders the memory accesses of its lanes: shuffles and votes do not on a GPU either. */
#include "tests/cuda_host/block.h"
#include "tests/cuda_host/sanitizer.h"

/* ---- the matrix instructions ---------------------------------------------------------------- */

namespace
{

/* An operand's values as F32. */
template <int N> void widen(bool is_f16, const uint16_t *bits, float *values)
{
    if (is_f16) {
        for (int i = 0; i < N; ++i) {
            values[i] = f16_to_f32(bits[i]);
        }
    } else {
        for (int i = 0; i < N; ++i) {
            values[i] = bf16_to_f32(bits[i]);
        }
    }
}

/* The fragments' layout is that of kernels/cuda/portable.cuh. Sums go up in k, from d. */
void multiply(const uint64_t *value)
{
    uint16_t a_bits[16][16], b_bits[16][8];
    float a[16][16], b[16][8], d[16][8];
    for (int lane = 0; lane < WARP; ++lane) {
        const auto *const part = reinterpret_cast<const struct cuda_host_mma *>(value[lane]);
        const int g = lane / 4, t = lane % 4;
        for (int half = 0; half < 2; ++half) {
            const int k = 2 * t + half, shift = 16 * half;
            a_bits[g][k] = static_cast<uint16_t>(part->a[0] >> shift);
            a_bits[g + 8][k] = static_cast<uint16_t>(part->a[1] >> shift);
            a_bits[g][k + 8] = static_cast<uint16_t>(part->a[2] >> shift);
            a_bits[g + 8][k + 8] = static_cast<uint16_t>(part->a[3] >> shift);
            b_bits[k][g] = static_cast<uint16_t>(part->b[0] >> shift);
            b_bits[k + 8][g] = static_cast<uint16_t>(part->b[1] >> shift);
            d[g][k] = part->d[half];
            d[g + 8][k] = part->d[2 + half];
        }
    }
    const bool is_f16 = reinterpret_cast<const struct cuda_host_mma *>(value[0])->is_f16;
    widen<16 * 16>(is_f16, a_bits[0], a[0]);
    widen<16 * 8>(is_f16, b_bits[0], b[0]);
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

/* ---- collectives ---------------------------------------------------------------------------- */

uint64_t combine(enum cuda_host_collective op, uint64_t x, uint64_t y)
{
    const auto xs = static_cast<int32_t>(x), ys = static_cast<int32_t>(y);
    const auto xu = static_cast<uint32_t>(x), yu = static_cast<uint32_t>(y);
    switch (op) {
    case COLLECTIVE_ADD: return xu + yu;
    case COLLECTIVE_AND: return xu & yu;
    case COLLECTIVE_OR: return xu | yu;
    case COLLECTIVE_MIN_SIGNED: return static_cast<uint32_t>(xs < ys ? xs : ys);
    case COLLECTIVE_MAX_SIGNED: return static_cast<uint32_t>(xs > ys ? xs : ys);
    case COLLECTIVE_MIN_UNSIGNED: return xu < yu ? xu : yu;
    case COLLECTIVE_MAX_UNSIGNED: return xu > yu ? xu : yu;
    default: die("a collective without a meaning");
    }
}

void reduce(const struct warp *warp, const struct group *group)
{
    unsigned int lanes = group->arrived;
    uint64_t result = warp->value[__builtin_ctz(lanes)];
    for (lanes &= lanes - 1; lanes != 0; lanes &= lanes - 1) {
        result = combine(group->op, result, warp->value[__builtin_ctz(lanes)]);
    }
    for (lanes = group->arrived; lanes != 0; lanes &= lanes - 1) {
        lane_thread(warp, __builtin_ctz(lanes))->result = result;
    }
}

void shuffle(const struct warp *warp, const struct group *group)
{
    for (unsigned int lanes = group->arrived; lanes != 0; lanes &= lanes - 1) {
        const int lane = __builtin_ctz(lanes), from = warp->arg[lane];
        if ((group->arrived >> from & 1) == 0) {
            die("%s:%d: %s of %s: lane %d takes a value of lane %d, which does not "
                "take part",
                group->place.file, group->place.line, group->place.what, who(), lane, from);
        }
        lane_thread(warp, lane)->result = warp->value[from];
    }
}

/* For each lane, the lanes whose value is not 0. */
void vote(const struct warp *warp, const struct group *group)
{
    unsigned int set = 0;
    for (unsigned int lanes = group->arrived; lanes != 0; lanes &= lanes - 1) {
        const int lane = __builtin_ctz(lanes);
        set |= static_cast<unsigned int>(warp->value[lane] != 0) << lane;
    }
    for (unsigned int lanes = group->arrived; lanes != 0; lanes &= lanes - 1) {
        lane_thread(warp, __builtin_ctz(lanes))->result = set;
    }
}

/* All have arrived: computes their results and lets them run. */
void complete(struct warp *warp, struct group *group)
{
    const unsigned int arrived = group->arrived;
    switch (group->op) {
    case COLLECTIVE_SYNC: break;
    case COLLECTIVE_MMA:
        if (arrived != 0xffffffffu) {
            die("%s:%d: %s of %s without all 32 lanes", group->place.file, group->place.line,
                group->place.what, who());
        }
        multiply(warp->value);
        break;
    case COLLECTIVE_SHUFFLE: shuffle(warp, group); break;
    case COLLECTIVE_BALLOT: vote(warp, group); break;
    default: reduce(warp, group);
    }
    *group = warp->group[--warp->n_group];
    warp_wake(warp, arrived);
}

struct group *group_find(struct warp *warp, enum cuda_host_collective op, unsigned int mask,
                         const struct cuda_host_place *place)
{
    struct group *const end = warp->group + warp->n_group;
    for (struct group *group = warp->group; group < end; ++group) {
        if (group->mask == mask && group->op == op && is_same_place(&group->place, place)) {
            return group;
        }
    }
    warp->n_group++;
    *end = {op, mask, 0, *place, tsan_is_on() && op == COLLECTIVE_SYNC ? sync_new() : nullptr};
    return end;
}

} // namespace

void warp_thread_ended(struct warp *warp)
{
    for (int i = warp->n_group - 1; i >= 0; --i) {
        struct group *const group = &warp->group[i];
        if ((group->mask & warp->alive & ~group->arrived) == 0) {
            complete(warp, group);
        }
    }
}

uint64_t cuda_host_collect(enum cuda_host_collective op, unsigned int mask, uint64_t value, int arg,
                           const struct cuda_host_place &place)
{
    struct thread *const me = self;
    struct warp *const warp = me->warp;
    const unsigned int bit = 1u << me->lane;
    if ((mask & bit) == 0) {
        die("%s:%d: %s of %s with mask %08x, which leaves lane %d out", place.file, place.line,
            place.what, who(), mask, me->lane);
    }
    struct group *const group = group_find(warp, op, mask, &place);
    void *const sync = group->sync;
    if (sync != nullptr) {
        sync_release(sync);
    }
    warp->value[me->lane] = value;
    warp->arg[me->lane] = arg;
    group->arrived |= bit;
    if ((mask & warp->alive & ~group->arrived) != 0) {
        wait_for_others(&place, mask);
    } else {
        complete(warp, group);
        warp_keep(warp, bit);
    }
    if (sync != nullptr) {
        sync_acquire(sync);
    }
    return me->result;
}

int cuda_host_lane(void)
{
    return self->lane;
}

/* ---- asynchronous copies -------------------------------------------------------------------- */

namespace
{

/* Of a bank; each a ring: those under way are copy_first .. copy_end-1. */
struct copy copies[BANK_MAX][BLOCK_MAX][COPY_MAX];

struct copy *copy_at(const struct thread *thread, int i)
{
    return &copies[block.bank][thread->i][i % COPY_MAX];
}

} // namespace

void copies_reset(struct thread *thread)
{
    thread->copy_first = thread->copy_end = thread->copy_group = 0;
}

void cuda_host_copy_start(const struct cuda_host_copy &copy, const struct cuda_host_place &place)
{
    struct thread *const me = self;
    const uintptr_t size = static_cast<uintptr_t>(copy.size);
    if (reinterpret_cast<uintptr_t>(copy.shared) % size != 0 ||
        reinterpret_cast<uintptr_t>(copy.global) % size != 0 || copy.n < 0 || copy.n > copy.size) {
        die("%s:%d: %s of %s: %d bytes from %p to %p, which must be multiples of %d", place.file,
            place.line, place.what, who(), copy.n, copy.global, copy.shared, copy.size);
    }
    if (!is_shared(copy.shared)) {
        die("%s:%d: %s of %s to %p, which is not shared memory", place.file, place.line, place.what,
            who(), copy.shared);
    }
    if (me->copy_end - me->copy_first == COPY_MAX) {
        die("%s:%d: %s of %s: %d copies and no wait", place.file, place.line, place.what, who(),
            COPY_MAX);
    }
    *copy_at(me, me->copy_end++) = {copy, me->copy_group, {}};
}

void copies_read(const struct thread *thread)
{
    for (int i = thread->copy_first; i < thread->copy_end; ++i) {
        struct copy *const copy = copy_at(thread, i);
        memory_copy(copy->read, copy->what.global, static_cast<size_t>(copy->what.n));
        copy->what.global = copy->read;
    }
}

void cuda_host_copy_commit(void)
{
    self->copy_group++;
}

bool cuda_host_copy_next(int n, struct cuda_host_copy *copy)
{
    struct thread *const me = self;
    if (me->copy_first == me->copy_end) {
        return false;
    }
    const struct copy *const next = copy_at(me, me->copy_first);
    if (next->group >= me->copy_group - n) {
        return false;
    }
    *copy = next->what;
    me->copy_first++;
    return true;
}
