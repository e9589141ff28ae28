/* See merges.h. */
#include "engine/merges.h"

#include <stdlib.h>
#include <string.h>

enum err_code merges_open(struct merges *merges, int32_t max, const char *what, struct err *err)
{
    CHECK(max >= 0 && max <= MERGES_MAX);
    uint32_t n_bucket = 2;
    while (n_bucket < 2 * (uint32_t)max) {
        n_bucket *= 2;
    }
    *merges = (struct merges){.max = max, .bucket_mask = n_bucket - 1};
    merges->rule = calloc((size_t)max + 1, sizeof *merges->rule);
    merges->bucket = malloc(n_bucket * sizeof *merges->bucket);
    if (merges->rule == NULL || merges->bucket == NULL) {
        merges_close(merges);
        return err_set(err, ERR_MEMORY, "%s: no memory for %d rules", what, max);
    }
    memset(merges->bucket, 0xff, n_bucket * sizeof *merges->bucket); /* all -1 */
    return ERR_OK;
}

void merges_close(struct merges *merges)
{
    free(merges->rule);
    free(merges->bucket);
    *merges = (struct merges){0};
}

int32_t merges_add(struct merges *merges, struct merge rule)
{
    const uint32_t bucket = merges_bucket(merges, rule.left, rule.right);
    if (merges->bucket[bucket] >= 0) {
        return merges->bucket[bucket];
    }
    CHECK(merges->n < merges->max);
    merges->rule[merges->n] = rule;
    merges->bucket[bucket] = merges->n++;
    return -1;
}

/* ---- the queue ----------------------------------------------------------------------------- */

static bool is_before(struct merge_place a, struct merge_place b)
{
    return a.rule != b.rule ? a.rule < b.rule : a.part < b.part;
}

void merge_queue_put(struct merge_queue *queue, struct merge_place place)
{
    size_t at = queue->n++;
    while (at > 0 && is_before(place, queue->heap[(at - 1) / 2])) {
        queue->heap[at] = queue->heap[(at - 1) / 2];
        at = (at - 1) / 2;
    }
    queue->heap[at] = place;
}

struct merge_place merge_queue_take(struct merge_queue *queue)
{
    const struct merge_place first = queue->heap[0];
    const struct merge_place last = queue->heap[--queue->n];
    size_t at = 0;
    for (size_t child = 1; child < queue->n; child = 2 * at + 1) {
        if (child + 1 < queue->n && is_before(queue->heap[child + 1], queue->heap[child])) {
            child++;
        }
        if (!is_before(queue->heap[child], last)) {
            break;
        }
        queue->heap[at] = queue->heap[child];
        at = child;
    }
    queue->heap[at] = last;
    return first;
}
