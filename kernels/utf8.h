/* One UTF-8 decoder for everything that walks text: counting, checking, detokenising. */
#ifndef KERNELS_UTF8_H
#define KERNELS_UTF8_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum utf8_status { UTF8_CHAR, UTF8_INVALID, UTF8_CUT /* a valid beginning, but text ends */ };

struct utf8_char {
    enum utf8_status status;
    uint32_t code; /* if UTF8_CHAR */
    int bytes;     /* consumed: the character's length, 1 if invalid, what is left if cut */
    int part;      /* if UTF8_INVALID: the longest beginning of some character, at least 1 */
};

/* Reads the character at text[0]; bytes >= 1. Strict: no overlong forms, no surrogates, nothing
 * above U+10FFFF. An invalid sequence consumes one byte, so each wrong byte counts by itself. */
static inline struct utf8_char utf8_next(const char *text, size_t bytes)
{
    const unsigned char *const t = (const unsigned char *)text;
    const struct utf8_char invalid = {UTF8_INVALID, 0, 1, 1};
    if (t[0] < 0x80) {
        return (struct utf8_char){UTF8_CHAR, t[0], 1, 0};
    }
    /* The second byte's range is what excludes overlong forms, surrogates and codes too large. */
    int n = 0;
    unsigned char low = 0x80;
    unsigned char high = 0xbf;
    uint32_t code = 0;
    if (t[0] >= 0xc2 && t[0] <= 0xdf) {
        n = 2;
        code = t[0] & 0x1fu;
    } else if (t[0] >= 0xe0 && t[0] <= 0xef) {
        n = 3;
        code = t[0] & 0x0fu;
        low = t[0] == 0xe0 ? 0xa0 : low;
        high = t[0] == 0xed ? 0x9f : high;
    } else if (t[0] >= 0xf0 && t[0] <= 0xf4) {
        n = 4;
        code = t[0] & 0x07u;
        low = t[0] == 0xf0 ? 0x90 : low;
        high = t[0] == 0xf4 ? 0x8f : high;
    } else {
        return invalid;
    }
    for (int i = 1; i < n; i++) {
        if ((size_t)i == bytes) {
            return (struct utf8_char){UTF8_CUT, 0, i, 0};
        }
        if (t[i] < low || t[i] > high) {
            return (struct utf8_char){UTF8_INVALID, 0, 1, i};
        }
        code = code << 6 | (t[i] & 0x3fu);
        low = 0x80;
        high = 0xbf;
    }
    return (struct utf8_char){UTF8_CHAR, code, n, 0};
}

/* Writes the character of code, which is one, and returns its 1 to 4 bytes' number. */
static inline int utf8_write(char out[4], uint32_t code)
{
    if (code < 0x80) {
        out[0] = (char)code;
        return 1;
    }
    const int n = code < 0x800 ? 2 : code < 0x10000 ? 3 : 4;
    for (int i = n - 1; i > 0; i--) {
        out[i] = (char)(0x80 | (code & 0x3f));
        code >>= 6;
    }
    out[0] = (char)((0xf0 << (4 - n) & 0xff) | (int)code);
    return n;
}

/* The offset of the first byte that is not part of a valid character; bytes if all is valid. */
static inline size_t utf8_valid_prefix(const char *text, size_t bytes)
{
    size_t at = 0;
    while (at < bytes) {
        const struct utf8_char c = utf8_next(text + at, bytes - at);
        if (c.status != UTF8_CHAR) {
            break;
        }
        at += (size_t)c.bytes;
    }
    return at;
}

#endif
