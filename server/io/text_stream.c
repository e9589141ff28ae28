/* The text of a continuation: see text_stream.h. */
#include "server/io/text_stream.h"

#include "engine/scoring.h"
#include "engine/tokenizer.h"

#include <stdlib.h>
#include <string.h>

bool text_stream_begin(struct text_stream *gen, const struct request *request,
                       const struct item *item, const struct tokenizer *tokenizer,
                       const struct end_ids *ends)
{
    *gen = (struct text_stream){
        .request = request, .item = item, .tokenizer = tokenizer, .ends = ends};
    if (tokenizer == NULL) {
        return true;
    }
    detok_begin(&gen->detok, tokenizer, false);
    if (item->n_ids > 0) {
        detok_follow(&gen->detok, item->ids[item->n_ids - 1]);
    }
    gen->detok.show_control = request->sampling.show_control;
    gen->buffer_max = tokenizer_bytes_max(tokenizer) + 16;
    gen->buffer = malloc(gen->buffer_max);
    return gen->buffer != NULL;
}

void text_stream_end(struct text_stream *gen)
{
    free(gen->buffer);
    gen->buffer = NULL;
    text_free(&gen->held);
}

static bool text_stream_may_end(const struct text_stream *gen, int32_t id)
{
    const struct sampling *const sampling = &gen->request->sampling;
    bool ends = end_ids_have(gen->ends, id);
    for (int i = 0; i < sampling->n_stop_id && !ends; i++) {
        ends = sampling->stop_id[i] == id;
    }
    return ends;
}

bool text_stream_ready(const struct text_stream *gen, int n_out, enum finish state)
{
    const int i = gen->n_token;
    return i < n_out && (i + 1 < n_out || state != FINISH_NONE ||
                         !text_stream_may_end(gen, gen->item->out_id[i]));
}

bool text_stream_undecided(const struct text_stream *gen, int n_out, enum finish state)
{
    return state == FINISH_NONE && gen->n_token == n_out &&
           (gen->matched || n_out == item_max_tokens(gen->request, gen->item));
}

/* Whether a stop string ends within the last n_new bytes that are held. */
static bool text_stream_match(const struct text_stream *gen, size_t n_new)
{
    const struct sampling *const sampling = &gen->request->sampling;
    for (int i = 0; i < sampling->n_stop; i++) {
        const size_t bytes = (size_t)sampling->stop[i].bytes;
        const size_t old = gen->held.n - n_new;
        /* A match that ends in the new bytes begins after this one. */
        const size_t from = old + 1 > bytes ? old + 1 - bytes : 0;
        if (gen->held.n > 0 && memmem(gen->held.data + from, gen->held.n - from,
                                      sampling->stop[i].text, bytes) != NULL) {
            return true;
        }
    }
    return false;
}

/* Length of the longest end of held that is a proper beginning of a stop string. */
static size_t text_stream_doubtful(const struct text_stream *gen)
{
    const struct sampling *const sampling = &gen->request->sampling;
    size_t longest = 0;
    for (int i = 0; i < sampling->n_stop; i++) {
        const size_t bytes = (size_t)sampling->stop[i].bytes;
        size_t n = bytes - 1 < gen->held.n ? bytes - 1 : gen->held.n;
        for (; n > longest; n--) {
            if (memcmp(gen->held.data + gen->held.n - n, sampling->stop[i].text, n) == 0) {
                longest = n;
            }
        }
    }
    return longest;
}

static void text_stream_give(struct text_stream *gen, size_t n, struct text *out)
{
    if (n > 0) {
        text_add(out, gen->held.data, n);
        memmove(gen->held.data, gen->held.data + n, gen->held.n - n);
        gen->held.n -= n;
        gen->n_out_byte += (int64_t)n;
    }
}

int64_t text_stream_push(struct text_stream *gen, enum finish state, int n_out, struct text *out)
{
    const struct item *const item = gen->item;
    const struct sampling *const sampling = &gen->request->sampling;
    const int i = gen->n_token++;
    int64_t offset = gen->tokenizer != NULL ? gen->n_char : -1;
    const bool stops = state == FINISH_STOP && item->stop_id >= 0 && i + 1 == n_out;
    gen->n_fresh = 0;
    if (gen->tokenizer == NULL || (stops && !sampling->include_stop)) {
        return offset;
    }
    const size_t n = detok_push(&gen->detok, item->out_id[i], gen->buffer, gen->buffer_max);
    gen->n_fresh = n;
    offset += gen->detok.n_before;
    gen->n_char += text_count_chars(gen->buffer, n);
    text_add(&gen->held, gen->buffer, n);
    if (gen->held.failed) {
        out->failed = true;
        return offset;
    }
    /* The engine honours a match from the min_tokens-th token on. */
    gen->matched = gen->matched || (i + 1 >= sampling->min_tokens && text_stream_match(gen, n));
    if (!gen->matched) {
        text_stream_give(gen, gen->held.n - text_stream_doubtful(gen), out);
    }
    return offset;
}

void text_stream_flush(struct text_stream *gen, struct text *out)
{
    const struct item *const item = gen->item;
    if (gen->tokenizer == NULL) {
        return;
    }
    if (item->stop_string >= 0) {
        const struct sampling *const sampling = &gen->request->sampling;
        int64_t end = item->stop_begin - gen->n_out_byte;
        end += sampling->include_stop ? sampling->stop[item->stop_string].bytes : 0;
        CHECK(end >= 0);
        text_stream_give(gen, (size_t)end < gen->held.n ? (size_t)end : gen->held.n, out);
        return;
    }
    text_stream_give(gen, gen->held.n, out);
    /* Not in buffer: the event that ends a choice tells the last token's characters as well. */
    char wrong[3 * sizeof gen->detok.held];
    const size_t n = detok_end(&gen->detok, wrong, sizeof wrong);
    gen->n_char += text_count_chars(wrong, n);
    gen->n_out_byte += (int64_t)n;
    text_add(out, wrong, n);
}
