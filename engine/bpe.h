/* Byte-pair encoding as fastBPE applies it: a word is its characters, the last one marked "</w>";
 * of all neighbours that have a rule, those of the earliest rule are joined, from left to right,
 * until none has one. The rules are a codes file, "left right count" in each line.
 *
 * The rules are immutable after parsing; the scratch belongs to one encoding. A word of n
 * characters takes n log n steps, so that no bound on its length is needed. */
#ifndef ENGINE_BPE_H
#define ENGINE_BPE_H

#include "kernels/err.h"

#include <stddef.h>
#include <stdint.h>

struct bpe;

/* Takes text (malloc'd, bytes of it) as vocab_parse does. An error names the line: not three
 * fields, a rule twice, or a part longer than one character that no earlier line makes. */
enum err_code bpe_parse(struct bpe **bpe, char *text, size_t bytes, const char *path,
                        struct err *err);
void bpe_close(struct bpe *bpe); /* NULL is fine */

/* What one thread needs to split words; begins zeroed. */
struct bpe_scratch {
    struct bpe_part *part;    /* Owner: this */
    struct merge_place *heap; /* Owner: this */
    size_t part_max;
    size_t *end; /* the result: the byte after each piece. Owner: this */
    size_t n_piece;
};

/* Splits the word, valid UTF-8 of bytes >= 1, into scratch->end[0 .. n_piece). */
enum err_code bpe_split(const struct bpe *bpe, struct bpe_scratch *scratch, const char *word,
                        size_t bytes, struct err *err);
void bpe_scratch_free(struct bpe_scratch *scratch);

#endif
