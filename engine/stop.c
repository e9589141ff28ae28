/* Stop strings: see stop.h. */
#include "engine/stop.h"

#include <string.h>

void stop_begin(struct stop_scan *scan, const struct sampling *sampling,
                const struct tokenizer *tokenizer)
{
    scan->sampling = sampling;
    scan->n_byte = 0;
    scan->n_tail = 0;
    if (tokenizer != NULL) {
        detok_begin(&scan->detok, tokenizer, false);
        scan->detok.show_control = sampling->show_control;
    }
    CHECK(tokenizer != NULL || sampling->n_stop == 0);
}

static void push_byte(struct stop_scan *scan, char byte)
{
    if (scan->n_tail == (int)sizeof scan->tail) {
        const int keep = STOP_BYTES_MAX; /* no match is longer */
        memmove(scan->tail, scan->tail + scan->n_tail - keep, (size_t)keep);
        scan->n_tail = keep;
    }
    scan->tail[scan->n_tail++] = byte;
    scan->n_byte++;
}

/* The match that ends with the last byte. */
static struct stop_match match_here(const struct stop_scan *scan)
{
    struct stop_match best = {.index = -1};
    int best_bytes = 0;
    for (int i = 0; i < scan->sampling->n_stop; i++) {
        const int bytes = scan->sampling->stop[i].bytes;
        const char *const text = scan->sampling->stop[i].text;
        if (bytes > best_bytes && bytes <= scan->n_tail &&
            memcmp(scan->tail + scan->n_tail - bytes, text, (size_t)bytes) == 0) {
            best_bytes = bytes;
            best = (struct stop_match){.index = i, .begin = scan->n_byte - bytes};
        }
    }
    return best;
}

struct stop_match stop_push_text(struct stop_scan *scan, const char *text, size_t bytes, bool count)
{
    for (size_t i = 0; i < bytes; i++) {
        push_byte(scan, text[i]);
        const struct stop_match match = match_here(scan);
        if (count && match.index >= 0) {
            return match;
        }
    }
    return (struct stop_match){.index = -1};
}

struct stop_match stop_push(struct stop_scan *scan, int32_t token, bool count, char *buffer,
                            size_t buffer_max)
{
    if (scan->sampling->n_stop == 0) {
        return (struct stop_match){.index = -1};
    }
    const size_t bytes = detok_push(&scan->detok, token, buffer, buffer_max);
    return stop_push_text(scan, buffer, bytes, count);
}
