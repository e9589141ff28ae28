/* See vocab.h. */
#include "engine/vocab.h"
#include "kernels/utf8.h"

#include <stdlib.h>
#include <string.h>

/* ---- its words ----------------------------------------------------------------------------- */

static enum err_code check_word(const char *word, size_t bytes, const char *path, int line,
                                struct err *err)
{
    if (bytes == 0) {
        return err_set(err, ERR_FORMAT, "%s: line %d is empty: each line is the word of an id",
                       path, line);
    }
    if (bytes > VOCAB_WORD_BYTES_MAX) {
        return err_set(err, ERR_FORMAT, "%s: line %d has %zu bytes, the limit of a word is %d",
                       path, line, bytes, (int)VOCAB_WORD_BYTES_MAX);
    }
    if (memchr(word, '\0', bytes) != NULL || memchr(word, '\r', bytes) != NULL) {
        return err_set(err, ERR_FORMAT,
                       "%s: line %d holds a NUL or a carriage return: lines end with a newline "
                       "alone",
                       path, line);
    }
    if (utf8_valid_prefix(word, bytes) != bytes) {
        return err_set(err, ERR_FORMAT, "%s: line %d is not valid UTF-8", path, line);
    }
    return ERR_OK;
}

static enum err_code parse_lines(struct vocab *vocab, size_t bytes, const char *path,
                                 struct err *err)
{
    char *at = vocab->text;
    const char *const end = at + bytes;
    for (int line = 1; at < end; line++) {
        char *const newline = memchr(at, '\n', (size_t)(end - at));
        const size_t n = newline != NULL ? (size_t)(newline - at) : (size_t)(end - at);
        const enum err_code code = check_word(at, n, path, line, err);
        if (code != ERR_OK) {
            return code;
        }
        const int32_t id = word_table_add(&vocab->table, at, n);
        if (id != line - 1) {
            return err_set(err, ERR_FORMAT, "%s: line %d repeats line %d: a word has one id", path,
                           line, id + 1);
        }
        at[n] = '\0';
        at += n + 1;
    }
    return ERR_OK;
}

enum err_code vocab_parse(struct vocab *vocab, char *text, size_t bytes, const char *path,
                          int n_word, struct err *err)
{
    *vocab = (struct vocab){.text = text};
    int64_t n_line = bytes > 0 && text[bytes - 1] != '\n' ? 1 : 0;
    for (size_t i = 0; i < bytes; i++) {
        n_line += text[i] == '\n';
    }
    enum err_code code = ERR_OK;
    if (n_line != n_word) {
        code = err_set(
            err, ERR_FORMAT,
            "%s: its number of lines is %lld, the model's vocab_size is %d: they do not belong "
            "together",
            path, (long long)n_line, n_word);
    } else {
        code = word_table_open(&vocab->table, n_word, path, err);
    }
    if (code == ERR_OK) {
        code = parse_lines(vocab, bytes, path, err);
    }
    if (code != ERR_OK) {
        vocab_close(vocab);
    }
    return code;
}

void vocab_close(struct vocab *vocab)
{
    word_table_close(&vocab->table);
    free(vocab->text);
    *vocab = (struct vocab){0};
}
