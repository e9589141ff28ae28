/* See pretokenizer.h. The rules are the alternatives of the expressions in their order: the first
 * that matches at a place decides. Letters, numbers, marks and white space are those of unicode.h.
 * Only the length of a run is unbounded; beyond a run at most one character is looked at. */
#include "engine/pretokenizer.h"
#include "engine/unicode.h"
#include "kernels/utf8.h"

#include <string.h>

const char *pretokenizer_pattern(enum pretokenizer kind)
{
    switch (kind) {
    case PRETOKENIZER_GPT2:
        return "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+";
    case PRETOKENIZER_LLAMA3:
        return "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}|"
               " ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+";
    case PRETOKENIZER_QWEN2:
        return "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}|"
               " ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+";
    case PRETOKENIZER_QWEN35:
        return "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?[\\p{L}\\p{M}]+|\\p{N}|"
               " ?[^\\s\\p{L}\\p{M}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+";
    default: return NULL;
    }
}

/* Sets of classes. */
enum {
    LETTERS = 1 << UNICODE_LETTER,
    NUMBERS = 1 << UNICODE_NUMBER | 1 << UNICODE_OTHER_NUMBER,
    MARKS = 1 << UNICODE_MARK,
    OTHERS = 1 << UNICODE_OTHER | 1 << UNICODE_JOINER,
    SPACES = 1 << UNICODE_SPACE,
    NOTHING = 0, /* behind the end of the text */
};

struct glyph {
    unsigned set; /* its class, or the one of the sets above that has it; or NOTHING */
    size_t bytes;
};

static inline struct glyph glyph_at(const char *text, size_t bytes, size_t at)
{
    if (at >= bytes) {
        return (struct glyph){NOTHING, 0};
    }
    const unsigned char c = (unsigned char)text[at];
    if (c >= 0x80) {
        const struct utf8_char u = utf8_next(text + at, bytes - at);
        return (struct glyph){1u << unicode_class(u.code), (size_t)u.bytes};
    }
    const unsigned set = (unsigned)((c | 0x20) - 'a') < 26 ? LETTERS
                         : (unsigned)(c - '0') < 10        ? NUMBERS
                         : c == ' ' || (c >= 9 && c <= 13) ? SPACES
                                                           : OTHERS;
    return (struct glyph){set, 1};
}

/* The end of the run of characters of the set, which begins at at. */
static size_t run_end(const char *text, size_t bytes, size_t at, unsigned set)
{
    for (;;) {
        const struct glyph g = glyph_at(text, bytes, at);
        if (!(g.set & set)) {
            return at;
        }
        at += g.bytes;
    }
}

static bool is_newline(const char *text, size_t bytes, size_t at)
{
    return at < bytes && (text[at] == '\r' || text[at] == '\n');
}

/* 's 't 'm 'd 're 've 'll at text[at]: their end, or at. In any case the long s is an s too. */
static size_t contraction_end(const char *text, size_t bytes, size_t at, bool any_case)
{
    if (text[at] != '\'' || at + 1 >= bytes) {
        return at;
    }
    const int fold = any_case ? 0x20 : 0;
    const int a = text[at + 1] | fold;
    const int b = at + 2 < bytes ? text[at + 2] | fold : 0;
    if (a == 's' || a == 't' || a == 'm' || a == 'd') {
        return at + 2;
    }
    if ((a == 'r' && b == 'e') || (a == 'v' && b == 'e') || (a == 'l' && b == 'l')) {
        return at + 3;
    }
    return any_case && at + 2 < bytes && memcmp(text + at + 1, "\xc5\xbf", 2) == 0 ? at + 3 : at;
}

/* White space: all of the run at the text's end or if it is one character, else all but its last
 * character, which belongs to the piece that follows. A run that ends at a character of `follows`
 * counts as at the end, too. */
static size_t spaces_end(const char *text, size_t bytes, size_t at, unsigned closed)
{
    size_t last = at;
    size_t end = at;
    for (;;) {
        const struct glyph g = glyph_at(text, bytes, end);
        if (!(g.set & SPACES)) {
            return g.set == NOTHING || (g.set & closed) || last == at ? end : last;
        }
        last = end;
        end += g.bytes;
    }
}

static size_t gpt2_end(const char *text, size_t bytes, size_t at, bool digits)
{
    const size_t end = contraction_end(text, bytes, at, false);
    if (end > at) {
        return end;
    }
    const size_t word = text[at] == ' ' ? at + 1 : at;
    const struct glyph g = glyph_at(text, bytes, word);
    const unsigned runs[] = {LETTERS, NUMBERS, OTHERS | MARKS};
    for (int i = 0; i < 3; i++) {
        if (!(g.set & runs[i])) {
            continue;
        }
        if (digits && runs[i] == NUMBERS) {
            return word == at ? at + g.bytes : word;
        }
        return run_end(text, bytes, word, runs[i]);
    }
    return spaces_end(text, bytes, at, digits ? NUMBERS : NOTHING);
}

/* Llama 3's pattern and Qwen's: numbers of at most n_digit, words of the set word. */
static size_t llama_end(const char *text, size_t bytes, size_t at, int n_digit, unsigned word)
{
    const size_t end = contraction_end(text, bytes, at, true);
    if (end > at) {
        return end;
    }
    const struct glyph g = glyph_at(text, bytes, at);
    if (g.set & word) {
        return run_end(text, bytes, at, word);
    }
    if (g.set & NUMBERS) {
        size_t number = at + g.bytes;
        for (int i = 1; i < n_digit; i++) {
            const struct glyph next = glyph_at(text, bytes, number);
            number += next.set & NUMBERS ? next.bytes : 0;
        }
        return number;
    }
    if (!is_newline(text, bytes, at) && (glyph_at(text, bytes, at + g.bytes).set & word)) {
        return run_end(text, bytes, at + g.bytes, word);
    }
    const unsigned others = (OTHERS | MARKS) & ~word;
    const size_t other = text[at] == ' ' ? at + 1 : at;
    size_t stop = run_end(text, bytes, other, others);
    if (stop > other) {
        while (is_newline(text, bytes, stop)) {
            stop++;
        }
        return stop;
    }
    const size_t run = run_end(text, bytes, at, SPACES);
    for (stop = run; stop > at && !is_newline(text, bytes, stop - 1);) {
        stop--;
    }
    return stop > at ? stop : spaces_end(text, bytes, at, NOTHING);
}

size_t pretokenizer_end(enum pretokenizer kind, const char *text, size_t bytes, size_t at)
{
    switch (kind) {
    case PRETOKENIZER_LLAMA3: return llama_end(text, bytes, at, 3, LETTERS);
    case PRETOKENIZER_QWEN2: return llama_end(text, bytes, at, 1, LETTERS);
    case PRETOKENIZER_QWEN35: return llama_end(text, bytes, at, 1, LETTERS | MARKS);
    default: return gpt2_end(text, bytes, at, kind == PRETOKENIZER_DIGITS);
    }
}
