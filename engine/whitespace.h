/* Text as the authors' programs cut it: words between white space of any script, and line ends,
 * which are \n, \r\n or a lone \r and nothing else (spec of Unicode's White_Space plus the four
 * information separators, without U+200B). */
#ifndef ENGINE_WHITESPACE_H
#define ENGINE_WHITESPACE_H

#include "kernels/utf8.h"

static inline bool whitespace_is(uint32_t code)
{
    if (code < 0x80) {
        return (code >= 0x09 && code <= 0x0d) || (code >= 0x1c && code <= 0x20);
    }
    return code == 0x85 || code == 0xa0 || code == 0x1680 || (code >= 0x2000 && code <= 0x200a) ||
           code == 0x2028 || code == 0x2029 || code == 0x202f || code == 0x205f || code == 0x3000;
}

struct whitespace_word {
    size_t first, end; /* bytes of the text */
    bool is_line_end;
};

/* The next word or line end of text, which is valid UTF-8, from *at on; false: only white space is
 * left. */
static inline bool whitespace_next(const char *text, size_t bytes, size_t *at,
                                   struct whitespace_word *word)
{
    bool inside = false;
    while (*at < bytes) {
        const struct utf8_char c = utf8_next(text + *at, bytes - *at);
        const bool is_space = whitespace_is(c.code);
        if (inside && is_space) {
            break;
        }
        if (!inside) {
            *word = (struct whitespace_word){.first = *at};
        }
        if (c.code == '\n' || c.code == '\r') {
            *at += c.code == '\r' && *at + 1 < bytes && text[*at + 1] == '\n' ? 2 : 1;
            word->end = *at;
            word->is_line_end = true;
            return true;
        }
        inside = inside || !is_space;
        *at += (size_t)c.bytes;
    }
    word->end = *at;
    return inside;
}

#endif
