/* What all kinds of tokenizer have in common; see tokenizer.h and tokenizer_impl.h. */
#include "engine/tokenizer_impl.h"
#include "kernels/utf8.h"
#include "models/file.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const size_t text_bytes_max = (size_t)256 << 20;

/* The file of dir that text is read with. A SentencePiece model comes first, since tokenizer.json
 * beside it is only a translation of it; tokenizer.json comes before a rank file, since it has the
 * special tokens too. */
static enum err_code find_file(char path[PATH_MAX], const char *dir, struct err *err)
{
    static const char *const names[] = {"tokenizer.model", "tokenizer.json", "tokenizer.model",
                                        "vocab.json", "encoder.json"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        if (file_path(path, dir, names[i], err) != ERR_OK) {
            return ERR_ARGUMENT;
        }
        const bool ranks = i == 0 && tokenizer_bpe_kind(path) == BPE_FILE_RANKS;
        if (file_exists(path) && !ranks) {
            return ERR_OK;
        }
    }
    return file_path(path, dir, names[0], err);
}

enum err_code tokenizer_open(struct tokenizer **tokenizer, const char *dir, const char *path,
                             const char *kind, int n_vocab, struct err *err)
{
    *tokenizer = NULL;
    const bool is_list = kind != NULL && kind[0] != '\0';
    char found[PATH_MAX];
    const char *file = path;
    if (path == NULL) {
        const enum err_code code =
            is_list ? file_path(found, dir, "vocab.txt", err) : find_file(found, dir, err);
        if (code != ERR_OK) {
            return code;
        }
        file = found;
    }
    if (is_list) {
        return tokenizer_vocab_open(tokenizer, file, kind, n_vocab, err);
    }
    const size_t n = strlen(file);
    const bool is_json = n >= 5 && strcmp(file + n - 5, ".json") == 0;
    return is_json || tokenizer_bpe_kind(file) != BPE_FILE_OTHER
               ? tokenizer_bpe_open(tokenizer, file, n_vocab, err)
               : tokenizer_spm_open(tokenizer, file, path != NULL, n_vocab, err);
}

void tokenizer_close(struct tokenizer *tokenizer)
{
    if (tokenizer != NULL) {
        free(tokenizer->piece);
        tokenizer->close(tokenizer);
    }
}

/* ---- pieces -------------------------------------------------------------------------------- */

enum err_code tokenizer_reserve(struct tokenizer *tokenizer, int n_piece, struct err *err)
{
    tokenizer->piece = calloc((size_t)n_piece, sizeof *tokenizer->piece);
    tokenizer->n_piece = n_piece;
    return tokenizer->piece != NULL
               ? ERR_OK
               : err_set(err, ERR_MEMORY, "no memory for a vocabulary of %d pieces", n_piece);
}

void tokenizer_measure(struct tokenizer *tokenizer)
{
    for (int32_t id = 0; id < tokenizer->n_piece; id++) {
        const struct piece *const piece = &tokenizer->piece[id];
        /* Bytes that are no characters come out as U+FFFD: three for one, at most. */
        const bool valid = utf8_valid_prefix(piece->bytes, piece->n_byte) == piece->n_byte;
        const size_t bytes = piece->control
                                 ? strlen(piece->text)
                                 : (valid ? 1u : 3u) * piece->n_byte + (piece->space ? 1u : 0u);
        tokenizer->bytes_max = bytes > tokenizer->bytes_max ? bytes : tokenizer->bytes_max;
    }
}

static const struct piece *piece_at(const struct tokenizer *tokenizer, int32_t id)
{
    CHECK(id >= 0 && id < tokenizer->n_piece);
    return &tokenizer->piece[id];
}

const char *tokenizer_kind(const struct tokenizer *tokenizer)
{
    return tokenizer->kind;
}

const char *tokenizer_piece(const struct tokenizer *tokenizer, int32_t id)
{
    return piece_at(tokenizer, id)->text;
}

bool tokenizer_is_control(const struct tokenizer *tokenizer, int32_t id)
{
    return piece_at(tokenizer, id)->control;
}

bool tokenizer_joins(const struct tokenizer *tokenizer, int32_t id)
{
    return piece_at(tokenizer, id)->joins;
}

size_t tokenizer_bytes(const struct tokenizer *tokenizer, int32_t id, char *bytes, size_t bytes_max)
{
    const struct piece *const piece = piece_at(tokenizer, id);
    if (piece->control) {
        return 0;
    }
    const size_t space = piece->space ? 1 : 0;
    for (size_t i = 0; i < space && i < bytes_max; i++) {
        bytes[i] = ' ';
    }
    const size_t room = bytes_max > space ? bytes_max - space : 0;
    if (room > 0) {
        memcpy(bytes + space, piece->bytes, piece->n_byte < room ? piece->n_byte : room);
    }
    return space + piece->n_byte;
}

size_t tokenizer_bytes_max(const struct tokenizer *tokenizer)
{
    return tokenizer->bytes_max;
}

bool tokenizer_dummy_prefix(const struct tokenizer *tokenizer)
{
    return tokenizer->dummy_prefix;
}

/* ---- encoding ------------------------------------------------------------------------------ */

bool encoding_push(struct encoding *encoding, int32_t id, size_t offset)
{
    if (encoding->n == encoding->max) {
        const size_t max = encoding->max > 0 ? 2 * encoding->max : 64;
        int32_t *const ids = realloc(encoding->id, max * sizeof *ids);
        if (ids == NULL) {
            return false;
        }
        encoding->id = ids;
        size_t *const offsets = realloc(encoding->offset, max * sizeof *offsets);
        if (offsets == NULL) {
            return false;
        }
        encoding->offset = offsets;
        encoding->max = max;
    }
    encoding->id[encoding->n] = id;
    encoding->offset[encoding->n++] = offset;
    return true;
}

/* The piece with a name of its own that text consists of, or -1. */
static int32_t named_of(const struct tokenizer *tokenizer, const char *text, size_t bytes)
{
    for (int32_t id = 0; id < tokenizer->n_piece; id++) {
        const struct piece *const piece = &tokenizer->piece[id];
        if ((piece->control || piece->named) && strlen(piece->text) == bytes &&
            memcmp(piece->text, text, bytes) == 0) {
            return id;
        }
    }
    return -1;
}

static enum err_code encode(const struct tokenizer *tokenizer, const char *text, size_t bytes,
                            bool allow_control, struct encoding *out, struct err *err)
{
    if (bytes > text_bytes_max) {
        return err_set(err, ERR_ARGUMENT, "the text has %zu bytes, the limit is %zu", bytes,
                       text_bytes_max);
    }
    const size_t valid = utf8_valid_prefix(text, bytes);
    if (valid != bytes) {
        return err_set(err, ERR_ARGUMENT, "the text is not valid UTF-8 at byte %zu", valid);
    }
    /* Never zero bytes: the arrays exist even if they stay empty. */
    const int32_t named = allow_control ? named_of(tokenizer, text, bytes) : -1;
    if (!encoding_push(out, named, 0)) {
        return err_set(err, ERR_MEMORY, "no memory to tokenise %zu bytes", bytes);
    }
    if (named >= 0) {
        return ERR_OK;
    }
    out->n = 0;
    out->parse_special = allow_control;
    return tokenizer->encode(tokenizer, text, bytes, out, err);
}

enum err_code tokenizer_encode(const struct tokenizer *tokenizer, const char *text,
                               size_t text_bytes, bool allow_control, int32_t **ids, size_t *n_ids,
                               size_t **offsets, struct err *err)
{
    struct encoding out = {0};
    const enum err_code code = encode(tokenizer, text, text_bytes, allow_control, &out, err);
    const bool good = code == ERR_OK;
    if (!good || offsets == NULL) {
        free(out.offset);
        out.offset = NULL;
    }
    if (!good) {
        free(out.id);
    }
    *ids = good ? out.id : NULL;
    *n_ids = good ? out.n : 0;
    if (offsets != NULL) {
        *offsets = out.offset;
    }
    return code;
}
