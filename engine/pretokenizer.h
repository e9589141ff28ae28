/* The patterns by which byte-level BPE cuts a text into pieces before it merges. In the files they
 * are regular expressions; here each is a scanner written by hand, and a file whose expression is
 * not one of these is refused: another one gives other ids. The pieces cover the text without gaps,
 * and cutting a whole text takes linear time. */
#ifndef ENGINE_PRETOKENIZER_H
#define ENGINE_PRETOKENIZER_H

#include <stdbool.h>
#include <stddef.h>

enum pretokenizer {
    PRETOKENIZER_GPT2,
    PRETOKENIZER_LLAMA3,
    PRETOKENIZER_QWEN2,  /* and Qwen3 */
    PRETOKENIZER_QWEN35, /* Qwen3.5: marks belong to words */
    PRETOKENIZER_DIGITS, /* GPT-2's, each digit a piece of its own: SmolLM. Not an expression but a
                          * step before it */
    N_PRETOKENIZER,
};

/* The expression of the first four, as files spell it. */
const char *pretokenizer_pattern(enum pretokenizer kind);

/* The end of the piece that begins at text[at], at < bytes. text is valid UTF-8: a whole text, or
 * what lies between two added tokens, whose end is then the end of the text for the pattern. */
size_t pretokenizer_end(enum pretokenizer kind, const char *text, size_t bytes, size_t at);

#endif
