/* Tokenizers that are a list of words (vocab.h), as the authors' programs read text with them.
 *
 *   xlm   words between white space, of which those that end in "@@" continue in the next one; a
 *         line's end is </s>. The text is split with BPE already, or, if the file "codes" lies
 *         beside the vocabulary, plain words are split here (bpe.h). A special word in the text
 *         (<s>, </s>, <pad>, <special0> to <special9>) is dropped.
 *   word  words between white space; a line's end is <eos>
 *   char  one token per character; a space is "_", a line feed <eos>
 *   byte  one token per byte, spelled as its decimal number; a line feed is <eos>, or 10 in a
 *         vocabulary without <eos>. Special words are ids that no text has.
 *
 * What the vocabulary lacks is its <unk>, or an error if it has none. White space belongs to the
 * word after it, so that the offsets of the tokens cut a text without gaps; one space comes back
 * from it. */
#include "engine/bpe.h"
#include "engine/tokenizer_impl.h"
#include "engine/vocab.h"
#include "engine/whitespace.h"
#include "models/file.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { KIND_XLM, KIND_WORD, KIND_CHAR, KIND_BYTE, N_KIND };
static const char *const kind_names[N_KIND] = {"xlm", "word", "char", "byte"};

static const size_t vocab_bytes_max = (size_t)1 << 30;
static const size_t codes_bytes_max = (size_t)256 << 20;

struct vocab_tokenizer {
    struct tokenizer base;
    int kind;
    struct vocab vocab;
    struct bpe *bpe;      /* NULL = words are not split */
    int32_t eos_id;       /* of a line's end; -1 = the vocabulary has none */
    int32_t unk_id;       /* the same */
    int32_t byte_id[256]; /* KIND_BYTE */
    char byte[256];       /* each byte: the text of its token */
};

/* ---- encoding ------------------------------------------------------------------------------ */

/* What an encoding carries from token to token. */
struct writer {
    const struct vocab_tokenizer *t;
    const char *text;
    struct encoding *out;
    size_t begin; /* of the next token: the end of the last one */
    struct bpe_scratch scratch;
    struct err *err;
};

/* The token id, text[first .. end), or <unk> in its place. */
static enum err_code put(struct writer *w, int32_t id, size_t first, size_t end)
{
    if (id < 0 && w->t->unk_id < 0) {
        const size_t n = end - first < 64 ? end - first : 64;
        const int shown = (int)utf8_valid_prefix(w->text + first, n);
        return err_set(w->err, ERR_ARGUMENT,
                       "the vocabulary has no token for \"%.*s\" at byte %zu of the text, and no "
                       "<unk>",
                       shown, w->text + first, first);
    }
    if (!encoding_push(w->out, id < 0 ? w->t->unk_id : id, w->begin)) {
        return err_set(w->err, ERR_MEMORY, "no memory to tokenise the text at byte %zu", first);
    }
    w->begin = end;
    return ERR_OK;
}

/* A word, or a piece of one that goes on in the next piece. */
static enum err_code put_word(struct writer *w, size_t first, size_t end, bool goes_on)
{
    const int32_t id =
        word_table_find(&w->t->vocab.table, w->text + first, end - first, goes_on ? "@@" : "");
    return id >= 0 && w->t->base.piece[id].control ? ERR_OK : put(w, id, first, end);
}

static enum err_code put_pieces(struct writer *w, size_t first, size_t end)
{
    enum err_code code = bpe_split(w->t->bpe, &w->scratch, w->text + first, end - first, w->err);
    size_t from = first;
    for (size_t i = 0; code == ERR_OK && i < w->scratch.n_piece; i++) {
        const size_t to = first + w->scratch.end[i];
        code = put_word(w, from, to, to < end);
        from = to;
    }
    return code;
}

static enum err_code encode_words(const struct tokenizer *tokenizer, const char *text, size_t bytes,
                                  struct encoding *out, struct err *err)
{
    const struct vocab_tokenizer *const t = (const struct vocab_tokenizer *)tokenizer;
    struct writer w = {.t = t, .text = text, .out = out, .err = err};
    struct whitespace_word word = {0};
    enum err_code code = ERR_OK;
    for (size_t at = 0; code == ERR_OK && whitespace_next(text, bytes, &at, &word);) {
        code = word.is_line_end ? put(&w, t->eos_id, word.first, word.end)
               : t->bpe != NULL ? put_pieces(&w, word.first, word.end)
                                : put_word(&w, word.first, word.end, false);
    }
    bpe_scratch_free(&w.scratch);
    return code;
}

static enum err_code encode_chars(const struct tokenizer *tokenizer, const char *text, size_t bytes,
                                  struct encoding *out, struct err *err)
{
    const struct vocab_tokenizer *const t = (const struct vocab_tokenizer *)tokenizer;
    struct writer w = {.t = t, .text = text, .out = out, .err = err};
    enum err_code code = ERR_OK;
    for (size_t at = 0; code == ERR_OK && at < bytes;) {
        const size_t end = at + (size_t)utf8_next(text + at, bytes - at).bytes;
        const bool is_space = text[at] == ' ';
        const int32_t id =
            text[at] == '\n'
                ? t->eos_id
                : word_table_find(&t->vocab.table, is_space ? "_" : text + at, end - at, "");
        code = put(&w, id, at, end);
        at = end;
    }
    return code;
}

static enum err_code encode_bytes(const struct tokenizer *tokenizer, const char *text, size_t bytes,
                                  struct encoding *out, struct err *err)
{
    const struct vocab_tokenizer *const t = (const struct vocab_tokenizer *)tokenizer;
    struct writer w = {.t = t, .text = text, .out = out, .err = err};
    enum err_code code = ERR_OK;
    for (size_t at = 0; code == ERR_OK && at < bytes; at++) {
        code = put(&w, t->byte_id[(unsigned char)text[at]], at, at + 1);
    }
    return code;
}

/* ---- pieces -------------------------------------------------------------------------------- */

static bool is_special(const char *word)
{
    return strcmp(word, "<s>") == 0 || strcmp(word, "</s>") == 0 || strcmp(word, "<pad>") == 0 ||
           (strncmp(word, "<special", 8) == 0 && word[8] >= '0' && word[8] <= '9' &&
            strcmp(word + 9, ">") == 0);
}

static void fill_word(struct vocab_tokenizer *t, struct piece *piece, uint32_t bytes)
{
    const bool goes_on =
        t->kind == KIND_XLM && bytes >= 2 && memcmp(piece->text + bytes - 2, "@@", 2) == 0;
    piece->control = t->kind != KIND_WORD && is_special(piece->text);
    piece->space = !piece->control;
    piece->joins = goes_on;
    piece->bytes = piece->text;
    piece->n_byte = piece->control ? 0 : bytes - (goes_on ? 2 : 0);
}

static bool fill_char(struct piece *piece, uint32_t bytes)
{
    piece->bytes = strcmp(piece->text, "_") == 0 ? " " : piece->text;
    piece->n_byte = bytes;
    return (uint32_t)utf8_next(piece->text, bytes).bytes == bytes;
}

/* A decimal number without a leading zero; not that of the line feed where that is <eos>. */
static bool fill_byte(struct vocab_tokenizer *t, struct piece *piece, uint32_t bytes, int32_t id)
{
    int value = 0;
    for (uint32_t i = 0; i < bytes; i++) {
        const char c = piece->text[i];
        if (c < '0' || c > '9' || i >= 3 || (i > 0 && value == 0)) {
            return false;
        }
        value = 10 * value + (c - '0');
    }
    if (value > 255 || (value == '\n' && t->eos_id >= 0)) {
        return false;
    }
    t->byte_id[value] = id;
    t->byte[value] = (char)value;
    piece->bytes = &t->byte[value];
    piece->n_byte = 1;
    return true;
}

static enum err_code fill_pieces(struct vocab_tokenizer *t, const char *path, struct err *err)
{
    static const char *const wanted[N_KIND] = {
        [KIND_CHAR] = "one character",
        [KIND_BYTE] =
            "a byte's number, 0 to 255 (10 where there is no <eos>), or <s>, </s>, <pad>"};
    for (int32_t id = 0; id < t->base.n_piece; id++) {
        struct piece *const piece = &t->base.piece[id];
        const struct word_entry word = t->vocab.table.word[id];
        piece->text = word.text;
        bool good = true;
        if (t->kind != KIND_XLM && id == t->eos_id) {
            *piece = (struct piece){.text = word.text, .bytes = "\n", .n_byte = 1};
            piece->joins = t->base.dummy_prefix;
        } else if (t->kind == KIND_XLM || t->kind == KIND_WORD || id == t->unk_id ||
                   (t->kind == KIND_BYTE && is_special(word.text))) {
            fill_word(t, piece, word.bytes);
            piece->space = piece->space && t->base.dummy_prefix;
        } else {
            good = t->kind == KIND_CHAR ? fill_char(piece, word.bytes)
                                        : fill_byte(t, piece, word.bytes, id);
        }
        piece->named =
            (t->kind == KIND_CHAR || t->kind == KIND_BYTE) && (id == t->eos_id || id == t->unk_id);
        if (!good) {
            return err_set(err, ERR_FORMAT,
                           "%s: line %d is \"%.32s\": expected is <eos>, <unk> or %s", path, id + 1,
                           word.text, wanted[t->kind]);
        }
    }
    tokenizer_measure(&t->base);
    return ERR_OK;
}

/* ---- opening ------------------------------------------------------------------------------- */

static void close_vocab(struct tokenizer *tokenizer)
{
    struct vocab_tokenizer *const t = (struct vocab_tokenizer *)tokenizer;
    vocab_close(&t->vocab);
    bpe_close(t->bpe);
    free(t);
}

/* The words with a meaning of their own: XLM's stand at their places, the others' are optional. */
static enum err_code find_specials(struct vocab_tokenizer *t, const char *path, struct err *err)
{
    static const char *const due[] = {"<s>", "</s>", "<pad>", "<unk>"};
    for (int i = 0; t->kind == KIND_XLM && i < 4; i++) {
        const struct word_entry *const word = &t->vocab.table.word[i];
        if (i >= t->vocab.table.n || strcmp(word->text, due[i]) != 0) {
            return err_set(err, ERR_FORMAT,
                           "%s: line %d is \"%.32s\": a vocabulary of XLM begins with <s> </s> "
                           "<pad> <unk>",
                           path, i + 1, i < t->vocab.table.n ? word->text : "");
        }
    }
    t->unk_id = word_table_find(&t->vocab.table, "<unk>", 5, "");
    t->eos_id = t->kind == KIND_XLM ? 1 : word_table_find(&t->vocab.table, "<eos>", 5, "");
    for (int i = 0; i < 256; i++) {
        t->byte_id[i] = i == '\n' ? t->eos_id : -1;
    }
    return ERR_OK;
}

static enum err_code fill(struct vocab_tokenizer *t, const char *path, struct err *err)
{
    static enum err_code (*const encode[N_KIND])(const struct tokenizer *, const char *, size_t,
                                                 struct encoding *, struct err *) = {
        encode_words, encode_words, encode_chars, encode_bytes};
    t->base.encode = encode[t->kind];
    t->base.dummy_prefix = t->kind == KIND_XLM || t->kind == KIND_WORD;
    (void)snprintf(t->base.kind, sizeof t->base.kind, "%s%s", kind_names[t->kind],
                   t->bpe != NULL ? "-bpe" : "");
    const enum err_code code = find_specials(t, path, err);
    if (code != ERR_OK || tokenizer_reserve(&t->base, t->vocab.table.n, err) != ERR_OK) {
        return code != ERR_OK ? code : ERR_MEMORY;
    }
    return fill_pieces(t, path, err);
}

/* The files' texts under their names, for messages. */
struct source {
    char *text;
    size_t bytes;
    const char *path;
};

/* Takes both texts. */
static enum err_code parse(struct tokenizer **tokenizer, const char *kind, struct source vocabulary,
                           struct source codes, int n_vocab, struct err *err)
{
    *tokenizer = NULL;
    struct vocab_tokenizer *const t = calloc(1, sizeof *t);
    if (t == NULL) {
        free(vocabulary.text);
        free(codes.text);
        return err_set(err, ERR_MEMORY, "%s: no memory", vocabulary.path);
    }
    t->base.close = close_vocab;
    while (t->kind < N_KIND && strcmp(kind, kind_names[t->kind]) != 0) {
        t->kind++;
    }
    CHECK(t->kind < N_KIND); /* models/config.c knows these names only */
    enum err_code code =
        codes.text != NULL ? bpe_parse(&t->bpe, codes.text, codes.bytes, codes.path, err) : ERR_OK;
    if (code == ERR_OK) {
        code = vocab_parse(&t->vocab, vocabulary.text, vocabulary.bytes, vocabulary.path, n_vocab,
                           err);
    } else {
        free(vocabulary.text);
    }
    if (code == ERR_OK) {
        code = fill(t, vocabulary.path, err);
    }
    if (code != ERR_OK) {
        tokenizer_close(&t->base);
        return code;
    }
    *tokenizer = &t->base;
    return ERR_OK;
}

enum err_code tokenizer_vocab_parse(struct tokenizer **tokenizer, const char *kind,
                                    char *vocabulary, size_t vocabulary_bytes, char *codes,
                                    size_t codes_bytes, int n_vocab, struct err *err)
{
    return parse(tokenizer, kind, (struct source){vocabulary, vocabulary_bytes, "vocab.txt"},
                 (struct source){codes, codes_bytes, "codes"}, n_vocab, err);
}

enum err_code tokenizer_vocab_open(struct tokenizer **tokenizer, const char *path, const char *kind,
                                   int n_vocab, struct err *err)
{
    *tokenizer = NULL;
    const char *const slash = strrchr(path, '/');
    const int n_dir = slash != NULL ? (int)(slash + 1 - path) : 0;
    char codes_path[PATH_MAX];
    const int n = snprintf(codes_path, sizeof codes_path, "%.*scodes", n_dir, path);
    if (n < 0 || (size_t)n >= sizeof codes_path) {
        return err_set(err, ERR_ARGUMENT, "the tokenizer's path is longer than %d bytes",
                       PATH_MAX - 1);
    }
    struct source vocabulary = {.path = path};
    struct source codes = {.path = codes_path};
    enum err_code code =
        file_read(&vocabulary.text, &vocabulary.bytes, path, vocab_bytes_max, false, err);
    if (code == ERR_OK && strcmp(kind, kind_names[KIND_XLM]) == 0) {
        code = file_read(&codes.text, &codes.bytes, codes_path, codes_bytes_max, true, err);
    }
    if (code != ERR_OK) {
        free(vocabulary.text);
        return code;
    }
    return parse(tokenizer, kind, vocabulary, codes, n_vocab, err);
}
