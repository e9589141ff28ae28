/* Memory traces in the answers of /generate and /score, piece by piece. */
#ifndef SERVER_ANSWER_MEMORY_H
#define SERVER_ANSWER_MEMORY_H

#include "server/io/slots.h"

/* Look-ups whose statistics take a thread some 20 ms: where a piece of an answer has so many, it is
 * long enough. */
enum { ANSWER_PIECE_LOOKUPS = 1 << 20 };

/* Of all memories, for one item; 0 where none were kept. */
int64_t answer_lookups(const struct item *item, const struct model_info *info);

/* "memory":{...} on its way into an answer. */
struct answer_memory {
    const struct item *item;       /* Borrowed */
    const struct model_info *info; /* Borrowed */
    enum {
        ANSWER_MEMORY_OVER,
        ANSWER_MEMORY_BEGIN,
        ANSWER_MEMORY_LAYER,
        ANSWER_MEMORY_POSITION,
        ANSWER_MEMORY_SLOTS
    } next;
    bool layers;      /* has "layers" */
    bool tokens;      /* each with "tokens" */
    int layer;        /* the next one, or the open one */
    int64_t position; /* its next one */
    struct slots_writer slots;
};
/* "layers" of an item that is over; with MEMORY_SLOTS "slots" too, for the positions from `from`
 * on: a stream has already sent those before. */
void answer_memory_begin(struct answer_memory *writer, const struct request *request,
                         const struct item *item, const struct model_info *info,
                         enum input_memory memory, const struct slots_wish *slots, int64_t from);
/* "slots" alone, of positions from .. end-1, if there are any. */
void answer_memory_begin_part(struct answer_memory *writer, const struct request *request,
                              const struct item *item, const struct model_info *info,
                              const struct slots_wish *slots, int64_t from, int64_t end);
/* Goes on until out holds enough bytes, or next is ANSWER_MEMORY_OVER. false: error. */
bool answer_memory_next(struct answer_memory *writer, struct text *out, size_t enough,
                        struct api_error *error);

#endif
