/* A vocabulary file: UTF-8, one word per line, the line's number (from 0) is the id. Also the
 * bounded reading of such a file, which the merge rules (bpe.h) share. */
#ifndef ENGINE_VOCAB_H
#define ENGINE_VOCAB_H

#include "engine/word_table.h"

enum { VOCAB_WORD_BYTES_MAX = 4096 };

struct vocab {
    char *text; /* Owner: this. The file, each line ended by NUL */
    struct word_table table;
};

/* Makes of text (malloc'd, bytes + 1 of it, its owner from here on even if this fails) a vocabulary
 * of n_word words; path is only named in errors. Refused are an empty line, a word twice, NUL, CR
 * and bytes that are not UTF-8. */
enum err_code vocab_parse(struct vocab *vocab, char *text, size_t bytes, const char *path,
                          int n_word, struct err *err);
void vocab_close(struct vocab *vocab); /* a zeroed vocabulary is fine */

#endif
