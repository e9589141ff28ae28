/* "memory": "slots", which slots the positions of a text read: the field "memory_slots" of
 * requests, and the blocks of answers. */
#ifndef SERVER_SLOTS_H
#define SERVER_SLOTS_H

#include "server/io/input.h"
#include "server/json/text.h"

/* Which part is told. */
struct slots_wish {
    int64_t start;     /* the first position of the text */
    uint64_t memories; /* bit m: memory m */
    bool weights;      /* of arrays */
    int top;           /* this many slots in place of arrays; 0 = arrays */
};

enum {
    SLOTS_TOP_MAX = 4096,
    SLOTS_TOP_BYTES = 48, /* of a slot in the list: more than its text, counted as base64 */
};

/* Reads "memory_slots"; memory is what "memory" said. */
void slots_read(struct fields *fields, const struct api_limits *limits, enum input_memory memory,
                struct slots_wish *wish);
/* Bytes of what is sent about a text of n positions: its arrays, before base64, or the list. */
int64_t slots_bytes(const struct slots_wish *wish, const struct model_info *info, int64_t n);
/* The slots of this request take these bytes or more, above the limit: sets the error. Returns
 * false. */
bool slots_too_large(struct api_error *error, int64_t bytes, const struct api_limits *limits);
/* The bytes that these take in an answer, in base64: to be counted with its results. */
static inline int64_t slots_text_bytes(int64_t bytes)
{
    return (bytes + 2) / 3 * 4;
}

/* The position of the text that the item's trace begins with. */
int64_t slots_first(const struct request *request, const struct item *item);

/* Words on their way into a JSON string. */
struct base64 {
    uint64_t bits; /* the last n_bit of them are not yet encoded: base64 takes 24 at a time */
    int n_bit;
};

/* "slots":[...] on its way into an answer: a block for each shape of memory. */
struct slots_writer {
    const struct request *request; /* Borrowed, like the next three */
    const struct item *item;
    const struct model_info *info;
    const struct slots_wish *wish;
    enum { SLOTS_OVER, SLOTS_BEGIN, SLOTS_BLOCK, SLOTS_INDICES, SLOTS_WEIGHTS } next;
    int64_t first, end; /* positions of the trace */
    uint64_t told;      /* memories whose blocks are begun */

    /* The block that is open, and its array. */
    int memory[MODEL_PKM_MAX]; /* [n_memory] all of the same shape */
    int n_memory;
    int64_t n_hit;    /* of a position in one memory */
    int64_t position; /* the next one of the array */
    struct base64 base64;
};
/* Positions from .. end-1 of the item's text, as far as they are wanted, which the engine has
 * traced. Without any, nothing if is_part, else empty. */
void slots_begin(struct slots_writer *writer, const struct request *request,
                 const struct item *item, const struct model_info *info,
                 const struct slots_wish *wish, int64_t from, int64_t end, bool is_part);
/* Goes on until out holds enough bytes, or next is SLOTS_OVER. false: error. */
bool slots_next(struct slots_writer *writer, struct text *out, size_t enough,
                struct api_error *error);

#endif
