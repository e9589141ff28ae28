/* Rules that join two neighbouring symbols into one, in order of rank, and the queue of places
 * where one applies: what fastBPE's (bpe.h) and byte-level BPE (byte_bpe.h) have in common. The
 * rules are filled once, then read by any number of threads; a queue belongs to one text. */
#ifndef ENGINE_MERGES_H
#define ENGINE_MERGES_H

#include "kernels/err.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { MERGES_MAX = 1 << 22 };

struct merge {
    int32_t left, right, joined; /* symbols, at least 0 */
};

struct merges {
    struct merge *rule; /* [n], the first is applied first. Owner: this */
    int32_t n, max;
    int32_t *bucket; /* [bucket_mask + 1] numbers of rules, -1 = free. Owner: this */
    uint32_t bucket_mask;
};

/* Room for max rules, at most MERGES_MAX. what is named if there is no memory. */
enum err_code merges_open(struct merges *merges, int32_t max, const char *what, struct err *err);
void merges_close(struct merges *merges); /* a zeroed one is fine */

/* Adds a rule behind the others. Returns the number of an earlier rule for the same two, which then
 * stays alone, or -1. */
int32_t merges_add(struct merges *merges, struct merge rule);

/* The bucket of the rule for two neighbours, or the free one where it belongs. */
static inline uint32_t merges_bucket(const struct merges *merges, int32_t left, int32_t right)
{
    const uint64_t pair = (uint64_t)(uint32_t)left << 32 | (uint32_t)right;
    const uint64_t hash = pair * 0x9e3779b97f4a7c15u;
    uint32_t at = (uint32_t)(hash >> 32) & merges->bucket_mask;
    for (; merges->bucket[at] >= 0; at = (at + 1) & merges->bucket_mask) {
        const struct merge *const rule = &merges->rule[merges->bucket[at]];
        if (rule->left == left && rule->right == right) {
            break;
        }
    }
    return at;
}

/* The rule for two neighbours, -1 = none. */
static inline int32_t merges_find(const struct merges *merges, int32_t left, int32_t right)
{
    return merges->bucket[merges_bucket(merges, left, right)];
}

/* A place where a rule may apply: later joins may have made it void. */
struct merge_place {
    int32_t rule;
    uint32_t part; /* the left one */
};

struct merge_queue {
    struct merge_place *heap; /* Borrowed. The earliest rule first, then the leftmost part */
    size_t n;
};

void merge_queue_put(struct merge_queue *queue, struct merge_place place);
struct merge_place merge_queue_take(struct merge_queue *queue); /* queue->n > 0 */

#endif
