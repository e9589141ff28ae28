/* The tokenizer of byte-level BPE as its parts see it: tokenizer_bpe.c encodes with it,
 * tokenizer_bpe_file.c fills it from the files. Not for others: they see tokenizer.h. */
#ifndef ENGINE_TOKENIZER_BPE_H
#define ENGINE_TOKENIZER_BPE_H

#include "engine/added_tokens.h"
#include "engine/byte_bpe.h"
#include "engine/pretokenizer.h"
#include "engine/tokenizer_impl.h"

struct bpe_tokenizer {
    struct tokenizer base;
    struct byte_bpe bpe;
    enum pretokenizer pretokenizer;
    bool nfc; /* texts are normalized before they are cut */
    /* Added tokens: those searched in the text as it came, and those searched when it is
     * normalized. */
    struct added_tokens raw, normalized; /* their arrays: Owner: this */
    char *strings; /* [strings_max] Owner: this. All texts and bytes of tokens */
    size_t n_string, strings_max;
    int32_t n_token; /* one more than the highest id that has a token */
};

/* An empty one with room for n_vocab ids, n_word tokens of the vocabulary, n_merge merges, n_added
 * added tokens and strings_max bytes of strings. Owner: the caller, by tokenizer_close, also if
 * this fails. */
enum err_code bpe_tokenizer_new(struct bpe_tokenizer **tokenizer, int n_vocab, size_t n_word,
                                size_t n_merge, size_t n_added, size_t strings_max,
                                const char *path, struct err *err);

/* The bytes that a token's spelling in the files stands for: a character for each, bytes 33 to 126,
 * 161 to 172 and 174 to 255 as the character of that number, the others, in their order, as U+0100
 * and so on. Writes at most spelling_bytes and returns their number; 0 if the spelling (valid
 * UTF-8) has another character. */
size_t bpe_bytes(char *out, const char *spelling, size_t spelling_bytes);
/* The reverse; out has room for twice the bytes. */
size_t bpe_spelling(char *out, const char *bytes, size_t n);

/* Told by the content; what is neither may be a SentencePiece model. The beginning of the file is
 * enough. */
enum bpe_file_kind bpe_file_kind(const char *text, size_t bytes);

/* Makes a tokenizer from a file's text: tokenizer.json, or vocab.json with merges, or a rank file.
 * *tokenizer is NULL on failure. Owner: the caller. */
enum err_code bpe_file_read(struct bpe_tokenizer **tokenizer, const struct bpe_source *source,
                            int n_vocab, struct err *err);

/* The same for a rank file alone; and whether a file begins like one. */
enum err_code bpe_ranks_read(struct bpe_tokenizer **tokenizer, const struct bpe_source *source,
                             int n_vocab, struct err *err);
bool bpe_ranks_begin(const char *text, size_t bytes);

/* Steps of the readers. */

/* Lines of a text; the last one may lack its line feed. */
size_t bpe_count_lines(const char *text, size_t bytes);

/* Gives the id a token of the vocabulary, spelled as in the files. */
enum err_code bpe_add_token(struct bpe_tokenizer *t, const char *spelling, int64_t id,
                            const char *path, struct err *err);
/* Adds an added token, searched for in the normalized text or in the text as it came. token.text is
 * copied. */
enum err_code bpe_add_added(struct bpe_tokenizer *t, struct added_token token, bool normalized,
                            const char *path, struct err *err);
/* When all is added: what every such tokenizer must have. */
enum err_code bpe_finish(struct bpe_tokenizer *t, const char *path, struct err *err);

#endif
