/* Byte-level BPE of one piece: its UTF-8 bytes are tokens of one byte each; of all neighbours that
 * may be joined, those of lowest rank are, the leftmost first, until none may. This is the part
 * that GPT-2's, Llama 3's and Qwen's tokenizers share; files, pieces and added tokens are
 * tokenizer_bpe.h's.
 *
 * What may be joined is said by a list of merges, whose order is the rank, or (ranked) by the
 * tokens themselves: two neighbours may be joined if their bytes together are a token, and its id
 * is the rank. So does tiktoken.
 *
 * Filled once, then read by any number of threads; the scratch belongs to one encoding. A piece of
 * n bytes takes n log n steps, since one piece may be a whole text. */
#ifndef ENGINE_BYTE_BPE_H
#define ENGINE_BYTE_BPE_H

#include "engine/merges.h"
#include "engine/word_table.h"

enum { BYTE_BPE_WORD_MAX = 4096 /* bytes of a token */ };

struct byte_bpe {
    struct word_table words; /* the tokens as bytes, which are the caller's */
    int32_t *word_id;        /* [words.max] the token of each. Owner: this */
    bool *whole;             /* [words.max] a piece that is this word is this token. Owner: this */
    struct merges merges;    /* of tokens; none if ranked */
    bool ranked;
    bool ignore_merges;   /* a piece that is a token is this token, even if no merges lead to it */
    size_t longest;       /* token, in bytes */
    int32_t byte_id[256]; /* -1 = missing */
};

enum err_code byte_bpe_open(struct byte_bpe *bpe, int32_t n_word, int32_t n_merge, const char *path,
                            struct err *err);
void byte_bpe_close(struct byte_bpe *bpe); /* a zeroed one is fine */

/* The token of id is these bytes (1 to BYTE_BPE_WORD_MAX). false: another token is the same. */
bool byte_bpe_add(struct byte_bpe *bpe, const char *word, size_t bytes, int32_t id);
/* The token that is these bytes, -1 = none. */
int32_t byte_bpe_find(const struct byte_bpe *bpe, const char *word, size_t bytes);

/* When all tokens and merges are added: finds which tokens a piece may become at once. All 256
 * bytes must be tokens. */
enum err_code byte_bpe_finish(struct byte_bpe *bpe, struct err *err);

/* A part of a piece: of the result, a token. */
struct byte_bpe_part {
    int32_t id;
    uint32_t first;        /* byte of the piece */
    uint32_t before, next; /* used while splitting: its neighbours */
};

/* What one thread needs to split pieces; begins zeroed. */
struct byte_bpe_scratch {
    struct byte_bpe_part *part; /* [n] the result, of [part_max]. Owner: this */
    struct merge_place *heap;   /* [2 part_max] Owner: this */
    size_t n, part_max;
};

/* Splits the piece, 1 to UINT32_MAX - 1 bytes, into scratch. ERR_MEMORY is the only failure. */
enum err_code byte_bpe_split(const struct byte_bpe *bpe, struct byte_bpe_scratch *scratch,
                             const char *piece, size_t bytes, struct err *err);
void byte_bpe_scratch_free(struct byte_bpe_scratch *scratch);

#endif
