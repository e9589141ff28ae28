/* What Unicode 16.0 says of a code point, as the patterns of byte-level BPE ask for it (letter,
 * number, mark or white space) and as its `single_word` tokens do (part of a word). The C library's
 * own classes depend on the locale and lack most of Unicode. The table (unicode_table.c) is made by
 * unicode_tables.py. */
#ifndef ENGINE_UNICODE_H
#define ENGINE_UNICODE_H

#include <stdbool.h>
#include <stdint.h>

enum unicode_class {
    UNICODE_OTHER,  /* punctuation, symbols, controls, and what is not assigned */
    UNICODE_LETTER, /* \p{L} */
    UNICODE_NUMBER, /* \p{Nd} and \p{Nl} */
    UNICODE_MARK,   /* \p{M} */
    UNICODE_SPACE,  /* \s, the property White_Space: U+0085 and U+3000, not U+001C or U+200B */
    UNICODE_OTHER_NUMBER, /* \p{No}, no part of words: fractions, raised digits */
    UNICODE_JOINER,       /* part of words beside those above: "_", U+200D, letters in circles */
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

/* \w as UTS #18 defines it: the properties Alphabetic and Join_Control, \p{M}, \p{Nd}, \p{Pc}. */
static inline bool unicode_is_word(uint32_t code)
{
    const unsigned words =
        1u << UNICODE_LETTER | 1u << UNICODE_NUMBER | 1u << UNICODE_MARK | 1u << UNICODE_JOINER;
    return (words >> unicode_class(code) & 1) != 0;
}

#endif
