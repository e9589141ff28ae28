/* Text to token ids and back.
 *
 * A tokenizer is immutable after open and may be used by any number of threads at once. The
 * implementation for SentencePiece models is the project's one C++ file (tokenizer_spm.cc), because
 * that library has no C interface; no exception leaves it. Vocabularies that are a list of words,
 * characters or bytes are tokenizer_vocab.c; byte-level BPE is tokenizer_bpe.c.
 *
 * Control tokens (<s>, </s>, <pad>) that a user types never become the control id (SentencePiece:
 * and byte-level BPE: they are ordinary text; XLM's vocabulary: they are dropped, as by its
 * authors), with one exception that lm-evaluation-harness relies on: text that consists of exactly
 * one control token's piece encodes to its id when allow_control is set. Byte-level BPE then finds
 * them anywhere in the text, as its authors' programs do. So does "<eos>" alone where a vocabulary
 * of characters or bytes spells its line feed so, and "<unk>". */
#ifndef ENGINE_TOKENIZER_H
#define ENGINE_TOKENIZER_H

#include "kernels/err.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct tokenizer;

/* Opens the vocabulary of the given kind ("xlm", "word", "char", "byte": tokenizer_vocab.c), which
 * is dir/vocab.txt or, if not NULL, path.
 * Without a kind, the file's content tells what it is: a SentencePiece model, or a file of
 * byte-level BPE. It is path or, if that is NULL, the first of these in dir: a SentencePiece
 * tokenizer.model, tokenizer.json, a rank file tokenizer.model, vocab.json with merges.txt,
 * encoder.json with vocab.bpe. *tokenizer is NULL, without an error, when kind and path are not
 * given and dir has none: such a model takes and returns token ids only. Fails if the number of
 * pieces differs from n_vocab; byte-level BPE may have fewer, since matrices are padded. Owner: the
 * caller. */
enum err_code tokenizer_open(struct tokenizer **tokenizer, const char *dir, const char *path,
                             const char *kind, int n_vocab, struct err *err);
void tokenizer_close(struct tokenizer *tokenizer); /* NULL is fine */

const char *
tokenizer_kind(const struct tokenizer *tokenizer); /* "sentencepiece-unigram", "char" ... */

/* Encodes valid UTF-8 (the caller has checked it; invalid bytes are ERR_ARGUMENT, and so is text
 * that a vocabulary without <unk> cannot spell). *ids is malloc'd and owned by the caller;
 * *offsets, if wanted (may be NULL), holds for each token the byte offset of its first byte in
 * text, same owner; they never fall, and are equal only where normalizing made several tokens of
 * one character. No BOS or EOS is added. text need not end in NUL. */
enum err_code tokenizer_encode(const struct tokenizer *tokenizer, const char *text,
                               size_t text_bytes, bool allow_control, int32_t **ids, size_t *n_ids,
                               size_t **offsets, struct err *err);

/* The piece as the tokenizer's vocabulary spells it ("▁the", "<0x0A>", "</s>"): for display and for
 * matching by name. Valid as long as the tokenizer. id in [0, n_vocab). */
const char *tokenizer_piece(const struct tokenizer *tokenizer, int32_t id);
bool tokenizer_is_control(const struct tokenizer *tokenizer, int32_t id);

/* The bytes that id adds to text at any position but the first or after one that joins (control
 * tokens: none). Writes at most bytes_max and returns the number of bytes it has. */
size_t tokenizer_bytes(const struct tokenizer *tokenizer, int32_t id, char *bytes,
                       size_t bytes_max);
/* Whether what follows id begins without its space: "da@@", a line's end. */
bool tokenizer_joins(const struct tokenizer *tokenizer, int32_t id);
/* Longest of all pieces as it may come out, control tokens as they are spelled. */
size_t tokenizer_bytes_max(const struct tokenizer *tokenizer);

/* Whether the model puts a space in front of each text that is not part of it. */
bool tokenizer_dummy_prefix(const struct tokenizer *tokenizer);

/* Decodes a whole list; *text is malloc'd, NUL-terminated, owned by the caller. Bytes that do
 * not form UTF-8 become U+FFFD. Equals what a detok fed with the same ids gives in total. */
enum err_code tokenizer_decode(const struct tokenizer *tokenizer, const int32_t *ids, size_t n_ids,
                               char **text, size_t *text_bytes, struct err *err);

/* Incremental decoding of one continuation: bytes that do not yet form a character are held back.
 * Plain data, no allocation, copyable. */
struct detok {
    const struct tokenizer *tokenizer; /* Borrowed */
    bool at_start; /* a leading space is dropped: nothing was emitted yet and the model adds one, or
                    * the last token joins the next */
    bool show_control; /* control tokens are spelled out, not left out; set it after detok_begin */
    unsigned char held[4];
    int n_held;
    int n_before; /* characters that the last push gave out and that end before its own first byte:
                   * U+FFFD for bytes that were held and that this token proved wrong */
};

/* at_start: true when the ids decode a text from its beginning; false for a continuation of text
 * that precedes it (the usual case in generation after a prompt). */
void detok_begin(struct detok *detok, const struct tokenizer *tokenizer, bool at_start);
/* After detok_begin, for a continuation: id is the last token of what precedes it. */
void detok_follow(struct detok *detok, int32_t id);
/* Appends the characters completed by id to out (at most out_max bytes, which must be at least
 * tokenizer_bytes_max + 16) and returns their number. */
size_t detok_push(struct detok *detok, int32_t id, char *out, size_t out_max);
/* What is still held back, as U+FFFD characters. */
size_t detok_end(struct detok *detok, char *out, size_t out_max);

#endif
