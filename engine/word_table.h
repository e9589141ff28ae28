/* Words by number and numbers by word: the vocabularies and the merge rules of text tokenizers. The
 * words' bytes are borrowed; the table is open addressing, at most half full. Filled once, then
 * read by any number of threads. */
#ifndef ENGINE_WORD_TABLE_H
#define ENGINE_WORD_TABLE_H

#include "kernels/err.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct word_entry {
    const char *text; /* Borrowed */
    uint32_t bytes;
};

struct word_table {
    struct word_entry *word; /* [n], Owner: this */
    int32_t n, max;
    int32_t *bucket; /* [bucket_mask + 1] numbers of words, -1 = free. Owner: this */
    uint32_t bucket_mask;
};

/* An empty table for up to max words, max < 2^29. what is named if there is no memory. */
enum err_code word_table_open(struct word_table *table, int32_t max, const char *what,
                              struct err *err);
void word_table_close(struct word_table *table); /* a zeroed table is fine */

/* The number of the word that text followed by suffix (NUL-terminated) spells; -1 = none. */
int32_t word_table_find(const struct word_table *table, const char *text, size_t bytes,
                        const char *suffix);
/* The number of the word, which is added if it is new. */
int32_t word_table_add(struct word_table *table, const char *text, size_t bytes);

#endif
