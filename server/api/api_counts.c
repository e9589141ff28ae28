/* GET /memory/counts: how often each slot was read since the start, as a file of counts
 * (models/counts.h). It is written in pieces, so that a large table is never in memory as a
 * whole. */
#include "engine/pkm_counts.h"
#include "server/api/routes.h"

#include <stdlib.h>

/* Where the next piece begins. */
struct counts_work {
    struct engine *engine; /* Borrowed */
    struct counts head;
    int m, part;
    int64_t slot;
};

enum { PIECE_SLOTS = ANSWER_PIECE_BYTES / 8 };

static void counts_gone(void *data)
{
    (void)data; /* there is nothing to stop: the next piece is not sent */
}

/* Adds the next slots; false: there are no more. */
static bool counts_piece(struct counts_work *work, struct text *out)
{
    int64_t numbers[PIECE_SLOTS];
    if (work->m == work->head.n_memory) {
        return false;
    }
    const int64_t left = work->head.memory[work->m].n_slot - work->slot;
    const int64_t n = left < PIECE_SLOTS ? left : PIECE_SLOTS;
    pkm_counts_copy(engine_counts(work->engine), &work->head, work->m,
                    (enum pkm_counts_part)work->part, work->slot, n, numbers);
    text_add(out, (const char *)numbers, (size_t)n * sizeof *numbers);
    work->slot += n;
    if (n == left) {
        work->slot = 0;
        work->part = (work->part + 1) % COUNTS_PART_N;
        work->m += work->part == 0;
    }
    return true;
}

static enum exchange_next counts_next(struct exchange *x, void *data)
{
    struct counts_work *const work = data;
    x->status = 200;
    x->content_type = "application/octet-stream";
    return counts_piece(work, &x->out) ? EXCHANGE_STREAM : EXCHANGE_END;
}

static const struct exchange_work counts_ops = {
    .next = counts_next, .gone = counts_gone, .free = free};

void api_counts(struct server *server, struct exchange *x)
{
    struct engine *const engine = atomic_load(&server->engine);
    const struct pkm_counts *const counts = engine_counts(engine);
    if (counts == NULL) {
        exchange_refuse(x, 404, "counts_disabled", NULL,
                        server->limits.info->n_memory == 0
                            ? "the model has no memories whose slots could be counted"
                            : "slots are not counted: start the server with --memory-counts on");
        return;
    }
    struct counts_work *const work = calloc(1, sizeof *work);
    char *header = NULL;
    size_t bytes = 0;
    if (work != NULL) {
        work->engine = engine;
        pkm_counts_head(counts, server->limits.info, &work->head);
        header = counts_header(&work->head, &bytes, NULL);
    }
    if (header == NULL) {
        free(work);
        exchange_refuse(x, 500, "out_of_memory", NULL, "no memory for the counts");
        return;
    }
    text_add(&x->out, header, bytes);
    free(header);
    x->work = &counts_ops;
    x->work_data = work;
}
