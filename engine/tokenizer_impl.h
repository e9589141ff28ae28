/* What the kinds of tokenizer share: for tokenizer*.c and tokenizer_spm.cc only.
 *
 * A kind makes a table of pieces and an encode function; everything else of tokenizer.h is done by
 * tokenizer.c and detok.c on the table alone. The first member of a kind's own struct is a struct
 * tokenizer. */
#ifndef ENGINE_TOKENIZER_IMPL_H
#define ENGINE_TOKENIZER_IMPL_H

#include "engine/tokenizer.h"

/* How an id is spelled and what it adds to a text. */
struct piece {
    const char *text;  /* as the vocabulary spells it. Owner: the kind */
    const char *bytes; /* [n_byte] the text, without the space. Owner: the kind */
    uint32_t n_byte;
    bool control; /* adds nothing */
    bool named;   /* spelled by a name (<eos>) that as a text would be other tokens */
    bool space;   /* stands apart: a space comes before bytes, but not at the start of a text */
    bool joins;   /* what follows it does not stand apart: no space there */
};

/* The result of an encoding as it grows. */
struct encoding {
    int32_t *id;    /* Owner: this, until tokenizer_encode hands it out */
    size_t *offset; /* the same */
    size_t n, max;
    bool parse_special; /* special tokens that the text spells are their ids (byte-level BPE) */
};

/* false: no memory; nothing is lost. */
bool encoding_push(struct encoding *encoding, int32_t id, size_t offset);

struct tokenizer {
    char kind[40];
    struct piece *piece; /* [n_piece], Owner: this */
    int32_t n_piece;
    size_t bytes_max;
    bool dummy_prefix;
    bool maximal_repair; /* of bytes that are no character, the longest beginning of one becomes one
                          * U+FFFD, not each byte: Unicode's and WHATWG's rule */
    /* Valid UTF-8 to ids. ERR_MEMORY, or ERR_ARGUMENT for a text that the vocabulary cannot spell.
     */
    enum err_code (*encode)(const struct tokenizer *tokenizer, const char *text, size_t bytes,
                            struct encoding *out, struct err *err);
    void (*close)(struct tokenizer *tokenizer); /* frees all but the table of pieces */
};

/* The table of n pieces, zeroed; the kind fills it, then calls tokenizer_measure. */
enum err_code tokenizer_reserve(struct tokenizer *tokenizer, int n_piece, struct err *err);
void tokenizer_measure(struct tokenizer *tokenizer);

/* The kinds. path is the file; *tokenizer is NULL if it is missing and need not exist. */
enum err_code tokenizer_spm_open(struct tokenizer **tokenizer, const char *path, bool must_exist,
                                 int n_vocab, struct err *err);
enum err_code tokenizer_vocab_open(struct tokenizer **tokenizer, const char *path, const char *kind,
                                   int n_vocab, struct err *err);

/* Byte-level BPE: what kind of file path is, told by its content; no such file is BPE_FILE_OTHER.
 */
enum bpe_file_kind { BPE_FILE_OTHER, BPE_FILE_JSON, BPE_FILE_RANKS };
enum bpe_file_kind tokenizer_bpe_kind(const char *path);
/* Opens tokenizer.json, vocab.json with merges.txt (encoder.json with vocab.bpe) beside it, or a
 * rank file. */
enum err_code tokenizer_bpe_open(struct tokenizer **tokenizer, const char *path, int n_vocab,
                                 struct err *err);
/* The same from memory, for tests. merges NULL: there are none. All are borrowed for the call. */
struct bpe_source {
    const char *path, *text;
    size_t bytes;
    const char *merges_path, *merges;
    size_t merges_bytes;
};
enum err_code tokenizer_bpe_parse(struct tokenizer **tokenizer, const struct bpe_source *source,
                                  int n_vocab, struct err *err);

/* The same from memory, for the fuzzer: vocabulary and codes (NULL = none) are malloc'd and this
 * function's from here on, even if it fails. */
enum err_code tokenizer_vocab_parse(struct tokenizer **tokenizer, const char *kind,
                                    char *vocabulary, size_t vocabulary_bytes, char *codes,
                                    size_t codes_bytes, int n_vocab, struct err *err);

#endif
