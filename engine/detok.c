/* Ids to text, one at a time, for every kind of tokenizer: see tokenizer.h.
 *
 * Tokens are bytes; text is characters. Bytes of an unfinished character are held back until the
 * next token completes it or proves it wrong. Wrong bytes become U+FFFD: each of them, as in
 * SentencePiece's own decoding, or, where the tokenizer says so, each longest beginning of a
 * character, as by the Unicode Standard. tokenizer_decode is a detok over the whole list, so both
 * always agree. */
#include "engine/tokenizer_impl.h"
#include "kernels/utf8.h"

#include <stdlib.h>
#include <string.h>

static const char replacement[] = "\xef\xbf\xbd"; /* U+FFFD */

void detok_begin(struct detok *detok, const struct tokenizer *tokenizer, bool at_start)
{
    *detok = (struct detok){.tokenizer = tokenizer,
                            .at_start = at_start && tokenizer_dummy_prefix(tokenizer)};
}

void detok_follow(struct detok *detok, int32_t id)
{
    /* After a control token a line or a text begins. */
    detok->at_start =
        tokenizer_joins(detok->tokenizer, id) ||
        (tokenizer_dummy_prefix(detok->tokenizer) && tokenizer_is_control(detok->tokenizer, id));
}

static size_t put(char *out, size_t out_max, size_t n, const char *text, size_t bytes)
{
    CHECK(bytes <= out_max && n <= out_max - bytes);
    memcpy(out + n, text, bytes);
    return n + bytes;
}

/* Moves the complete characters of held + bytes to out and holds the rest. */
static size_t push_bytes(struct detok *detok, const char *bytes, size_t n_byte, char *out,
                         size_t out_max)
{
    size_t n = 0;
    size_t at = 0;
    while (at < n_byte) {
        /* One character may begin in held: look at up to four bytes over the border. */
        char head[8];
        const size_t n_held = (size_t)detok->n_held;
        const size_t n_new =
            n_byte - at < sizeof head - n_held ? n_byte - at : sizeof head - n_held;
        memcpy(head, detok->held, n_held);
        memcpy(head + n_held, bytes + at, n_new);
        const struct utf8_char c = utf8_next(head, n_held + n_new);
        const bool maximal = c.status == UTF8_INVALID && detok->tokenizer->maximal_repair;
        const size_t width = (size_t)(maximal ? c.part : c.bytes);
        if (c.status == UTF8_CUT) { /* all of it: nothing follows */
            memcpy(detok->held, head, width);
            detok->n_held = c.bytes;
            break;
        }
        n = c.status == UTF8_CHAR ? put(out, out_max, n, head, width)
                                  : put(out, out_max, n, replacement, 3);
        detok->n_before += width <= n_held;
        if (width >= n_held) {
            at += width - n_held;
            detok->n_held = 0;
        } else { /* the first held byte was wrong: drop it and look again */
            memmove(detok->held, detok->held + width, n_held - width);
            detok->n_held -= (int)width;
        }
    }
    return n;
}

size_t detok_push(struct detok *detok, int32_t id, char *out, size_t out_max)
{
    const struct tokenizer *const t = detok->tokenizer;
    CHECK(out_max >= t->bytes_max + 16 && id >= 0 && id < t->n_piece);
    detok->n_before = 0;
    const struct piece *const piece = &t->piece[id];
    const char *bytes = piece->bytes;
    size_t n_byte = piece->n_byte;
    bool space = piece->space;
    if (piece->control) {
        bytes = piece->text;
        n_byte = detok->show_control ? strlen(piece->text) : 0;
        space = false;
    }
    if (n_byte == 0 && !space) {
        return 0;
    }
    if (detok->at_start && !space && bytes[0] == ' ') {
        bytes++;
        n_byte--;
    }
    size_t n = space && !detok->at_start ? push_bytes(detok, " ", 1, out, out_max) : 0;
    n += push_bytes(detok, bytes, n_byte, out + n, out_max - n);
    detok->at_start = piece->joins;
    return n;
}

size_t detok_end(struct detok *detok, char *out, size_t out_max)
{
    size_t n = 0;
    /* What is held is one beginning of a character. */
    const int n_wrong = detok->tokenizer->maximal_repair && detok->n_held > 0 ? 1 : detok->n_held;
    for (int i = 0; i < n_wrong; i++) {
        n = put(out, out_max, n, replacement, 3);
    }
    detok->n_held = 0;
    return n;
}

enum err_code tokenizer_decode(const struct tokenizer *tokenizer, const int32_t *ids, size_t n_ids,
                               char **text, size_t *text_bytes, struct err *err)
{
    *text = NULL;
    *text_bytes = 0;
    const size_t room = tokenizer_bytes_max(tokenizer) + 16;
    struct detok detok;
    detok_begin(&detok, tokenizer, true);
    size_t n_max = 0;
    size_t n = 0;
    char *grown = NULL;
    for (size_t i = 0; i <= n_ids; i++) {
        if (n_max - n < room + 1) {
            const size_t want = 2 * n_max + 4 * room;
            char *const more = want > n_max ? realloc(grown, want) : NULL;
            if (more == NULL) {
                free(grown);
                return err_set(err, ERR_MEMORY, "no memory for the text of %zu tokens", n_ids);
            }
            grown = more;
            n_max = want;
        }
        n += i < n_ids ? detok_push(&detok, ids[i], grown + n, n_max - n - 1)
                       : detok_end(&detok, grown + n, n_max - n - 1);
    }
    grown[n] = '\0';
    *text = grown;
    *text_bytes = n;
    return ERR_OK;
}
