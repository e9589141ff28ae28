/* Byte-level BPE, the tokenizer of GPT-2, Llama 3 and Qwen, as Hugging Face's package `tokenizers`
 * carries it out: a text becomes ids in four steps.
 *
 *   1. Added tokens that are searched in the text as it came are found (added_tokens.h).
 *   2. What lies between is normalized to NFC, if the file asks for it (nfc.h).
 *   3. In the normalized text the other added tokens are found.
 *   4. What is left is cut into pieces (pretokenizer.h), and each piece is merged (byte_bpe.h).
 *
 * Special tokens that a text spells are ids only where the caller asks for it (parse_special);
 * otherwise they are text like any other, so that nobody forges the end of a text. Decoding is the
 * bytes of the tokens one after the other. */
#include "engine/tokenizer_bpe.h"
#include "engine/nfc.h"
#include "kernels/utf8.h"
#include "engine/vocab.h"
#include "models/file.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const size_t file_bytes_max = (size_t)128 << 20;

/* ---- the byte alphabet --------------------------------------------------------------------- */

/* The bytes that are not printable are three runs: 0 to 32, 127 to 160, and 173. */
enum { SHIFTED = 0x100, N_LOW = 33, MIDDLE = 127, N_MIDDLE = 34, LAST = 173 };

static bool is_printable(uint32_t byte)
{
    return byte >= N_LOW && (byte < MIDDLE || byte >= MIDDLE + N_MIDDLE) && byte != LAST;
}

/* The byte that a character spells, -1 = none. */
static int byte_of(uint32_t code)
{
    if (code < SHIFTED) {
        return is_printable(code) ? (int)code : -1;
    }
    const uint32_t number = code - SHIFTED;
    return number < N_LOW               ? (int)number
           : number < N_LOW + N_MIDDLE  ? (int)(MIDDLE + number - N_LOW)
           : number == N_LOW + N_MIDDLE ? LAST
                                        : -1;
}

static uint32_t code_of(unsigned char byte)
{
    if (is_printable(byte)) {
        return byte;
    }
    return SHIFTED + (byte < N_LOW   ? (uint32_t)byte
                      : byte == LAST ? N_LOW + N_MIDDLE
                                     : (uint32_t)byte - MIDDLE + N_LOW);
}

size_t bpe_bytes(char *out, const char *spelling, size_t spelling_bytes)
{
    size_t n = 0;
    for (size_t at = 0; at < spelling_bytes;) {
        const struct utf8_char c = utf8_next(spelling + at, spelling_bytes - at);
        const int byte = byte_of(c.code);
        if (c.status != UTF8_CHAR || byte < 0) {
            return 0;
        }
        out[n++] = (char)byte;
        at += (size_t)c.bytes;
    }
    return n;
}

size_t bpe_spelling(char *out, const char *bytes, size_t n)
{
    size_t at = 0;
    for (size_t i = 0; i < n; i++) {
        at += (size_t)utf8_write(out + at, code_of((unsigned char)bytes[i]));
    }
    return at;
}

/* ---- encoding ------------------------------------------------------------------------------ */

/* A part of the text, or what became of it when it was normalized. */
struct stretch {
    const char *text;
    size_t bytes;
    size_t base;          /* the place of from[0] in the whole text; if from is NULL, of text */
    const uint32_t *from; /* the source byte of each byte; NULL = its own */
};

struct writer {
    const struct bpe_tokenizer *t;
    struct encoding *out;
    struct err *err;
    struct byte_bpe_scratch scratch;
    struct nfc_text nfc;
};

static size_t offset_of(const struct stretch *s, size_t at)
{
    return s->base + (s->from != NULL ? s->from[at] : at);
}

static struct stretch part_of(const struct stretch *s, size_t first, size_t end)
{
    return (struct stretch){.text = s->text + first,
                            .bytes = end - first,
                            .base = s->from != NULL ? s->base : s->base + first,
                            .from = s->from != NULL ? s->from + first : NULL};
}

static enum err_code put(struct writer *w, int32_t id, size_t offset)
{
    return encoding_push(w->out, id, offset)
               ? ERR_OK
               : err_set(w->err, ERR_MEMORY, "no memory to tokenise the text at byte %zu", offset);
}

static enum err_code put_pieces(struct writer *w, const struct stretch *s)
{
    enum err_code code = ERR_OK;
    for (size_t at = 0; code == ERR_OK && at < s->bytes;) {
        const size_t end = pretokenizer_end(w->t->pretokenizer, s->text, s->bytes, at);
        code = byte_bpe_split(&w->t->bpe, &w->scratch, s->text + at, end - at, w->err);
        for (size_t i = 0; code == ERR_OK && i < w->scratch.n; i++) {
            const struct byte_bpe_part part = w->scratch.part[i];
            code = put(w, part.id, offset_of(s, at + part.first));
        }
        at = end;
    }
    return code;
}

static enum err_code put_normalized(struct writer *w, const struct stretch *s);

/* Finds the added tokens of one kind; the text between them goes to the next step. */
static enum err_code put_added(struct writer *w, const struct stretch *s,
                               const struct added_tokens *tokens,
                               enum err_code (*between)(struct writer *, const struct stretch *))
{
    struct added_search search = {
        .tokens = tokens, .text = s->text, .bytes = s->bytes, .special = w->out->parse_special};
    enum err_code code = ERR_OK;
    size_t begin = 0;
    for (struct added_match match; code == ERR_OK && added_search_next(&search, &match);) {
        if (match.first > begin) {
            const struct stretch part = part_of(s, begin, match.first);
            code = between(w, &part);
        }
        if (code == ERR_OK) {
            code = put(w, match.id, offset_of(s, match.first));
        }
        begin = match.end;
    }
    if (code == ERR_OK && begin < s->bytes) {
        const struct stretch part = part_of(s, begin, s->bytes);
        code = between(w, &part);
    }
    return code;
}

static enum err_code put_normalized(struct writer *w, const struct stretch *s)
{
    struct stretch normal = *s;
    if (w->t->nfc && !nfc_is_stable(s->text, s->bytes)) {
        const enum err_code code = nfc_normalize(&w->nfc, s->text, s->bytes, w->err);
        if (code != ERR_OK) {
            return code;
        }
        normal.text = w->nfc.text;
        normal.bytes = w->nfc.bytes;
        normal.from = w->nfc.from;
    }
    return put_added(w, &normal, &w->t->normalized, put_pieces);
}

static enum err_code encode_bpe(const struct tokenizer *tokenizer, const char *text, size_t bytes,
                                struct encoding *out, struct err *err)
{
    const struct bpe_tokenizer *const t = (const struct bpe_tokenizer *)tokenizer;
    struct writer w = {.t = t, .out = out, .err = err};
    const struct stretch whole = {.text = text, .bytes = bytes};
    const enum err_code code = put_added(&w, &whole, &t->raw, put_normalized);
    byte_bpe_scratch_free(&w.scratch);
    nfc_free(&w.nfc);
    return code;
}

/* ---- filling ------------------------------------------------------------------------------- */

static void close_bpe(struct tokenizer *tokenizer)
{
    struct bpe_tokenizer *const t = (struct bpe_tokenizer *)tokenizer;
    byte_bpe_close(&t->bpe);
    free(t->raw.token);
    free(t->normalized.token);
    free(t->strings);
    free(t);
}

enum err_code bpe_tokenizer_new(struct bpe_tokenizer **tokenizer, int n_vocab, size_t n_word,
                                size_t n_merge, size_t n_added, size_t strings_max,
                                const char *path, struct err *err)
{
    *tokenizer = NULL;
    if (n_word > (size_t)n_vocab || n_merge > MERGES_MAX || n_added > ADDED_TOKENS_MAX) {
        return n_word > (size_t)n_vocab
                   ? err_set(err, ERR_FORMAT,
                             "%s: its number of tokens is %zu, the model's vocab_size is %d: they "
                             "do not belong "
                             "together",
                             path, n_word, n_vocab)
                   : err_set(err, ERR_FORMAT,
                             "%s: has %zu merges and %zu added tokens, the limits are %d and %d",
                             path, n_merge, n_added, (int)MERGES_MAX, (int)ADDED_TOKENS_MAX);
    }
    struct bpe_tokenizer *const t = calloc(1, sizeof *t);
    if (t == NULL) {
        return err_set(err, ERR_MEMORY, "%s: no memory", path);
    }
    *tokenizer = t;
    t->base.encode = encode_bpe;
    t->base.close = close_bpe;
    t->base.maximal_repair = true;
    (void)snprintf(t->base.kind, sizeof t->base.kind, "byte-bpe");
    t->strings = malloc(strings_max + 1);
    t->strings_max = strings_max;
    t->raw.token = calloc(n_added + 1, sizeof *t->raw.token);
    t->normalized.token = calloc(n_added + 1, sizeof *t->normalized.token);
    if (t->strings == NULL || t->raw.token == NULL || t->normalized.token == NULL) {
        return err_set(err, ERR_MEMORY, "%s: no memory for %zu tokens", path, n_word);
    }
    if (tokenizer_reserve(&t->base, n_vocab, err) != ERR_OK ||
        byte_bpe_open(&t->bpe, (int32_t)n_word, (int32_t)n_merge, path, err) != ERR_OK) {
        return ERR_MEMORY;
    }
    for (int32_t id = 0; id < n_vocab; id++) {
        t->base.piece[id].text = t->base.piece[id].bytes = "";
    }
    return ERR_OK;
}

/* Room for a string of so many bytes and a NUL. */
static char *take(struct bpe_tokenizer *t, size_t bytes)
{
    CHECK(t->strings_max - t->n_string > bytes);
    char *const string = t->strings + t->n_string;
    t->n_string += bytes + 1;
    string[bytes] = '\0';
    return string;
}

/* The piece of an id that is not taken, or that is this token already. */
static enum err_code take_id(struct bpe_tokenizer *t, const char *spelling, int64_t id, bool known,
                             const char *path, struct err *err)
{
    if (id < 0 || id >= t->base.n_piece) {
        return err_set(err, ERR_FORMAT,
                       "%s: token \"%.64s\" has the id %lld, the model's vocab_size is %d: they do "
                       "not belong together",
                       path, spelling, (long long)id, t->base.n_piece);
    }
    const char *const there = t->base.piece[id].text;
    if (there[0] != '\0' && !(known && strcmp(there, spelling) == 0)) {
        return err_set(err, ERR_FORMAT, "%s: tokens \"%.64s\" and \"%.64s\" have the same id %lld",
                       path, there, spelling, (long long)id);
    }
    t->n_token = id >= t->n_token ? (int32_t)id + 1 : t->n_token;
    return ERR_OK;
}

/* The text of a token, and its bytes: those that the byte alphabet gives, else the text's own. */
static bool spell(struct bpe_tokenizer *t, const char *text, size_t bytes, int64_t id)
{
    struct piece *const piece = &t->base.piece[id];
    char *const kept = take(t, bytes);
    memcpy(kept, text, bytes);
    char *const plain = take(t, bytes);
    const size_t n = bpe_bytes(plain, text, bytes);
    piece->text = kept;
    piece->bytes = n > 0 ? plain : kept;
    piece->n_byte = (uint32_t)(n > 0 ? n : bytes);
    return n > 0;
}

enum err_code bpe_add_token(struct bpe_tokenizer *t, const char *spelling, int64_t id,
                            const char *path, struct err *err)
{
    const size_t bytes = strlen(spelling);
    if (bytes == 0 || bytes > BYTE_BPE_WORD_MAX) {
        return err_set(err, ERR_FORMAT,
                       "%s: token %lld, \"%.64s\", is spelled in %zu bytes, accepted are 1 to %d",
                       path, (long long)id, spelling, bytes, (int)BYTE_BPE_WORD_MAX);
    }
    const enum err_code code = take_id(t, spelling, id, false, path, err);
    if (code != ERR_OK) {
        return code;
    }
    /* A token that is not spelled in the byte alphabet cannot be made by a merge; it may be an
     * added token. */
    if (spell(t, spelling, bytes, id)) {
        const struct piece *const piece = &t->base.piece[id];
        CHECK(byte_bpe_add(&t->bpe, piece->bytes, piece->n_byte, (int32_t)id));
    }
    return ERR_OK;
}

enum err_code bpe_add_added(struct bpe_tokenizer *t, struct added_token token, bool normalized,
                            const char *path, struct err *err)
{
    if (token.bytes == 0 || token.bytes > ADDED_TOKEN_BYTES_MAX) {
        return err_set(err, ERR_FORMAT,
                       "%s: added token %d, \"%.64s\", has %u bytes, accepted are 1 to %d", path,
                       token.id, token.text, token.bytes, (int)ADDED_TOKEN_BYTES_MAX);
    }
    const enum err_code code = take_id(t, token.text, token.id, true, path, err);
    if (code != ERR_OK) {
        return code;
    }
    struct piece *const piece = &t->base.piece[token.id];
    if (piece->text[0] == '\0') {
        (void)spell(t, token.text, token.bytes, token.id);
    }
    piece->control = token.special;
    token.text = piece->text;
    struct nfc_text normal = {0};
    if (normalized && t->nfc && !nfc_is_stable(token.text, token.bytes)) {
        if (nfc_normalize(&normal, token.text, token.bytes, err) != ERR_OK) {
            return ERR_MEMORY;
        }
        char *const kept = take(t, normal.bytes);
        memcpy(kept, normal.text, normal.bytes);
        token.text = kept;
        token.bytes = (uint32_t)normal.bytes;
        nfc_free(&normal);
    }
    struct added_tokens *const tokens = normalized ? &t->normalized : &t->raw;
    tokens->token[tokens->n++] = token;
    return ERR_OK;
}

/* Rows of the model's matrices that no token has are usual: matrices are padded to a round size.
 * More of them than that speak of another model's tokenizer. */
static int padding_max(int n_vocab)
{
    return n_vocab / 8 > 256 ? n_vocab / 8 : 256;
}

enum err_code bpe_finish(struct bpe_tokenizer *t, const char *path, struct err *err)
{
    const int n_vocab = t->base.n_piece;
    if (n_vocab - t->n_token > padding_max(n_vocab)) {
        return err_set(
            err, ERR_FORMAT,
            "%s: its number of tokens is %d, the model's vocab_size is %d, of which at most %d may "
            "be without a token: they do not belong together",
            path, t->n_token, n_vocab, padding_max(n_vocab));
    }
    for (int byte = 0; byte < 256; byte++) {
        if (t->bpe.byte_id[byte] < 0) {
            const char value = (char)byte;
            char spelling[3] = "";
            spelling[bpe_spelling(spelling, &value, 1)] = '\0';
            return err_set(err, ERR_FORMAT,
                           "%s: the vocabulary has no token for the byte 0x%02x, \"%s\": "
                           "byte-level BPE needs all 256",
                           path, byte, spelling);
        }
    }
    struct added_tokens *const kinds[] = {&t->raw, &t->normalized};
    for (int i = 0; i < 2; i++) {
        const struct added_token *const twice = added_tokens_sort(kinds[i]);
        if (twice != NULL) {
            return err_set(err, ERR_FORMAT, "%s: added token \"%.64s\" is there twice", path,
                           twice->text);
        }
    }
    tokenizer_measure(&t->base);
    return byte_bpe_finish(&t->bpe, err);
}

/* ---- opening ------------------------------------------------------------------------------- */

enum err_code tokenizer_bpe_parse(struct tokenizer **tokenizer, const struct bpe_source *source,
                                  int n_vocab, struct err *err)
{
    struct bpe_tokenizer *t = NULL;
    const enum err_code code = bpe_file_read(&t, source, n_vocab, err);
    *tokenizer = t != NULL ? &t->base : NULL;
    return code;
}

enum bpe_file_kind tokenizer_bpe_kind(const char *path)
{
    char head[2 * BYTE_BPE_WORD_MAX];
    FILE *file = NULL;
    if (file_open(&file, path, true, NULL) != ERR_OK || file == NULL) {
        return BPE_FILE_OTHER; /* who opens it says why */
    }
    const size_t n = fread(head, 1, sizeof head, file);
    (void)fclose(file);
    return bpe_file_kind(head, n);
}

/* Reads the file of merges that belongs to a vocabulary: *text stays NULL if there is none. */
static enum err_code read_merges_file(char **text, size_t *bytes, char path[PATH_MAX],
                                      const char *vocabulary, struct err *err)
{
    const char *const slash = strrchr(vocabulary, '/');
    const char *const name = slash != NULL ? slash + 1 : vocabulary;
    const char *const merges = strcmp(name, "encoder.json") == 0 ? "vocab.bpe" : "merges.txt";
    const int n = snprintf(path, PATH_MAX, "%.*s%s", (int)(name - vocabulary), vocabulary, merges);
    if (n < 0 || n >= PATH_MAX) {
        return err_set(err, ERR_ARGUMENT, "the tokenizer's path is longer than %d bytes",
                       PATH_MAX - 1);
    }
    return file_read(text, bytes, path, file_bytes_max, true, err);
}

enum err_code tokenizer_bpe_open(struct tokenizer **tokenizer, const char *path, int n_vocab,
                                 struct err *err)
{
    *tokenizer = NULL;
    char *text = NULL;
    char *merges = NULL;
    char merges_path[PATH_MAX];
    struct bpe_source source = {.path = path, .merges_path = merges_path};
    enum err_code code = file_read(&text, &source.bytes, path, file_bytes_max, false, err);
    if (code == ERR_OK) {
        code = read_merges_file(&merges, &source.merges_bytes, merges_path, path, err);
    }
    if (code == ERR_OK) {
        source.text = text;
        source.merges = merges;
        code = tokenizer_bpe_parse(tokenizer, &source, n_vocab, err);
    }
    free(text);
    free(merges);
    return code;
}
