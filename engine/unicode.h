/* What Unicode 16.0 says of a code point, as the patterns of byte-level BPE ask for it: letter,
 * number, mark or white space. The C library's own classes depend on the locale and lack most of
 * Unicode. The table (unicode_table.c) is made by unicode_tables.py. */
#ifndef ENGINE_UNICODE_H
#define ENGINE_UNICODE_H

#include <stdbool.h>
#include <stdint.h>

enum unicode_class {
    UNICODE_OTHER,  /* punctuation, symbols, controls, and what is not assigned */
    UNICODE_LETTER, /* \p{L} */
    UNICODE_NUMBER, /* \p{N} */
    UNICODE_MARK,   /* \p{M} */
    UNICODE_SPACE,  /* \s, the property White_Space: U+0085 and U+3000, not U+001C or U+200B */
};

enum {
    UNICODE_CLASS_BITS = 7,
    UNICODE_UNSTABLE = 8, /* NFC may change it, or join it to what comes before: see nfc.h */
    UNICODE_TABLE_END = 0x32400,
};

/* Blocks of 64 code points; a block is four words of 16 code points, four bits each, the lowest
 * first. */
extern const uint16_t unicode_block[UNICODE_TABLE_END / 64];
extern const uint64_t unicode_word[];

/* The class and perhaps UNICODE_UNSTABLE. */
static inline unsigned unicode_bits(uint32_t code)
{
    if (code >= UNICODE_TABLE_END) { /* variation selectors are all that is assigned there */
        return code >= 0xe0100 && code <= 0xe01ef ? UNICODE_MARK : UNICODE_OTHER;
    }
    const uint64_t word = unicode_word[4u * unicode_block[code >> 6] + (code >> 4 & 3)];
    return (unsigned)(word >> 4 * (code & 15)) & 15u;
}

static inline enum unicode_class unicode_class(uint32_t code)
{
    return (enum unicode_class)(unicode_bits(code) & UNICODE_CLASS_BITS);
}

#endif
