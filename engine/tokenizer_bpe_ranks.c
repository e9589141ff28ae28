/* tiktoken's rank files as byte-level BPE: a token in base64 and its rank in each line. Llama 3's
 * is called tokenizer.model. The rank is the id, and says what is merged: there is no list of
 * merges (byte_bpe.h). The file has neither a pattern nor special tokens; Llama 3's are taken. */
#include "engine/tokenizer_bpe.h"

#include <string.h>

size_t bpe_count_lines(const char *text, size_t bytes)
{
    size_t n = bytes > 0 && text[bytes - 1] != '\n' ? 1 : 0;
    for (size_t i = 0; i < bytes; i++) {
        n += text[i] == '\n';
    }
    return n;
}

/* The value of a character of base64, -1 = it is none. */
static int sextet_of(char c)
{
    return c >= 'A' && c <= 'Z'   ? c - 'A'
           : c >= 'a' && c <= 'z' ? c - 'a' + 26
           : c >= '0' && c <= '9' ? c - '0' + 52
           : c == '+'             ? 62
           : c == '/'             ? 63
                                  : -1;
}

/* Decodes n characters of base64, padded to a multiple of four; returns the bytes, 0 = wrong. */
static size_t base64_bytes(char *out, const char *text, size_t n)
{
    size_t used = n;
    while (used > 0 && n - used < 2 && text[used - 1] == '=') {
        used--;
    }
    uint32_t bits = 0;
    size_t n_out = 0;
    for (size_t i = 0; i < used; i++) {
        const int value = sextet_of(text[i]);
        if (value < 0) {
            return 0;
        }
        bits = bits << 6 | (uint32_t)value;
        if (i % 4 != 0) {
            out[n_out++] = (char)(bits >> (6 - 2 * (i % 4)));
        }
    }
    return n % 4 == 0 && used % 4 != 1 ? n_out : 0;
}

/* "base64 rank" in text[0 .. bytes). */
static bool read_rank(const char *text, size_t bytes, char *token, size_t *n_token, int64_t *rank)
{
    const char *const space = memchr(text, ' ', bytes);
    const size_t n = space != NULL ? (size_t)(space - text) : 0;
    *rank = 0;
    if (n == 0 || n + 1 == bytes || bytes - n > 11 || n > 4 * ((BYTE_BPE_WORD_MAX / 2 + 2) / 3)) {
        return false;
    }
    for (size_t i = n + 1; i < bytes; i++) {
        if (text[i] < '0' || text[i] > '9') {
            return false;
        }
        *rank = 10 * *rank + (text[i] - '0');
    }
    *n_token = base64_bytes(token, text, n);
    return *n_token > 0;
}

/* Llama 3 numbers 256 special tokens behind the ranks, which no file names. These five are the same
 * in all its versions; the others have no text here. */
static enum err_code add_llama_tokens(struct bpe_tokenizer *t, int n_rank, const char *path,
                                      struct err *err)
{
    static const struct {
        int place;
        const char *text;
    } known[] = {{0, "<|begin_of_text|>"},
                 {1, "<|end_of_text|>"},
                 {6, "<|start_header_id|>"},
                 {7, "<|end_header_id|>"},
                 {9, "<|eot_id|>"}};
    enum err_code code = ERR_OK;
    for (size_t i = 0; code == ERR_OK && i < sizeof known / sizeof known[0]; i++) {
        const struct added_token token = {.text = known[i].text,
                                          .bytes = (uint32_t)strlen(known[i].text),
                                          .id = n_rank + known[i].place,
                                          .special = true};
        code = bpe_add_added(t, token, false, path, err);
    }
    return code;
}

enum err_code bpe_ranks_read(struct bpe_tokenizer **t, const struct bpe_source *source, int n_vocab,
                             struct err *err)
{
    const char *const path = source->path;
    const size_t n_line = bpe_count_lines(source->text, source->bytes);
    /* A byte is at most two bytes in the alphabet, and its own; base64 has more than one for it. */
    enum { LLAMA_SPECIAL = 256 };
    if (bpe_tokenizer_new(t, n_vocab, n_line, 0, LLAMA_SPECIAL,
                          4 * source->bytes + LLAMA_SPECIAL * 64, path, err) != ERR_OK) {
        return err->code;
    }
    (*t)->pretokenizer = PRETOKENIZER_LLAMA3;
    (*t)->bpe.ranked = (*t)->bpe.ignore_merges = true;
    for (size_t at = 0, line = 1; at < source->bytes; line++) {
        const char *const newline = memchr(source->text + at, '\n', source->bytes - at);
        const size_t end = newline != NULL ? (size_t)(newline - source->text) : source->bytes;
        char token[BYTE_BPE_WORD_MAX];
        char spelling[2 * BYTE_BPE_WORD_MAX + 1];
        size_t n = 0;
        int64_t rank = 0;
        if (!read_rank(source->text + at, end - at, token, &n, &rank) || rank >= (int64_t)n_line) {
            return err_set(
                err, ERR_FORMAT,
                "%s: line %zu is not a token in base64, a space and a rank below the %zu "
                "of the lines",
                path, line, n_line);
        }
        spelling[bpe_spelling(spelling, token, n)] = '\0';
        if (byte_bpe_find(&(*t)->bpe, token, n) >= 0) {
            return err_set(err, ERR_FORMAT, "%s: line %zu repeats a token", path, line);
        }
        if (bpe_add_token(*t, spelling, rank, path, err) != ERR_OK) {
            return err->code;
        }
        at = end + 1;
    }
    if ((size_t)n_vocab == n_line + LLAMA_SPECIAL &&
        add_llama_tokens(*t, (int)n_line, path, err) != ERR_OK) {
        return err->code;
    }
    return bpe_finish(*t, path, err);
}

bool bpe_ranks_begin(const char *text, size_t bytes)
{
    const char *const newline = memchr(text, '\n', bytes);
    const size_t end = newline != NULL ? (size_t)(newline - text) : bytes;
    char token[BYTE_BPE_WORD_MAX];
    size_t n = 0;
    int64_t rank = 0;
    return read_rank(text, end, token, &n, &rank);
}
